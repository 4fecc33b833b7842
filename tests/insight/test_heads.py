"""Heads are named by scores: planted patterns are found, in arrays and in a whole model."""

import json
import random

import numpy as np
import pytest
import torch

import regard
from regard.cli import main
from regard.data.pairs import Pair
from regard.data.parallel import make_batch
from regard.data.tokenize import train_tokenizer
from regard.errors import UsageError
from regard.insight.alignments import (
    ALL,
    MEAN,
    Aligned,
    head_links,
    join_words,
    judge_heads,
    word_shares,
)
from regard.insight.heads import (
    COLUMNS,
    HeadInputs,
    LayerScores,
    look_at,
    measure_heads,
    name_of,
    save,
    sink,
)
from regard.layers.block import BlockConfig
from regard.metrics.alignment import score_links
from regard.models.transformer import Transformer, TransformerConfig
from regard.tasks.text.sequence import PairCodec
from regard.tasks.text.translate import TRANSLATE
from regard.training.loss import sequence_loss
from regard.viewer.panels import Sheet
from regard.viewer.picture import View
from tests.viewer.test_look import browser  # noqa: F401

TEXT = [*"abcdefgh", *"abcdefgh"]  # said twice


def measure(weights: np.ndarray, rows, columns=None, kind="self", specials=()) -> dict[str, float]:
    """Return the scores of one head in one example."""
    view = View("layer", weights[None], rows, columns or rows, kind)
    layer = LayerScores(1)
    layer.add(look_at(view, frozenset(specials)))
    return layer.scores()[0]


def at(offset: int, length: int) -> np.ndarray:
    """Return the attention of a head that looks an offset away, or to itself at the edge."""
    places = np.arange(length) + offset
    places = np.where((places < 0) | (places >= length), np.arange(length), places)
    return np.eye(length)[places]


def sees(past: bool = True, length: int = len(TEXT)) -> np.ndarray:
    """Return the attention of a head that looks everywhere alike."""
    weights = np.ones((length, length))
    weights = np.tril(weights) if past else weights
    return weights / weights.sum(1, keepdims=True)


def test_a_head_that_looks_back_by_one_is_a_previous_token_head():
    scores = measure(at(-1, 16), TEXT)
    assert scores["previous"] == 1.0 and scores["next"] == 0.0
    assert scores["positional"] > 0.9 and name_of(scores) == "previous"


def test_a_head_that_looks_ahead_by_one_is_a_next_token_head():
    scores = measure(at(1, 16), TEXT)
    assert scores["next"] == 1.0 and scores["previous"] == 0.0 and name_of(scores) == "next"


def test_any_other_fixed_offset_is_positional():
    scores = measure(at(-3, 16), TEXT)
    assert scores["positional"] > 0.8 and scores["previous"] == 0
    assert name_of(scores) == "positional"


def test_a_head_that_looks_at_equal_tokens_is_a_same_token_head():
    weights = np.eye(16)
    weights[8:] = np.eye(16)[:8]
    scores = measure(weights, TEXT)
    assert scores["same"] == 1.0 and scores["induction"] == 0.0 and name_of(scores) == "same"


def test_a_head_that_looks_behind_the_last_time_is_an_induction_head():
    # the distance is another in each text, so no offset explains it
    layer = LayerScores(1)
    for length in (5, 7, 9):
        weights = np.tril(np.ones((2 * length, 2 * length)))
        weights /= weights.sum(1, keepdims=True)
        weights[length:] = np.eye(2 * length)[1 : length + 1]
        tokens = [str(n) for n in range(length)] * 2
        layer.add(look_at(View("layer", weights[None], tokens, tokens), frozenset()))
    (scores,) = layer.scores()
    assert scores["induction"] == 1.0 and name_of(scores) == "induction"
    assert scores["positional"] < 0.5


def test_a_first_or_a_special_token_is_a_sink():
    first = np.zeros((16, 16))
    first[:, 0] = 1
    assert measure(first, TEXT)["sink"] == 1.0
    last = np.zeros((16, 16))
    last[:, 15] = 1
    tokens = [*TEXT[:15], "</s>"]
    assert measure(last, tokens)["sink"] == 0.0
    assert measure(last, tokens, specials=["</s>"])["sink"] == 1.0
    assert name_of(measure(first, TEXT)) == "sink"


