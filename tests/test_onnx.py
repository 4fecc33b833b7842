"""A model exported to ONNX is the same model, whatever its parts, in every shape.

All configurations take some minutes and run with REGARD_SLOW=1; a few always do.
"""

import contextlib
import io
import json
import os
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import regard
from regard.errors import UsageError
from regard.onnx import export, export_onnx
from tests.tones import RATE, sound_folders, spoken, tones

pytest.importorskip("onnxruntime", reason="pip install regard[onnx]")
pytestmark = pytest.mark.filterwarnings("ignore")

_BASE = {"steps": 2, "threads": 1, "quiet": True, "few": False}
_TEXT = {"depth": 2, "width": 32, "heads": 4, "ffn_width": 48, "pieces": 300, "max_length": 40}
_SPEECH = {
    **{"depth": 1, "width": 32, "heads": 2, "ffn_width": 48, "kernel": 7, "model.channels": 8},
    **{"rate": RATE, "mels": 20, "subsampling": 2, "valid": "0.2", "steps": 2, "quiet": True},
}
_PAIR = {"width": 32, "heads": 4, "ffn_width": 48, "pieces": 300, "steps": 2, "quiet": True}
_PAIR |= {"model.encoder_depth": 1, "model.decoder_depth": 2, "model.max_length": 60}
_IMAGE = {"steps": 2, "quiet": True, "batch": 8, "none": 0}


def _texts(**more):
    return "classify", {**_BASE, **_TEXT, **more}


def _like(name, **more):
    small = {"depth": 2, "width": 32, "heads": 4, "ffn_width": 48, "pieces": 300, "max_length": 40}
    return "classify", {**_BASE, **small, "like": name, **more}


def _tags(**more):
    return "tag", {**_TEXT, "steps": 2, "quiet": True, "threads": 1, "linear": False, **more}


def _images(family, **more):
    return "images", {**_IMAGE, "family": family, **more}


def _sounds(**more):
    return "sounds", {**_SPEECH, "none": 0, **more}


def _series(**more):
    return "series", {"steps": 2, "quiet": True, "size": "tiny", **more}


def _pairs(**more):
    return "translate", {**_PAIR, **more}


def _speech(**more):
    return "transcribe", {**_SPEECH, **more}


# name -> task and settings of a training
CONFIGS = {
    "text": _texts(),
    "text learned post": _texts(position="learned", **{"model.block.order": "post"}),
    "text sinusoidal rms": _texts(position="sinusoidal", norm="rms"),
    "text alibi swiglu": _texts(position="alibi", **{"model.block.feed_forward": "swiglu"}),
    "text t5 geglu": _texts(position="t5", **{"model.block.feed_forward": "geglu"}),
    "text shaw max": _texts(position="shaw", pool="max"),
    "text xl attention": _texts(position="xl", pool="attention"),
    "text fire convolution": _texts(position="fire", pool="convolution"),
    "text kerple first": _texts(position="kerple_log", pool="first"),
    "text yarn": _texts(position="yarn"),
    "text part of rotary": _texts(position="rotary_part"),
    "text none": _texts(position="none"),
    "text grouped queries": _texts(**{"model.block.kv_heads": 2}),
    "text window": _texts(**{"model.window": 5}),
    "text additive": _texts(**{"model.block.score": "additive"}),
    "text cosine": _texts(**{"model.block.score": "cosine_learned"}),
    "text capped": _texts(**{"model.block.score": "capped"}),
    "text ensemble": _texts(members=2),
    "text features": _texts(features="words+affixes"),
    "text many labels": _texts(clusters=3, cluster_beam=2, separator="|"),
    "albert": _like("albert"),
    "deberta": _like("deberta"),
    "modernbert": _like("modernbert", **{"model.window_layers": "1"}),
    "mpnet": _like("mpnet"),
    "electra": _like("electra"),
    "tags": _tags(),
    "tags mean": _tags(join="mean", position="learned"),
    "vit": _images("vit"),
    "vit rotary": _images("vit", position="rotary", **{"model.pool": "mean"}),
    "swin": _images("swin"),
    "mvit": _images("mvit"),
    "resnet": _images("resnet"),
    "local": _images("local"),
    "sounds": _sounds(),
    "sounds transformer": _sounds(like="speech_transformer", **{"model.pool": "max"}),
    "series": _series(),
    "series overlapping": _series(**{"model.chunk": "6", "model.stride": "4"}),
    "series ensemble": _series(**{"model.members": 2}, position="learned"),
    "translate": _pairs(),
    "translate t5": _pairs(like="t5"),
    "translate bart": _pairs(like="bart"),
    "translate marian apart": _pairs(like="marian", vocabularies="separate"),
    "translate rotary rms": _pairs(position="rotary", norm="rms"),
    "translate alibi grouped": _pairs(position="alibi", **{"model.block.kv_heads": 2}),
    "transcribe": _speech(),
    "transcribe with a decoder": _speech(decoder_depth=1),
    "transcribe by attention": _speech(decoder_depth=1, **{"model.ctc": False}),
    "transcribe layer norms": _speech(**{"model.convolution_norm": "layer"}, position="rotary"),
}
ALWAYS = ("text xl attention", "tags mean", "swin", "series overlapping", "transcribe by attention")
_WORDS = ["red", "green", "blue", "stone", "river", "cloud", "paper", "window", "under", "over"]


