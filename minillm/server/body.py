"""A request's body: read up to a limit, parsed, and checked against its form.  Lesson 99."""

import json
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from .protocol import NO_OBJECT, APIError, malformed
from .streams import ClientGone

MAX_BODY = 16 << 20  # bytes: room for a million token ids, and parsed in a fraction of a second
Form = TypeVar("Form", bound=BaseModel)


async def read(request: Request, form: type[Form]) -> Form:
    """The body as `form`. Raises APIError, and ClientGone when not all of it comes."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if not (kind == "application/json" or kind.startswith("application/") and kind.endswith("+json")):
        raise APIError(NO_OBJECT)
    if int(request.headers.get("content-length", 0)) > MAX_BODY:
        raise _too_large()
    data = bytearray()
    try:
        async for chunk in request.stream():
            data += chunk
            if len(data) > MAX_BODY:
                raise _too_large()
    except ClientDisconnect:
        raise ClientGone from None
    try:
        return form.model_validate(_parse(bytes(data)))
    except ValidationError as error:
        raise malformed(error.errors(include_url=False, include_input=False)) from None


def _too_large() -> APIError:
    message = f"the body has more than {MAX_BODY:,} bytes, the most that are read: send several requests"
    return APIError(message, status=413, code="request_too_large")


def _parse(data: bytes) -> object:
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at character {error.pos}"
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not {error.encoding.upper()}"
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError:  # Python's bound on the digits of a whole number
        reason = "a number in it has too many digits"
    raise APIError(f"the body is not valid JSON: {reason}", code="invalid_json")
