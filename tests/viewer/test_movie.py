"""The training movie: pictures are kept while a model learns, which is none the wiser."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import regard
from regard.cli import main
from regard.errors import UsageError
from regard.training.fit import Fit
from regard.viewer.movie import MAX_FRAMES, frames

SETTINGS = {
    "steps": 12,
    "depth": 1,
    "width": 32,
    "heads": 2,
    "batch_tokens": 128,
    "context": 32,
    "tokenizer": "characters",
    "dropout": 0.1,
    "valid_every": 6,
    "valid_tokens": 200,
    "threads": 1,
    "quiet": True,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Return a text to train on."""
    path = tmp_path_factory.mktemp("movie") / "text.txt"
    rng = random.Random(1)
    path.write_text("".join(rng.choices("ab c\n", k=4000)))
    return path


@pytest.fixture(scope="module")
def filmed(text) -> Path:
    """Return a run that kept pictures."""
    out = text.parent / "filmed"
    regard.train("language", data=text, out=out, watch_every=5, **SETTINGS)
    return out


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """Return the published weights, and those of the last checkpoint with its optimiser."""
    (last,) = sorted((run / "checkpoints").glob("step-12"))
    return {
        f"{path.name} {name}": tensor
        for path in (run / "model.safetensors", *sorted(last.glob("*.safetensors")))
        for name, tensor in load_file(path).items()
    }


def test_watching_changes_no_bit_of_a_training(text, filmed):
    plain = text.parent / "plain"
    regard.train("language", data=text, out=plain, **SETTINGS)
    left, right = weights_of(plain), weights_of(filmed)
    assert left.keys() == right.keys() and len(left) > 10
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert not (plain / "movie").exists()


def test_pictures_are_of_the_same_inputs_at_every_step(filmed):
    found = frames(filmed)
    assert list(found) == [0, 5, 10, 12]
    sources = [[picture["source"] for picture in some] for some in found.values()]
    assert sources[0] and all(each == sources[0] for each in sources)
    first, last = found[0][0], found[12][0]
    assert first["views"][0]["weights"] != last["views"][0]["weights"]
    assert first["steps"][0]["candidates"] != last["steps"][0]["candidates"]


def test_a_resumed_run_keeps_the_same_pictures(text, filmed, monkeypatch):
    out, watch = text.parent / "resumed", Fit._watch

    class Killed(BaseException):
        pass

    def killed(self) -> None:
        watch(self)
        if self.counters["step"] == 9:
            raise Killed

    monkeypatch.setattr(Fit, "_watch", killed)
    with pytest.raises(Killed):
        regard.train("language", data=text, out=out, watch_every=5, **SETTINGS)
    monkeypatch.setattr(Fit, "_watch", watch)
    assert regard.train("language", data=text, out=out, watch_every=5, **SETTINGS).finished
    ours, theirs = weights_of(out), weights_of(filmed)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert frames(out) == frames(filmed)


def test_there_are_never_more_pictures_than_a_page_can_play(text):
    from types import SimpleNamespace

    from regard.data.parts import Dataset
    from regard.modalities.image import IMAGE
    from regard.tasks.frame.film import Film

    class Reads:
        name, inputs, predictor = "images", IMAGE, None

    data = Dataset({"valid": []})
    for steps, asked in ((100_000, 1), (12, 5), (201, 1)):
        settings = SimpleNamespace(watch_every=asked, probes=None)
        film = Film(Reads(), data, settings, Path("run"), steps)  # type: ignore[arg-type]
        assert film.every % asked == 0 and steps / film.every <= MAX_FRAMES


def test_probes_are_read_from_a_file(text, capsys):
    probes = text.parent / "probes.txt"
    probes.write_text("abab abab\n\ncccc\n")
    out = text.parent / "probed"
    settings = {**SETTINGS, "steps": 2}
    regard.train("language", data=text, out=out, watch_every=1, probes=str(probes), **settings)
    assert [one["source"]["text"] for one in frames(out)[0]] == ["abab abab", "cccc"]


def test_the_page_holds_all_steps_and_mistakes_are_told(filmed, tmp_path, capsys):
    out = tmp_path / "movie.html"
    assert main(["look", str(filmed), "movie=true", f"out={out}"]) == 0
    page = out.read_text()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert data["steps"] == [0, 5, 10, 12] and len(data["pictures"]) % 4 == 0
    for words, told in (
        (["look", str(filmed), "movie=true"], "add out=movie.html"),
        (["look", str(filmed), "movie=true", "out=a.png"], "add out=movie.html"),
        (["look", str(filmed), "text", "movie=true", "out=a.html"], "leave 'text' out"),
        (["look", str(filmed), "movie=true", "beam=3", "out=a.html"], "leave beam= out"),
        (["look", "shakespeare", "movie=true", "out=a.html"], "no folder of a training"),
        (["look", str(tmp_path), "movie=true", "out=a.html"], "train with watch_every=100"),
    ):
        capsys.readouterr()
        assert main(words) == 2
        error = capsys.readouterr().err
        assert told in error and error.count("\n") == 1


def test_a_damaged_picture_is_named(filmed, tmp_path):
    folder = tmp_path / "movie"
    folder.mkdir()
    (folder / "step-3.json").write_text('{"pictures": [1]}')
    with pytest.raises(UsageError, match="step-3.json"):
        frames(tmp_path)


def test_a_translator_is_watched_on_given_pairs(tmp_path):
    rows = "".join(f"a{n} b c\tx y z{n}\n" for n in range(60))
    data = tmp_path / "pairs.tsv"
    data.write_text("en\tde\n" + rows)
    settings = {"steps": 2, "depth": 1, "width": 32, "heads": 2, "pieces": 300, "quiet": True}
    out = tmp_path / "run"
    regard.train("translate", data=data, out=out, watch_every=1, valid_sentences=2, **settings)
    found = frames(out)
    assert list(found) == [0, 1, 2]
    names = [view["name"] for view in found[2][0]["views"]]
    assert "decoder.0.cross" in names and found[2][0]["steps"]