def test_a_diagonal_of_cross_attention_is_an_alignment():
    rows, columns = [*"abcdefgh"], [*"stuvwxyz", "</s>"]
    weights = np.eye(8, 9)
    scores = measure(weights, rows, columns, "cross", ["</s>"])
    assert scores["alignment"] == 1.0 and name_of(scores) == "alignment"
    crossed = measure(weights[::-1].copy(), rows, columns, "cross", ["</s>"])
    assert crossed["alignment"] < 0.5
    assert np.isnan(scores["previous"]) and np.isnan(scores["induction"])


@pytest.mark.parametrize("past", [True, False])
def test_a_head_that_looks_everywhere_has_no_name(past: bool):
    scores = measure(sees(past), TEXT)
    assert name_of(scores) == ""
    assert all(np.isnan(value) or value < 0.4 for value in scores.values())


def test_scores_are_means_over_the_queries_of_all_examples():
    layer, half = LayerScores(1), 0.5 * at(-1, 4) + 0.5 * at(-2, 4)
    for weights in (at(-1, 8), half):
        tokens = [str(n) for n in range(len(weights))]
        layer.add(look_at(View("layer", weights[None], tokens, tokens), frozenset()))
    # of 7 + 3 queries that have a token before them, 7 look there and 3 by half
    assert layer.scores()[0]["previous"] == pytest.approx((7 + 1.5) / 10)
    assert np.isnan(layer.scores()[0]["same"])  # no token is there twice


def test_heads_planted_in_a_model_are_found_in_its_layers():
    model = regard.load("shakespeare")
    text = "To be, or not to be: that is the question."
    plain = measure_heads(model, [text])
    length = len(model.picture(text, forced=True).views[0].row_tokens)
    planted = {"blocks.1.attention.weights.2": torch.from_numpy(at(-1, length)).float()}
    with regard.change(model, planted):
        found = measure_heads(model, [text])
    scores = {(head.layer, head.head): head for head in found.heads}
    assert scores["blocks.1.attention", 2].scores["previous"] == pytest.approx(1.0)
    assert scores["blocks.1.attention", 2].name == "previous"
    before, after = (each.heads[0].scores["previous"] for each in (plain, found))
    assert before == after  # what comes before it is as it was
    assert {*plain.heads[0].scores} == {*COLUMNS}


def test_every_stack_of_a_translator_is_measured():
    model = regard.load("en-zh")
    pairs = [Pair("I like cats.", "我喜欢猫。", ""), "How are you?"]
    found = measure_heads(model, 5 * pairs)
    layers = {head.layer for head in found.heads}
    assert {"encoder.0.attention", "decoder.0.attention", "decoder.2.cross"} <= layers
    for head in found.heads:
        cross = head.layer.endswith("cross")
        assert np.isnan(head.scores["previous"]) == cross
        assert np.isnan(head.scores["alignment"]) == (not cross)
        if head.layer.startswith("decoder") and not cross:
            assert head.scores["next"] == 0.0  # it cannot see the future


def test_an_image_has_offsets_in_two_directions_but_no_next_token():
    model = regard.load("fashion")
    pixels = np.random.default_rng(0).integers(0, 256, (28, 28, 3), np.uint8)
    found = measure_heads(model, [pixels])
    assert all(np.isnan(head.scores["next"]) for head in found.heads)
    blocks = [head for head in found.heads if head.layer.startswith("blocks")]
    assert blocks and all(0 <= head.scores["positional"] <= 1 for head in blocks)


def test_a_head_that_looks_around_its_place_in_an_image_is_a_near_one():
    places = np.stack(np.meshgrid(np.arange(4), np.arange(4), indexing="ij"), -1).reshape(16, 2)
    offset = places - places[:, None]
    around = (np.abs(offset) <= 1).all(-1)
    for weights, expected in ((around / around.sum(1, keepdims=True), 1.0), (~around, 0.0)):
        seen = HeadInputs(
            np.asarray(weights, float)[None],
            np.arange(16),
            np.arange(16)[None],
            np.zeros((1, 16), bool),
            offset.astype(float),
            words=False,
        )
        layer = LayerScores(1)
        layer.add(seen)
        assert layer.scores()[0]["near"] == pytest.approx(expected)


