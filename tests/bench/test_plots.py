"""A picture shows what its record says."""

import matplotlib
import pytest

from minillm.bench import plots

matplotlib.use("Agg")

ROW = {"workload": "mixed", "dtype": "float32", "scale": 8, "output_tokens": 100, "requests": 4}
RECORD = {
    "results": [
        ROW | {"engine": "minillm", "output_tokens_per_s": 50.0, "runs": [2.0, 1.9, 2.5]},
        ROW | {"engine": "transformers", "batch": 8, "output_tokens_per_s": 20.0, "runs": [5.0]},
    ],
    "machine": {"gpu": None, "cpu": "A CPU", "cores": 2},
}


def test_bars_are_medians_and_dots_are_runs():
    ax = plots.throughput(RECORD)
    assert [bar.get_height() for bar in ax.patches] == [50, 20]
    assert list(ax.lines[0].get_ydata()) == [100 / 2.0, 100 / 1.9, 100 / 2.5]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["minillm", "transformers\nbatch 8"]
    assert "2 cores of A CPU" in ax.get_title()


def test_a_workload_that_was_not_measured_is_named():
    with pytest.raises(ValueError, match="no workload 'chat'; it has: mixed"):
        plots.throughput(RECORD, "chat")
