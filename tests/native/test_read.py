"""Encoders in C: what PyTorch computes, to the bit in every batch and on any number of threads."""

import random
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from regard import native
from regard.attention.masks import Causal, Padding
from regard.attention.watch import watch
from regard.decode.speech.options import WhisperDecoding, whisper_only
from regard.decode.speech.whisper import WhisperDecoder
from regard.errors import UsageError
from regard.layers.block import BlockConfig, EncoderBlock, build_final_norm
from regard.layers.fast import read
from regard.layers.fast.run import run_blocks
from tests.layers.test_half import far, make, sounds

pytestmark = pytest.mark.skipif(native.plain() is None, reason="no kernels here")


class Encoder(nn.Module):
    """Blocks and a last norm."""

    def __init__(self, config: BlockConfig, depth: int, norm: nn.Module | None = None):
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(EncoderBlock(config) for _ in range(depth)), norm

    def forward(self, x, lengths=None, mask=None):
        """Run as models do."""
        mask = mask or (None if lengths is None else Padding.of(lengths, x.shape[1]))
        return run_blocks(self.blocks, x, norm=self.norm, at=torch.arange(x.shape[1]), mask=mask)


def build(seed: int) -> Encoder:
    """An encoder of sizes that fit no vector, some matrices laid by columns."""
    rng, _ = random.Random(seed), torch.manual_seed(seed)
    kv_heads = rng.choice([1, 2])
    config = BlockConfig(
        width=rng.choice([7, 24, 33, 64]),
        heads=kv_heads * rng.choice([1, 2, 3]),
        kv_heads=kv_heads,
        head_width=rng.choice([5, 16, 40, 64]),
        ffn_width=rng.choice([9, 40, 270]),
        norm=rng.choice(["rms", "layer"]),
        feed_forward=rng.choice(["relu", "gelu", "gelu_tanh", "swiglu"]),
        order=rng.choice(["pre", "post"]),
        dropout=0.0,
    )
    made = Encoder(config, rng.choice([1, 3]), rng.choice([None, build_final_norm(config)])).eval()
    for part in made.modules():
        if isinstance(part, nn.Linear) and rng.random() < 0.6:
            part.weight = nn.Parameter(part.weight.detach().t().contiguous().t() * 2)
    return made


def batch(width: int, longest: int = 300) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([longest, 1, 97, 96, 0, 32, longest - 1])
    return torch.randn(len(lengths), longest, width), lengths


def width_of(model: Encoder) -> int:
    return next(model.parameters()).shape[-1]


def by_kernel(model, x, lengths=None, dtype=torch.float32, threads=1):
    """What the kernel computes, which must know the model."""
    before, mask = torch.get_num_threads(), lengths if lengths is None else Padding.of(lengths, 300)
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode(), native.fast(model, frozen=True, dtype=dtype):
            y, blocks, at = model(x, lengths), list(model.blocks), torch.arange(x.shape[1])
            assert y.equal(cast(Tensor, read.try_read(blocks, x, model.norm, at, mask, None)))
    finally:
        torch.set_num_threads(before)
    return y


