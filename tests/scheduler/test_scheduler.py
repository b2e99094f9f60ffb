"""The cost of a scheduler step: requests that wait cause no work. Admission and preemption keep cached blocks."""

import numpy as np
import pytest

from minillm.kv_cache import BlockPool
from minillm.request import Request, RequestOptions, SamplingParams
from minillm.scheduler import Scheduler, Step
from minillm.scheduler.policies import FirstComeFirstServed

pytestmark = pytest.mark.key

BEGINNING = list(range(100, 140))


class CountsLookups(BlockPool):
    looked_up = 0

    def lookup(self, keys):
        keys = list(keys)
        self.looked_up += len(keys)
        return super().lookup(keys)


def scheduler_with(num_blocks: int, windows: tuple, **options) -> Scheduler:
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128, "block_size": 4}
    return Scheduler(**sizes | options, num_blocks=num_blocks, windows=windows, pool=CountsLookups(num_blocks))


def request(name: str, prompt: list[int], output: int) -> Request:
    return Request(name, np.array(prompt, np.int32), SamplingParams(max_tokens=output), len(prompt) + output)


def step(scheduler: Scheduler) -> Step:
    made = scheduler.schedule()
    scheduler.complete(made, np.ones(int(made.samples.sum()), np.int64))
    return made


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_a_decode_step_looks_up_no_prefix_for_a_request_that_waits_for_blocks(windows):
    scheduler = scheduler_with(40 * len(windows), windows)
    for each in (request("running", [1], 100), request("cached", BEGINNING, 1)):
        scheduler.submit(each)
    step(scheduler)
    held = scheduler.pool.allocate(scheduler.pool.available - 15)
    waiting = request("waiting", BEGINNING + [2] * 40, 8)
    scheduler.submit(waiting)
    step(scheduler)
    before = scheduler.pool.looked_up
    assert before > 0
    for _ in range(8):
        step(scheduler)
    assert scheduler.waiting == [waiting] and scheduler.pool.looked_up == before
    scheduler.pool.release(held)
    step(scheduler)
    assert scheduler.waiting == []


def test_a_step_whose_budget_the_decodes_use_looks_up_no_prefix():
    scheduler = scheduler_with(40, (None,), max_num_batched_tokens=1)
    scheduler.submit(request("running", [1], 20))
    step(scheduler)
    scheduler.submit(request("waiting", BEGINNING, 8))
    before = scheduler.pool.looked_up
    step(scheduler)
    assert scheduler.pool.looked_up == before and len(scheduler.waiting) == 1


def test_a_request_that_was_refused_joins_once_just_its_blocks_are_free():
    """Two for its prompt, and one that the running row is expected to take."""
    scheduler = scheduler_with(20, (None,))
    scheduler.submit(request("running", [1], 20))
    step(scheduler)
    held = scheduler.pool.allocate(scheduler.pool.available - 2)
    waiting = request("waiting", list(range(8)), 4)
    scheduler.submit(waiting)
    step(scheduler)
    assert scheduler.waiting == [waiting]
    scheduler.pool.release(held[:1])
    step(scheduler)
    assert scheduler.waiting == []


class ShortChunks(FirstComeFirstServed):
    def share(self, pending, budget):
        return super().share(np.minimum(pending, 16), budget)


def test_a_request_waiting_for_blocks_joins_once_the_blocks_it_can_share_are_filled():
    scheduler = scheduler_with(26, (None,), policy=ShortChunks())
    first, second = request("first", BEGINNING + [1] * 40, 20), request("second", BEGINNING + [2] * 4, 8)
    scheduler.submit(first)
    scheduler.submit(second)
    step(scheduler)
    assert second.row < 0
    for _ in range(3):
        step(scheduler)
    assert second.row >= 0 and scheduler.confirmed[first.row] == len(first.prompt), (
        "the first request is still in prefill"
    )


