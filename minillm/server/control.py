"""Start a server's processes, and talk to each of them over a socket.  Lesson 99.

One process owns the others: `minillm serve` owns the engine's process and the HTTP workers; in a notebook, the kernel
owns the workers. The owner writes one line of JSON to a new process's standard input. It names the sockets that the
process inherits, one of which is its control socket. When that one closes, the owner is gone and the process exits.

A message is a line of JSON, which may carry a socket: that is how a worker is given a connection to a new engine.

From the owner of a worker:
    engine      a socket: the connection to the engine; seconds: from its end until another one is ready, by estimate
    gone        there is no engine; seconds: until there is, by estimate
    counted     families: all that the server has counted; id: that of the question
    told        what another worker told all others, as further members; worker: that one's slot
    left        worker: the slot of another one that has ended
    stop        accept no new requests, finish those that run; grace: seconds until the rest is aborted
From a worker:
    ready       it accepts requests
    beat        its event loop runs
    failed      why: the error that ends it
    lost        its connection to the engine is closed
    answered    status: that of a response, to be counted
    count       id: asks for all that the server has counted
    moved       choices: how many went on in another engine, as theirs had ended
    tell        what: an object for all other workers
From the owner of the engine's process:
    worker      a socket: the connection to a worker; id: what the owner calls that worker, if it does
    stop        abort what runs and exit
From the engine's process:
    ready       model: its name for clients; counted: metric families; it is loaded
    failed      why: the error that ends it
    beat        working: seconds that it has been busy with the same step; 0 if it waits for requests; counted: metric
                families; stats: the engine's numbers, and its rows
    adapters    changes: the adapters that clients have loaded and unloaded, which the next engine has to load too
    left        id: that of a worker whose connection is closed
"""

import base64
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from minillm.folders import import_path

log = logging.getLogger(__name__)
CHUNK = 1 << 16  # bytes per read
# By default, glibc raises this threshold when a large block is freed, and then returns less memory to the system. A
# fixed threshold keeps a worker from staying as large as its largest request bodies made it.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072"}
LAST_WORDS = 1  # seconds for a process whose control socket is closed to exit by itself


class Control:
    """One end of a control socket. pid: the process at the other end, which Windows needs to hand over a socket."""

    def __init__(self, sock: socket.socket, pid: int | None = None):
        self.sock, self.pid = sock, pid
        self._sending = threading.Lock()

    def send(self, message: dict, handed: socket.socket | None = None) -> bool:
        """Send a message, and with it a socket, which stays open here too. Returns False if the other end is gone."""
        files = []
        if handed is not None:
            shared = share(handed, self.pid)
            files = [shared] if isinstance(shared, int) else []
            message = message | {"socket": shared}
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._sending:
                if files:
                    sent = socket.send_fds(self.sock, [data], files)
                    data = data[sent:]
                self.sock.sendall(data)
        except OSError:
            return False
        return True

    def listen(self, on_message: Callable[[dict], None], on_close: Callable[[], None]) -> None:
        """Read messages in a thread until the other end is gone. `message["socket"]` is the socket that came along."""

        def read() -> None:
            held, files = b"", deque[int]()
            while data := self._read(files):
                *lines, held = (held + data).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    if "socket" in message:
                        message["socket"] = opened(files.popleft() if files else message["socket"])
                    _guarded(on_message, message)
            _guarded(on_close)

        threading.Thread(target=read, name="minillm-control", daemon=True).start()

    def _read(self, files: deque[int]) -> bytes:
        try:
            if sys.platform == "win32":
                return self.sock.recv(CHUNK)
            data, came, _, _ = socket.recv_fds(self.sock, CHUNK, 8)
        except OSError:
            return b""
        for file in came:
            os.set_inheritable(file, False)
        files.extend(came)
        return data

    def close(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)  # ends the reading thread, which may be in recv
        self.sock.close()


def _guarded(callback: Callable[..., None], *arguments: Any) -> None:
    """Call a callback and log its errors, which must not end the thread that reads."""
    try:
        callback(*arguments)
    except Exception:
        log.exception("could not act on what a process of the server reported")


class Child:
    """A process of the server that this one owns.

    module: what it runs, with `python -m`. arguments: JSON values for it. sockets: sockets for it, by name; they stay
    open here too. files: descriptors that it inherits under the same numbers. Raises OSError.
    """

    def __init__(
        self,
        module: str,
        arguments: dict[str, Any],
        sockets: dict[str, socket.socket] | None = None,
        files: Iterable[int] = (),
    ):
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                handed = {"control": theirs} | (sockets or {})
                self.process = subprocess.Popen(
                    # -P: no file in the current directory can shadow a module.
                    [sys.executable, "-P", "-m", module],
                    stdin=subprocess.PIPE,
                    env=GIVE_BACK | os.environ | {"PYTHONPATH": import_path()},
                    **_inherited([*(each.fileno() for each in handed.values()), *files]),
                )
                line = arguments | {name: share(each, self.process.pid) for name, each in handed.items()}
                stdin = self.process.stdin
                assert stdin is not None, "stdin is a pipe"
                with suppress(BrokenPipeError), stdin:  # it is already dead; the control socket will show it
                    stdin.write(json.dumps(line).encode() + b"\n")
        except BaseException:
            ours.close()
            raise
        self.control = Control(ours, self.process.pid)

    def reap(self) -> str:
        """Wait for the process, whose control socket is closed, and return how it exited."""
        try:
            status = self.process.wait(LAST_WORDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        self.control.close()
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

    def end(self, seconds: float) -> None:
        """Wait until it exits; kill it if it takes longer."""
        try:
            self.process.wait(max(0, seconds))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def arguments() -> dict[str, Any]:
    """Return what a child's owner has written for it, with its control socket opened."""
    line = json.loads(sys.stdin.readline())
    return line | {"control": Control(opened(line["control"]))}


def share(sock: socket.socket, pid: int | None) -> int | str:
    """Return what process `pid` needs to open this socket: an inherited file descriptor, or shared data on Windows."""
    if sys.platform == "win32":
        return base64.b64encode(sock.share(pid)).decode()
    return sock.fileno()


def opened(shared: int | str) -> socket.socket:
    if isinstance(shared, int):
        return socket.socket(fileno=shared)
    if sys.platform == "win32":
        return socket.fromshare(base64.b64decode(shared))
    raise ValueError(f"cannot open socket {shared!r}: only Windows shares sockets as data")


def _inherited(files: list[int]) -> dict[str, Any]:
    """Return Popen arguments that keep these files open in the child and shield it from the terminal's Ctrl-C."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"pass_fds": files, "process_group": 0}
