"""Your own parts: `register` puts one into an open table, and `use=mine.py` runs a file that does.

A file is run only where a user gives it, never because a folder names it. A run folder notes which
file its parts came from, by name and hash, so that what is missing can be said.
"""

import hashlib
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from inspect import isclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar, get_type_hints, overload

from regard.errors import UsageError, log_once, lookup
from regard.files import read_bounded, refuse

Files = str | Path | Sequence[str | Path] | None
F = TypeVar("F", bound=Callable[..., Any])

_MOST_BYTES = 1 << 20  # of a file of own parts
_SHOWN = 12  # letters of a hash that a message shows


def _as_it_is(name: str, thing: Any) -> Any:
    """The thing itself."""
    return thing


def _feed_forward(name: str, thing: Any) -> tuple[Any, Any]:
    """A network with its activation: a pair, a class (with GELU), or an activation alone."""
    from torch.nn import functional as F

    from regard.layers.feedforward import FeedForward

    if isinstance(thing, tuple):
        return thing
    return (thing, F.gelu) if isclass(thing) else (FeedForward, thing)


def _metric(name: str, thing: Any) -> Any:
    """The mean of a function of an output and its reference, from 0 to 1."""
    each = lambda output, reference: {name: float(thing(output, reference))}  # noqa: E731
    return _named("regard.metrics.text:MeanMetric")(each, f"own:{name}", name)


def _block(name: str, thing: Any) -> Any:
    """A block as an order of its sublayers."""
    return _named("regard.layers.block:ResidualOrder")(None, thing)


def _family(name: str, thing: Any) -> tuple[str, str, str]:
    """Where a model class and its config class are, in a module that declares the family."""
    config = get_type_hints(thing.__init__).get("config")
    if config is None or not hasattr(sys.modules.get(thing.__module__), "INFO"):
        raise UsageError(
            f"family '{name}' is not declared; write INFO = FamilyInfo(...) before, and the class "
            f"of the config: def __init__(self, config: {thing.__name__}Config)"
        )
    return thing.__module__, config.__name__, thing.__name__


class Kind(NamedTuple):
    """A kind of part: where the table of its names is, and what a row of it is made of.

    Args:
        table: "module:TABLE" that has all parts of the kind by name.
        base: "module:class" that a part derives from, or is one of; "": anything callable.
        row: the row of the table for a name and what was registered.
    """

    table: str
    base: str = ""
    row: Callable[[str, Any], Any] = _as_it_is


KINDS: dict[str, Kind] = {
    "position": Kind("regard.attention.positions:POSITIONS", "regard.attention.positions:Position"),
    "score": Kind("regard.attention.scores:SCORES"),
    "norm": Kind("regard.layers.norm:NORMS", "torch.nn:Module"),
    "feed_forward": Kind("regard.layers.feedforward:FEED_FORWARDS", row=_feed_forward),
    "block": Kind(
        "regard.layers.block:RESIDUALS", "regard.layers.block:SelfAttentionBlock", _block
    ),
    "mask": Kind("regard.attention.masks:MASKS", "regard.attention.masks:Mask"),
    "optimiser": Kind("regard.training.optim:OPTIMISERS", "torch.optim:Optimizer"),
    "schedule": Kind("regard.training.optim:SCHEDULES"),
    "loss": Kind("regard.training.loss:LOSSES"),
    "metric": Kind("regard.metrics.text:TEXT_METRICS", row=_metric),
    "augmentation": Kind("regard.data.augment:AUGMENTS"),
    "tokenizer": Kind("regard.data.tokenize:TOKENIZERS"),
    "family": Kind("regard.models:MODELS", "torch.nn:Module", _family),
    "task": Kind("regard.tasks:TASKS", "regard.tasks.parts:Task"),
}
"""Kinds of parts that can be registered."""


class _Own(NamedTuple):
    """A part that was registered."""

    kind: str
    name: str


class _File(NamedTuple):
    """A file of own parts that was run."""

    path: Path
    sha: str
    parts: list[_Own]


_FILES: dict[Path, _File] = {}
_PROGRAM: list[_Own] = []  # registered by the program itself
_RUNNING: list[_File] = []  # the file that is being run


@overload
def register(kind: str, name: str, thing: Any) -> Any: ...
@overload
def register(kind: str, name: str) -> Callable[[Any], Any]: ...


def register(kind: str, name: str, thing: Any = None) -> Any:
    """Add a part of your own under a new name: register("norm", "mine", Mine), or as a decorator.

    It can be named from then on wherever the parts of its kind are, such as norm=mine. From the
    command line, write it into a file and give that: use=mine.py.
    """
    if thing is None:
        return lambda made: register(kind, name, made)
    row, table = lookup("kind of part", kind, KINDS), _table(kind)
    if not isinstance(name, str) or not name.isidentifier():
        raise UsageError(f"{kind} {name!r:.60} is no name; use letters, digits and _")
    if name in table:
        raise UsageError(f"{kind} '{name}' exists already; choose another name")
    if not _fits(thing, row):
        what = f"a {row.base.replace(':', '.')}" if row.base else "a function or a class"
        raise UsageError(f"{kind} '{name}' is {thing!r:.60}; expected {what}")
    table[name] = row.row(name, thing)
    (_RUNNING[-1].parts if _RUNNING else _PROGRAM).append(_Own(kind, name))
    return thing


