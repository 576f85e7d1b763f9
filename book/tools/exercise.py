"""Exercises: a stub the reader fills in, and a check that says what is still missing.

In a notebook an exercise is three cells:

1. markdown: the task, in a `:::{exercise}` directive labelled `ex-NN-k`;
2. code: the stub, `check_name(answer)`, and `attempt(check_name, name)`;
3. markdown: the solution, python blocks inside `<details><summary>Solution</summary>`.

Every stub fails its check (`tests/test_notebooks_static.py` looks at its output), and every solution
passes it (`pytest --nbval` tries them, see conftest.py).
"""

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass


def verdict(check: Callable[[object], None], answer: object) -> str:
    """`passed`, or `not yet:` and the reason the check (or the answer itself) gave."""
    try:
        check(answer)
    except AssertionError as error:
        return f"not yet: {error}"
    except Exception as error:
        return f"not yet: {type(error).__name__}: {error}"
    return "passed"


def attempt(check: Callable[[object], None], answer: object) -> None:
    """Print how far the reader's answer is.

    `check` takes the answer (a function, a class, a value) and raises AssertionError with a
    message that helps as long as something is missing.
    """
    print(verdict(check, answer))


@dataclass
class Exercise:
    """One exercise of a notebook, as the test finds it."""

    label: str  # "ex-03-1"
    cell: str  # id of the stub's cell, which shows the verdict on the stub
    check: str  # name of the check
    answer: str  # name that the stub, and then the solution, defines
    solution: str  # source of the solution


def find_exercises(cells: list, name: str) -> list[Exercise]:
    """The exercises of a notebook in order; ValueError if one does not keep to the form."""
    exercises = []
    for index, cell in enumerate(cells):
        if cell.cell_type != "markdown" or "{exercise}" not in cell.source:
            continue
        if not re.search(r"^:{3,}\{exercise\}", cell.source, re.M):
            raise ValueError(f"{name}: an exercise must be fenced by colons, :::{{exercise}}")
        label = re.search(r"^:label: (ex-\d\d-\d+)$", cell.source, re.M)
        if not label:
            raise ValueError(f"{name}: an exercise without a line `:label: ex-NN-k`")
        where = f"{name}, {label[1]}"
        stub, solution = (*cells[index + 1 : index + 3], None, None)[:2]
        if stub is None or stub.cell_type != "code":
            raise ValueError(f"{where}: the cell below the exercise must be code, with the stub")
        names = attempted(stub.source)
        if names is None:
            raise ValueError(f"{where}: the stub's cell must end with attempt(check_name, name)")
        folded = r"<details>\s*<summary>Solution</summary>\n\n(.*)</details>\s*"
        match = solution is not None and re.fullmatch(folded, solution.source, re.DOTALL)
        blocks = re.findall(r"^```python\n(.*?)^```$", match[1], re.M | re.S) if match else []
        if not blocks or len(blocks) != match[1].count("```python"):
            raise ValueError(
                f"{where}: the stub must be followed by a markdown cell that is all "
                "<details><summary>Solution</summary> and holds ```python blocks, not indented"
            )
        check, answer = names
        solution_code = "\n".join(blocks)
        defined = defined_names(solution_code)
        if answer not in defined or check in defined:
            raise ValueError(f"{where}: the solution must define {answer}, and leave {check} alone")
        exercises.append(Exercise(label[1], stub.id, check, answer, solution_code))
    return exercises


def defined_names(source: str) -> set[str]:
    """Names that source code binds outside of functions and classes."""
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        else:
            names |= {
                part.id
                for part in ast.walk(node)
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
            }
    return names


def attempted(source: str) -> tuple[str, str] | None:
    """(check, answer) of the `attempt(check_name, name)` that ends a cell."""
    last = (ast.parse(source).body or [None])[-1]
    call = getattr(last, "value", None)
    if (
        isinstance(call, ast.Call)
        and ast.unparse(call.func) == "attempt"
        and len(call.args) == 2
        and all(isinstance(argument, ast.Name) for argument in call.args)
    ):
        return call.args[0].id, call.args[1].id
    return None
