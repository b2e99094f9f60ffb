"""Start, connect, replace and stop the HTTP workers of a server.  Lesson 99."""

import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from minillm.errors import MinillmError

from ..control import Child
from ..ledger import Ledger
from ..limits import FLUSH
from ..shares import Shares

log = logging.getLogger(__name__)
STARTUP = 60  # seconds for the workers to start
RETRY = 1  # seconds before retrying a worker that failed to start; doubled each time
RETRIES = 5
TICK = 1.0  # seconds between two looks at the workers' reports
KILL = 2  # seconds after the grace period and FLUSH until a worker that still runs is killed
AGAIN, NO_MORE = "trying again soon", "giving up on it"


class ServerFailed(MinillmError, RuntimeError):
    """The engine or the HTTP workers could not be started, or no worker is left."""


@dataclass(eq=False)
class Worker:
    """One worker process. slot: its index in `Shares`; failures: failed starts in a row before it."""

    child: Child
    slot: int
    failures: int
    ready: bool = False
    why: str | None = None  # the error that it reported before it exited
    heard: float = 0.0  # when it last reported, or was connected to an engine; only differences count


class Workers:
    """The worker processes of a server. One that dies is replaced; one that fails to start is retried a few times.

    grace: seconds for requests in flight to finish when the server stops. hang_timeout: seconds without a report after
    which a worker is killed, and so replaced. module: what a worker runs, with these arguments. startup: seconds for
    the workers to start.
    """

    def __init__(
        self,
        listener: socket.socket,
        count: int,
        grace: float,
        hang_timeout: float,
        module: str = "minillm.server.worker.worker",
        arguments: dict[str, Any] | None = None,
        startup: float = STARTUP,
    ):
        self.listener, self.count, self.grace, self.hang_timeout = listener, count, grace, hang_timeout
        self._module, self._arguments, self._startup = module, arguments or {}, startup
        self.running: list[Worker] = []
        self.ledger = Ledger()
        self._connect: Callable[[socket.socket], object] | None = None
        self._reload = 0.0  # seconds from an engine's end until the next one is ready, by estimate
        self._shares = Shares.create(count) if count > 1 and sys.platform != "win32" else None
        self._slots = count  # number of workers that run or will be retried
        self._given_up: str | None = None  # why a worker was given up
        self._starting, self._stopping = True, False
        self._lock = threading.RLock()  # prevents starting a worker during shutdown
        self._state_changed = threading.Condition(self._lock)  # a worker has started or was given up
        self._none_left, self._closed = threading.Event(), threading.Event()
        self._watchdog = threading.Thread(target=self._watch, name="minillm-worker-watchdog", daemon=True)

    def start(self, connect: Callable[[socket.socket], object] | None, reload: float = 0.0) -> None:
        """Start all workers and wait until they accept requests. Raises ServerFailed, OSError.

        connect: hands the engine its end of a connection to a worker; None: workers find their engines themselves.
        reload: seconds from the engine's end until another one is ready, by estimate.
        """
        with self._state_changed:
            self._connect, self._reload = connect, reload
            for _ in range(self.count):
                self._begin(0)
            settled = self._state_changed.wait_for(lambda: self._given_up or self._up == self.count, self._startup)
            self._starting = False
        self._watchdog.start()
        if self._given_up:
            raise ServerFailed(self._given_up)
        if not settled:
            raise ServerFailed(f"a worker did not start within {self._startup:g} s: is the machine overloaded?")

    def engine_lost(self, seconds: float) -> None:
        """Tell workers to answer that there is no engine. seconds: until there is one, by estimate."""
        with self._lock:
            self._connect = None
            for worker in self.running:
                worker.child.control.send({"op": "gone", "seconds": seconds})

    def engine_back(self, connect: Callable[[socket.socket], object], reload: float) -> None:
        """Connect all workers to a new engine; the arguments are those of `start`."""
        with self._lock:
            self._connect, self._reload = connect, reload
            for worker in self.running:
                self._link(worker)

    def join(self) -> None:
        """Wait until no worker is left, then raise ServerFailed."""
        self._none_left.wait()
        raise ServerFailed(f"no HTTP worker is left: {self._given_up}")

    def stop(self) -> None:
        """Refuse new connections and stop the workers after the grace period, or at once if interrupted again."""
        try:
            self._end(self.grace)
        except KeyboardInterrupt:  # at any point above: what was done is done again, without harm
            self._end(0)
            raise

    def _end(self, grace: float) -> None:
        with suppress(OSError):  # some systems cannot: there, it closes once all processes have closed it
            self.listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._stopping = True
            running = list(self.running)
        for worker in running:
            worker.child.control.send({"op": "stop", "grace": grace})
        deadline = time.monotonic() + grace + FLUSH + KILL
        for worker in running:
            worker.child.end(deadline - time.monotonic())

    def close(self) -> None:
        """Free what the workers shared, once they have stopped."""
        self._closed.set()
        if self._watchdog.is_alive():
            self._watchdog.join()
        for worker in self.running:
            worker.child.control.close()
        if self._shares is not None:
            self._shares.close()

    @property
    def _up(self) -> int:
        return sum(worker.ready for worker in self.running)

    # ---- on a thread of its own

    def _watch(self) -> None:
        """Look again and again for workers that are stuck."""
        last = time.monotonic()
        while not self._closed.wait(TICK):
            now = time.monotonic()
            with self._lock:
                if now - last > 2 * TICK + self.hang_timeout / 2:  # this process has slept too
                    for worker in self.running:
                        worker.heard = now  # its reports are still to be read
                self._look(now)
            last = now

    def _look(self, now: float) -> None:
        """Kill workers that do not report any more; with the lock held."""
        for worker in self.running:
            # One that starts does not report, and becomes ready only if there is an engine.
            limit = self.hang_timeout if worker.ready else max(self._startup, self.hang_timeout)
            if now - worker.heard > limit and not self._stopping and (worker.ready or self._connect is not None):
                log.warning("an HTTP worker has not reported for more than %g s; ending it", limit)
                worker.heard = now  # not again with every tick
                worker.child.process.kill()

    # ---- on the thread that reads a worker's control socket

    def _heard(self, worker: Worker, message: dict) -> None:
        with self._state_changed:
            worker.heard = time.monotonic()
            match message["op"]:
                case "ready":
                    worker.ready, worker.failures = True, 0
                    self._state_changed.notify_all()
                case "failed":
                    worker.why = message["why"]
                case "lost":
                    self._link(worker)
                case "answered":
                    self.ledger.answered(message["status"])
                case "count":
                    counted = {"op": "counted", "id": message["id"], "families": self.ledger.families()}
                    worker.child.control.send(counted)
                case "moved":
                    self.ledger.moved(message["choices"])
                case "tell":
                    self._tell_others(worker, {"op": "told"} | message["what"])

    def _gone(self, worker: Worker) -> None:
        """Handle the end of a worker, which has closed its control socket."""
        with self._lock:
            if self._stopping:
                return
            self.running.remove(worker)
            if self._shares is not None:
                self._shares.leave(worker.slot)
            status = worker.child.reap()
            self._tell_others(worker, {"op": "left"})
            if worker.ready:
                log.warning("an HTTP worker exited (%s); replacing it", status)
                self.ledger.restarted("worker")
                self._replace(0)
                return
            why = worker.why or f"{status}; see its output on stderr"
            # An error that a worker reports at startup is the caller's mistake: retrying would only delay the message.
            failures = RETRIES if worker.why and self._starting else worker.failures
            self._failed(f"died while starting: {why}", failures + 1)

    # ---- with the lock held

    def _tell_others(self, worker: Worker, message: dict) -> None:
        for other in self.running:
            if other is not worker:
                other.child.control.send(message | {"worker": worker.slot})

    def _replace(self, failures: int) -> None:
        try:
            self._begin(failures)
        except OSError as error:  # no more processes or file descriptors
            self._failed(f"cannot be started ({error})", failures + 1)

    def _failed(self, what: str, failures: int) -> None:
        """Schedule a retry, or give up after RETRIES of them."""
        again = failures <= RETRIES
        log.warning("an HTTP worker %s; %s", what, AGAIN if again else NO_MORE)
        if again:
            timer = threading.Timer(RETRY * 2 ** (failures - 1), self._retry, [failures])
            timer.daemon = True
            timer.start()
            return
        self._slots -= 1
        self._given_up = f"an HTTP worker {what}"
        self._state_changed.notify_all()
        if not self._slots:
            self._none_left.set()

    def _retry(self, failures: int) -> None:
        with self._lock:
            if not self._stopping:
                self._replace(failures)

    def _begin(self, failures: int) -> None:
        """Start a worker and connect it to the engine. Raises OSError."""
        worker = self._start(failures)
        self.running.append(worker)
        worker.child.control.listen(lambda message: self._heard(worker, message), lambda: self._gone(worker))
        self._link(worker)

    def _start(self, failures: int) -> Worker:
        slot = min(set(range(self.count)) - {worker.slot for worker in self.running})
        arguments, files = dict(self._arguments), []
        if self._shares is not None:
            arguments["shares"] = [self._shares.file, self._shares.count, slot]
            files.append(self._shares.file)
        return Worker(Child(self._module, arguments, {"listener": self.listener}, files), slot, failures)

    def _link(self, worker: Worker) -> None:
        """Connect a worker to the engine, if there is one. If there is not, it will be once the engine is back."""
        worker.heard = time.monotonic()
        if self._connect is None:
            return
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            log.warning("cannot connect an HTTP worker to the engine (%s); replacing the worker", error)
            worker.child.process.kill()
            return
        with theirs:
            self._connect(ours)
            worker.child.control.send({"op": "engine", "seconds": self._reload}, theirs)
