"""A gated unit is attention over its own history, and four freedoms make it a transformer."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import regard
from regard.attention.masks import Causal
from regard.attention.watch import watch
from regard.errors import UsageError
from regard.layers.block import BlockConfig
from regard.models import preset
from regard.models.gpt import GPT, GPTConfig
from regard.models.ladder import (
    PRESETS,
    RUNGS,
    Average,
    Gated,
    Ladder,
    LadderConfig,
    ParallelCandidates,
    RecurrentCache,
    SequentialCandidates,
    gated_attention,
    past_weights,
)
from regard.tasks.text.language import LANGUAGE

BLOCK = BlockConfig(width=12, heads=3, ffn_width=16, dropout=0.0)
SMALL = LadderConfig(19, 2, BLOCK, max_length=32)


def large(model: torch.nn.Module) -> None:
    """Enlarge the weights so that differences show."""
    torch.manual_seed(2)
    for parameter in model.parameters():
        parameter.data += 0.5 * torch.randn_like(parameter)


def unit(gates: int) -> tuple[Gated, Tensor]:
    """Return a gated unit in fp64 and texts for it."""
    torch.manual_seed(1)
    made = Gated(12, gates, True).double()
    large(made)
    return made, torch.randn(2, 40, 12, dtype=torch.float64)


def told(made: Gated, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return h, candidates and gates u by the formulas of the lecture, number by number."""
    (w, v), (b, d) = (
        made.reads.weight.split([12, made.heads]),
        made.reads.bias.split([12, made.heads]),
    )
    again, gate_again = made.again.weight.split([12, made.heads])
    each = 12 // made.heads
    hs, cs, us = [], [], []
    for text in x:
        h = torch.zeros(12, dtype=x.dtype)
        for now in text:
            c = torch.tanh(w @ now + b + again @ h)
            u = 1 / (1 + torch.exp(-(v @ now + d + gate_again @ h)))
            h = torch.stack([u[n // each] * h[n] + (1 - u[n // each]) * c[n] for n in range(12)])
            hs, cs, us = [*hs, h], [*cs, c], [*us, u]
    shape = (*x.shape[:2], -1)
    return torch.stack(hs).view(shape), torch.stack(cs).view(shape), torch.stack(us).view(shape)


@pytest.mark.parametrize("gates", [12, 3, 1])
@torch.no_grad()
def test_a_gated_unit_is_attention_over_its_own_history(gates):
    made, x = unit(gates)
    h, c, u = told(made, x)
    ours, candidates, logits = made.unroll(x, None)
    torch.testing.assert_close(ours, h, atol=1e-12, rtol=0)
    torch.testing.assert_close(candidates, c, atol=1e-12, rtol=0)
    torch.testing.assert_close(gated_attention(candidates, logits), h, atol=1e-12, rtol=0)
    weights = past_weights(logits.transpose(1, 2))
    for t, i in ((0, 0), (5, 5), (5, 2), (39, 30), (39, 0)):
        right = u[:, i + 1 : t + 1].prod(1) * (1 - u[:, i])
        torch.testing.assert_close(weights[:, :, t, i], right, atol=1e-14, rtol=0)
    assert weights.triu(1).eq(0).all()
    left = u.cumprod(1).transpose(1, 2)  # what is kept of h_0, which is nothing
    torch.testing.assert_close(weights.sum(-1), 1 - left, atol=1e-12, rtol=0)


@torch.no_grad()
def test_weights_are_right_in_fp32_for_long_texts_and_gates_that_are_shut():
    torch.manual_seed(0)
    logits = 4 * torch.randn(1, 3000) - 5
    logits[0, 1000:1003] = torch.tensor([200.0, -200.0, 90.0])
    weights = past_weights(logits)
    assert weights.dtype == torch.float32 and weights.isfinite().all()
    u, v = logits.double().sigmoid()[0], (-logits.double()).sigmoid()[0]
    for t in (0, 1000, 1001, 1002, 2999):
        right = torch.stack([u[i + 1 : t + 1].prod() * v[i] for i in range(t + 1)])
        torch.testing.assert_close(weights[0, t, : t + 1].double(), right, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("gates", [12, 3])
@torch.no_grad()
def test_who_watches_sees_the_weights_that_make_the_output(gates):
    made, x = unit(gates)
    at = torch.arange(40).unsqueeze(-1)
    with watch(made) as maps:
        out = made(x, at=at, mask=Causal())
    assert torch.equal(out, made(x, at=at, mask=Causal()))
    weights = maps[""].weights()
    assert weights.shape == (2, gates, 40, 40)
    values = made.unroll(x, None)[1].unflatten(-1, (gates, -1)).transpose(1, 2)
    h = (weights @ values).transpose(1, 2).flatten(2)
    torch.testing.assert_close(made.out(h), out, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", [SequentialCandidates, ParallelCandidates])
@torch.no_grad()
def test_freed_weights_are_a_softmax_over_the_candidates(kind):
    torch.manual_seed(3)
    made = Average(12, kind(12, True), True).double()
    large(made)
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    rows = []
    for text in x:
        h, c = torch.zeros(12, dtype=x.dtype), []
        for now in text:
            part = made.candidates
            before = part.again(h) if isinstance(part, SequentialCandidates) else 0
            c.append(torch.tanh(part.reads(now) + before))
            scores = torch.stack([made.asks(now) @ one / 12**0.5 for one in c])
            h = sum(a * one for a, one in zip(scores.softmax(0), c, strict=True))
            rows.append(made.out(h))
    right = torch.stack(rows).view(2, 9, 12)
    ours = made(x, at=torch.arange(9).unsqueeze(-1), mask=Causal())
    torch.testing.assert_close(ours, right, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("rung", "heads"), [("heads", 3), ("keys_values", 1)])
@torch.no_grad()
def test_the_last_rungs_are_a_transformer(rung, heads):
    ours = Ladder(replace(SMALL, rung=rung)).double().eval()
    block = replace(BLOCK, heads=heads)
    theirs = GPTConfig(19, 2, block, "sinusoidal", max_length=32, scale_embedding=True)
    gpt = GPT(theirs).double().eval()
    gpt.load_state_dict(ours.state_dict())
    ids = torch.randint(0, 19, (2, 11))
    assert torch.equal(ours(ids), gpt(ids))


@pytest.mark.parametrize("rung", RUNGS)
@torch.no_grad()
def test_packed_documents_never_see_each_other(rung):
    model = Ladder(replace(SMALL, rung=rung)).double().eval()
    large(model)
    ids = torch.randint(0, 19, (2, 12))
    documents = torch.tensor([[0] * 5 + [1] * 7, [3] * 1 + [4] * 2 + [9] * 9])
    packed = model(ids, documents=documents)
    for row, spans in enumerate([(0, 5, 12), (0, 1, 3, 12)]):
        for start, end in zip(spans, spans[1:], strict=False):
            alone = model(ids[row : row + 1, start:end])[0]
            torch.testing.assert_close(packed[row, start:end], alone, atol=1e-10, rtol=0)


@torch.no_grad()
def test_the_state_of_a_gated_unit_is_its_last_vector():
    model = Ladder(SMALL).eval()
    state = model.start(torch.randint(0, 19, (2, 7)))
    state.select(torch.zeros(2, 3, dtype=torch.long))
    for cache in state.caches:
        assert isinstance(cache, RecurrentCache) and cache.past is not None
        assert cache.past.shape == (2, 3, 12) and cache.k.numel() == cache.v.numel() == 0


def test_rungs_differ_in_nothing_but_their_attention():
    models = {name: Ladder(replace(SMALL, rung=name)) for name in RUNGS}
    rest = {
        name: {n: p.shape for n, p in model.named_parameters() if ".attention." not in n}
        for name, model in models.items()
    }
    assert all(shapes == rest["heads"] for shapes in rest.values())
    configs = [preset("ladder", "tiny", name) for name in PRESETS]
    assert len({replace(config, rung="heads") for config in configs}) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rung": "head"}, "unknown rung 'head'.*Did you mean 'heads'"),
        ({"position": "rotary"}, "unknown position of a ladder 'rotary'"),
        ({"gates": 5}, "gates=5 does not divide width=12"),
        ({"gates": 3, "rung": "heads"}, "gates=3 is for rung=gated"),
        ({"window": 4}, "window=4 is not for every rung"),
        ({"block": replace(BLOCK, kv_heads=1)}, "kv_heads=1 is not for every rung"),
    ],
)
def test_what_a_rung_cannot_be_is_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        Ladder(replace(SMALL, **changes))


def test_the_task_takes_a_family_and_a_rung():
    plain = LANGUAGE.resolve({"data": "x"})
    assert plain.family == "gpt" and type(plain.model) is GPTConfig
    settings = LANGUAGE.resolve({"data": "x", "family": "ladder", "rung": "keys_values"})
    assert settings.model.rung == "keys_values" and type(settings.model) is LadderConfig
    assert (
        LANGUAGE.resolve({"data": "x", "family": "ladder", "like": "heads"}).model.rung == "heads"
    )
    with pytest.raises(UsageError, match="unknown key 'rung'"):
        LANGUAGE.resolve({"data": "x", "rung": "heads"})
    with pytest.raises(UsageError, match="unknown family 'ladder'; choose from bert"):
        LANGUAGE.resolve({"data": "x", "family": "ladder", "objective": "masked"})


def test_one_command_trains_all_five_and_each_goes_on_writing(tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("Row, row, row your boat, gently down the stream. " * 30)
    found = regard.compare(
        "language",
        data=text,
        out=tmp_path / "runs",
        family="ladder",
        rung=",".join(RUNGS),
        seeds=1,
        lengths="1,2",
        tokenizer="characters",
        **{"depth": 1, "width": 16, "heads": 2, "ffn_width": 16, "context": 12},
        **{"batch_tokens": 96, "steps": 25, "valid_every": 25, "lr": 0.02, "warmup": 2},
        quiet=True,
    )
    assert len(found.done) == len(RUNGS) and found.names[0] == "loss"
    for run in found.done:
        assert run["scores"]["loss"] < 3.0 and len(run["lengths"]) == 2  # 20 characters: log is 3
        model = regard.load(run["folder"])
        answers = [model.run("Row, ", max_length=6, temperature=0, beam=n) for n in (1, 3)]
        assert [len(str(answer)) for answer in answers] == [11, 11]
        ids = torch.tensor([model.codec.tokenizer.encode(str(answers[0]))])
        with torch.no_grad():
            likeliest = model.model(ids).argmax(-1)
        assert torch.equal(likeliest[:, 4:-1], ids[:, 5:])
    more = regard.train(
        "language",
        data=text,
        init=tmp_path / "runs" / "gated" / "seed-1",
        out=tmp_path / "more",
        **{"context": 12, "batch_tokens": 96, "steps": 2, "quiet": True},
    )
    assert more.finished and regard.load(tmp_path / "more").model.config.rung == "gated"
