"""The load generator measures what clients see, under three arrival patterns, only on this machine."""

import asyncio
import json
import math

import httpx
import pytest

from minillm.errors import ConfigError

pytest.importorskip("fastapi", reason="the load generator is tested against the server, which needs fastapi")

from minillm.bench import plots, serve, workloads
from minillm.bench.serve import RequestTimes
from minillm.server import running
from tests.bench.fake import at_once, faked, only_when_all_have_come
from tests.waiting import TIMEOUT


@pytest.fixture(scope="module")
def server(model_directory):
    with running(model_directory, load_format="dummy", device="cpu", max_num_seqs=8) as server:
        yield server


def test_every_request_is_answered_in_full_and_counted(server, capsys, tmp_path):
    path, picture = tmp_path / "serve.json", tmp_path / "serve.svg"
    settings = {"workload": "mixed", "scale": 16, "requests": 12, "concurrency": 4}
    record = serve.run(server.url, **settings, json_path=path, plot_path=picture)
    lines = capsys.readouterr().out.strip().splitlines()
    assert record == json.loads(path.read_text())
    assert "<svg" in picture.read_text()
    result = record["results"][0]
    short = {name: value for name, value in result.items() if name not in ("each", "itl_by_position")}
    assert json.loads(lines[-1]) == record | {"results": [short]}
    assert result["requests"] == len(result["each"]) == 12 and result["concurrency"] == 4
    assert result["output_tokens_per_s"] == pytest.approx(result["output_tokens"] / result["seconds"], rel=0.01)
    for name in ("ttft_s", "itl_s", "e2e_s"):
        assert 0 <= result[name]["p50"] <= result[name]["p90"] <= result[name]["p99"]
    assert result["ttft_s"]["p50"] <= result["e2e_s"]["p50"] <= result["seconds"]


@pytest.mark.parametrize("way", [{"rate": 200.0}, {"trace": "conversation", "speed": 50.0}])
def test_an_open_loop_against_the_real_server(server, way):
    result = serve.run(server.url, **way, workload="chat", scale=16, requests=12, quiet=True)["results"][0]
    assert result["requests"] == 12 and result["refused"] == 0
    assert [each["output_tokens"] for each in result["each"]].count(0) == 0
    assert all(each["due"] <= each["first_token"] <= each["end"] for each in result["each"])
    assert result["late_s"]["p50"] >= 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_record_states_the_dtype_that_was_served(model_directory, dtype):
    options = {"load_format": "dummy", "device": "cpu", "dtype": dtype, "max_num_seqs": 3}
    with running(model_directory, **options) as server:
        card = httpx.get(f"{server.url}/v1/models", timeout=TIMEOUT).json()["data"][0]
        record = serve.run(server.url, workload="single", scale=32, concurrency=1, quiet=True)
    assert record["results"][0]["dtype"] == card["dtype"] == dtype
    assert card["max_num_seqs"] == 3


def test_a_closed_loops_clients_run_concurrently():
    with faked(only_when_all_have_come(3)) as (url, fake):
        serve.run(url, workload="chat", scale=16, requests=9, concurrency=3, timeout=TIMEOUT, quiet=True)
    assert fake.most_at_work == 3


@pytest.mark.parametrize("way", [{"rate": 400.0}, {"trace": "conversation", "speed": 100.0}])
def test_an_open_loop_sends_requests_when_due_whatever_is_still_running(way):
    """The server answers only once all twelve requests are in, so a generator that waits for answers would hang."""
    with faked(only_when_all_have_come(12)) as (url, fake):
        result = serve.run(url, **way, scale=16, requests=12, timeout=TIMEOUT, quiet=True)["results"][0]
    assert fake.most_at_work == 12
    last = max(each["due"] for each in result["each"])
    assert all(each["first_token"] >= last for each in result["each"])


def test_a_user_supplied_schedule_is_followed():
    with faked(at_once) as (url, fake):
        result = serve.run(url, due=[0.0, 0.02, 0.02], requests=1, scale=16, quiet=True)["results"][0]
    assert [each["due"] for each in result["each"]] == [0.0, 0.02, 0.02]
    assert len(fake.bodies) == 1 + 3


def test_latency_counts_from_when_a_request_was_due():
    seen = RequestTimes(due=1.0, sent=3.0, arrivals=[(4.0, 1), (4.5, 1)], end=4.75)
    assert (seen.ttft, seen.e2e, list(seen.gaps)) == (3.0, 3.75, [0.5])


