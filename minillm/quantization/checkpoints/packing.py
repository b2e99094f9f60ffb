"""Codes in 32-bit numbers, and columns in groups: what several layouts share.  Lesson 06."""

import torch
from torch import Tensor

from minillm.errors import ConfigError
from minillm.quantization.int4 import unpack
from minillm.quantization.weight import Codes


def unpack_numbers(numbers: Tensor, bits: int = 4) -> Tensor:
    """[rows, n] int32, lowest bits first -> [rows, 8 n] (8 bits: 4 n) int8: codes from -8 to 7 (-128 to 127).

    Files store unsigned codes; half of their range is subtracted.
    """
    packed = numbers.contiguous().view(torch.uint8)
    return unpack(packed) if bits == 4 else packed.bitwise_xor(128).view(torch.int8)


def in_group_order(codes: Codes, groups: Tensor) -> Codes:
    """Codes whose columns lie in the order of the inputs, with each column's group [in] -> groups of neighbors.

    GPTQ's act-order assigns inputs to groups by their importance (Frantar et al. 2022's code, "static groups"). Raises
    ConfigError unless all groups have the same number of columns.
    """
    count = codes.scales.shape[1]
    if not groups.long().sort().values.equal(group_of_each(len(groups), count)):
        raise ConfigError(f"every group from 0 to {count - 1} must have {len(groups) // count} inputs")
    order = groups.long().argsort(stable=True)
    return Codes(codes.codes[:, order], codes.scales, codes.zeros, order)


def group_of_each(inputs: int, groups: int) -> Tensor:
    """[in] int64: the group of each input if groups consist of neighbors."""
    return torch.arange(inputs) // (inputs // groups)


def check_zero_points_are(symmetric: tuple[int, ...], zeros: Tensor, module: str, stored: int) -> None:
    """Raise ConfigError unless all zero points have one value, one of `symmetric`.

    zeros, symmetric: as the signed codes are; stored: what a file adds to them.
    """
    levels = zeros.unique().tolist()
    if len(levels) != 1 or levels[0] not in symmetric:
        wanted = " or all ".join(str(each + stored) for each in symmetric)
        values = ", ".join(str(each + stored) for each in levels[:4]) + (", ..." if len(levels) > 4 else "")
        raise ConfigError(
            f"{module}.qzeros has zero points {values}, but the configuration calls the weights symmetric, which "
            f"makes them all {wanted}: correct the configuration, or copy the file again"
        )
