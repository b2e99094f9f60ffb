"""AsyncLLM's thread creates the engine and ends all streams when it stops. test_engine.py checks the outputs."""

import asyncio
import threading

import pytest

from minillm import AsyncLLM, SamplingParams
from minillm.engine import Engine
from minillm.errors import ConfigError, InvalidRequest
from tests.waiting import TIMEOUT, async_wait_until, paused_steps

ENDLESS = SamplingParams(max_tokens=1000, ignore_eos=True)


def test_the_engine_is_created_in_the_thread_that_steps_it(monkeypatch):
    seen = {}

    class Watched(Engine):
        def __init__(self, *args, **options):
            seen["made"] = threading.current_thread()
            super().__init__(*args, **options)

        def step(self):
            seen["stepped"] = threading.current_thread()
            return super().step()

    monkeypatch.setattr("minillm.engine.async_llm.Engine", Watched)
    llm = AsyncLLM(device="cpu", num_blocks=64)
    asyncio.run(llm.generate("The island of", SamplingParams(max_tokens=2)))
    llm.close()
    assert seen["made"] is seen["stepped"] is not threading.main_thread()


def test_an_engine_that_cannot_be_created_raises_in_the_caller_and_leaves_no_thread():
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="no such model directory"):
        AsyncLLM("no/such/model")
    for thread in set(threading.enumerate()) - before:
        thread.join(TIMEOUT)
        assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_in_the_engine_thread_ends_every_stream_with_its_cause(monkeypatch):
    async def work():
        llm = AsyncLLM(device="cpu", num_blocks=64)
        with paused_steps(free=4) as resume:
            staying = asyncio.create_task(llm.generate("The island of", ENDLESS))
            async for _ in llm.stream("Once", ENDLESS, request_id="first"):
                monkeypatch.setattr(Engine, "has_work", property(lambda engine: 1 / 0))
                resume.set()
                break
            with pytest.raises(ZeroDivisionError):
                await staying
        await async_wait_until(lambda: not llm._thread.is_alive())
        assert not llm.alive

    asyncio.run(work())


def test_deltas_of_a_borrowed_engine_arrive_whichever_thread_steps_it(monkeypatch):
    """Here only the owner's thread steps it, as during offline generation."""

    async def work(engine):
        llm = AsyncLLM(engine=engine)
        monkeypatch.setattr(llm, "_step", lambda: None)
        answers = asyncio.gather(*(llm.generate("Once", SamplingParams(max_tokens=n)) for n in range(1, 9)))
        while not answers.done():
            await asyncio.to_thread(engine.step)
        llm.close()
        return [len(each.token_ids) for each in answers.result()]

    engine = Engine(device="cpu", num_blocks=64)
    assert asyncio.run(work(engine)) == list(range(1, 9))


def test_leaving_a_stream_aborts_its_request(monkeypatch):
    """Not only in the end: a request with few tokens left would end by itself."""

    async def work():
        llm = AsyncLLM(device="cpu", num_blocks=64)
        own, aborted = llm.abort, []
        monkeypatch.setattr(llm, "abort", lambda request: aborted.append(request) or own(request))
        stream = llm.stream("Once", ENDLESS)
        await anext(stream)
        await stream.aclose()
        llm.close()
        return aborted

    assert len(asyncio.run(work())) == 1


def test_a_thread_that_has_the_engines_lock_can_submit():
    """A listener has it, for example. The engine's thread must not wait for it while others cannot submit."""

    class Lock:
        """The engine's lock, which says when the engine's thread wants it."""

        def __init__(self, lock):
            self.lock, self.wanted = lock, threading.Event()

        def __enter__(self):
            if threading.current_thread() is llm._thread:
                self.wanted.set()
            return self.lock.__enter__()

        def __exit__(self, *exception):
            return self.lock.__exit__(*exception)

    llm = AsyncLLM(device="cpu", num_blocks=64)
    lock = llm.engine.lock = Lock(llm.engine.lock)
    llm._step = llm._deliver = lambda: None  # they want the lock, too: what counts is the look for more work
    with lock:
        llm._tell(lambda: None)
        assert lock.wanted.wait(TIMEOUT)
        assert llm._wake.acquire(timeout=TIMEOUT), (
            "the engine's thread waits for the lock, and holds what a caller needs"
        )
        llm._wake.release()
    llm.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_request_that_comes_while_the_engine_thread_fails_ends_with_the_cause(monkeypatch):
    submitted = threading.Event()

    def busy(llm):
        assert submitted.wait(TIMEOUT)
        raise ZeroDivisionError

    async def work():
        monkeypatch.setattr(AsyncLLM, "_busy", property(busy))
        llm = AsyncLLM(device="cpu", num_blocks=64)
        answer = asyncio.create_task(llm.generate("Once", ENDLESS))
        await async_wait_until(lambda: llm._commands)
        submitted.set()
        with pytest.raises(ZeroDivisionError):
            await answer

    asyncio.run(work())


def test_a_stream_has_one_choice():
    engine = AsyncLLM(device="cpu")
    try:
        with pytest.raises(InvalidRequest, match="n is 2, but a stream has one choice"):
            engine.prepare("a", SamplingParams(n=2), None, 0)
    finally:
        engine.close()
