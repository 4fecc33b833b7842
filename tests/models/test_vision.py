"""The questions that every family that looks at images answers."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from beartype import beartype
from jaxtyping import jaxtyped
from torch import Tensor

import regard.attention.multihead as multihead
import regard.layers.heads as heads
import regard.models.local as local
import regard.models.mvit as mvit
from regard.attention.watch import watch
from regard.errors import UsageError
from regard.layers.block import BlockConfig
from regard.models import MODELS, family, preset
from regard.models.resnet import ResNetConfig
from regard.models.swin import SwinConfig
from regard.models.vit import ViTConfig
from tests.models import laws
from tests.models.laws import close

BLOCK = BlockConfig(16, 2, 24, feed_forward="gelu", dropout=0.0)
VIT = ViTConfig(labels=5, image=12, patch=4, depth=2, block=BLOCK)
RESNET = ResNetConfig(
    labels=5, image=12, stem="small", stem_width=8, widths=(8, 16), depths=(1, 2), head_width=8
)
SWIN = SwinConfig(labels=5, image=12, patch=2, depths=(2, 1), window=3, block=BLOCK)
MVIT = mvit.MViTConfig(
    labels=5,
    image=12,
    patch=3,
    stride=2,
    depths=(1, 1),
    key_stride=2,
    block=replace(BLOCK, heads=1),
)
LOCAL = local.LocalConfig(
    labels=5,
    image=12,
    stem="small",
    stem_width=8,
    inner_widths=(8, 16),
    widths=(16, 32),
    depths=(1, 1),
    window=3,
    channels_per_head=4,
)

# family -> small models of all its kinds
FAMILIES = {
    "vit": {
        "vit": VIT,
        "deit": replace(VIT, tokens=2, pool="both"),
        "cct": replace(VIT, stem="convolution", tokens=0, pool="attention", channels=1),
        "pixel, rotary": replace(VIT, patch=1, position="rotary", image=5),
        "sinusoidal, mean": replace(VIT, tokens=0, pool="mean", position="sinusoidal"),
        "nowhere": replace(VIT, pool="mean", position="none", drop_path=0.5),
        "no head": replace(VIT, labels=0, block=replace(BLOCK, order="post")),
        "dinov2": replace(VIT, pool="first_mean", block=replace(BLOCK, order="scaled")),
        "grouped": replace(VIT, block=replace(BLOCK, kv_heads=1, norm="rms", bias=False)),
    },
    "resnet": {
        "basic": RESNET,
        "bottleneck": replace(RESNET, kind="bottleneck", stem="large", drop_path=0.5),
        "attention": replace(RESNET, attention=(1, 1)),
        "much attention": replace(RESNET, attention=(0, 3), position="sinusoidal", labels=0),
    },
    "swin": {
        "swin": SWIN,
        "swin v2": replace(
            SWIN,
            position="continuous",
            key_bias=False,
            merge="norm_last",
            drop_path=0.5,
            block=replace(BLOCK, order="res_post", score="cosine_learned"),
        ),
    },
    "mvit": {
        "mvit v2": MVIT,
        "mvit": replace(
            MVIT,
            pooled_queries="strided",
            residual="none",
            position="learned",
            widen="feed_forward",
            depths=(1, 2),  # of the last block only the first token is read
            tokens=1,
            pool="first",
        ),
    },
    "local": {"lrnet": LOCAL, "no head": replace(LOCAL, labels=0, drop_path=0.5)},
}
KINDS = [(name, kind) for name, kinds in FAMILIES.items() for kind in kinds]


@pytest.fixture(autouse=True)
def shapes_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the shapes in signatures while testing."""
    for name in FAMILIES:
        cls = family(name)[1]
        for verb in ("forward", "features", "embed", "encode"):
            if verb in vars(cls):
                checked = jaxtyped(typechecker=beartype)(getattr(cls, verb))
                monkeypatch.setattr(cls, verb, checked)


@pytest.fixture(params=KINDS, ids=lambda pair: " ".join(pair))
def model(request) -> Any:
    """Return one small model in fp64, its weights enlarged so that differences would show."""
    name, kind = request.param
    torch.manual_seed(0)
    model = family(name)[1](FAMILIES[name][kind]).double().eval()
    for part in model.parameters():
        # what is a variance stays positive
        part.data = (part.data + 0.3 * torch.randn_like(part)).where(part != 1, part.data)
    return model


def images(model: Any, count: int = 3, size: tuple[int, int] | None = None) -> Tensor:
    """Return random images of the size that a model was made for, or another."""
    config = model.config
    height, width = size or (config.image, config.image)
    rand = torch.Generator().manual_seed(1)
    shape = (count, config.channels, height, width)
    return torch.randn(shape, generator=rand, dtype=next(model.parameters()).dtype)


