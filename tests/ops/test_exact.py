"""`ops/exact.py`: what the reference computes, with bits that do not depend on the other rows."""

import pytest
import torch

from minillm.kv_cache import LayerCache
from minillm.ops import Rows, exact, reference
from minillm.ops.signatures import AttentionOptions
from minillm.quantization import DenseWeight
from tests.kernels.compare import TOLERANCE, paged_cache

TOLERANCES = TOLERANCE | {torch.float64: 1e-12}
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.fixture(autouse=True)
def same_inputs():
    torch.manual_seed(0)


def near(found, wanted, dtype):
    error = (found.double() - wanted.double()).norm() / wanted.double().norm()
    assert found.dtype == dtype and error < TOLERANCES[dtype], error


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_the_reference_in_tiles_of_one_shape(dtype):
    weight = DenseWeight(torch.randn(40, 72, dtype=dtype), torch.randn(40, dtype=dtype))
    x = torch.randn(30, 72, dtype=dtype)
    whole = exact.linear(x, weight)
    near(whole, reference.linear(x, weight), dtype)
    for count in (1, 2, 3, 5, 8, 9, 30):
        assert torch.equal(exact.linear(x[30 - count :], weight), whole[30 - count :]), count
    assert exact.linear(x[:0], weight).shape == (0, 40)
    assert torch.equal(exact.linear(x.view(5, 6, 72), weight), whole.view(5, 6, 40))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_an_activation_does_not_depend_on_where_a_number_is(activation, dtype, threads):
    """With 7,001 numbers a row, threads share rows and vectors do not fill them."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        gate_up = 4 * torch.randn(17, 14002).to(dtype)
        whole = exact.gated_activation(gate_up, activation)
        near(whole, reference.gated_activation(gate_up, activation), dtype)
        for part in (slice(0, 1), slice(1, 3), slice(3, 17), slice(16, 17)):
            assert torch.equal(exact.gated_activation(gate_up[part].clone(), activation), whole[part]), part
        shifted = exact.gated_activation(torch.cat([gate_up[:, 3:7001], gate_up[:, 7004:]], 1), activation)
        assert torch.equal(shifted, whole[:, 3:])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, kv_heads", [(4, 1), (6, 2), (3, 3)])
@pytest.mark.parametrize("given", [{}, {"window": 70}, {"soft_cap": 3.0}, {"window": 5}])
def test_attention_of_a_query_does_not_depend_on_other_queries_and_rows(dtype, heads, kv_heads, given):
    options, lengths = AttentionOptions(0.3, **given), [700, 65, 64, 3]
    cache, table, _ = paged_cache(lengths, kv_heads, 16, 8, dtype, "cpu")
    queries = [torch.randn(length, heads, 16).to(dtype) for length in lengths]

    def attended(parts):
        """The last `count` queries up to `end` of some rows, in one step: of each row's last `count` up to `end`."""
        counts = [count for _, count, _ in parts]
        start = torch.tensor([0, *counts]).cumsum(0).int()
        ends = torch.tensor([end for *_, end in parts], dtype=torch.int32)
        q = torch.cat([queries[row][end - count : end] for row, count, end in parts])
        rows = Rows(table[[row for row, *_ in parts]], ends, start, max(counts))
        return exact.prefill_attention(q, cache, rows, options), q, rows

    found, q, rows = attended([(row, length, length) for row, length in enumerate(lengths)])
    near(found, reference.prefill_attention(q, cache, rows, options), dtype)
    expected = found.split(lengths)
    for parts in (
        [(0, 1, 700)],
        [(0, 1, 500)],
        [(0, 5, 322)],  # a chunk begins within its tile
        [(0, 1, 64)],
        [(1, 1, 65), (0, 1, 129), (3, 1, 3)],
        [(0, 6, 600), (1, 6, 65), (2, 6, 64)],
        [(3, 2, 3), (0, 90, 150), (2, 3, 64)],
    ):
        some = attended(parts)[0].split([count for _, count, _ in parts])
        for (row, count, end), each in zip(parts, some, strict=True):
            assert torch.equal(each, expected[row][end - count : end]), (parts, row)
    one = Rows.decoding(table[:2], torch.tensor([699, 64], dtype=torch.int32))
    decoded = exact.decode_attention(torch.stack([queries[0][698:699], queries[1][63:64]]), cache, one, options)
    assert torch.equal(decoded[0, 0], expected[0][698]) and torch.equal(decoded[1, 0], expected[1][63])


def test_padding_rows_give_zeros_and_read_nothing():
    cache = LayerCache(torch.full((2, 4, 1, 16), torch.nan), torch.full((2, 4, 1, 16), torch.nan))
    rows = Rows.decoding(torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    assert (exact.decode_attention(torch.ones(1, 1, 2, 16), cache, rows, AttentionOptions(1.0)) == 0).all()


def test_the_head_and_the_hadamard_matrix_are_the_reference():
    hidden, weight = torch.randn(3, 24), DenseWeight(torch.randn(50, 24))
    near(exact.lm_head(hidden, weight, 2.0), reference.lm_head(hidden, weight, 2.0), torch.float32)
    for inverse in (False, True):
        near(exact.hadamard(hidden, inverse), reference.hadamard(hidden, inverse), torch.float32)
