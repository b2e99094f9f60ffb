"""One weight fixed and the others adjusted; GPTQ.  Lesson 06."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..shared.checks import Exercise
from ..shared.differences import apart, assert_near, difference
from .calibrated import Grid
from .calibrated import compensate as solved_for
from .checks import COPIES, SECONDS, correlated, drawn, tensor, two, unchanged

# ---- one weight is fixed, the others make up for it

compensate = Exercise("compensate", seconds=SECONDS)


def toy() -> tuple[Tensor, Tensor]:
    return torch.tensor([[1.4, 0.4]]).double(), torch.tensor([[6.0, 7.0], [7.0, 9.0]]).double()


def moment_of(inputs: int, seed: int = 0) -> Tensor:
    x = correlated(6 * inputs, inputs, seed)
    return x.T @ x


def compensated(solution: Callable, weights: Tensor, at: int, value: Tensor, moment: Tensor) -> Tensor:
    found = solution(weights.clone(), at, value.clone(), moment.clone())
    return tensor(found, "the weights", tuple(weights.shape)).double()


def assert_best(found: Tensor, wanted: Tensor, what: str) -> None:
    assert_near(found, wanted, what, relative=1e-4, absolute=1e-4)


@compensate.example
def _(solution):
    weights, moment = toy()
    found = compensated(solution, weights, 0, torch.ones(1).double(), moment)
    assert_best(found, torch.tensor([[1.0, 0.4 + 0.4 * 7 / 9]], dtype=torch.float64), "the example")


def _first(solution: Callable) -> bool:
    """Return whether column 0 of a single row is right; if not, another property says so."""
    weights, value = drawn(1, 3), drawn(1, seed=9)
    found = compensated(solution, weights, 0, value, moment_of(3))
    return torch.allclose(found, solved_for(weights, 0, value, moment_of(3)), rtol=0, atol=1e-9)


@compensate.property(
    "no other change has a smaller output error",
    hint="the others move along column `at` of the inverse of H, the whole H, divided by its element at [at, at]",
)
def _(solution):
    for seed in range(4):
        weights, value, moment = drawn(1, 5, seed=seed), drawn(1, seed=9), moment_of(5, seed)
        found = compensated(solution, weights, 0, value, moment)
        wanted = solved_for(weights, 0, value, moment)
        errors = [((each - weights) @ moment * (each - weights)).sum().item() for each in (found, wanted)]
        assert_best(found[:, 0], value, "the fixed weight")
        had, possible = apart(errors[0], errors[1])
        right = torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)
        assert right, f"the output error is {had}; possible is {possible}"
        off = (found - wanted).abs().max().item()
        assert off < 1e-9, (
            f"the weights are off by {off:.0e}: invert H in float64, as it is, and add nothing to its diagonal"
        )


@compensate.property("any column can be the fixed one", hint="use `at`, not 0; columns before `at` adjust too")
def _(solution):
    if not _first(solution):
        return
    for at in (1, 3, 4):
        weights, value, moment = drawn(1, 5, seed=at), drawn(1, seed=9), moment_of(5, at)
        found = compensated(solution, weights, at, value, moment)
        assert_best(found, solved_for(weights, at, value, moment), f"weight {at} of 5 is fixed: the weights")


@compensate.property(
    "each row has its own change", hint="the change is [out], the column [n]: change[:, None] * column"
)
def _(solution):
    if not _first(solution):
        return
    for out in (2, 4):
        weights, value, moment = drawn(out, 4, seed=out), drawn(out, seed=9), moment_of(4)
        found = compensated(solution, weights, 0, value, moment)
        assert_best(found, solved_for(weights, 0, value, moment), f"weight 0 of {out} rows is fixed: the weights")


@compensate.property("a single weight can be fixed", hint="with one column there are no others, and nothing to divide")
def _(solution):
    for rows in (1, 3):
        weights, value = drawn(1, 1).repeat(rows, 1), drawn(1, seed=9).repeat(rows)
        found = compensated(solution, weights, 0, value, torch.tensor([[2.0]]).double())
        assert_best(found[:, 0], value, "n = 1: the weight")


@compensate.property("the arguments stay as they were", hint=COPIES)
def _(solution):
    weights, value, moment = drawn(2, 3), drawn(2, seed=9), moment_of(3)
    unchanged(lambda: solution(weights, 0, value, moment), weights=weights, value=value, moment=moment)


# ---- GPTQ

gptq = Exercise("gptq", seconds=SECONDS)


class Whole:
    """A grid of whole numbers: every scale is 1."""

    def __init__(self, group_size: int):
        self.group_size = group_size

    def scale(self, weights: Tensor) -> Tensor:
        _group(weights, self.group_size)
        return torch.ones(len(weights), dtype=weights.dtype)

    def codes(self, column: Tensor, scale: Tensor) -> Tensor:
        _column(column, scale)
        return column.round().clamp(-8, 7).to(torch.int8)


class Halves(Whole):
    """Every scale is 1/2, so that levels go from -4 to 3.5 and are not codes."""

    def scale(self, weights: Tensor) -> Tensor:
        return super().scale(weights) / 2

    def codes(self, column: Tensor, scale: Tensor) -> Tensor:
        return super().codes(column / scale, scale)


class Even(Whole):
    """A grid of even numbers: a code is the nearest even one."""

    def codes(self, column: Tensor, scale: Tensor) -> Tensor:
        return super().codes(column / 2, scale).clamp(-4, 3) * 2


class Noted(Whole):
    """Keeps the columns that it rounds."""

    def __init__(self, group_size: int):
        super().__init__(group_size)
        self.columns: list[Tensor] = []

    def codes(self, column: Tensor, scale: Tensor) -> Tensor:
        self.columns.append(column.double().clone())
        return super().codes(column, scale)


class Checked(Grid):
    """Four bits, as in the engine, with clear errors."""

    def scale(self, weights: Tensor) -> Tensor:
        _group(weights, self.group_size)
        return super().scale(weights)

    def codes(self, column: Tensor, scale: Tensor) -> Tensor:
        _column(column, scale)
        return super().codes(column, scale)


def _group(weights: Tensor, size: int) -> None:
    right = weights.ndim == 2 and weights.shape[1] == size
    assert right, f"grid.scale got {list(weights.shape)}: it takes the weights of one group, [out, {size}]"


def _column(column: Tensor, scale: Tensor) -> None:
    right = column.ndim == 1 and scale.shape == column.shape
    assert right, f"grid.codes got {list(column.shape)} and {list(scale.shape)}: it takes [out] and [out]"


def factor_of(inputs: int, seed: int = 0) -> Tensor:
    return torch.linalg.cholesky(torch.linalg.inv(moment_of(inputs, seed)), upper=True)


def by_definition(weight: Tensor, factor: Tensor, grid: Whole | Grid) -> tuple[Tensor, Tensor]:
    """Column by column, each time with the inverse of what is left of H."""
    moment = torch.cholesky_inverse(factor, upper=True)
    work, codes, scales = weight.clone(), [], []
    for at in range(weight.shape[1]):
        if at % grid.group_size == 0:
            scales.append(grid.scale(work[:, at : at + grid.group_size]))
        codes.append(grid.codes(work[:, at], scales[-1]))
        work[:, at:] = solved_for(work[:, at:], 0, codes[-1] * scales[-1], moment[at:, at:])
    return torch.stack(codes, 1), torch.stack(scales, 1)


def rounded(solution: Callable, weight: Tensor, factor: Tensor, grid: Whole | Grid) -> tuple[Tensor, Tensor]:
    """Its codes and scales."""
    found = two(solution(weight.clone(), factor.clone(), grid), "codes", "the scales")
    return tensor(found[0], "the codes", tuple(weight.shape)).double(), found[1]


def large(out: int, inputs: int, seed: int) -> Tensor:
    """Weights of a few whole numbers."""
    return 2 * drawn(out, inputs, seed=seed)


@functools.cache
def _right_codes(inputs: int, size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """weight, factor, and the codes on a grid of halves."""
    weight, factor = large(4, inputs, seed), factor_of(inputs, seed)
    return weight, factor, by_definition(weight, factor, Halves(size))[0]


def _agrees(solution: Callable, inputs: int, size: int, seed: int = 0) -> str:
    """Return what is wrong with the codes on a grid of halves, or nothing."""
    weight, factor, wanted = _right_codes(inputs, size, seed)
    codes = rounded(solution, weight, factor, Halves(size))[0]
    if codes.equal(wanted.double()):
        return ""
    wrong = codes != wanted
    column = int(wrong.any(0).nonzero()[0])
    row = int(wrong[:, column].nonzero()[0])
    return (
        f"{inputs} columns in groups of {size}, all scales 1/2: the first wrong code is in column {column}: "
        f"expected {wanted[row, column]:g} in row {row}, got {codes[row, column]:g}"
    )


@gptq.example
def _(solution):
    weight, moment = toy()
    factor = torch.linalg.cholesky(torch.linalg.inv(moment), upper=True)
    codes, _ = rounded(solution, weight, factor, Whole(2))
    assert_near(codes, torch.tensor([[1, 1]]), "the codes")


def _not_codes(solution: Callable) -> str:
    """Return what is wrong with the codes where no error moves a weight, so that they are grid.codes's; or nothing."""
    weight = large(6, 8, 5)
    for grid, name in ((Checked(8), "four bits"), (Even(8), "a grid that has even codes only")):
        codes, scale = rounded(solution, weight, torch.eye(8).double(), grid)[0], grid.scale(weight)
        wanted = torch.stack([grid.codes(column, scale) for column in weight.T], 1)
        if problem := difference(codes, wanted):
            return f"one group, {name}, a factor of ones on the diagonal: the codes [row, column]: {problem}"
    return ""


