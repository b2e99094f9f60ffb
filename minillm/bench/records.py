"""Records: what was measured, on which machine, by which command, at which commit.  Lesson 99.

A record is one JSON object: {"results": [{"engine", "workload", "dtype", "requests", "input_tokens",
"output_tokens", "seconds", "output_tokens_per_s", "runs", ...}], "machine", "commit", "dirty", "command",
"date", "versions"}. Committed records are in `data/results/<device>/<name>.json`; every figure that the project
states comes from one.
"""

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from minillm.errors import ConfigError
from minillm.folders import DATA, PACKAGE
from minillm.version import __version__

RESULTS = DATA / "results"
SECRET = ("--api-key",)  # options whose values no record has
PACKAGES = ("torch", "triton", "transformers", "numpy", "fastapi", "uvicorn", "aiohttp")


def begin(path: str | Path | None = None) -> dict:
    """Return the fields of a record that describe the start of its run: commit, whether files differed from it, and
    date.

    Call it before measuring: files may change, or be committed, while the code that was loaded runs. path: where the
    record will be written; raises ConfigError now, not after the run, if that is impossible.
    """
    if path is not None:
        check_writable(destination(path))
    return {**commit(), "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}


def record(results: list[dict], begun: dict, command: str | None = None, **more: Any) -> dict:
    """Return a complete record of `results`. begun: what `begin` returned at the start of the run.

    command: default: the one that started this process. more: further fields.
    """
    return {
        "results": results,
        "machine": machine(),
        **begun,
        "command": command or shlex.join(_without_folders(sys.argv)),
        "versions": versions(),
        **more,
    }


def _without_folders(words: list[str]) -> list[str]:
    """Return the command as typed at the project's root, without folders of the machine that it ran on."""
    script = Path(words[0]).resolve()
    if script.name == "minillm" or script in (PACKAGE / "__main__.py", PACKAGE / "cli" / "__main__.py"):
        program = ["minillm"]
    elif script.is_relative_to(PACKAGE):
        program = ["python", "-m", ".".join(script.relative_to(PACKAGE.parent).with_suffix("").parts)]
    elif script.is_relative_to(PACKAGE.parent):
        program = ["python", str(script.relative_to(PACKAGE.parent))]
    else:
        program = [script.name]
    return [*program, *(Path(word).name if Path(word).is_absolute() else word for word in _without_keys(words[1:]))]


def _without_keys(words: list[str]) -> list[str]:
    """Return the words without what follows --api-key: a record may be published."""
    shown = []
    for before, word in zip(["", *words], words, strict=False):
        option, equals, _ = word.partition("=")
        shown.append("..." if before in SECRET else f"{option}=..." if equals and option in SECRET else word)
    return shown


def write(content: dict, path: str | Path) -> Path:
    """Write a record. path: a file, or a name without suffix: data/results/<device>/<name>.json."""
    path = destination(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def destination(path: str | Path) -> Path:
    """Return the file that `write` writes for this path."""
    path = Path(path)
    return path if path.suffix == ".json" else folder() / f"{path.name}.json"


def check_writable(path: str | Path) -> None:
    """Create a file's folder and check that the file can be written. Raises ConfigError."""
    file = Path(path).resolve()
    there = file.exists()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): name another file") from None
    if not there:
        file.unlink()


def publish(content: dict, path: str | Path | None, text: str = "", *, quiet: bool = False) -> dict:
    """Return the record, written if a path is given and printed unless quiet: `text`, then one JSON line."""
    if path is not None:
        write(content, path)
    if not quiet:
        if text:
            print(text, flush=True)
        print(json.dumps(content), flush=True)
    return content


def read(path: str | Path) -> dict:
    """Return a record from a file, or a committed one by `<device>/<name>`. Raises ConfigError."""
    path = Path(path)
    known = RESULTS / f"{path}.json"
    chosen = path if path.is_file() else known
    if not chosen.is_file():
        there = ", ".join(sorted(str(each.relative_to(RESULTS).with_suffix("")) for each in RESULTS.glob("*/*.json")))
        raise ConfigError(f"no record {path}; committed ones: {there or 'none'}")
    return json.loads(chosen.read_text(encoding="utf-8"))


def model_name(name: str, *, random_weights: bool) -> str:
    """Return a model's name in records: "gemma-2b, random weights"."""
    return f"{name}, random weights" if random_weights else name


def model_of(record: Mapping[str, Any]) -> str:
    """Return a record's model, as `model_name` writes it. Older records name random weights only in their command."""
    known = record["model"].endswith(", random weights")
    dummy = "--load-format dummy" in record.get("command", "").replace("=", " ")
    return model_name(record["model"], random_weights=dummy and not known)


def folder() -> Path:
    """Return where this machine's records are committed: data/results/h200, .../cpu, or the GPU's name."""
    gpu = machine()["gpu"]
    device = "cpu" if gpu is None else gpu.removeprefix("NVIDIA ").split()[0].lower()
    return RESULTS / device


def machine() -> dict:
    """Return a description of the machine: CPU, cores that this process may use, memory, GPU and driver, system,
    Python.
    """
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "gpu": gpu,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that a measurement depends on."""
    versions = {"minillm": __version__}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def commit() -> dict:
    """Return the checkout's commit, and whether files differ from it.

    In a copy without this history, the environment variable MINILLM_COMMIT names the commit, followed by "+" if files
    of the copy differ from it.
    """
    if named := os.environ.get("MINILLM_COMMIT"):
        return {"commit": named.removesuffix("+"), "dirty": named.endswith("+")}
    head = _output("git", "-C", str(PACKAGE), "rev-parse", "HEAD")
    if head is None:
        return {"commit": None, "dirty": None}
    changes = _output("git", "-C", str(PACKAGE), "status", "--porcelain", "--untracked-files=no")
    return {"commit": head, "dirty": bool(changes)}


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None
