"""Laws of labelling words: every word gets one tag, whatever it is cut into or stands beside."""

import json
import random
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import regard
from regard.cli import main
from regard.data.labelled import SentenceFormat, SentenceReader, load_labelled
from regard.data.rows import RowEncoder
from regard.data.tokenize import train_tokenizer
from regard.data.word_windows import sentence_windows, spans, word_places
from regard.errors import UsageError
from regard.metrics.labels import count_units, one_hot
from regard.metrics.score import bootstrap
from regard.tasks.runner import Runner
from regard.tasks.text.tag import JOINS
from tests.zoo import spoilt, write_columns
from tests.zoo import tagged_sentence as sentence


@pytest.fixture(scope="module")
def data(zoo):
    return zoo.data("tag")


@pytest.fixture(scope="module")
def trained(zoo):
    return zoo.model("tag")


@pytest.fixture(scope="module")
def tagger(trained) -> Runner:
    return regard.load(trained)


# What is learnt


def test_a_rule_that_needs_the_word_before_is_learnt_wholly(data, zoo, tmp_path):
    trained = zoo.copy("tag", tmp_path / "run")
    result = regard.evaluate(str(trained), data=str(data))
    assert {s.name: s.value for s in result.scores}["accuracy"] == 100.0
    assert sum(row.support for row in result.classes) == result.sentences
    assert result.of == "words" and not result.errors
    assert "bootstrap over 30 sentences" in result.scores[0].signature
    kept = json.loads((trained / "scores.jsonl").read_text().splitlines()[-1])
    assert np.array(kept["confusion"]).trace() == result.sentences


# Answers


def test_every_word_has_one_tag_and_neighbours_never_matter(tagger):
    chance = random.Random(5)
    texts = [" ".join(w for w, _ in sentence(chance)) for _ in range(17)]
    texts += ["", "unheard-of Wörter ☃ here", "the dog " * 60]
    together = tagger.run(texts, words="spaces")
    small = tagger.run(texts, words="spaces", batch_rows=2, batch_tokens=30)
    for text, whole, part in zip(texts, together, small, strict=True):
        alone = tagger.run(text, words="spaces")
        assert list(whole.words) == text.split() and len(whole.tags) == len(whole.words)
        assert alone.tags == whole.tags == part.tags
        assert alone.probabilities == pytest.approx(whole.probabilities, abs=1e-5)
        assert part.probabilities == pytest.approx(whole.probabilities, abs=1e-5)
    chances = np.concatenate(
        tagger.predictor.word_probabilities([text.split() for text in texts], tagger.check({}))
    )
    assert chances.sum(1) == pytest.approx(1.0, abs=1e-5)


def test_words_given_as_a_list_are_tagged_like_those_of_a_text(tagger):
    one, (two,) = tagger.run("they walk ."), tagger.run([["they", "walk", "."]])
    assert one.tags == two.tags == ["PRON", "VERB", "PUNCT"]
    (spaced,) = tagger.run([["New York", "sleeps"]])
    assert len(spaced.tags) == 2
    for bad in ([["a", ""]], [["a", 3]], [7]):
        with pytest.raises(UsageError, match="neither text nor words"):
            tagger.run(bad)


def test_raw_text_is_split_into_words_and_signs(tagger):
    answer = tagger.run("They walk.", words="raw")
    assert answer.words == ["They", "walk", "."]
    with pytest.raises(UsageError, match="unknown words 'row'.*Did you mean 'raw'"):
        tagger.check({"words": "row"})


def test_every_format_says_the_same(tagger):
    text = "the dog sits"
    wanted = [("the", "DET"), ("dog", "NOUN"), ("sits", "VERB")]

    def lines(**settings):
        how = tagger.check(settings)
        return list(tagger.run(text, **settings).lines(how))

    assert lines() == ["the/DET dog/NOUN sits/VERB"]
    assert lines(format="columns") == [f"{word}\t{tag}" for word, tag in wanted] + [""]
    (line,) = lines(format="jsonl", scores=True)
    record = json.loads(line)
    assert list(zip(record["words"], record["tags"], strict=True)) == wanted
    rows = [row.split("\t") for row in lines(format="columns", scores=True)[:-1]]
    assert [float(row[2]) for row in rows] == pytest.approx(record["probabilities"], abs=1e-4)


