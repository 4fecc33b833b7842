"""Sets of sounds in the format of a model: decoded once, with their transcripts or labels."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from regard.data.media_sets import (
    MediaRows,
    MediaSet,
    labels_of,
    load_media,
    note_broken,
    rounded_stats,
)
from regard.data.parts import PartsAsked
from regard.data.sound_files import Samples
from regard.data.sound_sets import (
    TARGETS,
    SoundFiles,
    SoundOptions,
    find_sound_parts,
)
from regard.data.spectrogram import SoundFormat
from regard.errors import lookup


class Sounds(MediaRows):
    """The sounds of a part with their transcripts or the numbers of their labels."""

    files: SoundFiles

    def __init__(
        self,
        files: SoundFiles,
        rows: np.ndarray,
        labels: Tensor,
        format: SoundFormat,
        lengths: np.ndarray,
        decoded: dict[int, np.ndarray],
    ):
        """Take which of the files they are; lengths and what is decoded are those of all files."""
        super().__init__(files, rows, labels)
        self.format, self.lengths, self.decoded = format, lengths, decoded

    def read(self, i: int) -> np.ndarray:
        """Samples (n,) of a sound, at the rate of the format."""
        row = int(self.rows[i])
        samples = self.decoded.get(row)
        return self.files.read(row, self.format.rate) if samples is None else samples

    def inputs(self, count: int) -> list[Samples]:
        """First sounds with their rate."""
        return [Samples(self.read(i), self.format.rate) for i in range(min(count, len(self)))]

    @property
    def texts(self) -> list[str]:
        """Transcripts."""
        return [item.text for item in self.items]

    @property
    def samples(self) -> np.ndarray:
        """Number of samples of each sound."""
        return self.lengths[self.rows]

    @property
    def seconds(self) -> np.ndarray:
        """Duration of each sound in seconds."""
        return self.samples / self.format.rate

    def feature_stats(self, most: int = 2000) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each filter, over sounds spread over the part."""
        some = range(0, len(self), max(1, -(-len(self) // most)))
        total, squares, count = np.zeros((3, self.format.mels))
        for i in some:
            features = self.format.log_mel(self.read(i)).double().numpy()
            total += features.sum(0)
            squares += (features**2).sum(0)
            count += len(features)
        mean = total / count
        std = np.sqrt(np.maximum(squares / count - mean**2, 0))
        return rounded_stats(mean, std)

    @property
    def sha(self) -> str:
        """Hash of the sounds with their transcripts and labels."""
        digest = hashlib.sha256()
        for item, label in zip(self.items, self.labels.tolist(), strict=True):
            digest.update(json.dumps([item.source, item.text, label]).encode() + b"\n")
        return digest.hexdigest()


@dataclass
class SoundData(MediaSet[Sounds]):
    """The sounds of each part, the names of their labels, and their format."""

    word = "sound"
    format: SoundFormat


def load_sounds(
    data: str,
    *,
    format: SoundFormat | None = None,
    options: SoundOptions | None = None,
    classes: Sequence[str] | None = None,
    **asked: Unpack[PartsAsked],
) -> SoundData:
    """Read the needed parts of a set; without one for validation, some are split off by hash.

    `classes` are the labels that are known, else they are those of train. Sounds are decoded once,
    and kept in memory as far as their bound allows.
    """
    options = options or SoundOptions()
    lookup("target", options.target, TARGETS)
    loaded = SoundData({}, (format or SoundFormat()).check(), classes=list(classes or []))

    def decode(name: str, files: SoundFiles) -> Sounds:
        return _decode_part(name, files, loaded, options)

    return load_media(loaded, data, find_sound_parts, decode, options, asked)


def _decode_part(name: str, files: SoundFiles, data: SoundData, options: SoundOptions) -> Sounds:
    """Decode a part, and number its labels."""
    labels = labels_of(files, data, options)
    lengths, decoded, broken = np.zeros(len(files), np.int64), {}, []
    for row, samples in enumerate(files.decode(data.format.rate, options.broken)):
        if isinstance(samples, str):
            broken.append(samples)
        elif isinstance(samples, int):
            lengths[row] = samples
        else:
            lengths[row], decoded[row] = len(samples), samples
    rows = np.flatnonzero(lengths)
    note_broken(data, name, len(broken), broken[0] if broken else "", len(rows))
    return Sounds(files, rows, labels[torch.from_numpy(rows)], data.format, lengths, decoded)
