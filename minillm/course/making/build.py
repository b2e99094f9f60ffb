"""Build the executed notebooks, the demo's report, and a learner's copies from one source per lesson.

A source is a script, `notebooks/source/NN_name.py`, in the format of `lesson.py`. Timings are in cells tagged
`nbval-ignore-output`, whose `uncompared` says why. `make demo` prints the output of cells tagged `terminal`.

Timings from a busy machine would contradict the text around them, so a notebook is not written if other programs ran
while its cells did. `--busy` writes it all the same: for a lesson without timings.
"""

import argparse
import copy
import html
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from nbclient import NotebookClient
from nbformat import NotebookNode, read, write

from minillm.bench.load import other_load
from minillm.cores import FREE
from minillm.errors import ConfigError, MinillmError

from . import lab
from .lesson import LEARNER, SOLUTION, convert

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOKS = ROOT / "notebooks"
CLEAN = NOTEBOOKS / "clean"  # without outputs
DEMO = "99_serve_and_benchmark"
CELL_SECONDS = 600
QUIET = FREE  # cores that other programs may use, on average, while a notebook is executed
NO_ALTERNATIVE = "No description has been provided for this image"  # written by nbconvert
# Code, which may contain dollars, comes first: a formula in it is text.
_CODE_OR_FORMULA = re.compile(
    r"(?P<code>^ *(?P<fence>```+|~~~+).*?^ *(?P=fence)|(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)|\\\$)"
    r"|\$\$(?P<block>.+?)\$\$|\$(?!\s)(?P<inline>[^$\n]*(?:\n[^$\n]+)*?)(?<![\s\\])\$(?!\d)",
    re.DOTALL | re.MULTILINE,
)


class BusyMachine(MinillmError, RuntimeError):
    """Other programs ran while a notebook was executed, so its timings are wrong."""


def execute(notebook: NotebookNode, folder: Path, started: Callable | None = None, **environment: str) -> NotebookNode:
    """Run all cells in a new kernel of this Python, in `folder`, and return the notebook with its outputs.

    started: called with (cell, its index) before each cell. environment: variables added to those of this process.
    Raises nbclient's CellExecutionError at the first error.
    """
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,
        kernel_name="python3",
        on_cell_start=started,
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
    )
    client.execute(env=os.environ | environment)
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            # Warnings and progress bars show this machine's folders and speeds.
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    return notebook


def target(source: Path, kind: str) -> Path:
    """Return where a lesson's notebook of this kind is committed."""
    folder = NOTEBOOKS / "solutions" if kind == SOLUTION else NOTEBOOKS
    return folder / f"{source.stem}.ipynb"


def build(source: Path, kind: str, busy: bool = False) -> Path:
    """Write one of a lesson's notebooks, executed on the CPU tier, and return its path.

    The learner's is also written without outputs, for download. busy: other programs may run meanwhile. Raises
    BusyMachine, with nothing written, if they did and may not.
    """
    path = target(source, kind)
    path.parent.mkdir(exist_ok=True)
    with other_load() as others:  # ends after the kernel, whose time is this process's from then on
        notebook = execute(convert(source, kind), path.parent, MINILLM_TIER="cpu")
    if not busy and others.cores is not None and others.cores > QUIET:
        raise BusyMachine(
            f"{path.relative_to(ROOT)} is not written: while its cells ran, other programs used {others.cores:.2f} "
            f"cores on average, and more than {QUIET} falsify its timings. Build it again when they have ended; "
            "--busy builds a lesson that has no timings"
        )
    write(notebook, path)
    if kind == LEARNER:
        CLEAN.mkdir(exist_ok=True)
        write(lab.clean(notebook), CLEAN / path.name)
    return path


def sources(names: list[str]) -> list[Path]:
    """All lessons' sources, or those whose names start with one of `names` ("99"). Raises ConfigError."""
    every = sorted((NOTEBOOKS / "source").glob("*.py"))
    if not every:
        raise ConfigError(f"no sources of lessons in {NOTEBOOKS / 'source'}: a learners' copy cannot build notebooks")
    chosen = [path for path in every if not names or path.stem.startswith(tuple(names))]
    if not chosen:
        known = ", ".join(path.stem for path in every)
        raise ConfigError(f"no lesson begins with {' or '.join(names)}; there are: {known}")
    return chosen


def to_html(notebook: NotebookNode, title: str) -> str:
    """The notebook as one page that needs no network: styles, pictures and formulas are embedded, scripts removed."""
    from nbconvert import HTMLExporter

    marked, formulas = _formulas_marked(notebook)
    page, _ = HTMLExporter(embed_images=True).from_notebook_node(marked, resources={"metadata": {"name": title}})
    page = _with_alternatives(page, notebook)
    # The template loads scripts from the network, for formulas and widgets.
    page = re.sub(r"<script\b.*?</script>", "", page, flags=re.DOTALL)
    for mark, formula in formulas.items():
        page = page.replace(mark, formula)
    return page