def test_the_page_and_the_picture_of_an_image_model_show_something(tmp_path, browser):  # noqa: F811
    model = regard.load("fashion")
    pixels = np.random.default_rng(0).integers(0, 256, (28, 28, 3), np.uint8)
    found = measure_heads(model, [pixels, pixels])
    page = tmp_path / "heads.html"
    save(found, page)
    wrong = []
    tab = browser.new_page()
    tab.on("console", lambda message: wrong.append(message.text))
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.goto(page.as_uri())
    tab.wait_for_selector("canvas")
    tab.close()
    assert not wrong
    scores = [v for head in found.heads for v in head.scores.values() if not np.isnan(v)]
    with pytest.MonkeyPatch.context() as patch:
        sheets = []
        plain = Sheet.png
        patch.setattr(Sheet, "png", lambda sheet, *a: sheets.append(sheet) or plain(sheet, *a))
        save(found, tmp_path / "heads.png")
    texts = [text.get_text() for axes in sheets[0].figure.axes for text in axes.texts]
    numbers = [text for text in texts if text.startswith(".") or text == "1.00"]
    assert len(numbers) == len(scores)  # every cell says what it holds
    assert max(scores) > 0.1


def test_without_a_test_part_heads_are_measured_on_the_validation_part(tmp_path, capsys):
    (tmp_path / "train.txt").write_text("To be, or not to be: that is the question.\n" * 9)
    (tmp_path / "valid.txt").write_text("Once more unto the breach, dear friends.\n" * 9)
    assert main(["heads", "shakespeare", f"data={tmp_path}", "examples=1", "length=32"]) == 0
    told = capsys.readouterr()
    assert "valid part is read instead" in told.err and told.out.startswith("layer")
    words = ["heads", "shakespeare", f"data={tmp_path}", "part=test"]
    assert main(words) == 2  # what was asked for is not replaced
    assert main(["heads", "shakespeare", f"data={tmp_path / 'none'}"]) == 2


