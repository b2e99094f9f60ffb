"""Learners get a copy without solutions, in which lessons run and notebooks are graded."""

import csv
import os
import re
import shutil
import subprocess
import sys

import jupytext
import pytest

from minillm.course.making import build, export
from minillm.errors import ConfigError


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learners") / "copy"
    export.export(folder)
    return folder


def test_the_copy_has_no_solution_source_test_or_mistake(copy):
    paths = {path.relative_to(copy).as_posix() for path in copy.rglob("*")}
    names = {part for path in paths for part in path.split("/")}
    assert not names & {"solutions", "source", "tests", "mutants", "list_mistakes.py", "__pycache__"}
    assert not names & {"mistakes.md", "talking_points.md", "instructors.md", "grading.md"}
    solved = "*The instructor's version: every exercise is solved.*"
    assert not [path for path in copy.rglob("*.ipynb") if solved in path.read_text("utf-8")]
    lessons = [f"{source.stem}.ipynb" for source in build.sources([])]
    assert {f"notebooks/{name}" for name in lessons} | {f"notebooks/clean/{name}" for name in lessons} <= paths
    assert {"Makefile", "pyproject.toml", "requirements.lock", "minillm/cli/__init__.py"} <= paths
    assert (copy / "minillm" / "kernels").is_dir() and (copy / "minillm" / "data" / "tiny-gemma").is_dir()


def test_the_copys_pages_speak_of_nothing_that_it_lacks(copy):
    pages = [page for page in copy.rglob("*.md") if "minillm/data" not in page.as_posix()]
    assert len(pages) > 5
    for page in pages:
        for target in re.findall(r"\]\(([^)\s#:]+)(?:#[^)\s]*)?\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
    readme = (copy / "README.md").read_text("utf-8")
    assert "notebooks/solutions" not in readme and "](docs/extending.md)" in readme and "If you teach" not in readme
    assert set(re.findall(r"(?:^|`)make ([a-z]+)", readme, re.MULTILINE)) == {"demo", "lab", "setup"}


@pytest.mark.proof
def test_a_lesson_runs_and_notebooks_are_graded_in_the_copy(copy, tmp_path):
    """In one process, and the lesson as a script, which is faster than a Jupyter kernel."""
    (path,) = (copy / "notebooks").glob("11_*.ipynb")
    handed_in = {"ada": path, "bo": build.target(build.sources(["11"])[0], "solution")}
    for learner, notebook in handed_in.items():
        (tmp_path / "handed_in" / learner).mkdir(parents=True)
        shutil.copy(notebook, tmp_path / "handed_in" / learner)
    words = ["course", "grade", str(tmp_path / "handed_in"), "--out", str(tmp_path / "table")]
    before = "import minillm\nprint(minillm.__file__)\n"
    after = f"\nfrom minillm.cli import app\napp({words})\n"
    script = tmp_path / "lesson.py"
    script.write_text(before + jupytext.writes(jupytext.read(path), fmt="py:percent") + after, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(copy), "MPLBACKEND": "agg"}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=path.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(str(copy)) and "choose_launch: not solved yet" in done.stdout
    head, ada, bo, _ = csv.reader((tmp_path / "table.csv").open(newline=""))
    count = len(head) - 4
    assert ada == ["ada", *["not attempted"] * count, "0", str(count), ""]
    assert bo == ["bo", *["passed"] * count, str(count), str(count), ""]
    assert (tmp_path / "table.html").exists() and f"{count} passed" in done.stdout


def test_in_the_copy_the_demo_runs_the_learners_notebook(copy, monkeypatch, tmp_path):
    executed = []

    def execute(notebook, folder, started, **environment):
        executed.append((folder, "raise NotSolvedYet" in "\n".join(cell.source for cell in notebook.cells)))
        return notebook

    monkeypatch.setattr(build, "execute", execute)
    monkeypatch.setattr(build, "to_html", lambda notebook, title: "")
    monkeypatch.setattr(build, "ROOT", tmp_path)
    build.demo()
    monkeypatch.setattr(build, "NOTEBOOKS", copy / "notebooks")
    build.demo()
    assert executed[0][0].name == "solutions" and not executed[0][1]
    assert executed[1] == (copy / "notebooks", True)
    with pytest.raises(ConfigError, match="a learners' copy cannot build notebooks"):
        build.sources([])


def test_a_copy_is_written_only_into_a_new_folder_outside_of_what_is_copied(copy, tmp_path):
    with pytest.raises(ConfigError, match="is not empty"):
        export.export(copy)
    with pytest.raises(ConfigError, match="inside a folder that is copied"):
        export.export(export.ROOT / "docs" / "copy")
    with pytest.raises(ConfigError, match="no notebooks to copy"):
        export.export(tmp_path / "new", root=tmp_path)
    assert not (tmp_path / "new").exists()
