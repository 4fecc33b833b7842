"""Looking at images: every weight lies on its pixel, and nothing is changed by being watched."""

import base64
import json
import re
import struct
import warnings
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import regard
from regard.attention.watch import watch
from regard.cli import main
from regard.data.image_format import ImageFormat
from regard.errors import UsageError
from regard.files.weights import state_of
from regard.layers.layout import TokenGrid
from regard.modalities.image import IMAGE
from regard.models import family, preset, pretrainer
from regard.models.folder import save_config, save_weights
from regard.tasks.frame.media import MediaCodec
from regard.tasks.runner import Runner
from regard.tasks.vision.images import IMAGES
from regard.tasks.vision.pretrain import PRETRAIN
from regard.viewer.html import MAX_IMAGE_WEIGHTS, page
from regard.viewer.image import (
    filters,
    image_views,
    layouts,
    lowest_entropy_head,
    reconstruction,
    rollout,
)
from regard.viewer.notebook import Look, draw
from regard.viewer.picture import Picture
from regard.viewer.placement import (
    grid_weights,
    query_row,
    subsample_queries,
    token_at,
    token_weights,
)
from tests.viewer.test_look import Reader, browser, data_of, unpack, visit  # noqa: F401

# name -> family, row, what is changed of its tiny size
KINDS = {
    "vit": ("vit", "vit", {}),
    "deit": ("vit", "deit", {}),
    "cct": ("vit", "cct", {}),
    "swin": ("swin", "swin", {}),
    "swin2": ("swin", "swinv2", {"window": 5}),
    "mvit": ("mvit", "mvitv2", {}),
    "mvit1": ("mvit", "mvit", {}),
    "local": ("local", "lrnet", {}),
    "resnet": ("resnet", "resnet_attention", {}),
}
LABELS = ["boot", "<b>bag</b>", "衬衫"]


