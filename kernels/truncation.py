"""Sample from what min-p, top-k and top-p keep of a row, without sorting the vocabulary.  Lesson 10.

All three keep the start of a ranking: the logits above a limit, and the lowest ids of those equal to it. So it is
enough to find the limit:

    min-p:   largest logit + temperature * log(min_p)
    top-k:   the largest limit that k logits reach
    top-p:   the largest limit at which exp(z) of what is kept sums to top_p of all
    token  = first kept i with  exp(z_0) + ... + exp(z_i)  >  uniform * the sum of all kept

    z = (logit - largest logit) / temperature

The search keeps an interval, and each pass over the row tests several candidates in it. They are evenly spaced, at
first by value, which is soon near the answer for logits spread like a bell, and then by *key*: the bits of a
floating-point number, read as an integer, which has the same order. bfloat16 has only 65,536 keys, so that few passes
are left. For top-p, a search in a small sample of the row comes first, and the first pass over all of it looks around
the result.

Tiling: this is the part of `sampling.choose_kernel` for a row that truncates something, one program per row. Four
chunks are loaded at once, to wait for memory less often, unless all their maxima are below the lowest candidate.
"""

import torch
import triton
import triton.language as tl

BY_VALUE = tl.constexpr(4)  # passes that divide by values
SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # bits of a float32 that are 0 in each dtype


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """int32 numbers in the same order as the float32 numbers x; but that of -0 is below that of 0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF) >> SHIFT


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """The float32 number that a key stands for."""
    order = key.to(tl.int32) << SHIFT
    negative = (order | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF
    return tl.where(order >= 0, order, negative).to(tl.float32, bitcast=True)


@triton.jit
def _key_from(x, SHIFT: tl.constexpr):
    """The smallest key whose value is not below x."""
    key = _key(x, SHIFT)
    return tl.where(_value(key, SHIFT) < x, key + 1, key)


@triton.jit
def _load(row_ptr, chunk, VOCAB, CHUNK: tl.constexpr):
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    return tl.load(row_ptr + columns, mask=columns < VOCAB, other=float("-inf")).to(tl.float32) + 0.0  # -0 is 0


@triton.jit
def _highest(maximum_ptr, chunk, stride, CHUNKS):
    """The largest logit of four chunks."""
    four = chunk + tl.arange(0, 4) * stride
    return tl.max(tl.load(maximum_ptr + four, mask=four < CHUNKS, other=float("-inf")), 0)


@triton.jit
def _tested(found, x, least, top, rate, MASS: tl.constexpr):
    weight = tl.exp2((x - top) * rate) if MASS else tl.where(x > float("-inf"), 1.0, 0.0)
    return found + tl.where(x[None, :] >= least[:, None], weight[None, :], 0.0)


@triton.jit
def _weigh(
    row_ptr, maximum_ptr, least, top, rate, begin, end, stride, VOCAB, CHUNKS, MASS: tl.constexpr,
    WAYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """For each number in `least` [WAYS]: how many logits are not below it or, with MASS, the sum of their exp(z).

    In the chunks from `begin` to `end`, four at a time that are `stride` apart.
    """
    found = tl.zeros([WAYS, CHUNK], tl.float32)
    lowest = tl.min(least, 0)
    for chunk in range(begin, end, 4):
        if _highest(maximum_ptr, chunk, stride, CHUNKS) >= lowest:
            a = _load(row_ptr, chunk, VOCAB, CHUNK)
            b = _load(row_ptr, chunk + stride, VOCAB, CHUNK)
            c = _load(row_ptr, chunk + 2 * stride, VOCAB, CHUNK)
            d = _load(row_ptr, chunk + 3 * stride, VOCAB, CHUNK)
            found = _tested(found, a, least, top, rate, MASS)
            found = _tested(found, b, least, top, rate, MASS)
            found = _tested(found, c, least, top, rate, MASS)
            found = _tested(found, d, least, top, rate, MASS)
    return tl.sum(found, 1)


@triton.jit
def _between(low, high, bottom, by_value, SHIFT: tl.constexpr, WAYS: tl.constexpr):
    """Keys from `low` to `high`, of which `low` is the first, evenly spaced by key or, from `bottom` on, by value."""
    ways = tl.arange(0, WAYS)
    keys = tl.minimum(low + ways * tl.maximum((high - low + WAYS - 1) // WAYS, 1), high)
    smallest, largest = tl.maximum(_value(low, SHIFT), bottom), _value(high - 1, SHIFT)
    if by_value & (smallest < largest):
        values = smallest + (largest - smallest) * (ways.to(tl.float32) / WAYS)
        keys = tl.where(ways > 0, tl.maximum(_key(values, SHIFT).to(tl.int64), low), low)
    return keys


@triton.jit
def _around(value, unit, low, high, SHIFT: tl.constexpr, WAYS: tl.constexpr):
    """Keys from `low` to `high` on both sides of a value, the farther from it the farther apart."""
    away = tl.arange(0, WAYS) - (WAYS - 1) / 2
    distance = tl.exp2(tl.abs(away) * 1.5) * unit
    keys = _key(value + tl.where(away < 0, -distance, distance), SHIFT).to(tl.int64)
    return tl.minimum(tl.maximum(keys, low), high)


@triton.jit
def _narrowed(keys, found, goal, low, high, over):
    """The interval and the weight above it, after a pass has found what the logits from each of `keys` on weigh."""
    enough = tl.max(tl.where((found >= goal) & (keys < high), keys, low), 0)
    beyond = tl.min(tl.where(keys > enough, keys, high), 0)
    over = tl.where(beyond < high, tl.max(tl.where(keys == beyond, found, 0.0), 0), over)
    return enough, beyond, over


@triton.jit
def _search(
    row_ptr, maximum_ptr, least, bottom, top, rate, goal, tail, VOCAB, CHUNKS, MASS: tl.constexpr,
    SHIFT: tl.constexpr, WAYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The largest limit that logits reach whose weights sum to `goal`; and the sum of those above it.

    It is not below `least`: that, if rounding keeps all of them from reaching the goal. bottom: a finite number that it
    is hardly below. tail: with MASS, the weight of what is left out. A few rare logits may weigh much, and a sample may
    lack them; what is left out is most of the vocabulary, and a sample has its share of it.
    """
    low, high = _key_from(least, SHIFT).to(tl.int64), _key(top, SHIFT).to(tl.int64) + 1
    over = tl.full((), 0.0, tl.float32)
    passes, near, unit = 0, bottom, 0.0
    sampled = (CHUNKS >= 16) & (MASS or goal > CHUNKS)
    if sampled:
        stride = CHUNKS // 4
        begin, nearest, beyond, part = stride // 2, low, high, goal
        size = 4.0 * CHUNK / VOCAB
        for _ in range(4):
            keys = _between(nearest, beyond, bottom, True, SHIFT, WAYS)
            found = _weigh(
                row_ptr, maximum_ptr, _value(keys, SHIFT), top, rate, begin, begin + 1, stride, VOCAB, CHUNKS, MASS,
                WAYS, CHUNK,
            )  # fmt: skip
            if nearest == low:
                part = tl.max(found, 0) - tail * size if MASS else goal * size
            nearest, beyond, _over = _narrowed(keys, found, part, nearest, beyond, over)
        near = tl.maximum(_value(nearest, SHIFT), bottom)
        unit = tl.abs(near) / 256 + (0.003 / rate if MASS else (top - bottom) / 512)
    while high - low > 1:
        keys = _between(low, high, bottom, passes < BY_VALUE, SHIFT, WAYS)
        if sampled & (passes == 0):
            keys = _around(near, unit, low, high, SHIFT, WAYS)
        found = _weigh(
            row_ptr, maximum_ptr, _value(keys, SHIFT), top, rate, 0, CHUNKS, 1, VOCAB, CHUNKS, MASS, WAYS, CHUNK
        )
        low, high, over = _narrowed(keys, found, goal, low, high, over)
        passes += 1
    return _value(low, SHIFT), over


