"""Servers that tests start as processes."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil


def commands_below(pid: int) -> dict[int, list[str]]:
    """The words of the commands of a process's children, oldest first, without those that end meanwhile."""
    found = {}
    for each in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):
            found[each.pid] = (each.create_time(), each.cmdline())
    return {pid: words for pid, (_, words) in sorted(found.items(), key=lambda item: item[1][0]) if words}


@contextmanager
def started(command: list, **options) -> Iterator[subprocess.Popen]:
    """A process that does not outlive the block: left early, by a failure, the block kills it."""
    with subprocess.Popen(list(map(str, command)), text=True, **options) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


@contextmanager
def serving(model, *options: str, announced: str = "stdout") -> Iterator[tuple[subprocess.Popen, str]]:
    """`minillm serve` in a process group of its own: the process and its URL, as it says on `announced`."""
    command = [sys.executable, "-m", "minillm.cli", "serve", "--port", "0", "--model", model]
    command += ["--load-format", "dummy", "--device", "cpu", "--max-num-seqs", "4", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    # A shell starts background jobs with SIGINT ignored, and so would be everything they start.
    pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    with started(command, **pipes) as process:
        found = (re.search(r"(http://\S+)/v1", line) for line in getattr(process, announced))
        yield process, next(filter(None, found))[1]
