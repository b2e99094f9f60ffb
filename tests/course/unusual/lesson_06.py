"""Right but unusual solutions of lesson 06."""

import torch

from tests.course.unusual import right


@right("MyStatistics")
class SumsOfOuterProducts:
    def __init__(self, inputs):
        self.rows, self.magnitude = 0, torch.zeros(inputs, dtype=torch.float64)
        self.second_moment = torch.zeros(inputs, inputs, dtype=torch.float64)

    def add(self, x):
        for row in x.to(torch.float64):
            self.rows = self.rows + 1
            self.second_moment = self.second_moment + torch.outer(row, row)
            self.magnitude = self.magnitude + abs(row)

    def mean_magnitude(self):
        return self.magnitude.div(self.rows)

    def error(self, difference):
        return torch.einsum("oi,ij,oj->o", difference.double(), self.second_moment, difference.double())


@right("awq_scales")
def all_strengths_first(weight, magnitude, moment, rounded, allowed):
    logs = torch.maximum(magnitude, magnitude.new_tensor(1e-4)).log()
    tried = [allowed((step / 10 * (logs - (logs.max() + logs.min()) / 2)).exp()) for step in range(10)]
    errors = []
    for scales in tried:
        d = rounded(weight * scales[None]) / scales[None] - weight
        errors.append(torch.einsum("oi,ij,oj->", d, moment, d))
    best = torch.stack(errors).argmin()
    return tried[best], best / 10


@right("awq_scales")
def a_list_of_a_search_with_float32_strengths(weight, magnitude, moment, rounded, allowed):
    tried = []
    for strength in torch.linspace(0, 0.9, 10):
        powers = magnitude.clip(1e-4).pow(strength)
        scales = allowed(powers / (powers.max() * powers.min()) ** 0.5)
        d = rounded(weight * scales) / scales - weight
        tried.append([torch.trace(d @ moment @ d.T).item(), [scales, strength]])
    return min(tried, key=lambda each: each[0])[1]


@right("awq_scales")
def of_the_first_of_equal_errors_in_a_dict(weight, magnitude, moment, rounded, allowed):
    tried = {}
    for strength in reversed([step / 10 for step in range(10)]):
        powers = magnitude.clamp_min(1e-4).pow(strength)
        scales = allowed(powers.mul(powers.max().mul(powers.min()).rsqrt()))
        lost = weight - rounded(weight * scales).div(scales)
        tried[lost.matmul(moment).mul(lost).sum().item()] = scales, strength
    return tried[min(tried)]


@right("compensate")
def by_the_rest_of_the_moment(weights, at, value, moment):
    """Set the gradient of the free weights to 0, without the inverse of H."""
    free = [each for each in range(len(moment)) if each != at]
    change, out = value - weights[:, at], weights.clone()
    out[:, at] = value
    if free:
        out[:, free] -= torch.linalg.solve(moment[free][:, free], moment[free, at, None] * change).T
    return out


@right("gptq")
def a_list_of_float_codes(weight, factor, grid):
    work, codes, scales = weight + 0, torch.zeros_like(weight), []
    for at, (row, own) in enumerate(zip(factor, factor.diagonal(), strict=True)):
        if at % grid.group_size == 0:
            scales.append(grid.scale(work[:, at:][:, : grid.group_size]))
        codes[:, at] = grid.codes(work[:, at], scales[-1])
        lost = (work[:, at] - codes[:, at] * scales[-1]) / own
        work = work - lost.outer(row * (torch.arange(len(row)) > at))
    return [codes, torch.stack(scales, 1)]


@right("gptq")
def errors_of_a_group_at_once(weight, factor, grid):
    """The columns after a group move once, by the sum over the group, as in the paper's blocks."""
    work, codes, scales = weight.clone(), torch.empty_like(weight), []
    for start in range(0, weight.shape[1], grid.group_size):
        end, errors = start + grid.group_size, []
        scales.append(grid.scale(work[:, start:end]))
        for at in range(start, end):
            codes[:, at] = grid.codes(work[:, at], scales[-1])
            errors.append((codes[:, at] * scales[-1] - work[:, at]) / factor[at, at])
            work[:, at + 1 : end] += errors[-1].outer(factor[at, at + 1 : end])
        work[:, end:] += torch.stack(errors, 1) @ factor[start:end, end:]
    return codes.to(torch.int8), torch.stack(scales, -1)
