"""Public checkpoints: is what Regard makes of them what transformers makes of them?

    python bench/parity.py [--quick] [--only gpt2,bart] [--count 60] [--show]

For each format as many odd configurations as asked for are drawn: sizes, heads, activations,
scalings, ties, special tokens and ways to generate. A random model of transformers, its weights
enlarged so that logits spread, is written as a folder, and four things are asked of that folder:

- logits: the same on a batch with padding, at once and token by token;
- texts: the same greedily, by beam, and as its generation_config.json says where nothing is given;
- export: what Regard writes again gives transformers the same logits and texts;
- again: and Regard, too.

Each is equal, refused by name (a `UsageError`), or wrong; only the last is an error. A format is a
row of CASES: to add one, add a row.
"""

import argparse
import contextlib
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tokenizers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import regard  # noqa: E402

Settings = dict[str, Any]
BOUND = 2e-5  # of the largest logit, but at least of 1
PIECES = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *"abcdefghijklmnopqrstuvwxyz.,Ġ"]
PIECES += ["th", "he", "in", "er", "an", "Ġt", "Ġa", "Ġth", "Ġthe", "ing"]
MERGES = ["t h", "h e", "i n", "e r", "a n", "Ġ t", "Ġ a", "Ġt h", "Ġt he", "in g"]
TOKENS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
TEXTS = ["the king and a ring", "an old hat.", "in the end, nothing went on", "a"]
LENGTHS = (12, 1, 7, 10)  # of the texts in a batch
MOST = 10  # tokens that are written
VERDICTS = ("equal", "refused", "wrong")


@dataclass(frozen=True)
class Case:
    """One kind of checkpoint: its classes, small sizes, and what may be odd about it.

    `odd` gives for a key the values that are tried; a key of several settings, such as a pair of
    sizes that belong together, has dicts as values, and a dot leads into a config within another.
    `change` alters a model after it was drawn.
    """

    kind: str  # language, text, encoder, images or both (texts and images)
    classes: tuple[str, ...]
    sizes: Settings
    odd: dict[str, list]
    change: Callable[[Any, random.Random], None] = lambda model, rng: None
    scale: float = 2.0  # of the weights, so that logits spread


# ---- what may be odd

ACTIVATIONS = ["gelu", "relu", "silu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "swish"]
ACTIVATIONS += ["tanh", "quick_gelu"]
TIED: dict[str, list] = {"tie_word_embeddings": [True, False]}
LENGTH: dict[str, list] = {"max_position_embeddings": [64, 100]}


def rope(kind: str, **settings: Any) -> Settings:
    """Describe a rotary position as transformers 5 does."""
    return {"rope_type": kind, "rope_theta": 10_000.0, **settings}


ROPES = [
    rope("default"),
    rope("default", rope_theta=500.0),
    rope("linear", factor=3.0),
    rope("dynamic", factor=2.0),
    rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
    | {"original_max_position_embeddings": 16},
    rope("longrope", factor=4.0, short_factor=[1.0] * 4, long_factor=[2.0] * 4)
    | {"original_max_position_embeddings": 16},
    rope("proportional", partial_rotary_factor=0.5),
    rope("default", partial_rotary_factor=0.5),
    *(
        rope("yarn", factor=4.0, original_max_position_embeddings=16, **more)
        for more in (
            {},
            {"mscale": 1.5, "mscale_all_dim": 0.7},
            {"mscale": 1.5, "mscale_all_dim": 0},
            {"mscale": 0, "mscale_all_dim": 1.0},
            {"mscale": 0.7},
            {"mscale_all_dim": 1.2},
            {"attention_factor": 0.8, "mscale": 1.5, "mscale_all_dim": 0.7},
            {"attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 2.0},
            {"beta_fast": 16, "beta_slow": 1, "truncate": False},
            {"beta_fast": None, "beta_slow": None},
        )
    ),
]
WIDTHS = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2}
WIDTHS |= {"num_attention_heads": 4, "max_position_embeddings": 64}
SIDES = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 64}
SIDES |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40}
SIDES |= {"decoder_ffn_dim": 40, "decoder_start_token_id": 2, "forced_eos_token_id": None}
ODD_SIDES: dict[str, list] = {
    "activation_function": ACTIVATIONS,
    "scale_embedding": [True, False],
    "encoder_layers": [1, 3],
    "decoder_layers": [1, 3],
    "encoder_attention_heads": [2, 8],
    "both heads": [{"encoder_attention_heads": n, "decoder_attention_heads": n} for n in (1, 8)],
    "decoder_ffn_dim": [24],
    "both widths": [{"encoder_ffn_dim": n, "decoder_ffn_dim": n} for n in (8, 96)],
    "decoder_start_token_id": [0, 1, 5],
    "forced_eos_token_id": [2],
    "normalize_before": [True],
    "add_final_layer_norm": [True],
    "static_position_embeddings": [True],
    "encoder_layerdrop": [0.5],
    "num_hidden_layers": [2],
    **TIED,
}
ODD_ENCODER: dict[str, list] = {
    "hidden_act": ACTIVATIONS,
    "num_attention_heads": [1, 8],
    "num_hidden_layers": [1, 3],
    "intermediate_size": [8, 96],
    "layer_norm_eps": [1e-5, 1e-2],
    "num_labels": [1, 2, 5],
    "problem_type": ["multi_label_classification", "single_label_classification", "regression"],
    "type_vocab_size": [1, 3],
    "is_decoder": [True],
    "chunk_size_feed_forward": [3],
    "classifier_dropout": [0.3],
    "max_position_embeddings": [32, 100],
    **TIED,
}
ODD_ROTARY: dict[str, list] = {
    "hidden_act": ACTIVATIONS,
    "num_key_value_heads": [1, 2, 4],
    "head_dim": [4, 12],
    "num_attention_heads": [2, 8],
    "num_hidden_layers": [1, 3],
    "rms_norm_eps": [1e-5, 1e-2],
    "rope_parameters": ROPES,
    **LENGTH,
    **TIED,
}
ODD_IMAGES: dict[str, list] = {
    "hidden_act": ACTIVATIONS,
    "num_channels": [1, 2],
    "num_labels": [1, 2, 7],
    "problem_type": ["multi_label_classification", "single_label_classification", "regression"],
}
ODD_VIT: dict[str, list] = {
    **ODD_IMAGES,
    "layer_norm_eps": [1e-6, 1e-2],
    "qkv_bias": [False],
    "image_size": [16, 32, [24, 24]],
    "patch_size": [4, 12],
    "num_attention_heads": [1, 8],
    "num_hidden_layers": [1, 3],
    "intermediate_size": [8, 96],
}
VIT = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2}
VIT |= {"num_attention_heads": 4, "image_size": 24, "patch_size": 8}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4]}
SWIN |= {"window_size": 4, "mlp_ratio": 1.5}
ODD_SWIN: dict[str, list] = {
    **ODD_IMAGES,
    "mlp_ratio": [0.5, 3.0],
    "qkv_bias": [False],
    "use_absolute_embeddings": [True],
    "layer_norm_eps": [1e-6, 1e-2],
    "window_size": [2, 8, 3],
    "shape": [{"depths": [1, 2, 1], "num_heads": [1, 2, 3]}, {"depths": [3], "num_heads": [4]}],
}


