"""From notebooks to package: copy the exported cells, fold the classes re-opened across cells.

`python -m book.tools export [--check] [NOTEBOOK ...]`

A code cell tagged `export` goes to the module with the notebook's name, `export:config` to
`tinyvllm/config.py`. What the author wrote is copied byte for byte; only imports move (to the top,
sorted by ruff) and the body of `class X(X):` moves into the first definition of `X`.
"""

import argparse
import ast
import difflib
import keyword
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "tinyvllm"
HAND_WRITTEN = {"__init__", "__main__", "cli"}
# Modules a chapter may build beside the one that carries its name, as `export:NAME`.
EXTRA_MODULES = {"config", "cpu_attention", "overlap", "async_llm"}
TAGS = {
    "export",
    *(f"export:{name}" for name in EXTRA_MODULES),
    "gpu",
    "hide-input",
    "hide-output",
    "remove-cell",
    "raises-exception",
    "nbval-skip",
    "nbval-ignore-output",
}
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class ExportError(ValueError):
    """What is wrong, after the notebook and the cell where it is wrong."""


@dataclass
class Piece:
    """One top-level statement of an exported cell."""

    node: ast.stmt
    lead: list[str]  # the comments and blank lines above it
    lines: list[str]  # the statement itself
    where: str  # "03_scheduler.ipynb, cell 03-012", for messages
    follows: "Piece | None"  # the statement above it in the same cell


@dataclass
class Module:
    """What one chapter exports to one module, in cell order."""

    name: str
    notebook: Path
    promise: str
    imports: list[str] = field(default_factory=list)
    typing_imports: list[str] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # defined name -> where

    @property
    def chapter(self) -> int:
        return chapter_number(self.notebook)


# ---------------------------------------------------------------------------------------------
# Notebooks and cells


def find_notebooks(root: Path = ROOT) -> list[Path]:
    """The chapters in book order: `notebooks/NN_name.ipynb`."""
    return sorted((root / "notebooks").glob("[0-9][0-9]_*.ipynb"))


def chapter_number(notebook: Path) -> int:
    return int(notebook.name[:2])


def module_name(notebook: Path) -> str:
    """`03_scheduler.ipynb` -> `scheduler`."""
    return notebook.stem[3:]


def check_name(name: str) -> None:
    """An ExportError unless `NN_name` can be a chapter, and a module that can be imported."""
    module = name[3:]
    if not re.fullmatch(r"[0-9]{2}_[a-z][a-z0-9_]*", name):
        raise ExportError(f"chapter name must look like 04_block_pool; found {name!r}")
    if keyword.iskeyword(module):
        raise ExportError(f"{name}: {module} is a word of Python; a module cannot be called so")
    if module in HAND_WRITTEN | EXTRA_MODULES:
        raise ExportError(f"{name}: {module} is a module that no chapter is named after")


def read_notebook(path: Path) -> nbformat.NotebookNode:
    """A chapter's notebook; an ExportError that names the file if it is none."""
    try:
        check_name(path.stem)
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)  # reading only logs what is wrong
    except ExportError:
        raise
    except Exception as error:  # not there, not text, not JSON, JSON of another shape, ...
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ExportError(f"{path.name}: cannot be read as a notebook: {problem}") from None
    return notebook


def target_module(notebook: Path, tags: list[str]) -> str | None:
    """The module a cell with these tags is exported to, or None."""
    for tag in tags:
        if tag == "export":
            return module_name(notebook)
        if tag.startswith("export:"):
            return tag.removeprefix("export:")
    return None


def read_promise(notebook: Path, cells: list) -> str:
    """The chapter's promise: the first paragraph under the `# Title` that opens the notebook."""
    where = f"{notebook.name}, first cell"
    source = cells[0].source if cells and cells[0].cell_type == "markdown" else ""
    title, _, rest = source.partition("\n")
    if not re.match(r"# \S", title):
        raise ExportError(f"{where}: must be markdown and open with `# Title`")
    promise = " ".join(rest.strip().split("\n\n")[0].split())
    return checked_promise(promise, where)


def checked_promise(promise: str, where: str) -> str:
    if not promise.endswith(".") or re.search(r'\]\(|\*\*|"""|\\|^[>#:`{]', promise):
        raise ExportError(
            f"{where}: the promise must be one plain sentence that ends with a full stop "
            f"(no bold, no link); found {promise!r}"
        )
    return promise


