"""The questions that every model family answers."""

from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from beartype import beartype
from jaxtyping import jaxtyped
from torch import Tensor, nn

import regard.attention.multihead as multihead
import regard.layers.heads as heads
import regard.layers.recurrent.attention as recurrent
import regard.models.convolutional as convolutional
import regard.models.ladder as ladder
import regard.models.state as states
from regard.attention.positions import Distances
from regard.attention.watch import watch
from regard.files.weights import state_of
from regard.layers.block import BlockConfig
from regard.layers.recurrent.decoder import CellConfig
from regard.models import MODELS, family
from regard.models.bert import PRESETS, Bert, BertConfig
from regard.models.conformer import Conformer, ConformerConfig
from regard.models.convolutional import Convolutional, ConvolutionalConfig
from regard.models.gpt import GPT, GPTConfig
from regard.models.ladder import RUNGS, LadderConfig
from regard.models.recurrent import Recurrent, RecurrentConfig
from regard.models.transformer import Transformer, TransformerConfig
from tests.models import laws
from tests.models.laws import close

BLOCK = BlockConfig(width=16, heads=4, ffn_width=24, dropout=0.0)
SMALL = TransformerConfig(23, 23, 2, 2, BLOCK, max_length=32)
DECODER = GPTConfig(23, 2, replace(BLOCK, feed_forward="gelu_tanh"), max_length=32)
CELL = CellConfig(16, dropout=0.0)
RECURRENT = RecurrentConfig(23, 23, 1, 1, CELL, max_length=32)
CONVOLUTIONAL = ConvolutionalConfig(
    23, 23, 2, 2, convolutional.GatedConfig(16, 3, 0.0), max_length=32
)
SOUND = ConformerConfig(
    8, 23, channels=6, depth=2, block=replace(BLOCK, feed_forward="swish"), kernel=5, max_length=32
)
LLAMA = replace(BLOCK, norm="rms", feed_forward="swiglu", bias=False)


def small(row: str, **changes) -> BertConfig:
    """Return a small encoder of a row."""
    config = PRESETS[row]
    block = replace(config.block, width=16, heads=4, ffn_width=24, dropout=0.0)
    block = replace(block, attention_dropout=0.0)
    sizes = {"vocab": 23, "depth": 2, "max_length": 32, "head_dropout": 0.0, "block": block}
    return replace(config, **{**sizes, **changes})


