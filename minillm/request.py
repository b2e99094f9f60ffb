"""A request's parameters and its result.  Lesson 00."""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minillm.errors import InvalidRequest
from minillm.grammar import MAX_GRAMMAR, Matcher
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
Prompt = str | Sequence[int] | np.ndarray  # text, or token ids
TokenLogprobs = dict[int, float]  # token id -> log-probability, in nats


def _schema(given: object) -> str:
    """Return what to give as json_schema instead of what is none."""
    if isinstance(given, str):
        return "a dictionary: json.loads(...) makes one of a text"
    if hasattr(given, "model_json_schema"):  # pydantic's
        return "a dictionary: Model.model_json_schema() gives a class's"
    return "a JSON schema, as {'type': 'object'}"


def _refusal(what: str, value: object) -> InvalidRequest:
    return InvalidRequest(f"{what}, not {shown(value)}")


# Why a request ends whose logits give no probabilities; its `stop_reason`.
NOT_NUMBERS = (
    "the model's logits are not numbers (NaN or infinity), so no token can be chosen: its weights are damaged, or what "
    "it computes is too large for its dtype; if that is float16, use bfloat16 or float32"
)


@dataclass(frozen=True)
class RequestOptions:
    """How a request is queued and which cached prefixes it may share; checked once, here.  Lessons 09 and 10.

    cache_salt        cached prefixes are shared only between requests with the same salt: use one for each tenant
    use_prefix_cache  False: neither use cached prefixes nor leave any for others
    priority          lower goes first, if the engine's policy is "priority"
    speculate         False: draft no tokens for it, if the engine does; they change its speed, never its tokens
    """

    cache_salt: str = ""
    use_prefix_cache: bool = True
    priority: int = 0
    speculate: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.cache_salt, str) or SURROGATE.search(self.cache_salt):
            raise _refusal("cache_salt must be a string without lone surrogates", self.cache_salt)
        for name in ("use_prefix_cache", "speculate"):
            if not isinstance(value := getattr(self, name), bool):
                raise _refusal(f"{name} must be True or False", value)
        priority = as_int(self.priority)
        if priority is None or abs(priority) >= 2**31:
            raise _refusal("priority must be a 32-bit whole number (lower goes first)", self.priority)
        object.__setattr__(self, "priority", priority)

    @property
    def cache_key(self) -> str:
        """What must be equal, apart from tokens, for keys and values to be equal: a prefix's whole identity.

        Anything else that changes them (an adapter, say) must be part of this key.
        """
        return self.cache_salt


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when to stop; checked once, here.  Lesson 02.

    The steps run in this order: logit_bias, penalties, min_tokens, the grammar of json_schema or regex, temperature,
    min_p, top_k, top_p.

    max_tokens          most tokens to generate; None: as many as a request may have; 0: none, so that a prompt to be
                        scored (prompt_logprobs) may fill the whole context
    min_tokens          generate at least this many tokens; until then, stop tokens are not sampled, and stop strings
                        are ignored
    temperature         0 takes the most likely token; 1 samples the model's own distribution
    top_k               keep the k most likely tokens (0 or -1: all)
    top_p               keep the most likely tokens whose probabilities sum to p (Holtzman et al. 2020, section 3.1)
    min_p               keep tokens at least this share as likely as the most likely one (Nguyen et al. 2024)
    repetition_penalty  divides positive logits of tokens seen in prompt or output (Keskar et al. 2019, section 4.1)
    presence_penalty    subtracted once from tokens already generated, in [-2, 2]
    frequency_penalty   subtracted once for each time a token was generated, in [-2, 2]
    seed                same seed, same tokens, whatever else runs in the batch
    stop                strings that end the text (they are not part of it)
    stop_token_ids      ids that end the output, in addition to the model's end tokens
    ignore_eos          do not stop at the model's end tokens
    logprobs            report this many most likely tokens with each generated one
    prompt_logprobs     the same for each token of the prompt
    logit_bias          {token id: added to its logit}, in [-100, 100]
    json_schema         the output is a JSON text that follows this schema; {"type": "object"} takes any object. A text
                        that reaches max_tokens first is cut short (finish_reason "length")
    regex               the output matches this regular expression as a whole
    n                   choices of each prompt, for `LLM.generate` and `LLM.chat`: see `Completion.outputs`

    A request with json_schema or regex ends when its text is complete. It waits for each token before the next is
    computed, so with run_ahead it takes part in only some of the steps.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    json_schema: Mapping[str, Any] | None = None
    regex: str | None = None
    n: int = 1
    # ("json_schema" or "regex", its text), if either is given
    grammar: tuple[str, str] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_stops()
        self._check_bias()
        self._check_grammar()

    def _check_numbers(self) -> None:
        for name, (low, high, hint) in RANGES.items():
            number = as_float(value := getattr(self, name))
            if number is None or not low <= number <= high:
                raise _refusal(f"{name} must be a number in [{low}, {high:g}] ({hint})", value)
            object.__setattr__(self, name, number)
        if self.top_p == 0:
            raise InvalidRequest("top_p must be above 0 (1 keeps every token); use temperature=0 for greedy")
        for name, (low, end, words) in WHOLE.items():
            value = getattr(self, name)
            if value is None and name in MAY_BE_NONE:
                continue
            whole = as_int(value)
            if whole is None or not low <= whole < end:
                raise _refusal(f"{name} must be {words}", value)
            object.__setattr__(self, name, whole)
        if self.seed == -1:  # some programs mean no seed by it: it would give them the same tokens every time
            raise InvalidRequest("seed=-1 is refused: seed=None gives other tokens every time, other seeds the same")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens}): raise max_tokens"
            )
        if not isinstance(self.ignore_eos, (bool, np.bool_)):
            raise _refusal("ignore_eos must be True or False", self.ignore_eos)
        object.__setattr__(self, "ignore_eos", bool(self.ignore_eos))

    def _check_stops(self) -> None:
        strings = (self.stop,) if isinstance(self.stop, str) else as_tuple(self.stop)
        if strings is None:
            raise _refusal("stop must be a string or a list of strings", self.stop)
        for text in strings:
            if not isinstance(text, str) or not text:
                raise _refusal("stop strings must be non-empty strings", text)
        given = as_tuple(self.stop_token_ids)
        if given is None:
            raise _refusal("stop_token_ids must be a list of token ids", self.stop_token_ids)
        ids = []
        for value in given:
            token = as_int(value)
            if token is None or token < 0:
                raise _refusal("stop_token_ids must be token ids (from 0)", value)
            ids.append(token)
        object.__setattr__(self, "stop", strings)
        object.__setattr__(self, "stop_token_ids", tuple(ids))

    def _check_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise _refusal("logit_bias maps token ids to numbers, as {5: -100}", self.logit_bias)
        bias: dict[int, float] = {}
        for key, value in self.logit_bias.items():
            token = int(key) if isinstance(key, str) and _TOKEN_ID.fullmatch(key) else as_int(key)
            number = as_float(value)
            if token is None or token < 0 or number is None or not -100 <= number <= 100:
                raise InvalidRequest(
                    f"logit_bias maps token ids to numbers in [-100, 100], not {shown(key)}: {shown(value)}"
                )
            if token in bias:
                raise InvalidRequest(f"logit_bias names token {token} twice, as a number and as a string")
            bias[token] = number
        object.__setattr__(self, "logit_bias", bias)

    def _check_grammar(self) -> None:
        if self.json_schema is None and self.regex is None:
            return
        name = "regex" if self.json_schema is None else "json_schema"
        if self.json_schema is not None and self.regex is not None:
            raise InvalidRequest("regex and json_schema exclude each other: give one of them")
        if self.ignore_eos or self.min_tokens:
            other = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise InvalidRequest(f"{other} cannot be combined with {name}, which decides where the text ends")
        if name == "regex":
            text = self.regex
            if not isinstance(text, str) or not text or SURROGATE.search(text):
                raise _refusal("regex must be a non-empty string without lone surrogates", text)
        else:
            try:
                if not isinstance(self.json_schema, Mapping):
                    raise TypeError
                text = json.dumps(self.json_schema, allow_nan=False)
                object.__setattr__(self, "json_schema", json.loads(text))  # the caller may change the original
            except (TypeError, ValueError, RecursionError):
                raise _refusal(f"json_schema must be {_schema(self.json_schema)}", self.json_schema) from None
        if len(text) > MAX_GRAMMAR:
            raise InvalidRequest(f"{name} has {len(text):,} characters, but at most {MAX_GRAMMAR:,} are allowed")
        object.__setattr__(self, "grammar", (name, text))

    def choices(self, n: int) -> "list[SamplingParams]":
        """For each of n choices of a prompt; with a seed, choice i samples with seed + i. Raises InvalidRequest."""
        if self.seed is None and self.n == 1:
            return [self] * n
        if self.seed is not None and self.seed + n - 1 >= 2**63:
            raise InvalidRequest(f"seed must be a 64-bit whole number, and seed + {n - 1} is not")
        made = [copy.copy(self) for _ in range(n)]  # what was checked once need not be again, nor held twice
        for i, each in enumerate(made):
            object.__setattr__(each, "seed", None if self.seed is None else self.seed + i)
            object.__setattr__(each, "n", 1)
        return made

    @property
    def adjusts_logits(self) -> bool:
        """Whether logits are adjusted before a token is sampled from them."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.min_tokens > 0
            or bool(self.logit_bias)
            or self.grammar is not None
        )


@dataclass
class Completion:
    """One request's result.  Times are `time.perf_counter()` seconds."""

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None  # "stop", "length" or "abort"
    stop_reason: int | str | None = None  # the stop token id or string that ended it, or why it was aborted
    logprobs: list[TokenLogprobs] | None = None  # one dict a generated token
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # None for the first token
    text_offsets: list[int] | None = None  # with logprobs: where in `text` each generated token's text begins
    arrival_time: float = 0.0
    scheduled_time: float | None = None  # when the engine first gave it a row
    num_cached_tokens: int = 0  # of its prompt, found in the prefix cache then
    first_token_time: float | None = None
    finish_time: float | None = None
    prompt: str | None = None  # set by `LLM.generate` if it was text, and by `LLM.chat`: what the template made
    index: int = 0  # its number among the choices of its prompt
    others: list["Completion"] = field(default_factory=list, repr=False)  # the first of n has the other choices

    @property
    def outputs(self) -> list["Completion"]:
        """The n choices of its prompt, of which it is the first."""
        return [self, *self.others]

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of its tokens' log-probabilities, in nats; None if they were not asked for."""
        if self.logprobs is None:
            return None
        return sum(each[token] for token, each in zip(self.token_ids, self.logprobs, strict=True))

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


