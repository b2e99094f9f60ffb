"""The sleeping engine's steps end one after the other, at the recorded pace, each with a token for every row."""

import time

import numpy as np

from minillm.deploy.simulation import H200
from minillm.scheduler import Step
from tools.sleeping_engine import TOKEN, SleepingExecutor


def step(rows: int) -> Step:
    ones = np.ones(rows, np.int32)
    return Step(0, ones, ones, ones, ones > 0, rows)


def test_steps_end_one_after_the_other():
    executor, begun = object.__new__(SleepingExecutor), time.perf_counter()
    first, second = executor.launch(step(8)), executor.launch(step(1))
    assert first.until >= begun + H200.seconds(step(8))
    assert second.until >= first.until + H200.seconds(step(1))
    results = [each.wait() for each in (first, second)]
    assert time.perf_counter() >= second.until
    assert [each.tokens.tolist() for each in results] == [[[TOKEN]] * 8, [[TOKEN]]]
    assert results[0].accepted.tolist() == [1] * 8
