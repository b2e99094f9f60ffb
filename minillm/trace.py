"""What an engine did, as events, and read from them: who ran in every step, who held which block.  Lessons 09 and 10.

    with LLM(trace="run.jsonl") as llm:  # or trace=Trace(), kept in memory
        llm.generate(prompts)
    for step in replay(Trace.read("run.jsonl")):
        print(step.number, step.request, step.kind, step.count)

Events say what changed and no more: a decode step of 3,000 rows is one `launch`. Recording appends an entry, a tuple,
which is several events where these come together; a line of a file is an entry as a JSON list. Names and dictionaries
are made when a trace is read.
"""

import json
import time
import warnings
from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .config import ConfigError

FIELDS = {
    "begin": ("rows", "blocks", "block_size", "launched"),  # a new scheduler: nothing runs, no block is used
    "submit": ("request", "prompt"),  # prompt: how many tokens
    "admit": ("step", "request", "row", "known", "computed", "limit", "blocks"),  # blocks: [groups][n]; -1: none
    "share": ("request", "row", "tokens", "blocks"),  # found in the cache, part of the admission before it
    "grow": ("rows", "columns", "blocks"),  # each row's next columns; blocks: [groups][n], -1: has its own
    "register": ("row", "blocks"),  # full, and others may find them by their prefix from now on
    "evict": ("block",),  # given out anew: its prefix is known no more
    "release": ("row", "blocks", "step"),  # let go before the row's end; free once that step is read
    "preempt": ("request", "row", "step"),
    "finish": ("request", "row", "reason", "step"),  # row -1: it waited
    "skip": ("step", "rows"),  # rows with one token pending that the budget left out
    "chunk": ("step", "row", "start", "count", "place"),  # of more than one token pending; place: among the step's rows
    "launch": ("step", "size"),  # size: rows that run
    "read": ("step",),
    "abandon": ("step",),  # after a failure: steps in flight and all prefixes are given up
}
CHUNK = 1024  # entries that a trace with a file keeps before it writes them
PATIENCE = 1.0  # seconds after which it writes them anyway


class TraceError(ValueError):
    """Events that no engine can have written: one is missing, twice there or torn."""


