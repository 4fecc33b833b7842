"""Weights of other tools are taken over on import: pickled ones without their code, and GGUF."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
import transformers
from gguf.quants import quantize
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import regard
from regard.cli import main
from regard.errors import UsageError
from regard.pretrained import convert_sandbox
from regard.pretrained.tokenizer_checks import LLAMA3_PATTERN, QWEN_PATTERN, TEKKEN_PATTERN
from regard.pretrained.tokenizer_folder import load_tokenizers
from tests.pretrained.test_vocabulary import (
    LLAMA,
    TEXTS,
    byte_level,
    sentence_pieces,
    split_by,
    wordpiece,
)

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 96, "max_position_embeddings": 64}


def enlarge(model: Any, scale: float = 0.3) -> Any:
    """Give a model weights so large that differences would show."""
    rand = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data += scale * torch.randn(parameter.shape, generator=rand)
    return model.eval()


# ---- pickled weights


def pickled(folder: Path, shards: int = 1) -> Any:
    """Write a classifier whose weights are pickled, in one file or many with an index."""
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=400, num_labels=3, **SIZES)
    model = enlarge(transformers.BertForSequenceClassification(config))
    folder.mkdir()
    (folder / "tokenizer.json").write_text(wordpiece().to_str())
    model.config.architectures = ["BertForSequenceClassification"]
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    state = model.state_dict()
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return model
    names = list(state)
    files = [f"pytorch_model-{n + 1:05}-of-{shards:05}.bin" for n in range(shards)]
    for n, file in enumerate(files):
        some = {name: state[name] for name in names[n::shards]}
        # the first as torch.save wrote them before version 1.6
        torch.save(some, folder / file, _use_new_zipfile_serialization=n > 0)
    places = {name: files[i % shards] for i, name in enumerate(names)}
    index = {"metadata": {}, "weight_map": places}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return model


@pytest.mark.parametrize("shards", [1, 3])
def test_pickled_weights_are_taken_over_on_import(tmp_path, shards):
    theirs = pickled(tmp_path / "theirs", shards)
    regard.import_model(tmp_path / "theirs", out=tmp_path / "ours")
    ids = torch.randint(5, 400, (2, 9))
    with torch.no_grad():
        right = theirs(ids).logits
        found = regard.load(tmp_path / "ours").model(ids)
    assert right.std() > 1
    torch.testing.assert_close(found, right, atol=2e-5 * float(right.abs().max()), rtol=0)


def test_only_import_reads_pickled_weights(tmp_path, capsys):
    pickled(tmp_path / "theirs")
    folder = tmp_path / "theirs"
    for use in (regard.load, lambda folder: regard.load(folder).run("a")):
        with pytest.raises(UsageError, match=f"regard import {folder} out=FOLDER"):
            use(folder)
    assert main(["run", str(folder), "a text"]) == 2
    assert f"regard import {folder} out=FOLDER" in capsys.readouterr().err
    assert main(["import", str(folder), f"out={tmp_path / 'ours'}"]) == 0


class Evil:
    def __reduce__(self):
        return os.system, ("touch was_run",)


class Wide:
    """Rows that take no room in a file and all the memory there is once they are laid out."""

    @staticmethod
    def tensor() -> torch.Tensor:
        return torch.zeros(1).expand(2**36)


HOSTILE: dict[str, tuple[Any, str]] = {
    "a command": (
        {"a": torch.zeros(2), "b": Evil()},
        "posix.system, which is not part of a state dict",
    ),
    "a model": (torch.nn.Linear(2, 2), "Linear, which is not part of a state dict"),
    "a list": ([torch.zeros(2)], "it holds a list"),
    "a word": ({"a": "b"}, "'a' is a str"),
    "a number for a name": ({1: torch.zeros(2)}, "1 is a Tensor"),
    "sparse": ({"a": torch.eye(3).to_sparse()}, "sparse, quantised or empty"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_no_dict_of_tensors_is_refused(tmp_path, kind, monkeypatch):
    value, words = HOSTILE[kind]
    torch.save(value, tmp_path / "pytorch_model.bin")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        convert_sandbox, "take_limits", lambda: None
    )  # which are for a process of its own
    with pytest.raises(convert_sandbox.Refused) as told:
        convert_sandbox.unpickle(tmp_path / "pytorch_model.bin", tmp_path / "made")
    assert words in str(told.value) and not (tmp_path / "was_run").exists()


def test_hostile_pickles_are_refused_in_one_line(tmp_path, monkeypatch):
    pickled(tmp_path / "theirs")
    path = tmp_path / "theirs" / "pytorch_model.bin"
    monkeypatch.chdir(tmp_path)
    for value, words in ((Evil(), "posix.system"), ({"a": Wide.tensor()}, "memory")):
        torch.save(value, path)
        with pytest.raises(UsageError) as told:
            regard.import_model(tmp_path / "theirs", out=tmp_path / "ours")
        assert words in str(told.value) and str(path) in str(told.value)
        assert str(told.value).isprintable() and len(str(told.value)) < 400
        assert not (tmp_path / "was_run").exists() and not (tmp_path / "ours").exists()


@pytest.mark.parametrize("data", [b"", pickle.dumps(Evil()), b"\x80\x02" + b"(" * 10**5])
def test_damaged_pickles_are_refused_in_one_line(tmp_path, data):
    pickled(tmp_path / "theirs")
    (tmp_path / "theirs" / "pytorch_model.bin").write_bytes(data)
    with pytest.raises(UsageError) as told:
        regard.import_model(tmp_path / "theirs", out=tmp_path / "ours")
    assert str(told.value).isprintable() and len(str(told.value)) < 400


def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path):
    pickled(tmp_path / "theirs", 2)
    index = {"weight_map": {"a": "../pytorch_model.bin"}}
    (tmp_path / "theirs" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match="no weight_map with .bin files in the same folder"):
        regard.import_model(tmp_path / "theirs", out=tmp_path / "ours")


# ---- GGUF

QUANTS = gguf.GGMLQuantizationType
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
ENDS |= {"transformer.wte": "token_embd", "transformer.wpe": "position_embd"}
ENDS |= {"transformer.ln_f": "output_norm"}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
# model_type -> the class, and its odd settings
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**SIZES, "num_key_value_heads": 2, "rope_theta": 500.0}),
    "llama, wide": (
        "LlamaForCausalLM",
        {**SIZES, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1},
    ),
    "llama, further": ("LlamaForCausalLM", {**SIZES, "rope_parameters": LINEAR}),
    "llama, tied": ("LlamaForCausalLM", {**SIZES, "tie_word_embeddings": True, "head_dim": 8}),
    "llama, llama3": (
        "LlamaForCausalLM",
        {
            **SIZES,
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "qwen2": ("Qwen2ForCausalLM", {**SIZES, "num_key_value_heads": 1, "rope_theta": 1e6}),
    "qwen3": ("Qwen3ForCausalLM", {**SIZES, "num_key_value_heads": 2, "head_dim": 32}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 96},
    ),
}


def named(name: str) -> str:
    """Return what GGUF calls a tensor."""
    base, _, end = name.rpartition(".")
    if base in ENDS:
        return f"{ENDS[base]}.{end}"
    _, number, part = base.removeprefix("model.").removeprefix("transformer.").split(".", 2)
    return f"blk.{number}.{PARTS[part]}.{end}"


def laid(name: str, x: np.ndarray, config: Any, kind: str) -> np.ndarray:
    """Lay a tensor as llama.cpp's converter does."""
    if kind == "gpt2" and ("attn.c_" in name or "mlp.c_" in name) and name.endswith("weight"):
        return x.T.copy()
    if kind == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        x = x.reshape(heads, 2, len(x) // heads // 2, *x.shape[1:])
        return x.swapaxes(1, 2).reshape(-1, *x.shape[3:]).copy()
    return x


def model_of(kind: str, vocab: int) -> Any:
    cls, settings = MODELS[kind]
    made = getattr(transformers, cls)
    torch.manual_seed(0)
    return enlarge(made(made.config_class(vocab_size=vocab, **settings)))


# bytes of 256 numbers in super-blocks, where in them half floats scale the rest, and by how much
SUPER_BLOCKS = {
    "Q2_K": (84, (80, 82), 5e-3),
    "Q3_K": (110, (108,), 2e-3),
    "Q4_K": (144, (0, 2), 2e-4),
    "Q5_K": (176, (0, 2), 2e-4),
    "Q6_K": (210, (208,), 2e-4),
}


def superblocks(x: np.ndarray, way: str) -> np.ndarray:
    """Return random weights in super-blocks, which Python can read and not write."""
    size, scales, scale = SUPER_BLOCKS[way]
    rows, width = x.shape
    packed = np.random.default_rng(x.size).integers(0, 256, (rows, width // 256, size), np.uint8)
    for place in scales:
        packed[..., place : place + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return packed.reshape(rows, -1)


def write_gguf(path: Path, model: Any, way: str = "F32", tokenizer: Any = None) -> Any:
    """Write a model as GGUF; return it with the weights that are in the file."""
    config, kind = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_feed_forward_length(config.n_inner if kind == "gpt2" else config.intermediate_size)
    if kind == "gpt2":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_key_length(size)
        writer.add_value_length(size)
        writer.add_rope_dimension_count(size)
        if config.rope_parameters["rope_type"] == "linear":  # which is what a factor alone means
            writer.add_rope_scaling_factor(4.0)
        if config.rope_parameters["rope_type"] == "llama3":
            rates = 500_000.0 ** -(np.arange(0, size, 2) / size)
            keep = np.clip((8192 * rates / (2 * np.pi) - 1) / 3, 0, 1)
            writer.add_tensor("rope_freqs.weight", (1 / ((1 - keep) / 8 + keep)).astype("float32"))
    if tokenizer is not None:
        tokenizer(writer)
    state = {}
    for name, x in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = laid(name, x.numpy(), config, kind)
        chosen = QUANTS[way if data.ndim > 1 else "F32"]
        packed = superblocks(data, way) if "_K" in chosen.name else quantize(data, chosen)
        writer.add_tensor(named(name), packed, raw_dtype=chosen)
        whole = gguf.quants.dequantize(packed, chosen)
        state[name] = torch.from_numpy(np.array(unlaid(name, whole, config, kind))).float()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.load_state_dict(state, strict=False)
    return model


def unlaid(name: str, x: np.ndarray, config: Any, kind: str) -> np.ndarray:
    """Undo how a tensor was laid, row by row of what laying does to numbered rows."""
    if kind == "gpt2":
        return (
            x.T
            if x.shape != laid(name, x, config, kind).shape or "c_" in name and x.ndim == 2
            else x
        )
    order = laid(name, np.arange(len(x)), config, kind)
    back = np.empty_like(x)
    back[order] = x
    return back


def write_bpe(library: Any, pre: str) -> Any:
    """Return what writes a byte-level tokenizer."""
    told = json.loads(library.to_str())
    names = sorted(told["model"]["vocab"], key=told["model"]["vocab"].get)
    special = {token["content"] for token in told["added_tokens"]}

    def put(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(names)
        writer.add_token_types([3 if name in special else 1 for name in names])
        writer.add_token_merges([" ".join(pair) for pair in told["model"]["merges"]])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)
        writer.add_add_bos_token(False)

    return put


@pytest.fixture(scope="module")
def library() -> Any:
    return byte_level(["<|endoftext|>"])


@pytest.mark.parametrize(
    "kind, way",
    [
        *((kind, "Q8_0") for kind in MODELS),
        *(("llama", way) for way in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1")),
        *(("llama, wide", way) for way in SUPER_BLOCKS),
    ],
)
def test_gguf_is_what_was_written(tmp_path, kind, way, library):
    path = tmp_path / "model.gguf"
    theirs = write_gguf(path, model_of(kind, 450), way, write_bpe(library, "gpt-2"))
    regard.import_model(path, out=tmp_path / "ours")
    ours = regard.load(tmp_path / "ours")
    ids = torch.randint(1, 450, (2, 13))
    with torch.no_grad():
        right, found = theirs(ids).logits, ours.model(ids)
    assert right.std() > 1
    torch.testing.assert_close(found, right, atol=2e-5 * float(right.abs().max()), rtol=0)
    for text in TEXTS:
        assert ours.codec.tokenizer.encode(text) == library.encode(text).ids


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_gguf_is_what_transformers_reads(tmp_path, kind, library):
    path = tmp_path / "model.gguf"
    write_gguf(path, model_of(kind, 450), "Q8_0", write_bpe(library, "gpt-2"))
    plain = model_of(kind, 450)
    told = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=plain)
    # of GPT-2's sizes it forgets some
    config = plain.config if kind == "gpt2" else type(plain.config)(**told["config"])
    theirs = type(plain)(config)
    missing = theirs.load_state_dict(told["tensors"], strict=False).missing_keys
    assert missing in ([], ["lm_head.weight"])
    regard.import_model(path, out=tmp_path / "ours")
    ids = torch.randint(1, 450, (2, 13))
    with torch.no_grad():
        right = theirs.eval()(ids).logits
        found = regard.load(tmp_path / "ours").model(ids)
    torch.testing.assert_close(found, right, atol=2e-5 * float(right.abs().max()), rtol=0)


def digits_first() -> Any:
    """Return how SmolLM's tokenizer.json splits a text."""
    from tokenizers import pre_tokenizers

    parts = [pre_tokenizers.Digits(individual_digits=True)]
    parts += [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    return pre_tokenizers.Sequence(parts)


SPLITTERS: dict[str, str | None] = {  # by a pattern, or digits first
    "llama-bpe": LLAMA3_PATTERN,
    "qwen2": QWEN_PATTERN,
    "deepseek-r1-qwen": QWEN_PATTERN,
    "tekken": TEKKEN_PATTERN,
    "smollm": None,
    "refact": None,
}


@pytest.mark.parametrize("pre", SPLITTERS)
def test_byte_level_tokenizers_of_gguf_split_as_their_models_do(tmp_path, pre):
    pattern = SPLITTERS[pre]
    library = byte_level(["<|endoftext|>"], None if pattern is None else split_by(pattern))
    if pattern is None:
        library.pre_tokenizer = digits_first()
    path = tmp_path / "model.gguf"
    write_gguf(path, model_of("llama", 450), "F16", write_bpe(library, pre))
    regard.import_model(path, out=tmp_path / "ours")
    reader = load_tokenizers(tmp_path / "ours")[0]
    from tokenizers import Tokenizer, normalizers

    told = json.loads(library.to_str())
    told["model"]["ignore_merges"] = pre in ("llama-bpe", "tekken")
    library = Tokenizer.from_str(json.dumps(told))
    library.normalizer = normalizers.NFC() if pre == "qwen2" else None
    for text in [*TEXTS, "In 1234 and 56.78, o'er ٣٤"]:
        ids = library.encode(text).ids
        assert reader.encode(text) == ids
        assert reader.decode(ids) == library.decode(ids)


def test_sentence_pieces_of_gguf_split_as_their_model_does(tmp_path):
    data = sentence_pieces(**LLAMA)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=data)
    count = theirs.get_piece_size()

    def put(writer: Any) -> None:
        kinds = [("unknown", 2), ("control", 3), ("byte", 6)]
        types = [
            next((n for name, n in kinds if getattr(theirs, f"is_{name}")(i)), 1)
            for i in range(count)
        ]
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([theirs.id_to_piece(i) for i in range(count)])
        writer.add_token_scores([theirs.get_score(i) for i in range(count)])
        writer.add_token_types(types)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template("{{ messages[0]['content'] }}")

    write_gguf(tmp_path / "model.gguf", model_of("llama", count), "F16", put)
    regard.import_model(tmp_path / "model.gguf", out=tmp_path / "ours")
    reader = load_tokenizers(tmp_path / "ours")[0]
    for text in TEXTS:
        assert reader.encode(text) == theirs.encode(text)
        assert reader.frame(reader.encode(text)) == [1, *theirs.encode(text)]
    assert reader.bos == 1 and reader.eos == 2


def test_tokenizer_files_beside_a_gguf_file_are_taken(tmp_path, library):
    folder = tmp_path / "theirs"
    folder.mkdir()
    write_gguf(folder / "model.gguf", model_of("gpt2", 450))
    with pytest.raises(UsageError, match="no tokenizer; put the model's tokenizer.json"):
        regard.import_model(folder, out=tmp_path / "ours")
    (folder / "tokenizer.json").write_text(library.to_str())
    regard.import_model(folder, out=tmp_path / "ours")
    reader = load_tokenizers(tmp_path / "ours")[0]
    assert [reader.encode(text) for text in TEXTS] == [library.encode(text).ids for text in TEXTS]
    assert sorted(path.name for path in folder.iterdir()) == ["model.gguf", "tokenizer.json"]


def test_only_import_reads_gguf(tmp_path, capsys, library):
    path = tmp_path / "model.gguf"
    write_gguf(path, model_of("gpt2", 450), "F32", write_bpe(library, "gpt-2"))
    for given in (path, tmp_path):
        with pytest.raises(UsageError, match=f"regard import {given} out=FOLDER"):
            regard.load(given)
    text = tmp_path / "text.txt"
    text.write_text("a row of words\n" * 50)
    with pytest.raises(UsageError, match=f"regard import {path} out=FOLDER"):
        regard.train("language", data=text, init=path, out=tmp_path / "run", steps=1)
    assert main(["run", str(path), "a"]) == 2
    assert "regard import" in capsys.readouterr().err


def add(key: str, value: Any) -> Any:
    return lambda writer: writer.add_uint32(key, value)


WRONG: dict[str, tuple[Any, str]] = {
    "another pre": (lambda w, put: put(w, "mystery"), "tokenizer.ggml.pre=mystery cannot be"),
    "experts": (lambda w, put: w.add_uint32("llama.expert_count", 8), "llama.expert_count=8"),
    "a part that turns": (
        lambda w, put: w.add_uint32("llama.attention.sliding_window", 4),
        "llama.attention.sliding_window=4 is not supported",
    ),
    "a tensor": (
        lambda w, put: w.add_tensor("blk.0.adapter.weight", np.zeros((2, 2), "float32")),
        "a tensor 'blk.0.adapter.weight', which llama does not have",
    ),
    "four bits": (
        lambda w, put: w.add_tensor(
            "blk.9.attn_q.weight", np.zeros((4, 18), "uint8"), raw_dtype=QUANTS.IQ4_NL
        ),
        "'blk.9.attn_q.weight' is IQ4_NL; only F32, F16, BF16, Q8_0, Q4_0",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_cannot_be_read_of_gguf_is_refused_by_name(tmp_path, kind, library):
    change, words = WRONG[kind]
    path = tmp_path / "model.gguf"

    def put(writer: Any) -> None:
        if kind == "another pre":
            write_bpe(library, "mystery")(writer)
        else:
            write_bpe(library, "gpt-2")(writer)
            change(writer, None)

    write_gguf(path, model_of("llama", 450), "F16", put)
    with pytest.raises(UsageError) as told:
        regard.import_model(path, out=tmp_path / "ours")
    assert words in str(told.value) and str(path) in str(told.value)
    assert len(str(told.value)) < 400 and not (tmp_path / "ours").exists()


def test_damaged_gguf_files_are_refused_in_one_line(tmp_path, library):
    path = tmp_path / "model.gguf"
    write_gguf(path, model_of("gpt2", 450), "F32", write_bpe(library, "gpt-2"))
    data = path.read_bytes()
    count = data[:16] + b"\xff" * 8 + data[24:]
    for broken in (b"GGUF", data[: len(data) // 2], count, b"x" + data[1:]):
        path.write_bytes(broken)
        with pytest.raises(UsageError) as told:
            regard.import_model(path, out=tmp_path / "ours")
        assert str(told.value).isprintable() and len(str(told.value)) < 400
    shutil.copy(__file__, tmp_path / "model.txt")
    with pytest.raises(UsageError, match="expected one with config.json, or a .gguf file"):
        regard.import_model(tmp_path / "model.txt", out=tmp_path / "ours")
