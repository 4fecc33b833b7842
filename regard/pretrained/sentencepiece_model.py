"""SentencePiece model files as tokenizer.json, and back.

A file is a Protocol Buffers message: pieces with scores, and a normalizer. It is parsed here with
bounds; docs/design.md says why not by the package sentencepiece.
"""

import base64
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regard.data.tokenize import MOST_PIECES
from regard.errors import UsageError
from regard.files import errors_in, read_bounded
from regard.pretrained.tokenizer_checks import LONGEST_PIECE, check_map

_MOST_BYTES = 16 * 2**20
_MOST_LETTERS = 4_000_000  # of all pieces of a BPE model, whose merges are found letter by letter
_NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6  # types of pieces
_UNIGRAM, BPE = 1, 2  # types of models
_SPACE = "▁"


@dataclass
class SentencePieceModel:
    """The pieces of a SentencePiece model and how it normalizes a text."""

    pieces: list[tuple[str, float, int]] = field(default_factory=list)  # with score and type
    kind: int = _UNIGRAM
    byte_fallback: bool = False
    charsmap: bytes = b""
    add_prefix: bool = True  # a space is put before a text
    strip: bool = True  # spaces around it are taken away, and several become one

    @property
    def unknown(self) -> int:
        """Return the number of the piece for what is in no other."""
        return next(i for i, (_, _, kind) in enumerate(self.pieces) if kind == UNKNOWN)

    def of(self, kind: int) -> list[int]:
        """Return the numbers of the pieces of a type."""
        return [i for i, (_, _, other) in enumerate(self.pieces) if other == kind]


def read_model(path: Path) -> SentencePieceModel:
    """Read a SentencePiece file, or say what is wrong with it."""
    data = read_bounded(path, _MOST_BYTES)
    with errors_in(path):
        try:
            model = _parse(data)
        except (IndexError, TypeError, ValueError, struct.error) as error:  # of another type
            raise UsageError("not a SentencePiece model, or damaged") from error
        if model.charsmap:
            check_map(model.charsmap)
        return model


