"""One replica: an engine's process, and the port at which HTTP workers connect to it.

The process is the one that `minillm serve` starts without replicas, and the messages are the same. This module runs in
the process that owns it, which accepts connections, lets in those that know the secret, and hands them over.
"""

import contextlib
import logging
import socket
import threading
import time
from collections import Counter

from minillm.errors import MinillmError
from minillm.server.control import Child
from minillm.server.ledger import Families

from . import handshake
from .handshake import Address, Stranger

log = logging.getLogger(__name__)
ENGINE = "minillm.server.engine_side.engine_process"
AT_ONCE = 32  # connections that have not proved anything yet
STOP = 5.0  # seconds for the engine's process to exit


class ReplicaFailed(MinillmError, RuntimeError):
    """The engine could not be started, has ended, or is stuck."""


class EngineDoor:
    """Owns an engine's process, and accepts connections to it at `address`.

    options: what `engine_process.run` takes, packed. host: where to listen. replica: this one's id. engine: the module
    that is run. hang_timeout, load_timeout: seconds; see `ServerConfig`.
    """

    def __init__(
        self,
        options: str,
        replica: str,
        host: str,
        *,
        engine: str = ENGINE,
        hang_timeout: float = 300.0,
        load_timeout: float = 1800.0,
    ):
        self.replica, self.counted = replica, Families()
        self.stats: dict[str, float] = {}  # the engine's numbers, and its rows
        self._hang_timeout = hang_timeout
        self._why: str | None = None  # the engine's error
        self._working = 0.0  # seconds that it had been in the same step at its last report
        self._heard = time.monotonic()
        self._connections = Counter[str]()  # of each worker, by its id
        self._counting = threading.Lock()
        self._ready, self._ended = threading.Event(), threading.Event()
        self._strangers = threading.Semaphore(AT_ONCE)
        self._child = Child(engine, {"options": options})
        self._child.control.listen(self._told, self._gone)
        if not self._ready.wait(load_timeout) or self._ended.is_set():
            self.close()
            why = f"the engine was not ready within {load_timeout:g} s (load_timeout)"
            raise ReplicaFailed(
                self._why or ("the engine's process ended while loading" if self._ready.is_set() else why)
            )
        self._listener = socket.create_server((host, 0), backlog=128)
        self.address = Address(host, self._listener.getsockname()[1], handshake.new_secret())
        threading.Thread(target=self._accept, name="minillm-door", daemon=True).start()

    def check(self) -> None:
        """Raise ReplicaFailed unless the engine works."""
        silent = time.monotonic() - self._heard
        if self._ended.is_set():
            raise ReplicaFailed(self._why or "the engine's process has ended")
        if max(silent, self._working) > self._hang_timeout:
            raise ReplicaFailed(f"the engine has been stuck for {max(silent, self._working):.0f} s (hang_timeout)")

    @property
    def workers(self) -> set[str]:
        """Return the ids of the workers that are connected."""
        with self._counting:
            return {worker for worker, count in self._connections.items() if count > 0}

    def close(self) -> None:
        """End the engine's process; what runs is aborted."""
        if hasattr(self, "_listener"):
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # ends the accepting thread
            self._listener.close()
        self._child.control.send({"op": "stop"})
        self._child.end(STOP)
        self._child.control.close()

    # ---- on the thread that reads the engine's control socket

    def _told(self, message: dict) -> None:
        self._heard, self._working = time.monotonic(), message.get("working", self._working)
        self.counted, self.stats = message.get("counted", self.counted), message.get("stats", self.stats)
        if message["op"] == "failed":
            self._why = message["why"]
        elif message["op"] == "ready":
            self._ready.set()
        elif message["op"] == "left":
            self._count(message["id"], -1)

    def _gone(self) -> None:
        self._ended.set()
        self._ready.set()  # nothing more to wait for

    # ---- on threads of their own

    def _accept(self) -> None:
        while True:
            self._strangers.acquire()
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed, or out of files for a moment
                self._strangers.release()
                if self._listener.fileno() < 0 or self._ended.wait(0.1):
                    return
                continue
            threading.Thread(target=self._let_in, args=(sock,), name="minillm-handshake", daemon=True).start()

    def _let_in(self, sock: socket.socket) -> None:
        """Hand a connection to the engine's process, if its other end knows the secret."""
        try:
            sock, worker = handshake.accept(sock, self.address.secret, self.replica)
            with sock:
                self._count(worker, 1)
                self._child.control.send({"op": "worker", "id": worker}, sock)
        except Stranger as error:
            log.warning("%s", error)
        except OSError as error:
            log.info("a connection ended before it was let in (%s)", error)
        finally:
            self._strangers.release()

    def _count(self, worker: str, more: int) -> None:
        with self._counting:
            self._connections[worker] += more
            if not self._connections[worker]:
                del self._connections[worker]
