"""Building a source into an executed notebook, a report and a learner's copy."""

import re
from contextlib import contextmanager
from pathlib import Path

import pytest
from nbclient.exceptions import CellExecutionError
from nbformat import v4

from minillm.bench import load
from minillm.cores import FREE
from minillm.course.making import build

SOURCE = """\
# %% [markdown]
# # A trial
# Words.

# %%
import sys

print("one")
print("a warning", file=sys.stderr)

# %% tags=["terminal"]
# The table.
print("engine  tokens/s")

# %%
import matplotlib.pyplot as plt

_ = plt.plot([1, 2, 3])
plt.show()
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("source") / "98_trial.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def executed(source):
    return build.execute(build.convert(source), source.parent)


def test_a_notebook_runs_on_the_requested_tier(tmp_path):
    (tmp_path / "98_trial.py").write_text("# %%\nimport os\n\nprint(os.environ['MINILLM_TIER'])\n")
    done = build.execute(build.convert(tmp_path / "98_trial.py"), tmp_path, MINILLM_TIER="cpu")
    assert done.cells[0].outputs[0].text == "cpu\n"


def test_a_rebuild_changes_nothing(source):
    assert build.convert(source) == build.convert(source)


def test_every_code_cell_runs_in_order(executed):
    counts = [cell.execution_count for cell in executed.cells if cell.cell_type == "code"]
    assert counts == [1, 2, 3]


def test_warnings_are_not_saved(executed):
    streams = [output.name for cell in executed.cells for output in cell.get("outputs", []) if "name" in output]
    assert streams == ["stdout", "stdout"]


def test_no_metadata_of_this_machine_is_saved(executed):
    assert executed.metadata.language_info == {"name": "python"}
    assert all(cell.metadata.keys() <= {"tags"} for cell in executed.cells)


def test_cells_tagged_terminal_are_printed(executed):
    assert build.printed(executed).strip() == "engine  tokens/s"


def test_the_report_needs_no_network(executed):
    page = build.to_html(executed, "trial")
    assert "data:image/png;base64," in page
    assert "<script" not in page
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//|@import|url\(["']?http""", page)


def page_of(markdown: str) -> str:
    page = build.to_html(v4.new_notebook(cells=[v4.new_markdown_cell(markdown)]), "trial")
    return page[page.index("<body") :]


FORMULAS = r"""
In words, $a_1 * b_2 < c * d$:

$$x = \frac{1}{2}
\qquad \text{kv\_heads}$$

| $|n|$ |
|--|
"""


def test_the_report_shows_formulas_without_a_script():
    page = page_of(FORMULAS)
    assert len(re.findall(r'<math [^>]*display="inline"', page)) == 2
    assert len(re.findall(r'<math [^>]*display="block"', page)) == 1
    assert "<mfrac>" in page and "<mtext>kv_heads</mtext>" in page
    assert "$" not in page and "\\" not in page and "<em>" not in page


@pytest.mark.parametrize(
    "markdown",
    [
        "run `echo $HOME$` now",
        "``a ` $b$``",
        "```bash\necho $A $B\necho $$x$$\n```",
        "from $5 to $6",
        r"\$a\$",
        "one $ and\n\nanother $",
    ],
)
def test_dollars_that_are_no_formula_stay(markdown):
    page = page_of(markdown)
    assert "<math" not in page and page.count("$") == markdown.count("$")


def test_every_formula_of_the_demo_is_converted():
    page = build.to_html(build.convert(build.sources([build.DEMO])[0]), "trial")
    shown = re.sub(
        r'<div class="[^"]*highlight.*?</div>|<code>.*?</code>', "", page[page.index("<body") :], flags=re.DOTALL
    )
    assert shown.count("<math") > 3
    assert not re.findall(r"\$|\\[a-z]+", shown)


def test_an_error_in_a_cell_stops_the_build(tmp_path):
    path = tmp_path / "98_wrong.py"
    path.write_text("# %%\nraise ValueError('no')\n")
    with pytest.raises(CellExecutionError, match="no"):
        build.execute(build.convert(path), tmp_path)


def test_an_unknown_lesson_error_lists_the_available_ones():
    with pytest.raises(ValueError, match="99_serve_and_benchmark"):
        build.sources(["77"])


def building(monkeypatch, folder: Path, used: float | None) -> None:
    """A lesson's source in a folder of its own. While it is executed, other programs use this many cores."""
    found = load.OtherLoad(0.0)

    def execute(notebook, *options, **environment):
        found.cores = used
        return notebook

    @contextmanager
    def measured():
        at_the_end = load.OtherLoad()
        yield at_the_end
        at_the_end.cores = found.cores

    monkeypatch.setattr(build, "execute", execute)
    monkeypatch.setattr(build, "other_load", measured)
    monkeypatch.setattr(build, "ROOT", folder)
    monkeypatch.setattr(build, "NOTEBOOKS", folder / "notebooks")
    monkeypatch.setattr(build, "CLEAN", folder / "notebooks" / "clean")
    path = folder / "notebooks" / "source" / "98_trial.py"
    path.parent.mkdir(parents=True)
    path.write_text("# %%\nprint(1)\n")


def written(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.ipynb"))


EVERY = [f"notebooks/{each}98_trial.ipynb" for each in ("", "clean/", "solutions/")]


def test_a_notebook_that_was_executed_on_a_busy_machine_is_not_written(monkeypatch, tmp_path, capsys):
    building(monkeypatch, tmp_path, 0.21)
    with pytest.raises(SystemExit) as refused:
        build.main(["notebooks", "98"])
    assert not written(tmp_path)
    for part in ("notebooks/98_trial.ipynb", "0.21 cores", "more than 0.2 ", "--busy"):
        assert part in str(refused.value)
    build.main(["notebooks", "98", "--busy"])
    assert written(tmp_path) == EVERY


@pytest.mark.parametrize("used", [0.0, FREE, None])
def test_a_quiet_machine_and_one_that_does_not_say_write_notebooks(monkeypatch, tmp_path, capsys, used):
    building(monkeypatch, tmp_path, used)
    build.main(["notebooks"])
    assert written(tmp_path) == EVERY


WORKING = r"""# %%
import subprocess, sys, time

work = "import time\nwhile time.process_time() < 0.5: pass"
_ = subprocess.run([sys.executable, "-c", work], check=True)
while time.process_time() < 0.5:
    pass
"""


def test_the_time_of_the_kernel_and_its_children_is_no_other_programs(tmp_path):
    """It is this process's own as soon as the notebook is executed, which is when others' time is measured."""
    (tmp_path / "98_trial.py").write_text(WORKING)
    before = load._own_seconds()
    build.execute(build.convert(tmp_path / "98_trial.py"), tmp_path)
    assert load._own_seconds() - before >= 1.0
