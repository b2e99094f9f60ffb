"""Give every HTTP request an id and a line in the log, and check its host, origin, and API key.  Lesson 99.

Each response has the header `x-request-id`: the client's own id, so that its logs and a proxy's can be joined, or a new
one. With a key, requests need `authorization: Bearer KEY`, as OpenAI's clients send it, or `x-api-key: KEY`; health and
metrics stay open, because what asks for them usually has no key. So do the files of the engine room's page, which asks
for the key.

A browser sends some requests of any web page to any server without asking the server first, and only then keeps the
answer from the page. So without a key, what could start work is refused if it comes from a page of another origin.
"""

import hashlib
import hmac
import ipaddress
import json
import re
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from minillm.errors import ConfigError
from minillm.values import QUOTED, shown

from ..access import CURRENT, Access
from ..engine_room.page import FILES
from .api_error import APIError

HEALTH = ("/health", "/ping", "/v1/health/live", "/v1/health/ready", "/v2/health/live", "/v2/health/ready")
OPEN = (*HEALTH, "/metrics", "/v1/metrics", *FILES)
LOCAL = ("localhost", "127.0.0.1", "[::1]")
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")  # printable ASCII without spaces
CLIENT, PATH = 128, 256  # characters of them that are kept
SAFE = ("GET", "HEAD", "OPTIONS")  # methods that start no work
READABLE = ("x-request-id", "retry-after", "inference-header-content-length")  # headers that a web page may read
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^][:/@\s]+)(:[0-9]*)?")
_ORIGIN = re.compile(r"null|[a-z][a-z0-9+.-]*://[^/@\s,]+")
_ADDRESS = re.compile(r"\[([0-9A-Fa-f:.]+)\](?::\d+)?|([\d.]+):\d+")  # with brackets or a port

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def refusal(error: APIError, path: str) -> Response:
    """Return an error as an HTTP response, in the form of the path's protocol: Triton's under /v2, or OpenAI's."""
    form = error.bare if path == "/v2" or path.startswith("/v2/") else error.body
    if (access := CURRENT.get()) is not None:
        access.error = error.code
    body = json.dumps(form)  # ASCII: a quoted value may contain a lone surrogate, which UTF-8 cannot encode
    return Response(body, error.status, error.headers, "application/json")


def hosts(allowed: str | None, address: str) -> frozenset[str] | None:
    """Return the hosts for which a server at `address` takes requests; None: any. allowed: `allowed_hosts`."""
    if allowed is not None:
        hosts_named = [name.strip() for name in allowed.split(",") if name.strip()]
        names = frozenset(_host(f"[{name}]" if name.count(":") > 1 > name.count("[") else name) for name in hosts_named)
        if not names:
            raise ConfigError("allowed_hosts has no name in it: name the hosts, or * for any")
        return None if "*" in names else names
    if not ipaddress.ip_address(address).is_loopback:
        return None
    return frozenset((*LOCAL, f"[{address}]" if ":" in address else address))


def origins(allowed: str | None) -> frozenset[str]:
    """Return the origins whose web pages may use the server, or *. Raises ConfigError. allowed: `cors_origins`."""
    names = [name.strip().lower().removesuffix("/") for name in (allowed or "").split(",") if name.strip()]
    for name in names:
        if name != "*" and not _ORIGIN.fullmatch(name):
            ways = "https://chat.example.com, http://localhost:3000, or * for any"
            raise ConfigError(f"cors_origins: {shown(name)} is not an origin: name it as {ways}")
    return frozenset("*" if name == "*" else _without_port(name, name) for name in names)


def _without_port(name: str, origin: str) -> str:
    """Return a host or an origin without the port, if that is the default port of a URL like `origin`."""
    return name.removesuffix({"http": ":80", "https": ":443"}.get(origin.partition("://")[0], ":"))


def _host(header: str) -> str:
    """Return a host as a Host header has it, without the port."""
    name = header.strip().lower()
    match = _HOST.fullmatch(name)
    return (match[1] if match else name).removesuffix(".")


