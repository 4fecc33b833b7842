"""Fields and favourite patches: what is planted is found, and nothing moves a place from afar."""

from typing import Any

import pytest
import torch

from regard.errors import UsageError
from regard.insight.receptive import chosen_layers, favourites, fields, grid_layers, held_in
from tests.viewer.test_look_image import KINDS, make


def noise(count: int) -> torch.Tensor:
    return 0.1 * torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def plant(model: torch.nn.Module, channel: int, side: int) -> torch.Tensor:
    """Make a channel of the first layer look for a pattern, and return the pattern."""
    pattern = torch.randn(3, side, side, generator=torch.Generator().manual_seed(2))
    pattern -= pattern.mean()
    stem: Any = model.stem
    weight: Any = stem.project.weight if side == 4 else stem.first.convolution.weight
    with torch.no_grad():
        weight[channel] = pattern.view_as(weight[channel])
    return pattern


@pytest.mark.parametrize(("kind", "side", "at"), [("vit", 4, (12, 20)), ("resnet", 3, (9, 17))])
@pytest.mark.parametrize("share", [1.0, 0.999])
def test_the_best_patch_of_a_planted_detector_is_what_was_planted(kind, side, at, share):
    model, images = make(kind), noise(12)
    pattern = plant(model, 5, side)
    for number in (7, 3):  # and less of it in another image
        box = slice(at[0], at[0] + side), slice(at[1], at[1] + side)
        images[number][:, *box] = (0.5 if number == 3 else 1.0) * pattern
    (found,) = favourites(
        model, lambda some: images[list(some)], 12, "stem", channels=1, patches=2, share=share
    )
    assert found.channel == 5
    assert [patch.image for patch in found.patches] == [7, 3]
    wanted = (at[0], at[1], at[0] + side, at[1] + side)
    assert [tuple(patch.box) for patch in found.patches] == [wanted, wanted]
    assert found.patches[0].value > found.patches[1].value > 0


def test_a_field_is_as_large_as_its_convolutions_reach_and_holds_half_in_less():
    layers = ["stem", "stages.0.0", "stages.1.0", "stages.1.1"]
    found = fields(make("resnet"), noise(4), layers, torch.Generator().manual_seed(1))
    boxes = [held_in(found[name]) for name in layers]
    # 3x3 at first, then a block of two of them, then one of two of which the first halves the grid
    assert [tuple(box) for box in boxes[:3]] == [
        (15, 15, 18, 18),
        (13, 13, 20, 20),
        (10, 10, 23, 23),
    ]
    assert tuple(boxes[3]) == (0, 0, 32, 32)  # attention
    for field in found.values():
        assert (field >= 0).all() and held_in(field, 0.5).side < held_in(field).side


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_has_layers_over_the_image_and_channels_that_like_something(kind):
    model, images = make(kind), noise(4)
    layers = chosen_layers(model, (), 3)
    known = grid_layers(model)
    assert layers[0] == "stem" and layers[-1] == known[-1] and len(layers) == 3
    before = model(images)
    found = fields(model, images, layers, torch.Generator().manual_seed(1))
    assert all(field.shape == (32, 32) and field.max() > 0 for field in found.values())
    (liking,) = favourites(
        model, lambda some: images[list(some)], 4, layers[1], channels=1, patches=2
    )
    for patch in liking.patches:
        box = patch.box
        assert 0 <= box.top < box.bottom <= 32 and 0 <= box.left < box.right <= 32
    assert torch.equal(before, model(images))  # nothing stays behind
    with pytest.raises(UsageError, match="expected some of stem"):
        chosen_layers(model, ("stems",), 3)


def test_images_that_are_all_alike_have_no_favourite():
    images = torch.zeros(3, 3, 32, 32)
    with pytest.raises(UsageError, match="no channel of stem tells the 3 images apart"):
        favourites(make("vit"), lambda some: images[list(some)], 3, "stem", channels=2, patches=1)


def test_the_smallest_square_holds_its_share_and_not_a_pixel_less():
    field = torch.zeros(9, 12)
    field[2:5, 6:9] = 1.0
    field[0, 0] = 1.0
    assert tuple(held_in(field)) == (0, 0, 5, 9)
    assert tuple(held_in(field, 0.9)) == (2, 6, 5, 9)
    assert held_in(field, 0.91).side > 3
    assert tuple(held_in(torch.zeros(4, 5))) == (0, 0, 4, 5)
