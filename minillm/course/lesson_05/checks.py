"""Weights rounded with a scale for each row, or with a scale and a zero point for each group.  Lesson 05."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..shared.checks import Exercise, Explained
from ..shared.differences import assert_near, text

SECONDS = 10.0  # a tenth of a second is enough
EXACT = 1e-6
ROW = [0.55, -1.4, 0.13, 0.27, -0.66, 0.06]
GROUP = [0.3, 1.2, -0.3, 0.76]

rows = Exercise("quantize_rows", seconds=SECONDS)
groups = Exercise("quantize_groups", seconds=SECONDS)


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _tensor(*rows: Sequence[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def _results(function: Callable, names: str, *given: object) -> Sequence[Tensor]:
    """Return what the function returns, if it is as many tensors as it should be."""
    got = function(*given)
    wanted = names.split(", ")
    right = isinstance(got, (tuple, list)) and len(got) == len(wanted) and all(isinstance(t, Tensor) for t in got)
    assert right, f"it must return {len(wanted)} tensors: {names}"
    return got


def _double(tensor: Tensor, shape: tuple[int, int], name: str) -> Tensor:
    """In float64, and in this shape if it has as many elements, or one for all; another property is strict."""
    if tensor.numel() == 1:
        return tensor.double().reshape(1, 1).expand(shape)
    assert tensor.numel() == shape[0] * shape[1], f"{name} have the shape {list(tensor.shape)}, not {list(shape)}"
    return tensor.double().reshape(shape)


# ---- a scale for each row


def _by_rows(function: Callable, weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    codes, scales = _results(function, "codes, scales", weight.clone(), bits)
    if scales.dtype == torch.int8 and codes.is_floating_point():
        raise Explained("it returns the scales first: codes come first, then scales")
    return _double(codes, (len(weight), weight.shape[1]), "codes"), _double(scales, (len(weight), 1), "scales")


def _balanced(count: int, half: int, seed: int = 0) -> Tensor:
    """Rows of weights, all with a largest magnitude of 1, which each has positive and negative."""
    part = _normal(count, half, seed=seed)
    part = part / part.abs().amax(1, keepdim=True)
    return torch.cat([part, -part], 1)


@rows.example
def _(function):
    codes, scales = _by_rows(function, _tensor(ROW), 4)
    assert_near(scales, torch.tensor(0.2, dtype=torch.float64), "the scale", absolute=EXACT)
    assert_near(codes[0], torch.tensor([3, -7, 1, 1, -3, 0]), "the codes")


@rows.property(
    "the largest weight gets the code top or -top, for any number of bits",
    hint="scale = largest magnitude / top, with top = 2 ** (bits - 1) - 1; the largest may be positive or negative",
)
def _(function):
    most = _tensor([0.5, 3.0, -1.0], [0.5, -3.0, 1.0])  # two rows with the same scale
    for bits in range(2, 9):
        top = 2 ** (bits - 1) - 1
        for weight in (most, most.flip(0)):
            _, scales = _by_rows(function, weight, bits)
            where = f"rows {weight.tolist()}, {bits} bits: scales of 3 / {top}"
            assert_near(scales, torch.full_like(scales, 3 / top), where, relative=EXACT)


@rows.property(
    "each row has a scale of its own", hint="take the largest magnitude along the inputs only: one for each output row"
)
def _(function):
    weight = _balanced(4, 3) * _tensor([14.0], [0.14], [140.0], [1.4])
    codes, scales = _by_rows(function, weight, 4)
    want = weight.abs().amax(1, keepdim=True) / 7
    assert_near(scales, want, "scales of rows whose largest magnitudes are 14, 0.14, 140 and 1.4", relative=EXACT)
    most = codes.abs().amax(1)
    message = f"the scales are right, but the largest codes of the rows are {text(most)} instead of 7 in each"
    assert bool((most == 7).all()), message


@rows.property(
    "each code is the nearest multiple of the scale",
    hint="divide each weight by its row's scale, and round to the nearest integer; only then convert to int8",
)
def _(function):
    for bits in (8, 5, 3):
        weight = _balanced(7, 40, seed=bits)
        codes, scales = _by_rows(function, weight, bits)
        wrong = (weight / scales - codes).abs()
        wrong = torch.where(codes == codes.round(), wrong, 1.0)
        row, column = divmod(int(wrong.argmax()), weight.shape[1])
        quotient, code = weight[row, column] / scales[row, 0], codes[row, column]
        what = f"{bits} bits: weight / scale is {quotient:.4f} at {[row, column]}, and the code there is {code:g}"
        assert wrong.max() <= 0.5 + 1e-6, what


@rows.property(
    "a row of zeros has scale 1; tiny weights have a scale of their own",
    hint="0 / 0 is not a number: replace scales of exactly 0 by 1, and no others",
)
def _(function):
    zero = [0.0, 0.0, 0.0]
    for weight in (_tensor(zero), _tensor(zero, [2.0, -14.0, 4.0])):
        codes, scales = _by_rows(function, weight, 4)
        if len(weight) == 2 and bool((scales == 1).all()):
            raise AssertionError(f"rows {weight.tolist()}: expected scale 2 for the second row, got 1")
        if len(weight) == 1 or scales[0] != scales[1]:  # else: another property's matter
            assert scales[0, 0] == 1, (
                f"rows {weight.tolist()}: expected scale 1 for the row of zeros, got {scales[0, 0]:g}"
            )
            assert not codes[0].any(), f"rows {weight.tolist()}: the row of zeros has the codes {text(codes[0])}"
    for some in ([0.0, -14.0, 4.0], [4.0, 0.0, -14.0], [-14.0, 4.0, 0.0]):
        _, scales = _by_rows(function, _tensor(some), 4)
        assert scales.item() != 1, f"row {some}: expected the scale 2, got 1, as if all of its weights were 0"
    for tiny in (1e-3, 1e-12, 1e-30):
        codes, scales = _by_rows(function, _tensor([7 * tiny, -7 * tiny, tiny]), 4)
        assert_near(scales, _tensor([tiny]), f"the scale of a row whose largest weight is {7 * tiny:g}", relative=EXACT)
        what = f"codes of the weights {7 * tiny:g}, {-7 * tiny:g}, {tiny:g}"
        assert_near(codes[0], torch.tensor([7, -7, 1]), what)


def _stored(function: Callable, names: str, dtypes: Sequence[torch.dtype | None], shapes: Sequence, *more: int) -> None:
    """The results have these shapes and dtypes (None: that of the weight), for float64 and float32.

    Scales are the second: in float64 they are not rounded to float32.
    """
    for dtype in (torch.float64, torch.float32):
        weight = _normal(3, 8).to(dtype)
        got = _results(function, names, weight, *more)
        for name, tensor, want, shape in zip(names.split(", "), got, dtypes, shapes, strict=True):
            assert list(tensor.shape) == shape, (
                f"weight [3, 8]: {name} have the shape {list(tensor.shape)}, not {shape}"
            )
            assert tensor.dtype == (want or dtype), f"weight in {dtype}: {name} are {tensor.dtype}, not {want or dtype}"
        rounded = dtype == torch.float64 and torch.equal(got[1], got[1].float().double())
        assert not rounded, f"weight in {dtype}: the scales are all rounded to torch.float32"


rows.property(
    "codes are int8; scales have the dtype of the weight, and the shape [rows, 1]",
    hint="compute in the dtype of the weight, and convert the rounded codes with .to(torch.int8); keepdim=True keeps "
    "the second axis of the scales",
)(lambda function: _stored(function, "codes, scales", (torch.int8, None), ([3, 8], [3, 1]), 4))


def _unchanged(function: Callable, *more: int) -> None:
    for weight in (_normal(3, 8), torch.cat([torch.zeros(1, 8), _normal(1, 8)])):
        before = weight.clone()
        function(weight, *more)
        assert torch.equal(weight, before), "the weight was changed: it is still needed"


rows.property(
    "the weight is not changed",
    hint="operations whose names end in _, and operators like /=, change their tensor in place",
)(lambda function: _unchanged(function, 4))


# ---- a scale and a zero point for each group


def _by_groups(function: Callable, weight: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    codes, scales, zeros = _results(function, "codes, scales, zeros", weight.clone(), size)
    shape = len(weight), weight.shape[1] // size
    return (
        _double(codes, (len(weight), weight.shape[1]), "codes"),
        _double(scales, shape, "scales"),
        _double(zeros, shape, "zeros"),
    )


def _values(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    grouped = codes.reshape(*scales.shape, -1) - zeros[..., None]
    return (grouped * scales[..., None]).reshape(codes.shape)


def _expect(what: str, got: Tensor, want: Tensor) -> None:
    assert_near(got, want, what, relative=EXACT, absolute=1e-36)


@groups.example
def _(function):
    codes, scales, zeros = _by_groups(function, _tensor(GROUP), 4)
    assert_near(scales, torch.tensor(0.1, dtype=torch.float64), "the scale", absolute=EXACT)
    assert_near(zeros, torch.tensor(-5), "the zero point")
    assert_near(codes[0], torch.tensor([-2, 7, -8, 3]), "the codes")


def _exact(count: int, many: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights that are multiples of their group's scale, a power of 2, so they are exact; scales; zero points."""
    generator = torch.Generator().manual_seed(size)
    below = torch.randint(1, 15, (count, many), generator=generator)
    scales = 2.0 ** torch.randint(-6, 3, (count, many), generator=generator).double()
    whole = torch.randint(0, 16, (count, many, size), generator=generator)
    whole[..., 0], whole[..., 1] = 0, 15
    order = torch.rand(count, many, size, generator=generator).argsort(-1)
    whole = (whole - below[..., None]).gather(-1, order)
    return (whole * scales[..., None]).flatten(1), scales, below.double() - 8


