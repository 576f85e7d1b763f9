"""How exercises are found in a notebook, and what an attempt prints."""

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell

from book.tools.exercise import attempt, find_exercises

TASK = ":::{exercise} Fit ★\n:label: ex-03-1\n\nWrite `fits`.\n:::"
STUB = (
    "def fits(): ...\n\n\ndef check_fits(fits):\n    assert fits()\n\n\nattempt(check_fits, fits)"
)
SOLUTION = (
    "<details>\n<summary>Solution</summary>\n\n```python\ndef fits():\n    return helper()\n```\n\n"
    "with\n\n```python\ndef helper():\n    return True\n```\n\nBecause.\n\n</details>"
)


def cells(task=TASK, stub=STUB, solution=SOLUTION):
    return [
        new_markdown_cell("## Exercises"),
        new_markdown_cell(task),
        new_code_cell(stub),
        new_markdown_cell(solution),
    ]


def test_found():
    (exercise,) = find_exercises(cells(), "03_scheduler.ipynb")
    assert (exercise.label, exercise.check, exercise.answer) == ("ex-03-1", "check_fits", "fits")
    namespace = {}
    exec(exercise.solution, namespace)
    assert namespace["fits"]() is True


@pytest.mark.parametrize(
    "words, change",
    [
        ("without a line", {"task": ":::{exercise} Fit\nWrite `fits`.\n:::"}),
        ("must end with attempt", {"stub": "def fits(): ..."}),
        ("must end with attempt", {"stub": "attempt(check_fits, lambda: 1)"}),
        ("holds ```python blocks", {"solution": "```python\nfits = 1\n```"}),
        ("holds ```python blocks", {"solution": SOLUTION.replace("```python", "```")}),
        (
            "not indented",
            {"solution": SOLUTION.replace("with\n\n```python", "with\n\n  ```python")},
        ),
        ("must define fits", {"solution": SOLUTION.replace("def fits", "def fitting")}),
        ("leave check_fits alone", {"solution": SOLUTION.replace("helper():", "check_fits(_):")}),
        ("fenced by colons", {"task": TASK.replace(":::", "```")}),
    ],
)
def test_malformed(words, change):
    with pytest.raises(ValueError, match=r"03_scheduler\.ipynb.*" + words):
        find_exercises(cells(**change), "03_scheduler.ipynb")


def test_malformed_without_stub():
    with pytest.raises(ValueError, match="must be code"):
        find_exercises(cells()[:2], "03_scheduler.ipynb")


def check_three(answer):
    if answer() != 3:
        raise AssertionError("the answer is 3")


@pytest.mark.parametrize(
    "answer, printed",
    [
        (lambda: 3, "passed\n"),
        (lambda: 4, "not yet: the answer is 3\n"),
        (lambda: 1 // 0, "not yet: ZeroDivisionError: integer division or modulo by zero\n"),
    ],
)
def test_attempt(answer, printed, capsys):
    attempt(check_three, answer)
    assert capsys.readouterr().out == printed
