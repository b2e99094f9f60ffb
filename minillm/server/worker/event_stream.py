"""Send the engine's deltas as server-sent events, and abort the work when a client disconnects.  Lesson 99."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minillm.errors import MinillmError

from ..access import CURRENT
from .api_error import APIError
from .protocol import as_api_error

DIRECT = "minillm.direct_body"  # an ASGI extension: its "write" takes a piece of the body, and is faster than `send`


class ClientGone(MinillmError):
    """The client disconnected; its work has been aborted."""


Result = TypeVar("Result")


async def unless_disconnected(receive: Receive, work: Awaitable[Result]) -> Result:
    """Await `work`; if the client disconnects first, cancel it and raise ClientGone."""

    async def hang_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    worked, left = asyncio.ensure_future(work), asyncio.ensure_future(hang_up())
    tasks: list[asyncio.Future] = [worked, left]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if worked.done():
            return worked.result()
        raise ClientGone
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events from a generator of chunks as JSON, followed by `[DONE]`, as OpenAI's clients expect.

    source: the generator of deltas that `chunks` reads. It is already running and must be closed here: if `chunks`
    never starts, closing it does not close `source`.
    """

    media_type = "text/event-stream"
    end = b"data: [DONE]\n\n"

    def __init__(self, chunks: AsyncGenerator[str], source: AsyncGenerator):
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self.chunks, self.source = chunks, source

    def error_form(self, error: APIError) -> dict:
        return error.body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def through_asgi(body: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        async def write() -> None:
            emit = scope.get("extensions", {}).get(DIRECT, {}).get("write", through_asgi)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for chunk in self.chunks:
                    await emit(f"data: {chunk}\n\n".encode())
            except Exception as error:  # the status line has been sent: report the error as an event
                reported = as_api_error(error)
                if (access := CURRENT.get()) is not None:
                    access.error, access.failed = reported.code, reported.status
                await emit(f"data: {json.dumps(self.error_form(reported))}\n\n".encode())
            await through_asgi(self.end, more=False)

        try:
            await unless_disconnected(receive, write())
        except ClientGone:
            pass
        finally:
            await self.chunks.aclose()
            await self.source.aclose()


class BareStream(EventStream):
    """Server-sent events as Triton sends them: the connection's end is theirs, and errors have Triton's form."""

    end = b""

    def error_form(self, error: APIError) -> dict:
        return error.bare
