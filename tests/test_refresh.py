"""`refresh` and `new`: a second run changes no byte, and a new chapter is valid as it is."""

import asyncio
import base64
import os
import shutil
import struct
import subprocess
import sys
import zlib

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from book.tools.export import ROOT, export
from book.tools.new import new
from book.tools.refresh import assign_ids, difference, has_cuda, refresh, without_png_text


@pytest.fixture
def root(tmp_path):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "tinyvllm").mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(ROOT / "conftest.py", tmp_path)
    shutil.copy(ROOT / "notebooks/matplotlibrc", tmp_path / "notebooks")
    return tmp_path


def code(source, *tags, **fields):
    return new_code_cell(source, metadata={"tags": list(tags), "scrolled": True}, **fields)


def write(path, *cells):
    notebook = new_notebook(cells=[new_markdown_cell("# T\n\nA promise."), *cells])
    notebook.metadata["widgets"] = {"state": {}}
    nbformat.write(notebook, path)
    return path


def run(path, check=False):
    return asyncio.run(refresh([path], check))


def outputs(path):
    """Cell id -> its outputs, of the code cells."""
    cells = nbformat.read(path, as_version=4).cells
    return {cell.id: cell.outputs for cell in cells if cell.cell_type == "code"}


NOISY = "import sys\nprint('a', flush=True)\nprint('warned', file=sys.stderr)\nprint('b')"
WIDGET = "import ipywidgets\nipywidgets.IntSlider(value=3)"
PLOT = (
    "import matplotlib.pyplot as plt\nfrom matplotlib_inline.backend_inline import "
    "set_matplotlib_formats\nset_matplotlib_formats('svg', 'png')\nplt.plot([1, 3, 2])\nplt.show()"
)


def test_a_second_refresh_changes_no_byte(root, capsys):
    recorded = [nbformat.v4.new_output("stream", text="seen on a GPU\n")]
    path = write(
        root / "notebooks/05_kv_cache.ipynb",
        code(NOISY),
        code(WIDGET),
        code(PLOT),
        code("open('/nowhere')", "raises-exception"),
        code("print('never')", "nbval-skip", execution_count=9, outputs=recorded),
        code("import os\nprint(os.path.basename(os.getcwd()), sys.executable)"),
    )
    assert run(path) == 0
    assert "cell 05-002: dropped from stderr: warned" in capsys.readouterr().out
    first = path.read_bytes()
    assert run(path) == 0
    assert path.read_bytes() == first

    notebook = nbformat.reads(first.decode(), as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.id for cell in notebook.cells] == [f"05-{n:03}" for n in range(1, 8)]
    assert [cell.execution_count for cell in cells] == [1, 2, 3, 4, 5, 6]
    noisy, widget, plot, error, skipped, where = (cell.outputs for cell in cells)
    assert [(out.name, out.text) for out in noisy] == [("stdout", "a\nb\n")]
    assert set(widget[0].data) == {"text/plain"}
    assert set(plot[0].data) == {"image/png", "image/svg+xml", "text/plain"}
    assert error[0].traceback == [
        "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere'"
    ]
    assert skipped[0].text == "seen on a GPU\n"
    assert where[0].text == f"notebooks {sys.executable}\n"
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert cells[0].metadata == {} and cells[3].metadata == {"tags": ["raises-exception"]}


def test_check_tells_what_a_run_changes(root, capsys):
    recorded = [nbformat.v4.new_output("stream", text="3\n")]
    path = write(
        root / "notebooks/05_kv_cache.ipynb",
        code("print(1 + 1)", execution_count=1, outputs=recorded),
    )
    before = path.read_text()
    assert run(path, check=True) == 1
    message = capsys.readouterr().err
    assert '-      "3\\n"' in message and '+      "2\\n"' in message
    assert path.read_text() == before


def test_what_a_check_does_not_compare():
    """Picture bytes and the outputs of cells that say so; everything else counts."""

    def notebook(value, *tags):
        outputs = [nbformat.v4.new_output("display_data", data=value)]
        return new_notebook(cells=[code("show()", *tags, id="05-001", outputs=outputs)])

    def same(one, other, *tags):
        return difference(notebook(one, *tags), notebook(other, *tags), "x.ipynb") == ""

    assert same({"image/png": "AAAA"}, {"image/png": "BBBB"})
    assert not same({"image/png": "AAAA"}, {"text/plain": "a picture"})
    assert not same({"text/plain": "1"}, {"text/plain": "2"})
    assert same({"text/plain": "1"}, {"text/plain": "2"}, "nbval-ignore-output")


def test_a_cell_that_fails_is_named_and_nothing_is_saved(root, capsys):
    path = write(root / "notebooks/05_kv_cache.ipynb", code("x = 1"), code("x / 0"), code("x"))
    before = path.read_bytes()
    assert run(path) == 1
    message = capsys.readouterr().err
    assert "05_kv_cache.ipynb, cell 05-003: " in message and "ZeroDivisionError" in message
    assert path.read_bytes() == before


