"""What `make test` and `make check` run, and in how many processes."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from tests.project.makefile import ROOT, commands, pytest_arguments


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


@pytest.mark.parametrize("target", ["demo", "test", "lab", "notebooks", "site"])
def test_its_twin_in_python_runs_the_same_commands(target, tmp_path):
    twin = [sys.executable, ROOT / "make.py", target, "--dry-run"]
    printed = subprocess.run(twin, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()
    wanted = [line.strip() for line in commands(target)]
    assert printed[-len(wanted) :] == wanted
    set_up = [" ".join(line.split()) for line in commands("setup") if " pip install " in line]
    made = printed[: -len(wanted)]
    assert made in ([], set_up), "the environment is there, or is made by the Makefile's commands"


def test_jupyterlabs_options_are_passed_on_and_other_targets_have_none():
    twin = [sys.executable, ROOT / "make.py", "--dry-run"]
    printed = subprocess.check_output([*twin, "lab", "--allow-root", "--ip", "0.0.0.0"], text=True)
    assert printed.endswith("jupyter lab --notebook-dir lab --allow-root --ip 0.0.0.0\n")
    refused = subprocess.run([*twin, "demo", "--allow-root"], capture_output=True, text=True)
    assert refused.returncode == 2 and "--allow-root" in refused.stderr


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
