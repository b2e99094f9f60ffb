"""Validate requests in OpenAI's format, and convert them to `SamplingParams`.  Lesson 99.

Field names and meanings follow OpenAI's API reference (completions, chat completions). Fields that OpenAI lacks use
vLLM's names: top_k, min_p, repetition_penalty, min_tokens, ignore_eos, stop_token_ids, cache_salt, priority,
return_token_ids. use_prefix_cache and speculate are our own.
"""

import json
import re
from collections.abc import Container, Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, WithJsonSchema, field_validator, model_validator

from minillm.errors import InvalidRequest, MissingPackage
from minillm.from_vllm.http import FIELDS, RENDERING
from minillm.from_vllm.options import sampling_options
from minillm.request import RequestOptions, SamplingParams
from minillm.request_values import MAX_N
from minillm.tokenizer import TokenizerError
from minillm.values import shown

from ..lengths import TooLong, one_of
from ..limits import (
    MAX_ADAPTER_NAME,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_PROMPTS,
    MAX_SALT,
    MAX_STOP_LENGTH,
    MAX_STOP_TOKENS,
    MAX_STOPS,
)
from .api_error import APIError, check_members, check_names
from .link import Busy, EngineGone, NotNumbers, PastDeadline, ShuttingDown
from .messages import Message, checked_messages

RETRY_AFTER = 1  # seconds
NO_OBJECT = "the body must be a JSON object, sent as application/json"
_NO_PROMPT = "prompt must be a string, a list of token ids, or a non-empty list of those"


class SavedTensor(str):
    """A tensor that torch.save wrote, as base64."""


Prompt = str | list[int] | SavedTensor
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_SEVERAL = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS}
_PROMPT = {"anyOf": [{"type": "string"}, _IDS, _SEVERAL | {"items": {"type": "string"}}, _SEVERAL | {"items": _IDS}]}
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")

# Fields of OpenAI's and vLLM's APIs that this server lacks: the values that ask for nothing, which some clients always
# send, and what to do instead of any other.
UNSUPPORTED: dict[str, tuple[tuple, str]] = FIELDS | {"add_special_tokens": ((True,), "send token ids")}
TOOLS = "put the tools into a message, and use response_format for the answer"
UNSUPPORTED_IN_CHATS: dict[str, tuple[tuple, str]] = FIELDS | {
    "tools": (([],), TOOLS),
    "tool_choice": (("none", "auto"), TOOLS),
    "parallel_tool_calls": ((True, False), ""),
    "functions": (([],), ""),
    "function_call": (("none", "auto"), ""),
    "modalities": ((["text"],), ""),
    "audio": ((), ""),
    "prediction": ((), ""),
    "reasoning_effort": (("none",), ""),
    "verbosity": (("medium",), ""),
    "web_search_options": ((), ""),
    "service_tier": (("auto", "default", "flex", "priority", "scale"), ""),  # prices and queues of OpenAI's
    "store": ((False, True), ""),  # for OpenAI's own pages
    "prompt_cache_retention": (("in_memory", "in-memory", "24h"), ""),
    "echo": ((False,), "use /v1/completions"),
    "prompt_embeds": ((), "use /v1/completions"),
    "best_of": ((1,), "use n and pick the best choice yourself"),
    "add_special_tokens": ((False,), "a chat template writes them itself"),
}


# The members of `response_format.json_schema`. Output always follows the schema, whatever `strict` says.
SCHEMA_MEMBERS: dict[str, Any] = {
    "name": (str, type(None)),
    "schema": dict,
    "strict": (bool, type(None)),
    "description": (str, type(None)),
}


class StreamOptions(BaseModel):
    """OpenAI's stream options, and vLLM's `continuous_usage_stats`.

    include_usage           end the stream with the total usage
    continuous_usage_stats  report the usage so far in every chunk
    include_obfuscation     accepted but has no effect; OpenAI pads chunks so that their lengths do not reveal tokens
    """

    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


# The most items in each field's list or object, and what to call them.
SIZES = {
    "prompt_embeds": (MAX_PROMPTS, "prompts"),
    "stop": (MAX_STOPS, "strings"),
    "stop_token_ids": (MAX_STOP_TOKENS, "token ids"),
    "logit_bias": (MAX_BIASES, "token ids"),
    "messages": (MAX_MESSAGES, "messages"),
    "metadata": (MAX_METADATA, "pairs"),
}


