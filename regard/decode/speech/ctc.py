"""CTC decoding: greedy, prefix beam search with a language model, and prefix scores.

A frame emits a token or a blank; a text's probability is the sum over all paths that become it when
repeated tokens are merged and blanks left out (Graves et al. 2006).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from regard.data.batches import pad
from regard.data.characters import Characters
from regard.data.tokenizer import Tokenizer
from regard.decode.constraints import EOS, MAX_TEXT_TOKENS, ByRow
from regard.decode.speech.ctc_align import BLANK, CTCAlignment, align, checked
from regard.decode.trace import Branch, begin_trace, is_tracing
from regard.decode.writer import Writer
from regard.errors import UsageError

_LEAST_LOGPROB = -1000.0  # a log-probability that is none, and whose sums over frames stay exact


@dataclass(frozen=True)
class CTCHypothesis(CTCAlignment):
    """A text that was decoded, with its alignment."""

    score: float  # logprob + lm_weight * log p_lm + length_bonus * tokens


def greedy(log_probs: Tensor | np.ndarray, blank: int = BLANK) -> CTCHypothesis:
    """Best path decoding: take the most likely token of every frame (frames, vocab)."""
    table = checked(log_probs, blank)
    best = table.argmax(1) if len(table) else np.zeros(0, dtype=np.int64)
    largest = table[np.arange(len(best)), best]
    starts = np.flatnonzero(np.diff(best, prepend=-1))
    ends = np.append(starts[1:], len(best))
    spoken = best[starts] != blank
    spans = list(zip(starts[spoken].tolist(), ends[spoken].tolist(), strict=True))
    confidences = [float(np.exp(largest[a:b].max())) for a, b in spans]
    total = float(largest.sum())
    return CTCHypothesis(best[starts[spoken]].tolist(), total, spans, confidences, total)


class FusionModel:
    """A language model for shallow fusion, asked for the next token after given texts.

    Its tokens must be those of the CTC model: the same tokenizer, or characters on both sides.

    Args:
        writer: causal language model
        tokenizer: its tokenizer
        ctc: tokenizer of the CTC model, if it is another
        context: maximum number of last tokens that are read
        device: device that the model is on
    """

    def __init__(
        self,
        writer: Writer,
        tokenizer: Tokenizer,
        ctc: Tokenizer | None = None,
        *,
        context: int = MAX_TEXT_TOKENS,
        device: torch.device | str = "cpu",
    ):
        self.writer, self.tokenizer, self.context = writer, tokenizer, context
        self.ids = _same_tokens(tokenizer, ctc or tokenizer)
        self.columns = torch.tensor(self.ids, device=device)

    def __call__(self, prefixes: Sequence[Sequence[int]]) -> np.ndarray:
        """Log-probabilities (prefixes, vocab) of the token after each of some texts.

        Tokens and texts are those of the CTC model; the end of the text is at `eos`.
        """
        begin = self.tokenizer.begin
        rows = [[begin, *(self.ids[one] for one in text)][-self.context :] for text in prefixes]
        source, lengths = pad([np.asarray(row, dtype=np.int64) for row in rows], 0)
        source, lengths = source.to(self.columns.device), lengths.to(self.columns.device)
        with torch.inference_mode():
            state = self.writer.start(source, lengths, capacity=1)
            last = source.gather(1, lengths.unsqueeze(1) - 1)
            logits, _ = self.writer.step(last, state)
        return logits[:, -1].double().log_softmax(1)[:, self.columns].cpu().numpy()


def _same_tokens(lm: Tokenizer, ctc: Tokenizer) -> list[int]:
    """Language model's id of each token of the CTC model, or refuse."""
    if lm.sha == ctc.sha:
        return list(range(ctc.vocab))
    if not isinstance(lm, Characters) or not isinstance(ctc, Characters):
        raise UsageError(
            "the language model's tokenizer is another than the CTC model's; train it with "
            "that one, or both on characters"
        )
    known = {c: n for n, c in enumerate(lm.characters, lm.vocab - len(lm.characters))}
    missing = [c for c in ctc.characters if c not in known]
    if missing:
        raise UsageError(
            f"the language model has never seen {''.join(missing)!r:.60}, which the CTC model "
            "writes; train it on texts with the same characters"
        )
    return [*range(ctc.vocab - len(ctc.characters)), *(known[c] for c in ctc.characters)]


