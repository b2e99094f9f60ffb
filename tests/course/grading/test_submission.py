"""What a notebook defines for one exercise, and nothing else of it, is run."""

import pytest

from minillm.course.grading import submission


def names_of(cells, name):
    every, _ = submission.statements(cells, "a notebook")
    return submission.run(submission.needed(every, name), "a notebook")


def test_only_what_the_exercise_needs_is_run():
    ran = []
    cells = [
        "import math\nfrom os import path",
        "factor = 2\nother = missing",
        "table = {}\nfor each in range(3):\n    table[each] = each * factor",
        "def helper(x):\n    other = x\n    return table[other]",
        "def wanted(x):\n    return math.floor(helper(x))",
        "wanted(1)\nran.append(1)",
    ]
    names, errors = names_of(cells, "wanted")
    assert names["wanted"](2) == 4 and errors == {} and ran == []
    assert "path" not in names and "other" not in names, "a local variable is not the notebook's of the same name"


def test_names_of_a_star_import_are_found():
    assert names_of(["from math import *", "def wanted(x):\n    return floor(x)"], "wanted")[0]["wanted"](1.5) == 1


def test_the_last_definition_counts():
    names, _ = names_of(["def wanted():\n    return 1", "def wanted():\n    return 2"], "wanted")
    assert names["wanted"]() == 2


def test_a_stub_that_was_copied_does_not_count():
    cells = ["def wanted():\n    return 1", "def wanted():\n    raise NotSolvedYet('wanted')"]
    for order in (cells, cells[::-1]):
        every = submission.without_stubs(submission.statements(order, "n")[0], "wanted")
        assert submission.run(submission.needed(every, "wanted"), "n")[0]["wanted"]() == 1
    alone, _ = submission.statements(cells[1:], "n")
    assert submission.without_stubs(alone, "wanted") == alone


def test_cells_that_are_not_python_and_commands_are_passed_over():
    cells = ["!ls", "%%time\ndef wanted():\n    %time\n    return 3", "def broken(:", "a = '\0'"]
    every, broken = submission.statements(cells, "a notebook")
    assert list(broken) == cells[2:]
    assert submission.run(submission.needed(every, "wanted"), "n")[0]["wanted"]() == 3


@pytest.mark.parametrize("text", ["import nothing_like_it as wanted", "import sys\nwanted = sys.exit(1)"])
def test_a_statement_that_fails_is_reported_with_its_place(text):
    names, errors = names_of(["x = 1", text], "wanted")
    assert "wanted" not in names
    assert errors["wanted"].endswith(f"(in code cell 2 of a notebook, line {len(text.splitlines())})")


def test_an_error_names_the_line_of_its_cell():
    names, _ = names_of(["x = 1", "\n\ndef wanted():\n    # a comment\n    return 1 / 0"], "wanted")
    with pytest.raises(ZeroDivisionError) as found:
        names["wanted"]()
    assert found.traceback[-1].lineno == 5 - 1 and found.traceback[-1].path != __file__


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def wanted():\n    return sum([1])", []),
        ("from minillm.course.lesson_11.graph_sizes import padded_ms\ndef wanted():\n    return padded_ms", []),
        ("def wanted():\n    import gc, os.path\n    return getattr(gc, '__eq__')", ["__eq__", "gc", "getattr", "os"]),
        ("from minillm.course.shared.adapters import wanted", ["the engine's wanted"]),
        ("from minillm.course.shared.adapters import wanted as w\nwanted = w", ["the engine's wanted"]),
        ("from minillm.course.lesson_99 import serving\nwanted = serving.wanted", ["the engine's wanted"]),
        ("def wanted(n):\n    return n and wanted(n - 1)", []),
        (
            "from minillm.course.shared import checks\ndef wanted():\n    return checks.EXERCISES",
            ["EXERCISES", "checks"],
        ),
        ("from minillm.course.lesson_11.checks import least_ms\ndef wanted():\n    return least_ms", ["checks"]),
        ("from minillm.course.lesson_09 import checks_keys\ndef wanted():\n    return checks_keys", ["checks_keys"]),
        ("class Yes:\n    def __eq__(self, other): ...\ndef wanted():\n    return Yes()", ["__eq__"]),
    ],
)
def test_names_that_no_exercise_needs_are_noted(text, found):
    every, _ = submission.statements([text], "a notebook")
    assert submission.revealing(submission.needed(every, "wanted"), "wanted") == found


def test_a_class_that_is_the_engines_under_the_learners_name_is_noted():
    text = "from minillm.kv_cache.block_pool import BlockPool\nclass MyBlockPool(BlockPool): pass"
    every, _ = submission.statements([text], "a notebook")
    assert submission.revealing(submission.needed(every, "MyBlockPool"), "MyBlockPool") == ["the engine's BlockPool"]


@pytest.mark.parametrize(
    "cell",
    [
        "def wanted(a, b):\n    return (a\n        % b)",
        "%load_ext autoreload\ndef wanted(a, b):\n    return a % b",
        "def wanted(a, b):\n    return a % b\nwanted?",
        "?wanted\ndef wanted(a, b):\n    return a % b",
        "def wanted(a, b):\n    return a % b\nt = %timeit -o wanted(7, 4)",
        "files = !ls\ndef wanted(a, b):\n    return a % b",
        "%%time\ndef wanted(a, b):\n    return a % b",
        "%%capture said\n\ndef wanted(a, b):\n    return a % b",
    ],
)
def test_what_a_notebook_may_have_around_a_definition_is_no_error(cell):
    names, errors = names_of([cell], "wanted")
    assert names["wanted"](7, 4) == 3 and not errors
