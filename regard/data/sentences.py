"""Sentences of a text: cut apart, translated one by one, and put together again."""

import re
from collections.abc import Sequence

from regard.data.languages import language_of


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What may stand before a dot without ending a sentence.
_ABBREVIATIONS = _words(
    """mr mrs ms dr prof st mt sr messrs mme mlle hr fr hrn gen col sgt capt lt cmdr rev hon sen rep
    gov pres e.g eg i.e ie vs cf viz ca approx no nos nr vol fig figs eq sec ch pp pg ed eds al
    z.b d.h u.a bzw usf bspw vgl abs str p.ex jan feb mar apr jun jul aug sep sept oct nov dec
    ave blvd dept est tel ph.d"""
)
# Words that begin a sentence, also after initials such as U.S. and J. K.
_STARTERS = _words(
    """a an the this that these those he she it we they i you there here his her its our their my
    in on at for from with by as if when while after before since but and or so yet however then
    what who why how where not no yes der die das ein eine er sie es wir ihr ich le la les un une
    il elle"""
)
# What an ordinal with a dot stands before in German, Czech and their like: "am 3. Oktober".
_AFTER_ORDINALS = _words(
    """januar jänner februar märz april mai juni juli august september oktober november dezember
    jahrhundert jahrhunderts jahrestag geburtstag klasse stock platz"""
)
_BREAK = re.compile(
    # Quantifiers are possessive and no lookahead follows, so a run is never read twice.
    r"""(?P<end>[.!?…؟۔।]++["'”’“»«)\]]*+)(?P<space>\s*+)
    |(?P<wide>[。！？｡]++["'”’」』）】》〉)\]]*+)(?P<gap>\s*+)
    |(?P<white>\s++)""",
    re.VERBOSE,
)
_OPENERS = "\"'“‘„«»(['¿¡—–-"
WITHOUT_SPACES = {"zh", "ja", "yue"}
_WIDE = re.compile("[\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uffef]")


def split_sentences(text: str) -> list[str]:
    """Cut a text into sentence, separator, sentence, separator, ...: joined they are the text."""
    pieces: list[str] = []
    start = 0
    for match in _BREAK.finditer(text):
        kind = match.lastgroup
        if kind == "white":
            # Other white space inside a sentence is no break; before the first one it is kept.
            ends = match.start() == 0 or "\n" in match[0]
            cut = match.start()
        elif kind == "gap":
            ends, cut = True, match.end("wide")
        else:
            cut = match.end("end")
            ends = "\n" in match["space"] or ends_sentence(text, start, match)
        if ends:
            pieces += [text[start:cut], text[cut : match.end()]]
            start = match.end()
    if start < len(text):
        pieces += [text[start:], ""]
    return pieces


def ends_sentence(text: str, start: int, match: re.Match[str]) -> bool:
    """Judge whether a full stop or its like, found inside a text, ends the sentence."""
    after = match.end()
    if after == len(text):
        return True
    if not match["space"]:
        return False
    ahead = text[after : after + 24].lstrip(_OPENERS)
    if ahead[:1].islower():
        return False
    if match["end"][0] != "." or match["end"].startswith(".."):
        return True
    before = text[max(start, match.start() - 16) : match.start()].split()
    word = before[-1].lstrip(_OPENERS).casefold() if before else ""
    following = re.match(r"\w*", ahead)
    next_word = following[0].casefold() if following else ""
    if word in _ABBREVIATIONS:
        # "No. 5" but "Did he? No. He left."
        return word in ("no", "st", "mar", "sec", "est") and next_word in _STARTERS
    if len(word) == 1 and word.isalpha() or re.fullmatch(r"(?:\w\.)+\w", word):
        return next_word in _STARTERS
    if word.isdecimal() and len(word) <= 2:
        # An ordinal, or the number of an item in a list.
        first = len(before) == 1 and match.start() - start < 16
        return not first and next_word not in _AFTER_ORDINALS
    return True


def join_sentences(
    translations: Sequence[str], separators: Sequence[str], target_language: str | None = None
) -> str:
    """Put translated sentences together with their separators, made fit for the language."""
    if len(translations) != len(separators):
        raise ValueError(f"{len(translations)} translations, {len(separators)} separators")
    code = language_of(target_language) if target_language else None
    out: list[str] = []
    for i, (text, separator) in enumerate(zip(translations, separators, strict=True)):
        follower = translations[i + 1] if i + 1 < len(translations) else ""
        if text and follower and not separator.strip(" \u3000"):
            if code is None:
                spaced = not (_WIDE.match(text[-1]) or _WIDE.match(follower[0]))
            elif code in WITHOUT_SPACES:
                # English left as it is inside Chinese keeps its spaces.
                spaced = text[-1].isascii() and follower[0].isascii()
            else:
                spaced = True
            separator = (separator.replace("\u3000", " ") or " ") if spaced else ""
        out += [text, separator]
    return "".join(out)
