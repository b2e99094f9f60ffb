"""Caches with numbered tokens, and what a learner's `append` does to them.  Lesson 02.

For the lesson's checker.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

KV_HEADS, NUMBERS = 2, 3


def tokens(*each: float) -> Tensor:
    """Keys or values of tokens: [tokens, KV_HEADS, NUMBERS]; each is its token's number plus a fraction of its own."""
    fractions = torch.arange(KV_HEADS * NUMBERS).reshape(KV_HEADS, NUMBERS) / 8
    return torch.tensor(each)[:, None, None] + fractions


def cache_of(capacity: int, count: int = 0) -> SimpleNamespace:
    """A cache that has `count` tokens: their keys 1, 2, ..., their values 10, 20, ..."""
    shape = (capacity, KV_HEADS, NUMBERS)
    cache = SimpleNamespace(k=torch.zeros(shape), v=torch.zeros(shape), length=count)
    if count:
        cache.k[:count] = tokens(*range(1, count + 1))
        cache.v[:count] = tokens(*range(10, 10 * count + 1, 10))
    return cache


def call(function: Callable, cache: SimpleNamespace, k: Tensor, v: Tensor) -> None:
    """A function that does nothing would have several of the properties."""
    before = cache.k.clone(), cache.v.clone(), cache.length
    function(cache, k, v)
    same = torch.equal(cache.k, before[0]) and torch.equal(cache.v, before[1]) and cache.length == before[2]
    assert not same, "the call changed nothing in the cache"


def numbers(memory: Tensor) -> list[int]:
    """The number of each slot's token."""
    return [int(number) for number in memory[:, 0, 0].tolist()]


class Largest(TorchDispatchMode):
    """The size of the largest floating-point tensor that is made outside a cache's memory."""

    def __init__(self, cache: SimpleNamespace):
        super().__init__()
        self.numbers = 0
        self._memory = {memory.untyped_storage().data_ptr() for memory in (cache.k, cache.v)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        floats = isinstance(out, Tensor) and out.is_floating_point()
        if floats and out.untyped_storage().data_ptr() not in self._memory:
            self.numbers = max(self.numbers, out.numel())
        return out
