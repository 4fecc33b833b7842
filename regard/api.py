"""All that the command line does, as functions."""

from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from regard import __version__
from regard.errors import Mistake, nearest
from regard.models.folder import load_folder, read_json
from regard.recipes import RECIPES, data_folder, found_data, recipe
from regard.tasks import TASKS, runner, trainer


def starters() -> dict[str, Path]:
    """Return the models that ship with the package."""
    return {p.name: p for p in sorted(starters_home().iterdir()) if (p / "config.json").exists()}


def find_model(name: str | Path) -> Path:
    """Return the folder of a model given by its path or a starter's name."""
    shipped = starters()
    if str(name) in shipped and not Path(name).is_dir():
        return shipped[str(name)]
    if not Path(name).is_dir():
        raise Mistake(
            f"no model '{name}': neither a folder nor a starter ({', '.join(shipped) or 'none'})."
            + nearest(str(name), shipped)
        )
    return Path(name)


def load(name_or_folder: str | Path, /, device: str = "cpu", task: str | None = None) -> Any:
    """Load a trained model by its folder or a starter's name, ready to run.

    It runs as the task that it is made for; task="embed" takes its vectors instead.
    """
    from regard.pretrained.folder import is_foreign, read_generation

    folder = find_model(name_or_folder)
    if is_foreign(folder):
        model, config, _ = _import(folder, device)
        config["generation"] = read_generation(folder, config["task"])
    else:
        model, config = load_folder(folder, device)
        path = folder / "generation_config.json"
        config["generation"] = read_json(path) if path.exists() else {}
    if not isinstance(config["task"], str) or config["task"] not in TASKS:
        raise Mistake(f"{folder}: unknown task {config['task']!r}; choose from {', '.join(TASKS)}")
    if task not in (None, config["task"], "embed"):
        raise Mistake(f"task={task}: {folder} can run for {config['task']} or embed")
    return runner(task or config["task"]).load(folder, model, config)


def model_task(name_or_folder: str | Path) -> str:
    """Return the task of a model, without loading it."""
    from regard.pretrained.folder import is_foreign

    folder = find_model(name_or_folder)
    if is_foreign(folder):
        return load(folder).task
    task = read_json(folder / "config.json").get("task")
    if not isinstance(task, str) or task not in TASKS:
        raise Mistake(f"{folder}: unknown task {task!r:.40}; choose from {', '.join(TASKS)}")
    return task


def train(task_or_recipe: str, /, *, quiet: bool = False, **settings: Any) -> Any:
    """Train a task on data, or follow a recipe; the same call again goes on where it stopped."""
    task, values, followed = plan(task_or_recipe, settings)
    return trainer(task).train(values, quiet=quiet, recipe=followed)


def compare(task_or_recipe: str, /, *, quiet: bool = False, **settings: Any) -> Any:
    """Train variants of a task or recipe, every key with several values varied, and compare them.

    The same call again goes on where it stopped.
    """
    from regard.tasks.compare import compare

    name = task_or_recipe
    task, followed = task_of(name), recipe(name) if name in RECIPES else None
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
        raise Mistake(
            f"unknown task or recipe '{name}'; choose from {', '.join(sorted(TASKS))}, or what "
            f"regard recipes lists.{nearest(name, [*TASKS, *RECIPES])}"
        )
    return name


def plan(name: str, settings: dict[str, Any]) -> tuple[str, dict[str, Any], str | None]:
    """Return the task to train, all settings, and the recipe that is followed, if one is."""
    values = dict(settings)
    if values.get("data"):
        values["data"] = found_data(values["data"])
    if values.get("init"):
        values["init"] = str(find_model(values["init"]))
    task = task_of(name)
    if name not in RECIPES:
        return task, values, None
    found = recipe(name)
    rows = getattr(found, "ROWS", {})
    like = str(values.get("like") or found.SETTINGS.get("like"))
    values = {**found.SETTINGS, **rows.get(like, {}), **values}
    if "steps" in settings and "minutes" not in settings:
        values.pop("minutes", None)
    if "minutes" in settings and "steps" not in settings:
        values.pop("steps", None)
    values["data"] = values.get("data") or data_folder(found.DATA)
    values.setdefault("out", f"runs/{name}")
    return task, values, name


