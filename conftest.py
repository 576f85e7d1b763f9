"""Settings of `pytest --nbval`: what the book's notebooks must keep to, beyond nbval's defaults.

A warning is no part of what a cell shows, a cell must have been executed, and when a chapter has
run to its end, the solution of each of its exercises must pass the check.

Nothing here acts in a run without `--nbval`.
"""

import os
from collections import defaultdict

import pytest


def pytest_configure(config):
    """Give the kernels, which start later, the environment `refresh` gives them."""
    if uses_nbval(config):
        from book.tools.refresh import kernel_environment

        os.environ.update(kernel_environment())


def pytest_collection_modifyitems(config, items):
    if not uses_nbval(config):
        return
    from book.tools.refresh import has_cuda

    chapters: dict[pytest.File, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "cell"):
            chapters.setdefault(item.parent, []).append(item)
    for notebook, cells in chapters.items():
        notebook.skip_compare = (*notebook.skip_compare, "stderr")
        for item in cells:
            if "gpu" in item.cell.metadata.get("tags", []) and not has_cuda():
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))
        after_last = items.index(cells[-1]) + 1
        items[after_last:after_last] = solutions(notebook, len(cells))


def solutions(notebook, num_cells):
    """A cell for each exercise of a notebook that shows the check's verdict on the solution."""
    from nbformat.v4 import new_code_cell, new_output
    from nbval.plugin import IPyNbCell

    from book.tools.exercise import find_exercises

    passed = new_output("execute_result", {"text/plain": "'passed'"}, execution_count=1)
    for number, exercise in enumerate(find_exercises(notebook.nb.cells, notebook.name), num_cells):
        cell = new_code_cell(
            "from book.tools.exercise import verdict\n"
            f"exec({exercise.solution!r})\n"
            f"verdict({exercise.check}, {exercise.answer})",
            outputs=[passed],
            execution_count=1,
            id=exercise.label,
        )
        yield IPyNbCell.from_parent(
            notebook,
            name=f"solution of {exercise.label}",
            cell_num=number,
            cell=cell,
            options=defaultdict(bool, check=True),
        )


def pytest_runtest_call(item):
    """A cell whose output was never recorded proves nothing; by itself nbval passes it."""
    cell = getattr(item, "cell", None)
    if cell is not None and cell.execution_count is None:
        from nbval.plugin import NbCellError

        raise NbCellError(item.cell_num, f"{cell.id} was never executed: refresh", cell.source)


def uses_nbval(config) -> bool:
    return config.getoption("--nbval", default=False)
