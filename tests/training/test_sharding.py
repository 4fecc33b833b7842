"""A model whose weights are sharded over processes learns as one that is whole."""

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import regard
from regard.files import sha256
from regard.models import family
from regard.training import distributed, sharding
from regard.training.checkpoint import load_checkpoint
from tests.models import test_vision as vision
from tests.models.test_models import KINDS, ask, build, real, sentences
from tests.training.test_distributed import free_port, together
from tests.training.test_faults import begin, is_gone, wait_for_step

LENGTHS = ([3, 7, 5], [6, 2])  # of the texts that each rank reads


def text_loss(model: nn.Module, lengths: list[int]) -> Tensor:
    torch.manual_seed(sum(lengths))
    given = sentences(model, lengths)
    torch.manual_seed(sum(lengths))
    out = ask(model, given, torch.tensor(lengths))
    return torch.stack([real(out, i, n).square().sum() for i, n in enumerate(lengths)]).sum()


def image_loss(model: nn.Module, images: Tensor) -> Tensor:
    torch.manual_seed(len(images))
    return model(images).square().sum()


def compare(model: nn.Module, loss: Any, batches: Any) -> None:
    """Compare gradients and norm of a model that is sharded with those of one that is whole."""
    plain = copy.deepcopy(model)
    for batch in batches:
        loss(plain, batch).backward()
    sharding.shard(model, "cpu")
    sharding.loss_of(model, loss, batches[distributed.rank()], True).backward()
    own = dict(model.named_parameters())
    assert any(sharding.local(p) is not p for p in own.values())
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in own.values()]
    sums, norm = sharding.sum_grads(grads, 1e9)
    right = {n: p.grad for n, p in plain.named_parameters()}
    assert own.keys() == right.keys()
    for (name, p), total in zip(own.items(), sums, strict=True):
        there = right[name]
        there = torch.zeros(p.shape) if there is None else there
        scale = float(there.abs().max()) + 1e-3  # of what stays whole, sums are float32
        error = float((sharding.whole(total) - there).abs().max()) / scale
        assert error < 1e-5, (name, error)
    long = nn.utils.get_total_norm([g for g in right.values() if g is not None])
    assert float(norm) == pytest.approx(float(long), rel=1e-4)
    with sharding.gathered(model):
        for name, p in model.named_parameters():
            assert sharding.local(p) is p and torch.equal(p, plain.get_parameter(name))


def every_family() -> None:
    """Ask all families, as one of two processes, with dropout and statistics of batches."""
    with distributed.joined():
        for name, kind in KINDS:
            print(name, kind, file=sys.stderr, flush=True)
            compare(build(name, kind).train(), text_loss, LENGTHS)
        for name, kind in vision.KINDS:
            print(name, kind, file=sys.stderr, flush=True)
            torch.manual_seed(0)
            model = family(name)[1](vision.FAMILIES[name][kind]).double().train()
            some = torch.cat([vision.images(model)] * 3)[:5]
            compare(model, image_loss, (some[:2], some[2:]))
    print("all")


def test_every_family_learns_from_shards_what_it_learns_whole():
    run = "from tests.training.test_sharding import every_family; every_family()"
    assert together(["-c", run], []) == ["all", "all"]


