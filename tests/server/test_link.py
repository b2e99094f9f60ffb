"""The socket between the engine's process and its workers."""

import socket
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.errors import InvalidRequest
from minillm.request import SamplingParams
from minillm.server.hub import Hub, Line
from minillm.server.link import SIZES, TooLong, Unpacker, _changed, pack, room

MESSAGES = st.dictionaries(st.text(), st.none() | st.integers() | st.floats(allow_nan=False) | st.text())
NUMBERS = st.lists(st.integers(-(2**63), 2**63 - 1))


@given(st.lists(st.tuples(MESSAGES, NUMBERS)), st.lists(st.integers(1, 50)))
def test_messages_arrive_whole_however_the_bytes_are_cut(messages, cuts):
    data = b"".join(pack(message, numbers) for message, numbers in messages)
    unpacker, arrived = Unpacker(), []
    for cut in [*cuts, len(data)]:
        arrived += [(message, numbers.tolist()) for message, numbers in unpacker.feed(data[:cut])]
        data = data[cut:]
    assert arrived == messages


def test_a_message_is_announced_by_its_sizes():
    data = pack({"op": "stop"}, [7])
    assert SIZES.unpack_from(data) == (len(b'{"op":"stop"}'), 8)


def test_params_travel_as_what_differs_from_the_defaults():
    params = SamplingParams(max_tokens=3, stop="end", logit_bias={5: 1.5}, seed=0, temperature=1.0)
    form = _changed(params)
    assert set(form) == {"max_tokens", "stop", "logit_bias", "seed"}
    ((message, _),) = Unpacker().feed(pack({"params": form}))
    assert SamplingParams(**message["params"]) == params


def test_a_prompt_must_leave_room_for_a_token():
    assert room(9, 10) == 1
    with pytest.raises(TooLong, match="messages has 10 tokens.*together have at most 10"):
        room(10, 10, "messages")
    assert issubclass(TooLong, InvalidRequest)


def test_what_a_worker_does_not_read_waits_without_holding_up_the_engine(engine):
    ours, theirs = socket.socketpair()
    hub = Hub(engine, "here", max_queued=0, log_level="critical", on_gone=lambda line: None)
    line = Line(hub, ours)
    hub.connect(line)
    count, size = 200, 20_000
    for number in range(count):
        line.send({"op": "deltas", "number": number}, range(size))
    unpacker, arrived = Unpacker(), []
    while len(arrived) < count + 1:
        arrived += [message.get("number", message["op"]) for message, _ in unpacker.feed(theirs.recv(1 << 20))]
    assert arrived == ["hello", *range(count)]
    theirs.close()
    hub.close()


@pytest.mark.parametrize(
    "module",
    ["tokenizer", "request", "config", "server", "server.worker", "server.app", "server.link"],
)
def test_a_worker_imports_no_torch(module):
    code = f"import sys, minillm.{module}; print([m for m in ('torch', 'triton', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
