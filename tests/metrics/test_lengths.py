"""BLEU by the length of the source: of every length the BLEU of its sentences, and no other."""

import json
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes

import regard
import regard.recipes.ladder_multi30k as ladder
from regard.api import plan
from regard.costs.model import build
from regard.data.pairs import Corpus, Pair
from regard.data.tokenize import train_tokenizer
from regard.errors import UsageError
from regard.files.weights import state_of
from regard.layers.block import BlockConfig
from regard.metrics.bleu import bleu_metric
from regard.metrics.interval import Interval
from regard.metrics.lengths import (
    FEW_SENTENCES,
    BleuInterval,
    LengthGroup,
    Lengths,
    add_joined,
    by_length,
    count_words,
    groups,
    join_pairs,
    short_names,
)
from regard.models import preset_names, serving
from regard.models.folder import save_config, save_weights
from regard.models.transformer import Transformer, TransformerConfig
from regard.pretrained.tokenizer_folder import save_tokenizers
from regard.tasks import task
from regard.tasks.frame.answers import Generated
from regard.tasks.text.translate import TRANSLATE
from regard.tasks.text.writer import TextWriter

WORDS = ["a", "man", "in", "red", "sits", "on", "the", "wet", "grass", "and", "two", "old", "books"]


def sentence(words: int) -> str:
    """Return a sentence of so many words, told apart by where it begins."""
    return " ".join(WORDS[(words + i) % len(WORDS)] for i in range(words)) + "."


PAIRS = [Pair(sentence(n), sentence(n).upper(), "") for n in (3, 9, 10, 11, 14, 25, 12, 4, 8, 13)]


def test_words_are_counted_in_any_script():
    assert count_words("Two dogs,  one ball.") == 4
    assert count_words("你好吗") == 3
    assert count_words("我有 iPhone 吗") == 4
    assert count_words(" ") == 0


@given(st.lists(st.integers(0, 70), min_size=1), st.sets(st.integers(1, 60), min_size=1))
def test_every_sentence_is_in_the_group_of_its_length(lengths: list[int], borders: set[int]):
    sources = [" ".join("w" * n) for n in lengths]
    found = groups(sources, [*borders])
    assert sorted(i for some in found.values() for i in some) == list(range(len(sources)))
    for name, some in found.items():
        low, _, high = name.removesuffix("+").partition("-")
        least = 0 if int(low) == 1 else int(low)  # no words at all are few words
        for i in some:
            assert least <= lengths[i] <= (int(high) if high else max(lengths))


@pytest.mark.parametrize("words", [1, 10, 30, 60])
def test_joined_pairs_are_the_pairs_in_their_order_until_they_are_long_enough(words: int):
    joined = join_pairs(PAIRS, repeat(words), "en", "de")
    assert joined == join_pairs(PAIRS, repeat(words), "en", "de")
    whole = " ".join(pair.source for pair in PAIRS)
    assert whole.startswith(" ".join(pair.source for pair in joined))
    for pair in joined:
        assert pair.target == pair.source.upper()
        assert count_words(pair.source) >= words
        assert count_words(pair.source.rpartition(". ")[0]) < words  # and not any longer
    left = count_words(whole) - sum(count_words(pair.source) for pair in joined)
    assert 0 <= left < words


def test_joined_chinese_has_no_spaces():
    pairs = [Pair("One.", "一。", ""), Pair("Two.", "二。", "")]
    assert join_pairs(pairs, repeat(2), "en", "zh")[0].target == "一。二。"
    assert join_pairs(pairs, repeat(2), "en", "zh")[0].source == "One. Two."


