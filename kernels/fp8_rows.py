"""Products of one row with a matrix of fp8 codes, in float16 and float32.  Lessons 07 and 11.

In the time of a clock cycle, each of an H200's processors reads some 18 bytes and issues 128 instructions, so a code
can have about five of them. e4m3 numbers have no integer arithmetic (`integer_rows`), and tensor cores want 64 rows or
a matrix in shared memory. But float16 holds the product of two e4m3 numbers exactly, and its instructions do two at a
time (compute capability 8.9):

    cvt.rn.f16x2.e4m3x2    two codes -> two float16 numbers: exact, for small codes too
    fma.rn.f16x2           two products, added in float16
    cvt.f32.f16, add       a sum of eight products -> float32, added in float32

that is 1.5 instructions for a code. Inputs are divided by 32, so that no eight products leave float16's range. The sums
of eight lose a few parts in ten thousand of their size; rounding the result to bfloat16 loses four times as much. If
the format rounds inputs to e4m3, each program does that once; else they are scaled to the same range.

Tiling: as in `integer_rows`. A program holds a few full rows and loads the next ones while it adds up the current ones.
A thread loads 16 bytes at once, a "quad" of four words; word j of a row holds the codes of inputs 4 j to 4 j + 3. With
a norm, the sum of squares and the largest input, which decides the scale, are found in one reduction.
"""

import torch
import triton
import triton.language as tl

from .arguments import CodeMatrix, is_compiled
from .cache_codes import of_words, to_codes, to_numbers
from .quantized_inputs import has_fp8
from .single_row_parts import RowsConfig, activated, capped, dependent_launch, normed, processors, wait_for_inputs

LARGEST = tl.constexpr(448.0)


def _quad_products() -> tl.constexpr:
    """$1 to $4: words of four codes; $5 to $12: their inputs, two in each -> $0, the sum of the 16 products."""
    steps = [".reg .b16 a, b; .reg .b32 first, second, sums, one, other;"]
    for word in range(4):
        steps += [f"mov.b32 {{a, b}}, ${1 + word}; cvt.rn.f16x2.e4m3x2 first, a; cvt.rn.f16x2.e4m3x2 second, b;"]
        add = "fma.rn.f16x2 sums, first, {0}, sums;" if word else "mul.rn.f16x2 sums, first, {0};"
        steps += [add.format(f"${5 + 2 * word}"), f"fma.rn.f16x2 sums, second, ${6 + 2 * word}, sums;"]
    steps += ["mov.b32 {a, b}, sums; cvt.f32.f16 one, a; cvt.f32.f16 other, b; add.rn.f32 $0, one, other;"]
    return tl.constexpr("{" + " ".join(steps) + "}")


QUAD_PRODUCTS = _quad_products()
SHRINK = tl.constexpr(1 / 32)


