"""What a processor announces and may not use is found out in a child process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from regard.cli import main
from regard.decode.speech.options import WhisperDecoding
from regard.decode.speech.whisper import WhisperDecoder
from regard.errors import UsageError
from regard.native import processor
from regard.training.step import LoopSettings, check

KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
REFUSED = "raise RuntimeError('could not create a primitive')"
WRITES = "open({place!r}, 'a').write('x')\n"
UNLESS = "import os\nif os.environ.get('ONEDNN_MAX_CPU_ISA') != 'AVX512_CORE':\n    "


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Keep answers of made-up processors away from those of the real one."""
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    processor.unsupported_reason.cache_clear()
    yield
    processor.unsupported_reason.cache_clear()


def let_child(monkeypatch, program: str) -> None:
    monkeypatch.setattr(processor, "CHILD", [sys.executable, "-c", program])


@pytest.mark.parametrize(
    "program,why",
    [
        (KILLED, "it ends the process by SIGILL"),
        (REFUSED, "RuntimeError: could not create a primitive"),
        ("raise SystemExit(3)", "its process ended with code 3"),
        (
            UNLESS + KILLED,
            "it ends the process by SIGILL; with ONEDNN_MAX_CPU_ISA=AVX512_CORE in the "
            "environment it can",
        ),
    ],
)
def test_what_ends_the_child_is_told_in_one_line(program, why, monkeypatch, capsys, tmp_path):
    let_child(monkeypatch, program)
    (tmp_path / "a.txt").write_text("to be or not to be\n" * 50)
    data, out = f"data={tmp_path / 'a.txt'}", tmp_path / "out"
    words = ["train", "language", data, f"out={out}", "steps=1", "dtype=bfloat16"]
    assert main(words) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"regard: dtype=bfloat16: this processor cannot compute in it ({why}); use dtype=float32"
    ]
    assert not out.exists()


def test_whisper_in_it_is_refused_in_one_line(monkeypatch):
    let_child(monkeypatch, KILLED)
    decoder = object.__new__(WhisperDecoder)  # which asks before it looks at its model
    with pytest.raises(UsageError, match=r"^dtype=bfloat16: this processor cannot.*SIGILL"):
        decoder.check(WhisperDecoding(dtype="bfloat16"))
    with pytest.raises(UsageError, match="unknown dtype 'int4'; choose from bfloat16, float32"):
        decoder.check(WhisperDecoding(dtype="int4"))


def test_a_child_that_hangs_is_given_up_and_asked_again(monkeypatch, tmp_path):
    let_child(monkeypatch, "import time; time.sleep(60)")
    monkeypatch.setattr(processor, "TRIAL_SECONDS", 0.5)
    with pytest.raises(UsageError, match=r"no answer in 0.5 seconds\); use dtype=float32"):
        check(LoopSettings(dtype="bfloat16"))
    assert not list(tmp_path.glob("cache/*"))  # a busy machine may answer another time


def test_an_answer_is_remembered(monkeypatch, tmp_path):
    place = tmp_path / "asked"
    let_child(monkeypatch, WRITES.format(place=str(place)) + UNLESS + KILLED)
    found = processor.unsupported_reason("bfloat16")
    asked = place.read_text()
    assert found and asked == "xxx"  # as it is, and with two remedies
    for _ in range(2):
        assert processor.unsupported_reason("bfloat16") == found  # in this process
        processor.unsupported_reason.cache_clear()
        assert processor.unsupported_reason("bfloat16") == found  # and in others
    assert place.read_text() == asked
    processor.unsupported_reason.cache_clear()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")  # whoever follows the advice
    assert processor.unsupported_reason("bfloat16") is None
    assert place.read_text() == asked + "x"


def test_nothing_is_asked_for_float32(monkeypatch):
    let_child(monkeypatch, KILLED)
    check(LoopSettings())


def test_the_real_trial_says_what_this_processor_does():
    if why := processor.unsupported_reason("bfloat16"):
        assert "SIG" in why or "primitive" in why, why
    else:
        check(LoopSettings(dtype="bfloat16"))


def test_products_that_are_wrong_are_noticed(monkeypatch):
    wrong = processor.TRIAL.replace("    close(half, full)\n", "    close(half * 2, full)\n")
    let_child(monkeypatch, wrong)
    assert processor.failure("bfloat16") == "RuntimeError: its products are wrong"


def test_float16_is_refused():
    with pytest.raises(UsageError, match="unknown dtype .float16.; choose from bfloat16, float32"):
        check(LoopSettings(dtype="float16"))


def test_tests_are_skipped_with_their_reason(tmp_path):
    """The suite passes on a processor that announces what it forbids."""
    here = Path(__file__).parents[1]
    (tmp_path / "conftest.py").write_text(
        (here / "conftest.py").read_text() + "\nimport sys\nfrom regard.native import processor\n"
        f"processor.CHILD = [sys.executable, '-c', {KILLED!r}]\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.mark.usefixtures('bfloat16')\ndef test_it():\n    assert False\n"
    )
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(here.parent)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout
    assert "this processor cannot compute in bfloat16: it ends the process by SIGILL" in ran.stdout
