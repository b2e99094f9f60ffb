"""Read what a notebook's cells define without running the rest, for lesson 99 and the grader.

A notebook is taken as it was saved: its cells in order, and of several definitions of a name the last one.
"""

import ast
import builtins
import linecache
import re
import symtable
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Names = dict[str, Any]
_AROUND = re.compile(r"\A\s*%%(time|timeit|capture)\b.*")  # a command whose cell is Python
# What an exercise does not need, and what an attempt to influence its checker uses.
_REVEALING = {
    "_getframe",
    "currentframe",
    "f_back",
    "f_locals",
    "f_globals",
    "settrace",
    "setprofile",
    "__subclasses__",
}
_REVEALING |= {"ctypes", "gc", "inspect", "importlib", "multiprocessing", "os", "signal", "subprocess", "sys"}
_REVEALING |= {"threading", "eval", "exec", "open", "__import__", "checks", "EXERCISES"}
_REVEALING |= {path.stem for path in Path(__file__).resolve().parents[1].glob("lesson_*/checks*.py")}
_REVEALING |= {"builtins", "glob", "pathlib", "read_text", "write_text", "shutil", "socket", "urllib"}
_REVEALING |= {"getattr", "__globals__", "__builtins__"}
_REVEALING |= {"__eq__", "__ne__", "__bool__", "__getattribute__", "__torch_function__", "__torch_dispatch__"}


@dataclass(frozen=True)
class Statement:
    """A statement at the top level of a cell. file: the cell's name in error messages. cell: its number, from 0."""

    node: ast.stmt
    file: str
    cell: int = 0

    @property
    def binds(self) -> set[str]:
        """The names that the statement gives a value, or changes a part of."""
        return set(_bound(self.node))

    @property
    def mentions(self) -> set[str]:
        """The variables of the notebook that the statement reads, now or when a function of it is called."""
        return set(_read(symtable.symtable(ast.unparse(self.node), self.file, "exec")))


def statements(cells: Sequence[str], name: str) -> tuple[list[Statement], dict[str, SyntaxError]]:
    """The statements of cells of code, and the errors of cells that are not Python, by their source.

    name: of the notebook, for error messages. IPython's commands (`%time`, `!ls`) do nothing.
    """
    found: list[Statement] = []
    broken: dict[str, SyntaxError] = {}
    for count, cell in enumerate(cells, 1):
        file = f"<code cell {count} of {name}>"
        try:
            text = _python(cell)
            nodes = ast.parse(text).body
        except SyntaxError as error:
            broken[cell] = error
            continue
        except (ValueError, RecursionError, MemoryError) as error:  # a null byte, or far too deep
            broken[cell] = SyntaxError(str(error) or type(error).__name__)
            continue
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # Triton reads kernels' sources
        found += [Statement(node, file, count - 1) for node in nodes]
    return found, broken


def _python(cell: str) -> str:
    """A cell's Python; a cell with IPython's commands as IPython translates it."""
    try:
        ast.parse(cell)
        return cell
    except SyntaxError:
        from IPython.core.inputtransformer2 import TransformerManager

        return TransformerManager().transform_cell(_AROUND.sub("", cell))


class _NoShell:
    """Stands in for what IPython's commands call."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **options: None


def needed(every: Sequence[Statement], name: str) -> list[Statement]:
    """The statements that define `name` and, in turn, everything that these mention, in the notebook's order."""
    wanted, open_names = set[int](), {name, "*"}  # *: of `from math import *`
    seen: set[str] = set(dir(builtins))
    while open_names:
        seen |= open_names
        more = {count for count, each in enumerate(every) if each.binds & open_names} - wanted
        wanted |= more
        open_names = {mentioned for count in more for mentioned in every[count].mentions} - seen
    return [each for count, each in enumerate(every) if count in wanted]


def without_stubs(every: Sequence[Statement], name: str) -> list[Statement]:
    """The statements without stubs of `name`, such as one that was copied to try something, if it is defined at all."""
    mine = [each for each in every if isinstance(each.node, ast.FunctionDef | ast.ClassDef) and each.node.name == name]
    stubs = [each for each in mine if "NotSolvedYet" in each.mentions]
    return [each for each in every if each not in stubs] if len(stubs) < len(mine) else list(every)


def run(wanted: Sequence[Statement], name: str) -> tuple[Names, dict[str, str]]:
    """Return what statements define, and the errors of those that failed, in words, by the names that they define.

    name: the module's name. SystemExit is an error like others.
    """
    names: Names = {"__name__": name, "get_ipython": _NoShell}
    errors: dict[str, str] = {}
    for each in wanted:
        try:
            exec(compile(ast.Module([each.node], []), each.file, "exec"), names)
        except (Exception, SystemExit) as error:  # a learner's code can raise anything
            said = f"{type(error).__name__}: {error}"
            errors |= dict.fromkeys(each.binds, f"{said} (in {each.file.strip('<>')}, line {each.node.lineno})")
        else:
            for bound in each.binds:
                errors.pop(bound, None)
    return names, errors


def revealing(wanted: Sequence[Statement], name: str = "") -> list[str]:
    """The names in statements that no exercise needs, but that code which influences its checker would use, sorted.

    name: the exercise's; then also what is imported, taken from a module or inherited under that name, as the engine's
    own solution would be.
    """
    engines = {name, name.removeprefix("My")} - {""}
    found, taken = set[str](), set[str]()
    for node in (node for each in wanted for node in ast.walk(each.node)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
            taken |= engines & {node.attr}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            taken |= engines.intersection(each.id for each in node.bases if isinstance(each, ast.Name))
        elif isinstance(node, ast.Import):
            found |= {part for alias in node.names for part in alias.name.split(".")}
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").rpartition(".")[2], *(alias.name for alias in node.names)}
            taken |= {alias.name for alias in node.names} & {name}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} & _REVEALING  # getattr(x, "__eq__")
    return sorted((found & _REVEALING) | {f"the engine's {each}" for each in taken})


def _read(table: symtable.SymbolTable) -> Iterator[str]:
    """The global names that a scope and those inside it use."""
    top = table.get_type() == "module"
    yield from (each.get_name() for each in table.get_symbols() if (top or each.is_global()) and each.is_referenced())
    for inner in table.get_children():
        yield from _read(inner)


def _bound(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (name for target in targets for name in _targets(target))
    elif isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
        for each in ast.iter_child_nodes(node):
            yield from _bound(each)
        if isinstance(node, ast.For):
            yield from _targets(node.target)
        if isinstance(node, ast.With):
            yield from (name for item in node.items if item.optional_vars for name in _targets(item.optional_vars))
    elif isinstance(node, ast.ExceptHandler):
        for each in node.body:
            yield from _bound(each)


def _targets(target: ast.expr) -> Iterator[str]:
    """The variables of an assignment's target: a and b of `a, b.c[0] = ...`."""
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Attribute | ast.Subscript | ast.Starred):
        yield from _targets(target.value)
    elif isinstance(target, ast.Tuple | ast.List):
        for each in target.elts:
            yield from _targets(each)
