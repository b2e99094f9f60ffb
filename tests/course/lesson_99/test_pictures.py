"""Lesson 99's pictures: a long gap does not hide the others."""

import matplotlib.pyplot as plt
import pytest

from minillm.course.lesson_99 import pictures


@pytest.fixture
def figure():
    yield plt
    plt.close("all")


def test_the_histogram_of_gaps_is_logarithmic_and_counts_every_gap(figure):
    gaps = [0.0, 0.002, 0.003, 0.003, 0.25]  # two tokens came together, and one gap is a hundred times as long
    pictures.gaps(gaps, {"p50": 0.003, "p99": 0.25, "mean": 0.0516})
    (axis,) = figure.gcf().axes
    assert axis.get_xscale() == "log" and sum(bar.get_height() for bar in axis.patches) == len(gaps)
    assert axis.patches[0].get_height() == 1, "the gap of 0 is at the left end"
    lines = {line.get_label(): line.get_xdata()[0] for line in axis.lines}
    assert lines == pytest.approx({"p50: 3.0 ms": 3.0, "p99: 250.0 ms": 250.0, "mean: 51.6 ms": 51.6})


def test_each_panel_of_runs_says_how_many_requests_it_shows(figure):
    each = {"due": 0.0, "first_token": 0.5, "end": 1.0}
    record = {"results": [{"each": [each] * 3, "arrival": "given"}], "machine": {"cpu": "a processor", "cores": 2}}
    pictures.runs({"closed": record, "open": record | {"results": [record["results"][0] | {"each": [each] * 1200}]}})
    titles = [axis.get_title() for axis in figure.gcf().axes]
    assert titles == ["closed\n3 requests", "open\n1,200 requests"]


def test_equal_gaps_can_be_drawn(figure):
    pictures.gaps([0.002] * 3, {"p50": 0.002})
    assert sum(bar.get_height() for bar in figure.gcf().axes[0].patches) == 3
