"""Series of numbers: arrays, and files that hold one or many."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from regard.data.in_memory import MemoryTable, on_disk
from regard.data.lines import missing
from regard.data.series import SeriesFormat
from regard.data.series_files import Recording, SeriesOptions, read_recordings, recording
from regard.errors import UsageError
from regard.modalities.base import LISTS, Choose, Found, Modality


class Series(Modality[Tensor]):
    """Series of vectors, or of larger arrays, with as many steps as each has."""

    name, key, one, many = "series", "series", "series", "series"
    columns = ("series",)

    def is_one(self, given: Any) -> bool:
        """Tell whether this is one series, a path or an array, rather than several."""
        one = isinstance(given, Recording) or super().is_one(given)
        return one and not isinstance(given, Mapping)

    def opened(self, file: Any) -> Any:
        """Return the path of an open file."""
        return on_disk(file)

    def recordings(
        self,
        path: str | Path | MemoryTable,
        format: SeriesFormat | None = None,
        columns: str | None = None,
    ) -> list[Recording]:
        """Return all series of a file, with labels or without, by the columns of the training."""
        return read_recordings(path, SeriesOptions(columns, None, False, format), [])

    def rows(
        self, rows: list[Mapping[str, Any]], column: Choose, format: Any = None, columns: Any = None
    ) -> list[Recording]:
        """Return the series that the rows of a table hold."""
        return self.recordings(MemoryTable(rows), format, columns)

    def check(
        self, given: Any, settings: Any = None, format: SeriesFormat | None = None
    ) -> Recording:
        """Return the series that is given: an array, a file, or one of a file as FILE:LINE."""
        if isinstance(given, Recording):
            return given
        if isinstance(given, str | Path) and given:
            named = re.fullmatch(r"(.+):\d+", str(given))
            within = bool(named) and not Path(given).exists()
            path = Path(named[1]) if named and within else Path(given)
            if not path.is_file():
                raise UsageError(missing(path))
            found = self.recordings(path, format, getattr(settings, "columns", None))
            some = [one for one in found if not within or one.where == str(given)]
            if len(some) != 1:
                where = found[0].where
                raise UsageError(f"{given}: {len(some)} series; name one of them, such as {where}")
            return some[0]
        try:
            values = np.asarray(given, dtype=np.float64)
        except (ValueError, TypeError):
            raise UsageError(f"{given!r:.60} is no series; give a path or an array") from None
        return recording(values[:, None] if values.ndim == 1 else values, "", "the series")

    def decode(
        self, given: Recording, format: SeriesFormat, notes: list[str] | None = None
    ) -> Tensor:
        """Return a series in the scale of a model."""
        return format.take(given.values, given.where)

    def found(self, path: str, format: Any = None, columns: str | None = None) -> Found | None:
        """Return the series of a file; lines of a list name some."""
        if os.path.isdir(path) or os.path.splitext(path)[1].lower() in LISTS:
            return None
        series = self.recordings(path, format, columns)
        if len(series) == 1:
            return Found([(path, None)])
        return Found(((one, None) for one in series), several=True)

    def columns_of(self, settings: Any) -> list[str]:
        """Return the names of the columns of a table of files, unless the user names others."""
        return [] if self.columns_asked(settings) else super().columns_of(settings)


SERIES = Series()
