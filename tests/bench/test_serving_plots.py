"""Plots of serving records show the figures of their records."""

import pytest

from minillm.bench import serve, serving_plots, traffic
from minillm.bench.clients import RequestTimes
from minillm.bench.serve_bench import ServeBench


def answered(place: int, prompt: int, tokens: int, clients: int) -> RequestTimes:
    """Longer prompts wait longer, later tokens take longer, and more clients make all slower."""
    begin = place / clients
    arrivals = [(begin + clients * (prompt + 0.1 * token * token + 0.01 * place), 1) for token in range(tokens)]
    return RequestTimes(due=begin, sent=begin, arrivals=arrivals, end=arrivals[-1][0])


@pytest.fixture(scope="module")
def swept() -> dict:
    """A grid of lengths under two loads on two servers, as `serve.run` writes it."""
    results = []
    for load in traffic.plan(ServeBench(input_len=[4, 8], output_len=[2, 6], sweep=[1, 3], requests=4)):
        work = load.make(300, 0)
        for url in ("http://127.0.0.1:1", "http://127.0.0.1:2"):
            measured = [
                answered(place, len(each.prompt), each.output_tokens, load.concurrency)
                for place, each in enumerate(work)
            ]
            facts = {"engine": "minillm serve", "url": url, "workload": load.name, **load.facts}
            results.append(facts | serve._result(work, measured, 0))
    return {"results": results, "machine": {"gpu": "a GPU"}}


def first(record: dict) -> list[dict]:
    return [row for row in record["results"] if row["url"] == record["results"][0]["url"]]


def texts(ax) -> list[str]:
    return [each.get_text() for each in ax.texts]


def labels(ax) -> list[str]:
    return [each.get_text() for each in ax.get_legend().get_texts()]


def test_the_heat_map_has_the_speed_of_each_pair_of_lengths_at_the_highest_load(swept):
    ax = serving_plots.heat_map(swept)
    wanted = [f"{row['output_tokens_per_s']:,.0f}" for row in first(swept) if row["concurrency"] == 3]
    assert sorted(texts(ax)) == sorted(wanted)
    assert [each.get_text() for each in ax.get_xticklabels()] == ["4", "8"]
    assert [each.get_text() for each in ax.get_yticklabels()] == ["2", "6"]
    by_place = {(round(each.get_position()[0]), round(each.get_position()[1])): each.get_text() for each in ax.texts}
    (corner,) = (row for row in first(swept) if (row["workload"], row["concurrency"]) == ("exact_8_2", 3))
    assert by_place[1, 0] == f"{corner['output_tokens_per_s']:,.0f}"


def test_every_request_is_a_point_of_ttft_against_its_input(swept):
    ax = serving_plots.ttft_by_input(swept)
    assert labels(ax) == ["1 at a time", "3 at a time"]
    points = [line.get_xdata() for line in ax.lines]
    assert [len(each) for each in points] == [4 * 4, 4 * 12]
    assert {*points[0]} == {4, 8}
    each = first(swept)[0]["each"][0]
    assert ax.lines[0].get_ydata()[0] == pytest.approx(1e3 * (each["first_token"] - each["due"]))


def test_gaps_are_drawn_by_the_position_of_their_token(swept):
    ax = serving_plots.itl_by_position(swept)
    rows = [row for row in first(swept) if row["concurrency"] == 3]  # eight loads have too many lines
    assert labels(ax) == ["4 in, 2 out, 3 at a time", "4 in, 6 out, 3 at a time",
                          "8 in, 2 out, 3 at a time", "8 in, 6 out, 3 at a time"]  # fmt: skip
    median, high = ax.lines[2:4]
    assert list(median.get_xdata()) == [2, 3, 4, 5, 6]
    assert list(median.get_ydata()) == [1e3 * point["p50"] for point in rows[1]["itl_by_position"]]
    assert list(high.get_ydata()) == [1e3 * point["p99"] for point in rows[1]["itl_by_position"]]


def test_the_spread_of_answers_ends_at_the_share_that_was_answered(swept):
    ax = serving_plots.answer_times(swept)
    took = sorted(each["end"] - each["due"] for each in first(swept)[1]["each"])
    assert list(ax.lines[0].get_xdata()) == [0.0, *took]
    assert ax.lines[0].get_ydata()[-1] == 1
    refused = {**first(swept)[0]["each"][0], "first_token": None}
    row = first(swept)[0] | {"each": [refused, *first(swept)[0]["each"][1:]]}
    assert serving_plots.answer_times({**swept, "results": [row]}).lines[0].get_ydata()[-1] == 0.75


@pytest.mark.parametrize("latency", ["ttft_s", "e2e_s"])
def test_throughput_against_latency_has_a_line_for_each_server_and_workload(swept, latency):
    ax = serving_plots.load_curve(swept, latency)
    assert len(ax.lines) == 2 * 4
    assert texts(ax) == ["1", "3"] * 8
    rows = first(swept)[:2]
    assert list(ax.lines[0].get_xdata()) == [row["output_tokens_per_s"] for row in rows]
    assert list(ax.lines[0].get_ydata()) == [1e3 * row[latency]["p50"] for row in rows]


def test_only_plots_that_say_something_are_saved(swept, tmp_path):
    names = [draw.__name__ for draw in serving_plots.panels(swept)]
    assert names == ["heat_map", "load_curve", "ttft_by_input", "itl_by_position", "answer_times"]
    one = {**swept, "results": swept["results"][:1]}
    assert [draw.__name__ for draw in serving_plots.panels(one)] == [
        "requests", "latency", "itl_by_position", "answer_times",
    ]  # fmt: skip
    for record in (swept, one):
        serving_plots.save(record, tmp_path / "a.svg")
        assert "<svg" in (tmp_path / "a.svg").read_text()
