"""Our ResNet equals that of transformers, and its running statistics behave."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from regard.attention.watch import watch
from regard.errors import UsageError
from regard.files.weights import buffers_of, float_state, state_of
from regard.models import preset
from regard.models.resnet import PRESETS, GridAttention, ResidualBlock, ResNet
from regard.pretrained.folder import export_weights, import_folder
from regard.pretrained.format import differing
from regard.pretrained.formats import find_format, fitting
from regard.training.optim import build_optimiser
from regard.training.step import train_mode

KINDS: dict[str, dict] = {
    "basic": {"layer_type": "basic", "hidden_sizes": [16, 24], "depths": [2, 1]},
    "bottleneck": {"hidden_sizes": [16, 32, 64], "depths": [1, 2, 1], "num_channels": 1},
}
MEAN = "stem.first.norm.running_mean"
TOPS = ("ResNetForImageClassification", "ResNetModel")


def foreign(kind: str, name: str) -> Any:
    """Return one of their models, with weights and averages that would show a difference."""
    torch.manual_seed(0)
    sizes = {"embedding_size": 8, "num_labels": 7, **KINDS[kind]}
    config = transformers.AutoConfig.for_model("resnet", **sizes)
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.weight.uniform_(0.5, 1.5)
                part.bias.normal_(std=0.3)
                part.running_mean.normal_(std=0.3)  # type: ignore[union-attr]
                part.running_var.uniform_(0.5, 1.0)  # type: ignore[union-attr]
            if isinstance(part, nn.Linear):
                part.weight.normal_(std=0.25)
    return model.eval()


def images(channels: int, size: tuple[int, int] = (32, 32), count: int = 3) -> Tensor:
    """Return random images."""
    rand = torch.Generator().manual_seed(1)
    return torch.randn(count, channels, *size, generator=rand)


def compare(theirs: Any, ours: Any, size: tuple[int, int]) -> None:
    some = images(ours.config.channels, size)
    with torch.no_grad():
        if ours.config.labels:
            right, found = theirs(some).logits, ours(some)
        else:
            right = theirs(some).last_hidden_state
            assert tuple(right.shape[2:]) == ours.grid(size)
            right, found = right.flatten(2).mT, ours.features(some)
    assert found.shape == right.shape and 1 < right.std() < 10
    assert (found - right).abs().max() <= 2e-5 * max(1, right.abs().max())


@pytest.mark.parametrize("name", TOPS)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_equal_transformers_and_folders_go_both_ways(kind: str, name: str, tmp_path: Path):
    theirs = foreign(kind, name)
    theirs.save_pretrained(tmp_path / "theirs")
    ours, config, tokenizers = import_folder(tmp_path / "theirs")
    assert isinstance(ours, ResNet)
    for size in ((32, 32), (33, 47)):
        compare(theirs, ours, size)
    export_weights(ours, config, tokenizers, tmp_path / "ours")
    auto: Any = transformers.AutoModelForImageClassification
    auto = auto if ours.config.labels else transformers.AutoModel
    again, notes = auto.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not notes["unexpected_keys"]
    assert all("num_batches_tracked" in key for key in notes["missing_keys"])
    compare(again.eval(), ours, (32, 32))
    twice, *_ = import_folder(tmp_path / "ours")
    assert not differing(twice.config, ours.config)
    for key, tensor in float_state(ours).items():
        assert torch.equal(tensor, twice.state_dict()[key]), key


@pytest.mark.parametrize("row, count", [("resnet18", 11_689_512), ("resnet50", 25_557_032)])
def test_published_sizes_have_as_many_parameters_as_transformers(row: str, count: int):
    config = PRESETS[row]
    with torch.device("meta"):
        ours = ResNet(config)
        theirs = transformers.ResNetForImageClassification(
            transformers.AutoConfig.for_model(
                "resnet",
                layer_type=config.kind,
                hidden_sizes=list(config.widths),
                depths=list(config.depths),
                num_labels=1000,
            )
        )
    learned = sum(p.numel() for p in ours.parameters())
    assert learned == sum(p.numel() for p in theirs.parameters()) == count
    assert len(dict(ours.named_buffers())) == len(dict(theirs.named_buffers()))


def products(model: ResNet, image: int) -> tuple[float, float]:
    """Count the multiply-adds of the residual blocks, and of those of attention."""
    with torch.no_grad():
        seen: dict[str, tuple[int, int]] = {}
        for name, part in model.named_modules():
            if isinstance(part, ResidualBlock | GridAttention):
                part.register_forward_hook(
                    lambda _, __, out, name=name: seen.update({name: tuple(out.shape[2:])})  # type: ignore[misc]
                )
        model.eval()(images(model.config.channels, (image, image), 1))
    totals = [0.0, 0.0]
    for name, (height, width) in seen.items():
        part, places = model.get_submodule(name), height * width
        looks = isinstance(part, GridAttention)
        weights = [p for key, p in part.named_parameters() if key.endswith("weight") and p.ndim > 1]
        totals[looks] += places * sum(p.numel() for p in weights)
        if isinstance(part, GridAttention):
            attention = part.block.attention
            totals[1] += 2 * places**2 * attention.heads * attention.head_width
    return totals[0], totals[1]


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
def test_a_network_that_looks_spends_at_least_half_on_looking(size: str):
    plain, looking = products(
        ResNet(replace(preset("resnet", size, "resnet_attention"), labels=10)), 32
    )
    assert looking >= plain > 0


def test_attention_stands_evenly_between_the_blocks():
    config = replace(PRESETS["resnet"], depths=(2, 3, 2), attention=(0, 2, 5))
    model = ResNet(config)
    order = ["".join("RA"[isinstance(b, GridAttention)] for b in s) for s in model.stages]  # type: ignore[attr-defined]
    assert order == ["RR", "RRARA", "RAARAAA"]
    with watch(model) as maps, torch.no_grad():
        model(images(3, (16, 16)))
    assert maps.names()[0] == "stages.1.2.block.attention" and len(maps.names()) == 7
    assert maps["stages.2.1.block.attention"].weights().shape == (3, 4, 16, 16)


# ---- running statistics


def test_statistics_are_kept_with_the_weights_and_no_optimiser_moves_them():
    torch.manual_seed(0)
    model = ResNet(replace(preset("resnet", "tiny"), labels=3, depths=(1, 1, 1)))
    optimiser = build_optimiser(model, lr=0.1, weight_decay=1.0)
    model(images(3, (8, 8))).sum().backward()
    before = {name: tensor.detach().clone() for name, tensor in state_of(model).items()}
    optimiser.step()
    for name, tensor in state_of(model).items():
        assert torch.equal(before[name], tensor) == (name in buffers_of(model)), name
    model(images(3, (8, 8)))
    assert not torch.equal(before[MEAN], model.get_buffer(MEAN))


def test_frozen_statistics_stay_and_are_used():
    torch.manual_seed(0)
    model = ResNet(replace(preset("resnet", "tiny"), labels=3, depths=(1, 1, 1)))
    some = images(3, (8, 8))
    model(some)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head."))
    kept = model.get_buffer(MEAN).clone()
    train_mode(model)
    trained = model(some)
    assert model.training and torch.equal(model.get_buffer(MEAN), kept)
    assert torch.equal(trained, model.eval()(some))


# ---- what is refused


@pytest.mark.parametrize(
    "key, value",
    [
        ("layer_type", "wide"),
        ("hidden_act", "gelu"),
        ("downsample_in_bottleneck", True),
        ("hidden_sizes", [16, 24, 32]),
        ("depths", [10**6, 1]),
        ("num_channels", "three"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(key: str, value: object):
    told = {"embedding_size": 8, **KINDS["basic"], key: value}
    with pytest.raises(UsageError) as mistake, torch.device("meta"):
        ResNet(find_format("resnet").read_config(told, TOPS[0]))
    word = {"layer_type": "kind", "hidden_sizes": "widths"}.get(key, key)
    assert word in str(mistake.value) and len(str(mistake.value)) < 200


@pytest.mark.parametrize("row, word", [("resnet", "stem"), ("resnet_attention", "attention")])
def test_what_no_format_holds_is_refused_by_name(row: str, word: str):
    with pytest.raises(UsageError, match=word):
        fitting("resnet", preset("resnet", "tiny", row), "images")


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"depths": (1, 1)}, "every stage"),
        ({"attention": (1,)}, "every stage"),
        ({"attention": (0, 0, 1), "head_width": 48}, "head_width=48"),
        ({"attention": (0, 0, 1), "position": "learned"}, "position"),
        ({"kind": "basik"}, "Did you mean 'basic'"),
        ({"stem": "tiny"}, "stem"),
    ],
)
def test_a_config_that_cannot_be_is_refused(changes: dict, word: str):
    with pytest.raises(UsageError, match=word), torch.device("meta"):
        ResNet(replace(preset("resnet", "tiny"), **changes))
