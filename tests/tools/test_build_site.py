"""The site's own parts: folded solutions, plots, docstrings, the check of links. `make site` runs the rest."""

import json
import os
import re

import pytest
from bs4 import BeautifulSoup
from nbformat import read, v4

from minillm.bench import records
from minillm.course.making.lesson import BANNER
from tests.project.makefile import ROOT
from tools import build_site
from tools.site import extension, figures, lessons, links, plots

STUB = 'def f(x):\n    raise NotSolvedYet("f")'
SOLUTION = "def f(x):\n    return 2 * x"


def notebook(*sources: str, exercise: int = 1):
    cells = [v4.new_markdown_cell(sources[0], id="cell-0")]
    cells += [v4.new_code_cell(text, id=f"cell-{count}") for count, text in enumerate(sources[1:], 1)]
    cells[exercise].metadata["tags"] = ["exercise"]
    return v4.new_notebook(cells=cells)


@pytest.fixture
def site(tmp_path):
    """A site of two pages without faults; `write` changes a page."""
    folder = tmp_path / "site"
    (folder / "sub").mkdir(parents=True)
    (folder / "picture.png").touch()
    (tmp_path / "outside.html").touch()

    def write(name: str, body: str) -> list[str]:
        (folder / name).write_text(body, encoding="utf-8")
        return links.problems(folder)

    write("sub/other.html", '<h1 id="top">x</h1><img src="../picture.png"><a href="..">up</a>')
    assert write("index.html", '<a href="sub/other.html#top">x</a><a href="https://example.org">elsewhere</a>') == []
    return write


def test_jupyter_book_is_installed_outside_of_our_environment_and_again_when_its_requirements_change(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(build_site, "VENV", tmp_path)
    made, installed = build_site.set_up()
    assert made[-2:] == ["venv", str(tmp_path)] and installed[-1] == str(build_site.REQUIREMENTS)
    stamp, changed = tmp_path / ".installed", build_site.REQUIREMENTS.stat().st_mtime
    stamp.touch()
    os.utime(stamp, (changed, changed))
    assert build_site.set_up() == []
    os.utime(stamp, (changed - 1, changed - 1))
    assert build_site.set_up() == [made, installed]


def test_every_requirement_is_an_exact_version():
    lines = build_site.REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    packages = [line for line in lines if not line.startswith("#")]
    assert {line.split("==")[0] for line in packages} >= {"jupyter-book", "plotly"}
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in packages)


def test_an_exercise_is_its_stub_and_then_its_folded_solution_with_the_outputs():
    solved = notebook(f"# Title\n\n{BANNER}", SOLUTION, "print(f(2))")
    solved.cells[2].outputs = [v4.new_output("stream", text="4\n")]
    lesson = lessons.merged(notebook("# Title", STUB, "print(f(2))"), solved)
    assert [cell.source for cell in lesson.cells] == ["# Title", STUB, SOLUTION, "print(f(2))"]
    assert "hide-input" in lesson.cells[2].metadata["tags"]
    assert lesson.cells[2].metadata["mystnb"]["code_prompt_show"] == "Show the solution"
    assert not any("hide-input" in lesson.cells[place].metadata.get("tags", []) for place in (1, 3))
    assert lesson.cells[3].outputs[0].text == "4\n"
    assert len({cell.id for cell in lesson.cells}) == 4


def test_a_prediction_is_not_called_a_solution():
    lesson = lessons.merged(notebook("x", "guess = None"), notebook("x", "guess = 2.0"))
    assert lesson.cells[2].metadata["mystnb"]["code_prompt_show"] == "Show the prediction used below"


def test_figures_have_their_text_alternatives():
    solved = notebook("x", SOLUTION)
    picture = v4.new_output("display_data", data={"image/png": ""}, metadata={"image/png": {"alt": "two bars"}})
    solved.cells[1].outputs = [picture, picture]
    shown = lessons.merged(notebook("x", STUB), solved).cells[2].metadata["mystnb"]
    assert shown["image"]["alt"] == "two bars" and shown["code_prompt_show"]


def test_notebooks_of_different_sources_are_refused():
    with pytest.raises(ValueError, match="make notebooks"):
        lessons.merged(notebook("x", STUB), notebook("x", SOLUTION, "more"))


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem[:2])
def test_every_committed_lesson_shows_all_its_exercises(path):
    learner = read(path, 4)
    lesson = lessons.merged(learner, read(path.parent / "solutions" / path.name, 4))
    exercises = [cell for cell in learner.cells if "exercise" in cell.metadata.get("tags", [])]
    folded = [place for place, cell in enumerate(lesson.cells) if "hide-input" in cell.metadata.get("tags", [])]
    assert len(folded) == len(exercises) > 2
    assert [lesson.cells[place - 1].source for place in folded] == [cell.source for cell in exercises]
    assert BANNER not in lesson.cells[0].source


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ('<a href="sub/gone.html">', "does not exist"),
        ('<a href="sub/other.html#gone">', "no #gone"),
        ('<a href="#gone">', "no #gone"),
        ('<a href="../outside.html">', "does not exist"),
        ('<img src="gone.png">', "does not exist"),
        ('<img src="https://example.org/x.png">', "loads https"),
        ('<script src="//example.org/x.js"></script>', "loads //example"),
        ('<link rel="stylesheet" href="https://example.org/x.css">', "loads https"),
        ("<style>@import 'https://example.org/x.css';</style>", "loads https"),
        ('<style>p { background: url("https://example.org/x.png") }</style>', "loads https"),
        ("<script>import x from 'https://example.org/x.js'</script>", "loads https"),
    ],
)
def test_a_broken_link_or_a_resource_from_elsewhere_is_found(site, body, told):
    (problem,) = site("index.html", body)
    assert problem.startswith("index.html: ") and told in problem


