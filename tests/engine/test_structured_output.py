"""Structured output through the engine: every text follows its grammar, and other requests notice nothing."""

import json
import re
import sys
import time

import pytest

from minillm import LLM, SamplingParams
from minillm.errors import MissingPackage
from minillm.grammar import Grammars

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}},
    "required": ["n", "b"],
    "additionalProperties": False,
}
PROMPT = "Once upon a time"


def make(**options) -> LLM:
    return LLM(**({"device": "cpu", "num_blocks": 128, "max_num_seqs": 24} | options))


@pytest.fixture(scope="module")
def llm():
    with make(run_ahead=2) as llm:
        yield llm


def follows(text: str) -> bool:
    value = json.loads(text)
    return value.keys() == {"n", "b"} and value["n"] in range(100) and value["b"] in (True, False)


def constrained(count: int, **more) -> list[SamplingParams]:
    fixed = {"json_schema": SCHEMA, "max_tokens": 160}
    return [SamplingParams(temperature=1 + i % 2, seed=i, **(fixed | more)) for i in range(count)]


def test_every_text_follows_the_schema_and_its_neighbors_get_the_tokens_they_get_alone(llm):
    plain = [SamplingParams(max_tokens=40, seed=i, ignore_eos=True, top_k=50 * (i % 2)) for i in range(4)]
    alone = [each.token_ids for each in llm.generate([PROMPT] * 4, plain)]
    found = llm.generate([PROMPT] * 24, plain + constrained(20))
    for each in found[4:]:
        assert follows(each.text), each.text
        assert each.finish_reason == "stop" and each.stop_reason in llm.model_config.eos_token_ids
    assert len({each.text for each in found[4:]}) > 5
    assert [each.token_ids for each in found[:4]] == alone


@pytest.mark.parametrize("run_ahead", [0, 1, 3])
def test_the_tokens_are_the_same_however_far_ahead_steps_are_launched(llm, run_ahead):
    asked = constrained(4, logprobs=2, top_p=0.95, repetition_penalty=1.1)
    expected = llm.generate([PROMPT] * 4, asked)
    with make(run_ahead=run_ahead) as other:
        found = other.generate([PROMPT] * 4, asked)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert all(follows(each.text) and len(each.logprobs) == len(each.token_ids) for each in found)


def test_a_preempted_text_goes_on_where_it_was(llm):
    asked = constrained(6)
    expected = llm.generate([PROMPT] * 6, asked)
    with make(run_ahead=2, num_blocks=8, block_size=16, max_model_len=128, max_num_batched_tokens=32) as tight:
        found = tight.generate([PROMPT] * 6, asked)
        assert tight.stats()["preemptions"] > 0
        tight.engine.scheduler.check()
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]


def test_a_regular_expression_matches_as_a_whole(llm):
    asked = [SamplingParams(regex="[a-c]{3}-(é|€)[0-9]{1,4}", seed=i, temperature=2, max_tokens=40) for i in range(8)]
    for each in llm.generate([PROMPT] * 8, asked):
        assert re.fullmatch("[a-c]{3}-(é|€)[0-9]{1,4}", each.text), each.text


def test_max_tokens_a_stop_string_and_a_bias_still_count(llm):
    (cut,) = llm.generate(PROMPT, SamplingParams(json_schema=SCHEMA, max_tokens=3))
    assert cut.finish_reason == "length" and len(cut.token_ids) == 3
    (stopped,) = llm.generate(PROMPT, SamplingParams(regex="aaaaXbbbb", stop="X", max_tokens=40))
    assert (stopped.text, stopped.stop_reason) == ("aaaa", "X")
    eight = {llm.tokenizer.id("8"): 100}
    (biased,) = llm.generate(PROMPT, SamplingParams(regex="[0-9]{5}", max_tokens=40, logit_bias=eight))
    assert biased.text == "88888"


def test_a_row_that_had_a_grammar_forgets_it(llm):
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, top_k=3)
    (before,) = llm.generate(PROMPT, params)
    llm.generate([PROMPT] * 24, constrained(24, max_tokens=4))
    assert {tuple(each.token_ids) for each in llm.generate([PROMPT] * 24, params)} == {tuple(before.token_ids)}
    assert not llm.engine.scheduler.matchers


def test_a_grammar_that_fails_ends_its_request_alone(llm, monkeypatch):
    good, bad = (llm.engine.prepare(PROMPT, each) for each in constrained(2))
    monkeypatch.setattr(bad.request.matcher, "advance", lambda tokens: "too complex")
    for each in (good, bad):
        llm.engine.submit(each)
    while llm.engine.has_work:
        llm.engine.step()
    assert (bad.completion.finish_reason, bad.completion.stop_reason) == ("abort", "too complex")
    assert good.completion.finish_reason == "stop" and follows(good.completion.text)


def test_the_vocabulary_of_grammars_is_made_before_an_engine_takes_requests(monkeypatch):
    made = []
    make_tokenizer = Grammars._make_tokenizer

    def slowly(self):
        time.sleep(1)
        made.append(self)
        return make_tokenizer(self)

    monkeypatch.setattr(Grammars, "_make_tokenizer", slowly)
    with make() as other:
        assert made == [other.engine.grammars]
        (done,) = other.generate(PROMPT, constrained(1)[0])
    assert follows(done.text) and len(made) == 1


def test_an_engine_without_the_grammar_library_starts_and_says_so_when_asked(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with make() as other:
        assert other.generate(PROMPT, SamplingParams(max_tokens=2))[0].finish_reason == "length"
        with pytest.raises(MissingPackage, match="llguidance"):
            other.generate(PROMPT, constrained(1)[0])