@dataclass(frozen=True)
class PrefixBeam:
    """CTC prefix beam search: the texts of highest score, the best first.

    The score is log p_ctc(text) + lm_weight * log p_lm(text and its end) + length_bonus * tokens
    (Hannun et al. 2014), exact for texts whose prefixes never leave the beam. Tokens below
    token_min_logp do not continue a text in that frame.
    """

    beam: int = 8
    n_best: int = 1
    lm: Callable[[Sequence[Sequence[int]]], np.ndarray] | None = None
    lm_weight: float = 0.0
    length_bonus: float = 0.0
    token_min_logp: float = -inf
    blank: int = BLANK
    eos: int = EOS

    def __call__(self, log_probs: Tensor | np.ndarray) -> list[CTCHypothesis]:
        """Texts of a sound with these log-probabilities (frames, vocab)."""
        if not 1 <= self.n_best <= self.beam:
            raise UsageError(
                f"n_best={self.n_best} is not between 1 and beam={self.beam}; widen the beam"
            )
        table = checked(log_probs, self.blank)
        prefixes = (_TracedPrefixes if is_tracing() else _Prefixes)(self, table.shape[1])
        for row in table:
            prefixes.step(row)
        return [
            CTCHypothesis(ids, logprob, path.spans, path.confidences, score)
            for ids, logprob, score in prefixes.finish()[: self.n_best]
            for path in [align(table, ids, self.blank)]
        ]


class _Prefixes:
    """The prefixes of a beam, as nodes of a tree, each with the probability of its paths."""

    def __init__(self, options: PrefixBeam, vocab: int):
        self.options, self.vocab = options, vocab
        self.lm = options.lm if options.lm_weight else None
        # the tree: node -> its parent, its last token, its texts' bonus and LM score
        self.parent, self.token = [-1], [options.blank]
        self.child: dict[tuple[int, int], int] = {}
        self.extra = [0.0]
        self.next: dict[int, np.ndarray] = {}  # LM log-probabilities after a node, weighted
        self.nodes = np.zeros(1, dtype=np.int64)  # of the beam, the best first
        self.in_blank = np.zeros(1)  # log-probability of the paths that end in a blank
        self.in_token = np.full(1, -inf)

    def ids(self, node: int) -> list[int]:
        """Tokens of a prefix."""
        found: list[int] = []
        while node:
            found.append(self.token[node])
            node = self.parent[node]
        return found[::-1]

    def _after(self, nodes: np.ndarray) -> np.ndarray:
        """What the language model and the bonus add for each token after each prefix."""
        added = np.full((len(nodes), self.vocab), self.options.length_bonus)
        if self.lm is not None:
            new = [n for n in nodes.tolist() if n not in self.next]
            rows = self.lm([self.ids(n) for n in new]) if new else []
            self.next |= {n: self.options.lm_weight * row for n, row in zip(new, rows, strict=True)}
            added += np.stack([self.next[n] for n in nodes.tolist()])
        return added

    def step(self, row: np.ndarray) -> None:
        """Read the log-probabilities (vocab) of one more frame."""
        nodes, count = self.nodes, len(self.nodes)
        token = np.array([self.token[n] for n in nodes])
        either = np.logaddexp(self.in_blank, self.in_token)
        in_blank = either + row[self.options.blank]
        in_token = np.where(nodes == 0, -inf, self.in_token + row[token])
        extra = np.array([self.extra[n] for n in nodes])
        open = row >= self.options.token_min_logp
        open[self.options.blank] = False
        (tokens,) = open.nonzero()
        # a token after itself is a new one only if a blank parts them
        before = np.where(token[:, None] == tokens, self.in_blank[:, None], either[:, None])
        longer = before + row[tokens]
        place = {node: i for i, node in enumerate(nodes.tolist())}
        column = {one: j for j, one in enumerate(tokens.tolist())}
        for i, node in enumerate(nodes.tolist()):  # a prefix that is in the beam already
            mother, j = place.get(self.parent[node]), column.get(self.token[node])
            if node and mother is not None and j is not None:
                in_token[i] = np.logaddexp(in_token[i], longer[mother, j])
                longer[mother, j] = -inf
        added = self._after(nodes)[:, tokens]
        stay = np.logaddexp(in_blank, in_token) + extra
        scores = np.concatenate([stay, (longer + extra[:, None] + added).ravel()])
        best = np.argsort(-scores, kind="stable")[: self.options.beam]
        best = best[scores[best] > -inf]
        kept, grown = best[best < count], best[best >= count] - count
        parents, places = grown // max(1, len(tokens)), grown % max(1, len(tokens))
        new = [
            self._grow(int(nodes[i]), int(tokens[j]), float(added[i, j]))
            for i, j in zip(parents.tolist(), places.tolist(), strict=True)
        ]
        self.nodes = np.concatenate([nodes[kept], np.array(new, dtype=np.int64)])
        self.in_blank = np.concatenate([in_blank[kept], np.full(len(new), -inf)])
        self.in_token = np.concatenate([in_token[kept], longer[parents, places]])

    def _grow(self, parent: int, token: int, added: float) -> int:
        """Node of a prefix with one more token, which adds to its score."""
        if (parent, token) in self.child:
            return self.child[parent, token]
        self.parent.append(parent)
        self.token.append(token)
        self.extra.append(self.extra[parent] + added)
        self.child[parent, token] = len(self.parent) - 1
        return len(self.parent) - 1

    def finish(self) -> list[tuple[list[int], float, float]]:
        """Texts of the beam with their log-probabilities and scores, best first."""
        logprobs = np.logaddexp(self.in_blank, self.in_token)
        scores = logprobs + np.array([self.extra[n] for n in self.nodes])
        if self.lm is not None:
            after = self._after(self.nodes)[:, self.options.eos]
            scores = scores + after - self.options.length_bonus
        order = np.argsort(-scores, kind="stable")
        return [(self.ids(int(self.nodes[i])), float(logprobs[i]), float(scores[i])) for i in order]