def test_training_learns_from_joined_pairs_too():
    corpus = Corpus({"train": PAIRS * 20, "valid": PAIRS}, "en", "de")
    longer = add_joined(corpus, 40)
    assert longer.parts["valid"] == PAIRS and corpus.parts["train"] == PAIRS * 20
    assert longer.parts["train"][: len(PAIRS) * 20] == PAIRS * 20
    joined = longer.parts["train"][len(PAIRS) * 20 :]
    assert joined == add_joined(corpus, 40).parts["train"][len(PAIRS) * 20 :]
    sizes = [count_words(pair.source) for pair in joined]
    assert min(sizes) < 15 and 30 < max(sizes) < 40 + 25
    assert f"{len(joined)} pairs joined" in longer.notes[0]


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["runs/a/seed-1", "runs/b/seed-1"], ["a", "b"]),
        (["one"], ["one"]),
        (["x/one", "x/one"], ["x/one", "x/one"]),
        (["x/one", "two"], ["x/one", "two"]),
        (["x/a", "x/a/b"], ["a", "a/b"]),
    ],
)
def test_names_are_as_short_as_tells_them_apart(names, short):
    assert short_names(names) == short


# A model on a test set


def save_model(folder: Path, seed: int) -> None:
    """Write a folder with a model of random weights."""
    tokenizer = train_tokenizer([text for p in PAIRS for text in (p.source, p.target)], vocab=330)
    torch.manual_seed(seed)
    block = BlockConfig(width=16, heads=2, ffn_width=16)
    model = Transformer(TransformerConfig(tokenizer.vocab, tokenizer.vocab, 1, 1, block))
    folder.mkdir()
    about = {"from": "en", "to": "de"}
    save_config(folder, model, name="transformer", task="translate", about=about)
    save_weights(folder, state_of(model))
    save_tokenizers(folder, (tokenizer, tokenizer))


@pytest.fixture
def made(tmp_path: Path, monkeypatch) -> Path:
    """Return models that write capitals up to some word, and a test set."""
    for seed, name in enumerate(("one", "two", "three")):
        save_model(tmp_path / name, seed)
    lines = "".join(f"{pair.source}\t{pair.target}\n" for pair in PAIRS)
    (tmp_path / "test.tsv").write_text(lines)
    asked = []

    def predict(self: TextWriter, sources: list[str], settings, *, first=0) -> list[Generated]:
        asked.append((sources, settings))
        patience = 12 if self.model.source.tokens.weight[9, 0].item() > 0 else 7
        return [Generated(" ".join(source.upper().split()[:patience])) for source in sources]

    monkeypatch.setattr(TextWriter, "predict", predict)
    monkeypatch.setattr(TextWriter, "asked", asked, raising=False)
    return tmp_path


def test_short_sentences_have_a_bleu_and_few_are_marked(tmp_path):
    """Sentences of two words have no run of four, and no BLEU but the effective one."""
    pairs = [Pair(f"yes {n}", f"ja {n}", "") for n in range(FEW_SENTENCES + 5)]
    long = [Pair(" ".join(["a"] * 15), " ".join(["b"] * 15), "")] * 3
    outputs = [pair.target for pair in [*pairs, *long]]
    metrics = {"metric": bleu_metric("de"), "effective": bleu_metric("de", effective=True)}
    told = by_length(["x"], [outputs], [], [*pairs, *long], samples=100, **metrics)
    short, few = told.rows[1:]
    assert short.scores[0].bleu == pytest.approx(100) and short.scores[0].half is not None
    assert few.sentences == 3 and few.scores[0].half is None and "(few)" in str(few.scores[0])
    assert "groups: nrefs:1|bs:100|seed:12345|case:mixed|eff:yes" in str(told)
    drawn = []
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        real = Axes.plot
        patch.setattr(Axes, "plot", lambda *a, **k: drawn.append(k) or real(*a, **k))
        told.draw(tmp_path / "x.png")
    assert [k["markerfacecolor"] for k in drawn if "markerfacecolor" in k] == ["white"]


