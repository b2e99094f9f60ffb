"""Request bodies: reading, decoding and checking them is bounded, and their memory is freed."""

import asyncio
import gc
import gzip
import json
import threading
import weakref

import httpx
import pytest

from minillm.server import limits
from minillm.server.worker import api_error, bounded_json
from minillm.server.worker.api_error import MAX_MESSAGE, APIError
from minillm.server.worker.body import BodyReader
from minillm.server.worker.bounded_json import BoundedDecoder
from minillm.server.worker.protocol import ChatRequest, CompletionRequest
from minillm.values import QUOTED
from tests.server.in_process import JSON, worker_here
from tests.waiting import TIMEOUT, async_wait_until

BODY = {"prompt": "The river", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
TURNS = [{"role": "user", "content": "hi"}]
LARGE = BODY | {"user": "a" * 2 * limits.FREE_BODY}
LONGEST = 1 << 20  # tokens of prompt and output, the main reason for a large body


def completion(**fields):
    return CompletionRequest, {"prompt": "a"} | fields


def chat(messages, **fields):
    return ChatRequest, {"messages": messages} | fields


MANY = 100_000
HEAVY = {
    "stop of numbers": ("stop", completion(stop=[1] * 2 * MANY)),
    "stop of strings": ("stop", completion(stop=["a"] * MANY)),
    "stop of lists": ("stop", completion(stop=[[]] * MANY)),
    "stop_token_ids": ("stop_token_ids", completion(stop_token_ids=["x"] * MANY)),
    "stop_token_ids within the values": ("stop_token_ids", completion(stop_token_ids=["x"] * 10_000)),
    "logit_bias": ("logit_bias", completion(logit_bias={str(i): "x" for i in range(MANY)})),
    "logit_bias within the values": ("logit_bias", completion(logit_bias={str(i): 1 for i in range(10_000)})),
    "logit_bias of strings": ("logit_bias", completion(logit_bias={str(i): "x" for i in range(1000)})),
    "unknown fields": ("x0", completion(**{f"x{i}": 1 for i in range(MANY)})),
    "stream_options": ("stream_options", completion(stream=True, stream_options={f"x{i}": 1 for i in range(10_000)})),
    "prompts of nothing": ("prompt", completion(prompt=[[]] * MANY)),
    "prompts of nothing within the values": ("prompt", completion(prompt=[[]] * 10_000)),
    "prompts of texts": ("prompt", completion(prompt=["a"] * 10_000)),
    "fractions": ("prompt", completion(prompt=[1.5] * 12 * MANY)),
    "token ids": ("prompt", completion(prompt=[1] * (LONGEST + 2 * limits.READ))),
    "messages": ("messages", chat(TURNS * MANY)),
    "messages within the values": ("messages", chat(TURNS * 3000)),
    "messages of numbers": ("messages", chat([1] * 2000)),
    "parts of numbers": ("messages", chat([{"role": "user", "content": [1] * 2000}] * 2000)),
    "parts": ("messages", chat([{"role": "user", "content": [{"type": "text", "text": 1}] * 2048}] * 2)),
    "a message's members": ("messages", chat([{f"x{i}": 1 for i in range(10_000)}])),
    "metadata": ("metadata", chat(TURNS, metadata={str(i): 1 for i in range(10_000)})),
    "tools": ("tools", chat(TURNS, tools=[{"a": i} for i in range(MANY)])),
}


@pytest.mark.parametrize("what", HEAVY)
def test_an_expensive_body_is_rejected_by_field_name_at_bounded_cost(monkeypatch, what):
    field, (form, content) = HEAVY[what]
    looked, wrong = [], []
    look, loads, malformed = BoundedDecoder._value, json.loads, api_error.malformed

    def numbers(text):
        found = loads(text)
        looked.extend(found)
        return found

    monkeypatch.setattr(BoundedDecoder, "_value", lambda *place: looked.append(1) or look(*place))
    monkeypatch.setattr(bounded_json.json, "loads", numbers)
    monkeypatch.setattr(
        "minillm.server.worker.body.malformed", lambda errors: wrong.extend(errors) or malformed(errors)
    )
    body = json.dumps(content, separators=(",", ":")).encode()
    with pytest.raises(APIError) as refused:
        asyncio.run(parsed(form, body))
    assert refused.value.body["error"]["param"] == field
    # Numbers are read in pieces, and the rest of the text counts as one.
    assert len(looked) <= limits.MAX_VALUES + limits.max_tokens(LONGEST) + limits.READ
    assert len(wrong) <= 4, "the errors were collected"


async def parsed(form, body):
    return BodyReader(LONGEST, 60).parse(body, form)


def test_very_large_valid_bodies_are_accepted():
    texts = {"stop": ["a"] * 16, "stop_token_ids": [5] * 64, "logit_bias": {str(i): 1.5 for i in range(1024)}}
    form, content = completion(prompt=[list(range(500))] * 2048, **texts)
    taken = asyncio.run(parsed(form, json.dumps(content, indent=1).encode()))
    assert taken.model_dump(exclude_unset=True) == content
    message = {"role": "user", "content": [{"type": "text", "text": "word " * 100}]}
    form, content = chat([message] * 2048, metadata={str(i): "a" for i in range(16)})
    taken = asyncio.run(parsed(form, json.dumps(content).encode()))
    assert taken.model_dump(exclude_unset=True) == content
    form, content = completion(prompt=[250_000] * (LONGEST - 1))
    assert asyncio.run(parsed(form, json.dumps(content).encode())).prompts() == [content["prompt"]]


def test_the_body_limit_allows_the_longest_prompt_of_the_model():
    assert limits.max_body(256) == limits.MIN_BODY
    for longest in (256, 2048, 8192, 1 << 17, 1 << 20):
        tokens = limits.max_tokens(longest)
        assert longest <= tokens <= max(longest, limits.PROMPTS_AT_ONCE * longest)
        assert len(json.dumps({"prompt": [250_000] * longest})) <= limits.max_body(longest)
    assert limits.max_body(1 << 20) == limits.MAX_BODY


# ---- other requests in the meantime


def test_other_requests_are_served_while_a_large_body_is_checked(engine, monkeypatch):
    answered = threading.Event()
    parse = BodyReader.parse

    def checked(reader, data, form, length=None):
        if len(data) > limits.FREE_BODY:
            assert answered.wait(TIMEOUT), "no other request was answered"
        return parse(reader, data, form, length)

    async def everything():
        monkeypatch.setattr(BodyReader, "parse", checked)
        async with worker_here(engine) as (port, _), httpx.AsyncClient(timeout=600) as client:
            url = f"http://127.0.0.1:{port}/v1/completions"
            large = asyncio.create_task(client.post(url, json=LARGE))
            others = asyncio.create_task(client.post(url, json=LARGE | {"stop": 5}))
            async with client.stream("POST", url, json=BODY | {"stream": True}) as response:
                lines = [line async for line in response.aiter_lines() if line]
            assert lines[-1] == "data: [DONE]" and len(lines) > 2
            assert not large.done() and not others.done()
            answered.set()
            assert [(await each).status_code for each in (large, others)] == [200, 400]

    asyncio.run(everything())


def test_the_total_memory_of_bodies_is_bounded_and_released(engine, monkeypatch):
    readers = []
    begin = BodyReader.__init__

    def begun(reader, *arguments):
        begin(reader, *arguments)
        readers.append(reader)

    async def everything():
        monkeypatch.setattr(BodyReader, "__init__", begun)
        monkeypatch.setattr(limits, "MAX_HELD", len(json.dumps(LARGE)))
        async with worker_here(engine) as (port, _), httpx.AsyncClient(timeout=600) as client:
            url = f"http://127.0.0.1:{port}/v1/completions"
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            content = json.dumps(LARGE).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n"
            writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + content[:-1])
            await async_wait_until(lambda: readers[0].held == len(content) - 1 - limits.FREE_BODY)
            refused = await client.post(url, json=LARGE)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert "large request bodies" in refused.json()["error"]["message"]
            assert (await client.post(url, json=BODY)).status_code == 200, "a small body had to wait for a large one"
            writer.transport.abort()
            await async_wait_until(lambda: readers[0].held == 0)
            assert (await client.post(url, json=LARGE)).status_code == 200
            for wrong in (LARGE | {"stop": 5}, LARGE | {"nonsense": 1}, {"prompt": "a" * limits.max_body(256)}):
                assert (await client.post(url, json=wrong)).status_code in (400, 413, 429)
            assert readers[0].held == 0

    asyncio.run(everything())


