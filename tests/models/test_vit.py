"""Our ViT equals that of transformers, and its parts do what they say."""

import json
import math
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from regard.attention.positions import Rotary, Sinusoidal
from regard.attention.watch import watch
from regard.costs.model import build
from regard.costs.report import attending, forward, learned, looked
from regard.data.image_format import ImageFormat
from regard.errors import UsageError
from regard.layers.block import BlockConfig, EncoderBlock
from regard.layers.grid import GridPosition
from regard.layers.patches import Convolutions, EarlyConvolutions, Patches, grid_at
from regard.layers.residual import drop_path, drop_path_schedule
from regard.models import preset
from regard.models.folder import load_folder
from regard.models.vit import PRESETS, DistilledHeads, ViT, ViTConfig
from regard.pretrained.folder import export_weights, import_folder
from regard.pretrained.format import differing
from regard.pretrained.formats import find_format, fitting
from regard.pretrained.image_processor import read_processor, write_processor
from regard.settings import fill
from regard.tasks.vision.images import IMAGES

SIZE = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "image_size": 24,
    "patch_size": 8,
    "num_labels": 7,
    "attn_implementation": "eager",
}
DECODER = {
    "decoder_hidden_size": 16,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 16,
    "mask_ratio": 0.0,
}
DINO = {"intermediate_size": None, "mlp_ratio": 2, "use_mask_token": True}
# their class -> its config's model_type, and what that has beside the sizes
KINDS: dict[str, tuple[str, dict]] = {
    "ViTForImageClassification": ("vit", {}),
    "ViTModel": ("vit", {"hidden_act": "relu", "num_channels": 1, "layer_norm_eps": 1e-6}),
    "DeiTForImageClassification": ("deit", {"patch_size": 4, "image_size": [24, 24]}),
    "DeiTForImageClassificationWithTeacher": ("deit", {"num_attention_heads": 1}),
    "DeiTModel": ("deit", {"patch_size": 12}),
    "Dinov2ForImageClassification": ("dinov2", DINO),
    "Dinov2ForImageClassification, gated": (
        "dinov2",
        {**DINO, "use_swiglu_ffn": True, "qkv_bias": False, "image_size": 29},
    ),
    "Dinov2Model": ("dinov2", {**DINO, "mlp_ratio": 3, "hidden_act": "relu", "num_channels": 1}),
    "ViTMAEModel": ("vit_mae", DECODER),
    "ViTMAEForPreTraining": ("vit_mae", DECODER),
}


def foreign(name: str, **more) -> transformers.PreTrainedModel:
    """Return one of their models, its weights so large that differences would show."""
    model_type, changes = KINDS[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**SIZE, **changes, **more})
    model = getattr(transformers, name.partition(",")[0])(config)
    for parameter in model.parameters():
        parameter.data += 0.4 * torch.randn(parameter.shape)
    return model.eval()


def images(config, count: int = 3, size: tuple[int, int] | None = None) -> Tensor:
    """Return random images that one of their models can look at."""
    side = config.image_size
    size = size or ((side, side) if isinstance(side, int) else tuple(side))
    rand = torch.Generator().manual_seed(1)
    return torch.randn(count, config.num_channels, *size, generator=rand)


