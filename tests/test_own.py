"""Own parts: `register`, and `use=FILE` in every verb, with its refusals."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import regard
from regard import own
from regard.cli import main
from regard.errors import UsageError
from regard.layers.norm import NORMS
from tests.zoo import LABELS, SMALL

NORM = """
import regard
import torch
from torch import nn


@regard.register("norm", "unit")
class Unit(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return x / (x.norm(dim=-1, keepdim=True) + self.eps) * self.weight
"""
TINY = {**LABELS, "steps": 6, "few": "false"}


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch):
    """Take what a test has registered out of the tables again, as if its process had ended."""
    yield
    for file in own._FILES.values():
        own._forget(file.parts)
    own._FILES.clear()
    own._forget([*own._PROGRAM])


def forget() -> None:
    """Be as a new process that was given no file."""
    for file in own._FILES.values():
        own._forget(file.parts)
    own._FILES.clear()


def words(**settings) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


def mine(tmp_path: Path, text: str = NORM) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(text)
    return path


@pytest.fixture
def trained(tmp_path, zoo):
    """A run folder with a norm of a file, and the file, which is not in use any more."""
    file, data, out = mine(tmp_path), zoo.data("classify"), tmp_path / "run"
    given = words(**TINY, norm="unit", use=file, data=data, out=out)
    assert main(["train", "classify", *given, "--quiet"]) == 0
    forget()
    return out, file, data


def test_every_verb_reads_a_model_of_own_parts_with_use_and_names_the_file_without(
    trained, tmp_path, capsys
):
    out, file, data = trained
    told = json.loads((out / "recipe.json").read_text())["use"]
    assert told == json.loads((out / "config.json").read_text())["use"]
    assert told[0]["file"] == "mine.py" and told[0]["parts"] == ["norm unit"]
    index, text = tmp_path / "index", tmp_path / "texts.txt"
    text.write_text("a red dog\na blue cat\n")
    commands = [
        ["run", str(out), "a red dog"],
        ["eval", str(out), f"data={data}"],
        ["look", str(out), "a red dog", f"out={tmp_path / 'look.html'}"],
        ["doctor", str(out)],
        ["cost", str(out)],
        ["heads", str(out), f"data={data}"],
        ["index", str(out), str(text), f"out={index}"],
        ["train", "classify", *words(**TINY, data=data, init=out, out=tmp_path / "next")],
        ["run", str(out), "--help"],
    ]
    for command in commands:
        forget()
        assert main(command) == 2, command
        refused = capsys.readouterr().err.strip().splitlines()[-1]
        assert f"needs use=mine.py (sha256 {told[0]['sha256'][:12]}) for norm unit" in refused
        forget()
        assert main([*command, f"use={file}"]) == 0, (command, capsys.readouterr().err)
        capsys.readouterr()


def test_a_run_goes_on_with_the_same_file_and_says_that_another_is_another(trained, capsys):
    out, file, data = trained
    again = ["train", "classify", *words(**TINY, norm="unit", data=data, out=out)]
    assert main([*again, f"use={file}"]) == 0
    file.write_text(NORM + "# changed\n")
    forget()
    assert main([*again, f"use={file}"]) == 2
    assert "begun with another file of own parts: use=mine.py has" in capsys.readouterr().err
    forget()
    regard.errors.log_once.cache_clear()
    assert main(["run", str(out), "a red dog", f"use={file}"]) == 0
    assert "trained with another file of own parts" in capsys.readouterr().err


def test_processes_and_workers_of_a_comparison_are_given_the_file(tmp_path, zoo):
    file, data = mine(tmp_path), zoo.data("classify")
    given = words(**{**TINY, "steps": 3}, data=data, use=file)
    line = [sys.executable, "-m", "regard"]
    two = ["train", "classify", *given, "norm=unit", "processes=2", f"out={tmp_path / 'two'}"]
    compare = ["compare", "classify", *given, "norm=unit,layer", "seeds=1", "parallel=2"]
    compare += [f"out={tmp_path / 'compared'}"]
    for command in (two, compare):
        done = subprocess.run([*line, *command, "--quiet"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "two" / "recipe.json").read_text())["use"]
    results = json.loads((tmp_path / "compared" / "results.json").read_text())
    assert [run["finished"] for run in results["runs"]] == [True, True]
    assert f"use={file}" in results["command"]


REFUSED = {
    "syntax": ("import regard\n\ndef f(:\n", "line 3: SyntaxError"),
    "raises": ("import regard\n\n\n1 / 0\n", "line 4: ZeroDivisionError: division by zero"),
    "exits": ("raise SystemExit(3)\n", "line 1: SystemExit: 3"),
    "imports": ("import no_such_module\n", "line 1: ModuleNotFoundError"),
    "deep": ("def f():\n    return [][1]\n\n\nf()\n", "line 2: IndexError"),
    "exists": (
        "import regard\nfrom torch import nn\nregard.register('norm', 'layer', nn.LayerNorm)\n",
        "line 3: norm 'layer' exists already; choose another name",
    ),
    "kind": (
        "import regard\nregard.register('nrom', 'x', print)\n",
        "line 2: unknown kind of part 'nrom'; choose from",
    ),
    "thing": (
        "import regard\nregard.register('norm', 'x', 5)\n",
        "line 2: norm 'x' is 5; expected a torch.nn.Module",
    ),
    "class": (
        "import regard\nregard.register('position', 'x', dict)\n",
        "line 2: position 'x' is <class 'dict'>; expected a regard.attention.positions.Position",
    ),
    "name": (
        "import regard\nregard.register('norm', 'my norm', print)\n",
        "line 2: norm 'my norm' is no name",
    ),
    "late": (NORM + "\nboom\n", "line 16: NameError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_cannot_be_used_is_refused_by_its_line_and_leaves_nothing(
    name, tmp_path, zoo, capsys
):
    text, expected = REFUSED[name]
    file, before, modules = mine(tmp_path, text), dict(NORMS), set(sys.modules)
    given = words(**TINY, data=zoo.data("classify"), out=tmp_path / "run", use=file)
    assert main(["train", "classify", *given]) == 2
    error = capsys.readouterr().err
    assert f"{file}, {expected}" in error and error.count("\n") == 1
    assert before == NORMS and not own._FILES and not (tmp_path / "run").exists()
    assert not [module for module in set(sys.modules) - modules if module.startswith("mine_")]


@pytest.mark.parametrize("file", ["absent.py", "", "."])
def test_a_file_that_is_none_is_refused(file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "en-zh", "Hello.", f"use={file}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and ("no such file" in error or "not a file" in error)


def test_a_folder_never_chooses_what_is_run(trained, tmp_path, capsys):
    out, file, _ = trained
    file.write_text("raise SystemExit('it ran')\n")
    (out / "mine.py").write_text("raise SystemExit('it ran')\n")
    assert main(["run", str(out), "a red dog"]) == 2
    assert "it ran" not in capsys.readouterr().err
    for strange in ("mine.py", [1], [{"file": 1}], [{"parts": 3}], {"file": "mine.py"}):
        config = json.loads((out / "config.json").read_text())
        (out / "config.json").write_text(json.dumps({**config, "use": strange}))
        assert main(["run", str(out), "a red dog"]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_file_that_was_run_is_run_again_only_when_it_has_changed(tmp_path):
    file = mine(tmp_path)
    regard.load("fill", use=file)
    first = NORMS["unit"]
    own.use([file])
    assert NORMS["unit"] is first
    file.write_text(NORM + "# anew\n")
    own.use(str(file))
    assert NORMS["unit"] is not first


def test_several_files_are_given_by_commas(tmp_path):
    other = tmp_path / "other.py"
    other.write_text(NORM.replace('"unit"', '"other"'))
    own.use(f"{mine(tmp_path)},{other}")
    assert {"unit", "other"} <= NORMS.keys() and own.words() == [f"use={tmp_path}/mine.py,{other}"]


def test_help_knows_the_names_of_a_file(tmp_path, capsys):
    assert main(["train", "classify", f"use={mine(tmp_path)}", "--help"]) == 0
    assert "unit" in capsys.readouterr().out


def test_what_a_program_registers_is_named_as_such(tmp_path, zoo):
    from torch import nn

    @regard.register("norm", "plain")
    class Plain(nn.LayerNorm):
        def __init__(self, width: int, eps: float = 1e-5):
            super().__init__(width, eps)

    given = {**TINY, "data": zoo.data("classify"), "out": tmp_path / "run"}
    regard.train("classify", **given, norm="plain", quiet=True)
    assert regard.load(tmp_path / "run").run("a red dog")
    own._forget([*own._PROGRAM])
    with pytest.raises(UsageError, match="needs norm plain, which the program that trained it"):
        regard.load(tmp_path / "run")


# The page "Your own ...": each of its files

PAGE = Path(__file__).resolve().parents[1] / "docs" / "own.md"
BLOCKS = re.findall(r"^## An? (.+?)\n\n```py\n(.*?)```", PAGE.read_text(), re.M | re.S)
EXAMPLES = {title.replace("feed-forward network", "feed_forward"): text for title, text in BLOCKS}
IMAGES = {"depth": 1, "width": 16, "heads": 2, "ffn_width": 16, "batch": 16, "augment": "none"}
# kind -> the task, the data of which model of the zoo, and the settings that name the example
SHOWN = {
    "position": ("classify", "classify", {"position": "fading"}),
    "score": ("classify", "classify", {"model.block.score": "manhattan"}),
    "mask": ("classify", "classify", {"model.mask": "even"}),
    "norm": ("classify", "classify", {"norm": "unit"}),
    "feed_forward": ("classify", "classify", {"feed_forward": "cubed"}),
    "block": ("classify", "classify", {"order": "one_norm"}),
    "optimiser": ("classify", "classify", {"optimiser": "signs"}),
    "schedule": ("classify", "classify", {"schedule": "steps"}),
    "loss": ("classify", "classify", {"loss": "focal"}),
    "tokenizer": ("classify", "classify", {"tokenizer": "lower_bpe"}),
    "metric": ("text", "text", {"metric": "length", "valid_sentences": 4}),
    "augmentation": ("images", "images", {**IMAGES, "augment": "crop+upside_down"}),
    "family": ("images", "images", {"family": "bag", "batch": 16, "augment": "none"}),
    "task": ("moods", "classify", {}),
}
LOADED_WITHOUT = {"optimiser", "schedule", "loss", "tokenizer", "augmentation"}


def test_the_page_has_an_example_of_every_kind_of_at_most_25_lines():
    assert EXAMPLES.keys() == SHOWN.keys() == own.KINDS.keys()
    assert max(text.count("\n") for text in EXAMPLES.values()) <= 25


@pytest.mark.parametrize("kind", SHOWN)
def test_an_example_trains_resumes_compares_and_runs_from_the_command_line(
    kind, tmp_path, zoo, capsys
):
    task, animal, named = SHOWN[kind]
    file, data, out = mine(tmp_path, EXAMPLES[kind]), zoo.data(animal), tmp_path / "run"
    usual = {} if animal == "images" else TINY if animal == "classify" else {"pieces": 320, **SMALL}
    given = {
        **usual,
        **named,
        "data": data,
        "steps": 4,
        "valid_every": 2,
        "save_every": 0,
        "average": 2,
    }
    train = ["train", task, *words(**given), "--quiet"]
    assert main([*train, f"use={file}", f"out={out}"]) == 0, capsys.readouterr().err
    whole = (out / "model.safetensors").read_bytes()
    # a run that was stopped at its second step goes on to the same weights
    stopped = tmp_path / "stopped"
    shutil.copytree(out, stopped)
    assert (stopped / "checkpoints" / "step-2").is_dir()
    shutil.rmtree(stopped / "checkpoints" / "step-4")
    (stopped / "model.safetensors").unlink()
    forget()
    assert main([*train, f"use={file}", f"out={stopped}"]) == 0, capsys.readouterr().err
    assert (stopped / "model.safetensors").read_bytes() == whole
    compare = ["compare", *train[1:], "lr=0.01,0.001", "seeds=1", f"out={tmp_path / 'compared'}"]
    compare = [word for word in compare if word != "lr=0.01"]
    assert main([*compare, f"use={file}"]) == 0, capsys.readouterr().err
    asked = str(next(data.rglob("*.png"))) if animal == "images" else "a red dog"
    forget()
    capsys.readouterr()
    assert main(["run", str(out), asked, f"use={file}"]) == 0, capsys.readouterr().err
    answer = capsys.readouterr().out
    forget()
    if kind in LOADED_WITHOUT:
        assert main(["run", str(out), asked]) == 0 and capsys.readouterr().out == answer
    else:
        assert main(["run", str(out), asked]) == 2
        assert "needs use=mine.py (sha256 " in capsys.readouterr().err


def test_a_loss_is_given_as_a_function_and_learnt_by(tmp_path, zoo):
    from torch.nn import functional as F

    def tripled(logits, targets):
        return 3 * F.cross_entropy(logits, targets, reduction="none")

    given = {**TINY, "data": zoo.data("classify"), "label_smoothing": 0.0, "steps": 1}
    for name, more in (("own", {"loss": tripled}), ("usual", {})):
        regard.train("classify", **given, **more, out=tmp_path / name, quiet=True)
    rows = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("own", "usual")]
    own_row, usual = (json.loads(text.splitlines()[0])["loss"] for text in rows)
    assert own_row == pytest.approx(3 * usual, rel=1e-5)
    with pytest.raises(UsageError, match="return a loss for each row"):
        regard.train("classify", **given, loss=lambda a, b: a.sum(), out=tmp_path / "x", quiet=True)


def test_a_mask_hides_the_same_keys_in_a_whole_text_and_in_a_text_written_step_by_step(tmp_path):
    import torch

    from regard.layers.block import BlockConfig
    from regard.models.gpt import GPT, GPTConfig

    own.use(mine(tmp_path, EXAMPLES["mask"]))
    torch.manual_seed(0)
    config = GPTConfig(20, 2, BlockConfig(16, 2, 32), max_length=16, mask="even")
    model, ids = GPT(config).eval(), torch.randint(20, (2, 9))
    with torch.inference_mode():
        whole, state, steps = model(ids), model.start(ids[:, :5]), []
        for place in range(4, 9):
            logits, state = model.step(ids[:, None, place : place + 1].squeeze(1), state)
            steps.append(logits.reshape(2, -1))
        other = ids.clone()
        other[:, 3] = (other[:, 3] + 1) % 20  # an odd place, which only itself may see
        changed = model(other)
    assert torch.allclose(torch.stack(steps, 1), whole[:, 4:], atol=1e-5)
    seen = (changed - whole).abs().amax((0, 2))
    assert seen[3] > 1e-3 and seen[torch.arange(9) != 3].max() == 0
