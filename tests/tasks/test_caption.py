"""Captions: a word may look anywhere in its image and nowhere else."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from beartype import beartype
from jaxtyping import jaxtyped
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

import regard
from regard.attention.watch import watch
from regard.cli import main
from regard.data.captions import captions_in
from regard.data.image_format import ImageFormat
from regard.errors import UsageError
from regard.layers.block import BlockConfig
from regard.layers.recurrent.decoder import CellConfig
from regard.metrics.captions import caption_scores, cider, references_of
from regard.models import family
from regard.models.captioner import Captioner, CaptionerConfig, DecoderConfig, EncoderConfig
from regard.models.folder import load_folder
from regard.models.local import LocalConfig
from regard.models.mvit import MViTConfig
from regard.models.resnet import ResNetConfig
from regard.models.swin import SwinConfig
from regard.models.vit import ViTConfig
from regard.tasks.vision.caption import CAPTION, CaptionObjective
from regard.tasks.vision.captioning import CaptionBatch, CaptionBatches, caption_loss, derangement
from regard.training.optim import build_optimiser
from tests.decode.test_beams import check_tree
from tests.models import laws
from tests.models.laws import close
from tests.zoo import ANIMALS
from tests.zoo import disc as photo

# ---- the model --------------------------------------------------------------------------------

BLOCK = BlockConfig(16, 2, 24, feed_forward="gelu", dropout=0.0)
VIT = ViTConfig(labels=5, image=12, patch=4, depth=1, block=BLOCK)
CELL = CellConfig(12, dropout=0.0)
WRITER = DecoderConfig(vocab=23, depth=2, block=BLOCK, cell=CELL, max_length=32)
RECURRENT = replace(WRITER, kind="recurrent", depth=1)
RESNET = ResNetConfig(0, 3, 12, "small", 8, (8, 16), (1, 1))


def captioner(name: str, encoder: Any, writer: DecoderConfig, sight: str = "image") -> Any:
    """Return the config of a captioner."""
    return CaptionerConfig(EncoderConfig(name, encoder), writer, sight)


KINDS = {
    "vit": captioner("vit", VIT, WRITER),
    "cct": captioner("vit", replace(VIT, stem="convolution", tokens=0, pool="attention"), WRITER),
    "deit, rotary": captioner("vit", replace(VIT, tokens=2), replace(WRITER, position="rotary")),
    "resnet": captioner("resnet", RESNET, WRITER),
    "swin": captioner("swin", SwinConfig(5, 3, 12, 2, (1, 1), window=3, block=BLOCK), WRITER),
    "mvit": captioner(
        "mvit",
        MViTConfig(
            labels=5,
            image=12,
            patch=3,
            stride=2,
            depths=(1, 1),
            key_stride=2,
            block=replace(BLOCK, heads=1),
        ),
        WRITER,
    ),
    "local": captioner(
        "local",
        LocalConfig(5, 3, 12, "small", 8, (8, 16), (16, 32), (1, 1), window=3, channels_per_head=4),
        WRITER,
    ),
    "blind": captioner("vit", VIT, WRITER, "blind"),
    "soft": captioner("resnet", RESNET, RECURRENT),
    "after, bilinear": captioner(
        "vit", VIT, replace(RECURRENT, cell=replace(CELL, order="after", attention="bilinear"))
    ),
    "gru, input feeding": captioner(
        "vit", VIT, replace(RECURRENT, cell=replace(CELL, order="input_feeding", cell="gru"))
    ),
    "hard": captioner("vit", VIT, replace(RECURRENT, cell=replace(CELL, normalise="sample"))),
}
SOFT = [kind for kind, config in KINDS.items() if config.decoder.kind == "recurrent"]
SOFT = [kind for kind in SOFT if kind != "hard"]


@pytest.fixture(autouse=True)
def shapes_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the shapes in signatures while testing."""
    for name in ("forward", "hidden", "encode", "start", "step"):
        checked = jaxtyped(typechecker=beartype)(getattr(Captioner, name))
        monkeypatch.setattr(Captioner, name, checked)


