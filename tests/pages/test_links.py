"""Every page, read as text: links resolve, nothing points to the network, pictures are described."""

import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from bs4 import BeautifulSoup

from tests.pages.built import SITE, page_name

LOADS = [
    ("script", "src"),
    ("img", "src"),
    ("link", "href"),
    ("iframe", "src"),
    ("source", "src"),
    ("video", "src"),
    ("object", "data"),
    ("image", "href"),
]
LIMIT = 1_500_000  # bytes of a page with its pictures


@cache
def parse(page: Path) -> BeautifulSoup:
    return BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")


@cache
def anchors(page: Path) -> set[str]:
    soup = parse(page)
    return {tag["id"] for tag in soup.find_all(id=True)} | {
        tag["name"] for tag in soup.find_all("a", attrs={"name": True})
    }


def loaded(page: Path) -> list[str]:
    """Addresses of what the page loads by itself."""
    soup = parse(page)
    found = [tag[key] for name, key in LOADS for tag in soup.find_all(name) if tag.get(key)]
    # `rel` says that these are only named, not loaded.
    named = {tag["href"] for tag in soup.find_all("link", rel=["canonical", "next", "prev"])}
    return [address for address in found if address not in named]


def is_outside(address: str) -> bool:
    return bool(urlsplit(address).scheme or urlsplit(address).netloc)


def target(page: Path, address: str) -> Path:
    path = unquote(urlsplit(address).path)
    return (page.parent / path).resolve() if path else page


def test_links_and_anchors_resolve(page):
    broken = []
    for link in parse(page).find_all("a", href=True):
        address = link["href"]
        if is_outside(address) or address == "#":
            continue
        file, anchor = target(page, address), unquote(urlsplit(address).fragment)
        if not file.is_file() or (
            anchor and file.suffix == ".html" and anchor not in anchors(file)
        ):
            broken.append(address)
    assert not broken


def test_what_a_page_loads_is_there_and_local(page):
    wrong = []
    for address in loaded(page):
        if address.startswith("data:"):
            continue
        if is_outside(address) or not target(page, address).is_file():
            wrong.append(address)
    assert not wrong


def test_pictures_are_described(page):
    soup = parse(page)
    bare = [
        str(img)[:120]
        for img in soup.find_all("img")
        # myst-nb's default is the file's own path, which describes nothing.
        if not img.get("alt", "").strip() or re.search(r"\.(png|svg|jpe?g)$", img["alt"])
    ]
    bare += [
        str(svg)[:120]
        for svg in soup.find_all("svg")
        if not svg.get("aria-label") and svg.get("aria-hidden") != "true"
    ]
    assert not bare


def test_page_is_light(page):
    pictures = {target(page, img["src"]) for img in parse(page).find_all("img", src=True)}
    size = page.stat().st_size + sum(p.stat().st_size for p in pictures if p.is_file())
    assert size < LIMIT, f"{page_name(page)} is {size:,} bytes, pictures included"


def test_style_sheets_load_nothing_from_outside():
    sheets = sorted(SITE.rglob("*.css"))
    if not sheets:
        pytest.skip("no pages: run make book")
    outside = re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)\"']*")
    found = {page_name(s): outside.findall(s.read_text(encoding="utf-8")) for s in sheets}
    assert not {name: addresses for name, addresses in found.items() if addresses}
