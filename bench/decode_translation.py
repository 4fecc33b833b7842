"""How fast a translator translates: Regard against CTranslate2, on equal weights, text to text.

    REGARD_DATA=... python bench/decode_translation.py [MODEL...] [--quick] [--by cpu]

MODEL is a run folder or a starter's name; without one, the starter en-zh, and then, by beam search
only, a model of 3 + 3 layers of width 256 with random weights, whose texts are cut after 16 tokens.
Weights are exported to CTranslate2. Both translate the same lines with beam 5 and greedily, in
float32 and int8, and score by the mean log-probability a token.

Each runs in a process of its own. CTranslate2 runs in its best setting, which is found in the run:
one batch on all cores or one batch a core, batches of 16 to 96 lines or 256 and 512 tokens, then
the instruction sets it can be told to use (CT2_FORCE_CPU_ISA), with and without MKL. Then both take
a turn in each round. Speeds are medians over rounds, and a ratio above 1 means that Regard is
faster: `ratio NAME` on the wall, `ratio NAME_cpu` by processor time, which is what to read on a
machine that does other work besides (`--by cpu` chooses the best setting by it, too).

`share` is the multiply-adds that the search needs (of the rows that search.py has for the same
lines, which are counted in the run), over those that the cores could do in the time, as measured in
the same run by a loop of nothing else. Latency is the median time of one line at a time on one
thread. `--transformers` asks transformers' generate as well (beam 5, float32).
"""

import argparse
import copy
import ctypes
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from apart import Act, Peer, machine  # noqa: E402

import regard  # noqa: E402
from regard.attention.positions import sinusoids  # noqa: E402
from regard.data.pairs import load_pairs  # noqa: E402
from regard.metrics.bleu import bleu_scores  # noqa: E402
from regard.models.folder import save_config, save_weights  # noqa: E402
from regard.models.transformer import Transformer  # noqa: E402
from regard.pretrained.ctranslate2 import export_ctranslate2  # noqa: E402

LONGEST = 128
WIDE_LONGEST = 16  # random weights find no end
BATCHES = [(n, "examples") for n in (16, 32, 64, 96)] + [(n, "tokens") for n in (256, 512)]
# what CTranslate2 can be told by its environment
SETS = [{"CT2_FORCE_CPU_ISA": isa} for isa in ("AVX512", "AVX2")]
SETS += [{"CT2_USE_MKL": "0"}, {"CT2_USE_MKL": "1"}]
TRANSFORMERS_SIZES = (32, 64)
# int8 in Regard's words and in CTranslate2's
KINDS = {"fp32": ("none", "float32"), "int8": ("int8", "int8")}
# multiply-adds in registers and nothing else, as many as asked for
LOOP = """
#include <immintrin.h>
#define EACH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#ifdef __AVX512F__
#define V __m512
#define FMA(i) asm volatile("vfmadd231ps %%zmm30,%%zmm31,%%zmm" #i ::: "xmm" #i);
#define DOT(i) asm volatile("vpdpbusd %%zmm30,%%zmm31,%%zmm" #i ::: "xmm" #i);
enum { WIDE = 16 };
#else
#define FMA(i) asm volatile("vfmadd231ps %%ymm14,%%ymm15,%%ymm" #i ::: "xmm" #i);
enum { WIDE = 8 };
#endif
double floats(long n) { for (long i = 0; i < n; i++) { EACH(FMA) } return 12.0 * WIDE * n; }
#ifdef __AVX512VNNI__
double bytes(long n) { for (long i = 0; i < n; i++) { EACH(DOT) } return 48.0 * WIDE * n; }
#else
double bytes(long n) { return floats(n); }
#endif
"""


class Setting(NamedTuple):
    """How CTranslate2 is asked."""

    layout: tuple[int, int]  # batches at once, and threads of each
    batch: tuple[int, str]  # size, and of what
    told: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        told = "".join(f" {name}={value}" for name, value in self.told)
        return f"{self.layout[0]}x{self.layout[1]} {self.batch[0]} {self.batch[1]}{told}"


class Took(NamedTuple):
    """Seconds on the wall and of the processor."""

    wall: float
    cpu: float


