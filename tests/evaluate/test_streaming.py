"""Streams predict text past the context about as well as a window recomputed for every token."""

import pytest

from minillm import evaluate
from minillm.bench import records

BOUND = 1.1


def test_perplexity_at_4_times_the_context_is_within_10_percent_of_a_recomputed_window():
    """With a context of 256 tokens; the committed record uses the model's own 2,048."""
    options = {"attention_sinks": 4, "attention_window": 192, "max_model_len": 256, "every": 24}
    found = {result["workload"]: result for result in evaluate.streaming(**options)}
    assert list(found) == [f"streaming-{way}" for way in ("recomputed", "sinks", "no-sinks", "dense")]
    sinks = found["streaming-sinks"]
    assert sinks["length"] == 4 * sinks["context"] == 1024 and sinks["tokens"] == 32
    assert sinks["blocks_of_a_row"] == 1 + 192 // 16 + 1
    assert 1 / BOUND < sinks["beside_recomputed"] < BOUND
    assert found["streaming-recomputed"]["input_tokens"] == 32 * 193


def test_the_record_keeps_the_bound_at_4_times_the_models_context():
    found = {result["workload"]: result for result in records.read("cpu/streaming")["results"]}
    sinks = found["streaming-sinks"]
    assert sinks["length"] == 4 * sinks["context"] == 8192 and sinks["tokens"] >= 90
    assert sinks["attention_window"] == 1024 and sinks["attention_sinks"] == 4
    assert 1 / BOUND < sinks["beside_recomputed"] < BOUND


def test_a_window_as_long_as_the_context_is_rejected():
    with pytest.raises(ValueError, match="a window of 256 tokens does not fit the context of 256"):
        next(evaluate.streaming(attention_window=256, max_model_len=256))
