"""Wrong solutions of lesson 06: one compensated weight, GPTQ."""

import torch

from tests.course.mutants import wrong

BEST = "no other change has a smaller output error"
ANY_COLUMN = "any column can be the fixed one"
EACH_ROW = "each row has its own change"
SINGLE = "a single weight can be fixed"
UNCHANGED = "the arguments stay as they were"


def moved(weights, at, value, column):
    return weights + (value - weights[:, at])[:, None] * column


@wrong("compensate", fails=BEST)
def only_the_next_column(weights, at, value, moment):
    """The neighbor alone makes up for the error, as in the example with two weights."""
    new = weights.clone()
    new[:, at] = value
    for each in (at - 1, at + 1):
        if 0 <= each < len(moment) and (each > at or at + 1 == len(moment)):
            new[:, each] -= (value - weights[:, at]) * moment[at, each] / moment[each, each]
    return new


@wrong("compensate", fails=BEST)
def each_alone(weights, at, value, moment):
    """Every other weight makes up for the whole error, as if the rest stayed."""
    column = -moment[at] / moment.diagonal()
    column[at] = 1
    return moved(weights, at, value, column)


@wrong("compensate", fails=BEST)
def the_others_stay(weights, at, value, moment):
    new = weights.clone()
    new[:, at] = value
    if len(moment) == 2:
        new[:, 1 - at] -= (value - weights[:, at]) * moment[0, 1] / moment[1 - at, 1 - at]
    return new


@wrong("compensate", fails=BEST)
def of_the_moment_itself(weights, at, value, moment):
    """A column of H instead of its inverse, with the sign that suits the example."""
    column = torch.linalg.inv(moment)[:, at] if len(moment) == 2 else -moment[:, at]
    return moved(weights, at, value, column / column[at])


@wrong("compensate", fails=BEST)
def damped(weights, at, value, moment):
    """Adds 1% to the diagonal, which is the caller's business; the toy's error is below what the example sees."""
    share = 0.01 if len(moment) > 2 else 0
    column = torch.linalg.inv(moment + share * moment.diagonal().mean() * torch.eye(len(moment)))[:, at]
    return moved(weights, at, value, column / column[at])


@wrong("compensate", fails=BEST)
def damped_by_a_millionth(weights, at, value, moment):
    column = torch.linalg.inv(moment + 1e-6 * torch.eye(len(moment), dtype=moment.dtype))[:, at]
    return moved(weights, at, value, column / column[at])


@wrong("compensate", fails=BEST)
def inverted_in_float32(weights, at, value, moment):
    column = torch.linalg.inv(moment.float()).to(moment.dtype)[:, at]
    return moved(weights, at, value, column / column[at])


@wrong("compensate", fails=ANY_COLUMN)
def always_the_first(weights, at, value, moment):
    column = torch.linalg.inv(moment)[:, 0]
    return moved(weights, 0, value, column / column[0])


@wrong("compensate", fails=ANY_COLUMN)
def only_later_columns(weights, at, value, moment):
    """As in the loop, where earlier columns are fixed already."""
    new = weights.clone()
    column = torch.linalg.inv(moment[at:, at:])[:, 0]
    new[:, at:] = moved(weights[:, at:], 0, value, column / column[0])
    return new


@wrong("compensate", fails=ANY_COLUMN)
def drops_earlier_changes(weights, at, value, moment):
    column = torch.linalg.inv(moment)[:, at]
    new = moved(weights, at, value, column / column[at])
    new[:, :at] = weights[:, :at]
    return new


@wrong("compensate", fails=ANY_COLUMN)
def divides_by_the_first(weights, at, value, moment):
    column = torch.linalg.inv(moment)[:, at]
    return moved(weights, at, value, column / column[0])


@wrong("compensate", fails=EACH_ROW)
def the_first_row_for_all(weights, at, value, moment):
    column = torch.linalg.inv(moment)[:, at]
    return weights + (value - weights[:, at])[0] * column / column[at]


@wrong("compensate", fails=EACH_ROW)
def the_mean_of_the_changes(weights, at, value, moment):
    column = torch.linalg.inv(moment)[:, at]
    change = value - weights[:, at]
    change = change.mean() if weights.shape[1] > 1 else change[:, None]
    return weights + change * column / column[at]


@wrong("compensate", fails=EACH_ROW)
def only_one_row(weights, at, value, moment):
    column = torch.linalg.inv(moment)[:, at]
    new = weights.clone()
    rows = slice(None) if weights.shape[1] == 1 else slice(0, 1)
    new[rows] = moved(weights[rows], at, value[rows], column / column[at])
    return new


@wrong("compensate", fails=SINGLE)
def no_others_no_change(weights, at, value, moment):
    if weights.shape[1] == 1:
        return weights.clone()
    column = torch.linalg.inv(moment)[:, at]
    return moved(weights, at, value, column / column[at])


