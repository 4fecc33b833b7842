"""The engine in C finds what the search in Python finds, and notices whatever a user changes."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regard
from regard import native
from regard.data.batches import pad
from regard.decode.constraints import BOS, forbid
from regard.decode.options import penalty
from regard.decode.search import enough_texts, hypothesis
from regard.errors import UsageError
from regard.layers.block import BlockConfig
from regard.layers.fast.engine import STOPPINGS
from regard.layers.lora import adapt
from regard.models.transformer import Transformer, TransformerConfig
from tests import searching

pytestmark = pytest.mark.skipif(not native.status().enabled, reason=str(native.status()))
BLOCK = BlockConfig(width=48, heads=3, ffn_width=80)
SMALL = TransformerConfig(29, 37, encoder_depth=2, decoder_depth=2, block=BLOCK, tie="target")
EOS, NEVER = 2, (0, 1, 36)
VARIANTS: dict[str, TransformerConfig] = {
    "plain": SMALL,
    "one vector of heads": replace(SMALL, block=replace(BLOCK, width=32, heads=2)),
    "odd sizes": replace(SMALL, block=replace(BLOCK, width=20, heads=4, ffn_width=33)),
    "other head width": replace(SMALL, block=replace(BLOCK, head_width=7)),
    "gated, rms, no bias": replace(
        SMALL, block=replace(BLOCK, feed_forward="swiglu", norm="rms", bias=False)
    ),
    "gelu, learned": replace(
        SMALL, position="learned", max_length=80, block=replace(BLOCK, feed_forward="gelu")
    ),
    "no position, a bias of the head": replace(
        SMALL, position="none", head_bias=True, scale_embedding=False
    ),
    "norms after": replace(SMALL, block=replace(BLOCK, order="post", feed_forward="swish")),
    "BART": replace(
        SMALL,
        position="learned",
        max_length=80,
        embed_norm="layer",
        head_bias=True,
        block=replace(BLOCK, order="post", feed_forward="gelu"),
    ),
    "T5": replace(
        SMALL,
        position="t5",
        scale_head=True,
        scale_embedding=False,
        block=replace(BLOCK, norm="rms", bias=False, score_scale=1.0),
    ),
    "alibi": replace(SMALL, position="alibi"),
    "all tied": replace(SMALL, source_vocab=37, tie="all"),
    "a wide vocabulary": replace(SMALL, target_vocab=1201, tie="none", decoder_depth=1),
}


def build(config: TransformerConfig, seed: int = 0) -> Transformer:
    """A model of random weights, large enough that tokens differ much in probability."""
    torch.manual_seed(seed)
    model = Transformer(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * torch.randn_like(weight) / max(1, weight.shape[-1]) ** 0.5
        model.head.weight *= 2.0
    return model


def sources(count: int, vocab: int = 29, longest: int = 23, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab, rng.integers(1, longest)).tolist() for _ in range(count)]


def by_search(model: Transformer, texts: list[list[int]], limits: list[int], **options: Any):
    ids, lengths = pad([np.asarray(row, dtype=np.int64) for row in texts], 0)
    adjust, beam = [forbid(*NEVER)], options.pop("beam", 5)
    words = {"max_length": limits, "adjust": adjust, "eos": EOS, **options}
    if beam == 1:
        words.pop("n_best", None), words.pop("stopping", None)
        return searching.greedy(model, ids, lengths, **words)
    return searching.beam(model, ids, lengths, beam=beam, **words)


def by_engine(model: Transformer, texts: list[list[int]], limits: list[int], **options: Any):
    with native.fast(model, frozen=True, dtype=options.get("dtype", torch.float32)):
        before = options.get("before")
        engine = model.engine(NEVER, before)
        assert engine is not None
        beam, n_best = options.get("beam", 5), options.get("n_best", 1)
        named = options.get("length_penalty", "average"), options.get("alpha")
        stopping, divisor = options.get("stopping", "patience"), penalty(*named)
        found = engine.translate(
            texts,
            limits,
            options.get("prefix", ()),
            beam=beam,
            n_best=n_best,
            divisor=divisor,
            stopping=stopping,
            enough=enough_texts(beam, n_best, divisor, stopping),
            bos=BOS,
            eos=EOS,
            ends=options.get("ends", ()),
        )
    assert found is not None
    return [[hypothesis(*one) for one in some] for some in found]


def assert_alike(ours: list, theirs: list) -> None:
    assert [len(some) for some in ours] == [len(some) for some in theirs]
    for some, others in zip(ours, theirs, strict=True):
        for one, other in zip(some, others, strict=True):
            assert one.score == pytest.approx(other.score, abs=1e-4)
            if one.ids != other.ids:  # only where two texts are as good as each other
                assert abs(one.score - other.score) < 1e-5
                continue
            assert one.steps == pytest.approx(other.steps, abs=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("beam", [1, 2, 5])
def test_the_engine_finds_what_the_search_finds(name: str, beam: int):
    model, texts = build(VARIANTS[name]), sources(40)
    limits = [1 + len(text) for text in texts]
    ours = by_engine(model, texts, limits, beam=beam)
    theirs = by_search(model, texts, limits, beam=beam)
    assert_alike(ours, theirs)
    same = sum(a[0].ids == b[0].ids for a, b in zip(ours, theirs, strict=True))
    assert same >= 39, "texts as good as each other are rare"
    assert any(one.ids for (one, *_) in ours)


@pytest.mark.parametrize("name", ["plain", "a wide vocabulary", "BART"])
@pytest.mark.parametrize("beam", [1, 4])
def test_forced_beginnings_are_those_of_the_search(name: str, beam: int):
    model, texts = build(VARIANTS[name], 5), sources(40, seed=5)
    vocab, rng = model.head.out_features, np.random.default_rng(5)
    some = np.setdiff1d(np.arange(vocab), [EOS])  # forbidden tokens and other ends among them
    prefix = [rng.choice(some, n % 5).tolist() for n in range(len(texts))]
    limits = [max(1, len(ids)) + n % 7 for n, ids in enumerate(prefix)]
    for more in ({"n_best": min(beam, 3)}, {"ends": (7, 9)}):
        words = {"beam": beam, "prefix": prefix, **more}
        ours = by_engine(model, texts, limits, **words)
        assert_alike(ours, by_search(model, texts, limits, **words))
        begun = [(a.ids, b) for some, b in zip(ours, prefix, strict=True) for a in some]
        assert all(a[: len(b)] == b[: len(a)] for a, b in begun)
    alone = [
        by_engine(model, [a], [n], beam=beam, prefix=[b], ends=(7, 9))[0]
        for a, n, b in zip(texts, limits, prefix, strict=True)
    ]
    assert alone == ours, "to the bit"


@pytest.mark.parametrize("prefix", [[5, EOS], [37], [-1], [5, 6, 7, 8]])
def test_a_beginning_that_cannot_be_is_left_to_the_search(prefix: list[int]):
    model = build(SMALL)
    with native.fast(model, frozen=True):
        options = {"stopping": "patience", "enough": 5, "bos": 1, "eos": EOS, "ends": ()}
        found = model.engine(()).translate(
            [[4]], [3], [prefix], beam=5, n_best=1, divisor=float, **options
        )
    assert found is None


@pytest.mark.parametrize("stopping", STOPPINGS)
@pytest.mark.parametrize("length_penalty", ["average", "gnmt", "none"])
def test_every_way_to_stop_and_to_rank_is_that_of_the_search(stopping: str, length_penalty: str):
    model, texts = build(SMALL, 3), sources(24, seed=3)
    options = {"stopping": stopping, "length_penalty": length_penalty, "beam": 4, "n_best": 3}
    for more in ({}, {"alpha": 0.4}, {"ends": (7, 9)}):
        words = {**options, **more}
        limits = [30] * len(texts)
        assert_alike(
            by_engine(model, texts, limits, **words), by_search(model, texts, limits, **words)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_neighbours_order_and_threads_change_no_bit(dtype):
    model, texts = build(SMALL, 1), sources(70, seed=1)
    limits = [4 + len(text) for text in texts]

    def by_engine(*words):
        return globals()["by_engine"](*words, dtype=dtype)

    whole = by_engine(model, texts, limits)
    mixed = np.random.default_rng(1).permutation(len(texts)).tolist()
    shuffled = by_engine(model, [texts[i] for i in mixed], [limits[i] for i in mixed])
    assert [shuffled[mixed.index(i)] for i in range(len(texts))] == whole
    for size in (1, 7, 24, 40):
        parts = [
            by_engine(model, texts[n : n + size], limits[n : n + size])
            for n in range(0, len(texts), size)
        ]
        assert [one for part in parts for one in part] == whole
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert by_engine(model, texts, limits) == whole
    finally:
        torch.set_num_threads(before)


class Louder(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def _numpy_view(model: Transformer) -> None:
    model.encoder[0].feed_forward.inner.weight.detach().numpy()[1, 1] += 1


# changes after which the engine must be packed anew, or must not be used
NUMBERS = {
    "data": lambda m: m.decoder[0].attention.qkv.weight.data.add_(0.1),
    "in place": lambda m: nn.init.normal_(m.encoder_norm.weight),
    "NumPy": _numpy_view,
    "load_state_dict": lambda m: m.load_state_dict(build(SMALL, 9).state_dict()),
    "one bit of an embedding": lambda m: m.source.tokens.weight.data[5, 7].mul_(1.5),
    "a new parameter": lambda m: setattr(m.head, "weight", nn.Parameter(m.head.weight * 1.1)),
    "a bias of a norm": lambda m: m.decoder[1].around_cross.norm.bias.data.add_(0.5),
}
OTHERS = {
    "hook": lambda m: m.encoder[0].register_forward_hook(lambda *_: None),
    "hook of the head": lambda m: m.head.register_forward_pre_hook(lambda *_: None),
    "forward of an instance": lambda m: setattr(m.encoder[1], "forward", lambda x, **rest: x),
    "class": lambda m: setattr(m.encoder[0].feed_forward.inner, "__class__", Louder),
    "float64": lambda m: m.double(),
    "training": lambda m: m.train(),
    "dropout of embeddings": lambda m: m.source.train(),
    "an own position": lambda m: setattr(m.source, "position", Twice()),
    "an own eps": lambda m: setattr(m.decoder_norm, "eps", 0.1),
    "fewer rows": lambda m: setattr(m.head.weight, "data", m.head.weight.data[:20]),
    "LoRA": lambda m: adapt(m, "*.qkv", 2, 4.0),
    "an own eps of a block": lambda m: setattr(m.encoder[1].around_attention.norm, "eps", 0.1),
}


class Twice(regard.POSITIONS["sinusoidal"]):
    def embed(self, x, at):
        return super().embed(super().embed(x, at), at)

    def __init__(self):
        super().__init__(48)


@pytest.mark.parametrize("how", NUMBERS)
def test_other_numbers_give_another_engine(how: str):
    model, texts = build(SMALL), sources(12)
    limits = [12] * len(texts)
    with native.fast(model, frozen=True):
        first = model.engine(NEVER)
        assert model.engine(NEVER, first) is first
    was = by_engine(model, texts, limits, before=first)
    NUMBERS[how](model)
    now = by_engine(model, texts, limits, before=first)
    assert now != was
    assert_alike(now, by_search(model, texts, limits))


@pytest.mark.parametrize("how", OTHERS)
def test_what_is_not_known_exactly_has_no_engine(how: str):
    model = build(SMALL)
    with native.fast(model, frozen=True):
        first = model.engine(NEVER)
        assert first is not None
        OTHERS[how](model)
        assert model.engine(NEVER, first) is None and model.engine(NEVER) is None


def test_a_replaced_function_and_a_subclass_have_no_engine(monkeypatch):
    class Mine(Transformer):
        pass

    torch.manual_seed(0)
    own = Mine(SMALL).eval()
    with native.fast(own, frozen=True):
        assert own.engine(NEVER) is None
    model = build(SMALL)
    with native.fast(model, frozen=True):
        with monkeypatch.context() as patch:
            patch.setattr(F, "linear", lambda *words: F.linear(*words))
            assert model.engine(NEVER) is None
        with monkeypatch.context() as patch:
            patch.setattr(Transformer, "step", lambda self, ids, state: None)
            assert model.engine(NEVER) is None
        assert model.engine(NEVER) is not None
    assert model.engine(NEVER) is None, "kernels are off"


@pytest.mark.parametrize(
    "changed",
    [
        {"position": "rotary"},
        {"position": "kerple_log"},
        {"block": replace(BLOCK, order="res_post")},
        {"block": replace(BLOCK, kv_heads=1)},
        {"block": replace(BLOCK, score="cosine")},
    ],
)
def test_a_part_that_the_engine_does_not_know_is_left_to_the_search(changed):
    model = build(replace(SMALL, **changed))
    with native.fast(model, frozen=True):
        assert model.engine(NEVER) is None


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rows as 127 steps of their largest number."""
    step = x.abs().amax(-1, keepdim=True) / 127
    return (x / step.clamp(min=1e-30)).round() * step


