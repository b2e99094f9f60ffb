"""Wrong solutions of lesson 08: blocks of FP4, fake quantization, the Pareto front."""

import math

import torch

from tests.course.mutants import wrong

# ---- FP4 in blocks


def _nearest(quotients, limits=(2, 4), top=6):
    size = quotients.abs().clamp(max=top)
    step = torch.where(size < limits[0], 0.5, torch.where(size < limits[1], 1.0, 2.0)).to(quotients.dtype)
    return (size / step).round() * step * quotients.sign()


def _fp4(weight, block_size, round_scales, nearest=_nearest, ideal=lambda blocks: blocks.abs().amax(-1) / 6):
    blocks = weight.unflatten(-1, (-1, block_size))
    scales = round_scales(ideal(blocks))
    return nearest(blocks / scales[..., None]).flatten(-2), scales


@wrong("quantize_fp4", fails="each value is the nearest of e2m1's")
def last_step_from_5_on(weight, block_size, round_scales):
    return _fp4(weight, block_size, round_scales, lambda quotients: _nearest(quotients, (2, 5)))


@wrong("quantize_fp4", fails="values and scales have the weight's dtype, and its precision")
def quotients_in_float32(weight, block_size, round_scales):
    return _fp4(weight, block_size, round_scales, lambda quotients: _nearest(quotients.float().to(quotients.dtype)))


@wrong("quantize_fp4", fails="halves go to the even mantissa bit")
def halves_up(weight, block_size, round_scales):
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=weight.dtype)
    middles = (levels[1:] + levels[:-1]) / 2

    def nearest(quotients):
        return levels[torch.bucketize(quotients.abs().contiguous(), middles, right=True)] * quotients.sign()

    return _fp4(weight, block_size, round_scales, nearest)


@wrong("quantize_fp4", fails="halves go to the even mantissa bit")
def first_of_two_near_levels(weight, block_size, round_scales):
    """A table and argmin: of two levels that are as near, the first."""
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=weight.dtype)

    def nearest(quotients):
        return levels[(quotients.abs()[..., None] - levels).abs().argmin(-1)] * quotients.sign()

    return _fp4(weight, block_size, round_scales, nearest)


@wrong("quantize_fp4", fails="no value is beyond 6")
def a_level_at_8(weight, block_size, round_scales):
    return _fp4(weight, block_size, round_scales, lambda quotients: _nearest(quotients, top=8))


@wrong("quantize_fp4", fails="no value is beyond 6")
def clamps_before_the_division(weight, block_size, round_scales):
    blocks = weight.unflatten(-1, (-1, block_size))
    scales = round_scales(blocks.abs().amax(-1) / 6)
    return _nearest(blocks.clamp(-6, 6) / scales[..., None]).flatten(-2), scales


@wrong("quantize_fp4", fails="no value is beyond 6")
def any_multiple_of_2(weight, block_size, round_scales):
    return _fp4(weight, block_size, round_scales, lambda quotients: _nearest(quotients, top=1e9))


@wrong("quantize_fp4", fails="no value is beyond 6")
def clamps_only_from_above(weight, block_size, round_scales):
    def nearest(quotients):
        size = quotients.abs()
        step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0)).to(quotients.dtype)
        return ((quotients / step).round() * step).clamp(max=6)

    return _fp4(weight, block_size, round_scales, nearest)


@wrong("quantize_fp4", fails="no value is beyond 6")
def beyond_6_without_its_sign(weight, block_size, round_scales):
    def nearest(quotients):
        values = _nearest(quotients, top=1e9)
        return torch.where(values.abs() > 6, 6.0, values)

    return _fp4(weight, block_size, round_scales, nearest)


@wrong("quantize_fp4", fails="no value is beyond 6")
def a_block_beyond_6_is_divided_again(weight, block_size, round_scales):
    """By as much as it takes for the largest to be 6: all others become smaller, too."""

    def nearest(quotients):
        return _nearest(quotients / (quotients.abs().amax(-1, keepdim=True) / 6).clamp(min=1))

    return _fp4(weight, block_size, round_scales, nearest)


