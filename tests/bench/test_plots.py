"""Plots show the values of their records."""

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


def test_a_workload_missing_from_the_record_is_reported():
    with pytest.raises(ValueError, match="no workload 'chat'; it has: mixed"):
        plots.throughput(RECORD, "chat")


SPEEDS = (("graphs", "off", 50), ("graphs", "on", 200), ("ahead", "0", 10))
ABLATION = {
    "results": [
        {"group": group, "name": name, "workload": work, "requests": requests, "output_tokens_per_s": speed * requests}
        for work, requests in (("single", 1), ("chat", 256))
        for group, name, speed in SPEEDS
    ],
    "model": "a model",
    "dtype": "float32",
    "machine": RECORD["machine"],
}


def test_ablation_bars_are_shares_of_their_groups_best_labeled_with_rates():
    ax = plots.ablation(ABLATION)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["graphs: off", "graphs: on", "ahead: 0"]
    one, many = ax.containers
    assert [bar.get_width() for bar in one] == [bar.get_width() for bar in many] == [0.25, 1, 1]
    assert {"50", "12,800"} <= {text.get_text() for text in ax.texts}
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["1 request", "256 requests"]
    tops = [bar.get_y() for bars in zip(one, many, strict=True) for bar in bars]
    assert tops == sorted(tops), "bars of one setting must be adjacent"


def test_groups_of_an_ablation_can_be_selected_and_unknown_ones_are_reported():
    ax = plots.ablation(ABLATION, groups=["ahead"])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["ahead: 0"]
    with pytest.raises(ValueError, match="no group heads; it has: graphs, ahead"):
        plots.ablation(ABLATION, groups=["heads"])


SPENT = {"p50": 0.01, "p90": 0.02, "p99": 0.04}
BATCHING = {
    "results": [
        {"part": "throughput", "batching": name, "requests": 9, "output_tokens": 100, "steps": 7, "runs": [2.0, 1.0]}
        | {"output_tokens_per_s": speed}
        for name, speed in (("static", 50.0), ("in-flight", 80.0))
    ]
    + [
        {"part": "latency", "prefill": name, "budget": 64, "requests": 9, "requests_per_s": 2.5}
        | {"ttft_s": SPENT, "itl_s": {p: value * factor for p, value in SPENT.items()}}
        for name, factor in (("chunked", 1), ("whole", 3))
    ]
    + [
        {
            "part": "prefix",
            "traffic": "trace",
            "requests": 9,
            "computed_without": 80,
            "computed_with": 20,
            "saved": 0.75,
        }
    ]
    + [
        {"part": "memory", "cache": "blocks of 16", "running": 5.2, "steps": 5}
        | {"used": 0.9, "reserved": 0.05, "internal": 0.03, "external": 0.02}
        | {"timeline": {name: [0.25, 0.25, 0.25] for name in plots.SHARES}}
    ],
    "rows": 4,
    "model": "a model",
    "dtype": "float32",
    "command": "minillm bench batching --load-format dummy",
    "machine": RECORD["machine"],
}


@pytest.mark.parametrize("draw", [plots.batching, plots.chunking])
def test_batching_plots_name_the_model_its_weights_and_the_machine(draw):
    assert "a model, random weights\nfloat32, 2 cores of A CPU" in draw(BATCHING).get_title()


def test_batching_plots_show_medians_runs_latencies_and_shares():
    ax = plots.batching(BATCHING)
    assert [bar.get_height() for bar in ax.patches] == [50, 80]
    assert list(ax.lines[1].get_ydata()) == [50, 100]
    whole, chunked = plots.chunking(BATCHING).containers
    assert [bar.get_height() for bar in whole] == pytest.approx([10, 20, 40, 30, 60, 120])
    assert [bar.get_height() for bar in chunked] == pytest.approx([10, 20, 40, 10, 20, 40])
    every, computed = plots.prefix(BATCHING).containers
    assert [bar.get_width() for bar in (*every, *computed)] == [1, 0.25]
    bars = plots.memory(BATCHING).patches
    assert [bar.get_width() for bar in bars] == pytest.approx([0.9, 0.05, 0.03, 0.02])
    assert bars[-1].get_x() + bars[-1].get_width() == pytest.approx(1)
    assert len(plots.memory_over_time(BATCHING).collections) == 4
