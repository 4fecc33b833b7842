"""Filters: each is the weighted average that its paper says, and attention is what computes it."""

import importlib
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard import native
from regard.cli import main
from regard.errors import UsageError
from regard.filters import FILTERS, WEIGHTS
from regard.filters.bilateral import bilateral, filter_by_guide
from regard.filters.bilateral import exact as exact_bilateral
from regard.filters.diffusion import heat, matching_sigma, perona_malik
from regard.filters.gaussian import gaussian
from regard.filters.guided import joint_bilateral
from regard.filters.nonlocal_means import exact as exact_means
from regard.filters.nonlocal_means import nonlocal_means
from regard.filters.variation import total_variation
from regard.gallery.texture import texture
from regard.metrics.image import noisy, psnr, ssim

DATA = Path(os.environ.get("REGARD_DATA", Path(__file__).parents[3] / "shared" / "data"))
SIZES = [(1, 1, 1), (3, 1, 5), (1, 9, 8), (3, 11, 6)]
# of the filters that give an image of the same size
SAME = list(FILTERS)
MEANS = [
    {},
    {"distance": "plain", "h": 0.5},
    {"noise": 0.1},
    {"patch_weights": "gaussian", "patch": 5},
    {"distance": "plain", "noise": 0.05, "h": 0.4, "patch": 3},
]


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def smooth(size: int = 48) -> Tensor:
    """Return a picture with an edge, a slope and a curve."""
    at = torch.linspace(0, 1, size, dtype=torch.float64)
    x = 0.2 + 0.3 * at + 0.4 * (at.unsqueeze(1) > 0.5) * (at > 0.3)
    return (x + 0.1 * torch.sin(9 * at.unsqueeze(1))).unsqueeze(0)


def keywords(name: str, image: Tensor) -> dict:
    return {"guide": image.flip(-1)} if name == "joint_bilateral" else {}


def mirror(at: int, size: int) -> int:
    while not 0 <= at < size:
        at = -at if at < 0 else 2 * (size - 1) - at
    return at if size > 1 else 0


def loop(image: Tensor, weight, radius: int | None) -> Tensor:
    """Filter (c, h, w) by plain loops over pixels."""
    c, high, wide = image.shape
    out = torch.zeros_like(image)
    for y in range(high):
        for x in range(wide):
            total, values = 0.0, torch.zeros(c, dtype=image.dtype)
            for v in range(high):
                for u in range(wide):
                    if radius is None or max(abs(v - y), abs(u - x)) <= radius:
                        w = weight((y, x), (v, u))
                        total, values = total + w, values + w * image[:, v, u]
            out[:, y, x] = values / total
    return out


def loop_bilateral(image: Tensor, sigma_s: float, sigma_r: float, radius: int | None) -> Tensor:
    def weight(p, q):
        space = (p[0] - q[0]) ** 2 + (p[1] - q[1]) ** 2
        value = float((image[:, *p] - image[:, *q]).square().sum())
        return math.exp(-space / (2 * sigma_s**2)) * math.exp(-value / (2 * sigma_r**2))

    return loop(image, weight, radius)


def loop_means(
    image, radius, h=0.1, patch=7, distance="squared", patch_weights="flat", noise=0.0
) -> Tensor:
    c, high, wide = image.shape
    reach = patch // 2
    share = {}
    for a in range(-reach, reach + 1):
        for b in range(-reach, reach + 1):
            width = max(1.0, (patch - 1) / 4)
            round_one = math.exp(-(a * a + b * b) / (2 * width**2))
            share[a, b] = 1.0 if patch_weights == "flat" else round_one
    whole = sum(share.values())
    rows = image.tolist()

    def value(channel, y, x):
        return rows[channel][mirror(y, high)][mirror(x, wide)]

    def weight(p, q):
        apart = sum(
            s * (value(i, p[0] + a, p[1] + b) - value(i, q[0] + a, q[1] + b)) ** 2
            for (a, b), s in share.items()
            for i in range(c)
        )
        apart = max(0.0, apart / whole / c - 2 * noise**2)
        return math.exp(-(apart if distance == "squared" else math.sqrt(apart)) / h**2)

    return loop(image, weight, radius)


# The papers' formulas


@pytest.mark.parametrize("window", [5, "full"])
@pytest.mark.parametrize("channels", [1, 3])
def test_bilateral_equals_plain_loops(channels, window):
    image = random(channels, 7, 8)
    radius = None if window == "full" else window // 2
    theirs = loop_bilateral(image, 2.0, 0.2, radius)
    ours = bilateral(image, sigma_s=2.0, sigma_r=0.2, window=window)
    assert (ours - theirs).abs().max() < 1e-9


