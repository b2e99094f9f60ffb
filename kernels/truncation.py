"""Top-k and top-p: keep each row's most probable tokens, without sorting the vocabulary.  Lesson 10.

Top-k and top-p keep the start of a ranking: all logits above a limit, and the lowest ids of those equal to it. So it is
enough to find the limit. It is nearly always among a row's 1,024 largest logits, which torch finds without a full sort.
If it is not (top-p of a flat distribution), the kernel searches for it: float32 numbers have the order of their bit
patterns, so if a pass over the row tests eight candidates, eleven passes are enough.

Tiling: one program per row. It takes the limit from the largest logits, or searches for it, and then passes over the
row once to write -inf below the limit, and counts logits equal to it on the way.
"""

import torch
import triton
import triton.language as tl

LARGEST = 1024  # how many of a row's logits are ranked
WAYS = 8  # candidates that one pass of the search tests
TILE = 4096


@triton.jit
def _load(row_ptr, columns, VOCAB):
    return tl.load(row_ptr + columns, mask=columns < VOCAB, other=float("-inf")) + 0.0  # -0 is 0


@triton.jit
def _order(x):
    """int32 numbers in the same order as the float32 numbers x."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _value(order):
    bits = order.to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _weigh(row_ptr, least, shift, VOCAB, MASS: tl.constexpr, WAYS: tl.constexpr, TILE: tl.constexpr):
    """For each of `least` [WAYS]: the number of logits not below it or, with MASS, their sum of exponentials."""
    found = tl.zeros([WAYS, TILE], tl.float32)
    for start in range(0, VOCAB, TILE):
        columns = start + tl.arange(0, TILE)
        x = _load(row_ptr, columns, VOCAB)
        weight = tl.exp(x - shift) if MASS else tl.where(columns < VOCAB, 1.0, 0.0)
        found += tl.where(_order(x)[None, :] >= least[:, None], weight[None, :], 0.0)
    return tl.sum(found, 1)


@triton.jit
def _search(row_ptr, top, goal, shift, VOCAB, MASS: tl.constexpr, WAYS: tl.constexpr, TILE: tl.constexpr):
    """The largest limit such that logits not below it reach `goal`, and the count or mass of those above it."""
    low, high = tl.full((), -(2**31), tl.int64), _order(top).to(tl.int64) + 1
    over = tl.full((), 0.0, tl.float32)
    ways = tl.arange(0, WAYS)
    while high - low > 1:
        step = tl.maximum((high - low + WAYS - 1) // WAYS, 1)
        least = tl.minimum(low + ways * step, high)
        found = _weigh(row_ptr, least.to(tl.int32), shift, VOCAB, MASS, WAYS, TILE)
        # From `low` on it is enough, from `high` on it is not.
        last = tl.max(tl.where((found >= goal) & (least < high), ways, 0), 0)
        beyond = tl.minimum(low + (last + 1) * step, high)
        over = tl.where(beyond < high, tl.sum(tl.where(ways == last + 1, found, 0.0), 0), over)
        low += last * step
        high = beyond
    return _value(low), over


@triton.jit
def truncate_kernel(
    logits_ptr, largest_ptr, top_k_ptr, top_p_ptr, row_stride, VOCAB, FOUND,
    LARGEST: tl.constexpr, WAYS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    top_k = tl.load(top_k_ptr + row)
    top_k = tl.where((top_k > 0) & (top_k < VOCAB), top_k, VOCAB).to(tl.int32)
    top_p = tl.load(top_p_ptr + row).to(tl.float32)
    rank = tl.arange(0, LARGEST)
    largest = tl.load(largest_ptr + row * FOUND + rank, mask=rank < FOUND, other=float("-inf")) + 0.0
    top = tl.max(largest, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.where(rank < top_k, tl.exp(largest - shift), 0.0)

    # After top_k: the limit, how many logits equal to it stay, and the mass of all that stay.
    limit, equals, total = tl.full((), float("-inf"), tl.float32), top_k, tl.sum(weights, 0)
    ranked = top_k <= FOUND
    if not ranked:
        over = tl.full((), 0.0, tl.float32)
        if top_k < VOCAB:
            limit, over = _search(row_ptr, top, top_k.to(tl.float32), shift, VOCAB, False, WAYS, TILE)
        equals -= over.to(tl.int32)
        if top_p < 1:
            above = tl.full([WAYS], 0, tl.int32) + _order(limit) + 1
            total = tl.max(_weigh(row_ptr, above, shift, VOCAB, True, WAYS, TILE), 0)
            total += equals * tl.exp(limit - shift)

    goal = tl.where(top_p < 1, top_p * total, float("inf"))
    sums = tl.cumsum(weights, 0)
    if ranked or tl.max(sums, 0) >= goal:
        kept = (rank < top_k) & (rank < FOUND) & (sums - weights < goal)
        count = tl.maximum(tl.sum(kept.to(tl.int32), 0), 1)
        limit = tl.max(tl.where(rank == count - 1, largest, float("-inf")), 0)
        equals = count - tl.sum((largest > limit).to(tl.int32), 0)
    elif top_p < 1:
        nearer, over = _search(row_ptr, top, goal, shift, VOCAB, True, WAYS, TILE)
        needed = tl.maximum(tl.ceil((goal - over) / tl.exp(nearer - shift)), 1.0)
        needed = tl.minimum(needed, VOCAB * 1.0).to(tl.int32)
        # Sums are rounded: do not let top_p bring back what top_k removed.
        equals = tl.where(nearer > limit, needed, tl.where(nearer == limit, tl.minimum(needed, equals), equals))
        limit = tl.maximum(nearer, limit)

    if top_k < VOCAB or top_p < 1:
        seen = tl.full((), 0, tl.int32)
        for start in range(0, VOCAB, TILE):
            columns = start + tl.arange(0, TILE)
            x = _load(row_ptr, columns, VOCAB)
            equal = ((x == limit) & (columns < VOCAB)).to(tl.int32)
            first = seen + tl.cumsum(equal, 0)
            gone = (x < limit) | ((equal > 0) & (first > equals))
            tl.store(row_ptr + columns, tl.full([TILE], float("-inf"), tl.float32), mask=gone & (columns < VOCAB))
            seen += tl.sum(equal, 0)


def truncate(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Write -inf to the logits that top-k and top-p remove; as `ops.reference.truncate`, in place.  Lesson 10.

    logits [rows, vocab] float32, contiguous along vocab (ValueError otherwise); top_k [rows] int64, below 1: all;
    top_p [rows] in (0, 1].
    """
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"truncate works in place on contiguous rows of float32, not on {logits.dtype}")
    rows, vocab = logits.shape
    if rows:
        found = min(LARGEST, vocab)
        largest = logits.topk(found, dim=-1).values
        truncate_kernel[(rows,)](
            logits, largest, top_k, top_p, logits.stride(0), vocab, found, LARGEST=LARGEST, WAYS=WAYS,
            TILE=TILE, num_warps=16,
        )  # fmt: skip
    return logits
