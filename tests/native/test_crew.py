"""Sentences that join and leave an engine at any step: the texts of one call, to the bit."""

import random

import pytest
import torch

from regard import native
from regard.decode.constraints import Constraints, forbid
from regard.decode.decoder import Decoder, decode
from regard.decode.options import Decoding
from regard.errors import UsageError
from tests.native.test_engine import EOS, NEVER, SMALL, VARIANTS, build, by_engine, sources

pytestmark = pytest.mark.skipif(not native.status().enabled, reason=str(native.status()))
RULES = Constraints(eos=EOS, adjust=[forbid(*NEVER)])


def admit(decoder: Decoder, ids: list[int], limit: int, **rules) -> int:
    own = {"max_length": [limit], **rules}
    return decoder.admit(
        torch.tensor([ids]), None, Constraints(RULES.bos, None, EOS, adjust=RULES.adjust, **own)
    )[0]


def stepped(model, texts, limits, seed: int, dtype=torch.float32, **options):
    """Texts of sentences that come one by one, at random steps; some that are given up beside."""
    rng, found, numbers, gone = random.Random(seed), {}, {}, set()
    with native.fast(model, frozen=True, dtype=dtype):
        decoder = Decoder(model, Decoding(**options))
        waiting = list(enumerate(zip(texts, limits, strict=True)))
        while waiting or len(decoder):
            for _ in range(min(len(waiting), rng.choice([0, 0, 1, 2, 9]))):
                place, (ids, limit) = waiting.pop(0)
                numbers[admit(decoder, ids, limit)] = place
                if rng.random() < 0.3:
                    gone.add(admit(decoder, ids[::-1], limit))
            found |= decoder.step()
            left = [number for number in gone if number not in found]
            decoder.drop(dropped := [number for number in left if rng.random() < 0.3])
            gone.difference_update(dropped)
            assert not decoder.batches, "the search in Python was asked"
    assert set(found) == {*numbers, *gone}
    return [
        texts
        for _, texts in sorted((numbers[n], texts) for n, texts in found.items() if n in numbers)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("beam", [1, 5])
@pytest.mark.parametrize("threads", [1, 3])
def test_sentences_that_come_and_go_have_the_texts_of_one_call(dtype, beam, threads):
    model, texts = build(SMALL, 1), sources(60, seed=1)
    limits = [4 + len(text) for text in texts]
    n_best = min(beam, 2)
    wanted = by_engine(model, texts, limits, dtype=dtype, beam=beam, n_best=n_best)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = stepped(model, texts, limits, beam + threads, dtype, beam=beam, n_best=n_best)
    finally:
        torch.set_num_threads(before)
    assert found == wanted


@pytest.mark.parametrize("name", ["BART", "T5", "gelu, learned"])
def test_every_kind_of_position_joins_at_any_step(name):
    model, texts = build(VARIANTS[name]), sources(25, seed=3)
    limits = [5 + len(text) for text in texts]
    assert stepped(model, texts, limits, 7) == by_engine(model, texts, limits)


def test_prefixes_limits_and_ends_are_those_of_each_row():
    model, texts = build(SMALL, 2), sources(12, seed=5)
    prefixes = [[5 + n] * (n % 4) for n in range(12)]
    limits = [6 + n for n in range(12)]
    wanted = by_engine(model, texts, limits, prefix=prefixes, ends=(7,))
    with native.fast(model, frozen=True):
        decoder, found = Decoder(model), {}
        for ids, prefix, limit in zip(texts, prefixes, limits, strict=True):
            admit(decoder, ids, limit, prefix=[prefix], ends=(7,))
            found |= decoder.step()
        while len(decoder):
            found |= decoder.step()
    assert [found[n] for n in range(12)] == wanted


def test_places_are_used_again_and_longer_sentences_get_a_larger_room():
    model, texts = build(SMALL), sources(700, longest=4, seed=2)
    texts[300] = [5] * 200
    limits = [3] * 700
    limits[400] = 300
    wanted = by_engine(model, texts, limits)
    most, found = 0, {}
    with native.fast(model, frozen=True):
        decoder = Decoder(model)
        for ids, limit in zip(texts, limits, strict=True):
            admit(decoder, ids, limit)
            found |= decoder.step()
            most = max(most, len(decoder.crews))
        while len(decoder):
            found |= decoder.step()
        assert not decoder.crews and most <= 3
    assert [found[n] for n in range(700)] == wanted


def test_who_is_dropped_leaves_at_once():
    model = build(SMALL)
    with native.fast(model, frozen=True):
        decoder = Decoder(model)
        rows = decoder.admit(torch.tensor([[5, 6], [7, 8], [9, 10]]), None, RULES)
        decoder.step()
        decoder.drop(rows[:2])
        assert len(decoder) == 1
        decoder.drop([rows[2], 99])
        assert len(decoder) == 0 and not decoder.crews and decoder.step() == {}


CHANGES = {
    "in place": lambda w: w.mul_(-1.5),
    "data": lambda w: w.data.mul_(-1.5),
    "NumPy": lambda w: w.detach().numpy().__imul__(-1.5),
    "one number": lambda w: w.data.view(-1)[3].fill_(90.0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", ["head", "inner", "position"])
@pytest.mark.parametrize("by", ["doubt", "another row"])
def test_weights_that_change_between_two_steps_are_seen(change, place, by):
    texts = {}
    for kernels in (True, False):
        model = build(VARIANTS["gelu, learned"])
        weight = {
            "head": model.head.weight,
            "inner": model.decoder[1].feed_forward.inner.weight,
            "position": model.target.position.table.weight,
        }[place]
        with native.fast(model, kernels, frozen=True):
            decoder, found = Decoder(model, Decoding(beam=3)), {}
            rows = decoder.admit(torch.tensor([[5, 6, 7], [8, 9, 4]]), None, RULES)
            for _ in range(3):
                found |= decoder.step()
            with torch.no_grad():
                CHANGES[change](weight)
            if by == "doubt":  # as what streams texts to others does
                native.doubt()
            else:
                admit(decoder, [11, 12], 9)
            assert bool(decoder.crews) == kernels
            while len(decoder):
                found |= decoder.step()
        texts[kernels] = [[h.ids for h in found[row]] for row in rows]
    assert texts[True] == texts[False]


def test_a_hook_between_two_steps_is_called():
    model, heard = build(SMALL), []
    with native.fast(model, frozen=True):
        decoder, found = Decoder(model), {}
        decoder.admit(torch.tensor([[5, 6, 7]]), None, RULES)
        decoder.step()
        hook = model.decoder[0].register_forward_hook(lambda *_: heard.append(1))
        while len(decoder):
            found |= decoder.step()
        hook.remove()
    assert heard
    (wanted,) = decode(model, torch.tensor([[5, 6, 7]]), None, Decoding(), RULES)
    assert [h.ids for h in found[0]] == [h.ids for h in wanted]


def test_what_the_engine_does_not_know_is_searched_beside_it():
    model, ids = build(SMALL), torch.tensor([[5, 6, 7]])
    odd = Constraints(eos=EOS, adjust=[lambda logits, written: logits])
    with native.fast(model, frozen=True):
        decoder = Decoder(model)
        decoder.admit(ids, None, RULES)
        decoder.admit(ids, None, odd)
        decoder.admit(torch.tensor([[5, 28, 99]]).clamp(max=28), None, RULES)
        assert len(decoder.crews) == 1 and len(decoder.batches) == 1 and len(decoder) == 3
        model.decoder_norm.weight.data[0] = torch.nan
        decoder.step()
        assert not decoder.crews, "a number is not finite"
    with native.fast(model, frozen=True, dtype=torch.int8), pytest.raises(UsageError, match="int8"):
        Decoder(model).admit(ids, None, odd)
