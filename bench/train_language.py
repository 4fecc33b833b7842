"""How fast a small language model trains: Regard against plain PyTorch and transformers' GPT-2.

    REGARD_DATA=... python bench/train_language.py [--rounds 7] [--before FOLDER] [--quick]

nanoGPT's configuration for a CPU on Tiny Shakespeare: 4 layers, 4 heads, width 128, 64 characters
of context, 12 rows a batch, no dropout, AdamW, gradients cut at 1. The plain loop is eager PyTorch
with its fused attention and the AdamW that PyTorch has by default; `--fused` gives both peers the
fused one. Regard compiles its kernels anew, and the time for that counts as a part of 2,000 steps;
with REGARD_NATIVE=0 it has none. All wait in processes of their own while one of them takes some
steps; everybody takes a turn in each round, and ratios are medians of those within a round, since
the machine is faster in one minute than in the next. A ratio above 1 means that Regard is faster.
With `--before`, the Regard of another folder takes its turn as well (`language_vs_before`).
"""

import argparse
import atexit
import contextlib
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from apart import as_in, machine  # noqa: E402
from decode_translation import peaks  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

DEPTH, HEADS, WIDTH, CONTEXT, ROWS, RATE, CLIP = 4, 4, 128, 64, 12, 1e-3, 1.0
WHOLE = 2000  # steps of a training
DATA = Path(os.environ.get("REGARD_DATA", HERE.parent.parent / "shared" / "data"))

Step = Callable[[], float]  # one update of the weights, which returns the loss


