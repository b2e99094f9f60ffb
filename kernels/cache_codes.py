"""Codes of a quantized KV cache: keys and values in int8 or fp8, with a scale for each token and KV head.  Lesson 08.

    scale = max |x| of the head / largest code,   code = x / scale, rounded to the nearest, halves to even

int8 has codes up to 127; fp8 is e4m3 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning", section 3): a sign,
four exponent bits with a bias of 7, three mantissa bits, up to 448. Kernels see fp8 as bytes (uint8) and round and
convert their bits with integer instructions, so they need no GPU with fp8, and round as torch does.

Both kinds of codes are numbers that bfloat16 and float16 hold exactly. So attention multiplies codes, and applies
scales where there are fewest numbers: to the scores, and to the softmax's weights.
"""

import torch
import triton
import triton.language as tl

from .arguments import Cache
from .quantized_inputs import to_even

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@triton.jit
def to_codes(x, scale, kind: tl.constexpr):
    """x [heads, n] float32 with scales [heads] float32 -> codes. kind: tl.int8, or tl.uint8 for fp8."""
    x = tl.div_rn(x, tl.where(scale > 0, scale, 1.0)[:, None])
    if kind == tl.int8:
        found = to_even(x).to(tl.int8)
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)  # 20 mantissa bits fewer, a bias of 7
        small = to_even(tl.abs(x) * 512.0).to(tl.int32)  # below the smallest normal number, steps are 2^-9
        found = (tl.where(tl.abs(x) < 0.015625, small, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)
    return found


@triton.jit
def rounded_head(x, LARGEST: tl.constexpr, kind: tl.constexpr, wide: tl.constexpr):
    """x [n] float32, one head -> (codes [1, n], scale [1], the numbers [n] that they stand for).

    wide: a type that holds codes exactly.
    """
    scale = tl.div_rn(tl.max(tl.abs(x)[None, :], 1), tl.full([1], LARGEST, tl.float32))
    codes = to_codes(x[None, :], scale, kind)
    return codes, scale, tl.sum(to_numbers(codes, wide).to(tl.float32) * scale[:, None], 0)


@triton.jit
def to_numbers(codes, kind: tl.constexpr):
    """Codes -> their values, without the scale, in `kind`: exact. What is no code is only converted."""
    if codes.dtype == tl.int8:
        if kind == tl.bfloat16:
            # The bits 0x4300 + n are the number 128 + n for n < 128. Of a code with sign bit s and low bits n, which
            # means n - 128 s, they give 128 + n, and 128 (1 + s) is subtracted. Four codes take eight instructions.
            found = tl.inline_asm_elementwise(
                """{
                .reg .b32 low, high, whole, sign, one;
                mov.b32 one, 0x3F803F80;
                prmt.b32 low, $2, 0x43434343, 0x4140;
                prmt.b32 high, $2, 0x43434343, 0x4342;
                and.b32 whole, low, 0xFF7FFF7F;
                lop3.b32 sign, low, 0xFF80FF80, 0x80008000, 0x6A;
                fma.rn.bf16x2 $0, whole, one, sign;
                and.b32 whole, high, 0xFF7FFF7F;
                lop3.b32 sign, high, 0xFF80FF80, 0x80008000, 0x6A;
                fma.rn.bf16x2 $1, whole, one, sign;
                }""",
                "=r,=r,r",
                [codes],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=4,
            )
        else:
            found = codes.to(kind)
    elif codes.dtype == tl.uint8:
        if kind == tl.bfloat16:
            # Moved to a bfloat16's place, exponent and mantissa mean 2^-120 of the value, below e4m3's normals too.
            found = tl.inline_asm_elementwise(
                """{
                .reg .b32 low, high, rest, up, zero;
                mov.b32 up, 0x7B807B80;
                mov.b32 zero, 0x80008000;
                prmt.b32 low, $2, 0, 0x1404;
                prmt.b32 high, $2, 0, 0x3424;
                shr.u32 rest, low, 4;
                and.b32 rest, rest, 0x07F007F0;
                lop3.b32 rest, low, 0x80008000, rest, 0xEA;
                fma.rn.bf16x2 $0, rest, up, zero;
                shr.u32 rest, high, 4;
                and.b32 rest, rest, 0x07F007F0;
                lop3.b32 rest, high, 0x80008000, rest, 0xEA;
                fma.rn.bf16x2 $1, rest, up, zero;
                }""",
                "=r,=r,r",
                [codes],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=4,
            )
        else:
            bits = codes.to(tl.int32)
            half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
            found = (half.to(tl.float32) * 256.0).to(kind)  # float16's bias is 8 above e4m3's
    else:
        found = codes.to(kind)
    return found


def _pair_by_pair(constants: str, convert: str) -> tl.constexpr:
    """Instructions that convert the first codes of two words, then the second ones, and so on: $4, $5 -> $0 to $3.

    convert: writes `out` from `pair`, whose two halves begin with the codes.
    """
    pairs = (f"prmt.b32 pair, $4, $5, {digits};{convert.replace('out', f'${i}')}" for i, digits in enumerate(PAIRS))
    return tl.constexpr(f"{{.reg .b32 pair, whole, sign, rest, one, up, zero;{constants}{''.join(pairs)}}}")


PAIRS = ("0x4400", "0x5511", "0x6622", "0x7733")
# As in `to_numbers`.
INT8_WORDS = _pair_by_pair(
    "mov.b32 one, 0x3F803F80;",
    "lop3.b32 whole, pair, 0x007F007F, 0x43004300, 0xEA;"
    "lop3.b32 sign, pair, 0x00800080, 0xC300C300, 0x6A;"
    "fma.rn.bf16x2 out, whole, one, sign;",
)
FP8_WORDS = _pair_by_pair(
    "mov.b32 up, 0x7B807B80; mov.b32 zero, 0x80008000;",
    "shr.u32 rest, pair, 4;"
    "and.b32 rest, rest, 0x07F007F0;"
    "lop3.b32 rest, pair, 0x80008000, rest, 0xEA;"
    "fma.rn.bf16x2 out, rest, up, zero;",
)


@triton.jit
def of_words(words, kind: tl.constexpr, codes: tl.constexpr):
    """Words of four codes (int32) -> the values of their first, second, third and last codes, in `kind`.

    codes: the type of the codes, as in `to_codes`. A product reads values of neighboring tokens in one register, so
    codes of two words are paired here: loading single bytes instead would take four times as many loads.
    """
    if kind == tl.bfloat16:
        a, b, c, d = tl.inline_asm_elementwise(
            INT8_WORDS if codes == tl.int8 else FP8_WORDS, "=&r,=&r,=&r,=&r,r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        a = to_numbers((words & 0xFF).to(codes), kind)
        b = to_numbers(((words >> 8) & 0xFF).to(codes), kind)
        c = to_numbers(((words >> 16) & 0xFF).to(codes), kind)
        d = to_numbers(((words >> 24) & 0xFF).to(codes), kind)
    return a, b, c, d


def stored(cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as kernels read and write them: fp8 codes as bytes. Raises ValueError unless scales are contiguous."""
    for scales in (cache.k_scale, cache.v_scale):
        if scales is not None and not scales.is_contiguous():
            raise ValueError("the scales of a quantized cache must be contiguous")
    if cache.k.dtype == torch.float8_e4m3fn:
        return cache.k.view(torch.uint8), cache.v.view(torch.uint8)
    return cache.k, cache.v