def split_cell(source: str, where: str) -> list[Piece]:
    """Cut a cell into its top-level statements, each with the comments above it."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        magic = re.search(r"^\s*[%!].*", source, re.MULTILINE)
        if magic:
            raise ExportError(f"{where}: a magic cannot be exported: {magic[0].strip()}") from None
        raise ExportError(f"{where}: {error.msg} (line {error.lineno})") from None
    lines = source.split("\n")
    pieces: list[Piece] = []
    done = 0  # lines that belong to a piece already
    for node in tree.body:
        start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
        if start < done:
            raise ExportError(f"{where}: two statements on one line: {lines[start].strip()}")
        end = node.end_lineno
        # Indented comments below the last statement of a block still belong to the block.
        for ahead in range(end, len(lines)):
            if re.match(r"\s+#", lines[ahead]):
                end = ahead + 1
            elif lines[ahead].strip():
                break
        above = pieces[-1] if pieces else None
        pieces.append(Piece(node, lines[done:start], lines[start:end], where, above))
        done = end
    leftover = "\n".join(lines[done:]).strip()
    if leftover:
        raise ExportError(
            f"{where}: a comment needs a statement below it, this one ends the cell: {leftover}"
        )
    if not pieces:
        raise ExportError(f"{where}: tagged for export and empty")
    return pieces


# ---------------------------------------------------------------------------------------------
# Collecting a module


def read_chapter(notebook: Path) -> list[Module]:
    """The modules one notebook exports: none, its own, or its own and `config`."""
    cells = read_notebook(notebook).cells
    promise = read_promise(notebook, cells)
    modules: dict[str, Module] = {}
    for cell in cells:
        where = f"{notebook.name}, cell {cell.get('id', '?')}"
        tags = cell.metadata.get("tags", [])
        unknown = [tag for tag in tags if tag not in TAGS]
        if unknown:
            raise ExportError(f"{where}: unknown tag {unknown[0]!r}; known: {sorted(TAGS)}")
        target = target_module(notebook, tags)
        if target is None:
            continue
        if cell.cell_type != "code":
            raise ExportError(f"{where}: only a code cell can be exported")
        if sum(tag.startswith("export") for tag in tags) > 1:
            raise ExportError(f"{where}: exported to more than one module")
        pieces = split_cell(cell.source, where)
        if target not in modules:
            module = modules[target] = Module(target, notebook, promise)
            if target != module_name(notebook):
                module.promise = own_promise(pieces, target, where)
        for piece in pieces:
            add_piece(modules[target], piece)
    return list(modules.values())


def own_promise(pieces: list[Piece], target: str, where: str) -> str:
    """A module without a chapter of its name opens with a docstring, which is its promise."""
    first = pieces[0].node
    if not (isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", 0), str)):
        raise ExportError(
            f"{where}: the first cell exported to {target} must open with a docstring, "
            "one sentence that says what the module is for"
        )
    promise = checked_promise(" ".join(first.value.value.split()), where)
    del pieces[0]
    if pieces:
        pieces[0].follows = None
    return promise


def add_piece(module: Module, piece: Piece) -> None:
    node = piece.node
    is_import = isinstance(node, ast.Import | ast.ImportFrom)
    if (is_import or is_type_checking(node)) and comments(piece.lead):
        raise ExportError(
            f"{piece.where}: imports are sorted, so a comment above one would lose its place; "
            f"write it at the end of the line: {piece.lines[0]}"
        )
    if is_import:
        module.imports += piece.lines
    elif is_type_checking(node):
        module.typing_imports += textwrap.dedent("\n".join(piece.lines[1:])).split("\n")
    elif isinstance(node, ast.ClassDef) and is_reopened(node):
        fold_class(module, piece)
    else:
        for name in defined_names(node, piece.where):
            if name in module.names:
                raise ExportError(
                    f"{piece.where}: {name} is exported twice, first in {module.names[name]}"
                )
            module.names[name] = piece.where
        if isinstance(node, ast.ClassDef):
            check_methods(node, set(), piece.where)
        module.pieces.append(piece)


def comments(lead: list[str]) -> list[str]:
    return [line for line in lead if line.strip()]


def is_type_checking(node: ast.stmt) -> bool:
    """`if TYPE_CHECKING:` over nothing but imports."""
    return (
        isinstance(node, ast.If)
        and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        and not node.orelse
        and all(isinstance(inner, ast.Import | ast.ImportFrom) for inner in node.body)
    )


def is_reopened(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == node.name for base in node.bases)


def defined_names(node: ast.stmt, where: str) -> list[str]:
    """The names a top-level statement defines; an error if it does anything else."""
    if isinstance(node, DEFINITIONS):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        flat = [leaf for target in targets for leaf in getattr(target, "elts", [target])]
        if all(isinstance(leaf, ast.Name) for leaf in flat):
            return [leaf.id for leaf in flat]
    raise ExportError(
        f"{where}: an exported cell holds imports, assignments to names, functions and classes "
        f"only; found: {ast.unparse(node).splitlines()[0]}"
    )


def fold_class(module: Module, piece: Piece) -> None:
    """Move the body of `class X(X):` to the end of the first definition of X."""
    node, where = piece.node, piece.where
    problem = None
    first = next((p for p in module.pieces if getattr(p.node, "name", None) == node.name), None)
    if first is None or not isinstance(first.node, ast.ClassDef):
        problem = f"is re-opened, but no cell above exports its definition to {module.name}"
    elif node.decorator_list:
        problem = "is re-opened with a decorator; decorate the first definition"
    elif len(node.bases) != 1 or node.keywords:
        problem = "is re-opened with more bases; they belong to the first definition"
    elif piece.lines[0] != f"class {node.name}({node.name}):":
        problem = "must be re-opened with the bare line `class X(X):` and an indented body below"
    elif comments(piece.lead):
        problem = "is re-opened under a comment; move the comment into the body"
    elif ast.get_docstring(node) is not None:
        problem = "is re-opened with a docstring; the class has one in its first definition"
    elif any(isinstance(inner, ast.AnnAssign) for inner in node.body):
        problem = "is re-opened with a field; fields belong to the first definition"
    elif any(isinstance(inner, ast.Name) and inner.id == "super" for inner in ast.walk(node)):
        problem = "uses super() in a re-opened body, where it would mean another class"
    if problem:
        raise ExportError(f"{where}: class {node.name} {problem}")
    seen = {name for inner in first.node.body for name in body_names(inner)}
    check_methods(node, seen, where)
    first.node.body += node.body
    body = piece.lines[1:]
    while not body[0].strip():
        del body[0]
    first.lines += ["", *body]


def body_names(node: ast.stmt) -> list[str]:
    if isinstance(node, DEFINITIONS):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def check_methods(node: ast.ClassDef, seen: set[str], where: str) -> None:
    """No class attribute is defined twice (a property and its setter count as one)."""
    for inner in node.body:
        decorators = [ast.unparse(d) for d in getattr(inner, "decorator_list", [])]
        if any(d.endswith((".setter", ".deleter", ".getter", "overload")) for d in decorators):
            continue
        for name in body_names(inner):
            if name in seen:
                raise ExportError(f"{where}: {node.name}.{name} is exported twice")
            seen.add(name)


# ---------------------------------------------------------------------------------------------
# Rules between modules


def book_modules(root: Path = ROOT) -> tuple[dict[str, Module], dict[Path, str]]:
    """Every module of the book by name, and for each bad notebook what is wrong with it."""
    modules: dict[str, Module] = {}
    errors: dict[Path, str] = {}
    owner: dict[str, Module] = {}  # public name -> module
    chapters: list[Module] = []
    for notebook in find_notebooks(root):
        try:
            chapters += read_chapter(notebook)
        except ExportError as error:
            errors[notebook] = str(error)
    for module in chapters:
        twice = modules.get(module.name)
        if twice:
            errors[module.notebook] = (
                f"{module.notebook.name}: {twice.notebook.name} builds {module.name} already"
            )
            continue
        modules[module.name] = module
        for name, where in module.names.items():
            if name.startswith("_"):
                continue
            if name in owner:
                errors[module.notebook] = (
                    f"{where}: {name} is exported twice, first in {owner[name].names[name]}"
                )
            owner.setdefault(name, module)
    # Modules of later chapters, so that a chapter without a readable notebook is known too.
    number = {module_name(path): chapter_number(path) for path in find_notebooks(root)}
    number |= {module.name: module.chapter for module in modules.values()}
    for module in modules.values():
        try:
            check_imports(module, number, modules, root)
        except ExportError as error:
            errors.setdefault(module.notebook, str(error))
    return modules, errors


def check_imports(
    module: Module, number: dict[str, int], modules: dict[str, Module], root: Path
) -> None:
    """A module imports modules of earlier chapters, and what its own chapter builds beside it.

    `number` has the chapter of every module, also of those that cannot be read.
    """
    for name in imports_of(module):
        chapter = number.get(name, 0)
        beside = chapter == module.chapter and {name, module.name} & EXTRA_MODULES
        if name == module.name:
            problem = "is the module this chapter exports: the names are here already"
        elif name in HAND_WRITTEN or not (
            name in number or name in EXTRA_MODULES or (root / PACKAGE / f"{name}.py").exists()
        ):
            problem = "is built by no chapter"
        elif beside and name in modules and module.name in imports_of(modules[name]):
            problem = "imports it, too"
        elif chapter >= module.chapter and not beside:
            problem = f"is built in chapter {chapter:02}"
        else:
            continue
        raise ExportError(
            f"{module.notebook.name}: {module.name} imports {PACKAGE}.{name}, which {problem}"
        )


def imports_of(module: Module) -> list[str]:
    """Names of the package's modules that a module imports."""
    header = [*module.imports, *module.typing_imports]
    trees = [ast.parse("\n".join(header)), *(piece.node for piece in module.pieces)]
    return [name for tree in trees for name in imported_modules(tree)]


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Names of the package's modules that are imported anywhere below `tree`."""
    for node in ast.walk(tree):
        dotted = []
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            dotted = [f"{PACKAGE}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            dotted = [node.module]
        for name in dotted:
            if name.startswith(f"{PACKAGE}."):
                yield name.split(".")[1]


# ---------------------------------------------------------------------------------------------
# Writing a module


def render(module: Module, root: Path = ROOT) -> str:
    """The module's source; an ExportError with ruff's words if ruff is not content with it."""
    built = f"Built, step by step, in notebooks/{module.notebook.name}."
    promise = textwrap.fill('"""' + module.promise, 100)
    text = f'{promise}\n\n{built}\n"""\n'
    filename = f"{PACKAGE}/{module.name}.py"
    if module.imports:
        text += "\n" + sort_imports(module.imports, filename, root)
    if module.typing_imports:
        block = textwrap.indent(sort_imports(module.typing_imports, filename, root), "    ")
        text += f"\nif TYPE_CHECKING:\n{block}"
    above: Piece | None = None
    for piece in module.pieces:
        lead = piece.lead
        if above is None or piece.follows is not above:
            lead = comments_block(lead)
            blocks = isinstance(piece.node, DEFINITIONS) or isinstance(
                above and above.node, DEFINITIONS
            )
            text += "\n\n" if blocks else "\n"
        text += "\n".join([*lead, *piece.lines]) + "\n"
        above = piece
    complain("format", text, filename, root, "--diff")
    complain("check", text, filename, root, "--output-format=concise")
    return text


def comments_block(lead: list[str]) -> list[str]:
    """The comments above a cell's first statement, without the blank lines above them."""
    text = "\n".join(lead).lstrip("\n")
    return text.split("\n") if text else []


def ruff(arguments: list[str], text: str, filename: str, root: Path) -> subprocess.CompletedProcess:
    first_party = f'lint.isort.known-first-party=["{PACKAGE}"]'
    return subprocess.run(
        [sys.executable, "-m", "ruff", *arguments, "--stdin-filename", filename, "-"]
        + (["--config", first_party] if arguments[0] == "check" else []),
        input=text,
        capture_output=True,
        text=True,
        cwd=root,
    )


def sort_imports(lines: list[str], filename: str, root: Path) -> str:
    """Imports merged, grouped and sorted as ruff's isort rules want them."""
    text = "\n".join(lines) + "\n"
    return ruff(["check", "--select", "I", "--fix", "--quiet"], text, filename, root).stdout


def complain(command: str, text: str, filename: str, root: Path, option: str) -> None:
    result = ruff([command, option], text, filename, root)
    if result.returncode:
        raise ExportError(
            f"{filename}: ruff {command} is not content with the exported cells:\n"
            f"{result.stdout}{result.stderr}".rstrip()
        )


def stray_modules(modules: dict[str, Module], root: Path = ROOT) -> list[str]:
    """Files in the package that no notebook exports and nobody is supposed to write by hand."""
    found = {path.stem for path in (root / PACKAGE).glob("*.py")}
    return sorted(found - HAND_WRITTEN - modules.keys())


def export(notebooks: list[Path], check: bool, root: Path = ROOT) -> int:
    """Write the modules of these notebooks (all of them if none is given), or compare.

    Returns 0, or 1 if a notebook is wrong or, with `check`, a file differs.
    """
    chapters = set(find_notebooks(root))
    chosen = {path.resolve() for path in notebooks} or chapters
    modules, errors = book_modules(root)
    failures = [f"{path.name}: no such chapter in notebooks/" for path in chosen - chapters]
    failures += [message for path, message in errors.items() if path in chosen]
    for module in modules.values():
        if module.notebook not in chosen or module.notebook in errors:
            continue
        path = root / PACKAGE / f"{module.name}.py"
        try:
            text = render(module, root)
        except ExportError as error:
            failures.append(f"{module.notebook.name}: {error}")
            continue
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if old == text:
            continue
        if check:
            names = (f"{PACKAGE}/{path.name}", f"{PACKAGE}/{path.name} as {module.notebook.name}")
            diff = difflib.unified_diff(old.splitlines(True), text.splitlines(True), *names)
            failures.append("".join(diff).rstrip())
        else:
            path.write_text(text, encoding="utf-8", newline="\n")
            print(f"{module.notebook.name} -> {PACKAGE}/{path.name}")
    if check and not notebooks:
        for name in stray_modules(modules, root):
            failures.append(f"{PACKAGE}/{name}.py: no notebook exports it")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m book.tools export", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("notebooks", nargs="*", type=Path, metavar="NOTEBOOK")
    options = parser.parse_args(arguments)
    return export(options.notebooks, options.check)
