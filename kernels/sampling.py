"""Sample one token per row from softmax(logits / temperature), with one uniform number per row.  Lesson 10.

Temperature 0 takes the largest logit. Otherwise the cumulative distribution, in the order of ids, is inverted:

    token = first i with  exp(z_0) + ... + exp(z_i)  >  uniform * sum_j exp(z_j),     z = logits / temperature

Tiling: a row is divided into chunks. One program per chunk reads it once and stores two numbers: its maximum, and its
sum of exponentials relative to that (at temperature 0, the index of the maximum). One program per row then finds, from
those numbers, the chunk that holds the sampled token, and reads only that chunk again. So the logits (256,000 per row
for Gemma) are read once, and no tensor of probabilities or random numbers of that size exists. A row that truncates is
read several times more, in the second launch too: see `truncation`.

Log-probabilities are of the logits themselves, whatever the temperature. The first launch stores what they need, for
the rows that ask for them; the second takes the largest logit k times, each time from the span that has it.

A row without probabilities gets the id -1: a logit is NaN or infinity, or all are minus infinity. The maximum that is
computed anyway says so, once NaN, which a maximum ignores, counts as infinity.

Models with a soft cap on logits (Gemma 2: cap * tanh(logit / cap)) apply it before, in place: one more pass in the
logits' own dtype, without a copy.
"""

import torch
import triton
import triton.language as tl

from . import truncation
from .single_row_parts import dependent_launch, wait_for_inputs

CHUNK = 4096
MOST_SCORED = 21  # log-probabilities of a row: the token's own, and of the likeliest


