"""What filters share: images as planes, pixels and windows, and weighted averages by attention."""

import math
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from regard.attention.attend import attend
from regard.attention.masks import Mask, Sliding
from regard.attention.scores import ScoreFunction
from regard.errors import UsageError

Window = int | Literal["full"]  # side of the square around each pixel, or the whole image
AutoWindow = int | Literal["auto", "full"]  # auto: as wide as a Gaussian needs
Pixel = tuple[int, int]  # x and y of a pixel
_TILE = 2**22  # weights held at once where they must be materialised
MIN_SCORE = -70.0  # exp of less is nearly subnormal, which processors are slow with
BAND_PIXELS = 2**16  # per thread, so that a band stays in its cache


def planes(image: Tensor, name: str = "image") -> Float[Tensor, "n c h w"]:
    """Flatten the leading axes of an image to one, or refuse what is no image."""
    if not isinstance(image, Tensor) or image.dtype not in (torch.float32, torch.float64):
        kind = image.dtype if isinstance(image, Tensor) else type(image).__name__
        raise UsageError(f"{name} of {kind}; expected a tensor of float or double, values 0 to 1")
    if image.ndim < 3 or 0 in image.shape[-3:]:
        raise UsageError(f"{name} of shape {tuple(image.shape)}; expected (..., channels, h, w)")
    return image.reshape(-1, *image.shape[-3:])


def check_positive(**values: float) -> None:
    """Refuse what is not more than zero."""
    for name, value in values.items():
        if not value > 0:
            raise UsageError(f"{name}={value} is too small; it must be more than 0")


def largest(image: Tensor) -> float:
    """Largest absolute value, by one thread: PyTorch's would go on spinning beside a kernel's."""
    x = image.detach()
    numbers = x.numpy() if type(x) is Tensor and x.is_cpu else x
    return max(abs(float(numbers.min())), abs(float(numbers.max()))) if x.numel() else 0.0


def check_range(image: Tensor, **values: float) -> None:
    """Refuse a difference of values that is meant for another range than the image has.

    Values are from 0 to 1 or from 0 to 255; what is a difference in one is none in the other.
    """
    reach = largest(image)
    bytes_ = reach > 16  # noise may go beyond 1, but not so far
    for name, value in values.items():
        if math.isinf(value) or not math.isfinite(reach):
            continue
        if not bytes_ and max(1.0, 2 * reach) < value <= 1000:  # more is meant as infinity
            raise UsageError(
                f"{name}={value:g} is more than any difference of values from 0 to 1, as they are "
                f"here; of 0 to 255 it is {name}={value / 255:.3g}"
            )
        if bytes_ and value < reach / 2000:
            raise UsageError(
                f"{name}={value:g} is for values from 0 to 1, but these reach {reach:g}; divide "
                f"them by 255, or write {name}={255 * value:.3g}"
            )


def check_count(**values: int) -> None:
    """Refuse what is not a count."""
    for name, value in values.items():
        if not isinstance(value, int) or value < 0:
            raise UsageError(f"{name}={value}; expected a whole number, 0 or more")


def radius_of(side: AutoWindow, name: str = "window") -> int | None:
    """Return the radius of a square window of a side; None for the whole image."""
    if side == "full":
        return None
    if not isinstance(side, int) or side < 1 or side % 2 == 0:
        raise UsageError(f"{name}={side} has no centre; expected an odd number such as 7, or full")
    return side // 2


def mirrored(size: int, reach: int, device: torch.device) -> Int[Tensor, " l"]:
    """Return the index of the pixel at each position from -reach on, in mirror padding."""
    period = max(1, 2 * (size - 1))
    at = torch.arange(-reach, size + reach, device=device) % period
    return torch.where(at < size, at, period - at)


def pad(image: Float[Tensor, "n c h w"], reach: int) -> Float[Tensor, "n c h2 w2"]:
    """Mirror-pad an image of any size (the border pixel is not repeated)."""
    down, right = (mirrored(size, reach, image.device) for size in image.shape[-2:])
    return image.index_select(-2, down).index_select(-1, right)


def pixel_coordinates(image: Float[Tensor, "n c h w"]) -> Float[Tensor, "hw 2"]:
    """Return row and column of every pixel, centred on the image."""
    high, wide = image.shape[-2:]
    rows, columns = (torch.arange(n, dtype=image.dtype, device=image.device) for n in (high, wide))
    return torch.cartesian_prod(rows - (high - 1) / 2, columns - (wide - 1) / 2)


def window_mask(radius: int | None, image: Float[Tensor, "n c h w"]) -> Mask | None:
    """Return the mask of a square window around each pixel."""
    if radius is None:
        return None
    at = pixel_coordinates(image)
    return Sliding(radius + 1, at, at)


