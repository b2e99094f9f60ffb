"""Building a learner's notebook from a solved source: stubs, predictions, embedded engine code."""

import ast

import pytest

from minillm.course.making import lesson

CELL = '''\
def plus(a, b):
    """The sum."""
    # SOLUTION: add them
    #   with no loop
    # there is an operator for it
    total = a + b

    return total
    # END


class Store:
    size = 1

    def put(self, what):
        self.kept = what
        # SOLUTION: and count
        self.size += 1
        # END

    def get(self):
        return self.kept
'''
STUBBED = '''\
def plus(a, b):
    """The sum."""
    # Your turn: add them
    #   with no loop
    raise NotSolvedYet("plus")


class Store:
    size = 1

    def put(self, what):
        self.kept = what
        # Your turn: and count
        raise NotSolvedYet("Store.put")

    def get(self):
        return self.kept
'''


def test_a_learner_gets_the_task_and_a_stub_that_names_itself():
    assert lesson.exercise(CELL, lesson.LEARNER) == STUBBED


def test_the_solution_notebook_has_no_build_markers():
    solved = lesson.exercise(CELL, lesson.SOLUTION)
    assert ast.dump(ast.parse(solved)) == ast.dump(ast.parse(CELL))
    assert "    # add them\n    #   with no loop\n    # there is an operator" in solved
    assert "SOLUTION" not in solved and "END" not in solved


def test_predictions_are_left_to_the_learner():
    cell = "guess = 2.0 * 3  # PREDICT: milliseconds\nother = 1\n"
    assert lesson.exercise(cell, lesson.LEARNER) == "guess = None  # your prediction: milliseconds\nother = 1\n"
    assert lesson.exercise(cell, lesson.SOLUTION) == "guess = 2.0 * 3  # your prediction: milliseconds\nother = 1\n"


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ("# %% tags=['exercise']\nx = 1\n", "nothing in it is marked"),
        ("# %% tags=['exercise']\ndef f():\n    # SOLUTION: do\n    return 1\n", "nothing in it is marked"),
        ("# %% tags=['exercise']\n# SOLUTION: do\nx = 1\n# END\n", "outside any function"),
        ("# %%\ndef f():\n    # SOLUTION: do\n    return 1\n    # END\n", "tag the cell `exercise`"),
        ("# %%\nx = 1  # PREDICT: it\n", "tag the cell `exercise`"),
        ("# %%\n# ENGINE: minillm.ops.reference:rms_norm\nx = 1\n", "in a cell of their own"),
        ("# %%\n# ENGINE: minillm.ops.reference:rsm_norm\n", "has no function or class rsm_norm"),
        ("# %%\n# ENGINE: minillm.nowhere:f\n", "there is no module minillm.nowhere"),
        ("# %%\n# ENGINE: torch.nn:Linear\n", "not a module of minillm"),
    ],
)
def test_an_error_in_a_source_is_reported_with_its_cell(cell, problem, tmp_path):
    (tmp_path / "98_trial.py").write_text(f"# %% [markdown]\n# # A trial\n\n{cell}")
    with pytest.raises(lesson.LessonError, match=f"98_trial.py, cell 1: .*{problem}"):
        lesson.convert(tmp_path / "98_trial.py", lesson.LEARNER)


def test_engine_code_is_inserted_with_its_location(tmp_path):
    (tmp_path / "98_trial.py").write_text(
        "# %% [markdown]\n# # A trial\n\n# %%\n# ENGINE: minillm.kv_cache.block_pool:BlockPool.available\n"
        "# ENGINE: minillm.ops.reference:rms_norm\n"
    )
    cell = lesson.convert(tmp_path / "98_trial.py").cells[1]
    assert cell.cell_type == "markdown"
    assert cell.metadata == {
        "engine": ["minillm.kv_cache.block_pool:BlockPool.available", "minillm.ops.reference:rms_norm"]
    }
    assert cell.source.startswith(
        "From `minillm/kv_cache/block_pool.py`:\n\n```python\n@property\ndef available(self) -> int:\n"
    )
    assert "From `minillm/ops/reference.py`:" in cell.source


def test_a_long_listing_is_folded(tmp_path):
    (tmp_path / "98_trial.py").write_text("# %%\n# ENGINE: minillm.course.making.lesson:convert\n")
    text = lesson.convert(tmp_path / "98_trial.py").cells[0].source
    lines = len(lesson.engine_source("minillm.course.making.lesson", "convert").splitlines())
    shown = (
        f"<summary>Show <code>convert</code>, {lines} lines from <code>minillm/course/making/lesson.py</code></summary>"
    )
    assert lines > lesson.LISTING_LINES and text.startswith(f"<details>\n{shown}\n\n```python\ndef convert(")
    assert text.endswith("\n```\n\n</details>")


def test_a_banner_marks_the_solution_notebook(tmp_path):
    (tmp_path / "98_trial.py").write_text(
        "# %% [markdown]\n# # A trial\n\n# %% tags=['exercise']\ng = 1  # PREDICT: it\n"
    )
    learner, solution = (lesson.convert(tmp_path / "98_trial.py", kind) for kind in (lesson.LEARNER, lesson.SOLUTION))
    assert lesson.BANNER not in learner.cells[0].source
    assert lesson.BANNER in solution.cells[0].source
