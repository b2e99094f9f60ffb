"""Blocks that left a window are never read: here they hold NaN or belong to another row."""

import pytest
import torch

from minillm.ops import AttentionOptions, Rows, reference
from tests.kernels.compare import COMPILED, DTYPES, assert_close, double, paged_cache, random_tensor, released
from tests.proofs import pairwise

kernels = pytest.importorskip("minillm.ops.triton", reason="triton is not installed here")
from minillm.kernels import fixed_order, paged_attention  # noqa: E402  needs triton

pytestmark = [
    pytest.mark.explore,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # the interpreter's numpy: 1 / inf is 0
]

DIM, BLOCK_SIZE = 16, 8
LENGTHS = [41, 5, 56, 24]  # a remainder of 1, shorter than a block, shorter than most windows, whole blocks
AXES = {
    "dtype": DTYPES if COMPILED else [torch.float32],
    "heads, kv_heads, soft_cap": [(4, 1, None), (4, 2, 5.0)],
    "window": [1, 7, 8, 9, 16, 33] if COMPILED else [1, 9, 33],
    "entries": ["kept", "reused"],
}


@pairwise(AXES | {"queries, splits": [(1, 1), (1, 4), (3, 2)]})
def test_decode_never_reads_a_released_block(
    dtype, heads, kv_heads, soft_cap, window, entries, queries, splits, device, monkeypatch
):
    monkeypatch.setattr(paged_attention, "decode_splits", lambda *_: splits)
    cache, table, lengths = paged_cache(LENGTHS, kv_heads, DIM, BLOCK_SIZE, dtype, device)
    q = random_tensor(len(LENGTHS), queries, heads, DIM, dtype=dtype, device=device)
    options = AttentionOptions(DIM**-0.5, window, soft_cap)
    wanted = reference.decode_attention(q.double(), double(cache), Rows.decoding(table, lengths, queries), options)
    cache, table = released(cache, table, lengths, queries, window, entries)
    got = kernels.decode_attention(q, cache, Rows.decoding(table, lengths, queries), options)
    assert_close("decode_attention, blocks released", got, wanted, dtype)
    exact = fixed_order.attention(q.flatten(0, 1), cache, Rows.decoding(table, lengths, queries), options)
    assert_close("fixed_order, blocks released", exact.view(q.shape), wanted, dtype)


@pairwise(AXES)
def test_prefill_never_reads_a_released_block(dtype, heads, kv_heads, soft_cap, window, entries, device):
    """Chunks at a row's end: longer than a tile, the whole row, one query, one more than a block."""
    cache, table, lengths = paged_cache(LENGTHS, kv_heads, DIM, BLOCK_SIZE, dtype, device)
    queries = torch.tensor([19, 5, 1, 9], device=device)
    starts = torch.tensor([0, *queries.cumsum(0)], dtype=torch.int32, device=device)
    q = random_tensor(int(queries.sum()), heads, DIM, dtype=dtype, device=device)
    options = AttentionOptions(DIM**-0.5, window, soft_cap)
    wanted = reference.prefill_attention(q.double(), double(cache), Rows(table, lengths, starts, 19), options)
    cache, table = released(cache, table, lengths, queries, window, entries)
    got = kernels.prefill_attention(q, cache, Rows(table, lengths, starts, 19), options)
    assert_close("prefill_attention, blocks released", got, wanted, dtype)
    exact = fixed_order.attention(q, cache, Rows(table, lengths, starts, 19), options)
    assert_close("fixed_order, blocks released", exact, wanted, dtype)