def build(kind: str) -> Any:
    """Return one small model in fp64, its weights enlarged so that differences would show."""
    torch.manual_seed(0)
    model = Captioner(KINDS[kind]).double().eval()
    for part in model.parameters():
        # what is a variance stays positive
        part.data = (part.data + 0.3 * torch.randn_like(part)).where(part != 1, part.data)
    return model


@pytest.fixture(params=KINDS)
def model(request) -> Any:
    """Return a model of every kind."""
    return build(request.param)


def images(count: int = 3, seed: int = 1) -> Tensor:
    """Return random images."""
    rand = torch.Generator().manual_seed(seed)
    return torch.randn((count, 3, 12, 12), generator=rand, dtype=torch.float64)


def captions(count: int, length: int = 7, seed: int = 0) -> Tensor:
    """Return the tokens of random captions."""
    rand = torch.Generator().manual_seed(seed)
    return torch.randint(3, 23, (count, length), generator=rand)


def test_neighbours_and_the_other_captions_of_an_image_never_matter(model: Any):
    some, texts = images(), captions(6)
    together = model(some, texts)
    for i in range(6):
        close(model(some[i // 2 : i // 2 + 1], texts[i : i + 1])[0], together[i])
    assert together.std() > 0.1
    with pytest.raises(UsageError, match="5 captions of 3 images"):
        model.hidden(some, captions(5))


def test_what_comes_after_a_word_never_matters(model: Any):
    some, texts = images(2), captions(4)
    other = texts.clone()
    other[:, 4:] = captions(4, 3, seed=9)
    close(model(some, texts)[:, :4], model(some, other)[:, :4])


def test_an_image_matters_unless_one_is_blind(model: Any):
    texts = captions(2)
    one, other = model(images(2), texts), model(images(2, seed=5), texts)
    blind = model.config.sight == "blind"
    assert torch.equal(one, other) == blind and ((one - other).abs().max() < 1e-3) == blind


def test_cached_equals_full(model: Any):
    some, texts, chunks = images(), captions(3), [3, 1, 1, 2]
    with torch.no_grad():
        state = model.start(some, capacity=7)
        parts = [model.step(ids, state)[0] for ids in texts.split(chunks, dim=1)]
    close(torch.cat(parts, 1), model(some, texts))


def test_cached_equals_full_while_hypotheses_move(model: Any):
    some, rand = images(4), torch.Generator().manual_seed(5)
    with torch.no_grad():
        texts = torch.full((4, 1, 1), 1)  # (image, hypothesis, token)
        state, left = model.start(some, capacity=16), torch.arange(4)
        for step in range(6):
            logits, state = model.step(texts[..., -1:].flatten(0, 1), state)
            close(logits[:, -1], model(some[left], texts.flatten(0, 1))[:, -1])
            if step == 3:
                stay = torch.tensor([0, 3, 2])
                state, texts, left = state.keep(stay), texts[stay], left[stay]
            width = (3, 2, 4)[step % 3]
            parents = torch.randint(0, state.hypotheses, (len(left), width), generator=rand)
            state = state.select(parents)
            texts = texts.gather(1, parents.unsqueeze(-1).expand(-1, -1, texts.shape[-1]))
            new = torch.randint(3, 23, (len(left), width, 1), generator=rand)
            texts = torch.cat([texts, new], dim=-1)


def test_every_parameter_learns(model: Any):
    torch.manual_seed(2)
    texts = captions(16)
    batch = CaptionBatch(images(8), texts, texts.roll(-1, 1), 112)
    caption_loss(model.train(), batch, 0.1, model.attention_tape()).backward()
    laws.has_learnt(model)


def test_a_model_builds_on_the_meta_device(model: Any):
    some, texts = images(2), captions(4)
    laws.builds_on_meta(model, lambda each: each(*laws.like(each, some, texts)))


def test_save_then_load_is_the_identity(model: Any, tmp_path: Path):
    some, texts = images(2).float(), captions(4)
    laws.survives_its_folder(model, tmp_path, "caption", lambda each: each(some, texts), 1e-5)


def test_watching_changes_nothing_and_sees_every_word_look(model: Any):
    some, texts = images(2), captions(4)
    plain = model(some, texts)
    with watch(model) as maps:
        assert torch.equal(model(some, texts), plain)
    places = model.encode(some).shape[1]
    crosses = [name for name in maps if name.endswith(".cross")]
    assert crosses
    for name in crosses:
        weights = maps[name].weights()
        assert weights.shape[0] == 2 and weights.shape[2:] == (2 * 7, places)
        close(weights.sum(-1), torch.ones_like(weights[..., 0]))


@pytest.mark.parametrize("kind", SOFT)
def test_doubly_stochastic_attention_is_the_papers_formula(kind: str):
    model, some, texts = build(kind), images(2), captions(4)
    real = torch.arange(7) < torch.tensor([7, 3, 5, 1]).unsqueeze(1)
    looks = model.attention_tape()
    close(model.hidden(some, texts, looks), model.hidden(some, texts))
    right = 0.0
    for i in range(4):  # each caption by itself, as its user would watch it
        with watch(model) as maps:
            model(some[i // 2 : i // 2 + 1], texts[i : i + 1])
        name = next(name for name in maps if name.endswith(".cross"))
        (weights,) = maps[name].weights()[0]
        right += float(((1 - weights[real[i]].sum(0)) ** 2).sum())
    assert looks.doubly_stochastic(real).item() == pytest.approx(right, rel=1e-10)


def test_hard_attention_learns_from_its_own_caption_only():
    model, some, texts = build("hard").train(), images(2), captions(4)
    torch.manual_seed(3)
    looks = model.attention_tape()
    model.hidden(some, texts, looks)
    losses = torch.zeros(4, 7, dtype=torch.float64)
    losses[2, 4] = 5.0  # of one word of the third caption
    chances = torch.stack(looks.log_probs).permute(1, 2, 0).flatten(0, 1)  # (n, t), as it drew
    worth = looks.loss(losses, torch.ones(4, 7, dtype=torch.bool))
    assert worth.item() == pytest.approx(0, abs=1e-12)
    grads = torch.autograd.grad(worth, looks.log_probs, retain_graph=True)
    found = torch.stack(grads).permute(1, 2, 0).flatten(0, 1)
    baselines = torch.stack(looks.baselines).permute(1, 2, 0).flatten(0, 1)
    ahead = losses.flip(1).cumsum(1).flip(1)
    assert chances.shape == (4, 7)
    close(found, ahead - baselines.detach())


def test_a_config_that_names_no_encoder_is_refused():
    with pytest.raises(UsageError, match="model of the family resnet"):
        Captioner(CaptionerConfig(EncoderConfig(family="resnet")))
    with pytest.raises(UsageError, match="Did you mean 'swin'"):
        EncoderConfig("swim", VIT)


def test_what_sees_can_learn_more_slowly():
    model = Captioner(KINDS["vit"])
    groups = build_optimiser(model, lr=1.0, lr_scales={"encoder.": 0.1}).param_groups
    scales = {id(p): group["scale"] for group in groups for p in group["params"]}
    for name, p in model.named_parameters():
        assert scales[id(p)] == (0.1 if name.startswith("encoder.") else 1.0)


# ---- scores -----------------------------------------------------------------------------------


def test_cider_of_a_small_example_by_hand():
    # Two images. "dog" is said of the first only, "a" of both (so it is worth nothing).
    # Runs of one word: a (idf 0), dog, runs, cat, sits (idf log 2 each).
    references = [["a dog runs"], ["a cat sits"]]
    scores = cider(["a dog", "a cat sits"], references)
    # first: of one word (dog) against (dog, runs): cosine 1 / sqrt 2; of two words (a dog) against
    # (a dog, dog runs): 1 / sqrt 2; of three none. One word shorter: exp(-1 / 72).
    right = 10 * math.exp(-1 / 72) * (2 / math.sqrt(2)) / 4
    assert scores[0] == pytest.approx(100 * right)
    # second: the same for runs of one to three words; there is none of four
    assert scores[1] == pytest.approx(100 * 10 * 3 / 4)


def plain_cider(outputs: list[str], references: list[list[str]]) -> list[float]:
    """Return the formula of the paper with dense vectors, written down again."""

    def grams(text: str, n: int) -> Counter:
        split = text.split()
        return Counter(zip(*(split[i:] for i in range(n)), strict=False))

    total = [0.0] * len(outputs)
    for n in (1, 2, 3, 4):
        every = sorted({g for some in references for t in some for g in grams(t, n)})
        every += sorted({g for t in outputs for g in grams(t, n)} - set(every))
        seen = np.array(
            [sum(any(g in grams(t, n) for t in some) for some in references) for g in every]
        )
        idf = np.log(len(outputs) / np.maximum(seen, 1))
        for i, (output, some) in enumerate(zip(outputs, references, strict=True)):
            for text in some:
                ours, theirs = (
                    np.array([grams(t, n)[g] for g in every]) * idf for t in (output, text)
                )
                size = np.linalg.norm(ours) * np.linalg.norm(theirs)
                far = len(output.split()) - len(text.split())
                near = np.minimum(ours, theirs) @ theirs / size if size else 0.0
                total[i] += float(10 * math.exp(-(far**2) / 72) * near / len(some) / 4)
    return [100 * x for x in total]


def test_cider_is_its_formula():
    rand = np.random.default_rng(0)
    word = lambda: str(rand.choice(["a", "dog", "cat", "runs", "on", "grass", "red"]))  # noqa: E731
    text = lambda: " ".join(word() for _ in range(rand.integers(1, 9)))  # noqa: E731
    references = [[text() for _ in range(rand.integers(1, 6))] for _ in range(12)]
    outputs = [text() for _ in range(12)]
    np.testing.assert_allclose(cider(outputs, references), plain_cider(outputs, references))


def test_a_repeated_word_does_not_pay():
    references = [["a dog runs on grass"], ["two cats sleep"], ["the sea at night"]]
    others = ["two cats sleep", "the sea at night"]
    honest, greedy = (cider([t, *others], references)[0] for t in ("a dog", "dog dog dog dog dog"))
    assert greedy < honest
    assert cider(["", *others], references)[0] == 0


def test_captions_may_be_of_any_number():
    told = [["a dog runs on the grass", "A dog."], ["a cat sits on the mat"]]
    assert references_of(told) == [
        ["a dog runs on the grass", "a cat sits on the mat"],
        ["A dog.", None],
    ]
    scores = {s.name: s for s in caption_scores([some[0].upper() for some in told], told)}
    assert list(scores) == ["BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "chrF2", "CIDEr-D"]
    assert all(abs(score.value - 100) < 1e-6 for score in list(scores.values())[:5])
    part = [s.value for s in caption_scores(["a dog runs on mats"] * 2, told)[:4]]
    assert part == sorted(part, reverse=True) and part[0] > part[3]


def test_nobody_gets_its_own_image():
    for count in (2, 3, 50):
        other = derangement(count, 1)
        assert sorted(other) == list(range(count)) and (other != np.arange(count)).all()
    assert (derangement(50, 1) != derangement(50, 2)).any()


# ---- the task ---------------------------------------------------------------------------------

SMALL = {**ANIMALS["caption"].settings, "steps": 60, "valid_every": 60}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def train(photos: Path, out: Path, **settings: Any) -> Any:
    values = {"data": str(photos), "out": str(out), **SMALL, **settings}
    return regard.train("caption", quiet=True, **values)


@pytest.fixture(scope="module")
def photos(zoo) -> Path:
    return zoo.data("caption")


@pytest.fixture(scope="module")
def run(zoo) -> Path:
    return zoo.model("caption")


@pytest.fixture(scope="module")
def blind(zoo, photos: Path) -> Path:
    how = {"blind": "true", "steps": 20, "valid_every": 20}
    return zoo.once("blind", lambda out: train(photos, out, **how))


def scores_of(result: Any) -> dict[str, float]:
    return {score.name: score.value for score in result.scores}


def test_a_captioner_learns_to_look_and_a_blind_one_cannot(run, blind, photos: Path):
    result = regard.evaluate(
        str(run), data=str(photos), part="valid", shuffle="true", against=str(blind)
    )
    scores = scores_of(result)
    assert scores["loss"] < 0.6 and scores["CIDEr-D"] > 100
    own = scores["what its own image is worth"]
    assert own > 0.15 and scores["loss, another's image"] - scores["loss"] == pytest.approx(own)
    compared = {each.name: each for each in result.comparison}
    assert set(compared) == {"BLEU-4", "chrF2", "CIDEr-D"}
    assert compared["CIDEr-D"].ours > compared["CIDEr-D"].theirs and compared["CIDEr-D"].p < 0.05
    assert compared["BLEU-4"].ours == pytest.approx(scores["BLEU-4"])
    judged = regard.evaluate(str(blind), data=str(photos), part="valid", shuffle="true")
    assert scores_of(judged)["what its own image is worth"] == 0
    assert json.loads((run / "scores.jsonl").read_text().splitlines()[0])["scores"]


def test_photos_are_captioned_one_for_one(run: Path, photos: Path, capsys, monkeypatch, tmp_path):
    names = [str(photos / "images" / f"{n}.png") for n in (48, 49, 50)]
    alone = [regard.load(run).run(name).text for name in names]
    assert [str(answer) for answer in regard.load(run).run(names, batch=2)] == alone
    assert main(["run", str(run), *names, "n_best=2", "scores=true", "beam=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and all(" ||| -" in line for line in lines)
    assert main(["run", str(run), names[0], "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["image"] == names[0] and told["prediction"] == alone[0]
    (tmp_path / "broken.png").write_bytes(b"no image")
    assert main(["run", str(run), str(tmp_path / "broken.png"), "n_best=2", "broken=skip"]) == 0
    assert capsys.readouterr().out == "\n\n"
    assert main(["run", str(run), str(tmp_path / "broken.png")]) == 2
    drawn = regard.load(run).run(names[0], temperature=2.0, n_best=3, seed=1)
    again = regard.load(run).run(names[0], temperature=2.0, n_best=3, seed=1)
    assert drawn == again and len(drawn.others) == 2
    begun = regard.load(run).run(names[0], prefix="a disc that")
    assert begun.text.startswith("a disc that")


def test_a_batch_sees_each_photo_once_and_is_always_the_same(photos: Path, home: Path):
    seen, batches = [], []
    made = CaptionObjective.lesson

    def keeping(self, runner, data, settings):
        lesson, encoder = made(self, runner, data, settings), runner.model.encoder
        batches.append([lesson.batches[n] for n in (0, 5, 0)])

        def looking(batch):
            features = encoder.features
            encoder.features = lambda x: (seen.append(len(x)), features(x))[1]
            try:
                return lesson.loss(batch)
            finally:
                del encoder.features

        return replace(lesson, loss=looking)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CaptionObjective, "lesson", keeping)
        train(photos, home / "once", steps=2, valid_every=2, valid_images=0)
    first, other, again = batches[0]
    assert torch.equal(first.images, again.images) and torch.equal(first.inputs, again.inputs)
    assert not torch.equal(first.images, other.images)
    assert seen == [16, 16]
    for batch in (first, other):  # as many rows of each photo as one of them has captions
        real = (batch.targets >= 0).any(1).view(16, -1).sum(1)
        assert set(real.tolist()) <= {2, 3} and int(real.max()) * 16 == len(batch.inputs)
        assert batch.tokens == int((batch.targets >= 0).sum())


def test_a_photo_with_a_left_and_a_right_is_never_mirrored(photos: Path, home: Path):
    found, made = [], CaptionObjective.lesson

    def keeping(self, runner, data, settings):
        lesson = made(self, runner, data, settings)
        feed: CaptionBatches = lesson.batches
        for n in range(6):
            picked, batch = feed.pick(n), feed[n]
            plain = feed.format.normalise(feed.train.read(picked))
            same = (batch.images == plain).flatten(1).all(1)
            found.extend(zip(feed.sided[picked].tolist(), same.tolist(), strict=True))
        return lesson

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CaptionObjective, "lesson", keeping)
        train(photos, home / "sides", steps=1, valid_every=1, valid_images=0)
    assert all(same for sided, same in found if sided)
    assert 0.2 < np.mean([same for sided, same in found if not sided]) < 0.8
    assert 0 < sum(sided for sided, _ in found) < len(found)


def test_an_encoder_that_was_trained_before_is_taken_over(photos: Path, home: Path):
    before = home / "encoder"
    keys = ("like", "image", "patch", "depth", "width", "heads", "ffn_width", "batch")
    sizes = {key: SMALL[key] for key in keys}
    regard.train(
        "pretrain",
        quiet=True,
        data=str(photos),
        out=str(before),
        objective="contrastive",
        steps=2,
        valid_every=2,
        **sizes,
    )
    theirs, _ = load_folder(before)
    few = {key: value for key, value in SMALL.items() if key not in keys or key == "batch"}
    few |= {"steps": 3, "valid_every": 3, "valid_images": 2, "data": str(photos)}
    out = home / "kept"
    regard.train("caption", quiet=True, out=str(out), init=str(before), tune="head", **few)
    kept: Any = load_folder(out)[0]
    for name, p in kept.encoder.named_parameters():
        assert torch.equal(p, dict(theirs.named_parameters())[name]), name
    moved = home / "moved"
    regard.train("caption", quiet=True, out=str(moved), init=str(before), encoder_rate="0.1", **few)
    other: Any = load_folder(moved)[0]
    assert any(
        not torch.equal(p, q)
        for p, q in zip(kept.encoder.parameters(), other.encoder.parameters(), strict=True)
    )
    # a captioner is trained on as a whole, with its own pieces
    regard.train(
        "caption",
        quiet=True,
        out=str(home / "on"),
        init=str(out),
        **{**few, "steps": 1, "valid_every": 1},
    )
    assert (home / "on" / "tokenizer.json").read_text() == (out / "tokenizer.json").read_text()


@pytest.mark.parametrize("normalise", ["softmax", "sample"])
def test_a_recurrent_captioner_learns_to_look(photos: Path, home: Path, normalise: str):
    out = home / f"recurrent-{normalise}"
    pull = {"doubly_stochastic": 0.01} if normalise == "softmax" else {}
    settings = {"decoder": "recurrent", "normalise": normalise, "steps": 40, "valid_every": 40}
    report = train(photos, out, **settings, **pull)
    assert report.scores["loss"] < 1.3
    assert regard.load(out).run(str(photos / "images" / "48.png")).text
    picture = regard.load(out).picture(str(photos / "images" / "48.png"))
    assert [view.name for view in picture.views] == ["decoder.inner.cross"]


def test_where_each_word_looked_is_drawn_and_true(run: Path, photos: Path, tmp_path: Path):
    name = str(photos / "images" / "48.png")
    describer = regard.load(run)
    picture = describer.picture(name)
    words = picture.output.split()
    (view,) = picture.views
    assert list(view.row_tokens) == words and view.placement.query_grid.names == tuple(words)
    assert view.weights.shape == (2, len(words), 36)
    np.testing.assert_allclose(view.weights.sum(-1), 1, atol=1e-5)
    assert len(picture.steps) >= len(words) and picture.photo.shape == (24, 24, 3)
    # the weights of a word are the mean over its pieces of one pass over the finished caption
    pixels = torch.tensor(describer.format.read(name))[None]
    ids = describer.codec.tokenizer.encode(picture.output)
    maps, _ = describer.predictor.maps(describer.format.normalise(pixels), ids)
    weights = maps["decoder.blocks.0.cross"].weights()[0]
    pieces = describer.codec.tokenizer.pieces(ids)
    first = [n for n, piece in enumerate(pieces) if piece.startswith("▁")]
    spans = zip(first, [*first[1:], len(pieces)], strict=True)
    for word, (start, end) in enumerate(spans):
        right = weights[:, start:end].mean(1)
        np.testing.assert_allclose(view.weights[:, word], right.numpy(), atol=1e-6)
    for out in ("x.png", "x.html"):
        assert main(["look", str(run), name, f"out={tmp_path / out}"]) == 0
    assert Image.open(tmp_path / "x.png").size[0] > 500
    page = (tmp_path / "x.html").read_text()
    assert all(word in page for word in words)
    check_tree(describer.picture(name, beams=True))
    given = describer.picture(name, caption="a disc that is green")
    assert given.output == "a disc that is green"
    assert describer.picture(name, view="attention").views[0].name == "blocks.0.attention"
    with pytest.raises(UsageError, match="nothing to look at"):
        describer.picture(name, caption=" ")


def test_the_brightest_place_of_the_picture_is_the_one_looked_at_most():
    from regard.viewer.image import feature_grid
    from regard.viewer.overlays import glow

    encoder = family("resnet")[1](RESNET)
    grid = feature_grid(encoder, (12, 12))
    assert (grid.height, grid.width) == encoder.grid((12, 12))
    assert grid.height * grid.cell_height == pytest.approx(1)
    weights = np.zeros((6, 6))
    weights[4, 1] = 1.0
    light = glow(np.full((60, 60, 3), 200, np.uint8), weights, grid).sum(-1)
    y, x = np.unravel_index(light.argmax(), light.shape)
    assert (y * 6 // len(light), x * 6 // len(light)) == (4, 1)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"decoder": "recurent"}, "Did you mean 'recurrent'"),
        ({"doubly_stochastic": "1"}, "decoder=recurrent"),
        ({"blind": "true", "tune": "head", "init": "run"}, "no encoder to keep"),
        ({"augment": "flop"}, "unknown augment"),
        ({"tune": "head"}, "init="),
        ({"family": "bert"}, "unknown family"),
    ],
)
def test_mistakes_are_told_in_one_line(photos: Path, run: Path, settings: dict, told: str):
    if "init" in settings:
        settings = {**settings, "init": str(run)}
    with pytest.raises(UsageError, match=told):
        CAPTION.resolve({"data": str(photos), **settings})


def test_data_without_captions_are_refused(run: Path, photos: Path, tmp_path: Path, capsys):
    (tmp_path / "a").mkdir()
    for n in range(4):
        photo("red", "top", n).save(tmp_path / "a" / f"{n}.png")
    with pytest.raises(UsageError, match="no table of images and captions"):
        train(tmp_path, tmp_path / "out")
    assert main(["eval", str(run), f"data={tmp_path}", "part=train"]) == 2
    assert "no table of images and captions" in capsys.readouterr().err
    assert main(["eval", str(run), f"data={photos}"]) == 2
    assert "no test part" in capsys.readouterr().err
    assert main(["run", str(run), "x.png", "n_best=9"]) == 2
    assert "widen the beam" in capsys.readouterr().err


def test_padding_never_reaches_the_loss():
    model = build("vit")
    some, texts = images(2), captions(4)
    writes = texts.roll(-1, 1)
    writes[1, 3:] = -1
    writes[2] = -1  # a caption that is not there
    batch = CaptionBatch(some, texts, writes, 0)
    loss = caption_loss(model, batch, 0.0)
    logits = model(some, texts).flatten(0, 1)
    right = F.cross_entropy(logits, writes.flatten(), ignore_index=-1, reduction="sum")
    close(loss, right)
    other = texts.clone()
    other[1, 4:], other[2] = 5, 9
    close(caption_loss(model, batch._replace(inputs=other), 0.0), loss)


def test_flickr8k_has_five_captions_of_each_photo(real_data: Path):
    folder = real_data / "flickr8k"
    if not folder.is_dir():
        pytest.skip("no flickr8k")
    for part, count in (("train", 6000), ("valid", 1000)):
        found = captions_in(folder, part, None)
        assert len(found) == count and {len(some) for some in found.values()} == {5}


def test_a_describer_refuses_a_model_of_another_family(tmp_path: Path):
    other = family("vit")[1](VIT)
    with pytest.raises(UsageError, match="expected captioner"):
        CAPTION.load(tmp_path, other, {"image": vars(ImageFormat(12, 3))})
