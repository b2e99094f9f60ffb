"""A request's parameters and its result.  Lesson 00."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minillm.errors import InvalidRequest
from minillm.grammar import Matcher
from minillm.prompts import EmbeddedPrompt, Embeddings
from minillm.request_values import check_options, check_sampling

# Text, or token ids, or {"prompt_embeds": tensor}, or {"parts": [...]} of these: see `LLM.generate`.
Prompt = str | Sequence[int] | np.ndarray | Mapping[str, Any] | EmbeddedPrompt
TokenLogprobs = dict[int, float]  # token id -> log-probability, in nats
# Why a request ends whose logits give no probabilities; its `stop_reason`.
NOT_NUMBERS = (
    "the model's logits are not numbers (NaN or infinity), so no token can be chosen: its weights are damaged, or what "
    "it computes is too large for its dtype; if that is float16, use bfloat16 or float32"
)


@dataclass(frozen=True)
class RequestOptions:
    """Options for queueing a request and for sharing cached prefixes; checked once, here.  Lessons 09 and 10.

    cache_salt        cached prefixes are shared only between requests with the same salt: use one for each tenant
    use_prefix_cache  False: neither use cached prefixes nor leave any for others
    priority          lower goes first, if the engine's policy is "priority"
    speculate         False: draft no tokens for it, if the engine does; they change its speed, never its tokens
    adapter           the name of an adapter that the engine has loaded; None: the model as it is
    """

    cache_salt: str = ""
    use_prefix_cache: bool = True
    priority: int = 0
    speculate: bool = True
    adapter: str | None = None

    def __post_init__(self) -> None:
        check_options(self)

    def cache_key(self, load: int = 0) -> tuple[str | int, ...]:
        """Return a prefix's identity: what must be equal, besides the tokens, to share keys and values.  Lesson 15.

        load: the number of the load that brought the adapter (`Request.load`). Its name would not do, because another
        adapter may be loaded with the same name later. Anything else that changes keys and values must be part of this
        key, which the router over replicas uses too. Embeddings are hashed with their blocks (`prefix_keys`).
        """
        return self.cache_salt, load


def prefix_identity(options: RequestOptions, load: int, dtype: str) -> tuple[str | int, ...]:
    """Return all that identifies a cached prefix besides its content. dtype: of the cache, which decides its values."""
    return *options.cache_key(load), dtype


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Says how the next token is chosen and when to stop; checked once, here.  Lesson 02.

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
        check_sampling(self)

    def choices(self, n: int) -> "list[SamplingParams]":
        """Return parameters of each of n choices: with a seed, choice i has seed + i. Raises InvalidRequest."""
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
        """Return whether logits are adjusted before a token is sampled from them."""
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
    prompt_token_ids: list[int]  # -1 where the prompt has an embedding
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
        """Return the n choices of its prompt, of which it is the first."""
        return [self, *self.others]

    @property
    def cumulative_logprob(self) -> float | None:
        """Return the sum of its tokens' log-probabilities, in nats; None if they were not asked for."""
        if self.logprobs is None:
            return None
        return sum(each[token] for token, each in zip(self.token_ids, self.logprobs, strict=True))

    @property
    def finished(self) -> bool:
        """Return whether it has ended."""
        return self.finish_reason is not None


@dataclass
class Delta:
    """The tokens and text that a streaming request has gained since the previous delta."""

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
    prompt: np.ndarray  # [tokens] int32; -1 (`EMBEDDED`) where it has an embedding
    params: SamplingParams
    limit: int  # most tokens, prompt and output
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    options: RequestOptions = RequestOptions()
    matcher: Matcher | None = None  # which tokens may come next; after the confirmed ones
    load: int = 0  # the number of the load that brought its adapter; 0: it has none
    cache_dtype: str = ""  # of the cache that its keys and values will be in
    embeddings: Embeddings | None = None  # of its prompt, if it has any
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
    def cache_key(self) -> tuple[str | int, ...]:
        """Return what its cached prefixes must have in common with another request's, besides their tokens."""
        return prefix_identity(self.options, self.load, self.cache_dtype)

    @property
    def generates(self) -> bool:
        """Return whether it has output. Without, the token after its prompt is dropped, and takes up no context."""
        return self.params.max_tokens != 0

    @property
    def output(self) -> np.ndarray:
        """Return its output, [tokens] int32, while it is in no row."""
        return self.known[len(self.prompt) :] if self.generates else self.known[:0]