NEAR, FAR = "sliding_attention", "full_attention"
ODD_QWEN: dict[str, list] = {
    **ODD_ROTARY,
    "windows": [
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 1, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 4, "layer_types": [NEAR, FAR]},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": False, "sliding_window": 2, "max_window_layers": 0},
        {"layer_types": [FAR, FAR]},
    ],
    "num_hidden_layers": [2],
}
GEMMA = {**WIDTHS, "head_dim": 12, "num_key_value_heads": 2}
ODD_GEMMA: dict[str, list] = {
    **ODD_ROTARY,
    "attention_bias": [True],
    "use_bidirectional_attention": [True, False],
}
ODD_GEMMA2: dict[str, list] = {
    **{key: values for key, values in ODD_GEMMA.items() if key != "hidden_act"},
    "hidden_activation": ACTIVATIONS,
    "query_pre_attn_scalar": [7, 12, 100],
    "final_logit_softcapping": [None, 4.0, 30.0],
    "windows": [{"sliding_window": 3}, {"sliding_window": 4, "layer_types": [FAR, NEAR]}]
    + [{"layer_types": [FAR, FAR]}, {"sliding_window": 1, "layer_types": [NEAR, NEAR]}],
    "num_hidden_layers": [2],
}


def heads(name: str, *ends: str) -> tuple[str, ...]:
    """Name the classes of a family."""
    return tuple(name + end for end in ends)


LABELLING = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")


def own_head(model: Any, rng: random.Random) -> None:
    """Give a T5 now and then a head of its own, as version 1.1 has it."""
    if rng.random() < 0.4:
        head = torch.empty_like(model.lm_head.weight)
        model.lm_head.weight = nn.Parameter(nn.init.normal_(head, std=0.4))
        model.config.tie_word_embeddings = False


CLIP = {"hidden_size": 16, "intermediate_size": 20}
CLIP |= {"num_hidden_layers": 2, "num_attention_heads": 2}
ODD_CLIP: dict[str, list] = {
    "hidden_act": ACTIVATIONS,
    "hidden_size": [24, 8],
    "intermediate_size": [8, 33],
    "num_hidden_layers": [1, 3],
    "num_attention_heads": [1, 4],
    "layer_norm_eps": [1e-3],
    "attention_dropout": [0.1],
}

