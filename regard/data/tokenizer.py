"""What every tokenizer can do, be it trained by Regard or brought along by a checkpoint."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Protocol

from regard.errors import UsageError

SPECIALS = ["<pad>", "<s>", "</s>", "<unk>"]  # ids 0 to 3 of every tokenizer that Regard trains
MOST_KEPT = 500_000  # texts and words whose ids are remembered

# Who reads a text: an encoder (BERT), the encoder of a sequence-to-sequence model, or a decoder
# that continues it (GPT). A checkpoint's own tokenizer puts the same around a text for all three.
Use = Literal["encoder", "source", "prompt"]


class Sampler(Protocol):
    """Subword regularisation: a text is split differently for every key."""

    def encode(self, text: str, key: int) -> list[int]:
        """Split a text into ids, drawn by the key: the same for the same text, key and seed."""
        ...


class Tokenizer(Protocol):
    """Text to token ids and back; see `around` for the special tokens that a model expects."""

    vocab: int  # number of tokens
    sha: str  # SHA-256 of `text`
    text: str  # what `save` writes
    pad: int
    bos: int
    eos: int
    unk: int | None
    mask: int | None  # of masked language models
    begin: int  # the token after which a decoder begins to write
    ends: tuple[int, ...]  # tokens that end a text that is written, `eos` first

    @property
    def specials(self) -> Mapping[str, int]:
        """Role ("pad", "bos", "eos", "unk", "mask", ...) -> id, of the tokens it really has."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of padding, begin, end, separator and mask tokens, which are no words."""
        ...

    @property
    def special_tokens(self) -> list[str]:
        """Names of special tokens, which `encode` takes for text unless specials=True."""
        ...

    @property
    def rows(self) -> int:
        """Number of ids that may be written; a public checkpoint has some without a piece."""
        ...

    @property
    def never(self) -> tuple[int, ...]:
        """Ids that no written text holds, so that decoding forbids them."""
        ...

    @property
    def mask_token(self) -> str | None:
        """How the mask is spelt in a text, with specials=True."""
        ...

    def save(self, path: str | Path) -> None:
        """Write the tokenizer as one JSON file."""
        ...

    def token_to_id(self, token: str) -> int | None:
        """Id of a special token by its name."""
        ...

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        """Split a text into ids; special tokens that it spells out are taken as such if asked."""
        ...

    def encode_batch(self, texts: Sequence[str], *, specials: bool = False) -> list[list[int]]:
        """Split many texts into ids, with nothing around them."""
        ...

    def encode_parts(self, parts: Sequence[str]) -> list[list[int]]:
        """Split parts of one running text into ids, with no space added before any."""
        ...

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Split each word of a text into ids, at least one."""
        ...

    def around(self, use: Use) -> tuple[list[int], list[int]]:
        """Special tokens that a model expects before and after a text."""
        ...

    def frame(self, ids: Sequence[int], use: Use = "encoder") -> list[int]:
        """Put around a text what a model expects there."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Join the pieces of ids to a text, without the special tokens."""
        ...

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Text to show for each id: a space as ▁, a character in bytes at its first one."""
        ...

    def sampler(self, p: float, seed: int) -> Sampler:
        """BPE dropout with the probability p; refuses where merges are not known."""
        ...


class OwnTokenizer:
    """What the tokenizers that Regard trains have in common: the special tokens 0 to 3.

    No text spells a special token, and none but the end is ever written.
    """

    pad, bos, eos = 0, 1, 2
    unk: int | None = 3
    mask: int | None = None
    begin = 1
    ends: tuple[int, ...] = (2,)
    specials: Mapping[str, int] = MappingProxyType({"pad": 0, "bos": 1, "eos": 2, "unk": 3})
    special_ids: frozenset[int] = frozenset({0, 1, 2})
    never: tuple[int, ...] = (0, 1, 3)
    mask_token: str | None = None
    vocab: int
    sha: str
    text: str

    @property
    def rows(self) -> int:
        """Number of ids that may be written: those of its pieces."""
        return self.vocab

    @property
    def special_tokens(self) -> list[str]:
        """None: no text can spell them."""
        return []

    def token_to_id(self, token: str) -> int | None:
        """Id of begin or end by its name."""
        return {"<s>": self.bos, "</s>": self.eos}.get(token)

    def encode_batch(self, texts: Sequence[str], *, specials: bool = False) -> list[list[int]]:
        """Split many texts into ids."""
        raise NotImplementedError

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Split each word of a text into ids as if it stood alone."""
        known: dict[str, list[int]] = self.__dict__.setdefault("_word_ids", {})
        if len(known) > MOST_KEPT:
            known.clear()
        new = [word for word in dict.fromkeys(words) if word not in known]
        known.update(zip(new, self.encode_batch(new), strict=True))
        return [known[word] for word in words]

    def around(self, use: Use) -> tuple[list[int], list[int]]:
        """Special tokens that a model expects before and after a text."""
        before = [] if use == "source" else [self.bos]
        return before, [] if use == "prompt" else [self.eos]

    def frame(self, ids: Sequence[int], use: Use = "encoder") -> list[int]:
        """Put around a text what a model expects there."""
        before, after = self.around(use)
        return [*before, *ids, *after]

    def sampler(self, p: float, seed: int) -> Sampler:
        """Refuse: there are no merges to drop."""
        raise UsageError("bpe_dropout= is for BPE of our own; leave it out with this tokenizer")


def blank_id(tokenizer: Tokenizer) -> int:
    """Token that stands for a hidden word: the mask, or else the unknown one."""
    for number in (tokenizer.mask, tokenizer.unk):
        if number is not None:
            return number
    return SPECIALS.index("<unk>")


def mask_id(tokenizer: Tokenizer) -> int:
    """Mask of masked language models: the tokenizer's, or one beyond its vocabulary."""
    return tokenizer.vocab if tokenizer.mask is None else tokenizer.mask


# letters of scripts that put no spaces between words: Thai to Khmer, kana and Han
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef"
    "\U00020000-\U0003ffff]"
)


def words_of_pieces(
    pieces: Sequence[str], alone: Collection[str] = ()
) -> tuple[list[str], list[int]]:
    """Join pieces to the words between spaces; in scripts without spaces each piece is a word.

    Pieces that stand `alone`, such as the end of a text, are words of their own. Returned are the
    words, and the number of the word of each piece.
    """
    words: list[str] = []
    of: list[int] = []
    marked = any(piece.startswith("▁") for piece in pieces)
    before = ""
    for piece in pieces:
        apart = not marked or piece in alone or before in alone
        unspaced = _UNSPACED.match(before[-1:]) or _UNSPACED.match(piece[:1])
        if not words or apart or unspaced or piece.startswith("▁"):
            words.append(piece.replace("▁", " ").strip() if piece not in alone else piece)
        else:
            words[-1] += piece
        of.append(len(words) - 1)
        before = piece
    return words, of
