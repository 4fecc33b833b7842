"""Two beliefs about attention, measured on a model and one's own data.

One is that a head looks up the nearest key: it does so only if all keys are equally long, since
q.k = (|q|^2 + |k|^2 - |q - k|^2) / 2. The other is that layer i of a decoder reads layer i of the
encoder, as pictures of both side by side suggest: it reads what the last layer has made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard import UsageError, change, record, watch
from regard.api import load_with_data
from regard.insight import (
    Attending,
    Cuts,
    HeadsSettings,
    MeasuredData,
    attending,
    inputs_of,
    measure,
    per_copy,
    residual_stream,
)
from regard.metrics import Named, markdown
from regard.settings import setting
from regard.training import Progress
from regard.viewer import Picture, ValueTable, save


@dataclass(frozen=True)
class MisconceptionSettings(MeasuredData):
    """Over what two misconceptions are measured."""

    examples: int = setting(50, "examples to measure on", min=1, max=10_000)
    length: int = setting(64, "tokens of a text, at most", min=2, max=512)
    out: str | None = setting(None, "file to write: .png")


@dataclass(frozen=True, eq=False)
class Misconceptions(Named):
    """How far two beliefs hold: of heads as nearest-neighbour search, and of layer i to layer i.

    By layer and head, `agreement` is the share of queries whose strongest key is the nearest one,
    `chance` that of a key drawn from those a query may look at. `nearest` and `strongest` are by
    how many nats a token of the answer the loss rises if the head looks at that key alone. `memory`
    (decoder layers and all of them, encoder layers) is the same where a decoder layer reads the
    output of an encoder layer in place of the last; `same_layer` where each reads its own number.
    """

    model: str
    examples: int
    tokens: int
    loss: float  # nats a token of the answer
    agreement: Mapping[str, np.ndarray]
    chance: float
    nearest: Mapping[str, np.ndarray]
    strongest: Mapping[str, np.ndarray]
    memory: np.ndarray | None = None
    decoder: Sequence[str] = ()
    encoder: Sequence[str] = ()
    same_layer: float | None = None
    unit: str = "loss"  # or the cosine distance of a text's vector from what it was
    out: str | None = None

    @property
    def share(self) -> float:
        """Return the share of heads whose strongest key is the nearest one for most queries."""
        each = np.concatenate(list(self.agreement.values()))
        return float((each > 0.5).mean())

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""

        def plain(values: Any) -> Any:
            return np.round(np.asarray(values, dtype=float), 6).tolist()

        tables = {"agreement": self.agreement, "nearest": self.nearest, "strongest": self.strongest}
        found: dict[str, Any] = {
            "model": self.model,
            "examples": self.examples,
            "tokens": self.tokens,
            "unit": self.unit,
            "loss": round(self.loss, 6),
            "share": round(self.share, 6),
            "chance": round(self.chance, 6),
        }
        for name, table in tables.items():
            found[name] = {layer: plain(row) for layer, row in table.items()}
        if self.memory is not None:
            found |= {"memory": plain(self.memory), "decoder": list(self.decoder)}
            found |= {"encoder": list(self.encoder), "same_layer": self.same_layer}
        return {**found, **({} if self.out is None else {"path": self.out})}

    @property
    def notes(self) -> list[str]:
        """Return what was found as lines."""
        agreed = np.concatenate(list(self.agreement.values()))
        near, strong = (np.concatenate(list(t.values())) for t in (self.nearest, self.strongest))
        lines = [
            f"{self.examples} examples, {self.tokens:,} tokens of answers, loss {self.loss:.3f}"
            if self.unit == "loss"
            else f"{self.examples} texts; what a change does is the {self.unit} by which their "
            "vectors move",
            f"strongest key is the nearest: {100 * agreed.mean():.0f}% of queries "
            f"({100 * self.chance:.0f}% by chance); so for most queries in {100 * self.share:.0f}% "
            "of heads",
            f"a head that looks at its nearest key alone: {self.unit} {near.mean():+.3f} on "
            f"average, "
            f"{near.max():+.3f} at worst; at its strongest key alone: {strong.mean():+.3f}, "
            f"{strong.max():+.3f}",
        ]
        if self.memory is not None:
            told = ", ".join(
                f"{name} {value:+.2f}"
                for name, value in zip(self.encoder, self.memory[-1], strict=True)
            )
            lines.append(f"all decoder layers read one encoder layer: loss {told}")
        if self.same_layer is not None:
            lines.append(f"decoder layer i reads encoder layer i: loss {self.same_layer:+.2f}")
        return lines

    def tables(self) -> list[ValueTable]:
        """Return what is drawn."""
        names = {
            "strongest key is the nearest one: share of queries": self.agreement,
            f"{self.unit} added if the head looks at its nearest key alone": self.nearest,
            f"{self.unit} added if the head looks at its strongest key alone": self.strongest,
        }
        found = []
        for name, rows in names.items():
            values = np.full((len(rows), max(map(len, rows.values()))), np.nan)
            for n, row in enumerate(rows.values()):
                values[n, : len(row)] = row
            columns = [str(n) for n in range(values.shape[1])]
            signed = rows is not self.agreement
            found.append(ValueTable(name, values, list(rows), columns, None, signed))
        if self.memory is not None:
            name = "loss added if a decoder layer reads the output of an encoder layer"
            found.append(ValueTable(name, self.memory, list(self.decoder), list(self.encoder)))
        return found

    def __str__(self) -> str:
        head = ["layer", "head", "nearest is strongest"]
        rows = [[*head, f"{self.unit}: nearest", f"{self.unit}: strongest"]]
        for layer, each in self.agreement.items():
            for head, value in enumerate(each):
                near, strong = self.nearest[layer][head], self.strongest[layer][head]
                rows.append(
                    [layer, str(head), f"{100 * value:.0f}%", f"{near:+.3f}", f"{strong:+.3f}"]
                )
        parts = [markdown(rows), "", *self.notes]
        return "\n".join([*parts, *([f"wrote {self.out}"] if self.out else [])])


def question_for(task: Any, given: Any) -> Any:
    """Return an input with the answer that the data give: a target, or the text itself.

    Of other tasks it is the model's own answer.
    """
    if hasattr(given, "target"):  # a pair
        writer = task.predictor if hasattr(task, "predictor") else task
        if not hasattr(writer, "encode_pairs"):
            raise UsageError(f"{task.name} reads no pairs")
        pairs = writer.encode_pairs([(given.source, given.target)], task.check({}))
        asked = task.look_settings({"beam": 1})
        return task.question(given.source, asked, pairs[0][1])
    if task.name == "language":
        return replace(task.question(given, task.look_settings({"forced": True})), first=0)
    return task.probe(given)


def nearest_keys(
    model: nn.Module, question: Any, layers: Sequence[Attending]
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return for each query of each layer its nearest key, its strongest, and how many it may see.

    All are (tiles, heads, queries); nearest by Euclidean distance in the head's space, among keys
    that the query may look at.
    """
    layers = [one for one in layers if one.keys > 1]
    names = [one.name for one in layers]
    places = [f"{name}.{kind}" for name in names for kind in ("queries", "keys")]
    with watch(model) as maps, record(model, *places) as acts:
        question.logprobs(1)
    found = {}
    for one in layers:
        if maps[one.name].shape[2] != one.queries:
            continue  # a recurrent decoder, which asks step by step
        weights = maps[one.name].weights()
        q, k = acts[f"{one.name}.queries"].float(), acts[f"{one.name}.keys"].float()
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        if q.shape[:3] != weights.shape[:3]:
            continue
        seen = weights > 0
        far = torch.cdist(q, k).masked_fill(~seen, torch.inf)
        found[one.name] = far.argmin(-1), weights.argmax(-1), seen.sum(-1)
    return found


