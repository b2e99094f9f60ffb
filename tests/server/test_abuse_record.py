"""What the committed record of abuse shows: the server held."""

from minillm.bench import records

CASES = {row["case"]: row for row in records.read("cpu/abuse")["results"]}
HELD_UP = 0.25  # seconds: the longest that a stream may be


def test_malformed_requests_get_no_server_error_hold_up_no_stream_and_leave_no_memory():
    row = CASES["malformed"]
    assert row["requests"] >= 2000 and row["server_errors"] == row["tracebacks"] == 0
    assert "0" not in row["statuses"] and sum(row["statuses"].values()) == row["requests"], "each has an answer"
    assert row["stream_gap_s"] < HELD_UP and row["answers_again"] == 200
    assert row["worker_mb"]["after"] - row["worker_mb"]["before"] < 20
    for name, body in CASES["bodies"].items():
        if isinstance(body, dict):
            assert body["status"] < 500 and body["stream_gap_s"] < HELD_UP, name


def test_nothing_is_left_of_clients_that_disconnect():
    for name, count in (("disconnects", 1000), ("slow_readers", 0)):
        row = CASES[name]
        assert row.get("clients", 0) >= count
        assert not any(row["left"][gauge] for gauge in row["left"] if gauge != "idle_after_s")
    assert CASES["disconnects"]["answers_again"] == 200 and CASES["disconnects"]["tracebacks"] == 0
    readers = CASES["slow_readers"]
    assert readers["cut_off"] >= readers["connections"] * readers["rounds"] > 0
    _, first, *_, last = (each["engine_mb"] for each in CASES["slow_readers"]["memory_after_each_round"])
    assert last - first < 50, "later rounds need no more memory"


def test_overload_slows_down_the_admitted_ones_less_than_twice_and_refuses_the_rest_at_once():
    row = CASES["overload"]
    flood = row["overload"]
    assert flood["times"] >= 10 and flood["seconds"] >= 120
    assert row["itl_p99_ratio"] <= 2 and flood["statuses"].keys() == {"200", "429"}
    assert flood["whole"] == flood["statuses"]["200"] and flood["refused_p99_ms"] < 1000
    for process in ("engine_mb", "worker_mb"):
        assert row["memory"]["peak"][process] - row["memory"]["before"][process] < 20


def test_slow_clients_are_cut_off_and_descriptors_may_run_out():
    assert CASES["slow_headers"]["left"] == 0
    bodies = CASES["unfinished_bodies"]
    assert sum(bodies["statuses"].values()) == bodies["connections"] and bodies["statuses"].keys() <= {"408", "429"}
    files = CASES["descriptors"]
    assert files["worker_cpu_share"] < 0.2 and not files["health_failed"] and files["after_they_left"] == 200


def test_a_killed_worker_is_replaced_and_a_killed_server_leaves_nothing():
    row = CASES["worker_killed"]
    assert row["replaced_after_s"] is not None and row["then"] == {"200": 20}
    assert row["whole"] + row["cut"] == row["streams"]
    assert CASES["killed_while_starting"]["answers_again"] == 200
    assert CASES["server_killed"]["processes_left"] == 0 and CASES["server_killed"]["port"] == "free"


def test_a_killed_or_hung_engine_is_replaced_and_its_clients_are_told():
    for name in ("engine_killed", "engine_hung"):
        row = CASES[name]
        assert row["streams"] == row["with_error_event"] == row["with_done"]
        assert row["answers_again_after_s"] is not None and row["refused_while_down"] > 0
        assert row["same_workers"] and row["new_engine"] and row["tracebacks"] == 0


def test_streams_end_in_order_at_shutdown_and_a_full_disk_ends_nothing():
    for row in (each for each in CASES["drain"].values() if isinstance(each, dict)):
        assert row["streams"] == row["with_error_event"] == row["with_done"] == row["framed_to_the_end"]
        assert row["in_openais_form"] == sum(row["not_streamed"].values()) and row["tracebacks"] == 0
    assert CASES["full_disk"]["statuses"].keys() == {"200"} and CASES["full_disk"]["exit_status"] == 0
