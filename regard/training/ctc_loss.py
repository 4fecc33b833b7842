"""The CTC loss, summed over utterances."""

import torch
from torch import Tensor
from torch.nn import functional as F


def ctc_loss(
    logits: Tensor, lengths: Tensor, targets: Tensor, target_lengths: Tensor, blank: int = 0
) -> Tensor:
    """Return the sum of -log p(target) of logits (b, t, vocab), in float32 at least.

    Only the first `lengths` frames and `target_lengths` tokens of each are read. It is infinite for
    a pair that cannot be aligned: `decode.speech.ctc_align.not_alignable` finds these beforehand.
    """
    return ctc_losses(logits, lengths, targets, target_lengths, blank, "sum")


def ctc_losses(
    logits: Tensor,
    lengths: Tensor,
    targets: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    reduction: str = "none",
) -> Tensor:
    """Return -log p(target) of each of the logits (b, t, vocab), or its sum."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_probs = logits.log_softmax(-1, dtype=dtype).transpose(0, 1)
    return F.ctc_loss(log_probs, targets, lengths, target_lengths, blank, reduction=reduction)
