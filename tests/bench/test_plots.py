"""Plots show the values of their records."""

import matplotlib
import matplotlib.pyplot as plt
import pytest
from matplotlib.text import Text

from minillm.bench import plots, records

matplotlib.use("Agg")

ROW = {"workload": "mixed", "dtype": "float32", "scale": 8, "output_tokens": 100, "requests": 4}
RECORD = {
    "results": [
        ROW | {"engine": "minillm", "output_tokens_per_s": 50.0, "runs": [2.0, 1.9, 2.5]},
        ROW | {"engine": "transformers", "batch": 8, "output_tokens_per_s": 20.0, "runs": [5.0]},
    ],
    "machine": {"gpu": None, "cpu": "A CPU", "cores": 2},
}


@pytest.fixture(autouse=True)
def no_figure_stays_open():
    yield
    plt.close("all")


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


PRECISIONS = {"losses": "cpu/quantization", "precisions": "h200/quantization"}


@pytest.mark.parametrize("name", PRECISIONS)
def test_names_of_points_cover_neither_each_other_nor_points(name):
    ax = getattr(plots, name)(records.read(PRECISIONS[name]))
    figure = ax.figure
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in ax.texts]  # without the lines
    points = [ax.transData.transform(place) for line in ax.lines for place in line.get_xydata()]
    assert len(boxes) == len(points)
    whole = figure.bbox
    for place, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:place]), ax.texts[place].get_text()
        assert not any(box.contains(*point) for point in points), ax.texts[place].get_text()
        assert whole.x0 <= box.x0 and box.x1 <= whole.x1, ax.texts[place].get_text()


def test_losses_are_plotted_against_bytes_and_simulated_formats_are_hollow():
    record = records.read("cpu/quantization")
    ax = plots.losses(record)
    found = {tuple(place) for line in ax.lines for place in line.get_xydata()}
    assert found == {(row["bytes"] / 1e6, row["kl"]) for row in record["results"][1:]}
    _, hollow = ax.lines
    assert hollow.get_label() == "simulated"
    assert len(hollow.get_xydata()) == sum(row["simulated"] for row in record["results"])
    assert "tiny-gemma, trained; unquantized, in 16 bits: 11.1 MB" in ax.get_title()
    assert {text.get_text() for text in ax.texts} == {row["quantization"] for row in record["results"][1:]}


def test_precisions_are_speeds_of_one_request_and_of_the_most():
    record = records.read("h200/quantization")
    ax = plots.precisions(record)
    assert "Gemma 2B's shape, random weights, NVIDIA H200" in ax.get_title()
    most = max(row["requests"] for row in record["results"])
    assert ax.get_xlabel().endswith(" 1 request") and ax.get_ylabel().endswith(f" {most:,} requests at once")
    speeds = {row["output_tokens_per_s"] for row in record["results"] if row["requests"] in (1, most)}
    assert all(number in speeds for line in ax.lines for place in line.get_xydata() for number in place)


def test_a_cache_in_8_bits_is_a_point_of_its_own():
    row = {"quantization": "fp8", "kv_cache_dtype": "bfloat16", "requests": 1, "output_tokens_per_s": 500.0}
    rows = [row, row | {"kv_cache_dtype": "fp8", "output_tokens_per_s": 510.0}]
    rows += [each | {"requests": 64, "output_tokens_per_s": 10 * each["output_tokens_per_s"]} for each in rows]
    ax = plots.precisions({"results": rows, "machine": {"gpu": "A GPU"}})
    assert {text.get_text() for text in ax.texts} == {"fp8", "fp8, cache fp8"}


def test_names_of_close_points_stand_in_a_column_in_the_points_order():
    ax = plots.new_axes()
    ax.set(xlim=(0, 10), ylim=(0, 10))
    plots.label_points(ax, {"low": (5.0, 5.0), "high": (5.0, 5.1), "alone": (2.0, 8.0)})
    ax.figure.draw_without_rendering()
    boxes = {text.get_text(): Text.get_window_extent(text) for text in ax.texts}
    assert boxes["high"].y0 >= boxes["low"].y1 and boxes["high"].x0 == pytest.approx(boxes["low"].x0, abs=1)
    assert {text.get_text(): text.arrow_patch is not None for text in ax.texts} == {
        "low": True,
        "high": True,
        "alone": False,
    }


@pytest.mark.parametrize(("count", "height"), [(99, 0.8), (300, 1.0)])
def test_bars_of_many_requests_touch(count, height):
    each = [{"due": n / 10, "first_token": n / 10 + 1, "end": n / 10 + 2} for n in range(count)]
    ax = plots.requests(RECORD | {"results": [{"each": each, "arrival": "given"}]})
    assert {round(bar.get_height(), 3) for bar in ax.patches} == {height}
    assert len(ax.patches) == 2 * count
