"""Laws of writing: exhaustive search, batches that do not matter, draws that follow the softmax."""

from dataclasses import replace
from itertools import product
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st
from torch import Tensor

from regard.decode import rules as decoding_rules
from regard.decode.batching import in_batches
from regard.decode.constraints import EOS, Constraints, forbid
from regard.decode.decoder import decode
from regard.decode.options import PENALTIES, Decoding, penalty
from regard.decode.rules import DecodingStep, RuleInputs, Rules, checked
from regard.decode.search import _argmax, _continuations, keep_min_p, keep_top_k, keep_top_p
from regard.errors import UsageError
from regard.models.declaration import with_changes
from regard.models.transformer import SIZES, Transformer, TransformerConfig
from tests.searching import at_least, beam, greedy, judge, sample

VOCAB = 5


class Past:
    """The state of a Chain: the tables of the sentences and what each hypothesis wrote."""

    def __init__(self, numbers: Tensor):
        self.numbers, self.hypotheses = numbers, 1
        self.written = numbers.new_zeros(len(numbers), 1, 1)

    @property
    def sentences(self) -> int:
        return len(self.numbers)

    def select(self, parents: Tensor) -> "Past":
        self.hypotheses = parents.shape[1]
        index = parents.unsqueeze(-1).expand(-1, -1, self.written.shape[2])
        self.written = self.written.gather(1, index)
        return self

    def keep(self, sentences: Tensor) -> "Past":
        self.numbers, self.written = self.numbers[sentences], self.written[sentences]
        return self


class Chain:
    """A writer whose next token depends on its last two and on the number of the sentence."""

    def __init__(self, sentences: int = 4, vocab: int = VOCAB, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        shape = (sentences, vocab, vocab, vocab)
        self.table = 2 * torch.randn(shape, dtype=torch.float64, generator=generator)
        self.rows: list[int] = []

    def start(self, source, lengths=None, *, capacity):
        return Past(source[:, 0])

    def step(self, ids, state):
        self.rows.append(len(ids))
        logits = []
        for token in ids.unbind(1):
            new = token.view(state.sentences, state.hypotheses, 1)
            state.written = torch.cat([state.written, new], dim=2)
            one, two = state.written[..., -2], state.written[..., -1]
            logits.append(self.table[state.numbers.unsqueeze(1), one, two].flatten(0, 1))
        return torch.stack(logits, 1), state

    def logprobs(self, number: int, text: list[int]) -> list[float]:
        """Return the log-probability of each token of a text, by the plain definition."""
        past, steps = [0, 1], []
        for token in text:
            row = self.table[number, past[-2], past[-1]].log_softmax(0)
            steps.append(float(row[token]))
            past.append(token)
        return steps


def sources(count: int) -> Tensor:
    return torch.arange(count).unsqueeze(1)


def every_text(chain: Chain, number: int, most: int, divisor, begin=()) -> list[tuple]:
    """Return (score, ids) of all texts of at most so many tokens, best first."""
    rest = [token for token in range(chain.table.shape[1]) if token != EOS]
    found = []
    for length in range(most + 1):
        for text in product(rest, repeat=length):
            if text[: len(begin)] == tuple(begin):
                whole = list(text) if length == most else [*text, EOS]
                logprob = sum(chain.logprobs(number, whole))
                found.append((logprob / divisor(len(whole)), list(text)))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("patience", [1.0, inf])
def test_a_wide_beam_is_exhaustive_search(name, patience):
    chain = Chain()
    wide = beam(
        chain, sources(4), beam=400, n_best=20, length_penalty=name, max_length=4, patience=patience
    )
    for number, found in enumerate(wide):
        best = every_text(chain, number, 4, penalty(name))[:20]
        assert [h.ids for h in found] == [ids for _, ids in best]
        torch.testing.assert_close([h.score for h in found], [s for s, _ in best])


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("name", PENALTIES)
def test_hypotheses_tell_the_truth_about_themselves(width, name):
    chain = Chain(9, vocab=7, seed=3)
    for number, found in enumerate(
        beam(chain, sources(9), beam=width, n_best=width, length_penalty=name, max_length=8)
    ):
        assert len({tuple(h.ids) for h in found}) == len(found) == width
        assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)
        for h in found:
            assert EOS not in h.ids and len(h.ids) <= 8
            whole = h.ids if len(h.steps) == len(h.ids) else [*h.ids, EOS]
            assert len(whole) == len(h.steps) and (len(h.ids) == 8 or whole[-1] == EOS)
            torch.testing.assert_close(h.steps, chain.logprobs(number, whole))
            torch.testing.assert_close(h.logprob, sum(h.steps))
            torch.testing.assert_close(h.score, h.logprob / penalty(name)(len(whole)))


