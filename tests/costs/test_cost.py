"""What is counted without numbers is what a model really does with them."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import regard
from regard.cli import main
from regard.costs.count import count, pretend
from regard.costs.machine import Machine, machine
from regard.costs.model import Reading, build, modality_read, named
from regard.costs.report import binary, block_of, cost, forward, learned, looked, training
from regard.errors import UsageError
from regard.gallery import claims, lectures
from regard.models import MODELS, family, info, preset, preset_names
from regard.tasks.frame.recipe import parameters, trainable

KIB, MIB, GIB = 2**10, 2**20, 2**30


def real(kind: str, config, batch: int, size: int) -> tuple[torch.Tensor, ...]:
    """Return the inputs of a family with numbers in them."""
    inputs = Reading(kind, config, batch, {KEY[kind]: size})()
    return tuple(torch.ones(x.shape, dtype=x.dtype) for x in inputs)


KEY = {name: "image" if hasattr(family(name)[0](), "image") else "length" for name in MODELS}


# ---- the count itself


def test_a_small_model_is_counted_as_by_hand():
    b, l, w, f, v, depth = 2, 20, 16, 24, 50, 3
    config = preset("gpt", "tiny")
    block = replace(config.block, width=w, heads=2, ffn_width=f)
    config = replace(config, vocab=v, depth=depth, block=block)
    inputs = Reading("gpt", config, b, {"length": l})()
    model = build("gpt", config)
    with pretend(), torch.no_grad():
        counted = count(lambda: model.eval()(*inputs), model=model)
    tokens = b * l
    linear = tokens * (depth * (w * 3 * w + w * w + 2 * w * f) + w * v)
    attention = depth * 2 * b * l * l * w
    assert counted.products == {"linear": linear, "attention": attention}
    assert counted.modules["head"] == tokens * w * v
    assert counted.modules["blocks.1"] * depth + counted.modules["head"] == linear + attention
    # backward: two products for each of the forward, and the kernel's scores once more
    step = training(model, inputs, backward=True)
    assert step.products == {"linear": 3 * linear, "attention": attention * 7 // 2}


def test_a_transposed_convolution_is_counted_as_by_hand():
    """Each number that it reads is multiplied with a kernel for each channel that it writes."""
    layer, x = nn.ConvTranspose2d(3, 4, 5, stride=2), torch.randn(2, 3, 6, 7)
    assert count(lambda: layer(x)).products == {"convolution": x.numel() * 4 * 25}


def test_a_convolution_is_counted_as_by_hand():
    net = nn.Sequential(nn.Conv2d(6, 8, 3, stride=2, padding=1, groups=2), nn.Flatten())
    x = torch.randn(2, 6, 9, 9, requires_grad=True)
    counted = count(lambda: net(x), model=net, backward=True)
    forward = 2 * 8 * 5 * 5 * (6 // 2) * 9
    assert counted.products == {"convolution": 3 * forward}
    assert counted.modules["0"] == forward
    assert counted.kept == 4 * x.numel()  # the input, once; weights are not activations


def test_memory_is_kept_once_and_only_by_what_needs_it():
    x = torch.randn(10, 10, requires_grad=True)
    assert count(lambda: x + 1).kept == 0
    assert count(lambda: x.exp()).kept == 400
    assert count(lambda: (x.view(100) * x.view(100)).view(10, 10)).kept == 400
    with torch.no_grad():
        assert count(lambda: x.exp()).kept == 0


@pytest.mark.parametrize("grad", [False, True], ids=["running", "training"])
@pytest.mark.parametrize("name", MODELS)
def test_counting_without_numbers_equals_counting_with_them(name, grad):
    config = preset(name, "tiny")
    # of several sounds, each is computed alone when there are numbers
    inputs = real(name, config, 1 if info(name).reads == "sound" else 2, 32)
    model = family(name)[1](config).train(grad)
    with torch.set_grad_enabled(grad):
        true = count(lambda: model(*inputs), model=model, backward=grad)
    hollow = build(name, config).train(grad)
    with pretend(), torch.set_grad_enabled(grad):
        told = count(lambda: hollow(*(x.to("meta") for x in inputs)), model=hollow, backward=grad)
    assert told.multiply_adds > 0
    assert told.products == true.products
    assert told.modules == true.modules
    assert told.weights == true.weights
    assert told.kept == pytest.approx(true.kept, rel=0.1)


@pytest.mark.parametrize("name", MODELS)
def test_counting_leaves_nothing_behind(name):
    config = preset(name, "tiny")
    inputs = real(name, config, 2, 32)
    model = family(name)[1](config).eval()
    with torch.no_grad():
        before = model(*inputs)
        regard.cost(model, growth=False, batch=2, **{KEY[name]: 32})
        after, again = model(*inputs), family(name)[1](config).eval()(*inputs)
    assert torch.equal(before, after) and not again.is_meta


@pytest.mark.parametrize("name", MODELS)
def test_attention_matrices_are_those_that_watching_sees(name):
    config = preset(name, "tiny")
    inputs = real(name, config, 2, 32)
    model = family(name)[1](config).eval()
    with torch.no_grad(), regard.watch(model) as maps:
        model(*inputs)
    seen = [call.weights() for layer in maps for call in maps.calls(layer)]
    inputs = Reading(name, config, 2, {KEY[name]: 32})()
    shapes, names, _ = looked(build(name, config), inputs)
    assert sum(shape.entries for shape in shapes) == sum(x.numel() for x in seen)
    assert sum(shape.matrices for shape in shapes) == sum(x.shape[0] * x.shape[1] for x in seen)
    assert names == maps.names()


# ---- published figures


@pytest.mark.parametrize(
    ("name", "parameters", "low", "high"),
    [
        ("vit_b16", 86_567_656, 17.5e9, 17.6e9),
        ("resnet50", 25_557_032, 4.05e9, 4.15e9),
        ("swin_t", 28_288_354, 4.45e9, 4.55e9),
        ("mvitv2_t", None, 4.65e9, 4.75e9),
        ("lrnet50", None, 4.25e9, 4.35e9),
    ],
)
def test_published_models_cost_what_was_published(name, parameters, low, high):
    kind, config = named(name)
    model = build(kind, config)
    told = forward(model, Reading(name, config, 1, {"image": 224})())
    assert low < told.multiply_adds < high
    assert parameters in (None, learned(model))


@pytest.mark.parametrize("name", ["bert", "vit", "swin", "resnet"])
def test_twice_the_batch_costs_twice(name):
    kind, config = named(name, "tiny")
    model = build(kind, config)
    one, two = (forward(model, Reading(name, config, n, {})()).multiply_adds for n in (1, 2))
    assert two == 2 * one


def test_windows_and_fused_attention_grow_with_the_pixels_and_plain_matrices_with_their_square():
    vit, swin = (cost(name, None, {"size": "tiny"}) for name in ("vit", "swin"))
    assert vit.exponents["entries"] == pytest.approx(2.0, abs=0.02)
    assert vit.exponents["kept"] < 1.1 < vit.exponents["multiply_adds"]
    assert max(x for x in swin.exponents.values() if x is not None) < 1.1


def test_parameters_are_those_of_the_true_module():
    for name in MODELS:
        config = preset(name, "tiny")
        model = family(name)[1](config)
        true = sum(p.numel() for p in model.parameters())
        assert learned(build(name, config)) == parameters(model) == true
        assert trainable(model) == ""


# ---- the lectures


def test_matrices_of_the_lectures():
    pixels, coarse, fine, whole, windows = lectures.matrices()
    assert (pixels.entries, pixels.bytes, pixels.heads) == (128**4, GIB, 48 * 16)
    assert pixels.total == 768 * GIB
    assert (coarse.entries, coarse.bytes // KIB, coarse.total // MIB) == (38_416, 150, 112)
    assert (fine.entries, fine.bytes, fine.total) == (65_536, 256 * KIB, 192 * MIB)
    assert whole.entries == 9_834_496
    assert windows.entries == 7**2 * 56 * 56
    assert binary(coarse.total) == "112.5 MiB"


def test_four_ways_to_process_a_sequence(monkeypatch):
    monkeypatch.setattr(lectures, "TIMED_SECONDS", 0.0)  # what time it takes is not judged
    rows = {row.layer: row for row in lectures.complexity()}
    powers = {name: tuple(round(p, 6) for p in row.multiply_adds) for name, row in rows.items()}
    assert powers == {
        "self-attention": (2, 1),
        "recurrent": (1, 2),
        "convolution": (1, 2),
        "restricted": (1, 1),
    }
    waits = {name: row.sequential for name, row in rows.items()}
    assert waits["recurrent"] == (256 + 1, 1024 + 1)
    assert all(a == b for name, (a, b) in waits.items() if name != "recurrent")
    assert {name: row.path for name, row in rows.items()} == {
        "self-attention": (1, 1),
        "recurrent": (256, 1024),
        "convolution": (6, 7),  # the logarithm of n to the base k, rounded up
        "restricted": (255 * 2 // 32 + 1, 1023 * 2 // 32 + 1),
    }


def test_training_the_transformer():
    base, big = lectures.trainings()
    # six operations for each weight in a product and each token, and little for attention
    for row in (base, big):
        known = 6 * row.parameters * 25_000 * row.steps
        assert known < row.flops < 1.02 * known
    assert base.chips == pytest.approx(3.3e18, rel=0.01)
    assert big.chips == pytest.approx(2.3e19, rel=0.01)
    assert base.flops < base.paper / 3 and big.flops < big.paper / 2


# ---- the verb


def test_all_heads_cost_as_many_products_as_one():
    rows = claims.head_costs()
    assert [row.heads * row.head_width for row in rows] == [512] * len(rows)
    assert {row.multiply_adds for row in rows} == {256 * 4 * 512**2 + 2 * 256**2 * 512}
    assert all(row.seconds > 0 for row in rows)


def test_self_attention_is_cheaper_while_the_length_is_below_the_width(monkeypatch):
    monkeypatch.setattr(lectures, "least_seconds", lambda run: run() is not None)
    for row in lectures.short_sequences():
        assert row.attention == 2 * row.length**2 * row.width
        assert row.recurrent == 2 * row.length * row.width**2
        assert (row.attention < row.recurrent) == (row.length < row.width)


def test_scaling_keeps_the_gradient_alive():
    rows = {row.head_width: row for row in claims.gradients()}
    assert rows[1024].variance == pytest.approx(1024, rel=0.1)
    assert rows[1024].plain < rows[16].plain / 100
    assert rows[1024].scaled == pytest.approx(rows[16].scaled, rel=0.1)


def test_results_hold_what_is_counted():
    rows = {row.model: row for row in claims.RESULTS}
    for one in lectures.trainings():
        assert rows[f"Transformer {one.size}"].german_flops == one.paper


def test_every_name_has_a_cost():
    for name in [*MODELS, *(one for each in MODELS for one in preset_names(each))]:
        kind, config = named(name)
        assert modality_read(info(kind).reads) is not None and type(config) is family(kind)[0]
    with pytest.raises(UsageError, match="Did you mean 'vit_b16'"):
        named("vit_b61")


def test_the_command_line(capsys):
    assert main(["cost", "gpt", "size=tiny", "length=64", "model.depth=2"]) == 0
    page = capsys.readouterr().out
    assert "2 layers of 4 heads, 64 x 64" in page and "power of tokens" in page
    assert main(["cost", "en-zh", "length=16", "growth=false", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["family"] == "transformer"
    assert told["attention"]["bytes"] == 4 * told["attention"]["entries"]
    true = sum(p.numel() for p in regard.load("en-zh").model.parameters())
    assert told["parameters"] == true


def test_a_public_checkpoint_is_counted_without_its_weights(tmp_path):
    theirs = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2}
    theirs |= {"n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    told = regard.cost(tmp_path, growth=False)
    assert told.input == "1 text of 64 tokens"
    assert told.parameters == 100 * 32 + 64 * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("gpt", {"image": 3}, "reads texts; set length"),
        ("vit_b16", {"length": 3}, "reads images; set image"),
        ("vit_b16", {"image": 3}, "at least 16x16"),
        ("gpt", {"length": 0}, "too small"),
        ("gpt", {"batch": 2**40}, "too large"),
        ("gpt", {"model.block.wide": 3}, "unknown key"),
        ("gpt", {"size": "huge"}, "unknown size"),
        ("en-zh", {"size": "base"}, "size of its own"),
        ("resnet18", {"image": 32}, "choose batch=2"),
    ],
)
def test_wrong_wishes_are_refused(name, settings, words):
    with pytest.raises(UsageError, match=words):
        regard.cost(name, **settings)
    with pytest.raises(UsageError, match="no model"):
        regard.cost(nn.Linear(2, 2))


def test_time_is_that_of_the_longer_of_products_and_bytes():
    x = torch.randn(64, 32)
    counted = count(lambda: x @ x.T)
    products, moved = 64 * 64 * 32, 4 * (2 * 64 * 32 + 64 * 64)
    assert counted.calls == [(products, moved)]
    assert counted.seconds(2.0, 1e12, 0.0) == pytest.approx(products)
    assert counted.seconds(1e18, 2.0, 3.0) == pytest.approx(moved / 2 + 3)


def test_the_machine_is_measured_once():
    roof = machine()
    assert isinstance(roof, Machine) and machine() is roof
    assert 1e8 < roof.rate < 1e14 and 1e7 < roof.bandwidth < 1e13 and 0 < roof.call < 1e-2


def test_a_block_is_the_nearest_thing_with_a_number():
    assert block_of("stages.1.blocks.0.attention.inner") == "stages.1.blocks.0"
    assert block_of("encoder.3") == "encoder.3"
    assert block_of("pool") == "pool"
