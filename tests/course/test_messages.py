"""What a learner reads about wrong answers that were once reported in a misleading way."""

import math

import pytest
import torch

from minillm.course.shared import checks

checks.every()


def first_failure(name: str, candidate) -> checks.Result:
    return next(result for result in checks.find(name).examine(candidate) if result.problem)


def rounds_up(numbers, bytes_per_number, bytes_per_s, operations_per_s):
    return math.ceil(bytes_per_number * operations_per_s / (2 * bytes_per_s))


def hidden_after_the_softmax(q, k, v, *, scale):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    weights = (torch.einsum("qhd,khd->hqk", q, k) * scale).softmax(-1).tril()
    return torch.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdim=True), v)


def the_first_row_for_all(codes):
    shifted = (codes.int() + 8)[:1].expand_as(codes)
    return (shifted[:, 0::2] + 16 * shifted[:, 1::2]).to(torch.uint8)


def powers_raised(weight, magnitude, moment, rounded, allowed):
    best = math.inf, None, None
    for step in range(10):
        powers = (magnitude ** (step / 10)).clamp(min=1e-4)
        scales = allowed(powers / (powers.max() * powers.min()).sqrt())
        d = rounded(weight * scales) / scales - weight
        best = min(best, ((d @ moment * d).sum().item(), scales, step / 10), key=lambda each: each[0])
    return best[1], best[2]


def int8_linear(x, codes, scales, input_scale=None, rounded=torch.round, dtype=torch.float64, top=127.5):
    if input_scale is None:
        largest = x.abs().amax(-1, keepdim=True)
        input_scale = torch.where(largest > 0, largest / top, 1.0)
    mine = rounded(x / input_scale).clamp(-128, 127)
    return (mine.to(dtype) @ codes.to(dtype).T * input_scale * scales).to(x.dtype)


def halves_up(x):
    return (x + 0.5).floor()


def int8_halves_up(*given):
    return int8_linear(*given, rounded=halves_up)


def int8_in_float32(*given):
    return int8_linear(*given, dtype=torch.float32)


def int8_scales_of_127(*given):
    return int8_linear(*given, top=127.0)


def fake_halves_up(weight, bits, group_size):
    top = 2 ** (bits - 1)
    groups = weight.detach().unflatten(-1, (-1, group_size))
    scales = groups.abs().amax(-1, keepdim=True) / (top - 0.5)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    rounded = (halves_up(groups / scales).clamp(-top, top - 1) * scales).flatten(-2)
    return weight + (rounded - weight).detach()


CASES = [
    ("free_batch", rounds_up, ["expected 7, got 8", "round down"]),
    ("attention", hidden_after_the_softmax, ["gives its own a weight of 0", "before the softmax"]),
    ("pack_codes", the_first_row_for_all, ["in row 1: expected the byte"]),
    ("awq_scales", powers_raised, ["powers raised to 1e-4, as in the authors' code"]),
    ("int8_linear", int8_halves_up, ["-127.5 became the code -127, not -128", "as with torch.round"]),
    ("int8_linear", int8_in_float32, ["sums over 4,096 inputs: expected"]),
    ("int8_linear", int8_scales_of_127, ["times the identity matrix", "the result divided by that scale"]),
    ("fake_quantize", fake_halves_up, ["-1.5/64 becomes -1/64, not -2/64", "as with torch.round"]),
]


@pytest.mark.parametrize(("name", "candidate", "said"), CASES, ids=lambda each: getattr(each, "__name__", None))
def test_a_message_says_what_is_wrong(name, candidate, said):
    problems = [result.problem for result in checks.find(name).examine(candidate) if result.problem]
    assert any(all(each in problem for each in said) for problem in problems), problems


def test_what_was_expected_and_what_came_never_look_the_same():
    said = first_failure("int8_linear", int8_in_float32).problem.splitlines()[0]
    wanted, got = said.split("expected ")[1].split(" got ")
    assert wanted.split(";")[0].rstrip(",") != got.split(";")[0]


def test_rounding_up_is_not_told_to_search_further():
    failed = [result.name for result in checks.find("free_batch").examine(rounds_up) if result.problem]
    assert failed == ["only whole tokens", "slow arithmetic leaves no room"]


@pytest.mark.parametrize(("name", "candidate"), [("int8_linear", int8_halves_up), ("fake_quantize", fake_halves_up)])
def test_a_tie_is_explained_without_a_hint_about_something_else(name, candidate):
    assert "\n" not in first_failure(name, candidate).problem
