"""Baselines beside the score, and the weights of labels that are uneven."""

import json
import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.feature_extraction.text import CountVectorizer

import regard
from regard.errors import UsageError
from regard.metrics import baselines as baseline
from regard.metrics.baselines import (
    BASELINE_FILE,
    COMMONEST,
    Baselines,
    downsample,
    frequency_loss,
)
from regard.metrics.evaluation import WARNING, beside_baselines
from regard.metrics.labels import one_hot
from regard.metrics.linear import neighbours, ngrams
from regard.tasks.text.classify import CLASSIFY, FEW, few_text_settings
from regard.training.label_loss import (
    LABEL_LOSSES,
    class_weights,
    imbalance_notes,
    label_loss,
    soft_loss,
)

NGRAMS, EACH, WORDS, VECTORS, *_ = baseline.BASELINES


def by_hand(texts, numbers, labels, asked):
    """Multinomial naive Bayes over the words and pairs that a text has, in a loop."""

    def grams(text):
        words = text.lower().split()
        return {*words, *(f"{a} {b}" for a, b in zip(words, words[1:], strict=False))}

    every = set().union(*map(grams, texts))
    found = []
    for text in asked:
        chances = []
        for label in range(labels):
            own = [grams(t) for t, n in zip(texts, numbers, strict=True) if n == label]
            total = sum(len(some) for some in own) + len(every)
            chance = math.log((len(own) + 1) / (len(texts) + labels))
            for gram in grams(text) & every:
                chance += math.log((sum(gram in some for some in own) + 1) / total)
            chances.append(chance)
        found.append(chances.index(max(chances)))
    return found


def test_ngrams_are_those_that_scikit_learn_counts():
    """Words, pairs of words, and characters within words."""
    texts = ["Who wrote it ? who", "it is a dog", "a dog wrote a book about it , ça", ""]
    rows, keys = ngrams(texts)
    for bit, how in ((0, {"ngram_range": (1, 2)}), (1, {"ngram_range": (2, 5)})):
        more = {"analyzer": "char_wb"} if bit else {"token_pattern": r"\S+"}
        counts = CountVectorizer(**how, **more).fit_transform(texts).toarray()
        ours = keys & 1 == bit
        found = np.zeros((4, len(np.unique(keys[ours]))))
        np.add.at(found, (rows[ours], np.unique(keys[ours], return_inverse=True)[1]), 1)
        assert sorted(map(tuple, found.T)) == sorted(map(tuple, counts.T))


def test_a_linear_model_tells_texts_apart_and_needs_no_scikit_learn_to_do_so(monkeypatch):
    chance = np.random.default_rng(0)
    texts, numbers = [], chance.integers(0, 3, 120)
    for n in numbers:
        texts.append(" ".join(f"w{i}" for i in (chance.integers(0, 14, 6) + 10 * n) % 30))
    learnt = Baselines.fit(NGRAMS, texts[:80], one_hot(numbers[:80], 4))
    for name in ("sklearn", "sklearn.svm", "sklearn.naive_bayes", "scipy.sparse"):
        monkeypatch.setitem(sys.modules, name, None)
    scores = learnt.scores([*texts[80:], "unheard"], one_hot([*numbers[80:], 0], 4))
    assert scores[NGRAMS]["accuracy"] > 80 > scores[COMMONEST]["accuracy"]
    assert learnt.chosen.startswith(("words and characters, naive", "words and characters, linear"))
    assert "% of held-out training rows" in learnt.chosen
    assert learnt.scores(["", "w5 w6"], one_hot([0, 0], 4))[NGRAMS]["accuracy"] >= 50


def test_a_linear_model_of_words_knows_their_neighbours_and_ends():
    chance = np.random.default_rng(0)
    words, tags = [], []
    for _ in range(60):
        left = ["they", "the"][chance.integers(2)]
        sentence = [left, "saw", f"{chance.choice(list('abcdefg'))}{chance.integers(99)}ing"]
        words += neighbours(sentence)
        tags += [0, 1 if left == "they" else 2, 3]
    assert neighbours(["a", "b"]) == [("", "", "a", "b", ""), ("", "a", "b", "", "")]
    learnt = Baselines.fit(WORDS, words, one_hot(tags, 4))
    asked = [*neighbours(["they", "saw", "unheardof", "swing"]), *neighbours(["the", "saw"])]
    assert learnt.logits(asked).argmax(1)[[1, 3, 5]].tolist() == [1, 3, 2]
    assert learnt.scores(asked[:2], one_hot([0, 1], 4))[WORDS]["accuracy"] == 100


