"""What lesson 09 says about memory is what its cells print, what its traffic has, and what the engine holds."""

import json

import pytest

from minillm.bench import records, workloads
from minillm.course.lesson_09 import paging
from minillm.folders import DATA
from minillm.trace import tables
from tests.course.lesson import solved

lesson = solved("09")


def test_how_much_contiguous_caches_waste():
    lesson.says(
        "With the longest reservation, more than four fifths of the memory holds nothing.",
        "Even the oracle, which cannot exist, leaves a third unused",
        "On this traffic, more than four fifths of the memory held nothing.",
    )
    longest, oracle = (
        lesson.number(rf"^contiguous: {name}: .* measured ([\d.]+)%$")
        for name in ("the longest possible", r"the exact length \(oracle\)")
    )
    assert longest < 20 and oracle == pytest.approx(200 / 3, abs=1)


def test_the_traffics_prefixes_and_its_longest_request():
    lesson.says(
        "Two thirds of the 400 requests begin with one of eight common prefixes of 48 to 512 tokens.",
        "With 96 blocks, only a few more than the longest request needs (83)",
    )
    lines = (DATA / "traces" / "conversation.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    shared = {row["prefix_id"]: row["prefix_tokens"] for row in rows if row["prefix_id"] is not None}
    assert len(rows) == 400 and len(shared) == 8
    assert (min(shared.values()), max(shared.values())) == (48, 512)
    assert sum(row["prefix_id"] is not None for row in rows) / len(rows) == pytest.approx(2 / 3, abs=0.01)
    longest = max(len(each.prompt) + each.output_tokens for each in workloads.replay("conversation", 4096))
    assert -(-longest // 16) == 83


def test_a_small_pool_that_evicts_the_end_first_finds_more():
    lesson.says(
        "With 1,024 blocks the pool finds as much as the set that never forgets.",
        "it still finds more than half as much, and evicting the end first finds 15% more than evicting the beginning",
    )
    kept = lesson.number(r"^prompt tokens found: .* measured ([\d.]+)%$")
    end, beginning = (lesson.numbers(rf"^{name} evicted first +([\d.]+) .* ([\d.]+)$") for name in ("end", "beginning"))
    assert end[1] == beginning[1] == kept
    assert kept / 2 < end[0] == pytest.approx(1.15 * beginning[0], rel=0.01)


def test_running_requests_see_more_tokens_than_there_are_slots():
    lesson.says("Together, the running requests see about 1.5 times as many tokens as the memory has slots.")
    assert lesson.number(r"^tokens in all tables .* slots: (\d+)%$") == pytest.approx(150, abs=5)


def held(trace, group: int) -> int:
    """The most blocks that the only request of a trace held in a layer group."""
    rows = [table[group] for step in tables(trace) for _, table in step.rows.values()]
    return max(sum(block >= 0 for block in table) for table in rows)


def test_a_window_of_16_tokens_never_needs_more_than_three_blocks_of_8():
    lesson.says("it never holds more than three")
    trace = paging.local_and_global()
    assert held(trace, 0) == 3 < held(trace, 1)


def test_gemma_3_4bs_layers():
    lesson.says("34 layers, 29 of them with a window of 1,024 tokens", "here 7 groups of 5 layers, and one of the 35")
    windows = paging.gemma_3_4b().windows
    assert len(windows) == 34 and windows.count(1024) == 29 and windows.count(None) == 5
    tokens, kept, with_windows = lesson.numbers(r"^ *(1,024) +([\d.]+) GB +([\d.]+) GB")
    assert with_windows / kept == pytest.approx(35 / 34, abs=0.06)


def test_what_is_kept_of_an_endless_text():
    lesson.says(
        "a text of 8,192 tokens (four times the context) is scored at 384 positions",
        "in this engine up to 1,056",
        "keeping only the newest tokens is as good as recomputing them, and keeping everything is *worse*",
        "Sinks make no difference here",
    )
    rows = {row["workload"].removeprefix("streaming-"): row for row in records.read("cpu/streaming")["results"]}
    assert {(row["length"], row["context"], row["tokens"]) for row in rows.values()} == {(8192, 2048, 384)}
    assert rows["sinks"]["blocks_of_a_row"] * 16 == 1056
    relative = {name: row["beside_recomputed"] for name, row in rows.items()}
    assert relative["no-sinks"] == pytest.approx(1, abs=0.001) and relative["sinks"] == pytest.approx(1, abs=0.001)
    assert relative["dense"] > 1.1
