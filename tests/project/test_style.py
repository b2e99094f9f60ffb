"""Project rules that a test can check."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_no_module_has_more_than_500_lines():
    modules = [path for path in tracked("*.py") if path.parent.name != "source"]  # lessons are mostly prose
    long = [path.name for path in modules if len(path.read_text().splitlines()) > 500]
    assert not long, f"over 500 lines: {long}"


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


def test_the_repository_stays_below_48_mib():
    sizes = {path: path.stat().st_size for path in tracked()}
    assert sum(sizes.values()) < 48 << 20
    big = [path.name for path, size in sizes.items() if size > 13 << 20]
    assert not big, f"one file is most of the repository: {big}"