@pytest.mark.parametrize("window", [5, "full"])
@pytest.mark.parametrize("how", MEANS, ids=str)
def test_nonlocal_means_equals_plain_loops(how, window):
    image = random(3 if "noise" in how else 1, 5, 6)
    radius = None if window == "full" else window // 2
    how = {"h": 0.2, "patch": 3, **how}
    ours = nonlocal_means(image, window=window, **how)
    assert (ours - loop_means(image, radius, **how)).abs().max() < 1e-9


@pytest.mark.parametrize("conductance", ["exponential", "rational"])
def test_perona_malik_equals_plain_loops(conductance):
    image, k, step = random(1, 6, 5), 0.3, 0.2
    u = image[0].tolist()
    for _ in range(3):
        old = [row[:] for row in u]
        for y in range(6):
            for x in range(5):
                for v, w in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
                    if 0 <= v < 6 and 0 <= w < 5:
                        d = old[v][w] - old[y][x]
                        g = (d / k) ** 2
                        c = math.exp(-g) if conductance == "exponential" else 1 / (1 + g)
                        u[y][x] += step * c * d
    ours = perona_malik(image, k=k, steps=3, step=step, conductance=conductance)
    assert (ours[0] - torch.tensor(u, dtype=torch.float64)).abs().max() < 1e-12


def test_total_variation_cannot_be_improved():
    image = noisy(smooth(24), 0.1)

    def cost(u):
        down = torch.nn.functional.pad(u.diff(dim=-2), (0, 0, 0, 1))
        right = torch.nn.functional.pad(u.diff(dim=-1), (0, 1))
        slope = (down**2 + right**2).sqrt().sum()
        return float(slope + (u - image).square().sum() / (2 * 0.2))

    best = total_variation(image, strength=0.2, steps=2000)
    found = cost(best)
    assert found < cost(total_variation(image, strength=0.2, steps=30))
    others = [best + 0.02 * random(*best.shape, seed=s) - 0.01 for s in range(5)]
    others += [best * 0.99 + 0.01 * image, best * 0.99 + 0.01 * best.mean()]
    assert all(cost(other) > found for other in others)


# Attention computes them


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_windows_equal_attention_with_a_mask(size, dtype):
    image = random(2, *size, dtype=dtype)
    close = 1e-5 if dtype == torch.float32 else 1e-10
    for how in MEANS:
        found, oracle = nonlocal_means(image, window=5, **how), exact_means(image, 2, **how)
        assert (found - oracle).abs().max() < close, how
    found = bilateral(image, sigma_s=1.5, sigma_r=0.3, window=5)
    assert (found - exact_bilateral(image, image, 1.5, 0.3, 2)).abs().max() < close


@pytest.mark.parametrize("how", MEANS, ids=str)
def test_full_field_equals_a_window_over_everything(how):
    image = random(1, 3, 9, 7)
    full = nonlocal_means(image, window="full", **how)
    assert (full - nonlocal_means(image, window=19, **how)).abs().max() < 1e-10
    full = bilateral(image, sigma_s=2.0, sigma_r=0.3, window="full")
    assert (full - bilateral(image, sigma_s=2.0, sigma_r=0.3, window=19)).abs().max() < 1e-10


def test_bands_of_rows_change_nothing(monkeypatch):
    image = random(3, 20, 9)
    whole = nonlocal_means(image, window=7), bilateral(image, window=7)
    monkeypatch.setattr("regard.filters.pixels.BAND_PIXELS", 40)
    assert torch.allclose(whole[0], nonlocal_means(image, window=7), atol=1e-12)
    assert torch.allclose(whole[1], bilateral(image, window=7), atol=1e-12)


