"""The Conformer equals transformers' on the same weights; padding and neighbours never matter."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard import watch
from regard.attention.masks import Padding
from regard.attention.positions.relative import XL, shifted
from regard.errors import UsageError
from regard.layers.block import BlockConfig
from regard.layers.conformer import ConformerBlock, ConvolutionModule, Depthwise
from regard.layers.fast.run import run_blocks
from regard.layers.subsampling import Subsampling
from regard.models import preset
from regard.models.conformer import Conformer, ConformerConfig

TOLERANCE = 2e-5  # times the largest value

BLOCK = BlockConfig(16, 4, 24, feed_forward="swish", dropout=0.0)
SMALL = ConformerConfig(8, 11, channels=4, depth=2, block=BLOCK, kernel=7)


def enlarge(module: nn.Module, seed: int = 0) -> None:
    """Give every weight and statistic a number that is far from where it begins."""
    rand = torch.Generator().manual_seed(seed)
    for name, x in [*module.named_parameters(), *module.named_buffers()]:
        if not x.is_floating_point():
            continue
        new = torch.randn(x.shape, generator=rand, dtype=x.dtype)
        if name.endswith("running_var"):
            new = 0.5 + new.abs()
        elif x.ndim == 1:
            new = (1 + 0.5 * new) * (x.mean() > 0.5) + 0.3 * new
        else:
            new = 1.5 * new / x[0].numel() ** 0.5
        x.data.copy_(new)


def small(**changes: Any) -> Conformer:
    """Return a small model with enlarged weights, ready to run."""
    model = Conformer(replace(SMALL, **changes)).eval()
    enlarge(model)
    return model


# ---- the same numbers as transformers


def theirs_of(ours: nn.ModuleList, config: BlockConfig, kernel: int) -> Any:
    """Return transformers' encoder with the weights of our blocks."""
    module = pytest.importorskip(
        "transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer"
    )
    settings = module.Wav2Vec2ConformerConfig(
        hidden_size=config.width,
        num_attention_heads=config.heads,
        num_hidden_layers=len(ours),
        intermediate_size=config.ffn_width,
        hidden_act="swish",
        position_embeddings_type="relative",
        conv_depthwise_kernel_size=kernel,
        layer_norm_eps=1e-5,
        hidden_dropout=0.0,
        activation_dropout=0.0,
        attention_dropout=0.0,
        conformer_conv_dropout=0.0,
        layerdrop=0.0,
    )
    settings._attn_implementation = "eager"
    theirs = module.Wav2Vec2ConformerEncoder(settings).eval()
    theirs.layer_norm = nn.Identity()  # which the paper's encoder has not
    names = {
        "ffn1_layer_norm": "around_first.norm",
        "ffn1.intermediate_dense": "first.inner",
        "ffn1.output_dense": "first.outer",
        "self_attn_layer_norm": "around_attention.norm",
        "self_attn.linear_out": "attention.out",
        "self_attn.linear_pos": "attention.position.relative",
        "conv_module.layer_norm": "around_convolution.norm",
        "conv_module.pointwise_conv1": "convolution.pointwise",
        "conv_module.depthwise_conv": "convolution.depthwise",
        "conv_module.batch_norm": "convolution.norm",
        "conv_module.pointwise_conv2": "convolution.out",
        "ffn2_layer_norm": "around_second.norm",
        "ffn2.intermediate_dense": "second.inner",
        "ffn2.output_dense": "second.outer",
        "final_layer_norm": "norm",
    }
    for our, their in zip(ours, theirs.layers, strict=True):
        state = our.state_dict()
        found = {}
        for name, x in their.state_dict().items():
            module_name, _, leaf = name.rpartition(".")
            if module_name in names:
                found[name] = state[f"{names[module_name]}.{leaf}"].view(x.shape)
        parts = zip("qkv", state["attention.qkv.weight"].chunk(3), strict=True)
        found |= {f"self_attn.linear_{part}.weight": x for part, x in parts}
        parts = zip("qkv", state["attention.qkv.bias"].chunk(3), strict=True)
        found |= {f"self_attn.linear_{part}.bias": x for part, x in parts}
        for part in "uv":
            found[f"self_attn.pos_bias_{part}"] = state[f"attention.position.{part}"].squeeze(1)
        their.load_state_dict(found)
    return theirs


