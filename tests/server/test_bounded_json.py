"""The bounded JSON decoder agrees with the json module and stops at the first value over the limit."""

import json
import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.server.worker import bounded_json
from minillm.server.worker.bounded_json import BoundedDecoder, TooDeep, TooManyValues, UnknownMember


class Everything:
    def __contains__(self, name):
        return True


def decode(text, values=10**6, numbers=10**6, depth=100, members=Everything(), piece=None):
    """Decode a text; piece: how many characters of white space, numbers and the tail are read at a time."""
    with pytest.MonkeyPatch.context() as patch:
        if piece is not None:
            patch.setattr(bounded_json, "PIECE", piece)
        return BoundedDecoder(text, values=values, numbers=numbers, depth=depth, members=members).decode()


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS | st.lists(st.integers()),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=6),
    max_leaves=30,
)
PIECES = st.integers(1, 40)


@given(VALUES, st.sampled_from([None, 0, 3]), st.booleans(), PIECES)
def test_valid_json_decodes_as_in_the_json_module(value, indent, ascii, piece):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    assert decode(text, piece=piece) == decode(text) == value


@given(VALUES, st.data(), PIECES)
def test_invalid_json_is_rejected_as_in_the_json_module(value, data, piece):
    text = json.dumps(value)
    place = data.draw(st.integers(0, len(text)))
    text = (
        text[:place] + data.draw(st.sampled_from(["", ",", "]", "}", '"', ":", "0", "x", "[", " "])) + text[place + 1 :]
    )
    try:
        expected = json.loads(text)
    except json.JSONDecodeError as error:
        with pytest.raises(json.JSONDecodeError) as refused:
            decode(text, piece=piece)
        places = {error.pos}
        if "trailing comma" in error.msg:  # the module points at what follows the comma up to Python 3.12, then at it
            places.add(re.compile(r",\s*").match(text, error.pos).end())
        assert refused.value.pos in places, (text, error)
    else:
        assert decode(text, piece=piece) == expected


def counted(monkeypatch, text, **limits):
    """The number of values that the decoder reads before it rejects a text."""
    looked = []
    look, loads = BoundedDecoder._value, json.loads

    def value(decoder, *place):
        looked.append(1)
        return look(decoder, *place)

    def numbers(piece):
        found = loads(piece)
        looked.append(len(found))
        return found

    monkeypatch.setattr(BoundedDecoder, "_value", value)
    monkeypatch.setattr(bounded_json.json, "loads", numbers)
    with pytest.raises(TooManyValues) as refused:
        decode(text, **limits)
    assert refused.value.name == "stop"
    return sum(looked)


MANY = 200_000
LONG = {
    "empty lists": "[" + "[]," * MANY + "[]]",
    "empty objects": "[" + "{}," * MANY + "{}]",
    "strings": "[" + '"a",' * MANY + '"a"]',
    "members": "{" + '"a":1,' * MANY + '"a":1}',
    "lists of numbers": "[" + "[1,2]," * MANY + "[1]]",
    "numbers among strings": "[" + '1,"a",' * MANY + "1]",
}


@pytest.mark.parametrize("what", LONG)
def test_decoding_stops_at_the_first_value_over_the_limit(monkeypatch, what):
    text = f'{{"prompt": "a", "stop": {LONG[what]}}}'
    # Of each pair it reads, one counts as a value and one as a number.
    assert counted(monkeypatch, text, values=1000, numbers=1000) <= 2002


def test_reading_numbers_stops_with_the_piece_that_exceeds_the_limit(monkeypatch):
    text = '{"stop": [' + "1," * MANY + "1]}"
    assert counted(monkeypatch, text, values=10, numbers=1000) <= 10 + bounded_json.PIECE


def test_a_piece_of_invalid_numbers_is_tried_only_once(monkeypatch):
    tried = []
    watched = {"loads": lambda piece: tried.append(piece) or json.loads(piece)}  # not the other threads' calls
    monkeypatch.setattr(bounded_json, "json", SimpleNamespace(**vars(json) | watched))
    with pytest.raises(json.JSONDecodeError):
        decode("[" + "1," * 6000 + "01," + "1," * MANY + "1]")
    assert len(tried) == 1


def test_an_unknown_member_is_rejected_before_its_value_is_read():
    with pytest.raises(UnknownMember, match="^nonsense$"):
        decode('{"a": {"nonsense": 1}, "nonsense": ???', members={"a"})


def test_nesting_depth_is_limited():
    assert decode("[[[]]]" + " " * 20_000, depth=3) == [[[]]]
    with pytest.raises(TooDeep):
        decode("[[[[]]]]" + " " * 20_000, depth=3)
