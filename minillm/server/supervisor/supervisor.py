"""Run `minillm serve`: a small process that owns the engine's process and the HTTP workers.  Lesson 99.

It holds no model and imports no torch, so there is little in it that could fail. When the engine's process ends, or is
stuck in a step, requests in flight end with an error, the workers answer 503, and a new engine is started.
"""

import logging
import socket
import threading
import time

from ..control import Child
from . import fleet
from .fleet import AGAIN, NO_MORE, ServerFailed, Workers

log = logging.getLogger(__name__)
ENGINE = "minillm.server.engine_side.engine_process"  # the module that an engine's process runs
TICK = 1.0  # seconds between two looks at the engine's reports
RETRY = 1.0  # seconds before an engine that failed to start is started again; doubled each time
RETRIES = 5
STEADY = 30.0  # seconds after which an engine counts as one that works


class Supervisor:
    """The engine's process and the workers connected to it.

    options: what `engine_process.run` takes, packed. hang_timeout: seconds without a report, or in the same step,
    after which the engine's process is killed. load_timeout: seconds that it has to be ready, or it is killed too.
    """

    def __init__(self, workers: Workers, options: str, hang_timeout: float, load_timeout: float):
        self.workers, self.hang_timeout, self.load_timeout = workers, hang_timeout, load_timeout
        self.model = ""  # its name for clients, once the engine is ready
        self.engine: Child | None = None
        self._options = options
        self._adapters: dict[str, str | None] = {}  # what clients have loaded and unloaded: `AdapterLoader`'s changes
        self._heard = 0.0  # when the engine last reported; only differences count
        self._began = self._loading = 0.0  # when the latest engine was started, and how long one took to be ready
        self._ready = self._stopping = False
        self._failures = 0  # failed starts in a row
        self._crashes = 0  # engines in a row that have ended less than STEADY after they were ready
        self._ready_at = 0.0
        self._why: str | None = None  # what the engine reported before it exited
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._failed: ServerFailed | None = None  # why there will be no engine any more
        self._over = threading.Event()

    def start(self) -> None:
        """Start the engine, then the workers; returns when they accept requests. Raises ServerFailed, OSError."""
        threading.Thread(target=self._watch, name="minillm-watchdog", daemon=True).start()
        with self._changed:
            self._start()
            self._changed.wait_for(lambda: self._ready or self._failed)
            if self._failed:
                raise self._failed
        self.workers.start(self._connect, self._loading)
        threading.Thread(target=self._join_workers, name="minillm-workers", daemon=True).start()

    def join(self) -> None:
        """Wait until there will be no engine or no worker any more, then raise ServerFailed."""
        self._over.wait()
        assert self._failed is not None, "it is over because something failed"
        raise self._failed

    def stop(self) -> None:
        """Stop the workers after their grace period, then the engine."""
        with self._lock:
            self._stopping = True
        try:
            self.workers.stop()
        finally:
            self.workers.close()
            if self.engine is not None:
                self.engine.control.send({"op": "stop"})
                self.engine.end(fleet.KILL)
                self.engine.control.close()

    def _connect(self, sock: socket.socket) -> None:
        """Hand the engine its end of a connection to a worker."""
        with sock:
            engine = self.engine  # another thread may forget it meanwhile
            if engine is not None:
                engine.control.send({"op": "worker"}, sock)

    def _start(self) -> None:
        """Start the engine's process, with the lock held. Raises OSError."""
        self._why, self._began = None, time.monotonic()
        self.engine = child = Child(ENGINE, {"options": self._options, "adapters": self._adapters})
        child.control.listen(lambda message: self._told(child, message), lambda: self._gone(child))

    # ---- on the thread that reads the engine's control socket

    def _told(self, child: Child, message: dict) -> None:
        with self._changed:
            self._heard = time.monotonic()
            if "counted" in message:
                self.workers.ledger.report(message["counted"])
            match message["op"]:
                case "ready":
                    again = bool(self.model)
                    self._ready, self._failures, self.model = True, 0, message["model"]
                    self._ready_at = time.monotonic()
                    self._loading = self._ready_at - self._began
                    self._changed.notify_all()
                    if again and not self._stopping:
                        log.warning("the engine is back")
                        self.workers.engine_back(self._connect, self._loading)
                case "failed":
                    self._why = message["why"]
                case "adapters":
                    self._adapters = message["changes"]
                case "beat" if message["working"] > self.hang_timeout:
                    self._end_stuck(child, f"has been in the same step for {message['working']:.0f} s", "hang_timeout")

    def _gone(self, child: Child) -> None:
        """Handle the end of the engine's process, which has closed its control socket."""
        with self._lock:
            was_ready, self._ready = self._ready, False
            if self._stopping:
                return
            self.workers.ledger.engine_ended()
            self.workers.engine_lost(self._loading)
            status = child.reap()
            self.engine = None
            if was_ready:
                self.workers.ledger.restarted("engine")
                self._crashes = self._crashes + 1 if time.monotonic() - self._ready_at < STEADY else 1
                log.warning("the engine's process has ended (%s); starting another one", status)
                self._restart(status)
                return
            first = not self.model
            if first and self._why is not None:  # the caller's mistake: trying again would only delay the message
                self._give_up(self._why)
                return
            self._start_failed(self._why or f"{status}; see its output on stderr")

    # ---- with the lock held

    def _retry(self) -> None:
        try:
            if not self._stopping:
                self._start()
        except OSError as error:
            self._start_failed(str(error))

    def _restart(self, status: str) -> None:
        """Start an engine: at once, but later and later if engines have ended soon after they were ready."""
        if self._crashes > RETRIES:
            self._give_up(f"{self._crashes} engines in a row have ended within {STEADY:g} s, the last one ({status})")
        elif self._crashes > 1:
            self._later(RETRY * 2 ** (self._crashes - 2))
        else:
            self._retry()

    def _later(self, seconds: float) -> None:
        self.workers.engine_lost(seconds + self._loading)
        timer = threading.Timer(seconds, self._retry_later)
        timer.daemon = True
        timer.start()

    def _start_failed(self, why: str) -> None:
        self._failures += 1
        again = self._failures <= RETRIES
        log.warning("the engine could not be started (%s); %s", why, AGAIN if again else NO_MORE)
        if not again:
            self._give_up(f"the engine could not be started: {why}")
            return
        self._later(RETRY * 2 ** (self._failures - 1))

    def _retry_later(self) -> None:
        with self._lock:
            self._retry()

    def _give_up(self, why: str) -> None:
        self._failed = ServerFailed(why)
        self._changed.notify_all()
        self._over.set()

    def _end_stuck(self, child: Child, how: str, limit: str) -> None:
        log.warning("the engine's process %s, longer than %s=%g; ending it", how, limit, getattr(self, limit))
        self._heard = self._began = time.monotonic()  # not again with every tick
        child.process.kill()

    # ---- on threads of their own

    def _watch(self) -> None:
        """Look again and again for an engine's process that is stuck."""
        last = time.monotonic()
        while not self._over.wait(TICK):
            now = time.monotonic()
            with self._lock:
                if now - last > 2 * TICK + self.hang_timeout / 2:
                    self._heard = now  # this process has slept too: the reports are still to be read
                self._look(now)
            last = now

    def _look(self, now: float) -> None:
        """Kill an engine's process that does not report any more, or has loaded for too long; with the lock held."""
        if self.engine is None or self._stopping:
            return
        silent, loading = now - self._heard, now - self._began
        if self._ready and silent > self.hang_timeout:
            self._end_stuck(self.engine, f"has not reported for {silent:.0f} s", "hang_timeout")
        elif not self._ready and loading > self.load_timeout:
            self._end_stuck(self.engine, f"has not been ready for {loading:.0f} s", "load_timeout")

    def _join_workers(self) -> None:
        try:
            self.workers.join()
        except ServerFailed as error:
            with self._lock:
                self._give_up(str(error))
