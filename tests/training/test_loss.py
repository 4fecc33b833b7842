"""Laws of the loss: equal to torch's own, without ever holding all logits."""

import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from regard.data.parallel import PairBatch
from regard.layers.block import BlockConfig
from regard.models.transformer import Transformer, TransformerConfig
from regard.training import loss as losses
from regard.training.loss import (
    linear_cross_entropy,
    r_drop_loss,
    reference_cross_entropy,
    sequence_loss,
)
from regard.training.step import LoopSettings, Trainable, one_step


def numbers(rows: int, vocab: int, width: int = 6, seed: int = 0, bias: bool = True):
    """Return hidden, weight, bias and targets in double precision."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, dtype=torch.float64, generator=generator)
    weight = torch.randn(vocab, width, dtype=torch.float64, generator=generator)
    bent = torch.randn(vocab, dtype=torch.float64, generator=generator) if bias else None
    targets = torch.randint(vocab, (rows,), generator=generator)
    return hidden, weight, bent, targets


def gradients(function, tensors, scale: float = 1.0):
    """Return a value and its gradient by each tensor."""
    leaves = [None if t is None else t.clone().requires_grad_() for t in tensors]
    value = function(*leaves)
    (scale * value).backward()
    return [value.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]


def assert_same(ours, theirs, tolerance: float = 1e-10):
    assert len(ours) == len(theirs)
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=tolerance)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize(("rows", "chunk"), [(1, 256), (7, 3), (8, 4), (23, 7), (5, 1)])
def test_equals_cross_entropy(monkeypatch, rows, chunk, smoothing, bias):
    monkeypatch.setattr(losses, "LOGIT_ROWS", chunk)
    hidden, weight, bent, targets = numbers(rows, 11, bias=bias)
    targets[::3] = -1  # padding
    ours = gradients(
        lambda h, w, b: linear_cross_entropy(h, w, targets, bias=b, smoothing=smoothing),
        (hidden, weight, bent),
        scale=0.37,
    )
    theirs = gradients(
        lambda h, w, b: F.cross_entropy(
            F.linear(h, w, b),
            targets,
            reduction="sum",
            label_smoothing=smoothing,
            ignore_index=-1,
        ),
        (hidden, weight, bent),
        scale=0.37,
    )
    assert_same(ours, theirs)


def test_more_rows_than_a_chunk_and_another_word_for_padding():
    hidden, weight, bent, targets = numbers(2 * losses.LOGIT_ROWS + 5, 17)
    ours, theirs = (
        gradients(
            lambda h, w, b, f=function: f(h, w, targets, bias=b, smoothing=0.1, ignore=3),
            (hidden, weight, bent),
        )
        for function in (linear_cross_entropy, reference_cross_entropy)
    )
    assert_same(ours, theirs)


def test_a_row_that_is_ignored_gets_no_gradient_and_matters_not():
    hidden, weight, bent, targets = numbers(9, 11)
    targets[4] = -1
    spoilt = hidden.clone()
    spoilt[4] = 1e3
    one, two = (
        gradients(lambda h, w, b: linear_cross_entropy(h, w, targets, bias=b), (x, weight, bent))
        for x in (hidden, spoilt)
    )
    assert_same(one, two)
    assert torch.equal(one[1][4], torch.zeros(6, dtype=torch.float64))


def test_nothing_but_padding_costs_nothing():
    hidden, weight, bent, targets = numbers(4, 11)
    answer = gradients(
        lambda h, w, b: linear_cross_entropy(h, w, targets.fill_(-1), bias=b, smoothing=0.1),
        (hidden, weight, bent),
    )
    assert all(not tensor.any() for tensor in answer)


def test_large_logits_do_not_overflow():
    hidden, weight, _, targets = numbers(9, 11)
    ours, theirs = (
        gradients(
            lambda h, w, f=function: f(h, w, targets, smoothing=0.1),
            ((500 * hidden).float(), weight.float()),
        )
        for function in (linear_cross_entropy, reference_cross_entropy)
    )
    assert all(tensor.isfinite().all() for tensor in ours)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-3)


def test_without_gradients_none_are_made():
    hidden, weight, _, targets = numbers(9, 11)
    weight.requires_grad_()
    made = []
    keep = torch.zeros_like

    def noted(*arguments, **options):
        made.append(arguments)
        return keep(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(torch, "zeros_like", noted)
        value = linear_cross_entropy(hidden, weight, targets)
        expected = reference_cross_entropy(hidden, weight, targets)
    assert not made  # the gradient of the weight would be most of the work
    assert float(value) == pytest.approx(float(expected), abs=1e-10)


def r_drop_by_hand(one, two, weight, bias, targets, alpha, smoothing):
    """The formula of Liang et al. 2021, each row counted once."""
    logs = [F.linear(h, weight, bias).log_softmax(-1) for h in (one, two)]
    entropies = [
        F.cross_entropy(log, targets, reduction="sum", label_smoothing=smoothing) for log in logs
    ]
    distances = [
        F.kl_div(logs[1], logs[0], reduction="sum", log_target=True),
        F.kl_div(logs[0], logs[1], reduction="sum", log_target=True),
    ]
    return sum(entropies) / 2 + alpha / 2 * sum(distances) / 2


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("alpha", "smoothing"), [(5.0, 0.1), (0.7, 0.0), (0.0, 0.1)])
@pytest.mark.parametrize(("rows", "chunk"), [(9, 256), (9, 4)])
def test_r_drop_equals_its_formula(monkeypatch, rows, chunk, alpha, smoothing, bias):
    monkeypatch.setattr(losses, "LOGIT_ROWS", chunk)
    one, weight, bent, targets = numbers(rows, 11, bias=bias)
    two = one + 0.3 * numbers(rows, 11, seed=1)[0]
    ours = gradients(
        lambda a, b, w, c: r_drop_loss(a, b, w, targets, alpha, bias=c, smoothing=smoothing),
        (one, two, weight, bent),
        scale=0.37,
    )
    theirs = gradients(
        lambda a, b, w, c: r_drop_by_hand(a, b, w, c, targets, alpha, smoothing),
        (one, two, weight, bent),
        scale=0.37,
    )
    assert_same(ours, theirs)


def test_r_drop_of_twice_the_same_is_the_plain_loss():
    one, weight, bent, targets = numbers(9, 11)
    twice = r_drop_loss(one, one, weight, targets, 5.0, bias=bent, smoothing=0.1)
    once = linear_cross_entropy(one, weight, targets, bias=bent, smoothing=0.1)
    torch.testing.assert_close(twice, once, rtol=0, atol=1e-10)


LIMITED = """
import resource, torch
from regard.training.loss import r_drop_loss, linear_cross_entropy
torch.set_num_threads(1)
rows, vocab, width = 4000, 20_000, 8
h = torch.randn(rows, width, requires_grad=True)
w = torch.randn(vocab, width, requires_grad=True)
y = torch.randint(vocab, (rows,))
used = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]
for loss in (
    lambda: linear_cross_entropy(h, w, y, smoothing=0.1),
    lambda: r_drop_loss(h, h * 1.01, w, y, 5.0, smoothing=0.1),
):
    loss().backward()
    used.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(used[1] - used[0], used[2] - used[0])
