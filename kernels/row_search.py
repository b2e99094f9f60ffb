"""Search a row of logits for the one at which those above it weigh enough, in passes over the row.  Lesson 10.

`truncation` uses it. Numbers are compared by *key*: the bits of a floating-point number, read as an integer, which has
the same order. Each pass weighs what is above several candidates, and narrows the interval that holds the result.
"""

import triton
import triton.language as tl

BY_VALUE = tl.constexpr(4)  # passes that divide by values


@triton.jit
def to_key(x, SHIFT: tl.constexpr):
    """int32 numbers in the same order as the float32 numbers x; but that of -0 is below that of 0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF) >> SHIFT


@triton.jit
def from_key(key, SHIFT: tl.constexpr):
    """Return the float32 number that a key stands for."""
    order = key.to(tl.int32) << SHIFT
    negative = (order | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF
    return tl.where(order >= 0, order, negative).to(tl.float32, bitcast=True)


@triton.jit
def key_from(x, SHIFT: tl.constexpr):
    """Return the smallest key whose value is not below x."""
    key = to_key(x, SHIFT)
    return tl.where(from_key(key, SHIFT) < x, key + 1, key)


@triton.jit
def load_chunk(row_ptr, chunk, VOCAB, CHUNK: tl.constexpr):
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    return tl.load(row_ptr + columns, mask=columns < VOCAB, other=float("-inf")).to(tl.float32) + 0.0  # -0 is 0


@triton.jit
def highest_of_four(maximum_ptr, chunk, CHUNKS):
    """Return the largest logit of four chunks."""
    four = chunk + tl.arange(0, 4)
    return tl.max(tl.load(maximum_ptr + four, mask=four < CHUNKS, other=float("-inf")), 0)


@triton.jit
def _weight(x, top, rate, MASS: tl.constexpr):
    """Return a logit's weight: exp(z), or 1 in a search that counts."""
    return tl.exp2((x - top) * rate) if MASS else tl.where(x > float("-inf"), 1.0, 0.0)


@triton.jit
def _tested(sums, x, weight, least):
    return sums + tl.where(x[None, :] >= least[:, None], weight[None, :], 0.0)


