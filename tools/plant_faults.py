"""Plant faults in a copy of the project, one at a time, and report which of them the tests miss.

    python tools/plant_faults.py                               every written fault, with the tests that should catch it
    python tools/plant_faults.py --room scheduler --jobs 2     the faults of one package
    python tools/plant_faults.py --only NAME                   one fault; repeatable
    python tools/plant_faults.py --tests "tests -m quick"      does another selection of tests also catch the faults?
    python tools/plant_faults.py --record faults               every fault, and write a record
    python tools/plant_faults.py --mutate minillm/scheduler --count 50 --seed 1     mutations of a file or folder

The faults are in tools/faults. Those of --mutate are made by the operators of tools/faults/mutations.py, and the tests
of the file's room should catch them: one that survives is a hole in the tests, or changes nothing that matters.

This checkout is never changed: its tracked files, and untracked ones that git does not ignore, are copied to a
temporary folder, and each fault is undone there before the next. Each selection of tests first runs once without a
fault. The exit status is 1 if a fault survives, if its snippet is no longer in its file, if its tests already fail
without it, or if they cannot run with it (an import fails, a test hangs), which proves nothing about a fault that has
a meaning. A mutation is caught by that, too.
"""

import argparse
import difflib
import json
import multiprocessing
import os
import queue
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.faults import TOP, Fault, StaleFault, every  # noqa: E402
from tools.faults.mutations import mutations  # noqa: E402

SECONDS = 600  # time limit of each test run
OURS = ("minillm", "kernels", "tests", "tools", "conftest")
# Each run of pytest is forked from a process that has already imported these third-party modules, since importing them
# takes longer than most of the tests.
SERVER = multiprocessing.get_context("forkserver")
PRELOADED = (
    *("pytest", "hypothesis", "hypothesis.stateful", "nbval.plugin", "numpy", "torch", "torch.testing", "triton"),
    *("safetensors.torch", "tokenizers", "transformers.generation", "transformers.models.auto.modeling_auto"),
    *("fastapi", "uvicorn", "pydantic", "aiohttp", "openai", "prometheus_client", "typer.testing", "jinja2", "regex"),
)
ENVIRONMENT = {"PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
CAUGHT, SURVIVED, STALE, RED, BROKEN, HUNG = "caught", "survived", "stale", "fails without it", "does not run", "hung"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)  # in pytest's summary


@dataclass(frozen=True)
class Ran:
    """The result of one pytest run. SURVIVED: all tests passed. by: the first failed test, or what went wrong."""

    outcome: str
    by: str
    seconds: float


def copied(root: Path, to: Path) -> None:
    """Copy the project's files in their current state. Links stay links."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(root / name):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name, follow_symlinks=False)


def run_tests(copy: Path, tests: str, seconds: float) -> Ran:
    """Run pytest in a copy, up to the first failure."""
    with tempfile.TemporaryDirectory(dir=copy.parent) as scratch:
        log = Path(scratch) / "log"
        process = SERVER.Process(target=_pytest, args=(copy, shlex.split(tests), log))
        begin = time.perf_counter()
        process.start()
        process.join(seconds)
        if hung := process.is_alive():
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(process.pid, signal.SIGKILL)  # and the servers that the tests started
            process.kill()
            process.join()
        took = round(time.perf_counter() - begin, 1)
        said = log.read_text(encoding="utf-8", errors="replace").strip() if log.exists() else ""
    if hung:
        return Ran(HUNG, f"not finished after {seconds:g} s", took)
    failed, outcome = _FAILED.search(said), {0: SURVIVED, 1: CAUGHT}.get(process.exitcode, BROKEN)
    if outcome == SURVIVED:
        return Ran(outcome, "", took)
    return Ran(outcome, failed[1] if failed else "".join(said.splitlines()[-1:]), took)


def _pytest(copy: Path, arguments: list[str], log: Path) -> None:
    """Run pytest in this new process, importing the project from the copy."""
    os.setsid()
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(log.parent)}
    # Python checks bytecode against the source's size and modification second, and a fault may change neither.
    sys.dont_write_bytecode, tempfile.tempdir = True, None
    sys.path[:] = [str(copy), *(place for place in sys.path if place and Path(place).resolve() != ROOT)]
    for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
        del sys.modules[name]
    import pytest

    sys.argv = ["pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    sys.exit(pytest.main(sys.argv[1:]))


@contextmanager
def planted(fault: Fault, copy: Path) -> Iterator[None]:
    """Keep the fault in the copy until the block ends. Raises StaleFault."""
    file = copy / fault.file
    if not file.is_file():
        raise StaleFault(f"{fault.name}: the file {fault.file} does not exist")
    sound = file.read_text(encoding="utf-8")
    file.write_text(fault.plant(sound), encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(sound, encoding="utf-8")


def tried(fault: Fault, tests: str, copy: Path, seconds: float) -> Ran:
    """Run the tests on a copy with the fault in it."""
    try:
        with planted(fault, copy):
            return run_tests(copy, tests, seconds)
    except StaleFault as error:
        return Ran(STALE, str(error), 0.0)


def prepare() -> None:
    """Set the environment as the tests' conftest.py does, before the modules are preloaded."""
    import torch

    os.environ |= ENVIRONMENT
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def run(
    faults: Sequence[Fault],
    *,
    root: Path = ROOT,
    jobs: int = 1,
    tests: str | None = None,
    seconds: float = SECONDS,
    preload: Sequence[str] = PRELOADED,
) -> list[dict]:
    """Plant each fault and run its tests, or `tests`. Prints each result; returns one row per fault, in order."""
    SERVER.set_forkserver_preload(list(preload))
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, ThreadPoolExecutor(jobs) as pool:
        copies: queue.Queue[Path] = queue.Queue()
        for number in range(jobs):
            copy = Path(folder) / str(number) / root.name
            copy.mkdir(parents=True)
            copied(root, copy)
            copies.put(copy)

        def in_a_copy(work: Callable[[Path], Ran]) -> Ran:
            copy = copies.get()
            try:
                return work(copy)
            finally:
                copies.put(copy)

        choices = {fault.name: tests or fault.tests for fault in faults}
        without = {}

        def sound(choice: str) -> None:
            without[choice] = ran = in_a_copy(lambda copy: run_tests(copy, choice, seconds))
            print(f"{ran.seconds:6.1f} s  without a fault: {choice}{_because(ran)}", flush=True)

        def row(fault: Fault) -> dict:
            choice = choices[fault.name]
            before = without[choice]
            if before.outcome == SURVIVED:
                limit = min(seconds, 60 + 10 * before.seconds)
                ran = in_a_copy(lambda copy: tried(fault, choice, copy, limit))
            else:
                ran = Ran(RED, f"{choice}: {before.by}", 0.0)
            print(f"{ran.seconds:6.1f} s  {ran.outcome}: {fault.name}{_because(ran)}", flush=True)
            where = {"fault": fault.name, "room": fault.room, "file": fault.file}
            return where | {"outcome": ran.outcome, "by": ran.by, "seconds": ran.seconds}

        list(pool.map(sound, dict.fromkeys(choices.values())))
        return list(pool.map(row, faults))


