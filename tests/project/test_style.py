"""Project rules that a test can check."""

import ast
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

from tests.project.lines import code_lines

ROOT = Path(__file__).resolve().parents[2]


def tracked(*patterns: str) -> list[Path]:
    """Files that git tracks or would add, as far as they exist."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no git history here: which files belong to the project is not known")
    return [path for line in done.stdout.splitlines() if (path := ROOT / line).is_file() and not path.is_symlink()]


@pytest.mark.parametrize("arguments", [("check",), ("format", "--check")], ids=lambda each: each[0])
def test_ruff_finds_nothing(arguments):
    command = [sys.executable, "-m", "ruff", *arguments, "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_a_module_of_more_than_400_code_lines_is_named_in_a_warning(tmp_path):
    (tmp_path / "module.py").write_text('"""One\nsentence."""\n\n# why\nVALUE = (\n    1,\n)\n', encoding="utf-8")
    assert code_lines(tmp_path / "module.py") == 3
    for path in tracked("*.py"):
        if path.parent.name == "source" or len(path.read_text(encoding="utf-8").splitlines()) <= 400:
            continue  # lessons are mostly prose
        if (count := code_lines(path)) > 400:
            warnings.warn(f"{path.relative_to(ROOT)} has {count} lines of code: does it hold two things?", stacklevel=1)


def test_no_module_has_a_meaningless_name():
    names = {path.name for path in tracked("*.py")}
    assert not names & {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}


def test_no_file_contains_a_machine_specific_path():
    home = re.compile(rb"(?<![\w./-])/(?:root|work|farm|home/\w+|Users/\w+)/[\w.]")
    named = [path.relative_to(ROOT) for path in tracked() if home.search(path.read_bytes())]
    assert not named, f"machine-specific paths in {named}"


def test_every_module_has_a_docstring():
    silent = [
        path.relative_to(ROOT)
        for path in tracked("minillm/**.py", "kernels/**.py", "tests/**.py", "tools/**.py")
        if path.read_text().strip() and not path.read_text().lstrip().startswith(('"""', 'r"""'))
    ]
    assert not silent, f"no docstring at the top of {silent}"


def test_no_docstring_begins_with_a_question():
    """Functions return whether something holds or say how many there are, and classes and modules are something."""
    question = re.compile(r"(What|Whether|How|Where|Which|When|Why|Whose?|By (how|which|what)|For each|Of these)\b")
    documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    asking = [
        f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}"
        for path in tracked("minillm/**.py", "kernels/**.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, documented) and question.match(ast.get_docstring(node) or "")
    ]
    assert not asking


def test_the_repository_stays_below_48_mib():
    sizes = {path: path.stat().st_size for path in tracked()}
    assert sum(sizes.values()) < 48 << 20
    big = [path.name for path, size in sizes.items() if size > 13 << 20]
    assert not big, f"one file is most of the repository: {big}"


def test_mypy_demands_annotations_in_every_room_but_the_course():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]["overrides"]
    (demanding,) = (each["module"] for each in settings if each.get("disallow_untyped_defs"))
    rooms = {path.parent.name for path in (ROOT / "minillm").glob("*/__init__.py")} - {"course"}
    assert rooms <= {module.split(".")[1] for module in demanding}
