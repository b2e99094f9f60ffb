"""Plant faults in a copy of the project, one at a time, and report which of them the tests miss.

    python tools/plant_faults.py                               every fault, with the tests that should catch it
    python tools/plant_faults.py --room scheduler --jobs 2     those of one room
    python tools/plant_faults.py --only NAME                   one of them; repeatable
    python tools/plant_faults.py --tests "tests -m quick"      with another choice of tests: does it still catch them?
    python tools/plant_faults.py --record faults               all of them, kept as a record

The faults are in tools/faults. Files of this checkout are never changed: what git knows, or would add, is copied into a
temporary folder, and each fault is undone there before the next. Every choice of tests runs once without a fault first.
The exit status is 1 if a fault survives, if its snippet is not in its file any more, if its tests fail without it, or
if they fail to run with it (a file that cannot be imported, a test that hangs), which shows nothing.
"""

import argparse
import json
import multiprocessing
import os
import queue
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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.faults import Fault, StaleFault, every  # noqa: E402

SECONDS = 600  # time limit of each test run
OURS = ("minillm", "kernels", "tests", "tools", "conftest")
# Runs of pytest are forked from a process that has imported these, none of them the project's: that takes longer than
# most of the tests.
SERVER = multiprocessing.get_context("forkserver")
PRELOADED = (
    *("pytest", "hypothesis", "hypothesis.stateful", "nbval.plugin", "numpy", "torch", "torch.testing", "triton"),
    *("safetensors.torch", "tokenizers", "transformers.generation", "transformers.models.auto.modeling_auto"),
    *("fastapi", "uvicorn", "pydantic", "aiohttp", "openai", "prometheus_client", "typer.testing", "jinja2", "regex"),
)
ENVIRONMENT = {"PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
CAUGHT, SURVIVED, STALE, RED, BROKEN, HUNG = "caught", "survived", "stale", "red without it", "does not run", "hung"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)  # of pytest's summary


@dataclass(frozen=True)
class Ran:
    """What a choice of tests did: SURVIVED means that all passed; `by` is the first that failed, or what went wrong."""

    outcome: str
    by: str
    seconds: float


def copied(root: Path, to: Path) -> None:
    """Copy the project's files as they are now; links stay links."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(root / name):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name, follow_symlinks=False)


def run_tests(copy: Path, tests: str, seconds: float) -> Ran:
    """Run pytest in a copy until a test fails."""
    with tempfile.TemporaryDirectory(dir=copy.parent) as scratch:
        log = Path(scratch) / "log"
        process = SERVER.Process(target=_pytest, args=(copy, shlex.split(tests), log))
        begin = time.perf_counter()
        process.start()
        process.join(seconds)
        if hung := process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)  # including servers that the tests started
            process.join()
        took = round(time.perf_counter() - begin, 1)
        said = log.read_text(encoding="utf-8", errors="replace").strip() if log.exists() else ""
    if hung:
        return Ran(HUNG, f"not over after {seconds:g} s", took)
    failed, outcome = _FAILED.search(said), {0: SURVIVED, 1: CAUGHT}.get(process.exitcode, BROKEN)
    if outcome == SURVIVED:
        return Ran(outcome, "", took)
    return Ran(outcome, failed[1] if failed else "".join(said.splitlines()[-1:]), took)


def _pytest(copy: Path, arguments: list[str], log: Path) -> None:
    """In a process of its own: what it imports of the project is the copy's."""
    os.setsid()
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(log.parent)}
    # Bytecode is trusted by its source's size and second: a fault may change neither.
    sys.dont_write_bytecode, tempfile.tempdir = True, None
    sys.path[:] = [str(copy), *(place for place in sys.path if place and Path(place).resolve() != ROOT)]
    for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
        del sys.modules[name]
    import pytest

    sys.argv = ["pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    sys.exit(pytest.main(sys.argv[1:]))


@contextmanager
def planted(fault: Fault, copy: Path) -> Iterator[None]:
    """The fault is in the copy until the block ends. Raises StaleFault."""
    file = copy / fault.file
    if not file.is_file():
        raise StaleFault(f"{fault.name}: there is no file {fault.file}")
    sound = file.read_text(encoding="utf-8")
    file.write_text(fault.plant(sound), encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(sound, encoding="utf-8")


def tried(fault: Fault, tests: str, copy: Path, seconds: float) -> Ran:
    """The tests' verdict on a copy with the fault in it."""
    try:
        with planted(fault, copy):
            return run_tests(copy, tests, seconds)
    except StaleFault as error:
        return Ran(STALE, str(error), 0.0)


def prepare() -> None:
    """Set what tests' conftest.py sets, which comes too late for what is imported before the fork."""
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
    """Plant each fault and run its tests, or `tests`; a row a fault, in the order given, printed as it comes."""
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
                ran = in_a_copy(lambda copy: tried(fault, choice, copy, seconds))
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
    """The faults of a room, or those named. Raises ValueError for a room or a name that does not exist."""
    for what, wanted, known in (
        ("room", [room] if room else [], dict.fromkeys(fault.room for fault in faults)),
        ("fault", only, dict.fromkeys(fault.name for fault in faults)),
    ):
        if missing := [name for name in wanted if name not in known]:
            raise ValueError(f"no {what} is called {missing[0]}; there are: {', '.join(known)}")
    return [fault for fault in faults if room in (None, fault.room) and (not only or fault.name in only)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--room", help="only the faults of this room of the package")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="only this fault; repeatable")
    parser.add_argument("--jobs", type=int, default=1, help="copies that run at the same time")
    parser.add_argument("--tests", help="pytest's arguments, in place of those that each fault names")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that one run of pytest may take")
    parser.add_argument("--record", help="a record's name, or a file; of all faults alone")
    parser.add_argument("--list", action="store_true", help="print the faults and plant none")
    options = parser.parse_args()
    if options.record and (options.room or options.only or options.tests):
        parser.error("a record is of all faults and their own tests: leave --room, --only and --tests out")
    try:
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
    missed = [row for row in rows if row["outcome"] != CAUGHT]
    print(f"{len(rows) - len(missed)} of {len(rows)} faults caught in {took:.0f} s")
    if options.record:
        content = records.record(rows, begun, faults=len(rows), caught=len(rows) - len(missed), seconds=round(took, 1))
        records.write(content, options.record)
    for row in missed:
        print(f"{row['outcome']}: {json.dumps(row)}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
