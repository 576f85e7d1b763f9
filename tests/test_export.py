"""The exporter: what is copied, what is folded, and every way to be wrong."""

import shutil
import subprocess
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from book.tools.export import ROOT, ExportError, export, read_chapter
from book.tools.new import new

PROMISE = "# Title\n\nDecides what runs\nin the next step.\n\nMore prose."


@pytest.fixture
def root(tmp_path):
    """An empty book with this project's ruff settings."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "tinyvllm").mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def chapter(root, name, *cells, first=PROMISE):
    """Write a notebook; a cell is (tags, source), or a source tagged `export`."""
    notebook = new_notebook(cells=[new_markdown_cell(first, id="first")])
    for number, cell in enumerate(cells, 1):
        tags, source = cell if isinstance(cell, tuple) else ("export", cell)
        notebook.cells.append(
            new_code_cell(source, id=f"cell-{number}", metadata={"tags": tags.split()})
        )
    path = root / "notebooks" / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return path


def exported(root, name):
    return (root / "tinyvllm" / f"{name}.py").read_text()


EXPECTED = '''\
"""Decides what runs in the next step.

Built, step by step, in notebooks/03_scheduler.ipynb.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from tinyvllm.config import EngineConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# The most tokens a step may hold.
BUDGET = 8
SHARE = 0.5

# What is left of it.
REST: int = 3


# A queue of lengths.
class Scheduler:
    """Holds what waits."""

    def __init__(self, config: EngineConfig):
        self.waiting = deque()
        # nothing runs yet

    # --- adding ---

    def add(self, text: str) -> str:
        return """  kept
    as    it  is

# not a comment
"""

    # --- asking ---
    @property
    def count(self) -> int:
        """How many wait."""

        def inner():
            return len(self.waiting)

        return inner()

    @count.setter
    def count(self, n: int):
        self.waiting = deque(np.arange(n))
        # a last word


def outer(f: Callable) -> Iterator:
    # inside
    def inner():
        yield f()  # type: ignore[misc]

    return inner()


@functools.cache
def cached(n: int) -> int:
    return n
