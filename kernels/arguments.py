"""The values that kernels are handed, as far as they read them: a layer's cache and attention's options."""

from typing import Protocol

import torch


class Cache(Protocol):
    """One layer's keys and values for every block, each [blocks, block_size, kv_heads, d]; d lies contiguous."""

    k: torch.Tensor
    v: torch.Tensor


class Options(Protocol):
    """What sets a layer's attention apart; what it does not have is None."""

    @property
    def scale(self) -> float:
        """Scores are q k^T times this."""
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
        """[positions, 2, d], contiguous: keys are cached before their rotation, and are rotated as they are read."""
        ...


def check_strides(cache: Cache) -> None:
    """Raise ValueError unless one offset finds a key and its value, and a head's numbers follow one another."""
    if cache.k.stride() != cache.v.stride() or cache.k.stride(3) != 1:
        raise ValueError("K and V caches must have equal strides and a contiguous head_dim")
