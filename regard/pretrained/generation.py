"""Decoding settings of a public checkpoint: generation_config.json, in and out.

Each setting is honoured, or it is refused by its name; one that is not known is refused too.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.errors import UsageError
from regard.files import errors_in, read_json, write_json
from regard.pretrained.formats import FORMATS
from regard.pretrained.formats.encoder_decoders import vocabularies

_FILE = "generation_config.json"
WRITING_TASKS = ("language", "text", "translate", "transcribe")
_USUAL = "regard_usual_limit"  # the longest output follows from the source, where we write it
_ALIGNMENT_HEAD = "regard_alignment_head"
_LONGEST = 256  # tokens of an output, for others
# settings that stay as they are: the rules of regard.decode.rules, which checks them
RULES = (
    *("sequence_bias", "repetition_penalty", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "bad_words_ids", "min_length", "min_new_tokens"),
    *("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"),
    *("suppress_tokens", "begin_suppress_tokens", "eos_token_id", "decoder_start_token_id"),
    *("max_length", "renormalize_logits", "early_stopping", _USUAL),
)
# and those of Whisper alone
SOUND_RULES = (
    *("forced_decoder_ids", "no_timestamps_token_id", "prev_sot_token_id", "lang_to_id"),
    *("task_to_id", "is_multilingual", "language", "task", "return_timestamps"),
    *("max_initial_timestamp_index", "alignment_heads"),
)
# of the former, the ones that name tokens
_TOKENS = (
    *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "eos_token_id"),
    *("forced_bos_token_id", "forced_eos_token_id", "decoder_start_token_id"),
)
# settings that change no text, or that say what another setting says; from is_assistant on they are
# of speculative decoding, which changes only the speed
_HARMLESS = (
    *("_from_model_config", "transformers_version", "bos_token_id", "pad_token_id", "use_cache"),
    *("cache_implementation", "cache_config", "max_cache_len", "return_legacy_cache"),
    *("compile_config", "disable_compile", "continuous_batching_config", "low_memory"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    *("return_dict_in_generate", "remove_invalid_values", "prefill_chunk_size", "is_assistant"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind"),
    *("target_lookbehind", "max_matching_ngram_size", "prompt_lookup_num_tokens"),
    *("speculation_type", "use_mtp"),
)
# settings that are honoured elsewhere than by a rule
_READ = ("num_beams", "num_return_sequences", "length_penalty", "max_new_tokens", "do_sample")
_SAMPLING = {"temperature": 100.0, "top_k": 10**6, "top_p": 1.0, "min_p": 1.0}  # and their maximum
# settings that we do not have, and the values at which they do nothing
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "penalty_alpha": (0,),
    "encoder_repetition_penalty": (1,),
    "guidance_scale": (1,),
    "constraints": (),
    "force_words_ids": (),
    "watermarking_config": (),
    "stop_strings": ([],),
    "max_time": (),
    "dola_layers": (),
    "token_healing": (False,),
    "forced_decoder_ids": ([],),
}
# and those of sampling, which do nothing where nothing is sampled
_UNSUPPORTED_SAMPLING = {"typical_p": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "top_h": ()}
KNOWN = {*_HARMLESS, *_READ, *_SAMPLING, *_UNSUPPORTED, *_UNSUPPORTED_SAMPLING, *RULES}
_MOST_BEAMS = 100
_DEFAULT_TOP_K = 50  # of transformers, where a file samples and does not say


def shifted(rules: Mapping[str, Any], by: int) -> dict[str, Any]:
    """Return rules whose tokens are in a table after or before so many others."""

    def shift(value: Any, key: str) -> Any:
        if isinstance(value, list):
            return [shift(one, key) for one in value]
        if type(value) is not int or value + by < 0:
            raise UsageError(f"{key}={value!r:.40} is not a token of this model's output")
        return value + by

    if by and rules.get("sequence_bias"):
        raise UsageError("sequence_bias is not supported with two vocabularies; leave it out")
    return {key: shift(x, key) if by and key in _TOKENS else x for key, x in rules.items()}


def read_generation(folder: str | Path, task: str) -> dict[str, Any]:
    """Return how a public checkpoint wants to be decoded, as our own settings and as rules."""
    if task not in WRITING_TASKS:
        return {}
    path, config = Path(folder) / _FILE, Path(folder) / "config.json"
    if path.is_file():
        theirs = read_json(path)
        known = {*KNOWN, *SOUND_RULES} if task == "transcribe" else KNOWN
        for key, value in theirs.items():
            if key not in known and value is not None and not key.startswith("regard_"):
                raise UsageError(
                    f"{path}: {key!r:.40} is not known; leave it out if no text depends on it"
                )
    else:  # as older checkpoints have it
        path, theirs = config, read_json(config)
        format = FORMATS.get(str(theirs.get("model_type")))
        if format is not None and format.forced_eos is not None:
            theirs = {"forced_eos_token_id": format.forced_eos, **theirs}
    theirs = {key: value for key, value in theirs.items() if value is not None}
    with errors_in(path):
        if not isinstance(head := theirs.get(_ALIGNMENT_HEAD), str | None):
            raise UsageError(f"{_ALIGNMENT_HEAD}={head!r:.40} is not a text")
        if theirs.get(_USUAL) is True:
            theirs.pop("max_new_tokens", None)
        settings = _read(theirs, task)
        if sizes := vocabularies(read_json(config)):
            settings["rules"] = shifted(settings["rules"], -sizes[0])
        return settings | ({"alignment_head": head} if head else {})


def _read(theirs: Mapping[str, Any], task: str) -> dict[str, Any]:
    samples = theirs.get("do_sample") is True
    own = SOUND_RULES if task == "transcribe" else ()
    for key, same in (_UNSUPPORTED | _UNSUPPORTED_SAMPLING if samples else _UNSUPPORTED).items():
        if key in theirs and theirs[key] not in same and key not in own:
            raise UsageError(f"{key}={theirs[key]!r:.40} is not supported; leave it out")
    settings: dict[str, Any] = {}
    beams = _integer(theirs, "num_beams", 1, _MOST_BEAMS) or 1
    settings["beam"] = beams  # what is not told is as transformers has it
    if samples and beams > 1:
        raise UsageError(
            f"do_sample=true with num_beams={beams} is not supported; only one of them is"
        )
    if (count := _integer(theirs, "num_return_sequences", 1, _MOST_BEAMS)) not in (None, 1):
        settings["n_best"] = count
    if "length_penalty" in theirs:
        alpha = _number(theirs, "length_penalty", -10, 10)
        settings |= {"length_penalty": "average", "alpha": alpha}
    if (most := _integer(theirs, "max_new_tokens", 1, 10**6)) is not None:
        settings["max_length"] = most
    if samples:
        defaults = {"temperature": 1.0, "top_k": _DEFAULT_TOP_K}
        for key, high in _SAMPLING.items():
            value = defaults.get(key)
            if key in theirs:
                value = (_integer if key == "top_k" else _number)(theirs, key, 0, high)
            if value is not None and (value or key in ("temperature", "min_p")):
                settings[key] = value
    elif task == "language":
        settings["temperature"] = 0.0
    rules = {key: theirs[key] for key in (*RULES, *own) if key in theirs}
    if most is not None:
        rules.pop("max_length", None)  # which it overrides
    empty = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias")
    for key in (*empty, "forced_decoder_ids"):
        if rules.get(key) == []:
            del rules[key]
    return {**settings, "rules": rules}


def _number(theirs: Mapping[str, Any], key: str, low: float, high: float) -> float:
    value = theirs[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise UsageError(f"{key}={value!r:.40}; expected a number from {low:g} to {high:g}")
    return value


def _integer(theirs: Mapping[str, Any], key: str, low: int, high: float) -> int | None:
    if key not in theirs:
        return None
    value = _number(theirs, key, low, high)
    if value != int(value):
        raise UsageError(f"{key}={value!r:.40} is not a whole number")
    return int(value)


def export_generation(
    folder: Path,
    config: Mapping[str, Any],
    tokenizer: Any,
    ids: Mapping[str, Any],
    sizes: tuple[int, int] | None,
) -> None:
    """Write generation_config.json for a model of ours with the ids of special tokens.

    `sizes` are those of the two vocabularies that share a table, if they do.
    """
    settings = config.get("generation") or {}
    theirs = write_generation(settings, list(tokenizer.never))
    if config["task"] == "translate" and not {"max_length", "max_new_tokens"} & set(theirs):
        theirs |= {"max_new_tokens": _LONGEST, _USUAL: True}  # others would stop after 20
    if isinstance(settings.get("alignment_head"), str):
        theirs[_ALIGNMENT_HEAD] = settings["alignment_head"]
    write_json(folder / _FILE, {**ids, **shifted(theirs, sizes[0] if sizes else 0)})


def write_generation(generation: Mapping[str, Any], never: list[int]) -> dict[str, Any]:
    """Return their keys for our decoding settings; tokens of `never` are no part of texts.

    Where these came from a checkpoint, that is what it said.
    """
    ours = {key: value for key, value in generation.items() if value is not None}
    theirs: dict[str, Any] = dict(ours.get("rules") or {})
    if "rules" not in ours:
        # ours leaves such tokens out before it computes probabilities
        theirs |= {"suppress_tokens": never, "renormalize_logits": True} if never else {}
        if ours.get("beam", 1) > 1:
            theirs["early_stopping"] = "never" if ours.get("alpha") == 0 else True
    if ours.get("length_penalty", "average") == "gnmt":
        raise UsageError(
            "length_penalty=gnmt has no counterpart in generation_config.json; "
            "write average there before you export"
        )
    if ours.get("stop"):
        raise UsageError(
            f"stop={ours['stop']!r:.40} has no counterpart in generation_config.json; "
            "leave it out there before you export"
        )
    if "beam" in ours:
        theirs["num_beams"] = ours["beam"]
    if ours.get("n_best", 1) > 1:
        theirs["num_return_sequences"] = ours["n_best"]
    if ours.get("length_penalty") == "none":
        theirs["length_penalty"] = 0.0
    elif "alpha" in ours:
        theirs["length_penalty"] = float(ours["alpha"])
    if "max_length" in ours:
        theirs["max_new_tokens"] = ours["max_length"]
    if "temperature" in ours:
        theirs["do_sample"] = ours["temperature"] > 0
        if theirs["do_sample"]:
            theirs["temperature"] = float(ours["temperature"])
            theirs["top_k"] = ours.get("top_k") or 0
            theirs |= {key: ours[key] for key in ("top_p", "min_p") if key in ours}
    if ours.get("repetition_penalty", 1) != 1:
        theirs["repetition_penalty"] = ours["repetition_penalty"]
    return theirs
