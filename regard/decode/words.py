"""Words with their times: where each begins and ends in a sound, and how sure it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from regard.data.tokenizer import Tokenizer

SPACE = "▁"  # how a tokenizer's pieces show a space


@dataclass(frozen=True)
class Word:
    """A word, a number or whatever else stands between two spaces, with its times in seconds."""

    text: str
    start: float
    end: float
    confidence: float


class Timed(Protocol):
    """Tokens with the frames they were emitted in: an Alignment or a CTCHypothesis."""

    @property
    def ids(self) -> Sequence[int]:
        """Return the tokens."""
        ...

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """Return the first frame of each token, and one past its last."""
        ...

    @property
    def confidences(self) -> Sequence[float]:
        """Return how sure each token is."""
        ...


def word_tokens(ids: Sequence[int], tokenizer: Tokenizer) -> list[tuple[str, list[int]]]:
    """Return the words of a text and which of its tokens each is made of.

    Words stand between spaces; a character of a script without spaces is a word.
    """
    found: list[list[int]] = []
    begin = True
    for place, piece in enumerate(tokenizer.pieces(ids)):
        bare = piece.replace(SPACE, "")
        begin = begin or piece.startswith(SPACE) or unspaced(bare)
        if bare:
            if begin:
                found.append([])
            found[-1].append(place)
            begin = piece.endswith(SPACE) or unspaced(bare)
    return [(tokenizer.decode([ids[n] for n in some]).strip(), some) for some in found]


def unspaced(text: str) -> bool:
    """Tell whether a text ends in a character of a script that puts no spaces between words."""
    return bool(text) and (
        "\u3040" <= text[-1] <= "\u30ff"
        or "\u3400" <= text[-1] <= "\u9fff"
        or "\U00020000" <= text[-1] <= "\U0003ffff"
    )


def words(
    timed: Timed, tokenizer: Tokenizer, seconds_per_frame: float, *, offset: float = 0.0
) -> list[Word]:
    """Return the words of an alignment with their times; the sound begins at `offset` seconds."""
    return [
        Word(
            text,
            offset + timed.spans[some[0]][0] * seconds_per_frame,
            offset + timed.spans[some[-1]][1] * seconds_per_frame,
            min(timed.confidences[n] for n in some),
        )
        for text, some in word_tokens(timed.ids, tokenizer)
    ]