class Body(BaseModel):
    """A request's body. Unknown fields are rejected, which catches typos."""

    model_config = ConfigDict(strict=True, extra="forbid")

    any_type: ClassVar[bool] = False  # whether the body is read whatever its content type
    takes_binary: ClassVar[bool] = False  # whether bytes may follow the JSON
    unsupported: ClassVar[Mapping[str, tuple[tuple, str]]] = {}

    model: str | None = None
    _binary: bytes = PrivateAttr(b"")
    _adapter: str | None = PrivateAttr(None)

    @property
    def binary(self) -> bytes:
        """Return the bytes that followed the JSON."""
        return self._binary

    @property
    def adapter(self) -> str | None:
        """Return the adapter that the client has named as its model; None: it has named none."""
        return self._adapter

    def serve_with(self, model: str, adapter: str | None) -> None:
        """Set the model that serves the request, and the adapter."""
        self.model, self._adapter = model, adapter

    @classmethod
    def known_fields(cls) -> Container[str]:
        return cls.model_fields.keys() | cls.unsupported.keys()

    @classmethod
    def check_supported(cls, name: str | None) -> None:
        """Raise APIError if this is a field of OpenAI's or vLLM's API that this server does not support."""
        if name is not None and name in cls.unsupported:
            nothing, instead = cls.unsupported[name]
            values = " or ".join(map(json.dumps, (None, *nothing)))
            message = f"{name} is not supported: {instead or f'leave it out or send {values}'}"
            raise APIError(message, param=name, code="unsupported_parameter")

    @model_validator(mode="before")
    @classmethod
    def _drop_fields_without_effect(cls, content: dict) -> dict:
        unsupported = [name for name in content if name in cls.unsupported]
        for name in unsupported:
            nothing = (None, *cls.unsupported[name][0])
            if not any(type(content[name]) is type(each) and content[name] == each for each in nothing):
                cls.check_supported(name)
        return {name: value for name, value in content.items() if name not in unsupported} if unsupported else content


class TokenizeRequest(Body):
    """POST /tokenize, as vLLM has it: a prompt, or a conversation, whose template writes special tokens itself."""

    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    add_special_tokens: bool | None = None  # default: True for a prompt
    return_token_strs: bool = False
    unsupported = {name: FIELDS[name] for name in RENDERING}

    @model_validator(mode="before")
    @classmethod
    def _check_messages(cls, content: dict) -> dict:
        if (content.get("prompt") is None) == (content.get("messages") is None):
            raise APIError("give a prompt or messages, and not both", param="prompt")
        return checked_messages(content)


class DetokenizeRequest(Body):
    """POST /detokenize."""

    tokens: Annotated[list[int], Field(fail_fast=True)]


class LoadAdapterRequest(Body):
    """POST /v1/load_lora_adapter, with vLLM's names. lora_path: within the server's folder of adapters."""

    lora_name: str = Field(min_length=1, max_length=MAX_ADAPTER_NAME)
    lora_path: str = Field(min_length=1, max_length=MAX_ADAPTER_NAME)


