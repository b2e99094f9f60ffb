"""Traces under random schedules: `replay` and `tables` reconstruct exactly what the scheduler did."""

import itertools
import json
from collections import Counter
from itertools import groupby, pairwise

import numpy as np
import pytest

from minillm import LLM, SamplingParams, using
from minillm.kv_cache import BlockPool
from minillm.request import Request
from minillm.scheduler import Scheduler, policies
from minillm.trace import Trace, TraceError, replay, tables
from minillm.trace.record import FIELDS
from tests.trace.schedules import Schedule, detected, reconstructed

pytestmark = pytest.mark.explore


@pytest.mark.parametrize("block", range(5))
def test_replay_reconstructs_every_step_and_block_table_of_a_random_schedule(block):
    for seed in range(block * 20, block * 20 + 20):
        schedule = Schedule(seed).run(150)
        steps, held, reads = reconstructed(schedule.trace)
        assert steps == schedule.steps, f"seed {seed}"
        for step, (got, expected) in enumerate(zip(held, schedule.tables, strict=True)):
            assert got == expected, f"seed {seed}, step {step}"
        assert reads == schedule.reads


def test_the_random_schedules_contain_every_kind_of_event():
    seen = Counter(event["event"] for seed in range(100) for event in Schedule(seed).run(150).trace.events)
    assert seen.keys() == FIELDS.keys()


@pytest.mark.parametrize(
    "kind", [*("submit", "admit", "grow", "preempt", "finish", "skip", "chunk", "draft", "launch", "read")]
)
def test_a_lost_event_is_detected(kind):
    lost = 0
    for seed in range(200):  # 20 schedules, or as many as it takes to have such an event
        if seed >= 20 and lost:
            break
        options = {"max_num_batched_tokens": 1 + seed % 9, "num_blocks": 16, "block_size": 3}
        schedule = Schedule(seed, policy=policies.POLICIES["fcfs"](), **options).run(80)
        events = schedule.trace.events
        assert not detected(schedule, events)
        last = max((at for at, event in enumerate(events) if event["event"] == "launch"), default=0)
        for at, event in enumerate(events[:last]):
            if event["event"] != kind or (kind in ("submit", "finish") and not ran_after(events, at, last)):
                continue
            assert detected(schedule, events[:at] + events[at + 1 :]), f"seed {seed}: without {event}"
            lost += 1
    assert lost


def ran_after(events: list[dict], at: int, last: int) -> bool:
    """Whether losing a submission or an end is detectable: the request had a row, then or later."""
    request, kind = events[at]["request"], events[at]["event"]
    if kind == "finish":
        return events[at]["row"] >= 0
    return any(event["event"] == "admit" and event["request"] == request for event in events[at:last])


def test_duplicate_and_reordered_events_are_detected():
    for seed in range(20):
        schedule = Schedule(seed, policy=policies.POLICIES["fcfs"]()).run(60)
        events = schedule.trace.events
        launches = [at for at, event in enumerate(events) if event["event"] in ("launch", "grow", "admit")]
        for at in launches[:-1]:
            assert detected(schedule, [*events[: at + 1], *events[at:]])


def test_a_lost_read_is_told_at_the_next_one():
    events = [
        {"event": "begin", "rows": 1, "blocks": 4, "block_size": 4, "launched": -1},
        {"event": "submit", "request": "r", "prompt": 1},
        {"event": "admit", "step": 0, "request": "r", "row": 0, "known": 1, "computed": 0, "limit": 4, "blocks": [[0]]},
        *({"event": event, "step": step, "size": 1} for step in range(3) for event in ("launch", "read")),
    ]
    events = [{"time": 0.0} | event for event in events]
    assert [step.number for step in replay(events)] == [0, 1, 2]
    with pytest.raises(TraceError, match=r"event 6 \(read\) reads step 1: events before it are missing"):
        list(replay(events[:4] + events[5:]))


def test_an_event_before_the_start_is_rejected():
    events = Schedule(1).run(40).trace.events
    with pytest.raises(TraceError, match=r"event 1 \(\w+\) comes before the trace begins"):
        list(replay(events[1:]))


class Plain:
    """A learner's pool, which does not report evictions."""

    __slots__ = ("pool",)

    def __init__(self, num_blocks):
        self.pool = BlockPool(num_blocks)

    def __getattr__(self, name):
        return getattr(self.pool, name)

    def watch_evictions(self, callback):
        pass


