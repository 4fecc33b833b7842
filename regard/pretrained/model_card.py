"""The head of a model card, as the Hugging Face hub reads it."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

# task -> the hub's word for it
_PIPELINES = {
    "translate": "translation",
    "prefix": "translation",
    "text": "text2text-generation",
    "language": "text-generation",
    "classify": "text-classification",
    "tag": "token-classification",
    "fill": "fill-mask",
    "embed": "feature-extraction",
    "images": "image-classification",
    "pretrain": "image-feature-extraction",
    "caption": "image-to-text",
    "segment": "image-segmentation",
    "denoise": "image-to-image",
    "sounds": "audio-classification",
    "transcribe": "automatic-speech-recognition",
}
_LANGUAGE = re.compile(r"[a-z]{2,3}")  # ISO 639


def card_head(config: Mapping[str, Any], scores: Mapping[str, float], data: str = "") -> str:
    """YAML head of a card: task, tags, languages, and scores on the validation part of data.

    No licence is told, as nobody has said which; a value is written as JSON, which is YAML, too.
    """
    task = str(config.get("task"))
    pipeline = _PIPELINES.get(task)
    languages = [config.get(side) for side in ("from", "to")]
    known = [one for one in languages if isinstance(one, str) and _LANGUAGE.fullmatch(one)]
    head: dict[str, Any] = {"library_name": "regard"}
    head |= {"pipeline_tag": pipeline} if pipeline else {}
    head |= {"tags": ["regard", task, str(config.get("family"))]}
    head |= {"language": list(dict.fromkeys(known))} if known else {}
    metrics = [
        {"type": name, "value": value, "name": name.replace("_", " ")}
        for name, value in scores.items()
        # what validation chose is no metric: encoder_weight, linear_weight
        if not name.endswith(("better", "_weight")) and math.isfinite(value)
    ]
    if metrics:
        part = {"type": "own", "name": f"validation part of {data or 'own data'}"}
        result = {"task": {"type": pipeline or task}, "dataset": part, "metrics": metrics}
        head |= {"model-index": [{"name": f"regard-{task}", "results": [result]}]}
    rows = [f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in head.items()]
    return "".join(["---\n", *rows, "---\n\n"])
