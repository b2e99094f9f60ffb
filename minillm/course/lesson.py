"""A lesson's source, solved, and the two notebooks that come of it: the learner's and the instructor's.

In a source, a jupytext percent script, these lines mean something:

    # SOLUTION: the task in a line     up to `# END`: what a learner writes; theirs raises NotSolvedYet there.
    #   (a second line of the task)
    guess = 2.0  # PREDICT: what of    a prediction; theirs is None
    # ENGINE: module:name              alone in its cell: the source of that object, put in from the module

The first two stand in cells tagged `exercise`.
"""

import ast
import importlib.util
import re
import textwrap
from pathlib import Path

import jupytext
from nbformat import NotebookNode, v4

from minillm.errors import MinillmError

PACKAGE = Path(__file__).resolve().parents[1]
LEARNER, SOLUTION = "learner", "solution"
BANNER = "*The instructor's version: every exercise is solved.*"

_REGION = re.compile(r"^( *)# SOLUTION: (.*\n(?:\1#   .*\n)*)((?:(?!\1# END$).*\n)*?)\1# END$", re.MULTILINE)
_PREDICTION = re.compile(r"^( *\w+ = )(.*?)  # PREDICT: (.*)$", re.MULTILINE)
_ENGINE = re.compile(r"^# ENGINE: ([\w.]+):([\w.]+)$")
_MARK = re.compile(r"# (SOLUTION|END|PREDICT|ENGINE)\b")


class LessonError(MinillmError, ValueError):
    """A lesson's source that cannot be built; the message names the cell and what is wrong."""


def convert(source: Path, kind: str = SOLUTION) -> NotebookNode:
    """A source as a notebook without outputs. Ids count the cells, so that a rebuild changes nothing else."""
    notebook = v4.new_notebook(cells=jupytext.read(source).cells)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for count, cell in enumerate(notebook.cells):
        try:
            notebook.cells[count] = cell = _convert_cell(cell, kind)
        except LessonError as error:
            raise LessonError(f"{source.name}, cell {count}: {error}") from None
        cell.id = f"cell-{count}"
    if kind == SOLUTION and any("exercise" in cell.metadata.get("tags", []) for cell in notebook.cells):
        notebook.cells[0].source += f"\n\n{BANNER}"
    return notebook


def _convert_cell(cell: NotebookNode, kind: str) -> NotebookNode:
    tags = cell.metadata.get("tags")
    metadata = {"tags": tags} if tags else {}
    if cell.cell_type == "code" and (shown := _engine_objects(cell.source)):
        text = "\n\n".join(f"From `{_shown_path(module)}`:\n\n```python\n{code}\n```" for module, _, code in shown)
        names = [f"{module}:{name}" for module, name, _ in shown]
        return v4.new_markdown_cell(text, metadata=metadata | {"engine": names})
    if cell.cell_type == "code":
        if "exercise" in (tags or []):
            cell.source = exercise(cell.source, kind)
        if left := _MARK.search(cell.source):
            way_out = "tag the cell `exercise`, end each SOLUTION with END, keep ENGINE lines in a cell of their own"
            raise LessonError(f"{left[0]!r} means nothing here: {way_out}")
    cell.metadata = metadata
    return cell


def exercise(source: str, kind: str) -> str:
    """An exercise cell's code, with its solutions or with stubs in their place. Raises LessonError."""
    if not (_REGION.search(source) or _PREDICTION.search(source)):
        raise LessonError("tagged `exercise`, but nothing in it is marked SOLUTION or PREDICT")

    def region(found: re.Match) -> str:
        indent, task, solution = found.groups()
        if kind == SOLUTION:
            return f"{indent}# {task}{solution}".rstrip()
        name = _enclosing(source[: found.start()], len(indent))
        return f'{indent}# Your turn: {task}{indent}raise NotSolvedYet("{name}")'

    def prediction(found: re.Match) -> str:
        target, value, what = found.groups()
        mine = value if kind == SOLUTION else "None"
        return f"{target}{mine}  # your prediction: {what}"

    return _PREDICTION.sub(prediction, _REGION.sub(region, source))


def _enclosing(above: str, indent: int) -> str:
    """The name of the function or method in which a line with this indentation stands: `name` or `Class.name`."""
    names = []
    for line in reversed(above.splitlines()):
        found = re.match(r"^( *)(?:async )?(?:def|class) (\w+)", line)
        if found and len(found[1]) < indent:
            indent = len(found[1])
            names.insert(0, found[2])
    if not names:
        raise LessonError("a SOLUTION stands in no function: only a function can be left to the learner")
    return ".".join(names)


def engine_source(module: str, name: str) -> str:
    """The source of `name` ("function" or "Class.method") as it stands in a module of minillm, decorators included."""
    node, text = _find(module, name)
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    lines = text.splitlines()[first - 1 : node.end_lineno]
    return textwrap.dedent("\n".join(lines))


def engine_tree(module: str, name: str) -> str:
    """The syntax tree of the same, for comparing."""
    return syntax_tree(_find(module, name)[0])


def syntax_tree(node: ast.AST) -> str:
    """A tree as text, with docstrings' indentation taken out."""
    for each in ast.walk(node):
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(each):
            each.body[0].value.value = ast.get_docstring(each)
    return ast.dump(node)


def _find(module: str, name: str) -> tuple[ast.AST, str]:
    if not module.startswith("minillm."):
        raise LessonError(f"{module} is no module of minillm")
    try:
        text = Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")
    except (ImportError, AttributeError):
        raise LessonError(f"there is no module {module}") from None
    node = ast.parse(text)
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        node = next((each for each in node.body if isinstance(each, kinds) and each.name == part), None)
        if node is None:
            raise LessonError(f"{module} has no function or class {name}")
    return node, text


def _engine_objects(source: str) -> list[tuple[str, str, str]]:
    """(module, name, code) for each line of a cell that consists of ENGINE lines."""
    lines = [line for line in source.splitlines() if line.strip()]
    found = [_ENGINE.match(line) for line in lines]
    if not lines or not all(found):
        return []
    return [(*each.groups(), engine_source(*each.groups())) for each in found]


def _shown_path(module: str) -> str:
    path = module.replace(".", "/") + ".py"
    return path.removeprefix("minillm/") if path.startswith("minillm/kernels/") else path
