"""What `regard look` shows beside attention: causes, the lens of each layer, and patching."""

from collections.abc import Mapping, Sequence
from typing import Any

from regard.errors import UsageError
from regard.insight.causes import find_causes, parse_cuts, pictures_of
from regard.insight.lens import find_lens
from regard.insight.patching import find_patches
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
    if "cause" in settings:
        settings = {**settings, "cause": str(settings["cause"]).lower()}  # True is "true"
    asked = task.look_settings(settings)
    kinds = [kind for kind in KINDS if str(getattr(asked, kind)).lower() not in OFF]
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
