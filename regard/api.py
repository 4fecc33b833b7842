"""All that the command line does, as functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from regard.errors import Mistake, nearest
from regard.models.folder import load_folder, read_json
from regard.recipes import RECIPES, data_folder, recipe
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


def load(name_or_folder: str | Path, /, device: str = "cpu") -> Any:
    """Load a trained model by its folder or a starter's name, ready to run."""
    folder = find_model(name_or_folder)
    model, config = load_folder(folder, device)
    path = folder / "generation_config.json"
    config["generation"] = read_json(path) if path.exists() else {}
    if not isinstance(config["task"], str) or config["task"] not in TASKS:
        raise Mistake(f"{folder}: unknown task {config['task']!r}; choose from {', '.join(TASKS)}")
    return runner(config["task"]).load(folder, model, config)


def train(task_or_recipe: str, /, *, quiet: bool = False, **settings: Any) -> Any:
    """Train a task on data, or follow a recipe; the same call again goes on where it stopped."""
    name = task_or_recipe
    if settings.get("init"):
        settings["init"] = str(find_model(settings["init"]))
    if name in RECIPES:
        found = recipe(name)
        values = {**found.SETTINGS, **settings}
        if "steps" in settings and "minutes" not in settings:
            values.pop("minutes", None)
        if "minutes" in settings and "steps" not in settings:
            values.pop("steps", None)
        values.setdefault("data", None)
        values["data"] = values["data"] or data_folder(found.DATA)
        values.setdefault("out", f"runs/{name}")
        return trainer(found.TASK).train(values, quiet=quiet, recipe=name)
    if name not in TASKS:
        names = sorted([*TASKS, *RECIPES])
        raise Mistake(
            f"unknown task or recipe '{name}'; choose from {', '.join(names)}."
            + nearest(name, names)
        )
    return trainer(name).train(settings, quiet=quiet)


def evaluate(model: Any, /, **settings: Any) -> Any:
    """Judge a model on data, alone or against another; every score comes with its signature."""
    folder = find_model(model) if isinstance(model, str | Path) else None
    loaded: Any = load(folder) if folder is not None else model
    other = settings.pop("against", None)
    against = load(other) if isinstance(other, str | Path) else other
    names = (str(model) if folder else "model", "" if other is None else str(other))
    result = loaded.evaluate(settings, against=against, names=names)
    if folder is not None and folder.parent != starters_home():
        result.keep(folder)
    return result


def look(
    model: Any, texts: str | Sequence[str], /, *, out: str | None = None, **settings: Any
) -> Any:
    """Draw where a model looks while it answers texts; shown inline in a notebook, or saved."""
    from regard.look import Look

    loaded = load(model) if isinstance(model, str | Path) else model
    layers, heads = settings.pop("layers", None), settings.pop("heads", None)
    texts = [texts] if isinstance(texts, str) else list(texts)
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
        from regard.look import Look, choose_views

        self.look = Look([choose_views(picture, layers, heads) for picture in seen.pictures])

    def _repr_html_(self) -> str:
        return self.look._repr_html_()

    def __str__(self) -> str:
        pictures = self.look.pictures
        told = [f"{picture.source} -> {picture.output}" for picture in pictures]
        return "\n".join([*told, "give out=attention.html or out=attention.png to see it"])


def doctor(data: str, /, **settings: Any) -> Any:
    """Examine data before training: faults with their remedy, and what a size will cost."""
    from regard.data.doctor import examine
    from regard.settings import fill
    from regard.tasks.forecast import DoctorSettings, Examined, forecast

    how = fill(DoctorSettings, settings)
    report = examine(
        data,
        source=how.source,
        target=how.target,
        columns=how.columns,
        valid=how.valid,
        test=how.test,
    )
    return Examined(report, forecast(report, how.size) if report.parts.get("train") else None)


def export(
    model: str, /, *, format: str | None = None, out: str | None = None, **settings: Any
) -> Any:
    """Write a trained model in the words of another tool."""
    formats = {"ctranslate2"}
    if format not in formats:
        raise Mistake(f"format={format}; choose from {', '.join(sorted(formats))}")
    if out is None:
        raise Mistake("out is missing; add out=FOLDER for the exported model")
    unknown = set(settings) - {"quantization"}
    if unknown:
        raise Mistake(f"unknown key '{min(unknown)}'; known are format, out, quantization")
    from regard.pretrained.ctranslate2 import export_ctranslate2

    loaded = load(model)
    place = export_ctranslate2(
        loaded.model,
        loaded.source_tokenizer,
        loaded.target_tokenizer,
        out,
        settings.get("quantization"),
    )
    return Saved(str(place))


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
    families = {name: f"family: {family(name)[1].__doc__}" for name in MODELS}
    return Listing({**shipped, **families})


def recipes() -> Listing:
    """List the recipes with what they promise."""
    return Listing({name: " ".join((recipe(name).__doc__ or "").split()) for name in RECIPES})
