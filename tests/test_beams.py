"""Beams on screen: a trace tells all that a beam search did, and changes nothing of it."""

import json
from collections import Counter

import pytest

import regard
from regard.cli import main
from regard.decode.sentences import Sentence
from regard.decode.trace import FATES, BeamTrace
from regard.errors import UsageError
from regard.viewer.beams import place_nodes
from regard.viewer.picture import Node, Tree

TEXTS = ["How are you?", "He bought a new car yesterday.", "I don't think that he will come."]


@pytest.fixture(scope="module")
def model():
    """Return the starter that translates."""
    return regard.load("en-zh", task="translate")


def decode(model, text: str, **settings):
    """Decode a text by the common decoder, with a trace and without."""
    asked = model.check(settings)
    source = model.framed(model.encode_source(text, asked))
    sentence, trace = Sentence(0, source, [], ""), BeamTrace()
    (plain,) = model.decoder.batch([sentence], asked, 0)
    (traced,) = model.decoder.batch([sentence], asked, 0, trace)
    return plain, traced, trace


@pytest.mark.parametrize(
    "settings",
    [
        {"beam": 2},
        {"beam": 5, "n_best": 5},
        {"beam": 4, "length_penalty": "none"},
        {"beam": 3, "max_length": 3, "n_best": 3},
    ],
)
@pytest.mark.parametrize("text", TEXTS)
def test_a_trace_changes_nothing_and_tells_everything(model, text: str, settings):
    plain, traced, trace = decode(model, text, **settings)
    assert plain == traced
    branches, beam, eos = trace.branches, settings["beam"], model.target_tokenizer.eos
    # what was written is in the tree, with its score
    ends = {}
    for number in trace.finished():
        ids = trace.ids(number)
        ends[tuple(ids[:-1] if ids[-1] == eos else ids)] = branches[number].score
    for hypothesis in plain:
        assert ends[tuple(hypothesis.ids)] == pytest.approx(hypothesis.score, abs=1e-5)
    # only what went on has children, and each step goes on from at most the width of the beam
    parents = {branch.parent for branch in branches} - {-1}
    assert all(branches[number].fate == "open" for number in parents)
    depths = [len(trace.ids(number)) for number in range(len(branches))]
    alive = [n for n, branch in enumerate(branches) if branch.fate in ("open", "stopped")]
    assert max(Counter(depths[number] for number in alive).values()) <= beam
    # what fell out of the beam was no likelier than all that stayed in
    for depth in set(depths):
        kept = [branches[n].logprob for n in alive if depths[n] == depth]
        dropped = [
            branch.logprob
            for branch, its in zip(branches, depths, strict=True)
            if branch.fate == "beam" and its == depth
        ]
        if kept and dropped:
            assert max(dropped) <= min(kept)
    assert trace.end and {branch.fate for branch in branches} <= {*FATES}


def test_a_trace_is_of_one_sentence_and_of_a_beam(model):
    asked = model.check({"beam": 3})
    source = model.framed(model.encode_source(TEXTS[0], asked))
    sentences = [Sentence(n, source, [], "") for n in range(2)]
    with pytest.raises(UsageError, match="of one sentence"):
        model.decoder.batch(sentences, asked, 0, BeamTrace())
    for settings in ({"beam": 1}, {"temperature": 1.0}):
        with pytest.raises(UsageError, match="only a beam search"):
            model.decoder.batch(sentences[:1], model.check(settings), 0, BeamTrace())


def test_no_two_hypotheses_stand_in_one_place(model):
    _, _, trace = decode(model, TEXTS[2], beam=5)
    nodes = [Node(b.parent, str(b.token), b.logprob, b.score, b.fate) for b in trace.branches]
    places = place_nodes(Tree(nodes, FATES))
    assert len({*places}) == len(places)
    for node, (step, line) in zip(nodes, places, strict=True):
        if node.parent >= 0:
            before = places[node.parent]
            assert before[0] == step - 1 and before[1] <= line
    wide = Tree([Node(-1, "a", 0.0, 0.0, "open")] * 5000, FATES)
    with pytest.raises(UsageError, match="a smaller beam="):
        place_nodes(wide)


def test_look_shows_the_tree_on_a_page_and_in_a_picture(tmp_path, capsys):
    page, picture = tmp_path / "beams.html", tmp_path / "beams.png"
    words = ["look", "en-zh", TEXTS[0], "beams=true", "beam=3"]
    assert main([*words, f"out={page}"]) == 0
    data = json.loads(page.read_text().split('id="data">')[1].split("</script>")[0])
    (shown,) = data["pictures"]
    nodes = shown["tree"]["nodes"]
    best = "".join(node[1] for node in nodes if node[5])
    assert best.removesuffix("</s>") == shown["output"]["text"]
    assert main([*words, f"out={picture}"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert main([*words[:-1], "beam=1", f"out={page}"]) == 2
    assert "choose beam=2 or more" in capsys.readouterr().err
