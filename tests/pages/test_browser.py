"""The pages in a real browser, from file:// and offline: nothing is asked of the network, the figures
answer, and axe finds no violation of WCAG 2.2 A and AA, in light and in dark."""

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

# What fades in, such as a fold that was just opened, is looked at when it is there. preload: axe would
# fetch the style sheets again, which file:// does not allow.
CHECK = """(runOnly) => {
  document.getAnimations().forEach((animation) => animation.finish());
  return axe.run(
    {runOnly, resultTypes: ["violations"], preload: false}
  ).then((result) => result.violations);
}"""


def dead_steppers(tab) -> list[str]:
    """Names of the page's steppers that do not go to their end."""
    dead = []
    for figure in tab.locator("figure.tv-stepper").all():
        steps = int(figure.locator(".tv-count").inner_text().split()[-1])
        if steps == 1:
            continue
        figure.get_by_role("button", name="Next", exact=True).click()
        figure.locator(".tv-view").press("ArrowLeft")
        figure.locator(".tv-view").press("End")
        count = figure.locator(".tv-count").inner_text()
        if count != f"{steps} / {steps}" or not figure.locator("svg[aria-label]").count():
            dead.append(figure.get_attribute("aria-label"))
    return dead


def dead_explorers(tab) -> list[str]:
    """Names of the page's explorers with a slider that changes nothing."""
    dead = []
    for figure in tab.locator("figure.tv-explorer").all():
        for slider in figure.get_by_role("slider").all():
            shown = set()
            for key in ("Home", "End"):
                slider.press(key)
                table, sentence = figure.locator("table"), figure.locator("[aria-live]")
                shown.add(table.inner_text() + sentence.inner_text())
            if len(shown) == 1:
                dead.append(figure.get_attribute("aria-label"))
    return dead


def violations(tab) -> list[str]:
    """What axe finds, in light and in dark."""
    tab.evaluate(PREPARE)
    tab.add_script_tag(path=AXE)
    found = []
    for theme, rules in THEMES.items():
        tab.emulate_media(color_scheme=theme)
        tab.wait_for_selector(f"html[data-theme={theme}]")
        found += [
            f"{theme}: {rule['id']}: {node['html'][:160]} {node['failureSummary']}"
            for rule in tab.evaluate(CHECK, rules)
            for node in rule["nodes"]
        ]
    return found


def test_page_works_offline_and_is_accessible(tab, visited):
    """One visit for all, since to load a page is half of the work."""
    if not AXE.is_file():
        missing("axe-core is not installed: npm install --no-save axe-core")
    tab.emulate_media(color_scheme="light")
    tab.goto(visited.as_uri())
    assert dead_steppers(tab) == []
    assert dead_explorers(tab) == []
    assert violations(tab) == []


@pytest.mark.skipif(not PAGES, reason="no pages: run make book")
@pytest.mark.parametrize("kind", ["tv-stepper", "tv-explorer"])
def test_the_book_has_such_figures(kind):
    """So that the test above has something to try."""
    assert any(f'class="{kind}"' in page.read_text(encoding="utf-8") for page in PAGES)


@pytest.mark.skipif(not PAGES, reason="no pages: run make book")
def test_index_leads_to_the_first_page(tab):
    tab.goto(INDEX.as_uri())
    tab.wait_for_url("**/book/intro.html")