def peaks() -> dict[str, float]:
    """Multiply-adds a second of one core, in float32 and in bytes."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return {}
    with tempfile.TemporaryDirectory() as place:
        source, made = Path(place) / "loop.c", Path(place) / "loop.so"
        source.write_text(LOOP)
        command = [compiler, "-O2", "-march=native", "-shared", "-fPIC", source, "-o", made]
        subprocess.run(command, check=True)
        library = ctypes.CDLL(str(made))
        found = {}
        for kind, name in (("fp32", "floats"), ("int8", "bytes")):
            loop = getattr(library, name)
            loop.argtypes, loop.restype = [ctypes.c_long], ctypes.c_double
            speeds = []
            for _ in range(9):
                start = time.process_time()
                count = loop(3_000_000)
                speeds.append(count / (time.process_time() - start))
            found[kind] = statistics.median(speeds)
    return found


class Counted:
    """A model of which the rows that a search asks for are counted."""

    def __init__(self, model: Any):
        self.model, self.at, self.rows, self.pairs = model, 0, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def start(self, *words: Any, **more: Any) -> Any:
        """Begin a batch, whose texts have no token yet."""
        self.at = 0
        return self.model.start(*words, **more)

    def step(self, ids: Any, state: Any) -> Any:
        """Go on with one token more of each row, which looks back at all before it."""
        self.at += 1
        self.rows += len(ids)
        self.pairs += len(ids) * self.at
        return self.model.step(ids, state)


def needed(loaded: Any, lines: list[str], beam: int, longest: int) -> float:
    """Multiply-adds of a search for lines, of the rows that search.py has and without padding."""
    model, decoder = loaded.model, copy.copy(loaded.predictor.decoder)
    decoder.writer = counted = Counted(model)
    settings = loaded.check(words(beam, longest))
    encode = partial(loaded.predictor.encode, settings=settings)
    parts = [part for n, x in enumerate(lines) for part in decoder.cut(x, n, encode, (), False)]
    parts.sort(key=lambda part: len(part.ids))
    for start in range(0, len(parts), 64):
        decoder.batch(parts[start : start + 64], settings, 0)
    config, block, heads = model.config, model.config.block, model.decoder[0].attention
    w, hd, read = block.width, heads.heads * heads.head_width, [len(part.ids) for part in parts]
    ffn = (3 if hasattr(model.decoder[0].feed_forward, "gate") else 2) * w * block.ffn_width
    encoder = sum(n * (4 * w * hd + ffn + 2 * n * hd) for n in read)
    seen = 2 * hd * (counted.rows * statistics.mean(read) + counted.pairs)
    layers = counted.rows * (6 * w * hd + ffn) + seen + 2 * sum(read) * w * hd
    head = counted.rows * w * config.target_vocab
    return config.encoder_depth * encoder + config.decoder_depth * layers + head


def wide_model(folder: Path) -> str:
    """A folder with a model of 3 + 3 layers of width 256, of random weights, and tokenizers."""
    starter: Any = regard.load("en-zh")
    block = replace(starter.model.config.block, width=256, heads=8, ffn_width=1024)
    config = replace(starter.model.config, encoder_depth=3, decoder_depth=3, block=block)
    torch.manual_seed(1)
    model = Transformer(config)
    with torch.no_grad():  # larger, so that some tokens are much likelier than others
        for weight in model.parameters():
            weight += 0.3 * torch.randn_like(weight) / max(1, weight.shape[-1]) ** 0.5
    folder.mkdir()
    save_config(folder, model, name="transformer", task="translate", about={"to": "zh"})
    save_weights(folder, dict(model.named_parameters()))
    starter.codec.save(folder)
    return str(folder)


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


def words(beam: int, longest: int) -> dict[str, Any]:
    """Settings by which Regard does as the others: line by line, by the mean log-probability."""
    return {"beam": beam, "length_penalty": "average", "max_length": longest, "split": False}


def by_regard(name: str, quantise: str, longest: int = LONGEST) -> Act:
    """Translate as `regard run` does, but line by line as the others do."""
    loaded: Any = regard.load(name)
    told = {} if quantise == "none" else {"quantise": quantise}

    def translate(lines: list[str], beam: int, apart: bool) -> list[str]:
        settings = {**words(beam, longest), **told}
        parts = [[line] for line in lines] if apart else [lines]
        return [answer.text for part in parts for answer in loaded.run(part, **settings)]

    return timed(translate)


def by_ctranslate2(name: str, folder: str, longest: int = LONGEST) -> Act:
    """Translate by CTranslate2."""
    import ctranslate2

    loaded: Any = regard.load(name)
    source, target = loaded.codec.source, loaded.codec.target
    pieces = [source.library.id_to_token(i) for i in range(source.library.get_vocab_size())]
    ids = target.library.get_vocab()
    made: dict[Any, Any] = {}

    def translate(lines: list[str], beam: int, apart: bool, kind: str, setting: Setting):
        if (kind, setting.layout) not in made:
            batches, threads = setting.layout
            made[kind, setting.layout] = ctranslate2.Translator(
                folder, compute_type=kind, inter_threads=batches, intra_threads=threads
            )
        engine, (size, of) = made[kind, setting.layout], setting.batch
        answers = []
        for part in [[line] for line in lines] if apart else [lines]:
            found = engine.translate_batch(
                [[pieces[i] for i in text] for text in source.encode_batch(part)],
                beam_size=beam,
                length_penalty=1,
                max_batch_size=size,
                batch_type=of,
                max_decoding_length=longest,
                min_decoding_length=0,
                disable_unk=True,
            )
            answers += [target.decode([ids[x] for x in one.hypotheses[0]]) for one in found]
        return answers

    return timed(translate)


def timed(translate: Act) -> Act:
    """Do it, and tell the processor time as well; of one line at a time the median times."""

    def act(lines: list[str], beam: int, apart: bool, *rest: Any) -> tuple[Took, list[str]]:
        if not apart:
            wall, cpu = time.perf_counter(), time.process_time()
            answers = translate(lines, beam, False, *rest)
            return Took(time.perf_counter() - wall, time.process_time() - cpu), answers
        taken = [act([line], beam, False, *rest) for line in lines]
        both = zip(*(took for took, _ in taken), strict=True)
        return Took(*map(statistics.median, both)), [text for _, (text,) in taken]

    return act


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
    source, target = loaded.codec.source, loaded.codec.target

    @torch.inference_mode()
    def translate(lines: list[str], beam: int, apart: bool, rows: int) -> list[str]:
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
                num_beams=5,
                do_sample=False,
                length_penalty=1.0,
                early_stopping=False,
                max_new_tokens=LONGEST,
                suppress_tokens=[0, 1, 3],
            )
            for i, row in zip(some, found.tolist(), strict=True):
                answers[i] = target.decode(row)
        return answers

    return timed(translate)


def compare_transformers(name: str, options: argparse.Namespace) -> None:
    """Let Regard and transformers translate with a model in turn, beam 5, float32."""
    loaded: Any = regard.load(name)
    lines = test_lines(loaded.config.get("to"), options.trial)[0]
    try:
        as_transformers(loaded.model)
    except ValueError as reason:
        return print(f"transformers is left out: it cannot hold this model ({reason})")
    peers = [
        Peer(make, name, *more, threads=options.threads)
        for make, more in ((by_regard, ("none",)), (by_transformers, ()))
    ]
    rows = min(TRANSFORMERS_SIZES, key=lambda n: peers[1].act(lines, 5, False, n)[0])
    label = Path(name).name.replace("-", "_")
    report(
        f"{label}_decode_vs_transformers",
        f"{label} fp32 beam 5, transformers",
        partial(peers[0].ask, lines, 5, False),
        partial(peers[1].ask, lines, 5, False, rows),
        1,
        len(lines),
    )


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Variables for a process that is started inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


class Theirs:
    """CTranslate2: a process for each set of variables."""

    def __init__(self, name: str, folder: str, longest: int, threads: int):
        self.make = partial(Peer, by_ctranslate2, name, folder, longest, threads=threads)
        self.peers: dict[Any, Peer] = {}

    def __call__(self, lines: list[str], beam: int, apart: bool, kind: str, setting: Setting):
        """Translate lines."""
        if setting.told not in self.peers:
            with environment(**dict(setting.told)):
                self.peers[setting.told] = self.make()
        return self.peers[setting.told].act(lines, beam, apart, kind, setting)[1]

    def end(self) -> None:
        """Let the processes end."""
        for peer in self.peers.values():
            peer.end()


def best_setting(
    name: str, ask: Callable[[Setting], tuple[Took, Any]], threads: int, by: str
) -> Setting:
    """The fastest of layouts and batches, and then of what is told by the environment."""
    speeds: dict[Setting, float] = {}

    def try_it(setting: Setting) -> None:
        ask(setting)
        speeds[setting] = -getattr(ask(setting)[0], by)

    for layout in dict.fromkeys([(1, threads), (threads, 1)]):
        for batch in BATCHES:
            try_it(Setting(layout, batch))
    for told in SETS:
        try_it(max(speeds, key=lambda one: speeds[one])._replace(told=tuple(told.items())))
    found = max(speeds, key=lambda one: speeds[one])
    told = ", ".join(f"{setting}: {-took:.3f}" for setting, took in speeds.items())
    print(f"{name}, best {found}; seconds ({by}): {told}", flush=True)
    return found


def compare(
    name: str, options: argparse.Namespace, peak: dict[str, float], random: bool = False
) -> None:
    """Let Regard and CTranslate2 translate with a model in turn; texts of random ones are cut."""
    loaded: Any = regard.load(name)
    language, longest = loaded.config.get("to"), WIDE_LONGEST if random else LONGEST
    lines, references = test_lines(language, options.sentences)
    size = sum(p.numel() for p in loaded.model.parameters())
    told = f"random weights, texts of up to {longest} tokens; " if random else ""
    told += f"{len(lines)} lines, {options.threads} threads"
    print(f"{Path(name).name}: {size:,} parameters; {told}", flush=True)
    label, few = Path(name).name.replace("-", "_"), lines[: options.trial]
    sides = loaded.codec.source, loaded.codec.target
    # greedily, CTranslate2 repeats the token <s> that such a model begins with, which has no text;
    # Regard never writes that token
    searches = {"": 5} if random else {"": 5, "greedy_": 1}
    adds = {beam: needed(loaded, lines, beam, longest) for beam in searches.values()}
    with tempfile.TemporaryDirectory() as folder:
        exported = export_ctranslate2(loaded.model, *sides, Path(folder) / "ct2")
        theirs = Theirs(name, str(exported), longest, options.threads)
        alone = Theirs(name, str(exported), longest, 1)
        for kind, (ours, their) in KINDS.items():
            regards = Peer(by_regard, name, ours, longest, threads=options.threads)
            for search, beam in searches.items():
                title = f"{label} {kind} beam {beam}"
                ask = partial(theirs, few, beam, False, their)
                best = best_setting(f"CTranslate2 {title}", ask, options.threads, options.by)
                texts = report(
                    f"{label}_decode_{search}vs_ct2_best_{kind}",
                    title,
                    partial(regards.ask, lines, beam, False),
                    partial(theirs, lines, beam, False, their, best),
                    options.rounds,
                    len(lines),
                )
                for side, some in texts.items():
                    same = sum(a == b for a, b in zip(some, texts["regard"], strict=True))
                    bleu = f"BLEU {bleu_scores(some, [references], language)[0].value:.2f}, "
                    print(f"  {side}: {'' if random else bleu}{same} lines as Regard's")
                weights = sum(x.numel() for x in loaded.model.decoder.parameters())
                weights += loaded.model.head.weight.numel()
                print(
                    f"  multiply-adds a line {adds[beam] / len(lines) / 1e6:.1f} M; weights that "
                    f"a step reads {weights * (1 if kind == 'int8' else 4) / 1e6:.1f} MB"
                )
                if peak:
                    share = adds[beam] / peak[kind] / SEEN["regard"].cpu
                    print(f"share {title.replace(' ', '_')} {share:.3f}", flush=True)
            single = Peer(by_regard, name, ours, longest, threads=1)
            one_by_one = Setting((1, 1), (1, "examples"))
            report(
                f"{label}_latency_vs_ct2_{kind}",
                f"{label} {kind} one line at a time",
                partial(single.ask, few[:100], 5, True),
                partial(alone, few[:100], 5, True, their, one_by_one),
                options.rounds,
                1,
            )
            regards.end()
            single.end()
        theirs.end()
        alone.end()


SEEN: dict[str, Took] = {}  # median times of the last comparison


def report(
    ratio: str, title: str, ours: Act, theirs: Act, rounds: int, lines: int
) -> dict[str, list[str]]:
    """Time both in turn, print speeds and ratios, and return the answers."""
    taken: dict[str, list[Took]] = {"regard": [], "ct2": []}
    texts: dict[str, list[str]] = {}
    acts = {"regard": ours, "ct2": theirs}
    for act in acts.values():
        act()
    for turn in range(rounds):
        for side in sorted(acts, reverse=bool(turn % 2)):
            took, texts[side] = acts[side]()
            taken[side].append(took)
    for side, some in taken.items():
        SEEN[side] = Took(*map(statistics.median, zip(*some, strict=True)))
        spread = f"{lines / max(some).wall:.1f} to {lines / min(some).wall:.1f}"
        print(
            f"{title}: {side} {lines / SEEN[side].wall:.1f} lines/s ({spread}), by processor time "
            f"{lines / SEEN[side].cpu:.1f} a core",
        )
    print(f"ratio {ratio} {SEEN['ct2'].wall / SEEN['regard'].wall:.3f}")
    print(f"ratio {ratio}_cpu {SEEN['ct2'].cpu / SEEN['regard'].cpu:.3f}", flush=True)
    return texts


def main() -> None:
    """Let both translate with each model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="*", help="run folders or starters' names")
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--by", choices=("wall", "cpu"), default="wall", help="what is best")
    parser.add_argument("--quick", action="store_true", help="200 sentences, two rounds, en-zh")
    parser.add_argument("--transformers", action="store_true", help="ask transformers, too")
    options = parser.parse_args()
    print(machine(), flush=True)
    options.trial = 200
    models = options.models or ["en-zh"]
    if options.quick:
        options.sentences, options.rounds, options.trial = 200, 2, 96
    peak = peaks()
    for kind, speed in peak.items():
        print(f"peak of a core, {kind}: {speed / 1e9:.1f} G multiply-adds/s", flush=True)
    for name in models:
        compare(name, options, peak)
        if options.transformers:
            compare_transformers(name, options)
    if not options.quick and not options.models:
        options.sentences, options.trial = 400, 96
        with tempfile.TemporaryDirectory() as folder:
            compare(wide_model(Path(folder) / "wide-256"), options, peak, random=True)


if __name__ == "__main__":
    main()