# family -> small models of all its kinds
FAMILIES = {
    "transformer": {
        "pre": SMALL,
        "post": replace(
            SMALL, encoder_depth=1, block=replace(BLOCK, order="post", feed_forward="swish")
        ),
        "grouped, learned": replace(
            SMALL,
            target_vocab=19,
            tie="target",
            position="learned",
            block=replace(BLOCK, kv_heads=2, norm="rms", feed_forward="swiglu", bias=False),
        ),
        "rotary, additive": replace(
            SMALL,
            target_vocab=19,
            tie="none",
            position="rope",
            head_bias=True,
            block=replace(BLOCK, kv_heads=1, norm="lecture", score="additive", head_width=6),
        ),
        "nowhere, cosine": replace(
            SMALL,
            position="none",
            scale_embedding=False,
            block=replace(BLOCK, order="post", feed_forward="gelu", score="cosine"),
        ),
        "t5": replace(
            SMALL,
            position="t5",
            scale_embedding=False,
            scale_head=True,
            init="t5",
            block=replace(BLOCK, norm="rms", score="product", bias=False, head_width=6),
        ),
        "t5 1.1": replace(
            SMALL,
            tie="embeddings",
            position="t5",
            scale_embedding=False,
            init="t5",
            block=replace(
                BLOCK, norm="rms", score="product", bias=False, feed_forward="geglu_tanh"
            ),
        ),
        "bart": replace(
            SMALL,
            position="learned",
            embed_norm="layer",
            scale_embedding=False,
            head_bias=True,
            init="normal",
            block=replace(BLOCK, order="post", feed_forward="gelu"),
        ),
        "dropped": replace(
            SMALL, block=replace(BLOCK, dropout=0.2, attention_dropout=0.1, ffn_dropout=0.1)
        ),
        "relative": replace(SMALL, position="shaw", block=replace(BLOCK, kv_heads=2, head_width=6)),
        **{
            name: replace(SMALL, encoder_depth=1, position=name)
            for name in ("yarn", "alibi", "xl", "kerple_log", "kerple_power", "fire")
        },
    },
    "gpt": {
        "gpt2": replace(DECODER, block=replace(DECODER.block, dropout=0.2)),
        "llama": replace(
            DECODER, position="rotary", tie=False, block=replace(LLAMA, kv_heads=2, head_width=6)
        ),
        "mistral": replace(DECODER, position="rotary", window=4, block=replace(LLAMA, kv_heads=1)),
        "bloom": replace(DECODER, position="alibi", embed_norm="layer"),
        "palm": replace(
            DECODER,
            position="rotary",
            block=replace(LLAMA, kv_heads=1, norm="layer_nobias", order="parallel"),
        ),
        "qwen2": replace(
            DECODER,
            position="rotary",
            window=3,
            window_layers=(1,),
            block=replace(LLAMA, kv_heads=2, attention_bias="qkv"),
        ),
        "qwen3": replace(
            DECODER,
            position="rotary",
            tie=False,
            block=replace(LLAMA, head_width=6, head_norm="rms"),
        ),
        "gpt_neox": replace(
            DECODER,
            position="rotary_part",
            position_share=0.5,
            block=replace(DECODER.block, order="parallel_norms", dropout=0.2),
        ),
        "gemma2": replace(
            DECODER,
            position="rotary",
            window=4,
            window_layers=(0,),
            scale_embedding=True,
            logit_cap=5.0,
            block=replace(LLAMA, norm="rms_plus1", order="sandwich", score="capped", score_cap=2.0),
        ),
        "gemma3": replace(
            DECODER,
            position="rotary",
            near_base=100.0,
            window=3,
            window_layers=(0,),
            block=replace(
                LLAMA, norm="rms_plus1", order="sandwich", head_norm="rms_plus1", score_scale=0.3
            ),
        ),
        "post": replace(
            DECODER, position="none", head_bias=True, block=replace(BLOCK, order="post")
        ),
        "prefix": replace(DECODER, position="sinusoidal", prompt="bidirectional"),
        "cope": replace(DECODER, position="cope"),
        "xl, grouped": replace(DECODER, position="xl", block=replace(LLAMA, kv_heads=2)),
        "shaw, window": replace(DECODER, position="shaw", window=4),
        "fire, prefix": replace(DECODER, position="fire", prompt="bidirectional"),
    },
    "recurrent": {
        "rnnenc": replace(RECURRENT, block=replace(CELL, attention="none")),
        "rnnenc, deep gru": replace(
            RECURRENT,
            encoder_depth=2,
            decoder_depth=3,
            target_vocab=19,
            tie="target",
            block=replace(CELL, cell="gru", attention="none"),
        ),
        "seq2seq": replace(
            RECURRENT,
            direction="backward",
            tie="none",
            block=replace(CELL, attention="none", readout="tanh", dropout=0.2),
        ),
        "rnnsearch": RECURRENT,
        "rnnsearch, deep gru": replace(
            RECURRENT, encoder_depth=2, decoder_depth=2, block=replace(CELL, cell="gru")
        ),
        "after, dot": replace(
            RECURRENT,
            direction="forward",
            head_bias=True,
            block=replace(CELL, attention="dot", order="after", readout="tanh"),
        ),
        "after, location": replace(
            RECURRENT, block=replace(CELL, cell="gru", attention="location", order="after")
        ),
        "before, bilinear": replace(RECURRENT, block=replace(CELL, attention="bilinear")),
        "before, location": replace(RECURRENT, block=replace(CELL, attention="location")),
        "input feeding": replace(
            RECURRENT,
            decoder_depth=2,
            block=replace(CELL, attention="bilinear", order="input_feeding", dropout=0.2),
        ),
    },
    "convolutional": {
        "convs2s": CONVOLUTIONAL,
        "even, deeper": replace(
            CONVOLUTIONAL,
            decoder_depth=3,
            tie="embeddings",
            position="sinusoidal",
            block=replace(CONVOLUTIONAL.block, kernel=4, dropout=0.2),
        ),
        "kernel 1": replace(
            CONVOLUTIONAL,
            target_vocab=19,
            tie="none",
            head_bias=True,
            block=replace(CONVOLUTIONAL.block, kernel=1),
        ),
    },
    "ladder": {
        **{name: LadderConfig(23, 2, BLOCK, max_length=32, rung=name) for name in RUNGS},
        "gated, few": LadderConfig(23, 2, BLOCK, position="learned", max_length=32, gates=4),
        "dropped": LadderConfig(
            23, 1, replace(BLOCK, dropout=0.2), max_length=32, rung="free_weights"
        ),
    },
    "conformer": {
        "ctc": SOUND,
        "ctc, layer norm": replace(SOUND, convolution_norm="layer", subsampling=2),
        "decoder": replace(SOUND, ctc=False, decoder_depth=2),
        "both, dropped": replace(
            SOUND,
            decoder_depth=1,
            drop_path=0.2,
            block=replace(SOUND.block, dropout=0.2, attention_dropout=0.1, ffn_dropout=0.1),
        ),
        "labels": replace(SOUND, vocab=0, labels=5),
        "labels, attention": replace(SOUND, vocab=0, labels=5, pool="attention", position="rope"),
        "vectors": replace(SOUND, vocab=0),
        "transformer, both": replace(
            SOUND, encoder="transformer", position="sinusoidal", decoder_depth=2
        ),
    },
    "bert": {
        "bert, words": small("bert"),
        "roberta, classify": small("roberta", head="classify", labels=5),
        "albert, tag": small("albert", depth=3, inner_width=6, head="tag", labels=5),
        "deberta, none": small("deberta", head="none", distances=Distances(8, 4)),
        "deberta, words": small("deberta", tie=False, distances=Distances(12, 0, "none")),
        "grouped, mean": small(
            "bert",
            position="rotary",
            types=0,
            embed_norm="none",
            head="classify",
            pool="mean",
            block=replace(BLOCK, kv_heads=2, norm="rms", feed_forward="swiglu", bias=False),
        ),
        "dropped": small("bert", block=replace(BLOCK, dropout=0.2, order="parallel")),
        "distilbert, classify": small("distilbert", head="classify", labels=5),
        "electra, words": small("electra", inner_width=6),
        "mpnet, tag": small("mpnet", head="tag", labels=5),
        "modernbert, words": small("modernbert", depth=3, window=2),
        "modernbert, classify": small(
            "modernbert", head="classify", pool="mean", window_layers=None
        ),
        "modernbert, tag": small(
            "modernbert", depth=3, head="tag", labels=5, window=3, window_layers=(1,)
        ),
    },
}
KINDS = [(name, kind) for name, kinds in FAMILIES.items() for kind in kinds]
# who writes, step by step, after a source or a prompt
PAIRS = (Transformer, Recurrent, Convolutional)
WRITERS = [
    (name, kind)
    for name, kind in KINDS
    if name != "bert" and getattr(FAMILIES[name][kind], "decoder_depth", 1)
]
Writer = Transformer | Recurrent | Convolutional | Conformer | GPT


