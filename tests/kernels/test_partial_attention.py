"""Attention over parts of the keys: each part as its reference, and merged as attention over all keys."""

import pytest
import torch

from minillm.kv_cache.layer_cache import CacheSpec
from minillm.kv_cache.split_pages import BlockShare
from minillm.ops import AttentionOptions, Rows, reference, split_keys
from minillm.ops.compositions import Compositions
from minillm.ops.table import OperationSet
from tests.kernels.compare import COMPILED, assert_close, random_tensor, rotations
from tests.proofs import pairwise

kernels = pytest.importorskip("minillm.ops.triton", reason="triton is not installed here")
from minillm.kernels import paged_attention  # noqa: E402  needs triton

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
BF16, F32 = torch.bfloat16, torch.float32
LENGTHS = [1, 300, 517, 0, 64, 2000] if COMPILED else [1, 3, 26, 0, 11]
QUERIES = [1, 2, 300, 5, 64, 77] if COMPILED else [1, 2, 21, 5, 3]  # padding has queries without keys
REFERENCE = Compositions({}, {})
REFERENCE.fused = {}


def parts_of(kind, dim, block_size, count, device, dtype):
    """A whole cache, its parts, and a block table. Of what no row has, unquantized caches hold NaN."""
    width = -(-max(LENGTHS) // block_size)
    table = torch.randperm(len(LENGTHS) * width).view(len(LENGTHS), width)
    spec = CacheSpec.of(kind, 1, dim, dtype)
    shares = [BlockShare(0, 1), *(BlockShare(first, count) for first in range(count))]
    made = [share.spec(spec).allocate(table.numel(), block_size, torch.device("cpu")) for share in shares]
    positions = [torch.arange(length) for length in LENGTHS]
    slots = torch.cat([table[row, at // block_size] * block_size + at % block_size for row, at in enumerate(positions)])
    k, v = (random_tensor(len(slots), 1, dim, dtype=dtype, device="cpu") for _ in "kv")
    for cache, share in zip(made, shares, strict=True):
        if cache.k_scale is None:
            cache.k.fill_(torch.nan), cache.v.fill_(torch.nan)
        cache.write(k, v, share.slots(slots))
        for name in ("k", "v", "k_scale", "v_scale"):
            if getattr(cache, name) is not None:
                setattr(cache, name, getattr(cache, name).to(device))
    return *made, table.int().to(device)


OPTIONS = {
    "all keys": {},
    "window": {"window": 8},
    "window and cap": {"window": 16, "soft_cap": 3.0},
    "rotated": {"rotary": True},
}
SHAPES = {
    "256 bf16": (8, 256 if COMPILED else 32, 16, BF16),
    "16 f32": (4, 16, 8, F32),
    "64 f32": (2, 64, 12, F32),
}
# Devices, and programs of each that share a row's keys: some have none of them.
SHARES = {"2 x 1": (2, 1), "several": (4, 4) if COMPILED else (4, 2)}


@pairwise(
    {
        "queries": {"decode": 1, "drafts": 3, "prompts": None},
        "options": {name: name for name in OPTIONS},
        "kind": ["auto", "int8", "fp8"],
        "heads, dim, block_size, dtype": SHAPES,
        "count, splits": SHARES,
    }
)
def test_parts_are_the_references_and_merge_to_the_whole(
    queries, options, kind, heads, dim, block_size, dtype, count, splits, device, monkeypatch
):
    """queries: of each decode row; None: the prompts'."""
    monkeypatch.setattr(paged_attention, "decode_splits", lambda *_: splits)
    whole, *parts, table = parts_of(kind, dim, block_size, count, device, dtype)
    lengths, decode = torch.tensor(LENGTHS, dtype=torch.int32, device=device), queries is not None
    starts = torch.tensor([0, *([queries] * len(LENGTHS) if queries else QUERIES)]).cumsum(0).int().to(device)
    rows = Rows(table, lengths, starts, queries or max(QUERIES))
    q = random_tensor(int(starts[-1]), heads, dim, dtype=dtype, device=device)
    more = OPTIONS[options]
    if "rotary" in more:
        more = {"rotary": rotations(table.shape[1] * block_size, dim, device).to(dtype)}
    given = AttentionOptions(dim**-0.5, **more)
    found = []
    for part in parts:
        out, log_sums = kernels.partial_attention(q, part, rows, given, decode)
        wanted, wanted_sums = split_keys.partial_attention(REFERENCE, q.double(), part, rows, given, decode)
        assert_close("partial_attention", out, wanted, F32, 1 if dtype == F32 and kind == "auto" else 1000)
        seen = wanted_sums > -torch.inf
        assert (log_sums[~seen] == -torch.inf).all() and (out[~seen] == 0).all()
        torch.testing.assert_close(log_sums[seen].double(), wanted_sums[seen], atol=2e-2, rtol=1e-2)
        found.append((out, log_sums))
    assert any((log_sums == -torch.inf).any() for _, log_sums in found), "some queries see no key of a part"
    together = kernels.merged(*(torch.stack(each) for each in zip(*found, strict=True)), dtype)
    if decode:
        by_row = q.double().unflatten(0, (-1, queries))
        wanted = reference.decode_attention(by_row, whole, rows, given).flatten(0, 1)
    else:
        wanted = reference.prefill_attention(q.double(), whole, rows, given)
    assert_close("merged", together, wanted, dtype, 1 if kind == "auto" else 10)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("parts", [2, 3, 8])
def test_merging_weights_each_part_by_its_sum(parts, dtype, device):
    outs, log_sums = torch.randn(parts, 5, 3, 32, device=device), 20 * torch.randn(parts, 5, 3, device=device)
    log_sums[0, 0], log_sums[:, 1] = -torch.inf, -torch.inf  # one part without keys, and all
    outs[:, 1] = 0
    packed = torch.cat([outs, log_sums[..., None]], -1)  # as the ranks send them: the memory has gaps
    found = kernels.merged(packed[..., :-1], packed[..., -1], dtype)
    wanted = split_keys.merged(REFERENCE, outs.double(), log_sums.double(), torch.float64)
    assert_close("merged", found, wanted, dtype)
    assert (found[1] == 0).all()


def test_a_gpus_table_has_the_kernels_for_all_numbers_that_they_take(device, monkeypatch):
    called = []
    for name in split_keys.FUSED:
        own = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *given, own=own, name=name: (called.append(name), own(*given))[1])
    run, options = OperationSet.of("cuda"), AttentionOptions(0.3)
    for dtype in (F32, torch.float64):
        _, part, _, table = parts_of("auto", 16, 8, 2, device, dtype)
        rows = Rows.decoding(table, torch.tensor(LENGTHS, dtype=torch.int32, device=device))
        q = torch.randn(len(LENGTHS), 4, 16, dtype=dtype, device=device)
        found = split_keys.partial_attention(run, q, part, rows, options, decode=True)
        wanted = split_keys.partial_attention(REFERENCE, q, part, rows, options, decode=True)
        for mine, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, expected)
        one, sums = (each[None] for each in found)
        torch.testing.assert_close(split_keys.merged(run, one, sums, dtype), found[0].to(dtype))
    assert called == [*split_keys.FUSED] * 2


def test_what_the_kernels_cannot_read_is_left_to_the_reference_or_refused(device):
    _, part, _, table = parts_of("auto", 16, 8, 2, device, F32)
    rows = Rows.decoding(table, torch.tensor(LENGTHS, dtype=torch.int32, device=device))
    q = torch.zeros(len(LENGTHS), 4, 16, device=device)
    assert kernels.partial_attention(q.double(), part, rows, AttentionOptions(1.0), True) is None
    assert kernels.merged(q.double(), q[..., 0].double(), torch.float64) is None
    with pytest.raises(ValueError, match="1 KV heads and a window of 7"):
        kernels.partial_attention(q, part, rows, AttentionOptions(1.0, window=7), True)
