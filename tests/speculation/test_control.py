"""How many drafts a row gets, from their acceptance and from times that the tests make up."""

import numpy as np
import pytest

from minillm.config import EngineConfig
from minillm.request import Request, SamplingParams
from minillm.scheduler import Scheduler
from minillm.scheduler.step import Step
from minillm.speculation import Asked, Speculation
from minillm.speculation.control import FIRST, LONGEST, MISSES
from minillm.speculation.costs import SEEN, Costs
from tests.speculation.proposers import Told

ROW = np.array([0])


def made(seconds: dict[tuple[bool, int], float], device: str = "cpu", rows: int = 64) -> Speculation:
    """seconds: of steps (with drafts, tokens)."""
    config = EngineConfig(max_num_seqs=rows, speculate="ngram", device=device, run_ahead=1).on(device)
    found = Speculation(Told({}), config, 1000)
    for (drafted, tokens), time in seconds.items():
        for _ in range(SEEN):
            found.costs.observe(drafted, tokens, time)
    for row in range(rows):
        found.occupy(row, True)
    return found


def lived(found: Speculation, right: int, drafted: int, steps: int = 12) -> None:
    for _ in range(steps):
        found.learn(ROW, np.array([drafted]), np.array([right]))


def chosen(found: Speculation, known: int = 100, proposed: int = 7, others: int = 0, left: int = 100) -> int:
    return int(found.worth(ROW, np.array([known]), np.array([proposed], np.int32), others, left)[0])


FLAT = {(False, 1): 1.0, (True, 2): 1.3, (True, 8): 1.33}  # a GPU: the weights are read once, whatever the tokens
STEEP = {(False, 1): 1.0, (True, 2): 1.9, (True, 8): 7.0}  # each token costs as much as the first


def test_more_drafts_run_the_more_of_them_were_right():
    counts = []
    for right in (0, 1, 3, 7):
        lived(found := made(FLAT), right, 7)
        counts.append(chosen(found))
    assert counts[0] == 0 and counts == sorted(counts) and counts[-1] == 7


def test_rows_that_a_step_has_no_room_for_run_ahead():
    """On a GPU with as many rows as a step may yield tokens, no draft can run, however good it is."""
    found = made(FLAT | {(False, 3): 1.0, (True, 12): 1.3})
    for row in range(3):
        for _ in range(12):
            found.learn(np.array([row]), np.array([7]), np.array([7]))
    rows, known, proposed = np.arange(3), np.array([100] * 3), np.array([7] * 3, np.int32)
    assert found.worth(rows, known, proposed, 0, left=9).tolist() == [7, 2, 0]
    assert found.waits(rows, known + 1).tolist() == [True, True, False]
    assert found.worth(rows[:2], known[:2], proposed[:2], 1, left=0).tolist() == [0, 0]
    assert not found.waits(rows, known + 1).any()


def test_no_draft_runs_where_a_token_costs_as_much_as_it_saves():
    lived(found := made(STEEP), 3, 7)
    assert chosen(found) == 0
    lived(found := made(FLAT), 3, 7)
    assert chosen(found) > 0


def test_drafts_cost_more_next_to_many_rows():
    seconds = FLAT | {(False, 64): 2.0, (True, 65): 2.3, (True, 71): 3.0}
    lived(found := made(seconds), 1, 7)
    assert chosen(found) > 0
    assert chosen(found, others=63) == 0


def test_steps_without_drafts_are_measured_first():
    found = made({})
    assert chosen(found) == 0
    for _ in range(SEEN):
        found.costs.observe(False, 1, 1.0)
    assert chosen(found) > 0, "what steps with drafts cost is found out by running one"


