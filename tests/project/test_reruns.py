"""A cell does the same when it runs again after the whole notebook, as it does when an exercise is solved later."""

import dis
from types import CodeType

import pytest

from minillm.course.making import build, lesson

RESTARTED = {"llm", "server"}  # the last part of lesson 99 closes them, and starts them again


def names_of(source: str) -> tuple[set[str], set[str]]:
    """The names that a cell reads before it has written them, and those that it writes."""
    reads: set[str] = set()
    writes: set[str] = set()

    def visit(code: CodeType, outermost: bool) -> None:
        for each in dis.get_instructions(code):
            if each.opname == "STORE_NAME" and outermost:
                writes.add(each.argval)
            elif each.opname in ("LOAD_NAME", "LOAD_GLOBAL") and each.argval not in writes:
                reads.add(each.argval)
            elif isinstance(each.argval, CodeType):
                visit(each.argval, False)

    visit(compile(source, "cell", "exec"), True)
    return reads, writes


def replaced(sources: list[str]) -> list[tuple[int, str]]:
    """(cell, name) for each name that a cell reads from a cell before it, and that a cell after it writes again."""
    cells = [names_of(source) for source in sources]
    return [
        (at, name)
        for at, (reads, _) in enumerate(cells)
        for name in sorted(reads)
        if any(name in writes for _, writes in cells[:at]) and any(name in writes for _, writes in cells[at + 1 :])
    ]


def test_a_name_that_is_used_again_is_found():
    cells = ["found = [1]\ndef show(x):\n    return x", "print(show(found[0]))", "for found in 1, 2:\n    print(found)"]
    assert replaced(cells) == [(1, "found")]
    assert replaced([*cells[:2], "print([found for found in (1, 2)])"]) == []
    assert replaced([cells[0], "def later():\n    return found", cells[2]]) == [(1, "found")]


@pytest.mark.parametrize("kind", (lesson.LEARNER, lesson.SOLUTION))
@pytest.mark.parametrize("source", build.sources([]), ids=lambda path: path.stem)
def test_no_cell_replaces_what_an_earlier_one_still_needs(source, kind):
    cells = lesson.convert(source, kind).cells
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    assert [(code[at], name) for at, name in replaced(code) if name not in RESTARTED] == []
