"""T5, BART and Marian against transformers: logits, writing, and checkpoints both ways."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from torch import Tensor, nn

import regard
from regard.decode.constraints import Adjust
from regard.errors import UsageError
from regard.models import preset
from regard.models.transformer import PRESETS, Transformer
from regard.pretrained.formats import find_format, fitting
from regard.pretrained.weight_conversion import to_ours, to_theirs
from tests import searching

transformers = pytest.importorskip("transformers")

VOCAB = 53  # an odd vocabulary
SIDES = {
    "vocab_size": VOCAB,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 40,
    "forced_eos_token_id": None,
}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 24,
    "d_kv": 10,  # not d_model / num_heads
    "d_ff": 40,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 3,
    "decoder_start_token_id": 0,
}
BART = {**SIDES, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
BART |= {"decoder_start_token_id": 2}
MARIAN = {**SIDES, "pad_token_id": 52, "eos_token_id": 0, "decoder_start_token_id": 52}
# name -> model_type and their settings
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", T5),
    "t5 1.1": ("t5", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "t5 gated silu": ("t5", {**T5, "feed_forward_proj": "gated-silu"}),
    "mt5": ("mt5", T5),
    "mt5, tied, relu": ("mt5", {**T5, "feed_forward_proj": "relu", "num_decoder_layers": None}),
    "bart": ("bart", BART),
    "bart scaled": ("bart", {**BART, "scale_embedding": True, "activation_function": "relu"}),
    "bart tanh": (
        "bart",
        {**BART, "activation_function": "gelu_new", "decoder_start_token_id": 0},
    ),
    "marian": ("marian", {**MARIAN, "scale_embedding": True, "activation_function": "swish"}),
    "marian relu": ("marian", {**MARIAN, "activation_function": "relu"}),
    "marian, two vocabularies": (
        "marian",
        {**MARIAN, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": VOCAB + 8},
    ),
}
CLASSES = {"t5": "T5ForConditionalGeneration", "bart": "BartForConditionalGeneration"}
CLASSES |= {"mt5": "MT5ForConditionalGeneration", "marian": "MarianMTModel"}


OWN_HEAD = ("t5 1.1", "mt5")


def enlarge(model: Any, seed: int = 0) -> None:
    """Give a model weights so large that attention is sharp and logits spread."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "embed_positions" in name and "Sinusoidal" in type(positions(model)).__name__:
            continue
        if parameter.ndim > 1:
            # T5 divides its scores by nothing
            size = 1.0 if model.config.model_type in ("t5", "mt5") else 2.0
            nn.init.normal_(parameter, std=size / math.sqrt(parameter.shape[1]))
        else:
            parameter.data += 0.3 * torch.randn_like(parameter)
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_()
        model.final_logits_bias[0, 2] -= 2  # or BART's texts would end at once


def positions(model: Any) -> Any:
    """Return the encoder's table of positions, if it has one."""
    return getattr(getattr(model, "model", None) and model.model.encoder, "embed_positions", None)


def their_model(kind: str, **changes: Any) -> Any:
    """Return one of transformers' models with enlarged random weights."""
    model_type, settings = KINDS[kind]
    config = transformers.AutoConfig.for_model(model_type, **{**settings, **changes})
    torch.manual_seed(0)
    theirs = getattr(transformers, CLASSES[model_type])(config).eval()
    if kind in OWN_HEAD:  # transformers 5 ties until a checkpoint says otherwise
        theirs.lm_head.weight = nn.Parameter(torch.empty_like(theirs.lm_head.weight))
    enlarge(theirs)
    if model_type in ("t5", "mt5"):  # its embeddings are as large as its residual
        theirs.shared.weight.data *= 4 if kind == "mt5, tied, relu" else 10
    if kind in OWN_HEAD:
        theirs.lm_head.weight.data *= 2
    return theirs


def our_config(theirs: Any) -> Any:
    """Read their config as it would stand in config.json."""
    form = find_format(theirs.config.model_type)
    return form.read_config(json.loads(theirs.config.to_json_string(use_diff=False)), "")


