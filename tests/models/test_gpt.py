"""GPT-2, LLaMA, Mistral and BLOOM against transformers, PaLM by its formula, real weights."""

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import regard.models.state as states
from regard.attention.positions import POSITIONS, RotaryScaling
from regard.errors import UsageError
from regard.layers.block import BlockConfig
from regard.models import preset
from regard.models.gpt import GPT, PRESETS, SIZES, GPTConfig, within
from regard.pretrained.formats import find_format, fitting
from regard.pretrained.weight_conversion import to_ours, to_theirs
from tests import searching
from tests.models.test_transformer import enlarge

WEIGHTS = Path(__file__).parents[3] / "shared" / "weights"
VOCAB, EOS = 53, 52
TOKENS = {"bos_token_id": 0, "eos_token_id": EOS, "pad_token_id": 0, "vocab_size": VOCAB}
GPT2 = {**TOKENS, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4}
LLAMA = {
    **TOKENS,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
NEOX = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
GEMMA = {**LLAMA, "head_dim": 12, "num_key_value_heads": 2}
GEMMA3 = {**GEMMA, "sliding_window": 5, "query_pre_attn_scalar": 9, "num_hidden_layers": 4}
BLOOM = {**TOKENS, "hidden_size": 32, "n_layer": 3, "n_head": 4}


def rope(kind: str, **settings: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **settings}}


