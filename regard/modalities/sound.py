"""Sounds: files, and samples with their rate."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from regard.attention.watch import watch
from regard.data.augment import smoothed
from regard.data.in_memory import UserData
from regard.data.marks import excerpt
from regard.data.media import cell_file, digest, in_threads
from regard.data.parts import PartsAsked
from regard.data.sound_batches import SoundBatches, pad_sounds
from regard.data.sound_files import SOUND_SUFFIXES, BrokenSound, Samples
from regard.data.sound_sets import (
    SOUNDS,
    SoundFiles,
    SoundOptions,
    find_sound_parts,
    holds_sounds,
    listed_sounds,
)
from regard.data.sounds import SoundData, Sounds, load_sounds
from regard.data.spectrogram import SoundFormat
from regard.decode.speech.ctc_align import alignable
from regard.errors import UsageError, log
from regard.layers.layout import time_grid
from regard.metrics.outliers import STRANGERS
from regard.modalities.base import (
    MEANT,
    TABLES,
    Describe,
    DrawnInput,
    ExamineOptions,
    Finding,
    FoundInputs,
    Inputs,
    LabelledBatch,
    Modality,
    Survey,
    class_counts,
    first_targets,
    link_or_write,
    made_up_text,
    odd_characters,
    plural,
    spread,
)
from regard.modalities.tokens import InputTokens, grid_keys, window_keys
from regard.models.conformer import ConformerConfig
from regard.models.protocols import ModelConfig
from regard.models.whisper import WhisperConfig
from regard.training.progress import Progress
from regard.viewer.picture import Picture, Recording
from regard.viewer.settings import SoundLookSettings

_MOST_CELLS = 100  # of a window, which are cut one by one
_LOOK_SECONDS = 60.0  # of a sound that is looked at: its attention grows with the square
_MOST_FRAMES = 160  # of a spectrogram on a page of features
_TRANSCRIPT = 64  # tokens of a transcript
_SILENT = 1e-3  # of full scale: 60 dB below it
_FULL_SCALE = 0.999  # of full scale
_CLIPPED = 1e-3  # share of samples at full scale in a sound that is clipped
SHORT, _LONG = 0.1, 30.0  # seconds of a sound that hardly can be meant, and that takes much memory
_SLOW = 0.5  # characters a second, in a sound of which much is not written down
_STRIDE = 4  # spectrogram frames that a frame of the usual encoder stands for


@dataclass
class SoundCounts:
    """The size of one part of a set of sounds."""

    sounds: int
    bad: int
    seconds: float
    rates: dict[int, int]
    classes: dict[str, int] = field(default_factory=dict)
    words: int = 0
    total: int = 0  # how many there are, where not all were looked at

    def __str__(self) -> str:
        rates = sorted(self.rates)
        hertz = f"{rates[0]:,} Hz" if len(rates) == 1 else f"{rates[0]:,} to {rates[-1]:,} Hz"
        of = f" of {len(self.classes):,} class{'es' * (len(self.classes) != 1)}"
        return (
            f"{self.sounds:>10,} sounds{of if self.classes else ''}, {hertz}, "
            f"{self.seconds / 60:,.1f} minutes, {self.seconds / self.sounds:.1f} seconds on average"
            + (f", {self.words:,} words" if self.words else "")
            + (f"; about {self.total:,} in all" if self.total > self.sounds else "")
            + (f", {plural(self.bad, 'bad file')}" if self.bad else "")
        )


class Measured(NamedTuple):
    """What decoding a sound shows."""

    seconds: float
    loudest: float  # of full scale
    clipped: float  # share of samples at full scale
    source: str  # a hash of its samples, whatever file they came from


class Part(NamedTuple):
    """A part of which every sound can be read."""

    name: str
    files: SoundFiles
    measured: list[Measured]


_BANDS = 10, 40  # stretches and bands of a sound that a linear model reads


class SoundModality(Modality[np.ndarray, SoundFormat, SoundData]):
    """Sounds as samples (n,) in the rate of a model."""

    name, key, one, many = "sound", "audio", "sound", "sounds"
    suffixes = frozenset(SOUND_SUFFIXES)
    columns = ("audio", "path", "file", "filename", "file_name")
    tasks = {"label": "sounds", "text": "transcribe"}
    counted, unit = "sounds", "frames"
    targets = ("text", "transcript", "sentence")
    baseline, baseline_rows = "a linear model of band energies", 20_000
    Format, format_keys = SoundFormat, "rate, mels, window, hop"
    agrees = "mels", "mel filters"

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

    def decode(
        self,
        given: Path | str | bytes | np.ndarray | Samples,
        format: SoundFormat,
        notes: list[str] | None = None,
    ) -> np.ndarray:
        """Return the samples of a sound."""
        return format.read(given)

    def found(
        self, path: str, format: SoundFormat | None = None, columns: str | None = None
    ) -> FoundInputs | None:
        """Return the sounds of a folder or a table, which names them from its own folder on."""
        if os.path.isfile(path) and os.path.splitext(path)[1].lower() in (*TABLES, ".jsonl"):
            return FoundInputs(listed_sounds(Path(path)), rows=True)
        return super().found(path)

    def columns_of(self, settings: Any) -> list[str]:
        """Return the names of the columns that are trained on, where the user names them."""
        return self.columns_asked(settings)

    def holds(
        self, data: UserData | None, columns: str | None = None, header: bool | None = None
    ) -> bool:
        """Tell whether data are sounds: a table of paths, or class folders."""
        return holds_sounds(data)

    def guess(self, path: Path, columns: str | None, header: bool | None) -> tuple[str, str]:
        """Tell labels, which repeat, from transcripts."""
        if SOUNDS.kind_of_set(path) != "table":
            if SOUNDS.told_in(path) == "text":
                return "text", "sounds in tars with texts"
            return "label", "sounds in folders"
        targets = first_targets(path, columns, header)
        if len(targets) < 6 or 3 * len(set(targets)) > len(targets):
            return "text", "a table of sounds and texts"
        return "label", "a table of sounds with labels that repeat"

    def parts(self, data: str, asked: ExamineOptions) -> Any:
        """Find what reads the files of each part."""
        how = {"header": asked.header, "most": asked.most, "pattern": asked.pattern}
        options = SoundOptions(asked.target, columns=asked.columns, broken="skip", **how)
        return find_sound_parts(data, asked.valid, asked.test, options)

    def survey(self, name: str, files: SoundFiles, asked: ExamineOptions) -> Survey:
        """Decode all sounds of a part, and tell of their levels, lengths and texts."""
        part, notes = _readable(name, files, asked.quiet), files.notes
        total, files = max(files.total, len(files)), part.files
        if not len(files):
            return Survey(None, [], None, [], notes, files.bad)
        findings = [*_levels(part), *(_texts(part) if asked.target == "text" else ())]
        items = [
            item._replace(source=one.source)
            for item, one in zip(files.items, part.measured, strict=True)
        ]
        sample = files.pick(spread(len(files)))
        return Survey(_counts(part, total), items, sample, findings, notes, files.bad)

    def compare(self, data: str, parts: Mapping[str, Survey]) -> list[Finding]:
        """Tell of sounds whose rate differs from that of others, or leaves out what others have."""
        rates = {name: set(part.counts.rates) for name, part in parts.items()}
        return list(_rates(data, rates))

    def write_sample(
        self, folder: Path, sample: SoundFiles, target: str, values: Mapping[str, Any]
    ) -> tuple[str, int]:
        """Write a table of sounds, as links beside it where they lie in files."""
        rows = []
        for number, item in enumerate(sample.items):
            path = link_or_write(sample.content(number), folder / str(number), ".wav")
            rows.append({"audio": path.name, "text": item.text, "label": item.label})
        return super().write_sample(folder, rows, target, values)

    def usual_size(self, config: ModelConfig, length: int) -> int:
        """Return the frames that the family declares, whatever a model can read at once."""
        return length

    def example(
        self, config: WhisperConfig | ConformerConfig, batch: int, size: int, beside: bool = False
    ) -> tuple[Tensor, ...]:
        """Return spectrograms of so many frames, with transcripts if a decoder reads them."""
        sound = torch.empty(batch, size, config.mels, device="meta")
        if not config.decoder_depth:
            return (sound,)
        lengths = torch.empty(batch, dtype=torch.long, device="meta")
        return sound, lengths, made_up_text(batch, min(config.max_length, _TRANSCRIPT))

    # With labels

    def load(
        self,
        data: str,
        source: SoundOptions,
        format: SoundFormat | None = None,
        *,
        classes: Sequence[str] | None = None,
        **asked: Unpack[PartsAsked],
    ) -> SoundData:
        """Load sounds, decoded once."""
        return load_sounds(data, format=format, options=source, classes=classes, **asked)

    def settle(self, data: SoundData, format: SoundFormat | None) -> SoundFormat:
        """Format with mean and deviation of its filters, where it normalises by these."""
        settled = format or data.format
        if settled.normalise != "global" or settled.mean:
            return settled
        mean, std = data["train"].feature_stats()
        return replace(settled, mean=mean, std=std)

    def raws(self, part: Sounds, format: SoundFormat) -> list[np.ndarray]:
        """Samples of the sounds of a part."""
        return [part.read(i) for i in range(len(part))]

    def length(self, raw: np.ndarray, format: SoundFormat) -> int:
        """Number of frames."""
        return format.frames(len(raw))

    def limits(self, settings: Any, format: SoundFormat) -> dict[str, int]:
        """Frames that a batch of a run may have."""
        return {"tokens": max(1, round(settings.batch_seconds / format.hop))}

    def collate(
        self,
        raws: Sequence[np.ndarray],
        format: SoundFormat,
        device: torch.device | str = "cpu",
    ) -> Inputs:
        """Spectrograms (b, t, mels), and their frames (b)."""
        return pad_sounds([format.spectrogram(samples) for samples in raws], device)

    def batches(self, part: Sounds, format: SoundFormat, settings: Any, labels: int) -> Any:
        """Batches of augmented spectrograms of like length."""

        def make(picked: np.ndarray, sound: Tensor, lengths: Tensor, frames: int) -> LabelledBatch:
            numbers = part.labels[torch.from_numpy(picked)]
            targets = smoothed(numbers, labels, settings.label_smoothing)
            return LabelledBatch(sound, lengths, targets, tokens=frames)

        return SoundBatches(part, format, settings, make)

    def tokens(self, model: Any, raw: np.ndarray, format: SoundFormat) -> InputTokens:
        """Moments of a sound."""
        return self.moments(model, format.frames(len(raw)), format)

    def moments(self, model: Any, frames: int, format: SoundFormat) -> InputTokens:
        """Moments of a spectrogram of so many frames."""
        from regard.viewer.image import layouts

        seconds, stride = model.stride * format.hop, model.stride
        size = 1
        if not hasattr(model.config, "full_window"):
            grid, keys = grid_keys(layouts(model, (format.mels, frames)))
        else:  # a window that is longer than the sound, of which some vectors are cut together
            size, columns = model.config.max_frames, -(-frames // stride)
            step = -(-columns // _MOST_CELLS)
            grid = time_grid(-(-columns // step), step * stride, frames)
            keys, seconds = window_keys(columns, step), step * seconds
        names = [f"{column * seconds:.2f} s" for column in range(grid.width)]
        return InputTokens(names, keys, replace(grid, seconds=seconds), size=size)

    def picture(
        self,
        model: Any,
        given: Path | str | bytes | np.ndarray | Samples,
        format: SoundFormat,
        settings: SoundLookSettings,
        describe: Describe,
    ) -> Picture:
        """Watch a model while it answers a sound, and gather where it looked.

        A field `forward` of what `describe` returns is one pass over the sound, whose attention is
        shown.
        """
        from regard.viewer.sound import parse_moment, sound_picture

        samples, rate = format.read(given), format.rate
        name = Path(given).name if isinstance(given, str | Path) else "sound"
        if len(samples) > _LOOK_SECONDS * rate:
            raise UsageError(
                f"{name}: {len(samples) / rate:.0f} seconds; at most "
                f"{_LOOK_SECONDS:.0f} are looked at, cut it"
            )
        query = parse_moment(settings.at, len(samples) / rate)
        described = describe([samples])
        device = next(model.parameters()).device
        usual = partial(model, *self.collate([samples], format, device))
        forward = described.pop("forward", usual)
        with watch(model) as maps, torch.inference_mode():
            forward()
        return sound_picture(
            model,
            maps,
            format.log_mel(samples).numpy(),
            Recording(samples, rate, **described.pop("recording", {})),
            stride=model.stride,
            view=settings.view,
            query=query,
            **{"title": name, "source": name, **described},
        )

    def drawn(
        self, model: Any, format: SoundFormat, batch: Any, row: int, strength: Tensor, peak: int
    ) -> DrawnInput | None:
        """A spectrogram around the moment that is strongest."""
        sound = getattr(batch, "sound", getattr(batch, "inputs", None))
        if not isinstance(sound, Tensor) or strength.dim() != 1:
            return None
        places = len(strength)
        frames, length = round(peak * sound.shape[1] / places), int(batch.lengths[row])
        first = max(0, min(frames - _MOST_FRAMES // 2, length - _MOST_FRAMES))
        shown = sound[row, first : min(length, first + _MOST_FRAMES)].T.flip(0)
        grey = (shown - shown.min()) / (shown.max() - shown.min()).clamp(min=1e-8)
        pixels = (255 * grey).round().byte().unsqueeze(2).expand(-1, -1, 3).numpy()
        moments = (np.arange(first, first + pixels.shape[1]) * places) // sound.shape[1]
        bar = strength[torch.from_numpy(moments.clip(max=places - 1))].numpy()[None]
        return DrawnInput(pixels, bar, (f"frame {frames}",))

    def features(self, raws: Sequence[np.ndarray], format: SoundFormat) -> np.ndarray:
        """Log energies of bands in stretches of sounds (n, d), and the log of their length."""
        found = []
        for samples in raws:
            energies = format.log_mel(samples)
            table = F.adaptive_avg_pool2d(energies[None], _BANDS)
            found.append(np.append(table.flatten().numpy(), np.log(len(energies))))
        return np.stack(found).astype(np.float32)

    # None of these

    @torch.inference_mode()
    def outlier_vectors(
        self, model: Any, raws: Sequence[np.ndarray], format: SoundFormat
    ) -> np.ndarray:
        """Each filter's mean and deviation, the length, and the vector that the head reads."""
        device = next(model.parameters()).device

        def vector(samples: np.ndarray) -> np.ndarray:
            filters = format.log_mel(samples)
            memory, lengths = model.encode(*self.collate([samples], format, device))
            pooled = model.readout.pool(memory, lengths)[0].float().cpu()
            length = torch.tensor([float(np.log(len(filters)))])
            deviation = filters.std(0, correction=0)
            return torch.cat([filters.mean(0), deviation, length, pooled]).numpy()

        return np.stack([vector(samples) for samples in raws])

    def strangers(
        self, raws: Sequence[np.ndarray], format: SoundFormat, rng: np.random.Generator
    ) -> dict[str, Sequence[Any]]:
        """Noise, noise with the spectrum of speech, tones and silence, at any loudness."""
        sizes = rng.choice([len(one) for one in raws], STRANGERS)
        gains = 10 ** rng.uniform(-3, -0.5, STRANGERS)

        def pink(n: int) -> np.ndarray:
            spectrum = np.fft.rfft(rng.normal(size=n))
            noise = np.fft.irfft(spectrum / np.sqrt(np.arange(len(spectrum)) + 1), n)
            return noise / max(1e-9, noise.std())

        def tone(n: int) -> np.ndarray:
            pitch = rng.uniform(50, format.rate / 2)
            return np.sin(2 * np.pi * pitch * np.arange(n) / format.rate)

        makers = {
            "noise": lambda n: rng.normal(size=n),
            "pink noise": pink,
            "tones": tone,
            "silence": np.zeros,
        }
        return {
            name: [
                np.float32(gain * make(n)) for n, gain in zip(sizes.tolist(), gains, strict=True)
            ]
            for name, make in makers.items()
        }


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


