"""Products of 2 to 64 rows with int8, fp8 and int4 matrices: codes are converted in registers.  Lessons 05, 07 and 11.

Up to some hundred rows, a product takes the time of reading its matrix, so codes of one byte or half a byte should take
half or a quarter of it. Tensor cores multiply bf16 numbers, so each code is converted as it arrives:

    int4: masks and byte permutations put a half byte into the lowest bits of a bf16 number of 128; subtracting 136
          leaves the code (Kim et al. 2022, "Who says elephants can't run", section 3)
    fp8:  `cache_codes.to_numbers`

Scales multiply the sums: of the whole row for int8 and fp8, of each group for int4. If the inputs are codes of the
matrix's kind, int8 or fp8 tensor cores multiply, and nothing is converted. fp8 tensor cores add up with some 14 bits;
so after each piece of inputs, its sums are added to float32 numbers (DeepSeek-AI 2024, "DeepSeek-V3 technical report",
section 3.3.2).

Tiling: the matrix's rows fill the rows of a tensor core instruction, which the few rows of x would leave empty
(Hopper's fp8 instructions have 64 rows). A program has a tile of 64 matrix rows and all rows of x. Small matrices have
too few such tiles to read memory at full speed, so several programs split the inputs; the last of them to finish adds
up their sums, always in the same order.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .arguments import CodeMatrix, is_compiled
from .cache_codes import to_numbers
from .single_row_parts import processors

MOST_ROWS = 64
TILE = 64  # matrix rows of a program
MOST_TILES = 1 << 16


@triton.jit
def half_bytes(packed, COMPILED: tl.constexpr):
    """Return the low and high halves of bytes, from 0 to 15, minus 8: two bf16 tensors like `packed`, uint8."""
    if COMPILED:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 even, odd, bits, one, offset;
            mov.b32 bits, 0x43434343;
            mov.b32 one, 0x3F803F80;
            mov.b32 offset, 0xC308C308;
            and.b32 even, $4, 0x0F0F0F0F;
            shr.b32 odd, $4, 4;
            and.b32 odd, odd, 0x0F0F0F0F;
            prmt.b32 $0, even, bits, 0x4140;
            prmt.b32 $1, even, bits, 0x4342;
            prmt.b32 $2, odd, bits, 0x4140;
            prmt.b32 $3, odd, bits, 0x4342;
            fma.rn.bf16x2 $0, $0, one, offset;
            fma.rn.bf16x2 $1, $1, one, offset;
            fma.rn.bf16x2 $2, $2, one, offset;
            fma.rn.bf16x2 $3, $3, one, offset;
            }
            """,
            "=&r,=&r,=&r,=&r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low = ((packed & 15).to(tl.float32) - 8.0).to(tl.bfloat16)
        high = ((packed >> 4).to(tl.float32) - 8.0).to(tl.bfloat16)
    return low, high


@triton.jit
def _dot(weight, x, total, COMPILED: tl.constexpr):
    """total + weight x^T for codes (integers or bf16) and bf16 inputs."""
    if COMPILED:
        total = tl.dot(weight.to(tl.bfloat16), tl.trans(x), total)
    else:  # the interpreter multiplies the bits of bf16 numbers
        total += tl.dot(weight.to(tl.float32), tl.trans(x.to(tl.float32)))
    return total


