"""Laws of denoising: the model, its training, its scores, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from beartype import beartype
from jaxtyping import jaxtyped
from PIL import Image
from torch import Tensor

import regard
import regard.attention.multihead as multihead
from regard.attention.watch import watch
from regard.cli import main
from regard.data.photos import Photo, load_photos, noise_of
from regard.errors import UsageError
from regard.files.weights import state_of
from regard.layers.block import BlockConfig
from regard.metrics.image import psnr
from regard.models.denoiser import Denoiser, DenoiserConfig, mirrored, noise_level
from regard.models.folder import save_config, save_weights
from regard.recipes import RECIPES, recipe
from regard.tasks.vision.denoise import DENOISE, NoisyCrops
from regard.viewer.placement import token_weights
from tests.models import laws
from tests.models.laws import close
from tests.zoo import ANIMALS
from tests.zoo import bar as bars

BLOCK = BlockConfig(16, 2, 24, dropout=0.0)
SMALL = DenoiserConfig(image=16, depth=2, every=1, block=BLOCK, window=4)
KINDS = {
    "windows": SMALL,
    "no attention": replace(SMALL, look="none"),
    "pixels": replace(SMALL, patch=1, position="none", block=replace(BLOCK, score="gaussian")),
    "patches of 3": replace(SMALL, patch=3, window=3, position="continuous", depth=5, every=2),
    "rotary": replace(SMALL, position="rotary", block=replace(BLOCK, norm="rms", kv_heads=1)),
}


@pytest.fixture(autouse=True)
def shapes_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the shapes in signatures while testing."""
    for verb in ("forward", "features", "level"):
        checked = jaxtyped(typechecker=beartype)(getattr(Denoiser, verb))
        monkeypatch.setattr(Denoiser, verb, checked)


@pytest.fixture(params=KINDS)
def model(request) -> Denoiser:
    """Return one small model in fp64, its weights enlarged so that differences would show."""
    torch.manual_seed(0)
    model = Denoiser(KINDS[request.param]).double().eval()
    for part in model.parameters():
        part.data += 0.2 * torch.randn_like(part)
    return model


def images(count: int = 3, size: tuple[int, int] = (16, 16), dtype=torch.float64) -> Tensor:
    rand = torch.Generator().manual_seed(1)
    return torch.rand((count, 1, *size), generator=rand, dtype=torch.float64).to(dtype)


# The model


def test_neighbours_never_matter(model: Denoiser):
    some, sigma = images(), torch.tensor([0.1, 0.2, 0.05]).double()
    together = model(some, sigma)
    for i in range(3):
        close(model(some[i : i + 1], sigma[i : i + 1])[0], together[i])
    assert (together - some).abs().max() > 0.01


@pytest.mark.parametrize("size", [(1, 1), (2, 5), (13, 27), (24, 16)])
def test_an_image_may_be_of_any_size(model: Denoiser, size: tuple[int, int]):
    some = images(2, size)
    assert model(some, 0.1).shape == some.shape and model(some).isfinite().all()
    whole = mirrored(some, *(-n % model.whole for n in size))
    assert tuple(whole.shape[2:]) == tuple(n * model.config.patch for n in model.grid(size))
    close(model(whole, 0.1)[..., : size[0], : size[1]], model(some, 0.1))


def test_without_noise_nothing_changes(model: Denoiser):
    assert torch.equal(model(images(), 0.0), images())


def test_a_model_begins_by_leaving_images_as_they_are():
    for name in KINDS:
        assert torch.equal(
            Denoiser(KINDS[name])(images(dtype=torch.float32), 0.1), images().float()
        )


