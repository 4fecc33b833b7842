"""A tokenizer that came with a public checkpoint, with the interface of Regard's own."""

import hashlib
import json
import re
import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import tokenizers

from regard.data.tokenize import MOST_PIECES, join_bytes
from regard.errors import UsageError
from regard.files import errors_in, read_json, write_atomically
from regard.pretrained.tokenizer_checks import (
    MOST_BYTES,
    TOKENIZER_PARTS,
    check_added,
    check_id,
    check_model,
    check_part,
)

_KIND = "foreign"
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
MOST_FRAME = 16  # tokens around a text
_FRAME_TEXTS = {"single": ("A",), "pair": ("A", "B")}
# what a token may be for; pad, bos and eos are there in every tokenizer of ours
TOKEN_ROLES = ("pad", "bos", "eos", "unk", "mask", "cls", "sep", "begin")
# a space before these is an artefact of splitting into words
_CLEAN = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


def _byte_letters() -> dict[str, int]:
    """Return the letters in which byte-level vocabularies write the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    return letters | {chr(256 + n): byte for n, byte in enumerate(rest)}


LETTERS = _byte_letters()
BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class TokenFrame:
    """What stands around a text and around a pair of them: ids, and "A" and "B" for the texts.

    `types` are the token types of the parts of a pair.
    """

    single: tuple[int | str, ...] = ("A",)
    pair: tuple[int | str, ...] = ("A", "B")
    types: tuple[int, ...] = (0, 0)


@dataclass(frozen=True)
class About:
    """What a tokenizer.json does not say: special tokens by role, and ids of its own."""

    specials: Mapping[str, int]  # role -> id
    frame: TokenFrame = field(default_factory=TokenFrame)
    ends: tuple[int, ...] = ()  # ids at which a text is over
    clean: bool = False
    names: tuple[str | None, ...] | None = None  # pieces, where they are not the library's
    numbers: tuple[int, ...] | None = None  # ids, where they are not the library's
    rows: int = 0  # of the model, some of which may have no piece


class ImportedTokenizer:
    """A tokenizer that came with a public checkpoint; it answers like one of Regard's own."""

    def __init__(self, file: Mapping[str, Any], about: About):
        """Take what a tokenizer.json says, all of it checked, and what else is known."""
        self.about = about
        inner = json.dumps(file, ensure_ascii=False)
        outer = json.dumps(
            {"regard_tokenizer": _KIND, "about": _as_json(about)}, ensure_ascii=False
        )
        self.text = f'{outer[:-1]}, "tokenizer": {inner}}}\n'
        try:
            self.sha = hashlib.sha256(self.text.encode()).hexdigest()
        except UnicodeEncodeError:
            raise UsageError("half a character in it; expected UTF-8") from None
        self.library = _library(inner, file["added_tokens"])
        self._lock = threading.Lock()
        if about.names is None:
            ids = self.library.get_vocab(with_added_tokens=True)
            self.names: list[str | None] = [None] * (max(ids.values()) + 1)
            for name, number in ids.items():
                self.names[number] = name
        else:
            self.names = list(about.names)
        self.vocab = len(self.names)
        self.rows = max(self.vocab, about.rows)  # those without a piece spell nothing
        self._check()
        self._ids = {name: i for i, name in enumerate(self.names) if name is not None}
        roles = {role: about.specials.get(role) for role in TOKEN_ROLES}
        self.unk, self.mask = roles["unk"], roles["mask"]
        self.cls, self.sep = roles["cls"], roles["sep"]
        # Every model has these three; where it names none, the nearest in meaning serves.
        self.eos: int = _first(roles["eos"], self.sep, roles["pad"], 0)
        self.bos: int = _first(roles["bos"], roles["begin"], self.cls, self.eos)
        self.pad: int = _first(roles["pad"], self.eos)
        self.begin: int = _first(roles["begin"], self.bos)  # of what a decoder writes
        self.ends = tuple(dict.fromkeys([self.eos, *about.ends]))
        added = [token["content"] for token in file["added_tokens"] if token["special"]]
        self._silent = {self._ids[name] for name in added if name in self._ids}
        self._silent |= set(about.specials.values())
        others = {number for role, number in about.specials.items() if role != "unk"}
        self._reserved = self._silent - ({self.unk} - others)
        self._bytes_in_letters = _has(file["decoder"], "ByteLevel")
        suffix = file["model"].get("end_of_word_suffix") or ""
        self._suffix = suffix if self._bytes_in_letters else ""  # CLIP's, which stands for a space

    @classmethod
    def load(cls, path: str | Path) -> "ImportedTokenizer":
        """Read a tokenizer that Regard has saved, or say what is wrong with the file."""
        path = Path(path)
        file = read_json(path, MOST_BYTES)
        with errors_in(path):
            if file.get("regard_tokenizer") != _KIND or not isinstance(file.get("about"), dict):
                raise UsageError("not a tokenizer that was imported")
            return cls(checked(file.get("tokenizer")), _from_json(file["about"]))

    def save(self, path: str | Path) -> None:
        """Write the tokenizer as one JSON file."""
        write_atomically(path, self.text)

    def _check(self) -> None:
        """Refuse ids for which there is no piece."""
        about, known = self.about, self.library.get_vocab_size(with_added_tokens=True)
        if about.numbers is not None and len(about.numbers) != known:
            raise UsageError(f"numbers for {len(about.numbers)} pieces; expected {known}")
        frames = [i for i in (*about.frame.single, *about.frame.pair) if isinstance(i, int)]
        for number in (*about.specials.values(), *about.ends, *(about.numbers or ()), *frames):
            check_id(number, self.vocab)

    @property
    def file(self) -> dict[str, Any]:
        """Return what the library's tokenizer.json says."""
        return json.loads(self.text)["tokenizer"]

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a piece, special ones among them."""
        return self._ids.get(token)

    @property
    def specials(self) -> Mapping[str, int]:
        """Return role -> id of the special tokens that the checkpoint names."""
        return self.about.specials

    @property
    def special_ids(self) -> frozenset[int]:
        """Return the ids of padding, begin, end, separator and mask tokens, which are no words."""
        ids = (self.pad, self.bos, self.eos, self.cls, self.sep, self.mask)
        return frozenset(i for i in ids if i is not None)

    @property
    def special_tokens(self) -> list[str]:
        """Return the special tokens that a text cannot spell out."""
        return [name for i in self._reserved if (name := self.names[i])]

    @property
    def never(self) -> tuple[int, ...]:
        """Return none: what is never written is up to the checkpoint's own generation rules."""
        return ()

    @property
    def mask_token(self) -> str | None:
        """Return how the mask is spelt in a text."""
        return None if self.mask is None else self.names[self.mask]

    # ---- text to ids

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        """Split a text into ids; special tokens that it spells out are taken as such if asked."""
        return self.encode_batch([text], specials=specials)[0]

    def encode_batch(self, texts: Sequence[str], *, specials: bool = False) -> list[list[int]]:
        """Split many texts into ids, with nothing around them."""
        encoded = self._encode(texts, specials, fast=self.about.numbers is None)
        rows = [self._own_ids(one, text) for one, text in zip(encoded, texts, strict=True)]
        return rows if specials else [self._spelt(row) for row in rows]

    def encode_parts(self, parts: Sequence[str]) -> list[list[int]]:
        """Split parts of one running text into ids."""
        return self.encode_batch(parts)

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Split each word of a text into ids, at least one."""
        ends = list(accumulate((len(word) + 1 for word in words), initial=-1))[1:]
        text = " ".join(words)
        (encoding,) = self._encode([text], False, fast=False)
        ids: list[list[int]] = [[] for _ in words]
        for number, (_, end) in zip(self._own_ids(encoding, text), encoding.offsets, strict=True):
            ids[bisect_left(ends, end)] += self._spelt([number])
        return [some or [_first(self.unk, self.pad)] for some in ids]

    def around(self, use: str) -> tuple[list[int], list[int]]:
        """Return what the model expects before and after a text, whoever reads it."""
        single = self.about.frame.single
        at = single.index("A")
        before, after = (
            [i for i in part if isinstance(i, int)] for part in (single[:at], single[at + 1 :])
        )
        return before, after

    def frame(self, ids: Sequence[int], use: str = "encoder") -> list[int]:
        """Put around a text what the model expects there."""
        return _join(self.about.frame.single, {"A": ids})

    def sampler(self, p: float, seed: int) -> Any:
        """Refuse: a checkpoint's pieces are not merged by us."""
        raise UsageError("bpe_dropout= is for BPE of our own; leave it out with this tokenizer")

    def frame_pair(self, one: Sequence[int], other: Sequence[int]) -> tuple[list[int], list[int]]:
        """Put what the model expects around two texts; return the token types too."""
        frame, texts = self.about.frame, {"A": one, "B": other}
        types = [
            kind
            for part, kind in zip(frame.pair, frame.types, strict=True)
            for _ in (texts[part] if isinstance(part, str) else (part,))
        ]
        return _join(frame.pair, texts), types

    def _encode(self, texts: Sequence[str], specials: bool, fast: bool) -> list[Any]:
        for text in texts:
            half = _HALF_CHARACTER.search(text)
            if half:
                code = f"surrogate U+{ord(half[0]):04X}"
                raise UsageError(f"half a character ({code}) in a text; read its file as UTF-8")
        with self._lock:  # a setting of the library's tokenizer, not of the call
            self.library.encode_special_tokens = not specials
            encode = self.library.encode_batch_fast if fast else self.library.encode_batch
            try:
                return encode(list(texts), add_special_tokens=False)
            except BaseException as error:
                raise _refused(error, "the tokenizer cannot split a text") from error

    def _own_ids(self, encoding: Any, text: str) -> list[int]:
        """Return the model's own ids, which a piece may have that the library does not know."""
        numbers = self.about.numbers
        if numbers is None:
            return encoding.ids
        ids = [numbers[i] for i in encoding.ids]
        for place, number in enumerate(ids):
            if number == self.unk:
                start, end = encoding.offsets[place]
                name = self.library.normalizer.normalize_str(text[start:end]).removeprefix("▁")
                ids[place] = self._ids.get(name, number)
        return ids

    def _spelt(self, ids: list[int]) -> list[int]:
        """Spell out special tokens that a text happens to contain."""
        if self._reserved.isdisjoint(ids):
            return ids
        return [n for i in ids for n in (self._letters(i) if i in self._reserved else (i,))]

    def _letters(self, number: int) -> Iterator[int]:
        letters = {byte: letter for letter, byte in LETTERS.items()}
        for character in str(self.names[number]):
            data = character.encode()
            in_bytes = [
                [letters[byte] for byte in data] if self._bytes_in_letters else [character],
                [f"<0x{byte:02X}>" for byte in data],
            ]
            spelt = [[self._ids.get(piece) for piece in way] for way in in_bytes]
            known = next((way for way in spelt if None not in way), [self.unk])
            yield from (i for i in known if i is not None)

    # ---- ids to text

    def decode(self, ids: Iterable[int]) -> str:
        """Join the pieces of ids to a text, without the special tokens."""
        names = (self._name(i) for i in ids if i not in self._silent)
        pieces = [name for name in names if name is not None]
        decoder = self.library.decoder
        if decoder is None or not pieces:
            return " ".join(pieces)
        try:
            text = decoder.decode(pieces)
        except BaseException as error:
            raise _refused(error, "the tokenizer cannot join a text") from error
        if self._suffix:
            text = text.replace(self._suffix, " ").strip()
        if self.about.names is not None:  # Marian's way
            text = text.strip()
        if self.about.clean:
            for space in _CLEAN:
                text = text.replace(space, space.strip())
        return text

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Return what to show for each id: a space as ▁, a character in bytes at its first one."""
        return join_bytes((self._name(number) or "", self._spelling(number)) for number in ids)

    def _name(self, number: int) -> str | None:
        if not 0 <= number < self.rows:
            raise UsageError(
                f"token id {number}; expected 0 to {self.rows - 1}, as in the tokenizer"
            )
        return self.names[number] if number < self.vocab else None

    def _spelling(self, number: int) -> bytes:
        name = self._name(number) or ""
        if number in self._silent:
            return name.encode()
        if self._bytes_in_letters and all(letter in LETTERS for letter in name):
            return bytes(LETTERS[letter] for letter in name)
        byte = BYTE.fullmatch(name)
        return bytes([int(byte[1], 16)]) if byte else name.encode()


def _join(frame: Sequence[int | str], texts: Mapping[str, Sequence[int]]) -> list[int]:
    made: list[int] = []
    for part in frame:
        made += texts[part] if isinstance(part, str) else (part,)
    return made


def _first(*ids: int | None) -> int:
    return next(i for i in ids if i is not None)


def _has(part: Mapping[str, Any] | None, name: str) -> bool:
    """Tell whether a part is of a type, or has such a part in it."""
    if part is None:
        return False
    inner = (member for value in part.values() if isinstance(value, list) for member in value)
    return part["type"] == name or any(_has(member, name) for member in inner)


# ---- what is kept in a file of ours


def _as_json(about: About) -> dict[str, Any]:
    made: dict[str, Any] = {
        "specials": dict(about.specials),
        **{key: list(value) for key, value in asdict(about.frame).items()},
        "ends": list(about.ends),
        "clean": about.clean,
    }
    if about.rows:
        made["rows"] = about.rows
    if about.names is not None and about.numbers is not None:
        made |= {"names": list(about.names), "numbers": list(about.numbers)}
    return made


def _from_json(given: Mapping[str, Any]) -> About:
    """Check what a file of ours says beside the library's part."""
    specials, names = given.get("specials"), given.get("names")
    if not isinstance(specials, dict) or not set(specials) <= set(TOKEN_ROLES):
        raise UsageError(f"'specials' are {specials!r:.40}")
    _ids("specials", list(specials.values()))
    single, pair = (_ids(key, given.get(key), texts) for key, texts in _FRAME_TEXTS.items())
    types, ends = (_ids(key, given.get(key, [])) for key in ("types", "ends"))
    if len(types) != len(pair):
        raise UsageError(f"'types' are {list(types)}; expected {len(pair)} of them")
    numbers = None
    if names is not None:
        listed = isinstance(names, list) and 0 < len(names) <= MOST_PIECES
        if not listed or not all(isinstance(name, str | None) for name in names):
            raise UsageError("'names' is not a list of pieces")
        names, numbers = tuple(names), _ids("numbers", given.get("numbers", []), most=MOST_PIECES)
    frame = TokenFrame(single, pair, types)
    (rows,) = _ids("rows", [given.get("rows", 0)])
    return About(specials, frame, ends, given.get("clean") is True, names, numbers, rows)


