"""An encoder of series of numbers, and of arrays of any rank: chunks, blocks, a pool and a head."""

from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor, nn

from regard.attention.dropout import dropout
from regard.attention.masks import Padding
from regard.attention.positions import POSITIONS, Position, of_layer, with_aliases
from regard.errors import lookup
from regard.layers.block import (
    BlockConfig,
    block_position,
    build_block,
    build_final_norm,
    prob_field,
    size_field,
)
from regard.layers.chunks import Chunks, chunk_at
from regard.layers.fast.run import run_blocks
from regard.layers.grid import build_grid_position
from regard.layers.heads import POOLERS, ClassificationHead
from regard.layers.init import INITS
from regard.layers.residual import drop_path_schedule
from regard.layers.shapes import Lengths, Vectors
from regard.models.declaration import FamilyInfo, size_table
from regard.models.ensemble import Ensemble, mean_of_members
from regard.settings import setting


@dataclass(frozen=True)
class SeriesConfig:
    """The sizes and parts of an encoder of series.

    `chunk` has a length for each axis: one for a series, two for an array with height and width.
    """

    labels: int = size_field(2, 10_000_000, "labels; a training takes those of the data")
    channels: int = size_field(1, 2**16, "channels of the series")
    chunk: tuple[int, ...] = setting((4,), "steps per token along each axis", min=1, max=2**16)
    stride: tuple[int, ...] | None = setting(
        None, "steps between tokens; none: chunks do not overlap", min=1, max=2**16
    )
    max_length: int = size_field(1024, 10_000_000, "maximum steps of the first axis")
    depth: int = size_field(4, 1000, "layers")
    block: BlockConfig = field(
        default_factory=lambda: BlockConfig(128, 4, 256, feed_forward="gelu", dropout=0.1)
    )
    position: str = setting("sinusoidal", "position embedding", choices=with_aliases(POSITIONS))
    position_base: float = setting(10_000.0, "base of the sinusoids or rotations")
    pool: str = setting("mean", "pooling", choices=POOLERS)
    head_dropout: float = prob_field(0.1, "dropout before the head")
    drop_path: float = prob_field(0.0, "stochastic depth")
    init: str = setting("glorot", "initialisation", choices=INITS)
    members: int = size_field(1, 100, "models of an ensemble")


PRESETS = {"series": SeriesConfig()}
SIZES = size_table(
    "depth block.width block.ffn_width block.heads",
    {
        "tiny": (2, 64, 128, 4),
        "small": (4, 128, 256, 4),
        "base": (6, 256, 512, 8),
        "big": (8, 384, 1536, 8),
    },
)
INFO = FamilyInfo("series", {"series": {}}, PRESETS, SIZES, cost_length=256)


def build_series_position(config: SeriesConfig, chunks: Chunks) -> Position:
    """Make the position of a config: any one along a line, a computed one on a grid."""
    block, base = config.block, config.position_base
    if chunks.axes > 1:
        sizes = block.width, block.heads, block.per_head, base
        return build_grid_position(config.position, *sizes, axes=chunks.axes)
    (most,) = chunks.grid((config.max_length,))
    return block_position(config.position, block, base=base, max_length=most, bidirectional=True)


class SeriesEncoder(nn.Module):
    """An encoder of series of numbers: self-attention between all chunks of one, and a head.

    What is true of series (time, channels) is true of any array (n1, ..., nr, channels); the first
    axis alone may be of different lengths. With other members it is the first of an ensemble.
    """

    def __init__(self, config: SeriesConfig):
        super().__init__()
        self.config = config
        block = config.block
        self.chunks = Chunks(
            config.channels, block.width, config.chunk, stride=config.stride, partial=True
        )
        self.position = build_series_position(config, self.chunks)
        self.blocks = nn.ModuleList(
            build_block(block, of_layer(self.position), path)
            for path in drop_path_schedule(config.drop_path, config.depth)
        )
        self.norm = build_final_norm(block)
        self.head = ClassificationHead(block.width, config.labels, config.head_dropout, config.pool)
        lookup("init", config.init, INITS)(self)
        self.members = Ensemble(SeriesEncoder, config)

    def hidden(
        self, x: Float[Tensor, "b n *rest c"], lengths: Lengths | None = None
    ) -> tuple[Vectors, Lengths | None]:
        """Last vectors of the chunks of arrays, and how many chunks are real."""
        shape = x.shape[1:-1]
        tokens = self.chunks(x.movedim(-1, 1), lengths)
        counts = None if lengths is None else self.chunks.token_lengths(lengths, shape)
        at = chunk_at(self.chunks.grid(shape), 0, x.device)
        mask = Padding.of(counts, tokens.shape[1])
        tokens = self.position.embed(tokens, at)
        tokens = dropout(tokens, self.config.block.dropout, self.training)
        bias = self.position.shared(at, at, mask)
        return run_blocks(self.blocks, tokens, norm=self.norm, at=at, mask=mask, bias=bias), counts

    def forward(
        self, x: Float[Tensor, "b n *rest c"], lengths: Lengths | None = None
    ) -> Float[Tensor, "b labels"]:
        """Logits of the labels of arrays (b, n1, ..., nr, c) of these lengths."""
        return mean_of_members(self, lambda member: member.own_output(x, lengths))

    def own_output(
        self, x: Float[Tensor, "b n *rest c"], lengths: Lengths | None = None
    ) -> Float[Tensor, "b labels"]:
        """Logits by this member of an ensemble alone."""
        return self.head(*self.hidden(x, lengths))
