"""Views and steps of text models: every layer has the tokens of its queries and keys."""

import numpy as np
import pytest
import torch

import regard
from regard.attention.watch import Map, Maps, watch
from regard.errors import UsageError
from regard.settings import describe, fill
from regard.viewer.picture import words_of
from regard.viewer.settings import ImageLookSettings, LookSettings
from regard.viewer.text import candidate_steps, label_candidates, text_views


def watched(**shapes: tuple[int, int]) -> Maps:
    """Return maps of layers with so many queries and keys, as if a model had been watched."""
    maps = Maps(torch.nn.Module())
    for name, (q, k) in shapes.items():
        name = name.replace("_", ".")
        weights = torch.rand(2, q, k, generator=torch.Generator().manual_seed(q)).softmax(-1)
        shape = (1, 2, q, k)
        maps._maps[name] = [Map(name, shape, lambda b, h, rows, w=weights: w[h, rows])]
    return maps


def test_layers_of_an_encoder_decoder_have_the_tokens_of_either_side():
    maps = watched(encoder_0_attention=(3, 3), decoder_0_attention=(2, 2), decoder_0_cross=(2, 3))
    source, target, writes = ["▁How", "▁are", "</s>"], ["<s>", "你"], ["你", "</s>"]
    encoder, decoder, cross = text_views(maps, target, source=source, writes=writes)
    assert (encoder.row_tokens, encoder.column_tokens) == (source, source)
    assert (decoder.row_tokens, decoder.column_tokens) == (target, target)
    assert (cross.row_tokens, cross.column_tokens) == (target, source)
    assert [view.kind for view in (encoder, decoder, cross)] == ["self", "self", "cross"]
    assert [view.writes for view in (encoder, decoder, cross)] == [None, writes, writes]
    expected = maps["decoder.0.cross"].weights()[0].numpy()
    np.testing.assert_array_equal(cross.weights, expected)


@pytest.mark.parametrize("length", [1, 3])
def test_a_pooling_layer_attends_from_the_whole_text(length):
    tokens = ["a", "b", "c"][:length]
    layers, pool = text_views(
        watched(blocks_0_attention=(length, length), head_pool=(1, length)), tokens
    )
    assert (layers.row_tokens, layers.kind) == (tokens, "self")
    assert (pool.row_tokens, pool.column_tokens, pool.kind) == (["text"], tokens, "cross")


def test_views_of_a_loaded_model_are_those_of_its_picture():
    model = regard.load("en-zh")
    picture = model.picture("How are you?")
    rows, columns = picture.views[-1].row_tokens, picture.views[-1].column_tokens
    writes = picture.views[-1].writes
    source = model.framed(model.source_tokenizer.encode("How are you?"))
    target = model.target_tokenizer.encode(picture.output)
    maps, logits = model.maps(source, target)
    views = text_views(maps, rows, source=columns, writes=writes)
    for one, other in zip(views, picture.views, strict=True):
        assert (one.name, one.kind, one.writes) == (other.name, other.kind, other.writes)
        assert (one.row_tokens, one.column_tokens) == (other.row_tokens, other.column_tokens)
        np.testing.assert_array_equal(one.weights, other.weights)
    ids = [*target, model.target_tokenizer.eos]
    pieces = model.target_tokenizer.pieces
    steps = candidate_steps(logits.softmax(-1), pieces, chosen=ids, tokens=writes)
    assert steps == list(picture.steps)


def test_views_of_low_precision_are_made():
    model = torch.nn.Module()
    with watch(model) as maps:
        weights = torch.eye(2, dtype=torch.bfloat16)[None]
        maps._maps["a"] = [Map("a", (1, 1, 2, 2), lambda b, h, rows: weights[h, rows])]
    assert text_views(maps, ["x", "y"])[0].weights.dtype == np.float32


def test_a_step_has_the_taken_class_and_the_likeliest():
    probabilities = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.2, 0.3]])
    labels = ["NOUN", "VERB", "PUNCT"]
    first, second = candidate_steps(probabilities, labels, candidates=2)
    assert (first.token, first.candidates[1][0]) == ("VERB", "PUNCT")
    assert first.probability == pytest.approx(0.7) and len(first.candidates) == 2
    assert second.token == "NOUN"
    taken = candidate_steps(probabilities, lambda ids: [f"<{i}>" for i in ids], chosen=[0, 2])
    assert [step.token for step in taken] == ["<0>", "<2>"]
    assert [step.probability for step in taken] == pytest.approx([0.1, 0.3])
    assert len(taken[0].candidates) == 3  # no more than there are classes
    spelled = candidate_steps(probabilities, labels, chosen=[1, 0], tokens=["é", ""])
    assert [step.token for step in spelled] == ["é", ""]


def test_labels_that_were_not_chosen_are_the_alternatives():
    about = label_candidates(["a", "b", "c"], np.array([0.25, 0.5, 0.25]), [1], candidates=2)
    assert about == {"alternatives": [("a", 0.25)], "note": "probabilities: b 0.5000, a 0.2500"}


def test_the_keys_of_looking_are_read_as_a_user_writes_them():
    given = fill(LookSettings, {"layers": "cross,3", "heads": 2, "candidates": "7"})
    assert words_of(given.layers) == ["cross", "3"] and words_of(given.heads) == ["2"]
    assert given.candidates == 7 and given.out is None
    assert fill(LookSettings, {"heads": ["mean", 0]}).heads == ("mean", 0)
    assert all(row.help for row in describe(ImageLookSettings))
    with pytest.raises(UsageError, match="candidates=0 is too small"):
        fill(LookSettings, {"candidates": 0})
