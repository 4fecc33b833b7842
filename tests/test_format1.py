"""What the version before saved is still read: folders of format 1, and a run that it began."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import regard
from regard.errors import UsageError
from regard.files import read_json
from regard.models.captioner import CaptionerConfig
from regard.models.folder import load_folder, save_config, save_weights
from regard.settings import fill
from regard.weights import state_of

HOME = Path(__file__).parent / "data" / "format1"
IDS = torch.tensor([[1, 5, 7, 3], [1, 9, 4, 2]])
BEGUN = {"like": "early", "steps": 6, "batch": 4, "threads": 1, "ema": 0.9, "save_every": 0}
BEGUN |= {"valid_every": 3, "image": 8, "augment": "none", "depth": 1, "width": 8, "heads": 2}
BEGUN |= {"ffn_width": 8, "model.patch": 2}


def inputs(name: str) -> list[Tensor]:
    """Return what the model of a folder was asked when it was saved."""
    x = (torch.arange(2 * 3 * 8 * 8, dtype=torch.float32) * 0.7).sin().view(2, 3, 8, 8)
    return [x, IDS] if name == "captioner" else [x]


@pytest.mark.parametrize("name", ["resnet", "captioner"])
def test_a_folder_of_format_1_says_what_it_said(name: str, tmp_path: Path):
    folder = HOME / name
    assert read_json(folder / "config.json")["regard_format"] == 1
    model, config = load_folder(folder)
    stored = load_file(folder / "model.safetensors")
    ours = state_of(model)
    for key, tensor in stored.items():
        new = key if key in ours else key.replace(".mean", ".running_mean")
        new = new if new in ours else new.replace(".var", ".running_var")
        assert torch.equal(ours[new], tensor), key
    with torch.no_grad():
        out = model(*inputs(name))
    torch.testing.assert_close(out, load_file(folder / "expected.safetensors")["out"])
    # and in format 2 it is the same model
    save_config(tmp_path, model, name=name, task=config["task"], about={})
    save_weights(tmp_path, ours)
    again, config = load_folder(tmp_path)
    assert config["regard_format"] == 2 and again.config == model.config
    with torch.no_grad():
        assert torch.equal(again(*inputs(name)), out)


def test_words_that_a_config_had_are_understood_and_new_ones_are_written():
    old = read_json(HOME / "captioner" / "config.json")["model"]
    assert old["decoder"]["start"] == "normal" and old["encoder"]["local"]["together"] == 8
    config = load_folder(HOME / "captioner")[0].config
    assert (config.decoder.init, config.encoder.config.channels_per_head) == ("normal", 8)
    assert fill(CaptionerConfig, {"decoder.start": "gpt"}).decoder.init == "gpt"
    with pytest.raises(UsageError, match="given twice"):
        fill(CaptionerConfig, {"decoder.start": "gpt", "decoder.init": "gpt"})


def test_a_run_that_the_version_before_began_goes_on_to_the_same_end(tmp_path: Path):
    shutil.copytree(HOME / "begun", tmp_path / "begun")
    report = regard.train("images", data=str(HOME / "images"), out=str(tmp_path / "begun"), **BEGUN)
    assert report.finished
    for group in ("raw", "ema"):
        ours = load_file(tmp_path / "begun" / "checkpoints" / "step-6" / f"{group}.safetensors")
        theirs = load_file(HOME / f"begun.{group}.safetensors")
        names = {key.replace("running_", ""): key for key in ours if "num_batches" not in key}
        assert names.keys() == theirs.keys()
        for old, new in names.items():
            torch.testing.assert_close(ours[new], theirs[old])
    assert read_json(tmp_path / "begun" / "config.json")["regard_format"] == 2
    regard.load(tmp_path / "begun")
