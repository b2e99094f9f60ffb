"""Lesson 05's measurements: standard errors, grids that are compared at equal levels, and what the records say."""

import pytest
import torch

from minillm.bench import records
from minillm.course.lesson_05 import weight_formats
from minillm.course.lesson_05.weight_formats import Found
from minillm.course.shared import gains
from minillm.quantization import Int4, int4


def found(*rows):
    return Found(2.0, torch.tensor(rows, dtype=torch.float64), 1.0)


def test_a_ratio_of_divergences_has_the_error_of_rows_in_pairs():
    one, twice, more = found(1, 3, 8), found(2, 6, 16), found(2, 4, 9)
    assert one.divergence == pytest.approx(4) and one.error == pytest.approx(13**0.5 / 3**0.5)
    assert twice.over(one) == pytest.approx((2, 0))
    ratio, error = more.over(one)
    assert ratio == pytest.approx(5 / 4)
    assert error == pytest.approx(torch.tensor([0.75, 0.25, -1.0]).std() / 3**0.5 / 4)


def test_rows_with_all_levels_are_groups_as_long_as_a_row():
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    codes, scales = weight_formats.rows_with_all_levels(weight, 4)
    wanted, _ = int4.scales_of(weight[:, None], Int4(64))
    assert scales.equal(wanted)
    assert codes.equal(int4.round_to_int4(weight[:, None], wanted, None)[:, 0])
    for bits in (2, 3, 8):
        codes, scales = weight_formats.rows_with_all_levels(weight, bits)
        assert -(2 ** (bits - 1)) <= codes.min().item() and codes.max().item() < 2 ** (bits - 1)
        assert ((codes * scales - weight).abs() <= scales * (0.5 + 1e-9)).all()


def test_clipping_pays_more_the_fewer_the_bits():
    matrix = torch.randn(64, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shares = [step / 20 for step in range(4, 21)]
    errors = {bits: [weight_formats.clipping_error(matrix, bits, share) for share in shares] for bits in (2, 3, 4)}
    assert all(each[-1] == 1 for each in errors.values())
    assert min(errors[2]) < min(errors[3]) < min(errors[4]) < 1
    best = {bits: shares[each.index(min(each))] for bits, each in errors.items()}
    assert best[2] < best[3] < best[4] < 1


def test_zero_points_shorten_steps_by_what_a_groups_ends_leave():
    class OneMatrix:
        def addressed(self):
            return {"layers.0.qkv": self, "head": None}

        def dequantize(self):
            return torch.tensor([[3.0, -3.0, 1.0, 0.0, 2.0, -1.0, 1.5, 0.5]], dtype=torch.float64)

    step, error = weight_formats.zero_points_gain(OneMatrix(), 4)
    assert step == pytest.approx((6 / 6 + 3 / 4) / 2)
    assert error > 0


def test_times_per_token_are_the_records():
    (wanted,) = (
        1e3 / row["output_tokens_per_s"]
        for row in records.read(gains.RECORD)["results"]
        if (row["quantization"], row["kv_cache_dtype"], row["requests"]) == ("int8, head int8", "bfloat16", 1)
    )
    assert gains.milliseconds("int8, head int8", 1) == pytest.approx(wanted)
    assert gains.milliseconds("bf16", 4) == pytest.approx(1.799, abs=0.002)
