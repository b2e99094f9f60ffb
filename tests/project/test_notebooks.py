"""Committed notebooks match their sources and were executed from top to bottom with complete outputs."""

import ast
import base64
import copy
import io
import itertools
import json
import re
from collections import Counter
from pathlib import Path

import nbformat
import numpy as np
import pytest
from matplotlib import image

from minillm.bench import batching, records
from minillm.course.making import build, lab, lesson
from minillm.course.shared import figures
from tools import lesson_minutes

ROOT = Path(__file__).resolve().parents[2]
SOURCES = build.sources([])
KINDS = (lesson.LEARNER, lesson.SOLUTION)
UNCOMPARED = {"nbval-ignore-output", "nbval-skip"}
SHOWING = {"print": "text", "check": "text", "compare": "text", "plt.show": "picture", "draw_tokens": "picture"}
SHOWING |= {"probes.where_the_time_goes": "text", "attention_facts.time_decode": "text"}
SHOWING["describe"] = "described"  # it shows a picture that another call has drawn
EACH = [pytest.param(source, kind, id=f"{source.stem}-{kind}") for source in SOURCES for kind in KINDS]


@pytest.fixture(params=[pytest.param(each.values, id=each.id) for each in EACH])
def notebook(request):
    return committed(*request.param)


@pytest.fixture(params=SOURCES, ids=lambda path: path.stem)
def learners_source(request):
    return request.param


@pytest.fixture(params=SOURCES, ids=lambda path: path.stem)
def learners(request):
    return committed(request.param, lesson.LEARNER)


def committed(source: Path, kind: str):
    return nbformat.read(build.target(source, kind), as_version=4)


def code(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shows_results(notebook) -> bool:
    """Whether every code cell ran once, in order. nbval passes a cell that did not, without checking anything."""
    return [cell.execution_count for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1))


def shown_at_least(source: str) -> Counter:
    """The minimum number of texts and pictures that a cell's source shows.

    Counts calls of SHOWING and of functions in a lesson's `draw` module: a loop's body once, for an `if` what both
    branches show, and nothing inside functions or exception handlers.
    """
    shown = _shows([ast.parse(source)])
    if described := shown.pop("described", 0):
        shown["picture"] = max(shown["picture"], described)
    return shown


def _shows(nodes) -> Counter:
    shown = Counter()
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.ExceptHandler, ast.IfExp)):
            continue
        if isinstance(node, ast.If):
            shown += _shows(node.body) & _shows(node.orelse)
            continue
        shown += _shows(ast.iter_child_nodes(node))
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if kind := "picture" if name.startswith("draw.") else SHOWING.get(name):
                shown[kind] += 1
    return shown


def is_shown(cell) -> bool:
    """Whether a cell's outputs have the required text and pictures, and no picture is blank."""
    least = shown_at_least(cell.source)
    texts = [output.text for output in cell.outputs if output.output_type == "stream"]
    pictures = pictures_of(cell)
    enough = len(pictures) >= least["picture"] and (not least["text"] or "".join(texts).strip())
    return bool(enough) and all(map(is_drawn, pictures))


def pictures_of(cell) -> list[str]:
    return [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]


def is_drawn(picture: str) -> bool:
    """Whether it is a base64 PNG with more than one color."""
    try:
        pixels = image.imread(io.BytesIO(base64.b64decode(picture)), format="png")
    except (OSError, ValueError, SyntaxError):
        return False
    return bool((pixels != pixels[0, 0]).any())


def is_built(notebook, source: Path, kind: str) -> bool:
    """Whether code, prose, order and tags match the source."""
    wanted = lesson.convert(source, kind).cells
    return [(each.cell_type, each.source, each.metadata) for each in notebook.cells] == [
        (each.cell_type, each.source, each.metadata) for each in wanted
    ]


def test_every_source_has_both_notebooks_and_every_notebook_a_source():
    for kind in KINDS:
        wanted = [build.target(source, kind) for source in SOURCES]
        assert sorted(wanted[0].parent.glob("*.ipynb")) == wanted


