"""Record what an engine does as events: which requests run in each step and which blocks they hold.  Lessons 09 and 10.

    with LLM(trace="run.jsonl") as llm:  # or trace=Trace() to record in memory
        llm.generate(prompts)
    for step in replay(Trace.read("run.jsonl")):
        print(step.number, step.request, step.kind, step.count)

Events record only changes: a step in which every row decodes is a single `launch`, however many rows it has. To keep
recording cheap, the recorder appends tuples, called entries, each of which holds one or more events. A trace file holds
one entry per line, as a JSON list. Events become dictionaries with named fields only when a trace is read.
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

if TYPE_CHECKING:  # reading a trace needs no engine
    from minillm.request import Request

FIELDS = {
    "begin": ("rows", "blocks", "block_size", "launched"),  # a new scheduler: nothing is running, no block is in use
    "submit": ("request", "prompt"),  # prompt: its number of tokens
    "admit": ("step", "request", "row", "known", "computed", "limit", "blocks"),  # blocks: [groups][n]; -1: none
    "share": ("request", "row", "tokens", "blocks"),  # blocks found in the cache, part of the preceding admission
    "grow": ("rows", "columns", "blocks"),  # each row's next column; blocks: [groups][n], -1: allocated before
    "register": ("row", "blocks"),  # full blocks that other requests can now find by their prefix
    "forget": ("blocks",),  # a request that computed them failed: they can no longer be found
    "evict": ("block",),  # reused for other tokens: its prefix is no longer cached
    "release": ("row", "blocks", "step"),  # freed while the row runs; reusable once that step is read
    "preempt": ("request", "row", "step"),
    "finish": ("request", "row", "reason", "step"),  # row -1: it was still waiting
    "skip": ("step", "rows"),  # rows with one pending token that do not run in this step
    "chunk": ("step", "row", "start", "count", "index"),  # row with several pending tokens; index: in the step
    "draft": ("step", "row", "count"),  # drafts that the row runs after its newest token; its chunk has all of them
    "launch": ("step", "size"),  # size: number of rows that run
    "read": ("step",),
    "reject": ("row", "count"),  # drafts of the step just read that were wrong: they are no tokens of the row
    "reset": ("step",),  # after a failure: steps in flight and cached prefixes are discarded
}
CHUNK = 1024  # entries that a trace with a file buffers before writing them
PATIENCE = 1.0  # seconds after which it writes them regardless


class RecordedPool(Protocol):
    """The part of a block pool (`minillm.kv_cache.BlockPool`) that recording uses."""

    @property
    def num_blocks(self) -> int: ...
    def lookup(self, keys: Iterable[bytes]) -> list[int]: ...
    def watch_evictions(self, callback: Callable[[int], None]) -> None: ...


class RecordedStep(Protocol):
    """The part of a step (`minillm.scheduler.Step`) that recording uses."""

    number: int
    rows: np.ndarray
    starts: np.ndarray
    queries: np.ndarray
    samples: np.ndarray
    decodes: int
    queries_per_decode: int
    drafts: np.ndarray | None

    @property
    def drafted(self) -> np.ndarray: ...


class RecordedScheduler(Protocol):
    """The part of a scheduler (`minillm.scheduler.Scheduler`) that recording uses."""

    newest: int
    read: int
    block_size: int
    requests: "list[Request | None]"
    order: np.ndarray
    known: np.ndarray
    computed: np.ndarray
    limit: np.ndarray
    last_step: np.ndarray
    trace: "Trace"

    @property
    def pool(self) -> RecordedPool: ...
    @property
    def has_work(self) -> bool: ...


class TraceError(MinillmError, ValueError):
    """Invalid events (missing, repeated, out of order or malformed), or a trace that cannot start recording."""


class Trace:
    """The events of one engine, in memory or, with a path, in a JSON Lines file that is written during the run.

    The engine writes entries while it waits for its device (`write_in_time`). A writer thread would hold the GIL for
    milliseconds at a time. Raises ConfigError if the file cannot be opened. If a later write fails, for example because
    the disk is full, recording stops with a warning and the engine continues.
    """

    def __init__(self, path: str | PathLike[str] | None = None):
        self.path = None if path is None else Path(path)
        self._entries: list[tuple] = []  # (event, microseconds, *values); arrays are not copied
        self._evicted: list[int] = []  # blocks evicted since the latest entry
        self._began = 0  # when the first scheduler was watched, in nanoseconds; 0: none yet
        self._written = time.perf_counter()
        self._file: TextIO | None = None
        if path is not None:
            try:
                self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed in `close`)
            except OSError as error:
                raise ConfigError(
                    f"trace={str(path)!r} cannot be written: {error.strerror}; name another file"
                ) from None

    @classmethod
    def of(cls, option: "str | PathLike[str] | Trace | None") -> "Trace":
        """Return the trace that an engine's option names: a Trace itself, a new one for a path, NO_TRACE for None."""
        if option is None:
            return NO_TRACE
        return option if isinstance(option, Trace) else cls(option)

    # ---- recording

    def watch(self, scheduler: RecordedScheduler) -> None:
        """Record what a new scheduler does from now on."""
        if scheduler.newest != scheduler.read or scheduler.has_work:
            raise TraceError("a trace can only begin while nothing runs, because its events record only changes")
        self._began = self._began or time.perf_counter_ns()
        scheduler.trace = self
        self._follow(scheduler.pool)
        rows, blocks = len(scheduler.requests), scheduler.pool.num_blocks
        self._add("begin", rows, blocks, scheduler.block_size, scheduler.newest)

    def _follow(self, pool: RecordedPool) -> None:
        pool.watch_evictions(self._evicted.append)

    def _add(self, event: str, *values: Any) -> None:
        at = (time.perf_counter_ns() - self._began) // 1000
        if self._evicted:  # they precede the event that caused them
            self._entries.append(("evict", at, self._evicted.copy()))
            self._evicted.clear()
        self._entries.append((event, at, *values))

    def submit(self, request: "Request") -> None:
        self._add("submit", request.request_id, len(request.prompt))

    def admit(self, scheduler: RecordedScheduler, request: "Request", blocks: np.ndarray) -> None:
        """blocks: [groups, n]; those that hold the computed tokens were found in the cache."""
        row, step = request.row, scheduler.newest + 1
        known, computed = scheduler.known.item(row), scheduler.computed.item(row)
        shared = computed // scheduler.block_size
        self._add("admit", step, request.request_id, row, known, computed, request.limit, blocks, shared)

    def grow(self, rows: np.ndarray, columns: np.ndarray, blocks: np.ndarray) -> None:
        self._add("grow", rows, columns, blocks)

    def register(self, pool: RecordedPool, row: int, keys: dict[int, bytes]) -> None:
        """keys: block -> its prefix key. Only the first block with a key is registered, so duplicates are left out."""
        blocks = [block for block, holder in zip(keys, pool.lookup(keys.values()), strict=False) if holder == block]
        if blocks:
            self._add("register", row, blocks)

    def forget(self, blocks: list[int]) -> None:
        if blocks:
            self._add("forget", blocks)

    def release(self, rows: np.ndarray, blocks: np.ndarray, step: int) -> None:
        """rows, blocks: [n], rows[i] releases blocks[i]; step: the last step that may still read them."""
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
        if not step.samples.all() or step.decodes < len(step.rows) or step.queries_per_decode > 1:
            # A row with one pending token runs it and samples. Every other row runs a chunk.
            indices = np.nonzero((step.queries > 1) | ~step.samples)[0]
            chunks = (step.rows[indices], step.starts[indices], step.queries[indices], indices)
            self._add("chunk", step.number, *chunks)
        if step.drafts is not None:
            drafting = step.drafted > 0
            self._add("draft", step.number, step.rows[drafting], step.drafted[drafting])
        self._add("launch", step.number, len(step.rows))

    def arrived(self, step: int) -> None:
        self._add("read", step)

    def reject(self, rows: np.ndarray, counts: np.ndarray) -> None:
        """rows, counts: [n], the drafts of each row that were wrong, maybe none."""
        if counts.any():
            self._add("reject", rows[counts > 0], counts[counts > 0])

    def reset(self, scheduler: RecordedScheduler) -> None:
        self._add("reset", scheduler.newest)
        self._follow(scheduler.pool)

    # ---- writing and reading

    @property
    def events(self) -> list[dict]:
        """Return all events so far, oldest first: {"event", "time": seconds since the trace began, **fields of the
        event}.
        """
        return [event for entry in self._recorded() for event in _events(entry)]

    @classmethod
    def read(cls, path: str | Path) -> "Trace":
        """Read a trace file, even while it is being written: an incomplete last line is ignored. Raises TraceError."""
        trace = cls()
        trace._entries.extend(_read(Path(path)))
        return trace

    def write(self, path: str | Path) -> None:
        """Write the events so far to a file."""
        Path(path).write_text("".join(map(_line, self._recorded())), encoding="utf-8")

    def _recorded(self) -> list[tuple]:
        self.flush()
        return list(self._entries if self.path is None else _read(self.path))

    def flush(self) -> None:
        """Write all buffered entries to the file. Does nothing for a trace in memory."""
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
        """Flush if many entries are buffered or the last flush was long ago. Called while the device computes."""
        if self.path is not None and (len(self._entries) >= CHUNK or time.perf_counter() - self._written > PATIENCE):
            self.flush()

    def close(self) -> None:
        """Write the remaining entries and close the file. `events` still works."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None


def _nothing(*_: Any, **__: Any) -> None:
    """Record nothing."""


class NoTrace(Trace):
    """Records nothing: the trace of an engine without one."""

    watch = submit = admit = grow = register = forget = release = _nothing
    preempt = finish = launch = arrived = reject = reset = _nothing


NO_TRACE = NoTrace()


def _events(entry: tuple) -> Iterator[dict]:
    kind, at, *values = entry
    values = [value.tolist() if isinstance(value, np.ndarray) else value for value in values]
    for event, *each in _apart(kind, *values):
        yield {"event": event, "time": at / 1e6, **dict(zip(FIELDS[event], each, strict=True))}


def _apart(event: str, *values: Any) -> Iterator[tuple]:
    """Split an entry into its events, (event, *values)."""
    if event == "admit":  # shared: how many block columns were found in the cache
        *admitted, shared = values
        yield event, *admitted
        if shared:
            _, request, row, _, computed, _, blocks = admitted
            yield "share", request, row, computed, [group[:shared] for group in blocks]
    elif event == "evict":  # several blocks
        yield from ((event, block) for block in values[0])
    elif event in ("chunk", "draft"):  # of one step
        step, *columns = values
        yield from ((event, step, *each) for each in zip(*columns, strict=True))
    elif event == "reject":
        yield from ((event, *each) for each in zip(*values, strict=True))
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
                return  # incomplete: it is being written, or its writer was killed
            try:
                entry = tuple(json.loads(line))
                list(_events(entry))
            except (ValueError, LookupError, TypeError):
                raise TraceError(
                    f"{path}, line {number} is not a trace entry, [event, microseconds, ...]: {line[:80]!r}"
                ) from None
            yield entry
