"""How fast a small LLaMA writes: Regard against transformers' generate, on equal weights.

    python bench/generate.py [FOLDER] [--tokens 200] [--rounds 5] [--quick]

FOLDER holds a LLaMA in the Hugging Face layout; without one, a random model of the size of
stories15M (6 layers, 6 heads, width 288, 32,000 tokens) is made. Both write greedily after the same
prompts of different lengths, float32, all cores; the same tokens must come out. Both run in
processes of their own, as their users have them, and take a turn in each round; a ratio above 1
means that Regard is faster.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from apart import Act, Peer, in_turn, machine  # noqa: E402
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


def by_regard(folder: Path) -> Act:
    """Make what Regard does in its process."""
    reuse_memory()  # as `regard run` does
    model: Any = import_folder(folder, read=lambda folder: (NO_WORDS, NO_WORDS))[0]

    def write(ids: Tensor, lengths: Tensor, tokens: int) -> list[list[int]]:
        last = ids[torch.arange(len(ids)), lengths - 1]
        with fast(model, frozen=True):  # as `regard run` does
            constraints = Constraints(max_length=tokens, begin=last, eos=-1)
            found = decode(model, ids, lengths, Decoding(beam=1), constraints)
        return [one.ids for (one,) in found]

    return write


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

    return write


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", nargs="?", help="a LLaMA in the Hugging Face layout")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    given = parser.parse_args()
    print(machine(), flush=True)
    tokens, rounds = (100, 3) if given.quick else (given.tokens, given.rounds)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(given.folder or place)
        if given.folder is None:
            random_llama(folder)
        vocab = AutoConfig.from_pretrained(folder).vocab_size
        peers = {
            "regard": Peer(by_regard, folder, threads=given.threads),
            "transformers": Peer(by_transformers, folder, threads=given.threads),
        }
    ratios = {}
    for rows in (1, 16):
        lengths = PROMPT + torch.arange(rows) % 8
        words = torch.randint(3, vocab, (rows, int(lengths.max()))), lengths, tokens
        texts = [peer.act(*words)[1] for peer in peers.values()]
        equal = sum(a == b for a, b in zip(*texts, strict=True))
        acts = {name: peer.takes(*words) for name, peer in peers.items()}
        speed = {name: rows * tokens / took for name, took in in_turn(acts, rounds).items()}
        print(
            f"batch {rows:2}: "
            + ", ".join(f"{name} {one:.0f} tokens/s" for name, one in speed.items())
            + f"; {equal} of {rows} texts equal"
        )
        ratios[rows] = speed["regard"] / speed["transformers"]
    for peer in peers.values():
        peer.end()
    for rows, ratio in ratios.items():
        print(f"ratio generate_b{rows} {ratio:.3f}")


if __name__ == "__main__":
    main()
