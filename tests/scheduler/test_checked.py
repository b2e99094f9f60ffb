"""User-supplied policies and block pools in the running engine."""

import asyncio
import threading

import numpy as np
import pytest

import minillm
from minillm import LLM, AsyncLLM, NotSolvedYet, SamplingParams
from minillm.kv_cache import BlockPool, BlockPoolError
from minillm.overrides import OverrideError
from minillm.scheduler.checked import PARTS
from minillm.scheduler.policies import FirstComeFirstServed, PolicyError
from tests.waiting import TIMEOUT, async_wait_until, paused_steps

PROMPTS = [list(range(5, 5 + length)) for length in (9, 2, 40, 5, 17, 33)]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
OPTIONS = {"device": "cpu", "dtype": "float64", "max_num_seqs": 3, "max_num_batched_tokens": 24, "num_blocks": 12}


class LastComeFirstServed(FirstComeFirstServed):
    fair = False

    def key(self, request):
        return -request.arrival


class DictPool:
    """A block pool independent of the engine's: a set of free blocks and a dictionary of holders, no prefix cache."""

    cached = 0

    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        self.free = set(range(num_blocks))
        self.holders = {}

    @property
    def available(self):
        return len(self.free)

    def allocate(self, count):
        blocks = [self.free.pop() for _ in range(count)]
        self.holders |= dict.fromkeys(blocks, 1)
        return blocks

    def share(self, blocks):
        for block in blocks:
            self.holders[block] += 1

    def release(self, blocks):
        for block in blocks:
            self.holders[block] -= 1
            if self.holders[block] == 0:
                del self.holders[block]
                self.free.add(block)

    def lookup(self, keys):
        return []

    def register(self, block, key):
        pass

    def forget(self):
        pass

    def unreferenced(self, blocks):
        return 0


@pytest.fixture(scope="module")
def llm():
    with LLM(**OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm):
    return tokens(llm)


def tokens(llm, prompts=PROMPTS, params=GREEDY):
    return [each.token_ids for each in llm.generate(prompts, params)]


def class_names(llm):
    parts = llm.engine.scheduler.policy, llm.engine.scheduler.pool
    return tuple(type(getattr(part, "part", part)).__name__ for part in parts)


OWN = ("FirstComeFirstServed", "BlockPool")


def test_user_supplied_classes_run_in_generate_and_the_engines_own_return(llm, expected):
    with minillm.using(policy=LastComeFirstServed, block_pool=DictPool) as used:
        assert tokens(llm) == expected
        assert class_names(llm) == ("LastComeFirstServed", "DictPool")
        assert len(llm.engine.scheduler.pool.part.free) == OPTIONS["num_blocks"], "blocks leaked"
    assert used.calls["policy"] > len(PROMPTS) and used.calls["block_pool"] > len(PROMPTS)
    assert not used.not_solved
    counted = dict(used.calls)
    assert tokens(llm) == expected and class_names(llm) == OWN
    assert used.calls == counted


def test_the_outer_override_returns_after_an_inner_one(llm, expected):
    with minillm.using(block_pool=DictPool) as outer:
        tokens(llm)
        with minillm.using(policy=LastComeFirstServed, block_pool=BlockPool) as inner:
            assert tokens(llm) == expected and class_names(llm) == ("LastComeFirstServed", "BlockPool")
        counted = dict(outer.calls)
        assert inner.calls["block_pool"] > 0 and inner.calls["policy"] > 0
        assert tokens(llm) == expected and class_names(llm) == ("FirstComeFirstServed", "DictPool")
        assert outer.calls["block_pool"] > counted["block_pool"]


def test_an_engine_created_inside_the_block_runs_on_the_user_supplied_classes(expected):
    parts = {"policy": LastComeFirstServed, "block_pool": lambda blocks: DictPool(blocks)}
    with minillm.using(**parts) as used, LLM(**OPTIONS) as llm:
        assert tokens(llm) == expected and class_names(llm) == ("LastComeFirstServed", "DictPool")
    assert min(used.calls.values()) > 0


def test_operations_overridden_in_the_same_block_run_too(llm):
    def zeros(hidden, weight, soft_cap=None):
        return hidden.new_zeros(hidden.shape[0], weight.shape[0])

    with minillm.using(lm_head=zeros, policy=LastComeFirstServed) as used:
        assert tokens(llm) == [[0] * GREEDY.max_tokens] * len(PROMPTS)
    assert min(used.calls.values()) > 0


