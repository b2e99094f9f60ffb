"""The batching benchmark counts what really happened and compares settings that differ in one thing."""

import json

import pytest

from minillm import LLM
from minillm.bench import batching, records, waste, workloads
from minillm.bench.workloads import BenchRequest

WORK = [BenchRequest([1] * prompt, output) for prompt, output in ((40, 9), (5, 60), (70, 3), (16, 16), (33, 31)) * 6]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    rows = [
        {"arrival": i / 100, "input_tokens": 20 + i, "output_tokens": 2 + i % 5, "prefix_id": 0, "prefix_tokens": 18}
        for i in range(12)
    ]
    path = tmp_path_factory.mktemp("traces") / "small.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_record_has_all_four_parts_with_every_run(model_directory, trace, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(batching, "conversations", lambda vocab: [[BenchRequest([3] * 20, 4)], [BenchRequest([5], 2)]])
    monkeypatch.setattr(batching, "together", lambda vocab: [BenchRequest([7] * 40 + [i], 2) for i in range(4)])
    options = {"traffic": trace, "rows": 4, "scale": 1, "chunk": 16, "repeat": 2, "device": "cpu"}
    path = tmp_path / "batching.json"
    record = batching.run(model_directory, **options, load_format="dummy", block_size=8, json_path=path)
    assert record == json.loads(path.read_text()) == json.loads(capsys.readouterr().out.splitlines()[-1])
    static, in_flight = batching.of(record, "throughput")
    assert (static["batching"], in_flight["batching"]) == ("static", "in-flight")
    assert in_flight["steps"] < static["steps"], "12 requests of unequal lengths in 4 rows"
    assert in_flight["times_static"] == pytest.approx(static["seconds"] / in_flight["seconds"], abs=1e-3)
    chunked, whole = batching.of(record, "latency")
    assert (chunked["prefill"], chunked["budget"], whole["prefill"]) == ("chunked", 16, "whole")
    assert whole["budget"] >= max(row["arrival"] and 31 for row in map(json.loads, trace.read_text().splitlines()))
    assert all(len(row["runs"]) == 2 for row in (static, in_flight, chunked, whole))
    assert {row["traffic"]: row["computed_with"] for row in batching.of(record, "prefix")} == {
        "trace": 12 * 20 + 66 - 11 * 16,  # the 18 shared tokens fill two blocks, computed once
        "conversations": 20 + 25 - 16,  # 20 prompt and 3 output tokens are cached: two full blocks
        "at once": 4 * 41 - 3 * 40,
    }
    assert len(batching.of(record, "memory")) == 5 and record["block_size"] == 8
    assert records.model_of(record) == record["model"] == f"{model_directory.name}, random weights"
    assert "times static" in batching.table(record)


def test_afterwards_the_engine_has_its_own_policy_and_an_empty_cache(model_directory):
    with LLM(model_directory, load_format="dummy", device="cpu") as llm:
        scheduler = llm.engine.scheduler
        before = scheduler.policy, scheduler.max_num_batched_tokens, scheduler.prefix_caching
        with batching.scheduled(scheduler, policy="static", budget=7, caching=True) as used:
            assert used is scheduler and scheduler.max_num_batched_tokens == 7
            llm.generate([[1] * 40])
            assert llm.stats()["blocks_cached"]
        assert (scheduler.policy, scheduler.max_num_batched_tokens, scheduler.prefix_caching) == before
        assert not llm.stats()["blocks_cached"]


def test_requests_are_sent_when_due_and_all_their_tokens_are_received(model_directory):
    work = [BenchRequest([1, 2, 3], 5, due) for due in (0.0, 0.01, 0.3)]
    with LLM(model_directory, load_format="dummy", device="cpu") as llm:
        seen = batching.play(llm.engine, work)
    assert [each.output_tokens for each in seen] == [5, 5, 5]
    assert all(each.due <= each.sent <= each.arrivals[0][0] <= each.end for each in seen)