class Largest(TorchDispatchMode):
    """Note the largest piece of memory that an operation returns."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else [out]:
            if isinstance(one, Tensor):
                self.most = max(self.most, one.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("how", [{}, {"distance": "plain"}], ids=str)
def test_full_field_needs_no_square_of_weights(how):
    image = random(1, 48, 48, dtype=torch.float32)
    with torch.no_grad(), Largest() as seen:
        nonlocal_means(image, window="full", patch=3, **how)
    square = 4 * (48 * 48) ** 2
    limit = square / 20 if not how else 4 * 2**22 + 1  # those that no kernel has go by tiles
    assert 0 < seen.most <= limit


# Laws


@pytest.mark.parametrize("window", [7, "full"])
def test_bilateral_without_bound_on_values_is_gaussian(window):
    image = random(3, 14, 17)
    for sigma_r in ("inf", math.inf, 1e9):
        found = bilateral(image, sigma_s=1.7, sigma_r=sigma_r, window=window)
        assert (found - gaussian(image, sigma=1.7, window=window)).abs().max() < 1e-12


def test_log_weights_are_content_plus_position():
    image = random(1, 9, 9)
    at = (4, 3)
    both = WEIGHTS["bilateral"](image, at, sigma_s=2.0, sigma_r=0.3, window="full").log()
    position = WEIGHTS["gaussian"](image, at, sigma=2.0, window="full").log()
    content = -(image[0] - image[0, 3, 4]).square() / (2 * 0.3**2)
    constant = both - position - content  # the logarithm of what makes the sum one
    assert float(constant.max() - constant.min()) < 1e-9


def test_heat_is_gaussian_of_matching_width():
    image = smooth()
    errors = []
    for steps in (20, 80):  # the same time in finer steps, then a wider Gaussian
        sigma = matching_sigma(steps, 0.1)
        blurred = gaussian(image, sigma=sigma, border="mirror")
        errors.append(float((heat(image, steps=steps, step=0.1) - blurred).abs().max()))
        assert (image - blurred).abs().max() > 0.05
    assert errors[0] < 5e-3 and errors[1] < errors[0] / 2
    assert matching_sigma(50, 0.25) == 5.0


def test_heat_is_where_random_walkers_come_from():
    # of walkers that stay or step to one of four neighbours, from the middle of an empty image
    image = torch.zeros(1, 9, 9, dtype=torch.float64)
    image[0, 4, 4] = 1
    chance = {(4, 4): 1.0}
    for _ in range(3):
        later: dict = {}
        for (y, x), p in chance.items():
            for v, u, q in ((0, 0, 0.2), (1, 0, 0.2), (-1, 0, 0.2), (0, 1, 0.2), (0, -1, 0.2)):
                later[y + v, x + u] = later.get((y + v, x + u), 0.0) + p * q
        chance = later
    found = heat(image, steps=3, step=0.2)[0]
    assert all(abs(found[place] - p) < 1e-12 for place, p in chance.items())


def test_perona_malik_without_edges_is_heat_and_keeps_edges():
    image = smooth()
    warm = heat(image, steps=15)
    for conductance in ("exponential", "rational"):
        found = perona_malik(image, k=1e6, steps=15, conductance=conductance)
        assert (found - warm).abs().max() < 1e-9
    step = torch.zeros(1, 8, 8, dtype=torch.float64)
    step[..., 4:] = 1
    kept = perona_malik(step, k=0.05, steps=50)
    assert (kept - step).abs().max() < 1e-6 < (heat(step, steps=50) - step).abs().max()


@pytest.mark.parametrize("act", [heat, perona_malik])
def test_unstable_steps_are_refused(act):
    image = random(1, 6, 6)
    assert act(image, steps=200, step=0.25).max() <= image.max()  # never more than there was
    for step in (0.26, 0.0, -0.1, math.nan):
        with pytest.raises(UsageError, match="not stable; expected more than 0 and at most 0.25"):
            act(image, step=step)


@pytest.mark.parametrize("name", ["heat", "perona_malik", "total_variation"])
def test_nothing_is_lost_or_gained(name):
    image = random(3, 12, 9)
    found = FILTERS[name](image).mean((-2, -1))
    assert torch.allclose(found, image.mean((-2, -1)), atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", SAME)
def test_any_size_any_batch(name, size, dtype):
    image = random(2, 1, *size, dtype=dtype)
    found = FILTERS[name](image, **keywords(name, image))
    assert found.shape == image.shape and found.dtype == dtype and found.isfinite().all()
    for one, alone in zip(found, image, strict=True):  # batch neighbours never matter
        assert torch.allclose(FILTERS[name](alone, **keywords(name, alone)), one, atol=1e-6)
    even = torch.full_like(image, 0.3)
    assert torch.allclose(FILTERS[name](even, **keywords(name, even)), even, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in SAME if name != "total_variation"])
def test_a_mirrored_image_gives_the_mirrored_answer(name):
    image = random(1, 10, 7)
    there = FILTERS[name](image, **keywords(name, image))
    for dims in ((-1,), (-2,)):
        turned = {key: x.flip(dims) for key, x in keywords(name, image).items()}
        assert torch.allclose(FILTERS[name](image.flip(dims), **turned), there.flip(dims))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", SAME)
def test_weights_of_a_pixel_are_what_it_is_averaged_with(name, size):
    image = random(*size)
    how = keywords(name, image)
    at = x, y = size[2] // 2, size[1] // 3
    weights = WEIGHTS[name](image, at, **how)
    assert weights.shape == image.shape[1:]
    assert abs(float(weights.sum()) - 1) < 1e-9
    if name != "total_variation":  # of which they are the derivative
        assert weights.min() >= 0
        found = (weights * image).sum((-2, -1))
        assert torch.allclose(found, FILTERS[name](image, **how)[:, y, x], atol=1e-9)


@pytest.mark.parametrize("name", SAME)
def test_weights_need_only_a_piece_of_the_image(name):
    image = random(1, 40, 50)
    short = {"steps": 4} if name in ("heat", "perona_malik", "total_variation") else {}
    short |= {"window": 5} if name.endswith(("bilateral", "means")) else {}
    how = {**keywords(name, image), **short}
    given = image.clone().requires_grad_()
    weights = WEIGHTS[name](image, (31, 12), **how)
    if name == "nonlocal_means":
        oracle = (weights * image).sum() - FILTERS[name](image, **how)[0, 12, 31]
        assert abs(float(oracle)) < 1e-12
        return
    if name in ("bilateral", "joint_bilateral"):
        how["guide"] = how.get("guide", image)
        made = joint_bilateral(given, **how)
    elif name == "perona_malik":
        assert abs(float((weights * image).sum() - FILTERS[name](image, **how)[0, 12, 31])) < 1e-12
        return
    else:
        made = FILTERS[name](given, **how)
    (oracle,) = torch.autograd.grad(made[0, 12, 31], given)
    assert torch.allclose(weights, oracle[0], atol=1e-12)


def test_a_guide_that_is_the_image_gives_the_bilateral_filter():
    image = random(3, 9, 9)
    assert torch.equal(joint_bilateral(image, guide=image), bilateral(image))
    blank = torch.zeros(1, 9, 9, dtype=torch.float64)
    blurred = gaussian(image, sigma=3.0, window=19)
    assert torch.allclose(joint_bilateral(image, guide=blank), blurred)
    with pytest.raises(UsageError, match="expected the same height and width"):
        joint_bilateral(image, guide=random(1, 9, 8))


def test_filters_can_be_trained_through():
    image = random(1, 6, 6).requires_grad_()
    for name in SAME:
        (found,) = torch.autograd.grad(FILTERS[name](image, **keywords(name, image)).sum(), image)
        assert found.isfinite().all() and found.any(), name


@pytest.mark.parametrize(
    "call, told",
    [
        (lambda x: bilateral(x.byte()), "expected a tensor of float or double"),
        (lambda x: bilateral(x[0, 0]), "expected (..., channels, h, w)"),
        (lambda x: bilateral(x, sigma_s=0), "sigma_s=0 is too small"),
        (lambda x: bilateral(x, window=4), "window=4 has no centre"),
        (lambda x: gaussian(x, sigma=-1), "sigma=-1 is too small"),
        (lambda x: gaussian(x, border="miror"), "Did you mean 'mirror'?"),
        (lambda x: perona_malik(x, k=10), "k=10 is more than any difference"),
        (lambda x: perona_malik(x, k=10), "of 0 to 255 it is k=0.0392"),
        (lambda x: perona_malik(255 * x), "k=0.04 is for values from 0 to 1, but these reach"),
        (lambda x: bilateral(x, sigma_r=25), "of 0 to 255 it is sigma_r=0.098"),
        (lambda x: nonlocal_means(x, h=10), "h=10 is more than any difference"),
        (lambda x: perona_malik(x, conductance="exp"), "choose from exponential, rational"),
        (lambda x: nonlocal_means(x, patch=2), "patch=2 has no centre"),
        (lambda x: nonlocal_means(x, distance="square"), "Did you mean 'squared'?"),
        (lambda x: nonlocal_means(x, noise=-1), "noise=-1 is too small"),
        (lambda x: total_variation(x, steps=-1), "steps=-1; expected a whole number"),
        (lambda x: texture(x, patch=9), "no smaller than a patch"),
        (lambda x: WEIGHTS["heat"](x, (6, 0)), "pixel 6,0 is outside"),
    ],
)
def test_mistakes_are_told(call, told):
    with pytest.raises(UsageError) as caught:
        call(random(1, 6, 6))
    assert told in str(caught.value)


# Texture


def test_texture_is_made_of_the_sample_only():
    sample = random(3, 9, 8)
    told: list[int] = []
    found = texture(sample, height=12, width=13, patch=5, progress=told.append)
    assert found.shape == (3, 12, 13) and sum(told) == 12 * 13
    known = {tuple(pixel) for pixel in sample.flatten(1).T.tolist()}
    assert {tuple(pixel) for pixel in found.flatten(1).T.tolist()} <= known
    assert torch.equal(found, texture(sample, height=12, width=13, patch=5))
    assert not torch.equal(found, texture(sample, height=12, width=13, patch=5, seed=1))


def test_texture_goes_on_with_a_pattern():
    stripes = (torch.arange(15) % 3 == 0).double().expand(1, 15, 15)
    found = texture(stripes, height=20, width=20, patch=7, tolerance=0)
    assert any(
        torch.equal(found[0], (torch.arange(20) % 3 == shift).double().expand(20, 20))
        for shift in range(3)
    )


def test_of_a_neighbourhood_what_is_near_counts_most():
    """By a Gaussian of a width of side / 6.4, as Efros and Leung have it."""
    differ = 0
    for seed in range(12):
        sample = random(1, 7, 60, seed=seed)  # a patch can lie in the middle row only
        *known, new = texture(sample, height=1, width=4, patch=7, tolerance=0, seed=seed)[0, 0]
        squares = [
            torch.stack([(known[3 - i] - sample[0, 3, x - i]) ** 2 for i in (1, 2, 3)])
            for x in range(3, 57)
        ]
        near = torch.exp(-((torch.arange(1, 4).double() / (7 / 6.4)) ** 2) / 2)
        weighted, flat = ((torch.stack(squares) * by).sum(1).argmin() for by in (near, near**0))
        assert new == sample[0, 3, 3 + weighted]
        differ += int(weighted != flat)
    assert differ > 2, "or nothing was told"


# Theirs


def photo(channels: int = 1) -> np.ndarray:
    """Return noise on a smooth picture in the shape that other tools take."""
    image = noisy(smooth(64).expand(channels, -1, -1), 0.05).clamp(0, 1)
    return image.permute(1, 2, 0).squeeze(-1).numpy()


def ours(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.atleast_3d(array)).permute(2, 0, 1)


def inner(image: Tensor | np.ndarray, edge: int) -> Tensor:
    image = ours(image) if isinstance(image, np.ndarray) else image
    return image[:, edge:-edge, edge:-edge]


def test_gaussian_equals_scikit_image():
    filters = pytest.importorskip("skimage.filters")
    array = photo()
    for theirs, border in (("nearest", "nearest"), ("reflect", "mirror")):
        for sigma in (0.7, 2.0, 20.0):
            found = gaussian(ours(array), sigma=sigma, border=border)
            expected = ours(filters.gaussian(array, sigma, mode=theirs))
            assert (found - expected).abs().max() < 1e-10


@pytest.mark.parametrize("channels", [1, 3])
def test_bilateral_equals_scikit_image(channels):
    restoration = pytest.importorskip("skimage.restoration")
    array = photo(channels)
    how = {"win_size": 9, "sigma_color": 0.15, "channel_axis": -1 if channels == 3 else None}
    # their table of the Gaussian of distance is askew by a pixel: a flat one shows the rest;
    # and they divide a distance between colours by the number of channels
    for sigma_s, most in ((1000.0, 2e-4), (2.0, 0.15)):
        theirs = restoration.denoise_bilateral(array, sigma_spatial=sigma_s, **how)
        found = bilateral(ours(array), sigma_s=sigma_s, sigma_r=0.15 * channels, window=9)
        assert (inner(found, 4) - inner(theirs, 4)).abs().max() < most


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_nonlocal_means_equals_scikit_image(channels, noise):
    restoration = pytest.importorskip("skimage.restoration")
    array = photo(channels)
    axis = -1 if channels == 3 else None
    # their exponential is rough and ends at exp(-5); their fast patches lack a row and a column
    for fast, kind, most, mean in ((False, "gaussian", 4e-3, 4e-4), (True, "flat", 0.08, 4e-3)):
        theirs = restoration.denoise_nl_means(
            array, 5, 4, 0.08, fast_mode=fast, sigma=noise, channel_axis=axis
        )
        found = nonlocal_means(
            ours(array), patch=5, window=9, h=0.08, noise=noise, patch_weights=kind
        )
        apart = (inner(found, 7) - inner(theirs, 7)).abs()
        assert apart.max() < most and apart.mean() < mean, fast


def test_total_variation_equals_scikit_image():
    restoration = pytest.importorskip("skimage.restoration")
    array = photo()
    theirs = restoration.denoise_tv_chambolle(array, 0.12, eps=0, max_num_iter=41)
    found = total_variation(ours(array), strength=0.12, steps=40)
    assert (found - ours(theirs)).abs().max() < 1e-10


def test_bilateral_equals_opencv():
    cv2 = pytest.importorskip("cv2")
    array = photo().astype(np.float32)
    theirs = cv2.bilateralFilter(array, 13, 0.15, 2.0)
    found = bilateral(ours(array), sigma_s=2.0, sigma_r=0.15, window=13)
    # theirs cuts the corners off the window, and looks the Gaussian up in a table
    assert (inner(found, 6) - inner(theirs, 6)).abs().max() < 3e-3


def test_nonlocal_means_equals_opencv():
    cv2 = pytest.importorskip("cv2")
    bytes_ = (255 * photo()).round().astype(np.uint8)
    theirs = cv2.fastNlMeansDenoising(bytes_, None, 20, 5, 9).astype(np.float64) / 255
    found = nonlocal_means(ours(bytes_ / 255), patch=5, window=9, h=20 / 255)
    # theirs counts in whole numbers
    assert (inner(found, 6) - inner(theirs, 6)).abs().max() < 1.5 / 255


@pytest.mark.parametrize("size", [(11, 11), (40, 33)])
@pytest.mark.parametrize("channels", [1, 3])
def test_scores_equal_scikit_image(channels, size):
    metrics = pytest.importorskip("skimage.metrics")
    clean, image = random(channels, *size), random(channels, *size, seed=1)
    theirs = metrics.structural_similarity(
        clean.numpy(),
        image.numpy(),
        gaussian_weights=True,
        sigma=1.5,
        use_sample_covariance=False,
        data_range=1.0,
        channel_axis=0,
    )
    assert abs(ssim(image, clean) - theirs) < 1e-9
    theirs = metrics.peak_signal_noise_ratio(clean.numpy(), image.numpy(), data_range=1.0)
    assert abs(psnr(image, clean) - theirs) < 1e-9
    assert ssim(clean, clean) == pytest.approx(1) and psnr(clean, clean) == math.inf


# The command line


@pytest.fixture
def png(tmp_path) -> Path:
    pixels = (255 * smooth(24).expand(3, -1, -1)).byte()
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


@pytest.mark.parametrize("name", [*FILTERS, "texture"])
def test_every_filter_has_its_command(name, png, capsys):
    out = png.parent / "deep" / "out.png"
    more = [f"guide={png}"] if name == "joint_bilateral" else []
    more += ["height=6", "width=7", "patch=5"] if name == "texture" else []
    assert main(["filter", name, str(png), f"out={out}", *more]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    found = np.asarray(Image.open(out))
    if name == "texture":
        assert found.shape == (6, 7, 3)
        return
    image = torch.from_numpy(np.asarray(Image.open(png)).copy()).permute(2, 0, 1).float() / 255
    how = {"guide": image} if more else {}
    expected = (255 * FILTERS[name](image, **how).clamp(0, 1)).round().permute(1, 2, 0)
    assert np.array_equal(found, expected.byte().numpy())
    drawn = png.parent / "weights.png"
    assert main(["filter", name, str(png), f"out={drawn}", "weights_at=3,20", *more]) == 0
    assert Image.open(drawn).size > (240, 240)
    capsys.readouterr()
    assert main(["filter", name, "--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"\n  {key} " in told for key in ("out", "weights_at"))


@pytest.mark.parametrize("mode, value", [("I;16", 40000), ("L", 99), ("RGBA", (9, 200, 30, 255))])
def test_photos_of_all_kinds_are_read(mode, value, tmp_path):
    Image.new(mode, (5, 4), value).save(tmp_path / "a.png")
    out = tmp_path / "b.webp"
    assert main(["filter", "gaussian", str(tmp_path / "a.png"), f"out={out}", "sigma=1"]) == 0
    assert Image.open(out).size == (5, 4)


def test_compare_tells_scores_and_grid_is_drawn(png, capsys):
    out = png.parent / "compare.png"
    words = ["filter", "compare", str(png), "sigma=20", "weights_at=10,12", f"out={out}"]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told["scores"]) == [
        "noisy",
        "Gaussian",
        "anisotropic",
        "total variation",
        "bilateral",
        "non-local means",
    ]
    scores = {name: one["psnr"] for name, one in told["scores"].items()}
    assert abs(scores["noisy"] - 20 * math.log10(255 / 20)) < 0.5
    assert all(score > scores["noisy"] for name, score in scores.items() if name != "noisy")
    first = out.read_bytes()
    assert main(words) == 0 and out.read_bytes() == first
    assert "non-local means" in capsys.readouterr().out
    assert main(["filter", "grid", str(png), f"out={out}", "size=16"]) == 0
    assert Image.open(out).height > Image.open(png).height


@pytest.mark.parametrize(
    "words, told",
    [
        ([], "FILTER is missing"),
        (["bilateral"], "PHOTO is missing"),
        (["bilatral", "PHOTO", "out=OUT"], "Did you mean 'bilateral'?"),
        (["bilateral", "PHOTO"], "out is missing"),
        (["bilateral", "PHOTO", "out=OUT", "sigma_x=1"], "did you mean 'sigma_s'?"),
        (["bilateral", "PHOTO", "out=OUT", "sigma_s=0"], "must be more than 0"),
        (["bilateral", "PHOTO", "out=OUT.txt"], "unknown kind of image"),
        (["bilateral", "NONE.png", "out=OUT"], "NONE.png"),
        (["bilateral", "PHOTO", "out=OUT", "weights_at=99,0"], "outside"),
        (["bilateral", "PHOTO", "out=OUT", "weights_at=x"], "expected a pixel such as"),
        (["joint_bilateral", "PHOTO", "out=OUT"], "guide is missing"),
        (["perona_malik", "PHOTO", "out=OUT", "step=0.3"], "step=0.3 is not stable"),
        (["texture", "PHOTO", "out=OUT", "weights_at=1,1"], "unknown key 'weights_at'"),
        (["texture", "PHOTO", "out=OUT", "patch=4"], "patch=4 has no centre"),
        (["compare", "PHOTO", "out=OUT", "sigma=-1"], "must be more than 0"),
    ],
)
def test_commands_are_refused_in_one_line(words, told, png, capsys):
    out = png.parent / "out.png"
    words = [w.replace("PHOTO", str(png)).replace("OUT", str(out)) for w in words]
    assert main(["filter", *words]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
    assert not out.exists() and [p.name for p in png.parent.iterdir()] == ["photo.png"]


def test_what_would_take_days_is_refused(tmp_path, capsys):
    Image.new("L", (2000, 2000)).save(tmp_path / "large.png")
    words = [str(tmp_path / "large.png"), f"out={tmp_path / 'out.png'}"]
    assert main(["filter", "nonlocal_means", *words, "window=full"]) == 2
    assert "choose a smaller window" in capsys.readouterr().err
    assert main(["filter", "texture", *words]) == 2
    assert "cut a smaller sample" in capsys.readouterr().err


def test_filters_remove_noise_from_a_known_photo():
    path = DATA / "denoise" / "Set12" / "01.png"
    if not path.exists():
        pytest.skip(f"{path} is not there; set REGARD_DATA to the folder of data")
    from regard.gallery.filters import settings_for

    clean = torch.tensor(np.asarray(Image.open(path)))[None, 64:192, 64:192].float() / 255
    image = noisy(clean, 25 / 255)
    scores = {
        name: psnr(FILTERS[filter](image, **how), clean)
        for name, (filter, how) in settings_for(25 / 255).items()
    }
    assert min(scores.values()) > psnr(image, clean) + 2
    assert max(scores, key=scores.__getitem__) == "non-local means"


def test_the_library_filters_as_the_command_does(png, tmp_path):
    made = regard.filter("gaussian", png, out=tmp_path / "library.png", sigma=2)
    assert main(["filter", "gaussian", str(png), f"out={tmp_path / 'command.png'}", "sigma=2"]) == 0
    assert Path(made.path).read_bytes() == (tmp_path / "command.png").read_bytes()


def test_several_values_of_one_key_are_drawn_side_by_side(png, capsys, monkeypatch):
    from regard.viewer import panels

    drawn = []
    plain = panels.draw_gallery
    monkeypatch.setattr(panels, "draw_gallery", lambda *given: drawn.append(given) or plain(*given))
    out = png.parent / "steps.png"
    words = ["filter", "perona_malik", str(png), f"out={out}", "k=0.05"]
    assert main([*words, "steps=10,20,30"]) == 0
    photo, *row = [panel for row in drawn.pop()[1] for panel in row]
    assert [panel.caption for panel in row] == ["steps=10", "steps=20", "steps=30"]
    image = torch.from_numpy(photo.pixels.copy()).permute(2, 0, 1).float() / 255
    for panel, steps in zip(row, (10, 20, 30), strict=True):
        expected = (255 * FILTERS["perona_malik"](image, steps=steps, k=0.05)).round().byte()
        assert np.array_equal(panel.pixels, expected.permute(1, 2, 0).numpy())
    regard.filter("gaussian", png, out=out, sigma=[1, 2], weights_at="3,4")
    assert len(drawn.pop()[1][0]) == 3
    capsys.readouterr()
    for bad in (["steps=10,x"], ["steps=1,2", "k=0.1,0.2"], ["steps=" + "1," * 20 + "1"]):
        assert main([*words, *bad] if len(bad) < 2 else [*words[:-1], *bad]) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.skipif(not native.status().enabled, reason=str(native.status()))
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 5, 7), (3, 40, 33), (2, 3, 17, 64), (4, 9, 130), (3, 2, 300)]
)
def test_kernels_filter_as_pytorch_does(shape: tuple[int, ...], monkeypatch):
    torch.manual_seed(0)
    x, guide = torch.rand(shape), torch.rand(1, *shape[-2:])

    def all_filters() -> list[torch.Tensor]:
        return [
            bilateral(x, sigma_s=2.0, sigma_r=0.1),
            bilateral(x, sigma_s=1.0, sigma_r="inf", window=5),
            bilateral(x, sigma_s=5.0, sigma_r=0.02, window=21),
            bilateral(1000 + x, sigma_s=2.0, sigma_r=500.0, window=7) / 1000,
            bilateral(x, sigma_s=0.05, sigma_r=1e-4, window=5),
            filter_by_guide(x, guide, 2.0, 0.1, 9),
            nonlocal_means(x, h=0.1),
            nonlocal_means(x, h=0.3, patch=3, window=9),
            nonlocal_means(x, h=0.2, patch=5, window=5, noise=0.05),
            nonlocal_means(x, h=0.1, patch=1, window=7),
        ]

    ours = all_filters()
    calls = []
    for name in ("bilateral", "nonlocal_means"):
        module = importlib.import_module(f"regard.filters.{name}")
        monkeypatch.setattr(module, f"try_{name}", lambda *words: calls.append(words))
    for one, other in zip(ours, all_filters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    assert len(calls) == len(ours)


@pytest.mark.skipif(not native.status().enabled, reason=str(native.status()))
def test_a_filter_gives_the_same_bits_on_any_number_of_threads():
    x, before = torch.rand(3, 77, 50), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append((bilateral(x), nonlocal_means(x)))
    finally:
        torch.set_num_threads(before)
    assert all(a.equal(b) for one in found[1:] for a, b in zip(one, found[0], strict=True))


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_filtered_alike_with_and_without_kernels(number, monkeypatch):
    x = random(1, 12, 12, dtype=torch.float32)
    x[0, 4, 5] = number
    found = []
    for _ in range(2):
        found.append((bilateral(x, window=3), nonlocal_means(x, window=3, patch=3)))
        monkeypatch.setattr(native, "library", lambda: None)
    for with_kernels, without in zip(*found, strict=True):
        torch.testing.assert_close(with_kernels, without, atol=1e-5, rtol=0, equal_nan=True)


def test_kernels_leave_gradients_double_and_what_is_not_finite_to_pytorch():
    x = torch.rand(1, 12, 12)
    with torch.enable_grad():
        y = bilateral(x.clone().requires_grad_())
        assert y.requires_grad
        assert nonlocal_means(x.clone().requires_grad_(), window=5).requires_grad
    with torch.no_grad():  # nobody asks for them here
        learnt = x.clone().requires_grad_()
        assert bilateral(learnt).equal(bilateral(x))
        assert nonlocal_means(learnt, window=5).equal(nonlocal_means(x, window=5))
    assert bilateral(x.double()).dtype == torch.float64
    broken = x.clone()
    broken[0, 0, 0] = torch.nan
    assert bilateral(broken, window=3)[0, 5:, 5:].isfinite().all()
