"""An encoder-decoder that translates sentences in C, a thread a core, with the search inside.

`regard.decode.search` is the reference, and does whatever is not known here exactly.
"""

import ctypes
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard import native
from regard.attention.positions import ALiBi, Learned, Position, Sinusoidal, T5Bias
from regard.attention.positions.distance import Distance
from regard.layers.embed import TokenEmbedding
from regard.layers.fast.kernel_weights import (
    BlockWeights,
    Fingerprint,
    kernel_can_read,
    kernel_weights,
    known_functions,
    unchanged_functions,
    unpatched,
    weight_and_bias,
)
from regard.layers.fast.stack import StackShape, changed_part, known_embedding
from regard.layers.norm import RMSNorm
from regard.layers.residual import PostNorm, PreNorm
from regard.layers.vocabulary import VocabularyLinear
from regard.native.torch_private import traced

# positions that add to embeddings, or to scores by the distance, and do nothing else
_BIASED = (T5Bias, ALiBi)
_ADDED = (Position, Sinusoidal, Learned, *_BIASED)
_MOST_THREADS, _LANES = 256, 16
# Rows of one product: enough to read every weight for many, and few enough to stay in the cache.
_ROWS = {torch.float32: 320, torch.int8: 120}
STOPPINGS = ("patience", "early", "length", "never")
_FUNCTIONS = known_functions(TokenEmbedding, VocabularyLinear, nn.Embedding, Distance, *_ADDED)


class Parts(NamedTuple):
    """What an encoder-decoder is made of."""

    source: TokenEmbedding
    target: TokenEmbedding
    encoder: Sequence[nn.Module]
    decoder: Sequence[nn.Module]
    encoder_norm: nn.Module
    decoder_norm: nn.Module
    head: VocabularyLinear
    head_scale: float = 1.0


class _Job(ctypes.Structure):
    names = ["sentences", "beam", "n_best", "greedy", "stopping", "bos", "eos"]
    names += ["threads", "rows", "longest", "reads", "ends"]
    arrays = ["ids", "end", "first", "limit", "forced", "forced_first", "open"]
    arrays += ["divisor", "source_at", "target_at"]
    arrays += ["source_bias", "target_bias"]
    results = ["texts", "counts", "steps", "passed", "scores"]
    _fields_ = [(name, ctypes.c_long) for name in names] + [("enough", ctypes.c_double)]
    _fields_ += [(name, ctypes.c_void_p) for name in arrays]
    _fields_ += [(name, ctypes.c_long) for name in ("source_span", "target_span")]
    _fields_ += [(name, ctypes.c_void_p) for name in results]


class EngineText(NamedTuple):
    """A text: its tokens, the log-probability after each of them and of the end, and its score."""

    ids: list[int]
    passed: list[float]
    score: float


