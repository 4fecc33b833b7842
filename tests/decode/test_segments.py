"""Laws of long recordings: segments hold all sound, words lie where they are heard, captions."""

import importlib
import math
import re
import tracemalloc
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from regard.data.characters import Characters
from regard.data.tokenize import train_tokenizer
from regard.decode.speech.ctc_align import CTCAlignment
from regard.decode.speech.no_speech import is_speech, speech_score
from regard.decode.speech.segments import (
    HOP,
    SILENCE,
    cut_at_pauses,
    loudness,
    smooth,
    sound_threshold,
)
from regard.decode.speech.subtitles import WIDTH, cues, join_words, srt, vtt
from regard.decode.speech.words import Word, word_tokens, words
from regard.errors import UsageError

RATE = 8000
BENCH = Path(__file__).resolve().parents[2] / "bench"


def voice(rng: np.random.Generator, seconds: float, rate: int = RATE) -> np.ndarray:
    """Return a harmonic sound whose pitch glides and whose ends are soft."""
    time = np.arange(int(seconds * rate)) / rate
    pitch = 120 * (1 + 0.2 * np.sin(2 * np.pi * rng.uniform(0.7, 1.5) * time))
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    sound = sum(np.sin(n * phase) / n for n in range(1, 15))
    return (0.2 * sound * np.hanning(len(time)) ** 0.3).astype(np.float32)


# ---- cutting at pauses