def test_64_simultaneous_requests_with_512_common_tokens_save_four_fifths_of_prefill(model_directory):
    """As in the record for the embedded model: the first request computes what the others share in the same step."""
    for row in batching.of(json.loads((workloads.TRACES.parent / "results/cpu/batching.json").read_text()), "prefix"):
        if row["traffic"] == "at once":
            assert row["requests"] == 64 and row["saved"] >= 0.8
    prompts = [each.prompt for each in batching.together(256)]
    assert len({tuple(prompt[:512]) for prompt in prompts}) == 1 and len({tuple(prompt) for prompt in prompts}) == 64
    assert all(513 <= len(prompt) <= 576 for prompt in prompts)


@pytest.mark.parametrize("slots", [128, 1000])
def test_memory_shares_add_up_and_blocks_waste_the_least(slots):
    options = {"slots": slots, "block_size": 8, "max_model_len": 100}
    rows = {row["cache"]: row for row in waste.compare(WORK, **options)}
    for row in rows.values():
        assert sum(row[name] for name in waste.SHARES) == pytest.approx(1, abs=4e-4)
        assert all(sum(shares) == pytest.approx(1, abs=4e-4) for shares in _timeline(row))
        assert all(0 <= share <= 1 for shares in _timeline(row) for share in shares)
    used = [row["used"] for row in rows.values()]
    assert used[0] < used[1] <= used[2] < used[3], "longest, power of two, exact, blocks"
    longest, power, exact, blocks, shared = rows.values()
    assert longest["running"] <= slots // 100 and exact["internal"] == 0 and power["internal"] > 0
    assert blocks["seen"] == blocks["used"] and shared["seen"] > shared["used"]


def _timeline(row):
    return zip(*(row["timeline"][name] for name in waste.SHARES), strict=True)


def test_memory_filled_exactly_by_one_request_is_counted_per_token():
    work = [BenchRequest([1] * 10, 6)] * 2  # 15 cached tokens at the end
    moments = list(waste.contiguous(work, 20, waste.power_of_two, 100))
    assert [(m.used, m.reserved, m.internal, m.external, m.waiting) for m in moments[:6]] == [
        (10 + i, 5 - i, 3, 2, 1) for i in range(6)
    ]
    assert len(moments) == 12 and moments[6].waiting == 0
    paged = list(waste.blocks(work, 20, 4, 20, shared=False))
    assert (paged[0].used, paged[0].reserved, paged[0].internal, paged[0].external) == (10, 2, 0, 8)
    assert (paged[5].used, paged[5].reserved, paged[5].internal, paged[5].external) == (15, 0, 1, 4)


def test_a_request_larger_than_the_memory_is_reported():
    with pytest.raises(ValueError, match="49 tokens does not fit a memory of 32"):
        list(waste.contiguous([BenchRequest([1] * 40, 10)], 32, waste.exact, 100))


def test_settings_under_comparison_cannot_be_overridden(model_directory):
    with pytest.raises(ValueError, match="--rows and --chunk"):
        batching.run(model_directory, policy="static")
    with pytest.raises(ValueError, match="repeat must be"):
        batching.run(model_directory, repeat=0)


def test_requests_longer_than_the_context_are_reported_before_measuring(model_directory, tmp_path, monkeypatch):
    monkeypatch.setattr(batching, "throughput", lambda *arguments: pytest.fail("it measures already"))
    path = tmp_path / "long.jsonl"
    row = {"arrival": 1.0, "input_tokens": 5000, "output_tokens": 2, "prefix_id": 0, "prefix_tokens": 0}
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match="2048"):
        batching.run(model_directory, traffic=path, load_format="dummy", device="cpu")


def test_a_run_with_recomputed_prefill_is_rejected(model_directory):
    with LLM(model_directory, load_format="dummy", device="cpu", num_blocks=5, max_num_seqs=2) as llm:
        work = [BenchRequest([i] * 30, 16, due=1.0) for i in range(2)]
        with pytest.raises(ValueError, match="num_blocks=5"):
            batching.prefix(llm, work)
