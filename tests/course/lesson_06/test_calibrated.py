"""Lesson 06's bench: planted outliers change statistics but no output, and distances are measured in pairs."""

import pytest
import torch

from minillm.calibration.methods import Method
from minillm.course.lesson_06 import calibrated
from minillm.model.decoder import PROJECTIONS


@pytest.fixture(scope="module")
def ids():
    return calibrated.calibration_text(rows=2, length=32)


def test_planted_outliers_leave_the_outputs_and_scale_the_statistics(ids):
    plain, planted = calibrated.dense(), calibrated.with_outliers()
    found = [calibrated.log_probabilities(model, ids) for model in (plain, planted)]
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)  # norms are float32
    recorded = [
        calibrated.statistics(calibrated.record(model, ids, calibrated.Statistics)) for model in (plain, planted)
    ]
    derived = calibrated.add_outliers(plain, recorded[0])
    for address, each in recorded[1].items():
        scale = each.second_moment.abs().max()
        torch.testing.assert_close(derived[address].second_moment / scale, each.second_moment / scale)
        torch.testing.assert_close(derived[address].mean_magnitude, each.mean_magnitude, rtol=1e-4, atol=1e-6)
    largest = recorded[1]["layers.3.qkv"].mean_magnitude / recorded[1]["layers.3.qkv"].mean_magnitude.median()
    assert (largest > 8).sum() == 8


def test_the_quantized_model_has_the_weights_of_the_format():
    model, strengths = calibrated.quantized(Method("int4"), {})
    assert strengths == {}
    wide = calibrated.dense()
    for layer, other in zip(model.layers, wide.layers, strict=True):
        for name in PROJECTIONS:
            wanted = calibrated.rounded(getattr(other, name).dequantize())
            torch.testing.assert_close(getattr(layer, name).dequantize().double(), wanted, rtol=1e-6, atol=1e-7)


def test_what_is_removed_is_compared_row_by_row():
    base = calibrated.Distance(torch.tensor([1.0, 3.0, 8.0]).double(), 2.0)
    half = calibrated.Distance(base.rows / 2, 2.0)
    less = calibrated.Distance(base.rows - 2, 2.0)
    assert half.removed(base) == pytest.approx((50, 0)) and less.removed(base)[0] == pytest.approx(50)
    assert less.removed(base)[1] == pytest.approx(100 * torch.tensor([-1.5, -0.5, 2.0]).std() / 3**0.5 / 4)
    assert base.error == pytest.approx(base.rows.std().item() / 3**0.5)


def test_a_learners_statistics_become_the_engines(ids):
    class Mine:
        def __init__(self, inputs):
            self.rows, self.magnitude = 0, torch.zeros(inputs, dtype=torch.float64)
            self.second_moment = torch.zeros(inputs, inputs, dtype=torch.float64)

        def add(self, x):
            self.rows += len(x)
            self.magnitude += x.abs().sum(0)
            self.second_moment += x.T @ x

    mine, engines = (
        calibrated.statistics(calibrated.record(calibrated.dense(), ids, make))["layers.0.down"]
        for make in (Mine, calibrated.Statistics)
    )
    torch.testing.assert_close(mine.mean_magnitude, engines.mean_magnitude)
    torch.testing.assert_close(mine.second_moment, engines.second_moment)


def test_a_matrix_is_searched_once_for_each_model_and_text(ids):
    recorded = calibrated.record(calibrated.dense(), ids, calibrated.Statistics)
    inputs, weight = calibrated.statistics(recorded)["layers.0.qkv"], torch.ones(2, 256, dtype=torch.float64)
    searched = []

    def search(weight, magnitude, moment, rounded, allowed):
        searched.append(weight)
        return torch.full_like(magnitude, weight[0, 0].item()), 0.5

    part = calibrated.awq_part(search)
    for given, seen, searches in ((weight, inputs, 1), (weight.clone(), inputs, 1), (weight * 2, inputs, 2)):
        scales, _ = part(given, seen, Method("awq").format(), allowed=lambda scales: scales)
        assert len(searched) == searches and scales.eq(given[0]).all()
    part(weight * 2, inputs.scaled(torch.ones(256)), Method("awq").format(), allowed=lambda scales: scales)
    assert len(searched) == 3
