"""How far the borders of words are from the truth: sentences joined from FSDD files.

    python bench/word_times.py MODEL [--sentences 100] [--free]
    python bench/word_times.py --write FOLDER [--sentences 3000]

A sentence is three to seven files of one speaker, N = 0 to 4 (the official test set), which no
model here was trained on, with pauses of 50 to 400 ms between them or with none, and with or
without white noise 45 dB below the loudest sample. The borders of the files are the truth. The
transcript is given (forced alignment), or with --free recognised, where only sentences count that
are all right.

With --write it joins sentences from the training files (N = 5 to 49) instead, half of them with
pauses and half of these and the others with noise, and writes them to a folder with a table
train.tsv, and a fiftieth of them to dev.tsv, for: regard train transcribe data=FOLDER.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import soundfile
import soxr
import torch

import regard

DATA = Path(os.environ.get("REGARD_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
DIGITS = ["ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE"]
SPEAKERS = ["george", "jackson", "lucas", "nicolas", "theo", "yweweler"]
RATE = 16000


def sentence(
    rng: np.random.Generator, pauses: bool, noise: bool, takes: tuple[int, int] = (0, 5)
) -> tuple[np.ndarray, list[str], np.ndarray]:
    """Return samples, the words and their borders (n, 2) in seconds."""
    speaker = rng.choice(SPEAKERS)
    parts, words, borders, at = [], [], [], 0

    def pause() -> None:
        nonlocal at
        parts.append(np.zeros(int(rng.uniform(0.05, 0.4) * RATE) if pauses else 0))
        at += len(parts[-1])

    pause()
    for _ in range(rng.integers(3, 8)):
        digit, take = rng.integers(10), rng.integers(*takes)
        file = DATA / "fsdd" / "recordings" / f"{digit}_{speaker}_{take}.flac"
        samples, rate = soundfile.read(file, dtype="float32")
        parts.append(soxr.resample(samples, rate, RATE))
        borders.append((at, at + len(parts[-1])))
        at += len(parts[-1])
        words.append(DIGITS[digit])
        pause()
    whole = np.concatenate(parts)
    if noise:
        whole = whole + 10 ** (-45 / 20) * np.abs(whole).max() * rng.normal(size=len(whole))
    return whole.astype(np.float32), words, np.array(borders) / RATE


def write(folder: Path, count: int) -> None:
    """Write sentences of training files as a set to train on."""
    rng = np.random.default_rng(2)
    (folder / "audio").mkdir(parents=True, exist_ok=True)
    rows = []
    for n in range(count):
        samples, words, _ = sentence(rng, n % 2 == 0, n % 4 < 2, takes=(5, 50))
        name = f"audio/{n}.flac"
        soundfile.write(folder / name, samples / max(1.0, np.abs(samples).max()), RATE)
        rows.append(f"{name}\t{' '.join(words)}\n")
    (folder / "dev.tsv").write_text("".join(rows[: count // 50]))
    (folder / "train.tsv").write_text("".join(rows[count // 50 :]))


def main() -> None:
    """Print the mean error of starts and ends for each kind of sentence."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--sentences", type=int)
    parser.add_argument("--free", action="store_true")
    args = parser.parse_args()
    if args.write:
        write(args.write, args.sentences or 3000)
        return
    if args.model is None:
        parser.error("give a model, or --write FOLDER")
    torch.set_num_threads(1)
    model = regard.load(args.model)
    for pauses in (True, False):
        for noise in (False, True):
            rng = np.random.default_rng(1)
            errors, said, timed = [], 0, 0
            for _ in range(args.sentences or 100):
                samples, words, borders = sentence(rng, pauses, noise)
                given = {} if args.free else {"forced": " ".join(words)}
                found = model.run(samples, **given).words
                said += len(words)
                if [word.text for word in found] != words:
                    continue
                timed += len(found)
                errors.append(np.array([(word.start, word.end) for word in found]) - borders)
            if not errors:
                print(f"pauses {pauses!s:5}  noise {noise!s:5}  no sentence was recognised")
                continue
            each = 1000 * np.abs(np.concatenate(errors))
            start, end = each.mean(0)
            print(
                f"pauses {pauses!s:5}  noise {noise!s:5}  words {said}  timed "
                f"{100 * timed / said:.1f}%  mean error {each.mean():.1f} ms "
                f"(starts {start:.1f}, ends {end:.1f}; median {np.median(each):.1f})"
            )


if __name__ == "__main__":
    main()
