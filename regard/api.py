"""All that the command line does, as functions."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from regard.data.split import Split
from regard.errors import UsageError, log_once, nearest
from regard.files import errors_in, read_json
from regard.metrics.results import Saved
from regard.models.folder import WEIGHTS_FILE
from regard.own import Files, missing, named_files, named_parts, using
from regard.own import use as use_own
from regard.recipes import RECIPES, data_folder, recipe, resolve_data
from regard.recipes.given import naming, unfold
from regard.settings import fill
from regard.tasks import TASKS, task_for
from regard.tasks import task as task_class
from regard.training.plan import DURATION_KEYS
from regard.verbs import Listing

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Unpack

    from torch import nn

    from regard.costs.report import Cost
    from regard.data.in_memory import UserData
    from regard.examine.doctor import Examined, ExaminedModel
    from regard.insight.dictionary import Dictionary
    from regard.insight.directions import Directions
    from regard.insight.heads import Heads
    from regard.insight.looking import Shown
    from regard.lab.report import Compared
    from regard.metrics.evaluation import Evaluation
    from regard.tasks import LabelTask
    from regard.tasks import train_keys as keys
    from regard.tasks.frame.answers import (
        Classified,
        Embedded,
        Filled,
        Generated,
        Tagged,
        Written,
    )
    from regard.tasks.prepare import Report
    from regard.tasks.runner import Runner
    from regard.tasks.sound.transcribing import Transcript
    from regard.tasks.verify import Verified
    from regard.tasks.vision.captioning import Caption
    from regard.tasks.vision.noise import Denoised
    from regard.tasks.vision.segmenting import Segmented
    from regard.training.callbacks import Callback
    from regard.viewer.drawing import Drawing

Place = str | Path
_VECTORS = {"embed": "fill"}  # a name for the vectors of a starter: one folder of weights for both


def not_none(**values: Any) -> dict[str, Any]:
    """Settings that are given."""
    return {key: value for key, value in values.items() if value is not None}


def starters() -> dict[str, Path]:
    """Return the models that ship with the package."""
    homes = sorted(path.parent for path in starters_home().glob("*/config.json"))
    shipped = {home.name: home for home in homes}
    return shipped | {name: shipped[of] for name, of in _VECTORS.items() if of in shipped}


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
    return str(name) in _VECTORS and is_starter(name)


def find_model(name: str | Path) -> Path:
    """Folder of a model given by its path, a starter's name, or one in the hub's local cache."""
    path, shipped = Path(name), starters()
    if is_starter(name):
        return shipped[str(name)]
    if not path.is_dir() and not (path.suffix == ".gguf" and path.is_file()):
        from regard.pretrained.hub_cache import find_cached, hub_cache, is_hub_name

        if (cached := find_cached(str(name))) is not None:
            return cached
        hub = f", and not in {hub_cache()}; nothing is downloaded, hf download {name} would"
        raise UsageError(
            f"no model '{name}': neither a folder nor a starter ({', '.join(shipped) or 'none'})"
            + (f"{hub}." if is_hub_name(str(name)) else f".{nearest(str(name), shipped)}")
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
        own = "".join(f" use={name}" for name in named_files(told.get("use")))
        raise UsageError(
            f"{folder}: its training has not come to a first checkpoint, so there is no model yet; "
            f"give the same command again to go on: regard train{what} ...{own} out={folder}"
        )


@overload
def load(
    name_or_folder: Place,
    /,
    device: str = "cpu",
    *,
    use: Files = None,
    task: Literal["translate", "prefix", "text"],
) -> "Runner[Generated]": ...
@overload
def load(
    name_or_folder: Place, /, device: str = "cpu", *, use: Files = None, task: Literal["language"]
) -> "Runner[Written]": ...
@overload
def load(
    name_or_folder: Place, /, device: str = "cpu", *, use: Files = None, task: "LabelTask"
) -> "Runner[Classified]": ...
@overload
def load(
    name_or_folder: Place, /, device: str = "cpu", *, use: Files = None, task: Literal["transcribe"]
) -> "Runner[Transcript]": ...
@overload
def load(
    name_or_folder: Place, /, device: str = "cpu", *, use: Files = None, task: Literal["tag"]
) -> "Runner[Tagged]": ...
@overload
def load(
    name_or_folder: Place, /, device: str = "cpu", *, use: Files = None, task: Literal["fill"]
) -> "Runner[Filled]": ...
@overload
def load(
    name_or_folder: Place, /, device: str = "cpu", *, use: Files = None, task: Literal["embed"]
) -> "Runner[Embedded]": ...
@overload
def load(
    name_or_folder: Place, /, device: str = "cpu", *, use: Files = None, task: Literal["caption"]
) -> "Runner[Caption]": ...
@overload
def load(
    name_or_folder: Place, /, device: str = "cpu", *, use: Files = None, task: Literal["denoise"]
) -> "Runner[Denoised]": ...
@overload
def load(
    name_or_folder: Place, /, device: str = "cpu", *, use: Files = None, task: Literal["segment"]
) -> "Runner[Segmented]": ...
@overload
def load(name_or_folder: Literal["en-zh"], /, device: str = "cpu") -> "Runner[Generated]": ...
@overload
def load(name_or_folder: Literal["shakespeare"], /, device: str = "cpu") -> "Runner[Written]": ...
@overload
def load(name_or_folder: Literal["fashion"], /, device: str = "cpu") -> "Runner[Classified]": ...
@overload
def load(
    name_or_folder: Place, /, device: str = "cpu", task: str | None = None, use: Files = None
) -> Any: ...


def load(
    name_or_folder: Place, /, device: str = "cpu", task: str | None = None, use: Files = None
) -> Any:
    """Load a trained model, ready to run: load("en-zh").run("How are you?").

    The name is that of a starter (regard models lists them), a folder that was trained, one of
    Hugging Face's kind, or org/name of one in the local cache of its hub. `device` is cpu or cuda.
    The model runs as the task that it is made for; to name it in `task` lets a type checker know
    it too, and task="embed" takes its vectors instead. `use` is a file of your own parts that it
    needs. One input to run() gives one answer, a list of inputs a list of answers.
    """
    use_own(use)
    from regard.native.processor import check_device
    from regard.pretrained.import_export import read_any_model

    check_device(device)
    folder = find_model(name_or_folder)
    model, config = read_any_model(folder, device)
    needed = missing(config.get("use"))
    if not isinstance(config["task"], str) or config["task"] not in TASKS:
        raise UsageError(
            f"{folder}: unknown task {config['task']!r}; "
            + (f"it needs {needed}" if needed else f"choose from {', '.join(TASKS)}")
        )
    task = "embed" if only_vectors(name_or_folder) else task
    if task not in (None, config["task"], "embed"):
        raise UsageError(f"task={task}: {folder} can run for {config['task']} or embed")
    with errors_in(f"{folder} needs {needed}") if needed else nullcontext():
        made = task_class(task or config["task"]).load(folder, model, config)
    made.family, made.path = config["family"], str(name_or_folder)
    if (folder / "recipe.json").exists():
        made.trained = Split.from_json(read_json(folder / "recipe.json").get("split"))
    return made


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
def train(name: "keys.Segment", /, **settings: "Unpack[keys.SegmentKeys]") -> "Report": ...
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
    data: "UserData | None" = None,
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
    callbacks: "Sequence[Callback]" = (),
    quiet: bool = False,
    use: Files = None,
    **settings: Any,
) -> "Report":
    """Train a model on data, or follow a recipe; the same call again goes on where it stopped.

    train("classify", data="reviews.tsv", minutes=5, out="runs/reviews")

    task_or_recipe  translate, language, text, classify, images, series, sounds, transcribe, tag,
                    caption, segment, pretrain, denoise, prefix; or a recipe of `regard recipes`;
                    or a TOML file of keys, or the folder of a run to repeat with changes
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
    callbacks       objects of subclasses of Callback, called as the run goes
    quiet           say nothing on stderr
    use             a file of your own parts, or several: use="mine.py"

    All further keys, such as from/to (source= and target= in Python), position, norm, warmup,
    label_smoothing or model.block.heads (as **{"model.block.heads": 8}), with their defaults:
    `regard train TASK --help`. What is not said follows from size, data and time.

    Returns a Report: folder, step, steps, finished, and the scores on the validation part by
    name, as in report["loss"].
    """
    use_own(use)
    settings |= not_none(
        data=data,
        valid=valid,
        test=test,
        out=out,
        init=init,
        size=size,
        minutes=minutes,
        steps=steps,
        epochs=epochs,
        lr=lr,
        batch_tokens=batch_tokens,
        dropout=dropout,
        seed=seed,
        device=device,
    )
    from regard.tasks.prepare import train as train_task

    with naming(task_or_recipe, settings):
        task, values, followed = plan(task_or_recipe, named_parts(settings))
        kind = task_class(task)
        return train_task(kind, values, quiet=quiet, recipe=followed, callbacks=callbacks)


@using
def compare(
    task_or_recipe: str,
    /,
    *,
    data: "UserData | None" = None,
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

    settings = named_parts(settings) | not_none(data=data, out=out, seeds=seeds, parallel=parallel)

    name, settings = unfold(task_or_recipe, settings)
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
    name, settings = unfold(name, settings)
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
        value: Any = settings.get(key)
        if key in settings:
            share = key != "data" and isinstance(value, float)
            found[key] = str(value) if share else on_disk(cast("UserData", value))
    return found


@using
def evaluate(
    model: "Place | Runner[Any]",
    /,
    *,
    data: "UserData | None" = None,
    part: str | None = None,
    against: Any = None,
    outputs: Place | None = None,
    device: str = "cpu",
    task: str | None = None,
    **settings: Any,
) -> "Evaluation":
    """Judge a model on data, alone or against another; every score comes with its signature.

    evaluate("en-zh", data="test.tsv", source="en", target="zh")["bleu"]

    model    a folder, a starter's name, or what `load` returned
    data     as for `train`; `part` of it is test (if not said), valid or train
    against  another model, or for translators a list of them: with a paired test
    outputs  a file for the model's answers, one line each
    device   cpu or cuda, for models that are named
    task     "embed" to judge the vectors of a model of another task

    Further keys by task: `regard eval MODEL --help`. Returns an Evaluation, whose scores are read
    by name, as in result["accuracy"]; shares such as accuracy and F1 are in percent.
    """
    from regard.pretrained.folder import is_foreign

    settings |= not_none(data=data, part=part, outputs=outputs)
    folder = find_model(model) if isinstance(model, str | Path) else None
    settings = materialise_data(settings)
    sets = {key: resolve_data(settings[key]) for key in ("data", "filters") if key in settings}
    settings |= sets
    loaded: Any = load(folder, device, task=task) if folder is not None else model
    other = against
    if isinstance(other, str) and not Path(other).is_dir():
        other = other.split(",")
    others = other if isinstance(other, list) else [] if other is None else [other]
    if len(others) > 1 and not loaded.several_against:
        raise UsageError(f"against= names {len(others)} models; one of {loaded.name} takes one")
    rivals = [
        load(one, device, task=task) if isinstance(one, str | Path) else one for one in others
    ]
    names = [str(model) if folder else "model", *map(str, others)]
    result = loaded.evaluate(settings, against=rivals, names=names)
    if folder is not None and folder.parent != starters_home() and not is_foreign(folder):
        result.keep(folder)
    return result


@using
def look(
    model: "Place | Runner[Any]",
    texts: Any = (),
    /,
    *,
    out: Place | None = None,
    layers: Any = None,
    heads: Any = None,
    device: str = "cpu",
    task: str | None = None,
    word: str | None = None,
    words: str | None = None,
    **settings: Any,
) -> "Shown | Saved | Drawing":
    """Draw where a model looks while it answers texts, or labels images given as `run` takes them.

    look("en-zh", "How are you?", out="attention.html")

    It is shown inline in a notebook, or saved to `out`: .html to explore, .png to print. `layers`
    and `heads` are numbers of those to draw. With `word` it is drawn how the vectors of a word in
    several texts move apart, layer by layer, with `words` those of several words as points in a
    plane; with movie=True what a training with watch_every= has
    kept is played. `cause`, `lens` and `patch` show what the answer depends on, what it would be
    after each layer, and where two inputs part; the numbers are in `findings`. Further keys by
    task: `regard look MODEL --help`.
    """
    from regard.insight.looking import look_at, play_movie

    if str(settings.get("movie", False)).lower() in ("true", "yes", "1"):
        return play_movie(model, texts, out, settings)
    if words is not None:
        from regard.insight.words import draw_words

        for key in (*settings, *not_none(layers=layers, heads=heads, word=word), *texts):
            raise UsageError(f"words= takes no '{key!s:.40}'; there is nothing to give but out=")
        drawing = draw_words(
            load(model, device, task=task) if isinstance(model, str | Path) else model, words
        )
        return drawing if out is None else replace(drawing, path=str(drawing.save(out)))
    if isinstance(texts, list | tuple) and not texts:
        raise UsageError('TEXT is missing; write for example: regard look en-zh "How are you?"')
    loaded = load(model, device, task=task) if isinstance(model, str | Path) else model
    if word is not None:
        settings["word"] = word
    return look_at(loaded, texts, settings, out=out, layers=layers, heads=heads)


def load_with_data(model: "Place | Runner[Any]", data: "UserData | None") -> tuple[Any, Any]:
    """A model, loaded if it is named, and the path of data for it, which may be in memory."""
    loaded = load(model) if isinstance(model, str | Path) else model
    return loaded, None if data is None else resolve_data(materialise_data({"data": data})["data"])


@using
def heads(
    model: "Place | Runner[Any]",
    /,
    *,
    data: "UserData | None" = None,
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
    asked = fill(HeadsSettings, settings | not_none(data=data, out=out))
    return measured(loaded, asked, quiet=quiet)


@using
def dictionary(
    model: "Place | Runner[Any]",
    /,
    *,
    at: str | None = None,
    data: "UserData | None" = None,
    out: Place | None = None,
    quiet: bool = True,
    **settings: Any,
) -> "Dictionary | Report":
    """Learn a sparse dictionary of features at a place of a model, and write a page of them.

    dictionary("shakespeare", at="blocks.2", data="play.txt", out="runs/features")["l0"]

    `at` is the path of a module, whose output is meant; `data` as for `train` with the model's
    task; `out` a folder, in which the same call goes on where it stopped. What a signal stops
    returns the report of a training. Further keys: `regard dictionary --help`, and those by which
    the task reads its data.
    """
    from regard.insight.dictionary import dictionary_of

    loaded, data = load_with_data(model, data)
    settings = materialise_data(settings) | not_none(at=at, data=data, out=out)
    return dictionary_of(loaded, settings, quiet=quiet)


@using
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
    settings |= not_none(size=size, image=image, length=length, batch=batch)
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

    settings |= not_none(out=out)
    return Saved(str(filter_photo(name, photo, settings)))


@using
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
    settings |= not_none(data=data)
    return find_directions(loaded, settings, out=out, load=load, quiet=quiet)


@using
def doctor(
    data: "UserData", /, *, quiet: bool = True, **settings: Any
) -> "Examined | ExaminedModel":
    """Examine data before training: faults with their remedy, and what a size will cost.

    Data for any task, in files or in memory; `task=` says which, else their looks do. At most some
    thousand rows are looked at, unless full=True. Further keys: `regard doctor --help`. Of a model
    (a starter or a run folder) it tells whether it is decoded natively, and if not, why.
    """
    from regard.data.in_memory import on_disk
    from regard.examine.doctor import DoctorSettings, ExaminedModel, examine

    own = fill(DoctorSettings, materialise_data(settings))
    if isinstance(data, str | Path):
        place = Path(data)
        if (place / "config.json").is_file() or (not place.exists() and is_starter(data)):
            return ExaminedModel.of(str(data), load(data))
    return examine(str(resolve_data(on_disk(data))), own, quiet)


@using
def verify(run: Place, /, **settings: Any) -> "Verified":
    """Prove on a copy of a run that it has the same bits whether it is stopped and resumed or not.

    verify("runs/mine", steps=20).exit_code == 0

    The copy goes on from a checkpoint of the run, or begins anew where none has so many steps left,
    with the data of the run, which must be as they were.
    """
    from regard.tasks.verify import VerifySettings
    from regard.tasks.verify import verify as verify_run

    asked, folder = fill(VerifySettings, settings), Path(run)
    if not (folder / "recipe.json").is_file():
        raise UsageError(f"{run}: no run of regard train, which has a recipe.json")
    task, values, followed = plan(str(run), {"out": str(run)})
    return verify_run(folder, task_class(task), values, followed, asked)


def import_model(folder: Place, /, *, out: Place | None = None, **settings: Any) -> Saved:
    """Write a public checkpoint as a folder of Regard's.

    It is a folder of Hugging Face's kind, whose weights may also be in pytorch_model.bin, or a GGUF
    file; both are read by a process of their own with little memory and time.
    """
    from regard.pretrained.import_export import import_checkpoint

    return Saved(str(import_checkpoint(folder, settings | not_none(out=out), _whole)))


@using
def export(model: Place, /, *, out: Place | None = None, **settings: Any) -> Saved:
    """Write a trained model in the words of another tool.

    export("runs/mine", out="exported")

    `format` is huggingface (with dtype, and max_shard in MB), ctranslate2 (with quantization) or
    onnx (with task="embed" for vectors), whose files are compared with the model before they are
    kept; or regard, with quantise="int8" for a model that writes texts: its card tells what that
    costs on `data`.
    """
    from regard.metrics.mixture import LINEAR_ALONE, MIXTURE_FILE
    from regard.pretrained.import_export import ExportSettings, export_model

    if "data" in settings:
        settings["data"] = resolve_data(materialise_data(settings)["data"])
    asked = ExportSettings.of(settings | not_none(out=out))
    if asked.format == "regard":
        from regard.tasks.frame.quantised import export_quantised

        return Saved(str(export_quantised(load(model), asked.out, asked.quantise, asked.data)))
    if asked.format == "onnx" and asked.out is not None:
        from regard.onnx import export_onnx

        return Saved(str(export_onnx(load(model, task=asked.task), asked.out)))
    folder = find_model(model)
    if (folder / MIXTURE_FILE).exists():
        raise UsageError(LINEAR_ALONE)
    return Saved(str(export_model(folder, asked, _whole)))


def _whole(folder: Path, model: "nn.Module", config: dict[str, Any]) -> Any:
    """Return an encoder of images within what it was trained by."""
    encoder: Any = task_class("pretrain").load(folder, model, config).predictor
    return encoder.whole()


def starters_home() -> Path:
    """Return where the models that ship with the package lie."""
    return Path(str(resources.files("regard"))) / "starters"


def list_models() -> Listing:
    """List the starters and the families that can be built."""
    from regard.models import MODELS, family

    shipped = {}
    for name, path in starters().items():
        told = read_json(path / "config.json")
        about = told.get("about_vectors" if name in _VECTORS else "about", "")
        shipped[name] = f"starter: {about} (weights under {told.get('licence', 'no licence')})"
    families = {
        name: f"family: {(family(name)[1].__doc__ or '').splitlines()[0]}" for name in MODELS
    }
    return Listing({**shipped, **families})
