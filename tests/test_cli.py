"""The command line: quick to answer, plain in its refusals, quiet when it is stopped."""

import ast
import inspect
import io
import os
import resource
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import regard
from regard import cli
from regard.answering import in_chunks, read_lines
from regard.cli import main
from regard.data.columns import input_column
from regard.modalities.text import TEXT
from regard.verbs import TABLE, VERBS, Call, Verb, resolve

HEAVY = {"torch", "numpy", "rich", "matplotlib", "tokenizers", "sacrebleu", "asyncio"}


def command(*words: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "regard", *words], capture_output=True, text=True, **options
    )


def test_help_answers_in_under_half_a_second():
    # In time of the processor: on a machine that is busy with other tests a clock would lie.
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = command("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert answer.returncode == 0
    assert all(f"  {name} " in answer.stdout for name in VERBS)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["models", "--help"], ["rnu"]])
def test_help_imports_nothing_heavy(words):
    code = f"import sys; from regard.cli import main; main({words}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.splitlines()[-1].split())


def test_the_front_page_lists_verbs_in_groups(capsys):
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    found = {}
    for block in page.split("\n\n"):
        heading, *lines = block.splitlines()
        if heading[:1].isupper() and heading.endswith(":"):
            found[heading] = [line.split()[0] for line in lines]
    del found["Examples:"]
    assert found["Use:"] == ["run", "train", "eval", "look", "compare"]
    assert [*found] == ["Use:", "Tools:", "Insight:", "Gallery:"]
    assert [name for names in found.values() for name in names] == [verb.name for verb in TABLE]


def exported_to_type_checkers() -> dict[str, str]:
    """Names that regard/__init__.py imports as themselves for type checkers, with their modules."""
    tree = ast.parse(Path(regard.__file__).read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [line for block in blocks for line in block.body if isinstance(line, ast.ImportFrom)]
    for name in (name for line in imports for name in line.names):
        assert name.asname == name.name
    return {name.name: str(line.module) for line in imports for name in line.names}


def test_what_the_library_exports_is_what_type_checkers_see():
    assert exported_to_type_checkers() == regard.HOMES
    assert regard.__all__ == sorted(regard.HOMES)
    for verb in TABLE:
        name, module = verb.exported
        assert verb.terminal or regard.HOMES[name] == module


@pytest.mark.parametrize("verb", TABLE, ids=lambda verb: verb.name)
def test_a_verb_has_settings_if_its_function_takes_keys(verb: Verb):
    function = resolve(verb.function)
    kinds = {one.kind for one in inspect.signature(function).parameters.values()}
    if not verb.terminal:
        assert bool(verb.settings) == (inspect.Parameter.VAR_KEYWORD in kinds)
    if verb.settings and verb.name != "show":
        assert verb.rows(values={})


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_shows_two_examples(name, capsys):
    assert main([name, "--help"]) == 0
    page = capsys.readouterr().out
    assert VERBS[name].summary in page
    assert page.count(f"  regard {name}") >= 3  # the usage and two examples


def test_version_comes_from_one_place(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"regard {regard.__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "unknown verb 'trian'; choose from"),
        (["trian", "--help"], "Did you mean 'train'?"),
        (["run"], "MODEL is missing"),
        (["train"], "TASK or RECIPE is missing"),
        (["train", "translate", "more"], "unexpected word 'more'; settings are written key=value"),
        (["eval"], "MODEL is missing"),
        (["look"], "MODEL is missing"),
        (["look", "en-zh"], "TEXT is missing"),
        (["doctor"], "DATA is missing"),
        (["models", "en-zh"], "unexpected word 'en-zh'"),
        (["recipes", "size=tiny"], "unknown key 'size'; there is nothing to set"),
        (["completion", "bash", "a=b"], "unknown key 'a'; there is nothing to set"),
        (["train", "translate", "quiet=true"], "unknown key 'quiet'; write --quiet"),
        (["run", "en-zh", "beam=1", "beam=2"], "beam is given twice"),
        (["run", "en-zh", "--beam"], "--beam has no value"),
        (["run", "en-zh", "caf\udce9"], "is not UTF-8"),
    ],
)
def test_a_wrong_call_is_refused_in_one_line(words, message, capsys):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("regard: ")
    assert message in err
    assert err.count("\n") == 1


def act_as(monkeypatch, act):
    monkeypatch.setattr(cli, "act_of_test", act, raising=False)
    verb = Verb("act", "regard.cli:act_of_test", (), "", "", ("", ""), terminal=True)
    monkeypatch.setitem(VERBS, "act", verb)
    return main(["act"])


def raising(error: BaseException):
    def act(call: Call) -> None:
        raise error

    return act


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 141, ""),
        (MemoryError(), 2, "regard: out of memory;"),
        (RuntimeError("[enforce fail] can't allocate memory: 1 TB"), 2, "regard: out of memory;"),
        (OSError(28, "No space left on device", "a.bin"), 2, "regard: a.bin: no space left"),
        (OSError(27, "File too large"), 2, "regard: file too large; make room"),
        (regard.UsageError("two\nlines"), 2, "regard: two lines\n"),
    ],
)
def test_what_is_no_bug_ends_without_a_traceback(monkeypatch, capsys, error, code, message):
    assert act_as(monkeypatch, raising(error)) == code
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize("error", [ZeroDivisionError(), RuntimeError("shape"), OSError(5, "I/O")])
def test_a_bug_stays_visible(monkeypatch, error):
    with pytest.raises(type(error)):
        act_as(monkeypatch, raising(error))


