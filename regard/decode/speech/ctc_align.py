"""Forced alignment by CTC: which frames each token of a given text was emitted in (Viterbi)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np
from torch import Tensor

from regard.errors import UsageError

MOST_MOVES = 1 << 26  # bytes of moves that are kept at once
BLANK = 0  # the padding of every tokenizer that Regard trains, which no text holds


@dataclass(frozen=True)
class CTCAlignment:
    """A text and the frames of its most likely CTC path."""

    ids: list[int]
    logprob: float  # of the path; of the whole text, over all paths, in a CTCHypothesis
    spans: list[tuple[int, int]]  # first frame of each token, and one past its last
    confidences: list[float]  # the largest posterior of each token within its span


def required_frames(ids: Sequence[int]) -> int:
    """Fewest frames that a text can be aligned to: a blank parts equal neighbours."""
    return len(ids) + sum(a == b for a, b in pairwise(ids))


def alignable(frames: int, ids: Sequence[int]) -> bool:
    """True if some CTC path of so many frames spells the text."""
    return frames >= required_frames(ids)


def not_alignable(pairs: Iterable[tuple[int, Sequence[int]]]) -> list[int]:
    """Pairs of a number of frames and a text that have no CTC path, and so no finite loss."""
    return [n for n, (frames, ids) in enumerate(pairs) if not alignable(frames, ids)]


def checked(log_probs: Tensor | np.ndarray, blank: int) -> np.ndarray:
    """Log-probabilities (frames, vocab) in float64; refuses what is none."""
    table = (
        log_probs.detach().cpu().double().numpy() if isinstance(log_probs, Tensor) else log_probs
    )
    table = np.asarray(table, dtype=np.float64)
    if table.ndim != 2 or not 0 <= blank < table.shape[1]:
        raise UsageError(
            f"log-probabilities of shape {tuple(table.shape)} with blank={blank}; expected "
            "(frames, vocab) and one of its tokens"
        )
    if np.isnan(table).any() or (table == inf).any():
        raise UsageError("the model answers with numbers that are not finite; is it damaged?")
    return table


def align(log_probs: Tensor | np.ndarray, ids: Sequence[int], blank: int = BLANK) -> CTCAlignment:
    """Most likely alignment of a text to log-probabilities (frames, vocab)."""
    table = checked(log_probs, blank)
    ids = [int(one) for one in ids]
    frames, vocab = table.shape
    for one in ids:
        if one == blank or not 0 <= one < vocab:
            raise UsageError(f"token {one} cannot be aligned; expected 0 to {vocab - 1}, no blank")
    if not alignable(frames, ids):
        raise UsageError(
            f"a text of {len(ids)} tokens needs {required_frames(ids)} frames and the sound has "
            f"{frames}; is it the text of another sound?"
        )
    path, logprob = _viterbi(table, ids, blank)
    spans: list[tuple[int, int]] = []
    confidences: list[float] = []
    for n, one in enumerate(ids):
        (places,) = np.nonzero(path == 2 * n + 1)
        spans.append((int(places[0]), int(places[-1]) + 1))
        confidences.append(float(np.exp(table[places, one].max())))
    return CTCAlignment(ids, logprob, spans, confidences)


def _viterbi(table: np.ndarray, ids: Sequence[int], blank: int) -> tuple[np.ndarray, float]:
    """State of every frame on the best path, and its log-probability.

    State 2n + 1 emits token n; even states are the blanks around the tokens. A long sound is gone
    through in blocks of frames, whose moves are computed again on the way back, to bound memory.
    """
    frames, count = len(table), 2 * len(ids) + 1
    if frames == 0:
        return np.zeros(0, dtype=np.int64), 0.0
    emit = np.full(count, blank)
    emit[1::2] = ids
    can_skip = np.zeros(count, dtype=bool)  # from one token to the next without a blank
    can_skip[3::2] = emit[3::2] != emit[1:-2:2]
    skip = np.where(can_skip, 0.0, -inf)
    # two places before the first state, which no path is in
    reach = np.full(count + 2, -inf)
    reach[2:4] = table[0, emit[:2]]

    def walk(
        reach: np.ndarray, start: int, end: int, moves: np.ndarray | None = None
    ) -> np.ndarray:
        """Go on from the frame before start; moves tell how many states each one came from."""
        reach, ways = reach.copy(), np.empty((3, count))
        for t in range(start, end):
            ways[0], ways[1] = reach[2:], reach[1:-1]
            np.add(reach[:-2], skip, out=ways[2])
            if moves is not None:
                moves[t - start] = ways.argmax(0)
            np.add(ways.max(0), table[t, emit], out=reach[2:])
        return reach

    size = frames if frames * count <= MOST_MOVES else int(frames**0.5) + 1
    starts = range(1, frames, size)
    before = []
    for start in starts:
        before.append(reach)
        reach = walk(reach, start, min(frames, start + size)) if size < frames else reach
    path = np.empty(frames, dtype=np.int64)
    state = -1
    logprob = -inf
    moves = np.empty((min(size, frames), count), dtype=np.int8)
    for start, reach in zip(reversed(starts), reversed(before), strict=True):
        end = min(frames, start + size)
        reach = walk(reach, start, end, moves)
        if state < 0:
            state, logprob = _last_state(reach[2:])
        for t in range(end - 1, start - 1, -1):
            path[t] = state
            state -= int(moves[t - start, state])
    if state < 0:  # a single frame
        state, logprob = _last_state(reach[2:])
    path[0] = state
    return path, logprob


def _last_state(reach: np.ndarray) -> tuple[int, float]:
    """States where a path may end (the last token or the blank after it), with their scores."""
    state = max(range(max(0, len(reach) - 2), len(reach)), key=lambda n: (reach[n], n))
    if reach[state] == -inf:
        raise UsageError("this text has probability 0 by the model; it cannot be aligned")
    return state, float(reach[state])
