"""Models in the local cache of the Hugging Face hub are found, and cards tell it what it reads."""

import shutil

import pytest
from huggingface_hub import EvalResult, ModelCard

import regard
from regard.errors import UsageError
from regard.pretrained.hub_cache import find_cached, hub_cache, is_hub_name
from regard.pretrained.model_card import card_head

TEXTS = [(f"{word} {colour} thing", colour) for word in "abcdef" for colour in ("red", "blue")] * 3


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "colours"
    small = {"depth": 1, "width": 32, "heads": 2, "ffn_width": 48, "pieces": 300, "few": False}
    how = {"steps": 5, "quiet": True, "threads": 1, "linear": False, **small}
    regard.train("classify", data=TEXTS, out=out, like="bert", **how)
    return out


@pytest.fixture
def hub(run, tmp_path, monkeypatch):
    """The cache of the hub as its own tools write it, with links into blobs."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    home = tmp_path / "hub" / "models--some-org--a.model"
    exported = tmp_path / "exported"
    regard.export(run, format="huggingface", out=exported)
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("abc123")
    (home / "blobs").mkdir()
    (home / "snapshots" / "abc123").mkdir(parents=True)
    for number, file in enumerate(sorted(exported.iterdir())):
        shutil.copy(file, home / "blobs" / str(number))
        (home / "snapshots" / "abc123" / file.name).symlink_to(f"../../blobs/{number}")
    return home


def test_a_cached_model_is_found_by_its_name_and_answers_as_the_one_it_was(hub, run):
    model = regard.load("some-org/a.model")
    texts = [text for text, _ in TEXTS[:5]]
    ours = [answer.label for answer in regard.load(run).run(texts)]
    assert [answer.label for answer in model.run(texts)] == ours
    assert model.folder == hub / "snapshots" / "abc123"


def test_the_revision_is_main_or_else_the_last_one(hub):
    other = hub / "snapshots" / "zzz"
    shutil.copytree(hub / "snapshots" / "abc123", other)
    assert find_cached("some-org/a.model") == hub / "snapshots" / "abc123"
    (hub / "refs" / "main").write_text("../../../etc")
    found = find_cached("some-org/a.model")
    assert found is not None and found.parent == hub / "snapshots"
    (hub / "refs" / "main").write_text("zzz\n")
    assert find_cached("some-org/a.model") == other
    (other / "config.json").unlink()
    with pytest.raises(UsageError, match="has no config.json; fetch all of it"):
        regard.load("some-org/a.model")


def test_what_is_not_cached_is_refused_and_not_downloaded(hub, monkeypatch):
    with pytest.raises(UsageError, match="nothing is downloaded, hf download some-org/other"):
        regard.load("some-org/other")
    with pytest.raises(UsageError, match="no model '../x'"):
        regard.load("../x")
    assert not is_hub_name("a/../b") and not is_hub_name("a") and not is_hub_name("a/b/c")
    monkeypatch.setenv("HF_HUB_CACHE", "/elsewhere")
    assert str(hub_cache()) == "/elsewhere"


def test_a_folder_goes_before_the_cache(hub, run, tmp_path, monkeypatch):
    shutil.copytree(run, tmp_path / "some-org" / "a.model")
    monkeypatch.chdir(tmp_path)
    assert str(regard.load("some-org/a.model").folder) == "some-org/a.model"


def test_the_hub_reads_the_scores_of_a_card(run):
    card = ModelCard.load(run / "README.md")
    told = card.data
    assert told.library_name == "regard" and told.pipeline_tag == "text-classification"
    assert told.tags == ["regard", "classify", "bert"] and told.license is None
    results = told.eval_results
    assert all(isinstance(one, EvalResult) for one in results)
    by_type = {one.metric_type: one.metric_value for one in results}
    assert "accuracy" in by_type and 0 <= by_type["accuracy"] <= 100
    assert card.text.strip().startswith("# A model for `classify`")


def test_languages_and_odd_scores():
    config = {"task": "translate", "family": "transformer", "from": "en", "to": "klingon!"}
    head = card_head(config, {"bleu": 31.5, "loss": float("nan"), "better": 1.0}, 'a "b": c')
    data = ModelCard(head + "# x\n").data
    assert data.language == ["en"]
    (result,) = data.eval_results
    assert result.metric_value == 31.5 and result.dataset_name == 'validation part of a "b": c'
    assert ModelCard(card_head({"task": "series", "family": "series"}, {}) + "x").data.tags
