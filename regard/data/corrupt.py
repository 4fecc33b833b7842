"""Denoising objectives: T5's span corruption, BART's text infilling and sentence permutation.

Each is a pure function of what it is given and a seed.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from regard.data.sentences import split_sentences
from regard.data.tokenizer import Tokenizer
from regard.errors import UsageError

BLOCK = 500_000  # characters of a text that are split into sentences at once

Ids = Sequence[int] | np.ndarray


def cut_at_random(length: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Cut a length into so many parts of at least one, all ways being equally likely."""
    cuts = np.sort(rng.choice(length - 1, count - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=length)


def corrupt_spans(
    ids: Ids, sentinels: Sequence[int], seed: int, *, share: float = 0.15, mean: float = 3.0
) -> tuple[np.ndarray, np.ndarray]:
    """Take spans out of a text, and return what is left and what was taken (Raffel et al. 2020).

    Both name the spans by the same sentinels: `Thank you <X> me to your party <Y> week.` and
    `<X> for inviting <Y> last <Z>`. So together they hold the whole text.
    """
    ids = np.asarray(ids, dtype=np.int64)
    if len(ids) < 2 or len(sentinels) < 2:
        raise UsageError(
            f"a text of {len(ids)} pieces with {len(sentinels)} sentinels; "
            "to take a span out needs 2 of each"
        )
    if np.isin(ids, sentinels).any():
        raise UsageError("a text has sentinels of its own, so its spans could not be told apart")
    rng = np.random.default_rng(seed)
    taken = min(max(1, round(len(ids) * share)), len(ids) - 1)
    count = min(max(1, round(taken / mean)), len(ids) - taken, len(sentinels) - 1)
    # what is kept may be nothing before the first span and after the last, not between two
    kept = cut_at_random(len(ids) - taken + 2, count + 1, rng)
    kept[[0, -1]] -= 1
    lengths = cut_at_random(taken, count, rng)
    starts = np.cumsum(kept[:-1]) + np.cumsum(lengths) - lengths
    left, out, end = [], [], 0
    for name, start, length in zip(sentinels, starts.tolist(), lengths.tolist(), strict=False):
        left += [ids[end:start], [name]]
        end = start + length
        out += [[name], ids[start:end]]
    left.append(ids[end:])
    out.append([sentinels[count]])
    return np.concatenate(left).astype(np.int64), np.concatenate(out).astype(np.int64)


def infill(ids: Ids, mask: int, seed: int, *, share: float = 0.3, mean: float = 3.0) -> np.ndarray:
    """Put one mask in the place of each of some spans, which may be empty (Lewis et al. 2020).

    Their lengths are drawn by Poisson until this share of the text is gone.
    """
    ids = np.asarray(ids, dtype=np.int64)
    rng = np.random.default_rng(seed)
    budget = round(len(ids) * share)
    gaps = len(ids) - budget + 1  # no two spans touch
    lengths: list[int] = []
    while sum(lengths) < budget and len(lengths) < gaps:
        # a span may be empty where there are more tokens gone than masks: a text never grows
        least = int(len(lengths) >= sum(lengths))
        lengths.append(min(max(least, int(rng.poisson(mean))), budget - sum(lengths)))
    places = np.sort(rng.choice(gaps, len(lengths), replace=False)).tolist()
    out, end, gone = [], 0, 0
    for place, length in zip(places, lengths, strict=True):
        out += [ids[end : place + gone], [mask]]
        gone += length
        end = place + gone
    return np.concatenate([*out, ids[end:]]).astype(np.int64)


def permute_parts(ids: Ids, lengths: Ids, seed: int) -> np.ndarray:
    """Put the parts (sentences) of a text, which have these lengths, in another order."""
    parts = np.split(np.asarray(ids, dtype=np.int64), np.cumsum(lengths)[:-1])
    order = np.random.default_rng(seed).permutation(len(parts))
    return np.concatenate([parts[place] for place in order])


# Texts in pieces of at most a length, whose sentences are known


def cut_texts(
    texts: Iterable[str], tokenizer: Tokenizer, longest: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield stretches of texts: ids, of which there are at most so many, and those a sentence.

    Joined, the stretches of a text are all of it.
    """
    for text in texts:
        ids: list[int] = []
        lengths: list[int] = []
        for number, block in enumerate(_blocks(text)):
            pieces = split_sentences(block)
            # what parts two sentences belongs to the second, as a space does to its word
            sentences = [a + b for a, b in zip(["", *pieces[1::2]], pieces[::2], strict=False)]
            rows = tokenizer.encode_parts(sentences) if number else _begun(sentences, tokenizer)
            rows += tokenizer.encode_parts(pieces[-1:]) if pieces and pieces[-1] else []
            for row in rows:
                for start in range(0, len(row), longest):
                    part = row[start : start + longest]
                    if len(ids) + len(part) > longest:
                        yield ids, lengths
                        ids, lengths = [], []
                    ids += part
                    lengths.append(len(part))
        if ids:
            yield ids, lengths


def _begun(sentences: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Split the sentences of a text's beginning into ids; its first word has no space before it."""
    first = next((i for i, sentence in enumerate(sentences) if sentence.strip()), 0)
    return [
        *tokenizer.encode_parts(sentences[:first]),
        *tokenizer.encode_batch(sentences[first : first + 1]),
        *tokenizer.encode_parts(sentences[first + 1 :]),
    ]


def _blocks(text: str) -> Iterator[str]:
    """Cut a long text at the ends of lines, so that little of it is in memory twice."""
    start = 0
    while start < len(text):
        end = text.rfind("\n", start, start + BLOCK) + 1 if len(text) - start > BLOCK else 0
        end = end or min(len(text), start + BLOCK)
        yield text[start:end]
        start = end
