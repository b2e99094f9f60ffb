"""The commands of the Makefile's targets."""

import os
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RAY = ".venv/.installed-ray"


def commands(target: str, *variables: str) -> list[str]:
    """The commands make would run for a target if .venv is up to date; for setup, those that make it."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PYTEST"))}
    stamps = [f"--assume-old=.venv/.installed{extra}" for extra in ("", "-ray")]
    known = ["--always-make"] if target in ("setup", RAY) else stamps
    command = ["make", "--dry-run", *known, target, *variables]
    return subprocess.run(command, cwd=ROOT, env=ours, capture_output=True, text=True, check=True).stdout.splitlines()


def pytest_arguments(target: str) -> list[str]:
    words = shlex.split(commands(target)[-1])
    assert {"PYTHONHASHSEED=0", "OMP_NUM_THREADS=1"} <= set(words)
    return words[words.index("pytest") + 1 :]
