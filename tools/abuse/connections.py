"""Connections that are slow, too many, or gone."""

import asyncio
import contextlib
import random
import socket
import time

import psutil

from .clients import (
    MEGABYTE,
    Bystanders,
    answer,
    case,
    completion,
    cpu_seconds,
    head,
    post,
    serving,
)


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
        cpu, written = cpu_seconds(worker), server.error_bytes()
        await asyncio.sleep(seconds)
        cpu, written = cpu_seconds(worker) - cpu, server.error_bytes() - written
        stop.set()
        await asking
        for _, each in idle:
            each.close()
        await asyncio.sleep(1.5)
        again = 0
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(5):
                again, *_ = await post(server.port, *completion())
        failed = [each for each in health if isinstance(each, str)]
        worst = round(max((each for each in health if not isinstance(each, str)), default=0), 3)
        found = {"worker_cpu_share": round(cpu / seconds, 2), "stderr_bytes_per_s": round(written / seconds)}
        return found | {"health_worst_s": worst, "health_failed": failed, "after_they_left": again}


async def gauge(port: int, name: str) -> float:
    """The sum of a metric of /metrics."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head("/metrics", method="GET"))
    _, body = await answer(reader)
    writer.close()
    lines = (line for line in body.decode().splitlines() if line.startswith(name))
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def idle(port: int, seconds: float = 60) -> dict:
    """Wait until nothing runs or waits; what is left after so many seconds."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    start = time.perf_counter()
    while True:
        found = {name.removeprefix("vllm:"): await gauge(port, name) for name in names}
        took = time.perf_counter() - start
        if took > seconds or not any(found.values()):
            return found | {"idle_after_s": round(took, 2)}
        await asyncio.sleep(0.05)


@case
async def disconnects(count: int = 1000, at_once: int = 50, seed: int = 0) -> dict:
    """Clients that disconnect at random moments: before, in the middle of, and after their requests."""
    chance = random.Random(seed)
    endings = dict.fromkeys(("in the headers", "in the body", "while waiting", "while reading"), 0)
    async with serving() as server:
        before, left = server.memory(), iter(range(count))

        async def client() -> None:
            for _ in left:
                fields = {"max_tokens": chance.randint(1, 300), "ignore_eos": True, "n": chance.choice((1, 1, 1, 4))}
                path, body = completion(prompt="Once " * chance.randint(1, 60), stream=chance.random() < 0.7, **fields)
                data = head(path, len(body)) + body
                ending = chance.choice(list(endings))
                endings[ending] += 1
                if ending == "in the headers":
                    data = data[: chance.randint(1, 40)]
                elif ending == "in the body":
                    data = data[: -chance.randint(1, len(body) - 1)]
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(data)
                if ending == "while reading":
                    with contextlib.suppress(TimeoutError, OSError):
                        async with asyncio.timeout(20):
                            await reader.read(chance.randint(1, 4000))
                await asyncio.sleep(chance.random() * 0.1)
                if chance.random() < 0.5:
                    writer.transport.abort()
                else:
                    writer.close()

        start = time.perf_counter()
        async with Bystanders(server) as others:
            await asyncio.gather(*(client() for _ in range(at_once)))
        took = time.perf_counter() - start
        left_over = await idle(server.port)
        again, *_ = await post(server.port, *completion())
        return {
            "clients": count,
            "endings": endings,
            "took_s": round(took, 1),
            "left": left_over,
            "memory": {"before": before, "after": server.memory()},
            "answers_again": again,
            "tracebacks": server.tracebacks(),
        } | others.report()


@case
async def slow_readers(connections: int = 20, seconds: float = 180, rounds: int = 3) -> dict:
    """Clients that ask for long streams and never read: others must not wait, and later rounds need no more memory.

    They have `seconds` to be cut off, 5 of them after their stream has filled what the system holds for it.

    The cache is small, so that its memory, which is resident only once it is used, does not hide what others take.
    """
    async with serving("--num-blocks", "1000", "--write-timeout", "5") as server:
        memory, left, cut_off = [server.memory()], [], 0
        async with Bystanders(server) as others:
            for _ in range(rounds):
                before = open_connections(server)
                writers = [await unread(server.port) for _ in range(connections)]
                until = time.perf_counter() + seconds
                while open_connections(server) > before and time.perf_counter() < until:
                    await asyncio.sleep(0.2)
                left_open = max(0, open_connections(server) - before)  # one of the others may have ended meanwhile
                cut_off += connections - left_open
                for writer in writers:
                    writer.transport.abort()
                memory.append(server.memory())
        left = await idle(server.port)
        found = {"connections": connections, "rounds": rounds, "cut_off": cut_off, "left": left}
        return found | {"memory_after_each_round": memory} | others.report()


def open_connections(server) -> int:
    """Connections of clients that the workers hold."""
    found = [each for pid in server.workers() for each in psutil.Process(pid).net_connections("tcp")]
    return sum(each.status == psutil.CONN_ESTABLISHED for each in found)


async def unread(port: int) -> asyncio.StreamWriter:
    """A long stream that is not read. The client's system holds little of it, so that it soon waits in the server."""
    path, body = completion(stream=True, n=8, max_tokens=2000, ignore_eos=True, logprobs=20)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.setblocking(False)
    _, writer = await asyncio.open_connection(sock=client, limit=1)
    writer.transport.pause_reading()
    writer.write(head(path, len(body)) + body)
    return writer
