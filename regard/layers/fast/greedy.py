"""Texts continued by the most likely tokens, all steps in C.

`regard.decode.search` is the reference, and does whatever is not known here exactly.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from regard import native
from regard.attention.intervene import intervening
from regard.attention.positions import Learned, Position, Rotary, Sinusoidal, Yarn
from regard.attention.watch import watcher
from regard.errors import UsageError
from regard.layers.embed import RoundedEmbed, TokenEmbedding
from regard.layers.fast.kernel_weights import (
    Functions,
    checked_plan,
    kernel_can_read,
    known_functions,
    unchanged_functions,
    weight_and_bias,
)
from regard.layers.fast.stack import (
    PackedStack,
    Past,
    changed_part,
    known_embedding,
    packed_head,
    packed_stack,
)
from regard.layers.vocabulary import VocabularyLinear
from regard.native.torch_private import traced

# Positions that add to embeddings, rotate queries and keys, or do nothing.
_POSITIONS = (Position, Sinusoidal, Learned, Rotary, Yarn)
_EMBEDDINGS = (TokenEmbedding, RoundedEmbed)
_FUNCTIONS = known_functions(*_EMBEDDINGS, VocabularyLinear, nn.Embedding, *_POSITIONS)
# Steps of one call of C, after which Python may stop it.
_STEPS = 64


class DecoderParts(NamedTuple):
    """What a model that continues texts is made of."""

    embed: TokenEmbedding
    blocks: Sequence[nn.Module]
    norm: nn.Module
    head: nn.Module
    longest: int | None = None  # texts that all of its layers see as a whole


class _Writing(ctypes.Structure):
    names = ["sentences", "steps", "longest", "ends", "threads", "ids", "end", "first", "limit"]
    names += ["never", "at", "turn", "table", "norm", "shift", "table_row", "table_column"]
    results = ["read", "counts", "done", "written", "likely"]
    _fields_ = [("past", Past)] + [(name, ctypes.c_long) for name in names]
    _fields_ += [("scale", ctypes.c_double)] + [(name, ctypes.c_long) for name in results]


def continue_texts(
    model: nn.Module,
    parts: DecoderParts | None,
    known: Functions,
    texts: Sequence[Sequence[int]],
    limits: Sequence[int],
    *,
    ends: Sequence[int],
    never: Sequence[int],
) -> list[tuple[list[int], list[float]]] | None:
    """The most likely tokens after each text, with their log-probabilities, by a kernel.

    Returns nothing where a part of the model is not known exactly, or a number is not finite.

    Args:
        model: model that continues them
        parts: what it is made of
        known: functions of its class, as they were
        texts: tokens of each text, at least one
        limits: most tokens after each
        ends: tokens that end a text, and are the last of it
        never: tokens that are not chosen
    """
    if (
        parts is None
        or why_not_greedy(model, parts, known)
        or not texts
        or not min(map(len, texts))
    ):
        return None
    vocab, longest = parts.embed.tokens.num_embeddings, max(limits)
    count = max(len(ids) + limit for ids, limit in zip(texts, limits, strict=True))
    if parts.longest is not None and count > parts.longest:
        return None
    if not all(0 <= x < vocab for ids in texts for x in ids):
        return None
    stack, head = packed_stack(parts.blocks, parts.norm), packed_head(cast(nn.Linear, parts.head))
    if stack is None or head is None or head.shape.width != stack.packed.shape.width:
        return None
    try:
        at, turn = _places(parts.embed, stack, count)
    except UsageError:  # a text past the learned positions, which the search refuses
        return None
    table, b = parts.embed.tokens.weight.detach(), len(texts)
    forbidden = torch.zeros(-(-head.shape.target_vocab // 512) * 512)
    forbidden[list(never)] = -torch.inf
    arrays: dict[str, Tensor | None] = {
        "ids": torch.tensor([x for ids in texts for x in ids], dtype=torch.int32),
        "end": torch.tensor([*ends, 0], dtype=torch.int32),
        "first": torch.tensor([0, *map(len, texts)]).cumsum(0),
        "limit": torch.tensor(limits),
        "never": forbidden,
        "at": at,
        "turn": turn,
        "table": table,
        "read": torch.zeros(b, dtype=torch.int64),
        "counts": torch.zeros(b, dtype=torch.int64),
        "done": torch.zeros(b, dtype=torch.int64),
        "written": torch.zeros(b, longest, dtype=torch.int32),
        "likely": torch.zeros(b, longest),
    }
    job = _Writing(sentences=b, steps=_STEPS, longest=longest, ends=len(ends))
    job.threads, job.scale = torch.get_num_threads(), parts.embed.scale
    for name, array in arrays.items():
        setattr(job, name, native.address(array))
    job.table_row, job.table_column = table.stride()
    job.norm, job.shift = map(native.address, weight_and_bias(parts.embed.norm))
    first = stack.first
    keys = torch.empty(2, len(parts.blocks), b, first.kv_heads, count, first.head_width)
    layers = native.addresses([*keys[0], *keys[1]])
    job.past.room = job.past.longest = count
    job.past.keys = ctypes.addressof(layers)
    job.past.values = ctypes.addressof(layers) + ctypes.sizeof(layers) // 2
    done, library = cast(Tensor, arrays["done"]), stack.packed.library
    while not bool(done.all()):
        if not library.regard_write(stack.packed.handle, head.handle, ctypes.byref(job)):
            return None
    counts = cast(Tensor, arrays["counts"]).tolist()
    written, likely = cast(Tensor, arrays["written"]), cast(Tensor, arrays["likely"])
    return [
        (ids[:n].tolist(), some[:n].tolist())
        for n, ids, some in zip(counts, written, likely, strict=True)
    ]


def _places(
    embed: TokenEmbedding, stack: PackedStack, count: int
) -> tuple[Tensor | None, Tensor | None]:
    """What each place adds to embeddings, and how it rotates queries and keys."""
    places = torch.arange(count).unsqueeze(-1)
    with torch.inference_mode():
        position, d = stack.first.position, stack.first.head_width
        turn = None if position is None else position.cos_sin(torch.float32, d, places)
        nothing = torch.zeros(count, embed.tokens.embedding_dim)
        at = embed.position.embed(nothing, places)
    turn = None if turn is None else turn.squeeze(-2).contiguous()
    return at.contiguous() if bool(at.any()) else None, turn


def why_not_greedy(model: nn.Module, parts: DecoderParts, known: Functions) -> str:
    """Why a model's texts are not continued by `continue_texts`; "" where they are."""
    if native.scope(model) is None:
        return "kernels are not switched on for it"
    if traced() or watcher() is not None or intervening():
        return "every operation must be seen, or somebody looks inside"
    if native.plain() is None:
        return native.status().reason
    if not unchanged_functions(known) or not unchanged_functions(_FUNCTIONS):
        return "a function of its classes was replaced"
    # only what is known is remembered: the rest may be undone
    fine = checked_plan("greedy", [model], lambda: None if _unknown(model, parts) else True)
    return "" if fine else _unknown(model, parts) or "a function of PyTorch was replaced"


