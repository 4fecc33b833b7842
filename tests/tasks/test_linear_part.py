"""A linear model that is added to an encoder where rows are few."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import regard
from regard.errors import UsageError
from regard.insight.causes import causes
from regard.metrics.baselines import BASELINE_FILE
from regard.metrics.linear import neighbours
from regard.metrics.mixture import MIXTURE_FILE, Mixture
from regard.tasks import task
from regard.tasks.labels import objective
from regard.tasks.prepare import settle
from tests.zoo import ANIMALS

TASKS = {kind: kind for kind in ("classify", "tag", "images", "series", "sounds")}


@pytest.fixture(scope="module", params=TASKS)
def kind(request) -> str:
    return request.param


def told(kind: str, zoo) -> dict[str, Any]:
    own = {key: value for key, value in ANIMALS[kind].settings.items() if key != "linear"}
    own |= {"valid": str(own["valid"])} if "valid" in own else {}
    return {"data": str(zoo.data(kind)), **own, "steps": 20, "valid_every": 10}


@pytest.fixture(scope="module")
def run(kind, zoo) -> Path:
    """A model with the defaults, but for its size."""
    return zoo.once(
        f"linear-{kind}",
        lambda out: regard.train(TASKS[kind], out=out, quiet=True, **told(kind, zoo)),
    )


def weighted(run: Path, to: Path, **weights: float) -> Path:
    """A copy of a model whose parts have other weights, and no hash tells."""
    shutil.copytree(run, to, ignore=shutil.ignore_patterns("checkpoints", "SHA256SUMS"))
    save_file({key: torch.tensor(value) for key, value in weights.items()}, to / MIXTURE_FILE)
    return to


def parts(kind: str, zoo) -> Any:
    """The parts that a model of the defaults learns from."""
    settled = settle(task(TASKS[kind]), {**told(kind, zoo), "out": "nowhere"})
    return settled.objective.read(settled.settings, None)


def test_the_answer_is_that_of_both_parts(kind, run, zoo, tmp_path):
    both = regard.load(weighted(run, tmp_path / "both", encoder=0.5, linear=0.25))
    alone = regard.load(weighted(run, tmp_path / "alone", encoder=1.0, linear=0.0))
    part, codec = parts(kind, zoo)["valid"], both.codec
    encoder = np.log(alone.predictor.part_probabilities(part, alone.predictor.plain))
    linear = codec.baselines.logits(codec.modality.vectors(part, codec.format))
    logs = torch.from_numpy(encoder), torch.from_numpy(linear).log_softmax(-1)
    wanted = (0.5 * logs[0] + 0.25 * logs[1]).softmax(-1)
    found = both.predictor.part_probabilities(part, both.predictor.plain)
    np.testing.assert_allclose(found, wanted.numpy(), atol=1e-5)


def test_neighbours_in_a_batch_never_matter(kind, run, zoo, tmp_path):
    runner = regard.load(weighted(run, tmp_path / "linear", encoder=0.0, linear=1.0))
    predictor, part = runner.predictor, parts(kind, zoo)["train"]
    if kind == "tag":
        whole = predictor.word_probabilities([x.words for x in part[:7]], predictor.plain)
        single = [predictor.word_probabilities([x.words], predictor.plain)[0] for x in part[:7]]
        np.testing.assert_array_equal(np.concatenate(whole), np.concatenate(single))
        return
    raws = list(runner.codec.modality.raws(part, runner.codec.format))[:7]
    whole = predictor.probabilities(raws, predictor.plain)
    single = [predictor.probabilities([raw], predictor.plain)[0] for raw in raws]
    np.testing.assert_array_equal(whole, np.stack(single))


def test_words_of_a_long_sentence_know_their_neighbours_in_another_window(zoo, tmp_path):
    run = regard.train("tag", out=tmp_path / "run", quiet=True, **told("tag", zoo)).folder
    runner = regard.load(weighted(Path(run), tmp_path / "linear", encoder=0.0, linear=1.0))
    words = [word for item in parts("tag", zoo)["train"][:9] for word in item.words]
    linear = runner.codec.baselines.logits(neighbours(words)).argmax(1)
    assert [runner.codec.labels[n] for n in linear] == runner.run([words], max_length=8)[0].tags


def test_it_is_told_everywhere_and_judged_as_it_was_validated(kind, run, zoo):
    recipe, card = json.loads((run / "recipe.json").read_text()), (run / "README.md").read_text()
    assert recipe["settings"]["linear"] is True and recipe["chosen"]["settings"]["linear"] == "true"
    assert "linear=true" in card and "linear=false" in card and "encoder_weight" in card
    assert "held-out training rows" in recipe["linear"]
    shown = regard.evaluate(run, data=str(zoo.data(kind)), part="valid")
    rows = [line.split("|") for line in card.splitlines() if line.startswith("| accuracy")]
    assert shown["accuracy"] == pytest.approx(float(rows[0][2]), abs=0.01)


def test_held_out_rows_decide_how_much_each_part_weighs():
    chance = torch.Generator().manual_seed(0)

    def rows(count: int, *strengths: float) -> list[torch.Tensor]:
        """Logits of parts that are so good, each with noise of its own, and the labels."""
        targets = torch.randint(3, (count,), generator=chance)
        right = torch.nn.functional.one_hot(targets, 3).float()
        noise = (torch.randn(count, 3, generator=chance) for _ in strengths)
        return [*(s * right + n for s, n in zip(strengths, noise, strict=True)), targets]

    for count in (40, 400):
        noise, good, targets = rows(count, 0, 5)
        assert Mixture.choose(noise, good, targets).encoder < 0.25
        assert Mixture.choose(good, noise, targets).encoder > 0.5
    for _ in range(10):
        encoder, linear, targets = rows(300, 2, 2)
        both = Mixture.choose(encoder, linear, targets)
        found = [both.logits(encoder, linear), linear.log_softmax(-1)]
        losses = [torch.nn.functional.cross_entropy(x, targets) for x in found]
        assert losses[0] < losses[1] and min(both) > 0
    weights = [Mixture.choose(*rows(30, 1, 2)).encoder for _ in range(20)]
    assert 0 in weights, "few rows tell too little to trust an encoder that is no better"


def test_the_linear_model_learns_the_validation_part_at_the_end(kind, run, zoo):
    runner = regard.load(run)
    beside, codec = runner.codec.baselines, runner.codec
    if not beside.mixture.linear:
        pytest.skip("the encoder answers alone")
    data = parts(kind, zoo)
    alone = objective.fit_baselines(codec, [data["train"]])
    whole = objective.fit_baselines(codec, [data["train"], data["valid"]], alone.chosen)
    for arrays, wanted in ((beside.tables, alone.tables), (beside.refitted, whole.tables)):
        assert arrays.keys() == wanted.keys()
        for name, array in wanted.items():
            np.testing.assert_array_equal(arrays[name], array)
    assert not np.array_equal(beside.tables["bias"], beside.refitted["bias"])
    assert beside.chosen in json.loads((run / "recipe.json").read_text())["linear"]
    assert "fitted to the validation part, too" in (run / "README.md").read_text()
    notes = {
        part: str(regard.evaluate(run, data=str(zoo.data(kind)), part=part).to_dict())
        for part in ("valid", "train")
    }
    assert "has not learnt its rows" in notes["valid"] and "learnt" not in notes["train"]


def test_resuming_keeps_the_linear_part(zoo, tmp_path):
    how = told("classify", zoo)
    whole = regard.train("classify", out=tmp_path / "whole", quiet=True, **how)
    before = (tmp_path / "whole" / MIXTURE_FILE).read_bytes()
    (tmp_path / "whole" / MIXTURE_FILE).unlink()  # lost, and published again
    again = regard.train("classify", out=tmp_path / "whole", quiet=True, **how)
    assert again.scores == whole.scores and again.step == whole.step
    assert (tmp_path / "whole" / MIXTURE_FILE).read_bytes() == before


def test_it_is_off_with_many_rows_a_trained_model_or_several_labels(zoo, tmp_path, monkeypatch):
    how = {**told("classify", zoo), "steps": 1, "valid_every": 1, "quiet": True}
    monkeypatch.setattr(objective, "MIXED_ROWS", 50)
    regard.train("classify", out=tmp_path / "many", **how)
    monkeypatch.undo()
    trained = {k: how[k] for k in ("data", "steps", "quiet")}
    regard.train("classify", out=tmp_path / "from", init=zoo.model("classify"), **trained)
    regard.train("classify", out=tmp_path / "off", linear=False, **how)
    for name in ("many", "from", "off"):
        assert not (tmp_path / name / MIXTURE_FILE).exists()
        recipe = json.loads((tmp_path / name / "recipe.json").read_text())
        assert recipe["settings"]["linear"] is False
    rows = "".join(f"text {n} of {n % 3}\t{n % 3},{n % 2}\n" for n in range(60))
    (tmp_path / "several.tsv").write_text(rows)
    given = {**how, "data": str(tmp_path / "several.tsv"), "separator": ","}
    with pytest.raises(UsageError, match="linear=true is for one of 2 to"):
        regard.train("classify", out=tmp_path / "several", linear=True, **given)


def test_it_is_not_exported_without_a_word(zoo, tmp_path):
    run = weighted(zoo.model("classify"), tmp_path / "run", encoder=1.0, linear=1.0)
    with pytest.raises(UsageError, match="train with linear=false to export"):
        regard.export(run, out=tmp_path / "out")
    with pytest.raises(UsageError, match="train with linear=false to export"):
        regard.export(run, out=tmp_path / "out", format="onnx")


def test_a_damaged_linear_part_is_refused_in_one_line(zoo, tmp_path):
    run = weighted(zoo.model("classify"), tmp_path / "run", encoder=1.0, linear=1.0)
    regard.load(run)
    (run / MIXTURE_FILE).write_bytes(b"nothing")
    with pytest.raises(UsageError, match="not the weights"):
        regard.load(run)
    save_file({"encoder": torch.tensor(1.0), "linear": torch.tensor(-1e9)}, run / MIXTURE_FILE)
    with pytest.raises(UsageError, match="not the weights"):
        regard.load(run)
    save_file({"encoder": torch.tensor(1.0), "linear": torch.tensor(1.0)}, run / MIXTURE_FILE)
    (run / BASELINE_FILE).unlink()
    with pytest.raises(UsageError, match="a part of the model; restore it"):
        regard.load(run)


def test_attention_that_has_no_part_in_the_answer_is_shown_with_a_word(zoo, tmp_path, capsys):
    said, given, run = "attention has no part in it", "the red dog", zoo.model("classify")
    for weight in (0.0, 1.0):
        runner = regard.load(weighted(run, tmp_path / f"{weight}", encoder=weight, linear=1.0))
        capsys.readouterr()
        found = causes(runner, given)
        assert (said in capsys.readouterr().err) is (weight == 0)
        assert (said in runner.picture(given).note) is (weight == 0)
        assert (said in str(found)) is (weight == 0)
        assert (said in str(found.to_dict())) is (weight == 0)
        assert np.any(found.effects) == (weight > 0)


def test_weights_are_no_metric_of_the_card(kind, run):
    head = (run / "README.md").read_text().split("---")[1]
    assert "accuracy" in head and "_weight" not in head


def test_of_checkpoints_that_answer_alike_the_best_encoder_is_kept(zoo, tmp_path, monkeypatch):
    alone = classmethod(lambda cls, *given: cls(0.0, 1.0))
    monkeypatch.setattr(Mixture, "choose", alone)
    report = regard.train("classify", out=tmp_path / "run", quiet=True, **told("classify", zoo))
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    encoders = [row["valid/encoder_accuracy"] for row in rows if "valid/encoder_accuracy" in row]
    assert encoders[0] < max(encoders), "nothing was learnt, so nothing is told apart"
    assert report.scores["encoder_accuracy"] == max(encoders)


def test_a_teacher_of_two_parts_says_which_of_them_teaches(zoo, tmp_path, capsys):
    teacher = weighted(zoo.model("images"), tmp_path / "teacher", encoder=1.0, linear=1.0)
    how = {**told("images", zoo), "steps": 1, "valid_every": 1, "teacher": str(teacher)}
    regard.train("images", out=tmp_path / "run", **how)
    assert "its encoder teaches, without its linear model" in capsys.readouterr().err
