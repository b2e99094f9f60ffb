"""A listener may fail or end another request; all other listeners still learn how theirs ended."""

import asyncio
import threading

import pytest

from minillm import LLM, AsyncLLM, SamplingParams
from tests.waiting import TIMEOUT, async_wait_until

LONG = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=1000, ignore_eos=True)
OPTIONS = {"device": "cpu", "num_blocks": 128, "max_num_seqs": 4}


@pytest.fixture
def engine():
    with LLM(**OPTIONS) as llm:
        yield llm.engine


def test_a_failing_listener_leaves_no_other_listener_waiting(engine):
    def failing(delta):
        raise LookupError("a mistake of the listener's")

    failed = engine.prepare([5] * 5, LONG, listener=failing)
    heard = []
    others = [engine.prepare([6] * 5, LONG), engine.prepare([7] * 5, LONG, listener=heard.append)]
    for each in [failed, *others]:
        engine.submit(each)
    with pytest.raises(LookupError, match="a mistake of the listener's"):
        for _ in range(10):
            engine.step()
    assert [each.completion.finish_reason for each in [failed, *others]] == ["abort"] * 3
    assert heard[-1].finish_reason == "abort"
    assert not engine.has_work
    engine.submit(engine.prepare([5] * 5, SamplingParams(max_tokens=2)))
    while engine.has_work:
        engine.step()


def test_a_request_ended_by_another_listener_keeps_its_tokens(engine):
    other = engine.prepare([6] * 5, LONG, listener=lambda delta: None)
    first = engine.prepare([5] * 5, LONG, listener=lambda delta: engine.abort(other.request.request_id))
    for each in (first, other):
        engine.submit(each)
    while engine.has_work:
        engine.step()
    assert other.completion.finish_reason == "abort"
    assert other.completion.token_ids == other.request.known[len(other.request.prompt) :].tolist()


@pytest.mark.parametrize("listener", [None, lambda delta: None])
def test_a_request_ended_by_another_listener_has_the_log_probabilities_of_its_tokens(listener, engine):
    scored = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True, logprobs=2)
    other = engine.prepare([6] * 5, scored, listener=listener, wants_text=False)

    def ends_it(delta):
        if len(first.completion.token_ids) == 3:
            engine.abort(other)

    first = engine.prepare([5] * 5, LONG, listener=ends_it)
    for each in (first, other):
        engine.submit(each)
    while engine.has_work:
        engine.step()
    done = other.completion
    assert done.finish_reason == "abort" and len(done.token_ids) == 3
    assert [max(each, key=each.get) for each in done.logprobs] == done.token_ids


def test_tokens_of_a_request_are_looked_at_one_by_one_only_where_someone_waits_for_them(engine):
    """With a thousand rows, the host would otherwise take longer than the GPU, also for log-probabilities alone."""
    scored, heard = SamplingParams(max_tokens=9, ignore_eos=True, logprobs=2), []
    alone = engine.prepare([5] * 5, scored, wants_text=False)
    told = engine.prepare([6] * 5, scored, wants_text=False, listener=heard.append)
    for each in (alone, told):
        engine.submit(each)
    engine.step()
    assert list(engine._watched.values()) == [told]
    while engine.has_work:
        engine.step()
    for each in (alone, told):
        assert len(each.completion.logprobs) == len(each.completion.token_ids) == 9
    assert [entry for delta in heard for entry in delta.logprobs or []] == told.completion.logprobs


def test_a_failure_does_not_affect_a_finished_stream():
    async def work():
        with LLM(**OPTIONS) as llm:
            streams = AsyncLLM(engine=llm.engine)

            def end_one_and_fail():
                llm.engine.abort("ends")
                streams._attempt(lambda: 1 / 0)

            held, resume = threading.Event(), threading.Event()
            streams._tell(lambda: held.set() or resume.wait(TIMEOUT))
            await async_wait_until(held.is_set)  # the engine's thread takes up nothing else until then
            ended = asyncio.create_task(streams.generate([5] * 5, LONG, request_id="ends"))
            endless = asyncio.create_task(streams.generate([6] * 5, ENDLESS))
            await async_wait_until(lambda: len(streams._commands) == 2)
            streams._tell(end_one_and_fail)
            resume.set()
            assert (await asyncio.wait_for(ended, TIMEOUT)).finish_reason == "abort"
            with pytest.raises(ZeroDivisionError):
                await asyncio.wait_for(endless, TIMEOUT)
            streams.close()

    asyncio.run(work())


def test_a_request_stopped_from_outside_keeps_all_its_text():
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    with LLM(device="cpu") as llm:
        engine = llm.engine
        tracked = engine.prepare("The river", params)
        engine.submit(tracked)
        for _ in range(8):
            engine.step()
        engine.stop(tracked.request.request_id, "elsewhere")
        found = tracked.completion
        assert (found.finish_reason, found.stop_reason) == ("stop", "elsewhere") and len(found.token_ids) > 5
        assert found.text == llm.tokenizer.decode(found.token_ids)
