"""The values that a request's options and sampling parameters may have."""

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from minillm.errors import InvalidRequest
from minillm.grammar import MAX_GRAMMAR
from minillm.values import as_float, as_int, as_tuple, shown

MAX_LOGPROBS = 20
MAX_N = 128
# name -> least and most allowed, and the value that changes nothing
RANGES = {
    "temperature": (0, 1e4, "0 for greedy, 1 for the model's own distribution"),
    "top_p": (0, 1, "1 keeps every token"),
    "min_p": (0, 1, "0 keeps every token"),
    "repetition_penalty": (1e-3, 1e4, "1 changes nothing"),
    "presence_penalty": (-2, 2, "0 changes nothing"),
    "frequency_penalty": (-2, 2, "0 changes nothing"),
}
# name -> least allowed, the first that is too much, and both in words
WHOLE = {
    "max_tokens": (0, 2**31, f"a whole number from 0 to {2**31 - 1}"),
    "min_tokens": (0, 2**31, f"a whole number from 0 to {2**31 - 1}"),
    "top_k": (-1, 2**31, f"a whole number from -1 to {2**31 - 1}"),
    "logprobs": (0, MAX_LOGPROBS + 1, f"a whole number from 0 to {MAX_LOGPROBS}"),
    "prompt_logprobs": (0, MAX_LOGPROBS + 1, f"a whole number from 0 to {MAX_LOGPROBS}"),
    "seed": (-(2**63), 2**63, "a 64-bit whole number"),
    "n": (1, MAX_N + 1, f"a whole number from 1 to {MAX_N}"),
}
MAY_BE_NONE = ("max_tokens", "logprobs", "prompt_logprobs", "seed")
SURROGATE = re.compile("[\ud800-\udfff]")  # in no text that can be encoded, and so in none that can be hashed
_TOKEN_ID = re.compile("[0-9]{1,10}")  # JSON has no other keys than strings


def check_sampling(params: Any) -> None:
    """Check a `SamplingParams`, and put each value into its own type: numbers of numpy become Python's, and so on.

    Raises InvalidRequest, which names the parameter and what it may be.
    """
    _check_numbers(params)
    _check_stops(params)
    _check_bias(params)
    _check_grammar(params)


def check_options(options: Any) -> None:
    """Check a `RequestOptions`, as `check_sampling` does."""
    if not isinstance(options.cache_salt, str) or SURROGATE.search(options.cache_salt):
        raise _refusal("cache_salt must be a string without lone surrogates", options.cache_salt)
    for name in ("use_prefix_cache", "speculate"):
        if not isinstance(value := getattr(options, name), bool):
            raise _refusal(f"{name} must be True or False", value)
    if options.adapter is not None and not isinstance(options.adapter, str):
        raise _refusal("adapter must be an adapter's name, or None for the model as it is", options.adapter)
    priority = as_int(options.priority)
    if priority is None or abs(priority) >= 2**31:
        raise _refusal("priority must be a 32-bit whole number (lower goes first)", options.priority)
    object.__setattr__(options, "priority", priority)


def _check_numbers(params: Any) -> None:
    for name, (low, high, hint) in RANGES.items():
        number = as_float(value := getattr(params, name))
        if number is None or not low <= number <= high:
            raise _refusal(f"{name} must be a number in [{low}, {high:g}] ({hint})", value)
        object.__setattr__(params, name, number)
    if params.top_p == 0:
        raise InvalidRequest("top_p must be above 0 (1 keeps every token); use temperature=0 for greedy")
    for name, (low, end, words) in WHOLE.items():
        value = getattr(params, name)
        if value is None and name in MAY_BE_NONE:
            continue
        whole = as_int(value)
        if whole is None or not low <= whole < end:
            raise _refusal(f"{name} must be {words}", value)
        object.__setattr__(params, name, whole)
    if params.seed == -1:  # some programs mean no seed by it: it would give them the same tokens every time
        raise InvalidRequest("seed=-1 is refused: seed=None gives other tokens every time, other seeds the same")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequest(
            f"min_tokens ({params.min_tokens}) is above max_tokens ({params.max_tokens}): raise max_tokens"
        )
    if not isinstance(params.ignore_eos, (bool, np.bool_)):
        raise _refusal("ignore_eos must be True or False", params.ignore_eos)
    object.__setattr__(params, "ignore_eos", bool(params.ignore_eos))


