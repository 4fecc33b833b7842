"""One HTML file in which attention can be explored, without any outside resource."""

import base64
import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from io import BytesIO

import numpy as np
from PIL import Image

from regard.errors import UsageError
from regard.viewer.beams import tree_data
from regard.viewer.picture import (
    Picture,
    Placement,
    Recording,
    TokenGrid,
    View,
    language_of,
    readable,
    show_token,
)
from regard.viewer.placement import subsample_queries

_MAX_FINE_WEIGHTS = 1_500_000  # up to so many weights a page keeps 16 bits of each, beyond that 8
MAX_WEIGHTS = 64_000_000  # more than this no browser opens with pleasure
MAX_IMAGE_WEIGHTS = 8_000_000  # weights over images: of more, only some queries are kept
_MAX_PHOTO_SIDE = 768  # pixels
_MAX_LOSSLESS_SIDE = 96  # pixels to a side of an image that is kept to the bit
_MAX_SPECTROGRAM_SIDE = 2048  # pixels
_MAX_SAMPLES = 4_000_000  # of a recording that a page can play; a longer one is only shown

PAGE_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
"""
_PAGE = (
    PAGE_HEAD
    + """<body>
<main id="page"><noscript>This page draws attention with a script of its own (nothing is loaded
from elsewhere); please allow scripts to see it.</noscript></main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""
)


