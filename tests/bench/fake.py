"""A server of completions for the load generator's tests: each test decides how it answers."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

VOCABULARY = 320


class Fake:
    """A fake server; each test decides how it answers completions."""

    card = {"id": "fake", "vocab_size": VOCABULARY}

    def __init__(self, complete):
        self.complete = complete  # async (fake, number of earlier requests, body) -> status
        self.bodies: list[dict] = []
        self.heads: list[str] = []
        self.at_work = self.most_at_work = 0
        self.changed: asyncio.Condition

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        self.heads.append(head)
        if head.startswith("get"):
            await self.answer(writer, 200, json.dumps({"data": [self.card]}))
            return
        length = int(next(line.split(":")[1] for line in head.splitlines() if line.startswith("content-length")))
        body = json.loads(await reader.readexactly(length))
        before = len(self.bodies)
        self.bodies.append(body)
        async with self.changed:
            self.at_work += 1
            self.most_at_work = max(self.most_at_work, self.at_work)
            self.changed.notify_all()
        status = await self.complete(self, before, body)
        self.at_work -= 1
        chunks = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in self.chunks(body))
        await self.answer(writer, status, f"{chunks}data: [DONE]\n\n")

    def chunks(self, body: dict) -> list[dict]:
        return [{"choices": [{"token_ids": [5] * body["max_tokens"]}]}]

    async def answer(self, writer: asyncio.StreamWriter, status: int, text: str) -> None:
        writer.write(f"HTTP/1.1 {status} -\r\nconnection: close\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode())
        await writer.drain()
        writer.close()


@contextmanager
def faked(complete, kind: type[Fake] = Fake) -> Iterator[tuple[str, Fake]]:
    fake, loop, ready = kind(complete), asyncio.new_event_loop(), threading.Event()

    async def listen() -> None:
        fake.changed = asyncio.Condition()
        listener = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
        fake.port = listener.sockets[0].getsockname()[1]
        fake.stop = asyncio.Event()
        ready.set()
        await fake.stop.wait()
        listener.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(listen(),), daemon=True)
    thread.start()
    ready.wait()
    try:
        yield f"http://127.0.0.1:{fake.port}", fake
    finally:
        loop.call_soon_threadsafe(fake.stop.set)
        thread.join()


async def at_once(fake: Fake, before: int, body: dict) -> int:
    return 200


def only_when_all_have_come(count: int):
    """A slow server that answers only the warm-up request until `count` requests are waiting."""

    async def complete(fake: Fake, before: int, body: dict) -> int:
        if before > 0:
            async with fake.changed:
                await fake.changed.wait_for(lambda: fake.most_at_work >= count)
        return 200

    return complete