@groups.property(
    "each group has a scale and a zero point of its own",
    hint="reshape to [rows, groups, group_size], take minima and maxima along the last axis only, and reshape back",
)
def _(function):
    for count, many, size in ((1, 3, 4), (3, 2, 8), (2, 5, 2), (4, 1, 16)):
        weight, scales, zeros = _exact(count, many, size)
        got = _by_groups(function, weight, size)
        where = f"{count} rows of {many} groups of {size}"
        _expect(f"{where}, scales", got[1], scales)
        _expect(f"{where}, zero points", got[2], zeros)
        _expect(f"{where}, all multiples of their scale: (codes - zeros) * scales", _values(*got), weight)


@groups.property(
    "the range of a group includes 0",
    hint="clamp: the low end is at most 0, and the high end at least 0, also if all weights of a group have one sign",
)
def _(function):
    for weights, scale, zero in (([2.0, 5.0, 3.0, 4.0], 1 / 3, -8), ([-5.0, -2.0, -1.0, -4.0], 1 / 3, 7)):
        weight = _tensor(weights)
        codes, scales, zeros = _by_groups(function, weight, 4)
        _expect(f"group {weights}, scale", scales, _tensor([scale]))
        _expect(f"group {weights}, zero point", zeros, _tensor([zero]))
        error = (_values(codes, scales, zeros) - weight).abs().max().item()
        assert error <= scale / 2 + EXACT, f"group {weights}: an error of {error:.3g} is more than half the scale"


