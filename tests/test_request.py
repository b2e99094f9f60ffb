"""What a request may ask for: options of the queue and the cache apart from those of sampling."""

import pytest

from minillm import LLM, RequestOptions, SamplingParams
from minillm.errors import InvalidRequest


@pytest.mark.parametrize("name, value", [("cache_salt", "a"), ("use_prefix_cache", False), ("priority", 3)])
def test_options_that_were_sampling_parameters_still_count_with_a_warning(name, value):
    with pytest.warns(DeprecationWarning, match=f"{name}: give RequestOptions instead"):
        params = SamplingParams(max_tokens=2, **{name: value})
    assert params.options == RequestOptions(**{name: value}) and params == SamplingParams(max_tokens=2)
    with LLM(device="cpu") as llm:
        assert llm.engine.prepare([5], params).request.options == params.options
        assert llm.engine.prepare([5], params, RequestOptions()).request.options == RequestOptions()
        assert llm.engine.prepare([5]).request.options == RequestOptions()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_salt": 3}, "cache_salt must be a string"),
        ({"cache_salt": "\ud800"}, "cache_salt must be a string without lone surrogates"),
        ({"use_prefix_cache": 1}, "use_prefix_cache must be True or False, not 1"),
        ({"priority": 2**31}, "priority must be a 32-bit whole number"),
    ],
)
def test_options_are_checked_when_they_are_made(options, message):
    with pytest.raises(InvalidRequest, match=message):
        RequestOptions(**options)


def test_options_are_one_for_all_or_one_each():
    with LLM(device="cpu") as llm, pytest.raises(InvalidRequest, match="2 prompts, but 3 RequestOptions: give one"):
        llm.generate([[5], [6]], None, [RequestOptions()] * 3)