def _readable(name: str, files: SoundFiles, quiet: bool) -> Part:
    """Decode all sounds of a part, and keep those that can be read to their end."""

    def one(i: int) -> Measured | str:
        try:
            samples = files.read(i, files.infos[i].rate)
        except BrokenSound as mistake:
            return str(mistake)
        level = np.abs(samples)
        source = digest((samples * 2**15).round().astype(np.int32).tobytes())
        clipped = float((level >= _FULL_SCALE).mean())
        return Measured(len(samples) / files.infos[i].rate, float(level.max()), clipped, source)

    rows, measured, bad = [], [], list(files.bad)
    with Progress(name, len(files), quiet=quiet) as bar:
        for row, found in enumerate(in_threads(one, range(len(files)))):
            if isinstance(found, str):
                bad.append(found)
            else:
                rows.append(row)
                measured.append(found)
            bar.update(1)
    whole = files.pick(rows)
    whole.bad = bad
    return Part(name, whole, measured)


def _counts(part: Part, total: int) -> SoundCounts:
    items = part.files.items
    return SoundCounts(
        len(items),
        len(part.files.bad),
        round(sum(one.seconds for one in part.measured), 2),
        dict(Counter(info.rate for info in part.files.infos).most_common()),
        class_counts(items),
        sum(len(item.text.split()) for item in items),
        total,
    )


