"""Characters that no text should have: traces of wrong conversions, commands, markup."""

import re

# kind -> level, what is said of the rows, and the remedy
MARKS = {
    "replaced": (
        "warning",
        "with U+FFFD, the mark of letters lost in a conversion",
        "convert the original again with its true encoding, or remove the rows",
    ),
    "garbled": (
        "warning",
        "that look like UTF-8 once read as Latin-1 (such as Ã¤ for ä)",
        "convert them back with: iconv -f utf-8 -t latin1 (or cp1252)",
    ),
    "control": (
        "warning",
        "with control characters or line separators",
        "remove them; they become pieces of the vocabulary",
    ),
    "invisible": (
        "note",
        "with invisible characters (zero-width space, soft hyphen, byte order mark)",
        "remove them; equal words look different to a model",
    ),
    "tab": ("note", "with a TAB inside the text", "make it a space"),
    "markup": (
        "note",
        "with HTML entities or tags",
        "turn them into plain text, unless the model is to write them",
    ),
}
_PATTERNS = {
    "replaced": "\ufffd",
    "garbled": "Ã[\u0080-\u00bf\u0152\u0153\u0160\u0161\u0178\u201c-\u201e]|â€|Â[\u00a0-\u00bf]",
    "control": "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]",
    "invisible": "[\u00ad\u200b\u2060\ufeff]",
    "tab": "\t",
    "markup": r"&(?:amp|lt|gt|quot|apos|nbsp|\#\d{1,6});|</?[a-z]{1,10}/?>",
}
_EACH_MARK = {name: re.compile(pattern) for name, pattern in _PATTERNS.items()}
# A single class of first letters is searched many times faster than the alternatives.
_MAY_MARK = re.compile("[\x00-\x1f\x7f-\x9f\u00adÃâÂ&<\u200b\u2028\u2029\u2060\ufeff\ufffd]")


def marks_in(text: str) -> list[str]:
    """Kinds of suspicious characters that a text has."""
    if not _MAY_MARK.search(text):
        return []
    return [kind for kind, pattern in _EACH_MARK.items() if pattern.search(text)]


def excerpt(text: str, most: int = 60) -> str:
    """Start of a text with everything unprintable shown by its code."""
    short = text[:most] + ("…" if len(text) > most else "")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)
