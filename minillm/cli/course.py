"""`minillm course`: for instructors."""

import os
from pathlib import Path
from typing import Annotated

import typer

from .options import friendly_errors

course_app = typer.Typer(help="Grade learners' notebooks, and make a copy of the course for learners.")


@course_app.callback()
def course() -> None:
    """Grade learners' notebooks, and make a copy of the course for learners."""


@course_app.command()
def grade(
    folder: Annotated[
        Path, typer.Argument(help="The notebooks: LEARNER/09_paged_memory.ipynb, or 09_..._LEARNER.ipynb.")
    ],
    out: Annotated[Path, typer.Option(help="The table: OUT.csv and OUT.html are written.")] = Path("grades"),
    time_limit: Annotated[
        float, typer.Option(help="Most seconds for one exercise; then its processes are ended.")
    ] = 120.0,
    memory_gb: Annotated[float, typer.Option(help="Most GB of memory for one process of an exercise (Linux).")] = 4.0,
    learner: Annotated[
        str | None, typer.Option(help="A regular expression whose group is the learner in a file's name: '^([a-z]+)_'.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Exercises checked at once.  [default: half of the cores]")
    ] = None,
) -> None:
    """Check every exercise in the notebooks that learners handed in; write a table of learners and exercises.

    minillm course grade handed_in --out results/week_3

    It runs the learners' code: docs/grading.md says how it is confined. If you do not trust the learners, run it
    in a container.
    """
    with friendly_errors():
        from minillm.course.grading import grade_table, grading

        limits = grading.Limits(time_limit, memory_gb)
        count = jobs or max(1, (os.cpu_count() or 1) // 2)
        graded = grading.grade(folder, limits, count, said=print, learner=learner)
        table = grade_table.GradeTable(graded)
        print(", ".join(f"{number} {status}" for status, number in table.counts().most_common()) or "nothing graded")
        for path in grade_table.write(graded, out):
            print(path)


@course_app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="The folder to write; it must be new or empty.")],
    repository: Annotated[
        str | None,
        typer.Option(help="https://github.com/OWNER/NAME, where you will publish the copy: lessons get Colab badges."),
    ] = None,
    branch: Annotated[str, typer.Option(help="The branch of that repository.")] = "main",
) -> None:
    """Write a copy of the project for learners: without solutions, lessons' sources and tests.

    minillm course export ../for_learners
    """
    with friendly_errors():
        from minillm.course.making import colab, export

        published = colab.Repository.at(repository, branch) if repository else None
        names = export.export(folder, repository=published)
        print(f"{folder}: {', '.join(names)}")