def _open(count: int, size: int, seed: int) -> Tensor:
    """One group in each row, of both signs; no weight is half-way between two levels."""
    return _normal(count, size, seed=seed) + 0.3


def _exact_zeros(weight: Tensor) -> tuple[Tensor, Tensor]:
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    return -8 - low / ((high - low) / 15), (high - low) / 15


@groups.property(
    "the zero point is the nearest code to -8 - low / scale",
    hint="round to the nearest; conversion to int8 cuts the fraction off",
)
def _(function):
    weight = _open(40, 8, seed=1)
    _, _, zeros = _by_groups(function, weight, 8)
    wanted, _ = _exact_zeros(weight)
    wrong = torch.where(zeros == zeros.round(), (zeros - wanted).abs(), 1.0)
    row = int(wrong.argmax())
    assert wrong.max() <= 0.5 + 1e-6, f"-8 - low / scale is {wanted[row, 0]:.4f}, and the zero point {zeros[row, 0]:g}"


@groups.property(
    "each code is the nearest of its group's levels",
    hint="the levels are (code - zero) * scale with the *rounded* zero: round weight / scale, then add the zero point",
)
def _(function):
    weight = _open(20, 64, seed=2)
    codes, scales, zeros = _by_groups(function, weight, 64)
    levels = (torch.arange(-8, 8) - zeros) * scales  # [rows, 16]
    best = (weight[..., None] - levels[:, None]).abs().amin(-1)
    values = _values(codes, scales, zeros)
    worst = ((values - weight).abs() - best) / scales
    row, column = divmod(int(worst.argmax()), weight.shape[1])
    nearest = levels[row, (weight[row, column] - levels[row]).abs().argmin()]
    assert worst.max() <= 1e-6, (
        f"the weight {weight[row, column]:.6g} at {[row, column]} has the level {values[row, column]:.6g}, and "
        f"{nearest:.6g} is nearer"
    )


