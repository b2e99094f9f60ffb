"""The workloads are the same requests everywhere, and stay the same when they are made smaller."""

import hashlib
import json

import pytest

from minillm.bench import workloads

MIXED_64 = "20117fd63b72c04c"
SINGLE = "d031a17062c007b9"


def digest(requests):
    content = [(request.prompt, request.output_tokens) for request in requests]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def test_names_counts_and_lengths_are_those_the_figures_are_about():
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


def test_no_length_is_scaled_away():
    assert workloads.totals(workloads.make("single", 10, scale=10_000)) == {
        "requests": 1,
        "input_tokens": 1,
        "output_tokens": 1,
    }


def test_ids_are_drawn_from_the_whole_vocabulary():
    ids = {token for request in workloads.make("chat", 64, requests=50) for token in request.prompt}
    assert ids == set(range(64))


def test_an_unknown_workload_lists_those_there_are():
    with pytest.raises(workloads.UnknownWorkload, match="'chatty'.*single_128_256_x1"):
        workloads.find("chatty")
    with pytest.raises(ValueError, match="scale"):
        workloads.make("single", 10, scale=0)
