"""Start, monitor, and stop the HTTP workers of an engine.  Lesson 99."""

import errno
import importlib.util
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from minillm.config import EngineOptions
from minillm.errors import ConfigError, MinillmError, MissingPackage
from minillm.values import as_float, shown

from .limits import FLUSH, Timeouts
from .shares import Shares

if TYPE_CHECKING:  # importing these loads torch: `serve` and `running` do it when called
    from minillm.engine.async_llm import AsyncLLM
    from minillm.engine.llm import LLM

    from .hub import Hub, Line

log = logging.getLogger(__name__)
NEEDED = ("fastapi", "uvicorn", "prometheus_client")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")  # uvicorn's
MAX_QUEUED = 1024  # requests that may wait beyond those that run
MAX_WAIT = 60.0  # seconds that a request may have to wait until it runs, by estimate
TIMEOUTS = Timeouts()
STARTUP = 60  # seconds for the workers to start
RETRY = 1  # seconds before retrying a worker that failed to start; doubled each time
RETRIES = 5
KILL = 2  # seconds after the grace period and FLUSH until a worker that still runs is killed
# By default, glibc raises this threshold when a large block is freed, and then returns less memory to the system. A
# fixed threshold keeps a worker from staying as large as its largest request bodies made it.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072"}
_AGAIN, _NO_MORE = "trying again soon", "giving up on it"


class PortTaken(MinillmError, OSError):
    """The requested port is already in use."""


class ServerFailed(MinillmError, RuntimeError):
    """The HTTP workers could not be started, or none of them is left."""


@dataclass
class RunningServer:
    """A server: its `url` (no trailing slash), its engine, the model's name for clients, and its workers."""

    url: str
    engine: "AsyncLLM"
    model: str
    workers: "Workers"


def serve(
    model: str | Path | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    served_model_name: str | None = None,
    log_level: str = "info",
    workers: int = 1,
    max_queued: int = MAX_QUEUED,
    max_wait: float | None = MAX_WAIT,
    header_timeout: float = TIMEOUTS.header_timeout,
    body_timeout: float = TIMEOUTS.body_timeout,
    keep_alive_timeout: float = TIMEOUTS.keep_alive_timeout,
    shutdown_grace: float = TIMEOUTS.shutdown_grace,
    api_key: str | None = None,
    **engine_options: Unpack[EngineOptions],
) -> None:
    """Serve until interrupted (Ctrl-C) or terminated.  Lesson 99.

    model: a directory, the name of a preset, or None for the included tiny-gemma. port: 0 picks a free one.
    workers: number of HTTP processes. max_queued: requests that may wait beyond those that run. Further ones are
    answered with 429, as are those that would wait longer than max_wait seconds, by estimate (None: no limit). The
    timeouts are those of `Timeouts`, in seconds. A client that sends a request too slowly receives a 408. Requests
    running at shutdown have shutdown_grace seconds to finish; a second signal aborts them.
    api_key: clients have to send it, except for health and metrics (see `gate`). engine_options: fields of
    `EngineConfig`. Raises PortTaken, ConfigError; ServerFailed if no worker is left.
    """
    with _terminate_as_interrupt():
        try:
            with running(
                model,
                host=host,
                port=port,
                served_model_name=served_model_name,
                log_level=log_level,
                workers=workers,
                max_queued=max_queued,
                max_wait=max_wait,
                header_timeout=header_timeout,
                body_timeout=body_timeout,
                keep_alive_timeout=keep_alive_timeout,
                shutdown_grace=shutdown_grace,
                api_key=api_key,
                **engine_options,
            ) as server:
                at = f"{server.url}/v1, with a live page at {server.url}"
                log.info("minillm is serving %s at %s (press Ctrl-C to stop)", server.model, at)
                server.workers.join()
        except KeyboardInterrupt:
            log.info("minillm has stopped")


