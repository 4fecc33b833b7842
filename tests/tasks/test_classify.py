"""Laws of labelling texts: neighbours never matter, scores equal loops, bad data names its line."""

import json
import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from safetensors.torch import load_file
from torch.nn import functional as F

import regard
from regard.data.features import WordFeatures, split_words
from regard.data.labelled import ExampleFormat, ExampleReader, load_labelled
from regard.data.rows import RowEncoder, TextBatches
from regard.data.tokenize import train_tokenizer
from regard.errors import UsageError
from regard.layers.heads import POOLERS
from regard.metrics.interval import wilson
from regard.metrics.labels import (
    class_scores,
    confusion,
    count,
    count_units,
    log_loss,
    macro_f1,
    micro_f1,
    one_hot,
)
from regard.models import preset
from regard.models.bert import Bert
from regard.models.ensemble import members_of
from regard.tasks import task as task_class
from regard.tasks.runner import Runner
from regard.tasks.text.classify import CLASSIFY
from regard.tasks.text.labelling import LabelTextCodec
from tests.zoo import ANIMALS, COLOURS, OTHERS, spoilt, write_tsv
from tests.zoo import colour_rows as rows

SMALL = ANIMALS["classify"].settings


@pytest.fixture(scope="module")
def data(zoo):
    return zoo.data("classify")


@pytest.fixture(scope="module")
def trained(zoo):
    return zoo.model("classify")


@pytest.fixture(scope="module")
def classifier(trained) -> Runner:
    return regard.load(trained)


# What is learnt


def test_a_simple_rule_is_learnt_wholly(data, zoo, tmp_path):
    trained = zoo.copy("classify", tmp_path / "run")
    result = regard.evaluate(str(trained), data=str(data))
    assert {s.name: s.value for s in result.scores}["accuracy"] == 100.0
    assert all(row.f1 == 100.0 for row in result.classes)
    assert sum(row.support for row in result.classes) == result.sentences == 50
    kept = json.loads((trained / "scores.jsonl").read_text().splitlines()[-1])
    assert kept["scores"][0]["value"] == 100.0
    assert len(kept["made_with"]["data_hash"]) == 64


def test_several_labels_are_learnt_each_by_itself(tmp_path):
    chance = random.Random(3)
    for part, number in (("train", 300), ("valid", 40)):
        lines = []
        for _ in range(number):
            colours = [c for c in COLOURS if chance.random() < 0.4]
            words = chance.choices(OTHERS, k=4) + colours
            chance.shuffle(words)
            lines.append(json.dumps({"text": " ".join(words), "label": colours}))
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines))
    out = tmp_path / "run"
    settings = {**SMALL, "steps": 160, "label_smoothing": 0.0}
    regard.train("classify", data=str(tmp_path), out=str(out), quiet=True, **settings)
    model = regard.load(out)
    both, none = model.run(["the red dog sits under the blue tree", "a cat runs"])
    assert sorted(both.label) == ["blue", "red"] and none.label == []
    assert str(none) == ""
    assert both.probabilities.sum() > 1.5 > none.probabilities.sum()
    result = model.evaluate({"data": str(tmp_path), "part": "valid"})
    scores = {s.name: s.value for s in result.scores}
    assert scores["micro F1"] > 95 and result.confusion is None


def test_a_trained_model_lends_its_body_and_where_labels_are_the_same_its_head(
    data, trained, tmp_path
):
    write_tsv(tmp_path / "two.tsv", [(text, label[0]) for text, label in rows(60, 9)])
    settings = {**SMALL, "steps": 1, "lr": 0.0, "init": str(trained), "ema": 0.0}
    before = load_file(trained / "model.safetensors")
    regard.train("classify", data=str(data), out=str(tmp_path / "same"), quiet=True, **settings)
    same = load_file(tmp_path / "same" / "model.safetensors")
    assert all(torch.equal(before[name], same[name]) for name in before)
    for number, pool in enumerate(("mean", "attention")):
        out = tmp_path / f"other{number}"
        given = {**settings, "pool": pool, "head_dropout": 0.3}
        regard.train("classify", data=str(tmp_path / "two.tsv"), out=str(out), quiet=True, **given)
        other = load_file(out / "model.safetensors")
        body = [name for name in before if not name.startswith("head.")]
        assert body and all(torch.equal(before[name], other[name]) for name in body)
        assert regard.load(out).labels == ["B", "G", "R"]