'''


def test_a_module_reads_as_written_by_hand(root):
    scheduler = (
        ("export:config", '"""Every knob\nof the engine."""\n\nfrom dataclasses import dataclass'),
        ("export:config", "@dataclass(frozen=True)\nclass EngineConfig:\n    block_size: int = 16"),
        "from __future__ import annotations\n\nimport numpy as np\nfrom collections import deque\n"
        "from typing import TYPE_CHECKING\n\nfrom tinyvllm.config import EngineConfig\n\n"
        "if TYPE_CHECKING:\n    from collections.abc import Iterator",
        "# The most tokens a step may hold.\nBUDGET = 8\nSHARE = 0.5",
        "# What is left of it.\nREST: int = 3",
        ("", "class Scheduler:\n    def naive(self): return 1"),
        '# A queue of lengths.\nclass Scheduler:\n    """Holds what waits."""\n\n'
        "    def __init__(self, config: EngineConfig):\n        self.waiting = deque()\n"
        "        # nothing runs yet",
        ("", "Scheduler(None).waiting  # only shown"),
        "from collections import deque\n\n\nclass Scheduler(Scheduler):\n\n    # --- adding ---\n\n"
        '    def add(self, text: str) -> str:\n        return """  kept\n    as    it  is\n\n'
        '# not a comment\n"""',
        "class Scheduler(Scheduler):\n    # --- asking ---\n    @property\n"
        '    def count(self) -> int:\n        """How many wait."""\n\n        def inner():\n'
        "            return len(self.waiting)\n\n        return inner()\n\n"
        "    @count.setter\n    def count(self, n: int):\n"
        "        self.waiting = deque(np.arange(n))\n        # a last word\n\n\n"
        "def outer(f: Callable) -> Iterator:\n    # inside\n    def inner():\n"
        "        yield f()  # type: ignore[misc]\n\n    return inner()",
        "import functools\n\nif TYPE_CHECKING:\n    from collections.abc import Callable\n\n\n"
        "@functools.cache\ndef cached(n: int) -> int:\n    return n",
    )
    chapter(root, "03_scheduler", *scheduler)
    assert export([], check=False, root=root) == 0
    assert exported(root, "scheduler") == EXPECTED
    assert exported(root, "config") == (
        '"""Every knob of the engine.\n\nBuilt, step by step, in notebooks/03_scheduler.ipynb.\n'
        '"""\n\nfrom dataclasses import dataclass\n\n\n'
        "@dataclass(frozen=True)\nclass EngineConfig:\n    block_size: int = 16\n"
    )
    assert export([], check=True, root=root) == 0


def test_spacing_inside_a_cell_is_the_authors(root):
    source = "A = 1\n\n# b, right below\nB = 2\n\n\ndef f():\n    return A\n\n\nC = f()"
    chapter(root, "01_request", source)
    assert export([], check=False, root=root) == 0
    assert exported(root, "request").endswith(f'"""\n\n{source}\n')


def test_comments_on_imports_move_with_them(root):
    source = "import numba  # needs no compiler\nimport json\n\n\nUSED = (json, numba)"
    chapter(root, "01_request", source)
    assert export([], check=False, root=root) == 0
    sorted_imports = "import json\n\nimport numba  # needs no compiler\n\nUSED"
    assert sorted_imports in exported(root, "request")


def test_a_reopened_dataclass_is_one_dataclass(root):
    """What the notebook builds in steps and what the package holds behave the same."""
    cells = (
        "from dataclasses import dataclass",
        "@dataclass\nclass Block:\n    block_id: int\n    ref_count: int = 0",
        "class Block(Block):\n    def take(self) -> int:\n"
        "        self.ref_count += 1\n        return self.ref_count",
    )
    chapter(root, "04_block_pool", *cells)
    assert export([], check=False, root=root) == 0
    in_notebook, in_package = {"__name__": __name__}, {"__name__": __name__}
    for cell in cells:
        exec(cell, in_notebook)
    exec(exported(root, "block_pool"), in_package)
    for namespace in (in_notebook, in_package):
        block = namespace["Block"](3)
        assert (block.take(), block.take(), repr(block)) == (1, 2, "Block(block_id=3, ref_count=2)")
        assert block == namespace["Block"](3, 2)


def test_a_notebook_without_exports_builds_nothing(root):
    chapter(root, "00_tour", ("", "print(1)"))
    assert export([], check=True, root=root) == 0
    assert list((root / "tinyvllm").iterdir()) == []


# Each case: what the error must say, then the cells.
ERRORS = {
    "twice": ("add is exported twice", "def add(): ...", "def add(): ..."),
    "twice-by-assignment": ("A is exported twice", "A = 1", "A, B = 1, 2"),
    "twice-a-method": (
        "X.go is exported twice",
        "class X:\n    def go(self): ...",
        "class X(X):\n    def go(self): ...",
    ),
    "reopen-first": ("no cell above exports its definition", "class X(X):\n    def f(self): ..."),
    "reopen-untagged": (
        "no cell above exports its definition",
        ("", "class X: ..."),
        "class X(X):\n    def f(self): ...",
    ),
    "reopen-a-function": (
        "no cell above exports its definition",
        "def X(): ...",
        "class X(X):\n    def f(self): ...",
    ),
    "reopen-other-module": (
        "no cell above exports its definition to request",
        ("export:config", '"""Knobs."""\n\nclass X: ...'),
        "class X(X):\n    def f(self): ...",
    ),
    "reopen-decorated": ("with a decorator", "class X: ...", "@d\nclass X(X):\n    a = 1"),
    "reopen-bases": ("with more bases", "class X: ...", "class X(X, dict):\n    a = 1"),
    "reopen-keyword": ("with more bases", "class X: ...", "class X(X, metaclass=M):\n    a = 1"),
    "reopen-one-line": ("bare line", "class X: ...", "class X(X): a = 1"),
    "reopen-trailing": ("bare line", "class X: ...", "class X(X):  # more\n    a = 1"),
    "reopen-comment": ("into the body", "class X: ...", "# more\nclass X(X):\n    a = 1"),
    "reopen-docstring": ("with a docstring", "class X: ...", 'class X(X):\n    """More."""'),
    "reopen-field": ("with a field", "class X: ...", "class X(X):\n    a: int = 1"),
    "super": (
        "super()",
        "class X: ...",
        "class X(X):\n    def __init__(self):\n        super().__init__()",
    ),
    "super-arguments": (
        "super()",
        "class X: ...",
        "class X(X):\n    def f(self):\n        return super(X, self)",
    ),
    "magic": ("magic cannot be exported: %time f()", "%time f()"),
    "shell": ("magic cannot be exported: !ls", "A = 1\n!ls"),
    "syntax": ("invalid syntax", "def f(:\n    pass"),
    "expression": ("only; found: print(1)", "A = 1\nprint(1)"),
    "docstring": ("only; found: 'about'", '"""about"""\nA = 1'),
    "attribute": ("only; found: X.f = 1", "class X: ...", "X.f = 1"),
    "augmented": ("only; found: A += 1", "A = 1\nA += 1"),
    "assert": ("only; found: assert A", "A = 1\nassert A"),
    "if": ("only; found: if True:", "if True:\n    A = 1"),
    "typing-else": (
        "found: if TYPE_CHECKING:",
        "if TYPE_CHECKING:\n    import a\nelse:\n    b = 1",
    ),
    "import-comment": ("at the end of the line: import json", "# why\nimport json"),
    "semicolon": ("two statements on one line", "A = 1; B = 2"),
    "last-comment": ("a comment needs a statement below it", "A = 1\n# the end"),
    "empty": ("tagged for export and empty", ""),
    "tag": ("unknown tag 'exprot'", ("exprot", "A = 1")),
    "module": ("unknown tag 'export:gpt2'", ("export:gpt2", "A = 1")),
    "two-modules": ("more than one module", ("export export:config", "A = 1")),
    "config-promise": ("must open with a docstring", ("export:config", "A = 1")),
    "own-module": ("the names are here already", "from tinyvllm.request import B\n\nA = B"),
    "later-module": ("built in chapter 05", "def f():\n    import tinyvllm.kv_cache"),
    "later-under-typing": (
        "built in chapter 05",
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from tinyvllm import kv_cache",
    ),
    "no-module": ("built by no chapter", "from tinyvllm.nothing import B\n\nA = B"),
    "hand-written": ("built by no chapter", "from tinyvllm.cli import B\n\nA = B"),
    "unformatted": ("ruff format is not content", "A = [1,2]"),
    "one-blank-line": ("ruff format is not content", "def f(): ...\nA = 1"),
    "unused": ("`json` imported but unused", "import json\n\nA = 1"),
    "undefined": ("Undefined name `B`", "A = B"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_error(root, case, capsys):
    words, *cells = ERRORS[case]
    chapter(root, "01_request", *cells)
    chapter(root, "05_kv_cache", "Z = 1")
    assert export([], check=False, root=root) == 1
    message = capsys.readouterr().err
    assert words in message
    assert "01_request.ipynb" in message
    assert not (root / "tinyvllm/request.py").exists()
    assert (root / "tinyvllm/kv_cache.py").exists()  # the others go on


def test_error_names_the_cell(root, capsys):
    chapter(root, "01_request", "A = 1", "print(A)")
    export([], check=False, root=root)
    assert "01_request.ipynb, cell cell-2: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "first",
    ["No title.", "# Title", "# T\n\nno full stop", "# T\n\n**Bold.**", "# T\n\n[A link](x.md)."],
)
def test_error_promise(root, first, capsys):
    chapter(root, "01_request", "A = 1", first=first)
    assert export([], check=False, root=root) == 1
    assert "first cell: " in capsys.readouterr().err


NO_NOTEBOOK = {
    "text": b"print('hello')",
    "empty": b"",
    "half": b'{"cells": [',
    "bytes": b"\x80\xff\x00",
    "list": b"[]",
    "object": b"{}",
    "null": b"null",
    "no-cells": b'{"metadata": {}, "nbformat": 4, "nbformat_minor": 5}',
    "cells": b'{"cells": [7], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}',
    "cell": b'{"cells": [{"id": "a"}], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}',
    "version": b'{"cells": [], "metadata": {}, "nbformat": "four", "nbformat_minor": 5}',
}


@pytest.mark.parametrize("case", NO_NOTEBOOK)
def test_error_no_notebook(root, case, capsys):
    bad = root / "notebooks/01_request.ipynb"
    bad.write_bytes(NO_NOTEBOOK[case])
    chapter(root, "05_kv_cache", "Z = 1")
    with pytest.raises(ExportError, match=r"^01_request\.ipynb: cannot be read as a notebook: "):
        read_chapter(bad)
    capsys.readouterr()
    assert export([], check=False, root=root) == 1
    assert "01_request.ipynb: cannot be read as a notebook: " in capsys.readouterr().err
    assert exported(root, "kv_cache").endswith("Z = 1\n")  # the others go on


def test_error_a_folder_is_no_notebook(root, capsys):
    (root / "notebooks/01_request.ipynb").mkdir()
    assert export([], check=True, root=root) == 1
    assert "01_request.ipynb: cannot be read as a notebook: IsADirectory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, words",
    [
        ("12_class", "class is a word of Python"),
        ("12_import", "import is a word of Python"),
        ("12_my-name", "must look like 04_block_pool"),
        ("12_Name", "must look like 04_block_pool"),
        ("12_cli", "cli is a module that no chapter is named after"),
        ("12_config", "config is a module that no chapter is named after"),
    ],
)
def test_error_name_that_no_module_can_have(root, name, words, capsys):
    with pytest.raises(ExportError, match=words):
        new(name, root)
    assert list((root / "notebooks").iterdir()) == []
    chapter(root, name, "A = 1")
    assert export([], check=False, root=root) == 1
    assert words in capsys.readouterr().err
    assert list((root / "tinyvllm").iterdir()) == []


def test_error_name_in_two_chapters(root, capsys):
    chapter(root, "01_request", "A = 1\n_PRIVATE = 1")
    chapter(root, "02_sequence", "_PRIVATE = 2\nA = 2")
    assert export([], check=False, root=root) == 1
    assert "02_sequence.ipynb, cell cell-1: A is exported twice, first in 01_request.ipynb" in (
        capsys.readouterr().err
    )


def test_error_two_chapters_build_config(root, capsys):
    for name in ("03_scheduler", "04_block_pool"):
        chapter(root, name, ("export:config", '"""Knobs."""\n\nA = 1'))
    assert export([], check=False, root=root) == 1
    assert "03_scheduler.ipynb builds config already" in capsys.readouterr().err


def test_what_one_chapter_builds_may_import_each_other(root):
    beside = '"""Knobs."""\n\nfrom tinyvllm.scheduler import A\n\nB = A'
    chapter(root, "03_scheduler", "A = 1", ("export:config", beside))
    assert export([], check=False, root=root) == 0
    assert "from tinyvllm.scheduler import A\n\nB = A" in exported(root, "config")


def test_error_but_not_in_a_circle(root, capsys):
    chapter(
        root,
        "03_scheduler",
        "A = 1",
        "from tinyvllm.config import B\n\nC = B",
        ("export:config", '"""Knobs."""\n\nfrom tinyvllm.scheduler import A\n\nB = A'),
    )
    assert export([], check=False, root=root) == 1
    assert "imports tinyvllm.config, which imports it, too" in capsys.readouterr().err


def test_check_shows_the_difference_and_writes_nothing(root, capsys):
    chapter(root, "01_request", "A = 1")
    assert export([], check=False, root=root) == 0
    path = root / "tinyvllm/request.py"
    path.write_text(path.read_text().replace("A = 1", "A = 2"))
    edited = path.read_text()
    assert export([], check=True, root=root) == 1
    message = capsys.readouterr().err
    assert "-A = 2" in message and "+A = 1" in message
    assert path.read_text() == edited


def test_check_lists_stray_modules(root, capsys):
    for name in ("__init__", "cli", "stray"):
        (root / f"tinyvllm/{name}.py").write_text("")
    assert export([], check=True, root=root) == 1
    assert capsys.readouterr().err == "tinyvllm/stray.py: no notebook exports it\n"


def test_one_notebook_is_exported_although_another_is_broken(root, capsys):
    good = chapter(root, "01_request", "A = 1")
    chapter(root, "02_sequence", "%magic")
    assert export([good], check=False, root=root) == 0
    assert capsys.readouterr().err == ""
    assert exported(root, "request").endswith("A = 1\n")


def test_import_of_the_tools_is_light():
    """A notebook imports `book.tools` for the Stepper; that must not load the tool's machinery."""
    code = "import sys, book.tools; print({'nbformat', 'nbclient', 'torch'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout == "set()\n"


def test_command_line():
    command = [sys.executable, "-m", "book.tools"]
    usage = subprocess.run([*command, "exprot"], cwd=ROOT, capture_output=True, text=True)
    assert usage.returncode == 2 and "refresh" in usage.stdout
    result = subprocess.run(
        [*command, "export", "--check", "notebooks/no.ipynb"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (1, "no.ipynb: no such chapter in notebooks/\n")
