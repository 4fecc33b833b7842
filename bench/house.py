"""Measure how the package is built: its size, its depth, and what a reader must know at once.

python bench/house.py [--json]

Each row has the figure now and the bar. An entry is a call of a function from another file.
"""

import ast
import contextlib
import io
import json
import re
import sys
import tempfile
import wave
from collections import defaultdict
from collections.abc import Callable, Iterator
from inspect import CO_GENERATOR
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, NamedTuple

from regard.cli import main
from regard.modalities.base import Modality, NoneOfThese
from regard.tasks import TASKS, task
from regard.tasks.frame.settings import flat
from regard.tasks.labels.decision import Decision
from regard.tasks.parts import Codec, Judge, Objective, Predictor, ReadsPairs, Streaming, Task
from regard.tasks.runner import Runner

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "regard"
MODALITIES = {"image", "images", "audio", "sound", "sounds", "series"}
# where nobody needs to know a modality by its name, but for files that are named after one
ASK_THE_MODALITY = ("cli.py", "api.py", "examine", "costs", "insight", "lab", "tasks/frame")
ANY = {"settings", "config", "data", "given"}
PARTS_OF_TASKS = {"text", "vision", "sound", "labels", "series.py"}  # of tasks/, beside its frame


class Measure(NamedTuple):
    """A row of the table."""

    what: str
    now: str
    bar: str


def files(*under: str) -> list[Path]:
    """All Python files of the package, or of some of its files and folders."""
    found = [PACKAGE / name for name in under or ("",)]
    every = (p for each in found for p in ([each] if each.is_file() else each.rglob("*.py")))
    return sorted(every)


def tree(path: Path) -> ast.Module:
    """Parse a file."""
    return ast.parse(path.read_text())


def docstrings(module: ast.Module) -> set[ast.AST]:
    """The statements that are docstrings, and the strings in them."""
    found: set[ast.AST] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if ast.get_docstring(node, clean=False) is not None and isinstance(first, ast.Expr):
                found |= {first, first.value}
    return found


def statements(paths: list[Path]) -> int:
    """Number of statements without docstrings."""
    count = 0
    for module in map(tree, paths):
        left_out = docstrings(module)
        count += sum(isinstance(n, ast.stmt) and n not in left_out for n in ast.walk(module))
    return count


def own_classes(kind: type) -> int:
    """Number of classes of the package that a class is or inherits from."""
    return sum(each.__module__.partition(".")[0] == "regard" for each in kind.__mro__)


def part_classes(row: Task) -> dict[type, type]:
    """Classes of the parts of a task by the class that each derives from."""
    predictor = getattr(row.predictor, "make", row.predictor)
    found = {Judge: type(row.judge), Predictor: getattr(predictor, "func", predictor)}
    if row.objective is not None:
        found[Objective] = type(row.objective)
    return found


def methods(kind: type) -> list[str]:
    """Public methods and properties that a class declares itself."""
    kinds = FunctionType | classmethod | staticmethod | property
    return [n for n, value in vars(kind).items() if isinstance(value, kinds) and n[0] != "_"]


def undeclared() -> set[str]:
    """What is asked of a predictor beside what parts declare, if it has that."""
    asked, words = set[str](), r'predictor(?:\.|, ")([a-z]\w*)'
    for path in files():
        if not set(path.relative_to(PACKAGE).parts[1:2]) & PARTS_OF_TASKS:
            asked |= set(re.findall(words, path.read_text()))
    declared = {*dir(Predictor), *methods(Streaming), *methods(ReadsPairs)}
    return asked - {*declared, "model", "codec", "config", "device", "defaults"}


def hooks() -> dict[str, dict[str, int]]:
    """Methods that the author of a task may implement, by part, and how many tasks do."""
    rows: list[Task] = [task(name) for name in TASKS]
    found: dict[str, dict[str, int]] = {}
    for base in (Objective, Predictor, Judge):
        own = [part_classes(row).get(base, base) for row in rows]
        found[base.__name__] = {
            name: sum(_resolved(kind, name) is not vars(base)[name] for kind in own)
            for name in methods(base)
        }
    for protocol in (Codec, Decision):  # whoever is one has all of them
        found[protocol.__name__] = dict.fromkeys(methods(protocol), len(rows))
    predictors = [part_classes(row)[Predictor] for row in rows]
    for protocol in (Streaming, ReadsPairs):  # asked by isinstance
        count = sum(all(hasattr(p, name) for name in methods(protocol)) for p in predictors)
        found[protocol.__name__] = dict.fromkeys(methods(protocol), count)
    asked = {name: sum(hasattr(p, name) for p in predictors) for name in sorted(undeclared())}
    return {**found, "asked for by name": {name: n for name, n in asked.items() if n}}


