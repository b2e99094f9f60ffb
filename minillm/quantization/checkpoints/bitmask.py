"""Sparse matrices as values and bits, as older versions of compressed-tensors stored them.  Lesson 08.

    sparse-24-bitmask   compressed [rows, in / 2], bitmask [rows, in / 8] uint8, shape [2, 1]
    sparse-bitmask      compressed [n], bitmask [rows, in / 8] uint8, row_offsets [rows] int64, shape [2]

A bit says whether a weight is stored; the first column has a byte's lowest bit, and a row's last byte is padded with
zeros. Values follow each other row by row, and row_offsets says where each row's begin.
https://github.com/vllm-project/compressed-tensors/tree/0.10.2, compressors/sparse_compressors. Version
0.20 does not read these files, and neither does transformers with it.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.errors import ConfigError
from minillm.quantization.sparse import KEPT, OF, Sparse, Sparse24, of_values
from minillm.quantization.weight import Codes

from .layout import ANY, SCALES, Stored

SPARSE24, UNSTRUCTURED = "sparse-24-bitmask", "sparse-bitmask"


def tensors(format: Sparse, rows: int, inputs: int) -> dict[str, Stored]:
    two_four = isinstance(format, Sparse24)
    stored = {
        "compressed": Stored((rows, inputs * KEPT // OF) if two_four else (ANY,), SCALES),
        "bitmask": Stored((rows, -(-inputs // 8)), (torch.uint8,)),
        "shape": Stored((2, 1) if two_four else (2,), (torch.int64,), required=False),
    }
    return stored if two_four else stored | {"row_offsets": Stored((rows,), (torch.int64,), required=False)}


def write(matrix: Tensor, format: Sparse) -> dict[str, Tensor]:
    """matrix [rows, in], whose zeros are not stored."""
    two_four = isinstance(format, Sparse24)
    kept = format.kept(matrix) if two_four else matrix != 0
    shape, values = torch.tensor(matrix.shape), matrix[kept]
    stored = {
        "compressed": values.view(len(matrix), -1) if two_four else values,
        "bitmask": pack_bits(kept),
        "shape": shape[:, None] if two_four else shape,
    }
    counts = kept.sum(-1)
    return stored if two_four else stored | {"row_offsets": counts.cumsum(0) - counts}


def codes(module: str, inputs: int, stored: Mapping[str, Tensor]) -> Codes:
    """Undo `write`. Raises ConfigError if there are not as many values as bits."""
    kept, values = unpack_bits(stored["bitmask"], inputs), stored["compressed"].flatten()
    if (bits := int(kept.sum())) != len(values):
        raise ConfigError(f"{module}.bitmask says that {bits} values are stored, but there are {len(values)}")
    matrix = torch.zeros(kept.shape, dtype=values.dtype)
    matrix[kept] = values
    return of_values(matrix)


def pack_bits(bits: Tensor) -> Tensor:
    """[rows, in] bool -> [rows, in / 8] uint8."""
    padded = F.pad(bits.to(torch.uint8), (0, -bits.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (padded << torch.arange(8, device=bits.device)).sum(-1).to(torch.uint8)


def unpack_bits(packed: Tensor, inputs: int) -> Tensor:
    """Return the inverse of `pack_bits`; inputs: columns, without the padding."""
    return (packed[..., None] >> torch.arange(8, device=packed.device) & 1).flatten(-2)[:, :inputs].bool()
