"""Induction heads are born in a second layer: attention-only models on texts that repeat.

    python bench/induction.py [--quick] [--out FOLDER]

Trains `order=attention_only` language models of one and of two layers, with one head each, on
random characters said twice; how many they are differs, so that no fixed offset helps. Prints the
highest induction score of each over other such texts, and how much of the gain on the repeated half
(the loss of the first half less that of the second) is lost when the head that has it is switched
off: by how much the loss of the second half rises, at most by all of the gain.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from apart import machine  # noqa: E402

import regard  # noqa: E402
from regard.insight.heads import measure_heads  # noqa: E402

ALPHABET = [chr(0x4E00 + n) for n in range(64)]
SHORTEST, LONGEST = 6, 18  # characters before they are repeated
# how a head is switched off: by zero, or by the mean of what it gives over a text
CUTS: dict[str, Any] = {"at zero": 0.0, "at its mean": lambda x: x.mean(1, keepdim=True)}


def said_twice(rng: random.Random) -> str:
    """Return random characters, no two of them alike, and once more the same."""
    once = "".join(rng.sample(ALPHABET, rng.randint(SHORTEST, LONGEST)))
    return once + once


def write_data(folder: Path, rows: int) -> None:
    """Write texts to train and to validate on, one a row."""
    for part, count, seed in (("train", rows, 1), ("valid", 200, 2)):
        rng = random.Random(seed)
        lines = (json.dumps({"text": said_twice(rng)}) for _ in range(count))
        (folder / f"{part}.jsonl").write_text("".join(line + "\n" for line in lines))


@torch.inference_mode()
def losses(model: Any, texts: list[str]) -> tuple[float, float]:
    """Return the mean loss of the first and of the repeated half of texts."""
    halves: tuple[list[float], list[float]] = [], []
    for text in texts:
        ids = torch.tensor([[model.codec.tokenizer.bos, *model.codec.tokenizer.encode(text)]])
        each = torch.nn.functional.cross_entropy(
            model.model(ids[:, :-1])[0], ids[0, 1:], reduction="none"
        )
        half = len(text) // 2
        # the first character of the second half cannot be foreseen
        halves[0].extend(each[:half].tolist())
        halves[1].extend(each[half + 1 :].tolist())
    first, second = (sum(half) / len(half) for half in halves)
    return first, second


def main() -> None:
    """Train both depths and tell their induction heads."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps")
    parser.add_argument("--out", help="where to keep the runs")
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args()
    steps = options.steps // 10 if options.quick else options.steps
    print(machine(), flush=True)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(options.out or temporary)
        home.mkdir(parents=True, exist_ok=True)
        write_data(home, 2000 if options.quick else 20_000)
        rng = random.Random(3)
        texts = [said_twice(rng) for _ in range(100)]
        for depth in (1, 2):
            begun = time.perf_counter()
            regard.train(
                "language",
                data=home,
                out=home / f"depth-{depth}",
                tokenizer="characters",
                order="attention_only",
                depth=depth,
                width=64,
                heads=1,
                position="rotary",
                context=64,
                batch_tokens=1024,
                dropout=0.0,
                lr=0.01,
                weight_decay=0.0,
                steps=steps,
                threads=1,
                quiet=True,
            )
            seconds = time.perf_counter() - begun
            model = regard.load(home / f"depth-{depth}", task="language")
            found = measure_heads(model, texts)
            best = max(found.heads, key=lambda head: head.scores["induction"])
            first, second = losses(model, texts)
            print(
                f"{depth} layers: {seconds:.0f} s, induction {best.scores['induction']:.3f} "
                f"({best.layer}:{best.head}), loss {first:.3f}, when repeated {second:.3f}"
            )
            for way, to in CUTS.items():
                with regard.change(model, {f"{best.layer}.heads.{best.head}": to}):
                    cut_first, cut_second = losses(model, texts)
                lost = (cut_second - second) / (first - second) if second < first else 0.0
                print(
                    f"  that head {way}: {cut_first:.3f}, when repeated {cut_second:.3f}; "
                    f"{100 * min(1.0, lost):.0f}% of the gain is lost",
                    flush=True,
                )


if __name__ == "__main__":
    main()