@triton.jit
def few_rows_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, zero_ptr, out_ptr, part_ptr, finished_ptr, ROWS, TOKENS,
    COLUMNS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, CODES: tl.constexpr,
    TILE: tl.constexpr, X_ROWS: tl.constexpr, PIECE: tl.constexpr, SPLITS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """out [TOKENS, ROWS] = x W^T. PIECE: inputs at a time, and for int4 a divisor of GROUP. CODES: x holds codes too.

    fp8 codes are e4m3 numbers if they are multiplied as such, else bytes (uint8).
    """
    program, split = tl.program_id(0), tl.program_id(1)
    rows, tokens = program * TILE + tl.arange(0, TILE), tl.arange(0, X_ROWS)
    real_rows, real_tokens = (rows < ROWS)[:, None], (tokens < TOKENS)[:, None]
    share: tl.constexpr = (COLUMNS + PIECE * SPLITS - 1) // (PIECE * SPLITS) * PIECE
    total = tl.zeros([TILE, X_ROWS], tl.float32)
    sums = tl.zeros([TILE, X_ROWS], tl.int32)
    for start in tl.range(split * share, tl.minimum(split * share + share, COLUMNS), PIECE, num_stages=3):
        columns = start + tl.arange(0, PIECE)
        x_at = x_ptr + tokens[:, None] * COLUMNS + columns[None, :]
        if BITS == 8:
            inside = (columns < COLUMNS)[None, :]
            at = weight_ptr + rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
            weight = tl.load(at, mask=real_rows & inside, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_at, mask=real_tokens & inside, other=0.0)
            if weight.dtype == tl.uint8:
                if CODES:
                    x = to_numbers(x, tl.float32)
                total = _dot(to_numbers(weight, tl.bfloat16 if COMPILED else tl.float32), x, total, COMPILED)
            elif CODES and weight.dtype == tl.int8:
                sums = tl.dot(weight, tl.trans(x), sums, out_dtype=tl.int32)
            elif CODES:
                total = tl.dot(weight, tl.trans(x), total, max_num_imprecise_acc=PIECE)
            else:
                total = _dot(weight, x, total, COMPILED)
        else:
            halves = start // 2 + tl.arange(0, PIECE // 2)
            at = weight_ptr + rows.to(tl.int64)[:, None] * (COLUMNS // 2) + halves[None, :]
            packed = tl.load(at, mask=real_rows, other=0, eviction_policy="evict_first")
            low, high = half_bytes(packed, COMPILED)
            group = rows * (COLUMNS // GROUP) + start // GROUP
            if ZEROS:
                zero = tl.load(zero_ptr + group, mask=rows < ROWS, other=0).to(tl.float32)[:, None]
                low = (low.to(tl.float32) - zero).to(tl.bfloat16)
                high = (high.to(tl.float32) - zero).to(tl.bfloat16)
            weight = tl.reshape(tl.join(low, high), [TILE, PIECE])
            x = tl.load(x_at, mask=real_tokens, other=0.0)
            scale = tl.load(scale_ptr + group, mask=rows < ROWS, other=0.0).to(tl.float32)
            total += _dot(weight, x, tl.zeros_like(total), COMPILED) * scale[:, None]
    if BITS == 8:
        if CODES:
            if weight_ptr.dtype.element_ty == tl.int8:
                total = sums.to(tl.float32)
            total *= tl.load(x_scale_ptr + tokens, mask=tokens < TOKENS, other=0.0)[None, :]
        total *= tl.load(scale_ptr + rows, mask=rows < ROWS, other=0.0)[:, None]
    cells = tokens[None, :] * ROWS + rows[:, None]
    mask = real_rows & tl.trans(real_tokens)
    if SPLITS == 1:
        tl.store(out_ptr + cells, total.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(part_ptr + split * TOKENS * ROWS + cells, total, mask=mask)
        tl.debug_barrier()  # write all of this part before counting it as finished
        if tl.atomic_add(finished_ptr + program, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(finished_ptr + program, 0)
            out = tl.zeros([TILE, X_ROWS], tl.float32)
            for part in tl.static_range(SPLITS):
                out += tl.load(part_ptr + part * TOKENS * ROWS + cells, mask=mask, other=0.0)
            tl.store(out_ptr + cells, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def dequantize_kernel(
    weight_ptr, scale_ptr, zero_ptr, out_ptr,
    COLUMNS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, TILE: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """A tile of columns of one row: (code - zero) * scale."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < COLUMNS
    if BITS == 8:
        code = to_numbers(tl.load(weight_ptr + row * COLUMNS + columns, mask=inside, other=0), tl.float32)
        scale = tl.load(scale_ptr + row)
    else:
        halves = tl.program_id(1) * (TILE // 2) + tl.arange(0, TILE // 2)
        packed = tl.load(weight_ptr + row * (COLUMNS // 2) + halves, mask=halves < COLUMNS // 2, other=0)
        low, high = half_bytes(packed, COMPILED)
        code = tl.reshape(tl.join(low, high), [TILE]).to(tl.float32)
        group = row * (COLUMNS // GROUP) + columns // GROUP
        scale = tl.load(scale_ptr + group, mask=inside, other=0.0).to(tl.float32)
        if ZEROS:
            code -= tl.load(zero_ptr + group, mask=inside, other=0).to(tl.float32)
    tl.store(out_ptr + row * COLUMNS + columns, (code * scale).to(out_ptr.dtype.element_ty), mask=inside)


class FewRowsConfig(NamedTuple):
    """A launch configuration of `few_rows_kernel`."""

    piece: int  # inputs at a time
    splits: int  # programs that share a tile's inputs
    tile: int = TILE  # matrix rows of a program


def default_config(rows: int, columns: int, group: int, tokens: int, processors: int) -> FewRowsConfig:
    """Pieces within a group; and splits for up to four programs a processor, fewer if more rows of x are added up."""
    piece = min(128, group & -group)
    tiles, most = triton.cdiv(rows, TILE), 4 * processors * 16 // max(16, triton.next_power_of_2(tokens))
    splits = 1
    while 2 * splits * tiles <= most and 2 * splits * 2 * piece <= columns:
        splits *= 2
    return FewRowsConfig(piece, splits)


def takes(matrix: CodeMatrix) -> bool:
    """Return whether the groups of an int4 matrix are multiples of 32 inputs: a tensor core takes 16 at a time."""
    return matrix.bits == 8 or matrix.group % 32 == 0


def product(x: torch.Tensor, matrix: CodeMatrix, x_scales: torch.Tensor | None = None) -> torch.Tensor:
    """x [tokens, columns] bf16 times a matrix of codes: [tokens, rows] bf16, for 1 to MOST_ROWS tokens.  Lesson 05.

    With x_scales [tokens, 1] float32, x holds codes of the matrix's kind, int8 or fp8 (lesson 07). Raises ValueError
    for more tokens.
    """
    tokens, rows, columns = len(x), matrix.rows, matrix.columns
    weight, x = matrix.bytes, x.contiguous()
    if matrix.fp8 and x_scales is not None:
        kind = torch.float8_e4m3fn if is_compiled(x) else torch.uint8  # the interpreter does not multiply e4m3
        weight, x = weight.view(kind), x.view(kind)
    if not 0 < tokens <= MOST_ROWS:
        raise ValueError(f"x has {tokens} rows; this kernel takes 1 to {MOST_ROWS}: dequantize the matrix for more")
    out = torch.empty((tokens, rows), dtype=torch.bfloat16, device=x.device)
    group = 128 if matrix.bits == 8 else matrix.group
    config = default_config(rows, columns, group, tokens, processors(x.device))
    parts = torch.empty((config.splits, tokens, rows), device=x.device) if config.splits > 1 else None
    few_rows_kernel[(triton.cdiv(rows, config.tile), config.splits)](
        x, x_scales, weight, matrix.scales, matrix.zeros, out, parts, finished(x.device),
        rows, tokens,
        COLUMNS=columns, BITS=matrix.bits, GROUP=group, ZEROS=matrix.zeros is not None, CODES=x_scales is not None,
        TILE=config.tile, X_ROWS=max(16, triton.next_power_of_2(tokens)), PIECE=config.piece, SPLITS=config.splits,
        COMPILED=is_compiled(x), num_warps=4,
    )  # fmt: skip
    return out


def dequantized(matrix: CodeMatrix, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """[rows, columns]: what products of many rows read, since for them the arithmetic takes the time.  Lesson 05."""
    out = torch.empty((matrix.rows, matrix.columns), dtype=dtype, device=matrix.words.device)
    tile = min(4096, triton.next_power_of_2(matrix.columns))
    dequantize_kernel[(matrix.rows, triton.cdiv(matrix.columns, tile))](
        matrix.bytes, matrix.scales, matrix.zeros, out,
        COLUMNS=matrix.columns, BITS=matrix.bits, GROUP=matrix.group, ZEROS=matrix.zeros is not None, TILE=tile,
        COMPILED=is_compiled(out), num_warps=4,
    )  # fmt: skip
    return out


@lru_cache
def finished(device: torch.device) -> torch.Tensor:
    """Counters of finished splits, zero between kernels. All engines run on a device's default stream, in turn."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)
