"""How fast a translator trains: Regard against transformers' Marian and against eole.

    REGARD_DATA=... python bench/train_translation.py [--eole PYTHON] [--before FOLDER] [--quick]

All train one size (3+3 layers, width 256, feed-forward 1024, 4 heads, 8,000 joint pieces, dropout
0.1, label smoothing 0.1, AdamW, gradients clipped at 1) on Multi30k en-de with batches of at most
4,096 padded target tokens on 2 cores. Counted are source and target pieces without padding.
Regard trains as `processes=2` does: each process takes half of the rows of a batch on one core, and
gradients are added up once a step (`--processes 1`: one process on both cores).

Marian runs in a plain loop on the same batches, turn by turn with Regard, in two layouts: one
process on both cores, and a process a core with DistributedDataParallel; the ratio is the median
over the steps against the faster one. eole has its own batching and runs in a process and an
environment of its own (it needs aiohttp, which it does not declare); whole rounds alternate with
rounds of Regard's own training loop, and the ratio is that of the median rounds. With `--before`,
the Regard of another folder trains on the same batches in turn (`ratio train_vs_before`). `share`
is the multiply-adds that the pieces need, without padding, over those that the cores could do in
the time, as measured in the same run.
"""

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from apart import as_in, machine  # noqa: E402
from decode_translation import peaks  # noqa: E402

from regard.data.batches import IndexBatches  # noqa: E402
from regard.data.pairs import load_pairs  # noqa: E402
from regard.data.parallel import PairBatch, make_batch  # noqa: E402
from regard.data.tokenize import SubwordTokenizer, train_tokenizer  # noqa: E402
from regard.layers.block import BlockConfig  # noqa: E402
from regard.models.transformer import Transformer, TransformerConfig  # noqa: E402
from regard.native import fast  # noqa: E402
from regard.native.allocator import reuse_memory  # noqa: E402
from regard.training import distributed  # noqa: E402
from regard.training.loss import sequence_loss  # noqa: E402
from regard.training.optim import build_optimiser  # noqa: E402
from regard.training.step import LoopSettings, Trainable, one_step  # noqa: E402

DEPTH, WIDTH, FFN_WIDTH, HEADS, PIECES, BATCH_TOKENS = 3, 256, 1024, 4, 8000, 4096
DROPOUT, SMOOTHING, CLIP, RATE = 0.1, 0.1, 1.0, 5e-4


class Data:
    """Multi30k in pieces, cut into batches."""

    def __init__(self) -> None:
        folder = Path(os.environ.get("REGARD_DATA", HERE.parent.parent / "shared" / "data"))
        if not (folder / "multi30k").is_dir():
            sys.exit(f"{folder / 'multi30k'} is not there; set REGARD_DATA to the folder of data")
        pairs = load_pairs(str(folder / "multi30k"), source="en", target="de").parts["train"]
        texts = [[getattr(pair, side) for pair in pairs] for side in ("source", "target")]
        self.tokenizer: SubwordTokenizer = train_tokenizer(texts[0] + texts[1], vocab=PIECES)
        self.rows = [self.tokenizer.encode_batch(side) for side in texts]
        lengths = [torch.tensor([len(row) + 1 for row in side]).numpy() for side in self.rows]
        self.batches = IndexBatches(lengths, BATCH_TOKENS, seed=1)

    def batch(self, n: int, part: int = 0, parts: int = 1) -> PairBatch:
        """Return batch n, or every so manieth row of it."""
        some = self.batches[n][part::parts]
        sources, targets = ([torch.tensor(side[i]).numpy() for i in some] for side in self.rows)
        return make_batch(sources, targets, self.tokenizer, self.tokenizer)


def multiply_adds(batch: PairBatch, vocab: int) -> float:
    """Multiply-adds of the products of a step: about three for one of a forward pass."""
    side, ffn, total = WIDTH**2, 2 * WIDTH * FFN_WIDTH, 0
    writes = batch.writes.ge(0).sum(1).tolist()
    for s, t in zip(batch.source_lengths.tolist(), writes, strict=True):
        encoder = s * (4 * side + ffn) + 2 * s * s * WIDTH
        seen = t * (t + 1) * WIDTH + 2 * s * t * WIDTH  # of its own text, half of all pairs
        decoder = t * (6 * side + ffn) + 2 * s * side + seen
        total += DEPTH * (encoder + decoder) + t * WIDTH * vocab
    return 3 * total


