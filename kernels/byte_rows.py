"""Products of one row with an int8 matrix: `single_row`'s kernels for weights of one byte.  Lesson 11.

Half the bytes should take half the time, but only if the arithmetic keeps up: a byte must be converted to float32
before it is multiplied. So a program loads four weights as one 32-bit word, as bf16 loads two, and splits it in
registers:

    shifts and a mask put a byte into the lowest bits of a float of 2^23; subtracting 2^23 leaves its value

which are full-rate instructions, unlike conversions from integers (Kim et al. 2022, "Who says elephants can't run",
section 3). Word j holds the weights of inputs 4 j to 4 j + 3, so the inputs are kept as four vectors. The row's scale
multiplies the finished sum.
"""

import triton
import triton.language as tl

from .single_row_parts import activated, wait_for_inputs

OFFSET = tl.constexpr(8388608.0 + 128.0)  # 2^23, and what makes a signed byte unsigned


@triton.jit
def _dot(words, x0, x1, x2, x3):
    """The products of each word's four bytes with their inputs, summed: like words."""
    unsigned = words ^ -2139062144  # 0x80808080: adds 128 to each byte
    total = ((unsigned & 255 | 0x4B000000).to(tl.float32, bitcast=True) - OFFSET) * x0
    total += ((unsigned >> 8 & 255 | 0x4B000000).to(tl.float32, bitcast=True) - OFFSET) * x1
    total += ((unsigned >> 16 & 255 | 0x4B000000).to(tl.float32, bitcast=True) - OFFSET) * x2
    total += ((unsigned >> 24 & 255 | 0x4B000000).to(tl.float32, bitcast=True) - OFFSET) * x3
    return total


@triton.jit
def _summed(x_ptr, residual_ptr, at, inside, kind: tl.constexpr, ADD: tl.constexpr):
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x = (x + tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    return x


@triton.jit
def _scaled(x, norm_ptr, at, inside, inverse, kind: tl.constexpr):
    return (x * inverse * tl.load(norm_ptr + at, mask=inside, other=0.0)).to(kind).to(tl.float32)


@triton.jit
def byte_rows_kernel(
    x_ptr, residual_ptr, sum_ptr, norm_ptr, weight_ptr, scale_ptr, out_ptr, eps, ROWS, UP,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out = W f(x), a few full rows of W at a time. f: nothing, a norm, or residual sum and norm. GATED: two W's.

    weight_ptr: int32 [rows, COLUMNS / 4]; UP: words before the second W; WIDTH: a power of two, from a row's words.
    """
    WORDS: tl.constexpr = COLUMNS // 4
    program, programs = tl.program_id(0), tl.num_programs(0)
    words = tl.arange(0, WIDTH)
    inside = words < WORDS
    rows = program * TILE + tl.arange(0, TILE)
    at = weight_ptr + rows.to(tl.int64)[:, None] * WORDS + words[None, :]
    mask = (rows < ROWS)[:, None] & inside[None, :]
    weight = tl.load(at, mask=mask, other=0)
    if GATED:
        up = tl.load(at + UP, mask=mask, other=0)
    wait_for_inputs(DEPENDENT)
    kind: tl.constexpr = out_ptr.dtype.element_ty
    first = 4 * words
    x0 = _summed(x_ptr, residual_ptr, first, inside, kind, ADD)
    x1 = _summed(x_ptr, residual_ptr, first + 1, inside, kind, ADD)
    x2 = _summed(x_ptr, residual_ptr, first + 2, inside, kind, ADD)
    x3 = _summed(x_ptr, residual_ptr, first + 3, inside, kind, ADD)
    if ADD and program == 0:
        tl.store(sum_ptr + first, x0.to(kind), mask=inside)
        tl.store(sum_ptr + first + 1, x1.to(kind), mask=inside)
        tl.store(sum_ptr + first + 2, x2.to(kind), mask=inside)
        tl.store(sum_ptr + first + 3, x3.to(kind), mask=inside)
    if NORM:
        inverse = tl.rsqrt(tl.sum(x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3, 0) / COLUMNS + eps)
        x0 = _scaled(x0, norm_ptr, first, inside, inverse, kind)
        x1 = _scaled(x1, norm_ptr, first + 1, inside, inverse, kind)
        x2 = _scaled(x2, norm_ptr, first + 2, inside, inverse, kind)
        x3 = _scaled(x3, norm_ptr, first + 3, inside, inverse, kind)
    for start in tl.range(program * TILE, ROWS, programs * TILE, num_stages=1):
        rows = start + tl.arange(0, TILE)
        after = rows + programs * TILE
        at = weight_ptr + after.to(tl.int64)[:, None] * WORDS + words[None, :]
        mask = (after < ROWS)[:, None] & inside[None, :]
        next_weight = tl.load(at, mask=mask, other=0)
        scale = tl.load(scale_ptr + rows, mask=rows < ROWS, other=0.0)
        y = tl.sum(_dot(weight, x0[None, :], x1[None, :], x2[None, :], x3[None, :]), 1) * scale
        weight = next_weight
        if GATED:
            next_up = tl.load(at + UP, mask=mask, other=0)
            scale = tl.load(scale_ptr + ROWS + rows, mask=rows < ROWS, other=0.0)
            factor = tl.sum(_dot(up, x0[None, :], x1[None, :], x2[None, :], x3[None, :]), 1) * scale
            up = next_up
            y = activated(y, GELU) * factor
        tl.store(out_ptr + rows, y.to(kind), mask=rows < ROWS)