def _client(values: list[bytes]) -> str:
    """Return the client that a proxy names in these header values; "" if none.

    It is the last one: a proxy either sets the header or appends to what the client itself may have sent. The port, if
    there is one, is another for each connection.
    """
    name = b",".join(values).rpartition(b",")[2].decode("latin-1").strip(' \t"')
    match = _ADDRESS.fullmatch(name)
    return (match[1] or match[2] if match else name)[:CLIENT]


class Gate:
    """Wraps an ASGI application.

    key: what `config.digest` returned. allowed: what `hosts` returned. client_header: the header in which a proxy names
    the client, if it is not the other end of the connection. pages: what `origins` returned.
    """

    def __init__(
        self,
        app: App,
        key: str | None,
        allowed: frozenset[str] | None = None,
        client_header: str | None = None,
        pages: frozenset[str] = frozenset(),
    ):
        self.app, self.key, self.allowed, self.pages = app, key, allowed, pages
        self._answer: App = self._unless_refused
        if pages:  # around refusals too, or else no page could read why; a preflight request has no key
            self._answer = CORSMiddleware(
                self._unless_refused,
                allow_origins=pages,
                allow_methods=(*SAFE, "POST"),
                allow_headers=("*",),
                expose_headers=READABLE,
                allow_private_network=True,
            )
        self.client_header = client_header.lower().encode("latin-1", "replace") if client_header else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])  # of repeated ones, the last
        sent = headers.get(b"x-request-id", b"")
        request_id = sent if REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex.encode()
        path, client = scope["path"], (scope.get("client") or ("",))[0]
        if self.client_header is not None:
            client = _client([value for name, value in scope["headers"] if name == self.client_header]) or client
        access = Access(request_id.decode(), client, scope.get("method", ""), path[:PATH])
        CURRENT.set(access)

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
                access.status = message["status"]
            await send(message)

        try:
            await self._answer(scope, receive, with_id)
        finally:
            if path not in OPEN or access.status != 200:
                access.write()

    async def _unless_refused(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        error = self._refuse(scope.get("method", ""), path, dict(scope["headers"]))
        await (self.app if error is None else refusal(error, path))(scope, receive, send)

    def _refuse(self, method: str, path: str, headers: dict[bytes, bytes]) -> APIError | None:
        """Return the reason for refusing this request, or None if it may pass."""
        host = _host(headers.get(b"host", b"").decode("latin-1"))
        if self.allowed is not None and path not in HEALTH and host not in self.allowed:
            message = f"this server takes no requests for host {host[:QUOTED]!r}"
            return APIError(
                f"{message}: start it with --allowed-hosts",
                status=421,
                code="host_not_allowed",
                headers={"connection": "close"},  # the body may not have been read
            )
        if self.key is None:
            return None if method in SAFE else self._refuse_page(headers)
        if path in OPEN or self._opens(headers):
            return None
        return APIError(
            "this server needs its API key: send the header 'authorization: Bearer KEY'",
            status=401,
            kind="authentication_error",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer", "connection": "close"},
        )

    def _refuse_page(self, headers: dict[bytes, bytes]) -> APIError | None:
        """Return the reason for refusing the web page that sent this request, or None if it may pass."""
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        host = headers.get(b"host", b"").decode("latin-1").strip().lower()
        own = origin.partition("://")[2] == _without_port(host, origin)
        if not origin or own or not self.pages.isdisjoint(("*", origin)):
            return None
        message = f"this server takes no requests from web pages of {origin[:QUOTED]!r}"
        return APIError(
            f"{message}: start it with --cors-origins",
            status=403,
            kind="permission_error",
            code="origin_not_allowed",
            headers={"connection": "close"},
        )

    def _opens(self, headers: dict[bytes, bytes]) -> bool:
        assert self.key is not None
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        keys = [key.strip()] if kind.lower() == b"bearer" else []
        keys += [headers[b"x-api-key"]] if b"x-api-key" in headers else []  # as Anthropic's clients send it
        return any(hmac.compare_digest(hashlib.sha256(each).hexdigest(), self.key) for each in keys)
