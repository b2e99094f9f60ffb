"""Read safetensors files: where each tensor is, and its rows, one buffer at a time.  Lesson 00."""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from minillm.errors import ConfigError
from minillm.values import read_json, shown

FILE_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BUFFER_BYTES = 4 << 20
INDEX = "model.safetensors.index.json"


def checkpoint_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a model: those in its index, else model.safetensors, else all. Raises
    ConfigError.
    """
    if placed := _placed(directory):
        files = [directory / name for name in sorted(set(placed.values()))]
    elif (directory / "model.safetensors").is_file():
        files = [directory / "model.safetensors"]
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(f'{directory} has no *.safetensors; load_format="dummy" makes random weights instead')
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{directory / INDEX} names {file.name}, which is missing")
    return files


def _placed(directory: Path) -> dict[str, str]:
    """Return each tensor's file by the tensor's name, as an index says; empty without an index. Raises ConfigError."""
    index = directory / INDEX
    if not index.is_file():
        return {}
    placed = read_json(index, ConfigError).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
        raise ConfigError(f"{index}: weight_map must give each tensor's file by its name, not {shown(placed)}")
    return placed


@dataclass(frozen=True)
class Entry:
    """The location of one tensor in a safetensors file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # offset in the file, in bytes
    nbytes: int


def read_header(file: Path) -> dict[str, Entry]:
    """Return a safetensors file's table of contents: 8 bytes of length, JSON, then the tensors' bytes.

    Format: https://huggingface.co/docs/safetensors (section Format). Raises ConfigError if the file is
    truncated.
    """
    size = file.stat().st_size
    cut = ConfigError(f"{file} is truncated or not a safetensors file ({size} bytes): copy it again")
    with file.open("rb") as stream:
        first = stream.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
        if length > size - 8:
            raise cut
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            entries = {}
            for name, tensor in header.items():
                dtype, shape, (begin, end) = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
                if not isinstance(dtype, str) or not all(type(each) is int and each >= 0 for each in (*shape, begin)):
                    raise cut
                if type(end) is not int or end < begin:
                    raise cut
                entries[name] = Entry(file, dtype, tuple(shape), 8 + length + begin, end - begin)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise cut from None
    for name, entry in entries.items():
        if entry.start + entry.nbytes > size:
            raise ConfigError(f"{file} is truncated: tensor {name} ends after the file's {size} bytes. Copy it again")
    return entries


def read_headers(directory: Path) -> dict[str, Entry]:
    """Return where each tensor of a model is. Reads no tensor.

    Raises ConfigError if a file is missing or truncated, or if two files have the same tensor and no index chooses.
    """
    placed, entries = _placed(directory), dict[str, Entry]()
    for file in checkpoint_files(directory):
        for name, entry in read_header(file).items():
            if name in entries:
                other = entries[name].file
                if placed.get(name) not in (file.name, other.name):
                    raise ConfigError(
                        f"tensor {name} is in {other} and in {file}: remove the one that is not the model's"
                    )
                if placed[name] == other.name:
                    continue
            entries[name] = entry
    return entries


def rows_at_once(entry: Entry) -> int:
    """Return how many rows of a tensor fit into BUFFER_BYTES, at least one."""
    return max(1, BUFFER_BYTES // max(entry.nbytes // entry.shape[0], 1)) if entry.nbytes else 1


def buffer_bytes(entry: Entry, rows: int) -> int:
    """Return the bytes of `rows` rows of a tensor, or of all if it has fewer."""
    return min(entry.nbytes, rows * (entry.nbytes // entry.shape[0])) if entry.nbytes else 0


class Pieces:
    """A tensor in a file, as slices of its first axis in one buffer: each is valid until the next one is read.

    The file is read, not mapped: pages of a mapped file would count toward the process's memory.
    """

    def __init__(self, entry: Entry, buffer: Tensor, rows: int):
        self.entry, self.rows = entry, rows
        self.window, self.buffer = buffer.numpy().data, buffer

    def __iter__(self) -> Iterator[Tensor]:
        """Return all of it, `rows` rows at a time."""
        return self._read(range(self.entry.shape[0] if self.entry.shape else 0))

    def part(self, rows: range, columns: range | None = None) -> Iterator[Tensor]:
        """These rows and columns of it (None: all). Reads no others."""
        if columns is None or len(columns) == self.entry.shape[1]:
            return self._read(rows)
        return self._read_columns(rows, columns)

    def _read(self, rows: range) -> Iterator[Tensor]:
        entry = self.entry
        if not entry.nbytes:
            return
        size = self._row_bytes
        with entry.file.open("rb", buffering=0) as stream:
            for first in range(rows.start, rows.stop, self.rows):
                count = min(self.rows, rows.stop - first)
                self._fill(stream, first * size, 0, count * size)
                yield self._slice(count * size, entry.shape[1:])

    def _read_columns(self, rows: range, columns: range) -> Iterator[Tensor]:
        entry, item = self.entry, FILE_DTYPES[self.entry.dtype].itemsize
        skipped, width = columns.start * item, len(columns) * item
        with entry.file.open("rb", buffering=0) as stream:
            for first in range(rows.start, rows.stop, self.rows):
                count = min(self.rows, rows.stop - first)
                for row in range(count):
                    self._fill(stream, (first + row) * self._row_bytes + skipped, row * width, width)
                yield self._slice(count * width, (len(columns),))

    @property
    def _row_bytes(self) -> int:
        return self.entry.nbytes // self.entry.shape[0]

    def _slice(self, size: int, shape: tuple[int, ...]) -> Tensor:
        return self.buffer[:size].view(FILE_DTYPES[self.entry.dtype]).view(-1, *shape)

    def _fill(self, stream: FileIO, offset: int, start: int, size: int) -> None:
        """Read `size` bytes of the tensor, from this offset on, to a start in the buffer."""
        stream.seek(self.entry.start + offset)
        filled = 0
        while filled < size:
            count = stream.readinto(self.window[start + filled : start + size])
            if not count:
                raise ConfigError(f"{self.entry.file} became shorter while it was read")
            filled += count


def is_consistent(entry: Entry) -> bool:
    """Return whether a tensor has as many bytes as its shape and its dtype, which must be in FILE_DTYPES, take."""
    return entry.nbytes == math.prod(entry.shape) * FILE_DTYPES[entry.dtype].itemsize


def overlapping(entries: Mapping[str, Entry]) -> tuple[str, str] | None:
    """Return the names of two tensors that share bytes of a file, which the format forbids; None if there are none."""
    placed = sorted((each.file, each.start, each.nbytes, name) for name, each in entries.items() if each.nbytes)
    for (file, start, nbytes, name), (next_file, next_start, _, other) in pairwise(placed):
        if file == next_file and start + nbytes > next_start:
            return name, other
    return None


def are_equal(one: Entry, other: Entry) -> bool:
    """Return whether two matrices have the same numbers, in any dtypes. Reads up to the first difference."""
    if one.shape != other.shape or len(one.shape) != 2:
        return False
    for each in (one, other):
        if FILE_DTYPES.get(each.dtype) not in FLOATING or not is_consistent(each):
            return False
    rows = min(rows_at_once(one), rows_at_once(other))
    read = [Pieces(each, torch.empty(buffer_bytes(each, rows), dtype=torch.uint8), rows) for each in (one, other)]
    wide = torch.promote_types(FILE_DTYPES[one.dtype], FILE_DTYPES[other.dtype])
    return all(mine.to(wide).equal(yours.to(wide)) for mine, yours in zip(*read, strict=True))