"""


def test_never_holds_all_logits():
    """They alone are 320 MB here; torch's own loss holds them and their gradient."""
    found = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True
    )
    plain, twice = (int(number) / 1024 for number in found.stdout.split())
    assert plain < 80
    assert twice < 310  # a few chunks of both passes


class Table(Trainable):
    """A task of prepared batches, for the loop."""

    def __init__(self, batches):
        self.batches = batches

    def batch(self, n):
        return self.batches[n]

    def count(self, batch):
        return batch.tokens, batch.read

    def loss(self, model, batch):
        return sequence_loss(model, batch, 0.1, 0.0)

    def evaluate(self, model):
        return {"better": 0.0}


def some_batch(first: int, last: int, length: int) -> PairBatch:
    """Return rows first to last of one fixed batch, padded to a length of target."""
    generator = torch.Generator().manual_seed(3)
    source = torch.randint(4, 30, (6, 7), generator=generator)
    target = torch.randint(4, 30, (6, 9), generator=generator)
    lengths = torch.tensor([9, 2, 5, 3, 4, 9])
    ends = torch.arange(9).unsqueeze(0) >= lengths.unsqueeze(1)
    reads = torch.cat([torch.ones(6, 1, dtype=torch.long), target[:, :-1]], 1)
    writes = target.masked_fill(ends, -1)
    rows = slice(first, last)
    tokens = int(lengths[rows].sum())
    return PairBatch(
        source[rows],
        torch.full((last - first,), 7),
        reads[rows, :length],
        writes[rows, :length],
        tokens,
        tokens + 7 * (last - first),
    )


def gradients_of_a_step(batches, count: int) -> tuple[float, list[torch.Tensor]]:
    torch.manual_seed(0)
    block = BlockConfig(width=16, heads=2, ffn_width=32, dropout=0.0)
    config = TransformerConfig(30, 30, encoder_depth=1, decoder_depth=1, block=block)
    model = Transformer(config).double().train()
    settings = LoopSettings(batches=count, clip=0.0)
    seen = []

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            seen.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)

    optimiser = Watched(model.parameters(), lr=0.0)
    loss, _, _, sound = one_step(model, Table(batches), settings, optimiser, 0, 0.0)
    assert sound
    return loss, seen


def test_two_unlike_halves_weigh_their_tokens_like_one_batch():
    """Halves of 16 and 16 tokens would hide a mean of means, so these have 11 and 21."""
    loss, whole = gradients_of_a_step([some_batch(0, 6, 9)], 1)
    parts, halves = gradients_of_a_step([some_batch(0, 2, 9), some_batch(2, 6, 9)], 2)
    assert parts == pytest.approx(loss, abs=1e-6)
    assert_same(halves, whole, 1e-12)


def test_padding_and_its_amount_never_matter():
    tight = gradients_of_a_step([some_batch(1, 5, 5)], 1)
    loose = gradients_of_a_step([some_batch(1, 5, 9)], 1)
    assert loose[0] == pytest.approx(tight[0], abs=1e-12)
    assert_same(loose[1], tight[1], 1e-12)
