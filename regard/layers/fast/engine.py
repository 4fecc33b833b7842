"""An encoder-decoder that translates sentences in C, a thread a core, with the search inside.

`regard.decode.search` is the reference, and does whatever is not known here exactly.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from regard import native
from regard.attention.positions import Learned, Position, Sinusoidal
from regard.layers.embed import Embed
from regard.layers.fast.kernel_weights import (
    BlockWeights,
    Fingerprint,
    kernel_can_read,
    kernel_weights,
    known_functions,
    unchanged_functions,
    unmodified,
    unpatched,
    weight_and_bias,
)
from regard.layers.norm import RMSNorm
from regard.layers.vocabulary import Head
from regard.native.torch_private import traced

# positions that add to embeddings, and do nothing else
ADDED = (Position, Sinusoidal, Learned)
MOST_THREADS = 256
# Rows of one product: enough to read every weight for many, and few enough to stay in the cache.
ROWS = {torch.float32: 320, torch.int8: 120}
STOPPINGS = ("patience", "early", "length", "never")
_FUNCTIONS = known_functions(Embed, Head, nn.Embedding, *ADDED)


class Parts(NamedTuple):
    """What an encoder-decoder is made of."""

    source: Embed
    target: Embed
    encoder: Sequence[nn.Module]
    decoder: Sequence[nn.Module]
    encoder_norm: nn.Module
    decoder_norm: nn.Module
    head: Head


class _Shape(ctypes.Structure):
    names = ["width", "heads", "head_width", "ffn_width", "act", "gated", "centred"]
    names += ["readers", "writers", "target_vocab", "bytes"]
    _fields_ = [(name, ctypes.c_long) for name in names]
    _fields_ += [(n, ctypes.c_double) for n in ("eps", "scale", "source_scale", "target_scale")]


class _Job(ctypes.Structure):
    names = ["sentences", "beam", "n_best", "greedy", "stopping", "bos", "eos"]
    names += ["threads", "rows", "longest", "reads", "ends"]
    arrays = ["ids", "end", "first", "limit", "divisor", "source_at", "target_at"]
    arrays += ["texts", "counts", "steps", "passed", "scores"]
    _fields_ = [(name, ctypes.c_long) for name in names] + [("enough", ctypes.c_double)]
    _fields_ += [(name, ctypes.c_void_p) for name in arrays]


class Found(NamedTuple):
    """A text: its tokens, the log-probability after each of them and of the end, and its score."""

    ids: list[int]
    passed: list[float]
    score: float


class Engine:
    """The packed weights of a model, as long as the model is what they were packed from."""

    def __init__(self, model: nn.Module, parts: Parts, never: Sequence[int], dtype: torch.dtype):
        self.library = cast(ctypes.CDLL, native.kernels(model))
        self.fingerprint, self.parts, self.never = Fingerprint([model]), parts, tuple(never)
        self.dtype = dtype
        self.blocks = [kernel_weights(b, False) for b in (*parts.encoder, *parts.decoder)]
        self.numbers = native.numbers(self._weights())
        self.checksum = self._checksum()
        self.handle = self._pack()

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.library.regard_engine_free(self.handle)

    def _weights(self) -> list[Tensor | None]:
        """All weights that are read, but for tables of positions, in the order that C takes."""
        parts, (weight, bias) = self.parts, weight_and_bias(self.parts.head)
        weights = [w for block in self.blocks for w in cast(BlockWeights, block).weights]
        weights += [*weight_and_bias(parts.encoder_norm), *weight_and_bias(parts.decoder_norm)]
        return [*weights, parts.source.tokens.weight, parts.target.tokens.weight, weight, bias]

    def _checksum(self) -> tuple[int, int]:
        sums = (ctypes.c_uint64 * 2)()
        self.library.regard_checksum(self.numbers, len(self.numbers), sums)
        return sums[0], sums[1]

    def _pack(self) -> int | None:
        first, parts = cast(BlockWeights, self.blocks[0]), self.parts
        shape = _Shape(*(first.width, first.heads, first.head_width, first.ffn_width, first.act))
        shape.gated, shape.centred = first.weights[8] is not None, first.norm is not RMSNorm
        shape.readers, shape.writers = len(parts.encoder), len(parts.decoder)
        shape.target_vocab = parts.head.out_features
        shape.bytes = self.dtype == torch.int8
        shape.eps, shape.scale = first.eps, first.scale
        shape.source_scale, shape.target_scale = parts.source.scale, parts.target.scale
        *weights, head, bias = self._weights()
        forbidden = torch.zeros(parts.head.out_features) if bias is None else bias.detach().clone()
        forbidden[list(self.never)] = -torch.inf
        everything = native.numbers([*weights, head, forbidden])
        return self.library.regard_engine_new(ctypes.byref(shape), everything)

    def holds(self, model: nn.Module, never: Sequence[int], dtype: torch.dtype) -> bool:
        """True if the model is what was packed, to the last number."""
        return (
            self.handle is not None
            and self.fingerprint.modules[0] is model
            and self.never == tuple(never)
            and self.dtype == dtype
            and self.fingerprint.same()
            and self.checksum == self._checksum()
        )

    def translate(
        self,
        sources: Sequence[Sequence[int]],
        limits: Sequence[int],
        *,
        beam: int,
        n_best: int,
        divisor: Callable[[int], float],
        stopping: str,
        enough: float,
        bos: int,
        eos: int,
        ends: Sequence[int],
    ) -> list[list[Found]] | None:
        """Texts of each source, best first; nothing where a number is not finite.

        Args:
            sources: the tokens of each source, at least one
            limits: the most tokens of each text
            beam: hypotheses of a sentence; 1 is greedy
            n_best: texts to return of each
            divisor: of a log-probability, by how many tokens it is the sum of
            stopping: when a search ends, as in `search.STOPPINGS`
            enough: texts after which a sentence is done
            bos: the token that texts are written after
            eos: the token that ends a text and is not part of it
            ends: tokens that end a text and are part of it
        """
        known = self.parts.source.tokens.num_embeddings, self.parts.target.tokens.num_embeddings
        if not 0 <= bos < known[1] or not all(0 <= x < known[0] for ids in sources for x in ids):
            return None
        order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
        reads, longest = len(sources[order[0]]), max(limits)
        job = _Job(len(order), beam, n_best, beam == 1)
        job.stopping, job.enough = STOPPINGS.index(stopping), enough
        job.bos, job.eos, job.ends = bos, eos, len(ends)
        job.threads = max(1, min(torch.get_num_threads(), len(order), MOST_THREADS))
        job.rows = max(ROWS[self.dtype], beam, reads)
        job.longest, job.reads = longest + 1, reads
        count = len(order) * n_best
        lengths = torch.tensor([0, *(len(sources[i]) for i in order)])
        arrays = {
            "ids": torch.tensor([x for i in order for x in sources[i]], dtype=torch.int32),
            "end": torch.tensor([*ends, 0], dtype=torch.int32),
            "first": lengths.cumsum(0),
            "limit": torch.tensor([limits[i] for i in order]),
            "divisor": torch.tensor(
                [1.0, *(divisor(n) for n in range(1, longest + 2))], dtype=torch.float64
            ),
            "source_at": self._positions(self.parts.source, reads),
            "target_at": self._positions(self.parts.target, longest),
            "texts": torch.empty(count, job.longest, dtype=torch.int32),
            "counts": torch.full((count,), -1),
            "steps": torch.zeros(count, dtype=torch.int64),
            "passed": torch.empty(count, job.longest),
            "scores": torch.zeros(count, dtype=torch.float64),
        }
        for name, array in arrays.items():
            setattr(job, name, array.data_ptr())
        if not self.library.regard_translate(self.handle, ctypes.byref(job)):
            return None
        counts, steps, scores = (arrays[x].tolist() for x in ("counts", "steps", "scores"))
        texts: list[list[Found]] = [[] for _ in sources]
        for place, (many, passed) in enumerate(zip(counts, steps, strict=True)):
            if many >= 0:
                ids = arrays["texts"][place, :many].tolist()
                found = Found(ids, arrays["passed"][place, :passed].tolist(), scores[place])
                texts[order[place // n_best]].append(found)
        return texts

    @staticmethod
    def _positions(embed: Embed, count: int) -> Tensor:
        """What positions add to the embeddings of so many tokens."""
        with torch.inference_mode():
            nothing = torch.zeros(count, embed.tokens.embedding_dim)
            return embed.position.embed(nothing, torch.arange(count).unsqueeze(-1)).contiguous()


def engine_of(
    model: nn.Module,
    parts: Parts,
    never: Sequence[int],
    dtype: torch.dtype,
    known: Any,
    before: "Engine | None",
) -> "Engine | None":
    """The engine of a model (`before`, if it still holds), where all of it is known exactly.

    Products are in `dtype`, float32 or int8. `known` are functions of the model's own class, as
    `known_functions` returned them.
    """
    active = native.scope(model)
    if (
        active is None
        or active.copies is None
        or active.half
        or traced()
        or native.library() is None
    ):
        return None
    if not unpatched():
        return None
    if not unchanged_functions(known) or not unchanged_functions(_FUNCTIONS):
        return None
    if before is not None and before.holds(model, never, dtype):
        return before
    if not _is_known(model, parts):
        return None
    made = Engine(model, parts, never, dtype)
    return made if made.handle else None


def _is_known(model: nn.Module, parts: Parts) -> bool:
    """True if every part is of a class that the engine knows, and nobody changed how it runs."""
    if not all(map(unmodified, model.modules())) or not parts.encoder or not parts.decoder:
        return False
    if any(module.training for module in model.modules()):
        return False
    blocks = [kernel_weights(block, False) for block in (*parts.encoder, *parts.decoder)]
    first = blocks[0]
    if first is None or any(b is None or b[2:] != first[2:] for b in blocks):
        return False
    if first.kv_heads != first.heads or first.position is not None:
        return False
    for embed in (parts.source, parts.target):
        if (
            type(embed) is not Embed
            or type(embed.position) not in ADDED
            or embed.types is not None
            or any(type(one) is not nn.Identity for one in (embed.norm, embed.widen))
            or type(embed.tokens) is not nn.Embedding
            or embed.tokens.max_norm is not None
            or not kernel_can_read(embed.tokens.weight, tuple(embed.tokens.weight.shape))
        ):
            return False
    for block in (*parts.encoder, *parts.decoder):
        if type(cast(Any, block).attention.position) not in ADDED:
            return False
    for norm in (parts.encoder_norm, parts.decoder_norm):
        weight, shift = weight_and_bias(norm)
        if type(norm) is not first.norm or cast(Any, norm).eps != first.eps:
            return False
        if not kernel_can_read(weight, (first.width,)):
            return False
        if not (shift is None or kernel_can_read(shift, (first.width,))):
            return False
    head, bias = weight_and_bias(parts.head)
    fits = type(parts.head) is Head and kernel_can_read(
        head, (parts.head.out_features, first.width)
    )
    return fits and (bias is None or kernel_can_read(bias, (parts.head.out_features,)))