@dataclass
class Delta:
    """What a streaming request has generated since the previous delta."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    completion: Completion | None = None  # with the last delta: the whole result
    text_offsets: list[int] | None = None  # with logprobs: where each token's text begins in the whole text


@dataclass(eq=False)
class Request:
    """A request inside the engine. `known` is its prompt and confirmed output whenever it is in no row."""

    request_id: str
    prompt: np.ndarray  # [tokens] int32
    params: SamplingParams
    limit: int  # most tokens, prompt and output
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    options: RequestOptions = RequestOptions()
    matcher: Matcher | None = None  # which tokens may come next; after the confirmed ones
    known: np.ndarray = field(init=False)  # [tokens] int32
    arrival: int = -1
    rank: tuple[float, int] = (0.0, 0)  # in the queue: the policy's key, then arrival
    row: int = -1
    keys: list[bytes] = field(default_factory=list)  # prefix keys of its first full blocks
    registered: int = 0  # blocks that others may find
    borrowed: bool = False  # whether it began with blocks from the prefix cache
    alone: bool = False  # neither uses the prefix cache nor fills it
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def __post_init__(self) -> None:
        self.known = self.prompt
        if not self.generates:  # the end of the prompt yields a token, which ends the request whatever it is
            self.limit, self.stop_ids = len(self.prompt) + 1, ()

    @property
    def generates(self) -> bool:
        """Whether it has output. Without, the token after its prompt is dropped, and takes no room in the context."""
        return self.params.max_tokens != 0

    @property
    def output(self) -> np.ndarray:
        """Its output, [tokens] int32, while it is in no row."""
        return self.known[len(self.prompt) :] if self.generates else self.known[:0]