def _sentence(chance: random.Random) -> str:
    return " ".join(chance.choices(_WORDS, k=chance.randint(1, 12)))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Small data of each task."""
    home, chance = tmp_path_factory.mktemp("data"), random.Random(1)
    lines = [_sentence(chance) for _ in range(60)]
    (home / "texts.tsv").write_text("".join(f"{x}\t{x.split()[0]}\n" for x in lines))
    several = ("".join(f"{x}\t{'|'.join(sorted(set(x.split())))}\n") for x in lines)
    (home / "several.tsv").write_text("".join(several))
    (home / "pairs.tsv").write_text("".join(f"{x}\t{x[::-1]}\n" for x in lines))
    tagged = ("".join(f"{w}\t{w[0].upper()}\n" for w in x.split()) + "\n" for x in lines)
    (home / "tags.tsv").write_text("".join(tagged))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 30, 2)), np.array(["up", "down"] * 20)
    np.savez(home / "series.npz", x=x, y=y)
    for n, label in enumerate(y):
        (home / "images" / label).mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 255, (32, 32, 3), np.uint8)
        Image.fromarray(pixels).save(home / "images" / label / f"{n}.png")
    return {
        "classify": home / "texts.tsv",
        "several": home / "several.tsv",
        "tag": home / "tags.tsv",
        "translate": home / "pairs.tsv",
        "series": home / "series.npz",
        "images": home / "images",
        "sounds": sound_folders(home / "sounds", 24),
        "transcribe": spoken(home / "speech", 24),
    }


def trained(name, data, home):
    task, settings = CONFIGS[name]
    source = data["several" if "clusters" in settings else task]
    alone = {"linear": False} if task in ("classify", "images", "series", "sounds") else {}
    regard.train(task, data=source, out=home / "run", **settings, **alone)
    return regard.load(home / "run")


def answer_by_readme(folder: Path, **changed: str) -> str:
    """Print what the example in the README prints, with other inputs."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    for old, new in changed.items():
        assert old.replace("_", " ") in code
        code = code.replace(old.replace("_", " "), new)
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        exec(code, {})
    return printed.getvalue().strip()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_files_compute_what_the_model_does(name, data, tmp_path):
    if name not in ALWAYS and os.environ.get("REGARD_SLOW") != "1":
        pytest.skip("slow; set REGARD_SLOW=1")
    runner = trained(name, data, tmp_path)
    with torch.no_grad():  # weights large enough that outputs differ
        for parameter in runner.model.parameters():
            parameter.mul_(1.5)
    out = export_onnx(runner, tmp_path / "out")
    about = json.loads((out / "onnx.json").read_text())
    assert about["largest_difference"] <= export.TOLERANCE
    assert about["files"] == sorted((p.name for p in out.glob("*.onnx")), reverse=True)
    if name != "text features":
        told = answer_by_readme(out)
        assert told or runner.name == "transcribe"  # an untrained model may hear nothing
    if runner.name not in ("images", "series", "sounds", "tag", "classify"):
        return
    # the model itself is as it was: nothing of the export is kept in it
    again = export.PROGRAMS[runner.name](runner).programs[0]
    (ours,) = again(*again.sample(3, min(5, again.longest)))
    assert ours.isfinite().all() and ours.std() > 0


