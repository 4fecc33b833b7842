"""All modalities by name: the kinds of input that tasks read."""

from typing import Any

from regard.modalities.base import Modality
from regard.modalities.image import IMAGE
from regard.modalities.series import SERIES
from regard.modalities.sound import SOUND
from regard.modalities.text import TEXT

MODALITIES: dict[str, Modality[Any]] = {each.name: each for each in (TEXT, IMAGE, SOUND, SERIES)}