def test_a_pool_that_reports_no_evictions_is_traced_without_them():
    evictions = 0
    for seed in range(30):
        schedule = Schedule(seed, pool=Plain).run(150)
        assert not detected(schedule, schedule.trace.events)
        evictions += any(event["event"] == "evict" for event in schedule.trace.events)
    assert evictions == 0


def test_freed_window_blocks_are_available_once_the_steps_that_see_them_finish():
    """Two groups, the second with a window: it gets its blocks later and frees some."""
    scheduler = Scheduler(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=16, block_size=2, num_blocks=9)
    trace = Trace()
    trace.watch(scheduler)
    add = trace._add
    add("submit", "a", 6)
    add("admit", 0, "a", 1, 6, 0, 9, np.array([[0, 1, 2], [3, -1, -1]]), 0)
    add("chunk", 0, np.array([1]), np.array([0]), np.array([2]), np.array([0]))
    add("launch", 0, 1)
    add("grow", np.array([1, 1]), np.array([1, 2]), np.array([[-1, -1], [4, 5]]))
    add("chunk", 1, np.array([1]), np.array([2]), np.array([4]), np.array([0]))
    trace.release(np.array([1, 1]), np.array([3, 4]), 1)
    add("launch", 1, 1)
    add("read", 0)
    add("read", 1)
    add("grow", np.array([1]), np.array([3]), np.array([[3], [6]]))
    add("launch", 2, 1)
    seen = list(tables(trace))
    assert [table.rows[1][1] for table in seen] == [
        [[0, 1, 2], [3]],
        [[0, 1, 2], [-1, -1, 5]],
        [[0, 1, 2, 3], [-1, -1, 5, 6]],
    ]
    assert seen[1].holders[3] == 1 and seen[1].leaving == [("a", [3, 4])]
    assert seen[2].states[4] == "free" and seen[2].holders[3] == 1 and seen[2].leaving == []


# ---- entries


class InTurn(Trace):  # records each call separately, evictions one by one
    def __init__(self):
        super().__init__()
        self.calls = []

    def _follow(self, pool):
        pool.watch_evictions(lambda block: (self.calls.append(("evict", block)), self._evicted.append(block)))

    def _add(self, event, *values):
        self.calls.append((event, None))
        super()._add(event, *values)


def test_events_of_one_entry_are_read_in_their_original_order():
    together = 0
    for seed in itertools.count():
        if seed >= 30 and together > 300:
            break
        trace = Schedule(seed, InTurn()).run(150).trace
        read = [(event["event"], event.get("block")) for event in trace.events if event["event"] != "share"]
        several = ("chunk", "draft", "reject", "release")  # one call, one event per row
        assert [key for key, run in groupby(read) for _ in (run if key[0] not in several else [0])] == trace.calls
        together += len(read) - len(trace._entries)


def test_evictions_for_one_admission_are_one_entry_and_one_event_per_block():
    scheduler = Scheduler(max_num_seqs=1, max_num_batched_tokens=40, max_model_len=40, block_size=4, num_blocks=9)
    trace = Trace()
    trace.watch(scheduler)
    for name, prompt in (("first", np.arange(32)), ("second", np.arange(100, 132))):
        scheduler.submit(Request(name, prompt, SamplingParams(max_tokens=1), limit=33))
        scheduler.complete(scheduler.schedule(), np.array([7]))
    assert [values for event, _, *values in trace._entries if event == "evict"] == [[[7, 6, 5, 4, 3, 2, 1]]]
    kinds = [event["event"] for event in trace.events]
    second = kinds.index("evict")
    assert kinds[second - 1 : second + 8] == ["submit"] + ["evict"] * 7 + ["admit"]


def test_shared_blocks_follow_the_admission_and_start_its_block_table():
    shares = 0
    for seed in range(30):
        schedule = Schedule(seed).run(150)
        events, tokens = schedule.trace.events, 0
        for admit, after in pairwise(events):
            assert (after["event"] == "share") == (admit["event"] == "admit" and admit["computed"] > 0)
            if after["event"] == "share":
                assert after["request"] == admit["request"] and after["row"] == admit["row"]
                shared = after["tokens"] // events[0]["block_size"]
                assert after["blocks"] == [group[:shared] for group in admit["blocks"]] and shared
                tokens += after["tokens"]
                shares += 1
        assert tokens == schedule.scheduler.prefix_hits
    assert shares > 100