class Trace:
    """Events of one engine, in memory or, with a path, in a file of JSON lines that is written as it goes.

    Entries are written while the engine waits for its device (`write_in_time`), not by a thread, which would take the
    interpreter from the engine for milliseconds at a time. Raises ConfigError where the file cannot be written. Should
    writing fail later (a full disk), recording ends with a warning and the engine goes on.
    """

    def __init__(self, path: str | Path | None = None):
        self.path = None if path is None else Path(path)
        self._entries: list[tuple] = []  # (event, microseconds, *values), arrays by reference
        self._evicted: list[int] = []  # blocks given out anew since the newest entry
        self._began: int | None = None  # at the first scheduler, in nanoseconds
        self._written = time.perf_counter()
        self._file = None
        if path is not None:
            try:
                self._file = self.path.open("w", encoding="utf-8")
            except OSError as error:
                raise ConfigError(
                    f"trace={str(path)!r} cannot be written: {error.strerror}; name another file"
                ) from None

    # ---- recording

    def watch(self, scheduler) -> None:
        """Record what a new scheduler does from now on."""
        if scheduler.launched != scheduler.read or scheduler.has_work:
            raise ValueError("a trace can only begin while nothing runs: its events tell changes")
        self._began = self._began or time.perf_counter_ns()
        scheduler.trace = self
        if hasattr(scheduler.pool, "on_evict"):
            scheduler.pool.on_evict = self._evicted.append
        rows, blocks = len(scheduler.requests), scheduler.pool.num_blocks
        self._add("begin", rows, blocks, scheduler.block_size, scheduler.launched)

    def _add(self, event: str, *values) -> None:
        at = (time.perf_counter_ns() - self._began) // 1000
        if self._evicted:  # for the event that comes now
            self._entries.append(("evict", at, self._evicted.copy()))
            self._evicted.clear()
        self._entries.append((event, at, *values))

    def submit(self, request) -> None:
        self._add("submit", request.request_id, len(request.prompt))

    def admit(self, scheduler, request, blocks: np.ndarray) -> None:
        """blocks: [groups, n]; those of the tokens that are computed were found in the cache."""
        row, step = request.row, scheduler.launched + 1
        known, computed = scheduler.known.item(row), scheduler.computed.item(row)
        shared = computed // scheduler.block_size
        self._add("admit", step, request.request_id, row, known, computed, request.limit, blocks, shared)

    def grow(self, rows: np.ndarray, columns: np.ndarray, blocks: np.ndarray) -> None:
        self._add("grow", rows, columns, blocks)

    def register(self, pool, row: int, keys: dict[int, bytes]) -> None:
        """keys: of the blocks that were registered; the first block with a key keeps it."""
        blocks = [block for block, found in zip(keys, pool.lookup(keys.values()), strict=False) if found == block]
        if blocks:
            self._add("register", row, blocks)

    def release(self, rows: np.ndarray, blocks: np.ndarray, step: int) -> None:
        """rows [n], blocks [n]: who lets go of which; step: the newest that may touch them."""
        self._add("release", rows, blocks, step)

    def preempt(self, request, row: int, step: int) -> None:
        self._add("preempt", request.request_id, row, step)

    def finish(self, request, row: int, step: int) -> None:
        self._add("finish", request.request_id, row, request.finish_reason, step)

    def launch(self, scheduler, step) -> None:
        if len(step.rows) < len(scheduler.order):
            left = scheduler.order[scheduler.last_step[scheduler.order] != step.number]
            known = scheduler.known[left]
            left = left[(known - scheduler.computed[left] == 1) & (known < scheduler.limit[left])]
            if len(left):
                self._add("skip", step.number, left)
        if not step.samples.all() or step.singles < len(step.rows):
            # A row with one token pending runs that token and samples; of all others a chunk runs.
            places = np.nonzero((step.queries > 1) | ~step.samples)[0]
            chunks = (step.rows[places], step.starts[places], step.queries[places], places)
            self._add("chunk", step.number, *chunks)
        self._add("launch", step.number, len(step.rows))

    def arrived(self, step: int) -> None:
        self._add("read", step)

    def abandon(self, step: int) -> None:
        self._add("abandon", step)

    # ---- writing and reading

    @property
    def events(self) -> list[dict]:
        """All events so far, oldest first: {"event", "time": seconds since the trace began, ...FIELDS}."""
        return [event for entry in self._recorded() for event in _events(entry)]

    @classmethod
    def read(cls, path: str | Path) -> "Trace":
        """A trace from a file, also one still being written: a torn last line is left out. Raises TraceError."""
        trace = cls()
        trace._entries.extend(_read(Path(path)))
        return trace

    def write(self, path: str | Path) -> None:
        """Write the events so far into a file."""
        Path(path).write_text("".join(map(_line, self._recorded())), encoding="utf-8")

    def _recorded(self) -> list[tuple]:
        self.flush()
        return list(self._entries if self.path is None else _read(self.path))

    def flush(self) -> None:
        """Bring the file up to now; in memory there is nothing to do."""
        if self.path is None:
            return
        entries, self._entries = self._entries, []
        self._written = time.perf_counter()
        if self._file is None:  # closed, or the disk is full
            return
        try:
            self._file.writelines(map(_line, entries))
            self._file.flush()
        except OSError as error:
            warnings.warn(f"the trace {self.path} ends here: {error.strerror}", RuntimeWarning, stacklevel=2)
            self._file = None

    def write_in_time(self) -> None:
        """Write what was recorded if it is much or old. For whoever drives the engine, while the device computes."""
        if self.path is not None and (len(self._entries) >= CHUNK or time.perf_counter() - self._written > PATIENCE):
            self.flush()

    def close(self) -> None:
        """Write the rest. The events stay readable."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None


def _events(entry: tuple) -> Iterator[dict]:
    kind, at, *values = entry
    values = [value.tolist() if isinstance(value, np.ndarray) else value for value in values]
    for event, *each in _apart(kind, *values):
        yield {"event": event, "time": at / 1e6, **dict(zip(FIELDS[event], each, strict=True))}


def _apart(event: str, *values) -> Iterator[tuple]:
    """The events, (event, *values), that an entry stands for."""
    if event == "admit":  # shared: how many columns of blocks were found in the cache
        *values, shared = values
        yield event, *values
        if shared:
            _, request, row, _, computed, _, blocks = values
            yield "share", request, row, computed, [group[:shared] for group in blocks]
    elif event == "evict":  # several blocks
        yield from ((event, block) for block in values[0])
    elif event == "chunk":  # the chunks of one step
        step, *columns = values
        yield from ((event, step, *each) for each in zip(*columns, strict=True))
    elif event == "release":  # the blocks of several rows
        rows, blocks, step = values
        for row in dict.fromkeys(rows):
            yield event, row, [block for owner, block in zip(rows, blocks, strict=True) if owner == row], step
    else:
        yield event, *values


_encode = json.JSONEncoder(default=np.ndarray.tolist, check_circular=False).encode


def _line(entry: tuple) -> str:
    return _encode(entry) + "\n"


def _read(path: Path) -> Iterator[tuple]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return  # torn: it is being written, or its writer was killed
            try:
                entry = tuple(json.loads(line))
                list(_events(entry))
            except (ValueError, LookupError, TypeError):
                raise TraceError(
                    f"{path}, line {number} is no entry of a trace, [event, microseconds, ...]: {line[:80]!r}"
                ) from None
            yield entry


# ---- what the events add up to


@dataclass
class StepRows:
    """Who ran in one step, in the step's order: each list has one entry a row."""

    number: int
    launched: float  # seconds since the trace began
    read: float | None  # when its tokens arrived; None: never
    row: list[int]
    request: list[str]
    start: list[int]  # tokens that were in the cache already
    count: list[int]  # tokens that ran
    kind: list[str]  # "decode": the newest token of a request whose prompt is finished; else "prefill"
    samples: list[bool]  # the step yields a token


