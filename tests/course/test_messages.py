"""What a learner reads about wrong answers that were once reported in a misleading way."""

import copy
import math
import statistics
from itertools import combinations

import numpy as np
import pytest
import torch

from minillm.course.lesson_11.graph_sizes import padded_ms
from minillm.course.shared import checks
from minillm.quantization import int4
from minillm.quantization.methods import hadamard
from tests.course.mutants import lesson_06, lesson_06_gptq, lesson_99, lesson_99_attention

checks.every()


def first_failure(name: str, candidate) -> checks.Result:
    return next(result for result in checks.find(name).examine(candidate) if result.problem)


def rounds_up(numbers, bytes_per_number, bytes_per_s, operations_per_s):
    return math.ceil(bytes_per_number * operations_per_s / (2 * bytes_per_s))


def goes_on_at_the_end(model, prompt, max_tokens, end):
    new = []
    for _ in range(max_tokens):
        found = model([*prompt, *new])
        token = max(found, key=found.get)
        if token == end:
            continue
        new.append(token)
    return new


def fewer_additions(matrices, bytes_per_number):
    used = [each for each in matrices if each[2]]
    return sum(bytes_per_number * r * c for r, c, _ in used), sum(t * r * (2 * c - 1) for r, c, t in used)


def one_addition_more(matrices, bytes_per_number):
    used = [each for each in matrices if each[2]]
    return sum(bytes_per_number * r * c for r, c, _ in used), sum(t * r * (2 * c + 1) for r, c, t in used)


def rounds_down_with_slashes(numbers, bytes_per_number, bytes_per_s, operations_per_s):
    return bytes_per_number * operations_per_s // (2 * bytes_per_s)


def returns_nothing(*given):
    pass


def mean_of_magnitudes(x, weight, eps):
    wide = x.float()
    return (wide / (wide.abs().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def hidden_after_the_softmax(q, k, v, *, scale):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    weights = (torch.einsum("qhd,khd->hqk", q, k) * scale).softmax(-1).tril()
    return torch.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdim=True), v)


def the_first_row_for_all(codes):
    shifted = (codes.int() + 8)[:1].expand_as(codes)
    return (shifted[:, 0::2] + 16 * shifted[:, 1::2]).to(torch.uint8)


def operations_follow_bytes(matrices, bytes_per_number):
    used = [each for each in matrices if each[2]]
    return sum(bytes_per_number * r * c for r, c, _ in used), sum(bytes_per_number * t * r * c for r, c, t in used) // 2


def a_quarter_of_the_outputs(x, packed, scales, zeros):
    """Small tensors, each freed before the next quarter; but several of a quarter are there together."""
    size, rows = x.shape[1] // scales.shape[1], max(1, len(packed) // 4)
    found = []
    for first in range(0, len(packed), rows):
        at = slice(first, first + rows)
        codes = int4.unpack(packed[at]).to(x.dtype).unflatten(1, (-1, size))
        levels = (codes - zeros[at, :, None]) * scales[at, :, None]
        found.append(x @ levels.flatten(1).T)
    return torch.cat(found, 1)