@triton.jit
def _draw(row_ptr, maximum_ptr, limit, equals, top, rate, goal, VOCAB, CHUNKS, CHUNK: tl.constexpr):
    """The first token whose running sum of exp(z) is above the goal, in the order of ids.

    Counted are the logits above the limit, and the first `equals` of those equal to it. Sums are rounded: only an entry
    with positive weight may be drawn, and the last such entry if rounding leaves the goal above the sum. (The limit may
    be minus infinity, and forbidden tokens equal to it.)
    """
    token, last = tl.full((), -1, tl.int32), tl.full((), -1, tl.int32)
    each = tl.exp2((limit - top) * rate)
    running, seen = tl.full((), 0.0, tl.float32), tl.full((), 0, tl.int32)
    for first in range(0, CHUNKS, 4):
        if (token < 0) & (_highest(maximum_ptr, first, 1, CHUNKS) >= limit):
            above, equal = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.int32)
            for place in tl.static_range(4):
                x = _load(row_ptr, first + place, VOCAB, CHUNK)
                above += tl.where(x > limit, tl.exp2((x - top) * rate), 0.0)
                equal += (x == limit).to(tl.int32)
            count = tl.sum(equal, 0)
            added = tl.sum(above, 0) + tl.minimum(count, tl.maximum(equals - seen, 0)) * each
            if running + added > goal:
                for chunk in range(first, first + 4):
                    columns = chunk * CHUNK + tl.arange(0, CHUNK)
                    x = _load(row_ptr, chunk, VOCAB, CHUNK)
                    same = (x == limit) & (columns < VOCAB)
                    rank = seen + tl.cumsum(same.to(tl.int32), 0)
                    weight = tl.exp2((x - top) * rate)
                    kept = ((x > limit) | (same & (rank <= equals))) & (weight > 0)
                    sums = running + tl.cumsum(tl.where(kept, weight, 0.0), 0)
                    here = tl.min(tl.where(kept & (sums > goal), columns, VOCAB), 0)
                    last = tl.maximum(last, tl.max(tl.where(kept, columns, -1), 0))
                    token = tl.where((token < 0) & (here < VOCAB), here, token)
                    running = tl.max(sums, 0)
                    seen += tl.sum(same.to(tl.int32), 0)
                token = tl.where(token < 0, last, token)  # rounding left the goal above the sum
            else:
                running += added
                seen += count
                if added > 0:
                    last = first
    if token < 0:  # the same, and the last such entry is in the chunks from `last` on
        for chunk in range(last, last + 4):
            columns = chunk * CHUNK + tl.arange(0, CHUNK)
            x = _load(row_ptr, chunk, VOCAB, CHUNK)
            inside = (columns < VOCAB) & (tl.exp2((x - top) * rate) > 0)
            found = tl.max(tl.where((x > limit) & inside, columns, -1), 0)
            tie = tl.min(tl.where((x == limit) & inside, columns, VOCAB), 0)
            token = tl.maximum(token, found)
            token = tl.where((token < 0) & (tie < VOCAB), tie, token)
    return token


