"""The state of decoding: caches of keys and values, shared by the hypotheses of a sentence."""

import torch
from torch import Tensor

from regard.attention.masks import Causal, Mask, Padding, Sliding, join_padding
from regard.attention.multihead import Cache, Memory, MultiHead, RowSelect
from regard.attention.shapes import join_rows
from regard.errors import UsageError

# Caches begin with room for this many keys.
ROOM = 128


def take_caches(
    layers: list[MultiHead],
    sentences: int,
    like: Tensor,
    least: int = 0,
    kind: type[Cache] = Cache,
) -> list[Cache]:
    """Allocate the caches of a model's layers for some sentences.

    Args:
        layers: attention layers
        sentences: texts
        like: tensor whose dtype and device the memory has
        least: keys that there must be memory for
        kind: class of the caches
    """
    room = max(ROOM, least)
    return [kind(sentences, layer.kv_heads, room, layer.head_width, like) for layer in layers]


class BeamAncestryMask(Mask):
    """A hypothesis sees its own past among all keys of its sentence: seen is (b, q, k)."""

    def __init__(self, seen: Tensor):
        self.seen = seen

    def tile(self, rows: slice, columns: slice) -> Tensor:
        """Same answer for every head."""
        return self.seen[:, None, rows, columns]


class State:
    """What decoding carries: sentences with their memory, times hypotheses with their past.

    The hypotheses of a sentence write into one cache, and `seen` tells which of its keys each of
    them stands on. So to move hypotheses is to change a mask; no key is copied. Where nothing has
    parted, `seen` is None: all see all.

    The caches may hold a prompt already; `prompts` (b) are then the numbers of its real tokens,
    which differ from sentence to sentence. With a `window`, queries see only that many keys back.

    Args:
        caches: keys and values of each layer
        capacity: tokens that there is memory for
        memories: keys and values of the source for each layer
        mask: which tokens of the source are real
        prompts: real tokens of each prompt that the caches hold
        window: keys that a query sees back
    """

    def __init__(
        self,
        caches: list[Cache],
        capacity: int,
        *,
        memories: list[Memory] | None = None,
        mask: Mask | None = None,
        prompts: Tensor | None = None,
        window: int | None = None,
    ):
        self.caches, self.memories, self.mask = caches, memories or [], mask
        self.hypotheses, self.capacity, self.window = 1, capacity, window
        self.length = 0  # tokens of each hypothesis that have been read
        self.seen: Tensor | None = None
        read = caches[0].length
        self.begun: Tensor | int = read  # where each text goes on
        if prompts is not None and bool((prompts != read).any()):
            self.begun = prompts.view(-1, 1)
            real = torch.arange(read, device=prompts.device) < self.begun
            self.seen = real.unsqueeze(1)

    def _sight(self) -> Tensor:
        """Which keys (b, hypotheses, k) each hypothesis sees."""
        if self.seen is not None:
            return self.seen
        cache = self.caches[0]
        shape = (self.sentences, self.hypotheses, cache.length)
        return torch.ones(shape, dtype=torch.bool, device=cache.v.device)

    def _starts(self) -> Tensor:
        """Where the text of each sentence goes on, (b, 1)."""
        if isinstance(self.begun, Tensor):
            return self.begun
        return torch.full((self.sentences, 1), self.begun, device=self.caches[0].v.device)

    @property
    def sentences(self) -> int:
        """Number of unfinished sentences."""
        return len(self.caches[0].v)

    def take(self, tokens: int) -> tuple[Tensor, Tensor, Mask | None]:
        """Count new tokens of each hypothesis in.

        Returns their positions, the positions of all keys, and the mask.
        """
        each, cache = self.hypotheses, self.caches[0]
        if self.length + tokens > self.capacity:
            raise UsageError(
                f"position {self.length + tokens} is past the {self.capacity} that memory was "
                "taken for; ask for a larger max_length"
            )
        full = cache.length + each * tokens > cache.room
        if full and (self.seen is not None or self.window is not None):
            self._forget(each * tokens)
        at = torch.arange(self.length, self.length + tokens, device=cache.v.device)
        at = ((at.repeat(each) if each > 1 else at) + self.begun).unsqueeze(-1)
        before = cache.at
        if before is not None and before.ndim > at.ndim:
            at = at.expand(len(before), -1, -1)
        everything = at if before is None else torch.cat([before, at], -2)
        mask = self._look(tokens)
        if self.window is not None and everything.shape[-2] > self.window:
            mask = Sliding(self.window, at, everything) & mask
        self.length += tokens
        return at, everything, mask

    def _look(self, tokens: int) -> Mask | None:
        """Mask of the keys that new tokens of each hypothesis see, themselves among them."""
        if self.seen is None:
            return None if tokens == 1 else Causal(self.caches[0].length)
        each = self.hypotheses
        past = self.seen.repeat_interleave(tokens, 1) if tokens > 1 else self.seen
        own = torch.ones(tokens, tokens, dtype=torch.bool, device=past.device).tril()
        own = torch.block_diag(*[own] * each) if each > 1 else own
        seen = torch.cat([past, own.expand(self.sentences, -1, -1)], dim=2)
        self.seen = seen[:, tokens - 1 :: tokens]
        return BeamAncestryMask(seen)

    def select(self, parents: Tensor) -> "State":
        """Let hypothesis j of sentence i continue hypothesis parents[i, j] of that sentence."""
        if self.seen is None and parents.shape[1] > 1:
            self.seen = self._sight()
        self.hypotheses = parents.shape[1]
        if self.seen is not None:
            index = parents.unsqueeze(-1).expand(-1, -1, self.seen.shape[2])
            self.seen = self.seen.gather(1, index)
        return self

    def keep(self, sentences: Tensor) -> "State":
        """Go on with these sentences only."""
        select = RowSelect(sentences)
        for cache in self.caches:
            cache.keep(select)
        self.memories = [memory.keep(select) for memory in self.memories]
        if self.seen is not None:
            self.seen = self.seen[sentences]
        if isinstance(self.begun, Tensor):
            self.begun = self.begun[sentences]
        if isinstance(self.mask, Padding):
            self.mask = Padding(self.mask.keep[sentences])
        return self

    def join(self, other: "State") -> "State":
        """Go on with the sentences of another state too, which has as many hypotheses of each.

        The texts go on from places of their own, and see no keys but theirs.
        """
        ahead = self.length - other.length
        self.begun = torch.cat([self._starts(), other._starts() - ahead])
        self.seen = join_rows(self._sight(), other._sight(), 2)
        self.capacity = max(self.capacity, other.capacity + ahead)
        if self.memories:
            read = self.memories[0].k, other.memories[0].k
            self.mask = join_padding((self.mask, other.mask), read)
        self.memories = [a.join(b) for a, b in zip(self.memories, other.memories, strict=True)]
        for cache, more in zip(self.caches, other.caches, strict=True):
            cache.join(more)
        return self

    def _forget(self, new: int) -> None:
        """Drop the keys that no query will see again, if that makes much room."""
        live = self._sight().any(1)
        if self.window is not None and (at := self.caches[0].at) is not None:
            now = self.length + self.begun
            live = live & (at[..., 0] > now - self.window)
        most = int(live.sum(1).max())
        if 2 * most > live.shape[1]:
            return  # then the caches grow
        places = live.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices[:, :most]
        if self.seen is not None:
            index = places.unsqueeze(1).expand(-1, self.hypotheses, -1)
            self.seen = self.seen.gather(2, index)
        for cache in self.caches:
            cache.compact(places, max(ROOM, 2 * (most + new)))
