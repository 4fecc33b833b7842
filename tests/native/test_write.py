"""Texts that are continued in C: the tokens of the search, to the bit in every batch."""

import random

import pytest
import torch
from torch import nn

from regard import native
from regard.decode.constraints import Constraints, forbid
from regard.decode.decoder import decode
from regard.decode.options import Decoding
from regard.errors import UsageError
from regard.models.gpt import GPT
from regard.native import fast
from tests.native.test_kernel_fuzz import build
from tests.native.test_native import of_any_shape
from tests.searching import greedy

pytestmark = pytest.mark.skipif(native.plain() is None, reason="no kernels here")


def written(model, texts, limits, dtype=torch.float32, kept=None, **more):
    """What the kernel writes, which must know the model."""
    with torch.inference_mode(), fast(model, frozen=True, dtype=dtype, kept=kept):
        found = model.continue_texts(texts, limits, **more)
    assert found is not None
    return found


def searched(model, texts, limits, **more):
    """The same by the search, without kernels."""
    ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    lengths = torch.tensor([len(text) for text in texts])
    last = torch.tensor([text[-1] for text in texts])
    with torch.inference_mode():
        found = greedy(model, ids, lengths, max_length=limits, begin=last, **more)
    return [(one.ids, one.steps) for (one,) in found]


def some_texts(rng: random.Random, vocab: int, count: int) -> list[list[int]]:
    return [[rng.randrange(vocab) for _ in range(rng.randint(1, 60))] for _ in range(count)]


@pytest.mark.parametrize("seed", range(12))
def test_the_tokens_of_the_search_come_out(seed):
    rng = random.Random(seed)
    while True:
        model, _ = of_any_shape(rng)
        if type(model) is GPT and model.config.position != "alibi":
            break
    vocab = model.config.vocab
    texts = some_texts(rng, vocab, rng.choice([1, 2, 17, 70]))
    limits = [rng.randint(1, 12) for _ in texts]
    never = [3, 5]
    found = written(model, texts, limits, ends=[7], never=never)
    wanted = searched(model, texts, limits, eos=7, adjust=[forbid(*never)])
    for (ids, likely), (tokens, steps) in zip(found, wanted, strict=True):
        assert (ids[:-1] if ids[-1] == 7 else ids) == tokens
        assert likely == pytest.approx(steps, abs=1e-4)


def confident(seed: int = 0, vocab: int = 5000) -> GPT:
    """A model of several heads on a key, whose products are worth several threads."""
    torch.manual_seed(seed)
    model = build("llama")
    model.head = type(model.head)(32, vocab, bias=False)
    model.embed.tokens = nn.Embedding(vocab, 32)
    return model.eval()


# a stretch has 512 columns, or 256 where a vector is half as wide
VOCABULARIES = {"whole stretches": 1536, "a part of a stretch": 1100, "a last panel of one": 1025}
FORBIDDEN = {"few": [3, 5], "the first stretch": range(512), "the last": range(1024, 1536)}


