"""Blocks of FP4, fake quantization, and the Pareto front.  Lesson 08."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..shared.checks import Exercise, Explained, assert_list
from ..shared.differences import ROUNDED, apart, assert_near, difference, text, why_wrong

LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)

# ---- FP4 in blocks

quantize_fp4 = Exercise("quantize_fp4", seconds=20.0)


def _same(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, scales, torch.ones_like(scales))


def _ones(scales: Tensor) -> Tensor:
    return torch.ones_like(scales)


def _near(found: Tensor, expected: Tensor, message: str, relative: float = 1e-6) -> None:
    assert_near(found, expected, message, absolute=relative * max(expected.abs().max().item(), 1e-30))


def _drawn(*shape: int, seed: int = 8) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _blocks(function: Callable, weight: Tensor, size: int, round_scales: Callable = _same) -> tuple[Tensor, Tensor]:
    """Values and scales in float64, if they have the right shapes and the weight is unchanged."""
    before = weight.clone()
    found = function(weight, size, round_scales)
    right = isinstance(found, (tuple, list)) and len(found) == 2 and all(isinstance(each, Tensor) for each in found)
    assert right, "it must return two tensors: values, scales"
    rows, inputs = weight.shape
    for name, each, shape in zip(("values", "scales"), found, ([rows, inputs], [rows, inputs // size]), strict=True):
        said = f"weight {[rows, inputs]}, blocks of {size}: {name} should be {shape}"
        assert list(each.shape) == shape, f"{said}, not {list(each.shape)}"
    if not torch.equal(before, weight):
        raise Explained("weight has changed: write to a new tensor")
    return found[0].double(), found[1].double()


@quantize_fp4.example
def _(function):
    values, scales = _blocks(function, torch.tensor([[0.9, -0.5, 0.2, 0.05]]), 4)
    _near(scales, torch.tensor([[0.15]]).double(), "the example's scale")
    _near(values, torch.tensor([[6, -3, 1.5, 0.5]]).double(), "the example's values")


@quantize_fp4.property(
    "each value is the nearest of e2m1's",
    "the step is 0.5 below 2, 1 from 2 to 4, and 2 from 4 on; round the quotient to a multiple of its step",
)
def _(function):
    x = torch.cat([torch.linspace(-5.999, 5.999, 1200, dtype=torch.float64), torch.tensor([6.0]).double()])
    nearest = (x.abs()[:, None] - LEVELS).abs().sort(-1)
    clear = nearest.values[:, 1] - nearest.values[:, 0] > 1e-3  # not a tie
    x, wanted = x[clear], (LEVELS[nearest.indices[:, 0]] * x.sign())[clear]
    values, _ = _blocks(function, x[None], len(x))
    wrong = ~((values[0] - wanted).abs() < 1e-9)  # true for NaN
    if wrong.any():
        at = int(wrong.nonzero()[0])
        raise AssertionError(f"{x[at]:.6g} becomes {values[0, at]:g}, the nearest is {wanted[at]:g}")


@quantize_fp4.property(
    "halves go to the even mantissa bit", "torch.round sends halves to the even multiple of the step: 0.75 becomes 1"
)
def _(function):
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    wanted = torch.tensor([0, 1.0, 1, 2, 2, 4, 4]).double()
    six = torch.tensor([6.0]).double()
    for sign in (1, -1):
        values, _ = _blocks(function, torch.cat([sign * x, six])[None], 8)
        _near(values[0], torch.cat([sign * wanted, six]), f"values of {text(sign * x)} and 6, whose scale is 1", 1e-9)


@quantize_fp4.property(
    "no value is beyond 6", "clamp the quotients to -6 and 6: a rounded scale may be smaller than the ideal one"
)
def _(function):
    def double(scales: Tensor) -> Tensor:
        return 2 * _same(scales)

    values, scales = _blocks(function, torch.tensor([[6.0, -3.0]], dtype=torch.float64), 2, double)
    # If they are not 3, -1.5 and 2, another property tells more.
    rounded = not difference(torch.cat([values, scales], 1), [[3.0, -1.5, 2.0]], absolute=1e-6)
    for x, wanted in (
        ([7.1, -1.0], [6.0, -1.0]),
        ([40.0, -20.0], [6.0, -6.0]),
        ([6.9, 0.5], [6.0, 0.5]),
        ([500.0, -499.0], [6.0, -6.0]),
        ([-40.0, 3.0], [-6.0, 3.0]),
    ):
        values, scales = _blocks(function, torch.tensor([x], dtype=torch.float64), 2, _ones)
        said = f"{x} with scales that are rounded to 1"
        assert bool((values.abs() <= 6 + 1e-9).all()), f"{said}: values are {text(values)}"
        if rounded:
            _near(values, torch.tensor([wanted]).double(), f"{said}: values")
            _near(scales, torch.tensor([[1.0]]).double(), f"{said}: scales")
    if rounded:
        two = torch.tensor([[12.0, -3.0], [120.0, 30.0]], dtype=torch.float64)
        values, _ = _blocks(function, two, 2, lambda scales: scales / 2)
        said = f"values of {two.tolist()}, whose scales are rounded to 1 and 10"
        _near(values, torch.tensor([[6.0, -3.0], [6.0, 3.0]]).double(), said)
    large = torch.tensor([[60.0, -30, 15, 5]], dtype=torch.float64)
    values, _ = _blocks(function, large, 4)
    _near(values, large / 10, f"values of {text(large)}, whose scale is 10: only quotients are clamped")


@quantize_fp4.property(
    "each block has a scale of its own",
    "unflatten the inputs into [blocks, block_size]; max |weight| / 6 over the last axis",
)
def _(function):
    for rows, size, blocks in ((3, 16, 4), (2, 32, 2), (4, 8, 1), (1, 2, 5)):
        sizes = torch.arange(1, rows * blocks + 1).double().view(rows, blocks, 1).mul(0.37).exp()
        weight = _drawn(rows, blocks, size) * sizes
        weight[::2, :, 0] = -5 * sizes[::2, :, 0]
        values, scales = _blocks(function, weight.flatten(1), size)
        said = f"{rows} rows of {blocks} blocks of {size}"
        ideal = weight.abs().amax(-1) / 6
        assert_near(scales, ideal, f"{said}: scales", relative=1e-6)
        for row in range(rows):
            for block in range(blocks):
                place = slice(block * size, (block + 1) * size)
                alone = weight[row, block] * weight[row, block].sign()[weight[row, block].abs().argmax()]
                own, _ = _blocks(function, alone[None].contiguous(), size)
                same = values[row, place].abs()
                _near(same, own[0].abs(), f"{said}: row {row}, block {block}, against the same alone: magnitudes", 1e-9)


@quantize_fp4.property(
    "weights are divided by the rounded scales",
    "call round_scales once, with all scales; divide by what it returns, and return that",
)
def _(function):
    weight = _drawn(1, 16, seed=3)
    weight[0, 0] = 5.3

    def powers(scales: Tensor) -> Tensor:
        return torch.exp2(_same(scales).log2().ceil())

    def coarse(scales: Tensor) -> Tensor:
        return scales * 0 + 3.0

    def double(scales: Tensor) -> Tensor:
        return 2 * _same(scales)

    two = torch.cat([weight, weight / 3])
    given = []

    def largest(scales: Tensor) -> Tensor:
        given.append(list(scales.shape))
        return scales * 0 + scales.max()

    _, scales = _blocks(function, two, 8, largest)
    _near(scales, torch.full((2, 2), 5.3 / 6).double(), "two rows, and round_scales returns the largest of all: scales")
    assert all(shape == [2, 2] for shape in given), f"2 rows of 2 blocks: round_scales is given {given}, not [2, 2]"
    _, scales = _blocks(function, torch.cat([weight, weight * 0]), 16, coarse)
    _near(scales, torch.full((2, 1), 3.0).double(), "a row of zeros, and round_scales returns 3 for all: scales", 1e-9)
    cases = ("powers of two", powers, 1.0), ("3 for all", coarse, 3.0), ("twice the ideal scale", double, 10.6 / 6)
    for name, rounding, scale in cases:
        values, scales = _blocks(function, weight, 16, rounding)
        _near(scales, torch.tensor([[scale]], dtype=torch.float64), f"the scale with {name}: round_scales gives")
        one = torch.cat([weight / scale, torch.tensor([[6.0]]).double()], 1)  # with a 6, the scale is 1
        own, _ = _blocks(function, one, 17)
        _near(values, own[:, :-1], f"values with {name}, against those of the quotients", 1e-9)


@quantize_fp4.property(
    "zeros stay zeros, and small blocks keep their scale", "no smallest scale: round_scales takes care of zeros"
)
def _(function):
    weight = torch.zeros(2, 4, dtype=torch.float64)
    weight[1] = torch.tensor([6.0, -3, 1.5, 0]).double() * 1e-36
    values, scales = _blocks(function, weight, 4)
    assert bool((values[weight == 0] == 0).all()), f"zeros become {text(values[weight == 0])}"
    _near(values[1], torch.tensor([6.0, -3, 1.5, 0]).double(), "values of a block of numbers near 1e-36")
    _near(scales[1] * 1e36, torch.ones(1).double(), "the scale of that block, divided by 1e-36")
    given: list[Tensor] = []

    def noted(scales: Tensor) -> Tensor:
        given.append(scales.clone().flatten())
        return _same(scales)

    _blocks(function, torch.tensor([[0.0, 0], [-3, 6]]).double(), 2, noted)
    if given:
        ideal = torch.cat(given)[:2]
        _near(ideal, torch.tensor([0.0, 1]).double(), "a block of zeros and one up to 6: round_scales is given")


@quantize_fp4.property("values and scales have the weight's dtype, and its precision", "no .float(), and no FP8 type")
def _(function):
    for dtype in (torch.float32, torch.float64):
        weight = _drawn(2, 16).to(dtype)
        values, scales = function(weight, 8, _same)
        for name, each in (("values", values), ("scales", scales)):
            assert each.dtype == dtype, f"weight is {dtype}: {name} are {each.dtype}"
        rounded = dtype == torch.float64 and torch.equal(scales, scales.float().double())
        assert not rounded, f"weight is float64: scales {text(scales)} have only the precision of float32"
    x = torch.tensor([[0.25 + 1e-10, 0.75 - 1e-10, 6.0]], dtype=torch.float64)
    values, _ = _blocks(function, x, 3)
    assert values[0].tolist() == [0.5, 0.5, 6], (
        f"0.2500000001, 0.7499999999 and 6 in float64, whose scale is 1: the nearest are 0.5, 0.5 and 6, not "
        f"{text(values)}; float32 would round them to halves"
    )


# ---- fake quantization

fake_quantize = Exercise("fake_quantize", seconds=20.0)


def _faked(function: Callable, weight: Tensor, bits: int, size: int) -> Tensor:
    before = weight.detach().clone()
    found = function(weight, bits, size)
    assert isinstance(found, Tensor), f"expected a tensor, got {type(found).__name__}"
    assert found.shape == weight.shape, f"weight is {list(weight.shape)}, the result {list(found.shape)}"
    if not torch.equal(before, weight.detach()):
        raise Explained("weight has changed: write to a new tensor")
    return found


def _leaf(*shape: int, seed: int = 8) -> Tensor:
    return _drawn(*shape, seed=seed).float().requires_grad_()


@fake_quantize.example
def _(function):
    weight = torch.tensor([[0.34, -0.86, 1.5, 0.08]], dtype=torch.float64, requires_grad=True)
    found = _faked(function, weight, 4, 4)
    _near(found.detach().double(), torch.tensor([[0.4, -0.8, 1.4, 0]]).double(), "the example")


@fake_quantize.property(
    "each group has its own scale", "unflatten the inputs into groups; the maximum over the last axis, with keepdim"
)
def _(function):
    for rows, size, groups in ((3, 8, 4), (2, 16, 1), (1, 4, 6), (4, 2, 2)):
        sizes = torch.arange(1, rows * groups + 1).view(rows, groups, 1).mul(0.6).exp()
        weight = (_drawn(rows, groups, size).float() * sizes).flatten(1)
        found = _faked(function, weight.clone().requires_grad_(), 4, size).detach().double()
        for row in range(rows):
            for group in range(groups):
                place = slice(group * size, (group + 1) * size)
                own = _faked(function, weight[row : row + 1, place].clone().requires_grad_(), 4, size).detach().double()
                said = f"{rows} rows of {groups} groups of {size}: row {row}, group {group}, against the same alone"
                _near(found[row : row + 1, place], own, said, 1e-5)


@fake_quantize.property(
    "codes are those of the formula, for any number of bits",
    "top = 2 ** (bits - 1): the scale is max |w| / (top - 1/2), codes are rounded, and from -top to top - 1",
)
def _(function):
    for bits in (2, 3, 4, 5, 8, 12):
        top = 2 ** (bits - 1)
        for sign, largest in ((1, 0), (-1, 101), (1, 255)):
            quotients = _drawn(1, 256, seed=bits).clamp(-2, 2) * (top - 0.5) / 2.1
            halves = [half for half in (-3.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5) if abs(half) < top - 0.5]
            quotients[0, 200 : 200 + len(halves)] = torch.tensor(halves)
            quotients[0, largest] = sign * (top - 0.5)
            weight = (quotients / 64).float()  # the scale is 1/64, without rounding
            wanted = (weight.double() * 64).round().clamp(-top, top - 1)
            found = _faked(function, weight.clone().requires_grad_(), bits, 256).detach().double() * 64
            off = (~((found - wanted).abs() < 1e-3)).nonzero()  # also of NaN
            if len(off):
                at = int(off[0, 1])
                half, (right, got) = weight[0, at] * 64, apart(wanted[0, at].item(), found[0, at].item())
                most = f"{bits} bits, the largest magnitude is that of {sign * (top - 0.5):g}/64, so the scale is 1/64"
                said = f"{most}: {half:.4g}/64 becomes {got}/64, not {right}/64"
                if half % 1 == 0.5 and (found - wanted)[0, at].abs() == 1:
                    probe = torch.tensor([ROUNDED], requires_grad=True)
                    rounded = _faked(function, probe, 8, len(ROUNDED)).detach()[0]
                    why = why_wrong(wanted[0, at].item(), found[0, at].item(), -top, top - 1, rounded)
                    raise Explained(f"{said}. {why}")
                raise AssertionError(said)


@fake_quantize.property(
    "the gradient passes unchanged, through every weight",
    "weight + (rounded - weight).detach(): nothing that is rounded, clamped or used as a scale is in the gradient",
)
def _(function):
    for bits, size in ((4, 8), (2, 4), (3, 16)):
        weight, upstream = _leaf(1, size, seed=bits).detach(), _drawn(1, size, seed=bits + 10)
        weight[0, 1] = 0.0
        for sign in (1, -1):
            given = (sign * weight).requires_grad_()
            found = _faked(function, given, bits, size)
            assert found.requires_grad, "the result has no gradient: only what is rounded may be detached"
            (gradient,) = torch.autograd.grad(found, given, upstream.to(found.dtype), allow_unused=True)
            assert gradient is not None, "the result has a gradient, but not of the weight"
            said = f"{bits} bits, a group of {size}: the gradient of the weights is that of their rounded values"
            assert_near(gradient, upstream, said, relative=1e-5)
    weight, upstream = _leaf(3, 12).detach(), _drawn(3, 12, seed=1)
    weight[1, 4:8] = 0.0
    found = _faked(function, weight.requires_grad_(), 4, 4)
    (gradient,) = torch.autograd.grad(found, weight, upstream.to(found.dtype), allow_unused=True)
    said = "3 rows of 3 groups, of which one is zeros: the gradient passes each of them"
    assert gradient is not None and bool(gradient[1, 4:8].any()), f"{said}, and that of zeros gets none"
    assert_near(gradient, upstream, said, relative=1e-5)


@fake_quantize.property("the gradient goes on to what the weight was made of", "no weight.data, and no new leaf tensor")
def _(function):
    base = _leaf(1, 8, seed=5)
    found = _faked(function, base * 3, 3, 8)
    assert found.requires_grad, "weight = base * 3: the result has no gradient"
    (gradient,) = torch.autograd.grad(found.sum(), base, allow_unused=True)
    reached = gradient is not None and bool((gradient != 0).any())
    assert reached, "weight = base * 3: no gradient reaches base"


@fake_quantize.property("a group of zeros stays zeros", "where the maximum is 0, the scale is 1: 0 / 0 is not a number")
def _(function):
    for weight in (torch.zeros(1, 4), torch.zeros(2, 8)):
        found = _faked(function, weight.requires_grad_(), 4, 4).detach()
        assert bool((found == 0).all()), f"a matrix of zeros becomes {text(found)}"
    beside = torch.tensor([[0.0, 0, 0, 0, 0.34, -0.86, 1.5, 0.08]])
    found = _faked(function, beside.requires_grad_(), 4, 4).detach()[0, :4]
    assert bool((found == 0).all()), f"a group of zeros, next to the example's group, becomes {text(found)}"
    for where, others in (("", 0), (", next to the example", 1)):
        said = _example_times(function, 2.0**-120, others)
        if said and not _example_times(function, 0.25, others):  # otherwise, another property tells more
            more = "There is no smallest scale: only where the maximum is 0, the scale is 1"
            raise Explained(f"the example times 2 ** -120{where}, divided by that: {said}. {more}")


def _example_times(function: Callable, size: float, others: int) -> str:
    """Say how the values of the example, `size` times as large and before `others` unchanged ones, differ."""
    example = torch.tensor([[0.34, -0.86, 1.5, 0.08]])
    weight = torch.cat([example * size, *[example] * others], 1)
    found = _faked(function, weight.requires_grad_(), 4, 4).detach()[:, :4].double()
    return difference(found / size, torch.tensor([[0.4, -0.8, 1.4, 0]]), absolute=1e-5)


@fake_quantize.property("the result has the weight's dtype", "torch.where(scales > 0, scales, torch.ones_like(scales))")
def _(function):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        found = _faked(function, _drawn(1, 8).to(dtype).requires_grad_(), 4, 8)
        assert found.dtype == dtype, f"weight is {dtype}, the result {found.dtype}"


# ---- the Pareto front

pareto_front = Exercise("pareto_front", seconds=10.0)


def _front(function: Callable, points: dict) -> list:
    before = dict(points)
    found = function(points)
    if points != before or list(points) != list(before):
        raise Explained("points has changed: work on a copy")
    assert not isinstance(found, (str, dict)) and hasattr(found, "__iter__"), f"expected names, got {found!r}"
    return list(found)


def _check_front(function: Callable, points: dict, wanted: list[str]) -> None:
    found = _front(function, points)
    assert sorted(found) == sorted(wanted), f"{points}: expected {wanted}, got {found}"


@pareto_front.example
def _(function):
    points = {"a": (1, 4), "b": (2, 2), "c": (3, 3)}
    assert_list(function(dict(points)), "names")
    _check_front(function, points, ["a", "b"])


@pareto_front.property(
    "a point that is better in one number stays", "beaten means: at least as good in all numbers, not in some"
)
def _(function):
    _check_front(function, {"a": (1, 9), "b": (9, 1), "c": (5, 5), "d": (8, 2)}, ["a", "b", "c", "d"])
    _check_front(function, {"a": (0.0, 7.0), "b": (-1.0, 8.0)}, ["a", "b"])


@pareto_front.property(
    "a point that is worse in one number and equal in the others goes",
    "equal in some numbers is enough if it is better in one",
)
def _(function):
    _check_front(function, {"a": (1, 2), "b": (1, 3), "c": (2, 2)}, ["a"])
    _check_front(function, {"b": (1, 3), "a": (1, 2)}, ["a"])
    if sorted(_front(function, {"a": (1, 9), "b": (3, 8)})) != ["a", "b"]:
        return  # another property tells more
    _check_front(function, {"a": (0, 1), "b": (0, 2)}, ["a"])
    _check_front(function, {"a": (0, 1), "b": (1, 1)}, ["a"])
    _check_front(function, {"a": (-2, -1), "b": (-1, -1)}, ["a"])
    _check_front(function, {"a": (1.0, 1e20), "b": (2.0, 1e20)}, ["a"])  # their sums are equal


@pareto_front.property(
    "every point is compared with all others",
    "with those before it and those after it, near and far; never remove from a list while looping over it",
)
def _(function):
    _check_front(function, {"a": (2, 3), "b": (3, 2), "c": (1, 1)}, ["c"])
    for count in (5, 12):
        front = [(2 ** (each + 1), 2 ** (count - each)) for each in range(count)]
        for beaten_by in range(count):
            for place in range(count + 1):  # one more point, which only one other beats
                numbers = [*front[:place], tuple(3 * each // 2 for each in front[beaten_by]), *front[place:]]
                points = dict(zip("abcdefghijklm", numbers, strict=False))
                names = list(points)
                by = names[beaten_by + (place <= beaten_by)]
                wanted = [name for name in names if name != names[place]]
                found = _front(function, points)
                said = f"{points}: only {by} beats {names[place]}, so expected {wanted}"
                assert sorted(found) == wanted, f"{said}, got {found}"


@pareto_front.property(
    "equal points stay together",
    "a point is not beaten by one with the same numbers; a third that beats one of them beats both",
)
def _(function):
    _check_front(function, {"a": (1, 2), "b": (1, 2), "c": (2, 1), "d": (3, 3)}, ["a", "b", "c"])
    equal = {name: tuple(float(number) for number in (1, 2)) for name in "ab"}  # two objects
    _check_front(function, equal, ["a", "b"])
    _check_front(function, dict.fromkeys("abc", (1, 2)), ["a", "b", "c"])
    for names in ("acb", "abc", "bac"):  # a and c are equal, and b beats both
        different = dict(zip("abc", ((2, 3), (1, 1), (3, 2)), strict=True))
        if _front(function, {name: different[name] for name in names}) == ["b"]:  # if not, another property tells more
            _check_front(function, {name: (1, 1) if name == "b" else (2, 2) for name in names}, ["b"])


@pareto_front.property(
    "any number of numbers, of any size",
    "compare every number, in pairs and exactly: zip(one, other), without a sum, a limit or a tolerance",
)
def _(function):
    _check_front(function, {"a": (3,), "b": (1,), "c": (2,)}, ["b"])
    _check_front(function, {}, [])
    _check_front(function, {"a": (5, 5, 5, 5)}, ["a"])
    _check_front(function, {"a": (2, 2, 1), "b": (1, 1, 4), "c": (3, 3, 5)}, ["a", "b"])
    _check_front(function, {"a": (2, 2, 2, 1), "b": (1, 1, 1, 8), "c": (9, 9, 9, 9)}, ["a", "b"])
    _check_front(function, {"a": (1, 4, 1), "b": (2, 1, 2)}, ["a", "b"])
    _check_front(function, {"a": (4, 1, 1), "b": (1, 2, 2)}, ["a", "b"])
    _check_front(function, {"a": (1.0, 7.0), "b": (1.00001, 7.0001)}, ["a"])
    _check_front(function, {"a": (2e-9, 2e12), "b": (1e-9, 1e12), "c": (3e-9, 3e12)}, ["b"])
    _check_front(function, {"a": (1e-9, 2e-9), "b": (2e-9, 1e-9), "c": (3e-9, 3e-9)}, ["a", "b"])
    _check_front(function, {"a": (16_777_217,), "b": (16_777_216,)}, ["b"])  # equal in float32
    _check_front(function, {"a": (1.0, 7.0), "b": (1.0 + 1e-12, 7.0 + 1e-12)}, ["a"])  # equal for math.isclose
    for little in (1e-12, 1e-6, 1e-2):  # both stay, however close they are
        _check_front(function, {"a": (1.0, 1.0 + little), "b": (1.0 + little, 1.0)}, ["a", "b"])


@pareto_front.property("names in the order of points", "go through points in order, and do not sort")
def _(function):
    points = {"z": (4, 1), "a": (1, 4), "m": (2, 2), "b": (9, 9)}
    found = _front(function, points)
    assert found == ["z", "a", "m"], f"{points}: expected ['z', 'a', 'm'], got {found}"
