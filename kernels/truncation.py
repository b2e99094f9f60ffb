"""Keep each row's most probable tokens, without sorting the vocabulary.  Lesson 10.

What top-k and top-p keep is the beginning of a ranking: all logits above a threshold, and of those equal to it the
first few ids. So the threshold is all that must be found. It lies among a row's largest thousand logits nearly always,
and torch finds those without a full sort. Where it does not (top-p of a flat distribution), it is found by bisection:
float32 numbers are in the order of their bits, so 32 passes over the row at most give the largest threshold above
which enough remains.

Tiling: one program a row. It takes the threshold from the largest logits, or bisects, and then passes over the row
once to write -inf below it, counting the equal ones as they come.
"""

import torch
import triton
import triton.language as tl

LARGEST = 1024  # of a row's logits are ranked
TILE = 8192


@triton.jit
def _load(row_ptr, columns, VOCAB):
    return tl.load(row_ptr + columns, mask=columns < VOCAB, other=float("-inf")) + 0.0  # -0 is 0


@triton.jit
def _order(x):
    """Whole numbers that are ordered as the float32 numbers are."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def _value(order):
    bits = order.to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _above(row_ptr, least, shift, VOCAB, TILE: tl.constexpr):
    """How many logits are `least` or more in order, and their mass."""
    counts, masses = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.float32)
    for start in range(0, VOCAB, TILE):
        columns = start + tl.arange(0, TILE)
        x = _load(row_ptr, columns, VOCAB)
        taken = (_order(x) >= least) & (columns < VOCAB)
        counts += taken.to(tl.int32)
        masses += tl.where(taken, tl.exp(x - shift), 0.0)
    return tl.sum(counts, 0), tl.sum(masses, 0)


@triton.jit
def _bisect(row_ptr, top, shift, count, mass, VOCAB, TILE: tl.constexpr):
    """The largest threshold from which on there are `count` logits and `mass`; how many, and how much, above it."""
    low, high = tl.full((), -(2**31), tl.int64), _order(top) + 1
    over_count, over_mass = tl.full((), 0, tl.int32), tl.full((), 0.0, tl.float32)
    while high - low > 1:
        middle = (low + high) >> 1
        n, m = _above(row_ptr, middle, shift, VOCAB, TILE)
        enough = (n >= count) & (m >= mass)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        over_count, over_mass = tl.where(enough, over_count, n), tl.where(enough, over_mass, m)
    return _value(low), over_count, over_mass


@triton.jit
def truncate_kernel(
    logits_ptr, largest_ptr, top_k_ptr, top_p_ptr, row_stride, VOCAB, FOUND,
    LARGEST: tl.constexpr, TILE: tl.constexpr,
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

    total = tl.sum(weights, 0)
    limit, over, over_mass = (
        tl.full((), float("-inf"), tl.float32),
        tl.full((), 0, tl.int32),
        tl.full((), 0.0, tl.float32),
    )
    ranked = top_k <= FOUND  # whether what top_k keeps is all among the largest
    if not ranked:
        if top_k < VOCAB:
            limit, over, over_mass = _bisect(row_ptr, top, shift, top_k, 0.0, VOCAB, TILE)
            total = over_mass + (top_k - over) * tl.exp(limit - shift)
        elif top_p < 1:
            _, total = _above(row_ptr, tl.full((), -(2**31), tl.int64), shift, VOCAB, TILE)
    equals = top_k - over  # how many of those at the limit stay

    goal = tl.where(top_p < 1, top_p * total, float("inf"))
    sums = tl.cumsum(weights, 0)
    if ranked or tl.max(sums, 0) >= goal:
        kept = (rank < top_k) & (rank < FOUND) & (sums - weights < goal)
        kept_count = tl.maximum(tl.sum(kept.to(tl.int32), 0), 1)
        limit = tl.max(tl.where(rank == kept_count - 1, largest, float("-inf")), 0)
        equals = kept_count - tl.sum((largest > limit).to(tl.int32), 0)
    elif top_p < 1:
        # The sums of a bisection are rounded: it may not go below what top_k kept.
        nearer, over, over_mass = _bisect(row_ptr, top, shift, 1, goal, VOCAB, TILE)
        needed = tl.maximum(tl.ceil((goal - over_mass) / tl.exp(nearer - shift)), 1.0)
        needed = tl.minimum(needed, VOCAB * 1.0).to(tl.int32)
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
    """As the reference, in place: logits [rows, vocab] float32, top_k [rows] int64, top_p [rows].  Lesson 10."""
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"logits are truncated in place: float32, row after row, not {logits.dtype}")
    rows, vocab = logits.shape
    if rows:
        found = min(LARGEST, vocab)
        largest = logits.topk(found, dim=-1).values
        truncate_kernel[(rows,)](
            logits, largest, top_k, top_p, logits.stride(0), vocab, found, LARGEST=LARGEST, TILE=TILE, num_warps=16
        )  # fmt: skip
    return logits
