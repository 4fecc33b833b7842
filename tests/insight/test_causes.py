"""Causes: all cuts in one batch are the plain loop, and a cut is what it says."""

import json

import numpy as np
import pytest
import torch

import regard
from regard.cli import main
from regard.costs.model import modality_read
from regard.errors import UsageError
from regard.insight.causes import (
    attending,
    cut_edges,
    cut_heads,
    cut_tokens,
    find_causes,
    measure,
)
from regard.layers.layout import TokenGrid
from regard.metrics.correlation import spearman
from regard.modalities.tokens import cells_of, grid_keys
from regard.models import MODELS, info
from regard.tasks.frame.question import Question
from regard.viewer.image import flow as image_flow
from regard.viewer.image import layouts, placed_view
from regard.viewer.picture import Placement, View
from regard.viewer.rollout import flow, maximum_flow, roll_out, stack_of
from tests.attention.test_intervene import build, leaves

TEXT = "I like green tea."
FEW = 3  # cuts that are compared
SMALLER = {
    "bert": {"vocab": 1000},
    "gpt": {"vocab": 1000},
    "whisper": {"vocab": 1000, "max_frames": 100},
}


def question_of(model, inputs):
    """Ask a model of any family for its likeliest output, of the first of some inputs."""

    @torch.inference_mode()
    def logprobs(copies):
        some = (x[:1].expand(copies, *x.shape[1:]) if x.ndim else x for x in inputs)
        out = leaves(model(*some))[0].double().reshape(copies, -1)
        if out.shape[1] == copies:  # images by texts: what each has with its own
            out = torch.stack([out.diagonal(), torch.zeros(copies)], 1)
        return out[:, None, :1000].log_softmax(-1)

    shape = inputs[0].shape
    known = layouts(model, (shape[-2], shape[-1])) if info_reads_grid(inputs) else {}
    if known:
        grid, keys = grid_keys(known)
        tokens = [str(n) for n in range(grid.height * grid.width)]
    else:
        tokens, grid = [str(n) for n in range(shape[1])], None

        def keys(name, count):
            return torch.arange(count)[None]

    chosen = [int(logprobs(1).argmax())]
    names = [""] * logprobs(1).shape[-1]
    return Question("", logprobs, chosen, names, [""], tokens, keys, grid=grid)


def info_reads_grid(inputs):
    return inputs[0].ndim == 4


@pytest.mark.parametrize("name", sorted(MODELS))
def test_all_cuts_in_one_batch_are_the_plain_loop(name):
    if modality_read(info(name).reads) is None:
        pytest.skip(f"{name} reads {info(name).reads}, which cost cannot make")
    model, inputs = build(name, **SMALLER.get(name, {}))
    model = model.double()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    question = question_of(model, inputs)
    layers = attending(model, question)
    if not layers:
        pytest.skip("this family attends to nothing")
    for cuts, count in (
        (cut_tokens(model, question, layers), FEW),
        (cut_heads(layers[:2])[0], FEW),
    ):
        count = min(count, sum(layer.heads for layer in layers[:2]))
        at_once = measure(model, question, cuts, count, copies=count + 1)
        loop = measure(model, question, cuts, count, copies=1)
        assert np.abs(at_once - loop).max() < 1e-6
        with torch.inference_mode():
            assert abs(at_once[0] - float(question.answers(1))) < 1e-6
        if name != "denoiser":  # what it adds to an image begins with next to nothing
            assert count and np.abs(at_once[1:] - at_once[0]).max() > 1e-9


@pytest.mark.parametrize("cut", ["tokens", "tokens,heads,edges"])
def test_the_batch_of_a_trained_model_is_its_loop(cut):
    model = regard.load("en-zh")
    asked = model.look_settings({})
    cuts = cut.split(",")
    both = [find_causes(model, TEXT, asked, cuts, copies=copies)[0] for copies in (None, 1)]
    assert both[0].answer == str(model.run(TEXT))
    # in float32, whose last digit of such a sum of logits is 1e-6
    assert np.abs(both[0].effects - both[1].effects).max() < 1e-5
    for name, table in both[0].edges.items():
        assert np.abs(table - both[1].edges[name]).max() < 1e-5