@wrong("quantize_fp4", fails="no value is beyond 6")
def scales_never_below_the_ideal_ones(weight, block_size, round_scales):
    return _fp4(weight, block_size, lambda scales: torch.maximum(round_scales(scales), scales))


@wrong("quantize_fp4", fails="no value is beyond 6")
def clamps_by_the_largest_scale(weight, block_size, round_scales):
    """Before the division, where each block needs its own limit."""
    blocks = weight.unflatten(-1, (-1, block_size))
    scales = round_scales(blocks.abs().amax(-1) / 6)
    limit = 6 * scales.max()
    return _nearest(blocks.clamp(-limit, limit) / scales[..., None], top=1e9).flatten(-2), scales


@wrong("quantize_fp4", fails="each block has a scale of its own")
def a_scale_for_each_row(weight, block_size, round_scales):
    def ideal(blocks):
        return blocks.abs().amax((1, 2))[:, None].expand(blocks.shape[:2]) / 6

    return _fp4(weight, block_size, round_scales, ideal=ideal)


@wrong("quantize_fp4", fails="each block has a scale of its own")
def largest_weight_without_its_sign(weight, block_size, round_scales):
    return _fp4(weight, block_size, round_scales, ideal=lambda blocks: blocks.amax(-1) / 6)


@wrong("quantize_fp4", fails="each block has a scale of its own")
def every_nth_weight_is_a_block(weight, block_size, round_scales):
    blocks = weight.unflatten(-1, (block_size, -1)).transpose(-1, -2)
    scales = round_scales(blocks.abs().amax(-1) / 6)
    return _nearest(blocks / scales[..., None]).transpose(-1, -2).flatten(-2), scales


@wrong("quantize_fp4", fails="weights are divided by the rounded scales")
def divides_by_ideal_scales(weight, block_size, round_scales):
    ideal = weight.unflatten(-1, (-1, block_size)).abs().amax(-1) / 6
    values, _ = _fp4(weight, block_size, lambda scales: torch.where(scales > 0, scales, 1.0))
    return values, round_scales(ideal)


@wrong("quantize_fp4", fails="weights are divided by the rounded scales")
def returns_ideal_scales(weight, block_size, round_scales):
    values, _ = _fp4(weight, block_size, round_scales)
    return values, weight.unflatten(-1, (-1, block_size)).abs().amax(-1) / 6


@wrong("quantize_fp4", fails="weights are divided by the rounded scales")
def scales_rounded_row_by_row(weight, block_size, round_scales):
    """NVFP4's one number is that of the whole matrix."""
    return _fp4(weight, block_size, lambda scales: torch.cat([round_scales(row[None]) for row in scales]))


@wrong("quantize_fp4", fails="weights are divided by the rounded scales")
def scales_rounded_twice(weight, block_size, round_scales):
    return _fp4(weight, block_size, lambda scales: round_scales(round_scales(scales)))


@wrong("quantize_fp4", fails="weights are divided by the rounded scales")
def scales_as_a_column(weight, block_size, round_scales):
    return _fp4(weight, block_size, lambda scales: round_scales(scales.view(-1, 1)).view(scales.shape).contiguous())


@wrong("quantize_fp4", fails="weights are divided by the rounded scales")
def ideal_scales_keep_their_last_axis(weight, block_size, round_scales):
    return _fp4(weight, block_size, lambda scales: round_scales(scales[..., None])[..., 0])


@wrong("quantize_fp4", fails="weights are divided by the rounded scales")
def blocks_of_zeros_have_a_scale_of_1(weight, block_size, round_scales):
    """In place of the small scale that round_scales gives them: NVFP4's one number is then made for the 1."""

    def guarded(scales):
        return torch.where(scales > 0, round_scales(scales), torch.ones_like(scales))

    return _fp4(weight, block_size, guarded)


@wrong("quantize_fp4", fails="weights are divided by the rounded scales")
def never_rounds_scales(weight, block_size, round_scales):
    return _fp4(weight, block_size, lambda scales: torch.where(scales > 0, scales, 1.0))


@wrong("quantize_fp4", fails="zeros stay zeros, and small blocks keep their scale")
def scales_of_at_least_1e_8(weight, block_size, round_scales):
    return _fp4(weight, block_size, lambda scales: round_scales(scales).clamp(min=1e-8))