# What single sounds show


def _tell(
    part: Part, fits: Callable[[int], bool], level: str, kind: str, text: str
) -> Iterator[Finding]:
    """Yield a finding on the sounds that it fits; the text is what they are, and the remedy."""
    found = [i for i in range(len(part.files)) if fits(i)]
    if not found:
        return
    what, _, remedy = text.partition("; ")
    count = f"{plural(len(found), 'sound')} of {part.name} ({len(found) / len(part.files):.1%})"
    where = part.files.items[found[0]].where
    yield Finding(level, f"{count} {what}", where, remedy, kind, len(found))


def _levels(part: Part) -> Iterator[Finding]:
    """Tell of sounds in which nothing is heard, that are cut off at full scale, short or long."""
    measured = part.measured
    silent = "in which nothing is louder than 0.001 of full scale; record them again or remove them"
    yield from _tell(part, lambda i: measured[i].loudest < _SILENT, "warning", "silent", silent)
    clipped = (
        f"clipped, over {_CLIPPED:.1%} of their samples at full scale; record them again at a "
        "lower level, or keep them if what is to be heard later is clipped too"
    )
    yield from _tell(part, lambda i: measured[i].clipped > _CLIPPED, "warning", "clipped", clipped)
    short = f"shorter than {SHORT} seconds; remove what nothing can be heard in"
    yield from _tell(part, lambda i: measured[i].seconds < SHORT, "warning", "short", short)
    long = f"longer than {_LONG:.0f} seconds; cut them at pauses, as memory grows with their length"
    yield from _tell(part, lambda i: measured[i].seconds > _LONG, "note", "long", long)
    several = f"of several channels; {MEANT}: their mean is taken"
    infos = part.files.infos
    yield from _tell(part, lambda i: infos[i].channels > 1, "note", "channels", several)


