"""Signals, and processes that die."""

import asyncio
import contextlib
import os
import signal
import socket
import time

from .clients import (
    case,
    completion,
    head,
    post,
    serving,
)


@case
async def drain(streams: int = 8) -> dict:
    """SIGTERM while streams and other requests outlast the grace period, with new connections in between."""
    return {"one SIGTERM": await _drain(streams, 1), "two SIGTERMs": await _drain(streams, 2)}


async def _drain(streams: int, signals: int) -> dict:
    async with serving("--load-format", "dummy") as server:
        texts: list[bytes] = []

        async def one(stream: bool) -> None:
            path, content = completion(max_tokens=2000, ignore_eos=True, stream=stream, n=16)
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
        status, *_ = await asyncio.wait_for(post(port, *completion()), 20)
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
                    status, *_ = await post(server.port, *completion())
            ended = server.process.poll()
            await asyncio.sleep(0.1)
        return {"answers_again": status, "server_ended_with": ended}


async def streamed(port: int, text: bytearray, **fields) -> None:
    """Read a stream to its end, whatever ends it."""
    path, content = completion(stream=True, ignore_eos=True, **fields)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head(path, len(content)) + content)
    with contextlib.suppress(OSError):
        while piece := await reader.read(1 << 16):
            text += piece
    writer.close()


@case
async def worker_killed(streams: int = 16) -> dict:
    """kill -9 of one of two workers during streams: only its own connections end, and it is replaced."""
    async with serving("--workers", "2") as server:
        texts = [bytearray() for _ in range(streams)]
        tasks = [asyncio.create_task(streamed(server.port, text, max_tokens=400)) for text in texts]
        while not all(texts):
            await asyncio.sleep(0.01)
        before = server.workers()
        os.kill(before[0], signal.SIGKILL)
        start, replaced = time.perf_counter(), None
        while replaced is None and time.perf_counter() - start < 30:
            await asyncio.sleep(0.05)
            now = server.workers()
            if len(now) == 2 and before[0] not in now:
                replaced = time.perf_counter() - start
        await asyncio.gather(*tasks)
        statuses = [(await post(server.port, *completion()))[0] for _ in range(20)]
        return {
            "streams": streams,
            "whole": sum(b"data: [DONE]" in text for text in texts),
            "cut": sum(b"data: [DONE]" not in text for text in texts),
            "replaced_after_s": None if replaced is None else round(replaced, 2),
            "then": {str(status): statuses.count(status) for status in sorted(set(statuses))},
        }


async def _engine_ended(sign: int, streams: int) -> dict:
    async with serving("--workers", "2", "--hang-timeout", "5") as server:
        texts = [bytearray() for _ in range(streams)]
        tasks = [asyncio.create_task(streamed(server.port, text, max_tokens=2000)) for text in texts]
        while not all(texts):
            await asyncio.sleep(0.01)
        workers, first = server.workers(), server.engine()
        os.kill(first, sign)
        start, ready, down = time.perf_counter(), None, 0
        while ready is None and time.perf_counter() - start < 60:
            await asyncio.sleep(0.02)
            status, *_ = await post(server.port, *completion())
            down += status == 503
            if status == 200:
                ready = round(time.perf_counter() - start, 2)
        await asyncio.gather(*tasks)
        return {
            "streams": streams,
            "with_error_event": sum(b'"code": "engine_restarting"' in text for text in texts),
            "with_done": sum(b"data: [DONE]" in text for text in texts),
            "refused_while_down": down,
            "answers_again_after_s": ready,
            "same_workers": server.workers() == workers,
            "new_engine": server.engine() not in (None, first),
            "tracebacks": server.tracebacks(),
        }


@case
async def engine_killed(streams: int = 8) -> dict:
    """kill -9 of the engine's process during streams: they end with an error, and another engine takes over."""
    return await _engine_ended(signal.SIGKILL, streams)


@case
async def engine_hung(streams: int = 8) -> dict:
    """The engine's process stops working during streams, with --hang-timeout 5: it is killed and replaced."""
    return await _engine_ended(signal.SIGSTOP, streams)


@case
async def server_killed(streams: int = 8) -> dict:
    """kill -9 of `minillm serve` during streams: no process stays, and the port is free."""
    async with serving("--workers", "2") as server:
        texts = [bytearray() for _ in range(streams)]
        tasks = [asyncio.create_task(streamed(server.port, text, max_tokens=2000)) for text in texts]
        while not all(texts):
            await asyncio.sleep(0.01)
        processes = [*server.workers(), server.engine()]
        server.process.kill()
        start = time.perf_counter()
        while any(os.path.exists(f"/proc/{pid}") for pid in processes) and time.perf_counter() - start < 30:
            await asyncio.sleep(0.02)
        gone = time.perf_counter() - start
        await asyncio.gather(*tasks)
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.closing(listener):
            try:
                listener.bind(("127.0.0.1", server.port))
                listener.listen()
                port = "free"
            except OSError as error:
                port = str(error)
        left = sum(os.path.exists(f"/proc/{pid}") for pid in processes)
        return {"streams": streams, "processes_left": left, "processes_gone_after_s": round(gone, 2), "port": port}


@case
async def full_disk(requests: int = 20) -> dict:
    """A trace and logs on a full disk: requests are answered all the same."""
    async with serving("--trace", "/dev/full", "--log-level", "info", errors="/dev/full") as server:
        statuses = [(await post(server.port, *completion(max_tokens=30)))[0] for _ in range(requests)]
        server.process.terminate()
        ended = await asyncio.to_thread(server.process.wait, 30)
        found = {str(status): statuses.count(status) for status in sorted(set(statuses))}
        return {"requests": requests, "statuses": found, "exit_status": ended}
