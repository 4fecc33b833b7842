"""Completion: each shell sources its script and completes what is typed, without Python."""

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from regard.api import starters
from regard.cli import main
from regard.completion import SHELLS, table
from regard.gallery import PIECES
from regard.recipes import RECIPES
from regard.tasks import TASKS
from regard.verbs import VERBS

# what is typed -> what stands there after TAB
TYPED = {
    "regard trai": "regard train ",
    "regard train transl": "regard train translate ",
    "regard train shakespeare_n": "regard train shakespeare_nano ",
    "regard train multi30k_en_de label_sm": "regard train multi30k_en_de label_smoothing=",
    "regard train translate steps=5 schedule=inv": "regard train translate steps=5 "
    "schedule=inverse_sqrt ",
    "regard run en-z": "regard run en-zh ",
    "regard run en-zh length_pen": "regard run en-zh length_penalty=",
    "regard run mine length_penalty=gn": "regard run mine length_penalty=gnmt ",
    "regard show receptive_f": "regard show receptive_fields ",
    "regard show superposition view=pha": "regard show superposition view=phase ",
    "regard run mi": "regard run mine/",
    "regard doctor fold": "regard doctor folder/",
    "regard train translate data=fold": "regard train translate data=folder/",
}
START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
}
SET_UP = {
    "bash": "PS1='ready> '; bind 'set enable-bracketed-paste off'; source {script}\n",
    "zsh": "PS1='ready> '; unset zle_bracketed_paste; bindkey -e; unsetopt prompt_sp; "
    "autoload -U compinit; compinit -u -D; source {script}\n",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with scripts, a trained model and a folder of data, and no Python on the path."""
    home = tmp_path_factory.mktemp("home")
    for shell in SHELLS:
        made = subprocess.run(
            [sys.executable, "-m", "regard", "completion", shell], capture_output=True, check=True
        )
        (home / f"script.{shell}").write_bytes(made.stdout)
    (home / "mine").mkdir()
    (home / "mine" / "config.json").write_text(json.dumps({"task": "translate", "a": 1}, indent=1))
    (home / "folder").mkdir()
    (home / "bin").mkdir()
    for tool in ("sed", "bash", "zsh", "fish"):
        if found := shutil.which(tool):
            (home / "bin" / tool).symlink_to(found)
    return home


def environment(home: Path) -> dict[str, str]:
    kept = {key: os.environ[key] for key in ("LANG", "LD_LIBRARY_PATH") if key in os.environ}
    return {**kept, "HOME": str(home), "PATH": str(home / "bin"), "TERM": "dumb"}


class Terminal:
    """An interactive shell, as somebody types in it."""

    def __init__(self, command: list[str], home: Path):
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=home,
            env=environment(home),
            start_new_session=True,
        )
        os.close(slave)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def read(self, end: str, patience: int = 20) -> str:
        """What is shown until an end, or until nothing more is for so many seconds."""
        seen = ""
        while not re.search(end, seen) and select.select([self.master], [], [], patience)[0]:
            seen += os.read(self.master, 65536).decode(errors="replace")
        return seen

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.mark.parametrize("shell", START)
def test_an_interactive_shell_completes_what_is_typed(shell, home):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    terminal = Terminal(START[shell], home)
    try:
        terminal.type(SET_UP[shell].format(script=home / f"script.{shell}"))
        terminal.type("echo set'-'up\n")
        assert "set-up" in terminal.read("set-up\r?\n")
        for typed, completed in TYPED.items():
            # the line as TAB leaves it is quoted, and printed between signs
            terminal.type(f"{typed}\tX\x01echo '<\x05>'\n")
            found = terminal.read(r"\n<.*>\r?\n")
            printed = re.findall(r"\n<(.*)>\r?\n", found)
            assert printed and printed[-1] == completed + "X", found
    finally:
        terminal.close()


def test_fish_completes_what_is_typed(home):
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    for typed, completed in TYPED.items():
        command = ["fish", "--no-config", "-c", "source script.fish; complete -C $argv[1]", typed]
        done = subprocess.run(
            command, cwd=home, env=environment(home), capture_output=True, text=True
        )
        assert not done.stderr
        found = [line.split("\t")[0] for line in done.stdout.splitlines()]
        assert found == [completed.split()[-1]], typed


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_all_verbs_are_listed(shell, home):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = f"compdef() {{ :; }}; source script.{shell}; _regard_words ''"
    done = subprocess.run(
        [*START[shell][:2], "-c", script],
        cwd=home,
        env=environment(home),
        capture_output=True,
        text=True,
    )
    assert set(VERBS) < set(done.stdout.split()), done.stderr


def test_everything_with_a_name_is_completed():
    found = table()
    assert {*TASKS, *RECIPES} == set(found["train"]) == set(found["compare"])
    assert set(starters()) == set(found["run"]) < set(found["cost"])
    assert set(PIECES) == set(found["show"])
    assert {*SHELLS} == set(found["completion"])
    assert {"norm=rms", "norm=layer", "optimiser=adamw"} < set(found["train language"])
    assert {"seeds=", "norm=rms"} < set(found["compare language"])
    assert "beam=" in found["run en-zh"] and "beam=" not in found["run fashion"]
    for words in found.values():
        assert not [word for word in words if re.search(r"[\s'\"\\$]", word)]


def test_another_shell_is_refused(capsys):
    assert main(["completion", "csh"]) == 2
    assert "unknown shell 'csh'; choose from bash, fish, zsh" in capsys.readouterr().err
    assert main(["completion"]) == 2
    assert "SHELL is missing" in capsys.readouterr().err
