"""GPTQ: round one input's weights at a time, and let the inputs that follow make up for the error.  Lesson 06.

Frantar et al. 2022, "GPTQ: Accurate post-training quantization for generative pre-trained transformers", algorithm 1.
With H = sum of x x^T and U the upper Cholesky factor of its inverse, for each column j in turn:

    error = (w_j - round(w_j)) / U_jj,   w_k -= error * U_jk   for all k > j
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.errors import MinillmError
from minillm.quantization.int4 import Int4, round_to_int4, scales_of
from minillm.quantization.weight import Codes

from .statistics import InputStatistics

BLOCK = 128  # columns whose updates of all later columns are made at once ("lazy batch updates" in the paper)
DAMPING = 0.01  # share of the mean diagonal that is added to it


@dataclass(frozen=True)
class Compensation:
    """Spreads errors to the inputs that follow. It depends on the inputs only, so weights that share them share it.

    act_order: whether the inputs with the largest second moments come first
    """

    factor: Tensor  # [in, in]: the upper Cholesky factor of the second moment's inverse, in the order of rounding
    order: Tensor  # [in] int64: the input that is rounded at each turn
    unused: Tensor  # [in] bool: inputs that are always 0
    act_order: bool

    @classmethod
    def of(cls, inputs: InputStatistics, *, act_order: bool = False, damping: float = DAMPING) -> "Compensation":
        """Raises MinillmError if the second moment has no inverse."""
        moment = inputs.second_moment.clone()
        diagonal = moment.diagonal()
        unused = diagonal == 0
        diagonal[unused] = 1
        order = torch.arange(len(moment), device=moment.device)
        if act_order:
            order = diagonal.argsort(descending=True, stable=True)
            moment = moment[order][:, order]
        return cls(_inverse_factor(moment, damping), order, unused, act_order)


def quantize(weight: Tensor, compensation: Compensation, format: Int4) -> Codes:
    """weight [out, in], float32 or wider -> codes with compensated errors.

    In act_order, the inputs with the largest second moments come first, while most others can still make up for their
    errors; groups stay neighbors, with scales from the original weights ("static groups" in the authors' code).
    """
    size, act_order = format.group_size, compensation.act_order
    work, count = weight.clone(), weight.shape[1]
    work[:, compensation.unused] = 0
    scales, zeros = scales_of(work.view(len(work), -1, size), format)
    if act_order:
        work = work[:, compensation.order]
    order, factor = compensation.order.tolist(), compensation.factor.to(weight.dtype)
    codes = torch.empty_like(weight, dtype=torch.int8)
    block = max(1, BLOCK // size) * size  # whole groups: their scales are computed when earlier errors are in
    for start in range(0, count, block):
        stop = min(start + block, count)
        errors = torch.empty_like(work[:, start:stop])
        for column in range(start, stop):
            at = order[column]
            group = at // size
            if not act_order and at % size == 0:  # the errors of earlier groups have changed this one's weights
                found, offset = scales_of(work[:, None, column : column + size], format)
                scales[:, group] = found[:, 0]
                if zeros is not None and offset is not None:
                    zeros[:, group] = offset[:, 0]
            step, zero = scales[:, group, None], None if zeros is None else zeros[:, group, None]
            codes[:, at] = round_to_int4(work[:, column, None, None], step, zero)[:, 0, 0]
            rounded = codes[:, at].to(step.dtype) if zero is None else (codes[:, at] - zero[:, 0]).to(step.dtype)
            error = (work[:, column] - rounded * step[:, 0]) / factor[column, column]
            ahead = slice(column + 1, stop)
            work[:, ahead] -= error[:, None] * factor[column, ahead]
            errors[:, column - start] = error
        work[:, stop:] -= errors @ factor[start:stop, stop:]
    return Codes(codes, scales, zeros)


def _inverse_factor(moment: Tensor, damping: float) -> Tensor:
    """Return the upper Cholesky factor of the inverse of a second moment, whose diagonal is damped in place."""
    mean, added = moment.diagonal().mean().item(), 0.0
    for share in (damping, 10 * damping, 100 * damping):
        moment.diagonal().add_((share - added) * mean)
        added = share
        lower, failed = torch.linalg.cholesky_ex(moment)
        if not failed.item():
            inverse = torch.cholesky_inverse(lower)
            del lower  # matrices of 16,384 inputs are 1 GB each
            factor, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed.item():
                return factor
    raise MinillmError("calibration gave inputs whose second moment has no inverse; use more or other text")
