"""Text to token ids and back, without losing a character."""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from struct import unpack
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from regard.data.tokenizer import MOST_KEPT, SPECIALS, OwnTokenizer
from regard.errors import UsageError, lookup
from regard.files import read_bounded, write_atomically

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]  # for characters outside the vocabulary
FIRST = SPECIALS + _BYTES  # ids 0 to 259 of every vocabulary; the pieces learnt come after
_MOST_BYTES = 64 * 2**20
MOST_PIECES = 1_000_000
_MOST_WORDS = 200_000  # that unigram pieces are learnt from, the most frequent ones
_LONGEST = 16  # characters of a unigram piece

# Scripts written without spaces: their words take no space in front.
SPACELESS = (
    "\u2e80-\u2fff\u3001-\u30ff\u3130-\u318f\u31a0-\u9fff\uf900-\ufaff\uff00-\uff65"
    "\U00020000-\U0003ffff"
)
# A word keeps the space before it; punctuation and digits stand alone; the rest of a run of white
# space is a word of its own. All is bounded, so that a long line without spaces is fast, and no
# word can spell a special token or a byte of FIRST. No character is left out or changed.
_WORDS = "|".join(
    [
        r"['’]\p{L}{1,2}(?![\p{L}\p{M}])",  # the end of man's, don't
        rf"[{SPACELESS}&&[\p{{L}}]]{{1,16}}",
        rf" ?[\p{{L}}\p{{M}}&&[^{SPACELESS}]]{{1,32}}",
        r" ?\p{N}",
        r" ?[^\s\p{L}\p{N}]",
        r"\s{1,16}(?!\S)",
        r"\s{1,16}",
    ]
)
_SPLIT = pre_tokenizers.Split(Regex(_WORDS), "isolated")
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
_STARTS_SPACELESS = re.compile(f"[{SPACELESS}]")


class SubwordTokenizer(OwnTokenizer):
    """A vocabulary of subwords: encode splits any text into them, decode gives exactly it back."""

    def __init__(self, library: tokenizers.Tokenizer, text: str):
        """Take the library's tokenizer and the JSON text that describes it."""
        self.library = library
        self.text = text
        self.sha = hashlib.sha256(text.encode()).hexdigest()
        pieces = library.get_vocab(with_added_tokens=False)
        self.vocab = len(pieces)
        self._bytes = [b""] * self.vocab
        for piece, number in pieces.items():
            if number >= len(FIRST):
                self._bytes[number] = piece.encode()
            elif number >= len(SPECIALS):
                self._bytes[number] = bytes([number - len(SPECIALS)])

    @classmethod
    def load(cls, path: str | Path) -> "SubwordTokenizer":
        """Read a tokenizer that Regard has saved, or say what is wrong with the file."""
        data = read_bounded(path, _MOST_BYTES)
        try:
            text = data.decode()
            return cls(_assemble(_checked(json.loads(text))), text)
        except Exception as error:  # the library raises plain Exception for merges that do not fit
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise UsageError(f"{path}: not a tokenizer saved by Regard ({reason})") from error

    def save(self, path: str | Path) -> None:
        """Write the tokenizer as one JSON file."""
        write_atomically(path, self.text)

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        """Split a text into ids, with no special tokens added and none recognised."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str], *, specials: bool = False) -> list[list[int]]:
        """Split many texts into ids."""
        return self.encode_parts([_spaced(text) for text in texts])

    def encode_parts(self, parts: Sequence[str]) -> list[list[int]]:
        """Split parts of one running text into ids, with no unseen space before any."""
        encoded = self.library.encode_batch_fast(parts, add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """Join the pieces of ids to a text, without the special tokens."""
        text = b"".join(self._spelling(number) for number in ids).decode(errors="replace")
        return text.removeprefix(" ")

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Text to show for each id: a space as ▁, a character in bytes at its first one."""
        spelt = ((self._spelling(n), FIRST[n] if n < len(FIRST) else "") for n in ids)
        return join_bytes((name, spelling or name.encode()) for spelling, name in spelt)

    def sampler(self, p: float, seed: int, variants: int = 16) -> "BpeDropout":
        """Encoder that splits words by BPE dropout, differently for every key."""
        return BpeDropout(self, p, seed, variants)

    def _spelling(self, number: int) -> bytes:
        if not 0 <= number < self.vocab:
            raise UsageError(
                f"token id {number}; expected 0 to {self.vocab - 1}, as in the tokenizer"
            )
        return self._bytes[number]


