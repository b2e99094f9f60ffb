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
logits of each key around it, at most `WINDOW`. That mostly has the limit among them. If not, and for float32, passes
over the row narrow an interval that holds it (`row_search`): each tests several candidates in it, evenly spaced, at
first by value, which is soon near the answer for logits spread like a bell, and then by key.

Tiling: the first part is in `sampling.choose_kernel`, one program per row. Rows that need more leave it with keys to
count. `count_kernel` has `PARTS` programs per row, so that few rows use all processors. Few logits have one of these
keys, so counting them by atomic additions is cheaper than comparing each logit with each key. `sampling.finish_kernel`
finds the limit and the part that has the token, and draws. A search loads four chunks at once, to wait for memory less
often, unless all their maxima are below the lowest candidate. Sums of floating-point numbers are in a fixed order, so
equal rows get equal tokens.
"""

import torch
import triton
import triton.language as tl

from .arguments import is_compiled
from .row_search import estimate, from_key, highest_of_four, key_from, load_chunk, narrowed, search, to_key, weigh
from .single_row_parts import dependent_launch, wait_for_inputs

SPAN = 128  # logits
FEW = 128  # spans that are held in registers
WINDOW = tl.constexpr(256)  # keys that are counted one by one, at most
NARROW, REACH = tl.constexpr(32), tl.constexpr(0.0866)  # a window's keys at least, and z above and below its middle
PARTS = 16  # of a row
SAMPLED = tl.constexpr(16)  # chunks of a row, at least, if some are a sample of it
ROUNDS = tl.constexpr(3)  # in which a sample is searched before keys are counted: a fourth would add little
DONE, SEARCH = tl.constexpr(-(1 << 31)), tl.constexpr(1 - (1 << 31))  # in place of the first key that is counted
SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # bits of a float32 that are 0 in each dtype


@triton.jit
def _draw(
    row_ptr, maximum_ptr, begin, end, running, seen, limit, equals, top, rate, goal, VOCAB, CHUNKS,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the first token whose running sum of exp(z) is above the goal, in the order of ids.

    It is in the chunks from `begin` to `end`, some of which are kept. Those before sum to `running`, and `seen` of
    their logits are equal to the limit.

    Counted are the logits above the limit, and the first `equals` of those equal to it. Sums are rounded: only an entry
    with positive weight may be drawn, and the last such entry if rounding leaves the goal above the sum. (The limit may
    be minus infinity, and forbidden tokens equal to it.)
    """
    token, last = tl.full((), -1, tl.int32), begin
    each = tl.exp2((limit - top) * rate)
    for first in range(begin, end, 4):
        if (token < 0) & (highest_of_four(maximum_ptr, first, CHUNKS) >= limit):
            above, equal = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.int32)
            for step in tl.static_range(4):
                x = load_chunk(row_ptr, first + step, VOCAB, CHUNK)
                above += tl.where(x > limit, tl.exp2((x - top) * rate), 0.0)
                equal += (x == limit).to(tl.int32)
            count = tl.sum(equal, 0)
            added = tl.sum(above, 0) + tl.minimum(count, tl.maximum(equals - seen, 0)) * each
            if running + added > goal:
                for chunk in range(first, first + 4):
                    columns = chunk * CHUNK + tl.arange(0, CHUNK)
                    x = load_chunk(row_ptr, chunk, VOCAB, CHUNK)
                    same = (x == limit) & (columns < VOCAB)
                    weight = tl.exp2((x - top) * rate)
                    count = tl.sum(same.to(tl.int32), 0)
                    larger = tl.sum(tl.where(x > limit, weight, 0.0), 0)
                    added = larger + tl.minimum(count, tl.maximum(equals - seen, 0)) * each
                    if (token < 0) & (running + added > goal):
                        rank = seen + tl.cumsum(same.to(tl.int32), 0)
                        kept = ((x > limit) | (same & (rank <= equals))) & (weight > 0)
                        sums = running + tl.cumsum(tl.where(kept, weight, 0.0), 0)
                        here = tl.min(tl.where(kept & (sums > goal), columns, VOCAB), 0)
                        newest = tl.max(tl.where(kept, columns, -1), 0)  # if rounding left the goal above the sum
                        token = tl.where(here < VOCAB, here, newest)
                    running += added
                    seen += count
                last = first
            else:
                running += added
                seen += count
                if added > 0:
                    last = first
    if token < 0:  # the same, and the last such entry is in the chunks from `last` on
        for chunk in range(last, last + 4):
            columns = chunk * CHUNK + tl.arange(0, CHUNK)
            x = load_chunk(row_ptr, chunk, VOCAB, CHUNK)
            inside = (columns < VOCAB) & (tl.exp2((x - top) * rate) > 0)
            newest = tl.max(tl.where((x > limit) & inside, columns, -1), 0)
            tie = tl.min(tl.where((x == limit) & inside, columns, VOCAB), 0)
            token = tl.maximum(token, newest)
            token = tl.where((token < 0) & (tie < VOCAB), tie, token)
    return token


