"""The arguments that kernels share: a layer's cache, the options of its attention, and a matrix of codes."""

from typing import NamedTuple, Protocol

import torch


class CacheArguments(Protocol):
    """One layer's keys and values in all blocks, each [blocks, block_size, kv_heads, d], contiguous along d.

    If they are int8 or float8_e4m3fn, they are codes, with scales [blocks, block_size, kv_heads] float32.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


class RowArguments(Protocol):
    """The rows whose queries attend, and where their keys are. Decode attention reads the first two alone.

    block_table  [rows, blocks] int32: each row's blocks in order
    lengths      [rows] int32: the keys that a row's last query sees, its own included
    query_start  [rows + 1] int32: row r's queries are q[query_start[r] : query_start[r + 1]]
    max_queries  upper bound of a row's queries
    whole        how many of the last rows have no keys but those of their queries
    """

    @property
    def block_table(self) -> torch.Tensor: ...
    @property
    def lengths(self) -> torch.Tensor: ...
    @property
    def query_start(self) -> torch.Tensor: ...
    @property
    def max_queries(self) -> int: ...
    @property
    def whole(self) -> int: ...


class AttentionArguments(Protocol):
    """Options of a layer's attention. One that it does not use is None.

    scale     scores are q k^T multiplied by this
    window    a query sees this many of the newest keys, its own included
    soft_cap  scores become soft_cap * tanh(score / soft_cap)
    rotary    [positions, 2, d], contiguous: the cache holds keys before their rotation, and attention rotates them
    """

    @property
    def scale(self) -> float: ...
    @property
    def window(self) -> int | None: ...
    @property
    def soft_cap(self) -> float | None: ...
    @property
    def rotary(self) -> torch.Tensor | None: ...


def check_strides(cache: CacheArguments) -> None:
    """Raise ValueError unless K and V have equal strides and a contiguous last axis, so that one offset serves both."""
    if cache.k.stride() != cache.v.stride() or cache.k.stride(3) != 1:
        raise ValueError("K and V caches must have equal strides and a contiguous head_dim")


class CodeMatrix(NamedTuple):
    """A matrix of codes [rows, columns].

    words [rows, columns * bits / 32] int32, contiguous. int8 and fp8 (e4m3): four codes a word; scales [rows] float32.
    int4: eight codes a word, each plus 8, the lowest half byte first; scales [rows, groups], zeros [rows, groups] int8
    or None.
    """

    bits: int  # 8 or 4
    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    fp8: bool = False  # whether codes of 8 bits are e4m3 numbers
    rounded_inputs: bool = False  # whether inputs are rounded to codes of the same kind, by token
    input_scale: torch.Tensor | None = None  # [1] float32: of such inputs, if it is not each token's own

    @property
    def rows(self) -> int:
        return self.words.shape[0]

    @property
    def columns(self) -> int:
        return self.words.shape[1] * 32 // self.bits

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.columns if self.bits == 8 else self.columns // self.scales.shape[1]

    @property
    def bytes(self) -> torch.Tensor:
        """int8: [rows, columns] int8; fp8: [rows, columns] uint8; int4: [rows, columns / 2] uint8."""
        return self.words.view(torch.int8 if self.bits == 8 and not self.fp8 else torch.uint8)


def is_compiled(x: torch.Tensor) -> bool:
    """Return whether kernels on this tensor are compiled: the interpreter knows no machine instructions."""
    return x.is_cuda