def _ids(
    key: str, values: Any, texts: tuple[str, ...] = (), most: int = MOST_FRAME
) -> tuple[Any, ...]:
    """Return a list of ids among which these texts stand, or refuse it."""
    if not isinstance(values, list) or len(values) > most:
        raise UsageError(f"'{key}' is {values!r:.40}")
    if tuple(value for value in values if isinstance(value, str)) != texts:
        raise UsageError(f"'{key}' is {values!r:.40}; expected ids and {' and '.join(texts)}")
    for value in values:
        if value is None or (not isinstance(value, str) and check_id(value, MOST_PIECES) is None):
            raise UsageError(f"'{key}' has {value!r:.40}")
    return tuple(values)


def checked(file: Any) -> dict[str, Any]:
    """Return what a tokenizer.json says as far as it is known, or refuse it."""
    if not isinstance(file, dict):
        raise UsageError("expected a JSON object")
    made: dict[str, Any] = {"version": "1.0", "truncation": None, "padding": None}
    made["added_tokens"] = check_added(file.get("added_tokens") or [])
    for kind in TOKENIZER_PARTS:
        made[kind] = check_part(kind, file.get(kind))
    made["post_processor"] = None  # frames are put around texts by us
    made["model"] = check_model(file.get("model"))
    return made


def _refused(error: BaseException, what: str) -> BaseException:
    """Turn what the library raised into a mistake; where it gave up it is not even an Exception."""
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return UsageError(f"{what} ({' '.join(str(error).split())[:150]})")
    return error


def _library(text: str, added: list[dict[str, Any]]) -> tokenizers.Tokenizer:
    try:
        library = tokenizers.Tokenizer.from_str(text)
    except BaseException as error:
        raise _refused(error, "not a tokenizer") from error
    for token in added:
        number = library.token_to_id(token["content"])
        if number != token["id"]:
            raise UsageError(
                f"the added token {token['content']!r:.40} has the id {token['id']}, "
                f"but {number} is next"
            )
    return library