def mathml(latex: str, display: str) -> str:
    """A formula as MathML. display: "inline" or "block"."""
    from latex2mathml.converter import convert as converted

    return converted(latex, display=display).replace(r"\_", "_")  # in \text, where it is left as it is


def _formulas_marked(notebook: NotebookNode) -> tuple[NotebookNode, dict[str, str]]:
    """A copy whose Markdown has a mark in place of each formula, and the marks' formulas in MathML.

    A mark is one word: in its place the converter from Markdown finds no emphasis, table or HTML.
    """
    formulas: dict[str, str] = {}

    def mark(found: re.Match[str]) -> str:
        if found["code"]:
            return found[0]
        latex = " ".join((found["block"] or found["inline"]).split())
        display = "block" if found["block"] else "inline"
        name = f"formula{len(formulas)}end"
        formulas[name] = mathml(latex, display)
        return name

    marked = copy.deepcopy(notebook)
    for cell in marked.cells:
        if cell.cell_type == "markdown":
            cell.source = _CODE_OR_FORMULA.sub(mark, cell.source)
    return marked, formulas


def _with_alternatives(page: str, notebook: NotebookNode) -> str:
    """The page with each figure's text alternative, which nbconvert's template leaves out."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    figures = [output for output in outputs if "image/png" in output.get("data", {})]
    texts = iter([each.metadata.get("image/png", {}).get("alt", NO_ALTERNATIVE) for each in figures])
    return re.sub(re.escape(f'alt="{NO_ALTERNATIVE}"'), lambda _: f'alt="{html.escape(next(texts))}"', page)


def printed(notebook: NotebookNode) -> str:
    """The text of the cells tagged `terminal`."""
    cells = [cell for cell in notebook.cells if "terminal" in cell.metadata.get("tags", [])]
    outputs = [output for cell in cells for output in cell.outputs]
    return "\n".join(output["text"] for output in outputs if output.get("name") == "stdout")


def demo() -> Path:
    """Run the last lesson on this machine, print its table, and write a report to build/.

    A learners' copy has no solutions: there, it runs with the exercises left to write, so with the engine's own parts.
    """
    source, folder = NOTEBOOKS / "source" / f"{DEMO}.py", NOTEBOOKS / "solutions"  # of the other lessons too
    if source.exists() and folder.exists():
        notebook = convert(source)
    else:
        notebook, folder = lab.clean(read(NOTEBOOKS / f"{DEMO}.ipynb", as_version=4)), NOTEBOOKS
    begin = time.perf_counter()

    def say(cell: NotebookNode, cell_index: int) -> None:
        """Print each heading when the run reaches it: a minute of silence looks like a hang."""
        before = notebook.cells[cell_index - 1] if cell_index else None
        if before is not None and before.cell_type == "markdown":
            heading = next((line for line in before.source.splitlines() if line.startswith("#")), None)
            if heading:
                title = re.sub(r" · \d+ min$", "", heading.lstrip("# "))
                print(f"{time.perf_counter() - begin:5.0f} s  {title}", flush=True)

    execute(notebook, folder, say, FULL="1")
    folder = ROOT / "build"
    folder.mkdir(exist_ok=True)
    target = folder / f"{DEMO}.html"
    target.write_text(to_html(notebook, "minillm: serve and benchmark"), encoding="utf-8")
    print(f"\n{printed(notebook)}\n{time.perf_counter() - begin:.0f} s in all. The whole report: {target}")
    return target


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m minillm.course.making.build", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    notebooks = commands.add_parser("notebooks", help="execute sources into notebooks/")
    notebooks.add_argument("names", nargs="*", help="first characters of lessons' names; default: all")
    notebooks.add_argument("--busy", action="store_true", help="write lessons although other programs run meanwhile")
    commands.add_parser("demo", help="run the last lesson, print its table, leave a report")
    commands.add_parser("lab", help="copy notebooks to lab/ for a learner to change, or bring the copies up to date")
    options = parser.parse_args(arguments)
    if not NOTEBOOKS.is_dir():
        sys.exit(f"{NOTEBOOKS} does not exist: run this in a clone of the repository, as the lessons are not installed")
    if options.command == "demo":
        demo()
    elif options.command == "lab":
        for line in lab.copy(NOTEBOOKS, ROOT / "lab"):
            print(line)
    else:
        try:
            for source in sources(options.names):
                for kind in (LEARNER, SOLUTION):
                    begin = time.perf_counter()
                    path = build(source, kind, options.busy).relative_to(ROOT)
                    print(f"{path}  {time.perf_counter() - begin:.0f} s", flush=True)
        except MinillmError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