def test_cutting_the_last_token_is_padding():
    """A token that every layer hides is one that was never there, for all before it."""
    model, inputs = build("bert")
    ids = inputs[0][:1]
    question = question_of(model, (ids,))
    cuts = cut_tokens(model, question, attending(model, question))
    last = ids.shape[1] - 1
    with torch.inference_mode(), regard.change(model, cuts([last])):
        cut = model(ids)
    with torch.inference_mode():
        padded = model(ids, torch.tensor([last]))
    assert torch.allclose(cut[:, :last], padded[:, :last], atol=1e-6)


def test_a_token_is_left_out_of_a_mean():
    """A series model pools by the mean: without the last chunk it is a shorter series."""
    model = regard.load("digits")
    sound = np.random.default_rng(0).standard_normal(8000).astype(np.float32) / 10
    question = model.question(sound, model.look_settings({}))
    cuts = cut_tokens(model.model, question, attending(model.model, question))
    assert "readout.pool.in" in cuts([0])
    x = torch.randn(2, len(question.tokens), 3)
    changed = cuts([-1, 4])["readout.pool.in"](x)
    rest = [n for n in range(len(question.tokens)) if n != 4]
    assert torch.equal(changed[0], x[0])
    assert torch.allclose(changed[1].mean(0), x[1, rest].mean(0), atol=1e-6)


def test_a_head_that_is_cut_gives_nothing():
    model, inputs = build("gpt")
    question = question_of(model, inputs)
    layers = attending(model, question)
    changes, heads = cut_heads(layers)
    name, head = heads[3]
    with torch.inference_mode(), regard.change(model, {f"{name}.heads.{head}": 0.0}):
        expected = question.answers(1)
    assert torch.allclose(
        torch.from_numpy(measure(model, question, changes, 4)[4:]), expected, atol=1e-5
    )


def test_an_edge_that_is_cut_is_masked():
    model, inputs = build("gpt")
    question = question_of(model, inputs)
    layer = attending(model, question)[1]
    allowed = np.tril(np.ones((layer.queries, layer.keys)))
    changes, edges = cut_edges([layer], {layer.name: allowed})
    assert len(edges) == allowed.sum()  # a mask forbids the others already
    found = measure(model, question, changes, 9)[1:]
    for (name, query, key), value in zip(edges, found, strict=False):
        cut = {f"{name}.mask": regard.cut(key, query)}
        with torch.inference_mode(), regard.change(model, cut):
            masked = float(question.answers(1))
        assert abs(masked - value) < 1e-5


def test_a_finer_grid_is_cut_by_its_coarse_cells():
    fine, coarse = TokenGrid(("class",), 4, 4, 0.25, 0.25), TokenGrid((), 2, 2, 0.5, 0.5)
    assert cells_of(fine, coarse).tolist() == [-1] + [0, 0, 1, 1] * 2 + [2, 2, 3, 3] * 2


# ---- rollout and flow


def views_of(*tables):
    tokens = [str(n) for n in range(len(tables[0]))]
    return [View(f"blocks.{n}", a[None], tokens, tokens) for n, a in enumerate(tables)]


def stochastic(rng, size):
    table = rng.random((size, size))
    return table / table.sum(1, keepdims=True)


def test_rollout_is_the_product_of_half_attention_and_half_identity():
    rng = np.random.default_rng(0)
    a, b = stochastic(rng, 5), stochastic(rng, 5)
    rolled = roll_out(stack_of(views_of(a, b)))[-1]
    half = (np.eye(5) + b) / 2 @ ((np.eye(5) + a) / 2)
    assert np.allclose(rolled, half, atol=1e-6) and np.allclose(rolled.sum(1), 1, atol=1e-6)