class BpeDropout:
    """BPE dropout (Provilkov 2020) that gives the same ids for the same text, key and seed."""

    def __init__(self, tokenizer: SubwordTokenizer, p: float, seed: int, variants: int):
        """Take the share of merges to drop and how many ways to split a word are kept."""
        if not 0 <= p <= 1:
            raise UsageError(f"BPE dropout of {p}; expected a share from 0 to 1, such as 0.1")
        if not 1 <= variants <= 256:
            raise UsageError(f"{variants} variants of a word; expected 1 to 256")
        model = json.loads(tokenizer.text)["model"]
        if model["type"] != "BPE":
            raise UsageError("BPE dropout of a unigram tokenizer; train one with tokenizer=bpe")
        self.p, self.seed, self.variants = p, seed, variants
        self._ids: dict[str, int] = model["vocab"]
        ids = self._ids
        self._merges = {
            (ids[left], ids[right]): (rank, ids[left + right])
            for rank, (left, right) in enumerate(model["merges"])
        }
        self._ways: dict[str, tuple[str, list[list[int] | None]]] = {}
        self._texts: dict[str, list[tuple[str, list[list[int] | None]]]] = {}

    def encode(self, text: str, key: int) -> list[int]:
        """Split a text into ids, drawn by the key: the same for the same text, key and seed."""
        words = self._texts.get(text)
        if words is None:
            words = self._read(text)
        drawn = hashlib.shake_128(f"{self.seed} {key} {text}".encode())
        ids: list[int] = []
        for (word, ways), draw in zip(words, drawn.digest(len(words)), strict=True):
            variant = draw % self.variants
            way = ways[variant]
            if way is None:
                way = ways[variant] = self._drop(word, variant)
            ids += way
        return ids

    def _read(self, text: str) -> list[tuple[str, list[list[int] | None]]]:
        """Split a text into words, each with the ways to spell it that were drawn before."""
        if len(self._texts) >= MOST_KEPT or len(self._ways) >= MOST_KEPT:
            self._texts.clear()
            self._ways.clear()
        words = []
        for word in _words(_spaced(text)):
            if word not in self._ways:
                self._ways[word] = word, [None] * self.variants
            words.append(self._ways[word])
        self._texts[text] = words
        return words

    def _drop(self, word: str, variant: int) -> list[int]:
        """Merge the characters of a word as BPE does, but let each merge fail now and then."""
        ids: list[int] = []
        for character in word:
            if character in self._ids:
                ids.append(self._ids[character])
            else:
                ids += [len(SPECIALS) + byte for byte in character.encode()]
        most = len(ids) ** 2  # more draws than there can be pairs to try
        drawn = hashlib.shake_128(f"{self.seed} {variant} {word}".encode()).digest(2 * most)
        draws = iter(unpack(f"<{most}H", drawn))
        limit = round(self.p * 2**16)
        while True:
            best, at = None, 0
            for place, pair in enumerate(pairwise(ids)):
                merge = self._merges.get(pair)
                if merge and next(draws) >= limit and (best is None or merge < best):
                    best, at = merge, place
            if best is None:
                return ids
            ids[at : at + 2] = [best[1]]


def with_characters() -> tuple[str, ...]:
    """Names of the tokenizers, and that of single characters, which learn nothing."""
    return ("characters", *TOKENIZERS)


