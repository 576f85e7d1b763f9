"""Settings of `pytest --nbval`: what the book's notebooks must keep to, beyond nbval's defaults.

Nothing here acts in a run without `--nbval`.
"""

import os

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

    cells = [item for item in items if hasattr(item, "cell")]
    for notebook in {item.parent for item in cells}:
        # A warning is no part of what a cell shows; refresh does not save it.
        notebook.skip_compare = (*notebook.skip_compare, "stderr")
    for item in cells:
        tags = item.cell.metadata.get("tags", [])
        if "gpu" in tags and not has_cuda():
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


def pytest_runtest_call(item):
    """A cell whose output was never recorded proves nothing; by itself nbval passes it."""
    cell = getattr(item, "cell", None)
    if cell is not None and cell.execution_count is None:
        from nbval.plugin import NbCellError

        raise NbCellError(item.cell_num, f"{cell.id} was never executed: refresh", cell.source)


def uses_nbval(config) -> bool:
    return config.getoption("--nbval", default=False)
