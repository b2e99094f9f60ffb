"""Products of one row with a matrix of int8 or int4 codes, in integer arithmetic.  Lessons 05 and 11.

Fewer bytes take less time only if the arithmetic keeps up: converting each code to a float takes several instructions,
and at a quarter of the bytes an H200 reads 8 codes in the time of two. So the codes stay integers, and the inputs
become integers too. Each group of 16 or 32 inputs is written in fixed point, in two bytes ("digits"; three for
float32), of which the highest is signed:

    x ~ unit * (digit_0 + 256 digit_1),   unit = max |x| of the group / 32000

which is 64 times finer than bf16 is at the group's largest input. Rounding needs one multiply-add: the float32 number
x / unit + 1.5 * 2^23 has the integer in its low bits, and byte permutations collect the same digit of four inputs in a
word. One instruction, dp4a, multiplies four codes by four digits and adds up the products exactly. Scales and units
multiply the sums of groups. Inputs that the format rounds to int8 are one digit with one unit, the scale of the token.

Tiling: as in `single_row`: a program holds a few full rows at a time and loads the next ones, and their scales, while
it adds up the current ones. A thread loads 16 bytes at once, a "quad" of four words. Word j of a row holds the int8
codes of inputs 4 j to 4 j + 3, or the int4 codes of inputs 8 j to 8 j + 7, where the low halves of its bytes are the
even inputs. What does not depend on the previous kernel is loaded before waiting for it. With a norm, its weights
multiply the inputs before they become integers, and the root mean square divides the finished sums: nothing has to
wait until the squares are added up.
"""

import torch
import triton
import triton.language as tl

from .arguments import CodeMatrix, is_compiled
from .quantized_inputs import magnitude, to_even
from .single_row_parts import RowsConfig, activated, capped, dependent_launch, normed, processors, wait_for_inputs

GROUP = 32  # int4 groups must be multiples of this: a quad has one scale
ROUNDS = tl.constexpr(12582912.0)  # 1.5 * 2^23: the float32 numbers near it are integers
ROUNDS_BITS = tl.constexpr(0x4B400000)