@wrong("quantize_fp4", fails="zeros stay zeros, and small blocks keep their scale")
def ideal_scales_of_at_least_1e_12(weight, block_size, round_scales):
    return _fp4(weight, block_size, round_scales, ideal=lambda blocks: (blocks.abs().amax(-1) / 6).clamp(min=1e-12))


@wrong("quantize_fp4", fails="zeros stay zeros, and small blocks keep their scale")
def ideal_scales_of_at_least_1e_30(weight, block_size, round_scales):
    return _fp4(weight, block_size, round_scales, ideal=lambda blocks: (blocks.abs().amax(-1) / 6).clamp(min=1e-30))


@wrong("quantize_fp4", fails="zeros stay zeros, and small blocks keep their scale")
def zeros_become_1_before_scales_are_rounded(weight, block_size, round_scales):
    """The usual guard against 0 / 0, too early: NVFP4 makes the largest scale 448, and that is then the guard's."""
    return _fp4(weight, block_size, lambda scales: round_scales(torch.where(scales > 0, scales, 1.0)))


@wrong("quantize_fp4", fails="zeros stay zeros, and small blocks keep their scale")
def sign_by_division(weight, block_size, round_scales):
    def nearest(quotients):
        return _nearest(quotients.abs()) * quotients / quotients.abs()

    return _fp4(weight, block_size, round_scales, nearest)


@wrong("quantize_fp4", fails="values and scales have the weight's dtype, and its precision")
def values_in_float32(weight, block_size, round_scales):
    values, scales = _fp4(weight, block_size, round_scales)
    return values.float(), scales


@wrong("quantize_fp4", fails="values and scales have the weight's dtype, and its precision")
def values_in_fp8(weight, block_size, round_scales):
    values, scales = _fp4(weight, block_size, round_scales)
    return values.to(torch.float8_e4m3fn), scales


@wrong("quantize_fp4", fails="values and scales have the weight's dtype, and its precision")
def computed_in_float32(weight, block_size, round_scales):
    """float64 comes back, with the precision of float32."""
    values, scales = _fp4(weight.float(), block_size, round_scales)
    return values.to(weight.dtype), scales.to(weight.dtype)


# ---- fake quantization


def _rounded(weight, bits, group_size, top=None, low=None):
    top = 2 ** (bits - 1) if top is None else top
    groups = weight.unflatten(-1, (-1, group_size))
    scales = groups.abs().amax(-1, keepdim=True) / (top - 0.5)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return ((groups / scales).round().clamp(-top if low is None else low, top - 1) * scales).flatten(-2)


def _through(weight, rounded):
    return weight + (rounded - weight).detach()


@wrong("fake_quantize", fails="each group has its own scale")
def a_scale_for_each_row_of_groups(weight, bits, group_size):
    return _through(weight, _rounded(weight.detach(), bits, weight.shape[1]))


@wrong("fake_quantize", fails="each group has its own scale")
def a_scale_for_the_matrix(weight, bits, group_size):
    return _through(weight, _rounded(weight.detach().view(1, -1), bits, weight.numel()).view_as(weight))


@wrong("fake_quantize", fails="each group has its own scale")
def every_nth_weight_is_a_group(weight, bits, group_size):
    turned = weight.detach().unflatten(-1, (group_size, -1)).transpose(-1, -2).flatten(-2)
    rounded = _rounded(turned, bits, group_size).unflatten(-1, (-1, group_size)).transpose(-1, -2).flatten(-2)
    return _through(weight, rounded)


@wrong("fake_quantize", fails="codes are those of the formula, for any number of bits")
def always_four_bits(weight, bits, group_size):
    return _through(weight, _rounded(weight.detach(), 4, group_size))


@wrong("fake_quantize", fails="codes are those of the formula, for any number of bits")
def the_last_weight_of_a_group_does_not_count(weight, bits, group_size):
    groups = weight.detach().unflatten(-1, (-1, group_size))
    scales = groups[..., : max(3, group_size - 1)].abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 0.5)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return _through(
        weight, ((groups / scales).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * scales).flatten(-2)
    )


