"""Schedulers driven at random with a trace, and what the trace must let a reader reconstruct."""

import numpy as np

from minillm import SamplingParams
from minillm.kv_cache import BlockPool
from minillm.request import Request, RequestOptions
from minillm.scheduler import Scheduler, policies
from minillm.trace import Trace, TraceError, replay, tables
from tests.chance import SEED
from tests.speculation.proposers import Coin, speculation

STOP, LONGEST = 7, 40
NOT_NUMBERS = 0.03  # how often a row has no token
BEGINNING = [at * 5 % 11 for at in range(20)]


class LeavesSomeOut(Scheduler):
    """Skips some runnable rows, as a policy may."""

    def _share_budget(self, rows):
        rows, queries, *rest = super()._share_budget(rows)
        kept = np.arange(len(rows)) % 3 != self.newest % 3
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
        if rng.random() < 0.5:  # drafts of any tokens: how many are accepted is drawn when a step is read
            proposer = Coin(lambda asked: [3] * asked.most, vocabulary=11, seed=seed)
            options["speculation"] = speculation(proposer, options["max_num_seqs"])
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
        decodes = (step.queries == 1 + step.drafted) & step.samples & (step.starts >= prompts)
        lists = (step.rows, step.starts, step.queries, step.samples, np.where(decodes, "decode", "prefill"))
        self.steps.append((step.number, names, *(each.tolist() for each in lists)))
        rows = {r.row: (r.request_id, table_of(scheduler.tables, r.row)) for r in scheduler.requests if r is not None}
        pool = scheduler.pool
        cached = set(pool._cached)
        states = ["used" if n else "cached" if b in cached else "free" for b, n in enumerate(pool.references)]
        leaving = sorted(scheduler.fence.blocks)
        self.tables.append((rows, states, list(pool.references), leaving))

    def read(self) -> None:
        self.trace.write_in_time()  # as the engine does
        step = self.in_flight.pop(0)
        self.reads.add(step.number)
        drafted = step.drafted[step.samples]
        accepted = 1 + self.rng.integers(0, drafted + 1)
        tokens = self.rng.integers(0, 11, (len(drafted), 1 + int(drafted.max(initial=0))))
        last = np.arange(len(drafted)), accepted - 1
        tokens[last] = np.where(self.rng.random(len(drafted)) < NOT_NUMBERS, -1, tokens[last])
        self.scheduler.complete(step, tokens, accepted)

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


def detected(schedule: Schedule, events: list[dict]) -> bool:
    try:
        return reconstructed(events) != (schedule.steps, schedule.tables, schedule.reads)
    except TraceError:
        return True
