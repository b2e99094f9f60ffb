"""JSON schemas: refused with the part and a way out, or followed to the end by every text."""

import copy
import json
from pathlib import Path

import jsonschema
import pytest

from minillm.errors import InvalidRequest
from minillm.grammar import Grammars
from minillm.grammar import schema as schemas
from minillm.request import SamplingParams
from minillm.tokenizer import Tokenizer
from tests.grammar.walks import LENGTH, STOP, walk

EOS = (1, 5)
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
NULL = {"type": "null"}


def record(properties=None, **more):
    return {"type": "object"} | ({} if properties is None else {"properties": properties}) | more


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_pretrained(Path(__file__).parents[2] / "data" / "tiny-gemma")


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, 4100, EOS)


def matcher(grammars, schema):
    return grammars.matcher(*SamplingParams(json_schema=schema).grammar)


REFUSED = [
    # keywords
    (record({"a": {"type": "word"}}), "#/properties/a", "Invalid type: word"),
    (record({"a": DIGIT}, unevaluatedProperties=False), "#", '"unevaluatedProperties" cannot be followed'),
    (record({"a": record({"b": DIGIT}, dependentRequired={"b": ["c"]})}), "#/properties/a", '"dependentRequired"'),
    (record(propertyNames={"pattern": "^a"}), "#", '"propertyNames" cannot be followed'),
    ({"type": "array", "items": {"not": NULL}}, "#/items", '"not" cannot be followed: leave it out'),
    ({"anyOf": [NULL, {"if": NULL, "then": NULL}]}, "#/anyOf/1", '"if", "then" cannot be followed'),
    ({"x-guidance": {"lenient": True}, "not": NULL}, "#", '"not" cannot be followed'),
    (record({"a/b": {"items": {"uniqueItems": True}}}), "#/properties/a~1b/items", '"uniqueItems"'),
    (record({"a": {"type": "string", "format": "color"}}), "#/properties/a", "format color is not known: leave it out"),
    (record({"a": {"type": "string", "pattern": "("}}), "#/properties/a", "the pattern cannot be read: unclosed group"),
    ({"items": [NULL, {"pattern": "(?=a)b"}]}, "#/items/1", "the pattern cannot be read: look-around"),
    ({"oneOf": [DIGIT, {"type": "integer"}]}, "#", "oneOf needs options of different types or constants: use anyOf"),
    (record({"a": 5}), "#/properties/a", "schema must be an object or boolean"),
    (record({"a": {"minLength": -1}}), "#/properties/a", "minLength"),
    (record({f"p{n}": DIGIT for n in range(50)} | {"z": {"type": "word"}}), "#/properties/z", "Invalid type: word"),
    # references
    ({"$ref": "#"}, "#", r"its \$ref leads back to itself.*\(# -> #\)"),
    ({"allOf": [{"$ref": "#"}]}, "#", r"leads back to itself.*\(# -> #/allOf/0 -> #\)"),
    ({"anyOf": [{"$ref": "#"}, NULL]}, "#", "leads back to itself"),
    (record({"a": {"$ref": "#/$defs/a"}}, **{"$defs": {"a": {"$ref": "#/$defs/a"}}}), "#/$defs/a", "leads back"),
    (record({"a": {"$ref": "#"}}, required=["a"]), "#", "without end: make a property optional"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#", r"without end.*\(# -> #/items -> #\)"),
    (record({"a": {"$ref": "#/$defs/b"}}), "#/properties/a", r"names '/\$defs/b', which does not exist: put it under"),
    (record({"a": {"$ref": "#b"}}), "#/properties/a", "names 'b', which does not exist"),
    (record({"a": {"$ref": "http://localhost/s"}}), "#/properties/a", r"another document: put it under \$defs"),
    (record({"a": {"$ref": "other.json#/a"}}), "#/properties/a", "another document"),
    (record({"a": {"$ref": "#", "type": "object"}}), "#", "keywords next to it: move them to what it names"),
    (
        record({"a": {"$ref": "#/$defs/x y"}}, **{"$defs": {"x y": NULL}}),
        "#/properties/a",
        "Invalid URI reference",
    ),
    (
        record({"x": {"$ref": "#/$defs/n"}}, **{"$defs": {"n": {"items": {"anyOf": [NULL, {"contains": NULL}]}}}}),
        "#/$defs/n/items/anyOf/1",
        '"contains"',
    ),
    (record({"a": {"$ref": "json-schema:///#/x"}}) | {"x": NULL}, "#/properties/a", "another document"),
    ({"$id": "http://[", "$ref": "x"}, "#", "another document"),
    (record({"a": {"$ref": "#/x/+0"}}) | {"x": [NULL]}, "#/properties/a", r"names '/x/\+0', which does not exist"),
    ({"$id": "http://localhost/s", "$ref": "s"}, "#", "leads back to itself"),
    (
        {"$id": "http://localhost/s", "$ref": "http://localhost/s#/x", "x": {"const": 2**60}},
        "#/x/const",
        "make it a string",
    ),
    (
        {"$ref": "#/$defs/d", "$defs": {"d": {"$id": "http://localhost/d", "items": {"$ref": "#/x"}, "x": NULL}}},
        "#/$defs/d/items",
        "another document",
    ),
    # nothing can follow
    (record({"a": {"enum": []}}, required=["a"]), "#/properties/a", "an enum, a type or an anyOf is an empty list"),
    (record({"a": False}, required=["a"]), "#/properties/a", "no value is possible: schema is false"),
    (record({"a": NULL}, required=["b"], additionalProperties=False), "#", "'b' is required, and nothing"),
    (record(patternProperties={"^b": False}, required=["b"]), "#", "'b' is required, and nothing can be its value"),
    ({"allOf": [{"type": "string"}, DIGIT]}, "#", "no value is possible: incompatible types"),
    (record({"a": {"type": "integer", "minimum": 5, "maximum": 4}}, required=["a"]), "#/properties/a", "greater than"),
    ({"type": "integer", "exclusiveMinimum": 4, "exclusiveMaximum": 5}, "#", "contains no integer"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "#", "minItems"),
    ({"type": "string", "pattern": "a", "maxLength": 0}, "#", "no text has this pattern, format and length"),
    # numbers
    (record({"a": {"type": "integer", "minimum": 2**53}}), "#/properties/a/minimum", "beyond 9,007,199,254,740,991"),
    ({"type": "integer", "exclusiveMaximum": -(2**63)}, "#/exclusiveMaximum", "ask for a string of digits"),
    ({"type": "number", "minimum": 1e300}, "#/minimum", "ask for a string of digits"),
    (record({"a": {"const": 2**53 + 1}}), "#/properties/a/const", "make it a string"),
    ({"enum": [1, {"b": [10**30]}]}, "#/enum/1/b/0", "make it a string"),
    ({"type": "integer", "const": -1e20}, "#/const", "make it a string"),
    ({"allOf": [{"enum": [-(2.0**63)]}, {"type": ["integer", "null"]}]}, "#/allOf/0/enum/0", "make it a string"),
    (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
        "#/exclusiveMinimum",
        "0 itself cannot be left out.*use",
    ),
    ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, "#/exclusiveMaximum", "use maximum with"),
    ({"multipleOf": True}, "#", "Expected f64 for 'multipleOf'"),
    (record({"a": {"multipleOf": 10_007}}), "#/properties/a/multipleOf", "least common multiple"),
    ({"allOf": [{"multipleOf": 101}, {"multipleOf": 103}]}, "#/allOf/", "least common multiple"),
    # names
    (record(patternProperties={"^a": NULL, "b$": NULL}), "#", "not disjoint: let each name match one of them"),
    (record({"a": NULL, "b": NULL}, minProperties=2), "#", "needs all listed properties to be required"),
    (
        {"allOf": [record({"a": NULL}), record(patternProperties={"^a$": NULL}, additionalProperties=False)]},
        "#/allOf/1/patternProperties",
        "patterns must match more than names that properties lists",
    ),
    (record(patternProperties={"(": NULL}), "#", "the pattern cannot be read"),
    (record(patternProperties={"(?:" * 5_000: NULL}), "#", "the pattern is nested too deeply: at most 250"),
    (record({"a": {"pattern": "[a" * 8_000}}), "#/properties/a", "the pattern is nested too deeply: at most 250"),
    (record({"a": {"pattern": "a?" * 8_193}}), "#/properties/a", "the pattern has 16,386 characters, but at most"),
]

