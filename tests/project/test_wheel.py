"""The wheel contains the whole engine, including kernels and the embedded model."""

import email
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


def run(*command, folder: Path) -> str:
    """The command's output, run without access to the checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def built(folder: Path, links: bool = True, origin: str | None = None) -> Path:
    """A wheel, built from a copy, so that no build folder in the checkout is created or reused."""
    copy = folder / "checkout"
    compiled = shutil.ignore_patterns("__pycache__")  # other processes may be writing these
    for name in ("minillm", "kernels", "data"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=compiled)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in () if links else ("kernels", "data"):  # as git checks them out where it makes no links
        (copy / "minillm" / name).unlink()
        (copy / "minillm" / name).write_text(f"../{name}")
    for words in [("init", "--quiet"), ("remote", "add", "origin", origin)] if origin else ():
        run("git", *words, folder=copy)
    build = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, copy)
    run(sys.executable, *PIP, *build, folder=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return built(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def elsewhere(wheel, tmp_path_factory) -> Path:
    """Python of a new environment with the wheel and with this environment's packages, except its minillm.

    A .pth file adds a folder to the path without reading that folder's own .pth files. Editable installs need those,
    so the only minillm available is the wheel's.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    purelib = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder).strip())
    target = ("install", "--no-deps", "--target", purelib, wheel)
    run(sys.executable, *PIP, *target, folder=folder)
    import torch

    (purelib / "dependencies.pth").write_text(str(Path(torch.__file__).parents[1]) + "\n")
    return python


def test_the_wheel_contains_kernels_model_and_license_but_no_scripts(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"minillm/{path.relative_to(ROOT)}" for path in (ROOT / "kernels").glob("*.py")} <= names
    model = {f"minillm/{path.relative_to(ROOT)}" for path in (ROOT / "data" / "tiny-gemma").iterdir()}
    assert model
    assert model <= names
    page = {f"minillm/server/engine_room/{name}" for name in ("index.html", "style.css", "script.js", "drawing.js")}
    assert page <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    strays = [name for name in names if name.startswith("minillm/data/") and name.endswith(".py")]
    assert not strays
    assert not [name for name in names if "data/checkpoints" in name]  # fixtures of tests
    assert not [name for name in names if not name.startswith(("minillm/", "minillm-"))]


def urls(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as packed:
        (name,) = [each for each in packed.namelist() if each.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(packed.read(name)).get_all("Project-URL") or []


@pytest.mark.proof
def test_a_checkout_without_symbolic_links_builds_the_same_wheel(wheel, tmp_path):
    def files(path: Path) -> dict[str, int]:
        return {
            each.filename: each.CRC for each in zipfile.ZipFile(path).infolist() if "dist-info" not in each.filename
        }

    without_links = built(tmp_path, links=False, origin="git@github.com:ada/course.git")
    assert files(without_links) == files(wheel)
    page = "https://github.com/ada/course"
    pages = {f"Documentation, {page}/blob/HEAD/README.md", f"Changelog, {page}/blob/HEAD/CHANGELOG.md"}
    assert set(urls(without_links)) == {f"Repository, {page}", *pages} and urls(wheel) == []


@pytest.mark.proof
def test_llm_finds_its_model_from_any_folder(elsewhere, tmp_path):
    code = (
        "import minillm, sys; assert minillm.__file__.startswith(sys.prefix), minillm.__file__\n"
        "import torch; torch.set_num_threads(1)\n"
        "from minillm import LLM, SamplingParams\n"
        "with LLM(num_blocks=64) as llm:\n"
        "    print(len(llm.generate('The island of', SamplingParams(max_tokens=5, ignore_eos=True))[0].token_ids))"
    )
    assert run(elsewhere, "-c", code, folder=tmp_path).strip() == "5"


@pytest.mark.proof
def test_the_kernels_import_from_the_wheel(elsewhere, tmp_path):
    pytest.importorskip("triton", reason="kernels need triton, which this system lacks")
    names = [path.stem for path in (ROOT / "kernels").glob("*.py")]
    code = f"import importlib; [importlib.import_module('minillm.kernels.' + name) for name in {names}]"
    run(elsewhere, "-c", code, folder=tmp_path)


def test_the_command_runs_from_the_wheel(elsewhere, tmp_path):
    assert "Lessons run as: " in run(elsewhere, "-m", "minillm.cli", "doctor", folder=tmp_path)
