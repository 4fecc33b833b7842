"""A page with the top examples of the features of a dictionary, and the model steered by them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from regard.errors import UsageError
from regard.files import write_atomically
from regard.insight.autoencoder import SparseAutoencoder
from regard.tasks.text.fill import Filler
from regard.training.progress import Progress
from regard.viewer.html import image_data, text
from regard.viewer.html import write_page as page_of

if TYPE_CHECKING:
    from regard.insight.dictionary import Dictionary, DictionarySettings, Stream

EXAMPLE_BATCHES = 24  # that examples are looked for in
_AROUND = 24  # tokens shown before and after the strongest
_STRENGTHS = (-2.0, -1.0, 0.0, 1.0, 2.0)  # of the strongest activation
_STEERED = 6  # features, since each is as many answers as there are strengths
_LETTERS = 80  # tokens of an answer that is written
_MOST_SIDE = 96  # pixels that a small image is enlarged to


@dataclass(frozen=True, eq=False)
class Tops:
    """The strongest activations of each feature (features, examples), and where they were."""

    values: Tensor
    shares: Tensor  # of the vector there (its square, about the mean) that is the feature's
    batches: Tensor
    places: Tensor  # in the flat places of a batch
    often: Tensor  # share of vectors at which each feature fires


@torch.no_grad()
def find_tops(stream: "Stream", model: SparseAutoencoder, examples: int, quiet: bool) -> Tops:
    """Look for the strongest activations of every feature; an example is named once a feature."""
    shape = (model.config.features, examples)
    values, shares = torch.zeros(shape), torch.zeros(shape)
    where = torch.zeros((2, *shape), dtype=torch.int64)
    fired, count = torch.zeros(shape[0]), 0
    numbers = sorted({round(n) for n in np.linspace(0, stream.trained - 1, EXAMPLE_BATCHES)})
    with Progress("examples", len(numbers), quiet=quiet) as progress:
        for n in numbers:
            _, x, real = stream.read(n)
            z = model.encode(x).masked_fill(~real.unsqueeze(-1), 0.0)
            fired += (z > 0).flatten(0, -2).float().sum(0)
            count += int(real.sum())
            rows = z.reshape(len(z), -1, shape[0])
            best, inside = rows.max(1)  # of each example, its strongest place
            place = inside + rows.shape[1] * torch.arange(len(rows)).unsqueeze(1)
            both = torch.cat([values, best.T], 1)
            values, order = both.topk(examples, dim=1)
            size = ((x - model.mean) / model.scale).pow(2).sum(-1).reshape(len(z), -1)
            share = (best.pow(2) / size.gather(1, inside).clamp(min=1e-8)).clamp(max=1)
            shares = torch.cat([shares, share.T], 1).gather(1, order)
            batch = torch.full_like(best.T, n, dtype=torch.int64)
            now = torch.stack([batch, place.T])
            where = torch.cat([where, now], 2).gather(2, order.expand(2, -1, -1))
            progress.update(1)
    return Tops(values, shares, where[0], where[1], fired / max(1, count))


def choose(tops: Tops, shown: int) -> list[int]:
    """Return the features that make up most of the vectors where they are strongest.

    What fires nearly everywhere is a small part of each vector, and says little of any; what fires
    for fewer examples than are shown counts by those that there are.
    """
    order = tops.shares.mean(1).argsort(descending=True, stable=True)
    return order[tops.values[order, 0] > 0][:shown].tolist()


def tokens_of(task: Any, batch: Any, x: Tensor, row: int) -> list[str] | None:
    """Return the text of each place of a row of what flows, if places are tokens."""
    inner = [batch, *(getattr(batch, name, None) for name in ("texts", "source"))]
    for part in inner:
        for name in ("reads", "ids", "source", "target"):
            ids = getattr(part, name, None)
            if isinstance(ids, Tensor) and ids.shape == x.shape[:2] and not ids.is_floating_point():
                rows = getattr(part, "rows", ())
                if rows and rows[row].words:
                    return [f"{token} " for token in task.codec.encoder.spelled(rows[row])]
                predictor = task.predictor
                tokenizer = getattr(predictor, "tokenizer", None)
                if name == "source" or part is not batch:
                    tokenizer = getattr(task.codec, "source", tokenizer)
                if tokenizer is None:
                    return None
                # a mask may be no token of it
                shown = predictor if isinstance(predictor, Filler) else tokenizer
                pieces = shown.pieces(ids[row].tolist())
                return [piece.replace("▁", " ").replace("\\n", "⏎") for piece in pieces]
    return None


def text_example(tokens: list[str], strength: Tensor, peak: int) -> dict[str, Any]:
    """Return tokens around the strongest, with their strengths as shares of it."""
    first, last = max(0, peak - _AROUND), min(len(tokens), peak + _AROUND + 1)
    shares = strength[first:last] / strength[peak].clamp(min=1e-8)
    words = [text(token)["text"] for token in tokens[first:last]]
    values = [round(float(share), 3) for share in shares.clamp(0, 1)]
    return {"tokens": words, "values": values, "peak": peak - first}


def image_example(image: np.ndarray, strength: np.ndarray) -> np.ndarray:
    """Return an image (h, w, 3), enlarged, with a red veil where a feature (gh, gw) is strong."""
    times = max(1, _MOST_SIDE // max(image.shape[:2]))
    large = image.repeat(times, 0).repeat(times, 1).astype(np.float64)
    share = strength / max(float(strength.max()), 1e-8)
    rows = (np.arange(large.shape[0]) * share.shape[0] // large.shape[0])[:, None]
    columns = np.arange(large.shape[1]) * share.shape[1] // large.shape[1]
    veil = 0.6 * share[rows, columns][..., None]
    return np.rint(large * (1 - veil) + veil * np.array([228, 40, 90])).astype(np.uint8)


def show(task: Any, batch: Any, x: Tensor, strength: Tensor, place: int) -> dict[str, Any] | None:
    """Return an example as the page's script draws it; None if the input cannot be shown."""
    each = strength[0].numel()
    row, inside = place // each, place % each
    tokens = tokens_of(task, batch, x, row) if x.dim() == 3 else None
    if tokens is not None:
        return text_example(tokens, strength[row][: len(tokens)], inside)
    drawn = task.inputs.drawn(task.model, task.format, batch, row, strength[row], inside)
    if drawn is None:
        return None
    veiled = image_example(drawn.pixels, drawn.strength)
    label = ", ".join([f"{float(strength[row].max()):.2f}", *drawn.notes])
    return {"picture": image_data(veiled), "label": label}


