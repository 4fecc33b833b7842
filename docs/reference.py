"""Builds build/docs: the API reference from docstrings, these pages, and an index of both."""

import re
import shutil
import sys
from html import escape
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import markdown2
import pdoc
import pdoc.render

import regard

HOME = Path(__file__).resolve().parents[1]
PAGES = [HOME / "README.md", *sorted((HOME / "docs").glob("*.md"))]
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
    lines = ["# Regard", "", "## API", ""]
    for page in sorted(out.glob("regard*.html")) + sorted(out.glob("regard/**/*.html")):
        link = page.relative_to(out)
        lines.append(f"- [{'.'.join(link.with_suffix('').parts)}]({link.as_posix()})")
    lines += ["", "## Pages", "", *(f"- [{title_of(page)}]({address(page)})" for page in PAGES)]
    body = markdown2.markdown("\n".join(lines), extras=EXTRAS)
    (out / "index.html").write_text(FRAME.format(title="Regard", body=body))


def specifications() -> list[str]:
    """Names by which pdoc finds all public modules.

    It finds those of a package by itself, unless the package has `__all__` and leaves them out.
    """
    found = ["regard"]
    for module in walk_packages(regard.__path__, "regard."):
        parent, _, name = module.name.rpartition(".")
        listed = getattr(import_module(parent), "__all__", None)
        if "._" not in module.name and listed is not None and name not in listed:
            found.append(module.name)
    return found


def resolve(name: str) -> None:
    """Give a module the names that it imports when asked, since pdoc does not ask."""
    module = import_module(name)
    for each in getattr(module, "__all__", ()):
        vars(module).setdefault(each, getattr(module, each))


def build(out: Path, modules: list[str]) -> None:
    """Build everything anew, with a reference of these modules and what is in them."""
    shutil.rmtree(out, ignore_errors=True)
    for name in modules:
        resolve(name)
    pdoc.render.configure(docformat="google", show_source=False, search=False)
    pdoc.pdoc(*modules, output_directory=out)
    build_pages(out)


if __name__ == "__main__":
    build(HOME / "build" / "docs", specifications())
    print("build/docs/index.html", file=sys.stderr)
