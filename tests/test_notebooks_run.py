"""Run every chapter once: outputs do not change, stubs fail their checks, solutions pass."""

import ast
import asyncio
import copy

import nbformat
import pytest
from nbformat.v4 import new_code_cell

from book.tools.exercise import find_exercises
from book.tools.export import chapter_number, find_notebooks
from book.tools.refresh import difference, execute, normalise


def probe(exercise):
    """A cell that shows the check's verdict on the solution."""
    return new_code_cell(
        "from book.tools.exercise import verdict\n"
        f"exec({exercise.solution!r})\n"
        f"verdict({exercise.check}, {exercise.answer})"
    )


@pytest.mark.parametrize("path", find_notebooks(), ids=lambda path: path.stem)
def test_chapter(path):
    committed = nbformat.read(path, as_version=4)
    exercises = find_exercises(committed.cells, path.name)
    fresh = copy.deepcopy(committed)
    fresh.cells += [probe(exercise) for exercise in exercises]
    asyncio.run(execute(fresh, path))

    probes = fresh.cells[len(committed.cells) :]
    del fresh.cells[len(committed.cells) :]
    normalise(fresh, chapter_number(path))
    assert difference(committed, fresh, path.name) == ""

    shown = {cell.id: cell.outputs for cell in fresh.cells if cell.cell_type == "code"}
    for exercise, cell in zip(exercises, probes, strict=True):
        stub = shown[exercise.cell][-1].text.splitlines()
        assert any(line.startswith("not yet: ") for line in stub), exercise.label
        assert "passed" not in stub, exercise.label
        assert ast.literal_eval(cell.outputs[-1].data["text/plain"]) == "passed", exercise.label