class _TracedPrefixes(_Prefixes):
    """The prefixes of a beam, and those that have left it, for the active trace."""

    def __init__(self, options: PrefixBeam, vocab: int):
        super().__init__(options, vocab)
        self.trace = begin_trace()
        self.frames = 0
        # node -> the last frame in which it was in the beam, its place there, its log-probability
        self.last: dict[int, tuple[int, int, float]] = {}

    def step(self, row: np.ndarray) -> None:
        """Read one more frame, and note which prefixes are in the beam after it."""
        super().step(row)
        self.frames += 1
        likely = np.logaddexp(self.in_blank, self.in_token).tolist()
        for place, (node, logprob) in enumerate(zip(self.nodes.tolist(), likely, strict=True)):
            self.last[node] = self.frames, place, logprob

    def finish(self) -> list[tuple[list[int], float, float]]:
        """Texts of the beam with their log-probabilities and scores, best first."""
        found = super().finish()
        self.trace.branches, self.trace.end = self._branches(found), "all frames were read"
        return found

    def _branches(self, found: Sequence[tuple[list[int], float, float]]) -> list[Branch]:
        """All prefixes that were in the beam; those that were found have been kept to the end."""
        scores = {tuple(ids): score for ids, _, score in found}
        alive: set[int] = set()
        for node in self.nodes.tolist():
            while node:
                alive.add(node)
                node = self.parent[node]
        told: list[Branch] = []
        for node in range(1, len(self.parent)):
            frame, place, logprob = self.last[node]
            score = scores.get(tuple(self.ids(node))) if frame == self.frames else None
            fate = "finished" if score is not None else "open" if node in alive else "beam"
            when = f"in frame {frame + 1} of {self.frames}" if fate == "beam" else ""
            score = logprob + self.extra[node] if score is None else score
            parent, token = self.parent[node] - 1, self.token[node]
            told.append(Branch(parent, token, logprob, score, place, fate, when))
        return told


