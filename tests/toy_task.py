"""A toy task in one class: guess a number from a text, such as how many letters a it has."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from regard.attention.watch import watch
from regard.data.batches import Shuffled, pad
from regard.data.characters import Characters
from regard.data.labelled import ExampleFormat, ExampleReader, hash_items, load_labelled
from regard.metrics.score import Score
from regard.models import family
from regard.settings import setting
from regard.tasks.frame.settings import RunSettings, TrainSettings
from regard.tasks.frame.task import Answer, Data, Judged, Task

BertConfig, _ = family("bert")
FORMAT = ExampleReader(ExampleFormat())


@dataclass(frozen=True)
class Guess(Answer):
    value: float

    def __str__(self):
        return f"{self.value:.3f}"

    def record(self, settings):
        return {"prediction": self.value}


@dataclass(frozen=True)
class Spelling:  # the codec
    tokenizer: Characters

    def save(self, folder: Path):
        self.tokenizer.save(folder / "tokenizer.json")

    def facts(self):
        return {}

    def hashes(self):
        return [self.tokenizer.sha]

    def ids(self, texts):
        return pad([np.array([1, *self.tokenizer.encode(t)]) for t in texts], 0)


@dataclass(frozen=True)
class CountTrain(TrainSettings):
    batch: int = setting(16, "texts a batch", min=1)
    model: BertConfig = field(default_factory=BertConfig)


class Feed(Shuffled):
    def epoch(self):
        return self.examples / self.rows


class Count(Task[Spelling, Guess]):
    name, holds = "count", "texts and numbers"
    Train, Run = CountTrain, RunSettings
    sizes = {"tiny": {"lr": 0.003, "steps": 40}}

    @classmethod
    def families(cls):
        return ("bert",)

    @classmethod
    def read(cls, settings, origin):
        data = load_labelled(settings.data, FORMAT, valid=settings.valid)
        return Data(data.parts, data.sha, data.notes, data.split)

    @classmethod
    def make_codec(cls, data, settings, learnt, origin):
        return Spelling(learnt(lambda: Characters.learn(e.text for e in data.parts["train"])))

    @classmethod
    def make_model(cls, data, codec, settings, origin):
        config = replace(settings.model, vocab=codec.tokenizer.vocab, head="classify", labels=1)
        return "bert", cls.build("bert", config, settings, origin)

    @classmethod
    def load_codec(cls, folder, model, config):
        return Spelling(Characters.load(folder / "tokenizer.json"))

    def batches(self, data, settings):
        self.train_part = data.parts["train"]
        return Feed(len(self.train_part), settings.batch, settings.seed)

    def count(self, batch):
        return len(batch), len(batch)

    def values(self, texts):
        return self.model(*self.codec.ids(texts))[:, 0]

    def loss(self, batch, settings):
        rows = [self.train_part[i] for i in batch]
        right = torch.tensor([float(e.labels[0]) for e in rows])
        return (self.values([e.text for e in rows]) - right).square().sum()

    def predict(self, inputs, settings, *, first=0):
        with torch.inference_mode():
            return [Guess(v) for v in self.values(inputs).tolist()]

    def validate(self, data, settings, share=1.0):
        error = self.score(data, self.predict_part(data, "valid"), None, "valid").scores[0].value
        return {"error": error, "better": -error}

    def predict_part(self, data, part):
        return self.predict([e.text for e in data.parts[part]], None)

    def read_test(self, s):
        data = load_labelled(s.data, FORMAT, need=(s.part,), trained=self.trained, test=s.test)
        return Data(data.parts, hash_items(data.parts[s.part]), data.notes)

    def predict_examples(self, data, s):
        return self.predict_part(data, s.part)

    def score(self, data, predictions, s, part=None):
        rows = zip(data.parts[part or s.part], predictions, strict=True)
        errors = [(float(e.labels[0]) - guess.value) ** 2 for e, guess in rows]
        return Judged([Score("error", float(np.mean(errors)), f"texts:{len(errors)}")], len(errors))

    def explain(self, given, settings):
        from regard.viewer.picture import Picture, View

        tokens = ["<s>", *given]
        with watch(self.model) as maps:
            (guess,) = self.predict([given], settings)
        views = [View(n, maps[n].weights()[0].numpy(), tokens, tokens) for n in maps.names()]
        return Picture(title=given, views=views, source=given, output=str(guess))