def both(kind: str) -> tuple[Any, Transformer]:
    """Return their model and ours with the same weights."""
    theirs = their_model(kind)
    config = our_config(theirs)
    ours = Transformer(config).eval()
    form = find_format(theirs.config.model_type)
    found = to_ours(form, config, theirs.state_dict())
    assert set(found) == set(dict(ours.named_parameters()))
    ours.load_state_dict(found, strict=False)
    return theirs, ours


def padded_batch(theirs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return sources, targets, the lengths of the sources, and their mask."""
    rand = torch.Generator().manual_seed(2)
    pad = theirs.config.pad_token_id
    source, target = torch.randint(3, VOCAB - 2, (2, 4, 12), generator=rand)
    lengths = torch.tensor([12, 1, 7, 10])
    keep = torch.arange(12) < lengths.unsqueeze(1)
    target[:, 0] = theirs.config.decoder_start_token_id
    return source.masked_fill(~keep, pad), target, lengths, keep


def exactly(theirs: Any) -> None:
    """Put what they round to fp32, Marian's positions and T5's norms, in fp64."""
    if "Sinusoidal" in type(positions(theirs)).__name__:
        for side in (theirs.model.encoder, theirs.model.decoder):
            table = side.embed_positions.weight
            n, width = table.shape
            rates = 10_000 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
            angles = torch.arange(n, dtype=torch.float64).unsqueeze(1) * rates
            table.data.copy_(torch.cat([angles.sin(), angles.cos()], dim=1))
    for part in theirs.modules():
        if type(part).__name__ in ("T5LayerNorm", "MT5LayerNorm"):
            part.forward = lambda x, part=part: nn.functional.rms_norm(
                x, part.weight.shape, part.weight, part.variance_epsilon
            )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ours_equals_theirs(kind: str, dtype: torch.dtype):
    theirs, ours = (model.to(dtype) for model in both(kind))
    if dtype == torch.float64:
        exactly(theirs)
    source, target, lengths, keep = padded_batch(theirs)
    with torch.no_grad():
        right = theirs(source, attention_mask=keep.long(), decoder_input_ids=target).logits
        full = ours(source, target, lengths)
        state = ours.start(source, lengths)
        steps = [ours.step(ids, state)[0] for ids in target.split([1, 1, 6, 1, 3], dim=1)]
    assert 1 < right.std() < 10
    size = max(1.0, float(right.abs().max()))
    bound = 2e-5 * size if dtype == torch.float32 else 1e-9
    for logits in (full, torch.cat(steps, dim=1)):
        torch.testing.assert_close(logits, right, atol=bound, rtol=0)


def never_again(begin: int) -> Adjust:
    """Write no token twice: random weights would say the same word for ever."""

    def adjust(logits: Tensor, written: Tensor) -> Tensor:
        logits[:, begin] = -math.inf
        return logits.scatter(1, written, -math.inf)

    return adjust


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beam", [1, 4])
def test_ours_writes_what_theirs_writes(kind: str, beam: int):
    theirs, ours = both(kind)
    source, _, lengths, keep = padded_batch(theirs)
    config, most = theirs.config, 12
    begin, end = config.decoder_start_token_id, config.eos_token_id
    with torch.no_grad():
        right = theirs.generate(
            source,
            attention_mask=keep.long(),
            num_beams=beam,
            do_sample=False,
            early_stopping=beam > 1,
            max_new_tokens=most,
            use_cache=False,  # theirs fails where the decoder is deeper than the encoder
            no_repeat_ngram_size=1,
            renormalize_logits=True,
        )
    rest: dict[str, Any] = {"bos": begin, "eos": end, "max_length": most}
    rest |= {"adjust": [never_again(begin)]}
    if beam == 1:
        found = searching.greedy(ours, source, lengths, **rest)
    else:
        found = searching.beam(ours, source, lengths, beam=beam, **rest)
    for row, (text,) in zip(right.tolist(), found, strict=True):
        assert row[0] == begin
        told = row[1 : row.index(end, 1) if end in row[1:] else len(row)]
        assert text.ids == told
    assert len({tuple(row) for row in right.tolist()}) > 1
    assert max(len(set(row)) for row in right.tolist()) > 4


def test_the_bare_bart_is_read_without_a_bias():
    theirs = their_model("bart")
    form = find_format("bart")
    told = json.loads(theirs.config.to_json_string(use_diff=False))
    config = form.read_config(told, "BartModel")
    assert not config.head_bias
    ours = Transformer(config).eval()
    # its keys have no prefix
    ours.load_state_dict(
        to_ours(form, config, theirs.model.state_dict(), "BartModel"), strict=False
    )
    source, target, lengths, keep = padded_batch(theirs)
    theirs.final_logits_bias.zero_()
    with torch.no_grad():
        right = theirs(source, attention_mask=keep.long(), decoder_input_ids=target).logits
        found = ours(source, target, lengths)
    torch.testing.assert_close(found, right, atol=2e-4, rtol=0)


def test_a_head_that_the_file_leaves_out_is_the_table():
    """Transformers leaves lm_head out of T5 1.1 where it has been tied."""
    theirs = their_model("t5 1.1")
    config, form = our_config(theirs), find_format("t5")
    assert (config.tie, config.scale_head) == ("embeddings", False)
    state = {name: x for name, x in theirs.state_dict().items() if name != "lm_head.weight"}
    found = to_ours(form, config, state)
    assert torch.equal(found["head.weight"], theirs.shared.weight)


@pytest.mark.parametrize(
    "kind,wrong,words",
    [
        ("bart", {"decoder_ffn_dim": 7}, "decoder_ffn_dim=7"),
        ("marian", {"decoder_ffn_dim": 7}, "decoder_ffn_dim=7"),
        ("bart", {"activation_function": "mish"}, "unknown activation_function 'mish'"),
        ("bart", {"add_final_layer_norm": True}, "add_final_layer_norm=True is not supported"),
        ("bart", {"d_model": 2**60}, "d_model=1152921504606846976 is too large"),
        ("bart", {"scale_embedding": "much"}, "scale_embedding='much' is not true or false"),
        ("t5", {"feed_forward_proj": "gated-mish"}, "unknown feed_forward_proj 'gated-mish'"),
        ("t5", {"relative_attention_num_buckets": 16}, "only 32 is"),
        ("t5", {"num_layers": -1}, "num_layers=-1 is too small"),
        ("t5", {"vocab_size": [3]}, "vocab_size"),
        ("t5", {"num_decoder_layers": "x"}, "decoder_depth='x' is not a whole number"),
    ],
)
def test_a_config_that_does_not_fit_is_a_mistake(kind: str, wrong: dict, words: str):
    model_type, settings = KINDS[kind]
    told = {"model_type": model_type, **settings, **wrong}
    with pytest.raises(UsageError, match=words) as error:
        find_format(model_type).read_config(told, "")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_weights_that_do_not_fit_are_named_at_once(kind: str):
    theirs = their_model(kind)
    form, config = find_format(theirs.config.model_type), our_config(theirs)
    state = dict(theirs.state_dict())
    norm = (
        "encoder.final_layer_norm.weight"
        if kind == "t5"
        else "model.encoder.layernorm_embedding.weight"
    )
    state[norm] = torch.zeros(5)
    gone = next(name for name in state if "decoder" in name and "norm" in name)
    del state[gone]
    state["extra.weight"] = torch.zeros(1)
    with pytest.raises(UsageError) as error:
        to_ours(form, config, state)
    for words in (f"missing {gone}", "unknown extra.weight", f"{norm} is [5], not [24]"):
        assert words in str(error.value)
    with pytest.raises(UsageError, match="no counterpart"):
        to_theirs(form, config, {"no_norm.weight": torch.zeros(1)})


@pytest.mark.parametrize(
    "change,words",
    [
        ({"position": "rotary"}, "position='rotary'"),
        ({"tie": "embeddings"}, "tie='embeddings'"),
        ({"block": {"feed_forward": "swiglu"}}, "feed_forward"),
        ({"block": {"norm": "rms"}}, "block.norm='rms'"),
    ],
)
def test_what_no_format_holds_is_named(change: dict, words: str):
    config = PRESETS["bart"]
    block = replace(config.block, **change.pop("block", {}))
    with pytest.raises(UsageError, match=words):
        fitting("transformer", replace(config, block=block, **change), "text")


# ---- whole folders

TEXT = "The red dog sat on the old green house. A blue cat ran far and saw a big small tree!"


def byte_tokenizer() -> Any:
    """Return a tokenizer of BART's kind."""
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator([TEXT] * 5, 280, 2, show_progress=False, special_tokens=pieces)
    made._tokenizer.post_processor = tokenizers.processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), add_prefix_space=False
    )
    roles = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}
    return made._tokenizer, roles | {"cls": "<s>", "sep": "</s>"}


