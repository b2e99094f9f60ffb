"""OpenAI's requests and errors: what a client may send, checked, turned into `SamplingParams`.  Lesson 99.

Field names and meanings follow OpenAI's API reference (completions, chat completions); the fields it lacks
(top_k, min_p, repetition_penalty, min_tokens, ignore_eos, stop_token_ids, cache_salt, priority, return_token_ids) carry
vLLM's names.
"""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from minillm.errors import InvalidRequest
from minillm.request import SamplingParams
from minillm.tokenizer import TokenizerError

from .link import Busy, TooLong

MAX_PROMPTS = 2048
MAX_N = 128
MAX_CHOICES = 2048  # of one request, n of each prompt
MAX_MESSAGES = 2048
MAX_PARTS = 2048  # of one message
MAX_STOPS = 16  # stop strings: each is looked for in the text of each new token
MAX_STOP_LENGTH = 256  # characters
MAX_STOP_TOKENS = 64  # the engine's table of them is as wide as the longest list
RETRY_AFTER = 1  # seconds
NO_OBJECT = "the body must be a JSON object, sent as application/json"
Prompt = str | list[int]
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")

# What OpenAI's API has and this one lacks, and the values with which a client asks for nothing: frameworks send those.
UNSUPPORTED: dict[str, tuple] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
}