CASES: dict[str, Case] = {
    "gpt2": Case(
        "language",
        ("GPT2LMHeadModel",),
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        {
            "activation_function": ACTIVATIONS,
            "n_inner": [20, 96],
            "n_head": [1, 8],
            "n_layer": [1, 3],
            "layer_norm_epsilon": [1e-6, 1e-2],
            "scale_attn_weights": [False],
            "scale_attn_by_inverse_layer_idx": [True],
            "reorder_and_upcast_attn": [True],
            "n_positions": [40, 100],
            **TIED,
        },
    ),
    "llama": Case(
        "language",
        ("LlamaForCausalLM",),
        WIDTHS,
        {
            **ODD_ROTARY,
            "attention_bias": [True],
            "biases": [{"attention_bias": True, "mlp_bias": True}],
            "mlp_bias": [True],
            "pretraining_tp": [2],
        },
    ),
    "mistral": Case(
        "language",
        ("MistralForCausalLM",),
        {**WIDTHS, "num_key_value_heads": 2},
        {**ODD_ROTARY, "sliding_window": [None, 1, 3, 8]},
    ),
    "qwen2": Case(
        "language", ("Qwen2ForCausalLM",), {**WIDTHS, "num_key_value_heads": 2}, ODD_QWEN
    ),
    "qwen3": Case(
        "language",
        ("Qwen3ForCausalLM",),
        {**WIDTHS, "num_key_value_heads": 2, "head_dim": 12},
        {**ODD_QWEN, "attention_bias": [True]},
    ),
    "gpt_neox": Case(
        "language",
        ("GPTNeoXForCausalLM",),
        WIDTHS,
        {
            "hidden_act": ACTIVATIONS,
            "shape": [{"hidden_size": 36, "num_attention_heads": 6}, {"num_attention_heads": 1}],
            "num_hidden_layers": [1, 3],
            "use_parallel_residual": [True, False],
            "attention_bias": [False],
            "rotary_pct": [0.0, 0.5, 0.75, 1.0],
            "rotary_emb_base": [300],
            "rope_parameters": ROPES,
            "layer_norm_eps": [1e-6, 1e-2],
            **LENGTH,
            **TIED,
        },
    ),
    "gemma": Case("language", ("GemmaForCausalLM",), GEMMA, ODD_GEMMA),
    "gemma2": Case(
        "language",
        ("Gemma2ForCausalLM",),
        GEMMA,
        {**ODD_GEMMA2, "attn_logit_softcapping": [None, 2.0, 50.0]},
    ),
    "gemma3_text": Case(
        "language",
        ("Gemma3ForCausalLM",),
        {**GEMMA, "sliding_window": 4, "query_pre_attn_scalar": 12},
        {
            **ODD_GEMMA2,
            "sliding_window_pattern": [1, 2],
            "rope_parameters": [
                {FAR: {**one, "rope_theta": 5e4}, NEAR: rope("default", rope_theta=300.0)}
                for one in ROPES
            ]
            + [{FAR: rope("default"), NEAR: rope("linear", factor=2.0)}],
        },
    ),
    "bloom": Case(
        "language",
        ("BloomForCausalLM",),
        {"hidden_size": 32, "n_layer": 2, "n_head": 4},
        {
            "shape": [{"hidden_size": 36, "n_head": 6}, {"hidden_size": 24, "n_head": 3}],
            "n_layer": [1, 3],
            "layer_norm_epsilon": [1e-6, 1e-2],
            "apply_residual_connection_post_layernorm": [True],
            "slow_but_exact": [True],
            "pretraining_tp": [2],
            "seq_length": [64],
            **TIED,
        },
    ),
    "bert": Case("encoder", heads("Bert", *LABELLING, "ForPreTraining"), WIDTHS, ODD_ENCODER),
    "roberta": Case("encoder", heads("Roberta", *LABELLING), WIDTHS, ODD_ENCODER),
    "xlm-roberta": Case("encoder", heads("XLMRoberta", *LABELLING), WIDTHS, ODD_ENCODER),
    "camembert": Case("encoder", heads("Camembert", *LABELLING), WIDTHS, ODD_ENCODER),
    "distilbert": Case(
        "encoder",
        heads("DistilBert", *LABELLING),
        {"dim": 32, "hidden_dim": 44, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64},
        {
            "activation": ACTIVATIONS,
            "n_heads": [1, 8],
            "n_layers": [1, 3],
            "hidden_dim": [8, 96],
            "sinusoidal_pos_embds": [True],
            "seq_classif_dropout": [0.0, 0.5],
            "num_labels": [1, 2, 5],
            "problem_type": ["multi_label_classification", "regression"],
            "chunk_size_feed_forward": [3],
            **LENGTH,
            **TIED,
        },
    ),
    "electra": Case(
        "encoder",
        heads("Electra", *LABELLING),
        {**WIDTHS, "embedding_size": 16},
        {
            **ODD_ENCODER,
            "embedding_size": [8, 32, 40],
            "summary_type": ["last"],
            "summary_activation": ["tanh"],
        },
    ),
    "mpnet": Case(
        "encoder",
        heads("MPNet", *LABELLING),
        WIDTHS,
        {
            **{key: value for key, value in ODD_ENCODER.items() if key != "type_vocab_size"},
            "relative_attention_num_buckets": [32, 40],
        },
    ),
    "modernbert": Case(
        "encoder",
        heads("ModernBert", *LABELLING),
        {**WIDTHS, "num_hidden_layers": 4, "local_attention": 4},
        {
            "hidden_activation": ACTIVATIONS,
            "classifier_activation": ACTIVATIONS,
            "classifier_pooling": ["mean"],
            "local_attention": [0, 1, 7, 64],
            "global_attn_every_n_layers": [1, 2, 4],
            "layer_types": [
                [("full_attention", "sliding_attention")[i >> n & 1] for n in range(4)]
                for i in (15, 6, 3, 11)
            ],
            "rope_parameters": [
                {"full_attention": one, "sliding_attention": other}
                for one, other in (
                    (rope("default", rope_theta=300.0), rope("default", rope_theta=20.0)),
                    (rope("default"), rope("linear", factor=2.0)),
                )
            ],
            "norm_bias": [True],
            "attention_bias": [True],
            "mlp_bias": [True],
            "classifier_bias": [True],
            "decoder_bias": [False],
            "norm_eps": [1e-3],
            "num_attention_heads": [1, 8],
            "intermediate_size": [8, 96],
            "num_labels": [1, 2, 5],
            "sparse_prediction": [True],
            "problem_type": ["multi_label_classification", "regression"],
            **LENGTH,
            **TIED,
        },
    ),
    "albert": Case(
        "encoder",
        heads("Albert", *LABELLING, "ForPreTraining"),
        {**WIDTHS, "embedding_size": 16},
        {
            **ODD_ENCODER,
            "embedding_size": [8, 32, 40],
            "num_hidden_groups": [2],
            "inner_group_num": [2],
            "classifier_dropout_prob": [0.3],
        },
    ),
    "deberta-v2": Case(
        "encoder",
        heads("DebertaV2", *LABELLING),
        {
            **WIDTHS,
            "relative_attention": True,
            "share_att_key": True,
            "position_biased_input": False,
            "pos_att_type": ["c2p", "p2c"],
            "norm_rel_ebd": "layer_norm",
            "position_buckets": 8,
            "max_relative_positions": 16,
            "type_vocab_size": 0,
        },
        {
            **ODD_ENCODER,
            "relative_attention": [False],
            "share_att_key": [False],
            "position_biased_input": [True],
            "pos_att_type": ["p2c|c2p", ["c2p"], ["p2c"], [], ["p2c", "c2p"]],
            "norm_rel_ebd": ["none"],
            "position_buckets": [-1, 4, 5],
            "max_relative_positions": [-1, 40],
            "conv_kernel_size": [3],
            "pooler_hidden_act": ["tanh", "relu"],
            "pooler_hidden_size": [16],
            "legacy": [False],
            "z_steps": [2],
        },
    ),
    "t5": Case(
        "text",
        ("T5ForConditionalGeneration",),
        {"d_model": 24, "d_kv": 10, "d_ff": 40, "num_layers": 2, "num_heads": 3}
        | {"decoder_start_token_id": 1},
        {
            "feed_forward_proj": ["relu", "gelu", "silu", "gelu_new", "gated-gelu", "gated-silu"]
            + ["gated-relu", "gated-gelu_new", "gated-swish", "swish", "tanh"],
            "num_decoder_layers": [1, 3],
            "num_layers": [1, 3],
            "num_heads": [1, 4],
            "d_kv": [4, 16],
            "d_ff": [8, 96],
            "layer_norm_epsilon": [1e-5, 1e-2],
            "relative_attention_num_buckets": [8],
            "relative_attention_max_distance": [20],
            "decoder_start_token_id": [0, 2],
            "scale_decoder_outputs": [False, True],
        },
        change=own_head,
        scale=1.0,
    ),
    "mt5": Case(
        "text",
        ("MT5ForConditionalGeneration",),
        {"d_model": 24, "d_kv": 10, "d_ff": 40, "num_layers": 2, "num_heads": 3}
        | {"decoder_start_token_id": 1},
        {
            "feed_forward_proj": ["relu", "gelu", "gelu_new", "gated-silu", "gated-relu", "tanh"],
            "num_decoder_layers": [1, 3],
            "num_layers": [1, 3],
            "num_heads": [1, 4],
            "d_kv": [4, 16],
            "d_ff": [8, 96],
            "layer_norm_epsilon": [1e-5, 1e-2],
            "relative_attention_num_buckets": [8],
            "relative_attention_max_distance": [20],
            "decoder_start_token_id": [0, 2],
        },
        scale=1.0,
    ),
    "bart": Case("text", ("BartForConditionalGeneration", "BartModel"), SIDES, ODD_SIDES),
    "marian": Case(
        "text",
        ("MarianMTModel",),
        SIDES,
        {
            **ODD_SIDES,
            "decoder_vocab_size": [None],
            "share_encoder_decoder_embeddings": [False],
        },
    ),
    "pegasus": Case("text", ("PegasusForConditionalGeneration",), SIDES, ODD_SIDES),
    "esm": Case(
        "encoder",
        heads("Esm", *LABELLING),
        {**WIDTHS, "position_embedding_type": "rotary", "emb_layer_norm_before": True},
        {
            **{k: v for k, v in ODD_ENCODER.items() if k != "type_vocab_size"},
            "emb_layer_norm_before": [False, None],
            "token_dropout": [True],
            "position_embedding_type": ["absolute"],
            "rope_theta": [500.0],
        },
    ),
    "vit": Case("images", heads("ViT", "ForImageClassification", "Model"), VIT, ODD_VIT),
    "deit": Case(
        "images",
        heads("DeiT", "ForImageClassification", "ForImageClassificationWithTeacher", "Model"),
        VIT,
        ODD_VIT,
    ),
    "dinov2": Case(
        "images",
        heads("Dinov2", "ForImageClassification", "Model"),
        {key: value for key, value in VIT.items() if key != "intermediate_size"} | {"mlp_ratio": 2},
        {
            **{key: values for key, values in ODD_VIT.items() if key != "intermediate_size"},
            "mlp_ratio": [1, 3],
            "use_swiglu_ffn": [True],
            "qkv_bias": [False],
            "layerscale_value": [1e-5],
            "use_mask_token": [False],
        },
    ),
    "vit_mae": Case("images", ("ViTMAEModel",), {**VIT, "mask_ratio": 0.0}, ODD_VIT),
    "resnet": Case(
        "images",
        heads("ResNet", "ForImageClassification", "Model"),
        {"embedding_size": 8, "hidden_sizes": [16, 24], "depths": [2, 1], "layer_type": "basic"},
        {
            **ODD_IMAGES,
            "embedding_size": [4, 12],
            "hidden_sizes": [[16, 32], [8, 8]],
            "depths": [[1, 1], [1, 3]],
            "layer_type": ["bottleneck", "basic"],
            "downsample_in_first_stage": [True],
            "downsample_in_bottleneck": [True],
        },
    ),
    "swin": Case("images", heads("Swin", "ForImageClassification", "Model"), SWIN, ODD_SWIN),
    "swinv2": Case(
        "images",
        heads("Swinv2", "ForImageClassification", "Model"),
        SWIN,
        {**ODD_SWIN, "pretrained_window_sizes": [[4, 4], [5, 3]]},
    ),
    "clip": Case(
        "both",
        ("CLIPModel",),
        {
            "projection_dim": 10,
            **{f"text_config.{key}": value for key, value in CLIP.items()},
            **{f"vision_config.{key}": value for key, value in CLIP.items()},
            "text_config.max_position_embeddings": 24,
            "vision_config.image_size": 16,
            "vision_config.patch_size": 8,
        },
        {
            "projection_dim": [7, 16],
            "logit_scale_init_value": [1.0],
            **{f"text_config.{key}": value for key, value in ODD_CLIP.items()},
            **{f"vision_config.{key}": value for key, value in ODD_CLIP.items()},
            "text_config.eos_token_id": [9, 2],
            "text_config.max_position_embeddings": [12, 77],
            "vision_config.image_size": [24, 21],
            "vision_config.patch_size": [4, 5],
            "vision_config.num_channels": [1],
        },
    ),
}

