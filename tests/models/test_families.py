"""The page on families says of each what the code says."""

import re
from pathlib import Path
from typing import Any

import pytest

from regard.models import bert, conformer, gpt, transformer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
# module -> who may look at whom
MASKS = {
    bert: "everyone sees everyone",
    gpt: "causal",
    conformer: "every frame sees every frame",
    transformer: "encoder: everyone sees everyone; decoder: causal, and the whole source",
}
ROWS = {name: module for module in MASKS for name in module.PRESETS}


def parts(name: str) -> dict[str, str]:
    """Return the parts of a family by the words of the page."""
    module = ROWS[name]
    config: Any = module.PRESETS[name]
    block = config.block
    window = getattr(config, "window", None)
    last = "less than" if module is bert else "the last"
    some = getattr(config, "window_layers", None)
    near = f" in {len(some)} of {config.depth} layers" if some else ""
    embed_norm = getattr(config, "embed_norm", "none")
    shared = block.kv_heads not in (None, block.heads)
    norm = block.norm + (", and after the embeddings" if embed_norm != "none" else "")
    norm += ", and of queries and keys" if block.head_norm != "none" else ""
    biases = {"same": "yes" if block.bias else "no", "qkv": "of queries, keys and values"}
    return {
        "norm": norm,
        "order": block.order,
        "feed-forward": block.feed_forward,
        "score": block.score,
        "position": config.position,
        "mask": MASKS[module] + (f", {last} {window} tokens{near}" if window else ""),
        "heads": f"{block.heads}" + (f", which share {block.kv_heads} of keys" if shared else ""),
        "bias": biases[block.attention_bias],
    }


def table(name: str) -> str:
    """Return the table of a family."""
    rows = parts(name)
    return "\n".join(
        "| " + " | ".join(line) + " |" for line in (rows, ["---"] * len(rows), rows.values())
    )


def test_the_page_has_every_family_once():
    text = PAGE.read_text()
    named = re.findall(r"^### .*\(`(.+)`\)$", text, re.MULTILINE)
    assert sorted(named) == sorted(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_the_page_says_what_the_code_says(name: str):
    section = PAGE.read_text().split(f"(`{name}`)\n")[1].split("\n#")[0]
    assert table(name) in section
