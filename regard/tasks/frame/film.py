"""Pictures of the same inputs while a model learns, for the page that plays them."""

from itertools import islice
from pathlib import Path
from typing import Any

import torch

from regard.data.lines import read_lines
from regard.data.pairs import Pair
from regard.data.parts import Dataset
from regard.errors import UsageError
from regard.tasks.frame.inputs import cut_inputs, first_inputs, read_picture
from regard.tasks.frame.settings import TrainSettings

_TOKENS = 32  # of a probe


class Film:
    """Keeps pictures of some inputs in the folder of a run, every so many steps."""

    def __init__(
        self, task: Any, data: Dataset[Any], settings: TrainSettings, folder: Path, steps: int
    ):
        from regard.viewer.movie import MAX_PROBES

        self.task, self.folder, self.asked = task, folder, settings.watch_every
        self.settle(steps)
        if settings.probes:
            inputs = [as_input(line) for line in probes_in(settings.probes, MAX_PROBES)]
        else:
            inputs = first_inputs(task, data, "valid", MAX_PROBES)
        self.inputs = cut_inputs(task, inputs, _TOKENS, MAX_PROBES)

    def settle(self, steps: int) -> None:
        """Choose how often pictures are taken in a run of so many steps."""
        from regard.viewer.movie import MAX_FRAMES

        self.every = self.asked * -(-steps // (self.asked * MAX_FRAMES))

    @torch.inference_mode()
    def __call__(self, step: int) -> None:
        """Take the pictures of a step."""
        from regard.viewer.movie import save_frame

        save_frame(self.folder, step, [read_picture(self.task, one) for one in self.inputs])


def probes_in(path: str, most: int) -> list[str]:
    """Return the first lines of a file of inputs."""
    lines = list(islice((line for _, line in read_lines(path) if line.strip()), most))
    if not lines:
        raise UsageError(f"probes={path}: no input in it; expected one a line")
    return lines


def as_input(line: str) -> Any:
    """Return a line as an input: itself, or a source and its target with a TAB between them."""
    source, tab, target = line.partition("\t")
    return Pair(source, target.partition("\t")[0], "probes") if tab else line
