"""How notebooks are tested: printed output is compared, noise is not, and each failure is reported once."""

import copy
import os
import re
import shutil
import subprocess
import sys

import nbformat
import pytest

from minillm.course.making import build
from tests.project.makefile import ROOT, pytest_arguments

SOURCE = """\
# %%
import os, sys
print("a noise that differs:", os.getpid(), file=sys.stderr)
print("the same, 0.05895")

# %% tags=["nbval-ignore-output"] uncompared="a time, or here what differs like one"
print(os.getpid())

# %%
taught = 42
print(taught)

# %%
print("after", taught)
"""


def unchanged(cells):
    pass


def changed_number(cells):
    cells[2].outputs[0].text = "43\n"


def stripped_output(cells):
    cells[2].outputs = []


def other_code(cells):
    cells[2].source = "print(44)"


def out_of_order(cells):
    cells[2:] = reversed(cells[2:])


def other_last_digit(cells):
    _reprint(cells[0], "0.05895", "0.05896")


def other_digits(cells):
    _reprint(cells[0], "0.05895", "0.05897")


def _reprint(cell, old: str, new: str):
    (printed,) = (output for output in cell.outputs if output.name == "stdout")
    assert old in printed.text
    printed.text = printed.text.replace(old, new)


CHANGES = (unchanged, changed_number, stripped_output, other_code, out_of_order, other_last_digit)
EVALUATING = {"05_quantizing_weights": other_last_digit, "06_awq_and_gptq": other_digits}  # by names of real lessons


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, list[tuple[int, str, str]]]:
    """(cell, outcome, process) of one notebook per change, in order; all run together, as `make test` runs lessons."""
    folder = tmp_path_factory.mktemp("notebooks")
    (folder / "trial.py").write_text(SOURCE)
    executed = build.execute(build.convert(folder / "trial.py"), folder)
    for change in CHANGES:
        notebook = copy.deepcopy(executed)
        change(notebook.cells)
        nbformat.write(notebook, folder / f"{change.__name__}.ipynb")
    (folder / "solutions").mkdir()
    nbformat.write(executed, folder / "solutions" / "solved.ipynb")
    for name, change in EVALUATING.items():
        notebook = copy.deepcopy(executed)
        change(notebook.cells)
        nbformat.write(notebook, folder / f"{name}.ipynb")
    shutil.copy(ROOT / "conftest.py", folder)
    command = [sys.executable, "-m", "pytest", *pytest_arguments("test"), "-n2", "-v", "-p", "no:cacheprovider"]
    command += ["--rootdir", folder]
    always = {name: value for name, value in os.environ.items() if name != "MINILLM_TESTS_UNTIL"}
    always["PYTHONPATH"] = str(ROOT)  # which has what `-p` names
    tested = subprocess.run([*command, folder], cwd=folder, env=always, capture_output=True, text=True)
    for name in ("solved", *EVALUATING):
        assert f"{name}.ipynb" not in tested.stdout, f"{name} is left to the proofs"
    proofs = [*command, "-m", "proof", *(folder / f"{name}.ipynb" for name in EVALUATING)]
    proven = subprocess.run(proofs, cwd=folder, env=always, capture_output=True, text=True)
    found = {name: [] for name in (*(change.__name__ for change in CHANGES), *EVALUATING)}
    line = r"\[(gw\d+)\] .*(PASSED|FAILED|SKIPPED) (\w+)\W+ipynb::Cell (\d)"
    for process, outcome, name, cell in re.findall(line, tested.stdout + proven.stdout):
        found[name].append((int(cell), outcome, process))
    assert all(len(cells) == 4 for cells in found.values()), tested.stdout + proven.stdout + proven.stderr
    return found


def outcomes(run: list[tuple[int, str, str]]) -> list[str]:
    return [outcome for _, outcome, _ in run]


@pytest.mark.proof
def test_each_notebook_runs_whole_and_in_order_in_one_process(runs):
    """A cell needs the definitions of earlier cells."""
    for run in runs.values():
        assert [cell for cell, _, _ in run] == [0, 1, 2, 3]
        assert len({process for _, _, process in run}) == 1
    assert {run[0][2] for run in runs.values()} == {"gw0", "gw1"}


@pytest.mark.proof
def test_noise_and_times_are_not_compared(runs):
    assert outcomes(runs["unchanged"]) == ["PASSED"] * 4


@pytest.mark.proof
def test_where_models_are_evaluated_the_last_digit_of_a_decimal_depends_on_the_processor(runs):
    assert outcomes(runs["05_quantizing_weights"]) == ["PASSED"] * 4
    assert outcomes(runs["06_awq_and_gptq"]) == outcomes(runs["other_last_digit"]) == ["FAILED", *["SKIPPED"] * 3]


@pytest.mark.proof
@pytest.mark.parametrize("change", [changed_number, stripped_output, other_code, out_of_order])
def test_a_changed_output_fails_and_the_rest_of_the_notebook_is_skipped(change, runs):
    assert outcomes(runs[change.__name__]) == ["PASSED", "PASSED", "FAILED", "SKIPPED"]


def test_lessons_are_tested_on_the_cpu_tier():
    """Their saved outputs come from it; other tiers give other numbers."""
    assert os.environ["MINILLM_TIER"] == "cpu"