class PlainBlock(nn.Module):
    """A block of GPT-2 as one writes it in PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Look back, then think."""
        b, l, w = x.shape
        q, k, v = self.qkv(self.before(x)).chunk(3, dim=-1)
        q, k, v = (y.view(b, l, HEADS, w // HEADS).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, l, w))
        return x + self.outer(F.gelu(self.inner(self.between(x))))


class Plain(nn.Module):
    """GPT-2 in plain PyTorch."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(PlainBlock() for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the token after each token."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def loop(model: nn.Module, logits: Callable[[Tensor], Tensor], data: Tensor) -> Step:
    """Return the step of a plain training loop."""
    fused = True if "FUSED" in os.environ else None
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.99), fused=fused)

    def step() -> float:
        starts = torch.randint(len(data) - CONTEXT, (ROWS,))
        reads = torch.stack([data[i : i + CONTEXT] for i in starts])
        writes = torch.stack([data[i + 1 : i + 1 + CONTEXT] for i in starts])
        loss = F.cross_entropy(logits(reads).flatten(0, 1), writes.flatten())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimiser.step()
        return loss.item()

    return step


def characters() -> tuple[Tensor, int]:
    """Return the first nine tenths of the text as numbers, and how many letters there are."""
    text = (DATA / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
    letters = {letter: i for i, letter in enumerate(sorted(set(text)))}
    ids = torch.tensor([letters[letter] for letter in text])
    return ids[: len(ids) * 9 // 10], len(letters)


def multiply_adds(vocab: int) -> float:
    """Multiply-adds of the products that a token takes forward."""
    block = 12 * WIDTH**2 + WIDTH * CONTEXT  # under a causal mask half of all pairs
    return DEPTH * block + WIDTH * vocab


def eager() -> Step:
    """Train in plain PyTorch."""
    data, vocab = characters()
    model = Plain(vocab)
    for part in model.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=0.02)
    return loop(model, model, data)


def gpt2() -> Step:
    """Train transformers' GPT-2."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import GPT2Config, GPT2LMHeadModel

    data, vocab = characters()
    config = GPT2Config(
        vocab_size=vocab,
        n_positions=CONTEXT,
        n_embd=WIDTH,
        n_layer=DEPTH,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    return loop(model, lambda ids: model(ids).logits, data)


def regard() -> Step:
    """Train as the loop of `regard train language` does."""
    from regard import native
    from regard.native import fast
    from regard.native.allocator import reuse_memory
    from regard.tasks import task
    from regard.tasks.prepare import prepare
    from regard.training import distributed
    from regard.training.optim import build_optimiser
    from regard.training.step import one_step

    HELD.enter_context(distributed.joined())
    start = time.perf_counter()
    native.library()
    COMPILING.append(time.perf_counter() - start)
    values = {
        "data": str(DATA / "tinyshakespeare"),
        "tokenizer": "characters",
        "size": "tiny",
        "width": WIDTH,
        "heads": HEADS,
        "depth": DEPTH,
        "ffn_width": 4 * WIDTH,
        "dropout": 0.0,
        "feed_forward": "gelu",
        "context": CONTEXT,
        "batch_tokens": ROWS * CONTEXT // distributed.world_size(),
        "clip": CLIP,
        "lr": RATE,
        "steps": 1,
    }
    with tempfile.TemporaryDirectory() as out:
        run = prepare(task("language"), {**values, "out": out})
    settings, training, model = run.settings, run.training, run.runner.model.train()
    optimiser = build_optimiser(model, lr=RATE)
    reuse_memory()  # as the loop does before its first step
    count = 0

    HELD.enter_context(fast(model))  # as the loop does

    def step() -> float:
        nonlocal count
        count += 1
        return one_step(model, training, settings, optimiser, count, RATE)[0]

    return step


HELD = contextlib.ExitStack()  # for as long as the process lives
atexit.register(HELD.close)
COMPILING: list[float] = []  # seconds, of a process
SIDES = {"eager": eager, "gpt2": gpt2, "regard": regard}


def work(side: str, rank: int, size: int, port: int, threads: int, pipe: Connection) -> None:
    """Be one process of a side: take as many steps as told, and tell the last loss."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(size)}
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    step = SIDES[side]()
    pipe.send(sum(COMPILING))
    while steps := pipe.recv():
        for _ in range(steps - 1):
            step()
        pipe.send(step())


class Side:
    """The processes of one of those that are compared."""

    def __init__(self, name: str, processes: int, threads: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        spawn = multiprocessing.get_context("spawn")
        self.name, self.pipes, self.speeds, self.loss = name, [], [], 0.0
        for rank in range(processes):
            ours, theirs = spawn.Pipe()
            words = (name, rank, processes, port, threads, theirs)
            spawn.Process(target=work, args=words, daemon=True).start()
            self.pipes.append(ours)
        self.compiling = max(pipe.recv() for pipe in self.pipes)

    def take(self, steps: int) -> float:
        """Take some steps and return tokens a second."""
        start = time.perf_counter()
        for pipe in self.pipes:
            pipe.send(steps)
        self.loss = [pipe.recv() for pipe in self.pipes][0]
        return steps * ROWS * CONTEXT / (time.perf_counter() - start)


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="a turn")
    parser.add_argument("--rounds", type=int, default=27)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--processes", type=int, default=1, help="of Regard, which share the cores")
    parser.add_argument("--fused", action="store_true", help="give the peers the fused AdamW")
    parser.add_argument("--before", metavar="FOLDER", help="another version, to compare with")
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    given = parser.parse_args()
    print(machine(), flush=True)
    if given.fused:
        os.environ["FUSED"] = "1"
    if not (DATA / "tinyshakespeare").is_dir():
        sys.exit(f"{DATA / 'tinyshakespeare'} is not there; set REGARD_DATA to the folder of data")
    steps, rounds = (20, 5) if given.quick else (given.steps, given.rounds)
    with tempfile.TemporaryDirectory() as place:
        os.environ["REGARD_CACHE"] = place
        sides = [Side("regard", given.processes, given.cores // given.processes)]
        if given.before:
            with as_in(given.before):
                sides += [Side("regard", given.processes, given.cores // given.processes)]
                sides[-1].name = "before"
    sides += [Side(name, 1, given.cores) for name in ("eager", "gpt2")]
    for side in sides:
        side.take(10)  # to warm up
    for turn in range(rounds):
        for side in sides if turn % 2 else reversed(sides):
            side.speeds.append(side.take(steps))
    median = {}
    for side in sides:
        speed, tokens = statistics.median(side.speeds), WHOLE * ROWS * CONTEXT
        median[side.name] = tokens / (tokens / speed + side.compiling)
        print(
            f"{side.name:7} {median[side.name]:8.0f} tokens/s ({side.compiling:.1f} s of compiling "
            f"counted; {speed:.0f} without, {min(side.speeds):.0f} to "
            f"{max(side.speeds):.0f}), loss {side.loss:.3f} after {10 + rounds * steps} steps"
        )
    ours, *others = sides
    share = median["regard"] / statistics.median(ours.speeds)  # what compiling leaves
    for other in others:
        pairs = zip(ours.speeds, other.speeds, strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        ratio *= 1 if other.name == "before" else share  # both have compiled
        print(f"ratio language_vs_{other.name} {ratio:.3f}")
    if peak := peaks():
        adds = 3 * multiply_adds(characters()[1])  # a training step has about three for one
        best = peak["fp32"] * given.cores / adds
        print(f"share language {statistics.median(ours.speeds) / best:.3f}")
    for side in sides:
        for pipe in side.pipes:
            pipe.send(0)


if __name__ == "__main__":
    main()