def test_an_encoder_without_a_head_is_measured_on_texts_of_any_kind(tmp_path, capsys):
    encoder = regard.load("fill", task="embed")
    files = {
        "plain.txt": "The cat sat on the mat.\nIt was a large mat, and a small cat.\n" * 9,
        "labels.tsv": "sentence\tlabel\n" + "the cat sat on the mat\tgood\n" * 9,
        "pairs.tsv": "sentence1\tsentence2\tscore\n" + "a cat sat\ta dog sat\t1.5\n" * 9,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        found = regard.heads(encoder, data=tmp_path / name, examples=2, length=16)
        assert len(found.heads) > 1
    beliefs = regard.misconceptions(encoder, data=tmp_path / "labels.tsv", examples=1, length=16)
    lost = np.concatenate([*beliefs.nearest.values(), *beliefs.strongest.values()])
    assert beliefs.unit == "cosine distance" and abs(beliefs.loss) < 1e-6
    assert (lost > -1e-6).all() and lost.max() > 1e-6 and (lost <= 2).all()
    with pytest.raises(UsageError, match="no answer with a probability"):
        regard.look(encoder, "a cat", cause=True)


def test_the_command_prints_a_table_json_and_pictures(tmp_path, capsys):
    data = tmp_path / "texts.txt"
    data.write_text("To be, or not to be: that is the question.\n" * 30)
    assert main(["heads", "shakespeare", f"data={data}", "examples=2", "length=32"]) == 0
    table = capsys.readouterr().out
    assert table.splitlines()[0].split()[:4] == ["layer", "head", "previous", "next"]
    out = tmp_path / "heads.png"
    asked = ["heads", "shakespeare", "repeated=20", "examples=3", f"out={out}", "--json"]
    assert main(asked) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["examples"] == 3 and told["path"] == str(out)
    assert out.read_bytes().startswith(b"\x89PNG")
    page = tmp_path / "heads.html"
    assert main(["heads", "shakespeare", f"data={data}", "examples=1", f"out={page}"]) == 0
    capsys.readouterr()
    names = {head["name"] for head in told["heads"] if head["name"]}
    assert any(name in page.read_text() for name in names)


def test_an_induction_head_is_found_in_random_tokens_said_twice(tmp_path):
    data = tmp_path / "text.txt"
    data.write_text("".join(chr(0x4E00 + 7 * n % 300) for n in range(2000)))
    sizes = {"depth": 2, "width": 16, "heads": 2, "context": 32, "batch_tokens": 64}
    more = {"tokenizer": "characters", "position": "rotary", "order": "attention_only"}
    out = tmp_path / "run"
    regard.train("language", data=data, out=out, steps=2, quiet=True, **sizes, **more)
    model = regard.load(out, task="language")
    names = [name for name, _ in model.model.named_parameters()]
    assert not any("feed_forward" in name for name in names)
    length = 12
    weights = np.eye(2 * length + 1)
    weights[1 + length : 2 * length] = np.eye(2 * length + 1)[2 : length + 1]
    planted = {"blocks.1.attention.weights.1": torch.from_numpy(weights).float()}
    with regard.change(model, planted):
        found = regard.heads(model, repeated=length, examples=4)
    scores = {(head.layer, head.head): head.scores["induction"] for head in found.heads}
    # all but the last token of the second time, whose next one was another then
    assert scores["blocks.1.attention", 1] > 0.85
    assert max(score for key, score in scores.items() if key != ("blocks.1.attention", 1)) < 0.4
    assert found.named("induction")[0].layer == "blocks.1.attention"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["heads", "shakespeare"], "data is missing"),
        (["heads", "shakespeare", "repeated=5", "data=x"], "takes the place of"),
        (["heads", "en-zh", "repeated=5"], "repeated= is for language models"),
        (["heads", "shakespeare", "repeated=1000"], "the model reads at most"),
        (["heads", "shakespeare", "repeated=5", "out=heads.gif"], "end it in .html or .png"),
        (["heads", "shakespeare", "repeted=5"], "did you mean 'repeated'"),
        (["heads", "shakespeare", "examples=0"], "too small"),
    ],
)
def test_mistakes_are_told_in_one_line(words, told, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


# Alignments with gold links


def test_the_error_rate_is_that_of_och_and_ney():
    gold = [{(0, 0), (1, 1), (2, 2)}, {(0, 1)}]
    ours = [{(0, 0), (1, 2), (5, 2)}, {(0, 1)}]
    score = score_links(ours, gold)
    assert (score.predicted, score.gold, score.right) == (4, 4, 2)
    assert score.error_rate == pytest.approx(1 - (2 + 2) / (4 + 4))
    # source word 5 has no gold link, so that it is not judged
    linked = score_links(ours, gold, linked_only=True)
    assert (linked.predicted, linked.right) == (3, 2)
    assert score_links(gold, gold).error_rate == 0.0


def test_pieces_are_laid_over_given_words_letter_by_letter():
    model = regard.load("en-zh")
    words = ["Frankfurters", "cost", "$", "5,000", "."]
    ids = model.codec.source.encode(join_words(words, "en"))
    shares = word_shares(ids, model.codec.source, words)
    pieces = ["" for _ in words]
    for piece, word in zip(model.codec.source.pieces(ids), shares.argmax(1), strict=True):
        pieces[word] += piece.replace("▁", "")
    assert pieces == words and np.all(shares.max(1) == 1)
    rare = ["龘", "龘", "·", "猫"]  # in bytes
    ids = model.codec.target.encode(join_words(rare, "zh"))
    shares = word_shares(ids, model.codec.target, rare)
    of = shares.argmax(1).tolist()
    assert of == sorted(of) and {*of} == {0, 1, 2, 3} and len(ids) > 4
    assert np.all(shares.sum(1) == 1)


def test_a_piece_of_several_words_is_of_all_of_them():
    model = regard.load("en-zh")
    ids = model.codec.target.encode("我们必须走了。")
    assert model.codec.target.pieces(ids) == ["我们必须", "走了", "。"]
    shares = word_shares(ids, model.codec.target, ["我们", "必须", "走", "了", "。"])
    halves = [[0.5, 0.5, 0, 0, 0], [0, 0, 0.5, 0.5, 0], [0, 0, 0, 0, 1]]
    assert np.array_equal(shares, halves)
    uneven = word_shares(ids[1:], model.codec.target, ["走了。"])
    assert np.array_equal(uneven, [[1], [1]])


def test_links_planted_in_a_head_are_read_off_it_at_once_or_one_step_later():
    model = regard.load("en-zh")
    pair = Aligned(["I", "like", "cats", "."], ["我喜欢", "猫", "。"], set())
    source = model.codec.source.encode("I like cats .")
    target = model.codec.target.encode("我喜欢猫。")
    of_source = word_shares(source, model.codec.source, pair.source).argmax(1).tolist()
    of_target = word_shares(target, model.codec.target, pair.target).argmax(1).tolist()
    weights = torch.zeros(len(target) + 1, len(source) + 1)
    wanted = [3, 0, 2]  # the source word of each target word
    for row, word in enumerate(of_target):
        weights[row, of_source.index(wanted[word])] = 1
    weights[-1, -1] = 1
    right = {(s, t) for t, s in enumerate(wanted)}
    with regard.change(model, {"decoder.2.cross.weights.1": weights}):
        (now,) = head_links(model, [pair])
    with regard.change(model, {"decoder.2.cross.weights.1": weights.roll(1, 0)}):
        (later,) = head_links(model, [pair])
    assert now["decoder.2.cross", 1, 0] == right == later["decoder.2.cross", 1, 1]
    assert now["decoder.2.cross", 1, 1] != right != later["decoder.2.cross", 1, 0]
    assert (ALL, MEAN, 0) in now


def test_a_translator_that_swaps_words_has_the_head_that_links_them():
    """A model that learned a known substitution, in a known order, attends to what it writes."""
    chance, table = random.Random(1), dict(zip("abcdef", "uvwxyz", strict=True))

    def pair() -> Aligned:
        words = chance.choices(list(table), k=2 * chance.randint(1, 3))
        order = [n ^ 1 for n in range(len(words))]  # each pair of words swapped
        target = [table[words[n]] for n in order]
        return Aligned(words, target, {(s, t) for t, s in enumerate(order)})

    tokenizer = train_tokenizer(["a b c d e f u v w x y z"] * 50, vocab=330)
    torch.manual_seed(0)
    block = BlockConfig(width=32, heads=1, ffn_width=64, dropout=0.0)
    size = tokenizer.vocab
    model = Transformer(
        TransformerConfig(size, size, encoder_depth=1, decoder_depth=1, block=block)
    )
    optimiser, steps = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.98)), 400
    rate = torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.01, steps, pct_start=0.15)
    for _ in range(steps):
        some = [pair() for _ in range(32)]
        sides = ([p.source for p in some], [p.target for p in some])
        ids = ([np.array(tokenizer.encode(" ".join(row))) for row in side] for side in sides)
        batch = make_batch(*ids, tokenizer, tokenizer)
        optimiser.zero_grad()
        (sequence_loss(model, batch, 0.0, 0.0) / batch.tokens).backward()
        optimiser.step()
        rate.step()
    task = TRANSLATE.bind(model.eval(), PairCodec(tokenizer, tokenizer), {})
    judged = judge_heads(task, [pair() for _ in range(50)])
    rates = {one.shift: one.error_rate for one in judged.heads if one.head == 0}
    assert rates[0] < 0.1 and rates[1] > 0.5


