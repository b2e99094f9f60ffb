"""Read and check the header of a GGUF file: everything in it but the tensors' data.  Lesson 05.

A download that was cut off, or a file of another kind, is refused here, with where it is wrong. So the
programs that read the whole file meet only sound ones. No length is trusted before it is compared with the file's size:
a wrong one costs neither memory nor time.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import stat
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from minillm.errors import ConfigError
from minillm.values import shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes, where general.alignment says nothing else
BUFFER_BYTES = 1 << 18
LENGTH = struct.Struct("<Q")  # of a string

# Far above what models have. They bound the work that a damaged file can cause.
MOST_ENTRIES = 1 << 16  # of the metadata; tensors, too
MOST_DIMENSIONS = 4
MOST_STRINGS = 1 << 22  # in one array
KEPT = 1024  # of a longer array only the type and the count are kept
NAME_BYTES = (1 << 16) - 1  # of a key or a tensor's name
TEXT_BYTES = 16 << 20
HEADER_BYTES = 128 << 20

# Types of values by their number: the name, and the format of those with a fixed size.
SCALARS = {
    0: ("uint8", "<B"),
    1: ("int8", "<b"),
    2: ("uint16", "<H"),
    3: ("int16", "<h"),
    4: ("uint32", "<I"),
    5: ("int32", "<i"),
    6: ("float32", "<f"),
    7: ("bool", "<B"),
    10: ("uint64", "<Q"),
    11: ("int64", "<q"),
    12: ("float64", "<d"),
}
BOOL, STRING, ARRAY = 7, 8, 9

# Types of tensors by their number: the name, the elements of a block, and a block's bytes.
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}

# How files of other kinds begin.
KINDS = (
    (b"version https://git-lfs", "a Git LFS pointer, not the file that it stands for: run `git lfs pull`"),
    (b"PK\x03\x04", "a zip archive, such as a wheel or a PyTorch checkpoint: unpack it, or name a .gguf file"),
    (b"\x1f\x8b", "compressed with gzip: unpack it"),
    (b"\x80", "a Python pickle, such as a PyTorch checkpoint: name a .gguf file"),
    (b"tjgg", "GGML, the format before GGUF: convert it with llama.cpp, or download a newer file"),
    (b"fmgg", "GGML, the format before GGUF: convert it with llama.cpp, or download a newer file"),
    (b"lmgg", "GGML, the format before GGUF: convert it with llama.cpp, or download a newer file"),
    (b"algg", "a GGML adapter: name a whole model"),
)


@dataclass(frozen=True)
class Array:
    """An array of the metadata that is too long to keep, such as the vocabulary."""

    type: str
    count: int

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's entry. shape: as the file has it, with the axis whose elements are neighbors first."""

    shape: tuple[int, ...]
    type: str  # a name of TYPES
    start: int  # the offset in the file, in bytes
    nbytes: int


@dataclass(frozen=True)
class Header:
    """A GGUF file's description of its model.

    metadata: values as Python's own; a short array as a tuple, a long one as `Array`. tensors: by their names.
    """

    version: int
    architecture: str
    alignment: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @property
    def quantization(self) -> str:
        """Return the type that most elements of the matrices have, such as "Q4_1"."""
        matrices = [each for each in self.tensors.values() if len(each.shape) > 1] or list(self.tensors.values())
        elements: Counter[str] = Counter()
        for each in matrices:
            elements[each.type] += math.prod(each.shape)
        return elements.most_common(1)[0][0]


