"""A folder that a model is run from as it is: `regard export ... quantise=int8`."""

import json
import shutil
from pathlib import Path
from typing import Any

from regard.errors import UsageError
from regard.files import making, read_json, write_atomically
from regard.files.hashes import seal
from regard.files.weights import LARGEST, byte_names, state_of, to_bytes
from regard.models.folder import WEIGHTS_FILE, save_weights
from regard.native import fast
from regard.pretrained.folder import is_foreign
from regard.pretrained.model_card import card_head
from regard.tasks.runner import Runner

_GENERATION, _CARD = "generation_config.json", "README.md"
_KEPT = (".json", ".jinja", ".spm", ".md", ".safetensors")  # how names of files end that are copied
_REPLACED = (WEIGHTS_FILE, _GENERATION, _CARD, "report.json")


def export_quantised(
    runner: Runner[Any], out: Path | None, quantise: str, data: str | None = None
) -> Path:
    """Write a model with matrices in bytes, which answers as the model does with quantise=int8.

    What that costs on the test part of `data` stands in its card. With quantise=none the weights
    stay as they are.
    """
    folder = runner.folder
    assert folder is not None and out is not None
    if is_foreign(folder):
        raise UsageError(f"{folder}: import it first: regard import {folder} out=runs/mine")
    told, named = "", set[str]()
    with fast(runner.model, frozen=True):
        why = getattr(runner.model, "why_no_engine", lambda: "it writes no texts")()
        why = why and getattr(runner.model, "why_no_steps", lambda: why)()
    if quantise != "none":
        if why:
            raise UsageError(f"{folder}: quantise={quantise} cannot be done: {why}; leave it out")
        named, told = byte_names(runner.model), _costs(runner, quantise, data)
    elif data is not None:
        raise UsageError("data= measures what quantise= costs; add quantise=int8, or leave it out")
    state = state_of(runner.model)
    for name in sorted(named):
        if not state[name].isfinite().all():
            raise UsageError(f"{folder}: {name} has a number that is not finite")
        state[name], state[name + LARGEST] = to_bytes(state[name].detach())
    own = folder / _GENERATION
    generation = {**(read_json(own) if own.exists() else {}), "quantise": quantise}
    card = folder / _CARD
    whole = card.read_text() if card.exists() else card_head(runner.config, {})
    with making(out) as partial:
        for path in folder.iterdir():
            if path.suffix in _KEPT and path.name not in _REPLACED and path.is_file():
                shutil.copyfile(path, partial / path.name)
        save_weights(partial, state)
        write_atomically(partial / _GENERATION, json.dumps(generation, indent=2) + "\n")
        write_atomically(partial / _CARD, f"{whole.rstrip()}\n\n{told}")
        seal(partial)
    return out


def _costs(runner: Runner[Any], quantise: str, data: str | None) -> str:
    """What the model card says of quantised products."""
    head = f"## {quantise}\n\nMatrix products are in {quantise}: weights per row, inputs per token."
    if data is None:
        return f"{head}\nWhat that costs was not measured: no data= was given to `regard export`.\n"
    found = [runner.evaluate({"data": data, "quantise": how}) for how in ("none", quantise)]
    rows = [
        f"| {one.name} | {one.value:.{one.digits}f} | {other.value:.{other.digits}f} |"
        for one, other in zip(found[0].scores, found[1].scores, strict=True)
    ]
    kind = [f"| on the test part of {Path(data).name} | float32 | {quantise} |", "|---|---|---|"]
    signatures = "; ".join(dict.fromkeys(one.signature for one in found[1].scores))
    return "\n".join([head, "", *kind, *rows, "", f"`{signatures}`", ""])
