"""Atomic writes, file locks, and JSON from outside."""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from regard.errors import UsageError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

MOST_JSON = 16 << 20  # bytes of a JSON file from outside
_MOST_JSON_VALUES = 6_000_000  # which bounds what it takes in memory
_MOST_LEVELS = 100  # of nested JSON
_TEMPORARY = ".tmp"  # how what is being written is called
_LOCKED_BYTE = 1 << 30  # of a lock on Windows: far behind what is written, which it would forbid


def refuse(error: OSError, path: str | Path) -> UsageError:
    """Turn an OSError into a UsageError that names the path."""
    if isinstance(error, FileExistsError):  # a file where a folder should be
        return UsageError(f"{path}: not a directory")
    return UsageError(f"{path}: {(error.strerror or str(error)).lower()}")


def system_error(error: Exception) -> OSError:
    """Turn an error that has the system's number in its words, as safetensors', into an OSError."""
    number = re.search(r"os error (\d+)", str(error))
    code = int(number[1]) if number else errno.EIO
    return OSError(code, os.strerror(code))


@contextmanager
def errors_in(path: str | Path) -> Iterator[None]:
    """Put a path before what is said to be wrong with what it holds."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def cache_folder() -> Path:
    """Return the cache of tokenised data and compiled kernels; REGARD_CACHE sets it."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "regard"
    return Path(os.environ.get("REGARD_CACHE", default))


