"""Word alignments against gold links: precision, recall and the alignment error rate."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from regard.errors import UsageError

Link = tuple[int, int]  # the number of a source word, and of a target word


@dataclass(frozen=True)
class AlignmentScore:
    """How links compare with gold links: counts, and what follows from them."""

    predicted: int
    gold: int
    right: int

    @property
    def precision(self) -> float:
        """Share of the predicted links that are right."""
        return self.right / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """Share of the gold links that were predicted."""
        return self.right / self.gold if self.gold else 0.0

    @property
    def error_rate(self) -> float:
        """Alignment error rate (Och and Ney 2003), here 1 - F1: all links are sure."""
        both = self.predicted + self.gold
        return 1 - 2 * self.right / both if both else 0.0


def score_links(
    predicted: Sequence[Iterable[Link]],
    gold: Sequence[Iterable[Link]],
    *,
    linked_only: bool = False,
) -> AlignmentScore:
    """Compare the links of sentences with gold ones.

    With `linked_only`, a prediction counts only where its source word has a gold link, which is
    fair if annotators linked some words only.
    """
    if len(predicted) != len(gold):
        raise UsageError(f"{len(predicted)} alignments for {len(gold)} gold ones; expected as many")
    counts = [0, 0, 0]
    for some, right in zip(map(set, predicted), map(set, gold), strict=True):
        sources = {source for source, _ in right}
        some = {link for link in some if link[0] in sources} if linked_only else some
        for n, number in enumerate((len(some), len(right), len(some & right))):
            counts[n] += number
    return AlignmentScore(*counts)


def parse_links(text: str, source: int, target: int, where: str) -> set[Link]:
    """Read links such as 0-0 1-2 (Pharaoh's format) between so many source and target words."""
    links: set[Link] = set()
    for word in text.split():
        a, dash, b = word.partition("-")
        if not (dash and a.isdecimal() and b.isdecimal() and max(len(a), len(b)) < 10):
            raise UsageError(
                f"{where}: {word!r:.20} is not a link; expected source-target, as in 0-2"
            )
        if int(a) >= source or int(b) >= target:
            raise UsageError(f"{where}: link {word} to one of {source} and {target} words")
        links.add((int(a), int(b)))
    return links
