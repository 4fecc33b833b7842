"""A toy task as a row of parts: predict a number from a text, such as how many letters a it has."""

from dataclasses import dataclass, field, replace

import torch

from regard.attention.watch import watch
from regard.data.batches import Shuffled
from regard.data.characters import Characters
from regard.data.labelled import ExampleFormat, ExampleReader, load_labelled
from regard.data.rows import RowEncoder, collate
from regard.metrics.score import Score
from regard.modalities.text import TEXT
from regard.models.bert import BertConfig
from regard.settings import setting
from regard.tasks import parts
from regard.tasks.frame.answers import Valued
from regard.tasks.frame.settings import TrainSettings
from regard.tasks.text.codec import EncoderRun, TextCodec, load_encoder
from regard.viewer.picture import Picture
from regard.viewer.text import text_views

ROWS = ExampleReader(ExampleFormat())


@dataclass(frozen=True)
class CountTrain(TrainSettings):
    batch: int = setting(16, "texts a batch", min=1)
    model: BertConfig = field(default_factory=BertConfig)


class CountObjective(parts.Objective):
    Settings = CountTrain
    sizes = {"tiny": {"lr": 0.003, "steps": 40}}
    serves = "classify"

    def read(self, settings, origin):
        return load_labelled(settings.data, ROWS, valid=settings.valid)

    def codec(self, data, settings, learnt, origin):
        texts = [example.text for example in data["train"]]
        return TextCodec(RowEncoder(learnt(lambda: Characters.learn(texts))))

    def model(self, data, codec, settings, origin):
        config = replace(settings.model, vocab=codec.tokenizer.vocab, head="classify", labels=1)
        return "bert", parts.build_model("bert", config, settings, origin)

    def lesson(self, runner, data, settings):
        def loss(batch):
            rows = [data["train"][i] for i in batch]
            targets = torch.tensor([float(row.labels[0]) for row in rows])
            return (runner.predictor.values([r.text for r in rows]) - targets).square().sum()

        return parts.Lesson(
            batches=Shuffled(len(data["train"]), settings.batch, settings.seed),
            count=lambda batch: (len(batch), len(batch)),
            loss=loss,
            validate=parts.validation(runner, data, "-error"),
        )


class Counter(parts.Predictor):
    Settings = EncoderRun

    def values(self, texts):
        rows = self.codec.encoder.texts(texts, self.model.config.max_length)
        return self.model(*collate(rows, self.codec.tokenizer.pad)[:2])[:, 0]

    @torch.inference_mode()
    def predict(self, inputs, settings, *, first=0):
        return [Valued(value) for value in self.values(inputs).tolist()] if inputs else []

    def explain(self, given, settings):
        (row,) = self.codec.encoder.texts([given], self.model.config.max_length)
        with watch(self.model) as maps:
            (answer,) = self.predict([given], settings)
        views = text_views(maps, self.codec.tokenizer.pieces(row.ids.tolist()))
        return Picture(title=given, views=views, source=given, output=str(answer))


class CountJudge(parts.Judge):
    def read(self, runner, settings):
        given = {"need": (settings.part,), "test": settings.test, "trained": runner.trained}
        return load_labelled(settings.data, ROWS, **given)

    def score(self, runner, data, predictions, settings, systems=()):
        pairs = zip(data[settings.part], predictions, strict=True)
        errors = [(float(row.labels[0]) - answer.value) ** 2 for row, answer in pairs]
        score = Score("error", sum(errors) / len(errors), f"mean squared|texts:{len(errors)}")
        return parts.ScoredPredictions([score], len(errors))


def load_codec(folder, model, config):
    return TextCodec(load_encoder(folder, model, config))


row = "count", "texts and numbers", TEXT, Counter, CountJudge(), load_codec
COUNT = parts.Task(*row, CountObjective(), target="number")