def test_members_learn_each_by_itself_and_say_their_mean(data, tmp_path):
    settings = {**SMALL, "steps": 3, "ema": 0.0, "valid_every": 3}
    out = str(tmp_path / "three")
    regard.train("classify", data=str(data), out=out, quiet=True, **settings, members=3)
    model = regard.load(tmp_path / "three").model
    ids, lengths = torch.randint(5, 90, (4, 6)), torch.tensor([6, 6, 3, 1])
    with torch.no_grad():
        said = [one.head(one.hidden(ids, lengths), lengths) for one in members_of(model)]
        torch.testing.assert_close(model(ids, lengths), sum(said) / 3)
    assert not torch.allclose(said[0], said[1]) and not torch.allclose(said[1], said[2])
    names = [v.name for v in regard.load(tmp_path / "three").picture("a red dog").views]
    assert names == [f"{m}blocks.0.attention" for m in ("", "members.0.", "members.1.")]
    with pytest.raises(UsageError, match="members=2 label whole texts"):
        task_class("tag").resolve({"data": "x", "members": 2})
    with pytest.raises(UsageError, match="members=3: .*train with members=1"):
        regard.export(out, format="huggingface", out=str(tmp_path / "theirs"))


# Answers


def test_chances_sum_to_one_and_neighbours_never_matter(classifier):
    texts = [text for text, _ in rows(23, 5)] + ["red " * 60, "", "blue"]
    together = classifier.run(texts)
    small = classifier.run(texts, batch_rows=3, batch_tokens=40)
    for text, whole, part in zip(texts, together, small, strict=True):
        alone = classifier.run(text)
        assert whole.probabilities.sum() == pytest.approx(1.0, abs=1e-6)
        assert alone.probabilities == pytest.approx(whole.probabilities, abs=1e-5)
        assert part.probabilities == pytest.approx(whole.probabilities, abs=1e-5)
        assert alone.label == whole.label == part.label


def test_lines_and_records_say_the_same(classifier):
    how = classifier.check({"n_best": 3, "scores": True})
    answer = classifier.run("the green house", n_best=3, scores=True)
    lines = [line.split("\t") for line in answer.lines(how)]
    record = answer.record(how)
    assert [label for label, _ in lines] == list(record["probabilities"])
    assert lines[0][0] == record["prediction"] == answer.label == "GREEN"
    chances = [float(p) for _, p in lines]
    assert chances == sorted(chances, reverse=True)
    assert chances == pytest.approx(list(record["probabilities"].values()), abs=1e-4)
    assert record["probability"] == record["probabilities"]["GREEN"]
    with pytest.raises(UsageError, match="n_best=4 is more than the 3 labels"):
        classifier.check({"n_best": 4})


def test_a_text_that_is_too_long_is_read_up_to_there_and_the_user_is_told(classifier, capsys):
    begin = "the big dog runs under the red tree"
    short = classifier.run(begin, max_length=10)
    long = classifier.run(begin + " and sits" * 50, max_length=10)
    assert long.probabilities == pytest.approx(short.probabilities, abs=1e-6)
    assert long.cut and not short.cut and long.record(classifier.check({}))["cut"] is True
    assert "1 of 1 texts were cut at 10 pieces" in capsys.readouterr().err


