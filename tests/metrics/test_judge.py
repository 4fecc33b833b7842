"""Scores say how they were made, and are those that sacreBLEU gives."""

import json
import random
from pathlib import Path

import pytest
import torch
from sacrebleu import corpus_bleu, corpus_chrf
from sacrebleu.metrics.bleu import BLEU

import regard
from regard.data.tokenize import train_tokenizer
from regard.errors import UsageError
from regard.files import sha256, write_atomically
from regard.files.weights import state_of
from regard.layers.block import BlockConfig
from regard.metrics.bleu import bleu_scores, compare_bleu, tokenise_for
from regard.models.folder import save_config, save_weights
from regard.models.transformer import Transformer, TransformerConfig
from regard.pretrained.tokenizer_folder import save_tokenizers

ENGLISH = ["The dog runs, and the cat sits.", "A man in a red hat!", "Two women (old) talk."]
GUESSES = ["The dog runs and the cat sits.", "A man in a Red hat!", "Two old women talk."]
CHINESE = ["你好吗？我很好。", "这是一本书。", "他们在公园里散步。"]
SPOKEN = ["你好吗？我好。", "这是一本旧书。", "他们在公园散步。"]


@pytest.mark.parametrize(
    ("outputs", "references", "language", "tokenise"),
    [
        (GUESSES, ENGLISH, "en", "13a"),
        (GUESSES, ENGLISH, None, "13a"),
        (SPOKEN, CHINESE, "zh", "zh"),
        (SPOKEN, CHINESE, "zh-TW", "zh"),
        (SPOKEN, CHINESE, "ZH_hans", "zh"),
        (SPOKEN, CHINESE, "ja", "char"),
    ],
)
def test_scores_are_those_of_sacrebleu(outputs, references, language, tokenise):
    bleu, chrf = bleu_scores(outputs, [references], language)
    theirs = BLEU(tokenize=tokenise)
    assert bleu.value == theirs.corpus_score(outputs, [references]).score
    assert bleu.value == corpus_bleu(outputs, [references], tokenize=tokenise).score
    assert bleu.signature == str(theirs.get_signature())
    assert f"tok:{tokenise}|" in bleu.signature and "case:mixed" in bleu.signature
    assert chrf.value == corpus_chrf(outputs, [references]).score
    assert tokenise_for(language) == tokenise
    assert bleu.signature in str(bleu)


def test_settings_of_a_score_stand_in_its_signature():
    plain = bleu_scores(GUESSES, [ENGLISH], "en")[0]
    lower = bleu_scores(GUESSES, [ENGLISH], lowercase=True)[0]
    assert lower.value > plain.value
    assert "case:lc" in lower.signature
    several = bleu_scores(GUESSES, [ENGLISH, GUESSES], "en")[0]
    assert several.value == pytest.approx(100)
    assert "nrefs:2" in several.signature
    assert (
        bleu_scores(SPOKEN, [CHINESE], "zh", tokenise="13a")[0].value
        < bleu_scores(SPOKEN, [CHINESE], "zh")[0].value
    )


def test_wrong_ways_to_judge():
    with pytest.raises(UsageError, match="unknown tokenise '14a'; choose from"):
        bleu_scores(GUESSES, [ENGLISH], tokenise="14a")
    with pytest.raises(UsageError, match="nothing to score"):
        bleu_scores([], [[]])


def sentences(count: int, spoilt: float) -> tuple[list[str], list[str]]:
    """Return references, and outputs in which a share of the words is wrong."""
    chance = random.Random(1)
    references = [" ".join(f"w{chance.randrange(50)}" for _ in range(12)) for _ in range(count)]
    outputs = [
        " ".join("x" if chance.random() < spoilt else word for word in line.split())
        for line in references
    ]
    return references, outputs


def test_a_clearly_better_system_is_told_apart():
    references, bad = sentences(60, 0.4)
    good = sentences(60, 0.1)[1]
    bleu, chrf = compare_bleu(good, bad, [references], "en", samples=200)
    assert (bleu.name, chrf.name) == ("BLEU", "chrF2")
    assert bleu.ours > bleu.theirs and bleu.p < 0.05 and chrf.p < 0.05
    assert bleu.ours == bleu_scores(good, [references])[0].value
    assert bleu.theirs == bleu_scores(bad, [references])[0].value
    assert bleu.low < bleu.ours < bleu.high
    assert "bs:200" in bleu.signature and "tok:13a" in bleu.signature
    back = compare_bleu(bad, good, [references], "en", samples=200)[0]
    assert back.ours < back.theirs and back.p < 0.05


# A model on a test set