def lock(handle: int, *, wait: bool = False) -> None:
    """Lock an open file until it is closed; BlockingIOError if another has, unless it waits."""
    if fcntl is not None:
        return fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    msvcrt: Any = import_module("msvcrt")
    while True:
        os.lseek(handle, _LOCKED_BYTE, os.SEEK_SET)
        try:  # LK_LOCK gives up after ten seconds, so it is asked again
            return msvcrt.locking(handle, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        except OSError as error:
            if not wait:
                raise BlockingIOError(*error.args) from None


def sync_folder(folder: Path) -> None:
    """Make the entries of a folder durable (fsync), where a folder can be opened."""
    if fcntl is None:
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Make a folder and its parents, also while other processes make or delete them.

    The cache is made for its owner alone: what is compiled there is run.
    """
    with suppress(RuntimeError):  # no home folder
        home = cache_folder()
        if home in folder.parents:
            make_folder(home)
        mode = 0o700 if folder == home else mode
    for turn in range(1000):
        try:
            return folder.mkdir(mode, parents=True, exist_ok=True)
        except (FileNotFoundError, FileExistsError):  # it was deleted while it was made
            if turn == 999 or (folder.exists() and not folder.is_dir()):
                raise


@contextmanager
def _locking(path: str | Path) -> Iterator[bool | None]:
    """Lock a file or folder that nobody else has locked; None where files cannot be locked.

    On Windows they are not, since an open file could not be renamed there.
    """
    if fcntl is None:
        yield None
        return
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield False
        return
    locked: bool | None = None
    try:
        try:
            lock(handle)
            locked = os.path.samestat(os.fstat(handle), os.stat(path))
        except (BlockingIOError, FileNotFoundError):
            locked = False
        except OSError:  # not supported here
            pass
        yield locked
    finally:
        os.close(handle)


def sweep(folder: Path, beginning: str = ".") -> None:
    """Delete the temporary files and folders of writers that were killed: nobody locks them."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.name.startswith(beginning) and path.suffix == _TEMPORARY:
                with _locking(path) as locked:
                    if locked:
                        delete(path)


def delete(path: Path) -> None:
    """Delete a file or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def temporary_beside(path: Path, make: Callable[[Path], object]) -> Iterator[Path]:
    """Make a temporary file or folder beside a path, locked while it is used, then delete it.

    A kill leaves it behind without its lock, and the next writer of the path deletes it.
    """
    make_folder(path.parent)
    sweep(path.parent, f".{path.name}.")
    while True:
        # two containers that share a folder may both be process 1
        number = f"{os.getpid()}-{os.urandom(4).hex()}"
        temporary = path.with_name(f".{path.name}.{number}{_TEMPORARY}")
        make(temporary)
        try:
            with _locking(temporary) as locked:
                if locked is not False:  # else it is being swept
                    yield temporary
                    return
        finally:
            with suppress(OSError):
                delete(temporary)


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path to write to, which replaces the path on success."""
    path = Path(path)
    try:
        with temporary_beside(path, Path.touch) as temporary:
            yield temporary
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_folder(path.parent)
    except OSError as error:
        raise refuse(error, path) from error


@contextmanager
def alone(path: str | Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which may be deleted meanwhile.

    Where files cannot be locked, it does not wait.
    """
    path = Path(path)
    for _ in range(10_000):
        try:
            make_folder(path.parent, 0o700)
            file = open(path, "w")  # noqa: SIM115
        except FileNotFoundError:  # the folder was deleted in between
            continue
        with file:
            try:
                lock(file.fileno(), wait=True)
                if not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    continue  # a new file has taken its place
            except FileNotFoundError:
                continue
            except OSError:  # not supported here
                pass
            try:
                yield
            finally:
                with suppress(OSError):
                    path.unlink()
            return
    raise FileNotFoundError(errno.ENOENT, "deleted again and again", str(path))


def write_atomically(path: str | Path, data: bytes | str) -> None:
    """Write a whole file under a temporary name, make it durable, and rename it into place."""
    try:
        data = data.encode() if isinstance(data, str) else data
    except UnicodeEncodeError:
        raise UsageError(f"{path}: half a character in what is to be written") from None
    with replacing(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def making(folder: str | Path) -> Iterator[Path]:
    """Yield a temporary folder to fill, which is renamed to the folder on success."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: is there already and not empty; choose another out=")
    try:
        with temporary_beside(folder, Path.mkdir) as partial:
            try:
                yield partial
            except UsageError as error:  # tell of the place that the user knows
                raise UsageError(str(error).replace(str(partial), str(folder))) from error
            partial.replace(folder)
            sync_folder(folder.parent)
    except OSError as error:
        raise refuse(error, folder) from error


def plain_file(path: str | Path) -> None:
    """Refuse a path that is no regular file: a pipe or device could be read forever."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"{path}: not a file")


def parse_json(data: bytes | str) -> Any:
    """Parse JSON from outside, with bounds on nesting and on the digits of a number."""
    value = json.loads(data, parse_int=_whole_number)
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(_MOST_LEVELS):
        inner = (part.values() if isinstance(part, dict) else part for part in level)
        level = [one for part in inner for one in part if isinstance(one, dict | list)]
        if not level:
            return value
    raise ValueError(f"over {_MOST_LEVELS} levels deep")


def read_bounded(path: str | Path, most: int) -> bytes:
    """Read a whole file that may have been tampered with, if it is one and not too large."""
    plain_file(path)
    try:
        with open(path, "rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise refuse(error, path) from error
    if len(data) > most:
        raise UsageError(f"{path}: over {most >> 20} MB; expected a smaller file")
    return data


def read_text(path: str | Path, most: int) -> str:
    """Read a text file of at most so many bytes."""
    try:
        return read_bounded(path, most).decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from error


def read_json(path: Path, most: int = MOST_JSON) -> dict[str, Any]:
    """Read a JSON object from a file whose size is bounded both as text and in memory."""
    data = read_bounded(path, most)
    if sum(data.count(mark) for mark in b",[{:") > _MOST_JSON_VALUES:
        raise UsageError(f"{path}: over {_MOST_JSON_VALUES:,} values; expected a smaller file")
    try:
        value = parse_json(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON ({str(error)[:100]})") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path}: expected a JSON object")
    return value


def write_json(path: Path, value: Any) -> None:
    """Write JSON for people to read."""
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _whole_number(digits: str) -> int:
    if len(digits) > 40:  # transformers writes 10 to the 30th for no bound at all
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
