"""How fast a translator translates: Regard against CTranslate2 and transformers, on equal weights.

    REGARD_DATA=... python bench/decode_translation.py [MODEL] [--sentences 1000] [--rounds 3]

MODEL is a run folder or a starter's name; without one, runs/multi30k_en_de if it is there, else the
starter en-zh. Its weights are exported to CTranslate2, and for transformers put into Marian (norms
after the sublayers) or M2M100 (norms before). Everybody translates the same lines with beam 5 and
scores by the mean log-probability a token, on 2 threads, from text to text. Regard translates one
batch on each core, as `regard run` does. Each peer runs in the best of several layouts, found in a
trial: CTranslate2 with one batch on all cores or one batch a core, transformers (lines sorted by
length) with one process on all cores or one process a core, both with several batch sizes. Then
everybody takes a turn in each round; speeds are medians over rounds, and a ratio above 1 means
that Regard is faster.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from apart import Act, Peer, machine  # noqa: E402

import regard  # noqa: E402
from regard.attention.positions import sinusoids  # noqa: E402
from regard.data.pairs import load_pairs  # noqa: E402
from regard.metrics.bleu import judge  # noqa: E402
from regard.pretrained.ctranslate2 import export_ctranslate2  # noqa: E402

BEAM, LONGEST = 5, 128
SIZES = (16, 32, 64, 128, 256)
TRANSFORMERS_SIZES = (32, 64)


def test_lines(language: str | None, count: int) -> tuple[list[str], list[str]]:
    """Return sentences to translate, and what people made of them."""
    data = Path(os.environ.get("REGARD_DATA", HERE.parent.parent / "shared" / "data"))
    name = "tatoeba-en-zh" if language == "zh" else "multi30k"
    if not (data / name).is_dir():
        sys.exit(f"{data / name} is not there; set REGARD_DATA to the folder of data")
    if language == "zh":
        parts = [load_pairs(str(data / name / f"{p}.tsv")).parts["train"] for p in ("test", "dev")]
        pairs = [(pair.source, pair.target) for part in parts for pair in part]
    else:
        files = [data / name / f"test_2016_flickr.{side}" for side in ("en", language or "de")]
        sides = [file.read_text(encoding="utf-8").split("\n") for file in files]
        pairs = [pair for pair in zip(*sides, strict=True) if all(pair)]
    sources, references = zip(*pairs[:count], strict=True)
    return list(sources), list(references)


def by_regard(name: str) -> Act:
    """Translate as `regard run` does, but line by line as the others do."""
    loaded: Any = regard.load(name)

    def translate(lines: list[str], rows: int) -> list[str]:
        found = loaded.run(
            lines, beam=BEAM, length_penalty="average", max_length=LONGEST, split=False
        )
        return [answer.text for answer in found]

    return translate


def by_ctranslate2(name: str, folder: str, kind: str, layout: tuple[int, int]) -> Act:
    """Translate by CTranslate2: some batches at once, each on so many threads."""
    import ctranslate2

    loaded: Any = regard.load(name)
    batches, threads = layout
    engine = ctranslate2.Translator(
        folder, device="cpu", compute_type=kind, inter_threads=batches, intra_threads=threads
    )
    source, target = loaded.source_tokenizer, loaded.target_tokenizer

    def translate(lines: list[str], rows: int) -> list[str]:
        pieces = [
            [source.library.id_to_token(i) for i in ids] for ids in source.encode_batch(lines)
        ]
        found = engine.translate_batch(
            pieces,
            beam_size=BEAM,
            length_penalty=1,
            max_batch_size=rows,
            max_decoding_length=LONGEST,
            min_decoding_length=0,
            disable_unk=True,
        )
        return [
            target.decode(target.library.token_to_id(piece) for piece in result.hypotheses[0])
            for result in found
        ]

    return translate


def as_transformers(model: Any) -> Any:
    """Put the weights of our Transformer into a model of transformers that computes the same."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    config, block = model.config, model.config.block
    if (block.norm, config.position, block.score) != ("layer", "sinusoidal", "dot"):
        raise ValueError(
            f"its norm {block.norm}, position {config.position} or score {block.score}"
        )
    if block.kv_heads not in (None, block.heads) or block.head_width or not block.bias:
        raise ValueError("its heads of other sizes or without biases")
    family = "M2M100" if block.order == "pre" else "Marian"
    settings = getattr(transformers, f"{family}Config")(
        vocab_size=config.target_vocab,
        decoder_vocab_size=config.target_vocab,
        d_model=block.width,
        encoder_layers=config.encoder_depth,
        decoder_layers=config.decoder_depth,
        encoder_ffn_dim=block.ffn_width,
        decoder_ffn_dim=block.ffn_width,
        encoder_attention_heads=block.heads,
        decoder_attention_heads=block.heads,
        activation_function={"swish": "silu"}.get(block.feed_forward, block.feed_forward),
        max_position_embeddings=512,
        scale_embedding=config.scale_embedding,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
    )
    name = "M2M100ForConditionalGeneration" if family == "M2M100" else "MarianMTModel"
    theirs = getattr(transformers, name)(settings).eval()
    heart = theirs.model

    def give(linear: Any, weight: Any, bias: Any) -> None:
        linear.weight.copy_(weight)
        linear.bias.copy_(bias)

    def give_attention(attention: Any, ours: Any) -> None:
        parts = zip(ours.qkv.weight.chunk(3), ours.qkv.bias.chunk(3), strict=True)
        for letter, (weight, bias) in zip("qkv", parts, strict=True):
            give(getattr(attention, f"{letter}_proj"), weight, bias)
        give(attention.out_proj, ours.out.weight, ours.out.bias)

    def give_layer(layer: Any, ours: Any) -> None:
        give_attention(layer.self_attn, ours.attention)
        norms = [(layer.self_attn_layer_norm, ours.around_attention.norm)]
        norms.append((layer.final_layer_norm, ours.around_feed_forward.norm))
        if hasattr(ours, "cross"):
            give_attention(layer.encoder_attn, ours.cross)
            norms.append((layer.encoder_attn_layer_norm, ours.around_cross.norm))
        for norm, own in norms:
            give(norm, own.weight, own.bias)
            norm.eps = block.norm_eps
        give(layer.fc1, ours.feed_forward.inner.weight, ours.feed_forward.inner.bias)
        give(layer.fc2, ours.feed_forward.outer.weight, ours.feed_forward.outer.bias)

    with torch.no_grad():
        for side, blocks, embed in (
            (heart.encoder, model.encoder, model.source),
            (heart.decoder, model.decoder, model.target),
        ):
            side.embed_tokens.weight = torch.nn.Parameter(embed.tokens.weight)
            for layer, ours in zip(side.layers, blocks, strict=True):
                give_layer(layer, ours)
            table = side.embed_positions
            weights = table.weights if family == "M2M100" else table.weight
            first = 1 if family == "M2M100" else 0  # M2M100 counts positions from after padding
            at = torch.arange(len(weights) - first).unsqueeze(-1)
            layout = config.position_layout
            weights[first:].copy_(sinusoids(at, block.width, config.position_base, layout))
        if family == "M2M100":
            give(heart.encoder.layer_norm, model.encoder_norm.weight, model.encoder_norm.bias)
            give(heart.decoder.layer_norm, model.decoder_norm.weight, model.decoder_norm.bias)
            if model.head.bias is not None:
                theirs.lm_head.bias = torch.nn.Parameter(model.head.bias)
        elif model.head.bias is not None:
            theirs.final_logits_bias.copy_(model.head.bias)
        theirs.lm_head.weight = torch.nn.Parameter(model.head.weight)
    return theirs