def test_style_sheets_are_checked_too(site):
    (problem,) = site("site.css", "@font-face { src: url(https://example.org/font.woff2) }")
    assert problem.startswith("site.css: ") and "loads" in problem


@pytest.mark.parametrize("device", plots.DEVICES)
def test_every_plot_has_values_units_and_its_records(device):
    *_, makers = plots.DEVICES[device]
    assert len(makers) > 5
    for make in makers:
        figure = make()
        assert figure.says.endswith(".") and figure.traces
        for name in figure.records:
            assert records.read(name)["results"]
        assert figure.x["title"]["text"] or figure.y["title"]["text"]
        for trace in figure.traces:
            assert len(trace["x"]) == len(trace["y"]) > 0, figure.title
            assert None not in (*trace["x"], *trace["y"]), figure.title


def test_a_plot_shows_the_record():
    figure = plots.with_vllm()
    ours = {row["workload"]: row["output_tokens_per_s"] for row in records.read("h200/gemma-2b-bf16")["results"]}
    theirs = [row for row in records.read("h200/vllm-h200")["results"] if row["dtype"] == "bf16"]
    best = [max(row["output_tokens_per_s"] for row in theirs if row["workload"] == name) for name in ours]
    assert [trace["y"] for trace in figure.traces] == [list(ours.values()), best]


def test_every_number_on_a_logarithmic_axis_is_written_in_full():
    axis = figures.axis("clients", log=True)
    texts = dict(zip(axis["tickvals"], axis["ticktext"], strict=True))
    some = (0.00002, 0.2, 1, 5, 2000, 50_000)
    assert [texts[tick] for tick in some] == ["0.00002", "0.2", "1", "5", "2,000", "50,000"]


def test_a_plots_data_stay_inside_their_script_and_links_lead_to_files():
    drawn = figures.figure(
        "A title", 'It says "this".', ["cpu/offline"], [figures.bars("</script>", ["a"], [1.0])], {}, {}
    )
    text = drawn.page()
    page = BeautifulSoup(text.split("```{raw} html\n")[1].split("\n```")[0], "html.parser")
    data = json.loads(page.find("script", type="application/json").get_text())["data"]
    assert data[0]["name"] == "</script>"
    assert page.find(attrs={"role": "img"})["aria-label"] == 'A title. It says "this".'
    (link,) = re.findall(r"\]\(\.\./(.+?)\)", text)
    assert (ROOT / link).is_file()


def test_docstrings_become_restructured_text():
    assert extension.as_rst(["Rows of *args, `a_b`s and x_."]) == [r"Rows of \*args, ``a_b``\ s and x\_.", ""]
    assert extension.as_rst(["`a` and `b`."]) == ["``a`` and ``b``.", ""]
    lines = extension.as_rst(["See.", "", "  n      the number", "  size   of each"])
    assert lines == ["See.", "", "::", "", "      n      the number", "      size   of each", ""]
    assert extension.as_rst(["    y = f(", "        x)"]) == ["::", "", "        y = f(", "            x)", ""]
    linked, _ = extension.as_rst(["Sums.  Lesson 04. Not lesson 77."])
    assert linked == "Sums.  :doc:`Lesson 04 </notebooks/04_attention_kernels>`. Not lesson 77."


def test_an_exceptions_docstring_says_what_else_catches_it():
    lines = ["Too large."]
    extension._replace(None, "exception", "x", type("TooLarge", (ValueError, OSError), {}), None, lines)
    assert lines[-1] == "A subclass of ``ValueError`` and ``OSError``."


def test_the_contents_have_every_lesson_every_doc_and_both_devices_once():
    pages = [page for part in build_site.contents().values() for page in part]
    assert len(set(pages)) == len(pages)
    wanted = [*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    assert {str(path.relative_to(ROOT)) for path in wanted} <= set(pages)
    assert {"records/cpu.md", "records/h200.md", "api/minillm.md", "api/minillm.kernels.paged_attention.md"} <= set(
        pages
    )


def test_modules_are_folded_below_the_first_one():
    parts = {"": ["README.md"], "Lessons": ["notebooks/00.ipynb"], build_site.API: ["api/a.md", "api/a.b.md"]}
    lesson, reference = build_site.toc(parts)["parts"]
    assert lesson["chapters"] == [{"file": "notebooks/00"}]
    assert reference["chapters"] == [{"file": "api/a", "sections": [{"file": "api/a.b"}]}]


def test_public_names_are_documented_once():
    assert "exclude-members: LLM, AsyncLLM" in build_site.api_page("minillm.engine")
    assert "exclude-members" not in build_site.api_page("minillm")


def test_what_a_page_links_to_is_copied_and_folders_become_text(monkeypatch, tmp_path):
    monkeypatch.setattr(build_site, "SOURCE", tmp_path)
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    page.write_text(
        "![x](batching.svg) [code](../minillm/errors.py) [`tests`](../tests) [home](../README.md#limits) "
        "[doc](extending.md) [elsewhere](https://example.org) [other](#here)"
    )
    build_site.copy_linked(page, "docs/page.md")
    assert page.read_text() == (
        "![x](batching.svg) [code](../minillm/errors.py) `tests` [home](../index.md#limits) "
        "[doc](extending.md) [elsewhere](https://example.org) [other](#here)"
    )
    copied = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert copied == {"docs/page.md", "docs/batching.svg", "minillm/errors.py"}
