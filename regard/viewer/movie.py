"""The training movie: pictures of the same inputs while a model learns, played by one page."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regard.errors import UsageError
from regard.files import read_json, write_atomically
from regard.viewer.html import MAX_WEIGHTS, as_data, subsampled, write_page
from regard.viewer.picture import Picture

FOLDER = "movie"  # of a run
MAX_FRAMES = 200
MAX_PROBES = 4
_MAX_PICTURE_WEIGHTS = MAX_WEIGHTS // (MAX_FRAMES * MAX_PROBES)
_NAME = re.compile(r"step-(\d{1,12})\.json")


def save_frame(run: Path, step: int, pictures: Sequence[Picture]) -> None:
    """Keep pictures of a step in the folder of a run."""
    shown = [subsampled(picture, _MAX_PICTURE_WEIGHTS) for picture in pictures]
    for picture in shown:
        total = sum(view.weights.size for view in picture.views)
        if total > _MAX_PICTURE_WEIGHTS:
            raise UsageError(
                f"{total:,} attention weights of a probe are too many for a movie, which keeps "
                f"{_MAX_PICTURE_WEIGHTS:,}; give shorter ones with probes="
            )
    data = {"step": step, "pictures": [as_data(picture, 255) for picture in shown]}
    write_atomically(run / FOLDER / f"step-{step}.json", json.dumps(data, ensure_ascii=False))


def frames(run: Path) -> dict[int, list[dict[str, Any]]]:
    """Pictures that a training has kept, by its steps."""
    names = [
        match for path in (run / FOLDER).glob("*.json") if (match := _NAME.fullmatch(path.name))
    ]
    if not names:
        raise UsageError(
            f"{run}: no pictures of its training were kept; train with watch_every=100 to keep some"
        )
    found: dict[int, list[dict[str, Any]]] = {}
    for match in sorted(names, key=lambda one: int(one[1]))[:MAX_FRAMES]:
        path = run / FOLDER / match[0]
        pictures = read_json(path).get("pictures")
        if not isinstance(pictures, list) or not all(
            isinstance(one, dict) and isinstance(one.get("views"), list) for one in pictures
        ):
            raise UsageError(f"{path}: no pictures in it; delete it, or train anew")
        found[int(match[1])] = pictures[:MAX_PROBES]
    fewest = min(map(len, found.values()))
    return {step: pictures[:fewest] for step, pictures in found.items()}


def movie_page(run: Path) -> str:
    """Write the pictures of a training as one page with a slider over its steps."""
    found = frames(run)
    pictures = [picture for some in found.values() for picture in some]
    return write_page(f"Training of {run.name}", {"pictures": pictures, "steps": list(found)})