def _because(ran: Ran) -> str:
    return f" ({ran.by})" if ran.by else ""


def chosen(faults: Sequence[Fault], room: str | None, only: Sequence[str]) -> list[Fault]:
    """The faults of one room, or the named ones. Raises ValueError for an unknown room or name."""
    for what, wanted, known in (
        ("room", [room] if room else [], dict.fromkeys(fault.room for fault in faults)),
        ("fault", only, dict.fromkeys(fault.name for fault in faults)),
    ):
        if missing := [name for name in wanted if name not in known]:
            like = difflib.get_close_matches(missing[0], known, n=3, cutoff=0.4) or list(known)[:3]
            raise ValueError(f"no {what} is called {missing[0]}; some are: {', '.join(like)} (--list prints all)")
    return [fault for fault in faults if room in (None, fault.room) and (not only or fault.name in only)]


def mutated(place: str, root: Path = ROOT, count: int | None = None, seed: int = 0) -> list[Fault]:
    """The mutations of a file or folder, in order, or `count` drawn by the seed. Raises ValueError without any code."""
    path = root / place
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    if not files:
        raise ValueError(f"no Python file is at {place}")
    faults = []
    for file in files:
        name = file.relative_to(root).as_posix()
        faults += mutations(name, file.read_text(encoding="utf-8"), tests_of(name, root))
    places = range(len(faults))
    chosen = places if count is None else sorted(random.Random(seed).sample(places, min(count, len(faults))))
    return [faults[i] for i in chosen]


def tests_of(file: str, root: Path = ROOT) -> str:
    """Pytest arguments that select the tests of a file's room, those named after the file first."""
    own, room = f"test_{Path(file).stem}.py", Fault("", file, "", "", "").room
    folder = root / "tests" / ("" if room == TOP else room)
    found = [*folder.glob("test_*.py")] or [*root.glob(f"tests/*/test_{room}.py")]
    found.sort(key=lambda path: (path.name != own, path.name))
    return " ".join(path.relative_to(root).as_posix() for path in found) or "tests -m key"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--room", help="only the faults of this package, such as scheduler")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="only this fault; repeatable")
    parser.add_argument("--jobs", type=int, default=1, help="the number of copies that run in parallel")
    parser.add_argument("--tests", help="pytest arguments to use instead of each fault's own")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="the time limit of each pytest run")
    parser.add_argument("--record", help="a record's name, or a file; only for all faults")
    parser.add_argument("--mutate", metavar="PATH", help="mutations of this file or folder instead of written faults")
    parser.add_argument("--count", type=int, help="only so many of the mutations, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="only print the faults")
    options = parser.parse_args()
    if options.record and (options.room or options.only or options.tests or options.mutate):
        parser.error("a record covers all faults with their own tests: leave out --room, --only, --tests and --mutate")
    if options.mutate and (options.room or options.only):
        parser.error("--room and --only choose written faults: leave them out with --mutate")
    try:
        if options.mutate:
            faults = mutated(options.mutate, count=options.count, seed=options.seed)
        else:
            faults = chosen(every(), options.room, options.only)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        for fault in faults:
            print(f"{fault.room:<13} {fault.name}  {fault.file}  {fault.tests}")
        return
    from minillm.bench import records

    prepare()
    begun, start = records.begin(options.record), time.perf_counter()
    rows = run(faults, jobs=options.jobs, tests=options.tests, seconds=options.seconds)
    took = time.perf_counter() - start
    enough = (CAUGHT, BROKEN, HUNG) if options.mutate else (CAUGHT,)
    missed = [row for row in rows if row["outcome"] not in enough]
    print(f"{len(rows) - len(missed)} of {len(rows)} faults caught in {took:.0f} s")
    if options.record:
        content = records.record(rows, begun, faults=len(rows), caught=len(rows) - len(missed), seconds=round(took, 1))
        records.write(content, options.record)
    for row in missed:
        print(f"{row['outcome']}: {json.dumps(row)}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