def test_every_pixel_and_the_level_of_noise_matter(model: Denoiser):
    some, sigma = (
        images().requires_grad_(),
        torch.full((3,), 0.1, dtype=torch.float64).requires_grad_(),
    )
    (model(some, sigma) - some).square().sum().backward()
    assert some.grad is not None and (some.grad.abs().sum((0, 1)) > 0).all()
    close(model(images(), 0.1), model(images(), torch.full((3,), 0.1, dtype=torch.float64)))
    other = (images() - model(images(), 0.2)) / 2 - (images() - model(images(), 0.1))
    assert other.abs().max() > 1e-4  # beyond the factor that sigma is


def test_what_is_out_of_reach_never_matters(model: Denoiser):
    some = images(1, (16 * model.whole, 16 * model.whole)).requires_grad_()
    reach, middle = model.reach, 8 * model.whole
    assert reach < middle
    model(some, 0.1)[0, 0, middle, middle].backward()
    assert some.grad is not None
    rows, columns = some.grad[0, 0].nonzero().T
    assert rows.min() >= middle - reach and rows.max() <= middle + reach
    assert columns.min() >= middle - reach and columns.max() <= middle + reach


def test_every_parameter_learns(model: Denoiser):
    model.train()
    (model(images(), 0.2) - 0.5).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        if not (name.endswith("qkv.bias") and model.config.position == "none"):
            assert parameter.grad.abs().max() > 1e-9, name


def test_a_model_builds_on_the_meta_device(model: Denoiser):
    laws.builds_on_meta(model, lambda each: each(*laws.like(each, images(2))))


def test_save_then_load_is_the_identity(model: Denoiser, tmp_path: Path):
    some = images(dtype=torch.float32)
    laws.survives_its_folder(model, tmp_path, "denoise", lambda each: each(some, 0.1), 2e-5)


