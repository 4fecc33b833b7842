"""The questions that every model family answers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from beartype import beartype
from jaxtyping import jaxtyped
from torch import Tensor, nn

import regard.attention.multihead as multihead
import regard.models.transformer as transformer
from regard.attention.watch import watch
from regard.layers.block import BlockConfig
from regard.models import MODELS, family
from regard.models.folder import load_folder, save_config, save_weights
from regard.models.transformer import Transformer, TransformerConfig

BLOCK = BlockConfig(width=16, heads=4, ffn_width=24, dropout=0.0)
SMALL = TransformerConfig(23, 23, 2, 2, BLOCK, max_length=32)
# family -> small models of all its kinds
FAMILIES = {
    "transformer": {
        "pre": SMALL,
        "post": replace(
            SMALL, encoder_depth=1, block=replace(BLOCK, order="post", feed_forward="swish")
        ),
        "grouped, learned": replace(
            SMALL,
            target_vocab=19,
            tie="target",
            position="learned",
            block=replace(BLOCK, kv_heads=2, norm="rms", feed_forward="swiglu", bias=False),
        ),
        "rotary, additive": replace(
            SMALL,
            target_vocab=19,
            tie="none",
            position="rope",
            head_bias=True,
            block=replace(BLOCK, kv_heads=1, norm="lecture", score="additive", head_width=6),
        ),
        "nowhere, cosine": replace(
            SMALL,
            position="none",
            scale_embedding=False,
            block=replace(BLOCK, order="post", feed_forward="gelu", score="cosine"),
        ),
        "dropped": replace(
            SMALL, block=replace(BLOCK, dropout=0.2, attention_dropout=0.1, ffn_dropout=0.1)
        ),
    }
}
KINDS = [(name, kind) for name, kinds in FAMILIES.items() for kind in kinds]


@pytest.fixture(autouse=True)
def shapes_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the shapes in signatures while testing."""
    parts = [(Transformer, name) for name in ("forward", "hidden", "encode", "start", "step")]
    for part, name in [*parts, (multihead.MultiHead, "forward")]:
        checked = jaxtyped(typechecker=beartype)(getattr(part, name))
        monkeypatch.setattr(part, name, checked)


