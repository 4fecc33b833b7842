"""How a public checkpoint wants its texts to be written: generation_config.json, in and out.

Each setting is honoured, or it is refused by its name; one that is not known is refused too.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.errors import UsageError
from regard.pretrained.parts import read_object

FILE = "generation_config.json"
# of config.json: how many rows of one table are of what is read, and of what is written after them
VOCABULARIES = "regard_vocabularies"
USUAL = "regard_usual_limit"  # the longest answer follows from the source, where we write it
HEAD = "regard_alignment_head"
LONGEST = 256  # tokens of an answer, for others
# settings that stay as they are: the rules of regard.decode.rules, which checks them
RULES = (
    *("sequence_bias", "repetition_penalty", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "bad_words_ids", "min_length", "min_new_tokens"),
    *("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"),
    *("suppress_tokens", "begin_suppress_tokens", "eos_token_id", "decoder_start_token_id"),
    *("max_length", "renormalize_logits", "early_stopping"),
)
# settings that change no text, or that say what another setting says
HARMLESS = frozenset(
    [
        "_from_model_config",
        "transformers_version",
        "bos_token_id",
        "pad_token_id",
        "use_cache",
        "cache_implementation",
        "cache_config",
        "max_cache_len",
        "return_legacy_cache",
        "compile_config",
        "disable_compile",
        "continuous_batching_config",
        "low_memory",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
        "remove_invalid_values",
        "prefill_chunk_size",
        # guesses of another model that are checked: only how fast it is
        "is_assistant",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_ensemble_weight",
        "assistant_lookbehind",
        "target_lookbehind",
        "max_matching_ngram_size",
        "prompt_lookup_num_tokens",
        "speculation_type",
        "use_mtp",
    ]
)
# settings that are honoured elsewhere than by a rule
READ = ("num_beams", "num_return_sequences", "length_penalty", "max_new_tokens", "do_sample")
DRAWS = {"temperature": 100.0, "top_k": 10**6, "top_p": 1.0, "min_p": 1.0}
# settings that we do not have, and the values at which they do nothing
NONE: dict[str, tuple[Any, ...]] = {
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
# and those of drawing, which do nothing where nothing is drawn
NONE_DRAWN = {"typical_p": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "top_h": ()}
KNOWN = {*HARMLESS, *READ, *DRAWS, *NONE, *NONE_DRAWN, *RULES}
# what a config means that does not say it, where there is no generation_config.json
DEFAULTS: dict[str, dict[str, Any]] = {
    "bart": {"forced_eos_token_id": 2},
    "marian": {"forced_eos_token_id": 0},
    "pegasus": {"forced_eos_token_id": 1},
}
BEAMS = 100
USUAL_TOP_K = 50  # of transformers, where a file draws and does not tell


def vocabularies(theirs: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return how many pieces the two languages have that share a table, if they do."""
    told = theirs.get(VOCABULARIES)
    if told is None:
        return None
    good = isinstance(told, list) and len(told) == 2
    good = good and all(type(size) is int and size > 0 for size in told)
    if not good or sum(told) != theirs.get("vocab_size"):
        raise UsageError(
            f"{VOCABULARIES}={told!r:.40}; expected two sizes whose sum is vocab_size="
            f"{theirs.get('vocab_size')!r:.40}"
        )
    return told[0], told[1]


# settings that name tokens
TOKENS = (
    *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "eos_token_id"),
    *("forced_bos_token_id", "forced_eos_token_id", "decoder_start_token_id"),
)


def shifted(rules: Mapping[str, Any], by: int) -> dict[str, Any]:
    """Return rules whose tokens are in a table after or before so many others."""

    def shift(value: Any, key: str) -> Any:
        if isinstance(value, list):
            return [shift(one, key) for one in value]
        if type(value) is not int or value + by < 0:
            raise UsageError(f"{key}={value!r:.40} is no token that this model writes")
        return value + by

    if by and rules.get("sequence_bias"):
        raise UsageError("sequence_bias is not supported with two vocabularies; leave it out")
    return {key: shift(x, key) if by and key in TOKENS else x for key, x in rules.items()}


def read_generation(folder: str | Path, task: str) -> dict[str, Any]:
    """Return how a public checkpoint wants to be decoded, in our words and as rules."""
    if task not in ("language", "text", "translate"):
        return {}
    path = Path(folder) / FILE
    config = Path(folder) / "config.json"
    if path.is_file():
        theirs = read_object(path)
        unknown = [key for key in theirs if key not in KNOWN and theirs[key] is not None]
        unknown = [key for key in unknown if not key.startswith("regard_")]
        if unknown:
            raise UsageError(
                f"{path}: {unknown[0]!r:.40} is not known; leave it out if no text depends on it"
            )
    else:  # as older checkpoints have it
        path, theirs = config, read_object(config)
        theirs = {**DEFAULTS.get(str(theirs.get("model_type")), {}), **theirs}
    theirs = {key: value for key, value in theirs.items() if value is not None}
    if not isinstance(told := theirs.get(HEAD), str | None):
        raise UsageError(f"{path}: {HEAD}={told!r:.40} is no text")
    if theirs.get(USUAL) is True:
        theirs.pop("max_new_tokens", None)
    try:
        found = _read(theirs, task)
        if sizes := vocabularies(read_object(config)):
            found["rules"] = shifted(found["rules"], -sizes[0])
        return found | ({"alignment_head": told} if told else {})
    except UsageError as mistake:
        raise UsageError(f"{path}: {mistake}") from None


