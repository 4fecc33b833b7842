"""Settings: key=value arguments parsed into frozen dataclasses, or refused in one line."""

import math
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from dataclasses import field as dataclass_field
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from regard.errors import UsageError, lookup

C = TypeVar("C")
# a table, what returns it when asked, or where it is, as "module:TABLE"
Choices = Iterable[str] | Callable[[], Iterable[str]] | str

_SETTING = re.compile(r"([A-Za-z_][A-Za-z0-9_.]*)=(.*)", re.DOTALL)
_OPTION = re.compile(r"--([A-Za-z_][A-Za-z0-9_.-]*)(?:=(.*))?", re.DOTALL)
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_MAX_LISTED = 100  # letters of key names that still fit into a one-line error


# name of a key in other tools -> its name here, the first that the settings have
ALIASES: dict[str, tuple[str, ...]] = {
    "learning_rate": ("lr",),
    "rate": ("lr",),
    "batch_size": ("batch_tokens", "batch", "batch_rows"),
    "batch": ("batch_tokens", "batch_rows"),
    "per_device_train_batch_size": ("batch_tokens", "batch"),
    "gpu": ("device",),
    "cuda": ("device",),
    "num_workers": ("threads",),
    "workers": ("threads",),
    "max_steps": ("steps",),
    "train_steps": ("steps",),
    "num_train_epochs": ("epochs",),
    "num_epochs": ("epochs",),
    "max_epochs": ("epochs",),
    "time": ("minutes",),
    "lr_scheduler": ("schedule",),
    "scheduler": ("schedule",),
    "lr_scheduler_type": ("schedule",),
    "warmup_steps": ("warmup",),
    "optim": ("optimiser",),
    "optimizer": ("optimiser",),
    "wd": ("weight_decay",),
    "max_grad_norm": ("clip",),
    "grad_clip": ("clip",),
    "clip_norm": ("clip",),
    "gradient_accumulation_steps": ("batches",),
    "grad_accum": ("batches",),
    "accumulate": ("batches",),
    "early_stopping": ("patience",),
    "report_to": ("log",),
    "logger": ("log",),
    "callbacks": ("log",),
    "eval_steps": ("valid_every",),
    "eval_every": ("valid_every",),
    "fp16": ("dtype",),
    "bf16": ("dtype",),
    "precision": ("dtype",),
    "world_size": ("processes",),
    "random_seed": ("seed",),
    "dataset": ("data",),
    "train_file": ("data",),
    "input": ("data",),
    "validation": ("valid",),
    "dev": ("valid",),
    "output": ("out", "outputs"),
    "output_dir": ("out",),
    "save_dir": ("out",),
    "pretrained": ("init",),
    "checkpoint": ("init",),
    "resume": ("init",),
    "d_model": ("width",),
    "hidden_size": ("width",),
    "n_embd": ("width",),
    "embed_dim": ("width",),
    "dim": ("width",),
    "n_layer": ("depth",),
    "n_layers": ("depth",),
    "num_layers": ("depth",),
    "layers": ("depth",),
    "n_head": ("heads",),
    "n_heads": ("heads",),
    "num_heads": ("heads",),
    "vocab_size": ("pieces",),
    "max_len": ("max_length",),
    "max_seq_length": ("max_length", "context"),
    "max_new_tokens": ("max_length",),
    "block_size": ("context",),
    "seq_len": ("context", "max_length"),
    "num_beams": ("beam",),
    "beam_size": ("beam",),
    "image_size": ("image",),
    "img_size": ("image",),
    "source_lang": ("from",),
    "src_lang": ("from",),
    "target_lang": ("to",),
    "tgt_lang": ("to",),
    "architecture": ("family", "like"),
    "arch": ("family", "like"),
}
# an example where the value differs, too
_EXAMPLES = {"device": "cuda", "dtype": "bfloat16"}
_REMARKS = {
    "num_workers": "batches are made in the training itself, so there are no workers",
    "workers": "batches are made in the training itself, so there are no workers",
    "resume": "the same command with the same out= goes on by itself",
}


class _Mismatch(Exception):
    """A value that is not of its type; the message says what was expected."""


class Setting(NamedTuple):
    """One row of a help page."""

    key: str
    type: str
    default: str
    help: str
    group: str
    choices: Choices

    def names(self) -> list[str]:
        """Names that its value can be, if it is one of a table's."""
        return list(_names(self.choices))