def use(files: Files) -> None:
    """Run files of own parts; one that was run already is run again only if it has changed."""
    if files is None:
        return
    if isinstance(files, str) and not Path(files).exists():
        files = files.split(",")
    for file in [files] if isinstance(files, str | Path) else files:
        _run(Path(file).expanduser())


def using(function: F) -> F:
    """Let a function take use=, whose files are run before it is called."""

    @wraps(function)
    def call(*words: Any, **settings: Any) -> Any:
        use(settings.pop("use", None))
        return function(*words, **settings)

    return call  # type: ignore[return-value]


def words() -> list[str]:
    """What a command line needs to have the same parts: use= with every file that was run."""
    return [f"use={','.join(map(str, _FILES))}"] if _FILES else []


def paths() -> list[str]:
    """Every file that was run."""
    return [str(path) for path in _FILES]


def noted(task: str, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a run folder says of the own parts that settings name: file, hash and parts."""
    named = {task} | {
        part for value in settings.values() for part in str(value).replace(",", "+").split("+")
    }
    found: list[dict[str, Any]] = []
    for file in (*_FILES.values(), _File(Path(), "", _PROGRAM)):
        parts = [f"{own.kind} {own.name}" for own in file.parts if own.name in named]
        if parts or (file.sha and not file.parts):  # it may have written into a table itself
            name = {"file": file.path.name, "sha256": file.sha} if file.sha else {}
            found.append({**name, "parts": parts})
    return found


def missing(noted: Any) -> str:
    """Say which file the parts need that a folder notes, if it was not given; else nothing."""
    lacking = []
    for name, sha, parts in _read(noted):
        if not sha:
            lacking.append(f"{parts}, which the program that trained it registered")
        elif sha not in {file.sha for file in _FILES.values()}:
            lacking.append(
                f"use={name} (sha256 {sha[:_SHOWN]})" + (f" for {parts}" if parts else "")
            )
    return " and ".join(lacking)


def changed(noted: Any) -> str:
    """Say which file was given that is another than a folder notes under its name, if any."""
    now = {file.path.name: file.sha for file in _FILES.values()}
    for name, sha, _ in _read(noted):
        if sha and now.get(name, sha) != sha and sha not in now.values():
            return f"use={name} has sha256 {now[name][:_SHOWN]}, and had {sha[:_SHOWN]}"
    return ""


def named_files(noted: Any) -> list[str]:
    """Names of the files that a folder notes."""
    return [name for name, sha, _ in _read(noted) if sha]


def tell_changed(folder: Path, noted: Any) -> None:
    """Say once that a model was trained with another file of the same name."""
    if told := changed(noted):
        log_once(f"{folder}: trained with another file of own parts: {told} then")


def named_parts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in which a function or class, such as loss=mine, is registered and named."""
    found = dict(settings)
    for key, value in settings.items():
        if key in KINDS and callable(value):
            name = getattr(value, "__name__", type(value).__name__).strip("<>")
            table = _table(key)
            if table.get(name) is not value:
                if _Own(key, name) in _PROGRAM:  # defined anew, as in a notebook
                    _forget([_Own(key, name)])
                register(key, name, value)
            found[key] = name
    return found


def _read(noted: Any) -> Iterable[tuple[str, str, str]]:
    """File, hash and parts of each row that a folder notes, whatever it holds."""
    for row in noted if isinstance(noted, list) else ():
        if isinstance(row, dict) and isinstance(row.get("parts", []), list):
            told = [row.get("file", ""), row.get("sha256", ""), ", ".join(map(str, row["parts"]))]
            yield tuple(f"{each!s:.100}" for each in told)  # type: ignore[misc]


def _run(path: Path) -> None:
    """Run a file of own parts; of one that fails nothing stays registered."""
    try:
        path, source = path.resolve(), read_bounded(path, _MOST_BYTES)
    except OSError as error:
        raise refuse(error, path) from None
    sha = hashlib.sha256(source).hexdigest()
    if path in _FILES:
        if _FILES[path].sha == sha:
            return
        _forget(_FILES.pop(path).parts)
    module = ModuleType(f"{path.stem}_{sha[:_SHOWN]}")
    module.__file__ = str(path)
    file = _File(path, sha, [])
    sys.modules[module.__name__] = module  # where dataclasses and families look for their names
    _RUNNING.append(file)
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        _forget(file.parts)
        del sys.modules[module.__name__]
        raise UsageError(f"{path}, line {_line(error, path)}: {_reason(error)}") from error
    finally:
        _RUNNING.pop()
    _FILES[path] = file


def _line(error: BaseException, path: Path) -> int:
    """The last line of a file that an error came through."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno or 0
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno or 0 for f in reversed(frames) if f.filename == str(path)), 1)


def _reason(error: BaseException) -> str:
    """What went wrong, in one line."""
    if isinstance(error, UsageError):
        return str(error)
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}"


def _forget(parts: Iterable[_Own]) -> None:
    """Take parts out of their tables."""
    for own in parts:
        _table(own.kind).pop(own.name, None)
        if own in _PROGRAM:
            _PROGRAM.remove(own)


def _fits(thing: Any, kind: Kind) -> bool:
    """Whether a thing can be a part of a kind."""
    if not kind.base:
        return callable(thing) or (isinstance(thing, tuple) and all(map(callable, thing)))
    base = _named(kind.base)
    return issubclass(thing, base) if isclass(thing) else isinstance(thing, base)


def _table(kind: str) -> dict[str, Any]:
    """The table of a kind."""
    return _named(lookup("kind of part", kind, KINDS).table)


def _named(name: str) -> Any:
    """What "module:name" names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