def test_layers_that_are_computed_again_learn_the_same_to_the_bit():
    """With dropout; running statistics of batch norms see a batch once."""
    kinds: list[Any] = [(build(name, kind), text_loss, LENGTHS[0]) for name, kind in KINDS]
    for name, kind in vision.KINDS:
        torch.manual_seed(0)
        model = family(name)[1](vision.FAMILIES[name][kind])
        kinds.append((model, image_loss, torch.cat([vision.images(model)] * 2)[:3].float()))
    kept = []
    for model, loss, batch in kinds:
        plain, saved = model.float().train(), [0, 0]
        for part in plain.modules():
            for key in ("drop", "dropout", "p"):
                if isinstance(getattr(part, key, None), float):
                    setattr(part, key, 0.1)
        again = copy.deepcopy(plain)
        sharding.recompute(again)
        both = (plain, again)
        for n, one in enumerate(both):

            def count(x: Tensor, n: int = n, saved: list[int] = saved) -> Tensor:
                saved[n] += x.numel()
                return x

            with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
                total = loss(one, batch)
            total.backward()
        grads = [
            {n: p.grad for n, p in one.named_parameters() if p.grad is not None} for one in both
        ]
        assert grads[0].keys() == grads[1].keys()
        assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0]), type(plain)
        assert all(
            torch.equal(*pair) for pair in zip(plain.buffers(), again.buffers(), strict=True)
        )
        kept.append(saved[1] / saved[0])
    assert sorted(kept)[len(kept) // 2] < 0.7  # of what is kept for the backward pass


SETTINGS = {"width": 16, "heads": 2, "depth": 2, "ffn_width": 32, "batch_tokens": 64, "threads": 1}
SETTINGS |= {"tokenizer": "characters", "log": "none", "batches": 4, "dropout": 0.1, "steps": 24}
SETTINGS |= {"valid_every": 8, "ema": 0.9, "average": 2, "clip": 0.5}
SHARDED = {"parallel": "fsdp", "processes": 2}


@pytest.fixture(scope="module")
def play(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("shards") / "play.txt"
    path.write_text("To be, or not to be, that is the question.\n" * 60)
    return path


def start(play: Path, out: Path, **more: Any) -> subprocess.Popen[str]:
    given = {"data": play, "out": out, **SETTINGS, **more}
    return begin([], ["-m", "regard", "train", "language", *(f"{k}={v}" for k, v in given.items())])


def train(play: Path, out: Path, **more: Any) -> Path:
    process = start(play, out, **more)
    told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    return out


@pytest.fixture(scope="module")
def whole(play) -> Path:
    """Return a run of two processes with shards that nothing disturbed."""
    return train(play, play.parent / "whole", **SHARDED)


def rows(out: Path, key: str) -> list[float]:
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in found if key in row]


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_shards_are_the_same_training(play, whole, tmp_path, optimiser):
    """With dropout, EMA, clipping, batches that are added up, and an average at the end."""
    one: Any = {**SETTINGS, "log": None, "optimiser": optimiser}
    regard.train("language", quiet=True, data=str(play), out=str(tmp_path / "one"), **one)
    two = whole
    if optimiser != "adamw":
        two = train(play, tmp_path / "two", **SHARDED, optimiser=optimiser)
    for key in ("loss", "valid/loss", "grad_norm"):
        right = rows(tmp_path / "one", key)
        assert right and rows(two, key) == pytest.approx(right, rel=1e-5)
    first, second = (regard.load(path).predictor.model for path in (tmp_path / "one", two))
    for name, p in first.named_parameters():
        torch.testing.assert_close(second.get_parameter(name), p, atol=1e-4, rtol=1e-3)
    assert max(rows(tmp_path / "one", "grad_norm")) > 0.5


def test_what_shards_have_saved_any_number_of_processes_goes_on_with(play, whole, tmp_path):
    part = shutil.copytree(whole, tmp_path / "part")
    for again in ({"processes": 1}, SHARDED, {"processes": 4, "parallel": "fsdp"}):
        for path in (part / "checkpoints").iterdir():
            if path.name != "step-16":
                shutil.rmtree(path)
        train(play, part, **again)
        assert rows(part, "loss") == pytest.approx(rows(whole, "loss"), rel=1e-5)
        if again is SHARDED:
            assert rows(part, "loss") == rows(whole, "loss")


def test_shards_of_which_one_is_killed_go_on_to_the_same_bits(play, whole, tmp_path):
    out = tmp_path / "out"
    process = start(play, out, **SHARDED, restarts=1, save_every=0)
    pids = wait_for_step(out, 3)
    os.kill(pids[1], signal.SIGKILL)
    assert is_gone(pids, 20), "the other waits for the one that was killed"
    told = process.communicate(timeout=120)
    assert process.returncode == 0 and "started again" in told[1], told
    assert rows(out, "loss") == rows(whole, "loss")
    assert sha256(out / "model.safetensors") == sha256(whole / "model.safetensors")


@pytest.mark.parametrize(
    "more, named",
    [
        ({"parallel": "zero3"}, "zero3"),
        ({"watch_every": 2}, "watch_every="),
        ({"compile": "true"}, "compile="),
    ],
)
def test_what_does_not_know_shards_is_refused_by_name(play, tmp_path, more, named):
    process = start(play, tmp_path / "out", **{**SHARDED, **more})
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and named in errors and "fsdp" in errors, errors
    assert "Traceback" not in errors and not (tmp_path / "out").exists()


def hosts(play: Path, out: Path, **more: Any) -> Path:
    """Train on two hosts of two processes each, as far as these know."""
    env = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(free_port())}
    given = {"data": play, "out": out, **SETTINGS, "parallel": "hsdp", **more}
    words = ["-m", "regard", "train", "language", *(f"{k}={v}" for k, v in given.items())]
    ranks = [begin([], words, **env, RANK=str(n), LOCAL_RANK=str(n % 2)) for n in range(4)]
    told = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, told
    return out