def _resolved(cls: type, name: str) -> Any:
    return next(vars(each)[name] for each in cls.__mro__ if name in vars(each))


def entries(run: Callable[[], Any], until: str = "") -> dict[str, int]:
    """How often each file of tasks/ is entered while something runs, until a function is called."""
    folder, counts, seen = f"{PACKAGE}/tasks/", defaultdict[str, int](int), set[FrameType]()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_name == "<module>":
            return
        if until and code.co_name == until:
            sys.setprofile(None)
        if not code.co_filename.startswith(folder) or frame in seen:
            return
        if code.co_flags & CO_GENERATOR:
            seen.add(frame)  # it is called once more whenever it goes on
        caller = frame.f_back
        if caller is None or caller.f_code.co_filename != code.co_filename:
            counts[code.co_filename.removeprefix(folder)] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return dict(counts)


def quietly(*words: str) -> str:
    """Run a command, and return what it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = main(list(words))
    assert code == 0, (words, code)
    return out.getvalue()


def walks() -> Iterator[tuple[str, dict[str, int]]]:
    """What a training of translate enters before its first step, and a transcription in all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = (f"a dog {i} sees {i % 7} cats\tein Hund {i} sieht {i % 7}\n" for i in range(60))
        (folder / "pairs.tsv").write_text("".join(rows))
        with wave.open(str(folder / "file.wav"), "wb") as sound:
            sound.setparams((1, 2, 16_000, 0, "NONE", ""))
            sound.writeframes(bytes(2 * 16_000))
        train = ("train", "translate", f"data={folder}/pairs.tsv", "steps=1", "threads=1")
        run = ("run", "letters", f"{folder}/file.wav")
        quietly(*train, f"out={folder}/warm")  # imports are not counted
        quietly(*run)
        yield "train translate", entries(lambda: quietly(*train, f"out={folder}/a"), "one_step")
        yield "run letters", entries(lambda: quietly(*run))


def modality_files() -> dict[str, int]:
    """How often files that should ask a modality have the name of one as a string."""
    counts = {}
    for path in files(*ASK_THE_MODALITY):
        module = tree(path)
        left_out = docstrings(module)
        count = sum(
            isinstance(n, ast.Constant) and n.value in MODALITIES and n not in left_out
            for n in ast.walk(module)
            if isinstance(getattr(n, "value", None), str)
        )
        if count and path.stem not in MODALITIES:
            counts[str(path.relative_to(PACKAGE))] = count
    return counts


def typed_any() -> int:
    """Number of arguments and fields called settings, config, data or given that are Any."""
    count = 0
    for node in (n for path in files() for n in ast.walk(tree(path))):
        name = node.arg if isinstance(node, ast.arg) else ""
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        hint = getattr(node, "annotation", None)
        count += name in ANY and isinstance(hint, ast.Name) and hint.id == "Any"
    return count


def wrong_defaults() -> dict[str, list[str]]:
    """Keys of each task's page whose default is not what a run gets."""
    found = {}
    for name in TASKS:
        kind = task(name)
        if kind.objective is None:
            continue
        real = flat(kind.resolve({"data": "x"}))
        for key, longs in kind.short.items():
            if isinstance(longs, str) and longs in real:
                real[key] = real[longs]
        page = re.sub(r"\n {5,}", " ", quietly("train", name, "--help"))
        rows = re.findall(r"^  (\S+) .*\((?:[^()]*, )?([^()]*)\)$", page, re.MULTILINE)
        wrong = {key for key, shown in rows if key in real and _shown(real[key]) != shown}
        if wrong := sorted(wrong - {"data", "out"}):
            found[name] = wrong
    return found