def by_transformers(name: str) -> Act:
    """Return what translates lines by transformers' generate, sorted by length, in batches."""
    loaded: Any = regard.load(name)
    model = as_transformers(loaded.model)
    source, target = loaded.source_tokenizer, loaded.target_tokenizer

    @torch.inference_mode()
    def translate(lines: list[str], rows: int) -> list[str]:
        encoded = [[*ids, source.eos] for ids in source.encode_batch(lines)]
        order = sorted(range(len(lines)), key=lambda i: -len(encoded[i]))
        answers = [""] * len(lines)
        for start in range(0, len(order), rows):
            some = order[start : start + rows]
            longest = len(encoded[some[0]])
            ids = torch.tensor([encoded[i] + [0] * (longest - len(encoded[i])) for i in some])
            found = model.generate(
                input_ids=ids,
                attention_mask=ids.ne(0),
                num_beams=BEAM,
                do_sample=False,
                length_penalty=1.0,
                early_stopping=False,
                max_new_tokens=LONGEST,
                suppress_tokens=[0, 1, 3],
            )
            for i, row in zip(some, found.tolist(), strict=True):
                answers[i] = target.decode(row)
        return answers

    return translate


class Team:
    """One side: processes of its own that share the lines, alike in length, in batches of rows."""

    def __init__(self, make: Callable[..., Act], *args: Any, processes: int = 1, threads: int):
        self.peers = [Peer(make, *args, threads=threads) for _ in range(processes)]
        self.rows = 0

    def __call__(self, lines: list[str]) -> list[str]:
        """Translate the lines."""
        order = sorted(range(len(lines)), key=lambda i: -len(lines[i]))
        shares = [sorted(order[rank :: len(self.peers)]) for rank in range(len(self.peers))]
        for peer, share in zip(self.peers, shares, strict=True):
            peer.pipe.send(([lines[i] for i in share], self.rows))
        answers = [""] * len(lines)
        for peer, share in zip(self.peers, shares, strict=True):
            for i, answer in zip(share, peer.pipe.recv()[1], strict=True):
                answers[i] = answer
        return answers


