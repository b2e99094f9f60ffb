"""Parse HTTP/1.1 with h11, and check what RFC 9112 asks of a server beyond it.  Lesson 99.

Where a message ends must never be a matter of opinion: a proxy that sees another end than the server lets one client
put requests into another one's connection (request smuggling). What could be read in two ways is refused.
"""

import re
from typing import Any

import h11

from ..limits import MAX_HEAD
from .api_error import APIError

_ABSOLUTE = re.compile(rb"https?://([^/?#@\s]+)(/[^#]*|\?[^#]*|)", re.IGNORECASE)
_INVALID = "what the client sent is not valid HTTP"


class Parser(h11.Connection):
    """Parses the requests of one connection."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD)
        self.refusal = APIError(_INVALID, code="invalid_http")  # why the latest request is refused
        self.method: bytes | None = None  # the latest request's, None until its headers are complete

    def next_event(self) -> Any:
        """Return h11's next event, with the target of each request as a path. Raises h11.RemoteProtocolError."""
        if in_head := self.their_state is h11.IDLE:
            self.method = None
        try:
            event = super().next_event()
            if not isinstance(event, h11.Request):
                return event
            self.method = event.method
            return _as_path(_framed(event))
        except _Refused as error:
            self.refusal = APIError(f"{_INVALID}: {error}", code="invalid_http")
            raise
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == 431 and in_head:
                message = f"the headers exceed the limit of {MAX_HEAD:,} bytes: shorten them"
                self.refusal = APIError(message, status=431, code="headers_too_large")
            elif error.error_status_hint == 501:
                message = "transfer-encoding must be chunked, and nothing else"
                self.refusal = APIError(message, status=501, code="unsupported_transfer_encoding")
            raise


class _Refused(h11.RemoteProtocolError):
    """A request that h11 takes, and this server does not."""


def _framed(request: h11.Request) -> h11.Request:
    """Return a request whose end is certain (RFC 9112, section 6.1). Raises _Refused."""
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" in names:
        if b"content-length" in names:
            raise _Refused("it has both content-length and transfer-encoding: send one of them")
        if request.http_version < b"1.1":
            raise _Refused("HTTP/1.0 has no transfer-encoding: send content-length")
    return request


def _as_path(request: h11.Request) -> h11.Request:
    """Return a request for a path, whichever form its target has (RFC 9112, section 3.2). Raises _Refused.

    A target with a host in it, as clients of proxies send it, overrides the Host header.
    """
    target = request.target
    if target.startswith(b"/") or (target == b"*" and request.method == b"OPTIONS"):
        return request
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None:
        raise _Refused("the target of a request must be a path, or http://HOST/PATH")
    host, path = absolute.groups()
    others = [(name, value) for name, value in request.headers.raw_items() if name.lower() != b"host"]
    return h11.Request(
        method=request.method,
        target=path if path.startswith(b"/") else b"/" + path,
        headers=[(b"Host", host), *others],
        http_version=request.http_version,
    )