# ---- ways to generate, as generation_config.json has them

GENERATION: dict[str, list] = {
    "length_penalty": [0.0, 0.6, 2.0, -0.5],
    "early_stopping": [True, False, "never"],
    "min_length": [3, 8],
    "min_new_tokens": [2, 6],
    "no_repeat_ngram_size": [1, 2, 3],
    "repetition_penalty": [1.3, 0.8, 2.0],
    "bad_words_ids": [[[7]], [[6], [8, 9]], [[5, 6, 7], [10]]],
    "suppress_tokens": [[5, 6, 3], [12]],
    "begin_suppress_tokens": [[7, 8, 2]],
    "forced_bos_token_id": [9],
    "forced_eos_token_id": [2],
    "renormalize_logits": [True],
    "exponential_decay_length_penalty": [[3, 1.4]],
    "sequence_bias": [[[[7], 3.0], [[8, 9], -4.0]]],
    "eos_token_id": [[2, 11], [2, 8, 14]],
    "encoder_no_repeat_ngram_size": [2],
    "encoder_repetition_penalty": [1.4],
    "remove_invalid_values": [True],
    "diversity_penalty": [0.5],
    "num_beam_groups": [2],
    "penalty_alpha": [0.6],
    "typical_p": [0.9],
    "top_k": [5],
    "temperature": [0.7],
    "guidance_scale": [1.5],
    "num_beams": [2, 4],
    "max_length": [17, 24],
    "max_new_tokens": [6],
}
# oddities of the words beside a model: no post-processor, and rows for which there is no piece
WORDS: list[tuple[bool, int]] = [(True, 0), (True, 0), (False, 0), (True, 3), (False, 2)]
OWN = 0  # beams of a text that is written as the folder says


