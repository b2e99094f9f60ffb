"""The decoder gives what the json module gives, and stops at the first value too many."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.server import bounded_json
from minillm.server.bounded_json import BoundedDecoder, TooDeep, TooManyValues, UnknownMember


class Everything:
    def __contains__(self, name):
        return True


def decode(text, values=10**6, numbers=10**6, depth=100, members=Everything(), piece=None):
    """What a text means; piece: where white space, numbers and the end of the text are taken so much at a time."""
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
def test_a_text_means_what_the_json_module_says(value, indent, ascii, piece):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    assert decode(text, piece=piece) == decode(text) == value


@given(VALUES, st.data(), PIECES)
def test_what_is_no_json_is_refused_as_the_json_module_does(value, data, piece):
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
        # Of a list that ends in a comma, newer versions of the module say more.
        assert refused.value.pos == error.pos or "trailing comma" in error.msg, (text, error)
    else:
        assert decode(text, piece=piece) == expected


def counted(monkeypatch, text, **limits):
    """Values that a decoder looks at until it refuses a text."""
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
def test_the_first_value_too_many_is_the_last_that_is_looked_at(monkeypatch, what):
    text = f'{{"prompt": "a", "stop": {LONG[what]}}}'
    # What it takes two by two, one counts as a value and one as a number.
    assert counted(monkeypatch, text, values=1000, numbers=1000) <= 2002


def test_numbers_end_with_the_piece_that_has_one_too_many(monkeypatch):
    text = '{"stop": [' + "1," * MANY + "1]}"
    assert counted(monkeypatch, text, values=10, numbers=1000) <= 10 + bounded_json.PIECE


def test_a_piece_of_numbers_that_is_wrong_is_tried_once(monkeypatch):
    tried = []
    loads = json.loads
    monkeypatch.setattr(bounded_json.json, "loads", lambda piece: tried.append(piece) or loads(piece))
    with pytest.raises(json.JSONDecodeError):
        decode("[" + "1," * 6000 + "01," + "1," * MANY + "1]")
    assert len(tried) == 1


def test_a_member_that_is_not_known_is_refused_before_its_value_is_looked_at():
    with pytest.raises(UnknownMember, match="^nonsense$"):
        decode('{"a": {"nonsense": 1}, "nonsense": ???', members={"a"})


def test_values_inside_values_end_somewhere():
    assert decode("[[[]]]" + " " * 20_000, depth=3) == [[[]]]
    with pytest.raises(TooDeep):
        decode("[[[[]]]]" + " " * 20_000, depth=3)
