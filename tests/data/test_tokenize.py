"""Text survives its tokens, and what is drawn by a seed can be drawn again."""

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data.characters import Characters
from regard.data.tokenize import FIRST, SubwordTokenizer, train_tokenizer
from regard.errors import UsageError

DATA = Path(os.environ.get("REGARD_DATA", "../shared/data"))
TEXTS = [
    "A man is playing the guitar on the street.",
    "A woman's dog doesn't play (much) in 2016, or 1999...",
    "Zwei Männer spielen Gitarre auf der Straße.",
    "我们是学生，他们也是学生。",
    "你好 world! 我们在学习中文。",
] * 4


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def tokenizer(request):
    return train_tokenizer(TEXTS, kind=request.param, vocab=420)


@pytest.fixture(scope="module")
def bpe():
    return train_tokenizer(TEXTS, vocab=420)


HARD = [
    "",
    " ",
    "  ",
    " a",
    "a ",
    "a  b   c",
    "\n",
    "\r\n\t \x0b\x0c\x85\u2028\u00a0\u3000",
    "\u3000我",
    " 我",
    "我 我",
    "▁",
    "▁a ▁▁ b▁",
    "</s>",
    "<pad>",
    "<s> a</s> <unk>",
    "<0x41>",
    " <0x0A>",
    "👩‍👩‍👧 e\u0301 ó\u0323",
    "\u0301",
    "\ufeffa",
    "\x01\x1f\x7f",
    "don't 'tis l'eau",
    "नमस्ते สวัสดี 한국어",
    "\x00",
    "x" * 100,
    "\U0010ffff\ufffd",
    "··⁇",
]


@pytest.mark.parametrize("text", HARD, ids=ascii)
def test_hard_texts_come_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(number >= 4 for number in ids)
    assert len(tokenizer.pieces(ids)) == len(ids)


any_text = st.one_of(
    st.text(),
    st.text(alphabet=" \t\n▁a.我é<>/s0x\u3000'"),
    st.lists(st.sampled_from([*HARD, *TEXTS[:5]])).map("".join),
)


