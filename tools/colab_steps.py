"""Run lessons as Colab would: in a Python that has torch and a kernel, but nothing of the course.

    python tools/colab_steps.py 00 03

It exports a learners' copy for a repository, commits it, and lets git find that commit at the repository's address.
Each lesson is opened without outputs, in another folder; its first code cell installs the course, the session restarts,
and the lesson runs from the top. So it shows that the cell and the lessons work, not that Colab itself has what they
need: its system, its versions of packages and its front end are not here. TORCH_INDEX names an index to install torch
from.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from minillm.course.making import colab, export  # noqa: E402

REPOSITORY = colab.Repository("OWNER", "NAME")
TIMEOUT = 1800  # seconds for a cell; the first installs the course


def published(folder: Path) -> dict[str, str]:
    """Commit a learners' copy; returns the environment in which git finds it at the repository's address."""
    export.export(folder, repository=REPOSITORY)
    author = ["-c", "user.name=course", "-c", "user.email=course@example.com"]
    for words in (["init", "--quiet", "--initial-branch", REPOSITORY.branch], ["add", "--all"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    subprocess.run(["git", *author, "commit", "--quiet", "--message", "The course"], cwd=folder, check=True)
    here = {"GIT_CONFIG_KEY_0": f"url.{folder.as_uri()}.insteadOf", "GIT_CONFIG_VALUE_0": REPOSITORY.address}
    return {"GIT_CONFIG_COUNT": "1"} | here


def session(folder: Path) -> dict[str, str]:
    """A Python like Colab's, as a kernel of Jupyter; returns the environment that leads to it."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    torch = next(line for line in lock if line.startswith("torch=="))
    index = ["--index-url", os.environ["TORCH_INDEX"]] if "TORCH_INDEX" in os.environ else []
    for packages in ([*index, torch], ["ipykernel", "nbformat"]):
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    places = list((folder / "venv" / "lib").glob("python*/site-packages"))
    (places[0] / "google" / "colab").mkdir(parents=True)
    (places[0] / "google" / "colab" / "__init__.py").touch()
    starts = folder / "ipython" / "profile_default" / "startup"
    starts.mkdir(parents=True)
    (starts / "00_colab.py").write_text("import google.colab\n", encoding="utf-8")  # as Colab's kernels do
    kernel = folder / "jupyter" / "kernels" / "colab"
    kernel.mkdir(parents=True)
    argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel_json = {"argv": argv, "display_name": "Colab", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(kernel_json), encoding="utf-8")
    return {"IPYTHONDIR": str(folder / "ipython")}


def executed(notebook: nbformat.NotebookNode, folder: Path, environment: dict[str, str]) -> str:
    """Run a notebook in a new session; returns what its last code cell printed. Raises CellExecutionError."""
    specs = KernelSpecManager(kernel_dirs=[str(folder / "jupyter" / "kernels")])
    manager = AsyncKernelManager(kernel_name="colab", kernel_spec_manager=specs)
    client = NotebookClient(
        notebook, km=manager, timeout=TIMEOUT, resources={"metadata": {"path": str(folder / "content")}}
    )
    client.execute(env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment)
    last = [cell for cell in notebook.cells if cell.cell_type == "code"][-1]
    return "".join(output.get("text", "") for output in last.outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lessons", nargs="*", default=["00"], help="numbers of lessons")
    lessons = parser.parse_args().lessons
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "content").mkdir()
        environment = published(folder / "copy") | session(folder)
        for number in lessons:
            (path,) = (folder / "copy" / "notebooks" / "clean").glob(f"{number}_*.ipynb")
            for part in ("install", "run"):
                notebook = nbformat.read(path, as_version=4)
                if part == "install":
                    notebook.cells = notebook.cells[:2]
                begun = time.perf_counter()
                said = executed(notebook, folder, environment)
                print(f"{path.stem}, {part}: {time.perf_counter() - begun:.0f} s {said[:100]}".rstrip(), flush=True)


if __name__ == "__main__":
    main()
