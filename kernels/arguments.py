"""The arguments that kernels share: a layer's cache, and the options of its attention."""

from typing import Protocol

import torch


class Cache(Protocol):
    """One layer's keys and values in all blocks, each [blocks, block_size, kv_heads, d], contiguous along d."""

    k: torch.Tensor
    v: torch.Tensor


class Options(Protocol):
    """How a layer's attention differs from plain attention. An option that it does not use is None."""

    @property
    def scale(self) -> float:
        """Scores are q k^T multiplied by this."""
        ...

    @property
    def window(self) -> int | None:
        """A query sees this many of the newest keys, its own included."""
        ...

    @property
    def soft_cap(self) -> float | None:
        """Scores become soft_cap * tanh(score / soft_cap)."""
        ...

    @property
    def rotary(self) -> torch.Tensor | None:
        """[positions, 2, d], contiguous: the cache holds keys before their rotation, and attention rotates them."""
        ...


def check_strides(cache: Cache) -> None:
    """Raise ValueError unless K and V have equal strides and a contiguous last axis, so that one offset serves both."""
    if cache.k.stride() != cache.v.stride() or cache.k.stride(3) != 1:
        raise ValueError("K and V caches must have equal strides and a contiguous head_dim")