def test_greedy_is_a_beam_of_one():
    chain = Chain(50, vocab=9)
    one = greedy(chain, sources(50), max_length=12)
    other = beam(chain, sources(50), beam=1, max_length=12)
    assert [h.ids for (h,) in one] == [h.ids for (h,) in other]
    torch.testing.assert_close([h.score for (h,) in one], [h.score for (h,) in other])


def test_what_never_stops_early_finds_what_endless_patience_finds():
    chain = Chain(60, vocab=9, seed=5)
    how = {"beam": 3, "length_penalty": "average", "max_length": 12}
    found = [text.ids for (text,) in beam(chain, sources(60), stopping="never", **how)]
    patient = [text.ids for (text,) in beam(chain, sources(60), patience=inf, **how)]
    early = [text.ids for (text,) in beam(chain, sources(60), stopping="length", **how)]
    assert found == patient != early


def test_without_a_length_penalty_giving_up_early_changes_nothing():
    chain = Chain(60, vocab=9, seed=5)
    plain = beam(chain, sources(60), beam=3, length_penalty="none", max_length=12)
    patient = beam(chain, sources(60), beam=3, length_penalty="none", max_length=12, patience=100.0)
    assert plain == patient


@effort(max_examples=60, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 700),
    st.integers(1, 12),
    st.integers(0, 99),
)
def test_dealing_cards_finds_the_best_continuations(sentences, hypotheses, vocab, count, seed):
    generator = torch.Generator().manual_seed(seed)
    logprobs = torch.randn(sentences, hypotheses, vocab, generator=generator)
    logprobs[torch.rand(logprobs.shape, generator=generator) < 0.2] = -inf
    so_far = torch.randn(sentences, hypotheses, generator=generator)
    so_far[:, 1:][torch.rand(sentences, hypotheses - 1, generator=generator) < 0.3] = -inf
    scores, parents, tokens = _continuations(logprobs, so_far, count)
    whole = logprobs + so_far.unsqueeze(-1)
    most = min(count, hypotheses * vocab)
    assert torch.equal(scores[:, :most], whole.flatten(1).topk(most, dim=1).values)
    assert bool((scores[:, most:] == -inf).all())
    place = parents * vocab + tokens
    told = whole.flatten(1).gather(1, place)
    assert torch.equal(told[scores > -inf], scores[scores > -inf])
    for row, sure in zip(place, scores > -inf, strict=True):
        assert len(set(row[sure].tolist())) == int(sure.sum())


def test_finished_sentences_leave():
    chain = Chain(30, vocab=9)
    found = beam(chain, sources(30), beam=3, max_length=20)
    assert chain.rows[0] == 30 and chain.rows[1] <= 90
    assert chain.rows[1:] == sorted(chain.rows[1:], reverse=True)
    assert sum(chain.rows) < 0.8 * 90 * len(chain.rows)
    alone = [beam(chain, sources(30)[i : i + 1], beam=3, max_length=20)[0] for i in range(30)]
    assert [h.ids for (h,) in alone] == [h.ids for (h,) in found]


@pytest.mark.parametrize("write", [greedy, sample, beam])
def test_each_sentence_has_its_own_prefix_and_limit(write):
    chain = Chain(6, vocab=6)
    prefix = [[], [3], [4, 3, 5], [0, 0], [5], []]
    limits = [1, 3, 3, 5, 2, 7]
    found = write(chain, sources(6), prefix=prefix, max_length=limits)
    for number, (h, *_) in enumerate(found):
        assert h.ids[: len(prefix[number])] == prefix[number]
        assert len(h.ids) <= limits[number]
        whole = h.ids if len(h.steps) == len(h.ids) else [*h.ids, EOS]
        torch.testing.assert_close(h.steps, chain.logprobs(number, whole))