def said(theirs: transformers.PreTrainedModel, some: Tensor) -> Tensor:
    """Return their logits, or their last vectors."""
    more = {}
    if theirs.config.model_type == "vit_mae":  # in the order of the image, and nothing left out
        patches = (theirs.config.image_size // theirs.config.patch_size) ** 2
        more["noise"] = torch.arange(patches).repeat(len(some), 1).float()
    with torch.no_grad():
        if isinstance(theirs, transformers.ViTMAEForPreTraining):
            return theirs.vit(some, **more).last_hidden_state
        if theirs.config.model_type != "dinov2":  # which does so unasked
            more["interpolate_pos_encoding"] = True
        out = theirs(some, **more)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def compare(theirs: transformers.PreTrainedModel, ours: ViT, **size) -> None:
    some = images(theirs.config, **size)
    right = said(theirs, some)
    with torch.no_grad():
        found = ours(some) if ours.config.labels else ours.features(some)
    assert found.shape == right.shape
    largest = right.abs().max().item()
    assert 1 < right.std() < 10
    assert (found - right).abs().max() <= 2e-5 * max(1, largest)


@pytest.mark.parametrize("name", KINDS)
def test_outputs_equal_transformers_and_folders_go_both_ways(name: str, tmp_path: Path):
    theirs = foreign(name)
    theirs.save_pretrained(tmp_path / "theirs")
    ours, config, tokenizers = import_folder(tmp_path / "theirs")
    assert isinstance(ours, ViT) and tokenizers == (None, None)
    assert config["task"] == ("images" if "Classification" in name else "pretrain")
    compare(theirs, ours)
    # ours -> theirs, as transformers reads it
    export_weights(ours, config, tokenizers, tmp_path / "ours")
    auto = transformers.AutoModelForImageClassification if ours.config.labels else None
    if name.startswith("DeiT") and ours.config.pool == "both":
        auto = transformers.DeiTForImageClassificationWithTeacher
    reader: Any = auto or transformers.AutoModel
    again, notes = reader.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not notes["unexpected_keys"] and all("pooler" in key for key in notes["missing_keys"])
    again.config.mask_ratio = 0.0  # which is no part of the encoder
    compare(again.eval(), ours)
    # theirs -> ours -> theirs -> ours is the identity
    twice, same, _ = import_folder(tmp_path / "ours")
    assert not differing(twice.config, ours.config) and same["image"] == config["image"]
    for key, parameter in ours.named_parameters():
        assert torch.equal(parameter, twice.get_parameter(key)), key


@pytest.mark.parametrize("size", [(32, 32), (16, 40), (29, 24), (8, 8)])
@pytest.mark.parametrize(
    "name",
    [
        "ViTForImageClassification",
        "DeiTForImageClassificationWithTeacher",
        "Dinov2ForImageClassification, gated",
    ],
)
def test_images_of_other_sizes_equal_transformers(name: str, size: tuple[int, int], tmp_path: Path):
    theirs = foreign(name)
    theirs.save_pretrained(tmp_path)
    compare(theirs, import_folder(tmp_path)[0], size=size)  # type: ignore[arg-type]


def test_attention_equals_transformers(tmp_path: Path):
    theirs = foreign("ViTForImageClassification")
    theirs.save_pretrained(tmp_path)
    ours = import_folder(tmp_path)[0].double()
    some = images(theirs.config).double()
    with torch.no_grad(), watch(ours) as maps:
        ours(some)
        right = theirs.double()(some, output_attentions=True).attentions
    assert maps.names() == ["blocks.0.attention", "blocks.1.attention"]
    for name, weights in zip(maps.names(), right, strict=True):
        assert weights.max() > 0.5  # nothing near an even share
        # theirs takes the softmax in single precision
        torch.testing.assert_close(maps[name].weights(), weights, atol=1e-5, rtol=0)


PUBLISHED = {
    "ti16": (192, 3, 768, 12),
    "s16": (384, 6, 1536, 12),
    "b16": (768, 12, 3072, 12),
    "l16": (1024, 16, 4096, 24),
}


@pytest.mark.parametrize("row", [row for row in PRESETS if row[-2:] == "16"])
def test_published_sizes_have_as_many_parameters_as_transformers(row: str):
    kind, _, size = row.partition("_")
    width, heads, ffn_width, depth = PUBLISHED[size]
    sizes = {"hidden_size": width, "num_attention_heads": heads, "intermediate_size": ffn_width}
    name = {"vit": "ViTForImageClassification", "deit": "DeiTForImageClassificationWithTeacher"}
    config = transformers.AutoConfig.for_model(
        kind, num_hidden_layers=depth, num_labels=1000, **sizes
    )
    with torch.device("meta"):
        theirs, ours = getattr(transformers, name[kind])(config), ViT(PRESETS[row])
    counts = [sum(p.numel() for p in model.parameters()) for model in (theirs, ours)]
    assert counts[0] == counts[1]


# ---- parts


@pytest.mark.parametrize(
    "patch, stride, padding, size", [(4, 4, 0, (8, 12)), (4, 4, 0, (11, 9)), (7, 4, 3, (13, 9))]
)
def test_patches_are_a_convolution(patch: int, stride: int, padding: int, size: tuple[int, int]):
    torch.manual_seed(0)
    stem = Patches(3, 10, patch, stride=stride, padding=padding).double()
    some = torch.randn(2, 3, *size, dtype=torch.float64)
    weight = stem.project.weight.view(10, 3, patch, patch)
    right = F.conv2d(some, weight, stem.project.bias, stride, padding)
    assert stem.grid(size) == tuple(right.shape[2:])
    torch.testing.assert_close(stem(some), right.flatten(2).mT)
    whole = Patches(3, 10, patch, stride=stride, padding=padding, flatten=False).double()
    whole.load_state_dict(stem.state_dict())
    torch.testing.assert_close(whole(some), right.permute(0, 2, 3, 1))


@pytest.mark.parametrize("size", [(8, 8), (7, 5), (1, 1)])
@pytest.mark.parametrize("kind", [Convolutions, EarlyConvolutions])
def test_convolutions_count_their_tokens(kind: type, size: tuple[int, int]):
    stem = kind(3, 8, 4)
    assert stem(torch.randn(2, 3, *size)).shape == (2, math.prod(stem.grid(size)), 8)


def test_a_grid_is_counted_row_by_row():
    right = [[0, 0], [0, 0], [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert grid_at(2, 3, 2).tolist() == right
    assert grid_at(2, 3, 2) is grid_at(2, 3, 2)


def test_sinusoids_of_two_coordinates_equal_a_loop():
    at, width = grid_at(3, 4), 16
    found = Sinusoidal(width).embed(torch.zeros(1, 12, width, dtype=torch.float64), at)[0]
    for place, (row, column) in enumerate(at.tolist()):
        for half, where in enumerate((row, column)):
            for i in range(width // 4):
                angle = where / 10000 ** (2 * i / (width // 2))
                first = half * (width // 2) + 2 * i
                assert abs(found[place, first] - math.sin(angle)) < 1e-12
                assert abs(found[place, first + 1] - math.cos(angle)) < 1e-12


def test_rotation_by_two_coordinates_equals_a_loop_and_knows_only_distance():
    torch.manual_seed(0)
    width, at = 8, grid_at(3, 4)
    x = torch.randn(1, 1, 12, width, dtype=torch.float64)
    found = Rotary(head_width=width).rotate(x, at)
    half = width // 2
    for place, (row, column) in enumerate(at.tolist()):
        for pair in range(half):  # (i, i + d/2); the first half of the pairs turn by rows
            where, i = (row, pair) if pair < half // 2 else (column, pair - half // 2)
            angle = where * 10000 ** (-2 * i / half)
            a, b = x[0, 0, place, pair].item(), x[0, 0, place, pair + half].item()
            right = complex(a, b) * complex(math.cos(angle), math.sin(angle))
            assert abs(found[0, 0, place, pair] - right.real) < 1e-12
            assert abs(found[0, 0, place, pair + half] - right.imag) < 1e-12
    one, other = torch.randn(2, width, dtype=torch.float64)
    where = torch.tensor([[0, 0], [1, 2], [5, 1], [6, 3]])
    turned = Rotary(head_width=width).rotate(
        torch.stack([one, other, one, other])[None, None], where
    )
    first, second, third, fourth = turned[0, 0]
    torch.testing.assert_close(first @ second, third @ fourth)


def test_learned_places_are_stretched_only_where_the_grid_differs():
    torch.manual_seed(0)
    places = GridPosition(6, (3, 3), 1)
    assert places.over((3, 3)) is places.table.weight
    assert torch.equal(
        places.embed(torch.zeros(1, 10, 6), grid_at(3, 3, 1))[0], places.table.weight
    )
    # as many places, but in another shape
    assert places.over((9, 1)).shape == (10, 6)
    assert not torch.allclose(places.over((9, 1)), places.table.weight)
    with torch.no_grad():
        places.table.weight.fill_(2.0)
    torch.testing.assert_close(places.over((5, 7)), torch.full((36, 6), 2.0))


def test_stochastic_depth_leaves_out_whole_examples_and_keeps_the_mean():
    torch.manual_seed(0)
    x = torch.ones(4000, 2, 3)
    found = drop_path(x, 0.25)
    each = found.flatten(1)
    assert (each == each[:, :1]).all() and each.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert abs(found.mean() - 1) < 0.03
    assert drop_path(x, 0.25, training=False) is x and drop_path(x, 0.0) is x
    assert drop_path_schedule(0.3, 4) == pytest.approx([0.0, 0.1, 0.2, 0.3]) and drop_path_schedule(
        0.3, 1
    ) == [0.0]


def test_a_block_that_is_passed_by_changes_nothing():
    torch.manual_seed(0)
    config = BlockConfig(8, 2, 16, dropout=0.0)
    block = EncoderBlock(config, path=0.9).train()
    x = torch.randn(64, 3, 8)
    out = block(x, at=grid_at(1, 3))
    same = (out == x).flatten(1).all(1)
    assert 30 < same.sum() < 64  # most by both sublayers
    torch.manual_seed(0)
    assert torch.equal(
        EncoderBlock(config).eval()(x, at=grid_at(1, 3)), block.eval()(x, at=grid_at(1, 3))
    )


def test_some_tokens_can_be_left_out_between_embedding_and_encoding():
    torch.manual_seed(0)
    config = replace(preset("vit", "tiny"), image=8, labels=3, depth=2, position="rotary")
    model = ViT(config).double().eval()
    some = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    tokens, at = model.embed(some)
    assert tokens.shape == (2, 5, 96) and at.shape == (5, 2)
    kept = torch.tensor([[0, 4, 2], [0, 1, 3]])
    rows = torch.arange(2).unsqueeze(1)
    part = model.encode(tokens[rows, kept], at[kept])
    for i in range(2):
        alone = model.encode(tokens[i : i + 1, kept[i]], at[kept[i]])
        torch.testing.assert_close(part[i : i + 1], alone)


def test_a_distilled_model_has_two_heads_and_answers_with_their_mean():
    torch.manual_seed(0)
    model = ViT(replace(preset("vit", "tiny", "deit"), labels=5, image=8)).eval()
    some = torch.randn(3, 3, 8, 8)
    assert isinstance(model.head, DistilledHeads)
    one, other = model.head.each(model.pool(model.features(some)))
    assert not torch.equal(one, other)
    torch.testing.assert_close(model(some), (one + other) / 2)


# ---- folders and their facts

PREPARED = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "image_mean": [0.5, 0.25, 0.5],
    "image_std": [0.5, 0.5, 0.25],
    "resample": 2,
    "size": {"height": 24, "width": 24},
}


@pytest.mark.parametrize(
    "changes, facts",
    [
        ({}, {"size": 24, "fit": "stretch", "resample": "bilinear"}),
        ({"size": 24, "resample": 3}, {"size": 24, "fit": "stretch", "resample": "bicubic"}),
        ({"size": {"shortest_edge": 20}}, {"size": 20, "fit": "crop"}),
        (
            {"do_center_crop": True, "crop_size": {"height": 16, "width": 16}},
            {"size": 16, "fit": "stretch", "edge": 24},
        ),
        (
            {
                "do_center_crop": True,
                "size": {"shortest_edge": 28},
                "crop_size": {"height": 24, "width": 24},
            },
            {"size": 24, "fit": "crop", "edge": 28},
        ),
        ({"do_normalize": False}, {"size": 24}),
    ],
)
def test_how_images_are_prepared_is_read_and_written(changes: dict, facts: dict, tmp_path: Path):
    told = {**PREPARED, **changes}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(told))
    found = read_processor(tmp_path, 24, 3)
    assert facts.items() <= found.items() and found["channels"] == 3
    assert ("mean" in found) == told["do_normalize"]
    if "mean" in found:
        assert (found["mean"], found["std"]) == (PREPARED["image_mean"], PREPARED["image_std"])
    write_processor(tmp_path, found)
    again = read_processor(tmp_path, 24, 3)
    assert {"edge": found["size"], **found} == {"edge": found["size"], **again}
    # theirs does what we have written
    reader = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    rand = np.random.default_rng(0)
    for size in ((found["size"],) * 2, (37, 50), (61, 30)):
        picture = Image.fromarray(rand.integers(0, 256, (*size, 3), dtype=np.uint8))
        theirs = reader(picture, return_tensors="np")["pixel_values"][0]
        format = fill(ImageFormat, again).check()
        right = format.normalise(torch.from_numpy(format.read(picture))[None])[0].numpy()
        assert theirs.shape == right.shape and np.abs(theirs - right).max() < 1e-5


@pytest.mark.parametrize(
    "key, value",
    [
        ("size", {"height": 24, "width": 32}),
        ("size", 10**9),
        ("size", "large"),
        ("image_mean", [0.5]),
        ("image_std", [0.5, 0.0, 0.5]),
        ("rescale_factor", 1.0),
    ],
)
def test_images_that_cannot_be_prepared_are_refused_by_name(key: str, value, tmp_path: Path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**PREPARED, key: value}))
    with pytest.raises(UsageError, match=key):
        read_processor(tmp_path, 24, 3)


def test_a_checkpoint_is_imported_and_exported_by_command(tmp_path: Path):
    theirs = foreign("ViTForImageClassification")
    theirs.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "preprocessor_config.json").write_text(json.dumps(PREPARED))
    regard.import_model(tmp_path / "theirs", out=str(tmp_path / "ours"))
    ours, config = load_folder(tmp_path / "ours")
    assert config["image"]["mean"] == PREPARED["image_mean"] and len(config["labels"]) == 7
    compare(theirs, ours)  # type: ignore[arg-type]
    assert not list((tmp_path / "ours").glob("*tokenizer*"))
    regard.export(str(tmp_path / "ours"), format="huggingface", out=str(tmp_path / "again"))
    auto = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "again")
    compare(auto.eval(), ours)  # type: ignore[arg-type]
    assert (tmp_path / "again" / "preprocessor_config.json").is_file()


@pytest.mark.parametrize(
    "key, value",
    [
        ("qkv_bias", False),
        ("hidden_act", "swiglu"),
        ("image_size", [24, 32]),
        ("image_size", 2**40),
        ("patch_size", "small"),
        ("hidden_size", 50),
        ("num_channels", 0),
        ("num_hidden_layers", 10**9),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(key: str, value):
    format = find_format("vit")
    with pytest.raises(UsageError) as told, torch.device("meta"):
        ViT(format.read_config({**SIZE, key: value}, "ViTForImageClassification"))
    word = {"hidden_size": "width"}.get(key, key)
    assert word in str(told.value) and len(str(told.value)) < 200


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"pool": "mean"}, "pool"),
        ({"position": "rotary"}, "position"),
        ({"stem": "convolution"}, "stem"),
        ({"tokens": 0, "pool": "mean"}, "tokens"),
        ({"block": replace(ViTConfig().block, feed_forward="geglu")}, "feed_forward"),
    ],
)
def test_what_no_format_holds_is_refused_by_name(changes: dict, word: str):
    with pytest.raises(UsageError, match=word):
        fitting("vit", replace(ViTConfig(), **changes), "images")


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"tokens": 0}, "pool=first"),
        ({"pool": "both"}, "tokens=1"),
        ({"pool": "middle"}, "pool"),
        ({"stem": "convolutoin"}, "Did you mean 'convolution'"),
        ({"position": "alibi"}, "position"),
        ({"patch": 64}, "patch=64"),
        ({"patch": 6, "stem": "convolution"}, "patch=6"),
        ({"patch": 3, "stem": "early"}, "patch=3"),
        ({"position": "rotary", "block": BlockConfig(12, 2, 8)}, "head_width"),
        ({"position": "sinusoidal", "block": BlockConfig(18, 3, 8)}, "width"),
    ],
)
def test_a_config_that_cannot_be_is_refused(changes: dict, word: str):
    with pytest.raises(UsageError, match=word), torch.device("meta"):
        ViT(replace(preset("vit", "tiny"), **changes))


