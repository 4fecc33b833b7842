"""Make the data of the starter en-zh: Tatoeba's pairs, and words of CC-CEDICT that they use.

A dictionary teaches words that the sentences hold too rarely ("green tea"). Of its 122,000 entries
those are taken whose English is one to three words that Tatoeba's English has, and whose Chinese
stands in Tatoeba's Chinese; of several translations the one that stands there most often.

    python bench/en_zh_data.py out=runs/en-zh-data
    python bench/en_zh_data.py out=runs/en-zh-short short=6

The second is for a second stage: sentences of at most six words are there twice.
"""

import gzip
import re
import sys
from collections import Counter
from pathlib import Path

from regard.recipes import data_folder

GLOSS = re.compile(r"[a-z]+(?:[ '-][a-z]+){0,2}")
ENTRY = re.compile(r"\S+ (\S+) \[[^]]*\] /(.*)/")
HAN = re.compile(r"[\u4e00-\u9fff]+")


def dictionary(path: Path, english: Counter[str], chinese: str) -> list[tuple[str, str]]:
    """Words and short phrases of CC-CEDICT with their most usual translation."""
    best: dict[str, tuple[int, str]] = {}
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            if not (entry := ENTRY.match(line)) or not HAN.fullmatch(entry[1]):
                continue
            glosses = [g.strip() for part in entry[2].split("/") for g in part.split(";")][:3]
            for rank, gloss in enumerate(glosses):
                gloss = gloss.removeprefix("to ").removeprefix("a ").removeprefix("an ")
                words = gloss.split()
                if not GLOSS.fullmatch(gloss) or any(english[w] < 2 for w in words):
                    continue
                count = chinese.count(entry[1])
                if len(entry[1]) == 1 and len(words) == 1:  # single characters mean too much
                    continue
                if count:
                    best[gloss] = max(best.get(gloss, (-1, "")), (count * (3 - rank), entry[1]))
    return [(gloss, word) for gloss, (_, word) in sorted(best.items())]


def main(out: Path, short: int = 0) -> None:
    """Write train.tsv, dev.tsv and test.tsv into `out`; sentences of up to `short` words twice."""
    source = Path(data_folder("tatoeba-en-zh"))
    sentences = [
        line.split("\t")[:2]
        for name in ("train.tsv", "more.tsv")
        for line in (source / name).read_text("utf-8").splitlines()
    ]
    english = Counter(w for pair in sentences for w in re.findall(r"[a-z']+", pair[0].lower()))
    known = {re.sub(r"[^a-z' -]", "", pair[0].lower()) for pair in sentences}
    words = dictionary(
        Path(data_folder("cc-cedict")) / "cedict.txt.gz",
        english,
        "\n".join(p[1] for p in sentences),
    )
    words = [pair for pair in words if pair[0] not in known]
    out.mkdir(parents=True, exist_ok=True)
    again = [pair for pair in sentences if len(pair[0].split()) <= short]
    rows = [f"{a}\t{b}\n" for a, b in (*sentences, *words, *again)]
    (out / "train.tsv").write_text("".join(rows), "utf-8")
    for name in ("dev.tsv", "test.tsv"):
        (out / name).write_bytes((source / name).read_bytes())
    print(f"{len(sentences):,} sentences, {len(words):,} words, {len(again):,} again: {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1].removeprefix("out=")), *(int(word[6:]) for word in sys.argv[2:3]))
