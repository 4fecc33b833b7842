"""All modalities by name: the kinds of input that tasks read."""

from typing import Any

from regard.data.in_memory import UserData
from regard.modalities.base import Modality
from regard.modalities.image import IMAGE
from regard.modalities.series import SERIES
from regard.modalities.sound import SOUND
from regard.modalities.text import TEXT

MODALITIES: dict[str, Modality[Any]] = {each.name: each for each in (TEXT, IMAGE, SOUND, SERIES)}


def modality_of(
    data: UserData | None, columns: str | None = None, header: bool | None = None
) -> Modality[Any] | None:
    """Return the modality that data are a set of; None where they may be texts."""
    return next((m for m in MODALITIES.values() if m.holds(data, columns, header)), None)