FOLLOWED = [
    # names that patterns match, or that are required
    record({"s": DIGIT}, required=["s"], additionalProperties=False, patternProperties={"^s$": {"multipleOf": 5}}),
    record({"s": DIGIT, "t": NULL}, additionalProperties=False, patternProperties={"^(s|t)$": True}),
    record({"s": DIGIT}, required=["s", "t"], additionalProperties=False, patternProperties={"^t$": NULL}),
    record({"s": DIGIT}, required=["s"], patternProperties={"": True}),
    record({"s": DIGIT}, patternProperties={"^t": False}, additionalProperties=False),
    record({"s": True}, required=["s"], additionalProperties=False, patternProperties={"^[s-u]$": NULL}),
    record(additionalProperties=False, patternProperties={"^s$": NULL}),
    record({"a": DIGIT}, required=["a", "b"]),
    record({"a": DIGIT}, required=["a", "b"], additionalProperties=DIGIT),
    record({"x": record({"a": NULL}, required=["b"])}, required=["x"]),
    record(required=["b"]),
    record({"a": NULL, "b": NULL}, minProperties=1, additionalProperties=False),
    record({"a": False, "b": NULL}),
    # numbers
    {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    {"type": "integer", "minimum": -(2**63)},
    {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
    {"type": "integer", "exclusiveMinimum": -(2**63), "exclusiveMaximum": 2**63},
    {"type": "integer", "minimum": 2**53 - 2},
    {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "number", "minimum": 0, "exclusiveMaximum": 2.0**63},
    {"type": ["integer", "null"], "exclusiveMinimum": 3, "maximum": 4.5},
    {"const": 2**53 - 1},
    {"enum": [1e-7, -0.5, 1e20, None, [1, {"a": "é"}]]},
    {"type": "string", "minimum": 2**70, "maxLength": 1},
    # references
    record({"a": {"$ref": "#"}}),
    record({"a": {"anyOf": [NULL, {"$ref": "#"}]}}, required=["a"]),
    {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    {"$ref": "#/$defs/x%20y", "$defs": {"x y": {"$ref": "#/$defs/a~1b"}, "a/b": DIGIT}},
    record({"a": {"$ref": "#/components/X"}}, required=["a"]) | {"components": {"X": record({"k": DIGIT})}},
    {"$id": "http://localhost/s", "$ref": "#/$defs/a", "$defs": {"a": DIGIT}},
    {"$id": "http://localhost/s", "$ref": "s#/x", "x": DIGIT},
    record({"a": {"$id": "http://localhost/a", "type": "null"}, "b": {"$ref": "#/properties/a"}}, required=["b"]),
    {"enum": [-1e20, 1e300]},
    {"$ref": "#a", "$defs": {"x": {"$anchor": "a", "type": "boolean"}}},
    # combinations
    {"anyOf": [{"enum": []}, DIGIT]},
    {"oneOf": [DIGIT, {"type": "string", "maxLength": 2}]},
    {"allOf": [record({"a": DIGIT}, required=["a"]), record({"b": NULL}, required=["b"])]},
    {"type": "array", "prefixItems": [DIGIT, NULL], "items": False, "minItems": 2},
    {"$schema": "http://json-schema.org/draft-07/schema#", "items": [DIGIT], "additionalItems": False, "type": "array"},
    {"$schema": "http://json-schema.org/draft-04/schema#", "type": "number", "minimum": 0, "exclusiveMinimum": True},
]


@pytest.mark.parametrize(("schema", "pointer", "why"), REFUSED, ids=[f"{n}-{row[1]}" for n, row in enumerate(REFUSED)])
def test_a_refusal_names_the_part_and_a_way_out(grammars, schema, pointer, why):
    with pytest.raises(InvalidRequest, match=why) as caught:
        matcher(grammars, schema)
    assert str(caught.value).startswith(f"json_schema cannot be used: at {pointer}")
    assert "json-schema:" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("schema", FOLLOWED, ids=range(len(FOLLOWED)))
def test_every_text_that_ends_follows_its_schema(grammars, tokenizer, schema):
    draft = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    ends = []
    for seed in range(8):
        text, end = walk(matcher(grammars, schema), tokenizer.token_bytes, EOS, seed=seed)
        assert end in (STOP, LENGTH), text
        ends.append(end)
        if end == STOP:
            draft(schema).validate(json.loads(text))
    assert STOP in ends or schema == record(required=["b"])  # its other names have random lengths


def test_a_schema_on_which_the_library_panics_is_refused(grammars):
    """It cuts a value that it quotes in the middle of a character. Its panic is a BaseException."""
    with pytest.raises(InvalidRequest, match="^json_schema cannot be used: llguidance fails on it: .*boundary"):
        matcher(grammars, {"minLength": "é" * 100})


def test_a_nested_schema_is_refused_and_not_a_crash(grammars):
    for depth in (150, 400):
        schema = NULL
        for _ in range(depth):
            schema = {"type": "array", "items": schema}
        with pytest.raises(InvalidRequest, match="nested too deeply"):
            matcher(grammars, schema)


def test_json_has_at_most_a_space_after_a_colon_and_a_comma(grammars, tokenizer):
    schema = record({"a": {"type": "array", "items": DIGIT, "minItems": 2}, "b": NULL}, required=["a", "b"])
    compact = '{"a":[1,2],"b":null}'
    for text in (compact, '{"a": [1, 2], "b": null}'):
        follows = matcher(grammars, schema)
        for byte in text.encode():
            assert follows.advance([tokenizer.id(f"<0x{byte:02X}>")]) is None
    for place in range(len(compact)):
        for space in ("  ", "\n") if compact[place - 1] in ":," else (" ", "\n"):
            text, follows = compact[:place] + space, matcher(grammars, schema)
            errors = [follows.advance([tokenizer.id(f"<0x{byte:02X}>")]) for byte in text.encode()]
            assert errors[-1] is not None, text


PERSON = {"type": "object", "properties": {"name": {"type": "string"}}}
CLOSED = PERSON | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (PERSON, CLOSED),
        ({"type": "array", "items": PERSON}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [PERSON, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"$ref": "#/$defs/a", "$defs": {"a": PERSON}}, {"$ref": "#/$defs/a", "$defs": {"a": CLOSED}}),
        ({"$ref": "#/a/b", "a": {"b": PERSON}}, {"$ref": "#/a/b", "a": {"b": CLOSED}}),
        ({"allOf": [PERSON]}, {"allOf": [CLOSED]}),
        (PERSON | {"properties": {"properties": PERSON}}, CLOSED | {"properties": {"properties": CLOSED}}),
        (
            {"properties": {"a": NULL}, "required": ["a", "b"]},
            {"properties": {"a": NULL, "b": True}, "required": ["a", "b"], "additionalProperties": False},
        ),
        *[(same, same) for same in ({"type": "object"}, PERSON | {"additionalProperties": True}, CLOSED)],
        *[(same, same) for same in ({"enum": [PERSON]}, {"const": PERSON}, PERSON | {"patternProperties": {"a": {}}})],
        *[(same, same) for same in ({"allOf": [PERSON, PERSON]}, PERSON | {"anyOf": [PERSON]}, PERSON | {"if": {}})],
    ],
    ids=str,
)
def test_an_object_has_only_the_properties_that_its_schema_lists_or_requires(schema, closed):
    found = copy.deepcopy(schema)
    schemas.close(schemas.parts(found).values())
    assert found == closed
