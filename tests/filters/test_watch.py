"""Filters are watched as models are: their maps are the weights by which they average."""

import pytest
import torch

import regard
from regard.filters import FILTERS, bilateral

EXACT = {"gaussian", "heat", "bilateral", "joint_bilateral", "nonlocal_means"}  # linear in values


def arguments(name: str, image: torch.Tensor) -> dict:
    return {"guide": image.flip(-1)} if name == "joint_bilateral" else {}


@pytest.mark.parametrize("name", sorted(EXACT))
def test_the_map_of_a_filter_gives_its_output(name: str):
    image = torch.rand(2, 3, 7, 9, generator=torch.Generator().manual_seed(1)).double()
    more = arguments(name, image)
    plain = FILTERS[name](image, **more)
    with regard.watch(FILTERS[name]) as maps:
        out = FILTERS[name](image, **more)
    assert out.equal(plain)  # watching changes nothing
    seen = maps[name]
    assert maps.names() == [name] and seen.shape == (2, 1, 63, 63)
    weights = seen.weights()
    made = weights[:, 0] @ image.flatten(2).mT
    torch.testing.assert_close(made.mT.view_as(out), out, rtol=1e-5, atol=1e-6)
    assert seen[1, 0, 5].equal(weights[1, 0, 5])


@pytest.mark.parametrize("name", sorted(FILTERS))
def test_every_filter_can_be_watched_pixel_by_pixel(name: str):
    image = torch.rand(1, 7, 9, generator=torch.Generator().manual_seed(1)).double()
    with regard.watch(FILTERS[name]) as maps:
        FILTERS[name](image, **arguments(name, image))
    row = maps[name].weights(rows=31)
    assert row.shape == (1, 1, 1, 63) and abs(float(row.sum()) - 1) < 1e-3


def test_only_the_filter_that_is_watched_is_recorded():
    image = torch.rand(1, 5, 5)
    with regard.watch(bilateral) as maps:
        FILTERS["gaussian"](image)
        bilateral(image, sigma_r=0.2)
        bilateral(image, sigma_r=0.4)
    assert maps.names() == ["bilateral"] and len(maps.calls("bilateral")) == 2