@settings(max_examples=300, deadline=None)
@given(any_text)
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(any_text, st.integers(0, 2**40), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_any_sampled_text_comes_back(bpe, text, key, p):
    sampler = bpe.sampler(p, seed=3)
    ids = sampler.encode(text, key)
    assert bpe.decode(ids) == text
    if p == 0:
        assert ids == bpe.encode(text)


def test_batch_is_the_same_as_one_by_one(tokenizer):
    assert tokenizer.encode_batch(HARD) == [tokenizer.encode(text) for text in HARD]


def test_specials_are_skipped_and_have_their_ids(tokenizer):
    assert (tokenizer.pad, tokenizer.bos, tokenizer.eos) == (0, 1, 2)
    ids = tokenizer.encode("A man")
    assert tokenizer.decode([1, *ids, 2, 0, 0]) == "A man"
    assert tokenizer.pieces([1, 2, 0]) == ["<s>", "</s>", "<pad>"]


def test_a_word_is_spelt_alike_at_the_start_and_inside():
    tokenizer = train_tokenizer(["man plays man", "plays man", "我们 man"] * 9, vocab=400)
    (man,) = tokenizer.encode("man")
    assert tokenizer.encode("plays man")[-1] == man
    assert tokenizer.pieces([man]) == ["▁man"]
    assert tokenizer.encode("我们") == tokenizer.encode("man我们")[1:]


def test_unknown_characters_are_bytes_shown_readably(bpe):
    ids = bpe.encode("a😀")
    assert bpe.pieces(ids) == ["▁a", "😀", "·", "·", "·"]
    assert bpe.pieces(ids[:-1]) == ["▁a", "<0xF0>", "<0x9F>", "<0x98>"]
    assert bpe.pieces(ids[2:] + ids[1:]) == ["<0x9F>", "<0x98>", "<0x80>", "😀", "·", "·", "·"]
    assert bpe.pieces([ids[1], 4 + ord("Q"), ids[2]]) == ["<0xF0>", "Q", "<0x9F>"]
    assert bpe.decode(ids[:-1]) == "a\ufffd"
    assert bpe.pieces(bpe.encode("a\n"))[-1] == "\\n"


def test_training_is_deterministic_and_saving_exact(tokenizer, tmp_path):
    kind = "bpe" if '"BPE"' in tokenizer.text else "unigram"
    assert train_tokenizer(iter(TEXTS), kind=kind, vocab=420).sha == tokenizer.sha
    tokenizer.save(tmp_path / "tokenizer.json")
    again = SubwordTokenizer.load(tmp_path / "tokenizer.json")
    assert (again.sha, again.vocab) == (tokenizer.sha, tokenizer.vocab)
    assert again.encode_batch(HARD) == tokenizer.encode_batch(HARD)


def test_the_library_alone_decodes_the_same(tokenizer, tmp_path):
    import tokenizers

    library = tokenizers.Tokenizer.from_str(tokenizer.text)
    for text in TEXTS:
        ids = library.encode(" " + text).ids if text[0] not in "我你" else library.encode(text).ids
        assert ids == tokenizer.encode(text)
        assert library.decode(ids) == text


def test_a_small_text_gives_a_smaller_vocabulary(tokenizer):
    kind = "bpe" if '"BPE"' in tokenizer.text else "unigram"
    for texts in (["a"], ["ab ab"], ["我"], TEXTS):
        small = train_tokenizer(texts, kind=kind, vocab=8000)
        assert small.vocab < 1000
        assert small.decode(small.encode("hello 我")) == "hello 我"


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"vocab": 10}, "vocab=10; expected 300"),
        ({"vocab": 10**9}, "vocab=1000000000"),
        ({"kind": "bpee"}, "Did you mean 'bpe'"),
        ({"texts": []}, "no text"),
        ({"texts": ["", ""]}, "no text"),
        ({"texts": ["a\ud800"] * 3}, "U\\+D800"),
    ],
)
def test_what_training_refuses(settings, message):
    settings = {"texts": TEXTS} | settings
    with pytest.raises(UsageError, match=message):
        train_tokenizer(settings.pop("texts"), **settings)


def test_half_characters_are_refused(bpe):
    for encode in (bpe.encode, lambda text: bpe.sampler(0.1, 1).encode(text, 1)):
        with pytest.raises(UsageError, match="U\\+D800"):
            encode("a\ud800")


@pytest.mark.parametrize("number", [-1, 420, 10**9])
def test_ids_outside_the_vocabulary_are_refused(bpe, number):
    with pytest.raises(UsageError, match=f"token id {number}; expected 0 to"):
        bpe.decode([number])


def spoil(file, how):
    vocab, model = file["model"]["vocab"], file["model"]
    if how == "regex":
        file["pre_tokenizer"]["pattern"]["Regex"] = "(a*)*b"
    elif how == "normalizer":
        file["normalizer"] = {"type": "Lowercase"}
    elif how == "added":
        file["added_tokens"] = [{"id": 1, "content": "<s>"}]
    elif how == "type":
        model["type"] = "WordPiece"
    elif how == "bytes":
        del vocab[FIRST[9]]
    elif how == "ids":
        vocab["new"] = 5000
    elif how == "empty":
        vocab[""] = len(vocab)
    elif how == "merges":
        model["merges"].append(["zz", "zz"])
    elif how == "triple":
        model["merges"].append(["a", "b", "c"])
    elif how == "dropout":
        model["dropout"] = 0.5
    elif how == "names":
        file["model"]["vocab"] = list(vocab)
    elif how == "none":
        file.clear()


@pytest.mark.parametrize(
    "how",
    ["regex", "normalizer", "added", "type", "bytes", "ids"]
    + ["empty", "merges", "triple", "dropout", "names", "none"],
)
def test_broken_files_are_refused(bpe, tmp_path, how):
    file = json.loads(bpe.text)
    spoil(file, how)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(file))
    with pytest.raises(UsageError, match="not a tokenizer saved by Regard"):
        SubwordTokenizer.load(path)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff", b"[" * 10**6, b"[]", b"null", b"1" * 10**5, b'{"model": 1}']
)
def test_files_of_something_else_are_refused(tmp_path, data):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)
    with pytest.raises(UsageError, match="not a tokenizer") as caught:
        SubwordTokenizer.load(path)
    assert "\n" not in str(caught.value)


