"""The library is a door like the command line: signatures, types, results, and watching."""

import inspect
import subprocess
import sys
from importlib import resources
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import get_overloads

import numpy as np
import pytest
import torch

import regard
from regard.attention.watch import watch
from regard.decode.batching import in_batches
from regard.metrics.evaluation import LabelEvaluation
from regard.metrics.score import Score
from regard.tasks import TASKS, parts, prepare, train_keys
from regard.tasks import task as task_class
from regard.tasks.prepare import Report
from regard.tasks.runner import Runner

DOORS = ("train", "evaluate", "look", "compare", "cost", "filter", "doctor", "load", "export")


@pytest.fixture(scope="module")
def translator():
    return regard.load("en-zh")


@pytest.mark.parametrize("name", DOORS)
def test_every_door_has_a_signature_and_a_page_worth_reading(name: str):
    door = getattr(regard, name)
    assert inspect.isfunction(door) and len(door.__doc__) > 100
    told = inspect.signature(door)
    assert told.return_annotation not in (inspect.Signature.empty, "Any")
    for key in told.parameters:
        assert key in ("settings", "quiet") or key in door.__doc__ or key in str(told)


def test_help_of_train_names_every_key_and_each_is_one_of_the_tasks():
    from regard.settings import describe

    told = inspect.signature(regard.train).parameters
    keys = [name for name, one in told.items() if one.kind is inspect.Parameter.KEYWORD_ONLY]
    assert {"data", "out", "minutes", "steps", "lr", "seed", "device"} <= set(keys)
    assert all(key in (regard.train.__doc__ or "") for key in keys)
    assert all(
        task in (regard.train.__doc__ or "") for task in TASKS if task not in ("fill", "embed")
    )
    kind, short = task_class("translate").Train, task_class("translate").short
    known = {row.key for row in describe(kind)} | set(short)
    assert set(keys) - {"callbacks", "quiet", "use"} <= known


def test_what_is_not_said_is_no_setting(monkeypatch):
    seen = {}
    monkeypatch.setattr(
        prepare, "train", lambda task, values, **more: seen.update(values) or "done"
    )
    assert regard.train("classify", data="x.tsv", minutes=None, lr=0.001, label_smoothing=0.1)
    assert seen == {"data": "x.tsv", "lr": 0.001, "label_smoothing": 0.1}


def test_all_that_load_returns_is_of_one_kind_and_says_what_it_is(translator):
    for kind in map(task_class, TASKS):
        assert isinstance(kind, parts.Task)
    assert type(translator) is Runner
    told = repr(translator)
    for word in ("Runner(", "en-zh", "translate", "transformer", "en to zh", "5,925,504"):
        assert word in told
    assert "labels=10" in repr(regard.load("fashion"))


def test_one_input_gives_one_answer_and_a_list_a_list(translator):
    one, some = translator.run("Thank you."), translator.run(["Thank you.", "Yes."])
    assert str(one) == one.text == one["text"] == some[0].text and len(some) == 2
    assert [a.text for a in translator.run(iter(["Yes."]))] == [some[1].text]
    assert translator.run([]) == []
    with pytest.raises(regard.UsageError, match="list of answers for a list"):
        one[0]
    with pytest.raises(regard.UsageError, match="text"):
        one["txt"]
    with pytest.raises(regard.UsageError, match="5 is not a text"):
        translator.run(5)
    assert "score" in one and "nothing" not in one and dict(one)["text"] == one.text
    clothes = regard.load("fashion")
    trousers = np.zeros((28, 28, 3), np.uint8)
    trousers[1:9, 9:19] = trousers[9:27, 9:13] = trousers[9:27, 15:19] = 155
    answer = clothes.run(trousers)
    assert answer["label"] == answer.label == str(answer)
    assert answer["probability"] == pytest.approx(float(answer.probabilities.max()))
    assert repr(answer).startswith("Classified(label=") and len(repr(answer)) < 100
    writer = regard.load("shakespeare")
    talk = [{"role": "user", "content": "Who?"}]
    one = writer.run(talk, template="plain", max_length=3)
    assert one == writer.run([talk], template="plain", max_length=3)[0]


def test_a_vector_is_an_array():
    from regard.tasks.frame.answers import Embedded

    answer = Embedded(np.arange(3.0))
    assert np.asarray(answer).tolist() == [0, 1, 2]
    assert np.stack([answer, answer]).shape == (2, 3)


def test_scores_are_found_by_name():
    scores = [Score("accuracy", 87.5, ""), Score("macro F1", 80.0, "")]
    result = LabelEvaluation("mine", scores, 8, 0.1, {})
    assert result["accuracy"] == 87.5 == result["Accuracy"] and result["macro_f1"] == 80.0
    assert result["macro F1"] == 80.0 and result["sentences"] == 8 and "macro_f1" in result
    assert repr(result) == "LabelEvaluation(accuracy=87.5, macro_f1=80)"
    with pytest.raises(regard.UsageError, match="choose from accuracy, macro_f1.*'accuracy'"):
        result["acuracy"]
    report = Report("runs/mine", 10, 10, True, {"loss": 1.5, "bleu": 20.0, "better": 20.0})
    assert report["bleu"] == 20.0 and report["folder"] == "runs/mine"
    assert report["valid"] == {"loss": 1.5, "bleu": 20.0} == report.valid


# Watching


