"""The engine needs only one interface from its executor: steps go in, results come out."""

import numpy as np
import pytest

from minillm import LLM, SamplingParams
from minillm.engine import Engine
from minillm.model.loader import read_config
from minillm.runner.executor import Facts, WatchedExecutor
from minillm.runner.launched import Results

GREEDY = SamplingParams(max_tokens=5, ignore_eos=True)


class Counting:
    """A minimal executor without a model: a row's next token is the number of tokens it has."""

    def __init__(self, source, config):
        self.facts = Facts(
            model=read_config(source),
            dtype="float32",
            kv_cache_dtype="float32",
            weight_bytes=0,
            num_blocks=50,
            max_model_len=256,
            windows=(None,),
            stream=None,
            captures=False,
        )
        self.steps, self.closed = [], False

    def launch(self, step):
        self.steps.append(step)
        lengths = step.sampling_ends
        return Finished(step, Results(lengths[:, None].astype(np.int64), np.ones(len(lengths), np.int64)))

    def warm_up(self):
        raise AssertionError("there is nothing to capture")

    def close(self):
        self.closed = True


class Finished:
    def __init__(self, step, results):
        self.step, self.results = step, results

    def wait(self):
        return self.results


@pytest.fixture
def llm(monkeypatch):
    monkeypatch.setattr("minillm.engine.engine.LocalExecutor", Counting)
    with LLM(device="cpu", max_num_batched_tokens=7, run_ahead=2) as llm:
        yield llm


def test_the_engine_runs_on_any_executor_with_the_interface(llm):
    found = llm.generate([[9] * 3, [8] * 20], GREEDY)
    assert [each.token_ids for each in found] == [[3, 4, 5, 6, 7], [20, 21, 22, 23, 24]]
    executor = llm.engine.executor
    assert [step.number for step in executor.steps] == list(range(len(executor.steps)))
    assert llm.stats()["blocks"] == 50
    llm.warm_up()
    llm.close()
    assert executor.closed


def test_a_step_marks_the_rows_that_produce_a_first_token(llm):
    llm.generate([[9] * 3, [8] * 20], GREEDY)
    yielded = [(step.rows[step.first], step.first & ~step.samples) for step in llm.engine.executor.steps]
    assert sum(len(rows) for rows, _ in yielded) == 2, "exactly once per request"
    assert not any(never.any() for _, never in yielded)


def test_an_engine_runs_on_a_watched_executor_inside_a_block_and_keeps_its_model():
    with LLM(device="cpu", num_blocks=16) as llm:
        own, model, facts = llm.engine.executor, llm.engine.model, llm.engine.facts
        assert (facts.dtype, facts.kv_cache_dtype, facts.weight_bytes) == ("float32", "float32", model.nbytes)
        with pytest.raises(ZeroDivisionError), llm.engine.running_on(WatchedExecutor(own)):
            assert llm.engine.model is model and llm.engine.executor is not own
            llm.generate([[9] * 3], GREEDY)
            raise ZeroDivisionError
        assert llm.engine.executor is own


@pytest.mark.parametrize("run_ahead", [0, 1, 3])
def test_so_many_steps_are_launched_before_the_oldest_is_read(run_ahead, monkeypatch):
    monkeypatch.setattr("minillm.engine.engine.LocalExecutor", Counting)
    left, read = [], Engine._read
    monkeypatch.setattr(
        Engine, "_read", lambda engine, launched: (left.append(len(engine.in_flight)), read(engine, launched))
    )
    with LLM(device="cpu", run_ahead=run_ahead) as llm:
        llm.generate([9] * 3, SamplingParams(max_tokens=12, ignore_eos=True))
    assert left[0] == max(left) == run_ahead
