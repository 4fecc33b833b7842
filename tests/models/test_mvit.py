"""Pooling attention: MViT and MViTv2 against loops of their formulas and published numbers."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import regard.models.mvit as mvit
from regard.attention.watch import watch
from regard.errors import UsageError
from regard.layers.block import BlockConfig
from regard.models import preset
from regard.models.mvit import Decomposed, MViT, MViTConfig, PoolHeads, PoolLargest

BLOCK = BlockConfig(8, 2, 24, norm_eps=1e-6, feed_forward="gelu", dropout=0.0)
TINY = MViTConfig(labels=5, image=12, patch=3, stride=2, depths=(1, 2), block=BLOCK, key_stride=2)
PARTS = ("pooled_queries", "residual", "position", "widen", "tokens", "pool")
V1 = replace(TINY, **{part: getattr(preset("mvit", "mvit"), part) for part in PARTS})
KINDS = {
    "v2": TINY,
    "v2 with a class token": replace(TINY, tokens=1, pool="first"),
    "v1": V1,
    "v1 without": replace(V1, tokens=0, pool="mean", position="none"),
}


def build(config: MViTConfig) -> MViT:
    """Return a model in fp64 whose weights are large enough that differences would show."""
    torch.manual_seed(0)
    model = MViT(config).double().eval()
    for part in model.parameters():
        part.data = part.data + 0.3 * torch.randn_like(part)
    return model


def normalised(x: Tensor, norm: nn.Module) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias of a vector."""
    x = (x - x.mean()) / (x.var(correction=0) + 1e-6).sqrt() * norm.weight
    return x if norm.bias is None else x + norm.bias


