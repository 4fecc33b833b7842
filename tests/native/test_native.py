"""Kernels in C give what PyTorch gives, and nobody misses them where they cannot be made."""

import copy
import math
import multiprocessing
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from regard import native
from regard.attention.attend import attend
from regard.attention.masks import Causal, Document, Mask, Padding
from regard.attention.positions import build_position
from regard.attention.watch import watch
from regard.errors import UsageError
from regard.files import write_atomically
from regard.layers.block import BlockConfig, EncoderBlock
from regard.layers.fast import run
from regard.layers.fast.run import run_blocks
from regard.layers.fast.stack import PackedStack
from regard.models.gpt import GPT, GPTConfig
from regard.models.transformer import Transformer, TransformerConfig
from regard.native import build, fast, functions
from regard.training.optim import build_optimiser
from tests.searching import greedy

needs = pytest.mark.skipif(bool(build.unavailable()), reason=build.unavailable())


def far(x: Tensor, y: Tensor) -> float:
    """Return the largest difference as a share of the largest number."""
    x, y = x.detach().double(), y.detach().double()
    return float((x - y).abs().max() / y.abs().max().clamp_min(1e-6))


@contextmanager
def no_plain_block(monkeypatch) -> Iterator[None]:
    """Fail where PyTorch runs a block instead of a kernel."""
    with monkeypatch.context() as patch:
        patch.setattr(run, "one_pass", lambda: pytest.fail("no kernel took the blocks"))
        yield


