"""Draws the picture of convolution.md from models of Fashion-MNIST: python docs/convolution.py RUNS

RUNS has the folders fashion-mnist.8.vit.1.0 and the like of `regard train images data=fashion-mnist
size=tiny family=vit`, also for swin, mvitv2, lrnet and resnet. The picture is the first of the set.
"""

import gzip
import sys
from pathlib import Path

import numpy as np
from PIL import Image

import regard
from regard.files import write_atomically
from regard.recipes import data_folder
from regard.viewer.panels import Panel, draw_gallery, heat_map
from regard.viewer.placement import grid_weights

HERE = Path(__file__).resolve().parent
PLACES = (8, 22), (21, 16)  # x and y of who looks: the toe, and the shaft
LAYERS = (("lrnet", 0), ("swin", 0), ("swin", 1), ("vit", 0), ("vit", -1), ("mvitv2", 0))
CAPTIONS = (
    "LR-Net",
    "Swin, windows",
    "Swin, shifted",
    "ViT, first layer",
    "ViT, last layer",
    "MViT",
)


def boot() -> np.ndarray:
    """Return the first picture of Fashion-MNIST, bytes (28, 28)."""
    path = Path(data_folder("fashion-mnist")) / "train-images-idx3-ubyte.gz"
    with gzip.open(path) as file:
        return np.frombuffer(file.read(16 + 784)[16:], np.uint8).reshape(28, 28)


def marked(image: np.ndarray, at: tuple[int, int]) -> np.ndarray:
    """Return the picture in colours with a cross at a place."""
    pixels = np.repeat(image[..., None], 3, -1)
    x, y = at
    pixels[y, max(0, x - 2) : x + 3] = pixels[max(0, y - 2) : y + 3, x] = (53, 240, 255)
    return pixels


def kernel(run: Path, at: tuple[int, int]) -> np.ndarray:
    """Return the mean size of the first kernels of a ResNet, around a place."""
    model = regard.load(run).model
    weights = dict(model.named_parameters())["stem.first.convolution.weight"]
    found, (x, y) = np.zeros((30, 30)), at
    found[y : y + 3, x : x + 3] = weights.detach().abs().mean((0, 1)).numpy()
    return found[1:-1, 1:-1]


def main() -> None:
    """Draw it."""
    home, image = Path(sys.argv[1]), boot()
    rows = []
    for at in PLACES:
        row = [Panel(marked(image, at), f"the boot, and {at[0]}, {at[1]}")]
        row.append(Panel(heat_map(kernel(home / "fashion-mnist.8.resnet.1.0", at)), "convolution"))
        for (name, layer), caption in zip(LAYERS, CAPTIONS, strict=True):
            model = regard.load(home / f"fashion-mnist.8.{name}.1.0")
            picture = model.picture(image, at=f"{at[0]},{at[1]}")
            views = [view for view in picture.views if view.laid is not None]
            map = grid_weights(views[layer], picture.query).mean(0)
            grown = np.asarray(Image.fromarray(map.astype(np.float32)).resize((28, 28), 0))
            row.append(Panel(heat_map(grown), f"{caption}"))
        rows.append(row)
    write_atomically(
        HERE / "convolution.png", draw_gallery("Who is looked at, from two places", rows)
    )


if __name__ == "__main__":
    main()
