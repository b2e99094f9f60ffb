"""Wrong solutions of lesson 05: two codes in a byte, products with packed weights."""

import torch

from minillm.quantization.int4 import unpack
from tests.course.mutants import wrong

# ---- packing


@wrong("pack_codes", fails="every pair of codes has its byte")
def sign_of_the_second_lost(codes):
    return ((codes[:, 0::2] + 8) + 16 * (codes[:, 1::2].abs() + 8).clamp(max=15)).to(torch.uint8)


@wrong("pack_codes", fails="every pair of codes has its byte")
def sign_of_the_first_lost(codes):
    """8 - |code| is right for codes up to 0 only."""
    return ((8 - codes[:, 0::2].abs()) + 16 * (codes[:, 1::2] + 8)).to(torch.uint8)


@wrong("pack_codes", fails="every pair of codes has its byte")
def negative_codes_from_another_table(codes):
    """Adds 8 to positive codes, and lets negative odd ones be their own four bits."""
    low, high = codes[:, 0::2] + 8, codes[:, 1::2]
    return (low + 16 * torch.where(high < 0, high & 15, high + 8)).to(torch.uint8)


ORDER = "neighbors of the same row share a byte, in any number of rows and columns"


@wrong("pack_codes", fails=ORDER)
def pairs_of_pairs(codes):
    """Packs in blocks of four columns, but puts the blocks in reverse."""
    unsigned = (codes + 8).to(torch.uint8)
    packed = unsigned[:, 0::2] + 16 * unsigned[:, 1::2]
    return packed.reshape(len(codes), -1, 2).flip(1).flatten(1) if packed.shape[1] % 2 == 0 else packed


@wrong("pack_codes", fails=ORDER)
def awq_order(codes):
    """Eight columns in the order that AWQ's files have."""
    unsigned = (codes + 8).to(torch.uint8)
    if codes.shape[1] % 8 == 0:
        unsigned = unsigned.reshape(len(codes), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1)
    return unsigned[:, 0::2] + 16 * unsigned[:, 1::2]


@wrong("pack_codes", fails=ORDER)
def column_by_column(codes):
    unsigned = (codes + 8).to(torch.uint8)
    packed = unsigned[:, 0::2] + 16 * unsigned[:, 1::2]
    return packed if packed.shape[1] == 2 else packed.t().reshape(packed.shape).flip(1)


