"""The verbs, one row each: what the command line does, and under which name `regard` exports it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from regard.errors import UsageError, lookup
from regard.settings import Setting, describe


@dataclass(frozen=True)
class Verb:
    """One word of the command line with the page that explains it.

    Args:
        name: the word.
        function: "module:function" that it calls, imported when it is called. The function takes
            the plain words and the settings as arguments, and what it returns is printed.
        words: plain words that it takes, in capitals: [WORD] may be left out, WORD... repeated.
        keys: keys that the line of usage shows.
        summary: line of the front page.
        examples: two commands or more.
        group: heading under which the front page lists it.
        settings: "module:class" of its keys, or a function that returns the class, or the rows of
            a help page, by the first word, or None, and the values that are given. A verb without
            has nothing to set.
        names: "module:table" of what the first word may name, or a function that returns it; an
            entry may have a summary, words, keys and examples of its own.
        aliases: former spellings, and the first word that each stands for.
        terminal: whether it belongs to the command line alone: its function takes the `Call`.
    """

    name: str
    function: str
    words: tuple[str, ...]
    keys: str
    summary: str
    examples: tuple[str, ...]
    group: str = "tools"
    settings: str = ""
    names: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    terminal: bool = False

    @property
    def exported(self) -> tuple[str, str]:
        """Name under which `regard` exports its function, and the module that defines it."""
        module, _, name = self.function.partition(":")
        return name, module

    def page(self, word: str | None = None) -> str:
        """Its page of help but for the settings: that of all, or of what a word names."""
        summary, words, keys, examples = self.summary, self.words, self.keys, self.examples
        if word is not None and self.names and not self.takes_model and not os.path.exists(word):
            kind = self.words[0].strip("[]").replace("|", " or ").lower()
            one = lookup(kind, word, self.known_names())
            if hasattr(one, "words"):
                summary, words, keys = one.summary, (word, *one.words), one.keys
            examples = getattr(one, "examples", ()) or examples
        lines = [f"regard {self.name}: {summary}", ""]
        lines += ["  " + " ".join(filter(None, ("regard", self.name, *words, keys))), ""]
        return "\n".join([*lines, "Examples:", *(f"  {example}" for example in examples)])

    @property
    def takes_model(self) -> bool:
        """Whether its first word is a model, which may be a folder, too."""
        return self.words[:1] == ("MODEL",)

    def known_names(self) -> Mapping[str, Any]:
        """What the first word may name."""
        found: Any = resolve(self.names)
        return found if isinstance(found, Mapping) else found()

    def rows(self, word: str | None = None, *, values: Mapping[str, Any]) -> list[Setting]:
        """Settings with the defaults that it has where the first word and some values are given."""
        found: Any = resolve(self.settings) if self.settings else ()
        if callable(found) and not isinstance(found, type):
            found = found(word, values)
        return list(describe(found)) if isinstance(found, type) else list(found)


@dataclass(frozen=True)
class Call:
    """What the user asked of a verb."""

    words: list[str]
    settings: dict[str, Any]
    json: bool = False
    quiet: bool = False
    literal: int = 0  # how many of the last words stood after --
    completed: Any = None  # the settings of a run, completed by the model

    def take(self, names: tuple[str, ...]) -> list[Any]:
        """Arguments that the plain words are for a verb that takes words of these names."""
        names, repeated = (names[:-1], True) if names and "..." in names[-1] else (names, False)
        required = [name for name in names if not name.startswith("[")]
        if len(self.words) < len(required):
            missing = required[len(self.words)].replace("|", " or ")
            raise UsageError(f"{missing} is missing; add it, or see --help for examples")
        if len(self.words) > len(names) and not repeated:
            extra = self.words[len(names)]
            raise UsageError(f"unexpected word '{extra}'; settings are written key=value")
        taken: list[Any] = self.words[: len(names)]
        return [*taken, self.words[len(names) :]] if repeated else taken


class Listing(dict[str, str]):
    """Names with a line on each."""

    def __str__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{name:{width}}  {line}" for name, line in self.items())


def resolve(name: str) -> Any:
    """What "module:name" names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