def test_gold_tags_are_kept_and_answers_of_an_evaluation_are_written(
    trained, data, tmp_path, capsys
):
    row = {"text": "a walk", "tags": ["X", "Y"]}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["run", str(trained), str(tmp_path / "in.jsonl")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tags"] == ["X", "Y"] and told["prediction"] == ["DET", "NOUN"]
    result = regard.evaluate(str(trained), data=str(data), outputs=tmp_path / "out.jsonl")
    full = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    pairs = [p for row in full for p in zip(row["tags"], row["prediction"], strict=True)]
    assert 100 * sum(a == b for a, b in pairs) / len(pairs) == pytest.approx(result["accuracy"])
    regard.evaluate(str(trained), data=str(data), outputs=tmp_path / "out.txt")
    assert "/" in (tmp_path / "out.txt").read_text().split()[0]


def test_a_picture_shows_every_layer_and_the_chances_of_tags(tagger):
    picture = tagger.picture("they walk .")
    (view,) = picture.views
    assert np.allclose(view.weights.sum(-1), 1, atol=1e-5)
    assert [step.token for step in picture.steps] == ["PRON", "VERB", "PUNCT"]
    assert [tag for tag in view.writes if tag][0] == "PRON" and view.writes[0] == ""
    for step in picture.steps:
        chances = [p for _, p in step.candidates]
        assert chances == sorted(chances, reverse=True) and chances[0] == step.probability


# Pieces, words and windows


@given(some.lists(some.integers(1, 9), min_size=1, max_size=40), some.integers(1, 20))
def test_windows_tag_every_word_once_and_never_hold_too_much(sizes, room):
    found = spans(sizes, room)
    tagged = [i for w in found for i in range(w.tag_from, w.tag_to)]
    assert tagged == list(range(len(sizes)))
    for window in found:
        assert window.first <= window.tag_from < window.tag_to <= window.last
        assert sum(min(size, room) for size in sizes[window.first : window.last]) <= room
    if sum(sizes) <= room:
        assert len(found) == 1


def test_a_word_in_a_long_text_is_seen_with_what_stands_around_it():
    for window in spans([1] * 500, 40)[1:-1]:
        assert window.tag_from - window.first >= 10 and window.last - window.tag_to >= 10


def test_a_window_is_tagged_as_if_it_were_all(tagger):
    words = ("the dog runs they walk a walk . " * 6).split()
    (whole,) = tagger.predictor.word_probabilities([words], tagger.check({"max_length": 16}))
    parts = sentence_windows(tagger.codec.encoder, words, 16)
    assert len(parts) > 2
    for _, _, window, _ in parts:
        (alone,) = tagger.predictor.word_probabilities(
            [words[window.first : window.last]], tagger.check({})
        )
        kept = alone[window.tag_from - window.first : window.tag_to - window.first]
        assert kept == pytest.approx(whole[window.tag_from : window.tag_to], abs=1e-5)


@pytest.mark.parametrize("join", sorted(JOINS))
def test_vectors_of_pieces_become_those_of_words_as_in_a_loop(join):
    tokenizer = train_tokenizer(["the dog runs under houses"] * 3, vocab=310)
    encoder = RowEncoder(tokenizer)
    sentences = [["dogs", "run"], ["underhouse"], ["the", "unknown", "house"]]
    parts = [sentence_windows(encoder, words, 64)[0] for words in sentences]
    width = max(len(part.row.ids) for part in parts)
    x = torch.randn(len(parts), width, 5, dtype=torch.float64)
    found = JOINS[join](x.flatten(0, 1), word_places(parts, width))
    wanted = []
    for row, words in zip(x, sentences, strict=True):
        sizes = [len(tokenizer.encode(word)) for word in words]
        for start, size in zip(accumulate([1, *sizes]), sizes, strict=False):
            pieces = row[start : start + size]
            wanted.append(pieces[0] if join == "first" else pieces.mean(0))
    torch.testing.assert_close(found, torch.stack(wanted))


def test_words_of_a_sentence_are_drawn_together():
    wanted = one_hot([0] * 40, 2)
    found = one_hot([0] * 20 + [1] * 20, 2)
    apart = bootstrap([count_units(wanted, found).f1], 40, 500)[0].std()
    of = np.repeat(np.arange(4), 10)  # two sentences all right, two all wrong
    together = bootstrap([count_units(wanted, found, of).f1], 4, 500)[0].std()
    assert together > 2 * apart


# Files

CONLLU = """# sent_id = 1
# text = Don't go.
1-2\tDon't\t_\t_\t_\t_\t_\t_\t_\t_
1\tDo\tdo\tAUX\tVB\t_\t3\taux\t_\tSpaceAfter=No
2\tn't\tnot\tPART\tRB\t_\t3\tadvmod\t_\t_
2.1\tx\tx\tX\tX\t_\t_\t_\t_\t_
3\tgo\tgo\tVERB\tVB\t_\t0\troot\t_\t_

1\t#\t#\tSYM\t$\t_\t0\troot\t_\t_
"""
WANTED = [(("Do", "n't", "go"), ("AUX", "PART", "VERB")), (("#",), ("SYM",))]


def read(path, **settings):
    notes: list[str] = []
    reader = SentenceReader(SentenceFormat(**settings))
    return [(s.words, s.tags) for s in reader.read(path, notes)], notes


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.conllu", CONLLU),
        ("a.txt", CONLLU),
        ("a.tsv", "Do\tAUX\nn't\tPART\ngo\tVERB\n\n\n#\tSYM\n"),
        ("a.txt", "\nDo AUX\nn't PART\ngo VERB\n\n# SYM"),
        (
            "a.jsonl",
            '{"words": ["Do", "n\'t", "go"], "tags": ["AUX", "PART", "VERB"]}\n'
            '{"tokens": ["#"], "tags": ["SYM"]}\n',
        ),
    ],
)
def test_every_form_of_a_file_gives_the_same_words(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content)
    assert read(path)[0] == WANTED


