"""The socket between the engine process and its workers."""

import asyncio
import logging
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.errors import InvalidRequest
from minillm.request import SamplingParams
from minillm.server.config import ServerConfig
from minillm.server.engine_side.hub import Hub
from minillm.server.engine_side.line import SocketLine
from minillm.server.lengths import TooLong, check_length
from minillm.server.wire import (
    HEADER,
    MAGIC,
    Abort,
    Alive,
    Ask,
    Decode,
    Deltas,
    Encode,
    Encoded,
    EngineFacts,
    Event,
    Failure,
    Gauges,
    Hello,
    MalformedMessage,
    MessageDecoder,
    Offsets,
    PromptForm,
    Refused,
    RenderChat,
    Reply,
    ShowTokens,
    State,
    Stopped,
    Submit,
    encode,
    numbers_of,
)
from minillm.server.worker.link import ERRORS, EngineGone, Prompt, RemoteEngine, changed_fields
from tests.waiting import TIMEOUT, async_wait_until, paused_steps, wait_until

TEXT, IDS, INT = st.text(), st.lists(st.integers(0, 1 << 17)), st.integers(0, 1 << 40)
NUMBERS = st.lists(st.integers(-(2**63), 2**63 - 1)).map(numbers_of)
JSON = st.recursive(st.none() | st.integers() | st.floats(allow_nan=False) | TEXT, st.lists, max_leaves=9)
FIELDS = st.dictionaries(TEXT, JSON, max_size=3)
PROMPTS = st.lists(st.builds(PromptForm, st.none() | INT, st.none() | TEXT, st.booleans()))
REFUSED = st.builds(Failure, st.sampled_from([*ERRORS]), TEXT, st.none() | INT)
LOGPROBS = st.none() | st.lists(st.none() | st.dictionaries(TEXT, st.floats(allow_nan=False)))
END = st.none() | INT | TEXT
REASON = st.none() | TEXT
EVENTS = st.lists(
    st.builds(Event, INT, IDS, LOGPROBS)
    | st.builds(Event, INT, IDS, LOGPROBS, REASON, END)
    | st.builds(Event, INT, IDS, LOGPROBS, REASON, END, INT, TEXT, st.none() | IDS, LOGPROBS, st.none() | REFUSED)
)
CONFIG = ServerConfig(max_wait=0, cors_origins="*", log_level="critical")
FACTS = st.builds(EngineFacts, TEXT, st.booleans(), INT, INT, INT, TEXT, INT, INT, st.just(CONFIG), st.none() | TEXT)
QUESTIONS = st.one_of(
    *(st.builds(kind) for kind in (Alive, Gauges, State)),
    st.builds(RenderChat, st.lists(st.dictionaries(TEXT, TEXT))),
    st.builds(Encode, TEXT, st.booleans()),
    st.builds(Decode, IDS),
    st.builds(ShowTokens, IDS),
    st.builds(Offsets, IDS, TEXT, st.booleans()),
)
MESSAGES = st.one_of(
    st.builds(Submit, INT, PROMPTS, FIELDS, FIELDS, INT, st.booleans(), st.none() | TEXT, NUMBERS),
    st.builds(Abort, IDS),
    st.builds(Stopped, INT, TEXT),
    st.builds(Ask, INT, QUESTIONS),
    st.builds(Hello, FACTS, st.none() | TEXT),
    st.builds(Encoded, INT, IDS, INT, NUMBERS),
    st.builds(Deltas, EVENTS, NUMBERS),
    st.builds(Refused, INT, INT, REFUSED),
    st.builds(Reply, INT, JSON, st.none() | REFUSED),
)


def sent(*messages):
    """What arrives of these messages."""
    return [*MessageDecoder().feed(b"".join(map(encode, messages)))]


def submit(numbers=(5, 6), **more):
    prompts = [PromptForm(len(numbers))]
    fields = {"params": {}, "options": {}, "n": 1, "stops": False, "client": None}
    return Submit(0, prompts, numbers=numbers_of(numbers), **fields | more)


def framed(head, data=b""):
    return HEADER.pack(MAGIC, len(head), len(data)) + head + data


@given(st.lists(MESSAGES), st.lists(st.integers(1, 50)))
def test_messages_arrive_whole_however_the_bytes_are_split(messages, cuts):
    data = b"".join(map(encode, messages))
    decoder, arrived = MessageDecoder(), []
    for cut in [*cuts, len(data)]:
        arrived += decoder.feed(data[:cut])
        data = data[cut:]
    assert arrived == messages


