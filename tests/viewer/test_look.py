"""Pictures of attention: what a page holds, what it may never do, and what one sees in it."""

import base64
import hashlib
import json
import re
import shutil
import struct
import warnings
import zlib
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.errors import UsageError
from regard.viewer.html import MAX_WEIGHTS, as_data, pack, page, write_page
from regard.viewer.notebook import Look, draw, save
from regard.viewer.picture import (
    Node,
    Picture,
    Step,
    Tree,
    View,
    choose_views,
    readable,
    show_token,
)

HOSTILE = [
    "<script>window.hacked=1</script>",
    "</script><script>window.hacked=1</script>",
    "<img src=x onerror=window.hacked=1>",
    "<!--<script>",
    "&lt;b&gt;",
    "\u202edlrow",
    "\u2028",
    "\ud800",
    "$x^$",
    "",
    "\n",
    "\u0301",
    "שלום",
    "{title}",
]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def translation(heads: int = 4, depth: int = 2) -> Picture:
    """A made translation of How are you? whose cross-attention follows the words."""
    rng = np.random.default_rng(0)
    source = ["▁How", "▁are", "▁you", "?", "</s>"]
    rows, writes = ["<s>", "你", "好", "吗", "？"], ["你", "好", "吗", "？", "</s>"]
    views = []
    for layer in range(depth):
        mine = softmax(rng.normal(size=(heads, 5, 5)))
        causal = softmax(np.where(np.tri(5) > 0, rng.normal(size=(heads, 5, 5)), -np.inf))
        cross = softmax(rng.normal(size=(heads, 5, 5)) + 3 * np.eye(5)[[2, 1, 3, 3, 4]])
        views += [
            View(f"encoder.{layer}.attention", mine, source, source),
            View(f"decoder.{layer}.attention", causal, rows, rows, writes=writes),
            View(f"decoder.{layer}.cross", cross, rows, source, "cross", writes),
        ]
    steps = [Step(token, 0.8, [(token, 0.8), ("您", 0.15)]) for token in writes]
    return Picture(
        "English to Chinese", views, steps, "How are you?", "你好吗？", [("你们好吗？", -0.3)]
    )


def hostile() -> Picture:
    """A picture in which every text wants to be run."""
    n = len(HOSTILE)
    weights = np.random.default_rng(0).dirichlet(np.ones(n), size=(2, n))
    evil = HOSTILE[1]
    return Picture(
        evil,
        [View(f"encoder.0.{evil}", weights, HOSTILE, HOSTILE, writes=HOSTILE)],
        [Step(token, 0.5, [(token, 0.5), (evil, float("nan"))]) for token in HOSTILE],
        evil,
        evil,
        [(evil, float("-inf"))],
        evil,
    )


class Reader(HTMLParser):
    """Collects the elements of a page as a browser would see them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.inside: list[str] = []
        self.open = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open = tag in ("script", "style")
        if self.open:
            self.inside.append("")

    def handle_endtag(self, tag):
        self.open = False

    def handle_data(self, data):
        if self.open:
            self.inside[-1] += data


def data_of(text: str) -> dict:
    """Read the data back that a page holds."""
    return json.loads(Reader(text).inside[1])


def unpack(view: dict) -> np.ndarray:
    """Read the weights of a view back, as the page's script does."""
    raw = zlib.decompress(base64.b64decode(view["weights"]))
    shape = len(view["heads"]), len(view["rows"]), len(view["columns"])
    count = shape[0] * shape[1]
    largest = np.frombuffer(raw, "<f4", count).reshape(*shape[:2], 1)
    kind = "<u2" if view["levels"] > 255 else "u1"
    return np.frombuffer(raw, kind, offset=4 * count).reshape(shape) * largest / view["levels"]


# ---- choosing ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (None, 6),
        ("all", 6),
        ("0", ["encoder.0.attention", "decoder.0.attention", "decoder.0.cross"]),
        (1, ["encoder.1.attention", "decoder.1.attention", "decoder.1.cross"]),
        ("decoder.1.cross", ["decoder.1.cross"]),
        ("cross", ["decoder.0.cross", "decoder.1.cross"]),
        ("decoder.0, encoder.1", ["decoder.0.attention", "decoder.0.cross", "encoder.1.attention"]),
        (["decoder.0.cross", 1], 4),
        ("0,1", 6),
    ],
)
def test_layers_are_chosen_by_any_part_of_their_name(layers, names):
    found = [view.name for view in choose_views(translation(), layers).views]
    assert len(found) == names if isinstance(names, int) else found == names


