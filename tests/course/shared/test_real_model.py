"""What the lessons print of SmolLM2's record."""

import pytest

from minillm.bench import records
from minillm.course.shared import real_model

QUALITY = {"workload": "quality", "perplexity_loss": 0.25, "kl": 0.1, "kl_interval": [0.05, 0.15]}
SPEED = {"workload": "single_128_256_x1", "requests": 1}
ROWS = [
    QUALITY | {"quantization": "int4", "bits_per_weight": 4.25},
    QUALITY | {"quantization": "w8a8-static", "bits_per_weight": 8.0},
    QUALITY | {"quantization": "cache-int8"},
    SPEED | {"quantization": "bfloat16", "output_tokens_per_s": 90.0},
    SPEED | {"quantization": "int4", "output_tokens_per_s": 200.0},
    SPEED | {"quantization": "bfloat16", "output_tokens_per_s": 110.0},
]


@pytest.fixture(autouse=True)
def record(monkeypatch):
    """A small record in the place of the committed one; tiny-gemma's are real."""
    read = records.read
    made = {real_model.RECORD: {"results": ROWS}}
    monkeypatch.setattr(records, "read", lambda name: made.get(name) or read(name))


def test_a_method_stands_next_to_the_same_format_of_tiny_gemma(capsys):
    real_model.report(["int4"])
    _, row, *_ = capsys.readouterr().out.splitlines()
    tiny = {each["quantization"]: each["kl"] for each in records.read("cpu/quantization-seeds")["results"]}
    assert row.split() == ["int4", "4.25", "100.0", "50.0", "to", "150.0", "25.0%", f"{1000 * tiny['int4-g64']:.2f}"]


def test_what_was_not_measured_stays_empty(capsys):
    real_model.report(["w8a8-static", "cache-int8"])
    found = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert found == [
        ["w8a8-static", "8.00", "100.0", "50.0", "to", "150.0", "25.0%"],
        ["cache-int8", "100.0", "50.0", "to", "150.0", "25.0%"],
    ]


@pytest.mark.parametrize(("name", "said"), [("int4", True), ("w8a8-static", False), ("cache-int8", False)])
def test_only_rows_of_few_bits_say_that_the_weights_were_rounded_before(name, said, capsys):
    real_model.report([name])
    assert ("had been rounded before" in capsys.readouterr().out) == said


def test_gains_are_multiples_of_both_runs_of_bfloat16():
    assert real_model.gains() == {"bfloat16": {1: 1.0}, "int4": {1: 2.0}}