# ---- in the engine


def test_an_engines_trace_contains_every_token_that_ran():
    trace = Trace()
    with LLM(trace=trace, max_num_batched_tokens=16, max_num_seqs=3, enable_prefix_caching=False) as llm:
        prompts = [[2, *range(50, 50 + n)] for n in (30, 5, 12, 40)]
        done = llm.generate(prompts, SamplingParams(max_tokens=7, temperature=0, ignore_eos=True))
        assert llm.stats()["steps"] == len(list(replay(trace)))
    ran, sampled = Counter(), Counter()
    for step in replay(trace):
        assert 0 <= step.launched <= step.read and sum(step.count) <= 16
        for name, count, samples in zip(step.request, step.count, step.samples, strict=True):
            ran[name] += count
            sampled[name] += samples
    for prompt, completion in zip(prompts, done, strict=True):
        assert ran[completion.request_id] == len(prompt) + 6 and sampled[completion.request_id] == 7
    finished = [event for event in trace.events if event["event"] == "finish"]
    assert {event["reason"] for event in finished} == {"length"} and len(finished) == 4


def test_a_decode_step_is_two_events_however_many_rows_run():
    for rows in (2, 30):
        trace = Trace()
        with LLM(trace=trace, enable_prefix_caching=False) as llm:
            llm.generate([[2, 5]] * rows, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
        events = [event["event"] for event in trace.events]
        first = events.index("read")
        last = events.index("finish")
        assert Counter(events[first:last]).keys() == {"launch", "read"}


def test_a_failure_is_in_the_file_when_it_is_raised(tmp_path):
    path = tmp_path / "trace.jsonl"
    with LLM(trace=str(path)) as llm:
        llm.generate([2, 5], SamplingParams(max_tokens=2))

        def broken(*arguments, **options):
            raise ArithmeticError("a learner's mistake")

        with using(rms_norm=broken), pytest.raises(ArithmeticError):
            llm.generate([2, 5, 6], SamplingParams(max_tokens=2))
        events = Trace.read(path).events
        assert [event["event"] for event in events[-3:]] == ["launch", "finish", "reset"]
        llm.generate([2, 5, 6], SamplingParams(max_tokens=2))
    steps = list(replay(Trace.read(path)))
    assert [(step.number, step.read is None) for step in steps] == [(n, n == 2) for n in range(5)]


def test_a_trace_can_only_be_attached_to_an_idle_engine():
    schedule = Schedule(4).run(60)
    while not schedule.scheduler.has_work:  # a random request may be too long for the pool, and is refused
        schedule.submit()
    with pytest.raises(ValueError, match="while nothing runs"):
        Trace().watch(schedule.scheduler)


def test_commands_write_traces_and_plans_and_records_omit_the_path(tmp_path):
    from typer.testing import CliRunner

    from minillm.cli import app
    from minillm.config import EngineConfig, Traffic
    from minillm.model.config import PRESETS
    from minillm.tuning.build import options_of

    for command in (["generate", "once"], ["bench", "offline", "--workload", "single", "--requests", "1"]):
        path = tmp_path / f"{command[0]}.jsonl"
        options = ["--scale", "64", "--repeat", "1"] if command[0] == "bench" else ["--max-tokens", "3"]
        result = CliRunner().invoke(app, [*command, *options, "--trace", str(path)])
        assert result.exit_code == 0, result.output
        assert list(replay(Trace.read(path)))
        assert command[0] == "generate" or str(path) not in json.dumps(
            json.loads(result.stdout.splitlines()[-1])["results"]
        )
    config = EngineConfig(trace=str(path))
    assert "trace" not in options_of(config, PRESETS["gemma-2b"], Traffic(8, 8, 8), "cuda")


def test_a_trace_continues_when_user_supplied_classes_replace_the_scheduler():
    class Reader(BlockPool):
        pass

    trace, params = Trace(), SamplingParams(max_tokens=3, ignore_eos=True)
    with LLM(trace=trace) as llm:
        llm.generate([2, 5], params)
        with using(block_pool=Reader, policy=policies.POLICIES["shortest"]):
            llm.generate([2, 6], params)
        llm.generate([2, 7], params)
        assert [step.number for step in replay(trace)] == list(range(llm.stats()["steps"]))
    assert Counter(event["event"] for event in trace.events)["begin"] == 3
    assert len(list(tables(trace))) == len(list(replay(trace)))