def test_heads_are_chosen_by_number_and_keep_their_names():
    picture = translation()
    chosen = choose_views(picture, "cross", "2,mean,max,0")
    view, whole = chosen.views[0], picture.views[2].weights
    assert view.heads == (2, "mean", "max", 0)
    np.testing.assert_array_equal(view.weights[0], whole[2])
    np.testing.assert_allclose(view.weights[1], whole.mean(0), rtol=1e-6)
    np.testing.assert_array_equal(view.weights[2], whole.max(0))
    assert choose_views(chosen, heads=2).views[0].heads == (2,)
    assert choose_views(picture, heads="all").views[0].heads == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("layers", "heads", "said"),
    [
        (
            "7",
            None,
            "layers=7: no such layer; choose from 0, 1, encoder, attention, decoder, cross",
        ),
        ("decoder.9.cross", None, "decoder.1.cross, or all. Did you mean 'decoder.1.cross'?"),
        ("-1", None, "layers=-1: no such layer"),
        ("crss", None, "Did you mean 'cross'?"),
        (None, "4", "heads=4: encoder.0.attention has no such head; choose from 0 to 3, mean, max"),
        (None, "first", "heads=first"),
        (None, -1, "heads=-1"),
        (None, 1.5, "heads=1.5"),
        (None, True, "heads=True"),
    ],
)
def test_a_wrong_choice_says_what_there_is(layers, heads, said):
    with pytest.raises(UsageError) as caught:
        choose_views(translation(), layers, heads)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_view_refuses_weights_that_do_not_fit_its_tokens():
    with pytest.raises(ValueError, match="2 row tokens and 3 column tokens"):
        View("a", np.ones((1, 3, 2)), ["x"] * 2, ["y"] * 3)
    with pytest.raises(ValueError, match="none of them empty"):
        View("a", np.ones((1, 0, 0)), [], [])
    for bad in (np.nan, np.inf, -0.1):
        with pytest.raises(UsageError, match="finite and not negative"):
            View("a", np.full((1, 1, 1), bad), ["x"], ["y"])


# ---- what a page holds ------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([255, 65535]), st.floats(0.01, 30))
def test_a_packed_weight_is_within_half_a_level(seed, levels, sharp):
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(1, 9, 3))
    weights = softmax(sharp * rng.normal(size=shape)).astype(np.float32)
    weights[rng.random(shape[:2]) < 0.1] = 0  # a row that may look nowhere
    view = {
        "weights": pack(weights, levels),
        "levels": levels,
        "heads": range(shape[0]),
        "rows": range(shape[1]),
        "columns": range(shape[2]),
    }
    allowed = weights.max(-1, keepdims=True) / levels / 2 * (1 + 1e-3) + 1e-9
    assert (np.abs(unpack(view) - weights) <= allowed).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(), max_size=6), min_size=1, max_size=5))
def test_any_token_can_be_shown_and_never_leaves_its_place(tokens):
    n = len(tokens)
    picture = Picture("".join(tokens), [View("a", np.ones((1, n, n)), tokens, tokens)])
    text = page(picture)
    text.encode()  # not even a lone surrogate stays
    assert data_of(text)["pictures"][0]["views"][0]["rows"] == [show_token(t) for t in tokens]
    assert all(show_token(token).strip() for token in tokens)


def test_unseen_letters_are_made_visible():
    assert show_token("") == "∅" and show_token("  ") == "␣␣"
    assert show_token("a\nb\t") == "a↵b⇥"
    assert show_token("\x00") == "␀" and show_token("\u0301") == "◌\u0301"
    assert show_token("\u202eabc") == "⟨U+202E⟩abc"
    assert readable("a\nb", keep=" \n") == "a\nb"
    assert len(show_token("x" * 1_000_000)) < 200


def test_a_page_needs_nothing_from_outside():
    text = page([translation(), translation()])
    assert not re.search(r"https?:|//[a-z]+\.|\bsrc\s*=|\bhref\s*=|url\(|@import|\bfetch\(", text)
    assert not any({"src", "href"} & set(attributes) for _, attributes in Reader(text).tags)


def test_only_the_pages_own_script_may_run():
    text = page(hostile())
    reader = Reader(text)
    scripts = [attributes for tag, attributes in reader.tags if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "data"}, {}]
    assert {tag for tag, _ in reader.tags} <= set(
        ["html", "head", "meta", "title", "style", "body", "main", "noscript", "script"]
    )
    style, data, script = reader.inside
    assert not re.search("[<>&\u2028\u2029]", data)
    policy = next(a["content"] for t, a in reader.tags if t == "meta" and "http-equiv" in a)
    for code in (style, script):
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "innerHTML" not in script and "eval(" not in script


