"""A server in a process of its own, clients that abuse it, and bystanders who should not notice."""

import asyncio
import contextlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVE = [sys.executable, "-m", "minillm.cli", "serve", "--port", "0", "--device", "cpu", "--log-level", "warning"]
STREAM = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}
MEGABYTE = 1 << 20
TIMEOUT = 200  # seconds to wait for a response
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


class Server:
    """`minillm serve` in its own process."""

    def __init__(self, *options: str, files: int | None = None, errors: str | None = None):
        self.errors = open(errors, "w+b", 0) if errors else tempfile.TemporaryFile()  # noqa: SIM115 (closed below)
        limit = (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))) if files else None
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*SERVE, *options], stdout=subprocess.PIPE, stderr=self.errors, text=True, env=environment, preexec_fn=limit
        )
        found = None
        while found is None:
            if not (line := self.process.stdout.readline()):
                raise RuntimeError("the server did not start")
            found = re.search(r":(\d+)/v1", line)
        self.port = int(found[1])

    def workers(self) -> list[int]:
        return self._children("minillm.server.worker.worker")

    def engine(self) -> int | None:
        return next(iter(self._children("minillm.server.engine_side.engine_process")), None)

    def _children(self, module: str) -> list[int]:
        """The process ids of the server's processes that run this module."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        found = {int(pid) for path in tasks for pid in path.read_text().split()}
        return sorted(pid for pid in found if _command(pid).endswith(module))

    def memory(self) -> dict[str, int]:
        """Resident memory, in MB."""
        workers = [_resident(pid) for pid in self.workers()]
        return {"engine_mb": _resident(self.engine() or 0), "worker_mb": max(workers, default=0)}

    def error_bytes(self) -> int:
        return os.fstat(self.errors.fileno()).st_size

    def tracebacks(self) -> int:
        self.errors.seek(0)
        return self.errors.read().count(b"Traceback (most recent call last)")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.errors.close()


@contextlib.asynccontextmanager
async def serving(*options: str, files: int | None = None, errors: str | None = None):
    server = await asyncio.to_thread(Server, *options, files=files, errors=errors)
    try:
        yield server
    finally:
        server.close()


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0")
    except OSError:  # it has ended
        return ""


def _resident(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * resource.getpagesize() // MEGABYTE


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def head(path: str, length: int | None = None, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
    lines += [] if length is None else [f"content-length: {length}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of a response with a Content-Length."""
    top = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", top)
    return int(top.split()[1]), await reader.readexactly(int(length[1])) if length else b""


async def post(port: int, path: str, content: bytes) -> tuple[int, bytes, float]:
    """Status, body and seconds of a response; status 0 if none came in time."""
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=64 * MEGABYTE)
    try:
        writer.write(head(path, len(content)) + content)
        async with asyncio.timeout(TIMEOUT):
            status, body = await answer(reader)
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        status, body = 0, b""
    finally:
        writer.transport.abort()
    return status, body, time.perf_counter() - start


class Bystanders:
    """A client that streams and one that polls /health, and the longest wait of each."""

    def __init__(self, server: Server):
        self.server, self.worst = server, {"stream_gap_s": 0.0, "health_s": 0.0}
        self.events, self.peak = dict.fromkeys(self.worst, 0), server.memory()

    def _waited(self, name: str, seconds: float) -> None:
        self.worst[name] = max(self.worst[name], seconds)
        self.events[name] += 1

    async def _stream(self) -> None:
        content = json.dumps(STREAM).encode()
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
            writer.write(head("/v1/completions", len(content)) + content)
            last = None
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    if last is not None:
                        self._waited("stream_gap_s", now - last)
                    last = now
                if line.startswith(b"data: [DONE]"):
                    break
            writer.close()

    async def _health(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        while True:
            start = time.perf_counter()
            writer.write(head("/health", method="GET"))
            await answer(reader)
            self._waited("health_s", time.perf_counter() - start)
            await asyncio.sleep(0.02)

    async def _memory(self) -> None:
        while True:
            now = self.server.memory()
            self.peak = {name: max(now[name], most) for name, most in self.peak.items()}
            await asyncio.sleep(0.1)

    async def __aenter__(self):
        self._tasks = [asyncio.create_task(work()) for work in (self._stream, self._health, self._memory)]
        while not all(self.events.values()):
            await asyncio.sleep(0.01)
        self.before = self.server.memory()
        self.worst = dict.fromkeys(self.worst, 0.0)
        self.peak = dict(self.before)
        return self

    async def __aexit__(self, *_):
        seen = dict(self.events)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60):  # let each client finish three more waits
                while any(self.events[name] < seen[name] + 3 for name in seen):
                    await asyncio.sleep(0.01)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def report(self) -> dict:
        after = self.server.memory()
        found = {name: round(seconds, 3) for name, seconds in self.worst.items()}
        for name in after:
            found[name] = {"before": self.before[name], "peak": self.peak[name], "after": after[name]}
        return found


# ---- requests


def completion(**fields) -> tuple[str, bytes]:
    return "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 1} | fields, separators=(",", ":")).encode()


def chat(messages) -> tuple[str, bytes]:
    return "/v1/chat/completions", json.dumps({"messages": messages}, separators=(",", ":")).encode()


def raw(content: str) -> tuple[str, bytes]:
    return "/v1/completions", content.encode()
