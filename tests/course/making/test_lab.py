"""A learner's copies carry no outputs, are kept up to date, and never lose what a learner changed."""

import nbformat
import pytest
from nbformat import v4

from minillm.course.making import lab
from minillm.course.making.build import NOTEBOOKS


@pytest.fixture
def folders(tmp_path):
    (tmp_path / "notebooks").mkdir()
    lesson(tmp_path, "guess = None", "print(1)")
    return tmp_path / "notebooks", tmp_path / "lab"


def lesson(place, *sources):
    """Write an executed lesson of these cells."""
    outputs = [v4.new_output("stream", text="1\n")]
    cells = [v4.new_code_cell(source, outputs=outputs, execution_count=3) for source in sources]
    nbformat.write(v4.new_notebook(cells=cells), place / "notebooks" / "00_a.ipynb")


def edit(path, source):
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[0].source = source
    nbformat.write(notebook, path)


def sources(path):
    return [cell.source for cell in nbformat.read(path, as_version=4).cells]


def test_copies_of_the_lessons_have_no_outputs(tmp_path):
    said = list(lab.copy(NOTEBOOKS, tmp_path / "lab"))
    copies = sorted((tmp_path / "lab").glob("*.ipynb"))
    assert [path.name for path in copies] == sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))
    assert said == [f"{path.name} copied" for path in copies]
    for path in copies:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert cells and not any(cell.outputs or cell.execution_count for cell in cells)


def test_an_unchanged_lesson_leaves_its_copy_as_it_is(folders):
    list(lab.copy(*folders))
    mine = folders[1] / "00_a.ipynb"
    edit(mine, "guess = 5")
    assert list(lab.copy(*folders)) == [] and sources(mine)[0] == "guess = 5"


def test_a_corrected_lesson_replaces_a_copy_that_was_only_run(folders, tmp_path):
    list(lab.copy(*folders))
    mine = folders[1] / "00_a.ipynb"
    notebook = nbformat.read(mine, as_version=4)
    notebook.cells[1].outputs, notebook.cells[1].execution_count = [v4.new_output("stream", text="1")], 1
    nbformat.write(notebook, mine)
    lesson(tmp_path, "guess = None", "print(2)")
    (said,) = lab.copy(*folders)
    assert "replaced" in said and sources(mine) == ["guess = None", "print(2)"]
    assert [path.name for path in folders[1].glob("*.ipynb")] == ["00_a.ipynb"]


def test_a_corrected_lesson_lies_beside_each_copy_that_a_learner_changed(folders, tmp_path):
    list(lab.copy(*folders))
    mine, new, newer = (folders[1] / f"00_a{more}.ipynb" for more in ("", ".new", ".new2"))
    edit(mine, "guess = 5")
    lesson(tmp_path, "guess = None", "print(2)")
    (said,) = lab.copy(*folders)
    assert "Your changes are kept" in said and new.name in said
    assert sources(mine) == ["guess = 5", "print(1)"] and sources(new) == ["guess = None", "print(2)"]
    lesson(tmp_path, "guess = None", "print(3)")
    list(lab.copy(*folders))
    assert sources(new) == ["guess = None", "print(3)"], "it was not changed"
    edit(new, "guess = 6")
    lesson(tmp_path, "guess = None", "print(4)")
    list(lab.copy(*folders))
    assert [sources(path) for path in (mine, new, newer)] == [
        ["guess = 5", "print(1)"],
        ["guess = 6", "print(3)"],
        ["guess = None", "print(4)"],
    ]


@pytest.mark.parametrize("text", ["", "no notebook", "{}"])
def test_a_file_that_is_no_notebook_is_kept(folders, text):
    folders[1].mkdir()
    mine = folders[1] / "00_a.ipynb"
    mine.write_text(text)
    list(lab.copy(*folders))
    assert mine.read_text() == text and sources(folders[1] / "00_a.new.ipynb") == ["guess = None", "print(1)"]


@pytest.mark.parametrize("digests", [None, "{", "[]"])
def test_an_equal_copy_keeps_its_outputs_even_if_the_digests_are_lost(folders, digests):
    list(lab.copy(*folders))
    mine = folders[1] / "00_a.ipynb"
    notebook = nbformat.read(mine, as_version=4)
    notebook.cells[1].outputs = [v4.new_output("stream", text="mine")]
    nbformat.write(notebook, mine)
    (folders[1] / lab.COPIES).unlink() if digests is None else (folders[1] / lab.COPIES).write_text(digests)
    assert list(lab.copy(*folders)) == []
    assert nbformat.read(mine, as_version=4).cells[1].outputs[0].text == "mine"


def test_a_copy_from_before_digests_were_kept_counts_as_changed(folders):
    folders[1].mkdir()
    mine = folders[1] / "00_a.ipynb"
    nbformat.write(v4.new_notebook(cells=[v4.new_code_cell("older")]), mine)
    list(lab.copy(*folders))
    assert sources(mine) == ["older"] and (folders[1] / "00_a.new.ipynb").exists()
