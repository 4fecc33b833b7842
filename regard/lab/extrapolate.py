"""Length extrapolation: the loss of a language model beyond its training length."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.attention.positions import POSITION_ALIASES, RotaryScaling
from regard.data.documents import tokenise_texts
from regard.data.store import Column
from regard.errors import UsageError
from regard.models.folder import load_folder
from regard.models.protocols import TextModel
from regard.pretrained.tokenizer_folder import load_tokenizer
from regard.tasks.text.language_modelling import next_token_loss, read_training_texts

_BATCH_TOKENS = 4096  # a bias for each pair of tokens takes memory


def loss_by_length(folder: Path, settings: Any, times: Sequence[int]) -> list[dict[str, Any]]:
    """Return the loss of a trained model at multiples of its training length.

    The same tokens of the validation part are predicted at every length: a long window is cut into
    shorter ones. `last` is the loss in the last quarter of a window. Both are None beyond the last
    position of the model; lengths that the text does not reach are left out. A model with rotary
    positions is evaluated as it is, and (way "yarn") with its positions scaled by YaRN.
    """
    texts = read_training_texts(settings)
    loaded: Any = load_folder(folder, settings.device)[0]
    model: TextModel = loaded
    tokens = tokenise_texts(texts, load_tokenizer(folder), ("valid",))
    column, context = tokens.columns["valid"], settings.context
    most = max(np.diff(column.offsets), default=0) - 1
    times = [n for n in sorted(set(times)) if n * context <= most]
    if not times:
        return []
    starts = windows(column, times[-1] * context, settings.valid_tokens)
    models: dict[str, Callable[[int], TextModel]] = {"": lambda n: model}
    if POSITION_ALIASES.get(model.config.position, model.config.position) == "rotary":
        models["yarn"] = lambda n: with_yarn(model, n, context)
    rows = []
    for way, n in itertools.product(models, times):
        length = n * context
        within = np.arange(0, times[-1] * context - length + 1, length)
        places = (starts[:, None] + within).ravel()
        loss, last = window_loss(models[way](n), column.ids, places, length)
        row = {"way": way, "times": n, "length": length, "tokens": len(places) * length}
        rows.append({**row, "loss": loss, "last": last})
    return rows


def with_yarn(model: TextModel, times: int, length: int) -> TextModel:
    """Return the model with its rotary positions, trained at a length, scaled by YaRN."""
    scaling = RotaryScaling("yarn", factor=times, original_length=length)
    kind: Any = type(model)
    scaled = kind(replace(model.config, scaling=scaling)).eval()
    scaled.load_state_dict(model.state_dict())
    return scaled.to(next(model.parameters()).device)


def windows(column: Column, length: int, most: int) -> np.ndarray:
    """Return the starts of adjacent windows of a length in each text, of so many tokens in all."""
    starts = [
        np.arange(begin, end - length, length)
        for begin, end in zip(column.offsets[:-1], column.offsets[1:], strict=True)
    ]
    every = np.concatenate(starts)
    some = min(len(every), max(1, most // length)) if most else len(every)
    return every[np.linspace(0, len(every) - 1, some).astype(np.int64)]


@torch.inference_mode()
def window_loss(
    model: TextModel, ids: np.ndarray, starts: np.ndarray, length: int
) -> tuple[float | None, float | None]:
    """Return the loss per token over independent windows of ids, and in their last quarters."""
    device = next(model.parameters()).device
    quarter = max(1, length // 4)
    total = last = 0.0
    rows = max(1, _BATCH_TOKENS // length)
    for at in range(0, len(starts), rows):
        taken = ids[starts[at : at + rows, None] + np.arange(length + 1)].astype(np.int64)
        tokens = torch.from_numpy(taken).to(device)
        try:
            hidden, writes = model.hidden(tokens[:, :-1]), tokens[:, 1:]
        except UsageError:  # beyond the last learned position
            return None, None
        total += float(next_token_loss(model, hidden, writes, 0.0))
        last += float(next_token_loss(model, hidden[:, -quarter:], writes[:, -quarter:], 0.0))
    return total / (len(starts) * length), last / (len(starts) * quarter)