@gptq.property(
    "codes are codes",
    hint="return what `grid.codes` gives, as it is: whole numbers from -8 to 7, not times the scale",
)
def _(solution):
    problem = _not_codes(solution)
    assert not problem, problem


ONE_GROUP = ((3, 1), (6, 0), (12, 3))  # columns, and a seed


@gptq.property(
    "columns that are still free make up for each error",
    hint="rounded = code * scale, with the code that grid.codes gave; error = rounded - weight as it is now; the later "
    "columns get error * factor[at, later] / factor[at, at]",
)
def _(solution):
    if _not_codes(solution):
        return
    for inputs, seed in ONE_GROUP:
        problem = _agrees(solution, inputs, inputs, seed)
        assert not problem, problem


def _one_group(solution: Callable) -> bool:
    return not _not_codes(solution) and not any(_agrees(solution, inputs, inputs, seed) for inputs, seed in ONE_GROUP)


@gptq.property(
    "errors cross the borders of groups", hint="a group shares a scale, no more: the update goes to all later columns"
)
def _(solution):
    if not _one_group(solution):
        return
    for inputs, size in ((6, 2), (12, 4), (272, 136)):
        problem = _agrees(solution, inputs, size)
        assert not problem, problem


def _all_groups(solution: Callable) -> bool:
    return _one_group(solution) and not any(_agrees(solution, inputs, size) for inputs, size in ((6, 2), (12, 4)))


