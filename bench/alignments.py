"""Word alignment by cross-attention against gold links, beside eflomal on the same pairs.

    python bench/alignments.py [--quick] [--model en-zh] [--eflomal ENV/bin/eflomal-align]

Gold links are those of shared/data/alignments. A head is chosen on the first half of them and
judged on the second, at once and one step later; so is the mean of the heads of a layer, and of all
layers. eflomal (Östling and Tiedemann 2016) is trained on the pairs that the model was trained on
and on the gold set's own: English words, Chinese characters, which are then laid over the words.
Two ways of counting: all links, and only those of source words that have a gold link.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from apart import machine  # noqa: E402

import regard  # noqa: E402
from regard.insight.alignments import ALL, MEAN, Aligned, head_links, read_links  # noqa: E402
from regard.metrics.alignment import Link, score_links  # noqa: E402

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
AROUND = [(-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1)]


def line(name: str, predicted: Sequence[Iterable[Link]], gold: Sequence[Iterable[Link]]) -> None:
    """Print the error rates of links."""
    both = [score_links(predicted, gold, linked_only=linked) for linked in (False, True)]
    rates = "  ".join(f"{score.error_rate:.3f}" for score in both)
    print(f"{name:<44} {rates}  {both[0].precision:.3f}  {both[0].recall:.3f}", flush=True)


def symmetrised(forward: set[Link], backward: set[Link]) -> set[Link]:
    """Return links of both directions: grow-diag-final-and (Koehn et al. 2003)."""
    links, union = forward & backward, forward | backward

    def free(link: Link) -> tuple[bool, bool]:
        return all(s != link[0] for s, _ in links), all(t != link[1] for _, t in links)

    grown = True
    while grown:
        grown = False
        for s, t in sorted(links):
            for down, right in AROUND:
                link = s + down, t + right
                if link in union and link not in links and any(free(link)):
                    links.add(link)
                    grown = True
    for one in (forward, backward):
        for link in sorted(one):
            if all(free(link)):
                links.add(link)
    return links


def run_eflomal(program: str, pairs: list[tuple[str, str]], gold: list[Aligned]) -> None:
    """Train eflomal on pairs and the gold set's own, and print its error rates."""
    source = [" ".join(re.findall(r"\w+|[^\w\s]", a.lower())) for a, _ in pairs]
    target = [" ".join("".join(b.split())) for _, b in pairs]
    source += [" ".join(pair.source).lower() for pair in gold]
    target += [" ".join("".join(pair.target)) for pair in gold]
    with tempfile.TemporaryDirectory() as folder:
        names = {key: str(Path(folder) / key) for key in ("s", "t", "f", "r")}
        Path(names["s"]).write_text("\n".join(source) + "\n")
        Path(names["t"]).write_text("\n".join(target) + "\n")
        words = [word for key, path in names.items() for word in (f"-{key}", path)]
        subprocess.run([program, *words, "--model", "3", "--overwrite"], check=True)
        found = []
        for key in ("f", "r"):
            rows = Path(names[key]).read_text().split("\n")[len(pairs) : len(pairs) + len(gold)]
            found.append([{(int(s), int(t)) for s, t in _links(row)} for row in rows])
    ways = {
        "forward": found[0],
        "backward": found[1],
        "intersection": [a & b for a, b in zip(*found, strict=True)],
        "grow-diag-final-and": [symmetrised(a, b) for a, b in zip(*found, strict=True)],
    }
    for name, links in ways.items():
        words = [_over_words(some, pair.target) for some, pair in zip(links, gold, strict=True)]
        half = len(gold) // 2
        line(f"eflomal, {name}", words[half:], [pair.links for pair in gold[half:]])


def _links(row: str) -> list[list[str]]:
    return [word.split("-") for word in row.split()]


def _over_words(links: set[Link], words: list[str]) -> set[Link]:
    """Lay links to characters over the words of these."""
    of = [number for number, word in enumerate(words) for _ in word]
    return {(s, of[t]) for s, t in links}


def main() -> None:
    """Judge the heads of a model, then eflomal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="40 sentences, and no eflomal")
    parser.add_argument("--model", default="en-zh")
    parser.add_argument("--eflomal", help="the program eflomal-align")
    options = parser.parse_args()
    print(machine(), flush=True)
    torch.set_num_threads(1)
    model = regard.load(options.model, task="translate")
    gold = read_links(SHARED / "alignments" / "en-zh.tsv", 40 if options.quick else 10_000)
    found, half = list(head_links(model, gold, quiet=False)), len(gold) // 2
    links = [pair.links for pair in gold]

    def rate(key: tuple[str, int | str, int]) -> float:
        return score_links([one[key] for one in found[:half]], links[:half]).error_rate

    def tell(name: str, keys: Iterable[tuple[str, int | str, int]]) -> None:
        key = min(keys, key=rate)
        shown = f"{name}: {key[0]} {key[1]}{', one step later' * key[2]}"
        line(shown, [one[key] for one in found[half:]], links[half:])

    print(f"{'second half of ' + str(len(gold)) + ' pairs':<44} AER    linked precision recall")
    keys, single = list(found[0]), [key for key in found[0] if key[1] != MEAN]
    assert model.predictor.aligner.head is not None  # the starter names it
    tell("chosen without links", [(*model.predictor.aligner.head, 0)])
    tell("chosen without links", [(*model.predictor.aligner.head, 1)])
    tell("best head", [key for key in single if not key[2]])
    tell("best head", [key for key in single if key[2]])
    tell("best mean of a layer", [key for key in keys if key[1] == MEAN and key[0] != ALL])
    tell("mean", [(ALL, MEAN, 0)])
    tell("mean", [(ALL, MEAN, 1)])
    for name, pick in (("first word", lambda t, n: 0), ("diagonal", lambda t, n: t * n)):
        guesses = [
            {
                (min(len(p.source) - 1, int(pick(t / len(p.target), len(p.source)))), t)
                for t in range(len(p.target))
            }
            for p in gold[half:]
        ]
        line(f"baseline, {name}", guesses, links[half:])
    if options.eflomal and not options.quick:
        rows = (SHARED / "tatoeba-en-zh" / "train.tsv").read_text("utf-8").splitlines()
        pairs = [(row.split("\t")[0], row.split("\t")[1]) for row in rows]
        run_eflomal(options.eflomal, pairs, gold)


if __name__ == "__main__":
    main()
