"""Read tensors of KServe's protocol from JSON or from the bytes after it, and write them as either.  Lesson 99.

In the binary form, elements follow each other in row-major order, little-endian; a string is its length in bytes as a
32-bit number, then UTF-8.
"""

import math
import struct
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from minillm.values import QUOTED, shown

from ..limits import MAX_PROMPTS
from .api_error import APIError

MAX_DIMENSIONS = 8
SIZE = "binary_data_size"  # a tensor's parameter: how many of the bytes after the JSON are its own
KINDS: dict[str, tuple[type, ...]] = {"BOOL": (bool,), "INT32": (int,), "INT64": (int,), "FP32": (float, int)}
KINDS["BYTES"] = (str,)
BITS = {"INT32": 32, "INT64": 64}
FORMATS = {"BOOL": "?", "INT32": "i", "INT64": "q", "FP32": "f"}  # as `struct` names them
_Dimension = Annotated[int, Field(ge=0, lt=2**31)]


class InputTensor(BaseModel):
    """A tensor as a request has it: its elements are in `data`, or in the bytes after the JSON."""

    model_config = ConfigDict(strict=True, extra="forbid")
    name: str
    datatype: str
    shape: Annotated[list[_Dimension], Field(max_length=MAX_DIMENSIONS, fail_fast=True)]
    parameters: dict[str, Any] | None = None
    data: list[Any] | None = None


def read(tensors: Sequence[InputTensor], types: dict[str, str], binary: bytes) -> dict[str, list]:
    """Return each tensor's elements by name, in row-major order.

    types: the datatype of each name; binary: the bytes after the JSON. Raises APIError for an unknown or repeated name,
    another type, more than MAX_PROMPTS elements, or a number of elements that differs from the shape's.
    """
    elements: dict[str, list] = {}
    at = 0
    for tensor in tensors:
        name = tensor.name
        if name not in types:
            raise APIError(f"{shown(name)} is not an input of this model: it has {', '.join(types)}", param="inputs")
        if name in elements:
            raise _wrong(name, "is given twice")
        if tensor.datatype != types[name]:
            raise _wrong(name, f"must have the datatype {types[name]}, not {shown(tensor.datatype)}")
        if (count := math.prod(tensor.shape)) > MAX_PROMPTS:
            message = f"has {count:,} elements, but at most {MAX_PROMPTS:,} are allowed: split the request"
            raise _wrong(name, message)
        size = (tensor.parameters or {}).get(SIZE)
        if size is None:
            values = _from_json(name, tensor.datatype, tensor.data)
        elif tensor.data is not None:
            raise _wrong(name, f"has both data and {SIZE}: send one of them")
        elif type(size) is not int or not 0 <= size <= len(binary) - at:
            raise _wrong(name, f"has the {SIZE} {shown(size)}, but {len(binary) - at:,} bytes are left for it")
        else:
            values = _from_bytes(name, tensor.datatype, binary[at : at + size], count)
            at += size
        if len(values) != count:
            raise _wrong(name, f"has {len(values):,} elements, but its shape {tensor.shape} holds {count:,}")
        elements[name] = values
    if at != len(binary):
        raise APIError(f"{len(binary) - at:,} bytes after the JSON belong to no input: give their {SIZE}")
    return elements


def _wrong(name: str, reason: str) -> APIError:
    return APIError(f"input {name[:QUOTED]} {reason}", param=name[:QUOTED])


def _from_json(name: str, datatype: str, data: list | None) -> list:
    """Return the elements of `data`, which may be nested as the shape is."""
    if data is None:
        raise _wrong(name, f"has neither data nor {SIZE}")
    while any(isinstance(each, list) for each in data):
        data = [each for part in data for each in (part if isinstance(part, list) else [part])]
    for each in data:
        if type(each) not in KINDS[datatype]:
            raise _wrong(name, f"must have elements of the type {datatype}, but has {shown(each)}")
        if (bits := BITS.get(datatype)) and not -(2 ** (bits - 1)) <= each < 2 ** (bits - 1):
            limits = f"{-(2 ** (bits - 1))} to {2 ** (bits - 1) - 1}"
            raise _wrong(name, f"must have elements of the type {datatype}, from {limits}, but has {shown(each)}")
    return data


def _from_bytes(name: str, datatype: str, data: bytes, count: int) -> list:
    if datatype != "BYTES":
        form = f"<{count}{FORMATS[datatype]}"
        if struct.calcsize(form) != len(data):
            raise _wrong(name, f"needs {struct.calcsize(form):,} bytes for its shape, but has {len(data):,}")
        return list(struct.unpack(form, data))
    texts: list[str] = []
    at = 0
    while at < len(data) and len(texts) <= count:
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        if at + 4 > len(data) or end > len(data):
            raise _wrong(name, "ends in the middle of a string")
        try:
            texts.append(data[at + 4 : end].decode())
        except UnicodeDecodeError:
            raise _wrong(name, f"is not UTF-8 in its string {len(texts)}") from None
        at = end
    return texts


def output(name: str, texts: Sequence[str], binary: bool) -> tuple[dict, bytes]:
    """Return a tensor of strings for a response: its JSON, and the bytes that follow the JSON if `binary`."""
    tensor: dict[str, Any] = {"name": name, "datatype": "BYTES", "shape": [len(texts)]}
    if not binary:
        return tensor | {"data": list(texts)}, b""
    data = b"".join(len(each).to_bytes(4, "little") + each for each in map(str.encode, texts))
    return tensor | {"parameters": {SIZE: len(data)}}, data
