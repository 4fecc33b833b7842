"""Generated speech: a letter is a tone of its own, a space a pause."""

from pathlib import Path

import numpy as np
import soundfile

RATE = 4000
TONES = {letter: 300 + 260 * n for n, letter in enumerate("ABCDE")}


def tones(text: str, rng: np.random.Generator) -> np.ndarray:
    """Return the samples of a text; letters and pauses are of different lengths."""
    return said(text, rng)[0]


def said(text: str, rng: np.random.Generator) -> tuple[np.ndarray, list[tuple[float, float]]]:
    """Return the samples of a text, and where each of its letters begins and ends in seconds."""
    parts = [rng.normal(0, 0.003, int(RATE * rng.uniform(0.02, 0.05)))]
    times = []
    for letter in text:
        count = int(RATE * rng.uniform(0.1, 0.16))
        samples = rng.normal(0, 0.003, count)
        start = sum(map(len, parts)) / RATE
        if letter != " ":
            wave = np.sin(2 * np.pi * TONES[letter] * np.arange(count) / RATE)
            samples += rng.uniform(0.2, 0.5) * wave * np.hanning(count) ** 0.5
            times.append((start, start + count / RATE))
        parts.append(samples)
    parts.append(rng.normal(0, 0.003, len(parts[0])))
    return np.concatenate(parts).astype(np.float32), times


def write_tones(path: Path, text: str, seed: int = 0) -> Path:
    """Write a text as a sound."""
    soundfile.write(path, tones(text, np.random.default_rng(seed)), RATE)
    return path


def sentence(rng: np.random.Generator) -> str:
    """Return one or two words of one to three letters."""
    sizes = rng.integers(1, 4, int(rng.integers(1, 3)))
    return " ".join("".join(rng.choice(list(TONES), size)) for size in sizes)


def spoken(folder: Path, count: int = 60, seed: int = 0) -> Path:
    """Write a table of sounds and their transcripts."""
    rng, rows = np.random.default_rng(seed), []
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(count):
        text = sentence(rng)
        soundfile.write(folder / f"{n}.wav", tones(text, rng), RATE)
        rows.append(f"{n}.wav\t{text}\n")
    (folder / "speech.tsv").write_text("".join(rows))
    return folder / "speech.tsv"


def sound_folders(folder: Path, count: int = 60, seed: int = 0) -> Path:
    """Write a folder of sounds for each of three letters."""
    rng = np.random.default_rng(seed)
    for n in range(count):
        letter = "ABC"[n % 3]
        home = folder / "letters" / letter
        home.mkdir(parents=True, exist_ok=True)
        soundfile.write(home / f"{n}.wav", tones(letter, rng), RATE)
    return folder / "letters"
