"""WikiText-2 as people write: the text that the starter `fill` learns from.

    python bench/plain_wikitext.py ../shared/data/wikitext-2 wikitext-2-plain

WikiText-2 is cut into words, with spaces around every sign, and rare words are `<unk>`. Here
headings and sentences with `<unk>` are left out. Each part is written twice, one after the other:
with the spelling restored, and in lower case with the spaces, as many sets of sentences are.
"""

import lzma
import re
import sys
from pathlib import Path

from regard.files import write_atomically

PARTS = ("train", "valid", "test")
END = re.compile(r"(?<= [.!?]) (?=[A-Z\"(])")
GLUE = (
    (r" @(.)@ ", r"\1"),  # role @-@ playing, 1 @,@ 000
    (r" ([.,;:!?%)\]])", r"\1"),
    (r"([(\[$£]) ", r"\1"),
    (r" ('(?:s|m|d|ll|re|ve)\b)", r"\1"),
    (r" n't\b", "n't"),
    (r'" ([^"]*?) "', r'"\1"'),
    (r"' ([^']*?) '", r"'\1'"),
)


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs, without headings and the sentences that lack a word."""
    lines = (line.strip() for line in text.split("\n"))
    kept = ([s for s in END.split(line) if "<unk>" not in s] for line in lines if line[:1] != "=")
    return [" ".join(some) for some in kept if sum(map(len, some)) > 40]


def spelled(paragraph: str) -> str:
    """Return a paragraph with the spaces that people write."""
    for pattern, by in GLUE:
        paragraph = re.sub(pattern, by, paragraph)
    return paragraph


def spaced(paragraph: str) -> str:
    """Return a paragraph in lower case, its words and signs apart."""
    return re.sub(r" @(.)@ ", r"\1", paragraph).lower()


def main() -> None:
    """Write train.txt, valid.txt and test.txt."""
    source, out = map(Path, sys.argv[1:])
    out.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        packed = (source / f"wiki.{part}.tokens.xz").read_bytes()
        rows = paragraphs(lzma.decompress(packed).decode())
        text = "\n".join([*map(spelled, rows), *map(spaced, rows), ""])
        write_atomically(out / f"{part}.txt", text)
        print(f"{part}: {len(rows):,} paragraphs, {len(text):,} characters")


if __name__ == "__main__":
    main()