@triton.jit
def four(x):
    """[..., 4] -> its four parts."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def pair(low, high):
    """Two float32 numbers -> one int32 with both as float16."""
    low, high = low.to(tl.float16).to(tl.int16, bitcast=True), high.to(tl.float16).to(tl.int16, bitcast=True)
    return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def pairs_of(x, QUADS: tl.constexpr):
    """Inputs [QUADS, 4, 4] -> the eight pairs of each quad, [1, QUADS] int32 each, times SHRINK."""
    x0, x1, x2, x3 = four(tl.reshape(x * SHRINK, [QUADS * 4, 1, 4]))
    first, second = tl.reshape(pair(x0, x1), [1, QUADS, 4]), tl.reshape(pair(x2, x3), [1, QUADS, 4])
    a, c, e, g = four(first)
    b, d, f, h = four(second)
    return a, b, c, d, e, f, g, h


@triton.jit
def quad_products(words, x, pairs, QUADS: tl.constexpr, COMPILED: tl.constexpr):
    """Words [rows, QUADS, 4] of codes times inputs -> the sums of each quad's products, times SHRINK: [rows, QUADS]."""
    if COMPILED:
        w0, w1, w2, w3 = four(words)
        a, b, c, d, e, f, g, h = pairs
        total = tl.inline_asm_elementwise(
            QUAD_PRODUCTS, "=&r,r,r,r,r,r,r,r,r,r,r,r,r", [w0, w1, w2, w3, a, b, c, d, e, f, g, h],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        c0, c1, c2, c3 = of_words(words, tl.float32, tl.uint8)
        x0, x1, x2, x3 = four(tl.reshape(x * SHRINK, [QUADS * 4, 1, 4]))
        total = c0 * tl.reshape(x0, [1, QUADS, 4]) + c1 * tl.reshape(x1, [1, QUADS, 4])
        total += c2 * tl.reshape(x2, [1, QUADS, 4]) + c3 * tl.reshape(x3, [1, QUADS, 4])
        total = tl.sum(total, 2)
    return total


@triton.jit
def rounded(x, COMPILED: tl.constexpr):
    """x float32, at most LARGEST -> the nearest e4m3 numbers, still float32."""
    if COMPILED:
        nearest = x.to(tl.float8e4nv).to(tl.float32)
    else:  # the interpreter cuts numbers off instead
        codes = to_codes(tl.reshape(x, [1, x.numel]), tl.full([1], 1.0, tl.float32), tl.uint8)
        nearest = tl.where(x == x, tl.reshape(to_numbers(codes, tl.float32), x.shape), x)  # NaN stays NaN
    return nearest


@triton.jit
def sum_and_largest(total, largest, other_total, other_largest):
    return total + other_total, tl.maximum(largest, other_largest)


@triton.jit
def two_sums(one, two, other_one, other_two):
    return one + other_one, two + other_two


@triton.jit
def fp8_rows_kernel(
    x_ptr, post_norm_ptr, residual_ptr, sum_ptr, norm_ptr, weight_ptr, bias_ptr, scale_ptr, input_scale_ptr, out_ptr,
    eps, ROWS,
    COLUMNS: tl.constexpr, QUADS: tl.constexpr, TILE: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, SOFT_CAP: tl.constexpr, ROUND: tl.constexpr, DEPENDENT: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """out = W f(x), a few full rows of W at a time. f: nothing, a norm, or residual sum and norm. GATED: two W's.

    weight_ptr: int32 [rows, COLUMNS / 4]; QUADS: a power of two, from a row's words / 4. ROUND: inputs are rounded to
    e4m3. Inputs have a scale of their own, or that at input_scale_ptr.
    """
    WORDS: tl.constexpr = COLUMNS // 4
    program, programs = tl.program_id(0), tl.num_programs(0)
    words = 4 * tl.arange(0, QUADS)[:, None] + tl.arange(0, 4)[None, :]
    columns = 4 * words[:, :, None] + tl.arange(0, 4)[None, None, :]
    inside, real = words < WORDS, columns < COLUMNS
    rows = program * TILE + tl.arange(0, TILE)
    at = weight_ptr + rows.to(tl.int64)[:, None, None] * WORDS + words[None, :, :]
    mask = (rows < ROWS)[:, None, None] & inside[None, :, :]
    weight = tl.load(at, mask=mask, other=0, eviction_policy="evict_first")
    scale = tl.load(scale_ptr + rows, mask=rows < ROWS, other=0.0)
    if GATED:
        up = tl.load(at + ROWS * WORDS, mask=mask, other=0, eviction_policy="evict_first")
        up_scale = tl.load(scale_ptr + ROWS + rows, mask=rows < ROWS, other=0.0)
    if post_norm_ptr is not None:
        post_norm = tl.load(post_norm_ptr + columns, mask=real, other=0.0)
    if ADD:  # written before the previous kernel started
        residual = tl.load(residual_ptr + columns, mask=real, other=0.0).to(tl.float32)
    if NORM:
        norm = tl.load(norm_ptr + columns, mask=real, other=0.0)
    wait_for_inputs(DEPENDENT)
    kind: tl.constexpr = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + columns, mask=real, other=0.0).to(tl.float32)
    if post_norm_ptr is not None:
        x = normed(x, post_norm, eps, COLUMNS).to(kind).to(tl.float32)
    if ADD:
        total = (x + residual).to(kind)
        if program == 0:
            tl.store(sum_ptr + columns, total, mask=real)
        x = total.to(tl.float32)
    if NORM:
        squares = x * x
        x *= norm
        squares, most = tl.reduce(
            (tl.reshape(squares, [QUADS * 16]), tl.reshape(tl.abs(x), [QUADS * 16])), 0, sum_and_largest
        )
        factor = tl.rsqrt(squares / COLUMNS + eps)
        x, most = x * factor, most * factor
        if ROUND:  # as the norm's own kernel writes them
            x, most = x.to(kind).to(tl.float32), most.to(kind).to(tl.float32)
    else:
        most = tl.max(tl.reshape(tl.abs(x), [QUADS * 16]), 0)
    if input_scale_ptr is None:
        unit = tl.where(most > 0, most / LARGEST, 1.0)
    else:
        unit = tl.load(input_scale_ptr)
    x = tl.clamp(x / unit, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if ROUND:
        x = rounded(x, COMPILED)
    pairs = pairs_of(x, QUADS)
    unit = unit / SHRINK
    for start in tl.range(program * TILE, ROWS, programs * TILE, num_stages=1):
        rows = start + tl.arange(0, TILE)
        after = rows + programs * TILE
        at = weight_ptr + after.to(tl.int64)[:, None, None] * WORDS + words[None, :, :]
        mask = (after < ROWS)[:, None, None] & inside[None, :, :]
        next_weight = tl.load(at, mask=mask, other=0, eviction_policy="evict_first")
        next_scale = tl.load(scale_ptr + after, mask=after < ROWS, other=0.0)
        if GATED:
            next_up = tl.load(at + ROWS * WORDS, mask=mask, other=0, eviction_policy="evict_first")
            next_up_scale = tl.load(scale_ptr + ROWS + after, mask=after < ROWS, other=0.0)
        y = quad_products(weight, x, pairs, QUADS, COMPILED)
        if GATED:
            y_up = quad_products(up, x, pairs, QUADS, COMPILED)
            y, y_up = tl.reduce((y, y_up), 1, two_sums)
            y, y_up = y * (scale * unit), y_up * (up_scale * unit)
            if bias_ptr is not None:
                y += tl.load(bias_ptr + rows, mask=rows < ROWS, other=0.0).to(tl.float32)
                y_up += tl.load(bias_ptr + ROWS + rows, mask=rows < ROWS, other=0.0).to(tl.float32)
            y = activated(y, GELU) * y_up
            up, up_scale = next_up, next_up_scale
        else:
            y = tl.sum(y, 1) * (scale * unit)
            if bias_ptr is not None:
                y += tl.load(bias_ptr + rows, mask=rows < ROWS, other=0.0).to(tl.float32)
        weight, scale = next_weight, next_scale
        tl.store(out_ptr + rows, capped(y, SOFT_CAP).to(kind), mask=rows < ROWS)


def takes(columns: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether rows are whole words, and the device converts fp8; float16 sums are too coarse for float32."""
    exact = device.type != "cuda" or dtype != torch.float32
    return columns % 4 == 0 and exact and has_fp8(device)


def product(
    x: torch.Tensor,
    matrix: CodeMatrix,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    post_norm: torch.Tensor | None = None,
    activation: str | None = None,
    soft_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(matrix f(x) + bias [1, rows], the residual sum or None) for one row x [1, columns].  Lesson 11.

    The arguments are those of `single_row.product`.
    """
    columns, rows = matrix.columns, matrix.rows // (2 if activation else 1)
    out = torch.empty((1, rows), dtype=x.dtype, device=x.device)
    total = torch.empty_like(x) if residual is not None else None
    dependent = dependent_launch(x.device)
    quads = triton.next_power_of_2(triton.cdiv(matrix.words.shape[1], 4))
    config = default_config(rows, quads, bool(activation), processors(x.device))
    if not is_compiled(x):
        config = RowsConfig(2, 32, 4)  # each interpreted operation takes microseconds, for 32 rows as for one
    fp8_rows_kernel[(config.programs,)](
        x, post_norm, residual, total, norm, matrix.words, bias, matrix.scales, matrix.input_scale, out, eps, rows,
        COLUMNS=columns, QUADS=quads, TILE=config.tile, NORM=norm is not None, ADD=residual is not None,
        GATED=activation is not None, GELU=activation == "gelu_tanh", SOFT_CAP=soft_cap or 0.0,
        ROUND=matrix.rounded_inputs, COMPILED=is_compiled(x), num_warps=config.warps, **dependent,
    )  # fmt: skip
    return out, total


def default_config(rows: int, quads: int, gated: bool, processors: int) -> RowsConfig:
    """Return the fastest of those measured on an H200 at Gemma 2B's shapes, in a whole decode step."""
    if quads > 256:  # long rows: large programs, so that few of them read the inputs
        per = 2 if quads <= 512 else 1
        return RowsConfig(min(per * processors, triton.cdiv(rows, 2)), 2, 16)
    if rows > 256 * processors:
        return RowsConfig(8 * processors, 4, 2)
    if gated:
        return RowsConfig(5 * processors, 4, 4)
    tiles = triton.cdiv(rows, 4)
    if tiles <= 4 * processors:
        return RowsConfig(tiles, 4, 2)
    return RowsConfig(3 * processors, 4, 4)