def test_every_family_that_looks_is_asked():
    looking = {
        name
        for name in MODELS
        if {"image", "channels"} <= {f.name for f in fields(family(name)[0])}
    }
    assert set(FAMILIES) == looking


def test_neighbours_never_matter(model: Any):
    some = images(model)
    together = model(some)
    for i in range(len(some)):
        close(model(some[i : i + 1])[0], together[i])
    assert together.std() > 0.1 and (together[0] - together[1]).abs().max() > 0.01


def test_what_is_no_batch_of_such_images_is_refused(model: Any, monkeypatch):
    monkeypatch.undo()  # the shapes in signatures would refuse it first
    config, some = model.config, images(model)
    with pytest.raises(UsageError, match=f"{config.channels} channel"):
        model(torch.cat([some, some[:, :1]], 1))
    with pytest.raises(UsageError, match="expected"):
        model(some[0])


# the least and the most parameters of a size, for ten labels
SIZES = {"tiny": (2e5, 4e5), "small": (7.5e5, 1e6), "base": (2.5e6, 3.5e6), "big": (5e6, 1.2e7)}
SMALL = [
    ("vit", "vit"), ("vit", "deit"), ("vit", "cct"), ("vit", "pixel"),
    ("resnet", "resnet"), ("resnet", "resnet_attention"), ("swin", "swin"), ("swin", "swinv2"),
    ("mvit", "mvit"), ("mvit", "mvitv2"), ("local", "lrnet"),
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name, member", SMALL)
def test_a_size_is_about_as_large_in_every_family(name: str, member: str, size: str):
    with torch.device("meta"):
        model = family(name)[1](replace(preset(name, size, member), labels=10))
    least, most = SIZES[size]
    assert least < sum(p.numel() for p in model.parameters()) < most


@pytest.mark.parametrize("size", [(20, 12), (13, 27), (24, 24)])
def test_an_image_may_be_of_any_size(model: Any, size: tuple[int, int]):
    some = images(model, 2, size)
    features = model.features(some)
    height, width = model.grid(size)
    before = getattr(model.config, "tokens", 0)
    assert features.shape == (2, before + height * width, model.out_width)
    assert model(some).isfinite().all()
    close(model(some), model.head(model.pool(features)))


def test_every_pixel_of_the_grid_matters(model: Any):
    some = images(model, 8).requires_grad_()
    model(some).square().sum().backward()
    assert some.grad is not None and (some.grad.abs().sum((0, 1)) > 0).all()


def test_every_parameter_learns(model: Any):
    torch.manual_seed(2)
    model.train()
    for _ in range(4):  # since a block may be passed by
        logits = model(images(model, 8))
        (logits * torch.randn(logits.shape)).sum().backward()
    laws.has_learnt(model)


def test_a_model_builds_on_the_meta_device(model: Any):
    some = images(model, 2)
    laws.builds_on_meta(model, lambda each: each(*laws.like(each, some)))


def test_save_then_load_is_the_identity(model: Any, tmp_path: Path):
    some = images(model).float()
    with torch.no_grad():
        model.float().train()(some)  # so that averages of what was seen are there too
    laws.survives_its_folder(model, tmp_path, "images", lambda each: each(some))


def test_watching_changes_nothing_and_tells_the_truth(model: Any, monkeypatch):
    model = model.float()
    some = images(model, 2, (13, 22))
    plain = model(some)
    calls = []

    def attend(q, k, v, **settings) -> Tensor:
        out = real_attend(q, k, v, **settings)
        calls.append((v, out))
        return out

    real_attend = multihead.attend
    for part in (multihead, heads, local, mvit):
        monkeypatch.setattr(part, "attend", attend)
    with watch(model) as maps:
        watched = model(some)
    assert torch.equal(plain, watched)
    kinds = (multihead.MultiHead, heads.Attentive, local.LocalRelation, mvit.PooledAttention)
    found = {name for name, part in model.named_modules() if isinstance(part, kinds)}
    assert set(maps.names()) == found
    for name, (v, out) in zip(maps.names(), calls, strict=True):
        weights = maps[name].weights()
        v, out = (x.reshape(len(weights), -1, *x.shape[-2:]) for x in (v, out))
        values = v.repeat_interleave(weights.shape[1] // v.shape[1], dim=1)
        size = max(1.0, values.abs().max().item())
        torch.testing.assert_close(weights @ values, out, atol=2e-6 * size, rtol=0)


def test_chance_is_for_training_only_and_seeded(model: Any):
    some = images(model)
    laws.draws_in_training_only(model, lambda each: each(some), model.config.drop_path > 0)
