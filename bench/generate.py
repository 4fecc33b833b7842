"""How fast a small LLaMA writes: Regard against llama.cpp and transformers, on equal weights.

    python bench/generate.py [FOLDER] [--llama other/bin/python] [--tokens 200] [--quick]

FOLDER holds a LLaMA in the Hugging Face layout (bench/stories_weights.py makes stories15M); without
one, a random model of its size (6 layers, 6 heads, width 288, 32,000 tokens) is made. All write
greedily after the same prompts of different lengths, with `--threads` threads. `--llama`, or
REGARD_LLAMA_PYTHON, is an interpreter with llama-cpp-python and gguf, which live in an environment
of their own; without it llama.cpp is left out. It is asked by its own batch interface
(bench/llama_cpp_peer.py), in F32 and in Q8_0, to which our float32 and int8 are compared; in
float32 the same tokens must come out. Each runs in a process of its own, and takes a turn in each
round. Speeds are medians by the wall clock, or with `--by cpu` by the processor's time, which other
work on the machine disturbs less (one thread is best then: threads that wait for each other use it
up). A ratio above 1 means that Regard is faster. Also told: how many of the multiply-adds that the
cores could do are done, and how many bytes of weights are read a second.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from apart import Act, Peer, machine  # noqa: E402
from decode_translation import peaks  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import (  # noqa: E402
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from regard.decode.constraints import Constraints  # noqa: E402
from regard.decode.decoder import decode  # noqa: E402
from regard.decode.options import Decoding  # noqa: E402
from regard.native import fast  # noqa: E402
from regard.native.allocator import reuse_memory  # noqa: E402
from regard.pretrained.folder import import_folder  # noqa: E402

PROMPT = 16  # tokens, the shortest
NO_WORDS = SimpleNamespace(vocab=0)  # prompts are numbers here


def random_llama(folder: Path) -> None:
    """Write a LLaMA of the size of stories15M, with weights so large that it is sure of itself."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=288,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.06,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


# wall seconds, seconds of the processor, and the tokens after each text
Told = tuple[float, float, list[list[int]]]
Write = Callable[[list[list[int]], int], Told]


def timed(write: Write | Callable[[Tensor, Tensor, int], list[list[int]]]) -> Act:
    """What writes after texts, and tells how long it took."""

    def act(texts: list[list[int]], tokens: int) -> Told:
        ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = torch.tensor(text)
        lengths = torch.tensor([len(text) for text in texts])
        start, used = time.perf_counter(), time.process_time()
        written: Any = write(ids, lengths, tokens)  # type: ignore[call-arg]
        return time.perf_counter() - start, time.process_time() - used, written

    return act


def by_regard(folder: Path, kind: str) -> Act:
    """Make what Regard does in its process."""
    reuse_memory()  # as `regard run` does
    model: Any = import_folder(folder, read=lambda folder: (NO_WORDS, NO_WORDS))[0]
    dtype, kept = getattr(torch, kind), {}

    def write(ids: Tensor, lengths: Tensor, tokens: int) -> list[list[int]]:
        last = ids[torch.arange(len(ids)), lengths - 1]
        with fast(model, frozen=True, dtype=dtype, kept=kept):  # as `regard run` does
            constraints = Constraints(max_length=tokens, begin=last, eos=-1)
            found = decode(model, ids, lengths, Decoding(beam=1), constraints)
        return [one.ids for (one,) in found]

    return timed(write)


def by_transformers(folder: Path) -> Act:
    """Make what transformers does in its process."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def write(ids: Tensor, lengths: Tensor, tokens: int) -> list[list[int]]:
        padded = torch.zeros_like(ids)  # theirs wants the padding on the left
        for i, n in enumerate(lengths.tolist()):
            padded[i, -n:] = ids[i, :n]
        seen = torch.arange(ids.shape[1]).flip(0) < lengths.unsqueeze(1)
        out = model.generate(
            padded,
            attention_mask=seen.long(),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        return out[:, padded.shape[1] :].tolist()

    return timed(write)


class LlamaCpp:
    """A process of llama.cpp, in an environment of its own."""

    def __init__(self, python: str, folder: Path, kind: str, threads: int):
        words = [python, str(HERE / "llama_cpp_peer.py"), str(folder), kind, str(threads)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)
        self.version = self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("llama.cpp ended; does this interpreter have llama-cpp-python, gguf?")
        return json.loads(line)

    def ask(self, texts: list[list[int]], tokens: int) -> Told:
        """The seconds, and the tokens after each text."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"texts": texts, "tokens": tokens}) + "\n")
        self.process.stdin.flush()
        return tuple(self._read())

    def end(self) -> None:
        """Let the process end."""
        self.process.communicate()


