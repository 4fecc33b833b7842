"""An accelerator computes what the CPU does, and is hardly ever waited for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

QUESTIONS = Path(__file__).with_name("questions.py")


@pytest.mark.parametrize("asked", ["family", "accelerator or not (family or accelerator)"])
def test_every_question_is_answered(asked, tmp_path):
    words = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [sys.executable, *words, f"--basetemp={tmp_path / 'own'}", "-k", asked, str(QUESTIONS)],
        cwd=QUESTIONS.parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
