"""Lessons as the site shows them: each exercise as the learner gets it, then its solution, folded."""

import copy

from nbformat import NotebookNode, v4

from minillm.course.making.lesson import BANNER

SOLUTION, GUESS = "solution", "prediction used below"


def merged(learner: NotebookNode, solved: NotebookNode) -> NotebookNode:
    """The solved notebook with its outputs, and before each exercise's code the code that the learner starts with.

    Raises ValueError if the cells of the two notebooks have different ids: they come from different sources.
    """
    ids = [[cell.id for cell in notebook.cells] for notebook in (learner, solved)]
    if ids[0] != ids[1]:
        raise ValueError("a lesson's two notebooks have different cells: run `make notebooks`")
    lesson = copy.deepcopy(solved)
    lesson.cells[0].source = lesson.cells[0].source.removesuffix(BANNER).rstrip()
    lesson.cells = [each for task, cell in zip(learner.cells, lesson.cells, strict=True) for each in _shown(task, cell)]
    return lesson


def _shown(task: NotebookNode, cell: NotebookNode) -> list[NotebookNode]:
    """The cells that stand for one of the solved notebook."""
    if texts := _alternatives(cell):
        cell.metadata["mystnb"] = {"image": {"alt": "; ".join(texts)}}
    if "exercise" not in cell.metadata.get("tags", []):
        return [cell]
    what = SOLUTION if "NotSolvedYet" in task.source else GUESS
    prompts = {"code_prompt_show": f"Show the {what}", "code_prompt_hide": f"Hide the {what}"}
    cell.metadata.setdefault("mystnb", {}).update(prompts)
    cell.metadata["tags"] = [*cell.metadata["tags"], "hide-input"]
    return [v4.new_code_cell(task.source, id=f"{task.id}-task"), cell]


def _alternatives(cell: NotebookNode) -> list[str]:
    """The different text alternatives of a cell's figures."""
    figures = [output for output in cell.get("outputs", []) if "image/png" in output.get("data", {})]
    found = [figure.metadata.get("image/png", {}).get("alt") for figure in figures]
    return [text for text in dict.fromkeys(found) if text]
