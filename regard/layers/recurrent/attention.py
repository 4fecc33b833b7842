"""Attention of a recurrent decoder to a memory, soft or hard, by one head.

Shapes: b sentences, q states of each, s places of the memory.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.attend import attend
from regard.attention.masks import Mask, Padding
from regard.attention.normalisers import Sample
from regard.attention.scores import Additive, Bilinear, Dot, Gaussian
from regard.errors import UsageError

_BASELINE = 0.01  # of the baseline's own loss: small, so that it does not use up a clipped gradient


class ReinforceTape:
    """The samples of hard attention and their baselines, for REINFORCE (Williams 1992).

    The gradient of an expected loss is that of log p(sample) (loss - baseline), for any baseline
    that does not depend on the sample. Here the loss is that of the token and of all after it.
    """

    def __init__(self):
        self.log_probs: list[Tensor] = []  # of what was sampled, (b, t)
        self.baselines: list[Tensor] = []  # expected losses, (b, t)

    def loss(self, losses: Tensor, real: Tensor | None = None) -> Tensor:
        """Zero, with the gradient of REINFORCE for the losses of tokens (b, t).

        Tokens that are not `real`, but padding, count for nothing.
        """
        if not self.log_probs:
            return losses.new_zeros(())
        log_prob, baseline = torch.cat(self.log_probs, 1), torch.cat(self.baselines, 1)
        real = torch.ones_like(losses, dtype=torch.bool) if real is None else real
        ahead = losses.detach().masked_fill(~real, 0.0).flip(1).cumsum(1).flip(1)
        learns = log_prob * (ahead - baseline.detach())
        learns = learns + _BASELINE * F.smooth_l1_loss(baseline, ahead, reduction="none")
        learns = learns.masked_fill(~real, 0.0).sum()
        return learns - learns.detach()


class SoftAttention(nn.Module):
    """Soft attention: a softmax over all places."""

    def forward(self, q: Tensor, draws: ReinforceTape | None) -> str:
        """Softmax."""
        return "softmax"


class HardAttention(nn.Module):
    """Hard attention: one place, sampled in training, the most probable otherwise (Xu et al. 2015).

    The baseline is predicted from the decoder's state.
    """

    def __init__(self, width: int):
        super().__init__()
        self.baseline = nn.Linear(width, 1)

    def forward(self, q: Tensor, draws: ReinforceTape | None) -> str | Callable[[Tensor], Tensor]:
        """Sampler for queries (b, q, w) that records its samples."""
        if not self.training:
            return "argmax"
        sample = Sample()

        def draw(scores: Tensor) -> Tensor:
            weights = sample(scores)
            if draws is not None and sample.log_probability is not None:
                draws.log_probs.append(sample.log_probability.squeeze(1))
                draws.baselines.append(self.baseline(q.detach()).squeeze(-1))
            return weights

        return draw


# name -> what makes weights of scores, for queries of a width
NORMALISES: dict[str, Callable[[int], nn.Module]] = {
    "softmax": lambda width: SoftAttention(),
    "sample": HardAttention,
}


class CrossAttention(nn.Module):
    """Attention of a recurrent decoder's states (b, q, w) to a memory (b, s, m), with one head."""

    heads = 1

    def __init__(self, width: int, memory_width: int, normalise: nn.Module | None = None):
        super().__init__()
        self.normalise = normalise or SoftAttention()

    def read(self, memory: Tensor, mask: Mask | None) -> Tensor:
        """Keys of a memory, computed once."""
        return memory

    def ask(self, q: Tensor, keys: Tensor, mask: Mask | None) -> tuple[Tensor, Any]:
        """Queries as the score takes them, and the score."""
        raise NotImplementedError

    def forward(
        self,
        q: Tensor,
        keys: Tensor,
        memory: Tensor,
        mask: Mask | None = None,
        draws: ReinforceTape | None = None,
    ) -> Tensor:
        """Context vectors (b, q, m).

        Args:
            q: states of the decoder
            keys: keys of the memory, as `read` gives them
            memory: values
            mask: which places are real
            draws: records the samples of hard attention
        """
        asked, score = self.ask(q, keys, mask)
        seen = attend(
            asked.unsqueeze(1),
            keys.unsqueeze(1),
            memory.unsqueeze(1),
            score=score,
            mask=mask,
            normalise=self.normalise(q, draws),
            watch=self,
        )
        return seen.squeeze(1)


