"""Every page in a real browser, from file:// and offline: nothing is asked of the network, and axe
finds no violation of WCAG 2.2 A and AA, in light and in dark."""

import pytest

from tests.pages.built import AXE, INDEX, PAGES, missing

RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
THEMES = {"light": RULES, "dark": ["color-contrast"]}  # what else could the theme change?

# Open every fold, so that axe sees inside. Of code's coloured words leave one of a kind (the same
# class on the same ground): a page has thousands, and axe weighs the colour of each.
PREPARE = """() => {
  document.querySelectorAll("details").forEach((fold) => { fold.open = true; });
  const seen = new Set();
  for (const word of document.querySelectorAll(".highlight pre span[class]")) {
    const ground = word.closest(".cell_input, .cell_output, .highlight").className;
    const kind = `${word.className} ${word.parentElement.className} ${ground}`;
    if (seen.has(kind)) word.remove();
    seen.add(kind);
  }
}"""

# preload: axe would fetch the style sheets again, which file:// does not allow.
CHECK = """(runOnly) => axe.run(
  {runOnly, resultTypes: ["violations"], preload: false}
).then((result) => result.violations)"""


def test_page_is_accessible_and_offline(tab, page):
    if not AXE.is_file():
        missing("axe-core is not installed: npm install --no-save axe-core")
    tab.emulate_media(color_scheme="light")
    tab.goto(page.as_uri())
    tab.evaluate(PREPARE)
    tab.add_script_tag(path=AXE)
    for theme, rules in THEMES.items():
        tab.emulate_media(color_scheme=theme)
        tab.wait_for_selector(f"html[data-theme={theme}]")
        found = [
            f"{theme}: {rule['id']}: {node['html'][:160]} {node['failureSummary']}"
            for rule in tab.evaluate(CHECK, rules)
            for node in rule["nodes"]
        ]
        assert found == []


@pytest.mark.skipif(not PAGES, reason="no pages: run make book")
def test_index_leads_to_the_first_page(tab):
    tab.goto(INDEX.as_uri())
    tab.wait_for_url("**/book/intro.html")