@contextmanager
def running(
    model: "str | Path | LLM | AsyncLLM | None" = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    served_model_name: str | None = None,
    log_level: str = "warning",
    workers: int = 1,
    max_queued: int = MAX_QUEUED,
    max_wait: float | None = MAX_WAIT,
    header_timeout: float = TIMEOUTS.header_timeout,
    body_timeout: float = TIMEOUTS.body_timeout,
    keep_alive_timeout: float = TIMEOUTS.keep_alive_timeout,
    shutdown_grace: float = TIMEOUTS.shutdown_grace,
    api_key: str | None = None,
    **engine_options: Unpack[EngineOptions],
) -> Iterator[RunningServer]:
    """Serve an engine of this process until the block ends, for a notebook or a test.  Lesson 99.

    model: an `LLM` or `AsyncLLM`, which stays open afterward, or any model that `serve` accepts, which is closed at the
    end. The other arguments are those of `serve`.

        with running("data/tiny-gemma") as server:
            openai.OpenAI(base_url=server.url + "/v1", api_key="none")

    Raises PortTaken, ConfigError; ServerFailed if a worker does not start.
    """
    _check(workers, max_queued, max_wait, log_level)
    from .gate import digest

    key = digest(api_key)
    timeouts = Timeouts(header_timeout, body_timeout, keep_alive_timeout, shutdown_grace)
    # OpenMP threads busy-wait for one another on cores that workers and clients need. With the default spin count, a
    # single other busy process slows down every step. The variable is read once, when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    listener = _listen(host, port)
    try:
        with _engine(model, engine_options) as engine:
            from .hub import Hub

            name = served_model_name or engine.name
            fleet = Workers(listener, workers, timeouts.shutdown_grace)
            hub = Hub(
                engine,
                name,
                max_queued=max_queued,
                max_wait=max_wait,
                log_level=log_level,
                on_gone=fleet.gone,
                timeouts=timeouts,
                api_key=key,
            )
            try:
                fleet.start(hub)
                yield RunningServer(_url(host, listener), engine, name, fleet)
            finally:
                try:
                    fleet.stop()
                finally:
                    hub.close()
                    fleet.close()
    finally:
        listener.close()


class Workers:
    """The worker processes of a server. One that dies is replaced; one that fails to start is retried a few times.

    grace: seconds for requests in flight to finish when the server stops.
    """

    def __init__(self, listener: socket.socket, count: int, grace: float):
        self.listener, self.count, self.grace = listener, count, grace
        self.processes: dict[Line, subprocess.Popen] = {}  # keyed by the hub's line to the worker
        self._shares = Shares.create(count) if count > 1 and sys.platform != "win32" else None
        self._slots: dict[Line, int] = {}  # of the workers in `_shares`
        self._failures: dict[Line, int] = {}  # failed starts in a row before this worker
        self._places = count  # number of workers that run or will be retried
        self._given_up: str | None = None  # why a worker was given up
        self._starting, self._stopping = True, False
        self._lock = threading.RLock()  # prevents launching a worker during shutdown
        self._state_changed = threading.Condition(self._lock)  # a worker has started or was given up
        self._none_left = threading.Event()

    def start(self, hub: "Hub") -> None:
        """Start all workers and wait until they accept requests. Raises ServerFailed, OSError."""
        self.hub = hub
        with self._state_changed:
            for _ in range(self.count):
                self._begin(0)
            settled = self._state_changed.wait_for(lambda: self._given_up or self._up == self.count, STARTUP)
            self._starting = False
        if self._given_up:
            raise ServerFailed(self._given_up)
        if not settled:
            raise ServerFailed(f"a worker did not start within {STARTUP} s: is the machine overloaded?")

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
            processes = dict(self.processes)
        for line in processes:
            line.send({"op": "stop", "grace": grace})
        deadline = time.monotonic() + grace + FLUSH + KILL
        for process in processes.values():
            try:
                process.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def close(self) -> None:
        """Free what the workers shared, once they have stopped."""
        if self._shares is not None:
            self._shares.close()

    @property
    def _up(self) -> int:
        return sum(line.ready.done() for line in self.processes)

    def _came_up(self, line: "Line") -> None:
        with self._state_changed:
            self._failures[line] = 0
            self._state_changed.notify_all()

    def gone(self, line: "Line") -> None:
        """Called on the hub's thread when a worker disconnects."""
        with self._lock:
            process = self.processes[line]
            if self._stopping:
                return
            del self.processes[line]
            slot = self._slots.pop(line, None)
            if self._shares is not None and slot is not None:
                self._shares.leave(slot)
            failures, status = self._failures.pop(line), _reap(process)
            if line.ready.done():
                log.warning("an HTTP worker exited (%s); replacing it", status)
                self._replace(0)
                return
            why = line.why or f"{status}; see its output on stderr"
            # An error that a worker reports at startup is the caller's mistake: retrying would only delay the message.
            failures = RETRIES if line.why and self._starting else failures
            self._failed(f"died while starting: {why}", failures + 1)

    def _replace(self, failures: int) -> None:
        """Replace a dead worker, with the lock held."""
        try:
            self._begin(failures)
        except OSError as error:  # no more processes or file descriptors
            self._failed(f"cannot be started ({error})", failures + 1)

    def _failed(self, what: str, failures: int) -> None:
        """Schedule a retry, or give up after RETRIES of them; with the lock held."""
        again = failures <= RETRIES
        log.warning("an HTTP worker %s; %s", what, _AGAIN if again else _NO_MORE)
        if again:
            timer = threading.Timer(RETRY * 2 ** (failures - 1), self._retry, [failures])
            timer.daemon = True
            timer.start()
            return
        self._places -= 1
        self._given_up = f"an HTTP worker {what}"
        self._state_changed.notify_all()
        if not self._places:
            self._none_left.set()

    def _retry(self, failures: int) -> None:
        with self._lock:
            if not self._stopping:
                self._replace(failures)

    def _begin(self, failures: int) -> None:
        """Launch a worker, with the lock held. Raises OSError."""
        line = self._launch()
        self._failures[line] = failures
        line.ready.add_done_callback(lambda _: self._came_up(line))

    def _launch(self) -> "Line":
        """Start a worker and return the hub's line to it. Raises OSError."""
        from .hub import Line
        from .worker import share

        ours, theirs = socket.socketpair()
        line, shares = Line(self.hub, ours), self._shares
        with theirs:
            process = subprocess.Popen(
                # -P: no file in the current directory can shadow a module.
                [sys.executable, "-P", "-m", "minillm.server.worker"],
                stdin=subprocess.PIPE,
                env=GIVE_BACK | os.environ | {"PYTHONPATH": _import_path()},
                **_inherited(self.listener, theirs, *([] if shares is None else [shares.file])),
            )
            given: dict[str, Any] = {"listener": share(self.listener, process.pid), "link": share(theirs, process.pid)}
            if shares is not None:
                self._slots[line] = min(set(range(shares.count)) - set(self._slots.values()))
                given["shares"] = [shares.file, shares.count, self._slots[line]]
            stdin = process.stdin
            assert stdin is not None, "stdin is a pipe"
            with suppress(BrokenPipeError), stdin:  # the worker is already dead; the hub will notice
                stdin.write(json.dumps(given).encode() + b"\n")
        self.processes[line] = process
        self.hub.connect(line)
        return line