def test_a_picture_shows_every_layer_and_the_chances(classifier):
    picture = classifier.picture("a red dog")
    assert [view.name for view in picture.views] == ["blocks.0.attention"]
    for view in picture.views:
        assert np.allclose(view.weights.sum(-1), 1, atol=1e-5)
        assert view.row_tokens[0] == "<s>" and view.row_tokens[-1] == "</s>"
    assert picture.output == "RED" and "RED" in picture.note
    assert {name for name, _ in picture.alternatives} == {"BLUE", "GREEN"}


def test_the_attention_that_pools_is_seen_too():
    tokenizer = train_tokenizer([text for text, _ in rows(50, 1)], vocab=350)
    config = replace(preset("bert", "tiny"), vocab=tokenizer.vocab, head="classify", labels=2)
    model = Bert(replace(config, pool="attention", depth=1, types=0)).eval()
    codec = LabelTextCodec(RowEncoder(tokenizer), ["a", "b"], max_length=64)
    picture = CLASSIFY.bind(model, codec, {}).picture("a red dog")
    assert picture.views[-1].name == "head.pool"
    assert picture.views[-1].weights.shape[1:] == (1, len(picture.views[0].row_tokens))


# Parts of the model


def test_max_and_attention_pool_as_loops_do():
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6).double()
    biggest, asks = POOLERS["max"](6, 0.0), POOLERS["attention"](6, 0.0).double()
    assert torch.equal(biggest(x), torch.stack([row.max(0).values for row in x]))
    torch.testing.assert_close(asks(x), x.mean(1))
    query = torch.randn(6).double()
    with torch.no_grad():
        asks.query.copy_(query)
    for row, found in zip(x, asks(x), strict=True):
        scores = [math.exp(float(query @ vector) / math.sqrt(6)) for vector in row]
        wanted = sum(s * vector for s, vector in zip(scores, row, strict=True)) / sum(scores)
        torch.testing.assert_close(found, wanted)


def test_convolved_is_the_largest_of_every_short_run():
    torch.manual_seed(0)
    pool, x = POOLERS["convolution"](7, 0.0).double(), torch.randn(2, 4, 7).double()
    pool.requires_grad_(False)
    wanted = []
    for run in pool.runs:
        count, _, n = run.weight.shape
        around = torch.cat([torch.zeros(n - 1, 7), x[1], torch.zeros(n - 1, 7)]).double()
        for k in range(count):
            found = [
                sum(float(run.weight[k, :, j] @ around[i + j]) for j in range(n))
                for i in range(len(around) - n + 1)
            ]
            wanted.append(max(0.0, max(found) + float(run.bias[k])))
    assert pool(x)[1].tolist() == pytest.approx(wanted) and len(wanted) == 7


def test_a_token_of_several_types_has_the_sum_of_their_vectors():
    torch.manual_seed(0)
    config = replace(
        preset("bert", "tiny"), vocab=20, types=9, depth=1, embed_norm="none", head="none"
    )
    embed = Bert(config).double().eval().embed
    ids, at = torch.randint(0, 20, (2, 3)), torch.arange(3).unsqueeze(-1)
    types = torch.randint(0, 9, (2, 3, 4))
    plain = embed(ids, at, torch.zeros_like(ids)) - embed.types.weight[0]
    wanted = plain + sum(embed.types.weight[types[:, :, k]] for k in range(4))
    torch.testing.assert_close(embed(ids, at, types), wanted)


# Rows


