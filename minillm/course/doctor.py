"""`minillm doctor`: what this machine can run, and how to fix what is missing.  Lesson 00.

It needs only the standard library and `packaging`, since it must run when torch does not.
"""

import math
import os
import platform
import shutil
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path

from packaging.requirements import Requirement

from minillm import cores, pretrained
from minillm.cores import OtherPrograms
from minillm.errors import ConfigError
from minillm.folders import DATA, LINKED, PACKAGE, how_to_install

GIB = 1 << 30
LOAD_SECONDS = 0.5  # how long to look at other programs
MEMORY_GIB, DISK_GIB = 4, 4  # enough for the tests and a lesson's kernel at the same time
CAPABILITY = (8, 0)  # bfloat16, and the shared memory that the kernels are compiled for
GPU_GIB = 7  # 5 for the weights of Gemma 2B, the rest for its cache and a step; cards of "8 GB" report a little less
TESTED, UNTESTED = ((3, 11), (3, 12), (3, 13)), ((3, 14),)  # versions of Python
EXTRAS = {
    "serve": "minillm serve",
    "compare": "comparisons with transformers, question sets",
    "report": "minillm report",
    "course": "the notebooks",
    "models": "minillm download, GGUF files",
    "test": "make test",
}
TIERS = {
    "none": "the minimum is not met: fix what is marked FAIL",
    "cpu": "CPU: every lesson, on the embedded tiny-gemma",
    "gpu": "GPU: every lesson, and Gemma 2B with random weights (speed is real, text is not)",
    "weights": "GPU with weights: every lesson, and Gemma 2B itself",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report. state: "ok", "missing" (something optional), "busy" or "FAIL" (the minimum)."""

    name: str
    found: str
    state: str = "ok"
    fix: str = ""


def examine() -> list[Finding]:
    """All findings, in the order in which they are printed."""
    triton, gpu = _triton(), _cuda()
    findings = [
        _python(),
        *_checkout(),
        *_packages(),
        triton,
        gpu,
        _load(),
        _memory(),
        _disk(),
        _model(),
        *_offers(),
        _gemma(used=triton.state == gpu.state == "ok"),
    ]
    return [*findings, *(_extra(name, purpose) for name, purpose in EXTRAS.items())]


def tier(findings: list[Finding]) -> str:
    """The key in TIERS of the most complete form of the lessons that runs here."""
    state = {finding.name: finding.state for finding in findings}
    if "FAIL" in state.values():
        return "none"
    if state["GPU"] != "ok" or state["triton"] != "ok":
        return "cpu"
    return "weights" if state["Gemma 2B"] == "ok" else "gpu"


def report(findings: list[Finding]) -> str:
    """The findings as a table for a terminal, then the fixes and the tier."""
    wide = max(len(finding.name) for finding in findings)
    lines = [f"{finding.name:<{wide}}  {finding.state:<7}  {finding.found}" for finding in findings]
    fixes = [f"{finding.name}: {finding.fix}" for finding in findings if finding.fix]
    if fixes:
        title = "To fix:" if tier(findings) == "none" else "To improve:"
        lines += ["", title, *(f"  {fix}" for fix in fixes)]
    return "\n".join([*lines, "", f"Lessons run as: {TIERS[tier(findings)]}"])


def main() -> int:
    """Print the report and return 1 if the minimum is not met, else 0."""
    findings = examine()
    print(report(findings))
    return int(tier(findings) == "none")


def _python() -> Finding:
    version = platform.python_version()
    found = f"{version} on {platform.system()} {platform.machine()}, {cores.available()} cores"
    if sys.version_info[:2] in TESTED:
        return Finding("Python", found)
    if sys.version_info[:2] in UNTESTED:
        return Finding("Python", f"{found}; not tested")
    return Finding("Python", found, "FAIL", "install Python 3.11, 3.12 or 3.13 and make a new environment with it")


def declared(extra: str = "") -> list[Requirement]:
    """The project's requirements for this platform under one extra ("": those that are always needed).

    Read from the installed package, or from pyproject.toml if minillm runs from a checkout.
    """
    try:
        lines = metadata.requires("minillm") or []
        wanted = [Requirement(line) for line in lines]
        wanted = [line for line in wanted if extra or not line.marker or "extra" not in str(line.marker)]
    except metadata.PackageNotFoundError:
        project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
        lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
        wanted = [Requirement(line) for line in lines]
    holds = [line for line in wanted if not line.marker or line.marker.evaluate({"extra": extra})]
    if extra:
        always = {line.name for line in declared()}
        holds = [line for line in holds if line.name not in always | {"minillm"}]
    return holds


def _version(wanted: Requirement) -> tuple[str | None, bool]:
    """The installed version, or None, and whether it is in the required range."""
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return None, False
    return version, wanted.specifier.contains(version, prereleases=True)


def _packages() -> Iterator[Finding]:
    """One line for torch, one for the rest of what is always needed."""
    good: list[tuple[str, Requirement]] = []
    bad: list[tuple[str, Requirement]] = []
    for wanted in declared():
        if wanted.name == "triton":
            continue
        version, fits = _version(wanted)
        label = f"{wanted.name} {version or 'absent'}"
        needs = "" if fits else f" (needs {wanted.specifier})"
        if wanted.name == "torch":
            state, fix = ("ok", "") if fits else ("FAIL", how_to_install(str(wanted)))
            broken = _import_error("torch") if version else None
            if broken:
                state, needs, fix = "FAIL", f" does not import: {broken}", "reinstall torch"
            yield Finding("torch", f"{version or 'absent'}{needs}", state, fix)
        else:
            (good if fits else bad).append((label + needs, wanted))
    if bad:
        labels = ", ".join(label for label, _ in bad)
        yield Finding("packages", labels, "FAIL", how_to_install(*(str(wanted) for _, wanted in bad)))
    else:
        yield Finding("packages", ", ".join(label for label, _ in good))


def _import_error(module: str) -> str | None:
    try:
        import_module(module)
    except Exception as error:  # a broken build may raise anything, and the doctor reports it
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def _triton() -> Finding:
    wanted = next((line for line in declared() if line.name == "triton"), None)
    if wanted is None:
        found = f"not made for {platform.system()}: all but the kernel lessons run"
        return Finding("triton", found, "missing")
    version, fits = _version(wanted)
    if version is None:
        return Finding("triton", "absent: the kernel lessons need it", "missing", how_to_install(str(wanted)))
    if not fits:
        found = f"{version} (needs {wanted.specifier})"
        return Finding("triton", found, "missing", f"the one that your torch requires: {how_to_install('torch')}")
    broken = _import_error("triton")
    if broken:
        return Finding("triton", f"{version} does not import: {broken}", "missing", "reinstall triton")
    return Finding("triton", version)


def _cuda() -> Finding:
    if _import_error("torch"):
        return Finding("GPU", "not known without torch", "missing")
    import torch

    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") is None:
            return Finding("GPU", "none: lessons run on the CPU and show committed GPU records", "missing")
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        fix = "install a torch build that fits the driver (nvidia-smi names its CUDA version)"
        return Finding("GPU", f"a driver is there, but this torch ({build}) sees no device", "missing", fix)
    properties = torch.cuda.get_device_properties(0)
    kind = f"{properties.name}, capability {properties.major}.{properties.minor}"
    found = f"{kind}, {properties.total_memory / GIB:.0f} GiB, CUDA {torch.version.cuda}"
    if problem := gpu_problem():
        return Finding("GPU", found, "missing", f"{problem}: lessons run on the CPU (pass --device cpu to commands)")
    return Finding("GPU", found)


def gpu_problem() -> str | None:
    """Return why lessons cannot run on the GPU that torch sees; None if they can."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    least = ".".join(map(str, CAPABILITY))
    if (properties.major, properties.minor) < CAPABILITY:
        return f"the kernels need bfloat16 and capability {least} (Ampere) or newer"
    if properties.total_memory < GPU_GIB * GIB:
        return f"Gemma 2B needs a GPU with {GPU_GIB} GiB"
    return None


def _load() -> Finding:
    """Return what other programs take of the cores, measured for a moment in which this one does nothing."""
    total, available, others = len(cores.allowed()), cores.available(), OtherPrograms()
    time.sleep(LOAD_SECONDS)
    used = others.measure()
    if used is None:
        return Finding("load", "not known on this system")
    found = f"other programs use {used:.1f} of {total} cores"
    if min(math.floor(total - used + cores.FREE), available) > cores.SLOWED * available:  # as an engine chooses
        return Finding("load", found)
    fix = "close other programs (`top` lists them); until then steps use fewer threads and take up to 3 times as long"
    return Finding("load", found, "busy", fix)


def free_memory() -> int | None:
    """Bytes of free memory on Linux, of total memory elsewhere, at most a container's limit; None if not known."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        bytes_free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except OSError:
        if not hasattr(os, "sysconf"):
            return None
        bytes_free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        bytes_free = min(bytes_free, int(text))
    return bytes_free


def _memory() -> Finding:
    bytes_free = free_memory()
    if bytes_free is None:
        return Finding("memory", "not known on this system")
    return _room("memory", bytes_free, MEMORY_GIB, "close other programs, or take a smaller max_num_seqs")


def _disk() -> Finding:
    place = Path.cwd()
    return _room("disk", shutil.disk_usage(place).free, DISK_GIB, f"make room on the disk that holds {place}")


def _room(name: str, free: int, needed: int, fix: str) -> Finding:
    found = f"{free / GIB:.1f} GiB free"
    if free >= needed * GIB:
        return Finding(name, found)
    return Finding(name, f"{found}, {needed} recommended", "missing", fix)


def _model() -> Finding:
    place = DATA / "tiny-gemma"
    if (place / "config.json").is_file() and list(place.glob("*.safetensors")):
        size = sum(file.stat().st_size for file in place.iterdir())
        return Finding("tiny-gemma", f"embedded, {size / 1e6:.0f} MB")
    fix = "check out or install minillm again, or name a model's directory wherever one is asked for"
    return Finding("tiny-gemma", f"not in {place}", "FAIL", fix)


def _offers() -> Iterator[Finding]:
    """The trained models of `minillm models`."""
    for offer in pretrained.CATALOG.values():
        if pretrained.downloaded(offer):
            command = f'`minillm generate --model {offer.name} --chat "Hi"`'
            yield Finding(offer.name, f"{offer.title}, {offer.purpose}: {command}")
            continue
        try:
            where, fix = f"not in {_from_home(pretrained.folder_of(offer).parent)}", f"`{offer.command}`"
        except ConfigError:  # there is no home directory
            where, fix = "not here", f"set MINILLM_CACHE to a directory, then `{offer.command}`"
        yield Finding(offer.name, f"{offer.title} is {where}", "missing", fix)


def _from_home(path: Path) -> str:
    """A path as a shell understands it, short and without the user's name: ~/.cache/minillm/models."""
    home = os.path.expanduser("~") + os.sep
    return f"~{os.sep}{str(path).removeprefix(home)}" if str(path).startswith(home) else str(path)


def gemma_directory() -> Path | None:
    """Gemma 2B's weights: the directory in MINILLM_GEMMA, else Hugging Face's cache; None without either."""
    named = os.environ.get("MINILLM_GEMMA")
    if named:
        return Path(named) if (Path(named) / "config.json").is_file() else None
    try:
        home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    except RuntimeError:  # there is no home directory
        return None
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    for name in ("models--google--gemma-2b-it", "models--google--gemma-2b"):
        for config in sorted(cache.glob(f"{name}/snapshots/*/config.json")):
            if list(config.parent.glob("*.safetensors")):
                return config.parent
    return None


def _gemma(used: bool) -> Finding:
    """used: whether lessons run on a GPU here. On a CPU they run tiny-gemma, so there is nothing to download."""
    place = gemma_directory()
    if place:
        return Finding("Gemma 2B", f"{place}{'' if used else '; lessons use it on a GPU only'}")
    if named := os.environ.get("MINILLM_GEMMA"):
        fix = "set MINILLM_GEMMA to the directory that has its config.json"
        return Finding("Gemma 2B", f"no config.json in MINILLM_GEMMA={named}", "missing", fix)
    if not used:
        return Finding("Gemma 2B", "no weights here; lessons use them on a GPU only", "missing")
    fix = (
        "accept its license at https://huggingface.co/google/gemma-2b-it, run `hf auth login` and "
        "`hf download google/gemma-2b-it`; or set MINILLM_GEMMA to its directory"
    )
    return Finding("Gemma 2B", "no weights here; none are downloaded", "missing", fix)


def _checkout() -> Iterator[Finding]:
    """Return whether this is a checkout without symbolic links, or a package built from one without its data."""
    if not (DATA.parent / "kernels").is_dir():
        yield Finding("package", f"{PACKAGE} has no kernels", "FAIL", "install it again from the project's folder")
    elif not LINKED:
        yield Finding("checkout", "without symbolic links: kernels/ and data/ are used in their place")


def _extra(extra: str, purpose: str) -> Finding:
    wanted = declared(extra)
    lacking = [line.name for line in wanted if not _version(line)[1]]
    if not lacking:
        return Finding(extra, f"{purpose}: all {len(wanted)} packages")
    found = f"{purpose}: lacks {', '.join(lacking)}"
    return Finding(extra, found, "missing", how_to_install(f"minillm[{extra}]"))
