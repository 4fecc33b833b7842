"""One word in several texts: what its vectors are, and how they move apart layer by layer."""

import json
from pathlib import Path

import pytest
import torch

import regard
from regard.cli import main
from regard.errors import UsageError
from regard.insight.words import plane, read_words

TEXTS = ["an apple and an orange", "an apple watch"]


@pytest.fixture(scope="module")
def masked(tmp_path_factory) -> Path:
    """Return a small encoder of texts."""
    home = tmp_path_factory.mktemp("words")
    words = [*TEXTS[0].split(), "watch", "pear", "red", "the", "tree", "sits", "by"]
    rows = [" ".join(words[(3 * n + k * k) % len(words)] for k in range(8)) for n in range(200)]
    (home / "book.txt").write_text("\n".join(rows))
    how = {"depth": 2, "width": 16, "heads": 2, "ffn_width": 32, "pieces": 300, "context": 16}
    how |= {"steps": 2, "valid_every": 2, "batch_tokens": 128, "lr": 0.01, "threads": 1}
    how |= {"data": home / "book.txt", "objective": "masked", "quiet": True}
    regard.train("language", out=home / "run", **how)
    return home / "run"


def test_a_word_begins_the_same_and_moves_apart(masked):
    model = regard.load(masked)
    torch.manual_seed(0)
    for weight in model.model.parameters():  # so that it attends to something
        weight.data += 0.3 * torch.randn_like(weight)
    drawing = regard.look(model, TEXTS, word="apple")
    (apart, _) = drawing.numbers.values()
    assert list(apart) == ["embedding", "layer 1", "layer 2"]
    assert apart["embedding"] == pytest.approx(1, abs=1e-6)  # the same word at the same place
    assert apart["layer 2"] < 0.999
    same = regard.look(model, [TEXTS[0]] * 2, word="apple").numbers["apple in text 1 and 2"]
    assert list(same.values()) == pytest.approx([1, 1, 1], abs=1e-6)


def test_vectors_are_those_that_the_model_makes(masked):
    model = regard.load(masked)
    read = read_words(model, TEXTS[1])
    assert [word.strip() for word in read.words] == TEXTS[1].split()
    tokenizer = model.codec.tokenizer
    ids = tokenizer.frame(tokenizer.encode(TEXTS[1]))
    before = len(tokenizer.around("encoder")[0])
    pieces = [len(x) for x in tokenizer.encode_words(TEXTS[1].split())]
    begin = before + pieces[0]
    with torch.no_grad():
        table = model.model.embed.tokens.weight[ids[begin : begin + pieces[1]]]
    assert torch.allclose(read.static[1], table.mean(0), atol=1e-6)
    assert len(read.layers) == 3 and read.layers[0].shape == (3, 16)


def test_a_causal_model_cannot_know_what_comes(tmp_path):
    drawing = regard.look("shakespeare", TEXTS, word="apple", out=tmp_path / "apple.png")
    (same, _) = drawing.numbers.values()
    assert list(same.values()) == pytest.approx([1] * len(same), abs=1e-5)
    after = ["the red apple is here", "the old apple is here"]
    (apart, _) = regard.look("shakespeare", after, word="apple").numbers.values()
    assert apart["embedding"] == pytest.approx(1, abs=1e-5) and min(apart.values()) < 0.999


def test_points_keep_the_distances_of_a_plane():
    points = torch.randn(7, 2)
    turned = torch.linalg.qr(torch.randn(5, 5)).Q[:2]
    found = plane(points @ turned + 3.0)
    assert torch.allclose(torch.cdist(found, found), torch.cdist(points, points), atol=1e-4)
    assert plane(torch.ones(3, 4)).abs().max() < 1e-6


def test_the_command(masked, tmp_path, capsys):
    out = tmp_path / "apple.html"
    assert main(["look", str(masked), *TEXTS, "word=apple", f"out={out}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(out)
    assert "contextual" in out.read_text()
    wrong = {
        ("look", str(masked), *(9 * TEXTS[:1]), "word=apple"): "give 1 to 8",
        ("look", str(masked), *TEXTS, "word=aple"): "Did you mean 'apple'?",
        ("look", str(masked), *TEXTS, "word=apple", "layers=1"): "unknown key 'layers'",
        ("look", str(masked), "an apple " * 60, "an apple", "word=apple"): "at most",
    }
    for words, told in wrong.items():
        assert main(list(words)) == 2
        error = capsys.readouterr().err
        assert told in error and error.count("\n") == 1


def test_images_have_no_words():
    with pytest.raises(UsageError, match="word="):
        regard.look("fashion", ["a.png", "b.png"], word="apple")


def test_words_lie_in_a_plane_and_what_it_loses_is_told(masked, tmp_path, capsys):
    chosen = "apple orange watch pear"
    drawn = regard.look(masked, words=chosen, out=tmp_path / "words.png")
    vectors = torch.stack([read_words(regard.load(masked), w).static[0] for w in chosen.split()])
    apart, shown = (torch.cdist(x, x).square().sum() for x in (vectors, plane(vectors)))
    assert drawn["numbers"]["lost"]["static vectors"] == pytest.approx(
        1 - float(shown / apart), abs=1e-4
    )
    alike = torch.cosine_similarity(vectors[0], vectors[2], dim=0)
    told = drawn["numbers"]["cosine of apple, watch"]["static vectors"]
    assert told == pytest.approx(float(alike), abs=1e-4)
    wrong = {
        ("look", str(masked), "words=apple orange"): "has 2 words; give 3",
        ("look", str(masked), "an apple", f"words={chosen}"): "words= takes no 'an apple'",
        ("look", "fashion", f"words={chosen}"): "needs a model of texts",
    }
    for command, told in wrong.items():
        assert main(list(command)) == 2
        error = capsys.readouterr().err
        assert told in error and error.count("\n") == 1


def test_words_of_a_translator_are_those_of_its_encoder():
    task = regard.load("en-zh")
    read = read_words(task, "How are you?")
    assert len(read.words) == 3 and len(read.layers) == 1 + len(task.model.encoder)
    drawn = regard.look(task, words="cat dog how you")
    ids = torch.tensor(task.codec.source.encode("you"))
    rows = task.model.source.tokens(ids).detach().mean(0)
    assert torch.allclose(read_words(task, "you").static[0], rows, atol=1e-6)
    assert len(drawn.numbers) == 1 + 6
