"""Two codes in a byte, and products with packed weights.  Lesson 05."""

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.overrides import NotSolvedYet

from ..shared.checks import Exercise, Explained
from ..shared.differences import assert_near
from .weight_formats import tensors_made

SECONDS = 10.0
CODES = [-2, 7, -8, 3]

packing = Exercise("pack_codes", seconds=SECONDS)
product = Exercise("packed_linear", seconds=SECONDS)


def _packed(codes: Tensor) -> Tensor:
    low, high = (codes[:, half::2].long() + 8 for half in (0, 1))
    return (low + 16 * high).to(torch.uint8)


def _random_codes(rows: int, inputs: int, seed: int = 0) -> Tensor:
    return torch.randint(-8, 8, (rows, inputs), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


# ---- packing


def _bytes(function: Callable, codes: Tensor) -> Tensor:
    """Return what the function returns, as numbers from 0 to 255, and in the right shape if it has as many elements."""
    got = function(codes.clone())
    assert isinstance(got, Tensor), f"it must return a tensor, not {type(got).__name__}"
    shape = [len(codes), codes.shape[1] // 2]
    assert got.numel() == shape[0] * shape[1], (
        f"codes of the shape {list(codes.shape)}: the result has the shape {list(got.shape)}, not {shape}"
    )
    return got.long().reshape(shape) % 256


@packing.example
def _(function):
    got = _bytes(function, torch.tensor([CODES], dtype=torch.int8))[0].tolist()
    said = f"codes {CODES}: expected the bytes [246, 176], got {got}"
    if got == [111, 11]:
        raise Explained(f"{said}: the first code of a pair belongs in the low half, the second in the high half")
    if got == [6, 191]:
        raise Explained(f"{said}: a pair are neighbors, codes 2 j and 2 j + 1, not codes j and j + 2")
    assert got == [246, 176], said


@packing.property(
    "every pair of codes has its byte",
    hint="add 8 to both codes, positive or negative; the first plus 16 times the second is from 0 to 255",
)
def _(function):
    every = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8)).to(torch.int8)
    for codes in (every.reshape(64, 8)[:, :4].reshape(-1, 4), every.reshape(64, 8)[:, 4:].reshape(-1, 4)):
        got, want = _bytes(function, codes), _packed(codes).long()
        if not torch.equal(got, want):
            row, column = (got != want).nonzero()[0].tolist()
            pair = codes[row, 2 * column : 2 * column + 2].tolist()
            raise AssertionError(
                f"codes {pair} in row {row}: expected the byte {want[row, column]}, got {got[row, column]}"
            )


