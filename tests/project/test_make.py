"""What `make test` and `make check` run, and that the cells of a notebook stay in one process."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def commands(target: str, *variables: str) -> list[str]:
    """The commands make would run for a target if .venv is up to date."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--dry-run", "--assume-old=.venv/.installed", target, *variables]
    return subprocess.run(command, cwd=ROOT, env=ours, capture_output=True, text=True, check=True).stdout.splitlines()


def pytest_arguments(target: str) -> list[str]:
    words = shlex.split(commands(target)[-1])
    assert {"PYTHONHASHSEED=0", "OMP_NUM_THREADS=1"} <= set(words)
    return words[words.index("pytest") + 1 :]


def test_make_test_runs_every_test_and_notebook_in_parallel():
    arguments = pytest_arguments("test")
    parallel = ["-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder"]
    assert arguments == [*parallel, "--nbval", "--nbval-current-env"], "no path: all of them"


def test_make_check_is_format_lint_types_and_tests_that_exist():
    tools = {line.removeprefix(".venv/bin/") for line in commands("check")}
    assert {"ruff check .", "ruff format --check .", "mypy"} <= tools
    paths = [word for word in pytest_arguments("check") if word.startswith("tests/")]
    assert "tests/project/test_imports.py" in paths and len(paths) > 10
    for path in paths:
        file, _, test = path.partition("::")
        assert (ROOT / file).exists(), path
        assert not test or f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), path


@pytest.mark.parametrize("target", ["test", "check", "explore"])
def test_tests_can_be_selected(target):
    assert "-k some_name" in commands(target, "PYTEST=-k some_name")[-1]


def test_continuous_integration_prints_the_summary_of_make_test_last():
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1] == "exec make test"


@pytest.fixture
def processes(monkeypatch):
    """The number of processes for `-n auto`, given the cores and whether there is a GPU."""
    spec = importlib.util.spec_from_file_location("root_conftest", ROOT / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))
        spec.loader.exec_module(module)

    def count(cores: int, gpu: bool = False) -> int:
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        return module.pytest_xdist_auto_num_workers()

    return count


def test_there_is_one_process_per_core_up_to_a_limit_and_only_one_on_a_gpu(processes):
    assert [processes(cores) for cores in (1, 2, 8, 64)] == [1, 2, 8, 8]
    assert processes(8, gpu=True) == 1


def test_each_notebook_runs_whole_and_in_order_in_one_process(tmp_path):
    """As in `make test`: a cell needs the definitions of earlier cells."""
    for name in ("first", "second"):
        sources = ["count = 1", "assert count == 1; count += 1", "assert count == 2; count += 1", "assert count == 3"]
        cells = [nbformat.v4.new_code_cell(source) for source in sources]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / f"{name}.ipynb")
    shutil.copy(ROOT / "conftest.py", tmp_path)
    command = [sys.executable, "-m", "pytest", *pytest_arguments("test"), "-v", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, "--rootdir", tmp_path, tmp_path], cwd=tmp_path, capture_output=True, text=True)
    found = re.findall(r"\[(gw\d+)\] .*(PASSED|FAILED|SKIPPED) (\w+)\W+ipynb::Cell (\d)", done.stdout)
    assert len(found) == 8 and {outcome for _, outcome, _, _ in found} == {"PASSED"}, done.stdout + done.stderr
    assert len({(worker, notebook) for worker, _, notebook, _ in found}) == 2