def test_rejections_by_a_full_queue_are_counted_and_reported(capsys):
    async def every_third_is_refused(fake, before, body):
        await asyncio.sleep(0.01)  # long enough that rounding the seconds changes no rate by 1%
        return 429 if before > 0 and before % 3 == 0 else 200

    with faked(every_third_is_refused) as (url, _):
        record = serve.run(url, workload="chat", scale=16, requests=9, concurrency=1)
    result = record["results"][0]
    assert (result["requests"], result["refused"], result["refused_share"]) == (9, 3, 0.3333)
    assert result["output_tokens"] == 6 * 8, "a refused request has no tokens"
    assert result["requests_per_s"] == pytest.approx(6 / result["seconds"], rel=0.01)
    assert "3 refused (33.3%)" in capsys.readouterr().out
    assert [each["first_token"] is None for each in result["each"]].count(True) == 3
    marks = plots.requests(record).lines[0]
    assert len(marks.get_xdata()) == 3


def test_a_server_that_refuses_everything_does_not_crash_the_benchmark():
    async def full(fake, before, body):
        return 429

    with faked(full) as (url, _):
        result = serve.run(url, requests=4, concurrency=2)["results"][0]
    assert result["refused_share"] == 1 and result["ttft_s"]["p50"] is None and result["requests_per_s"] == 0


def test_the_warm_up_request_shares_no_prompt_with_measured_ones():
    with faked(at_once) as (url, fake):
        serve.run(url, workload="single", scale=8, requests=1, concurrency=1, quiet=True)
    warm, measured = (body["prompt"] for body in fake.bodies)
    assert warm != measured and len(warm) == len(measured)


def test_exact_lengths_and_the_number_of_warm_up_requests_can_be_asked_for():
    with faked(at_once) as (url, fake):
        lengths = {"input_len": 5, "output_len": 3, "requests": 4, "warmup": 6, "concurrency": 2}
        result = serve.run(url, **lengths, quiet=True)["results"][0]
        assert len(fake.bodies) == 6 + 4
        serve.run(url, **lengths | {"warmup": 0}, quiet=True)
    assert {(len(body["prompt"]), body["max_tokens"]) for body in fake.bodies} == {(5, 3)}
    assert len(fake.bodies) == 6 + 4 + 4
    shown = {name: result[name] for name in ("workload", "scale", "warmup", "requests", "output_tokens")}
    assert shown == {"workload": "exact_5_3", "scale": 1, "warmup": 6, "requests": 4, "output_tokens": 12}
    assert result["tokens_per_event"] == 3


def test_a_different_seed_gives_different_prompts():
    with faked(at_once) as (url, fake):
        for seed in (0, 0, 1):
            serve.run(url, workload="single", scale=8, requests=1, concurrency=1, seed=seed, quiet=True)
    first, again, other = (body["prompt"] for body in fake.bodies[1::2])
    assert first == again != other


def test_it_runs_inside_a_running_event_loop(server):
    async def notebook_cell():
        return serve.run(server.url, workload="single", scale=32, concurrency=1, quiet=True)

    assert asyncio.run(notebook_cell())["results"][0]["requests"] == 1


@pytest.mark.parametrize(
    "arrivals, gaps",
    [
        ([(1.0, 1), (1.5, 2), (1.75, 1)], [0.5, 0.0, 0.25]),
        ([(1.0, 3), (1.5, 1)], [0.0, 0.0, 0.5]),
        ([(1.0, 1)], []),
    ],
)
def test_every_token_but_the_first_has_an_inter_token_gap(arrivals, gaps):
    assert list(RequestTimes(due=0.25, arrivals=arrivals).gaps) == gaps


def test_each_latency_is_of_what_it_says():
    seen = RequestTimes(due=1.0, sent=1.5, arrivals=[(3.0, 1), (3.5, 1), (4.5, 1)], end=5.0)
    found = serve.summary([workloads.BenchRequest([1], 3)], [seen])
    means = {name: found[name]["mean"] for name in ("late_s", "ttft_s", "itl_s", "e2e_s")}
    assert means == {"late_s": 0.5, "ttft_s": 2.0, "itl_s": 0.75, "e2e_s": 4.0}


def test_percentiles_are_observed_values():
    values = [float(i) for i in range(1, 101)]
    assert serve.percentiles(values) == {"p50": 50, "p90": 90, "p99": 99, "mean": 50.5}
    assert serve.percentiles([3.0]) == {"p50": 3, "p90": 3, "p99": 3, "mean": 3}
    assert serve.percentiles([]) == {"p50": None, "p90": None, "p99": None, "mean": None}