def _inherited(*files: socket.socket | int) -> dict[str, Any]:
    """Popen arguments that keep these sockets and files open in the child and shield it from the terminal's Ctrl-C."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    descriptors = [each if isinstance(each, int) else each.fileno() for each in files]
    return {"pass_fds": descriptors, "process_group": 0}


def _import_path() -> str:
    """This process's import path, so that a worker imports the same minillm."""
    places = [place for place in sys.path if place and not place.endswith(".zip")]
    return os.pathsep.join([*places, str(Path(__file__).parents[2])])


def _reap(process: subprocess.Popen) -> str:
    """Wait for a worker that has disconnected, and return how it exited."""
    try:
        status = process.wait(1)
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait()
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Make SIGTERM act like Ctrl-C; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check(workers: int, max_queued: int, max_wait: float | None, log_level: str) -> None:
    if log_level not in LOG_LEVELS:
        raise ConfigError(f"log_level must be one of {', '.join(LOG_LEVELS)}, not {shown(log_level)}")
    if max_wait is not None and not (as_float(max_wait) or 0) > 0:
        raise ConfigError(f"max_wait must be a number of seconds greater than 0, or None, not {shown(max_wait)}")
    for name, value, low in (("workers", workers, 1), ("max_queued", max_queued, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ConfigError(f"{name} must be a whole number from {low}, not {shown(value)}")
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            raise MissingPackage(f"No module named {name!r}: the server needs `pip install 'minillm[serve]'`")


@contextmanager
def _engine(model: "str | Path | LLM | AsyncLLM | None", options: EngineOptions) -> "Iterator[AsyncLLM]":
    from minillm.engine.async_llm import AsyncLLM
    from minillm.engine.llm import LLM

    if options and isinstance(model, (LLM, AsyncLLM)):
        raise ConfigError(f"the engine already exists: {', '.join(options)} can no longer be set")
    if isinstance(model, AsyncLLM):
        yield model
        return
    engine = AsyncLLM(engine=model) if isinstance(model, LLM) else AsyncLLM(model, **options)
    try:
        yield engine
    finally:
        engine.close()


def _listen(host: str, port: int) -> socket.socket:
    """Bind and listen before the model loads, so that a port in use is reported at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # With SO_REUSEADDR, two sockets may bind to the same port, but only one may listen.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            way_out = "stop the process that listens there, or choose another port (0 picks a free one)"
            raise PortTaken(error.errno, f"port {port} on {host} is in use: {way_out}") from None
        raise
    return listener


def _url(host: str, listener: socket.socket) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{listener.getsockname()[1]}"
