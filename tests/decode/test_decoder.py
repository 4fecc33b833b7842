"""Rows join and leave while others are decoded, and every text is what it is alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.decode.constraints import Constraints, forbid
from regard.decode.decoder import Decoder, decode
from regard.decode.options import Decoding
from regard.decode.rules import RuleInputs, Rules
from regard.decode.speech.decoder import OverMemory
from regard.layers.block import BlockConfig
from regard.models import family, preset
from regard.models.captioner import Captioner, CaptionerConfig, DecoderConfig, EncoderConfig
from regard.models.conformer import ConformerConfig
from regard.models.declaration import with_changes
from regard.models.whisper import WhisperConfig
from regard.native import fast
from tests.searching import at_least

VOCAB, EOS = 60, 2
WAYS = {
    "greedy": Decoding(beam=1),
    "sampled": Decoding(temperature=1.0, n_best=2, top_p=0.9, seed=3),
    "beam": Decoding(beam=5, n_best=3),
}


def lively(model: Any) -> Any:
    """A model with definite opinions, some of them about where to stop."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(noise * (0.4 if "head" in name or "tokens" in name else 0.2))
    return model.eval()


def pair(name: str, member: str | None = None, **changes: Any) -> nn.Module:
    size = {"encoder_depth": 1, "decoder_depth": 2, "source_vocab": VOCAB, "target_vocab": VOCAB}
    size |= {"block.width": 32} | ({} if name == "recurrent" else {"block.dropout": 0.0})
    if name == "transformer":
        size |= {"block.heads": 4, "block.ffn_width": 48}
    config = with_changes(preset(name, "tiny", member), size | changes)
    return lively(family(name)[1](config))


def decoder_only(name: str, member: str | None = None, **changes: Any) -> nn.Module:
    size = {"depth": 2, "vocab": VOCAB, "max_length": 64, "block.width": 32, "block.heads": 4}
    config = with_changes(preset(name, "tiny", member), size | changes)
    return lively(family(name)[1](config))


def captioner(kind: str) -> nn.Module:
    sight = with_changes(preset("vit", "tiny", "vit"), {"image": 16, "patch": 4, "depth": 1})
    block = BlockConfig(32, 4, 48, feed_forward="gelu", dropout=0.0)
    cell = with_changes(DecoderConfig().cell, {"width": 32})
    writer = DecoderConfig(kind, VOCAB, 2, block, cell)
    return lively(Captioner(CaptionerConfig(EncoderConfig("vit", sight), writer)))


def whisper() -> OverMemory:
    block = BlockConfig(32, 4, 48, feed_forward="gelu", dropout=0.0)
    config = WhisperConfig(12, VOCAB, 1, 2, block, max_frames=20)
    return OverMemory(lively(family("whisper")[1](config)))


def conformer() -> OverMemory:
    changes = {"vocab": VOCAB, "depth": 1, "decoder_depth": 2, "block.width": 32, "block.heads": 4}
    config = with_changes(replace(ConformerConfig(), ctc=False), changes)
    return OverMemory(lively(family("conformer")[1](config)))


MODELS: dict[str, Callable[[], Any]] = {
    "transformer": lambda: pair("transformer"),
    "rotary, grouped": lambda: pair("transformer", **{"position": "rotary", "block.kv_heads": 2}),
    "t5": lambda: pair("transformer", "t5"),
    "bart": lambda: pair("transformer", "bart"),
    "rnnsearch": lambda: pair("recurrent"),
    "luong": lambda: pair("recurrent", "luong"),
    "location": lambda: pair("recurrent", **{"block.attention": "location"}),
    "convolutional": lambda: pair("convolutional"),
    "gpt2": lambda: decoder_only("gpt", "gpt2"),
    "llama": lambda: decoder_only("gpt", "llama"),
    "bloom": lambda: decoder_only("gpt", "bloom"),
    "mistral, window": lambda: decoder_only("gpt", "mistral", window=4),
    "gemma3": lambda: decoder_only("gpt", "gemma3", window=4),
    "ladder": lambda: decoder_only("ladder"),
    "captioner": lambda: captioner("transformer"),
    "recurrent captioner": lambda: captioner("recurrent"),
    "whisper": whisper,
    "conformer": conformer,
}


def sources(name: str, count: int, seed: int) -> tuple[Tensor, Tensor | None]:
    """Sources of different lengths, as the model reads them."""
    generator = torch.Generator().manual_seed(seed)
    if "captioner" in name:
        return torch.randn(count, 3, 16, 16, generator=generator), None
    longest = 5 + seed % 7
    lengths = torch.randint(1, longest + 1, (count,), generator=generator)
    lengths[0] = longest
    if name in ("whisper", "conformer"):
        longest, lengths = (20, lengths.fill_(20)) if name == "whisper" else (longest, lengths)
        return torch.randn(count, longest, 32, generator=generator), lengths
    ids = torch.randint(4, VOCAB, (count, longest), generator=generator)
    return ids.masked_fill(torch.arange(longest) >= lengths.unsqueeze(1), 0), lengths