def mask_of(name: str, b: int, l: int) -> Mask | None:
    """Make a mask for b texts of l tokens."""
    if name == "padding":
        keep = torch.ones(b, l, dtype=torch.bool)
        keep[1, l // 2 :] = False
        return Padding(keep)
    if name == "documents":
        return Causal() & Document((torch.arange(l) // 30).expand(b, l))
    return Causal() if name == "causal" else None


BLOCKS = [
    ("layer", "gelu", "none", None, "causal", 12, 64, True),
    ("rms", "swiglu", "rotary", 2, "causal", 5, 33, False),
    ("layer", "gelu_tanh", "none", None, "padding", 3, 20, True),
    ("layer_nobias", "relu", "none", 1, "all", 9, 7, True),
    ("rms", "geglu", "rotary", None, "documents", 4, 100, True),
    ("layer", "swish", "yarn", 2, "all", 1, 130, True),
]


@needs
@pytest.mark.parametrize("case", BLOCKS, ids=lambda case: f"{case[0]}-{case[1]}-{case[4]}")
def test_a_block_and_its_gradients_equal_pytorchs(case, monkeypatch):
    norm, ffn, where, kv_heads, looks, b, l, bias = case
    torch.manual_seed(0)
    config = BlockConfig(64, 4, 160, kv_heads, None, norm, 1e-5, "pre", ffn, bias=bias, dropout=0.0)
    position = build_position(where, 64, 4, 16, max_length=512)
    block = EncoderBlock(config, position)
    for p in block.parameters():
        nn.init.normal_(p, std=0.2)
    x, at = torch.randn(b, l, 64, requires_grad=True), torch.arange(l).unsqueeze(-1)
    mask, grad = mask_of(looks, b, l), torch.randn(b, l, 64)
    with fast(block), no_plain_block(monkeypatch):
        y = run_blocks([block], x, at=at, mask=mask)
    found = torch.autograd.grad(y, [x, *block.parameters()], grad)
    plain = copy.deepcopy(block).double()  # which no kernel takes
    x64 = x.detach().double().requires_grad_()
    y64 = plain(x64, at=at, mask=mask)
    wanted = torch.autograd.grad(y64, [x64, *plain.parameters()], grad.double())
    assert far(y, y64) < 2e-6
    assert max(far(one, two) for one, two in zip(found, wanted, strict=True)) < 5e-6
    with fast(block), no_plain_block(monkeypatch):
        y = run_blocks([block], x, at=at, mask=mask)
    again = torch.autograd.grad(y, [x, *block.parameters()], grad)
    assert all(torch.equal(one, two) for one, two in zip(found, again, strict=True))


@needs
@pytest.mark.parametrize(
    "shape", [(3, 4, 4, 64, 64, 32), (2, 4, 2, 57, 90, 20), (2, 3, 1, 50, 49, 48)]
)
@pytest.mark.parametrize("biased", [False, True])
def test_attention_and_its_gradients_equal_pytorchs(shape, biased):
    torch.manual_seed(1)
    b, h, g, rows, keys, d = shape
    sides = [(rows, h), (keys, g), (keys, g)]
    q, k, v = (torch.randn(b, l, n, d).transpose(1, 2).requires_grad_() for l, n in sides)
    bias = None
    if biased:
        bias = torch.randn(b, 1, rows, keys)
        bias[torch.rand(bias.shape) < 0.3] = -torch.inf
        bias[0, 0, 2] = -torch.inf  # who sees nothing gets zeros
    look = nn.Identity()
    with fast(look):
        y = functions.attend(look, q, k, v, bias, 0.3, False)
    assert y is not None
    assert functions.attend(look, q, k, v, bias, 0.3, False) is None
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, (q, k, v), grad)
    doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wide = [doubles[0], *(x.repeat_interleave(h // g, 1) for x in doubles[1:])]
    scores = wide[0] @ wide[1].mT * 0.3 + (0 if bias is None else bias.double())
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    y64 = weights @ wide[2]
    wanted = torch.autograd.grad(y64, doubles, grad.double())
    assert far(y, y64) < 2e-6
    assert max(far(one, two) for one, two in zip(found, wanted, strict=True)) < 5e-6


@needs
def test_what_is_not_a_number_is_left_to_those_who_know_where_it_may_go():
    q, k, v = (torch.randn(1, 2, 60, 16, requires_grad=True) for _ in range(3))
    look = nn.Identity()
    with fast(look):
        assert functions.attend(look, q, k, v, None, 0.25, True) is not None
    bad = v.detach().clone()
    bad[0, 0, 59] = torch.nan
    bad.requires_grad_()
    with fast(look):
        assert functions.attend(look, q, k, bad, None, 0.25, True) is None
        y = attend(q, k, bad, mask=Causal(), watch=look)
    assert y[0, :, :59].isfinite().all()
    assert y[0, 0, 59].isnan().all()


def small(**parts) -> GPT:
    """Make a small model that is sure of itself."""
    torch.manual_seed(2)
    names = {"norm", "feed_forward", "kv_heads", "order", "bias"}
    inside = {name: value for name, value in parts.items() if name in names}
    outside = {name: value for name, value in parts.items() if name not in names}
    block = BlockConfig(48, 4, 96, **inside)
    model = GPT(GPTConfig(97, 3, block, max_length=256, **outside)).eval()
    for p in model.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=0.3)
    return model


MODELS = [
    {},
    {"norm": "rms", "feed_forward": "swiglu", "position": "rotary", "bias": False, "tie": False},
    {"kv_heads": 2, "position": "rotary", "window": 9},
    {"kv_heads": 1, "position": "alibi", "norm": "layer_nobias", "feed_forward": "geglu_tanh"},
    {"position": "kerple_log", "feed_forward": "relu"},
]


@needs
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("made", MODELS, ids=str)
@torch.inference_mode()
def test_a_step_in_writing_equals_reading_all(made, rows, columns, monkeypatch):
    model, plain = small(**made), small(**made).double()
    if columns:
        for m in model.modules():
            if isinstance(m, nn.Linear):
                m.weight.data = m.weight.data.t().contiguous().t()
    ids = torch.randint(3, 97, (rows, 30))
    lengths = torch.tensor([11, 7, 11, 9, 3])[:rows]
    state = model.start(ids[:, :11], lengths, capacity=20)
    for step in range(16):
        place = (lengths - 1 + step).view(-1, 1)
        with fast(model), no_plain_block(monkeypatch):
            logits, state = model.step(ids.gather(1, place), state)
        for row in range(rows):
            text = ids[row : row + 1, : int(place[row]) + 1]
            wanted = plain(text)[0, -1]
            assert far(logits[row, 0], wanted) < 1e-5


@needs
@torch.inference_mode()
def test_what_stands_at_a_masked_place_never_matters_in_writing(monkeypatch):
    model, lengths = small(position="rotary"), torch.tensor([11, 7])
    ids, found = torch.randint(3, 97, (2, 11)), []
    for spoilt in (0.0, torch.nan, torch.inf):
        state = model.start(ids, lengths, capacity=20)
        hidden = ~state.seen[:, :, :, None]
        for cache in state.caches:
            for part in (cache.k, cache.v):
                part[:, :, : cache.length].masked_fill_(hidden, spoilt)
        with fast(model), no_plain_block(monkeypatch):
            found.append(model.step(ids.gather(1, lengths.view(-1, 1) - 1), state)[0])
    assert hidden.any() and found[0].isfinite().all()
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@needs
@pytest.mark.parametrize("length", [5, 64, 65, 200])
@torch.inference_mode()
def test_a_memory_of_any_length_is_read_as_pytorch_reads_it(length, monkeypatch):
    torch.manual_seed(2)
    model = Transformer(TransformerConfig(97, 97, 1, 2, BlockConfig(48, 4, 96))).eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.4)  # far from looking everywhere alike
    source, ids = torch.randint(3, 97, (2, length)), torch.randint(3, 97, (2, 6))
    lengths = torch.tensor([length, length // 2])
    wanted = copy.deepcopy(model).double()(source, ids, lengths)
    with fast(model):
        state = model.start(source, lengths, capacity=6)
    for step in range(6):
        with fast(model), no_plain_block(monkeypatch):
            logits, state = model.step(ids[:, step : step + 1], state)
        assert far(logits[:, 0], wanted[:, step]) < 1e-5


@needs
def test_watching_changes_no_bit_and_sees_true_weights():
    model = small(position="rotary", norm="rms", feed_forward="swiglu")
    ids = torch.randint(3, 97, (2, 6))
    lengths = torch.tensor([6, 4])
    with fast(model):
        plain = greedy(model, ids, lengths, max_length=9, eos=-1, begin=ids[:, -1])
    with fast(model), watch(model) as seen:
        watched = greedy(model, ids, lengths, max_length=9, eos=-1, begin=ids[:, -1])
    assert plain == watched
    last = seen["blocks.1.attention"]
    weights = last[:, :, -1]
    assert torch.allclose(weights.sum(-1), torch.ones(2, 4), atol=1e-5)
    with watch(model) as without:
        greedy(model, ids, lengths, max_length=9, eos=-1, begin=ids[:, -1])
    assert torch.allclose(without["blocks.1.attention"][:, :, -1], weights, atol=1e-5)


@needs
def test_who_listens_to_a_part_is_heard():
    model, heard = small(), []
    model.blocks[1].feed_forward.register_forward_hook(lambda *_: heard.append(1))
    ids = torch.randint(3, 97, (1, 4))
    with fast(model):
        greedy(model, ids, max_length=3, eos=-1, begin=torch.tensor([5]))
    assert len(heard) == 4


@needs
def test_the_likeliest_token_is_the_first_of_the_largest():
    x = torch.randn(3, 9001)
    x[1, 8999] = x[1, 40] = 7.0
    x[2, :5000] = -torch.inf
    assert native.argmax(x) is None
    with fast(nn.Identity()):
        check_likeliest(x)


def check_likeliest(x: Tensor) -> None:
    """Compare with PyTorch."""
    token, likely = native.argmax(x)
    assert token.tolist() == x.argmax(1).tolist()
    assert token[1] == 40
    wanted = x.double().log_softmax(1).gather(1, token.unsqueeze(1)).squeeze(1)
    assert torch.allclose(likely.double(), wanted, atol=1e-5)
    for bad in (torch.nan, torch.inf):
        y = x.clone()
        y[0, 3] = bad
        assert native.argmax(y)[1][0].isnan()
    assert native.argmax(torch.full((1, 50), -torch.inf))[1].isnan().all()


@needs
def test_adamw_moves_as_pytorchs_does():
    torch.manual_seed(3)
    one = nn.Sequential(nn.Linear(200, 301), nn.LayerNorm(301), nn.Linear(301, 10))
    other = copy.deepcopy(one)
    ours = build_optimiser(one, lr=1e-2, weight_decay=0.1)
    named = dict(zip(map(id, one.parameters()), other.parameters(), strict=True))
    groups = [{**g, "params": [named[id(p)] for p in g["params"]]} for g in ours.param_groups]
    theirs = torch.optim.AdamW(groups)
    for _ in range(20):
        x = torch.randn(8, 200)
        for model, optimiser in ((one, ours), (other, theirs)):
            optimiser.zero_grad()
            model(x).square().sum().backward()
            with fast(model):
                optimiser.step()
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert max(far(p, q) for p, q in pairs) < 1e-5
    assert all(float(ours.state[p]["step"]) == 20 for p in one.parameters())


@needs
def test_the_length_of_gradients():
    tensors = [torch.randn(40000), torch.randn(3, 7), torch.randn(())]
    wanted = math.sqrt(sum(float(x.double().square().sum()) for x in tensors))
    with fast(nn.Identity()):
        assert native.l2_norm(tensors) == pytest.approx(wanted, rel=1e-6)
        assert math.isnan(native.l2_norm([torch.tensor([1.0, torch.nan])]))


ASK = "from regard import native; print(native.library() is not None)"


def ask(**environment: str) -> str:
    """Ask another process whether it has kernels."""
    own = {**os.environ, **environment}
    found = subprocess.run([sys.executable, "-c", ASK], env=own, capture_output=True, text=True)
    assert found.stderr == ""
    return found.stdout.strip()


@needs
def test_kernels_are_compiled_once_into_a_folder_of_the_users(tmp_path: Path):
    place = tmp_path / "cache"
    assert ask(REGARD_CACHE=str(place)) == "True"
    (made,) = place.iterdir()
    assert made.suffix == ".so"
    assert place.stat().st_mode & 0o777 == 0o700
    before = made.stat().st_mtime_ns
    assert ask(REGARD_CACHE=str(place)) == "True"
    assert made.stat().st_mtime_ns == before


def compiler(folder: Path, script: str) -> dict[str, str]:
    """Write a compiler that notes each call, and return the environment in which it is the one."""
    folder.mkdir()
    (folder / "gcc").write_text(f"#!/bin/sh\necho x >> {folder}/calls\n{script}\n")
    (folder / "gcc").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "REGARD_CACHE": str(folder / "cache")}


def calls(folder: Path) -> int:
    return len((folder / "calls").read_text().split())


@needs
def test_processes_that_start_together_compile_once(tmp_path: Path, monkeypatch):
    for name, value in compiler(tmp_path / "own", f"sleep 0.3; {copying()}").items():
        monkeypatch.setenv(name, value)
    fork = multiprocessing.get_context("fork")
    asked = [fork.Process(target=build.built) for _ in range(4)]
    for one in asked:
        one.start()
    for one in asked:
        one.join()
        assert one.exitcode == 0
    once = len(list(build.SOURCE_FOLDER.glob("*.c"))) + 1  # and the link
    assert calls(tmp_path / "own") == once
    (made,) = (tmp_path / "own" / "cache").iterdir()
    assert made.suffix == ".so"


def test_a_compiler_that_failed_is_not_asked_again(tmp_path: Path, monkeypatch):
    own = tmp_path / "own"
    for name, value in compiler(own, "echo cannot >&2; exit 1").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(subprocess.CalledProcessError):
        build.built()
    before = calls(own)
    with pytest.raises(UsageError, match="failed earlier: cannot"):
        build.built()
    assert calls(own) == before
    (kept,) = (own / "cache").iterdir()
    os.utime(kept, (0, 0))  # long ago
    with pytest.raises(subprocess.CalledProcessError):
        build.built()
    os.utime(own / "gcc", (1, 1))  # another compiler
    with pytest.raises(subprocess.CalledProcessError):
        build.built()


def test_a_compiler_whose_machine_failed_is_asked_again(tmp_path: Path, monkeypatch):
    said = "internal compiler error: File size limit exceeded signal terminated program cc1"
    for name, value in compiler(tmp_path / "own", f"echo '{said}' >&2; exit 4").items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        with pytest.raises(subprocess.CalledProcessError):
            build.built()


def test_a_compiler_that_took_too_long_is_asked_again(tmp_path: Path, monkeypatch):
    own = tmp_path / "own"
    for name, value in compiler(own, "exec sleep 60").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(build, "COMPILE_SECONDS", 0.2)
    for _ in range(2):
        with pytest.raises(subprocess.TimeoutExpired):
            build.built()
    assert not list((own / "cache").iterdir())


@needs
def test_where_there_is_a_compiler_kernels_are_on():
    """Else all tests of kernels would be left out without a word."""
    assert native.status().enabled, native.status()


def reason(patch: pytest.MonkeyPatch, **environment: str) -> str:
    """Return why there would be no kernels with this environment."""
    for name, value in environment.items():
        patch.setenv(name, value)
    made, why = build.load.__wrapped__()
    assert (made is None) == bool(why)
    return why


def test_why_kernels_are_off_is_said(tmp_path: Path, monkeypatch):
    own = compiler(tmp_path / "own", "echo hm >&2; echo 'act.h:3: error: cannot' >&2; exit 1")
    said = "gcc failed: act.h:3: error: cannot"
    assert reason(monkeypatch, **own).endswith(said)
    again = reason(monkeypatch)
    assert said.replace("failed", "failed earlier") in again and "asked again a day after" in again
    (tmp_path / "file").write_text("")
    assert "file" in reason(monkeypatch, REGARD_CACHE=str(tmp_path / "file"))
    assert "no C compiler (gcc, cc, clang)" in reason(monkeypatch, PATH="")
    assert reason(monkeypatch, REGARD_NATIVE="0") == "REGARD_NATIVE=0 switches them off"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "made for Linux" in reason(monkeypatch, REGARD_NATIVE="1")
    assert str(native.Status(False, "it is so")).endswith("PyTorch computes instead: it is so")
    assert str(native.Status(True)) == "C kernels: on"
    assert ask(REGARD_NATIVE="0") == "False"


GLOBAL = """
import ctypes, torch
before = hasattr(ctypes.CDLL(None), "sgemm_")
from regard import native
assert native.library() is not None
print(hasattr(ctypes.CDLL(None), "sgemm_") == before)
"""


@needs
def test_what_is_loaded_later_does_not_take_pytorchs_products_for_its_own():
    asked = subprocess.run([sys.executable, "-c", GLOBAL], capture_output=True, text=True)
    assert (asked.stdout, asked.stderr) == ("True\n", "")


def copying() -> str:
    """Return the script of a compiler that has compiled the kernels already."""
    return f'for last; do :; done; cp {build.built()} "$last"'


@needs
def test_kernels_that_were_damaged_are_compiled_again(tmp_path: Path, monkeypatch):
    for name, value in compiler(tmp_path / "own", copying()).items():
        monkeypatch.setenv(name, value)
    made = build.built()
    whole, once = made.read_bytes(), calls(tmp_path / "own")
    for turn, damaged in enumerate((whole[:5000], b"", whole[:-9] + b"?" + whole[-8:]), 2):
        made.write_bytes(damaged)
        made = build.built()
        assert made.read_bytes() == whole and calls(tmp_path / "own") == turn * once
        assert list((tmp_path / "own" / "cache").iterdir()) == [made]
    assert build.built() == made and calls(tmp_path / "own") == turn * once


@needs
def test_a_cache_that_others_may_write_to_is_refused(tmp_path: Path, monkeypatch):
    for name, value in compiler(tmp_path / "own", copying()).items():
        monkeypatch.setenv(name, value)
    place = tmp_path / "own" / "cache"
    place.mkdir()
    for mode in (0o775, 0o757, 0o777):
        place.chmod(mode)
        with pytest.raises(UsageError) as refused:
            build.built()
        remedy = f"run chmod go-w {place}"
        assert str(refused.value) == f"others may write to {place} (mode {mode:o}); {remedy}"
        assert not list(place.iterdir())
    assert remedy in reason(monkeypatch)
    place.chmod(0o755)
    made = build.built()
    made.chmod(0o666)
    with pytest.raises(UsageError, match=f"others may write to {made}"):
        build.built()


@needs
def test_a_cache_of_somebody_else_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(UsageError, match="belongs to user .*, not to user 12345"):
        build.built()


def test_whoever_makes_the_cache_makes_it_private(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "new" / "cache"))
    before = os.umask(0o002)
    try:
        write_atomically(tmp_path / "new" / "cache" / "stores" / "part", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "new" / "cache").stat().st_mode & 0o777 == 0o700


@needs
@pytest.mark.parametrize("place", ["around_attention.norm.weight", "attention.qkv.weight"])
@pytest.mark.parametrize("size", [1e6, 1e9, 1e13, 1e17])
def test_scores_that_are_nothing_but_rounding_are_left_to_pytorch(size: float, place: str):
    """Gradients of such are NaN in PyTorch, and finite but far from fp64 in a kernel."""
    torch.manual_seed(3)
    model = GPT(GPTConfig(20, 2, BlockConfig(32, 4, 64, dropout=0.0), max_length=64)).train()
    weight = model.blocks[1].get_parameter(place)
    with torch.no_grad():
        weight.view(-1)[:8] = size
    ids, found = torch.randint(0, 20, (2, 17)), []
    for on in (True, False):
        model.zero_grad()
        with fast(model, on):
            model(ids).square().mean().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(*found, strict=True))


def of_any_shape(rng: random.Random) -> tuple[GPT | Transformer, Tensor]:
    """A model of sizes that fit no vector, some matrices laid by columns, and ids to read."""
    kv_heads, width = rng.choice([1, 2]), rng.choice([5, 8, 16, 34])
    block = BlockConfig(
        width=rng.choice([7, 24, 33, 64]),
        heads=kv_heads * rng.choice([1, 2, 3]),
        kv_heads=kv_heads,
        head_width=2 * width,
        ffn_width=rng.choice([9, 16, 40, 270]),
        norm=rng.choice(["rms", "layer"]),
        feed_forward=rng.choice(["relu", "gelu", "gelu_tanh", "swiglu"]),
        bias=rng.random() < 0.5,
        dropout=0.0,
    )
    vocab, position = rng.choice([11, 40, 300]), rng.choice(["none", "rotary", "alibi", "learned"])
    depth, torch_seed = rng.choice([1, 3]), rng.randrange(1000)
    torch.manual_seed(torch_seed)
    if rng.random() < 0.5:
        model = GPT(GPTConfig(vocab, depth, block, position=position, max_length=200))
    else:
        config = TransformerConfig(vocab, vocab, 1, depth, block, position=position, max_length=200)
        model = Transformer(config)
    for part in model.modules():
        if isinstance(part, nn.Linear) and rng.random() < 0.6:
            part.weight = nn.Parameter(part.weight.detach().t().contiguous().t())
    return model.eval(), torch.randint(0, vocab, (rng.choice([1, 2, 5, 17]), 90))


@needs
@pytest.mark.parametrize("seed", range(16))
def test_decoding_with_any_shape_gives_what_pytorch_gives(seed: int, monkeypatch):
    rng = random.Random(seed)
    model, ids = of_any_shape(rng)
    lengths = torch.tensor([rng.randint(1, 70) for _ in ids])
    lengths[0] = read = int(lengths.max())
    sizes, taken, logits = rng.choices([1, 1, 2, 5], k=5), [], []
    capacity = sum(sizes) + rng.choice([0, 70])
    decode = PackedStack.__call__

    def noted(*words):
        taken.append(y := decode(*words))
        return y

    monkeypatch.setattr(PackedStack, "__call__", noted)
    for on in (True, False):
        with torch.no_grad(), fast(model, on, frozen=rng.random() < 0.5):
            state, at = model.start(ids[:, :read], lengths, capacity=capacity), 0
            for size in sizes:
                logits.append(model.step(ids[:, at : at + size], state)[0])
                at += size
    assert any(y is not None for y in taken)
    for one, other in zip(logits[: len(sizes)], logits[len(sizes) :], strict=True):
        assert far(one, other) < 1e-4


DECODE = """
import torch
from tests.native.test_native import *
torch.set_num_threads(2)
model = GPT(GPTConfig(3000, 2, BlockConfig(64, 4, 128, dropout=0.0), max_length=64)).eval()
for part in model.modules():
    if isinstance(part, nn.Linear):
        part.weight = nn.Parameter(part.weight.detach().t().contiguous().t())
with torch.no_grad(), fast(model, frozen=True):
    state = model.start(torch.ones(16, 5, dtype=torch.long), capacity=9)
    for _ in range(3):
        model.step(torch.ones(16, 1, dtype=torch.long), state)
"""


@needs
def test_threads_with_a_small_stack_decode():
    """With less than that NumPy, and soon Python itself, do not start."""
    paths = f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}"
    own = {**os.environ, "OMP_STACKSIZE": "16k", "OMP_NUM_THREADS": "2", "PYTHONPATH": paths}
    limited = ["bash", "-c", 'ulimit -s 128; exec "$@"', "bash", sys.executable, "-c", DECODE]
    found = subprocess.run(limited, env=own, capture_output=True, text=True)
    assert found.returncode == 0, (found.returncode, found.stderr[-500:])
