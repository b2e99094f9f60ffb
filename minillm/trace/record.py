"""What an engine did, as events, and read from them: who ran in every step, who held which block.  Lessons 09 and 10.

    with LLM(trace="run.jsonl") as llm:  # or trace=Trace(), kept in memory
        llm.generate(prompts)
    for step in replay(Trace.read("run.jsonl")):
        print(step.number, step.request, step.kind, step.count)

Events record only what changed: a decode step of 3,000 rows is one `launch`. Recording appends an entry, a tuple,
which is several events where these come together; a line of a file is an entry as a JSON list. Names and dictionaries
are made when a trace is read.
"""

import json
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import numpy as np

from minillm.errors import ConfigError, MinillmError

if TYPE_CHECKING:  # a trace is read without an engine
    from minillm.request import Request

FIELDS = {
    "begin": ("rows", "blocks", "block_size", "launched"),  # a new scheduler: nothing runs, no block is used
    "submit": ("request", "prompt"),  # prompt: how many tokens
    "admit": ("step", "request", "row", "known", "computed", "limit", "blocks"),  # blocks: [groups][n]; -1: none
    "share": ("request", "row", "tokens", "blocks"),  # found in the cache, part of the admission before it
    "grow": ("rows", "columns", "blocks"),  # each row's next columns; blocks: [groups][n], -1: has its own
    "register": ("row", "blocks"),  # full, and others may find them by their prefix from now on
    "evict": ("block",),  # reallocated: its prefix is no longer cached
    "release": ("row", "blocks", "step"),  # freed before the row ends; reusable once that step is read
    "preempt": ("request", "row", "step"),
    "finish": ("request", "row", "reason", "step"),  # row -1: it waited
    "skip": ("step", "rows"),  # rows with one token pending that the budget left out
    "chunk": ("step", "row", "start", "count", "place"),  # of more than one token pending; place: among the step's rows
    "launch": ("step", "size"),  # size: rows that run
    "read": ("step",),
    "reset": ("step",),  # after a failure: steps in flight and all prefixes are given up
}
CHUNK = 1024  # entries that a trace with a file keeps before it writes them
PATIENCE = 1.0  # seconds after which it writes them anyway


class RecordedPool(Protocol):
    """What recording reads of a block pool: `minillm.kv_cache.BlockPool`."""

    @property
    def num_blocks(self) -> int: ...
    def lookup(self, keys: Iterable[bytes]) -> list[int]: ...
    def watch_evictions(self, callback: Callable[[int], None]) -> None: ...


class RecordedStep(Protocol):
    """What recording reads of a step: `minillm.scheduler.Step`."""

    number: int
    rows: np.ndarray
    starts: np.ndarray
    queries: np.ndarray
    samples: np.ndarray
    decodes: int


class RecordedScheduler(Protocol):
    """What recording reads of a scheduler: `minillm.scheduler.Scheduler`."""

    launched: int
    read: int
    block_size: int
    requests: "list[Request | None]"
    order: np.ndarray
    known: np.ndarray
    computed: np.ndarray
    limit: np.ndarray
    last_step: np.ndarray
    trace: "Trace | None"

    @property
    def pool(self) -> RecordedPool: ...
    @property
    def has_work(self) -> bool: ...


class TraceError(MinillmError, ValueError):
    """Events that no engine can have written (one is missing, twice there or torn), or that cannot be recorded."""


