"""The Makefile's main commands in plain Python, for machines without make.

    python make.py demo                           serve, load-test and compare the embedded model; a report in build/
    python make.py test                           every test but the proofs, with the lessons
    python make.py proofs                         the longest tests and lessons, the solved notebooks, types
    python make.py lab                            JupyterLab on copies of the notebooks, in lab/
    python make.py lab --allow-root --ip 0.0.0.0  the same in a container: JupyterLab gets the options
    python make.py site                           the course as a site to read, in build/site
    python make.py notebooks                      rebuild and execute the notebooks
    python make.py notebooks 09 --busy            those of lesson 09, although other programs run meanwhile
    python make.py setup --torch-index URL        only the environment, torch from that index
    python make.py demo --dry-run                 print the commands

It needs Python 3.11 to 3.14 and installs everything else into .venv.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
STAMP, RAY_STAMP = VENV / ".installed", VENV / ".installed-ray"
BIN = Path(".venv") / ("Scripts" if os.name == "nt" else "bin")
PYTHON = str(BIN / "python")
LOCK, RAY_LOCK = "requirements.lock", "requirements-ray.lock"
IN_PARALLEL = ["-p", "tests.start", "-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder"]

Command = tuple[dict[str, str], list[str]]  # variables of the environment, and words


def setup(torch_index: str | None = None) -> list[Command]:
    torch = next(line for line in (ROOT / LOCK).read_text(encoding="utf-8").splitlines() if line.startswith("torch=="))
    install = [PYTHON, "-m", "pip", "install", "--quiet"]
    index = ["--index-url", torch_index] if torch_index else []
    editable = ["--no-deps", "--no-build-isolation", "--editable", "."]
    return [
        ({}, [*install, *index, torch]),
        ({}, [*install, "--requirement", LOCK]),
        ({"PYTHONWARNINGS": "ignore"}, [*install, *editable]),
    ]


def setup_ray() -> list[Command]:
    """What `test` and `proofs` need in addition."""
    return [({}, [PYTHON, "-m", "pip", "install", "--quiet", "--constraint", LOCK, "--requirement", RAY_LOCK])]


def marked(marker: str) -> list[str]:
    """The files that have tests with a marker."""
    uses = re.compile(rf"(pytest\.mark\.|tests\.){marker}")
    files = [path for path in ROOT.glob("tests/**/test_*.py") if uses.search(path.read_text("utf-8"))]
    return sorted(path.relative_to(ROOT).as_posix() for path in files)


def commands(name: str, more: Sequence[str] = ()) -> list[Command]:
    """What to run for a target, once the environment is there. more: words for JupyterLab, or for the builder."""
    build = [PYTHON, "-m", "minillm.course.making.build"]
    variables, pytest = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}, [PYTHON, "-m", "pytest", *IN_PARALLEL]
    notebooks = ("--nbval", "--nbval-current-env")
    lab = ["lab", "--notebook-dir", "lab", "--LabApp.news_url=None"]  # it doesn't ask about its own news
    return {
        "setup": [],
        "demo": [({}, [*build, "demo"])],
        "lab": [({}, [*build, "lab"]), ({}, [str(BIN / "jupyter"), *lab, *more])],
        "site": [({}, [PYTHON, "tools/build_site.py"])],
        "notebooks": [({}, [*build, "notebooks", *more])],
        "test": [(variables, [*pytest, *notebooks, "-m", "not proof"])],
        "proofs": [(variables, [*pytest, *notebooks, *marked("proof"), "notebooks", "-m", "proof"])],
    }[name]


def is_newer(stamp: Path, *made_from: Path) -> bool:
    """Whether a stamp is there and newer than what it is made from."""
    return stamp.exists() and all(path.stat().st_mtime <= stamp.stat().st_mtime for path in made_from)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=("setup", "demo", "test", "proofs", "lab", "notebooks", "site"))
    parser.add_argument(
        "--torch-index", help="an index to take torch from; that of CPU builds saves several GB on Linux"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands instead of running them")
    given, more = parser.parse_known_args()
    if more and given.target not in ("lab", "notebooks"):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    os.chdir(ROOT)
    stamps: dict[Path, list[Command]] = {}
    if not is_newer(STAMP, ROOT / LOCK, ROOT / "pyproject.toml"):
        stamps[STAMP] = setup(given.torch_index)
    if given.target in ("test", "proofs") and (stamps or not is_newer(RAY_STAMP, ROOT / RAY_LOCK, STAMP)):
        stamps[RAY_STAMP] = setup_ray()
    todo = [command for each in stamps.values() for command in each]
    if given.dry_run:
        for variables, words in [*todo, *commands(given.target, more)]:
            print(*(f"{name}={value}" for name, value in variables.items()), shlex.join(words))
        return
    if not (3, 11) <= sys.version_info[:2] < (3, 15):
        sys.exit(
            f"minillm needs Python 3.11, 3.12 or 3.13, and {sys.executable} is {sys.version.split()[0]}: run make.py "
            "with one of them (from python.org, or `uv python install 3.13`)"
        )
    if todo and not VENV.exists():
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    for stamp, each in stamps.items():
        for variables, words in each:
            subprocess.run(words, env=os.environ | variables, check=True)
        stamp.touch()
    for variables, words in commands(given.target, more):
        if code := subprocess.run(words, env=os.environ | variables).returncode:
            sys.exit(code)


if __name__ == "__main__":
    main()
