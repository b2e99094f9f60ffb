"""Grammars: masks, copies, and what is refused before anything runs."""

import copy
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from minillm import grammar
from minillm.errors import InvalidRequest, MissingPackage
from minillm.grammar import Grammars
from minillm.request import SamplingParams
from minillm.tokenizer import Tokenizer

VOCAB, EOS = 4100, (1, 5)  # four more than the tokenizer has, as in a padded model


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_pretrained(Path(__file__).parents[1] / "data" / "tiny-gemma")


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, VOCAB, EOS)


def allowed(matcher) -> set[int]:
    return set(np.nonzero(np.unpackbits(matcher.mask, bitorder="little"))[0].tolist())


def test_a_mask_allows_exactly_the_tokens_that_the_text_can_begin_with(grammars, tokenizer):
    found = allowed(grammars.matcher("regex", "(the|ton)"))
    texts = [tokenizer.token_bytes(token) for token in range(VOCAB)]
    expected = {i for i, text in enumerate(texts) if text and (b"the".startswith(text) or b"ton".startswith(text))}
    assert found == expected and len(expected) > 2


def test_a_complete_text_allows_the_end_tokens_alone(grammars, tokenizer):
    matcher = grammars.matcher("regex", "é")
    for byte in "é".encode():
        found = [token for token in allowed(matcher) if tokenizer.token_bytes(token) == bytes([byte])]
        assert found and matcher.advance(found[:1]) is None
    assert allowed(matcher) == set(EOS)


def test_matchers_of_the_same_grammar_advance_alone(grammars, tokenizer):
    one, other = grammars.matcher("regex", "[0-9]{2}"), grammars.matcher("regex", "[0-9]{2}")
    before = allowed(other)
    for _ in range(2):
        assert one.advance([tokenizer.id("7")]) is None
    assert allowed(one) == set(EOS)
    assert allowed(other) == before == allowed(grammars.matcher("regex", "[0-9]{2}"))


def test_a_token_that_the_grammar_forbids_is_an_error(grammars, tokenizer):
    assert "regex" not in (grammars.matcher("regex", "a").advance([tokenizer.id("7")]) or "regex")


def test_only_the_grammars_used_last_are_kept(tokenizer, monkeypatch):
    monkeypatch.setattr(grammar, "KEPT", 2)
    grammars = Grammars(tokenizer, VOCAB, EOS)
    for text in ("a", "b", "a", "c"):
        grammars.matcher("regex", text)
    assert list(grammars._kept) == [("regex", "a"), ("regex", "c")]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "word"},
        {"not": {"type": "string"}},
        {"x-guidance": {"lenient": True}, "not": {"type": "string"}},
        {"$ref": "http://localhost/schema"},
        {"type": "string", "pattern": "("},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"enum": ["\ud800"]},
        {"type": "integer", "multipleOf": 10_007},
        {"type": "number", "multipleOf": 0.10007},
        {"allOf": [{"multipleOf": 101}, {"multipleOf": 103}]},
    ],
    ids=str,
)
def test_a_schema_that_cannot_be_followed_is_refused(grammars, schema):
    grammar = SamplingParams(json_schema=schema).grammar
    assert grammar is not None
    with pytest.raises(InvalidRequest, match="^json_schema cannot be used: "):
        grammars.matcher(*grammar)


def test_multiples_that_compile_fast_are_accepted(grammars):
    for schema in ({"type": "number", "multipleOf": 0.01}, {"properties": {"multipleOf": {"multipleOf": 100}}}):
        assert grammars.matcher("json_schema", json.dumps(schema)).error is None


def test_what_the_engine_lacks_is_named(tokenizer, monkeypatch):
    with pytest.raises(InvalidRequest, match="this model has none"):
        Grammars(None, VOCAB, EOS).matcher("regex", "a")
    with pytest.raises(InvalidRequest, match="token_bytes"):
        Grammars(object(), VOCAB, EOS).matcher("regex", "a")
    with pytest.raises(InvalidRequest, match="eos_token_id"):
        Grammars(tokenizer, VOCAB, ()).matcher("regex", "a")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingPackage, match="llguidance`, which is not installed"):
        Grammars(tokenizer, VOCAB, EOS).matcher("regex", "a")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json_schema": {}, "regex": "a"}, "exclude each other"),
        ({"json_schema": {}, "ignore_eos": True}, "^ignore_eos cannot be combined with json_schema"),
        ({"regex": "a", "min_tokens": 2}, "^min_tokens cannot be combined with regex"),
        ({"json_schema": "{}"}, "must be a dictionary: json.loads"),
        ({"json_schema": {"enum": [{1}]}}, "must be a JSON schema"),
        ({"json_schema": {"minimum": float("nan")}}, "must be a JSON schema"),
        ({"json_schema": {"minimum": 10**5000}}, "must be a JSON schema"),
        ({"regex": ""}, "regex must be"),
        ({"regex": "\ud800"}, "regex must be"),
        ({"regex": "a" * 65_537}, "65,537 characters, but at most 65,536"),
    ],
)
def test_parameters_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**options)


def test_a_schema_is_the_callers_no_more():
    schema = {"enum": ["a"]}
    params = SamplingParams(json_schema=schema)
    schema["enum"].append("b")
    assert params.json_schema == {"enum": ["a"]}
    assert params.grammar == ("json_schema", '{"enum": ["a"]}')


PERSON = {"type": "object", "properties": {"name": {"type": "string"}}}
CLOSED = PERSON | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (PERSON, CLOSED),
        ({"type": "array", "items": PERSON}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [PERSON, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"$ref": "#/$defs/a", "$defs": {"a": PERSON}}, {"$ref": "#/$defs/a", "$defs": {"a": CLOSED}}),
        ({"allOf": [PERSON]}, {"allOf": [CLOSED]}),
        (PERSON | {"properties": {"properties": PERSON}}, CLOSED | {"properties": {"properties": CLOSED}}),
        *[(same, same) for same in ({"type": "object"}, PERSON | {"additionalProperties": True}, CLOSED)],
        *[(same, same) for same in ({"enum": [PERSON]}, {"const": PERSON}, PERSON | {"patternProperties": {"a": {}}})],
        *[(same, same) for same in ({"allOf": [PERSON, PERSON]}, PERSON | {"anyOf": [PERSON]}, PERSON | {"if": {}})],
    ],
    ids=str,
)
def test_an_object_has_only_the_properties_that_its_schema_lists(schema, closed):
    found = copy.deepcopy(schema)
    grammar._close(found)
    assert found == closed


def test_a_text_ends_behind_the_last_listed_property(grammars, tokenizer):
    for schema, more in ((PERSON, False), (PERSON | {"additionalProperties": True}, True)):
        matcher = grammars.matcher("json_schema", json.dumps(schema))
        assert matcher.advance(tokenizer.encode('{"name": "a"', add_special_tokens=False)) is None
        assert (tokenizer.id(",") in allowed(matcher)) == more
        assert tokenizer.id("<0x7D>") in allowed(matcher)  # }
