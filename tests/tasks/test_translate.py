"""Laws of the translator: lines in, lines out, and every number checked by a plain full pass."""

import json
import random
from importlib import resources

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import regard.files
import regard.tasks.runner as runner_module
from regard.attention.watch import watch
from regard.cli import main
from regard.data.pairs import Corpus, Pair
from regard.data.parallel import PairBatches
from regard.data.tokenize import train_tokenizer
from regard.data.tokenizer import words_of_pieces
from regard.errors import UsageError
from regard.files import parse_json
from regard.layers.block import BlockConfig
from regard.models.transformer import Transformer, TransformerConfig
from regard.tasks.runner import Runner
from regard.tasks.text.sequence import PairCodec
from regard.tasks.text.translate import TRANSLATE

WORDS = [
    "a",
    "dog",
    "cat",
    "runs",
    "sits",
    "sees",
    "the",
    "big",
    "small",
    "red",
    "house",
    "tree",
    "in",
    "on",
    "under",
]


def some_lines(count: int, seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=chance.randint(1, 9))) + "." for _ in range(count)]


def build(language: str | None = "de", seed: int = 1) -> Runner:
    """Return a translator of random words, its weights enlarged so that it is sure of them."""
    tokenizer = train_tokenizer(some_lines(300), vocab=400)
    torch.manual_seed(seed)
    block = BlockConfig(width=32, heads=2, ffn_width=64)
    size = tokenizer.vocab
    config = TransformerConfig(
        size, size, encoder_depth=1, decoder_depth=2, block=block, head_bias=True
    )
    model = Transformer(config).eval()
    words = torch.tensor([piece.startswith("▁") for piece in tokenizer.pieces(range(size))])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
        model.head.bias.copy_(torch.where(words, 0.0, -40.0))
        model.head.bias[tokenizer.eos] = 6.0
    return TRANSLATE.bind(model, PairCodec(tokenizer, tokenizer), {"to": language})


@pytest.fixture(scope="module")
def shared() -> Runner:
    return build()


@pytest.fixture
def translator(shared) -> Runner:
    """Return the shared translator as if it were new."""
    shared.predictor.aligner.head = None
    return shared


def full(translator: Runner, source: str, target: str) -> torch.Tensor:
    """Return the log-probabilities after each token, by one pass over the whole."""
    ids = [*translator.codec.source.encode(source), 2]
    reads = [1, *translator.codec.target.encode(target)]
    with torch.no_grad():
        logits = translator.model(torch.tensor([ids]), torch.tensor([reads]))
    return F.log_softmax(logits[0].double(), -1)


def texts(answers) -> list[str]:
    return [answer.text for answer in answers]


# Lines and paragraphs


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"beam": 1},
        {"n_best": 3, "scores": True},
        {"temperature": 1.0, "n_best": 2},
        {"alignments": "pharaoh"},
        {"prefix": "the"},
        {"script": "traditional"},
        {"split": False},
    ],
)
def test_an_empty_line_is_an_empty_line(translator, settings):
    assert texts(translator.run(["", "   ", "\t", ""], **settings)) == ["", "   ", "\t", ""]
    mixed = translator.run(["", "a dog.", "", "the cat.", ""], max_length=5, **settings)
    assert [bool(answer.text) for answer in mixed] == [False, True, False, True, False]
    assert translator.run([], **settings) == []


def test_a_paragraph_is_its_sentences_with_what_was_between_them(translator):
    sentences = ["A dog runs.", "The cat sits!", "A tree?", "In the house"]
    one, two, three, four = texts(translator.run(sentences))
    text = f"  {sentences[0]} {sentences[1]}\n\n {sentences[2]}\n{sentences[3]}\n"
    assert texts(translator.run([text])) == [f"  {one} {two}\n\n {three}\n{four}\n"]


def test_unsplit_a_paragraph_is_one_sentence(translator):
    text = "A dog runs. The cat sits."
    (whole,) = translator.run([text], split=False)
    assert whole.logprob == pytest.approx(own_logprob(translator, text, whole.text), abs=1e-3)
    assert whole.text != translator.run([text])[0].text


