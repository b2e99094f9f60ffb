"""Random matrices of codes, and what they stand for in float64."""

import torch

from minillm.kernels.arguments import CodeMatrix
from minillm.quantization.int4 import pack


def int8_matrix(rows, columns, device):
    codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, device=device)
    codes[0], codes[1] = -128, 127  # the extremes in every place
    scales = (torch.rand(rows, device=device) + 0.5) / 127 / columns**0.5
    return CodeMatrix(8, codes.view(torch.int32), scales), codes.double() * scales.double()[:, None]


def fp8_codes(*shape, device):
    """Random finite e4m3 numbers, of every size; their largest are in rows 0 and 1."""
    codes = (torch.randn(shape, device=device) * 2.0 ** torch.randint(-10, 7, shape, device=device)).clamp(-448, 448)
    codes[:2] = torch.tensor([-448.0, 448.0], device=device)[: len(codes), None]
    return codes.to(torch.float8_e4m3fn)


def fp8_matrix(rows, columns, device):
    codes = fp8_codes(rows, columns, device=device)
    scales = (torch.rand(rows, device=device) + 0.5) / 100 / columns**0.5
    return CodeMatrix(8, codes.view(torch.int32), scales, fp8=True), codes.double() * scales.double()[:, None]


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