class Trace:
    """Events of one engine, in memory or, with a path, in a file of JSON lines that is written as it goes.

    Entries are written while the engine waits for its device (`write_in_time`), not by a thread, which would take the
    interpreter from the engine for milliseconds at a time. Raises ConfigError where the file cannot be written. Should
    writing fail later (a full disk), recording ends with a warning and the engine goes on.
    """

    def __init__(self, path: str | PathLike[str] | None = None):
        self.path = None if path is None else Path(path)
        self._entries: list[tuple] = []  # (event, microseconds, *values), arrays by reference
        self._evicted: list[int] = []  # blocks reused since the newest entry
        self._began = 0  # at the first scheduler, in nanoseconds; 0: there was none yet
        self._written = time.perf_counter()
        self._file: TextIO | None = None
        if path is not None:
            try:
                self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 `close` closes it
            except OSError as error:
                raise ConfigError(
                    f"trace={str(path)!r} cannot be written: {error.strerror}; name another file"
                ) from None

    @classmethod
    def of(cls, given: "str | PathLike[str] | Trace | None") -> "Trace | None":
        """The trace that an engine's option asks for: a recorder as it is, a path's file, or none."""
        return given if given is None or isinstance(given, Trace) else cls(given)

    # ---- recording

    def watch(self, scheduler: RecordedScheduler) -> None:
        """Record what a new scheduler does from now on."""
        if scheduler.launched != scheduler.read or scheduler.has_work:
            raise TraceError("a trace can only begin while nothing runs: its events tell changes")
        self._began = self._began or time.perf_counter_ns()
        scheduler.trace = self
        self._follow(scheduler.pool)
        rows, blocks = len(scheduler.requests), scheduler.pool.num_blocks
        self._add("begin", rows, blocks, scheduler.block_size, scheduler.launched)

    def _follow(self, pool: RecordedPool) -> None:
        pool.watch_evictions(self._evicted.append)

    def _add(self, event: str, *values: Any) -> None:
        at = (time.perf_counter_ns() - self._began) // 1000
        if self._evicted:  # for the event that comes now
            self._entries.append(("evict", at, self._evicted.copy()))
            self._evicted.clear()
        self._entries.append((event, at, *values))

    def submit(self, request: "Request") -> None:
        self._add("submit", request.request_id, len(request.prompt))

    def admit(self, scheduler: RecordedScheduler, request: "Request", blocks: np.ndarray) -> None:
        """blocks: [groups, n]; those of the tokens that are computed were found in the cache."""
        row, step = request.row, scheduler.launched + 1
        known, computed = scheduler.known.item(row), scheduler.computed.item(row)
        shared = computed // scheduler.block_size
        self._add("admit", step, request.request_id, row, known, computed, request.limit, blocks, shared)

    def grow(self, rows: np.ndarray, columns: np.ndarray, blocks: np.ndarray) -> None:
        self._add("grow", rows, columns, blocks)

    def register(self, pool: RecordedPool, row: int, keys: dict[int, bytes]) -> None:
        """keys: of the blocks that were registered; the first block with a key keeps it."""
        blocks = [block for block, found in zip(keys, pool.lookup(keys.values()), strict=False) if found == block]
        if blocks:
            self._add("register", row, blocks)

    def release(self, rows: np.ndarray, blocks: np.ndarray, step: int) -> None:
        """rows [n], blocks [n]: which row releases which block; step: the last that may still read them."""
        self._add("release", rows, blocks, step)

    def preempt(self, request: "Request", row: int, step: int) -> None:
        self._add("preempt", request.request_id, row, step)

    def finish(self, request: "Request", row: int, step: int) -> None:
        self._add("finish", request.request_id, row, request.finish_reason, step)

    def launch(self, scheduler: RecordedScheduler, step: RecordedStep) -> None:
        if len(step.rows) < len(scheduler.order):
            left = scheduler.order[scheduler.last_step[scheduler.order] != step.number]
            known = scheduler.known[left]
            left = left[(known - scheduler.computed[left] == 1) & (known < scheduler.limit[left])]
            if len(left):
                self._add("skip", step.number, left)
        if not step.samples.all() or step.decodes < len(step.rows):
            # A row with one token pending runs that token and samples; of all others a chunk runs.
            places = np.nonzero((step.queries > 1) | ~step.samples)[0]
            chunks = (step.rows[places], step.starts[places], step.queries[places], places)
            self._add("chunk", step.number, *chunks)
        self._add("launch", step.number, len(step.rows))

    def arrived(self, step: int) -> None:
        self._add("read", step)

    def reset(self, scheduler: RecordedScheduler) -> None:
        self._add("reset", scheduler.launched)
        self._follow(scheduler.pool)

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
        """Write recorded entries if they are many or old. The engine calls it while the device computes."""
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


def _apart(event: str, *values: Any) -> Iterator[tuple]:
    """The events, (event, *values), that an entry stands for."""
    if event == "admit":  # shared: how many columns of blocks were found in the cache
        *admitted, shared = values
        yield event, *admitted
        if shared:
            _, request, row, _, computed, _, blocks = admitted
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