@triton.jit
def weigh(
    row_ptr, maximum_ptr, least, top, rate, VOCAB, CHUNKS, MASS: tl.constexpr, WAYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Count the logits not below each number in `least` [WAYS] or, with MASS, return the sums of their exp(z)."""
    sums = tl.zeros([WAYS, CHUNK], tl.float32)
    lowest = tl.min(least, 0)
    for chunk in range(0, CHUNKS, 4):
        if highest_of_four(maximum_ptr, chunk, CHUNKS) >= lowest:
            a = load_chunk(row_ptr, chunk, VOCAB, CHUNK)
            b = load_chunk(row_ptr, chunk + 1, VOCAB, CHUNK)
            c = load_chunk(row_ptr, chunk + 2, VOCAB, CHUNK)
            d = load_chunk(row_ptr, chunk + 3, VOCAB, CHUNK)
            sums = _tested(sums, a, _weight(a, top, rate, MASS), least)
            sums = _tested(sums, b, _weight(b, top, rate, MASS), least)
            sums = _tested(sums, c, _weight(c, top, rate, MASS), least)
            sums = _tested(sums, d, _weight(d, top, rate, MASS), least)
    return tl.sum(sums, 1)


@triton.jit
def _between(low, high, bottom, by_value, SHIFT: tl.constexpr, WAYS: tl.constexpr):
    """Keys from `low` to `high`, of which `low` is the first, evenly spaced by key or, from `bottom` on, by value."""
    ways = tl.arange(0, WAYS)
    keys = tl.minimum(low + ways * tl.maximum((high - low + WAYS - 1) // WAYS, 1), high)
    smallest, largest = tl.maximum(from_key(low, SHIFT), bottom), from_key(high - 1, SHIFT)
    if by_value & (smallest < largest):
        values = smallest + (largest - smallest) * (ways.to(tl.float32) / WAYS)
        keys = tl.where(ways > 0, tl.maximum(to_key(values, SHIFT).to(tl.int64), low), low)
    return keys


@triton.jit
def _around(value, unit, low, high, SHIFT: tl.constexpr, WAYS: tl.constexpr):
    """Keys from `low` to `high` on both sides of a value, the farther from it the farther apart."""
    away = tl.arange(0, WAYS) - (WAYS - 1) / 2
    distance = tl.exp2(tl.abs(away) * 1.5) * unit
    keys = to_key(value + tl.where(away < 0, -distance, distance), SHIFT).to(tl.int64)
    return tl.minimum(tl.maximum(keys, low), high)


@triton.jit
def narrowed(keys, sums, goal, low, high, over):
    """Return the interval and the weight above it, after a pass has summed what the logits from each of `keys` on
    weigh.
    """
    enough = tl.max(tl.where((sums >= goal) & (keys < high), keys, low), 0)
    beyond = tl.min(tl.where(keys > enough, keys, high), 0)
    over = tl.where(beyond < high, tl.max(tl.where(keys == beyond, sums, 0.0), 0), over)
    return enough, beyond, over


@triton.jit
def estimate(
    row_ptr, low, high, bottom, top, rate, goal, tail, VOCAB, CHUNKS, MASS: tl.constexpr, SHIFT: tl.constexpr,
    WAYS: tl.constexpr, ROUNDS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """About the limit that `search` finds, from four chunks that are read once.

    tail: with MASS, the weight of what is left out. A few rare logits may weigh much, and a sample may lack them; what
    is left out is most of the vocabulary, and a sample has its share of it.
    """
    begin, stride = CHUNKS // 8, CHUNKS // 4
    a = load_chunk(row_ptr, begin, VOCAB, CHUNK)
    b = load_chunk(row_ptr, begin + stride, VOCAB, CHUNK)
    c = load_chunk(row_ptr, begin + 2 * stride, VOCAB, CHUNK)
    d = load_chunk(row_ptr, begin + 3 * stride, VOCAB, CHUNK)
    size = 4.0 * CHUNK / VOCAB
    part = goal * size
    if MASS:
        weights = _weight(a, top, rate, True) + _weight(b, top, rate, True)
        part = tl.sum(weights + _weight(c, top, rate, True) + _weight(d, top, rate, True), 0) - tail * size
    for _ in range(ROUNDS):
        keys = _between(low, high, bottom, True, SHIFT, WAYS)
        values, sums = from_key(keys, SHIFT), tl.zeros([WAYS, CHUNK], tl.float32)
        sums = _tested(sums, a, _weight(a, top, rate, MASS), values)
        sums = _tested(sums, b, _weight(b, top, rate, MASS), values)
        sums = _tested(sums, c, _weight(c, top, rate, MASS), values)
        sums = _tested(sums, d, _weight(d, top, rate, MASS), values)
        low, high, _over = narrowed(keys, tl.sum(sums, 1), part, low, high, 0.0)
    return tl.maximum(from_key(low, SHIFT), bottom)


@triton.jit
def search(
    row_ptr, maximum_ptr, low, high, over, near, unit, bottom, top, rate, goal, VOCAB, CHUNKS, MASS: tl.constexpr,
    SHIFT: tl.constexpr, WAYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the largest key, from `low` on and below `high`, that logits reach whose weights sum to `goal`; the sum
    above it.

    It is `low` if rounding keeps all of them from reaching the goal. over: the sum from `high` on. near: the limit may
    be about there, within `unit` or so; minus infinity: that is unknown. bottom: a finite number that it is hardly
    below.
    """
    passes = 0
    while high - low > 1:
        keys = _between(low, high, bottom, passes < BY_VALUE, SHIFT, WAYS)
        if (passes == 0) & (near > float("-inf")):
            keys = _around(near, unit, low, high, SHIFT, WAYS)
        sums = weigh(row_ptr, maximum_ptr, from_key(keys, SHIFT), top, rate, VOCAB, CHUNKS, MASS, WAYS, CHUNK)
        low, high, over = narrowed(keys, sums, goal, low, high, over)
        passes += 1
    return low, over