@pytest.mark.parametrize("url", ["http://example.com", "https://127.0.0.1:1", "http://10.0.0.1", "http://", "nonsense"])
def test_a_server_on_another_machine_is_refused(url):
    with pytest.raises(ValueError, match="sends only to this machine"):
        serve.run(url)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"concurrency": 4, "rate": 1.0}, "choose one of concurrency, rate"),
        ({"concurrency": 0}, "concurrency must be"),
        ({"concurrency": math.nan}, "concurrency must be"),
        ({"due": []}, "due is empty"),
        ({"due": [0.0, math.nan]}, "due has a time that is not a number of seconds"),
        ({"due": [-1.0]}, "due has a time that is not a number of seconds"),
        ({"rate": 0.0}, "rate must be a number of requests a second above 0, not 0.0"),
        ({"rate": math.nan}, "rate must be .* above 0, not nan"),
        ({"rate": math.inf}, "rate must be .* above 0, not inf"),
        ({"trace": "conversation", "speed": 0.0}, "speed must be a number above 0, not 0.0"),
        ({"trace": "conversation", "speed": math.nan}, "speed must be a number above 0, not nan"),
        ({"trace": "conversation", "speed": math.inf}, "speed must be a number above 0, not inf"),
        ({"speed": 2.0}, "speed 2.0 plays a trace faster, and there is none"),
        ({"speed": 2.0, "rate": 1.0}, "speed 2.0 plays a trace faster, and there is none"),
        ({"timeout": math.nan}, "timeout must be above 0 seconds, not nan"),
        ({"trace": "rush-hour"}, "no trace rush-hour; committed ones: conversation"),
        ({"requests": 0}, "whole numbers from 1"),
        ({"warmup": -1}, "warmup must be a whole number from 0, not -1"),
        ({"generators": 0}, "generators must be a whole number from 1, not 0"),
        ({"input_len": 4}, "input_len and output_len go together"),
        ({"input_len": 4, "output_len": 0}, "lengths must be whole numbers of tokens from 1, not 4 and 0"),
        ({"input_len": 4, "output_len": 4, "scale": 2}, "exact lengths: leave scale out"),
        ({"input_len": 4, "output_len": 4, "trace": "conversation"}, "exact lengths: leave trace out"),
    ],
)
def test_invalid_settings_are_reported_by_name(wrong, message):
    with faked(at_once) as (url, _), pytest.raises(ConfigError, match=message):
        serve.run(url, quiet=True, **wrong)


@pytest.mark.parametrize("option", ["json_path", "plot_path"])
@pytest.mark.parametrize("where", ["folder", "under a file"])
def test_an_unwritable_file_is_reported_before_the_load(tmp_path, option, where):
    path = (tmp_path / "kept.json" / "a" if where == "under a file" else tmp_path / "a").with_suffix(
        ".json" if option == "json_path" else ".svg"
    )
    (path.mkdir if where == "folder" else path.parent.touch)()
    with faked(at_once) as (url, fake), pytest.raises(ConfigError, match=f"{path.name} cannot be written"):
        serve.run(url, requests=1, quiet=True, **{option: path})
    assert not fake.bodies


@pytest.mark.parametrize("name", ["picture.txt", "picture"])
def test_an_unknown_plot_format_is_reported_before_the_load(tmp_path, name):
    with faked(at_once) as (url, fake), pytest.raises(ValueError, match="saved as .svg, .png, .pdf, not as .*picture"):
        serve.run(url, requests=1, quiet=True, plot_path=tmp_path / name)
    assert not fake.bodies


def test_a_failed_run_keeps_the_older_record_and_writes_no_empty_one(dead_url, tmp_path):
    kept, new = tmp_path / "kept.json", tmp_path / "new.json"
    kept.write_text("{}")
    for path in (kept, new):
        with pytest.raises(ConnectionError):
            serve.run(dead_url, quiet=True, json_path=path)
    assert kept.read_text() == "{}" and not new.exists()


def test_an_unreachable_server_is_a_clear_error(dead_url):
    with pytest.raises(ConnectionError, match="minillm serve"):
        serve.run(dead_url, quiet=True)


def test_a_server_that_never_answers_ends_the_run():
    with faked(only_when_all_have_come(100)) as (url, _), pytest.raises(serve.LoadError, match="not over after 0.2 s"):
        serve.run(url, requests=2, concurrency=2, timeout=0.2, quiet=True)


def test_an_invalid_request_fails_the_measurement(server):
    with pytest.raises(serve.LoadError, match="context"):
        serve.run(server.url, workload="lilo", scale=1, requests=1, quiet=True)


def test_a_record_can_be_plotted(server):
    record = serve.run(server.url, workload="chat", scale=16, requests=4, concurrency=2, quiet=True)
    result = record["results"][0]
    ax = plots.latency(record)
    assert [label.get_text() for label in ax.get_legend().get_texts()] == ["p50", "p90", "p99"]
    heights = [bar.get_height() for bar in ax.containers[0]]
    assert heights[0] == pytest.approx(result["ttft_s"]["p50"] * 1e3)
    waits, reads = plots.requests(record).containers
    for bar, other, each in zip(waits, reads, result["each"], strict=True):
        assert bar.get_x() == each["due"] and other.get_x() == pytest.approx(each["first_token"])
        assert other.get_x() + other.get_width() == pytest.approx(each["end"])