def save_model(folder: Path, seed: int, language: str) -> Path:
    """Write a folder with a model of random weights, which writes something."""
    tokenizer = train_tokenizer([line for line in (*ENGLISH, *GUESSES, *CHINESE)] * 4, vocab=400)
    torch.manual_seed(seed)
    block = BlockConfig(width=16, heads=2, ffn_width=16)
    size = tokenizer.vocab
    model = Transformer(TransformerConfig(size, size, 1, 1, block))
    folder.mkdir()
    save_config(
        folder, model, name="transformer", task="translate", about={"from": "en", "to": language}
    )
    save_weights(folder, state_of(model))
    save_tokenizers(folder, (tokenizer, tokenizer))
    return folder


@pytest.fixture
def made(tmp_path) -> Path:
    """Return a folder with two models and a test set."""
    save_model(tmp_path / "one", 1, "zh")
    save_model(tmp_path / "two", 2, "zh")
    rows = [f"{a}\t{b}\n" for a, b in zip(ENGLISH, CHINESE, strict=True)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "test.tsv").write_text("".join(rows))
    return tmp_path


def test_a_model_is_judged_by_its_own_translations(made, capsys):
    result = regard.evaluate(made / "one", data=made / "data", beam=2, max_length=6)
    model = regard.load(made / "one")
    outputs = [answer.text for answer in model.run(ENGLISH, beam=2, max_length=6)]
    expected = bleu_scores(outputs, [CHINESE], "zh")
    assert result.scores == expected
    assert "tok:zh" in result.scores[0].signature
    assert (result.sentences, result.against, result.comparison) == (3, None, [])
    assert capsys.readouterr().err == ""
    assert all(str(score) in str(result) for score in expected)


def test_every_score_is_kept_with_what_it_depends_on(made):
    for beam in (1, 2):
        regard.evaluate(made / "one", data=made / "data", beam=beam, max_length=4, alpha=0.5)
    kept = [json.loads(line) for line in (made / "one" / "scores.jsonl").read_text().splitlines()]
    assert [row["made_with"]["beam"] for row in kept] == [1, 2]
    first = kept[0]["made_with"]
    assert first["alpha"] == 0.5 and first["max_length"] == 4 and first["seed"] == 1
    assert first["tokenizers"] == [regard.load(made / "one").codec.target.sha] * 2
    assert len(first["data_hash"]) == 64 and first["threads"] == torch.get_num_threads()
    assert {"commit", "regard", "date"} <= first.keys()
    assert [score["name"] for score in kept[0]["scores"]] == ["BLEU", "chrF2"]
    (made / "data" / "test.tsv").write_text("a\tb\n")
    regard.evaluate(made / "one", data=made / "data", max_length=4)
    last = json.loads((made / "one" / "scores.jsonl").read_text().splitlines()[-1])
    assert last["made_with"]["data_hash"] != first["data_hash"]


def test_a_folder_that_cannot_be_written_still_gives_scores(made, capsys):
    (made / "one" / "scores.jsonl").mkdir()
    assert regard.evaluate(made / "one", data=made / "data", max_length=4).scores
    assert "the scores are not kept there" in capsys.readouterr().err


def test_13a_for_chinese_is_warned_of(made, capsys):
    result = regard.evaluate(made / "one", data=made / "data", max_length=4, tokenise="13a")
    assert "tok:13a" in result.scores[0].signature
    assert "warning: tokenise=13a does not part the words of zh" in capsys.readouterr().err


def test_two_models_are_compared(made):
    result = regard.evaluate(
        made / "one",
        data=made / "data",
        against=made / "two",
        samples=100,
        max_length=6,
        outputs=made / "outputs.txt",
    )
    assert result.against == str(made / "two")
    ours, theirs = (
        [a.text for a in regard.load(made / name).run(ENGLISH, max_length=6)]
        for name in ("one", "two")
    )
    bleu = result.comparison[0]
    assert bleu.ours == bleu_scores(ours, [CHINESE], "zh")[0].value == result.scores[0].value
    assert bleu.theirs == bleu_scores(theirs, [CHINESE], "zh")[0].value
    lines = (made / "outputs.txt").read_text().splitlines()
    assert lines == [" ".join(text.split()) for text in ours]
    twin = regard.evaluate(
        made / "one", data=made / "data", against=made / "one", samples=100, max_length=6
    )
    assert twin.comparison[0].p > 0.9


def test_a_comparison_ignores_case_as_the_score_does(made):
    result = regard.evaluate(
        regard.load(made / "one"),
        data=made / "data",
        against=regard.load(made / "two"),
        lowercase=True,
        samples=100,
        max_length=4,
    )
    assert "case:lc" in result.scores[0].signature
    assert "case:lc" in result.comparison[0].signature
    assert result.model == "model"


def test_judging_changes_no_weight(made):
    before = sha256(made / "one" / "model.safetensors")
    regard.evaluate(made / "one", data=made / "data", max_length=4)
    assert sha256(made / "one" / "model.safetensors") == before
    assert not list(made.rglob("*.tmp"))
    write_atomically(made / "one" / "generation_config.json", '{"beam": 3}')
    result = regard.evaluate(made / "one", data=made / "data", max_length=4)
    assert result.made_with["beam"] == 3  # the model's own default