@st.composite
def recordings(draw) -> tuple[np.ndarray, list[tuple[int, int]], float, int]:
    """Draw sounds with pauses between them, where each sound is, and the longest segment."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    rate = draw(st.sampled_from([8000, 11025, 16000]))
    parts, places, place = [], [], 0
    for _ in range(draw(st.integers(0, 6))):
        pause = np.zeros(int(rate * draw(st.floats(0.05, 3.0))))
        sound = voice(rng, draw(st.floats(0.1, 4.0)), rate) * 10 ** draw(st.floats(-1.0, 0.0))
        parts += [pause, sound]
        places.append((place + len(pause), place + len(pause) + len(sound)))
        place += len(pause) + len(sound)
    whole = np.concatenate([*parts, np.zeros(draw(st.integers(0, rate)))])
    noise = draw(st.sampled_from([0.0, 1e-4, 1e-3]))
    whole = whole + noise * rng.normal(size=len(whole))
    return whole.astype(np.float32), places, draw(st.floats(1.0, 8.0)), rate


@given(recordings())
@effort(max_examples=60)
def test_segments_hold_all_sound_do_not_overlap_and_are_short_enough(recording):
    samples, places, most, rate = recording
    segments = cut_at_pauses(samples, rate, most)
    for start, end in segments:
        assert 0 <= start < end <= len(samples)
        assert end - start <= most * rate
    assert all(a.end <= b.start for a, b in zip(segments, segments[1:], strict=False))
    inside = np.zeros(len(samples), dtype=bool)
    for start, end in segments:
        inside[start:end] = True
    level = smooth(loudness(samples, rate))
    threshold = sound_threshold(level)
    for n in np.flatnonzero(level > (SILENCE if threshold is None else threshold)):
        middle = min(len(samples) - 1, int((n + 0.5) * HOP * rate))
        assert inside[middle]


def test_a_long_recording_is_cut_in_its_pauses_and_put_together_again():
    rng = np.random.default_rng(0)
    parts, places, place = [], [], 0
    for _ in range(30):
        sound, pause = voice(rng, rng.uniform(0.5, 2.5)), np.zeros(int(RATE * rng.uniform(0.4, 1)))
        parts += [sound, pause]
        places.append((place, place + len(sound)))
        place += len(sound) + len(pause)
    samples = np.concatenate(parts) + 1e-4 * rng.normal(size=place)
    segments = cut_at_pauses(samples, RATE, 8.0)
    assert len(segments) > 5
    for segment in segments:  # no cut within a sound
        for edge in segment:
            assert not any(start < edge < end for start, end in places)
    # what is found in a segment, moved by its offset, is where it was
    for start, end in places:
        middle = (start + end) // 2
        (home,) = (one for one in segments if one.start <= middle < one.end)
        assert home.start <= start and end <= home.end


def test_a_short_recording_stays_whole_and_silence_is_no_segment():
    rng = np.random.default_rng(0)
    short = np.concatenate([np.zeros(4000), voice(rng, 1.0), np.zeros(8000)])
    assert cut_at_pauses(short, RATE, 30.0) == [(0, len(short))]
    assert cut_at_pauses(np.zeros(RATE * 600, dtype=np.float32), RATE, 30.0) == []
    assert cut_at_pauses(np.zeros(0), RATE) == []
    with pytest.raises(UsageError, match="most_seconds=0"):
        cut_at_pauses(short, RATE, 0)
    with pytest.raises(UsageError, match="expected"):
        loudness(short.reshape(2, -1), RATE)


def test_a_sound_that_never_pauses_is_cut_where_it_is_softest():
    time = np.arange(20 * RATE) / RATE
    sound = np.sin(2 * np.pi * 200 * time) * (1 - 0.9 * np.exp(-(((time - 7.0) / 0.05) ** 2)))
    first, second, *_ = cut_at_pauses(sound.astype(np.float32), RATE, 9.0)
    assert first.start == 0 and first.end == second.start
    assert first.end / RATE == pytest.approx(7.0, abs=0.05)


def test_a_click_does_not_hide_soft_speech():
    rng = np.random.default_rng(1)
    samples = 1e-4 * rng.normal(size=40 * RATE)
    samples[10 * RATE : 12 * RATE] += 0.05 * voice(rng, 2.0)
    samples[30 * RATE : 30 * RATE + 20] = 1.0
    segments = cut_at_pauses(samples, RATE, 20.0)
    assert any(a <= 10.05 * RATE and b >= 11.95 * RATE for a, b in segments)


# ---- words


TOKENIZER = Characters(" ABCDEFGHIJKLMNOPQRSTUVWXYZ'0123456789.,")


@dataclass
class Spoken:
    samples: np.ndarray
    alignment: CTCAlignment
    times: list[tuple[float, float]]
    text: list[str]


def spoken(seed: int, gap: tuple[float, float], early: float, frame: float = 0.04) -> Spoken:
    """Return words as sounds at known places, and spikes near them as CTC would emit them."""
    rng = np.random.default_rng(seed)
    text = ["".join(rng.choice(list("ABCDEFG"), n)) for n in rng.integers(1, 6, 5)]
    parts, times, ids, spans, place = [np.zeros(int(0.3 * RATE))], [], [], [], 0.3
    for number, word in enumerate(text):
        seconds = 0.22 + 0.05 * len(word)
        parts.append(voice(rng, seconds))
        times.append((place, place + seconds))
        at = place - early + seconds * (0.3 + 0.5 * np.arange(len(word)) / len(word))
        if number:
            ids.append(TOKENIZER.encode(" ")[0])
            spans.append(int(max(0.0, at[0] - frame) / frame))
        ids += TOKENIZER.encode(word)
        spans += [int(max(0.0, t) / frame) for t in at]
        pause = rng.uniform(*gap)
        parts.append(np.zeros(int(pause * RATE)))
        place += seconds + len(parts[-1]) / RATE
    samples = np.concatenate(parts).astype(np.float32)
    samples += (2e-4 * rng.normal(size=len(samples))).astype(np.float32)
    spans = np.maximum.accumulate(spans).tolist()
    alignment = CTCAlignment(ids, 0.0, [(n, n + 1) for n in spans], [0.9] * len(ids))
    return Spoken(samples, alignment, times, text)


@pytest.mark.parametrize(
    "gap, early, most",
    [((0.1, 0.3), 0.0, 0.012), ((0.1, 0.3), 0.15, 0.012), ((0.0, 0.0), 0.0, 0.03)],
)
def test_words_begin_and_end_where_they_are_heard(gap, early, most):
    errors = []
    for seed in range(12):
        one = spoken(seed, gap, early)
        found = words(one.alignment, TOKENIZER, 0.04, level=loudness(one.samples, RATE))
        assert [word.text for word in found] == one.text
        for word, (start, end) in zip(found, one.times, strict=True):
            errors += [abs(word.start - start), abs(word.end - end)]
    assert np.mean(errors) <= most


@pytest.mark.parametrize(("gap", "apart"), [(0.03, False), (0.09, True)])
def test_less_than_a_pause_between_words_is_the_end_of_the_first(gap, apart):
    for seed in range(12):
        one = spoken(seed, (gap, gap), 0.0)
        found = words(one.alignment, TOKENIZER, 0.04, level=loudness(one.samples, RATE))
        assert [b.start > a.end for a, b in pairwise(found)] == [apart] * (len(found) - 1)


@given(st.integers(0, 1000), st.booleans(), st.floats(-0.3, 0.3))
@effort(max_examples=40)
def test_every_word_is_timed_in_order_and_without_overlap(seed, heard, early):
    one = spoken(seed, (0.0, 0.2), early)
    level = loudness(one.samples, RATE) if heard else None
    found = words(one.alignment, TOKENIZER, 0.04, level=level, offset=100.0)
    assert [word.text for word in found] == one.text
    assert found[0].start >= 100.0
    for word in found:
        assert word.start < word.end and 0 < word.confidence <= 1
    for a, b in zip(found, found[1:], strict=False):
        assert a.end <= b.start
    if heard:
        assert found[-1].end <= 100.0 + len(level) * HOP


def test_more_words_than_the_sound_has_room_for_are_timed_too():
    ids = TOKENIZER.encode("A B C D E F")
    alignment = CTCAlignment(ids, 0.0, [(n, n + 1) for n in range(len(ids))], [0.5] * len(ids))
    for level in (np.full(4, -20.0), np.full(50, SILENCE), np.zeros(0), None):
        found = words(alignment, TOKENIZER, 0.04, level=level)
        assert [word.text for word in found] == list("ABCDEF")
    assert words(CTCAlignment([], 0.0, [], []), TOKENIZER, 0.04) == []


def test_a_long_recording_is_timed_in_little_memory():
    one = spoken(0, (0.1, 0.3), 0.0)
    turns, frames = 120, int(len(one.samples) / RATE / 0.04) + 25
    space = TOKENIZER.encode(" ")
    ids, spans = [], []
    for n in range(turns):
        ids += one.alignment.ids + space
        spans += [(a + n * frames, b + n * frames) for a, b in one.alignment.spans]
        spans.append((n * frames + frames - 1, n * frames + frames))
    period = np.zeros(round(frames * 0.04 * RATE), dtype=np.float32)
    period[: len(one.samples)] = one.samples
    level = loudness(np.tile(period, turns), RATE)
    assert len(level) > 30_000  # five minutes
    alignment = CTCAlignment(ids, 0.0, spans, [0.9] * len(ids))
    tracemalloc.start()
    found = words(alignment, TOKENIZER, 0.04, level=level)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 50e6 and len(found) == 5 * turns
    first = words(one.alignment, TOKENIZER, 0.04, level=level[: len(period) // 80])
    later = [w for w in found if abs(w.start - 100 * frames * 0.04 - first[0].start) < 0.02]
    assert [w.text for w in later] == [first[0].text]


def test_what_is_between_spaces_is_a_word():
    ids = TOKENIZER.encode("YES 42 O'NEIL, NO.")
    assert [text for text, _ in word_tokens(ids, TOKENIZER)] == ["YES", "42", "O'NEIL,", "NO."]
    assert [text for text, _ in word_tokens(TOKENIZER.encode("YES"), TOKENIZER)] == ["YES"]
    assert [text for text, _ in word_tokens(TOKENIZER.encode("  A  B "), TOKENIZER)] == ["A", "B"]
    pieces = train_tokenizer(["the man plays the man"] * 20 + ["我们 man"] * 9, vocab=300)
    for text in ("the man plays", "man", "plays the", "naïve man"):
        assert [word for word, _ in word_tokens(pieces.encode(text), pieces)] == text.split()
    tokens = [n for _, some in word_tokens(pieces.encode("the man"), pieces) for n in some]
    assert tokens == sorted(set(tokens))
    chinese = Characters("我们好 ab")
    assert [text for text, _ in word_tokens(chinese.encode("我们 ab好"), chinese)] == list(
        "我们"
    ) + [
        "ab",
        "好",
    ]


def test_a_token_that_is_emitted_for_long_is_in_the_middle_of_its_frames():
    """So a word has the same times when the frames before and after its middle are as many."""
    for reach in (0, 1, 4):
        spans = [(5 - reach, 6 + reach), (11, 12), (20 - reach, 21 + reach)]
        alignment = CTCAlignment(TOKENIZER.encode("A B"), 0.0, spans, [0.9] * 3)
        one, two = words(alignment, TOKENIZER, 0.04)
        assert (one.start + one.end) / 2 == pytest.approx(5.5 * 0.04)
        assert (two.start + two.end) / 2 == pytest.approx(20.5 * 0.04)


def test_a_word_is_as_sure_as_its_least_sure_token():
    ids = TOKENIZER.encode("AB C")
    alignment = CTCAlignment(ids, 0.0, [(0, 1), (1, 2), (2, 3), (3, 4)], [0.9, 0.4, 0.1, 0.8])
    assert [word.confidence for word in words(alignment, TOKENIZER, 0.04)] == [0.4, 0.8]


# ---- no speech


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("no_speech")


@pytest.mark.parametrize("kind", ["white noise", "hum", "hum and noise", "music", "beeps", "sweep"])
def test_sounds_without_speech_are_told_apart(bench, kind):
    rng = np.random.default_rng(77)
    passed = [is_speech(bench.without_speech(rng, kind, 10 * RATE), RATE) for _ in range(6)]
    assert not any(passed)


def test_speech_between_noise_and_tones_is_found(bench, real_data):
    line = (real_data / "an4" / "train.tsv").read_text().splitlines()[3]
    sound, rate = soundfile.read(real_data / "an4" / line.split("\t")[0], dtype="float32")
    rng = np.random.default_rng(5)
    peak = np.abs(sound).max()
    hum = 0.1 * peak * bench.hum(rng, 12 * rate, rate).astype(np.float32)
    music = bench.music(rng, 12 * rate, rate).astype(np.float32)
    music *= peak / np.abs(music).max()
    pause = np.zeros(3 * rate, dtype=np.float32)
    parts = [music, pause, sound, pause, music, pause, hum]
    samples = np.concatenate(parts)
    start = len(music) + len(pause)
    segments = cut_at_pauses(samples, rate, 10.0)
    assert len(segments) > 3
    found = [one for one in segments if is_speech(samples[slice(*one)], rate)]
    assert len(found) == 1
    assert start - rate < found[0].start < start + len(sound) / 2 < found[0].end


def test_silence_is_no_speech():
    assert not is_speech(np.zeros(5 * RATE, dtype=np.float32), RATE)
    assert not is_speech(np.zeros(0, dtype=np.float32), RATE)
    rng = np.random.default_rng(0)
    assert not is_speech(1e-5 * rng.normal(size=5 * RATE).astype(np.float32), RATE)
    assert speech_score(np.zeros(100), RATE) == -np.inf


def test_real_speech_passes_soft_and_noisy_too(real_data):
    lines = (real_data / "an4" / "train.tsv").read_text().splitlines()[::30]
    paths = [real_data / "an4" / line.split("\t")[0] for line in lines]
    paths += sorted((real_data / "fsdd" / "recordings").glob("*_1[0-9].flac"))[::15]
    rng = np.random.default_rng(0)
    lost = {"as it is": 0, "soft": 0, "noisy": 0}
    for path in paths:
        sound, rate = soundfile.read(path, dtype="float32")
        noise = 0.1 * np.sqrt(np.square(sound).mean()) * rng.normal(size=len(sound))
        lost["as it is"] += not is_speech(sound, rate)
        lost["soft"] += not is_speech(np.round(0.01 * sound * 2**15) / 2**15, rate)
        lost["noisy"] += not is_speech(sound + noise, rate)
    assert len(paths) > 60
    assert max(lost.values()) <= 1


# ---- captions


def test_times_are_written_as_each_format_has_them():
    some = [Word("one", 0.0, 0.5, 0.9), Word("two", 3599.9996, 3723.0049, 0.8)]
    assert srt(some) == (
        "1\n00:00:00,000 --> 00:00:01,000\none\n\n2\n01:00:00,000 --> 01:02:03,005\ntwo\n"
    )
    assert vtt(some) == (
        "WEBVTT\n\n1\n00:00:00.000 --> 00:00:01.000\none\n\n2\n01:00:00.000 --> 01:02:03.005\ntwo\n"
    )
    assert (
        srt([Word("late", 100 * 3600.0, 100 * 3600 + 2.0, 1.0)]).splitlines()[1].startswith("100:")
    )
    assert srt([]) == "" and vtt([]) == "WEBVTT\n\n"
    with pytest.raises(UsageError, match="nan"):
        srt([Word("x", float("nan"), 1.0, 1.0)])


def test_text_cannot_break_a_caption():
    some = [Word("<b>&-->", 0.0, 1.0, 1.0), Word("a\n\nb", 1.0, 2.0, 1.0), Word(" ", 2.0, 3.0, 1.0)]
    assert "&lt;b&gt;&amp;--&gt; a b\n" in vtt(some)
    assert "<b>&→ a b\n" in srt(some)
    for text in (srt(some), vtt(some)):
        assert text.count("-->") == 1 and len(re.findall(r"\n\n", text)) == text.startswith("WEB")


LETTERS = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=50)


@given(
    st.lists(st.tuples(LETTERS, st.floats(0, 3), st.floats(0.01, 2.0)), max_size=60),
)
@effort(max_examples=60)
def test_captions_hold_every_word_in_few_short_lines_and_never_overlap(drawn):
    some, now = [], 0.0
    for text, pause, seconds in drawn:
        some.append(Word(text, now + pause, now + pause + seconds, 0.5))
        now += pause + seconds
    made = cues(some)
    for a, b in zip(made, made[1:], strict=False):
        assert a.end <= b.start
    for cue in made:
        assert cue.start < cue.end and 1 <= len(cue.lines) <= 2
        for line in cue.lines:
            assert len(line) <= WIDTH or " " not in line
    spelled = "".join(line for cue in made for line in cue.lines)
    assert spelled.replace(" ", "") == "".join(text for text, *_ in drawn).replace(" ", "")
    for text in (srt(some), vtt(some)):
        assert text.count("-->") == len(made)


def test_lines_are_of_like_width_and_sentences_end_a_caption():
    text = "the quick brown fox jumps over the lazy dog and runs away from it. Then it sleeps"
    some = [Word(w, n * 0.3, n * 0.3 + 0.25, 1.0) for n, w in enumerate(text.split())]
    first, second = cues(some)
    assert first.lines == ["the quick brown fox jumps over the", "lazy dog and runs away from it."]
    assert second.lines == ["Then it sleeps"]
    assert join_words(["我", "们", "ab", "好"]) == "我们 ab 好"
    assert join_words(["hello", "world"]) == "hello world"


def test_a_short_cue_stays_a_second_unless_the_next_one_comes_before():
    long = "A" * (WIDTH - 2)
    for step in (0.3, 0.9, 1.5, 4.0):
        said = [Word(f"{long} {n}", step * n, step * n + 0.2, 0.9) for n in range(5)]
        made = cues([*said, Word("B" * 2 * WIDTH, step * 5, step * 5 + 0.2, 0.9)])
        assert all(a.end <= b.start for a, b in pairwise(made))
        for one, after in zip(made, [*(cue.start for cue in made[1:]), math.inf], strict=True):
            assert one.end - one.start >= min(1000, after - one.start)