class AdditiveAttention(CrossAttention):
    """v . tanh(W s + U h) (Bahdanau et al. 2015), U h computed once a sentence."""

    def __init__(self, width: int, memory_width: int, normalise: nn.Module | None = None):
        super().__init__(width, memory_width, normalise)
        self.score = Additive(width, memory_width)

    def read(self, memory: Tensor, mask: Mask | None) -> Tensor:
        """U h."""
        return self.score.key(memory)

    def ask(self, q: Tensor, keys: Tensor, mask: Mask | None) -> tuple[Tensor, Any]:
        """W s, and the rest of the score."""
        return self.score.query(q), self._match

    def _match(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(q.unsqueeze(-2) + k.unsqueeze(-3)) @ self.score.vector


class DotAttention(CrossAttention):
    """s . h / sqrt(w) (Luong et al. 2015), for states as wide as the memory."""

    def __init__(self, width: int, memory_width: int, normalise: nn.Module | None = None):
        super().__init__(width, memory_width, normalise)
        if width != memory_width:
            raise UsageError(
                f"attention=dot compares a state of {width} numbers with a memory of "
                f"{memory_width}; choose bilinear, or a memory as wide (direction=forward)"
            )

    def ask(self, q: Tensor, keys: Tensor, mask: Mask | None) -> tuple[Tensor, Any]:
        """States as they are."""
        return q, Dot()


class BilinearAttention(CrossAttention):
    """s W h / sqrt(m): Luong's general score."""

    def __init__(self, width: int, memory_width: int, normalise: nn.Module | None = None):
        super().__init__(width, memory_width, normalise)
        self.score = Bilinear(width, memory_width)

    def ask(self, q: Tensor, keys: Tensor, mask: Mask | None) -> tuple[Tensor, Any]:
        """States as they are."""
        return q, self.score


class LocationAttention(CrossAttention):
    """Location-based attention: the place follows from the state alone.

    It is p = S sigmoid(v . tanh(W s)) among S (Luong et al. 2015, local-p), and its
    neighbours count by exp(-(i - p)^2 / 2 sigma^2), with sigma learned: the gaussian score of one
    coordinate.
    """

    def __init__(self, width: int, memory_width: int, normalise: nn.Module | None = None):
        super().__init__(width, memory_width, normalise)
        self.place = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
        self.sharpness = nn.Parameter(torch.tensor(0.5))  # one over sigma

    def read(self, memory: Tensor, mask: Mask | None) -> Tensor:
        """Place of each, counted from the middle so that its square stays small."""
        at = torch.arange(memory.shape[1], dtype=memory.dtype, device=memory.device)
        middle = self._places(memory.shape[1], mask, at) / 2
        return ((at - middle) * self.sharpness).expand(len(memory), -1).unsqueeze(-1)

    def ask(self, q: Tensor, keys: Tensor, mask: Mask | None) -> tuple[Tensor, Any]:
        """Places that the states point to."""
        places = self._places(keys.shape[1], mask, q).unsqueeze(-1)
        return self.sharpness * places * (self.place(q).sigmoid() - 0.5), Gaussian()

    @staticmethod
    def _places(most: int, mask: Mask | None, like: Tensor) -> Tensor:
        """Number of places, (b or 1, 1)."""
        if isinstance(mask, Padding):
            return mask.keep.sum(-1, keepdim=True).to(like.dtype)
        return like.new_full((1, 1), most)


ATTENTIONS: dict[str, type[CrossAttention] | None] = {
    "none": None,  # one fixed context for all words
    "additive": AdditiveAttention,
    "dot": DotAttention,
    "bilinear": BilinearAttention,
    "location": LocationAttention,
}
