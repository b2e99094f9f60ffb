"""How notebooks are tested: printed output is compared, noise is not, and each failure is reported once."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from minillm.course import build

ROOT = Path(__file__).resolve().parents[2]
SOURCE = """\
# %%
import os, sys
print("a noise that differs:", os.getpid(), file=sys.stderr)
print("the same")

# %% tags=["nbval-ignore-output"]
# Not compared: a time, or here what differs like one.
print(os.getpid())

# %%
taught = 42
print(taught)

# %%
print("after", taught)
"""


def outcomes(folder: Path, change=None) -> dict[str, str]:
    """Each cell's outcome when nbval runs a notebook, after `change` modified its saved outputs."""
    (folder / "trial.py").write_text(SOURCE)
    notebook = build.execute(build.convert(folder / "trial.py"), folder)
    if change:
        change(notebook)
    nbformat.write(notebook, folder / "trial.ipynb")
    shutil.copy(ROOT / "conftest.py", folder)
    options = ("--nbval", "--nbval-current-env", "-v", "-p", "no:cacheprovider", "--rootdir", folder)
    command = [sys.executable, "-m", "pytest", *map(str, options), str(folder / "trial.ipynb")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    lines = [line.split() for line in done.stdout.splitlines() if "::Cell" in line and "%]" in line]
    found = {f"{words[0].split('::')[1]} {words[1]}": words[2] for words in lines}
    assert len(found) == 4, done.stdout + done.stderr
    return found


def test_noise_and_times_are_not_compared(tmp_path):
    assert set(outcomes(tmp_path).values()) == {"PASSED"}


def changed_number(cell):
    cell.outputs[0].text = "43\n"


def stripped_output(cell):
    cell.outputs = []


def other_code(cell):
    cell.source = "print(44)"


@pytest.mark.parametrize("change", [changed_number, stripped_output, other_code])
def test_a_changed_output_fails_and_the_rest_of_the_notebook_is_skipped(change, tmp_path):
    found = outcomes(tmp_path, lambda notebook: change(notebook.cells[2]))
    assert list(found.values()) == ["PASSED", "PASSED", "FAILED", "SKIPPED"]


def test_a_cell_out_of_order_fails(tmp_path):
    def swap(notebook):
        notebook.cells[2:] = reversed(notebook.cells[2:])

    assert list(outcomes(tmp_path, swap).values()) == ["PASSED", "PASSED", "FAILED", "SKIPPED"]


def test_lessons_are_tested_on_the_cpu_tier():
    """Their saved outputs come from it; other tiers give other numbers."""
    assert os.environ["MINILLM_TIER"] == "cpu"