def test_a_preempted_request_continues_from_its_blocks_that_are_still_cached():
    scheduler = scheduler_with(17, (None,))
    evicted = []
    scheduler.pool.watch_evictions(evicted.append)
    scheduler.submit(request("first", [1] * 16, 40))
    victim = request("victim", BEGINNING, 8)
    scheduler.submit(victim)
    while victim.row < 0:
        step(scheduler)
    while victim.row >= 0:
        held, computed = scheduler.tables.of(victim.row).tolist(), int(scheduler.computed[victim.row])
        step(scheduler)
    while victim.row < 0:
        gone = set(evicted)
        made = step(scheduler)
    full = held[: computed // scheduler.block_size]
    kept = [block for block in full if block not in gone]
    assert 0 < len(kept) < len(full) and kept == full[: len(kept)], "only its last blocks should have been evicted"
    assert made.starts[made.rows == victim.row] == [len(kept) * scheduler.block_size]
    assert scheduler.preemptions == 1


def test_a_row_keeps_no_stop_token_of_the_request_before():
    scheduler = scheduler_with(40, (None,))
    first, second = request("first", [5, 6], 8), request("second", [5, 6], 3)
    first.stop_ids = (1, 7)
    for each in (first, second):
        scheduler.submit(each)
        while scheduler.has_work:
            step(scheduler)  # each token is a 1
    assert (first.finish_reason, second.finish_reason) == ("stop", "length")


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_a_joining_request_leaves_the_blocks_that_running_rows_need_next(windows):
    """There are enough blocks for its prompt, but a running row would then lack one and be preempted."""
    groups = len(windows)
    scheduler = scheduler_with(7 * groups - 1, windows)
    # The first row will need a second block.
    running = [request(str(length), [9] * length, 3) for length in (3, 1, 1, 1)]
    for each in running:
        scheduler.submit(each)
    step(scheduler)
    waiting = request("waiting", list(range(6)), 2)
    scheduler.submit(waiting)
    assert scheduler.pool.available == 2 * groups + (groups - 1), (
        "enough blocks for the request, but one too few for the row"
    )
    while scheduler.has_work:
        step(scheduler)
    assert [each.finish_reason for each in (*running, waiting)] == ["length"] * 5
    assert scheduler.preemptions == 0


def test_a_preempted_request_keeps_its_output():
    scheduler = scheduler_with(17, (None,))
    scheduler.submit(request("first", [1] * 16, 40))
    victim = request("victim", BEGINNING, 8)
    scheduler.submit(victim)
    while victim.row < 0:
        step(scheduler)
    while victim.row >= 0:
        confirmed = int(scheduler.confirmed[victim.row])
        step(scheduler)
    assert scheduler.preemptions == 1 and len(victim.known) == confirmed > len(victim.prompt)


def test_blocks_of_a_request_that_ended_wait_for_the_steps_in_flight():
    scheduler = scheduler_with(20, (None,))
    ended = request("ended", [5] * 6, 8)
    scheduler.submit(ended)
    step(scheduler)
    made, before = scheduler.schedule(), scheduler.pool.available
    scheduler.finish(ended, "abort")
    assert scheduler.pool.available == before < 20
    scheduler.complete(made, np.ones(1, np.int64))
    assert scheduler.pool.available == 20


def test_a_request_that_wants_its_prompt_scored_computes_all_of_it():
    scheduler = scheduler_with(40, (None,))
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    scored = Request("scored", np.array(BEGINNING, np.int32), params, len(BEGINNING) + 1)
    starts = []
    for each in (request("first", BEGINNING, 1), request("second", BEGINNING, 1), scored):
        scheduler.submit(each)
        starts += step(scheduler).starts.tolist()
    assert starts == [0, len(BEGINNING) - scheduler.block_size, 0]


def test_only_requests_that_may_share_count_as_looked_up():
    scheduler = scheduler_with(40, (None,))
    opted_out = request("opted out", BEGINNING, 1)
    opted_out.options = RequestOptions(use_prefix_cache=False)
    for each in (request("first", BEGINNING, 1), opted_out, request("second", BEGINNING, 1)):
        scheduler.submit(each)
        step(scheduler)
    assert scheduler.prefix_queries == 2 * len(BEGINNING)
    assert scheduler.prefix_hits == len(BEGINNING) - scheduler.block_size


COUNTED = ("tokens_run", "generated", "preemptions", "corrupted", "prefix_queries", "prefix_hits")


def test_a_scheduler_counts_on_where_another_ended():
    """Counters that fall would look like a restart to whoever collects them."""
    before, after = scheduler_with(17, (None,)), scheduler_with(17, (None,))
    for number, name in enumerate(COUNTED, start=5):
        assert getattr(before, name) == 0
        setattr(before, name, number)
    before.newest = before.read = 3
    after.count_on_from(before)
    assert [getattr(after, name) for name in COUNTED] == [5, 6, 7, 8, 9, 10]
    after.submit(request("next", [5], 1))
    assert after.schedule().number == 4


def test_a_prompt_whose_later_chunks_find_no_room_waits():
    """The first chunk alone would fit. With a window, a row gets blocks as its tokens are computed."""
    scheduler = scheduler_with(60, (None, 64), policy=ShortChunks())
    scheduler.submit(request("running", [5], 100))
    step(scheduler)
    prompt = list(range(60))
    chunk, whole = 15 + 4, 15 + 15  # blocks of a group of its own for all 60 tokens, and of 16 or of all in the other
    held = scheduler.pool.allocate(scheduler.pool.available - (chunk + whole) // 2)
    waiting = request("waiting", prompt, 4)
    scheduler.submit(waiting)
    step(scheduler)
    assert scheduler.waiting == [waiting]
    scheduler.pool.release(held)
    while scheduler.has_work:
        step(scheduler)
    assert waiting.finish_reason == "length" and scheduler.preemptions == 0