@dataclass
class Tables:
    """Who holds which block just after a step was launched."""

    number: int
    launched: float
    rows: dict[int, tuple[str, list[list[int]]]]  # row -> request and its table, [groups][n]; -1: let go
    leaving: list[tuple[str, list[int]]]  # ended, but steps in flight may touch these blocks
    states: list[str]  # of each block: "used", "cached" or "free"
    holders: list[int]  # of each block


def replay(events: Trace | Iterable[dict]) -> Iterator[StepRows]:
    """Each step's rows, in order of launch. Raises TraceError where events are missing."""
    mirror, in_flight = Mirror(), deque()
    for event in _all(events):
        step = mirror.take(event)
        if step is not None:
            in_flight.append(step)
        if event["event"] == "read":
            in_flight[0].read = event["time"]
            yield in_flight.popleft()
        elif event["event"] in ("abandon", "begin"):
            yield from in_flight
            in_flight.clear()
    yield from in_flight


def tables(events: Trace | Iterable[dict]) -> Iterator[Tables]:
    """The block tables and the state of every block after each launch. Raises TraceError where events are missing."""
    mirror = Mirror()
    for event in _all(events):
        step = mirror.take(event)
        if step is not None:
            yield mirror.tables(step)


def _all(events: Trace | Iterable[dict]) -> Iterable[dict]:
    return events.events if isinstance(events, Trace) else events