def test_a_long_text_takes_few_bytes_and_too_long_a_one_is_refused():
    n = 300
    weights = softmax(8 * np.random.default_rng(0).normal(size=(4, n, n)))
    text = page(Picture("long", [View("a", weights, ["word"] * n, ["word"] * n)]))
    assert data_of(text)["pictures"][0]["views"][0]["levels"] == 65535
    weights = softmax(8 * np.random.default_rng(0).normal(size=(20, n, n)))
    text = page(Picture("long", [View("a", weights, ["word"] * n, ["word"] * n)]))
    assert data_of(text)["pictures"][0]["views"][0]["levels"] == 255
    assert len(text) < weights.size
    huge = View("a", np.ones((1, 1, 1)), ["x"], ["y"])
    object.__setattr__(huge, "weights", np.broadcast_to(np.float32(0), (1, 1, MAX_WEIGHTS + 1)))
    with pytest.raises(UsageError, match="choose some with layers= and heads="):
        page(Picture("huge", [huge]))


def test_a_notebook_shows_the_whole_page_in_a_sandbox():
    look = Look(hostile())
    (frame,) = Reader(look._repr_html_()).tags
    assert frame[0] == "iframe" and frame[1]["srcdoc"] == look.html()
    assert frame[1]["sandbox"] == "allow-scripts"
    assert "1 pictures" in repr(look)


# ---- PNG --------------------------------------------------------------------------------------


def size_of(png: bytes) -> tuple[int, int]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])


@pytest.mark.parametrize(
    "choice",
    [
        {"layers": "decoder.1.cross", "heads": 2},
        {"layers": "cross", "heads": "0,1"},
        {"layers": 1},
        {},
    ],
)
def test_heat_maps_are_drawn_without_a_warning(tmp_path, choice):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(translation(), tmp_path / "a.png", **choice)
    png = (tmp_path / "a.png").read_bytes()
    assert min(size_of(png)) > 300
    assert draw(translation(), **choice) == png


def test_hostile_tokens_can_be_drawn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert min(size_of(draw(hostile(), heads="mean"))) > 300


def test_letters_without_a_font_are_spelled_out(monkeypatch):
    from regard.viewer import fonts

    only = [entry for entry in fonts.fontManager.ttflist if entry.name == fonts.PLAIN_FONT]
    monkeypatch.setattr(fonts.fontManager, "ttflist", only)
    monkeypatch.setattr(fonts, "findSystemFonts", list)
    fonts.fonts_for.cache_clear()
    fonts.add_new_fonts.cache_clear()
    chosen, missing = fonts.fonts_for("How 你好")
    assert chosen == [fonts.PLAIN_FONT] and missing == {"你", "好"}
    assert fonts.spell("你好 you", missing) == "[U+4F60 U+597D] you"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert min(size_of(draw(translation(), layers="decoder.1.cross", heads=0))) > 200
    fonts.fonts_for.cache_clear()


def test_a_text_is_as_wide_as_it_is_drawn_and_cut_where_it_would_be_wider():
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    from regard.viewer.fonts import PLAIN_FONT, cut, text_width

    for text in ["non-local means 27.14 dB", "0123456789", "WWW", "illi."]:
        path = TextPath((0, 0), text, size=100, prop=FontProperties(family=PLAIN_FONT))
        assert text_width(text) == pytest.approx(path.get_extents().width / 100, abs=0.25)
    assert text_width("你好") == 2.0 and text_width("") == 0.0
    assert cut("How are you?", 20) == "How are you?"
    assert cut("How are you?", 4).endswith("…") and text_width(cut("How are you?", 4)) <= 4


def test_layers_of_a_kind_and_heads_of_a_layer_share_a_row():
    from regard.viewer.heatmaps import arrange

    picture = translation()
    heads = [[view.name for view, _ in row] for row in arrange(picture.views)]
    assert heads == [[view.name] * 4 for view in picture.views]
    kinds = arrange(choose_views(picture, heads="mean").views)
    assert [[view.name for view, _ in row] for row in kinds] == [
        ["encoder.0.attention", "encoder.1.attention"],
        ["decoder.0.attention", "decoder.1.attention"],
        ["decoder.0.cross", "decoder.1.cross"],
    ]


