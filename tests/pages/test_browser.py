"""Every page in a real browser, from file:// and offline: nothing is asked of the network, and axe
finds no violation of WCAG 2.2 A and AA, in light and in dark."""

import pytest

from tests.pages.built import AXE, missing

RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
OPEN_ALL = "document.querySelectorAll('details').forEach((fold) => { fold.open = true; })"


def violations(tab) -> list[str]:
    found = tab.evaluate(
        "(tags) => axe.run(document, {runOnly: tags, resultTypes: ['violations']})", RULES
    )
    return [
        f"{rule['id']}: {node['html'][:160]} {node['failureSummary']}"
        for rule in found["violations"]
        for node in rule["nodes"]
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_page_is_accessible_and_offline(tab, page, theme):
    if not AXE.is_file():
        missing("axe-core is not installed: npm install --no-save axe-core")
    tab.emulate_media(color_scheme=theme)
    tab.goto(page.as_uri())
    tab.evaluate(OPEN_ALL)
    tab.add_script_tag(path=AXE)
    shown = tab.evaluate("document.documentElement.dataset.theme")
    assert shown == theme, f"the page shows itself in {shown}"
    assert violations(tab) == []