def test_hidden_words_are_as_many_as_asked_and_never_what_stands_around():
    tokenizer = train_tokenizer([text for text, _ in rows(50, 1)], vocab=350)
    texts = [text for text, _ in rows(200, 2)]
    features = WordFeatures("affixes", sorted({f"word {w}" for w in [*OTHERS, *COLOURS]}))
    reader = RowEncoder(tokenizer, features)
    made = reader.texts(texts, 64)
    dropout = {"word_dropout": 0.3, "feature_dropout": 0.4}
    feed = TextBatches(made, reader, tokens=4096, seed=1, **dropout)
    hidden = words = zeros = features = 0
    for n in range(5):
        picked, seen, read = feed[n]
        again = feed[n][2]
        assert torch.equal(read.ids, again.ids) and torch.equal(read.features, again.features)
        for i, row in zip(picked, seen, strict=True):
            before = made[i]
            assert row.ids[0] == tokenizer.bos and row.ids[-1] == tokenizer.eos
            for word in range(before.word_ids.max() + 1):
                mine = before.word_ids == word
                gone = row.ids[mine] == 3
                assert gone.all() or (row.ids[mine] == before.ids[mine]).all()
                hidden, words = hidden + bool(gone.all()), words + 1
            inner = before.word_ids >= 0
            zeros += int((row.features[inner, 0] == 0).sum())
            features += int(inner.sum())
    assert hidden / words == pytest.approx(0.3, abs=0.03)
    assert zeros / features == pytest.approx(0.4, abs=0.03)


def test_features_of_a_word_follow_it_whatever_stands_before_its_frame():
    tokenizer = train_tokenizer([text for text, _ in rows(50, 1)], vocab=350)
    reader = RowEncoder(tokenizer, WordFeatures.learn("affixes", [["Undersea", "red"]] * 2, 1000))
    words = ["dogs", "Undersea", "red"]
    row = reader.words(words, 100)
    one = reader.words(["Undersea"], 100)
    there = row.features[row.word_ids == 1].tolist()
    assert there == one.features[one.word_ids == 0].tolist()
    assert (row.features[row.word_ids < 0] == 0).all()
    text = tokenizer.decode(row.ids[row.word_ids >= 0].tolist())
    assert text == " ".join(words)


def test_features_seen_once_are_nothing_and_a_folder_gives_them_back(tmp_path):
    sentences = [["a", "dog"], ["a", "dog", "runs"], ["the", "dog"]]
    features = WordFeatures.learn("bigrams", sentences, 100)
    assert features.known == ["<s> a", "a dog"]
    assert features.numbers(["a", "dog", "a"]).tolist() == [[1], [2], [0]]
    assert WordFeatures.learn("bigrams", sentences, 1).known == ["<s> a"]
    both = WordFeatures.learn("affixes+trigrams", sentences, 100, alone=True)
    assert both.numbers([]).shape == (0, both.kinds) and both.kinds == 11
    assert both.numbers(["unheard"])[0, :1].tolist() == [0]
    both.save(tmp_path)
    again = WordFeatures.load(tmp_path)
    assert again.alone and again.sha == both.sha and again.size == both.size == len(both.known) + 1
    assert (again.numbers(["a", "dog"]) == both.numbers(["a", "dog"])).all()
    for change in (
        {"names": "magic"},
        {"names": "bigrams+bigrams"},
        {"names": 3},
        {"known": ["a", "a"]},
        {"known": [""]},
        {"known": [3]},
        {"known": [str(n) for n in range(100_001)]},
    ):
        (tmp_path / "features.json").write_text(json.dumps({**json.loads(both.text), **change}))
        with pytest.raises(UsageError, match=r"features\.json"):
            WordFeatures.load(tmp_path)


def test_words_known_by_their_features_alone_are_learnt_and_unheard_ones_are_all_alike(
    data, tmp_path
):
    out = str(tmp_path / "run")
    settings = {**SMALL, "tokenizer": "words", "features": "words", "word_dropout": 0.1}
    regard.train("classify", data=str(data), out=out, quiet=True, **settings)
    model = regard.load(out)
    right = [answer.label for answer in model.run(["a red dog", "the Blue tree", "green"])]
    assert right == ["RED", "BLUE", "GREEN"]
    one, two = model.run(["a red zebra", "a red xylophone"])
    assert one.probabilities == pytest.approx(two.probabilities, abs=1e-6)
    assert model.picture("a red zebra").views[0].row_tokens[1:-1] == ["a", "red", "zebra"]
    row = model.codec.encoder.texts(["a red dog"], 64)[0]
    hides = TextBatches([row] * 400, model.codec.encoder, tokens=1024, seed=1, word_dropout=0.5)
    seen = np.concatenate([r.features[1:-1, 0] > 0 for r in hides[0][1]])
    assert seen.mean() == pytest.approx(0.5, abs=0.1)
    for wrong in ({"features": "none"}, {"bpe_dropout": 0.1}):
        with pytest.raises(UsageError, match="tokenizer=words"):
            regard.train("classify", data=str(data), out=out, quiet=True, **{**settings, **wrong})


