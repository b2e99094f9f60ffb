"""Collect everything that a learner installs in one folder, so that thirty laptops need no network.

    python tools/wheelhouse.py FOLDER [--torch-index URL]

The folder gets the wheels of `minillm[course]`, at the locked versions and without test tools, and INSTALL.txt with
the commands for the laptops. Wheels serve one kind of machine and one version of Python, so run this on a machine like
the laptops. On Linux, pip's usual index has the build of torch for GPUs, which is several GB: name PyTorch's index of
CPU builds, which the README has.
"""

import argparse
import platform
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST = 900  # MB: what fits on a small stick and is copied in minutes
EXTRA = "course"
INSTALL = """Install minillm without a network, in this folder's parent, where the learners' copy of the project
(`minillm course export {copy}`) is too. It needs 2.7 GB of disk, besides the wheels, and a machine like the one that
collected them: {system}.
Write that Python's name for the first `python`; on some systems it is python3 or python{version}.

    python -m venv .venv
    .venv/bin/python -m pip install --no-index --find-links {folder} "minillm[course]"
    .venv/bin/python -m minillm doctor

Then, and each time you continue:

    cd {copy}
    ../.venv/bin/python -m minillm.course.making.build lab
    ../.venv/bin/jupyter lab --notebook-dir lab

On Windows, write .venv\\Scripts\\ instead of .venv/bin/, and ..\\.venv\\Scripts\\ instead of ../.venv/bin/.
"""


def wanted(extra: str = EXTRA) -> list[str]:
    """The requirements of the package with one extra, those of other extras that it names included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras, found = project["optional-dependencies"], [*project["dependencies"]]
    names = [extra]
    for name in names:  # grows
        for line in extras[name]:
            if line.startswith("minillm["):
                names += [each.strip() for each in line.removeprefix("minillm[").rstrip("]").split(",")]
            else:
                found.append(line)
    return found


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)


def collect(folder: Path, torch_index: str | None) -> None:
    """Download the wheels. Raises CalledProcessError, after pip has said why."""
    folder.mkdir(parents=True, exist_ok=True)
    pip("wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    constraint = ["--constraint", str(ROOT / "requirements.lock")]
    options = ["--quiet", "--dest", str(folder), "--only-binary", ":all:"]
    if torch_index is not None:  # alone: that index may have other builds of the rest
        torch = next(line for line in wanted() if line.startswith("torch"))
        pip("download", *options, "--no-deps", "--index-url", torch_index, *constraint, torch)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "requirements.txt"
        file.write_text("\n".join(wanted()), encoding="utf-8")
        pip("download", *options, "--find-links", str(folder), *constraint, "--requirement", str(file))


def instructions(folder: str, copy: str = "learners") -> str:
    """What INSTALL.txt says. The locked packages may refuse a Python whose third number is smaller than this one's."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    system = f"{platform.system()} {platform.machine()} with Python {version}"
    return INSTALL.format(folder=folder, copy=copy, system=system, version=version)


def megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.iterdir()) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch-index", help="an index to take torch from")
    given = parser.parse_args()
    try:
        collect(given.folder, given.torch_index)
    except subprocess.CalledProcessError:
        sys.exit("pip could not collect the wheels: its message is above")
    (given.folder / "INSTALL.txt").write_text(instructions(given.folder.resolve().name), encoding="utf-8")
    size = megabytes(given.folder)
    print(f"{given.folder}: {len(list(given.folder.glob('*.whl')))} wheels, {size:.0f} MB")
    if size > MOST:
        sys.exit(f"more than {MOST} MB: is torch a build for GPUs? --torch-index names an index of CPU builds")


if __name__ == "__main__":
    main()
