"""Run the Dockerfile's steps in an empty folder with a new virtual environment, where there is no Docker.

    python tools/docker_steps.py

WORKDIR, COPY, ARG and RUN do what they say; FROM is this Python, and CMD is started until its port answers. So it shows
that the steps work on a bare Python, not that the image builds: the base image's system may lack something.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STARTS_WITHIN = 120  # seconds
PORT = 8888
ADDRESS = f"http://127.0.0.1:{PORT}/api"


def steps(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile and their arguments."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def tracked() -> list[str]:
    return subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\0"
    )


def run(found: list[tuple[str, str]], place: Path) -> None:
    """Run the instructions with `place` as the root folder. Raises CalledProcessError for a step that fails."""
    venv.create(place / "venv", with_pip=True)
    folder = place
    environment = {"PATH": f"{place / 'venv' / 'bin'}:{os.environ['PATH']}", "HOME": str(place)}
    environment |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
    for instruction, given in found:
        print(f"{instruction} {given}", flush=True)
        if instruction == "WORKDIR":
            folder = place / given.lstrip("/")
            folder.mkdir(parents=True, exist_ok=True)
        elif instruction == "COPY":
            assert given == ". .", "only the whole folder is copied"
            for name in filter(None, tracked()):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
        elif instruction == "ARG":
            name, _, default = given.partition("=")
            environment[name] = os.environ.get(name, default)
        elif instruction == "RUN":
            subprocess.run(["sh", "-c", given], cwd=folder, env=environment, check=True)
        elif instruction == "CMD":
            answers(json.loads(given), folder, environment)


def answers(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Start JupyterLab and wait until it answers. Raises TimeoutError, and OSError if another server has its port."""
    with socket.create_server(("", PORT)):
        pass
    with subprocess.Popen(command, cwd=folder, env=environment) as process:
        try:
            deadline = time.monotonic() + STARTS_WITHIN
            while time.monotonic() < deadline and process.poll() is None:
                with contextlib.suppress(OSError), urllib.request.urlopen(ADDRESS, timeout=5) as answer:
                    print(ADDRESS, answer.status)
                    return
                time.sleep(0.5)
            raise TimeoutError(f"no answer at {ADDRESS} within {STARTS_WITHIN} s")
        finally:
            process.kill()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        try:
            run(steps((ROOT / "Dockerfile").read_text(encoding="utf-8")), Path(scratch))
        except (subprocess.CalledProcessError, OSError) as error:  # a TimeoutError is an OSError
            sys.exit(f"failed: {error}")
