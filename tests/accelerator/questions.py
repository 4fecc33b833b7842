"""What every family and task is asked on an accelerator: test_accelerator.py runs this file.

A device that is registered changes how autograd uses threads, so that a process cannot fork any
more; these questions have a process of their own.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from regard.attention.attend import attend
from regard.attention.kernels import deferred_checks
from regard.attention.masks import Causal, Document, Padding, Prefix, Sliding
from regard.cli import main
from regard.layers.block import BlockConfig
from regard.models.gpt import GPT, GPTConfig
from regard.training import fit
from regard.training.optim import build_optimiser
from regard.training.step import LoopSettings, Trainable, one_step
from tests.models import test_vision as vision
from tests.models.laws import close
from tests.models.test_models import KINDS, ask, build, real, sentences
from tests.pretend import accelerator, host_reads
from tests.tasks.test_tasks import case, home  # noqa: F401


class Words(Trainable):
    """Random tokens, the next of which is to be predicted."""

    def __init__(self, device: str):
        self.device = device

    def batch(self, n: int) -> torch.Tensor:
        return torch.randint(23, (3, 9), generator=torch.Generator().manual_seed(1))

    def count(self, batch: torch.Tensor) -> tuple[int, int]:
        return batch.numel(), batch.numel()

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        logits = model(batch.to(self.device))[:, :-1].flatten(0, 1)
        right = batch[:, 1:].flatten().to(self.device)
        return nn.functional.cross_entropy(logits, right, reduction="sum")

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"better": 0.0}


def gpt(depth: int, position: str = "rotary", dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    block = BlockConfig(width=16, heads=4, ffn_width=24, dropout=dropout)
    return GPT(GPTConfig(23, depth, block, position=position, max_length=32))


def steps(model: nn.Module, device: str, count: int = 3, **more) -> list[float]:
    settings = LoopSettings(device=device, batches=2, **more)
    optimiser = build_optimiser(model, lr=0.01)
    return [one_step(model, Words(device), settings, optimiser, n, 0.01)[0] for n in range(count)]


@pytest.mark.parametrize("position", ["rotary", "sinusoidal", "learned", "alibi", "t5", "xl"])
def test_losses_are_those_of_the_cpu(position):
    right = steps(gpt(2, position), "cpu")
    with accelerator() as device:
        ours = steps(gpt(2, position).to(device), str(device))
    assert ours == pytest.approx(right, rel=1e-6)
    assert right[0] - right[-1] > 0.01


@pytest.mark.parametrize("depth", [1, 6])
@pytest.mark.parametrize("position", ["rotary", "learned", "alibi", "xl"])
def test_a_step_waits_twice_whatever_the_depth(depth, position):
    with accelerator() as device:
        model = gpt(depth, position).to(device)
        steps(model, str(device), 1)
        with host_reads() as reads:
            steps(model, str(device), 1)
    assert reads.count <= 2, reads.where


def test_what_waits_is_counted():
    with accelerator() as device, host_reads() as reads:
        x = torch.ones(3, device=device)
        assert bool((x > 0).all()) and x.tolist() == [1.0, 1.0, 1.0]
    assert reads.count >= 2


def test_tensors_of_two_devices_are_refused():
    with accelerator() as device, pytest.raises(RuntimeError, match="pretend"):
        torch.ones(3, device=device) + torch.ones(3)


@pytest.mark.parametrize(
    "mask",
    [
        lambda put: Causal() & Padding(put(torch.tensor([[True, True, False]]))),
        lambda put: Sliding(2) & Document(put(torch.tensor([[0, 0, 1]]))),
        lambda put: Prefix(put(torch.tensor([2]))),
        lambda put: Causal() & put(torch.tensor([[True, False, True]])),
    ],
)
def test_masks_that_count_up_follow_the_others_to_their_device(mask):
    q = torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(1))
    right = attend(q, q, q, mask=mask(lambda x: x))
    with accelerator() as device:
        ours = attend(*[q.to(device)] * 3, mask=mask(lambda x: x.to(device)))
    torch.testing.assert_close(ours.host, right)


def test_a_nan_behind_a_mask_is_noticed_when_checks_are_deferred():
    q = torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(1))
    spoilt = q.clone()
    spoilt[0, 0, 2] = torch.nan
    keep = torch.tensor([[True, True, False]])
    with accelerator() as device:
        q, spoilt, keep = q.to(device), spoilt.to(device), keep.to(device)
        with deferred_checks() as checks:
            attend(q, q, q, mask=Padding(keep))
        assert checks.total(q).isfinite()
        with deferred_checks() as checks:
            attend(q, spoilt, spoilt, mask=Padding(keep))
        assert not checks.total(q).isfinite()


def test_a_step_that_was_spoilt_behind_a_mask_is_computed_again():
    """The NaN of a masked token must not cost the step."""

    class Spoilt(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            x = x @ self.weight
            keep = torch.tensor([[True, True, False]], device=x.device)
            spoilt = x.masked_fill(~keep[..., None], torch.nan)[:, None]
            return attend(x[:, None], spoilt, spoilt, mask=Padding(keep))[:, 0, :2]

    class Task(Words):
        def batch(self, n):
            return torch.ones(1, 3, 4)

        def loss(self, model, batch):
            return model(batch.to(self.device)).square().sum()

    for place in ("cpu", "accelerator"):
        with accelerator() as device:
            where = "cpu" if place == "cpu" else str(device)
            model = Spoilt().to(where)
            optimiser = build_optimiser(model, lr=0.01)
            loss, norm, _, finite = one_step(
                model, Task(where), LoopSettings(device=where), optimiser, 0, 0.01
            )
        assert finite and loss > 0 and norm > 0


@pytest.mark.parametrize("name, kind", KINDS, ids=[" ".join(pair) for pair in KINDS])
def test_every_family_computes_what_the_cpu_does_with_its_gradients(name, kind):
    """No tensor is left behind on the CPU, and but for batch norm no number is read."""
    model = build(name, kind)
    texts, lengths = sentences(model, [3, 7, 5]), [3, 7, 5]

    def learn(device: str | torch.device) -> torch.Tensor:
        rows = torch.tensor(lengths).to(device)
        out = ask(model, [text.to(device) for text in texts], rows)
        said = torch.cat([real(out, i, n).flatten() for i, n in enumerate(lengths)])
        said.square().mean().backward()
        return said.detach()

    right = learn("cpu")
    named = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    with accelerator() as device:
        model.to(device)
        with host_reads() as reads, deferred_checks():
            ours = learn(device)
        assert reads.count <= (name == "conformer"), reads.where
        close(ours.cpu(), right)
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == (named[name] is None)
            if parameter.grad is not None:
                close(parameter.grad.cpu(), named[name])


looking = vision.model  # a fixture: a model of each family that reads images


def test_every_family_that_looks_computes_what_the_cpu_does(looking):
    """No tensor is left behind on the CPU; numbers are read for a new size of images only."""
    model, some = looking, vision.images(looking)
    right = model(some)
    right.square().mean().backward()
    named = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    with accelerator() as device:
        model.to(device)
        with torch.no_grad():
            model(some.to(device))
        with host_reads() as reads, deferred_checks():
            ours = model(some.to(device))
            ours.square().mean().backward()
        assert not reads.count, reads.where
        close(ours.detach().cpu(), right.detach())
        for name, parameter in model.named_parameters():
            if named[name] is not None:
                close(parameter.grad.cpu(), named[name])


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def test_an_accelerator_trains_it_as_the_cpu_does(case, home, capsys, monkeypatch):  # noqa: F811
    """It learns, validates, publishes and runs there, and a step waits for it twice at most."""
    name, asked, _, words = case
    runs = [home / name / place for place in ("cpu", "device")]
    words = [*words, "--quiet", "dropout=0"]
    assert main([*words, f"out={runs[0]}"]) == 0
    waits: list[list[str]] = []

    def counted(*given):
        with host_reads() as reads:
            done = step(*given)
        waits.append(reads.where)
        return done

    step = fit.one_step
    monkeypatch.setattr(fit, "one_step", counted)
    with accelerator() as device:
        assert main([*words, f"out={runs[1]}", f"device={device}"]) == 0
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-6)
    assert max(map(len, waits)) <= 2, waits
    said = asked.asks(home / name)
    capsys.readouterr()
    assert main(["run", str(runs[0]), said]) == main(["run", str(runs[1]), said]) == 0