def test_a_text_is_split_into_words_and_signs():
    assert split_words("She's here, isn't she? U.S. costs $3,000.50...") == [
        *["She", "'s", "here", ",", "is", "n't", "she", "?", "U.S.", "costs", "$", "3,000.50"],
        "...",
    ]
    assert split_words("see https://a.b/c?d=1 or me@x.org now") == [
        *["see", "https://a.b/c?d=1", "or", "me@x.org", "now"]
    ]
    assert split_words("  ") == []
    assert len(split_words("ab.cd-" * 20000)) == 80000  # and in a moment


# Scores


@given(some.lists(some.tuples(some.integers(0, 3), some.integers(0, 3)), min_size=1, max_size=40))
def test_scores_of_classes_equal_loops(pairs):
    wanted, found = np.array(pairs).T
    counts = count(one_hot(wanted, 4), one_hot(found, 4))
    table = Counter(pairs)
    assert confusion(wanted, found, 4).tolist() == [
        [table[i, j] for j in range(4)] for i in range(4)
    ]
    f1 = {}
    for number, row in enumerate(class_scores(counts, list("abcd"))):
        right = sum(a == b == number for a, b in pairs)
        asked = sum(a == number for a, _ in pairs)
        given = sum(b == number for _, b in pairs)
        precision = right / given if given else 0.0
        recall = right / asked if asked else 0.0
        both = precision + recall
        assert row.precision == pytest.approx(100 * precision)
        assert row.recall == pytest.approx(100 * recall)
        assert row.support == asked
        if asked or given:
            f1[number] = 200 * precision * recall / both if both else 0.0
            assert row.f1 == pytest.approx(f1[number])
    assert macro_f1(counts) == pytest.approx(sum(f1.values()) / len(f1))
    accuracy = 100 * sum(a == b for a, b in pairs) / len(pairs)
    assert micro_f1(counts) == pytest.approx(accuracy)
    assert float(count_units(one_hot(wanted, 4), one_hot(found, 4)).f1()) == pytest.approx(accuracy)


def test_the_loss_of_labels_is_pytorchs_a_row():
    logits = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    some, one = logits.roll(1, 0) > 0, logits.roll(2, 0).argmax(1)
    several = F.binary_cross_entropy_with_logits(logits, some.double(), reduction="sum") / 7
    assert log_loss(some.numpy(), logits.sigmoid().numpy(), True) == pytest.approx(float(several))
    single = float(F.cross_entropy(logits, one))
    assert log_loss(one_hot(one, 4), logits.softmax(1).numpy(), False) == pytest.approx(single)


def test_wilson_gives_the_intervals_of_the_textbook():
    assert wilson(8, 10) == pytest.approx((49.02, 94.33), abs=0.01)
    assert wilson(10, 10) == pytest.approx((72.25, 100.0), abs=0.01)
    assert wilson(0, 10) == pytest.approx((0.0, 27.75), abs=0.01)
    low, high = wilson(440, 500)
    assert low < 88.0 < high and high - low < 6