def test_an_image_without_a_patch_is_refused():
    with torch.device("meta"), pytest.raises(UsageError, match="2x40"):
        ViT(preset("vit", "tiny"))(torch.empty(1, 3, 2, 40))


def test_a_module_of_any_size_name_is_found():
    assert (
        preset("vit", "vit_b16") == PRESETS["vit_b16"]
        and preset("vit", "tiny", "cct").stem == "convolution"
    )
    with pytest.raises(UsageError, match="tiny"):
        preset("vit", "tinny")
    assert isinstance(ViT(replace(preset("vit", "tiny"), labels=0)).head, nn.Identity)


@pytest.mark.parametrize("recipe, image, channels", [("fashion", 28, 1), ("cifar10", 32, 3)])
def test_the_recipes_for_small_images_train_attention_models(
    recipe: str, image: int, channels: int
):
    told = import_module(f"regard.recipes.{recipe}").SETTINGS
    config = IMAGES.resolve({**told, "data": "nowhere", "out": "nowhere"}).model
    config = replace(config, labels=10, image=image, channels=channels)
    model, images = build("vit", config), torch.empty(1, channels, image, image, device="meta")
    counted = forward(model, (images,))
    looking = attending(counted, looked(model, (images,))[1])
    assert learned(model) < 1_000_000
    assert looking > (counted.multiply_adds - counted.modules["stem"]) / 2
    assert looking > counted.multiply_adds / 2  # even if what makes tokens counts as well


