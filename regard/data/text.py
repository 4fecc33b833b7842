"""The former home of pairs, columns, languages and sentences, for imports that still name it."""

from regard.data.languages import find_languages
from regard.data.pairs import (
    Corpus,
    Pair,
    PairReader,
    find_parts,
    load_pairs,
    read_pairs,
)
from regard.data.pairs import (
    PairFiles as Part,
)
from regard.data.parts import find_file
from regard.data.sentences import join_sentences, split_sentences

__all__ = [
    "Corpus",
    "Pair",
    "PairReader",
    "Part",
    "find_file",
    "find_languages",
    "find_parts",
    "join_sentences",
    "load_pairs",
    "read_pairs",
    "split_sentences",
]
