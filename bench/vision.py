"""How fast images are read: Regard's ViT and Swin against transformers', ViT against ResNet.

    python bench/vision.py [--rounds 9] [--before FOLDER] [--quick]
    python bench/vision.py --families docs/vision-speed.png

ViT-Ti/16 and Swin-T at 224 pixels, float32, all cores, random weights; forward without gradient, of
a model as `regard.load` gives it, and a training step (forward, backward, AdamW). Regard and
transformers run in processes of their own, as their users have them. Everybody takes a turn in each
round and speeds are medians over the rounds; a ratio above 1 means that Regard is faster.
With `--before`, the Regard of another folder takes its turn as well (`ratio NAME_vs_before`).
`vit_vs_resnet` is how many multiply-adds a second ViT-S/16 does over those of ResNet-50, both
Regard's: the lectures say more. Exponents are slopes of the logarithm over that of the number of
pixels: of time for attention in windows (Swin's layer) and over a neighbourhood (LR-Net's), of
memory for full attention.

`--families` measures no more than how fast the tiny families read images of 28x28 (one thread,
batches of 64, weights that do not change, the median of the rounds), and draws that against the
accuracy that each reached in eight minutes, which it reads from docs/results.md.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import attend as attention_bench  # noqa: E402
import torch  # noqa: E402
from apart import Peer, as_in, in_turn, machine, takes  # noqa: E402
from decode_translation import peaks  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from regard.attention.multihead import MultiHead  # noqa: E402
from regard.costs.report import forward as counted  # noqa: E402
from regard.files.weights import state_of  # noqa: E402
from regard.layers.windows import WindowAttention  # noqa: E402
from regard.models import family, preset  # noqa: E402
from regard.models.folder import assign_weights  # noqa: E402
from regard.models.local import LocalRelation  # noqa: E402
from regard.native import fast  # noqa: E402
from regard.native.allocator import reuse_memory  # noqa: E402
from regard.viewer import Plot, draw_plots  # noqa: E402
from regard.viewer.plot import label_points  # noqa: E402

SIZE, LABELS = 224, 1000
# name in docs/results.md -> family and preset
FAMILIES = {
    "ResNet": ("resnet", "resnet"),
    "MViTv2": ("mvit", "mvitv2"),
    "ResNet with attention between its blocks": ("resnet", "resnet_attention"),
    "ViT": ("vit", "vit"),
    "Swin": ("swin", "swin"),
    "LR-Net": ("local", "lrnet"),
}


def ours(kind: str, row: str) -> nn.Module:
    """Make a published model of ours."""
    torch.manual_seed(1)
    return family(kind)[1](preset(kind, row))


def loaded(model: nn.Module) -> nn.Module:
    """Return a model with its weights laid as `regard.load` lays them."""
    assign_weights(model, {name: x.detach() for name, x in state_of(model).items()})
    return model


def their_vit() -> nn.Module:
    """Make transformers' ViT-Ti/16."""
    from transformers import ViTConfig, ViTForImageClassification

    config: Any = ViTConfig(
        hidden_size=192,
        num_attention_heads=3,
        intermediate_size=768,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config.num_labels = LABELS
    return ViTForImageClassification(config)


def their_swin() -> nn.Module:
    """Make transformers' Swin-T."""
    from transformers import SwinConfig, SwinForImageClassification

    config: Any = SwinConfig(drop_path_rate=0.2)
    config.num_labels = LABELS
    return SwinForImageClassification(config)


def reading(model: nn.Module, images: Tensor) -> Callable[[], Any]:
    """Return a forward pass without gradient."""
    model.eval()

    @torch.inference_mode()
    def act() -> Any:
        model(images)

    return act


def learning(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], Any]:
    """Return a training step."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def act() -> Any:
        model.train()
        found = model(images)
        F.cross_entropy(getattr(found, "logits", found), labels).backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return act


def regards(kind: str, row: str, what: str, images: Tensor, labels: Tensor) -> Callable[[], Any]:
    """Make what Regard does in its process."""
    reuse_memory()  # as running and training do
    model = ours(kind, row)
    if what == "forward":
        return reading(loaded(model), images)
    learn = learning(model, images, labels)

    def learn_fast() -> Any:
        with fast(model):  # as the training loop does
            return learn()

    return learn_fast


def theirs(kind: str, row: str, what: str, images: Tensor, labels: Tensor) -> Callable[[], Any]:
    """Make what transformers does in its process."""
    model = {"vit": their_vit, "swin": their_swin}[kind]()
    return reading(model, images) if what == "forward" else learning(model, images, labels)


def against_transformers(
    rounds: int, batch: int, threads: int, before: str | None
) -> dict[str, float]:
    """Return the ratios to transformers' own models, and to the Regard of another folder."""
    images, labels = torch.randn(batch, 3, SIZE, SIZE), torch.arange(batch)
    ratios, peak = {}, peaks()
    for kind, row in (("vit", "vit_ti16"), ("swin", "swin_t")):
        for what in ("forward", "train"):
            words = kind, row, what, images, labels
            peers = {
                "regard": Peer(regards, *words, threads=threads),
                "transformers": Peer(theirs, *words, threads=threads),
            }
            if before:
                with as_in(before):
                    peers["before"] = Peer(regards, *words, threads=threads)
            found = in_turn({side: peer.takes() for side, peer in peers.items()}, rounds)
            for peer in peers.values():
                peer.end()
            print(
                f"{kind} {what:7}  "
                + "  ".join(f"{side} {batch / took:.2f} images/s" for side, took in found.items()),
                flush=True,
            )
            ratios[f"{kind}_{what}"] = found["transformers"] / found["regard"]
            if before:
                ratios[f"{kind}_{what}_vs_before"] = found["before"] / found["regard"]
            if peak:  # a training step has about three products for one
                adds = counted(ours(kind, row).to("meta"), (images.to("meta"),)).multiply_adds
                adds *= 3 if what == "train" else 1
                share = adds / peak["fp32"] / threads / found["regard"]
                print(f"share {kind}_{what} {share:.3f}", flush=True)
    return ratios