@pytest.mark.parametrize(("source", "kind"), EACH)
def test_a_notebook_matches_its_source(source, kind):
    assert is_built(committed(source, kind), source, kind), "run make notebooks"


def test_the_notebooks_for_download_are_the_learners_without_outputs():
    assert sorted(path.name for path in build.CLEAN.iterdir()) == [f"{source.stem}.ipynb" for source in SOURCES]
    for source in SOURCES:
        clean = nbformat.read(build.CLEAN / f"{source.stem}.ipynb", as_version=4)
        assert clean == lab.clean(committed(source, lesson.LEARNER)), "run make notebooks"


@pytest.mark.parametrize(("source", "kind"), EACH[:1])
def test_a_changed_word_and_reordered_cells_are_detected(source, kind):
    changed, swapped = (copy.deepcopy(committed(source, kind)) for _ in range(2))
    changed.cells[0].source += " more"
    swapped.cells[3:5] = reversed(swapped.cells[3:5])
    assert not is_built(changed, source, kind)
    assert not is_built(swapped, source, kind)


def test_every_code_cell_ran_once_from_the_top(notebook):
    assert shows_results(notebook)


def test_every_cell_shows_what_its_source_shows(notebook):
    """Also cells that nbval ignores: it compares neither them nor pictures, so it would pass if both were stripped."""
    for cell in code(notebook):
        assert is_shown(cell), cell.source


@pytest.mark.parametrize(
    "source, least",
    [
        ("x = 1", {}),
        ("print(x)\ncheck(answer)\nplt.show()", {"text": 2, "picture": 1}),
        ("for x in y:\n    draw.tiles(x)\nwith z:\n    draw_tokens(x)", {"picture": 2}),
        ("if gpu:\n    print(1)\nelse:\n    print(2)", {"text": 1}),
        ("if gpu:\n    print(1)\nelse:\n    plt.show()", {}),
        ("try:\n    ask()\nexcept Refused:\n    print(1)", {}),
        ("draw.tiles(x)\ndescribe('tiles')", {"picture": 1}),
        ("plots.ablation(x)\ndescribe('bars')", {"picture": 1}),
        ("def tell():\n    print(1)\n    plt.show()", {}),
    ],
)
def test_the_required_outputs_are_derived_from_the_source(source, least):
    assert shown_at_least(source) == least


def test_stripping_outputs_that_nbval_ignores_is_detected(notebook):
    for cell in code(notebook):
        if cell.outputs and UNCOMPARED & set(cell.metadata.get("tags", [])):
            assert not is_shown(with_outputs(cell, [])), cell.source
        if pictures_of(cell):
            texts = [output for output in cell.outputs if output.output_type == "stream"]
            assert not is_shown(with_outputs(cell, texts)), cell.source


@pytest.mark.parametrize("kind", ["blank", "cut off", "empty", "no PNG"])
def test_a_damaged_picture_is_detected_in_every_cell(notebook, kind):
    for cell in code(notebook):
        for place, output in enumerate(cell.outputs):
            if "image/png" in output.get("data", {}):
                damaged = with_outputs(cell, cell.outputs)
                damaged.outputs[place].data["image/png"] = damage(output.data["image/png"], kind)
                assert not is_shown(damaged), cell.source


def with_outputs(cell, outputs: list):
    return nbformat.from_dict(cell | {"outputs": copy.deepcopy(outputs)})


def damage(picture: str, kind: str) -> str:
    blank = io.BytesIO()
    image.imsave(blank, np.ones((9, 9, 3)), format="png")
    damaged = {
        "blank": blank.getvalue(),
        "cut off": base64.b64decode(picture)[:1000],
        "empty": b"",
        "no PNG": b"a picture",
    }
    return base64.b64encode(damaged[kind]).decode()


def test_stripped_results_and_cells_run_out_of_order_are_detected(notebook):
    stripped, late = (copy.deepcopy(notebook) for _ in range(2))
    code(stripped)[1].execution_count = None
    code(late)[0].execution_count, code(late)[1].execution_count = 2, 1
    assert not shows_results(stripped)
    assert not shows_results(late)


def test_no_cell_shows_an_error_or_a_warning(notebook):
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]