class Engine:
    """The packed weights of a model, as long as the model is what they were packed from."""

    def __init__(self, model: nn.Module, parts: Parts, never: Sequence[int], dtype: torch.dtype):
        self.library = cast(ctypes.CDLL, native.plain())
        self.fingerprint, self.parts, self.never = Fingerprint([model]), parts, tuple(never)
        self.dtype = dtype
        self.blocks = _blocks(parts)
        *packed, _, _, head, bias = self._weights()  # embeddings are read where they lie
        self.numbers = native.numbers([*packed, head, bias])
        self.tables: dict[int, Tensor] = {}  # of positions, by the embedding
        self.divided: tuple[Any, Tensor] = None, torch.empty(0)
        self.checksum = self._checksum()
        self.handle = self._pack()

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.library.regard_engine_free(self.handle)

    def _weights(self) -> list[Tensor | None]:
        """All weights that are read, but for tables of positions, in the order that C takes."""
        parts, (weight, bias) = self.parts, weight_and_bias(self.parts.head)
        weights = [w for block in self.blocks for w in cast(BlockWeights, block).weights]
        norms = [parts.encoder_norm, parts.decoder_norm, parts.source.norm, parts.target.norm]
        weights += [one for norm in norms for one in weight_and_bias(norm)]
        return [*weights, parts.source.tokens.weight, parts.target.tokens.weight, weight, bias]

    def _checksum(self) -> tuple[int, int]:
        sums = (ctypes.c_uint64 * 2)()
        self.library.regard_checksum(self.numbers, len(self.numbers), sums)
        return sums[0], sums[1]

    def _pack(self) -> int | None:
        first, parts = cast(BlockWeights, self.blocks[0]), self.parts
        shape = StackShape(*first[2:8])
        shape.gated, shape.centred = first.weights[8] is not None, first.norm is not RMSNorm
        shape.post, shape.head_scale = first.order is PostNorm, parts.head_scale
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
        prefixes: Sequence[Sequence[int]] = (),
        *,
        beam: int,
        n_best: int,
        divisor: Callable[[int], float],
        stopping: str,
        enough: float,
        bos: int,
        eos: int,
        ends: Sequence[int],
    ) -> list[list[EngineText]] | None:
        """Texts of each source, best first; nothing where a number is not finite.

        Args:
            sources: the tokens of each source, at least one
            limits: the most tokens of each text
            prefixes: tokens that each text begins with, if any does
            beam: hypotheses of a sentence; 1 is greedy
            n_best: texts to return of each
            divisor: of a log-probability, by how many tokens it is the sum of
            stopping: when a search ends, as in `search.STOPPINGS`
            enough: texts after which a sentence is done
            bos: the token that texts are written after
            eos: the token that ends a text and is not part of it
            ends: tokens that end a text and are part of it
        """
        known, written = (x.tokens.num_embeddings for x in (self.parts.source, self.parts.target))
        if not 0 <= bos < written or not all(0 <= x < known for ids in sources for x in ids):
            return None
        given = [list(ids) for ids in prefixes] or [[]] * len(sources)
        if any(len(ids) > limit for ids, limit in zip(given, limits, strict=True)):
            return None
        written = min(written, self.parts.head.out_features)
        if any(x == eos or not 0 <= x < written for ids in given for x in ids):
            return None
        order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
        reads, longest = len(sources[order[0]]), max(limits)
        job = _Job(len(order), beam, n_best, beam == 1)
        job.stopping, job.enough = STOPPINGS.index(stopping), enough
        job.bos, job.eos, job.ends = bos, eos, len(ends)
        job.threads = max(1, min(torch.get_num_threads(), len(order), _MOST_THREADS))
        # no more than can be used at once, as memory that is new takes time
        most = max(len(order) * beam, sum(map(len, sources)))
        job.rows = max(min(_ROWS[self.dtype], most), beam, reads)
        job.longest, job.reads = longest + 1, reads
        count = len(order) * n_best
        arrays = {
            "ids": torch.tensor([x for i in order for x in sources[i]], dtype=torch.int32),
            "end": torch.tensor([*ends, 0], dtype=torch.int32),
            "first": torch.tensor([*accumulate((len(sources[i]) for i in order), initial=0)]),
            "limit": torch.tensor([limits[i] for i in order]),
            "forced": torch.tensor([*(x for i in order for x in given[i]), 0], dtype=torch.int32),
            "forced_first": torch.tensor([*accumulate((len(given[i]) for i in order), initial=0)]),
            "open": self._open_bias() if any(given) else None,
            "divisor": self._divisors(divisor, longest),
            "source_at": self._positions(self.parts.source, reads),
            "target_at": self._positions(self.parts.target, longest),
            "source_bias": _biases(self.parts.source.position, reads, 2 * reads - 1),
            "target_bias": _biases(self.parts.target.position, job.longest, job.longest),
            "texts": torch.empty(count, job.longest, dtype=torch.int32),
            "counts": torch.full((count,), -1),
            "steps": torch.zeros(count, dtype=torch.int64),
            "passed": torch.empty(count, job.longest),
            "scores": torch.zeros(count, dtype=torch.float64),
        }
        for name, array in arrays.items():
            setattr(job, name, native.address(array))
        job.source_span, job.target_span = 2 * reads - 1, job.longest
        if not self.library.regard_translate(self.handle, ctypes.byref(job)):
            return None
        counts, steps, scores = (arrays[x].tolist() for x in ("counts", "steps", "scores"))
        written, likely = arrays["texts"].numpy(), arrays["passed"].numpy()
        texts: list[list[EngineText]] = [[] for _ in sources]
        for place, (many, passed) in enumerate(zip(counts, steps, strict=True)):
            if many >= 0:
                both = written[place, :many].tolist(), likely[place, :passed].tolist()
                texts[order[place // n_best]].append(EngineText(*both, scores[place]))
        return texts

    def _open_bias(self) -> Tensor:
        """Bias of the head with nothing forbidden, filled up to whole panels."""
        out, (_, bias) = self.parts.head.out_features, weight_and_bias(self.parts.head)
        own = torch.zeros(out) if bias is None else bias.detach()
        return F.pad(own, (0, -out % (4 * _LANES)), value=-torch.inf)

    def _divisors(self, divisor: Callable[[int], float], longest: int) -> Tensor:
        """Divisors of log-probabilities, by the number of tokens, up to so many or more."""
        known, table = self.divided
        if known is not divisor or len(table) < longest + 2:
            each = [1.0, *(divisor(n) for n in range(1, longest + 2))]
            table = torch.tensor(each, dtype=torch.float64)
            self.divided = divisor, table
        return table

    def _positions(self, embed: TokenEmbedding, count: int) -> Tensor:
        """What positions add to the embeddings of so many tokens, or of more."""
        known = self.tables.get(id(embed))
        if known is None or len(known) < count or type(embed.position) is Learned:
            with torch.inference_mode():
                nothing = torch.zeros(count, embed.tokens.embedding_dim)
                at = torch.arange(count).unsqueeze(-1)
                known = self.tables[id(embed)] = embed.position.embed(nothing, at).contiguous()
        return known


def _biases(position: nn.Module, count: int, span: int) -> Tensor | None:
    """What distances add to scores, by head, from a key `count` - 1 before the query on."""
    if type(position) not in _BIASED:
        return None
    with torch.inference_mode():
        made = cast(Distance, position).values(torch.arange(count - 1, count - 1 - span, -1))
        return F.pad(made.flatten(), (0, _LANES))


def _blocks(parts: Parts) -> list[BlockWeights | None]:
    """The weights of all blocks, whose norms all come before or all after."""
    blocks: list[Any] = [*parts.encoder, *parts.decoder]
    order = PostNorm if type(getattr(blocks[0], "around_attention", None)) is PostNorm else PreNorm
    return [kernel_weights(block, False, order) for block in blocks]


def engine_of(
    model: nn.Module,
    parts: Parts,
    never: Sequence[int],
    known: Any,
    before: "Engine | None",
) -> "Engine | None":
    """The engine of a model (`before`, if it still holds), where all of it is known exactly.

    Args:
        model: model that is decoded
        parts: its encoder, decoder, embeddings and head
        never: tokens that are never written
        known: functions of the model's own class, as `known_functions` returned them
        before: engine of an earlier call, returned if it still holds
    """
    if _off(model, known):
        return None
    dtype = cast(native.Scope, native.scope(model)).dtype
    if before is not None and before.holds(model, never, dtype):
        return before
    if _unknown(model, parts):
        return None
    made = Engine(model, parts, never, dtype)
    return made if made.handle else None


def why_no_engine(model: nn.Module, parts: Parts, known: Any) -> str:
    """Why `engine_of` has no engine for a model; "" where it has one."""
    return _off(model, known) or _unknown(model, parts)


def _off(model: nn.Module, known: Any) -> str:
    """Why no engine is used here, whatever the model is made of, else ""."""
    active = native.scope(model)
    if active is None or active.copies is None:
        return "kernels are not switched on for it"
    if active.half:
        return "its products are asked for in bfloat16"
    if traced():
        return "every operation must be seen by a compiler or a mode of PyTorch"
    if native.plain() is None:
        return native.status().reason
    same = unpatched() and unchanged_functions(known) and unchanged_functions(_FUNCTIONS)
    return "" if same else "a function of its classes or of PyTorch was replaced"


def _unknown(model: nn.Module, parts: Parts) -> str:
    """The part of a model that the engine does not know, or that somebody changed, else ""."""
    if changed := changed_part(model):
        return changed
    if not parts.encoder or not parts.decoder:
        return "it has no encoder or no decoder"
    blocks = _blocks(parts)
    first = blocks[0]
    if first is None or any(b is None or b[2:] != first[2:] for b in blocks):
        return "a block has a norm, score, position, size or data type that it does not know"
    if first.kv_heads != first.heads or first.position is not None:
        return "its heads share keys, or its positions rotate queries and keys"
    for embed in (parts.source, parts.target):
        if type(embed) is not TokenEmbedding or not known_embedding(embed, _ADDED):
            return f"its embedding ({type(embed.position).__name__} positions)"
    for block in (*parts.encoder, *parts.decoder):
        if type(cast(Any, block).attention.position) not in _ADDED:
            return f"positions {type(cast(Any, block).attention.position).__name__} of a block"
    norms = [parts.encoder_norm, parts.decoder_norm, parts.source.norm, parts.target.norm]
    if first.order is PreNorm and any(type(norm) is nn.Identity for norm in norms[:2]):
        return "a stack without a last norm"
    for norm in norms:
        weight, shift = weight_and_bias(norm)
        if type(norm) is not nn.Identity and (
            type(norm) is not first.norm
            or cast(Any, norm).eps != first.eps
            or not kernel_can_read(weight, (first.width,))
            or not (shift is None or kernel_can_read(shift, (first.width,)))
        ):
            return f"a norm {type(norm).__name__} beside {first.norm.__name__}"
    head, bias = weight_and_bias(parts.head)
    out = parts.head.out_features
    fits = type(parts.head) is VocabularyLinear and kernel_can_read(head, (out, first.width))
    fits = fits and (bias is None or kernel_can_read(bias, (out,)))
    return "" if fits else f"its head {type(parts.head).__name__}"
