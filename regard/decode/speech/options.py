"""Options of speech decoding, and those that Whisper alone has."""

from dataclasses import dataclass, fields
from typing import Any

from regard.decode.options import Decoding
from regard.native.processor import DTYPES, QUANTISED
from regard.settings import setting

# how Whisper follows a long sound -> whether it writes timestamps
WINDOWS = {"pauses": False, "timestamps": True}


@dataclass(frozen=True)
class SpeechDecoding(Decoding):
    """How speech is decoded: by the CTC head, by the attention decoder, or by both."""

    GROUP = "decoding"

    decoding: str | None = setting(
        None,
        "decoder to use; all that the model has unless given",
        choices="regard.decode.speech.decoder:WAYS",
    )
    beam: int = setting(8, "beam size; 1 is greedy", min=1, max=1000)
    ctc_weight: float = setting(0.3, "weight of CTC in joint decoding", min=0, max=1)
    lm: str | None = setting(None, "a language model trained with Regard, for shallow fusion")
    lm_weight: float = setting(0.3, "weight of the language model", min=0, max=100)
    length_bonus: float = setting(0.0, "added to the score for each token", min=-100, max=100)


@dataclass(frozen=True)
class WhisperDecoding(SpeechDecoding):
    """How Whisper decodes speech: in which language, window by window, and again if need be."""

    GROUP = "decoding"

    language: str = setting("", "Whisper: spoken language, such as en; detected unless given")
    translate: bool = setting(False, "Whisper: write English, whatever language is spoken")
    windows: str = setting(
        "pauses",
        "Whisper: split long sounds at pauses, or at predicted timestamps",
        choices=WINDOWS,
    )
    no_speech: float = setting(
        0.6, "Whisper: probability of no speech at which improbable text is dropped", min=0, max=1
    )
    fallback: bool = setting(
        True, "Whisper: decode improbable or repetitive text again by sampling"
    )
    words: bool = setting(True, "Whisper: find the times of words")
    dtype: str = setting(
        "float32",
        "Whisper: data type of the encoder; bfloat16 is faster, about 1% of words differ",
        choices=DTYPES,
        group="machine",
    )
    quantise: str = setting(
        "none", "Whisper: quantise matrix products", choices=QUANTISED, group="machine"
    )


def whisper_only(options: SpeechDecoding) -> dict[str, Any]:
    """Options of Whisper alone that have other values than usual, by name."""
    shared = {one.name for one in fields(SpeechDecoding)}
    own = [one for one in fields(WhisperDecoding) if one.name not in shared]
    values = {one.name: getattr(options, one.name, one.default) for one in own}
    return {one.name: values[one.name] for one in own if values[one.name] != one.default}
