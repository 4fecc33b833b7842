"""Text to text: what is taken out can be put back, prefixes reach the model, scores are right."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard.data.denoising import (
    corrupt_spans,
    cut_texts,
    infill,
    permute_parts,
    sentinels_of,
)
from regard.data.pairs import load_pairs
from regard.data.tokenize import train_tokenizer
from regard.errors import UsageError
from regard.insight.causes import causes
from regard.layers.block import BlockConfig
from regard.metrics.text import TEXT_METRICS, answer, longest_common, normalise, rouge
from regard.models import preset
from regard.models.transformer import PRESETS, Transformer, TransformerConfig
from regard.tasks.prepare import prepare
from regard.tasks.runner import Runner
from regard.tasks.text.sequence import PairCodec
from regard.tasks.text.text import TEXT_TO_TEXT, lead, with_prefixes
from tests.zoo import ANIMALS, plain_text, spoilt
from tests.zoo import ERRAND_WORDS as WORDS

SENTINELS = list(range(1000, 1100))

# ---- text made worse on purpose


def restore_spans(left, taken, sentinels) -> list[int]:
    """Put the spans that were taken out of a text back into their places."""
    spans: dict[int, list[int]] = {}
    name = None
    for number in map(int, taken):
        if number in sentinels:
            name = number
            spans[name] = []
        elif name is not None:
            spans[name].append(number)
    return [piece for number in map(int, left) for piece in spans.get(number, [number])]


@given(st.integers(2, 300), st.integers(0, 2**32), st.floats(0.01, 0.9), st.floats(1, 10))
@settings(max_examples=100, deadline=None)
def test_what_is_left_and_what_was_taken_are_the_whole_text(n, seed, share, mean):
    ids = np.random.default_rng(seed).integers(0, 900, n)
    left, taken = corrupt_spans(ids, SENTINELS, seed, share=share, mean=mean)
    assert restore_spans(left, taken, SENTINELS) == ids.tolist()
    names = [i for i in left.tolist() if i in SENTINELS]
    assert names == SENTINELS[: len(names)]  # in their order, each once
    # the target names one more, which ends the last span
    assert [i for i in taken.tolist() if i in SENTINELS] == SENTINELS[: len(names) + 1]
    assert taken[0] == SENTINELS[0] and taken[-1] == SENTINELS[len(names)]
    # no two spans touch, or they would be one
    assert not any(a in SENTINELS and b in SENTINELS for a, b in zip(left, left[1:], strict=False))
    gone = len(ids) - (len(left) - len(names))
    assert gone == min(max(1, round(n * share)), n - 1)


def test_spans_are_as_long_and_as_many_as_the_paper_has_them():
    ids, lengths = np.arange(900) % 900, []
    for seed in range(50):
        left, taken = corrupt_spans(ids[:512], SENTINELS, seed)
        spans = sum(i in SENTINELS for i in left.tolist())
        assert len(taken) - spans - 1 == round(0.15 * 512)
        lengths.append((len(taken) - spans - 1) / spans)
    assert np.mean(lengths) == pytest.approx(3, rel=0.05)
    places = {int(np.argmax(corrupt_spans(ids[:20], SENTINELS, s)[0] >= 1000)) for s in range(200)}
    assert len(places) > 12 and 0 in places  # anywhere, the beginning too


@given(st.integers(0, 200), st.integers(0, 2**32), st.floats(0.01, 0.9), st.floats(1, 10))
@settings(max_examples=100, deadline=None)
def test_infilling_keeps_the_rest_in_order(n, seed, share, mean):
    ids = np.arange(n)
    spoilt = infill(ids, -1, seed, share=share, mean=mean)
    rest = spoilt[spoilt >= 0]
    assert (np.diff(rest) > 0).all()
    assert len(rest) >= n - round(n * share)
    assert len(spoilt) <= n
    assert not ((spoilt[1:] < 0) & (spoilt[:-1] < 0)).any()


def test_infilling_masks_spans_of_any_length_by_one():
    spans, masks, gone = [], 0, 0
    for seed in range(100):
        spoilt = infill(np.arange(1, 301), 0, seed)
        rest = [0, *spoilt[spoilt > 0].tolist(), 301]
        masks += int((spoilt == 0).sum())
        gone += 300 - len(rest) + 2
        spans += [b - a - 1 for a, b in zip(rest, rest[1:], strict=False) if b - a > 1]
    assert gone == 100 * 90
    assert gone / masks == pytest.approx(3, rel=0.1)
    # one in twenty is empty (e^-3), which is then a mask in the place of nothing
    assert 1 - len(spans) / masks == pytest.approx(np.exp(-3), rel=0.5)
    assert max(spans) > 6


def test_the_same_seed_spoils_alike():
    for spoil in (
        lambda s: corrupt_spans(range(99), SENTINELS, s)[0],
        lambda s: infill(range(99), 1000, s),
    ):
        one, two, other = (spoil(seed).tolist() for seed in (3, 3, 4))
        assert one == two != other


def test_sentences_are_permuted_as_wholes():
    ids, lengths = list(range(10)), [3, 1, 4, 2]
    parts = {(0, 1, 2), (3,), (4, 5, 6, 7), (8, 9)}
    orders = set()
    for seed in range(300):
        mixed = permute_parts(ids, lengths, seed).tolist()
        assert sorted(mixed) == ids
        found = [part for part in parts if mixed[mixed.index(part[0]) :][: len(part)] == [*part]]
        assert len(found) == 4
        orders.add(tuple(mixed))
    assert len(orders) == 24


def test_a_text_that_cannot_be_spoilt_is_a_mistake():
    with pytest.raises(UsageError, match="needs 2 of each"):
        corrupt_spans([5], SENTINELS, 0)
    with pytest.raises(UsageError, match="needs 2 of each"):
        corrupt_spans([5, 6], SENTINELS[:1], 0)
    with pytest.raises(UsageError, match="sentinels of its own"):
        corrupt_spans([5, 1000], SENTINELS, 0)


TEXTS = [
    "One is here. Two came.  Three left!\n\nFour? He said: 5. 你好。再见。 No stop at the end\n",
    "  A text that begins with space. And goes on.",
    "",
    "word " * 50,
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([*TEXTS, "copy other summarize: red blue dog cat."], vocab=330)


@pytest.mark.parametrize("longest", [3, 17, 1000])
def test_stretches_of_a_text_are_all_of_it(tokenizer, longest: int, monkeypatch):
    for block in (30, 500_000):
        monkeypatch.setattr("regard.data.documents.CHUNK_CHARACTERS", block)
        for one in TEXTS:
            rows = list(cut_texts([one], tokenizer, longest))
            assert tokenizer.decode(i for ids, _ in rows for i in ids) == one
            assert all(0 < len(ids) <= longest and sum(n) == len(ids) for ids, n in rows)
    (ids, lengths), *_ = cut_texts(TEXTS[:1], tokenizer, 1000)
    sentences = [tokenizer.decode(s) for s in np.split(ids, np.cumsum(lengths)[:-1])]
    assert sentences[:2] == ["One is here.", "Two came."] and "你好。" in sentences


# ---- scores


def test_rouge_by_hand():
    # unigrams: the, cat, sat against the, cat, was, sat, down: 3 shared, of 3 and of 5
    found = rouge("The cat sat.", "the cat was sat down")
    assert found["ROUGE-1"] == pytest.approx(2 * (3 / 3) * (3 / 5) / (3 / 3 + 3 / 5))
    # bigrams: the cat, cat sat against the cat, cat was, was sat, sat down: 1 of 2 and of 4
    assert found["ROUGE-2"] == pytest.approx(2 * (1 / 2) * (1 / 4) / (1 / 2 + 1 / 4))
    assert found["ROUGE-L"] == pytest.approx(0.75)  # the, cat, sat
    # a word counts as often as both have it
    assert rouge("the the the", "the the cat")["ROUGE-1"] == pytest.approx(2 / 3)
    # order matters to ROUGE-L alone
    assert rouge("a b c", "c b a") == {
        "ROUGE-1": 1.0,
        "ROUGE-2": 0.0,
        "ROUGE-L": pytest.approx(1 / 3),
    }
    for empty in ("", "?!"):
        assert set(rouge(empty, "a").values()) == set(rouge("a", empty).values()) == {0.0}
    assert rouge("猫在睡觉", "猫睡觉了")["ROUGE-L"] == pytest.approx(0.75)  # 3 of 4 characters
    assert set(rouge("Über-groß_7", "über groß 7").values()) == {1.0}


@given(st.lists(st.sampled_from("abcd"), max_size=70), st.lists(st.sampled_from("abcd")))
@settings(max_examples=100, deadline=None)
def test_the_longest_common_sequence_is_that_of_the_table(one, two):
    table = np.zeros((len(one) + 1, len(two) + 1), int)
    for i, a in enumerate(one):
        for j, b in enumerate(two):
            same = table[i, j] + 1
            table[i + 1, j + 1] = same if a == b else max(table[i, j + 1], table[i + 1, j])
    assert longest_common(one, two) == table[-1, -1]


def test_answers_by_hand():
    assert normalise(" The  cat's a Theme, an ANT. ") == "cats theme ant"
    assert answer("The Cat!", "a cat") == {"exact match": 1.0, "F1": 1.0}
    # big, red against red, dog, house: 1 of 2 and of 3
    assert answer("big red", "the red dog house")["F1"] == pytest.approx(2 / 5)
    assert answer("the the", "the") == {"exact match": 1.0, "F1": 1.0}  # nothing but articles
    assert answer("", "a dog") == answer("dog", "the") == {"exact match": 0.0, "F1": 0.0}
    assert answer("", "the") == {"exact match": 1.0, "F1": 1.0}


def test_the_nearest_of_several_references_counts():
    judged = TEXT_METRICS["answers"].score(["Paris", "four"], [["London", "4"], ["paris", "five"]])
    assert [(s.name, s.value) for s in judged] == [("exact match", 50.0), ("F1", 50.0)]
    assert judged[0].signature == "nrefs:2|norm:SQuAD"
    names = {
        name: [s.name for s in TEXT_METRICS[name].score(["a b"], [["a b"]])]
        for name in TEXT_METRICS
    }
    assert names["rouge"] == ["ROUGE-1", "ROUGE-2", "ROUGE-L"]
    assert all(TEXT_METRICS[name].main in names[name] for name in TEXT_METRICS)


def test_a_difference_is_judged_by_chance():
    rand = np.random.default_rng(0)
    right = [f"word{i}" for i in range(200)]
    good = [w if rand.random() < 0.8 else "x" for w in right]
    alike = [w if rand.random() < 0.8 else "x" for w in right]
    bad = [w if rand.random() < 0.5 else "x" for w in right]
    exact = lambda a, b: TEXT_METRICS["answers"].compare(a, b, [right], samples=500)[0]  # noqa: E731
    assert exact(good, good).p == 1.0
    assert exact(good, bad).p < 0.01 < exact(good, alike).p
    found = exact(good, bad)
    assert found.low < found.ours < found.high and found.theirs < found.low
    assert found.high - found.low == pytest.approx(2 * 1.96 * 40 / 200**0.5, rel=0.3)


def test_what_cannot_be_judged_is_a_mistake():
    for name in TEXT_METRICS:
        with pytest.raises(UsageError, match="no outputs"):
            TEXT_METRICS[name].score([], [[]])
    with pytest.raises(UsageError, match="2 outputs for 1 references"):
        TEXT_METRICS["rouge"].score(["a", "b"], [["a"]])
    with pytest.raises(UsageError, match="metric=bleu"):
        TEXT_METRICS["rouge"].score(["a"], [["a"]], lowercase=True)


# ---- prefixes


def test_a_word_becomes_a_prefix():
    assert lead("summarize") == "summarize: " and lead("") == ""
    assert lead("translate English to German: ") == "translate English to German: "
    assert lead("Q:") == "Q:" and lead("总结：") == "总结："


ROWS_OF_TASKS = [("copy", "red dog", "red dog"), ("", "blue cat", "cat"), ("other", "a b", "x")]


@pytest.mark.parametrize("name", ["pairs.tsv", "pairs.jsonl"])
def test_a_row_may_name_its_task(tmp_path: Path, name: str):
    path = tmp_path / name
    if name.endswith("tsv"):
        rows = [("task", "input", "output"), *ROWS_OF_TASKS]
        path.write_text("".join("\t".join(row) + "\n" for row in rows))
    else:
        keys = ("task", "input", "output")
        rows = [dict(zip(keys, row, strict=True)) for row in ROWS_OF_TASKS]
        del rows[1]["task"]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = with_prefixes(load_pairs(path, need=("test",)), "plain")
    assert [pair.source for pair in corpus.parts["test"]] == [
        "copy: red dog",
        "plain: blue cat",
        "other: a b",
    ]
    assert [pair.target for pair in corpus.parts["test"]] == ["red dog", "cat", "x"]


def test_a_file_without_tasks_has_the_prefix_of_all(tmp_path: Path):
    path = tmp_path / "pairs.tsv"
    path.write_text("task\ta word\nhouse\ta home\n")  # no header, but words
    corpus = with_prefixes(load_pairs(path, need=("test",)), "")
    assert [pair.source for pair in corpus.parts["test"]] == ["task", "house"]
    (tmp_path / "test.en").write_text("a\nb\n")
    (tmp_path / "test.de").write_text("c\nd\n")
    corpus = load_pairs(tmp_path, source="en", target="de", need=("test",))
    sources = [pair.source for pair in with_prefixes(corpus, "say").parts["test"]]
    assert sources == ["say: a", "say: b"]


# ---- training and running

SMALL = {**ANIMALS["text"].settings}
for key in ("steps", "valid_every", "metric", "threads"):
    del SMALL[key]


@pytest.fixture(scope="module")
def folder(zoo) -> Path:
    return zoo.data("text")


@pytest.fixture(scope="module")
def trained(zoo) -> Path:
    """A model of the pairs."""
    return zoo.model("text")


def test_the_prefix_says_what_to_do(trained: Path):
    model = regard.load(trained)
    assert model.task is TEXT_TO_TEXT
    for word in WORDS:
        copied, denied, spelt = (
            str(model.run(text, prefix=prefix))
            for text, prefix in ((word, "copy"), (word, "deny"), (f"copy: {word}", ""))
        )
        assert (copied, denied) == (word, "no")
        assert spelt == copied
    likely, unlikely = model.score([("dog", "dog"), ("dog", "no")], prefix="copy")
    assert likely.score > unlikely.score and likely.text == "dog"
    (forced,) = model.run(["dog\tdog"], prefix="copy", forced=True)
    assert forced.score == pytest.approx(likely.score)
    assert [str(a) for a in model.run(["", "  "])] == ["", "  "]
    picture = model.picture("dog", prefix="copy")
    assert picture.output == "dog" and "cop" in "".join(picture.views[0].column_tokens)


def test_the_cause_of_an_answer_is_the_prefix_or_what_it_says_to_read(trained: Path):
    model, lost = regard.load(trained), {}
    for word in WORDS:
        for prefix in ("deny", "copy"):
            found = causes(model, word, prefix=prefix, cut="tokens")
            at = ["".join(found.tokens[: n + 1]) for n in range(len(found.tokens))]
            before = next(n for n, text in enumerate(at) if ":" in text)
            lost[prefix, word] = found.effects[:before].max(), found.effects[before + 1 :].max()
    # "no" is written for any word, but for no other prefix
    assert all(lost["deny", word][0] > 3 for word in WORDS)
    assert all(abs(lost["deny", word][1]) < 0.5 for word in WORDS)
    copied = sum(lost["copy", word][1] for word in WORDS)
    assert copied > 5 * sum(lost["deny", word][1] for word in WORDS) and copied > len(WORDS)


def test_a_test_set_is_judged_with_the_tasks_of_its_rows(trained: Path, folder: Path):
    found = regard.evaluate(trained, data=str(folder), part="valid")
    assert [score.name for score in found.scores] == ["exact match", "F1"]
    assert found.scores[0].value > 90 and found.sentences == 40
    summary = regard.evaluate(trained, data=str(folder), part="valid", metric="rouge", beam=1)
    assert summary.scores[2].name == "ROUGE-L" and "ROUGE-L" in str(summary)
    assert summary.made_with["beam"] == 1
    twice = regard.evaluate(trained, data=str(folder), part="valid", against=trained)
    assert [c.p for c in twice.comparison] == [1.0, 1.0]
    with pytest.raises(UsageError, match="unknown metric 'rogue'.*Did you mean 'rouge'"):
        regard.evaluate(trained, data=str(folder), part="valid", metric="rogue")


@pytest.mark.parametrize("objective,like", [("spans", "t5"), ("noise", "bart")])
def test_plain_text_is_mended(folder: Path, tmp_path: Path, objective: str, like: str):
    (tmp_path / "plain.txt").write_text(plain_text())
    values = {**SMALL, "data": str(tmp_path / "plain.txt"), "objective": objective, "like": like}
    values |= {"max_length": 40}
    (tmp_path / "prepared").mkdir()
    run = prepare(TEXT_TO_TEXT, {**values, "steps": 1, "out": str(tmp_path / "prepared")})
    texts, batches, model = run.data, run.lesson.batches, run.runner.model
    tokenizer, marks = run.runner.codec.source, batches.sentinels
    assert min(marks.spans) == tokenizer.vocab
    assert max(marks.spans) < model.config.source_vocab
    seen = 0
    for n in (0, 1, 2):
        batch, again = batches[n], batches[n]
        assert torch.equal(batch.source, again.source) and torch.equal(batch.reads, again.reads)
        for source, length, writes in zip(
            batch.source, batch.source_lengths, batch.writes, strict=True
        ):
            left, goal = source[: length - 1].tolist(), writes[writes >= 0][:-1].tolist()
            if objective == "spans":
                whole = restore_spans(left, goal, marks.spans)
            else:
                whole = goal
                assert marks.mask in left and set(left) <= {*goal, marks.mask}
            assert tokenizer.decode(whole) in texts.parts["train"][0]
            seen += 1
    assert seen > 20
    report = regard.train("text", quiet=True, steps=30, out=str(tmp_path / "run"), **values)
    assert report.finished and 0 < report.scores["loss"] < 5
    # what is written holds no marks, and the model goes on to learn from pairs
    answers = regard.load(tmp_path / "run").run(["Red dog"], max_length=8)
    assert len(answers) == 1
    tuned = {"data": str(folder), "init": str(tmp_path / "run"), "steps": 2, "valid_sentences": 2}
    report = regard.train("text", quiet=True, out=str(tmp_path / "tuned"), **tuned)
    assert report.finished
    config = json.loads((tmp_path / "tuned" / "config.json").read_text())
    assert config["model"]["position"] == PRESETS[like].position


@pytest.mark.parametrize(
    "values,words",
    [
        ({"like": "barth"}, "unknown preset 'barth'.*Did you mean 'bart'"),
        ({"like": "t5", "init": "runs/x"}, "like=t5 is for a new model"),
        ({"share": 0}, "share=0.0 is too small"),
        ({"share": 1}, "share=1.0 is too large"),
        ({"mean_span": 0.5}, "mean_span=0.5 is too small"),
        ({"objective": "noise", "bpe_dropout": 0.1}, "without bpe_dropout"),
    ],
)
def test_bad_settings_are_refused(values: dict, words: str):
    with pytest.raises(UsageError, match=words) as error:
        TEXT_TO_TEXT.resolve({"data": "x", **values})
    assert "\n" not in str(error.value)


def writer(tokenizer, **changes) -> Runner:
    block = BlockConfig(width=16, heads=2, ffn_width=16)
    torch.manual_seed(0)
    shape = TransformerConfig(tokenizer.vocab, tokenizer.vocab, 1, 1, block, **changes)
    return TEXT_TO_TEXT.bind(Transformer(shape).eval(), PairCodec(tokenizer, tokenizer), {})


def test_learned_positions_bound_what_is_read_and_written(tokenizer, capsys):
    model = writer(tokenizer, position="learned", max_length=20)
    (told,) = model.run(["red dog " * 40], beam=1)
    assert "is read only up to 19" in capsys.readouterr().err
    assert str(told) and model.check({}).max_length == 19
    with pytest.raises(UsageError, match="max_length=20 is more than the 19"):
        model.check({"max_length": 20})
    free = writer(tokenizer, max_length=20)
    free.run(["red dog " * 40], beam=1, max_length=30)
    assert capsys.readouterr().err == ""


def test_a_model_without_marks_cannot_mend(tokenizer):
    with pytest.raises(UsageError, match=r"no tokens to mark.*\(0 found\)"):
        sentinels_of(tokenizer, tokenizer.vocab, 100)
    assert sentinels_of(tokenizer, tokenizer.vocab + 1, 1).mask == tokenizer.vocab


@pytest.mark.parametrize(
    "change,words",
    [
        ({"prefix": 3}, "'prefix' is 3"),
        ({"prefix": "x" * 2000}, "not a short text"),
        ({"metric": "x"}, "unknown metric 'x'"),
        ({"to": 5}, "'to' is 5"),
    ],
)
def test_a_bad_config_is_refused(trained: Path, tmp_path: Path, change: dict, words: str):
    with pytest.raises(UsageError, match=words) as error:
        regard.load(spoilt(trained, tmp_path, **change))
    assert str(tmp_path / "config.json") in str(error.value)


def test_rows_have_the_sizes_of_a_name():
    for row in PRESETS:
        config = preset("transformer", "tiny", row)
        assert (config.block.width, config.encoder_depth) == (128, 4)
        assert config.position == PRESETS[row].position
        with torch.device("meta"):
            Transformer(config)
    with pytest.raises(UsageError, match="Did you mean 'bart'"):
        preset("transformer", "tiny", "brat")
