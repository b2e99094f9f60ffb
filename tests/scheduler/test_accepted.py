"""Steps with drafts: accepted tokens count, rejected ones leave no trace."""

import numpy as np
import pytest

from minillm.request import Request, RequestOptions, SamplingParams
from minillm.scheduler import Scheduler
from minillm.speculation import ProposerError
from minillm.speculation.control import NEVER
from tests.speculation.proposers import Told, speculation


def running(*prompts: int, limit: int = 40, drafts=(), most: int = 3, **options) -> Scheduler:
    """A scheduler whose requests are prefilled and have one output token each. drafts: of each request."""
    proposer = Told({f"r{i}": each for i, each in enumerate(drafts)})
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "block_size": 4, "num_blocks": 64}
    scheduler = Scheduler(**(sizes | options), speculation=speculation(proposer, 4, most))
    for i, tokens in enumerate(prompts):
        prompt = np.arange(tokens, dtype=np.int32)
        scheduler.submit(Request(f"r{i}", prompt, SamplingParams(), limit=limit, stop_ids=(99,)))
    scheduler.complete(scheduler.schedule(), np.full(len(prompts), 50))
    return scheduler


@pytest.mark.parametrize("accepted", [[1, 1], [3, 1], [2, 3]])
def test_rows_continue_after_the_last_accepted_token(accepted):
    scheduler = running(5, 9, drafts=[[60, 61], [70, 71]])
    step = scheduler.schedule()
    assert step.queries.tolist() == [3, 3] and step.queries_per_decode == 3 and step.decodes == 2
    assert step.drafts.tolist() == [[60, 61], [70, 71]] and step.drafted.tolist() == [2, 2]
    assert step.token_rows.tolist() == [0, 0, 0, 1, 1, 1]
    assert step.for_each_token(step.ends).tolist() == [6, 7, 8, 10, 11, 12]
    tokens = np.array([[60, 61, 62], [70, 71, 72]])
    assert scheduler.complete(step, tokens, np.array(accepted)) == []
    for row, prompt, count, new in zip(step.rows, (5, 9), accepted, tokens, strict=True):
        assert scheduler.confirmed[row] == scheduler.known[row] == prompt + 1 + count
        assert scheduler.computed[row] == prompt + count, "the last token's key and value are not written yet"
        assert scheduler.tokens[row, prompt + 1 : prompt + 1 + count].tolist() == new[:count].tolist()
    counted = scheduler.speculation.stats()
    assert (counted["drafts"], counted["draft_tokens"], counted["accepted_tokens"]) == (2, 4, sum(accepted) - 2)
    expected = scheduler.known[:2] - 1
    assert scheduler.schedule().starts.tolist() == expected.tolist()
    scheduler.check()


def test_a_stop_token_among_the_accepted_tokens_ends_the_request_there():
    scheduler = running(5, 9, drafts=[[60, 61], [70, 71]])
    step = scheduler.schedule()
    (ended,) = scheduler.complete(step, np.array([[60, 99, 62], [70, 71, 72]]), np.array([3, 2]))
    assert ended.finish_reason == "stop" and ended.known[6:].tolist() == [60, 99]
    assert scheduler.confirmed[step.rows[1]] == 12
    assert scheduler.speculation.proposer.forgotten == ["r0"]
    scheduler.check()


def test_no_draft_is_run_past_the_length_limit():
    scheduler = running(5, 9, limit=12, drafts=[[60, 61, 62], [70, 71, 72]])
    step = scheduler.schedule()
    assert step.drafted.tolist() == [1, 3], "the last query of a request yields its last token"
    assert step.rows.tolist() == [1, 0] or step.decodes == 1
    tokens = {0: [60, 61, 62, 63], 1: [70, 71, -1, -1]}
    sampled = np.array([tokens[row] for row in step.rows.tolist()])
    (ended,) = scheduler.complete(step, sampled, 1 + step.drafted)
    assert ended.request_id == "r1" and ended.finish_reason == "length" and ended.known[10:].tolist() == [70, 71]
    scheduler.check()


def test_the_length_limit_within_the_accepted_tokens_ends_the_request_there():
    scheduler = running(9, limit=12, drafts=[[70]])
    step = scheduler.schedule()
    (ended,) = scheduler.complete(step, np.array([[70, 71, 72]]), np.array([3]))
    assert ended.finish_reason == "length" and ended.known[10:].tolist() == [70, 71]