@pytest.mark.parametrize("never", FORBIDDEN)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_a_vocabulary_of_several_stretches_has_one_sum(vocab, never):
    size, rng = VOCABULARIES[vocab], random.Random(4)
    model = confident(vocab=size)
    with torch.no_grad():  # the largest logits of stretches lie far apart
        model.head.weight.normal_(std=0.3)
        model.head.weight[:256].mul_(0.2)
        model.head.weight[-1].mul_(3)
    forbidden = [token for token in FORBIDDEN[never] if token < size]
    texts = [ids[:30] for ids in some_texts(rng, size, 20)]
    found = written(model, texts, [8] * 20, never=forbidden)
    wanted = searched(model, texts, [8] * 20, eos=-1, adjust=[forbid(*forbidden)])
    assert [ids for ids, _ in found] == [ids for ids, _ in wanted]
    for (_, likely), (_, steps) in zip(found, wanted, strict=True):
        assert likely == pytest.approx(steps, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_each_text_is_the_same_to_the_bit_in_every_batch(dtype):
    model, rng = confident(), random.Random(1)
    texts = [ids[:40] for ids in some_texts(rng, 5000, 64)]
    wanted = written(model, texts, [9] * 64, dtype)
    before = torch.get_num_threads()
    try:
        for threads, size in ((1, 1), (2, 7), (3, 64), (1, 40)):
            torch.set_num_threads(threads)
            found = []
            for first in range(0, len(texts), size):
                some = texts[first : first + size]
                found += written(model, some, [9] * len(some), dtype)
            assert found == wanted
    finally:
        torch.set_num_threads(before)


CHANGES = {
    "in place": lambda w: w.mul_(-1.5),
    "data": lambda w: w.data.mul_(-1.5),
    "NumPy": lambda w: w.detach().numpy().__imul__(-1.5),
    "loaded": lambda w: w.data.copy_(torch.randn_like(w)),
    "one number": lambda w: w.data.view(-1)[3].fill_(90.0),
}
PLACES = {
    "head": lambda m: m.head.weight,
    "embedding": lambda m: m.embed.tokens.weight,
    "inner": lambda m: m.blocks[1].feed_forward.inner.weight,
    "norm": lambda m: m.blocks[0].around_attention.norm.weight,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", PLACES)
def test_weights_that_changed_between_two_calls_are_seen(change, place):
    model, kept = build("llama").eval(), {}
    rng = random.Random(2)
    texts = some_texts(rng, model.config.vocab, 5)
    texts = [ids[:20] for ids in texts]
    old = written(model, texts, [8] * 5, kept=kept)
    with torch.no_grad():
        CHANGES[change](PLACES[place](model))
    new = written(model, texts, [8] * 5, kept=kept)
    assert [ids for ids, _ in new] == [ids for ids, _ in searched(model, texts, [8] * 5, eos=-1)]
    assert new != old


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_change_while_a_text_is_written_are_seen(change):
    texts = {}
    for on in (True, False):
        model, seen = build("llama").eval(), []

        def follow(number: int, token: int, model=model, seen=seen) -> None:
            seen.append(token)
            if len(seen) == 4:
                torch.manual_seed(3)
                with torch.no_grad():
                    CHANGES[change](model.head.weight)
                native.doubt()  # as what streams texts to others does

        ids = torch.tensor([[5, 6, 7]])
        constraints = Constraints(max_length=9, begin=ids[:, -1], eos=-1, on_token=follow)
        with fast(model, on, frozen=True):
            (one,) = decode(model, ids, None, Decoding(beam=1), constraints)[0]
        texts[on] = one.ids, seen
    assert texts[True] == texts[False]


def test_what_is_not_known_is_left_to_the_search():
    model = build("llama").eval()
    with fast(model, frozen=True), torch.inference_mode():
        assert model.why_no_engine() == ""
        assert model.continue_texts([[5, 6]], [3]) is not None
        hook = model.blocks[0].register_forward_hook(lambda *words: None)
        assert "hook" in model.why_no_engine()
        assert model.continue_texts([[5, 6]], [3]) is None
        hook.remove()
        assert model.continue_texts([[5, 6]], [3]) is not None
        assert model.continue_texts([[5, model.config.vocab]], [3]) is None
        model.train()
        assert model.continue_texts([[5, 6]], [3]) is None
    assert model.continue_texts([[5, 6]], [3]) is None
    assert "switched on" in model.why_no_engine()


def test_numbers_that_are_not_finite_are_left_to_the_search():
    model = build("llama").eval()
    with torch.no_grad():
        PLACES["inner"](model)[0, 0] = torch.inf
    with fast(model, frozen=True), torch.inference_mode():
        assert model.continue_texts([[5, 6]], [3]) is None


def test_int8_is_near_and_never_silently_something_else():
    model = build("llama").eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        exact = model(ids)[:, -1]
        with fast(model, frozen=True, dtype=torch.int8):
            state = model.start(ids, capacity=1)
            near = model.step(ids[:, -1:], state)[0][:, -1]
            assert 0 < (near - exact).abs().max() < 0.1 * exact.abs().max()
            model.blocks[0].register_forward_hook(lambda *words: None)
            with pytest.raises(UsageError, match="int8"):
                model.step(ids[:, -1:], model.start(ids, capacity=1))