def test_a_linear_model_of_vectors():
    chance = np.random.default_rng(0)
    numbers = chance.integers(0, 2, 60)
    images = chance.integers(0, 60, (60, 3, 20, 20)).astype(np.uint8)
    images[numbers == 1, :, :, 10:] += 100
    vectors = downsample(images)
    assert vectors.shape == (60, 3 * 16 * 16) and 0 <= vectors.min() < vectors.max() <= 1
    whole = downsample(np.full((1, 1, 20, 20), 255, np.uint8))
    assert np.allclose(whole, 1)
    learnt = Baselines.fit(VECTORS, vectors[:40], one_hot(numbers[:40], 2))
    assert learnt.scores(vectors[40:], one_hot(numbers[40:], 2))[VECTORS]["accuracy"] == 100


def test_several_labels_have_one_naive_bayes_each():
    """Each label is judged as if it were the only question, present or absent."""
    chance = np.random.default_rng(0)
    wanted = chance.random((160, 3)) < 0.4
    texts = []
    for row in wanted:
        words = [f"w{chance.integers(20)}" for _ in range(4)]
        words += [f"l{n}{chance.integers(4)}" for n in range(3) if row[n] and chance.random() < 0.8]
        texts.append(" ".join(chance.permutation(words)))
    learnt = Baselines.fit(NGRAMS, texts[:100], wanted[:100])
    scores = learnt.scores(texts[100:], wanted[100:])
    assert list(scores) == [COMMONEST, EACH]
    found = np.stack(
        [by_hand(texts[:100], wanted[:100, n], 2, texts[100:]) for n in range(3)], 1
    ).astype(bool)
    assert scores[EACH]["accuracy"] == pytest.approx(100 * (found == wanted[100:]).all(1).mean())
    assert scores[EACH]["accuracy"] > scores[COMMONEST]["accuracy"]
    rows, counts = np.unique(wanted[:100], axis=0, return_counts=True)
    assert rows[counts == counts.max()].tolist().count(learnt.commonest.tolist()) == 1


def test_several_tags_or_labels_of_images_have_the_commonest_answer():
    wanted = np.array([[1, 1, 0], [1, 1, 0], [0, 0, 1]], dtype=bool)
    words = neighbours(["a", "b", "c"])
    scores = Baselines.fit(WORDS, words, wanted).scores(words, wanted)
    assert list(scores) == [COMMONEST]
    assert scores[COMMONEST]["accuracy"] == pytest.approx(200 / 3)


@pytest.mark.parametrize("kind", [*baseline.BASELINES, ""])
def test_baselines_are_read_as_they_were_written(tmp_path, kind):
    nearest = kind in [VECTORS, *_]
    inputs = downsample(np.zeros((2, 1, 4, 4), np.uint8)) if nearest else ["so", "not so"]
    inputs = neighbours(inputs) if kind == WORDS else inputs
    right = np.array([[1, 1], [0, 1]], bool) if kind == EACH else one_hot([0, 1], 2)
    asked = NGRAMS if kind == EACH else kind
    learnt = Baselines.fit(asked, inputs, right) if kind else Baselines(np.ones(2, bool))
    assert learnt.kind == kind
    learnt.save(tmp_path)
    again = Baselines.load(tmp_path, 2)
    assert again is not None
    assert again.scores(inputs, right) == learnt.scores(inputs, right)
    with pytest.raises(UsageError, match="not the baselines of 3 labels; remove it"):
        Baselines.load(tmp_path, 3)
    (tmp_path / BASELINE_FILE).write_bytes(b"\x08\0\0\0\0\0\0\0{]      ")
    with pytest.raises(UsageError, match=BASELINE_FILE):
        Baselines.load(tmp_path, 2)
    (tmp_path / BASELINE_FILE).unlink()
    assert Baselines.load(tmp_path, 2) is None


# Weights of labels