def test_a_row_does_not_run_on_while_its_drafts_are_unread():
    scheduler = running(5, 9, drafts=[[60], []])
    first = scheduler.schedule()
    assert first.drafted.sum() == 1 and len(first.rows) == 2
    scheduler.speculation._next[1] = NEVER  # the second request gets no drafts any more
    assert scheduler.schedule() is None, "the second request could run ahead, but then alone"
    scheduler.complete(
        first, np.array([[70, 0], [60, 61]] if first.rows[0] else [[60, 61], [70, 0]]), 1 + first.drafted
    )
    scheduler.speculation._next[0] = NEVER
    scheduler.speculation.proposer.drafts.clear()
    second, ahead = scheduler.schedule(), scheduler.schedule()
    assert set(second.rows.tolist()) == set(ahead.rows.tolist()) == {0, 1} and ahead.drafts is None
    scheduler.check()


def test_a_step_that_runs_on_from_drafts_is_refused_because_they_may_be_rejected():
    scheduler = running(5, drafts=[[60, 61]])
    drafts = scheduler.schedule()
    scheduler.speculation._next[0], scheduler.speculation.unread[0] = NEVER, False
    scheduler.schedule()  # starts at 8, after all three tokens
    with pytest.raises(AssertionError, match="ran on from drafts that may be rejected"):
        scheduler.complete(drafts, np.array([[60, 61, 62]]), np.array([1]))


def test_drafts_take_what_is_left_of_the_budget_and_no_block_from_others():
    scheduler = running(5, 9, drafts=[[60, 61, 62], [70, 71, 72]], max_num_batched_tokens=16)
    scheduler.submit(Request("new", np.arange(100, 112, dtype=np.int32), SamplingParams(), limit=20))
    step = scheduler.schedule()
    assert step.queries.sum() == 16 and step.drafted.sum() == 2, "two tokens, twelve of the new prompt, two drafts"
    tight = running(5, 10, drafts=[[60, 61, 62], [70, 71, 72]], limit=16, num_blocks=5)
    step = tight.schedule()
    assert tight.pool.available == 1 and not tight.preemptions, "both would need one more block, and only one is left"
    assert dict(zip(step.rows.tolist(), step.drafted.tolist(), strict=True)) == {0: 2, 1: 1}, "as far as its blocks go"
    tight.check()


def test_drafts_that_were_planned_run_only_where_the_step_has_room():
    scheduler = running(5, 9, drafts=[[60, 61, 62], [70, 71, 72]], max_num_batched_tokens=12)
    step = scheduler.schedule()
    assert scheduler.schedule() is None, "while a step runs, the next one's drafts are counted"
    tokens = {0: [60, 61, 62, 63], 1: [70, 71, 72, 73]}
    scheduler.complete(step, np.array([tokens[row] for row in step.rows.tolist()]), np.array([4, 4]))
    scheduler.submit(Request("new", np.arange(100, 106, dtype=np.int32), SamplingParams(), limit=20))
    step = scheduler.schedule()
    assert step.queries.sum() == 12 and step.drafted.sum() == 4, "two tokens, six of the new prompt, four drafts"


def test_a_draft_that_ends_the_request_and_those_after_it_are_not_run():
    scheduler = running(5, drafts=[[60, 99, 61]])
    assert scheduler.schedule().drafts.tolist() == [[60]]


def test_a_request_can_have_no_drafts():
    scheduler = running(5, drafts=[[60], [70]])
    alone = RequestOptions(speculate=False)
    scheduler.submit(Request("r1", np.arange(9, dtype=np.int32), SamplingParams(), limit=40, options=alone))
    step = scheduler.schedule()
    tokens = {0: [60, 61], 1: [50, 0]}
    scheduler.complete(step, np.array([tokens[row] for row in step.rows.tolist()]), 1 + step.drafted)
    step = scheduler.schedule()
    assert dict(zip(step.rows.tolist(), step.drafted.tolist(), strict=True)) == {0: 1, 1: 0}


def test_no_block_with_a_rejected_token_can_be_found():
    scheduler = running(6, drafts=[[60]])
    step = scheduler.schedule()  # positions 6 and 7, the end of the second block
    scheduler.complete(step, np.array([[61, 62]]), np.array([1]))
    scheduler.finish(scheduler.requests[0], "abort")
    assert [scheduler.pool.references[block] for block in range(64)] == [0] * 64
    assert scheduler.pool.cached == 1, "only the first block is full of tokens that are known"


@pytest.mark.parametrize(
    ("answer", "said"),
    [([[-1]], "token ids from 0 to 999"), ([[1000]], "token ids"), ([[0.5]], "token ids"), ([], "0 lists for 1 req")],
)
def test_a_proposers_answer_is_checked_before_it_is_run(answer, said, monkeypatch):
    scheduler = running(5)
    monkeypatch.setattr(scheduler.speculation.proposer, "propose", lambda asked: answer)
    with pytest.raises(ProposerError, match=said):
        scheduler.schedule()
