"""Read a tensor that `torch.save` wrote, from bytes that anyone may have sent.

`torch.load` runs a virtual machine over such a file, and even with weights_only it builds sparse tensors whose indices
point outside them, views beyond their storage and whatever else a file says (CVE-2025-62164 was vLLM's). What
`torch.save(tensor, file)` writes for a dense tensor has one form. So this reads that form and refuses every other,
without torch, without allocating anything that the file declares, and in time that the length of the bytes bounds:

    a zip archive, nothing compressed: data.pkl, the tensor's description; data/0, its numbers; byteorder
    a pickle: _rebuild_tensor_v2(the storage's dtype, key, device and length, an offset, a shape, strides, ...)

The numbers are a slice of the bytes given; shape, strides and lengths must agree exactly before they are read.
"""

import binascii
import pickletools
import struct
from typing import Any, NamedTuple

import numpy as np

from minillm.errors import InvalidRequest

from .embeddings import check_shape, checked

OVERHEAD = 64 << 10  # bytes of a file that are no numbers, at most
_ENTRIES, _PICKLE = 16, 4096  # files in the archive, and bytes of a description, at most
_END, _ENTRY, _LOCAL = struct.Struct("<4s4H2LH"), struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s5H3L2H")
_STORAGES = {"HalfStorage": "float16", "BFloat16Storage": "bfloat16", "FloatStorage": "float32"} | {
    "DoubleStorage": "float64"
}
_SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_TENSOR, _HOOKS = "torch._utils _rebuild_tensor_v2", "collections OrderedDict"
_INSTEAD = {
    "torch._utils _rebuild_parameter": "save its .data",
    "torch._utils _rebuild_sparse_tensor": "save tensor.to_dense()",
    "torch.serialization _get_layout": "save tensor.to_dense()",
    "torch._utils _rebuild_qtensor": "save tensor.dequantize()",
    "torch._utils _rebuild_nested_tensor": "save a dense tensor",
    "torch._utils _rebuild_meta_tensor_no_storage": "a tensor on the device meta has no numbers",
}
SAVE = "save it with torch.save(tensor.contiguous().clone().cpu(), file)"