def test_balanced_weights_let_every_label_weigh_alike():
    often = np.array([90, 10])
    weights = class_weights("balanced", often, 100)
    assert weights is not None and class_weights("none", often, 100) is None
    assert torch.allclose(weights * torch.tensor(often), torch.tensor([50.0, 50.0]))
    logits, wanted = torch.randn(8, 2), torch.tensor([0, 1, 1, 0, 0, 0, 1, 0])
    each = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
    loss = label_loss(LABEL_LOSSES["single"], lambda: logits, wanted, 0.0, 0.0, weights)
    assert torch.allclose(loss, (each * weights[wanted]).sum())
    images = soft_loss(logits, torch.eye(2)[wanted], weights)
    assert torch.allclose(images, loss)
    tables = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    several = class_weights("balanced", np.array([1, 25]), 100, multilabel=True)
    assert several is not None and torch.allclose(several, torch.tensor([99.0, 3.0]))
    found = label_loss(LABEL_LOSSES["multi"], lambda: logits[:2], tables, 0.0, 0.0, several)
    by_hand = -(several * tables * logits[:2].sigmoid().log()).sum()
    by_hand = by_hand - ((1 - tables) * (-logits[:2]).sigmoid().log()).sum()
    assert torch.allclose(found, by_hand, atol=1e-5)


def test_uneven_labels_are_told():
    often, labels = np.array([100, 10]), ["common", "rare"]
    (note,) = imbalance_notes(often, labels, "none")
    assert "'common' occurs 100 times, 'rare' 10" in note and "class_weights=balanced" in note
    assert not imbalance_notes(often, labels, "balanced")
    assert not imbalance_notes(np.array([40, 10]), labels, "none")


# In training and judging

TINY = {
    "depth": 1,
    "width": 16,
    "heads": 2,
    "ffn_width": 16,
    "steps": 4,
    "threads": 1,
    "quiet": True,
}


def texts(path, rows=120):
    chance = np.random.default_rng(0)
    lines = []
    for i in range(rows):
        label = "bad" if i % 10 == 0 else "good"
        own = "awful dreadful" if label == "bad" else "fine lovely"
        lines.append(f"{own} film number {chance.integers(99)}\t{label}\n")
    path.write_text("".join(lines))
    return path


def photos(folder):
    for i in range(24):
        place = folder / ("light" if i % 2 else "dark")
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (200 * (i % 2) + i,) * 3).save(place / f"{i}.png")
    return folder


def words(path):
    rows = [f"the\tDET\ndog\tNOUN\nruns\tVERB\n{i}\tNUM\n" for i in range(80)]
    path.write_text("\n".join(rows) + "\n")
    return path


CASES = {
    "classify": (texts, NGRAMS, {"pieces": 300, "batch_tokens": 200}),
    "tag": (words, WORDS, {"pieces": 300, "batch_tokens": 100, "valid": "0.2"}),
    "images": (photos, VECTORS, {"patch": 4, "batch": 8, "valid": "0.3"}),
}


@pytest.mark.parametrize("task", CASES)
def test_baselines_stand_beside_the_score(task, tmp_path, capsys):
    write, kind, more = CASES[task]
    data, out = write(tmp_path / "data.tsv"), tmp_path / "out"
    settings = {**TINY, **more, "class_weights": "balanced"}
    regard.train(task, data=data, out=out, **settings)
    told = json.loads((out / "recipe.json").read_text())["baselines"]
    assert list(told) == [COMMONEST, kind] and told[kind]["accuracy"] == 100
    card = (out / "README.md").read_text()
    assert f"| baseline, {kind}: accuracy | 100 |" in card
    judged: Any = regard.evaluate(out, data=data, part="train" if task == "images" else "test")
    assert list(judged.baselines) == [COMMONEST, kind]
    assert judged.to_dict()["baselines"][kind]["accuracy"] == 100
    assert f"baseline, {kind}: accuracy 100.00, macro F1 100.00" in str(judged)


def test_a_training_and_an_evaluation_say_whether_they_beat_their_baselines(tmp_path, capsys):
    data = photos(tmp_path / "data")
    settings = {**TINY, **CASES["images"][2], "quiet": False}
    poor = regard.train("images", data=data, out=tmp_path / "poor", lr=0.0, **settings)
    assert f"{WARNING}accuracy" in capsys.readouterr().err and WARNING in str(poor)
    assert f"100.00 of {VECTORS}" in str(poor) and poor.baselines[VECTORS]["accuracy"] == 100
    judged = regard.evaluate(tmp_path / "poor", data=data, part="train")
    assert WARNING in str(judged)