def against_resnet(rounds: int, batch: int) -> float:
    """Return how many multiply-adds a second ViT does over those of ResNet."""
    images, rates = torch.randn(batch, 3, SIZE, SIZE), {}
    models = {"vit": ours("vit", "vit_s16"), "resnet": ours("resnet", "resnet50")}
    acts = {name: takes(reading(model, images)) for name, model in models.items()}
    found = in_turn(acts, rounds)
    for name, model in models.items():
        products = counted(model.to("meta"), (images.to("meta"),)).multiply_adds
        rates[name] = products / found[name]
        print(f"{name:7} {products / batch / 1e9:.2f} G multiply-adds, {rates[name] / 1e9:.1f} G/s")
    return rates["vit"] / rates["resnet"]


def growth(act: Callable[[int], Callable[[], Any]], sides: list[int], rounds: int) -> float:
    """Return the slope of log(time) over log(pixels)."""
    with torch.inference_mode():
        found = in_turn({str(side): takes(act(side)) for side in sides}, rounds)
    print("  ".join(f"{side}x{side}: {took * 1e3:.1f} ms" for side, took in found.items()))
    return attention_bench.exponent([side * side for side in sides], list(found.values()))


def exponents(rounds: int) -> dict[str, float]:
    """Return how the cost of attention grows with the number of pixels."""
    windows = WindowAttention(MultiHead(96, 3), 7, 3).eval()
    local = LocalRelation(96).eval()

    def in_windows(side: int) -> Callable[[], Any]:
        x = torch.randn(1, side, side, 96)
        return lambda: windows(x)

    def around(side: int) -> Callable[[], Any]:
        x = torch.randn(1, 96, side, side)
        return lambda: local(x)

    sides = [28, 56, 112]
    lengths = [side * side for side in sides]
    memory = [
        attention_bench.in_process(case="plain", length=length, heads=3) for length in lengths
    ]
    return {
        "windows_time": growth(in_windows, sides, rounds),
        "local_time": growth(around, sides, rounds),
        "full_memory": attention_bench.exponent(lengths, memory),
    }