def own_logprob(translator: Runner, source: str, target: str) -> float:
    """Return how likely a written text is when pad, bos and unk cannot be written."""
    logprobs = full(translator, source, target)
    logprobs[:, [0, 1, 3]] = -torch.inf
    logprobs = logprobs.log_softmax(-1)
    ids = translator.codec.target.encode(target)
    found = sum(float(logprobs[i, number]) for i, number in enumerate(ids))
    longest = 10 + 3 * (len(translator.codec.source.encode(source)) + 1) // 2
    return found + (float(logprobs[-1, 2]) if len(ids) < longest else 0.0)


def test_a_line_without_end_is_read_in_parts(translator):
    for line in (("dog " * 12_500)[:50_000], "x" * 50_000):
        (answer,) = translator.run([line], max_length=3, beam=1)
        parts = -(-len(translator.codec.source.encode(line.strip())) // 400)
        assert parts > 20
        assert 0 < len(answer.text.split()) <= 3 * parts


def test_one_text_may_come_without_a_list(translator):
    assert [str(translator.run("a dog."))] == texts(translator.run(["a dog."]))


@pytest.mark.parametrize("inputs", [[3], [None], ["a", b"b"], 5])
def test_what_is_no_text_is_refused(translator, inputs):
    with pytest.raises(UsageError, match="text"):
        translator.run(inputs)


# Answers


def test_the_batch_never_matters(translator):
    lines = some_lines(64, seed=9) + ["", some_lines(1)[0] * 3]
    ones = translator.run(lines, batch_rows=1, beam=3)
    assert len(set(texts(ones))) > 30
    for rows, tokens in ((7, 4096), (64, 4096), (64, 50)):
        some = translator.run(lines, batch_rows=rows, batch_tokens=tokens, beam=3)
        assert texts(some) == texts(ones)
        scores = [answer.score for answer in some]
        assert scores == pytest.approx([answer.score for answer in ones], abs=1e-5)
    assert texts(translator.run(lines[::-1], beam=3)) == texts(ones)[::-1]


def test_n_best_are_different_and_best_first(translator):
    (answer,) = translator.run(["a dog sees the red house."], n_best=4, scores=True)
    answers = [answer, *answer.others]
    assert len({each.text for each in answers}) == 4
    scores = [each.score for each in answers]
    assert scores == sorted(scores, reverse=True)
    (best,) = translator.run(["a dog sees the red house."])
    assert (best.text, best.score, best.others) == (answer.text, answer.score, [])
    how = translator.check({"n_best": 4, "scores": True})
    lines = list(answer.lines(how))
    assert lines == [f"{each.text} ||| {each.score:.6f}" for each in answers]
    record = answer.record(how)
    assert [each["prediction"] for each in record["n_best"]] == [each.text for each in answers]
    assert json.loads(json.dumps(record)) == record


def test_a_score_is_the_log_probability_over_the_length(translator):
    source = "the big tree."
    (answer,) = translator.run([source], length_penalty="none")
    assert answer.score == pytest.approx(answer.logprob)
    assert answer.logprob == pytest.approx(own_logprob(translator, source, answer.text), abs=1e-3)


def test_a_prefix_is_how_the_answer_begins(translator):
    for settings in ({}, {"beam": 1}, {"temperature": 1.0}, {"n_best": 3}):
        (answer,) = translator.run(["a dog."], prefix="the red", **settings)
        assert all(each.text.startswith("the red") for each in [answer, *answer.others])
    free, led = translator.run(["a dog."])[0], translator.run(["a dog."], prefix="the red")[0]
    assert not free.text.startswith("the red")
    assert led.logprob < free.logprob


def test_only_the_first_sentence_of_an_answer_gets_the_prefix(translator):
    (second,) = texts(translator.run(["The cat sits."]))
    (answer,) = texts(translator.run(["A dog runs. The cat sits."], prefix="under"))
    assert answer.startswith("under")
    assert answer.endswith(" " + second)


def test_forced_scores_are_those_of_a_full_pass(translator):
    pairs = [("a dog.", "the cat."), ("the big red tree.", "in"), ("", "on"), ("x", "")]
    pairs += [("a dog.", " ".join(WORDS * 6))]  # longer than one span of logits
    answers = translator.run([f"{a}\t{b}" for a, b in pairs], forced=True, batch_rows=3)
    for (source, target), answer in zip(pairs, answers, strict=True):
        logprobs = full(translator, source, target)
        ids = [*translator.codec.target.encode(target), 2]
        expected = sum(float(logprobs[i, number]) for i, number in enumerate(ids))
        assert answer.logprob == pytest.approx(expected, rel=1e-5, abs=1e-4)
        assert answer.score == pytest.approx(expected / len(ids), rel=1e-5, abs=1e-4)
        assert answer.text == target
    how = translator.check({"forced": True})
    assert list(answers[0].lines(how)) == [f"the cat. ||| {answers[0].score:.6f}"]


def test_forced_without_a_tab_is_refused(translator):
    with pytest.raises(UsageError, match="input 2 has no TAB"):
        translator.run(["a\tb", "c"], forced=True)


def test_draws_depend_on_seed_and_line_alone(translator):
    lines = some_lines(9, seed=2)
    how = {"temperature": 1.3, "seed": 5}
    whole = texts(translator.run(lines, **how))
    parts = translator.run(lines[:4], **how) + translator.run(lines[4:], first=4, **how)
    assert texts(parts) == whole
    assert texts(translator.run(lines, batch_rows=2, **how)) == whole
    assert texts(translator.run(lines, **{**how, "seed": 6})) != whole
    assert texts(translator.run(lines[4:], **how)) != whole[4:]
    repeated = texts(translator.run([lines[0]] * 8, **how))
    assert len(set(repeated)) > 1  # each line has its own luck


def test_a_chinese_answer_in_either_script():
    translator = build("zh")
    for script, prefix, wanted in (
        ("traditional", "汉语", "漢語"),
        ("simplified", "漢語", "汉语"),
        ("", "汉漢", "汉漢"),
    ):
        (answer,) = translator.run(["a dog."], prefix=prefix, script=script, max_length=12)
        assert answer.text.startswith(wanted)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_best": 6}, "n_best=6 is more than beam=5"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"prefix": "the red house", "max_length": 1}, "longer than max_length=1"),
    ],
)
def test_wrong_settings_cost_one_line(translator, settings, message):
    with pytest.raises(UsageError) as mistake:
        translator.run(["a dog."], **settings)
    assert message in str(mistake.value) and "\n" not in str(mistake.value)


