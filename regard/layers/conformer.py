"""The Conformer block: attention for what is far, convolution for what is near."""

from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.masks import Padding
from regard.attention.positions import Position
from regard.errors import UsageError, lookup
from regard.layers.block import (
    BlockConfig,
    build_attention,
    build_feed_forward,
    build_norm,
)
from regard.layers.residual import HalfStep, PreNorm
from regard.layers.subsampling import zero_padding


class MaskedBatchNorm(nn.BatchNorm1d):
    """Batch norm of vectors (b, l, w) whose statistics are those of the real frames alone."""

    def forward(self, input: Tensor, mask: Padding | None = None) -> Tensor:
        """Normalise each channel; padding is zero then."""
        if mask is None:
            return super().forward(input.flatten(0, 1)).view(input.shape)
        keep = mask.keep.flatten()
        rows = super().forward(input.flatten(0, 1)[keep])
        whole = rows.new_zeros(len(keep), rows.shape[-1])
        return whole.index_put((keep,), rows).view(input.shape)


class FrameLayerNorm(nn.LayerNorm):
    """Layer norm of each frame, which knows of no other and so of no padding."""

    def forward(self, input: Tensor, mask: Padding | None = None) -> Tensor:
        """Normalise each frame."""
        return super().forward(input)


# name -> the norm within the convolution module
CONVOLUTION_NORMS: dict[str, type[nn.Module]] = {"batch": MaskedBatchNorm, "layer": FrameLayerNorm}


class ConvolutionModule(nn.Module):
    """W2 swish(norm(D * glu(W1 x))): pointwise, gate, depthwise D over time, norm, pointwise."""

    def __init__(self, width: int, kernel: int, norm: str = "batch", bias: bool = True):
        super().__init__()
        if kernel % 2 == 0:
            raise UsageError(f"kernel={kernel} has no middle; choose an odd one")
        self.pointwise = nn.Linear(width, 2 * width, bias=bias)
        self.depthwise = nn.Conv1d(
            width, width, kernel, padding=kernel // 2, groups=width, bias=bias
        )
        self.norm = lookup("convolution_norm", norm, CONVOLUTION_NORMS)(width)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, mask: Padding | None = None) -> Tensor:
        """Pass (b, l, w) through; padding is read as zeros, as what lies outside is."""
        x = zero_padding(F.glu(self.pointwise(zero_padding(x, mask))), mask)
        x = self.depthwise(x.mT).mT
        return self.out(F.silu(self.norm(x, mask)))


class ConformerBlock(nn.Module):
    """Half a feed-forward network, attention, convolution, the other half, and a norm.

    (Gulati et al. 2020.)
    """

    def __init__(
        self,
        config: BlockConfig,
        position: Position | None = None,
        path: float = 0.0,
        *,
        kernel: int = 31,
        norm: str = "batch",
    ):
        super().__init__()

        def around(kind: type[PreNorm]) -> PreNorm:
            return kind(build_norm(config), config.dropout, path)

        self.first = build_feed_forward(config)
        self.attention = build_attention(config, position)
        self.convolution = ConvolutionModule(config.width, kernel, norm, config.bias)
        self.second = build_feed_forward(config)
        self.around_first, self.around_second = around(HalfStep), around(HalfStep)
        self.around_attention, self.around_convolution = around(PreNorm), around(PreNorm)
        self.norm = build_norm(config)

    def forward(
        self,
        x: Tensor,
        *,
        at: Tensor,
        mask: Padding | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Pass (b, l, w) through the four sublayers and the norm."""
        x = self.around_first(x, self.first)
        x = self.around_attention(x, self.attention, at=at, mask=mask, bias=bias)
        x = self.around_convolution(x, self.convolution, mask=mask)
        x = self.around_second(x, self.second)
        return self.norm(x)