def page(pictures: Picture | Sequence[Picture]) -> str:
    """Write pictures as one HTML page that runs its own script and nothing else."""
    shown = [pictures] if isinstance(pictures, Picture) else list(pictures)
    shown = [subsampled(picture, MAX_IMAGE_WEIGHTS // len(shown)) for picture in shown]
    total = sum(view.weights.size for picture in shown for view in picture.views)
    if total > MAX_WEIGHTS:
        raise UsageError(
            f"{total:,} attention weights are too many for a page, which holds {MAX_WEIGHTS:,}; "
            "choose some with layers= and heads=, or look at a shorter text"
        )
    levels = 65535 if total <= _MAX_FINE_WEIGHTS else 255
    title = readable(shown[0].title) if shown else "Attention"
    return write_page(title, {"pictures": [as_data(picture, levels) for picture in shown]})


def write_page(title: str, values: dict, script_file: str = "page.js") -> str:
    """Write what the page's script reads as one HTML page."""
    data = json.dumps(values, ensure_ascii=False)
    style, script = (
        files("regard.viewer").joinpath(name).read_text("utf-8")
        for name in ("page.css", script_file)
    )
    # Only the very bytes of our own script and style may run: a token never can.
    policy = (
        f"default-src 'none'; script-src {digest(script)}; style-src {digest(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return _PAGE.format(
        policy=policy, title=escape(title), style=style, data=inert(data), script=script
    )


def subsampled(picture: Picture, max_weights: int) -> Picture:
    """Keep so many weights over an image that a page of it stays small."""
    placed = [view for view in picture.views if view.placement is not None]
    if sum(view.weights.size for view in placed) <= max_weights:
        return picture
    each = max_weights // len(placed)
    views = tuple(subsample_queries(view, each, picture.query) for view in picture.views)
    return replace(picture, views=views)


def digest(code: str) -> str:
    """Hash by which a Content-Security-Policy allows inline code."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"


def inert(data: str) -> str:
    """Escape JSON so that nothing in it can end the element it stands in."""
    for letter in "<>&\u2028\u2029":
        data = data.replace(letter, f"\\u{ord(letter):04x}")
    return data


def as_data(picture: Picture, levels: int) -> dict:
    """Picture as the plain values that the page's script reads."""
    return {
        "title": readable(picture.title),
        "source": text(picture.source),
        "output": text(picture.output),
        "note": readable(picture.note),
        "alternatives": [[text(words), number(score)] for words, score in picture.alternatives],
        "opens": [picture.opens[0], str(picture.opens[1])] if picture.opens else None,
        "views": [view_data(view, levels) for view in picture.views],
        "steps": [
            {
                "token": show_token(step.token),
                "probability": number(step.probability),
                "candidates": [[show_token(token), number(p)] for token, p in step.candidates],
                "row": place if step.row is None else step.row,
                "note": readable(step.note),
            }
            for place, step in enumerate(picture.steps)
        ],
        "steps_language": language_of("".join(step.token for step in picture.steps)),
        "photo": None if picture.photo is None else image_data(picture.photo, photo_side(picture)),
        "query": list(picture.query) if isinstance(picture.query, tuple) else picture.query,
        "tiles": [[readable(tile.name), image_data(tile.pixels)] for tile in picture.tiles],
        "tiles_per_row": picture.tiles_per_row,
        "recording": None if picture.recording is None else recording_data(picture.recording),
        "tree": None
        if picture.tree is None
        else tree_data(picture.tree, [show_token(node.token) for node in picture.tree.nodes]),
    }


def photo_side(picture: Picture) -> int:
    """Most pixels to a side that a photo is kept with; a spectrogram is wide."""
    return _MAX_PHOTO_SIDE if picture.recording is None else _MAX_SPECTROGRAM_SIDE


def recording_data(recording: Recording) -> dict:
    """Recording as plain values: 16-bit samples, 8-bit posteriors, and its words."""
    samples = recording.samples if len(recording.samples) <= _MAX_SAMPLES else np.zeros(0)
    whole = np.rint(np.clip(samples, -1, 1) * 32767).astype("<i2")
    posteriors = recording.posteriors
    levels = None if posteriors is None else np.rint(np.clip(posteriors, 0, 1) * 255).astype("u1")
    return {
        "rate": recording.rate,
        "seconds": number(recording.seconds),
        "samples": compress(whole.tobytes()),
        "words": [
            [
                show_token(word.text),
                number(word.start),
                number(word.end),
                None if word.confidence is None else number(word.confidence),
            ]
            for word in recording.words
        ],
        "units": [show_token(unit) if unit else "" for unit in recording.units],
        "posteriors": None if levels is None else compress(levels.tobytes()),
    }


def view_data(view: View, levels: int) -> dict:
    """View as plain values, its weights in few bits."""
    data = {
        "name": readable(view.name),
        "kind": view.kind,
        "heads": [str(name) for name in view.heads],
        "levels": levels,
        "weights": pack(view.weights, levels),
    }
    if view.placement is not None:
        return {**data, "placement": placement_data(view.placement)}
    return {
        **data,
        "rows": [show_token(token) for token in view.row_tokens],
        "columns": [show_token(token) for token in view.column_tokens],
        "writes": [show_token(token) for token in view.writes] if view.writes else None,
        "rows_language": language_of("".join(view.row_tokens)),
        "columns_language": language_of("".join(view.column_tokens)),
    }


def placement_data(placement: Placement) -> dict:
    """Place of a view on an image, as plain values."""

    def grid(side: TokenGrid) -> dict:
        return {**vars(side), "names": [readable(name) for name in side.names]}

    return {
        "query_grid": grid(placement.query_grid),
        "key_grid": grid(placement.key_grid),
        "query_tokens": compress(placement.query_tokens.astype("<i4").tobytes()),
        "key_tokens": compress(placement.key_tokens.astype("<i4").tobytes()),
        "keys_per_query": placement.key_tokens.shape[1],
    }


def image_data(pixels: np.ndarray, side: int = _MAX_PHOTO_SIDE) -> str:
    """Image as the text of a file: to the bit if it is small, smaller if it is large."""
    image, stream = Image.fromarray(pixels), BytesIO()
    image.thumbnail((side, side))
    if max(image.size) <= _MAX_LOSSLESS_SIDE:
        image.save(stream, "PNG")
    else:
        image.save(stream, "JPEG", quality=88)
    return base64.b64encode(stream.getvalue()).decode()


def compress(raw: bytes) -> str:
    """Bytes as base64 of zlib."""
    return base64.b64encode(zlib.compress(raw, 6)).decode()


def pack(weights: np.ndarray, levels: int) -> str:
    """Pack weights as the largest of each row, then each as a share of that in equal levels."""
    largest = weights.max(axis=2, keepdims=True)
    shares = np.divide(weights, largest, out=np.zeros_like(weights), where=largest > 0)
    whole = np.rint(shares * levels).astype("<u2" if levels > 255 else "u1")
    return compress(largest.astype("<f4").tobytes() + whole.tobytes())


def text(words: str) -> dict[str, str]:
    """Text with the language whose letter shapes it needs."""
    return {"text": readable(words, keep=" \n"), "language": language_of(words)}


def number(value: float) -> float | None:
    """Round to six digits, which JSON can hold; what is no number becomes null."""
    return float(f"{value:.6g}") if np.isfinite(value) else None
