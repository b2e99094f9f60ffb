"""Statistics of inputs, AWQ's search for scales.  Lesson 06."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..shared.checks import Exercise, Explained
from ..shared.differences import apart, assert_near, text

SECONDS = 10.0
STRENGTHS = [step / 10 for step in range(10)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def correlated(rows: int, inputs: int, seed: int = 0) -> Tensor:
    """Inputs [rows, inputs] that go together, the first one large."""
    x = drawn(rows, inputs, seed=seed) @ (drawn(inputs, inputs, seed=seed + 100) + torch.eye(inputs))
    x[:, 0] *= 6
    return x


def unchanged(call: Callable, **given: Tensor) -> None:
    """Call, and see that these tensors, by the names of the parameters, have the values that they had."""
    before = {name: each.clone() for name, each in given.items()}
    call()
    changed = [name for name, was in before.items() if not given[name].equal(was)]
    assert not changed, f"`{changed[0]}` was changed"


COPIES = "`+=`, `*=` and functions whose names end in `_` change a tensor in place: use `x + y`, or work on `x.clone()`"


def two(found: Any, first: str, second: str) -> Any:
    """Return what a solution returned, if it is two things."""
    right = isinstance(found, tuple | list) and len(found) == 2
    assert right, f"return two things: the {first}, and {second}"
    return found


def tensor(value: object, what: str, shape: tuple[int, ...]) -> Tensor:
    assert isinstance(value, Tensor), f"{what} must be a tensor, not {type(value).__name__}"
    assert tuple(value.shape) == shape, f"{what}: expected the shape {list(shape)}, got {list(value.shape)}"
    return value


# ---- what calibration records

statistics = Exercise("MyStatistics", seconds=SECONDS)


def _after(make: Callable, *parts: Tensor):
    found = make(parts[0].shape[1])
    for part in parts:
        found.add(part.clone())
    return found


@statistics.example
def _(make):
    found = _after(make, torch.tensor([[1.0, -2.0], [3.0, 2.0]]))
    mean, error = found.mean_magnitude(), found.error(torch.tensor([[1.0, 0.0]], dtype=torch.float64))
    assert_near(mean, torch.tensor([2, 2]), "mean magnitudes")
    assert error.numel() == 1, f"error of the change [1, 0] of one output: expected one number, got {error.tolist()}"
    assert_near(error, torch.tensor(10), "error of the change [1, 0]")


@statistics.property("all calls of `add` count", hint="add to the sums: `+=`, for every call and every row")
def _(make):
    x = correlated(9, 4)
    found = _after(make, x[:2], x[2:3], x[3:])
    assert found.rows == 9, f"`rows` is {found.rows} after calls with 2, 1 and 6 rows"
    if _after(make, x).rows != 9:
        return
    for name in ("second_moment", "magnitude"):
        whole, parts = getattr(_after(make, x), name), getattr(found, name)
        what = f"`{name}` after calls with 2, 1 and 6 rows, compared with one call with 9"
        assert_near(parts, whole, what, relative=1e-3, absolute=1e-8)  # precision: another property's matter


@statistics.property("sizes are means of |x| over the rows", hint="the sum of x.abs(), divided by the number of rows")
def _(make):
    x = correlated(7, 3)
    x[2, 1] = x[4, 1] = x[5, 2] = 0  # a row counts, whether its input is 0 or not
    found = make(3)
    found.add(x.clone())  # one call: several are another property's matter
    got = tensor(found.mean_magnitude(), "mean_magnitude()", (3,))
    assert_near(got, x.abs().mean(0), "mean_magnitude() of 7 rows", relative=1e-4, absolute=1e-8)


@statistics.property(
    "the predicted error is that of the outputs",
    hint="d^T H d has the products of different inputs too: H = x^T x, not only its diagonal, summed and not averaged",
)
def _(make):
    x, difference = correlated(30, 5), drawn(1, 5, seed=3)
    found = _after(make, x)
    got = found.error(difference.clone()).flatten()
    wanted = (x @ difference[0]).square().sum()
    assert len(got) == 1, f"one output: expected one error, got {len(got)}"
    assert_near(got, wanted, "the error of one output, over 30 rows", relative=1e-4)
    moment = tensor(found.second_moment, "`second_moment`", (5, 5))
    if not torch.allclose(moment.double(), moment.double().T, rtol=1e-4):
        raise Explained("the errors are right, but GPTQ inverts `second_moment`: store x^T x, which is symmetric")
    assert_near(moment, x.T @ x, "`second_moment`, of 30 rows", relative=1e-4, absolute=1e-8)


@statistics.property(
    "each output has its own error", hint="`difference` has a row for each output: sum over inputs only"
)
def _(make):
    x = correlated(30, 5)
    found = _after(make, x)
    for out in (1, 4, 5):
        difference = drawn(out, 5, seed=out)
        got = tensor(found.error(difference.clone()), f"error() of {out} outputs", (out,))
        each = torch.cat([found.error(row[None].clone()).flatten() for row in difference])
        what = f"the errors of {out} outputs together, compared with one by one"
        assert_near(got, each, what, relative=1e-6, absolute=1e-6)


@statistics.property(
    "the sums are in float64",
    hint="`x.double()` first: products and sums in the dtype of x have already lost their last digits; and no .float()",
)
def _(make):
    wide = correlated(50, 4) * 1e3
    for x in (wide.float(), wide):
        _keeps_digits(make, x)


def _keeps_digits(make: Callable, x: Tensor) -> None:
    found, given = _after(make, x), f"of {str(x.dtype).removeprefix('torch.')} inputs"
    wanted = {"second_moment": x.double().T @ x.double(), "magnitude": x.double().abs().sum(0)}
    for name, value in wanted.items():
        got = getattr(found, name)
        assert got.dtype == torch.float64, f"`{name}` is {got.dtype}"
        lost = ((got - value).abs().max() / value.abs().max()).item()
        assert lost < 1e-12 or lost > 1e-3, f"`{name}`, {given}, is off by a share of {lost:.0e}"
    mean, right = found.mean_magnitude(), wanted["magnitude"] / 50
    lost = ((mean - right).abs() / right).max().item() if mean.shape == right.shape else 1.0
    assert lost < 1e-12 or lost > 1e-3, f"mean_magnitude(), {given}, is off by a share of {lost:.0e}"
    difference = drawn(3, 4, seed=5)
    right = (difference @ wanted["second_moment"] * difference).sum(1)
    got = found.error(difference.clone()).flatten()
    lost = ((got - right).abs() / right).max().item() if got.shape == right.shape else 1.0
    assert lost < 1e-12 or lost > 1e-3, f"error(), of float64 differences, is off by a share of {lost:.0e}"


@statistics.property(
    "arguments and other objects stay as they are", hint="change only `self`, and nothing in place that was passed in"
)
def _(make):
    x, difference = correlated(6, 3), drawn(2, 3)
    one, other = make(3), make(3)
    unchanged(lambda: one.add(x), x=x)
    unchanged(lambda: one.error(difference), difference=difference)
    before, mean = one.error(difference).clone(), one.mean_magnitude().clone()
    twice = one.error(difference).equal(before) and one.mean_magnitude().equal(mean)
    assert twice, "asking for errors or means twice gives two answers"
    assert other.rows == 0 and not other.second_moment.any(), "rows added to one object are in another one too"
    x.mul_(2)
    assert one.error(difference).equal(before), "changing x after `add` changes the sums"
    one.add(x.clone())
    right = torch.allclose(one.error(difference), _after(make, x / 2, x).error(difference), rtol=1e-6)
    assert right, "x was changed after `add`, and the next `add` counts the changed rows in place of the old ones"


# ---- AWQ's search

awq = Exercise("awq_scales", seconds=SECONDS)


def whole(weight: Tensor) -> Tensor:
    """A grid of whole numbers."""
    return weight.round()


def fifteenths(weight: Tensor) -> Tensor:
    """Each row on its own grid, whose step depends on its largest weight."""
    step = weight.abs().amax(1, keepdim=True) / 7.3
    return (weight / step).round().clamp(-8, 7) * step


def itself(scales: Tensor) -> Tensor:
    return scales


def pairs(scales: Tensor) -> Tensor:
    """Neighbors must have the same scale."""
    return scales.view(-1, 2).log().mean(1).exp().repeat_interleave(2)


def quarters(scales: Tensor) -> Tensor:
    """Scales must be multiples of 1/4. Unlike `pairs`, this does not commute with a factor, a power or 1 / scales."""
    return (scales * 4).round().clamp(min=1) / 4


def formula(magnitude: Tensor, strength: float) -> Tensor:
    powers = magnitude.clamp(min=1e-4) ** strength
    return powers / (powers.max() * powers.min()).sqrt()


def raised_powers(magnitude: Tensor, strength: float) -> Tensor:
    """As in the authors' code."""
    powers = (magnitude**strength).clamp(min=1e-4)
    return powers / (powers.max() * powers.min()).sqrt()


