"""Laws of encoders that learn without labels, and of what they are worth."""

import contextlib
import io
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.nn import functional as F

import regard
from regard.cli import main
from regard.data.augment import grey, hue, jitter, step_rng
from regard.data.image_format import ImageFormat
from regard.errors import UsageError
from regard.layers.block import BlockConfig
from regard.modalities.image import IMAGE
from regard.models import PRETRAINERS, family, preset, pretrainer, serving
from regard.models.contrast import (
    ImageTextConfig,
    ImageTextContrast,
    SimCLR,
    SimCLRConfig,
    info_nce,
)
from regard.models.folder import load_folder, on_meta
from regard.models.masked import MAE, MAEConfig, SimMIM, SimMIMConfig, patchify, unpatchify
from regard.models.swin import Swin
from regard.models.vit import ViT
from regard.tasks.frame.media import MediaCodec
from regard.tasks.prepare import CodecBuilder
from regard.tasks.vision.pretrain import PRETRAIN
from regard.tasks.vision.pretraining import MaskedImageBatches, recall_at_k
from regard.tasks.vision.probe import Known, by_neighbours, fit_best_linear, fit_linear
from regard.training import checkpoint

TINY = BlockConfig(24, 2, 40, norm_eps=1e-6, feed_forward="gelu", dropout=0.0)
SMALL = {"depth": 1, "width": 24, "heads": 2, "ffn_width": 32}
RUN = {
    "steps": 6,
    "batch": 8,
    "warmup": 2,
    "lr": 0.003,
    "ema": 0.8,
    "valid_every": 3,
    "threads": 1,
    "size": "tiny",
    "quiet": True,
}


@pytest.fixture(autouse=True)
def _alone():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def vit(**changes) -> ViT:
    config = replace(preset("vit", "tiny"), labels=0, image=16, depth=2, block=TINY)
    return ViT(replace(config, **changes)).eval()


def swin(**changes) -> Swin:
    block = replace(TINY, width=16, heads=2, ffn_width=24)
    config = replace(preset("swin", "tiny"), labels=0, image=16, depths=(1, 2), block=block)
    return Swin(replace(config, **changes)).eval()


def small_mae(encoder=None, **changes) -> MAE:
    return MAE(encoder or vit(), MAEConfig(depth=1, block=TINY, **changes)).eval()


PAINTERS = {"mae": small_mae, "simmim": lambda: SimMIM(swin(), SimMIMConfig()).eval()}


def noise_for(painter, images) -> torch.Tensor:
    return torch.rand(len(images), math.prod(painter.size(images)))


# Painting what is masked


@pytest.mark.parametrize("name", PAINTERS)
@torch.no_grad()
def test_masked_pixels_never_matter(name):
    """What is masked changes nothing of what is painted, be it no number at all."""
    painter = PAINTERS[name]()
    images = torch.randn(3, 3, 16, 16)
    noise = noise_for(painter, images)
    painted, masked = painter(images, noise)
    pieces = painter.units(images)
    assert masked.any(1).all() and not masked.all(1).any()
    hidden = torch.where(masked[..., None], 7.0, pieces)
    other = unpatchify(hidden, painter.unit, painter.size(images)[1])
    torch.testing.assert_close(painter(other, noise).units, painted)
    seen = torch.where(masked[..., None], pieces, pieces + 1)
    other = unpatchify(seen, painter.unit, painter.size(images)[1])
    assert (painter(other, noise).units - painted).abs().max() > 1e-4


@torch.no_grad()
def test_mae_encodes_the_visible_patches_only():
    """The encoder reads as many patches as are seen, and NaN in the others never reaches it."""
    painter = small_mae(mask_share=0.75)
    images = torch.randn(2, 3, 16, 16)
    noise = noise_for(painter, images)
    masked = painter(images, noise).masked
    assert masked.sum(1).tolist() == [12, 12]
    broken = torch.where(masked[..., None], math.nan, painter.units(images))
    order = noise.argsort(1)[:, :4]
    encoded = painter.features(unpatchify(broken, 4, 4), order)
    assert encoded.shape[1] == 1 + 4
    torch.testing.assert_close(encoded, painter.features(images, order))