def test_a_prefix_is_searched_exhaustively_too():
    chain = Chain()
    prefix = [[3], [4, 4], [], [0, 3, 4]]
    found = beam(chain, sources(4), beam=400, n_best=3, prefix=prefix, max_length=4)
    for number, texts in enumerate(found):
        best = every_text(chain, number, 4, penalty("average"), prefix[number])[:3]
        assert [h.ids for h in texts] == [ids for _, ids in best]


def test_a_prefix_may_contain_what_is_forbidden():
    chain = Chain(1)
    ((h,),) = beam(chain, sources(1), prefix=[[0, 1]], adjust=[forbid(0, 1)], max_length=6)
    assert h.ids[:2] == [0, 1] and not {0, 1} & set(h.ids[2:]) and h.score > -inf


def test_adjustments_do_what_they_say():
    logits = torch.tensor([[2.0, -1.0, 0.5, 0.0]])
    written = torch.tensor([[0, 1, 0]])
    assert forbid(2, 3)(logits.clone(), written).tolist() == [[2.0, -1.0, -inf, -inf]]
    again = Rules({"repetition_penalty": 2.0}, RuleInputs([EOS], [[2]]))  # the prompt counts, too
    assert again(logits, written, torch.tensor([0])).tolist() == [[1.0, -2.0, 0.25, 0.0]]
    assert at_least(3)(logits.clone(), written).tolist() == logits.tolist()
    assert at_least(4)(logits.clone(), written).tolist() == [[2.0, -1.0, -inf, 0.0]]
    found = beam(Chain(8), sources(8), n_best=5, adjust=[at_least(5), forbid(0, 1)], max_length=9)
    for text in (h.ids for texts in found for h in texts):
        assert len(text) >= 5 and set(text) <= {3, 4}


def support(logits: Tensor) -> set[int]:
    return set((logits[0] > -inf).nonzero().squeeze(1).tolist())


def test_what_can_be_drawn():
    shares = torch.tensor([[0.05, 0.4, 0.15, 0.3, 0.1]])
    for mass, kept in ((0.3, {1}), (0.41, {1, 3}), (0.71, {1, 3, 2}), (1.0, {0, 1, 2, 3, 4})):
        assert support(keep_top_p(shares.log(), mass)) == kept
    for count, kept in ((1, {1}), (2, {1, 3}), (99, {0, 1, 2, 3, 4})):
        assert support(keep_top_k(shares.log(), count)) == kept
    for share, kept in ((0.0, {0, 1, 2, 3, 4}), (0.3, {1, 3, 2}), (0.5, {1, 3}), (1.0, {1})):
        assert support(keep_min_p(shares.log(), share)) == kept


@pytest.mark.parametrize("cut", [{}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 4}])
def test_draws_follow_the_softmax(cut):
    chain, count = Chain(1, vocab=8), 6000
    found = sample(chain, torch.zeros(count, 1, dtype=torch.long), max_length=1, seed=7, **cut)
    first = [(h.ids or [EOS])[0] for (h,) in found]
    seen = torch.bincount(torch.tensor(first), minlength=8).double()
    logits = chain.table[0, 0, 1] / cut.get("temperature", 1.0)
    if "top_k" in cut:
        logits = keep_top_k(logits.unsqueeze(0), cut["top_k"])[0]
    expected = count * logits.softmax(0)
    likely = expected > 0
    assert bool((seen[~likely] == 0).all())
    chi = ((seen - expected).square() / expected)[likely].sum()
    assert chi < 24.3  # one chance in a thousand with 7 degrees of freedom
    for (h,), token in zip(found, first, strict=True):
        assert h.logprob == pytest.approx(float(chain.table[0, 0, 1].log_softmax(0)[token]))


def test_draws_depend_on_seed_and_line_alone():
    chain = Chain(40, vocab=9)
    whole = sample(chain, sources(40), n_best=3, max_length=9, seed=4)
    lines = [31, 5, 17]
    some = sample(chain, sources(40)[lines], n_best=3, max_length=9, seed=4, lines=lines)
    assert some == [whole[i] for i in lines]
    assert whole == sample(chain, sources(40), n_best=3, max_length=9, seed=4)
    assert whole != sample(chain, sources(40), n_best=3, max_length=9, seed=5)
    drawn = [
        sample(chain, sources(40)[[7]], n_best=20, max_length=9, seed=seed, lines=[line])
        for seed, line in ((1, 12), (11, 2), (112, 0))
    ]
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]  # though their digits are the same
    same = sample(chain, sources(40)[[7] * 20], max_length=9, seed=4, lines=range(20))
    assert len({tuple(h.ids) for (h,) in same}) > 5
    assert len({tuple(h.ids) for texts in whole for h in texts}) > 60


