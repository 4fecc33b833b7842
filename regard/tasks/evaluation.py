"""Judging a translator on a test set."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from regard.data.pairs import Corpus, load_pairs
from regard.errors import UsageError, log
from regard.metrics.bleu import bleu_metric, tokenise_for
from regard.metrics.evaluation import Evaluation, made_here, write_outputs
from regard.metrics.lengths import BORDERS, by_length
from regard.metrics.text import Bleu
from regard.settings import fill
from regard.tasks.translator import RunSettings, Translator, own_settings


@dataclass(frozen=True)
class EvalSettings(RunSettings):
    """What to judge on, and how."""

    data: str | None = field(default=None, metadata={"help": "a folder or file of pairs"})
    part: str = field(default="test", metadata={"help": "test, valid or train"})
    source: str | None = field(default=None, metadata={"key": "from", "help": "language read"})
    target: str | None = field(default=None, metadata={"key": "to", "help": "language written"})
    columns: str | None = field(default=None, metadata={"help": "source and target columns"})
    header: bool | None = field(
        default=None, metadata={"help": "whether a table begins with one; recognised unless told"}
    )
    skip_bad: bool = field(default=False, metadata={"help": "leave bad rows out"})
    test: str | None = field(default=None, metadata={"help": "which test file of the folder"})
    tokenise: str | None = field(default=None, metadata={"help": "sacreBLEU's tokenisation"})
    lowercase: bool = field(default=False, metadata={"help": "ignore case"})
    samples: int = field(default=1000, metadata={"min": 100, "max": 100_000})
    outputs: str | None = field(
        default=None, metadata={"help": "a file for the answers; .jsonl tells more"}
    )
    lengths: tuple[int, ...] = field(
        default=BORDERS, metadata={"help": "source words to tell BLEU by", "min": 1, "max": 10_000}
    )
    joined: tuple[int, ...] = field(
        default=(),
        metadata={"help": "also join sentences to so many source words", "min": 1, "max": 10_000},
    )
    plot: str | None = field(default=None, metadata={"help": "a .png of BLEU by source length"})


def read_test(translator: Translator, how: EvalSettings) -> Corpus:
    """Read the part that a model is judged on."""
    if how.data is None:
        raise UsageError("data is missing; add data=FILE or data=FOLDER with pairs of sentences")
    return load_pairs(
        how.data,
        source=how.source or translator.config.get("from"),
        target=how.target or translator.config.get("to"),
        columns=how.columns,
        header=how.header,
        test=how.test,
        skip_bad=how.skip_bad,
        need=(how.part,),
        trained=translator.trained,
    )


def evaluate(
    translator: Translator,
    settings: dict[str, Any],
    *,
    against: Translator | Sequence[Translator] | None = None,
    names: tuple[str, ...] = ("model", ""),
    keys: type[EvalSettings] = EvalSettings,
    read: Callable[[Any, Any], Corpus] = read_test,
    metric: Callable[[Any], Any] = lambda how: Bleu(),
) -> Evaluation:
    """Translate a test set and score it, alone or against others.

    A task of another kind brings its own keys, and how to read the test set and to judge by them.
    """
    how = fill(keys, {**_own(translator), **settings})
    corpus, by = read(translator, how), metric(how)
    _check_lengths(how, settings, by.main == "BLEU", keys is EvalSettings)
    pairs = corpus.parts[how.part]
    language = how.target or translator.config.get("to") or corpus.target
    given = against if isinstance(against, Sequence) else [] if against is None else [against]
    others = [other for other in given if isinstance(other, Translator)]
    if len(others) < len(given):
        raise UsageError("against= names a model that does not translate; compare translators")
    if how.tokenise and tokenise_for(language) != "13a" and how.tokenise == "13a":
        log(f"warning: tokenise=13a does not part the words of {language}; such scores mislead")
    sources, references = [p.source for p in pairs], [[p.target for p in pairs]]
    run = {
        key: value
        for key, value in settings.items()
        if key in translator.settings.__dataclass_fields__ and key != "test"
    }
    started = time.perf_counter()
    outputs = [str(answer) for answer in translator.run(sources, **run)]
    seconds = time.perf_counter() - started
    options: dict[str, Any] = {"tokenise": how.tokenise, "lowercase": how.lowercase}
    scores = by.judge(outputs, references, language, **options)
    comparison, written = [], [outputs]
    for name, other in zip(names[1:], others, strict=False):
        written.append([str(answer) for answer in other.run(sources, **run)])
        found = by.compare(
            outputs, written[-1], references, language, samples=how.samples, **options
        )
        comparison += found if len(others) == 1 else [replace(one, against=name) for one in found]
    lengths = None
    if by.main == "BLEU":
        lengths = by_length(
            names[: len(written)],
            written,
            [partial(_whole, each, run) for each in (translator, *others)],
            pairs,
            bleu_metric(language, **options),
            effective=bleu_metric(language, **options, effective=True),
            samples=how.samples,
            borders=how.lengths,
            joined=how.joined,
            languages=(how.source or translator.config.get("from") or corpus.source, language),
        )
        if how.plot:
            lengths.draw(how.plot)
    if how.outputs:
        rows = zip(pairs, outputs, strict=True)
        write_outputs(
            how.outputs,
            [{"source": p.source, "target": p.target, "prediction": o} for p, o in rows],
        )
    made_with = {
        "data": how.data,
        "part": how.part,
        "data_hash": _hash(pairs),
        "tokenizers": [translator.source_tokenizer.sha, translator.target_tokenizer.sha],
        **{name: getattr(how, name) for name in translator.settings.__dataclass_fields__},
        **made_here(),
    }
    told = ", ".join(names[1:]) or None
    return Evaluation(
        names[0],
        scores,
        len(pairs),
        seconds,
        made_with,
        told,
        comparison,
        lengths=lengths,
        notes=corpus.notes,
    )


def _check_lengths(how: Any, given: dict[str, Any], is_bleu: bool, is_plain: bool) -> None:
    """Refuse what cannot be told by length, before anything is translated."""
    for key in ("lengths", "joined", "plot"):
        if key in given and not is_bleu:
            raise UsageError(f"{key}= tells BLEU by source length; add metric=bleu")
    if how.joined and not is_plain:
        raise UsageError("joined= is for translators: joined inputs of another task are no input")
    if not how.lengths:
        raise UsageError("lengths= is empty; write source words such as lengths=10,20,40")
    if how.plot and Path(how.plot).suffix.lower() != ".png":
        raise UsageError(f"plot={how.plot} is no picture's name; end it with .png")


def _whole(translator: Translator, run: dict[str, Any], sources: Sequence[str]) -> list[str]:
    """Translate sources without cutting them into sentences, unless told to."""
    return [str(answer) for answer in translator.run(sources, **{"split": False, **run})]


def _own(translator: Translator) -> dict[str, Any]:
    """Return the model's own defaults of decoding."""
    return own_settings(translator.config)


def _hash(pairs: Any) -> str:
    import hashlib

    digest = hashlib.sha256()
    for pair in pairs:
        digest.update(f"{pair.source}\x00{pair.target}\x01".encode(errors="replace"))
    return digest.hexdigest()