def evaluate(model: Any, /, **settings: Any) -> Any:
    """Judge a model on data, alone or against another; every score comes with its signature."""
    from regard.pretrained.folder import is_foreign

    folder = find_model(model) if isinstance(model, str | Path) else None
    sets = {key: found_data(settings[key]) for key in ("data", "filters") if key in settings}
    settings |= sets
    task = settings.pop("task", None)
    loaded: Any = load(folder, task=task) if folder is not None else model
    other = settings.pop("against", None)
    if isinstance(other, str) and not Path(other).is_dir():
        other = other.split(",")
    others = other if isinstance(other, list) else [other]
    if len(others) > 1 and not getattr(loaded, "takes_several", False):
        raise Mistake(f"against= names {len(others)} models; one of {loaded.task} takes one")
    found = [load(one, task=task) if isinstance(one, str | Path) else one for one in others]
    names = (str(model) if folder else "model", *("" if x is None else str(x) for x in others))
    result = loaded.evaluate(settings, against=found if len(found) > 1 else found[0], names=names)
    if folder is not None and folder.parent != starters_home() and not is_foreign(folder):
        result.keep(folder)
    return result


def look(model: Any, texts: Any, /, *, out: str | None = None, **settings: Any) -> Any:
    """Draw where a model looks while it answers texts, or labels images given as `run` takes them.

    It is shown inline in a notebook, or saved as .html or .png.
    """
    from regard.viewer import Look

    task = settings.pop("task", None)
    loaded = load(model, task=task) if isinstance(model, str | Path) else model
    layers, heads = settings.pop("layers", None), settings.pop("heads", None)
    arrays = ("__array__", "__array_interface__")
    if isinstance(texts, str | Path) or any(hasattr(texts, name) for name in arrays):
        texts = [texts]
    seen = Look([loaded.picture(text, **settings) for text in texts])
    if out is None:
        return Shown(seen, layers, heads)
    return Saved(str(seen.save(out, layers, heads)))


@dataclass(frozen=True)
class Saved:
    """A file that was written."""

    path: str

    def __str__(self) -> str:
        return f"wrote {self.path}"


class Shown:
    """Pictures of chosen layers and heads, which show themselves in a notebook."""

    def __init__(self, seen: Any, layers: Any, heads: Any):
        from regard.viewer import Look, choose_views

        self.look = Look([choose_views(picture, layers, heads) for picture in seen.pictures])

    def _repr_html_(self) -> str:
        return self.look._repr_html_()

    def __str__(self) -> str:
        pictures = self.look.pictures
        told = [f"{picture.source} -> {picture.output}" for picture in pictures]
        return "\n".join([*told, "give out=attention.html or out=attention.png to see it"])


def cost(model: Any, /, **settings: Any) -> Any:
    """Count what a model takes to read and to learn: one of ours by name or folder, or a module.

    The name lectures stands for the tables of the lectures.
    """
    from regard.costs.lectures import lectures
    from regard.costs.report import cost, cost_of

    if not isinstance(model, str | Path):
        return cost_of(model, settings)
    if str(model) == "lectures":
        return lectures(settings)
    known = Path(model).is_dir() or str(model) in starters()
    return cost(str(model), find_model(model) if known else None, settings)


def filter(name: str, photo: str | Path, /, *, quiet: bool = True, **settings: Any) -> Any:
    """Smooth a photo by a filter of some name, or draw the comparison or the grid of them."""
    from regard.tasks.filtering import filter_photo

    return filter_photo(name, photo, settings, quiet=quiet)


def doctor(data: str, /, *, quiet: bool = True, **settings: Any) -> Any:
    """Examine data before training: faults with their remedy, and what a size will cost."""
    from regard.data.doctor import examine
    from regard.data.image import holds_images
    from regard.data.image_doctor import examine_images
    from regard.settings import fill
    from regard.tasks.forecast import DoctorSettings, Examined, forecast, forecast_images

    how, data = fill(DoctorSettings, settings), found_data(data)
    rest = {"columns": how.columns, "valid": how.valid, "test": how.test}
    pictures = holds_images(data)
    if pictures and (how.source or how.target):
        raise Mistake(f"{data}: from= and to= are for texts, these are images; leave them out")
    if pictures:
        report = examine_images(data, quiet=quiet, **rest)
    else:
        report = examine(data, source=how.source, target=how.target, **rest)
    train = report.parts.get("train")
    told = forecast_images if pictures else forecast
    return Examined(report, told(report, how.size) if train else None)


