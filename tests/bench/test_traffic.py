"""Settings become loads: patterns, grids of lengths, sweeps over clients."""

import pytest

from minillm.bench import traffic
from minillm.bench.serve_bench import ServeBench
from minillm.errors import ConfigError


def test_the_four_patterns_have_short_and_long_inputs_with_short_and_long_outputs():
    loads = traffic.plan(ServeBench(patterns=True, requests=3, scale=1))
    lengths = [(len(load.make(300, 0)[0].prompt), load.make(300, 0)[0].output_tokens) for load in loads]
    assert lengths == [(128, 128), (128, 2048), (2048, 128), (2048, 512)]
    assert {load.concurrency for load in loads} == {traffic.CONCURRENCY}


def test_lengths_make_a_grid_and_a_sweep_multiplies_it():
    loads = traffic.plan(ServeBench(input_len=[4, 8], output_len=[2, 3, 5], sweep=[1, 4], requests=6))
    assert [(load.name, load.concurrency) for load in loads] == [
        (f"exact_{one}_{other}", clients) for one in (4, 8) for other in (2, 3, 5) for clients in (1, 4)
    ]
    assert traffic.plan(ServeBench(input_len=4, output_len=2))[0].name == "exact_4_2"


def test_a_sweep_sends_each_client_several_requests_even_beyond_the_workload():
    few, many = traffic.plan(ServeBench(sweep=[1, 16], requests=8))
    assert (len(few.make(300, 0)), len(many.make(300, 0))) == (8, 64)
    (single,) = traffic.plan(ServeBench(workload="single", sweep=[3]))
    assert len(single.make(300, 0)) == 12
    assert len(traffic.plan(ServeBench(workload="single", sweep=[3], requests=None))[0].make(300, 0)) == 12


def test_a_larger_load_begins_with_the_same_requests():
    few, many = traffic.plan(ServeBench(workload="mixed", sweep=[1, 16], requests=8))
    assert many.make(300, 0)[:8] == few.make(300, 0)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"sweep": []}, "sweep is empty"),
        ({"sweep": [1, 0]}, "sweep must be a whole number from 1, not 0"),
        ({"sweep": [1], "rate": 2.0}, "choose one of sweep, rate"),
        ({"patterns": True, "trace": "conversation"}, "leave patterns out"),
        ({"patterns": True, "input_len": 4, "output_len": 4}, "leave patterns out"),
    ],
)
def test_loads_that_cannot_be_are_errors(wrong, message):
    with pytest.raises(ConfigError, match=message):
        traffic.plan(ServeBench(**wrong))
