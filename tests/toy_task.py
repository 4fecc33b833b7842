"""A toy task in one class: predict a number from a text, such as how many letters a it has."""

from dataclasses import dataclass, field, replace

import torch

from regard.attention.watch import watch
from regard.data.batches import Shuffled
from regard.data.characters import Characters
from regard.data.labelled import ExampleFormat, ExampleReader, load_labelled
from regard.data.rows import RowEncoder, collate
from regard.metrics.score import Score
from regard.models import family
from regard.settings import setting
from regard.tasks.frame.answers import Valued
from regard.tasks.frame.settings import TrainSettings
from regard.tasks.frame.task import Judged, Task
from regard.tasks.text.codec import EncoderRun, TextCodec, load_encoder
from regard.viewer.picture import Picture
from regard.viewer.text import text_views

BertConfig, _ = family("bert")
ROWS = ExampleReader(ExampleFormat())


@dataclass(frozen=True)
class CountTrain(TrainSettings):
    batch: int = setting(16, "texts a batch", min=1)
    model: BertConfig = field(default_factory=BertConfig)


class Count(Task[TextCodec, Valued]):
    name, holds, target, better = "count", "texts and numbers", "number", "-error"
    Train, Run = CountTrain, EncoderRun
    sizes = {"tiny": {"lr": 0.003, "steps": 40}}
    families = classmethod(lambda cls: ("bert",))

    @classmethod
    def read(cls, settings, origin):
        return load_labelled(settings.data, ROWS, valid=settings.valid)

    @classmethod
    def make_codec(cls, data, settings, learnt, origin):
        texts = [example.text for example in data.parts["train"]]
        return TextCodec(RowEncoder(learnt(lambda: Characters.learn(texts))))

    @classmethod
    def make_model(cls, data, codec, settings, origin):
        config = replace(settings.model, vocab=codec.tokenizer.vocab, head="classify", labels=1)
        return "bert", cls.build("bert", config, settings, origin)

    @classmethod
    def load_codec(cls, folder, model, config):
        return TextCodec(load_encoder(folder, model, config))

    def batches(self, data, settings):
        self.examples = data.parts["train"]
        return Shuffled(len(self.examples), settings.batch, settings.seed)

    def count(self, batch):
        return len(batch), len(batch)

    def values(self, texts):
        rows = self.codec.encoder.texts(texts, self.model.config.max_length)
        return self.model(*collate(rows, self.codec.tokenizer.pad)[:2])[:, 0]

    def loss(self, batch, settings):
        rows = [self.examples[i] for i in batch]
        targets = torch.tensor([float(row.labels[0]) for row in rows])
        return (self.values([row.text for row in rows]) - targets).square().sum()

    @torch.inference_mode()
    def predict(self, inputs, settings, *, first=0):
        return [Valued(value) for value in self.values(inputs).tolist()] if inputs else []

    def read_test(self, settings):
        given = {"need": (settings.part,), "test": settings.test, "trained": self.trained}
        return load_labelled(settings.data, ROWS, **given)

    def predict_examples(self, data, settings):
        return self.predict([example.text for example in data.parts[settings.part]], settings)

    def judge(self, data, predictions, settings):
        pairs = zip(data.parts[settings.part], predictions, strict=True)
        errors = [(float(row.labels[0]) - answer.value) ** 2 for row, answer in pairs]
        signature = f"mean squared|texts:{len(errors)}"
        return Judged([Score("error", sum(errors) / len(errors), signature)], len(errors))

    def explain(self, given, settings):
        (row,) = self.codec.encoder.texts([given], self.model.config.max_length)
        with watch(self.model) as maps:
            (answer,) = self.predict([given], settings)
        views = text_views(maps, self.codec.tokenizer.pieces(row.ids.tolist()))
        return Picture(title=given, views=views, source=given, output=str(answer))
