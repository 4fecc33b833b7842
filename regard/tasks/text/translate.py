"""Translation by an encoder-decoder: a transformer, a recurrent or a convolutional network."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.data.parallel import PairBatch
from regard.decode.writer import EncoderDecoder
from regard.layers.recurrent.attention import ReinforceTape
from regard.metrics.text import TEXT_METRICS, BleuMetric, MeanMetric
from regard.modalities.text import TEXT
from regard.tasks.frame.settings import EvalSettings, TrainSettings
from regard.tasks.parts import Task
from regard.tasks.text.sequence import (
    PAIR_SHORT_KEYS,
    PairTrainSettings,
    SequenceObjective,
    load_pair_codec,
)
from regard.tasks.text.text_judge import TextJudge
from regard.tasks.text.writer import TextWriter
from regard.training.loss import LOGIT_ROWS, head_loss, twice

GENERATION: dict[str, Any] = {"beam": 5, "length_penalty": "average", "alpha": 1.0}


def hard_attention_loss(
    model: EncoderDecoder, batch: PairBatch, smoothing: float, r_drop: float
) -> Tensor:
    """Loss of a model that may sample where it attends, and learns by REINFORCE."""
    draws = ReinforceTape()
    hidden = model.hidden(*twice(batch, r_drop), draws=draws)
    loss = head_loss(model, hidden, batch, smoothing, r_drop)
    if not draws.log_probs:
        return loss
    writes = torch.cat([batch.writes] * (len(hidden) // len(batch.writes)))
    rows = zip(
        hidden.flatten(0, 1).split(LOGIT_ROWS), writes.flatten().split(LOGIT_ROWS), strict=True
    )
    options: dict[str, Any] = {"ignore_index": -1, "reduction": "none"}
    with torch.no_grad():
        each = [
            F.cross_entropy(model.head(x), y, label_smoothing=smoothing, **options) for x, y in rows
        ]
    return loss + draws.loss(torch.cat(each).view(writes.shape), writes >= 0)


def bleu(settings: TrainSettings | EvalSettings) -> MeanMetric | BleuMetric:
    """The metric of translations, whatever the settings."""
    return TEXT_METRICS["bleu"]


TRANSLATE = Task(
    name="translate",
    holds="pairs of sentences",
    inputs=TEXT,
    target="text",
    unit="sentences",
    objective=SequenceObjective(
        PairTrainSettings,
        GENERATION,
        bleu,
        losses={"recurrent": hard_attention_loss},
        short={
            **PAIR_SHORT_KEYS,
            "cell": "model.block.cell",
            "attention": "model.block.attention",
            "normalise": "model.block.normalise",
            "readout": "model.block.readout",
            "kernel": "model.block.kernel",
            "direction": "model.direction",
        },
    ),
    predictor=TextWriter,
    judge=TextJudge(bleu),
    load_codec=load_pair_codec,
)
