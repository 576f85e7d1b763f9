"""The built pages, and what their tests need from this machine."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE = ROOT / "_build" / "html"
INDEX = SITE / "index.html"  # leads on to the first page
PAGES = sorted(p for p in SITE.rglob("*.html") if "_static" not in p.parts and p != INDEX)
# Made of the modules, one page like the other: documentation, and source.
GENERATED = (SITE / "book" / "api", SITE / "_modules" / "tinyvllm")
AXE = ROOT / "node_modules" / "axe-core" / "axe.min.js"


def missing(what: str):
    """Skip, and say why; on a build server nothing may be missing."""
    if os.environ.get("CI"):
        pytest.fail(what, pytrace=False)
    pytest.skip(what)


def pages_to_visit() -> list[Path]:
    """Every page that is like no other, and the longest of each kind of generated pages."""
    kinds = [[p for p in PAGES if p.parent == folder] for folder in GENERATED]
    longest = [max(kind, key=lambda p: p.stat().st_size) for kind in kinds if kind]
    return [p for p in PAGES if p in longest or p.name == "index.html" or p.parent not in GENERATED]


VISITED = pages_to_visit()


def page_name(page: Path) -> str:
    return page.relative_to(SITE).as_posix()