def check(path: Path) -> Header:
    """Return the header of a GGUF file, checked; the tensors' data are not read.  Lesson 05.

    Raises ConfigError, which names the file, the byte, key or tensor, what is wrong with it, and the way out.
    """
    try:
        about = path.stat()
        if stat.S_ISDIR(about.st_mode):
            raise ConfigError(f"{path} is a directory: name the .gguf file in it")
        if not stat.S_ISREG(about.st_mode):  # opening a pipe could wait forever
            raise ConfigError(f"{path} is not a regular file: name a .gguf file")
        with path.open("rb", buffering=BUFFER_BYTES) as stream:
            return _File(path, stream, about.st_size).header()
    except FileNotFoundError:
        raise ConfigError(f"no such file: {path}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None


class _File:
    """A GGUF file that is read from its beginning on. Every method raises ConfigError."""

    def __init__(self, path: Path, stream: BinaryIO, size: int):
        self.path, self.stream, self.size = path, stream, size
        self.position = 0

    def header(self) -> Header:
        version = self._version()
        tensors = self._count("tensors", 32)  # bytes of the smallest entry: its name's length, one dimension, ...
        entries = self._count("entries of metadata", 13)
        metadata = self._metadata(entries)
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str) or not architecture:
            self._fail(f"general.architecture must name the model's architecture, and is {shown(architecture)}")
        if isinstance(parts := metadata.get("split.count"), int) and parts > 1:
            raise ConfigError(
                f"{self.path} is one of the {parts} files of a model: merge them with "
                "`llama-gguf-split --merge FIRST_FILE OUTPUT`, or download the model as one file"
            )
        alignment = self._alignment(metadata)
        if tensors == 0:
            raise ConfigError(f"{self.path} has no tensors, only metadata: name a file with the whole model")
        return Header(version, architecture, alignment, metadata, self._tensors(tensors, alignment))

    # The parts of a header

    def _version(self) -> int:
        first = self.stream.read(64)
        if first[:4] != MAGIC:
            raise ConfigError(f"{self.path} is not a GGUF file: it is {_kind(first, self.size)}")
        self.stream.seek(0)
        self._move(4)
        version = self._number("<I", "the version")
        if version not in VERSIONS:
            if version & 0xFFFF == 0 and version:  # its bytes in the other order
                raise ConfigError(f"{self.path} is big-endian, which is not supported: download a little-endian file")
            known = " and ".join(map(str, VERSIONS))
            raise ConfigError(
                f"{self.path} has version {version} of GGUF, and {known} are supported: download a newer file, or "
                "convert the model again"
            )
        return version

    def _count(self, what: str, least: int) -> int:
        """Return a number of entries of at least so many bytes each."""
        count = self._number("<Q", f"the number of {what}")
        if count > MOST_ENTRIES:
            self._fail(f"it claims {count} {what}, and at most {MOST_ENTRIES} are supported", 8)
        if count * least > self.size - self.position:
            self._short(f"{count} {what}", count * least)
        return count

    def _metadata(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for index in range(count):
            start = self.position
            key = self._string(f"the key of entry {index}", NAME_BYTES)
            if not key:
                self._fail(f"the key of entry {index} is empty", self.position - start)
            if key in found:
                self._fail(f"the key {shown(key)} occurs twice", self.position - start)
            found[key] = self._value(key)
        return found

    def _value(self, key: str) -> Any:
        kind = self._number("<I", f"the type of {shown(key)}")
        what = f"the value of {shown(key)}"
        if kind == STRING:
            return self._string(what, TEXT_BYTES)
        if kind in SCALARS:
            return self._scalar(kind, what)
        if kind != ARRAY:
            self._fail(f"{shown(key)} has the unknown type {kind}", 4)
        kind = self._number("<I", f"the type of the elements of {shown(key)}")
        count = self._number("<Q", f"the length of {shown(key)}")
        if kind == ARRAY:
            self._fail(f"{shown(key)} is an array of arrays, which is not supported", 12)
        if kind == STRING:
            return self._strings(key, count)
        if kind not in SCALARS:
            self._fail(f"the elements of {shown(key)} have the unknown type {kind}", 12)
        name, form = SCALARS[kind]
        nbytes = count * struct.calcsize(form)
        if nbytes > self.size - self.position:
            self._short(what, nbytes)
        if count <= KEPT:
            return tuple(self._scalar(kind, f"element {index} of {shown(key)}") for index in range(count))
        self._move(nbytes)
        return Array(name, count)

    def _strings(self, key: str, count: int) -> "tuple[str, ...] | Array":
        if count > MOST_STRINGS:
            self._fail(f"{shown(key)} claims {count} strings, and at most {MOST_STRINGS} are supported", 8)
        if count * 8 > self.size - self.position:
            self._short(f"the {count} strings of {shown(key)}", count * 8)
        what = f"a string of {shown(key)}"
        kept: list[str] = []
        chunk, at = b"", 0  # a vocabulary has a quarter of a million strings: most are taken from a chunk of the file
        for _ in range(count):  # all are checked, since those who read them later trust them
            text = None
            if at + 8 <= len(chunk):
                end = at + 8 + LENGTH.unpack_from(chunk, at)[0]
                text = _decoded(chunk[at + 8 : end]) if end <= len(chunk) else None
            if text is not None:
                at = end
            else:  # it is not whole in the chunk, or it is wrong
                self._move(at)
                text = self._string(what, TEXT_BYTES)
                chunk, at = self.stream.read(BUFFER_BYTES), 0
            if count <= KEPT:
                kept.append(text)
        self._move(at)
        return tuple(kept) if count <= KEPT else Array("string", count)

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self._fail(f"general.alignment must be a power of two, not {shown(alignment)}")
        return alignment

    def _tensors(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        offsets: dict[str, TensorInfo] = {}
        for index in range(count):
            name, info = self._tensor(index, alignment)
            if name in offsets:
                self._fail(f"the tensor {shown(name)} occurs twice")
            offsets[name] = info
        data = -(-self.position // alignment) * alignment  # the offsets count from here
        tensors = {
            name: TensorInfo(each.shape, each.type, data + each.start, each.nbytes) for name, each in offsets.items()
        }
        end, before = data, ""
        for name, each in sorted(tensors.items(), key=lambda item: item[1].start):
            if each.start < end:
                self._fail(f"the tensors {shown(before)} and {shown(name)} overlap at byte {each.start}")
            end, before = each.start + each.nbytes, name
            if end > self.size:
                raise ConfigError(
                    f"{self.path} is truncated: the tensor {shown(name)} ends at byte {end}, and the file has "
                    f"{self.size} bytes; download it again"
                )
        return tensors

    def _tensor(self, index: int, alignment: int) -> tuple[str, TensorInfo]:
        """Return a tensor's name and where it is; `start` counts from the beginning of the data."""
        name = self._string(f"the name of tensor {index}", NAME_BYTES)
        tensor = f"the tensor {shown(name)}"
        if not name:
            self._fail(f"the name of tensor {index} is empty")
        dimensions = self._number("<I", f"the number of dimensions of {tensor}")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            self._fail(f"{tensor} has {dimensions} dimensions, and 1 to {MOST_DIMENSIONS} are possible", 4)
        shape = tuple(self._number("<Q", f"the shape of {tensor}") for _ in range(dimensions))
        if 0 in shape:
            self._fail(f"{tensor} has the shape {shape}, with a dimension of 0", 8 * dimensions)
        kind = self._number("<I", f"the type of {tensor}")
        if kind not in TYPES:
            self._fail(f"{tensor} has the unknown type {kind}", 4)
        kind_name, block, block_bytes = TYPES[kind]
        if shape[0] % block:
            self._fail(f"{tensor} has rows of {shape[0]} elements, and {kind_name} needs a multiple of {block}", 4)
        nbytes = math.prod(shape) // block * block_bytes
        if nbytes > self.size:
            self._short(f"{tensor} of the shape {shape} in {kind_name}", nbytes)
        offset = self._number("<Q", f"the offset of {tensor}")
        if offset % alignment:
            self._fail(f"{tensor} has the offset {offset}, which is not a multiple of the alignment {alignment}", 8)
        return name, TensorInfo(shape, kind_name, offset, nbytes)

    # Values

    def _scalar(self, kind: int, what: str) -> Any:
        value = self._number(SCALARS[kind][1], what)
        if kind != BOOL:
            return value
        if value > 1:
            self._fail(f"{what} must be true or false, 1 or 0, not {value}", 1)
        return bool(value)

    def _string(self, what: str, most: int) -> str:
        length = self._number("<Q", f"the length of {what}")
        if length > most:
            self._fail(f"{what} claims {length} bytes, and at most {most} are supported", 8)
        text = _decoded(self._take(length, what))
        if text is None:
            self._fail(f"{what} is not UTF-8", length)
        return text

    def _number(self, form: str, what: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form), what))[0]

    def _move(self, count: int) -> None:
        self._advance(count)
        self.stream.seek(self.position)

    def _advance(self, count: int) -> None:
        self.position += count
        if self.position > HEADER_BYTES:
            self._fail(f"its header has more than {HEADER_BYTES >> 20} MiB", count)

    def _take(self, count: int, what: str) -> bytes:
        if count > self.size - self.position:
            self._short(what, count)
        found = self.stream.read(count)
        if len(found) < count:
            raise ConfigError(f"{self.path} became shorter while it was read: wait until it is complete")
        self._advance(count)
        return found

    # Errors

    def _short(self, what: str, count: int) -> NoReturn:
        left = self.size - self.position
        raise ConfigError(
            f"{self.path} is truncated or damaged: {what} would need {count} bytes at byte {self.position}, and the "
            f"file has {left} more; download it again"
        )

    def _fail(self, problem: str, back: int | None = None) -> NoReturn:
        """back: how many bytes ago the wrong ones began; None if it is not in one place."""
        where = "" if back is None else f" (at byte {self.position - back})"
        raise ConfigError(f"{self.path} is damaged: {problem}{where}; download it again")


def _decoded(text: bytes) -> str | None:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return None


def _kind(first: bytes, size: int) -> str:
    """Return what a file that is not GGUF seems to be, and the way out."""
    if not size:
        return "empty; download it again"
    for beginning, kind in KINDS:
        if first.startswith(beginning):
            return kind
    text = first.lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html")):
        return "an HTML page, such as a site's error message: download the file itself"
    if len(first) > 8 and first[8:9] == b"{" and 2 <= struct.unpack("<Q", first[:8])[0] <= size - 8:
        return "a safetensors file: name its directory"
    if text.startswith(b"{"):
        return "JSON, such as a server's error message: download the file itself"
    return f"unknown, and begins with {shown(first[:8])}; name a .gguf file"