class UnloadAdapterRequest(Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: str = Field(min_length=1, max_length=MAX_ADAPTER_NAME)


class GenerationRequest(Body):
    """Fields of both endpoints. null means the default.

    pydantic collects every error in a request. Fields that can hold many items are therefore checked before pydantic
    sees them, and the check stops at the first error.
    """

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
    use_prefix_cache: bool | None = None  # false: neither reads nor fills the prefix cache
    logit_bias: dict[str, float] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    speculate: bool | None = None  # false: no tokens are drafted, if the server drafts any
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None  # checked by `_json_schema`

    unsupported = UNSUPPORTED
    scores_only: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _check_sizes(cls, content: dict) -> dict:
        for name, (most, things) in SIZES.items():
            value = content.get(name)
            if isinstance(value, (list, dict)) and len(value) > most:
                message = f"{name} has {len(value):,} {things}, but at most {most:,} are allowed: remove some"
                raise APIError(message, param=name)
        if isinstance(biases := content.get("logit_bias"), dict):
            for token, bias in biases.items():
                if type(bias) not in (int, float):
                    message = f"logit_bias must map token ids to numbers, but maps {shown(token)} to {shown(bias)}"
                    raise APIError(message, param="logit_bias")
        check_members("stream_options", content.get("stream_options"), StreamOptions)
        return content

    def sampling(self, **computed: Any) -> SamplingParams:
        """Return the sampling parameters of the n choices; with a seed, choice i uses seed + i."""
        self._check_strings()
        options = self._given(SamplingParams) | computed | {"json_schema": self._json_schema(), "n": None}
        options = {name: value for name, value in options.items() if value is not None}
        if options.get("max_tokens") == 0 and not self.scores_only:
            message = f"max_tokens must be a whole number from 1 to {2**31 - 1}, not 0"
            raise APIError(f"{message}, which only scores a prompt: add echo", param="max_tokens")
        for key in self.logit_bias or ():
            if not _TOKEN_ID.fullmatch(key):
                message = f"logit_bias must map token ids to numbers, but {key[:40]!a} is not a token id"
                raise APIError(message, param="logit_bias")
        try:
            return SamplingParams(**sampling_options(options))
        except InvalidRequest as error:
            raise as_api_error(InvalidRequest(self._in_its_words(str(error)))) from None

    def _in_its_words(self, message: str) -> str:
        """Return a message about sampling parameters, with the names that the client gave them."""
        return message

    def _json_schema(self) -> dict | None:
        """Return the schema that `response_format` asks for; None for plain text."""
        wanted = self.response_format or {"type": "text"}
        kind, named = wanted.get("type"), wanted.get("json_schema")
        if kind != "structural_tag":  # it has other members, and is refused below
            more = ("schema",) if kind == "json_object" else ()  # as llama.cpp's server has it
            check_names("response_format", wanted, ("type", "json_schema", *more))
        if kind in ("text", "json_object"):
            if named is not None:
                message = f'response_format has a json_schema, but type {kind!r}: set type to "json_schema"'
                raise APIError(message, param="response_format")
            schema = wanted.get("schema")
            if not (schema is None or isinstance(schema, dict)):
                message = f"response_format.schema must be a JSON schema, not {shown(schema)}"
                raise APIError(message, param="response_format")
            return None if kind == "text" else schema or {"type": "object"}
        if kind != "json_schema":
            message = f'response_format.type must be "text", "json_object" or "json_schema", not {shown(kind)}'
            raise APIError(message, param="response_format")
        if not isinstance(named, dict) or not isinstance(named.get("schema"), dict):
            message = 'response_format.json_schema must be {"schema": {...}}, and may have a name'
            raise APIError(message, param="response_format")
        check_names("response_format.json_schema", named, tuple(SCHEMA_MEMBERS))
        for name, kinds in SCHEMA_MEMBERS.items():
            if not isinstance(named.get(name), kinds):
                message = (
                    f"response_format.json_schema.{name} is missing or of the wrong type: {shown(named.get(name))}"
                )
                raise APIError(message, param="response_format")
        return named["schema"]

    def _check_strings(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if (longest := max(map(len, stop), default=0)) > MAX_STOP_LENGTH:
            message = f"stop has a string of {longest} characters, but the limit is {MAX_STOP_LENGTH}: shorten it"
            raise APIError(message, param="stop")

    def options(self) -> RequestOptions:
        """Return the options of all choices: their priority, how they share the prefix cache, and drafts."""
        if (length := len(self.cache_salt or "")) > MAX_SALT:
            message = f"cache_salt has {length:,} characters, but at most {MAX_SALT:,} are allowed: send a hash of it"
            raise APIError(message, param="cache_salt")
        try:
            return RequestOptions(**self._given(RequestOptions) | {"adapter": self.adapter})
        except InvalidRequest as error:
            raise as_api_error(error) from None

    def _given(self, kind: type) -> dict[str, Any]:
        """Return the fields set in the body that are also fields of the dataclass `kind`."""
        names = [field.name for field in fields(kind) if field.name in type(self).model_fields]
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def stream_usage(self) -> StreamOptions:
        """Return the stream options, which say what usage to report."""
        if self.stream_options is not None and not self.stream:
            raise APIError("stream_options needs stream: true", param="stream_options")
        return self.stream_options or StreamOptions()


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    model_config = ConfigDict(json_schema_extra={"required": ["prompt"]})  # pydantic adds it to that of the base

    # Checked below: pydantic's errors for unions of lists are unhelpful.
    prompt: Annotated[Any, WithJsonSchema(_PROMPT)] = None
    prompt_embeds: str | list[str] | None = (
        None  # each as base64 of what torch.save writes of a tensor [tokens, hidden]
    )
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, value: object) -> object:
        several = value if isinstance(value, list) and value and isinstance(value[0], (str, list)) else [value]
        if len(several) > MAX_PROMPTS:
            message = f"prompt has {len(several):,} prompts, but at most {MAX_PROMPTS:,} are allowed: split the request"
            raise APIError(message, param="prompt")
        for index, each in enumerate(several):
            if not (isinstance(each, str) or (_is_ids(each) and each)):
                reason = f"{one_of(len(several), index)} is neither a string nor a non-empty list of token ids"
                raise APIError(_NO_PROMPT if len(several) == 1 else reason, param="prompt")
        return value

    def prompts(self) -> list[Prompt]:
        """Return each prompt as a string, a list of token ids or a saved tensor. Those come first, as in vLLM."""
        value, embeds = self.prompt, self.prompt_embeds
        saved = [SavedTensor(each) for each in ([embeds] if isinstance(embeds, str) else embeds or [])]
        if value is None and not saved:
            raise APIError(_NO_PROMPT, param="prompt")
        if value is None or (saved and value == ""):  # OpenAI's client has to send a prompt
            value = []
        elif isinstance(value, str) or isinstance(value[0], int):
            value = [value]
        value = saved + value
        if saved and self.echo:
            raise APIError("echo shows a prompt's text, and prompt_embeds has none: leave it out", param="echo")
        if len(value) * (self.n or 1) > MAX_CHOICES:
            message = f"n={self.n} for {len(value)} prompts makes more than {MAX_CHOICES} choices: split the request"
            raise APIError(message, param="n")
        return value

    def params(self) -> SamplingParams:
        if self.best_of not in (None, 1, self.n):
            raise APIError("best_of is not supported: use n and pick the best choice yourself", param="best_of")
        if self.suffix:
            raise APIError("suffix is not supported: leave it out", param="suffix")
        return self.sampling(logprobs=self.logprobs, prompt_logprobs=self.logprobs if self.echo else None)

    @property
    def scores_only(self) -> bool:  # type: ignore[override]  # a constant of the other requests
        """With `echo`, `max_tokens: 0` requests the log-probabilities of the prompt and no new tokens."""
        return bool(self.echo) and self.max_tokens == 0


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = None
    unsupported = UNSUPPORTED_IN_CHATS
    metadata: dict[str, str] | None = None  # these three, like `user`, are accepted but have no effect
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_messages(cls, content: dict) -> dict:
        return checked_messages(content)

    @model_validator(mode="before")
    @classmethod
    def _drop_tools_that_may_not_be_called(cls, content: dict) -> dict:
        """Runs before the check for fields that are not supported, which is the base's."""
        if content.get("tool_choice") == "none" and isinstance(content.get("tools"), list):
            return {name: value for name, value in content.items() if name != "tools"}
        return content

    def params(self, tokens_left: int) -> SamplingParams:
        """tokens_left: most tokens to generate if the request sets no limit."""
        if self.top_logprobs is not None and not self.logprobs:
            raise APIError("top_logprobs needs logprobs: true", param="top_logprobs")
        most = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        most = max(tokens_left, 1) if most is None else most
        return self.sampling(max_tokens=most, logprobs=(self.top_logprobs or 0) if self.logprobs else None)

    def _in_its_words(self, message: str) -> str:
        message = re.sub(r"\blogprobs\b", "top_logprobs", message)
        return message if self.max_completion_tokens is None else message.replace("max_tokens", "max_completion_tokens")


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}


