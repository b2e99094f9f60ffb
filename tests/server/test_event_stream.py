"""Chunks of a stream are the same however they are written: as text or from a dict, directly or through ASGI."""

import asyncio
import json
import re
from types import SimpleNamespace

import h11
import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from minillm.request import Completion, Delta
from minillm.server.worker.connections import Connection, DirectBody
from minillm.server.worker.responses import Answer, ChatForm, CompletionForm, TokenTexts, dumps
from tests.server.in_process import worker_here
from tests.waiting import TIMEOUT

TEXTS = ["a", ' "quoted" \\ ', "line\nend\r\t", "\x00\x1f\x7f", "é中🙂\u2028\ufeff", "<0x41>"]
FORMS = {
    "text_completion": lambda **given: CompletionForm(TokenTexts(None), n=1, **{"top": None, "ids": False, **given}),
    "chat.completion": lambda **given: ChatForm(TokenTexts(None), n=1, **{"top": None, "ids": False, **given}),
}
BODY = {"prompt": "The river", "max_tokens": 12, "seed": 3, "ignore_eos": True, "stream": True}


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("text", ["", *TEXTS], ids=ascii)
@pytest.mark.parametrize("kind", FORMS)
def test_a_chunk_written_as_text_is_that_of_the_dict(kind, text, ids):
    form, answer, gained = FORMS[kind](ids=ids), Answer(kind, 'a "model"'), Delta(text, [5, 70_000])
    assert form.is_plain
    piece, plain = form.piece(3, gained, Completion("", [1])), form.plain(3, gained)
    assert f"{answer.opening}{plain}]}}" == dumps(answer.chunk([piece]))
    assert f'{answer.opening}{plain}],"usage":null}}' == dumps(answer.chunk([piece], usage=None))


def test_forms_that_show_more_than_text_and_ids_say_so():
    for form in FORMS.values():
        assert not form(top=0).is_plain
    assert not FORMS["text_completion"](echoes=["a"]).is_plain
    assert not FORMS["text_completion"](scores_only=True).is_plain


def request(version: str, **fields: object) -> bytes:
    body = json.dumps(BODY | fields).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


def received(engine, requests: list[bytes]) -> list[tuple[dict[bytes, bytes], bytes]]:
    """Headers and body of each response on one connection, as h11 reads them."""

    async def everything() -> list:
        async with worker_here(engine) as (port, _), asyncio.timeout(TIMEOUT):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            client, found = h11.Connection(h11.CLIENT), []
            for each in requests:
                writer.write(each)
                client.send(h11.Request(method="POST", target="/", headers=[("host", "localhost")]))
                client.send(h11.EndOfMessage())
                headers, body = {}, b""
                while type(event := client.next_event()) is not h11.EndOfMessage:
                    if event is h11.NEED_DATA:
                        client.receive_data(await reader.read(1 << 16))
                    elif isinstance(event, h11.Response):
                        headers = dict(event.headers)
                    else:
                        body += event.data
                found.append((headers, body))
                if client.our_state is h11.DONE and client.their_state is h11.DONE:
                    client.start_next_cycle()
            writer.close()
            return found

    return asyncio.run(everything())


def without_ids(body: bytes) -> bytes:
    return re.sub(rb'"id":"cmpl-\w+"|"created":\d+', b"", body)


def test_a_stream_is_the_same_through_asgi_on_http_1_0_and_again_on_the_same_connection(engine, monkeypatch):
    written = []
    own = DirectBody.__call__

    async def counted(self, data):
        written.append(data)
        await own(self, data)

    monkeypatch.setattr(DirectBody, "__call__", counted)
    (headers, first), (_, second) = received(engine, [request("1.1"), request("1.1")])
    assert headers[b"transfer-encoding"] == b"chunked" and len(written) > 16
    assert without_ids(b"".join(written[: len(written) // 2]) + b"data: [DONE]\n\n") == without_ids(first)
    assert without_ids(first) == without_ids(second)
    written.clear()
    ((headers, old),) = received(engine, [request("1.0")])
    assert b"transfer-encoding" not in headers and without_ids(old) == without_ids(first) and not written
    monkeypatch.setattr(Connection, "handle_events", H11Protocol.handle_events)
    ((_, through),) = received(engine, [request("1.1")])
    assert without_ids(through) == without_ids(first) and not written


def test_an_error_in_the_middle_of_a_stream_is_its_last_event_but_one(engine, monkeypatch):
    def failing(self, index, text):
        raise ValueError("no such text")

    monkeypatch.setattr(CompletionForm, "plain", failing)
    ((_, body),) = received(engine, [request("1.1")])
    events = body.decode().removesuffix("\n\n").split("\n\n")
    assert json.loads(events[-2].removeprefix("data: "))["error"] and events[-1] == "data: [DONE]"


def test_a_direct_write_waits_while_the_client_reads_too_slowly():
    async def everything() -> None:
        sent: list[bytes] = []
        transport = SimpleNamespace(write=sent.append)
        flow = FlowControl(transport)
        cycle = SimpleNamespace(flow=flow, disconnected=False, transport=transport)
        write = DirectBody(cycle)
        await write(b"one")
        flow.pause_writing()
        waiting = asyncio.create_task(write(b"x" * 20))
        for _ in range(5):
            await asyncio.sleep(0)
        assert sent == [b"3\r\none\r\n"] and not waiting.done()
        flow.resume_writing()
        await waiting
        assert sent[1:] == [b"14\r\n" + b"x" * 20 + b"\r\n"]
        cycle.disconnected = True
        await write(b"three")
        assert len(sent) == 2, "nothing is written to a client that is gone"

    asyncio.run(everything())


def test_json_has_no_nan_and_no_infinity_and_any_text():
    for text in ("NaN", "-Infinity", 'é "\n', "\ud800"):
        assert json.loads(dumps({"text": text, "logprobs": [-1.5, None]})) == {"text": text, "logprobs": [-1.5, None]}
    for number in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            dumps({"text": "a", "logprobs": [number]})
