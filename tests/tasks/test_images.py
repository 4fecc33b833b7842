"""Laws of labelling images: training, running, judging, going on, and what is refused."""

import contextlib
import io
import json
import shlex
import shutil
import struct
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import regard
from regard.api import task_of
from regard.cli import main
from regard.data.image_format import ImageFormat
from regard.data.images import load_images
from regard.metrics.labels import top_k
from regard.modalities.image import IMAGE
from regard.models import MODELS, family, preset, serving
from regard.recipes import RECIPES, recipe
from regard.settings import describe, parse
from regard.tasks import TASKS
from regard.tasks import task as task_class
from regard.tasks.frame.media import MediaCodec
from regard.tasks.frame.origin import Origin
from regard.tasks.runner import Runner
from regard.tasks.vision.distillation import DISTILS, Teacher, two_heads
from regard.tasks.vision.images import IMAGES, load_codec
from regard.training.label_loss import soft_loss
from regard.training.optim import build_optimiser, layer_depths
from tests.zoo import ANIMALS
from tests.zoo import STRIPES as KINDS
from tests.zoo import write_stripes as write_set

SMALL = {**ANIMALS["images"].settings, "steps": 30}
del SMALL["augment"]


@pytest.fixture(scope="module")
def data(zoo) -> Path:
    return zoo.data("images")


@pytest.fixture(scope="module")
def trained(zoo) -> Path:
    return zoo.model("images")


@pytest.fixture(scope="module")
def model(trained) -> Runner:
    return regard.load(trained)


def files(data: Path, part: str = "test") -> list[str]:
    return sorted(str(path) for path in (data / part).rglob("*.png"))


# What is learnt


def test_images_are_learnt_by_the_task_that_classifies(data, zoo, tmp_path):
    trained = zoo.copy("images", tmp_path / "run")
    config = json.loads((trained / "config.json").read_text())
    assert (config["task"], config["family"], config["labels"]) == ("images", "vit", list(KINDS))
    assert config["model"]["image"] == config["image"]["size"] == 16
    result = regard.evaluate(str(trained), data=str(data))
    assert {score.name: score.value for score in result.scores}["accuracy"] == 100.0
    assert result.sentences == 40 and result.of == "images"
    assert np.array(result.confusion).sum() == 40 and "images in" in str(result)
    kept = json.loads((trained / "scores.jsonl").read_text().splitlines()[-1])
    assert len(kept["made_with"]["data_hash"]) == 64


def test_a_file_is_labelled_alike_alone_in_company_and_as_an_array(data, model):
    paths = files(data)
    together = model.run(paths, batch=7)
    for path, answer in list(zip(paths, together, strict=True))[::9]:
        alone = model.run(path)
        as_array = model.run(np.asarray(Image.open(path)))
        as_image = model.run([Image.open(path)])[0]
        for other in (alone, as_array, as_image):
            assert np.allclose(other.probabilities, answer.probabilities, atol=1e-5)
        assert str(alone) == Path(path).parent.name
        assert alone.probabilities.sum() == pytest.approx(1, abs=1e-5)


def test_running_and_judging_see_the_same_images(data, model):
    part = load_images(str(data), need=("test",), format=model.format, classes=model.labels).parts[
        "test"
    ]
    table = model.predictor.part_probabilities(part, model.check({}))
    found = np.stack(
        [answer.probabilities for answer in model.run([part.where(i) for i in range(40)])]
    )
    assert np.allclose(table, found, atol=1e-5)
    mirrored = model.run(files(data)[:3], mirror=True)
    turned = [np.asarray(Image.open(path))[:, ::-1] for path in files(data)[:3]]
    plain, other = model.run(files(data)[:3]), model.run(turned)
    for a, b, c in zip(mirrored, plain, other, strict=True):
        assert np.allclose(a.probabilities, (b.probabilities + c.probabilities) / 2, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in serving("images") if name in MODELS])