@gptq.property(
    "there is a scale for each row and each group",
    hint="[out, groups], the groups in order: torch.stack(scales, 1); each as it was when its group began",
)
def _(solution):
    grid = Checked(4)
    for out in (3, 5):
        weight = large(out, 12, 1)
        _, scales = rounded(solution, weight, factor_of(12), grid)
        first = grid.scale(weight[:, :4])
        scales = tensor(scales, "the scales", (out, 3)).double()
        assert_near(scales[:, 0], first, "the scales of the first group", relative=1e-3)


@gptq.property(
    "a group's scale is that of its weights when their turn comes",
    hint="earlier errors have moved the weights: ask for a group's scale when its first column is reached, not before",
)
def _(solution):
    if not _all_groups(solution):
        return
    for seed in range(3):
        weight, factor, grid = large(3, 16, seed), factor_of(16, seed), Checked(4)
        codes, scales = rounded(solution, weight, factor, grid)
        if not isinstance(scales, Tensor) or scales.shape != (3, 4):
            return
        wanted_codes, wanted = by_definition(weight, factor, grid)
        assert_near(scales, wanted, "4 groups of 4 columns: the scales [row, group]", relative=1e-6)
        assert_near(codes, wanted_codes, "4 groups of 4 columns: the scales are right; the codes [row, column]")


@gptq.property("nothing is rounded to float32", hint="`weight.clone()` keeps the dtype of the weight: no .float()")
def _(solution):
    if not _all_groups(solution):
        return
    weight, factor = large(4, 8, 5), factor_of(8, 5)
    mine, right = Noted(4), Noted(4)
    rounded(solution, weight, factor, mine)
    by_definition(weight, factor, right)
    pairs = zip(mine.columns, right.columns, strict=False)
    off = max(((one - other).abs().max().item() for one, other in pairs), default=0.0)
    assert off < 1e-9 or off > 1e-3, f"the columns that grid.codes got are off by {off:.0e}: is any step in float32?"


@gptq.property("the arguments stay as they were", hint=f"slices of a tensor share its memory. {COPIES}")
def _(solution):
    weight, factor = large(3, 6, 1), factor_of(6)
    unchanged(lambda: solution(weight, factor, Whole(3)), weight=weight, factor=factor)
