"""A figure comes with a caption."""

import matplotlib.pyplot as plt
import pytest

from minillm.course import describe
from minillm.course.making import build
from minillm.course.shared import figures
from minillm.errors import ConfigError

CELL = """\
# %%
import matplotlib.pyplot as plt

from minillm.course import describe

plt.plot([1, 2, 3])
describe('''A line
    that rises.''')
print("after")
"""


def test_a_described_figure_is_shown_once_with_its_text_below_it(tmp_path):
    (tmp_path / "98_trial.py").write_text(CELL)
    notebook = build.execute(build.convert(tmp_path / "98_trial.py"), tmp_path)
    figure, caption, after = notebook.cells[0].outputs
    assert figure.data["image/png"] and after.text == "after\n"
    assert caption.data["text/plain"] == "A line that rises."
    page = build.to_html(notebook, "a trial")
    picture, below = (page.index(each) for each in (f'alt="{figures.ALTERNATIVE}"', "<p>A line that rises.</p>"))
    assert picture < below and page.count("A line that rises") == 1, "a screen reader reads it once"


def test_a_caption_shows_its_text_as_it_is_and_code_as_code():
    found = figures.caption("Where `a < b`,\n  <bos> & *one* line: 2 < 3.")
    assert found["text/plain"] == "Where `a < b`, <bos> & *one* line: 2 < 3."
    assert found["text/html"] == "<p>Where <code>a &lt; b</code>, &lt;bos&gt; &amp; *one* line: 2 &lt; 3.</p>"


@pytest.fixture(autouse=True)
def no_figures():
    plt.close("all")


def test_in_a_script_a_figure_is_only_closed(capsys):
    plt.figure()
    describe("A line that rises.")
    assert not plt.get_fignums() and capsys.readouterr().out == ""


def test_a_description_without_a_figure_is_refused():
    with pytest.raises(ConfigError, match="draw one first"):
        describe("nothing")
