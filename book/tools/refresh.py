"""Run notebooks and save their outputs so that a second run changes no byte.

`python -m book.tools refresh [--check] [NOTEBOOK ...]`

What may vary is removed before saving: timings, standard error, widget ids, tracebacks, PNG
comments, editor metadata. Cells tagged `gpu` run only where CUDA is, cells tagged `nbval-skip`
never: both keep the outputs that are recorded.
"""

import argparse
import asyncio
import base64
import copy
import ctypes
import difflib
import functools
import os
import struct
import sys
from pathlib import Path

import ipykernel.kernelspec
import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

from book.tools.export import ROOT, ExportError, chapter_number, find_notebooks, read_notebook

CELL_TIMEOUT = 120  # seconds
PARALLEL = 2  # notebooks that run at once
WIDGET = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class RefreshError(RuntimeError):
    """A cell failed; the message names the notebook, the cell and the error."""


class ThisInterpreter(AsyncKernelManager):
    """Kernels run the Python that runs this tool, whatever kernels are installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(**ipykernel.kernelspec.get_kernel_dict())


@functools.cache
def has_cuda() -> bool:
    try:  # torch takes seconds to import, and without a driver the answer is known
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        import torch
    except (OSError, ImportError):
        return False
    return torch.cuda.is_available()


def kernel_environment() -> dict[str, str]:
    """The environment notebooks run in: Triton interprets its kernels where there is no GPU."""
    environment = dict(os.environ, SOURCE_DATE_EPOCH="0")  # matplotlib dates its SVGs with it
    if not has_cuda():
        environment["TRITON_INTERPRET"] = "1"
    return environment


def is_run(cell) -> bool:
    """Whether this machine runs the cell."""
    tags = cell.metadata.get("tags", [])
    return (
        cell.cell_type == "code" and "nbval-skip" not in tags and (has_cuda() or "gpu" not in tags)
    )


async def execute(notebook, where: Path) -> None:
    """Run the cells of a notebook in place, in `where`'s folder; RefreshError if one fails."""
    for cell in notebook.cells:
        if is_run(cell):
            cell.outputs, cell.execution_count = [], None
    todo = nbformat.from_dict({**notebook, "cells": []})
    todo.cells = [cell for cell in notebook.cells if is_run(cell)]
    client = NotebookClient(
        todo,
        kernel_manager_class=ThisInterpreter,
        extra_arguments=["--log-level=ERROR"],
        timeout=CELL_TIMEOUT,
        record_timing=False,
        store_widget_state=False,
        resources={"metadata": {"path": str(where.parent)}},
    )
    try:
        await client.async_execute(env=kernel_environment())
    except (CellExecutionError, DeadKernelError, TimeoutError) as error:
        started = [cell for cell in todo.cells if cell.execution_count is not None]
        raise RefreshError(f"{where.name}, cell {started[-1].id}: {error}") from None


# ---------------------------------------------------------------------------------------------
# Byte-stable form


def normalise(notebook, chapter: int) -> None:
    """Bring a notebook into the one form in which it is committed, in place."""
    notebook.metadata = nbformat.from_dict(copy.deepcopy(METADATA))
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    assign_ids(notebook.cells, chapter)
    count = 0
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if cell.cell_type != "code":
            continue
        cell.outputs = clean_outputs(cell.outputs)
        # A cell that no machine has run yet (a new `gpu` cell) stays without a count.
        if cell.execution_count is not None:
            count += 1
            cell.execution_count = count
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count


def assign_ids(cells: list, chapter: int) -> None:
    """Give every cell an id `NN-kkk`; ids that exist stay, new cells count on from the highest."""
    prefix = f"{chapter:02}-"
    seen: set[str] = set()
    new = []
    for cell in cells:
        identifier = cell.get("id", "")
        number = identifier.removeprefix(prefix)
        if identifier == prefix + number and number.isdigit() and identifier not in seen:
            seen.add(identifier)
        else:
            new.append(cell)
    highest = max((int(identifier.removeprefix(prefix)) for identifier in seen), default=0)
    for number, cell in enumerate(new, highest + 1):
        cell["id"] = f"{prefix}{number:03}"