def test_the_vector_of_a_photo_equals_dinov2s(tmp_path: Path):
    theirs = foreign("Dinov2Model", num_channels=3)
    theirs.save_pretrained(tmp_path / "theirs")
    sizes = {"size": {"shortest_edge": 28}, "crop_size": {"height": 24, "width": 24}}
    told = {**PREPARED, **sizes, "do_center_crop": True, "resample": 3}
    told["image_processor_type"] = "BitImageProcessor"
    (tmp_path / "theirs" / "preprocessor_config.json").write_text(json.dumps(told))
    pixels = np.random.default_rng(0).integers(0, 256, (61, 40, 3), dtype=np.uint8)
    reader = transformers.AutoImageProcessor.from_pretrained(tmp_path / "theirs", backend="pil")
    with torch.no_grad():
        seen = reader(Image.fromarray(pixels), return_tensors="pt")["pixel_values"]
        right = theirs(seen).pooler_output[0].numpy()
    regard.import_model(tmp_path / "theirs", out=tmp_path / "ours")
    regard.export(tmp_path / "ours", format="huggingface", out=tmp_path / "again")
    for name in ("theirs", "ours", "again"):
        (found,) = regard.load(tmp_path / name).run([pixels])
        assert np.abs(found.vector - right).max() < 2e-5 * max(1, np.abs(right).max())
