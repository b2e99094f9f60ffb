"""Sample from what min-p, top-k and top-p keep of a row, without sorting the vocabulary.  Lesson 10.

All three keep the start of a ranking: the logits above a limit, and the lowest ids of those equal to it. So it is
enough to find the limit:

    min-p:   largest logit + temperature * log(min_p)
    top-k:   the largest limit that k logits reach
    top-p:   the largest limit at which exp(z) of what is kept sums to top_p of all
    token  = first kept i with  exp(z_0) + ... + exp(z_i)  >  uniform * the sum of all kept

    z = (logit - largest logit) / temperature

Numbers are compared by *key*: the bits of a floating-point number, read as an integer, which has the same order.
bfloat16 has only 65,536 keys.

Mostly few tokens are kept. `sampling.chunk_mass_kernel` has stored the largest logit of each span of 128. Of the logits
that reach the k-th largest of these, there are at least k, and all are in the spans whose largest logit reaches it: 50
or so of 2,000. So the row is not read again, but up to `FEW` spans, which fit in registers, and the rest happens there
(`_choose_of_few`). Top-p is looked for in the likeliest spans, and is found if the logits there weigh enough.

Otherwise, with flat logits, top-p is looked for in a small sample of the row. Equal logits weigh the same, and there
are few different ones in half precision: so one pass over the row sums up those well above the result, and counts the
logits of each of `WINDOW` keys around it. That mostly has the limit among them. If not, and for float32, passes over
the row narrow an interval that holds it (`_search`): each tests several candidates in it, evenly spaced, at first by
value, which is soon near the answer for logits spread like a bell, and then by key.

Tiling: the first part is in `sampling.choose_kernel`, one program per row. Rows that need more leave it with a key to
count from. `count_kernel` has `PARTS` programs per row, so that few rows use all processors, and counts in bytes, eight
logits a thread at a time. `sampling.finish_kernel` finds the limit and the part that has the token, and draws. A search
loads four chunks at once, to wait for memory less often, unless all their maxima are below the lowest candidate. Sums
are in a fixed order, so equal rows get equal tokens.
"""

import torch
import triton
import triton.language as tl

from .single_row_parts import dependent_launch, wait_for_inputs

BY_VALUE = tl.constexpr(4)  # passes that divide by values
SPAN = 128  # logits
FEW = 128  # spans that are held in registers
WINDOW = tl.constexpr(32)  # keys that are counted one by one
PARTS, MOST_CHUNKS = 8, 12  # of a row, at least, and in each, at most: a byte counts 255
SAMPLED = tl.constexpr(16)  # chunks of a row, at least, if some are a sample of it
DONE, SEARCH = tl.constexpr(-(1 << 31)), tl.constexpr(1 - (1 << 31))  # in place of the first key that is counted
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
def _highest(maximum_ptr, chunk, CHUNKS):
    """The largest logit of four chunks."""
    four = chunk + tl.arange(0, 4)
    return tl.max(tl.load(maximum_ptr + four, mask=four < CHUNKS, other=float("-inf")), 0)


@triton.jit
def _weight(x, top, rate, MASS: tl.constexpr):
    """What a logit weighs: exp(z), or 1 in a search that counts."""
    return tl.exp2((x - top) * rate) if MASS else tl.where(x > float("-inf"), 1.0, 0.0)


@triton.jit
def _tested(found, x, weight, least):
    return found + tl.where(x[None, :] >= least[:, None], weight[None, :], 0.0)


