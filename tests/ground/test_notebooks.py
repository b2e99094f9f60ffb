"""Committed notebooks are what their sources say, ran from top to bottom, and mean what they show."""

import json
from pathlib import Path

import nbformat
import pytest

from minillm.course import build

ROOT = Path(__file__).resolve().parents[2]
BUILT = sorted((ROOT / "notebooks").glob("*.ipynb"))
UNCOMPARED = {"nbval-ignore-output", "nbval-skip"}


@pytest.fixture(params=BUILT, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def code(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_every_source_has_its_notebook_and_none_is_without_a_source():
    assert [path.stem for path in BUILT] == [path.stem for path in build.sources([])]


@pytest.mark.parametrize("source", build.sources([]), ids=lambda path: path.stem)
def test_a_notebook_is_its_source(source):
    committed = nbformat.read(ROOT / "notebooks" / f"{source.stem}.ipynb", as_version=4)
    rebuilt = build.convert(source)
    assert [cell.source for cell in committed.cells] == [cell.source for cell in rebuilt.cells], "run make notebooks"
    assert [cell.metadata for cell in committed.cells] == [cell.metadata for cell in rebuilt.cells]


def test_every_code_cell_ran_once_from_the_top(notebook):
    """nbval compares only cells with an execution count: without them it would pass and check nothing."""
    counts = [cell.execution_count for cell in code(notebook)]
    assert counts == list(range(1, len(counts) + 1))


def test_no_cell_shows_an_error_or_a_warning(notebook):
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]


def test_a_cell_that_is_not_compared_says_why(notebook):
    for cell in code(notebook):
        if UNCOMPARED & set(cell.metadata.get("tags", [])):
            assert cell.source.startswith("# Not compared: "), cell.source


def test_most_cells_that_show_something_are_compared(notebook):
    shown = [cell for cell in code(notebook) if cell.outputs]
    compared = [cell for cell in shown if not UNCOMPARED & set(cell.metadata.get("tags", []))]
    assert len(compared) >= 0.7 * len(shown)


def test_outputs_name_no_folder_of_the_machine_that_ran_them(notebook):
    text = json.dumps([cell.outputs for cell in code(notebook)])
    assert str(Path.home()) not in text
    assert "site-packages" not in text
