"""What lesson 00 measures: the tokens of each step, and a prefill's work without what the engine drops."""

import pytest

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


def test_a_step_of_several_requests_is_measured():
    found = step_time.step_time(3)
    assert found.calls["aten::linear"] == 25 and 0 < found.products < found.step