@triton.jit
def _bisect(keys, weights, goal, low, high):
    """Return the largest key from `low` on, below `high`, that keys reach whose weights sum to `goal`; and the sum
    above it.

    It is `low` if all of them do not sum to the goal. No key is above `high`.
    """
    over = tl.full((), 0.0, tl.float32)
    while high - low > 1:
        middle = low + (high - low) // 2
        held = tl.sum(tl.where(keys >= middle.to(tl.int32), weights, 0.0), 0)
        enough = held >= goal
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        over = tl.where(enough, over, held)
    return low, over


@triton.jit
def _choose_of_few(
    row_ptr, span_maximum_ptr, spans_ptr, top, rate, least, total, uniform, min_p, top_k, top_p, VOCAB, SPANS,
    SPANS_TILE: tl.constexpr, SPAN: tl.constexpr, FEW: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Return the token, if what the row keeps is certain to be in FEW spans; else -1.

    least: what min-p keeps is not below it; minus infinity: all. total: the sum of exp(z) of all, not only of those.
    spans_ptr: where to write the numbers of these spans.
    """
    spans = tl.arange(0, SPANS_TILE)
    highest = tl.load(span_maximum_ptr + spans, mask=spans < SPANS, other=float("-inf"))
    ranks, possible = to_key(highest, SHIFT), highest > float("-inf")
    ranked = (top_k > 0) & (top_k < VOCAB)
    lowest = to_key(tl.full((), float("-inf"), tl.float32), SHIFT).to(tl.int64)
    end = to_key(top, SHIFT).to(tl.int64) + 1
    wanted = tl.where(ranked, tl.minimum(top_k, FEW + 1), FEW - FEW // 8).to(tl.float32)
    bound, _over = _bisect(ranks, tl.where(possible, 1.0, 0.0), wanted, lowest, end)
    complete = key_from(least, SHIFT).to(tl.int64)
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
        keys = to_key(x, SHIFT)
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
                each = tl.exp2((from_key(limit, SHIFT) - top) * rate)
                total = above + tl.minimum(equals, same) * each
            if top_p < 1:
                goal = top_p * total
                nearer, over = _bisect(keys, weights, goal, limit, end)
                each = tl.exp2((from_key(nearer, SHIFT) - top) * rate)
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
def rate(temperature):
    """Return a factor: exp(x / temperature) = exp2(x * rate). A product takes less time than a division."""
    return tl.minimum(1.4426950408889634 / temperature, 3e38)


@triton.jit
def scale(maxima, temperature):
    """Return the largest logit of a row, and a factor: exp(z) = exp2((logit - top) * rate)."""
    top = tl.max(maxima, 0) + 0.0  # -0 is 0, as in `load_chunk`: a search up to the key of -0 would miss that of 0
    return top, rate(temperature)


@triton.jit
def truncates(min_p, top_k, top_p, VOCAB):
    """Return whether a row leaves anything out."""
    return (min_p > 0) | ((top_k > 0) & (top_k < VOCAB)) | (top_p < 1)


@triton.jit
def choose_truncated(
    row_ptr, span_maximum_ptr, spans_ptr, maxima, mass, temperature, uniform, min_p, top_k, top_p, VOCAB,
    CHUNKS, CHUNKS_TILE: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr, FEW: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Return the token of a row that truncates something, whose largest logit is finite and whose temperature is above
    0.

    It is -1 if too many tokens are kept. Then the second number is the first key to count, or SEARCH; else DONE. The
    third is how many keys to count.
    maxima, mass: what `sampling.chunk_mass_kernel` has found in each chunk, relative to its maximum.
    """
    top, rate = scale(maxima, temperature)
    total = tl.sum(mass * tl.exp2((maxima - top) * rate), 0)
    least = least_kept(top, temperature, min_p)
    ranked = (top_k > 0) & (top_k < VOCAB)
    token, first, width = tl.full((), -1, tl.int32), tl.full((), DONE, tl.int32), tl.full((), 1, tl.int32)
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
                    first = key_from(least, SHIFT)
                elif min_p <= 0:
                    bottom = least_of_mass(top, temperature, (1.0 - top_p) * total, VOCAB)
                    low, high = key_from(bottom, SHIFT).to(tl.int64), to_key(top, SHIFT).to(tl.int64) + 1
                    near = estimate(
                        row_ptr, low, high, bottom, top, rate, top_p * total, (1.0 - top_p) * total, VOCAB, CHUNKS,
                        True, SHIFT, 8, ROUNDS, CHUNK,
                    )  # fmt: skip
                    middle, reach = to_key(near, SHIFT), REACH / rate
                    farthest = tl.maximum(to_key(near + reach, SHIFT) - middle, middle - to_key(near - reach, SHIFT))
                    farthest = tl.minimum(tl.maximum(farthest, NARROW // 2), WINDOW // 2)
                    first = tl.maximum(middle - farthest, low.to(tl.int32))
                    width = 2 * farthest
    return token, first, width


@triton.jit
def least_kept(top, temperature, min_p):
    """Return a limit: what min-p keeps is not below it."""
    least = tl.full((), float("-inf"), tl.float32)
    if min_p > 0:
        least = tl.minimum(top + temperature * tl.log(min_p), top)  # a rounded logarithm may be above 0
    return least


@triton.jit
def least_of_mass(top, temperature, tail, VOCAB):
    """Return a limit: what is below it weighs less than `tail`, even if it is the whole vocabulary."""
    return tl.minimum(top + temperature * tl.log(tail / VOCAB), top)


@triton.jit
def _count_one(at, some, COMPILED: tl.constexpr):
    """Add 1 at each pointer, atomically. Triton's own addition would first deal the pointers out anew to threads."""
    if COMPILED:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p red.relaxed.gpu.global.add.u32 [$1], 1; mov.u32 $0, 0; }",
            "=r,l,r", [at.to(tl.int64), some.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.atomic_add(at, 1, mask=some, sem="relaxed")


@triton.jit
def count_kernel(
    logits_ptr, temperature_ptr, maximum_ptr, window_ptr, beyond_ptr, counts_ptr, row_stride, VOCAB, CHUNKS,
    CHUNKS_TILE: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, SHIFT: tl.constexpr,
    THREADS: tl.constexpr, COMPILED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write how many logits of a row's part have each key of its window, and the sum of exp(z) of those above it."""
    wait_for_inputs(DEPENDENT)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tl.load(window_ptr + 2 * row)
    if first > SEARCH:
        width = tl.load(window_ptr + 2 * row + 1)
        chunks = tl.arange(0, CHUNKS_TILE)
        maxima = tl.load(maximum_ptr + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=float("-inf"))
        top, rate = scale(maxima, tl.load(temperature_ptr + row).to(tl.float32))
        at = row * PARTS + part
        counts_ptr += at * WINDOW
        keys = tl.arange(0, WINDOW)
        tl.store(counts_ptr + keys, tl.zeros([WINDOW], tl.int32), mask=keys < width)
        tl.debug_barrier()
        beyond = tl.zeros([THREADS], tl.float32)
        begin, end = part * PART * CHUNK, tl.minimum((part + 1) * PART * CHUNK, VOCAB)
        row_ptr = logits_ptr + row * row_stride
        columns = begin + tl.arange(0, 8 * THREADS)
        following = tl.load(row_ptr + columns, mask=columns < end, other=float("-inf"))
        for _ in range(begin, end, 8 * THREADS):
            x = following.to(tl.float32) + 0.0
            columns += 8 * THREADS
            following = tl.load(row_ptr + columns, mask=columns < end, other=float("-inf"))
            index = to_key(x, SHIFT) - first
            weight = tl.where(index >= width, tl.exp2((x - top) * rate), 0.0)
            beyond += tl.sum(tl.reshape(weight, [THREADS, 8]), 1)
            _count_one(counts_ptr + index, (index >= 0) & (index < width), COMPILED)
        tl.store(beyond_ptr + at, tl.sum(beyond, 0))


@triton.jit
def choose_of_many(
    row_ptr, maximum_ptr, beyond_ptr, counts_ptr, maxima, mass, first, width, temperature, uniform, min_p, top_k, top_p,
    VOCAB, CHUNKS, CHUNKS_TILE: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """Return the token of a row that `choose_truncated` leaves, with the sums and counts of its parts from `first`
    on.
    """
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
        counts = tl.load(
            counts_ptr + parts[:, None] * WINDOW + tl.arange(0, WINDOW)[None, :], mask=(keys < first + width)[None, :],
            other=0,
        )  # fmt: skip
        counted = tl.sum(counts, 0)
        each = tl.where(counted > 0, tl.exp2((from_key(keys, SHIFT) - top) * rate), 0.0)
        least, equals = first, VOCAB
        if top_p < 1:
            goal, above = top_p * total, tl.sum(beyond, 0)
            bottom = least_of_mass(top, temperature, (1.0 - top_p) * total, VOCAB)
            low, high = key_from(bottom, SHIFT).to(tl.int64), to_key(top, SHIFT).to(tl.int64) + 1
            over, after = tl.full((), 0.0, tl.float32), tl.minimum(first.to(tl.int64) + width, high)
            if above >= goal:
                low = after
            else:
                high, over = after, above
                sums = above + tl.cumsum(counted * each, 0, reverse=True)
                low, high, over = narrowed(keys.to(tl.int64), sums, goal, low, high, over)
            if high - low > 1:
                near = from_key(first + width // 2, SHIFT)
                unit = tl.abs(near) / 64 + 0.003 / rate
                low, over = search(
                    row_ptr, maximum_ptr, low, high, over, near, unit, bottom, top, rate, goal, VOCAB, CHUNKS,
                    True, SHIFT, 8, CHUNK,
                )  # fmt: skip
            least = low.to(tl.int32)
            weight = tl.exp2((from_key(low, SHIFT) - top) * rate)
            equals = tl.minimum(tl.maximum(tl.ceil((goal - over) / weight), 1.0), VOCAB * 1.0).to(tl.int32)
            total = over + equals * weight
        limit = from_key(least, SHIFT)
        if (least >= first) & (least < first + width):
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
    """Return the least logit that is kept, how many logits equal to it are, and the sum of exp(z) of what is kept.

    All by searching the row. total: the sum of exp(z) of all.
    """
    chunks, equals = tl.arange(0, CHUNKS_TILE), VOCAB
    limit, end = least_kept(top, temperature, min_p), to_key(top, SHIFT).to(tl.int64) + 1
    none, unknown = tl.full((), 0.0, tl.float32), tl.full((), float("-inf"), tl.float32)
    if min_p > 0:
        sums = weigh(
            row_ptr, maximum_ptr, tl.full([1], 0.0, tl.float32) + limit, top, rate, VOCAB, CHUNKS, True, 1, CHUNK
        )
        total = tl.max(sums, 0)
    if (top_k > 0) & (top_k < VOCAB):
        if top_k <= CHUNKS:  # so many chunks have a maximum: the limit is not below the least of these
            ranked = tl.sort(maxima, descending=True)
            limit = tl.maximum(limit, tl.sum(tl.where(chunks == top_k - 1, ranked, 0.0), 0))
        lowest = tl.min(tl.where(chunks < CHUNKS, maxima, top), 0)
        bottom = tl.maximum(tl.maximum(limit, top - 4 * (top - lowest)), -3e38)
        near, goal, low = unknown, top_k.to(tl.float32), key_from(limit, SHIFT).to(tl.int64)
        if (CHUNKS >= SAMPLED) & (top_k > CHUNKS):
            near = estimate(row_ptr, low, end, bottom, top, rate, goal, 0.0, VOCAB, CHUNKS, False, SHIFT, 4, 4, CHUNK)
        unit = tl.abs(near) / 256 + (top - bottom) / 512
        key, over = search(
            row_ptr, maximum_ptr, low, end, none, near, unit, bottom, top, rate, goal, VOCAB, CHUNKS, False, SHIFT, 4,
            CHUNK,
        )  # fmt: skip
        limit = from_key(key, SHIFT)
        equals = top_k.to(tl.int32) - over.to(tl.int32)
        above = from_key(key + 1, SHIFT)
        sums = weigh(
            row_ptr, maximum_ptr, tl.where(tl.arange(0, 2) == 0, limit, above), top, rate, VOCAB, CHUNKS, True, 2,
            CHUNK,
        )  # fmt: skip
        total = tl.minimum(tl.min(sums, 0) + equals * tl.exp2((limit - top) * rate), tl.max(sums, 0))
    if top_p < 1:
        goal, tail = top_p * total, (1.0 - top_p) * total
        least = tl.maximum(limit, least_of_mass(top, temperature, tail, VOCAB))
        near, low = unknown, key_from(least, SHIFT).to(tl.int64)
        if CHUNKS >= SAMPLED:
            near = estimate(row_ptr, low, end, least, top, rate, goal, tail, VOCAB, CHUNKS, True, SHIFT, 8, 4, CHUNK)
        unit = tl.abs(near) / 256 + 0.003 / rate
        key, over = search(
            row_ptr, maximum_ptr, low, end, none, near, unit, least, top, rate, goal, VOCAB, CHUNKS, True, SHIFT, 8,
            CHUNK,
        )  # fmt: skip
        nearer = from_key(key, SHIFT)
        weight = tl.exp2((nearer - top) * rate)
        needed = tl.minimum(tl.maximum(tl.ceil((goal - over) / weight), 1.0), VOCAB * 1.0).to(tl.int32)
        equals = tl.where(nearer > limit, needed, tl.minimum(needed, equals))
        total = tl.minimum(total, over + equals * weight)
        limit = nearer
    return limit, equals, total


def count(
    logits: torch.Tensor, temperature: torch.Tensor, maximum: torch.Tensor, window: torch.Tensor, chunk: int
) -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
    """Count the logits of the rows with a first key, in parts of each: (sums beyond, counts, sizes of the parts).

    logits [rows, vocab], maximum [rows, chunks], window [rows, 2] int32: the first key and the number of keys. The
    results are [rows, parts] float32 and [rows, parts, WINDOW] int32.
    """
    rows, vocab = logits.shape
    chunks = maximum.shape[1]
    sizes = {"PARTS": PARTS, "PART": 4 * triton.cdiv(chunks, 4 * PARTS)}
    beyond = torch.empty((rows, PARTS), dtype=torch.float32, device=logits.device)
    counts = torch.empty((rows, PARTS, WINDOW.value), dtype=torch.int32, device=logits.device)
    if SHIFTS[logits.dtype]:
        count_kernel[(rows, PARTS)](
            logits, temperature, maximum, window, beyond, counts, logits.stride(0), vocab, chunks,
            CHUNKS_TILE=max(triton.next_power_of_2(chunks), 2), CHUNK=chunk, SHIFT=SHIFTS[logits.dtype], THREADS=256,
            COMPILED=is_compiled(logits), num_warps=8, **sizes, **dependent_launch(logits.device),
        )  # fmt: skip
    return beyond, counts, sizes
