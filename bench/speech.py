"""How fast a Conformer learns and reads: Regard's against transformers' Wav2Vec2-Conformer.

    python bench/speech.py [--rounds 9] [--before FOLDER] [--quick]

The encoder of Conformer S (Gulati et al. 2020: 16 blocks of width 144, 4 heads, relative positions,
kernels of 31), float32, all cores, random weights, on frames that are subsampled already, since
transformers' reads the waveform by a stem of its own. A training step is forward, CTC loss,
backward and AdamW, with dropout of 0.1 wherever both have it. `conformer_train` is of 8 sounds of
8 seconds (200 frames), `conformer_train_padded` of sounds of 4 to 8 seconds in one batch, and
`conformer_train_no_dropout` says how much of the first is due to how dropout is drawn.
`conformer_read` is a forward pass without gradient of the padded batch, each sound of which Regard
reads alone. Both run in processes of their own, as their users have them. Everybody takes a turn in
each round and speeds are medians over the rounds; a ratio above 1 means that Regard is faster. With
`--before`, the Regard of another folder takes its turn as well (`ratio NAME_vs_before`).
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from apart import Peer, as_in, in_turn, machine  # noqa: E402
from decode_translation import peaks  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from regard.attention.masks import Padding  # noqa: E402
from regard.attention.positions import XL  # noqa: E402
from regard.costs.report import forward as counted  # noqa: E402
from regard.layers.block import BlockConfig  # noqa: E402
from regard.layers.conformer import ConformerBlock  # noqa: E402
from regard.layers.fast.alone import each_alone  # noqa: E402
from regard.layers.fast.run import run_blocks  # noqa: E402
from regard.native import fast  # noqa: E402
from regard.native.allocator import reuse_memory  # noqa: E402

WIDTH, HEADS, KERNEL, VOCAB, TOKENS = 144, 4, 31, 32, 40
FRAMES = 200  # of 40 ms


class Ours(nn.Module):
    """Regard's blocks, and a head of CTC."""

    def __init__(self, depth: int, drop: float):
        super().__init__()
        block = BlockConfig(WIDTH, HEADS, 4 * WIDTH, feed_forward="swish", dropout=drop)
        block = BlockConfig(**{**vars(block), "ffn_dropout": drop, "attention_dropout": drop})
        self.blocks = nn.ModuleList(
            ConformerBlock(block, XL(WIDTH, HEADS, WIDTH // HEADS), kernel=KERNEL)
            for _ in range(depth)
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Return the logits of every frame."""
        if not self.training:  # as the model does
            return each_alone(self.read, x, lengths)
        return self.read(x, Padding.of(lengths, x.shape[1]))

    def read(self, x: Tensor, mask: Padding | None = None) -> Tensor:
        """Return the logits of every frame of a batch."""
        at = torch.arange(x.shape[1]).unsqueeze(-1)
        return self.head(run_blocks(self.blocks, x, at=at, mask=mask))


class Theirs(nn.Module):
    """The encoder of transformers, and a head of CTC."""

    def __init__(self, depth: int, drop: float):
        super().__init__()
        from transformers import Wav2Vec2ConformerConfig, Wav2Vec2ConformerModel

        config = Wav2Vec2ConformerConfig(
            hidden_size=WIDTH,
            num_attention_heads=HEADS,
            num_hidden_layers=depth,
            intermediate_size=4 * WIDTH,
            hidden_act="swish",
            position_embeddings_type="relative",
            conv_depthwise_kernel_size=KERNEL,
            hidden_dropout=drop,
            activation_dropout=drop,
            attention_dropout=drop,
            conformer_conv_dropout=drop,
            layerdrop=0.0,
        )
        self.encoder = Wav2Vec2ConformerModel(config).encoder
        del self.encoder.pos_conv_embed  # which it has and does not use
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Return the logits of every frame."""
        full = int(lengths.min()) == x.shape[1]
        mask = None if full else torch.arange(x.shape[1]) < lengths.unsqueeze(-1)
        return self.head(self.encoder(x.clone(), attention_mask=mask).last_hidden_state)


SIDES: dict[str, type[nn.Module]] = {"regard": Ours, "transformers": Theirs}


def acting(
    side: str, what: str, depth: int, drop: float, x: Tensor, lengths: Tensor
) -> Callable[[], Any]:
    """Make what a side does in its process: a training step, or a forward pass."""
    if side == "regard":
        reuse_memory()  # as running and training do
    torch.manual_seed(1)
    model = SIDES[side](depth, drop)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    target = torch.randint(1, VOCAB, (len(x), TOKENS))
    counts = torch.full((len(x),), TOKENS)

    @torch.inference_mode()
    def read() -> None:
        model.eval()(x, lengths)

    def learn() -> None:
        logits = model.train()(x, lengths)
        log_probs = logits.log_softmax(-1).transpose(0, 1)
        F.ctc_loss(log_probs, target, lengths, counts).backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    act = learn if what == "train" else read

    def act_fast() -> None:
        with fast(model):  # as the training loop does
            act()

    return act_fast if side == "regard" else act


def compare(name: str, what: str, depth: int, drop: float, lengths: Tensor, given: Any) -> None:
    """Print how many times as fast Regard is."""
    x = torch.randn(len(lengths), int(lengths.max()), WIDTH)
    words = (what, depth, drop, x, lengths)
    peers = {side: Peer(acting, side, *words, threads=given.threads) for side in SIDES}
    if given.before:
        with as_in(given.before):
            peers["before"] = Peer(acting, "regard", *words, threads=given.threads)
    found = in_turn({side: peer.takes() for side, peer in peers.items()}, given.rounds)
    for peer in peers.values():
        peer.end()
    each = (f"{side} {len(lengths) / took:.2f} sounds/s" for side, took in found.items())
    print(f"{name:16}  " + "  ".join(each), flush=True)
    if peak := peaks():
        adds = counted(Ours(depth, drop).to("meta").train(), (x.to("meta"), lengths)).multiply_adds
        adds *= 3 if what == "train" else 1  # a training step has about three products for one
        share = adds / peak["fp32"] / given.threads / found["regard"]
        print(f"share conformer_{name} {share:.3f}")
    print(f"ratio conformer_{name} {found['transformers'] / found['regard']:.3f}", flush=True)
    if given.before:
        print(f"ratio conformer_{name}_vs_before {found['before'] / found['regard']:.3f}")


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--before", metavar="FOLDER", help="another version, to compare with")
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    given = parser.parse_args()
    print(machine(), flush=True)
    torch.manual_seed(0)
    depth = 4 if given.quick else 16
    given.rounds = min(given.rounds, 5) if given.quick else given.rounds
    full, padded = torch.full((8,), FRAMES), torch.linspace(FRAMES // 2, FRAMES, 8).long()
    compare("train", "train", depth, 0.1, full, given)
    compare("train_padded", "train", depth, 0.1, padded, given)
    compare("train_no_dropout", "train", depth, 0.0, full, given)
    compare("read", "read", depth, 0.0, padded, given)


if __name__ == "__main__":
    main()
