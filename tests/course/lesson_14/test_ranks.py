"""Lesson 14's set-ups: ranks that are threads, and an adapter for the learner's rule."""

import pytest
import torch

from minillm.course.lesson_14 import checks, checks_exchanges, dividing
from minillm.course.lesson_14.ranks import Stuck, together
from minillm.model import modules, parallel
from minillm.model.loader import EMBEDDED, read_config


def test_messages_arrive_in_order_where_they_are_sent():
    def swap(x, ranks):
        other = 1 - ranks.rank
        return [float(ranks.exchange(x + add, other, other)) for add in (0, 1)]

    ran = together(swap, [torch.tensor(10.0), torch.tensor(20.0)])
    assert ran.results == [[20, 21], [10, 11]] and ran.unread == 0
    assert [(each.sent, each.rounds) for each in ran.ranks] == [(2, 2)] * 2


def test_a_message_stays_what_was_sent():
    def change(x, ranks):
        first = ranks.exchange(x, 1 - ranks.rank, 1 - ranks.rank)
        x += 1
        ranks.exchange(x, 1 - ranks.rank, 1 - ranks.rank)
        return float(first)

    assert together(change, [torch.tensor(10.0), torch.tensor(20.0)]).results == [20, 10]


def test_all_gather_joins_in_the_order_of_ranks():
    def gather(x, ranks):
        return ranks.all_gather(x).tolist()

    assert together(gather, [torch.full((2, 1), float(rank)) for rank in range(3)]).results == [[[0, 1, 2]] * 2] * 3


def test_ranks_that_all_wait_are_told_so():
    def wait(x, ranks):
        return ranks.exchange(x, (ranks.rank + 1) % 3, (ranks.rank + 1) % 3)

    with pytest.raises(Stuck, match="rank 0 of 3 waits for a message from rank 1, which sends it none"):
        together(wait, [torch.zeros(1)] * 3)


def test_a_rank_that_ends_leaves_none_waiting():
    def ends(x, ranks):
        return x if ranks.rank == 0 else ranks.exchange(x, 0, 0)

    with pytest.raises(Stuck, match="rank 1 of 2 waits for a message from rank 0"):
        together(ends, [torch.zeros(1)] * 2)


def test_a_rank_does_not_exchange_with_itself():
    """Over gloo it could not."""

    def sends(x, ranks):
        return ranks.exchange(x, ranks.rank, 1 - ranks.rank)

    def receives(x, ranks):
        return ranks.exchange(x, 1 - ranks.rank, ranks.rank)

    for function in (sends, receives):
        with pytest.raises(AssertionError, match="rank 0 of 2 exchanges with itself: it has its own x already"):
            together(function, [torch.zeros(1)] * 2)


def test_what_a_rank_raises_is_what_is_raised():
    def raises(x, ranks):
        if ranks.rank == 1:
            raise ValueError("here")
        return ranks.exchange(x, 1, 1)

    with pytest.raises(ValueError, match="here"):
        together(raises, [torch.zeros(1)] * 2)


def test_the_rule_gets_each_matrix_of_the_model_by_its_name():
    asked = []

    def rule(name, out, inputs, parts, rank, size):
        asked.append(name)
        part = modules.Module(name, range(out), inputs, parts, name in dividing.BY_COLUMNS)
        return tuple(modules.shard(part, rank, size))

    shard = dividing.by_name(rule)
    for parts in modules.modules(read_config(EMBEDDED)).values():
        for module in parts:
            assert shard(module, 1, 2) == modules.shard(module, 1, 2)
    projections = {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert set(asked) == projections | {"embed_tokens"}


def problem(exercise, candidate) -> str:
    return next(str(result.problem) for result in exercise.examine(candidate) if result.problem)


def test_what_a_learner_reads():
    """The rank, what was expected, and what came."""

    def by_rows(name, out, inputs, parts, rank, size):
        return range(rank * out // size, (rank + 1) * out // size), range(inputs)

    assert "shard('o_proj', 6, 8, 4, 1, 2): expected (range(0, 6), range(4, 8)), got (range(3, 6), range(0, 8))" in (
        problem(checks.shard, by_rows)
    )
    assert "expected (rows, columns), got range(0, 8)" in problem(checks.shard, lambda *given: range(8))

    def stuck(x, ranks):
        return ranks.exchange(x, (ranks.rank + 1) % ranks.size, (ranks.rank + 1) % ranks.size) + x

    found = problem(checks_exchanges.all_reduce, stuck)
    assert "rank 0 of 3 waits for a message from rank 1, which sends it none" in found

    def leaves_messages(x, ranks):
        total = parallel.all_reduce(x, ranks)
        ranks._network.send(x, ranks.rank, 0)
        return total

    assert "2 messages were sent that no rank has received" in problem(checks_exchanges.all_reduce, leaves_messages)
    assert "expected (largest, token), got a Tensor" in problem(
        checks_exchanges.sharded_argmax, lambda logits, ranks: logits
    )
    assert "tokens are int64, not torch.float64: `.long()` converts them" in problem(
        checks_exchanges.sharded_argmax, lambda logits, ranks: (logits[:, 0], logits[:, 0].double())
    )
    assert "expected (largest, token), in this order" in problem(
        checks_exchanges.sharded_argmax, lambda logits, ranks: (logits[:, 0].long(), logits[:, 0])
    )

    def from_step_0(x, ranks):
        found = {}
        for step in range(ranks.size):
            source = (ranks.rank - step) % ranks.size
            found[source] = ranks.exchange(x, (ranks.rank + step) % ranks.size, source)
        return sum(found[rank] for rank in range(ranks.size))

    assert "rank 0 of 2 exchanges with itself" in problem(checks_exchanges.all_reduce, from_step_0)
    assert "is a list of 1 lists of 2 lists of 2 numbers: got a tuple" in problem(
        checks.timeline, lambda stage_ms, batches, steps: [[(0, 1), (1, 2)]]
    )
    assert "stage 1 begins batch 0 of step 0 at 1 ms, not at 0" in problem(
        checks.timeline, lambda stage_ms, batches, steps: [[[0, 0]] * batches] * steps
    )