@pytest.mark.parametrize("position", ["learned", "rotary", "sinusoidal"])
@torch.no_grad()
def test_mae_of_all_patches_is_the_encoder(position):
    """Patches in any order, all of them seen, have the vectors that the encoder gives them."""
    block = replace(TINY, width=32)
    encoder = vit(position=position, block=block)
    painter = small_mae(encoder)
    images = torch.randn(2, 3, 16, 16)
    order = torch.stack([torch.randperm(16), torch.randperm(16)])
    found = painter.features(images, order)
    wanted = encoder.features(images)
    torch.testing.assert_close(found[:, 0], wanted[:, 0], atol=1e-5, rtol=1e-5)
    for row, places, whole in zip(found[:, 1:], order, wanted[:, 1:], strict=True):
        torch.testing.assert_close(row, whole[places], atol=1e-5, rtol=1e-5)


def loop_loss(painter, images, noise, power: int, normalised: bool) -> float:
    """Return the loss of masked pieces pixel by pixel."""
    painted, masked = painter(images, noise)
    total, unit = 0.0, painter.unit
    _, columns = painter.size(images)
    for b in range(len(images)):
        errors = []
        for u in range(masked.shape[1]):
            if not masked[b, u]:
                continue
            y, x = divmod(u, columns)
            square = images[b, :, y * unit : (y + 1) * unit, x * unit : (x + 1) * unit]
            mean, spread = 0.0, 1.0
            if normalised:
                mean, spread = float(square.mean()), math.sqrt(float(square.var()) + 1e-6)
            number = 0
            for p in range(unit):
                for q in range(unit):
                    for c in range(images.shape[1]):
                        wanted = (float(square[c, p, q]) - mean) / spread
                        errors.append(abs(float(painted[b, u, number]) - wanted) ** power)
                        number += 1
        total += sum(errors) / len(errors)
    return total


@pytest.mark.parametrize("target", ["pixels", "normalised"])
@pytest.mark.parametrize("name", PAINTERS)
@torch.no_grad()
def test_the_loss_of_masked_pieces_is_that_of_a_loop(name, target):
    """The loss counts masked pixels alone: squared for MAE, absolute for SimMIM."""
    encoder = {"mae": vit, "simmim": swin}[name]()
    kind, cls = pretrainer(name)
    config = kind(target=target, **({"depth": 1, "block": TINY} if name == "mae" else {}))
    painter = cls(encoder, config).eval().double()
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    noise = noise_for(painter, images)
    found = float(painter.loss(images, noise))
    power = 2 if name == "mae" else 1
    wanted = loop_loss(painter, images, noise, power, target == "normalised")
    # what was painted is compared in single precision
    assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("name", PAINTERS)
@torch.no_grad()
def test_painting_over_keeps_what_was_seen(name):
    """Pixels that were seen come back as they were; the others are marked."""
    painter = PAINTERS[name]()
    images = torch.randn(2, 3, 16, 16)
    painted, masked = painter.reconstruct(images, noise_for(painter, images))
    assert masked.shape == (2, 1, 16, 16) and 0 < float(masked.float().mean()) < 1
    seen = ~masked.expand_as(images)
    assert torch.equal(painted[seen], images[seen])
    assert not torch.equal(painted, images)


def test_cutting_and_laying_are_inverse():
    """Pieces laid together are the image."""
    images = torch.randn(2, 3, 8, 12)
    assert torch.equal(unpatchify(patchify(images, 4), 4, 3), images)


@pytest.mark.parametrize("name", PAINTERS)
def test_every_part_learns(name):
    """A step reaches every weight of encoder and decoder, but for a pool that nobody reads."""
    painter = PAINTERS[name]().train()
    images = torch.randn(4, 3, 16, 16)
    painter.loss(images, noise_for(painter, images)).backward()
    still = [n for n, p in painter.named_parameters() if p.grad is None or not p.grad.any()]
    assert still == []


