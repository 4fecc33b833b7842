"""What tasks and tools ask of a model, whatever its family."""

from collections.abc import Iterator
from dataclasses import Field
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor, nn

from regard.layers.block import BlockConfig
from regard.layers.layout import Layout


class ModelConfig(Protocol):
    """Config of a model of any family: a dataclass, whose fields differ by family."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


class BlockModelConfig(ModelConfig, Protocol):
    """Config of a model whose layers are blocks of one kind."""

    @property
    def block(self) -> BlockConfig:
        """Config of a block."""
        ...


class ImageModelConfig(ModelConfig, Protocol):
    """Config of a model that reads images."""

    @property
    def image(self) -> int:
        """Number of pixels per side of an image."""
        ...

    @property
    def channels(self) -> int:
        """Number of channels of an image."""
        ...


class PatchModelConfig(ImageModelConfig, Protocol):
    """Config of a model that reads images patch by patch."""

    @property
    def patch(self) -> int:
        """Number of pixels per side of a patch."""
        ...


class Model(Protocol):
    """A model of any family: a module with its config."""

    config: Any

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Parameters."""
        ...

    def state_dict(self, *args: Any, **rest: Any) -> Any:
        """Parameters and buffers by name."""
        ...

    def __call__(self, *args: Any, **rest: Any) -> Any:
        """Logits of a batch."""
        ...


class TextModel(Model, Protocol):
    """A model of texts: last hidden vectors, and a head on them."""

    @property
    def head(self) -> Any:
        """Module that makes logits of hidden vectors."""
        ...

    def hidden(self, *ids: Any, **rest: Any) -> Tensor:
        """Last hidden vectors (b, l, w) of token ids (b, l) and their lengths (b)."""
        ...


@runtime_checkable
class LaidOut(Protocol):
    """A model whose attention can be laid over an image."""

    def layout(self, size: tuple[int, int]) -> dict[str, Layout]:
        """Layout of each layer over an image of (height, width), by its map's name."""
        ...


class ImageEncoder(Model, LaidOut, Protocol):
    """A model that makes a grid of feature vectors of an image, and can pool them to one."""

    out_width: int  # of the features

    @property
    def pooled_width(self) -> int:
        """Width of pooled features."""
        ...

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Number of features of an image of (height, width) in each direction."""
        ...

    def features(self, images: Tensor) -> Tensor:
        """Features (b, l, w) of images: of tokens before the grid, then row by row."""
        ...

    def pool(self, features: Tensor) -> Tensor:
        """One vector (b, w) of the features of each image."""
        ...


class ImageClassifier(ImageEncoder, Protocol):
    """An image encoder with a head on its pooled features."""

    @property
    def head(self) -> Any:
        """Module that makes logits of pooled features."""
        ...


class Pretrainer(Model, Protocol):
    """What an encoder is pretrained within, by a loss of its own."""

    def loss(self, *batch: Tensor) -> Tensor:
        """Summed loss of a batch."""
        ...


class MaskedPretrainer(Pretrainer, Protocol):
    """A pretrainer that masks patches of images."""

    def masked_count(self, tokens: int) -> int:
        """Number of masked patches of so many."""
        ...

    def size(self, images: Tensor) -> tuple[int, int]:
        """Number of patches of images in each direction."""
        ...

    def reconstruct(self, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Images painted where they are masked, by noise (b, patches), and the masks."""
        ...


class DualEncoder(Pretrainer, Protocol):
    """Encoders of images and of texts into one space."""

    def images(self, images: Tensor) -> Tensor:
        """Vectors (b, w) of images."""
        ...

    def texts(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Vectors (b, w) of texts."""
        ...
