"""Settings of tasks on pairs of texts: training, evaluation, running and looking."""

from dataclasses import dataclass
from typing import Any

from regard.data.tokenize import TOKENIZERS
from regard.decode.options import Decoding
from regard.decode.sentences import QUANTISED
from regard.metrics.bleu import BLEU
from regard.metrics.lengths import BORDERS
from regard.settings import setting
from regard.tasks.frame.settings import BootstrapSettings, TrainSettings
from regard.viewer.settings import LookSettings

# what a size means for training, on top of the sizes of the model
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"lr": 0.003, "batch_tokens": 2048, "pieces": 6000, "steps": 12_000},
    "small": {"lr": 0.0015, "batch_tokens": 4096, "pieces": 8000, "steps": 20_000},
    "base": {"lr": 0.0007, "batch_tokens": 16_384, "pieces": 32_000, "steps": 100_000},
    "big": {"lr": 0.0005, "batch_tokens": 32_768, "pieces": 32_000, "steps": 300_000},
}
VOCABULARIES = ("auto", "joint", "separate")
SCRIPTS = {"": None, "simplified": "t2s", "traditional": "s2t"}  # as OpenCC names what it does
ALIGNMENTS = ("none", "pharaoh", "json")
UNITS = {"words": False, "pieces": True}  # whether pieces are left as they are


@dataclass(frozen=True)
class PairFormat:
    """Where the pairs are in a file."""

    GROUP = "data"

    source: str | None = setting(None, "source language", key="from")
    target: str | None = setting(None, "target language", key="to")
    columns: str | None = setting(None, "source and target columns, such as 2,1")
    header: bool | None = setting(None, "whether a table has a header row; detected unless given")
    skip_bad: bool = setting(False, "leave bad rows out")


@dataclass(frozen=True)
class PairTrainSettings(PairFormat, TrainSettings):
    """What a training on pairs of texts can be told."""

    like: str | None = setting(None, "model preset", group="model")
    joined: int = setting(
        0, "also learn from pairs joined to up to so many words", min=0, max=10_000
    )
    tokenizer: str = setting("bpe", "tokenizer", choices=TOKENIZERS)
    pieces: int = setting(6000, "vocabulary size", min=300, max=1_000_000)
    vocabularies: str = setting("auto", "vocabularies of both sides", choices=VOCABULARIES)
    bpe_dropout: float = setting(0.0, "BPE dropout", min=0, max=1)
    batch_tokens: int = setting(2048, "tokens per batch", min=1, group="optimiser")
    max_length: int = setting(256, "maximum tokens of a side", min=1, max=100_000)
    label_smoothing: float = setting(0.1, "label smoothing", min=0, max=0.9)
    r_drop: float = setting(0.0, "weight of the R-Drop term", min=0, max=100)
    valid_sentences: int = setting(
        500, "sentences to decode at a validation", min=0, group="length"
    )


@dataclass(frozen=True)
class PairEvalSettings(PairFormat, BootstrapSettings):
    """What an evaluation on pairs can be told."""

    GROUP = "scores"

    tokenise: str | None = setting(None, "sacreBLEU tokenisation", choices=BLEU.TOKENIZERS)
    lowercase: bool = setting(False, "ignore case")
    lengths: tuple[int, ...] = setting(
        BORDERS, "source words at which groups of BLEU by length end", min=1, max=10_000
    )
    joined: tuple[int, ...] = setting(
        (), "also join sentences to so many source words", min=1, max=10_000
    )
    plot: str | None = setting(None, "a .png of BLEU by source length")


@dataclass(frozen=True)
class WriteSettings(Decoding):
    """How a target is written."""

    GROUP = "decoding"

    prefix: str = setting("", "how every translation begins")
    script: str = setting("", "Chinese script, if not as written", choices=SCRIPTS)
    threads: int | None = setting(None, "CPU threads", min=1, max=1024, group="machine")


@dataclass(frozen=True)
class PairRunSettings(WriteSettings):
    """What a run can be told."""

    columns: str | None = setting(
        None, "column of a table that is read, by name or number", group="data"
    )
    scores: bool = setting(False, "print the score of each hypothesis")
    alignments: str = setting("none", "word alignments", choices=ALIGNMENTS)
    units: str = setting("words", "what is aligned", choices=UNITS)
    shift: bool = setting(False, "align by the attention one step later, which reads the token")
    forced: bool = setting(False, "score given pairs: source, TAB, target on each line")
    split: bool = setting(True, "translate sentence by sentence")
    quantise: str = setting("none", "faster products", choices=QUANTISED, group="machine")
    batch_tokens: int = setting(4096, "tokens per batch", min=1, group="machine")
    batch_rows: int = setting(128, "sentences per batch", min=1, group="machine")


@dataclass(frozen=True)
class PairLookSettings(LookSettings, WriteSettings):
    """What look can be told."""

    units: str = setting("words", "what is shown", choices=UNITS)