SLOW = "import time; print('ready', flush=True); time.sleep(60)"
LONG = "[print('x' * 99) for _ in range(99999)]"


def program(body: str) -> list[str]:
    code = f"""
import sys
from regard import cli
def act(call):
    {body}
cli.VERBS["act"] = cli.Verb("act", "__main__:act", (), "", "", ("", ""), terminal=True)
sys.exit(cli.main(["act"]))
"""
    return [sys.executable, "-c", code]


def test_interrupting_leaves_no_traceback():
    with subprocess.Popen(program(SLOW), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert process.stderr.read() == b""


def test_a_reader_that_goes_away_is_no_error():
    with subprocess.Popen(program(LONG), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(10) == 141
        assert process.stderr.read() == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("body", [LONG, "print('short')"])
def test_a_full_disk_behind_standard_output_is_told_once(body):
    with open("/dev/full", "w") as full:
        answer = subprocess.run(program(body), stdout=full, stderr=subprocess.PIPE, text=True)
    assert answer.returncode == 2
    assert answer.stderr == "regard: no space left on device; make room and try again\n"


source = partial(input_column, usual=TEXT.columns)  # the field that is read


def read(text: bytes, size: int = 512):
    return list(in_chunks(read_lines(io.BytesIO(text), source), size))


def test_lines_end_only_at_newlines():
    assert read(b"\xef\xbb\xbfone\r\n\n" + "a\u2028b\x0bc\x85\nend".encode()) == [
        ([("one", None), ("", None), ("a\u2028b\x0bc\x85", None), ("end", None)], None)
    ]


def test_reading_never_runs_ahead():
    file = io.BytesIO(b"x\n" * 10)
    assert [(len(chunk), file.tell()) for chunk, _ in in_chunks(read_lines(file, source), 4)] == [
        (4, 8),
        (4, 16),
        (2, 20),
    ]
    long = io.BytesIO((b"x" * 400_000 + b"\n") * 4)
    assert [len(chunk) for chunk, _ in in_chunks(read_lines(long, source), 512)] == [3, 1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"caf\xe9 au lait", "standard input:3: not UTF-8 (byte 0xe9 at column 4); convert"),
        ("é".encode() * 3 + b"\xff", "standard input:3: not UTF-8 (byte 0xff at column 4)"),
        (b"\xe4\xbd", "not UTF-8 (byte 0xe4 at column 1)"),
        (b"a\0b", "standard input:3: a NUL byte"),
        (b"x" * 1_000_001, "standard input:3: a line of over 1,000,000 characters"),
    ],
)
def test_lines_before_a_bad_one_are_given(line, message):
    ((chunk, mistake),) = read(b"one\ntwo\n" + line + b"\nfour\n")
    assert chunk == [("one", None), ("two", None)]
    assert message in str(mistake)


def test_the_first_line_decides_whether_lines_are_json():
    record = {"src": "a", "id": 7}
    assert read(b'{"src": "a", "id": 7}\n') == [([("a", record)], None)]
    assert read(b'{curly} text\n{"src": "a"}\n') == [
        ([("{curly} text", None), ('{"src": "a"}', None)], None)
    ]
    for bad, message in [
        (b"plain\n", "standard input:2: not JSON"),
        (b"[1]\n", "is not a JSON object"),
        (b'{"a": 1}\n', "no text; name it"),
        (b'{"src": 1}\n', "no text; name it"),
        (b"[" * 100_000, "not JSON"),
    ]:
        ((chunk, mistake),) = read(b'{"src": "a", "id": 7}\n' + bad)
        assert chunk == [("a", record)]
        assert message in str(mistake)


def test_the_package_is_imported_in_milliseconds_and_without_torch():
    code = "import sys, regard; print(*sys.modules); dir(regard); from regard import UsageError"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not HEAVY & set(loaded.stdout.split())
    assert loaded.returncode == 0


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        regard.nothing  # noqa: B018


def test_output_is_utf8_in_any_locale():
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    answer = subprocess.run(
        program(r"print('\u4f60\u597d')"), capture_output=True, env=environment, check=True
    )
    assert answer.stdout.decode() == "你好\n"


def test_the_page_of_what_is_trained_is_its_own(capsys):
    """A task has its examples and keys, a recipe those of its task, and no other name a page."""
    assert main(["train", "trec", "--help"]) == 0
    page = capsys.readouterr().out
    assert "regard train trec" in page and "class_weights" in page and "translate" not in page
    for name in ("chat", "translat"):
        assert main(["train", name, "--help"]) == 2 == main(["train", name])
        told = capsys.readouterr()
        assert f"unknown task or recipe '{name}'" in told.err and not told.out