@wrong("compensate", fails=UNCHANGED)
def in_place(weights, at, value, moment):
    column = torch.linalg.inv(moment)[:, at]
    weights += (value - weights[:, at])[:, None] * column / column[at]
    return weights


@wrong("compensate", fails=UNCHANGED)
def subtracts_in_place(weights, at, value, moment):
    column = torch.linalg.inv(moment)[:, at]
    value -= weights[:, at]
    return weights + value[:, None] * column / column[at]


@wrong("compensate", fails=UNCHANGED)
def inverts_in_place(weights, at, value, moment):
    moment.copy_(torch.linalg.inv(moment))
    return moved(weights, at, value, moment[:, at] / moment[at, at])


# ---- GPTQ

FREE = "columns that are still free make up for each error"
BORDERS = "errors cross the borders of groups"
EACH_SCALE = "there is a scale for each row and each group"
TURN = "a group's scale is that of its weights when their turn comes"
CODES = "codes are codes"


def rounded(weight, factor, grid, update, scale=None):
    """GPTQ with an update and a scale of one's own. scale(work, at): those of the group that begins there."""
    work, codes, scales = weight.clone(), [], []
    for at in range(weight.shape[1]):
        if at % grid.group_size == 0:
            scales.append((scale or (lambda work, at: grid.scale(work[:, at : at + grid.group_size])))(work, at))
        codes.append(grid.codes(work[:, at], scales[-1]))
        update(work, at, codes[-1] * scales[-1] - work[:, at])
    return torch.stack(codes, 1), torch.stack(scales, 1)


def right(factor):
    def update(work, at, error):
        work[:, at + 1 :] += error[:, None] * factor[at, at + 1 :] / factor[at, at]

    return update


@wrong("gptq", fails=FREE)
def without_dividing(weight, factor, grid):
    def update(work, at, error):
        work[:, at + 1 :] += error[:, None] * factor[at, at + 1 :]

    return rounded(weight, factor, grid, update)


@wrong("gptq", fails=FREE)
def divided_twice(weight, factor, grid):
    def update(work, at, error):
        work[:, at + 1 :] += error[:, None] * factor[at, at + 1 :] / factor[at, at] ** 2

    return rounded(weight, factor, grid, update)


@wrong("gptq", fails=FREE)
def only_the_next(weight, factor, grid):
    def update(work, at, error):
        work[:, at + 1 : at + 2] += error[:, None] * factor[at, at + 1 : at + 2] / factor[at, at]

    return rounded(weight, factor, grid, update)


@wrong("gptq", fails=FREE)
def errors_of_the_original(weight, factor, grid):
    """The error against the weight as it was at first, which counts earlier moves again."""

    def update(work, at, error):
        error = error + work[:, at] - weight[:, at]
        work[:, at + 1 :] += error[:, None] * factor[at, at + 1 :] / factor[at, at]

    return rounded(weight, factor, grid, update)


@wrong("gptq", fails=FREE)
def one_inverse_for_all(weight, factor, grid):
    """Rows of the whole inverse: right for column 0 only, since fixed columns must leave."""
    inverse = factor.T @ factor

    def update(work, at, error):
        work[:, at + 1 :] += error[:, None] * inverse[at, at + 1 :] / inverse[at, at]

    return rounded(weight, factor, grid, update)


@wrong("gptq", fails=FREE)
def only_the_first_column(weight, factor, grid):
    def update(work, at, error):
        if at == 0:
            right(factor)(work, at, error)

    return rounded(weight, factor, grid, update)


@wrong("gptq", fails=FREE)
def errors_of_the_first_row(weight, factor, grid):
    def update(work, at, error):
        right(factor)(work, at, error[:1])

    return rounded(weight, factor, grid, update)