def setting(
    default: Any,
    help: str = "",
    *,
    min: float | None = None,
    max: float | None = None,
    above: float | None = None,
    below: float | None = None,
    key: str | None = None,
    choices: Choices | None = None,
    joined_by: str | None = None,
    group: str | None = None,
) -> Any:
    """Declare a field of a settings class.

    A subclass that only changes the default (`lr: float = 0.1`) keeps all the rest.

    Args:
        default: Value that is not given.
        help: One line for the help page.
        min, max, above, below: Bounds of a number, or of each number of a list.
        key: Name that users write, if not that of the field.
        choices: Names that a text can be: the table that has them, which may grow, or a function
            that returns it, or "module:TABLE", which is imported when a value is given.
        joined_by: Sign between several of the choices in one text, such as +.
        group: Heading on the help page; else `GROUP` of the class that declares the field.
    """
    given = {"min": min, "max": max, "above": above, "below": below, "key": key}
    given |= {"choices": choices, "joined_by": joined_by, "group": group}
    metadata = {name: value for name, value in given.items() if value is not None}
    return dataclass_field(default=default, metadata={"help": help, **metadata})


def parse(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Split the arguments of a command line into positional words and settings."""
    plain: list[str] = []
    values: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        if word == "--":
            plain.extend(rest)
            break
        if match := _OPTION.fullmatch(word):
            key, value = match[1].replace("-", "_"), match[2]
            if value is None:
                value = next(rest, None)
            if value is None or value.startswith("--"):
                raise UsageError(f"{word} has no value; write {key}=VALUE")
        elif match := _SETTING.fullmatch(word):
            key, value = match[1], match[2]
        elif re.match(r"-[A-Za-z]", word) and not re.search(r"\s", word):
            raise UsageError(f"unknown option '{word}'; settings are key=value, text goes after --")
        else:
            plain.append(word)
            continue
        if key in values:
            raise UsageError(f"{key} is given twice: '{values[key]}' and '{value}'; keep one")
        values[key] = value
    return plain, values


def fill(
    cls: type[C],
    values: Mapping[str, Any],
    *,
    where: str = "",
    base: C | None = None,
    short: Mapping[str, str | tuple[str, ...]] = MappingProxyType({}),
) -> C:
    """Build a dataclass from strings or Python values; `base` has the values that are not given.

    Fields of nested dataclasses are keys with dots (`model.block.norm`) or nested mappings; what is
    not given inside one keeps the value of the outer default. `short` maps short keys to longer
    ones.
    """
    given: dict[str, Any] = {}
    written: dict[str, str] = {}  # the key as the user wrote it
    for key, value in values.items():
        longer = short.get(key, key)
        for long in (longer,) if isinstance(longer, str) else longer:
            if long in given:
                raise UsageError(f"{key} is given twice, also as {written[long]}; keep one")
            given[long], written[long] = value, key
    try:
        return _fill(cls, given, base, "", lambda: [*short, *(row.key for row in describe(cls))])
    except UsageError as error:
        text = str(error)
        long = text.partition("=")[0]
        text = written.get(long, long) + text.removeprefix(long)
        raise UsageError(f"{where}: {text}" if where else text) from None


def written(value: Any) -> str:
    """Write a value as a command line has it."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def fill_checked(cls: type[C], values: Mapping[str, Any], where: str) -> C:
    """Build a dataclass that has a `check` of its own; whatever is refused names where it stood."""
    filled: Any = fill(cls, values, where=where)
    try:
        return filled.check()
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def describe(cls: type, prefix: str = "", base: Any = None) -> Iterator[Setting]:
    """List every key of a dataclass with its type, default and help."""
    for row in _keys(cls):
        key, default = prefix + row.key, row.default(base)
        if inner := _nested(row.hint):
            within = default if isinstance(default, inner) else None
            rows = describe(inner, key + ".", within)
            yield from (each._replace(group=row.metadata.get("group", row.key)) for each in rows)
        else:
            shown = "" if default is MISSING else _show(default)
            told = (row.metadata.get("help", ""), row.group, row.metadata.get("choices", ()))
            yield Setting(key, _type_name(row.hint), shown, *told)


def _fill(
    cls: type, values: Mapping[str, Any], base: Any, prefix: str, known: Callable[[], list[str]]
) -> Any:
    rows = _keys(cls)
    # A Python caller cannot write the keyword `from`, so the field's own name is understood too.
    names = {row.key: row for row in rows} | {row.name: row for row in rows}
    given: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        head, _, tail = str(key).partition(".")
        row = names.get(head)
        if row is None or (tail and not _nested(row.hint)):
            raise _unknown(prefix + str(key), known())
        inner = given.setdefault(row.name, {})
        if tail in inner:
            raise UsageError(f"{prefix}{key} is given twice, also as {prefix}{row.key}; keep one")
        inner[tail] = value

    built: dict[str, Any] = {}
    for row in rows:
        key, default = prefix + row.key, row.default(base)
        parts, inner = given.get(row.name, {}), _nested(row.hint)
        if not parts and default is not MISSING:
            built[row.name] = default
        elif inner:
            optional = type(None) in get_args(row.hint)
            is_set, parts, default = _split_nested(inner, optional, parts, default, key)
            built[row.name] = _fill(inner, parts, default, key + ".", known) if is_set else None
        elif not parts:
            raise UsageError(f"{key} is missing; add {key}=...")
        else:
            built[row.name] = _convert(row.hint, parts[""], key, row.metadata)
    return cls(**built)


def _split_nested(
    cls: type, optional: bool, given: dict[str, Any], default: Any, key: str
) -> tuple[bool, dict[str, Any], Any]:
    """True if a nested dataclass is set (not none), with the fields to set and its base."""
    parts = {part: value for part, value in given.items() if part}
    base = default if isinstance(default, cls) else None
    if "" not in given:
        return True, parts, base
    value = given[""]
    if isinstance(value, Mapping):
        return True, {**value, **parts}, base
    if isinstance(value, cls):
        return True, parts, value
    if optional and not parts and (value is None or str(value).lower() == "none"):
        return False, {}, None
    keys = ", ".join(row.key for row in describe(cls, key + "."))
    raise UsageError(f"{key}={_quote(value)} has parts of its own; set one of {keys}")


def _unknown(key: str, keys: list[str]) -> UsageError:
    last = key.rpartition(".")[2]
    close = [known for known in keys if known.rpartition(".")[2] == last]
    close = close or get_close_matches(key.lower(), keys, n=1, cutoff=0.6)
    text = f"unknown key '{key}'"
    usual = key.lower().replace("-", "_")
    meant = [known for known in ALIASES.get(usual, ()) if known in keys]
    if meant:
        example = f", such as {meant[0]}={_EXAMPLES[meant[0]]}" if meant[0] in _EXAMPLES else ""
        aside = f" ({_REMARKS[usual]})" if usual in _REMARKS else ""
        return UsageError(f"{text}; here it is '{meant[0]}'{example}{aside}")
    if close:
        text += f"; did you mean '{close[0]}'?"
    listed = ", ".join(keys)
    if not keys:
        text += "; there is nothing to set"
    elif len(listed) <= _MAX_LISTED:
        text += f" Keys: {listed}" if close else f"; keys are {listed}"
    elif not close:
        text += "; --help lists the keys"
    return UsageError(text)


def _convert(hint: Any, value: Any, key: str, metadata: Mapping[str, Any]) -> Any:
    try:
        result = _as(hint, value)
    except _Mismatch as mismatch:
        raise UsageError(f"{key}={_quote(value)} is not {mismatch}") from None
    numbers = result if isinstance(result, tuple | list) else (result,)
    for number in numbers:
        if isinstance(number, int | float) and not isinstance(number, bool):
            _check_bounds(number, key, metadata)
        elif isinstance(number, str) and "choices" in metadata:
            names = dict.fromkeys(_names(metadata["choices"]))
            sign = metadata.get("joined_by")
            for name in map(str.strip, number.split(sign)) if sign else (number,):
                lookup(key.rpartition(".")[2], name, names)
    return result


def _names(choices: Choices) -> Iterable[str]:
    if isinstance(choices, str):
        module, _, table = choices.partition(":")
        return getattr(import_module(module), table)
    return choices() if callable(choices) else choices


def _check_bounds(number: float, key: str, metadata: Mapping[str, Any]) -> None:
    for name, holds, words in (
        ("min", lambda limit: number >= limit, "at least"),
        ("max", lambda limit: number <= limit, "at most"),
        ("above", lambda limit: number > limit, "more than"),
        ("below", lambda limit: number < limit, "less than"),
    ):
        limit = metadata.get(name)
        if limit is not None and not holds(limit):
            size = "small" if name in ("min", "above") else "large"
            raise UsageError(f"{key}={number} is too {size}; it must be {words} {limit}")


def _as(hint: Any, value: Any) -> Any:
    """Convert a value to the annotated type, or say what was expected."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _as_union(arguments, value)
    if origin is Literal:
        for option in arguments:
            if value == option or (isinstance(value, str) and value == str(option)):
                return option
        close = get_close_matches(str(value).lower(), [str(o) for o in arguments], n=1)
        raise _Mismatch(f"{_expected(hint)}" + (f"; did you mean '{close[0]}'?" if close else ""))
    if origin in (tuple, list):
        return _as_sequence(origin, arguments, value, hint)
    if hint in _CONVERTERS:
        return _CONVERTERS[hint](value)
    if hint is Any or isinstance(value, origin or hint):
        return value
    raise _Mismatch(_expected(hint))


def _as_union(arguments: tuple[Any, ...], value: Any) -> Any:
    optional = type(None) in arguments
    kinds = [kind for kind in arguments if kind is not type(None)]
    named_none = any("none" in get_args(kind) for kind in kinds if get_origin(kind) is Literal)
    if optional and (
        value is None or (isinstance(value, str) and value.lower() == "none" and not named_none)
    ):
        return None
    expected = []
    for kind in kinds:
        try:
            return _as(kind, value)
        except _Mismatch as mismatch:
            expected.append(str(mismatch))
    raise _Mismatch(" or ".join(expected) + (", nor none" if optional else ""))


def _as_sequence(origin: type, arguments: tuple[Any, ...], value: Any, hint: Any) -> Any:
    if isinstance(value, str):
        value = [item.strip() for item in value.split(",")] if value.strip() else []
    elif isinstance(value, int | float) and not isinstance(value, bool):
        value = [value]
    if not isinstance(value, tuple | list):
        raise _Mismatch(_expected(hint))
    repeated = origin is list or arguments[-1] is Ellipsis
    if not repeated and len(value) != len(arguments):
        raise _Mismatch(_expected(hint))
    kinds = [arguments[0]] * len(value) if repeated else arguments
    try:
        return origin(_as(kind, item) for kind, item in zip(kinds, value, strict=True))
    except _Mismatch:
        raise _Mismatch(_expected(hint)) from None


def _as_int(value: Any) -> int:
    try:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError
        number = int(value)
    except ValueError:
        raise _Mismatch("a whole number") from None
    if abs(number) >= 2**63:
        raise _Mismatch("a whole number of at most 63 bits")
    return number


def _as_float(value: Any) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        number = float(value)
    except (ValueError, OverflowError):
        raise _Mismatch("a number") from None
    if not math.isfinite(number):
        raise _Mismatch("a finite number")
    return number


def _as_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _BOOLEANS:
        return _BOOLEANS[value.lower()]
    raise _Mismatch("true or false")


def _as_str(value: Any) -> str:
    if isinstance(value, str | Path):
        return str(value)
    raise _Mismatch("text")


def _as_path(value: Any) -> Path:
    if isinstance(value, Path):
        return value
    if isinstance(value, str) and value and "\0" not in value:
        return Path(value).expanduser()
    raise _Mismatch("a path")


_CONVERTERS = {int: _as_int, float: _as_float, bool: _as_bool, str: _as_str, Path: _as_path}
_TYPE_NAMES = {
    int: ("whole number", "a whole number"),
    float: ("number", "a number"),
    bool: ("true|false", "true or false"),
    str: ("text", "text"),
    Path: ("path", "a path"),
}


def _expected(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(str(option) for option in arguments)
    if origin in (tuple, list):
        count = f"{len(arguments)} " if origin is tuple and arguments[-1] is not Ellipsis else ""
        return f"a list of {count}{_type_name(arguments[0])}s by commas"
    return _TYPE_NAMES.get(hint, ("", f"a {getattr(hint, '__name__', hint)}"))[1]


def _type_name(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return "|".join("none" if kind is type(None) else _type_name(kind) for kind in arguments)
    if origin is Literal:
        return "|".join(str(option) for option in arguments)
    if origin in (tuple, list):
        return f"{_type_name(arguments[0])},..."
    return _TYPE_NAMES.get(hint, (getattr(hint, "__name__", str(hint)), ""))[0]


@cache
def _nested(hint: Any) -> type | None:
    """Return the dataclass that an annotation names, `| None` or not."""
    for kind in (hint, *get_args(hint)):
        if isinstance(kind, type) and is_dataclass(kind):
            return kind
    return None


class _Key(NamedTuple):
    """A field that can be set, with the key, help and bounds that it has or inherits."""

    key: str
    name: str
    hint: Any
    metadata: Mapping[str, Any]
    field: Field[Any]
    group: str

    def default(self, base: Any) -> Any:
        """Return its value in `base`, or its own default, or MISSING."""
        if base is not None:
            return getattr(base, self.name)
        factory = self.field.default_factory
        return self.field.default if factory is MISSING else factory()


@cache
def _keys(cls: type) -> list[_Key]:
    keys, hints = [], get_type_hints(cls)
    for field in fields(cls):
        if field.init:
            name = field.name
            bases = [base for base in cls.__mro__ if name in _fields(base)]
            declared = [_fields(base)[name].metadata for base in bases]
            metadata = next(filter(None, declared), {})
            groups = [*(each.get("group") for each in declared), vars(bases[-1]).get("GROUP")]
            group = next(filter(None, groups), "")
            keys.append(_Key(metadata.get("key", name), name, hints[name], metadata, field, group))
    return keys


def _fields(cls: type) -> Mapping[str, Field[Any]]:
    return getattr(cls, "__dataclass_fields__", {})


def _show(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return ",".join(_show(item) for item in value)
    return str(value)


def _quote(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "...'"