@groups.property(
    "codes and zero points stay from -8 to 7",
    hint="7.5 steps above 0 round to 8: clamp after the zero point is added, or the code spills into its neighbor",
)
def _(function):
    for low, high in ((-7.5, 7.5), (-1.5, 13.5), (-5.5, 9.5), (-15.0, 0.0), (0.0, 15.0)):
        weight = _tensor([low, high, 0.0, low / 3])
        codes, scales, zeros = _by_groups(function, weight, 4)
        for name, found in (("codes", codes), ("zero points", zeros)):
            what = f"group {text(weight)}: {name} {text(found)} must be from -8 to 7"
            assert found.min() >= -8 and found.max() <= 7, what
        error = (_values(codes, scales, zeros) - weight).abs().max() / scales.max()
        what = f"group {text(weight)}, codes {text(codes)}: an error of {error:.2g} scales"
        assert error <= 1.5 if low in (-7.5, -1.5, -5.5) else error <= 0.5 + 1e-6, what


@groups.property(
    "a group of zeros has scale 1; tiny weights have a scale of their own",
    hint="0 / 0 is not a number: replace scales of exactly 0 by 1, and no others",
)
def _(function):
    for tiny in (1.0, 1e-12, 1e-30):
        weight = _tensor([0.0] * 4, [-8.0 * tiny, 7.0 * tiny, 0.0, tiny])
        codes, scales, zeros = _by_groups(function, weight, 4)
        _expect("a group of zeros, scale", scales[0], torch.ones_like(scales[0]))
        values = _values(codes, scales, zeros)
        assert not values[0].any(), f"a group of zeros became {text(values[0])}"
        _expect(f"a group from {-8 * tiny:g} to {7 * tiny:g}, scale", scales[1], torch.full_like(scales[1], tiny))


groups.property(
    "codes and zeros are int8; scales have the dtype of the weight; shapes are [rows, in] and [rows, groups]",
    hint="compute in the dtype of the weight; at the end, reshape the codes back to its shape, and convert with "
    ".to(torch.int8)",
)(
    lambda function: _stored(
        function, "codes, scales, zeros", (torch.int8, None, torch.int8), ([3, 8], [3, 2], [3, 2]), 4
    )
)

groups.property(
    "the weight is not changed",
    hint="operations whose names end in _, and operators like /=, change their tensor in place",
)(lambda function: _unchanged(function, 4))
