"""Where tokens stand: position encodings by name.

A position `at` has coordinates: (l, c) or (b, l, c), c = 1 for text and sound, 2 for images.
A part overrides only the verbs it needs.
"""

import torch
from torch import Tensor, nn

from regard.attention.masks import Mask
from regard.errors import Mistake


class Position(nn.Module):
    """No position at all: every verb leaves things as they are."""

    def __init__(self, width: int = 0, heads: int = 1, head_width: int = 0, **settings: object):
        super().__init__()

    def embed(self, x: Tensor, at: Tensor) -> Tensor:
        """Add to the input (b, l, w) what depends on its positions."""
        return x

    def rotate(self, x: Tensor, at: Tensor) -> Tensor:
        """Turn projected queries or keys (b, h, l, d) by their positions."""
        return x

    def shared(self, q_at: Tensor, k_at: Tensor, mask: Mask | None = None) -> Tensor | None:
        """Return a bias that all layers share, computed once a forward."""
        return None

    def bias(
        self, q: Tensor, k: Tensor, q_at: Tensor, k_at: Tensor, mask: Mask | None = None
    ) -> Tensor | None:
        """Return a layer's own bias from its projected, unrotated queries and keys."""
        return None

    def add_values(self, weights: Tensor, q_at: Tensor, k_at: Tensor) -> Tensor | None:
        """Return what the positions themselves add to the average of the values."""
        return None


def sinusoids(at: Tensor, width: int, base: float = 10_000.0, layout: str = "pairs") -> Tensor:
    """Return sin and cos of each coordinate at `width` wavelengths from 2 pi to base * 2 pi.

    P[k, 2i] = sin(k / base^(2i/w)), P[k, 2i+1] = cos(same): in pairs (sin, cos, sin, cos, ...), or
    as halves (all sines, then all cosines). Coordinates share the width evenly.
    """
    coordinates = at.shape[-1]
    each = width // coordinates
    if each % 2 or each * coordinates != width:
        raise Mistake(f"sinusoids need an even width for each coordinate, not {width}")
    rates = base ** (-torch.arange(0, each, 2, dtype=torch.float64, device=at.device) / each)
    angles = at.to(torch.float64).unsqueeze(-1) * rates
    both = torch.stack([angles.sin(), angles.cos()], dim=-1 if layout == "pairs" else -2)
    return both.flatten(-3)


class Sinusoidal(Position):
    """Sines and cosines of the position, added to the input (Vaswani et al. 2017).

    Moving by D is a rotation that does not depend on where: P[k+D] = M_D P[k].
    """

    def __init__(self, width: int, heads=1, head_width=0, *, base=1e4, layout="pairs", **rest):
        super().__init__()
        if width % 2:
            raise Mistake(f"sinusoidal positions need an even width, not {width}")
        self.width, self.base, self.layout = width, base, layout

    def embed(self, x: Tensor, at: Tensor) -> Tensor:
        """Add the sinusoids."""
        return x + sinusoids(at, self.width, self.base, self.layout).to(x.dtype)


class Learned(Position):
    """A learned vector for each position, added to the input."""

    def __init__(self, width: int, heads=1, head_width=0, *, max_length=512, **rest):
        super().__init__()
        self.table = nn.Embedding(max_length, width)

    def embed(self, x: Tensor, at: Tensor) -> Tensor:
        """Add the vectors of the positions."""
        last = self.table.num_embeddings
        if not at.is_meta and at.numel() and int(at.max()) >= last:
            raise Mistake(
                f"position {int(at.max())} is past the {last} learned ones; "
                "shorten the input or train with a larger max_length"
            )
        return x + self.table(at[..., 0])


class Rotary(Position):
    """Queries and keys turned by their position, so that only distance matters (RoPE).

    Pairs are (i, i + d/2), the layout of LLaMA and most public checkpoints.
    """

    def __init__(
        self, width: int = 0, heads: int = 1, head_width: int = 0, *, base=10_000.0, **rest
    ):
        super().__init__()
        if head_width % 2:
            raise Mistake(f"rotary positions need an even head_width, not {head_width}")
        self.base = base

    def angles(self, at: Tensor, width: int) -> Tensor:
        """Return the angle of every pair at every position, (..., l, d/2)."""
        each = width // at.shape[-1]
        rates = self.base ** (
            -torch.arange(0, each, 2, dtype=torch.float64, device=at.device) / each
        )
        return (at.to(torch.float64).unsqueeze(-1) * rates).flatten(-2)

    def rotate(self, x: Tensor, at: Tensor) -> Tensor:
        """Turn each pair by its angle."""
        angles = self.angles(at, x.shape[-1])
        angles = angles.unsqueeze(1) if angles.ndim == 3 else angles
        sin, cos = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


POSITIONS: dict[str, type[Position]] = {
    "none": Position,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "rotary": Rotary,
}
ALIASES = {"nope": "none", "rope": "rotary", "sin": "sinusoidal", "absolute": "learned"}
