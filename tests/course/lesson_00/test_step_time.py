"""What lesson 00 measures: the tokens of each step, and a prefill's work without what the engine drops."""

from collections import Counter
from functools import partial

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.bench import roofline
from minillm.course.lesson_00 import step_time


@pytest.fixture(scope="module")
def llm():
    with LLM(enable_prefix_caching=False, run_ahead=0, device="cpu") as llm:
        yield llm


def test_each_steps_tokens_are_counted_inside_the_block_only(llm):
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    with step_time.tokens_of_steps(llm.engine) as tokens:
        llm.generate(list(range(10, 30)), params)
    llm.generate([7, 8], params)
    assert tokens == [20, 1, 1]


def test_a_prefills_idle_tokens_are_taken_off_its_operations_only(llm):
    prefill, decode = roofline.prefill(llm, 30, repeat=1), roofline.decode(llm, 2, steps=2)
    layer = llm.engine.model.layers[0]
    mlp = layer.gate_up.weight.numel() + layer.down.weight.numel()
    found = step_time.without_idle(prefill, llm.model_config)
    assert (found.bytes, found.operations) == (prefill.bytes, prefill.operations - 2 * 29 * mlp)
    assert step_time.without_idle(decode, llm.model_config) == decode


def test_steps_of_several_batches_are_measured():
    found = step_time.step_times(1, 3)
    for each in found:
        assert each.calls["aten::linear"] == 25 and each.others > 100
        assert len(each.rounds) == step_time.ROUNDS and 0 < each.smallest < each.products
        assert all(step > 0 and products > 0 for step, products in each.rounds)


def test_products_are_measured_with_as_many_threads_as_a_step_uses(monkeypatch):
    """On a busy machine a step uses fewer than torch's: with all of them, its products alone would take longer."""
    used = []
    monkeypatch.setattr(step_time, "LLM", partial(LLM, cpu_threads=3))
    monkeypatch.setattr(step_time._Decode, "_products", lambda decode: used.append(torch.get_num_threads()))
    step_time.step_times(1)
    assert set(used) == {3}


def test_the_fastest_round_counts_and_tells_products_from_overhead():
    found = step_time.StepTime(0, rounds=[(9.0, 1.5), (3.0, 4.0), (5.0, 1.0)])
    assert (found.step, found.products, found.overhead) == (3.0, 1.0, 2.0)


STEADY = [(3.0, 1.0), (3.2, 1.1), (30.0, 20.0)]


@pytest.mark.parametrize(
    "rounds, steady",
    [
        (STEADY, True),  # another program disturbed one round of three
        ([*STEADY, (4.6, 1.1), (4.6, 1.1)], False),  # steps
        ([*STEADY, (3.2, 1.6), (3.2, 1.6)], False),  # products
        ([(3.0, 3.5), (3.0, 3.5)], False),  # products that take longer than the step that they are a part of
    ],
)
def test_rounds_that_differ_say_that_the_machine_is_busy(rounds, steady):
    assert step_time.StepTime(0, rounds=rounds).steady == steady


def test_a_step_that_is_faster_than_its_products_has_parts_all_the_same():
    found = step_time.StepTime(0, rounds=[(3.0, 3.5)], smallest=1.0, calls=Counter({"aten::linear": 2, "aten::add": 9}))
    assert found.overhead == 0.0 and list(found.parts.values()) == [3.5, 0.0, 0.0]
