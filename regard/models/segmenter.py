"""Semantic segmentation: an image encoder of any vision family, and a decoder to pixels."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from regard.errors import UsageError, lookup
from regard.layers.block import size_field
from regard.layers.shapes import Images, Size
from regard.models import preset
from regard.models.declaration import FamilyInfo
from regard.models.image_encoder import AroundEncoder, EncoderConfig, build_encoder
from regard.settings import setting

MOST_CLASSES = 255  # a byte of a mask has one more value, for pixels that are of no class


@dataclass(frozen=True)
class SegmenterConfig(AroundEncoder):
    """The encoder, and what makes classes of pixels of its features."""

    classes: int = size_field(2, MOST_CLASSES, "classes; a training takes those of the data")
    decoder: str = setting("linear", "decoder to pixels", choices=lambda: PIXEL_DECODERS)


PRESETS = {"segmenter": SegmenterConfig(), "up_segmenter": SegmenterConfig(decoder="up")}
# name -> that of the encoder's size
SIZES = {size: size for size in ("tiny", "small", "base", "big")}


def resize(config: SegmenterConfig, size: str) -> SegmenterConfig:
    """Config in a size; the encoder is then a CCT of that size."""
    return replace(config, encoder=EncoderConfig("vit", preset("vit", size, "cct")))


INFO = FamilyInfo("image", {"segment": {}}, PRESETS, SIZES, resize)


def _linear(width: int, classes: int, stride: int) -> nn.Module:
    """Make a linear layer on each place: logits are as coarse as the features."""
    return nn.Conv2d(width, classes, 1)


def _up(width: int, classes: int, stride: int) -> nn.Module:
    """Make transposed convolutions, each to twice as many places a side and half the width."""
    layers: list[nn.Module] = []
    for _ in range(round(math.log2(stride))):
        narrow = max(16, width // 2)
        layers += [nn.ConvTranspose2d(width, narrow, 2, 2), nn.GELU()]
        layers += [nn.Conv2d(narrow, narrow, 3, padding=1), nn.GELU()]
        width = narrow
    return nn.Sequential(*layers, nn.Conv2d(width, classes, 1))


# name -> the decoder, made from the width of the features, the classes and pixels a place
PIXEL_DECODERS: dict[str, Callable[[int, int, int], nn.Module]] = {"linear": _linear, "up": _up}


class Segmenter(nn.Module):
    """A class for each pixel: features of an image encoder, and a decoder of their grid."""

    def __init__(self, config: SegmenterConfig):
        super().__init__()
        self.config = config
        self.encoder = build_encoder(config.encoder)
        places = self.encoder.grid((config.image, config.image))[0]
        if not places:
            raise UsageError(f"image={config.image} is smaller than one place of the encoder")
        make = lookup("decoder", config.decoder, PIXEL_DECODERS)
        self.decoder = make(self.encoder.out_width, config.classes, config.image // places)

    def grid(self, size: Size) -> Size:
        """Number of features of an image of (height, width) in each direction."""
        return self.encoder.grid(size)

    def forward(self, images: Images) -> Float[Tensor, "b classes h w"]:
        """Logits of the classes of each pixel."""
        size = (images.shape[2], images.shape[3])
        high, wide = self.grid(size)
        features = self.encoder.features(images)[:, -high * wide :]  # class tokens come first
        places = features.transpose(1, 2).unflatten(2, (high, wide))
        return F.interpolate(self.decoder(places), size, mode="bilinear", align_corners=False)
