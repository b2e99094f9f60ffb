"""Compare a kernel's result with a float64 reference and log the error.

If MINILLM_NOTES names a file, every comparison appends a line to it; `tools/kernel_tests.py` turns them into a record.
"""

import json
import math
import os

import torch

from minillm.kv_cache import LayerCache
from minillm.ops.signatures import Truncation
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


def kept_by(logits: torch.Tensor, temperature: float, min_p: float, top_k: int, top_p: float) -> torch.Tensor:
    """The weights [vocab] of what a row's truncation keeps, in float64; 0 for all other tokens."""
    z = (logits.double() - logits.double().max()) / temperature
    weights = torch.where(z >= math.log(min_p), z.exp(), 0) if min_p > 0 else z.exp()
    ranked, order = weights.sort(descending=True, stable=True)
    if top_k > 0:
        ranked[top_k:] = 0
    before = ranked.cumsum(0) - ranked
    ranked = torch.where((before >= top_p * ranked.sum()) & (before > 0) & (top_p < 1), 0, ranked)
    return torch.zeros_like(weights).scatter_(0, order, ranked)


def assert_sampled(
    ids: torch.Tensor,
    logits: torch.Tensor,
    temperature: torch.Tensor,
    uniform: torch.Tensor,
    truncation: Truncation,
) -> None:
    """Each token is one that its row keeps, where the cumulative sum of these exceeds the random number."""
    error = 0.0
    for row, token in enumerate(ids.tolist()):
        if temperature[row] == 0:
            assert token == int(logits[row].argmax())
            continue
        min_p, top_k, top_p = (each[row].item() for each in truncation)
        options = logits[row].cpu(), temperature[row].item(), min_p, top_k
        # Sums are rounded, so one token more or less may be kept.
        less, weights = (kept_by(*options, top_p if top_p == 1 else top_p + off) for off in (-MASS_BOUND, MASS_BOUND))
        assert weights[token] > 0, f"row {row}: token {token} should have been left out"
        total = weights.sum().item()
        upper, own = weights[: token + 1].sum().item() / total, weights[token].item() / total
        beyond = max(upper - own - uniform[row].item(), uniform[row].item() - upper)
        error = max(error, beyond - (1 - less.sum().item() / total))
    note("truncate, probability mass", logits.dtype, max(error, 0.0), MASS_BOUND)
    assert error <= MASS_BOUND
