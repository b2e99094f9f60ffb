"""Write build/mistakes.md, common mistakes by exercise, from the wrong solutions in tests/course/mutants.

python tools/list_mistakes.py       `make site` has it as a page
"""

import functools
import inspect
import os
import pkgutil
import re
import sys
import textwrap
from importlib import import_module
from pathlib import Path

import jupytext

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "build" / "mistakes.md"
MOST_LINES = 6  # of one wrong solution
SHARED = 3  # a line in wrong solutions that lack so many different properties is not what is wrong with them
HEAD = """# Common mistakes by exercise

For instructors: the learners' copy that `minillm course export` writes does not have this page. It lists the wrong
solutions that each checker must refuse, {count:,} in all: those that learners are expected to write, and those of
people who tried to get past the checkers. For each property of an exercise: the hint that a learner sees, and the
mistakes that it is meant for. The lines are those that make the difference: what the lesson's solution has too, or
wrong solutions of other kinds, is left out. Without lines, the words say what is missing or different.

Written by `python tools/list_mistakes.py` from tests/course/mutants.

{contents}
"""


def page() -> str:
    """Return the page. Triton has to interpret kernels: compiled, some mistakes are left out."""
    from minillm.course.making import build
    from minillm.course.shared import checks
    from tests.course import mutants

    for module in pkgutil.iter_modules(mutants.__path__, f"{mutants.__name__}."):
        import_module(module.name)
    contents, parts = [], [""]
    for source in build.sources([]):
        lesson = source.stem[:2]
        cells = jupytext.read(source).cells
        title = cells[0].source.splitlines()[0].lstrip("# ")
        parts.append(f"## {title}\n")
        solution = {line.strip() for cell in cells if cell.cell_type == "code" for line in cell.source.splitlines()}
        text = source.read_text(encoding="utf-8")
        here = [each for each in checks.every().values() if _lesson(each) == lesson]
        here.sort(key=lambda each: text.index(f"check({each.name})"))
        contents.append(f"* {title}: " + ", ".join(f"[`{each.name}`](#{each.name.lower()})" for each in here))
        for exercise in here:
            parts.append(f"### `{exercise.name}`\n")
            known = solution | _shared([each for each in mutants.MUTANTS if each.exercise == exercise.name])
            for prop in exercise.properties[1:]:  # the first is the notebook's example, which these pass
                wrong = [m for m in mutants.MUTANTS if (m.exercise, m.fails) == (exercise.name, prop.name)]
                listed = "\n".join(_listed(each.candidate, known) for each in wrong)
                parts.append(f"**{_plain(prop.name)}**\n\nHint: {_plain(prop.hint)}\n\n```python\n{listed}\n```\n")
    parts[0] = HEAD.format(count=len(mutants.MUTANTS), contents="\n".join(contents))
    return "\n".join(parts)


def _lesson(exercise) -> str:
    return exercise.properties[0].holds.__module__.rpartition(".lesson_")[2][:2]


def _plain(text: str) -> str:
    """Text that Markdown shows as it is: underscores and asterisks outside code keep their meaning as characters."""
    parts = text.split("`")
    return "`".join(part if place % 2 else re.sub(r"([*_<])", r"\\\1", part) for place, part in enumerate(parts))


def _shared(wrong: list) -> set[str]:
    """The lines that wrong solutions have in common although they lack different properties."""
    properties: dict[str, set[str]] = {}
    for each in wrong:
        for line in _own_lines(each.candidate):
            properties.setdefault(line.strip(), set()).add(each.fails)
    return {line for line, lacking in properties.items() if len(lacking) >= SHARED}


def _listed(candidate, known: set[str]) -> str:
    """A wrong solution: its name in words as a comment, and its lines that are not known."""
    lines = [line for line in _own_lines(candidate) if line.strip() not in known]
    more = ["..."] if len(lines) > MOST_LINES else []
    return "\n".join([f"# {_words(candidate)}", *textwrap.dedent("\n".join(lines[:MOST_LINES])).splitlines(), *more])


@functools.cache
def _own_lines(candidate) -> list[str]:
    """The lines of a function or class without decorators, its first line and comments; none if another made it."""
    if inspect.isfunction(candidate) and candidate.__closure__ is not None:
        return []
    lines = textwrap.dedent(inspect.getsource(candidate)).splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith(("def ", "class ")))
    return [line for line in lines[first + 1 :] if line.strip() and not line.strip().startswith(("#", '"""'))]


def _words(candidate) -> str:
    """What a wrong solution does: its name as words, or the switch of one that another function has made."""
    if inspect.isfunction(candidate) and candidate.__closure__:
        inner = inspect.getclosurevars(candidate).nonlocals.values()
        changed = [each.fn.__code__.co_filename for each in inner if hasattr(each, "fn")]
        said = [each for each in inner if isinstance(each, str)]
        found = [name[1:-1].replace(" became ", " becomes ") for name in changed if name.startswith("<")] or said
        return re.sub("becomes $", "is left out", found[0]) if found else candidate.__name__.replace("_", " ")
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", candidate.__name__)  # of a class
    return " ".join(name.lower().split("_"))


def main() -> None:
    os.environ["MINILLM_TIER"] = "cpu"
    sys.path.insert(0, str(ROOT))
    from minillm.course import triton_here

    triton_here()
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