def _shown(value: Any) -> str:
    """A value as a page shows it."""
    if isinstance(value, list | tuple):
        return ",".join(map(_shown, value)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value in (None, "") else str(value)


def constants(module: ast.Module) -> dict[str, ast.AST]:
    """Constants that a module defines, by name; a type variable is none."""
    named: dict[str, ast.AST] = {}
    for node in module.body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if "TypeVar(" not in ast.unparse(node):
            named |= {t.id: node for t in targets if isinstance(t, ast.Name) and t.id.isupper()}
    return named


def folder_of(home: str) -> str:
    """Name of the package that a module is in; a package is in itself."""
    return home if (ROOT / home.replace(".", "/")).is_dir() else home.rpartition(".")[0]


def looked_up(modules: dict[str, ast.Module]) -> set[tuple[str, str]]:
    """Folders and names of constants by which a table knows a module, such as INFO of a family.

    Such a name is an attribute of a module that is not imported by name but found in a table
    (`import_module(path).INFO`, `getattr(recipe, "EVAL", None)`); where it is, so are the
    constants of the module that it is made of, such as the PRESETS of a family. It has one
    meaning in all modules of a folder.
    """
    read: set[str] = set()
    for module in modules.values():
        nodes = list(ast.walk(module))
        imports = [n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)]
        bound = {each.asname or each.name for node in imports for each in node.names}
        for node in nodes:
            if isinstance(node, ast.Attribute) and node.attr.isupper():
                read |= {node.attr} if ast.unparse(node.value) not in bound else set()
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
                key = node.args[1]
                read |= {str(key.value)} if isinstance(key, ast.Constant) else set()
    interface: set[tuple[str, str]] = set()
    for home, module in modules.items():
        own, folder = constants(module), folder_of(home)
        for name in read & own.keys():
            parts = {n.id for n in ast.walk(own[name]) if isinstance(n, ast.Name)}
            interface |= {(folder, part) for part in parts & own.keys()}
    return interface


def two_meanings() -> tuple[set[str], set[str]]:
    """Classes and public constants of several homes, and those imported from several.

    A name by which a table knows the modules of a folder (`looked_up`) has the folder as its home.
    """
    defined, imported = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    names = {p: ".".join(p.relative_to(ROOT).with_suffix("").parts) for p in files()}
    modules = {name.removesuffix(".__init__"): tree(path) for path, name in names.items()}
    interface = looked_up(modules)
    for home, module in modules.items():
        folder = folder_of(home)
        for name in constants(module):
            defined[name].add(folder if (folder, name) in interface else home)
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef) and node in module.body:
                defined[node.name].add(home)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("regard"):
                for each in node.names:
                    imported[each.name].add(str(node.module))
    twice = {n for n, homes in defined.items() if len(homes) > 1 and not n.startswith("_")}
    return twice, {name for name in twice if len(imported[name] & defined[name]) > 1}


def measures() -> Iterator[Measure]:
    """All rows."""
    gallery = files("gallery") if (PACKAGE / "gallery").is_dir() else []
    whole = statements([path for path in files() if path not in gallery])
    apart = f" and {statements(gallery):,} of gallery" if gallery else ""
    yield Measure("statements in regard/", f"{whole:,}{apart}", "33,000")
    yield Measure("own classes of what load returns", str(own_classes(Runner)), "2")
    by_part = hooks()
    every = {part: len(names) for part, names in by_part.items()}
    labels = every["Decision"]
    single = sum(count == 1 for names in by_part.values() for count in names.values())
    now = f"{sum(every.values()) - labels} and {labels} of labels, {single} for one task"
    yield Measure("methods a task may implement", now, "20, 0")
    modality = len(methods(Modality)) + len(methods(NoneOfThese))
    yield Measure("methods a modality may implement", str(modality), "")
    bars = {"train translate": "5, 15", "run letters": "3, 8"}
    for what, found in walks():
        now = f"{len(found)}, {sum(found.values())}"
        yield Measure(f"files of tasks/ and entries, {what}", now, bars[what])
    named = modality_files()
    now = f"{len(named)} files, {sum(named.values())} times"
    yield Measure("modality names outside modality files", now, "0")
    yield Measure("settings, config, data, given: Any", f"{typed_any():,}", "120")
    wrong = sum(map(len, wrong_defaults().values()))
    yield Measure("shown defaults that are not those of a run", str(wrong), "0")
    twice, imported = two_meanings()
    now = f"{len(twice)}, {len(imported)} imported from two homes"
    yield Measure("classes and constants with two meanings", now, "10")
    lines = sum(len(p.read_text().splitlines()) for p in (ROOT / "tests").rglob("*.py"))
    yield Measure("lines of tests/", f"{lines:,}", "36,000")


if __name__ == "__main__":
    rows = list(measures())
    if "--json" in sys.argv:
        print(json.dumps([row._asdict() for row in rows], indent=2))
    else:
        head = [Measure("", "now", "bar"), Measure("---", "---", "---")]
        print("\n".join(f"| {' | '.join(row)} |" for row in [*head, *rows]))
