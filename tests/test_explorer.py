"""The explorer as Python sees it: its text, its data, its errors, its widget. The browser's side is
tests/pages."""

import json
import re

import pytest

from book.tools import Explorer
from book.tools.explorer import Bar, Picture
from book.tools.refresh import WIDGET, clean_outputs


def show(power, cut):
    """Two tokens: a sharper distribution with every power; `cut` leaves one of them."""
    share = 0.75**power / (0.75**power + 0.25**power)
    bars = [
        Bar("cat", 1.0 if cut else share, 0.75),
        Bar("<dog>", 0.0 if cut else 1 - share, 0.25, cut),
    ]
    return Picture(f"Power {power} </script>.", bars)


KNOBS = {"power": [1, 2, 3], "cut": [False, True]}


@pytest.fixture
def explorer():
    return Explorer("Two tokens", KNOBS, show)


def data_of(explorer):
    text = explorer._repr_html_()
    return json.loads(re.search(r'\("tv-[0-9a-f]{12}",(\{.*\})\)</script>', text)[1])


def test_text_is_the_first_setting(explorer):
    assert repr(explorer).splitlines() == [
        "Two tokens (6 settings)",
        "power=1, cut=False: Power 1 </script>.",
        "    cat    75.0 % ->  75.0 %",
        "    <dog>  25.0 % ->  25.0 %",
    ]


def test_it_starts_where_it_is_told():
    explorer = Explorer("Two tokens", KNOBS, show, start={"power": 2})
    assert "power=2, cut=False: Power 2" in repr(explorer)
    assert "<td>90.0 %</td>" in explorer._repr_html_()
    assert 'max="2" value="1"><output>2</output>' in explorer._repr_html_()


def test_data_holds_every_setting(explorer):
    data = data_of(explorer)
    assert data["knobs"] == [["1", "2", "3"], ["False", "True"]]
    assert data["befores"] == [[750, 250]]
    assert [frame[1:] for frame in data["frames"]] == [
        [[750, 250], 0],
        [[1000, -1], 0],
        [[900, 100], 0],
        [[1000, -1], 0],
        [[964, 36], 0],
        [[1000, -1], 0],
    ]


def test_text_cannot_leave_the_script_or_the_markup(explorer):
    text = explorer._repr_html_()
    assert text.count("</script>") == 1
    assert "<dog>" not in text
    assert "&lt;dog&gt;" in text


def test_without_scripts_the_table_is_there(explorer):
    """The first setting is drawn by Python, and knobs that could not answer are hidden."""
    text = explorer._repr_html_()
    assert '<div class="tv-knobs" hidden>' in text
    assert '<th scope="row">cat</th><td>75.0 %</td><td>75.0 %</td>' in text


def test_id_follows_the_content():
    def uid(title):
        return re.search(r'id="(tv-[0-9a-f]{12})"', Explorer(title, KNOBS, show)._repr_html_())[1]

    assert uid("one") == uid("one") != uid("two")


def test_widget_shows_the_same_pictures(explorer):
    pytest.importorskip("ipywidgets")
    power, cut, view = explorer._widget().children
    assert "Power 1" in view.value
    power.value = 3
    assert "Power 3" in view.value
    assert "96.4 %" in view.value
    cut.value = True
    assert "tv-cut" in view.value


def test_refresh_keeps_page_and_text_and_drops_the_widget(explorer):
    pytest.importorskip("ipywidgets")
    bundle = explorer._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html", WIDGET}
    assert bundle["text/plain"] == repr(explorer)
    output = type("Output", (), {"output_type": "display_data", "data": bundle})
    assert set(clean_outputs([output])[0].data) == {"text/plain", "text/html"}


def test_without_ipywidgets_the_page_remains(explorer, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ipywidgets", None)
    assert set(explorer._repr_mimebundle_()) == {"text/plain", "text/html"}


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="'cut' of explorer 't' has no choice"):
        Explorer("t", {"power": [1], "cut": []}, show)
    with pytest.raises(ValueError, match="start of knob 'power' must be a choice, got 9"):
        Explorer("t", KNOBS, show, start={"power": 9})
    with pytest.raises(ValueError, match="2002 combinations"):
        Explorer("t", {"power": range(1001), "cut": [True, False]}, show)
    with pytest.raises(ValueError, match=r"other labels at \(2,\)"):
        Explorer("t", {"n": [1, 2]}, lambda n: Picture("c", [Bar("x", 1, 1)] * n))