def test_links_of_a_file_are_judged_by_the_command(tmp_path, capsys):
    path = tmp_path / "gold.tsv"
    path.write_text("I like cats .\t我 喜欢 猫 。\t0-0 1-1 2-2\nHow are you ?\t你 好 吗 ？\t2-0\n")
    assert main(["heads", "en-zh", f"links={path}", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["alignments"]["heads"]
    rates = [row["error_rate"] for row in rows]
    assert rates == sorted(rates) and all(0 <= rate <= 1 for rate in rates)
    for bad, told in (
        ("a b\tc\t0-1\n", "link 0-1 to one of 2 and 1 words"),
        ("a b\tc\tx\n", "is not a link"),
        ("a b\tc\n", "expected source, target and links"),
    ):
        path.write_text(bad)
        assert main(["heads", "en-zh", f"links={path}"]) == 2
        error = capsys.readouterr().err
        assert told in error and error.count("\n") == 1
    path.write_text("a b\tc\t0-0\n")
    assert main(["heads", "shakespeare", f"links={path}"]) == 2
    assert "has no cross-attention" in capsys.readouterr().err


def test_the_first_query_which_can_only_look_at_itself_tells_nothing_of_a_sink():
    tokens = np.array(list("abcde"), object)
    offset = (np.arange(5) - np.arange(5)[:, None])[..., None]
    none_special = np.zeros((1, 5), bool)
    seen = HeadInputs(np.eye(5)[None], tokens, tokens[None], none_special, offset)
    sums, queries = sink(seen)
    assert sums.tolist() == [0] and queries == 4
