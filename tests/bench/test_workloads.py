"""Workloads are the same requests on every machine and keep their shape when scaled down."""

import hashlib
import json
import statistics

import pytest

from minillm.bench import workloads
from minillm.errors import ConfigError

MIXED_64 = "20117fd63b72c04c"
SINGLE = "d031a17062c007b9"


def digest(requests):
    content = [(request.prompt, request.output_tokens) for request in requests]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def test_names_counts_and_lengths_match_the_published_figures():
    expected = {
        "single_128_256_x1": (1, 128, 256),
        "chat_128_128_x3000": (3000, 384_000, 384_000),
        "silo_128_2048_x512": (512, 65_536, 1_048_576),
        "liso_2048_128_x512": (512, 1_048_576, 65_536),
        "lilo_2048_512_x256": (256, 524_288, 131_072),
    }
    assert set(workloads.WORKLOADS) == {*expected, "mixed_100-1024_x1024"}
    for name, counts in expected.items():
        totals = workloads.totals(workloads.make(name, 1000))
        assert tuple(totals.values()) == counts, name


def test_mixed_lengths_fill_their_range_evenly():
    requests = workloads.make("mixed", 1000)
    for lengths in ([len(r.prompt) for r in requests], [r.output_tokens for r in requests]):
        assert 100 <= min(lengths) < 110 and 1014 < max(lengths) <= 1024
        assert abs(sum(lengths) / len(lengths) - 562) < 30


def test_the_same_name_gives_the_same_requests_on_every_machine():
    assert digest(workloads.make("mixed", 4096, scale=8, requests=64)) == MIXED_64
    assert digest(workloads.make("single", 256_000)) == SINGLE


def test_a_scaled_or_cut_workload_keeps_its_proportions():
    whole = workloads.make("mixed", 1000)
    small = workloads.make("mixed", 1000, scale=8, requests=64)
    assert len(small) == 64
    assert [len(r.prompt) for r in small] == [len(r.prompt) // 8 for r in whole[:64]]
    assert [r.output_tokens for r in small] == [r.output_tokens // 8 for r in whole[:64]]


def test_no_length_is_scaled_to_zero():
    assert workloads.totals(workloads.make("single", 10, scale=10_000)) == {
        "requests": 1,
        "input_tokens": 1,
        "output_tokens": 1,
    }


def test_ids_are_drawn_from_the_whole_vocabulary():
    ids = {token for request in workloads.make("chat", 64, requests=50) for token in request.prompt}
    assert ids == set(range(64))


def test_an_unknown_workload_error_lists_the_available_ones():
    with pytest.raises(ConfigError, match="'chatty'.*single_128_256_x1"):
        workloads.find("chatty")
    with pytest.raises(ValueError, match="scale"):
        workloads.make("single", 10, scale=0)


def test_poisson_arrivals_have_their_rate_and_are_memoryless():
    work = workloads.make("chat", 10) * 7
    due = [request.due for request in workloads.poisson(work, 5.0)]
    gaps = [late - early for early, late in zip([0.0, *due], due, strict=False)]
    assert min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(1 / 5, rel=0.03)
    assert statistics.pstdev(gaps) == pytest.approx(1 / 5, rel=0.05), (
        "the standard deviation of the gaps must equal their mean"
    )
    late = [gap - 0.4 for gap in gaps if gap > 0.4]
    assert statistics.fmean(late) == pytest.approx(1 / 5, rel=0.1), (
        "the remaining gap must not depend on the time already waited"
    )


def test_the_seed_changes_arrivals_but_not_prompts():
    work = workloads.make("chat", 100, scale=16, requests=9)
    slow, fast = workloads.poisson(work, 2.0), workloads.poisson(work, 4.0)
    assert [request.due for request in slow] == pytest.approx([2 * request.due for request in fast])
    assert [request.due for request in workloads.poisson(work, 2.0, seed=1)] != [request.due for request in slow]
    assert [(r.prompt, r.output_tokens) for r in slow] == [(r.prompt, r.output_tokens) for r in work]


def test_a_replayed_trace_keeps_times_lengths_and_shared_prefixes(tmp_path):
    rows = [
        {"arrival": 0.5, "input_tokens": 40, "output_tokens": 9, "prefix_id": 1, "prefix_tokens": 32},
        {"arrival": 1.0, "input_tokens": 16, "output_tokens": 1, "prefix_id": None, "prefix_tokens": 0},
        {"arrival": 4.0, "input_tokens": 36, "output_tokens": 4, "prefix_id": 1, "prefix_tokens": 32},
        {"arrival": 5.0, "input_tokens": 36, "output_tokens": 4, "prefix_id": 2, "prefix_tokens": 32},
    ]
    path = tmp_path / "rush.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    work = workloads.replay(path, 1000, speed=2.0)
    assert [request.due for request in work] == [0.25, 0.5, 2.0, 2.5]
    assert [(len(r.prompt), r.output_tokens) for r in work] == [(40, 9), (16, 1), (36, 4), (36, 4)]
    one, other, two, stranger = (request.prompt for request in work)
    assert one[:32] == two[:32] and one[32:36] != two[32:36] and other != one[:16]
    assert stranger[:32] != one[:32], "another prefix"
    assert workloads.replay(path, 1000, seed=1)[0].prompt[:32] != one[:32]
    small = workloads.replay(path, 1000, scale=4, requests=2)
    assert [(len(r.prompt), r.output_tokens, r.due) for r in small] == [(10, 2, 0.5), (4, 1, 1.0)]
    assert small[0].prompt[:8] == one[:8]


def test_the_committed_trace_is_replayed_completely():
    work = workloads.replay("conversation", 4096)
    assert len(work) == 400
    assert all(0 <= token < 4096 for request in work for token in request.prompt)
    assert [request.due for request in work] == sorted(request.due for request in work)