# name -> model_type and their settings
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2),
    "gpt2, relu, untied": (
        "gpt2",
        {**GPT2, "n_inner": 40, "activation_function": "relu", "tie_word_embeddings": False},
    ),
    "llama": ("llama", LLAMA),
    "llama, grouped, wide heads, tied": (
        "llama",
        {**LLAMA, "num_key_value_heads": 2, "head_dim": 12, "tie_word_embeddings": True},
    ),
    "llama, one key head, biased": (
        "llama",
        {**LLAMA, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    ),
    "llama, linear": ("llama", {**LLAMA, **rope("linear", factor=3.0)}),
    "llama, llama3": (
        "llama",
        {
            **LLAMA,
            **rope(
                "llama3",
                factor=4.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            ),
        },
    ),
    "llama, yarn": (
        "llama",
        {**LLAMA, **rope("yarn", factor=4.0, original_max_position_embeddings=16)},
    ),
    "llama, deepseek's yarn": (
        "llama",
        {
            **LLAMA,
            **rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                mscale=1.5,
                mscale_all_dim=0.7,
                beta_fast=16.0,
            ),
        },
    ),
    "mistral": ("mistral", {**LLAMA, "num_key_value_heads": 2, "sliding_window": 5}),
    "mistral, no window": ("mistral", {**LLAMA, "sliding_window": None}),
    "bloom": ("bloom", BLOOM),
    "bloom, six heads, untied": (
        "bloom",
        {**BLOOM, "hidden_size": 36, "n_head": 6, "tie_word_embeddings": False},
    ),
}
KINDS |= {
    "llama, looks biased": ("llama", {**LLAMA, "attention_bias": True}),
    "llama, thinks biased": ("llama", {**LLAMA, "mlp_bias": True}),
    "qwen2": ("qwen2", {**LLAMA, "num_key_value_heads": 2}),
    "qwen2, tied, some windows": (
        "qwen2",
        {
            **LLAMA,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
            "intermediate_size": 52,
        },
    ),
    "qwen2, odd windows, wide heads": (
        "qwen2",
        {
            **LLAMA,
            "head_dim": 12,
            "num_key_value_heads": 1,
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            **rope("yarn", factor=4.0, original_max_position_embeddings=16),
        },
    ),
    "qwen2, all windows": (
        "qwen2",
        {**LLAMA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
    "qwen3": ("qwen3", {**LLAMA, "num_key_value_heads": 2, "head_dim": 12}),
    "qwen3, tied, biased, windows": (
        "qwen3",
        {
            **LLAMA,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 2,
        },
    ),
    "gpt_neox": ("gpt_neox", NEOX),
    "gpt_neox, one after the other, half turned, tied": (
        "gpt_neox",
        {
            **NEOX,
            "use_parallel_residual": False,
            "rotary_pct": 0.5,
            "rotary_emb_base": 500,
            "hidden_act": "gelu_new",
            "tie_word_embeddings": True,
        },
    ),
    "gpt_neox, all turned, no bias": (
        "gpt_neox",
        {**NEOX, "rotary_pct": 1.0, "attention_bias": False, "layer_norm_eps": 1e-3},
    ),
    "gpt_neox, stretched": (
        "gpt_neox",
        {**NEOX, **rope("linear", factor=3.0, partial_rotary_factor=0.5)},
    ),
    "gemma": ("gemma", GEMMA),
    "gemma, untied, biased, gelu": (
        "gemma",
        {
            **GEMMA,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "hidden_act": "gelu",
            "num_key_value_heads": 1,
        },
    ),
    "gemma, silu": ("gemma", {**GEMMA, "hidden_act": "silu", "rms_norm_eps": 1e-3}),
    "gemma2": ("gemma2", {**GEMMA, "sliding_window": 5}),
    "gemma2, low caps, untied": (
        "gemma2",
        {
            **GEMMA,
            "sliding_window": 3,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 6.0,
            "query_pre_attn_scalar": 7,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "gemma2, no caps, no window": (
        "gemma2",
        {
            **GEMMA,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "layer_types": ["full_attention"] * 3,
        },
    ),
    "gemma3": ("gemma3_text", {**GEMMA3, "sliding_window_pattern": 2}),
    "gemma3, stretched, capped": (
        "gemma3_text",
        {
            **GEMMA3,
            "final_logit_softcapping": 9.0,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
}
# where theirs can be brought to compute in fp64
EXACT = ["gpt2", "gpt2, relu, untied", "llama", "llama, grouped, wide heads, tied", "mistral"]
EXACT += ["bloom"]


def theirs_of(kind: str, seed: int = 0) -> Any:
    """Return one of transformers' models with enlarged weights."""
    transformers = pytest.importorskip("transformers")
    model_type, settings = KINDS[kind]
    config = transformers.AutoConfig.for_model(model_type, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    enlarge(model, seed)
    return model


def ours_of(theirs: Any) -> GPT:
    """Return our model with the weights of one of theirs."""
    form = find_format(theirs.config.model_type)
    model = GPT(form.read_config(theirs.config.to_dict(), "")).eval()
    weights = to_ours(form, model.config, theirs.state_dict())
    assert set(weights) == {name for name, _ in model.named_parameters()}
    model.load_state_dict(weights, strict=False)
    return model


def exactly(theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let theirs compute in fp64 what they round to fp32: rotations, norms, softmax, a constant."""
    if theirs.config.model_type == "bloom":
        from transformers.models.bloom import modeling_bloom as bloom

        softmax = lambda x, dim, dtype: x.softmax(dim)  # noqa: E731
        monkeypatch.setattr(bloom, "F", SimpleNamespace(softmax=softmax, dropout=F.dropout))
        for block in theirs.transformer.h:
            block.mlp.gelu_impl = nn.GELU(approximate="tanh")
    elif theirs.config.model_type != "gpt2":

        def turn(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            width = theirs.config.head_dim
            rates = 1e4 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
            angles = position_ids.double().unsqueeze(-1) * torch.cat([rates, rates])
            return angles.cos(), angles.sin()

        theirs.model.rotary_emb.forward = turn
        for part in theirs.modules():
            if type(part).__name__.endswith("RMSNorm"):
                part.forward = lambda x, p=part: (
                    x * (x.square().mean(-1, keepdim=True) + p.variance_epsilon).rsqrt() * p.weight
                )


def texts(rows: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(0, EOS, (rows, length), generator=torch.Generator().manual_seed(seed))


def close(ours: Tensor, right: Tensor, bound: float = 1e-10) -> None:
    torch.testing.assert_close(ours, right, atol=bound, rtol=0)


# ---- ours equals theirs


BOTH = [(kind, torch.float32) for kind in KINDS] + [(kind, torch.float64) for kind in EXACT]


@pytest.mark.parametrize("kind,dtype", BOTH)
def test_ours_equals_theirs(kind: str, dtype: torch.dtype, monkeypatch):
    theirs = theirs_of(kind)
    ours, theirs = ours_of(theirs).to(dtype), theirs.to(dtype)
    if dtype == torch.float64:
        exactly(theirs, monkeypatch)
    ids, lengths = texts(4, 19), torch.tensor([19, 1, 7, 12])
    keep = torch.arange(19) < lengths.unsqueeze(1)
    with torch.no_grad():
        right = theirs(ids, attention_mask=keep.long()).logits[keep]
        full = ours(ids, lengths)[keep]
        state = ours.start(ids[:, :6])  # the prompt's last token is read by the first step
        steps = [ours.step(part, state)[0] for part in ids[:, 5:].split([1, 5, 1, 7], dim=1)]
    assert 1 < right.std() < 10
    bound = 2e-5 * max(1.0, float(right.abs().max())) if dtype == torch.float32 else 1e-9
    close(full, right, bound)
    close(torch.cat(steps, dim=1)[keep[:, 5:]], right_after(right, keep, 5), bound)


def test_of_two_original_lengths_under_yarn_theirs_is_taken():
    """A file may have one beside rope_parameters and another in it, as Phi's do."""
    transformers = pytest.importorskip("transformers")
    inner = rope("yarn", factor=4.0, original_max_position_embeddings=16)
    for outer in ({"original_max_position_embeddings": 8}, {}):
        told = {**LLAMA, **outer, **inner}
        whole = transformers.AutoConfig.for_model("llama", **copy.deepcopy(told)).to_dict()
        form = find_format("llama")
        read = form.read_config({"model_type": "llama", **told}, "")
        assert read.scaling == form.read_config(whole, "").scaling
        assert read.scaling.original_length == outer.get("original_max_position_embeddings", 16)


def right_after(right: Tensor, keep: Tensor, first: int) -> Tensor:
    """Take the rows of real tokens from a column on."""
    columns = keep.nonzero()[:, 1]
    return right[columns >= first]


@pytest.mark.parametrize("kind", KINDS)
def test_ours_writes_what_theirs_writes(kind: str, monkeypatch):
    monkeypatch.setattr(states, "ROOM", 8)  # so that memory runs out, and Mistral's is used again
    theirs = theirs_of(kind, SEEDS.get(kind, 3))
    ours = ours_of(theirs)
    # random weights would say the same word for ever
    fresh = pytest.importorskip("transformers").NoRepeatNGramLogitsProcessor(1)

    def unsaid(logits: Tensor, written: Tensor, prompt: Tensor) -> Tensor:
        return fresh(torch.cat([prompt, written], 1), logits)

    prompts, answers = texts(3, 9, seed=2), []
    lengths = torch.tensor([9, 1, 4])
    for prompt, n in zip(prompts, lengths.tolist(), strict=True):
        prompt = prompt[None, :n]
        right = theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=16,
            logits_processor=[fresh],
        )[0, n:].tolist()
        ((one,),) = searching.greedy(
            ours,
            prompt,
            begin=prompt[:, -1],
            max_length=16,
            adjust=[lambda x, written, prompt=prompt: unsaid(x, written, prompt)],
            eos=EOS,
        )
        assert one.ids == right[: right.index(EOS) if EOS in right else None]
        answers.append(one.ids)
    assert len(set(map(tuple, answers))) == 3 and sum(map(len, answers)) > 15
    # prompts of different lengths together say what each says alone
    last = prompts.gather(1, lengths.unsqueeze(1) - 1).squeeze(1)
    alone = [
        searching.greedy(ours, prompts[i : i + 1, :n], begin=last[i : i + 1], max_length=9, eos=EOS)
        for i, n in enumerate(lengths.tolist())
    ]
    together = searching.greedy(ours, prompts, lengths, begin=last, max_length=9, eos=EOS)
    assert [one.ids for (one,) in together] == [one.ids for ((one,),) in alone]


# where another says an end at once
SEEDS = {"qwen2, tied, some windows": 4}


def test_older_files_are_understood():
    theirs = theirs_of("llama, llama3")
    config = theirs.config.to_dict()
    older = {**config, "rope_theta": 1e4, "rope_scaling": config.pop("rope_parameters")}
    older["rope_scaling"]["type"] = older["rope_scaling"].pop("rope_type")
    del older["rope_parameters"], older["rope_scaling"]["rope_theta"]
    assert find_format("llama").read_config(older, "") == ours_of(theirs).config
    # without the prefix of the base model, with the head written twice, and with what is no weight
    theirs = theirs_of("gpt2")
    form, config = find_format("gpt2"), ours_of(theirs).config
    weights = {k.removeprefix("transformer."): v for k, v in theirs.state_dict().items()}
    weights["h.0.attn.bias"] = torch.ones(1, 1, 64, 64).bool()
    right = to_ours(form, config, theirs.state_dict())
    for name, tensor in to_ours(form, config, weights).items():
        assert torch.equal(tensor, right[name])
    again = {**weights, "transformer.ln_f.weight": weights["ln_f.weight"]}
    with pytest.raises(UsageError, match="ln_f.weight is there with and without its prefix"):
        to_ours(form, config, again)
    weights["head_only.weight"] = weights.pop("lm_head.weight")
    with pytest.raises(UsageError, match="unknown head_only.weight"):
        to_ours(form, config, weights)


BROKEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "activation": ("llama", {"hidden_act": "relu"}, "unknown hidden_act 'relu'"),
    "gpt2 activation": ("gpt2", {"activation_function": "silly"}, "unknown activation_function"),
    "layer types": ("qwen2", {"layer_types": ["full_attention"]}, "each of 32 layers"),
    "a layer type": ("gemma2", {"layer_types": ["chunked"] * 26}, "unknown layer_types 'chunked'"),
    "depth as a word": ("qwen3", {"num_hidden_layers": "deep"}, "num_hidden_layers=deep"),
    "share": ("gpt_neox", {"rotary_pct": "much"}, "position_share='much' is not a number"),
    "looks ahead": ("gemma", {"use_bidirectional_attention": True}, "bidirectional_attention=true"),
    "capped scores": ("gemma3_text", {"attn_logit_softcapping": 5.0}, "softcapping=5.0"),
    "scalar": ("gemma2", {"query_pre_attn_scalar": -3}, "query_pre_attn_scalar=-3"),
    "near rope": (
        "gemma3_text",
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "of sliding_attention",
    ),
    "rope": ("llama", rope("dynamic", factor=2.0), "unknown rope_type 'dynamic'"),
    "rope as a list": ("llama", {"rope_parameters": [1]}, "not an object"),
    "factor": ("llama", rope("linear", factor=-1.0), "too small"),
    "no factor": ("llama", rope("linear"), "no factor"),
    "scores": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx=True"),
    "residual": ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm"),
    "width as a word": ("gpt2", {"n_embd": "wide"}, "n_embd='wide' is not a whole number"),
    "width as a list": ("bloom", {"hidden_size": [64]}, "hidden_size"),
    "depth": ("mistral", {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 is too large"),
    "vocabulary": ("bloom", {"vocab_size": 2**60}, "vocab_size"),
    "no vocabulary": ("bloom", {"vocab_size": None}, "vocab_size"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_config_that_cannot_be_read_is_a_mistake(broken: str):
    model_type, changes, words = BROKEN[broken]
    with pytest.raises(UsageError, match=words) as mistake:
        find_format(model_type).read_config({"model_type": model_type, **changes}, "")
    assert "\n" not in str(mistake.value)


@pytest.mark.parametrize(
    "change,words",
    [
        ({"position": "fire"}, "position='fire'"),
        ({"prompt": "bidirectional"}, "prompt='bidirectional'"),
        ({"head_bias": True}, "head_bias=True"),
    ],
)
def test_what_no_format_holds_is_named(change: dict[str, Any], words: str):
    with pytest.raises(UsageError, match=words):
        fitting("gpt", replace(preset("gpt", "tiny"), **change), "language")
    with pytest.raises(UsageError, match="order='parallel'"):
        fitting("gpt", preset("gpt", "tiny", "palm"), "language")


def test_a_yarn_of_our_own_is_theirs_too(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    block = replace(PRESETS["llama"].block, width=32, heads=4, ffn_width=44, dropout=0.0)
    config = replace(PRESETS["llama"], vocab=VOCAB, depth=2, block=block, position="yarn")
    ours = GPT(replace(config, max_length=64)).eval()
    enlarge(ours)
    form, written = fitting("gpt", ours.config, "language")
    assert form.model_type == "llama"
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**written)).eval()
    theirs.load_state_dict(to_theirs(form, ours.config, dict(ours.named_parameters())))
    with torch.no_grad():
        right = theirs(texts(2, 40)).logits
        close(ours(texts(2, 40)), right, 2e-5 * float(right.abs().max()))
    again = form.read_config(written, "")
    assert fitting("gpt", again, "language")[1] == written


# ---- PaLM by its formula


def palm(model: GPT, ids: Tensor) -> Tensor:
    """Return PaLM's logits for one text, token by token and head by head, from the paper.

    y = x + MLP(norm(x)) + Attention(norm(x)); one key and value for all heads; rotary positions;
    SwiGLU = swish(x W) * x V; no bias anywhere; input and output embeddings shared.
    """
    state = {name: tensor.double() for name, tensor in model.state_dict().items()}
    block = model.config.block
    heads, d = block.heads, block.width // block.heads

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        centred = x - x.mean()
        return centred / (centred.square().mean() + block.norm_eps).sqrt() * weight

    def turn(x: Tensor, place: int) -> Tensor:
        out = x.clone()
        for i in range(d // 2):
            angle = place * 10_000 ** (-2 * i / d)
            a, b = x[i], x[i + d // 2]
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + d // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    xs = [state["embed.tokens.weight"][token] for token in ids.tolist()]
    for n in range(model.config.depth):
        part = {k.removeprefix(f"blocks.{n}."): v for k, v in state.items()}
        normed = [norm(x, part["around.norm.weight"]) for x in xs]
        projected = [part["attention.qkv.weight"] @ x for x in normed]
        keys = [turn(p[heads * d : heads * d + d], i) for i, p in enumerate(projected)]
        values = [p[heads * d + d :] for p in projected]
        new = []
        for i, (x, y, p) in enumerate(zip(xs, normed, projected, strict=True)):
            looks = []
            for h in range(heads):
                q = turn(p[h * d : (h + 1) * d], i)
                scores = torch.stack([q @ k / math.sqrt(d) for k in keys[: i + 1]])
                weights = scores.exp() / scores.exp().sum()
                looks.append(sum(w * v for w, v in zip(weights, values[: i + 1], strict=True)))
            gate = part["feed_forward.gate.weight"] @ y
            inner = gate * torch.sigmoid(gate) * (part["feed_forward.inner.weight"] @ y)
            look = part["attention.out.weight"] @ torch.cat(looks)
            new.append(x + look + part["feed_forward.outer.weight"] @ inner)
        xs = new
    return torch.stack([state["embed.tokens.weight"] @ norm(x, state["norm.weight"]) for x in xs])


def test_palm_is_its_formula():
    block = replace(PRESETS["palm"].block, width=24, heads=4, ffn_width=28, dropout=0.0)
    model = GPT(replace(PRESETS["palm"], vocab=31, depth=3, block=block)).double().eval()
    enlarge(model)
    ids = torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model(ids)
        assert 1 < ours.std() < 10
        for row, logits in zip(ids, ours, strict=True):
            close(logits, palm(model, row))
    names = {name for name, _ in model.named_parameters()}
    assert not any("bias" in name for name in names) and "head.weight" not in names


# ---- what a decoder promises


def small(**changes: Any) -> GPT:
    """Return a small model in fp64 with enlarged weights."""
    block = BlockConfig(16, 4, 24, dropout=0.0, feed_forward="gelu_tanh")
    model = GPT(GPTConfig(VOCAB, 2, block, max_length=32, **changes)).double().eval()
    enlarge(model)
    return model


@pytest.mark.parametrize("position", POSITIONS)
def test_packed_documents_equal_separate_ones(position: str):
    model = small(position=position)
    lengths = [[3, 5, 4], [7, 4, 1]]
    ids = texts(2, 12)
    documents = torch.stack(
        [torch.arange(3).repeat_interleave(torch.tensor(row)) for row in lengths]
    )
    with torch.no_grad():
        packed = model(ids, documents=documents)
        for row, (sizes, logits) in enumerate(zip(lengths, packed, strict=True)):
            parts = zip(ids[row].split(sizes), logits.split(sizes), strict=True)
            for text, ours in parts:
                close(ours, model(text[None])[0])
    assert within(documents).squeeze(-1).tolist()[1] == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 0]


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("window", [None, 3])
def test_ragged_prompts_equal_full_texts_for_every_position(position: str, window: int | None):
    model = small(position=position, window=window)
    prompts, more, lengths = texts(3, 7), texts(3, 6, seed=2), torch.tensor([7, 1, 4])
    last = prompts.gather(1, lengths.unsqueeze(1) - 1)
    with torch.no_grad():
        state = model.start(prompts, lengths, capacity=7)
        fed = torch.cat([last, more], 1)
        ours = torch.cat([model.step(part, state)[0] for part in fed.split([1, 1, 3, 2], 1)], 1)
        for row, n in enumerate(lengths.tolist()):
            full = model(torch.cat([prompts[row, :n], more[row]])[None])[0]
            close(ours[row], full[n - 1 :])
            # and where texts stand in memory is where theirs stand
            assert state.begun[row] + state.length == n + 6  # type: ignore[index]


def test_a_prefix_is_read_both_ways_and_the_rest_is_not():
    model = small(position="rotary")
    ids = texts(2, 8)
    prefix = torch.tensor([5, 2])
    x = model.embed.tokens.weight.detach()[ids].requires_grad_()
    model.embed.tokens.forward = lambda ids: x
    logits = model(ids, prefix=prefix)
    for row, n in enumerate(prefix.tolist()):
        for now in range(8):
            (grad,) = torch.autograd.grad(logits[row, now].square().sum(), x, retain_graph=True)
            seen = grad[row].abs().sum(-1) > 0
            assert seen.tolist() == [i < n or i <= now for i in range(8)]
    del model.embed.tokens.forward
    with torch.no_grad():
        close(model(ids, prefix=torch.tensor([1, 0])), model(ids))
        # a prompt that is read both ways, and what is written after it
        both = small(position="rotary", prompt="bidirectional")
        lengths = prefix + 1
        state = both.start(ids[:, :6], lengths, capacity=3)
        for row, n in enumerate(prefix.tolist()):
            full = both(ids[row : row + 1], prefix=prefix[row : row + 1])[0]
            fed = ids[row, n : n + 2]
            alone = both.start(ids[row : row + 1, : n + 1], capacity=3)
            close(both.step(fed[None], alone)[0][0], full[n : n + 2])
        fed = torch.stack([ids[row, n : n + 2] for row, n in enumerate(prefix.tolist())])
        together = both.step(fed, state)[0]
        for row, n in enumerate(prefix.tolist()):
            full = both(ids[row : row + 1], prefix=prefix[row : row + 1])[0]
            close(together[row], full[n : n + 2])
    with pytest.raises(UsageError, match="documents or prefix, not both"):
        model(ids, prefix=prefix, documents=torch.zeros_like(ids))


def test_a_window_hides_what_is_further_back():
    model = small(position="rotary", window=3)
    ids = texts(1, 9)
    other = ids.clone()
    other[:, 0] = (ids[:, 0] + 1) % VOCAB
    with torch.no_grad():
        changed = (model(ids) - model(other)).abs().sum(-1)[0] > 0
    # two layers carry a token on for twice two places
    assert changed.tolist() == [True] * 5 + [False] * 4


def test_memory_of_a_window_does_not_grow(monkeypatch):
    monkeypatch.setattr(states, "ROOM", 16)
    model = small(position="rotary", window=4)
    ids = texts(1, 100)
    with torch.no_grad():
        state = model.start(ids[:, :1], capacity=100)
        steps = [model.step(ids[:, i : i + 1], state)[0] for i in range(100)]
        close(torch.cat(steps, 1), model(ids))
    assert state.caches[0].room <= 32


def test_an_empty_prompt_is_a_mistake():
    model = small()
    for source, lengths in ((texts(2, 0), None), (texts(2, 3), torch.tensor([2, 0]))):
        with pytest.raises(UsageError, match="empty prompt"):
            model.start(source, lengths)
    with pytest.raises(UsageError, match="past the 32 learned"):
        model(texts(1, 33))


@pytest.mark.parametrize("row", PRESETS)
def test_every_row_has_the_named_sizes(row: str):
    numbers = []
    for name in SIZES:
        config = preset("gpt", name, row)
        parts = replace(
            PRESETS[row],
            depth=config.depth,
            block=replace(
                PRESETS[row].block,
                width=config.block.width,
                heads=config.block.heads,
                kv_heads=config.block.kv_heads,
                ffn_width=config.block.ffn_width,
                head_width=config.block.head_width,
            ),
            max_length=config.max_length,
            window=config.window,
        )
        assert parts == config  # nothing but sizes has changed
        ratio = PRESETS[row].block.ffn_width / PRESETS[row].block.width
        assert config.block.ffn_width / config.block.width == pytest.approx(ratio, rel=0.05)
        with torch.device("meta"):
            numbers.append(sum(p.numel() for p in GPT(config).parameters()))
    assert numbers == sorted(numbers)
    with pytest.raises(UsageError, match="Did you mean 'llama'"):
        preset("gpt", "tiny", "lama")


@pytest.mark.parametrize(
    "row,published", [("gpt2", 124_439_808), ("llama", 6_738_415_616), ("mistral", 7_241_732_096)]
)
def test_rows_have_the_published_numbers_of_parameters(row: str, published: int):
    with torch.device("meta"):
        assert sum(p.numel() for p in GPT(PRESETS[row]).parameters()) == published


def test_yarn_by_name_is_rotary_stretched():
    one = small(position="yarn", scaling=RotaryScaling("yarn", factor=2.0))
    two = small(position="rotary", scaling=RotaryScaling("yarn", factor=2.0))
    with torch.no_grad():
        assert torch.equal(one(texts(1, 9)), two(texts(1, 9)))


# ---- real weights


@pytest.fixture(scope="module")
def stories() -> tuple[GPT, dict[str, Any], Callable[[list[int]], str]]:
    """Return a trained LLaMA of 260K parameters, what it should say, and how to spell it."""
    folder = WEIGHTS / "stories260k"
    if not folder.is_dir():
        pytest.skip(f"no weights at {folder}")
    from tokenizers import Tokenizer

    form = find_format("llama")
    config = form.read_config(json.loads((folder / "config.json").read_text()), "")
    model = GPT(config).eval()
    model.load_state_dict(
        to_ours(form, config, load_file(folder / "model.safetensors")), strict=False
    )
    spell = Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = json.loads((folder / "expected.json").read_text())
    return model, expected, lambda ids: spell.decode(ids, skip_special_tokens=False)


def test_real_weights_tell_the_expected_story(stories):
    model, expected, spell = stories
    right = expected["greedy_from_bos"]
    begin = torch.tensor([[1]])
    ((one,),) = searching.greedy(model, begin, begin=begin[:, 0], max_length=len(right) - 1, eos=2)
    assert [1, *one.ids] == right
    assert spell(right) == expected["text"]
    # from any place of the story, several at once
    prompts = torch.tensor([right, right, right])
    lengths = torch.tensor([5, 40, 20])
    last = prompts.gather(1, lengths.unsqueeze(1) - 1).squeeze(1)
    told = searching.greedy(model, prompts, lengths, begin=last, max_length=20, eos=2)
    for (one,), n in zip(told, lengths.tolist(), strict=True):
        assert one.ids == right[n : n + 20]


def test_real_weights_find_a_prompt_as_likely(stories):
    model, expected, _ = stories
    ids = torch.tensor([expected["prompt_ids"]])
    with torch.no_grad():
        told = model(ids).log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])
    assert told.mean().item() == pytest.approx(expected["prompt_mean_logprob"], abs=1e-6)