@pytest.mark.parametrize("words", [[], ["beam=2"]])
def test_a_request_resolves_its_settings_and_reads_its_config_once(words, monkeypatch, capsys):
    filled, read, real = [], [], runner_module.fill

    def fill(kind, values, **rest):
        filled.append((kind, dict(values)))
        return real(kind, values, **rest)

    def parse(data):
        read.append(bytes(data))
        return parse_json(data)

    monkeypatch.setattr(runner_module, "fill", fill)
    monkeypatch.setattr(regard.files, "parse_json", parse)
    assert main(["run", "en-zh", "How are you?", *words]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    config = (resources.files("regard") / "starters" / "en-zh" / "config.json").read_bytes()
    assert read.count(config) == 1
    own, *given = [values for kind, values in filled if kind is TRANSLATE.Run]
    assert own["beam"] == 5  # the model's own, when it is loaded
    assert given == [{"beam": "2"} for _ in words]


def test_pairs_that_are_stored_are_not_tokenised_again(tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path))
    long = Pair("a " * 200, "b", "")  # the first, so that all others have another number
    pairs = [long, *(Pair(line, line.upper(), "") for line in some_lines(40))]
    corpus = Corpus({"train": pairs, "valid": pairs[:4]}, None, None)
    tokenizer = train_tokenizer([p.source for p in pairs] + [p.target for p in pairs], vocab=320)
    options = {"tokens": 200, "longest": 99, "seed": 3}
    first = PairBatches(corpus, (tokenizer, tokenizer), **options)
    monkeypatch.setattr(type(tokenizer), "encode_batch", None)
    again = PairBatches(corpus, (tokenizer, tokenizer), **options)
    assert first.left_out == again.left_out == 1
    for n in range(5):
        assert torch.equal(first[n].source, again[n].source)
        assert torch.equal(first[n].writes, again[n].writes)
    noisy = PairBatches(corpus, (tokenizer, tokenizer), bpe_dropout=1.0, **options)
    for ids, length in zip(noisy[0].source.tolist(), noisy[0].source_lengths, strict=True):
        text = tokenizer.decode(ids[: length - 1])
        assert text in {pair.source for pair in pairs[1:]}
    assert noisy[0].source.shape[1] > first[0].source.shape[1]
    assert len(noisy[0].source) == len(first[0].source)


