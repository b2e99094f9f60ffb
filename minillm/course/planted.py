"""Run a kernel whose programs each add a piece of the columns, in any order of its programs.  Lesson 03."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .interpret import kernel_device, surrounded


def product_by(kernel: Any, piece: int) -> Callable[..., Tensor]:
    """A function scale * (weight @ x) that a kernel computes, `piece` columns per program.

    product(weight [rows, columns] int8, scale [rows], x [columns], order=None) -> [rows]. order: the pieces,
    0 to cdiv(columns, piece) - 1, in the order in which their programs run; None: one launch of all. The inputs lie
    in memory that holds 99 everywhere else.
    """
    import triton

    device = kernel_device()

    def product(weight: Tensor, scale: Tensor, x: Tensor, order: Sequence[int] | None = None) -> Tensor:
        rows, columns = weight.shape
        given = [surrounded(each.to(device), by=99)[0] for each in (weight, scale, x)]
        out = torch.zeros(rows, device=device)
        launches = [(0, triton.cdiv(columns, piece))] if order is None else [(each, 1) for each in order]
        for first, programs in launches:
            sizes = {"ROW_TILE": triton.next_power_of_2(rows), "PIECE": piece}
            kernel[(programs,)](*given, out, first, rows, columns, **sizes)
        return out.to(weight.device)

    return product
