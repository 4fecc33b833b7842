"""Estimators of regard.sklearn are scikit-learn's in every way that applies."""

import pickle
import random
import subprocess
import sys
from pathlib import Path

import joblib
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

import regard
from regard.sklearn import (
    Embedder,
    ImageClassifier,
    Refused,
    SeriesClassifier,
    SoundClassifier,
    Tagger,
    TextClassifier,
    Translator,
    held_out,
)
from tests.tones import RATE, tones

SMALL = {"depth": 1, "width": 32, "heads": 2, "ffn_width": 48, "pieces": 300, "few": False}
OTHERS = ("stone", "river", "cloud", "paper", "window")
# check of scikit-learn -> why it does not apply
DO_NOT_APPLY = {
    "check_no_attributes_set_in_init": "parameters are the keys of a training, an open list",
    "check_methods_subset_invariance": "float32 products round by the shape of a batch, at 1e-6",
    "check_methods_sample_order_invariance": "float32 products round by the shape of a batch",
}


def rows(number: int, seed: int = 0) -> tuple[list[str], list[str]]:
    """Texts with one colour, which is their label."""
    chance, texts, labels = random.Random(seed), [], []
    for _ in range(number):
        words, colour = chance.choices(OTHERS, k=chance.randint(1, 6)), chance.choice("rgb")
        words.insert(chance.randint(0, len(words)), {"r": "red", "g": "green", "b": "blue"}[colour])
        texts.append(" ".join(words))
        labels.append(colour)
    return texts, labels


@pytest.fixture(scope="module")
def fitted() -> TextClassifier:
    return TextClassifier(steps=80, **SMALL).fit(*rows(200))


def test_a_text_classifier_learns_and_its_probabilities_are_those_of_run(fitted):
    texts, labels = rows(60, 1)
    assert fitted.score(texts, labels) > 0.9
    probs = fitted.predict_proba(texts)
    expected = [answer.probabilities for answer in regard.load(fitted.folder_).run(texts)]
    np.testing.assert_allclose(probs, expected, atol=1e-6)
    assert list(fitted.classes_) == ["b", "g", "r"]
    assert list(fitted.predict(texts)) == [fitted.classes_[i] for i in probs.argmax(1)]


def test_parameters_are_settings(fitted):
    assert fitted.get_params() == {"out": None, "steps": 80, **SMALL}
    other = clone(fitted).set_params(lr=0.01, model__block__norm="rms")
    assert other.get_params()["lr"] == 0.01 and not hasattr(other, "folder_")
    other.set_params(steps=2).fit(*rows(30))
    assert other.runner_.model.config.block.norm == "rms"
    assert fitted.runner_.model.config.block.norm != "rms"


def test_an_estimator_is_pickled_as_files_and_answers_the_same(fitted, tmp_path):
    texts, _ = rows(20, 2)
    joblib.dump(fitted, tmp_path / "model.joblib")
    again = joblib.load(tmp_path / "model.joblib")
    assert again.folder_ != fitted.folder_
    np.testing.assert_array_equal(again.predict_proba(texts), fitted.predict_proba(texts))
    state = fitted.__getstate__()
    assert "model.safetensors" in state["_files"] and "_loaded" not in state


def test_a_run_with_a_folder_is_pickled_by_its_path(tmp_path):
    model = TextClassifier(steps=2, out=tmp_path / "run", **SMALL).fit(*rows(30))
    assert len(pickle.dumps(model)) < 3000
    assert pickle.loads(pickle.dumps(model)).folder_ == str(tmp_path / "run")
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_a_temporary_folder_goes_with_its_estimator():
    model = TextClassifier(steps=2, **SMALL).fit(*rows(30))
    folder = Path(model.folder_)
    assert folder.exists()
    del model
    assert not folder.exists()


def test_labels_keep_their_type():
    texts, labels = rows(40)
    numbers = np.array([{"r": 7, "g": 3, "b": 5}[one] for one in labels])
    model = TextClassifier(steps=2, **SMALL).fit(texts, numbers)
    assert list(model.classes_) == [3, 5, 7]
    assert model.predict(texts[:3]).dtype == numbers.dtype


def test_cross_validation_searches_and_pipelines_work():
    texts, labels = rows(60)
    base = TextClassifier(steps=2, **SMALL)
    assert cross_val_score(base, texts, labels, cv=2).shape == (2,)
    search = GridSearchCV(base, {"lr": [0.001, 0.003]}, cv=2).fit(texts, labels)
    assert set(search.best_params_) == {"lr"} and search.predict(texts[:2]).shape == (2,)
    lower = FunctionTransformer(lambda some: [text.lower() for text in some])
    piped = make_pipeline(lower, base).set_params(textclassifier__steps=1).fit(texts, labels)
    assert piped.predict(texts[:4]).shape == (4,)
    assert piped[-1].runner_.config["task"] == "classify"


def test_parallel_jobs_give_the_same_scores():
    texts, labels = rows(40)
    base = TextClassifier(steps=2, threads=1, **SMALL)
    alone = cross_val_score(base, texts, labels, cv=2)
    np.testing.assert_array_equal(cross_val_score(base, texts, labels, cv=2, n_jobs=2), alone)


