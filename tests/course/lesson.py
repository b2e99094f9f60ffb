"""A lesson's words and what its cells print, for tests that hold the numbers in the words."""

import functools
import re

import nbformat

from minillm.course.making import build
from minillm.course.making.lesson import LEARNER, SOLUTION


class Lesson:
    """The Markdown of a lesson and the output of its committed notebook, each as one text.

    number: its first characters ("09"). kind: which of its two notebooks.
    """

    def __init__(self, number: str, kind: str = SOLUTION):
        (source,) = build.sources([number])
        cells = nbformat.read(build.target(source, kind), as_version=4).cells
        self.words = " ".join(" ".join(cell.source for cell in cells if cell.cell_type == "markdown").split())
        outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
        self.captions = " ".join(each.data["text/plain"] for each in outputs if "text/html" in each.get("data", {}))
        self.printed = "".join(each.text for each in outputs if each.output_type == "stream")

    def says(self, *sentences: str) -> None:
        """Fail unless each of these is in the lesson's words or captions: a sentence that changes needs its test."""
        for each in sentences:
            assert each in self.words or each in self.captions, f"the lesson no longer says: {each}"

    def numbers(self, pattern: str) -> tuple[float, ...]:
        """The numbers in the groups of a pattern; it may match several times, if the numbers are the same."""
        found = {match.groups() for match in re.finditer(pattern, self.printed, re.MULTILINE)}
        assert len(found) == 1, f"{pattern} matches {len(found)} different lines"
        return tuple(float(each.replace(",", "")) for each in found.pop())

    def number(self, pattern: str) -> float:
        (found,) = self.numbers(pattern)
        return found


solved = functools.cache(Lesson)
KINDS = (LEARNER, SOLUTION)
