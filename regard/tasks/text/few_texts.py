"""Classifying with few texts: settings that suit it, and weights that begin as naive Bayes."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from regard.data.seeds import mix
from regard.models.ensemble import members_of

_NOISE, HEAD_SCALE = 0.3, 3.0  # of embeddings that begin as naive Bayes, and of the head above them

FEW = 10_000  # texts, for which other settings are better; chosen on parts of SST-2 and TREC
_ORDER_MATTERS = 1.0  # percent that naive Bayes gains by pairs of words where order tells something
# where the order of words tells little, a small model that begins as naive Bayes
BAG_OF_WORDS: dict[str, Any] = {
    "tokenizer": "unigram",
    "pieces": 4000,
    "embeddings": "naive_bayes",
    "depth": 1,
    "width": 64,
    "heads": 2,
    "ffn_width": 128,
    "lr": 0.001,
    "dropout": 0.3,
    "head_dropout": 0.3,
    "word_dropout": 0.2,
    "ema": 0.99,
    "epochs": 3,
}
# where it tells more, one that learns it
WORD_ORDER: dict[str, Any] = {"tokenizer": "unigram", "pieces": 2000, "ema": 0.99, "epochs": 10}
# who sets one of these has an opinion on all of them
_TOGETHER = (
    ("tokenizer", "pieces", "features", "embeddings", "bpe_dropout"),
    ("size", "depth", "width", "heads", "ffn_width", "lr"),
    ("steps", "epochs"),
)


def few_text_settings(
    values: Mapping[str, Any],
    short: Mapping[str, Any],
    texts: int,
    bigram_gain: Callable[[], float],
) -> tuple[str, dict[str, Any]]:
    """Settings for so few texts where a user gave none, by their short keys, and why these.

    `bigram_gain` is by how many percent naive Bayes is better for knowing pairs of words, too.
    """
    given = {key for key, value in values.items() if value is not None}
    given |= {key for key, long in short.items() if long in given}
    if texts > FEW or given & {"init", "like", "family"}:
        return "", {}
    for some in _TOGETHER:
        if given & set(some):
            given |= set(some)
    if not set(BAG_OF_WORDS) - given:
        return "", {}
    few, why = WORD_ORDER, f"few texts ({texts:,}, at most {FEW:,})"
    if not {"embeddings", "width"} & given:
        gain = bigram_gain()
        few, tells = (WORD_ORDER, "much") if gain > _ORDER_MATTERS else (BAG_OF_WORDS, "little")
        why += f" whose word order tells {tells} (pairs of words: naive Bayes {gain:+.1f} points)"
    return why, {key: value for key, value in few.items() if key not in given}


def begin_as_naive_bayes(
    model: Any, rows: Iterable[np.ndarray], targets: np.ndarray, seed: int
) -> None:
    """Initialise a new model as naive Bayes over tokens, as far as its parts allow.

    The embedding of a token has in one direction per label its log-likelihood ratio there, and
    noise in all others; the head reads these directions of the mean.
    """
    labels = targets.shape[1]
    generator = torch.Generator().manual_seed(mix(seed, "embeddings"))
    counts = np.ones((model.config.vocab, labels))  # Laplace's rule
    for ids, right in zip(rows, targets, strict=True):
        counts[np.unique(ids)] += right
    logs = np.log(counts / counts.sum(0))
    logs = np.clip(logs - logs.mean(1, keepdims=True), -3, 3)
    with torch.no_grad():
        for one in members_of(model):
            table, head = one.embed.tokens.weight, one.head.out.weight
            width = table.shape[1]
            if labels > width // 2 or head.shape[1] != width:
                return
            directions = torch.randn(width, labels, generator=generator)
            directions -= directions.mean(0)  # a norm takes the mean away
            directions = torch.linalg.qr(directions).Q.T
            noise = _NOISE * torch.randn(table.shape, generator=generator)
            noise -= noise @ directions.T @ directions
            table.copy_(noise + torch.from_numpy(logs).float() @ directions)
            head.copy_(HEAD_SCALE * directions)


# name -> what becomes of the weights of a new model, given token ids of texts, their
# targets, and the seed
EMBEDDINGS: dict[str, Callable[[Any, Iterable[np.ndarray], np.ndarray, int], None]] = {
    "random": lambda model, rows, targets, seed: None,
    "naive_bayes": begin_as_naive_bayes,
}
