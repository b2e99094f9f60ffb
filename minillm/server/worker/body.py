"""Read a request body within size and time limits, decode it, and validate it.  Lesson 99."""

import asyncio
import json
import re
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from minillm.values import shown

from .. import limits
from .api_error import APIError, malformed, unknown_field
from .bounded_json import BoundedDecoder, TooDeep, TooManyValues, UnknownMember
from .event_stream import ClientGone
from .link import Busy
from .protocol import NO_OBJECT, Body

Form = TypeVar("Form", bound=Body)
_CHARSET = re.compile(r";\s*charset=[\"']?([^\s;\"']*)", re.IGNORECASE)
_UNICODE = re.compile(r"utf-?8|(utf-?16|utf-?32)([bl]e)?|(us-)?ascii", re.IGNORECASE)
JSON_LENGTH = "inference-header-content-length"  # Triton's header: bytes of JSON, if binary tensors follow it


def takes(form: type[Body]) -> dict:
    """Return the OpenAPI description of a request body, whose schema `description.describe` adds."""
    schema = {"$ref": f"#/components/schemas/{form.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


class BodyReader:
    """Reads the request bodies of one worker.

    max_request_len: most tokens in prompt and output together; timeout: seconds for the whole body to arrive.
    embeddings: whether prompts may be embeddings, which have more bytes than tokens.
    """

    def __init__(self, max_request_len: int, timeout: float, embeddings: bool = False):
        self.max_body, self.max_tokens = limits.max_body(max_request_len), limits.max_tokens(max_request_len)
        if embeddings:
            self.max_body = limits.MAX_BODY
        self.timeout = timeout
        self.held = 0  # bytes of bodies not decoded yet, without the first FREE_BODY of each
        self._turn = asyncio.Semaphore(1)  # one large body at a time: decoded, it takes more memory than its bytes

    async def read(self, request: Request, form: type[Form]) -> Form:
        """Read the body as a `form`. Raises APIError; ClientGone if the client disconnects before the end."""
        _check_encoding(request)
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        json_kind = kind == "application/json" or kind.startswith("application/") and kind.endswith("+json")
        if not (json_kind or form.any_type):
            raise APIError(NO_OBJECT)
        length = _json_length(request, form)
        if int(request.headers.get("content-length", 0)) > self.max_body:
            raise self._too_large()
        data = bytearray()
        try:
            await self._receive(request, data)
            if len(data) <= limits.FREE_BODY:
                return self.parse(data, form, length)
            async with self._turn:  # on the event loop, decoding would delay all other streams
                return await asyncio.to_thread(self.parse, data, form, length)
        finally:
            self.held -= _counted(len(data))
            data.clear()  # a traceback may keep the buffer alive

    async def _receive(self, request: Request, data: bytearray) -> None:
        """Append the body to `data`, and add what it holds to `held`."""
        try:
            async with asyncio.timeout(self.timeout):
                async for chunk in request.stream():
                    size = len(data) + len(chunk)
                    if size > self.max_body:
                        raise self._too_large()
                    more = _counted(size) - _counted(len(data))
                    if self.held + more > limits.MAX_HELD:
                        raise Busy(f"the server holds {self.held:,} bytes of large request bodies: try again soon")
                    self.held += more
                    data += chunk
        except ClientDisconnect:
            raise ClientGone from None
        except TimeoutError:
            way_out = "send it faster, or split it into several requests"
            message = f"the body did not arrive within {self.timeout:g} s: {way_out}"
            raise APIError(message, status=408, code="request_timeout", headers={"connection": "close"}) from None

    def _too_large(self) -> APIError:
        message = f"the body exceeds the limit of {self.max_body:,} bytes: split it into several requests"
        return APIError(message, status=413, code="request_too_large")

    def parse(self, data: bytes | bytearray, form: type[Form], length: int | None = None) -> Form:
        """Decode and validate a body, at bounded cost. Raises APIError for the first error.

        length: bytes of JSON, if others follow it.
        """
        if length is not None and length > len(data):
            raise APIError(f"{JSON_LENGTH} is {length:,}, but the body has {len(data):,} bytes")
        content = self._decode(data if length is None else data[:length], form)
        if not isinstance(content, dict):
            raise APIError(NO_OBJECT)
        try:
            body = form.model_validate(content)
        except ValidationError as error:
            raise malformed(error.errors(include_url=False, include_input=False)) from None
        if length is not None:
            body._binary = bytes(data[length:])
        return body

    def _decode(self, data: bytes | bytearray, form: type[Form]) -> object:
        try:
            text = data.decode(json.detect_encoding(data), "surrogatepass")
            values, depth = limits.MAX_VALUES, limits.MAX_DEPTH
            decoder = BoundedDecoder(
                text, values=values, numbers=self.max_tokens, depth=depth, members=form.known_fields()
            )
            return decoder.decode()
        except UnknownMember as error:
            raise unknown_field(error.name) from None
        except TooManyValues as error:
            form.check_supported(error.name)
            most = f"{values:,} JSON values or {self.max_tokens:,} numbers"
            message = f"{error.name or 'the body'} exceeds the limit of {most}: split it into several requests"
            raise APIError(message, param=error.name) from None
        except json.JSONDecodeError as error:
            reason = f"{error.msg} at character {error.pos}"
        except UnicodeDecodeError as error:
            reason = f"byte {error.start} is not {error.encoding.upper()}"
        except (RecursionError, TooDeep):
            reason = "it is nested too deeply"
        except ValueError:  # Python limits the digits of an integer
            reason = "a number in it has too many digits"
        raise APIError(f"the body is not valid JSON: {reason}", code="invalid_json")


def _check_encoding(request: Request) -> None:
    """Raise APIError for a body that is compressed, or whose text is in no form of Unicode."""
    coding = ", ".join(request.headers.getlist("content-encoding")).strip().lower()  # a list may have several lines
    if not set(re.split(r"[\s,]+", coding)) <= {"", "identity"}:
        message = f"content-encoding {shown(coding)} is not supported: send the body as it is"
        headers = {"accept-encoding": "identity"}  # RFC 9110, section 12.5.3
        raise APIError(message, status=415, code="unsupported_content_encoding", headers=headers)
    named = _CHARSET.search(request.headers.get("content-type", ""))
    if named and not _UNICODE.fullmatch(named[1]):
        message = f"charset {shown(named[1])} is not supported: JSON is UTF-8 (RFC 8259), and needs no charset"
        raise APIError(message, status=415, code="unsupported_charset")


def _json_length(request: Request, form: type[Body]) -> int | None:
    """Return how many bytes of the body are JSON, if the client says so and the form may have others after it."""
    length = request.headers.get(JSON_LENGTH)
    if length is None or not form.takes_binary:
        return None
    if not re.fullmatch("[0-9]{1,10}", length):
        raise APIError(f"{JSON_LENGTH} must be a number of bytes, not {shown(length)}")
    return int(length)


def _counted(size: int) -> int:
    """Return how many bytes of a body count toward `held`."""
    return max(size - limits.FREE_BODY, 0)