def output_error(weight: Tensor, scales: Tensor, moment: Tensor, rounded: Callable) -> float:
    difference = rounded(weight * scales) / scales - weight
    return (difference @ moment * difference).sum().item()


def case(seed: int, out: int = 5, inputs: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """weight, magnitude and second moment."""
    x = correlated(40, inputs, seed)
    return drawn(out, inputs, seed=seed + 50), x.abs().mean(0), x.T @ x


def extreme() -> tuple[Tensor, Tensor, Tensor]:
    """A case whose best scales, on a grid of whole numbers, are from 1/23 to 23."""
    magnitude = torch.tensor([1.0, 16.0, 256.0, 1024.0]).double()
    weight = torch.tensor([[3.0, 0.4, 0.3, 0.23], [-2.0, 0.35, -0.2, 0.3]]).double()
    return weight, magnitude, torch.diag(magnitude.square())


def searched(
    solution: Callable, weight: Tensor, magnitude: Tensor, moment: Tensor, rounded=fifteenths, allowed=itself
) -> tuple[Tensor, float]:
    """Return what the search gives, if it is scales and one of the strengths."""
    found = solution(weight.clone(), magnitude.clone(), moment.clone(), rounded, allowed)
    found = two(found, "scales", "their strength")
    scales, strength = tensor(found[0], "the scales", (weight.shape[1],)), float(found[1])
    near = min(STRENGTHS, key=lambda each: abs(each - strength))
    assert abs(near - strength) < 1e-6, f"the strength {strength} is none of 0, 0.1, ..., 0.9"
    return scales, near


def as_the_formula(solution: Callable, seed: int) -> bool:
    """Return whether scales are those of the strength that is returned with them; if not, another property says so."""
    scales, strength = searched(solution, *case(seed))
    return torch.allclose(scales.double(), formula(case(seed)[1], strength), rtol=1e-4)


@awq.example
def _(solution):
    weight, magnitude = torch.tensor([[2.0, 0.25]]).double(), torch.tensor([1.0, 16.0]).double()
    moment = torch.diag(magnitude.square())
    scales, strength = searched(solution, weight, magnitude, moment, whole)
    error = output_error(weight, scales, moment, whole)
    assert strength == 0.9, f"expected strength 0.9, got {strength:g}"
    assert abs(error - 2.55) < 0.01, f"expected scales with an error of 2.55, got {text(scales)} with {error:.4g}"


@awq.property(
    "the scales are those of the formula",
    hint="powers of the magnitudes, divided by the square root of the largest power times the smallest",
)
def _(solution):
    cases = [(case(seed), fifteenths) for seed in range(3)] + [(extreme(), whole)]
    for (weight, magnitude, moment), grid in cases:
        scales, strength = searched(solution, weight, magnitude, moment, grid)
        wanted = formula(magnitude, strength)
        assert_near(scales, wanted, f"the scales of strength {strength:g}", relative=1e-4, absolute=1e-8)
        if scales.dtype != magnitude.dtype:
            raise Explained(f"the scales are {scales.dtype}: keep the dtype of `magnitude`, float64")


@awq.property(
    "the strength with the smallest output error wins",
    hint="d^T H d with all of H; d = rounded(weight * scales) / scales - weight; keep the best of all strengths",
)
def _(solution):
    if not as_the_formula(solution, 0):
        return
    for seed in range(12):
        weight, magnitude, moment = case(seed)
        _, strength = searched(solution, weight, magnitude, moment)
        errors = {each: output_error(weight, formula(magnitude, each), moment, fifteenths) for each in STRENGTHS}
        best = min(errors, key=errors.__getitem__)
        own, least = apart(errors[strength], errors[best])
        said = f"strength {strength:g} has the error {own}, and {best:g} has {least}"
        assert errors[strength] <= errors[best] * (1 + 1e-9), said
    for size in SIZES:
        _has_the_smallest_error_of_this_size(solution, size)
    magnitude = torch.tensor([1.0, 4.0, 16.0, 64.0]).double()
    weight = torch.tensor([[3.0, -2.0, 5.0, 1.0]]).double() / formula(magnitude, 1.0)  # on the grid at strength 1
    searched(solution, weight, magnitude, torch.diag(magnitude.square()), whole)  # which is none of the strengths


SIZES = (1e12, 1e-9)  # times the second moment
COMPARED = "compare each error with the best one so far, exactly, and begin with no best one: None or math.inf"


def _has_the_smallest_error_of_this_size(solution: Callable, size: float) -> None:
    """The same case with another unit of the inputs has the same answer."""
    weight, magnitude, moment = case(0)
    wanted = searched(solution, weight, magnitude, moment)[1]
    what = f"H times {size:g}, which changes no comparison"
    try:
        found = solution(weight.clone(), magnitude.clone(), moment * size, fifteenths, itself)
    except Exception as error:
        raise Explained(f"{what}: {COMPARED}") from error
    if not isinstance(found, tuple | list) or len(found) != 2 or found[0] is None or found[1] is None:
        raise Explained(f"{what}: expected strength {wanted:g}, got none; {COMPARED}")
    if abs(float(found[1]) - wanted) > 1e-6:
        raise Explained(f"{what}: expected strength {wanted:g}, got {float(found[1]):g}; {COMPARED}")


@awq.property(
    "strength 0 is tried: never worse than rounding to nearest", hint="the strengths begin with 0: all scales are 1"
)
def _(solution):
    weight, magnitude, moment = case(1)
    weight = weight.mul(3).round()  # on the grid: strength 0 has no error
    scales, strength = searched(solution, weight, magnitude, moment, whole)
    assert strength == 0, f"the weight is on the grid, so strength 0 has no error; got strength {strength:g}"


@awq.property(
    "allowed scales are tried and returned",
    hint="call `allowed` on the scales of each strength, once they are those of the formula, before the weight is "
    "multiplied; change them no more",
)
def _(solution):
    if not as_the_formula(solution, 0):
        return
    for seed in range(8):
        weight, magnitude, moment = case(seed)
        _, free = searched(solution, weight, magnitude, moment)
        own = {each: output_error(weight, formula(magnitude, each), moment, fifteenths) for each in STRENGTHS}
        if own[free] > min(own.values()) * (1 + 1e-9):
            return  # the search itself is wrong
        for allowed in (pairs, quarters):
            scales, strength = searched(solution, weight, magnitude, moment, allowed=allowed)
            tried = {each: allowed(formula(magnitude, each)) for each in STRENGTHS}
            if not torch.allclose(scales.double(), tried[strength], rtol=1e-4):
                got = scales.double()
                assert not torch.allclose(got, allowed(got), rtol=1e-4), (
                    f"the scales that were returned are allowed, but not those nearest to the formula's at {strength:g}"
                )
                raise AssertionError("the scales that were returned are not allowed ones")
            errors = {each: output_error(weight, tried[each], moment, fifteenths) for each in STRENGTHS}
            best = min(errors, key=errors.__getitem__)
            said = f"of the allowed scales, those of strength {best:g} have the smallest error, not of {strength:g}"
            assert errors[strength] <= errors[best] * (1 + 1e-9), said


@awq.property(
    "an input that never occurs does no harm",
    hint="its magnitude is 0, and so are its powers: `clamp(min=1e-4)` on the magnitudes, before anything is divided",
)
def _(solution):
    if not as_the_formula(solution, 0):
        return
    for size in (1e-3, 0, 5e-5):
        weight, magnitude, moment = case(2)
        magnitude[3], moment[3], moment[:, 3] = size, 0, 0
        errors = {each: output_error(weight, formula(magnitude, each), moment, fifteenths) for each in STRENGTHS}
        best = min(errors, key=errors.__getitem__)  # not 0, which a search finds whose other errors are NaN
        scales, strength = searched(solution, weight, magnitude, moment)
        if size > 1e-4 and errors[strength] > errors[best] * (1 + 1e-9):
            return  # the search itself is wrong
        wanted, where = formula(magnitude, strength), f"magnitude {size:g} at input 3, strength {strength:g}"
        right = torch.allclose(scales.double(), wanted, rtol=1e-4)
        if not right and torch.allclose(scales.double(), raised_powers(magnitude, strength), rtol=1e-4):
            cause = (
                "these are powers raised to 1e-4, as in the authors' code and the engine's. The exercise raises "
                "magnitudes to 1e-4, before the power"
            )
            if size:  # no power of it is below 1e-4, so none was raised
                cause = "the exercise raises all magnitudes below 1e-4 to 1e-4, not only those that are 0"
            raise Explained(f"{where}: {cause}")
        assert_near(scales, wanted, f"{where}: the scales", relative=1e-4, absolute=1e-8)
        own, least = apart(errors[strength], errors[best])
        said = f"{where}: the error is {own}, and that of {best:g} is {least}"
        assert errors[strength] <= errors[best] * (1 + 1e-9), said


@awq.property("the arguments stay as they were", hint=COPIES)
def _(solution):
    weight, magnitude, moment = case(3)
    magnitude[2] = 0
    given = {"weight": weight, "magnitude": magnitude, "moment": moment}
    unchanged(lambda: solution(*given.values(), fifteenths, itself), **given)