class Rounded(nn.Linear):
    def forward(self, x):
        return F.linear(rounded(x), rounded(self.weight), self.bias)


@pytest.mark.parametrize("name", ["plain", "odd sizes", "gated, rms, no bias", "a wide vocabulary"])
def test_int8_is_the_product_of_rounded_rows_and_rounded_weights(name: str):
    model, texts = build(VARIANTS[name]), sources(30)
    limits = [8] * len(texts)
    ours = by_engine(model, texts, limits, dtype=torch.int8, beam=1)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.__class__ = Rounded
    model.head.step_logits = lambda x, during: model.head(x)
    theirs = by_search(model, texts, limits, beam=1)
    same, apart = 0, []
    for (one,), (other,) in zip(ours, theirs, strict=True):  # a step of rounding may go either way
        apart.append(abs(one.steps[0] - other.steps[0]))
        same += one.ids == other.ids
    assert same >= 20 and max(apart) < 0.1 and sorted(apart)[len(apart) // 2] < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("number", [inf, nan])
def test_numbers_that_are_not_finite_are_given_back(dtype, number: float):
    model = build(SMALL)
    model.decoder_norm.weight.data[0] = number
    with native.fast(model, frozen=True, dtype=dtype):
        engine = model.engine(())
        options = {"stopping": "patience", "enough": 5, "bos": 1, "eos": EOS, "ends": ()}
        found = engine.translate([[4]], [3], beam=5, n_best=1, divisor=float, **options)
    assert found is None


@pytest.mark.parametrize("given", [[3, 29], [-1], [2**40]])
def test_a_token_that_the_model_does_not_have_is_left_to_the_search(given: list[int]):
    model = build(SMALL)
    with native.fast(model, frozen=True):
        options = {"stopping": "patience", "enough": 5, "bos": 1, "eos": EOS, "ends": ()}
        found = model.engine(()).translate([given], [3], beam=5, n_best=1, divisor=float, **options)
    assert found is None


def test_a_very_long_limit_is_no_reason_to_fail():
    model = regard.load("en-zh")
    usual, long = (model.run(["How are you?"] * 40, max_length=n) for n in (30, 10_000))
    assert list(map(str, usual)) == list(map(str, long))


def test_threads_that_run_one_model_in_two_ways_do_not_mix_them():
    model = regard.load("en-zh")
    lines = ["How are you?", "Where is the station?", "He went home."] * 4
    expected = {kind: list(map(str, model.run(lines, quantise=kind))) for kind in ("none", "int8")}
    with ThreadPoolExecutor(4) as pool:
        kinds = ["none", "int8"] * 8
        found = pool.map(lambda kind: list(map(str, model.run(lines, quantise=kind))), kinds)
    assert list(found) == [expected[kind] for kind in kinds]


def test_a_change_of_weights_within_has_no_engine_while_it_lasts():
    model = regard.load("en-zh")
    usual = str(model.run("Where is the station?"))
    heads = {f"decoder.{n}.cross.heads.{head}": 0.0 for n in range(3) for head in range(6)}
    with regard.change(model, heads):
        assert str(model.run("Where is the station?")) != usual
    assert str(model.run("Where is the station?")) == usual


def test_the_checksum_notices_any_flipped_bit_and_any_swap():
    x = torch.randn(1003)
    made = native.library()

    def checksum() -> tuple[int, int]:
        return native.checksum(made, native.numbers([x]))

    first = checksum()
    bits = x.view(torch.int32)
    for place in range(0, len(x), 17):
        for bit in (0, 13, 30):
            bits[place] ^= 1 << bit
            assert checksum() != first
            bits[place] ^= 1 << bit
    x[[3, 500]] = x[[500, 3]]
    assert checksum() != first
    x[[3, 500]] = x[[500, 3]]
    assert checksum() == first


def test_the_starter_is_translated_by_the_engine_and_says_what_the_search_says(monkeypatch):
    model = regard.load("en-zh")
    lines = ["How are you?", "", "I like tea. Where is it?", "He went home."]
    ours = model.run(lines, n_best=2, scores=True)
    assert model.predictor.decoder.engine is not None
    monkeypatch.setattr(Transformer, "engine", lambda *words: None)
    theirs = model.run(lines, n_best=2, scores=True)
    assert list(map(str, ours)) == list(map(str, theirs))


def test_int8_is_chosen_by_quantise_and_refused_where_it_cannot_be(monkeypatch):
    model = regard.load("en-zh")
    assert str(model.run("How are you?", quantise="int8"))
    assert model.predictor.decoder.engine.dtype == torch.int8
    with pytest.raises(UsageError, match="unknown quantise 'int4'"):
        model.run("How are you?", quantise="int4")
    with pytest.raises(UsageError, match="quantise=int8 is done by the engine"):
        model.run("How are you?", quantise="int8", temperature=1.0)
    monkeypatch.setattr(Transformer, "engine", lambda *words: None)
    with pytest.raises(UsageError, match="leave it out"):
        model.run("How are you?", quantise="int8")


def test_watching_changes_no_bit_of_an_answer_and_sees_every_step():
    model = regard.load("en-zh")
    alone = model.run(["How are you?", "He went home."], n_best=2, scores=True)
    with regard.watch(model) as maps:
        assert model.run(["How are you?", "He went home."], n_best=2, scores=True) == alone
    assert len(maps.calls("decoder.0.cross")) > 3


def test_a_text_past_the_learned_positions_is_refused_as_ever():
    model = build(VARIANTS["gelu, learned"])
    with native.fast(model, frozen=True), pytest.raises(UsageError, match="past the 80"):
        engine = model.engine(())
        options = {"stopping": "patience", "enough": 5, "bos": 1, "eos": EOS, "ends": ()}
        engine.translate([[4] * 90], [3], beam=5, n_best=1, divisor=float, **options)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (lambda m: None, ""),
        (lambda m: m.encoder[1].register_forward_hook(lambda *_: None), "encoder.1 is in training"),
        (lambda m: m.double(), "a block has"),
        (lambda m: setattr(m, "before_head", nn.ReLU()), "ReLU before its head"),
        (lambda m: setattr(m.source, "position", Twice().eval()), "Twice positions"),
    ],
)
def test_why_a_model_has_no_engine_is_told(changed, told: str):
    model = build(SMALL)
    changed(model)
    with native.fast(model, frozen=True):
        why = model.why_no_engine()
        assert (model.engine(NEVER) is None) == bool(why)
    assert told in why and bool(told) == bool(why)
    assert model.why_no_engine(), "kernels are off"


