"""Forced alignment by CTC: which frames each token of a given text was emitted in (Viterbi)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np
from torch import Tensor

from regard.errors import UsageError

BLANK = 0  # the padding of every tokenizer that Regard trains, which no text holds


@dataclass(frozen=True)
class Alignment:
    """A text and the frames of its most likely CTC path."""

    ids: list[int]
    logprob: float  # of the path; of the whole text, over all paths, in a CTCHypothesis
    spans: list[tuple[int, int]]  # first frame of each token, and one past its last
    confidences: list[float]  # the largest posterior of each token within its span


def required_frames(ids: Sequence[int]) -> int:
    """Return the fewest frames that a text can be aligned to: a blank parts equal neighbours."""
    return len(ids) + sum(a == b for a, b in pairwise(ids))


def alignable(frames: int, ids: Sequence[int]) -> bool:
    """Tell whether some CTC path of so many frames spells the text."""
    return frames >= required_frames(ids)


def not_alignable(pairs: Iterable[tuple[int, Sequence[int]]]) -> list[int]:
    """Return which pairs of a number of frames and a text have no CTC path, and so no loss."""
    return [n for n, (frames, ids) in enumerate(pairs) if not alignable(frames, ids)]


def checked(log_probs: Tensor | np.ndarray, blank: int) -> np.ndarray:
    """Return log-probabilities (frames, vocab) in float64, or refuse what is none."""
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


def align(log_probs: Tensor | np.ndarray, ids: Sequence[int], blank: int = BLANK) -> Alignment:
    """Return the most likely alignment of a text to log-probabilities (frames, vocab)."""
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
    return Alignment(ids, logprob, spans, confidences)


def _viterbi(table: np.ndarray, ids: Sequence[int], blank: int) -> tuple[np.ndarray, float]:
    """Return the state of every frame on the best path, and its log-probability.

    State 2n + 1 emits token n; even states are the blanks around the tokens.
    """
    frames, count = len(table), 2 * len(ids) + 1
    if frames == 0:
        return np.zeros(0, dtype=np.int64), 0.0
    emit = np.full(count, blank)
    emit[1::2] = ids
    can_skip = np.zeros(count, dtype=bool)  # from one token to the next without a blank
    can_skip[3::2] = emit[3::2] != emit[1:-2:2]
    emitted = table[:, emit]
    never = np.where(can_skip, 0.0, -inf)
    moves = np.zeros((frames, count), dtype=np.int8)
    # two places before the first state, from which none is reached
    reach = np.full(count + 2, -inf)
    reach[2:4] = emitted[0, :2]
    ways = np.empty((3, count))
    for t in range(1, frames):
        ways[0] = reach[2:]
        ways[1] = reach[1:-1]
        np.add(reach[:-2], never, out=ways[2])
        moves[t] = ways.argmax(0)
        np.add(ways.max(0), emitted[t], out=reach[2:])
    last = reach[2:]
    state = count - 1
    if count > 1 and last[count - 2] > last[count - 1]:
        state = count - 2
    logprob = float(last[state])
    if logprob == -inf:
        raise UsageError("this text has probability 0 by the model; it cannot be aligned")
    path = np.empty(frames, dtype=np.int64)
    for t in range(frames - 1, -1, -1):
        path[t] = state
        state -= int(moves[t, state])
    return path, logprob