def make(kind: str, image: int = 32, **changes) -> torch.nn.Module:
    """Make a tiny model whose attention is far from even."""
    name, row, more = KINDS[kind]
    torch.manual_seed(0)
    config = replace(preset(name, "tiny", row), labels=3, image=image, **more, **changes)
    model = family(name)[1](config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if re.search(r"qkv|query|key|table|query", name):
                weight.copy_(torch.randn(weight.shape) * (3.0 / max(1, weight.shape[-1]) ** 0.5))
    return model


def classifier(kind: str = "vit", image: int = 32, **changes) -> Runner:
    return IMAGES.bind(
        make(kind, image, **changes), MediaCodec(IMAGE, ImageFormat(image, 3), LABELS), {}
    )


def watched(model, size=(32, 32)):
    """Return the placed views of an image of noise, and the maps they come from."""
    images = torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode(), watch(model) as maps:
        out = model(images)
    return image_views(model, maps, size), maps, images, out


@pytest.fixture
def photo(tmp_path):
    """A photo that is wider than high."""
    pixels = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    path = tmp_path / "photo.png"
    Image.fromarray(pixels).save(path)
    return str(path)


# ---- placing ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(32, 32), (27, 38)])
def test_every_map_finds_its_place_and_loses_nothing_but_padding(kind, size):
    views, maps, _, _ = watched(make(kind), size)
    assert [view.name for view in views] == [name.removesuffix(".inside") for name in maps]
    for view in views:
        placement = view.placement
        tokens = placement.query_tokens.tolist()
        assert tokens == list(range(len(placement.query_grid)))
        for query in ("class", "mean", (0.3, 0.7)):
            total = token_weights(view, query).sum(1)
            whole = not kind.startswith("swin")  # whose windows look at padding
            assert (total <= 1 + 1e-5).all() and (not whole or (total >= 1 - 1e-5).all())
    for layout in layouts(make(kind), size).values():
        for side in (layout.query_grid, layout.key_grid):
            if not side.height:
                continue
            step = side.cell_height * size[0], side.cell_width * size[1]
            assert step[0] == pytest.approx(step[1])
            over = side.height * step[0] - size[0], side.width * step[1] - size[1]
            # grids cover the image, but for what is less than a patch
            assert all(-step[0] < each < step[0] for each in over)


def oracle_windows(windows, x: torch.Tensor) -> torch.Tensor:
    """Attend over the whole padded grid, where a mask says who is in whose window."""
    _, height, width, _ = x.shape
    window, shift = windows.fit(height, width)
    high, wide = (-(-n // window) * window for n in (height, width))
    x = torch.nn.functional.pad(x, (0, 0, 0, wide - width, 0, high - height))[0].flatten(0, 1)
    inside = windows.inside
    q, k, _ = inside.qkv(x).unflatten(-1, (3, inside.heads, -1)).unbind(1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    y, x_at = torch.arange(high * wide) // wide, torch.arange(high * wide) % wide
    line = [((at - shift) % n // window, at < shift) for at, n in ((y, high), (x_at, wide))]
    seen = torch.ones(high * wide, high * wide, dtype=torch.bool)
    for number, round_the_end in line:
        seen &= number[:, None] == number[None]
        seen &= round_the_end[:, None] == round_the_end[None]
    made_for = inside.position.window  # a window that has shrunk has the offsets of its own
    down, right = (at[:, None] - at[None] + made_for - 1 for at in (y, x_at))
    index = (down * (2 * made_for - 1) + right).masked_fill(~seen, 0)
    scores = scores + inside.position.table.T[:, index]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    real = ((y < height) & (x_at < width)).nonzero().squeeze(1)
    return weights[:, real][:, :, real]


@pytest.mark.parametrize("size", [(32, 32), (20, 36)])  # windows fill the first, not the second
def test_windows_put_back_are_full_attention_under_a_mask(size):
    model = make("swin", window=4)
    inputs = {}
    for name, module in model.named_modules():
        if type(module).__name__ == "WindowAttention":
            module.register_forward_pre_hook(
                lambda module, args, name=name: inputs.update({name: (module, args[0])})
            )
    views, *_ = watched(model, size)
    shifts = set()
    for view in views:
        windows, x = inputs[view.name]
        shifts.add(windows.shift)
        with torch.no_grad():
            wanted = oracle_windows(windows, x.clone())
        grid = view.placement.query_grid
        for token in range(0, len(grid), 7):
            y, x_at = divmod(token, grid.width)
            point = (x_at + 0.5) * grid.cell_width, (y + 0.5) * grid.cell_height
            found = token_weights(view, point)
            np.testing.assert_allclose(found, wanted[:, token], atol=1e-5)
    assert shifts == {0, 2}


def test_local_kernels_lie_around_their_pixel():
    model = make("local")
    inputs = {}
    for name, module in model.named_modules():
        if type(module).__name__ == "LocalRelation":
            module.register_forward_pre_hook(
                lambda module, args, name=name: inputs.update({name: (module, args[0])})
            )
    views, *_ = watched(model, (19, 24))
    for view in views:
        module, x = inputs[view.name]
        x, reach = x[0].permute(1, 2, 0).clone(), module.window // 2
        height, width = x.shape[:2]
        with torch.no_grad():
            q, k = module.query(x), module.key(x)
            line = torch.arange(-reach, reach + 1.0) / reach
            prior = module.prior(torch.cartesian_prod(line, line).T).view(-1, *2 * [module.window])
        for y, x_at in ((0, 0), (height // 2, width // 2), (height - 1, 0)):
            y, x_at = (n // module.stride * module.stride for n in (y, x_at))
            scores = torch.full((module.groups, height, width), -torch.inf)
            for i in range(height):
                for j in range(width):
                    if max(abs(i - y), abs(j - x_at)) <= reach:
                        near = prior[:, i - y + reach, j - x_at + reach]
                        scores[:, i, j] = q[y, x_at] * k[i, j] + near
            wanted = scores.flatten(1).softmax(-1).view_as(scores).numpy()
            columns = view.placement.key_grid
            query = ((x_at + 0.5) * columns.cell_width, (y + 0.5) * columns.cell_height)
            np.testing.assert_allclose(grid_weights(view, query), wanted, atol=1e-5)


def test_pooled_keys_are_the_rows_of_the_map_itself():
    views, maps, *_ = watched(make("mvit1"))
    for view in views:
        weights = maps[view.name].weights()[0].numpy()
        np.testing.assert_allclose(token_weights(view, "class"), weights[:, 0], atol=1e-6)
        np.testing.assert_allclose(token_weights(view, "mean"), weights.mean(1), atol=1e-6)
        grid = view.placement.query_grid
        last = token_weights(view, (0.999, 0.999))
        np.testing.assert_allclose(last, weights[:, -1], atol=1e-6)
        assert grid.names == ("class",)


def test_a_place_is_column_by_row_and_the_nearest_that_was_kept():
    grid = TokenGrid(("class",), 4, 8, 0.25, 0.125)
    assert token_at(grid, "class") == 0 and token_at(grid, "mean") is None
    assert token_at(grid, (0.99, 0.0)) == 1 + 7
    assert token_at(grid, (0.0, 0.99)) == 1 + 3 * 8
    assert token_at(replace(grid, names=()), "class") is None
    view = watched(make("vit"))[0][0]
    few = subsample_queries(view, view.weights.size // 10, (0.9, 0.9))
    assert few.weights.size <= view.weights.size // 8
    assert 0 in few.placement.query_tokens  # the class token always stays
    np.testing.assert_array_equal(token_weights(few, (0.9, 0.9)), token_weights(view, (0.9, 0.9)))
    row = query_row(few.placement, (0.05, 0.05))
    cell = int(few.placement.query_tokens[row]) - 1
    assert max(divmod(cell, view.placement.query_grid.width)) <= 2


# ---- rollout ----------------------------------------------------------------------------------


def test_rollout_is_the_product_of_all_layers():
    views, maps, *_ = watched(make("deit"))
    wanted = np.eye(maps[views[0].name].shape[-1])
    for name in maps:
        mean = maps[name].weights()[0].double().mean(0).numpy()
        wanted = (mean + np.eye(len(mean))) / 2 @ wanted
    found = rollout(views)
    np.testing.assert_allclose(found.weights[0], wanted, atol=1e-6)
    assert found.placement.query_grid.names == ("class", "teacher")


def test_rollout_through_windows_and_merging_is_a_loop_over_dense_matrices():
    views, *_ = watched(make("swin", window=4))
    wanted, before = None, None
    for view in views:
        grid = view.placement.query_grid
        n = grid.height * grid.width
        centres = [
            ((i % grid.width + 0.5) * grid.cell_width, (i // grid.width + 0.5) * grid.cell_height)
            for i in range(n)
        ]
        mean = np.stack([token_weights(view, centre).mean(0) for centre in centres])
        if wanted is None:
            wanted = np.eye(n)
        elif before != grid:
            merge = np.zeros((n, before.height * before.width))
            for y in range(before.height):
                for x in range(before.width):
                    merge[y // 2 * grid.width + x // 2, y * before.width + x] = 0.25
            wanted = merge @ wanted
        wanted, before = (mean + np.eye(n)) / 2 @ wanted, grid
    found = rollout(views)
    np.testing.assert_allclose(found.weights[0], wanted, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(32, 32), (27, 38)])
def test_what_is_rolled_out_comes_wholly_from_the_image(kind, size):
    views, *_ = watched(make(kind), size)
    found = rollout(views, (0.4, 0.6))
    np.testing.assert_allclose(found.weights.sum(2), 1.0, atol=1e-5)
    assert found.heads == ("mean",) and query_row(found.placement, (0.4, 0.6)) is not None


# ---- watching ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_watching_changes_no_bit(kind):
    model = make(kind)
    *_, images, out = watched(model)
    with torch.inference_mode():
        assert torch.equal(model(images), out)


def test_a_picture_tells_what_run_tells(photo):
    model = classifier()
    picture = model.picture(photo)
    answer = model.run(photo)
    assert picture.output == str(answer) and picture.photo.shape == (40, 40, 3)
    told = re.findall(r"\d\.\d{4}", picture.note)
    assert told == [f"{p:.4f}" for p in sorted(model.run(photo).probabilities)[::-1]]
    assert picture.views[-1].name == "rollout" and len(picture.views) == 5


def test_a_grey_array_is_looked_at_as_it_is():
    pixels = np.arange(28 * 28, dtype=np.uint8).reshape(28, 28)
    model = IMAGES.bind(
        make("vit", 28, channels=1), MediaCodec(IMAGE, ImageFormat(28, 1), LABELS), {}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        picture = model.picture(pixels, at="27,0")
    np.testing.assert_array_equal(picture.photo, pixels)
    # after the class token, the last of the first row
    assert query_row(picture.views[0].placement, picture.query) == 7


def test_a_pixel_of_the_photo_is_found_where_it_is_cropped_stretched_or_padded(photo):
    model = classifier()
    # 40 of 60 columns are seen: 10 to 49
    assert model.picture(photo, at="10,0").query == pytest.approx((0.5 / 40, 0.5 / 40))
    assert model.picture(photo, at="49,39").query == pytest.approx((39.5 / 40, 39.5 / 40))
    model.predictor.codec = replace(model.codec, format=replace(model.format, fit="stretch"))
    assert model.picture(photo, at="0,39").query == pytest.approx((0.5 / 60, 39.5 / 40))
    model.predictor.codec = replace(model.codec, format=replace(model.format, fit="pad"))
    assert model.picture(photo, at="0,0").query == pytest.approx((0.5 / 60, 10.5 / 60))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"at": "70,3"}, r"at=70,3 is outside of the photo; its pixels are 0,0 to 59,39"),
        ({"at": "3,3"}, r"at=3,3 is not seen by the model, which takes 10,0 to 49,39"),
        ({"at": "left"}, r"at=left; expected class, mean, or a pixel"),
        ({"at": "-1,2"}, r"at=-1,2; expected class, mean, or a pixel"),
        ({"view": "filter"}, r"unknown view 'filter'.*Did you mean 'filters'"),
        ({"layers": "9"}, r"layers=9: no such layer; choose from .*0 to 3"),
        ({"heads": "7"}, r"heads=7: blocks.0.attention has no such head; choose from 0 to 2"),
        ({"colour": "red"}, r"unknown key 'colour'"),
        ({"out": "a.gif"}, r"unknown kind of picture '.gif'; end it in .html or .png"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(photo, tmp_path, monkeypatch, settings, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=said) as caught:
        regard.look(classifier(), photo, **{"out": "a.html", **settings})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "a.html").exists()


def test_what_cannot_be_looked_at_is_refused(tmp_path, photo):
    with pytest.raises(UsageError, match="has no attention to look at; choose view=filters"):
        name, size = "resnet", preset("resnet", "tiny", "resnet")
        model = family(name)[1](replace(size, labels=3)).eval()
        IMAGES.bind(model, MediaCodec(IMAGE, ImageFormat(32, 3), LABELS), {}).picture(photo)
    with pytest.raises(UsageError, match=r"no\.png"):
        classifier().picture(str(tmp_path / "no.png"))
    with pytest.raises(UsageError, match="is no image"):
        classifier().picture(7)


# ---- files ------------------------------------------------------------------------------------


def unpacked(view: dict) -> np.ndarray:
    """Read a placed view back as the page's script does."""
    placement = view["placement"]
    tokens = np.frombuffer(zlib.decompress(base64.b64decode(placement["query_tokens"])), "<i4")
    counts = {"rows": range(len(tokens)), "columns": range(placement["keys_per_query"])}
    return unpack({**view, **counts})


def test_a_page_needs_nothing_from_outside_and_escapes(tmp_path, photo):
    hostile = tmp_path / "<img src=x onerror=alert(1)>.png"
    Image.open(photo).save(hostile)
    text = Look(classifier("swin").picture(str(hostile), at="20,20")).html()
    assert not re.search(
        r"https?:|//[a-z]+\.|\bsrc\s*=|\bhref\s*=|url\(|@import|\bfetch\(",
        text.replace("src=x", ""),
    )
    assert not any({"src", "href"} & set(attributes) for _, attributes in Reader(text).tags)
    assert "<img" not in text and "<b>bag" not in text
    assert str(tmp_path) not in text  # a page tells the name of a file, not where it was
    (picture,) = data_of(text)["pictures"]
    assert picture["title"] == hostile.name


def test_a_page_holds_what_was_placed_within_half_a_level(photo):
    picture = classifier("swin", window=4).picture(photo)
    (data,) = data_of(page(picture))["pictures"]
    for view, packed in zip(picture.views, data["views"], strict=True):
        found = unpacked(packed)
        limit = view.weights.max(2, keepdims=True) / packed["levels"] / 2
        assert (np.abs(found - view.weights) <= limit * 1.02 + 1e-9).all()


def test_however_large_the_photo_the_page_is_small(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (1500, 2500, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "big.png")
    picture = classifier(image=64, patch=2).picture(str(tmp_path / "big.png"), at="1200,700")
    assert picture.photo.shape == (512, 512, 3)
    assert sum(view.weights.size for view in picture.views) > MAX_IMAGE_WEIGHTS
    text = page(picture)
    assert len(text) < 1.5 * MAX_IMAGE_WEIGHTS
    (data,) = data_of(text)["pictures"]
    found = unpacked(data["views"][0])
    assert found.size < MAX_IMAGE_WEIGHTS and data["views"][0]["levels"] == 255


def size_of(png: bytes) -> tuple[int, int]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])


@pytest.mark.parametrize("kind", ["vit", "swin", "mvit", "local", "resnet", "cct"])
def test_maps_are_drawn_over_the_photo_without_a_warning(kind, photo, tmp_path):
    model = classifier(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, settings in enumerate(
            [{"heads": "mean"}, {"at": "20,20", "layers": "rollout"}, {"view": "filters"}]
        ):
            out = tmp_path / f"{number}.png"
            regard.look(model, photo, out=str(out), **settings)
            assert min(size_of(out.read_bytes())) > 100


def test_the_heat_lies_where_the_weight_is():
    from regard.viewer.overlays import overlay

    view = watched(make("vit"))[0][0]
    found = np.zeros((8, 8))
    found[2, 5] = 1.0
    drawn = overlay(np.zeros((64, 64, 3), np.uint8), found, view.placement.key_grid).sum(2)
    y, x = np.unravel_index(drawn.argmax(), drawn.shape)
    side = drawn.shape[0] / 8
    assert (y // side, x // side) == (2, 5)


@pytest.mark.parametrize(("cells", "size"), [((2, 8), (64, 64)), ((4, 2), (40, 60))])
def test_every_cell_is_drawn_over_its_share_of_the_photo(cells, size):
    from regard.viewer.overlays import overlay

    (high, wide), rest = cells, 0.1  # of a photo whose last tenth no cell covers
    grid = TokenGrid((), high, wide, (1 - rest) / high, (1 - rest) / wide)
    photo = np.zeros((*size, 3), np.uint8)
    dark = overlay(photo, np.zeros(cells), grid)
    for row, column in np.ndindex(*cells):
        weights = np.zeros(cells)
        weights[row, column] = 1.0
        lit = np.argwhere((overlay(photo, weights, grid) != dark).any(2))
        for axis, (place, count) in enumerate(((row, high), (column, wide))):
            ends = (1 - rest) * place / count, (1 - rest) * (place + 1) / count
            seen = lit[:, axis].min(), lit[:, axis].max() + 1
            assert np.allclose(np.array(seen) / dark.shape[axis], ends, atol=1 / dark.shape[axis])


def test_filters_are_shown_as_they_lie_in_a_patch():
    model = make("vit")
    with torch.no_grad():
        model.stem.project.weight.mul_(0.01)
        model.stem.project.weight[7].view(3, 4, 4)[:] = 0.0
        model.stem.project.weight[7].view(3, 4, 4)[2, 1, 3] = 5.0
    tiles = filters(model)
    assert tiles[0].name == "7" and len(tiles) == 96
    wanted = np.full((4, 4, 3), 128)
    wanted[1, 3, 2] = 255
    np.testing.assert_array_equal(tiles[0].pixels, wanted)
    assert filters(make("local"))[0].pixels.shape == (7, 7)
    assert filters(make("resnet"))[0].pixels.shape == (3, 3, 3)


def test_a_reconstruction_stands_beside_its_original(tmp_path):
    original = torch.rand(4, 3, 8, 8)
    masked = original.clone()
    masked[:, :, :4] = 0.5
    picture = reconstruction(original, masked, original * 2)
    assert isinstance(picture, Picture)
    assert [tile.name for tile in picture.tiles[:4]] == [
        "original",
        "masked",
        "rebuilt",
        "original",
    ]
    np.testing.assert_array_equal(
        picture.tiles[3].pixels, (255 * original[1]).round().byte().permute(1, 2, 0)
    )
    assert picture.tiles[2].pixels.max() == 255
    Look(picture).save(tmp_path / "a.png")
    wide, high = size_of((tmp_path / "a.png").read_bytes())
    assert high > wide
    (data,) = data_of(Look(picture).html())["pictures"]
    assert len(data["tiles"]) == 12 and data["tiles_per_row"] == 3
    with pytest.raises(ValueError, match="expected three times"):
        reconstruction(original, masked[:2], original)


def test_an_encoder_shows_where_it_looks_and_what_it_paints(photo, monkeypatch):
    _, mae = pretrainer("mae")
    config = replace(preset("vit", "tiny"), labels=0)
    model = family("vit")[1](config).eval()
    encoder = PRETRAIN.bind(model, MediaCodec(IMAGE, ImageFormat(32, 3)), {})
    assert [view.name for view in encoder.picture(photo).views][-1] == "rollout"
    with pytest.raises(UsageError, match="is not known; only its vectors are"):
        encoder.picture(photo, view="rebuilt")
    with pytest.raises(UsageError, match="unknown view 'masked'; choose from .*rebuilt"):
        encoder.picture(photo, view="masked")
    block = replace(config.block, width=48, ffn_width=96)
    around = mae(model, pretrainer("mae")[0](block=block))
    monkeypatch.setattr(encoder.predictor, "whole", lambda: around)
    picture = encoder.picture(photo, view="rebuilt")
    original, masked, rebuilt = (tile.pixels for tile in picture.tiles)
    hidden = (masked == 127).all(-1)
    assert picture.note == "75% masked" and hidden.mean() == 0.75
    # what was seen is as it was, and what was not is painted by the model alone
    np.testing.assert_array_equal(rebuilt[~hidden], original[~hidden])
    np.testing.assert_array_equal(masked[~hidden], original[~hidden])
    assert (rebuilt[hidden] != original[hidden]).any()


def test_the_command_line_looks_at_photos(tmp_path, photo, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    model = make("swin")
    save_weights(folder, state_of(model))
    about = {"labels": LABELS, "image": {"size": 32, "channels": 3}}
    save_config(folder, model, name="swin", task="images", about=about)
    for name in ("a.html", "a.png"):
        assert main(["look", str(folder), photo, "at=30,20", f"out={tmp_path / name}"]) == 0
        assert (tmp_path / name).stat().st_size > 10_000
    assert main(["look", str(folder), photo, "layers=rollout"]) == 0
    assert "photo.png -> " in capsys.readouterr().out
    assert main(["look", str(folder), "--help"]) == 0
    told = capsys.readouterr().out
    assert "at " in told and "view " in told
    assert "iframe" in regard.look(str(folder), Image.open(photo))._repr_html_()


# ---- in a browser -----------------------------------------------------------------------------


def test_clicking_a_patch_shows_where_it_looks(visit, photo):  # noqa: F811
    picture = classifier("deit").picture(photo)
    view = picture.views[-2]
    picture = replace(picture, opens=(view.name, "mean"))
    seen = visit(picture, tab="image")
    assert "even: 0.0" in seen.locator(".legend").inner_text()
    values = ".detail .bars .value"
    shown = [float(value.strip("<")) for value in seen.locator(values).all_inner_texts()]
    wanted = token_weights(view, "class").mean(0)
    np.testing.assert_allclose(shown[:2], wanted[:2], atol=2e-4)
    np.testing.assert_allclose(shown[2:], np.sort(wanted[2:])[::-1][:6], atol=2e-4)
    box = seen.locator(".photo canvas").bounding_box()
    seen.mouse.click(box["x"] + 0.8 * box["width"], box["y"] + 0.2 * box["height"])
    seen.mouse.move(1, 1)
    assert seen.locator(".detail h2").inner_text() == "6, 1 looks at"
    shown = [float(value.strip("<")) for value in seen.locator(values).all_inner_texts()]
    wanted = token_weights(view, (0.8, 0.2)).mean(0)
    np.testing.assert_allclose(shown[2:], np.sort(wanted[2:])[::-1][:6], atol=2e-4)
    seen.locator(".photo").focus()
    seen.keyboard.press("ArrowDown")
    assert seen.locator(".detail h2").inner_text() == "6, 2 looks at"
    seen.locator("#tab-model").click()
    assert seen.locator(".thumb").count() == 4 * 4 + 1


def test_filters_and_reconstructions_open_as_images(visit):  # noqa: F811
    images = torch.rand(2, 1, 8, 8)
    seen = visit(reconstruction(images, images / 2, images), tab="tiles")
    assert seen.locator(".tiles canvas").count() == 6
    assert seen.locator("figcaption").first.inner_text() == "original"
    assert json.loads(seen.locator("#data").inner_text())["pictures"][0]["tiles_per_row"] == 3


def test_a_page_opens_where_there_is_something_to_see(tmp_path):
    clothes = regard.load("fashion")
    trousers = np.zeros((28, 28, 3), np.uint8)
    trousers[2:27, 8:20] = 200
    picture = clothes.picture(trousers)
    name, head = picture.opens
    tops = {
        (view.name, each): float(found.max())
        for view in picture.views
        if view.kind != "rollout"
        for each, found in zip(view.heads, grid_weights(view, picture.query), strict=True)
    }
    even = max(top for (layer, _), top in tops.items() if layer == "pool")
    assert even < 2 / 49 and tops[name, head] > 10 / 49
    layers = [view for view in picture.views if view.kind != "rollout"]
    assert lowest_entropy_head(layers, picture.query) == picture.opens


def test_a_png_shows_its_scale(monkeypatch):
    from regard.viewer import panels

    words: list[str] = []
    monkeypatch.setattr(panels, "spell", lambda text, missing: words.append(text) or text)
    clothes = regard.load("fashion")
    draw(clothes.picture(np.full((28, 28, 3), 90, np.uint8)))
    assert any("under each map" in word for word in words) and "0" in words
    assert any(word.endswith("even 0.02") for word in words)


def test_images_of_a_gallery_are_enlarged_pixel_for_pixel():
    from io import BytesIO

    from regard.viewer.panels import Panel, draw_gallery

    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (2, 3, 20, 30, 3), dtype=np.uint8)
    rows = [[Panel(pixels, "caption") for pixels in row] for row in images]
    drawn = np.asarray(Image.open(BytesIO(draw_gallery("title", rows))).convert("RGB"))
    for i, j in np.ndindex(2, 3):
        y, x = 50 + i * (160 + 22), 15 + j * (240 + 10)
        expected = images[i, j].repeat(8, 0).repeat(8, 1)
        np.testing.assert_array_equal(drawn[y : y + 160, x : x + 240], expected)
    with pytest.raises(UsageError, match="choose a smaller size="):
        draw_gallery("title", [[Panel(np.zeros((8000, 8000, 3), np.uint8), "")]])