def test_the_doctor_tells_how_a_model_is_decoded(tmp_path):
    assert "decoded natively" in str(regard.doctor("en-zh"))
    assert "decoded natively" in str(regard.doctor("shakespeare"))
    found = regard.doctor("fill")
    assert "decoded by PyTorch and kernels: " in str(found)
    assert found.to_dict()["search"] and found.exit_code == 0


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("all tied", lambda m: m.head.weight.data[7].mul_(-1.5)),
        ("T5", lambda m: m.source.position.table.data.mul_(3.0)),
        ("T5", lambda m: m.target.position.table.detach().numpy().__imul__(-2.0)),
        ("BART", lambda m: m.target.position.table.weight.data.add_(0.7)),
        ("BART", lambda m: m.source.norm.weight.data.mul_(torch.linspace(0, 2, 48))),
        ("norms after", lambda m: m.decoder[1].around_cross.norm.bias.data.add_(torch.randn(48))),
    ],
)
def test_tables_and_norms_that_changed_are_read_anew(name: str, change):
    model, texts = build(VARIANTS[name]), sources(20)
    limits = [9] * len(texts)
    with native.fast(model, frozen=True):
        first = model.engine(NEVER)
    was = by_engine(model, texts, limits, before=first)
    change(model)
    now = by_engine(model, texts, limits, before=first)
    assert now != was
    assert_alike(now, by_search(model, texts, limits))
