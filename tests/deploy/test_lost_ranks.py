"""Replicas whose models are divided: what becomes of the streams of one that loses a rank."""

import asyncio
from contextlib import ExitStack, closing
from functools import partial

import pytest

from minillm import LLM, SamplingParams
from minillm.engine.async_llm import AsyncLLM
from minillm.server.worker.link import EngineGone
from tests.deploy.stand_ins import LocalRay, LocalReplica, collect, connected
from tests.parallel import forked
from tests.parallel.test_failures import dies, in_rank_1
from tests.waiting import TIMEOUT, async_wait_until

pytestmark = pytest.mark.timeout(TIMEOUT)

PROMPTS = [list(range(5, 45)), [7, 8, 9]]
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0, seed=7, ignore_eos=True)


@pytest.fixture(scope="module")
def tokens():
    """Those of one device."""
    with LLM(device="cpu", cpu_threads=1, num_blocks=64) as llm:
        return [each.token_ids for each in llm.generate(PROMPTS, SAMPLED)]


def with_two_replicas(tmp_path, work):
    """Run `work(replicated)`, and return what it does, which replicas were chosen, and how many choices moved.

    The first replica that takes seven steps loses a rank then; the other one does not.
    """
    begun, moved, told = tmp_path / "begun", [], []
    with ExitStack() as stack:
        made = []
        for name in "ab":
            ranks = stack.enter_context(forked.ranks(2, partial(in_rank_1, dies, begun) if name == "a" else None))
            llm = stack.enter_context(forked.engine(ranks, num_blocks=64))
            made.append(LocalReplica(stack.enter_context(closing(AsyncLLM(engine=llm))), name))
            stack.callback(made[-1].kill)

        async def everything():
            options = {"moved": moved.append, "tell": lambda what: told.append(what["replica"])}
            async with connected(LocalRay(*made), policy=lambda found: found, **options) as replicated:
                found = await work(replicated)
                await async_wait_until(lambda: "a" in replicated._replicas or set(replicated._keeping) == {"b"})
                assert set(replicated._replicas) == {"b"}, "the other one's process is about to end"
                return found

        found = asyncio.run(everything())
    assert begun.exists()
    return found, told, sum(moved)


def test_a_lost_rank_changes_no_token_of_any_stream(tokens, tmp_path):
    async def work(replicated):
        found = await asyncio.gather(*(collect(replicated, [each], SAMPLED) for each in PROMPTS))
        again = await collect(replicated, [PROMPTS[1]], SAMPLED)
        return [each[0].token_ids for each in found], again[0].token_ids

    (found, again), told, moved = with_two_replicas(tmp_path, work)
    assert found == tokens and again == tokens[1]
    assert moved and told[0] == "a" and told[-1] == "b"


def test_a_stream_that_cannot_go_on_elsewhere_says_which_rank_was_lost(tmp_path, caplog):
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, presence_penalty=0.5)

    async def work(replicated):
        with pytest.raises(EngineGone, match="the replica that ran this request has ended, and .*: send it again"):
            await collect(replicated, PROMPTS[:1], params)

    with_two_replicas(tmp_path, work)
    assert "replica a has failed: rank 1 (process" in caplog.text and "was killed by SIGKILL" in caplog.text
