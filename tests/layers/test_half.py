"""Whisper's encoder in bfloat16, on request: near float32, and float32 wherever it is not asked."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

import regard
from regard import native
from regard.attention.intervene import change
from regard.attention.kernels import KERNELS, Problem
from regard.attention.scores import Dot
from regard.attention.watch import watch
from regard.errors import UsageError
from regard.layers.block import BlockConfig
from regard.layers.lora import adapt
from regard.models import family
from regard.models.whisper import WhisperConfig

pytestmark = pytest.mark.usefixtures("bfloat16")
NEAR = 0.02  # of the length of a vector: bfloat16 has 8 bits, of which each product may lose one


def make(full: bool = True, **sizes) -> nn.Module:
    """Return a model of random weights, with heads as wide as those of Whisper."""
    torch.manual_seed(0)
    block = BlockConfig(128, 2, 256, **{"feed_forward": "gelu", "dropout": 0.0, **sizes})
    config = WhisperConfig(12, 40, 3, 2, block, max_frames=150, full_window=full)
    model = family("whisper")[1](config).eval()
    for parameter in model.parameters():  # so that attention has something to choose
        parameter.data.mul_(1.5)
    return model


@contextmanager
def asked(model: nn.Module, dtype: torch.dtype = torch.bfloat16):
    """Ask for a data type, as `run` does."""
    with torch.inference_mode(), native.fast(model, frozen=True, dtype=dtype):
        yield


def encoded(model, sound, dtype=torch.bfloat16, lengths=None):
    """Return the memory, and the keys and values that the decoder reads of it."""
    with asked(model, dtype):
        memory, lengths = model.encode(sound, lengths)
        state = model.start_from(memory, lengths)
        return [memory, *(x for layer in state.memories for x in layer)]


def sounds(rows: int = 3, frames: int = 300) -> torch.Tensor:
    return torch.randn(rows, frames, 12, generator=torch.Generator().manual_seed(1))


def far(ours: torch.Tensor, right: torch.Tensor) -> float:
    return float((ours - right).norm() / right.norm())


@pytest.mark.parametrize("sizes", [{}, {"kv_heads": 1, "feed_forward": "swiglu"}, {"norm": "rms"}])
def test_it_is_near_float32_and_not_the_same(sizes):
    model, sound = make(**sizes), sounds()
    for half, full in zip(encoded(model, sound), encoded(model, sound, torch.float32), strict=True):
        assert 1e-5 < far(half.float(), full) < NEAR


def test_the_decoder_reads_its_memory_alike_by_kernel_and_pytorch():
    model, ids = make(), torch.tensor([[3, 4], [5, 6], [7, 8]])
    logits = []
    with asked(model):
        memory, lengths = model.encode(sounds())
        for on in (True, False):
            state = model.start_from(memory, lengths)
            assert state.memories[0].k.dtype == torch.bfloat16 or native.library() is None
            with native.fast(model, on, frozen=True, dtype=torch.bfloat16), watch(model) as maps:
                logits.append(model.step(ids, state)[0])
            logits.append(maps["decoder.1.cross"].weights())
    assert far(logits[0], logits[2]) < 1e-5 and far(logits[1], logits[3]) < 1e-5


def test_neighbours_and_padding_never_matter():
    model, sound = make(full=False), sounds()
    lengths = torch.tensor([300, 201, 90])
    memory = encoded(model, sound, lengths=lengths)
    for row, size in enumerate(lengths.tolist()):
        alone = encoded(model, sound[row : row + 1, :size].clone())
        for one, all_of_them in zip(alone, memory, strict=True):
            places = one.shape[-2]
            assert torch.equal(one[0], all_of_them[row, ..., :places, :])


def test_without_the_request_nothing_changes():
    model, sound = make(), sounds()
    with torch.inference_mode():
        with native.fast(model, frozen=True):
            plain = model.encode(sound)[0]
        with native.fast(model, dtype=torch.bfloat16):  # weights may change: nothing is converted
            assert torch.equal(model.encode(sound)[0], plain)
    with native.fast(model, frozen=True):
        plain = model.encode(sound)[0]
    with native.fast(model, frozen=True, dtype=torch.bfloat16):  # nor with gradients
        assert torch.equal(model.encode(sound)[0], plain)


def double(module, given, result):
    return 2 * result


class Other(nn.Linear):
    """A product of one's own."""

    def forward(self, input):
        return super().forward(input) + 1


