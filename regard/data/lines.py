"""Lines of text files, packed or not, in UTF-8 or what Excel writes, each with its fault."""

import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader, RawIOBase, TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from regard.errors import UsageError, lookup, nearest
from regard.files import refuse

LONGEST_LINE = 1_000_000  # characters
_MOST_BYTES = 4 * LONGEST_LINE + 8  # no line of that many bytes can be shorter than the longest
MOST_SKIPPED = 100 << 20  # bytes of one line; what has longer ones is no text
_MOST_PACKED = 100  # times the size of a packed file that it may unpack to
LEAST_UNPACKED = 64 << 20  # bytes that any may unpack to


# Lines


class Fault(NamedTuple):
    """What is wrong with a line or a row, where, and what to do about it."""

    kind: str  # encoding, binary, long; of rows also empty, columns, json, uneven
    where: str
    what: str
    remedy: str

    @property
    def message(self) -> str:
        """The fault in one line."""
        return f"{self.where}: {self.what}; {self.remedy}"


class Unpacked(RawIOBase):
    """What a packed file holds, unless it is far more than text is packed to."""

    def __init__(self, unpacked: Any, packed: BinaryIO, path: Path):
        size = os.fstat(packed.fileno()).st_size  # 0 of a pipe
        self.unpacked, self.size, self.path, self.count = unpacked, size, path, 0
        self.most = max(LEAST_UNPACKED, _MOST_PACKED * size)

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, room: Any) -> int:
        """Unpack some more bytes."""
        count = self.unpacked.readinto(room)
        self.count += count
        if self.size and self.count > self.most:
            raise UsageError(
                f"{self.path}: {self.size:,} bytes unpack to over {self.most >> 20:,} MB, which no "
                "text does; unpack it and look at it"
            )
        return count


