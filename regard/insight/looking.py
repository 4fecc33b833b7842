"""What `regard look` shows beside attention: causes, the lens of each layer, and patching."""

from collections.abc import Mapping, Sequence
from typing import Any

from regard.errors import UsageError
from regard.insight.causes import find_causes, parse_cuts, pictures_of
from regard.viewer.picture import Picture

KINDS = ("cause", "lens", "patch")


def asks(settings: Mapping[str, Any]) -> bool:
    """Tell whether settings of look ask for more than attention."""
    return any(str(settings.get(kind, "none")).lower() not in OFF for kind in KINDS)


OFF = ("none", "false", "no", "0")


def look_into(
    task: Any, inputs: Sequence[Any], settings: Mapping[str, Any], layers: Any = None
) -> tuple[list[Picture], list[Any]]:
    """Return the pictures of what was asked for, and the findings that they show."""
    given = {
        key: str(value).lower() if key == "cause" else value for key, value in settings.items()
    }
    asked = task.look_settings(given)
    kinds = [kind for kind in KINDS if str(getattr(asked, kind)).lower() not in OFF]
    if len(kinds) > 1:
        raise UsageError(f"{' and '.join(f'{kind}=' for kind in kinds)} are shown one at a time")
    pictures: list[Picture] = []
    findings: list[Any] = []
    with task.using(asked):
        for one in inputs:
            causes, picture = find_causes(task, one, asked, parse_cuts(asked.cause), layers=layers)
            pictures += pictures_of(causes, picture)
            findings.append(causes)
    return pictures, findings


def shown_in(pictures: Sequence[Picture], out: Any) -> list[Picture]:
    """Return what a file holds: a page all pictures, a PNG the first of one input."""
    png = out is not None and str(out).lower().endswith(".png")
    whole = [picture for picture in pictures if picture.effects is not None]
    return whole if png and len(whole) == 1 else list(pictures)