@wrong("pack_codes", fails=ORDER)
def four_columns_only(codes):
    packed = torch.zeros(len(codes), codes.shape[1] // 2, dtype=torch.uint8)
    for column in range(min(4, codes.shape[1])):
        packed[:, column // 2] += ((codes[:, column] + 8).int() << 4 * (column % 2)).to(torch.uint8)
    return packed


STORED = "the bytes are uint8, in the shape [rows, in / 2]"


@wrong("pack_codes", fails=STORED)
def wide_bytes(codes):
    unsigned = codes.int() + 8
    return unsigned[:, 0::2] + 16 * unsigned[:, 1::2]


@wrong("pack_codes", fails=STORED)
def signed_bytes(codes):
    unsigned = codes + 8
    return unsigned[:, 0::2] | unsigned[:, 1::2] << 4


@wrong("pack_codes", fails=STORED)
def one_long_row(codes):
    unsigned = (codes + 8).to(torch.uint8).flatten()
    return unsigned[0::2] + 16 * unsigned[1::2]


@wrong("pack_codes", fails="the codes are not changed")
def adds_in_place(codes):
    codes += 8
    unsigned = codes.to(torch.uint8)
    return unsigned[:, 0::2] + 16 * unsigned[:, 1::2]


# ---- products


def product(x, packed, scales, zeros, *, groups=None, size=None, dtype=None, sums=None, result=None):
    """A right product, with something replaced."""
    groups, dtype = groups or scales.shape[1], dtype or x.dtype
    size = size or x.shape[1] // scales.shape[1]
    out = x.new_zeros(len(x), len(packed), dtype=dtype)
    for group in range(groups):
        part = x[:, group * size : (group + 1) * size].to(dtype)
        codes = unpack(packed[:, group * size // 2 : (group + 1) * size // 2]).to(dtype)
        zero, scale = zeros[:, group].to(dtype), scales[:, group].to(dtype)
        out = out + (sums or right_sums)(part, codes, zero) * scale
    return out.to(result or x.dtype)


def right_sums(part, codes, zero):
    return part @ codes.t() - part.sum(1, keepdim=True) * zero


@wrong("packed_linear", fails="every token has its own result")
def one_sum_for_all_tokens(x, packed, scales, zeros):
    return product(x, packed, scales, zeros, sums=lambda part, codes, zero: part @ codes.t() - part.sum() * zero)


@wrong("packed_linear", fails="every token has its own result")
def only_the_first_token(x, packed, scales, zeros):
    return product(x[:1].expand(x.shape), packed, scales, zeros)


@wrong("packed_linear", fails="every output has its own codes, scales and zero points")
def zero_points_of_the_first_output(x, packed, scales, zeros):
    return product(x, packed, scales, zeros[:1].expand(zeros.shape))


@wrong("packed_linear", fails="every output has its own codes, scales and zero points")
def scales_of_the_first_output(x, packed, scales, zeros):
    return product(x, packed, scales[:1].expand(scales.shape), zeros)


@wrong("packed_linear", fails="any number of groups of any size")
def groups_of_two(x, packed, scales, zeros):
    return product(x, packed, scales, zeros, size=2)


@wrong("packed_linear", fails="any number of groups of any size")
def two_groups(x, packed, scales, zeros):
    return product(x, packed, scales, zeros, groups=min(2, scales.shape[1]))


@wrong("packed_linear", fails="any number of groups of any size")
def zero_point_of_the_last_group_for_later_ones(x, packed, scales, zeros):
    late = torch.arange(zeros.shape[1]).clamp(max=1)
    return product(x, packed, scales, zeros[:, late])


@wrong("packed_linear", fails="tokens, outputs and groups together")
def sums_by_output_when_they_fit(x, packed, scales, zeros):
    """Sums of x without their axis: with as many tokens as outputs, they are taken for outputs."""

    def sums(part, codes, zero):
        total = part.sum(1)
        return part @ codes.t() - (total * zero if len(total) == len(zero) else total[:, None] * zero)

    return product(x, packed, scales, zeros, sums=sums)


@wrong("packed_linear", fails="no tensor as large as the matrix is made")
def unpacks_everything(x, packed, scales, zeros):
    codes = unpack(packed).to(x.dtype).unflatten(1, (scales.shape[1], -1))
    return x @ ((codes - zeros.to(x.dtype)[..., None]) * scales[..., None]).flatten(1).t()


@wrong("packed_linear", fails="no tensor as large as the matrix is made")
def unpacks_everything_then_slices(x, packed, scales, zeros):
    """In eight bits, but all of it."""
    codes, size = unpack(packed), x.shape[1] // scales.shape[1]
    out = x.new_zeros(len(x), len(packed))
    for group in range(scales.shape[1]):
        at = slice(group * size, (group + 1) * size)
        levels = (codes[:, at] - zeros[:, group, None]).to(x.dtype)
        out += x[:, at] @ (levels * scales[:, group, None]).t()
    return out


@wrong("packed_linear", fails="no tensor as large as the matrix is made")
def every_product_before_the_sum(x, packed, scales, zeros):
    """No @: with more tokens than groups, a group's products are more than the matrix has elements."""

    def sums(part, codes, zero):
        return (part[:, None] * (codes - zero[:, None])).sum(-1)

    return product(x, packed, scales, zeros, sums=sums)


@wrong("packed_linear", fails="no tensor as large as the matrix is made")
def keeps_the_levels_of_every_group(x, packed, scales, zeros):
    """No tensor is large, but together they are the matrix."""
    size = x.shape[1] // scales.shape[1]
    kept = []
    for group in range(scales.shape[1]):
        codes = unpack(packed[:, group * size // 2 : (group + 1) * size // 2]).to(x.dtype)
        kept.append((codes - zeros[:, group, None]) * scales[:, group, None])
    return sum(x[:, group * size : (group + 1) * size] @ levels.t() for group, levels in enumerate(kept))


@wrong("packed_linear", fails="no tensor as large as the matrix is made")
def unpacks_everything_in_two_halves(x, packed, scales, zeros):
    low, high = (packed & 15).to(torch.int8) - 8, (packed >> 4).to(torch.int8) - 8
    size, out = x.shape[1] // scales.shape[1], x.new_zeros(len(x), len(packed))
    for group in range(scales.shape[1]):
        at = slice(group * size // 2, (group + 1) * size // 2)
        part, zero = x[:, group * size : (group + 1) * size], zeros[:, group].to(x.dtype)
        sums = part[:, 0::2] @ low[:, at].to(x.dtype).t() + part[:, 1::2] @ high[:, at].to(x.dtype).t()
        out += (sums - part.sum(1, keepdim=True) * zero) * scales[:, group]
    return out


@wrong("packed_linear", fails="it computes in the dtype of x, and returns it")
def always_float32(x, packed, scales, zeros):
    return product(x, packed, scales, zeros, dtype=torch.float32)


@wrong("packed_linear", fails="it computes in the dtype of x, and returns it")
def returns_float64(x, packed, scales, zeros):
    return product(x, packed, scales, zeros, result=torch.float64)


@wrong("packed_linear", fails="its arguments are not changed")
def scales_multiplied_in_place(x, packed, scales, zeros):
    out = product(x, packed, scales, zeros)
    x *= 1.5  # left over from trying to fold a scale into x
    return out


@wrong("packed_linear", fails="its arguments are not changed")
def unpacks_in_place(x, packed, scales, zeros):
    out = product(x, packed, scales, zeros)
    packed >>= 4
    return out
