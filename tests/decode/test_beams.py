"""Beams on screen: a trace tells all that a beam search did, and changes nothing of it."""

import json
from collections import Counter

import numpy as np
import pytest
import torch

import regard
from regard.cli import main
from regard.decode.sentences import SourceSentence
from regard.decode.speech.ctc import PrefixBeam
from regard.decode.trace import FATES, tracing
from regard.errors import UsageError
from regard.viewer.beams import place_nodes
from regard.viewer.picture import Node, Tree

TEXTS = ["How are you?", "He bought a new car yesterday.", "I don't think that he will come."]


def check_tree(picture) -> None:
    """Ask of a picture that its tree leads to its output, and tells what was dropped."""

    def spelt(text: str) -> str:
        return text.replace("</s>", "").replace("▁", " ").strip()

    nodes = picture.tree.nodes
    assert spelt("".join(node.token for node in nodes if node.best)) == spelt(picture.output)
    assert {node.fate for node in nodes} >= {"finished", "beam"} and picture.tree.end


@pytest.fixture(scope="module")
def model():
    """Return the starter that translates."""
    return regard.load("en-zh", task="translate")


def decode(model, text: str, **settings):
    """Decode a text by the common decoder, with a trace and without."""
    asked = model.check(settings)
    source = model.codec.source.frame(model.predictor.encode(text, asked), "source")
    sentence = SourceSentence(0, source, [], "")
    (plain,) = model.predictor.decoder.batch([sentence], asked, 0)
    with tracing() as trace:
        (traced,) = model.predictor.decoder.batch([sentence], asked, 0)
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
    branches, beam, eos = trace.branches, settings["beam"], model.codec.target.eos
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
    source = model.codec.source.frame(model.predictor.encode(TEXTS[0], asked), "source")
    sentences = [SourceSentence(n, source, [], "") for n in range(2)]
    with pytest.raises(UsageError, match="of one sentence"), tracing():
        model.predictor.decoder.batch(sentences, asked, 0)
    for settings in ({"beam": 1}, {"temperature": 1.0}):
        with pytest.raises(UsageError, match="only a beam search"):
            model.picture(TEXTS[0], beams=True, **settings)


def test_prefixes_of_ctc_are_traced_until_they_leave_the_beam():
    """Log-probabilities of random frames: the tree holds the texts, and when others were left."""
    chance = np.random.default_rng(0)
    table = torch.from_numpy(chance.normal(size=(12, 5)) * 2).log_softmax(1)
    plain = PrefixBeam(beam=3, n_best=3, length_bonus=0.5)(table)
    with tracing() as trace:
        assert PrefixBeam(beam=3, n_best=3, length_bonus=0.5)(table) == plain
    ends = {tuple(trace.ids(n)): trace.branches[n] for n in trace.finished()}
    assert {(tuple(one.ids), one.score) for one in plain} == {
        (ids, branch.score) for ids, branch in ends.items()
    }
    for number, branch in enumerate(trace.branches):
        assert branch.parent < number
        assert (branch.fate == "beam") == branch.when.startswith("in frame ")
    # a narrow beam whose frames are read one by one has dropped what is not in it any more
    dropped = [branch for branch in trace.branches if branch.fate == "beam"]
    for branch in dropped:
        frame = int(branch.when.split()[2])
        ids = trace.ids(trace.branches.index(branch))
        for read in range(1, len(table) + 1):
            kept = PrefixBeam(beam=3, n_best=3, length_bonus=0.5)(table[:read])
            if read >= frame:
                assert ids not in [one.ids for one in kept]
        assert ids in [
            one.ids for one in PrefixBeam(beam=3, n_best=3, length_bonus=0.5)(table[: frame - 1])
        ]


def test_a_language_model_shows_the_tree_of_what_it_wrote():
    picture = regard.load("shakespeare").picture("To be, or", beams=True, beam=3, max_length=5)
    check_tree(picture)


def test_what_does_not_search_has_no_tree():
    with pytest.raises(UsageError, match="take a model that writes texts"):
        regard.load("tag").picture("Dogs bark .", beams=True)


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