def test_missing_and_huge_files_are_refused(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        SubwordTokenizer.load(tmp_path / "none.json")
    with pytest.raises(UsageError, match="not a file"):
        SubwordTokenizer.load(tmp_path)
    with open(tmp_path / "huge.json", "wb") as file:
        file.truncate(65 * 2**20)
    with pytest.raises(UsageError, match="over 64 MB"):
        SubwordTokenizer.load(tmp_path / "huge.json")


def test_unigram_scores_must_be_finite(tmp_path):
    file = json.loads(train_tokenizer(TEXTS, kind="unigram", vocab=420).text)
    file["model"]["vocab"][300][1] = float("nan")
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(UsageError, match="finite"):
        SubwordTokenizer.load(tmp_path / "tokenizer.json")


def test_sampling_is_a_pure_function_of_text_key_and_seed(bpe):
    first, second = bpe.sampler(0.3, seed=1), bpe.sampler(0.3, seed=1)
    forward = {(t, k): first.encode(t, k) for t in TEXTS[:5] for k in range(20)}
    backward = {(t, k): second.encode(t, k) for t, k in reversed(list(forward))}
    assert forward == backward
    other = bpe.sampler(0.3, seed=2)
    assert any(other.encode(t, k) != ids for (t, k), ids in forward.items())
    assert len({tuple(first.encode(TEXTS[0], k)) for k in range(50)}) > 20


def test_more_dropout_gives_more_pieces(bpe):
    def pieces(p):
        sampler = bpe.sampler(p, seed=1)
        return sum(len(sampler.encode(TEXTS[0], key)) for key in range(50)) / 50

    assert pieces(0.0) < pieces(0.1) < pieces(0.5) < pieces(1.0) == len(TEXTS[0]) + 1


def test_what_the_sampler_refuses(bpe):
    for p, variants in ((-0.1, 16), (1.5, 16), (float("nan"), 16), (0.1, 0), (0.1, 1000)):
        with pytest.raises(UsageError, match="expected"):
            bpe.sampler(p, 1, variants)
    with pytest.raises(UsageError, match="unigram"):
        train_tokenizer(TEXTS, kind="unigram", vocab=420).sampler(0.1, 1)


def test_a_prompt_and_a_source_are_a_framed_text_without_its_end_and_without_its_begin(tokenizer):
    for framed in (tokenizer, Characters("ab")):
        ids = framed.encode("ab")
        assert framed.frame(ids) == [framed.bos, *ids, framed.eos]
        assert framed.frame(ids, "prompt") == framed.frame(ids)[:-1]
        assert framed.frame(ids, "source") == framed.frame(ids)[1:]


@pytest.mark.parametrize("text", ["我", "a", " ", ".", "ab 我,", "\u0301", "😀"])
def test_a_long_line_without_spaces_is_fast(tokenizer, text):
    line = text * (200_000 // len(text))
    start = time.process_time()
    ids = tokenizer.encode(line)
    assert time.process_time() - start < 5
    assert tokenizer.decode(ids) == line


def test_real_text_comes_back_in_few_pieces():
    path = DATA / "multi30k" / "train.de"
    if not path.exists():
        pytest.skip(f"no {path}; set REGARD_DATA to the folder of data")
    with open(path, encoding="utf-8", newline="\n") as file:
        lines = [line.rstrip("\n") for line in file][:5000]
    tokenizer = train_tokenizer(lines, vocab=4000)
    ids = tokenizer.encode_batch(lines)
    assert [tokenizer.decode(row) for row in ids] == lines
    words = sum(len(line.split()) for line in lines)
    assert tokenizer.vocab == 4000
    assert sum(map(len, ids)) / words < 1.5
    sampler = tokenizer.sampler(0.1, seed=1)
    assert all(tokenizer.decode(sampler.encode(line, 7)) == line for line in lines)