def test_the_column_of_the_tag_can_be_chosen(tmp_path):
    path = tmp_path / "a.conllu"
    path.write_text(CONLLU)
    assert read(path, column="xpos")[0][0][1] == ("VB", "RB", "VB")
    assert read(path, column="8")[0][0][1] == ("aux", "advmod", "root")
    with pytest.raises(UsageError, match="unknown column 'upso'.*Did you mean 'upos'"):
        read(path, column="upso")
    path = tmp_path / "a.txt"
    path.write_text("-DOCSTART- -X- -X- O\n\nEU NNP B-NP B-ORG\n")
    found, notes = read(path)
    assert found == [(("EU",), ("B-ORG",))] and "4 columns, of which the last" in notes[0]
    assert read(path, column="2")[0] == [(("EU",), ("NNP",))]
    with pytest.raises(UsageError, match="column=9; expected a number from 2 to 4"):
        read(path, column="9")


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.conllu", "1\ta\ta\tDET\n", r"a\.conllu:1: 4 columns, expected 10"),
        ("a.conllu", CONLLU.replace("\tVERB", "\t_"), r"a\.conllu:7: no word or no upos"),
        ("a.conllu", CONLLU.replace("3\tgo", "x\tgo"), r"a\.conllu:7: 'x' is not a word number"),
        ("a.tsv", "a\tDET\ndog\n", r"a\.tsv:2: 1 column, expected 2"),
        ("a.tsv", "a\tDET\n\tNOUN\n", r"a\.tsv:2: no word or no tag"),
        ("a.txt", "a DET\nbig dog NOUN\n", r"a\.txt:2: 3 columns, expected 2"),
        ("a.jsonl", '{"words": ["a"], "tags": []}', r"a\.jsonl:1: 1 words, but 0 tags"),
        ("a.jsonl", '{"words": "a", "tags": ["X"]}', r"a\.jsonl:1: no list of words"),
    ],
)
def test_a_bad_line_is_told_with_its_file_and_number(tmp_path, name, content, told):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UsageError, match=told):
        read(path)


def test_a_bad_sentence_is_left_out_whole_if_so_wished(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("a\tDET\ndog\nruns\n\nthe\tDET\n\nx\n\nwe\tPRON\n")
    found, notes = read(path, skip_bad=True)
    assert found == [(("the",), ("DET",)), (("we",), ("PRON",))]
    assert "2 bad rows" in notes[-1] and "a.tsv:2" in notes[-1]


def test_tags_that_train_does_not_know_are_refused_with_the_nearest(tmp_path):
    write_columns(tmp_path / "train.tsv", 20, 1)
    (tmp_path / "dev.tsv").write_text("the\tDET\ndog\tNUON\n")
    with pytest.raises(UsageError, match=r"dev\.tsv:1: label 'NUON' does not occur in train"):
        regard.train("tag", data=str(tmp_path), out=str(tmp_path / "run"), quiet=True, steps=1)


def test_a_folder_that_lies_is_refused(trained, tmp_path):
    for change, told in (
        ({"labels": ["A"]}, "1 labels, but the model tells 5 apart"),
        ({"join": "last"}, "'join' is 'last'; choose from first, mean"),
        ({"join": ["first"]}, "'join' is"),
        ({"task": "classify"}, "a head of 'tag', which labels no texts"),
    ):
        with pytest.raises(UsageError, match=told):
            regard.load(spoilt(trained, tmp_path, **change))


def test_ewt_is_read_as_it_is(real_data):
    reader = SentenceReader(SentenceFormat())
    found = load_labelled(str(real_data / "ud-en-ewt"), reader, need=("valid",)).parts["valid"]
    assert len(found) == 2001 and sum(len(s.words) for s in found) == 25147
    assert len({tag for s in found for tag in s.tags}) == 17