def answers_of(
    stream: "Stream", model: SparseAutoencoder, feature: int, top: float, given: str
) -> dict[str, Any]:
    """Return what the model answers to an input while a feature is turned down and up."""
    from regard.insight.dictionary import steer

    told: list[str] = []
    short = {"max_length": _LETTERS} if stream.task.streams else {}
    for strength in _STRENGTHS:
        torch.manual_seed(0)
        with steer(stream.task, model, stream.at, feature, strength * top):
            told.append(str(stream.task.run(given, **short)))
    return {"input": given[:200], "strengths": list(_STRENGTHS), "answers": told}


def write_page(
    path: Path,
    stream: "Stream",
    model: SparseAutoencoder,
    found: "Dictionary",
    asked: "DictionarySettings",
    *,
    quiet: bool = True,
) -> Path:
    """Write the page of the features that say most, with their strongest examples."""
    tops = find_tops(stream, model, asked.examples, quiet)
    chosen = choose(tops, asked.shown)
    if not chosen:
        raise UsageError(f"{path}: no feature fires, so there is nothing to show; train for longer")
    examples: dict[int, list[Any]] = {feature: [] for feature in chosen}
    wanted: dict[int, list[tuple[int, int]]] = {}
    for feature in chosen:
        for rank in range(asked.examples):
            if tops.values[feature, rank] > 0:
                wanted.setdefault(int(tops.batches[feature, rank]), []).append((feature, rank))
    for n, places in sorted(wanted.items()):
        batch, x, real = stream.read(n)
        z = model.encode(x).masked_fill(~real.unsqueeze(-1), 0.0)
        for feature, rank in places:
            place = int(tops.places[feature, rank])
            shown = show(stream.task, batch, x, z[..., feature], place)
            if shown is not None:
                examples[feature].append((rank, shown))
    steered = set(chosen[:_STEERED]) if asked.steer else set()
    features = []
    for feature in chosen:
        top, often = float(tops.values[feature, 0]), float(tops.often[feature])
        share = float(tops.shares[feature].mean())
        features.append(
            {
                "number": feature,
                "about": f"fires at {often:.2%} of all places, at most {top:.2f}; where it is "
                f"strongest it makes up {share:.0%} of the vector",
                "examples": [one for _, one in sorted(examples[feature], key=lambda row: row[0])],
                "steering": answers_of(stream, model, feature, top, asked.steer or "")
                if feature in steered
                else None,
            }
        )
    about = [
        f"{found.features:,} features ({found.sparsity}), of which these {len(chosen)} make up "
        f"most of a vector; explained variance {found.explained_variance:.3f}, L0 {found.l0:.1f}, "
        f"dead {found.dead:.1%}, loss recovered {found.loss_recovered:.1%}.",
        *found.warnings,
    ]
    values = {"title": f"Features at {stream.at}", "about": about, "features": features}
    write_atomically(path, page_of(str(values["title"]), values, "features.js"))
    return path