@pytest.mark.parametrize("name", PRETRAINERS)
def test_builds_without_memory(name):
    """What is built around an encoder builds on the meta device."""
    kind, cls = pretrainer(name)
    with on_meta():
        encoder = (swin if name == "simmim" else vit)()
        whole = cls(encoder, kind())
    assert all(p.is_meta for p in whole.parameters())


# Ours and theirs


def their_mae(**changes):
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTMAEConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        image_size=16,
        patch_size=4,
        decoder_hidden_size=24,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=3,
        decoder_intermediate_size=40,
        mask_ratio=0.6,
        **changes,
    )
    theirs = transformers.ViTMAEForPreTraining(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return theirs


@pytest.mark.parametrize("normalised", [True, False])
@torch.no_grad()
def test_mae_equals_transformers(tmp_path, normalised):
    """Of the same weights and noise come the same pixels and loss; and back again."""
    theirs = their_mae(norm_pix_loss=normalised)
    theirs.save_pretrained(tmp_path / "theirs")
    images, noise = torch.randn(3, 3, 16, 16), torch.rand(3, 16)
    wanted = theirs(images, noise=noise)
    for name, folder in (("raw", tmp_path / "theirs"), ("ours", tmp_path / "ours")):
        if name == "ours":
            regard.import_model(tmp_path / "theirs", out=str(folder))
        whole = regard.load(folder).predictor.whole()
        painted, masked = whole(images, noise)
        torch.testing.assert_close(painted, wanted.logits, atol=2e-5, rtol=1e-5)
        assert torch.equal(masked, wanted.mask.bool())
        loss = float(whole.loss(images, noise)) / 3
        assert loss == pytest.approx(float(wanted.loss), rel=1e-5)
    regard.export(str(tmp_path / "ours"), format="huggingface", out=str(tmp_path / "back"))
    again = type(theirs).from_pretrained(tmp_path / "back")
    assert type(again).__name__ == "ViTMAEForPreTraining"
    found = again.eval()(images, noise=noise)
    torch.testing.assert_close(found.logits, wanted.logits, atol=1e-6, rtol=1e-6)
    assert float(found.loss) == pytest.approx(float(wanted.loss), rel=1e-6)


@torch.no_grad()
def test_simmim_equals_transformers(tmp_path):
    """Of the same weights and masks come the same pixels and loss."""
    transformers = pytest.importorskip("transformers")
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=16, depths=[1, 2], num_heads=[2, 4],
        window_size=4, encoder_stride=4, mlp_ratio=1.5, drop_path_rate=0.0,
    )  # fmt: skip
    theirs = transformers.SwinForMaskedImageModeling(config).eval()
    for parameter in theirs.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path)
    painter = SimMIM(regard.load(tmp_path).model, SimMIMConfig()).eval()
    painter.mask.weight.copy_(theirs.swin.embeddings.mask_token[0])
    conv = theirs.decoder[0]
    order = torch.arange(48).view(3, 4, 4).permute(1, 2, 0).flatten()  # channels last
    painter.paint.weight.copy_(conv.weight[order, :, 0, 0])
    painter.paint.bias.copy_(conv.bias[order])
    images, noise = torch.randn(2, 3, 16, 16), torch.rand(2, 16)
    painted, masked = painter(images, noise)
    fine = masked.view(2, 4, 4).repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)
    wanted = theirs(images, bool_masked_pos=fine)
    torch.testing.assert_close(
        unpatchify(painted, 4, 4), wanted.reconstruction, atol=1e-5, rtol=1e-4
    )
    assert float(painter.loss(images, noise)) / 2 == pytest.approx(float(wanted.loss), rel=1e-4)


# Telling apart


def test_info_nce_is_that_of_a_loop():
    """Each view finds its other among all others of the batch."""
    one, other = torch.randn(2, 5, 7, dtype=torch.float64)
    found = info_nce(one, other, 0.3)
    z = [row / row.norm() for row in [*one, *other]]
    total = 0.0
    for i in range(10):
        right = (i + 5) % 10
        all_others = sum(math.exp(float(z[i] @ z[k]) / 0.3) for k in range(10) if k != i)
        total -= math.log(math.exp(float(z[i] @ z[right]) / 0.3) / all_others)
    assert float(found) == pytest.approx(total / 2, rel=1e-12)


