"""Fixtures shared by the exercise tests."""

import functools
from pathlib import Path

import pytest

from minillm.course.grading import earlier
from minillm.course.making import lesson


@pytest.fixture
def defined():
    """The definitions of a lesson's notebook, without running the rest: imports, functions, classes, CONSTANTS.

    A definition that needs other cells, such as a default argument that a cell computes, is left out.
    """

    def define(source, kind: str) -> dict:
        return earlier.definitions(code_cells(source, kind), source.stem)[0]

    return define


@functools.cache
def code_cells(source: Path, kind: str) -> list[str]:
    """A lesson has several exercises: its cells are read once."""
    return [cell.source for cell in lesson.convert(source, kind).cells if cell.cell_type == "code"]