@pytest.fixture(params=KINDS, ids=lambda pair: " ".join(pair))
def model(request) -> Transformer:
    """Return one small model in fp64, its weights enlarged so that differences would show."""
    name, kind = request.param
    torch.manual_seed(0)
    model = family(name)[1](FAMILIES[name][kind]).double().eval()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def sentences(model: Transformer, lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return source and target tokens of random sentences, full of numbers to the last place."""
    rand = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    vocabularies = (model.config.source_vocab, model.config.target_vocab)
    source, target = (torch.randint(3, n, shape, generator=rand) for n in vocabularies)
    return source, target


def close(ours: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(ours, right, atol=1e-10, rtol=0)


def test_every_family_is_asked():
    assert set(FAMILIES) == set(MODELS)


def test_padding_and_neighbours_never_matter(model: Transformer):
    lengths = [3, 7, 5]
    source, target = sentences(model, lengths)
    rows = torch.tensor(lengths)
    together = model(source, target, rows, rows)
    other = sentences(model, lengths, seed=1)
    for i, n in enumerate(lengths):
        alone = model(source[i : i + 1, :n], target[i : i + 1, :n])
        close(together[i : i + 1, :n], alone)
        # other padding, other neighbours
        mixed = [x.clone() for x in other]
        for x, y in zip(mixed, (source, target), strict=True):
            x[i, :n] = y[i, :n]
        close(model(*mixed, rows)[i, :n], alone[0])
    assert together.std() > 0.1


def test_an_empty_sentence_gives_numbers(model: Transformer):
    source, target = sentences(model, [4, 4])
    logits = model(source, target, torch.tensor([4, 0]))
    assert logits.isfinite().all()
    close(logits[:1], model(source[:1], target[:1]))


def test_the_future_never_matters(model: Transformer):
    source, target = sentences(model, [6, 6])
    seen: list[Tensor] = []

    def keep(_, __, out: Tensor) -> None:
        out.retain_grad()
        seen.append(out)

    model.target.register_forward_hook(keep)
    logits = model(source, target)
    for now in (0, 3):
        (grad,) = torch.autograd.grad(logits[:, now].sum(), seen[0], retain_graph=True)
        assert grad[:, now + 1 :].eq(0).all() and grad[:, : now + 1].ne(0).any()


@pytest.mark.parametrize("chunks", [[1] * 9, [4, 1, 3, 1], [9]])
def test_cached_equals_full(model: Transformer, chunks: list[int]):
    source, target = sentences(model, [9, 4, 6])
    lengths = torch.tensor([9, 4, 6])
    full = model(source, target, lengths)
    with torch.no_grad():
        state = model.start(source, lengths, capacity=9)
        parts = [model.step(ids, state)[0] for ids in target.split(chunks, dim=1)]
    close(torch.cat(parts, dim=1), full)
    assert state.length == 9 and state.sentences == 3


@pytest.mark.parametrize("room", [1, 64])
def test_cached_equals_full_while_hypotheses_move(model: Transformer, room: int, monkeypatch):
    monkeypatch.setattr(transformer, "ROOM", room)  # so that memory runs out, or does not
    source, _ = sentences(model, [6, 3, 5, 4])
    lengths = torch.tensor([6, 3, 5, 4])
    vocab = model.config.target_vocab
    rand = torch.Generator().manual_seed(5)
    with torch.no_grad():
        state = model.start(source, lengths, hypotheses=1, capacity=16)
        texts = torch.full((4, 1, 1), 1)  # (sentence, hypothesis, token)
        left = torch.arange(4)
        for step in range(8):
            fresh = texts[..., -1:].flatten(0, 1)
            logits, state = model.step(fresh, state)
            rows = left.repeat_interleave(state.hypotheses)
            full = model(source[rows], texts.flatten(0, 1), lengths[rows])
            close(logits[:, -1], full[:, -1])
            if step in (3, 5):  # some sentences are finished
                stay = torch.tensor([0, 2, 3] if step == 3 else [2, 0])
                state, texts, left = state.keep(stay), texts[stay], left[stay]
            width = (3, 3, 2, 4)[step % 4]  # the beam may grow and shrink
            parents = torch.randint(0, state.hypotheses, (len(left), width), generator=rand)
            state = state.select(parents)
            assert (state.hypotheses, state.sentences) == (width, len(left))
            texts = texts.gather(1, parents.unsqueeze(-1).expand(-1, -1, texts.shape[-1]))
            new = torch.randint(3, vocab, (len(left), width, 1), generator=rand)
            texts = torch.cat([texts, new], dim=-1)


def test_every_parameter_learns(model: Transformer):
    source, target = sentences(model, [8, 8, 8])
    logits = model.train()(source, target, torch.tensor([8, 5, 8]))
    nn.functional.cross_entropy(logits.flatten(0, 1), target.roll(-1, 1).flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        parts = [parameter.grad]
        if name.endswith("qkv.weight"):
            attention = model.get_submodule(name.removesuffix(".qkv.weight"))
            assert isinstance(attention, multihead.MultiHead)
            heads = (attention.heads, attention.kv_heads, attention.kv_heads)
            parts = parameter.grad.split([n * attention.head_width for n in heads])
        assert all(part.abs().max() > 1e-9 for part in parts), name


def test_a_model_builds_on_the_meta_device(model: Transformer):
    with torch.device("meta"):
        ghost = type(model)(model.config)
        source, target = torch.zeros(2, 5).long(), torch.zeros(2, 6).long()
        logits = ghost(source, target, torch.tensor([5, 3]))
    assert all(p.is_meta for p in ghost.parameters())
    assert logits.shape == (2, 6, model.config.target_vocab)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    assert {name: p.shape for name, p in ghost.named_parameters()} == shapes


def test_save_then_load_is_the_identity(model: Transformer, tmp_path: Path):
    model = model.float()
    name = next(name for name in MODELS if family(name)[1] is type(model))
    save_config(tmp_path, model, name=name, task="translate", about={})
    save_weights(tmp_path, dict(model.named_parameters()))
    again, _ = load_folder(tmp_path)
    assert again.config == model.config
    source, target = sentences(model, [5, 5])
    with torch.no_grad():
        assert torch.equal(model(source, target), again(source, target))
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_watching_changes_nothing_and_tells_the_truth(model: Transformer, monkeypatch):
    source, target = sentences(model, [7, 7])
    lengths = torch.tensor([7, 4])
    model = model.float()
    plain = model(source, target, lengths)
    calls = []

    def attend(q, k, v, **settings) -> Tensor:
        out = real(q, k, v, **settings)
        calls.append((settings["watch"], v, out))
        return out

    real = multihead.attend
    monkeypatch.setattr(multihead, "attend", attend)
    with watch(model) as maps:
        watched = model(source, target, lengths)
    assert torch.equal(plain, watched)
    names = {name for name, m in model.named_modules() if isinstance(m, multihead.MultiHead)}
    assert set(maps.names()) == names and "decoder.0.cross" in names
    named = {id(module): name for name, module in model.named_modules()}
    for module, v, out in calls:
        weights = maps[named[id(module)]].weights()
        values = v.repeat_interleave(weights.shape[1] // v.shape[1], dim=1)
        size = max(1.0, values.abs().max().item())
        torch.testing.assert_close(weights @ values, out, atol=1e-6 * size, rtol=0)


def test_dropout_is_for_training_only_and_seeded(model: Transformer):
    source, target = sentences(model, [6, 6])
    assert torch.equal(model(source, target), model(source, target))
    model.train()
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(model(source, target))
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2]) == (model.config.block.dropout == 0)
