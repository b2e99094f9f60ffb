"""Compare a kernel's result with a float64 reference and log the error.

If MINILLM_NOTES names a file, every comparison appends a line to it; `tools/kernel_tests.py` turns them into a record.
"""

import json
import os

import torch

from minillm.kv_cache import LayerCache
from tests.chance import SEED

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # relative error of the whole result
DTYPES = [torch.float32, torch.bfloat16]
COMPILED = torch.cuda.is_available()  # otherwise interpreted, and each program takes milliseconds
# The interpreter adds one weight after another; equal weights are then all rounded in the same direction.
MASS_BOUND = 1e-5 if COMPILED else 1e-4


def assert_close(kernel: str, got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, times: float = 1.0) -> None:
    """||got - wanted|| / ||wanted|| is within `times` the dtype's tolerance, and dtype and shape are equal."""
    assert got.dtype == dtype and got.shape == wanted.shape
    wanted = wanted.double()
    error = ((got.double() - wanted.to(got.device)).norm() / wanted.norm().clamp(min=1e-30)).item()
    note(kernel, dtype, error, TOLERANCE[dtype] * times)
    assert error <= TOLERANCE[dtype] * times, f"relative error {error:.2e}"  # also fails on NaN


def note(what: str, dtype: torch.dtype, error: float, bound: float) -> None:
    if path := os.environ.get("MINILLM_NOTES"):
        line = {"what": what, "dtype": str(dtype).removeprefix("torch."), "error": error, "bound": bound, "seed": SEED}
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def random_tensor(*shape, dtype, device, scale=1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=device) * scale).to(dtype)


def rotations(tokens: int, dim: int, device) -> torch.Tensor:
    """[tokens, 2, d]: cosines and signed sines, as the model's table has them."""
    angle = torch.rand(tokens, dim // 2, device=device) * 100
    return torch.stack([angle.cos().repeat(1, 2), torch.cat([-angle.sin(), angle.sin()], -1)], 1)


def paged_cache(lengths, kv_heads, dim, block_size, dtype, device):
    """Random keys in shuffled blocks; every slot that no row owns holds NaN: (cache, table, lengths)."""
    blocks = [-(-length // block_size) for length in lengths]
    free = torch.randperm(sum(blocks) + 3)
    owned = torch.zeros(len(free), block_size, dtype=torch.bool)
    table = torch.zeros(len(lengths), max(*blocks, 1), dtype=torch.int32)
    given = 0
    for row, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        mine = free[given : given + count]
        given += count
        table[row, :count] = mine
        owned[mine] = (torch.arange(count * block_size) < length).view(count, block_size)
    cache = LayerCache(*(random_tensor(len(free), block_size, kv_heads, dim, dtype=dtype, device=device) for _ in "kv"))
    for part in (cache.k, cache.v):
        part[~owned.to(device)] = torch.nan
    return cache, table.to(device), torch.tensor(lengths, dtype=torch.int32, device=device)


def released(cache, table, lengths, queries, window, entries):
    """(cache, table) after every row released the blocks that none of its last `queries` queries sees.

    Released blocks hold NaN. Their table entries still name them ("kept") or name another row's blocks ("reused").
    """
    block_size, table = cache.k.shape[1], table.clone()
    gone = (lengths - queries - window + 1).clamp(min=0) // block_size
    hidden = torch.arange(table.shape[1], device=table.device) < gone[:, None]
    assert hidden.any() and not hidden.all(), "some but not all blocks must be released"
    cache = LayerCache(cache.k.clone(), cache.v.clone())
    for part in (cache.k, cache.v):
        part[table[hidden].long()] = torch.nan
    if entries == "reused":
        newest = table.gather(1, ((lengths - 1) // block_size).long()[:, None])
        table = torch.where(hidden, newest.roll(1, 0), table)
    return cache, table


def double(cache: LayerCache) -> LayerCache:
    return LayerCache(cache.k.double(), cache.v.double())


def assert_truncated(got: torch.Tensor, logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> None:
    """Each row keeps its top-ranked tokens, by top_k and by probability mass up to top_p, within MASS_BOUND."""
    error = 0.0
    for row in range(len(logits)):
        ranking = logits[row].double().sort(descending=True, stable=True)
        possible = int((ranking.values > -torch.inf).sum())
        kept = torch.isfinite(got[row])
        count = int(kept.sum())
        assert torch.equal(got[row][kept], logits[row][kept]), "kept logits must not change"
        assert (got[row][~kept] == -torch.inf).all()
        assert set(ranking.indices[:count].tolist()) == set(kept.nonzero()[:, 0].tolist()), (
            "the likeliest tokens must be kept"
        )
        most = min(possible, int(top_k[row])) if top_k[row] > 0 else possible
        assert 1 <= count <= most
        if top_p[row] == 1:
            assert count == most
            continue
        mass = ranking.values[:most].softmax(0).cumsum(0)
        wanted = top_p[row].double()
        before = mass[count - 2] if count > 1 else 0.0
        error = max(error, float(before - wanted), float(wanted - mass[count - 1]) if count < most else 0.0)
    note("truncate, probability mass", logits.dtype, max(error, 0.0), MASS_BOUND)
    assert error <= MASS_BOUND
