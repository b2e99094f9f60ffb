"""Sample one token per row from softmax(logits / temperature), with one uniform number per row.  Lesson 10.

Temperature 0 takes the largest logit. Otherwise the cumulative distribution, in the order of ids, is inverted:

    token = first i with  exp(z_0) + ... + exp(z_i)  >  uniform * sum_j exp(z_j),     z = logits / temperature

Tiling: a row is divided into chunks. One program per chunk reads it once and stores two numbers: its maximum, and its
sum of exponentials relative to that (at temperature 0, the index of the maximum). One program per row then finds, from
those numbers, the chunk that holds the sampled token, and reads only that chunk again. So the logits (256,000 per row
for Gemma) are read once, and no tensor of probabilities or random numbers of that size exists. A row that truncates is
read several times more, in the second launch too: see `truncation`.

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


@triton.jit
def chunk_mass_kernel(
    logits_ptr, temperature_ptr, maximum_ptr, argmax_ptr, mass_ptr, row_stride, VOCAB, CHUNKS,
    CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + row * row_stride + columns, mask=columns < VOCAB, other=float("-inf"))
    logits = logits.to(tl.float32)
    logits = tl.where(logits == logits, logits, float("inf"))
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    maximum = tl.max(logits, 0)
    at = row * CHUNKS + chunk
    tl.store(maximum_ptr + at, maximum)
    if temperature > 0:
        # Differences before the division, so that no exponent is above 0, however small the temperature.
        shift = tl.where(maximum == float("-inf"), 0.0, maximum)
        tl.store(mass_ptr + at, tl.sum(tl.exp((logits - shift) / temperature), 0))
    else:
        tl.store(argmax_ptr + at, chunk * CHUNK + tl.argmax(logits, 0))


@triton.jit
def _choose(
    row_ptr, maxima, mass, temperature, uniform, VOCAB, CHUNKS_TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The token at which the sum of exp(z) exceeds a share of the sum of all."""
    chunks, maximum = tl.arange(0, CHUNKS_TILE), tl.max(maxima, 0)
    mass = mass * tl.exp((maxima - maximum) / temperature)
    goal = uniform * tl.sum(mass, 0)
    # Running sums are rounded: only an entry with positive mass may be chosen, and the last such entry if rounding
    # leaves the goal above the total.
    before = tl.cumsum(mass, 0) - mass
    last = tl.max(tl.where(mass > 0, chunks, 0), 0)
    chunk = tl.min(tl.where((before + mass > goal) & (mass > 0), chunks, last), 0)
    goal -= tl.sum(tl.where(chunks == chunk, before, 0.0), 0)

    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(row_ptr + columns, mask=columns < VOCAB, other=float("-inf"))
    weights = tl.exp((logits.to(tl.float32) - maximum) / temperature)
    last = tl.max(tl.where(weights > 0, columns, 0), 0)
    return tl.min(tl.where((tl.cumsum(weights, 0) > goal) & (weights > 0), columns, last), 0)


@triton.jit
def choose_kernel(
    logits_ptr, temperature_ptr, uniform_ptr, min_p_ptr, top_k_ptr, top_p_ptr, maximum_ptr, argmax_ptr, mass_ptr,
    out_ptr, row_stride, VOCAB, CHUNKS,
    CHUNKS_TILE: tl.constexpr, CHUNK: tl.constexpr, SHIFT: tl.constexpr, TRUNCATES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    chunks = tl.arange(0, CHUNKS_TILE)
    real = chunks < CHUNKS
    maxima = tl.load(maximum_ptr + row * CHUNKS + chunks, mask=real, other=float("-inf"))
    maximum = tl.max(maxima, 0)
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    if temperature > 0:
        uniform = tl.load(uniform_ptr + row).to(tl.float32)
        mass = tl.load(mass_ptr + row * CHUNKS + chunks, mask=real, other=0.0)
        if TRUNCATES:
            min_p, top_k, top_p = tl.load(min_p_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
            asked = (min_p > 0) | ((top_k > 0) & (top_k < VOCAB)) | (top_p < 1)
            if asked & (tl.abs(maximum) < float("inf")):
                token = truncation.choose_truncated(
                    row_ptr, maximum_ptr + row * CHUNKS, maxima, mass, temperature, uniform, min_p, top_k, top_p,
                    VOCAB, CHUNKS, CHUNKS_TILE, CHUNK, SHIFT,
                )  # fmt: skip
            else:
                token = _choose(row_ptr, maxima, mass, temperature, uniform, VOCAB, CHUNKS_TILE, CHUNK)
        else:
            token = _choose(row_ptr, maxima, mass, temperature, uniform, VOCAB, CHUNKS_TILE, CHUNK)
    else:
        first = tl.argmax(maxima, 0)
        token = tl.load(argmax_ptr + row * CHUNKS + first)
    tl.store(out_ptr + row, tl.where(tl.abs(maximum) < float("inf"), token, -1).to(tl.int64))


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
    rows, vocab = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    temperature, uniform = temperature.contiguous(), uniform.contiguous()
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        chunks = triton.cdiv(vocab, CHUNK)
        dependent = dependent_launch(logits.device)
        maximum = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
        mass = torch.empty_like(maximum)
        argmax = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
        chunk_mass_kernel[(rows, chunks)](
            logits, temperature, maximum, argmax, mass, logits.stride(0), vocab, chunks,
            CHUNK=CHUNK, num_warps=8, **dependent,
        )  # fmt: skip
        unread = (temperature, argmax, temperature)
        min_p, top_k, top_p = unread if limits is None else (each.contiguous() for each in limits)
        choose_kernel[(rows,)](
            logits, temperature, uniform, min_p, top_k, top_p, maximum, argmax, mass, out, logits.stride(0), vocab,
            chunks, CHUNKS_TILE=max(triton.next_power_of_2(chunks), 2), CHUNK=CHUNK,
            SHIFT=truncation.SHIFTS[logits.dtype], TRUNCATES=limits is not None,
            num_warps=8 if limits is None else 16, **dependent,
        )  # fmt: skip
    return out
