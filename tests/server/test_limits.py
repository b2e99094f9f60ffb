"""The queue is bounded, disconnecting clients free all resources, and one client's errors never affect others."""

import asyncio
import gc
import itertools
import json
import os
import random
import threading
from contextlib import suppress

import httpx
import openai
import pytest

import minillm
from minillm.engine.async_llm import AsyncLLM
from minillm.server import running
from minillm.server.limits import max_body
from minillm.server.worker.link import Choice
from minillm.tokenizer import Tokenizer
from tests.chance import SEED
from tests.server.conftest import MAX_MODEL_LEN
from tests.server.in_process import JSON, worker_here
from tests.waiting import TIMEOUT, async_wait_until, paused_steps

BODY = {"prompt": "The river", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
CLIENTS = 200


def counted(hub, name: str, **labels: str) -> float:
    return hub.metrics.registry.get_sample_value(f"minillm_{name}_total", labels) or 0


@pytest.fixture(scope="module")
def narrow(model_directory):
    """A server in which two requests run and one may wait."""
    options = {"load_format": "dummy", "device": "cpu", "max_num_seqs": 2, "max_queued": 1}
    with running(model_directory, **options) as server:
        yield server


def test_a_full_queue_answers_429_and_accepts_requests_again_later(narrow):
    async def clients(resume):
        async with httpx.AsyncClient(base_url=narrow.url, timeout=TIMEOUT) as client:

            def ask(**more):
                return client.post("/v1/completions", json=BODY | more)

            taken = [asyncio.create_task(ask(stream=bool(i))) for i in range(3)]
            await async_wait_until(lambda: narrow.hub.running == 3)
            for more in ({}, {"stream": True}, {"n": 2}):
                refused = await ask(**more)
                assert refused.status_code == 429
                assert int(refused.headers["retry-after"]) >= 1
                error = refused.json()["error"]
                assert error["type"] == "rate_limit_error" and "of at most 3 choices" in error["message"]
            resume.set()
            assert [each.status_code for each in await asyncio.gather(*taken)] == [200] * 3
            assert (await ask()).status_code == 200

    with paused_steps() as resume:
        asyncio.run(clients(resume))


def test_openais_client_retries_when_the_server_is_full(narrow):
    def busy() -> int:
        return narrow.workers.ledger._responses[429]

    async def clients(resume):
        async with openai.AsyncOpenAI(base_url=f"{narrow.url}/v1", api_key="none", timeout=TIMEOUT) as client:

            def ask(retries):
                return client.with_options(max_retries=retries).completions.create(model=narrow.model, **body)

            body = {"prompt": "The river", "max_tokens": 4}
            taken = [asyncio.create_task(ask(0)) for _ in range(3)]
            await async_wait_until(lambda: narrow.hub.running == 3)
            with pytest.raises(openai.RateLimitError):
                await ask(0)
            before = busy()
            patient = asyncio.create_task(ask(5))
            await async_wait_until(lambda: busy() > before)
            resume.set()
            await asyncio.gather(*taken)
            assert (await patient).usage.completion_tokens == 4

    with paused_steps() as resume:
        asyncio.run(clients(resume))


def test_waiting_requests_are_ordered_by_priority_under_the_priority_policy(model_directory):
    options = {"load_format": "dummy", "device": "cpu", "max_num_seqs": 1, "policy": "priority"}
    order = []

    async def clients(server, resume):
        async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT) as client:

            async def ask(priority):
                answer = await client.post("/v1/completions", json=BODY | {"priority": priority, "max_tokens": 60})
                assert answer.status_code == 200, answer.text
                order.append(priority)

            first = asyncio.create_task(ask(9))
            await async_wait_until(lambda: server.engine.stats()["running"] == 1)
            others = [asyncio.create_task(ask(priority)) for priority in (5, -1, 3)]
            await async_wait_until(lambda: server.hub.running == 4)
            resume.set()
            await asyncio.gather(first, *others)

    with running(model_directory, **options) as server, paused_steps() as resume:
        asyncio.run(clients(server, resume))
    assert order == [9, -1, 3, 5]


def test_more_choices_than_the_server_can_ever_hold_are_a_client_error(narrow):
    answer = httpx.post(narrow.url + "/v1/completions", json=BODY | {"n": 4}, timeout=TIMEOUT)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "n" and "limit is 3" in answer.json()["error"]["message"]


# ---- requests that could block a worker or all other requests


TALES = ["once upon a time " * 10] * 100
TALK = {"messages": [{"role": "user", "content": "word " * 4000}], "max_tokens": 4}


