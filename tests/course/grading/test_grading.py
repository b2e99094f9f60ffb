"""A folder of notebooks becomes one table: by learner and exercise, with a problem for each file that has one."""

import csv
import io
import json
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from minillm.course.grading import grade_table, grading
from minillm.course.grading.grading import Graded, Outcome
from minillm.course.shared import checks
from minillm.errors import ConfigError

LESSONS = {"00": ["rms_norm", "step_work"], "09": ["slots_of"]}


class Judges:
    """Judges that only look whether the word is in the cells."""

    exercises = {name: lesson for lesson, names in LESSONS.items() for name in names}

    def __init__(self, count):
        self.closed = False

    def check(self, exercise, cells, limits):
        text = "\n".join(cells)
        return Outcome("passed", held=2, of=2) if f"{exercise} is right" in text else Outcome("not attempted")

    def close(self): ...


@pytest.fixture
def handed_in(tmp_path, monkeypatch):
    monkeypatch.setattr(grading, "Judges", Judges)

    def hand_in(name, *cells, title=""):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        notebook = v4.new_notebook(cells=[v4.new_markdown_cell(title), *map(v4.new_code_cell, cells)])
        nbformat.write(notebook, path)
        return path

    hand_in.folder = tmp_path
    return hand_in


def test_learners_lessons_and_outcomes_of_a_mixed_folder(handed_in):
    handed_in("bo/whatever.ipynb", "def rms_norm(): ...\n# rms_norm is right")
    handed_in("Ada/deep/09_paged_memory.ipynb", "# slots_of is right")
    handed_in("Ada/.ipynb_checkpoints/old.ipynb", "# rms_norm is right")
    handed_in("00_start_here_cy.ipynb", "x = 1")
    handed_in("dee.ipynb", "x = 1", title="# 09 · Paged memory")
    said = []
    graded = grading.grade(handed_in.folder, said=said.append)
    found = [(each.learner, each.lesson, [o.status for o in each.outcomes.values()]) for each in graded]
    assert found == [
        ("Ada", "09", ["passed"]),
        ("bo", "00", ["passed", "not attempted"]),
        ("cy", "00", ["not attempted", "not attempted"]),
        ("dee", "09", ["not attempted"]),
    ]
    assert "bo/whatever.ipynb: rms_norm passed; step_work not attempted" in said and len(said) == 4


def test_what_a_notebook_defines_decides_over_its_name(handed_in):
    path = handed_in("09_wrong_name.ipynb", "def rms_norm(): ...")
    assert grading.lesson_of(path, grading.read(path)[0], LESSONS) == "00"


def test_a_notebook_with_exercises_of_two_lessons_is_graded_for_both(handed_in):
    handed_in("bo/all.ipynb", "def rms_norm(): ...\ndef step_work(): ...", "def slots_of(): ...\n# slots_of is right")
    said = []
    table = grade_table.GradeTable(grading.grade(handed_in.folder, said=said.append))
    assert table.columns == ["00 rms_norm", "00 step_work", "09 slots_of"]
    assert [each.status for each in table.rows[0].outcomes] == ["not attempted", "not attempted", "passed"]
    assert said[1] == "bo/all.ipynb: slots_of passed"


def test_cells_that_were_copied_with_their_ids_fill_no_screen(handed_in, recwarn):
    path = handed_in("bo/00_start_here.ipynb", "# rms_norm is right", "x = 1")
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.id = "same"
    path.write_text(json.dumps(notebook), encoding="utf-8")
    (found,) = grading.grade(handed_in.folder)
    assert found.outcomes["rms_norm"].status == "passed" and not recwarn.list


def test_a_learner_whose_folder_has_no_notebook_is_in_the_table(handed_in):
    handed_in("bo/00_start_here.IPYNB", "# rms_norm is right")
    for name in ("zed", ".git", "__MACOSX"):
        (handed_in.folder / name).mkdir()
    (handed_in.folder / "zed" / "answers.pdf").write_bytes(b"")
    said = []
    rows = grade_table.GradeTable(grading.grade(handed_in.folder, said=said.append)).rows
    assert [(row.learner, row.passed, row.problems) for row in rows] == [
        ("bo", 1, []),
        ("zed", 0, ["zed: no notebook (*.ipynb) in it"]),
    ]
    assert "zed: no notebook (*.ipynb) in it" in said


def test_folders_next_to_one_learners_notebooks_are_no_learners(handed_in):
    handed_in("00_start_here.ipynb", "x = 1")
    (handed_in.folder / "pictures").mkdir()
    assert len(grading.grade(handed_in.folder)) == 1


def test_a_learners_own_folder_is_one_learner(handed_in):
    path = handed_in("eve/00_start_here.ipynb", "x = 1")
    assert grading.learner_of(path, path.parent) == "eve"


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "{}", '{"nbformat": 4, "cells": 3}', "\xff\0"])
def test_a_file_that_is_no_notebook_has_a_problem_and_the_others_are_graded(text, handed_in):
    handed_in("bo/00_start_here.ipynb", "# rms_norm is right")
    (handed_in.folder / "ada.ipynb").write_text(text, encoding="latin-1")
    first, second = grading.grade(handed_in.folder)
    assert first.problem and first.outcomes == {} and "\n" not in first.problem
    assert second.outcomes["rms_norm"].status == "passed"


def test_a_file_that_cannot_be_read_is_not_one_that_is_missing(handed_in):
    handed_in("bo/00_start_here.ipynb", "# rms_norm is right")
    handed_in("bo/09_paged_memory.ipynb", "x = 1").write_text("{")
    table = grade_table.GradeTable(grading.grade(handed_in.folder))
    assert [each.status for each in table.rows[0].outcomes] == ["passed", "not attempted", "cannot be read"]