def test_watching_what_load_returned_sees_all_layers(translator):
    with regard.watch(translator) as maps:
        assert "none yet" in repr(maps)
        watched = translator.run("How are you?")
    assert watched == translator.run("How are you?")
    assert len(maps) == 11 == len([n for n in maps if n.endswith(("attention", "cross"))])
    weights = maps["encoder.0.attention"].weights()
    assert weights.shape[:2] == (1, 6)
    assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-5)
    steps = maps.calls("decoder.0.cross")
    assert len(steps) > 1 and f"the last of {len(steps)}" in repr(maps)


def test_watching_around_what_watches_itself_sees_the_same(translator):
    ids = translator.codec.source.encode("How are you?")
    with regard.watch(translator) as outer:
        inner, _ = translator.predictor.maps(ids, [5, 6])
    assert outer.names() == inner.names() and len(outer) > 0
    for name in inner:
        assert torch.equal(outer[name].weights(), inner[name].weights())


def test_watching_around_rows_that_are_joined_sees_them_joined():
    """A recurrent decoder attends step by step, and is shown as one map inside and outside."""
    from regard.models import family, preset

    torch.manual_seed(0)
    from dataclasses import replace

    config = replace(preset("recurrent", "tiny"), source_vocab=12, target_vocab=12)
    model = family("recurrent")[1](config).eval()
    source, target = torch.randint(4, 12, (1, 5)), torch.randint(4, 12, (1, 3))
    with watch(model) as outer, watch(model) as inner:
        model(source, target)
    assert [outer[name].shape for name in outer] == [inner[name].shape for name in inner]
    assert all(len(outer.calls(name)) == 1 for name in outer)


def test_batches_in_threads_are_watched_in_order():
    layer = torch.nn.Linear(2, 2)
    seen = []

    def note(some):
        from regard.attention.watch import watcher

        seen.append(watcher() is not None)
        return some

    with watch(layer):
        in_batches([1, 2, 3, 4], [1] * 4, note, rows=1, workers=2)
    assert seen == [True] * 4


def test_nothing_seen_is_said_with_its_reason(translator):
    with regard.watch(translator) as maps:
        pass
    with pytest.raises(regard.UsageError, match="nothing attended.*within the with block"):
        maps["decoder.0.cross"]
    with pytest.raises(regard.UsageError, match="not a model"), regard.watch("en-zh"):
        pass


# Types

SCRIPT = """
import regard
from typing_extensions import reveal_type

translator = regard.load("en-zh")
reveal_type(translator.run("How are you?"))
reveal_type(translator.run(["How are you?"]))
reveal_type(regard.load("runs/mine", task="tag").run("good").tags)
reveal_type(regard.train("translate", data="pairs.tsv"))
reveal_type(regard.evaluate("en-zh", data="pairs.tsv"))
with regard.watch(translator) as maps:
    reveal_type(maps["encoder.0.attention"].weights())
classifier = regard.load("runs/mine", task="classify")
reveal_type(classifier.run("good").label)
reveal_type(regard.evaluate("runs/mine", data="x.tsv").accuracy)
regard.train("classify", data="x.tsv", minutes=2, label_smoothing=0.1, quiet=True)
regard.train("trec", steps=2, lr=0.1)
regard.train("translate", minutes="long")
regard.train("classify", minuts=2)
regard.train("series", bpe_dropout=0.1)
"""
SEEN = [
    '"Generated"',
    '"list[Generated]"',
    '"Sequence[str]"',
    '"Report"',
    '"Evaluation"',
    '"Tensor"',
    '"str | list[str]"',
    '"float"',
]


def test_the_package_says_that_it_is_typed():
    assert (resources.files("regard") / "py.typed").is_file()


def test_a_type_checker_sees_the_types_of_a_users_script(tmp_path: Path):
    pytest.importorskip("pyright")
    (tmp_path / "script.py").write_text(SCRIPT)
    home = Path(regard.__file__).resolve().parents[1]
    config = f'{{"extraPaths": ["{home}"], "typeCheckingMode": "standard"}}'
    (tmp_path / "pyrightconfig.json").write_text(config)
    made = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    if "error" not in made.stdout and "information" not in made.stdout:
        pytest.skip("pyright cannot run here")
    seen = [line.rpartition("is ")[2] for line in made.stdout.splitlines() if "Type of" in line]
    assert seen == SEEN, made.stdout
    errors = [line for line in made.stdout.splitlines() if " error: " in line]
    wrong = [line for line in range(SCRIPT.count("\n") - 2, SCRIPT.count("\n") + 1)]
    assert sorted({int(line.split(":")[1]) for line in errors}) == wrong, made.stdout


def test_the_keys_that_type_checkers_know_are_those_of_the_tasks():
    """tasks/train_keys.py is what bench/train_keys.py writes, and `train` names every task."""
    home = Path(__file__).resolve().parent.parent
    spec = spec_from_file_location("train_keys", home / "bench" / "train_keys.py")
    assert spec is not None and spec.loader is not None
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    assert (home / "regard" / "tasks" / "train_keys.py").read_text() == made.text(), (
        "run bench/train_keys.py"
    )
    given = set(inspect.signature(regard.train).parameters) - {"task_or_recipe", "settings"}
    assert train_keys.Given.__annotations__.keys() == given
    told = [str(inspect.signature(one)) for one in get_overloads(regard.train)]
    for name in made.trained():
        assert any(f"keys.{name.title()}Keys" in one for one in told), name


def test_scores_are_attributes_and_nothing_else_is():
    report = Report("runs/mine", 10, 10, True, {"loss": 1.5, "macro_f1": 20.0, "better": 20.0})
    assert (report.loss, report.macro_f1, report.steps) == (1.5, 20.0, 10)
    with pytest.raises(AttributeError, match="Report has no 'accuracy'"):
        _ = report.accuracy
    assert not hasattr(report, "_repr_html_")
