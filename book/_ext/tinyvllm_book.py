"""What the book adds to Sphinx: the thread between a chapter's cells and the package.

An exported cell is shown under the name of the module that it goes to, and an entry of the API
pages links to the section of the chapter that built it. Both read the cells' `export` tags.
"""

import ast
import os
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import nbformat
from docutils import nodes

EXPORT = re.compile(r"export(?::(\w+))?$")


class Origin(NamedTuple):
    """Where a symbol was built: the page, its title, and the section with its anchor."""

    page: str
    title: str
    section: str
    anchor: str


def module_of(tags: list[str], page: str) -> str | None:
    """The package module that a cell with these tags goes to (None: it is not exported)."""
    for tag in tags:
        if match := EXPORT.match(tag):
            return match[1] or Path(page).name.partition("_")[2]
    return None


@cache
def origins(root: Path) -> dict[str, Origin]:
    """`tinyvllm.scheduler.Scheduler.schedule` -> the section that defines it, for all symbols."""
    found = {}
    for path in sorted(root.glob("notebooks/[0-9][0-9]_*.ipynb")):
        page, headings = f"notebooks/{path.stem}", []
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "markdown":
                text = re.sub(r"^```.*?^```", "", cell.source, flags=re.M | re.S)
                headings += [plain(h) for h in re.findall(r"^#+ +(.+)", text, re.M)]
            elif module := module_of(cell.metadata.get("tags", []), page):
                for name in symbols(ast.parse(cell.source).body):
                    anchor = nodes.make_id(headings[-1])
                    origin = Origin(page, headings[0], headings[-1], anchor)
                    found.setdefault(f"tinyvllm.{module}.{name}", origin)
    return found


def plain(heading: str) -> str:
    """A Markdown heading without its code and emphasis marks."""
    return re.sub(r"[`*]|\{[^}]*\}$", "", heading).strip()


def symbols(body: list[ast.stmt], prefix: str = ""):
    """Dotted names of the classes, functions and methods among these statements."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield prefix + node.name
            yield from symbols(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name


def add_captions(app, doctree):
    """Put "exported to tinyvllm/x.py" above every exported cell."""
    page = app.env.docname
    for cell in list(doctree.findall(nodes.container)):
        classes = cell.get("classes", [])
        tags = [name.removeprefix("tag_") for name in classes if name.startswith("tag_")]
        if "cell" in classes and (module := module_of(tags, page)):
            code = nodes.literal("", f"tinyvllm/{module}.py")
            caption = nodes.paragraph("", "exported to ", code, classes=["tv-exported"])
            cell.parent.insert(cell.parent.index(cell), caption)


def add_origin(app, what, name, obj, options, lines):
    """After napoleon: close a class's, function's or method's API entry with a link to where it was built."""
    # Sphinx reads `:ivar prev, next:` as a type and a name.
    lines[:] = [re.sub(r"(?<=^:ivar )[\w, ]+(?=:)", slashes, line) for line in lines]
    known = origins(Path(app.srcdir))
    origin, parent = known.get(name), known.get(name.rpartition(".")[0])
    if origin is None or origin == parent:  # a method built with its class adds nothing
        return
    here = Path(app.env.docname).parent
    link = os.path.relpath(f"{origin.page}.html", here) + f"#{origin.anchor}"
    where = re.sub(r"^\d+[.:]? +", "", origin.title)
    if origin.section != origin.title:
        where += f", {origin.section}"
    where = where.replace("\\", "\\\\").replace("`", "").replace("<", "\\<")
    number = int(Path(origin.page).name[:2])
    built = f"Built in chapter {number}: `{where} <{link}>`__"
    lines += ["", ".. container:: tv-built", "", f"   {built}", ""]


def mend_docstring(app, what, name, obj, options, lines):
    """Before napoleon: keep a property's colon, and make a module's notebook a link."""
    if what == "property":
        # napoleon takes "Usable blocks: all but one" for a type, unless the line breaks before it.
        lines[:1] = re.sub(r" (\S+: )", r"\n\1", lines[0], count=1).split("\n")
    if what == "module":
        link = r":doc:`\g<0> </notebooks/\1>`"
        lines[:] = [re.sub(r"notebooks/(\w+)\.ipynb", link, line) for line in lines]


def slashes(names: re.Match) -> str:
    return names[0].replace(", ", "/")


def setup(app):
    app.connect("autodoc-process-docstring", mend_docstring, priority=400)
    app.connect("doctree-read", add_captions)
    app.connect("autodoc-process-docstring", add_origin)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
