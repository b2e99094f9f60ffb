"""An exported copy opens in Colab: a badge leads to each lesson, and a cell installs the course, there only."""

import importlib.util
import subprocess
import sys
import types

import nbformat
import pytest

from minillm.course.grading import submission
from minillm.course.making import colab, export
from minillm.errors import ConfigError

REPOSITORY = colab.Repository("ada", "course", "term-2")


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learners") / "copy"
    export.export(folder, repository=REPOSITORY)
    return folder


def cells(copy, folder="notebooks/clean"):
    return {path.name: nbformat.read(path, as_version=4).cells for path in (copy / folder).glob("*.ipynb")}


def test_each_lesson_without_outputs_has_a_badge_below_its_title_and_a_cell_that_installs(copy):
    lessons = cells(export.ROOT)
    assert len(cells(copy)) == len(lessons) > 10
    for name, found in cells(copy).items():
        title, empty, badge, *_ = found[0].source.split("\n")
        assert title.startswith("# ") and not empty
        address = f"https://colab.research.google.com/github/ada/course/blob/term-2/notebooks/clean/{name}"
        assert badge.startswith("[![Open in Colab](") and badge.endswith(f"]({address})")
        assert found[1].source == colab.INSTALL.format(address="https://github.com/ada/course", branch="term-2")
        (before, *others) = lessons[name]
        assert [cell.source for cell in found[2:]] == [cell.source for cell in others]
        assert found[0].source.replace(f"\n{badge}\n", "", 1) == before.source
    for notebook in copy.glob("notebooks/clean/*.ipynb"):
        nbformat.validate(nbformat.read(notebook, as_version=4))
    executed = [cell.source for found in cells(copy, "notebooks").values() for cell in found]
    assert executed and not [each for each in executed if "colab.research" in each or "google.colab" in each]


def test_the_readme_leads_to_both_places(copy):
    third = (copy / "README.md").read_text("utf-8").split("\n")[2]
    assert "/github/ada/course/blob/term-2/notebooks/clean/00_start_here.ipynb)" in third
    assert "https://mybinder.org/v2/gh/ada/course/term-2?urlpath=lab/tree/lab" in third


@pytest.mark.parametrize(
    ("on_colab", "installed", "runs"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_the_cell_installs_the_course_once_and_on_colab_only(copy, monkeypatch, capsys, on_colab, installed, runs):
    commands = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append((command, check)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed or name != "minillm" else None)
    if on_colab:
        monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    source = cells(copy)["00_start_here.ipynb"][1].source
    exec(compile(source, "<cell>", "exec"), {})
    course = "minillm[report] @ git+https://github.com/ada/course@term-2"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", course]
    assert commands == ([(pip, True)] if runs else [])
    assert ("Restart session" in capsys.readouterr().out) == runs


def test_the_cell_is_no_part_of_what_a_learner_defines():
    statements, broken = submission.statements([colab.INSTALL.format(address="https://a", branch="b")], "notebook")
    assert not broken and {name for each in statements for name in each.binds} == {
        "importlib",
        "subprocess",
        "sys",
        "pip",
    }


@pytest.mark.parametrize(
    "address",
    ["https://github.com/ada/course", "https://github.com/ada/course/", "https://github.com/ada/course.git"],
)
def test_an_address_on_github_is_understood(address):
    assert colab.Repository.at(address, "term-2") == REPOSITORY


@pytest.mark.parametrize(
    "address", ["https://gitlab.com/ada/course", "https://github.com/ada", "git@github.com:ada/course.git", ""]
)
def test_another_address_is_refused(address):
    with pytest.raises(ConfigError, match="give https://github.com/OWNER/NAME"):
        colab.Repository.at(address)