@pytest.mark.parametrize("path, body", [("completions", {"prompt": TALES}), ("chat/completions", TALK)])
def test_a_worker_answers_other_requests_while_it_tokenizes_long_texts(engine, monkeypatch, path, body):
    begun, answered, loops_thread = threading.Event(), threading.Event(), threading.current_thread()

    def encode(tokenizer, text, add_special_tokens=True):
        assert threading.current_thread() is not loops_thread, "other requests wait for it"
        begun.set()
        assert answered.wait(TIMEOUT), "no other request was answered"
        return [5, 6]

    async def everything():
        monkeypatch.setattr(Tokenizer, "encode", encode)
        async with worker_here(engine) as (port, _), httpx.AsyncClient(timeout=TIMEOUT) as client:
            url = f"http://127.0.0.1:{port}"
            long = asyncio.create_task(client.post(f"{url}/v1/{path}", json=body | {"max_tokens": 1}))
            await async_wait_until(lambda: begun.is_set() or long.done())
            assert (await client.get(f"{url}/health")).status_code == 200
            answered.set()
            assert (await long).status_code == 200

    asyncio.run(everything())


HUGE = "a" * (128 * MAX_MODEL_LEN + 1)
TOO_MUCH = [
    ("completions", {"prompt": HUGE}, f"has 32,769 characters, but at most {128 * MAX_MODEL_LEN:,} are accepted"),
    ("completions", {"prompt": ["The river", HUGE]}, "characters, but at most"),
    ("chat/completions", {"messages": [{"role": "user", "content": HUGE}]}, "messages has 32,769 characters"),
    ("completions", {"prompt": ["word"] * 2000}, "prompt asks for 2000 choices, but this server's limit is 1056"),
    ("completions", {"prompt": ["word"] * 20, "n": 100}, "n asks for 2000 choices, but this server's limit is 1056"),
]


@pytest.mark.parametrize("path, body, words", TOO_MUCH, ids=[words[:30] for _, _, words in TOO_MUCH])
def test_a_text_that_cannot_fit_is_rejected_before_it_is_tokenized(engine, monkeypatch, path, body, words):
    def encode(tokenizer, text, add_special_tokens=True):
        raise AssertionError("tokenized")

    async def everything():
        monkeypatch.setattr(Tokenizer, "encode", encode)
        async with worker_here(engine) as (port, _), httpx.AsyncClient(timeout=TIMEOUT) as client:
            answer = await client.post(f"http://127.0.0.1:{port}/v1/{path}", json=body)
            assert answer.status_code == 400 and words in answer.json()["error"]["message"]
            long = "characters" in words
            assert answer.json()["error"]["code"] == ("context_length_exceeded" if long else None)

    asyncio.run(everything())


def pieces(size: int, piece: int = 1 << 20):
    for start in range(0, size, piece):
        yield b" " * min(piece, size - start)


@pytest.mark.parametrize("with_length", [True, False], ids=["content length", "chunked"])
def test_a_body_over_the_limit_is_rejected_and_affects_no_other_request(server, with_length):
    with httpx.Client(base_url=server.url, timeout=TIMEOUT) as client:

        def post(size):
            content = b" " * size if with_length else pieces(size)
            return client.post("/v1/completions", content=content, headers=JSON)

        most = max_body(MAX_MODEL_LEN)
        answer = post(most + 1)
        assert answer.status_code == 413
        assert f"limit of {most:,} bytes" in answer.json()["error"]["message"]
        assert post(most).json()["error"]["code"] == "invalid_json"
        assert client.post("/v1/completions", json=BODY).status_code == 200


# ---- clients that hang up


async def ask_at_length(port: int, rng: random.Random, sent: float = 1.0) -> tuple:
    """Open a connection and send the share `sent` of some long request; returns the unsent rest too."""
    body = {"prompt": rng.choice(["Once", "word " * 150, ["The river", "A stone"], [5] * 180]), "max_tokens": 40}
    body |= {"stream": rng.random() < 0.6, "n": rng.choice([1, 1, 3]), "ignore_eos": True}
    body |= rng.choice([{}, {"logprobs": 2}, {"stop": "zzz"}, {"echo": True}])
    path = "completions"
    if rng.random() < 0.2:
        path, stream = "chat/completions", body["stream"]
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "stream": stream}
    content = json.dumps(body).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(content)}\r\n\r\n".encode() + content
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request[: int(len(request) * sent)])
    await writer.drain()
    return reader, writer


def hang_up(writer: asyncio.StreamWriter, rng: random.Random) -> None:
    if rng.random() < 0.5:
        writer.transport.abort()
    else:
        writer.close()


