"""The scheduler's state machine with streams: rows free blocks after the sinks and shift the rest up.

The model has two layers here: a slot records its token and what that token saw. So keys computed with more or fewer
blocks gone than the definition says change tokens, even if the cache holds the right tokens.
"""

import numpy as np
import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from minillm.kv_cache.attention_sinks import Stream, StreamTables
from minillm.scheduler import Scheduler
from tests.chance import TIMES
from tests.scheduler.test_scheduler_state_machine import (
    FINDINGS,
    SCHEDULES,
    SHORT_AND_LONG,
    STOP,
    VOCABULARY,
    Device,
    SchedulerMachine,
    mixed,
    run,
)


def expected_stream(prompt, limit: int, stream: Stream, block_size: int) -> list[int]:
    tokens, inner = list(map(int, prompt)), []
    while True:
        p, block = len(inner), len(inner) // block_size
        seen = [j for j in range(p + 1) if j // block_size < stream.sinks or j // block_size >= block - stream.window]
        inner.append(mixed(tokens[j] for j in seen))
        if p + 1 < len(tokens):
            continue
        tokens.append(mixed(inner[j] for j in seen) % VOCABULARY)
        if tokens[-1] == STOP or len(tokens) == limit:
            return tokens


class StreamDevice(Device):
    def run(self, step) -> tuple[np.ndarray, set[tuple[int, int]], set[int]]:
        self.update(step)
        spans = list(zip(step.rows, step.starts, step.queries, step.moved * self.block_size, strict=True))

        def slots(row, moved, end) -> list[tuple[int, int]]:
            """The slots of a row's keys, up to position end - 1."""
            places = (divmod(place, self.block_size) for place in range(end - moved))
            return [(self.table[0, int(row), column], offset) for column, offset in places]

        written, read = set(), set()
        for row, start, count, moved in spans:
            mine = slots(row, moved, start + count)
            read |= {block for block, _ in mine}
            for position in range(start, start + count):
                slot = mine[position - moved]
                self.slots[slot] = (self.tokens[int(row), position],)
                written.add((slot[0], int(row)))
        for row, start, count, moved in spans:  # the second layer runs after every key of the first is written
            mine = slots(row, moved, start + count)
            for place in range(start - moved, start - moved + count):
                token, *_ = self.slots[mine[place]]
                self.slots[mine[place]] = token, mixed(self.slots[slot][0] for slot in mine[: place + 1])
        sampled = {}
        for (row, start, count, moved), samples in zip(spans, step.samples, strict=True):
            if samples:
                token = mixed(self.slots[slot][1] for slot in slots(row, moved, start + count)) % VOCABULARY
                sampled[int(row), int(start + count)] = token
        self.store(sampled)
        return np.array([*sampled.values()], np.int64), written, read


class StreamMachine(SchedulerMachine):
    device_class = StreamDevice

    @initialize(
        rows=st.integers(1, 6),
        budget=st.integers(1, 24),
        block_size=st.integers(1, 4),
        num_blocks=st.integers(3, 30),
        stream=st.builds(Stream, st.integers(0, 2), st.integers(1, 3)),
        prefix_caching=st.sampled_from([True, True, True, False]),
        run_ahead=st.integers(0, 3),
        policy=st.sampled_from([*SCHEDULES, "short chunks"]),
        stages=st.sampled_from([1, 2]),
    )
    def start(self, stream, block_size, **options):
        longest = stream.max_blocks * block_size
        super().start(stream=stream, block_size=block_size, max_model_len=longest, drafts=0, coin=0, **options)

    def expected(self, request):
        return expected_stream(request.prompt, request.limit, self.scheduler.stream, self.scheduler.block_size)

    def shared(self, request):
        """Columns shift, so only the pool knows which blocks of a row are shared."""
        return set(self.scheduler.pool._key_of)


@pytest.mark.explore
@SHORT_AND_LONG
def test_any_schedule_gives_streams_the_tokens_of_their_definition(examples):
    run(StreamMachine, max_examples=examples * TIMES)


class WithTables(Scheduler):
    tables_class = StreamTables

    def __init__(self, **options):
        super().__init__(**options)
        self.tables.__class__ = self.tables_class


class DropsWithoutShift(StreamTables):
    """A block is freed, but the columns after it do not shift."""

    def expire(self, rows, computed):
        before = self.blocks.copy()
        found = super().expire(rows, computed)
        self.blocks[:, rows, self.stream.sinks : -1] = before[:, rows, self.stream.sinks : -1]
        return found


class DropsTheSink(StreamTables):
    """The oldest block is freed even if it holds sinks."""

    def expire(self, rows, computed):
        found = self.blocks[0, rows, 0]
        super().expire(rows, computed)
        self.blocks[:, rows, :-1] = np.roll(self.blocks[:, rows, :-1], 1, axis=2)
        return rows, found


class RunsAcrossADrop(StreamTables):
    """A chunk past the row's capacity crosses a block boundary, so its first tokens see too little."""

    def pending(self, computed, known):
        return known - computed

    def expire(self, rows, computed):
        found = []
        for row, at in zip(rows, computed, strict=True):
            while self.hidden(at)[0] > self.gone[0, row]:
                due = (self.gone[0, [row]] + self.stream.max_blocks) * self.block_size
                found.append((row, *super().expire(np.array([row]), due)[1]))
        rows, blocks = np.array(found, np.int32).reshape(-1, 2).T
        return rows, blocks


class SharesAfterADrop(StreamTables):
    """Blocks are registered too late, when columns no longer match the prefix."""

    def findable(self, row, full):
        return min(full, self.held[0, row] - self.gone[0, row] if self.gone[0, row] else 1)


class FindsFullRows(StreamTables):
    """A full row is a prefix hit, although its next token fits only after a block is freed."""

    def find_prefix(self, pool, keys):
        return super(StreamTables, self).find_prefix(pool, keys)


class DropsWithoutFence(Scheduler):
    """A block is freed while steps that read it are in flight."""

    def _release_hidden(self, rows):
        rows = rows[self.tables.hidden(self.computed[rows])[0] > self.tables.gone[0, rows]]
        if len(rows):
            self.pool.release(self.tables.expire(rows, self.computed[rows])[1].tolist())


MACHINES = [StreamMachine]
FAULTS = [DropsWithoutShift, DropsTheSink, RunsAcrossADrop, SharesAfterADrop, FindsFullRows, DropsWithoutFence]


def with_fault(fault: type) -> type[StreamMachine]:
    """The machine with this faulty scheduler or table."""
    faulty = fault
    if issubclass(fault, StreamTables):
        faulty = type(fault.__name__, (WithTables,), {"tables_class": fault})
    return type(f"With{fault.__name__}", (StreamMachine,), {"scheduler_class": faulty})


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found_within_10000_steps(fault):
    with pytest.raises(FINDINGS):
        run(with_fault(fault), phases=(Phase.generate,), database=None, derandomize=True)
