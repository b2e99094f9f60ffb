"""Scheduler and block pool under arbitrary schedules, compared with a simple model of their behavior.

The model is a device made of dictionaries: every cache slot records the token it holds. It runs each step at launch,
reads the cache only through the block tables, and derives the next token from everything it sees there, so a block
allocated twice, lost or overwritten changes tokens. A layer group with a window sees only that window, and blocks that
no request holds or can find are wiped. The expected tokens come from a loop that knows nothing about blocks.

Some schedules have drafts, each right or wrong by a coin. As on a real device, what a step stored for drafts that were
wrong stays there until it is overwritten. Where steps go through a pipeline, the device learns a step's tokens only
when the step is read. Where it drafts itself, it keeps the rows' lengths, and the scheduler learns them a few steps
later.
"""

import random
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from minillm.kv_cache import BlockPool
from minillm.kv_cache.block_tables import BlockTables
from minillm.request import Request, RequestOptions, SamplingParams
from minillm.runner.launched import agreed
from minillm.scheduler import Scheduler
from minillm.scheduler.policies import POLICIES, FirstComeFirstServed
from tests.chance import TIMES
from tests.proofs import only_in_proofs
from tests.speculation.proposers import Coin, speculation

pytestmark = pytest.mark.key

VOCABULARY, STOP, LONGEST = 11, 7, 40
# Prompts share prefixes; no token repeats nearby, so stale content of a block changes tokens.
BEGINNING = [at * 5 % VOCABULARY for at in range(20)]
PROMPTS = st.builds(
    lambda shared, own: BEGINNING[:shared] + own,
    st.integers(0, len(BEGINNING)) | st.just(len(BEGINNING)),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4),
)
WINDOWS = [(None,), (None, None), (None, 8), (None, 8), (3, None), (5,), (None, 4, 4), (1,)]
EXAMPLES, STEPS = 200, 50  # 10,000 steps
SHORT_AND_LONG = pytest.mark.parametrize("examples", [EXAMPLES // 4, *only_in_proofs(EXAMPLES)])


def mixed(values) -> int:
    """A number that depends on all of these, in order."""
    state = 17
    for value in values:
        state = (state * 31 + int(value) + 1) % 100003
    return state


def next_token(tokens) -> int:
    """The model's next token: depends on all visible tokens, in order."""
    return mixed(tokens) % VOCABULARY


def expected_tokens(prompt, limit, windows) -> list[int]:
    reach = LONGEST if None in windows else max(windows)
    tokens = list(prompt)
    while len(tokens) < limit:
        tokens.append(next_token(tokens[-reach:]))
        if tokens[-1] == STOP:
            break
    return tokens


class ShortChunks(FirstComeFirstServed):
    """Prefills several prompts at once, a few tokens per step, so a joining request may share an unfinished one."""

    def share(self, pending, budget):
        return super().share(np.minimum(pending, 3), budget)


SCHEDULES = {**POLICIES, "short chunks": ShortChunks}


class Device:
    """Rows, block tables and cache slots, changed only by steps."""

    def __init__(self, scheduler: Scheduler):
        self.block_size, self.windows, self.pool = scheduler.block_size, scheduler.tables.windows, scheduler.pool
        self.tokens: dict[tuple[int, int], int] = {}
        self.table: dict[tuple[int, int, int], int] = {}
        self.slots: dict[tuple[int, int], int] = {}
        self.stages = scheduler.stages
        self.unread: deque[dict[tuple[int, int], int]] = deque()  # tokens that steps in flight sampled
        self.lengths: dict[int, int] = {}  # tokens of rows for which the device drafts
        self.coin = random.Random(0)

    def run(self, step) -> tuple[np.ndarray, set[tuple[int, int]], set[int]]:
        """The step's sampled tokens, the blocks it writes with the row that writes each, and the blocks it reads."""
        self.update(step)
        spans = list(zip(step.rows.tolist(), step.starts.tolist(), step.queries.tolist(), strict=True))
        written, read = set(), set()
        for row, start, count in spans:
            for position in range(start, start + count):
                for group in range(len(self.windows)):
                    block = self.table[group, row, position // self.block_size]
                    self.slots[block, position % self.block_size] = self.tokens[row, position]
                    written.add((block, row))
        sampled, stored = [], {}
        for (row, start, count), drafted, samples in zip(spans, step.drafted.tolist(), step.samples, strict=True):
            end = start + count
            seen: list[dict[int, int]] = []  # for each group, position -> token, as seen by the last query
            for group, window in enumerate(self.windows):
                reach = window or LONGEST
                first = max(start + 1 - reach, 0)  # the first position the first query sees: attention reads from there
                at = {p: (self.table[group, row, p // self.block_size], p % self.block_size) for p in range(first, end)}
                read |= {block for block, _ in at.values()}
                found = {p: self.slots[slot] for p, slot in at.items()}
                seen.append(found)
                assert all(token == self.tokens[row, p] for p, token in found.items()), (
                    "a query sees another request's token"
                )
            farthest = max(seen, key=len)
            reach = LONGEST if None in self.windows else max(self.windows)
            for after in range(end - drafted, end + 1) if samples else ():
                token = next_token(farthest[p] for p in range(max(after - reach, 0), after))
                stored[row, after] = token
                sampled.append(token)
        self.store(stored)
        return np.array(sampled, np.int64), written, read

    def drafted(self, step):
        """The step with the starts that the device has counted, and with drafts that it finds."""
        if step.lookup is None:
            return step
        starts, drafts = step.starts.copy(), np.full_like(step.drafts, -1)
        for i, (row, count) in enumerate(zip(step.rows.tolist(), step.drafted.tolist(), strict=True)):
            assert step.lookup[i] or self.lengths[row] - 1 <= starts[i], "a row has more tokens than were counted"
            starts[i] = starts[i] if step.lookup[i] else self.lengths[row] - 1
            tokens = [self.tokens[row, position] for position in range(starts[i] + 1)]
            for j in range(self.coin.randint(0, count)):
                right = next_token(tokens)
                drafts[i, j] = right if self.coin.random() < 0.8 else self.coin.randrange(VOCABULARY)
                tokens.append(int(drafts[i, j]))
        return replace(step, starts=starts, queries=1 + (drafts >= 0).sum(1, dtype=np.int32), drafts=drafts)

    def count(self, step, accepted) -> None:
        """Move on the lengths of rows by the tokens that a step has `accepted`, if it found its drafts itself."""
        if step.lookup is not None:
            for row, start, count in zip(step.rows.tolist(), step.starts.tolist(), accepted.tolist(), strict=True):
                self.lengths[row] = start + 1 + count

    def store(self, sampled: dict[tuple[int, int], int]) -> None:
        """Keep a step's tokens, at once or, with stages, when the step is read."""
        self.unread.append(sampled)
        if self.stages == 1:
            self.tokens |= sampled

    def update(self, step) -> None:
        """Apply what changed since the last step."""
        self.wipe(block for block in range(self.pool.num_blocks) if self.pool.unreferenced([block]))
        for new in step.new_rows:
            for position, token in enumerate(new.tokens):
                self.tokens[new.row, position] = int(token)
        for i, j in zip(*np.nonzero(step.drafted[:, None] > np.arange(int(step.drafted.max(initial=0)))), strict=True):
            first = int(step.ends[i] - step.drafted[i])
            self.tokens[int(step.rows[i]), first + int(j)] = int(step.drafts[i, j])
        if step.table_changes is not None:
            rows, columns, blocks = step.table_changes
            for i, (row, column) in enumerate(zip(rows, columns, strict=True)):
                for group in range(len(self.windows)):
                    self.table[group, int(row), int(column)] = int(blocks[group, i])

    def wipe(self, blocks) -> None:
        """Wipe these blocks, except those in the prefix cache."""
        for block in blocks:
            if block not in self.pool._key_of:
                for offset in range(self.block_size):
                    self.slots.pop((block, offset), None)


class SchedulerMachine(RuleBasedStateMachine):
    scheduler_class = Scheduler
    pool_class = BlockPool
    device_class = Device
    drafts_ahead = False  # whether the device drafts in every run

    @initialize(
        rows=st.integers(1, 6),
        budget=st.integers(1, 24),
        block_size=st.integers(1, 4),
        num_blocks=st.integers(4, 40),
        windows=st.sampled_from(WINDOWS),
        prefix_caching=st.sampled_from([*[True] * 7, False]),
        run_ahead=st.integers(0, 3),
        policy=st.sampled_from([*SCHEDULES, "short chunks"]),
        drafts=st.sampled_from([0, 0, 1, 3, 6]),
        coin=st.integers(0, 99),
        stages=st.sampled_from([1, 1, 2, 3]),
        by_device=st.booleans(),
    )
    def start(self, rows, budget, run_ahead, policy, drafts, coin, by_device=False, **options):
        options = {"max_model_len": LONGEST} | options
        if self.drafts_ahead:
            drafts, by_device = drafts or 4, True
        if drafts and by_device:  # which goes with neither windows nor stages
            options |= {"windows": options["windows"][:1] if options["windows"][0] is None else (None,), "stages": 1}
        if drafts:

            def right(asked) -> list[int]:
                tokens = asked.tokens.tolist()
                return expected_tokens(tokens, len(tokens) + asked.most, options["windows"])[len(tokens) :]

            proposer = Coin(right, VOCABULARY, right=0.8, seed=coin)
            options["speculation"] = speculation(proposer, rows, drafts, VOCABULARY)
            options["speculation"].on_device = by_device
            options["speculation"].runs_ahead = coin % 2 == 1
        self.scheduler = self.scheduler_class(
            max_num_seqs=rows, max_num_batched_tokens=budget, policy=SCHEDULES[policy](), **options
        )
        self.scheduler.pool = self.pool_class(options["num_blocks"])
        self.budget, self.run_ahead = budget, run_ahead
        self.device = self.device_class(self.scheduler)
        self.device.coin.seed(coin)
        self.in_flight = deque()
        self.requests: list[Request] = []

    @rule(
        prompt=PROMPTS,
        output=st.integers(1, 12),
        salt=st.sampled_from("aaaaab"),
        shares=st.integers(0, 9),
        priority=st.integers(0, 2),
        twice=st.booleans(),
    )
    def submit(self, prompt, output, salt, shares, priority, twice):
        """A client submits a request, sometimes twice at once."""
        request = Request(
            request_id=str(len(self.requests)),
            prompt=np.array(prompt, np.int32),
            params=SamplingParams(max_tokens=output),
            limit=len(prompt) + output,
            stop_ids=(STOP,),
            options=RequestOptions(salt, use_prefix_cache=shares > 0, priority=priority, speculate=shares != 1),
        )
        if self.scheduler.tables.most(request.limit) > self.scheduler.pool.num_blocks:
            with pytest.raises(ValueError, match="cache blocks"):
                self.scheduler.submit(request)
        else:
            self.scheduler.submit(request)
            self.requests.append(request)
            if twice:
                self.try_again(request)

    @precondition(lambda self: any(request.finish_reason is None for request in self.requests))
    @rule(choice=st.integers(0, 10**6), again=st.booleans())
    def abort(self, choice, again):
        """A client aborts a request and sometimes submits it again."""
        running = [request for request in self.requests if request.finish_reason is None]
        request = running[choice % len(running)]
        self.scheduler.finish(request, "abort")
        if again:
            self.try_again(request)

    def try_again(self, request: Request) -> None:
        copy = Request(
            request_id=str(len(self.requests)),
            prompt=request.prompt,
            params=request.params,
            limit=request.limit,
            stop_ids=request.stop_ids,
        )
        self.scheduler.submit(copy)
        self.requests.append(copy)

    @precondition(lambda self: self.in_flight)
    @rule(lucky=st.integers(0, 1), again=st.booleans())
    def fail(self, lucky, again):
        """Sometimes a step fails, and the writes of steps in flight are lost; clients sometimes submit again."""
        if lucky:
            return
        lost = [request for request in self.requests if request.finish_reason is None]
        for _, _, owners, _ in self.in_flight:
            for block, _ in owners:
                for offset in range(self.scheduler.block_size):
                    self.device.slots.pop((block, offset), None)
        self.in_flight.clear()
        self.device.unread.clear()
        self.scheduler.reset(lost, self.pool_class(self.scheduler.pool.num_blocks))
        self.device.pool = self.scheduler.pool
        for request in lost if again else []:
            self.try_again(request)

    @rule()
    def launch(self):
        if len(self.in_flight) >= max(self.run_ahead + 1, self.scheduler.stages):
            return
        step = self.scheduler.schedule()
        if step is None:
            assert self.in_flight or not self.scheduler.has_work, "no request runs although some wait"
            return
        assert 0 < step.queries.sum() <= self.budget, "the step exceeds its token budget"
        decoding = step.queries == step.queries_per_decode
        assert decoding[: step.decodes].all() and not decoding[step.decodes :].any()
        actual = self.device.drafted(step)
        sampled, written, read = self.device.run(actual)
        owners = {(block, self.scheduler.requests[row]) for block, row in written}
        results = agreed(actual, sampled)
        self.device.count(actual, results.accepted)
        if step.lookup is not None:
            results.looked_up = actual.drafted
        self.in_flight.append((step, results, owners, read))

    @precondition(lambda self: self.in_flight)
    @rule()
    def read(self):
        step, results, _, _ = self.in_flight.popleft()
        sampled = self.device.unread.popleft()
        if self.device.stages > 1:  # else the device has them since it ran the step, and newer ones since
            self.device.tokens |= sampled
        more = {} if step.lookup is None else {"looked_up": results.looked_up}
        for request in self.scheduler.complete(step, results.tokens, results.accepted, **more):
            assert request.finish_reason in ("stop", "length")

    @invariant()
    def invariants_hold(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        tables, pool = self.scheduler.tables, self.scheduler.pool
        for _, _, owners, read in self.in_flight:
            assert all(pool.references[block] for block in read), "a block that a step in flight reads was freed"
            for block, owner in owners:
                assert pool.references[block] > 0, "a block that a step in flight may write was freed"
                for request in self.scheduler.requests:
                    if request is not None and request is not owner:
                        assert block not in tables.of(request.row) or block in self.shared(request), (
                            "a block in flight has a new owner"
                        )

    def shared(self, request: Request) -> set[int]:
        """Blocks of a running request that other requests may share, because they are full and registered."""
        return set(self.scheduler.tables.blocks[:, request.row, : request.registered].ravel().tolist())

    def expected(self, request: Request) -> list[int]:
        return expected_tokens(request.prompt, request.limit, self.scheduler.tables.windows)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(10_000):
            if not (self.scheduler.has_work or self.in_flight):
                break
            before = len(self.in_flight)
            self.launch()
            if len(self.in_flight) == before:
                self.read()
            self.invariants_hold()
        else:
            raise AssertionError("requests wait forever")
        for request in self.requests:
            expected = self.expected(request)
            got = request.known.tolist()
            assert got == expected[: len(got)], f"request {request.request_id} has different tokens than alone"
            if request.finish_reason != "abort":
                assert len(got) == len(expected), f"request {request.request_id} ended early or late"
                reason = "stop" if expected[-1] == STOP else "length"
                assert request.finish_reason == reason, f"request {request.request_id} has the wrong finish reason"
        pool = self.scheduler.pool
        assert pool.available == pool.num_blocks, "blocks leaked"


def run(machine: type[SchedulerMachine], **options) -> None:
    everything = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    options = {"max_examples": EXAMPLES, "stateful_step_count": STEPS} | options
    run_state_machine_as_test(machine, settings=settings(deadline=None, suppress_health_check=everything, **options))


@pytest.mark.explore
@SHORT_AND_LONG
def test_any_schedule_gives_each_request_the_same_tokens_as_alone(examples):
    run(SchedulerMachine, max_examples=examples * TIMES)


class AheadMachine(SchedulerMachine):
    """The device drafts in every run."""

    drafts_ahead = True


@pytest.mark.explore
@SHORT_AND_LONG
def test_any_schedule_with_drafts_of_the_device_does_so_too(examples):
    run(AheadMachine, max_examples=examples * TIMES)


class ForgetsReferences(BlockPool):
    """A block is reused too early: the first holder's release frees it."""

    def release(self, blocks):
        for block in blocks:
            self.references[block] = min(self.references[block], 1)
        super().release([block for block in blocks if self.references[block]])


class GivesTwice(BlockPool):
    """A block is allocated twice: it stays in the free list after allocation."""

    def allocate(self, count):
        blocks = super().allocate(count)
        if blocks:
            self._free.append(blocks[0])
        return blocks


class KeepsStaleKeys(BlockPool):
    """An evicted block is still found under its old prefix."""

    def allocate(self, count):
        keys = dict(self._block_of)
        blocks = super().allocate(count)
        self._block_of = keys
        return blocks


class SkipsTheFence(Scheduler):
    """Rows and blocks are freed while steps that may access them are in flight."""

    def _open_fence(self):
        for row, blocks in self.fence.release(self.newest):
            self.pool.release(blocks)
            self._free_rows += [row][: row >= 0]


class OverspendsByOne(Scheduler):
    """The token budget is off by one."""

    def _admit(self, budget):
        return super()._admit(budget + 1)


class StopsOneLate(Scheduler):
    """A row runs once more after its last token."""

    def _runnable(self):
        rows = self.order
        return rows[(self.computed[rows] < self.known[rows]) & (self.known[rows] <= self.limit[rows])]


class SharesUnwrittenBlocks(Scheduler):
    """A request shares its whole prompt although only part of it has been computed."""

    def _register(self, request, written):
        super()._register(request, int(self.confirmed[request.row]))


class RemembersWhatFailed(Scheduler):
    """Blocks of a failed step stay in the prefix cache."""

    def reset(self, requests, pool):
        keys = dict(self.pool._key_of)
        super().reset(requests, pool)
        blocks = pool.allocate(pool.num_blocks)
        for block, key in keys.items():
            pool.register(block, key)
        pool.release(blocks)


class LetsGoTooEarly(Scheduler):
    """A window's blocks are freed one block too early: they hold the oldest keys that the next query sees."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.tables._reach = np.maximum(self.tables._reach - self.block_size, 1)


class LetsGoTwice(Scheduler):
    """A row frees the same blocks twice."""

    def _release_hidden(self, rows):
        gone = self.tables.gone.copy()
        super()._release_hidden(rows)
        self.tables.gone = gone


class LetsGoWithoutFence(Scheduler):
    """Blocks that left a window are freed while steps that read them are in flight."""

    def _release_hidden(self, rows):
        self.pool.release(self.tables.expire(rows, self.computed[rows])[1].tolist())


class FindsLocalHoles(BlockTables):
    """A prefix counts as a hit if a local group has only its last block, although the next query sees more."""

    def find_prefix(self, pool, keys):
        own, self._reach = self._reach, np.minimum(self._reach, 2)
        found = super().find_prefix(pool, keys)
        self._reach = own
        return found


class MissesLocalBlocks(Scheduler):
    """A prefix is shared without all the local blocks that the next query sees."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.tables.__class__ = FindsLocalHoles


class AcceptsOneTooMany(Scheduler):
    """The first draft that is wrong is accepted."""

    def complete(self, step, tokens, accepted):
        drafted = step.drafted[step.samples]
        for i in np.flatnonzero(accepted <= drafted):
            tokens[i, accepted[i] - 1] = step.drafts[step.samples][i, accepted[i] - 1]
        return super().complete(step, tokens, accepted)


class HidesWhatIsSeenAgain(Scheduler):
    """Blocks that drafts can no longer see are freed, although a rejection brings them back."""

    def _release_hidden(self, rows):
        if self.speculation is not None:
            self.speculation.unread[:] = False
        super()._release_hidden(rows)


class AcceptsOneTooManyAhead(Scheduler):
    """A row is one token longer for the host than for the device, which has started the next step by then."""

    def complete(self, step, tokens, accepted, looked_up=None):
        if looked_up is not None:
            accepted = np.minimum(accepted + 1, tokens.shape[1])
        return super().complete(step, tokens, accepted, *([] if looked_up is None else [looked_up]))


class StartsWhereItCounts(Scheduler):
    """A step starts where the host expects it, as if all drafts in flight were right."""

    def schedule(self):
        step = super().schedule()
        if step is not None and step.lookup is not None:
            step.lookup[:] = True
        return step


class KeepsAStaleLength(Scheduler):
    """After a step that the device does not count, it goes on from the length that it had before."""

    def schedule(self):
        before, step = self.speculation and self.speculation.newest_ahead, super().schedule()
        if step is not None and step.lookup is not None and before >= 0:
            step.lookup &= ~np.isin(step.rows, self.counted)
        if step is not None and step.lookup is not None:
            self.counted = np.union1d(getattr(self, "counted", []), step.rows)
        return step


# tools/state_machines.py runs these machines for a million steps and plants these faults. A fault replaces its first
# base class.
MACHINES = [SchedulerMachine, AheadMachine]
FAULTS = [ForgetsReferences, GivesTwice, KeepsStaleKeys, SkipsTheFence, OverspendsByOne, StopsOneLate]
FAULTS += [SharesUnwrittenBlocks, RemembersWhatFailed]
FAULTS += [LetsGoTooEarly, LetsGoTwice, LetsGoWithoutFence, MissesLocalBlocks]
FAULTS += [AcceptsOneTooMany, HidesWhatIsSeenAgain]
AHEAD = [AcceptsOneTooManyAhead, StartsWhereItCounts, KeepsAStaleLength]
FAULTS += AHEAD
FINDINGS = (AssertionError, KeyError, IndexError, ValueError)


def with_fault(fault: type) -> type[SchedulerMachine]:
    """The machine with this faulty scheduler or pool."""
    name = "pool_class" if issubclass(fault, BlockPool) else "scheduler_class"
    machine = AheadMachine if fault in AHEAD else SchedulerMachine
    return type(f"With{fault.__name__}", (machine,), {name: fault})


@pytest.mark.parametrize(
    "fault", [*FAULTS[::3], *only_in_proofs(*FAULTS[1::3], *FAULTS[2::3])], ids=lambda fault: fault.__name__
)
def test_a_planted_fault_is_found_within_10000_steps(fault):
    with pytest.raises(FINDINGS):
        run(with_fault(fault), phases=(Phase.generate,), database=None, derandomize=True)
