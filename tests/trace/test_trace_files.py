"""A trace written to a file holds what the one in memory holds, whatever cuts or breaks the file."""

import errno
import json

import pytest

from minillm import LLM, SamplingParams, errors
from minillm.trace import Trace, TraceError, replay
from tests.trace.schedules import Schedule, detected, reconstructed

pytestmark = pytest.mark.explore


def test_a_trace_file_holds_the_same_events_as_memory(tmp_path):
    for seed in range(10):
        schedule = Schedule(seed, Trace(tmp_path / "trace.jsonl")).run(150)
        schedule.trace.close()
        again = Trace.read(tmp_path / "trace.jsonl")
        assert reconstructed(again) == reconstructed(schedule.trace)
        assert not detected(schedule, again.events)
        again.write(tmp_path / "copy.jsonl")
        assert (tmp_path / "copy.jsonl").read_bytes() == (tmp_path / "trace.jsonl").read_bytes()
        assert again.events == schedule.trace.events


def test_file_and_memory_agree_and_each_line_is_one_entry(tmp_path):
    for seed in range(10):
        memory, file = Schedule(seed).run(150).trace, Schedule(seed, Trace(tmp_path / "trace.jsonl")).run(150).trace
        file.close()
        untimed = [[event | {"time": 0} for event in trace.events] for trace in (memory, file)]
        assert untimed[0] == untimed[1]
        lines = [json.loads(line) for line in file.path.read_text().splitlines()]
        assert [line[0] for line in lines] == [entry[0] for entry in memory._entries]
        memory.write(tmp_path / "copy.jsonl")
        assert Trace.read(tmp_path / "copy.jsonl").events == memory.events


def test_times_are_seconds_since_the_trace_started(tmp_path, monkeypatch):
    monkeypatch.setattr("time.perf_counter_ns", iter(range(10**12, 10**13, 3 * 10**9 // 2)).__next__)
    trace = Schedule(1).trace
    trace.arrived(0)
    trace.write(tmp_path / "copy.jsonl")
    for each in (trace, Trace.read(tmp_path / "copy.jsonl")):
        assert [event["time"] for event in each.events] == [1.5, 3.0]


def test_an_unfinished_file_is_readable_when_cut_at_any_byte(tmp_path):
    path = tmp_path / "trace.jsonl"
    schedule = Schedule(3, Trace(path)).run(60)
    schedule.trace.close()
    whole = path.read_bytes()
    for end in (*range(0, len(whole), 97), len(whole)):
        path.write_bytes(whole[:end])
        steps = [step.number for step in replay(Trace.read(path))]
        assert steps == [number for number, *_ in schedule.steps][: len(steps)]
    assert len(steps) == len(schedule.steps), "the whole file has all of them"


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "7",
        '["admit"]',
        '["lunch", 0]',
        '["read", "soon", 1]',
        *('["evict", 0, 1]', '["evict", 5]'),
        '["chunk", 0, 1, [1], [2], [], [4]]',
        '{"event": "read", "time": 0, "step": 1}',
    ],
)
def test_an_invalid_line_is_reported(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    schedule = Schedule(3, Trace(path))
    while schedule.scheduler.newest < 10:
        schedule.run(30)
    schedule.trace.close()
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:4], line, *lines[4:]]) + "\n")
    with pytest.raises(TraceError, match=r"line 5 is not a trace entry, \[event, microseconds, ...\]: '"):
        Trace.read(path)


def test_memory_stays_bounded_while_a_file_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("minillm.trace.record.CHUNK", 50)
    schedule = Schedule(5, Trace(tmp_path / "trace.jsonl"))
    most = 0
    while (tmp_path / "trace.jsonl").stat().st_size < 10_000:
        schedule.run(20)
        most = max(most, len(schedule.trace._entries))
    assert most < 150
    assert reconstructed(schedule.trace)[0] == schedule.steps


def test_an_unwritable_path_is_rejected_before_the_model_loads(tmp_path):
    with pytest.raises(errors.ConfigError, match=r"trace='.*nowhere/trace.jsonl' cannot be written: No such file"):
        LLM("no-such-model", trace=str(tmp_path / "nowhere" / "trace.jsonl"))


def test_a_full_disk_ends_only_the_trace(tmp_path):
    class Full:
        def writelines(self, lines):
            raise OSError(errno.ENOSPC, "No space left on device")

    trace = Trace(tmp_path / "trace.jsonl")
    with LLM(trace=trace) as llm:
        llm.generate("once", SamplingParams(max_tokens=2))
        file, trace._file = trace._file, Full()
        with pytest.warns(RuntimeWarning, match=r"trace.jsonl ends here: No space left"):
            done = llm.generate("once", SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(done[0].token_ids) == 3
        assert len(llm.generate("more", SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
        file.close()
    assert not trace._entries and list(replay(Trace.read(tmp_path / "trace.jsonl")))