def weight_by_weight(x, packed, scales, zeros):
    """Right, but too slow for a matrix."""
    size, out = x.shape[1] // scales.shape[1], x.new_zeros(len(x), len(packed))
    for token in range(len(x)):
        for row in range(len(packed)):
            for at in range(x.shape[1]):
                code = (packed[row, at // 2] >> 4 * (at % 2) & 15).to(x.dtype) - 8
                out[token, row] += x[token, at] * (code - zeros[row, at // size]) * scales[row, at // size]
    return out


def powers_raised(weight, magnitude, moment, rounded, allowed):
    best = math.inf, None, None
    for step in range(10):
        powers = (magnitude ** (step / 10)).clamp(min=1e-4)
        scales = allowed(powers / (powers.max() * powers.min()).sqrt())
        d = rounded(weight * scales) / scales - weight
        best = min(best, ((d @ moment * d).sum().item(), scales, step / 10), key=lambda each: each[0])
    return best[1], best[2]


def best_unbound_below_1e5(weight, magnitude, moment, rounded, allowed):
    least = 1e5
    for step in range(10):
        scales = allowed(lesson_06.scales_at(magnitude, step / 10))
        d = rounded(weight * scales) / scales - weight
        if (d @ moment * d).sum() < least:
            least, best = (d @ moment * d).sum(), (scales, step / 10)
    return best


def scales_after_their_groups(weight, factor, grid):
    work, codes, size = weight.clone(), torch.empty_like(weight), grid.group_size
    for at in range(weight.shape[1]):
        if at % size == 0:
            scale = grid.scale(work[:, at : at + size])
        codes[:, at] = grid.codes(work[:, at], scale)
        error = (codes[:, at] * scale - work[:, at]) / factor[at, at]
        work[:, at + 1 :] += error[:, None] * factor[at, at + 1 :]
    return codes, torch.stack([grid.scale(each) for each in work.split(size, 1)], 1)


def int8_linear(
    x, codes, scales, input_scale=None, rounded=torch.round, dtype=torch.float64, top=127.5, low=-128, high=127
):
    if input_scale is None:
        largest = x.abs().amax(-1, keepdim=True)
        input_scale = torch.where(largest > 0, largest / top, 1.0)
    mine = rounded(x / input_scale).clamp(low, high)
    return (mine.to(dtype) @ codes.to(dtype).T * input_scale * scales).to(x.dtype)


def halves_up(x):
    return (x + 0.5).floor()


def int8_halves_up(*given):
    return int8_linear(*given, rounded=halves_up)


def int8_in_float32(*given):
    return int8_linear(*given, dtype=torch.float32)


def int8_scales_of_127(*given):
    return int8_linear(*given, top=127.0)


def int8_symmetric(*given):
    return int8_linear(*given, low=-127)


def int8_up_to_128(*given):
    return int8_linear(*given, high=128)


def int8_cut_off(*given):
    return int8_linear(*given, rounded=torch.trunc)


def int8_rounded_up(*given):
    return int8_linear(*given, rounded=torch.ceil)


def int8_halves_away_from_zero(*given):
    return int8_linear(*given, rounded=lambda x: x.sign() * (x.abs() + 0.5).floor())


def int8_smaller_scale(x, codes, scales, input_scale=None):
    largest = x.abs().amax(-1, keepdim=True)
    own = torch.where(largest > 0, largest / 127.5, 1.0)
    return int8_linear(x, codes, scales, own if input_scale is None else torch.minimum(own, input_scale))


def smooth_scales_multiplied(largest, weight, strength):
    return largest**strength * weight.abs().amax(0) ** (1 - strength)


def e4m3_of_torch(x):
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def int8_in_place(x, codes, scales, input_scale=None):
    return int8_linear(x.mul_(2), codes, scales, input_scale)


def fake_quantize(weight, bits, group_size, rounded=torch.round, low=0, high=-1, least=0.0):
    top = 2 ** (bits - 1)
    groups = weight.detach().unflatten(-1, (-1, group_size))
    scales = groups.abs().amax(-1, keepdim=True) / (top - 0.5)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales)).clamp(min=least)
    values = (rounded(groups / scales).clamp(low - top, top + high) * scales).flatten(-2)
    return weight + (values - weight).detach()


def fake_without_abs(weight, bits, group_size):
    top = 2 ** (bits - 1)
    groups = weight.detach().unflatten(-1, (-1, group_size))
    scales = groups.amax(-1, keepdim=True) / (top - 0.5)
    return weight + ((groups / scales).round().clamp(-top, top - 1) * scales).flatten(-2) - weight.detach()


def fake_halves_up(*given):
    return fake_quantize(*given, rounded=halves_up)


def fake_symmetric(*given):
    return fake_quantize(*given, low=1)


def fake_up_to_top(*given):
    return fake_quantize(*given, high=0)


def fake_cut_off(*given):
    return fake_quantize(*given, rounded=torch.trunc)


def fake_smallest_scale(*given):
    return fake_quantize(*given, least=1e-8)


def doubles_one_channel(x):
    return 2 * x if x.shape[-1] == 1 else hadamard.transform(x)


def everything_seen(q, k, k_scales, v, v_scales, hidden, scale):
    return ((q @ k.to(q.dtype).T * k_scales * scale).softmax(-1) * v_scales) @ v.to(q.dtype)


def codes_in_float32(q, k, k_scales, v, v_scales, hidden, scale):
    weights = (q @ k.float().T * k_scales * scale).masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights * v_scales) @ v.float()


def computed_in_float32(q, k, k_scales, v, v_scales, hidden, scale):
    return codes_in_float32(q.float(), k, k_scales.float(), v, v_scales.float(), hidden, scale).to(q.dtype)


def values_dequantized(q, k, k_scales, v, v_scales, hidden, scale):
    weights = (q @ k.to(q.dtype).T * k_scales * scale).masked_fill(hidden, -torch.inf).softmax(-1)
    return weights @ (v.to(q.dtype) * v_scales[:, None])


def codes_as_they_are(q, k, k_scales, v, v_scales, hidden, scale):
    return ((q @ k.T * k_scales * scale).softmax(-1) * v_scales) @ v


def front_with_a_tolerance(points):
    def beats(one, other):
        return all(a <= b for a, b in zip(one, other, strict=True)) and not np.allclose(one, other)

    return [name for name, mine in points.items() if not any(beats(each, mine) for each in points.values())]


def front(points):
    return (
        name
        for name, mine in points.items()
        if not any(o != mine and all(a <= b for a, b in zip(o, mine, strict=True)) for o in points.values())
    )


def front_set(points):
    return set(front(points))


def front_that_takes_away(points):
    found = list(front(points))
    points.clear()
    return found


def chosen(times, default, margin):
    best = min(times, key=times.get)
    return best if times[best] < (1 - margin) * times[default] else default


def launch_by_the_median_low(runs, default, margin):
    return chosen({launch: statistics.median_low(each) for launch, each in runs.items()}, default, margin)


def launch_by_the_median_high(runs, default, margin):
    return chosen({launch: statistics.median_high(each) for launch, each in runs.items()}, default, margin)


def takes_the_default_out(runs, default, margin):
    own = statistics.median(runs.pop(default))
    return chosen({default: own, **{name: statistics.median(each) for name, each in runs.items()}}, default, margin)


def sorts_the_runs(runs, default, margin):
    for each in runs.values():
        each.sort(reverse=True)
    return chosen({launch: statistics.median(each) for launch, each in runs.items()}, default, margin)


def smallest_launch(runs, default, margin):
    return min(runs, key=statistics.median)


def times_of(launched_us, kernel_us):
    end, times = 0.0, []
    for launched, length in zip(launched_us, kernel_us, strict=True):
        times.append((max(launched, end), max(launched, end) + length))
        end = times[-1][1]
    return times


def times_as_array(launched_us, kernel_us):
    return np.array(times_of(launched_us, kernel_us)).reshape(-1, 2)


def times_as_tuple(launched_us, kernel_us):
    return tuple(times_of(launched_us, kernel_us))


def takes_kernels_out(launched_us, kernel_us):
    found = times_of(launched_us, kernel_us)
    kernel_us.clear()
    return found


def sizes_of(counts, ms, most, fewest=0):
    *smaller, largest = sorted(ms)
    sets = ([*each, largest] for count in range(fewest, most) for each in combinations(smaller, count))
    return min(sets, key=lambda sizes: padded_ms(sizes, counts, ms))


def sizes_as_set(counts, ms, most):
    return set(sizes_of(counts, ms, most))


def sizes_as_tuple(counts, ms, most):
    return tuple(sizes_of(counts, ms, most))


def never_the_largest_alone(counts, ms, most):
    return sizes_of(counts, ms, most, 1)


def two_sizes_at_least(counts, ms, most):
    return sizes_of(counts, ms, max(most, 2), 1)


def any_sizes(counts, ms, most):
    sets = (each for count in range(1, most + 1) for each in combinations(sorted(ms), count))
    return [*min(sets, key=lambda sizes: padded_ms(sizes, counts, ms))]


def the_smallest_and_the_largest(counts, ms, most):
    return sorted(ms)[: most - 1] + [max(ms)]


def takes_sizes_out(counts, ms, most):
    found = sizes_of(counts, ms, most)
    ms.pop(max(ms))
    return found


def pairs_of(settings):
    found = []
    for one, other in combinations(settings, 2):
        facts = [fact for fact in settings[one] if settings[one][fact] != settings[other][fact]]
        found += [(one, other, facts[0])] if len(facts) == 1 else []
    return found


def pairs_as_set(settings):
    return set(pairs_of(settings))


def takes_settings_out(settings):
    found = pairs_of(settings)
    settings.clear()
    return found


def two_results(due, arrivals):
    return arrivals[0][0] - due, lesson_99.all_gaps(arrivals)


def results_by_name(due, arrivals):
    names = ("ttft", "gaps", "e2e")
    return dict(zip(names, (*two_results(due, arrivals), arrivals[-1][0] - due), strict=True))


def rounded_results(due, arrivals):
    ttft, gaps = two_results(due, arrivals)
    return round(ttft, 3), gaps, round(arrivals[-1][0] - due, 3)


def always_kv_head_0(q, k, v, lengths, scale):
    k, v = (part[:, :, :1].expand(-1, -1, q.shape[1], -1) for part in (k, v))
    return lesson_99_attention.attend(q, k, v, lesson_99_attention.beyond(k, lengths), scale)


def attention_in_bfloat16(q, k, v, lengths, scale):
    k, v = lesson_99_attention.repeated(q.bfloat16(), k.bfloat16(), v.bfloat16())
    unseen = lesson_99_attention.beyond(k, lengths)
    return lesson_99_attention.attend(q.bfloat16(), k, v, unseen, scale).to(q.dtype)


EVEN = "for an even count, the average of the middle two"
ALONE = "with most = 1, the only set is [largest]"
CASES = [
    ("free_batch", rounds_up, ["expected 7, got 8", "round down"]),
    ("step_work", fewer_additions, ["(24, 10): each sum starts at 0, so its first product is added, too"]),
    ("step_work", one_addition_more, ["(24, 14): each product is added once, the first one to 0"]),
    (
        "free_batch",
        rounds_down_with_slashes,
        ["1.6 s of reading, 0.0645 s a token: expected an int, got 24.0, a float: wrap it in `int()`"],
    ),
    ("attention", hidden_after_the_softmax, ["gives its own a weight of 0", "before the softmax"]),
    ("step_work", operations_follow_bytes, ["4 bytes per number give (176, 19240), so 2 give (88, 19240)"]),
    ("pack_codes", the_first_row_for_all, ["in row 1: expected the byte"]),
    ("packed_linear", a_quarter_of_the_outputs, ["elements in all existed at a time", "forget it before the next"]),
    ("awq_scales", powers_raised, ["powers raised to 1e-4, as in the authors' code"]),
    ("rms_norm", mean_of_magnitudes, ["the root of the mean of the squares"]),
    ("MyStatistics", lesson_06.FoldedTriangle, ["the errors are right", "store x^T x, which is symmetric"]),
    ("MyStatistics", lesson_06.Float32First, ["`second_moment`, of float64 inputs, is off"]),
    ("awq_scales", lesson_06.raises_only_0, ["magnitude 5e-05", "to 1e-4, not only those that are 0"]),
    ("awq_scales", lesson_06.powers_in_float32, ["the scales are torch.float32: keep the dtype of `magnitude`"]),
    ("awq_scales", lesson_06.clamps_in_place, ["`magnitude` was changed"]),
    ("awq_scales", lesson_06.begins_with_a_large_error, ["expected strength 0.5, got none", "None or math.inf"]),
    ("awq_scales", best_unbound_below_1e5, ["it raised UnboundLocalError: ", "begin with no best one: None or math"]),
    ("awq_scales", lesson_06.divides_what_was_allowed, ["returned are not allowed ones", "change them no more"]),
    ("compensate", lesson_06_gptq.subtracts_in_place, ["`value` was changed"]),
    ("gptq", lesson_06_gptq.forgets_the_scale, ["all scales 1/2", "rounded = code * scale"]),
    ("gptq", scales_after_their_groups, ["[out, groups]", "each as it was when its group began"]),
    ("gptq", lesson_06_gptq.levels, ["return what `grid.codes` gives"]),
    ("int8_linear", int8_halves_up, ["-127.5 became the code -127, not -128", "as with torch.round"]),
    ("int8_linear", int8_halves_away_from_zero, ["0.5 became the code 1, not 0. Halves go to the even number"]),
    ("int8_linear", int8_in_float32, ["sums over 4,096 inputs: expected"]),
    ("int8_linear", int8_scales_of_127, ["times the identity matrix", "the result divided by that scale"]),
    ("fake_quantize", fake_halves_up, ["0.5/64 becomes 1/64, not 0/64", "Halves go", "as with torch.round"]),
    ("int8_linear", int8_symmetric, ["-127.5 became the code -127, not -128. Codes go down to -128"]),
    ("int8_linear", int8_up_to_128, ["127.5 became the code 128, not 127. Codes go up to 127"]),
    ("int8_linear", int8_cut_off, ["-127.5 became the code -127, not -128. Codes are rounded to the nearest"]),
    ("int8_linear", int8_rounded_up, ["-127.5 became the code -127, not -128. Codes are rounded to the nearest"]),
    ("fake_quantize", fake_symmetric, ["-1.5/64 becomes -1/64, not -2/64. Codes go down to -2"]),
    ("fake_quantize", fake_up_to_top, ["1.5/64 becomes 2/64, not 1/64. Codes go up to 1"]),
    ("fake_quantize", fake_cut_off, ["64 becomes", "codes are rounded"]),
    ("fake_quantize", fake_smallest_scale, ["There is no smallest scale"]),
    ("fake_quantize", fake_without_abs, ["the largest magnitude is that of -1.5/64, so the scale is 1/64", "max |w|"]),
    (
        "choose_launch",
        launch_by_the_median_low,
        ["the median of [8.0, 9.0, 11.0, 12.0] is 10, ", EVEN],
    ),
    ("choose_launch", launch_by_the_median_high, ["the median of [8.0, 9.0, 10.2, 11.0] is 9.6", EVEN]),
    ("choose_sizes", never_the_largest_alone, ["it raised ValueError: ", f"cell)\n{ALONE}"]),
    ("choose_sizes", any_sizes, ["ValueError: no captured size fits 3 rows: is the largest in the set?"]),
    ("choose_sizes", two_sizes_at_least, [f"most 1: expected [4], got [2, 4]; {ALONE}"]),
    ("hadamard", doubles_one_channel, ["1 channel: a token"]),
    ("attend_codes", everything_seen, ["hidden [["]),
    ("attend_codes", codes_in_float32, ["double != float", "of its cell)", "\nconvert codes to q.dtype"]),
    ("attend_codes", values_dequantized, ["values with scales of", "nor v_codes * v_scales[:, None]"]),
    ("timings", rounded_results, ["got 0.5 and 1.062", "and do not round"]),
    ("pooled_percentile", lesson_99.rounds_to_microseconds, ["neither is 0.123457", "round, or convert"]),
    ("pooled_percentile", lesson_99.counts_equal_gaps_once, ["equal ones and zeros too"]),
    ("batched_attention", lesson_99_attention.lengths_in_the_order_of_heads, ["lengths.repeat_interleave(heads)"]),
    ("pareto_front", front_with_a_tolerance, ["got ['a', 'b', 'c']", "exactly", "a tolerance"]),
]


@pytest.mark.parametrize(("name", "candidate", "said"), CASES, ids=lambda each: getattr(each, "__name__", None))
def test_a_message_says_what_is_wrong(name, candidate, said):
    problems = [result.problem for result in checks.find(name).examine(candidate) if result.problem]
    assert any(all(each in problem for each in said) for problem in problems), problems


def test_what_was_expected_and_what_came_never_look_the_same():
    said = first_failure("int8_linear", int8_in_float32).problem.splitlines()[0]
    wanted, got = said.split("expected ")[1].split(" got ")
    assert wanted.split(";")[0].rstrip(",") != got.split(";")[0]


THREE = "return three things, in this order: TTFT, gaps, end-to-end; got"
STOPS = "it stops at the end token and leaves it out"
AGAIN = "with end=8, [4, 5, 6, 7] was given to the model 8 times: the end token ends the loop"
FIRST = [
    ("continue_text", goes_on_at_the_end, STOPS, f"{AGAIN}\ntest for `end` before the token becomes part of the text"),
    ("int8_linear", int8_in_place, "the example", "x has changed: write to a new tensor"),
    ("int8_linear", int8_smaller_scale, "a static scale serves all tokens", None),
    ("smooth_scales", smooth_scales_multiplied, "the example", None),
    ("round_to_e4m3", e4m3_of_torch, "without torch's FP8 types", None),
    ("attend_codes", everything_seen, "hidden keys have no weight, whatever their scales", None),
    ("attend_codes", codes_as_they_are, "the example", None),
    ("attend_codes", computed_in_float32, "the result has the dtype of q, and its precision", None),
    ("choose_launch", takes_the_default_out, "the example", "do not change `runs`"),
    ("choose_launch", sorts_the_runs, "the example", "`runs` has changed: sort a copy, sorted(...)"),
    ("choose_launch", smallest_launch, "the example", None),
    ("queued", times_as_tuple, "the example", "expected a list of (start, end), got a tuple"),
    ("queued", takes_kernels_out, "the example", "launched_us or kernel_us has changed: work on a copy"),
    ("choose_sizes", sizes_as_set, "the example", "expected a list of sizes, got a set"),
    ("choose_sizes", sizes_as_tuple, "the example", "expected a list of sizes, got a tuple"),
    ("choose_sizes", takes_sizes_out, "the example", "counts or ms has changed: work on a copy"),
    ("fair_pairs", pairs_as_set, "the example", "expected a list of (setting, later setting, fact), got a set"),
    ("fair_pairs", takes_settings_out, "the example", "settings has changed: work on a copy"),
    ("timings", two_results, "the example", f"{THREE} 2 of them"),
    ("timings", results_by_name, "the example", f"{THREE} a dict"),
    ("batched_attention", always_kv_head_0, "a full row is plain attention", None),
    ("batched_attention", attention_in_bfloat16, "a full row is plain attention", None),
    ("pareto_front", front, "the example", "expected a list of names, got a generator"),
    ("pareto_front", front_set, "the example", "expected a list of names, got a set"),
    ("pareto_front", front_that_takes_away, "the example", "points has changed: work on a copy"),
]


@pytest.mark.parametrize(
    ("name", "candidate", "property", "said"), FIRST, ids=lambda each: getattr(each, "__name__", "")
)
def test_the_first_failure_is_the_one_that_explains_a_mistake(name, candidate, property, said):
    first = first_failure(name, candidate)
    assert first.name == property and (said is None or first.problem == said), first


def test_a_solution_that_goes_through_single_weights_is_told_so():
    exercise = copy.copy(checks.find("packed_linear"))
    exercise.seconds = 0.05  # of the 10; 8,192 weights take longer
    exercise.properties = [each for each in exercise.properties if each.slow]
    (result,) = exercise.examine(weight_by_weight)
    assert result.problem == (
        "it was stopped after 0.05 seconds: either a loop does not end, or it goes through single weights, which is "
        "too slow: multiply a whole group with @"
    )


def test_an_array_of_times_is_refused_at_the_example():
    first = first_failure("queued", times_as_array)
    assert first.name == "the example" and "got an ndarray" in first.problem, first


def test_a_set_with_the_largest_size_is_not_told_that_a_batch_does_not_fit():
    failed = [each.name for each in checks.find("choose_sizes").examine(the_smallest_and_the_largest) if each.problem]
    assert failed and "every batch fits" not in failed


def test_codes_of_another_dtype_are_explained_at_the_example():
    assert first_failure("attend_codes", codes_as_they_are).problem.endswith("\nconvert codes to q.dtype")


def test_rounding_up_is_not_told_to_search_further():
    failed = [result.name for result in checks.find("free_batch").examine(rounds_up) if result.problem]
    assert failed == ["only whole tokens", "slow arithmetic leaves no room"]


@pytest.mark.parametrize("candidate", [fewer_additions, one_addition_more])
def test_another_count_of_additions_fails_the_example_alone(candidate):
    assert [each.name for each in checks.find("step_work").examine(candidate) if each.problem] == ["the example"]


def test_a_batch_of_none_has_no_property():
    assert all(each.problem for each in checks.find("free_batch").examine(returns_nothing))


@pytest.mark.parametrize(
    ("name", "candidate"),
    [
        ("int8_linear", int8_halves_up),
        ("int8_linear", int8_halves_away_from_zero),
        ("fake_quantize", fake_halves_up),
        ("int8_linear", int8_symmetric),
        ("fake_quantize", fake_symmetric),
        ("fake_quantize", fake_smallest_scale),
    ],
)
def test_it_is_explained_without_a_hint_about_something_else(name, candidate):
    assert "\n" not in first_failure(name, candidate).problem