@pytest.mark.parametrize(
    ("name", "learner"),
    [
        ("09_paged_memory_jose\u0301.ipynb", "jos\u00e9"),
        ("jose\u0301/09_paged_memory.ipynb", "jos\u00e9"),
        ("09_paged_memory_ada-Copy1.ipynb", "ada"),
        ("09_paged_memory_ada (2).ipynb", "ada"),
        ("ada_09_paged_memory-1.ipynb", "ada"),
    ],
)
def test_copies_and_other_spellings_of_a_name_are_one_learners(name, learner, tmp_path):
    assert grading.learner_of(tmp_path / name, tmp_path) == learner


def test_an_expression_finds_the_learner_in_a_files_name(handed_in):
    for number, lesson in ((51, "00_start_here"), (52, "09_paged_memory")):
        handed_in(f"lovelaceada_{number}21_99{number}_{lesson}.ipynb", "x = 1")
    found = grading.grade(handed_in.folder, learner="^([a-z]+)_")
    assert [(each.learner, each.lesson) for each in found] == [("lovelaceada", "00"), ("lovelaceada", "09")]
    for wrong, said in (("([a-z]+", "not a regular expression"), ("[a-z]+_", "must have one group")):
        with pytest.raises(ConfigError, match=f"--learner .*{said}"):
            grading.grade(handed_in.folder, learner=wrong)


def test_a_huge_file_is_not_read(handed_in):
    with open(handed_in.folder / "ada.ipynb", "wb") as file:
        file.truncate(grading.MOST_BYTES + 1)
    (found,) = grading.grade(handed_in.folder)
    assert "too large: 32 MiB, the limit is 32 MiB" in found.problem


def test_a_notebook_of_no_lesson_has_a_problem(handed_in):
    handed_in("ada.ipynb", "x = 1")
    (found,) = grading.grade(handed_in.folder)
    assert "no lesson recognized" in found.problem


def test_a_folder_without_notebooks_is_an_error(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match="name the"):
            grading.grade(folder)


def test_a_system_that_cannot_confine_code_is_told_so(tmp_path, monkeypatch):
    (tmp_path / "00_start_here.ipynb").write_text("{}")
    monkeypatch.delattr("os.fork")
    with pytest.raises(ConfigError, match="on Windows, use WSL"):
        grading.grade(tmp_path)


@pytest.mark.parametrize(("limits", "name"), [({"seconds": 0}, "--time-limit"), ({"memory_gb": 0.5}, "--memory-gb")])
def test_limits_that_cannot_work_are_refused(limits, name):
    with pytest.raises(ConfigError, match=name):
        grading.Limits(**limits)


# ---- the table

HINT = "it raised ValueError: <b>&\nuse the mean"
GRADED = [
    Graded(Path("a/00.ipynb"), "=ada", "00", {"f": Outcome("failed", "eps", HINT, 1, 3), "g": Outcome("passed")}),
    Graded(Path("a/00.new.ipynb"), "=ada", "00", {"f": Outcome("passed", held=3, of=3), "g": Outcome("timed out")}),
    Graded(Path("b/00.ipynb"), "bo", "00", {"f": Outcome("failed", "eps", HINT, 1, 3, ("gc",)), "g": Outcome("error")}),
    Graded(Path("b/09.ipynb"), "bo", "09", {"h": Outcome("not attempted")}),
    Graded(Path("c/x.ipynb"), "cy<script>", "", {}, "not a notebook"),
]


def test_the_csv_has_a_row_for_each_learner_and_totals():
    rows = list(csv.reader(io.StringIO(grade_table.GradeTable(GRADED).csv())))
    assert rows == [
        ["learner", "00 f", "00 g", "09 h", "passed", "of", "problems"],
        ["'=ada", "passed", "passed", "not handed in", "2", "3", ""],
        [
            "bo",
            "failed: eps: it raised ValueError: <b>&; use the mean: uses gc",
            "error",
            "not attempted",
            "0",
            "3",
            "",
        ],
        ["cy<script>", "not handed in", "not handed in", "not handed in", "0", "3", "x.ipynb: not a notebook"],
        ["passed", "1", "1", "0", "2", "9", "1"],
    ]


def test_the_page_loads_nothing_and_shows_what_learners_wrote_as_text(tmp_path):
    _, path = grade_table.write(GRADED, tmp_path / "new" / "grades.v1")
    page = path.read_text("utf-8")
    assert path.name == "grades.v1.html" and (tmp_path / "new" / "grades.v1.csv").exists()
    assert "<script" not in page and "http" not in page and "src=" not in page
    assert "cy&lt;script&gt;" in page and "&lt;b&gt;&amp;" in page
    assert "<summary>failed: eps (uses gc)</summary>" in page and "1 of 3 properties hold." in page
    assert "<td>00 f</td><td>eps</td><td>1</td>" in page, "the properties that answers lack"


def test_a_pass_whose_code_should_be_read_does_not_look_like_the_others():
    noted = Graded(Path("d/00.ipynb"), "dee", "00", {"f": Outcome("passed", held=3, of=3, notes=("open",))})
    page = grade_table.GradeTable([noted, GRADED[1]]).html()
    assert page.count('<td class="passed noted">') == 1 and page.count('<td class="passed">') == 1


def test_every_exercise_belongs_to_a_lesson():
    from minillm.course.grading import judge

    lessons = {judge._lesson(each) for each in checks.every().values()}
    assert lessons == {path.stem[:2] for path in (grading.PACKAGE.parent / "notebooks").glob("*.ipynb")}