@triton.jit
def _weigh(
    row_ptr, maximum_ptr, least, top, rate, VOCAB, CHUNKS, MASS: tl.constexpr, WAYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """For each number in `least` [WAYS]: how many logits are not below it or, with MASS, the sum of their exp(z)."""
    found = tl.zeros([WAYS, CHUNK], tl.float32)
    lowest = tl.min(least, 0)
    for chunk in range(0, CHUNKS, 4):
        if _highest(maximum_ptr, chunk, CHUNKS) >= lowest:
            a = _load(row_ptr, chunk, VOCAB, CHUNK)
            b = _load(row_ptr, chunk + 1, VOCAB, CHUNK)
            c = _load(row_ptr, chunk + 2, VOCAB, CHUNK)
            d = _load(row_ptr, chunk + 3, VOCAB, CHUNK)
            found = _tested(found, a, _weight(a, top, rate, MASS), least)
            found = _tested(found, b, _weight(b, top, rate, MASS), least)
            found = _tested(found, c, _weight(c, top, rate, MASS), least)
            found = _tested(found, d, _weight(d, top, rate, MASS), least)
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
def _estimate(
    row_ptr, low, high, bottom, top, rate, goal, tail, VOCAB, CHUNKS, MASS: tl.constexpr, SHIFT: tl.constexpr,
    WAYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """About the limit that `_search` finds, from four chunks that are read once.

    tail: with MASS, the weight of what is left out. A few rare logits may weigh much, and a sample may lack them; what
    is left out is most of the vocabulary, and a sample has its share of it.
    """
    begin, stride = CHUNKS // 8, CHUNKS // 4
    a = _load(row_ptr, begin, VOCAB, CHUNK)
    b = _load(row_ptr, begin + stride, VOCAB, CHUNK)
    c = _load(row_ptr, begin + 2 * stride, VOCAB, CHUNK)
    d = _load(row_ptr, begin + 3 * stride, VOCAB, CHUNK)
    size = 4.0 * CHUNK / VOCAB
    part = goal * size
    if MASS:
        weights = _weight(a, top, rate, True) + _weight(b, top, rate, True)
        part = tl.sum(weights + _weight(c, top, rate, True) + _weight(d, top, rate, True), 0) - tail * size
    for _ in range(4):
        keys = _between(low, high, bottom, True, SHIFT, WAYS)
        values, found = _value(keys, SHIFT), tl.zeros([WAYS, CHUNK], tl.float32)
        found = _tested(found, a, _weight(a, top, rate, MASS), values)
        found = _tested(found, b, _weight(b, top, rate, MASS), values)
        found = _tested(found, c, _weight(c, top, rate, MASS), values)
        found = _tested(found, d, _weight(d, top, rate, MASS), values)
        low, high, _over = _narrowed(keys, tl.sum(found, 1), part, low, high, 0.0)
    return tl.maximum(_value(low, SHIFT), bottom)


@triton.jit
def _search(
    row_ptr, maximum_ptr, low, high, over, near, unit, bottom, top, rate, goal, VOCAB, CHUNKS, MASS: tl.constexpr,
    SHIFT: tl.constexpr, WAYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The largest key, from `low` on and below `high`, that logits reach whose weights sum to `goal`; the sum above it.

    It is `low` if rounding keeps all of them from reaching the goal. over: the sum from `high` on. near: the limit may
    be about there, within `unit` or so; minus infinity: that is unknown. bottom: a finite number that it is hardly
    below.
    """
    passes = 0
    while high - low > 1:
        keys = _between(low, high, bottom, passes < BY_VALUE, SHIFT, WAYS)
        if (passes == 0) & (near > float("-inf")):
            keys = _around(near, unit, low, high, SHIFT, WAYS)
        found = _weigh(row_ptr, maximum_ptr, _value(keys, SHIFT), top, rate, VOCAB, CHUNKS, MASS, WAYS, CHUNK)
        low, high, over = _narrowed(keys, found, goal, low, high, over)
        passes += 1
    return low, over


@triton.jit
def _draw(
    row_ptr, maximum_ptr, begin, end, running, seen, limit, equals, top, rate, goal, VOCAB, CHUNKS,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The first token whose running sum of exp(z) is above the goal, in the order of ids.

    It is in the chunks from `begin` to `end`, some of which are kept. Those before sum to `running`, and `seen` of
    their logits are equal to the limit.

    Counted are the logits above the limit, and the first `equals` of those equal to it. Sums are rounded: only an entry
    with positive weight may be drawn, and the last such entry if rounding leaves the goal above the sum. (The limit may
    be minus infinity, and forbidden tokens equal to it.)
    """
    token, last = tl.full((), -1, tl.int32), begin
    each = tl.exp2((limit - top) * rate)
    for first in range(begin, end, 4):
        if (token < 0) & (_highest(maximum_ptr, first, CHUNKS) >= limit):
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
def _bisect(keys, weights, goal, low, high):
    """The largest key from `low` on, below `high`, that keys reach whose weights sum to `goal`; and the sum above it.

    It is `low` if all of them do not sum to the goal. No key is above `high`.
    """
    over = tl.full((), 0.0, tl.float32)
    while high - low > 1:
        middle = low + (high - low) // 2
        found = tl.sum(tl.where(keys >= middle.to(tl.int32), weights, 0.0), 0)
        enough = found >= goal
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        over = tl.where(enough, over, found)
    return low, over


@triton.jit
def _choose_of_few(
    row_ptr, span_maximum_ptr, spans_ptr, top, rate, least, total, uniform, min_p, top_k, top_p, VOCAB, SPANS,
    SPANS_TILE: tl.constexpr, SPAN: tl.constexpr, FEW: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The token, if what the row keeps is certain to be in FEW spans; else -1.

    least: what min-p keeps is not below it; minus infinity: all. total: the sum of exp(z) of all, not only of those.
    spans_ptr: where to write the numbers of these spans.
    """
    spans = tl.arange(0, SPANS_TILE)
    highest = tl.load(span_maximum_ptr + spans, mask=spans < SPANS, other=float("-inf"))
    ranks, possible = _key(highest, SHIFT), highest > float("-inf")
    ranked = (top_k > 0) & (top_k < VOCAB)
    lowest, end = _key(tl.full((), float("-inf"), tl.float32), SHIFT).to(tl.int64), _key(top, SHIFT).to(tl.int64) + 1
    wanted = tl.where(ranked, tl.minimum(top_k, FEW + 1), FEW - FEW // 8).to(tl.float32)
    bound, _over = _bisect(ranks, tl.where(possible, 1.0, 0.0), wanted, lowest, end)
    complete = _key_from(least, SHIFT).to(tl.int64)
    bound = tl.maximum(bound, complete)
    count = tl.sum((possible & (ranks >= bound.to(tl.int32))).to(tl.int32), 0)
    if (count > FEW) & ((top_k <= 0) | (top_k >= VOCAB)):
        bound += 1  # fewer reach it than are wanted
        count = tl.sum((possible & (ranks >= bound.to(tl.int32))).to(tl.int32), 0)
    token = tl.full((), -1, tl.int32)
    if (count <= FEW) & (count > 0):
        near = possible & (ranks >= bound.to(tl.int32))
        tl.store(spans_ptr + tl.cumsum(near.to(tl.int32), 0) - 1, spans, mask=near)
        tl.debug_barrier()
        few = tl.arange(0, FEW)
        numbers = tl.load(spans_ptr + few, mask=few < count, other=0)
        columns = numbers[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
        inside = (columns < VOCAB) & (few < count)[:, None]
        x = tl.load(row_ptr + columns, mask=inside, other=float("-inf")).to(tl.float32) + 0.0
        columns, x = tl.reshape(columns, [FEW * SPAN]), tl.reshape(x, [FEW * SPAN])
        keys = _key(x, SHIFT)
        reach = (keys >= bound.to(tl.int32)) & (x > float("-inf"))
        weights = tl.where(reach, tl.exp2((x - top) * rate), 0.0)
        held = tl.sum(weights, 0)
        if ranked | (bound <= complete) | ((min_p <= 0) & (held >= top_p * total)):
            limit, equals = bound, VOCAB
            if ranked | (min_p > 0):
                total = held
            if ranked:
                limit, over = _bisect(keys, tl.where(reach, 1.0, 0.0), top_k.to(tl.float32), bound, end)
                equals = top_k.to(tl.int32) - over.to(tl.int32)
                same = tl.sum((keys == limit.to(tl.int32)).to(tl.int32), 0)
                above = tl.sum(tl.where(keys > limit.to(tl.int32), weights, 0.0), 0)
                each = tl.exp2((_value(limit, SHIFT) - top) * rate)
                total = above + tl.minimum(equals, same) * each
            if top_p < 1:
                goal = top_p * total
                nearer, over = _bisect(keys, weights, goal, limit, end)
                each = tl.exp2((_value(nearer, SHIFT) - top) * rate)
                needed = tl.minimum(tl.maximum(tl.ceil((goal - over) / each), 1.0), VOCAB * 1.0).to(tl.int32)
                equals = tl.where(nearer > limit, needed, tl.minimum(needed, equals))
                total = tl.minimum(total, over + equals * each)
                limit = nearer
            same = keys == limit.to(tl.int32)
            rank = tl.cumsum(same.to(tl.int32), 0)
            kept = ((keys > limit.to(tl.int32)) | (same & (rank <= equals))) & (weights > 0)
            sums = tl.cumsum(tl.where(kept, weights, 0.0), 0)
            token = tl.min(tl.where(kept & (sums > uniform * total), columns, VOCAB), 0)
            if token >= VOCAB:  # rounding left the goal above the sum
                token = tl.max(tl.where(kept, columns, -1), 0)
    return token


@triton.jit
def scale(maxima, temperature):
    """The largest logit of a row, and a factor: exp(z) = exp2((logit - top) * rate)."""
    top = tl.max(maxima, 0) + 0.0  # -0 is 0, as in `_load`: a search up to the key of -0 would miss that of 0
    return top, tl.minimum(1.4426950408889634 / temperature, 3e38)


@triton.jit
def truncates(min_p, top_k, top_p, VOCAB):
    """Whether a row leaves anything out."""
    return (min_p > 0) | ((top_k > 0) & (top_k < VOCAB)) | (top_p < 1)


@triton.jit
def choose_truncated(
    row_ptr, span_maximum_ptr, spans_ptr, maxima, mass, temperature, uniform, min_p, top_k, top_p, VOCAB,
    CHUNKS, CHUNKS_TILE: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr, FEW: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The token of a row that truncates something, whose largest logit is finite and whose temperature is above 0.

    It is -1 if too many tokens are kept. Then the second number is the first key to count, or SEARCH; else DONE.
    maxima, mass: what `sampling.chunk_mass_kernel` has found in each chunk, relative to its maximum.
    """
    top, rate = scale(maxima, temperature)
    total = tl.sum(mass * tl.exp2((maxima - top) * rate), 0)
    least = least_kept(top, temperature, min_p)
    ranked = (top_k > 0) & (top_k < VOCAB)
    token, first = tl.full((), -1, tl.int32), tl.full((), DONE, tl.int32)
    if ranked | (min_p > 0) | (top_p * total < 8 * FEW):  # no logit weighs more than 1
        token = _choose_of_few(
            row_ptr, span_maximum_ptr, spans_ptr, top, rate, least, total, uniform, min_p, top_k, top_p, VOCAB,
            CHUNKS * (CHUNK // SPAN), CHUNKS_TILE * (CHUNK // SPAN), SPAN, FEW, SHIFT,
        )  # fmt: skip
    if token < 0:
        first = tl.full((), SEARCH, tl.int32)
        if SHIFT > 0:  # noqa: SIM102  known when the kernel is compiled
            if (CHUNKS >= SAMPLED) & (not ranked):
                if top_p >= 1:
                    first = _key_from(least, SHIFT)
                elif min_p <= 0:
                    bottom = least_of_mass(top, temperature, (1.0 - top_p) * total, VOCAB)
                    low, high = _key_from(bottom, SHIFT).to(tl.int64), _key(top, SHIFT).to(tl.int64) + 1
                    near = _estimate(
                        row_ptr, low, high, bottom, top, rate, top_p * total, (1.0 - top_p) * total, VOCAB, CHUNKS,
                        True, SHIFT, 8, CHUNK,
                    )  # fmt: skip
                    first = tl.maximum(_key(near, SHIFT) - WINDOW // 2, low.to(tl.int32))
    return token, first


@triton.jit
def least_kept(top, temperature, min_p):
    """What min-p keeps is not below it."""
    least = tl.full((), float("-inf"), tl.float32)
    if min_p > 0:
        least = tl.minimum(top + temperature * tl.log(min_p), top)  # a rounded logarithm may be above 0
    return least


@triton.jit
def least_of_mass(top, temperature, tail, VOCAB):
    """What is below it weighs less than `tail`, even if it is the whole vocabulary."""
    return tl.minimum(top + temperature * tl.log(tail / VOCAB), top)


@triton.jit
def _counted(place, one, number: tl.constexpr, THREADS: tl.constexpr):
    """How many logits of a thread are at each of the four places from 4 * number on, a byte each."""
    return tl.sum(tl.reshape(tl.where(place >> 2 == number, one, 0), [THREADS, 8]), 1)


@triton.jit
def _store_counts(counts_ptr, bytes):
    even, odd = tl.sum(bytes & 0xFF00FF, 0), tl.sum((bytes >> 8) & 0xFF00FF, 0)
    tl.store(counts_ptr, even & 0xFFFF)
    tl.store(counts_ptr + 1, odd & 0xFFFF)
    tl.store(counts_ptr + 2, (even >> 16) & 0xFFFF)
    tl.store(counts_ptr + 3, (odd >> 16) & 0xFFFF)


@triton.jit
def count_kernel(
    logits_ptr, temperature_ptr, maximum_ptr, first_ptr, beyond_ptr, counts_ptr, row_stride, VOCAB, CHUNKS,
    CHUNKS_TILE: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, SHIFT: tl.constexpr,
    THREADS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """In a part of a row: how many logits have each of WINDOW keys, and the sum of exp(z) of all with larger ones."""
    wait_for_inputs(DEPENDENT)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tl.load(first_ptr + row)
    if first > SEARCH:
        chunks = tl.arange(0, CHUNKS_TILE)
        maxima = tl.load(maximum_ptr + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=float("-inf"))
        top, rate = scale(maxima, tl.load(temperature_ptr + row).to(tl.float32))
        beyond = tl.zeros([THREADS], tl.float32)
        a, b, c, d = beyond.to(tl.int32), beyond.to(tl.int32), beyond.to(tl.int32), beyond.to(tl.int32)
        e, f, g, h = beyond.to(tl.int32), beyond.to(tl.int32), beyond.to(tl.int32), beyond.to(tl.int32)
        end = tl.minimum((part + 1) * PART * CHUNK, VOCAB)
        for start in range(part * PART * CHUNK, end, 8 * THREADS):
            columns = start + tl.arange(0, 8 * THREADS)
            x = tl.load(logits_ptr + row * row_stride + columns, mask=columns < end, other=float("-inf"))
            x = x.to(tl.float32) + 0.0
            place = _key(x, SHIFT) - first
            weight = tl.where(place >= WINDOW, tl.exp2((x - top) * rate), 0.0)
            beyond += tl.sum(tl.reshape(weight, [THREADS, 8]), 1)
            one = 1 << ((place & 3) * 8)
            a += _counted(place, one, 0, THREADS)
            b += _counted(place, one, 1, THREADS)
            c += _counted(place, one, 2, THREADS)
            d += _counted(place, one, 3, THREADS)
            e += _counted(place, one, 4, THREADS)
            f += _counted(place, one, 5, THREADS)
            g += _counted(place, one, 6, THREADS)
            h += _counted(place, one, 7, THREADS)
        at = row * PARTS + part
        tl.store(beyond_ptr + at, tl.sum(beyond, 0))
        counts_ptr += at * WINDOW
        _store_counts(counts_ptr, a)
        _store_counts(counts_ptr + 4, b)
        _store_counts(counts_ptr + 8, c)
        _store_counts(counts_ptr + 12, d)
        _store_counts(counts_ptr + 16, e)
        _store_counts(counts_ptr + 20, f)
        _store_counts(counts_ptr + 24, g)
        _store_counts(counts_ptr + 28, h)


@triton.jit
def choose_of_many(
    row_ptr, maximum_ptr, beyond_ptr, counts_ptr, maxima, mass, first, temperature, uniform, min_p, top_k, top_p, VOCAB,
    CHUNKS, CHUNKS_TILE: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """The token of a row that `choose_truncated` leaves, with the sums and counts of its parts from `first` on."""
    top, rate = scale(maxima, temperature)
    total = tl.sum(mass * tl.exp2((maxima - top) * rate), 0)
    begin, end, running, seen = 0, CHUNKS, tl.full((), 0.0, tl.float32), tl.full((), 0, tl.int32)
    if first == SEARCH:
        limit, equals, total = _limit(
            row_ptr, maximum_ptr, maxima, top, rate, total, temperature, min_p, top_k, top_p, VOCAB, CHUNKS,
            CHUNKS_TILE, CHUNK, SHIFT,
        )  # fmt: skip
    else:
        parts, keys = tl.arange(0, PARTS), first + tl.arange(0, WINDOW)
        beyond = tl.load(beyond_ptr + parts)
        counts = tl.load(counts_ptr + parts[:, None] * WINDOW + tl.arange(0, WINDOW)[None, :])
        found = tl.sum(counts, 0)
        each = tl.where(found > 0, tl.exp2((_value(keys, SHIFT) - top) * rate), 0.0)
        least, equals = first, VOCAB
        if top_p < 1:
            goal, above = top_p * total, tl.sum(beyond, 0)
            bottom = least_of_mass(top, temperature, (1.0 - top_p) * total, VOCAB)
            low, high = _key_from(bottom, SHIFT).to(tl.int64), _key(top, SHIFT).to(tl.int64) + 1
            over, after = tl.full((), 0.0, tl.float32), tl.minimum(first.to(tl.int64) + WINDOW, high)
            if above >= goal:
                low = after
            else:
                high, over = after, above
                sums = above + tl.cumsum(found * each, 0, reverse=True)
                low, high, over = _narrowed(keys.to(tl.int64), sums, goal, low, high, over)
            if high - low > 1:
                near = _value(first + (WINDOW // 2), SHIFT)
                unit = tl.abs(near) / 64
                low, over = _search(
                    row_ptr, maximum_ptr, low, high, over, near, unit, bottom, top, rate, goal, VOCAB, CHUNKS,
                    True, SHIFT, 8, CHUNK,
                )  # fmt: skip
            least = low.to(tl.int32)
            weight = tl.exp2((_value(low, SHIFT) - top) * rate)
            equals = tl.minimum(tl.maximum(tl.ceil((goal - over) / weight), 1.0), VOCAB * 1.0).to(tl.int32)
            total = over + equals * weight
        limit = _value(least, SHIFT)
        if (least >= first) & (least < first + WINDOW):
            # The part of the row that has the token.
            same = tl.sum(tl.where((keys == least)[None, :], counts, 0), 1)
            before = tl.cumsum(same, 0) - same
            staying = tl.minimum(same, tl.maximum(equals - before, 0))
            larger = tl.sum(tl.where((keys > least)[None, :], counts * each[None, :], 0.0), 1)
            held = beyond + larger + staying * tl.exp2((limit - top) * rate)
            sums = tl.cumsum(held, 0)
            total = tl.sum(held, 0)
            last = tl.max(tl.where(held > 0, parts, 0), 0)
            part = tl.min(tl.where((sums > uniform * total) & (held > 0), parts, last), 0)
            running = tl.sum(tl.where(parts == part, sums - held, 0.0), 0)
            seen = tl.sum(tl.where(parts == part, before, 0), 0)
            begin = part * PART
            end = tl.minimum(begin + PART, CHUNKS)
    token = _draw(
        row_ptr, maximum_ptr, begin, end, running, seen, limit, equals, top, rate, uniform * total, VOCAB, CHUNKS,
        CHUNK,
    )  # fmt: skip
    return token


@triton.jit
def _limit(
    row_ptr, maximum_ptr, maxima, top, rate, total, temperature, min_p, top_k, top_p, VOCAB, CHUNKS,
    CHUNKS_TILE: tl.constexpr, CHUNK: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The least logit that is kept, how many logits equal to it are, and the sum of exp(z) of what is kept.

    All by searching the row. total: the sum of exp(z) of all.
    """
    chunks, equals = tl.arange(0, CHUNKS_TILE), VOCAB
    limit, end = least_kept(top, temperature, min_p), _key(top, SHIFT).to(tl.int64) + 1
    none, unknown = tl.full((), 0.0, tl.float32), tl.full((), float("-inf"), tl.float32)
    if min_p > 0:
        found = _weigh(
            row_ptr, maximum_ptr, tl.full([1], 0.0, tl.float32) + limit, top, rate, VOCAB, CHUNKS, True, 1, CHUNK
        )
        total = tl.max(found, 0)
    if (top_k > 0) & (top_k < VOCAB):
        if top_k <= CHUNKS:  # so many chunks have a maximum: the limit is not below the least of these
            ranked = tl.sort(maxima, descending=True)
            limit = tl.maximum(limit, tl.sum(tl.where(chunks == top_k - 1, ranked, 0.0), 0))
        lowest = tl.min(tl.where(chunks < CHUNKS, maxima, top), 0)
        bottom = tl.maximum(tl.maximum(limit, top - 4 * (top - lowest)), -3e38)
        near, goal, low = unknown, top_k.to(tl.float32), _key_from(limit, SHIFT).to(tl.int64)
        if (CHUNKS >= SAMPLED) & (top_k > CHUNKS):
            near = _estimate(row_ptr, low, end, bottom, top, rate, goal, 0.0, VOCAB, CHUNKS, False, SHIFT, 4, CHUNK)
        unit = tl.abs(near) / 256 + (top - bottom) / 512
        key, over = _search(
            row_ptr, maximum_ptr, low, end, none, near, unit, bottom, top, rate, goal, VOCAB, CHUNKS, False, SHIFT, 4,
            CHUNK,
        )  # fmt: skip
        limit = _value(key, SHIFT)
        equals = top_k.to(tl.int32) - over.to(tl.int32)
        above = _value(key + 1, SHIFT)
        found = _weigh(
            row_ptr, maximum_ptr, tl.where(tl.arange(0, 2) == 0, limit, above), top, rate, VOCAB, CHUNKS, True, 2,
            CHUNK,
        )  # fmt: skip
        total = tl.minimum(tl.min(found, 0) + equals * tl.exp2((limit - top) * rate), tl.max(found, 0))
    if top_p < 1:
        goal, tail = top_p * total, (1.0 - top_p) * total
        least = tl.maximum(limit, least_of_mass(top, temperature, tail, VOCAB))
        near, low = unknown, _key_from(least, SHIFT).to(tl.int64)
        if CHUNKS >= SAMPLED:
            near = _estimate(row_ptr, low, end, least, top, rate, goal, tail, VOCAB, CHUNKS, True, SHIFT, 8, CHUNK)
        unit = tl.abs(near) / 256 + 0.003 / rate
        key, over = _search(
            row_ptr, maximum_ptr, low, end, none, near, unit, least, top, rate, goal, VOCAB, CHUNKS, True, SHIFT, 8,
            CHUNK,
        )  # fmt: skip
        nearer = _value(key, SHIFT)
        weight = tl.exp2((nearer - top) * rate)
        needed = tl.minimum(tl.maximum(tl.ceil((goal - over) / weight), 1.0), VOCAB * 1.0).to(tl.int32)
        equals = tl.where(nearer > limit, needed, tl.minimum(needed, equals))
        total = tl.minimum(total, over + equals * weight)
        limit = nearer
    return limit, equals, total


def count(
    logits: torch.Tensor, temperature: torch.Tensor, maximum: torch.Tensor, first: torch.Tensor, chunk: int
) -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
    """Count the logits of the rows with a first key, in parts of each: (sums beyond, counts, sizes of the parts).

    logits [rows, vocab], maximum [rows, chunks]. The results are [rows, parts] float32 and [rows, parts, WINDOW] int32.
    """
    rows, vocab = logits.shape
    chunks, parts = maximum.shape[1], PARTS
    while 4 * triton.cdiv(chunks, 4 * parts) > MOST_CHUNKS:
        parts *= 2
    sizes = {"PARTS": parts, "PART": 4 * triton.cdiv(chunks, 4 * parts)}
    beyond = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    counts = torch.empty((rows, parts, WINDOW.value), dtype=torch.int32, device=logits.device)
    if SHIFTS[logits.dtype]:
        count_kernel[(rows, parts)](
            logits, temperature, maximum, first, beyond, counts, logits.stride(0), vocab, chunks,
            CHUNKS_TILE=max(triton.next_power_of_2(chunks), 2), CHUNK=chunk, SHIFT=SHIFTS[logits.dtype], THREADS=256,
            num_warps=8, **sizes, **dependent_launch(logits.device),
        )  # fmt: skip
    return beyond, counts, sizes