@pytest.mark.parametrize("key", ["accuracy", "loss"])
def test_what_beats_a_baseline_does_so_in_every_score(key):
    """Equal is no better, less of a loss is, and the best of the baselines counts."""
    low, high = {key: 40.0}, {key: 60.0}
    better, worse = ({key: 61.0}, {key: 59.0}) if key == "accuracy" else ({key: 39.0}, {key: 41.0})
    both = {"one": low, "two": high}
    best = 60.0 if key == "accuracy" else 40.0
    assert beside_baselines(better, both).startswith("beats its baselines: ")
    for scores in (worse, {key: best}):
        told = beside_baselines(scores, both)
        assert told.startswith(WARNING) and f"{best:.2f} of" in told
    assert beside_baselines({key: 1.0}, {}) == "" == beside_baselines({"other": 1.0}, both)
    mixed = beside_baselines({**better, "other": 1.0}, {"one": {**low, "other": 2.0}})
    assert mixed == f"{WARNING}other 1.00, 2.00 of one"


def test_frequencies_of_tokens_are_a_baseline_of_language(tmp_path):
    train, test = np.array([0, 0, 0, 1]), np.array([0, 2])
    expected = -(math.log(4 / 7) + math.log(1 / 7)) / 2
    assert frequency_loss(train, test) == pytest.approx(expected)
    (tmp_path / "book.txt").write_text("so it was and so it will be, said the cat. " * 200)
    how = {"depth": 1, "width": 16, "heads": 2, "context": 32, "batch_tokens": 256, "threads": 1}
    how |= {"data": tmp_path / "book.txt", "pieces": 300, "quiet": True}
    poor = regard.train("language", out=tmp_path / "poor", steps=1, lr=0.0, **how)
    assert f"{WARNING}loss" in str(poor)
    good = regard.train("language", out=tmp_path / "good", steps=60, lr=0.02, **how)
    assert "beats its baselines: loss" in str(good)


def test_several_labels_have_a_baseline_beside_the_score(tmp_path):
    colours = [["red", "blue"], ["red", "green"], ["blue", "green"], ["green"]]
    rows = [
        {"text": f"{' '.join(some)} {i}", "labels": some} for i in range(60) for some in colours
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {**TINY, **CASES["classify"][2], "data": tmp_path / "t.jsonl"}
    regard.train("classify", out=tmp_path / "out", **settings)
    judged: Any = regard.evaluate(tmp_path / "out", data=tmp_path / "t.jsonl", part="valid")
    assert list(judged.baselines) == [COMMONEST, EACH]
    assert judged.baselines[EACH]["macro_f1"] > 90 > judged.baselines[COMMONEST]["macro_f1"]
    assert f"| baseline, {EACH}: accuracy |" in (tmp_path / "out" / "README.md").read_text()


def test_uneven_labels_are_told_in_training(tmp_path, capsys):
    settings = {**TINY, **CASES["classify"][2], "steps": 1, "quiet": False}
    regard.train("classify", data=texts(tmp_path / "t.tsv"), out=tmp_path / "out", **settings)
    assert "uneven labels: 'good' occurs" in capsys.readouterr().err
    with pytest.raises(UsageError, match="unknown class_weights 'even'"):
        regard.train("classify", data=tmp_path / "t.tsv", class_weights="even", **settings)


# Few texts


def test_defaults_follow_the_number_of_texts():
    def of(texts=300, **values):
        found = few_text_settings({"data": "x", **values}, texts)
        assert not found.keys() & values.keys()
        return found

    assert of()["tokenizer"] == "unigram" and of(FEW) == of() == of(minutes=2, size="small")
    assert of(FEW + 1) == of(init="x") == of(like="bert") == {}
    assert "epochs" not in of(steps=10) and "pieces" in of(steps=10)
    assert not {"tokenizer", "pieces"} & of(pieces=300).keys() and "epochs" in of(pieces=300)
    settings = CLASSIFY.resolve({**of(), "data": "x"})
    assert settings.epochs == of()["epochs"] and settings.steps is None