@pytest.mark.parametrize("seed", range(16))
def test_the_kernel_computes_what_pytorch_does(seed):
    model = build(seed)
    x, lengths = batch(width_of(model))
    with torch.inference_mode():
        wanted = model.double()(x.double(), lengths)
        model.float()
    found, real = by_kernel(model, x, lengths), Padding.of(lengths, x.shape[1]).keep
    torch.testing.assert_close(found[real].double(), wanted[real], atol=2e-4, rtol=2e-4)
    assert not found[~real].any()
    torch.testing.assert_close(by_kernel(model, x[:1]), found[:1], atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_neighbours_and_threads_change_no_bit(dtype):
    model = build(2)
    x, lengths = batch(width_of(model))
    found = by_kernel(model, x, lengths, dtype)
    for threads in (2, 3, 7):
        assert by_kernel(model, x, lengths, dtype, threads).equal(found)
    for row, length, wanted in zip(x, lengths.tolist(), found, strict=True):
        if length:
            alone = by_kernel(model, row[None, :length], dtype=dtype, threads=3)
            assert alone[0].equal(wanted[:length])


@pytest.mark.parametrize("seed", range(4))
def test_int8_is_near_float32_and_not_the_same(seed):
    model = build(seed)
    x, lengths = batch(width_of(model))
    full, bytes_ = (by_kernel(model, x, lengths, dtype) for dtype in (torch.float32, torch.int8))
    assert 1e-5 < (full - bytes_).norm() / full.norm() < 0.05


@torch.inference_mode()
def test_what_it_does_not_know_is_left_to_pytorch():
    model = build(1)
    x, lengths = batch(width_of(model))

    def tried(x=x, mask=None, bias=None):
        with native.fast(model, frozen=True):
            at = torch.arange(x.shape[1])
            return read.try_read(list(model.blocks), x, model.norm, at, mask, bias)

    assert tried() is not None
    assert tried(x[:, :0]) is None and tried(x.double()) is None
    assert tried(mask=Causal()) is None and tried(bias=torch.zeros(1)) is None
    assert tried(mask=Padding(torch.arange(300).expand(len(x), 300) > 3)) is None
    broken = x.clone()
    broken[0, 7, 0] = torch.nan
    assert tried(broken) is None
    with torch.inference_mode(False), torch.enable_grad():
        assert tried() is None
    hook = model.blocks[0].register_forward_hook(lambda *_: None)
    assert tried() is None
    hook.remove()
    assert tried() is not None


@torch.inference_mode()
def test_watching_changes_no_bit_and_sees_what_pytorch_attends_to():
    model = build(4)
    x, lengths = batch(width_of(model))
    with native.fast(model, frozen=True):
        plain = model(x, lengths)
        with watch(model) as maps:
            assert model(x, lengths).equal(plain)
    with watch(model) as wanted:
        model(x, lengths)
    assert set(maps) == set(wanted) and len(maps) == len(model.blocks)
    for path in wanted:
        torch.testing.assert_close(maps[path].weights(), wanted[path].weights())


def test_a_changed_weight_is_noticed():
    model = build(3)
    x, _ = batch(width_of(model))
    with torch.inference_mode(), native.fast(model, frozen=True):
        before = model(x)
        model.blocks[-1].feed_forward.outer.weight.data.mul_(-1)
        after = model(x)
    with torch.inference_mode():
        torch.testing.assert_close(after, model(x), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(before, after, atol=1e-3)


def test_whisper_hears_in_int8_where_that_is_asked_for():
    model = make()
    with torch.inference_mode():
        for dtype, kind in ((torch.float32, torch.float32), (torch.int8, torch.bfloat16)):
            with native.fast(model, frozen=True, dtype=dtype):
                memory, lengths = model.encode(sounds())
                state = model.start_from(memory, lengths)
                assert state.memories[0].k.dtype == kind
                logits, _ = model.step(torch.tensor([[3], [4], [5]]), state)
            if dtype == torch.float32:
                full = logits
        assert 1e-5 < far(logits, full) < 0.05
        model.decoder[0].register_forward_hook(lambda *_: None)
        with native.fast(model, frozen=True, dtype=torch.int8):
            state = model.start_from(memory, lengths)
            with pytest.raises(UsageError, match="int8"):
                model.step(torch.tensor([[3], [4], [5]]), state)
        model.encoder[0].register_forward_hook(lambda *_: None)
        in_bytes = native.fast(model, frozen=True, dtype=torch.int8)
        with in_bytes, pytest.raises(UsageError, match="int8"):
            model.encode(sounds())


def test_memories_are_those_of_pytorch_to_the_bit_in_every_batch():
    model, memory = make(kv_heads=1), torch.randn(3, 130, 128)
    lengths = torch.tensor([130, 130, 130])
    with torch.inference_mode(), native.fast(model, on=False):
        wanted = model.start_from(memory, lengths).memories
    with torch.inference_mode(), native.fast(model, frozen=True):
        found = model.start_from(memory, lengths).memories
        alone = model.start_from(memory[1:2], lengths[:1]).memories
    for a, b, c in zip(wanted, found, alone, strict=True):
        for x, y, z in zip(a, b, c, strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
            assert y[1:2].equal(z)


def test_int8_excludes_bfloat16_and_is_for_whisper_alone():
    decoder = object.__new__(WhisperDecoder)  # which asks before it looks at its model
    with pytest.raises(UsageError, match="exclude each other"):
        decoder.check(WhisperDecoding(dtype="bfloat16", quantise="int8"))
    assert whisper_only(WhisperDecoding(quantise="int8")) == {"quantise": "int8"}
