"""Codes of a quantized KV cache: keys and values in int8 or fp8, with a scale for each token and KV head.  Lesson 08.

    scale = max |x| of the head / largest code,   code = x / scale, rounded to the nearest, halves to even

int8 has codes up to 127; fp8 is e4m3 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning", section 3): a sign,
four exponent bits with a bias of 7, three mantissa bits, up to 448. Kernels see fp8 as bytes (uint8). They round with
integer instructions, as torch does, and convert codes to float16 with the GPU's instruction for that if it has one
(compute capability 8.9), else by moving bits. So they need no GPU with fp8.

Both kinds of codes are numbers that float16 holds exactly, and fewer instructions convert them to float16 than to
bfloat16. So attention multiplies codes in float16, and applies scales where there are fewest numbers: to the scores,
and to the softmax's weights.
"""

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from .arguments import CacheArguments
from .quantized_inputs import magnitude, to_even

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@triton.jit
def to_codes(x, scale, kind: tl.constexpr):
    """x [heads, n] float32 with scales [heads] float32 -> codes. kind: tl.int8, or tl.uint8 for fp8."""
    x = tl.div_rn(x, tl.where(scale > 0, scale, 1.0)[:, None])
    if kind == tl.int8:
        codes = to_even(x).to(tl.int8)
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)  # 20 mantissa bits fewer, a bias of 7
        small = to_even(tl.abs(x) * 512.0).to(tl.int32)  # below the smallest normal number, steps are 2^-9
        codes = (tl.where(tl.abs(x) < 0.015625, small, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)
    return codes


@triton.jit
def rounded_head(x, LARGEST: tl.constexpr, kind: tl.constexpr, wide: tl.constexpr):
    """x [n] float32, one head -> (codes [1, n], scale [1], the numbers [n] that they stand for).

    wide: a type that holds codes exactly.
    """
    scale = tl.div_rn(tl.max(magnitude(x)[None, :], 1), tl.full([1], LARGEST, tl.float32))
    codes = to_codes(x[None, :], scale, kind)
    return codes, scale, tl.sum(to_numbers(codes, wide).to(tl.float32) * scale[:, None], 0)


# Instructions that convert words of four codes to pairs of float16 numbers, without the scale; exact.
#
# int8: a code with its sign bit flipped is the code + 128. In the lowest bits of a float16 number of 1024, whose steps
#       are 1, that is 1152 + the code.
# fp8:  one instruction converts two codes, since compute capability 8.9. Before, bits are moved to a float16's place,
#       where exponent and mantissa mean 2^-8 of the value, below e4m3's normal numbers too.
_FLIP = "xor.b32 {0}, {0}, 0x80808080;"
_INT8 = "prmt.b32 {0}, {1}, 0x64646464, {2}; add.rn.f16x2 {0}, {0}, less;"
_FP8 = "cvt.rn.f16x2.e4m3x2 {0}, {1};"
_FP8_BITS = (
    "prmt.b32 {0}, {1}, 0, {2}; shr.u32 rest, {0}, 1; and.b32 rest, rest, 0x3F803F80;"
    "lop3.b32 rest, {0}, 0x80008000, rest, 0xEA; mul.rn.f16x2 {0}, rest, up;"
)
_BEGIN = ".reg .b32 one, two, rest, less, up; .reg .b16 low, high, third, last;"
_CONSTANTS = " mov.b32 less, 0xE480E480; mov.b32 up, 0x5C005C00;"  # -1152, 256


def _of_one(kind: str) -> tl.constexpr:
    """$2 -> $0, $1: the codes of a word in their order."""
    steps = [_BEGIN, _CONSTANTS, "mov.b32 one, $2;"]
    if kind == "int8":
        steps += [_FLIP.format("one"), _INT8.format("$0", "one", "0x4140"), _INT8.format("$1", "one", "0x4342")]
    elif kind == "fp8":
        steps += ["mov.b32 {low, high}, one;", _FP8.format("$0", "low"), _FP8.format("$1", "high")]
    else:
        steps += [_FP8_BITS.format("$0", "one", "0x1404"), _FP8_BITS.format("$1", "one", "0x3424")]
    return tl.constexpr("{" + "".join(steps) + "}")


def _of_two(kind: str) -> tl.constexpr:
    """$4, $5 -> $0 to $3: the first codes of two words, then their second ones, and so on."""
    steps = [_BEGIN, _CONSTANTS, "prmt.b32 one, $4, $5, 0x5140; prmt.b32 two, $4, $5, 0x7362;"]
    if kind == "int8":
        steps += [_FLIP.format("one"), _FLIP.format("two")]
        steps += [_INT8.format(f"${i}", ("one", "two")[i // 2], ("0x4140", "0x4342")[i % 2]) for i in range(4)]
    elif kind == "fp8":
        steps += ["mov.b32 {low, high}, one; mov.b32 {third, last}, two;"]
        steps += [_FP8.format(f"${i}", half) for i, half in enumerate(("low", "high", "third", "last"))]
    else:
        steps += [_FP8_BITS.format(f"${i}", ("one", "two")[i // 2], ("0x1404", "0x3424")[i % 2]) for i in range(4)]
    return tl.constexpr("{" + "".join(steps) + "}")


INT8, FP8, FP8_BITS = (_of_one(kind) for kind in ("int8", "fp8", "fp8 bits"))
INT8_WORDS, FP8_WORDS, FP8_BITS_WORDS = (_of_two(kind) for kind in ("int8", "fp8", "fp8 bits"))


@triton.jit
def to_numbers(codes, kind: tl.constexpr):
    """Codes -> their values, without the scale, in `kind`: exact. What is no code is only converted."""
    if codes.dtype == tl.int8:
        if kind == tl.float16:
            numbers = tl.inline_asm_elementwise(INT8, "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
        else:
            numbers = codes.to(kind)
    elif codes.dtype == tl.uint8:
        if kind == tl.float16:
            steps: tl.constexpr = FP8 if cuda_capability_geq(8, 9) else FP8_BITS
            numbers = tl.inline_asm_elementwise(steps, "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
        else:
            bits = codes.to(tl.int32)
            half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
            numbers = (half.to(tl.float32) * 256.0).to(kind)
    else:
        numbers = codes.to(kind)
    return numbers


@triton.jit
def of_words(words, kind: tl.constexpr, codes: tl.constexpr):
    """Words of four codes (int32) -> the values of their first, second, third and last codes, in `kind`.

    codes: the type of the codes, as in `to_codes`. A product reads values of neighboring tokens in one register, so
    codes of two words are paired here: loading single bytes instead would take four times as many loads.
    """
    if kind == tl.float16:
        fp8_steps: tl.constexpr = FP8_WORDS if cuda_capability_geq(8, 9) else FP8_BITS_WORDS
        a, b, c, d = tl.inline_asm_elementwise(
            INT8_WORDS if codes == tl.int8 else fp8_steps, "=&r,=&r,=&r,=&r,r,r", [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        a = to_numbers((words & 0xFF).to(codes), kind)
        b = to_numbers(((words >> 8) & 0xFF).to(codes), kind)
        c = to_numbers(((words >> 16) & 0xFF).to(codes), kind)
        d = to_numbers(((words >> 24) & 0xFF).to(codes), kind)
    return a, b, c, d


def product_type(dtype: torch.dtype, codes: bool = False) -> tl.dtype:
    """Return the type of the operands of attention's products, of which one may be codes; sums are always float32.

    Triton's interpreter computes bfloat16 products wrongly, so there operands are converted to float32 first.
    """
    if dtype == torch.float32 or not isinstance(to_numbers, triton.runtime.JITFunction):
        return tl.float32
    return tl.bfloat16 if dtype == torch.bfloat16 and not codes else tl.float16


def stored(cache: CacheArguments) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as kernels read and write them: fp8 codes as bytes. Raises ValueError unless scales are contiguous."""
    for scales in (cache.k_scale, cache.v_scale):
        if scales is not None and not scales.is_contiguous():
            raise ValueError("the scales of a quantized cache must be contiguous")
    if cache.k.dtype == torch.float8_e4m3fn:
        return cache.k.view(torch.uint8), cache.v.view(torch.uint8)
    return cache.k, cache.v
