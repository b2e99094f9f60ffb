"""Traces under random schedules: `replay` and `tables` reconstruct exactly what the scheduler did."""

import errno
import json
from collections import Counter
from itertools import groupby, pairwise

import numpy as np
import pytest

from minillm import LLM, SamplingParams, errors, using
from minillm.kv_cache import BlockPool
from minillm.request import Request, RequestOptions
from minillm.scheduler import Scheduler, policies
from minillm.trace import Trace, TraceError, replay, tables
from minillm.trace.record import FIELDS
from tests.chance import SEED

pytestmark = pytest.mark.explore

STOP, LONGEST = 7, 40
BEGINNING = [at * 5 % 11 for at in range(20)]


class LeavesSomeOut(Scheduler):
    """Skips some runnable rows, as a policy may."""

    def _share_budget(self, rows):
        rows, queries, *rest = super()._share_budget(rows)
        kept = np.arange(len(rows)) % 3 != self.launched % 3
        kept[:1] = True
        return rows[kept], queries[kept], *rest


class Schedule:
    """A scheduler without a model under a random schedule; records what each step really did."""

    def __init__(self, seed: int, trace: Trace | None = None, pool=BlockPool, **fixed):
        rng = self.rng = np.random.default_rng(SEED + seed)
        options = {
            "max_num_seqs": int(rng.integers(1, 7)),
            "max_num_batched_tokens": int(rng.integers(1, 65)),
            "block_size": int(rng.integers(1, 5)),
            "num_blocks": int(rng.integers(8, 32)),
            "windows": [(None,), (None,), (None, None), (6, None), (3,), (None, 5, 5)][rng.integers(6)],
            "prefix_caching": bool(rng.random() < 0.8),
            "policy": policies.POLICIES[str(rng.choice([*policies.POLICIES]))](),
        } | fixed
        self.run_ahead = int(rng.integers(0, 4))
        kind = Scheduler if seed % 2 else LeavesSomeOut
        self.scheduler = kind(max_model_len=LONGEST, **options)
        self.scheduler.pool = pool(options["num_blocks"])
        self.trace = trace or Trace()
        self.trace.watch(self.scheduler)
        self.in_flight, self.requests, self.steps, self.tables, self.reads = [], [], [], [], set()

    def submit(self) -> None:
        rng = self.rng
        own = rng.integers(0, 11, rng.integers(1, 5)).tolist()
        prompt = BEGINNING[: rng.integers(0, len(BEGINNING) + 1)] + own
        output = int(rng.integers(1, 13))
        request = Request(
            request_id=f"r{len(self.requests)}",
            prompt=np.array(prompt, np.int32),
            params=SamplingParams(max_tokens=output),
            limit=len(prompt) + output,
            stop_ids=(STOP,),
            options=RequestOptions(use_prefix_cache=bool(rng.random() < 0.9), priority=int(rng.integers(0, 3))),
        )
        try:
            self.scheduler.submit(request)
            self.requests.append(request)
        except ValueError:
            pass  # needs more blocks than exist

    def launch(self) -> None:
        scheduler = self.scheduler
        step = scheduler.schedule()
        if step is None:
            return
        self.in_flight.append(step)
        names = [scheduler.requests[row].request_id for row in step.rows]
        prompts = np.array([len(scheduler.requests[row].prompt) for row in step.rows])
        decodes = (step.queries == 1) & step.samples & (step.starts >= prompts)
        lists = (step.rows, step.starts, step.queries, step.samples, np.where(decodes, "decode", "prefill"))
        self.steps.append((step.number, names, *(each.tolist() for each in lists)))
        rows = {r.row: (r.request_id, table_of(scheduler.tables, r.row)) for r in scheduler.requests if r is not None}
        pool = scheduler.pool
        cached = set(pool._cached)
        states = ["used" if n else "cached" if b in cached else "free" for b, n in enumerate(pool.references)]
        leaving = sorted(block for _, _, blocks in scheduler._fence for block in blocks)
        self.tables.append((rows, states, list(pool.references), leaving))

    def read(self) -> None:
        self.trace.write_in_time()  # as the engine does
        step = self.in_flight.pop(0)
        self.reads.add(step.number)
        self.scheduler.complete(step, self.rng.integers(0, 11, int(step.samples.sum())))

    def run(self, events: int) -> "Schedule":
        for _ in range(events):
            draw = self.rng.random()
            waiting = [request for request in self.requests if request.finish_reason is None]
            if draw < 0.25:
                self.submit()
            elif draw < 0.29 and waiting:
                self.scheduler.finish(waiting[self.rng.integers(len(waiting))], "abort")
            elif draw < 0.30:
                self.in_flight.clear()
                pool = self.scheduler.pool
                self.scheduler.reset(waiting, type(pool)(pool.num_blocks))
            elif draw < 0.75 and len(self.in_flight) <= self.run_ahead:
                self.launch()
            elif self.in_flight:
                self.read()
            self.scheduler.check()
        return self


