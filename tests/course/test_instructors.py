"""The syllabi for instructors agree with the lessons."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "instructors.md").read_text(encoding="utf-8")
HEADING = re.compile(r"^# ## .* · (?:optional, )?(\d+) min$", re.MULTILINE)
SYLLABI = re.findall(r"^### (\w+) hours: .*?\n\n(.*?)\n\n", PAGE, re.MULTILINE | re.DOTALL)
HOURS = {"Two": 2, "Four": 4, "Eight": 8}


def minutes(lesson: str) -> list[int]:
    """The minutes of each section, as its heading says."""
    (source,) = (ROOT / "notebooks" / "source").glob(f"{lesson}_*.py")
    return [int(each) for each in HEADING.findall(source.read_text(encoding="utf-8"))]


def numbers(sections: str) -> list[int]:
    """1, 3-5 -> [1, 3, 4, 5]"""
    spans = [[int(edge) for edge in part.split("-")] for part in sections.split(", ")]
    return [each for first, *last in spans for each in range(first, (last or [first])[0] + 1)]


@pytest.mark.parametrize(("hours", "table"), SYLLABI, ids=[hours for hours, _ in SYLLABI])
def test_a_syllabus_adds_up_and_leaves_time_for_breaks(hours, table):
    *rows, total = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    for lesson, sections, stated, _ in rows:
        known = minutes(lesson)
        assert int(stated) == sum(known[each - 1] for each in numbers(sections)), (lesson, sections)
    assert int(total[2]) == sum(int(row[2]) for row in rows)
    assert 0.7 * 60 * HOURS[hours] <= int(total[2]) <= 0.92 * 60 * HOURS[hours]


def test_all_three_syllabi_are_there():
    assert [hours for hours, _ in SYLLABI] == list(HOURS)
