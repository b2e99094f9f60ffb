"""What every HTTP request passes first: its id, and the API key if the server has one.  Lesson 99.

Each response has the header `x-request-id`: the client's own id, so that its logs and a proxy's can be joined, or a new
one. With a key, requests need `authorization: Bearer KEY`, as OpenAI's clients send it; health and metrics stay open,
because what asks for them usually has no key. So do the files of the engine room's page, which asks for the key.
"""

import hashlib
import hmac
import json
import re
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import Response

from minillm.errors import ConfigError
from minillm.values import shown

from .engine_room.page import FILES
from .protocol import APIError

OPEN = (
    "/health",
    "/metrics",
    "/v1/health/live",
    "/v1/health/ready",
    "/v1/metrics",
    "/v2/health/live",
    "/v2/health/ready",
    *FILES,
)
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")  # printable ASCII without spaces
KEY = re.compile(r"[\x21-\x7e]{8,512}")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def refusal(error: APIError, path: str) -> Response:
    """An error as an HTTP response, in the form of the request path's protocol: Triton's under /v2, or OpenAI's."""
    form = error.bare if path == "/v2" or path.startswith("/v2/") else error.body
    body = json.dumps(form)  # ASCII: a quoted value may contain a lone surrogate, which UTF-8 cannot encode
    return Response(body, error.status, error.headers, "application/json")


def digest(key: str | None) -> str | None:
    """What workers know of the key. Raises ConfigError for one that clients could not send, or too short to be safe."""
    if key is None:
        return None
    if not isinstance(key, str) or not KEY.fullmatch(key):
        length = f" of {len(key)} characters" if isinstance(key, str) else f", {shown(key)}"
        raise ConfigError(f"api_key must be 8 to 512 printable ASCII characters without spaces, not one{length}")
    return hashlib.sha256(key.encode()).hexdigest()


class Gate:
    """Wraps an ASGI application. key: what `digest` returned."""

    def __init__(self, app: App, key: str | None):
        self.app, self.key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])  # of repeated ones, the last
        given = headers.get(b"x-request-id", b"")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        if self.key is None or scope["path"] in OPEN or self._opens(headers.get(b"authorization", b"")):
            return await self.app(scope, receive, with_id)
        error = APIError(
            "this server needs its API key: send the header 'authorization: Bearer KEY'",
            status=401,
            kind="authentication_error",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer", "connection": "close"},  # the body may not have been read
        )
        await refusal(error, scope["path"])(scope, receive, with_id)

    def _opens(self, authorization: bytes) -> bool:
        assert self.key is not None
        kind, _, key = authorization.partition(b" ")
        found = hashlib.sha256(key.strip()).hexdigest()
        return kind.lower() == b"bearer" and hmac.compare_digest(found, self.key)