def test_too_many_heat_maps_are_refused():
    view = View("a", np.ones((300, 1, 1)), ["x"], ["y"])
    with pytest.raises(UsageError, match="300 maps are too many"):
        draw(Picture("many", [view]), heads="all")
    with pytest.raises(UsageError, match="no attention to draw"):
        draw(Picture("none"))


# ---- saving -----------------------------------------------------------------------------------


def test_the_suffix_says_how_to_save(tmp_path):
    picture = translation()
    save(picture, tmp_path / "a.html", "cross", "0")
    views = data_of((tmp_path / "a.html").read_text("utf-8"))["pictures"][0]["views"]
    assert [(view["name"], view["heads"]) for view in views] == [
        ("decoder.0.cross", ["0"]),
        ("decoder.1.cross", ["0"]),
    ]
    Look(picture).save(tmp_path / "B.PNG", "decoder.1.cross", "0")
    assert min(size_of((tmp_path / "B.PNG").read_bytes())) > 200
    assert sorted(path.name for path in tmp_path.iterdir()) == ["B.PNG", "a.html"]


@pytest.mark.parametrize("name", ["a.jpg", "a", "a.html.gz", "folder.html", "folder.png"])
def test_what_cannot_be_saved_is_refused_in_one_line(tmp_path, name):
    for folder in ("folder.html", "folder.png"):
        (tmp_path / folder).mkdir()
    with pytest.raises(UsageError) as caught:
        save(translation(), tmp_path / name, "decoder.1.cross", "0")
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="a .png holds one picture"):
        save([translation(), translation()], tmp_path / "two.png")


# ---- in a browser -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    program = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None
    )
    if program is None:
        pytest.skip("no chromium is installed")
    driver = pytest.importorskip("playwright.sync_api")
    quiet = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
    quiet += " --disable-background-networking --disable-component-update"
    with driver.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=program, args=quiet.split())
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser, tmp_path):
    """Open pictures in the browser, and fail on any error, refused code or outside request."""
    contexts, wrong = [], []

    def opened(pictures, tab="head", width=1280, theme="light", text=None):
        path = tmp_path / "page.html"
        path.write_text(page(pictures) if text is None else text, encoding="utf-8")
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=theme, reduced_motion="reduce"
        )
        contexts.append(context)
        tabs = context.new_page()
        tabs.on("console", lambda message: wrong.append(message.text))
        tabs.on("pageerror", lambda error: wrong.append(str(error)))
        tabs.on("dialog", lambda dialog: wrong.append(dialog.message))
        tabs.on(
            "request",
            lambda request: None if request.url.startswith("file:") else wrong.append(request.url),
        )
        tabs.goto(f"{path.as_uri()}#tab={tab}")
        if text is None:
            tabs.wait_for_selector(".tabs")
        return tabs

    yield opened
    for context in contexts:
        context.close()
    assert not wrong


def background(element) -> str:
    return element.evaluate("e => e.style.backgroundColor")


def test_hovering_a_token_shows_where_it_looks(visit):
    picture = translation()
    seen = visit(picture)
    weights = picture.views[5].weights.mean(0)  # the last cross-attention opens first
    columns = seen.locator(".columns .token")
    assert not any(background(columns.nth(j)) for j in range(5))
    seen.locator(".rows .token").nth(1).hover()
    values = seen.locator(".detail .bars .value").all_inner_texts()
    assert values == [f"{w:.4f}" for w in sorted(weights[1])[::-1]]
    assert seen.locator(".detail .name").first.inner_text() == "▁are"
    assert "At “你”, writing “好”" in seen.locator(".detail h2").inner_text()
    assert columns.nth(1).get_attribute("data-value") == f"{weights[1, 1]:.2f}"
    assert background(columns.nth(1))
    columns.nth(2).hover()
    values = seen.locator(".detail .bars .value").all_inner_texts()
    assert values == [f"{w:.4f}" for w in sorted(weights[:, 2])[::-1]]
    seen.mouse.move(1, 1)
    assert "on average" in seen.locator(".detail h2").inner_text()


def test_heads_and_layers_can_be_chosen(visit):
    picture = translation()
    seen = visit(picture)
    for head in (0, 3):
        seen.check(f"#heads-{head}", force=True)
        seen.locator(".rows .token").nth(2).hover()
        top = picture.views[5].weights[head, 2].max()
        assert seen.locator(".detail .value").first.inner_text() == f"{top:.4f}"
    seen.check("#heads-max", force=True)
    seen.select_option("#layer", label="encoder.1.attention")
    seen.locator(".rows .token").nth(0).hover()
    top = picture.views[3].weights.max(0)[0].max()
    assert seen.locator(".detail .value").first.inner_text() == f"{top:.4f}"
    seen.check("#style-text", force=True)
    assert seen.locator(".flow").count() == 2


