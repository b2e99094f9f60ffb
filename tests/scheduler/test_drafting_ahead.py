"""Steps launched before the lengths of earlier ones are known: what the scheduler counts until it reads them."""

import numpy as np
import pytest

from minillm.config import MOST_AHEAD
from minillm.request import Request, RequestOptions, SamplingParams
from minillm.scheduler import Scheduler
from minillm.scheduler.policies import FirstComeFirstServed, StaticBatching
from tests.scheduler.test_accepted import running


def ahead(*prompts: int, drafts=(), **options) -> Scheduler:
    """A scheduler whose requests have one output token each, and drafts of the device from now on."""
    scheduler = running(*prompts, drafts=drafts, **({"max_model_len": 400, "num_blocks": 400} | options))
    scheduler.speculation.on_device = True
    return scheduler


def yielded(step, *accepted: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `complete` takes: all drafts were found, and each row gains `accepted` tokens."""
    tokens = np.full((len(step.rows), step.drafts.shape[1] + 1), 60)
    return tokens, np.array(accepted), step.drafted


def test_rows_are_counted_as_if_all_drafts_were_right_until_the_step_is_read():
    scheduler = ahead(5, 9, limit=60)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first.lookup.tolist() == [True, True] and second.lookup.tolist() == [False, False]
    assert first.starts.tolist() == [5, 9] and second.starts.tolist() == [9, 13] and first.drafted.tolist() == [3, 3]
    assert scheduler.known[:2].tolist() == [14, 18] and scheduler.confirmed[:2].tolist() == [6, 10]
    scheduler.complete(first, *yielded(first, 1, 4))
    assert scheduler.known[:2].tolist() == [11, 18] and scheduler.confirmed[:2].tolist() == [7, 14]
    scheduler.check()
    third = scheduler.schedule()
    assert third.starts.tolist() == [10, 17] and third.lookup.tolist() == [False, False]
    scheduler.complete(second, *yielded(second, 2, 2))
    scheduler.complete(third, *yielded(third, 1, 1))
    assert scheduler.known[:2].tolist() == scheduler.confirmed[:2].tolist() == [10, 17]
    assert scheduler.computed[:2].tolist() == [9, 16], "the newest token's key and value are not written yet"
    counted = scheduler.speculation.stats()
    assert (counted["draft_tokens"], counted["accepted_tokens"]) == (18, 5)


def test_rows_have_blocks_for_the_most_tokens_and_none_has_more_than_its_limit():
    scheduler = ahead(5, 9, limit=21)
    for _ in range(4):
        step = scheduler.schedule()
        assert (scheduler.tables.covered[:2] >= scheduler.computed[:2]).all()
        assert (scheduler.known[:2] <= 21).all()
    assert step.rows.tolist() == [0], "the other one waits, as it would have all its tokens"
    assert scheduler.schedule() is None


def test_tokens_in_flight_fit_the_ring_in_which_captured_steps_leave_them():
    scheduler = ahead(5, limit=390, most=11)
    for yields in (12, 12, 8):
        assert scheduler.schedule().drafted.tolist() == [yields - 1]
    assert scheduler.known[0] - scheduler.confirmed[0] == MOST_AHEAD + 1 and scheduler.schedule() is None


def test_a_draft_that_was_not_found_is_no_wrong_one():
    scheduler = ahead(5)
    step = scheduler.schedule()
    scheduler.complete(step, np.array([[60, 61, -1, -1]]), np.array([2]), np.array([1]))
    counted = scheduler.speculation.stats()
    assert (counted["draft_tokens"], counted["accepted_tokens"]) == (1, 1) and scheduler.confirmed[0] == 8


@pytest.mark.parametrize("free", [True, False])
def test_a_request_that_could_join_waits_for_the_steps_ahead(free):
    """It joins in a step with known lengths. If no row is free, the others go on."""
    scheduler = ahead(5, 9, max_num_seqs=3 if free else 2)
    scheduler.schedule()
    scheduler.submit(Request("new", np.arange(100, 112, dtype=np.int32), SamplingParams(), limit=40))
    assert (scheduler.schedule() is None) == free


def test_drafts_of_the_host_in_flight_are_read_before_the_device_drafts():
    scheduler = ahead(5, drafts=[[60]])
    scheduler.speculation.on_device = False
    step = scheduler.schedule()
    assert step.drafts.tolist() == [[60]] and step.lookup is None
    scheduler.speculation.on_device = True
    assert scheduler.schedule() is None, "the device does not count these"
    scheduler.complete(step, np.array([[60, 61]]), np.array([2]))
    assert scheduler.schedule().lookup.tolist() == [True]


def test_the_device_takes_no_blocks_that_others_need():
    """Where the most tokens have no room, the steps ahead are read, and the host's drafts take what is there."""
    scheduler = ahead(5, 10, num_blocks=7, limit=16, drafts=[[60, 61, 62], [70, 71, 72]])
    steps = []
    while (step := scheduler.schedule()) is not None:
        steps.append(step)
    assert steps and not scheduler.preemptions
    for step in steps:
        scheduler.complete(step, *yielded(step, *[1] * len(step.rows)))
    assert scheduler.schedule() is not None
    scheduler.check()


def test_a_request_without_drafts_runs_along():
    scheduler = ahead(5)
    options = RequestOptions(speculate=False)
    scheduler.submit(Request("r1", np.arange(9, dtype=np.int32), SamplingParams(), limit=40, options=options))
    step = scheduler.schedule()
    assert step.lookup is None, "its prompt"
    tokens = {row: [60, 0, 0, 0] for row in range(2)}
    scheduler.complete(step, np.array([tokens[row] for row in step.rows.tolist()]), np.ones(2, int))
    step = scheduler.schedule()
    assert step.lookup is not None and sorted(step.drafted.tolist()) == [0, 3]


class InTurn(FirstComeFirstServed):
    """Gives tokens to one row, and to the next one when it is asked again."""

    def __init__(self):
        self.asked = 0

    def share(self, pending, budget):
        self.asked += 1
        return np.where(np.arange(len(pending)) == self.asked % len(pending), np.minimum(pending, budget), 0)


@pytest.mark.parametrize("policy", [InTurn, StaticBatching])
def test_a_policy_that_keeps_something_between_steps_is_asked_once_for_each(policy):
    scheduler = ahead(5, 9)
    assert scheduler.schedule().lookup is not None
    scheduler = ahead(5, 9)
    scheduler.policy = policy()
    ran = []
    for _ in range(4):
        step = scheduler.schedule()
        assert step.lookup is None, "the host drafts"
        ran.append(step.rows.tolist())
        scheduler.complete(step, np.full((len(step.rows), 1), 60), np.ones(len(step.rows), int))
    assert ran == ([[1], [0], [1], [0]] if policy is InTurn else [[0, 1]] * 4)