@pytest.fixture(autouse=True)
def shapes_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the shapes in signatures while testing."""
    verbs = ("forward", "hidden", "encode", "start", "step")
    parts = [(pair, name) for pair in (*PAIRS, Conformer) for name in verbs]
    parts += [(convolutional.DecoderLayer, "forward"), (convolutional.Cross, "forward")]
    parts += [(GPT, name) for name in ("forward", "hidden", "start", "step")]
    parts += [(ladder.Gated, "forward"), (ladder.Average, "forward")]
    parts += [(Bert, "forward"), (Bert, "hidden"), (multihead.MultiHead, "forward")]
    for part, name in parts:
        checked = jaxtyped(typechecker=beartype)(getattr(part, name))
        monkeypatch.setattr(part, name, checked)


def build(name: str, kind: str) -> nn.Module:
    """Return one small model in fp64, its weights enlarged so that differences would show."""
    torch.manual_seed(0)
    model = family(name)[1](FAMILIES[name][kind]).double().eval()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


@pytest.fixture(params=KINDS, ids=lambda pair: " ".join(pair))
def model(request) -> nn.Module:
    """Return a model of every kind."""
    return build(*request.param)


@pytest.fixture(params=WRITERS, ids=lambda pair: " ".join(pair))
def writer(request) -> Writer:
    """Return a model of every kind that writes."""
    return build(*request.param)  # type: ignore[return-value]


def sentences(model: nn.Module, lengths: list[int], seed: int = 0) -> list[Tensor]:
    """Return the tokens of random sentences, full of numbers to the last place.

    There are as many tensors as the model reads: source and target, or one. A sound has as many
    frames of output as its transcript has tokens.
    """
    rand = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    if isinstance(model, Conformer):
        config, frames = model.config, model.stride * max(lengths)
        sound = torch.randn(len(lengths), frames, config.mels, generator=rand)
        sound = sound.to(next(model.parameters()).dtype)
        if not config.decoder_depth:
            return [sound]
        return [sound, torch.randint(3, config.vocab, shape, generator=rand)]
    sizes = [n for key, n in vars(model.config).items() if key.endswith("vocab")]  # type: ignore
    return [torch.randint(3, n, shape, generator=rand) for n in sizes]


def size(model: nn.Module, x: Tensor, n: int) -> int:
    """Return how many tokens of x, or frames if it is a sound, n tokens are."""
    return n * model.stride if x.ndim == 3 else n  # type: ignore


def ask(model: nn.Module, texts: list[Tensor], lengths: list[int] | Tensor | None = None) -> Tensor:
    """Return what the model says of texts, (b, l, ...), or (b, ...) of each as a whole."""
    if isinstance(model, Conformer):
        sound, *target = texts
        rows = None if lengths is None else torch.as_tensor(lengths) * model.stride
        if not (target and model.config.ctc):
            return model(sound, rows, *target)
        # what both heads say, side by side, of one memory
        memory, rows = model.encode(sound, rows)
        written = model.head(model.decode(memory, rows, *target))
        return torch.cat([written, model.ctc_logits(memory, rows)], -1)
    rows = [] if lengths is None else [torch.as_tensor(lengths)] * len(texts)
    return model(*texts, *rows)


def real(out: Tensor, i: int, n: int) -> Tensor:
    """Return what was said of the real tokens of sentence i, or of it as a whole."""
    return out[i : i + 1, :n] if out.ndim == 3 else out[i : i + 1]


def source_and_target(writer: Writer, lengths: list[int]) -> list[Tensor]:
    """Return what to read and what to write then."""
    if isinstance(writer, (*PAIRS, Conformer)):
        return sentences(writer, lengths)
    return [*sentences(writer, lengths), *sentences(writer, lengths, seed=1)]


def begin(writer: Writer, source: Tensor, first: Tensor, lengths: Tensor, capacity: int) -> Any:
    """Start to write after sources; those that are prompts have the first token at their end."""
    if isinstance(writer, GPT):
        source = nn.functional.pad(source, (0, 1)).scatter(1, lengths.unsqueeze(1), first)
        lengths = lengths + 1
    if isinstance(writer, Conformer):
        lengths = lengths * writer.stride
    return writer.start(source, lengths, capacity=capacity)


def at_once(writer: Writer, source: Tensor, target: Tensor, lengths: Tensor) -> Tensor:
    """Return the logits of targets after their sources, all read at once."""
    if isinstance(writer, PAIRS):
        return writer(source, target, lengths)
    if isinstance(writer, Conformer):
        return writer(source, lengths * writer.stride, target)
    rows = []
    for prompt, text, n in zip(source, target, lengths.tolist(), strict=True):
        prefix = torch.tensor([n]) if writer.config.prompt == "bidirectional" else None
        rows.append(writer(torch.cat([prompt[:n], text])[None], prefix=prefix)[0, n:])
    return torch.stack(rows)


def test_every_family_that_reads_text_is_asked():
    words = {name: [f.name for f in fields(family(name)[0])] for name in MODELS}
    asked = {*FAMILIES, "whisper"}  # which reads whole windows: tests/models/test_whisper.py
    assert asked == {name for name in MODELS if any("vocab" in w for w in words[name])}


def test_padding_and_neighbours_never_matter(model: nn.Module):
    lengths = [3, 7, 5]
    texts = sentences(model, lengths)
    together = ask(model, texts, lengths)
    for i, n in enumerate(lengths):
        alone = ask(model, [x[i : i + 1, : size(model, x, n)] for x in texts])
        close(real(together, i, n), alone)
        mixed = sentences(model, lengths, seed=1)  # other padding, other neighbours
        for x, y in zip(mixed, texts, strict=True):
            x[i, : size(model, x, n)] = y[i, : size(model, x, n)]
        close(real(ask(model, mixed, lengths), i, n), alone)
    assert together.std() > 0.1


def test_an_empty_sentence_gives_numbers(model: nn.Module):
    texts = sentences(model, [4, 4])
    logits = ask(model, texts, [4, 0])
    assert logits.isfinite().all()
    close(logits[:1], ask(model, [x[:1] for x in texts]))


def test_the_future_never_matters(writer: Writer):
    texts = sentences(writer, [6, 6])
    seen: list[Tensor] = []

    def keep(_, __, out: Tensor) -> None:
        out.retain_grad()
        seen.append(out)

    last = {GPT: "embed", Recurrent: "decoder.tokens", Conformer: "decoder.embed"}
    name = next((name for kind, name in last.items() if isinstance(writer, kind)), "target")
    embed = writer.get_submodule(name)
    embed.register_forward_hook(keep)
    logits = ask(writer, texts)
    for now in (0, 3):
        (grad,) = torch.autograd.grad(logits[:, now].sum(), seen[-1], retain_graph=True)
        assert grad[:, now + 1 :].eq(0).all() and grad[:, : now + 1].ne(0).any()


@pytest.mark.parametrize("chunks", [[1] * 9, [4, 1, 3, 1], [9]])
def test_cached_equals_full(writer: Writer, chunks: list[int]):
    source, target = source_and_target(writer, [9, 4, 6])
    lengths = torch.tensor([9, 4, 6])
    full = at_once(writer, source, target, lengths)
    with torch.no_grad():
        state = begin(writer, source, target[:, :1], lengths, capacity=9)
        parts = [writer.step(ids, state)[0] for ids in target.split(chunks, dim=1)]
    close(torch.cat(parts, dim=1), full)
    assert state.length == 9 and state.sentences == 3


@pytest.mark.parametrize("room", [1, 64])
def test_cached_equals_full_while_hypotheses_move(writer: Writer, room: int, monkeypatch):
    monkeypatch.setattr(states, "ROOM", room)  # so that memory runs out, or does not
    source, _ = source_and_target(writer, [6, 3, 5, 4])
    lengths = torch.tensor([6, 3, 5, 4])
    vocab = writer.head.out_features
    rand = torch.Generator().manual_seed(5)
    with torch.no_grad():
        texts = torch.full((4, 1, 1), 1)  # (sentence, hypothesis, token)
        state = begin(writer, source, texts[:, 0], lengths, capacity=16)
        left = torch.arange(4)
        for step in range(8):
            fresh = texts[..., -1:].flatten(0, 1)
            logits, state = writer.step(fresh, state)
            rows = left.repeat_interleave(state.hypotheses)
            full = at_once(writer, source[rows], texts.flatten(0, 1), lengths[rows])
            close(logits[:, -1], full[:, -1])
            if step in (3, 5):  # some sentences are finished
                stay = torch.tensor([0, 2, 3] if step == 3 else [2, 0])
                state, texts, left = state.keep(stay), texts[stay], left[stay]
            width = (3, 3, 2, 4)[step % 4]  # the beam may grow and shrink
            parents = torch.randint(0, state.hypotheses, (len(left), width), generator=rand)
            state = state.select(parents)
            assert (state.hypotheses, state.sentences) == (width, len(left))
            texts = texts.gather(1, parents.unsqueeze(-1).expand(-1, -1, texts.shape[-1]))
            new = torch.randint(3, vocab, (len(left), width, 1), generator=rand)
            texts = torch.cat([texts, new], dim=-1)


def test_every_parameter_learns(model: nn.Module):
    logits = ask(model.train(), sentences(model, [8, 8, 8]), [8, 5, 8])
    rand = torch.Generator().manual_seed(2)
    (logits * torch.randn(logits.shape, generator=rand)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        parts = [parameter.grad]
        if name.endswith("qkv.weight"):
            attention = model.get_submodule(name.removesuffix(".qkv.weight"))
            assert isinstance(attention, multihead.MultiHead)
            heads = (attention.heads, attention.kv_heads, attention.kv_heads)
            parts = parameter.grad.split([n * attention.head_width for n in heads])
        assert all(part.abs().max() > 1e-9 for part in parts), name


def test_a_model_builds_on_the_meta_device(model: nn.Module):
    texts = sentences(model, [5, 5])
    laws.builds_on_meta(model, lambda each: ask(each, laws.like(each, *texts), [5, 3]))


def test_save_then_load_is_the_identity(model: nn.Module, tmp_path: Path):
    texts = sentences(model.float(), [5, 5])
    laws.survives_its_folder(model, tmp_path, "translate", lambda each: ask(each, texts))


def test_watching_changes_nothing_and_tells_the_truth(model: nn.Module, monkeypatch):
    model = model.float()
    # of several sounds each would attend alone
    lengths = [7] if isinstance(model, Conformer) else [7, 4]
    texts = sentences(model, [7] * len(lengths))
    plain = ask(model, texts, lengths)
    calls = []

    def attend(q, k, v, **settings) -> Tensor:
        out = real_attend(q, k, v, **settings)
        who = settings.get("watch")
        if calls and isinstance(who, recurrent.CrossAttention):  # which asks word by word
            calls[-1] = *calls[-1][:2], torch.cat([calls[-1][2], out], -2)
        elif who is not None:
            with_heads = [x.view(len(x), -1, *x.shape[-2:]) for x in (v, out)]
            calls.append((with_heads[0], settings.get("add_values"), with_heads[1]))
        return out

    real_attend = multihead.attend
    for home in (multihead, ladder, recurrent, convolutional, heads):
        monkeypatch.setattr(home, "attend", attend)
    with watch(model) as maps:
        watched = ask(model, texts, lengths)
    assert torch.equal(plain, watched)
    # layers that are one module have a name each
    places = model.named_modules(remove_duplicate=False)
    kinds = (multihead.MultiHead, ladder.Gated, ladder.Average)
    kinds += (recurrent.CrossAttention, convolutional.Cross, heads.Attentive)
    names = {name for name, module in places if isinstance(module, kinds)}
    assert set(maps.names()) == names and len(names) == len(calls)
    for name, (v, add, out) in zip(maps.names(), calls, strict=True):
        weights = maps[name].weights()
        values = v.repeat_interleave(weights.shape[1] // v.shape[1], dim=1)
        size = max(1.0, values.abs().max().item())
        right = weights @ values if add is None else weights @ values + add(weights)
        torch.testing.assert_close(right, out, atol=1e-6 * size, rtol=0)


def test_dropout_is_for_training_only_and_seeded(model: nn.Module):
    texts, draws = sentences(model, [6, 6]), model.config.block.dropout > 0
    laws.draws_in_training_only(model, lambda each: ask(each, texts), draws)


def test_a_functional_call_computes_with_its_weights_and_leaves_the_model_its_own(model: nn.Module):
    texts = sentences(model, [6, 6])
    texts = [texts[0], None, *texts[1:]] if isinstance(model, Conformer) else texts
    own = state_of(model)
    lent = {name: x + 0.1 if x.is_floating_point() else x for name, x in own.items()}
    out = torch.func.functional_call(model, {n: lent[n] for n in own}, tuple(texts))
    after = state_of(model)
    assert list(after) == list(own) and all(after[name] is own[name] for name in own)
    other = deepcopy(model)
    for name, tensor in state_of(other).items():
        tensor.data.copy_(lent[name])
    torch.testing.assert_close(out, other(*texts), atol=1e-9, rtol=1e-9)


def test_no_module_with_weights_stands_in_two_places(model: nn.Module):
    places = model.named_modules(remove_duplicate=False)
    owners = [module for _, module in places if [*module.parameters(recurse=False)]]
    assert len(owners) == len(set(owners))
