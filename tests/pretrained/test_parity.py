"""What Regard makes of public checkpoints is what transformers makes of them, odd ones included.

The sweep itself is bench/parity.py; here are some of its draws, and what once was wrong.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import regard
from regard.decode import rules
from regard.errors import UsageError
from regard.pretrained import generation

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import parity  # noqa: E402

parity.TEXTS = parity.TEXTS[:2]  # the sweep itself takes more

YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
# what once was wrong: model_type, their class, and settings
WRONG: list[tuple[str, str, dict[str, Any]]] = [
    ("bart", "BartForConditionalGeneration", {"tie_word_embeddings": False}),
    ("marian", "MarianMTModel", {"tie_word_embeddings": False}),
    (
        "marian",
        "MarianMTModel",
        {"tie_word_embeddings": False, "share_encoder_decoder_embeddings": False},
    ),
    ("roberta", "RobertaForMaskedLM", {"hidden_act": "relu"}),
    ("roberta", "RobertaForMaskedLM", {"hidden_act": "silu", "tie_word_embeddings": False}),
    *(
        ("llama", "LlamaForCausalLM", {"rope_parameters": parity.rope("yarn", **YARN, **more)})
        for more in (
            {"mscale": 1.5, "mscale_all_dim": 0},
            {"mscale": 0, "mscale_all_dim": 1.0},
            {"mscale_all_dim": 1.2},
            {"beta_fast": 0, "beta_slow": 0},
        )
    ),
    ("bert", "BertForSequenceClassification", {"num_labels": 1}),
    (
        "bert",
        "BertForSequenceClassification",
        {"num_labels": 4, "problem_type": "multi_label_classification"},
    ),
]


def outcome_of(
    tmp_path: Path, model_type: str, name: str, odd: dict, generation: dict | None = None
) -> parity.Outcome:
    """Write a checkpoint and compare what both make of it, and of what is exported."""
    folder, outcome = tmp_path / "theirs", parity.Outcome()
    with parity.quiet_transformers():
        parity.write(model_type, name, odd, generation or {}, folder)
        parity.judge(outcome, model_type, folder, name)
    return outcome


@pytest.mark.parametrize("model_type,name,odd", WRONG)
def test_what_once_was_wrong_is_equal(model_type: str, name: str, odd: dict, tmp_path: Path):
    outcome = outcome_of(tmp_path, model_type, name, odd)
    assert not outcome.wrong and not outcome.refused


@pytest.mark.parametrize("words", [(False, 0), (True, 3)], ids=["unframed", "spare rows"])
@pytest.mark.parametrize(
    "model_type,name",
    [("bart", "BartForConditionalGeneration"), ("t5", "T5ForConditionalGeneration")]
    + [("gpt2", "GPT2LMHeadModel"), ("marian", "MarianMTModel")],
)
def test_a_folder_gets_only_what_it_asks_for(
    model_type: str, name: str, words: tuple[bool, int], tmp_path: Path, capsys
):
    outcome, folder = parity.Outcome(), tmp_path / "theirs"
    with parity.quiet_transformers():
        parity.write(model_type, name, {}, {}, folder, words=words)
        parity.judge(outcome, model_type, folder, name)
    assert not outcome.wrong and not outcome.refused
    capsys.readouterr()
    runner = regard.load(folder)
    assert runner.check({}).beam == 1 and not runner.check({}).temperature
    runner.run(["a ring", "an old hat"])
    told = capsys.readouterr().err
    assert told.count("otherwise than transformers: no max_length is given") == 1


REFUSED = {
    "'attn_logit_softcapping'=50.0 is not known": ("llama", {"attn_logit_softcapping": 50.0}),
    "partial_rotary_factor=0.5": ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}),
    "'new' in rope_parameters": ("llama", {"rope_parameters": {"rope_type": "default", "new": 1}}),
    "slow_but_exact with pretraining_tp=2": (
        "bloom",
        {"slow_but_exact": True, "pretraining_tp": 2},
    ),
    "problem_type='other'": ("bert", {"problem_type": "other"}),
    "problem_type=regression with 3 labels": ("bert", {"problem_type": "regression"}),
    "decoder_vocab_size=60 but vocab_size=44": ("marian", {"decoder_vocab_size": 60}),
}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "bloom": "BloomForCausalLM",
    "bert": "BertForSequenceClassification",
    "marian": "MarianMTModel",
    "vit": "ViTForImageClassification",
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_honoured_is_refused_by_name(message: str, tmp_path: Path):
    model_type, told = REFUSED[message]
    parity.write(model_type, CLASSES[model_type], {"num_labels": 3}, {}, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **told}))
    with pytest.raises(UsageError) as refused:
        regard.load(tmp_path)
    assert message in str(refused.value)


def test_images_have_one_label_of_several(tmp_path: Path):
    odd = {"num_labels": 3, "problem_type": "multi_label_classification"}
    parity.write("vit", CLASSES["vit"], odd, {}, tmp_path)
    with pytest.raises(UsageError, match="problem_type=multi_label_classification with 3 labels"):
        regard.load(tmp_path)


def test_two_tables_that_should_be_one_are_refused(tmp_path: Path):
    parity.write("llama", CLASSES["llama"], {"tie_word_embeddings": True}, {}, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    save_file({**weights, "lm_head.weight": table.clone()}, tmp_path / "model.safetensors")
    regard.load(tmp_path)  # the same once more does no harm
    save_file({**weights, "lm_head.weight": table + 1}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="lm_head.weight and model.embed_tokens.weight differ"):
        regard.load(tmp_path)


# ---- classifiers


def classifier(tmp_path: Path, **odd: Any) -> tuple[Any, torch.Tensor]:
    """Return a classifier as we read it, and transformers' logits of some texts."""
    name = CLASSES["bert"]
    parity.write("bert", name, odd, {}, tmp_path / "theirs")
    theirs = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "theirs").eval()
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        logits = [theirs(**words(text, return_tensors="pt")).logits for text in parity.TEXTS]
    return regard.load(tmp_path / "theirs"), torch.cat(logits)


