"""Toy models of superposition: closed forms, polygons, independence of stacked models, phases."""

import json
import math

import pytest
import torch

import regard
from regard.cli import main
from regard.errors import UsageError
from regard.gallery.superposition import (
    Toys,
    draw,
    exact_losses,
    least_losses,
    phase_of,
    polygon,
    polygon_loss,
    shapes_of,
    train_toys,
)
from regard.gallery.superposition import _loss as sampled_loss


def uniform(sparsity: float, n: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((count,), sparsity), torch.ones(count, n)


def test_the_closed_form_is_the_mean_over_samples():
    torch.manual_seed(3)
    sparsity = torch.tensor([0.0, 0.4, 0.9])
    toys = Toys(torch.randn(3, 2, 4), 0.2 * torch.randn(3, 4), sparsity, torch.rand(3, 4))
    toys.W[1, :, 2] = 1e-4  # a feature that is not represented
    generator = torch.Generator().manual_seed(1)
    sampled = sum(sampled_loss(toys, 20_000, generator) for _ in range(20)) / 20
    assert torch.allclose(toys.losses(), sampled, rtol=0.01)


def test_the_closed_form_of_a_digon_is_the_one_done_by_hand():
    W, zeros = polygon(2).unsqueeze(0), torch.zeros(1, 2)
    loss = exact_losses(W, zeros, torch.tensor([0.9], dtype=torch.float64), torch.ones(1, 2))
    assert float(loss) == pytest.approx(0.1**2 / 3)  # both there: twice the square of the lesser


def test_polygons_of_rare_features_have_the_published_size():
    # Chen et al. (2023), one feature at a time: a pentagon of length 1.17046 and bias -0.28230
    loss, length, bias = polygon_loss(5, 1 - 1e-5)
    assert (length, bias) == pytest.approx((1.17046, -0.28230), abs=2e-4)
    assert polygon_loss(3, 0.999)[0] == pytest.approx(3 / 8 * 1e-6, rel=1e-3)


@pytest.mark.parametrize(
    ("corners", "m", "sparsity", "tries"), [(2, 1, 0.9, 4), (3, 2, 0.5, 24), (5, 2, 0.9, 16)]
)
def test_trained_polygons_lose_what_the_closed_form_says(corners, m, sparsity, tries):
    how = {"steps": 700, "batch": 256, "seed": 2}
    toys = train_toys(*uniform(sparsity, corners, tries), m, **how)
    share = {2: 1 / 2, 3: 2 / 3, 5: 2 / 5}[corners]
    alike = ((toys.dimensionality() - share).abs() < 0.02).all(1)
    assert alike.any(), toys.dimensionality()
    losses = toys.losses()
    least, length, _ = polygon_loss(corners, sparsity)
    assert float(losses[alike].min()) == pytest.approx(least, rel=0.01)
    if corners != 3:  # a digon and a feature alone lose less than a triangle, at this sparsity
        assert alike[losses.argmin()]
    if corners == 5:
        W = toys.W[losses.argmin()]
        turns = torch.atan2(W[1], W[0]).sort().values.diff() * 180 / math.pi
        assert torch.allclose(turns, torch.full((4,), 72.0), atol=1.5)
        assert torch.allclose(W.norm(dim=0), torch.full((5,), length), atol=0.03)


def test_models_side_by_side_do_not_know_of_each_other():
    sparsity, importance = torch.tensor([0.5, 0.9, 0.0]), torch.rand(3, 4)
    whole = train_toys(sparsity, importance, 2, steps=5, batch=32)
    torch.manual_seed(0)
    importance[2] *= 100  # what another model is taught
    again = train_toys(sparsity, importance, 2, steps=5, batch=32)
    assert torch.equal(whole.W[:2], again.W[:2])
    assert not torch.equal(whole.W[2], again.W[2])


def test_samples_have_the_frequency_of_their_sparsity():
    sparsity = torch.tensor([0.3, 0.99])
    x = draw(sparsity, 5, 200_000, torch.Generator().manual_seed(0))
    assert bool((x > 0).any(2).all())
    expected = (1 - sparsity) / (1 - sparsity**5)  # given that some feature is there
    assert torch.allclose((x > 0).float().mean((1, 2)), expected, rtol=0.02)
    assert torch.allclose((x > 0).float().mean(1)[0], expected[0].expand(5), rtol=0.02)


def test_rare_features_share_a_dimension_and_frequent_ones_do_not():
    sparsity = torch.tensor([0.0, 0.99]).repeat_interleave(4)
    importance = torch.tensor([1.0, 0.5]).expand(8, 2)
    toys = train_toys(sparsity, importance, 1, steps=400, batch=128)
    assert (phase_of(toys)[4:] == 2).any() and not (phase_of(toys)[:4] == 2).any()
    told = least_losses(torch.tensor([0.0, 0.99]), torch.tensor([0.5, 0.5]))
    assert told.argmin(1).tolist() == [0, 2]


def test_shapes_are_counted_by_their_fractions():
    assert shapes_of(torch.tensor([0.5, 0.51, 0.4, 0.0, 0.58])) == {
        "digon": 2,
        "pentagon": 1,
        "not represented": 1,
        "between": 1,
    }


def test_pictures_and_json(tmp_path, capsys):
    place = tmp_path / "toys.png"
    words = ["n=3", "m=2", "sparsity=0,0.9", "tries=2", "steps=3", f"out={place}"]
    assert main(["superposition", *words, "--json", "--quiet"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["W"]) == 2 and place.read_bytes()[:4] == b"\x89PNG"
    for view in ("phase", "fractions"):
        more = {"grid": 3} if view == "phase" else {"n": 4, "m": 2, "sparsity": (0.5, 0.9)}
        regard.superposition(view=view, steps=2, tries=1, out=tmp_path / f"{view}.png", **more)
        assert (tmp_path / f"{view}.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"m": 6}, "m=6 dimensions for n=5 features"),
        ({"sparsity": 1.0}, "sparsity=1.0 is too large"),
        ({"view": "phases"}, "did you mean 'phase'"),
        ({"view": "phase", "n": 3}, "n= is not for view=phase"),
        ({"out": "toys.pdf"}, "expected a file that ends in .png"),
        ({"n": 4096, "m": 2, "batch": 65536}, "choose a smaller batch"),
    ],
)
def test_mistakes_are_told(settings, message):
    with pytest.raises(UsageError, match=message):
        regard.superposition(**settings)


def test_shares_of_a_dimension_stick_at_one_half():
    toys = train_toys(*uniform(0.65, 12, 6), 4, steps=600, batch=256)
    share = toys[int(toys.losses().argmin())].dimensionality()[0]
    kept = share[share > 0.1]
    assert len(kept) == 8 and torch.allclose(kept, torch.full((8,), 0.5), atol=0.02)