@triton.jit
def dot4(words, digits, total, SIGNED: tl.constexpr, COMPILED: tl.constexpr):
    """total plus the products of each word's four signed bytes with four digits, SIGNED or not; all int32."""
    if COMPILED:
        KIND: tl.constexpr = "dp4a.s32.s32" if SIGNED else "dp4a.s32.u32"
        total = tl.inline_asm_elementwise(
            KIND + " $0, $1, $2, $3;", "=r,r,r,r", [words, digits, total], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        for byte in tl.static_range(4):
            digit = digits << (24 - 8 * byte) >> 24
            total += (words << (24 - 8 * byte) >> 24) * (digit if SIGNED else digit & 255)
    return total


@triton.jit
def bytes_of(q, COMPILED: tl.constexpr):
    """q [QUADS, 4, 4] int32 -> words of four bytes each: of bytes 0, of bytes 1 and of bytes 2, each [1, QUADS, 4]."""
    even, odd = tl.split(tl.reshape(q, [q.shape[0], 4, 2, 2]))
    q0, q2 = tl.split(even)
    q1, q3 = tl.split(odd)
    if COMPILED:
        low, middle, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b;
            prmt.b32 a, $3, $4, 0x5140;
            prmt.b32 b, $5, $6, 0x5140;
            prmt.b32 $0, a, b, 0x5410;
            prmt.b32 $1, a, b, 0x7632;
            prmt.b32 a, $3, $4, 0x0062;
            prmt.b32 b, $5, $6, 0x0062;
            prmt.b32 $2, a, b, 0x5410;
            }
            """,
            "=&r,=&r,=&r,r,r,r,r", [q0, q1, q2, q3], dtype=(tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low, middle, high = _bytes(q0, q1, q2, q3, 0), _bytes(q0, q1, q2, q3, 8), _bytes(q0, q1, q2, q3, 16)
    return low[None, :, :], middle[None, :, :], high[None, :, :]


@triton.jit
def _bytes(q0, q1, q2, q3, shift):
    return q0 >> shift & 255 | (q1 >> shift & 255) << 8 | (q2 >> shift & 255) << 16 | q3 >> shift << 24


@triton.jit
def quad_products(
    low, high, even0, odd0, even1, odd1, even2, odd2,
    BITS: tl.constexpr, DIGITS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """[TILE, QUADS] float32: products of the codes of each quad with the inputs, in units of the inputs.

    low, high [TILE, QUADS, 4]: words of codes; int8 has only `low`.
    """
    none = tl.zeros(low.shape, tl.int32)
    total = dot4(low, even0, none, DIGITS == 1, COMPILED)
    if BITS == 4:
        total = dot4(high, odd0, total, DIGITS == 1, COMPILED)
    total = tl.sum(total, 2)
    if DIGITS > 1:
        higher = dot4(low, even1, none, DIGITS == 2, COMPILED)
        if BITS == 4:
            higher = dot4(high, odd1, higher, DIGITS == 2, COMPILED)
        total += 256 * tl.sum(higher, 2)
    out = total.to(tl.float32)
    if DIGITS > 2:
        highest = dot4(low, even2, none, True, COMPILED)
        if BITS == 4:
            highest = dot4(high, odd2, highest, True, COMPILED)
        out += 65536.0 * tl.sum(highest, 2).to(tl.float32)
    return out


@triton.jit
def tile_scales(
    scale_ptr, zero_ptr, rows, quads, ROWS,
    BITS: tl.constexpr, QUAD_COUNT: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """(scales, zero points) of a tile's rows: [TILE] for int8, [TILE, QUADS] for int4."""
    if BITS == 8:
        scale = tl.load(scale_ptr + rows, mask=rows < ROWS, other=0.0)
        zero = scale
    else:
        at = rows[:, None] * GROUPS + (quads // (QUAD_COUNT // GROUPS))[None, :]
        mask = (rows < ROWS)[:, None] & (quads < QUAD_COUNT)[None, :]
        scale = tl.load(scale_ptr + at, mask=mask, other=0.0)
        zero = scale
        if ZEROS:
            zero = tl.load(zero_ptr + at, mask=mask, other=0)
    return scale, zero


@triton.jit
def tile_product(
    weight, scale, zero, even0, odd0, even1, odd1, even2, odd2, sums, unit,
    BITS: tl.constexpr, ZEROS: tl.constexpr, DIGITS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """[TILE]: the products of a tile's rows [TILE, QUADS, 4] with the inputs.

    sums [1, QUADS]: of the inputs, in units; unit [QUADS].
    """
    low, high = weight, weight
    if BITS == 4:  # codes plus 8, from 0 to 15
        low, high = weight & 0x0F0F0F0F, weight >> 4 & 0x0F0F0F0F
    y = quad_products(low, high, even0, odd0, even1, odd1, even2, odd2, BITS, DIGITS, COMPILED)
    if BITS == 8:
        out = tl.sum(y * unit[None, :], 1) * scale
    else:
        center = 8.0
        if ZEROS:
            center = 8.0 + zero.to(tl.float32)
        out = tl.sum((y - center * sums) * (scale.to(tl.float32) * unit[None, :]), 1)
    return out


@triton.jit
def integer_rows_kernel(
    x_ptr, post_norm_ptr, residual_ptr, sum_ptr, norm_ptr, weight_ptr, bias_ptr, scale_ptr, zero_ptr, input_scale_ptr,
    out_ptr, eps, ROWS,
    COLUMNS: tl.constexpr, BITS: tl.constexpr, QUADS: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr,
    NORM: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, SOFT_CAP: tl.constexpr,
    ZEROS: tl.constexpr, DIGITS: tl.constexpr, DEPENDENT: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """out = W f(x), a few full rows of W at a time. f: nothing, a norm, or residual sum and norm. GATED: two W's.

    weight_ptr: int32 [rows, COLUMNS * BITS / 32]; QUADS: a power of two, from a row's words / 4. DIGITS: of the inputs;
    1: they are rounded to int8, with a scale of their own or that at input_scale_ptr.
    """
    WORDS: tl.constexpr = COLUMNS * BITS // 32
    QUAD_COUNT: tl.constexpr = (WORDS + 3) // 4
    PER: tl.constexpr = 32 // BITS  # inputs of a word
    program, programs = tl.program_id(0), tl.num_programs(0)
    quads = tl.arange(0, QUADS)
    words = 4 * quads[:, None] + tl.arange(0, 4)[None, :]
    columns = PER * words[:, :, None] + tl.arange(0, PER)[None, None, :]
    inside, real = words < WORDS, columns < COLUMNS
    rows = program * TILE + tl.arange(0, TILE)
    at = weight_ptr + rows.to(tl.int64)[:, None, None] * WORDS + words[None, :, :]
    mask = (rows < ROWS)[:, None, None] & inside[None, :, :]
    weight = tl.load(at, mask=mask, other=0, eviction_policy="evict_first")
    scale, zero = tile_scales(scale_ptr, zero_ptr, rows, quads, ROWS, BITS, QUAD_COUNT, GROUPS, ZEROS)
    if GATED:
        up_scale_ptr, up_zero_ptr = scale_ptr + ROWS * GROUPS, zero_ptr
        if ZEROS:
            up_zero_ptr += ROWS * GROUPS
        up = tl.load(at + ROWS * WORDS, mask=mask, other=0, eviction_policy="evict_first")
        up_scale, up_zero = tile_scales(up_scale_ptr, up_zero_ptr, rows, quads, ROWS, BITS, QUAD_COUNT, GROUPS, ZEROS)
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
    inverse = 1.0
    if NORM:
        inverse = tl.rsqrt(tl.sum(tl.reshape(x * x, [QUADS * 4 * PER]), 0) / COLUMNS + eps)
        x = x * norm
    if DIGITS == 1:
        x = (x * inverse).to(kind).to(tl.float32)
        inverse = 1.0
        if input_scale_ptr is None:
            most = tl.max(tl.reshape(magnitude(x), [QUADS * 4 * PER]), 0)
            token_scale = tl.where(most > 0, most / 127.5, 1.0)
        else:
            token_scale = tl.load(input_scale_ptr)
        steps = to_even(tl.minimum(tl.maximum(x / token_scale, -200.0), 200.0))
        number = tl.minimum(tl.maximum(steps, -128.0), 127.0) + ROUNDS
        unit = tl.zeros([QUADS], tl.float32) + token_scale
    else:
        HIGHEST: tl.constexpr = 32000.0 if DIGITS == 2 else 4190000.0
        largest = tl.maximum(tl.max(tl.max(magnitude(x), 2), 1), 1e-30)
        unit = largest * (1.0 / HIGHEST)
        number = x * (HIGHEST / largest)[:, None, None] + ROUNDS
    q = number.to(tl.int32, bitcast=True)
    if DIGITS == 3:  # two digits are in the lowest bits, which are 0 in ROUNDS
        q -= ROUNDS_BITS
    if BITS == 8:
        even0, even1, even2 = bytes_of(q, COMPILED)
        odd0, odd1, odd2 = even0, even1, even2
    else:
        even, odd = tl.split(tl.reshape(q, [QUADS, 4, 4, 2]))
        even0, even1, even2 = bytes_of(even, COMPILED)
        odd0, odd1, odd2 = bytes_of(odd, COMPILED)
    ones = tl.full([1, QUADS, 4], 0x01010101, tl.int32)
    sums = quad_products(ones, ones, even0, odd0, even1, odd1, even2, odd2, BITS, DIGITS, COMPILED)
    for start in tl.range(program * TILE, ROWS, programs * TILE, num_stages=1):
        rows = start + tl.arange(0, TILE)
        after = rows + programs * TILE
        at = weight_ptr + after.to(tl.int64)[:, None, None] * WORDS + words[None, :, :]
        mask = (after < ROWS)[:, None, None] & inside[None, :, :]
        next_weight = tl.load(at, mask=mask, other=0, eviction_policy="evict_first")
        next_scale, next_zero = tile_scales(scale_ptr, zero_ptr, after, quads, ROWS, BITS, QUAD_COUNT, GROUPS, ZEROS)
        if GATED:
            next_up = tl.load(at + ROWS * WORDS, mask=mask, other=0, eviction_policy="evict_first")
            next_up_scale, next_up_zero = tile_scales(
                up_scale_ptr, up_zero_ptr, after, quads, ROWS, BITS, QUAD_COUNT, GROUPS, ZEROS
            )
        y = inverse * tile_product(
            weight, scale, zero, even0, odd0, even1, odd1, even2, odd2, sums, unit, BITS, ZEROS, DIGITS, COMPILED
        )
        weight, scale, zero = next_weight, next_scale, next_zero
        if bias_ptr is not None:
            y += tl.load(bias_ptr + rows, mask=rows < ROWS, other=0.0).to(tl.float32)
        if GATED:
            factor = inverse * tile_product(
                up, up_scale, up_zero, even0, odd0, even1, odd1, even2, odd2, sums, unit, BITS, ZEROS, DIGITS, COMPILED
            )
            up, up_scale, up_zero = next_up, next_up_scale, next_up_zero
            if bias_ptr is not None:
                factor += tl.load(bias_ptr + ROWS + rows, mask=rows < ROWS, other=0.0).to(tl.float32)
            y = activated(y, GELU) * factor
        tl.store(out_ptr + rows, capped(y, SOFT_CAP).to(kind), mask=rows < ROWS)


def takes(columns: int, bits: int, group: int) -> bool:
    """Return whether rows are whole words, and an int4 group (`group` inputs) whole quads."""
    return columns % 4 == 0 if bits == 8 else columns % group == 0 and group % GROUP == 0


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
    columns, bits = matrix.columns, matrix.bits
    rows = matrix.rows // (2 if activation else 1)
    out = torch.empty((1, rows), dtype=x.dtype, device=x.device)
    total = torch.empty_like(x) if residual is not None else None
    dependent = dependent_launch(x.device)
    quads = triton.next_power_of_2(triton.cdiv(matrix.words.shape[1], 4))
    config = default_config(rows, quads, bits, bool(activation), processors(x.device))
    if not is_compiled(x):
        config = RowsConfig(2, 32, 4)  # each interpreted operation takes microseconds, for 32 rows as for one
    digits = 1 if matrix.rounded_inputs else 3 if x.dtype == torch.float32 else 2
    integer_rows_kernel[(config.programs,)](
        x, post_norm, residual, total, norm, matrix.words, bias, matrix.scales, matrix.zeros, matrix.input_scale, out,
        eps, rows,
        COLUMNS=columns, BITS=bits, QUADS=quads, GROUPS=1 if bits == 8 else matrix.scales.shape[1], TILE=config.tile,
        NORM=norm is not None, ADD=residual is not None, GATED=activation is not None,
        GELU=activation == "gelu_tanh", SOFT_CAP=soft_cap or 0.0, ZEROS=matrix.zeros is not None, DIGITS=digits,
        COMPILED=is_compiled(x), num_warps=config.warps, **dependent,
    )  # fmt: skip
    return out, total


def default_config(rows: int, quads: int, bits: int, gated: bool, processors: int) -> RowsConfig:
    """Return the fastest of those measured on an H200 at Gemma 2B's shapes, in a whole decode step.

    Configurations are chosen together: a kernel that leaves registers free lets the next one start and load early.
    """
    if quads > 256:  # long rows: large programs, so that few of them read the inputs
        per = 2 if quads <= 512 else 1
        return RowsConfig(min(per * processors, triton.cdiv(rows, 2)), 2 if quads <= 1024 else 1, 16)
    if rows > 256 * processors:
        return RowsConfig(8 * processors, 4, 2)
    if gated:
        return RowsConfig(5 * processors, 4, 4) if bits == 4 else RowsConfig(8 * processors, 2, 4)
    if bits == 4:
        tile = 8 if triton.cdiv(rows, 8) <= 2 * processors else 16
        return RowsConfig(min(2 * processors, triton.cdiv(rows, tile)), tile, 4)
    tiles = triton.cdiv(rows, 4)
    return RowsConfig(tiles if tiles <= 4 * processors else 3 * processors, 4, 4)