def own_class(model):
    model.encoder[1].feed_forward.inner.__class__ = Other


def replaced(model):
    model.encoder[1].attention.out.weight = nn.Parameter(
        torch.zeros_like(model.encoder[1].attention.out.weight)
    )


def low_rank(model):
    adapt(model, "encoder.*.qkv", 2, 4.0)
    for name, parameter in model.named_parameters():
        if name.endswith("up"):
            nn.init.normal_(parameter)


CHANGES = {
    "hook": lambda model: model.encoder[0].feed_forward.register_forward_hook(double),
    "hook of the last norm": lambda model: model.encoder_norm.register_forward_hook(double),
    "class": own_class,
    "weight": replaced,
    "LoRA": low_rank,
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_done_to_the_encoder_is_honoured(name):
    model, sound = make(), sounds(2)
    before = encoded(model, sound)[0]
    with asked(model):
        model.encode(sound)  # already converted in this scope
        with torch.inference_mode(False):
            CHANGES[name](model)
        ours = model.encode(sound)[0]
    with torch.inference_mode():
        right = model.encode(sound)[0]
    assert far(ours, right) < NEAR < 2 * NEAR < far(before, right)


def test_what_is_changed_while_it_attends_is_honoured():
    model, sound = make(), sounds(2)
    with asked(model), change(model, {"encoder.1.attention.heads.0": 0.0}):
        ours = model.encode(sound)[0]
    with torch.inference_mode(), change(model, {"encoder.1.attention.heads.0": 0.0}):
        right = model.encode(sound)[0]
    assert far(ours, right) < 1e-5 < NEAR < far(encoded(model, sound)[0], right)


def test_watching_shows_its_attention_and_changes_nothing():
    model, sound = make(), sounds(2)
    with asked(model):
        plain = model.encode(sound)[0]
        with watch(model) as maps:
            assert torch.equal(model.encode(sound)[0], plain)
    with torch.inference_mode(), watch(model) as right:
        model.encode(sound)
    assert list(maps) == list(right)
    for name in maps:
        ours, theirs = maps[name].weights(), right[name].weights()
        assert ours.shape == theirs.shape == (2, 2, 150, 150)
        torch.testing.assert_close(ours.sum(-1), torch.ones(2, 2, 150))
        assert far(ours, theirs) < NEAR


@pytest.mark.parametrize("queries, keys", [(1, 1), (7, 13), (24, 64), (25, 65), (90, 129)])
def test_the_kernel_of_attention_equals_the_loop(queries, keys):
    torch.manual_seed(0)
    q = torch.randn(2, queries, 4, 64).transpose(1, 2).bfloat16()
    k, v = (torch.randn(2, keys, 2, 64).transpose(1, 2).bfloat16() for _ in range(2))
    module, score = nn.Identity(), Dot(0.3)
    with asked(module):
        answer = KERNELS["native"](Problem(q, k, v, score, module=module))
    if answer is None:
        pytest.skip("there is no compiler here, or no AVX-512 BF16")
    weights = (0.3 * q.double() @ k.double().repeat_interleave(2, 1).mT).softmax(-1)
    right = weights @ v.double().repeat_interleave(2, 1)
    assert answer[0].dtype == torch.bfloat16
    assert far(answer[0].double(), right) < 0.005
    with asked(module):
        far_off = KERNELS["native"](Problem(1e4 * q, k, v, score, module=module))
        broken = KERNELS["native"](Problem(q * torch.nan, k, v, score, module=module))
    assert far_off[0].isfinite().all() and broken[0].isnan().all()


def test_other_models_refuse_it():
    letters = regard.load("letters")
    with pytest.raises(UsageError, match="dtype=bfloat16 is for Whisper"):
        letters.check({"dtype": "bfloat16"})
