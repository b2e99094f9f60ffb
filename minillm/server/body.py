"""Read a request body within size and time limits, decode it, and validate it.  Lesson 99."""

import asyncio
import json
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from . import limits
from .bounded_json import BoundedDecoder, TooDeep, TooManyValues, UnknownMember
from .event_stream import ClientGone
from .link import Busy
from .protocol import NO_OBJECT, APIError, Body, malformed, unknown_field

Form = TypeVar("Form", bound=Body)


class BodyReader:
    """Reads the request bodies of one worker.

    max_request_len: most tokens in prompt and output together; timeout: seconds for the whole body to arrive.
    """

    def __init__(self, max_request_len: int, timeout: float):
        self.max_body, self.max_tokens = limits.max_body(max_request_len), limits.max_tokens(max_request_len)
        self.timeout = timeout
        self.held = 0  # bytes of bodies not decoded yet, without the first FREE_BODY of each
        self._turn = asyncio.Semaphore(1)  # one large body at a time: decoded, it takes more memory than its bytes

    async def read(self, request: Request, form: type[Form]) -> Form:
        """Read the body as a `form`. Raises APIError; ClientGone if the client disconnects before the end."""
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if not (kind == "application/json" or kind.startswith("application/") and kind.endswith("+json")):
            raise APIError(NO_OBJECT)
        if int(request.headers.get("content-length", 0)) > self.max_body:
            raise self._too_large()
        data = bytearray()
        try:
            await self._receive(request, data)
            if len(data) <= limits.FREE_BODY:
                return self.parse(data, form)
            async with self._turn:  # on the event loop, decoding would delay all other streams
                return await asyncio.to_thread(self.parse, data, form)
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

    def parse(self, data: bytes | bytearray, form: type[Form]) -> Form:
        """Decode and validate a body, at bounded cost. Raises APIError for the first error."""
        content = self._decode(data, form)
        if not isinstance(content, dict):
            raise APIError(NO_OBJECT)
        try:
            return form.model_validate(content)
        except ValidationError as error:
            raise malformed(error.errors(include_url=False, include_input=False)) from None

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


def _counted(size: int) -> int:
    """How many bytes of a body count toward `held`."""
    return max(size - limits.FREE_BODY, 0)