# ---- making a checkpoint


def draw(odd: dict[str, list], most: int, rng: random.Random) -> Settings:
    """Draw up to so many odd settings, so few that not all configurations are refused."""
    settings: Settings = {}
    for key in rng.sample(sorted(odd), min(len(odd), rng.randint(1, most))):
        value = rng.choice(odd[key])
        together = isinstance(value, dict) and key != "rope_parameters"
        settings |= value if together else {key: value}
    return settings


def nested(settings: Settings) -> Settings:
    """Put what stands behind a dot into a config within another."""
    made: Settings = {}
    for key, value in settings.items():
        outer, _, inner = key.rpartition(".")
        (made.setdefault(outer, {}) if outer else made)[inner] = value
    return made


def tokenizer() -> Any:
    """Return a small byte-level tokenizer with the special tokens of all formats."""
    ids = {piece: number for number, piece in enumerate(PIECES)}
    pairs = [tuple(merge.split(" ")) for merge in MERGES]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ids, pairs, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    names = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}
    names |= {"cls": "<s>", "sep": "</s>"}
    return made, {f"{role}_token": name for role, name in names.items()}


def write_tokenizer(folder: Path, kind: str, framed: bool = True) -> None:
    """Write the tokenizer, with what stands around a text in a format of some kind or not."""
    made, names = tokenizer()
    around = {
        "both": "<s> $A </s>",
        "encoder": "<s> $A </s>",
        "text": "$A </s>",
        "language": "<s> $A",
    }[kind]
    pair = around.replace("$A", "$A </s> $B" if kind != "language" else "$A $B")
    if framed:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single=around, pair=pair, special_tokens=[("<s>", 0), ("</s>", 2)]
        )
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)
    words.save_pretrained(folder)


