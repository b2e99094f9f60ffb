"""An engine of this process is served without a socket: the answers are those of the server with processes."""

import asyncio
import json
import threading

import httpx
import pytest

from minillm.request import SamplingParams
from minillm.server.config import ServerConfig
from minillm.server.engine_side.line import Line
from minillm.server.local import LocalServedEngine
from minillm.server.wire import Alive, Deltas, numbers_of
from minillm.server.worker.app import create_app
from minillm.server.worker.choice import Choice, Prompt
from minillm.server.worker.scrape import Counted
from tests.waiting import TIMEOUT, async_wait_until, idle, paused_steps, wait_until

pytestmark = pytest.mark.timeout(TIMEOUT)  # the transport has none

GREEDY = {"prompt": "The river", "max_tokens": 8, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "Who keeps the lighthouse?"}], "max_tokens": 6}
REQUESTS = {
    "greedy": ("/v1/completions", GREEDY),
    "ids, several prompts and choices": (
        "/v1/completions",
        {"prompt": [[5, 6, 7], [8, 9]], "n": 2, "seed": 3, "max_tokens": 5, "return_token_ids": True},
    ),
    "echo and log-probabilities": ("/v1/completions", GREEDY | {"echo": True, "logprobs": 2}),
    "bias and stop": ("/v1/completions", GREEDY | {"logit_bias": {"50": 100}, "stop": ["e"]}),
    "a stream": ("/v1/completions", GREEDY | {"stream": True, "stream_options": {"include_usage": True}}),
    "a chat": ("/v1/chat/completions", CHAT | {"seed": 1, "logprobs": True, "top_logprobs": 2}),
    "a streamed chat": ("/v1/chat/completions", CHAT | {"seed": 1, "stream": True}),
    "triton": ("/v2/models/m/generate", {"text_input": "The river", "temperature": 0}),
    "ids of a text": ("/tokenize", {"prompt": "The river", "return_token_strs": True}),
    "text of ids": ("/detokenize", {"tokens": [5, 6, 7]}),
    "too long": ("/v1/completions", GREEDY | {"prompt": [5] * 300}),
    "too many choices": ("/v1/completions", GREEDY | {"n": 2000}),
    "an unknown field": ("/v1/completions", GREEDY | {"temprature": 1}),
}


def local(engine, work, **options):
    """Run a client of the application in its event loop."""

    async def everything():
        served = LocalServedEngine(engine, "m", ServerConfig(log_level="critical", **options))
        app = Counted(create_app(served, "127.0.0.1", served.metrics_text), served.ledger.answered)
        try:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=TIMEOUT) as client:
                return await work(client, served)
        finally:
            served.close()

    return asyncio.run(everything())


def comparable(answer):
    """A response without what differs between two of the same."""
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    parts = [part if part == "[DONE]" else json.loads(part) for part in events]
    for part in parts:
        if isinstance(part, dict):
            for name in ("id", "created", "model", "model_name"):
                part.pop(name, None)
    return answer.status_code, parts


@pytest.mark.parametrize("path, body", REQUESTS.values(), ids=REQUESTS)
def test_the_answers_are_those_of_a_server_with_processes(engine, server, path, body):
    async def work(client, served):
        return comparable(await client.post(path, json=body))

    path_there = path.replace("/m/", f"/{server.model}/")
    there = comparable(httpx.post(server.url + path_there, json=body, timeout=TIMEOUT))
    assert local(engine, work) == there


def test_health_state_and_metrics_are_those_of_this_engine(engine):
    async def work(client, served):
        assert (await client.post("/v1/completions", json=GREEDY)).status_code == 200
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/engine/state")).json()["model"] == "m"
        lines = (await client.get("/metrics")).text.splitlines()
        assert 'minillm_http_requests_total{status="200"} 3.0' in lines and "minillm_engine_up 1.0" in lines
        assert 'minillm_finished_total{reason="length"} 1.0' in lines
        served.close()
        assert (await client.get("/health")).status_code == 503
        assert (await client.post("/v1/completions", json=GREEDY)).status_code == 503

    local(engine, work)


def test_a_busy_server_refuses_and_a_cancelled_request_leaves_nothing(engine):
    async def work(client, served):
        with paused_steps() as resume:
            first = asyncio.create_task(client.post("/v1/completions", json=GREEDY | {"n": 32}))
            await async_wait_until(lambda: served.hub.running == 32)
            refused = await client.post("/v1/completions", json=GREEDY)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "server_busy")
            first.cancel()
            resume.set()
        await async_wait_until(lambda: served.hub.running == 0 and idle(engine))

    local(engine, work, max_queued=0)


def test_closing_ends_all_that_was_asked_with_an_error(engine, monkeypatch):
    """A request that runs, one whose grammar is being compiled, and a question; the engine stays as it was."""
    compiling = threading.Event()
    monkeypatch.setattr(Line, "_compile", lambda *_: compiling.set())
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "boolean"}}}

    async def work(client, served):
        monkeypatch.setattr(Line, "_answer", lambda *_: wait_until(lambda: not served.alive))
        with paused_steps(free=2) as resume:
            running = asyncio.create_task(client.post("/v1/completions", json=GREEDY | {"max_tokens": 200}))
            await async_wait_until(lambda: served.hub.running == 1)
            body = CHAT | {"response_format": schema}
            waiting = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            assert await asyncio.to_thread(compiling.wait, TIMEOUT)
            asked = asyncio.create_task(client.get("/engine/state"))
            await async_wait_until(lambda: served._replies)
            await asyncio.to_thread(served.close)
            assert [(await each).status_code for each in (running, waiting, asked)] == [503] * 3
            resume.set()
        await async_wait_until(lambda: idle(engine))

    local(engine, work)


def test_a_message_that_fails_ends_its_request_and_later_ones_are_answered(engine, monkeypatch):
    async def work(client, served):
        with monkeypatch.context() as patch:
            patch.setattr(Line, "_submit", lambda line, message: 1 / 0)
            assert (await client.post("/v1/completions", json=GREEDY)).status_code == 503
        assert (await client.post("/v1/completions", json=GREEDY)).status_code == 200

    local(engine, work)


def test_a_second_event_loop_is_refused(engine):
    async def second_loop(served):
        with pytest.raises(RuntimeError, match="one event loop"):
            await served.ask(Alive())

    async def work(client, served):
        assert (await client.get("/health")).status_code == 200
        await asyncio.to_thread(lambda: asyncio.run(second_loop(served)))

    local(engine, work)


def test_once_closed_a_stop_string_loses_nothing_of_its_message(engine):
    """The end of the requests may still be on its way to the loop."""
    token = engine.tokenizer.encode("e", add_special_tokens=False)[-1]
    params = SamplingParams(stop=engine.tokenizer.decode([token]).strip())

    async def work(client, served):
        queues = [asyncio.Queue(), asyncio.Queue()]
        for key, queue in enumerate(queues):
            served._choices[key] = Choice(key, Prompt([5]), engine.tokenizer, params), queue
        served._closed = True
        served.receive(Deltas([], numbers_of([0, token, 1, token])))
        for queue in queues:
            assert queue.get_nowait()[1].finish_reason == "stop"

    local(engine, work)
