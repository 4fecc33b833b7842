"""Local relations: attention in a window, computed in tiles."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from regard.attention.attend import attend
from regard.attention.masks import Sliding
from regard.attention.watch import watch
from regard.errors import UsageError
from regard.layers.patches import grid_at
from regard.models import preset
from regard.models.local import Local, LocalConfig, LocalRelation

TINY = LocalConfig(
    labels=5,
    image=12,
    stem="small",
    stem_width=8,
    inner_widths=(8, 12),
    widths=(12, 16),
    depths=(1, 2),
)


def layer(width: int = 10, **settings) -> LocalRelation:
    """Return a layer in fp64 whose weights are large enough that differences would show."""
    torch.manual_seed(0)
    made = LocalRelation(width, **settings).double()
    for part in made.parameters():
        part.data = torch.randn_like(part)
    return made


def masked(layer: LocalRelation, x: Tensor) -> Tensor:
    """Return what a layer does, by attention over the whole grid with a mask."""
    b, w, height, width = x.shape
    rows, columns = layer.grid((height, width))
    k_at, q_at = grid_at(height, width), grid_at(rows, columns) * layer.stride
    flat = x.flatten(2).mT
    asked = x[:, :, :: layer.stride, :: layer.stride].flatten(2).mT
    q, k = (part.mT.unsqueeze(-1) for part in (layer.query(asked), layer.key(flat)))
    spare = layer.groups * layer.channels_per_head - w
    v = nn.functional.pad(flat, (0, spare)).unflatten(2, (layer.groups, -1)).transpose(1, 2)
    offset = (k_at - q_at.unsqueeze(1)).to(x) / max(1, layer.window // 2)
    bias = layer.prior(offset.flatten(0, 1).T).unflatten(1, offset.shape[:2])
    near = Sliding(layer.window // 2 + 1, q_at, k_at)
    y = attend(q, k, v, score=layer.relation, bias=bias, mask=near)
    y = layer.out(y.transpose(1, 2).flatten(2)[..., :w])
    return y.mT.unflatten(2, (rows, columns))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"stride": 2},
        {"window": 3, "channels_per_head": 4, "stride": 3},
        {"window": 5, "relation": "squared", "channels_per_head": 3},
        {"window": 1, "channels_per_head": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("grid", [(9, 6), (1, 1), (4, 13), (8, 8)], ids=str)
def test_local_is_full_attention_with_a_mask(settings: dict, grid: tuple[int, int]):
    made = layer(**settings)
    x = torch.randn(2, 10, *grid, dtype=torch.float64, requires_grad=True)
    ours, right = made(x), masked(made, x)
    torch.testing.assert_close(ours, right, atol=1e-10, rtol=1e-10)
    toward = torch.randn_like(ours)
    parts = [x, *made.parameters()]
    one, other = (
        torch.autograd.grad(y, parts, toward, materialize_grads=True) for y in (ours, right)
    )
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("relation", ["product", "squared"])
def test_a_loop_over_pixels_is_the_layer(relation: str):
    made, reach = layer(4, channels_per_head=2, window=3, relation=relation, out=nn.Identity()), 1
    x = torch.randn(4, 5, 3, dtype=torch.float64)
    ours = made(x.unsqueeze(0))[0]
    relate = {"product": lambda q, k: q * k, "squared": lambda q, k: -((q - k) ** 2)}[relation]
    with torch.no_grad():
        for i, j, group in product(range(5), range(3), range(2)):
            scores, values = [], []
            for y, z in product((-1, 0, 1), (-1, 0, 1)):
                if 0 <= i + y < 5 and 0 <= j + z < 3:
                    q = made.query.weight[group] @ x[:, i, j]
                    k = made.key.weight[group] @ x[:, i + y, j + z]
                    at = torch.tensor([[y], [z]], dtype=torch.float64) / reach
                    scores.append(relate(q, k) + made.prior(at)[group, 0])
                    values.append(x[2 * group : 2 * group + 2, i + y, j + z])
            right = torch.stack(scores).softmax(0) @ torch.stack(values)
            torch.testing.assert_close(ours[2 * group : 2 * group + 2, i, j], right)


@pytest.mark.parametrize(("window", "stride"), [(7, 1), (7, 2), (3, 1), (5, 3)])
def test_a_query_sees_its_window_and_nothing_else(window: int, stride: int):
    made, grid = layer(8, window=window, stride=stride), (9, 7)
    with torch.no_grad(), watch(made) as maps:
        made(torch.randn(1, 8, *grid, dtype=torch.float64))
    weights = maps[""].weights()
    rows, columns = made.grid(grid)
    asked, place = made.asked(*grid), made.place(*grid)
    assert sorted(asked[asked >= 0].tolist()) == list(range(rows * columns))
    assert weights.shape == (len(place), 1, asked.shape[1], place.shape[1])
    for tile, query in (asked >= 0).nonzero().tolist():
        i, j = divmod(int(asked[tile, query]), columns)
        looks = {int(n) for n in place[tile, weights[tile, 0, query] > 0]}
        near = [range(max(0, c * stride - window // 2), min(n, c * stride + window // 2 + 1))
                for c, n in zip((i, j), grid, strict=True)]  # fmt: skip
        assert looks == {y * grid[1] + z for y, z in product(*near)}
        assert weights[tile, 0, query].sum().item() == pytest.approx(1)


def test_every_map_has_the_tiles_of_its_grid():
    torch.manual_seed(0)
    model = Local(TINY).eval()
    with watch(model) as maps:
        model(torch.randn(2, 3, 13, 22))
    layouts = model.layout((13, 22))
    assert maps.names() == list(layouts)
    for name, layout in layouts.items():
        weights, part = maps[name].weights(), model.get_submodule(name)
        assert isinstance(part, LocalRelation)
        tiles, keys = part.place(layout.key_grid.height, layout.key_grid.width).shape
        assert weights.shape[0] == 2 * tiles and weights.shape[3] == keys


def test_entries_grow_as_the_pixels_do():
    def entries(side: int) -> int:
        with torch.device("meta"):
            model = Local(TINY)
        with watch(model) as maps:
            model(torch.empty(1, 3, side, side, device="meta"))
        return sum(torch.Size(maps[name].shape).numel() for name in maps)

    once = entries(64)
    assert [entries(64 * n) / once for n in (2, 4)] == [4, 16]


def test_inside_a_shifted_image_gives_shifted_features():
    torch.manual_seed(0)
    model = Local(replace(TINY, depths=(1,), widths=(12,), inner_widths=(8,), window=3)).eval()
    image = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    moved = image.roll((2, 2), (2, 3))  # as many pixels as a step of the grid
    model.double()
    one, other = (model.features(x).unflatten(1, (16, 16)) for x in (image, moved))
    torch.testing.assert_close(one[:, 3:-5, 3:-5], other[:, 4:-4, 4:-4], atol=1e-10, rtol=0)


def count(config: LocalConfig) -> tuple[int, float]:
    """Return what a model learns, and its multiply-adds for an image of the size it is made for."""
    with torch.device("meta"):
        model = Local(config).eval()
    learned = sum(p.numel() for p in model.parameters())
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.empty(1, config.channels, config.image, config.image, device="meta"))
    return learned, counter.get_total_flops() / 2


def test_the_published_network_has_its_parameters_and_multiply_adds():
    learned, products = count(preset("local", "lrnet50"))
    assert round(learned / 1e6, 1) == 23.3
    assert round(products / 1e9, 1) == 4.3
    with torch.device("meta"):
        model = Local(preset("local", "lrnet50"))
    shapes = [(len(stage), stage[-1].look.relation.width, stage[-1].widen.convolution.out_channels)
              for stage in model.stages]  # fmt: skip
    assert shapes == [(3, 100, 256), (4, 200, 512), (6, 400, 1024), (3, 800, 2048)]
    assert model.grid((224, 224)) == (7, 7)
    assert {part.window for part in model.modules() if isinstance(part, LocalRelation)} == {7}


def test_it_learns_what_a_pixel_cannot_tell():
    torch.manual_seed(0)
    model = Local(replace(TINY, labels=2, channels=1))
    images = torch.zeros(32, 1, 12, 12)
    labels = torch.arange(32) % 2
    for n in range(32):  # two dots side by side, or one above the other
        y, x = 2 + n % 7, 2 + n // 5
        images[n, 0, y, x] = images[n, 0, y + 2 * (1 - n % 2), x + 2 * (n % 2)] = 3.0
    optimiser = torch.optim.AdamW(model.parameters(), 0.01)
    for _ in range(25):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (replace(TINY, window=4), "window=4.*odd"),
        (replace(TINY, relation="produkt"), "Did you mean 'product'"),
        (replace(TINY, stem="smal"), "Did you mean 'small'"),
        (replace(TINY, pool="first"), "unknown pool 'first'; choose from attention, max, mean"),
        (replace(TINY, depths=(1,)), "depths=\\(1,\\).*every stage"),
        (replace(TINY, depths=(), widths=(), inner_widths=()), "1 to 19"),
    ],
)
def test_a_wrong_config_is_refused_in_words(config: LocalConfig, words: str):
    with pytest.raises(UsageError, match=words):
        Local(config)
