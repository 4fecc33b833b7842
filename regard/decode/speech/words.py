"""Words with their times: where each begins and ends in a sound, and how sure it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from regard.data.tokenizer import Tokenizer
from regard.decode.speech.ctc_align import CTCAlignment
from regard.decode.speech.segments import HOP, SILENCE, smooth

_PIECE_SPACE = "▁"  # how a tokenizer's pieces show a space
_REACH = 0.1  # seconds that a word goes on beyond its tokens where the sound is not known

# Where a word begins and ends in a known sound; found on sentences joined from FSDD's training
# files and the spikes of three CTC models, one of which emits tokens 0.3 seconds early.
_HEARD_RANGE = 80.0  # decibels beneath the loud parts, beyond which nothing is heard
_WORD_RISE, _SLOPE = (
    1.5,
    3.0,
)  # decibels above the noise floor where sound begins, and until it is sure
_SHORTEST_WORD = 0.03  # seconds of a word
_WORD_PAUSE = 0.05  # seconds; less between two words is the end of the first
_USUAL_SECONDS, _PER_LETTER = 0.25, 0.04  # seconds of a word, and more for each letter
_FARTHEST = 0.5  # seconds beyond which a token is no further away
_SEARCHED = 1.5  # seconds around its tokens in which a word is looked for
# Costs, in frames of sound that belong to no word:
_SILENCE_INSIDE = 0.5  # of each frame
_LOUD_BOUNDARY = 12.0  # at full level
_TOKEN_OUTSIDE = 20.0  # a second, as the mean over tokens
_UNLIKELY_LENGTH = 16.0  # for a length e times too long or too short


@dataclass(frozen=True)
class Word:
    """A word, a number or whatever else stands between two spaces, with its times in seconds."""

    text: str
    start: float
    end: float
    confidence: float


def word_tokens(ids: Sequence[int], tokenizer: Tokenizer) -> list[tuple[str, list[int]]]:
    """Words of a text and which of its tokens each is made of.

    Words stand between spaces; a character of a script without spaces is a word.
    """
    found: list[list[int]] = []
    begin = True
    for place, piece in enumerate(tokenizer.pieces(ids)):
        bare = piece.replace(_PIECE_SPACE, "")
        begin = begin or piece.startswith(_PIECE_SPACE) or unspaced(bare)
        if bare:
            if begin:
                found.append([])
            found[-1].append(place)
            begin = piece.endswith(_PIECE_SPACE) or unspaced(bare)
    return [(tokenizer.decode([ids[n] for n in some]).strip(), some) for some in found]


def unspaced(text: str) -> bool:
    """True if a text ends in a character of a script that puts no spaces between words."""
    return bool(text) and (
        "\u3040" <= text[-1] <= "\u30ff"
        or "\u3400" <= text[-1] <= "\u9fff"
        or "\U00020000" <= text[-1] <= "\U0003ffff"
    )


def words(
    timed: CTCAlignment,
    tokenizer: Tokenizer,
    seconds_per_frame: float,
    *,
    level: np.ndarray | None = None,
    offset: float = 0.0,
    delay: float = 0.0,
) -> list[Word]:
    """Words of an alignment with their times; the sound begins at `offset` seconds.

    CTC emits a token in a frame or two, somewhere near its sound. Given the sound's `level`, as
    `loudness` returns it, words are laid over the sound that is heard near their tokens; otherwise
    neighbours meet halfway between their tokens. A model that emits tokens so many seconds after
    their sound has a `delay`, which is negative where it is early.

    Args:
        timed: alignment of tokens to frames
        tokenizer: spells the tokens
        seconds_per_frame: duration of a frame
        level: loudness of the sound, as `loudness` returns it
        offset: time at which the sound begins, in seconds
        delay: seconds by which the model emits tokens late; negative if early
    """
    found = word_tokens(timed.ids, tokenizer)
    if not found:
        return []
    times = [
        np.array([sum(timed.spans[n]) / 2 * seconds_per_frame - delay for n in some])
        for _, some in found
    ]
    bounds = _halfway(times)
    if level is not None:
        bounds = align_words_to_energy(level, times, [len(text) for text, _ in found], bounds)
    return [
        Word(text, offset + start, offset + end, min(timed.confidences[n] for n in some))
        for (text, some), (start, end) in zip(found, bounds, strict=True)
    ]


def _halfway(times: Sequence[np.ndarray]) -> list[tuple[float, float]]:
    """Let words reach a little beyond their tokens, and neighbours meet in the middle."""
    first = np.maximum.accumulate([max(0.0, float(some[0])) for some in times])
    last = np.maximum.accumulate([max(0.0, float(some[-1])) for some in times])
    middle = (np.minimum(last[:-1], first[1:]) + first[1:]) / 2
    low = np.maximum(np.concatenate([[0.0], middle]), first - _REACH)
    high = np.minimum(np.concatenate([middle, [np.inf]]), last + _REACH)
    return list(zip(low.tolist(), np.maximum(high, low).tolist(), strict=True))


@dataclass(frozen=True)
class _Boundaries:
    """Places where a word may begin or end, in seconds, and what that costs; each is (n,)."""

    at: np.ndarray
    loudness: np.ndarray  # cost of a boundary at the place
    sound: np.ndarray  # cost of all sound before the place, were it outside of words
    silence: np.ndarray  # cost of all silence before the place, were it inside of words


class _WordEnds(NamedTuple):
    """The cheapest way to lay words up to one, for each boundary from `first` on as its end."""

    first: int
    costs: np.ndarray
    starts: np.ndarray  # boundary where the word begins, for each of its ends
    previous: np.ndarray  # boundary where the word before ends, for each beginning from `first` on


def align_words_to_energy(
    level: np.ndarray,
    times: Sequence[np.ndarray],
    letters: Sequence[int],
    usual: list[tuple[float, float]],
) -> list[tuple[float, float]]:
    """Beginning and end of each word, such that words cover the sound at the lowest cost.

    Sound outside of words costs, and so do silence inside, a boundary where it is loud, tokens that
    lie outside of their word, and a length that is unlikely for so many letters. Words begin and
    end where the sound rises, falls or is softest for a moment, or where they usually would; the
    best way is found by dynamic programming over such boundaries within a few seconds of each
    word's tokens. If there is none, words are where they usually would be.
    """
    if len(level) == 0 or level.max() <= SILENCE:
        return usual
    boundaries = _find_boundaries(level, usual)
    nothing = np.zeros(1, dtype=np.int64)
    ends = _WordEnds(0, np.zeros(1), nothing, nothing)
    words: list[_WordEnds] = []
    for tokens, count in zip(times, letters, strict=True):
        ends = _add_word(boundaries, ends, tokens, count)
        words.append(ends)
    total = ends.costs - boundaries.sound[ends.first : ends.first + len(ends.costs)]
    if not np.isfinite(total.min()):
        return usual
    return _join_close(_trace_back(boundaries, words, ends.first + int(total.argmin())))


def _find_boundaries(level: np.ndarray, usual: list[tuple[float, float]]) -> _Boundaries:
    """Boundaries at the edges and dips of the sound, and where words usually begin and end."""
    top = float(np.percentile(level, 95))
    floor = max(float(np.percentile(level, 5)), top - _HEARD_RANGE)
    heard = np.clip((level - floor - _WORD_RISE) / _SLOPE, 0.0, 1.0)
    loud = np.clip((smooth(level) - floor) / max(1.0, top - floor), 0.0, 1.2)
    edges = np.flatnonzero(np.diff(heard > 0, prepend=False, append=False))
    around = np.pad(loud, 1, mode="edge")
    dips = np.flatnonzero((loud <= around[:-2]) & (loud < around[2:]))
    expected = np.clip(np.rint(np.array(usual).ravel() / HOP), 0, len(level)).astype(np.int64)
    places = np.unique(np.concatenate([[0, len(level)], edges, dips, expected]))
    near = np.concatenate([[0.0, 0.0], loud, [0.0, 0.0]])
    softest = np.stack([near[n : n + len(level) + 1] for n in range(4)]).min(0)
    return _Boundaries(
        at=places * HOP,
        loudness=_LOUD_BOUNDARY * softest[places],
        sound=np.concatenate([[0.0], np.cumsum(heard)])[places],
        silence=_SILENCE_INSIDE * np.concatenate([[0.0], np.cumsum(1 - heard)])[places],
    )


def _add_word(
    boundaries: _Boundaries, before: _WordEnds, tokens: np.ndarray, letters: int
) -> _WordEnds:
    """The cheapest ways to lay one more word, with tokens at these seconds, after those before."""
    at, first = boundaries.at, before.first
    low = max(first, int(np.searchsorted(at, tokens.min() - _SEARCHED)))
    high = max(low + 1, int(np.searchsorted(at, tokens.max() + _SEARCHED, "right")))
    here = slice(low, high)
    # the cheapest end of the word before, for each place where this one may begin
    waiting = np.full(high - first, np.inf)
    waiting[: len(before.costs)] = before.costs[: high - first]
    waiting -= boundaries.sound[first:high]
    lowest = np.minimum.accumulate(waiting)
    previous = np.maximum.accumulate(np.where(waiting <= lowest, np.arange(first, high), 0))
    # to begin, to be so long, and to end
    loudness, silence = boundaries.loudness[here], boundaries.silence[here]
    early = np.clip(at[here, None] - tokens, 0.0, _FARTHEST).mean(1)
    late = np.clip(tokens - at[here, None], 0.0, _FARTHEST).mean(1)
    begin = lowest[low - first :] + boundaries.sound[here] + loudness - silence
    begin += _TOKEN_OUTSIDE * early
    seconds = at[here] - at[here, None]
    possible = seconds > _SHORTEST_WORD
    logs = np.log(np.where(possible, seconds, 1.0)) - np.log(_USUAL_SECONDS + _PER_LETTER * letters)
    costs = np.where(possible, begin[:, None] + _UNLIKELY_LENGTH * logs**2, np.inf)
    starts = costs.argmin(0)
    best = costs[starts, np.arange(high - low)] + silence + loudness
    best += _TOKEN_OUTSIDE * late
    return _WordEnds(low, best, low + starts, previous[low - first :])


def _trace_back(
    boundaries: _Boundaries, words: Sequence[_WordEnds], end: int
) -> list[tuple[float, float]]:
    """Beginning and end of each word, of which the last ends at a given boundary."""
    bounds: list[tuple[float, float]] = []
    for word in reversed(words):
        start = int(word.starts[end - word.first])
        bounds.append((float(boundaries.at[start]), float(boundaries.at[end])))
        end = int(word.previous[start - word.first])
    return bounds[::-1]


def _join_close(bounds: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Let a word reach the next one where the pause between them is short."""
    joined = [
        (start, after if after - end < _WORD_PAUSE else end)
        for (start, end), (after, _) in pairwise(bounds)
    ]
    return [*joined, *bounds[-1:]]