def test_info_nce_is_least_where_views_agree():
    """Equal views of unlike images are told apart, mixed-up ones are not."""
    z = torch.eye(6)
    assert info_nce(z, z, 0.05) < 1e-4 < 10 < info_nce(z, z.roll(1, 0), 0.05)


@torch.no_grad()
def test_clip_loss_is_that_of_a_loop():
    """Images find their texts and texts their images, by a sharpness that is learned."""
    config = ImageTextConfig()
    text = replace(config.text, vocab=50, depth=1, block=TINY)
    model = ImageTextContrast(vit(), replace(config, text=text, width=8)).eval().double()
    images = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    ids, lengths = torch.randint(0, 50, (3, 6)), torch.tensor([6, 4, 2])
    found = float(model.loss(images, ids, lengths))
    i, t = model.images(images), model.texts(ids, lengths)
    near = [[math.exp(float(a @ b) / 0.07) for b in t] for a in i]
    total = 0.0
    for n in range(3):
        total -= math.log(near[n][n] / sum(near[n])) / 2
        total -= math.log(near[n][n] / sum(row[n] for row in near)) / 2
    assert found == pytest.approx(total, rel=1e-5)
    ids[2, 2:] = 9  # what is padding
    assert float(model.loss(images, ids, lengths)) == pytest.approx(found, rel=1e-9)


@pytest.mark.parametrize("name", serving("pretrain"))
def test_every_family_learns_by_views(name):
    """A step of SimCLR reaches every weight of any encoder."""
    config = replace(preset(name, "tiny"), labels=0, image=16)
    model = SimCLR(family(name)[1](config), SimCLRConfig(32, 16)).train()
    model.loss(*torch.randn(2, 3, 3, 16, 16)).backward()
    still = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not [n for n in still if not n.endswith((".mean", ".var"))]


def test_recall_is_that_of_a_loop():
    """The right one counts where it is among the first; of several texts one is enough."""
    counts = [2, 1, 3, 2, 2, 1, 1]
    near = torch.randn(7, sum(counts))
    own = [i for i, n in enumerate(counts) for _ in range(n)]
    found = recall_at_k(near, counts, (1, 2, 5))
    for k in (1, 2, 5):
        texts = [any(own[t] == i for t in near[i].topk(k).indices) for i in range(7)]
        images = [own[t] in near[:, t].topk(k).indices.tolist() for t in range(len(own))]
        assert found[f"text@{k}"] == pytest.approx(100 * sum(texts) / 7)
        assert found[f"image@{k}"] == pytest.approx(100 * sum(images) / len(own))


def test_colours_turn_and_stay():
    """Turning no colour or once around changes nothing; greys have no hue; the chance decides."""
    pixels = torch.randint(20, 200, (6, 3, 5, 5)).float()
    for turn in (0.0, 1.0):
        torch.testing.assert_close(hue(pixels, torch.full((6,), turn)), pixels, atol=0.1, rtol=0)
    flat = pixels[:, :1].expand(-1, 3, -1, -1)
    torch.testing.assert_close(hue(flat, torch.full((6,), 0.3)), flat, atol=0.3, rtol=0)
    assert (hue(pixels, torch.full((6,), 0.5)) - pixels).abs().max() > 5
    for change in (lambda chance: jitter(pixels, chance, 1.0), lambda chance: grey(pixels, chance)):
        one, same, other = (change(step_rng(3, n)) for n in (0, 0, 1))
        assert torch.equal(one, same) and not torch.equal(one, other)
        assert one.min() >= 0 and one.max() <= 255


# What vectors are worth


