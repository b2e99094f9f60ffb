"""Random matrices of codes, and what they stand for in float64."""

import torch

from minillm.kernels.arguments import CodeMatrix
from minillm.quantization.int4 import pack


def int8_matrix(rows, columns, device):
    codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, device=device)
    codes[0], codes[1] = -128, 127  # the extremes in every place
    scales = (torch.rand(rows, device=device) + 0.5) / 127 / columns**0.5
    return CodeMatrix(8, codes.view(torch.int32), scales), codes.double() * scales.double()[:, None]


def int4_matrix(rows, columns, group, zeros, dtype, device):
    codes = torch.randint(-8, 8, (rows, columns), dtype=torch.int8, device=device)
    codes[0], codes[1] = -8, 7
    scales = ((torch.rand(rows, columns // group, device=device) + 0.5) / 8 / columns**0.5).to(dtype)
    points = torch.randint(-8, 8, scales.shape, dtype=torch.int8, device=device) if zeros else None
    centered = codes.double()
    if points is not None:
        centered = centered - points.double().repeat_interleave(group, 1)
    dense = centered * scales.double().repeat_interleave(group, 1)
    return CodeMatrix(4, pack(codes).view(torch.int32), scales, points), dense
