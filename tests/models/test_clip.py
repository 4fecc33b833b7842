"""CLIP against transformers: both encoders, where they meet, its folders, and what it is for."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import regard
from regard.errors import UsageError
from regard.models import preset
from regard.models.clip import Clip, ClipConfig
from regard.pretrained.folder import import_folder
from regard.pretrained.formats import find_format
from tests.pretrained.test_vocabulary import clip as tokenizer_files
from tests.pretrained.test_vocabulary import write

transformers = pytest.importorskip("transformers")

TEXT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT |= {"intermediate_size": 20, "max_position_embeddings": 24}
VISION = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
VISION |= {"intermediate_size": 20, "image_size": 16, "patch_size": 8}
# name -> what is odd about the texts, about the images, and about both
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "older end": ({"eos_token_id": 2}, {"num_channels": 1}, {"projection_dim": 7}),
    "gelu": (
        {"hidden_act": "gelu", "layer_norm_eps": 1e-3, "num_hidden_layers": 1},
        {"hidden_act": "gelu_new", "image_size": 21, "patch_size": 5, "num_hidden_layers": 3},
        {},
    ),
}
PREPARED = {
    "image_processor_type": "CLIPImageProcessor",
    "do_resize": True,
    "size": {"shortest_edge": 16},
    "do_center_crop": True,
    "crop_size": {"height": 16, "width": 16},
    "resample": 3,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
TEXTS = ["a dog", "two cats in the time of a girl who ran", "time"]


def made(folder: Path, kind: str = "plain", cls: str = "CLIPModel") -> tuple[Any, Any]:
    """Write a random model with its tokenizer; return both as transformers has them."""
    write(folder, tokenizer_files(True))
    if "num_channels" not in KINDS[kind][1]:
        (folder / "preprocessor_config.json").write_text(json.dumps(PREPARED))
    words = transformers.AutoTokenizer.from_pretrained(folder)
    text, vision, more = KINDS[kind]
    text = {"eos_token_id": words.eos_token_id, **TEXT, "vocab_size": len(words), **text}
    config: Any = transformers.CLIPConfig(
        text_config=text, vision_config={**VISION, **vision}, **{"projection_dim": 10, **more}
    )
    config = {"CLIPTextModel": config.text_config, "CLIPVisionModel": config.vision_config}.get(
        cls, config
    )
    torch.manual_seed(0)
    model = getattr(transformers, cls)(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape)
    if cls == "CLIPModel":
        model.logit_scale.data.fill_(4.0)  # so that logits spread, whatever the tokenizer learnt
    model.save_pretrained(folder)
    return model, words


def pixels(model: Any, size: tuple[int, int] | None = None) -> torch.Tensor:
    config = getattr(model.config, "vision_config", model.config)
    size = size or (config.image_size,) * 2
    rand = torch.Generator().manual_seed(1)
    return torch.randn(4, config.num_channels, *size, generator=rand)


def close(found: torch.Tensor, right: torch.Tensor) -> None:
    assert found.shape == right.shape
    assert (found - right).abs().max() <= 2e-5 * max(1.0, float(right.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_equal_transformers_and_folders_go_both_ways(kind: str, tmp_path: Path):
    theirs, words = made(tmp_path / "theirs", kind)
    ours, config, _ = import_folder(tmp_path / "theirs")
    assert isinstance(ours, Clip) and config["task"] == "pretrain"
    asked, images = words(TEXTS, return_tensors="pt", padding=True), pixels(theirs)
    lengths = asked["attention_mask"].sum(1)
    with torch.no_grad():
        right = theirs(**asked, pixel_values=images)
        found = ours(images, asked["input_ids"], lengths)
        close(found, right.logits_per_image)
        close(ours.images(images), right.image_embeds)
        close(ours.texts(asked["input_ids"], lengths), right.text_embeds)
        close(ours.features(images)[:, 0], theirs.vision_model(images).pooler_output)
        for i, n in enumerate(lengths.tolist()):  # padding and neighbours never matter
            close(ours.texts(asked["input_ids"][i : i + 1, :n]), right.text_embeds[i : i + 1])
        large = pixels(theirs, (29, 24))
        out = theirs.vision_model(large, interpolate_pos_encoding=True).pooler_output
        close(ours.features(large)[:, 0], out)
    assert right.logits_per_image.std() > 1
    regard.import_model(tmp_path / "theirs", out=tmp_path / "ours")
    regard.export(tmp_path / "ours", format="huggingface", out=tmp_path / "again")
    again = transformers.AutoModel.from_pretrained(tmp_path / "again").eval()
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    with torch.no_grad():
        asked = reader(TEXTS, return_tensors="pt", padding=True)
        told = again(**asked, pixel_values=images).logits_per_image
    assert torch.equal(told, right.logits_per_image)
    twice, _, _ = import_folder(tmp_path / "again")
    assert twice.config == ours.config
    for (name, one), two in zip(ours.named_parameters(), twice.parameters(), strict=True):
        assert torch.equal(one, two), name


def test_an_image_chooses_among_texts_as_transformers_does(tmp_path: Path):
    theirs, words = made(tmp_path / "theirs")
    rand = np.random.default_rng(0)
    photo = Image.fromarray(rand.integers(0, 256, (50, 31, 3), dtype=np.uint8))
    photo.save(tmp_path / "photo.png")
    reader = transformers.AutoImageProcessor.from_pretrained(tmp_path / "theirs", backend="pil")
    asked = words(TEXTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        right = theirs(**asked, pixel_values=reader(photo, return_tensors="pt")["pixel_values"])
    regard.import_model(tmp_path / "theirs", out=tmp_path / "ours")
    chances = right.logits_per_image.softmax(-1)[0].numpy()
    for folder in (tmp_path / "theirs", tmp_path / "ours"):
        model = regard.load(folder)
        answer = model.run([str(tmp_path / "photo.png")], texts="|".join(TEXTS))[0]
        assert np.abs(answer.probabilities - chances).max() < 1e-4
        assert answer.label == TEXTS[int(chances.argmax())]
        vector = model.run([str(tmp_path / "photo.png")])[0].vector
        cosine = vector @ right.image_embeds[0].numpy() / np.linalg.norm(vector)
        assert cosine == pytest.approx(1, abs=1e-5)
        # and texts have vectors in the same space
        found = np.stack([one.vector for one in regard.load(folder, task="embed").run(TEXTS)])
        assert np.abs(found - right.text_embeds.numpy()).max() < 1e-5
    assert regard.look(tmp_path / "ours", str(tmp_path / "photo.png"), out=tmp_path / "a.html")


def test_each_side_may_come_alone(tmp_path: Path):
    theirs, words = made(tmp_path / "text", cls="CLIPTextModel")
    asked = words(TEXTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        right = torch.nn.functional.normalize(theirs(**asked).pooler_output, dim=-1).numpy()
    model = regard.load(tmp_path / "text")
    assert np.abs(np.stack([one.vector for one in model.run(TEXTS)]) - right).max() < 1e-5
    theirs, _ = made(tmp_path / "vision", cls="CLIPVisionModel")
    ours, _, tokenizers = import_folder(tmp_path / "vision")
    images = pixels(theirs)
    with torch.no_grad():
        close(ours.features(images)[:, 0], theirs(images).pooler_output)
    assert tokenizers == (None, None)
    for name in ("text", "vision"):
        regard.export(tmp_path / name, format="huggingface", out=tmp_path / f"{name} again")
        state = transformers.AutoModel.from_pretrained(tmp_path / f"{name} again").state_dict()
        before = transformers.AutoModel.from_pretrained(tmp_path / name).state_dict()
        assert all(torch.equal(state[key], before[key]) for key in before)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"projection_dim": 0}, "projection_dim=0"),
        ({"projection_dim": "wide"}, "projection_dim='wide' is not a whole number"),
        ({"text_config": [3]}, "text_config=\\[3\\] is not an object"),
        ({"text_config": {"hidden_act": "silly"}}, "unknown hidden_act 'silly'"),
        ({"text_config": {"eos_token_id": [7]}}, "eos_token_id=\\[7\\]"),
        ({"vision_config": {"image_size": [8, 16]}}, "only squares are"),
    ],
)
def test_a_config_that_cannot_be_read_is_a_mistake(changes: dict[str, Any], words: str):
    with pytest.raises(UsageError, match=words):
        find_format("clip").read_config({"model_type": "clip", **changes}, "CLIPModel")


def test_what_older_files_say_twice_counts_as_it_is_said_last():
    read = find_format("clip").read_config
    sides = {"text_config": {"hidden_size": 16}, "text_config_dict": {"hidden_size": 24 * 8}}
    assert read({"model_type": "clip", **sides}, "CLIPModel").text.block.width == 192
    assert read({"model_type": "clip", "text_config_dict": None}, "CLIPModel") == ClipConfig()


def test_both_sides_can_be_watched():
    model = Clip(preset("clip", "tiny")).eval()
    with regard.watch(model) as maps, torch.no_grad():
        model(torch.randn(1, 3, 64, 64), torch.tensor([[3, 4, 49407]]))
    sides = {name.partition(".")[0] for name in maps.names()}
    assert sides == {"vision", "text"} and len(maps.names()) == 4
