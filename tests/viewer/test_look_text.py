"""Views and steps of text models: every layer has the tokens of its queries and keys."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.attention.watch import Map, Maps, watch
from regard.data.tokenizer import words_of_pieces
from regard.errors import UsageError
from regard.native import fast
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
    picture = model.picture("How are you?", units="pieces")
    rows, columns = picture.views[-1].row_tokens, picture.views[-1].column_tokens
    writes = picture.views[-1].writes
    source = model.codec.source.frame(model.codec.source.encode("How are you?"), "source")
    target = model.codec.target.encode(picture.output)
    with fast(model.model, frozen=True):  # as a runner does
        maps, logits = model.predictor.maps(source, target)
    views = text_views(maps, rows, source=columns, writes=writes)
    for one, other in zip(views, picture.views, strict=True):
        assert (one.name, one.kind, one.writes) == (other.name, other.kind, other.writes)
        assert (one.row_tokens, one.column_tokens) == (other.row_tokens, other.column_tokens)
        np.testing.assert_array_equal(one.weights, other.weights)
    ids = [*target, model.codec.target.eos]
    pieces = model.codec.target.pieces
    steps = candidate_steps(logits.softmax(-1), pieces, chosen=ids, tokens=writes)
    assert steps == [replace(step, note="") for step in picture.steps]


TEXT = "Unbelievably expensive frankfurters."


def test_a_translation_is_shown_in_words_whose_pieces_are_averaged_and_summed():
    model = regard.load("en-zh")
    pieces, words = (
        model.picture(TEXT, units=given, max_length=12) for given in ("pieces", "words")
    )
    end = model.codec.source.pieces([model.codec.source.eos])[0]
    assert [*words.views[0].column_tokens] == [*TEXT.split(), end]
    assert len(pieces.views[0].column_tokens) > len(words.views[0].column_tokens)
    for fine, coarse in zip(pieces.views, words.views, strict=True):
        np.testing.assert_allclose(coarse.weights.sum(-1), 1, atol=1e-5)  # a row is still a share
        source = coarse.name.startswith("encoder")
        _, rows = words_of_pieces(fine.row_tokens if source else fine.writes, {end})
        if not source:
            assert "".join(coarse.writes) == "".join(fine.writes).replace("▁", "")
            assert [*coarse.row_tokens[1:]] == [*coarse.writes[:-1]]
        if coarse.name.endswith("cross") or source:
            _, columns = words_of_pieces(fine.column_tokens, {end})
        else:
            columns = [0, *(1 + n for n in rows[:-1])]
        for word in range(max(rows) + 1):  # by loops, a word at a time
            mine = fine.weights[:, [n for n, of in enumerate(rows) if of == word]].mean(1)
            for other in range(max(columns) + 1):
                total = mine[:, [n for n, of in enumerate(columns) if of == other]].sum(1)
                np.testing.assert_allclose(coarse.weights[:, word, other], total, atol=1e-6)
    assert "mean of its pieces" in words.note and "mean of its" not in pieces.note
    for step in words.steps:  # each piece that is written has the row of its word
        assert step.token.replace("▁", "") in words.views[-1].writes[step.row]


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        (["▁un", "believ", "able"], ["unbelievable"]),
        (["▁a", "▁do", "g", ".", "</s>"], ["a", "dog.", "</s>"]),
        (["我喜欢", "猫", "。"], ["我喜欢", "猫", "。"]),
        (["我", "用", "▁P", "ython", "▁and", "▁C", "。"], ["我", "用", "Python", "and", "C", "。"]),
        (["a", "b"], ["a", "b"]),
    ],
)
def test_pieces_are_joined_to_words_where_there_are_spaces(pieces, words):
    found, of = words_of_pieces(pieces, {"</s>"})
    assert found == words
    joined = ["" for _ in words]
    for piece, word in zip(pieces, of, strict=True):
        joined[word] += piece.replace("▁", "")
    assert joined == words


def test_alignments_are_of_words_or_of_pieces():
    model = regard.load("en-zh")
    (words,) = model.run([TEXT], alignments="json", max_length=12)
    (pieces,) = model.run([TEXT], alignments="json", units="pieces", max_length=12)
    assert words.alignment.source == TEXT.split()
    ids = model.codec.source.encode(TEXT)
    assert pieces.alignment.source == model.codec.source.pieces(ids)
    with pytest.raises(UsageError, match="unknown units 'letters'"):
        model.picture(TEXT, units="letters")
    assert {t for _, t in pieces.alignment.links} == {*range(len(pieces.alignment.target))}


def test_a_step_that_took_the_less_likely_token_says_why():
    model = regard.load("en-zh")
    for text in ("How are you?", "I want to go home now."):
        for step in model.picture(text).steps:
            assert bool(step.note) == (step.candidates[0][1] > step.probability + 1e-6)
    # a text that no search would have chosen, so that every reason can be held against scores
    settings = model.look_settings({})
    source = model.codec.source.frame(model.codec.source.encode("How are you?"), "source")
    ids = model.codec.target.encode("我不喜欢绿茶。")
    (poor,) = model.predictor.decoder.score([(source, ids)], settings, tokens=10**6, rows=1)
    _, logits = model.predictor.maps(source, ids)
    probabilities = logits.softmax(-1)
    reasons = model.predictor._reasons(source, poor, probabilities, settings)
    chosen = [*ids, model.codec.target.eos]
    assert [*reasons] == [n for n, i in enumerate(chosen) if probabilities[n].argmax() != i]
    for reason in reasons.values():
        numbers = r"log p (\S+) in all \(score (\S+)\), against (\S+) \(score (\S+)\)"
        ours, score, other, best = map(float, re.findall(numbers, reason)[0])
        assert ours == pytest.approx(poor.logprob, abs=0.006)
        assert score == pytest.approx(poor.score, abs=6e-4)
        missed, likelier = best > score, ours > other
        assert reason.startswith("The search missed") == missed
        assert reason.startswith("The whole text is likelier") == (likelier and not missed)


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


def test_every_hypothesis_of_a_beam_has_its_own_attention():
    model, given = regard.load("en-zh"), "He bought a new car yesterday."
    shown = regard.look(model, given, beam=4, n_best=3)
    pictures = shown.look.pictures
    answer = model.run(given, beam=4, n_best=3)
    texts = [answer.text, *(other.text for other in answer.others)]
    assert [picture.output for picture in pictures] == texts
    target, written = model.codec.target, set()
    number_of = {piece: n for n, piece in enumerate(target.pieces(range(target.rows)))}
    source = model.codec.source.frame(model.codec.source.encode(given), "source")
    for number, text in enumerate(texts, 1):
        alone = model.picture(given, beam=4, n_best=3, hypothesis=number, units="pieces")
        cross = next(view for view in alone.views if view.name == "decoder.2.cross")
        ids = [number_of[piece] for piece in cross.writes][:-1]
        written.add(tuple(ids))
        assert target.decode(ids) == alone.output == text
        maps, _ = model.predictor.maps(source, ids)
        assert np.allclose(cross.weights, maps["decoder.2.cross"].weights()[0].numpy(), atol=1e-6)
        others = [other for place, other in enumerate(texts, 1) if place != number]
        assert [other for other, _ in alone.alternatives] == others
    assert len(written) == 3  # two may spell one text by different pieces


def test_a_page_holds_all_hypotheses_and_a_png_the_one_that_is_asked_for(tmp_path):
    wanted: dict[str, Any] = {"beam": 2, "n_best": 2}
    page = tmp_path / "both.html"
    regard.look("en-zh", "How are you?", out=page, **wanted)
    second = regard.load("en-zh").run("How are you?", **wanted).others[0].text
    assert page.read_text("utf-8").count('"alternatives"') == 2 and second in page.read_text(
        "utf-8"
    )
    regard.look("en-zh", "How are you?", out=tmp_path / "one.png", hypothesis=2, **wanted)
    with pytest.raises(UsageError, match="hypothesis=3: the search returned 2; raise n_best"):
        regard.look("en-zh", "How are you?", hypothesis=3, **wanted)
