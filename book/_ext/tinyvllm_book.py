"""What the book adds to Sphinx: the thread between a chapter's cells and the package.

A chapter is shown with its number, an exported cell with the name of the module that it goes to, and
an entry of the API pages with a link to the section of the chapter that built it. A plot is described
to those who cannot see it by the `# Alt:` comment of its cell.
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

# What the theme and the writers leave undone for those who hear the page (WCAG 4.1.2, 2.5.3).
MENDS = [
    # Names that hide or contradict the text that is seen.
    (r'(search-button__button[^>]*?) title="Search" aria-label="Search"', r"\1"),
    (r'(<i class="theme-switch [^>]*?) +title="[^"]*"', r"\1"),
    (r'<summary aria-label="Toggle hidden content">', "<summary>"),
    # The arrow beside a chapter that has pages below it has no name at all.
    (r'<summary>(?=<span class="toctree-toggle")', '<summary aria-label="Pages below">'),
    # Bibliography entries: the role is no longer one, and a list may hold only list items.
    (r'role="doc-biblioentry"', 'role="listitem"'),
]


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


def number_title(app, doctree):
    """Put the chapter's number, which its file's name holds, before its title."""
    title = next(doctree.findall(nodes.title), None)
    if title is not None and (number := re.match(r"notebooks/(\d\d)_", app.env.docname)):
        title.insert(0, nodes.Text(f"{int(number[1])}. "))


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
    where = origin.title
    if origin.section != origin.title:
        where += f", {origin.section}"
    where = where.replace("\\", "\\\\").replace("`", "").replace("<", "\\<")
    number = int(Path(origin.page).name[:2])
    built = f"Built in chapter {number}: `{where} <{link}>`__"
    lines += ["", ".. container:: tv-built", "", f"   {built}", ""]


def describe_plots(app, doctree):
    """Give a plot the text of its cell's comment `# Alt: what the picture shows.`"""
    for cell in doctree.findall(nodes.container):
        source = next(cell.findall(nodes.literal_block), None)
        if "cell" not in cell.get("classes", []) or source is None:
            continue
        if match := re.search(r"^# Alt: (.+(?:\n# .+)*)", source.astext(), re.M):
            for image in cell.findall(nodes.image):
                image["alt"] = match[1].replace("\n# ", " ")


def mend_pages(app, exception):
    """Apply MENDS to every page once all are written."""
    for path in Path(app.outdir).rglob("*.html") if exception is None else ():
        old = new = path.read_text(encoding="utf-8")
        for pattern, replacement in MENDS:
            new = re.sub(pattern, replacement, new)
        if new != old:
            path.write_text(new, encoding="utf-8")


def mend_docstring(app, what, name, obj, options, lines):
    """Before napoleon: let docstrings say `Block`s and "usable: all but one", and make a module's
    notebook a link."""
    if what in ("attribute", "property"):
        # napoleon takes what precedes a colon on the first line for a type: break the line there.
        lines[:1] = re.sub(r" (\S*:)", r"\n\1", lines[0], count=1).split("\n")
    if what == "module":
        link = r":doc:`\g<0> </notebooks/\1>`"
        lines[:] = [re.sub(r"notebooks/(\w+)\.ipynb", link, line) for line in lines]
    lines[:] = [re.sub(r"(?<![\w`:])(`[^`]+`)(?=[a-z])", r"\1\\ ", line) for line in lines]


def slashes(names: re.Match) -> str:
    return names[0].replace(", ", "/")


def setup(app):
    app.connect("autodoc-process-docstring", mend_docstring, priority=400)
    app.connect("doctree-read", number_title, priority=400)  # before Sphinx collects titles
    app.connect("doctree-read", describe_plots)
    app.connect("doctree-read", add_captions)
    app.connect("autodoc-process-docstring", add_origin)
    app.connect("build-finished", mend_pages)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