def test_a_click_pins_and_the_keyboard_reaches_all(visit):
    seen = visit(translation())
    token = seen.locator(".rows .token").nth(2)
    token.click()
    seen.mouse.move(1, 1)
    seen.evaluate("document.activeElement.blur()")
    assert token.get_attribute("aria-pressed") == "true"
    assert "At “好”" in seen.locator(".detail h2").inner_text()
    seen.keyboard.press("Escape")
    assert "on average" in seen.locator(".detail h2").inner_text()
    seen.focus("#tab-head")
    for key in ["ArrowRight", "ArrowRight", "Enter"]:
        seen.keyboard.press(key)
    assert seen.locator("#tab-model").get_attribute("aria-selected") == "true"
    seen.focus("#tab-head")
    seen.keyboard.press("Enter")
    seen.locator(".rows .token").first.focus()
    seen.keyboard.press("ArrowDown")
    assert "At “你”" in seen.locator(".detail h2").inner_text()
    assert "→" in seen.locator("[aria-live]").inner_text()
    seen.keyboard.press("Enter")
    assert seen.locator(".rows .token").nth(1).get_attribute("aria-pressed") == "true"


def test_the_matrix_tells_the_weight_under_the_pointer(visit):
    picture = translation()
    seen = visit(picture, "matrix")
    weights = picture.views[5].weights.mean(0)
    area = seen.locator(".cells canvas").bounding_box()
    side = (area["width"] - 1) / 5
    seen.mouse.move(area["x"] + 3.5 * side, area["y"] + 2.5 * side)
    assert seen.locator(".tip strong").inner_text() == f"{weights[2, 3]:.4f}"
    seen.mouse.move(1, 1)
    assert not seen.locator(".tip").is_visible()
    seen.focus(".matrix")
    for key in ["ArrowDown", "ArrowDown", "ArrowRight"]:
        seen.keyboard.press(key)
    assert f"{weights[1, 1]:.4f}" in seen.locator("[aria-live]").inner_text()


def test_the_model_view_opens_what_one_clicks(visit):
    seen = visit(translation(), "model")
    assert seen.locator(".thumb").count() == 6 * 5
    drawn = "canvas => canvas.getContext('2d').getImageData(0, 0, 1, 1).data[3]"
    assert seen.locator(".thumb canvas").last.evaluate(drawn) == 255
    seen.get_by_label("decoder.0.attention, head 3").click()
    assert seen.locator("#layer").evaluate("e => e.selectedOptions[0].text") == (
        "decoder.0.attention"
    )
    assert seen.locator("#heads-3").is_checked()


def test_the_steps_show_candidates_and_where_the_source_was_read(visit):
    seen = visit(translation(), "steps")
    cards = seen.locator(".card")
    assert cards.count() == 5
    assert cards.first.locator(".value").all_inner_texts() == ["80%", "15%"]
    assert cards.first.locator(".name.chosen").inner_text() == "你"
    width = cards.first.locator(".track i").first.evaluate("e => e.style.width")
    assert width == "80%"
    cards.nth(1).hover()
    source = seen.locator(".strip .flow").nth(1).locator(".token")
    assert background(source.nth(1)) and source.nth(1).inner_text() == "are"
    assert seen.locator(".later").count() == 3


def test_a_hostile_token_is_shown_and_never_run(visit):
    seen = visit(hostile())
    seen.locator(".rows .token").first.hover()
    assert HOSTILE[0] in seen.locator(".rows").last.inner_text()
    for tab in ("matrix", "model", "steps"):
        seen.click(f"#tab-{tab}")
        assert seen.locator("h1").inner_text() == HOSTILE[1]
    seen.locator(".card").first.hover()
    assert seen.evaluate("window.hacked") is None
    assert seen.title() == HOSTILE[1]
    assert seen.locator("img").count() == 0 and seen.locator("script").count() == 2


def test_code_that_is_not_ours_is_refused(browser, tmp_path):
    # Even were a token to become an element, the policy would not let it run.
    evil = page(translation()).replace("<main", "<script>window.hacked=1</script><main", 1)
    (tmp_path / "evil.html").write_text(evil, encoding="utf-8")
    seen = browser.new_page()
    seen.goto((tmp_path / "evil.html").as_uri())
    seen.wait_for_selector(".tabs")
    assert seen.evaluate("window.hacked") is None
    seen.close()


