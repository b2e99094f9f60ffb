"""The lower bound of a step's time, and the quantities derived from it."""

import pytest

from minillm import LLM
from minillm.bench import roofline
from minillm.bench.roofline import PeakRates, Point

LIMITS = PeakRates(bytes_per_s=100.0, operations_per_s=1000.0)


@pytest.fixture(scope="module")
def llm():
    with LLM(enable_prefix_caching=False, device="cpu") as llm:
        yield llm


def test_the_ridge_point_is_where_both_limits_are_equal():
    point = Point("at the ridge", 1, bytes=50, operations=int(50 * LIMITS.ridge), seconds=1.0)
    assert point.bytes / LIMITS.bytes_per_s == point.operations / LIMITS.operations_per_s == point.floor(LIMITS)


@pytest.mark.parametrize(("nbytes", "operations", "floor"), [(200, 10, 2.0), (2, 9000, 9.0)])
def test_the_bound_is_the_longer_of_reading_and_computing(nbytes, operations, floor):
    assert Point("a step", 1, nbytes, operations, 10.0).floor(LIMITS) == floor


def test_a_steps_work_equals_that_of_its_matrices(llm):
    model = llm.engine.model
    layers = sum(
        weight.weight.numel()
        for each in model.layers
        for weight in (each.qkv, each.attention_out, each.gate_up, each.down)
    )
    norms = sum(norm.numel() for norm in [model.final_norm]) * (2 * len(model.layers) + 1)
    head = model.head.weight.numel()
    nbytes, operations = roofline.step_work(llm, tokens=10, samples=3)
    assert nbytes == (layers + norms + head) * 4
    assert operations == 2 * (10 * (layers + norms) + 3 * head)


def test_the_decode_measurement_runs_the_given_requests_and_leaves_none(llm):
    before = llm.stats()["steps"]
    point = roofline.decode(llm, requests=3, context=20, steps=4)
    assert (point.tokens, point.operations) == (3, roofline.step_work(llm, 3, 3)[1])
    assert point.bytes - roofline.step_work(llm, 3, 3)[0] == 3 * 22 * 2 * 6 * 64 * 4, (
        "expected the keys and values of 22 tokens each"
    )
    stats = llm.stats()
    assert stats["steps"] - before >= 4 and stats["running"] == stats["waiting"] == 0


def test_the_record_holds_limits_and_every_step(tmp_path, capsys):
    content = roofline.run(batches=[1, 2], prompts=[30], json_path=tmp_path / "r.json", device="cpu")
    assert [each["name"] for each in content["results"]] == ["decode, 1 at once", "decode, 2 at once", "prefill of 30"]
    assert content["bytes_per_s"] > 0 and content["operations_per_s"] > 0
    assert "decode, 2 at once" in capsys.readouterr().out
