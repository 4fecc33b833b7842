"""README of a folder of ONNX files: what goes in, what comes out, and how to call it."""

from collections.abc import Mapping
from typing import Any

from regard import __version__
from regard.onnx.programs import Axes, Exported
from regard.tasks.runner import Runner

_TOKENS = """\
import json

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

about = json.load(open("onnx.json"))
"""
_PADDED = """\
session = onnxruntime.InferenceSession("model.onnx")
tokenizer = Tokenizer.from_file("tokenizer.json")
rows = [encoding.ids[: about["max_length"]] for encoding in tokenizer.encode_batch(texts)]
lengths = np.array([len(row) for row in rows])
ids = np.full((len(rows), lengths.max()), about["pad"])
for place, row in zip(ids, rows):
    place[: len(row)] = row
"""
_LABELS = """\
best = logits.argmax(-1)
print([about["labels"][i] for i in best])
"""
_SEVERAL = """\
probabilities = 1 / (1 + np.exp(-logits))
print([[label for label, p in zip(about["labels"], row) if p >= 0.5] for row in probabilities])
"""
_CLASSIFY = (
    _TOKENS
    + 'texts = ["one text", "another one"]\n'
    + _PADDED
    + '(logits,) = session.run(None, {"ids": ids, "lengths": lengths})\n'
)
_EMBED = (
    _TOKENS
    + 'texts = ["one text", "another one"]\n'
    + _PADDED
    + '(vectors,) = session.run(None, {"ids": ids, "lengths": lengths})\nprint(vectors.shape)\n'
)
_TAG = (
    _TOKENS
    + """\
words = "one text of words".split()
session = onnxruntime.InferenceSession("model.onnx")
encoding = Tokenizer.from_file("tokenizer.json").encode(words, is_pretokenized=True)
ids = np.array([encoding.ids])
(logits,) = session.run(None, {"ids": ids, "lengths": np.array([ids.shape[1]])})
places = [[n for n, w in enumerate(encoding.word_ids) if w == word] for word in range(len(words))]
if about["join"] == "first":
    places = [some[:1] for some in places]
tags = [about["labels"][logits[0, some].mean(0).argmax()] for some in places]
print(list(zip(words, tags)))
"""
)
_ARRAYS = """\
import json

import numpy as np
import onnxruntime

about = json.load(open("onnx.json"))
session = onnxruntime.InferenceSession("model.onnx")
"""
_IMAGES = (
    _ARRAYS
    + """\
image = about["image"]  # bytes, cut and resized as `fit` and `resample` say
pixels = np.zeros((1, image["channels"], image["size"], image["size"]), np.uint8)
(logits,) = session.run(None, {"pixels": pixels})
"""
)
_SERIES = (
    _ARRAYS
    + """\
series = np.zeros((1, 50, about["channels"]), np.float32)  # as measured; NaN is missing
(logits,) = session.run(None, {"series": series, "lengths": np.array([50])})
"""
)
_SOUNDS = (
    _ARRAYS
    + """\
spectrograms = np.zeros((1, 100, about["sound"]["mels"]), np.float32)  # log-mel, normalised
(logits,) = session.run(None, {"spectrograms": spectrograms, "lengths": np.array([100])})
"""
)
_GREEDY = """\
written = list(about["begin"])
while len(written) < len(about["begin"]) + about["most"]:
    given = {"ids": np.array([written]), "memory": memory, "lengths": lengths}
    logits = decoder.run(None, given)[0][0, -1]
    logits[about["never"]] = -np.inf
    if (token := int(logits.argmax())) == about["end"]:
        break
    written.append(token)
"""
_TRANSLATE = (
    _TOKENS
    + """\
encoder, decoder = (onnxruntime.InferenceSession(f"{name}.onnx") for name in ("encoder", "decoder"))
source, target = (Tokenizer.from_file(path) for path in ({source!r}, {target!r}))
ids = np.array([source.encode("one sentence").ids])
lengths = np.array([ids.shape[1]])
(memory,) = encoder.run(None, {"ids": ids, "lengths": lengths})
"""
    + _GREEDY
    + 'print(target.decode(written[len(about["begin"]) :]))\n'
)
_HEAR = """\
encoder = onnxruntime.InferenceSession("encoder.onnx")
tokenizer = Tokenizer.from_file("tokenizer.json")
spectrograms = np.zeros((1, 100, about["sound"]["mels"]), np.float32)  # log-mel, normalised
given = {"spectrograms": spectrograms, "lengths": np.array([100])}
memory, lengths, *ctc = encoder.run(None, given)
"""
_CTC = (
    _TOKENS
    + _HEAR
    + """\
path = ctc[0][0].argmax(-1)  # the likeliest token of each frame; 0 is blank
ids = [int(b) for a, b in zip([0, *path], path) if b != a and b != about["blank"]]
print(tokenizer.decode(ids))
"""
)
_WRITE = (
    _TOKENS
    + _HEAR
    + 'decoder = onnxruntime.InferenceSession("decoder.onnx")\n'
    + _GREEDY
    + 'print(tokenizer.decode(written[len(about["begin"]) :]))\n'
)
_CALLS = {
    "classify": _CLASSIFY,
    "tag": _TAG,
    "embed": _EMBED,
    "images": _IMAGES,
    "sounds": _SOUNDS,
    "series": _SERIES,
    "translate": _TRANSLATE,
    "text": _TRANSLATE,
}
_TYPES = {"ids": "int64", "lengths": "int64", "types": "int64", "memory_lengths": "int64"}
_TYPES |= {"pixels": "uint8"}


