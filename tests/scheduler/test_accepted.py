"""Steps whose decode rows carry several tokens: accepted tokens count, rejected ones leave no trace."""

import numpy as np
import pytest

from minillm.request import Request, SamplingParams
from minillm.scheduler import Scheduler


def running(*prompts: int, limit: int = 40, **options) -> Scheduler:
    """A scheduler whose requests are prefilled and have one output token each."""
    scheduler = Scheduler(
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, block_size=4, num_blocks=64, **options
    )
    for i, tokens in enumerate(prompts):
        prompt = np.arange(tokens, dtype=np.int32)
        scheduler.submit(Request(f"r{i}", prompt, SamplingParams(), limit=limit, stop_ids=(99,)))
    step = scheduler.schedule()
    scheduler.complete(step, np.full(len(prompts), 50))
    return scheduler


def speculating(scheduler: Scheduler, queries: int):
    """The next step, as if each decode row carried `queries` tokens."""
    step = scheduler.schedule()
    assert step.decodes == len(step.rows)
    more = queries - 1
    scheduler.known[step.rows] += more
    scheduler.computed[step.rows] += more
    step.queries, step.queries_per_decode = step.queries + more, queries
    return step


@pytest.mark.parametrize("accepted", [[1, 1], [3, 1], [2, 3]])
def test_rows_continue_after_the_last_accepted_token(accepted):
    scheduler = running(5, 9)
    step = speculating(scheduler, 3)
    tokens = np.array([[60, 61, 62], [70, 71, 72]])
    assert scheduler.complete(step, tokens, np.array(accepted)) == []
    for row, prompt, count, new in zip(step.rows, (5, 9), accepted, tokens, strict=True):
        assert scheduler.confirmed[row] == scheduler.known[row] == prompt + 1 + count
        assert scheduler.computed[row] == prompt + count, "the last token's key and value are not written yet"
        assert scheduler.tokens[row, prompt + 1 : prompt + 1 + count].tolist() == new[:count].tolist()
    assert (scheduler.schedule().queries == 1).all()
    scheduler.check()


def test_a_stop_token_among_the_accepted_tokens_ends_the_request_there():
    scheduler = running(5, 9)
    step = speculating(scheduler, 3)
    (ended,) = scheduler.complete(step, np.array([[60, 99, 62], [70, 71, 72]]), np.array([3, 2]))
    assert ended.finish_reason == "stop" and ended.known[6:].tolist() == [60, 99]
    assert scheduler.confirmed[step.rows[1]] == 12
    scheduler.check()


def test_the_length_limit_within_the_accepted_tokens_ends_the_request_there():
    scheduler = running(5, 9, limit=12)
    step = speculating(scheduler, 3)
    (ended,) = scheduler.complete(step, np.array([[60, 61, 62], [70, 71, 72]]), np.array([3, 3]))
    assert ended.request_id == "r1" and ended.finish_reason == "length" and ended.known[10:].tolist() == [70, 71]
    scheduler.check()


def test_a_step_launched_ahead_of_drafts_is_refused_because_it_may_continue_from_rejected_ones():
    scheduler = running(5)
    drafts = speculating(scheduler, 3)
    scheduler.schedule()  # starts at 8, after all three tokens
    with pytest.raises(AssertionError, match="continues from tokens that may be rejected"):
        scheduler.complete(drafts, np.array([[60, 61, 62]]), np.array([1]))
