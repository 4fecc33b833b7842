"""All that the command line does, as functions."""

import re
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal, overload

from regard import __version__
from regard.data.split import Split
from regard.errors import UsageError, log_once, nearest
from regard.files import read_json
from regard.metrics.results import Named
from regard.models.folder import WEIGHTS_FILE, load_folder
from regard.pretrained.import_export import EXPORTS, ExportSettings
from regard.recipes import RECIPES, data_folder, recipe, resolve_data
from regard.settings import fill
from regard.tasks import TASKS, task_for
from regard.tasks import task as task_class
from regard.training.plan import DURATION_KEYS
from regard.verbs import Listing

if TYPE_CHECKING:
    from typing import Unpack

    from torch import nn

    from regard.costs.report import Cost
    from regard.examine.doctor import Examined, ExaminedModel
    from regard.insight.dictionary import Dictionary
    from regard.insight.directions import Directions
    from regard.insight.heads import Heads
    from regard.lab.report import Compared
    from regard.metrics.evaluation import Evaluation
    from regard.tasks import train_keys as keys
    from regard.tasks.frame.answers import Classified, Embedded, Filled, Generated, Written
    from regard.tasks.prepare import Report
    from regard.tasks.runner import Runner
    from regard.tasks.sound.transcribing import Transcript
    from regard.tasks.text.classify import Classify
    from regard.tasks.text.tag import Tag
    from regard.tasks.vision.caption import WriteCaptions
    from regard.tasks.vision.denoise import Denoise
    from regard.tasks.vision.pretrain import Pretrain
    from regard.viewer.drawing import Drawing

Place = str | Path
VECTORS = {"embed": "fill"}  # a name for the vectors of a starter: one folder of weights for both


def given(**values: Any) -> dict[str, Any]:
    """Return the settings that were said."""
    return {key: value for key, value in values.items() if value is not None}


def starters() -> dict[str, Path]:
    """Return the models that ship with the package."""
    homes = sorted(path.parent for path in starters_home().glob("*/config.json"))
    shipped = {home.name: home for home in homes}
    return shipped | {name: shipped[of] for name, of in VECTORS.items() if of in shipped}


def is_starter(name: Place) -> bool:
    """Tell whether a name is that of a starter, and say so where a folder has the same name.

    A folder that holds a model goes before a starter; any other, such as one of data, does not.
    """
    path = Path(name)
    if str(name) not in starters() or not path.is_dir():
        return str(name) in starters()
    own = any((path / file).exists() for file in ("config.json", "recipe.json"))
    log_once(
        f"{name}: the model in the folder {path.resolve()}, not the starter of this name"
        if own
        else f"{name}: the starter, as the folder {path.resolve()} holds no model"
    )
    return not own


def only_vectors(name: Place) -> bool:
    """Tell whether a name is that of a starter's vectors."""
    return str(name) in VECTORS and is_starter(name)


def find_model(name: str | Path) -> Path:
    """Return the folder of a model given by its path or a starter's name."""
    path, shipped = Path(name), starters()
    if is_starter(name):
        return shipped[str(name)]
    if not path.is_dir() and not (path.suffix == ".gguf" and path.is_file()):
        raise UsageError(
            f"no model '{name}': neither a folder nor a starter ({', '.join(shipped) or 'none'})."
            + nearest(str(name), shipped)
        )
    if path.is_dir():
        check_finished(path)
    if not (path / "config.json").exists():
        from regard.pretrained.shards import no_weights

        raise no_weights(path)
    return path


def check_finished(folder: Path) -> None:
    """Refuse a folder in which a training has not come to a model, and say how to go on."""
    if not any(path.name != ".lock" for path in folder.iterdir()):
        raise UsageError(f"{folder}: an empty folder; train a model into it with out={folder}")
    begun = (folder / "recipe.json").exists() and not (folder / "README.md").exists()
    if begun and not all((folder / name).exists() for name in ("config.json", WEIGHTS_FILE)):
        told = read_json(folder / "recipe.json")
        what = told.get("recipe") or told.get("task")
        what = f" {what}" if isinstance(what, str) and what.isidentifier() else ""
        raise UsageError(
            f"{folder}: its training has not come to a first checkpoint, so there is no model yet; "
            f"give the same command again to go on: regard train{what} ... out={folder}"
        )