def known_accuracies() -> dict[str, tuple[int, float, float, float]]:
    """Parameters of each tiny family, and its accuracy on Fashion-MNIST with its interval."""
    text = (HERE.parent / "docs" / "results.md").read_text("utf-8")
    found: dict[str, tuple[int, float, float, float]] = {}
    for name in FAMILIES:
        row = re.search(
            rf"^\| {name} \| ([\d,]+) \|.*\| \**([\d.]+)\** \(([\d.]+) to ([\d.]+)\) \|$",
            text,
            re.MULTILINE,
        )
        assert row is not None, name
        score, low, high = map(float, row.groups()[1:])
        found[name] = int(row[1].replace(",", "")), score, low, high
    return found


def families(rounds: int, out: Path) -> None:
    """Print how fast each family reads, in turn, and draw its accuracy against that."""
    images, known, acts = torch.randn(64, 1, 28, 28), known_accuracies(), {}
    with ExitStack() as stack:
        for name, (kind, row) in FAMILIES.items():
            torch.manual_seed(1)
            config = replace(preset(kind, "tiny", row), labels=10, channels=1, image=28)
            model = loaded(family(kind)[1](config))
            count = sum(weight.numel() for weight in model.parameters())
            assert count == known[name][0], f"{name} has {count} parameters, not the table's"
            stack.enter_context(fast(model, frozen=True))
            acts[name] = takes(reading(model, images))
        taken = in_turn(acts, rounds)
    speeds = {name: len(images) / took for name, took in taken.items()}
    for name, speed in speeds.items():
        print(f"{name}: {speed:.0f} images/s, {known[name][1]:.2f}% in eight minutes of training")
        print(f"ratio {FAMILIES[name][1]}_vs_resnet {speed / speeds['ResNet']:.3f}")

    def paint(axes: Any) -> None:
        points = []
        for number, (name, speed) in enumerate(speeds.items()):
            _, score, low, high = known[name]
            bars = [[score - low], [high - score]]
            axes.errorbar(speed, score, bars, fmt="o", markersize=4, color=f"C{number}")
            points.append((speed, score, name.split(" between")[0], "black"))
        axes.margins(0.25, 0.15)
        label_points(axes, points, 7)

    title = "Accuracy after eight minutes against speed, six families of 0.3M parameters"
    notes = ["Fashion-MNIST, test part; bars are 95% intervals over its images, one run each."]
    plot = Plot(paint, "", "images a second, one thread", "accuracy, %")
    out.write_bytes(draw_plots(title, [[plot]], notes=notes, size=(6.2, 3.2)).png())


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--before", metavar="FOLDER", help="another version, to compare with")
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    parser.add_argument("--families", type=Path, help="a picture of speed against accuracy")
    given = parser.parse_args()
    print(machine(), flush=True)
    if given.families:
        torch.set_num_threads(1)
        reuse_memory()
        families(given.rounds, given.families)
        return
    rounds, batch = (3, 4) if given.quick else (given.rounds, 8)
    torch.set_num_threads(given.threads)
    ratios = against_transformers(rounds, batch, given.threads, given.before)
    reuse_memory()
    ratios["vit_vs_resnet"] = against_resnet(rounds, batch)
    grown = exponents(rounds)
    for name, slope in grown.items():
        print(f"exponent {name} {slope:.2f}")
    for name, ratio in ratios.items():
        print(f"ratio {name} {ratio:.3f}")


if __name__ == "__main__":
    main()
