"""Estimate how long a lesson takes, section by section, and compare with what its headings say.

    python tools/lesson_minutes.py             every lesson, a line each
    python tools/lesson_minutes.py 03 09       the sections of these lessons

The estimate: `WORDS` words of prose, `LINES` lines of visible code or `PREDICTIONS` predictions a minute, plus the
minutes that each exercise states ("**Exercise 2 (10 minutes).**"). Folded listings do not count. The rates were chosen
to agree with what trial readers needed. A heading states its section's minutes ("## 3 · GeGLU · 15 min"); one that
contains "optional" is left out of the lesson's sum, which its first cell states ("**75 minutes.").
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from minillm.course.making import build  # noqa: E402
from minillm.course.making.lesson import LEARNER, convert  # noqa: E402

WORDS, LINES, PREDICTIONS = 130, 10, 2.2
_HEADING = re.compile(r"^##? (.*?)(?: · (\d+) min)?$", re.MULTILINE)
_EXERCISE = re.compile(r"\*\*Exercise \d+ \((\d+) minutes\)")
_TOTAL = re.compile(r"\*\*(\d+) minutes\b")


@dataclass
class Section:
    """A section of a lesson. stated: the minutes in its heading, None without."""

    title: str
    stated: int | None
    words: int = 0
    lines: int = 0
    predictions: int = 0
    exercises: int = 0

    @property
    def minutes(self) -> float:
        return self.words / WORDS + self.lines / LINES + self.predictions / PREDICTIONS + self.exercises

    @property
    def optional(self) -> bool:
        return "optional" in self.title.lower()


def sections(source: Path) -> list[Section]:
    """A lesson's sections in order, as the learner's notebook has them; the first is what stands before any heading."""
    found: list[Section] = []
    for cell in convert(source, LEARNER).cells:
        if cell.cell_type == "code":
            found[-1].lines += sum(bool(line.strip()) for line in cell.source.splitlines())
            found[-1].predictions += cell.source.count("# your prediction: ")
            continue
        begin = 0
        for heading in _HEADING.finditer(cell.source):
            if found:
                _count(found[-1], cell.source[begin : heading.start()])
            found.append(Section(heading[1], int(heading[2]) if heading[2] else None))
            begin = heading.end()
        _count(found[-1], cell.source[begin:])
    return found


def _count(section: Section, text: str) -> None:
    text = re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)
    for block in re.findall(r"```.*?```", text, re.DOTALL):
        section.lines += block.count("\n") - 1
    section.words += len(re.sub(r"```.*?```", "", text, flags=re.DOTALL).split())
    section.exercises += sum(int(minutes) for minutes in _EXERCISE.findall(text))


def stated(source: Path) -> int:
    """The minutes in a lesson's first cell."""
    found = _TOTAL.search(convert(source, LEARNER).cells[0].source)
    if found is None:
        raise ValueError(f"{source.name}: the first cell states no minutes")
    return int(found[1])


def main() -> None:
    for source in build.sources(sys.argv[1:]):
        every = sections(source)
        needed = [each for each in every if not each.optional]
        total = sum(each.minutes for each in needed)
        print(
            f"{source.stem:<28} estimate {total:4.0f}   headings {sum(each.stated or 0 for each in needed):4d}", end=""
        )
        print(f"   first cell {stated(source):4d}")
        for each in every if sys.argv[1:] else ():
            size = f"{each.words:5d} words {each.lines:4d} lines {each.predictions:2d} predictions"
            print(f"    {each.minutes:5.1f}  {each.stated or '':>3}  {size}  {each.title}")


if __name__ == "__main__":
    main()
