"""How fast a small LLaMA writes: Regard against transformers' generate, on equal weights.

    python bench/generate.py [FOLDER] [--tokens 200] [--rounds 5] [--quick]

FOLDER holds a LLaMA in the Hugging Face layout; without one, a random model of the size of
stories15M (6 layers, 6 heads, width 288, 32,000 tokens) is made. Both write greedily after the same
prompts of different lengths, float32, all cores; the same tokens must come out. Everybody takes a
turn in each round; a ratio above 1 means that Regard is faster.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402

from regard.decode.search import greedy  # noqa: E402
from regard.memory import reuse_memory  # noqa: E402
from regard.pretrained.folder import import_folder  # noqa: E402

PROMPT = 16  # tokens, the shortest
NO_WORDS = SimpleNamespace(vocab=0)  # prompts are numbers here


def random_llama(folder: Path) -> None:
    """Write a LLaMA of the size of stories15M, with weights so large that it is sure of itself."""
    from transformers import LlamaConfig, LlamaForCausalLM

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


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", nargs="?", help="a LLaMA in the Hugging Face layout")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    given = parser.parse_args()
    tokens, rounds = (100, 3) if given.quick else (given.tokens, given.rounds)
    torch.set_num_threads(given.threads)
    reuse_memory()
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as place:
        folder = Path(given.folder or place)
        if given.folder is None:
            random_llama(folder)
        theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ours: Any = import_folder(folder, read=lambda folder: (NO_WORDS, NO_WORDS))[0]
    ratios = {}
    for rows in (1, 16):
        lengths = PROMPT + torch.arange(rows) % 8
        ids = torch.randint(3, theirs.config.vocab_size, (rows, int(lengths.max())))
        real = torch.arange(ids.shape[1]) < lengths.unsqueeze(1)
        # theirs wants the padding on the left
        padded = torch.zeros_like(ids)
        for i, n in enumerate(lengths.tolist()):
            padded[i, -n:] = ids[i, :n]
        seen = real.flip(1).long()

        def by_regard(ids=ids, lengths=lengths, rows=rows) -> list[list[int]]:
            last = ids[torch.arange(rows), lengths - 1]
            found = greedy(ours, ids, lengths, max_length=tokens, begin=last, eos=-1)
            return [one.ids for (one,) in found]

        @torch.inference_mode()
        def by_transformers(padded=padded, seen=seen) -> list[list[int]]:
            out = theirs.generate(
                padded,
                attention_mask=seen,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
            return out[:, padded.shape[1] :].tolist()

        sides = {"regard": by_regard, "transformers": by_transformers}
        texts = {name: write() for name, write in sides.items()}  # which also warms up
        equal = sum(a == b for a, b in zip(*texts.values(), strict=True))
        speeds: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(rounds):
            for name in sides if turn % 2 else reversed(sides):
                start = time.perf_counter()
                sides[name]()
                speeds[name].append(rows * tokens / (time.perf_counter() - start))
        median = {name: statistics.median(some) for name, some in speeds.items()}
        print(
            f"batch {rows:2}: "
            + ", ".join(f"{name} {speed:.0f} tokens/s" for name, speed in median.items())
            + f"; {equal} of {rows} texts equal"
        )
        ratios[rows] = median["regard"] / median["transformers"]
    for rows, ratio in ratios.items():
        print(f"ratio generate_b{rows} {ratio:.3f}")


if __name__ == "__main__":
    main()