def as_api_error(error: Exception) -> APIError:
    """Convert any exception to an APIError. An InvalidRequest's message begins with the name of the field, if any."""
    if isinstance(error, APIError):
        return error
    message = str(error)
    if isinstance(error, Busy):
        headers = {"retry-after": str(error.retry_after)}
        return APIError(message, status=429, kind="rate_limit_error", code="server_busy", headers=headers)
    if isinstance(error, ShuttingDown):
        headers = {"retry-after": str(RETRY_AFTER), "connection": "close"}
        return APIError(message, status=503, kind="server_error", code="shutting_down", headers=headers)
    if isinstance(error, MissingPackage):
        return APIError(
            f"this server cannot do that yet: {message}", status=501, kind="server_error", code="not_installed"
        )
    if isinstance(error, NotNumbers):
        return APIError(message, status=500, kind="server_error", code="logits_not_numbers")
    if isinstance(error, PastDeadline):
        return APIError(message, status=504, kind="server_error", code=error.code)
    if isinstance(error, EngineGone):
        headers = {"retry-after": str(error.retry_after)}
        return APIError(message, status=503, kind="server_error", code="engine_restarting", headers=headers)
    if isinstance(error, (InvalidRequest, TokenizerError)):
        word = message.split(" ", 1)[0].replace("json_schema", "response_format")
        known = CompletionRequest.model_fields.keys() | ChatRequest.model_fields.keys()
        code = "context_length_exceeded" if isinstance(error, TooLong) else None
        return APIError(message, param=word if word in known else None, code=code)
    return APIError(f"the engine failed: {message}", status=500, kind="server_error", code="engine_error")