def test_temperature_zero_is_greedy():
    chain = Chain(20, vocab=9)
    drawn = sample(chain, sources(20), temperature=0.0, max_length=9)
    assert drawn == greedy(chain, sources(20), max_length=9)


def test_given_texts_are_judged_by_the_definition():
    chain = Chain(5, vocab=6)
    texts = [[3, 4], [], [5] * 150, [0, 1, 3], [4]]
    for number, judged in enumerate(judge(chain, sources(5), None, texts, length_penalty="gnmt")):
        assert judged.ids == texts[number]
        torch.testing.assert_close(judged.steps, chain.logprobs(number, [*texts[number], EOS]))
        length = len(judged.ids) + 1
        assert judged.score == pytest.approx(judged.logprob / ((5 + length) / 6) ** 0.6)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_batches_are_of_like_length_and_answers_in_order(workers):
    lengths = [(7 * i) % 23 for i in range(100)]
    threads = torch.get_num_threads()
    seen: list[list[int]] = []

    def double(items: list[int]) -> list[int]:
        seen.append([lengths[i] for i in items])
        return [2 * i for i in items]

    answers = in_batches(list(range(100)), lengths, double, tokens=60, rows=7, workers=workers)
    assert answers == [2 * i for i in range(100)]
    assert torch.get_num_threads() == threads
    flat = [n for batch in sorted(seen, reverse=True) for n in batch]
    assert flat == sorted(lengths, reverse=True)
    assert all(len(b) <= 7 and (len(b) == 1 or len(b) * b[0] <= 60) for b in seen)
    assert in_batches([], [], double) == []
    assert in_batches([5], [999], lambda items: items, tokens=10) == [5]


def lively(config: TransformerConfig, stop: float) -> Transformer:
    """Return a model with definite opinions, some of them about where to stop."""
    model = Transformer(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(0.2 * noise + float(name.endswith("norm.weight")))
        model.head.bias[EOS] += stop
    return model


def small(position: str = "sinusoidal") -> Transformer:
    config = TransformerConfig(60, 60, position=position, tie="none", head_bias=True)
    config = with_changes(config, SIZES["tiny"])
    block = replace(config.block, kv_heads=2)
    config = replace(config, encoder_depth=1, decoder_depth=2, block=block)
    return lively(config, 6.0).double()


def batch(count: int, longest: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator)
    source = torch.randint(4, 60, (count, longest), generator=generator)
    return source.masked_fill(torch.arange(longest) >= lengths.unsqueeze(1), 0), lengths


@torch.inference_mode()
def test_several_tokens_can_be_read_at_once():
    model = small()
    source, lengths = batch(3)
    state = model.start(source, lengths, capacity=20)
    state.select(torch.zeros(3, 2, dtype=torch.long))
    ids = torch.randint(3, 60, (6, 9), generator=torch.Generator().manual_seed(0))
    parts = [model.step(ids[:, a:b], state)[0] for a, b in ((0, 4), (4, 5), (5, 9))]
    rows = torch.arange(3).repeat_interleave(2)
    full = model(source[rows], ids, lengths[rows])
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-9, rtol=0)


@pytest.mark.parametrize("write", [greedy, sample, beam])
def test_neighbours_never_matter(write):
    model = small()
    source, lengths = batch(24)
    draw = {"lines": range(24)} if write is sample else {}
    together = write(model, source, lengths, **draw)
    assert len({len(texts[0].ids) for texts in together}) > 3
    for i in range(0, 24, 3):
        length = int(lengths[i])
        draw = {"lines": [i]} if write is sample else {}
        (alone,) = write(model, source[i : i + 1, :length], lengths[i : i + 1], **draw)
        assert [h.ids for h in alone] == [h.ids for h in together[i]]
        torch.testing.assert_close(
            [h.score for h in alone], [h.score for h in together[i]], atol=1e-9, rtol=0
        )


def test_what_was_written_is_judged_alike():
    model = small("rotary")
    source, lengths = batch(16)
    found = beam(model, source, lengths, n_best=4)
    for rank in range(4):
        texts = [h[rank].ids for h in found]
        for h, judged in zip(found, judge(model, source, lengths, texts), strict=True):
            written = h[rank].steps
            torch.testing.assert_close(judged.steps[: len(written)], written, atol=1e-9, rtol=0)


