"""How sounds are prepared: preprocessor_config.json of Whisper, in and out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.errors import UsageError
from regard.files import errors_in, read_json, write_json
from regard.pretrained.config_keys import integer, only

_FILE = "preprocessor_config.json"
_WHOLE = "processor_config.json"  # where transformers 5 writes the extractor of a whole processor
_KIND = "WhisperFeatureExtractor"
RATE, _WINDOW, _HOP = 16_000, 400, 160  # samples a second, of a frame, and between frames
# keys of which one value is supported
_FIXED = {"feature_extractor_type": _KIND, "padding_value": 0.0, "padding_side": "right"}
_FIXED |= {"dither": 0.0}
# keys that change no feature of a window, or that follow from others
_HARMLESS = ("processor_class", "return_attention_mask", "mel_filters", "do_normalize")
_MOST_RATE = 192_000


def read_extractor(folder: str | Path, mels: int, frames: int) -> dict[str, Any]:
    """Return the features that a public checkpoint reads, as our config.json says it.

    The model reads so many filters, and windows of so many frames.
    """
    path = Path(folder) / _FILE
    if path.is_file() or not (Path(folder) / _WHOLE).is_file():
        theirs = read_json(path) if path.is_file() else {}
    else:
        path = Path(folder) / _WHOLE
        theirs = read_json(path).get("feature_extractor", {})
    with errors_in(path):
        if not isinstance(theirs, Mapping):
            raise UsageError(f"feature_extractor={str(theirs)[:40]} is not an object")
        return _read(theirs, mels, frames)


def _read(theirs: Mapping[str, Any], mels: int, frames: int) -> dict[str, Any]:
    only(theirs, _FIXED)
    rate = integer(theirs, "sampling_rate", RATE, 1)
    window, hop = integer(theirs, "n_fft", _WINDOW, 8), integer(theirs, "hop_length", _HOP, 1)
    if rate > _MOST_RATE or not hop <= window <= rate:
        raise UsageError(
            f"sampling_rate={rate}, n_fft={window} and hop_length={hop} give no valid frames"
        )
    known: dict[str, Any] = {"feature_size": mels, "nb_max_frames": frames}
    known |= {"n_samples": frames * hop, "chunk_length": frames * hop / rate}
    for key, value in known.items():
        if theirs.get(key, value) != value:
            raise UsageError(f"{key}={str(theirs[key])[:40]}, but the model reads {value}")
    numbers = {"sampling_rate", "n_fft", "hop_length"}
    for key in theirs:
        if key not in {*known, *numbers, *_FIXED, *_HARMLESS}:
            raise UsageError(f"{key!r:.40} is not known; leave it out if no feature depends on it")
    return {
        "rate": rate,
        "mels": mels,
        "window": window / rate,
        "hop": hop / rate,
        "features": "whisper",
        "normalise": "none",
    }


def write_extractor(folder: Path, sound: Mapping[str, Any], frames: int) -> None:
    """Write how sounds are prepared for a model that reads windows of so many frames."""
    if sound.get("features") != "whisper" or sound.get("normalise") != "none":
        raise UsageError(
            f"features={sound.get('features')} with normalise={sound.get('normalise')} have no "
            "counterpart in a public format; train with features=whisper and normalise=none"
        )
    rate = sound["rate"]
    window, hop = (round(sound[key] * rate) for key in ("window", "hop"))
    if (frames * hop) % rate:
        raise UsageError(
            f"windows of {frames * hop / rate:g} seconds have no counterpart in a public format, "
            "which counts whole seconds"
        )
    write_json(
        folder / _FILE,
        {
            **_FIXED,
            "chunk_length": frames * hop // rate,
            "feature_size": sound["mels"],
            "hop_length": hop,
            "n_fft": window,
            "n_samples": frames * hop,
            "nb_max_frames": frames,
            "return_attention_mask": False,
            "sampling_rate": rate,
        },
    )
