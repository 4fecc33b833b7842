"""Filling in: what stands where a word is masked, by public checkpoints and by our own."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import regard
from regard.cli import main
from regard.errors import UsageError
from regard.tasks.runner import Runner
from regard.tasks.text.fill import FILL, FillRun
from tests.zoo import spoilt

WORDS = ["a", "an", "the", "dog", "cat", "runs", "sleeps", "##ing", "##s", "on", "mat", "red", "."]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 32,
    "initializer_range": 0.6,
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    """A small random BERT as a public checkpoint."""
    folder = tmp_path_factory.mktemp("fill") / "bert"
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=len(SPECIAL + WORDS) + 2, max_position_embeddings=16, **SIZES
    )
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in SPECIAL + WORDS))
    return folder


@pytest.fixture(scope="module")
def roberta(tmp_path_factory) -> Path:
    """A small random RoBERTa, whose pieces bring the space before them along."""
    folder = tmp_path_factory.mktemp("fill") / "roberta"
    letters = [chr(n) for n in range(33, 127)]
    space = "\u0120"
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *letters, space, "do", "dog", f"{space}d"]
    merges = ["d o", "do g", f"{space} d"]
    torch.manual_seed(4)
    config = transformers.RobertaConfig(
        vocab_size=len(pieces) + 1, max_position_embeddings=26, type_vocab_size=1, **SIZES
    )
    transformers.RobertaForMaskedLM(config).save_pretrained(folder)
    vocab = {piece: n for n, piece in enumerate([*pieces, "<mask>"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("".join(f"{merge}\n" for merge in merges))
    flags = {"rstrip": False, "normalized": False, "single_word": False, "special": True}
    mask = {"__type": "AddedToken", "content": "<mask>", "lstrip": True, **flags}
    names: dict = {"mask": mask} | {role: f"<{role}>" for role in ("pad", "unk")}
    names |= {"bos": "<s>", "eos": "</s>", "cls": "<s>", "sep": "</s>"}
    settings = {f"{role}_token": name for role, name in names.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def own(zoo) -> Path:
    """A model of ours that has learnt a few sentences."""
    return zoo.model("fill")


@pytest.fixture(scope="module")
def filler(own) -> Runner:
    return regard.load(own)


def probabilities(model: Runner, ids: list[int], at: int) -> torch.Tensor:
    """How likely every word is at a place of a text that is read by itself."""
    with torch.no_grad():
        return model.model(torch.tensor([ids])).softmax(-1)[0, at]


# ---- one mask


def test_the_answer_is_what_transformers_says(bert, roberta):
    for folder, text in ((bert, "the red [MASK] sleeps."), (roberta, "a do <mask>og!")):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        theirs = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
        given = tokenizer(text, return_tensors="pt")
        (at,) = (given["input_ids"][0] == tokenizer.mask_token_id).nonzero()[0].tolist()
        with torch.no_grad():
            right = theirs(**given).logits[0, at].softmax(-1)
        model = regard.load(folder)
        right = right.masked_fill(~model.predictor.allowed, 0)
        count = 10
        answer = model.run(text, n_best=count)
        found = [answer, *answer.others]
        top = right.topk(count)
        named = [model.predictor.gaps.word(n) for n in top.indices.tolist()]
        assert [one.words for one in found] == [[word] for word in named]
        for one, chance in zip(found, top.values.tolist(), strict=True):
            assert one.probability == pytest.approx(chance, rel=1e-4)


def test_a_mask_may_be_written_in_every_way(bert, roberta, filler):
    for model in (regard.load(bert), regard.load(roberta), filler):
        ways = [
            model.run(f"the red {sign} runs.")
            for sign in ("[MASK]", "<mask>", model.predictor.gaps.mask_token)
        ]
        assert ways[0].record(FillRun()) == ways[1].record(FillRun())
        assert str(ways[0]) == str(ways[2])


def test_what_was_learnt_is_filled_in(filler):
    answer = filler.run("the red dog [MASK].")
    assert str(answer) == "the red dog sleeps."
    answer = filler.run("a red [MASK] runs.")
    assert str(answer) == "a red dog runs."
    both = [str(a) for a in filler.run(["the cat [MASK] home.", "[MASK] red cat sleeps."])]
    assert both == ["the cat runs home.", "the red cat sleeps."]


def test_the_rest_of_the_text_stays_as_it_was_written(bert, roberta):
    model = regard.load(bert)
    numbers = {piece: n for n, piece in enumerate(model.predictor.gaps.pieces)}
    put = lambda text, *words: model.predictor.gaps.fill_in(text, [numbers[word] for word in words])  # noqa: E731
    assert put("The RED  [MASK] !", "dog") == "The RED  dog !"
    assert put("Walk [MASK] ([MASK])", "##ing", "mat") == "Walking (mat)"
    model = regard.load(roberta)
    numbers = {piece: n for n, piece in enumerate(model.predictor.gaps.pieces)}
    assert put("The RED <mask>.", "▁d") == "The RED d."
    assert put("The RED <mask>.", "dog") == "The REDdog."
    assert put("<mask> RED", "▁d") == "d RED"


def test_padding_and_neighbours_never_matter(bert):
    model = regard.load(bert)
    texts = ["[MASK] runs", "the red [MASK] sleeps on the mat .", "", "a [MASK] ."]
    together = model.run(texts, n_best=3)
    for text, answer in zip(texts, together, strict=True):
        (alone,) = model.run([text], n_best=3)
        for one, other in zip([answer, *answer.others], [alone, *alone.others], strict=True):
            assert one.text == other.text
            assert one.probability == pytest.approx(other.probability, rel=1e-4)


def test_no_special_token_is_ever_an_answer(bert, filler):
    for model in (regard.load(bert), filler):
        count = int(model.predictor.allowed.sum())
        answer = model.run("the [MASK] runs", n_best=min(count, 1000))
        words = [one.words[0] for one in (answer, *answer.others)]
        assert not {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "<unk>"} & set(words)
        assert (
            len(words) == count
            and int(model.predictor.allowed.sum()) <= model.codec.tokenizer.vocab - 4
        )
    with pytest.raises(UsageError, match="n_best=1000 is more than the words"):
        regard.load(bert).run("a [MASK]", n_best=1000)


# ---- several masks


def test_several_masks_are_filled_by_the_rule_of_chains(bert):
    model = regard.load(bert)
    text = "the [MASK] dog [MASK] ."
    ids = model.codec.tokenizer.frame(model.predictor.gaps.encode_bare(text))
    one, two = (at for at, number in enumerate(ids) if number == model.predictor.gaps.mask)
    count = int(model.predictor.allowed.sum())
    first = probabilities(model, ids, one).masked_fill(~model.predictor.allowed, 0)
    every = []
    for token in range(count + 5):
        ids[one] = token
        second = probabilities(model, ids, two).masked_fill(~model.predictor.allowed, 0)
        every += [(float(first[token] * p), token, n) for n, p in enumerate(second.tolist())]
    every.sort(reverse=True)
    # with as many kept as there are words nothing is lost on the way
    answer = model.run(text, n_best=count)
    for found, (chance, a, b) in zip([answer, *answer.others], every, strict=False):
        assert found.words == [model.predictor.gaps.word(a), model.predictor.gaps.word(b)]
        assert found.probability == pytest.approx(chance, rel=1e-3)
    # and each mask by itself is told as well
    told = answer.record(FillRun())["masks"]
    assert len(told) == 2 and len(told[0]) == 5
    best = int(first.argmax())
    assert told[0][0] == {
        "word": model.predictor.gaps.word(best),
        "probability": pytest.approx(float(first[best]), rel=1e-3),
    }


def test_fewer_kept_are_the_same_where_they_are_certain(filler):
    answer = filler.run("[MASK] red cat [MASK].", n_best=3)
    assert str(answer) == "the red cat sleeps."
    found = [one.probability for one in (answer, *answer.others)]
    assert found == sorted(found, reverse=True) and sum(found) <= 1
    assert math.isclose(filler.run("[MASK] red cat [MASK].").probability, found[0], rel_tol=0.2)


# ---- what is read


def test_a_long_text_is_read_around_its_masks(bert):
    model = regard.load(bert)
    before, after = "the red dog runs on the mat . " * 4, " the cat sleeps" * 4
    text = f"{before}a [MASK] cat{after}"
    answer = model.run(text)
    assert answer.text.startswith(before) and answer.text.endswith(after)
    ids = model.predictor.gaps.encode_bare(text)
    at = ids.index(model.predictor.gaps.mask)
    part = model.codec.tokenizer.frame(ids[at - 7 : at + 7])
    right = probabilities(model, part, 8)
    assert answer.probability == pytest.approx(
        float(right[model.predictor.allowed].max()), rel=1e-4
    )
    with pytest.raises(UsageError, match="text 1: its masks are more than 14 pieces apart"):
        model.run(f"[MASK] {before} [MASK]")


def test_a_text_without_a_mask_is_told_by_its_number(bert):
    model = regard.load(bert)
    with pytest.raises(
        UsageError, match=r"text 12: 'a dog' has nothing to fill in; write \[MASK\]"
    ):
        model.run(["a [MASK]", "a dog"], first=10)
    with pytest.raises(UsageError, match="7 is not a text"):
        model.run([7])


def test_lines_and_json_lines(bert, monkeypatch, capsys, tmp_path):
    def run(lines: str, *words: str) -> list[str]:
        (tmp_path / "in").write_text(lines)
        with open(tmp_path / "in") as file:
            monkeypatch.setattr("sys.stdin", file)
            assert main(["run", str(bert), *words]) == 0
        return capsys.readouterr().out.splitlines()

    model = regard.load(bert)
    (one, two) = model.run(["a [MASK] runs", "red [MASK]"], n_best=2)
    assert run("a [MASK] runs\nred [MASK]\n") == [one.text, two.text]
    lines = run("a [MASK] runs\n\nred [MASK]\n", "n_best=2", "scores=true")
    assert len(lines) == 6 and lines[2:4] == ["", ""]
    assert lines[0] == f"{one.text} ||| {one.probability:.6f}"
    (record,) = map(json.loads, run('{"text": "a [MASK] runs", "id": 3}\n', "n_best=2"))
    assert record["id"] == 3 and record["text"] == "a [MASK] runs"
    assert record["prediction"] == one.text and len(record["n_best"]) == 2
    assert main(["run", str(bert), "a [MASK] runs"]) == 0
    assert capsys.readouterr().out == f"{one.text}\n"


def test_there_is_nothing_to_train():
    with pytest.raises(UsageError, match="regard train language objective=masked"):
        regard.train("fill", data="x")


# ---- judging and looking


def test_accuracy_is_in_percent_and_guesses_are_written(zoo, own, bert, tmp_path):
    how = {"data": str(zoo.data("fill")), "part": "valid", "batch_tokens": 256}
    result = regard.evaluate(own, **how, outputs=tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    right = sum(row["token"] == row["prediction"] for row in rows)
    assert 100 * right / len(rows) == pytest.approx(result["accuracy"])
    assert result["accuracy"] > 1  # which a share could not be
    metrics = (own / "metrics.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in metrics if "accuracy" in line]
    assert max(row.get("valid/accuracy", row.get("accuracy", 0)) for row in told) > 1
    regard.evaluate(own, **how, outputs=tmp_path / "out.txt")
    assert len((tmp_path / "out.txt").read_text().splitlines()) == len(rows)


def test_evaluate_is_the_validation_of_the_training(zoo, tmp_path):
    own = zoo.copy("fill", tmp_path / "run")
    lines = (own / "metrics.jsonl").read_text().splitlines()
    scores = [json.loads(line) for line in lines]
    valid = [row for row in scores if "valid/loss" in row][-1]
    result = regard.evaluate(own, data=str(zoo.data("fill")), part="valid", batch_tokens=256)
    found = {score.name: score.value for score in result.scores}
    assert found["loss"] == pytest.approx(valid["valid/loss"], rel=1e-5)
    assert found["accuracy"] == pytest.approx(valid["valid/accuracy"], rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert "mask_share:0.15|whole words" in str(result)
    assert (own / "scores.jsonl").exists()


def test_evaluate_judges_public_checkpoints_too(bert, zoo):
    result = regard.evaluate(bert, data=str(zoo.data("fill")), part="valid", against=bert)
    assert len(result.scores) == 6 and result.scores[0].value == result.scores[3].value
    with pytest.raises(UsageError, match="context=64 is more than the 16 places"):
        regard.evaluate(bert, data=str(zoo.data("fill")), part="valid", context=64)
    with pytest.raises(UsageError, match="data is missing"):
        regard.evaluate(bert)


def test_looking_shows_where_it_looked_and_what_it_thought_of(filler):
    picture = filler.picture("a red [MASK] runs.", n_best=2)
    assert picture.output == "a red dog runs."
    rows = list(picture.views[0].row_tokens)
    assert rows[0] == "<s>" and "[MASK]" in rows
    assert np.abs(picture.views[0].weights.sum(-1) - 1).max() < 1e-5
    (step,) = picture.steps
    answer = filler.run("a red [MASK] runs.", n_best=2)
    assert step.probability == pytest.approx(answer.probability, rel=1e-5)
    assert len(step.candidates) == 5 and len(picture.alternatives) == 1


@pytest.mark.parametrize("context", [1, 17, "8", True])
def test_a_folder_that_lies_is_refused(own, tmp_path, context):
    with pytest.raises(UsageError, match="config.json: 'context' is"):
        regard.load(spoilt(own, tmp_path / "run", context=context))


def test_a_model_without_words_fills_nothing_in(tmp_path, bert):
    from regard.models import preset
    from regard.models.gpt import GPT

    with pytest.raises(UsageError, match="a model without a head for words"):
        FILL.load(tmp_path, GPT(preset("gpt", "tiny")), {})


def test_a_text_without_a_mask_can_be_looked_at(filler, own, tmp_path, capsys):
    seen = filler.picture("a red dog runs.")
    assert seen.steps == [] or list(seen.steps) == []
    assert len(seen.views) == filler.model.config.depth and "nothing to fill in" in seen.note
    assert seen.output == "a red dog runs."
    out = tmp_path / "seen.html"
    assert main(["look", str(own), "a red dog runs.", f"out={out}"]) == 0
    assert out.exists()
    long = filler.picture("a red dog runs. " * 100)
    assert len(long.views[0].row_tokens) == filler.predictor.window
    assert list(filler.picture("a red [MASK] runs.").steps)