def look_at_one(
    layers: Sequence[Attending], keys: Mapping[str, Tensor]
) -> tuple[Cuts, list[tuple[str, int]]]:
    """Return the changes by which head items[n] of copy n looks at one key alone, and the heads."""
    heads = [(one.name, head) for one in layers for head in range(one.heads)]

    def changes(items: Sequence[int]) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        for one in layers:
            mine = {
                row: heads[item][1]
                for row, item in enumerate(items)
                if item >= 0 and heads[item][0] == one.name
            }
            chosen = keys[one.name]

            def only(x: Tensor, rows: Tensor, mine: Any = mine, chosen: Tensor = chosen) -> Tensor:
                x = x.clone()
                for at, row in enumerate(rows.tolist()):
                    if row in mine:
                        alone = torch.zeros_like(x[at, :, mine[row]])
                        x[at, :, mine[row]] = alone.scatter(-1, chosen[:, mine[row], :, None], 1.0)
                return x

            found[f"{one.name}.weights"] = per_copy(len(items), one.tiles, only)
        return found

    return changes, heads


def memories(
    model: nn.Module, question: Any, layers: Sequence[Attending]
) -> tuple[list[str], list[str], Tensor]:
    """Return encoder layers, cross-attentions, and the memory that each layer would be.

    That is (layers, k, w): what the last norm makes of the layer's output.
    """
    crosses = [one.name for one in layers if one.name.rpartition(".")[2] == "cross"]
    names, vectors = residual_stream(model, question, "encoder", layers)
    stacked = torch.cat(vectors)

    def swap(x: Tensor, rows: Tensor) -> Tensor:
        return stacked.to(x)[rows].unsqueeze(1)

    with (
        change(model, {f"{names[-1]}.out": per_copy(len(names), 1, swap)}),
        record(model, f"{crosses[0]}.memory") as acts,
    ):
        question.logprobs(len(names))
    return names, crosses, acts[f"{crosses[0]}.memory"]


