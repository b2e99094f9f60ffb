"""What `make test` and `make check` run, and in how many processes."""

import importlib.util
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch

from tests.project.makefile import RAY, ROOT, commands, pytest_arguments
from tests.waiting import TIMEOUT

PARALLEL = ["-p", "tests.start", "-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder"]


NOTEBOOKS = ["--nbval", "--nbval-current-env"]


def test_make_test_runs_every_test_but_the_proofs_and_every_lesson_in_parallel():
    assert pytest_arguments("test") == [*PARALLEL, *NOTEBOOKS, "-m", "not proof"], "no path: all"


def test_make_check_is_format_lint_types_and_the_tests_with_a_marker():
    tools = {line.removeprefix(".venv/bin/") for line in commands("check")}
    assert {"ruff check .", "ruff format --check .", "mypy"} <= tools


@pytest.mark.parametrize(("target", "marker"), [("check", "key"), ("proofs", "proof")])
def test_a_marker_selects_tests_and_only_the_files_that_have_some_are_collected(target, marker):
    *arguments, option, selected = pytest_arguments(target)
    assert (arguments[: len(PARALLEL)], option) == (PARALLEL, "-m")
    paths = arguments[len(PARALLEL) :]
    if target == "proofs":  # the solved notebooks' cells are proofs
        assert paths[:2] == NOTEBOOKS and paths.pop() == "notebooks"
        paths = paths[2:]
    assert selected == {"key": "key and not proof", "proof": "proof"}[marker]
    uses = f"pytest.mark.{marker}", f"tests.{marker}"  # in another form, this file would be one of them
    texts = {path: path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/test_*.py")}
    files = [path for path, text in texts.items() if any(each in text for each in uses)]
    assert paths == sorted(path.relative_to(ROOT).as_posix() for path in files) and len(paths) > 4


def test_only_tests_install_ray():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    needing = {line.split(":")[0] for line in text.splitlines() if "$(RAY)" in line and not line.startswith("$(RAY)")}
    assert needing == {"test", "proofs"}
    (line,) = (line for line in commands(RAY) if "requirements-ray.lock" in line)
    assert "--constraint requirements.lock" in line, "its packages change no version of the others"


@pytest.mark.parametrize("target", ["test", "check", "proofs", "explore"])
def test_tests_can_be_selected(target):
    assert "-k some_name" in commands(target, "PYTEST=-k some_name")[-1]


@pytest.mark.parametrize("target", ["demo", "test", "proofs", "lab", "notebooks", "site"])
def test_its_twin_in_python_runs_the_same_commands(target, tmp_path):
    twin = [sys.executable, ROOT / "make.py", target, "--dry-run"]
    printed = subprocess.run(twin, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()
    wanted = [line.strip() for line in commands(target)]
    assert printed[-len(wanted) :] == wanted
    set_up, with_ray = (
        [" ".join(line.split()) for line in commands(stamp) if " pip install " in line] for stamp in ("setup", RAY)
    )
    made = printed[: -len(wanted)]
    ways = ([], set_up) if target not in ("test", "proofs") else ([], with_ray[len(set_up) :], with_ray)
    assert made in ways, "the environment is there, or is made by the Makefile's commands"


def test_jupyterlabs_and_the_builders_options_are_passed_on_and_other_targets_have_none():
    twin = [sys.executable, ROOT / "make.py", "--dry-run"]
    built = subprocess.check_output([*twin, "notebooks", "09", "--busy"], text=True).splitlines()[-1]
    assert built.endswith("making.build notebooks 09 --busy")
    assert built == commands("notebooks", "NOTEBOOK=09", "ARGS=--busy")[-1].strip()
    printed = subprocess.check_output([*twin, "lab", "--allow-root", "--ip", "0.0.0.0"], text=True)
    assert printed.endswith("jupyter lab --notebook-dir lab --LabApp.news_url=None --allow-root --ip 0.0.0.0\n")
    refused = subprocess.run([*twin, "demo", "--allow-root"], capture_output=True, text=True)
    assert refused.returncode == 2 and "--allow-root" in refused.stderr


def set_up(tmp_path, *, given: str = "", **versions: str) -> subprocess.CompletedProcess:
    """Make .venv's Python where the PATH has these Pythons: scripts that answer for a version, or cannot start."""
    (tmp_path / "path").mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "requirements.lock", tmp_path)
    for name, version in versions.items():
        major, minor, _ = version.split(".")
        script = tmp_path / "path" / name.replace("_", ".")
        script.write_text(
            "#!/bin/bash\n"
            f'[ "$1" = --version ] && echo Python {version} && exit 0\n'
            f'[ "$1" = -c ] && exec {sys.executable} -c "import sys; sys.version_info = ({major}, {minor}, 0); $2"\n'
            'mkdir -p "$3/bin" && echo made > "$3/bin/python"\n'
            if version != "0.0.0"
            else "#!/bin/bash\nexit 127\n"
        )
        script.chmod(0o755)
    variables = [f"PYTHON={given}"] if given else []
    path = f"{tmp_path / 'path'}:/usr/bin:/bin"
    names = "PYTHONS=" + " ".join(name.replace("_", ".") for name in versions)
    command = ["make", ".venv/bin/python", names, *variables]
    inherited = ("MAKE", "MFLAGS", "PYTHON")  # of a `make test` above this one
    ours = {name: value for name, value in os.environ.items() if not name.startswith(inherited)}
    return subprocess.run(command, cwd=tmp_path, env=ours | {"PATH": path}, capture_output=True, text=True)


def test_the_environment_is_made_with_the_first_python_that_fits(tmp_path):
    done = set_up(tmp_path, python3_11="0.0.0", python3_13="3.13.0", python3="3.12.1")
    assert done.returncode == 0 and "making .venv with Python 3.13.0" in done.stdout
    assert (tmp_path / ".venv" / "bin" / "python").exists()


def test_a_named_python_that_does_not_fit_is_an_error_and_no_other_is_taken(tmp_path):
    done = set_up(tmp_path, given="python3", python3_11="3.11.7", python3="3.10.2")
    assert done.returncode != 0 and not (tmp_path / ".venv").exists()
    assert "needs Python 3.11, 3.12 or 3.13 (3.14: not tested). Tried: python3 (Python 3.10.2)." in done.stderr
    assert "make PYTHON=/path/to/python3.13" in done.stderr


def test_without_a_python_that_fits_make_says_what_it_tried_and_how_to_get_one(tmp_path):
    done = set_up(tmp_path, python3_12="0.0.0", python3="3.15.0", python="2.7.18")
    assert done.returncode != 0
    tried = "python3.12 (cannot be run) python3 (Python 3.15.0) python (Python 2.7.18)"
    assert f"Tried: {tried}." in done.stderr and "uv python install 3.13" in done.stderr


def test_continuous_integration_runs_all_tests_and_prints_a_summary_last():
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert lines[-2:] == ["make test", "MINILLM_TESTS_UNTIL=$until exec make proofs"] and "set -euo pipefail" in lines


@pytest.fixture
def root_conftest(monkeypatch):
    spec = importlib.util.spec_from_file_location("root_conftest", ROOT / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))
        spec.loader.exec_module(module)
    return module


def test_no_test_begins_when_the_time_for_all_is_up(root_conftest, monkeypatch, request):
    for until in ("inf", str(time.time() + TIMEOUT)):
        monkeypatch.setenv("MINILLM_TESTS_UNTIL", until)
        root_conftest.pytest_runtest_setup(request.node)
    monkeypatch.setenv("MINILLM_TESTS_UNTIL", "1")
    with pytest.raises(pytest.skip.Exception, match="the time for all tests is up"):
        root_conftest.pytest_runtest_setup(request.node)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.start", "-p", "no:cacheprovider", __file__]
    command += ["-k", "install_ray"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "1 skipped" in done.stdout and not done.returncode, done.stdout


@pytest.fixture
def processes(root_conftest, monkeypatch):
    """The number of processes for `-n auto`, given the cores and whether there is a GPU."""

    def count(cores: int, gpu: bool = False) -> int:
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        return root_conftest.pytest_xdist_auto_num_workers()

    return count


def test_there_is_one_process_per_core_up_to_a_limit_and_only_one_on_a_gpu(processes):
    assert [processes(cores) for cores in (1, 2, 8, 64)] == [1, 2, 8, 8]
    assert processes(8, gpu=True) == 1