def blocks_of(depth: int, config: BlockConfig, kernel: int) -> nn.ModuleList:
    """Return blocks with enlarged weights, and no biases where transformers has none."""
    blocks = nn.ModuleList(
        ConformerBlock(config, XL(config.width, config.heads, config.per_head), kernel=kernel)
        for _ in range(depth)
    ).eval()
    enlarge(blocks)
    for block in blocks:
        assert isinstance(block, ConformerBlock)
        for linear in (block.convolution.pointwise, block.convolution.out):
            nn.init.zeros_(linear.bias)
    return blocks


def run(blocks: nn.ModuleList, x: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Pass vectors through the blocks."""
    at = torch.arange(x.shape[1]).unsqueeze(-1)
    return run_blocks(blocks, x, at=at, mask=Padding.of(lengths, x.shape[1]))


def same(ours: Tensor, theirs: Tensor) -> None:
    """Compare within the tolerance, of numbers that are spread."""
    bound = TOLERANCE * max(1.0, theirs.abs().max().item())
    assert (ours - theirs).abs().max() <= bound


WIDE = BlockConfig(64, 4, 128, feed_forward="swish", dropout=0.0)


@pytest.mark.parametrize("length", [1, 2, 40])
def test_blocks_equal_those_of_transformers(length: int):
    blocks = blocks_of(4, WIDE, 15)
    theirs = theirs_of(blocks, WIDE, 15)
    x = torch.randn(3, length, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        right = theirs(x.clone()).last_hidden_state
        same(run(blocks, x), right)
    assert 1 < right.std() < 10


def test_padded_blocks_equal_those_of_transformers_alone():
    blocks = blocks_of(4, WIDE, 15)
    theirs = theirs_of(blocks, WIDE, 15)
    lengths = torch.tensor([40, 23, 9])
    x = torch.randn(3, 40, 64, generator=torch.Generator().manual_seed(1))
    moved = 0.0
    with torch.no_grad():
        ours = run(blocks, x, lengths)
        keep = torch.arange(40) < lengths.unsqueeze(-1)
        padded = theirs(x.clone(), attention_mask=keep).last_hidden_state
        for i, n in enumerate(lengths):
            right = theirs(x[i : i + 1, :n].clone()).last_hidden_state[0]
            same(ours[i, :n], right)
            moved = max(moved, float((padded[i, :n] - right).abs().max()))
    assert moved > 0.1  # theirs reads its padding in the convolutions of later blocks


def test_one_padded_block_equals_that_of_transformers_away_from_the_padding():
    blocks = blocks_of(1, WIDE, 15)
    theirs = theirs_of(blocks, WIDE, 15)
    lengths = torch.tensor([40, 31])
    x = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(1))
    keep = torch.arange(40) < lengths.unsqueeze(-1)
    with torch.no_grad():
        right = theirs(x.clone(), attention_mask=keep).last_hidden_state
        ours = run(blocks, x, lengths)
    same(ours[0], right[0])
    same(ours[1, : 31 - 15 // 2], right[1, : 31 - 15 // 2])


def test_training_equals_that_of_transformers():
    blocks = blocks_of(2, WIDE, 15)
    theirs = theirs_of(blocks, WIDE, 15)
    x = torch.randn(3, 30, 64, generator=torch.Generator().manual_seed(1))
    probe = torch.randn(3, 30, 64, generator=torch.Generator().manual_seed(2)) / 50
    ours, right = run(blocks.train(), x), theirs.train()(x.clone()).last_hidden_state
    same(ours, right)
    (ours * probe).sum().backward()
    (right * probe).sum().backward()
    for our, their in zip(blocks, theirs.layers, strict=True):
        assert isinstance(our, ConformerBlock)
        norm, other = our.convolution.norm, their.conv_module.batch_norm
        same(norm.running_mean, other.running_mean)
        same(norm.running_var, other.running_var)
        same(norm.weight.grad, other.weight.grad)
        pairs = {
            our.first.inner: their.ffn1.intermediate_dense,
            our.attention.out: their.self_attn.linear_out,
            our.attention.position.relative: their.self_attn.linear_pos,
            our.convolution.depthwise: their.conv_module.depthwise_conv,
            our.convolution.pointwise: their.conv_module.pointwise_conv1,
            our.around_attention.norm: their.self_attn_layer_norm,
        }
        for mine, other in pairs.items():
            same(mine.weight.grad.flatten(), other.weight.grad.flatten())
        same(our.attention.position.u.grad.squeeze(1), their.self_attn.pos_bias_u.grad)
        same(our.attention.position.v.grad.squeeze(1), their.self_attn.pos_bias_v.grad)


# ---- padding and neighbours never matter, to the last bit

GARBAGE = (0.0, 1e30, -torch.inf, torch.nan)


def batches(count: int) -> Iterator[tuple[Conformer, Tensor, Tensor, torch.Generator]]:
    """Give models of changing parts, sounds, their lengths, and what draws at random."""
    rand = torch.Generator().manual_seed(3)
    draw = lambda low, high: int(torch.randint(low, high + 1, (), generator=rand))  # noqa: E731
    for n in range(count):
        heads = draw(1, 3)
        block = replace(BLOCK, width=8 * heads * draw(1, 2), heads=heads, ffn_width=draw(9, 50))
        head = [
            {"vocab": draw(2, 40)},
            {"vocab": 0, "labels": draw(2, 12), "pool": ("mean", "max", "attention")[n // 3 % 3]},
            {"vocab": 0},
        ][n % 3]
        config = replace(
            SMALL,
            mels=draw(5, 20),
            subsampling=2 * draw(1, 2),
            channels=draw(1, 9),
            encoder=("conformer", "conformer", "transformer")[draw(0, 2)],
            depth=draw(1, 2),
            block=block,
            kernel=2 * draw(0, 8) + 1,
            convolution_norm=("batch", "layer")[draw(0, 1)],
            position=("xl", "sinusoidal", "rotary", "alibi")[draw(0, 3)],
            **head,
        )
        torch.manual_seed(n)
        model = Conformer(config)
        most = (12, 60, 250)[draw(0, 2)]
        lengths = torch.tensor([draw(1, most) for _ in range(draw(1, 5))])
        sound = torch.randn(len(lengths), int(lengths.max()) + draw(0, 9), config.mels)
        yield model, sound, lengths, rand


def with_garbage(sound: Tensor, lengths: Tensor, value: float, more: int = 0) -> Tensor:
    """Return sounds with other padding, and more of it."""
    sound = F.pad(sound, (0, 0, 0, more))
    beyond = torch.arange(sound.shape[1]) >= lengths.unsqueeze(-1)
    return sound.masked_fill(beyond.unsqueeze(-1), value)


def test_no_bit_of_a_sound_depends_on_its_batch_over_300_batches():
    compared = 0
    for n, (model, sound, lengths, rand) in enumerate(batches(300)):
        model.eval()
        out = model.out_lengths(lengths)
        with torch.no_grad():
            together = model(sound, lengths)
            order = torch.randperm(len(sound), generator=rand)
            other = with_garbage(sound, lengths, GARBAGE[n % 4], n % 5)[order]
            mixed = model(other, lengths[order])
            for i, (length, frames) in enumerate(zip(lengths, out, strict=True)):
                alone = model(sound[i : i + 1, :length])[0]
                place = int((order == i).nonzero())
                if alone.ndim == 2:
                    assert len(alone) == frames
                    found = together[i, :frames], mixed[place, :frames]
                else:
                    found = together[i], mixed[place]
                for one in found:
                    assert torch.equal(one, alone), (n, model.config)
                compared += alone.numel()
    assert compared > 100_000


def test_no_bit_of_training_depends_on_padding_over_100_batches():
    for n, (model, sound, lengths, _) in enumerate(batches(100)):
        model.train()
        seen = []
        for value, more in ((0.0, 0), (GARBAGE[n % 4], n % 7)):
            again = Conformer(model.config).train()
            again.load_state_dict(model.state_dict())
            told = again(with_garbage(sound, lengths, value, more), lengths)
            told.square().mean().backward()
            state = {name: x for name, x in again.named_buffers()}
            state |= {name: x.grad for name, x in again.named_parameters() if x.grad is not None}
            seen.append((told, state))
        (told, state), (other, others) = seen
        assert torch.equal(told, other) and told.isfinite().all()
        for name, x in state.items():
            assert x.isfinite().all(), name
            assert torch.equal(x, others[name]), name


def test_neighbours_of_the_same_lengths_change_no_bit_in_training():
    model = small(convolution_norm="layer").train()
    lengths = torch.tensor([61, 40, 13])
    sound, other = torch.randn(2, 3, 61, 8)
    other[1] = sound[1]
    with torch.no_grad():
        assert torch.equal(model(sound, lengths)[1, :10], model(other, lengths)[1, :10])


def test_statistics_are_those_of_all_real_frames():
    torch.manual_seed(0)
    module = ConvolutionModule(6, 5).double().train()
    enlarge(module)
    before = [x.clone() for x in (module.norm.running_mean, module.norm.running_var)]
    lengths = [9, 4, 1, 7]
    x = torch.randn(4, 9, 6, dtype=torch.double)
    ours = module(x, Padding.of(torch.tensor(lengths), 9))
    frames = [
        module.depthwise(F.glu(module.pointwise(x[i : i + 1, :n])))[0]
        for i, n in enumerate(lengths)
    ]
    frames = torch.cat(frames)
    mean, var = frames.mean(0), frames.var(0, unbiased=False)
    normed = (frames - mean) / (
        var + module.norm.eps
    ).sqrt() * module.norm.weight + module.norm.bias
    right = module.out(F.silu(normed)).split(lengths)
    for i, n in enumerate(lengths):
        torch.testing.assert_close(ours[i, :n], right[i], atol=1e-12, rtol=0)
        assert ours[i, n:].eq(0).all()
    for old, new, now in zip(
        before,
        (mean, frames.var(0)),
        (module.norm.running_mean, module.norm.running_var),
        strict=True,
    ):
        torch.testing.assert_close(now, 0.9 * old + 0.1 * new, atol=1e-12, rtol=0)


def test_one_frame_can_be_learned_from():
    model = small().train()
    before = {name: x.clone() for name, x in model.named_buffers()}
    told = model(torch.randn(1, 3, 8))
    told.sum().backward()
    assert told.isfinite().all()
    for name, x in model.named_buffers():
        assert torch.equal(x, before[name])  # nothing varies in one frame


def test_a_memory_is_zero_at_padding_and_as_long_as_promised():
    model = small(decoder_depth=1)
    lengths = torch.tensor([30, 1, 0, 17])
    for training in (False, True):
        model.train(training)
        memory, out = model.encode(torch.randn(4, 35, 8), lengths)
        assert out.tolist() == [8, 1, 0, 5] and memory.shape[:2] == (4, 8)
        for row, n in zip(memory, out, strict=True):
            assert row[n:].eq(0).all() and row[:n].ne(0).any(-1).all()


@pytest.mark.parametrize("factor", [2, 4])
def test_lengths_are_those_of_the_stem(factor: int):
    stem = Subsampling(8, 2, 6, factor)
    for length in range(1, 40):
        x, mask = stem(torch.randn(1, length, 8), None)
        told = stem.out_lengths(torch.tensor([length]))
        assert told.tolist() == [x.shape[1]] == [-(-length // factor)] and mask is None
        _, mask = stem(torch.randn(1, 45, 8), Padding.of(torch.tensor([length]), 45))
        assert mask is not None and mask.keep.sum() == told


# ---- parts


def test_a_shifted_view_pairs_places_by_distance():
    length = 5
    distances = torch.arange(length - 1, -length, -1).expand(2, 3, length, -1)
    pairs = shifted(distances.contiguous())
    at = torch.arange(length)
    assert torch.equal(pairs, (at.unsqueeze(1) - at).expand(2, 3, -1, -1))


@pytest.mark.parametrize("kernel,length", [(1, 4), (5, 2), (7, 20)])
def test_the_depthwise_convolution_and_its_gradients_are_those_of_conv1d(kernel: int, length: int):
    torch.manual_seed(0)
    part = Depthwise(6, kernel, bias=False).double()
    x = torch.randn(3, length, 6, dtype=torch.double, requires_grad=True)

    def right(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv1d(x.mT, weight, padding=kernel // 2, groups=6).mT

    ours, theirs = part(x), right(x, part.weight)
    torch.testing.assert_close(ours, theirs, atol=1e-13, rtol=0)
    probe = torch.randn_like(ours)
    inputs = [x, part.weight]
    first = [
        torch.autograd.grad((y * probe).sum(), inputs, create_graph=True) for y in (ours, theirs)
    ]
    second = [torch.autograd.grad(sum(g.square().sum() for g in grads), inputs) for grads in first]
    for mine, other in [*zip(*first, strict=True), *zip(*second, strict=True)]:
        torch.testing.assert_close(mine, other, atol=1e-11, rtol=0)


def test_maps_of_a_batch_are_those_of_each_sound():
    model = small(vocab=0, labels=3, pool="attention")
    lengths = torch.tensor([37, 12])
    sound = torch.randn(2, 37, 8)
    with torch.no_grad():
        plain = model(sound, lengths)
        with watch(model) as outer, watch(model) as maps:
            assert torch.equal(model(sound, lengths), plain)
        assert maps.names() == ["encoder.0.attention", "encoder.1.attention", "readout.pool"]
        for name in maps:
            for i, n in enumerate(lengths):
                with watch(model) as one:
                    model(sound[i : i + 1, :n])
                right = one[name].weights()[0]
                for found in (maps, outer):
                    assert len(found.calls(name)) == 1
                    whole = found[name].weights()[i]
                    assert torch.equal(whole[:, : right.shape[1], : right.shape[2]], right)
                    assert whole.sum() == pytest.approx(right.sum().item())
                    last = found[name].weights(batch=i, rows=-1)
                    torch.testing.assert_close(last[0], whole[:, -1:], atol=1e-6, rtol=0)


def test_memory_of_several_depths():
    for training in (False, True):
        model = small().train(training)
        sound, lengths = torch.randn(2, 30, 8), torch.tensor([30, 11])
        (middle, last), out = model.encode_at(sound, lengths, [1, 2])
        memory, again = model.encode(sound, lengths)
        assert torch.equal(out, again)
        torch.testing.assert_close(last, memory, atol=1e-6, rtol=0)
        assert middle.shape == last.shape and (middle - last).abs().max() > 0.1


# ---- the family


def test_sizes_are_those_promised():
    def count(size: str, member: str) -> int:
        with torch.device("meta"):
            model = Conformer(preset("conformer", size, member))
        return sum(p.numel() for p in model.parameters())

    for size, low, high in (
        ("micro", 1e5, 3e5),
        ("tiny", 1e6, 3e6),
        ("small", 8e6, 11e6),
        ("base", 25e6, 32e6),
        ("big", 110e6, 120e6),
    ):
        conformer, transformer = (count(size, name) for name in ("conformer", "speech_transformer"))
        assert low < conformer < high
        assert transformer == pytest.approx(conformer, rel=0.03)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"subsampling": 3}, "subsampling=3; expected 2 or 4"),
        ({"kernel": 4}, "choose an odd one"),
        ({"labels": 3}, "set one of them to 0"),
        ({"vocab": 0, "decoder_depth": 1}, "without a vocabulary"),
        ({"ctc": False}, "ctc=true or decoder_depth"),
        ({"encoder": "conformr"}, "Did you mean 'conformer'"),
        ({"convolution_norm": "bath"}, "Did you mean 'batch'"),
        ({"block": replace(BLOCK, order="post")}, "an order of its own"),
        ({"position": "cope"}, "needs another, such as rotary"),
    ],
)
def test_configs_that_do_not_fit_are_refused(changes: dict[str, Any], words: str):
    with pytest.raises(UsageError, match=words):
        Conformer(replace(SMALL, **changes))


def test_heads_that_are_not_there_are_named():
    sound = torch.randn(1, 20, 8)
    with pytest.raises(UsageError, match="no decoder"):
        small().start(sound)
    with pytest.raises(UsageError, match="no CTC head"):
        small(vocab=0, labels=2).ctc_logits(torch.randn(1, 5, 16))
