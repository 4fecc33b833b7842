"""Checks a public tokenizer.json: only known components with bounded values get through.

Everything is checked here before the tokenizers library, which trusts its input, sees any of it.
"""

import base64
import binascii
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from regard.data.tokenize import MOST_PIECES
from regard.errors import UsageError
from regard.files import errors_in

MOST_BYTES = 40 * 2**20  # of a tokenizer's file
_MOST_MERGES = 2_000_000
_MOST_ADDED = 50_000
LONGEST_PIECE = 4096
_LONGEST_TEXT = 64  # that a part may put in, take out or look for
_MOST_PARTS = 32
_MOST_GROWTH = 16  # times that replacing may lengthen a text
_LONGEST_MAPPED = 256  # bytes that a character map may put in the place of one character

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
CLIP_PATTERN = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]"
    r"|[^\s\p{L}\p{N}]+"
)
TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Expressions are matched by backtracking, which can take forever, so only these are taken.
PATTERNS = frozenset(
    [
        GPT2_PATTERN,  # RoBERTa and whatever follows them, too
        LLAMA3_PATTERN,  # (GPT-4), in two spellings
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        QWEN_PATTERN,
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        CLIP_PATTERN,  # in two spellings
        r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
        # GPT-4o and LLaMA 4
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        TEKKEN_PATTERN,  # Mistral
        # BLOOM
        r" ?[^(\s|[.,!?…。，、।۔،])]+",
        # DeepSeek
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^""" + "\r\n"
        r"""\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[""" + "\r\n"
        r"""]*|\s*[""" + "\r\n"
        r"""]+|\s+(?!\S)|\s+""",
        # white space and digits
        r" {2,}",
        r"\s{2,}|[\n\r\t]",
        r"[\n\r\t]",
        r"\s+",
        r"\n",
        r"\p{N}",
        r"\p{N}+",
        r"\d",
    ]
)


# ---- single values: each returns what may go on to the library


def flag(value: Any) -> bool:
    """Let through true and false."""
    if not isinstance(value, bool):
        raise UsageError(f"{value!r:.40} is neither true nor false")
    return value


def text(value: Any) -> str:
    """Let through a short text."""
    if not isinstance(value, str) or len(value) > _LONGEST_TEXT:
        raise UsageError(f"{value!r:.40} is not a text of at most {_LONGEST_TEXT} characters")
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise UsageError(f"{value!r:.40} holds half a character")
    return value


def maybe(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let through null, too."""
    return lambda value: None if value is None else check(value)


def letter(value: Any) -> str:
    """Let through one character."""
    if len(text(value)) != 1:
        raise UsageError(f"{value!r:.40} is not one character")
    return value


def count(value: Any) -> int:
    """Let through a small number."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1000:
        raise UsageError(f"{value!r:.40} is not a number from 0 to 1000")
    return value


def nothing(value: Any) -> int:
    """Let through zero: the library fails when it strips the end of a text that is too short."""
    if value != 0:
        raise UsageError(f"{value!r:.40} is not 0")
    return 0


def one_of(*names: str) -> Callable[[Any], str]:
    """Let through one of some names."""

    def check(value: Any) -> str:
        if value not in names:
            raise UsageError(f"{value!r:.40} is not one of {', '.join(names)}")
        return value

    return check


def pattern(value: Any) -> dict[str, str]:
    """Let through a text to look for, or one of the expressions that are known to be harmless."""
    if isinstance(value, Mapping) and list(value) == ["String"] and text(value["String"]):
        return dict(value)
    if isinstance(value, Mapping) and list(value) == ["Regex"]:
        if isinstance(value["Regex"], str) and value["Regex"] in PATTERNS:
            return dict(value)
        raise UsageError(
            f"the expression {value['Regex']!r:.60} is not among those known to be harmless; "
            "export the tokenizer with a well-known one, such as that of GPT-2"
        )
    raise UsageError(f"{value!r:.40} is not a pattern")


def character_map(value: Any) -> str:
    """Let through a compiled character map of SentencePiece in base64."""
    try:
        check_map(base64.b64decode(value, validate=True))
    except (binascii.Error, TypeError, ValueError) as error:
        raise UsageError(f"a character map that is not base64 ({str(error)[:60]})") from error
    return value


def check_map(data: bytes) -> None:
    """Refuse a character map in which the library would read outside of its table.

    It is the size of a table, a table of units that lead to each other (a double array), and texts
    that end in zero bytes, to which its leaves point.
    """
    size = int.from_bytes(data[:4], "little")
    if not data[4:] or size % 1024 or not 0 < size <= len(data) - 4:
        raise UsageError("a character map that is cut short")
    units = np.frombuffer(data[4 : 4 + size], "<u4").astype(np.int64)
    texts = data[4 + size :]
    try:
        texts.decode()
    except UnicodeDecodeError as error:
        raise UsageError("a character map whose texts are not UTF-8") from error
    inner = units >> 31 == 0
    next_block = np.arange(len(units)) ^ (units >> 10 << ((units & 512) >> 6))
    leaves = next_block[inner & (units >> 8 & 1 == 1)]
    if (next_block[inner] | 255).max(initial=0) >= len(units):
        raise UsageError("a character map that leads outside of its table")
    starts = units[leaves] & 0x7FFFFFFF
    where = np.frombuffer(texts, np.uint8)
    if starts.max(initial=0) >= len(texts) or ((where[starts] & 0xC0) == 0x80).any():
        raise UsageError("a character map that leads outside of its texts")
    if max(map(len, texts.split(b"\0"))) > _LONGEST_MAPPED:
        raise UsageError("a character map that makes long texts of single characters")


# ---- components: which settings each may have

_KeyChecks = Mapping[str, Mapping[str, Callable[[Any], Any]]]

_BEHAVIOUR = one_of("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
_BYTE_LEVEL = {"add_prefix_space": flag, "trim_offsets": flag, "use_regex": flag}
_METASPACE = {
    "replacement": letter,
    "str_rep": text,
    "prepend_scheme": one_of("always", "never", "first"),
    "add_prefix_space": flag,
    "split": flag,
}

_NORMALIZERS: _KeyChecks = {
    "BertNormalizer": {
        "clean_text": flag,
        "handle_chinese_chars": flag,
        "strip_accents": maybe(flag),
        "lowercase": flag,
    },
    "NFC": {},
    "NFD": {},
    "NFKC": {},
    "NFKD": {},
    "Nmt": {},
    "Lowercase": {},
    "StripAccents": {},
    "ByteLevel": {},
    "Strip": {"strip_left": flag, "strip_right": flag},
    "Prepend": {"prepend": text},
    "Replace": {"pattern": pattern, "content": text},
    "Precompiled": {"precompiled_charsmap": character_map},
}
_PRE_TOKENIZERS: _KeyChecks = {
    "BertPreTokenizer": {},
    "ByteLevel": _BYTE_LEVEL,
    "Metaspace": _METASPACE,
    "Whitespace": {},
    "WhitespaceSplit": {},
    "UnicodeScripts": {},
    "Punctuation": {"behavior": _BEHAVIOUR},
    "Digits": {"individual_digits": flag},
    "Split": {"pattern": pattern, "behavior": _BEHAVIOUR, "invert": flag},
}
_DECODERS: _KeyChecks = {
    "WordPiece": {"prefix": text, "cleanup": flag},
    "ByteLevel": _BYTE_LEVEL,
    "Metaspace": _METASPACE,
    "ByteFallback": {},
    "Fuse": {},
    "Strip": {"content": letter, "start": count, "stop": nothing},
    "Replace": {"pattern": pattern, "content": text},
    "BPEDecoder": {"suffix": text},
}
# the key of tokenizer.json -> its known parts, and the key of the parts in a sequence of them
TOKENIZER_PARTS: dict[str, tuple[_KeyChecks, str]] = {
    "normalizer": (_NORMALIZERS, "normalizers"),
    "pre_tokenizer": (_PRE_TOKENIZERS, "pretokenizers"),
    "decoder": (_DECODERS, "decoders"),
}


def check_part(kind: str, value: Any) -> dict[str, Any] | None:
    """Return a part, or a sequence of parts, in which everything is known."""
    if value is None:
        return None
    table, inner = TOKENIZER_PARTS[kind]
    parts = _flat(kind, value, inner, 0)
    if len(parts) > _MOST_PARTS:
        raise UsageError(f"{len(parts)} parts in its {kind}; expected at most {_MOST_PARTS}")
    parts = [_known(kind, part, table) for part in parts]
    growth = math.prod(_growth(part) for part in parts)
    if growth > _MOST_GROWTH:
        raise UsageError(f"its {kind} makes texts up to {growth:,.0f} times as long")
    return parts[0] if len(parts) == 1 else {"type": "Sequence", inner: parts}


def _flat(kind: str, value: Any, inner: str, depth: int) -> list[Any]:
    """Lay sequences of sequences out as one."""
    if not isinstance(value, dict) or depth > 4:
        raise UsageError(f"its {kind} is {value!r:.40}; expected an object with a type")
    if value.get("type") != "Sequence":
        return [value]
    members = value.get(inner)
    if not isinstance(members, list) or len(members) > _MOST_PARTS:
        raise UsageError(f"its {kind} is a sequence without at most {_MOST_PARTS} {inner}")
    return [part for member in members for part in _flat(kind, member, inner, depth + 1)]


def _known(kind: str, part: dict[str, Any], table: _KeyChecks) -> dict[str, Any]:
    name = part.get("type")
    if not isinstance(name, str) or name not in table:
        raise UsageError(f"a {kind} of type {name!r:.40}; known are {', '.join(sorted(table))}")
    checks, made = table[name], {"type": name}
    for key, value in part.items():
        if key == "type":
            continue
        if key not in checks:
            raise UsageError(f"the {kind} {name} with {key!r:.40}, which is not known")
        with errors_in(f"the {kind} {name}, {key}"):
            made[key] = checks[key](value)
    return made


def _growth(part: Mapping[str, Any]) -> float:
    if part["type"] != "Replace":
        return 1.0
    least = len(part["pattern"].get("String", "x"))
    return max(1.0, len(part["content"]) / least)


# ---- the model: its pieces

BPE = {
    "fuse_unk": flag,
    "byte_fallback": flag,
    "ignore_merges": flag,
    "unk_token": maybe(text),
    "continuing_subword_prefix": maybe(text),
    "end_of_word_suffix": maybe(text),
}
_MODELS: _KeyChecks = {
    "BPE": BPE,
    "WordPiece": {
        "unk_token": text,
        "continuing_subword_prefix": text,
        "max_input_chars_per_word": count,
    },
    "WordLevel": {"unk_token": text},
    "Unigram": {"byte_fallback": flag},
}


def check_model(model: object) -> dict[str, Any]:
    """Return the model of a tokenizer in which everything is known."""
    if not isinstance(model, dict):
        raise UsageError("it has no model")
    kind = model.get("type") or _guess(model)
    if not isinstance(kind, str) or kind not in _MODELS:
        raise UsageError(f"a model of type {kind!r:.40}; known are {', '.join(_MODELS)}")
    if model.get("dropout"):
        raise UsageError(f"dropout={model['dropout']!r:.20} in its model; expected none")
    pieces = {"type", "vocab", "merges", "unk_id", "dropout"}
    rest = {key: value for key, value in model.items() if key not in pieces}
    made = _known("model", {"type": kind, **rest}, _MODELS)
    if kind == "Unigram":
        made["vocab"] = check_scores(model.get("vocab"))
        made["unk_id"] = check_id(model.get("unk_id"), len(made["vocab"]))
        return made
    vocab = made["vocab"] = check_vocab(model.get("vocab"))
    unknown = made.get("unk_token")
    if unknown is not None and unknown not in vocab:
        if kind == "WordPiece":
            raise UsageError(f"its unk_token {unknown!r:.40} is not in its vocabulary")
        if kind == "BPE":
            made["unk_token"] = None  # GPT-2's way: every byte is there, so nothing is unknown
    if kind == "BPE":
        prefix = made.get("continuing_subword_prefix") or ""
        made["merges"] = check_merges(model.get("merges"), vocab, prefix)
    return made


def _guess(model: Mapping[str, Any]) -> str | None:
    """Tell what a model is that is too old to say it."""
    for key, kind in (("merges", "BPE"), ("unk_id", "Unigram"), ("unk_token", "WordPiece")):
        if key in model:
            return kind
    return None


def check_id(number: Any, pieces: int) -> int | None:
    """Let through the number of a piece, or none."""
    if number is not None and (
        isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < pieces
    ):
        raise UsageError(f"the id {number!r:.40}; expected 0 to {pieces - 1}, as it has pieces")
    return number


def check_vocab(vocab: Any) -> dict[str, int]:
    """Let through pieces with their numbers."""
    if not isinstance(vocab, dict) or not 0 < len(vocab) <= MOST_PIECES:
        raise UsageError(f"it has no vocabulary of 1 to {MOST_PIECES:,} pieces")
    if max(map(len, vocab)) > LONGEST_PIECE:
        raise UsageError(f"a piece of over {LONGEST_PIECE} characters in its vocabulary")
    if set(map(type, vocab.values())) != {int} or min(vocab.values()) < 0:
        wrong = next(n for n in vocab.values() if type(n) is not int or n < 0)
        raise UsageError(f"the id {wrong!r:.40} in its vocabulary; expected 0, 1 and so on")
    check_id(max(vocab.values()), MOST_PIECES)
    if len(set(vocab.values())) != len(vocab):
        raise UsageError("two pieces of its vocabulary have the same id")
    _whole("".join(vocab))
    return vocab


def check_scores(vocab: Any) -> list[list[Any]]:
    """Let through pieces with the logarithms of their probabilities."""
    if not isinstance(vocab, list) or not 0 < len(vocab) <= MOST_PIECES:
        raise UsageError(f"it has no vocabulary of 1 to {MOST_PIECES:,} pieces")
    for row in vocab:
        if type(row) is not list or len(row) != 2 or type(row[0]) is not str or not row[0]:
            raise UsageError(f"{row!r:.40} in its vocabulary is not a piece with a score")
        piece, score = row
        if type(score) not in (int, float) or not abs(score) <= 1e9:
            raise UsageError(f"the piece {piece!r:.40} has the score {score!r:.40}")
        if len(piece) > LONGEST_PIECE:
            raise UsageError(f"a piece of over {LONGEST_PIECE} characters in its vocabulary")
    _whole("".join(piece for piece, _ in vocab))
    return vocab


def check_merges(merges: Any, vocab: Mapping[str, int], prefix: str) -> list[list[str]]:
    """Let through pairs of pieces that are joined to a third, whichever way they are written.

    The prefix of a piece that goes on a word is left out where it is joined.
    """
    if not isinstance(merges, list) or len(merges) > _MOST_MERGES:
        raise UsageError(f"it has no list of at most {_MOST_MERGES:,} merges")
    cut = len(prefix)
    pairs = [merge.split(" ") if type(merge) is str else merge for merge in merges]
    for pair in pairs:
        if type(pair) is not list or list(map(type, pair)) != [str, str]:
            raise UsageError(f"the merge {pair!r:.40} is not a pair of pieces")
        left, right = pair
        if left not in vocab or right not in vocab:
            raise UsageError(f"the merge {pair!r:.40} joins something that is not a piece")
        if left + right[cut:] not in vocab or not right.startswith(prefix):
            raise UsageError(f"the merge {pair!r:.40} does not give a piece")
    return pairs


def _whole(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError("half a character in its vocabulary") from error


_ADDED = {
    "single_word": flag,
    "lstrip": flag,
    "rstrip": flag,
    "normalized": flag,
    "special": flag,
}


def check_added(added: Any) -> list[dict[str, Any]]:
    """Let through tokens that are found in a text before it is split."""
    if not isinstance(added, list) or len(added) > _MOST_ADDED:
        raise UsageError(f"its added_tokens are not a list of at most {_MOST_ADDED:,}")
    made = []
    for token in added:
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise UsageError(f"{token!r:.40} in its added_tokens is not a token")
        name = token["content"]
        if not 0 < len(name) <= 4 * _LONGEST_TEXT:
            raise UsageError(f"the added token {name!r:.40} is empty or too long")
        _whole(name)
        kept = {"id": check_id(token.get("id"), MOST_PIECES), "content": name}
        if kept["id"] is None:
            raise UsageError(f"the added token {name!r:.40} has no id")
        for key, check in _ADDED.items():
            # each is given, as the library wants them all
            kept[key] = check(token.get(key, key == "normalized" and not token.get("special")))
        made.append(kept)
    names, numbers = ({token[key] for token in made} for key in ("content", "id"))
    if len(names) != len(made) or len(numbers) != len(made):
        raise UsageError("two added tokens have the same name or id")
    return sorted(made, key=lambda token: token["id"])
