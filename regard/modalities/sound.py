"""Sounds: files, and samples with their rate."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from regard.data.media import cell_file
from regard.data.sound_files import SUFFIXES, Samples
from regard.data.sound_sets import listed_sounds
from regard.data.spectrogram import SoundFormat
from regard.errors import UsageError, log
from regard.modalities.base import TABLES, Found, Modality


class Sounds(Modality[np.ndarray]):
    """Sounds as samples (n,) in the rate of a model."""

    name, key, one, many = "sound", "audio", "sound", "sounds"
    suffixes = frozenset(SUFFIXES)
    columns = ("audio", "path", "file", "filename", "file_name")
    targets = ("text", "transcript", "sentence")

    def is_one(self, given: Any) -> bool:
        """Tell whether this is one sound, samples with their rate too, rather than several."""
        return super().is_one(given) or with_rate(given) is not None

    def check(self, given: Any, settings: Any = None, format: SoundFormat | None = None) -> Any:
        """Return a path, the bytes of a file or samples, or refuse what is none of these.

        Samples come with their rate, or have the one that rate= says, or else the model's.
        """
        array, rate = with_rate(given) or (given, getattr(settings, "rate", None))
        if isinstance(array, Tensor):
            array = array.detach().cpu().numpy()
        if isinstance(array, np.ndarray):
            own = (format or SoundFormat()).rate
            if rate is None:
                log(
                    f"an array of samples is taken for {own:,} a second, as the model hears; if it "
                    "has others, give rate= or (array, rate)"
                )
            return Samples(array, rate or own)
        given = cell_file(given)
        if not isinstance(given, str | Path | bytes):
            raise UsageError(
                f"{given!r:.60} is no sound; give a path, or samples with their rate as "
                "(array, rate)"
            )
        return given

    def decode(self, given: Any, format: SoundFormat, notes: list[str] | None = None) -> np.ndarray:
        """Return the samples of a sound."""
        return format.read(given)

    def found(self, path: str, format: Any = None, columns: str | None = None) -> Found | None:
        """Return the sounds of a folder or a table, which names them from its own folder on."""
        if os.path.isfile(path) and os.path.splitext(path)[1].lower() in (*TABLES, ".jsonl"):
            return Found(listed_sounds(Path(path)), rows=True)
        return super().found(path)

    def columns_of(self, settings: Any) -> list[str]:
        """Return the names of the columns that are trained on, where the user names them."""
        return self.columns_asked(settings)


def with_rate(given: Any) -> Samples | None:
    """Return samples that came with their rate: (array, rate), or as datasets has them."""
    if isinstance(given, Mapping) and {"array", "sampling_rate"} <= given.keys():
        given = given["array"], given["sampling_rate"]
    if not isinstance(given, tuple) or len(given) != 2:
        return None
    array, rate = given if hasattr(given[0], "__array__") and np.ndim(given[0]) else given[::-1]
    if isinstance(array, list):
        array = np.asarray(array, np.float64)
    number = isinstance(rate, int | float | np.number) and rate == int(rate)
    return Samples(array, int(rate)) if number and np.ndim(array) else None


SOUND = Sounds()