@pytest.mark.skipif(has_cuda(), reason="shows what happens without CUDA")
def test_without_cuda_gpu_cells_keep_what_was_recorded(root):
    recorded = [nbformat.v4.new_output("stream", text="12 blocks\n")]
    path = write(
        root / "notebooks/12_triton_attention.ipynb",
        code("import os\nprint(os.environ['TRITON_INTERPRET'])"),
        code("fails()", "gpu", execution_count=5, outputs=recorded),
        code("fails()", "gpu"),
    )
    assert run(path) == 0
    cells = nbformat.read(path, as_version=4).cells[1:]
    assert [cell.execution_count for cell in cells] == [1, 2, None]
    assert [out.text for cell in cells for out in cell.outputs] == ["1\n", "12 blocks\n"]


def test_ids_of_old_cells_stay():
    ids = ["05-002", "abc", "05-001", "05-002", "04-007", "05-010"]
    cells = [{"id": identifier} for identifier in ids] + [{}]
    assign_ids(cells, 5)
    assert [cell["id"] for cell in cells] == [
        *("05-002", "05-011", "05-001", "05-012", "05-013", "05-010", "05-014"),
    ]


def test_png_text_is_removed():
    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head, picture, end = chunk(b"IHDR", b"x" * 13), chunk(b"IDAT", b"pixels"), chunk(b"IEND", b"")
    text = chunk(b"tEXt", b"Software\0version 3")
    with_text = base64.b64encode(b"\x89PNG\r\n\x1a\n" + head + text + picture + end).decode()
    clean = base64.b64encode(b"\x89PNG\r\n\x1a\n" + head + picture + end).decode()
    assert without_png_text(with_text) == without_png_text(clean) == clean


def test_new_chapter_is_valid_as_it_is(root):
    path = new("19_speculative", root)
    assert export([], check=False, root=root) == 0
    assert run(path) == 0
    text = path.read_text()
    headings = "The problem, The naive, The idea, Build, Break, Prove, Measure, In vLLM, Exercises"
    places = [text.index(f"## {words}") for words in [*headings.split(", "), "Recap", "Further"]]
    assert places == sorted(places)
    assert "not yet: the smallest of [3, 1, 2] is 1" in text


def test_a_file_that_is_no_notebook_is_named(root, capsys):
    path = root / "notebooks/05_kv_cache.ipynb"
    for expected in ("FileNotFoundError", "NotJSONError"):
        assert run(path) == 1
        assert f"05_kv_cache.ipynb: cannot be read as a notebook: {expected}" in (
            capsys.readouterr().err
        )
        path.write_text("print('hello')")


@pytest.mark.parametrize(
    "name", ["4_block_pool", "04-block", "04_Block", "04_", "04_config", "04_class"]
)
def test_new_refuses_a_bad_name(root, name):
    with pytest.raises(ValueError):
        new(name, root)


@pytest.mark.parametrize("name", ["04_block_pool", "04_other", "05_block_pool"])
def test_new_refuses_a_taken_name(root, name):
    new("04_block_pool", root)
    with pytest.raises(ValueError, match=r"taken by 04_block_pool\.ipynb"):
        new(name, root)


def test_nbval_settings(root):
    """What conftest.py asks of `pytest --nbval`, shown on a good and a bad notebook."""
    good = write(
        root / "notebooks/01_request.ipynb",
        code("import os, sys\nx = 1\nprint(os.environ.get('TRITON_INTERPRET'))"),
        code("print('a warning', file=sys.stderr)"),
        code("x = x + 1\nx"),
    )
    assert run(good) == 0
    bad = nbformat.reads(good.read_text().replace('"2"', '"3"'), as_version=4)
    bad.cells += [code("fails()", "gpu", execution_count=4), code("y = 1")]
    nbformat.write(bad, root / "notebooks/02_sequence.ipynb")
    exercised = new("03_scheduler", root)
    assert run(exercised) == 0
    wrong = exercised.read_text().replace("return min(values)", "return max(values)")
    (root / "notebooks/04_block_pool.ipynb").write_text(wrong.replace("ex-03", "ex-04"))

    command = "-m pytest --nbval --nbval-current-env notebooks"
    result = subprocess.run(
        [sys.executable, *command.split(), "--nbval-cell-timeout", "120", "-rA", "--color=no"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    assert sum(line.startswith("PASSED notebooks/01_request.ipynb") for line in lines) == 3
    cells = [f"notebooks/02_sequence.ipynb::Cell {number}" for number in range(5)]
    outcome = [
        [word for word in ("PASSED", "FAILED") if f"{word} {cell}" in result.stdout]
        for cell in cells
    ]
    skipped_or_failed = ["FAILED"] if has_cuda() else []
    assert outcome == [
        ["PASSED"],
        ["PASSED"],  # a warning is not compared
        ["FAILED"],  # the recorded output is wrong
        skipped_or_failed,
        ["FAILED"],  # never executed, which nbval alone lets pass
    ]
    assert "was never executed: refresh" in result.stdout
    assert "PASSED notebooks/03_scheduler.ipynb::solution of ex-03-1" in result.stdout
    assert "FAILED notebooks/04_block_pool.ipynb::solution of ex-04-1" in result.stdout
    assert "not yet: the smallest of [3, 1, 2] is 1" in result.stdout
    assert has_cuda() or "needs CUDA" in result.stdout
