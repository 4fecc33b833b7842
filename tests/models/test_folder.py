"""A model's folder: save then load is the identity, and what was tampered with is refused."""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import regard
from regard.data.tokenize import train_tokenizer
from regard.errors import UsageError
from regard.files import read_json
from regard.files.weights import state_of
from regard.layers.block import BlockConfig
from regard.models.folder import load_folder, save_config, save_weights
from regard.models.transformer import Transformer, TransformerConfig
from regard.pretrained.tokenizer_folder import load_tokenizers, save_tokenizers

LINES = ["a dog runs in the house", "the cat sits under the tree"] * 5


def build(**config: Any) -> Transformer:
    torch.manual_seed(0)
    block = BlockConfig(width=16, heads=2, ffn_width=16)
    return Transformer(TransformerConfig(**{"block": block, **sizes(), **config})).eval()


def sizes() -> dict[str, int]:
    return {"source_vocab": 300, "target_vocab": 300, "encoder_depth": 1, "decoder_depth": 1}


def save(folder: Path, model: Transformer, dtype: torch.dtype | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    about = {"from": "en", "to": "de"}
    save_config(folder, model, name="transformer", task="translate", about=about)
    save_weights(folder, state_of(model), dtype)
    return folder


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"tie": "target"},
        {"tie": "none"},
        {"tie": "target", "target_vocab": 40},
        {"position": "learned", "max_length": 30},
        {"position": "rotary", "head_bias": True},
        {"block": BlockConfig(width=16, heads=4, kv_heads=2, ffn_width=16, norm="rms")},
        {"block": BlockConfig(width=16, heads=2, ffn_width=16, order="post", bias=False)},
    ],
)
def test_save_then_load_is_the_identity(tmp_path, config):
    model = build(**config)
    other, found = load_folder(save(tmp_path / "model", model))
    assert isinstance(other, Transformer)
    assert other.config == model.config
    assert (found["from"], found["to"], found["task"]) == ("en", "de", "translate")
    ours, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not other.training
    ids = torch.tensor([[5, 6, 7, 2]]), torch.tensor([[1, 9, 8]])
    with torch.no_grad():  # weights are laid out by columns, which some processors add up otherwise
        torch.testing.assert_close(other(*ids), model(*ids), atol=2e-6, rtol=2e-6)


def test_what_was_shared_is_shared_again_and_written_once(tmp_path):
    folder = save(tmp_path / "model", build())
    names = load_file(folder / "model.safetensors").keys()
    assert sum("tokens" in name or "head" in name for name in names) == 1
    model, _ = load_folder(folder)
    assert isinstance(model, Transformer)
    assert model.source.tokens.weight is model.target.tokens.weight is model.head.weight


def test_half_precision_on_disk_is_single_in_memory(tmp_path):
    model = build()
    folder = save(tmp_path / "model", model, torch.float16)
    assert (folder / "model.safetensors").stat().st_size < 0.6 * sum(
        4 * p.numel() for p in model.parameters()
    )
    other, _ = load_folder(folder)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert two.dtype == torch.float32
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


def test_tokenizers_of_both_sides_or_of_one(tmp_path):
    one, two = (train_tokenizer(lines, vocab=300) for lines in (LINES, [x[::-1] for x in LINES]))
    save_tokenizers(tmp_path, (one, two))
    assert [t.sha for t in load_tokenizers(tmp_path)] == [one.sha, two.sha]
    (tmp_path / "both").mkdir()
    save_tokenizers(tmp_path / "both", (one, one))
    source, target = load_tokenizers(tmp_path / "both")
    assert source is target and source.sha == one.sha


# Tampering


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("folder") / "model"
    tokenizer = train_tokenizer(LINES, vocab=300)
    save(folder, build(source_vocab=tokenizer.vocab, target_vocab=tokenizer.vocab))
    save_tokenizers(folder, (tokenizer, tokenizer))
    return folder


@pytest.fixture
def folder(good, tmp_path) -> Path:
    import shutil

    return Path(shutil.copytree(good, tmp_path / "model"))


def refused(folder: Path) -> str:
    """Load a folder that must be refused in one line, quickly and for little memory."""
    started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UsageError) as mistake:
        regard.load(folder)
    assert time.process_time() - started < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB
    text = str(mistake.value)
    assert "\n" not in text and str(folder) in text and len(text) < 600
    return text


