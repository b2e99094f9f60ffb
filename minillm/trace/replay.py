"""Reconstruct an engine's steps and block tables from its trace.  Lessons 09 and 10."""

from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from .record import Trace, TraceError


@dataclass
class StepRows:
    """The rows of one step, in the step's order: each list has one entry per row."""

    number: int
    launched: float  # seconds since the trace began
    read: float | None  # when its results arrived; None: never
    row: list[int]
    request: list[str]
    start: list[int]  # tokens already in the cache
    count: list[int]  # tokens that ran
    kind: list[str]  # "decode": runs only the newest token, after the prompt, and its drafts; else "prefill"
    samples: list[bool]  # the row yields a token


@dataclass
class Tables:
    """Block tables and block states right after the launch of a step."""

    number: int
    launched: float
    rows: dict[int, tuple[str, list[list[int]]]]  # row -> (request, its block table [groups][n]; -1: freed)
    leaving: list[tuple[str, list[int]]]  # (request, blocks it gave up that steps in flight may still use)
    states: list[str]  # per block: "used", "cached" or "free"
    holders: list[int]  # per block: its reference count


def replay(events: Trace | Iterable[dict]) -> Iterator[StepRows]:
    """Yield the rows of each step, in launch order. Raises TraceError if events are missing."""
    mirror, in_flight = Mirror(), deque[StepRows]()
    for event in _all(events):
        step = mirror.take(event)
        if step is not None:
            in_flight.append(step)
        if event["event"] == "read":
            in_flight[0].read = event["time"]
            yield in_flight.popleft()
        elif event["event"] in ("reset", "begin"):
            yield from in_flight
            in_flight.clear()
    yield from in_flight


def tables(events: Trace | Iterable[dict]) -> Iterator[Tables]:
    """Yield the block tables and block states after each launch. Raises TraceError if events are missing."""
    mirror = Mirror()
    for event in _all(events):
        step = mirror.take(event)
        if step is not None:
            yield mirror.tables(step)


def _all(events: Trace | Iterable[dict]) -> Iterable[dict]:
    return events.events if isinstance(events, Trace) else events


