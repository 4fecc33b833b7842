"""A mean-pooling classifier of ours as a ModernBERT with the same logits, and back.

ModernBERT has more layers: they are given weights by which they change nothing.
"""

from dataclasses import replace
from math import ceil, log2, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import UsageError
from regard.models.bert import Bert, BertConfig
from regard.models.protocols import Model

# a network -> the same with a gate
_GATES = {"gelu": "geglu", "gelu_tanh": "geglu_tanh", "swish": "swiglu"}
# so far below the epsilon of a norm, it divides all vectors by the same number
_SMALL = 1e-5
_MAX_LOGIT = 1e12


def modernbert_config(config: BertConfig) -> BertConfig | None:
    """Return a config with the parts of ModernBERT for the same logits, if there is one."""
    block = config.block
    same = (
        (config.head, "classify"),
        (config.pool, "mean"),
        (config.transform, "none"),
        (config.first_norm, "same"),
        (config.layers, "own"),
        (config.window, None),
        (block.order, "pre"),
        (block.norm, "layer"),
        (block.bias, True),
    )
    if any(one != other for one, other in same) or block.feed_forward not in _GATES:
        return None
    if config.labels >= block.width:
        raise UsageError(
            f"no public format holds the mean of vectors of width {block.width} for "
            f"{config.labels} labels, only for less than the width; train with pool=roberta"
        )
    return replace(
        config,
        depth=config.depth + 1,
        first_norm="none",
        transform="dense",
        transform_bias=False,
        head_act="gelu",
        block=replace(block, feed_forward=_GATES[block.feed_forward]),
    )


@torch.no_grad()
def as_modernbert(model: Model, config: BertConfig) -> Bert:
    """Return a model with the parts of ModernBERT and the same logits.

    A first layer adds nothing, as their first has no norm before its attention; gates are open; and
    what their head does with the mean is so small that its activation and its norm are linear.
    """
    ours = model.state_dict()
    weights = {name: torch.zeros_like(x) for name, x in Bert(config).state_dict().items()}
    for name in weights:
        if ".norm.weight" in name:
            weights[name].fill_(1.0)
    for name, x in ours.items():
        first, *rest = name.split(".")
        if first == "blocks":
            place = ".".join(["blocks", str(int(rest[0]) + 1), *rest[1:]])
            if "feed_forward.inner." in name:
                weights[place].fill_(1.0 if name.endswith("bias") else 0.0)
                place = place.replace("feed_forward.inner", "feed_forward.gate")
            weights[place] = x
        elif name in weights and name != "head.out.weight":
            weights[name] = x
    labels, scale = _linear(ours["head.out.weight"], ours["norm.weight"], ours["norm.bias"], config)
    weights["head.transform.dense.weight"] = labels
    weights["head.out.weight"].fill_diagonal_(scale)
    made = Bert(config).eval()
    made.load_state_dict(weights)
    return made


def _linear(head: Tensor, norm: Tensor, bias: Tensor, config: BertConfig) -> tuple[Tensor, float]:
    """Return a matrix (w, w) with small logits in its first rows, and how to make them large.

    The row after them holds their negative sum, so that the mean that a norm takes away is 0.
    """
    eps = config.block.norm_eps
    matrix = torch.zeros(head.shape[1], head.shape[1], dtype=torch.float64)
    matrix[: len(head)] = head.double()
    matrix[len(head)] = -head.double().sum(0)
    # no vector after the last norm is longer than this
    longest = sqrt(len(norm)) * float(norm.abs().max()) + float(bias.double().norm())
    most = max(1e-6, longest * float(matrix.norm(dim=1).max()))
    if most > _MAX_LOGIT:
        raise UsageError(f"the head's logits may be as large as {most:.0e}, which no norm holds")
    scale = 2.0 ** ceil(log2(2 * most / _SMALL))
    return (matrix * (2 * sqrt(eps) / scale)).float(), scale  # of something small, gelu is the half


@torch.no_grad()
def from_modernbert(model: nn.Module) -> Any:
    """Return the plain model that a ModernBERT was made of, or the ModernBERT if it is another."""
    config: Any = model.config
    plain = {gated: network for network, gated in _GATES.items()}.get(config.block.feed_forward)
    if (config.head, config.pool, config.transform) != ("classify", "mean", "dense"):
        return model
    if plain is None or config.depth < 2 or config.labels >= config.block.width:
        return model
    block = replace(config.block, feed_forward=plain)
    plain_head = {"transform": "none", "transform_bias": True, "head_act": "same"}
    ours = replace(config, depth=config.depth - 1, block=block, first_norm="same", **plain_head)
    if modernbert_config(ours) is None:
        return model
    theirs = model.state_dict()
    out = theirs["head.out.weight"]
    scale = float(out[0, 0])
    if not torch.equal(out, torch.zeros_like(out).fill_diagonal_(scale)) or block.norm_eps <= 0:
        return model
    made, weights = Bert(ours).eval(), {}
    for name in made.state_dict():
        first, *rest = name.split(".")
        place = (
            ".".join(["blocks", str(int(rest[0]) + 1), *rest[1:]]) if first == "blocks" else name
        )
        weights[name] = theirs[place.replace("feed_forward.inner", "feed_forward.gate")]
    large = theirs["head.transform.dense.weight"][: config.labels].double()
    weights["head.out.weight"] = (large * (scale / (2 * sqrt(block.norm_eps)))).float()
    made.load_state_dict(weights)
    try:
        again = as_modernbert(made, config).state_dict()
    except UsageError:
        return model
    head = "head.transform.dense.weight"  # rounded twice
    same = all(torch.equal(x, theirs[name]) for name, x in again.items() if name != head)
    near = torch.allclose(
        again[head], theirs[head], rtol=1e-4, atol=1e-4 * float(large.abs().max())
    )
    return made if same and near else model