def test_it_works_inside_a_notebook(visit):
    seen = visit(None, text=f"<!doctype html><p>cell</p>{Look(hostile())._repr_html_()}")
    frame = seen.frame_locator("iframe")
    frame.locator(".rows .token").first.hover()
    assert frame.locator(".detail .value").count() == 8
    assert seen.evaluate("window.hacked") is None


@pytest.mark.parametrize(("width", "theme"), [(360, "dark"), (1800, "light")])
def test_nothing_runs_over_the_edge(visit, width, theme):
    seen = visit([translation(), hostile()], "head", width, theme)
    for number, title in enumerate(["English", "hacked"]):
        seen.select_option("#picture", str(number))
        seen.get_by_role("heading", level=1, name=title).wait_for()
        for tab in ("head", "matrix", "model", "steps"):
            seen.click(f"#tab-{tab}")
            assert seen.evaluate("document.documentElement.scrollWidth") <= width


def test_five_hundred_tokens_can_be_explored(visit):
    rng = np.random.default_rng(0)
    weights = softmax(4 * rng.normal(size=(8, 500, 500)))
    words = [f"▁{word}" for word in rng.choice(["the", "cat", "sat", "on"], 500)]
    picture = Picture("long", [View("encoder.0.attention", weights, words, words)], opens=("", 3))
    seen = visit(picture)
    assert seen.locator(".rows .token").count() == 500
    seen.check("#heads-3", force=True)
    seen.locator(".rows .token").nth(7).hover()
    shown = seen.locator(".detail .value").first.inner_text()
    digits = len(shown.split(".")[1])
    assert digits >= 2  # eight bits support no more, and no more are claimed
    assert abs(float(shown) - weights[3, 7].max()) <= 10.0**-digits
    seen.click("#tab-matrix")
    seen.check("#zoom-4", force=True)
    area = seen.locator(".cells canvas").bounding_box()
    assert area["width"] >= 4 * 500


def test_one_head_or_chosen_heads_offer_no_false_mean(visit):
    seen = visit(choose_views(translation(), "cross", "mean,1"))
    assert seen.locator("#heads-mean").count() == 0
    assert seen.locator(".choices").first.inner_text().split() == ["mean", "1"]
    seen = visit(choose_views(translation(), "cross", "2"))
    assert seen.locator("[name=heads]").count() == 0
    seen = visit(Picture("only words", steps=[Step("你", 1.0)]), "steps")
    assert seen.locator("[role=tab]").all_inner_texts() == ["Steps"]


def test_a_slider_turns_the_steps_of_a_training_and_keeps_what_is_open(visit):
    frames = [as_data(replace(translation(), title=f"frame {n}"), 255) for n in range(3)]
    tab = visit(None, text=write_page("Training", {"pictures": frames, "steps": [0, 100, 1200]}))
    tab.wait_for_selector("#moment")
    tab.select_option("#layer", label="decoder.0.cross")
    chosen = tab.input_value("#layer")
    assert tab.text_content(".player span") == "step 0" and tab.query_selector("#picture") is None
    tab.fill("#moment", "2")
    tab.locator("h1", has_text="frame 2").wait_for()
    assert tab.text_content(".player span") == "step 1,200"
    assert tab.input_value("#layer") == chosen
    tab.fill("#moment", "0")
    tab.locator("h1", has_text="frame 0").wait_for()
    tab.click("#play")
    tab.locator("#play", has_text="Play").wait_for()
    assert tab.text_content(".player span") == "step 1,200"  # it has played to the end


def test_the_tree_of_a_beam_search_says_what_became_of_each_token(visit):
    nodes = [
        Node(-1, "▁a", -0.5, -0.5, "open", True),
        Node(-1, HOSTILE[0], -2.0, -2.0, "beam"),
        Node(0, "</s>", -0.7, -0.35, "finished", True),
    ]
    tree = Tree(nodes, {"open": "went on", "beam": "was dropped", "finished": "ended"}, "it did")
    tab = visit(replace(translation(), tree=tree), tab="tree")
    assert "The search ended as it did." in tab.text_content("#panel")
    shown = tab.query_selector_all(".node")
    assert len(shown) == 3 and shown[2].text_content() == "</s>-0.35"
    shown[1].hover()
    assert tab.text_content("#panel p").endswith("score -2.00; was dropped")
    assert tab.evaluate("window.hacked") is None