def clean_outputs(outputs: list) -> list:
    """Outputs without what differs from run to run, neighbouring streams joined."""
    kept = []
    for output in outputs:
        if output.output_type == "stream":
            if output.name == "stderr":
                continue
            if kept and kept[-1].output_type == "stream":
                kept[-1].text += output.text
                continue
        elif output.output_type == "error":
            # The traceback holds paths; name and message are what the text talks about.
            output.traceback = [f"{output.ename}: {output.evalue}"]
        else:
            output.data.pop(WIDGET, None)
            if not output.data:
                continue
            if "image/png" in output.data:
                output.data["image/png"] = without_png_text(output.data["image/png"])
        kept.append(output)
    return kept


def without_png_text(encoded: str) -> str:
    """A base64 PNG without its comments: matplotlib writes its version into one."""
    data = base64.b64decode(encoded)
    kept, at = [data[:8]], 8
    while at < len(data):
        length = struct.unpack(">I", data[at : at + 4])[0]
        chunk = data[at : at + 12 + length]
        if chunk[4:8] not in (b"tEXt", b"iTXt", b"zTXt", b"tIME"):
            kept.append(chunk)
        at += len(chunk)
    return base64.b64encode(b"".join(kept)).decode()


def comparable(notebook) -> str:
    """The notebook as text, without the outputs that need not be the same everywhere.

    PNG bytes depend on the fonts and the rasteriser of the machine, so a picture counts as
    present or absent; the numbers behind it are printed by the cell and compared.
    """
    notebook = copy.deepcopy(notebook)
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        if {"nbval-skip", "nbval-ignore-output"} & set(cell.metadata.get("tags", [])):
            cell.outputs = []
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = "a picture"
    return nbformat.writes(notebook) + "\n"


def difference(committed, fresh, name: str) -> str:
    """A unified diff of what a run changed, empty if nothing."""
    old, new = comparable(committed), comparable(fresh)
    names = (f"{name} as committed", f"{name} as run")
    return "".join(difflib.unified_diff(old.splitlines(True), new.splitlines(True), *names))


# ---------------------------------------------------------------------------------------------


async def refresh_one(path: Path, check: bool) -> str:
    """Run one notebook and save it, or compare; what went wrong, or an empty string."""
    try:
        committed = read_notebook(path)
    except ExportError as error:
        return str(error)
    fresh = copy.deepcopy(committed)
    assign_ids(fresh.cells, chapter_number(path))
    try:
        await execute(fresh, path)
    except RefreshError as error:
        return str(error)
    for cell in fresh.cells:
        for output in cell.get("outputs", []):
            if not check and output.get("name") == "stderr":
                first = output.text.strip().split("\n")[0]
                print(f"{path.name}, cell {cell.id}: dropped from stderr: {first}")
    normalise(fresh, chapter_number(path))
    if check:
        return difference(committed, fresh, path.name)
    text = nbformat.writes(fresh) + "\n"
    if text != path.read_text(encoding="utf-8"):
        path.write_text(text, encoding="utf-8", newline="\n")
        print(f"{path.name}: refreshed")
    return ""


async def refresh(notebooks: list[Path], check: bool) -> int:
    """Refresh these notebooks, two at a time; 0 if all ran (and, with `check`, did not change)."""
    slots = asyncio.Semaphore(PARALLEL)

    async def one(path: Path) -> str:
        async with slots:
            return await refresh_one(path, check)

    failures = [text for text in await asyncio.gather(*map(one, notebooks)) if text]
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m book.tools refresh", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("notebooks", nargs="*", type=Path, metavar="NOTEBOOK")
    options = parser.parse_args(arguments)
    notebooks = [path.resolve() for path in options.notebooks] or find_notebooks(ROOT)
    return asyncio.run(refresh(notebooks, options.check))