# Looking


def direct_maps(translator: Runner, source: list[int], target: list[int]):
    with torch.no_grad(), watch(translator.model) as maps:
        translator.model(torch.tensor([source]), torch.tensor([[1, *target]]))
    return maps


def test_maps_of_a_hypothesis_are_those_of_a_full_pass(translator):
    source = [*translator.codec.source.encode("a dog sees the tree."), 2]
    target = translator.codec.target.encode("the cat")
    maps, logits = translator.predictor.maps(source, target)
    other = direct_maps(translator, source, target)
    assert (
        maps.names()
        == other.names()
        == [
            "encoder.0.attention",
            "decoder.0.attention",
            "decoder.0.cross",
            "decoder.1.attention",
            "decoder.1.cross",
        ]
    )
    for name in maps.names():
        assert torch.equal(maps[name].weights(), other[name].weights())
        assert torch.allclose(maps[name].weights().sum(-1), torch.tensor(1.0), atol=1e-5)
    expected = full(translator, "a dog sees the tree.", "the cat")
    torch.testing.assert_close(logits.double().log_softmax(-1), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("beam", [1, 5])
def test_an_alignment_is_where_each_word_looked_most(translator, beam):
    source = "a dog sees the red house."
    (answer,) = translator.run([source], alignments="pharaoh", beam=beam, prefix="the big cat")
    name, head = translator.predictor.aligner.head
    assert name in ("decoder.0.cross", "decoder.1.cross") and head in (0, 1)
    tokenizer = translator.codec.source
    ids = [*tokenizer.encode(source), 2]
    alignment = answer.alignment
    assert alignment is not None
    assert alignment.source == source.split()
    assert alignment.target == answer.text.split()
    # by hand, for the very pieces that were written
    hypothesis = tokenizer.encode(answer.text)
    weights = direct_maps(translator, ids, hypothesis)[name].weights()[0, head].numpy()
    places, groups = (words_of_pieces(tokenizer.pieces(some))[1] for some in (ids[:-1], hypothesis))
    mass = np.zeros((max(groups) + 1, max(places) + 1))
    for row, of_row in enumerate(groups):
        for column, of_column in enumerate(places):
            mass[of_row, of_column] += weights[row, column]
    links = {(int(best), row) for row, best in enumerate(mass.argmax(1))}
    assert set(alignment.links) == links
    how = translator.check({"alignments": "pharaoh"})
    assert list(answer.lines(how)) == [f"{answer.text} ||| {alignment}"]
    told = list(answer.lines(translator.check({"alignments": "json"})))[0].split(" ||| ")[1]
    assert json.loads(told)["links"] == [list(link) for link in sorted(links)]


def test_alignments_do_not_change_the_answer(translator):
    lines = some_lines(6, seed=3)
    plain = translator.run(lines, n_best=2)
    aligned = translator.run(lines, n_best=2, alignments="json")
    assert texts(aligned) == texts(plain)
    assert all(other.alignment is not None for answer in aligned for other in answer.others)


def test_words_of_a_paragraph_are_counted_through(translator):
    (answer,) = translator.run(["A dog runs. The cat sits."], alignments="pharaoh")
    assert answer.alignment is not None
    assert answer.alignment.source == ["A", "dog", "runs.", "The", "cat", "sits."]
    assert max(s for s, _ in answer.alignment.links) > 2


def test_a_given_pair_is_aligned(translator):
    (answer,) = translator.run(["a dog.\tthe cat sits."], forced=True, alignments="pharaoh")
    assert answer.alignment is not None
    assert answer.alignment.target == ["the", "cat", "sits."]
    assert [t for _, t in sorted(answer.alignment.links, key=lambda link: link[1])] == [0, 1, 2]


def test_a_picture_shows_the_answer_that_is_given(translator):
    (answer,) = translator.run(["a dog."])
    picture = translator.picture("a dog.")
    assert picture.output == answer.text
    assert len(picture.views) == 5
    logprobs = full(translator, "a dog.", answer.text)
    ids = [*translator.codec.target.encode(answer.text), 2]
    probabilities = [float(logprobs[i, number].exp()) for i, number in enumerate(ids)]
    assert [step.probability for step in picture.steps] == pytest.approx(probabilities, abs=1e-4)