def piece_tokenizer() -> Any:
    """Return a tokenizer of T5's kind."""
    words = sorted({f"▁{word}" for word in TEXT.split()} | set(TEXT) - {" "} | {"▁"})
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0)]
    pieces += [(word, -float(len(words) - n) / 9) for n, word in enumerate(words)]
    pieces += [(f"<extra_id_{n}>", 0.0) for n in reversed(range(20))]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=2))
    made.add_special_tokens(["<pad>", "</s>", "<unk>"])
    made.add_special_tokens([f"<extra_id_{n}>" for n in range(20)])
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return made, {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"}


@pytest.mark.parametrize("kind,make", [("bart", byte_tokenizer), ("t5", piece_tokenizer)])
def test_a_folder_writes_the_same_text_here_and_there(kind: str, make: Any, tmp_path):
    made, roles = make()
    names = {f"{role}_token": name for role, name in roles.items()}
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)
    # more rows than pieces, as in T5's checkpoints
    theirs = their_model(kind, vocab_size=len(words) + 3)
    if kind == "bart":
        theirs.final_logits_bias[:, len(words) :] = -1e4
        theirs.final_logits_bias[:, :5] = -1e4  # special tokens mean nothing as text
    how: dict[str, Any] = {"num_beams": 3, "early_stopping": True, "renormalize_logits": True}
    if kind == "t5":  # neither its padding nor rows without a piece mean anything as text
        how["bad_words_ids"] = [[n] for n in [0, *range(len(words), len(words) + 3)]]
    theirs.generation_config.update(**how)
    theirs.save_pretrained(tmp_path / "there")
    words.save_pretrained(tmp_path / "there")
    texts = ["The red dog ran.", "A cat", "saw the old green tree far"]
    batch = words(texts, return_tensors="pt", padding=True)
    right = theirs.generate(
        batch["input_ids"],
        attention_mask=batch["attention_mask"],
        num_beams=3,
        max_new_tokens=9,
        use_cache=False,
    )
    expected = words.batch_decode(right, skip_special_tokens=True)
    model = regard.load(tmp_path / "there")
    assert model.name == "text"
    assert [str(a) for a in model.run(texts, beam=3, max_length=9)] == expected
    assert len(set(expected)) > 1 and all(expected)
    # and after it was imported, and exported again
    regard.import_model(tmp_path / "there", out=str(tmp_path / "here"))
    again = regard.load(tmp_path / "here")
    assert [str(a) for a in again.run(texts, beam=3, max_length=9)] == expected
    regard.export(str(tmp_path / "here"), format="huggingface", out=str(tmp_path / "back"))
    back = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "back").eval()
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert reader(texts)["input_ids"] == words(texts)["input_ids"]
    assert back.config.decoder_start_token_id == theirs.config.decoder_start_token_id
    with torch.no_grad():
        start = torch.full((3, 1), theirs.config.decoder_start_token_id)
        one, other = (model(**batch, decoder_input_ids=start).logits for model in (theirs, back))
    assert torch.equal(one, other)
    # and it learns on: to mend texts, by marks of its own
    (tmp_path / "plain.txt").write_text(TEXT * 20)
    goal = "spans" if kind == "t5" else "noise"
    settings: dict[str, Any] = {"data": str(tmp_path / "plain.txt"), "objective": goal, "steps": 2}
    settings |= {"init": str(tmp_path / "here"), "quiet": True, "out": str(tmp_path / "run")}
    report = regard.train("text", max_length=30, **settings)
    assert report.finished and report.scores["loss"] > 0
    if kind == "bart":
        with pytest.raises(UsageError, match="max_length=256 is more than the 40 positions"):
            regard.train("text", max_length=256, **settings | {"out": str(tmp_path / "other")})
        report = regard.train("text", **settings | {"out": str(tmp_path / "as long as it can")})
        assert report.finished  # by default, no more than it has learned