def attention_average(
    k: Float[Tensor, "n l d"],
    v: Float[Tensor, "n l c"],
    score: ScoreFunction,
    mask: Mask | None = None,
) -> Float[Tensor, "n l c"]:
    """Let every pixel attend to all, in linear memory unless there is a mask."""
    if hasattr(score, "prepare"):
        # the fused kernel needs values as wide as keys
        wide = F.pad(v, (0, max(0, k.shape[-1] - v.shape[-1])))
        return attend(k, k, wide, score=score, mask=mask)[..., : v.shape[-1]]
    if mask is not None:
        return attend(k, k, v, score=score, mask=mask)
    rows = max(1, _TILE // (k.shape[0] * k.shape[1]))
    return torch.cat([attend(q, k, v, score=score) for q in k.split(rows, 1)], 1)


def squares(
    x: Float[Tensor, "n c h w"], scale: float = 1.0, plus: Tensor | None = None
) -> Float[Tensor, "n 1 h w"]:
    """Return plus + scale * the sum of squares over channels."""
    total = x.new_zeros(()) if plus is None else plus
    for channel in x.split(1, 1):
        total = torch.addcmul(total, channel, channel, value=scale)
    return total


def exp_weights(score: Tensor) -> Tensor:
    """Return the exponential of scores, in place."""
    return score.clamp_(min=MIN_SCORE).exp_()


def half_window(radius: int, high: int, wide: int) -> Iterator[tuple[int, int]]:
    """Yield one of each two opposite offsets (down, right) in a window."""
    down, right = min(radius, high - 1), min(radius, wide - 1)
    return ((y, x) for y in range(down + 1) for x in range(-right if y else 1, right + 1))


class PairwiseSums:
    """Accumulates weighted sums for all pixels, one window offset at a time.

    Weights are symmetric, so that each pair of pixels is computed once.
    """

    def __init__(self, image: Float[Tensor, "n c h w"]):
        self.image = image
        self.values = image.clone()  # each pixel itself has the weight one
        self.weights = torch.ones_like(image[:, :1])

    def bands(self, down: int, right: int) -> Iterator[tuple[tuple, tuple]]:
        """Yield the pixel pairs at an offset in bands of rows: the slices of both sides."""
        high, wide = self.image.shape[-2:]
        rows = max(1, BAND_PIXELS * torch.get_num_threads() // wide)
        left, end = max(0, -right), wide - max(0, right)
        for top in range(0, high - down, rows):
            stop = min(high - down, top + rows)
            here = slice(top, stop), slice(left, end)
            there = slice(top + down, stop + down), slice(left + right, end + right)
            yield (..., *here), (..., *there)

    def add(self, weights: Tensor, here: tuple, there: tuple) -> None:
        """Add the pairs of two slices with their weights."""
        self.weights[here] += weights
        self.weights[there] += weights
        self.values[here].addcmul_(weights, self.image[there])
        self.values[there].addcmul_(weights, self.image[here])

    def done(self) -> Float[Tensor, "n c h w"]:
        """Return the weighted averages."""
        return self.values.div_(self.weights)


def check_pixel(at: Pixel, image: Tensor) -> None:
    """Refuse a pixel that an image does not have."""
    high, wide = image.shape[-2:]
    if not (0 <= at[0] < wide and 0 <= at[1] < high):
        raise UsageError(
            f"pixel {at[0]},{at[1]} is outside; those of the image are 0,0 to {wide - 1},{high - 1}"
        )


def local_weights(
    image: Tensor, at: Pixel, reach: int | None, find: Callable[[Tensor, Pixel], Tensor]
) -> Float[Tensor, "h w"]:
    """Return the weights of a pixel, computed on the part of the image within reach."""
    check_pixel(at, image)
    image = planes(image)[:1].detach()
    if reach is None:
        return find(image, at)
    left, top = (max(0, x - reach) for x in at)
    across, down = slice(left, at[0] + reach + 1), slice(top, at[1] + reach + 1)
    weights = torch.zeros_like(image[0, 0])
    weights[down, across] = find(image[..., down, across], (at[0] - left, at[1] - top))
    return weights


def attention_weights(
    k: Float[Tensor, "1 l d"],
    score: ScoreFunction,
    at: Pixel,
    size: tuple[int, int],
    radius: int | None,
) -> Float[Tensor, "h w"]:
    """Return the attention weights of one pixel, as the gradient of its output by the values."""
    high, wide = size
    x, y = at
    bias = None
    if radius is not None:
        rows, columns = (torch.arange(n, device=k.device) for n in size)
        inside = ((rows - y).abs() <= radius)[:, None] & ((columns - x).abs() <= radius)
        bias = k.new_zeros(1, high * wide).masked_fill_(~inside.view(1, -1), -torch.inf)
    with torch.enable_grad():
        v = torch.zeros_like(k[..., :1]).requires_grad_()
        out = attend(k[:, y * wide + x].unsqueeze(1), k, v, score=score, bias=bias)
        return torch.autograd.grad(out.sum(), v)[0].view(high, wide)


def apply_flow(x: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Move the flow down and to the right from each pixel to its neighbour."""
    x = x.clone()
    x[..., :-1, :] -= down
    x[..., 1:, :] += down
    x[..., :-1] -= right
    x[..., 1:] += right
    return x


def pixel_gradient(
    filtered: Callable[[Tensor], Tensor], image: Tensor, at: Pixel
) -> Float[Tensor, "h w"]:
    """Return the gradient of one filtered pixel by the pixels of the image."""
    with torch.enable_grad():
        x = image.clone().requires_grad_()
        gradient = torch.autograd.grad(filtered(x)[..., at[1], at[0]].sum(), x)[0]
    return gradient[0].mean(0)