@overload
def load(
    name_or_folder: Place, /, device: str = "cpu", *, task: Literal["translate"]
) -> "Runner[Generated]": ...
@overload
def load(
    name_or_folder: Place, /, device: str = "cpu", *, task: Literal["prefix"]
) -> "Runner[Generated]": ...
@overload
def load(
    name_or_folder: Place, /, device: str = "cpu", *, task: Literal["language"]
) -> "Runner[Written]": ...
@overload
def load(
    name_or_folder: Place, /, device: str = "cpu", *, task: Literal["text"]
) -> "Runner[Generated]": ...
@overload
def load(
    name_or_folder: Place, /, device: str = "cpu", *, task: Literal["classify"]
) -> "Classify": ...
@overload
def load(
    name_or_folder: Place, /, device: str = "cpu", *, task: Literal["images"]
) -> "Runner[Classified]": ...
@overload
def load(
    name_or_folder: Place, /, device: str = "cpu", *, task: Literal["series"]
) -> "Runner[Classified]": ...
@overload
def load(
    name_or_folder: Place, /, device: str = "cpu", *, task: Literal["sounds"]
) -> "Runner[Classified]": ...
@overload
def load(
    name_or_folder: Place, /, device: str = "cpu", *, task: Literal["transcribe"]
) -> "Runner[Transcript]": ...
@overload
def load(name_or_folder: Place, /, device: str = "cpu", *, task: Literal["tag"]) -> "Tag": ...
@overload
def load(
    name_or_folder: Place, /, device: str = "cpu", *, task: Literal["fill"]
) -> "Runner[Filled]": ...
@overload
def load(
    name_or_folder: Place, /, device: str = "cpu", *, task: Literal["embed"]
) -> "Runner[Embedded]": ...
@overload
def load(
    name_or_folder: Place, /, device: str = "cpu", *, task: Literal["caption"]
) -> "WriteCaptions": ...
@overload
def load(
    name_or_folder: Place, /, device: str = "cpu", *, task: Literal["pretrain"]
) -> "Pretrain": ...
@overload
def load(
    name_or_folder: Place, /, device: str = "cpu", *, task: Literal["denoise"]
) -> "Denoise": ...
@overload
def load(name_or_folder: Literal["en-zh"], /, device: str = "cpu") -> "Runner[Generated]": ...
@overload
def load(name_or_folder: Literal["shakespeare"], /, device: str = "cpu") -> "Runner[Written]": ...
@overload
def load(name_or_folder: Literal["fashion"], /, device: str = "cpu") -> "Runner[Classified]": ...
@overload
def load(name_or_folder: Place, /, device: str = "cpu", task: str | None = None) -> Any: ...


def load(name_or_folder: Place, /, device: str = "cpu", task: str | None = None) -> Any:
    """Load a trained model, ready to run: load("en-zh").run("How are you?").

    The name is that of a starter (regard models lists them), a folder that was trained, or one of
    Hugging Face's kind. `device` is cpu or cuda. The model runs as the task that it is made for;
    to name it in `task` lets a type checker know it too, and task="embed" takes its vectors
    instead. One input to run() gives one answer, a list of inputs a list of answers.
    """
    from regard.pretrained.folder import read_any_config

    folder = find_model(name_or_folder)
    read, foreign = read_any_config(folder)
    if foreign:
        model, config, _ = _import(folder, device)
    else:
        model, config = load_folder(folder, device, read)
        config["generation"] = _generation(folder)
    if not isinstance(config["task"], str) or config["task"] not in TASKS:
        raise UsageError(
            f"{folder}: unknown task {config['task']!r}; choose from {', '.join(TASKS)}"
        )
    task = "embed" if only_vectors(name_or_folder) else task
    if task not in (None, config["task"], "embed"):
        raise UsageError(f"task={task}: {folder} can run for {config['task']} or embed")
    made = task_class(task or config["task"]).load(folder, model, config)
    made.family, made.path = config["family"], str(name_or_folder)
    if (folder / "recipe.json").exists():
        made.trained = Split.from_json(read_json(folder / "recipe.json").get("split"))
    return made


def model_task(name_or_folder: str | Path) -> str:
    """Return the task of a model, without loading it."""
    from regard.pretrained.folder import is_foreign

    folder = find_model(name_or_folder)
    if only_vectors(name_or_folder):
        return "embed"
    if is_foreign(folder):
        return load(folder).name
    task = read_json(folder / "config.json").get("task")
    if not isinstance(task, str) or task not in TASKS:
        raise UsageError(f"{folder}: unknown task {task!r:.40}; choose from {', '.join(TASKS)}")
    return task