def test_errors_come_with_the_surest_first_and_name_their_line(classifier, tmp_path):
    wrong = [("a red dog", "BLUE"), ("a red red red cat", "GREEN"), ("a blue dog", "BLUE")]
    write_tsv(tmp_path / "test.tsv", wrong)
    result = classifier.evaluate({"data": str(tmp_path)}, against=classifier, names=("a", "b"))
    sure = [error.probability for error in result.errors]
    assert len(sure) == 2 and sure == sorted(sure, reverse=True)
    assert {(e.right, e.answer) for e in result.errors} == {("BLUE", "RED"), ("GREEN", "RED")}
    assert all(str(tmp_path / "test.tsv") in e.where for e in result.errors)
    assert result.comparison[0].p == 1.0
    text = str(result)
    assert "accuracy = 33.33" in text and "targets down" in text and "wilson" in text


# Files


def read(path, **settings):
    notes: list[str] = []
    reader = ExampleReader(ExampleFormat(**settings))
    return [(e.text, e.labels) for e in reader.read(path, notes)], notes, reader.several


WANTED = [("good film", ("pos",)), ("bad, bad", ("neg",))]


@pytest.mark.parametrize(
    ("name", "content", "settings"),
    [
        ("a.tsv", "good film\tpos\nbad, bad\tneg\n", {}),
        ("a.tsv", "sentence\tlabel\ngood film \tpos\n bad, bad\tneg\n", {}),
        ("a.tsv", "label\tid\ttext\npos\t1\tgood film\nneg\t2\tbad, bad\n", {}),
        ("a.tsv", "pos\tx\tgood film\nneg\ty\tbad, bad\n", {"columns": "3,1"}),
        ("a.txt", "good film\tpos\n\nbad, bad\tneg", {}),
        (
            "a.jsonl",
            '{"text": "good film", "label": "pos"}\n{"label": "neg", "text": "bad, bad"}',
            {},
        ),
        ("a", '{"q": "good film", "y": "pos"}\n{"q": "bad, bad", "y": "neg"}', {"columns": "q,y"}),
    ],
)
def test_every_form_of_a_file_gives_the_same_texts(tmp_path, name, content, settings):
    path = tmp_path / name
    path.write_text(content)
    found, _, several = read(path, **settings)
    assert found == WANTED and not several


def test_labels_of_questions_are_coarse_or_fine(tmp_path):
    path = tmp_path / "q.label"
    path.write_bytes("NUM:date When was Éluard born ?\nHUM:ind Who ?\n".encode("latin-1"))
    found, notes, _ = read(path)
    assert found == [("When was Éluard born ?", ("NUM",)), ("Who ?", ("HUM",))]
    assert "read as Latin-1" in notes[0]
    assert read(path, labels="fine")[0][0][1] == ("NUM:date",)
    assert read(path, encoding="latin1")[1] == []
    with pytest.raises(UsageError, match=r"q\.label:1: not UTF-8"):
        read(path, encoding="utf-8")


def test_a_broken_line_in_utf8_does_not_make_it_latin(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_bytes("schön\ta\n".encode() + b"sch\xf6n\tb\n")
    with pytest.raises(UsageError, match=r"a\.tsv:2: not UTF-8 \(byte 0xf6"):
        read(path)
    found, notes, _ = read(path, skip_bad=True)
    assert found == [("schön", ("a",))] and "1 bad row" in notes[-1]


def test_several_labels_come_as_lists_or_with_a_separator(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x", "labels": ["b", "a", "b"]}\n{"text": "y", "labels": []}\n')
    assert read(path)[0] == [("x", ("b", "a")), ("y", ())] and read(path)[2]
    path = tmp_path / "a.tsv"
    path.write_text("x\ta; b\ny\tb\n")
    assert read(path, separator=";")[0] == [("x", ("a", "b")), ("y", ("b",))]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.tsv", "x\ta\ny\n", r"a\.tsv:2: 1 column, expected at least 2; write text, TAB, label"),
        ("a.tsv", "x\ta\n\tb\n", r"a\.tsv:2: the text is empty"),
        ("a.tsv", "x\ta\ny\t \n", r"a\.tsv:2: the label is empty"),
        ("a.tsv", "x\ta\ny\0\tb\n", r"a\.tsv:2: a NUL byte"),
        (
            "a.jsonl",
            '{"text": "x", "label": "a"}\n{"text": "y"}\n',
            r"a\.jsonl:2: no text and label",
        ),
        ("a.jsonl", '{"text": "x", "label": "a"}\n{oops\n', r"a\.jsonl:2: not JSON"),
        ("a.jsonl", '{"text": ["x"], "label": "a"}\n', r"a\.jsonl:1: .*holds a list"),
        ("a.q", "NUM:date When ?\nWho ?\n", r"a\.q:2: 'Who \?' does not begin with a label"),
    ],
)
def test_a_bad_line_is_told_with_its_file_and_number(tmp_path, name, content, told):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UsageError, match=told):
        read(path)


