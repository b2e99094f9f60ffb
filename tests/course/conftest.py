"""Fixtures shared by the exercise tests."""

import ast
from contextlib import suppress

import pytest

from minillm.course import lesson

KINDS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


@pytest.fixture
def defined(tmp_path):
    """The definitions of a lesson's notebook, without running the rest: imports, functions, classes, CONSTANTS.

    They are written to a file, where Triton looks for a kernel's source. A definition that needs other cells, such as a
    default argument that a cell computes, is left out.
    """

    def define(source, kind: str) -> dict:
        kept = []
        for cell in lesson.convert(source, kind).cells:
            for node in ast.parse(cell.source).body if cell.cell_type == "code" else ():
                constant = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
                if isinstance(node, KINDS) or (constant and node.targets[0].id.isupper()):
                    kept.append(node)
        file = tmp_path / f"{source.stem}_{kind}.py"
        file.write_text(ast.unparse(ast.Module(kept, [])), encoding="utf-8")
        names: dict = {"__name__": source.stem}
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            with suppress(NameError):
                exec(compile(ast.Module([node], []), file, "exec"), names)
        return names

    return define