def enlarge(model: Any, scale: float, seed: int) -> None:
    """Give a model weights so large that attention is sharp and logits spread."""
    rand = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or "embed_positions" in name and parameter.ndim > 1:
            continue  # sinusoids are no weights
        noise = torch.randn(parameter.shape, generator=rand)
        if parameter.ndim > 1:
            parameter.data = noise * scale / max(1, parameter[0].numel()) ** 0.5
        else:
            parameter.data = parameter.data + 0.3 * noise
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=rand))
        elif name.endswith("running_var"):
            buffer.copy_(0.5 + torch.rand(buffer.shape, generator=rand))
        elif name == "final_logits_bias":
            buffer.copy_(torch.randn(buffer.shape, generator=rand))


def make(model_type: str, number: int, folder: Path) -> tuple[str, Settings, Settings]:
    """Write configuration `number` of a format; return its class, oddities and way to write."""
    case, rng = CASES[model_type], random.Random(f"{model_type} {number}")
    name = case.classes[number % len(case.classes)]
    odd = draw(case.odd, 3, rng)
    generation = draw(GENERATION, 3, rng) if number % 4 else {}
    words = rng.choice(WORDS)
    write(model_type, name, odd, generation, folder, number, words)
    generation |= {"framed": words[0], "spare": words[1]} if words != WORDS[0] else {}
    return name, odd, generation


def write(
    model_type: str,
    name: str,
    odd: Settings,
    generation: Settings,
    folder: Path,
    seed: int = 1,
    words: tuple[bool, int] = WORDS[0],
) -> None:
    """Write a random model of a class, with odd settings and ways to generate, as a folder."""
    case, cls = CASES[model_type], getattr(transformers, name)
    settings = case.sizes | odd
    around = "text_config." if case.kind == "both" else ""
    if case.kind != "images":
        sizes = {"vocab_size": len(PIECES) + words[1], **TOKENS}
        settings = {f"{around}{key}": value for key, value in sizes.items()} | settings
    torch.manual_seed(seed)
    model = cls(cls.config_class(**nested(settings))).eval()
    case.change(model, random.Random(seed))
    enlarge(model, case.scale, seed)
    model.save_pretrained(folder)
    if case.kind == "images":
        return
    write_tokenizer(folder, case.kind, words[0])
    if case.kind in ("language", "text"):
        path = folder / "generation_config.json"
        told = json.loads(path.read_text()) if path.is_file() else {}
        if case.kind == "text":
            told["decoder_start_token_id"] = settings["decoder_start_token_id"]
        path.write_text(json.dumps({**told, **TOKENS, **generation}))


# ---- what both sides say


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep what transformers has to say about odd settings to itself."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def batch(case: Case, config: Any) -> Settings:
    """Return a batch with padding, or images."""
    rand = torch.Generator().manual_seed(1)
    pictures = getattr(config, "vision_config", config)
    seen: Settings = {}
    if case.kind in ("images", "both"):
        side = getattr(pictures, "image_size", 32)
        side = side if isinstance(side, int) else side[0]
        seen = {"pixels": torch.randn(2, pictures.num_channels, side, side, generator=rand)}
    if case.kind == "images":
        return seen
    lengths = torch.tensor(LENGTHS)
    keep = torch.arange(max(LENGTHS)) < lengths.unsqueeze(1)
    ids, target = torch.randint(5, len(PIECES), (2, *keep.shape), generator=rand)
    kinds = max(1, getattr(config, "type_vocab_size", 0) or 0)
    types = torch.randint(0, kinds, keep.shape, generator=rand)
    if case.kind == "both":
        ids[range(len(LENGTHS)), lengths - 1] = config.text_config.eos_token_id
    return seen | {
        "ids": ids.masked_fill(~keep, TOKENS["pad_token_id"]),
        "keep": keep,
        "lengths": lengths,
        "target": target,
        "types": types,
    }