def settings_of(part: str, name: str | None) -> type:
    """Settings class of the task at hand: that of a task, a recipe, a starter or a folder.

    Args:
        part: Train, Run, Eval or Look.
        name: what is trained or run; without one, settings of translation.
    """
    name = name or "translate"
    task = task_of(name) if part == "Train" or name in TASKS else model_task(name)
    return getattr(task_class(task), part)


train_settings = partial(settings_of, "Train")
run_settings = partial(settings_of, "Run")
eval_settings = partial(settings_of, "Eval")
look_settings = partial(settings_of, "Look")


@overload
def train(name: "keys.Translate", /, **settings: "Unpack[keys.TranslateKeys]") -> "Report": ...
@overload
def train(name: "keys.Prefix", /, **settings: "Unpack[keys.PrefixKeys]") -> "Report": ...
@overload
def train(name: "keys.Language", /, **settings: "Unpack[keys.LanguageKeys]") -> "Report": ...
@overload
def train(name: "keys.Text", /, **settings: "Unpack[keys.TextKeys]") -> "Report": ...
@overload
def train(name: "keys.Classify", /, **settings: "Unpack[keys.ClassifyKeys]") -> "Report": ...
@overload
def train(name: "keys.Images", /, **settings: "Unpack[keys.ImagesKeys]") -> "Report": ...
@overload
def train(name: "keys.Series", /, **settings: "Unpack[keys.SeriesKeys]") -> "Report": ...
@overload
def train(name: "keys.Pretrain", /, **settings: "Unpack[keys.PretrainKeys]") -> "Report": ...
@overload
def train(name: "keys.Caption", /, **settings: "Unpack[keys.CaptionKeys]") -> "Report": ...
@overload
def train(name: "keys.Denoise", /, **settings: "Unpack[keys.DenoiseKeys]") -> "Report": ...
@overload
def train(name: "keys.Transcribe", /, **settings: "Unpack[keys.TranscribeKeys]") -> "Report": ...
@overload
def train(name: "keys.Sounds", /, **settings: "Unpack[keys.SoundsKeys]") -> "Report": ...
@overload
def train(name: "keys.Tag", /, **settings: "Unpack[keys.TagKeys]") -> "Report": ...
@overload
def train(name: str, /, **settings: "Unpack[keys.OtherKeys]") -> "Report": ...


def train(
    task_or_recipe: str,
    /,
    *,
    data: Any = None,
    valid: Any = None,
    test: Any = None,
    out: Place | None = None,
    init: Place | None = None,
    size: str | None = None,
    minutes: float | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    lr: float | None = None,
    batch_tokens: int | None = None,
    dropout: float | None = None,
    seed: int | None = None,
    device: str | None = None,
    quiet: bool = False,
    **settings: Any,
) -> "Report":
    """Train a model on data, or follow a recipe; the same call again goes on where it stopped.

    train("classify", data="reviews.tsv", minutes=5, out="runs/reviews")

    task_or_recipe  translate, language, text, classify, images, series, sounds, transcribe, tag,
                    caption, pretrain, denoise, prefix; or a recipe that `regard recipes` lists
    data            a folder with train, valid and test files, or one file; what it holds depends
                    on the task: pairs, texts, texts with labels, images, sounds, ...
    valid, test     files to choose by and for the final score, if not in `data`
    out             the run's folder, runs/TASK if not said; the model is loaded from there
    init            a model to start from: a folder or a starter
    size            tiny, small, base or big
    minutes, steps, epochs  how long to train; minutes are measured and turned into steps
    lr              the peak of the learning rate
    batch_tokens    tokens of a step (tasks on images take batch, their number)
    dropout, seed   as everywhere
    device          cpu or cuda
    quiet           say nothing on stderr

    All further keys, such as from/to (source= and target= in Python), position, norm, warmup,
    label_smoothing or model.block.heads (as **{"model.block.heads": 8}), with their defaults:
    `regard train TASK --help`. What is not said follows from size, data and time.

    Returns a Report: folder, step, steps, finished, and the scores on the validation part by
    name, as in report["loss"].
    """
    settings |= given(data=data, valid=valid, test=test, out=out, init=init, size=size)
    settings |= given(minutes=minutes, steps=steps, epochs=epochs, lr=lr, batch_tokens=batch_tokens)
    settings |= given(dropout=dropout, seed=seed, device=device)
    task, values, followed = plan(task_or_recipe, settings)
    return task_class(task).train(values, quiet=quiet, recipe=followed)