def _texts(part: Part) -> Iterator[Finding]:
    """Tell of texts that do not go with the length of their sounds, and of odd characters."""
    items, measured, format = part.files.items, part.measured, SoundFormat()

    def too_long(i: int) -> bool:
        frames = -(-format.frames(round(measured[i].seconds * format.rate)) // _STRIDE)
        return not alignable(frames, [ord(letter) for letter in items[i].text])

    def too_short(i: int) -> bool:
        return measured[i].seconds > 5 and len(items[i].text) < _SLOW * measured[i].seconds

    first = next(filter(too_long, range(len(items))), None)
    if first is not None:
        text = items[first].text
        what = (
            f"too short for their texts, such as {len(text):,} characters in "
            f"{measured[first].seconds:.2f} seconds ({excerpt(text)!r}); correct them, leave them "
            "out with broken=skip, or choose subsampling=2 or longer tokens with tokenizer=bpe"
        )
        level = "error" if part.name == "train" else "warning"  # training refuses them
        yield from _tell(part, too_long, level, "long_text", what)
    what = (
        f"of over 5 seconds with a text of less than {_SLOW} characters a second; is all of it "
        "written down? Cut or mend them, or nothing if they are mostly pauses"
    )
    yield from _tell(part, too_short, "note", "short_text", what)
    yield from odd_characters([item.text for item in items])


# What only many sounds show


def _rates(data: str, rates: Mapping[str, set[int]]) -> Iterator[Finding]:
    """Yield what differs in the rates of parts."""
    every = set().union(*rates.values()) if rates else set()
    usual = SoundFormat().rate
    if len(every) > 1:
        shown = ", ".join(f"{rate:,}" for rate in sorted(every)[:6])
        same = len({frozenset(some) for some in rates.values()}) == 1
        what = f"sounds of {shown} Hz, all of which are resampled"
        if not same:
            what += "; parts differ in that: " + ", ".join(
                f"{name} {min(some):,} to {max(some):,}" for name, some in rates.items()
            )
        remedy = f"{MEANT}; what lies above half of {min(every):,} Hz is missing in some"
        yield Finding("note" if same else "warning", what, data, remedy, "rates")
    elif every and max(every) < usual:
        (rate,) = every
        what = f"all sounds are of {rate:,} Hz, below the usual {usual:,}"
        remedy = f"train with rate={rate}: it is faster, and nothing is lost"
        yield Finding("note", what, data, remedy, "low_rate")


SOUND = SoundModality()
