"""The Transformer against the lectures' own program, and by the paper's numbers."""

import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from regard.errors import UsageError
from regard.layers.block import BlockConfig
from regard.layers.init import INITS
from regard.layers.norm import NORMS
from regard.models import preset
from regard.models.declaration import with_changes
from regard.models.transformer import SIZES, Transformer, TransformerConfig

LECTURES = Path(__file__).parents[3] / "shared" / "lectures" / "transformer_program.py"


def count(config: TransformerConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(config).parameters())


@pytest.mark.parametrize(
    "size,vocab,exact,about",
    [
        ("tiny", 10_000, 2_605_568, 2.6e6),
        ("small", 8_000, 7_578_624, 7.6e6),
        ("base", 37_000, 63_084_544, 63e6),
        ("big", 37_000, 214_249_472, 213e6),
    ],
)
def test_the_named_sizes_have_the_published_numbers_of_parameters(size, vocab, exact, about):
    config = replace(preset("transformer", size), source_vocab=vocab, target_vocab=vocab)
    assert count(config) == exact
    assert exact == pytest.approx(about, rel=0.01)
    # by hand: attention 4 w (w + 1), network 2 w f + w + f, norm 2 w, and the embedding
    w, f, n = config.block.width, config.block.ffn_width, config.encoder_depth
    attention, network, norm = 4 * w * (w + 1), 2 * w * f + w + f, 2 * w
    by_hand = n * (3 * attention + 2 * network + 5 * norm) + 2 * norm + vocab * w
    assert exact == by_hand


def test_sizes_keep_what_they_do_not_name():
    config = TransformerConfig(block=BlockConfig(norm="rms", dropout=0.3), tie="none")
    assert set(SIZES) == {"tiny", "small", "base", "big"}
    for name in SIZES:
        one = with_changes(config, SIZES[name])
        assert (one.block.norm, one.block.dropout, one.tie) == ("rms", 0.3, "none")
    with pytest.raises(UsageError, match="Did you mean 'small'"):
        preset("transformer", "smal")


def test_what_is_tied_is_one_matrix():
    config = TransformerConfig(13, 13, 1, 1, BlockConfig(width=8, heads=2, ffn_width=8))
    one = Transformer(config)
    assert one.source.tokens.weight is one.target.tokens.weight is one.head.weight
    two = Transformer(replace(config, tie="target", source_vocab=17))
    assert two.source.tokens.weight is not two.target.tokens.weight
    assert two.target.tokens.weight is two.head.weight
    three = Transformer(replace(config, tie="none"))
    assert three.target.tokens.weight is not three.head.weight
    assert count(config) + 2 * 13 * 8 == count(replace(config, tie="none"))


@pytest.mark.parametrize("start", INITS)
def test_every_matrix_starts_by_its_rule(start: str):
    torch.manual_seed(0)
    block = BlockConfig(width=128, heads=4, ffn_width=256)
    model = Transformer(TransformerConfig(3000, 3000, 1, 1, block, tie="none", init=start))
    for name, p in model.named_parameters():
        if p.ndim > 1:
            rows = 128 if "qkv" in name else p.shape[0]  # three matrices in one
            std = math.sqrt(2 / (rows + p.shape[1]))
            if start in ("normal", "gpt"):
                std = 0.02
            if start == "gpt" and ("out.weight" in name or "outer" in name):
                std = 0.02 / 5**0.5  # five times something is added to the residual
            if start == "scaled" and "tokens" in name:
                std = 128**-0.5  # times sqrt(width), as large as a sinusoid
            if start == "t5":
                std = 1.0 if "tokens" in name else p.shape[1] ** -0.5
            if start == "t5" and "qkv" in name:  # queries as if divided by sqrt(32)
                assert p[:128].std().item() == pytest.approx(std / 32**0.5, rel=0.05), name
                p = p[128:]
            assert p.std().item() == pytest.approx(std, rel=0.05), name
        else:
            assert p.eq(1.0 if "norm" in name and "weight" in name else 0.0).all()


@pytest.mark.parametrize(
    "wrong,words",
    [
        ({"block": BlockConfig(width=30, heads=4)}, "heads=4 does not divide width=30"),
        ({"block": BlockConfig(heads=0)}, "heads=0"),
        ({"block": BlockConfig(heads=4, kv_heads=3)}, "kv_heads=3 does not divide heads=4"),
        ({"block": BlockConfig(norm="layr")}, "Did you mean 'layer'"),
        ({"block": BlockConfig(order="poste")}, "Did you mean 'post'"),
        ({"block": BlockConfig(feed_forward="swich")}, "Did you mean 'swish'"),
        ({"block": BlockConfig(score="dott")}, "Did you mean 'dot'"),
        ({"block": BlockConfig(width=15, heads=3)}, "even width"),
        ({"position": "rotari"}, "Did you mean 'rotary'"),
        ({"position": "rotary", "block": BlockConfig(width=15, heads=3)}, "even head_width"),
        ({"tie": "some"}, "unknown tie 'some'"),
        ({"target_vocab": 9}, "tie=all needs one vocabulary"),
    ],
)
def test_what_cannot_be_built_is_a_mistake(wrong: dict, words: str):
    with torch.device("meta"), pytest.raises(UsageError, match=words) as error:
        Transformer(TransformerConfig(**wrong))
    assert "\n" not in str(error.value)