def compare(
    task_or_recipe: str,
    /,
    *,
    data: Any = None,
    out: Place | None = None,
    seeds: Any = None,
    parallel: int | None = None,
    quiet: bool = False,
    **settings: Any,
) -> "Compared":
    """Train variants of a task or recipe, every key with several values varied, and compare them.

    compare("language", data="book.txt", position=["rotary", "alibi"], seeds=3, minutes=5)

    Keys are those of `train`; one with several values (a list, or "a,b") is varied, each with
    every seed. `seeds` is how many, or a list of them, `parallel` how many runs go on at once,
    `out` the folder of all runs. The same call again goes on where it stopped.

    Returns a Compared: variants, runs, and with str() the table of scores with intervals.
    """
    from regard.lab.variants import compare

    settings |= given(data=data, out=out, seeds=seeds, parallel=parallel)

    name = task_or_recipe
    task, followed = task_of(name), recipe(name) if name in RECIPES else None
    settings = materialise_data(settings)
    settings = {**getattr(followed, "COMPARE", {}), **settings}
    made = compare(name, settings, task=task, plan=partial(plan, name), quiet=quiet)
    judged_by = getattr(followed, "EVAL", None)
    if judged_by is not None and len(made.done) == len(made.runs) > 1:
        values = plan(name, {"data": settings.get("data")})[1]
        keys = {key: settings.get(key, values.get(key)) for key in ("data", "from", "to", "test")}
        *others, last = [run["folder"] for run in made.runs]
        plot = f"{made.out}/lengths.png"
        made.judged = evaluate(last, against=others, plot=plot, **keys, **judged_by)
        made.write(Path(made.out))
    return made


def task_of(name: str) -> str:
    """Return the task that a name means: itself, or what a recipe trains."""
    if name in RECIPES:
        return recipe(name).TASK
    if name not in TASKS:
        raise UsageError(
            f"unknown task or recipe '{name}'; choose from {', '.join(sorted(TASKS))}, or what "
            f"regard recipes lists.{nearest(name, [*TASKS, *RECIPES])}"
        )
    return name


def plan(name: str, settings: dict[str, Any]) -> tuple[str, dict[str, Any], str | None]:
    """Return the task to train, all settings, and the recipe that is followed, if one is."""
    values = materialise_data(settings)
    if values.get("data"):
        values["data"] = resolve_data(values["data"])
    if values.get("init"):
        values["init"] = str(find_model(values["init"]))
    task = task_of(name)
    if name not in RECIPES:
        return task_for(task, values), values, None
    found = recipe(name)
    variants = getattr(found, "VARIANTS", {})
    like = str(values.get("like") or found.SETTINGS.get("like"))
    variant = dict(variants.get(like, {}))
    task = variant.pop("task", task)
    values = {**found.SETTINGS, **variant, **values}
    if any(settings.get(key) is not None for key in DURATION_KEYS):
        # another length than the recipe's has its own of all that follows from the length
        follows = (*DURATION_KEYS, "warmup", "valid_every")
        values = {k: v for k, v in values.items() if k not in follows or k in settings}
    values["data"] = values.get("data") or data_folder(found.DATA)
    values.setdefault("out", f"runs/{name}")
    return task_for(task, values), values, name