@pytest.mark.parametrize("problem", [None, "regression"])
def test_one_label_is_a_number(problem: str | None, tmp_path: Path):
    ours, logits = classifier(tmp_path, num_labels=1, problem_type=problem)
    answers = ours.run(parity.TEXTS)
    values = torch.tensor([answer.value for answer in answers])
    torch.testing.assert_close(values, logits[:, 0], atol=1e-4, rtol=0)
    assert str(answers[0]) == f"{answers[0].value:.6g}"
    assert answers[0].record(ours.check({})) == {"prediction": answers[0].value}
    rows = [f"{text}\t{value}" for text, value in zip(parity.TEXTS, values.tolist(), strict=True)]
    (tmp_path / "test.tsv").write_text("\n".join(["text\tlabel", *rows]))
    told = ours.evaluate({"data": str(tmp_path / "test.tsv")})
    assert {score.name for score in told.scores} >= {"Pearson", "mean squared error"}
    assert told.scores[-1].value < 1e-6 and told.scores[1].value == pytest.approx(1)
    (tmp_path / "test.tsv").write_text("text\tlabel\na\tgood\nb\t1.0")
    with pytest.raises(UsageError, match="'good' is not a number"):
        ours.evaluate({"data": str(tmp_path / "test.tsv")})
    regard.export(str(tmp_path / "theirs"), format="huggingface", out=str(tmp_path / "out"))
    again = json.loads((tmp_path / "out" / "config.json").read_text())
    assert again.get("problem_type") == problem and len(again["id2label"]) == 1


