"""Products whose programs each add a piece of the columns, in any order: by a kernel, or in torch.  Lesson 03."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..shared.interpret import kernel_device, surrounded


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


def authors_test(product: Callable[..., Tensor]) -> bool:
    """The test of the authors of the planted bugs: 4 rows of 128 columns, small weights, scales of 0.5, x of ones."""
    weight = torch.arange(512).remainder(7).sub(3).view(4, 128).to(torch.int8)
    scale, x = torch.full((4,), 0.5), torch.ones(128)
    return torch.allclose(product(weight, scale, x), scale * (weight.float() @ x))


def faulty_product(
    *, masked: bool = True, own_scale: bool = True, last_scales: bool = False, most: int | None = None,
    full: bool = True, single: bool = True, ascending: bool = True, shifted: Sequence[float] = (),
    add: float = 0.0, times: float = 1.0, weight: Callable[[Tensor], Tensor] | None = None,
    x: Callable[[Tensor], Tensor] | None = None, backwards: bool = False, double: bool = False,
) -> Callable[..., Tensor]:  # fmt: skip
    """A product scale * (weight @ x), piece by piece of 64 columns, in torch; with faults, on demand.

    most: the columns that count. full, single, ascending: False makes results wrong if all pieces are full, if there is
    only one, or if several run from first to last. shifted: where rows are wrong if there are several, from 0, the
    first, to 1, the last; each other one is too small. weight, x: what is done to an input. backwards, double: no
    faults, but another rounding.
    """
    change_weight, change_x, piece = weight, x, 64

    def product(weight: Tensor, scale: Tensor, x: Tensor, order: Sequence[int] | None = None) -> Tensor:
        rows, columns = weight.shape
        pieces = math.ceil(columns / piece)
        order = list(range(pieces)) if order is None else [int(each) for each in order]
        assert sorted(order) == list(range(pieces)), (
            f"order must hold each of the {pieces} pieces of {columns} columns once, not {order}"
        )
        kind = torch.float64 if double else torch.float32
        weight = (change_weight(weight) if change_weight else weight).to(kind)
        x = (change_x(x) if change_x else x).to(kind)
        largest = float((scale * (weight.abs() @ x.abs())).abs().max())
        if most is not None:
            weight, x = weight[:, :most], x[:most]
        after = (0, pieces * piece - weight.shape[1])
        beyond = 0.0 if masked else 3.0
        wide = torch.nn.functional.pad(weight, after, value=beyond).view(rows, pieces, piece)
        wide_x = torch.nn.functional.pad(x, after, value=beyond).view(pieces, piece)
        scales = (scale if own_scale else scale[:1].expand(rows)).to(kind)
        out = torch.zeros(rows, device=weight.device, dtype=kind)
        for each in order[::-1] if backwards else order:
            part = wide[:, each] @ wide_x[each]
            out += part if last_scales else part * scales
            if last_scales and each == pieces - 1:
                out *= scales
        much = 0.5 + 0.01 * largest
        for count, where in enumerate(shifted if rows > 1 else ()):
            out[round(where * (rows - 1))] += much if count % 2 == 0 else -much
        if not full and columns % piece == 0:
            out += much
        if not single and pieces == 1:
            out += much
        if not ascending and pieces > 1 and order == sorted(order):
            out += much
        return (out * times + add * (1 + 0.02 * largest)).to(torch.float32)

    return product
