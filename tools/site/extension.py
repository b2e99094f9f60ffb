"""A Sphinx extension: formulas in MathML, which needs no script, and our docstrings as reStructuredText."""

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LESSONS = {path.name[:2]: path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
_LESSON = re.compile(r"\b[Ll]essons? (\d\d)\b")
_COLUMNS = re.compile(r"\S {3,}\S")


def as_rst(docstring: list[str]) -> list[str]:
    """A docstring's lines as reStructuredText: code in backticks, aligned columns, and links to lessons."""
    lines: list[str] = []
    for paragraph in "\n".join(docstring).strip("\n").split("\n\n"):
        rows = paragraph.split("\n")
        if any(_COLUMNS.search(row) or row.startswith(" ") for row in rows):
            lines += ["::", "", *(f"    {row}" for row in rows), ""]
        else:
            lines += [*map(_inline, rows), ""]
    return lines


def _inline(line: str) -> str:
    """One line of text: what is outside of backticks has no markup, apart from lessons, which become links."""
    parts = re.split(r"(`[^`]+`)", line)
    for place, part in enumerate(parts):
        if place % 2:
            glued = r"\ " if re.match(r"\w", parts[place + 1]) else ""  # `name`s: markup ends only before a separator
            parts[place] = f"`{part}`{glued}"
        else:
            parts[place] = _LESSON.sub(_link, re.sub(r"([*_|\\])", r"\\\1", part))
    return "".join(parts)


def _link(found: re.Match[str]) -> str:
    lesson = LESSONS.get(found[1])
    return f":doc:`{found[0]} </notebooks/{lesson}>`" if lesson else found[0]


def _inline_formula(writer, node) -> None:
    from docutils.nodes import SkipNode

    from minillm.course.making.build import mathml

    writer.body.append(mathml(node.astext(), "inline"))
    raise SkipNode


def _block_formula(writer, node) -> None:
    from docutils.nodes import SkipNode

    from minillm.course.making.build import mathml

    writer.body.append(f'<div class="formula">{mathml(node.astext(), "block")}</div>')
    raise SkipNode


def _replace(app, what, name, obj, options, lines: list[str]) -> None:
    lines[:] = as_rst(lines)
    if what == "exception":  # callers may catch it by one of these
        bases = " and ".join(f"``{base.__name__}``" for base in obj.__bases__)
        lines += ["", f"A subclass of {bases}."]


def _without_thebe(app, config) -> None:
    """Remove what loads Thebe, which runs cells on a server elsewhere; Jupyter Book has no setting for that."""
    unwanted = ("init_thebe_core", "update_thebe_context")
    for event, listeners in app.events.listeners.items():
        app.events.listeners[event] = [
            each for each in listeners if getattr(each.handler, "__name__", "") not in unwanted
        ]


def setup(app) -> dict:
    """Called by Sphinx. minillm and what it imports come last on the path, from the project's own environment."""
    sys.path += [str(ROOT), os.environ["MINILLM_PACKAGES"]]
    app.add_html_math_renderer("mathml", (_inline_formula, None), (_block_formula, None))
    app.connect("config-inited", _without_thebe)
    app.connect("autodoc-process-docstring", _replace)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