def test_a_user_supplied_policy_decides_the_order(llm):
    def finished_first(**parts):
        with minillm.using(**parts):
            done = [llm.engine.prepare([5 + i] * 20, GREEDY) for i in range(8)]
            for each in done:
                llm.engine.submit(each)
            while llm.engine.has_work:
                llm.engine.step()
        return min(range(8), key=lambda i: done[i].completion.first_token_time)

    assert finished_first() == 0
    assert finished_first(policy=LastComeFirstServed) == 7


# ---- only while idle


@pytest.mark.parametrize("run_ahead", [0, 1, 3])
def test_a_busy_engine_switches_classes_only_once_it_is_idle(expected, run_ahead):
    with LLM(**OPTIONS, run_ahead=run_ahead) as llm:
        engine = llm.engine

        def submitted(prompts):
            batch = [engine.prepare(prompt, GREEDY) for prompt in prompts]
            for each in batch:
                engine.submit(each)
            return batch

        first = submitted(PROMPTS[:3])
        for _ in range(4):
            engine.step()
        with minillm.using(policy=LastComeFirstServed, block_pool=DictPool) as used:
            first += submitted(PROMPTS[3:])
            while engine.tracked:
                engine.step()
            assert class_names(llm) == OWN and used.calls == {"policy": 0, "block_pool": 0}
            second = submitted(PROMPTS)  # steps launched before the last request finished may still be in flight
            assert class_names(llm) == ("LastComeFirstServed", "DictPool")
            for _ in range(4):
                engine.step()
        while engine.tracked:
            engine.step()
        assert class_names(llm) == ("LastComeFirstServed", "DictPool") and min(used.calls.values()) > 0
        third = submitted(PROMPTS)
        assert class_names(llm) == OWN
        while engine.has_work:
            engine.step()
        for batch in (first, second, third):
            assert [each.completion.token_ids for each in batch] == expected


@pytest.mark.parametrize("run_ahead", [1, 3])
def test_in_flight_steps_of_finished_requests_do_not_delay_the_switch(expected, run_ahead):
    with LLM(**OPTIONS, run_ahead=run_ahead) as llm:
        gone = llm.engine.prepare(PROMPTS[0], GREEDY)
        llm.engine.submit(gone)
        for _ in range(3):
            llm.engine.step()
        llm.engine.abort(gone.request.request_id)
        assert llm.engine.in_flight
        with minillm.using(policy=LastComeFirstServed, block_pool=DictPool) as used:
            assert tokens(llm) == expected
        assert min(used.calls.values()) > 0


def test_step_and_event_counters_continue_across_a_switch(llm):
    tokens(llm)
    steps = llm.stats()["steps"]
    with minillm.using(block_pool=DictPool):
        tokens(llm, [[5]], SamplingParams(max_tokens=1))
        assert llm.stats()["steps"] > steps > 1
        assert llm.stats()["blocks_available"] == OPTIONS["num_blocks"]


def test_the_prefix_cache_survives_if_the_classes_do_not_change(llm):
    with minillm.using(policy=LastComeFirstServed):
        llm.generate([PROMPTS[2]], GREEDY)
        hits = llm.stats()["prefix_hit_tokens"]
        llm.generate([PROMPTS[2]], GREEDY)
        assert llm.stats()["prefix_hit_tokens"] > hits


def test_requests_submitted_while_other_threads_switch_classes_get_the_same_tokens(expected):
    """The engine's thread switches classes; a second thread submits, a third enters and leaves the blocks."""

    async def ask(engine, i):
        return (await engine.generate(PROMPTS[i % len(PROMPTS)], GREEDY)).token_ids

    async def all_of_them(engine):
        for number in range(100):
            if number >= 3 and any(used.calls["block_pool"] for used in blocks):
                return
            found = await asyncio.gather(*(ask(engine, i) for i in range(len(PROMPTS))))
            assert found == expected

    engine, done, blocks = AsyncLLM(**OPTIONS), threading.Event(), []

    def come_and_go():
        while not done.wait(0.005):
            with minillm.using(policy=LastComeFirstServed, block_pool=DictPool) as used:
                blocks.append(used)
                done.wait(0.02)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        asyncio.run(all_of_them(engine))
    finally:
        done.set()
        thread.join()
    assert any(used.calls["block_pool"] for used in blocks)
    assert asyncio.run(ask(engine, 0)) == expected[0]
    assert engine.engine._adopted == PARTS.functions
    engine.close()


