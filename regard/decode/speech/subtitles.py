"""Words with times as captions: SubRip (SRT) and WebVTT."""

from collections.abc import Callable, Sequence
from math import isfinite
from typing import NamedTuple
from unicodedata import east_asian_width

from regard.decode.speech.words import Word, unspaced
from regard.errors import UsageError

_LINES, WIDTH = 2, 42  # of a cue; the width of a character of Chinese or Japanese counts double
_LONGEST_CUE, _SHORTEST_CUE = (
    7.0,
    1.0,
)  # seconds that a cue is shown, the shorter one where there is time
_CUE_PAUSE = 1.0  # seconds of silence that end a cue
_SENTENCE_ENDS = (
    ".",
    "?",
    "!",
    "。",
    "？",
    "！",
)  # of a sentence, which ends a cue that is half full
_LAST_MILLISECOND = 3_600_000 * 1000  # milliseconds; no recording is longer


class Cue(NamedTuple):
    """One caption: when it is shown, in milliseconds, and its lines."""

    start: int
    end: int
    lines: list[str]


def join_words(texts: Sequence[str]) -> str:
    """Put words together, with no space between characters of a script that has none."""
    whole = ""
    for text in texts:
        bare = " ".join(text.split())
        tight = unspaced(whole[-1:]) and unspaced(bare[:1])
        whole += bare if tight or not whole or not bare else f" {bare}"
    return whole


def _width(text: str) -> int:
    return sum(2 if east_asian_width(c) in "WF" else 1 for c in text)


def _lines(texts: Sequence[str]) -> list[str]:
    """Break a cue into lines at spaces: as few as possible, and of like width."""
    whole = join_words(texts)
    if _width(whole) <= WIDTH or len(texts) < 2:
        return [whole]
    halves = [(join_words(texts[:n]), join_words(texts[n:])) for n in range(1, len(texts))]
    return list(min(halves, key=lambda pair: max(map(_width, pair))))


def _fits(texts: Sequence[str]) -> bool:
    lines = _lines(texts)
    return len(lines) <= _LINES and all(_width(line) <= WIDTH for line in lines)


def _milliseconds(seconds: float) -> int:
    if not isfinite(seconds) or seconds * 1000 > _LAST_MILLISECOND:
        raise UsageError(f"a word at {seconds} seconds; expected a time within the sound")
    return max(0, round(seconds * 1000))


def cues(words: Sequence[Word]) -> list[Cue]:
    """Group words into captions of at most two lines, which never overlap."""
    groups: list[list[Word]] = []
    for word in words:
        if not word.text.strip():
            continue
        group = groups[-1] if groups else []
        texts = [one.text for one in group]
        full = _width(join_words(texts)) >= WIDTH and texts[-1].endswith(_SENTENCE_ENDS)
        if (
            not group
            or full
            or word.start - group[-1].end > _CUE_PAUSE
            or word.end - group[0].start > _LONGEST_CUE
            or not _fits([*texts, word.text])
        ):
            groups.append([word])
        else:
            group.append(word)
    made: list[Cue] = []
    for group in groups:
        start = max(_milliseconds(group[0].start), made[-1].end if made else 0)
        end = max(_milliseconds(max(word.end for word in group)), start + 1)
        made.append(Cue(start, end, _lines([word.text for word in group])))
    for n, cue in enumerate(made):
        after = made[n + 1].start if n + 1 < len(made) else _LAST_MILLISECOND
        until = min(cue.start + round(_SHORTEST_CUE * 1000), after)
        made[n] = cue._replace(end=max(cue.end, until))
    return made


def _clock(milliseconds: int, point: str) -> str:
    seconds, rest = divmod(milliseconds, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{seconds:02}{point}{rest:03}"


def _cues_as_text(words: Sequence[Word], point: str, escape: Callable[[str], str]) -> str:
    blocks = []
    for number, cue in enumerate(cues(words), 1):
        times = f"{_clock(cue.start, point)} --> {_clock(cue.end, point)}"
        blocks.append("\n".join([str(number), times, *map(escape, cue.lines)]) + "\n")
    return "\n".join(blocks)


def srt(words: Sequence[Word]) -> str:
    """Write words as SubRip captions, which know no escapes: an arrow would end a cue."""
    return _cues_as_text(words, ",", lambda line: line.replace("-->", "→"))


def vtt(words: Sequence[Word]) -> str:
    """Write words as WebVTT captions."""

    def escape(line: str) -> str:
        return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")

    return "WEBVTT\n\n" + _cues_as_text(words, ".", escape)
