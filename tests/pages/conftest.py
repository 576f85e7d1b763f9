"""What the page tests share: the built pages, and one browser.

They run after `make book`. Where no Chromium is found the browser's tests are skipped, and say so;
on a build server (CI is set) that is a failure.
"""

import os
import shutil

import pytest

from tests.pages.built import PAGES, VISITED, missing, page_name

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def pytest_generate_tests(metafunc):
    """A test that takes `page` runs for every built page, one that takes `visited` for those that
    the browser visits."""
    for name, pages in (("page", PAGES), ("visited", VISITED)):
        if name in metafunc.fixturenames:
            if not pages:
                pages = [pytest.param(None, marks=pytest.mark.skip("no pages: run make book"))]
            metafunc.parametrize(name, pages, ids=page_name if PAGES else None)


@pytest.fixture(scope="session")
def browser():
    found = os.environ.get("BROWSER_PATH") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if not found:
        missing("no Chromium or Chrome on this machine")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found)
        yield chromium
        chromium.close()


@pytest.fixture
def tab(browser):
    """An empty tab that is offline, and fails its test on a request that leaves file://, or on an
    uncaught error in a page's scripts."""
    complaints = []
    context = browser.new_context(offline=True, reduced_motion="reduce")
    context.set_default_timeout(120_000)  # milliseconds; a busy machine is slow, not wrong
    tab = context.new_page()
    tab.on("pageerror", lambda error: complaints.append(f"script error: {error}"))

    def note(request):
        if not request.url.startswith(("file:", "data:", "blob:")):
            complaints.append(f"request: {request.url}")

    tab.on("request", note)
    tab.on("requestfailed", lambda request: complaints.append(f"not loaded: {request.url}"))
    yield tab
    context.close()
    assert not complaints


@pytest.fixture
def first_of_two(tab, tmp_path):
    """Shows the same figure twice on a page; returns the first."""

    def show(figure):
        page, html = tmp_path / "page.html", figure._repr_html_()
        page.write_text(f"<!doctype html><meta charset=utf-8><body>{html}{html}", encoding="utf-8")
        tab.goto(page.as_uri())
        return tab.locator("figure").first

    return show
