"""Older names, until no task imports them."""

from typing import Any


def own_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return a model's own defaults of decoding, without what is no setting."""
    told = config.get("generation", {})
    return {key: value for key, value in told.items() if key not in ("alignment_head", "rules")}