def memory_losses(
    model: nn.Module, question: Any, layers: Sequence[Attending]
) -> tuple[list[str], list[str], np.ndarray]:
    """Return encoder layers, decoder layers, and log p by which layer reads which, (copies,).

    First as it is, then each decoder layer with each encoder layer, then all with each, and last
    each with that of its own number if there are as many.
    """
    names, crosses, memory = memories(model, question, layers)
    reads = [{cross: j} for cross in crosses for j in range(len(names))]
    reads += [dict.fromkeys(crosses, j) for j in range(len(names))]
    if len(names) == len(crosses):
        reads.append({cross: n for n, cross in enumerate(crosses)})

    def changes(items: Sequence[int]) -> Mapping[str, Any]:
        def of(cross: str) -> Any:
            def put(x: Tensor, rows: Tensor) -> Tensor:
                x = x.clone()
                for at, row in enumerate(rows.tolist()):
                    item = items[row]
                    if item >= 0 and cross in reads[item]:
                        x[at, 0] = memory[reads[item][cross]]
                return x

            return per_copy(len(items), 1, put)

        return {f"{cross}.memory": of(cross) for cross in crosses}

    values = measure(model, question, changes, len(reads), quiet=True)
    return names, crosses, values


def misconceptions(
    settings: MisconceptionSettings, model: Any, *, quiet: bool = True
) -> Misconceptions:
    """Measure both beliefs on a model, loaded or by name, and draw them if asked."""
    if settings.out and Path(settings.out).suffix.lower() != ".png":
        raise UsageError(f"out={settings.out}: unknown kind of picture; end it in .png")
    task, data = load_with_data(model, settings.data)
    read = HeadsSettings(data, settings.part, settings.examples, settings.length)
    inputs = inputs_of(task, read)
    sums: dict[str, dict[str, np.ndarray]] = {"agreed": {}, "near": {}, "strong": {}}
    queries: dict[str, int] = {}
    tokens, total, chances, swapped = 0, 0.0, [], []
    encoder: list[str] = []
    decoder: list[str] = []
    more: dict[str, Any] = {}
    with Progress("examples", len(inputs), quiet=quiet) as progress, task.using(None):
        for given in inputs:
            question = question_for(task, given)
            model = task.model
            everything = attending(model, question)
            keys = nearest_keys(model, question, everything)
            layers = [one for one in everything if one.name in keys]
            if not layers:
                raise UsageError("this model has no attention whose queries and keys are compared")
            for name, (near, strong, seen) in keys.items():
                choice = seen > 1
                agreed = ((near == strong) & choice).sum((0, 2)).numpy()
                _add(sums["agreed"], name, agreed)
                queries[name] = queries.get(name, 0) + int(choice[:, 0].sum())
                chances.append((1 / seen[choice].double()).mean())
            for kind, which in (("near", 0), ("strong", 1)):
                chosen = {name: found[which] for name, found in keys.items()}
                changes, heads = look_at_one(layers, chosen)
                values = measure(model, question, changes, len(heads), quiet=True)
                rows: dict[str, list[float]] = {}
                for (name, _), value in zip(heads, values[0] - values[1:], strict=True):
                    rows.setdefault(name, []).append(float(value))
                for name, row in rows.items():
                    _add(sums[kind], name, np.array(row))
            tokens += len(question.chosen) - question.first
            more["unit"] = question.unit
            total -= float(values[0])
            if reads_encoder(everything):
                encoder, decoder, values = memory_losses(model, question, everything)
                swapped.append(values[0] - values[1:])
            progress.update(1)
    agreement = {name: row / max(1, queries[name]) for name, row in sums["agreed"].items()}
    near, strong = ({n: row / tokens for n, row in sums[k].items()} for k in ("near", "strong"))
    if swapped:
        added = np.sum(swapped, axis=0) / tokens
        count = (len(decoder) + 1) * len(encoder)
        more["memory"] = added[:count].reshape(len(decoder) + 1, len(encoder))
        more["decoder"], more["encoder"] = [*decoder, "all of them"], encoder
        more["same_layer"] = float(added[count]) if len(added) > count else None
    chance = float(np.mean(chances))
    told = {"examples": len(inputs), "tokens": tokens, "loss": total / tokens}
    found = Misconceptions(
        task.path,
        **told,
        agreement=agreement,
        chance=chance,
        nearest=near,
        strongest=strong,
        **more,
    )
    if settings.out is None:
        return found
    title = f"Two beliefs about attention: {task.path or task.name}"
    picture = Picture(title, tables=found.tables(), note="; ".join(found.notes[:2]))
    return replace(found, out=str(save(picture, settings.out)))


def reads_encoder(layers: Sequence[Attending]) -> bool:
    """Tell whether a model has an encoder of several layers that a decoder reads."""
    names = [one.name for one in layers]
    deep = sum(name.startswith("encoder.") for name in names) > 1
    return deep and any(name.rpartition(".")[2] == "cross" for name in names)


def _add(sums: dict[str, np.ndarray], name: str, values: np.ndarray) -> None:
    sums[name] = sums[name] + values if name in sums else values
