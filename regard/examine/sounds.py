"""A look over sounds before they are trained on: what is wrong, where, and what to do."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from regard.data.media import digest, in_threads
from regard.data.sound_files import BrokenSound
from regard.data.sound_sets import SoundFiles, SoundOptions, find_sound_parts
from regard.data.spectrogram import SoundFormat
from regard.data.split import hash_text
from regard.decode.speech.ctc_align import alignable
from regard.errors import UsageError
from regard.examine.report import (
    MEANT,
    SOUNDS,
    TRANSCRIPTS,
    USUAL,
    DataReport,
    ExamineOptions,
    Hashed,
    compare_parts,
    excerpt,
    labels_of,
    plural,
)
from regard.examine.rows import find_marks
from regard.training.progress import Progress

FEW = 10  # sounds of a class that can hardly be learnt from
SILENT = 1e-3  # of full scale: 60 dB below it
FULL = 0.999  # of full scale
CLIPPED = 1e-3  # share of samples at full scale in a sound that is clipped
SHORT, LONG = 0.1, 30.0  # seconds of a sound that hardly can be meant, and that takes much memory
SLOW = 0.5  # characters a second, in a sound of which much is not written down
STRIDE = 4  # spectrogram frames that a frame of the usual encoder stands for
SAMPLE = 128  # sounds to measure a training with


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


def examine_sounds(
    data: str,
    given: ExamineOptions = USUAL,
    *,
    target: str = "text",
    pattern: str | None = None,
) -> DataReport:
    """Look over all parts of a set of sounds and report what is wrong, where, and the remedy.

    Their target is a text, which is said in them, or a label.
    """
    how = {"header": given.header, "most": given.most, "pattern": pattern}
    options = SoundOptions(target, given.columns, broken="skip", **how)
    readers, shares = find_sound_parts(data, given.valid, given.test, options)
    if not readers:
        raise UsageError(f"{data}: no train, valid or test part in it; name a folder of it")
    report, parts = DataReport(data), {}
    for name in (part for part in ("train", "valid", "test") if part in readers):
        files = readers[name]()
        report.add_notes(data, files.notes, "broken=skip")
        part = _readable(name, files, given.quiet)
        if part.files.bad:
            bad = part.files.bad
            what = f"{plural(len(bad), 'file')} of {name} cannot be read; the first: {bad[0]}"
            remedy = "repair or remove them, or leave them out with broken=skip"
            report.add("error", "broken", data, what, remedy, len(bad))
        if not len(part.files):
            what = f"no sound of {name} can be read"
            report.add("error", "no_sounds", data, what, "give sounds that open")
            continue
        report.parts[name] = _counts(part, max(files.total, len(files)))
        _find_levels(report, part)
        if target == "text":
            _find_texts(report, part)
        parts[name] = part
    _find_rates(report, list(parts.values()))
    hashed = [_hashed(part) for part in parts.values()]
    wording = TRANSCRIPTS if target == "text" else SOUNDS
    labels = labels_of({name: part.files.items for name, part in parts.items()})
    compare_parts(report, hashed, wording, labels if target == "label" else None, FEW)
    if "train" in parts:
        train = parts["train"].files
        report.sample = train.pick(range(0, len(train), max(1, len(train) // SAMPLE))[:SAMPLE])
    return report.close((*readers, *shares))


def _readable(name: str, files: SoundFiles, quiet: bool) -> Part:
    """Decode all sounds of a part, and keep those that can be read to their end."""

    def one(i: int) -> Measured | str:
        try:
            samples = files.read(i, files.infos[i].rate)
        except BrokenSound as mistake:
            return str(mistake)
        level = np.abs(samples)
        source = digest((samples * 2**15).round().astype(np.int32).tobytes())
        clipped = float((level >= FULL).mean())
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
        dict(Counter(item.label for item in items if item.label).most_common()),
        sum(len(item.text.split()) for item in items),
        total,
    )


def _hashed(part: Part) -> Hashed:
    items = part.files.items
    sources = np.array([int(one.source[:16], 16) for one in part.measured], np.uint64)
    targets = np.array([hash_text(item.text or item.label) for item in items], np.uint64)
    return Hashed(part.name, sources, targets, lambda row: items[row].where)


# What single sounds show


def _tell(
    report: DataReport, part: Part, fits: Callable[[int], bool], level: str, kind: str, text: str
) -> None:
    """Add a finding on the sounds that it fits; the text is what they are, and the remedy."""
    found = [i for i in range(len(part.files)) if fits(i)]
    if not found:
        return
    what, _, remedy = text.partition("; ")
    count = f"{plural(len(found), 'sound')} of {part.name} ({len(found) / len(part.files):.1%})"
    where = part.files.items[found[0]].where
    report.add(level, kind, where, f"{count} {what}", remedy, len(found))


def _find_levels(report: DataReport, part: Part) -> None:
    """Tell of sounds in which nothing is heard, that are cut off at full scale, short or long."""
    measured = part.measured
    silent = "in which nothing is louder than 0.001 of full scale; record them again or remove them"
    _tell(report, part, lambda i: measured[i].loudest < SILENT, "warning", "silent", silent)
    clipped = (
        f"clipped, over {CLIPPED:.1%} of their samples at full scale; record them again at a lower "
        "level, or keep them if what is to be heard later is clipped too"
    )
    _tell(report, part, lambda i: measured[i].clipped > CLIPPED, "warning", "clipped", clipped)
    short = f"shorter than {SHORT} seconds; remove what nothing can be heard in"
    _tell(report, part, lambda i: measured[i].seconds < SHORT, "warning", "short", short)
    long = f"longer than {LONG:.0f} seconds; cut them at pauses, as memory grows with their length"
    _tell(report, part, lambda i: measured[i].seconds > LONG, "note", "long", long)
    several = f"of several channels; {MEANT}: their mean is taken"
    infos = part.files.infos
    _tell(report, part, lambda i: infos[i].channels > 1, "note", "channels", several)


def _find_texts(report: DataReport, part: Part) -> None:
    """Tell of texts that do not go with the length of their sounds, and of odd characters."""
    items, measured, format = part.files.items, part.measured, SoundFormat()

    def too_long(i: int) -> bool:
        frames = -(-format.frames(round(measured[i].seconds * format.rate)) // STRIDE)
        return not alignable(frames, [ord(letter) for letter in items[i].text])

    def too_short(i: int) -> bool:
        return measured[i].seconds > 5 and len(items[i].text) < SLOW * measured[i].seconds

    first = next(filter(too_long, range(len(items))), None)
    if first is not None:
        text = items[first].text
        what = (
            f"too short for their texts, such as {len(text):,} characters in "
            f"{measured[first].seconds:.2f} seconds ({excerpt(text)!r}); correct them, leave them "
            "out with broken=skip, or choose subsampling=2 or longer tokens with tokenizer=bpe"
        )
        level = "error" if part.name == "train" else "warning"  # training refuses them
        _tell(report, part, too_long, level, "long_text", what)
    what = (
        f"of over 5 seconds with a text of less than {SLOW} characters a second; is all of it "
        "written down? Cut or mend them, or nothing if they are mostly pauses"
    )
    _tell(report, part, too_short, "note", "short_text", what)
    find_marks(report, [item.text for item in items], report.data)


# What only many sounds show


def _find_rates(report: DataReport, parts: Sequence[Part]) -> None:
    """Tell of sounds whose rate differs from that of others, or leaves out what others have."""
    rates = {part.name: {info.rate for info in part.files.infos} for part in parts}
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
        report.add("note" if same else "warning", "rates", report.data, what, remedy)
    elif every and max(every) < usual:
        (rate,) = every
        what = f"all sounds are of {rate:,} Hz, below the usual {usual:,}"
        remedy = f"train with rate={rate}: it is faster, and nothing is lost"
        report.add("note", "low_rate", report.data, what, remedy)
