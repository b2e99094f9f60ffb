"""Grammars: masks, copies, and what is refused before anything runs."""

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from minillm.errors import InvalidRequest, MissingPackage
from minillm.grammar import Grammars
from minillm.grammar import matcher as matchers
from minillm.request import SamplingParams
from minillm.tokenizer import Tokenizer
from tests.grammar.walks import allowed
from tests.waiting import TIMEOUT

VOCAB, EOS = 4100, (1, 5)  # four more than the tokenizer has, as in a padded model


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_pretrained(Path(__file__).parents[2] / "data" / "tiny-gemma")


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, VOCAB, EOS)


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
    monkeypatch.setattr(matchers, "KEPT", 2)
    grammars = Grammars(tokenizer, VOCAB, EOS)
    for text in ("a", "b", "a", "c"):
        grammars.matcher("regex", text)
    assert list(grammars._kept) == [("regex", "a"), ("regex", "c")]


def test_multiples_that_compile_fast_are_accepted(grammars):
    for schema in ({"type": "number", "multipleOf": 0.01}, {"properties": {"multipleOf": {"multipleOf": 100}}}):
        assert grammars.matcher("json_schema", json.dumps(schema)).error is None


@pytest.mark.parametrize("opening", ["(", "(?:", "[a", "([", r"\\("])
def test_an_expression_of_unclosed_groups_is_refused_at_once(grammars, opening):
    """The library holds Python's lock while it looks for their ends, for a time that grows with their square."""
    begin = time.thread_time()
    with pytest.raises(InvalidRequest, match="^regex is nested too deeply: at most 250 groups"):
        grammars.matcher("regex", opening * 5_000)
    assert time.thread_time() - begin < 1


def test_an_expression_that_would_compile_for_seconds_is_refused(grammars):
    """The time grows with the square of these: 15 s for 65,536 characters."""
    with pytest.raises(InvalidRequest, match="^regex has 16,386 characters, but at most 16,384 are allowed"):
        grammars.matcher("regex", "a?" * 8_193)


def test_brackets_that_open_nothing_do_not_count(grammars):
    for text in (r"\(" * 300, "[(]" * 300, "(a)" * 300, "(" * 240 + "a" + ")" * 240):
        assert grammars.matcher("regex", text).error is None


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


def test_a_text_ends_behind_the_last_listed_property(grammars, tokenizer):
    person = {"type": "object", "properties": {"name": {"type": "string"}}}
    for schema, more in ((person, False), (person | {"additionalProperties": True}, True)):
        matcher = grammars.matcher("json_schema", json.dumps(schema))
        assert matcher.advance(tokenizer.encode('{"name": "a"', add_special_tokens=False)) is None
        assert (tokenizer.id(",") in allowed(matcher)) == more
        assert tokenizer.id("<0x7D>") in allowed(matcher)  # }


def test_the_vocabulary_is_made_once_and_a_request_waits_for_it(tokenizer, monkeypatch):
    begun, may_go_on, made = threading.Event(), threading.Event(), []

    class Slow(matchers.Vocabulary):
        def __init__(self, *model):
            begun.set()
            assert may_go_on.wait(TIMEOUT)
            made.append(self)
            super().__init__(*model)

    monkeypatch.setattr(matchers, "Vocabulary", Slow)
    grammars = Grammars(tokenizer, VOCAB, EOS)
    grammars.make_tokenizer_in_background()
    assert begun.wait(TIMEOUT)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(grammars.matcher, "regex", "a")
        may_go_on.set()
        assert allowed(asked.result(TIMEOUT)) == {tokenizer.id("a")}
    grammars.matcher("json_schema", "{}")
    assert len(made) == 1
