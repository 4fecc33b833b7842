"""Cross-entropy over a vocabulary and R-Drop, fused with the output projection; CTC."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.errors import UsageError, lookup

if TYPE_CHECKING:
    from regard.data.parallel import PairBatch
    from regard.decode.writer import EncoderDecoder

# of logits (n, classes) and targets: numbers of classes (n,), or their shares (n, classes)
RowLoss = Callable[[Tensor, Tensor], Tensor]

LOSSES: dict[str, RowLoss] = {}
"""Losses of the user by name, which take the place of cross-entropy: each gives n losses."""

LOGIT_ROWS = 512  # rows of logits held at once: small enough to stay in the processor's cache


def loss_names() -> tuple[str, ...]:
    """What loss= can be: the usual one of a task, or one of the user's."""
    return ("auto", *LOSSES)


def own_loss(name: str, logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of a user's loss over all rows."""
    losses = lookup("loss", name, LOSSES)(logits.float(), targets)
    if not isinstance(losses, Tensor) or losses.shape[:1] != logits.shape[:1]:
        got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else f"{losses!r:.40}"
        raise UsageError(
            f"loss={name} returned {got} for {len(logits)} rows; return a loss for each row, "
            "as with reduction='none'"
        )
    return losses.sum()


class _GradientsInForward(torch.autograd.Function):
    """A loss whose forward saves the gradients of its tensors; three other arguments have none."""

    @staticmethod
    def backward(ctx, *grad_outputs):  # noqa: D102
        (grad,) = grad_outputs
        # each is handed on once, so that scaling may happen in place
        grads = [None if g is None else g.mul_(grad) for g in ctx.saved_tensors]
        return *grads, None, None, None


class _LinearCrossEntropy(_GradientsInForward):
    """Cross-entropy of h W' + b with label smoothing; forward computes the gradients as well.

    With E = exp(logits - max) and s its row sums, the gradient by the logits is
    E / s - (1 - e) onehot - e / V. Only E is materialised, a chunk of rows at a time and into one
    buffer; what is constant along a row or column enters through sums.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, smoothing, ignore):  # noqa: D102
        rows, vocab = hidden.shape[0], weight.shape[0]
        needs = ctx.needs_input_grad
        real = targets != ignore
        share = smoothing / vocab
        h, w = hidden.detach(), weight.detach()
        w_sum = w.sum(0)
        b_sum = bias.detach().sum() if bias is not None else 0.0
        losses = h.new_empty(rows)
        grad_h = torch.empty_like(h) if needs[0] else None
        grad_w = torch.zeros_like(w) if needs[1] else None
        grad_b = torch.zeros_like(bias) if bias is not None and needs[2] else None
        buffer = h.new_empty(min(LOGIT_ROWS, rows), vocab)
        for start in range(0, rows, LOGIT_ROWS):
            part = slice(start, min(rows, start + LOGIT_ROWS))
            x, logits = h[part], buffer[: part.stop - part.start]
            live = real[part]
            y = targets[part].masked_fill(~live, 0)
            torch.mm(x, w.t(), out=logits)
            if bias is not None:
                logits += bias.detach()
            top = logits.amax(-1, keepdim=True)
            hit = logits.gather(-1, y.unsqueeze(-1)).squeeze(-1)
            total = logits.sub_(top).exp_().sum(-1)
            mean = (x @ w_sum + b_sum) / vocab
            losses[part] = total.log() + top.squeeze(-1) - (1 - smoothing) * hit - smoothing * mean
            inverse = (live / total).to(h.dtype).unsqueeze(-1)
            kept = live.to(h.dtype).unsqueeze(-1)
            if grad_h is not None:
                g = torch.mm(logits, w, out=grad_h[part]).mul_(inverse)
                g.sub_(kept * (share * w_sum)).sub_(w[y].mul_(kept * (1 - smoothing)))
            if grad_w is not None:
                grad_w.addmm_(logits.t(), x * inverse)
                grad_w.sub_((kept * x).sum(0) * share)
                grad_w.index_add_(0, y, x * kept, alpha=-(1 - smoothing))
            if grad_b is not None:
                grad_b.add_(logits.t() @ inverse.squeeze(-1)).sub_(kept.sum() * share)
                grad_b.index_add_(0, y, kept.squeeze(-1), alpha=-(1 - smoothing))
        ctx.save_for_backward(grad_h, grad_w, grad_b)
        return losses.masked_fill_(~real, 0.0).sum()


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    smoothing: float = 0.0,
    ignore: int = -1,
) -> Tensor:
    """Summed cross-entropy of targets (n,) under hidden (n, w) times weight (v, w).

    Equal to torch's cross_entropy of the logits with label smoothing, reduction sum, without ever
    holding all logits.

    Args:
        hidden: vectors (n, w)
        weight: matrix (v, w) of the head
        targets: classes (n,)
        bias: bias (v,) of the head
        smoothing: label smoothing
        ignore: target that is left out
    """
    if not torch.is_grad_enabled():  # the function itself cannot tell, and would make gradients
        hidden, weight = hidden.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
    with torch.autocast(weight.device.type, enabled=False):
        hidden = hidden.to(weight.dtype)
        return _LinearCrossEntropy.apply(hidden, weight, bias, targets, smoothing, ignore)  # type: ignore[return-value]


def reference_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    smoothing: float = 0.0,
    ignore: int = -1,
) -> Tensor:
    """Same by torch's own functions, all logits at once: faster for few classes.

    Args:
        hidden: vectors (n, w)
        weight: matrix (v, w) of the head
        targets: classes (n,)
        bias: bias (v,) of the head
        smoothing: label smoothing
        ignore: target that is left out
    """
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(
        logits, targets, reduction="sum", label_smoothing=smoothing, ignore_index=ignore
    )


class _RDropLoss(_GradientsInForward):
    """Cross-entropy of two passes with dropout, and the symmetric KL divergence between them.

    For p and q the two distributions, the loss is the mean of both cross-entropies plus
    alpha (KL(p|q) + KL(q|p)) / 4, summed over rows (Liang et al. 2021, halved: a row counts once).
    The gradient of the divergence by the first logits is p (log p/q - KL(p|q)) + p - q.
    """

    @staticmethod
    def forward(ctx, one, two, weight, bias, targets, alpha, smoothing):  # noqa: D102
        rows, vocab = one.shape[0], weight.shape[0]
        w = weight.detach()
        grads = [torch.empty_like(one), torch.empty_like(two)]
        grad_w = torch.zeros_like(w)
        grad_b = torch.zeros_like(bias) if bias is not None else None
        total = one.new_zeros(())

        def add(part: slice) -> Tensor:
            """Accumulate gradients of some rows and return their loss; its memory is then free."""
            y = targets[part].unsqueeze(-1)
            x = [one.detach()[part], two.detach()[part]]
            logs = [
                F.linear(h, w, None if bias is None else bias.detach()).log_softmax(-1) for h in x
            ]
            probs = [log.exp() for log in logs]
            ratio = logs[0] - logs[1]
            kl = [
                (probs[0] * ratio).sum(-1, keepdim=True),
                (probs[1] * -ratio).sum(-1, keepdim=True),
            ]
            loss = alpha / 4 * (kl[0].sum() + kl[1].sum())
            for i, sign in ((0, 1.0), (1, -1.0)):
                log, p, q = logs[i], probs[i], probs[1 - i]
                hit = log.gather(-1, y).sum()
                loss -= 0.5 * ((1 - smoothing) * hit + smoothing / vocab * log.sum())
                g = (sign * ratio).sub_(kl[i] - 1).mul_(p).sub_(q)
                g.mul_(alpha / 4).add_(p, alpha=0.5).sub_(0.5 * smoothing / vocab)
                g.scatter_add_(-1, y, torch.full_like(y, -1, dtype=g.dtype) * 0.5 * (1 - smoothing))
                torch.mm(g, w, out=grads[i][part])
                grad_w.addmm_(g.t(), x[i])
                if grad_b is not None:
                    grad_b.add_(g.sum(0))
            return loss

        for start in range(0, rows, LOGIT_ROWS):
            total += add(slice(start, min(rows, start + LOGIT_ROWS)))
        ctx.save_for_backward(*grads, grad_w, grad_b)
        return total


def r_drop_loss(
    one: Tensor,
    two: Tensor,
    weight: Tensor,
    targets: Tensor,
    alpha: float,
    *,
    bias: Tensor | None = None,
    smoothing: float = 0.0,
) -> Tensor:
    """Summed R-Drop loss of two passes (n, w) over the same targets (n,).

    Args:
        one: vectors (n, w) of the first pass
        two: vectors (n, w) of the second pass, with other dropout
        weight: matrix (v, w) of the head
        targets: classes (n,)
        alpha: weight of the divergence between the passes
        bias: bias (v,) of the head
        smoothing: label smoothing
    """
    with torch.autocast(weight.device.type, enabled=False):
        one, two = one.to(weight.dtype), two.to(weight.dtype)
        return _RDropLoss.apply(one, two, weight, bias, targets, alpha, smoothing)  # type: ignore[return-value]


def ctc_loss(
    logits: Tensor, lengths: Tensor, targets: Tensor, target_lengths: Tensor, blank: int = 0
) -> Tensor:
    """Sum of -log p(target) of logits (b, t, vocab), in float32 at least.

    Only the first `lengths` frames and `target_lengths` tokens of each are read. It is infinite for
    a pair that cannot be aligned: `decode.speech.ctc_align.not_alignable` finds these beforehand.

    Args:
        logits: logits (b, t, vocab)
        lengths: number of real frames of each
        targets: target tokens (b, l)
        target_lengths: number of real tokens of each
        blank: id of the blank
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
    """-log p(target) of each of the logits (b, t, vocab), or its sum.

    Args:
        logits: logits (b, t, vocab)
        lengths: number of real frames of each
        targets: target tokens (b, l)
        target_lengths: number of real tokens of each
        blank: id of the blank
        reduction: "none" for each loss, "sum" for their sum
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_probs = logits.log_softmax(-1, dtype=dtype).transpose(0, 1)
    return F.ctc_loss(log_probs, targets, lengths, target_lengths, blank, reduction=reduction)


def true_places(mask: Tensor, count: int) -> Tensor:
    """Places of a flattened mask that are true, of which there are `count`.

    An accelerator that is told how many does not keep the host waiting.
    """
    flat = mask.flatten()
    found = flat.nonzero() if flat.device.type == "cpu" else flat.nonzero_static(size=count)
    return found.squeeze(-1)


# Encoder-decoders


def twice(batch: "PairBatch", r_drop: float) -> tuple[Tensor, ...]:
    """Inputs of a model from a batch: source, target and lengths; for R-Drop twice."""
    sides = batch.source, batch.reads, batch.source_lengths
    return tuple(torch.cat([x, x]) for x in sides) if r_drop else sides


def head_loss(
    model: "EncoderDecoder", hidden: Tensor, batch: "PairBatch", smoothing: float, r_drop: float
) -> Tensor:
    """Summed loss of the vectors before the head; padding never reaches the logits.

    Args:
        model: model whose head is used
        hidden: vectors before the head
        batch: batch with the targets
        smoothing: label smoothing
        r_drop: weight of the R-Drop term; 0 disables it
    """
    real = true_places(batch.writes >= 0, batch.tokens)
    writes = batch.writes.flatten()[real]
    weight, bias = model.head.weight, model.head.bias
    if r_drop:
        one, two = (half.flatten(0, 1)[real] for half in hidden.chunk(2))
        return r_drop_loss(one, two, weight, writes, r_drop, bias=bias, smoothing=smoothing)
    rows = hidden.flatten(0, 1)[real]
    return linear_cross_entropy(rows, weight, writes, bias=bias, smoothing=smoothing)


def own_sequence_loss(model: "EncoderDecoder", batch: "PairBatch", name: str) -> Tensor:
    """Sum of a user's loss over the tokens of targets."""
    real = true_places(batch.writes >= 0, batch.tokens)
    rows = model.hidden(*twice(batch, 0.0)).flatten(0, 1)[real]
    return own_loss(name, model.head(rows), batch.writes.flatten()[real])


def sequence_loss(
    model: "EncoderDecoder", batch: "PairBatch", smoothing: float, r_drop: float
) -> Tensor:
    """Summed cross-entropy of targets, with label smoothing and R-Drop."""
    return head_loss(model, model.hidden(*twice(batch, r_drop)), batch, smoothing, r_drop)
