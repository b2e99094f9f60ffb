"""Parts that the kernels of a decode step share: launches that overlap, and the activation.  Lesson 11."""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """Wait until the previous kernel has written its results, then let the next kernel start.

    So when a kernel starts, every kernel before the previous one is complete. Before the wait it may read what was
    written earlier than that (weights, earlier keys, the residual sum, and the block table, length and angles from the
    start of the step), and it must write nothing.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def normed(x, weight, eps, COLUMNS: tl.constexpr):
    """x, of any shape and zero beyond its COLUMNS numbers, scaled to a root mean square of 1, times weight."""
    return x * tl.rsqrt(tl.sum(x * x) / COLUMNS + eps) * weight


@triton.jit
def capped(x, SOFT_CAP: tl.constexpr):
    """SOFT_CAP * tanh(x / SOFT_CAP); x if SOFT_CAP is 0."""
    if SOFT_CAP > 0:
        x = SOFT_CAP * (2.0 * tl.sigmoid(x * (2.0 / SOFT_CAP)) - 1.0)
    return x


@triton.jit
def activated(gate, GELU: tl.constexpr):
    """gelu_tanh(gate), or silu(gate)."""
    slope = 1.0
    if GELU:
        slope = 1.5957691216057308 * (1.0 + 0.044715 * gate * gate)  # 2 * sqrt(2 / pi)
    return gate * tl.sigmoid(gate * slope)


class RowsConfig(NamedTuple):
    """A launch configuration of a kernel that multiplies one row by a matrix."""

    programs: int
    tile: int  # rows of the matrix that a program works on at once
    warps: int


@lru_cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors; 2 without a GPU, where programs are interpreted one by one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@lru_cache
def has_dependent_launch(device: torch.device) -> bool:
    """Return whether the device has programmatic dependent launch: compute capability 9.0 and above."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Return how to launch a kernel that calls `wait_for_inputs(DEPENDENT)`: if possible, before the last one ends."""
    return {"DEPENDENT": True, "launch_pdl": True} if has_dependent_launch(device) else {"DEPENDENT": False}