def test_watching_changes_nothing_and_tells_the_truth(model: Denoiser, monkeypatch):
    calls = []

    def attend(q, k, v, **settings) -> Tensor:
        out = real_attend(q, k, v, **settings)
        calls.append((v, out))
        return out

    plain = model(images(), 0.1)
    real_attend = multihead.attend
    monkeypatch.setattr(multihead, "attend", attend)
    with watch(model) as maps:
        assert torch.equal(model(images(), 0.1), plain)
    depth, every = model.config.depth, model.config.every
    looking = range(every - 1, depth, every) if model.config.look != "none" else ()
    assert maps.names() == [f"blocks.{n}.around.attention.inside" for n in looking]
    for name, (v, out) in zip(maps.names(), calls, strict=True):
        weights = maps[name].weights()
        close(weights @ v.repeat_interleave(weights.shape[1] // v.shape[1], dim=1), out)


@pytest.mark.parametrize("level", [5, 25, 50])
def test_the_level_of_noise_is_found_where_an_image_is_smooth(level: int):
    slope = torch.linspace(0.2, 0.8, 96).expand(1, 1, 96, 96)
    noise = torch.randn(slope.shape, generator=torch.Generator().manual_seed(0))
    found = 255 * float(noise_level(slope + level / 255 * noise))
    assert found == pytest.approx(level, rel=0.05)
    assert float(noise_level(slope)) < 1e-6


def test_names_and_sizes_that_mean_nothing_are_refused():
    with pytest.raises(UsageError, match="windows"):
        Denoiser(replace(SMALL, look="window"))
    with pytest.raises(UsageError, match="sees nothing"):
        Denoiser(replace(SMALL, window=1))


# The task


def test_noise_depends_on_the_image_and_the_seed_alone():
    one = noise_of("ab12", (1, 30, 30), 0)
    assert torch.equal(one, noise_of("ab12", (1, 30, 30), 0))
    assert not torch.equal(one, noise_of("ab13", (1, 30, 30), 0))
    assert not torch.equal(one, noise_of("ab12", (1, 30, 30), 1))
    assert abs(float(one.std()) - 1) < 0.1


FAST = {**ANIMALS["denoise"].settings, "steps": 30}
del FAST["valid"]


@pytest.fixture(scope="module")
def data(zoo) -> Path:
    return zoo.data("denoise")


@pytest.fixture(scope="module")
def trained(zoo) -> Path:
    return zoo.model("denoise")


def test_noise_is_taken_out_of_images_that_were_never_seen(trained, tmp_path):
    for i in range(3):
        Image.fromarray(bars(100 + i, (33, 50))).save(tmp_path / f"{i}.png")
    scores = regard.evaluate(str(trained), data=str(tmp_path), sigma="25,40").scores
    found = {score.name: score.value for score in scores}
    for level in (25, 40):
        assert found[f"PSNR at {level}"] > found[f"PSNR at {level} of the noisy images"] + 3
        assert found[f"SSIM at {level}"] > found[f"SSIM at {level} of the noisy images"]
    assert found["PSNR at 25 of the noisy images"] == pytest.approx(20.17, abs=0.3)
    kept = json.loads((trained / "scores.jsonl").read_text().splitlines()[-1])
    assert kept["made_with"]["sigma"] == [25.0, 40.0] and len(kept["made_with"]["data_hash"]) == 3


def test_a_batch_depends_on_the_seed_and_its_number_alone(data):
    parts = load_photos(str(data), valid="0.1", channels=1).parts
    settings = DENOISE.resolve({"data": str(data), **FAST})
    one, two = (NoisyCrops(parts["train"], settings) for _ in range(2))
    for n in (5, 0, 5):
        for a, b in zip(one[n], two[n], strict=True):
            assert torch.equal(a, b)
    assert not torch.equal(one[0].clean, one[1].clean)
    noise = one[0].noisy - one[0].clean
    spread = noise.flatten(1).std(1) / one[0].sigma
    assert ((spread - 1).abs() < 0.25).all()
    many = torch.cat([one[n].sigma for n in range(40)])
    assert 5 / 255 <= many.min() < 10 / 255 and 50 / 255 < many.max() <= 55 / 255


def test_pieces_are_cut_from_everywhere_and_turned_in_eight_ways(data):
    settings = DENOISE.resolve({"data": str(data), **FAST, "image": 2, "window": 2})
    image = torch.arange(9, dtype=torch.uint8).view(1, 3, 3)
    task = NoisyCrops([Photo("", "0", image)], settings)
    chance = np.random.default_rng(0)
    seen = {tuple(task.crop(task.images[0], chance).flatten().tolist()) for _ in range(1000)}
    assert len(seen) == 4 * 8
    small = NoisyCrops([Photo("", "0", image)], DENOISE.resolve({"data": "x", **FAST}))
    assert small.images[0].shape == (16, 16)
    assert small[0].clean.shape == (8, 1, 16, 16)


def test_train_and_valid_share_no_image_and_lose_none(data):
    loaded = load_photos(str(data), valid="0.2", channels=1)
    parts, notes = loaded.parts, loaded.notes
    hashes = [{photo.hash for photo in parts[name]} for name in ("train", "valid")]
    assert not hashes[0] & hashes[1] and len(hashes[0] | hashes[1]) == 24
    assert any("split off" in note for note in notes)


def test_pieces_of_a_large_image_are_denoised_as_the_whole(trained):
    model = regard.load(trained)
    image = torch.rand(1, 90, 210, generator=torch.Generator().manual_seed(0))
    at_once = model.predictor.clean(image, 0.1)
    torch.testing.assert_close(
        model.predictor.clean(image, 0.1, side=40), at_once, atol=2e-6, rtol=0
    )


def test_colours_are_denoised_one_by_one(trained):
    model = regard.load(trained)
    image = np.stack([bars(i) for i in range(3)], 2)
    found = model.run(image, sigma=20)
    assert found.pixels.shape == image.shape and found.pixels.dtype == np.uint8
    for channel in range(3):
        grey = model.run(image[..., channel], sigma=20)
        assert np.array_equal(grey.pixels, found.pixels[..., channel])


def test_the_command_line_writes_images(trained, data, tmp_path, capsys):
    noisy = tmp_path / "noisy.png"
    Image.fromarray(bars(7)).save(noisy)
    out = tmp_path / "clean.png"
    assert main(["run", str(trained), str(noisy), f"out={out}", "sigma=10"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(str(out)) and "sigma 10.0" in told
    found = regard.load(trained).run(str(noisy), sigma=10)
    assert np.array_equal(np.asarray(Image.open(out)), found.pixels)
    assert main(["run", str(trained), str(noisy), "noise=25", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["psnr"] > told["noisy_psnr"] and told["sigma"] == 25 and told["out"] is None
    folder = tmp_path / "several"
    assert main(["run", str(trained), str(noisy), str(noisy), f"out={folder}"]) == 0
    assert (folder / "noisy.png").exists()


def test_looking_shows_what_was_learned_beside_non_local_means(trained, tmp_path, capsys):
    Image.fromarray(bars(3, (60, 80))).save(tmp_path / "a.png")
    words = ["look", str(trained), str(tmp_path / "a.png"), "noise=25", "piece=32"]
    for at in ("middle", "79,59"):
        picture = regard.load(trained).picture(str(tmp_path / "a.png"), noise=25, piece=32, at=at)
        names = [view.name for view in picture.views]
        assert names == [
            "blocks.0.around.attention",
            "blocks.1.around.attention",
            "rollout",
            "non-local means",
        ]
        for view in picture.views:
            assert view.weights.sum(-1) == pytest.approx(1.0, abs=1e-4)
    assert main([*words, "at=79,59", f"out={tmp_path / 'look.png'}"]) == 0
    assert Image.open(tmp_path / "look.png").size[0] > 300
    assert main([*words, "at=80,59"]) == 2
    assert "outside" in capsys.readouterr().err


def test_a_piece_looks_as_the_whole_image_does(trained):
    model = regard.load(trained)
    image, at = bars(5, (120, 120)), 61
    rows = []
    for piece in (512, 96):
        picture = model.picture(image, sigma=20, piece=piece, at=f"{at},{at}")
        (row,) = [token_weights(view, picture.query) for view in picture.views[:1]]
        width = picture.views[0].placement.key_grid.width
        rows.append(np.sort(row[row > 0]))
        assert len(row[0]) == width * width
    assert rows[0] == pytest.approx(rows[1], abs=1e-5)


def test_filters_made_by_hand_are_tuned_elsewhere_and_given_the_same_noise(
    trained, data, tmp_path, monkeypatch
):
    filters = pytest.importorskip("regard.filters")
    from regard.filters import tuned as tuned_filters

    seen: list[Tensor] = []

    def gaussian(image: Tensor, *, sigma: float) -> Tensor:
        seen.append(image)
        return real(image, sigma=sigma)

    real = filters.FILTERS["gaussian"]
    monkeypatch.setitem(filters.FILTERS, "gaussian", gaussian)
    grids = {"gaussian": tuned_filters.GRIDS["gaussian"]}
    monkeypatch.setattr(tuned_filters, "GRIDS", grids)
    Image.fromarray(bars(50)).save(tmp_path / "only.png")
    scores = regard.evaluate(
        str(trained), data=str(tmp_path), sigma=25, filters=str(data), tuned_on=2
    ).scores
    (found,) = [score for score in scores if score.name == "PSNR at 25 of gaussian"]
    assert "tuned on 2 images" in found.signature
    (photo,) = load_photos(str(tmp_path), need=("test",), channels=1).parts["test"]
    noisy = photo.clean() + 25 / 255 * photo.noise(0)
    assert torch.equal(seen[-1], noisy)
    assert not any(torch.equal(image, noisy) for image in seen[:-1])
    tried = tuned_filters.geometric(1, 0.4, 2.5, 13)
    best = max(float(psnr(real(noisy, sigma=s).clamp(0, 1), photo.clean())) for s in tried)
    assert found.value > best - 0.5


def test_the_search_finds_the_best_of_its_grid():
    pytest.importorskip("regard.filters")
    from regard.filters.tuned import GRIDS, tuned

    clean = torch.from_numpy(bars(1)).float()[None] / 255
    noisy = clean + 25 / 255 * noise_of("1", tuple(clean.shape), 0)
    from regard.filters import FILTERS

    best = tuned("gaussian", 25 / 255, [(noisy, clean)])
    values = [
        float(psnr(FILTERS["gaussian"](noisy, sigma=s).clamp(0, 1), clean))
        for s in GRIDS["gaussian"](25 / 255)["sigma"]
    ]
    assert best["sigma"] == GRIDS["gaussian"](25 / 255)["sigma"][int(np.argmax(values))]
    for name, grid in GRIDS.items():  # every filter takes what is tried of it
        middle = {key: options[len(options) // 2] for key, options in grid(25 / 255).items()}
        made = FILTERS[name](noisy, **middle)
        assert made.shape == noisy.shape and psnr(made, clean) > psnr(noisy, clean), name


def test_models_are_compared_on_the_same_noise(trained, data, tmp_path):
    outputs = tmp_path / "clean"
    found = regard.evaluate(
        str(trained), data=str(data), sigma=25, against=str(trained), outputs=outputs
    )
    assert len(list(outputs.glob("*-25.png"))) == found.sentences
    (comparison,) = found.comparison
    assert comparison.ours == comparison.theirs and comparison.p == 1


@pytest.mark.parametrize("name", [n for n in RECIPES if recipe(n).TASK == "denoise"])
def test_recipes_use_keys_that_there_are(name):
    settings = DENOISE.resolve({**recipe(name).SETTINGS, "data": "somewhere"})
    with torch.device("meta"):
        Denoiser(settings.model)
    assert " ".join((recipe(name).__doc__ or "").split()).count("regard train") == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train", "denoise"], "data is missing"),
        (["train", "denoise", "data=DATA", "noise=50,5"], "noise=50,5"),
        (["train", "denoise", "data=DATA", "noise=5"], "noise=5"),
        (["train", "denoise", "data=DATA", "loss=l3"], "unknown loss 'l3'"),
        (["train", "denoise", "data=DATA", "look=window"], "Did you mean 'windows'"),
        (["train", "denoise", "data=nowhere"], "nowhere"),
        (["run", "MODEL", "IMAGE", "sigma=300"], "sigma=300"),
        (["run", "MODEL", "IMAGE", "IMAGE", "out=a.png"], "name a folder"),
        (["run", "MODEL", "IMAGE", "out=a.pdf"], "out=a.pdf"),
        (["run", "MODEL", "missing.png"], "missing.png"),
        (["look", "MODEL", "IMAGE", "at=here"], "at=here"),
        (["look", "MODEL", "IMAGE", "view=filters"], "unknown view"),
        (["eval", "MODEL"], "data is missing"),
        (["eval", "MODEL", "data=DATA", "sigma=0"], "sigma=0"),
        (["eval", "MODEL", "data=DATA", "against=en-zh"], "expected one for denoise"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(
    words, told, trained, data, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    image = str(sorted(data.glob("*.png"))[0])
    places = {"MODEL": str(trained), "IMAGE": image, "DATA": str(data)}
    words = [
        word.replace("DATA", str(data)) if "=" in word else places.get(word, word) for word in words
    ]
    small = [f"{key}={value}" for key, value in FAST.items()] if words[0] == "train" else []
    assert main([*words, *small]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert told in error and error.startswith("regard: ")


def test_a_model_of_another_family_is_refused(tmp_path):
    from regard.models.vit import ViT, ViTConfig

    vit = ViT(ViTConfig(labels=2, image=8, patch=4, depth=1, block=replace(BLOCK, ffn_width=8)))
    save_config(tmp_path, vit, name="vit", task="denoise", about={})
    save_weights(tmp_path, state_of(vit))
    with pytest.raises(UsageError, match="cannot denoise"):
        regard.load(tmp_path)
