"""Convert a lesson's source, with solutions, into two notebooks: the learner's and the instructor's.

A source is a jupytext percent script. These lines have a meaning:

    # SOLUTION: the task in a line     up to `# END`: what the learner writes; a stub that raises NotSolvedYet for them
    #   (a second line of the task)
    guess = 2.0  # PREDICT: what of    a prediction; None for the learner
    # ENGINE: module:name              alone in its cell: replaced by the source of that object, folded if it is long

The first two belong in cells tagged `exercise`.
"""

import ast
import importlib.util
import re
import textwrap
from pathlib import Path

import jupytext
from nbformat import NotebookNode, v4

from minillm.errors import MinillmError

PACKAGE = Path(__file__).resolve().parents[2]
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
LEARNER, SOLUTION = "learner", "solution"
KEPT = ("tags", "uncompared")  # a cell's metadata that notebooks keep; uncompared: why outputs may differ
LISTING_LINES = 15  # longer listings of engine source are folded
BANNER = "*The instructor's version: every exercise is solved.*"

_REGION = re.compile(r"^( *)# SOLUTION: (.*\n(?:\1#   .*\n)*)((?:(?!\1# END$).*\n)*?)\1# END$", re.MULTILINE)
_PREDICTION = re.compile(r"^( *\w+ = )(.*?)  # PREDICT: (.*)$", re.MULTILINE)
_ENGINE = re.compile(r"^# ENGINE: ([\w.]+):([\w.]+)$")
_MARK = re.compile(r"# (SOLUTION|END|PREDICT|ENGINE)\b")


class LessonError(MinillmError, ValueError):
    """A lesson's source cannot be built; the message names the cell and the problem."""


def convert(source: Path, kind: str = SOLUTION) -> NotebookNode:
    """A source as a notebook without outputs. Cell ids are numbers in order, so that a rebuild keeps them."""
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
    metadata = {key: cell.metadata[key] for key in KEPT if cell.metadata.get(key)}
    if cell.cell_type == "code" and (shown := _engine_objects(cell.source)):
        text = "\n\n".join(_listing(_shown_path(module), code) for module, _, code in shown)
        names = [f"{module}:{name}" for module, name, _ in shown]
        return v4.new_markdown_cell(text, metadata=metadata | {"engine": names})
    if cell.cell_type == "code":
        if "exercise" in (tags or []):
            cell.source = exercise(cell.source, kind)
        if left := _MARK.search(cell.source):
            way_out = "tag the cell `exercise`, end each SOLUTION with END, keep ENGINE lines in a cell of their own"
            raise LessonError(f"{left[0]!r} has no meaning here: {way_out}")
    cell.metadata = metadata
    return cell


def exercise(source: str, kind: str) -> str:
    """An exercise cell's code, with its solutions or with stubs instead. Raises LessonError."""
    if not (_REGION.search(source) or _PREDICTION.search(source)):
        raise LessonError("tagged `exercise`, but nothing in it is marked SOLUTION or PREDICT")

    def region(found: re.Match[str]) -> str:
        indent, task, solution = found.groups()
        if kind == SOLUTION:
            return f"{indent}# {task}{solution}".rstrip()
        name = _enclosing(source[: found.start()], len(indent))
        return f'{indent}# Your turn: {task}{indent}raise NotSolvedYet("{name}")'

    def prediction(found: re.Match[str]) -> str:
        target, value, what = found.groups()
        mine = value if kind == SOLUTION else "None"
        return f"{target}{mine}  # your prediction: {what}"

    return _PREDICTION.sub(prediction, _REGION.sub(region, source))


def _enclosing(above: str, indent: int) -> str:
    """The name of the function or method that encloses a line with this indentation: `name` or `Class.name`."""
    names: list[str] = []
    for line in reversed(above.splitlines()):
        found = re.match(r"^( *)(?:async )?(?:def|class) (\w+)", line)
        if found and len(found[1]) < indent:
            indent = len(found[1])
            names.insert(0, found[2])
    if not names:
        raise LessonError("a SOLUTION is outside any function: only functions can be exercises")
    return ".".join(names)


def engine_source(module: str, name: str) -> str:
    """The source of `name` ("function" or "Class.method") in a module of minillm, decorators included."""
    node, text = _find(module, name)
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    lines = text.splitlines()[first - 1 : node.end_lineno]
    return textwrap.dedent("\n".join(lines))


def engine_tree(module: str, name: str) -> str:
    """The syntax tree of the same object, for comparison."""
    return syntax_tree(_find(module, name)[0])


def syntax_tree(node: ast.AST) -> str:
    """A tree as text, without the indentation of docstrings."""
    for each in ast.walk(node):
        if isinstance(each, Definition) and (text := ast.get_docstring(each)) is not None:
            each.body[0] = ast.Expr(ast.Constant(text))
    return ast.dump(node)


def _find(module: str, name: str) -> tuple[Definition, str]:
    if not module.startswith("minillm."):
        raise LessonError(f"{module} is not a module of minillm")
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        spec = None
    if spec is None or spec.origin is None:
        raise LessonError(f"there is no module {module}")
    text = Path(spec.origin).read_text(encoding="utf-8")
    body, found = ast.parse(text).body, None
    for part in name.split("."):
        found = next((each for each in body if isinstance(each, Definition) and each.name == part), None)
        body = [] if found is None else found.body
    if found is None:
        raise LessonError(f"{module} has no function or class {name}")
    return found, text


def _engine_objects(source: str) -> list[tuple[str, str, str]]:
    """(module, name, code) for each line of a cell that consists of ENGINE lines; else nothing."""
    lines = [line for line in source.splitlines() if line.strip()]
    found = [match for line in lines if (match := _ENGINE.match(line))]
    if len(found) < len(lines):
        return []
    return [(match[1], match[2], engine_source(match[1], match[2])) for match in found]


def _listing(path: str, code: str) -> str:
    """Engine source in Markdown; a long listing is folded under a line that opens it."""
    block = f"```python\n{code}\n```"
    if (lines := len(code.splitlines())) <= LISTING_LINES:
        return f"From `{path}`:\n\n{block}"
    name = re.search(r"^(?:async )?(?:def|class) (\w+)", code, re.MULTILINE)
    shown = f"<code>{name[1]}</code>, {lines} lines from <code>{path}</code>" if name else f"<code>{path}</code>"
    return f"<details>\n<summary>Show {shown}</summary>\n\n{block}\n\n</details>"


def _shown_path(module: str) -> str:
    path = module.replace(".", "/") + ".py"
    return path.removeprefix("minillm/") if path.startswith("minillm/kernels/") else path