def constraints(name: str, count: int, seed: int, lengths: Tensor | None, ids: Tensor) -> Any:
    """What each source of a group may be answered with: no two groups are alike."""
    begin = None
    if name in GENERATORS and lengths is not None:
        begin = ids.gather(1, lengths.unsqueeze(1) - 1)
    if name == "whisper":
        begin = torch.arange(seed, seed + 2 * count).view(count, 2) % VOCAB
    rules = Rules({"repetition_penalty": 1.0 + seed / 9}, RuleInputs([EOS], [[1]] * count))
    return Constraints(
        begin=begin,
        prefix=[[7, 9 + n][: (seed + n) % 3] for n in range(count)],
        max_length=[3 + (5 * n + 3 * seed) % 14 for n in range(count)],
        adjust=[forbid(0, 1, 10 + seed), at_least(seed % 4), *([rules] if seed % 2 else [])],
        ends=[5] if seed % 2 else [],
        lines=[100 * seed + n for n in range(count)],
        seed=seed,
    )


GENERATORS = ("gpt2", "llama", "bloom", "mistral, window", "gemma3", "ladder")
# step -> how many rows join then
JOINS = {0: 3, 1: 1, 4: 4, 5: 2, 9: 1}


def row_of(given: Constraints, n: int) -> Constraints:
    """The constraints of one row."""
    rules = [
        Rules(one.rules, RuleInputs(one.given.ends, [one.given.before[n]]))
        if isinstance(one, Rules)
        else one
        for one in given.adjust
    ]
    return replace(
        given,
        begin=None if given.begin is None else given.begin[n : n + 1],
        prefix=[given.prefix[n]],
        max_length=[given.max_length[n]],
        lines=[given.lines[n]],
        adjust=rules,
    )


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_whoever_joins_or_leaves_every_row_is_as_alone(name, way, native):
    torch.manual_seed(0)
    model, options = MODELS[name](), WAYS[way]
    decoder = Decoder(model, options)
    admitted: dict[int, tuple[Tensor, Tensor | None, Constraints]] = {}
    texts: dict[int, list] = {}
    dropped: set[int] = set()
    step = together = 0
    with fast(getattr(model, "model", model) if native else nn.Identity()):
        while len(decoder) or step <= max(JOINS):
            if step in JOINS:
                count = JOINS[step]
                source, lengths = sources(name, count, step)
                given = constraints(name, count, step, lengths, source)
                for n, row in enumerate(decoder.admit(source, lengths, given)):
                    size = source.shape[1] if lengths is None else int(lengths[n])
                    own = source[n : n + 1] if "captioner" in name else source[n : n + 1, :size]
                    length = None if lengths is None else lengths[n : n + 1]
                    admitted[row] = own, length, row_of(given, n)
            if step == 6:
                dropped = {row for row in admitted if row not in texts and row % 4 == 0}
                decoder.drop(dropped)
            texts |= decoder.step()
            together = max(together, len({s.step for b in decoder.batches for s in b.searches}))
            step += 1
        assert together > 1 and dropped and set(texts) == set(admitted) - dropped
        assert len({tuple(some[0].ids) for some in texts.values()}) > 4
        for row, found in texts.items():
            source, lengths, given = admitted[row]
            (alone,) = decode(model, source, lengths, options, given)
            assert [h.ids for h in found] == [h.ids for h in alone], row
            for h, other in zip(found, alone, strict=True):
                torch.testing.assert_close(h.steps, other.steps, atol=1e-5, rtol=1e-5)
                assert h.score == pytest.approx(other.score, abs=1e-5)


def test_rows_join_after_all_others_have_left():
    model = MODELS["transformer"]()
    decoder = Decoder(model, Decoding(beam=3))
    source, lengths = sources("transformer", 2, 1)
    texts = []
    for _ in range(2):
        rows, found = decoder.admit(source, lengths), {}
        while len(decoder):
            found |= decoder.step()
        texts.append([found[row] for row in rows])
    assert decoder.step() == {} and texts[0] == texts[1]
    assert texts[0] == decode(model, source, lengths, Decoding(beam=3))
    decoder.drop(decoder.admit(source, lengths))  # before their first step
    assert len(decoder) == 0 and decoder.step() == {}


def test_a_row_that_is_streamed_ends_where_its_listener_says():
    model = MODELS["llama"]()
    heard: dict[str, list[int]] = {"one": [], "other": []}

    def listen(name: str, most: int) -> Callable[[int, int], bool]:
        def on_token(row: int, token: int) -> bool:
            heard[name].append(token)
            return len(heard[name]) == most

        return on_token

    decoder, texts = Decoder(model, Decoding(beam=1)), {}
    for name, most in (("one", 4), ("other", 7)):
        source, lengths = sources("llama", 1, most)
        given = Constraints(begin=source[:, -1:], eos=-1, max_length=9, on_token=listen(name, most))
        decoder.admit(source, lengths, given)
        texts |= decoder.step()
    while len(decoder):
        texts |= decoder.step()
    assert [len(heard["one"]), len(heard["other"])] == [4, 7]
    assert [texts[0][0].ids, texts[1][0].ids] == [heard["one"], heard["other"]]
