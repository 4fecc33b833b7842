"""Every checkpoint format is one table that is read both ways."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from regard.errors import UsageError
from regard.layers.init import INITS
from regard.models import family, preset
from regard.pretrained.config_keys import Key
from regard.pretrained.format import Architecture, Format, differing
from regard.pretrained.formats import FORMATS, find_format, fitting
from regard.pretrained.formats.decoders import GPT2
from regard.pretrained.weight_conversion import to_ours, to_theirs

CASES = [(f.model_type, name) for f in FORMATS.values() for name in f.architectures]
CASES.remove(("bart", "BartModel"))  # which is only read
HOME = Path(__file__).resolve().parents[2]
# halves of a CLIP, which is swept as a whole, and Whisper: models/test_whisper.py
HALVES = {"clip_text_model", "clip_vision_model", "whisper"}


def test_the_page_of_checkpoints_lists_every_format_and_what_it_runs_as():
    page = (HOME / "docs" / "checkpoints.md").read_text()
    rows = dict(re.findall(r"^\| ([a-z0-9_, -]+) \| (.+) \|$", page, re.MULTILINE))
    told = {name: runs for names, runs in rows.items() for name in names.split(", ")}
    assert set(told) == set(FORMATS)
    for name, format in FORMATS.items():
        for task in {one.task for one in format.architectures.values()}:
            assert task in told[name], f"{name} runs as {task}, too"


def test_the_parity_sweep_has_every_format():
    sweep = (HOME / "bench" / "parity.py").read_text()
    assert set(re.findall(r'^    "([a-z0-9_-]+)": Case\(', sweep, re.MULTILINE)) == (
        set(FORMATS) - HALVES
    )


@pytest.mark.parametrize("model_type", FORMATS)
def test_what_a_file_leaves_out_means_what_it_means_to_transformers(model_type: str):
    theirs, format = transformers.AutoConfig.for_model(model_type), FORMATS[model_type]
    usual = format.prepare({})  # mT5 is a T5 with other defaults
    own = [key for one in format.architectures.values() for key in one.keys]
    for key in (*format.keys, *own):
        # what they have no default for, or one that is made of others
        found = getattr(theirs, key.theirs, None) if isinstance(key, Key) else None
        if isinstance(key, Key) and None not in (found, key.default):
            right = usual.get(key.theirs, key.default)
            assert (tuple(found) if isinstance(found, list) else found) == right, key.theirs


@pytest.mark.parametrize("model_type,named", CASES)
def test_what_a_format_reads_it_writes(model_type: str, named: str):
    format = find_format(model_type)
    given = {"relative_attention": True, "share_att_key": True, "position_biased_input": False}
    given = {**given, "pos_att_type": "p2c|c2p"} if model_type == "deberta-v2" else {}
    config = format.read_config(given, named)
    task = format.architectures[named].task
    theirs = format.write_config(config, task)
    assert not differing(config, format.read_config(theirs, theirs["architectures"][0]))


def test_a_new_format_is_one_table(monkeypatch: pytest.MonkeyPatch):
    toy = Format(
        "toy",
        "gpt",
        {"ToyLMHeadModel": Architecture("language", weights={"head": "out"})},
        (
            Key("vocab", "words", 11),
            Key("depth", "layers", 2),
            Key("block.width", "size", 8),
            Key("block.heads", "heads", 2),
            Key("block.ffn_width", "inner", 12),
        ),
        GPT2.weights,
        config={"tie": False, "max_length": 16},
        fixed={"flavour": "plain"},
        prefix="toy.",
    )
    monkeypatch.setitem(FORMATS, "toy", toy)
    config = find_format("toy").read_config({"model_type": "toy", "words": 13})
    model = family("gpt")[1](config)
    theirs = to_theirs(toy, config, dict(model.named_parameters()))
    assert {"toy.wte.weight", "toy.h.1.attn.c_attn.bias", "out.weight"} <= set(theirs)
    again = to_ours(toy, config, theirs)
    assert all(torch.equal(again[name], x) for name, x in model.named_parameters())
    assert fitting("gpt", config, "language")[0].model_type in ("toy", "gpt2")
    with pytest.raises(UsageError, match="flavour='sweet' is not supported; only plain is"):
        toy.read_config({"flavour": "sweet"})
    del theirs["out.weight"]
    with pytest.raises(UsageError, match="missing out.weight"):
        to_ours(toy, config, theirs)


def test_how_weights_were_drawn_does_not_keep_a_model_from_being_exported():
    config = preset("gpt", "gpt2")
    other = next(name for name in INITS if name != config.init)
    assert fitting("gpt", replace(config, init=other), "language")[0].model_type == "gpt2"
