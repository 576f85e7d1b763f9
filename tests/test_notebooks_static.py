"""What every chapter keeps to, as far as its file alone can tell. Nothing is run here."""

import ast
import copy
import functools
import re
import statistics

import nbformat
import pytest

from book.tools.exercise import find_exercises
from book.tools.export import ROOT, TAGS, book_modules, chapter_number, export, find_notebooks
from book.tools.refresh import normalise

# Cells that nbval does not run or does not compare: cell id -> why.
NBVAL_REASONS: dict[str, str] = {}
# Cells whose text holds durations although outputs are the same everywhere: cell id -> why.
TIMING_REASONS: dict[str, str] = {
    "04-056": "recorded evidence, read from book/data/control_plane.json",
    "15-097": "recorded evidence, read from book/data/batching.json",
}

# The rules of the whole template hold in these; the other chapters may be shorter for now.
FULL_CHAPTERS = {*range(8), 10, 12, 13, 14, 15}
OUTPUT_RULES = {
    "an absolute path": re.compile(
        r"(?<![\w.:/])/(?:home|root|Users|tmp|usr|opt|var|mnt|work|private|content)/|\b[A-Z]:\\"
        "|" + re.escape(str(ROOT))
    ),
    "an address": re.compile(r"\b0x[0-9a-f]{6,}"),
}
TIMING = re.compile(
    r"\d\s?(?:ns|µs|μs|us|ms|s|sec|secs|seconds)\b|\b(?:tokens?|tok|it|steps|requests)/s\b"
)

notebooks = pytest.mark.parametrize("path", find_notebooks(), ids=lambda path: path.stem)
full_chapters = pytest.mark.parametrize(
    "path",
    [path for path in find_notebooks() if chapter_number(path) in FULL_CHAPTERS],
    ids=lambda path: path.stem,
)


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(path):
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def tags(cell):
    return cell.metadata.get("tags", [])


def prose(path):
    """The markdown of a chapter without code blocks and HTML tags."""
    text = "\n\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    return re.sub(r"```.*?```|<[^>]+>", " ", text, flags=re.DOTALL)


def text_outputs(cell):
    """(mime type, text) of everything a cell shows as text."""
    for output in cell.outputs:
        if output.output_type == "stream":
            yield "text/plain", output.text
        elif output.output_type == "error":
            yield "text/plain", f"{output.ename}: {output.evalue}"
        else:
            for mime, value in output.data.items():
                if not mime.startswith("image/") or mime == "image/svg+xml":
                    yield mime, str(value)


# ---------------------------------------------------------------------------------------------
# Form


@notebooks
def test_file_is_as_refresh_writes_it(path):
    """Ids, counts 1..n, metadata, no standard error, no widgets: normalising changes nothing."""
    notebook = read(path)
    normalise(notebook, chapter_number(path))
    assert nbformat.writes(notebook) + "\n" == path.read_text(encoding="utf-8")


@notebooks
def test_ids_are_stable_and_unique(path):
    ids = [cell.id for cell in read(path).cells]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(rf"{path.name[:2]}-\d{{3}}", identifier) for identifier in ids)


@notebooks
def test_every_cell_was_run(path):
    """Only a `gpu` cell that no GPU has met yet may be without a count."""
    cells = [cell for cell in code_cells(path) if "gpu" not in tags(cell)]
    assert [cell.id for cell in cells if cell.execution_count is None] == []


@notebooks
def test_tags_are_from_the_closed_list(path):
    assert {tag for cell in read(path).cells for tag in tags(cell)} <= TAGS


def test_cells_that_nbval_leaves_out_say_why():
    left_out = {
        cell.id
        for path in find_notebooks()
        for cell in code_cells(path)
        if {"nbval-skip", "nbval-ignore-output"} & set(tags(cell))
    }
    assert left_out == NBVAL_REASONS.keys()


@notebooks
def test_no_magics_and_no_comment_directives(path):
    for cell in code_cells(path):
        assert not re.search(r"^\s*(?:[%!]|#\|)", cell.source, re.MULTILINE), cell.id


@notebooks
def test_plots_end_with_show(path):
    for cell in code_cells(path):
        assert not cell.source.rstrip().endswith(";"), f"{cell.id}: end with plt.show(), not `;`"
        if any("image/png" in output.get("data", {}) for output in cell.outputs):
            assert cell.source.rstrip().endswith("plt.show()"), cell.id


@notebooks
def test_outputs_are_the_same_everywhere(path):
    for cell in code_cells(path):
        for mime, text in text_outputs(cell):
            for what, pattern in OUTPUT_RULES.items():
                assert not pattern.search(text), f"{cell.id} shows {what}: {pattern.search(text)}"
            # HTML and SVG hold lengths of animations; their plain text is checked instead.
            if mime == "text/plain" and cell.id not in TIMING_REASONS:
                assert not TIMING.search(text), f"{cell.id} shows a timing: {TIMING.search(text)}"


@pytest.mark.parametrize(
    "text, bad",
    [
        ("3.4 ms", True),
        ("took 2s", True),
        ("812 tokens/s", True),
        ("16 steps", False),
        ("3 sequences", False),
        ("block 4 is s", False),
    ],
)
def test_timing_pattern(text, bad):
    assert bool(TIMING.search(text)) is bad