class Mirror:
    """A copy of a scheduler's rows and blocks, maintained from its events alone."""

    def __init__(self) -> None:
        self.taken = 0  # number of events
        self.block_size = 0  # 0: no scheduler yet

    def take(self, event: dict) -> StepRows | None:
        """Apply one event; for a launch, return the step's rows."""
        kind = event["event"]
        self.taken += 1
        self._expect(self.block_size or kind == "begin", kind, "comes before the trace begins")
        handle = getattr(self, "_" + kind, None)
        return None if handle is None else handle(event)

    def _expect(self, condition: object, kind: str, problem: str) -> None:
        if not condition:
            raise TraceError(f"event {self.taken} ({kind}) {problem}: events before it are missing or out of order")

    def _begin(self, event: dict) -> None:
        rows = event["rows"]
        self.block_size = event["block_size"]
        self.known, self.computed, self.limit, self.prompt, self.held = np.zeros((5, rows), np.int64)
        self.last = np.full(rows, -1)  # the latest step that ran each row
        self.names = np.full(rows, None, object)
        self.blocks: dict[int, list[list[int]]] = {}  # row -> [groups][n]
        self.order = np.zeros(0, np.int64)  # running rows, oldest request first
        self.joined: list[int] = []  # rows admitted since the last launch
        self.submitted: dict[str, tuple[int, int]] = {}  # request -> (arrival number, prompt length)
        self.arrivals = 0
        self.holders = [0] * event["blocks"]
        self.registered: set[int] = set()
        self.fence: list[tuple[int, int, str, list[int]]] = []  # (last step using the blocks, row, request, blocks)
        self.newest = self.newest_read = event["launched"]
        self.skipped: list[int] = []
        self.chunks: list[dict] = []
        self.drafts: list[dict] = []

    def _submit(self, event: dict) -> None:
        self.submitted[event["request"]] = (self.arrivals, event["prompt"])
        self.arrivals += 1

    def _admit(self, event: dict) -> None:
        request, row = event["request"], event["row"]
        self._expect(request in self.submitted, "admit", f"admits {request!r}, which was never submitted")
        self._expect(row not in self.blocks, "admit", f"takes row {row}, which is not free")
        self._expect(event["step"] == self.newest + 1, "admit", f"is for step {event['step']}")
        self.names[row] = request
        for name in ("known", "computed", "limit"):
            getattr(self, name)[row] = event[name]
        self.prompt[row] = self.submitted[request][1]
        self.last[row] = -1
        self.joined.append(row)
        self.blocks[row] = [[] for _ in event["blocks"]]
        shared = event["computed"] // self.block_size
        for column, blocks in enumerate(zip(*event["blocks"], strict=True)):
            self._enter(row, column, blocks, "admit", shared=column < shared)

    def _enter(self, row: int, column: int, blocks: Iterable[int], kind: str, shared: bool = False) -> None:
        """Append one block to the row's table in each group; -1: none."""
        for group, block in zip(self.blocks[row], blocks, strict=True):
            if block < 0:
                continue
            if shared:
                there = self.holders[block] or block in self.registered
                self._expect(there, kind, f"shares block {block}, which no lookup can find")
                group += [-1] * (column - len(group))  # columns that no later query sees
            else:
                self._expect(not self.holders[block], kind, f"allocates block {block}, which is in use")
                self.registered.discard(block)
            self._expect(column == len(group), kind, f"gives row {row} its block {column} out of order")
            self.holders[block] += 1
            group.append(block)
        self.held[row] = min(map(len, self.blocks[row]))

    def _grow(self, event: dict) -> None:
        for row, column, *blocks in zip(event["rows"], event["columns"], *event["blocks"], strict=True):
            self._expect(row in self.blocks, "grow", f"allocates a block for row {row}, which is free")
            self._enter(row, column, blocks, "grow")

    def _register(self, event: dict) -> None:
        self.registered.update(event["blocks"])

    def _forget(self, event: dict) -> None:
        self.registered.difference_update(event["blocks"])

    def _evict(self, event: dict) -> None:
        block = event["block"]
        self._expect(not self.holders[block], "evict", f"evicts block {block}, which is in use")
        self._expect(block in self.registered, "evict", f"evicts block {block}, which no lookup can find")
        self.registered.discard(block)

    def _release(self, event: dict) -> None:
        row, gone = event["row"], set(event["blocks"])
        self._expect(row in self.blocks, "release", f"releases blocks of row {row}, which is free")
        self.blocks[row] = [[-1 if block in gone else block for block in group] for group in self.blocks[row]]
        self._wait(event["step"], row, self.names[row], event["blocks"])

    def _preempt(self, event: dict) -> None:
        self._leave(event)

    def _finish(self, event: dict) -> None:
        if event["row"] >= 0:
            self._leave(event)
        self.submitted.pop(event["request"], None)

    def _leave(self, event: dict) -> None:
        row, request = event["row"], event["request"]
        holds = row in self.blocks and self.names[row] == request
        self._expect(holds, event["event"], f"is for {request!r}, which is not in row {row}")
        blocks = [block for group in self.blocks.pop(row) for block in group if block >= 0]
        self.order = self.order[self.order != row]
        if row in self.joined:
            self.joined.remove(row)
        self._wait(int(self.last[row]), row, request, blocks)

    def _wait(self, step: int, row: int, request: str, blocks: list[int]) -> None:
        insort(self.fence, (step, row, request, blocks))
        self._open_fence()

    def _open_fence(self) -> None:
        while self.fence and self.fence[0][0] <= self.newest_read:
            for block in self.fence.pop(0)[-1]:
                self.holders[block] -= 1

    def _skip(self, event: dict) -> None:
        self.skipped = event["rows"]

    def _chunk(self, event: dict) -> None:
        self.chunks.append(event)

    def _draft(self, event: dict) -> None:
        self.drafts.append(event)

    def _launch(self, event: dict) -> StepRows:
        number = event["step"]
        self._expect(number == self.newest + 1, "launch", f"launches step {number}")
        rows = np.concatenate([self.order, np.array(self.joined, np.int64)])
        pending = self.known[rows] - self.computed[rows]
        chunked = [chunk["row"] for chunk in self.chunks]
        runs = (pending == 1) & (self.known[rows] < self.limit[rows]) & ~np.isin(rows, [*self.skipped, *chunked])
        singles = rows[runs]
        size = len(singles) + len(chunked)
        self._expect(size == event["size"], "launch", f"runs {event['size']} rows, but {size} are ready to run")
        rows, counts = np.empty(size, np.int64), np.ones(size, np.int64)
        indices = [chunk["index"] for chunk in self.chunks]
        alone = np.ones(size, bool)
        alone[indices] = False
        rows[indices], counts[indices] = chunked, [chunk["count"] for chunk in self.chunks]
        rows[alone] = singles
        for chunk in self.chunks:
            self._expect(
                chunk["start"] == self.computed[chunk["row"]], "launch", f"has a wrong start for row {chunk['row']}"
            )
        starts = self.computed[rows]
        newest = starts + 1 == self.known[rows]
        decodes = newest & (starts >= self.prompt[rows])
        for draft in self.drafts:
            self.known[draft["row"]] += draft["count"]
        self.computed[rows] += counts
        enough = (self.computed[rows] <= self.held[rows] * self.block_size).all()
        self._expect(enough, "launch", "runs tokens without a block")
        self._expect((self.computed[rows] <= self.known[rows]).all(), "launch", "runs tokens that do not exist yet")
        samples = self.computed[rows] == self.known[rows]
        self.known[rows[samples]] += 1
        self.last[rows] = self.newest = number
        for row in self.joined:
            arrivals = [self.submitted[name][0] for name in self.names[self.order]]
            index = int(np.searchsorted(arrivals, self.submitted[self.names[row]][0]))
            self.order = np.insert(self.order, index, row)
        self.joined, self.skipped, self.chunks, self.drafts = [], [], [], []
        kinds = np.where(decodes, "decode", "prefill").tolist()
        lists = (rows.tolist(), self.names[rows].tolist(), starts.tolist(), counts.tolist(), kinds, samples.tolist())
        return StepRows(number, event["time"], None, *lists)

    def _read(self, event: dict) -> None:
        step = event["step"]
        self._expect(step == self.newest_read + 1 and step <= self.newest, "read", f"reads step {step}")
        self.newest_read = step
        self._open_fence()

    def _reject(self, event: dict) -> None:
        row, count = event["row"], event["count"]
        self._expect(row in self.blocks, "reject", f"takes back drafts of row {row}, which is free")
        self.known[row] -= count
        self.computed[row] -= count

    def _reset(self, event: dict) -> None:
        self._expect(not self.blocks, "reset", "comes while requests still hold rows")
        self.newest_read = self.newest
        self._open_fence()
        self.registered.clear()
        self.joined, self.skipped, self.chunks, self.drafts = [], [], [], []

    def tables(self, step: StepRows) -> Tables:
        rows = {
            row: (self.names[row], [list(group) for group in blocks]) for row, blocks in sorted(self.blocks.items())
        }
        leaving = [(request, list(blocks)) for _, _, request, blocks in self.fence]
        states = ["used" if n else "cached" if b in self.registered else "free" for b, n in enumerate(self.holders)]
        return Tables(step.number, step.launched, rows, leaving, states, list(self.holders))
