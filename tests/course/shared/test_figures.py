"""A figure comes with a text alternative."""

import matplotlib.pyplot as plt
import pytest

from minillm.course import describe
from minillm.course.making import build
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


def test_a_described_figure_is_shown_once_with_its_text(tmp_path):
    (tmp_path / "98_trial.py").write_text(CELL)
    notebook = build.execute(build.convert(tmp_path / "98_trial.py"), tmp_path)
    figure, after = notebook.cells[0].outputs
    assert figure.data["image/png"] and figure.data["text/plain"] == "A line that rises."
    assert figure.metadata["image/png"]["alt"] == "A line that rises." and after.text == "after\n"
    assert 'alt="A line that rises."' in build.to_html(notebook, "a trial")


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
