"""Fixtures shared by the exercise tests."""

import pytest

from minillm.course.grading import earlier
from minillm.course.making import lesson


@pytest.fixture
def defined():
    """The definitions of a lesson's notebook, without running the rest: imports, functions, classes, CONSTANTS.

    A definition that needs other cells, such as a default argument that a cell computes, is left out.
    """

    def define(source, kind: str) -> dict:
        cells = [cell.source for cell in lesson.convert(source, kind).cells if cell.cell_type == "code"]
        return earlier.definitions(cells, source.stem)[0]

    return define