def pooled(x: Tensor, pool: nn.Module, grid: tuple[int, int], tokens: int):
    """Return the vectors (l, d) of one head, pooled place by place, and their grid."""
    if not isinstance(pool, PoolHeads):
        return list(x), grid
    weight, s, reach = pool.convolution.weight[:, 0], pool.stride, pool.kernel // 2
    made = [x[n] for n in range(tokens)]
    rows, columns = (-(-n // s) for n in grid)
    for i, j in product(range(rows), range(columns)):
        total = torch.zeros_like(x[0])
        for a, b in product(range(pool.kernel), range(pool.kernel)):
            y, z = i * s + a - reach, j * s + b - reach
            if 0 <= y < grid[0] and 0 <= z < grid[1]:
                total = total + weight[:, a, b] * x[tokens + y * grid[1] + z]
        made.append(total)
    return [normalised(vector, pool.norm) for vector in made], (rows, columns)


def distance(i: int, j: int, queries: int, keys: int) -> int:
    """Return the row of the table for query i and key j, as Li et al. write it."""
    by_query, by_key = max(keys / queries, 1.0), max(queries / keys, 1.0)
    return int(i * by_query - j * by_key + (keys - 1) * by_key + 1e-9)


def looped(model: MViT, part: nn.Module, x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return what pooling attention makes of one example's tokens (l, w), by loops."""
    tokens, heads = model.config.tokens, part.heads
    d = part.out.in_features // heads
    projected = x @ part.qkv.weight.T + part.qkv.bias
    found = []
    for head in range(heads):
        q, k, v = (projected[:, n * heads * d + head * d :][:, :d] for n in range(3))
        q, q_grid = pooled(q, part.pool_q, grid, tokens)
        k, k_grid = pooled(k, part.pool_k, grid, tokens)
        v, _ = pooled(v, part.pool_v, grid, tokens)
        rows = []
        for n, query in enumerate(q):
            scores = [query @ key / d**0.5 for key in k]
            if isinstance(part.position, Decomposed) and n >= tokens:
                y, z = divmod(n - tokens, q_grid[1])
                for m in range(tokens, len(k)):
                    a, b = divmod(m - tokens, k_grid[1])
                    down = part.position.rows[distance(y, a, q_grid[0], k_grid[0])]
                    right = part.position.columns[distance(z, b, q_grid[1], k_grid[1])]
                    scores[m] = scores[m] + query @ down + query @ right
            average = torch.stack(scores).softmax(0) @ torch.stack(v)
            rows.append(average + query if model.config.residual == "query" else average)
        found.append(torch.stack(rows))
    return torch.cat(found, 1) @ part.out.weight.T + part.out.bias


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_loop_is_pooling_attention(kind: str):
    model = build(KINDS[kind])
    grid = model.stem.grid((12, 12))
    for block in model.blocks:
        part, width = block.attention, block.attention.qkv.in_features
        x = torch.randn(2, model.config.tokens + grid[0] * grid[1], width, dtype=torch.float64)
        ours = part(x, grid)
        for example, mine in zip(x, ours, strict=True):
            torch.testing.assert_close(mine, looped(model, part, example, grid))
        grid = part.grids(grid)[0]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_block_is_its_figure(kind: str):
    model = build(KINDS[kind])
    grid = model.stem.grid((12, 12))
    x = torch.randn(2, model.config.tokens + grid[0] * grid[1], 8, dtype=torch.float64)
    for block in model.blocks:
        normed = block.norm_attention(x)
        past = widened(x, normed, block.past_attention)
        smaller = block.attention.grids(grid)[0]
        if smaller != grid:
            past = largest(past, grid, model.config.tokens)
        y = past + block.attention(normed, grid)
        normed = block.norm_feed_forward(y)
        right = widened(y, normed, block.past_feed_forward) + block.feed_forward(normed)
        torch.testing.assert_close(block(x, grid), right)
        x, grid = right, smaller
    assert x.shape[-1] == model.out_width == 16


def widened(x: Tensor, normed: Tensor, past: nn.Module) -> Tensor:
    """Return what goes past a part: the input, or where there are weights, its norm by them."""
    return normed @ past.weight.T + past.bias if isinstance(past, nn.Linear) else x


def largest(x: Tensor, grid: tuple[int, int], tokens: int) -> Tensor:
    """Return the largest of 3x3 around every second place, by a loop."""
    rows, columns = (-(-n // 2) for n in grid)
    made = [x[:, n] for n in range(tokens)]
    for i, j in product(range(rows), range(columns)):
        near = [
            tokens + y * grid[1] + z
            for y, z in product(range(2 * i - 1, 2 * i + 2), range(2 * j - 1, 2 * j + 2))
            if 0 <= y < grid[0] and 0 <= z < grid[1]
        ]
        made.append(x[:, near].amax(1))
    return torch.stack(made, 1)


def test_what_is_passed_by_is_the_largest_of_its_neighbours():
    x = torch.randn(2, 1 + 5 * 4, 3)
    assert torch.equal(PoolLargest(2, 1)(x, (5, 4)), largest(x, (5, 4), 1))


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (6, 3), (7, 4), (3, 6), (14, 4), (1, 1)])
def test_distances_are_those_of_the_paper(queries: int, keys: int):
    ours = mvit._distances(queries, keys, torch.device("cpu"))
    right = [[distance(i, j, queries, keys) for j in range(keys)] for i in range(queries)]
    assert ours.tolist() == right
    assert int(ours.min()) >= 0 and int(ours.max()) <= 2 * max(queries, keys) - 2


def test_a_table_that_is_stretched_keeps_a_straight_line():
    part = Decomposed(1, 4, 0)
    line = torch.arange(-3.0, 4.0)
    part.rows.data = part.columns.data = line.unsqueeze(1)
    assert torch.equal(part._between(part.rows, 4, 4)[0, :, 0], torch.arange(0.0, -4.0, -1.0))
    wide = part._between(part.rows, 8, 8)[..., 0]
    steps = (wide[1:, 0] - wide[:-1, 0])[:-2]  # ends are held
    torch.testing.assert_close(steps, steps[:1].expand_as(steps))
    torch.testing.assert_close(wide, -wide.T)  # there and back


def test_residual_pooling_adds_the_pooled_queries():
    model = build(TINY)
    part = model.blocks[1].attention
    part.pool_v.norm.weight.data.zero_()
    part.pool_v.norm.bias.data.zero_()  # so that nothing is found
    grid = model.stem.grid((12, 12))
    x = torch.randn(2, grid[0] * grid[1], part.qkv.in_features, dtype=torch.float64)
    q = part.qkv(x).unflatten(2, (3, part.heads, -1))[:, :, 0].transpose(1, 2)
    right = part.out(part.pool_q(q, grid).transpose(1, 2).flatten(2))
    torch.testing.assert_close(part(x, grid), right)
    part.residual = mvit.POOLED_RESIDUALS["none"]
    torch.testing.assert_close(part(x, grid), part.out.bias.expand_as(right))


@pytest.mark.parametrize("kind", KINDS)
def test_every_map_has_the_grids_of_its_layout(kind: str):
    torch.manual_seed(0)
    model = MViT(KINDS[kind]).eval()
    with watch(model) as maps:
        model(torch.randn(2, 3, 13, 22))
    layouts = model.layout((13, 22))
    assert maps.names() == list(layouts)
    for name, layout in layouts.items():
        queries, keys = layout.query_grid, layout.key_grid
        assert maps[name].weights().shape[2:] == (len(queries), len(keys))
    assert (queries.height, queries.width) == model.grid((13, 22))


def count(config: MViTConfig) -> tuple[int, float]:
    """Return the parameters, and the multiply-adds for an image of the size it is made for."""
    with torch.device("meta"):
        model = MViT(config).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.empty(1, config.channels, config.image, config.image, device="meta"))
    return sum(p.numel() for p in model.parameters()), counter.get_total_flops() / 2


@pytest.mark.parametrize(
    ("name", "millions", "billions"),
    [("mvitv2_t", 24.17, 4.7), ("mvitv2_s", 34.87, 7.0), ("mvit_b", 37.0, 7.8)],
)
def test_published_models_have_their_parameters_and_multiply_adds(
    name: str, millions: float, billions: float
):
    parameters, products = count(preset("mvit", name))
    assert parameters / 1e6 == pytest.approx(millions, abs=0.05 if millions == 37 else 0.005)
    assert round(products / 1e9, 1) == billions


def test_the_two_differ_in_named_parts_only():
    one, two = preset("mvit", "mvit"), preset("mvit", "mvitv2")
    assert replace(one, **{part: getattr(two, part) for part in PARTS}) == two
    assert all(getattr(one, part) != getattr(two, part) for part in PARTS)
    with torch.device("meta"):
        old, new = (dict(MViT(config).named_parameters()) for config in (V1, TINY))
    assert "position.places.table.weight" in old and "tokens" in old
    assert "blocks.0.past_feed_forward.weight" in old
    assert "blocks.1.past_attention.weight" in new
    assert {name.split(".", 2)[-1] for name in new} >= {"attention.position.rows"}


def theirs_to_ours(theirs: dict[str, Tensor], depths: tuple[int, ...]) -> dict[str, Tensor]:
    """Give the weights of timm's model our names."""
    names = {
        "norm1": "norm_attention",
        "norm2": "norm_feed_forward",
        "attn.qkv": "attention.qkv",
        "attn.proj": "attention.out",
        "attn.rel_pos_h": "attention.position.rows",
        "attn.rel_pos_w": "attention.position.columns",
        "mlp.fc1": "feed_forward.inner",
        "mlp.fc2": "feed_forward.outer",
        "shortcut_proj_attn": "past_attention",
        "shortcut_proj_mlp": "past_feed_forward",
    }
    for side in "qkv":
        names[f"attn.pool_{side}"] = f"attention.pool_{side}.convolution"
        names[f"attn.norm_{side}"] = f"attention.pool_{side}.norm"
    made = {
        "stem.project.weight": theirs["patch_embed.proj.weight"].flatten(1),
        "stem.project.bias": theirs["patch_embed.proj.bias"],
        **{f"norm.{n}": theirs[f"norm.{n}"] for n in ("weight", "bias")},
        **{f"head.{n}": theirs[f"head.fc.{n}"] for n in ("weight", "bias")},
    }
    for name, tensor in theirs.items():
        if name.startswith("stages."):
            _, stage, _, block, inside = name.split(".", 4)
            start = next(start for start in names if inside.startswith(start))
            number = sum(depths[: int(stage)]) + int(block)
            made[f"blocks.{number}.{names[start]}{inside.removeprefix(start)}"] = tensor
    # it moves all scores of a query alike, so we have none
    return {name: t for name, t in made.items() if not name.endswith("pool_k.norm.bias")}


@pytest.mark.parametrize("name", ["mvitv2_t", "mvitv2_s"])
def test_ours_equals_theirs(name: str):
    timm = pytest.importorskip(
        "timm.models.mvitv2", reason="timm needs torchvision", exc_type=ImportError
    )
    torch.manual_seed(0)
    theirs = {"mvitv2_t": timm.mvitv2_tiny, "mvitv2_s": timm.mvitv2_small}[name]().double().eval()
    ours = MViT(preset("mvit", name)).double().eval()
    ours.load_state_dict(theirs_to_ours(theirs.state_dict(), ours.config.depths))
    images = torch.randn(1, 3, 224, 224, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (replace(TINY, position="decompose"), "Did you mean 'decomposed'"),
        (replace(TINY, residual="querys"), "Did you mean 'query'"),
        (replace(TINY, widen="feedforward"), "Did you mean 'feed_forward'"),
        (replace(TINY, pooled_queries="al"), "Did you mean 'all'"),
        (replace(TINY, pool="first"), "pool=first with tokens=0"),
        (replace(TINY, depths=()), "depths=\\(\\)"),
        (replace(TINY, block=replace(BLOCK, heads=3)), "heads=3 does not divide width=8"),
        (replace(TINY, block=replace(BLOCK, kv_heads=1)), "kv_heads=1"),
        (replace(TINY, block=replace(BLOCK, order="post")), "order=post"),
    ],
)
def test_a_wrong_config_is_refused_in_words(config: MViTConfig, words: str):
    with pytest.raises(UsageError, match=words):
        MViT(config)