def import_model(folder: str | Path, /, *, out: str | None = None, **settings: Any) -> Saved:
    """Write a public checkpoint (a folder of Hugging Face's kind) as a folder of Regard's."""
    from regard.files import making, write_atomically
    from regard.models.folder import save_config, save_parts, save_weights
    from regard.pretrained.folder import is_foreign, read_generation, write_json
    from regard.tasks.tokenizer import save_any_tokenizers

    if settings:
        raise Mistake(f"unknown key '{min(settings)}'; known is out")
    if out is None:
        raise Mistake("out is missing; add out=FOLDER for the imported model")
    if not Path(folder).is_dir():
        raise Mistake(f"{folder}: no such folder; expected one with config.json and weights")
    if not is_foreign(folder):
        read_json(Path(folder) / "config.json")
        raise Mistake(f"{folder}: its config.json names no model_type; expected that of others")
    model, config, tokenizers = _import(Path(folder))
    known = ("regard_format", "family", "task", "model")
    about = {key: value for key, value in config.items() if key not in known}
    with making(out) as partial:
        save_weights(partial, dict(model.named_parameters()))
        if "pretraining" in config:
            save_parts(partial, dict(_whole(Path(folder), model, config).named_parameters()))
        if tokenizers[0] is not None:  # a model that reads images has none
            save_any_tokenizers(partial, tokenizers)
            write_json(partial / "generation_config.json", read_generation(folder, config["task"]))
        write_atomically(partial / "README.md", _card(config, model))
        save_config(partial, model, name=config["family"], task=config["task"], about=about)
    return Saved(out)


def _whole(folder: Path, model: Any, config: dict[str, Any]) -> Any:
    """Return an encoder of images within what it was trained by."""
    return runner("pretrain").load(folder, model, config).whole()


def _card(config: dict[str, Any], model: Any) -> str:
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
    from regard.tasks.tokenizer import load_any_tokenizers

    return import_folder(folder, device, load_any_tokenizers)


# format -> the settings it takes beside out
EXPORTS = {"ctranslate2": ("quantization",), "huggingface": ("dtype", "max_shard")}


def export(
    model: str, /, *, format: str | None = None, out: str | None = None, **settings: Any
) -> Saved:
    """Write a trained model in the words of another tool."""
    if format not in EXPORTS:
        raise Mistake(f"format={format}; choose from {', '.join(sorted(EXPORTS))}")
    if out is None:
        raise Mistake("out is missing; add out=FOLDER for the exported model")
    unknown = set(settings) - set(EXPORTS[format])
    if unknown:
        known = ", ".join(("format", "out", *EXPORTS[format]))
        raise Mistake(f"unknown key '{min(unknown)}'; known are {known}")
    if format == "huggingface":
        return _export_huggingface(find_model(model), out, **settings)
    from regard.pretrained.ctranslate2 import export_ctranslate2

    loaded = load(model)
    if loaded.task != "translate":
        raise Mistake(f"CTranslate2 takes a model for translate from us, not one for {loaded.task}")
    place = export_ctranslate2(
        loaded.model,
        loaded.source_tokenizer,
        loaded.target_tokenizer,
        out,
        settings.get("quantization"),
    )
    return Saved(str(place))


def _export_huggingface(
    folder: Path, out: str, *, dtype: str = "float32", max_shard: Any = None
) -> Saved:
    """Write a model as transformers' AutoModel and AutoTokenizer read it; max_shard is in MB."""
    from regard.files import making
    from regard.pretrained.folder import export_weights, is_foreign
    from regard.tasks.tokenizer import export_tokenizers, load_any_tokenizers

    if max_shard is not None:
        if not str(max_shard).isdecimal() or not 0 < int(max_shard) <= 10**6:
            raise Mistake(f"max_shard={max_shard}; expected MB of a file, such as 5000")
        max_shard = int(max_shard) * 10**6
    if is_foreign(folder):
        model, config, tokenizers = _import(folder)
    else:
        model, config = load_folder(folder)
        reads_text = "image" not in config
        tokenizers = load_any_tokenizers(folder) if reads_text else (None, None)
    with making(out) as partial:
        sizes: dict[str, Any] = {"dtype": dtype, "max_shard": max_shard}
        told = config.get("pretraining")
        if isinstance(told, dict) and told.get("by") == "mae":
            sizes["whole"] = _whole(folder, model, config)
        export_weights(model, config, tokenizers, partial, **sizes)
        if tokenizers[0] is not None:
            export_tokenizers(partial, tokenizers, config)
    return Saved(out)


def starters_home() -> Path:
    """Return where the models that ship with the package lie."""
    return Path(str(resources.files("regard"))) / "starters"


class Listing(dict):
    """Names with a line on each."""

    def __str__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{name:{width}}  {line}" for name, line in self.items())


def models() -> Listing:
    """List the starters and the families that can be built."""
    from regard.models import MODELS, family

    shipped = {
        name: f"starter: {read_json(path / 'config.json').get('about', '')}"
        for name, path in starters().items()
    }
    families = {
        name: f"family: {(family(name)[1].__doc__ or '').splitlines()[0]}" for name in MODELS
    }
    return Listing({**shipped, **families})


def recipes() -> Listing:
    """List the recipes with what they promise."""
    return Listing({name: " ".join((recipe(name).__doc__ or "").split()) for name in RECIPES})