def train_tokenizer(
    texts: Iterable[str], *, kind: str = "bpe", vocab: int = 8000, min_frequency: int = 2
) -> SubwordTokenizer:
    """Learn a vocabulary of at most so many pieces from texts; the same texts give the same one."""
    train = lookup("tokenizer", kind, TOKENIZERS)
    least = len(FIRST) + 40
    if not least <= vocab <= MOST_PIECES:
        raise UsageError(f"vocab={vocab}; expected {least} to {MOST_PIECES}, such as vocab=8000")
    texts = [text for text in map(_spaced, texts) if text]
    if not texts:
        raise UsageError("no text to learn a tokenizer from; check the data")
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    # Rare characters stay bytes, and characters take at most half of what there is to learn.
    common = sorted(counts, key=lambda c: (-counts[c], c))[: (vocab - len(FIRST)) // 2]
    kept = [re.escape(c) for c in common if counts[c] >= min_frequency]
    rare = re.compile(f"[^ {''.join(kept)}]+")

    def parts() -> Iterator[str]:
        for text in texts:
            yield from rare.split(text)

    library = _assemble(train(parts(), vocab, min_frequency))
    return SubwordTokenizer(library, library.to_str())


def train_bpe(texts: Iterable[str], vocab: int, min_frequency: int) -> models.Model:
    """Learn merges of the most frequent pairs (Sennrich 2016)."""
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=min_frequency,
        special_tokens=FIRST,
        initial_alphabet=[" "],
        show_progress=False,
    )
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = _SPLIT
    learner.train_from_iterator(texts, trainer)
    learnt = json.loads(learner.to_str())["model"]
    return bpe(learnt["vocab"], learnt["merges"])


def train_bytes(texts: Iterable[str], vocab: int, min_frequency: int) -> models.Model:
    """Learn nothing: every text is spelt in its bytes."""
    return bpe({piece: number for number, piece in enumerate(FIRST)}, [])


