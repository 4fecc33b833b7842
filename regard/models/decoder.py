"""The decoder of a transformer, whatever its memory is made of."""

from collections.abc import Iterator
from typing import cast

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.masks import Causal, Mask
from regard.attention.multihead import Memory
from regard.attention.once import one_pass
from regard.attention.places import places
from regard.attention.positions import Position, of_layer
from regard.layers.block import BlockConfig, DecoderBlock, block_position, build_final_norm
from regard.layers.embed import TokenEmbedding
from regard.layers.fast.half import half_memories
from regard.layers.fast.read import packed_memories
from regard.layers.fast.run import run_blocks
from regard.layers.fast.stack import CrossMemory, reads_memory
from regard.layers.shapes import Ids, Vectors
from regard.layers.vocabulary import VocabularyLinear
from regard.models.state import State, take_caches


class TransformerDecoder(nn.ModuleList):
    """Decoder blocks: causal self-attention, cross-attention to a memory, feed-forward networks.

    Embeddings and the last norm are the model's, which may share them.
    """

    def __init__(self, config: BlockConfig, depth: int, position: Position):
        super().__init__(DecoderBlock(config, of_layer(position)) for _ in range(depth))

    def blocks(self) -> Iterator[DecoderBlock]:
        """Give the blocks one after the other."""
        return cast(Iterator[DecoderBlock], iter(self))

    def forward(
        self,
        embed: TokenEmbedding,
        target: Int[Tensor, "n t"],
        memory: Float[Tensor, "b s w"],
        memory_mask: Mask | None = None,
    ) -> Float[Tensor, "n t w"]:
        """Last vectors of whole targets; those that share a memory follow each other."""
        at = places(0, target.shape[1], target.device)
        # padding comes last, so that a causal mask already hides it from every real token
        causal = Causal()
        x = embed(target, at)
        shared = embed.position.shared(at, at, causal)
        with one_pass():
            for block in self.blocks():
                x = block(x, memory, at=at, mask=causal, memory_mask=memory_mask, bias=shared)
        return x

    def start(
        self, memory: Float[Tensor, "b s w"], mask: Mask | None = None, *, capacity: int
    ) -> State:
        """Project the memory for every block, and allocate what decoding will need."""
        blocks = list(self)
        memories = half_memories(blocks, memory) or packed_memories(blocks, memory)
        if memories is None:
            memories = [block.cross.read(memory) for block in self.blocks()]
        if reads_memory(blocks, memory):
            memories = [Memory(one.k.contiguous(), one.v.contiguous()) for one in memories]
        else:
            memories = [one.to(memory.dtype).by_columns() for one in memories]
        layers = [block.attention for block in self.blocks()]
        caches = take_caches(layers, len(memory), memory)
        return State(caches, capacity, memories=memories, mask=mask)

    def step(self, embed: TokenEmbedding, ids: Ids, state: State) -> Vectors:
        """Last vectors of the next tokens of all hypotheses."""
        at, everything, mask = state.take(ids.shape[1])
        x = embed(ids.reshape(state.sentences, -1), at)
        shared = embed.position.shared(at, everything, mask)
        memory = CrossMemory(state.memories, state.mask)
        rest = {"at": at, "mask": mask, "bias": shared, "caches": state.caches}
        return run_blocks(self, x, **rest, memory=memory)


class TextDecoder(nn.Module):
    """What a decoder of texts with cross-attention adds to itself; the head is tied."""

    def add_parts(
        self, vocab: int, block: BlockConfig, depth: int, position: str, max_length: int
    ) -> None:
        """Add embeddings, blocks, the last norm and the head.

        Args:
            vocab: number of tokens
            block: sizes and parts of a block
            depth: number of blocks
            position: key of POSITIONS
            max_length: longest text
        """
        place = block_position(position, block, max_length=max_length)
        self.embed = TokenEmbedding(vocab, block.width, place, block.width**0.5, block.dropout)
        self.blocks = TransformerDecoder(block, depth, place)
        self.norm = build_final_norm(block)
        self.head = VocabularyLinear(block.width, vocab, bias=False)
        self.head.weight = self.embed.tokens.weight