def blobs(number: int, classes: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    labels = torch.arange(number) % classes
    middles = 4 * torch.eye(classes, 8)
    return middles[labels] + torch.randn(number, 8, generator=chance), labels


def test_neighbours_vote_as_in_a_loop():
    """The nearest in angle vote, the nearer the more."""
    (known, labels), (asked, _) = blobs(30), blobs(7, seed=1)
    found = by_neighbours(Known(known, labels, 3), asked, 5)
    for row, x in zip(found, asked, strict=True):
        near = F.cosine_similarity(known, x[None], dim=-1)
        votes = [0.0, 0.0, 0.0]
        for i in near.topk(5).indices.tolist():
            votes[int(labels[i])] += math.exp(float(near[i]) / 0.07)
        wanted = torch.tensor(votes) / sum(votes)
        torch.testing.assert_close(row, wanted, atol=1e-4, rtol=1e-4)


def test_the_linear_probe_is_at_its_minimum():
    """Where L-BFGS ends the gradient is zero, and moving or stretching vectors changes nothing."""
    vectors, labels = blobs(60)
    probe = fit_linear(Known(vectors, labels, 3), 0.01)
    asked = blobs(9, seed=2)[0]
    other = fit_linear(Known(5 * vectors - 3, labels, 3), 0.01)
    torch.testing.assert_close(probe(asked), other(5 * asked - 3), atol=1e-3, rtol=1e-3)
    chances, decay = fit_best_linear(Known(vectors, labels, 3))
    assert (chances(asked).argmax(1) == blobs(9, seed=2)[1]).float().mean() > 0.8
    # the mean of the errors in each label's chance is zero where the bias is at its best
    off = probe(vectors) - F.one_hot(labels, 3)
    assert off.mean(0).abs().max() < 1e-3 and decay > 0


# Runs


def paint_set(folder: Path, number: int = 12, captions: bool = False) -> Path:
    """Write small images with stripes across or down, in parts and classes, or with captions."""
    chance = np.random.default_rng(5)
    for part, count in (("train", number), ("valid", 6), ("test", 6)):
        rows = []
        for kind in ("across", "down"):
            for n in range(count):
                pixels = chance.integers(0, 60, (16, 16, 3))
                stripes = pixels if kind == "across" else pixels.transpose(1, 0, 2)
                stripes[n % 4 :: 4] += 150
                pixels[..., 0] += 40 * (kind == "across")
                home = folder / ("all" if captions else part) / kind
                home.mkdir(parents=True, exist_ok=True)
                path = home / f"{part}{n}.png"
                Image.fromarray(pixels.astype(np.uint8)).save(path)
                rows += [f"{path.relative_to(folder)}\t{kind} number {n} {w}" for w in ("a", "b")]
        if captions:
            (folder / f"{part}.tsv").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture(scope="module")
def stripes(tmp_path_factory) -> Path:
    return paint_set(tmp_path_factory.mktemp("stripes"))


@pytest.fixture(scope="module")
def captioned(tmp_path_factory) -> Path:
    return paint_set(tmp_path_factory.mktemp("captioned"), captions=True)


OBJECTIVES = {
    "mae": {"objective": "masked", "decoder_depth": 1, **SMALL},
    "simmim": {"family": "swin", "model.depths": "1,1"},
    "simclr": {"objective": "contrastive", "like": "cct", **SMALL},
    "clip": {"objective": "clip", "pieces": 300, **SMALL},
    "vae": {"objective": "variational", "latent": 3, "family": "resnet"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, stripes, captioned) -> dict[str, Path]:
    """Train an encoder by every objective."""
    home = tmp_path_factory.mktemp("runs")
    for name, settings in OBJECTIVES.items():
        data = captioned if name == "clip" else stripes
        regard.train("pretrain", data=str(data), out=str(home / name), **settings, **RUN)
    return {name: home / name for name in OBJECTIVES}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_run_publishes_an_encoder(runs, name):
    """The folder is of the encoder alone; what it was trained with lies beside it."""
    folder = runs[name]
    model: Any
    model, config = load_folder(folder)
    assert config["task"] == "pretrain" and config["pretraining"]["by"] == name
    assert model.config.labels == 0
    whole = PRETRAIN.load(folder, model, config).predictor.whole()
    assert type(whole) is pretrainer(name)[1] and whole.encoder is model
    rest = load_file(folder / "pretraining.safetensors")
    names = {n for n, _ in whole.named_parameters() if not n.startswith("encoder.")}
    assert set(rest) == names and rest
    last = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    scores = {key for row in last for key in row if key.startswith("valid/")}
    assert "valid/loss" in scores
    assert ("valid/recall" if name == "clip" else "valid/neighbours") in scores


@pytest.mark.parametrize("name", OBJECTIVES)
def test_classify_takes_it_in_one_command(runs, stripes, tmp_path, name):
    """An encoder gets a head for labels, a layer learning less than the one above."""
    out = tmp_path / "tuned"
    words = f"train classify data={stripes} init={runs[name]} out={out} layer_decay=0.75 share=0.5"
    words += " steps=2 batch=4 valid_every=2 threads=1 --quiet"
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(words.split()) == 0
    tuned, config = load_folder(out)
    assert config["task"] == "images" and config["labels"] == ["across", "down"]
    before, _ = load_folder(runs[name])
    theirs = dict(before.named_parameters())
    mine = {n: p.detach() for n, p in tuned.named_parameters() if n in theirs}
    apart = [float((p - theirs[n].detach()).abs().max()) for n, p in mine.items()]
    assert 0 < max(apart) < 0.05


@pytest.mark.parametrize("name", ["clip", "vae"])  # MAE is asked in test_tasks
def test_going_on_is_the_same_run(runs, stripes, captioned, tmp_path, name):
    """A run that was stopped and taken up again ends with the same bits."""
    data = captioned if name == "clip" else stripes
    settings = {**OBJECTIVES[name], **RUN, "data": str(data), "out": str(tmp_path / "again")}
    shutil.copytree(runs[name], tmp_path / "again")
    wanted = checkpoint.load_checkpoint(runs[name] / "checkpoints" / "step-6")[0]
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step-6")
    regard.train("pretrain", **settings)
    found = checkpoint.load_checkpoint(tmp_path / "again" / "checkpoints" / "step-6")[0]
    assert set(found) == set(wanted) == {"raw", "ema", "optimiser"}
    for group, tensors in wanted.items():
        assert all(torch.equal(found[group][n], t) for n, t in tensors.items())
    for path in ("model.safetensors", "pretraining.safetensors"):
        ours, theirs = (load_file(folder / path) for folder in (tmp_path / "again", runs[name]))
        assert all(torch.equal(ours[n], t) for n, t in theirs.items())


def test_masks_are_drawn_by_seed_and_step(stripes, tmp_path):
    """A batch is a function of seed and number, masks included."""
    settings = PRETRAIN.resolve({"data": str(stripes), **OBJECTIVES["mae"], "batch": 4, "steps": 1})
    data = PRETRAIN.learning.read(settings, None)
    codec = PRETRAIN.learning.codec(data, settings, CodecBuilder(tmp_path, None, None), None)
    _, model = PRETRAIN.learning.model(data, codec, settings, None)
    feeds = [
        MaskedImageBatches(data, replace(settings, seed=seed), 16, model, codec)
        for seed in (1, 1, 2)
    ]
    (one, noise), (same, again), (_, other) = (feed[5] for feed in feeds)
    assert torch.equal(one, same) and torch.equal(noise, again) and not torch.equal(noise, other)
    assert not torch.equal(noise, feeds[0][6][1])


@pytest.mark.parametrize("probe", ["linear", "knn"])
@pytest.mark.parametrize("name", ["mae", "simclr"])
def test_a_probe_judges_any_encoder(runs, stripes, name, probe):
    """Vectors of a run are judged by labels that were learnt of them, on the part that is asked."""
    result = regard.evaluate(str(runs[name]), data=str(stripes), probe=probe)
    score = result.scores[0]
    assert score.name == "accuracy" and 0 <= score.value <= 100
    assert result.made_with["probe"] == probe and result.made_with["part"] == "test"
    few = regard.evaluate(str(runs[name]), data=str(stripes), probe=probe, share=0.1)
    assert few.made_with["share"] == 0.1


def test_a_probe_finds_what_is_plain(stripes, tmp_path):
    """Stripes are told apart by the vectors of an encoder that nobody trained, and compared."""
    torch.manual_seed(1)
    format = ImageFormat(16, 3, mean=(0.4,) * 3, std=(0.3,) * 3)
    one, other = (PRETRAIN.bind(vit(pool="mean"), MediaCodec(IMAGE, format), {}) for _ in range(2))
    settings = {"data": str(stripes), "probe": "linear"}
    result = one.evaluate(settings, against=other, names=("one", "other"))
    assert result.scores[0].value > 60
    assert result.comparison and result.against == "other"


def test_a_classifier_is_probed_as_well(runs, stripes, tmp_path):
    """What labels already gives its vectors for a probe."""
    out = str(tmp_path / "labels")
    regard.train("classify", data=str(stripes), out=out, **SMALL, **{**RUN, "steps": 3})
    result = regard.evaluate(out, data=str(stripes), probe="knn", neighbours=3)
    assert result.made_with["neighbours"] == 3


def test_vectors_come_out_of_run(runs, stripes):
    """Run gives the vector of each image, the same alone and in company."""
    encoder = regard.load(runs["simclr"])
    paths = sorted(str(path) for path in (stripes / "test").rglob("*.png"))[:3]
    together = encoder.run(paths)
    alone = encoder.run(paths[1])
    np.testing.assert_allclose(together[1].vector, alone.vector, atol=1e-5)
    assert together[0].vector.shape == (24,)


def test_clip_finds_texts(runs, captioned):
    """A run with captions chooses among texts, and is judged by what it finds."""
    encoder = regard.load(runs["clip"])
    path = next((captioned / "all").rglob("*.png"))
    answer = encoder.run(str(path), texts="across number 1|down number 2", n_best=2)
    assert sum(answer.probabilities) == pytest.approx(1, abs=1e-5)
    result = regard.evaluate(str(runs["clip"]), data=str(captioned))
    names = [score.name for score in result.scores]
    assert names == [f"{what}@{k}" for what in ("text", "image") for k in (1, 5, 10)]
    values = [score.value for score in result.scores[:3]]
    assert values == sorted(values) and min(values) >= 0 and max(values) <= 100


def test_clip_is_compared_with_a_copy_and_refuses_others(runs, captioned, zoo):
    model, given = regard.load(runs["clip"]), {"data": str(captioned), "part": "valid"}
    alone = model.evaluate(given)
    names = ("ours", "theirs")
    both = model.evaluate(given, against=regard.load(runs["clip"]), names=names)
    assert [s.value for s in both.scores] == 2 * [s.value for s in alone.scores]
    with pytest.raises(UsageError, match="this encoder never saw texts"):
        model.evaluate(given, against=regard.load(runs["mae"]), names=names)
    with pytest.raises(UsageError, match="expected one for pretrain"):
        model.evaluate(given, against=regard.load(zoo.model("classify")), names=names)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_dictionary_of_a_pretrained_encoder_is_learnt_by_its_own_loss(
    runs, stripes, captioned, tmp_path, name
):
    folder = runs[name]
    if name == "vae":  # of an encoder of vectors, not of maps
        folder = tmp_path / "vae"
        given = {**OBJECTIVES["vae"], "family": "vit", **SMALL, **RUN}
        regard.train("pretrain", data=str(stripes), out=str(folder), **given)
    model = regard.load(folder)
    at = "stages.0.blocks.0" if name == "simmim" else "blocks.0"
    how = {"width": "32", "k": 4, "steps": 2, "batch": 16, "buffer": 32, "shown": 2, "examples": 1}
    data = captioned if name == "clip" else stripes
    found = regard.dictionary(model, at=at, data=str(data), out=tmp_path / "out", **how)
    assert found["loss"] > 0 and found["loss_zero"] != found["loss"]
    objective = OBJECTIVES[name].get("objective", "masked")
    assert model.trained_as() == (model, {"objective": objective})


@pytest.mark.parametrize("name", ["mae", "simmim"])
def test_painting_is_shown(runs, stripes, name):
    """A masked encoder paints the image it saw in part; what was seen is as it was."""
    encoder = regard.load(runs[name])
    path = next((stripes / "test").rglob("*.png"))
    ((painted, masked),) = encoder.predictor.paint(str(path))
    pixels = np.asarray(Image.open(path))
    assert painted.shape == pixels.shape and masked.shape == pixels.shape[:2]
    assert np.abs(painted.astype(int) - pixels)[~masked].max() <= 1
    assert 0.4 < masked.mean() < 0.9


def test_unlabelled_images_will_do(stripes, tmp_path):
    """Images that lie loose in a folder have no labels, and none are needed."""
    home = tmp_path / "loose"
    home.mkdir()
    for path in (stripes / "train").rglob("*.png"):
        shutil.copy(path, home / f"{path.parent.name}{path.name}")
    settings = {**OBJECTIVES["mae"], **RUN, "steps": 1, "valid": "0.3"}
    report = regard.train("pretrain", data=str(home), out=str(tmp_path / "run"), **settings)
    assert set(report.scores) == {"loss", "better"}


# What is refused

WRONG = {
    "objective=guess": "unknown objective 'guess'",
    "family=resnet": "objective=masked is for family=vit and swin, not resnet",
    "like=cct": "stem=patches",
    "objective=contrastive batch=1": "batch=1; there must be others",
    "mask_share=1": "mask_share=1",
    "mask_share=0": "mask_share=0.0 masks none of the",
    "target=colours": "unknown target 'colours'",
    "patch=16": "or a smaller patch",
    "objective=contrastive temperature=0": "temperature=0",
    "objective=contrastive augment=flip+blink": "unknown augment 'blink'",
    "objective=contrastive mask_share=0.5": "unknown key 'mask_share'",
    "objective=clip": "no table of images and captions",
    "decoder_heads=5": "5",
    "model.labels=3": "regard train classify",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_call_is_refused_in_one_line(stripes, tmp_path, words, capsys):
    """A mistake gets the value, what was expected and no traceback."""
    command = ["train", "pretrain", f"data={stripes}", f"out={tmp_path / 'run'}", "steps=1"]
    assert main([*command, *words.split(), "--quiet"]) != 0
    told = capsys.readouterr().err.strip()
    assert WRONG[words] in told and "Traceback" not in told
    assert len(told.splitlines()) == 1


PROBED = {
    "probe=guess": "unknown probe 'guess'",
    "part=train": "part=train is what a probe learns from",
    "share=0": "share=0",
    "neighbours=0 probe=knn": "neighbours=0",
}


@pytest.mark.parametrize("words", PROBED)
def test_a_wrong_probe_is_refused_in_one_line(runs, stripes, words, capsys):
    """A mistake gets the value, what was expected and no traceback."""
    assert main(["eval", str(runs["mae"]), f"data={stripes}", *words.split()]) != 0
    told = capsys.readouterr().err.strip()
    assert PROBED[words] in told and len(told.splitlines()) == 1


def test_a_tampered_folder_is_refused(runs, tmp_path):
    """What config.json says of the training must fit the weights beside it."""
    folder = tmp_path / "bad"
    shutil.copytree(runs["mae"], folder, ignore=shutil.ignore_patterns("SHA256SUMS"))
    config = json.loads((folder / "config.json").read_text())
    for told in ({"by": "os.system"}, "mae", {"by": "mae", "depth": 10**9}, {"by": "simmim"}):
        (folder / "config.json").write_text(json.dumps({**config, "pretraining": told}))
        with pytest.raises(UsageError, match="config.json"):
            regard.load(folder).predictor.whole()
    more = {**config["pretraining"], "depth": 3}
    (folder / "config.json").write_text(json.dumps({**config, "pretraining": more}))
    with pytest.raises(UsageError, match="does not fit"):
        regard.load(folder).predictor.whole()
    with pytest.raises(UsageError, match="never saw texts"):
        regard.load(runs["mae"]).run([], texts="a|b")
    with pytest.raises(UsageError, match="paints nothing"):
        path = next(Path(runs["clip"]).parent.parent.rglob("*.png"))
        regard.load(runs["clip"]).predictor.paint(str(path))
