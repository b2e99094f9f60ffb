"""The table of what learners handed in, as CSV and as one HTML page: a row for each learner, a column an exercise."""

import csv
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .grading import Graded, Outcome

MISSING = Outcome("not handed in")
PASSED = "passed"
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet would compute a cell that begins like this

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Grades</title>
<style>
body { font: 15px/1.4 system-ui, sans-serif; margin: 2rem; color: #222; background: #fff }
table { border-collapse: collapse; margin: 1rem 0 2rem }
th, td { border: 1px solid #bbb; padding: .3rem .5rem; text-align: left; vertical-align: top; max-width: 20rem }
thead th { position: sticky; top: 0; background: #eee; z-index: 1 }
tbody th, tfoot th { position: sticky; left: 0; background: #fff; box-shadow: 1px 0 #bbb }
td.passed { background: #d9f0dd } td.passed.noted { background: #f7f0b5 } td.failed { background: #fbe3c0 }
td.error, td.timed-out, td.cannot-be-read { background: #f6cfcf } td.not-attempted, td.not-handed-in { color: #666 }
summary { cursor: pointer } p.said { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0 0 }
</style>
<h1>Grades</h1>
<p>{{ totals.learners }} learners, {{ totals.notebooks }} notebooks: {% for status, count in totals.counts %}
{{ "{:,}".format(count) }} {{ status }}{{ ", " if not loop.last else "." }}{% endfor %}</p>
<table>
<thead><tr><th>learner</th>{% for column in columns %}<th>{{ column }}</th>{% endfor %}<th>passed</th></tr></thead>
<tbody>
{% for row in rows %}
<tr><th>{{ row.learner }}</th>
{% for outcome in row.outcomes %}<td class="{{ outcome.status.replace(' ', '-') }}{{ " noted" if outcome.notes }}">
{% if outcome.said or outcome.property or outcome.notes %}<details><summary>{{ outcome.status }}
{%- if outcome.property %}: {{ outcome.property }}{% endif %}
{%- if outcome.notes %} (uses {{ outcome.notes | join(", ") }}){% endif %}</summary>
{% if outcome.of %}<p>{{ outcome.held }} of {{ outcome.of }} properties hold.</p>{% endif %}
<p class="said">{{ outcome.said }}</p></details>{% else %}{{ outcome.status }}{% endif %}</td>
{% endfor %}<td>{{ row.passed }} of {{ columns | length }}</td></tr>
{% endfor %}
</tbody>
<tfoot><tr><th>passed</th>{% for count in passed %}<td>{{ count }} of {{ rows | length }}</td>{% endfor %}
<td></td></tr></tfoot>
</table>
{% if failures %}
<h2>The properties that most learners' answers lack</h2>
<table><thead><tr><th>exercise</th><th>property</th><th>learners</th></tr></thead><tbody>
{% for (column, property), count in failures %}
<tr><td>{{ column }}</td><td>{{ property }}</td><td>{{ count }}</td></tr>{% endfor %}
</tbody></table>
{% endif %}
{% if problems %}
<h2>Notebooks that could not be graded</h2>
<table><thead><tr><th>learner</th><th>notebook</th><th>problem</th></tr></thead><tbody>
{% for each in problems %}<tr><td>{{ each.learner }}</td><td>{{ each.path.name }}</td><td>{{ each.problem }}</td></tr>
{% endfor %}</tbody></table>
{% endif %}
</html>
"""


@dataclass(frozen=True)
class Row:
    """A learner's outcomes, one for each column; problems: of notebooks that could not be graded."""

    learner: str
    outcomes: list[Outcome]
    problems: list[str]

    @property
    def passed(self) -> int:
        """Return how many exercises the learner solved."""
        return sum(outcome.status == PASSED for outcome in self.outcomes)


class GradeTable:
    """Learners by exercises. Of a learner's several notebooks of a lesson, the best outcome of each exercise counts."""

    def __init__(self, graded: Sequence[Graded]):
        self.graded = graded
        pairs = {(each.lesson, name): None for each in sorted(graded, key=lambda g: g.lesson) for name in each.outcomes}
        self.columns = [f"{lesson} {name}" for lesson, name in pairs]
        self.rows = [self._row(learner, list(pairs)) for learner in dict.fromkeys(each.learner for each in graded)]

    def _row(self, learner: str, pairs: list[tuple[str, str]]) -> Row:
        mine = [each for each in self.graded if each.learner == learner]
        outcomes = []
        for lesson, name in pairs:
            found = [each.outcomes[name] for each in mine if each.lesson == lesson and name in each.outcomes]
            outcomes.append(max(found, key=lambda each: (each.status == PASSED, each.held), default=MISSING))
        return Row(learner, outcomes, [f"{each.path.name}: {each.problem}" for each in mine if each.problem])

    @property
    def passed(self) -> list[int]:
        """Return how many learners solved the exercise of each column."""
        return [sum(row.outcomes[place].status == PASSED for row in self.rows) for place in range(len(self.columns))]

    def counts(self) -> Counter[str]:
        """Return how many outcomes have each status."""
        return Counter(outcome.status for row in self.rows for outcome in row.outcomes)

    def csv(self) -> str:
        """The table as comma-separated values; the last row has the totals."""
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(["learner", *self.columns, "passed", "of", "problems"])
        for row in self.rows:
            cells = [row.learner, *map(_words, row.outcomes), row.passed, len(self.columns), "; ".join(row.problems)]
            rows.writerow([_inert(cell) for cell in cells])
        problems = sum(len(row.problems) for row in self.rows)
        rows.writerow(["passed", *self.passed, sum(self.passed), len(self.rows) * len(self.columns), problems])
        return text.getvalue()

    def html(self) -> str:
        """The table as one page that loads nothing from elsewhere, with what checkers say under each outcome."""
        from jinja2 import Environment

        lacking = Counter(
            (column, outcome.property)
            for row in self.rows
            for column, outcome in zip(self.columns, row.outcomes, strict=True)
            if outcome.property
        )
        totals = {"learners": len(self.rows), "notebooks": len(self.graded), "counts": self.counts().most_common()}
        return (
            Environment(autoescape=True)
            .from_string(_PAGE)
            .render(
                columns=self.columns,
                rows=self.rows,
                passed=self.passed,
                totals=totals,
                failures=lacking.most_common(10),
                problems=[each for each in self.graded if each.problem],
            )
        )


def write(graded: Sequence[Graded], out: Path) -> list[Path]:
    """Write OUT.csv and OUT.html and return both paths. out: a path without a suffix."""
    table = GradeTable(graded)
    out.parent.mkdir(parents=True, exist_ok=True)
    paths = [out.with_name(f"{out.name}.{kind}") for kind in ("csv", "html")]
    encodings = ("utf-8-sig", "utf-8")  # Excel takes a CSV file without a mark for one of an older encoding
    for path, text, encoding in zip(paths, (table.csv(), table.html()), encodings, strict=True):
        path.write_text(text, encoding=encoding, errors="replace", newline="")
    return paths


def _words(outcome: Outcome) -> str:
    said = "; ".join(" ".join(line.split()) for line in outcome.said.splitlines() if line.strip())
    notes = f"uses {', '.join(outcome.notes)}" if outcome.notes else ""
    return ": ".join(part for part in (outcome.status, outcome.property, said, notes) if part)


def _inert(cell: object) -> object:
    """A cell that a spreadsheet shows as text: a learner chose it."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell
