"""What `regard look` shows beside attention: causes, the lens of each layer, and patching."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from regard.errors import UsageError
from regard.files import write_atomically
from regard.insight.causes import find_causes, parse_cuts, pictures_of
from regard.insight.lens import find_lens
from regard.insight.patching import find_patches
from regard.insight.words import compare_word
from regard.metrics.results import Saved
from regard.tasks.frame.settings import RunSettings
from regard.viewer.drawing import Drawing
from regard.viewer.movie import movie_page
from regard.viewer.notebook import Look
from regard.viewer.picture import Picture, choose_views

_KINDS = ("cause", "lens", "patch")


def asks(settings: Mapping[str, Any]) -> bool:
    """Tell whether settings of look ask for more than attention."""
    return any(str(settings.get(kind, "none")).lower() not in _OFF for kind in _KINDS)


_OFF = ("none", "false", "no", "0")


def look_into(
    task: Any, inputs: Sequence[Any], settings: Mapping[str, Any], layers: Any = None
) -> tuple[list[Picture], list[Any]]:
    """Return the pictures of what was asked for, and the findings that they show."""
    if "cause" in settings:
        settings = {**settings, "cause": str(settings["cause"]).lower()}  # True is "true"
    asked = task.look_settings(settings)
    kinds = [kind for kind in _KINDS if str(getattr(asked, kind)).lower() not in _OFF]
    if len(kinds) > 1:
        raise UsageError(f"{' and '.join(f'{kind}=' for kind in kinds)} are shown one at a time")
    pictures: list[Picture] = []
    findings: list[Any] = []
    with task.using(asked):
        if asked.patch:
            if len(inputs) != 2:
                raise UsageError(f"patch=true compares two inputs; {len(inputs)} are given")
            patched, picture = find_patches(task, inputs[0], inputs[1], asked)
            return [picture], [patched]
        for one in inputs:
            if asked.lens:
                seen, some = find_lens(task, one, asked)
            else:
                cuts = parse_cuts(asked.cause)
                seen, picture = find_causes(task, one, asked, cuts, layers=layers)
                some = pictures_of(seen, picture)
            pictures += some
            findings.append(seen)
    return pictures, findings


def shown_in(pictures: Sequence[Picture], out: Any) -> list[Picture]:
    """Return what a file holds: a PNG what is drawn of one input, a page what can be explored."""
    if out is not None and str(out).lower().endswith(".png"):
        drawn = [each for each in pictures if each.effects is not None]
        return drawn or [each for each in pictures if each.tables]
    return [each for each in pictures if each.views or each.steps]


class Shown:
    """Pictures of chosen layers and heads, which show themselves in a notebook."""

    def __init__(self, seen: Any, layers: Any, heads: Any, findings: Any = ()):
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


def look_at(
    task: Any,
    texts: Any,
    settings: dict[str, Any],
    *,
    out: str | Path | None = None,
    layers: Any = None,
    heads: Any = None,
) -> Shown | Saved | Drawing:
    """Draw where a loaded model looks, or what else the settings ask for.

    Args:
        task: the model.
        texts: its inputs.
        settings: those of look; with `word`, its vectors in the inputs are compared, and nothing
            else is set.
        out: file to write; without one the pictures are returned.
        layers: numbers of those to draw.
        heads: the same of heads.
    """
    texts, _ = task.inputs_of(texts, RunSettings(settings.get("columns")))
    if "word" in settings:
        word = settings.pop("word")
        drawn = {"layers": layers, "heads": heads}
        for key in (*settings, *(key for key, value in drawn.items() if value is not None)):
            raise UsageError(f"unknown key '{key}'; with word= there is nothing to set but out=")
        drawing = compare_word(task, list(texts), word)
        return drawing if out is None else replace(drawing, path=str(drawing.save(out)))
    findings: list[Any] = []
    if asks(settings):
        pictures, findings = look_into(task, texts, settings, layers)
        seen, layers, heads = Look(shown_in(pictures, out)), None, None
    else:
        kinds = hypotheses_of(task, settings, out)
        seen = Look(
            [task.picture(text, **{**settings, **kind}) for text in texts for kind in kinds]
        )
    if out is None:
        return Shown(seen, layers, heads, findings)
    return Saved(str(seen.save(out, layers, heads)), tuple(findings))


def hypotheses_of(
    task: Any, settings: Mapping[str, Any], out: str | Path | None
) -> list[dict[str, int]]:
    """What each picture of an input adds to the settings: the number of a hypothesis, if several.

    A PNG holds one picture, and a tree has all hypotheses in it already.
    """
    asked = task.look_settings(settings)
    count = getattr(asked, "n_best", 1) if getattr(asked, "hypothesis", 1) is None else 1
    if count == 1 or asked.beams or str(out).lower().endswith(".png"):
        return [{}]
    return [{"hypothesis": number} for number in range(1, count + 1)]


def play_movie(
    model: Any, texts: Any, out: str | Path | None, settings: Mapping[str, Any]
) -> Saved:
    """Write the page that plays the pictures of a training."""
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