TABLE = (
    Verb(
        "run",
        "regard.answering:run",
        ("MODEL", "[TEXT|FILE|PHOTO|SOUND|FOLDER...]"),
        "[key=value...]",
        "answer texts, lines of files or of standard input, photos or sounds",
        (
            'regard run en-zh "How are you?"',
            "regard run runs/mine beam=5 scores=true < test.en > test.de",
        ),
        "use",
        "regard.help:run_rows",
        names="regard.api:starters",
        terminal=True,
    ),
    Verb(
        "train",
        "regard.api:train",
        ("TASK|RECIPE",),
        "[key=value...]",
        "train a task on your own data, or repeat a published recipe",
        (
            "regard train translate data=folder from=en to=de minutes=25 out=runs/mine",
            "regard train multi30k_en_de data=multi30k out=runs/multi30k",
            "regard train recipe.toml lr=0.002",
            "regard train --from runs/mine lr=0.002 out=runs/other",
        ),
        "use",
        "regard.help:train_rows",
        names="regard.recipes:TRAININGS",
    ),
    Verb(
        "eval",
        "regard.api:evaluate",
        ("MODEL",),
        "data=... [key=value...]",
        "judge a model on a test set, alone or against another",
        (
            "regard eval runs/mine data=folder",
            "regard eval runs/mine data=folder against=runs/other",
        ),
        "use",
        "regard.help:eval_rows",
        names="regard.api:starters",
    ),
    Verb(
        "look",
        "regard.api:look",
        ("MODEL", "TEXT|PHOTO|SOUND..."),
        "[word=...] [key=value...]",
        "see where a model looks, as a picture or as a page to explore",
        (
            'regard look en-zh "How are you?" out=attention.html',
            "regard look runs/photos photo.jpg at=120,80 layers=2 heads=0,3 out=attention.png",
        ),
        "use",
        "regard.help:look_rows",
        names="regard.api:starters",
    ),
    Verb(
        "compare",
        "regard.api:compare",
        ("TASK|RECIPE",),
        "key=A,B,C [key=value...]",
        "train variants with several seeds, and see which is better and how surely",
        (
            "regard compare wikitext2_lab position=none,learned,rotary,alibi seeds=3 parallel=2",
            "regard compare translate data=folder from=en to=de norm=layer,rms lr=0.001,0.003",
            "regard compare classify data=texts.tsv search=random lr=0.0003..0.01 steps=600",
        ),
        "use",
        "regard.help:compare_rows",
        names="regard.recipes:TRAININGS",
    ),
    Verb(
        "doctor",
        "regard.api:doctor",
        ("DATA",),
        "[key=value...]",
        "examine data before training: its faults, and what time and memory it will take",
        (
            "regard doctor folder from=en to=de",
            "regard doctor reviews.csv task=classify columns=body,team",
            "regard doctor en-zh",
        ),
        settings="regard.examine.doctor:DoctorSettings",
    ),
    Verb(
        "verify",
        "regard.api:verify",
        ("RUN",),
        "[steps=...]",
        "prove that a run, stopped and resumed, has the same bits as without a stop",
        ("regard verify runs/mine", "regard verify runs/mine steps=100 --json"),
        settings="regard.tasks.verify:VerifySettings",
    ),
    Verb(
        "cost",
        "regard.api:cost",
        ("MODEL",),
        "[image=...] [length=...] [batch=...] [key=value...]",
        "what a model takes: multiply-adds, memory, attention matrices, time, and how they grow",
        (
            "regard cost vit_b16 image=384 batch=8",
            "regard cost gpt size=base length=1024 model.position=rotary",
            "regard cost llama batch=4 kind=h100 devices=64 parallel=fsdp tokens=1e12",
        ),
        settings="regard.costs.report:CostSettings",
        names="regard.api:list_models",
    ),
    Verb(
        "import",
        "regard.api:import_model",
        ("FOLDER",),
        "out=...",
        "take over a public checkpoint: a folder of Hugging Face's kind, with safetensors",
        (
            "regard import bert-base-uncased out=runs/bert",
            "regard import ../downloads/opus-mt-en-de out=runs/en-de",
        ),
        settings="regard.pretrained.import_export:ImportSettings",
    ),
    Verb(
        "export",
        "regard.api:export",
        ("MODEL",),
        "out=FOLDER [key=value...]",
        "write a trained model for another tool",
        (
            "regard export runs/mine out=exported",
            "regard export en-zh format=ctranslate2 quantization=int8 out=exported",
            "regard export en-zh format=onnx out=exported",
            "regard export en-zh quantise=int8 data=test.tsv out=small",
        ),
        settings="regard.pretrained.import_export:ExportSettings",
        names="regard.api:starters",
    ),
    Verb(
        "index",
        "regard.retrieval:index",
        ("MODEL", "FILE|FOLDER"),
        "out=INDEX [key=value...]",
        "embed texts or images, to search them by meaning",
        (
            "regard index embed notes out=notes.index",
            "regard index ../downloads/clip photos out=photos.index",
        ),
        settings="regard.retrieval:IndexSettings",
        names="regard.api:starters",
    ),
    Verb(
        "search",
        "regard.retrieval:search",
        ("INDEX", "QUERY..."),
        "[n=...] [key=value...]",
        "the texts or images of an index that are nearest in meaning to a query",
        (
            'regard search notes.index "when do we meet?" n=3',
            'regard search photos.index "a dog on a beach" --json',
        ),
        settings="regard.retrieval:SearchSettings",
    ),
    Verb(
        "filter",
        "regard.api:filter",
        ("FILTER", "PHOTO"),
        "out=... [key=value...]",
        "smooth a photo by a weighted average: gaussian, bilateral, nonlocal_means, ...",
        (
            "regard filter nonlocal_means photo.png out=smooth.png h=0.1 window=21",
            "regard filter bilateral photo.png out=row.png sigma_r=0.05,0.1,0.2",
        ),
        settings="regard.filters.program:settings_class",
        names="regard.filters:FILTERS",
    ),
    Verb(
        "models",
        "regard.api:list_models",
        (),
        "",
        "list the models that ship with Regard and the families it can build",
        ("regard models", "regard models --json"),
    ),
    Verb(
        "recipes",
        "regard.recipes:list_recipes",
        (),
        "",
        "list the published recipes with what they promise",
        ("regard recipes", "regard recipes --json"),
    ),
    Verb(
        "completion",
        "regard.completion:complete",
        ("SHELL",),
        "",
        "print a script by which bash, zsh or fish completes verbs, names and keys",
        (
            "regard completion bash > ~/.local/share/bash-completion/completions/regard",
            "regard completion fish > ~/.config/fish/completions/regard.fish",
        ),
        names="regard.completion:SHELLS",
        terminal=True,
    ),
    Verb(
        "heads",
        "regard.api:heads",
        ("MODEL",),
        "data=... [key=value...]",
        "what each attention head does, by scores: previous token, induction, alignment, ...",
        (
            "regard heads en-zh data=tatoeba-en-zh examples=200 out=heads.png",
            "regard heads shakespeare repeated=30",
        ),
        "insight",
        "regard.insight.heads:HeadsSettings",
        names="regard.api:starters",
    ),
    Verb(
        "dictionary",
        "regard.api:dictionary",
        ("MODEL",),
        "at=... data=... out=... [key=value...]",
        "learn a sparse dictionary of features at a place of a model, and see their examples",
        (
            "regard dictionary shakespeare at=blocks.3 data=play.txt out=runs/features",
            "regard dictionary runs/photos at=blocks.2 data=photos width=8x k=16 out=runs/features",
        ),
        "insight",
        "regard.insight.dictionary:DictionarySettings",
        names="regard.api:starters",
    ),
    Verb(
        "directions",
        "regard.api:directions",
        ("MODEL",),
        "data=... [out=...] [key=value...]",
        "move images along directions of a latent space, and see what changes",
        (
            "regard directions runs/clothes data=fashion-mnist judge=fashion out=strips.png",
            "regard directions runs/clothes data=fashion-mnist by=components out=strips.html",
        ),
        "insight",
        "regard.insight.directions:DirectionSettings",
        names="regard.api:starters",
    ),
    Verb(
        "show",
        "regard.gallery:show",
        ("[PIECE]", "[MODEL|PHOTO]"),
        "[out=...] [key=value...]",
        "a course on attention in pictures and figures; without a name, all on one page",
        (
            "regard show out=gallery.html",
            "regard show receptive_fields out=fields.png",
            "regard show scaling keys=128 out=scaling.html",
        ),
        "gallery",
        "regard.gallery:settings_class",
        names="regard.gallery:PIECES",
        aliases={
            "misconceptions": "misconceptions",
            "superposition": "superposition",
            "cost lectures": "lectures",
            "filter compare": "filter_comparison",
            "filter grid": "bilateral_grid",
            "filter texture": "texture",
        },
    ),
)

VERBS = {verb.name: verb for verb in TABLE}


def spelled_anew(words: list[str]) -> list[str]:
    """Words of a command in the spelling of today."""
    for verb in TABLE:
        for old, name in verb.aliases.items():
            count = len(old.split())
            if words[:count] == old.split():
                return [verb.name, name, *words[count:]]
    return words
