"""The socket between the engine process and its workers."""

import asyncio
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.errors import InvalidRequest
from minillm.request import SamplingParams
from minillm.server.config import ServerConfig
from minillm.server.framing import SIZES, Unpacker, pack
from minillm.server.hub import Hub, Line
from minillm.server.lengths import TooLong, room
from minillm.server.link import EngineGone, Prompt, RemoteEngine, _changed
from tests.waiting import TIMEOUT, async_wait_until

MESSAGES = st.dictionaries(st.text(), st.none() | st.integers() | st.floats(allow_nan=False) | st.text())
NUMBERS = st.lists(st.integers(-(2**63), 2**63 - 1))


@given(st.lists(st.tuples(MESSAGES, NUMBERS)), st.lists(st.integers(1, 50)))
def test_messages_arrive_whole_however_the_bytes_are_split(messages, cuts):
    data = b"".join(pack(message, numbers) for message, numbers in messages)
    unpacker, arrived = Unpacker(), []
    for cut in [*cuts, len(data)]:
        arrived += [(message, numbers.tolist()) for message, numbers in unpacker.feed(data[:cut])]
        data = data[cut:]
    assert arrived == messages


def test_a_message_starts_with_its_sizes():
    data = pack({"op": "stop"}, [7])
    assert SIZES.unpack_from(data) == (len(b'{"op":"stop"}'), 8)


def test_parameters_are_sent_as_differences_from_the_defaults():
    params = SamplingParams(max_tokens=3, stop="end", logit_bias={5: 1.5}, seed=0, temperature=1.0)
    form = _changed(params)
    assert set(form) == {"max_tokens", "stop", "logit_bias", "seed"}
    ((message, _),) = Unpacker().feed(pack({"params": form}))
    assert SamplingParams(**message["params"]) == params


def test_lone_surrogates_can_be_sent():
    ((message, _),) = Unpacker().feed(pack({"text": "\ud800 \u4e2d \U0001f600"}))
    assert message == {"text": "\ud800 \u4e2d \U0001f600"}


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
        sent, real = [], remote._link.transport
        double = SimpleNamespace(write=lambda data: sent.append(data) or real.write(data), close=real.close)
        monkeypatch.setattr(remote._link, "transport", double)
        made.clear()
        stream = asyncio.ensure_future(anext(remote.stream([Prompt([5]), Prompt([6])], params, n)))
        await async_wait_until(lambda: began)
        stream.cancel()
        hub.close()
        return sent[0]

    ((message, numbers),) = Unpacker().feed(asyncio.run(work()))
    assert message["params"] == {"logit_bias": {str(token): 1.0 for token in bias}, "seed": 7}
    assert (message["n"], numbers.tolist()) == (n, [5, 6])
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
            await remote.ask("alive")
        assert 30 < gone.value.retry_after <= 40
        remote.expect(50)
        with pytest.raises(EngineGone) as gone:
            await remote.ask("alive")
        assert 40 < gone.value.retry_after <= 50

    asyncio.run(work())


def test_a_prompt_must_leave_room_for_a_token():
    room(9, 10)
    room(10, 10, least=0)
    with pytest.raises(TooLong, match="messages has 10 tokens.*together have at most 10"):
        room(10, 10, "messages")
    with pytest.raises(TooLong, match="prompt has 11 tokens.*at most 10: shorten it"):
        room(11, 10, least=0)
    assert issubclass(TooLong, InvalidRequest)


def test_a_worker_that_does_not_read_never_blocks_the_engine(engine):
    ours, theirs = socket.socketpair()
    hub = Hub(engine, "here", ServerConfig(max_queued=0, log_level="critical"))
    line = hub.connect(ours)
    count, size = 200, 20_000
    for number in range(count):
        line.send({"op": "deltas", "number": number}, range(size))
    unpacker, arrived = Unpacker(), []
    while len(arrived) < count + 1:
        arrived += [message.get("number", message["op"]) for message, _ in unpacker.feed(theirs.recv(1 << 20))]
    assert arrived == ["hello", *range(count)]
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

    hub = SimpleNamespace(engine=None, soon=lambda task: None, want_write=lambda line, wanted: None)
    line = Line(hub, Narrow())
    line.send({"op": "first"})
    line.send({"op": "second"})
    line.flush()
    assert [message["op"] for message, _ in Unpacker().feed(sent)] == ["first", "second"]


@pytest.mark.parametrize(
    "module",
    ["tokenizer", "request", "config", "server", "server.worker", "server.app", "server.connections", "server.link"],
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
