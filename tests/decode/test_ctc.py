"""Laws of CTC: every sum and every best path equals the one found by trying all paths."""

from itertools import product
from math import inf, isfinite

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st
from torch import Tensor

from regard.data.characters import Characters
from regard.data.tokenize import train_tokenizer
from regard.decode.constraints import EOS, Constraints, forbid, stop_repetition
from regard.decode.decoder import decode
from regard.decode.options import Decoding
from regard.decode.speech.ctc import CTCPrefixScore, FusionModel, PrefixBeam, greedy
from regard.decode.speech.ctc_align import align, alignable, not_alignable, required_frames
from regard.errors import UsageError
from regard.layers.block import BlockConfig
from regard.models.gpt import GPT, GPTConfig
from regard.training.loss import ctc_loss
from tests.searching import beam
from tests.steps import count_steps

Text = tuple[int, ...]


def random_log_probs(frames: int, vocab: int, seed: int, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(frames, vocab, dtype=torch.float64, generator=generator)
    return (scale * logits).log_softmax(1)


def collapse(path: Text, blank: int = 0) -> Text:
    merged = [one for n, one in enumerate(path) if n == 0 or one != path[n - 1]]
    return tuple(one for one in merged if one != blank)


def all_texts(log_probs: Tensor, blank: int = 0) -> tuple[dict[Text, float], dict[Text, float]]:
    """Return the log-probability of every text, and that of its best path, by trying all paths."""
    frames, vocab = log_probs.shape
    table = log_probs.tolist()
    total: dict[Text, float] = {}
    best: dict[Text, float] = {}
    for path in product(range(vocab), repeat=frames):
        likely = sum(table[t][one] for t, one in enumerate(path))
        text = collapse(path, blank)
        total[text] = np.logaddexp(total.get(text, -inf), likely)
        best[text] = max(best.get(text, -inf), likely)
    return total, best


def spikes(seed: int, tokens: int = 12, vocab: int = 30) -> tuple[np.ndarray, list[int], list[int]]:
    """Return log-probabilities as a trained model gives them, the text and where its tokens are."""
    rng = np.random.default_rng(seed)
    ids = 1 + rng.permutation(vocab - 1)[:tokens]
    places = np.cumsum(rng.integers(3, 9, tokens))
    logits = rng.normal(0, 1, (int(places[-1]) + 6, vocab))
    logits[:, 0] += 8
    for one, place in zip(ids, places, strict=True):
        logits[place : place + rng.integers(1, 3), one] += 16
    logits -= np.logaddexp.reduce(logits, axis=1, keepdims=True)
    return logits, ids.tolist(), places.tolist()


# ---- the loss


@given(st.integers(0, 1000), st.integers(1, 5), st.integers(2, 4), st.integers(0, 3))
@effort(max_examples=40)
def test_the_loss_is_that_of_all_paths(seed, frames, vocab, length):
    rng = np.random.default_rng(seed)
    text = tuple(rng.integers(1, vocab, length).tolist())
    log_probs = random_log_probs(frames, vocab, seed)
    total, _ = all_texts(log_probs)
    loss = ctc_loss(
        log_probs[None],
        torch.tensor([frames]),
        torch.tensor([text], dtype=torch.long),
        torch.tensor([length]),
    )
    assert alignable(frames, text) == isfinite(float(loss)) == (text in total)
    if text in total:
        assert float(loss) == pytest.approx(-total[text], rel=1e-10)


def batch_of_pairs(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a padded batch of pairs that can be aligned: some barely, one without any text."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(1, 9, n).tolist() for n in (0, 1, 4, 9, 6)]
    texts.append([3, 3, 3, 3])
    more = (3, 0, 9, 20, 0, 0)
    frames = [required_frames(text) + extra for text, extra in zip(texts, more, strict=True)]
    logits = torch.from_numpy(rng.normal(0, 3, (len(texts), max(frames), 9)).astype(np.float32))
    targets = torch.zeros(len(texts), 9, dtype=torch.long)
    for row, text in zip(targets, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    return logits, torch.tensor(frames), targets, torch.tensor([len(t) for t in texts])


@pytest.mark.parametrize("seed", range(10))
def test_the_gradient_sums_to_zero_in_every_frame_and_is_zero_in_padding(seed):
    logits, lengths, targets, sizes = batch_of_pairs(seed)
    logits.requires_grad_()
    loss = ctc_loss(logits, lengths, targets, sizes)
    assert loss.isfinite()
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.isfinite().all()
    assert gradient.sum(-1).abs().max() < 2e-6
    for row, frames in zip(gradient, lengths.tolist(), strict=True):
        assert (row[frames:] == 0).all()
        assert frames == 0 or row[:frames].abs().sum() > 0


def test_the_loss_is_a_sum_over_utterances_whatever_the_padding_holds():
    logits, lengths, targets, sizes = batch_of_pairs(0)
    alone = [
        ctc_loss(logits[n : n + 1, :t], t[None], targets[n : n + 1, :size], size[None])
        for n, (t, size) in enumerate(zip(lengths, sizes, strict=True))
    ]
    noisy = logits.clone()
    for row, frames in zip(noisy, lengths.tolist(), strict=True):
        row[frames:] = 1e4
    for some in (logits, noisy):
        together = ctc_loss(some, lengths, targets, sizes)
        assert float(together) == pytest.approx(sum(map(float, alone)), rel=1e-6)
    half = ctc_loss(logits.bfloat16(), lengths, targets, sizes)
    assert half.dtype == torch.float32


def test_pairs_that_cannot_be_aligned_are_named():
    pairs = [(3, [1, 2, 3]), (3, [1, 1, 2]), (4, [1, 1, 2]), (0, []), (0, [1]), (7, [5] * 5)]
    assert not_alignable(pairs) == [1, 4, 5]
    assert required_frames([5] * 5) == 9


# ---- decoding


@given(st.integers(0, 1000), st.integers(0, 5), st.integers(2, 4))
@effort(max_examples=30)
def test_a_wide_prefix_beam_finds_every_text_with_its_probability(seed, frames, vocab):
    log_probs = random_log_probs(frames, vocab, seed)
    total, best = all_texts(log_probs)
    found = PrefixBeam(beam=10_000, n_best=10_000)(log_probs)
    assert {tuple(one.ids) for one in found} == set(total)
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    for one in found:
        assert one.logprob == one.score == pytest.approx(total[tuple(one.ids)], abs=1e-11)


@pytest.mark.parametrize("blank", [0, 2])
def test_any_token_may_be_the_blank(blank):
    log_probs = random_log_probs(4, 3, 5)
    total, best = all_texts(log_probs, blank)
    found = PrefixBeam(beam=1000, n_best=1000, blank=blank)(log_probs)
    assert {tuple(one.ids) for one in found} == set(total)
    assert all(one.logprob == pytest.approx(total[tuple(one.ids)]) for one in found)
    assert all(align(log_probs, t, blank).logprob == pytest.approx(best[t]) for t in best)


@given(st.integers(0, 1000), st.integers(1, 6), st.integers(2, 4))
@effort(max_examples=30)
def test_greedy_takes_the_best_path(seed, frames, vocab):
    log_probs = random_log_probs(frames, vocab, seed)
    path = tuple(log_probs.argmax(1).tolist())
    one = greedy(log_probs)
    assert tuple(one.ids) == collapse(path)
    assert one.logprob == pytest.approx(float(log_probs.amax(1).sum()))
    for token, (start, end), sure in zip(one.ids, one.spans, one.confidences, strict=True):
        assert set(path[start:end]) == {token}
        assert sure == pytest.approx(float(log_probs[start:end, token].exp().max()))
    assert align(log_probs, one.ids).logprob == pytest.approx(one.logprob)


@given(st.integers(0, 1000), st.integers(1, 6), st.integers(2, 4))
@effort(max_examples=30)
def test_an_alignment_is_the_best_path_of_its_text(seed, frames, vocab):
    log_probs = random_log_probs(frames, vocab, seed)
    _, best = all_texts(log_probs)
    for text in best:
        one = align(log_probs, text)
        assert one.logprob == pytest.approx(best[text], abs=1e-11)
        # the path that the spans say has this probability, and spells the text
        path = [0] * frames
        for token, (start, end) in zip(text, one.spans, strict=True):
            assert 0 <= start < end <= frames
            path[start:end] = [token] * (end - start)
        assert collapse(tuple(path)) == text
        assert sum(log_probs[t, c].item() for t, c in enumerate(path)) == pytest.approx(one.logprob)
        assert all(0 < sure <= 1 for sure in one.confidences)


@pytest.mark.parametrize("frames", [1, 2, 9, 60])
def test_a_long_alignment_goes_in_blocks_and_is_the_same(monkeypatch, frames):
    log_probs = random_log_probs(frames, 6, frames)
    for text in ([], [1], [1, 2, 2, 3], [3] * 5):
        if alignable(frames, text):
            whole = align(log_probs, text)
            monkeypatch.setattr("regard.decode.speech.ctc_align.MOST_MOVES", 1)
            assert align(log_probs, text) == whole
            monkeypatch.undo()


def test_what_cannot_be_aligned_is_refused():
    log_probs = random_log_probs(3, 4, 0)
    with pytest.raises(UsageError, match="needs 4 frames and the sound has 3"):
        align(log_probs, [1, 1, 2])
    with pytest.raises(UsageError, match="token 4"):
        align(log_probs, [4])
    with pytest.raises(UsageError, match="token 0"):
        align(log_probs, [0])
    with pytest.raises(UsageError, match="probability 0"):
        align(log_probs.index_fill(1, torch.tensor([2]), -inf), [2])
    with pytest.raises(UsageError, match="not finite"):
        align(torch.full((3, 4), float("nan")), [1])
    with pytest.raises(UsageError, match="expected"):
        PrefixBeam()(log_probs[None])
    with pytest.raises(UsageError, match="widen the beam"):
        PrefixBeam(beam=2, n_best=3)(log_probs)


def test_equal_to_fast_ctc_decode():
    theirs = pytest.importorskip("fast_ctc_decode")
    alphabet = [chr(ord("a") - 1 + n) for n in range(26)]
    alphabet[0] = ""
    for seed in range(20):
        log_probs, _, _ = spikes(seed, vocab=26)
        soft = log_probs / 3  # where the best path is not the best text
        soft -= np.logaddexp.reduce(soft, axis=1, keepdims=True)
        for table in (log_probs, soft):
            probabilities = np.exp(table).astype(np.float32)
            text, _ = theirs.beam_search(probabilities, alphabet, 32, 0.0)
            ours = PrefixBeam(beam=32)(np.log(probabilities))[0]
            assert "".join(alphabet[n] for n in ours.ids) == text
            text, _ = theirs.viterbi_search(probabilities, alphabet)
            assert "".join(alphabet[n] for n in greedy(table).ids) == text


def test_equal_to_ctc_segmentation():
    theirs = pytest.importorskip("ctc_segmentation")
    for seed in range(20):
        log_probs, ids, places = spikes(seed)
        config = theirs.CtcSegmentationParameters(
            char_list=[str(n) for n in range(30)],
            index_duration=1.0,
            preamble_transition_cost_zero=False,
            backtrack_from_max_t=True,
        )
        truth, _ = theirs.prepare_token_list(config, [np.array(ids)])
        timings, _, _ = theirs.ctc_segmentation(config, log_probs, truth)
        ours = align(log_probs, ids)
        assert [start for start, _ in ours.spans] == timings[2:-1].astype(int).tolist() == places


def test_a_prefix_beam_takes_steps_for_prefixes_and_tokens_but_not_for_each_pair():
    beam, vocab, frames = 8, 300, 60
    log_probs = random_log_probs(frames, vocab, 0)
    some, all_of_it = (
        count_steps(lambda n=n: PrefixBeam(beam=beam)(log_probs[:n])) for n in (frames // 2, frames)
    )
    assert all_of_it < 2.2 * some  # linear in the length
    assert all_of_it / frames < beam * vocab / 2


# ---- a language model


@pytest.fixture(scope="module")
def language_model() -> FusionModel:
    torch.manual_seed(0)
    tokenizer = Characters("ab")
    block = BlockConfig(16, 2, 32)
    model = GPT(GPTConfig(tokenizer.vocab, 2, block, max_length=32)).eval()
    for parameter in model.parameters():
        parameter.data.mul_(4)  # far from uniform
    return FusionModel(model, tokenizer)


def lm_logprob(lm: FusionModel, text: Text) -> float:
    """Return log p(text and its end), read all at once as in training."""
    ids = torch.tensor([[1, *text, EOS]])
    with torch.no_grad():
        logits = lm.writer(ids[:, :-1]).double().log_softmax(-1)  # pyright: ignore
    return float(logits.gather(2, ids[:, 1:, None]).sum())


@pytest.mark.parametrize("weight, bonus", [(0.0, 0.7), (0.5, 0.0), (1.3, -0.4)])
def test_shallow_fusion_adds_the_language_model_and_the_bonus(language_model, weight, bonus):
    log_probs = random_log_probs(4, 6, 1)
    total, _ = all_texts(log_probs)
    found = PrefixBeam(
        beam=10_000, n_best=10_000, lm=language_model, lm_weight=weight, length_bonus=bonus
    )(log_probs)
    assert {tuple(one.ids) for one in found} == set(total)
    for one in found:
        text = tuple(one.ids)
        fused = total[text] + weight * lm_logprob(language_model, text) + bonus * len(text)
        assert one.score == pytest.approx(fused, abs=1e-4)
        assert one.logprob == pytest.approx(total[text], abs=1e-11)
    assert found[0].score == max(one.score for one in found)


def test_a_language_model_is_asked_in_batches_once_for_each_prefix(language_model):
    asked: list[Text] = []

    def lm(prefixes):
        asked.extend(map(tuple, prefixes))
        return language_model(prefixes)

    log_probs = random_log_probs(12, 6, 2)
    PrefixBeam(lm=lm, lm_weight=0.5)(log_probs)
    assert len(asked) == len(set(asked))
    rows = language_model([[4], [5, 4, 4], []])
    for text, row in zip(([4], [5, 4, 4], []), rows, strict=True):
        np.testing.assert_allclose(language_model([text])[0], row, atol=1e-5)


def test_tokens_below_the_least_probability_do_not_continue_a_text():
    log_probs, ids, _ = spikes(3)
    assert PrefixBeam(token_min_logp=-5.0)(log_probs)[0].ids == ids
    none = PrefixBeam(token_min_logp=0.1)(log_probs)
    assert [one.ids for one in none] == [[]]


def test_characters_of_another_order_are_mapped_and_other_tokens_refused(language_model):
    ctc = Characters("ba")  # the other way round
    mapped = FusionModel(language_model.writer, language_model.tokenizer, ctc)
    a, b = ctc.encode("a")[0], ctc.encode("b")[0]
    ours, theirs = mapped([[a, b]])[0], language_model([[4, 5]])[0]
    assert (ours[[a, b]] == theirs[[4, 5]]).all() and (ours[:4] == theirs[:4]).all()
    with pytest.raises(UsageError, match="never seen 'c'"):
        FusionModel(language_model.writer, language_model.tokenizer, Characters("abc"))
    pieces = train_tokenizer(["ab ab ba"] * 10, vocab=300)
    with pytest.raises(UsageError, match="tokenizer is another"):
        FusionModel(language_model.writer, pieces, Characters("abc"))
    cut = FusionModel(language_model.writer, language_model.tokenizer, context=3)
    np.testing.assert_array_equal(cut([[4, 5, 5, 4]]), cut([[5, 5, 5, 4]]))


# ---- the joint score


def prefix_logprob(total: dict[Text, float], prefix: Text) -> float:
    begun = [likely for text, likely in total.items() if text[: len(prefix)] == prefix]
    return float(np.logaddexp.reduce(begun)) if begun else -inf


@pytest.mark.parametrize("seed", range(4))
def test_prefix_scores_are_sums_over_all_texts_that_go_on_so(seed):
    vocab, end = 4, 3
    log_probs = random_log_probs(5, vocab, seed)
    total, _ = all_texts(log_probs)
    score = CTCPrefixScore(log_probs[None], weight=1.0, ends=[end])
    asked = 0
    for length in range(4):  # prefix by prefix, as a beam goes on, so that kept paths are used
        texts = sorted({text[:length] for text in total if len(text) >= length})
        written = torch.tensor(texts, dtype=torch.long).view(len(texts), length)
        zeros = torch.zeros(len(texts), vocab, dtype=torch.float64)
        rows = score(zeros, written, torch.zeros(len(texts), dtype=torch.long))
        cold = CTCPrefixScore(log_probs[None], weight=1.0, ends=[end])
        torch.testing.assert_close(
            cold(zeros, written, torch.zeros(len(texts), dtype=torch.long)), rows
        )
        assert len(score.paths) == len(texts)
        for text, row in zip(texts, rows.tolist(), strict=True):
            base = prefix_logprob(total, text)
            for token in (1, 2):
                expected = prefix_logprob(total, (*text, token)) - base
                assert row[token] == pytest.approx(max(expected, -1000), abs=1e-9)
                asked += isfinite(expected)
            assert row[end] == pytest.approx(max(total.get(text, -inf) - base, -1000), abs=1e-9)
            assert row[0] == -inf
    assert asked > 40


class Attending:
    """A writer whose logits depend on the number of the sentence and its last token."""

    def __init__(self, sentences: int, vocab: int, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        shape = (sentences, vocab, vocab)
        self.table = 2 * torch.randn(shape, dtype=torch.float64, generator=generator)

    def start(self, source, lengths=None, *, capacity):
        return Numbers(source[:, 0])

    def step(self, ids, state):
        numbers = state.numbers.repeat_interleave(state.hypotheses)
        return self.table[numbers, ids[:, -1]].unsqueeze(1), state


class Numbers:
    def __init__(self, numbers: Tensor):
        self.numbers, self.hypotheses = numbers, 1

    @property
    def sentences(self) -> int:
        return len(self.numbers)

    def select(self, parents: Tensor) -> "Numbers":
        self.hypotheses = parents.shape[1]
        return self

    def keep(self, sentences: Tensor) -> "Numbers":
        self.numbers = self.numbers[sentences]
        return self


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_the_joint_beam_finds_the_text_of_highest_joint_score(weight):
    vocab, frames, longest = 5, 4, 6
    writer = Attending(3, vocab)
    log_probs = torch.stack([random_log_probs(frames, vocab, seed) for seed in range(3)])
    lengths = torch.tensor([4, 2, 3])
    score = CTCPrefixScore(log_probs, lengths, weight=weight)
    found = beam(
        writer,
        torch.arange(3).view(3, 1),
        beam=200,
        n_best=200,
        length_penalty="none",
        max_length=longest,
        adjust=[score, forbid(0, 1)],
        on="logprobs",
    )
    for sentence, hypotheses in enumerate(found):
        total, _ = all_texts(log_probs[sentence, : lengths[sentence]])
        table = writer.table[sentence].log_softmax(-1)
        joint: dict[Text, float] = {}
        for length in range(longest):
            for text in product((3, 4), repeat=length):
                steps = zip((1, *text), (*text, EOS), strict=True)
                attended = sum(float(table[a, b]) for a, b in steps)
                ctc = total.get(text, -inf)
                joint[text] = (1 - weight) * attended + (weight * ctc if weight else 0.0)
        ended = {tuple(one.ids): one.logprob for one in hypotheses if len(one.ids) < longest}
        likely = {text for text in joint if joint[text] > -200}
        assert {text for text in ended if ended[text] > -200} == likely
        assert all(ended[text] == pytest.approx(joint[text], abs=1e-5) for text in likely)
        assert max(joint, key=joint.__getitem__) == next(iter(ended))


def test_the_joint_score_depends_on_no_neighbour():
    vocab, frames = 12, 40
    writer = Attending(6, vocab)
    log_probs = torch.stack([random_log_probs(frames, vocab, seed, 4.0) for seed in range(6)])
    lengths = torch.tensor([40, 31, 8, 40, 1, 22])
    options = Decoding(beam=4, n_best=4)

    def joint(rows: list[int]) -> list[tuple]:
        score = CTCPrefixScore(log_probs[rows], lengths[rows], weight=0.4)
        found = decode(
            writer,
            torch.tensor(rows).view(-1, 1),
            None,
            options,
            Constraints(
                adjust=[score, forbid(0, 1)],
                max_length=[min(30, int(n)) for n in lengths[rows]],
                on="logprobs",
            ),
        )
        assert len(score.paths) <= options.beam * len(rows)  # bounded, whatever was written
        return [[(one.ids, one.score) for one in some] for some in found]

    together = joint([0, 1, 2, 3, 4, 5])
    assert joint([5, 3, 1]) == [together[5], together[3], together[1]]
    assert [joint([n])[0] for n in range(6)] == together


def test_greedy_and_forced_beginnings_go_with_the_joint_score():
    vocab = 6
    writer = Attending(1, vocab)
    log_probs = random_log_probs(9, vocab, 3)[None]
    for prefix in ([], [4], [4, 4, 5, 5, 3]):
        (one,) = decode(
            writer,
            torch.tensor([[0]]),
            None,
            Decoding(beam=1),
            Constraints(
                adjust=[CTCPrefixScore(log_probs, weight=0.5), forbid(0, 1)],
                prefix=[prefix],
                max_length=20,
            ),
        )
        assert one[0].ids[: len(prefix)] == prefix
        assert isfinite(one[0].logprob)
        assert len(one[0].ids) <= 9 + len(prefix)  # CTC ends what attention would repeat
    with pytest.raises(UsageError, match="ctc_weight=1.5"):
        CTCPrefixScore(log_probs, weight=1.5)


def test_a_text_that_repeats_itself_is_ended():
    table = Attending(1, 7)
    table.table.fill_(-20.0)
    for a, b in ((1, 3), (3, 4), (4, 5), (5, 3)):  # 3 4 5 3 4 5 ... for ever
        table.table[0, a, b] = 0.0
    source = torch.tensor([[0]])
    for size in (1, 3):
        options = Decoding(beam=size)
        (endless,) = decode(table, source, None, options, Constraints(max_length=60))
        stops = Constraints(max_length=60, adjust=[stop_repetition(times=4)])
        (ended,) = decode(table, source, None, options, stops)
        assert ended[0].ids == ([3, 4, 5] * 20)[: len(ended[0].ids)]
        if size == 1:
            assert len(endless[0].ids) == 60 and len(ended[0].ids) == 12
    once = stop_repetition(times=4)(torch.zeros(1, 7), torch.tensor([[3, 4, 5, 3, 4, 5, 3, 4]]))
    assert (once == 0).all()
    with pytest.raises(UsageError, match="times=1"):
        stop_repetition(times=1)
