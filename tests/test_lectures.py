"""The page of the lectures: it has every row, and each of its commands runs, in small form."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from PIL import Image

from regard.cli import main
from tests.zoo import SMALL, plain_text

HOME = Path(__file__).resolve().parent.parent
ROWS = {"F": 6, "R": 5, "A": 3, "P": 2, "T": 6, "V": 9, "S": 2, "I": 3}  # of the lectures
FOUND = re.findall(
    r"^\| ([A-Z]\d) [^|]*\| `regard ([^`]*)` \|",
    (HOME / "docs" / "lectures.md").read_text(),
    re.MULTILINE,
)
COMMANDS = dict(FOUND)

ONCE = {"steps": 2, "valid_every": 2, "warmup": 1, "processes": 1, "log": "none"}
TRAINS = {**SMALL, **ONCE, "pieces": 300, "batch_tokens": 200}
RECURRENT = {**ONCE, "width": 16, "threads": 1, "pieces": 300, "batch_tokens": 200}
SEES = {**SMALL, **ONCE, "image": 16, "batch": 8}
HIERARCHY = {**ONCE, "threads": 1, "image": 32, "batch": 8, "size": "tiny"}
# row -> the keys that make it small; data= names a set of the zoo
LESS = {
    "F1": {"particles": 2000},
    "F3": {"size": 24},
    "F5": {"size": 24},
    "F6": {"width": 12, "height": 12, "patch": 5},
    "R1": {**RECURRENT, "data": "translate", "joined": 0},
    "R2": {**RECURRENT, "data": "translate", "like": "rnnenc,rnnsearch"},
    "R3": {
        **{**ONCE, "data": "caption", "image": 24, "pieces": 300, "batch": 8, "valid_images": 4},
        **{"model.widths": "8", "model.depths": "1", "model.stem_width": 8, "decoder_width": 16},
        **{"decoder_heads": 2, "decoder_depth": 1, "padding": 2, "threads": 1},
    },
    "R4": {
        **{**ONCE, "data": "text.txt", "width": 16, "heads": 2, "ffn_width": 32, "context": 16},
        **{"depth": 1, "batch_tokens": 64, "pieces": 300, "seeds": 1, "threads": 1},
    },
    "A1": {"largest": 16},
    "A2": {"steps": 5},
    "A3": {"side": 9, "depth": 2},
    "P2": {
        **{**SMALL, **ONCE, "data": "text.txt", "context": 16, "batch_tokens": 64},
        **{"pieces": 300, "position": "none,alibi", "valid_tokens": 64, "seeds": 1},
    },
    "T1": {**TRAINS, "data": "translate"},
    "T4": {**TRAINS, "data": "text"},
    "T6": {**TRAINS, "data": "translate", "depth": 1, "valid_sentences": 4},
    "V1": {**HIERARCHY, "data": "images"},
    "V4": {
        **{**ONCE, "data": "images", "share": "0.5,1.0", "seeds": 1, "batch": 8},
        **{"size": "tiny", "threads": 1},
    },
    "V5": {**HIERARCHY, "data": "images"},
    "V6": {**HIERARCHY, "data": "images"},
    "V7": {**SEES, "data": "images"},
    "V8": {**ONCE, "threads": 1, "batch": 8, "data": "images", "init": "EYES", "share": 1.0},
    "V9": {"data": "images", "images": 8},
    "S1": {
        **{**SMALL, **ONCE, "data": "transcribe", "kernel": 7, "mels": 20, "rate": 8000},
        **{"batch_seconds": 8, "model.channels": 8, "subsampling": 2},
    },
    "S2": {**SMALL, **ONCE, "data": "series"},
    "I2": {"steps": 20, "tries": 1},
    "I3": {"data": "pairs.tsv", "examples": 2},
}


def test_the_page_has_every_row_of_the_lectures_in_order():
    wanted = [f"{letter}{number + 1}" for letter, most in ROWS.items() for number in range(most)]
    assert [row for row, _ in FOUND] == wanted and len(wanted) == 36


@pytest.fixture
def place(tmp_path: Path, zoo, monkeypatch) -> Path:
    """A folder with what commands read."""
    monkeypatch.chdir(tmp_path)
    for name in ("photo.png", "cloth.png"):
        Image.linear_gradient("L").resize((14, 12)).save(name)
    (tmp_path / "text.txt").write_text(plain_text())
    (tmp_path / "pairs.tsv").write_text("How are you?\t你好吗？\nI love you.\t我爱你。\n" * 2)
    return tmp_path


@pytest.mark.parametrize("row", COMMANDS)
def test_the_command_of_a_row_runs(row, place, zoo, capsys):
    words = shlex.split(COMMANDS[row])
    less = dict(LESS.get(row, {}))
    if less.get("init") == "EYES":
        less["init"] = place / "eyes"
        asked = {**SEES, "data": zoo.data("images"), "objective": "contrastive"}
        told = [f"{key}={value}" for key, value in asked.items()]
        assert main(["train", "pretrain", *told, f"out={less['init']}", "--quiet"]) == 0
    if "." not in less.get("data", "."):
        less["data"] = zoo.data(less["data"])
    if row == "R2":  # judged on sentences that are joined to 80 words
        less["data"] = shutil.copytree(less["data"], place / "pairs")
        for language in ("en", "de"):
            lines = (place / "pairs" / f"train.{language}").read_text().splitlines(True)
            (place / "pairs" / f"test.{language}").write_text("".join(lines[:40]))
    if words[0] in ("train", "compare"):
        less["out"] = place / "run"
    kept = [word for word in words if "=" not in word or word.partition("=")[0] not in less]
    code = main([*kept, *(f"{key}={value}" for key, value in less.items())])
    assert code == 0, capsys.readouterr().err
    if words[0] == "train":
        assert (place / "run" / "model.safetensors").exists()
    for out in (word[4:] for word in words if word.startswith("out=")):
        assert (place / out).stat().st_size > 50
