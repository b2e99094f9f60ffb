"""From the engine's deltas to an HTTP answer, and from a client's hanging up to an abort.  Lesson 99."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

from starlette.responses import Response

from minillm.request import Completion, Delta, InvalidRequest, SamplingParams

from .protocol import APIError, Prompt, invalid

Job = tuple[Prompt, SamplingParams]


class ClientGone(Exception):
    """The client hung up; whatever ran for it has been aborted."""


async def deltas(engine, jobs: list[Job]) -> AsyncIterator[tuple[int, Delta]]:
    """(index of the job, what it gained), as they come; leaving early ends those that run still."""
    if len(jobs) == 1:  # no second queue between the engine and a lone request
        async with aclosing(engine.stream(*jobs[0])) as stream:
            async for delta in stream:
                yield 0, delta
        return
    running = set(range(len(jobs)))
    arrived: asyncio.Queue = asyncio.Queue()

    async def forward(index: int, prompt: Prompt, params: SamplingParams) -> None:
        try:
            async with aclosing(engine.stream(prompt, params)) as stream:
                async for delta in stream:
                    arrived.put_nowait((index, delta))
            arrived.put_nowait((index, None))
        except Exception as error:
            arrived.put_nowait((index, error))

    tasks = [asyncio.create_task(forward(index, *job)) for index, job in enumerate(jobs)]
    try:
        while running:
            index, item = await arrived.get()
            if isinstance(item, Delta):
                yield index, item
                continue
            running.remove(index)
            if item is not None:
                raise item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def finish(engine, jobs: list[Job]) -> list[Completion]:
    """The whole result of every job, in order."""
    results: list[Completion | None] = [None] * len(jobs)
    async with aclosing(deltas(engine, jobs)) as stream:
        async for index, delta in stream:
            results[index] = delta.completion or results[index]
    return results


async def unless_disconnected(receive: Callable[[], Awaitable[dict]], work: Awaitable):
    """Await `work`; if the client hangs up first, cancel it and raise ClientGone."""

    async def hang_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(hang_up())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        raise ClientGone
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events from an iterator of chunks, ended by `[DONE]` as OpenAI's clients expect."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[dict]):
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self.chunks = chunks

    async def __call__(self, scope, receive, send) -> None:
        async def emit(data: str, more: bool = True) -> None:
            body = f"data: {data}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": more})

        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for chunk in self.chunks:
                    await emit(json.dumps(chunk, ensure_ascii=False, separators=(",", ":")))
            except Exception as error:  # the status line is out: what went wrong travels as an event
                await emit(json.dumps(as_api_error(error).body))
            await emit("[DONE]", more=False)

        try:
            await unless_disconnected(receive, write())
        except ClientGone:
            pass
        finally:
            await self.chunks.aclose()


def as_api_error(error: Exception) -> APIError:
    if isinstance(error, APIError):
        return error
    if isinstance(error, InvalidRequest):
        return invalid(error)
    return APIError(f"the engine failed: {error}", status=500, kind="server_error", code="engine_error")
