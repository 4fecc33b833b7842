"""The decoder: texts of sources that join and leave at any step, each as if it were alone.

A text begins after `bos`, or after the last token of its own prompt (`begin`), and ends with `eos`;
neither is among the ids that are returned.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from regard import native
from regard.attention.watch import watcher
from regard.decode.constraints import UNCONSTRAINED, Constraints, Forbid
from regard.decode.options import DEFAULT, Decoding
from regard.decode.search import (
    BeamSearch,
    Hypothesis,
    LeftToRight,
    Search,
    enough_texts,
    hypothesis,
)
from regard.decode.trace import is_tracing
from regard.decode.writer import Writer, WriterState
from regard.errors import UsageError

# Given texts are read this many tokens at a time, to bound the memory of the logits.
_SPAN = 64
_MOST_HYPOTHESES = 64  # of a sentence, for an engine
# Sentences, tokens of a source and tokens of a text that an engine has room for, or twice as many
# as are asked for.
_ROOM = 256, 64, 128


class Decoder:
    """Decodes with a writer step by step, while rows join and leave.

    A row is the text of one source. It has its own step, limit, prefix, changes of logits, seed and
    draws, and its own length in the caches: the text is what it would be alone, whoever else joins
    or leaves. Greedy decoding, sampling and beam search are loops over `step`.

    Rows that an engine of the writer knows are stepped by that, the others by the search in Python.

    Args:
        writer: model that writes
        options: how to search
        kernels: whether an engine in C may be used
    """

    def __init__(self, writer: Writer[Any], options: Decoding = DEFAULT, *, kernels: bool = True):
        options.check()
        self.writer, self.options = writer, options
        self.search = LeftToRight if options.sampling or options.beam == 1 else BeamSearch
        self.batches: list[_Batch] = []  # rows that step together, then those admitted since
        self.make_engine = getattr(writer, "engine", None) if kernels else None
        self.engines: dict[tuple[int, ...], Any] = {}  # by the tokens that they never write
        self.crews: list[_CrewRows] = []
        self.admitted = 0

    def __len__(self) -> int:
        """Number of rows whose texts are not complete."""
        searched = sum(len(search) for batch in self.batches for search in batch.searches)
        return searched + sum(len(crew.rows) for crew in self.crews)

    @torch.inference_mode()
    def admit(
        self,
        source: Tensor,
        lengths: Tensor | None = None,
        constraints: Constraints = UNCONSTRAINED,
    ) -> range:
        """Numbers of new rows, one for each source (b, s); they join the others with a step."""
        search = self.search(source, lengths, self.options, constraints, self.admitted)
        rows = range(self.admitted, self.admitted + len(search))
        if rows:
            if not self._admit_to_crew(source, lengths, constraints, rows):
                self._begin(search, source, lengths)
            self.admitted = rows.stop
        return rows

    def _begin(self, search: Search, source: Tensor, lengths: Tensor | None) -> None:
        """Begin a search in Python."""
        if self.make_engine is not None:
            refuse_part_int8(self.writer)
        prompt, search.ids = search.ids[:, :-1], search.ids[:, -1:]
        capacity = search.longest + prompt.shape[1]
        state = self.writer.start(source, lengths, capacity=capacity)
        if prompt.shape[1]:
            _, state = self.writer.step(prompt, state)
        self.batches.append(_Batch(state, search))

    def _admit_to_crew(
        self, source: Tensor, lengths: Tensor | None, constraints: Constraints, rows: range
    ) -> bool:
        """Give rows to an engine, if the writer has one that knows all that is asked for."""
        asked = engine_search(self.options, constraints)
        if self.make_engine is None or asked is None or source.ndim != 2 or watcher() is not None:
            return False
        (never, how), _ = asked, native.doubt()  # numbers are looked at once for each text
        engine = self._engine(never)
        read = [source.shape[1]] * len(rows) if lengths is None else lengths.tolist()
        sources = [ids[:n] for ids, n in zip(source.tolist(), read, strict=True)]
        limits = constraints.limits(source, lengths, self.options.max_length)
        given = sources, limits, constraints.prefixes(len(rows))
        if engine is None or min(read) < 1 or not engine.knows(*given, **how):
            return False
        self._look_again()
        alike = (crew for crew in self.crews if (crew.never, crew.how) == asked)
        crew = next((crew for crew in alike if crew.crew.has_room(*given[:2])), None)
        if crew is None:
            made = _new_crew(engine, *given[:2], how)
            if made is None:
                return False
            self.crews.append(crew := _CrewRows(made, never, how))
        places = crew.crew.admit(*given)
        asked_for = map(_Asked, rows, [constraints] * len(rows), *given)
        crew.rows |= dict(zip(places, asked_for, strict=True))
        return True

    def _engine(self, never: list[int]) -> Any:
        """The engine of the writer as it is now, which never writes some tokens."""
        made = self.make_engine and self.make_engine(never, self.engines.get(tuple(never)), self)
        self.engines[tuple(never)] = made
        return made

    def _look_again(self) -> None:
        """Let crews go on with the model as it is now; rows that cannot begin anew in Python."""
        for crew in list(self.crews):
            engine = self._engine(crew.never)
            if engine is None or bytes(engine.shape) != bytes(crew.crew.engine.shape):
                self._start_over(crew)
            elif engine is not crew.crew.engine:
                crew.crew.use(engine)

    def _start_over(self, crew: "_CrewRows") -> None:
        """Search in Python for what an engine cannot go on with."""
        self.crews.remove(crew)
        for number, constraints, ids, limit, prefix in crew.rows.values():
            own = replace(constraints, max_length=[limit], prefix=[prefix], lines=None)
            source = torch.tensor([ids])
            self._begin(self.search(source, None, self.options, own, number), source, None)

    @torch.inference_mode()
    def step(self) -> dict[int, list[Hypothesis]]:
        """Write one token more in every row; the texts of rows that are complete, by number."""
        complete: dict[int, list[Hypothesis]] = {}
        self._look_again()
        for crew in list(self.crews):
            if (found := crew.step()) is None:
                self._start_over(crew)
            else:
                complete |= found
        self.crews = [crew for crew in self.crews if crew.rows]
        # rows take their first step by themselves: they have one hypothesis each until then
        for batch in self.batches:
            complete |= batch.step(self.writer)
        self.batches = [batch for batch in self.batches if batch.searches]
        while len(self.batches) > 1:
            self.batches[0].join(self.batches.pop(1))
        return complete

    @torch.inference_mode()
    def drop(self, rows: Collection[int]) -> None:
        """Give rows up, by number, whatever they have written."""
        for batch in self.batches:
            batch.leave([search.among(rows) for search in batch.searches])
        self.batches = [batch for batch in self.batches if batch.searches]
        for crew in self.crews:
            crew.drop(rows)
        self.crews = [crew for crew in self.crews if crew.rows]


class _Asked(NamedTuple):
    """What was asked for in a row."""

    number: int
    constraints: Constraints
    source: list[int]
    limit: int
    prefix: Sequence[int]


class _CrewRows:
    """Rows that an engine decodes: its crew, and what was asked for in each of its places."""

    def __init__(self, crew: Any, never: list[int], how: dict[str, Any]):
        self.crew, self.never, self.how = crew, never, how
        self.rows: dict[int, _Asked] = {}

    def step(self) -> dict[int, list[Hypothesis]] | None:
        """Write one token more in every row; complete texts, None where rows cannot go on."""
        if (found := self.crew.run()) is None:
            return None
        return {self.rows.pop(n).number: _hypotheses(some) for n, some in found.items()}

    def drop(self, rows: Collection[int]) -> None:
        """Give rows up, by number."""
        for place in [place for place, asked in self.rows.items() if asked.number in rows]:
            self.crew.drop(place)
            del self.rows[place]


def _hypotheses(texts: Sequence[Any]) -> list[Hypothesis]:
    return [hypothesis(*one) for one in texts]


def _new_crew(
    engine: Any, sources: Sequence[Sequence[int]], limits: Sequence[int], how: dict[str, Any]
) -> Any:
    """A crew with room for these and some more; None if the model has no such positions."""
    least = len(sources), max(map(len, sources)), max(limits)
    for sizes in (tuple(max(2 * n, room) for n, room in zip(least, _ROOM, strict=True)), least):
        try:
            return engine.crew(sizes, **how)
        except UsageError:  # more positions than there are, for all of which there was to be room
            continue
    return None


def refuse_part_int8(writer: Any) -> None:
    """Refuse to search in Python where an engine was to compute all products in int8."""
    active = native.scope(writer)
    if active is not None and active.dtype == torch.int8 and hasattr(writer, "engine"):
        raise UsageError(
            "quantise=int8 is done by the engine in C, which does not know this model, these "
            "options or this machine (see regard doctor); leave it out"
        )


def engine_search(
    options: Decoding, constraints: Constraints
) -> tuple[list[int], dict[str, Any]] | None:
    """Tokens that are never written, and how an engine searches; None if it does not know how."""
    options.check()
    forbidden = [one for one in constraints.adjust if isinstance(one, Forbid)]
    never = [x for one in forbidden for x in one.ids]
    if (
        options.sampling
        or options.beam > _MOST_HYPOTHESES
        or is_tracing()
        or constraints.renormalise
        or constraints.begin is not None
        or constraints.on_token is not None
        or (constraints.on == "logprobs" and never and options.beam > 1)
        or any(type(change) is not Forbid for change in constraints.adjust)
    ):
        return None
    how = {name: getattr(constraints, name) for name in ("bos", "eos", "ends", "stopping")}
    how |= {"beam": options.beam, "n_best": options.n_best, "divisor": options.divisor}
    named = options.beam, options.n_best, options.divisor, constraints.stopping
    return never, {**how, "enough": enough_texts(*named, constraints.patience)}


class _Batch:
    """Rows that step together: a state, and the searches whose sentences it holds, in order."""

    def __init__(self, state: WriterState, search: Search):
        self.state, self.searches = state, [search]

    def step(self, writer: Writer[Any]) -> dict[int, list[Hypothesis]]:
        """Write one token more in every row; the texts of rows that are complete, by number."""
        ids = [search.ids for search in self.searches]
        logits, self.state = writer.step(torch.cat(ids), self.state)
        parts = zip(self.searches, logits[:, -1].split([len(some) for some in ids]), strict=True)
        moves = [search.advance(part) for search, part in parts]
        parents = [some for some in moves if some is not None]
        if parents:
            self.state.select(torch.cat(parents))
        complete: dict[int, list[Hypothesis]] = {}
        if any(bool(search.done.any()) for search in self.searches):
            for search in self.searches:
                complete |= search.complete()
            self.leave([search.done for search in self.searches])
        return complete

    def leave(self, gone: Sequence[Tensor]) -> None:
        """Go on without the sentences of each search that are gone."""
        places: list[Tensor] = []
        start = 0
        for search, some in zip(self.searches, gone, strict=True):
            stay = _others(some)
            places.append(start + stay)
            start += len(search)
            search.keep(stay)
        self.searches = [search for search in self.searches if len(search)]
        if self.searches:
            self.state.keep(torch.cat(places))

    def join(self, other: "_Batch") -> None:
        """Take in the rows of another batch, which have as many hypotheses each."""
        self.state.join(other.state)
        self.searches += other.searches


def _others(gone: Tensor) -> Tensor:
    """Places that are not gone; the last ones take those of the gone, so that few move."""
    count = len(gone) - int(gone.sum())
    order = torch.arange(count, device=gone.device)
    order[gone[:count]] = count + (~gone[count:]).nonzero().squeeze(1)
    return order


def decode(
    writer: Writer[Any],
    source: Tensor,
    lengths: Tensor | None = None,
    options: Decoding = DEFAULT,
    constraints: Constraints = UNCONSTRAINED,
) -> list[list[Hypothesis]]:
    """Hypotheses of each source (b, s), by beam search, greedily or by sampling.

    Args:
        writer: model that writes
        source: ids (b, s) that it reads
        lengths: number of real tokens in each source; all unless given
        options: how to search
        constraints: what may be written
    """
    found = _in_one_call(writer, source, lengths, options, constraints)
    if found is not None:
        return found
    decoder = Decoder(writer, options, kernels=False)
    rows = decoder.admit(source, lengths, constraints)
    texts: dict[int, list[Hypothesis]] = {}
    while len(decoder):
        texts |= decoder.step()
    return [texts[row] for row in rows]


@torch.inference_mode()
def _in_one_call(
    writer: Any,
    source: Tensor,
    lengths: Tensor | None,
    options: Decoding,
    constraints: Constraints,
) -> list[list[Hypothesis]] | None:
    """Greedy texts by a kernel that makes all steps, if the writer has one that knows all this."""
    options.check()
    drawn = options.sampling and options.temperature != 0
    if (
        not hasattr(writer, "continue_texts")
        or drawn
        or max(options.beam, options.n_best) > 1
        or constraints.prefix is not None
        or constraints.on_token is not None
        or source.ndim != 2
        or not source.numel()
        or not all(type(change) is Forbid for change in constraints.adjust)
    ):
        return None
    begin = constraints.first_tokens(source).tolist()
    limits = constraints.limits(source, lengths, options.max_length)
    read = [source.shape[1]] * len(source) if lengths is None else lengths.tolist()
    if min(read) < 1:
        return None
    rows = zip(source.tolist(), read, begin, strict=True)
    never = [x for change in constraints.adjust for x in cast(Forbid, change).ids]
    eos, ends = constraints.eos, [constraints.eos, *constraints.ends]
    found = writer.continue_texts(
        [[*ids[: n - 1], *first] for ids, n, first in rows], limits, ends=ends, never=never
    )
    if found is None:
        return None
    texts = []
    for ids, likely in found:
        passed = list(accumulate(likely))
        kept = ids[:-1] if ids[-1] == eos else ids
        texts.append([hypothesis(kept, passed, passed[-1] / options.divisor(len(passed)))])
    return texts


@torch.inference_mode()
def score(
    writer: Writer[Any],
    source: Tensor,
    lengths: Tensor | None,
    texts: Sequence[Sequence[int]],
    options: Decoding = DEFAULT,
    constraints: Constraints = UNCONSTRAINED,
) -> list[Hypothesis]:
    """Given texts, one for each source, with the log-probability of each token and of the end.

    Args:
        writer: model that writes
        source: ids (b, s) that it reads
        lengths: number of real tokens in each source; all if None
        texts: ids of a given text for each source
        options: how to search
        constraints: what may be written
    """
    count, eos = source.shape[0], constraints.eos
    if len(texts) != count:
        raise UsageError(f"{len(texts)} texts for {count} sentences; give one for each")
    if count == 0:
        return []
    longest = max(map(len, texts)) + 1
    ids = torch.full((count, longest + 1), eos, device=source.device)
    ids[:, 0] = constraints.bos
    for row, text in zip(ids, texts, strict=True):
        row[1 : len(text) + 1] = ids.new_tensor(text)
    state = writer.start(source, lengths, capacity=longest)
    parts: list[Tensor] = []
    for start in range(0, longest, _SPAN):
        end = min(longest, start + _SPAN)
        logits, state = writer.step(ids[:, start:end], state)
        chosen = logits.gather(2, ids[:, start + 1 : end + 1].unsqueeze(-1)).squeeze(-1)
        parts.append(chosen - logits.logsumexp(-1))
    passed = torch.cat(parts, dim=1).double().cumsum(1).tolist()
    return [
        hypothesis(
            list(text), some[: len(text) + 1], some[len(text)] / options.divisor(len(text) + 1)
        )
        for text, some in zip(texts, passed, strict=True)
    ]
