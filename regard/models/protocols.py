"""What tasks and tools ask of a model, whatever its family."""

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from regard.layers.layout import Layout


class TextModel(Protocol):
    """A model of texts: last hidden vectors, and a head on them."""

    config: Any

    @property
    def head(self) -> Any:
        """Return the module that makes logits of hidden vectors."""
        ...

    def hidden(self, *ids: Tensor, **rest: Any) -> Tensor:
        """Return the last hidden vectors (b, l, w) of token ids (b, l) and their lengths (b)."""
        ...


@runtime_checkable
class LaidOut(Protocol):
    """A model whose attention can be laid over an image."""

    def layout(self, size: tuple[int, int]) -> dict[str, Layout]:
        """Return how each layer is laid over an image of (height, width), by its map's name."""
        ...


class ImageEncoder(LaidOut, Protocol):
    """A model that makes a grid of feature vectors of an image, and can pool them to one."""

    config: Any
    out_width: int  # of the features

    @property
    def pooled_width(self) -> int:
        """Return the width of pooled features."""
        ...

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return how many features an image of (height, width) has in each direction."""
        ...

    def features(self, images: Tensor) -> Tensor:
        """Return the features (b, l, w) of images: of tokens before the grid, then row by row."""
        ...

    def pool(self, features: Tensor) -> Tensor:
        """Return one vector (b, w) of the features of each image."""
        ...

    def __call__(self, images: Tensor) -> Tensor:
        """Return the logits (b, labels) of images, or without labels their pooled features."""
        ...
