"""With a pipeline, steps in flight hold different rows, and each stage has a step to run."""

import numpy as np
import pytest

from .test_scheduler import request, scheduler_with

pytestmark = pytest.mark.key


def with_requests(stages, lengths, **options):
    scheduler = scheduler_with(200, (None,), stages=stages, **options)
    for i, length in enumerate(lengths):
        scheduler.submit(request(str(i), [*range(i * 20, i * 20 + length)], 40))
    return scheduler


def read(scheduler, step):
    scheduler.complete(step, np.ones(int(step.samples.sum()), np.int64))


@pytest.mark.parametrize("stages", [2, 3])
def test_steps_in_flight_share_the_rows_evenly(stages):
    scheduler = with_requests(stages, [2] * 6)
    flight = [scheduler.schedule() for _ in range(stages)]
    for turn in range(30):
        rows = np.concatenate([each.rows for each in flight])
        assert len(set(rows.tolist())) == len(rows), "a row runs before its last token is known"
        if turn > 10:
            assert sorted(len(each.rows) for each in flight) == [6 // stages] * stages
        read(scheduler, flight.pop(0))
        flight.append(scheduler.schedule())


def test_a_row_is_never_kept_waiting_by_older_ones():
    scheduler = with_requests(2, [2] * 7)
    flight, since = [scheduler.schedule(), scheduler.schedule()], {}
    for turn in range(40):
        for row in flight[-1].rows.tolist():
            since[row] = turn
        assert turn < 10 or all(turn - since.get(row, 0) <= 3 for row in scheduler.order.tolist())
        read(scheduler, flight.pop(0))
        flight.append(scheduler.schedule())


def test_one_request_waits_for_its_token():
    scheduler = with_requests(2, [3])
    step = scheduler.schedule()
    assert scheduler.schedule() is None
    read(scheduler, step)
    assert scheduler.schedule().starts.tolist() == [3]


def test_chunks_of_one_prompt_follow_each_other_through_the_stages():
    scheduler = with_requests(3, [18], max_num_batched_tokens=6)
    chunks = [scheduler.schedule() for _ in range(3)]
    assert [each.starts.tolist() for each in chunks] == [[0], [6], [12]]
    assert scheduler.schedule() is None