def test_a_rejected_body_is_freed_at_once(engine, monkeypatch):
    """Without waiting for the garbage collector."""
    kept = []
    parse = BodyReader.parse

    class Watched:
        """An object that supports weak references."""

    def checked(reader, data, form, length=None):
        local = Watched()
        kept.append(weakref.ref(local))
        body = parse(reader, data, form, length)
        kept.append(weakref.ref(body))
        return body

    async def everything():
        monkeypatch.setattr(BodyReader, "parse", checked)
        async with worker_here(engine) as (port, _), httpx.AsyncClient(timeout=600) as client:
            for body in (BODY | {"stop": 5}, LARGE | {"stop": 5}, BODY | {"prompt": [10**9]}, BODY):
                await client.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
            assert [each() for each in kept] == [None] * 6

    gc.disable()
    try:
        asyncio.run(everything())
    finally:
        gc.enable()


# ---- errors


LONG = "x" * 60_000
ECHOES = {
    "an unknown field": completion(**{LONG: 1}),
    "a message's unknown field": chat([{"role": "user", "content": "a", LONG: 1}]),
    "a model": completion(model=LONG),
    "a logit_bias' token": completion(logit_bias={LONG: 1}),
    "a logit_bias": completion(logit_bias={"5": LONG}),
    "a salt": completion(cache_salt="\ud800" + "x" * 1000),
    "a token": completion(prompt=[10**4000]),
    "a temperature": completion(temperature=10**300),
    "a seed": completion(seed=10**4000),
    "metadata": chat(TURNS, metadata={LONG: 1}),
    "a role": chat([{"role": LONG, "content": "a"}]),
    "a stream option": completion(stream=True, stream_options={LONG: 1}),
    "tools": chat(TURNS, tools=[LONG]),
}