@pytest.mark.parametrize(
    "text, rule",
    [
        ("<object at 0x7f00aa11bb22>", "an address"),
        ("File /home/me/x.py", "an absolute path"),
        ("C:\\Users\\me", "an absolute path"),
        ("see https://docs.vllm.ai/usr/x or notebooks/tmp/x, 640x480 and 0x10", None),
    ],
)
def test_output_rules(text, rule):
    found = [what for what, pattern in OUTPUT_RULES.items() if pattern.search(text)]
    assert found == ([rule] if rule else [])


# ---------------------------------------------------------------------------------------------
# Package


def test_package_is_what_the_notebooks_export():
    """Byte for byte; and no module in the package is without its notebook."""
    assert export([], check=True) == 0


modules_and_problems = functools.cache(book_modules)


@notebooks
def test_export_rules(path):
    """Each name from exactly one cell, only earlier modules imported, known tags, no magics."""
    assert modules_and_problems()[1].get(path) is None


@notebooks
def test_public_names_have_docstrings(path):
    modules = [module for module in modules_and_problems()[0].values() if module.notebook == path]
    missing = []
    for module in modules:
        for piece in module.pieces:
            if isinstance(piece.node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                missing += undocumented(piece.node, f"{module.name}.")
    assert missing == []


def undocumented(node, prefix):
    """Dotted names at and below a definition that are public and have no docstring."""
    if node.name.startswith("_"):
        return []
    missing = [] if ast.get_docstring(node) else [prefix + node.name]
    if isinstance(node, ast.ClassDef):
        setters = [
            inner
            for inner in node.body
            if any(
                ast.unparse(decorator).endswith((".setter", ".deleter", "overload"))
                for decorator in getattr(inner, "decorator_list", [])
            )
        ]
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner not in setters:
                missing += undocumented(inner, f"{prefix}{node.name}.")
    return missing


def test_undocumented():
    source = '''
class A:
    """Has one."""
    def __init__(self): ...
    def bare(self): ...
    @property
    def documented(self):
        """Has one."""
    @documented.setter
    def documented(self, value): ...
'''
    (node,) = ast.parse(source).body
    assert undocumented(node, "m.") == ["m.A.bare"]


# ---------------------------------------------------------------------------------------------
# Size and sections


@notebooks
def test_cells_fit_on_a_screen(path):
    """No code cell over 40 lines, except one kernel."""
    long = [cell for cell in code_cells(path) if len(cell.source.splitlines()) > 40]
    kernels = [cell for cell in long if re.search(r"^@.*\b(?:n?jit|autotune)\b", cell.source, re.M)]
    assert [cell.id for cell in long if cell not in kernels] == []
    assert len(kernels) <= 1


def read_through_cells(path):
    """The code cells of the chapter's own argument: no exercises, no folded drawing code."""
    return [
        cell
        for cell in code_cells(path)
        if "attempt(check_" not in cell.source and "hide-input" not in cell.metadata.get("tags", [])
    ]


def lines_of_code(source):
    """Lines that are neither blank nor comments nor docstrings."""
    prose_lines = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node, clean=False) is not None
        for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)
    }
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in prose_lines
        for number, line in enumerate(source.splitlines(), 1)
    )


def test_lines_of_code_are_counted_without_prose():
    source = 'def f():\n    """One.\n\n    Two.\n    """\n    # why\n\n    return 1\n'
    assert lines_of_code(source) == 2


@notebooks
def test_chapter_is_not_too_long(path):
    assert len(re.findall(r"[A-Za-z][\w'-]*", prose(path))) <= 3000
    cells = read_through_cells(path)
    assert len(cells) <= 40
    assert statistics.median(lines_of_code(cell.source) for cell in cells) <= 8


@full_chapters
def test_full_chapter_is_not_too_short(path):
    assert len(re.findall(r"[A-Za-z][\w'-]*", prose(path))) >= 1500
    assert len(code_cells(path)) >= 25


@full_chapters
def test_full_chapter_has_every_section(path):
    text = prose(path)
    for heading in ("In vLLM", "Exercises", "Recap", "Further reading"):
        assert re.search(rf"^#+ .*{heading}", text, re.MULTILINE), heading
    assert "Predict" in text
    assert 3 <= len(find_exercises(read(path).cells, path.name)) <= 5


@notebooks
def test_exercises_keep_to_the_form(path):
    exercises = find_exercises(read(path).cells, path.name)
    number = path.name[:2]
    assert [e.label for e in exercises] == [
        f"ex-{number}-{k}" for k in range(1, len(exercises) + 1)
    ]
    assert len({e.check for e in exercises}) == len(exercises)
    assert all(e.check.startswith("check_") for e in exercises)


@notebooks
def test_stubs_do_not_pass(path):
    """What their cells show; nbval holds that it is true."""
    notebook = read(path)
    shown = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    for exercise in find_exercises(notebook.cells, path.name):
        stub = shown[exercise.cell][-1].text.splitlines()
        assert any(line.startswith("not yet: ") for line in stub), exercise.label
        assert "passed" not in stub, exercise.label


def test_normalising_twice_changes_nothing():
    """The form that the first test compares with is a fixed point."""
    for path in find_notebooks():
        once = read(path)
        normalise(once, chapter_number(path))
        twice = copy.deepcopy(once)
        normalise(twice, chapter_number(path))
        assert nbformat.writes(twice) == nbformat.writes(once)
