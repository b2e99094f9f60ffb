"""Watch where an interpreted Triton kernel loads from: a missing mask shows, and ends no process.  Lesson 04."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor

from .interpret import COMPILED, how_kernels_run


@contextmanager
def watched_loads(allowed: Sequence[Tensor]) -> Iterator[list[int]]:
    """Inside the block, interpreted kernels can load only elements of `allowed`, which may be views of larger tensors.

    Yields a list that collects the addresses of other loads, which give 0. Compiled kernels are not watched.
    """
    outside: list[int] = []
    if how_kernels_run() == COMPILED:
        yield outside
        return

    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    inside = np.unique(np.concatenate([_addresses(each) for each in allowed]))

    def load(pointers: Any, mask: Any, *rest: Any) -> Any:
        wanted = pointers.data.astype(np.uint64)
        good = inside[np.searchsorted(inside, wanted).clip(max=len(inside) - 1)] == wanted
        outside.extend(pointers.data[mask.data.astype(bool) & ~good].tolist())
        return original(pointers, interpreter.TensorHandle(mask.data.astype(bool) & good, mask.dtype), *rest)

    original = builder.create_masked_load
    builder.create_masked_load = load
    try:
        yield outside
    finally:
        del builder.create_masked_load  # the class has the original


def _addresses(tensor: Tensor) -> np.ndarray:
    """Of each element."""
    elements = np.zeros(1, np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements = (elements[:, None] + np.arange(size) * stride).ravel()
    return (tensor.data_ptr() + elements * tensor.element_size()).astype(np.uint64)