def _parse(data: bytes) -> SentencePieceModel:
    model = SentencePieceModel()
    escaped, suffix = True, False
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            text, kind = bytes(piece.get(1, b"")).decode(), piece.get(3, _NORMAL)
            (score,) = struct.unpack("<f", piece.get(2, bytes(4)))
            if not text or len(text) > LONGEST_PIECE or not abs(score) <= 1e9:
                raise UsageError(f"the piece {text!r:.40} with the score {score}")
            model.pieces.append((text, score, kind))
            if len(model.pieces) > MOST_PIECES:
                raise UsageError(f"over {MOST_PIECES:,} pieces")
        elif number == 2:
            trainer = dict(_fields(value))
            model.kind = trainer.get(3, _UNIGRAM)
            model.byte_fallback = bool(trainer.get(35, 0))
            suffix = bool(trainer.get(24, 0))
        elif number == 3:
            normalizer = dict(_fields(value))
            model.charsmap = bytes(normalizer.get(2, b""))
            model.add_prefix = bool(normalizer.get(3, 1))
            model.strip = bool(normalizer.get(4, 1))
            escaped = bool(normalizer.get(5, 1))
    if len({piece for piece, _, _ in model.pieces}) != len(model.pieces):
        raise UsageError("a piece is there twice")
    if len(model.of(UNKNOWN)) != 1:
        raise UsageError("not a SentencePiece model: it has no piece for what is unknown")
    if model.kind not in (_UNIGRAM, BPE) or suffix or not escaped:
        raise UsageError(
            "a SentencePiece model that is neither Unigram nor BPE, or spaced otherwise"
        )
    return model


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Walk through the numbered fields of a message."""
    at, end = 0, len(data)
    while at < end:
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(data, at)
        else:
            if wire not in (1, 2, 5):
                raise struct.error("unknown kind of field")
            size, at = _varint(data, at) if wire == 2 else ((8, at) if wire == 1 else (4, at))
            value, at = data[at : at + size], at + size
            if at > end:
                raise struct.error("cut short")
        yield number, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise struct.error("a number without end")


def as_tokenizer_json(
    model: SentencePieceModel, normalizers: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Describe a model as a tokenizer.json; `normalizers` come before its own."""
    own: list[Any] = list(normalizers)
    if model.charsmap:
        encoded = base64.b64encode(model.charsmap).decode()
        own.append({"type": "Precompiled", "precompiled_charsmap": encoded})
    if model.strip:
        own.append({"type": "Strip", "strip_left": True, "strip_right": True})
        spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
        own.append(spaces)
    if model.add_prefix:
        own.append({"type": "Prepend", "prepend": _SPACE})
    own.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    decoders: list[Any] = [{"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}]
    decoders += [{"type": "ByteFallback"}] if model.byte_fallback else []
    decoders += [{"type": "Fuse"}]
    if model.add_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    controls = [(i, model.pieces[i][0]) for i in model.of(CONTROL)]
    return {
        "version": "1.0",
        "added_tokens": [special(number, piece) for number, piece in controls],
        "normalizer": {"type": "Sequence", "normalizers": own},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _unigram(model) if model.kind == _UNIGRAM else _bpe(model),
    }


def special(number: int, name: str) -> dict[str, Any]:
    """Describe a special token."""
    return {"id": number, "content": name, "special": True, "normalized": False}


def _unigram(model: SentencePieceModel) -> dict[str, Any]:
    """Give pieces that a user defined the score at which SentencePiece always takes them."""
    best = max((score for _, score, kind in model.pieces if kind == _NORMAL), default=0.0)
    vocab = [
        [piece, len(piece.encode()) * best - 0.1 if kind == USER else score]
        for piece, score, kind in model.pieces
    ]
    return {
        "type": "Unigram",
        "vocab": vocab,
        "unk_id": model.unknown,
        "byte_fallback": model.byte_fallback,
    }


def _bpe(model: SentencePieceModel) -> dict[str, Any]:
    """Find the merges of a BPE model: every way to join two pieces to a third, best score first."""
    if sum(len(piece) for piece, _, _ in model.pieces) > _MOST_LETTERS:
        raise UsageError(f"pieces of over {_MOST_LETTERS:,} letters; expected fewer")
    vocab = {piece: number for number, (piece, _, _) in enumerate(model.pieces)}
    plain = {piece for piece, _, kind in model.pieces if kind in (_NORMAL, USER)}
    merges = [
        (-score, vocab[piece[:cut]], vocab[piece[cut:]], piece[:cut], piece[cut:])
        for piece, score, kind in model.pieces
        if kind in (_NORMAL, USER)
        for cut in range(1, len(piece))
        if piece[:cut] in plain and piece[cut:] in plain
    ]
    return {
        "type": "BPE",
        "vocab": vocab,
        "merges": [[left, right] for *_, left, right in sorted(merges)],
        "unk_token": model.pieces[model.unknown][0],
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
    }


# ---- and back


def write_model(file: Mapping[str, Any]) -> bytes:
    """Return a SentencePiece model file of a Unigram tokenizer.json that was made of one."""
    model = file["model"]
    added = {token["id"] for token in file["added_tokens"] if token["special"]}
    bytes_too = {f"<0x{byte:02X}>" for byte in range(256)} if model["byte_fallback"] else set()
    data = bytearray()
    for number, (piece, score) in enumerate(model["vocab"]):
        kind = UNKNOWN if number == model["unk_id"] else CONTROL if number in added else _NORMAL
        kind = BYTE if piece in bytes_too else kind
        score = struct.pack("<f", score)
        data += _bytes(1, _bytes(1, piece.encode()) + b"\x15" + score + b"\x18" + bytes([kind]))
    data += _bytes(2, b"\x18\x01" + b"\x98\x02" + bytes([model["byte_fallback"]]))
    normalizers = file["normalizer"]["normalizers"]
    maps = [n["precompiled_charsmap"] for n in normalizers if n["type"] == "Precompiled"]
    kinds = {n["type"] for n in normalizers}
    data += _bytes(
        3,
        (_bytes(2, base64.b64decode(maps[0])) if maps else b"")
        + b"\x18"
        + bytes(["Prepend" in kinds])
        + b"\x20"
        + bytes(["Strip" in kinds]),
    )
    return bytes(data)


def _bytes(number: int, content: bytes) -> bytes:
    """Write one field of a message."""
    size, out = len(content), bytearray([number << 3 | 2])
    while size > 127:
        out.append(size & 127 | 128)
        size >>= 7
    return bytes(out) + bytes([size]) + content