def test_replicas_of_shards_are_the_same_training(play, whole, tmp_path):
    out = hosts(play, tmp_path / "out")
    for key in ("loss", "valid/loss", "grad_norm"):
        assert rows(out, key) == pytest.approx(rows(whole, key), rel=1e-5)
    last = out / "checkpoints" / "step-24" / "raw"
    assert len(load_file(last / "00001-of-00004.safetensors")) > 3
    assert not load_file(last / "00003-of-00004.safetensors"), "a replica was saved, too"
    groups, right = (load_checkpoint(at / "checkpoints" / "step-24")[0] for at in (out, whole))
    for name, p in right["raw"].items():
        torch.testing.assert_close(groups["raw"][name], p, atol=1e-4, rtol=1e-3)
    for path in (out / "checkpoints").iterdir():
        if path.name != "step-16":
            shutil.rmtree(path)
    train(play, out, **SHARDED)
    assert rows(out, "loss") == pytest.approx(rows(whole, "loss"), rel=1e-5)
    hosts(play, tmp_path / "again")
    assert rows(tmp_path / "again", "loss") == rows(hosts(play, tmp_path / "third"), "loss")


def test_weights_that_were_saved_whole_are_sharded_and_back(play, whole, tmp_path):
    """From one process to two with shards, then two without, which have none of a rank's files."""
    out = train(play, tmp_path / "out")
    for again, parts in ((SHARDED, True), ({"processes": 2}, False), ({}, False)):
        for path in (out / "checkpoints").iterdir():
            if path.name != "step-16":
                shutil.rmtree(path)
        train(play, out, **again)
        assert rows(out, "loss") == pytest.approx(rows(whole, "loss"), rel=1e-5)
        assert (out / "checkpoints" / "step-24" / "raw").is_dir() == parts


def test_shards_written_beside_the_training_survive_a_kill(play, whole, tmp_path):
    out = tmp_path / "out"
    process = start(play, out, **SHARDED, restarts=1, save_every=0, **{"async": "true"})
    pids = wait_for_step(out, 3)
    os.kill(pids[1], signal.SIGKILL)
    told = process.communicate(timeout=120)
    assert process.returncode == 0 and "started again" in told[1], told
    assert rows(out, "loss") == rows(whole, "loss")
    assert sha256(out / "model.safetensors") == sha256(whole / "model.safetensors")


def test_hosts_that_are_not_alike_have_no_replicas(play, tmp_path):
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = ["-m", "regard", "train", "language", f"data={play}", "parallel=hsdp", "steps=2"]
    words.append(f"out={tmp_path / 'out'}")
    ranks = [begin([], words, **env, RANK=str(n)) for n in range(2)]
    told = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], told
    assert "parallel=hsdp needs as many processes on one host" in told[0][1]
