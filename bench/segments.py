"""Segmentation of drawn scenes by an encoder that is reused, by number of labelled scenes.

    python bench/scenes.py out=runs/scenes-data
    python bench/segments.py data=runs/scenes-data init=scenes labels=20,50,200,1000 seeds=3

For each number of labels and seed, a linear decoder on the frozen encoder; the encoder tuned with
it; and the same model trained whole from fresh weights, in twice as many steps. Before that, what
each depth of the frozen encoder knows, by a linear decoder on its features.
`init=` is a captioner (scenes), or an encoder without labels:

    regard train pretrain data=runs/scenes-data/images image=48 out=runs/seen

Mean IoU on the part that is named.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import regard
from regard.api import find_model
from regard.data.images import ImageData
from regard.data.masks import find_masks, with_masks
from regard.metrics.interval import interval
from regard.metrics.overlap import Overlaps
from regard.modalities.image import IMAGE
from regard.tasks.frame.settings import flat
from regard.tasks.vision.photos import ImageTable

STEPS, BATCH = 300, 16
GIVEN = {"image", "channels", "labels"}  # of a config: told elsewhere


def scored(folder: Path, data: Path, part: str) -> float:
    """Mean IoU of a model."""
    return regard.evaluate(folder, data=str(data), part=part, threads=1)["mean_iou"]


def curve(data: Path, init: Path, out: Path, part: str, labels: list[int], seeds: int) -> None:
    """Print the scores of each way to train by number of labelled scenes."""
    whole = len(list((data / "images" / "train").glob("*.png")))
    config = encoder_of(regard.load(init).model).config
    fresh: dict[str, Any] = {"family": type(config).__name__.removesuffix("Config").lower()}
    fresh |= {"image": config.image}
    fresh |= {f"model.{key}": value for key, value in flat(config).items() if key not in GIVEN}
    reused = {"init": str(init), "steps": STEPS}
    ways: dict[str, dict[str, Any]] = {
        "frozen": {**reused, "tune": "head", "lr": 0.01},
        "tuned": {**reused, "tune": "all", "lr": 0.002},
        "fresh": {**fresh, "steps": 2 * STEPS, "lr": 0.002},
    }
    for count in labels:
        for way, how in ways.items():
            found = []
            for seed in range(1, seeds + 1):
                folder = out / f"{way}-{count}-{seed}"
                same = {"batch": BATCH, "ema": 0, "threads": 1, "warmup": 30, "quiet": True}
                more = {"share": count / whole, "seed": seed, "valid_every": how["steps"], **same}
                regard.train("segment", data=str(data), out=folder, **how, **more)
                found.append(scored(folder, data, part))
            told = interval(found)
            half = "" if told.half is None else f" +- {told.half:.1f}"
            print(f"{count:>6} labels  {way:<6} mean IoU {told.mean:.1f}{half}", flush=True)


def encoder_of(model: Any) -> Any:
    """The encoder of a larger model, or the model itself."""
    return getattr(model, "encoder", model)


def features(model: Any, images: torch.Tensor) -> list[torch.Tensor]:
    """Features (b, w, h, w) of each depth of a ViT or ResNet: before and after each block."""
    seen: list[torch.Tensor] = []
    high, wide = model.grid((images.shape[2], images.shape[3]))

    def keep(found: torch.Tensor) -> None:
        if found.ndim == 3:  # tokens, of which those of a class come first
            found = found[:, -high * wide :].transpose(1, 2).unflatten(2, (high, wide))
        seen.append(found)

    stages = model.stages if hasattr(model, "stages") else [model.blocks]
    blocks = [block for stage in stages for block in stage]
    hooks = [blocks[0].register_forward_pre_hook(lambda module, given: keep(given[0]))]
    hooks += [b.register_forward_hook(lambda module, given, made: keep(made)) for b in blocks]
    with torch.no_grad():
        model.features(images)
    for hook in hooks:
        hook.remove()
    return seen


def depths(data: Path, init: Path, part: str, labels: int) -> None:
    """Print the scores of linear decoders on each depth of the frozen encoder."""
    runner = regard.load(init)
    model, format = encoder_of(runner.model), runner.codec.format
    where, mask_of = find_masks(str(data), ("train", part))
    read: ImageData = IMAGE.load(where, ImageTable().reading(False), format, need=("train", part))
    read.parts["train"] = read["train"].part(labels / len(read["train"]))
    marked = with_masks(read, str(data), mask_of)
    known: dict[str, tuple[list[torch.Tensor], torch.Tensor]] = {}
    for name in ("train", part):
        pixels = format.normalise(read[name].read(np.arange(len(read[name]))))
        found = [features(model, some) for some in pixels.split(64)]
        each = [torch.cat(level) for level in zip(*found, strict=True)]
        known[name] = each, torch.from_numpy(marked.masks[name]).long()
    size = known[part][1].shape[1:]
    for depth, (learnt, judged) in enumerate(zip(known["train"][0], known[part][0], strict=True)):
        torch.manual_seed(1)
        norm = nn.BatchNorm2d(learnt.shape[1], affine=False)
        decoder = nn.Sequential(norm, nn.Conv2d(learnt.shape[1], len(marked.classes), 1))
        optimiser = torch.optim.Adam(decoder.parameters(), 0.01)
        for n in range(STEPS):
            rows = torch.from_numpy(np.random.default_rng([1, n]).integers(0, len(learnt), BATCH))
            logits = F.interpolate(decoder(learnt[rows]), size, mode="bilinear")
            optimiser.zero_grad()
            F.cross_entropy(logits, known["train"][1][rows]).backward()
            optimiser.step()
        decoder.eval()
        with torch.no_grad():
            made = [
                F.interpolate(decoder(some), size, mode="bilinear").argmax(1).byte()
                for some in judged.split(64)
            ]
        counts = Overlaps.of(marked.masks[part], torch.cat(made).numpy(), len(marked.classes))
        name = f"after block {depth}" if depth else "before blocks"
        print(f"{name:<14} mean IoU {counts.values()['mean_iou']:.1f}", flush=True)


def main(data: Path, init: Path, out: Path, part: str, labels: list[int], seeds: int) -> None:
    """Print the curve by number of labels, and what each depth knows."""
    torch.set_num_threads(1)
    depths(data, init, part, labels[-1])
    curve(data, init, out, part, labels, seeds)


if __name__ == "__main__":
    told = dict(word.split("=", 1) for word in sys.argv[1:])
    main(
        Path(told.get("data", "runs/scenes-data")),
        find_model(told.get("init", "scenes")),
        Path(told.get("out", "runs/segments")),
        told.get("part", "valid"),
        [int(n) for n in told.get("labels", "20,50,200,1000").split(",")],
        int(told.get("seeds", "3")),
    )
