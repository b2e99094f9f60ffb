"""Triton's kernels on any machine: compiled on a GPU, interpreted without one; and memory that shows a missing mask.

Lessons 03 and 04.

Triton decides when it is first imported which of the two it is, for the whole process. So a lesson calls
`triton_here()` before it imports triton.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from minillm.errors import ConfigError, MissingPackage

if TYPE_CHECKING:
    from torch import Tensor

GUARD = 4096  # elements on either side of a tensor that nobody should read or write

INTERPRETED, COMPILED = "interpreted", "compiled"


def triton_here() -> str:
    """Import triton so that kernels run on this machine: "compiled" on the GPU tier, "interpreted" on the CPU's.

    Raises MissingPackage where triton does not exist, ConfigError where it was imported for a GPU already.
    """
    from .tiers import tier

    if tier().name == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton
    except ImportError as error:
        raise MissingPackage(
            "this lesson runs Triton kernels, and triton exists for Linux only: use a container, WSL or Colab"
        ) from error
    how = how_kernels_run()
    if tier().name == "cpu" and how == COMPILED:
        raise ConfigError(
            f"triton {triton.__version__} was imported before triton_here() could ask it to interpret, and now waits "
            "for a GPU: restart the kernel and run the cells from the top"
        )
    return how


def how_kernels_run() -> str:
    """What triton, which is imported here, does with a kernel: its own library's functions show it."""
    import triton.language as tl
    from triton.runtime import JITFunction

    return COMPILED if isinstance(tl.cdiv, JITFunction) else INTERPRETED


def kernel_device() -> str:
    """Where the tensors must be that a kernel of this process gets: "cuda" or "cpu"."""
    return "cuda" if how_kernels_run() == COMPILED else "cpu"


def surrounded(tensor: Tensor, by: float) -> tuple[Tensor, Tensor]:
    """A copy of `tensor` with `GUARD` elements of value `by` before and behind it in memory; and all of that memory.

    A kernel that reads past the end finds `by` there; one that writes past it leaves its trace (see `untouched`), and
    neither reaches memory of anybody else.
    """
    memory = tensor.new_full((tensor.numel() + 2 * GUARD,), by)
    inside = memory[GUARD : GUARD + tensor.numel()].view(tensor.shape)
    inside.copy_(tensor)
    return inside, memory


def untouched(memory: Tensor, by: float) -> bool:
    """Whether both guards around a `surrounded` tensor still hold `by`."""
    return bool((memory[:GUARD] == by).all() and (memory[-GUARD:] == by).all())