def table_of(held, row: int) -> list[list[int]]:
    """[groups][n], -1 where a block was freed."""
    table = []
    for group in range(held.groups):
        gone, count = int(held.gone[group, row]), int(held.held[group, row])
        table.append([-1] * gone + held.blocks[group, row, gone:count].tolist())
    return table


def reconstructed(trace) -> tuple[list, list, set]:
    steps = [(s.number, s.request, s.row, s.start, s.count, s.samples, s.kind) for s in replay(trace)]
    held = [(t.rows, t.states, t.holders, sorted(b for _, blocks in t.leaving for b in blocks)) for t in tables(trace)]
    reads = {step.number for step in replay(trace) if step.read is not None}
    return steps, held, reads


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


def detected(schedule: Schedule, events: list[dict]) -> bool:
    try:
        return reconstructed(events) != (schedule.steps, schedule.tables, schedule.reads)
    except TraceError:
        return True


@pytest.mark.parametrize("kind", ["submit", "admit", "grow", "preempt", "finish", "skip", "chunk", "launch", "read"])
def test_a_lost_event_is_detected(kind):
    lost = 0
    for seed in range(20):
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
    with pytest.raises(TraceError, match=r"event 1 \(submit\) comes before the trace begins"):
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
    for seed in range(30):
        trace = Schedule(seed, InTurn()).run(150).trace
        read = [(event["event"], event.get("block")) for event in trace.events if event["event"] != "share"]
        several = ("chunk", "release")  # one call, one event per row
        assert [key for key, run in groupby(read) for _ in (run if key[0] not in several else [0])] == trace.calls
        together += len(read) - len(trace._entries)
    assert together > 300


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


# ---- files


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
    for end in range(0, len(whole), 97):
        path.write_bytes(whole[:end])
        steps = [step.number for step in replay(Trace.read(path))]
        assert steps == [number for number, *_ in schedule.steps][: len(steps)]
    assert len(steps) > len(schedule.steps) - 3


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
    schedule = Schedule(3, Trace(path)).run(30)
    schedule.trace.close()
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:4], line, *lines[4:]]) + "\n")
    with pytest.raises(TraceError, match=r"line 5 is no entry of a trace, \[event, microseconds, ...\]: '"):
        Trace.read(path)


def test_memory_stays_bounded_while_a_file_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("minillm.trace.record.CHUNK", 50)
    schedule = Schedule(5, Trace(tmp_path / "trace.jsonl"))
    most = 0
    for _ in range(40):
        schedule.run(20)
        most = max(most, len(schedule.trace._entries))
    assert most < 150 and (tmp_path / "trace.jsonl").stat().st_size > 10_000
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
    assert [step.number for step in steps if step.read is None] == [2] or len(steps) > 3


def test_a_trace_can_only_be_attached_to_an_idle_engine():
    schedule = Schedule(4).run(60)
    schedule.submit()
    with pytest.raises(ValueError, match="while nothing runs"):
        Trace().watch(schedule.scheduler)


def test_commands_write_traces_and_plans_and_records_omit_the_path(tmp_path):
    from typer.testing import CliRunner

    from minillm.cli import app
    from minillm.config import EngineConfig
    from minillm.model.config import PRESETS
    from minillm.runner.plan import Traffic
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
