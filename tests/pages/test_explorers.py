"""Explorers in a real browser, from file://: sliders, keys, what is read aloud, print."""

import pytest

from book.tools import Explorer
from book.tools.explorer import Bar, Picture


def show(power, cut):
    share = 0.75**power / (0.75**power + 0.25**power)
    bars = [Bar("cat", 1 if cut else share, 0.75), Bar("dog", 1 - share, 0.25, cut)]
    return Picture(f"Power {power}, cut {cut}.", bars)


EXPLORER = Explorer("Two tokens", {"power": [1, 2, 3], "cut": [False, True]}, show)


@pytest.fixture
def figure(first_of_two):
    return first_of_two(EXPLORER)


def row(figure, number: int) -> list[str]:
    return (
        figure.locator("tbody tr")
        .nth(number)
        .locator("th, td:not([aria-hidden])")
        .all_inner_texts()
    )


def test_sliders_change_bars_and_sentence(figure):
    assert row(figure, 0) == ["cat", "75.0 %", "75.0 %"]
    figure.get_by_label("power").fill("2")
    assert row(figure, 0) == ["cat", "75.0 %", "96.4 %"]
    assert figure.locator("[aria-live]").inner_text() == "Power 3, cut False."
    figure.get_by_label("cut").fill("1")
    assert row(figure, 1) == ["dog", "25.0 %", "cut"]
    assert figure.locator("tbody tr.tv-cut").count() == 1
    figure.get_by_label("cut").fill("0")
    assert figure.locator("tbody tr.tv-cut").count() == 0


def test_bars_are_as_long_as_the_numbers_say(figure):
    def share():
        bar, cell = (
            figure.locator(f"tbody tr:first-child td:last-child{part}").bounding_box()["width"]
            for part in (" b", "")
        )
        return bar / cell

    assert share() == pytest.approx(0.75, abs=0.02)
    figure.get_by_label("power").fill("2")
    assert share() == pytest.approx(0.964, abs=0.02)


def test_keys_and_what_is_read_aloud(figure):
    slider = figure.get_by_role("slider", name="power")
    slider.focus()
    slider.press("ArrowRight")
    assert slider.get_attribute("aria-valuetext") == "2"
    assert figure.locator("output").first.inner_text() == "2"
    slider.press("End")
    assert figure.locator("[aria-live]").inner_text() == "Power 3, cut False."


def test_two_copies_on_a_page_move_on_their_own(figure, tab):
    figure.get_by_label("power").fill("1")
    assert row(tab.locator("figure").last, 0) == ["cat", "75.0 %", "75.0 %"]
    ids = tab.evaluate("[...document.querySelectorAll('[id]')].map((node) => node.id)")
    assert len(ids) == len(set(ids)) == 2


def test_print_has_the_table_and_no_knobs(figure, tab):
    tab.emulate_media(media="print")
    assert figure.get_by_role("slider").count() == 0
    assert row(figure, 0) == ["cat", "75.0 %", "75.0 %"]


def test_without_scripts_the_first_setting_is_a_table(browser, figure, tab):
    with browser.new_context(java_script_enabled=False) as context:
        bare = context.new_page()
        bare.goto(tab.url)
        first = bare.locator("figure").first
        assert row(first, 0) == ["cat", "75.0 %", "75.0 %"]
        assert not first.get_by_role("slider").count()