@wrong("fake_quantize", fails="codes are those of the formula, for any number of bits")
def largest_weight_of_a_group_without_its_sign(weight, bits, group_size):
    top = 2 ** (bits - 1)
    groups = weight.detach().unflatten(-1, (-1, group_size))
    largest = groups.amax(-1, keepdim=True)
    scales = torch.where(largest > 0, largest, groups.abs().amax(-1, keepdim=True)) / (top - 0.5)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return _through(weight, ((groups / scales).round().clamp(-top, top - 1) * scales).flatten(-2))


@wrong("fake_quantize", fails="codes are those of the formula, for any number of bits")
def symmetric_codes(weight, bits, group_size):
    """From -7 to 7: right unless the largest weight is negative."""
    return _through(weight, _rounded(weight.detach(), bits, group_size, low=1 - 2 ** (bits - 1)))


@wrong("fake_quantize", fails="codes are those of the formula, for any number of bits")
def codes_from_minus_8_to_7(weight, bits, group_size):
    groups = weight.detach().unflatten(-1, (-1, group_size))
    scales = groups.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 0.5)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return _through(weight, ((groups / scales).round().clamp(-8, 7) * scales).flatten(-2))


def _codes_by(rounded, weight, bits, group_size):
    top = 2 ** (bits - 1)
    groups = weight.detach().unflatten(-1, (-1, group_size))
    scales = groups.abs().amax(-1, keepdim=True) / (top - 0.5)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return _through(weight, (rounded(groups / scales).clamp(-top, top - 1) * scales).flatten(-2))


@wrong("fake_quantize", fails="codes are those of the formula, for any number of bits")
def halves_away_from_zero(weight, bits, group_size):
    return _codes_by(lambda x: x.sign() * (x.abs() + 0.5).floor(), weight, bits, group_size)


@wrong("fake_quantize", fails="codes are those of the formula, for any number of bits")
def halves_down(weight, bits, group_size):
    return _codes_by(lambda x: (x - 0.5).ceil(), weight, bits, group_size)


@wrong("fake_quantize", fails="the gradient passes unchanged, through every weight")
def through_the_scales(weight, bits, group_size):
    """Only round() is detached, so the gradient of a group's largest weight is that of the scale."""
    return _codes_detached(weight, bits, group_size, weight)


@wrong("fake_quantize", fails="the gradient passes unchanged, through every weight")
def no_gradient_where_clamped(weight, bits, group_size):
    return _codes_detached(weight, bits, group_size, weight.detach())


def _codes_detached(weight, bits, group_size, scaled_by):
    top = 2 ** (bits - 1)
    groups = weight.unflatten(-1, (-1, group_size))
    scales = scaled_by.unflatten(-1, (-1, group_size)).abs().amax(-1, keepdim=True) / (top - 0.5)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    quotients = groups / scales
    codes = quotients + (quotients.round() - quotients).detach()
    return (codes.clamp(-top, top - 1) * scales).flatten(-2)


@wrong("fake_quantize", fails="the gradient passes unchanged, through every weight")
def rounding_without_an_estimator(weight, bits, group_size):
    return _rounded(weight, bits, group_size)


@wrong("fake_quantize", fails="the gradient passes unchanged, through every weight")
def sign_times_magnitude(weight, bits, group_size):
    """The derivative of abs() is 0 at 0, so a weight of 0 never moves."""
    size = weight.abs()
    return weight.sign() * size + (_rounded(weight.detach(), bits, group_size) - weight).detach()


@wrong("fake_quantize", fails="the gradient passes unchanged, through every weight")
def twice_the_gradient(weight, bits, group_size):
    return 2 * weight + (_rounded(weight.detach(), bits, group_size) - 2 * weight).detach()


@wrong("fake_quantize", fails="the gradient goes on to what the weight was made of")
def a_new_leaf(weight, bits, group_size):
    leaf = weight if weight.is_leaf else weight.detach().requires_grad_()
    return _through(leaf, _rounded(leaf.detach(), bits, group_size))