def change(folder: Path, path: tuple[str, ...], value: Any) -> None:
    """Change one place of config.json."""
    whole = json.loads((folder / "config.json").read_text())
    place = whole
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (folder / "config.json").write_text(json.dumps(whole))


def test_the_folder_is_good_before_it_is_spoilt(folder):
    assert regard.load(folder).run(["a dog"], max_length=3)


@pytest.mark.parametrize(
    "changes",
    [
        {("model", "encoder_depth"): 70, ("model", "block", "width"): 2**17},
        {("model", "block", "width"): 2**20, ("model", "block", "ffn_width"): 2**22},
        {("model", "source_vocab"): 10**7, ("model", "target_vocab"): 10**7}
        | {("model", "block", "width"): 10**5},
        {("model", "position"): "learned", ("model", "max_length"): 10**7}
        | {("model", "block", "width"): 10**5},
    ],
)
def test_a_trillion_parameters_are_refused(folder, changes):
    for path, value in changes.items():
        change(folder, path, value)
    assert "parameters; too many to be meant" in refused(folder)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("regard_format",), 3, "regard_format is 3"),
        (("regard_format",), None, "not a Regard model"),
        (("family",), "transfomer", "unknown family 'transfomer'"),
        (("family",), ["transformer"], "unknown family"),
        (("family",), {}, "unknown family"),
        (("task",), "translat", "unknown task 'translat'"),
        (("task",), ["translate"], "unknown task"),
        (("task",), None, "unknown task"),
        (("from",), 5, "'from'"),
        (("to",), ["de"], "'to'"),
        (("model",), [], "'model' is not an object"),
        (("model",), None, "'model' is not an object"),
        (("model", "block"), "big", "block"),
        (("model", "block"), {"width": {"a": 1}}, "width"),
        (("model", "block", "width"), "wide", "block.width='wide' is not a whole number"),
        (("model", "block", "width"), 16.5, "block.width=16.5 is not a whole number"),
        (("model", "block", "width"), None, "block.width=None"),
        (("model", "block", "width"), True, "block.width=True"),
        (("model", "block", "width"), [16], "block.width=[16]"),
        (("model", "block", "width"), -16, "block.width=-16 is too small"),
        (("model", "block", "width"), 10**30, "not a whole number of at most 63 bits"),
        (("model", "block", "width"), 10**18, "block.width"),
        (("model", "block", "norm_eps"), -1e-5, "block.norm_eps=-1e-05 is too small"),
        (("model", "encoder_depth"), 1000, "1,001 layers are too many for 35 weights"),
        (("model", "block", "heads"), 0, "block.heads=0 is too small"),
        (("model", "block", "heads"), 3, "heads"),
        (("model", "block", "dropout"), "NaN", "dropout"),
        (("model", "block", "dropout"), float("nan"), "dropout"),
        (("model", "block", "norm"), 7, "norm=7 is not text"),
        (("model", "block", "norm"), "rmss", "unknown norm 'rmss'"),
        (("model", "position"), "roap", "unknown position 'roap'"),
        (("model", "tie"), "some", "unknown tie 'some'"),
        (("model", "wdith"), 3, "unknown key 'wdith'"),
        (("model", "encoder_depth"), 10**9, "encoder_depth=1000000000 is too large"),
        (("model", "encoder_depth"), 2, "does not fit config.json: missing encoder.1."),
        (("model", "block", "ffn_width"), 32, "does not fit config.json"),
        (("model", "source_vocab"), 4, "source_vocab"),
    ],
)
def test_a_config_that_is_wrong_is_refused(folder, path, value, message):
    change(folder, path, value)
    if path[-1] == "source_vocab":  # fewer rows than the tokenizer has pieces
        change(folder, ("model", "target_vocab"), value)
        message = "does not fit config.json"
    assert message in refused(folder)


@pytest.mark.parametrize("key", ["family", "task", "model", "regard_format"])
def test_a_config_that_lacks_something_is_refused(folder, key):
    whole = json.loads((folder / "config.json").read_text())
    del whole[key]
    (folder / "config.json").write_text(json.dumps(whole))
    assert key in refused(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1, 2]",
        b"null",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"a": ' * 100_000,
        b"9" * 9999,
    ],
)
def test_a_config_that_is_no_json_is_refused(folder, content):
    (folder / "config.json").write_bytes(content)
    assert "JSON" in refused(folder)


