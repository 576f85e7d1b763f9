"""The stepper as Python sees it: its text, its data, its errors. The browser's side is tests/pages."""

import json
import re

import pytest

from book.tools import Stepper

FRAMES = [
    {
        "caption": "a takes 4 tokens of the budget.",
        "rows": [
            "Step",
            ("a", [("0", "prefill"), ("1", "prefill"), ("2", "decode", "#")]),
            ("b", []),
        ],
        "note": "budget 4 of 4",
    },
    {"caption": "b </script> runs.", "rows": ["Step", ("a", [None, "x"], "done"), ("b", [])]},
]


def data_of(stepper: Stepper) -> dict:
    return json.loads(
        re.search(r'\("tv-[0-9a-f]{12}",(\{.*\})\)</script>', stepper._repr_html_())[1]
    )


def test_text_tells_the_same_story():
    assert repr(Stepper("Budget", FRAMES)).splitlines() == [
        "Budget (2 steps)",
        " 1. a takes 4 tokens of the budget.",
        "    Step:",
        "    a | prefill[0 1] decode[2(#)]",
        "    b |",
        "    (budget 4 of 4)",
        " 2. b </script> runs.",
        "    Step:",
        "    a | x  (done)",
        "    b |",
    ]


def test_data_holds_each_row_once_and_the_kinds_in_use():
    data = data_of(Stepper("Budget", FRAMES, legend={"prefill": "the prompt"}))
    assert [frame[1] for frame in data["frames"]] == [[0, 1, 2], [0, 3, 2]]
    assert data["rows"][0] == ["Step", None, ""]
    assert data["rows"][3] == ["a", [0, ["x"]], "done"]
    assert {kind: style[0] for kind, style in data["kinds"].items()} == {
        "prefill": "the prompt",
        "decode": "decode",
    }


def test_text_cannot_leave_the_script_or_the_markup():
    html = Stepper('<b> & "quotes"', FRAMES)._repr_html_()
    assert html.count("</script>") == 1
    assert "<b>" not in html
    assert data_of(Stepper("t", FRAMES))["frames"][1][0] == "b </script> runs."


def test_id_follows_the_content():
    def uid(title):
        return re.search(r'id="(tv-[0-9a-f]{12})"', Stepper(title, FRAMES)._repr_html_())[1]

    assert uid("one") == uid("one") != uid("two")


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([], "empty"),
        ([{"rows": []}], "frame 1 needs a caption"),
        ([{"caption": "c", "colour": 1}], r"unknown: \['colour'\]"),
        ([{"caption": "c"}, {"caption": "d", "rows": [("a", [("x", "red")])]}], "'red' in frame 2"),
    ],
)
def test_bad_frames_are_named(frames, message):
    with pytest.raises(ValueError, match=message):
        Stepper("t", frames)


def test_legend_names_known_kinds():
    with pytest.raises(ValueError, match="'red' in legend"):
        Stepper("t", FRAMES, legend={"red": "hot"})
