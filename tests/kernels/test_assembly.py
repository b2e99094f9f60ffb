"""The machine instructions inside kernels, which the interpreter skips, emulated: conversions of codes are exact."""

import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed here")
from minillm.kernels import cache_codes, fp8_rows  # noqa: E402

KERNELS = Path(cache_codes.__file__).parent
E4M3 = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
CODES = [code for code in range(256) if code not in (0x7F, 0xFF)]  # e4m3's NaN


def bytes_of(word: int) -> list[int]:
    return list(word.to_bytes(4, "little"))


def prmt(a: int, b: int, selector: int) -> int:
    """Each digit of the selector chooses a byte of b and a."""
    source = bytes_of(a) + bytes_of(b)
    return int.from_bytes([source[selector >> 4 * i & 7] for i in range(4)], "little")


def lop3(a: int, b: int, c: int, table: int) -> int:
    """For each bit, the entry of a truth table."""
    return sum((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32))


def halves(word: int) -> list[float]:
    """The two bfloat16 numbers of a word."""
    return [struct.unpack("<f", struct.pack("<I", part << 16))[0] for part in (word & 0xFFFF, word >> 16)]


def float16s(word: int) -> np.ndarray:
    return np.array([word & 0xFFFF, word >> 16], np.uint16).view(np.float16)


def word_of(pair: np.ndarray) -> int:
    """float16 numbers from float64 ones, which must be exact."""
    assert (pair.astype(np.float16) == pair).all()
    return rounded_pair(pair)


def rounded_pair(pair: np.ndarray) -> int:
    low, high = pair.astype(np.float16).view(np.uint16).tolist()
    return low | high << 16


def fma(a: int, b: int, c: int) -> int:
    """Two bfloat16 numbers; float64 holds x * y + z exactly."""
    exact = [x * y + z for x, y, z in zip(halves(a), halves(b), halves(c), strict=True)]
    low, high = torch.tensor(exact, dtype=torch.float64).bfloat16().view(torch.int16).tolist()
    return low & 0xFFFF | (high & 0xFFFF) << 16


def numbers(*bits: int) -> list[float]:
    """float32 numbers, by their bits."""
    return [struct.unpack("<f", struct.pack("<I", each))[0] for each in bits]


def bits(number: float) -> int:
    """The bits of the nearest float32 number."""
    return struct.unpack("<I", np.float32(number).tobytes())[0]


def two_float16(codes: int) -> int:
    """Two float16 numbers in a word, of two e4m3 codes."""
    low, high = (int(np.float16(E4M3[code]).view(np.uint16)) for code in (codes & 0xFF, codes >> 8))
    return low | high << 16


RUN = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shr.b32": lambda a, b: a >> b,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": prmt,
    "lop3.b32": lop3,
    "fma.rn.bf16x2": fma,
    "xor.b32": lambda a, b: a ^ b,
    "add.rn.f16x2": lambda a, b: word_of(float16s(a).astype(float) + float16s(b)),
    "mul.rn.f16x2": lambda a, b: rounded_pair(float16s(a).astype(float) * float16s(b)),
    "cvt.rn.f16x2.e4m3x2": two_float16,
    "fma.rn.f16x2": lambda a, b, c: rounded_pair(float16s(a).astype(float) * float16s(b) + float16s(c)),
    "add.rn.f32": lambda a, b: bits(sum(numbers(a, b))),
    "cvt.f32.f16": lambda a: bits(np.uint16(a).view(np.float16)),
}


def run(assembly: str, **registers: int) -> list[int]:
    """Run instructions; $4 is given as r4. Returns $0, $1, ... as far as they were written."""
    held = {name.replace("r", "$"): value for name, value in registers.items()}
    for line in assembly.strip()[1:-1].split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        if rest.startswith("{"):  # a word's halves
            low, high, word = (each.strip("{} ") for each in rest.split(","))
            held[low], held[high] = held[word] & 0xFFFF, held[word] >> 16
            continue
        to, *given = (each.strip() for each in rest.split(","))
        held[to] = RUN[name](*(held[each] if each in held else int(each, 0) for each in given))
    return [held[f"${i}"] for i in range(len(held)) if f"${i}" in held and f"r{i}" not in registers]


def assembly_of(file: str, function: str) -> list[str]:
    """The strings of instructions in a function."""
    source = (KERNELS / file).read_text(encoding="utf-8")
    return re.findall(
        r'"""\s*(\{.*?\})\s*"""', source.split(f"def {function}(")[1].split("\n@triton.jit")[0], re.DOTALL
    )


def value(code: int, fp8: bool) -> float:
    return float(E4M3[code]) if fp8 else float(np.uint8(code).astype(np.int8))


@pytest.mark.parametrize("name", ["INT8", "FP8", "FP8_BITS"])
def test_codes_of_a_cache_become_their_values(name):
    instructions = getattr(cache_codes, name).value
    for first in CODES:
        codes = [first, CODES[first % 200], 3, CODES[-1 - first % 100]]
        low, high = run(instructions, r2=int.from_bytes(codes, "little"))
        assert [*float16s(low), *float16s(high)] == [value(code, name != "INT8") for code in codes]


@pytest.mark.parametrize("name", ["INT8", "FP8", "FP8_BITS"])
def test_codes_of_two_words_become_pairs_of_values(name):
    instructions = getattr(cache_codes, f"{name}_WORDS").value
    for first in CODES:
        one, two = [first, 1, CODES[first % 200], 5], [CODES[-1 - first % 100], first, 2, CODES[first % 150]]
        words = [int.from_bytes(codes, "little") for codes in (one, two)]
        found = run(instructions, r4=words[0], r5=words[1])
        pairs = [[value(a, name != "INT8"), value(b, name != "INT8")] for a, b in zip(one, two, strict=True)]
        assert [list(float16s(word)) for word in found] == pairs


@pytest.mark.parametrize("scale", [1e-3, 1.0, 14.0])  # the largest input is 448 / 32
def test_sixteen_fp8_codes_are_multiplied_with_sixteen_inputs(scale):
    generator = np.random.default_rng(0)
    for _ in range(50):
        codes = generator.choice(CODES, 16)
        inputs = (scale * generator.uniform(-1, 1, 16)).astype(np.float16)
        words = codes.astype(np.uint8).view(np.uint32).tolist() + inputs.view(np.uint32).tolist()
        (found,) = run(fp8_rows.QUAD_PRODUCTS.value, **{f"r{1 + i}": word for i, word in enumerate(words)})
        products = E4M3[codes].double().numpy() * inputs
        assert abs(numbers(found)[0] - products.sum()) <= 2**-9 * np.abs(products).sum() + 1e-5


def test_half_bytes_become_their_values():
    (instructions,) = assembly_of("few_rows.py", "half_bytes")
    for first in range(256):
        packed = [first, 0x7F, 255 - first, 0x08]
        a, b, c, d = run(instructions, r4=int.from_bytes(packed, "little"))
        assert [*halves(a), *halves(b)] == [(each & 15) - 8 for each in packed]
        assert [*halves(c), *halves(d)] == [(each >> 4) - 8 for each in packed]


def test_digits_of_four_inputs_are_collected_in_words():
    (instructions,) = assembly_of("integer_rows.py", "bytes_of")
    generator = np.random.default_rng(0)
    for _ in range(100):
        numbers = generator.integers(0, 2**32, 4).tolist()
        found = run(instructions, r3=numbers[0], r4=numbers[1], r5=numbers[2], r6=numbers[3])
        assert [bytes_of(word) for word in found] == [[bytes_of(each)[i] for each in numbers] for i in range(3)]
