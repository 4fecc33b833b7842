"""What filters share: images as planes, places in and around them, and the one average."""

import math
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from regard.attention.attend import attend
from regard.attention.masks import Mask, Sliding
from regard.attention.scores import Score
from regard.errors import UsageError

Window = int | Literal["full"]  # the side of a square around each pixel, or the whole image
AutoWindow = int | Literal["auto", "full"]  # or as wide as a Gaussian needs
Place = tuple[int, int]  # x and y of a pixel
TILE = 2**22  # weights held at once where no kernel can do without them
LEAST = -70.0  # of a score: processors are slow with numbers much nearer to zero than its weight
BAND = 2**16  # pixels a thread works on at once, so that what it needs stays in its cache


def planes(image: Tensor, name: str = "image") -> Float[Tensor, "n c h w"]:
    """Lay any leading axes of an image out as one, or refuse what is none."""
    if not isinstance(image, Tensor) or image.dtype not in (torch.float32, torch.float64):
        kind = image.dtype if isinstance(image, Tensor) else type(image).__name__
        raise UsageError(f"{name} of {kind}; expected a tensor of float or double, values 0 to 1")
    if image.ndim < 3 or 0 in image.shape[-3:]:
        raise UsageError(f"{name} of shape {tuple(image.shape)}; expected (..., channels, h, w)")
    return image.reshape(-1, *image.shape[-3:])


def positive(**values: float) -> None:
    """Refuse what is not more than zero."""
    for name, value in values.items():
        if not value > 0:
            raise UsageError(f"{name}={value} is too small; it must be more than 0")


def of_range(image: Tensor, **values: float) -> None:
    """Refuse a difference of values that cannot be meant for the range that an image has.

    Values are from 0 to 1 or from 0 to 255; a difference for one of these is none for the other.
    """
    reach = float(image.detach().abs().max()) if image.numel() else 0.0
    bytes_ = reach > 16  # noise may go beyond 1, but not so far
    for name, value in values.items():
        if math.isinf(value) or not math.isfinite(reach):
            continue
        if not bytes_ and max(1.0, 2 * reach) < value <= 1000:  # more is meant to ignore values
            raise UsageError(
                f"{name}={value:g} is more than any difference of values from 0 to 1, as they are "
                f"here; of 0 to 255 it is {name}={value / 255:.3g}"
            )
        if bytes_ and value < reach / 2000:
            raise UsageError(
                f"{name}={value:g} is for values from 0 to 1, but these reach {reach:g}; divide "
                f"them by 255, or write {name}={255 * value:.3g}"
            )


def counted(**values: int) -> None:
    """Refuse what is no number of times."""
    for name, value in values.items():
        if not isinstance(value, int) or value < 0:
            raise UsageError(f"{name}={value}; expected a whole number, 0 or more")


def radius_of(side: AutoWindow, name: str = "window") -> int | None:
    """Return how far a square of a side reaches from its centre; the whole image has no bound."""
    if side == "full":
        return None
    if not isinstance(side, int) or side < 1 or side % 2 == 0:
        raise UsageError(f"{name}={side} has no centre; expected an odd number such as 7, or full")
    return side // 2


def mirrored(size: int, reach: int, device: torch.device) -> Int[Tensor, " l"]:
    """Return which pixel stands at each place from -reach on, mirrored about the first and last."""
    period = max(1, 2 * (size - 1))
    at = torch.arange(-reach, size + reach, device=device) % period
    return torch.where(at < size, at, period - at)


def pad(image: Float[Tensor, "n c h w"], reach: int) -> Float[Tensor, "n c h2 w2"]:
    """Mirror an image of any size about its outermost pixels."""
    down, right = (mirrored(size, reach, image.device) for size in image.shape[-2:])
    return image.index_select(-2, down).index_select(-1, right)


def places(image: Float[Tensor, "n c h w"]) -> Float[Tensor, "hw 2"]:
    """Return row and column of every pixel, from the middle of the image."""
    high, wide = image.shape[-2:]
    rows, columns = (torch.arange(n, dtype=image.dtype, device=image.device) for n in (high, wide))
    return torch.cartesian_prod(rows - (high - 1) / 2, columns - (wide - 1) / 2)


def near(radius: int | None, image: Float[Tensor, "n c h w"]) -> Mask | None:
    """Return the mask of a square around each pixel."""
    if radius is None:
        return None
    at = places(image)
    return Sliding(radius + 1, at, at)