def test_every_figure_has_a_caption_and_a_text_alternative_that_points_to_it(notebook):
    for cell in code(notebook):
        for figure, below in itertools.pairwise([*cell.outputs, nbformat.from_dict({})]):
            if "image/png" in figure.get("data", {}):
                words = below.get("data", {}).get("text/plain", "")
                assert len(words) >= 30 and below.data == figures.caption(words), "end the cell with describe()"
                assert figure.metadata["image/png"]["alt"] == figures.ALTERNATIVE


def test_a_lesson_states_the_minutes_that_its_sections_take(learners_source):
    """Within a fifth, or two minutes, of the estimate for each section; the sections' sum is the lesson's."""
    sections = lesson_minutes.sections(learners_source)
    needed = [each for each in sections if not each.optional]
    assert lesson_minutes.stated(learners_source) == sum(each.stated or 0 for each in needed)
    wrong = [each for each in sections if each.stated and abs(each.stated - each.minutes) > max(2, 0.2 * each.minutes)]
    assert not wrong
    assert 30 <= sum(each.minutes for each in needed) <= 105


def test_optional_minutes_in_the_first_cell_are_those_of_the_optional_sections(learners_source):
    text = learners_source.read_text(encoding="utf-8")
    if stated := re.search(r"^# \*\*\d+ minutes, plus (\d+) optional", text, re.MULTILINE):
        optional = re.findall(r"^# ## .*optional.* (\d+) min$", text, re.MULTILINE | re.IGNORECASE)
        assert int(stated[1]) == sum(map(int, optional))


def test_engine_code_shown_in_a_lesson_equals_the_engines_source(notebook):
    """Compares syntax trees: what a lesson shows is what runs."""
    for cell in notebook.cells:
        blocks = re.findall(r"```python\n(.*?)\n```", cell.source, re.DOTALL)
        names = cell.metadata.get("engine", [])
        if names:
            shown = [lesson.syntax_tree(ast.parse(block).body[0]) for block in blocks]
            assert shown == [lesson.engine_tree(*name.split(":")) for name in names]


def test_a_cell_that_is_not_compared_gives_the_reason(notebook):
    for cell in code(notebook):
        if UNCOMPARED & set(cell.metadata.get("tags", [])):
            assert cell.metadata.get("uncompared"), cell.source


def test_most_cells_with_output_are_compared(notebook):
    shown = [cell for cell in code(notebook) if cell.outputs]
    compared = [cell for cell in shown if not UNCOMPARED & set(cell.metadata.get("tags", []))]
    assert len(compared) >= 0.7 * len(shown)


def test_outputs_contain_no_path_of_the_machine_that_ran_them(notebook):
    text = json.dumps([cell.outputs for cell in code(notebook)])
    assert str(Path.home()) not in text
    assert "site-packages" not in text
    assert str(ROOT) not in text


def test_a_lesson_opens_with_goals_and_requirements_and_ends_with_a_recap(learners):
    first, last = learners.cells[0].source, learners.cells[-1].source
    assert re.match(r"# \d\d · \w", first)
    assert re.search(r"\*\*\d+ minutes", first)
    assert re.search(r"Needs:\*\* +\S", first)
    assert all(words in last for words in ("## Recap", "**What got worse:**", "**Further reading:**"))


def test_pictures_are_drawn_by_the_notebook_itself(learners):
    assert any("image/png" in output.get("data", {}) for cell in code(learners) for output in cell.outputs)
    assert not re.findall(r"!\[[^]]*\]\(|<img", "\n".join(cell.source for cell in learners.cells))


@pytest.mark.parametrize("kind", KINDS)
def test_lesson_09_and_the_records_report_the_same_memory_waste(kind):
    (source,) = build.sources(["09"])
    streams = [output.get("text", "") for cell in code(committed(source, kind)) for output in cell.outputs]
    for name in ("cpu/batching", "h200/batching"):
        for row in batching.of(records.read(name), "memory")[:4]:  # the rows without prefix sharing
            shown = f"{row['cache']:40} {row['used']:6.1%} {row['running']:14.1f} {row['steps']:14,}"
            assert any(shown in text for text in streams), f"{name} says: {shown}"
