"""Convert errors to the form in which clients get them, in OpenAI's form and in Triton's.  Lesson 99."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from minillm.errors import MinillmError
from minillm.request_values import SURROGATE
from minillm.values import QUOTED

MAX_MESSAGE = 1000  # characters in an error message, which may quote client input of any length


class APIError(MinillmError):
    """An error response in OpenAI's format, with its HTTP status."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        if len(message) > MAX_MESSAGE:
            message = message[:MAX_MESSAGE] + " ..."
        super().__init__(message)
        self.status, self.headers, self.code = status, headers, code or kind
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        self.bare = {"error": message}  # Triton's form


def unknown_field(name: str, where: str = "") -> APIError:
    """where: dotted path of the object that contains the field."""
    if SURROGATE.search(name):
        return APIError("the body has a field whose name is not valid text: it contains a lone surrogate")
    path = f"{where}.{name[:QUOTED]}".removeprefix(".")
    param = where.split(".")[0] or path
    return APIError(f"{path} is not a field of this request", param=param, code="unknown_parameter")


def malformed(errors: Sequence[Mapping[str, Any]]) -> APIError:
    """Convert the first of pydantic's validation errors."""
    first = errors[0]
    where = [str(part)[:QUOTED] for part in first["loc"]]
    return APIError(f"{'.'.join(where)}: {first['msg']}", param=where[0])


def check_members(where: str, value: object, form: type[BaseModel]) -> None:
    """Raise APIError for the first member that is not a field of `form`."""
    check_names(where, value if isinstance(value, dict) else {}, form.model_fields)


def check_names(where: str, value: dict, known: Container[str]) -> None:
    for name in value:
        if name not in known:
            raise unknown_field(name, where)
