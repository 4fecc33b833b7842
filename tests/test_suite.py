"""Laws of the tests themselves: none looks at the clock, and each planted bug has tests."""

import ast
import csv
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
CLOCKS = {"perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time_ns", "timeit"}
CLOCKS |= {"default_timer", "time.time"}


def clocks_in(source: str) -> list[str]:
    """Return the lines at which a source reads the time of day."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: set[str] = set()
        if isinstance(node, ast.Attribute):
            names = {node.attr, f"{ast.unparse(node.value)}.{node.attr}"}
        elif isinstance(node, ast.ImportFrom):
            names = {one.name for one in node.names} | {
                f"{node.module}.{x.name}" for x in node.names
            }
        elif isinstance(node, ast.Import):
            names = {one.name for one in node.names}
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and "import" in node.value
        ):
            try:  # a program for another process
                found += [f"{node.lineno}, its line {line}" for line in clocks_in(node.value)]
            except (SyntaxError, ValueError):
                continue
        found += [str(node.lineno)] if names & CLOCKS else []
    return found


@pytest.mark.parametrize(
    "path",
    sorted({*TESTS.rglob("*.py")} - {Path(__file__)}),
    ids=lambda path: str(path.relative_to(TESTS)),
)
def test_no_test_measures_time(path):
    """How long something takes is the machine's; `steps.count_steps` counts what a call does."""
    assert clocks_in(path.read_text(encoding="utf-8")) == []


def test_a_clock_is_found_however_it_is_read():
    for source in (
        "import time\nstart = time.time()",
        "from time import perf_counter",
        "import time as t\nt.monotonic()",
        "from timeit import default_timer",
        'SCRIPT = "import time; print(time.perf_counter())"',
    ):
        assert clocks_in(source)
    for source in (
        "time.sleep(1)",
        "time.process_time()",
        "monkeypatch.setattr(x, 'perf_counter', y)",
    ):
        assert not clocks_in(source)


def test_the_table_of_planted_bugs_is_whole():
    path = TESTS.parent / "bench" / "planted.tsv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert len(rows) >= 67 and len({row["name"] for row in rows}) == len(rows)
    folders = {row["file"].partition("/")[0] for row in rows}
    others = {"recipes", "starters", "lab"}
    inner = {
        one.name for one in (TESTS.parent / "regard").iterdir() if (one / "__init__.py").exists()
    }
    assert inner - others <= folders
    for row in rows:
        tests = [word for word in row["tests"].split() if word.endswith(".py")]
        assert tests and all((TESTS / name).is_file() for name in tests)
        assert row["old"] != row["new"] and row["file"] and None not in row.values()


def test_the_text_of_each_planted_bug_is_found_in_one_place():
    """A row whose code has changed plants nothing; `bench/planted.py` would call it stale."""
    sources = (TESTS.parent / "regard").rglob("*")
    texts = {p: p.read_text("utf-8") for p in sources if p.suffix in (".py", ".c", ".h")}
    path = TESTS.parent / "bench" / "planted.tsv"
    stale = {}
    for row in path.read_text(encoding="utf-8").splitlines()[1:]:
        name, file, old, *_ = (cell.replace("\\n", "\n") for cell in row.split("\t"))
        once = [str(place) for place, text in texts.items() if text.count(old) == 1]
        if len(once) != 1 and not any(place.endswith(f"/regard/{file}") for place in once):
            stale[name] = len(once)
    assert not stale
