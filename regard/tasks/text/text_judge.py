"""One judge of written texts: BLEU or another metric, by source length too."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import TypeVar

from regard.data.pairs import Corpus, Pair, load_pairs
from regard.errors import UsageError, log
from regard.metrics.bleu import BLEU, bleu_metric, tokenise_for
from regard.metrics.lengths import LENGTH_BORDERS, by_length
from regard.metrics.score import Comparison
from regard.metrics.text import BleuMetric, MeanMetric
from regard.settings import setting
from regard.tasks.frame.settings import BootstrapSettings
from regard.tasks.parts import Judge, ScoredPredictions, System
from regard.tasks.runner import Runner
from regard.tasks.text.sequence import SENTENCES, PairFormat, Sources
from regard.tasks.text.writer import PairRunSettings, TextWriter

_TELL_LENGTHS = ("lengths", "joined", "plot")  # settings that BLEU by source length takes


@dataclass(frozen=True)
class PairEvalSettings(PairFormat, BootstrapSettings):
    """What an evaluation on pairs can be told."""

    GROUP = "scores"

    tokenise: str | None = setting(None, "sacreBLEU tokenisation", choices=BLEU.TOKENIZERS)
    lowercase: bool = setting(False, "ignore case")
    lengths: tuple[int, ...] = setting(
        LENGTH_BORDERS, "upper bounds of the length bins, in source words", min=1, max=10_000
    )
    joined: tuple[int, ...] = setting(
        (), "also join sentences up to this many source words", min=1, max=10_000
    )
    plot: str | None = setting(None, "a .png of BLEU by source length")


E = TypeVar("E", bound=PairEvalSettings, default=PairEvalSettings)


class TextJudge(Judge[Corpus, E, list[str]]):
    """Judges written texts against references.

    Args:
        metric: by which settings of an evaluation judge.
        settings: class of these settings.
        sources: how a text becomes a source.
    """

    several = True

    def __init__(
        self,
        metric: Callable[[E], MeanMetric | BleuMetric],
        settings: type[E] = PairEvalSettings,
        sources: Sources[Any] = SENTENCES,
    ):
        self.metric, self.Settings, self.sources = metric, settings, sources

    def entrants(
        self, runners: Sequence[Runner[Any]], settings: E, given: Mapping[str, Any]
    ) -> list[tuple[Runner[Any], Any]]:
        """Models that write a text for a text, each with its own settings; or a refusal."""
        for key in _TELL_LENGTHS:
            if key in given and self.metric(settings).main != "BLEU":
                raise UsageError(f"{key}= tells BLEU by source length; add metric=bleu")
        if not settings.lengths:
            raise UsageError("lengths= is empty; write source words such as lengths=10,20,40")
        if settings.plot and Path(settings.plot).suffix.lower() != ".png":
            raise UsageError(
                f"plot={settings.plot} is not a picture; give a name that ends in .png"
            )
        if settings.joined and not self.sources.sentences:
            raise UsageError(
                "joined= is for translation only: inputs of other tasks cannot be joined"
            )
        first, *others = runners
        if not all(isinstance(other.predictor, TextWriter) for other in others):
            raise UsageError("against= names a model that does not translate; compare translators")
        return [(first, settings), *((one, self.run_settings(one, given)) for one in others)]

    def run_settings(
        self, runner: Runner[Any], given: Mapping[str, Any], **more: Any
    ) -> PairRunSettings:
        """Settings by which a model writes: its own, and those that the user gave."""
        known = runner.task.Run.__dataclass_fields__
        told = {key: value for key, value in given.items() if key in known}
        return runner.check({**more, **told, **self.sources.as_given})

    def read(self, runner: Runner[Any], settings: E) -> Corpus:
        """The part that a model is judged on, alone."""
        corpus = load_pairs(
            str(settings.data),
            source=settings.source or runner.config.get("from"),
            target=settings.target or runner.config.get("to"),
            columns=settings.columns,
            header=settings.header,
            test=settings.test,
            skip_bad=settings.skip_bad,
            need=(settings.part,),
            trained=runner.trained,
        )
        _, language = _languages(runner, corpus, settings)
        if settings.tokenise == "13a" and tokenise_for(language) != "13a":
            log(f"warning: tokenise=13a does not part the words of {language}; such scores mislead")
        corpus = self.sources.prepare(corpus, settings)
        return replace(corpus, parts={settings.part: corpus[settings.part]})

    def predict(
        self,
        runner: Runner[Any],
        data: Corpus,
        settings: E,
        like: Runner[Any] | None = None,
    ) -> list[str]:
        """Targets that a model writes for the sources."""
        asked = replace(settings, **self.sources.as_given)
        sources = [pair.source for pair in _pairs(data)]
        return [str(answer) for answer in runner.predictor.predict(sources, asked)]

    def _against(
        self, runner: Runner[Any], data: Corpus, settings: E
    ) -> tuple[list[list[str]], dict[str, Any]]:
        """References, and by which language and rules to judge."""
        return [[pair.target for pair in _pairs(data)]], {
            "language": _languages(runner, data, settings)[1],
            "tokenise": settings.tokenise,
            "lowercase": settings.lowercase,
        }

    def score(
        self,
        runner: Runner[Any],
        data: Corpus,
        predictions: list[str],
        settings: E,
        systems: Sequence[System] = (),
    ) -> ScoredPredictions:
        """BLEU and chrF, or the scores of another metric; BLEU of all models by source length."""
        references, options = self._against(runner, data, settings)
        metric = self.metric(settings)
        by = systems and metric.main == "BLEU"
        return ScoredPredictions(
            metric.score(predictions, references, **options),
            len(predictions),
            {"lengths": self.lengths(data, settings, systems, options)} if by else {},
            {name: getattr(settings, name) for name in runner.task.Run.__dataclass_fields__},
            rows=[
                {"source": pair.source, "target": pair.target, "prediction": prediction}
                for pair, prediction in zip(_pairs(data), predictions, strict=True)
            ],
        )

    def lengths(
        self,
        data: Corpus,
        settings: E,
        systems: Sequence[System],
        options: dict[str, Any],
    ) -> Any:
        """BLEU of all models by the length of the source."""

        def write(system: System) -> Callable[[Sequence[str]], list[str]]:
            # joined sentences are translated whole, unless the user says otherwise
            runner = system.runner
            asked = self.run_settings(runner, system.given, split=False)
            return lambda texts: [str(a) for a in runner.answer(list(texts), asked)]

        lengths = by_length(
            [system.name for system in systems],
            [system.predictions for system in systems],
            [write(system) for system in systems],
            _pairs(data),
            bleu_metric(**options),
            effective=bleu_metric(**options, effective=True),
            samples=settings.samples,
            borders=settings.lengths,
            joined=settings.joined,
            languages=_languages(systems[0].runner, data, settings),
        )
        if settings.plot:
            lengths.draw(settings.plot)
        return lengths

    def compare(
        self,
        runner: Runner[Any],
        data: Corpus,
        theirs: System,
        ours: list[str],
        settings: E,
    ) -> list[Comparison]:
        """Comparison of two models by paired bootstrap resampling (Koehn 2004)."""
        references, options = self._against(runner, data, settings)
        return self.metric(settings).compare(
            ours, theirs.predictions, references, samples=settings.samples, **options
        )


def _pairs(data: Corpus) -> Sequence[Pair]:
    """Pairs of the only part."""
    (pairs,) = data.parts.values()
    return pairs


def _languages(
    runner: Runner[Any], data: Corpus, settings: PairEvalSettings
) -> tuple[str | None, str | None]:
    """Languages of sources and targets: as the user says, the model or the data."""
    return (
        settings.source or runner.config.get("from") or data.source,
        settings.target or runner.config.get("to") or data.target,
    )