class Trainer:
    """One process of Regard's own training step."""

    def __init__(self, vocab: int, order: str) -> None:
        block = BlockConfig(
            width=WIDTH, heads=HEADS, ffn_width=FFN_WIDTH, order=order, dropout=DROPOUT
        )
        config = TransformerConfig(
            source_vocab=vocab,
            target_vocab=vocab,
            encoder_depth=DEPTH,
            decoder_depth=DEPTH,
            block=block,
        )
        self.model = Transformer(config).train()
        self.settings = LoopSettings(clip=CLIP)
        self.optimiser = build_optimiser(self.model, lr=RATE)

    def step(self, batch: PairBatch) -> float:
        """Train on a batch and return its loss."""
        given = Given(batch)
        with fast(self.model):  # as the loop does
            loss, _, _, taken = one_step(self.model, given, self.settings, self.optimiser, 0, RATE)
        assert taken
        return loss


def work(rank: int, size: int, threads: int, port: int, kind: str, pipe: Connection) -> None:
    """Be one of the processes: make the batch when told its number, train on it when told to."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "LOCAL_WORLD_SIZE": str(size),
    }
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    reuse_memory()  # as the training loop does
    data = Data()
    trainer = KINDS[kind](data.tokenizer.vocab)
    group = distributed.joined()
    group.__enter__()  # for as long as the process lives
    if size > 1 and isinstance(trainer, Marian):
        trainer.model = torch.nn.parallel.DistributedDataParallel(trainer.model)
    pipe.send(sum(p.numel() for p in trainer.model.parameters() if p.requires_grad))
    while (n := pipe.recv()) is not None:
        batch = data.batch(n, rank, size)
        pipe.send("ready")
        pipe.recv()
        pipe.send(trainer.step(batch))


class Team:
    """One kind of trainer on all cores: some processes that share the threads and the rows."""

    def __init__(self, kind: str, processes: int, threads: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        spawn = multiprocessing.get_context("spawn")
        self.pipes = []
        for rank in range(processes):
            ours, theirs = spawn.Pipe()
            words = (rank, processes, threads // processes, port, kind, theirs)
            spawn.Process(target=work, args=words, daemon=True).start()
            self.pipes.append(ours)
        self.size = [pipe.recv() for pipe in self.pipes][0]

    def prepare(self, n: int) -> None:
        """Make batch n."""
        for pipe in self.pipes:
            pipe.send(n)
        for pipe in self.pipes:
            pipe.recv()

    def step(self) -> float:
        """Train on the batch that was made."""
        for pipe in self.pipes:
            pipe.send("go")
        return [pipe.recv() for pipe in self.pipes][0]

    def close(self) -> None:
        """Let the processes end."""
        for pipe in self.pipes:
            pipe.send(None)


class Given(Trainable):
    """The task of translating one batch, as the training loop wants to see it."""

    def __init__(self, batch: PairBatch) -> None:
        self.only = batch

    def batch(self, n: int) -> PairBatch:
        """Return the batch."""
        return self.only

    def epoch(self) -> float:
        """Return how many batches there are."""
        return 1.0

    def count(self, batch: PairBatch) -> tuple[int, int]:
        """Return its target tokens, and all of its tokens."""
        return batch.tokens, batch.read

    def loss(self, model: torch.nn.Module, batch: PairBatch) -> torch.Tensor:
        """Return its summed loss."""
        return sequence_loss(cast(Any, model), batch, SMOOTHING, 0.0)

    def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
        """Return nothing: nobody asks."""
        return {}


class Marian:
    """transformers' Marian in a plain loop."""

    def __init__(self, vocab: int) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from transformers import MarianConfig, MarianMTModel

        config = MarianConfig(
            vocab_size=vocab,
            d_model=WIDTH,
            encoder_layers=DEPTH,
            decoder_layers=DEPTH,
            encoder_ffn_dim=FFN_WIDTH,
            decoder_ffn_dim=FFN_WIDTH,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            activation_function="relu",
            dropout=DROPOUT,
            attention_dropout=0.0,
            activation_dropout=0.0,
            max_position_embeddings=1024,
            scale_embedding=True,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            forced_eos_token_id=2,
        )
        self.model: torch.nn.Module = MarianMTModel(config).train()
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=True)

    def step(self, batch: PairBatch) -> float:
        """Train on a batch and return its loss."""
        logits = self.model(
            input_ids=batch.source,
            attention_mask=batch.source.ne(0),
            decoder_input_ids=batch.reads,
            use_cache=False,
        ).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.writes.flatten(), ignore_index=-1, label_smoothing=SMOOTHING
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return loss.item()