def test_a_row_whose_drafts_are_wrong_pauses_for_twice_as_long_each_time():
    found, known, pauses = made(FLAT), 100, []
    for _ in range(12):
        while chosen(found, known):
            found.learn(ROW, np.array([1]), np.array([0]))
            known += 1
        begun = known
        while not found.waits(ROW, np.array([known]))[0]:
            known += 1
        pauses.append(known - begun)
    assert pauses[:4] == [FIRST, 2 * FIRST, 4 * FIRST, 8 * FIRST] and pauses[-1] == LONGEST
    assert chosen(found, known), "a try"
    found.learn(ROW, np.array([4]), np.array([4]))
    lived(found, 0, 1)
    assert chosen(found, known) == 0
    assert not found.waits(ROW, np.array([known + FIRST - 1]))[0] and found.waits(ROW, np.array([known + FIRST]))[0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_row_without_proposals_runs_ahead_on_a_gpu(device):
    found = made(FLAT, device)
    for _ in range(MISSES):
        assert found.waits(ROW, np.array([100]))[0]
        assert chosen(found, proposed=0) == 0
        found.proposed(ROW, np.array([100]), np.array([0]))
    assert found.waits(ROW, np.array([100]))[0] == (device == "cpu")
    assert found.waits(ROW, np.array([100 + FIRST]))[0]


def test_a_late_miss_of_the_device_ends_no_pause():
    found = made(FLAT, "cuda")
    found.learn_ahead(1, ROW, np.array([100]), np.array([0]), np.array([0]))
    assert found.looks(0, 100) and not found.waits(ROW, np.array([100 + FIRST]))[0]
    found.found_none(0, 100)
    assert not found.looks(0, 100) and found.looks(0, 101), "the host looks at the same tokens once"
    found.occupy(0, wanted=True)
    lived(found, 0, 9)
    assert chosen(found) == 0 and not found.waits(ROW, np.array([100]))[0]
    found.learn_ahead(2, ROW, np.array([101]), np.array([0]), np.array([0]))  # launched before that
    assert not found.searches[0] and found.waits(ROW, np.array([100 + FIRST]))[0]


def test_a_new_row_begins_with_what_other_rows_had():
    good, bad = made(FLAT), made(FLAT)
    lived(good, 7, 7, 50)
    lived(bad, 0, 7, 50)
    for found, expected in ((good, 7), (bad, 0)):
        found.occupy(0, True)
        assert chosen(found) == expected


def test_a_row_that_wants_no_drafts_never_waits():
    found = made(FLAT)
    found.occupy(0, False)
    assert not found.waits(ROW, np.array([2**31 - 2]))[0]


def test_drafts_are_planned_before_the_result_is_there_if_there_is_room_for_all():
    lived(found := made(FLAT), 7, 7)
    most = np.array([7], np.int32)
    assert found.planned(ROW) is None
    found.plan(ROW, np.array([100]), most, 0, left=7)
    assert found.planned(ROW).tolist() == [7]
    assert found.planned(ROW) is None, "a plan is for one step"
    found.plan(ROW, np.array([100]), most, 0, left=6)
    assert found.planned(ROW) is None, "rows with nothing to propose may leave their share to others"
    found.plan(ROW, np.array([100]), most, 0, left=7)
    found.occupy(0, True)
    assert found.planned(ROW) is None, "it was planned for another request"


def test_a_row_that_a_plan_pauses_is_planned_anew_when_it_goes_on():
    lived(found := made(FLAT), 0, 7, 50)
    most = np.array([7], np.int32)
    found.plan(ROW, np.array([100]), most, 0, left=7)
    assert found._next[0] > 100, "the row pauses"
    found.plan(ROW, np.array([2000]), most, 0, left=6)  # no room for all: what is proposed decides
    assert found.planned(ROW) is None


class Slow(Told):
    slow = True

    def propose(self, asked):
        self.asked = [each.most for each in asked]
        return [[1] * each.most for each in asked]


def test_a_slow_proposer_is_asked_for_as_many_drafts_as_are_worth_drafting():
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "block_size": 4, "num_blocks": 64}
    config = EngineConfig(max_num_seqs=4, speculate="ngram", speculate_tokens=7).on("cpu")
    counts = []
    for drafting in (0.0, 0.3, 2.0):
        found = Speculation(Slow({}), config, 1000)
        for (drafted, tokens), time in FLAT.items():
            for _ in range(SEEN):
                found.costs.observe(drafted, tokens, time)
        found.costs.observe_drafting(1, 5, 5 * drafting)
        found._all_right, found._all_tried = 7.0, 10.0
        scheduler = Scheduler(**sizes, speculation=found)
        scheduler.submit(Request("r", np.arange(5, dtype=np.int32), SamplingParams(), limit=40, stop_ids=()))
        scheduler.complete(scheduler.schedule(), np.full(1, 50))
        found.proposer.asked = [0]
        scheduler.schedule()
        counts += found.proposer.asked
    assert counts[0] == 7 > counts[1] > counts[2] == 0


def test_a_row_for_which_a_slow_proposer_has_nothing_runs_ahead_on_a_gpu():
    found = made(FLAT, "cuda")
    found.slow = True
    for _ in range(MISSES):
        assert found.waits(ROW, np.array([100]))[0]
        assert chosen(found) > 0
        found.proposed(ROW, np.array([100]), np.array([0]))
    assert not found.waits(ROW, np.array([100]))[0] and found.waits(ROW, np.array([100 + FIRST]))[0]


def test_the_time_of_drafting_is_no_part_of_a_steps_time():
    found = made({})
    found.proposer, found.slow = Slow({}), True
    asked = [Asked("r", np.arange(3, dtype=np.int32), 4)]
    found.propose(asked)
    assert found.costs.drafting(1) == 0, "the first time, the prompt has to be read too"
    found.propose(asked)
    assert found.costs.drafting(1) > 0
    found._proposing = 3.0
    step = Step(0, ROW, ROW, np.ones(1, np.int32), np.ones(1, bool), 1)
    for _ in range(SEEN):
        found.timed(step, 4.0 if found._proposing else 1.0)
    assert found.costs.plain(1) == 1.0


def test_times_are_kept_by_tokens_and_a_disturbed_step_counts_little():
    costs = Costs()
    assert costs.plain(1) is None and costs.drafted(np.array([4, 9]), 1, 0.5).tolist() == [0.5, 0.5]
    for seconds in (9.0, 1.0):  # the first step of a kind is slow
        costs.observe(False, 1, seconds)
        costs.observe(True, 4, 2 * seconds)
        costs.observe(True, 8, 4 * seconds)
    assert costs.plain(1) == 1.0 and costs.plain(2) is None
    assert costs.drafted(np.array([2, 4, 6, 8, 64]), 2, 1.0).tolist() == [1, 2, 3, 4, 4]
    assert costs.drafted(np.array([4, 6]), 4, 1.0).tolist() == [2, 3], "the two kinds of steps may have one entry"
    costs.observe(False, 1, 1000.0)
    assert 1.0 < costs.plain(1) < 1.5
    assert costs.drafting(3) == 0
    costs.observe_drafting(1, 4, 4.0)
    costs.observe_drafting(8, 2, 16.0)
    assert [costs.drafting(rows) for rows in (1, 8, 9)] == [1, 8, 8] and 1 < costs.drafting(4) < 8
    assert costs.drafted(np.array([4]), 1, 5.0).tolist() == [5], "drafts never make a step shorter"