def train_unigram(texts: Iterable[str], vocab: int, min_frequency: int) -> models.Model:
    """Learn the pieces that explain the words best (Kudo 2018), by expectation and pruning."""
    # Written out here because the library's own trainer gives other pieces every time.
    counted = Counter(word for text in texts for word in _words(text))
    words = sorted(counted.items(), key=lambda item: (-item[1], item[0]))[:_MOST_WORDS]
    counts: Counter[str] = Counter()
    for word, times in words:
        for start in range(len(word)):
            for end in range(start + 1, min(start + _LONGEST, len(word)) + 1):
                counts[word[start:end]] += times
    letters = sorted(piece for piece in counts if len(piece) == 1)
    room = vocab - len(FIRST) - len(letters)
    often = [piece for piece in counts if len(piece) > 1 and counts[piece] >= min_frequency]
    # A piece that is only ever seen within one that is longer by a letter explains nothing.
    inner = {p for piece in often for p in (piece[1:], piece[:-1]) if counts[p] == counts[piece]}
    long = [piece for piece in often if piece not in inner]
    long.sort(key=lambda piece: (-counts[piece] * len(piece), piece))
    share = {piece: float(counts[piece]) for piece in letters + long[: 4 * vocab]}
    while True:
        for _ in range(2):
            total = sum(share.values())
            # No letter may die out, and no word become impossible.
            share = {piece: max(value, 0.1) / total for piece, value in share.items()}
            share = _expect(words, share)
        long = [piece for piece in share if len(piece) > 1]
        if len(long) <= room:
            break
        total = sum(share.values())
        probs = {piece: max(value, 0.1) / total for piece, value in share.items()}
        worth = {}  # what the words would lose in likelihood without the piece
        for piece in long:
            whole = probs.pop(piece)
            worth[piece] = share[piece] * math.log(whole / _forward(piece, probs)[0][-1])
            probs[piece] = whole
        long.sort(key=lambda piece: (-worth[piece], piece))
        share = {piece: share[piece] for piece in letters + long[: max(room, 3 * len(long) // 4)]}
    total = sum(share.values())
    scores = [(piece, math.log(max(value, 0.1) / total)) for piece, value in share.items()]
    scores.sort(key=lambda item: (-item[1], item[0]))
    return unigram([(piece, 0.0) for piece in FIRST] + scores)


def _forward(word: str, probs: dict[str, float]) -> tuple[list[float], list[tuple[int, int, str]]]:
    """Forward algorithm: the probability of each prefix of a word, and the pieces within it."""
    size = len(word)
    forward = [1.0] + [0.0] * size
    pieces = []
    for start in range(size):
        for end in range(start + 1, min(start + _LONGEST, size) + 1):
            piece = word[start:end]
            if piece in probs:
                forward[end] += forward[start] * probs[piece]
                pieces.append((start, end, piece))
    return forward, pieces


def _expect(words: list[tuple[str, int]], probs: dict[str, float]) -> dict[str, float]:
    """Forward-backward: the expected count of each piece over all segmentations of the words."""
    expected = dict.fromkeys(probs, 0.0)
    for word, times in words:
        forward, pieces = _forward(word, probs)
        if forward[-1] <= 0.0:
            continue
        backward = [0.0] * len(word) + [times / forward[-1]]
        for start, end, piece in reversed(pieces):
            part = probs[piece] * backward[end]
            backward[start] += part
            expected[piece] += forward[start] * part
    return expected


TOKENIZERS: dict[str, Callable[[Iterable[str], int, int], models.Model]] = {
    "bpe": train_bpe,
    "unigram": train_unigram,
    "bytes": train_bytes,
}


def bpe(vocab: dict[str, int], merges: Iterable[Sequence[str]]) -> models.Model:
    """Make a BPE model that spells unknown characters in bytes."""
    pairs = [(left, right) for left, right in merges]
    return models.BPE(vocab=vocab, merges=pairs, byte_fallback=True, unk_token="<unk>")


def unigram(vocab: Iterable[Sequence[Any]]) -> models.Model:
    """Make a unigram model that spells unknown characters in bytes."""
    scores = [(piece, score) for piece, score in vocab]
    return models.Unigram(scores, unk_id=SPECIALS.index("<unk>"), byte_fallback=True)


def _assemble(model: models.Model) -> tokenizers.Tokenizer:
    """Put a model between our own splitting and joining; there are no added tokens to match."""
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = _SPLIT
    library.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return library


def _checked(file: Any) -> models.Model:
    """Build the model of a tokenizer.json after checking everything that it says."""
    split = {"type": "Split", "pattern": {"Regex": _WORDS}, "behavior": "Isolated", "invert": False}
    expected = {"pre_tokenizer": split, "normalizer": None, "added_tokens": []}
    for part, value in expected.items():
        # A foreign pattern could take forever; a foreign normaliser would lose characters.
        if file[part] != value:
            raise ValueError(f"its {part} is another")
    model = file["model"]
    kind, vocab = model["type"], model["vocab"]
    if kind not in ("BPE", "Unigram"):
        raise ValueError(f"a model of type {kind}")
    if kind == "BPE":
        pieces = sorted(vocab, key=lambda piece: vocab[piece])
        if [vocab[piece] for piece in pieces] != list(range(len(pieces))):
            raise ValueError("ids that are not 0, 1, 2 and so on")
        if model["dropout"] is not None:
            raise ValueError("dropout in the file")
    else:
        pieces = [piece for piece, _ in vocab]
        if not all(math.isfinite(score) for _, score in vocab):
            raise ValueError("scores that are not finite")
    if len(pieces) > MOST_PIECES:
        raise ValueError(f"over {MOST_PIECES} pieces")
    if pieces[: len(FIRST)] != FIRST or not all(pieces) or len(set(pieces)) != len(pieces):
        raise ValueError("pieces that are missing, empty or double")
    return bpe(vocab, model["merges"]) if kind == "BPE" else unigram(vocab)


def _words(text: str) -> list[str]:
    return [word for word, _ in _SPLIT.pre_tokenize_str(text)]


def _spaced(text: str) -> str:
    """Put an unseen space before a text, so that its first word is spelt as in mid-sentence."""
    half = _HALF_CHARACTER.search(text)
    if half:
        code = f"surrogate U+{ord(half[0]):04X}"
        raise UsageError(f"half a character ({code}) in a text; read its file as UTF-8")
    return text if not text or _STARTS_SPACELESS.match(text) else " " + text


def visible(piece: str) -> str:
    """Show spaces as ▁ and what cannot be printed as an escape."""
    shown = (c if c.isprintable() else repr(c)[1:-1] for c in piece.replace(" ", "▁"))
    return "".join(shown)


def join_bytes(pieces: Iterable[tuple[str, bytes]]) -> list[str]:
    """What to show for each piece, of a name and bytes; one character in several at the first."""
    shown: list[str] = []
    waiting, parts = b"", 0  # bytes of a character that is not complete yet, and their pieces
    for name, spelling in pieces:
        shown.append(visible(name))
        if waiting and not (spelling and 0x80 <= spelling[0] < 0xC0):
            waiting, parts = b"", 0
        try:
            text = (waiting + spelling).decode()
        except UnicodeDecodeError:
            waiting, parts = waiting + spelling, parts + 1
            continue
        shown[-1 - parts :] = [visible(text)] + ["·"] * parts
        waiting, parts = b"", 0
    return shown