# ---- errors in user-supplied classes


class GivesTwice(DictPool):
    """Allocates the same blocks over and over."""

    def allocate(self, count):
        return [at % self.num_blocks for at in range(count)]

    def release(self, blocks):
        pass


class FailsLater(DictPool):
    """Fails after a while."""

    budget = 4

    def allocate(self, count):
        self.budget -= 1
        if self.budget < 0:
            raise ZeroDivisionError("my pool is wrong")
        return super().allocate(count)

    def release(self, blocks):
        if self.budget < 0:
            raise KeyError("and does not recover")
        super().release(blocks)


def test_a_pool_that_allocates_a_block_twice_changes_the_tokens(llm, expected):
    with minillm.using(block_pool=GivesTwice):
        assert tokens(llm) != expected
    assert tokens(llm) == expected


def test_a_pool_that_fails_midway_fails_its_requests_and_the_engine_stays_usable(llm, expected):
    with minillm.using(block_pool=FailsLater) as used:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match="my pool is wrong"):
                tokens(llm)
            assert not llm.engine.has_work and llm.stats()["running"] == 0
    assert used.calls["block_pool"] > 0
    assert tokens(llm) == expected
    llm.engine.scheduler.check()


def test_a_pool_that_fails_during_an_abort_affects_no_later_request(expected):
    class CannotRelease(DictPool):
        def release(self, blocks):
            raise ZeroDivisionError("cannot release")

    async def work(engine):
        with minillm.using(block_pool=CannotRelease), paused_steps() as resume:
            endless = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
            both = [asyncio.create_task(engine.generate(PROMPTS[i], endless, name)) for i, name in enumerate("ab")]
            await async_wait_until(lambda: engine.stats()["running"] > 0)
            engine.abort("a")  # "b" may have come too late for the step that is paused, and fails at its own end then
            resume.set()
            for each in both:
                with pytest.raises(ZeroDivisionError, match="cannot release"):
                    await each
        return (await engine.generate(PROMPTS[2], GREEDY)).token_ids

    engine = AsyncLLM(**OPTIONS, run_ahead=0)  # nothing is in flight, so its blocks are released at once
    assert asyncio.run(asyncio.wait_for(work(engine), TIMEOUT)) == expected[2]
    assert engine.alive
    engine.close()


class Never(FirstComeFirstServed):
    """Gives no request a token."""

    def share(self, pending, budget):
        return pending * 0


class NeverChunks(FirstComeFirstServed):
    """A prompt longer than a step's budget waits forever."""

    def share(self, pending, budget):
        return pending * (pending.cumsum() <= budget)


class Spends(FirstComeFirstServed):
    def share(self, pending, budget):
        return pending


class Owes(FirstComeFirstServed):
    def share(self, pending, budget):
        return pending * 0 - 1


class GivesMore(FirstComeFirstServed):
    def share(self, pending, budget):
        return pending + 1


class Halves(FirstComeFirstServed):
    def share(self, pending, budget):
        return pending / 2


class ForgetsRows(FirstComeFirstServed):
    def share(self, pending, budget):
        return [budget, 1, 2]


class LetsNobodyIn(FirstComeFirstServed):
    def admits(self, running):
        return False


class NoNumber(FirstComeFirstServed):
    def key(self, request):
        return request.request_id


