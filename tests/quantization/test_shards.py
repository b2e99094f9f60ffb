"""A shard of a quantized matrix is the same part of the whole matrix's values, in every format."""

import pytest
import torch

from minillm.errors import ConfigError
from minillm.quantization import (
    Codes,
    Dense,
    Fp8,
    Int4,
    Int8,
    Mxfp4,
    Nvfp4,
    Pruned,
    Shard,
    Sparse24,
)

FORMATS = [
    Dense(),
    Int8(),
    Fp8(),
    Fp8(scales="tensor"),
    Int4(group_size=16),
    Int4(group_size=16, symmetric=False),
    Int4(group_size=8, act_order=True),
    Nvfp4(),
    Mxfp4(),
    Sparse24(),
    Pruned(sparsity=0.3),
]
ROWS, INPUTS = 12, 128
SHARDS = [
    Shard(range(ROWS), range(INPUTS)),
    Shard(range(5, 12), range(INPUTS)),
    Shard(range(ROWS), range(64)),
    Shard(range(3, 9), range(32, 96)),
]
DTYPE, CPU = torch.float32, torch.device("cpu")


def whole(format, matrix, bias=None):
    weight = format.empty(ROWS, INPUTS, bias is not None, dtype=DTYPE, device=CPU)
    weight.load("weight", range(ROWS), [matrix])
    if bias is not None:
        weight.load("bias", range(ROWS), [bias])
    return weight


@pytest.mark.parametrize("shard", SHARDS, ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_shard_holds_its_part_of_the_whole_matrix(format, shard):
    matrix = torch.randn(ROWS, INPUTS) * torch.linspace(0.1, 3, ROWS)[:, None]
    wanted = whole(format, matrix)
    part = slice(shard.rows.start, shard.rows.stop), slice(shard.columns.start, shard.columns.stop)
    rows = range(2, 2 + len(shard.rows))  # after those of another module
    loaded, filled = (format.empty(rows.stop, len(shard.columns), False, dtype=DTYPE, device=CPU) for _ in range(2))
    loaded.load("weight", rows, iter(matrix.split(5)), shard)
    assert loaded.dequantize()[2:].equal(wanted.dequantize()[part])
    if (codes := wanted.read(range(ROWS))) is not None:  # as from a quantized checkpoint
        filled.fill(rows, codes.cut(shard))
        assert filled.dequantize()[2:].equal(wanted.dequantize()[part])


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_the_bias_is_in_one_of_the_shards_that_divide_the_inputs(format):
    bias = torch.randn(ROWS)
    halves = [Shard(range(4, ROWS), range(64)), Shard(range(4, ROWS), range(64, INPUTS))]
    weights = [format.empty(ROWS - 4, 64, True, dtype=DTYPE, device=CPU) for _ in halves]
    for weight, shard in zip(weights, halves, strict=True):
        weight.load("bias", range(ROWS - 4), iter(bias.split(5)), shard)
    assert weights[0].bias.equal(bias[4:]) and not weights[1].bias.any()


@pytest.mark.parametrize("columns", [range(8, 64), range(40)], ids=str)
@pytest.mark.parametrize("format", [Int4(group_size=16), Nvfp4(), Mxfp4()], ids=str)
def test_a_shard_cannot_divide_a_group(format, columns):
    codes = whole(format, torch.randn(ROWS, INPUTS)).read(range(ROWS))
    with pytest.raises(ConfigError, match="do not begin and end with groups of (16|32) inputs"):
        codes.cut(Shard(range(ROWS), columns))


def test_a_shard_cannot_have_some_of_the_inputs_in_another_order():
    order = torch.arange(INPUTS).flip(0)
    codes = Codes(torch.ones(ROWS, INPUTS, dtype=torch.int8), torch.ones(ROWS, 8), order=order)
    with pytest.raises(ConfigError, match="act-order"):
        codes.cut(Shard(range(ROWS), range(64)))
    assert codes.cut(Shard(range(3), range(INPUTS))).order.equal(order)
