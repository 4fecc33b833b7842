"""Fit the weights of regard/decode/speech/no_speech.py, and count what the gate lets through.

    python bench/no_speech.py fit            prints MEASURE_MEAN, MEASURE_SCALE and TERM_WEIGHTS
    python bench/no_speech.py check          false alarms on generated sounds, losses of AN4 dev

Training material: AN4 train, FSDD files 5 to 49, as they are, softer, with noise and with hum; and
generated sounds without speech. Data are found as the tests find them (REGARD_DATA).
"""

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import soundfile

from regard.decode.speech import no_speech

RATE = no_speech.RATE
DATA = Path(os.environ.get("REGARD_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
Random = np.random.Generator


def noise(rng: Random, n: int, slope: float = 0.0) -> np.ndarray:
    """Return noise whose power falls with so many powers of the frequency: white, pink, brown."""
    spectrum = np.fft.rfft(rng.normal(size=n))
    return np.fft.irfft(spectrum / np.maximum(np.arange(len(spectrum)), 1) ** (slope / 2), n)


def hum(rng: Random, n: int, rate: int = RATE) -> np.ndarray:
    """Return mains hum: 50 or 60 Hz and some of its harmonics."""
    time, base = np.arange(n) / rate, rng.choice([50.0, 50.0, 60.0])
    tilt = rng.uniform(0, 1.5)
    sound = np.zeros(n)
    for harmonic in range(1, rng.integers(4, 20)):
        size, phase = rng.uniform(0.05, 1) / harmonic**tilt, rng.uniform(0, 2 * np.pi)
        sound += size * np.sin(2 * np.pi * base * harmonic * time + phase)
    return sound


def note(
    rng: Random,
    hertz: float,
    n: int,
    kind: str,
    decay: float,
    attack: float,
    vibrato: float,
    rate: int = RATE,
) -> np.ndarray:
    """Return one note with an envelope: a sine, a saw, a square wave or a plucked string."""
    time = np.arange(n) / rate
    phase = 2 * np.pi * hertz * time + vibrato * hertz / 5.5 * np.sin(2 * np.pi * 5.5 * time)
    sound = np.zeros(n)
    most = 1 if kind == "sine" else max(1, min(12, int(0.45 * rate / hertz)))
    for harmonic in range(1, most + 1):
        if kind == "square" and harmonic % 2 == 0:
            continue
        size = 1 / harmonic if kind in ("saw", "square") else np.exp(-0.5 * harmonic)
        fall = decay * (1 + 0.3 * harmonic * (kind == "pluck"))
        wave = np.sin(harmonic * phase + rng.uniform(0, 2 * np.pi))
        sound += size * wave * np.exp(-fall * time)
    return sound * np.minimum(1, time / attack) * np.minimum(1, time[::-1] / 0.02)


CHORDS = ((0, 4, 7), (0, 3, 7), (0, 4, 7, 11), (0, 5, 9), (2, 7, 11))
SCALE = (0, 2, 4, 5, 7, 9, 11)


def music(rng: Random, n: int, rate: int = RATE, vibrato: float = 0.0) -> np.ndarray:
    """Return chords, arpeggios, a melody, or a melody over chords."""
    style = rng.choice(["chords", "arpeggio", "melody", "both"])
    kind = str(rng.choice(["sine", "saw", "square", "pluck"]))
    tempo, root = rng.uniform(1, 8), rng.integers(36, 64)
    decay, attack = rng.uniform(0, 6), rng.uniform(0.003, 0.08)
    sound = np.zeros(n)

    def play(key: int, start: int, seconds: float, decay: float) -> None:
        if start >= n:
            return
        hertz = 440 * 2 ** ((root + key - 69) / 12)
        one = note(rng, hertz, int(seconds * rate) + 2, kind, decay, attack, vibrato, rate)
        sound[start : start + len(one)] += one[: n - start]

    place = 0
    while place < n:
        beat = float(rng.choice([0.5, 1, 1, 2])) / tempo
        if style in ("chords", "both"):
            seconds = beat * (4 if style == "both" else 2)
            for key in CHORDS[rng.integers(len(CHORDS))]:
                play(key, place, seconds, decay / 4)
            for turn in range(4 if style == "both" else 0):
                play(
                    12 + int(rng.choice(SCALE)),
                    place + int(turn * beat * rate),
                    beat,
                    decay,
                )
            place += int(seconds * rate)
        else:
            keys = CHORDS[rng.integers(len(CHORDS))] if style == "arpeggio" else SCALE
            key = 12 * int(rng.integers(0, 3)) + int(rng.choice(keys))
            play(key, place, beat * rng.uniform(0.5, 1.5), decay)
            place += int(beat * rate)
    return sound


def swelling(rng: Random, n: int, rate: int = RATE) -> np.ndarray:
    """Return noise that swells and falls."""
    wave = 0.5 + 0.5 * np.sin(2 * np.pi * rng.uniform(0.3, 6) * np.arange(n) / rate)
    return rng.normal(size=n) * (0.1 + wave**2)


def bursts(rng: Random, n: int, rate: int = RATE) -> np.ndarray:
    """Return knocks and hisses, three a second."""
    sound = 0.003 * rng.normal(size=n)
    for _ in range(max(1, int(3 * n / rate))):
        size = int(rng.integers(rate // 200, rate // 5))
        start = int(rng.integers(0, max(1, n - size)))
        one = rng.normal(size=size) * np.exp(-3 * np.arange(size) / size)
        sound[start : start + size] += one[: n - start]
    return sound


def sweep(rng: Random, n: int, rate: int = RATE) -> np.ndarray:
    """Return a siren."""
    period, low, high = rng.uniform(0.5, 5), rng.uniform(100, 500), rng.uniform(600, 3000)
    rise = (np.arange(n) / rate % period) / period
    return np.sin(2 * np.pi * np.cumsum(low + (high - low) * rise) / rate)


def beeps(rng: Random, n: int, rate: int = RATE) -> np.ndarray:
    """Return pairs of tones as of a telephone."""
    sound, place = np.zeros(n), 0
    while place < n:
        size = int(rate * rng.uniform(0.05, 0.4))
        time = np.arange(size) / rate
        one = np.sin(2 * np.pi * rng.uniform(400, 2500, (2, 1)) * time).sum(0)
        sound[place : place + size] = one[: n - place]
        place += size + int(rate * rng.uniform(0.05, 0.5))
    return sound


def beneath(rng: Random, sound: np.ndarray, low: float, high: float) -> np.ndarray:
    """Add white noise, between so many decibels beneath the peak."""
    peak = np.abs(sound).max()
    return sound + peak * 10 ** (-rng.uniform(low, high) / 20) * rng.normal(size=len(sound))


# name -> sounds without speech, from a generator and a number of samples at 8 kHz
WITHOUT_SPEECH: dict[str, Callable[[Random, int], np.ndarray]] = {
    "white noise": noise,
    "pink noise": lambda rng, n: noise(rng, n, 1.0),
    "brown noise": lambda rng, n: noise(rng, n, 2.0),
    "hum": hum,
    "hum and noise": lambda rng, n: beneath(rng, hum(rng, n), 5, 50),
    "music": music,
    "music and noise": lambda rng, n: beneath(rng, music(rng, n), 15, 60),
    "vibrato": lambda rng, n: music(rng, n, vibrato=rng.uniform(0.002, 0.01)),
    "swelling noise": swelling,
    "bursts": bursts,
    "sweep": sweep,
    "beeps": beeps,
}


# of which the fit sees more than of others: they are the most like speech
HARD = {"music": 2, "music and noise": 3, "vibrato": 3, "brown noise": 2}


def without_speech(rng: Random, kind: str, n: int) -> np.ndarray:
    """Return a sound without speech, of a random level."""
    sound = WITHOUT_SPEECH[kind](rng, n)
    return (sound / np.abs(sound).max() * 10 ** (-rng.uniform(0, 50) / 20)).astype(np.float32)


def an4(part: str) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the utterances of a part of AN4."""
    for line in (DATA / "an4" / f"{part}.tsv").read_text().splitlines():
        yield soundfile.read(DATA / "an4" / line.split("\t")[0], dtype="float32")


def fsdd() -> Iterator[tuple[np.ndarray, int]]:
    """Yield the spoken digits of FSDD's training part."""
    for path in sorted((DATA / "fsdd" / "recordings").glob("*.flac")):
        if int(path.stem.rsplit("_", 1)[1]) >= 5:
            yield soundfile.read(path, dtype="float32")


def variants(rng: Random, sound: np.ndarray, rate: int) -> list[np.ndarray]:
    """Return a sound as it is, and one other: with noise 20 dB beneath, soft, or with hum."""
    level = np.sqrt(np.square(sound).mean())
    others = [
        lambda: sound + 0.1 * level * rng.normal(size=len(sound)),
        lambda: np.round(sound * 0.01 * 2**15) / 2**15,
        lambda: sound + 0.1 * level * (h := hum(rng, len(sound), rate)) / h.std(),
    ]
    return [sound, others[rng.integers(3)]().astype(np.float32)]


def loudest(sound: np.ndarray, rate: int) -> np.ndarray:
    """Return the loudest two seconds."""
    size = int(no_speech.STRETCH_SECONDS * rate)
    if len(sound) <= size:
        return sound
    power = np.concatenate([[0], np.cumsum(np.square(sound, dtype=np.float64))])
    start = int((power[size:] - power[:-size]).argmax())
    return sound[start : start + size]


def fit(seed: int, count: int) -> None:
    """Fit by Newton's method with a ridge, both classes weighing alike, and print the weights."""
    rng = np.random.default_rng(seed)
    speech, other = [], []
    for utterances in (an4("train"), fsdd()):
        every = list(utterances)
        for n in rng.permutation(len(every))[:count]:
            sound, rate = every[n]
            for one in variants(rng, loudest(sound, rate), rate):
                speech.append(no_speech.measures(one, rate))
    for kind in WITHOUT_SPEECH:
        for _ in range(count * HARD.get(kind, 1) // 2):
            n = int(RATE * rng.choice([0.6, 1.0, 2.0, 2.0]))
            other.append(no_speech.measures(without_speech(rng, kind, n), RATE))
    x = np.array(speech + other)
    y = np.arange(len(x)) < len(speech)
    mean, scale = x.mean(0), x.std(0)
    z = no_speech.terms(
        np.clip((x - mean) / scale, -no_speech.MEASURE_CLIP, no_speech.MEASURE_CLIP)
    )
    each = np.where(y, 0.5 / y.sum(), 0.5 / (~y).sum()) * len(y)
    w = slope = np.zeros(z.shape[1])
    ridge = np.diag([1e-6] + [1.0] * (z.shape[1] - 1))
    for _ in range(50):
        p = 1 / (1 + np.exp(-z @ w))
        slope = z.T @ (each * (p - y)) + ridge @ w
        w = w - np.linalg.solve((z.T * (each * p * (1 - p) + 1e-9)) @ z + ridge, slope)
    print(
        f"{len(speech)} stretches of speech, {len(other)} without; largest slope", abs(slope).max()
    )
    for name, values in (("MEASURE_MEAN", mean), ("MEASURE_SCALE", scale), ("TERM_WEIGHTS", w)):
        print(f"{name} = ({', '.join(f'{v:.4g}' for v in values)})")
    score = z @ w
    print("speech, lowest 0.3%:", np.quantile(score[y], 0.003))
    print("without, highest 0.3%:", np.quantile(score[~y], 0.997))


def check(seed: int, minutes: float) -> None:
    """Count the stretches without speech that pass, and the utterances that do not."""
    rng = np.random.default_rng(seed)
    for kind in WITHOUT_SPEECH:
        turns = max(1, round(minutes * 60 / 20))
        sounds = [without_speech(rng, kind, 20 * RATE) for _ in range(turns)]
        scores = [no_speech.speech_score(sound, RATE) for sound in sounds]
        passed = sum(score > no_speech.THRESHOLD for score in scores)
        print(f"{kind}: {passed} of {turns} segments of 20 s pass; highest {max(scores):.2f}")
    for name, utterances in (("AN4 dev", an4("dev")), ("AN4 train", an4("train"))):
        scores = np.array([no_speech.speech_score(*one) for one in utterances])
        noisy = np.array(
            [
                no_speech.speech_score(
                    sound + 0.1 * sound.std() * rng.normal(size=len(sound)), rate
                )
                for sound, rate in an4(name.split()[1])
            ]
        )
        lost = [int((some <= no_speech.THRESHOLD).sum()) for some in (scores, noisy)]
        print(
            f"{name}: {lost[0]} of {len(scores)} lost, with noise 20 dB beneath {lost[1]}; "
            f"lowest {scores.min():.2f}, {noisy.min():.2f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["fit", "check"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=700)
    parser.add_argument("--minutes", type=float, default=10.0)
    options = parser.parse_args()
    if options.what == "fit":
        fit(options.seed, options.count)
    else:
        check(options.seed + 1000, options.minutes)