def test_rollout_of_an_encoder_decoder_ends_in_source_and_target():
    model = regard.load("en-zh")
    picture = model.picture(TEXT, view="rollout")
    last = picture.views[-1]
    assert last.kind == "rollout" and np.allclose(last.weights.sum(-1), 1, atol=1e-4)
    source = len(model.picture(TEXT).views[0].row_tokens)
    assert list(last.column_tokens[source:]) == list(last.row_tokens)
    first = model.picture(TEXT, view="rollout", heads=0).views[0]
    assert np.allclose(first.weights[0][:, source:], 0)  # an encoder sees no target


def test_flow_is_the_maximum_flow():
    """Against scipy, in whole numbers."""
    flows = pytest.importorskip("scipy.sparse.csgraph")
    from scipy.sparse import csr_array

    rng = np.random.default_rng(1)
    tables = [stochastic(rng, 4) for _ in range(3)]
    stack = stack_of(views_of(*tables))
    size, depth, unit = 4, 3, 10**6
    graph = np.zeros((size * (depth + 1),) * 2, np.int32)
    for n, layer in enumerate(stack.layers):
        above, below = slice((n + 1) * size, (n + 2) * size), slice(n * size, (n + 1) * size)
        graph[above, below] = np.rint(layer.passed * unit)
    found = flow(stack)
    for row in range(size):
        for token in range(size):
            theirs = flows.maximum_flow(csr_array(graph), depth * size + row, token).flow_value
            assert abs(found[row, token] - theirs / unit) < 1e-4
    assert maximum_flow([np.eye(2)], 0, 1) == 0


def test_flow_of_an_image_is_that_of_its_layers():
    rng = np.random.default_rng(2)
    grid = TokenGrid(("class",), 2, 2, 0.5, 0.5)
    tables = [stochastic(rng, 5) for _ in range(3)]
    placement = Placement(grid, grid, np.arange(5), np.arange(5)[None])
    views = [placed_view(f"blocks.{n}", a[None], placement) for n, a in enumerate(tables)]
    seen = image_flow(views, "class")
    assert np.allclose(seen.weights[0, 0], flow(stack_of(views_of(*tables)))[0], atol=1e-5)
    last = TokenGrid(("image",), 0, 0, 1.0, 1.0)
    pool = placed_view(
        "pool", tables[0][None, :1], Placement(last, grid, np.arange(1), np.arange(5)[None])
    )
    assert image_flow([*views, pool]).weights.shape == (1, 1, 5)
    with pytest.raises(UsageError, match="one grid"):
        image_flow([pool, *views])


# ---- look


def test_look_tells_causes_as_text_json_page_and_png(tmp_path, capsys):
    page, png = tmp_path / "a.html", tmp_path / "a.png"
    assert main(["look", "en-zh", TEXT, "cause=true", f"out={page}", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["findings"]
    assert len(told["effects"]) == len(told["tokens"]) and "rollout" in told["correlations"]
    effects = np.abs(told["effects"])
    again = spearman(np.array(told["attention"]["rollout"]), effects)
    assert abs(again - told["correlations"]["rollout"]) < 1e-6
    assert "cut" in page.read_text()
    assert main(["look", "en-zh", TEXT, "cause=tokens", f"out={png}"]) == 0
    assert png.read_bytes()[:4] == b"\x89PNG"
    assert "rank correlation" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["look", "en-zh", TEXT, "cause=tokns"], "Did you mean 'tokens'"),
        (["look", "en-zh", TEXT, "view=rollot"], "Did you mean 'rollout'"),
        (["look", "en-zh", TEXT, "cause=true", "lens=true"], "one at a time"),
        (["look", "en-zh", TEXT, "cause=edges", "layers=nine"], "choose from encoder.0.attention"),
    ],
)
def test_what_is_wrong_is_one_line(words, message, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_what_has_no_probability_is_refused():
    model = regard.load("embed")
    with pytest.raises(UsageError, match="probability"):
        model.question("x", model.look_settings({}))