class Mirror:
    """A scheduler's rows and blocks, followed by its events alone."""

    def __init__(self):
        self.taken = 0  # events
        self.block_size = 0  # no scheduler yet

    def take(self, event: dict) -> StepRows | None:
        """Follow one event; a launch gives the step's rows."""
        kind = event["event"]
        self.taken += 1
        self._expect(self.block_size or kind == "begin", kind, "comes before the trace begins")
        handle = getattr(self, "_" + kind, None)
        return None if handle is None else handle(event)

    def _expect(self, condition: bool, kind: str, problem: str) -> None:
        if not condition:
            raise TraceError(f"event {self.taken} ({kind}) {problem}: events before it are missing or out of order")

    def _begin(self, event: dict) -> None:
        rows = event["rows"]
        self.block_size = event["block_size"]
        self.known, self.computed, self.limit, self.prompt, self.held = np.zeros((5, rows), np.int64)
        self.last = np.full(rows, -1)  # newest step that ran the row
        self.names = np.full(rows, None, object)
        self.blocks: dict[int, list[list[int]]] = {}  # row -> [groups][n]
        self.order = np.zeros(0, np.int64)  # running rows, oldest request first
        self.joined: list[int] = []  # rows admitted since the last launch
        self.submitted: dict[str, tuple[int, int]] = {}  # request -> its arrival, tokens of its prompt
        self.arrivals = 0
        self.holders = [0] * event["blocks"]
        self.registered: set[int] = set()
        self.fence: list[tuple[int, int, str, list[int]]] = []  # (last step that may touch them, row, request, blocks)
        self.launched = self.newest_read = event["launched"]
        self.skipped: list[int] = []
        self.chunks: list[dict] = []

    def _submit(self, event: dict) -> None:
        self.submitted[event["request"]] = (self.arrivals, event["prompt"])
        self.arrivals += 1

    def _admit(self, event: dict) -> None:
        request, row = event["request"], event["row"]
        self._expect(request in self.submitted, "admit", f"admits {request!r}, which was never submitted")
        self._expect(row not in self.blocks, "admit", f"takes row {row}, which is not free")
        self._expect(event["step"] == self.launched + 1, "admit", f"is for step {event['step']}")
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
        """Put a block into each group's table; -1: none."""
        for group, block in zip(self.blocks[row], blocks, strict=True):
            if block < 0:
                continue
            if shared:
                there = self.holders[block] or block in self.registered
                self._expect(there, kind, f"shares block {block}, which nobody can find")
                group += [-1] * (column - len(group))  # what the row never needs
            else:
                self._expect(not self.holders[block], kind, f"gives out block {block}, which is in use")
                self.registered.discard(block)
            self._expect(column == len(group), kind, f"gives row {row} its block {column} out of turn")
            self.holders[block] += 1
            group.append(block)
        self.held[row] = min(map(len, self.blocks[row]))

    def _grow(self, event: dict) -> None:
        for row, column, *blocks in zip(event["rows"], event["columns"], *event["blocks"], strict=True):
            self._expect(row in self.blocks, "grow", f"grows row {row}, which is free")
            self._enter(row, column, blocks, "grow")

    def _register(self, event: dict) -> None:
        self.registered.update(event["blocks"])

    def _evict(self, event: dict) -> None:
        block = event["block"]
        self._expect(not self.holders[block], "evict", f"takes block {block}, which is in use")
        self._expect(block in self.registered, "evict", f"takes block {block}, which nobody can find")
        self.registered.discard(block)

    def _release(self, event: dict) -> None:
        row, gone = event["row"], set(event["blocks"])
        self._expect(row in self.blocks, "release", f"is of row {row}, which is free")
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
        self._expect(holds, event["event"], f"is of {request!r}, which is not in row {row}")
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

    def _launch(self, event: dict) -> StepRows:
        number = event["step"]
        self._expect(number == self.launched + 1, "launch", f"launches step {number}")
        rows = np.concatenate([self.order, np.array(self.joined, np.int64)])
        pending = self.known[rows] - self.computed[rows]
        chunked = [chunk["row"] for chunk in self.chunks]
        runs = (pending == 1) & (self.known[rows] < self.limit[rows]) & ~np.isin(rows, [*self.skipped, *chunked])
        singles = rows[runs]
        size = len(singles) + len(chunked)
        self._expect(size == event["size"], "launch", f"runs {event['size']} rows, and {size} can")
        rows, counts = np.empty(size, np.int64), np.ones(size, np.int64)
        places = [chunk["place"] for chunk in self.chunks]
        alone = np.ones(size, bool)
        alone[places] = False
        rows[places], counts[places] = chunked, [chunk["count"] for chunk in self.chunks]
        rows[alone] = singles
        for chunk in self.chunks:
            self._expect(chunk["start"] == self.computed[chunk["row"]], "launch", f"runs row {chunk['row']} elsewhere")
        starts = self.computed[rows]
        newest = starts + 1 == self.known[rows]
        decodes = newest & (starts >= self.prompt[rows])
        self.computed[rows] += counts
        enough = (self.computed[rows] <= self.held[rows] * self.block_size).all()
        self._expect(enough, "launch", "runs tokens that have no block")
        self._expect((self.computed[rows] <= self.known[rows]).all(), "launch", "runs tokens that are not known")
        samples = self.computed[rows] == self.known[rows]
        self.known[rows[samples]] += 1
        self.last[rows] = self.launched = number
        for row in self.joined:
            arrivals = [self.submitted[name][0] for name in self.names[self.order]]
            place = int(np.searchsorted(arrivals, self.submitted[self.names[row]][0]))
            self.order = np.insert(self.order, place, row)
        self.joined, self.skipped, self.chunks = [], [], []
        kinds = np.where(decodes, "decode", "prefill").tolist()
        lists = (rows.tolist(), self.names[rows].tolist(), starts.tolist(), counts.tolist(), kinds, samples.tolist())
        return StepRows(number, event["time"], None, *lists)

    def _read(self, event: dict) -> None:
        step = event["step"]
        self._expect(step == self.newest_read + 1 and step <= self.launched, "read", f"reads step {step}")
        self.newest_read = step
        self._open_fence()

    def _abandon(self, event: dict) -> None:
        self._expect(not self.blocks, "abandon", "leaves requests in rows")
        self.newest_read = self.launched
        self._open_fence()
        self.registered.clear()
        self.joined, self.skipped, self.chunks = [], [], []

    def tables(self, step: StepRows) -> Tables:
        rows = {
            row: (self.names[row], [list(group) for group in blocks]) for row, blocks in sorted(self.blocks.items())
        }
        leaving = [(request, list(blocks)) for _, _, request, blocks in self.fence]
        states = ["used" if n else "cached" if b in self.registered else "free" for b, n in enumerate(self.holders)]
        return Tables(step.number, step.launched, rows, leaving, states, list(self.holders))
