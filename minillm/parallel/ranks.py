"""The processes of all ranks, as the engine sees them: messages, answers, and which of them has failed."""

import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing import connection
from typing import Any, NoReturn, Protocol

from minillm.errors import ConfigError, MinillmError, RankFailed
from minillm.folders import import_path

from .messages import PING, Answered, Failed, Pong

PATIENCE = 60.0  # seconds without progress of any rank after which a step counts as hung
TICK = 1.0  # seconds between two questions to ranks that owe an answer
GRACE = 2.0  # seconds to find out whose failure was the first
CLOSING = 5.0  # seconds for a process to exit by itself
PATIENT = 10  # as many times PATIENCE before ranks that are all silent are given up: the machine may be the reason

log = logging.getLogger(__name__)


class Process(Protocol):
    """The part of `subprocess.Popen` that is used."""

    pid: int

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status; negative: the signal that ended it. Raises subprocess.TimeoutExpired."""
        ...


Start = Callable[[socket.socket, Sequence[str]], Process]


def start_process(theirs: socket.socket, arguments: Sequence[str]) -> Process:
    """Start `minillm.parallel.rank` with its end of a socket."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "minillm.parallel.rank", str(theirs.fileno()), *arguments],
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": import_path()},
        pass_fds=[theirs.fileno()],
        process_group=0,  # the terminal's Ctrl-C is the engine's
    )


class Member:
    """One rank: its process, and what it has answered."""

    def __init__(self, rank: int, process: Process, ours: socket.socket, patience: float):
        self.rank, self.process = rank, process
        self.inbox: deque[Answered | Failed] = deque()
        self.entered = -1  # collectives, when it last answered a ping
        self.working = False  # whether it was busy then, and waited for no other rank
        self.heard = 0.0  # when that was; only differences count
        self.closed = False  # whether its process has ended, or left the connection
        for limit in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # a stopped process never blocks the engine
            ours.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", int(patience), int(patience % 1 * 1e6)))
        self.connection = connection.Connection(ours.detach())

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process.pid})"

    def read(self) -> bool:
        """Take one message from the rank. Returns False if its process has ended."""
        try:
            message = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.closed = True
            return False
        if isinstance(message, Pong):
            self.entered, self.working, self.heard = message.entered, message.working, time.monotonic()
        else:
            self.inbox.append(message)
        return True

    def status(self) -> int | None:
        """Wait for the process, which is ending: its exit status, or None if it only closed its connection."""
        try:
            return self.process.wait(CLOSING)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> str:
        """Wait for the process, which is ending, and return how it did."""
        if (status := self.status()) is None:
            return "closed its connection"
        if status == -signal.SIGKILL:
            return "was killed by SIGKILL, as the system does when memory runs out"
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"


