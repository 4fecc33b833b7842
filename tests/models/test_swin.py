"""Windows are full attention with a mask, and our Swin equals that of transformers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from regard.attention.masks import Window
from regard.attention.multihead import MultiHead
from regard.attention.positions import Position
from regard.attention.scores import LearnedCosine
from regard.attention.watch import watch
from regard.errors import UsageError
from regard.layers.block import BlockConfig
from regard.layers.patches import grid_at
from regard.layers.windows import WINDOW_POSITIONS, OffsetNetwork, Offsets, WindowAttention
from regard.models import preset
from regard.models.swin import PRESETS, Swin, SwinConfig, side
from regard.pretrained.folder import import_folder
from regard.pretrained.format import differing
from regard.pretrained.formats import find_format, fitting

# a window fits the grid, leaves some of it over, or is larger; and what shift and fit
GRIDS = [(6, 6), (9, 6), (7, 5), (4, 11), (3, 7), (2, 5), (1, 1)]
CUTS = [(0, "shrink"), (1, "shrink"), (2, "shrink"), (0, "keep"), (1, "keep")]


def close(ours: Tensor, right: Tensor, within: float = 1e-10) -> None:
    torch.testing.assert_close(ours, right, atol=within, rtol=0)


def windows(shift: int, fit: str, position: str = "table", score: str = "dot") -> WindowAttention:
    """Return attention in windows of three by three, its weights enlarged."""
    torch.manual_seed(0)
    made = WINDOW_POSITIONS[position](8, 2, 3, 0)
    part = WindowAttention(MultiHead(8, 2, position=made, score=score), 3, shift, fit).double()
    for parameter in part.parameters():
        nn.init.normal_(parameter)
    return part


def full_bias(offsets: Offsets, at: Tensor) -> Tensor:
    """Return the bias between all places of a grid (h, l, l), zero beyond the window."""
    numbers, reach = offsets.each(), offsets.window
    bias = torch.zeros(offsets.heads, len(at), len(at), dtype=numbers.dtype)
    for i, (y, x) in enumerate(at.tolist()):
        for j, (v, u) in enumerate(at.tolist()):
            down, right = y - v + reach - 1, x - u + reach - 1
            if 0 <= down < 2 * reach - 1 and 0 <= right < 2 * reach - 1:
                bias[:, i, j] = numbers[down * (2 * reach - 1) + right]
    return bias


# ---- windows


@pytest.mark.parametrize(("shift", "fit"), CUTS)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("score", ["dot", "cosine_learned"])
def test_windows_are_full_attention_with_a_mask(grid, shift, fit, score):
    part = windows(shift, fit, "table" if score == "dot" else "continuous", score)
    (height, width), (window, shift) = grid, part.fit(*grid)
    x = torch.randn(2, height, width, 8, dtype=torch.float64)
    ours = part(x)
    # the same by one attention over the padded grid, in which no window sees another
    down, right = -height % window, -width % window
    at = grid_at(height + down, width + right)
    assert isinstance(part.inside.position, Offsets)
    bias = full_bias(part.inside.position, at)
    part.inside.position = Position()
    tokens = F.pad(x, (0, 0, 0, right, 0, down)).flatten(1, 2)
    mask = Window(window, at - shift, at - shift)
    full = part.inside(tokens, at=at, mask=mask, bias=bias)
    close(ours, full.unflatten(1, (height + down, -1))[:, :height, :width])


@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 8), st.data())
def test_every_place_of_a_grid_is_in_one_window(height, width, window, data):
    shift = data.draw(st.integers(0, window - 1))
    part = WindowAttention(
        MultiHead(2, 1), window, shift, data.draw(st.sampled_from(["shrink", "keep"]))
    )
    place = part.place(height, width)
    side, shift = part.fit(height, width)
    assert place.shape == (-(-height // side) * -(-width // side), side**2)
    assert sorted(place[place >= 0].tolist()) == list(range(height * width))
    # neighbours in a window are neighbours on the grid unless the shift went round between them
    for tokens in place.unflatten(1, (side, side)):
        for one, other in zip(tokens[:, :-1].flatten(), tokens[:, 1:].flatten(), strict=True):
            assert -1 in (one, other) or other == one + 1 or other % width < shift


def test_a_watched_window_lies_where_its_place_says():
    part, grid = windows(1, "shrink"), (7, 5)
    x = torch.randn(2, *grid, 8, dtype=torch.float64)
    with watch(part) as maps:
        ours = part(x)
    assert torch.equal(ours, part(x))
    weights, place = maps["inside"].weights(), part.place(*grid)
    # what of a window is padding has values all the same, those of a zero
    tokens = F.pad(x.flatten(1, 2), (0, 0, 0, 1))
    values = part.inside.read(tokens).v[:, :, place]  # (b, h, windows, tokens, d)
    average = weights.unflatten(0, (2, -1)).transpose(1, 2) @ values
    out = torch.zeros(2, 36, 8, dtype=torch.float64)
    out[:, place.flatten()] = average.permute(0, 2, 3, 1, 4).flatten(3).flatten(1, 2)
    close(part.inside.out(out[:, :35]).view(2, *grid, 8), ours)


@pytest.mark.parametrize(("shift", "grid"), [(0, (6, 6)), (1, (4, 5)), (1, (7, 4))])
def test_gradients_find_their_way_back(shift: int, grid: tuple[int, int]):
    part = windows(shift, "keep")
    x = torch.randn(1, *grid, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(part, (x,), fast_mode=True)
    assert torch.autograd.gradgradcheck(part, (x,), fast_mode=True)


def test_a_shift_lies_within_its_window():
    with pytest.raises(UsageError, match="shift=3 is not within a window=3"):
        WindowAttention(MultiHead(2, 1), 3, 3)
    with pytest.raises(UsageError, match="unknown fit 'shrik'.*'shrink'"):
        WindowAttention(MultiHead(2, 1), 3, 0, "shrik")


# ---- the parts of V2


def test_offsets_are_spaced_by_logarithm_and_reach_beyond_training():
    """B = 16 sigmoid(net(sign(o) log2(1 + 8 |o| / (M - 1)) / log2 8)), an offset at a time."""
    torch.manual_seed(0)
    part = OffsetNetwork(2, 5, trained=3).double()
    for parameter in part.parameters():
        nn.init.normal_(parameter)
    w, each = part.state_dict(), part.each().view(9, 9, 2)
    for down, right in [(0, 0), (-4, 4), (1, -2), (3, 0)]:
        o = torch.tensor([down, right]).double()
        o = o.sign() * torch.log2(1 + 8 * o.abs() / 2) / 3
        hidden = (w["inner.weight"] @ o + w["inner.bias"]).clamp(min=0)
        close(each[down + 4, right + 4], 16 / (1 + torch.exp(-(w["outer.weight"] @ hidden))))
    # a larger window knows the offsets of a smaller one as that does
    small = OffsetNetwork(2, 3).double()
    small.load_state_dict(w)
    close(small.each().view(5, 5, 2), each[2:7, 2:7])


def test_a_learned_cosine_is_a_cosine_times_at_most_a_hundred():
    score = LearnedCosine(3)
    with torch.no_grad():
        score.factor.copy_(torch.tensor([0.0, 2.0, 50.0]).view(3, 1, 1))
    q, k = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 6, 5)
    right = F.cosine_similarity(q.unsqueeze(-2), k.unsqueeze(-3), dim=-1)
    right = right * torch.tensor([0.0, 2.0, 0.0]).exp().view(3, 1, 1)
    right[:, 2] *= 100
    close(score(q, k), right, 1e-4)
    close(score.of([2, 0])(q[:, [2, 0]], k[:, [2, 0]]), right[:, [2, 0]], 1e-4)


# ---- cost


def entries(image: int, config: SwinConfig) -> int:
    """Return how many attention weights there are for one image."""
    with torch.device("meta"):
        model = Swin(config).eval()
        with watch(model) as maps:
            model(torch.zeros(1, 3, image, image))
    return sum(torch.Size(maps[name].shape).numel() for name in maps)


def test_cost_grows_as_the_image_does():
    config = replace(PRESETS["swin_t"], depths=(2,))
    at_224 = entries(224, config)
    assert at_224 == 2 * 3 * 7**2 * 56**2  # layers, heads, M^2 H W
    assert entries(448, config) == 4 * at_224 and entries(896, config) == 16 * at_224
    full = replace(config, window=1000)
    assert entries(224, full) == 2 * 3 * 56**4 and entries(448, full) == 16 * entries(224, full)


# ---- against transformers

SIZE: dict[str, Any] = {"image_size": 32, "patch_size": 2, "embed_dim": 24, "depths": [2, 2, 2]}
SIZE |= {"num_heads": [2, 4, 8], "window_size": 4, "mlp_ratio": 1.5, "num_labels": 5}
# larger, padded, padded and as made for; theirs refuse smaller ones, and one that has seen a grid
# no larger than a window shifts nothing there ever after
SEEN = [(64, 64), (50, 34), (37, 29), (32, 32)]
# their class -> what differs from the sizes
KINDS: dict[str, dict[str, Any]] = {
    "SwinForImageClassification": {},
    "SwinModel": {"num_heads": [2, 2, 3], "hidden_act": "relu", "num_channels": 1},
    "SwinForMaskedImageModeling": {"encoder_stride": 8},
    "Swinv2ForImageClassification": {},
    "Swinv2Model": {"pretrained_window_sizes": [5, 4, 3], "image_size": [32, 32], "patch_size": 1},
}


def foreign(name: str, **more: Any) -> Any:
    """Return one of their models, its weights so large that differences would show."""
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**{**SIZE, **KINDS[name], **more})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            at_one = 0.5 if parameter.ndim == 1 else 0.0  # norms would make all else small
            parameter.copy_(torch.randn_like(parameter) * 0.3 + at_one)
    return model


@pytest.mark.parametrize("name", [name for name in KINDS if "Masked" not in name])
def test_logits_equal_theirs_at_any_size(name, tmp_path):
    theirs = foreign(name)
    theirs.save_pretrained(tmp_path)
    ours = import_folder(tmp_path)[0]
    assert isinstance(ours, Swin)
    for size in SEEN:
        x = torch.randn(2, theirs.config.num_channels, *size)
        with torch.no_grad():
            out = theirs(x)
            right = out.pooler_output if name.endswith("Model") else out.logits
            assert right.std() > 0.1
            close(ours(x), right, 5e-6)
            if name.endswith("Model"):
                close(ours.features(x), out.last_hidden_state, 5e-6)


@pytest.mark.parametrize("row", ["swin", "swinv2"])
def test_a_model_of_ours_is_one_of_theirs(row, tmp_path):
    config = replace(preset("swin", "tiny", row), labels=3, image=28)
    format, theirs = fitting("swin", config, "images")
    assert (format.model_type, theirs["window_size"]) == (row, 7)
    again = format.read_config(json.loads(json.dumps(theirs)), theirs["architectures"][0])
    assert not differing(format.canonical(config), again)
    with pytest.raises(UsageError, match="nearest is swin, but for position='rotary'"):
        fitting("swin", replace(preset("swin", "tiny"), position="rotary"), "images")


@pytest.mark.parametrize("name", [name for name in PRESETS if "_" in name])
def test_published_sizes_have_as_many_parameters(name: str):
    config = PRESETS[name]
    model_type = "Swinv2" if "v2" in name else "Swin"
    cls = getattr(transformers, f"{model_type}ForImageClassification")
    sizes = {"depths": config.depths, "embed_dim": config.block.width, "image_size": config.image}
    heads = [config.block.heads << n for n in range(4)]
    with torch.device("meta"):
        ours = Swin(config)
        theirs = cls(
            cls.config_class(window_size=config.window, num_heads=heads, num_labels=1000, **sizes)
        )
    counts = [sum(p.numel() for p in model.parameters()) for model in (ours, theirs)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv_bias": False}, "qkv_bias=False is not supported"),
        ({"use_absolute_embeddings": True}, "use_absolute_embeddings=True is not supported"),
        ({"mlp_ratio": "4"}, "mlp_ratio=4 is not supported"),
        ({"mlp_ratio": 1e9}, "mlp_ratio=1000000000.0 is not supported"),
        ({"mlp_ratio": 1.03}, "mlp_ratio=1.03 is not supported; only a whole number of 24ths"),
        ({"window_size": 0}, "window_size=0"),
        ({"window_size": 10**9}, "window_size=1000000000 is too large"),
        ({"image_size": [32, 28]}, "only squares"),
        ({"num_heads": []}, "num_heads is empty"),
        ({"num_heads": [2, 4]}, "heads are for 2 stages; expected 3"),
        ({"num_heads": [2, 4, 7]}, "heads=7 does not divide width=96"),
        ({"depths": []}, "depths names 0 stages"),
        ({"depths": [1] * 30}, "depths names 30 stages"),
        ({"depths": [10**9, 1, 1]}, "depths=1000000000 is too large"),
        ({"patch_size": 33}, "patch=33 is larger than image=32"),
        ({"hidden_act": "gelo"}, "hidden_act"),
    ],
)
def test_a_config_that_we_cannot_hold_is_refused(change, message):
    format = find_format("swin")
    theirs = {"model_type": "swin", **SIZE, **change}
    with pytest.raises(UsageError, match=message), torch.device("meta"):
        Swin(format.read_config(theirs, "SwinForImageClassification"))


# ---- sizes for small images


@pytest.mark.parametrize(
    ("row", "image", "window"),
    [("swin", 28, 7), ("swin", 32, 8), ("swin", 24, 6), ("swinv2", 32, 8)],
)
def test_small_images_need_no_padding(row: str, image: int, window: int):
    config = replace(preset("swin", "tiny", row), labels=10, image=image)
    assert side(config) == window
    with torch.device("meta"):
        model = Swin(config)
    counts = {}
    for name, part in model.named_modules():
        if isinstance(part, WindowAttention):
            grid = -(-image // (config.patch << int(name.split(".")[1])))
            place = part.place(grid, grid)
            assert (place >= 0).all(), name
            counts[name] = len(place)
    assert [*counts.values()][-1] == 1 and len(counts) == sum(config.depths)  # the last sees all


def test_shifted_windows_join_what_windows_part():
    """One block sees its window only; two see beyond it, since the second is shifted."""
    block = BlockConfig(8, 2, 8, feed_forward="gelu", dropout=0.0)
    torch.manual_seed(0)
    for depth, seen in [(1, 4), (2, 8)]:
        config = SwinConfig(0, 1, 12, 1, (depth,), block=block, window=4)
        model = Swin(config).double().eval()
        patches = torch.randn(1, 12, 12, 8, dtype=torch.float64, requires_grad=True)
        model.encode(patches)[0, 5 * 12 + 5, 0].backward()
        assert patches.grad is not None
        near = patches.grad[0].abs().sum(-1) > 0
        assert near.any(0).sum() == near.any(1).sum() == seen


def test_patches_then_encode_are_the_features():
    model = Swin(replace(preset("swin", "tiny"), labels=2)).eval()
    images = torch.randn(2, 3, 31, 27)
    patches = model.patches(images)
    assert patches.shape == (2, 16, 14, 32)
    assert torch.equal(model.encode(patches), model.features(images))
    assert model.grid((31, 27)) == (4, 4)
    # pixels that are missing to a whole patch are black ones
    assert torch.equal(patches, model.patches(F.pad(images, (0, 1, 0, 1))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": (4, 8, 16)}, "heads=4,... but block.heads=1"),
        ({"trained": (7,)}, "trained are for 1 stages; expected 3"),
        ({"position": "tabel"}, "unknown position 'tabel'.*'table'"),
        ({"merge": "first"}, "unknown merge"),
        ({"fit": "shrink"}, "unknown fit 'shrink'; choose from image, input"),
        ({"pool": "first"}, "unknown pool"),
    ],
)
def test_a_config_of_parts_that_do_not_fit_is_refused(change, message):
    with pytest.raises(UsageError, match=message):
        Swin(replace(preset("swin", "tiny"), **change))


def test_one_pixel_is_an_image_and_none_is_not():
    model = Swin(replace(preset("swin", "tiny"), labels=2))
    with pytest.raises(UsageError, match="expected"):
        model(torch.zeros(1, 3, 0, 28))
    assert model(torch.zeros(1, 3, 1, 1)).shape == (1, 2)


def test_a_folder_of_ours_keeps_its_tuples(tmp_path: Path):
    theirs = foreign("Swinv2Model")
    theirs.save_pretrained(tmp_path / "theirs")
    regard.import_model(tmp_path / "theirs", out=str(tmp_path / "ours"))
    model, config = regard.models.folder.load_folder(tmp_path / "ours")
    assert model.config.depths == (2, 2, 2) and model.config.trained == (5, 4, 3)
    assert config["task"] == "pretrain"
