"""Ctrl-C while ranks run a step: no step gets the answers of another one."""

from contextlib import suppress

import pytest

import minillm
from minillm import SamplingParams
from minillm.errors import RankFailed
from minillm.model.parallel import sharded_argmax
from minillm.parallel import ranks as module
from minillm.parallel.ranks import Member

from . import forked

SOME = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
OTHERS = [[9, 8], [7, 6, 5]]


def tokens(llm, prompts):
    return [each.token_ids for each in llm.generate(prompts, SOME)]


@pytest.mark.parametrize("stages", [1, 2])
def test_a_step_that_is_waited_for_is_given_up_and_the_next_ones_get_their_own_tokens(stages, monkeypatch):
    with forked.ranks(2) as ranks, forked.engine(ranks, num_blocks=16, pipeline_parallel_size=stages) as llm:
        wanted, wait, calls = tokens(llm, OTHERS), ranks.wait, []

        def interrupted(**options):
            calls.append(1)
            if len(calls) == 4:
                raise KeyboardInterrupt
            wait(**options)

        monkeypatch.setattr(ranks, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tokens(llm, [[5, 6, 7], [8, 9]])
        assert ranks.failure is None
        assert tokens(llm, OTHERS) == wanted


def within(monkeypatch, of, name):
    """Let the second call be interrupted once it has done its work."""
    before, calls = getattr(of, name), []

    def interrupted(*arguments, **options):
        found = before(*arguments, **options)
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(of, name, interrupted)


@pytest.mark.parametrize(
    ("of", "name"),
    [(Member, "read"), (module.pickle, "loads"), (module.connection.Connection, "send_bytes")],
    ids=["read", "loads", "send"],
)
def test_ranks_that_have_half_of_a_message_are_not_used_any_more(of, name, monkeypatch):
    with forked.ranks(2) as ranks, forked.engine(ranks, num_blocks=16) as llm:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            within(patch, of, name)
            tokens(llm, [[5, 6, 7], [8, 9]])
        with pytest.raises(RankFailed, match="^the ranks were interrupted .*; this engine cannot run any more"):
            tokens(llm, OTHERS)


def test_the_answers_to_what_is_replaced_go_to_no_step(monkeypatch):
    with forked.ranks(2) as ranks, forked.engine(ranks, num_blocks=16) as llm:

        def interrupted(**options):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(ranks, "wait", interrupted)
            with minillm.using(sharded_argmax=lambda logits, group: sharded_argmax(logits, group)):
                tokens(llm, OTHERS)
        assert "interrupted" in llm.engine.executor.failure