# Marian's norms come after the sublayers; eole's come before, as ours do by default.
KINDS: dict[str, Callable[[int], Trainer | Marian]] = {
    "regard, post-norm": partial(Trainer, order="post"),
    "regard, pre-norm": partial(Trainer, order="pre"),
    "marian": Marian,
}


def against_marian(
    data: Data, steps: int, processes: int, threads: int, before: str | None
) -> None:
    """Train all on the same batches in turn and print their speeds."""
    sides = {
        "regard": Team("regard, post-norm", processes, threads),
        "marian": Team("marian", 1, threads),
        f"marian x{threads}": Team("marian", threads, threads),
    }
    if before:
        with as_in(before):
            sides["before"] = Team("regard, post-norm", processes, threads)
    warm = 2
    rates: dict[str, list[float]] = {name: [] for name in sides}
    places = pieces = 0
    needed: list[float] = []  # multiply-adds a token
    for n in range(warm + steps):
        batch = data.batch(n)
        needed.append(multiply_adds(batch, data.tokenizer.vocab) / batch.read)
        pieces += batch.read
        places += batch.source.numel() + batch.reads.numel()
        for name in sorted(sides, reverse=bool(n % 2)):
            sides[name].prepare(n)
            start = time.perf_counter()
            sides[name].step()
            rates[name].append(batch.read / (time.perf_counter() - start))
    for side in sides.values():
        side.close()
    medians = {name: statistics.median(rate[warm:]) for name, rate in rates.items()}
    for name, rate in medians.items():
        print(
            f"{name:9} {rate:7.0f} source and target tokens/s on the same {steps} batches, "
            f"{sides[name].size:,} trained parameters"
        )
    print(f"padding of these batches {1 - pieces / places:.1%}")
    print_share(
        "train_vs_marian",
        [a * b for a, b in zip(rates["regard"], needed, strict=True)][warm:],
        threads,
    )
    others = {"marian": max((x for x in sides if "marian" in x), key=lambda x: medians[x])}
    for name, side in {**others, **({"before": "before"} if before else {})}.items():
        pairs = list(zip(rates["regard"], rates[side], strict=True))[warm:]
        print(f"ratio train_vs_{name} {statistics.median(a / b for a, b in pairs):.3f}", flush=True)


def print_share(name: str, speeds: list[float], threads: int) -> None:
    """Print which share of the processor's multiply-adds the median of these is."""
    if peak := peaks():
        print(f"share {name} {statistics.median(speeds) / peak['fp32'] / threads:.3f}")


def eole_config(folder: Path, data: Data) -> Path:
    """Write pieces and settings for eole; the pieces are named by their numbers."""
    for name, side in zip(("en", "de"), data.rows, strict=True):
        lines = (" ".join(map(str, row)) + "\n" for row in side)
        (folder / f"train.{name}").write_text("".join(lines))
    # eole adds its own four special tokens in the place of ours.
    words = range(4, data.tokenizer.vocab)
    (folder / "vocabulary").write_text("".join(f"{word}\n" for word in words))
    never = 10**9
    config = {
        "seed": 1,
        "share_vocab": True,
        "src_vocab": str(folder / "vocabulary"),
        "save_data": str(folder / "saved"),
        "overwrite": True,
        "report_every": never,
        "data": {
            "corpus": {
                "path_src": str(folder / "train.en"),
                "path_tgt": str(folder / "train.de"),
                "transforms": [],
            }
        },
        "model": {
            "architecture": "transformer",
            "layers": DEPTH,
            "heads": HEADS,
            "hidden_size": WIDTH,
            "transformer_ff": FFN_WIDTH,
            "share_embeddings": True,
            "share_decoder_embeddings": True,
            "add_qkvbias": True,
            "add_ffnbias": True,
            "embeddings": {
                "word_vec_size": WIDTH,
                "position_encoding": True,
                "position_encoding_type": "SinusoidalInterleaved",
            },
        },
        "training": {
            "model_path": str(folder / "model"),
            "batch_type": "tokens",
            "batch_size": BATCH_TOKENS,
            "normalization": "tokens",
            # One epoch. The default is nine, out of which eole drops all that repeat in a batch.
            "bucket_size": len(data.rows[0]),
            # Workers would share the two cores; what they do is cheap here.
            "num_workers": 0,
            "optim": "adamw",
            "learning_rate": RATE,
            "decay_method": "none",
            "max_grad_norm": CLIP,
            "dropout": [DROPOUT],
            "attention_dropout": [0.0],
            "label_smoothing": SMOOTHING,
            "param_init_method": "xavier_uniform",
            "log_attention_entropy": False,
            "train_steps": never,
            "save_checkpoint_steps": never,
            "valid_steps": never,
        },
    }
    (folder / "eole.json").write_text(json.dumps(config))
    return folder / "eole.json"


