"""Instructors have a talking point for each prediction that a lesson asks for, and for nothing else."""

import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "talking_points.md").read_text(encoding="utf-8")
LONGEST = 60  # words in an entry: to be read at a glance, in class
PREDICTION = re.compile(r"^ *(\w+) = .*# PREDICT\b", re.MULTILINE)
PARTS = (r"section (\d+)\.", r".+ \*\*Answer:\*\*", r".+ \*\*Guess:\*\*", r".+ \*\*Say:\*\*", ".+")
ENTRY = re.compile(r"\* \*\*`(\w+)`\*\*, " + " ".join(PARTS))
HEADING = re.compile(r"^# ## .* · (?:optional, )?\d+ min$", re.MULTILINE)
SOURCES = sorted((ROOT / "notebooks" / "source").glob("*.py"))
LESSONS = {path.name.split("_")[0]: path.read_text(encoding="utf-8") for path in SOURCES}


def asked(source: str) -> list[tuple[str, int]]:
    """Each prediction's variable, and its section counted from 1, in order."""
    return [(match[1], len(HEADING.findall(source, 0, match.start()))) for match in PREDICTION.finditer(source)]


def entries(lesson: str) -> list[tuple[str, int, str]]:
    """Each entry's variable, section and text, in order."""
    (part,) = re.findall(rf"^## {lesson} · .*?(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    found = [ENTRY.fullmatch(" ".join(each.split())) for each in part.strip().split("\n\n")[1:]]
    assert all(found), f"lesson {lesson} has a paragraph that is not an entry"
    return [(match[1], int(match[2]), match[0]) for match in found]


def printed(notebook: Path) -> str:
    """A notebook's Markdown, and the text that its cells printed or returned: no code, pictures or tables' markup."""
    found = []
    for cell in nbformat.read(notebook, as_version=4).cells:
        found += [cell.source] if cell.cell_type == "markdown" else []
        found += [each.get("text") or each.get("data", {}).get("text/plain", "") for each in cell.get("outputs", [])]
    return "\n".join(found)


@pytest.mark.parametrize("lesson", LESSONS)
def test_each_prediction_of_a_lesson_has_an_entry_with_its_section(lesson):
    known = asked(LESSONS[lesson])
    assert known, "every lesson asks for a prediction"
    assert [(name, section) for name, section, _ in entries(lesson)] == known


@pytest.mark.parametrize("lesson", LESSONS)
def test_each_figure_of_an_answer_is_in_the_solved_lesson(lesson):
    (path,) = (ROOT / "notebooks" / "solutions").glob(f"{lesson}_*.ipynb")
    shown = printed(path)
    for name, _, text in entries(lesson):
        answer = text.split("**Answer:**")[1].split("**Guess:**")[0]
        for figure in re.findall(r"\d[\d,]*(?:\.\d+)?(?<!,)", answer):
            assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?!\d|[.,]\d)", shown), (name, figure)


@pytest.mark.parametrize("lesson", LESSONS)
def test_an_entry_is_short_enough_to_read_in_class(lesson):
    for name, _, text in entries(lesson):
        assert len(re.findall(r"\w\S*", text)) <= LONGEST, name


def test_every_prediction_that_a_lesson_compares_is_marked_in_its_source():
    for lesson, source in LESSONS.items():
        assert set(re.findall(r"\bguess_\w+", source)) <= {name for name, _ in asked(source)}, lesson


def test_the_page_names_no_lesson_that_does_not_exist():
    assert re.findall(r"^## (\S+)", PAGE, re.MULTILINE) == list(LESSONS)