@pytest.mark.parametrize(
    "kind,post,asked",
    [("mt5", "null", "beams, early"), ("t5 1.1", "usual", "penalty"), ("bart", "null", "no file")],
)
def test_a_folder_of_the_sweep_is_run_as_transformers_would(kind, post, asked, tmp_path):
    """Others are in bench/seq2seq_folders.py."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
    import seq2seq_folders as sweep

    sweep.write(tmp_path, kind, post, sweep.ASKED[asked])
    assert sweep.judge(tmp_path) == ("equal", "")


def control_tokenizer(framed: bool) -> Any:
    """Return a tokenizer whose normaliser drops control characters, as nmt_nfkc does."""
    made, roles = piece_tokenizer()
    made.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Nmt(), tokenizers.normalizers.NFKC()]
    )
    if not framed:
        told = {**json.loads(made.to_str()), "post_processor": None}
        made = tokenizers.Tokenizer.from_str(json.dumps(told))
    names = {f"{role}_token": name for role, name in roles.items()}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def test_a_text_of_which_a_tokenizer_keeps_nothing_has_no_answer_and_that_is_told(tmp_path, capsys):
    words = control_tokenizer(framed=True)
    their_model("t5", vocab_size=len(words)).save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    model = regard.load(tmp_path)
    assert model.predictor.encode("\x01", model.check({})) == []
    alone, after = model.run(["\x01", "\x01A cat"], max_length=5)
    assert str(alone) == "" and str(after) == str(model.run("A cat", max_length=5))
    assert "no answer to '\\x01', of which its tokenizer keeps nothing" in capsys.readouterr().err


def test_a_text_of_which_a_tokenizer_keeps_nothing_has_a_label(tmp_path):
    """It crashed where nothing is put around a text."""
    words = control_tokenizer(framed=False)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    model = regard.load(tmp_path)
    first, second, third = model.run(["\x01", "A cat", ""])
    assert first.label == third.label in second.labels
    assert second.probabilities.tolist() == model.run("A cat").probabilities.tolist()


def test_a_t5_learns_to_mend_with_its_own_sentinels():
    from regard.data.denoising import sentinels_of

    class Own:
        """A tokenizer of T5's, as far as marks go."""

        vocab, mask = 30, None

        def token_to_id(self, piece: str) -> int | None:
            found = {f"<extra_id_{n}>": 29 - n for n in range(5)}
            return found.get(piece)

    assert sentinels_of(Own(), 32, 5).spans == [29, 28, 27, 26, 25]


@pytest.mark.parametrize("row,words", [("t5", "'t5'"), ("bart", "embed_norm 'layer'")])
def test_ctranslate2_refuses_by_name_what_it_cannot_hold(row: str, words: str, tmp_path):
    pytest.importorskip("ctranslate2")
    from regard.data.tokenize import train_tokenizer
    from regard.pretrained.ctranslate2 import export_ctranslate2

    words_of_ours = train_tokenizer([TEXT] * 3, vocab=320)
    vocab = words_of_ours.vocab
    shape = replace(preset("transformer", "tiny", row), source_vocab=vocab, target_vocab=vocab)
    with pytest.raises(UsageError, match=f"CTranslate2 has no .*{words}"):
        export_ctranslate2(Transformer(shape), words_of_ours, words_of_ours, tmp_path / "out")
    assert not (tmp_path / "out").exists()
