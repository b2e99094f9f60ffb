"""Run Triton kernels on any machine, compiled or interpreted, and detect missing masks.  Lessons 03 and 04.

Whether Triton compiles or interprets is fixed for the whole process when it is first imported. So a lesson calls
`triton_here()` before it imports triton.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from minillm.errors import ConfigError, MissingPackage

if TYPE_CHECKING:
    from torch import Tensor

GUARD = 4096  # elements on either side of a tensor that no kernel may read or write

INTERPRETED, COMPILED = "interpreted", "compiled"


def triton_here() -> str:
    """Import triton so that kernels run on this machine: "compiled" on the GPU tier, "interpreted" on the CPU's.

    Raises MissingPackage without triton, ConfigError if it was already imported for a GPU.
    """
    from .tiers import tier

    if tier().name == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton
    except ImportError as error:
        raise MissingPackage(
            "this lesson runs Triton kernels, and triton is available only for Linux: use a container, WSL or Colab"
        ) from error
    how = how_kernels_run()
    if tier().name == "cpu" and how == COMPILED:
        raise ConfigError(
            f"triton {triton.__version__} was imported before triton_here() could ask it to interpret, and now waits "
            "for a GPU: restart the kernel and run the cells from the top"
        )
    return how


def how_kernels_run() -> str:
    """Whether triton, imported here, compiles or interprets kernels, as its own library's functions show."""
    import triton.language as tl
    from triton.runtime import JITFunction

    return COMPILED if isinstance(tl.cdiv, JITFunction) else INTERPRETED


def kernel_device() -> str:
    """The device of the tensors that kernels of this process take: "cuda" or "cpu"."""
    return "cuda" if how_kernels_run() == COMPILED else "cpu"


def surrounded(tensor: Tensor, by: float) -> tuple[Tensor, Tensor]:
    """(A copy of `tensor` between two guards of GUARD elements of value `by`, the memory of all three).

    A kernel that reads past the end reads `by`; one that writes past it changes a guard (see `untouched`). Neither
    reaches other memory.
    """
    memory = tensor.new_full((tensor.numel() + 2 * GUARD,), by)
    inside = memory[GUARD : GUARD + tensor.numel()].view(tensor.shape)
    inside.copy_(tensor)
    return inside, memory


def untouched(memory: Tensor, by: float) -> bool:
    """Whether both guards around a `surrounded` tensor still hold `by`."""
    return bool((memory[:GUARD] == by).all() and (memory[-GUARD:] == by).all())