def test_every_family_trains_on_any_size_and_channel(name, tmp_path):
    home = write_set(tmp_path / "data", {"train": 8, "valid": 2}, size=21)
    more = {"family": name, "image": 19, "channels": 1, "steps": 1, "batch": 4, "drop_path": 0.1}
    out = str(tmp_path / "run")
    report = regard.train("classify", data=str(home), out=out, quiet=True, threads=1, **more)
    assert report.finished
    loaded = regard.load(out)
    shape = loaded.model.config
    assert loaded.format.size == shape.image == 19 and shape.channels == 1
    assert {str(answer) for answer in loaded.run(files(home, "valid")[:2])} <= set(KINDS)


LAVISH = {
    "augment": "flip+crop+trivial",
    "erase": 0.3,
    "mixup": 0.2,
    "cutmix": 1.0,
    "drop_path": 0.2,
    "dropout": 0.1,
    "layer_decay": 0.8,
    "batches": 2,
    "save_every": 1000,
}


def test_a_batch_is_a_function_of_its_number(data, trained):
    values = {"data": str(data), **SMALL, **LAVISH}
    settings = IMAGES.resolve(values)
    data = IMAGES.learning.read(settings, None)
    format = replace(data.format, mean=(0.5,) * 3, std=(0.2,) * 3)
    one, two = (IMAGE.batches(data["train"], format, settings, len(KINDS)) for _ in range(2))
    later = [two[n] for n in (7, 3)]
    for n, other in ((7, later[0]), (3, later[1])):
        mine = one[n]
        assert torch.equal(mine.inputs, other.inputs) and torch.equal(mine.targets, other.targets)
    assert len(later[0].inputs) == 16
    assert torch.allclose(later[0].targets.sum(1), torch.ones(16))


def test_the_loss_of_hard_targets_is_cross_entropy():
    logits, labels = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0, 1])
    sure = nn.functional.one_hot(labels, 4).double()
    wanted = nn.functional.cross_entropy(logits, labels, reduction="sum")
    assert torch.allclose(soft_loss(logits, sure).double(), wanted, atol=1e-5)


# Learning from a teacher


def test_a_teacher_sees_what_it_would_see_by_itself(data, trained, model):
    pixels = torch.from_numpy(
        np.stack([np.asarray(Image.open(path)).transpose(2, 0, 1) for path in files(data)[:5]])
    )
    ours = ImageFormat(16, 3, mean=(0.3, 0.4, 0.5), std=(0.1, 0.2, 0.3))
    turned = KINDS[::-1]
    other = Origin.load(trained)
    theirs = load_codec(other.folder, other.model, other.config)
    teacher = Teacher(other, theirs, MediaCodec(IMAGE, ours, list(turned)), "cpu")
    theirs = teacher(ours.normalise(pixels)).softmax(-1)
    assert np.allclose(
        theirs[:, [1, 0]],
        model.predictor.probabilities(pixels, model.predictor.plain),
        atol=1e-5,
    )


def test_distillation_is_what_its_papers_say():
    chance = torch.Generator().manual_seed(1)
    ours, theirs = torch.randn(2, 5, 3, generator=chance)
    hard = sum(-ours[i].log_softmax(-1)[theirs[i].argmax()] for i in range(5))
    assert torch.allclose(DISTILS["hard"](ours, theirs, 9.0), hard)
    soft = 0.0
    for i in range(5):
        p, q = (theirs[i] / 2).softmax(-1), (ours[i] / 2).softmax(-1)
        soft += 4 * float((p * (p / q).log()).sum())
    assert float(DISTILS["soft"](ours, theirs, 2.0)) == pytest.approx(soft, rel=1e-4)
    assert float(DISTILS["soft"](ours, ours, 2.0)) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("how", ["hard", "soft"])
