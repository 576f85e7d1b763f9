"""Every page in a real browser, from file:// and offline: nothing is asked of the network, and axe
finds no violation of WCAG 2.2 A and AA, in light and in dark."""

import pytest

from tests.pages.built import AXE, INDEX, PAGES, missing

RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
OPEN_ALL = "document.querySelectorAll('details').forEach((fold) => { fold.open = true; })"


def violations(tab) -> list[str]:
    found = tab.evaluate(
        # preload: axe would fetch the style sheets again, which file:// does not allow.
        "(runOnly) => axe.run(document, {runOnly, resultTypes: ['violations'], preload: false})",
        RULES,
    )
    return [
        f"{rule['id']}: {node['html'][:160]} {node['failureSummary']}"
        for rule in found["violations"]
        for node in rule["nodes"]
    ]


def test_page_is_accessible_and_offline(tab, page):
    if not AXE.is_file():
        missing("axe-core is not installed: npm install --no-save axe-core")
    tab.emulate_media(color_scheme="light")
    tab.goto(page.as_uri())
    tab.evaluate(OPEN_ALL)
    tab.add_script_tag(path=AXE)
    found = {}
    for theme in ("light", "dark"):
        tab.emulate_media(color_scheme=theme)
        tab.wait_for_selector(f"html[data-theme={theme}]")
        found[theme] = violations(tab)
    assert found == {"light": [], "dark": []}


@pytest.mark.skipif(not PAGES, reason="no pages: run make book")
def test_index_leads_to_the_first_page(tab):
    tab.goto(INDEX.as_uri())
    tab.wait_for_url("**/book/intro.html")
