"""Help pages: the settings of a verb in groups, with the defaults that a run gets."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from textwrap import fill as wrap
from typing import Any

from regard.api import load, plan
from regard.models import preset_names
from regard.settings import Setting, describe, fill
from regard.tasks import TASKS
from regard.tasks import task as task_class
from regard.tasks.frame import settings as frame
from regard.viewer.settings import LookSettings

_COLUMNS = 100  # of a page
# groups in the order of a page -> heading; others, such as sound., come with the model
HEADINGS = {
    "data": "Data",
    "": "Settings",
    "model": "Model",
    "length": "Length of training",
    "optimiser": "Optimiser",
    "comparison": "Comparison",
    "decoding": "Decoding",
    "scores": "Scores",
    "picture": "Picture",
    "files": "Files",
    "machine": "Machine",
}
# of each verb: settings of every task, keys of the verb itself, and the method of a model that
# completes what is given
_TASK = Setting("task", "text", "none", "task to use the model for, if not its own", "", TASKS)
_OTHER = Setting("against", "text", "none", "other models to compare with", "scores", ())
_WORD = Setting(
    "word", "text", "none", "word of the answer whose attention is shown", "picture", ()
)
_WORDS = Setting(
    "words", "text", "none", "words to draw as points in a plane; takes no input", "picture", ()
)
_DEVICE = Setting("device", "text", "cpu", "device: cpu, cuda, cuda:1, mps", "machine", ())
_FOLDERS = (
    Setting("in", "text", "none", "folder of files to answer, into those of out=", "files", ()),
    Setting("out", "text", "none", "folder for the answers to in=", "files", ()),
    Setting(
        "shard", "text", "0/1", "share i/n of the files of in=; n alone in an array", "files", ()
    ),
)
_USES: dict[str, tuple[type, tuple[Setting, ...], str]] = {
    "Run": (frame.RunSettings, (_TASK, _DEVICE, *_FOLDERS), "check"),
    "Eval": (frame.EvalSettings, (_TASK, _OTHER, _DEVICE), "eval_settings"),
    "Look": (LookSettings, (_TASK, _WORD, _WORDS, _DEVICE), "look_settings"),
}


def train_rows(name: str | None, values: Mapping[str, Any]) -> list[Setting]:
    """Settings of a training of a task or by a recipe; some values may be given.

    A key that is short for one of the model's stands in its place.
    """
    if name is None:
        return list(describe(frame.TrainSettings))
    task, given, _ = plan(name, {"data": "DATA", **values})
    kind: Any = task_class(task)
    if kind.objective is None:
        return []
    settings = kind.resolve(given)
    out = settings.out or f"runs/{task}"
    settings = replace(settings, data=values.get("data"), out=out)
    families = kind.families(given)
    presets = [preset for family in families for preset in preset_names(family)]
    known = {"family": families, "like": presets, "size": kind.sizes}
    rows = [
        row._replace(choices=known.get(row.key, row.choices))
        for row in describe(type(settings), base=settings)
    ]
    return with_short(rows, kind.short)


def with_short(rows: list[Setting], short: Mapping[str, str | tuple[str, ...]]) -> list[Setting]:
    """Rows by the short names of their keys; a key that sets several stands before the first."""
    longer = {long: key for key, long in short.items() if isinstance(long, str)}
    defaults = {row.key: row.default for row in rows}
    several = {longs[0]: (key, longs) for key, longs in short.items() if not isinstance(longs, str)}
    made = []
    for row in rows:
        key, longs = several.get(row.key, ("", ()))
        if longs and defaults.keys() >= set(longs):
            default = ",".join(dict.fromkeys(defaults[long] for long in longs))
            help = f"sets {' and '.join(longs)}"
            made.append(row._replace(key=key, default=default, help=help))
        made.append(row._replace(key=longer.get(row.key, row.key)))
    return made


def compare_rows(name: str | None, values: Mapping[str, Any]) -> list[Setting]:
    """Settings of a comparison, and those of the training, each of which can be varied."""
    from regard.lab.variants import CompareSettings

    own = list(describe(CompareSettings))
    keys = {row.key for row in own}
    given = {key: value for key, value in values.items() if key not in keys}
    return [*own, *(row for row in train_rows(name, given) if name and row.key not in keys)]


def model_rows(part: str, name: str | None, values: Mapping[str, Any]) -> list[Setting]:
    """Settings by which a model is run, judged or looked at; `part` says which."""
    shared, own, complete = _USES[part]
    if name is None:
        return [*describe(shared), *own]
    task, ours = values.get("task"), {row.key for row in own}
    values = {key: value for key, value in values.items() if key not in ours}
    if name in TASKS:
        kind: Any = getattr(task_class(name), part)
        settings = fill(kind, values)
    else:
        model = load(name, task=task)
        settings = getattr(model, complete)(values)
    rows = list(describe(type(settings), base=settings))
    return [*rows, *(row for row in own if row.key not in {each.key for each in rows})]


run_rows = partial(model_rows, "Run")
eval_rows = partial(model_rows, "Eval")
look_rows = partial(model_rows, "Look")


def table(rows: Iterable[Setting]) -> str:
    """All settings of a page in their groups."""
    order = [*HEADINGS]
    groups: dict[str, list[Setting]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    blocks = []
    for group in sorted(groups, key=lambda g: order.index(g if g in HEADINGS else "model")):
        width = max(len(row.key) for row in groups[group])
        heading = HEADINGS.get(group, group.capitalize())
        blocks.append("\n".join([f"{heading}:", *(line(row, width) for row in groups[group])]))
    return "\n\n".join(blocks)


def line(row: Setting, width: int) -> str:
    """One setting: its key, what it is, the type or the names to choose from, and the default."""
    kind = " | ".join(filter(None, row.names())) or row.type
    told = f"  {row.key:<{width}}  {row.help} ({kind}, {row.default or 'none'})"
    return wrap(told, _COLUMNS, subsequent_indent=" " * (width + 4), break_on_hyphens=False)
