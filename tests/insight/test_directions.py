"""Directions of a latent space: those that were planted are found, and purity is what it says."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import regard
from regard.cli import main
from regard.data.image_format import ImageFormat
from regard.data.images import ImageData
from regard.insight.directions import (
    DirectionSettings,
    Vectors,
    at_most,
    by_components,
    by_labels,
    name_numbers,
    purity,
)
from regard.models import preset, pretrainer
from regard.models.variational import VAE, VAEConfig
from regard.models.vit import ViT

SHAPES = {"tall": (12, 3), "wide": (3, 12), "dot": (4, 4)}


def shape(kind: str, rng: np.random.Generator) -> np.ndarray:
    """Return an image (16, 16) of a bright bar or dot, of its own brightness and place."""
    high, wide = (side + int(rng.integers(-1, 2)) for side in SHAPES[kind])
    image = np.zeros((16, 16))
    top, left = ((16 - side) // 2 + int(rng.integers(-1, 2)) for side in (high, wide))
    image[max(0, top) : top + high, max(0, left) : left + wide] = rng.uniform(120, 255)
    return (image + rng.uniform(0, 8, image.shape)).clip(0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Return a folder with images of three shapes, an autoencoder and a classifier of them."""
    home, rng = tmp_path_factory.mktemp("directions"), np.random.default_rng(1)
    for kind in SHAPES:
        (home / "shapes" / kind).mkdir(parents=True)
        for n in range(80):
            Image.fromarray(shape(kind, rng)).save(home / "shapes" / kind / f"{n}.png")
    how = {"data": home / "shapes", "valid": 0.25, "patch": 4, "threads": 1, "quiet": True}
    how |= {"depth": 1, "width": 32, "heads": 2, "ffn_width": 64, "augment": "none"}
    own = {"objective": "variational", "latent": 4, "pretrainer.width": 8, "batch": 32}
    how |= {"lr": 0.004, "steps": 120, "valid_every": 120, "warmup": 10, "ema": 0.9}
    regard.train("pretrain", out=home / "vae", **how, **own)
    regard.train(
        "images", out=home / "judge", **{**how, "steps": 40, "valid_every": 40}, linear=False
    )
    return home


# The autoencoder


def vit(**changes) -> ViT:
    config = replace(preset("vit", "tiny"), labels=0, depth=1, patch=4)
    return ViT(replace(config, **changes))


def test_loss_is_the_evidence_lower_bound():
    torch.manual_seed(0)
    encoder = vit(channels=1, image=8)
    vae = VAE(encoder, VAEConfig(latent=3, beta=2.0, width=4)).eval().double()
    vae.log_deviation.data.fill_(-0.3)
    images, noise = torch.randn(5, 1, 8, 8).double(), torch.randn(5, 3).double()
    rebuilt, mean, log_variance = vae(images, noise)
    q = torch.distributions.Normal(mean, (log_variance / 2).exp())
    p = torch.distributions.Normal(rebuilt, math.exp(-0.3))
    prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    likely = p.log_prob(images).flatten(1).sum(1) + 32 * math.log(2 * math.pi)  # a constant
    bound = likely - 2 * torch.distributions.kl_divergence(q, prior).sum(1)
    assert torch.allclose(vae.loss(images, noise), -bound.sum() / 64)
    assert torch.equal(vae.decode(mean + q.scale * noise), rebuilt)
    vae.loss(images, noise).backward()
    still = [n for n, x in vae.named_parameters() if x.grad is None or not x.grad.any()]
    assert still == []


@pytest.mark.parametrize("image", [8, 28, 33, 64])
def test_images_of_any_side_are_painted_in_their_size(image):
    kind, cls = pretrainer("vae")
    vae = cls(vit(channels=3, image=image), kind(latent=2, width=2))
    assert vae.decode(torch.zeros(2, 2)).shape == (2, 3, image, image)
    with pytest.raises(regard.UsageError, match="reads"):
        vae.encode(torch.zeros(1, 3, image + 4, image))


def test_it_rebuilds_what_it_saw(home):
    model = regard.load(home / "vae")
    whole = model.predictor.whole()
    picture = np.stack([shape(kind, np.random.default_rng(7)) for kind in SHAPES])
    pixels = model.format.normalise(torch.from_numpy(picture).unsqueeze(1))
    with torch.no_grad():
        rebuilt = whole.decode(whole.encode(pixels)[0])
    error, spread = (rebuilt - pixels).square().mean(), pixels.var()
    assert error < 0.35 * spread


# Directions


def planted(rng: torch.Generator) -> Vectors:
    labels = torch.arange(3).repeat_interleave(50)
    means = torch.tensor([[0.0, 0, 0, 0], [3.0, 0, 0, 0], [0.0, 9, 0, 0]])
    noise = torch.randn(150, 4, generator=rng) * torch.tensor([0.1, 0.1, 2.0, 0.1])
    return Vectors(means[labels] + noise, labels, ["a", "b", "c"])