def test_writing_past_the_memory_taken_is_a_mistake():
    config = TransformerConfig(13, 13, 1, 1, BlockConfig(width=8, heads=2, ffn_width=8))
    model = Transformer(config).eval()
    state = model.start(torch.ones(1, 2).long(), capacity=2)
    model.step(torch.ones(1, 2).long(), state)
    with pytest.raises(UsageError, match="larger max_length"):
        model.step(torch.ones(1, 1).long(), state)


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_its_formula(name: str):
    torch.manual_seed(0)
    x = torch.randn(3, 7, dtype=torch.float64) * 5 + 2
    norm = NORMS[name](7, eps=1e-3).double()
    for p in norm.parameters():
        nn.init.normal_(p)
    mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
    bare = {
        "layer": lambda: (x - mean) / (var + 1e-3).sqrt(),
        "layer_nobias": lambda: (x - mean) / (var + 1e-3).sqrt(),
        "rms": lambda: x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt(),
        "rms_plus1": lambda: x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt(),
        "lecture": lambda: (x - mean) / ((var * 7 / 6).sqrt() + 1e-3),
    }[name]()
    state = norm.state_dict()
    expected = bare * (state["weight"] + (name == "rms_plus1")) + state.get("bias", 0.0)
    torch.testing.assert_close(norm(x), expected, atol=1e-12, rtol=0)


def enlarge(model: nn.Module, seed: int = 0) -> None:
    """Give a model weights so large that attention is sharp and logits spread."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=2 / math.sqrt(parameter.shape[1]))
        else:
            parameter.data += 0.3 * torch.randn_like(parameter)


# ---- the lectures' own program


def lecture_program() -> ModuleType:
    if not LECTURES.is_file():
        pytest.skip(f"the lectures' program is not at {LECTURES}")
    spec = importlib.util.spec_from_file_location("transformer_program", LECTURES)
    assert spec and spec.loader
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


def from_lectures(theirs: nn.Module, depth: int) -> dict[str, Tensor]:
    """Return the lectures' weights under our names."""
    state = theirs.state_dict()
    ours = {
        "source.tokens.weight": state["src_embed.0.lut.weight"],
        "target.tokens.weight": state["tgt_embed.0.lut.weight"],
        "head.weight": state["generator.proj.weight"],
        "head.bias": state["generator.proj.bias"],
    }

    def norm(mine: str, his: str) -> None:
        ours[f"{mine}.weight"], ours[f"{mine}.bias"] = state[f"{his}.a_2"], state[f"{his}.b_2"]

    for side in ("encoder", "decoder"):
        norm(f"{side}_norm", f"{side}.norm")
        sublayers = {"attention": "self_attn", "cross": "src_attn", "feed_forward": None}
        if side == "encoder":
            del sublayers["cross"]
        for n in range(depth):
            mine, his = f"{side}.{n}", f"{side}.layers.{n}"
            for i, (part, name) in enumerate(sublayers.items()):
                norm(f"{mine}.around_{part}.norm", f"{his}.sublayer.{i}.norm")
                for end in ("weight", "bias"):
                    if name is None:
                        for one, two in (("inner", "w_1"), ("outer", "w_2")):
                            ours[f"{mine}.{part}.{one}.{end}"] = state[
                                f"{his}.feed_forward.{two}.{end}"
                            ]
                        continue
                    q, k, v, out = (state[f"{his}.{name}.linears.{j}.{end}"] for j in range(4))
                    ours[f"{mine}.{part}.qkv.{end}"] = torch.cat([q, k, v])
                    ours[f"{mine}.{part}.out.{end}"] = out
    return ours


def test_ours_equals_the_lectures_program():
    program = lecture_program()
    depth, vocabularies = 3, (31, 37)
    theirs = program.make_model(*vocabularies, N=depth, d_model=32, d_ff=48, h=4).eval()
    enlarge(theirs)
    block = BlockConfig(32, 4, 48, norm="lecture", norm_eps=1e-6, order="pre")
    config = TransformerConfig(*vocabularies, depth, depth, block, tie="none", head_bias=True)
    ours = Transformer(config).eval()
    ours.load_state_dict(from_lectures(theirs, depth))
    rand = torch.Generator().manual_seed(1)
    source, target = (torch.randint(1, n, (3, 11), generator=rand) for n in vocabularies)
    lengths = torch.tensor([11, 4, 8])
    padded = torch.arange(11) < lengths.unsqueeze(1)
    with torch.no_grad():
        mask, later = padded.unsqueeze(-2), program.subsequent_mask(11)
        right = theirs.generator(theirs(source, target, mask, later))
        full = ours(source, target, lengths)
        state = ours.start(source, lengths)
        steps = [ours.step(ids, state)[0] for ids in target.split([1, 1, 5, 4], dim=1)]
    assert 1 < full.std() < 10
    for logits in (full, torch.cat(steps, dim=1)):
        torch.testing.assert_close(logits.log_softmax(-1), right, atol=2e-5, rtol=0)