class Ranks:
    """The processes of the ranks of one engine: one for each of these devices.

    When one of them fails, all are ended, and every call raises RankFailed with the rank and the reason. patience:
    seconds without progress after which a rank counts as hung.
    """

    def __init__(self, devices: Sequence[str], patience: float = PATIENCE, start: Start = start_process):
        if sys.platform == "win32":
            raise ConfigError(
                "processes share a model on Linux only: leave out tensor_parallel_size and pipeline_parallel_size"
            )
        self.devices, self.patience, self._start = tuple(devices), patience, start
        self.failure: str | None = None
        self.members: list[Member] = []
        self._folder = tempfile.TemporaryDirectory(prefix="minillm-")
        self._over, started = threading.Event(), Future[None]()
        # The ranks end with the thread that starts them, so it stays.
        self._keeper = threading.Thread(target=self._keep, args=(started,), name="minillm-ranks", daemon=True)
        self._keeper.start()
        started.result()

    def _keep(self, started: Future[None]) -> None:
        try:
            for rank, device in enumerate(self.devices):
                ours, theirs = socket.socketpair()
                with ours, theirs:
                    arguments = [str(rank), str(len(self.devices)), f"{self._folder.name}/meeting", device]
                    process = self._start(theirs, arguments)
                    self.members.append(Member(rank, process, ours, self.patience))
        except BaseException as error:
            self.close(wait=False)
            started.set_exception(error)
        else:
            started.set_result(None)
        self._over.wait()
        for member in self.members:
            try:
                member.process.wait(CLOSING)
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()
        self._folder.cleanup()

    def send(self, *messages: Any) -> None:
        """Send each rank its message; a single one is for all of them."""
        self._check()
        packed = [pickle.dumps(message) for message in messages]
        with self.whole():
            for member, data in zip(self.members, packed * (len(self.members) // len(packed)), strict=True):
                try:
                    member.connection.send_bytes(data)
                except BlockingIOError:
                    self.lose(f"{member} has read nothing for {self.patience:g} s: it is stopped or hangs")
                except OSError:
                    while member.read():  # what it said last
                        pass
                    self._explain()

    def collect(self, *, limited: bool = True) -> list[Any]:
        """Wait for the next answer of each rank: their values. limited=False: for as long as that takes.

        Raises RankFailed, and ConfigError if what the ranks were told to do cannot work.
        """
        self.wait(limited=limited)
        return self.take()

    def take(self) -> list[Any]:
        """Return the values of the answers that `wait` has waited for."""
        with self.whole():
            return [answer.value for each in self.members if isinstance(answer := each.inbox.popleft(), Answered)]

    def wait(self, *, limited: bool = True) -> None:
        """As `collect`, but the answers are not taken: an interrupt does no harm."""
        self._check()
        progress, moved = self._progress(), time.monotonic()
        while True:
            if any(isinstance(each.inbox[0], Failed) for each in self.members if each.inbox):
                self._explain()
            if not self._owing():
                break
            heard = self._read(min(TICK, self.patience / 4))
            if progress != (now := self._progress()):
                progress, moved = now, time.monotonic()
            if limited and not heard:
                self._ask()
                if time.monotonic() - moved > self.patience:
                    self._blame(moved)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """End all ranks if this is interrupted: they would get half a message, or a later one would get its answers."""
        try:
            yield
        except BaseException:
            if self.failure is None:
                self._end("the ranks were interrupted between a message and its answers")
            raise

    def ended(self) -> str | None:
        """Return which process has ended, and how; None if all run. From any thread."""
        for member in self.members:
            with suppress(subprocess.TimeoutExpired):
                member.process.wait(0)
                return f"{member} {member.end()}"
        return None

    def close(self, *, wait: bool = True) -> None:
        """End all processes. They do so when their sockets close, or are killed some seconds later."""
        for member in self.members:
            with suppress(OSError):
                member.connection.close()
        self._over.set()
        if wait:
            self._keeper.join()

    # ---- failures

    def _check(self) -> None:
        if self.failure is not None:
            raise RankFailed(f"{self.failure}; this engine cannot run any more: make a new one")

    def lose(self, why: str, error: type[MinillmError] = RankFailed) -> NoReturn:
        """End all ranks because of one."""
        self._end(why)
        raise error(why)

    def _end(self, why: str) -> None:
        self.failure = why
        for member in self.members:
            member.process.kill()
        self.close(wait=False)

    def _owing(self) -> list[Member]:
        return [member for member in self.members if not member.inbox]

    def _progress(self) -> list[tuple[int, int]]:
        return [(member.entered, len(member.inbox)) for member in self.members]

    def _read(self, seconds: float) -> bool:
        """Wait for messages of any rank, and take them. Returns whether there were any."""
        heard = self._take_ready(seconds)
        if any(member.closed for member in self.members):
            self._explain()
        return heard

    def _take_ready(self, seconds: float) -> bool:
        ready = connection.wait([member.connection for member in self.members if not member.closed], seconds)
        with self.whole():
            for member in self.members:
                if member.connection in ready:
                    member.read()
        return bool(ready)

    def _ask(self) -> None:
        """Ask all ranks how far they are."""
        with self.whole():
            for member in self.members:
                with suppress(OSError):
                    member.connection.send_bytes(pickle.dumps(PING))

    def _explain(self) -> NoReturn:
        """Raise why a rank has failed or ended. Another rank's failure may have done that to it.

        A process that loses another one in a collective reports it, or its library aborts it.
        """
        deadline = time.monotonic() + GRACE
        while True:
            ended = {each: each.status() for each in self.members if each.closed}
            killed = [each for each, status in ended.items() if status == -signal.SIGKILL]
            exited = [each for each, status in ended.items() if status != -signal.SIGABRT]
            reports = [(each, each.inbox[-1]) for each in self.members if each.inbox]
            failed = [(member, report) for member, report in reports if isinstance(report, Failed)]
            own = [(member, report) for member, report in failed if not report.by_others]
            # A stage that has ended may have answered before.
            known = any(not report.expected for _, report in own) or (own and not self._owing())
            left = deadline - time.monotonic()
            if known or exited or left <= 0:
                break
            self._take_ready(left)
        if killed or (ended and not own):
            member = (killed or exited or list(ended))[0]
            self.lose(f"{member} {member.end()}")
        member, failure = (own or failed)[0]
        if failure.trace:
            log.error("%s failed:\n%s", member, failure.trace)
        alike = len(failed) == len(self.members) and len({report.message for _, report in failed}) == 1
        self.lose(failure.message if alike else f"{member}: {failure.message}", failure.error)

    def _blame(self, moved: float) -> None:
        """Raise which rank the others wait for. moved: since when none makes progress, though all were asked."""
        seconds = time.monotonic() - moved
        silent = [member for member in self.members if member.heard < moved]
        if len(silent) == len(self.members) and seconds < PATIENT * self.patience:
            return  # this process may be what stood still
        if silent:
            self.lose(f"{silent[0]} has not answered for {seconds:.0f} s: it is stopped or hangs")
        working = [member for member in self.members if member.working]  # the others wait for messages, or in a call
        if 0 < len(working) < len(self.members):
            behind = min(working, key=lambda member: member.entered)
            self.lose(f"{behind} hangs: the others have waited for it for {seconds:.0f} s")
        owing = " and ".join(map(str, self._owing()))
        self.lose(f"{owing} hangs: a step has made no progress for {seconds:.0f} s")