def test_a_config_without_end_is_not_read_to_its_end(tmp_path):
    path = tmp_path / "config.json"
    with open(path, "wb") as file:
        file.truncate(10 * 2**30)  # sparse
    with pytest.raises(UsageError, match="over 16 MB"):
        read_json(path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.999])
def test_weights_that_were_cut_are_refused(folder, share):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    assert "damaged or cut short" in refused(folder)


def test_weights_with_a_header_that_lies_are_refused(folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for spoilt in (
        b"\xff" * 8 + data[8:],  # a header of 2^64 bytes
        (2**40).to_bytes(8, "little") + data[8:],
        data[:8] + b"[" * 50 + data[58:],
        data.replace(b'"dtype":"F32"', b'"dtype":"X99"', 1),
    ):
        path.write_bytes(spoilt)
        assert "damaged or cut short" in refused(folder)


def test_weights_of_other_names_or_shapes_are_refused(folder):
    path = folder / "model.safetensors"
    good = load_file(path)
    name = "decoder.0.cross.out.weight"
    assert name in good
    spoilt = {
        f"missing {name}": {k: v for k, v in good.items() if k != name},
        "unknown extra.weight": {**good, "extra.weight": torch.zeros(2)},
        f"{name} is [16, 15], not [16, 16]": {**good, name: good[name][:, :15].contiguous()},
        f"{name} is [256], not [16, 16]": {**good, name: good[name].flatten()},
    }
    for message, tensors in spoilt.items():
        save_file(tensors, path)
        assert f"does not fit config.json: {message}" in refused(folder)


def test_missing_files_are_named(folder):
    for name in ("tokenizer.json", "model.safetensors"):
        (folder / name).unlink()
        assert name in refused(folder)
    (folder / "config.json").unlink()
    assert "an empty folder" in refused(folder)
    (folder / "notes.txt").touch()
    assert "config.json" in refused(folder)


def test_weights_that_are_a_folder_are_refused(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    assert "model.safetensors" in refused(folder)


def test_a_tokenizer_with_more_pieces_than_the_model_is_refused(folder):
    words = [f"{a}{b}{c} " * 3 for a in "abcdef" for b in "abcdef" for c in "xyz"]
    train_tokenizer(words, vocab=900).save(folder / "tokenizer.json")
    assert "tokenizer has" in refused(folder)


@pytest.mark.parametrize(
    "generation",
    [
        "[]",
        "{",
        '{"beam": "five"}',
        '{"beam": 0}',
        '{"baem": 5}',
        '{"alignment_head": 3}',
        '{"alignment_head": "decoder.0.cross"}',
        '{"alignment_head": "decoder.0.cross:9"}',
        '{"alignment_head": "decoder.7.cross:0"}',
        '{"alignment_head": "encoder.0.attention:0"}',
    ],
)
def test_wrong_ways_to_generate_are_refused(folder, generation):
    (folder / "generation_config.json").write_text(generation)
    with pytest.raises(UsageError) as mistake:
        regard.load(folder).run(["a dog"], max_length=3, alignments="pharaoh")
    assert "\n" not in str(mistake.value) and "generation_config.json" in str(mistake.value)


def test_a_good_way_to_generate_is_followed(folder):
    text = '{"beam": 2, "alignment_head": "decoder.0.cross:1"}'
    (folder / "generation_config.json").write_text(text)
    model = regard.load(folder)
    assert model.check({}).beam == 2
    assert model.run(["a dog"], max_length=3, alignments="pharaoh")[0].alignment is not None
    assert model.config["generation"]["alignment_head"] == "decoder.0.cross:1"


LIMITED = """
import resource, sys
import regard
from regard.errors import UsageError
regard.load  # torch is imported by now
size = 400 << 20
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + size, used + size))
try:
    regard.load(sys.argv[1])
except UsageError as mistake:
    print(mistake)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc on this system")
def test_a_config_that_asks_for_more_than_there_is_takes_no_memory(folder):
    """Five billion parameters are allowed, but the weights are not there."""
    change(folder, ("model", "block", "width"), 2**14)
    change(folder, ("model", "block", "ffn_width"), 2**17)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, folder], capture_output=True, text=True, check=True
    )
    assert "does not fit config.json" in done.stdout
