"""Measure how much abusive clients slow down a server's other clients; prints JSON. Linux only.

    python tools/abuse_server.py [--case bodies --case drain ...] [--json FILE] [-- OPTIONS OF minillm serve]

With `-- --attention-sinks 4 --attention-window 1024`, prompts and bodies may be as large as the server accepts.

During each attack, one client streams tokens and another polls /health. The results are their longest waits and the
memory of the server's processes before, at its peak, and after.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVE = [sys.executable, "-m", "minillm.cli", "serve", "--port", "0", "--device", "cpu", "--log-level", "warning"]
STREAM = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}
MEGABYTE = 1 << 20
TIMEOUT = 200  # seconds to wait for a response
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


# ---- a server and its clients


class Server:
    """`minillm serve` in its own process."""

    def __init__(self, *options: str, files: int | None = None):
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the server)
        limit = (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))) if files else None
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*SERVE, *options], stdout=subprocess.PIPE, stderr=self.errors, text=True, env=environment, preexec_fn=limit
        )
        line = self.process.stdout.readline()
        self.port = int(re.search(r":(\d+)/v1", line)[1])

    def workers(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        found = {int(pid) for path in [children, *tasks] for pid in path.read_text().split()}
        return sorted(found)

    def memory(self) -> dict[str, int]:
        """Resident memory, in MB."""
        workers = [_resident(pid) for pid in self.workers()]
        return {"engine_mb": _resident(self.process.pid), "worker_mb": max(workers, default=0)}

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
async def serving(*options: str, files: int | None = None):
    server = await asyncio.to_thread(Server, *options, files=files)
    try:
        yield server
    finally:
        server.close()


def _resident(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * resource.getpagesize() // MEGABYTE


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def head(path: str, length: int | None = None, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: here", "content-type: application/json"]
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


# ---- the cases


def _completion(**fields) -> tuple[str, bytes]:
    return "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 1} | fields, separators=(",", ":")).encode()


def _chat(messages) -> tuple[str, bytes]:
    return "/v1/chat/completions", json.dumps({"messages": messages}, separators=(",", ":")).encode()


def _raw(content: str) -> tuple[str, bytes]:
    return "/v1/completions", content.encode()


BODIES = {
    "alone": lambda: _completion(),
    "stop, 8 million ones, 16 MB": lambda: _completion(stop=[1] * 8_000_000),
    "stop, 1 MB": lambda: _completion(stop=[1] * 500_000),
    "2,000 messages of 2,000 ones, 8 MB": lambda: _chat([{"role": "user", "content": [1] * 2000}] * 2000),
    "a million unknown fields, 15 MB": lambda: _completion(**{f"x{i}": 1 for i in range(1_100_000)}),
    "unknown fields, 1 MB": lambda: _completion(**{f"x{i}": 1 for i in range(90_000)}),
    "logit_bias, 1 MB": lambda: _completion(logit_bias={str(i): "x" for i in range(90_000)}),
    "stop_token_ids, 1 MB": lambda: _completion(stop_token_ids=["x"] * 250_000),
    "prompt of empty lists, 15 MB": lambda: _completion(prompt=[[]] * 5_000_000),
    "prompt of empty lists, 2 MB": lambda: _completion(prompt=[[]] * 650_000),
    "prompt of ones, 2 MB": lambda: _completion(prompt=[1] * 1_000_000),
    "spaces, 15 MB": lambda: _raw(" " * (15 * MEGABYTE)),
    "spaces, 2 MB": lambda: _raw(" " * (2 * MEGABYTE)),
    "escapes, 2 MB": lambda: _raw('{"prompt":"' + '\\"' * MEGABYTE + '"}'),
    "a text, 200 kB": lambda: _completion(prompt="word " * 40_000),
    "a field's name, 60 kB": lambda: _completion(**{"x" * 60_000: 1}),
    "n=128 with 50,000 biases, 0.5 MB": lambda: _completion(n=128, logit_bias={str(i): 1 for i in range(50_000)}),
    "n=128 with 1,024 biases": lambda: _completion(n=128, logit_bias={str(i): 1 for i in range(3072, 4096)}),
    "2,048 choices with 1,024 biases of unknown tokens": lambda: _completion(
        prompt=["a"] * 10, n=128, logit_bias={str(i): 1 for i in range(4096, 5120)}
    ),
}


@case
async def bodies() -> dict:
    """Malformed and heavy bodies, one at a time."""
    found = {}
    for name, make in BODIES.items():
        async with serving() as server:
            path, content = make()
            async with Bystanders(server) as others:
                status, body, seconds = await post(server.port, path, content)
            found[name] = {"status": status, "seconds": round(seconds, 3), "answer_bytes": len(body)} | others.report()
        print(f"{name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)
    return found


@case
async def chunks() -> dict:
    """2 MB in one-byte chunks."""
    async with serving() as server, Bystanders(server) as others:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        start = time.perf_counter()
        writer.write(head("/v1/completions")[:-2] + b"transfer-encoding: chunked\r\n\r\n")
        writer.write(b"1\r\n \r\n" * (2 * MEGABYTE // 6) + b"0\r\n\r\n")
        status, _ = await answer(reader)
        return {"status": status, "seconds": round(time.perf_counter() - start, 3)} | others.report()


@case
async def slow_headers(connections: int = 200, seconds: float = 15) -> dict:
    """Connections that send half their headers or nothing: how many stay open."""
    async with serving() as server:
        half = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(connections // 2)]
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(connections // 2)]
        for _, writer in half:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: h")
        await asyncio.sleep(seconds)
        answered = left = 0
        for reader, _ in half + silent:
            try:
                async with asyncio.timeout(0.01):
                    answered += (await reader.read()).startswith(b"HTTP/1.1 408")
            except TimeoutError:
                left += 1
        return {"connections": connections, "left": left, "answered_408": answered, "after_s": seconds}


@case
async def unfinished_bodies(connections: int = 40, seconds: float = 75) -> dict:
    """Bodies of the largest allowed size, without their last three bytes."""
    async with serving() as server:
        before, statuses = server.memory(), []
        size = 16 * MEGABYTE - 100_000
        while True:
            status, *_ = await post(server.port, "/v1/completions", b" " * size)
            if status != 413:
                break
            size = size * 3 // 4
        start = time.perf_counter()

        async def one() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(head("/v1/completions", size) + b" " * (size - 3))
            with contextlib.suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
                async with asyncio.timeout(seconds):
                    statuses.append((await answer(reader))[0])
            writer.transport.abort()

        tasks = [asyncio.create_task(one()) for _ in range(connections)]
        peak = before["worker_mb"]
        while not all(task.done() for task in tasks):
            peak = max(peak, server.memory()["worker_mb"])
            await asyncio.sleep(0.2)
        await asyncio.sleep(2)
        after = server.memory()["worker_mb"]
        answered = {status: statuses.count(status) for status in sorted(set(statuses))}
        found = {"connections": connections, "bytes_each": size, "statuses": answered}
        found["worker_mb"] = {"before": before["worker_mb"], "peak": peak, "after": after}
        return found | {"took_s": round(time.perf_counter() - start, 1)}


@case
async def descriptors(files: int = 128, connections: int = 140, seconds: float = 4) -> dict:
    """More idle connections than the worker has file descriptors."""
    async with serving(files=files) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        (worker,) = server.workers()
        stop, health = asyncio.Event(), []

        async def ask() -> None:
            while not stop.is_set():
                start = time.perf_counter()
                writer.write(head("/health", method="GET"))
                try:
                    async with asyncio.timeout(5):
                        await answer(reader)
                except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
                    health.append(f"{type(error).__name__} after {time.perf_counter() - start:.1f} s")
                    return
                health.append(time.perf_counter() - start)
                await asyncio.sleep(0.05)

        asking = asyncio.create_task(ask())
        await asyncio.sleep(0.3)
        idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(connections)]
        cpu, written = _cpu_seconds(worker), server.error_bytes()
        await asyncio.sleep(seconds)
        cpu, written = _cpu_seconds(worker) - cpu, server.error_bytes() - written
        stop.set()
        await asking
        for _, each in idle:
            each.close()
        await asyncio.sleep(1.5)
        again = 0
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(5):
                again, *_ = await post(server.port, *_completion())
        failed = [each for each in health if isinstance(each, str)]
        worst = round(max((each for each in health if not isinstance(each, str)), default=0), 3)
        found = {"worker_cpu_share": round(cpu / seconds, 2), "stderr_bytes_per_s": round(written / seconds)}
        return found | {"health_worst_s": worst, "health_failed": failed, "after_they_left": again}


@case
async def drain(streams: int = 8) -> dict:
    """SIGTERM while streams and other requests outlast the grace period, with new connections in between."""
    return {"one SIGTERM": await _drain(streams, 1), "two SIGTERMs": await _drain(streams, 2)}


async def _drain(streams: int, signals: int) -> dict:
    async with serving("--load-format", "dummy") as server:
        texts: list[bytes] = []

        async def one(stream: bool) -> None:
            path, content = _completion(max_tokens=2000, ignore_eos=True, stream=stream, n=16)
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(head(path, len(content)) + content)
            text = b""
            with contextlib.suppress(OSError):
                while piece := await reader.read(1 << 16):
                    text += piece
            texts.append(text)
            writer.close()

        tasks = [asyncio.create_task(one(i % 2 == 0)) for i in range(2 * streams)]
        await asyncio.sleep(2)
        start = time.perf_counter()
        server.process.terminate()
        await asyncio.sleep(0.5)
        late = asyncio.create_task(_refusal(server.port))
        if signals > 1:
            await asyncio.sleep(0.5)
            server.process.terminate()
        await asyncio.gather(*tasks)
        await asyncio.to_thread(server.process.wait)
        took = time.perf_counter() - start
        streamed = [text for text in texts if b"text/event-stream" in text]
        others = [text for text in texts if b"text/event-stream" not in text]
        statuses = [text.split(b" ", 2)[1].decode() if text else "none" for text in others]
        return {
            "took_s": round(took, 2),
            "new_connection": await late,
            "streams": len(streamed),
            "with_error_event": sum(b'data: {"error"' in text for text in streamed),
            "with_done": sum(b"data: [DONE]" in text for text in streamed),
            "framed_to_the_end": sum(text.endswith(b"\r\n0\r\n\r\n") for text in streamed),
            "not_streamed": {each: statuses.count(each) for each in sorted(set(statuses))},
            "in_openais_form": sum(b'{"error"' in text for text in others),
            "tracebacks": server.tracebacks(),
            "stderr_bytes": server.error_bytes(),
        }


async def _refusal(port: int) -> dict:
    """How and when a connection opened after SIGTERM ends."""
    began = time.perf_counter()
    try:
        status, *_ = await asyncio.wait_for(post(port, *_completion()), 20)
    except (OSError, TimeoutError) as error:
        status = type(error).__name__
    return {"answer": status, "after_s": round(time.perf_counter() - began, 3)}


@case
async def killed_while_starting(seconds: float = 20) -> dict:
    """Kill the only worker, then its replacement as soon as it starts."""
    async with serving() as server:
        (first,) = server.workers()
        os.kill(first, signal.SIGKILL)
        deadline = time.perf_counter() + seconds
        second = None
        while second is None and time.perf_counter() < deadline:
            second = next((pid for pid in server.workers() if pid != first), None)
            await asyncio.sleep(0.001)
        os.kill(second, signal.SIGKILL)
        status, ended = 0, None
        while not status and ended is None and time.perf_counter() < deadline:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(1):
                    status, *_ = await post(server.port, *_completion())
            ended = server.process.poll()
            await asyncio.sleep(0.1)
        return {"answers_again": status, "server_ended_with": ended}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("serve", nargs="*", help="options of minillm serve")
    arguments = parser.parse_args()
    SERVE.extend(arguments.serve)
    found = {name: asyncio.run(CASES[name]()) for name in arguments.case or CASES}
    text = json.dumps(found, indent=1)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