def test_labels_that_train_does_not_know_are_refused_with_the_nearest(tmp_path):
    write_tsv(tmp_path / "train.tsv", rows(40, 1))
    write_tsv(tmp_path / "valid.tsv", [("a red dog", "RED"), ("a dog", "GREN")])
    settings = {**SMALL, "steps": 1, "data": str(tmp_path), "quiet": True}
    with pytest.raises(UsageError, match=r"valid\.tsv:2: label 'GREN' does not occur in train"):
        regard.train("classify", out=str(tmp_path / "a"), **settings)
    report = regard.train("classify", out=str(tmp_path / "b"), skip_bad=True, **settings)
    assert report.finished


def test_a_test_label_that_the_model_does_not_know_is_refused(classifier, tmp_path):
    write_tsv(tmp_path / "test.tsv", [("a red dog", "RED"), ("a dog", "purple")])
    with pytest.raises(UsageError, match=r"test\.tsv:2: label 'purple' is none of the model's"):
        classifier.evaluate({"data": str(tmp_path)})
    result = classifier.evaluate({"data": str(tmp_path), "skip_bad": True})
    assert result.sentences == 1 and result.made_with["left_out"] == 1


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("x\ta\ny\ta\nz\ta\nw\ta\n", "only the label 'a'; expected two or more"),
        ("".join(f"pos\ttext {i}\n" for i in range(1500)), "different labels .* stand first"),
    ],
)
def test_labels_that_cannot_be_learnt_are_refused(tmp_path, content, told):
    (tmp_path / "train.tsv").write_text(content)
    write_tsv(tmp_path / "valid.tsv", [("x", "a")])
    with pytest.raises(UsageError, match=told):
        regard.train("classify", data=str(tmp_path), out=str(tmp_path / "run"), quiet=True)


def test_a_split_by_whole_texts_leaves_no_part_of_them_in_train(tmp_path):
    chance = random.Random(1)
    whole = [" ".join(chance.choices(OTHERS, k=9)) for _ in range(60)]
    parts = [" ".join(t.split()[i : i + n]) for t in whole for i, n in ((0, 4), (2, 5), (8, 1))]
    write_tsv(tmp_path / "all.tsv", [(text, "a") for text in [*whole, *parts]])
    reader = ExampleReader(ExampleFormat())
    found = load_labelled(str(tmp_path / "all.tsv"), reader, valid="0.2", by="whole").parts
    train, held = ([e.text for e in found[name]] for name in ("train", "valid"))
    assert held and set(held) < set(whole)
    assert not any(f" {text} " in f" {other} " for text in train for other in held)
    left = {t for t in [*whole, *parts] if not any(f" {t} " in f" {other} " for other in held)}
    assert set(train) == left
    with pytest.raises(UsageError, match="unknown valid_by 'hole'.*whole"):
        load_labelled(str(tmp_path / "all.tsv"), reader, valid="0.2", by="hole")


