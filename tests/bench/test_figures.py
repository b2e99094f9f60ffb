"""The steady state, intervals, goodput and costs are those of requests whose figures are known."""

import random

import pytest

from minillm.bench import figures
from minillm.bench.clients import RequestTimes
from minillm.errors import ConfigError


def request(sent: float, end: float, tokens: int = 5, *, refused: bool = False) -> RequestTimes:
    """An answer whose tokens come one by one, evenly, the last at its end."""
    gap = (end - sent) / tokens
    arrivals = [] if refused else [(sent + gap * (place + 1), 1) for place in range(tokens)]
    return RequestTimes(due=sent, sent=sent, arrivals=arrivals, end=end, refused=refused)


def closed_loop(clients: int, rounds: int, seconds: float) -> list[RequestTimes]:
    """Clients whose answers take `seconds` each; client 0 is a little quicker in its first answer."""
    return [request(place * seconds, (place + 1) * seconds, 10) for place in range(rounds) for _ in range(clients)]


def test_the_steady_state_lies_between_the_first_answer_and_the_last_request():
    found = figures.steady(closed_loop(4, 5, 2.0))
    assert (found["from_s"], found["to_s"]) == (2.0, 8.0)
    assert found["requests"] == 16, "those of the first round met a server that was not yet full"
    assert found["output_tokens_per_s"] == pytest.approx(4 * 10 / 2.0, rel=0.1)
    assert found["requests_per_s"] == pytest.approx(2.0)
    assert found["e2e_s"]["mean"] == 2.0 and found["itl_s"]["mean"] == pytest.approx(0.2)
    assert abs(found["drift"]) < 0.1


def test_a_run_without_a_full_server_has_no_steady_state():
    assert figures.steady([request(0.0, 1.0), request(0.0, 2.0)]) is None
    assert figures.steady([request(0.0, 1.0, refused=True)]) is None


def test_a_server_that_is_full_for_less_than_an_answer_has_no_steady_state():
    """Two answers a client: between the first answer's end and the last request hardly a token arrives."""
    first = [request(0.0, 2.0 + place / 10) for place in range(4)]
    assert figures.steady([*first, *(request(each.end, each.end + 2.0) for each in first)]) is None
    assert figures.steady(closed_loop(4, 3, 2.0)) is not None


def test_a_server_that_gets_slower_drifts():
    slower = [request(float(place), place + 1.0, 10) for place in range(5)]
    slower += [request(5.0 + 2 * place, 7.0 + 2 * place, 4) for place in range(5)]
    assert figures.steady(slower)["drift"] < -0.5


def test_the_interval_of_batch_means_is_students():
    """The sample has a mean of 4.5 and a standard deviation of 3.0277; 2.2622 * 3.0277 / sqrt(10) = 2.166."""
    assert figures.batch_means([float(value) for value in range(10)]) == [2.3, 6.7]
    assert figures.batch_means([7.0] * 10) == [7.0, 7.0]


def test_bootstrap_intervals_hold_the_value_and_narrow_with_more_requests():
    rng = random.Random(0)
    many = [request(0.0, 1.0 + rng.random()) for _ in range(400)]
    few = many[:20]
    wide, narrow = (figures.intervals(each, seed=1)["e2e_s"]["mean"] for each in (few, many))
    for each, (low, high) in ((few, wide), (many, narrow)):
        assert low < sum(seen.e2e for seen in each) / len(each) < high
    assert narrow[1] - narrow[0] < (wide[1] - wide[0]) / 2
    assert figures.intervals(few, seed=1) == figures.intervals(few, seed=1)
    assert figures.intervals([]) == {}


def test_a_bootstrap_interval_has_the_width_that_theory_gives():
    """A mean of 100 values of 0 or 1: its standard error is 0.05, so the interval is 0.5 +- 0.098."""
    values = [float(place % 2) for place in range(100)]
    low, high = figures._bootstrap(values, 0)["mean"]
    assert low == pytest.approx(0.402, abs=0.03) and high == pytest.approx(0.598, abs=0.03)


def test_gaps_are_pooled_by_the_position_of_their_token():
    one = RequestTimes(due=0.0, arrivals=[(1.0, 1), (2.0, 1), (4.0, 1)], end=4.0)
    two = RequestTimes(due=0.0, arrivals=[(1.0, 1), (2.5, 1)], end=2.5)
    points = figures.by_position([one, two])
    assert [(point["position"], point["p50"], point["p99"]) for point in points] == [(2, 1.0, 1.5), (3, 2.0, 2.0)]
    long = figures.by_position([request(0.0, 1.0, 1000)])
    assert len(long) <= figures.POSITIONS
    assert [point["position"] for point in long[:3]] == [2, 18, 34]
    assert figures.by_position([]) == []


@pytest.mark.parametrize(
    "slo, share",
    [
        ({"ttft": 0.2}, 0.5),
        ({"e2e": 1.0}, 0.5),
        ({"e2e": 2.0}, 0.75),
        ({"itl": 0.25}, 0.5),
        ({"ttft": 0.5, "itl": 0.5, "e2e": 5.0}, 0.75),
        ({"ttft": 0.5, "itl": 0.5, "e2e": 0.5}, 0.0),
    ],
)
def test_goodput_counts_requests_that_meet_every_limit(slo, share):
    measured = [request(0.0, 1.0), request(0.0, 1.0), request(0.0, 2.0), request(0.0, 0.0, refused=True)]
    found = figures.goodput(measured, slo)
    assert (found["share"], found["requests_per_s"]) == (share, share * 4 / 2.0)


def test_a_single_token_has_no_gap_to_be_too_long():
    assert figures.goodput([request(0.0, 1.0, 1)], {"itl": 0.001})["share"] == 1


def test_an_slo_is_read_from_its_text():
    assert figures.parse_slo("ttft=0.5, itl=0.05,e2e=10") == {"ttft": 0.5, "itl": 0.05, "e2e": 10.0}


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=", "ttft=fast", "ttft=0", "ttft=-1", "ttft=nan", "tpot=1", "ttft=inf"]
)
def test_an_slo_that_makes_no_sense_is_an_error(text):
    with pytest.raises(ConfigError, match="seconds above 0 for ttft, itl, e2e"):
        figures.parse_slo(text)


def test_the_cost_of_a_million_tokens_follows_from_rate_and_price():
    """1,000 tokens a second are 3.6 million an hour: at $3.60 an hour a million costs $1."""
    result = {"output_tokens_per_s": 1000.0, "input_tokens": 300, "output_tokens": 100}
    found = figures.cost(result, 3.6)
    assert (found["per_million_output"], found["per_million"]) == (1.0, 0.25)
    assert figures.cost(result, 3.6, gpus=2)["per_million_output"] == 2.0
    steady = result | {"steady": {"output_tokens_per_s": 2000.0}}
    assert figures.cost(steady, 3.6)["per_million_output"] == 0.5
    assert figures.cost(result | {"output_tokens_per_s": 0.0}, 3.6)["per_million"] is None
