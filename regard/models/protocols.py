"""What tasks and tools ask of a model, whatever its family."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from regard.layers.layout import Layout


class Model(Protocol):
    """A model of any family: a module with its config."""

    config: Any

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the parameters."""
        ...

    def state_dict(self, *args: Any, **rest: Any) -> Any:
        """Return parameters and buffers by name."""
        ...

    def __call__(self, *args: Any, **rest: Any) -> Any:
        """Return the logits of a batch."""
        ...


class TextModel(Model, Protocol):
    """A model of texts: last hidden vectors, and a head on them."""

    @property
    def head(self) -> Any:
        """Return the module that makes logits of hidden vectors."""
        ...

    def hidden(self, *ids: Any, **rest: Any) -> Tensor:
        """Return the last hidden vectors (b, l, w) of token ids (b, l) and their lengths (b)."""
        ...


@runtime_checkable
class LaidOut(Protocol):
    """A model whose attention can be laid over an image."""

    def layout(self, size: tuple[int, int]) -> dict[str, Layout]:
        """Return how each layer is laid over an image of (height, width), by its map's name."""
        ...


class ImageEncoder(Model, LaidOut, Protocol):
    """A model that makes a grid of feature vectors of an image, and can pool them to one."""

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


class ImageClassifier(ImageEncoder, Protocol):
    """An image encoder with a head on its pooled features."""

    @property
    def head(self) -> Any:
        """Return the module that makes logits of pooled features."""
        ...


class Pretrainer(Model, Protocol):
    """What an encoder is pretrained within, by a loss of its own."""

    def loss(self, *batch: Tensor) -> Tensor:
        """Return the summed loss of a batch."""
        ...


class MaskedPretrainer(Pretrainer, Protocol):
    """A pretrainer that masks patches of images."""

    def masked_count(self, tokens: int) -> int:
        """Return how many of so many patches are masked."""
        ...


class DualEncoder(Pretrainer, Protocol):
    """Encoders of images and of texts into one space."""

    def images(self, images: Tensor) -> Tensor:
        """Return the vectors (b, w) of images."""
        ...

    def texts(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the vectors (b, w) of texts."""
        ...


class SoundEncoder(Protocol):
    """A model that makes vectors of the frames of a sound, and writes or labels with them.

    Its config has mels, vocab (0: it writes no text), labels (0: it has no classes), ctc and
    decoder_depth (0: it has no decoder). One with a decoder is a writer of decode.writer too.
    """

    config: Any
    stride: int  # frames of the spectrogram for one frame of output
    out_width: int  # of the output

    def out_lengths(self, lengths: Tensor) -> Tensor:
        """Return how many frames of output sounds of so many frames have, each by itself."""
        ...

    def encode(self, sound: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the memory (b, s, w) of spectrograms (b, t, mels), and its lengths (b).

        It is zero at padding.
        """
        ...

    def ctc_logits(self, memory: Tensor) -> Tensor:
        """Return the logits (b, s, vocab) of all tokens in each frame; blank is token 0."""
        ...

    def __call__(self, sound: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the logits of labels (b, labels), or of CTC (b, s, vocab)."""
        ...