class APIError(Exception):
    """An answer in OpenAI's error form, with its HTTP status."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, headers
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False


class GenerationRequest(BaseModel):
    """What both endpoints share. null means the default; unknown fields are refused: no typo goes unseen."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    n: int | None = Field(None, ge=1, le=MAX_N)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    use_prefix_cache: bool | None = None  # false: neither finds what others left nor leaves anything
    logit_bias: dict[str, float] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    return_token_ids: bool | None = None

    def sampling(self, **computed) -> list[SamplingParams]:
        """One SamplingParams for each of the n choices. With a seed, choice i samples with seed + i."""
        self._check_stop()
        given = {name: getattr(self, name) for name in _SAMPLING} | computed
        given = {name: value for name, value in given.items() if value is not None}
        for key in self.logit_bias or ():
            if not _TOKEN_ID.fullmatch(key):
                message = f"logit_bias maps token ids to numbers; {key[:40]!a} is no token id"
                raise APIError(message, param="logit_bias")
        seeds = [{} if self.seed is None else {"seed": self.seed + i} for i in range(self.n or 1)]
        try:
            return [SamplingParams(**(given | seed)) for seed in seeds]
        except InvalidRequest as error:
            raise as_api_error(error) from None

    def _check_stop(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > MAX_STOPS:
            message = f"stop lists {len(stop)} strings; at most {MAX_STOPS} are looked for: leave some out"
            raise APIError(message, param="stop")
        if (longest := max(map(len, stop), default=0)) > MAX_STOP_LENGTH:
            message = f"stop has a string of {longest} characters; at most {MAX_STOP_LENGTH} fit: its beginning will do"
            raise APIError(message, param="stop")
        if (count := len(self.stop_token_ids or ())) > MAX_STOP_TOKENS:
            message = f"stop_token_ids lists {count} tokens; at most {MAX_STOP_TOKENS} are looked for: leave some out"
            raise APIError(message, param="stop_token_ids")

    @property
    def include_usage(self) -> bool:
        if self.stream_options is not None and not self.stream:
            raise APIError("stream_options needs stream: true", param="stream_options")
        return self.stream_options is not None and self.stream_options.include_usage


_SAMPLING = [name for name in GenerationRequest.model_fields if name in SamplingParams.__dataclass_fields__]


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Any = None  # checked in prompts(): pydantic's messages about unions of lists are of no help
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None

    def prompts(self) -> list[Prompt]:
        """Strings and lists of token ids, one for each prompt."""
        value = self.prompt
        if isinstance(value, str) or (_is_ids(value) and value):
            return [value]
        if isinstance(value, list) and value and all(isinstance(p, str) or (_is_ids(p) and p) for p in value):
            if len(value) > MAX_PROMPTS:
                raise APIError(f"prompt lists {len(value)} prompts; at most {MAX_PROMPTS} fit", param="prompt")
            if len(value) * (self.n or 1) > MAX_CHOICES:
                message = f"n of {self.n} for {len(value)} prompts makes more than {MAX_CHOICES} choices: ask in parts"
                raise APIError(message, param="n")
            return value
        raise APIError("prompt must be a string, a list of token ids, or a non-empty list of those", param="prompt")

    def params(self) -> list[SamplingParams]:
        if self.best_of not in (None, 1, self.n):
            raise APIError("best_of is not supported: use n, and choose among the choices", param="best_of")
        if self.suffix:
            raise APIError("suffix is not supported by these models: leave it out", param="suffix")
        wanted = {"logprobs": self.logprobs, "prompt_logprobs": self.logprobs if self.echo else None}
        if self.scores_only:
            wanted["max_tokens"] = 1
        return self.sampling(**wanted)

    @property
    def scores_only(self) -> bool:
        """`max_tokens: 0` with `echo` asks for the prompt's log-probabilities and no new token."""
        return bool(self.echo) and self.max_tokens == 0


class ContentPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a conversation. Of what OpenAI's clients send back of an answer, only what is empty is taken."""

    model_config = ConfigDict(strict=True, extra="forbid")
    role: str
    content: str | Annotated[list[ContentPart], Field(min_length=1, max_length=MAX_PARTS)]
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[None], Field(max_length=0)] | None = None
    tool_calls: Annotated[list[None], Field(max_length=0)] | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates read it."""
        parts = self.content
        content = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": self.role, "content": content} | ({} if self.name is None else {"name": self.name})


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None  # these three are marks for accounts and caches, as `user` is
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_what_asks_for_nothing(cls, body: object) -> object:
        if not isinstance(body, dict):
            return body
        for name in UNSUPPORTED.keys() & body.keys():
            nothing = (None, *UNSUPPORTED[name])
            if not any(type(body[name]) is type(each) and body[name] == each for each in nothing):
                values = " or ".join(map(json.dumps, nothing))
                message = f"{name} is not supported: leave it out, or send {values}"
                raise APIError(message, param=name, code="unsupported_parameter")
        return {name: value for name, value in body.items() if name not in UNSUPPORTED}

    def turns(self) -> list[dict[str, str]]:
        """The conversation, as chat templates read it."""
        if all(message.role in ("system", "developer") for message in self.messages):
            raise APIError("messages ask nothing: add one from the user after the system's", param="messages")
        return [message.plain() for message in self.messages]

    def params(self, room: int) -> list[SamplingParams]:
        """`room`: tokens that may come if not said."""
        if self.top_logprobs is not None and not self.logprobs:
            raise APIError("top_logprobs needs logprobs: true", param="top_logprobs")
        most = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        most = max(room, 1) if most is None else most
        return self.sampling(max_tokens=most, logprobs=(self.top_logprobs or 0) if self.logprobs else None)


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}


def as_api_error(error: Exception) -> APIError:
    """Whatever went wrong, in OpenAI's form. A refusal's message begins with the name of the field at fault."""
    if isinstance(error, APIError):
        return error
    message = str(error)
    if isinstance(error, Busy):
        headers = {"retry-after": str(RETRY_AFTER)}
        return APIError(message, status=429, kind="rate_limit_error", code="server_busy", headers=headers)
    if isinstance(error, (InvalidRequest, TokenizerError)):
        word = message.split(" ", 1)[0]
        known = CompletionRequest.model_fields.keys() | ChatRequest.model_fields.keys()
        code = "context_length_exceeded" if isinstance(error, TooLong) else None
        return APIError(message, param=word if word in known else None, code=code)
    return APIError(f"the engine failed: {message}", status=500, kind="server_error", code="engine_error")


def malformed(errors: list[dict]) -> APIError:
    """pydantic's list of what is wrong, told as one sentence about the first."""
    first = next((error for error in errors if error["type"] == "extra_forbidden"), errors[0])
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return APIError(f"{where} is not a field of this request", param=where.split(".")[0], code="unknown_parameter")
    if first["type"] == "string_unicode" and not where:
        return APIError("the body has a field whose name is no text: it holds half a pair of surrogates")
    if not where:
        return APIError(NO_OBJECT)
    return APIError(f"{where}: {first['msg']}", param=where.split(".")[0])