@contextmanager
def opened(path: str | Path) -> Iterator[BinaryIO]:
    """Open a plain, gzip or xz file for reading bytes, with every failure as a UsageError."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            # The content decides, since names lie; peek also works on a pipe.
            start = file.peek(6)[:6]
            if start.startswith(b"\x1f\x8b"):
                with gzip.GzipFile(fileobj=file) as unpacked:
                    # Reading lines from the buffer is several times faster than from the unpacker.
                    yield cast(BinaryIO, BufferedReader(Unpacked(unpacked, file, path)))
            elif start == b"\xfd7zXZ\x00":
                with lzma.LZMAFile(file) as unpacked:
                    yield cast(BinaryIO, BufferedReader(Unpacked(unpacked, file, path)))
            elif path.suffix in (".gz", ".xz"):
                raise UsageError(f"{path}: not {path.suffix} data; rename it, or fetch it again")
            else:
                yield file
    except EOFError as error:
        raise UsageError(
            f"{path}: the compressed data ends too early (a broken download?); fetch it again"
        ) from error
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise UsageError(
            f"{path}: the compressed data is damaged ({error}); fetch it again"
        ) from error
    except IsADirectoryError as error:
        raise UsageError(f"{path}: is a folder; expected a file in it") from error
    except FileNotFoundError as error:
        raise UsageError(missing(path)) from error
    except OSError as error:
        raise refuse(error, path) from error


class Recoded:
    """A file in another encoding that reads as one of UTF-8, line by line."""

    def __init__(self, file: Any, encoding: str, path: Path):
        self.encoding, self.path = encoding, path
        self.text = TextIOWrapper(file, encoding, newline="\n")  # only \n ends a line

    def readline(self, size: int) -> bytes:
        """Next line; of one that is too long, only so much as shows it."""
        line = start = self._decoded(self.text.readline, size)
        while line and not line.endswith("\n") and len(line) == size // 4:
            line = self._decoded(self.text.readline, size)
        return start.encode("utf-8", "surrogatepass")

    def read(self, size: int) -> bytes:
        """Next bytes, about as many as asked for."""
        return self._decoded(self.text.read, size).encode("utf-8", "surrogatepass")

    def _decoded(self, read: Callable[[int], str], size: int) -> str:
        try:
            return read(size // 4)
        except UnicodeError as error:
            raise UsageError(
                f"{self.path}: broken {self.encoding.upper()} ({error}); save it again as UTF-8"
            ) from None


# how a file may be encoded -> what Python calls it; UTF-16 tells itself by its first two bytes
ENCODINGS = {"utf-8": None, "latin1": "latin-1", "cp1252": "cp1252"}
_BYTE_ORDER_MARKS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}


@contextmanager
def opened_text(path: str | Path, encoding: str = "utf-8") -> Iterator[Any]:
    """Open a text for reading bytes of UTF-8, whatever encoding it has."""
    lookup("encoding", encoding, {**ENCODINGS, "auto": None})
    with opened(path) as file:
        start = cast(Any, file).peek(4)[:4]
        wide = _BYTE_ORDER_MARKS.get(start[:2]) if start[2:4] != b"\0\0" else None
        name = wide or ENCODINGS[encoding]
        yield Recoded(file, name, Path(path)) if name else file


def encoding_of(path: Path) -> str:
    """Encoding of a file: Latin-1 if it has letters beyond ASCII and no line is UTF-8.

    Bytes that Latin-1 has no letters for are those of Windows, such as its quotation marks.
    """
    encoding = "utf-8"
    with opened(path) as file:
        while line := file.readline(2**22):
            if line.isascii():
                continue
            if b"\0" in line:
                return "utf-8"  # UTF-16, or no text at all, which reading it will tell
            try:
                line.decode()
                return "utf-8"
            except UnicodeDecodeError:
                windows = encoding == "cp1252" or any(0x80 <= byte < 0xA0 for byte in line)
                encoding = "cp1252" if windows else "latin1"
    return encoding


def missing(path: Path) -> str:
    """Message for a missing file, with the nearest name in its folder."""
    if not os.path.isdir(path.parent):
        return f"{path}: no such file, nor the folder {path.parent}"
    try:
        return f"{path}: no such file.{nearest(path.name, os.listdir(path.parent))}"
    except OSError:
        return f"{path}: no such file"


def scan_stream(file: Any, name: str) -> Iterator[tuple[int, str, Fault | None]]:
    """Yield number, text and fault of each line of an open file, never stopping at one."""
    readline = file.readline
    number = 0
    while raw := readline(_MOST_BYTES):
        number += 1
        ended = raw[-1] == 10
        if not ended and len(raw) == _MOST_BYTES:
            # Skip to the end of the line without ever holding it whole.
            length = len(raw)
            while (rest := readline(_MOST_BYTES)) and rest[-1] != 10:
                length += len(rest)
                if length > MOST_SKIPPED:
                    raise UsageError(
                        f"{name}:{number}: a line of over {MOST_SKIPPED >> 20} MB; expected text"
                    )
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if ended:
            raw = raw[:-2] if raw[-2:-1] == b"\r" else raw[:-1]
        # Only a line that can be at fault is looked at more closely.
        if 0 not in raw and len(raw) <= LONGEST_LINE:
            try:
                yield number, raw.decode(), None
                continue
            except UnicodeDecodeError:
                pass
        text = raw.decode("utf-8", "replace")
        fault = find_fault(raw, text, f"{name}:{number}")
        yield number, text[:LONGEST_LINE], fault


def find_fault(raw: bytes, text: str, where: str) -> Fault | None:
    """Fault in the bytes of a line, if there is one."""
    if 0 in raw:
        what = f"a NUL byte at byte {raw.index(0) + 1}, so this is not text"
        return Fault("binary", where, what, "give a text file, or a table such as CSV or Parquet")
    if len(text) > LONGEST_LINE:
        what = f"a line of over {LONGEST_LINE:,} characters"
        return Fault("long", where, what, "give one sentence a line: cut it into shorter lines")
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        column = len(raw[: error.start].decode()) + 1
        what = f"not UTF-8 (byte 0x{raw[error.start]:02x} at column {column})"
        return Fault("encoding", where, what, "convert it with: iconv -f latin1 -t utf-8")
    return None


def scan_lines(path: str | Path) -> Iterator[tuple[int, str, Fault | None]]:
    """Yield number, text and fault of each line of a file, never stopping at a faulty line."""
    with opened_text(path) as file:
        yield from scan_stream(file, str(path))


def read_stream(file: BinaryIO, name: str = "standard input") -> Iterator[tuple[int, str]]:
    """Yield number and text of each line of an open binary file, refusing the first bad one."""
    for number, text, fault in scan_stream(file, name):
        if fault:
            raise UsageError(fault.message)
        yield number, text


def read_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """Yield number (from 1) and text of each line of a plain, gzip or xz file of text."""
    with opened_text(path) as file:
        yield from read_stream(file, str(path))