def test_vectors_go_into_a_linear_model():
    texts = ["I love it", "wonderful, great", "this is awful", "I hate it so much"] * 5
    labels = [1, 1, 0, 0] * 5
    piped = make_pipeline(Embedder(), LogisticRegression()).fit(texts, labels)
    assert piped.score(texts, labels) == 1.0
    vectors = clone(Embedder(pooling="max")).fit_transform(texts[:3])
    assert vectors.shape[0] == 3 and len(Embedder().get_feature_names_out()) == vectors.shape[1]
    with pytest.raises(Refused, match="unknown key 'poling'.*pooling"):
        Embedder(poling="max").fit(texts)


def test_images_as_arrays():
    rng = np.random.default_rng(0)
    labels = np.array(["dark", "light"] * 20)
    images = np.stack(
        [
            (rng.normal(60 if label == "dark" else 190, 20, (16, 16))).clip(0, 255).astype(np.uint8)
            for label in labels
        ]
    )
    model = ImageClassifier(steps=30, size="tiny", batch=16, none=0).fit(images, labels)
    assert model.score(images, labels) == 1.0
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict(images), model.predict(images))


def test_sounds_as_arrays():
    rng = np.random.default_rng(0)
    labels = ["A", "B"] * 15
    sounds = [tones(letter, rng) for letter in labels]
    small = {"depth": 1, "width": 32, "heads": 2, "ffn_width": 48, "kernel": 7, "mels": 20}
    small |= {"model.channels".replace(".", "__"): 8, "rate": RATE, "subsampling": 2, "none": 0}
    model = SoundClassifier(steps=60, lr=0.01, **small).fit(sounds, labels)
    assert model.score(sounds, labels) > 0.9


def test_a_tagger_and_a_translator():
    chance = random.Random(0)
    words = [chance.choices([*OTHERS, "red", "blue"], k=chance.randint(1, 6)) for _ in range(120)]
    tags = [["COLOUR" if w in ("red", "blue") else "THING" for w in some] for some in words]
    tagger = Tagger(steps=60, **{k: v for k, v in SMALL.items() if k != "few"}).fit(words, tags)
    assert tagger.score(words, tags) > 0.95
    assert tagger.predict([["red", "stone"]]) == [["COLOUR", "THING"]]
    pairs = [" ".join(some) for some in words]
    small = {"depth": 1, "width": 32, "heads": 2, "ffn_width": 48, "pieces": 300}
    model = Translator(steps=5, **small).fit(pairs, [text.upper() for text in pairs])
    assert model.predict(pairs[:2]).shape == (2,) and 0 <= model.score(pairs[:4], pairs[:4]) <= 1


def test_scikit_learns_own_checks_pass_but_for_those_that_do_not_apply():
    model = SeriesClassifier(steps=60, size="tiny", threads=1, lr=0.005)
    done = check_estimator(model, expected_failed_checks=DO_NOT_APPLY, on_skip=None, on_fail=None)
    failed = {one["check_name"]: one["exception"] for one in done if one["status"] == "failed"}
    assert failed == {}
    assert sum(one["status"] == "passed" for one in done) >= 48
    for kind in (TextClassifier, ImageClassifier, SoundClassifier, Tagger, Translator, Embedder):
        done = check_estimator(kind(), expected_failed_checks=DO_NOT_APPLY, on_skip=None)
        assert {one["status"] for one in done} <= {"passed", "xfail", "skipped"}


def test_bad_input_is_told_in_one_line(fitted):
    texts, labels = rows(20)
    for match, X, y in (
        ("0 sample", [], []),
        ("20 inputs but 3 labels", texts, labels[:3]),
        ("more than 1 sample", texts[:1], labels[:1]),
        ("of one class, r; expected two", texts, ["r"] * 20),
        ("input 2 is a int; expected a text", ["a", 3], ["x", "y"]),
        ("a str; expected a list", "a text", ["x"]),
    ):
        with pytest.raises(Refused, match=match) as error:
            TextClassifier(steps=1, **SMALL).fit(X, y)
        assert "\n" not in str(error.value)
    with pytest.raises(Refused, match="unknown key 'step'; did you mean 'steps'"):
        TextClassifier(step=1).fit(texts, labels)
    with pytest.raises(Refused, match="data= is not a parameter"):
        TextClassifier(data="x").fit(texts, labels)
    with pytest.raises(ValueError, match="not fitted yet"):
        TextClassifier().predict(texts)
    with pytest.raises(Refused, match="0 sample"):
        fitted.predict([])


def test_what_is_held_out_leaves_every_class_in_training():
    numbers = np.array([0] * 50 + [1] * 20 + [2])
    out = held_out(numbers)
    assert out.sum() == 7 and set(numbers[~out]) == {0, 1, 2} and not out[-1]
    assert held_out([0, 0, 1]).sum() == 1 and not held_out([0, 1]).any()


def test_importing_regard_imports_no_scikit_learn():
    code = "import sys, regard; assert not {'sklearn', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
