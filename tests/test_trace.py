"""Traces under arbitrary schedules: what `replay` and `tables` reconstruct is what the scheduler really did."""

import numpy as np
import pytest

from minillm.kv_cache import BlockPool
from minillm.policies import POLICIES
from minillm.request import Request, SamplingParams
from minillm.scheduler import Scheduler
from minillm.trace import Trace, replay, tables

STOP, LONGEST = 7, 40
BEGINNING = [at * 5 % 11 for at in range(20)]


class Schedule:
    """A scheduler without a model under a random schedule; keeps what each step really was."""

    def __init__(self, seed: int, trace: Trace | None = None, pool=BlockPool, **fixed):
        rng = self.rng = np.random.default_rng(seed)
        options = {
            "max_num_seqs": int(rng.integers(1, 7)),
            "max_num_batched_tokens": int(rng.integers(1, 65)),
            "block_size": int(rng.integers(1, 5)),
            "num_blocks": int(rng.integers(10, 60)),
            "groups": int(rng.choice([1, 1, 2])),
            "prefix_caching": bool(rng.random() < 0.8),
            "policy": POLICIES[str(rng.choice([*POLICIES]))](),
        } | fixed
        self.run_ahead = int(rng.integers(0, 4))
        self.scheduler = Scheduler(max_model_len=LONGEST, **options)
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
            params=SamplingParams(
                max_tokens=output,
                use_prefix_cache=bool(rng.random() < 0.9),
                priority=int(rng.integers(0, 3)),
            ),
            limit=len(prompt) + output,
            stop_ids=(STOP,),
        )
        try:
            self.scheduler.submit(request)
            self.requests.append(request)
        except ValueError:
            pass  # more blocks than there are

    def launch(self) -> None:
        scheduler = self.scheduler
        step = scheduler.schedule()
        if step is None:
            return
        self.in_flight.append(step)
        names = [scheduler.requests[row].request_id for row in step.rows]
        lists = (step.rows, step.starts, step.queries, step.samples)
        self.steps.append((step.number, names, *(each.tolist() for each in lists)))
        rows = {
            r.row: (r.request_id, scheduler.block_table[:, r.row, : scheduler.held[r.row]].tolist())
            for r in scheduler.requests
            if r is not None
        }
        pool = scheduler.pool
        cached = set(pool._cached)
        states = ["used" if n else "cached" if b in cached else "free" for b, n in enumerate(pool.references)]
        leaving = sorted(sorted(blocks) for _, _, blocks in scheduler._fence)
        self.tables.append((rows, states, list(pool.references), leaving))

    def read(self) -> None:
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
                self.scheduler.abandon()
            elif draw < 0.75 and len(self.in_flight) <= self.run_ahead:
                self.launch()
            elif self.in_flight:
                self.read()
            self.scheduler.check()
        return self


def reconstructed(trace) -> tuple[list, list]:
    steps = [(s.number, s.request, s.row, s.start, s.count, s.samples) for s in replay(trace)]
    held = [(t.rows, t.states, t.holders, sorted(sorted(b) for _, b in t.leaving)) for t in tables(trace)]
    return steps, held


@pytest.mark.parametrize("block", range(10))
def test_replay_gives_every_step_and_every_table_of_a_random_schedule(block):
    for seed in range(block * 20, block * 20 + 20):
        schedule = Schedule(seed).run(150)
        steps, held = reconstructed(schedule.trace)
        assert steps == schedule.steps, f"seed {seed}"
        for step, (got, expected) in enumerate(zip(held, schedule.tables, strict=True)):
            assert got == expected, f"seed {seed}, step {step}"
        assert {step.number for step in replay(schedule.trace) if step.read is not None} == schedule.reads
