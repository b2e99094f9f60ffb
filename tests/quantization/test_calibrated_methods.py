"""AWQ, GPTQ and SmoothQuant against their papers' equations, written out in float64."""

import pytest
import torch

from minillm.errors import MinillmError
from minillm.quantization import Activations, Int4
from minillm.quantization import int8 as int8_format
from minillm.quantization.int4 import round_to_int4, scales_of
from minillm.quantization.methods import awq, gptq, smoothquant
from minillm.quantization.methods.statistics import InputStatistics, output_error
from minillm.quantization.weight import Codes


def case(out=12, inputs=32, rows=200, seed=0):
    """A weight, correlated inputs with a few large channels, and their statistics."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, inputs, generator=generator, dtype=torch.float64)
    mixing = torch.randn(inputs, inputs, generator=generator, dtype=torch.float64)
    x = torch.randn(rows, inputs, generator=generator, dtype=torch.float64) @ mixing
    x[:, ::9] *= 8
    found = InputStatistics(inputs, torch.device("cpu"), torch.float64)
    for part in x.split(64):
        found.add(part)
    return weight, x, found


def error_of(weight, codes, x):
    return ((codes.dequantize() - weight) @ x.t()).square().sum().item()


def test_statistics_are_sums_over_all_rows():
    _, x, found = case()
    torch.testing.assert_close(found.second_moment, x.t() @ x)
    torch.testing.assert_close(found.mean_magnitude, x.abs().mean(0))
    assert found.largest.equal(x.abs().amax(0)) and found.rows == 200
    scales = torch.rand(32, dtype=torch.float64) + 0.5
    again = InputStatistics(32, torch.device("cpu"), torch.float64)
    for part in x.split(64):
        again.add(part / scales)
    for name in ("second_moment", "mean_magnitude", "largest"):
        torch.testing.assert_close(getattr(found.scaled(scales), name), getattr(again, name))
    torch.testing.assert_close(torch.cat(found.scaled(scales).samples), torch.cat(again.samples))


def test_the_second_moment_gives_the_exact_error_of_the_outputs():
    weight, x, found = case()
    codes = awq.rounded_to_nearest(weight, Int4(group_size=8))
    error = output_error(codes.dequantize() - weight, found.second_moment)
    assert error.item() == pytest.approx(error_of(weight, codes, x), rel=1e-9)


def gptq_by_definition(weight, moment, size, symmetric, order, static, damping=0.01):
    """Frantar et al. 2022, equations 2 and 3: after each column, its row and column leave the inverse.

    Returns the codes, and each weight in steps of its group when it was rounded.
    """
    weight, rows = weight.clone(), len(weight)
    moment = moment + damping * moment.diagonal().mean() * torch.eye(len(moment), dtype=moment.dtype)
    inverse, format = moment.inverse(), Int4(group_size=size, symmetric=symmetric)
    scales, zeros = scales_of(weight.view(rows, -1, size), format)
    codes, steps = torch.zeros_like(weight, dtype=torch.int8), torch.zeros_like(weight)
    for at in order:
        group = at // size
        if not static and at % size == 0:
            new, offset = scales_of(weight[:, None, at : at + size], format)
            scales[:, group] = new[:, 0]
            if zeros is not None:
                zeros[:, group] = offset[:, 0]
        zero = None if zeros is None else zeros[:, group, None]
        steps[:, at] = weight[:, at] / scales[:, group]
        codes[:, at] = round_to_int4(weight[:, at, None, None], scales[:, group, None], zero).flatten()
        level = (codes[:, at] - (0 if zeros is None else zeros[:, group])) * scales[:, group]
        error = (weight[:, at] - level) / inverse[at, at]
        weight -= error[:, None] * inverse[at]
        inverse = inverse - inverse[:, at, None] * inverse[at] / inverse[at, at]
        inverse[at, at] = 1.0  # it has left; never read again
    return Codes(codes, scales, zeros), steps


@pytest.mark.parametrize("inputs", [32, 160, 288])  # less than a block, more, and one that ends within one
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_equals_the_papers_equations(symmetric, act_order, inputs):
    weight, _, found = case(inputs=inputs, rows=2 * inputs)
    format = Int4(group_size=16, symmetric=symmetric)
    order = found.second_moment.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(inputs)
    wanted, steps = gptq_by_definition(weight, found.second_moment, 16, symmetric, order.tolist(), act_order)
    codes = gptq.quantize(weight, gptq.Compensation.of(found, act_order=act_order), format)
    same = codes.codes.eq(wanted.codes).all(1)
    assert same.sum() >= len(same) // 2
    torch.testing.assert_close(codes.scales[same], wanted.scales[same])
    for row in (~same).nonzero().flatten().tolist():
        # A weight half a step between two levels (a symmetric group's largest is one) may go either way.
        first = next(at for at in order.tolist() if codes.codes[row, at] != wanted.codes[row, at])
        assert abs(steps[row, first] % 1 - 0.5) < 1e-9


@pytest.mark.parametrize("size", [8, 16, 32])
def test_gptq_and_awq_have_smaller_errors_than_rounding_to_the_nearest(size):
    format = Int4(group_size=size)
    for seed in range(5):
        weight, x, found = case(seed=seed)
        nearest = error_of(weight, awq.rounded_to_nearest(weight, format), x)
        assert error_of(weight, gptq.quantize(weight, gptq.Compensation.of(found), format), x) < 0.8 * nearest
        scales, strength = awq.search_scales(weight, found, format)
        scaled = awq.rounded_to_nearest(weight * scales, format)
        assert ((scaled.dequantize() / scales - weight) @ x.t()).square().sum() <= nearest and strength > 0


def test_inputs_that_are_always_zero_do_not_disturb_gptq():
    weight, x, _ = case()
    x[:, 5] = 0
    found = InputStatistics(32, torch.device("cpu"), torch.float64)
    found.add(x)
    codes = gptq.quantize(weight, gptq.Compensation.of(found), Int4(group_size=8))
    assert codes.dequantize().isfinite().all() and codes.codes[:, 5].eq(0).all()


def test_awqs_search_takes_the_best_of_the_strengths():
    weight, x, found = case()
    format, errors = Int4(group_size=16), {}
    for strength in awq.STRENGTHS:
        scales = found.mean_magnitude**strength
        scales /= (scales.max() * scales.min()).sqrt()
        rounded = awq.rounded_to_nearest(weight * scales, format).dequantize() / scales
        errors[strength] = ((rounded - weight) @ x.t()).square().sum().item()
    scales, strength = awq.search_scales(weight, found, format)
    assert strength == min(errors, key=errors.get) and errors[strength] < errors[0.0]
    wanted = found.mean_magnitude**strength
    torch.testing.assert_close(scales / scales[0], wanted / wanted[0])


def test_awq_gives_channels_without_inputs_scale_1_and_keeps_the_others_together():
    magnitude = torch.tensor([0.0, 1e-12, 1.0, 4.0])
    scales = awq.scales_for(magnitude, 1.0)
    assert scales[0] == 1 and scales[3] / scales[1] == pytest.approx(4 / awq.SMALLEST)
    without = torch.tensor([0.0, 1.0, 4.0])
    torch.testing.assert_close(awq.scales_for(without, 0.5), torch.tensor([1.0, 0.5**0.5, 2**0.5]))
    assert awq.scales_for(torch.zeros(3), 0.5).tolist() == [1, 1, 1]


def test_awq_searches_evenly_spread_rows_of_a_large_matrix(monkeypatch):
    weight, _, found = case(out=100)
    monkeypatch.setattr(awq, "LARGE", 1000)
    monkeypatch.setattr(awq, "SEARCHED", 30)
    scales, strength = awq.search_scales(weight, found, Int4(group_size=16))
    monkeypatch.setattr(awq, "LARGE", 1 << 22)
    wanted, same = awq.search_scales(weight[::4], found, Int4(group_size=16))
    assert scales.equal(wanted) and strength == same
    seen = []
    monkeypatch.setattr(awq, "LARGE", 1000)
    monkeypatch.setattr(awq, "output_error", lambda error, _: seen.append(len(error)) or error.square().sum())
    awq.search_scales(weight, found, Int4(group_size=16))
    assert set(seen) == {25}


def test_gptq_uses_the_same_compensation_for_all_parts_of_a_weight():
    weight, _, found = case()
    shared = gptq.Compensation.of(found, act_order=True)
    whole = gptq.quantize(weight, shared, Int4(group_size=8))
    parts = [gptq.quantize(part, shared, Int4(group_size=8)).codes for part in weight.split(5)]
    assert torch.cat(parts).equal(whole.codes)


def test_clipping_a_group_lowers_the_error_that_it_alone_makes():
    weight, x, found = case(rows=400)
    weight[3, 4] = 9.0  # an outlier, whose group would otherwise have wide steps
    x[:, 4] *= 1e-3  # and which hardly matters
    found = InputStatistics(32, torch.device("cpu"), torch.float64)
    found.add(x)
    format = Int4(group_size=8)
    clipped, nearest = awq.search_clipping(weight, found, format), awq.rounded_to_nearest(weight, format)
    assert clipped.scales[3, 0] == nearest.scales[3, 0] / 2  # as far as the search goes
    for group in range(4):
        span = slice(8 * group, 8 * group + 8)
        errors = [
            ((codes.dequantize() - weight)[:, span] @ x[:, span].t()).square().sum(1) for codes in (clipped, nearest)
        ]
        assert (errors[0] <= errors[1] + 1e-9).all()


def test_a_group_whose_largest_weight_matters_gets_a_wider_range():
    weight = torch.tensor([[1.0, 0.2, -0.3, 0.1, 0.0, 0.4, -0.6, 0.5]], dtype=torch.float64)
    found = InputStatistics(8, torch.device("cpu"), torch.float64)
    found.add(torch.diag(torch.tensor([100.0, *[1.0] * 7], dtype=torch.float64)))
    format = Int4(group_size=8)
    widened, nearest = awq.search_clipping(weight, found, format), awq.rounded_to_nearest(weight, format)
    assert nearest.codes[0, 0] == 7 and nearest.dequantize()[0, 0] < 0.94  # 1 is 7.5 steps
    assert widened.dequantize()[0, 0] == pytest.approx(1, abs=0.01)


def test_smoothquants_scales_are_those_of_the_paper():
    weight, x, found = case()
    scales = smoothquant.scales_for(weight, found, 0.3)
    torch.testing.assert_close(scales, x.abs().amax(0) ** 0.3 / weight.abs().amax(0) ** 0.7)


def test_smoothquants_search_lowers_the_error_of_the_quantized_product():
    weight, _, found = case()
    activations, x = Activations("int8"), torch.cat(found.samples)

    def error(scales):
        inputs = activations.quantize(x / scales).dequantize(x.dtype)
        return (inputs @ int8_format.quantize(weight * scales).dequantize().t() - x @ weight.t()).square().sum().item()

    scales, strength = smoothquant.search_scales(weight, found, activations, int8_format.quantize)
    tried = {each: error(smoothquant.scales_for(weight, found, each)) for each in smoothquant.STRENGTHS}
    assert strength == min(tried, key=tried.get)
    assert error(scales) == pytest.approx(tried[strength]) and tried[strength] < 0.5 * error(torch.ones_like(scales))


def test_a_second_moment_without_an_inverse_says_so():
    weight, _, found = case()
    found.second_moment = torch.full_like(found.second_moment, float("nan"))
    with pytest.raises(MinillmError, match="no inverse"):
        gptq.Compensation.of(found)