@torch.no_grad()
def their_logits(case: Case, model: Any, given: Settings) -> Tensor:
    """Return what transformers says about a batch, at real places."""
    if case.kind == "images":
        more: Settings = {}
        if model.config.model_type == "vit_mae":  # in the order of the image
            size, patch = (
                side if isinstance(side, int) else side[0]
                for side in (model.config.image_size, model.config.patch_size)
            )
            more["noise"] = torch.arange((size // patch) ** 2).repeat(2, 1).float()
        out = model(given["pixels"], **more)
        if hasattr(out, "logits"):
            return out.logits
        last = out.last_hidden_state
        return last.flatten(2).mT if last.ndim == 4 else last
    mask = given["keep"].long()
    if case.kind == "both":
        return model(given["ids"], given["pixels"], attention_mask=mask).logits_per_image
    if case.kind == "text":
        out = model(given["ids"], attention_mask=mask, decoder_input_ids=given["target"])
        return out.logits if hasattr(out, "logits") else out.last_hidden_state
    typed = case.kind == "encoder" and hasattr(model.config, "type_vocab_size")
    types = {"token_type_ids": given["types"]} if typed else {}
    out = model(given["ids"], attention_mask=mask, **types)
    if getattr(out, "prediction_logits", None) is not None:
        return out.prediction_logits[given["keep"]]
    right = out.logits if hasattr(out, "logits") else out.last_hidden_state
    return right if right.ndim == 2 else right[given["keep"]]


@torch.no_grad()
def our_logits(case: Case, model: Any, given: Settings, base: bool) -> Iterator[Tensor]:
    """Return what Regard says, in each of the ways in which it computes it."""
    if case.kind == "images":
        yield model.features(given["pixels"]) if base else model(given["pixels"])
        return
    ids, lengths, keep = given["ids"], given["lengths"], given["keep"]
    if case.kind == "both":
        yield model(given["pixels"], ids, lengths)
        return
    if case.kind == "text":
        target = given["target"]
        if base:
            yield model.hidden(ids, target, lengths)
            return
        yield model(ids, target, lengths)
        state = model.start(ids, lengths)
        steps = [model.step(part, state)[0] for part in target.split([1, 1, 6, 4], dim=1)]
        yield torch.cat(steps, dim=1)
        return
    if case.kind == "encoder":
        types = given["types"] if model.config.types else None
        logits = model(ids, lengths, types=types)
        yield logits if logits.ndim == 2 else logits[keep]
        return
    yield model(ids, lengths)[keep]
    state = model.start(ids[:, :1])
    steps = [model.step(part, state)[0] for part in ids.split([1, 1, 6, 4], dim=1)]
    yield torch.cat(steps, dim=1)[keep]


def has_limit(model: Any) -> bool:
    """Tell whether generation_config.json bounds a text."""
    told = model.generation_config
    return told.max_length is not None or told.max_new_tokens is not None


@torch.no_grad()
def their_texts(case: Case, model: Any, words: Any, beam: int, limited: bool) -> list[str]:
    """Return what transformers writes, one text after the other."""
    written = []
    for text in TEXTS:
        given = words(text, return_tensors="pt", return_token_type_ids=False)
        how = {"num_beams": beam, "do_sample": False, "max_new_tokens": MOST}
        if beam == OWN:
            how = {} if limited else {"max_new_tokens": MOST}
        done = model.generate(**given, **how, use_cache=False)
        start = given["input_ids"].shape[1] if case.kind == "language" else 1
        written.append(words.decode(done[0, start:], skip_special_tokens=True))
    return written


def our_texts(case: Case, runner: Any, beam: int, limited: bool) -> list[str]:
    """Return what Regard writes, all texts in one batch."""
    how: Settings = {"beam": beam, "max_length": MOST}
    if beam == OWN:
        how = {} if limited else {"max_length": MOST}
    if case.kind == "language":
        how |= {} if beam == OWN else {"temperature": 0}
        return [answer.completion for answer in runner.run(TEXTS, **how, echo=False)]
    return [str(answer) for answer in runner.run(TEXTS, **how, split=False)]


# ---- comparing


@dataclass
class Outcome:
    """How one configuration went: what was refused and why, and what is wrong."""

    refused: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Return the worst that happened."""
        if self.wrong:
            return "wrong"
        return "refused" if "load" in self.refused else "equal"


def is_base(name: str) -> bool:
    """Tell whether a class has no head."""
    return name.endswith("Model") and not name.endswith("MTModel")


def differ(ours: Tensor, right: Tensor) -> str:
    """Say by how much logits differ, or nothing if they do not."""
    if ours.shape != right.shape:
        return f"shape {list(ours.shape)}, not {list(right.shape)}"
    largest = max(1.0, float(right.abs().max()))
    off = float((ours - right).abs().max())
    return "" if off <= BOUND * largest else f"off by {off:.3g} of {largest:.3g}"


def open_theirs(folder: Path, name: str) -> Any:
    """Open a folder with transformers."""
    model = getattr(transformers, name).from_pretrained(folder)
    model.config.mask_ratio = 0.0
    return model.eval()


def same_as(
    outcome: Outcome, stage: str, case: Case, folder: Path, right: Tensor, asked: Settings
) -> Any:
    """Compare what Regard makes of a folder with what is right; return it, or None if refused."""
    base = is_base(asked["class"]) and case.kind not in ("encoder", "both")
    try:
        runner = regard.load(folder)
    except regard.UsageError as mistake:
        outcome.refused["load" if stage == "logits" else stage] = str(mistake)
        return None
    for logits in our_logits(case, runner.model, asked["given"], base):
        if off := differ(logits, right):
            outcome.wrong[stage] = off
    for beam, texts in asked["texts"].items():
        try:
            ours = our_texts(case, runner, beam, asked["limited"])
        except regard.UsageError as mistake:
            outcome.refused[f"{stage} beam={beam}"] = str(mistake)
            continue
        if ours != texts:
            pairs = [pair for pair in zip(ours, texts, strict=True) if pair[0] != pair[1]]
            outcome.wrong[f"{stage} texts, beam={beam}"] = f"{pairs[0][0]!r}, not {pairs[0][1]!r}"
    return runner


def judge(outcome: Outcome, model_type: str, folder: Path, name: str) -> None:
    """Compare Regard and transformers on a folder, and on what Regard exports of it."""
    case = CASES[model_type]
    theirs = open_theirs(folder, name)
    given = batch(case, theirs.config)
    right = their_logits(case, theirs, given)
    words = None if case.kind == "images" else transformers.AutoTokenizer.from_pretrained(folder)
    writes = case.kind in ("language", "text") and not is_base(name)
    texts: dict[int, list[str]] = {}
    for beam in (OWN, 1, 3) if writes else ():
        # what transformers itself refuses has no right answer
        with contextlib.suppress(ValueError, NotImplementedError, TypeError, IndexError):
            texts[beam] = their_texts(case, theirs, words, beam, has_limit(theirs))
    asked: Settings = {"given": given, "texts": texts, "class": name}
    asked["limited"] = writes and has_limit(theirs)
    if same_as(outcome, "logits", case, folder, right, asked) is None:
        return
    out = folder.with_name(f"{folder.name}-exported")
    try:
        regard.export(str(folder), format="huggingface", out=str(out))
    except regard.UsageError as mistake:
        outcome.refused["export"] = str(mistake)
        return
    named = json.loads((out / "config.json").read_text())["architectures"][0]
    again = open_theirs(out, named)
    back = their_logits(case, again, given)
    if named == name and (off := differ(back, right)):
        outcome.wrong["export"] = off
    for beam, before in texts.items():
        reader = transformers.AutoTokenizer.from_pretrained(out)
        after = their_texts(case, again, reader, beam, asked["limited"])
        if after != before:
            pair = next(p for p in zip(after, before, strict=True) if p[0] != p[1])
            outcome.wrong[f"export texts, beam={beam}"] = f"{pair[0]!r}, not {pair[1]!r}"
    same_as(outcome, "again", case, out, back, asked | {"class": named})


def sweep(model_type: str, count: int, show: bool = False) -> Counter:
    """Judge so many configurations of a format and count how they went."""
    case, counted, number, failed = CASES[model_type], Counter(), 0, 0
    while sum(counted[key] for key in VERDICTS) < count:
        with tempfile.TemporaryDirectory() as home, quiet_transformers():
            folder, number = Path(home) / "theirs", number + 1
            try:
                name, odd, generation = make(model_type, number, folder)
                right = their_logits(
                    case,
                    model := open_theirs(folder, name),
                    batch(case, model.config),
                )
            except Exception:  # transformers itself cannot make, write or run it
                failed += 1
                shutil.rmtree(folder, ignore_errors=True)
                if failed > 20 * count:
                    raise
                continue
            if not bool(right.isfinite().all()):
                continue
            outcome = Outcome()
            try:
                judge(outcome, model_type, folder, name)
            except Exception as error:  # a traceback is no answer
                outcome.wrong["error"] = f"{type(error).__name__}: {error}"
        counted[outcome.verdict] += 1
        counted["exports refused"] += "export" in outcome.refused
        for kind, stages in (("wrong", outcome.wrong), ("refused", outcome.refused)):
            for stage, reason in stages.items():
                if show or kind == "wrong":
                    reason = reason.replace(home, "")[:200]
                    print(f"{kind} {model_type} {number} {name}, {stage}: {reason}")
                    print(f"    {odd} {generation}")
    return counted


def main() -> None:
    """Sweep all formats and print how many configurations were equal, refused and wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few configurations of each")
    parser.add_argument("--only", default="", help="formats, with commas between them")
    parser.add_argument("--count", type=int, default=60, help="configurations of each format")
    parser.add_argument("--show", action="store_true", help="print what is refused, too")
    options = parser.parse_args()
    count = 2 if options.quick else options.count
    torch.set_num_threads(1)
    total: Counter = Counter()
    chosen = options.only.split(",") if options.only else list(CASES)
    for model_type in chosen:
        start = time.perf_counter()
        counted = sweep(model_type, count, options.show)
        total += counted
        counts = ", ".join(f"{counted[key]} {key}" for key in (*VERDICTS, "exports refused"))
        print(f"{model_type:12} {counts}  ({time.perf_counter() - start:.0f} s)", flush=True)
    everything = sum(total[key] for key in VERDICTS)
    print(f"configurations parity {everything}")
    for key in VERDICTS:
        print(f"ratio parity_{key} {total[key] / everything:.4f}")
    sys.exit(1 if total["wrong"] else 0)


if __name__ == "__main__":
    main()