@wrong("fake_quantize", fails="the gradient goes on to what the weight was made of")
def detached_unless_a_leaf(weight, bits, group_size):
    rounded = _rounded(weight.detach(), bits, group_size)
    return _through(weight, rounded) if weight.is_leaf else rounded


@wrong("fake_quantize", fails="a group of zeros stays zeros")
def divides_by_zero(weight, bits, group_size):
    top = 2 ** (bits - 1)
    groups = weight.detach().unflatten(-1, (-1, group_size))
    scales = groups.abs().amax(-1, keepdim=True) / (top - 0.5)
    return _through(weight, ((groups / scales).round().clamp(-top, top - 1) * scales).flatten(-2))


def _guarded(weight, bits, group_size, guard):
    top = 2 ** (bits - 1)
    groups = weight.detach().unflatten(-1, (-1, group_size))
    scales = guard(groups.abs().amax(-1, keepdim=True) / (top - 0.5))
    return _through(weight, ((groups / scales).round().clamp(-top, top - 1) * scales).flatten(-2))


@wrong("fake_quantize", fails="a group of zeros stays zeros")
def group_scales_of_at_least_1e_8(weight, bits, group_size):
    return _guarded(weight, bits, group_size, lambda scales: scales.clamp(min=1e-8))


@wrong("fake_quantize", fails="a group of zeros stays zeros")
def group_scales_of_at_least_1e_20(weight, bits, group_size):
    return _guarded(weight, bits, group_size, lambda scales: scales.clamp(min=1e-20))


@wrong("fake_quantize", fails="a group of zeros stays zeros")
def group_scales_of_at_least_1e_35(weight, bits, group_size):
    return _guarded(weight, bits, group_size, lambda scales: scales.clamp(min=1e-35))


@wrong("fake_quantize", fails="a group of zeros stays zeros")
def group_scales_of_at_least_a_part_of_the_largest(weight, bits, group_size):
    return _guarded(weight, bits, group_size, lambda scales: scales.clamp(min=max(scales.max().item() * 1e-6, 1e-44)))


@wrong("fake_quantize", fails="the result has the weight's dtype")
def result_in_float32(weight, bits, group_size):
    return _through(weight, _rounded(weight.detach(), bits, group_size)).float()


@wrong("fake_quantize", fails="the result has the weight's dtype")
def result_in_float64(weight, bits, group_size):
    return _through(weight.double(), _rounded(weight.detach().double(), bits, group_size))


@wrong("fake_quantize", fails="codes are those of the formula, for any number of bits")
def codes_in_int8(weight, bits, group_size):
    """Codes of more than 8 bits wrap around."""
    top = 2 ** (bits - 1)
    groups = weight.detach().unflatten(-1, (-1, group_size))
    scales = groups.abs().amax(-1, keepdim=True) / (top - 0.5)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    codes = (groups / scales).round().clamp(-top, top - 1).to(torch.int8)
    return _through(weight, (codes * scales).flatten(-2))


@wrong("fake_quantize", fails="a group of zeros stays zeros")
def only_a_matrix_of_zeros_is_guarded(weight, bits, group_size):
    """0 / 0 in a group of zeros next to another group."""
    return weight * 1 if not weight.any() else divides_by_zero(weight, bits, group_size)


# ---- the Pareto front


def _front(points, beats):
    return [name for name, mine in points.items() if not any(beats(other, mine) for other in points.values())]


def _at_least(other, mine):
    return all(theirs <= own for theirs, own in zip(other, mine, strict=True))


@wrong("pareto_front", fails="a point that is better in one number stays")
def smallest_product(points):
    return _front(points, lambda other, mine: math.prod(other) < math.prod(mine))


def _dominates(other, mine):
    return other != mine and _at_least(other, mine)


@wrong("pareto_front", fails="a point that is worse in one number and equal in the others goes")
def better_in_all_numbers(points):
    return _front(points, lambda other, mine: all(a < b for a, b in zip(other, mine, strict=True)))


@wrong("pareto_front", fails="a point that is worse in one number and equal in the others goes")
def only_points_before(points):
    """One pass: a point that comes later is never compared with."""
    front = {}
    for name, mine in points.items():
        if not any(_dominates(other, mine) for other in front.values()):
            front = {
                key: each for key, each in front.items() if not all(a < b for a, b in zip(mine, each, strict=True))
            }
            front[name] = mine
    return list(front)


