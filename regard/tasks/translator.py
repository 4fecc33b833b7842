"""Older names, until no task imports them."""

from typing import Any

from regard.data.tokenizer import words_of_pieces  # noqa: F401


def own_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return a model's own defaults of decoding, without what is no setting."""
    told = config.get("generation", {})
    return {key: value for key, value in told.items() if key not in ("alignment_head", "rules")}