class Eole:
    """eole in a process of its own, which trains when asked."""

    def __init__(self, python: str, folder: Path, data: Data, threads: int) -> None:
        self.log = folder / "eole.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [python, str(HERE / "eole_steps.py"), str(eole_config(folder, data)), str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": ""},
            )

    def round(self, steps: int) -> list[dict]:
        """Train some steps and return what each took."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        lines = [self.process.stdout.readline() for _ in range(steps)]
        if not lines[-1]:
            tail = self.log.read_text()[-2000:]
            raise RuntimeError(f"eole ended early; the end of its log:\n{tail}")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Let eole end."""
        assert self.process.stdin
        self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def against_eole(
    data: Data, python: str, rounds: int, steps: int, processes: int, threads: int
) -> None:
    """Train in alternating rounds, each with its own batching, and print the speeds."""
    ours = Team("regard, pre-norm", processes, threads)
    count = 0

    def own_round() -> list[dict]:
        nonlocal count
        reports = []
        for _ in range(steps):
            batch = data.batch(count)  # to count its tokens
            start = time.perf_counter()
            ours.prepare(count)
            ours.step()
            seconds = time.perf_counter() - start
            rows = len(batch.source)
            count += 1
            reports.append(
                {
                    "seconds": seconds,
                    # eole's sources have no end token, so ours is not counted either
                    "source": int(batch.source_lengths.sum()) - rows,
                    "target": batch.tokens,
                    "needed": multiply_adds(batch, data.tokenizer.vocab),
                    "source_places": batch.source.numel() - rows,
                    "target_places": batch.writes.numel(),
                }
            )
        return reports

    with tempfile.TemporaryDirectory() as folder:
        eole = Eole(python, Path(folder), data, threads)
        try:
            turns = {"regard": own_round, "eole": lambda: eole.round(steps)}
            reports: dict[str, list[list[dict]]] = {name: [] for name in turns}
            for turn in range(rounds + 1):  # the first round warms up
                for name in sorted(turns, reverse=bool(turn % 2)):
                    reports[name].append(turns[name]())
        finally:
            eole.close()
            ours.close()
    speeds = {}

    def total(some: list[dict], *keys: str) -> float:
        return sum(report[key] for report in some for key in keys)

    for name, all_rounds in reports.items():
        measured = all_rounds[1:]
        rates = [total(r, "source", "target") / total(r, "seconds") for r in measured]
        speeds[name] = statistics.median(rates)
        every = [report for some in measured for report in some]
        padding = 1 - total(every, "source", "target") / total(
            every, "source_places", "target_places"
        )
        print(
            f"{name:7} {speeds[name]:7.0f} source and target tokens/s with its own batching "
            f"({min(rates):.0f} to {max(rates):.0f} in {rounds} rounds of {steps} steps), "
            f"padding {padding:.1%}"
        )
    each = [total(r, "needed") / total(r, "seconds") for r in reports["regard"][1:]]
    print_share("train_vs_eole", each, threads)
    print(f"ratio train_vs_eole {speeds['regard'] / speeds['eole']:.3f}", flush=True)


def main() -> None:
    """Measure against Marian, then against eole."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--eole", metavar="PYTHON", help="the python of an environment with eole")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processes", type=int, default=2, help="of Regard, sharing the threads")
    parser.add_argument("--before", metavar="FOLDER", help="another version, to compare with")
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    options = parser.parse_args()
    print(machine(), flush=True)
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    data = Data()
    print(
        f"{len(data.rows[0]):,} pairs, {data.tokenizer.vocab:,} joint pieces, batches of at most "
        f"{BATCH_TOKENS:,} padded target tokens, {options.threads} threads",
        flush=True,
    )
    shape = options.processes, options.threads
    against_marian(data, 5 if options.quick else 20, *shape, options.before)
    if options.eole is None:
        print(
            "eole is left out: give --eole PYTHON, the python of an environment made by\n"
            "  python -m venv peers && peers/bin/pip install torch==2.13.0 eole==0.6.4 aiohttp"
        )
        return
    rounds, steps = (2, 4) if options.quick else (5, 8)
    against_eole(data, options.eole, rounds, steps, *shape)


if __name__ == "__main__":
    main()