@triton.jit
def chunk_mass_kernel(
    logits_ptr, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, scored_ptr, maximum_ptr, argmax_ptr, mass_ptr,
    unscaled_ptr, span_maximum_ptr, row_stride, VOCAB, CHUNKS,
    CHUNK: tl.constexpr, SPAN: tl.constexpr, TRUNCATES: tl.constexpr, SCORES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + row * row_stride + columns, mask=columns < VOCAB, other=float("-inf"))
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    by_span, scored = False, False
    if TRUNCATES:
        min_p, top_k, top_p = tl.load(min_p_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        by_span = (temperature > 0) & truncation.truncates(min_p, top_k, top_p, VOCAB)
    if SCORES:
        scored = tl.load(scored_ptr + row) > 0
    logits = logits.to(tl.float32)
    logits = tl.where(logits == logits, logits, float("inf"))
    maximum = tl.max(logits, 0)
    at = row * CHUNKS + chunk
    tl.store(maximum_ptr + at, maximum)
    # Differences before the product, so that no exponent is above 0, however small the temperature.
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    if temperature > 0:
        tl.store(mass_ptr + at, tl.sum(tl.exp2((logits - shift) * truncation.rate(temperature)), 0))
    else:
        tl.store(argmax_ptr + at, chunk * CHUNK + tl.argmax(logits, 0))
    if by_span | scored:
        spans = at * (CHUNK // SPAN) + tl.arange(0, CHUNK // SPAN)
        tl.store(span_maximum_ptr + spans, tl.max(tl.reshape(logits, [CHUNK // SPAN, SPAN]), 1) + 0.0)
    if scored:
        tl.store(unscaled_ptr + at, tl.sum(tl.exp(logits - shift), 0))


@triton.jit
def _choose(
    row_ptr, maxima, mass, temperature, uniform, VOCAB, CHUNKS_TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the token at which the sum of exp(z) exceeds a share of the sum of all."""
    chunks, maximum = tl.arange(0, CHUNKS_TILE), tl.max(maxima, 0)
    rate = truncation.rate(temperature)
    mass = mass * tl.exp2((maxima - maximum) * rate)
    goal = uniform * tl.sum(mass, 0)
    # Running sums are rounded: only an entry with positive mass may be chosen, and the last such entry if rounding
    # leaves the goal above the total.
    before = tl.cumsum(mass, 0) - mass
    last = tl.max(tl.where(mass > 0, chunks, 0), 0)
    chunk = tl.min(tl.where((before + mass > goal) & (mass > 0), chunks, last), 0)
    goal -= tl.sum(tl.where(chunks == chunk, before, 0.0), 0)

    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(row_ptr + columns, mask=columns < VOCAB, other=float("-inf"))
    weights = tl.exp2((logits.to(tl.float32) - maximum) * rate)
    last = tl.max(tl.where(weights > 0, columns, 0), 0)
    return tl.min(tl.where((tl.cumsum(weights, 0) > goal) & (weights > 0), columns, last), 0)


@triton.jit
def _score(
    row_ptr, span_maximum_ptr, maxima, unscaled, token, count, ids_ptr, scores_ptr, VOCAB, SPANS,
    SPANS_TILE: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Store `count` ids and log-probabilities: the token's own, then the likeliest ones', the lower ids first."""
    maximum = tl.max(maxima, 0)
    norm = maximum + tl.log(tl.sum(unscaled * tl.exp(maxima - maximum), 0))
    tl.store(ids_ptr, token)
    tl.store(scores_ptr, tl.load(row_ptr + token).to(tl.float32) - norm)
    spans, lanes = tl.arange(0, SPANS_TILE), tl.arange(0, SPAN)
    some = spans < SPANS
    highest = tl.load(span_maximum_ptr + spans, mask=some, other=float("-inf"))
    before, last = tl.full((), float("inf"), tl.float32), tl.full((), -1, tl.int32)  # the logit that was taken
    for rank in range(1, tl.minimum(count, VOCAB + 1)):
        best = tl.max(tl.where(some, highest, float("-inf")), 0)
        span = tl.min(tl.where(some & (highest == best), spans, SPANS - 1), 0)
        columns = span * SPAN + lanes
        x = tl.load(row_ptr + columns, mask=columns < VOCAB, other=float("-inf")).to(tl.float32) + 0.0
        left = ((x < before) | ((x == before) & (columns > last))) & (columns < VOCAB)
        last = tl.min(tl.where(left & (x == best), columns, VOCAB), 0)
        left &= columns != last
        highest = tl.where(spans == span, tl.max(tl.where(left, x, float("-inf")), 0), highest)
        some &= (spans != span) | (tl.sum(left.to(tl.int32), 0) > 0)
        before = best
        tl.store(ids_ptr + rank, last)
        tl.store(scores_ptr + rank, best - norm)


@triton.jit
def choose_kernel(
    logits_ptr, temperature_ptr, uniform_ptr, min_p_ptr, top_k_ptr, top_p_ptr, maximum_ptr, argmax_ptr, mass_ptr,
    span_maximum_ptr, spans_ptr, window_ptr, out_ptr, row_stride, VOCAB, CHUNKS,
    CHUNKS_TILE: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr, FEW: tl.constexpr, DONE: tl.constexpr,
    SHIFT: tl.constexpr, TRUNCATES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    chunks = tl.arange(0, CHUNKS_TILE)
    real = chunks < CHUNKS
    maxima = tl.load(maximum_ptr + row * CHUNKS + chunks, mask=real, other=float("-inf"))
    maximum = tl.max(maxima, 0)
    finite = tl.abs(maximum) < float("inf")
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    begin, width = tl.full((), DONE, tl.int32), tl.full((), 1, tl.int32)
    if temperature > 0:
        uniform = tl.load(uniform_ptr + row).to(tl.float32)
        mass = tl.load(mass_ptr + row * CHUNKS + chunks, mask=real, other=0.0)
        if TRUNCATES:
            min_p, top_k, top_p = tl.load(min_p_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
            if truncation.truncates(min_p, top_k, top_p, VOCAB) & finite:
                token, begin, width = truncation.choose_truncated(
                    row_ptr, span_maximum_ptr + row * CHUNKS * (CHUNK // SPAN), spans_ptr + row * FEW, maxima, mass,
                    temperature, uniform, min_p, top_k, top_p, VOCAB, CHUNKS, CHUNKS_TILE, CHUNK, SPAN, FEW, SHIFT,
                )  # fmt: skip
            else:
                token = _choose(row_ptr, maxima, mass, temperature, uniform, VOCAB, CHUNKS_TILE, CHUNK)
        else:
            token = _choose(row_ptr, maxima, mass, temperature, uniform, VOCAB, CHUNKS_TILE, CHUNK)
    else:
        first = tl.argmax(maxima, 0)
        token = tl.load(argmax_ptr + row * CHUNKS + first)
    tl.store(out_ptr + row, tl.where(finite, token, -1).to(tl.int64))
    if TRUNCATES:
        tl.store(window_ptr + 2 * row, begin)
        tl.store(window_ptr + 2 * row + 1, width)


@triton.jit
def finish_kernel(
    logits_ptr, temperature_ptr, uniform_ptr, min_p_ptr, top_k_ptr, top_p_ptr, scored_ptr, maximum_ptr, mass_ptr,
    unscaled_ptr, span_maximum_ptr, window_ptr, beyond_ptr, counts_ptr, out_ptr, ids_ptr, scores_ptr, row_stride, VOCAB,
    CHUNKS,
    CHUNKS_TILE: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    WINDOW: tl.constexpr, DONE: tl.constexpr, SHIFT: tl.constexpr, MOST_SCORED: tl.constexpr, SCORES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Choose the token of a row that needed a pass over all of it, and find log-probabilities."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    first, count = tl.load(window_ptr + 2 * row), 0
    if SCORES:
        count = tl.load(scored_ptr + row)
    if (first != DONE) | (count > 0):
        row_ptr, token = logits_ptr + row * row_stride, tl.load(out_ptr + row).to(tl.int32)
        chunks = tl.arange(0, CHUNKS_TILE)
        real = chunks < CHUNKS
        maxima = tl.load(maximum_ptr + row * CHUNKS + chunks, mask=real, other=float("-inf"))
        if first != DONE:
            mass = tl.load(mass_ptr + row * CHUNKS + chunks, mask=real, other=0.0)
            token = truncation.choose_of_many(
                row_ptr, maximum_ptr + row * CHUNKS, beyond_ptr + row * PARTS, counts_ptr + row * (PARTS * WINDOW),
                maxima, mass, first, tl.load(window_ptr + 2 * row + 1), tl.load(temperature_ptr + row).to(tl.float32),
                tl.load(uniform_ptr + row).to(tl.float32), tl.load(min_p_ptr + row), tl.load(top_k_ptr + row),
                tl.load(top_p_ptr + row), VOCAB, CHUNKS, CHUNKS_TILE, CHUNK, PART, PARTS, SHIFT,
            )  # fmt: skip
            tl.store(out_ptr + row, token.to(tl.int64))
        if SCORES:  # noqa: SIM102  known when the kernel is compiled
            if (count > 0) & (token >= 0):
                unscaled = tl.load(unscaled_ptr + row * CHUNKS + chunks, mask=real, other=0.0)
                _score(
                    row_ptr, span_maximum_ptr + row * CHUNKS * (CHUNK // SPAN), maxima, unscaled, token,
                    tl.minimum(count, MOST_SCORED), ids_ptr + row * MOST_SCORED, scores_ptr + row * MOST_SCORED, VOCAB,
                    CHUNKS * (CHUNK // SPAN), CHUNKS_TILE * (CHUNK // SPAN), SPAN,
                )  # fmt: skip


@triton.jit
def soft_cap_kernel(logits_ptr, size, CAP: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    logits = tl.load(logits_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    capped = CAP * (2.0 * tl.sigmoid(logits * (2.0 / CAP)) - 1.0)  # tanh
    tl.store(logits_ptr + at, capped.to(logits_ptr.dtype.element_ty), mask=at < size)


def soft_cap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Replace logits by cap * tanh(logits / cap) and return them.  Lesson 10.

    logits: contiguous, of any shape; ValueError otherwise.
    """
    if not logits.is_contiguous():
        raise ValueError("soft_cap works in place: pass contiguous logits")
    if logits.numel():
        grid = (triton.cdiv(logits.numel(), CHUNK),)
        soft_cap_kernel[grid](logits, logits.numel(), CAP=float(cap), TILE=CHUNK, num_warps=8)
    return logits


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    uniform: torch.Tensor,
    limits: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """logits [rows, vocab], temperature [rows] from 0, uniform [rows] in [0, 1) -> ids [rows] int64.  Lesson 10.

    limits: min_p [rows] float32 (0: none), top_k [rows] int32 (below 1: none), top_p [rows] float32 (1: none); or None.
    """
    return _sample(logits, temperature, uniform, limits, None)[0]


def scored_sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    uniform: torch.Tensor,
    limits: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scored: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `sample`, with log-probabilities: also (ids, scores), [rows, MOST_SCORED] int32 and float32.  Lesson 10.

    scored [rows] int32: how many of a row are written, at most all: first that of its token, then those of the
    likeliest, which of equals are the lowest ids. They are of the logits, before temperature and truncation. Nothing is
    written for a row that gets no token.
    """
    return _sample(logits, temperature, uniform, limits, scored)


def _sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    uniform: torch.Tensor,
    limits: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    scored: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, vocab = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    temperature, uniform = temperature.contiguous(), uniform.contiguous()
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    count = rows if scored is not None else 0
    ids = torch.empty((count, MOST_SCORED), dtype=torch.int32, device=logits.device)
    scores = torch.empty((count, MOST_SCORED), dtype=torch.float32, device=logits.device)
    if rows:
        chunks = triton.cdiv(vocab, CHUNK)
        dependent = dependent_launch(logits.device)
        maximum = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
        mass, unscaled = torch.empty_like(maximum), torch.empty_like(maximum)
        argmax = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
        spans = chunks * (CHUNK // truncation.SPAN)
        span_maximum = torch.empty((rows, spans), dtype=torch.float32, device=logits.device)
        min_p, top_k, top_p = (temperature, argmax, temperature) if limits is None else limits  # or what is not read
        asked = min_p.contiguous(), top_k.contiguous(), top_p.contiguous()
        scored = argmax if scored is None else scored.contiguous()
        truncates, sizes = limits is not None, (logits.stride(0), vocab, chunks)
        options = {"CHUNK": CHUNK, "SPAN": truncation.SPAN, **dependent}
        tiled = {**options, "CHUNKS_TILE": max(triton.next_power_of_2(chunks), 2)}
        tiled |= {"SHIFT": truncation.SHIFTS[logits.dtype], "DONE": truncation.DONE.value}
        chunk_mass_kernel[(rows, chunks)](
            logits, temperature, *asked, scored, maximum, argmax, mass, unscaled, span_maximum, *sizes,
            TRUNCATES=truncates, SCORES=count > 0, num_warps=4, **options,
        )  # fmt: skip
        few, window = (torch.empty((rows, n), dtype=torch.int32, device=logits.device) for n in (truncation.FEW, 2))
        choose_kernel[(rows,)](
            logits, temperature, uniform, *asked, maximum, argmax, mass, span_maximum, few, window, out, *sizes,
            FEW=truncation.FEW, TRUNCATES=truncates, num_warps=16 if truncates else 8, **tiled,
        )  # fmt: skip
        if truncates:
            beyond, counts, parts = truncation.count(logits, temperature, maximum, window, CHUNK)
            finish_kernel[(rows,)](
                logits, temperature, uniform, *asked, scored, maximum, mass, unscaled, span_maximum, window, beyond,
                counts, out, ids, scores, *sizes, WINDOW=truncation.WINDOW.value, MOST_SCORED=MOST_SCORED,
                SCORES=count > 0, num_warps=8, **parts, **tiled,
            )  # fmt: skip
    return out, ids, scores
