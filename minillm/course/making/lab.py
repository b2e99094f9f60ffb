"""A learner's copies of the notebooks, in lab/: without outputs, and kept up to date until the learner changes them.

No cell has run in a copy: a prediction comes before its measurement. lab/.copies.json holds a digest of each lesson's
cells as they were copied. So a corrected lesson replaces a copy in which nothing was changed, even if it was run, and
comes to lie next to a changed one as NN_name.new.ipynb.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode

COPIES = ".copies.json"


def clean(notebook: NotebookNode) -> NotebookNode:
    """The notebook with no outputs and no execution counts; changed in place."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def digest(notebook: NotebookNode) -> str:
    """A digest of the cells' kinds and sources. Running cells does not change it."""
    cells = [[cell.cell_type, cell.source] for cell in notebook.cells]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()


def copy(notebooks: Path, folder: Path) -> Iterator[str]:
    """Bring a folder's copies up to date with the lessons in `notebooks`; yields a sentence for each that changed."""
    folder.mkdir(exist_ok=True)
    known = folder / COPIES
    copied = _digests(known)
    for path in sorted(notebooks.glob("*.ipynb")):
        lesson = clean(_read(path))
        now, mine = digest(lesson), folder / path.name
        if mine.exists() and now in (copied.get(path.name), _held(mine)):  # the outputs of an equal copy stay
            copied[path.name] = now
            continue
        target = mine if _unchanged(mine, copied) else _free(mine, copied, now)
        _write(lesson, target)
        yield _sentence(mine, target, path.name in copied)
        copied[path.name] = copied[target.name] = now
    known.write_text(json.dumps(copied, indent=1) + "\n", encoding="utf-8")


def _digests(known: Path) -> dict[str, str]:
    """The digests by file name; none if they are lost or damaged: every copy that differs then counts as changed."""
    try:
        read = json.loads(known.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _held(path: Path) -> str | None:
    """The digest of a notebook's cells; None for a file that is no notebook: it is the learner's all the same."""
    try:
        return digest(_read(path))
    except Exception:  # nbformat raises many kinds
        return None


def _unchanged(path: Path, copied: dict[str, str]) -> bool:
    """Return whether a file may be replaced: it is not there, or its cells are those that were copied."""
    return not path.exists() or (path.name in copied and _held(path) == copied[path.name])


def _free(mine: Path, copied: dict[str, str], now: str) -> Path:
    """The first of NN_name.new.ipynb, NN_name.new2.ipynb, ... that is free, equal to the lesson or unchanged."""
    names = (mine.with_suffix(f".new{count}.ipynb") for count in itertools.chain([""], itertools.count(2)))
    return next(path for path in names if _unchanged(path, copied) or _held(path) == now)


def _sentence(mine: Path, target: Path, corrected: bool) -> str:
    if target != mine:
        return f"{mine.name} was corrected. Your changes are kept; the corrected lesson is {target.name}"
    return (
        f"{mine.name} was corrected, and your copy replaced: it had no changes" if corrected else f"{mine.name} copied"
    )


def _read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def _write(notebook: NotebookNode, path: Path) -> None:
    temporary = path.with_name(path.name + ".part")  # an interrupted copy must not look like a learner's file
    nbformat.write(notebook, temporary)
    temporary.replace(path)
