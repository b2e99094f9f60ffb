"""response_format through the real openai client."""

import asyncio
import socket
import sys
import threading
from typing import Literal

import openai
import pydantic
import pytest

from minillm.grammar import Matcher
from minillm.server.config import ServerConfig
from minillm.server.engine_side.hub import Hub
from minillm.server.wire import PromptForm, Submit, encode, numbers_of
from tests.waiting import TIMEOUT, async_wait_until, wait_until

QUESTION = [{"role": "user", "content": "Where is the river?"}]


class Flag(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    color: Literal["red", "green"]
    up: bool
    height: int = pydantic.Field(ge=0, le=99)


SCHEMA = Flag.model_json_schema()
FORMAT = {"type": "json_schema", "json_schema": {"name": "flag", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT) as client:
        yield client


def test_a_parsed_answer_is_an_object_of_the_clients_own_class(client, server):
    answer = client.chat.completions.parse(
        model=server.model, messages=QUESTION, response_format=Flag, n=3, seed=1, temperature=2, max_tokens=200
    )
    assert all(isinstance(choice.message.parsed, Flag) for choice in answer.choices)
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert len({choice.message.content for choice in answer.choices}) > 1


def test_a_stream_has_the_same_text(client, server):
    asked = {"model": server.model, "messages": QUESTION, "response_format": FORMAT, "seed": 2, "max_tokens": 200}
    whole = client.chat.completions.create(**asked).choices[0]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    text = "".join(chunk.delta.content or "" for chunk in chunks)
    assert text == whole.message.content and chunks[-1].finish_reason == "stop"
    Flag.model_validate_json(text)


def test_completions_of_several_prompts_follow_the_schema(client, server):
    answer = client.completions.create(
        model=server.model, prompt=["a", "b"], n=2, max_tokens=200, extra_body={"response_format": FORMAT}
    )
    assert len(answer.choices) == 4
    for choice in answer.choices:
        Flag.model_validate_json(choice.text)


def test_json_object_begins_any_object_and_a_cut_one_says_so(client, server):
    answer = client.chat.completions.create(
        model=server.model, messages=QUESTION, response_format={"type": "json_object"}, max_tokens=1
    )
    assert answer.choices[0].message.content == "{" and answer.choices[0].finish_reason == "length"


def test_a_wrong_schema_is_refused_and_names_the_field(client, server):
    wrong = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "word"}}}
    with pytest.raises(openai.BadRequestError, match="Invalid type: word") as caught:
        client.chat.completions.create(model=server.model, messages=QUESTION, response_format=wrong)
    assert caught.value.body["param"] == "response_format"


def test_others_are_served_while_a_grammar_compiles_and_who_leaves_is_forgotten(client, server, monkeypatch):
    compiling, may_go_on, started, compiled = threading.Event(), threading.Event(), [], []
    engine, (line,) = server.engine, server.hub.lines
    check, prepare = engine.check_params, engine.prepare

    def slow(params):
        if params.grammar is not None:
            compiling.set()
            assert may_go_on.wait(TIMEOUT)
            compiled.append(params.grammar)
        check(params)

    def noting(ids, params, *args, **more):
        started.append(params.grammar is not None)
        return prepare(ids, params, *args, **more)

    monkeypatch.setattr(engine, "check_params", slow)
    monkeypatch.setattr(engine, "prepare", noting)
    asked = {"model": server.model, "messages": QUESTION}

    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as leaving:
            request = leaving.chat.completions.create(**asked, n=2, response_format=FORMAT)
            task = asyncio.ensure_future(request)
            assert await asyncio.to_thread(compiling.wait, TIMEOUT)
            answer = await leaving.chat.completions.create(**asked, max_tokens=3)  # while the grammar compiles
            assert answer.usage.completion_tokens > 0 and len(line.compiling) == 2
            late = asyncio.ensure_future(
                leaving.chat.completions.create(**asked, response_format={"type": "json_object"})
            )
            await async_wait_until(lambda: len(line.compiling) == 3)
            for each in (task, late):
                each.cancel()
            await asyncio.wait([task, late])

    try:
        asyncio.run(leave())
        wait_until(lambda: not line.compiling)
    finally:
        may_go_on.set()
    answer = client.chat.completions.create(**asked, max_tokens=200, response_format=FORMAT)  # compiled after it
    Flag.model_validate_json(answer.choices[0].message.content)
    assert started == [False, True]
    assert len(compiled) == 2 and len(set(compiled)) == 1, "the one that left before its turn was not compiled"


def test_no_request_of_a_worker_that_has_died_begins_when_its_grammar_is_compiled(engine, monkeypatch):
    compiling, may_go_on, began = threading.Event(), threading.Event(), []
    check = engine.check_params

    def slow(params):
        compiling.set()
        assert may_go_on.wait(TIMEOUT)
        check(params)

    monkeypatch.setattr(engine, "check_params", slow)
    monkeypatch.setattr(engine, "submit", began.extend)
    hub = Hub(engine, "here", ServerConfig(log_level="critical", max_per_client=3))
    ours, theirs = socket.socketpair()
    line = hub.connect(ours)
    params = {"json_schema": {"type": "object"}}
    theirs.sendall(encode(Submit(0, [PromptForm(2)], params, {}, 2, False, "ann", numbers_of([5, 6]))))
    try:
        assert compiling.wait(TIMEOUT)
        assert hub.running == 2
        assert hub.admission.refusal("ann", 1) is None
        assert "this client has 2 of at most 3 choices" in hub.admission.refusal("ann", 2).message
        theirs.close()
        wait_until(lambda: line not in hub.lines and not line.compiling)
    finally:
        may_go_on.set()
    hub.shared.compiler.shutdown()  # the hub's thread has been told what was compiled
    later = threading.Event()
    hub.soon(later.set)
    assert later.wait(TIMEOUT)
    hub.close()
    assert began == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_fails_midway_is_an_error_and_not_half_an_answer(client, server, monkeypatch, stream):
    monkeypatch.setattr(Matcher, "advance", lambda self, tokens: "it needs more than 50000 steps")
    asked = {"model": server.model, "messages": QUESTION, "max_tokens": 20, "response_format": FORMAT}
    with pytest.raises(openai.APIError, match="cannot be followed to the end .* 50000 steps") as caught:
        answer = client.chat.completions.create(**asked, stream=stream)
        assert stream and list(answer)
    assert caught.value.body["param"] == "response_format"
    assert stream or caught.value.status_code == 400
    assert server.hub.running == 0


def test_a_server_without_the_grammar_library_says_so_and_serves_all_else(client, server, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    schema = {"type": "object", "properties": {"never compiled before": {"type": "boolean"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    asked = {"model": server.model, "messages": QUESTION, "max_tokens": 2}
    with pytest.raises(openai.APIStatusError, match="llguidance.*not installed: make setup") as caught:
        client.chat.completions.create(**asked, response_format=wanted)
    assert (caught.value.status_code, caught.value.body["code"]) == (501, "not_installed")
    assert client.chat.completions.create(**asked).usage.completion_tokens > 0
