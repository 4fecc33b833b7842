"""How fast a page of attention is: 2,048 tokens in Chromium, drawn and hovered over.

    python bench/pages.py [--tokens 2048] [--heads 4] [--quick] [--shot page.png]

A page holds random attention weights of one layer, causal, all heads. Drawn: from opening the file
until the tabs are there and a frame was painted. Hovering: from the mouse's move to a token until
the bars of that token stand beside it and a frame was painted; the median and the longest of 20.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from apart import machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PAINTED = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
QUIET = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
QUIET += " --disable-background-networking --disable-component-update"


def main() -> None:
    """Measure, and print the times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shot", help="a file for a screenshot")
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    asked = parser.parse_args()
    from playwright.sync_api import sync_playwright

    from regard.viewer.html import page
    from regard.viewer.picture import Picture, View

    print(machine())
    n, rng = asked.tokens, np.random.default_rng(0)
    weights = np.tril(rng.exponential(size=(asked.heads, n, n)) ** 3)
    weights /= weights.sum(-1, keepdims=True)
    names = [f"▁w{i}" for i in range(n)]
    picture = Picture("a long text", [View("blocks.0.attention", weights, names, names)])
    drawn, hovers = [], []
    with tempfile.TemporaryDirectory() as home, sync_playwright() as play:
        path = Path(home) / "page.html"
        path.write_text(page(picture), encoding="utf-8")
        print(f"{n:,} tokens, {asked.heads} heads: a page of {path.stat().st_size / 1e6:.1f} MB")
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=QUIET.split())
        for _ in range(1 if asked.quick else asked.rounds):
            tab = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
            start = time.perf_counter()
            tab.goto(path.as_uri())
            tab.wait_for_selector(".tabs")
            tab.evaluate(PAINTED)
            drawn.append(time.perf_counter() - start)
            tokens = tab.locator(".rows .token")
            for i in range(20):
                box = tokens.nth(i * 3).bounding_box()
                assert box is not None
                before = tab.locator(".detail h2").inner_text()
                start = time.perf_counter()
                tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
                tab.evaluate(PAINTED)
                hovers.append(time.perf_counter() - start)
                assert tab.locator(".detail h2").inner_text() != before
            if asked.shot:
                tab.screenshot(path=asked.shot)
            tab.close()
        browser.close()
    print(f"drawn in {statistics.median(drawn):.2f} s (longest {max(drawn):.2f} s)")
    print(f"hovering {statistics.median(hovers) * 1e3:.0f} ms (longest {max(hovers) * 1e3:.0f} ms)")


if __name__ == "__main__":
    main()
