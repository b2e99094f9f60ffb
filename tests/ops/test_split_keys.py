"""Attention over parts of the keys, merged, is attention over all of them."""

import pytest
import torch

from minillm import ops
from minillm.kv_cache.layer_cache import CacheSpec
from minillm.kv_cache.split_pages import BlockShare
from minillm.ops import AttentionOptions, Rows, reference
from minillm.ops.split_keys import merged, partial_attention

BLOCK, HEADS, DIM = 8, 4, 16
LENGTHS = [1, 3, 17, 0, 40]
OPTIONS = {
    "all keys": AttentionOptions(0.3),
    "window and soft cap": AttentionOptions(0.3, window=8, soft_cap=2.0),
    "rotated here": AttentionOptions(0.3, rotary=torch.randn(40, 2, DIM, dtype=torch.float64)),
}


def caches(spec: CacheSpec, count: int):
    """The cache of one device, and its parts on `count`; and the block table. Slots that no row has hold NaN."""
    width = -(-max(LENGTHS) // BLOCK)
    table = torch.randperm(len(LENGTHS) * width).view(len(LENGTHS), width).int()
    slots = torch.cat([table[row].long().repeat_interleave(BLOCK)[:n] * BLOCK for row, n in enumerate(LENGTHS)])
    slots += torch.cat([torch.arange(n) % BLOCK for n in LENGTHS])
    k, v = (torch.randn(len(slots), 1, DIM, dtype=torch.float64) for _ in "kv")
    shares = [BlockShare(0, 1), *(BlockShare(index, count) for index in range(count))]
    made = [share.spec(spec).allocate(table.numel(), BLOCK, torch.device("cpu")) for share in shares]
    for cache, share in zip(made, shares, strict=True):
        if cache.k_scale is None:
            cache.k.fill_(torch.nan), cache.v.fill_(torch.nan)
        cache.write(k, v, share.slots(slots))
    return *made, table


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("kind", ["float64", "int8"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("queries", [1, 3, None])
def test_parts_merge_to_the_whole(queries, options, kind, count):
    """queries: of each decode row; None: those of a prompt."""
    whole, *parts, table = caches(CacheSpec(1, DIM, getattr(torch, kind)), count)
    lengths, run = torch.tensor(LENGTHS, dtype=torch.int32), ops.on("cpu")
    if queries is None:
        counts = [1, 2, 17, 0, 9]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        rows = Rows(table, lengths, starts, max(counts))
        q = torch.randn(sum(counts), HEADS, DIM, dtype=torch.float64)
        wanted = reference.prefill_attention(q, whole, rows, options)
    else:
        rows = Rows.decoding(table, lengths, queries)
        q = torch.randn(len(LENGTHS) * queries, HEADS, DIM, dtype=torch.float64)
        wanted = reference.decode_attention(q.unflatten(0, (-1, queries)), whole, rows, options).flatten(0, 1)
    found = [partial_attention(run, q, part, rows, options, queries is not None) for part in parts]
    outs, log_sums = (torch.stack(each) for each in zip(*found, strict=True))
    assert (log_sums == -torch.inf).any(), "some queries see no key of a part"
    torch.testing.assert_close(merged(run, outs, log_sums, q.dtype), wanted, atol=1e-10, rtol=0)