def test_a_pupil_learns_what_its_teacher_says(how, data, trained, tmp_path):
    # the labels of its data are all wrong: what is right it can only have from the teacher
    home = tmp_path / "data"
    for part in ("train", "valid"):
        for kind, other in zip(KINDS, KINDS[::-1], strict=True):
            shutil.copytree(data / part / kind, home / part / other)
    regard.train(
        "classify",
        data=str(home),
        teacher=str(trained),
        distil=how,
        distil_weight=1.0,
        out=str(tmp_path / "pupil"),
        quiet=True,
        augment="crop",
        like="deit" if how == "hard" else "vit",
        **{**SMALL, "steps": 40, "valid_every": 40},
    )
    pupil = regard.load(tmp_path / "pupil")
    part = load_images(str(data), need=("test",), format=pupil.format, classes=pupil.labels)
    pixels = part.parts["test"].read(range(40))
    with torch.no_grad():
        _, other = two_heads(pupil.model, pupil.format.normalise(pixels))
    right = (other.argmax(1) == part.parts["test"].labels).float().mean()
    assert right > 0.9


def test_two_heads_are_two_only_where_there_are_two():
    pixels = torch.rand(2, 3, 32, 32)
    for row, same in (("deit", False), ("vit", True)):
        config = replace(preset("vit", "tiny", row), labels=3)
        model = family("vit")[1](config).eval()
        one, other = two_heads(model, pixels)
        assert torch.equal(one, other) == same
        assert torch.allclose((one + other) / 2, model(pixels), atol=1e-6)


# Going on from a trained one


def test_a_trained_encoder_learns_new_labels_in_one_command(trained, tmp_path):
    home = write_set(tmp_path / "data", {"train": 40, "valid": 6}, kinds=("across", "down", "none"))
    more = {key: value for key, value in SMALL.items() if key not in ("depth", "width", "heads")}
    more.pop("ffn_width")
    more |= {"steps": 8, "valid_every": 8}
    more |= {"init": str(trained), "layer_decay": 0.7, "out": str(tmp_path / "new")}
    report = regard.train("classify", data=str(home), quiet=True, **{**more, "lr": 0.001})
    assert report.finished
    loaded = regard.load(tmp_path / "new")
    assert loaded.labels == ["across", "down", "none"]
    assert loaded.format.mean == regard.load(trained).format.mean  # its features are used to them


def test_only_the_head_learns_where_only_it_should(data, trained, tmp_path):
    more = {"init": str(trained), "tune": "head", "steps": 3, "batch": 8, "threads": 1}
    regard.train("classify", data=str(data), out=str(tmp_path / "a"), quiet=True, **more, lr=0.1)
    before = load_file(trained / "model.safetensors")
    after = load_file(tmp_path / "a" / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"head.weight", "head.bias"}


def test_the_same_labels_keep_their_head(data, trained, tmp_path):
    more = {"init": str(trained), "steps": 1, "batch": 8, "threads": 1, "lr": 0.0}
    regard.train("classify", data=str(data), out=str(tmp_path / "a"), quiet=True, **more)
    before = load_file(trained / "model.safetensors")
    after = load_file(tmp_path / "a" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_lower_layers_learn_more_slowly_by_a_power_of_the_decay():
    model = family("vit")[1](replace(preset("vit", "tiny"), labels=3))
    below = layer_depths(model)
    most = model.config.depth + 1
    assert below["stem.project.weight"] == below["tokens.weight"] == 0
    assert below["blocks.0.attention.qkv.weight"] == 1
    assert below["head.weight"] == below["norm.weight"] == most
    optimiser = build_optimiser(model, lr=1.0, layer_decay=0.5)
    names = {id(p): name for name, p in model.named_parameters()}
    seen = set()
    for group in optimiser.param_groups:
        for p in group["params"]:
            name = names[id(p)]
            seen.add(name)
            assert group["scale"] == 0.5 ** (most - below[name])
            assert (group["weight_decay"] == 0) == (p.ndim < 2)
    assert seen == set(names.values())
    plain = build_optimiser(model, lr=1.0).param_groups
    assert len(plain) <= 3 and all("scale" not in group for group in plain)


@pytest.mark.parametrize("name", [name for name in serving("images") if name in MODELS])
def test_depths_rise_along_every_model(name):
    with torch.device("meta"):
        model = family(name)[1](replace(preset(name, "tiny"), labels=3))
    below = layer_depths(model)
    assert set(below) == {key for key, _ in model.named_parameters()}
    assert below["head.weight"] == max(below.values()) and min(below.values()) == 0
    blocks = [below[key] for key in below if key.split(".")[-1] == "weight"]
    assert len(set(blocks)) > 4


# Judging


def test_the_right_label_is_counted_among_the_five_likeliest():
    chance = np.random.default_rng(2)
    chances = chance.random((50, 9))
    wanted = chance.integers(0, 9, 50)
    loop = sum(
        w in sorted(range(9), key=lambda i: -row[i])[:5]
        for row, w in zip(chances, wanted, strict=True)
    )
    assert top_k(wanted, chances, 5, "images").value == pytest.approx(100 * loop / 50)


# The command line


def lines(words: list[str], capsys, monkeypatch, given: str = "") -> tuple[int, list[str], str]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
    code = main(words)
    out, err = capsys.readouterr()
    return code, out.splitlines(), err


def test_a_broken_file_costs_its_own_line_if_so_wished(
    data, trained, capsys, monkeypatch, tmp_path
):
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"nothing")
    given = f"{files(data)[0]}\n{bad}\n\n{files(data)[-1]}\n"
    code, found, err = lines(["run", str(trained), "broken=skip"], capsys, monkeypatch, given)
    assert code == 0 and [bool(row) for row in found] == [True, False, False, True]
    assert "bad.png: no image" in err
    given = json.dumps({"image": str(bad)}) + "\n"
    _, found, _ = lines(["run", str(trained), "broken=skip"], capsys, monkeypatch, given)
    assert json.loads(found[0])["prediction"] is None and "bad.png" in json.loads(found[0])["error"]