class NotANumber(FirstComeFirstServed):
    def key(self, request):
        return np.nan


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Never, "policy Never: share lets nothing run; nothing is in flight, 0 requests have a row, 6 wait"),
        (NeverChunks, "policy NeverChunks: share lets nothing run; nothing is in flight, 0 requests have a row"),
        (Spends, r"policy Spends: share\(pending=\[40\], budget=\d+\) gave \[40\]; that is 40 tokens in all"),
        (Owes, r"policy Owes: share\(pending=\[.*\], budget=24\) gave \[.*\]; each must be from 0 to what is pending"),
        (GivesMore, r"policy GivesMore: share\(pending=\[9\], budget=24\) gave \[10\]; each must be from 0"),
        (Halves, r"policy Halves: share.* gave \[4.5\]; one whole number for each of 1 rows was asked for"),
        (ForgetsRows, r"policy ForgetsRows: share.* gave \[24, *1, *2\]; one whole number for each of 1 rows"),
        (LetsNobodyIn, "policy LetsNobodyIn: admits lets nothing run; nothing is in flight, 0 requests .*, 6 wait"),
        (NoNumber, "policy NoNumber: key must give a number to sort by, not 'request-"),
        (NotANumber, "policy NotANumber: key must give a number to sort by, not nan"),
    ],
)
def test_invalid_policy_results_are_errors_and_nothing_hangs(llm, expected, policy, message):
    with minillm.using(policy=policy), pytest.raises(PolicyError, match=message):
        tokens(llm)
    assert not llm.engine.has_work
    assert tokens(llm, PROMPTS[:2]) == expected[:2]


class Leaks(DictPool):
    def release(self, blocks):
        pass


class Beyond(DictPool):
    def allocate(self, count):
        return [block + self.num_blocks for block in super().allocate(count)]


class GivesFewer(DictPool):
    def allocate(self, count):
        return super().allocate(count)[1:]


class Pretends(DictPool):
    def __init__(self, num_blocks):
        super().__init__(2 * num_blocks)


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (
            Leaks,
            "Leaks has lost blocks: nothing is in flight, 0 requests .* only . of 12 blocks are available",
        ),
        (Beyond, r"Beyond.allocate gave \[.*1[2-9].*\]; blocks go from 0 to 11"),
        (GivesFewer, r"GivesFewer.allocate\(1\) gave 0 blocks"),
        (Pretends, "Pretends.num_blocks is 24, and it was made for 12 blocks"),
    ],
)
def test_invalid_pool_results_are_errors_and_nothing_hangs(llm, expected, pool, message):
    with minillm.using(block_pool=pool), pytest.raises(BlockPoolError, match=message):
        tokens(llm, PROMPTS * 3)
    assert not llm.engine.has_work
    assert tokens(llm, PROMPTS[:2]) == expected[:2]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"policy": LastComeFirstServed()},
            "policy must be a class, not an object of LastComeFirstServed; give",
        ),
        ({"block_pool": "mine"}, "block_pool must be a class, not an object of str"),
    ],
)
def test_an_override_that_is_not_a_class_is_rejected_at_once(parts, message):
    with pytest.raises(OverrideError, match=message), minillm.using(**parts):
        pass


def test_missing_methods_are_named_with_a_remedy(llm, expected):
    class Half:
        num_blocks = available = cached = 0

        def allocate(self, count):
            return []

    message = "Half cannot be a block_pool: it has no share, .*unreferenced; .*derive the class from minillm.*Pool"
    with minillm.using(block_pool=lambda blocks: Half()), pytest.raises(OverrideError, match=message):
        tokens(llm)
    assert tokens(llm, PROMPTS[:2]) == expected[:2]


# ---- unsolved exercises


def stub(kind, method):
    def raise_it(self, *args):
        raise NotSolvedYet(f"write {method}")

    body = property(raise_it) if method in ("available", "cached") else raise_it
    return type("Mine", (kind,), {method: body})


METHODS = ["__init__", "available", "cached", "allocate", "share", "release", "lookup", "register", "unreferenced"]


@pytest.mark.parametrize(
    ("part", "kind", "method"),
    [("block_pool", BlockPool, method) for method in [*METHODS, "forget"]]
    + [("policy", LastComeFirstServed, method) for method in ("__init__", "key", "admits", "share")],
)
def test_a_class_with_a_stub_falls_back_completely_and_is_reported(llm, expected, part, kind, method):
    with minillm.using(**{part: stub(kind, method)}) as used:
        assert tokens(llm, PROMPTS[:2]) == expected[:2]
        assert class_names(llm) == OWN
    assert used.not_solved == {part: f"write {method}"} and used.calls == {part: 0}


def test_a_stub_reached_only_in_some_steps_falls_back_too(llm, expected):
    class Mine(FirstComeFirstServed):
        def share(self, pending, budget):
            if pending.sum() <= budget:
                return pending
            raise NotSolvedYet("the budget is too small")

    with minillm.using(policy=Mine) as used:
        assert tokens(llm, PROMPTS[:2]) == expected[:2]
    assert used.not_solved == {"policy": "the budget is too small"}