def _listed(values: Mapping[str, Axes]) -> str:
    rows = [
        f"- `{name}`: {_TYPES.get(name, 'float32')} ({', '.join(map(str, axes))})"
        for name, axes in values.items()
    ]
    return "\n".join(rows)


def _call(runner: Runner[Any], exported: Exported) -> str:
    """Python that calls the files."""
    if runner.name == "transcribe":
        return _CTC if exported.greedy is None else _WRITE
    code = _CALLS[runner.name]
    if exported.tokenizers is not None:
        both = exported.tokenizers[0] is not exported.tokenizers[1]
        sides = {side: f"{side}/tokenizer.json" if both else "tokenizer.json" for side in _SIDES}
        for side, path in sides.items():
            code = code.replace(f"{{{side}!r}}", repr(path))
    if runner.labels and runner.name != "tag":
        code += _SEVERAL if exported.about.get("several") else _LABELS
    return code


_SIDES = ("source", "target")


def readme(runner: Runner[Any], exported: Exported, worst: float) -> str:
    """What the folder holds and how it is used."""
    parts = [f"# A model for `{runner.name}` in ONNX\n"]
    parts.append(
        f"A {runner.family} written by Regard {__version__}. Its outputs, by onnxruntime, were "
        f"compared with the model's on inputs of several shapes: the largest difference is "
        f"{worst:.0e}. `onnx.json` says what else must be known.\n"
    )
    for program in exported.programs:
        parts.append(f"## {program.name}.onnx\n\nInputs:\n\n{_listed(program.inputs)}\n")
        parts.append(f"Outputs:\n\n{_listed(program.outputs)}\n")
    parts += [f"{note}\n" for note in exported.notes]
    if "sound" in exported.about:
        parts.append(
            "Spectrograms are made as `sound` in onnx.json says: log-mel features of `window` and "
            "`hop` seconds at `rate`, in the manner of `features`, normalised by `normalise`. In "
            "Python: `regard.data.spectrogram.SoundFormat(...).spectrogram(samples)`.\n"
        )
    if getattr(runner.codec, "outliers", None) is not None:
        parts.append("Whether an input is none of what was learnt is not part of the files.\n")
    parts.append(f"## Calling it\n\n```python\n{_call(runner, exported)}```\n")
    return "\n".join(parts)