def test_a_message_is_a_header_a_list_and_numbers():
    data = encode(Deltas([], numbers_of([7])))
    assert data == HEADER.pack(MAGIC, len(b'["Deltas",[]]'), 8) + b'["Deltas",[]]' + (7).to_bytes(8, "little")


def test_an_event_is_sent_without_its_last_fields_if_they_have_their_defaults():
    events = [Event(1, [5]), Event(2, [6], [{"6": -0.5}]), Event(3, [7], reason="length"), Event(4, [8], cached=16)]
    head = b'["Deltas",[[1,[5],null],[2,[6],[{"6":-0.5}]],[3,[7],null,"length",null],'
    assert encode(Deltas(events, numbers_of([])))[HEADER.size :].startswith(head + b'[4,[8],null,null,null,16,"",')


# What is no message: bytes without a header, no JSON, an unknown name, too few fields, wrong types, half a number.
MALFORMED = {
    "no header": b"GET / HTTP/1.1\r\n\r\n",
    "no JSON": framed(b"Deltas"),
    "no list": framed(b'{"op":"abort"}'),
    "unknown": framed(b'["Shutdown",1]'),
    "too few fields": framed(b'["Submit",0,[]]'),
    "too many fields": framed(b'["Abort",[0],1]'),
    "an event without tokens": framed(b'["Deltas",[[0]]]'),
    "unknown question": framed(b'["Ask",0,["Password"]]'),
    "a question's arguments": framed(b'["Ask",0,["Decode"]]'),
    "unknown facts": framed(b'["Hello",{"config":{}},null]'),
    "half a number": framed(b'["Deltas",[]]', b"1234"),
    "nested too deeply": framed(b"[" * 100_000),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_what_is_no_message_is_an_error_that_quotes_it(data):
    with pytest.raises(MalformedMessage, match="not a message: |no message begins with "):
        list(MessageDecoder().feed(data))


# To a worker, too: a message for the other end, an error of no kind, a key without its token.
TO_WORKER = MALFORMED | {
    "for the engine": encode(Abort([0])),
    "no kind of error": encode(Refused(0, 1, Failure("odd", "?"))),
    "a key without a token": encode(Deltas([], numbers_of([0]))),
}
TO_ENGINE = MALFORMED | {"for a worker": encode(Reply(0, 1)), "keys that are no list": framed(b'["Abort",5]')}


@pytest.mark.parametrize("data", TO_WORKER.values(), ids=TO_WORKER)
def test_a_worker_that_is_sent_no_message_ends_its_requests_and_asks_for_another_connection(engine, data, caplog):
    hub = Hub(engine, "here", CONFIG)

    async def work():
        ours, theirs = socket.socketpair()
        lost = asyncio.Event()
        remote = RemoteEngine(lost.set)
        await remote.connect(theirs, 40)
        ours.sendall(encode(hub.hello))
        await remote.connected
        stream = asyncio.ensure_future(anext(remote.stream([Prompt([5])], SamplingParams())))
        question = asyncio.ensure_future(remote.ask(Alive()))
        await asyncio.sleep(0)
        ours.sendall(data)
        for each in (stream, question):
            with pytest.raises(EngineGone, match="the engine has stopped"):
                await asyncio.wait_for(each, TIMEOUT)
        await asyncio.wait_for(lost.wait(), TIMEOUT)
        ours.close()
        ours, theirs = socket.socketpair()
        await remote.connect(theirs)
        hub.connect(ours)
        assert await asyncio.wait_for(remote.ask(Alive()), TIMEOUT), "another connection works"

    with caplog.at_level(logging.ERROR):
        asyncio.run(work())
    hub.close()
    assert "the connection to the engine failed; its requests are lost" in caplog.text


@pytest.mark.parametrize("data", TO_ENGINE.values(), ids=TO_ENGINE)
def test_an_engine_that_is_sent_no_message_drops_this_worker_alone(engine, data, caplog):
    hub = Hub(engine, "here", CONFIG)
    (ours, theirs), (other_ours, other_theirs) = socket.socketpair(), socket.socketpair()
    hub.connect(ours), hub.connect(other_ours)
    with theirs, other_theirs, caplog.at_level(logging.ERROR):
        for each in (theirs, other_theirs):
            each.settimeout(TIMEOUT)
        theirs.sendall(encode(submit(params={"max_tokens": 200, "ignore_eos": True})) + data)
        while theirs.recv(1 << 20):
            pass  # until the engine's process closes the connection
        wait_until(lambda: hub.running == 0 and len(hub.lines) == 1)
        other_theirs.sendall(encode(Ask(3, Alive())))
        decoder, arrived = MessageDecoder(), []
        while len(arrived) < 2:
            arrived += decoder.feed(other_theirs.recv(1 << 20))
        assert arrived == [hub.hello, Reply(3, True)]
    hub.close()
    assert "the connection to an HTTP worker failed; its requests are lost" in caplog.text


def test_a_closing_engine_does_not_tell_workers_that_their_answers_have_ended(engine, monkeypatch):
    """What it aborts then is no end of an answer: with other engines, it goes on there."""
    hub = Hub(engine, "here", CONFIG)
    ours, theirs = socket.socketpair()
    line, abort = hub.connect(ours), engine.abort

    def tell_and_abort(prepared):
        line.send(Deltas([Event(0, [], reason="abort")], numbers_of([])))
        abort(prepared)

    monkeypatch.setattr(engine, "abort", tell_and_abort)
    with theirs, paused_steps():
        theirs.settimeout(TIMEOUT)
        theirs.sendall(encode(submit(params={"max_tokens": 200, "ignore_eos": True})))
        wait_until(lambda: hub.running == 1)
        hub.close()
        decoder, arrived = MessageDecoder(), []
        while data := theirs.recv(1 << 20):
            arrived += decoder.feed(data)
    assert arrived == [hub.hello]


def test_a_connection_that_comes_just_before_an_engine_closes_is_closed_too(engine, monkeypatch):
    run = Hub._run
    monkeypatch.setattr(Hub, "_run", lambda hub: (wait_until(lambda: hub._closing), run(hub)))
    hub = Hub(engine, "here", CONFIG)
    ours, theirs = socket.socketpair()
    hub.connect(ours)
    with theirs:
        hub.close()
        theirs.setblocking(False)
        while theirs.recv(1 << 20):
            pass  # it has said hello


def test_parameters_are_sent_as_differences_from_the_defaults():
    params = SamplingParams(max_tokens=3, stop="end", logit_bias={5: 1.5}, seed=0, temperature=1.0)
    form = changed_fields(params)
    assert set(form) == {"max_tokens", "stop", "logit_bias", "seed"}
    (message,) = sent(submit(params=form))
    assert SamplingParams(**message.params) == params


LONE = "\ud800 \u4e2d \U0001f600"


@pytest.mark.parametrize("message", [Stopped(0, LONE), Deltas([Event(0, [], stop=LONE, text=LONE)], numbers_of([]))])
def test_lone_surrogates_can_be_sent(message):
    assert sent(message) == [message]


def test_what_has_no_form_on_the_socket_is_named():
    with pytest.raises(TypeError, match="Path cannot be sent: .*'models'"):
        encode(Reply(0, Path("models")))


def test_choices_of_a_prompt_share_parameters_checked_once(engine, monkeypatch):
    """Their parameters are sent, created and checked once, however many choices there are."""
    made, checked, began = [], [], []
    check = SamplingParams.__post_init__
    monkeypatch.setattr(
        SamplingParams, "__post_init__", lambda params, *moved: made.append(params) or check(params, *moved)
    )
    monkeypatch.setattr(engine.engine, "check_params", checked.append)
    monkeypatch.setattr(engine, "submit", began.extend)
    bias, n = dict.fromkeys(range(200), 1.0), 100
    params = SamplingParams(logit_bias=bias, seed=7)

    async def work():
        ours, theirs = socket.socketpair()
        hub = Hub(engine, "here", ServerConfig(log_level="critical"))
        hub.connect(ours)
        remote = RemoteEngine()
        await remote.connect(theirs)
        await remote.connected
        written, real = [], remote._link.transport
        double = SimpleNamespace(write=lambda data: written.append(data) or real.write(data), close=real.close)
        monkeypatch.setattr(remote._link, "transport", double)
        made.clear()
        stream = asyncio.ensure_future(anext(remote.stream([Prompt([5]), Prompt([6])], params, n)))
        await async_wait_until(lambda: began)
        stream.cancel()
        hub.close()
        return written[0]

    (message,) = MessageDecoder().feed(asyncio.run(work()))
    assert message.params == {"logit_bias": {str(token): 1.0 for token in bias}, "seed": 7}
    assert (message.n, message.numbers.tolist()) == (n, [5, 6])
    assert (len(made), len(checked), len(began)) == (1, 1, 2 * n)
    requests = [prepared.tracked.request for prepared in began]
    assert [request.seed for request in requests] == [*range(7, 7 + n)] * 2
    assert {id(request.params.logit_bias) for request in requests} == {id(checked[0].logit_bias)}
    assert requests[0].params == params


def test_the_last_choices_seed_must_be_valid_too():
    assert [each.seed for each in SamplingParams(seed=2**63 - 2).choices(2)] == [2**63 - 2, 2**63 - 1]
    with pytest.raises(InvalidRequest, match="seed must be a 64-bit whole number, and seed \\+ 2 is not"):
        SamplingParams(seed=2**63 - 2).choices(3)


def test_a_worker_knows_how_long_an_engine_takes_to_come_back_before_it_is_told(engine):
    """It may notice the engine's end before its owner does, and clients must not be told to try again at once."""

    async def work():
        ours, theirs = socket.socketpair()
        hub = Hub(engine, "here", ServerConfig(log_level="critical"))
        hub.connect(ours)
        remote = RemoteEngine()
        await remote.connect(theirs, 40)
        await remote.connected
        hub.close()
        await async_wait_until(lambda: not remote.alive)
        with pytest.raises(EngineGone) as gone:
            await remote.ask(Alive())
        assert 30 < gone.value.retry_after <= 40
        remote.expect(50)
        with pytest.raises(EngineGone) as gone:
            await remote.ask(Alive())
        assert 40 < gone.value.retry_after <= 50

    asyncio.run(work())


def test_a_prompt_must_leave_room_for_a_token():
    check_length(9, 10)
    check_length(10, 10, least=0)
    with pytest.raises(TooLong, match="messages has 10 tokens.*together have at most 10"):
        check_length(10, 10, "messages")
    with pytest.raises(TooLong, match="prompt has 11 tokens.*at most 10: shorten it"):
        check_length(11, 10, least=0)
    assert issubclass(TooLong, InvalidRequest)


def test_a_worker_that_does_not_read_never_blocks_the_engine(engine):
    ours, theirs = socket.socketpair()
    hub = Hub(engine, "here", ServerConfig(max_queued=0, log_level="critical"))
    line = hub.connect(ours)
    count, size = 200, 20_000
    for number in range(count):
        line.send(Deltas([Event(number, [])], numbers_of(range(size))))
    decoder, arrived = MessageDecoder(), []
    while len(arrived) < count + 1:
        arrived += decoder.feed(theirs.recv(1 << 20))
    assert arrived[0] == hub.hello
    assert [message.events[0].key for message in arrived[1:]] == [*range(count)]
    theirs.close()
    hub.close()


def test_messages_keep_their_order_when_a_socket_takes_a_part_of_one():
    """The socket has room again before the rest of the first message is written."""
    sent, room_for = bytearray(), [3, 1 << 20, 1 << 20]

    class Narrow:
        def setblocking(self, flag): ...

        def send(self, data):
            count = min(len(data), room_for.pop(0))
            sent.extend(data[:count])
            return count

    shared = SimpleNamespace(engine=None, soon=lambda task: None)
    line = SocketLine(shared, False, Narrow(), lambda line, wanted: None)
    messages = [Reply(1, "first"), Reply(2, "second")]
    for message in messages:
        line.send(message)
    line.flush()
    assert [*MessageDecoder().feed(sent)] == messages


@pytest.mark.parametrize(
    "module",
    [
        "tokenizer",
        "request",
        "config",
        "server",
        "server.worker.worker",
        "server.worker.app",
        "server.worker.connections",
        "server.worker.link",
    ],
)
def test_a_worker_does_not_import_torch(module):
    code = f"import sys, minillm.{module}; print([m for m in ('torch', 'triton', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_failing_operation_does_not_end_the_thread_that_serves_all_workers(engine, caplog):
    hub = Hub(engine, "here", ServerConfig(log_level="critical"))
    later = threading.Event()
    hub.soon(lambda: 1 / 0)
    hub.soon(later.set)
    assert later.wait(TIMEOUT) and hub.alive and "ZeroDivisionError" in caplog.text
    hub.close()
    assert not hub.alive


def test_waking_the_thread_never_waits(engine):
    hub = Hub(engine, "here", ServerConfig(log_level="critical"))
    done = threading.Event()

    def many() -> None:  # on the thread that would have to read the wake-ups
        for _ in range(2000):
            hub.soon(lambda: None)
        done.set()

    hub.soon(many)
    assert done.wait(TIMEOUT)
    hub.close()