def _at_least_and(better):
    return lambda other, mine: _at_least(other, mine) and better(other) < better(mine)


@wrong("pareto_front", fails="a point that is worse in one number and equal in the others goes")
def a_smaller_product_is_better(points):
    """With a number of 0, products are equal."""
    return _front(points, _at_least_and(math.prod))


@wrong("pareto_front", fails="a point that is worse in one number and equal in the others goes")
def a_smaller_sum_is_better(points):
    """A small number is lost next to a large one."""
    return _front(points, _at_least_and(sum))


@wrong("pareto_front", fails="a point that is worse in one number and equal in the others goes")
def a_zero_is_not_better(points):
    """`if a` in place of `if a is not None`."""
    return _front(
        points,
        lambda other, mine: _at_least(other, mine) and any(a and a < b for a, b in zip(other, mine, strict=True)),
    )


@wrong("pareto_front", fails="a point that is worse in one number and equal in the others goes")
def a_smaller_norm_is_better(points):
    """It is not, of negative numbers."""
    return _front(points, _at_least_and(lambda point: math.hypot(*point)))


@wrong("pareto_front", fails="every point is compared with all others")
def removes_while_looping(points):
    """The loop skips the name after one that it removes."""
    front = []
    for name, mine in points.items():
        if any(_dominates(points[other], mine) for other in front):
            continue
        for other in front:
            if _dominates(mine, points[other]):
                front.remove(other)
        front.append(name)
    return front


@wrong("pareto_front", fails="every point is compared with all others")
def compared_with_the_first_three(points):
    first = list(points.values())[:3]
    return [name for name, mine in points.items() if not any(_dominates(other, mine) for other in first)]


@wrong("pareto_front", fails="every point is compared with all others")
def compared_with_those_before_and_the_next(points):
    each = list(points.values())
    return [
        name
        for at, (name, mine) in enumerate(points.items())
        if not any(_dominates(other, mine) for other in each[: at + 2])
    ]


@wrong("pareto_front", fails="equal points stay together")
def equal_points_beat_each_other(points):
    names = list(points)
    beaten = {name for name in names for other in names if other != name and _at_least(points[other], points[name])}
    return [name for name in names if name not in beaten]


@wrong("pareto_front", fails="equal points stay together")
def one_name_for_equal_points(points):
    found = _front(points, _dominates)
    return [name for at, name in enumerate(found) if points[name] not in [points[each] for each in found[:at]]]


@wrong("pareto_front", fails="equal points stay together")
def any_other_tuple(points):
    """`is not` in place of `!=`: equal tuples may be two objects."""
    return _front(points, lambda other, mine: other is not mine and _at_least(other, mine))


@wrong("pareto_front", fails="equal points stay together")
def the_last_comparison_decides(points):
    """An equal point that comes later clears the flag."""
    front = []
    for name, mine in points.items():
        beaten = False
        for key, other in points.items():
            if key != name and _at_least(other, mine):
                beaten = other != mine
        if not beaten:
            front.append(name)
    return front


@wrong("pareto_front", fails="equal points stay together")
def a_point_with_an_equal_stays(points):
    numbers = list(points.values())
    found = _front(points, _dominates)
    return [name for name, mine in points.items() if name in found or numbers.count(mine) > 1]


@wrong("pareto_front", fails="equal points stay together")
def an_equal_of_an_earlier_point_stays(points):
    numbers, found = list(points.values()), _front(points, _dominates)
    return [name for at, (name, mine) in enumerate(points.items()) if name in found or mine in numbers[:at]]


@wrong("pareto_front", fails="equal points stay together")
def stops_at_an_equal_point(points):
    """`break` in place of `continue`: what comes after it is never compared with."""
    front = []
    for name, mine in points.items():
        for key, other in points.items():
            if key != name and other == mine:
                front.append(name)
                break
            if _dominates(other, mine):
                break
        else:
            front.append(name)
    return front


