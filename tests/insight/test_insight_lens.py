"""Lens, patching and misconceptions: identities, and what is known by construction."""

import json

import numpy as np
import pytest
import torch

import regard
from regard.attention.multihead import MultiHead
from regard.cli import main
from regard.gallery.misconceptions import memory_losses, nearest_keys, question_for
from regard.insight.causes import attending
from regard.insight.lens import find_lens, residual_stream
from regard.insight.patching import find_patches
from regard.modalities.tokens import text_keys
from regard.tasks.frame.question import Question

TEXT, OTHER = "I like green tea.", "I like green fish."


@pytest.fixture(scope="module")
def translator():
    return regard.load("en-zh")


def test_the_lens_of_the_last_layer_is_the_model():
    model = regard.load("shakespeare")
    asked = model.look_settings({"forced": True})
    seen, (whole_picture, *_) = find_lens(model, "ROMEO: I", asked)
    question = model.question("ROMEO: I", asked)
    with torch.inference_mode():
        whole = question.logprobs(1)[0]
    assert np.allclose(seen.probabilities[-1], whole.max(-1).values.exp(), atol=1e-5)
    assert [question.spell(int(n)) for n in whole.argmax(-1)] == list(seen.guesses[-1])
    assert seen.layers == [f"blocks.{n}" for n in range(4)]
    (table,) = whole_picture.tables  # in which the last is on top
    assert table.rows == seen.layers[::-1] and table.texts == [*map(list, seen.guesses[::-1])]
    assert np.array_equal(table.values, seen.probabilities[::-1])


def test_the_class_lens_tells_a_label_after_each_layer():
    model = regard.load("fashion")
    photo = np.zeros((28, 28, 3), np.uint8)
    photo[2:27, 8:20] = 200
    seen = regard.lens(model, photo)
    likeliest = int(model.run(photo).probabilities.argmax())  # whether it is one of these or not
    assert seen.guesses[-1] == [model.codec.labels[likeliest]]
    assert np.all(seen.answer_logprobs <= 1e-9) and len(seen.layers) == len(seen.guesses)


def test_patching_an_input_with_itself_changes_nothing(translator):
    asked = translator.look_settings({})
    with translator.using(asked):
        patched, _ = find_patches(translator, TEXT, TEXT, asked)
    assert np.abs(patched.effects).max() < 1e-5
    assert abs(patched.logprobs[0] - patched.logprobs[1]) < 1e-5


def test_patching_everywhere_at_once_is_the_other_input(translator):
    """The last layer of the encoder is all that the decoder sees of the source."""
    asked = translator.look_settings({})
    clean = translator.question(TEXT, asked)
    other = translator.question(OTHER, asked, clean.expected)
    names, vectors = residual_stream(translator.model, clean, "encoder")
    with torch.inference_mode(), regard.change(translator, {f"{names[-1]}.out": vectors[-1]}):
        whole = other.answers(1)
    assert torch.allclose(whole, clean.answers(1), atol=1e-5)
    patched = regard.patch(translator, TEXT, OTHER)
    assert patched.effects.argmax() % len(patched.places) == patched.places.index("▁tea/▁fish")


def test_texts_of_other_lengths_are_refused(capsys):
    assert main(["look", "en-zh", TEXT, "Tea.", "patch=true"]) == 2
    assert "tokens" in capsys.readouterr().err
    assert main(["look", "en-zh", TEXT, "patch=true"]) == 2
    assert "two inputs" in capsys.readouterr().err


# ---- misconceptions


def attention_question(layer, x):
    logprobs = lambda copies: layer(x.expand(copies, -1, -1)).log_softmax(-1)  # noqa: E731
    tokens = [str(n) for n in range(x.shape[1])]
    return Question("", logprobs, [0] * x.shape[1], tokens, tokens, tokens, text_keys(len(tokens)))


@torch.no_grad()
def test_keys_of_one_length_make_attention_a_search_for_the_nearest():
    torch.manual_seed(0)
    layer, x = torch.nn.Sequential(MultiHead(8, 2)), torch.randn(1, 12, 8)

    def unit(k):
        return torch.nn.functional.normalize(k, dim=-1)

    question = attention_question(layer, x)
    ((near, strong, seen),) = nearest_keys(layer, question, attending(layer, question)).values()
    assert (near != strong).any() and bool((seen == 12).all())
    with regard.change(layer, {"0.keys": unit}):
        with regard.record(layer, "0.keys") as acts:
            layer(x)
        assert torch.allclose(acts["0.keys"].norm(dim=-1), torch.ones(1, 2, 12))
        ((near, strong, _),) = nearest_keys(layer, question, attending(layer, question)).values()
    assert torch.equal(near, strong)


def test_reading_the_last_layer_is_reading_the_memory(translator):
    from regard.data.pairs import Pair

    question = question_for(translator, Pair("I like cats.", "我喜欢猫。", ""))
    names, crosses, values = memory_losses(
        translator.model, question, attending(translator.model, question)
    )
    table = values[1 : 1 + len(names) * len(crosses)].reshape(len(crosses), len(names))
    assert np.allclose(table[:, -1], values[0], atol=1e-5)
    all_read = values[1 + table.size :][: len(names)]
    assert abs(all_read[-1] - values[0]) < 1e-5
    assert np.abs(all_read[:-1] - values[0]).max() > 1e-3


def test_misconceptions_are_told_and_drawn(tmp_path, capsys):
    data, png = tmp_path / "test.tsv", tmp_path / "a.png"
    data.write_text("I like cats.\t我喜欢猫。\nHow are you?\t你好吗？\n", "utf-8")
    words = ["misconceptions", "en-zh", f"data={data}", "examples=2", f"out={png}", "--json"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["examples"] == 2 and 0 <= told["share"] <= 1
    assert len(told["memory"]) == 4 and len(told["memory"][0]) == 5
    assert png.read_bytes()[:4] == b"\x89PNG"
    assert main(["misconceptions", "en-zh"]) == 2
    assert "data is missing" in capsys.readouterr().err