def test_translations_by_the_example_are_those_of_the_model(tmp_path):
    regard.export("en-zh", format="onnx", out=tmp_path / "onnx")
    model = regard.load("en-zh", task="translate")
    for text in ("How are you?", "I do not know where he lives.", "Tom"):
        by_onnx = answer_by_readme(tmp_path / "onnx", one_sentence=text)
        assert by_onnx == model.run(text, beam=1).text


def test_vectors_by_the_example_are_those_of_the_model(tmp_path):
    out = tmp_path / "onnx"
    regard.export("embed", format="onnx", out=out)
    texts = ["a cat", "the weather is fine today, and so am I"]
    code = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)[0]
    found: dict = {}
    with contextlib.chdir(out):
        exec(code.replace('["one text", "another one"]', repr(texts)), found)
    expected = np.stack([one.vector for one in regard.load("embed", task="embed").run(texts)])
    np.testing.assert_allclose(found["vectors"], expected, atol=1e-5)


def test_tags_by_the_example_are_those_of_the_model(data, tmp_path):
    runner = trained("tags", data, tmp_path)
    export_onnx(runner, tmp_path / "onnx")
    text = "red window under behind"
    told = answer_by_readme(tmp_path / "onnx", one_text_of_words=text)
    answer = runner.run(text, words="spaces")
    assert told == str(list(zip(answer.words, answer.tags, strict=True)))


def test_labels_by_the_example_are_those_of_the_model(tmp_path):
    out = tmp_path / "onnx"
    regard.export("fashion", format="onnx", out=out)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (6, 28, 28), np.uint8)
    runner = regard.load("fashion")
    run = export.open_onnx(out / "model.onnx")
    read = np.stack([runner.codec.format.read(image) for image in images])
    (logits,) = run(torch.from_numpy(read))
    expected = [answer.probabilities for answer in runner.run(list(images))]
    shares = np.exp(logits - logits.max(1, keepdims=True))
    np.testing.assert_allclose(shares / shares.sum(1, keepdims=True), expected, atol=1e-5)


def test_a_difference_is_an_error_and_leaves_nothing_behind(tmp_path, monkeypatch):
    real = export.open_onnx

    def slightly_wrong(path):
        run = real(path)
        return lambda *inputs: [x + np.float32(2e-4) for x in run(*inputs)]

    monkeypatch.setattr(export, "open_onnx", slightly_wrong)
    with pytest.raises(UsageError, match=r"model.onnx: vectors of 1 rows of length 1 is 2.0e-04"):
        regard.export("embed", format="onnx", out=tmp_path / "onnx")
    assert list(tmp_path.iterdir()) == []


def test_other_texts_are_an_error(tmp_path, monkeypatch):
    real = export.write_greedily

    def other(encoder, *rest):
        ids = real(encoder, *rest)
        return ids if isinstance(encoder, export.Program) else [*ids, 7]

    monkeypatch.setattr(export, "write_greedily", other)
    with pytest.raises(UsageError, match="where the model writes"):
        regard.export("en-zh", format="onnx", out=tmp_path / "onnx")
    assert list(tmp_path.iterdir()) == []


def test_what_has_no_onnx_form_is_refused_by_name(data, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="not one for language"):
        regard.export("shakespeare", format="onnx", out=tmp_path / "onnx")
    with pytest.raises(UsageError, match="quantization= is not for format=onnx"):
        regard.export("en-zh", format="onnx", quantization="int8", out=tmp_path / "onnx")
    small = {"width": 16, "pieces": 300, "steps": 1, "quiet": True}
    run = tmp_path / "recurrent"
    regard.train("translate", data=data["translate"], out=run, like="rnnsearch", **small)
    with pytest.raises(UsageError, match="a transformer for translate from us, not a recurrent"):
        regard.export(run, format="onnx", out=tmp_path / "onnx")
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(UsageError, match=r"onnxruntime is not installed; pip install regard\[onnx"):
        regard.export("embed", format="onnx", out=tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


def test_a_sound_is_read_as_the_model_reads_it(data, tmp_path):
    runner = trained("sounds", data, tmp_path)
    export_onnx(runner, tmp_path / "onnx")
    samples = tones("A", np.random.default_rng(3))
    features = runner.codec.format.spectrogram(samples)
    run = export.open_onnx(tmp_path / "onnx" / "model.onnx")
    (logits,) = run(features.unsqueeze(0), torch.tensor([len(features)]))
    shares = np.exp(logits[0]) / np.exp(logits[0]).sum()
    np.testing.assert_allclose(shares, runner.run(samples).probabilities, atol=1e-5)
