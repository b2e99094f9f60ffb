"""Every planted fault fits the code, and the tool reports faults that the tests miss."""

import multiprocessing.forkserver
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from minillm.course.shared import checks
from tools import plant_faults
from tools.faults import TOP, Fault, StaleFault, every

ROOT = Path(__file__).resolve().parents[2]
FAULTS = every()
TEST_FILES = sorted((ROOT / "tests").rglob("test_*.py"))
SOUND = "def double(x):\n    return 2 * x\n"
TESTS = {
    "tests/test_right.py": "from tiny import double\n\n\ndef test_double():\n    assert double(3) == 6\n",
    "tests/test_blind.py": "from tiny import double\n\n\ndef test_zero():\n    assert double(0) == 0\n",
    "tests/test_wrong.py": "def test_wrong():\n    assert False\n",
}


def test_every_faults_snippet_is_in_its_file_once_and_is_replaced_by_code():
    """A fault that cannot be compiled would be caught by any test."""
    for fault in FAULTS:
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        planted = fault.plant(text)
        assert planted != text, fault.name
        if fault.file.endswith(".py"):
            compile(planted, f"{fault.file}, {fault.name}", "exec")


def test_the_tests_that_faults_name_exist():
    """Each file, and each word of an expression after -k in one of them: names of tests change."""
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in TEST_FILES}
    checks.every()
    for name in ("test_checkers", "test_solutions"):
        texts[f"tests/course/{name}.py"] += " ".join(checks.EXERCISES)  # their tests have the exercises' names
    for fault in FAULTS:
        places, *expression = fault.tests.split(" -k ")
        found = [text for place in places.split() for name, text in texts.items() if name.startswith(place)]
        assert len(found) >= len(places.split()), f"{fault.name}: {places}"
        words = set(re.findall(r"\w+", "".join(expression))) - {"and", "or", "not"}
        absent = [word for word in words if not any(word in text for text in found)]
        assert not absent, f"{fault.name}: no test in {places} is called {absent}"


def test_there_are_at_least_sixty_uniquely_named_faults_over_all_packages():
    assert len(FAULTS) >= 60
    assert [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1] == []
    rooms = {path.name for path in (ROOT / "minillm").iterdir() if path.is_dir() and list(path.glob("*.py"))}
    assert {fault.room for fault in FAULTS} == rooms - {"data"} | {TOP}


def test_a_stale_fault_is_named_with_its_file():
    fault = Fault("doubles", "tiny.py", "3 * x", "4 * x", "tests")
    with pytest.raises(StaleFault, match=r"doubles: the snippet occurs 0 times in tiny.py, not once: '3 \* x'"):
        fault.plant(SOUND)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project of one module, in git."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer to start than these tests to run
    # A process has one fork server. One that other tests started lacks pytest, and each run would import it again.
    multiprocessing.forkserver._forkserver._stop()
    root = tmp_path / "project"
    for name, text in {"tiny.py": SOUND, "conftest.py": "", **TESTS}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    return root


@pytest.mark.proof
def test_each_fault_gets_a_verdict_and_the_project_is_unchanged(project, capsys):
    def fault(name: str, tests: str, **other: str) -> Fault:
        return Fault(**{"name": name, "file": "tiny.py", "old": "2 * x", "new": "3 * x", "tests": tests} | other)

    faults = [
        fault("seen", "tests/test_right.py"),
        fault("unseen", "tests/test_blind.py"),
        fault("gone", "tests/test_right.py", old="7 * x"),
        fault("red anyway", "tests/test_wrong.py"),
        fault("no code", "tests/test_right.py", new="2 x"),
    ]
    before = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    rows = plant_faults.run(faults, root=project, preload=("pytest",))
    assert {row["fault"]: row["outcome"] for row in rows} == {
        "seen": "caught",
        "unseen": "survived",
        "gone": "stale",
        "red anyway": "fails without it",
        "no code": "does not run",
    }
    assert rows[0]["by"] == "tests/test_right.py::test_double"
    assert {path: path.read_bytes() for path in project.rglob("*") if path.is_file()} == before
    assert "survived: unseen" in capsys.readouterr().out


def test_tests_that_time_out_prove_nothing(project):
    (project / "tests" / "test_right.py").write_text("import time\n\n\ndef test_slow():\n    time.sleep(600)\n")
    fault = Fault("slow", "tiny.py", "2", "3", "tests/test_right.py")
    (row,) = plant_faults.run([fault], root=project, seconds=0.2, preload=("pytest",))
    assert row["outcome"] == "fails without it" and "not finished after 0.2 s" in row["by"]


def test_an_unknown_room_or_fault_error_lists_the_available_ones():
    with pytest.raises(ValueError, match="no room is called attic; some are: .*--list prints all"):
        plant_faults.chosen(FAULTS, "attic", [])
    with pytest.raises(ValueError, match="no fault is called none"):
        plant_faults.chosen(FAULTS, None, ["none"])
    assert plant_faults.chosen(FAULTS, "ops", [FAULTS[0].name]) == []


def test_a_mutation_that_survives_is_reported_with_its_line(project, capsys):
    """Doubling is told apart from its mutations by a test of 3, and hardly by one of 0."""
    faults = plant_faults.mutated("tiny.py", project)
    assert "tiny.py:2 2 becomes 3" in [fault.name for fault in faults]
    assert faults[0].tests == "tests/test_blind.py tests/test_right.py tests/test_wrong.py"
    drawn = plant_faults.mutated("tiny.py", project, count=2, seed=1)
    assert len(drawn) == 2 and drawn == plant_faults.mutated("tiny.py", project, count=2, seed=1)
    plant_faults.run(faults, root=project, tests="tests/test_right.py", preload=("pytest",))
    assert "survived" not in capsys.readouterr().out
    plant_faults.run(faults, root=project, tests="tests/test_blind.py", preload=("pytest",))
    assert "survived: tiny.py:2 2 becomes 3" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no Python file is at absent"):
        plant_faults.mutated("absent", project)


def test_the_tests_of_a_file_are_those_of_its_room():
    assert plant_faults.tests_of("minillm/kv_cache/layer_cache.py").startswith("tests/kv_cache/test_layer_cache.py ")
    assert plant_faults.tests_of("kernels/few_rows.py").startswith("tests/kernels/test_few_rows.py ")
    assert plant_faults.tests_of("minillm/request.py").startswith("tests/test_request.py ")
    assert plant_faults.tests_of("minillm/cli/options.py") == "tests/project/test_cli.py"


def test_a_mutation_that_keeps_tests_from_running_is_caught(monkeypatch, capsys):
    rows = [{"outcome": outcome} for outcome in ("caught", "does not run", "hung", "survived")]
    monkeypatch.setattr(plant_faults, "run", lambda *_, **__: rows)
    monkeypatch.setattr("sys.argv", ["plant_faults.py", "--mutate", "minillm/kv_cache", "--count", "4"])
    monkeypatch.setattr(plant_faults, "prepare", lambda: None)
    with pytest.raises(SystemExit, match="True"):
        plant_faults.main()
    assert "3 of 4 faults caught" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["plant_faults.py", "--mutate", "minillm/kv_cache", "--room", "kv_cache"])
    with pytest.raises(SystemExit, match="2"):
        plant_faults.main()