def average(
    k: Float[Tensor, "n l d"], v: Float[Tensor, "n l c"], score: Score, mask: Mask | None = None
) -> Float[Tensor, "n l c"]:
    """Let every pixel attend to all, in memory linear in their number unless there is a mask."""
    if hasattr(score, "prepare"):
        # the kernel can do without the matrix of weights if values are as wide as keys
        wide = F.pad(v, (0, max(0, k.shape[-1] - v.shape[-1])))
        return attend(k, k, wide, score=score, mask=mask)[..., : v.shape[-1]]
    if mask is not None:
        return attend(k, k, v, score=score, mask=mask)
    rows = max(1, TILE // (k.shape[0] * k.shape[1]))
    return torch.cat([attend(q, k, v, score=score) for q in k.split(rows, 1)], 1)


def squares(
    x: Float[Tensor, "n c h w"], scale: float = 1.0, plus: Tensor | None = None
) -> Float[Tensor, "n 1 h w"]:
    """Add up the squares of all channels, times a scale, to something."""
    total = x.new_zeros(()) if plus is None else plus
    for channel in x.split(1, 1):
        total = torch.addcmul(total, channel, channel, value=scale)
    return total


def weights_of(score: Tensor) -> Tensor:
    """Return the exponential of scores, which it overwrites."""
    return score.clamp_(min=LEAST).exp_()


def half(radius: int, high: int, wide: int) -> Iterator[tuple[int, int]]:
    """Give one of each two opposite steps (down, right) from pixel to pixel in a window."""
    down, right = min(radius, high - 1), min(radius, wide - 1)
    return ((y, x) for y in range(down + 1) for x in range(-right if y else 1, right + 1))


class Sums:
    """Weighted sums of all pixels in the making, to which pairs of pixels are added.

    A pair weighs the same from both its sides, so that each is computed but once.
    """

    def __init__(self, image: Float[Tensor, "n c h w"]):
        self.image = image
        self.values = image.clone()  # each pixel itself has the weight one
        self.weights = torch.ones_like(image[:, :1])

    def bands(self, down: int, right: int) -> Iterator[tuple[tuple, tuple]]:
        """Cut the pairs that are a step apart into bands of rows: the pixels of each side."""
        high, wide = self.image.shape[-2:]
        rows = max(1, BAND * torch.get_num_threads() // wide)
        left, end = max(0, -right), wide - max(0, right)
        for top in range(0, high - down, rows):
            stop = min(high - down, top + rows)
            here = slice(top, stop), slice(left, end)
            there = slice(top + down, stop + down), slice(left + right, end + right)
            yield (..., *here), (..., *there)

    def add(self, weights: Tensor, here: tuple, there: tuple) -> None:
        """Add what pairs of pixels give to each other."""
        self.weights[here] += weights
        self.weights[there] += weights
        self.values[here].addcmul_(weights, self.image[there])
        self.values[there].addcmul_(weights, self.image[here])

    def done(self) -> Float[Tensor, "n c h w"]:
        """Return the averages."""
        return self.values.div_(self.weights)


def check_place(at: Place, image: Tensor) -> None:
    """Refuse a pixel that an image does not have."""
    high, wide = image.shape[-2:]
    if not (0 <= at[0] < wide and 0 <= at[1] < high):
        raise UsageError(
            f"pixel {at[0]},{at[1]} is outside; those of the image are 0,0 to {wide - 1},{high - 1}"
        )


def in_piece(
    image: Tensor, at: Place, reach: int | None, find: Callable[[Tensor, Place], Tensor]
) -> Float[Tensor, "h w"]:
    """Find the weights of a pixel in the piece of the image that they depend on."""
    check_place(at, image)
    image = planes(image)[:1].detach()
    if reach is None:
        return find(image, at)
    left, top = (max(0, place - reach) for place in at)
    across, down = slice(left, at[0] + reach + 1), slice(top, at[1] + reach + 1)
    found = torch.zeros_like(image[0, 0])
    found[down, across] = find(image[..., down, across], (at[0] - left, at[1] - top))
    return found


def attended(
    k: Float[Tensor, "1 l d"], score: Score, at: Place, size: tuple[int, int], radius: int | None
) -> Float[Tensor, "h w"]:
    """Return the weights of one pixel: how the average there changes with each value."""
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


def flowed(x: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Take from each pixel what flows down and to the right, and give it to the next ones."""
    x = x.clone()
    x[..., :-1, :] -= down
    x[..., 1:, :] += down
    x[..., :-1] -= right
    x[..., 1:] += right
    return x


def derivative(
    filtered: Callable[[Tensor], Tensor], image: Tensor, at: Place
) -> Float[Tensor, "h w"]:
    """Return how a pixel of a filtered image changes with each pixel of the image."""
    with torch.enable_grad():
        given = image.clone().requires_grad_()
        found = torch.autograd.grad(filtered(given)[..., at[1], at[0]].sum(), given)[0]
    return found[0].mean(0)
