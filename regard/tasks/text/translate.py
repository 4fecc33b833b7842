"""Translation by an encoder-decoder: a transformer, a recurrent or a convolutional network."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.positions import has_table
from regard.data.pairs import Corpus
from regard.data.parallel import PairBatch
from regard.decode.writer import EncoderDecoder
from regard.layers.recurrent.attention import ReinforceTape
from regard.models import family
from regard.tasks.frame.origin import Origin
from regard.tasks.text.pair_settings import PairEvalSettings, PairRunSettings, PairTrainSettings
from regard.tasks.text.pairs import PairCodec
from regard.tasks.text.seq2seq import Seq2Seq
from regard.training.loss import CHUNK, head_loss, sequence_loss, twice

TransformerConfig, _ = family("transformer")


@dataclass(frozen=True)
class TranslateSettings(PairTrainSettings):
    """What a training of a translator can be told."""

    model: TransformerConfig = field(default_factory=TransformerConfig)  # type: ignore[valid-type]


@dataclass(frozen=True)
class TranslateEval(PairEvalSettings, PairRunSettings):
    """What an evaluation of a translator can be told."""


def hard_attention_loss(
    model: EncoderDecoder, batch: PairBatch, smoothing: float, r_drop: float
) -> Tensor:
    """Return the loss of a model that may sample where it attends, and learns by REINFORCE."""
    draws = ReinforceTape()
    hidden = model.hidden(*twice(batch, r_drop), draws=draws)
    loss = head_loss(model, hidden, batch, smoothing, r_drop)
    if not draws.log_probs:
        return loss
    writes = torch.cat([batch.writes] * (len(hidden) // len(batch.writes)))
    rows = zip(hidden.flatten(0, 1).split(CHUNK), writes.flatten().split(CHUNK), strict=True)
    options: dict[str, Any] = {"ignore_index": -1, "reduction": "none"}
    with torch.no_grad():
        each = [
            F.cross_entropy(model.head(x), y, label_smoothing=smoothing, **options) for x, y in rows
        ]
    return loss + draws.loss(torch.cat(each).view(writes.shape), writes >= 0)


# family -> its loss, where that is not `sequence_loss`
LOSSES: dict[str, Callable[[EncoderDecoder, PairBatch, float, float], Tensor]] = {
    "recurrent": hard_attention_loss
}


class Translate(Seq2Seq):
    """Translates texts sentence by sentence; see `regard train translate --help`."""

    name = "translate"
    Train = TranslateSettings
    Eval = TranslateEval
    short = {
        **Seq2Seq.short,
        "cell": "model.block.cell",
        "attention": "model.block.attention",
        "normalise": "model.block.normalise",
        "readout": "model.block.readout",
        "kernel": "model.block.kernel",
        "direction": "model.direction",
    }

    @classmethod
    def make_model(
        cls, data: Corpus, codec: PairCodec, settings: Any, origin: Origin | None
    ) -> tuple[str, nn.Module]:
        """Build the model for these vocabularies, with room for texts longer than in training."""
        config: Any = settings.model
        if origin is None:
            sizes = {"source_vocab": codec.source.vocab, "target_vocab": codec.target.vocab}
            config = replace(config, **sizes)
            if codec.source is not codec.target and config.tie == "all":
                config = replace(config, tie="target")
        if origin is None or not has_table(getattr(config, "position", "none")):
            longest = max(config.max_length, 4 * settings.max_length + 2)
            config = replace(config, max_length=longest)  # a learned table has the rows it has
        name = cls.family_of({"like": settings.like}, origin)
        return name, cls.build(name, config, settings, origin)

    def batch_loss(self, batch: PairBatch, smoothing: float, r_drop: float) -> Tensor:
        """Return the summed loss of a batch, as the family learns."""
        return LOSSES.get(self.family, sequence_loss)(self.writer, batch, smoothing, r_drop)

    def finish(self, folder: Path, data: Corpus, settings: Any) -> None:
        """Write down which head aligns best on the validation part."""
        self.save_alignment_head(folder, data["valid"])