def _unknown(model: nn.Module, parts: DecoderParts) -> str:
    """The part of a model that is not known, or that somebody changed, else ""."""
    if changed := changed_part(model):
        return changed
    embed: Any = parts.embed
    if type(embed) not in _EMBEDDINGS or not known_embedding(embed, _POSITIONS):
        return f"its embedding ({type(embed.position).__name__} positions)"
    if why := why_no_steps(parts.blocks, parts.norm, parts.head):
        return why
    if type(embed.norm) is not nn.Identity:
        weight, shift = weight_and_bias(embed.norm)
        stack = cast(PackedStack, packed_stack(parts.blocks, parts.norm))
        width, same = (stack.first.width,), type(embed.norm) is stack.first.norm
        same = same and cast(Any, embed.norm).eps == stack.first.eps
        same = same and kernel_can_read(weight, width)
        if not same or not (shift is None or kernel_can_read(shift, width)):
            return f"a norm {type(embed.norm).__name__} beside {stack.first.norm.__name__}"
    return ""


def why_no_steps(blocks: Sequence[nn.Module], norm: nn.Module, head: nn.Module) -> str:
    """Why a step of decoding, or a vocabulary, is not computed by a kernel; "" where both are."""
    if type(head) is not VocabularyLinear:
        return f"its head {type(head).__name__}"
    if packed_stack(blocks, norm) is None:
        return "a block has a norm, score, position, size or data type that it does not know"
    return "" if packed_head(head) is not None else "its head is too large to be packed"