class _Storage(NamedTuple):
    dtype: str
    key: str
    length: int  # in numbers


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def saved_length(rows: int, hidden_size: int) -> int:
    """Return the most characters of base64 that a saved tensor of so many embeddings needs, whatever its dtype."""
    return -(-(rows * hidden_size * 8 + OVERHEAD) // 3) * 4


def decoded(text: str) -> bytes:
    """Return the bytes that base64 stands for. Raises InvalidRequest."""
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:  # binascii.Error is one, too
        raise InvalidRequest(f"prompt_embeds is no base64 ({error}): encode what torch.save writes") from None


def read_saved(data: bytes, hidden_size: int, dtype: str, most: int, name: str = "prompt_embeds") -> np.ndarray:
    """Return the embeddings in a file of torch.save, [n, hidden], at most `most` of them. Raises InvalidRequest.

    hidden_size, dtype: of the model. name: of the input, for messages.
    """
    try:
        files = _archive(data)
        tensor = _described(files)
    except (InvalidRequest, ValueError, struct.error, LookupError, TypeError) as error:
        reason = str(error) if isinstance(error, InvalidRequest) else "it is damaged"
        raise InvalidRequest(f"{name} is no file of torch.save with one dense tensor: {reason}") from None
    stored, shape = tensor.storage, tensor.shape
    check_shape(shape, stored.dtype, hidden_size, most)
    rows = shape[0]
    if tensor.strides[-1] != 1 or (rows > 1 and tensor.strides[0] != hidden_size):
        raise InvalidRequest(f"{name} has strides {list(tensor.strides)}, as of a view: {SAVE}")
    numbers = files.get(f"data/{stored.key}", b"")
    length = rows * hidden_size
    if tensor.offset or stored.length != length or len(numbers) != length * _SIZES[stored.dtype]:
        raise InvalidRequest(
            f"{name} has {length:,} numbers, but its storage has {stored.length:,} in {len(numbers):,} bytes and they "
            f"begin at {tensor.offset:,}, as of a view: {SAVE}"
        )
    if stored.dtype == "bfloat16":  # the upper half of a float32
        values = (np.frombuffer(numbers, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(numbers, np.dtype(stored.dtype).newbyteorder("<"))
    return checked(values.reshape(shape), dtype, name)


def _refuse(reason: str) -> InvalidRequest:
    return InvalidRequest(f"{reason}; {SAVE}")


def _archive(data: bytes) -> dict[str, memoryview]:
    """Return the files of a zip archive in which nothing is compressed, by their names within its only folder.

    Only the directory at its end counts. Zip64's own, which torch also writes, is for archives of over 4 GiB.
    """
    if len(data) < _END.size:
        raise _refuse("it has too few bytes")
    magic, disk, first_disk, here, count, size, start, comment = _END.unpack_from(data, len(data) - _END.size)
    if magic != b"PK\5\6" or comment:
        raise _refuse("it is no zip archive")
    if count != here or disk or first_disk or not 0 < count <= _ENTRIES or start + size > len(data):
        raise _refuse(f"its archive has {count:,} files or more than one part")
    files: dict[str, memoryview] = {}
    at, view = start, memoryview(data)
    for _ in range(count):
        magic, _, _, flags, method, _, _, _, packed, length, name, extra, note, _, _, _, begin = _ENTRY.unpack_from(
            data, at
        )
        path = bytes(data[at + _ENTRY.size : at + _ENTRY.size + name]).decode("ascii")
        at += _ENTRY.size + name + extra + note
        if magic != b"PK\1\2" or flags & 1 or at > start + size:
            raise _refuse("its archive is encrypted or damaged")
        if method or packed != length:
            raise _refuse("its archive is compressed")
        local = _LOCAL.unpack_from(data, begin)
        begin += _LOCAL.size + local[-2] + local[-1]
        if local[0] != b"PK\3\4" or begin + length > start:
            raise _refuse("a file in its archive is not where it should be")
        _, _, inner = path.partition("/")
        if inner in files:
            raise _refuse("its archive has two files of one name")
        files[inner] = view[begin : begin + length]
    if bytes(files.get("byteorder", b"little")[:8]) != b"little":
        raise _refuse("its numbers are big-endian")
    return files


def _described(files: dict[str, memoryview]) -> _Tensor:
    """Return the tensor that data.pkl describes."""
    if "data.pkl" not in files:
        raise _refuse("its archive has no data.pkl")
    if len(files["data.pkl"]) > _PICKLE:
        raise _refuse("it describes more than one tensor")
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    opcode: pickletools.OpcodeInfo
    argument: Any
    for opcode, argument, _ in pickletools.genops(bytes(files["data.pkl"])):
        match opcode.name:
            case "PROTO":
                pass
            case "MARK":
                marks.append(len(stack))
            case "GLOBAL":
                stack.append(_Name(argument))
            case "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                stack.append(argument)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(opcode.name == "NEWTRUE")
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                first = len(stack) - int(opcode.name[-1])
                stack[first:] = [tuple(stack[first:])]
            case "TUPLE":
                first = marks.pop()
                stack[first:] = [tuple(stack[first:])]
            case "BINPERSID":
                stack.append(_storage(stack.pop()))
            case "REDUCE":
                arguments = stack.pop()
                stack.append(_made(stack.pop(), arguments))
            case "STOP" if len(stack) == 1 and isinstance(stack[0], _Tensor):
                return stack[0]
            case _:
                raise _refuse("it holds something else than a tensor")
    raise _refuse("it holds no tensor")


class _Name(str):
    """A class or a function that a pickle names: it is neither imported nor called."""


def _storage(id: Any) -> _Storage:
    match id:
        case ("storage", _Name() as kind, str(key), str(device), int(length)):
            module, _, name = kind.partition(" ")
            if module != "torch" or name not in _STORAGES:
                raise _refuse(f"its numbers are of {kind.replace(' ', '.')[:60]}")
            if device != "cpu":
                raise _refuse(f"it is on {device[:20]}")
            return _Storage(_STORAGES[name], key, length)
    raise _refuse("its storage is described in another way")


def _made(name: Any, arguments: Any) -> Any:
    """Return what a function of the pickle makes, if that is one that torch.save writes for a dense tensor."""
    if isinstance(name, _Name) and name == _HOOKS and arguments == ():
        return ()
    if not isinstance(name, _Name):  # never shown: tuples of tuples may have exponentially many members
        raise _refuse("it calls what is no function")
    if name != _TENSOR:
        raise InvalidRequest(f"it holds what {name.replace(' ', '.')[:60]} makes; {_INSTEAD.get(name, SAVE)}")
    match arguments:
        case (_Storage() as storage, int(offset), tuple(shape), tuple(strides), bool(), ()):
            if len(shape) == len(strides) and all(type(each) is int and each >= 0 for each in (*shape, *strides)):
                return _Tensor(storage, offset, shape, strides)
    raise _refuse("its tensor is described in another way")