def ctranslate2_side(name: str, folder: str, kind: str, layout: tuple[int, int]) -> Team:
    """Return CTranslate2 in one process, which has threads of its own for its batches."""
    return Team(by_ctranslate2, name, folder, kind, layout, threads=layout[1])


def transformers_side(name: str, layout: tuple[int, int]) -> Team:
    """Return transformers in a process for each of the batches at a time."""
    return Team(by_transformers, name, processes=layout[0], threads=layout[1])


def best_layout(
    name: str,
    make: Callable[[tuple[int, int]], Team],
    sizes: tuple[int, ...],
    lines: list[str],
    threads: int,
) -> Team:
    """Try a batch on all cores and a batch a core, in several sizes; return the fastest."""
    speeds: dict[tuple[Team, int], float] = {}
    told = []
    for layout in dict.fromkeys([(1, threads), (threads, 1)]):
        side = make(layout)
        for side.rows in sizes:
            side(lines[:50])
            speeds[side, side.rows] = speed = len(lines) / timed(side, lines)[0]
            told.append(f"{layout[0]}x{layout[1]}x{side.rows}: {speed:.1f}")
    print(f"{name}, sentences/s by batches x threads x batch size: {', '.join(told)}", flush=True)
    side, side.rows = max(speeds, key=lambda each: speeds[each])
    return side


def timed(translate: Team, lines: list[str]) -> tuple[float, list[str]]:
    """Translate all lines and return how long it took, and the answers."""
    start = time.perf_counter()
    answers = translate(lines)
    return time.perf_counter() - start, answers


def main() -> None:
    """Let everybody translate in turn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", help="a run folder or a starter's name")
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="200 sentences, one round")
    options = parser.parse_args()
    print(machine(), flush=True)
    if options.quick:
        options.sentences, options.rounds = min(200, options.sentences), 1
    torch.set_num_threads(options.threads)
    trained = HERE.parent / "runs" / "multi30k_en_de"
    name = options.model or (str(trained) if (trained / "config.json").exists() else "en-zh")
    loaded: Any = regard.load(name)
    language = loaded.config.get("to")
    lines, references = test_lines(language, options.sentences)
    size = sum(p.numel() for p in loaded.model.parameters())
    print(
        f"{name}: {size:,} parameters; {len(lines)} lines, beam {BEAM}, {options.threads} threads"
    )

    threads = options.threads
    sides = {"regard": Team(by_regard, name, threads=threads)}
    with tempfile.TemporaryDirectory() as folder:
        exported = export_ctranslate2(
            loaded.model, loaded.source_tokenizer, loaded.target_tokenizer, Path(folder) / "ct2"
        )
        for kind, short in (("float32", "ct2_fp32"), ("int8", "ct2_int8")):
            make = partial(ctranslate2_side, name, str(exported), kind)
            sides[short] = best_layout(f"CTranslate2 {kind}", make, SIZES, lines, threads)
        try:
            as_transformers(loaded.model)
        except ValueError as reason:
            print(f"transformers is left out: it cannot hold this model ({reason})")
        else:
            make = partial(transformers_side, name)
            sides["transformers"] = best_layout(
                "transformers", make, TRANSFORMERS_SIZES, lines[:200], threads
            )
        for side in sides.values():
            side(lines[:50])
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        answers: dict[str, list[str]] = {}
        for turn in range(options.rounds):
            for side in sorted(sides, reverse=bool(turn % 2)):
                if side == "transformers" and turn:
                    continue  # too slow to ask twice, and not close
                taken, answers[side] = timed(sides[side], lines)
                seconds[side].append(taken)
    count = loaded.target_tokenizer.encode_batch
    for side in sides:
        taken = statistics.median(seconds[side])
        pieces = sum(len(ids) + 1 for ids in count(answers[side]))
        same = sum(a == b for a, b in zip(answers[side], answers["regard"], strict=True))
        bleu = judge(answers[side], [references], language)[0]
        spread = f"{len(lines) / max(seconds[side]):.1f} to {len(lines) / min(seconds[side]):.1f}"
        print(
            f"{side:12} {len(lines) / taken:7.1f} sentences/s ({spread})  "
            f"{pieces / taken:7.0f} tokens/s  BLEU {bleu.value:.2f}  "
            f"{same / len(lines):.1%} of the lines as Regard's"
        )
    print(f"signature {judge(answers['regard'], [references], language)[0].signature}")
    same = [a == b for a, b in zip(answers["ct2_fp32"], answers["regard"], strict=True)]
    print(f"share same_as_ct2_fp32 {sum(same) / len(same):.4f}")
    ours = statistics.median(seconds["regard"])
    for side in sides:
        if side != "regard":
            print(f"ratio decode_vs_{side} {statistics.median(seconds[side]) / ours:.3f}")


if __name__ == "__main__":
    main()
