"""The load generator's processes: each plays its share of the clients, all on one clock.  Lesson 99.

A process of its own keeps the generator's work out of the server's way and the server's out of the generator's, as a
notebook runs both. Several share the work when one is too slow. `time.monotonic` is the same clock in every process of
a machine, so the times of all can be compared.

The main process starts each of them to run `main`, and pickles its `Share` to its standard input. When all have warmed
up, it writes the moment at which they all begin, and reads a pickled `Report` from each.
"""

import asyncio
import contextlib
import gc
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO

from minillm.errors import MinillmError
from minillm.folders import import_path

from .clients import Client, RequestTimes, Target, closed_loop, open_loop
from .workloads import BenchRequest

READY = b"ready\n"
HEAD_START = 0.02  # seconds from the message to begin until all begin


class LoadError(MinillmError, RuntimeError):
    """A run in which requests failed, or that exceeded its timeout."""


@dataclass
class Share:
    """The work of one process. concurrency: its clients in a closed loop; None for an open loop."""

    target: Target
    work: list[BenchRequest]
    concurrency: int | None
    warmup: list[BenchRequest] = field(default_factory=list)


@dataclass
class Report:
    """The measurements of one process; cpu_s: its processor time during the run."""

    measured: list[RequestTimes]
    cpu_s: float


def run(
    target: Target,
    work: Sequence[BenchRequest],
    concurrency: int | None,
    *,
    generators: int = 1,
    warmup: Sequence[BenchRequest] = (),
    timeout: float = 600.0,
) -> tuple[list[RequestTimes], list[float]]:
    """Send `work` from this many processes; return what was measured, in `work`'s order, and each one's CPU seconds.

    Requests go to processes in turn, in a closed loop to the clients in turn. timeout: seconds for everything. Raises
    LoadError.
    """
    count = min(generators, len(work), concurrency or len(work))
    divided = divide(len(work), count, concurrency)
    shares = [
        Share(target, [work[index] for index in mine], concurrency and len(range(first, concurrency, count)))
        for first, mine in enumerate(divided)
    ]
    for index, request in enumerate(warmup):
        shares[index % count].warmup.append(request)
    reports = _measure(shares, timeout)
    measured: dict[int, RequestTimes] = {}
    for mine, report in zip(divided, reports, strict=True):
        measured |= zip(mine, report.measured, strict=True)
    return [measured[index] for index in range(len(work))], [report.cpu_s for report in reports]


def divide(requests: int, count: int, concurrency: int | None) -> list[list[int]]:
    """Return the indices of each process's requests. A closed loop's client k belongs to process k % count."""
    owners = [(index if concurrency is None else index % concurrency) % count for index in range(requests)]
    return [[index for index, owner in enumerate(owners) if owner == process] for process in range(count)]


def _measure(shares: Sequence[Share], timeout: float) -> list[Report]:
    """Run a process for each share. Raises LoadError."""
    processes: list[subprocess.Popen[bytes]] = []
    late = threading.Event()

    def stop() -> None:
        late.set()
        for process in processes:
            process.kill()

    timer = threading.Timer(min(timeout, threading.TIMEOUT_MAX), stop)
    try:
        for _ in shares:
            processes.append(_start())
        timer.start()
        for process, share in zip(processes, shares, strict=True):
            pickle.dump(share, _pipe(process.stdin))
            _pipe(process.stdin).flush()
        for process in processes:
            if _pipe(process.stdout).readline() != READY:
                raise EOFError
        begin = f"{time.monotonic() + HEAD_START!r}\n".encode()
        for process in processes:
            _pipe(process.stdin).write(begin)
            _pipe(process.stdin).flush()
        return [pickle.load(_pipe(process.stdout)) for process in processes]
    except (EOFError, BrokenPipeError, pickle.UnpicklingError):
        if late.is_set():
            raise LoadError(
                f"the run was not over after {timeout:g} s: send fewer requests, or raise timeout"
            ) from None
        raise LoadError("a process of the load generator ended early: see its message above") from None
    finally:
        timer.cancel()
        for process in processes:
            process.kill()
            process.wait()
            with contextlib.suppress(BrokenPipeError):  # what it did not read is lost with it
                _pipe(process.stdin).close()
            _pipe(process.stdout).close()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _start() -> subprocess.Popen[bytes]:
    """Start a process with this one's imports. Ctrl-C reaches only this one, which then ends the others."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", f"from {__name__} import main; main()"],  # -P: imports nothing from this directory
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": import_path()},
        start_new_session=True,
    )


async def play(share: Share, orders: IO[bytes], reports: IO[bytes]) -> Report:
    """Warm up, wait for the moment to begin, and send this process's requests."""
    client = Client(share.target)
    if share.warmup:
        await closed_loop(client, share.warmup, share.concurrency or len(share.warmup))
    client.prepare(share.work)
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would delay every answer that comes meanwhile
    reports.write(READY)
    reports.flush()
    client.start = float(orders.readline())
    threading.Thread(target=_leave_with, args=(orders,), daemon=True).start()
    await asyncio.sleep(-client.now())
    cpu = time.thread_time()
    if share.concurrency is None:
        measured = await open_loop(client, share.work)
    else:
        measured = await closed_loop(client, share.work, share.concurrency)
    cpu = time.thread_time() - cpu
    client.close()
    return Report(measured, cpu)


def _leave_with(orders: IO[bytes]) -> None:
    """End this process when the main one ends."""
    os.read(orders.fileno(), 1)  # not through `orders`: its lock would still be held when this process ends
    os._exit(1)


def _raise_file_limit() -> None:
    """Allow as many connections as the system lets this process have."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    _raise_file_limit()
    orders, reports = sys.stdin.buffer, sys.stdout.buffer
    share = pickle.load(orders)
    pickle.dump(asyncio.run(play(share, orders, reports)), reports)
    reports.flush()