@pytest.mark.parametrize("task", sorted(TASKS))
def test_the_help_of_a_task_shows_its_own_examples(task, capsys):
    assert main(["train", task, "--help"]) == 0
    page = capsys.readouterr().out
    examples = TASKS[task].examples
    assert len(examples) == 2
    assert all(f"  {example}\n" in page for example in examples)
    for example in examples:
        words = shlex.split(example)[1:]
        if words[0] != "train":
            continue
        (name,), values = parse(words[1:])
        name = task_of(name)
        known: set[str] = set()
        for each in (name, "images") if name == "classify" else (name,):
            settings, short = task_class(each).Train, task_class(each).short
            known |= {row.key for row in describe(settings)} | set(short)
        assert set(values) <= known, example


@pytest.mark.parametrize("name", [n for n in RECIPES if recipe(n).TASK == "images"])
def test_recipes_use_keys_that_there_are_and_models_that_can_be_built(name):
    settings = IMAGES.resolve({**recipe(name).SETTINGS, "data": "somewhere"})
    with torch.device("meta"):
        family(settings.family)[1](replace(settings.model, labels=10))
    assert " ".join((recipe(name).__doc__ or "").split()).count("regard train") == 1


def test_families_are_compared_on_all_and_on_some_of_the_images(data, tmp_path):
    how = {"data": str(data), "out": str(tmp_path / "all"), "steps": 2, "size": "tiny", "batch": 8}
    made = regard.compare(
        "images", family="vit,resnet", share="0.5,1.0", seeds=1, quiet=True, **how
    )
    assert [(run["name"], run["finished"]) for run in made.runs] == [
        ("vit-0.5", True),
        ("vit-1.0", True),
        ("resnet-0.5", True),
        ("resnet-1.0", True),
    ]
    assert len({run["data"] for run in made.runs}) == 2


# What is refused


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def bomb() -> bytes:
    head = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b""))