def test_a_folder_that_lies_about_its_labels_is_refused(trained, tmp_path):
    for change, told in (
        ({"labels": ["A", "B"]}, "2 labels, but the model tells 3 apart"),
        ({"labels": ["A", "A", "B"]}, "expected a list of different texts"),
        ({"labels": {"a": 1}}, "expected a list of different texts"),
        ({"several": "yes"}, "'several' must be true or false"),
        ({"max_length": 10**9}, "'max_length' is 1000000000; expected 1 to"),
        ({"features": "affixes"}, r"features\.json"),
    ):
        with pytest.raises(UsageError, match=told):
            regard.load(spoilt(trained, tmp_path, **change))


def test_trec_and_sst2_are_read_as_they_are(real_data):
    trec = load_labelled(str(real_data / "trec"), ExampleReader(ExampleFormat()), valid="0.1")
    assert sum(map(len, trec.parts.values())) == 5452
    assert len({e.labels for e in trec.parts["train"]}) == 6
    fine = ExampleReader(ExampleFormat(labels="fine"))
    test = load_labelled(str(real_data / "trec"), fine, need=("test",)).parts["test"]
    assert len(test) == 500 and ("NUM:dist",) in {e.labels for e in test}
    sst2 = load_labelled(
        str(real_data / "sst2"), ExampleReader(ExampleFormat()), need=("valid",)
    ).parts["valid"]
    assert len(sst2) == 872 and {e.labels for e in sst2} == {("0",), ("1",)}


# Public checkpoints


@pytest.mark.parametrize("task", ["classify", "tag"])
def test_a_public_checkpoint_says_what_transformers_says_and_can_be_trained_on(tmp_path, task):
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        BertForTokenClassification,
        BertTokenizer,
    )

    torch.manual_seed(0)
    kinds = {"classify": BertForSequenceClassification, "tag": BertForTokenClassification}
    folder = tmp_path / "theirs"
    folder.mkdir()
    pieces = "[PAD] [UNK] [CLS] [SEP] [MASK] the dog cat run ##s sit ##ting red house ."
    (folder / "vocab.txt").write_text("\n".join(pieces.split()) + "\n")
    config = BertConfig(
        vocab_size=15,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=24,
        id2label={0: "good", 1: "bad", 2: "so so"},
        initializer_range=0.4,
    )
    theirs = kinds[task](config).eval()
    theirs.save_pretrained(folder)
    tokenizer = BertTokenizer(str(folder / "vocab.txt"))
    ours = regard.load(folder)
    for text in ("the dog runs .", "the red cat sitting", "dog"):
        with torch.no_grad():
            logits = theirs(**tokenizer(text, return_tensors="pt")).logits[0]
        chances = logits.softmax(-1).numpy()
        if task == "tag":  # of each word the first piece, [CLS] left out
            tokens = tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)
            first = [i for i, token in enumerate(tokens) if token[0] not in "[#"]
            wanted = chances[first].max(-1)
        else:
            wanted = chances
        answer = ours.run(text)
        assert answer.probabilities == pytest.approx(wanted, abs=1e-5)
    write_tsv(tmp_path / "data.tsv", rows(60, 4))
    out = tmp_path / "run"
    settings = {"init": str(folder), "steps": 2, "valid": "0.2", "quiet": True}
    regard.train("classify", data=str(tmp_path / "data.tsv"), out=str(out), **settings)
    answer = regard.load(out).run("a red dog " * 20)
    assert answer.label in ("RED", "GREEN", "BLUE") and answer.cut


def test_an_evaluation_cuts_each_text_into_pieces_once(classifier, data, monkeypatch):
    cut, texts = Counter(), RowEncoder.texts

    def counted(self, given, *more):
        cut.update(given)
        return texts(self, given, *more)

    monkeypatch.setattr(RowEncoder, "texts", counted)
    result = classifier.evaluate({"data": str(data), "part": "valid"})
    assert sum(cut.values()) == result["sentences"] > 0
    result = classifier.evaluate({"data": str(data), "part": "valid", "max_length": 3})
    assert any("texts were cut at 3 pieces" in note for note in result["notes"])
