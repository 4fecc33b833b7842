"""Characters as tokens: the smallest vocabulary that spells a text."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from regard.data.tokenize import MOST_PIECES, visible
from regard.data.tokenizer import SPECIALS, OwnTokenizer
from regard.errors import UsageError
from regard.files import read_bounded, write_atomically

_KIND = "characters"
_MOST_BYTES = 16 * 2**20
_LOST = "\ufffd"  # what stands for a character outside the vocabulary


class Characters(OwnTokenizer):
    """A vocabulary of single characters; others are read as <unk>."""

    def __init__(self, characters: Iterable[str]):
        """Take the characters in the order of their ids, which begin after the special tokens."""
        self.characters = list(characters)
        self.vocab = len(SPECIALS) + len(self.characters)
        self.text = json.dumps({"regard_tokenizer": _KIND, "characters": self.characters}) + "\n"
        self.sha = hashlib.sha256(self.text.encode()).hexdigest()
        self._ids = {c: i for i, c in enumerate(self.characters, len(SPECIALS))}
        # by code point, so that a long text is looked up at once; one more place for all beyond
        self._by_code = np.full(
            max(map(ord, self.characters), default=0) + 2, SPECIALS.index("<unk>"), np.int32
        )
        for character, number in self._ids.items():
            self._by_code[ord(character)] = number

    @classmethod
    def learn(cls, texts: Iterable[str]) -> "Characters":
        """Take every character that occurs in the texts."""
        letters: set[str] = set()
        for text in texts:
            letters.update(text)
        if not letters:
            raise UsageError("no text to learn characters from; check the data")
        return cls(sorted(letters))

    @classmethod
    def load(cls, path: str | Path) -> "Characters":
        """Read a vocabulary that Regard has saved, or say what is wrong with the file."""
        data = read_bounded(path, _MOST_BYTES)
        try:
            file = json.loads(data)
            characters = file["characters"]
            if file["regard_tokenizer"] != _KIND or not isinstance(characters, list):
                raise ValueError("of another kind")
            for character in characters:
                if not isinstance(character, str) or len(character) != 1:
                    raise ValueError(f"{character!r:.20} is not a character")
                character.encode()
            if not 0 < len(characters) <= MOST_PIECES or len(set(characters)) != len(characters):
                raise ValueError("characters that are missing or double")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UsageError(f"{path}: not a tokenizer saved by Regard ({reason})") from error
        return cls(characters)

    def save(self, path: str | Path) -> None:
        """Write the vocabulary as one JSON file."""
        write_atomically(path, self.text)

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        """Spell a text."""
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        return self._by_code[np.minimum(codes, len(self._by_code) - 1)].tolist()

    def encode_batch(self, texts: Sequence[str], *, specials: bool = False) -> list[list[int]]:
        """Spell many texts."""
        return [self.encode(text) for text in texts]

    def encode_parts(self, parts: Sequence[str]) -> list[list[int]]:
        """Spell parts of one running text."""
        return self.encode_batch(parts)

    def decode(self, ids: Iterable[int]) -> str:
        """Join the characters of ids to a text, without the special tokens."""
        return "".join(_LOST if n == self.unk else self._spelling(n) for n in ids)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Text to show for each id."""
        return [SPECIALS[n] if 0 <= n < len(SPECIALS) else visible(self._spelling(n)) for n in ids]

    def _spelling(self, number: int) -> str:
        if not 0 <= number < self.vocab:
            raise UsageError(
                f"token id {number}; expected 0 to {self.vocab - 1}, as in the tokenizer"
            )
        return "" if number < len(SPECIALS) else self.characters[number - len(SPECIALS)]