def test_bleu_of_a_length_is_that_of_its_sentences(made: Path):
    result = regard.evaluate(made / "one", data=made / "test.tsv", samples=100, lengths="5,10,20")
    outputs = [str(text) for text in regard.load(made / "one").run(sources(PAIRS))]
    told = result.lengths
    assert [row.name for row in told.rows] == ["all", "1-5", "6-10", "11-20", "21+"]
    assert told.rows[0].scores[0].bleu == result.scores[0].value
    for row, least, most in zip(told.rows[1:], (1, 6, 11, 21), (5, 10, 20, 99), strict=True):
        some = [i for i, p in enumerate(PAIRS) if least <= count_words(p.source) <= most]
        texts, right = [outputs[i] for i in some], [[PAIRS[i].target for i in some]]
        expected = bleu_metric("de", effective=True).corpus_score(texts, right)
        assert row.scores[0].bleu == expected.score
        assert row.sentences == len(some)
        assert row.words == sum(count_words(PAIRS[i].source) for i in some) / len(some)
    for row in told.rows:
        assert (row.scores[0].half is None) == (row.sentences < FEW_SENTENCES)
    assert "(few)" in str(result) and "eff:yes" in told.signature and "eff:no" in told.signature
    assert told.rows[1].scores[0].bleu > told.rows[4].scores[0].bleu
    assert "| 11-20 " in str(result) and "bs:100|seed:12345|case:mixed" in told.signature
    assert (made / "one" / "lengths.png").read_bytes()[:4] == b"\x89PNG"
    kept = json.loads((made / "one" / "scores.jsonl").read_text())
    assert kept["lengths"]["rows"][0]["sentences"] == len(PAIRS)


def sources(pairs: list[Pair]) -> list[str]:
    """Return what is read of pairs."""
    return [pair.source for pair in pairs]


def test_joined_sentences_are_translated_whole(made: Path):
    values = {"data": made / "test.tsv", "samples": 100, "beam": 1}
    told = regard.evaluate(made / "one", joined="40,20", **values).lengths
    assert [row.name for row in told.rows[-2:]] == ["joined 20+", "joined 40+"]
    longer = join_pairs(PAIRS, repeat(40), "en", "de")
    read, settings = TextWriter.asked[-1]  # type: ignore[attr-defined]
    assert read == sources(longer) and (settings.split, settings.beam) == (False, 1)
    assert told.rows[-1].sentences == len(longer) and told.rows[-1].words >= 40
    assert told.rows[-1].scores[0].bleu < told.rows[-2].scores[0].bleu
    again = regard.evaluate(made / "one", joined="20,40", **values).lengths
    assert again == told
    regard.evaluate(made / "one", joined=20, split=True, **values)
    assert TextWriter.asked[-1][1].split is True  # type: ignore[attr-defined]


def test_several_models_stand_side_by_side(made: Path):
    others = f"{made / 'two'},{made / 'three'}"
    values = {"data": made / "test.tsv", "samples": 100, "joined": 20}
    both = regard.evaluate(made / "one", against=others, plot=made / "all.png", **values)
    assert both.lengths.models == [str(made / name) for name in ("one", "two", "three")]
    for number, name in enumerate(("one", "two", "three")):
        alone = regard.evaluate(made / name, **values).lengths
        assert [row.scores[number] for row in both.lengths.rows] == [
            row.scores[0] for row in alone.rows
        ]
    assert "BLEU of two" in str(both) and f"of {made / 'three'}; " in str(both)
    assert [c.against for c in both.comparison[::2]] == others.split(",")
    assert (made / "all.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"plot": "picture.jpg"},
            "plot=picture.jpg is not a picture; give a name that ends in .png",
        ),
        ({"lengths": ""}, "lengths= is empty"),
        ({"lengths": "10,0"}, "lengths=0 is too small"),
        ({"joined": "20,x"}, "joined='20,x' is not a list of whole numbers"),
        ({"joined": 5000}, "joined=5000 is more words than all sentences have"),
    ],
)
def test_what_cannot_be_told_by_length_is_refused(made: Path, settings, message):
    with pytest.raises(UsageError, match=message):
        regard.evaluate(made / "one", data=made / "test.tsv", **settings)


def test_a_translator_is_judged_against_translators(made: Path):
    with pytest.raises(UsageError, match="against= names a model that does not translate"):
        regard.evaluate(made / "one", data=made / "test.tsv", against="shakespeare")


def test_only_translators_are_judged_against_several(tmp_path: Path):
    (tmp_path / "text.txt").write_text("To be, or not to be. " * 20)
    with pytest.raises(UsageError, match="against= names 2 models; one of language takes one"):
        name = "shakespeare"
        regard.evaluate(name, data=tmp_path / "text.txt", part="train", against=f"{name},{name}")