def _check_stops(params: Any) -> None:
    strings = (params.stop,) if isinstance(params.stop, str) else as_tuple(params.stop)
    if strings is None:
        raise _refusal("stop must be a string or a list of strings", params.stop)
    for text in strings:
        if not isinstance(text, str) or not text:
            raise _refusal("stop strings must be non-empty strings", text)
    stops = as_tuple(params.stop_token_ids)
    if stops is None:
        raise _refusal("stop_token_ids must be a list of token ids", params.stop_token_ids)
    ids = []
    for value in stops:
        token = as_int(value)
        if token is None or token < 0:
            raise _refusal("stop_token_ids must be token ids (from 0)", value)
        ids.append(token)
    object.__setattr__(params, "stop", strings)
    object.__setattr__(params, "stop_token_ids", tuple(ids))


def _check_bias(params: Any) -> None:
    if params.logit_bias is None:
        return
    if not isinstance(params.logit_bias, Mapping):
        raise _refusal("logit_bias maps token ids to numbers, as {5: -100}", params.logit_bias)
    bias: dict[int, float] = {}
    for key, value in params.logit_bias.items():
        token = int(key) if isinstance(key, str) and _TOKEN_ID.fullmatch(key) else as_int(key)
        number = as_float(value)
        if token is None or token < 0 or number is None or not -100 <= number <= 100:
            raise InvalidRequest(
                f"logit_bias maps token ids to numbers in [-100, 100], not {shown(key)}: {shown(value)}"
            )
        if token in bias:
            raise InvalidRequest(f"logit_bias names token {token} twice, as a number and as a string")
        bias[token] = number
    object.__setattr__(params, "logit_bias", bias)


def _check_grammar(params: Any) -> None:
    if params.json_schema is None and params.regex is None:
        return
    name = "regex" if params.json_schema is None else "json_schema"
    if params.json_schema is not None and params.regex is not None:
        raise InvalidRequest("regex and json_schema exclude each other: give one of them")
    if params.ignore_eos or params.min_tokens:
        other = "ignore_eos" if params.ignore_eos else "min_tokens"
        raise InvalidRequest(f"{other} cannot be combined with {name}, which decides where the text ends")
    if name == "regex":
        text = params.regex
        if not isinstance(text, str) or not text or SURROGATE.search(text):
            raise _refusal("regex must be a non-empty string without lone surrogates", text)
    else:
        try:
            if not isinstance(params.json_schema, Mapping):
                raise TypeError
            text = json.dumps(params.json_schema, allow_nan=False)
            object.__setattr__(params, "json_schema", json.loads(text))  # the caller may change the original
        except (TypeError, ValueError, RecursionError):
            raise _refusal(f"json_schema must be {_schema(params.json_schema)}", params.json_schema) from None
    if len(text) > MAX_GRAMMAR:
        raise InvalidRequest(f"{name} has {len(text):,} characters, but at most {MAX_GRAMMAR:,} are allowed")
    object.__setattr__(params, "grammar", (name, text))


def _schema(value: object) -> str:
    """Return what to give as json_schema instead of what is none."""
    if isinstance(value, str):
        return "a dictionary: json.loads(...) makes one of a text"
    if hasattr(value, "model_json_schema"):  # pydantic's
        return "a dictionary: Model.model_json_schema() gives a class's"
    return "a JSON schema, as {'type': 'object'}"


def _refusal(what: str, value: object) -> InvalidRequest:
    return InvalidRequest(f"{what}, not {shown(value)}")