async def leave(port: int, rng: random.Random) -> None:
    """Send a long request and disconnect at a random moment."""
    when = rng.choice(["half sent", "queued", "in prefill", "mid-stream"])
    reader, writer = await ask_at_length(port, rng, 0.9 if when == "half sent" else 1)
    if when == "in prefill":
        for _ in range(rng.randrange(30)):
            await asyncio.sleep(0)
    if when == "mid-stream":
        for _ in range(rng.randrange(1, 12)):
            await reader.readline()
    hang_up(writer, rng)


def open_files() -> set[tuple]:
    """Open file descriptors with their targets, so that a reused number counts as a different file."""
    found = set()
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # the folder's own descriptor is already closed
            status = os.fstat(int(name))
            found.add((name, status.st_dev, status.st_ino))
    return found


@pytest.mark.proof
@pytest.mark.explore
def test_two_hundred_disconnecting_clients_leak_nothing(model_directory, monkeypatch):
    engine = AsyncLLM(model_directory, load_format="dummy", device="cpu", max_num_seqs=8)
    rng, aborted, original_abort = random.Random(SEED + 3), [], engine.abort
    monkeypatch.setattr(engine, "abort", lambda request_id: (original_abort(request_id), aborted.append(request_id)))

    def idle():
        stats = engine.stats()
        return not engine.engine.tracked and stats["blocks_available"] == stats["blocks"]

    async def everything():
        async with worker_here(engine) as (port, hub):
            await leave(port, rng)
            await async_wait_until(lambda: hub.running == 0 and idle())
            await async_wait_until(
                lambda: len(asyncio.all_tasks()) == tasks + 3
            )  # the worker's main, stop and accept tasks
            gc.collect()  # close what earlier tests left open
            files = open_files()
            with paused_steps() as resume:
                held = [await ask_at_length(port, rng) for _ in range(25)]
                await async_wait_until(lambda: hub.running >= 25)
                for _, writer in held:
                    hang_up(writer, rng)
                await async_wait_until(lambda: len(aborted) >= 25)
                resume.set()
            for _ in range(CLIENTS // 25 - 1):
                await asyncio.gather(*(leave(port, rng) for _ in range(25)))
            await async_wait_until(lambda: hub.running == 0 and idle())
            await async_wait_until(lambda: len(asyncio.all_tasks()) == tasks + 3 and open_files() <= files)
            gc.collect()
            assert not [each for each in gc.get_objects() if type(each) is Choice]
            assert not engine._listening
            assert counted(hub, "finished", reason="abort") >= 25
        await async_wait_until(lambda: len(asyncio.all_tasks()) == tasks)

    tasks = 1  # this one
    asyncio.run(everything())
    engine.close()


# ---- other clients' errors


WRONG = [
    {"prompt": [10**9]},
    {"prompt": "a", "max_tokens": 10**30},
    {"prompt": ["fine", [5] * 5000]},
    {"prompt": "fine", "logit_bias": {"4000000": 1}},
    {"prompt": ["fine"] * 3, "n": 128, "logprobs": 99},
    {"prompt": "\ud800"},
    {"nonsense": 1},
]


def test_invalid_requests_do_not_change_a_valid_one(server):
    good = BODY | {"max_tokens": 60, "stream": True}

    async def everything():
        async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT) as client:

            async def say():
                lines = (await client.post("/v1/completions", json=good)).text.splitlines()
                pieces = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
                return "".join(piece["choices"][0]["text"] for piece in pieces)

            alone = await say()
            task = asyncio.create_task(say())
            bodies = [{"content": json.dumps(each), "headers": JSON} for each in WRONG * 5]
            answers = await asyncio.gather(*(client.post("/v1/completions", **body) for body in bodies))
            assert {each.status_code for each in answers} == {400}
            assert await task == alone

    asyncio.run(everything())


def test_a_failing_operation_gives_500_streamed_or_not_and_the_server_keeps_running(server):
    failing, steps = threading.Event(), itertools.count()

    def embedding(ids, weight, scale):
        if next(steps) == 4:
            assert failing.wait(TIMEOUT), "the stream has begun long since"
        if failing.is_set():
            raise ArithmeticError("my embedding is wrong")
        return weight[ids] * scale

    with (
        minillm.using(embedding=embedding),
        httpx.Client(base_url=server.url, timeout=TIMEOUT) as client,
        client.stream("POST", "/v1/completions", json=BODY | {"max_tokens": 240, "stream": True}) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        failing.set()
        events = [line for line in lines if line]
        assert "my embedding is wrong" in json.loads(events[-2][6:])["error"]["message"]
        assert events[-1] == "data: [DONE]"
        for more in ({}, {"stream": True}, {"n": 3}):
            answer = client.post("/v1/completions", json=BODY | more)
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "engine_error"
        failing.clear()
        assert client.post("/v1/completions", json=BODY).status_code == 200