class CTCPrefixScore(ByRow):
    """The joint score of attention and CTC, as a change of log-probabilities in beam search.

    Every token gets (1 - weight) times its log-probability by the decoder plus weight times that of
    CTC: of all texts that go on with it, given the text so far (Watanabe et al. 2017). The end of
    the text gets that of the text itself. To be used with on="logprobs".

    Args:
        log_probs: log-probabilities (b, frames, vocab) of the batch that is decoded
        lengths: number of real frames of each sound; all unless given
        weight: weight of CTC in the joint score
        blank: id of the blank
        ends: tokens that end a text
    """

    def __init__(
        self,
        log_probs: Tensor,
        lengths: Tensor | None = None,
        *,
        weight: float = 0.3,
        blank: int = BLANK,
        ends: Sequence[int] = (EOS,),
    ):
        if not 0 <= weight <= 1:
            raise UsageError(f"ctc_weight={weight} is not between 0 and 1")
        self.weight, self.blank, self.ends = weight, blank, list(ends)
        sizes = [log_probs.shape[1]] * len(log_probs) if lengths is None else lengths.tolist()
        self.log_probs = [
            row[:size].double().clamp(min=_LEAST_LOGPROB)
            for row, size in zip(log_probs, sizes, strict=True)
        ]
        # what the last step computed of its prefixes, (sentence, tokens)
        self.paths: dict[tuple[int, tuple[int, ...]], _Paths] = {}

    def __call__(self, logits: Tensor, written: Tensor, number: Tensor) -> Tensor:
        """Add the scores to rows with these tokens, of sentences by number."""
        rows: dict[int, list[int]] = {}
        for row, sentence in enumerate(number.tolist()):
            rows.setdefault(sentence, []).append(row)
        texts = [tuple(text) for text in written.tolist()]
        scores = torch.empty(logits.shape, dtype=torch.float64, device=logits.device)
        now: dict[tuple[int, tuple[int, ...]], _Paths] = {}
        for sentence, some in rows.items():  # one by one: no sentence depends on its neighbours
            paths = self._paths(sentence, [texts[row] for row in some])
            keys = [(sentence, texts[row]) for row in some]
            now.update(zip(keys, zip(*paths, strict=True), strict=True))
            scores[some] = self._next(self.log_probs[sentence], self._last(written[some]), paths)
        self.paths = now
        if self.weight == 1:
            return scores.to(logits.dtype)
        own = logits.double().log_softmax(1)
        return ((1 - self.weight) * own + self.weight * scores).to(logits.dtype)

    def _last(self, written: Tensor) -> Tensor:
        """Last token of each row, or the blank where there is none."""
        if written.shape[1] == 0:
            return written.new_full((len(written),), self.blank)
        return written[:, -1]

    def _paths(self, sentence: int, texts: Sequence[tuple[int, ...]]) -> "_Paths":
        """Paths of prefixes of one sentence, all of one length, row by row."""
        log_probs, length = self.log_probs[sentence], len(texts[0])
        written = torch.tensor(texts, dtype=torch.long, device=log_probs.device)
        begun = length - 1
        known = [self.paths[key] for text in texts if (key := (sentence, text[:-1])) in self.paths]
        if length and len(known) == len(texts):
            in_token, in_blank, prefix = (torch.stack(x) for x in zip(*known, strict=True))
            paths = in_token, in_blank, prefix
        else:  # no text yet, or one that was begun elsewhere
            begun = 0
            in_blank = torch.cat([log_probs.new_zeros(1), log_probs[:, self.blank].cumsum(0)])
            in_blank = in_blank.expand(len(texts), -1)
            paths = torch.full_like(in_blank, -inf), in_blank, log_probs.new_zeros(len(texts))
        for place in range(begun, length):
            last = self._last(written[:, :place])
            paths = self._longer(log_probs, last, written[:, place], paths)
        return paths

    def _longer(self, log_probs: Tensor, last: Tensor, token: Tensor, paths: "_Paths") -> "_Paths":
        """Paths of prefixes that go on with a token each."""
        in_token, in_blank, _ = paths
        either = torch.logaddexp(in_token, in_blank)
        entering = torch.where((last == token).unsqueeze(1), in_blank, either)[:, :-1]
        emitted = log_probs[:, token].T
        prefix = (entering + emitted).logsumexp(1)
        in_token = _recur(entering, emitted)
        in_blank = _recur(in_token[:, :-1], log_probs[:, self.blank].expand_as(emitted))
        return in_token, in_blank, prefix

    def _next(self, log_probs: Tensor, last: Tensor, paths: "_Paths") -> Tensor:
        """Log-probability (rows, vocab) of going on with each token, given the text."""
        in_token, in_blank, prefix = paths
        either = torch.logaddexp(in_token, in_blank)
        # a text that does not fit into the frames has no path at all
        most = either.amax(1, keepdim=True).clamp(min=_LEAST_LOGPROB * (len(log_probs) + 1))
        scores = ((either[:, :-1] - most).exp() @ log_probs.exp()).log() + most
        again = (in_blank[:, :-1] + log_probs[:, last].T).logsumexp(1, keepdim=True)
        scores = scores.scatter(1, last.unsqueeze(1), again)
        scores[:, self.ends] = either[:, -1:]
        scores = (
            (scores - prefix.unsqueeze(1)).nan_to_num(_LEAST_LOGPROB).clamp(_LEAST_LOGPROB, 0.0)
        )
        scores[:, self.blank] = -inf
        return scores


# Log-probabilities (rows, frames + 1) of the paths of some prefixes after 0 to all frames, those
# that end in a token and in a blank; and (rows) of all texts that begin with the prefix.
_Paths = tuple[Tensor, Tensor, Tensor]


def _recur(entering: Tensor, emitted: Tensor) -> Tensor:
    """log r[0..frames] where r[0] = 0 and r[t] = (r[t - 1] + entering[t - 1]) p[t].

    Divided by the product of p up to t it is a cumulative sum: no loop over frames.
    """
    product = emitted.cumsum(1)
    before = F.pad(product, (1, -1))
    return F.pad((entering - before).logcumsumexp(1) + product, (1, 0), value=-inf)
