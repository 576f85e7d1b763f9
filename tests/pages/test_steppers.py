"""Steppers in a real browser, from file://: buttons, slider, keys, play, and what is read aloud."""

import pytest

from book.tools import Stepper

FRAMES = [
    {
        "caption": "a waits.",
        "rows": [("waiting", [("a", "waiting"), ("b", "waiting")]), ("ran", [])],
    },
    {"caption": "a runs.", "rows": [("waiting", [("b", "waiting")]), ("ran", [("1", "prefill")])]},
    {
        "caption": "a runs on.",
        "rows": [("waiting", [("b", "waiting")]), ("ran", [("1", "prefill"), ("1", "decode")])],
    },
]
STEPPER = Stepper("Two requests", FRAMES)


@pytest.fixture
def figure(first_of_two):
    return first_of_two(STEPPER)


def at(figure) -> tuple[str, str]:
    return figure.locator(".tv-count").inner_text(), figure.locator("[aria-live]").inner_text()


def press(figure, name: str):
    figure.get_by_role("button", name=name, exact=True).click()


def test_buttons(figure):
    assert at(figure) == ("1 / 3", "a waits.")
    press(figure, "Next")
    assert at(figure) == ("2 / 3", "a runs.")
    press(figure, "Next")
    figure.get_by_role("button", name="Next").click(force=True)  # at the end: nothing happens
    assert at(figure) == ("3 / 3", "a runs on.")
    press(figure, "Previous")
    assert at(figure) == ("2 / 3", "a runs.")


def test_keys_on_the_picture_and_on_the_slider(figure):
    for place in (figure.locator(".tv-view"), figure.get_by_role("slider")):
        place.focus()
        for key, count in [("End", "3 / 3"), ("ArrowLeft", "2 / 3"), ("Home", "1 / 3")]:
            place.press(key)
            assert at(figure)[0] == count
        place.press("ArrowRight")
        assert at(figure) == ("2 / 3", "a runs.")


def test_slider(figure):
    figure.get_by_role("slider").fill("2")
    assert at(figure) == ("3 / 3", "a runs on.")
    assert figure.get_by_role("slider").get_attribute("aria-valuetext") == "step 3 of 3"


def test_play_goes_to_the_end_and_pause_stops(figure, tab):
    tab.clock.install()
    press(figure, "Play")
    tab.clock.run_for(2000)
    assert at(figure)[0] == "2 / 3"
    press(figure, "Pause")
    tab.clock.run_for(10_000)
    assert at(figure)[0] == "2 / 3"
    press(figure, "Play")
    tab.clock.run_for(10_000)
    assert at(figure)[0] == "3 / 3"
    assert figure.get_by_role("button", name="Play", exact=True).is_visible()


def test_picture_is_read_aloud(figure):
    press(figure, "Next")
    label = figure.locator("svg").get_attribute("aria-label")
    assert label == "waiting: b waiting. ran: 1 prefill."


def test_changed_cells_are_outlined_and_a_queue_that_moves_up_is_quiet(figure):
    changed = figure.locator(".tv-cells .tv-changed title")
    press(figure, "Next")
    assert changed.all_text_contents() == ["1 prefill"]
    press(figure, "Next")
    assert changed.all_text_contents() == ["1 decode"]


def test_two_copies_on_a_page_move_on_their_own(figure, tab):
    other = tab.locator("figure").last
    press(figure, "Next")
    assert (at(figure)[0], at(other)[0]) == ("2 / 3", "1 / 3")
    ids = tab.evaluate("[...document.querySelectorAll('[id]')].map((node) => node.id)")
    assert len(ids) == len(set(ids))


def test_print_shows_every_step_and_no_buttons(figure, tab):
    tab.emulate_media(media="print")
    assert figure.locator(".tv-print li").all_inner_texts() == [f["caption"] for f in FRAMES]
    assert figure.get_by_role("button", name="Next").count() == 0


def test_without_scripts_the_story_is_a_list(browser, figure, tab):
    with browser.new_context(java_script_enabled=False) as context:
        bare = context.new_page()
        bare.goto(tab.url)
        assert bare.locator("figure").first.locator("li").all_inner_texts() == [
            frame["caption"] for frame in FRAMES
        ]