@wrong("pareto_front", fails="equal points stay together")
def at_most_two_equal_points(points):
    numbers, found = list(points.values()), _front(points, _dominates)
    return [name for at, (name, mine) in enumerate(points.items()) if name in found and numbers[:at].count(mine) < 2]


@wrong("pareto_front", fails="any number of numbers, of any size")
def numbers_in_float32(points):
    rows = {name: tuple(torch.tensor(each, dtype=torch.float32).tolist()) for name, each in points.items()}
    return _front(rows, _dominates)


@wrong("pareto_front", fails="any number of numbers, of any size")
def close_numbers_are_equal(points):
    def beats(other, mine):
        pairs = list(zip(other, mine, strict=True))
        close = [math.isclose(*pair) for pair in pairs]
        return not all(close) and all(near or a < b for near, (a, b) in zip(close, pairs, strict=True))

    return _front(points, beats)


@wrong("pareto_front", fails="any number of numbers, of any size")
def about_as_good_is_good_enough(points):
    """Two points that trade a little of one number for a little of another then beat each other."""

    def beats(other, mine):
        pairs = list(zip(other, mine, strict=True))
        return all(a <= b or math.isclose(a, b) for a, b in pairs) and any(a < b for a, b in pairs)

    return _front(points, beats)


@wrong("pareto_front", fails="any number of numbers, of any size")
def the_first_and_the_last_number(points):
    return _front(points, lambda other, mine: other != mine and other[0] <= mine[0] and other[-1] <= mine[-1])


@wrong("pareto_front", fails="any number of numbers, of any size")
def points_that_are_close_do_not_beat_each_other(points):
    def beats(other, mine):
        close = all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(other, mine, strict=True))
        return _at_least(other, mine) and not close

    return _front(points, beats)


@wrong("pareto_front", fails="any number of numbers, of any size")
def the_last_two_numbers(points):
    return _front(points, lambda other, mine: _dominates(other[-2:], mine[-2:]))


@wrong("pareto_front", fails="any number of numbers, of any size")
def the_first_two_numbers(points):
    return _front(points, lambda other, mine: _dominates(other[:2], mine[:2]))


@wrong("pareto_front", fails="any number of numbers, of any size")
def the_first_three_numbers(points):
    return _front(points, lambda other, mine: _dominates(other[:3], mine[:3]))


@wrong("pareto_front", fails="any number of numbers, of any size")
def better_in_most_numbers(points):
    def beats(other, mine):
        return other != mine and sum(a <= b for a, b in zip(other, mine, strict=True)) > len(mine) / 2

    return _front(points, beats)


@wrong("pareto_front", fails="any number of numbers, of any size")
def small_differences_are_none(points):
    def beats(other, mine):
        return _at_least(other, mine) and any(a < b - 1e-6 for a, b in zip(other, mine, strict=True))

    return _front(points, beats)


@wrong("pareto_front", fails="names in the order of points")
def sorted_names(points):
    return sorted(_front(points, _dominates))


@wrong("pareto_front", fails="names in the order of points")
def best_first(points):
    found = _front(points, _dominates)
    return sorted(found, key=points.get)


@wrong("fake_quantize", fails="the gradient passes unchanged, through every weight")
def skips_groups_of_zeros(weight, bits, group_size):
    groups = weight.unflatten(-1, (-1, group_size))
    passed = groups + (_rounded(weight.detach(), bits, group_size).view_as(groups) - groups).detach()
    return torch.where(groups.detach().abs().amax(-1, keepdim=True) > 0, passed, 0.0).flatten(-2)


@wrong("fake_quantize", fails="the gradient passes unchanged, through every weight")
def a_gradient_for_the_first_row(weight, bits, group_size):
    rounded = _rounded(weight.detach(), bits, group_size)
    return torch.cat([weight[:1] + (rounded[:1] - weight[:1]).detach(), rounded[1:]])


@wrong("fake_quantize", fails="the gradient passes unchanged, through every weight")
def a_gradient_for_the_first_group(weight, bits, group_size):
    rounded, first = _rounded(weight.detach(), bits, group_size), weight[:, :group_size]
    return torch.cat([first + (rounded[:, :group_size] - first).detach(), rounded[:, group_size:]], -1)