@pytest.mark.parametrize("what", ECHOES)
def test_an_error_message_quotes_only_a_little_of_the_request(server, what):
    form, content = ECHOES[what]
    path = "chat/completions" if form is ChatRequest else "completions"
    refused = httpx.post(f"{server.url}/v1/{path}", content=json.dumps(content), headers=JSON, timeout=TIMEOUT)
    assert refused.status_code in (400, 404)
    error = refused.json()["error"]
    assert len(error["message"]) < 250 and len(error["param"] or "") <= QUOTED
    assert error["message"].count("x") < 2 * QUOTED


def test_long_paths_and_messages_are_truncated(server):
    refused = httpx.get(f"{server.url}/v1/{LONG[:10_000]}", timeout=TIMEOUT)
    assert refused.status_code == 404 and len(refused.content) < 300
    refused = httpx.get(f"{server.url}/v1/models/{LONG[:10_000]}", timeout=TIMEOUT)
    assert refused.status_code == 404 and len(refused.content) < 300
    assert len(APIError("a" * 10**6).body["error"]["message"]) < MAX_MESSAGE + 10


JSON_PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
TRITON_PATHS = tuple(f"/v2/models/small-random/{action}" for action in ("infer", "generate", "generate_stream"))


@pytest.mark.parametrize("coding", ["gzip", "br", "GZip, identity", "x-unknown"])
def test_a_compressed_body_is_refused_with_what_is_accepted(server, coding):
    """RFC 9110, sections 8.4.1, 12.5.3 and 15.5.16."""
    with httpx.Client(base_url=server.url, headers={"content-encoding": coding}, timeout=TIMEOUT) as client:
        for path in (*JSON_PATHS, *TRITON_PATHS):
            for more in ({}, {"inference-header-content-length": "321"}):
                answer = client.post(path, content=gzip.compress(b"{}"), headers=JSON | more)
                assert answer.status_code == 415 and "content-encoding" in answer.text, path
                assert answer.headers["accept-encoding"] == "identity"
        plain = client.post("/tokenize", json={"prompt": "a"}, headers={"content-encoding": "identity"})
        assert plain.status_code == 200


@pytest.mark.parametrize(("codings", "status"), [(("identity", "gzip"), 415), (("", "identity,"), 200)])
def test_codings_on_several_lines_are_one_list(server, codings, status):
    """RFC 9110, section 5.3."""
    lines = [("content-type", "application/json"), *(("content-encoding", coding) for coding in codings)]
    answer = httpx.post(server.url + "/tokenize", content=b'{"prompt": "a"}', headers=lines, timeout=TIMEOUT)
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    ("charset", "status"),
    [("utf-8", 200), ('"UTF-8"', 200), ("utf8", 200), ("us-ascii", 200), ("iso-8859-1", 415), ("x-none", 415)],
)
def test_a_body_in_another_charset_than_unicode_is_refused(server, charset, status):
    with httpx.Client(base_url=server.url, timeout=TIMEOUT) as client:
        kind = {"content-type": f"application/json; charset={charset}"}
        answer = client.post("/tokenize", content=b'{"prompt": "a"}', headers=kind)
        assert answer.status_code == status and (status == 200 or charset in answer.json()["error"]["message"])


def test_utf_16_is_read(server):
    with httpx.Client(base_url=server.url, timeout=TIMEOUT) as client:
        kind = {"content-type": "application/json; charset=utf-16"}
        wide = client.post("/tokenize", content='{"prompt": "Högg"}'.encode("utf-16"), headers=kind)
        assert wide.json() == client.post("/tokenize", json={"prompt": "Högg"}).json()