def in_turns(acts: dict[str, Write], rounds: int, texts: Any, tokens: int) -> dict[str, list[Told]]:
    """What each tells in each round, after one to warm up."""
    told: dict[str, list[Told]] = {name: [] for name in acts}
    for turn in range(rounds + 1):
        for name in acts if turn % 2 else reversed(acts):
            told[name] += [acts[name](texts, tokens)] if turn else []
            if not turn:
                acts[name](texts, tokens)
    return told


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", nargs="?", help="a LLaMA in the Hugging Face layout")
    python = os.environ.get("REGARD_LLAMA_PYTHON")
    parser.add_argument("--llama", default=python, help="interpreter that has llama-cpp-python")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--by", choices=("wall", "cpu"), default="wall", help="time that counts")
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    given = parser.parse_args()
    print(machine(), flush=True)
    tokens, rounds = (100, 3) if given.quick else (given.tokens, given.rounds)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(given.folder or place)
        if given.folder is None:
            random_llama(folder)
        config = AutoConfig.from_pretrained(folder)
        words: dict[str, Any] = {"threads": given.threads}
        peers: dict[str, Any] = {
            "regard float32": Peer(by_regard, folder, "float32", **words),
            "regard int8": Peer(by_regard, folder, "int8", **words),
            "transformers": Peer(by_transformers, folder, **words),
        }
        if given.llama:
            for kind in ("float32", "int8"):
                peers[f"llama.cpp {kind}"] = LlamaCpp(given.llama, folder, kind, given.threads)
            print(peers["llama.cpp int8"].version)
        else:
            print(
                "llama.cpp is left out: no interpreter that has it (--llama, REGARD_LLAMA_PYTHON)"
            )
    w, f = config.hidden_size, config.intermediate_size
    shared = config.num_key_value_heads / config.num_attention_heads
    weights = config.num_hidden_layers * (w * w * (2 + 2 * shared) + 3 * w * f)
    weights += w * config.vocab_size
    peak, ratios = peaks(), {}
    torch.manual_seed(1)
    for batch in (1, 16):
        texts = [
            torch.randint(3, config.vocab_size, (PROMPT + n % 8,)).tolist() for n in range(batch)
        ]
        acts: dict[str, Write] = {name: peer.ask for name, peer in peers.items()}
        told = in_turns(acts, rounds, texts, tokens)
        ours, speed = told["regard float32"][0][2], {}
        for name, some in told.items():
            took = [one[given.by == "cpu"] for one in some]
            speed[name] = batch * tokens / statistics.median(took)
            spread = (max(took) - min(took)) / statistics.median(took)
            same = sum(a == b for a, b in zip(ours, some[0][2], strict=True))
            cpu = statistics.median(one[1] for one in some)
            each = 4 if "int8" not in name else 1
            print(
                f"batch {batch:2}, {name}: {speed[name]:.0f} tokens/s by {given.by} "
                f"(spread {spread:.0%}), {1000 * cpu / tokens:.2f} ms of processor a step, "
                f"{weights * each * tokens / statistics.median(took) / 1e9:.0f} GB/s of weights; "
                f"{same} of {batch} texts as our float32"
            )
            kind = "int8" if "int8" in name else "fp32"
            if name.startswith("regard") and peak:
                share = weights * batch * tokens / peak[kind] / cpu
                print(f"share of the peak, {kind}, batch {batch}: {share:.2f}")
        ratios[f"generate_b{batch}"] = speed["regard float32"] / speed["transformers"]
        for kind, short in (("float32", "fp32"), ("int8", "int8")):
            if f"llama.cpp {kind}" in speed:
                ratio = speed[f"regard {kind}"] / speed[f"llama.cpp {kind}"]
                ratios[f"llama_{short}_batch{batch}"] = ratio
    for peer in peers.values():
        peer.end()
    for name, ratio in ratios.items():
        print(f"ratio {name} {ratio:.3f}")


if __name__ == "__main__":
    main()
