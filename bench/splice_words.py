"""New utterances joined from the words of a speaker's own: more sentences from a small set.

    python bench/splice_words.py DATA OUT --model letters [--times 3] [--speaker REGEX]

DATA is a folder with train.tsv (path, transcript) and dev.tsv, MODEL a recogniser trained on it,
which tells where each word begins and ends. OUT gets copies of all recordings and so many times
as many new ones to train on: up to three words in a row from one utterance, then from another of
the same speaker, until there are as many as in a real one. A small model learns the sentences of a
small set by heart; here each word stands among others. The group of REGEX is a path's speaker.
"""

import argparse
import re
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import soundfile

import regard
from regard.decode.speech.words import Word
from regard.files import write_atomically

RATE = 16000
MARGIN, EDGE = 0.12, 0.15  # seconds kept around a word, and before the first and after the last
FADE = RATE // 200  # samples of a fade in and out
UNSURE, SKIPPED = 0.2, 0.9  # words less sure than this are mostly left out
Utterance = tuple[np.ndarray, list[Word]]


def widened(words: list[Word], seconds: float) -> list[Word]:
    """Let each word reach into the pauses around it, at most to their middle."""
    middles = [(a.end + b.start) / 2 for a, b in zip(words, words[1:], strict=False)]
    first, last = max(0.0, words[0].start - EDGE), min(seconds, words[-1].end + EDGE)
    borders = [first, *middles, last]
    return [
        replace(
            word,
            start=max(borders[n], word.start - MARGIN),
            end=min(borders[n + 1], word.end + MARGIN),
        )
        for n, word in enumerate(words)
    ]


def joined(rng: np.random.Generator, own: list[Utterance], want: int) -> tuple[np.ndarray, str]:
    """Return the samples and the text of a new utterance of so many words."""
    parts: list[np.ndarray] = []
    said: list[str] = []
    while len(said) < want:
        samples, words = own[rng.integers(len(own))]
        count = min(int(rng.integers(1, 4)), want - len(said), len(words))
        first = int(rng.integers(len(words) - count + 1))
        some = words[first : first + count]
        if min(word.confidence for word in some) < UNSURE and rng.random() < SKIPPED:
            continue
        part = samples[int(some[0].start * RATE) : int(some[-1].end * RATE)].copy()
        if len(part) < 4 * FADE:
            continue
        part[:FADE] *= np.linspace(0, 1, FADE)
        part[-FADE:] *= np.linspace(1, 0, FADE)
        pause = rng.normal(size=int(max(0.0, rng.normal(0.03, 0.06)) * RATE))
        parts += [part, (pause * np.percentile(np.abs(samples), 10)).astype(np.float32)]
        said += [word.text for word in some]
    return np.clip(np.concatenate(parts), -1, 1), " ".join(said)


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="letters")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--speaker", default=r"-([^-]+)-[^-]+$")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    model, rng = regard.load(args.model), np.random.default_rng(args.seed)
    tables = {}
    for part in ("train", "dev"):
        lines = (args.data / f"{part}.tsv").read_text().splitlines()
        tables[part] = [line.split("\t") for line in lines]
        for path, _ in tables[part]:
            (args.out / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(args.data / path, args.out / path)
    speakers: dict[str, list[Utterance]] = defaultdict(list)
    counts = []
    for path, text in tables["train"]:
        samples, rate = soundfile.read(args.data / path, dtype="float32")
        found = re.search(args.speaker, path)
        assert rate == RATE and found, f"{path}: {rate} Hz, speaker {found}"
        words = model.run(samples, forced=text).words
        counts.append(len(words))
        speakers[found.group(1)].append((samples, widened(words, len(samples) / RATE)))
    names = sorted(speakers)
    for n in range(args.times * len(counts)):
        name = names[rng.integers(len(names))]
        samples, text = joined(rng, speakers[name], counts[rng.integers(len(counts))])
        path = f"audio/splice-{name}-{n}.flac"
        (args.out / path).parent.mkdir(exist_ok=True)
        soundfile.write(args.out / path, samples, RATE)
        tables["train"].append([path, text])
    for part, rows in tables.items():
        text = "".join(f"{path}\t{text}\n" for path, text in rows)
        write_atomically(args.out / f"{part}.tsv", text.encode())
    print(f"{args.out}: {len(names)} speakers, {len(tables['train'])} utterances to train on")


if __name__ == "__main__":
    main()