@packing.property(
    "neighbors of the same row share a byte, in any number of rows and columns",
    hint="codes[:, 0::2] are the first of each pair, codes[:, 1::2] the second",
)
def _(function):
    for count, inputs in ((1, 2), (1, 6), (1, 8), (3, 16), (2, 64)):
        sign = torch.tensor([-1, 1]).repeat(inputs // 2)  # mistakes with signs are another property's matter
        codes = (torch.arange(count * inputs).reshape(count, inputs) % 7 * sign).to(torch.int8)
        got, want = _bytes(function, codes), _packed(codes).long()
        where = f"codes {codes[0, :8].tolist()}" + (" and so on" if codes.numel() > 8 else "")
        assert_near(got, want, f"{where}, {list(codes.shape)} in all: the bytes")


@packing.property(
    "the bytes are uint8, in the shape [rows, in / 2]", hint="convert with .to(torch.uint8): two codes take one byte"
)
def _(function):
    got = function(_random_codes(3, 8))
    assert got.dtype == torch.uint8, f"the result is {got.dtype}, not torch.uint8"
    assert list(got.shape) == [3, 4], f"codes [3, 8]: the result has the shape {list(got.shape)}, not [3, 4]"


@packing.property(
    "the codes are not changed", hint="operators like += change their tensor in place; codes + 8 makes a new one"
)
def _(function):
    codes = _random_codes(3, 8)
    before = codes.clone()
    function(codes)
    assert torch.equal(codes, before), "the codes were changed: the caller still needs them"


# ---- products


def _case(tokens: int, out: int, groups: int, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, packed, scales, zeros."""
    generator = torch.Generator().manual_seed(tokens + out + groups + size)
    codes = torch.randint(-8, 8, (out, groups * size), generator=generator, dtype=torch.int8)
    x = torch.randn(tokens, groups * size, generator=generator, dtype=torch.float64)
    scales = torch.rand(out, groups, generator=generator, dtype=torch.float64) + 0.1
    zeros = torch.randint(-8, 8, (out, groups), generator=generator, dtype=torch.int8)
    return x, _packed(codes), scales, zeros


def _wanted(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).to(x.dtype) - 8
    grouped = codes.reshape(*scales.shape, -1) - zeros.to(x.dtype)[..., None]
    return x @ (grouped * scales[..., None]).flatten(1).t()


def _is_right(function: Callable, what: str, *case: int) -> None:
    given = _case(*case)
    got, want = function(*(each.clone() for each in given)), _wanted(*given)
    assert isinstance(got, Tensor), f"it must return a tensor, not {type(got).__name__}"
    assert got.shape == want.shape, f"{what}: the result has the shape {list(got.shape)}, not {list(want.shape)}"
    assert_near(got, want, what, absolute=1e-3)


@product.example
def _(function):
    x, codes = torch.tensor([[1.0, 2.0, 3.0, -1.0]]).double(), torch.tensor([[5, -2, 0, 7]], dtype=torch.int8)
    scales, zeros = torch.tensor([[0.1, 0.5]]).double(), torch.tensor([[1, -3]], dtype=torch.int8)
    got = function(x, _packed(codes), scales, zeros)
    assert isinstance(got, Tensor) and got.numel() == 1, "one token and one output: expected a tensor of one number"
    with_zeros_of_0 = function(x, _packed(codes), scales, torch.zeros_like(zeros)).flatten()[0]
    if abs(got.flatten()[0] + 0.7) > 1e-6 and abs(with_zeros_of_0 + 3.4) < 1e-6:
        raise Explained(
            f"the example: expected -0.7, got {got.flatten()[0]:.6g}. With zero points of 0 it is right (-3.4), so the "
            "zero points' part is wrong: it is subtracted, for each group, and takes the scale, too"
        )
    assert_near(got.flatten()[0], torch.tensor(-0.7, dtype=torch.float64), "the example", absolute=1e-6)


@product.property(
    "every token has its own result",
    hint="the sum of x over a group is one number for each token: keep its axis, [tokens, 1]",
)
def _(function):
    for tokens in (2, 5):
        _is_right(function, f"{tokens} tokens, 1 output, 2 groups of 2 inputs", tokens, 1, 2, 2)


@product.property(
    "every output has its own codes, scales and zero points",
    hint="scales[:, group] and zeros[:, group] have a number for each output",
)
def _(function):
    for out in (3, 16):
        _is_right(function, f"1 token, {out} outputs, 2 groups of 2 inputs", 1, out, 2, 2)


@product.property(
    "any number of groups of any size",
    hint="there are scales.shape[1] groups; a group of `size` inputs takes size / 2 columns of the packed matrix",
)
def _(function):
    for groups, size in ((1, 8), (3, 2), (2, 6), (5, 16), (8, 4)):
        _is_right(function, f"1 token, 1 output, {groups} groups of {size} inputs", 1, 1, groups, size)


def _holds(check: Callable, *given: object) -> bool:
    try:
        check(*given)
    except NotSolvedYet:
        raise
    except Exception:
        return False
    return True


@product.property(
    "tokens, outputs and groups together",
    hint="x[token, i] meets code[output, i]: watch which axes of sums, scales and zeros are tokens, and which outputs",
)
def _(function):
    simple = ((5, 1, 2, 2), (1, 16, 2, 2), (1, 1, 5, 16), (1, 1, 2, 6))
    if all(_holds(_is_right, function, "", *case) for case in simple):  # else: another property's matter
        for case in ((4, 4, 4, 4), (3, 10, 3, 8), (12, 5, 2, 32)):
            tokens, out, groups, size = case
            _is_right(function, f"{tokens} tokens, {out} outputs, {groups} groups of {size} inputs", *case)


@product.property(
    "no tensor as large as the matrix is made",
    hint="unpack only packed[:, first:last] of one group, forget it before the next, and multiply with @: "
    "x[:, None] * codes has an element for each token, output and input",
    slow="it goes through single weights, which is too slow: multiply a whole group with @",
)
def _(function):
    for tokens in (1, 12):  # 12: more than groups, and few enough for a result of each group
        (largest, _), matrix = tensors_made(function, *_case(tokens, 64, 8, 16)), 64 * 8 * 16
        assert largest < matrix, (
            f"a matrix of 64 x {8 * 16} = {matrix:,} weights in 8 groups, tokens: {tokens}: "
            f"a tensor of {largest:,} elements was made"
        )
    (largest, most), matrix = tensors_made(function, *_case(1, 64, 32, 16)), 64 * 32 * 16
    where = f"a matrix of 64 x {32 * 16} = {matrix:,} weights in 32 groups"
    assert largest < matrix / 2, f"{where}: a tensor of {largest:,} elements was made"
    assert most < matrix / 2, f"{where}: tensors of {most:,} elements in all existed at a time"


@product.property(
    "it computes in the dtype of x, and returns it",
    hint="convert codes and zero points to x.dtype, and make the result in x.dtype",
)
def _(function):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
        x, packed, scales, zeros = _case(1, 1, 2, 2)
        x, scales = x.to(dtype), scales.to(dtype)
        got, want = function(x, packed, scales, zeros), _wanted(x.double(), packed, scales.double(), zeros)
        assert got.dtype == dtype, f"x in {dtype}: the result is {got.dtype}"
        worst = (got.double() - want).abs().max().item()
        if worst <= 1e-3:  # else: another property's matter
            assert worst <= tolerance, f"x in {dtype}: an error of {worst:.1g} comes from computing in another dtype"


@product.property(
    "its arguments are not changed",
    hint="operations whose names end in _, and operators like -=, change their tensor in place",
)
def _(function):
    given = _case(2, 3, 2, 4)
    before = [each.clone() for each in given]
    _holds(function, *given)  # what it raises is another property's matter
    for name, each, saved in zip(("x", "packed", "scales", "zeros"), given, before, strict=True):
        assert torch.equal(each, saved), f"{name} was changed: the engine needs it in every step"