def test_beam_equals_ctranslate2(tmp_path):
    ctranslate2 = pytest.importorskip("ctranslate2")
    from regard.data.tokenize import train_tokenizer
    from regard.pretrained.ctranslate2 import export_ctranslate2

    tokenizer = train_tokenizer(["a few words, not many words"] * 3, vocab=300)
    vocab = tokenizer.vocab
    config = TransformerConfig(vocab, vocab, tie="none", head_bias=True)
    config = with_changes(config, SIZES["tiny"])
    model = lively(replace(config, encoder_depth=1, decoder_depth=2), 6.0)
    folder = export_ctranslate2(model, tokenizer, tokenizer, tmp_path / "theirs")
    translator = ctranslate2.Translator(str(folder), compute_type="float32", intra_threads=1)
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(2, 13, (100,), generator=generator)
    source = torch.randint(4, vocab, (100, 12), generator=generator)
    source[torch.arange(100), lengths - 1] = EOS
    piece = [tokenizer.library.id_to_token(i) for i in range(vocab)]
    pieces = [[piece[i] for i in row[: n - 1]] for row, n in zip(source, lengths, strict=True)]
    for name, alpha, longest in (("average", 1.0, 40), ("average", 0.6, 4), ("none", 0.0, 40)):
        theirs = translator.translate_batch(
            pieces,
            beam_size=5,
            length_penalty=alpha,
            min_decoding_length=0,
            max_decoding_length=longest,
            return_scores=True,
        )
        ours = beam(model, source, lengths, length_penalty=name, alpha=alpha, max_length=longest)
        assert len({len(h.ids) for (h,) in ours}) > 2
        same = [
            [piece[i] for i in h.ids] == t.hypotheses[0]
            for (h,), t in zip(ours, theirs, strict=True)
        ]
        assert sum(same) >= 99
        for (h,), t, equal in zip(ours, theirs, same, strict=True):
            assert not equal or h.score == pytest.approx(t.scores[0], rel=1e-5, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"beam": 3, "n_best": 2}, lambda c, s: beam(c, s, beam=3, n_best=2, max_length=9)),
        (
            {"beam": 3, "length_penalty": "gnmt", "alpha": 0.3},
            lambda c, s: beam(c, s, beam=3, length_penalty="gnmt", alpha=0.3, max_length=9),
        ),
        ({"beam": 1}, lambda c, s: greedy(c, s, max_length=9)),
        ({"temperature": 0.0}, lambda c, s: greedy(c, s, max_length=9)),
        (
            {"top_k": 3, "n_best": 7},
            lambda c, s: sample(c, s, top_k=3, n_best=7, seed=1, max_length=9),
        ),
        (
            {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1, "seed": 4},
            lambda c, s: sample(c, s, temperature=0.7, top_p=0.9, min_p=0.1, seed=4, max_length=9),
        ),
    ],
)
def test_options_choose_the_search(options, same):
    chain = Chain(20, vocab=9)
    decoded = decode(chain, sources(20), None, Decoding(max_length=9, **options))
    assert decoded == same(chain, sources(20))


def test_what_a_caller_gives_reaches_every_search():
    chain = Chain(6, vocab=9)
    seen: list[tuple[int, int]] = []

    def on_token(number: int, token: int) -> bool:
        seen.append((number, token))
        return token == 5

    for options in (Decoding(beam=4), Decoding(beam=1), Decoding(temperature=1.0)):
        some = decode(
            chain,
            sources(6),
            None,
            options,
            Constraints(
                prefix=[[4]] * 6,
                max_length=[3, 4, 5, 6, 7, 8],
                adjust=[forbid(3)],
                ends=[7],
                on_token=None if options.beam == 4 else on_token,
            ),
        )
        for limit, (h,) in zip(range(3, 9), some, strict=True):
            assert h.ids[0] == 4 and 3 not in h.ids and len(h.ids) <= limit
            assert 7 not in h.ids[:-1]
    assert {number for number, _ in seen} == set(range(6))