def test_directions_that_were_planted_are_found():
    known = planted(torch.Generator().manual_seed(0))
    (nearest, *_) = by_labels(known, DirectionSettings())
    assert nearest.name in ("a to b", "b to a")
    (named,) = by_labels(known, DirectionSettings(start="a", to="b"))
    assert (named.start, named.to) == (0, 1)
    assert torch.equal(named.vector, known.mean(1) - known.mean(0))
    assert torch.cosine_similarity(named.vector[:2], torch.tensor([1.0, 0]), dim=0) > 0.99
    (first, *_) = by_components(known, DirectionSettings(start="a"))
    assert abs(float(first.vector[2])) == pytest.approx(2 * 2.0, rel=0.25)  # two deviations
    assert float(first.vector[[0, 1, 3]].abs().max()) < 0.5
    assert len(by_labels(known, DirectionSettings(count=9))) == 3


def test_purity_is_the_share_that_went_where_it_should():
    before = np.array([0, 0, 0, 0, 2])
    assert purity(before, np.array([1, 1, 1, 1, 2]), 0, 1) == 1
    assert purity(before, np.array([0, 1, 2, 0, 2]), 0, 1) == 0.5
    assert purity(before, np.array([2, 2, 2, 2, 2]), 0, 1) == 0
    assert purity(before, before, 0, 1) == 0
    assert purity(before, np.array([0, 0, 0, 0, 1]), 0, 1) == 0  # it was of another label


def test_moving_along_labels_makes_another_thing_of_it(home, capsys):
    words = ["directions", str(home / "vae"), f"data={home / 'shapes'}", f"judge={home / 'judge'}"]
    words += ["from=tall", "to=wide", f"out={home / 'strips.png'}", "--json", "--quiet"]
    assert main(words) == 0
    numbers = json.loads(capsys.readouterr().out)["numbers"]["tall to wide"]
    assert numbers["seen as the first, %"] > 90
    assert numbers["moved: as the second, %"] > 80 > numbers["random: as the second, %"]
    assert numbers["purity, %"] > 80
    assert min(Image.open(home / "strips.png").size) > 200


def test_components_and_pages(home, tmp_path):
    model = regard.load(home / "vae")
    found = regard.directions(
        model, data=home / "shapes", by="components", count=2, rows=1, out=tmp_path / "strips.html"
    )
    assert len(found.directions) == 2 and found.directions[0].both
    lengths = [row["length"] for row in found.numbers.values()]
    assert lengths == sorted(lengths, reverse=True)
    assert "judge=MODEL" in (tmp_path / "strips.html").read_text()


def test_images_are_chosen_by_label_and_seed(home):
    from regard.insight.directions import read_labelled

    data = read_labelled(regard.load(home / "vae"), DirectionSettings(data=str(home / "shapes")))
    some, same = (at_most(data.parts["train"], 5, 3) for _ in range(2))
    assert some.hashes == same.hashes and len(some) == 15
    assert torch.bincount(some.labels).tolist() == [5, 5, 5]
    assert not set(some.hashes) & set(data.parts["valid"].hashes)


def test_labels_that_are_numbers_are_named():
    data = ImageData({}, ImageFormat(), classes=["0", "1", "2"])
    name_numbers(data, ["a", "b"])
    assert data.classes == ["0", "1", "2"]
    name_numbers(data, ["a", "b", "c"])
    assert data.classes == ["a", "b", "c"]
    name_numbers(data, ["d", "e", "f"])
    assert data.classes == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("", "data is missing"),
        ("data=SHAPES by=label", "Did you mean 'labels'?"),
        ("data=SHAPES from=tal", "Did you mean 'tall'?"),
        ("data=SHAPES from=tall to=tall", "no images of two such labels"),
        ("data=SHAPES by=components to=tall", "leads to no label"),
        ("data=SHAPES judge=fashion", "expected a classifier"),
        ("data=SHAPES judge=shakespeare", "expected a classifier"),
        ("data=SHAPES out=strips.gif", ".png or .html"),
        ("data=SHAPES count=32 rows=16", "too many for one picture"),
        ("data=nowhere", "nowhere"),
    ],
)
def test_mistakes_cost_one_line(home, capsys, words, wrong):
    words = words.replace("SHAPES", str(home / "shapes")).split()
    assert main(["directions", str(home / "vae"), *words]) == 2
    error = capsys.readouterr().err
    assert wrong in error and error.count("\n") == 1


def test_a_model_that_paints_nothing_is_refused(home, capsys):
    for model in ("fashion", "shakespeare", str(home / "judge")):
        assert main(["directions", model, f"data={home / 'shapes'}"]) == 2
        assert "objective=variational" in capsys.readouterr().err