def materialise_data(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with data that lie in memory, such as lists and frames, as files."""
    from regard.data.in_memory import on_disk

    found = dict(settings)
    for key in ("data", "valid", "test"):
        value = settings.get(key)
        share = isinstance(value, float) and key != "data"
        found |= {key: str(value) if share else on_disk(value)} if key in settings else {}
    return found


def evaluate(
    model: "Place | Runner[Any]",
    /,
    *,
    data: Any = None,
    part: str | None = None,
    against: Any = None,
    outputs: Place | None = None,
    task: str | None = None,
    **settings: Any,
) -> "Evaluation":
    """Judge a model on data, alone or against another; every score comes with its signature.

    evaluate("en-zh", data="test.tsv", source="en", target="zh")["bleu"]

    model    a folder, a starter's name, or what `load` returned
    data     as for `train`; `part` of it is test (if not said), valid or train
    against  another model, or for translators a list of them: with a paired test
    outputs  a file for the model's answers, one line each
    task     "embed" to judge the vectors of a model of another task

    Further keys by task: `regard eval MODEL --help`. Returns an Evaluation, whose scores are read
    by name, as in result["accuracy"]; shares such as accuracy and F1 are in percent.
    """
    from regard.pretrained.folder import is_foreign

    settings |= given(data=data, part=part, outputs=outputs)
    folder = find_model(model) if isinstance(model, str | Path) else None
    settings = materialise_data(settings)
    sets = {key: resolve_data(settings[key]) for key in ("data", "filters") if key in settings}
    settings |= sets
    loaded: Any = load(folder, task=task) if folder is not None else model
    other = against
    if isinstance(other, str) and not Path(other).is_dir():
        other = other.split(",")
    others = other if isinstance(other, list) else [] if other is None else [other]
    if len(others) > 1 and not loaded.several_against:
        raise UsageError(f"against= names {len(others)} models; one of {loaded.name} takes one")
    rivals = [load(one, task=task) if isinstance(one, str | Path) else one for one in others]
    names = [str(model) if folder else "model", *map(str, others)]
    result = loaded.evaluate(settings, against=rivals, names=names)
    if folder is not None and folder.parent != starters_home() and not is_foreign(folder):
        result.keep(folder)
    return result


def look(
    model: "Place | Runner[Any]",
    texts: Any = (),
    /,
    *,
    out: Place | None = None,
    layers: Any = None,
    heads: Any = None,
    task: str | None = None,
    word: str | None = None,
    **settings: Any,
) -> "Shown | Saved | Drawing":
    """Draw where a model looks while it answers texts, or labels images given as `run` takes them.

    look("en-zh", "How are you?", out="attention.html")

    It is shown inline in a notebook, or saved to `out`: .html to explore, .png to print. `layers`
    and `heads` are numbers of those to draw. With `word` it is drawn how the vectors of a word in
    several texts move apart, layer by layer; with movie=True what a training with watch_every= has
    kept is played. `cause`, `lens` and `patch` show what the answer depends on, what it would be
    after each layer, and where two inputs part; the numbers are in `findings`. Further keys by
    task: `regard look MODEL --help`.
    """
    from regard.tasks.frame.settings import RunSettings
    from regard.viewer.notebook import Look

    if str(settings.get("movie", False)).lower() in ("true", "yes", "1"):
        return _movie(model, texts, out, settings)
    if isinstance(texts, list | tuple) and not texts:
        raise UsageError('TEXT is missing; write for example: regard look en-zh "How are you?"')
    loaded: Any
    loaded = load(model, task=task) if isinstance(model, str | Path) else model
    texts, _ = loaded.inputs_of(texts, RunSettings(settings.get("columns")))
    if word is not None:
        from regard.insight.words import compare_word

        for key in (*settings, *given(layers=layers, heads=heads)):
            raise UsageError(f"unknown key '{key}'; with word= there is nothing to set but out=")
        drawing = compare_word(loaded, list(texts), word)
        return drawing if out is None else replace(drawing, path=str(drawing.save(out)))
    from regard.insight.looking import asks, look_into, shown_in

    findings: list[Any] = []
    if asks(settings):
        pictures, findings = look_into(loaded, texts, settings, layers)
        seen, layers, heads = Look(shown_in(pictures, out)), None, None
    else:
        seen = Look([loaded.picture(text, **settings) for text in texts])
    if out is None:
        return Shown(seen, layers, heads, findings)
    return Saved(str(seen.save(out, layers, heads)), tuple(findings))


def _movie(model: Any, texts: Any, out: Place | None, settings: dict[str, Any]) -> "Saved":
    """Write the page that plays the pictures of a training."""
    from regard.files import write_atomically
    from regard.viewer.movie import movie_page

    others = sorted(key for key in settings if key != "movie")
    if others or len(texts):
        what = f"{others[0]}=" if others else f"{texts[0]!r:.40}"
        raise UsageError(f"movie=true plays the inputs of the training; leave {what} out")
    if not isinstance(model, str | Path) or not Path(model).is_dir():
        raise UsageError(f"movie=true: {model!s:.60} is no folder of a training")
    if out is None or Path(out).suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"movie=true: out={out} is no page; add out=movie.html")
    write_atomically(out, movie_page(Path(model)))
    return Saved(str(out))


@dataclass(frozen=True)
class Saved(Named):
    """A file or folder that was written, and what was found, if that is shown there."""

    path: str
    findings: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return "\n\n".join([*map(str, self.findings), f"wrote {self.path}"])

    def to_dict(self) -> dict[str, Any]:
        """Return what a JSON line holds."""
        found = {"findings": [one.to_dict() for one in self.findings]} if self.findings else {}
        return {"path": self.path, **found}


class Shown:
    """Pictures of chosen layers and heads, which show themselves in a notebook."""

    def __init__(self, seen: Any, layers: Any, heads: Any, findings: Any = ()):
        from regard.viewer.notebook import Look
        from regard.viewer.picture import choose_views

        self.findings = tuple(findings)
        self.look = Look([choose_views(picture, layers, heads) for picture in seen.pictures])

    def _repr_html_(self) -> str:
        return self.look._repr_html_()

    def to_dict(self) -> Any:
        """Return what a JSON line holds: what was found, or what was read and answered."""
        if self.findings:
            return {"findings": [one.to_dict() for one in self.findings]}
        return str(self)

    def __repr__(self) -> str:
        return f"Shown({self.look!r})"

    def __str__(self) -> str:
        pictures = self.look.pictures
        if self.findings:
            return "\n\n".join(map(str, self.findings))
        told = [f"{picture.source} -> {picture.output}" for picture in pictures]
        return "\n".join([*told, "give out=attention.html or out=attention.png to see it"])


def load_with_data(model: "Place | Runner[Any]", data: Any) -> tuple[Any, Any]:
    """A model, loaded if it is named, and the path of data for it, which may be in memory."""
    loaded = load(model) if isinstance(model, str | Path) else model
    return loaded, None if data is None else resolve_data(materialise_data({"data": data})["data"])


def heads(
    model: "Place | Runner[Any]",
    /,
    *,
    data: Any = None,
    out: Place | None = None,
    quiet: bool = True,
    **settings: Any,
) -> "Heads":
    """Measure what each attention head of a model does over one's own data, and name it.

    heads("en-zh", data="test.tsv").named("alignment")

    `data` is as for `evaluate`, or `links` a file of pairs with gold word alignments; `out` a .png
    of all scores, or an .html page of the first example with the heads by name. Further keys:
    `regard heads --help`. Returns Heads, whose str() is the table of all scores.
    """
    from regard.insight.heads import HeadsSettings, measured

    loaded, data = load_with_data(model, data)
    asked = fill(HeadsSettings, settings | given(data=data, out=out))
    return measured(loaded, asked, quiet=quiet)


def dictionary(
    model: "Place | Runner[Any]",
    /,
    *,
    at: str | None = None,
    data: Any = None,
    out: Place | None = None,
    quiet: bool = True,
    **settings: Any,
) -> "Dictionary":
    """Learn a sparse dictionary of features at a place of a model, and write a page of them.

    dictionary("shakespeare", at="blocks.2", data="play.txt", out="runs/features")["l0"]

    `at` is the path of a module, whose output is meant; `data` as for `train` with the model's
    task; `out` a folder, in which the same call goes on where it stopped. Further keys:
    `regard dictionary --help`, and those by which the task reads its data.
    """
    from regard.insight.dictionary import dictionary_of

    loaded, data = load_with_data(model, data)
    settings = materialise_data(settings) | given(at=at, data=data, out=out)
    return dictionary_of(loaded, settings, quiet=quiet)


def cost(
    model: object,
    /,
    *,
    size: str | None = None,
    image: int | None = None,
    length: int | None = None,
    batch: int | None = None,
    **settings: Any,
) -> "Cost":
    """Count what a model takes to read and to learn: one of ours by name or folder, or a module.

    cost("vit_b16", image=384, batch=8)["multiply_adds"]

    `size` is tiny, small, base or big, `image` the side of an image in pixels, `length` the tokens
    of a text, `batch` how many at once.
    """
    settings |= given(size=size, image=image, length=length, batch=batch)
    from regard.costs.report import cost, cost_of

    if not isinstance(model, str | Path):
        return cost_of(model, settings)
    known = Path(model).is_dir() or is_starter(model)
    return cost(str(model), find_model(model) if known else None, settings)


def filter(name: str, photo: Place, /, *, out: Place | None = None, **settings: Any) -> Saved:
    """Smooth a photo by a filter of some name.

    filter("bilateral", "photo.png", out="smooth.png")

    The keys of a filter: `regard filter NAME --help`. To filter an array rather than a file, call
    regard.filters.FILTERS[name].
    """
    from regard.filters.program import filter_photo

    settings |= given(out=out)
    return Saved(str(filter_photo(name, photo, settings)))


def directions(
    model: "Place | Runner[Any]",
    /,
    *,
    out: Place | None = None,
    quiet: bool = True,
    **settings: Any,
) -> "Directions":
    """Find directions in the latent space of an autoencoder, and draw images moved along them.

    directions("runs/clothes", data="fashion-mnist", judge="fashion", out="strips.png")

    The model is one that was trained with objective=variational. Keys: `regard directions --help`.
    """
    from regard.insight.directions import find_directions

    loaded, data = load_with_data(model, settings.pop("data", None))
    settings |= given(data=data)
    return find_directions(loaded, settings, out=out, load=load, quiet=quiet)


def doctor(data: Any, /, *, quiet: bool = True, **settings: Any) -> "Examined | ExaminedModel":
    """Examine data before training: faults with their remedy, and what a size will cost.

    Data for any task, in files or in memory; `task=` says which, else their looks do. At most some
    thousand rows are looked at, unless full=True. Further keys: `regard doctor --help`. Of a model
    (a starter or a run folder) it tells whether it is decoded natively, and if not, why.
    """
    from regard.data.in_memory import on_disk
    from regard.examine.doctor import DoctorSettings, ExaminedModel, examine

    own = fill(DoctorSettings, materialise_data(settings))
    place = Path(data) if isinstance(data, str | Path) else None
    if place and ((place / "config.json").is_file() or (not place.exists() and is_starter(data))):
        return ExaminedModel.of(str(data), load(data))
    return examine(str(resolve_data(on_disk(data))), own, quiet)


def import_model(folder: Place, /, *, out: Place | None = None, **settings: Any) -> Saved:
    """Write a public checkpoint as a folder of Regard's.

    It is a folder of Hugging Face's kind, whose weights may also be in pytorch_model.bin, or a GGUF
    file; both are read by a process of their own with little memory and time.
    """
    from regard.pretrained.convert import readable
    from regard.pretrained.import_export import ImportSettings

    fill(ImportSettings, settings | given(out=out))
    if out is None:
        raise UsageError("out is missing; add out=FOLDER for the imported model")
    if not Path(folder).exists():
        raise UsageError(f"{folder}: no such folder; expected one with config.json and weights")
    with readable(folder) as source:
        return _take_over(source, out)


def _take_over(folder: Path, out: Place) -> Saved:
    """Write a folder with config.json and safetensors as one of Regard's."""
    from regard.files import making, write_atomically
    from regard.files.hashes import seal
    from regard.files.weights import state_of
    from regard.models.folder import save_config, save_parts, save_weights
    from regard.pretrained.folder import is_foreign, write_json
    from regard.pretrained.shards import no_weights
    from regard.pretrained.tokenizer_folder import save_tokenizers

    if not (Path(folder) / "config.json").exists():
        raise no_weights(Path(folder))
    if not is_foreign(folder):
        read_json(Path(folder) / "config.json")
        raise UsageError(f"{folder}: its config.json names no model_type; expected that of others")
    model, config, tokenizers = _import(Path(folder))
    known = ("regard_format", "family", "task", "model", "generation")
    about = {key: value for key, value in config.items() if key not in known}
    with making(out) as partial:
        save_weights(partial, state_of(model))
        if "pretraining" in config:
            save_parts(partial, state_of(_whole(Path(folder), model, config)))
        if tokenizers[0] is not None:  # a model that reads images has none
            save_tokenizers(partial, tokenizers)
            write_json(partial / "generation_config.json", config.get("generation", {}))
        write_atomically(partial / "README.md", _card(config, model))
        save_config(partial, model, name=config["family"], task=config["task"], about=about)
        seal(partial)
    return Saved(str(out))


def _whole(folder: Path, model: "nn.Module", config: dict[str, Any]) -> Any:
    """Return an encoder of images within what it was trained by."""
    encoder: Any = task_class("pretrain").load(folder, model, config)
    return encoder.whole()


def _card(config: dict[str, Any], model: "nn.Module") -> str:
    """Write the README of a model that was imported."""
    count = sum(parameter.numel() for parameter in model.parameters())
    came = config["imported"]
    return (
        f"# A model for `{config['task']}`\n\n{came['architecture']} ({came['model_type']}), "
        f"{count:,} parameters, imported by Regard {__version__}.\n"
    )


def _import(folder: Path, device: str = "cpu") -> tuple[Any, dict[str, Any], tuple[Any, Any]]:
    """Read a public checkpoint, or one that we have exported."""
    from regard.pretrained.folder import import_folder
    from regard.pretrained.generation import read_generation
    from regard.pretrained.tokenizer_folder import load_tokenizers

    model, config, tokenizers = import_folder(folder, device, load_tokenizers)
    config["generation"] = read_generation(folder, config["task"])
    return model, config, tokenizers


def _generation(folder: Path) -> dict[str, Any]:
    """Return how a model of ours writes by default."""
    path = folder / "generation_config.json"
    told = read_json(path) if path.exists() else {}
    if not isinstance(rules := told.get("rules", {}), dict | None):
        raise UsageError(f"{path}: 'rules' are {rules!r:.40}; expected an object")
    return told


def export(
    model: Place, /, *, format: str = "huggingface", out: Place | None = None, **settings: Any
) -> Saved:
    """Write a trained model in the words of another tool.

    export("runs/mine", out="exported")

    `format` is huggingface (with dtype, and max_shard in MB) or ctranslate2 (with quantization).
    """
    asked = fill(ExportSettings, {"format": format, "out": out, **settings})
    if asked.out is None:
        raise UsageError("out is missing; add out=FOLDER for the exported model")
    for key in settings.keys() - EXPORTS[format]:
        raise UsageError(f"{key}= is not for format={format}; leave it out")
    if format == "huggingface":
        return _export_huggingface(find_model(model), asked.out, asked)
    from regard.pretrained.ctranslate2 import export_ctranslate2

    loaded: Any = load(model)
    if loaded.name != "translate":
        raise UsageError(
            f"CTranslate2 takes a model for translate from us, not one for {loaded.name}"
        )
    place = export_ctranslate2(
        loaded.model,
        loaded.codec.source,
        loaded.codec.target,
        asked.out,
        asked.quantization,
    )
    return Saved(str(place))


def _export_huggingface(folder: Path, out: Path, asked: ExportSettings) -> Saved:
    """Write a model as transformers' AutoModel and AutoTokenizer read it."""
    from regard.files import making
    from regard.pretrained.folder import export_weights, is_foreign
    from regard.pretrained.tokenizer_folder import export_tokenizers, load_tokenizers

    if is_foreign(folder):
        model, config, tokenizers = _import(folder)
    else:
        model, config = load_folder(folder)
        config["generation"] = _generation(folder)
        other = {"image", "series", *({"sound"} if config.get("labels") else ())}
        reads_text = not other & config.keys() or hasattr(model, "texts")
        tokenizers = load_tokenizers(folder) if reads_text else (None, None)
    with making(out) as partial:
        most = asked.max_shard and asked.max_shard * 10**6
        sizes: dict[str, Any] = {"dtype": asked.dtype, "max_shard": most}
        told = config.get("pretraining")
        if isinstance(told, dict) and told.get("by") == "mae":
            sizes["whole"] = _whole(folder, model, config)
        export_weights(model, config, tokenizers, partial, **sizes)
        if tokenizers[0] is not None:
            export_tokenizers(partial, tokenizers, config)
    return Saved(str(out))


def starters_home() -> Path:
    """Return where the models that ship with the package lie."""
    return Path(str(resources.files("regard"))) / "starters"


class Promises(Listing):
    """Recipes with what each promises: what it is, how long it takes, and what it gives."""

    def __str__(self) -> str:
        width = max(map(len, self), default=0)
        wide = max(60, min(get_terminal_size((100, 24)).columns, 120)) - width - 2
        lines = []
        for name, told in self.items():
            body, *parts = re.split(r" (?=(?:Command|Takes|Gives): )", told)
            first = re.split(r"(?<=[.:]) ", body)[0]
            shown = [first, *(part for part in parts if not part.startswith("Command"))]
            rows = [row for part in shown for row in wrap(part, wide, subsequent_indent="       ")]
            lines += [f"{name if n == 0 else '':{width}}  {row}" for n, row in enumerate(rows)]
        return "\n".join([*lines, "", "regard train NAME [data=...] follows one; --json tells all"])


def list_models() -> Listing:
    """List the starters and the families that can be built."""
    from regard.models import MODELS, family

    shipped = {}
    for name, path in starters().items():
        told = read_json(path / "config.json")
        about = told.get("about_vectors" if name in VECTORS else "about", "")
        shipped[name] = f"starter: {about} (weights under {told.get('licence', 'no licence')})"
    families = {
        name: f"family: {(family(name)[1].__doc__ or '').splitlines()[0]}" for name in MODELS
    }
    return Listing({**shipped, **families})


def list_recipes() -> Promises:
    """List the recipes with what they promise."""
    return Promises({name: " ".join((recipe(name).__doc__ or "").split()) for name in RECIPES})