@pytest.fixture
def place(data, trained, tmp_path, monkeypatch) -> Path:
    for part, count in (("train", 8), ("valid", 2), ("test", 2)):
        for kind in KINDS:
            (tmp_path / "data" / part / kind).mkdir(parents=True)
            for i in range(count):
                shutil.copy(data / part / kind / f"{i}.png", tmp_path / "data" / part / kind)
    without = shutil.ignore_patterns("checkpoints", "t*", "SHA256SUMS")
    shutil.copytree(trained, tmp_path / "model", ignore=without)
    shutil.copy(data / "test" / "down" / "0.png", tmp_path / "a.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(path: str, content: bytes | str | None) -> Callable[[], None]:
    def spoil() -> None:
        if content is None:
            Path(path).unlink()
            return
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(content.encode() if isinstance(content, str) else content)

    return spoil


def cut(path: str, share: float) -> Callable[[], None]:
    def spoil() -> None:
        whole = Path(path).read_bytes()
        Path(path).write_bytes(whole[: int(share * len(whole))])

    return spoil


def config(key: str, value, inner: str | None = "image") -> Callable[[], None]:
    def spoil() -> None:
        path = Path("model/config.json")
        whole = json.loads(path.read_text())
        (whole[inner] if inner else whole)[key] = value
        path.write_text(json.dumps(whole))

    return spoil


def jpeg() -> None:
    Image.open("a.png").resize((300, 300)).save("a.jpg")
    cut("a.jpg", 0.5)()


def idx(images=(4, 3, 3), labels=(4,), short: int = 0, more: str = "") -> Callable[[], None]:
    def spoil() -> None:
        Path("idx").mkdir()
        for name, shape in (("images-idx3", images), ("labels-idx1", labels)):
            head = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
            body = bytes(i % 2 for i in range(int(np.prod(shape))))
            path = Path(f"idx/train-{name}-ubyte")
            path.write_bytes((head + body)[: len(head + body) - short])
        if more:
            Path("idx", more).unlink()

    return spoil


def flat_folder() -> None:
    Path("loose").mkdir()
    shutil.copy("a.png", "loose/a.png")


def other_teacher() -> None:
    config("labels", ["one", "two"], None)()


def fine() -> None:
    """Spoil nothing: the words alone are wrong."""


RUN = ["run", "model", "a.png"]
TRAIN = ["train", "classify", "data=data", "out=new", "steps=1", "batch=4", "threads=1"]
DATA = [*TRAIN[:2], *TRAIN[3:]]
EVAL = ["eval", "model", "data=data"]
FS = {"encoding": "utf-8", "errors": "surrogateescape"}  # how names of files are read
INNER = "data/train/down/0.png"

# what is spoilt, the words, and what the one line must say
TABLE = {
    # pictures to label
    "no such photo": (fine, ["run", "model", "b.png"], "b.png: no such file. Did you mean 'a.png'"),
    "a folder without photos": (fine, ["run", "model", "model"], "model: no image in this folder"),
    "an empty photo": (put("a.png", ""), RUN, "a.png: empty; expected an image"),
    "text for a photo": (put("a.png", "hello"), RUN, "a.png: no image, or a broken one; expected"),
    "a photo cut short": (cut("a.png", 0.6), RUN, "a.png: broken or cut short"),
    "a photo cut in its header": (cut("a.png", 0.05), RUN, "a.png: no image, or a broken one"),
    "a JPEG cut short": (jpeg, ["run", "model", "a.jpg"], "a.jpg: broken or cut short"),
    "a bomb": (put("a.png", bomb()), RUN, "a.png: 2,500 megapixels; at most 64 are decoded"),
    "a photo of another kind": (
        lambda: Image.new("L", (4, 4)).save("a.tiff"),
        ["run", "model", "a.tiff"],
        "a.tiff: no image, or a broken one; expected PNG, JPEG, WEBP",
    ),
    "more labels than there are": (fine, [*RUN, "n_best=3"], "n_best=3 is more than the 2 labels"),
    "no pixels": (fine, [*RUN, "image=0"], "image=0 is too small"),
    "too many pixels": (fine, [*RUN, "image=99999"], "image=99999 is too large"),
    "fewer pixels than a patch": (fine, [*RUN, "image=3"], "an image of 3x3 pixels; expected at"),
    # the model
    "no format": (config("image", None, None), RUN, "config.json: 'image' is None"),
    "a format without size": (config("size", None), RUN, "config.json: 'image' has no size"),
    "a format of no size": (config("size", 0), RUN, "config.json: size=0 is too small"),
    "a format of a huge size": (config("size", 10**9), RUN, "size=1000000000 is too large"),
    "one mean too many": (config("mean", [0.5] * 4), RUN, "3 standard deviations for 3"),
    "a spread of nothing": (config("std", [0, 1, 1]), RUN, "std=0.0 is too small"),
    "a mean that is no number": (config("mean", ["a"] * 3), RUN, "mean=['a', 'a', 'a'] is not a"),
    "channels of another model": (
        lambda: (config("channels", 1)(), config("mean", [0.5])(), config("std", [0.5])()),
        RUN,
        "images of 1 channels, but the model reads 3",
    ),
    "an unknown fit": (config("fit", "squash"), RUN, "unknown fit 'squash'; choose from"),
    "an unknown key of the format": (config("sise", 3), RUN, "unknown key 'sise'"),
    "a label too few": (config("labels", ["one"], None), RUN, "1 labels, but the model tells 2"),
    # sets to learn from
    "a photo for data": (fine, [*DATA, "data=a.png"], "a.png: no set of images; expected a folder"),
    "loose images": (flat_folder, [*DATA, "data=loose"], "loose: 1 images lie loose in it; expect"),
    "one class": (
        lambda: shutil.rmtree("data/train/across"),
        TRAIN,
        "label 'across' is not among those that are known (down)",
    ),
    "one class alone": (
        lambda: [shutil.rmtree(f"data/{part}/across") for part in ("train", "valid")],
        TRAIN,
        "data: only the label 'down'; expected two or more",
    ),
    "an empty class": (
        lambda: Path("data/train/none").mkdir(),
        TRAIN,
        "data/train/none: no image in it; expected some of the class 'none'",
    ),
    "a class whose name is no UTF-8": (
        lambda: shutil.copytree("data/train/down", b"data/train/caf\xe9".decode(**FS)),
        TRAIN,
        "has a name that is not UTF-8; rename it",
    ),
    "a broken image": (cut(INNER, 0.6), TRAIN, f"{INNER}: broken or cut short"),
    "all images broken": (
        lambda: [path.write_text("x") for path in Path("data/train").rglob("*.png")],
        [*TRAIN, "broken=skip"],
        "no image in the train part; 16 files that cannot be read left out",
    ),
    "two folders to validate on": (
        lambda: shutil.copytree("data/valid", "data/dev"),
        TRAIN,
        "data: several folders for valid (dev, valid); keep one",
    ),
    "an unknown class to validate on": (
        lambda: Path("data/valid/down").rename("data/valid/downn"),
        TRAIN,
        "label 'downn' is not among those that are known (across, down). Did you mean 'down'",
    ),
    "a set to validate on that is not there": (fine, [*TRAIN, "valid=val"], "val: no such file"),
    "a table of files that are not there": (
        put("t.tsv", "x.png\ta\ny.png\tb\n"),
        [*DATA, "data=t.tsv"],
        "x.png: no such file",
    ),
    "idx without labels": (
        idx(more="train-labels-idx1-ubyte"),
        [*DATA, "data=idx"],
        "no file train-labels-idx1-ubyte beside it",
    ),
    "idx with too few labels": (idx(labels=(3,)), [*DATA, "data=idx"], "3 labels for 4 images"),
    "idx that promises too much": (
        idx((2**20, 1, 1)[:2], (1,)),
        [*DATA, "data=idx"],
        "expected (n, h, w)",
    ),
    "idx that is packed badly": (
        lambda: (
            idx()(),
            Path("idx/train-images-idx3-ubyte").rename("idx/train-images-idx3-ubyte.gz"),
        ),
        [*DATA, "data=idx"],
        "not .gz data",
    ),
    "too few names": (idx(), [*DATA, "data=idx", "names=one", "image=8"], "gives 1 names, but"),
    "names for names": (fine, [*TRAIN, "names=one,two"], "names= is for labels that are numbers"),
    "a mosaic that is no mosaic": (
        lambda: (Path("m").mkdir(), [shutil.copy("a.png", f"m/train_{k}.png") for k in "ab"]),
        [*DATA, "data=m"],
        "a mosaic of 16 x 16 pixels cannot be cut into tiles of 32; set tile=",
    ),
    # how to learn
    "images smaller than a patch": (fine, [*TRAIN, "image=2"], "patch=4 is larger than image=2"),
    "two channels": (fine, [*TRAIN, "channels=2"], "channels=2; expected 1 for grey or 3"),
    "no colour": (fine, [*TRAIN, "background=blurple"], "background='blurple' is not a colour"),
    "an unknown family": (fine, [*TRAIN, "family=vitt"], "unknown family 'vitt'; choose from"),
    "a family of texts": (fine, [*TRAIN, "family=bert"], "unknown family 'bert'; choose from"),
    "an unknown member": (fine, [*TRAIN, "like=diet"], "unknown preset 'diet'; choose from"),
    "holes in more than all": (fine, [*TRAIN, "erase=2"], "erase=2.0 is too large"),
    "mixup of less than nothing": (fine, [*TRAIN, "mixup=-1"], "mixup=-1.0 is too small"),
    "all paths dropped": (fine, [*TRAIN, "drop_path=1.5"], "drop_path=1.5 is too large"),
    "a decay to nothing": (fine, [*TRAIN, "layer_decay=0"], "layer_decay=0.0 is too small"),
    "no share": (fine, [*TRAIN, "share=0"], "share=0.0 is too small"),
    "no batch": (fine, [*TRAIN[:5], "batch=0"], "batch=0 is too small"),
    "a key of texts": (fine, [*TRAIN, "pieces=300"], "unknown key 'pieces'"),
    "a teacher that is not there": (fine, [*TRAIN, "teacher=nobody"], "nobody"),
    "a teacher of other labels": (
        other_teacher,
        [*TRAIN, "teacher=model"],
        "teacher=model knows other labels (one, two)",
    ),
    "a teacher of other channels": (
        fine,
        [*TRAIN, "teacher=model", "channels=1"],
        "teacher=model reads 3 channels, the data have 1",
    ),
    "a lesson without a teacher": (fine, [*TRAIN, "distil=soft"], "distil= does nothing without a"),
    "init of another family": (
        fine,
        [*TRAIN, "init=model", "family=resnet"],
        "init=model is of family vit; expected resnet",
    ),
    "parts for what has them": (
        fine,
        [*TRAIN, "init=model", "like=deit"],
        "like=deit is for a new",
    ),
    # judging
    "judged without a test part": (
        lambda: shutil.rmtree("data/test"),
        EVAL,
        "data: no test part; there is train, valid",
    ),
    "judged on other labels": (
        lambda: Path("data/test/down").rename("data/test/up"),
        EVAL,
        "label 'up' is not among those that are known (across, down)",
    ),
    "judged on a broken image": (cut("data/test/down/0.png", 0.5), EVAL, "0.png: broken or cut"),
}


def snapshot(folder: Path) -> dict[str, bytes]:
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.mark.parametrize("name", TABLE)
def test_a_wrong_picture_or_word_costs_one_line(name, place, capsys, monkeypatch):
    spoil, words, message = TABLE[name]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    spoil()
    before = snapshot(place)
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert err.startswith("regard: ") and err.count("\n") == 1, err
    assert message in err
    assert len(err) < 400 and out == "", err
    after = snapshot(place)
    assert "new/recipe.json" not in after
    assert {path: after.get(path) for path in before} == before


def test_going_on_with_another_teacher_or_other_images_is_refused(place, capsys):
    words = [*TRAIN, "teacher=model", "--quiet"]
    with contextlib.redirect_stderr(io.StringIO()):
        assert main(words) == 0
    state = load_file("model/model.safetensors")
    from safetensors.torch import save_file

    save_file({key: value + 1 for key, value in state.items()}, "model/model.safetensors")
    assert main(words) == 2
    assert "was begun with another teacher" in capsys.readouterr().err
    Image.new("RGB", (16, 16)).save(INNER)
    assert main(words) == 2
    assert "was begun with other data" in capsys.readouterr().err
