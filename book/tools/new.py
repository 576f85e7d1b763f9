"""Start a chapter from the template.

`python -m book.tools new NN_name`
"""

import argparse
import string
from pathlib import Path

from nbformat import NotebookNode, writes
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from book.tools.export import ROOT, check_name, find_notebooks
from book.tools.refresh import normalise

TEMPLATE = Path(__file__).with_name("template.md")


def chapter_from_template(name: str) -> NotebookNode:
    """The notebook of chapter `NN_name`: every section of a chapter, each with a line on its use.

    The template separates cells by a line `+++ markdown` or `+++ code TAG ...`.
    """
    number, module = name.split("_", 1)
    title = module.replace("_", " ").capitalize()
    text = string.Template(TEMPLATE.read_text(encoding="utf-8"))
    text = text.substitute(number=number, name=module, title=title)
    notebook = new_notebook()
    for part in text.split("+++ ")[1:]:
        header, _, source = part.partition("\n")
        kind, *tags = header.split()
        make = new_code_cell if kind == "code" else new_markdown_cell
        metadata = {"tags": tags} if tags else {}
        notebook.cells.append(make(source.rstrip("\n"), metadata=metadata))
    normalise(notebook, int(number))
    return notebook


def new(name: str, root: Path = ROOT) -> Path:
    """Write `notebooks/NN_name.ipynb`; ValueError if the name is malformed or taken."""
    check_name(name)
    number, module = name.split("_", 1)
    for taken in find_notebooks(root):
        if taken.name.startswith(f"{number}_") or taken.stem[3:] == module:
            raise ValueError(f"{name}: the number or the name is taken by {taken.name}")
    path = root / "notebooks" / f"{name}.ipynb"
    path.write_text(writes(chapter_from_template(name)) + "\n", encoding="utf-8", newline="\n")
    return path


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m book.tools new", description=__doc__)
    parser.add_argument("name", metavar="NN_name", help="04_block_pool")
    try:
        path = new(parser.parse_args(arguments).name)
    except ValueError as error:
        parser.error(str(error))
    print(f"{path.relative_to(ROOT)}: write it, list it in book/_toc.yml, then export and refresh")
    return 0