def test_several_labels_stay_several(tmp_path: Path):
    ours, logits = classifier(tmp_path, num_labels=4, problem_type="multi_label_classification")
    chances = torch.stack([torch.tensor(answer.probabilities) for answer in ours.run(parity.TEXTS)])
    torch.testing.assert_close(chances, logits.sigmoid(), atol=1e-5, rtol=0)
    assert all(isinstance(answer.label, list) for answer in ours.run(parity.TEXTS))
    regard.import_model(tmp_path / "theirs", out=str(tmp_path / "ours"))
    regard.export(str(tmp_path / "ours"), format="huggingface", out=str(tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    again = regard.load(tmp_path / "out").run(parity.TEXTS)
    assert [str(answer) for answer in again] == [str(answer) for answer in ours.run(parity.TEXTS)]


# ---- ways to generate

WAYS: list[dict[str, Any]] = [
    {"length_penalty": 0.0, "early_stopping": True},
    {"length_penalty": 2.0, "early_stopping": False},
    {"length_penalty": -0.5, "early_stopping": "never"},
    {"min_length": 8, "min_new_tokens": 3},
    {"no_repeat_ngram_size": 2},
    {"encoder_no_repeat_ngram_size": 2, "renormalize_logits": True},
    {"repetition_penalty": 1.5, "bad_words_ids": [[6], [8, 9]]},
    {"forced_bos_token_id": 9, "forced_eos_token_id": 2, "begin_suppress_tokens": [7]},
    {"suppress_tokens": [5, 6, 3], "exponential_decay_length_penalty": [3, 1.4]},
    {"sequence_bias": [[[7], 3.0], [[8, 9], -4.0]], "eos_token_id": [2, 11]},
]


@pytest.mark.parametrize("number", range(len(WAYS)))
@pytest.mark.parametrize(
    "model_type,name",
    [("llama", "LlamaForCausalLM"), ("bart", "BartForConditionalGeneration")],
)
def test_generation_config_is_honoured(model_type: str, name: str, number: int, tmp_path: Path):
    outcome = outcome_of(tmp_path, model_type, name, {}, WAYS[number])
    assert not outcome.wrong and not outcome.refused


@pytest.mark.parametrize(
    "told,message",
    [
        ({"num_beam_groups": 2}, "num_beam_groups=2 is not supported"),
        ({"diversity_penalty": 0.5}, "diversity_penalty=0.5 is not supported"),
        ({"penalty_alpha": 0.6}, "penalty_alpha=0.6 is not supported"),
        ({"encoder_repetition_penalty": 1.4}, "encoder_repetition_penalty=1.4 is not supported"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5 is not supported"),
        ({"stop_strings": ["."]}, "stop_strings=['.'] is not supported"),
        ({"do_sample": True, "typical_p": 0.9}, "typical_p=0.9 is not supported"),
        ({"do_sample": True, "num_beams": 3}, "do_sample=true with num_beams=3"),
        ({"length_penalty": "long"}, "length_penalty='long'; expected a number"),
        ({"bad_words_ids": [[44]]}, "bad_words_ids=44; expected a token from 0 to 43"),
        ({"no_repeat_ngram_size": "3"}, "no_repeat_ngram_size='3'; expected a number"),
        ({"a_new_setting": 1}, "'a_new_setting' is not known"),
    ],
)
def test_a_way_to_generate_that_is_not_known_is_refused_by_name(
    told: dict, message: str, tmp_path: Path
):
    parity.write("llama", CLASSES["llama"], {}, told, tmp_path)
    with pytest.raises(UsageError) as refused:
        regard.load(tmp_path)
    assert message in str(refused.value)


def test_the_rules_that_are_read_are_those_that_are_known():
    assert {*generation.RULES, *generation.SOUND_RULES} == set(rules.GENERATION_RULES)


def test_older_checkpoints_tell_it_in_config_json(tmp_path: Path):
    parity.write("bart", "BartForConditionalGeneration", {}, {}, tmp_path)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    told = {"num_beams": 3, "no_repeat_ngram_size": 2, "min_length": 6, "max_length": 9}
    told |= {"forced_eos_token_id": 2, "length_penalty": 1.7}
    (tmp_path / "config.json").write_text(json.dumps({**config, **told}))
    with parity.quiet_transformers():
        theirs = transformers.BartForConditionalGeneration.from_pretrained(tmp_path).eval()
        theirs.generation_config.update(**told)  # which transformers reads no more
        words = transformers.AutoTokenizer.from_pretrained(tmp_path)
        right = []
        for text in parity.TEXTS:
            done = theirs.generate(**words(text, return_tensors="pt"), use_cache=False)
            right.append(words.decode(done[0], skip_special_tokens=True))
    answers = regard.load(tmp_path).run(parity.TEXTS, split=False)
    assert [str(answer) for answer in answers] == right


def test_drawing_as_a_checkpoint_wants(tmp_path: Path):
    told = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
    parity.write("llama", CLASSES["llama"], {}, told, tmp_path / "one")
    how = regard.load(tmp_path / "one").check({})
    assert (how.temperature, how.top_p, how.top_k) == (0.7, 0.9, 50)  # transformers' own
    parity.write("llama", CLASSES["llama"], {}, {"do_sample": False}, tmp_path / "two")
    assert regard.load(tmp_path / "two").check({}).temperature == 0
    parity.write("llama", CLASSES["llama"], {}, {"max_length": 6}, tmp_path / "three")
    model = regard.load(tmp_path / "three")
    (answer,) = model.run(["a a"], temperature=0, scores=True)
    assert len(model.predictor.encode("a a" + answer.completion)) <= 6
    with pytest.raises(UsageError, match="no room to go on"):
        model.run(["the king and a ring and a ring"])


# ---- a few draws of the sweep


@pytest.mark.parametrize("model_type", parity.CASES)
def test_some_draws_are_equal_or_refused(model_type: str):
    counted = parity.sweep(model_type, 3)
    assert counted["wrong"] == 0


# ---- our own models, exported and read again


PAIRS = [(f"the dog {n} ran home", f"der hund {n} lief heim") for n in range(60)]
QUICK: dict[str, Any] = {"steps": 12, "valid_every": 12, "pieces": 320, "quiet": True}


def exported(task: str, home: Path, text: str, **settings: Any) -> tuple[Any, Any]:
    """Train a default model for a moment and export it; return it, and what we read again."""
    (home / "data.tsv").write_text(text)
    how = {"data": str(home / "data.tsv"), "out": str(home / "run"), **QUICK, **settings}
    regard.train(task, **how)
    regard.export(str(home / "run"), format="huggingface", out=str(home / "out"))
    return regard.load(str(home / "run")), regard.load(str(home / "out"))


def test_a_default_translator_is_the_same_after_export(tmp_path: Path):
    ours, again = exported("translate", tmp_path, "\n".join("\t".join(p) for p in PAIRS))
    texts = ["the dog 3 ran home", "home the dog", "ran 77"]
    right = [str(answer) for answer in ours.run(texts, max_length=12)]
    assert again.name == "translate"
    assert [str(answer) for answer in again.run(texts, max_length=12)] == right
    with parity.quiet_transformers():
        theirs: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").eval()
        words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
        found = []
        for text in texts:
            given = words(text, return_tensors="pt", return_token_type_ids=False)
            found.append(theirs.generate(**given, max_new_tokens=12)[0])
        source = words(texts[0], return_tensors="pt")["input_ids"]
        target = torch.tensor([[1, 9, 270, 280]])
        with torch.no_grad():
            one = theirs(source, decoder_input_ids=target).logits
            two = ours.model(source, target)
    assert [words.decode(ids, skip_special_tokens=True) for ids in found] == right
    assert not parity.differ(two, one)


def test_a_tagger_is_the_same_after_export(tmp_path: Path):
    text = "\n\n".join(f"the\tD\ndogged{n}\tN\nrunning\tV" for n in range(40))
    ours, again = exported("tag", tmp_path, text, linear=False)
    some = ["the dogged7 running", "running the unheardof the"]
    assert [str(a) for a in again.run(some)] == [str(a) for a in ours.run(some)]
    with parity.quiet_transformers():
        theirs: Any = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "out")
        ids = torch.tensor([[1, 262, 270, 280, 2]])
        with torch.no_grad():
            assert not parity.differ(ours.model(ids), theirs.eval()(ids).logits)


def test_a_tagger_that_joins_pieces_is_refused(tmp_path: Path):
    text = "\n\n".join(f"the\tD\ndog{n}\tN\nran\tV" for n in range(40))
    with pytest.raises(UsageError, match="join=mean has no counterpart"):
        exported("tag", tmp_path, text, join="mean", linear=False)


TOPICS = [
    f"{word} in the {n} {place}\t{label}"
    for n in range(20)
    for word, place, label in (("bread", "oven", "food"), ("a goal", "game", "sport"))
]
MORE = ["a goal in the oven", "🎉", "<s> bread </s>", "bread in the game " * 99]


@pytest.mark.parametrize("several", [False, True])
def test_a_classifier_is_the_same_after_export(several: bool, tmp_path: Path):
    more = [*TOPICS, "bread and a game\tfood,sport"] if several else TOPICS
    settings = {"separator": ","} if several else {"linear": False}
    ours, again = exported("classify", tmp_path, "\n".join(more), pool="roberta", **settings)
    right = ours.run(MORE)
    assert again.model.config == ours.model.config
    assert [str(answer) for answer in again.run(MORE)] == [str(answer) for answer in right]
    with parity.quiet_transformers():
        auto = transformers.AutoModelForSequenceClassification
        theirs: Any = auto.from_pretrained(tmp_path / "out").eval()
        words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
        given = words(MORE, return_tensors="pt", padding=True, truncation=True)
        with torch.no_grad():
            logits = theirs(**given).logits
    chances = logits.sigmoid() if several else logits.softmax(-1)
    for answer, row, other in zip(right, chances.numpy(), again.run(MORE), strict=True):
        assert answer.probabilities == pytest.approx(row, abs=1e-5)
        assert answer.probabilities == pytest.approx(other.probabilities, abs=1e-5)


def test_a_classifier_that_no_format_holds_is_refused_by_name(tmp_path: Path):
    with pytest.raises(UsageError, match="for pool='mean'; .*pool=roberta"):
        exported("classify", tmp_path, "\n".join(TOPICS), linear=False)


def test_running_text_has_no_unseen_space(tmp_path: Path):
    (tmp_path / "text.txt").write_text("Row your boat. Gently down the stream.\n" * 100)
    how = {**QUICK, "data": str(tmp_path / "text.txt"), "out": str(tmp_path / "run"), "steps": 2}
    regard.train("language", **{**how, "valid_every": 2})
    regard.export(str(tmp_path / "run"), format="huggingface", out=str(tmp_path / "out"))
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = regard.load(str(tmp_path / "run"))
    for text in ("Row your", "down", " the"):
        assert words(text)["input_ids"] == ours.predictor.encode(text)


def written(out: Path, texts: list[str], **settings: Any) -> list[str]:
    """Return what transformers writes for texts, as the folder says."""
    with parity.quiet_transformers():
        theirs: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(out).eval()
        words = transformers.AutoTokenizer.from_pretrained(out)
        given = words(texts, return_tensors="pt", padding=True)
        done = theirs.generate(**given, **settings)
    return words.batch_decode(done, skip_special_tokens=True)


def test_the_starter_with_two_vocabularies_is_the_same_after_export(tmp_path: Path):
    out = tmp_path / "out"
    regard.export("en-zh", format="huggingface", out=out)
    texts = [
        "How are you today?",
        "He's 3 days late & tired.",
        "<s> no </s> <to>x",
        "x",
        "🤖🎉🎊",
    ]
    ours: Any = regard.load("en-zh")
    again: Any = regard.load(out)
    for beam in (1, 3, 5):
        how: dict[str, Any] = {"beam": beam, "max_length": 24, "split": False}
        right = [str(answer) for answer in ours.run(texts, **how)]
        assert written(out, texts, num_beams=beam, max_new_tokens=24) == right
        assert [str(answer) for answer in again.run(texts, **how)] == right
    assert written(out, texts[:1]) == [str(ours.run(texts[:1])[0])]  # as the folder says
    assert again.check({}) == ours.check({})
    pair = [f"{texts[0]}\t你今天怎么样？"]
    assert again.run(pair, forced=True)[0].score == ours.run(pair, forced=True)[0].score
    assert str(again.run(texts[:1], alignments="pharaoh")[0].alignment) == str(
        ours.run(texts[:1], alignments="pharaoh")[0].alignment
    )
    theirs: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(out).eval()
    source, target = torch.tensor([[300, 301, 2]]), torch.tensor([[1, 400, 500]])
    read = ours.model.config.source_vocab
    with torch.no_grad():
        found = theirs(source, decoder_input_ids=target + read).logits
        assert not parity.differ(ours.model(source, target), found[..., read:])
    assert found[..., :read].max() < -1e8  # a row of what is read is never written


def test_vocabularies_of_two_sizes_come_back_and_go_out_again(tmp_path: Path):
    text = "\n".join("\t".join(pair) for pair in PAIRS)
    both = {"vocabularies": "separate", "tokenizer": "unigram"}
    ours, again = exported("translate", tmp_path, text, **both)
    shape = ours.model.config
    assert shape.source_vocab != shape.target_vocab and again.model.config == shape
    regard.import_model(tmp_path / "out", out=tmp_path / "in")
    regard.export(tmp_path / "in", format="huggingface", out=tmp_path / "twice")
    texts = ["the dog 3 ran home", "🎉 77", "<to>der ran"]
    right = [str(answer) for answer in ours.run(texts, max_length=9, split=False)]
    for name in ("out", "in", "twice"):
        found = regard.load(tmp_path / name).run(texts, max_length=9, split=False)
        assert [str(answer) for answer in found] == right
    for name in ("out", "twice"):
        assert written(tmp_path / name, texts, max_new_tokens=9) == right
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    for wrong in ([5, 5], [-1, 3], "two", [config["vocab_size"]]):
        path.write_text(json.dumps({**config, "regard_vocabularies": wrong}))
        with pytest.raises(UsageError, match="expected two sizes whose sum is vocab_size"):
            regard.load(tmp_path / "out")


def test_a_starter_that_no_format_holds_is_refused_by_name(tmp_path: Path):
    with pytest.raises(UsageError) as refused:
        regard.export("fashion", format="huggingface", out=str(tmp_path / "out"))
    assert str(refused.value) == (
        "no public format holds this vit; nearest is deit, but for stem='early', "
        "tokens=0, pool='attention'; one trained with like=vit alone can be exported; "
        "or try format=onnx"
    )
    regard.export("shakespeare", format="huggingface", out=str(tmp_path / "out"))