def _read(theirs: Mapping[str, Any], task: str) -> dict[str, Any]:
    draws = theirs.get("do_sample") is True
    for key, same in (NONE | NONE_DRAWN if draws else NONE).items():
        if key in theirs and theirs[key] not in same:
            raise UsageError(f"{key}={theirs[key]!r:.40} is not supported; leave it out")
    found: dict[str, Any] = {}
    beams = _whole(theirs, "num_beams", 1, BEAMS)
    if beams is not None:
        found["beam"] = beams
    if draws and beams not in (None, 1):
        raise UsageError(
            f"do_sample=true with num_beams={beams} is not supported; only one of them is"
        )
    if (count := _whole(theirs, "num_return_sequences", 1, BEAMS)) not in (None, 1):
        found["n_best"] = count
    if "length_penalty" in theirs:
        found |= {"length_penalty": "average", "alpha": _number(theirs, "length_penalty", -10, 10)}
    if (most := _whole(theirs, "max_new_tokens", 1, 10**6)) is not None:
        found["max_length"] = most
    if draws:
        usual = {"temperature": 1.0, "top_k": USUAL_TOP_K}
        for key, high in DRAWS.items():
            value = usual.get(key)
            if key in theirs:
                whole = key == "top_k"
                value = _whole(theirs, key, 0, high) if whole else _number(theirs, key, 0, high)
            if value is not None and (value or key in ("temperature", "min_p")):
                found[key] = value
    elif task == "language" and (theirs.get("do_sample") is False or (beams or 1) > 1):
        found["temperature"] = 0.0
    rules = {key: theirs[key] for key in RULES if key in theirs}
    if most is not None:
        rules.pop("max_length", None)  # which it overrides
    for key in ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"):
        if rules.get(key) == []:
            del rules[key]
    return {**found, "rules": rules}


def _number(theirs: Mapping[str, Any], key: str, low: float, high: float) -> float:
    value = theirs[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise UsageError(f"{key}={value!r:.40}; expected a number from {low:g} to {high:g}")
    return value


def _whole(theirs: Mapping[str, Any], key: str, low: int, high: float) -> int | None:
    if key not in theirs:
        return None
    value = _number(theirs, key, low, high)
    if value != int(value):
        raise UsageError(f"{key}={value!r:.40} is not a whole number")
    return int(value)


def write_generation(generation: Mapping[str, Any], never: list[int]) -> dict[str, Any]:
    """Return their words for how a model of ours writes; tokens of `never` are no part of texts.

    Where it came from a checkpoint, that is what this said.
    """
    how = {key: value for key, value in generation.items() if value is not None}
    theirs: dict[str, Any] = dict(how.get("rules") or {})
    if "rules" not in how:
        # ours leaves such tokens out before it computes probabilities
        theirs |= {"suppress_tokens": never, "renormalize_logits": True} if never else {}
        if how.get("beam", 1) > 1:
            theirs["early_stopping"] = "never" if how.get("alpha") == 0 else True
    if how.get("length_penalty", "average") == "gnmt":
        raise UsageError(
            "length_penalty=gnmt has no counterpart in generation_config.json; "
            "write average there before you export"
        )
    if "beam" in how:
        theirs["num_beams"] = how["beam"]
    if how.get("n_best", 1) > 1:
        theirs["num_return_sequences"] = how["n_best"]
    if how.get("length_penalty") == "none":
        theirs["length_penalty"] = 0.0
    elif "alpha" in how:
        theirs["length_penalty"] = float(how["alpha"])
    if "max_length" in how:
        theirs["max_new_tokens"] = how["max_length"]
    if how.get("temperature") is not None:
        theirs["do_sample"] = how["temperature"] > 0
        if theirs["do_sample"]:
            theirs["temperature"] = float(how["temperature"])
            theirs["top_k"] = how.get("top_k") or 0
            theirs |= {key: how[key] for key in ("top_p", "min_p") if key in how}
    if how.get("repetition_penalty", 1) != 1:
        theirs["repetition_penalty"] = how["repetition_penalty"]
    if how.get("stop"):
        raise UsageError(
            f"stop={how['stop']!r:.40} has no counterpart in generation_config.json; "
            "leave it out there before you export"
        )
    return theirs
