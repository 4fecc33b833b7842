"""An encoder-decoder that translates sentences in C, a thread a core, with the search inside.

`regard.decode.search` is the reference, and does whatever is not known here exactly.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
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
    names += ["threads", "rows", "longest", "reads", "ends", "places"]
    arrays = ["queue", "length", "limit", "ids", "end", "forced", "forced_count", "dropped", "left"]
    tables = ["open", "divisor", "source_at", "target_at", "source_bias", "target_bias"]
    results = ["texts", "counts", "steps", "passed", "scores"]
    _fields_ = [(name, ctypes.c_long) for name in names] + [("enough", ctypes.c_double)]
    _fields_ += [(name, ctypes.c_void_p) for name in (*arrays, *tables)]
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
        self.checksum = native.checksum(self.library, self.numbers)
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

    def _pack(self) -> int | None:
        first, parts = cast(BlockWeights, self.blocks[0]), self.parts
        self.shape = shape = StackShape(*first[2:8])
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
            and self.checksum == native.checksum(self.library, self.numbers)
        )

    def translate(
        self,
        sources: Sequence[Sequence[int]],
        limits: Sequence[int],
        prefixes: Sequence[Sequence[int]] = (),
        **how: Any,
    ) -> list[list[EngineText]] | None:
        """Texts of each source, best first; nothing where a number is not finite.

        Args:
            sources: the tokens of each source, at least one
            limits: the most tokens of each text
            prefixes: tokens that each text begins with, if any does
            how: options of the search, as `Crew` takes them
        """
        given = prefixes or [[]] * len(sources)
        if not self.knows(sources, limits, given, **how):
            return None
        order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
        # no more rows than can be used at once, as memory that is new takes time
        rows = max(len(order) * how["beam"], sum(map(len, sources)))
        sizes = len(order), len(sources[order[0]]), max(limits)
        crew = Crew(self, sizes, rows=rows, **how)
        crew.admit(
            [sources[i] for i in order], [limits[i] for i in order], [given[i] for i in order]
        )
        found = crew.run(once=False)
        if found is None:
            return None
        texts: list[list[EngineText]] = [[] for _ in sources]
        for place, some in found.items():
            texts[order[place]] = some
        return texts

    def crew(self, sizes: tuple[int, int, int], **how: Any) -> "Crew":
        """A crew for up to so many sentences, tokens of a source and tokens of a text."""
        return Crew(self, sizes, **how)

    def knows(
        self,
        sources: Sequence[Sequence[int]],
        limits: Sequence[int],
        prefixes: Sequence[Sequence[int]],
        *,
        bos: int,
        eos: int,
        **_: Any,
    ) -> bool:
        """True if all tokens are the model's, and no prefix ends or passes the limit of its text.

        Args:
            sources: the tokens of each source
            limits: the most tokens of each text
            prefixes: tokens that each text begins with
            bos: the token that texts are written after
            eos: the token that ends a text
        """
        known, written = (x.tokens.num_embeddings for x in (self.parts.source, self.parts.target))
        if not 0 <= bos < written or not all(0 <= x < known for ids in sources for x in ids):
            return False
        written = min(written, self.parts.head.out_features)
        fit = all(len(ids) <= limit for ids, limit in zip(prefixes, limits, strict=True))
        return fit and all(x != eos and 0 <= x < written for ids in prefixes for x in ids)

    def tables_for(
        self, reads: int, longest: int, divisor: Callable[[int], float], prefixed: bool
    ) -> dict[str, Tensor | None]:
        """Numbers by position or length, for sources and texts of so many tokens or fewer."""
        source, target = self.parts.source, self.parts.target
        return {
            "open": self._open_bias() if prefixed else None,
            "divisor": self._divisors(divisor, longest),
            "source_at": self._positions(source, reads),
            "target_at": self._positions(target, longest),
            "source_bias": _biases(source.position, reads, 2 * reads - 1),
            "target_bias": _biases(target.position, longest + 1, longest + 1),
        }

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


class Crew:
    """Sentences that an engine translates together: each joins when it comes, and leaves when done.

    Each has a place until its texts are taken. They take steps together, and each text is what it
    would be alone.

    Args:
        engine: what translates them
        sizes: sentences at a time, tokens of a source, and tokens of a text, at the most
        rows: rows of a product, if fewer than usual are enough
        beam: hypotheses of a sentence; 1 is greedy
        n_best: texts of each
        divisor: of a log-probability, by how many tokens it is the sum of
        stopping: when a search ends, as in `search.STOPPINGS`
        enough: texts after which a sentence is done
        bos: the token that texts are written after
        eos: the token that ends a text and is not part of it
        ends: tokens that end a text and are part of it
    """

    def __init__(
        self,
        engine: Engine,
        sizes: tuple[int, int, int],
        *,
        rows: int = 2**30,
        beam: int,
        n_best: int,
        divisor: Callable[[int], float],
        stopping: str,
        enough: float,
        bos: int,
        eos: int,
        ends: Sequence[int],
    ):
        self.engine, self.sizes, self.divisor, self.n_best = engine, sizes, divisor, n_best
        (places, reads, longest), count = sizes, sizes[0] * n_best
        self.job = job = _Job(0, beam, n_best, beam == 1, STOPPINGS.index(stopping), bos, eos)
        job.threads = max(1, min(torch.get_num_threads(), places, _MOST_THREADS))
        job.rows = max(min(_ROWS[engine.dtype], rows), beam, reads)
        job.longest, job.reads, job.ends, job.places = longest + 1, reads, len(ends), places
        job.enough, job.source_span, job.target_span = enough, 2 * reads - 1, longest + 1
        kinds = {"ids": (places, reads), "forced": (places, longest + 1)}
        kinds |= {"texts": (count, longest + 1), "passed": (count, longest + 1)}
        whole = {name: np.empty(shape, np.int32) for name, shape in kinds.items()}
        whole |= {n: np.zeros(places, np.int64) for n in ("queue", "length", "limit")}
        whole |= {"forced_count": np.zeros(places, np.int64), "end": np.array([*ends, 0], np.int32)}
        whole |= {name: np.zeros(places, np.int8) for name in ("dropped", "left")}
        whole |= {"counts": np.full(count, -1), "steps": np.zeros(count, np.int64)}
        self.arrays = {
            **whole,
            "passed": whole["passed"].view(np.float32),
            "scores": np.zeros(count),
        }
        for name, array in self.arrays.items():
            setattr(job, name, array.ctypes.data)
        self.free = [*reversed(range(places))]
        self.use(engine)
        self.handle = engine.library.regard_crew_new(engine.handle, ctypes.byref(job))

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.engine.library.regard_crew_free(self.handle)

    def use(self, engine: Engine, prefixed: bool = False) -> None:
        """Go on with an engine of the same shape, whose numbers may be others."""
        _, reads, longest = self.sizes
        prefixed = prefixed or bool(self.arrays["forced_count"].any())
        self.engine, self.held = engine, engine.tables_for(reads, longest, self.divisor, prefixed)
        for name, table in self.held.items():
            setattr(self.job, name, native.address(table))

    def has_room(self, sources: Sequence[Sequence[int]], limits: Sequence[int]) -> bool:
        """True if there is room for these sources and for texts of so many tokens."""
        _, reads, longest = self.sizes
        fit = max(map(len, sources)) <= reads and max(limits) <= longest
        return fit and len(sources) <= len(self.free)

    def admit(
        self,
        sources: Sequence[Sequence[int]],
        limits: Sequence[int],
        prefixes: Sequence[Sequence[int]],
    ) -> list[int]:
        """Places of new sentences, for which there is room; they join with the next step."""
        if any(prefixes) and not self.job.open:
            self.use(self.engine, prefixed=True)
        some, job, places = self.arrays, self.job, []
        for ids, limit, prefix in zip(sources, limits, prefixes, strict=True):
            places.append(place := self.free.pop())
            some["ids"][place, : len(ids)], some["length"][place] = ids, len(ids)
            some["forced"][place, : len(prefix)], some["forced_count"][place] = prefix, len(prefix)
            some["limit"][place] = limit
            some["queue"][job.sentences % job.places] = place
            job.sentences += 1
        return places

    def drop(self, place: int) -> None:
        """Give a sentence up."""
        self.arrays["dropped"][place] = 1

    def run(self, once: bool = True) -> dict[int, list[EngineText]] | None:
        """Take a step with all sentences, or all steps; the texts of those that are done, by place.

        Returns nothing where a number is not finite: then no sentence can go on.
        """
        run, engine = self.engine.library.regard_crew_run, self.engine
        if not self.handle or not run(self.handle, engine.handle, once):
            return None
        some, texts = self.arrays, {}
        for place in np.flatnonzero(some["left"]).tolist():
            rows = range(place * self.n_best, (place + 1) * self.n_best)
            if not some["dropped"][place]:
                texts[place] = [self._text(row) for row in rows if some["counts"][row] >= 0]
            some["counts"][rows.start : rows.stop] = -1
            some["left"][place] = some["dropped"][place] = 0
            self.free.append(place)
        return texts

    def _text(self, row: int) -> EngineText:
        some = self.arrays
        ids, passed = some["texts"][row, : some["counts"][row]], some["passed"][row]
        passed = passed[: some["steps"][row]].tolist()
        return EngineText(ids.tolist(), passed, float(some["scores"][row]))


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
    during: object = None,
) -> "Engine | None":
    """The engine of a model (`before`, if it still holds), where all of it is known exactly.

    While `during` lives, its numbers are looked at once, and again after `native.doubt`.

    Args:
        model: model that is decoded
        parts: its encoder, decoder, embeddings and head
        never: tokens that are never written
        known: functions of the model's own class, as `known_functions` returned them
        before: engine of an earlier call, returned if it still holds
        during: who takes steps with it
    """
    if _off(model, known):
        return None
    active = cast(native.Scope, native.scope(model))
    key = "engine", id(during), tuple(never)
    last, checked = active.plans.get(key, (None, None))
    if last is not None and last is before and during in checked.checked and checked.unhooked():
        return before
    if before is None or not before.holds(model, never, active.dtype):
        before = None if _unknown(model, parts) else Engine(model, parts, never, active.dtype)
    if before is None or not before.handle:
        return None
    if during is not None:
        active.plans[key] = before, before.fingerprint
        before.fingerprint.checked.add(during)
    return before


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