@triton.jit
def choose_truncated(
    row_ptr, maximum_ptr, maxima, mass, temperature, uniform, min_p, top_k, top_p, VOCAB, CHUNKS,
    CHUNKS_TILE: tl.constexpr, CHUNK: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The token of a row that truncates something, whose largest logit is finite and whose temperature is above 0.

    maxima, mass: what `sampling.chunk_mass_kernel` has found in each chunk, relative to its maximum.
    """
    chunks = tl.arange(0, CHUNKS_TILE)
    top = tl.max(maxima, 0) + 0.0  # -0 is 0, as in `_load`: a search up to the key of -0 would miss that of 0
    rate = tl.minimum(1.4426950408889634 / temperature, 3e38)  # exp(z) = exp2((logit - top) * rate)
    # The limit, how many logits equal to it stay, and the sum of exp(z) of all that stay.
    limit, equals = tl.full((), float("-inf"), tl.float32), VOCAB
    total = tl.sum(mass * tl.exp2((maxima - top) * rate), 0)
    if min_p > 0:
        limit = tl.minimum(top + temperature * tl.log(min_p), top)  # a rounded logarithm may be above 0
        found = _weigh(
            row_ptr, maximum_ptr, tl.full([1], 0.0, tl.float32) + limit, top, rate, 0, CHUNKS, 1, VOCAB, CHUNKS, True,
            1, CHUNK,
        )  # fmt: skip
        total = tl.max(found, 0)
    if (top_k > 0) & (top_k < VOCAB):
        if top_k <= CHUNKS:  # so many chunks have a maximum: the limit is not below the least of these
            ranked = tl.sort(maxima, descending=True)
            limit = tl.maximum(limit, tl.sum(tl.where(chunks == top_k - 1, ranked, 0.0), 0))
        lowest = tl.min(tl.where(chunks < CHUNKS, maxima, top), 0)
        bottom = tl.maximum(tl.maximum(limit, top - 4 * (top - lowest)), -3e38)
        limit, over = _search(
            row_ptr, maximum_ptr, limit, bottom, top, rate, top_k.to(tl.float32), 0.0, VOCAB, CHUNKS, False, SHIFT, 4,
            CHUNK,
        )  # fmt: skip
        equals = top_k.to(tl.int32) - over.to(tl.int32)
        above = _value(_key(limit, SHIFT) + 1, SHIFT)
        found = _weigh(
            row_ptr, maximum_ptr, tl.where(tl.arange(0, 2) == 0, limit, above), top, rate, 0, CHUNKS, 1, VOCAB, CHUNKS,
            True, 2, CHUNK,
        )  # fmt: skip
        total = tl.minimum(tl.min(found, 0) + equals * tl.exp2((limit - top) * rate), tl.max(found, 0))
    if top_p < 1:
        # What is below this weighs less than 1 - top_p, even if it is the whole vocabulary.
        tail = (1.0 - top_p) * total
        least = tl.maximum(limit, tl.minimum(top + temperature * tl.log(tail / VOCAB), top))
        nearer, over = _search(
            row_ptr, maximum_ptr, least, least, top, rate, top_p * total, tail, VOCAB, CHUNKS, True, SHIFT, 8, CHUNK
        )
        weight = tl.exp2((nearer - top) * rate)
        needed = tl.maximum(tl.ceil((top_p * total - over) / weight), 1.0)
        needed = tl.minimum(needed, VOCAB * 1.0).to(tl.int32)
        equals = tl.where(nearer > limit, needed, tl.minimum(needed, equals))
        total = tl.minimum(total, over + equals * weight)
        limit = nearer
    return _draw(row_ptr, maximum_ptr, limit, equals, top, rate, uniform * total, VOCAB, CHUNKS, CHUNK)