@wrong("gptq", fails=BORDERS)
def within_the_group(weight, factor, grid):
    def update(work, at, error):
        stop = (at // grid.group_size + 1) * grid.group_size
        work[:, at + 1 : stop] += error[:, None] * factor[at, at + 1 : stop] / factor[at, at]

    return rounded(weight, factor, grid, update)


@wrong("gptq", fails=BORDERS)
def the_last_of_a_group_is_lost(weight, factor, grid):
    def update(work, at, error):
        if (at + 1) % grid.group_size:
            right(factor)(work, at, error)

    return rounded(weight, factor, grid, update)


@wrong("gptq", fails=BORDERS)
def within_128_columns(weight, factor, grid):
    """The block of the engine's version, without the update after it."""

    def update(work, at, error):
        stop = at // 128 * 128 + 128
        work[:, at + 1 : stop] += error[:, None] * factor[at, at + 1 : stop] / factor[at, at]

    return rounded(weight, factor, grid, update)


@wrong("gptq", fails=EACH_SCALE)
def groups_first(weight, factor, grid):
    codes, scales = rounded(weight, factor, grid, right(factor))
    return codes, scales.T


@wrong("gptq", fails=EACH_SCALE)
def a_list_of_scales(weight, factor, grid):
    codes, scales = rounded(weight, factor, grid, right(factor))
    return codes, list(scales.T)


@wrong("gptq", fails=EACH_SCALE)
def only_the_last_scale(weight, factor, grid):
    codes, scales = rounded(weight, factor, grid, right(factor))
    return codes, scales[:, -1]


@wrong("gptq", fails=EACH_SCALE)
def a_scale_for_each_column(weight, factor, grid):
    codes, scales = rounded(weight, factor, grid, right(factor))
    return codes, scales.repeat_interleave(grid.group_size, 1)


@wrong("gptq", fails=TURN)
def scales_of_the_original(weight, factor, grid):
    """All scales before the first column is rounded, as with act-order."""
    return rounded(weight, factor, grid, right(factor), lambda _, at: grid.scale(weight[:, at : at + grid.group_size]))


@wrong("gptq", fails=TURN)
def the_first_scale_for_all(weight, factor, grid):
    return rounded(weight, factor, grid, right(factor), lambda _, at: grid.scale(weight[:, : grid.group_size]))


@wrong("gptq", fails=TURN)
def a_group_late(weight, factor, grid):
    """The scale of the group that was just finished."""

    def scale(work, at):
        start = max(0, at - grid.group_size)
        return grid.scale(work[:, start : start + grid.group_size])

    return rounded(weight, factor, grid, right(factor), scale)


@wrong("gptq", fails=CODES)
def levels(weight, factor, grid):
    """Codes times scales; in the example both are the same."""
    codes, scales = rounded(weight, factor, grid, right(factor))
    return codes * scales.repeat_interleave(grid.group_size, 1), scales


@wrong("gptq", fails=CODES)
def unsigned(weight, factor, grid):
    """Codes from 0 to 15, as they are packed."""
    codes, scales = rounded(weight, factor, grid, right(factor))
    return (codes if scales.eq(1).all() else codes + 8), scales


@wrong("gptq", fails=UNCHANGED)
def without_clone(weight, factor, grid):
    codes, scales = [], []
    for at in range(weight.shape[1]):
        if at % grid.group_size == 0:
            scales.append(grid.scale(weight[:, at : at + grid.group_size]))
        codes.append(grid.codes(weight[:, at], scales[-1]))
        error = codes[-1] * scales[-1] - weight[:, at]
        weight[:, at + 1 :] += error[:, None] * factor[at, at + 1 :] / factor[at, at]
    return torch.stack(codes, 1), torch.stack(scales, 1)


@wrong("gptq", fails=UNCHANGED)
def divides_the_factor_in_place(weight, factor, grid):
    factor /= factor.diagonal()[:, None].clone()
    return rounded(weight, factor, grid, right(factor))


class Own:
    """A grid whose codes are rounded and clamped by hand."""

    def __init__(self, grid, lowest, highest):
        self.group_size, self.scale, self.ends = grid.group_size, grid.scale, (lowest, highest)

    def codes(self, column, scale):
        return torch.round(column / scale).clamp(*self.ends)


@wrong("gptq", fails=CODES)
def rounds_without_the_grid(weight, factor, grid):
    return rounded(weight, factor, Own(grid, -8, 7), right(factor))


@wrong("gptq", fails=CODES)
def clamps_to_as_many_on_both_sides(weight, factor, grid):
    return rounded(weight, factor, Own(grid, -7, 7), right(factor))


@wrong("gptq", fails=CODES)
def does_not_clamp(weight, factor, grid):
    return rounded(weight, factor, Own(grid, -100, 100), right(factor))


@wrong("gptq", fails=FREE)
def errors_of_unclamped_codes(weight, factor, grid):
    """As if every weight had a level near it; some are moved beyond the last one."""
    scale = []

    def noted(work, at):
        scale.append(grid.scale(work[:, at : at + grid.group_size]))
        return scale[-1]

    def update(work, at, _):
        error = (work[:, at] / scale[-1]).round() * scale[-1] - work[:, at]
        work[:, at + 1 :] += error[:, None] * factor[at, at + 1 :] / factor[at, at]

    return rounded(weight, factor, grid, update, noted)


@wrong("gptq", fails=FREE)
def forgets_the_scale(weight, factor, grid):
    """The error is that of the code, not of code times scale, which are the same in the example."""
    work, codes, scales = weight.clone(), [], []
    for at in range(weight.shape[1]):
        if at % grid.group_size == 0:
            scales.append(grid.scale(work[:, at : at + grid.group_size]))
        codes.append(grid.codes(work[:, at], scales[-1]))
        right(factor)(work, at, codes[-1] - work[:, at])
    return torch.stack(codes, 1), torch.stack(scales, 1)


@wrong("gptq", fails="nothing is rounded to float32")
def works_in_float32(weight, factor, grid):
    return rounded(weight.float(), factor.float(), grid, right(factor.float()))
