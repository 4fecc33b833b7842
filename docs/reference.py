"""Builds build/docs: the API reference from docstrings, these pages, and an index of both."""

import re
import shutil
import sys
from html import escape
from pathlib import Path
from pkgutil import iter_modules

import markdown2
import pdoc
import pdoc.render

import regard

HOME = Path(__file__).resolve().parents[1]
PAGES = [HOME / "README.md", *sorted((HOME / "docs").glob("*.md"))]
PARTS = [name for _, name, is_package in iter_modules(regard.__path__) if is_package]
FRAME = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>body {{ max-width: 50rem; margin: 2rem auto; padding: 0 1rem; font: 1rem/1.5 sans-serif }}
pre {{ overflow-x: auto; background: #f5f5f5; padding: .5rem }} img {{ max-width: 100% }}
table {{ border-collapse: collapse }} td, th {{ border: 1px solid #ccc; padding: .3rem }}</style>
{body}"""
EXTRAS = ["tables", "fenced-code-blocks", "header-ids", "cuddled-lists"]


def title_of(page: Path) -> str:
    """First heading of a page."""
    return page.read_text().splitlines()[0].lstrip("# ")


def address(page: Path) -> str:
    """Where a page lies in the output."""
    return page.relative_to(HOME).with_suffix(".html").as_posix()


def build_pages(out: Path) -> None:
    """Write all pages as HTML, with their pictures, and the index."""
    shutil.copytree(HOME / "docs", out / "docs", ignore=shutil.ignore_patterns("*.md", "*.py"))
    for page in PAGES:
        text = re.sub(r"(\]\((?!https?:)[^)#]+)\.md\b", r"\1.html", page.read_text())
        body = markdown2.markdown(text, extras=EXTRAS)
        (out / address(page)).write_text(FRAME.format(title=escape(title_of(page)), body=body))
    lines = ["# Regard", "", "## API", "", "- [regard](regard.html)"]
    lines += [f"- [regard.{part}](regard/{part}.html)" for part in PARTS]
    lines += ["", "## Pages", "", *(f"- [{title_of(page)}]({address(page)})" for page in PAGES)]
    body = markdown2.markdown("\n".join(lines), extras=EXTRAS)
    (out / "index.html").write_text(FRAME.format(title="Regard", body=body))


def build(out: Path, modules: list[str]) -> None:
    """Build everything anew, with a reference of these modules and what is in them."""
    shutil.rmtree(out, ignore_errors=True)
    pdoc.render.configure(docformat="google", show_source=False, search=False)
    pdoc.pdoc(*modules, output_directory=out)
    build_pages(out)


if __name__ == "__main__":
    build(HOME / "build" / "docs", ["regard", *(f"regard.{part}" for part in PARTS)])
    print("build/docs/index.html", file=sys.stderr)