MISTAKES = {
    "widen the beam, or sample": lambda c, s: decode(c, s, None, Decoding(n_best=6)),
    "unknown length_penalty 'gmnt'": lambda c, s: decode(
        c, s, None, Decoding(length_penalty="gmnt")
    ),
    "on_token= cannot follow beam=5": lambda c, s: beam(c, s, on_token=print),
    "beam=0": lambda c, s: beam(c, s, beam=0),
    "n_best=6": lambda c, s: beam(c, s, n_best=6),
    "patience=0": lambda c, s: beam(c, s, patience=0),
    "alpha=inf": lambda c, s: beam(c, s, alpha=inf),
    "unknown stopping 'erly'": lambda c, s: beam(c, s, stopping="erly"),
    "unknown length_penalty 'avarage'": lambda c, s: beam(c, s, length_penalty="avarage"),
    "max_length=0": lambda c, s: beam(c, s, max_length=0),
    "3 values of max_length": lambda c, s: beam(c, s, max_length=[1, 2, 3]),
    "1 prefixes": lambda c, s: greedy(c, s, prefix=[[3]]),
    "longer than max_length=1": lambda c, s: greedy(c, s, prefix=[[3, 3], []], max_length=1),
    "contains the end": lambda c, s: greedy(c, s, prefix=[[3, EOS], []]),
    "temperature=-1": lambda c, s: sample(c, s, temperature=-1),
    "top_k=0": lambda c, s: sample(c, s, top_k=0),
    "top_p=0": lambda c, s: sample(c, s, top_p=0),
    "min_p=1.5": lambda c, s: sample(c, s, min_p=1.5),
    "n_best=0": lambda c, s: sample(c, s, n_best=0),
    "3 line numbers": lambda c, s: sample(c, s, lines=[1, 2, 3]),
    "repetition_penalty=0": lambda c, s: checked({"repetition_penalty": 0}, VOCAB),
    "unknown rule 'min_lenght'": lambda c, s: checked({"min_lenght": 3}, VOCAB),
    "bad_words_ids=5; expected a token": lambda c, s: checked({"bad_words_ids": [[5]]}, VOCAB),
    "1 texts": lambda c, s: judge(c, s, None, [[3]]),
    "0 tokens": lambda c, s: in_batches([1], [1], list, tokens=0),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_told_in_one_line(message):
    with pytest.raises(UsageError, match=message) as told:
        MISTAKES[message](Chain(), sources(2))
    assert "\n" not in str(told.value)


def test_a_broken_model_is_told():
    chain = Chain()
    chain.table.fill_(torch.nan)
    for write in (greedy, beam, sample):
        with pytest.raises(UsageError, match="not finite"):
            write(chain, sources(2))


def test_nothing_gives_nothing():
    none = torch.empty(0, 3, dtype=torch.long)
    assert beam(Chain(), none) == greedy(Chain(), none) == sample(Chain(), none) == []
    assert judge(Chain(), none, None, []) == []


@pytest.mark.parametrize("rows", [1, 5, 6, 17])
@pytest.mark.parametrize("vocab", [1, 7, 64, 96, 1024])
def test_the_first_of_the_largest_is_taken(rows, vocab):
    torch.manual_seed(rows)
    x = torch.randint(0, 5, (rows, vocab)).float()
    assert _argmax(x).tolist() == [row.index(max(row)) for row in x.tolist()]


@pytest.mark.parametrize(
    ("name", "value", "theirs", "more"),
    [
        ("repetition_penalty", 1.7, "RepetitionPenaltyLogitsProcessor", ()),
        ("no_repeat_ngram_size", 2, "NoRepeatNGramLogitsProcessor", ()),
        ("min_length", 4, "MinLengthLogitsProcessor", (2,)),
        ("min_length", 5, "MinLengthLogitsProcessor", (2,)),
    ],
)
def test_a_rule_changes_scores_as_transformers_does(name, value, theirs, more):
    processors = pytest.importorskip("transformers.generation.logits_process")
    before, written = [[5, 3], [3, 3]], torch.tensor([[4, 3], [7, 7]])
    scores = torch.randn(2, 9, generator=torch.Generator().manual_seed(1))
    whole = torch.cat([torch.tensor(before), written], 1)
    wanted = getattr(processors, theirs)(value, *more)(whole, scores.clone())
    now = DecodingStep(RuleInputs([2], before), [0, 1], written)
    assert torch.equal(getattr(decoding_rules, name)(scores.clone(), now, value), wanted)
