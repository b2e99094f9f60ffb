"""Write requirements.lock, requirements-ray.lock and environment.yml from pyproject.toml (`make lock`).

Installs everything that pyproject.toml requires into a fresh environment and locks the versions that pip chose; then
the extra `ray`, whose lock has what that adds. Previously locked versions are kept where they still fit; `make lock
UPGRADE=1` takes the newest instead. `--from PYTHON` reads an existing environment, and leaves the lock of `ray` alone.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK, RAY_LOCK = ROOT / "requirements.lock", ROOT / "requirements-ray.lock"
RAY = "ray"  # the extra with a lock of its own
PYTHON = "3.11"
# CUDA builds of torch pull these in at versions tied to the build; the lock must fit CPU builds too.
FROM_TORCH = re.compile(r"^(nvidia|cuda)-")
# Packages for one platform only; the file must work on the others too.
MARKERS = {"triton": "sys_platform == 'linux'"}
HEADER = """\
# Exact versions of everything `make` installs, written by `make lock`. torch comes first because it is
# installed first: `pip install torch==...` alone, then this file (an open range may pull several builds).
"""


RAY_HEADER = """\
# What the extra `ray` adds to requirements.lock, written by `make lock`. Only `make test` and `make proofs` install it.
"""


def normalized(name: str) -> str:
    """The canonical spelling of a project's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements() -> list[str]:
    """All requirements of pyproject.toml including every extra but `ray`, but not the project's own extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *(each for name, each in extras().items() if name != RAY)]
    return [line for group in lists for line in group if not line.startswith("minillm[")]


def extras() -> dict[str, list[str]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def direct_names() -> list[str]:
    """Names that pyproject.toml requires, in its order, without duplicates."""
    return list(dict.fromkeys(normalized(re.match(r"[\w.-]+", line)[0]) for line in requirements()))


def freeze(python: str) -> dict[str, str]:
    """Name to version of everything installed in `python`'s environment, except pip and torch's CUDA packages."""
    command = [python, "-m", "pip", "list", "--format=freeze", "--exclude-editable", "--exclude=pip"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    pins = dict(line.split("==") for line in lines)
    return {
        normalized(name): version.split("+")[0]
        for name, version in pins.items()
        if not FROM_TORCH.match(normalized(name)) and normalized(name) != "minillm"
    }


def install_fresh(folder: str, upgrade: bool) -> str:
    """Create an environment in `folder` with everything pyproject.toml requires; returns its interpreter."""
    venv.create(folder, with_pip=True)
    python = str(Path(folder, "bin", "python"))
    command = [python, "-m", "pip", "install", "--quiet"]
    if LOCK.exists() and not upgrade:
        command += ["--constraint", str(LOCK)]
    subprocess.run([*command, *requirements()], check=True)
    return python


def add_ray(python: str, pins: dict[str, str], upgrade: bool) -> dict[str, str]:
    """Install the extra `ray` into an environment that has all others; returns the versions of what that adds."""
    with tempfile.TemporaryDirectory() as folder:
        held = Path(folder, "held.txt")
        held.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        command = [python, "-m", "pip", "install", "--quiet", "--constraint", str(held)]
        if RAY_LOCK.exists() and not upgrade:
            command += ["--constraint", str(RAY_LOCK)]
        asked = [line for line in extras()[RAY] if not line.startswith("minillm[")]
        subprocess.run([*command, *asked], check=True)
    return {name: version for name, version in freeze(python).items() if name not in pins}


def write(pins: dict[str, str]) -> None:
    """Write both files, torch first and the rest by name."""
    order = ["torch", *sorted(pins.keys() - {"torch"})]
    lines = {name: f"{name}=={pins[name]}" for name in order}
    marked = [line + (f"; {MARKERS[name]}" if name in MARKERS else "") for name, line in lines.items()]
    LOCK.write_text(HEADER + "\n".join(marked) + "\n")
    direct = [line for line in marked if re.match(r"[\w.-]+", line)[0] in direct_names()]
    conda = [
        "# For conda, written by `make lock`: conda installs Python, pip installs the rest at the locked versions.",
        "name: minillm",
        "channels:",
        "  - conda-forge",
        "  - nodefaults",
        "dependencies:",
        f"  - python={PYTHON}",
        "  - pip",
        "  - pip:",
        "      - --constraint requirements.lock",
        *(f'      - "{line}"' for line in direct),
        "      - --editable .",
    ]
    (ROOT / "environment.yml").write_text("\n".join(conda) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    parser.add_argument("--from", dest="python", help="read this interpreter's environment; install nothing")
    options = parser.parse_args()
    if sys.platform != "linux":
        parser.error(f"the lock is written on Linux, where triton exists; this is {sys.platform}")
    with tempfile.TemporaryDirectory() as folder:
        python = options.python or install_fresh(folder, options.upgrade)
        pins = freeze(python)
        added = None if options.python else add_ray(python, pins, options.upgrade)
    missing = [name for name in direct_names() if name not in pins]
    if missing:
        parser.error(f"not installed in that environment: {', '.join(missing)}")
    write(pins)
    if added is not None:
        RAY_LOCK.write_text(RAY_HEADER + "".join(f"{name}=={added[name]}\n" for name in sorted(added)))


if __name__ == "__main__":
    main()
