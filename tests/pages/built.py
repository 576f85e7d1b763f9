"""The built pages, and what their tests need from this machine."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE = ROOT / "_build" / "html"
INDEX = SITE / "index.html"  # leads on to the first page
PAGES = sorted(p for p in SITE.rglob("*.html") if "_static" not in p.parts and p != INDEX)
AXE = ROOT / "node_modules" / "axe-core" / "axe.min.js"


def missing(what: str):
    """Skip, and say why; on a build server nothing may be missing."""
    if os.environ.get("CI"):
        pytest.fail(what, pytrace=False)
    pytest.skip(what)


def page_name(page: Path) -> str:
    return page.relative_to(SITE).as_posix()