def test_a_curve_has_the_scores_of_its_model(tmp_path: Path, monkeypatch):
    import regard.viewer.plot as plot

    drawn = {}
    monkeypatch.setattr(plot, "draw_curves", lambda *args, **more: drawn.update(lines=args[2]))
    rows = [
        LengthGroup("all", 9, 12.0, [BleuInterval(30.0, 1.0), BleuInterval(20.0, 1.0)]),
        LengthGroup("1-10", 5, 8.5, [BleuInterval(31.0, 2.0), BleuInterval(25.0, 3.0)]),
        LengthGroup("joined 40+", 1, 44.0, [BleuInterval(30.5, None), BleuInterval(5.0, None)]),
    ]
    Lengths(["runs/new", "runs/old"], rows, "sig").draw(tmp_path / "x.png")
    assert drawn["lines"] == {
        "new": [(8.5, Interval(31.0, 2.0, ()))],
        "old": [(8.5, Interval(25.0, 3.0, ()))],
        "new, joined": [(44.0, Interval(30.5, None, ()))],
        "old, joined": [(44.0, Interval(5.0, None, ()))],
    }


# The recipe


def test_the_three_of_the_recipe_have_about_as_many_parameters():
    counts = {}
    for like in ladder.VARIANTS:
        _, values, _ = plan("ladder_multi30k", {"like": like, "data": "x"})
        settings = TRANSLATE.resolve(values)
        assert settings.joined == 80 and settings.minutes == 45
        kind = next(name for name in serving("translate") if like in preset_names(name))
        sizes = {"source_vocab": 5000, "target_vocab": 5000}
        model = build(kind, type(settings.model)(**{**vars(settings.model), **sizes}))
        counts[like] = sum(p.numel() for p in model.parameters())
    assert all(4.9e6 < count < 5.5e6 for count in counts.values()), counts


def test_one_command_trains_all_three_and_judges_them(tmp_path: Path, monkeypatch):
    quick = {"joined": (30,), "samples": 100, "beam": 1, "max_length": 4}
    monkeypatch.setattr(ladder, "EVAL", quick)
    for part in ("train", "val", "test"):
        for side in ("source", "target"):
            lines = "".join(f"{getattr(pair, side)}\n" for pair in PAIRS)
            name = {"source": "en", "target": "de"}[side]
            (tmp_path / f"{part}.{name}").write_text(lines)
    found = regard.compare(
        "ladder_multi30k",
        data=tmp_path,
        out=tmp_path / "runs",
        quiet=True,
        **{"steps": 1, "processes": 1, "threads": 1, "width": 16, "depth": 1},
        **{"pieces": 330, "valid_sentences": 0},
    )
    assert [run["variant"]["like"] for run in found.done] == ["rnnenc", "rnnsearch", "transformer"]
    lengths = found.judged.lengths
    assert len(lengths.models) == 3 and lengths.rows[-1].name == "joined 30+"
    assert "BLEU of rnnsearch" in str(found)
    assert (tmp_path / "runs" / "lengths.png").exists()
    told = json.loads((tmp_path / "runs" / "results.json").read_text())
    assert len(told["judged"]["lengths"]["rows"]) == len(lengths.rows)


def test_a_decoder_alone_has_as_many_parameters_as_the_encoder_decoder_of_its_recipe():
    counts = {}
    for like, name, vocabularies in (
        ("transformer", "translate", ("source_vocab", "target_vocab")),
        ("gpt2", "prefix", ("vocab",)),
    ):
        kind, values, _ = plan("decoder_multi30k", {"like": like, "data": "x"})
        assert kind == name and "task" not in values
        settings: Any = task(kind).resolve(values)
        shape = replace(settings.model, **dict.fromkeys(vocabularies, 5000))
        model = build("transformer" if name == "translate" else "gpt", shape)
        counts[like] = sum(p.numel() for p in model.parameters())
    assert abs(counts["transformer"] / counts["gpt2"] - 1) < 0.001, counts
