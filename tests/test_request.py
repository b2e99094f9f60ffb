"""Request options and sampling parameters: checked on construction, and separate from each other."""

import json
import re

import numpy as np
import pytest
from pydantic import BaseModel

from minillm import LLM, RequestOptions, SamplingParams
from minillm.errors import InvalidRequest

pytestmark = pytest.mark.key


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_salt": 3}, "cache_salt must be a string"),
        ({"adapter": 3}, "adapter must be an adapter's name"),
        ({"cache_salt": "\ud800"}, "cache_salt must be a string without lone surrogates"),
        ({"use_prefix_cache": 1}, "use_prefix_cache must be True or False, not 1"),
        ({"priority": 2**31}, "priority must be a 32-bit whole number"),
    ],
)
def test_options_are_checked_on_construction(options, message):
    with pytest.raises(InvalidRequest, match=message):
        RequestOptions(**options)


def test_options_are_given_once_for_all_prompts_or_once_per_prompt():
    with LLM(device="cpu") as llm, pytest.raises(InvalidRequest, match="2 prompts, but 3 RequestOptions: give one"):
        llm.generate([[5], [6]], None, [RequestOptions()] * 3)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": 10**400}, "temperature must be a number in .*, not 1000"),
        ({"repetition_penalty": 10**5000}, "repetition_penalty must be a number in .*, not <int>"),
        ({"max_tokens": 10**400}, "max_tokens must be a whole number from 0 to 2147483647, not 1000"),
        ({"max_tokens": True}, "max_tokens must be a whole number from 0 to 2147483647, not True"),
        ({"seed": -1}, "seed=-1 is refused: seed=None gives other tokens"),
        ({"stop": 5}, "stop must be a string or a list of strings, not 5"),
        ({"stop": b"abc"}, "stop must be a string or a list of strings, not b'abc'"),
        ({"stop": {"END": 1}}, "stop must be a string or a list of strings, not {'END': 1}"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of token ids, not 5"),
        ({"stop_token_ids": "5"}, "stop_token_ids must be a list of token ids, not '5'"),
        ({"stop_token_ids": [1.0]}, r"stop_token_ids must be token ids \(from 0\), not 1.0"),
        ({"logit_bias": {"a": 1}}, "logit_bias maps token ids to numbers in .*, not 'a': 1"),
        ({"logit_bias": {1.5: 1}}, "logit_bias maps token ids to numbers in .*, not 1.5: 1"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias maps token ids to numbers in .*, not '999"),
        ({"logit_bias": {5: 10**400}}, "logit_bias maps token ids to numbers in .*, not 5: 1000"),
        ({"logit_bias": {5: 1, "5": 2}}, "logit_bias names token 5 twice"),
        ({"logit_bias": [(5, 1)]}, r"logit_bias maps token ids to numbers, as \{5: -100\}, not \[\(5, 1\)\]"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, not 'no'"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, not 1"),
    ],
)
def test_an_invalid_parameter_is_reported_with_its_name_and_value(params, message):
    with pytest.raises(InvalidRequest, match=message) as error:
        SamplingParams(**params)
    assert len(str(error.value)) < 300


def test_numpy_numbers_are_accepted():
    params = SamplingParams(
        max_tokens=np.int64(3),
        temperature=np.float32(0.5),
        seed=np.uint32(7),
        stop=np.array(["a", "b"]).tolist(),
        stop_token_ids=np.array([4, 5]),
        logprobs=np.int8(2),
        logit_bias={np.int32(6): np.float64(1.5)},
    )
    expected = SamplingParams(
        max_tokens=3, temperature=0.5, seed=7, stop=("a", "b"), stop_token_ids=(4, 5), logprobs=2, logit_bias={6: 1.5}
    )
    assert params == expected
    assert {type(params.max_tokens), type(params.seed), *map(type, params.stop_token_ids)} == {int}
    assert type(params.temperature) is float
    assert RequestOptions(priority=np.int16(3)) == RequestOptions(priority=3)


def test_logit_bias_accepts_string_keys_as_in_json():
    assert SamplingParams(logit_bias={"5": 1}).logit_bias == {5: 1.0}


@pytest.mark.parametrize("wrong", [0, -1, 129, 1.5, True, None, "2"])
def test_n_is_a_number_of_choices(wrong):
    with pytest.raises(InvalidRequest, match="n must be a whole number from 1 to 128"):
        SamplingParams(n=wrong)


def test_choices_of_a_seeded_prompt_have_seeds_of_their_own():
    assert [each.seed for each in SamplingParams(seed=7).choices(3)] == [7, 8, 9]
    assert [each.seed for each in SamplingParams(n=2).choices(3)] == [None] * 3


def test_a_schema_that_is_no_dictionary_says_how_to_make_one():
    class Isle(BaseModel):
        name: str

    schema = SamplingParams(json_schema=Isle.model_json_schema()).json_schema
    assert SamplingParams(json_schema=json.loads(json.dumps(schema))).json_schema == schema
    for wrong, hint in (
        (json.dumps(schema), "json.loads(...)"),
        (Isle, "Model.model_json_schema()"),
        (Isle(name="a"), "Model.model_json_schema()"),
        (5, "as {'type': 'object'}"),
    ):
        with pytest.raises(InvalidRequest, match=f"json_schema must be .*{re.escape(hint)}.*, not "):
            SamplingParams(json_schema=wrong)
