"""Check what users give an engine, and bring it into one form: prompts, conversations, parameters.  Lesson 01."""

import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from minillm.errors import ConfigError, InvalidRequest, naming
from minillm.grammar import Grammars
from minillm.model.config import ModelConfig, sampling_defaults
from minillm.prompts import EmbeddedPrompt, Embeddings
from minillm.prompts.tensors import is_embeddings, read_tensor
from minillm.request import Prompt, RequestOptions, SamplingParams
from minillm.tokenizer import Tokenizer
from minillm.values import as_int, as_tuple, shown

TOKENIZER_MEMBERS = ("encode", "decode", "vocab_size", "new_decoder", "visible_tokens")
MESSAGE = '{"role": ..., "content": ...}'

Kind = TypeVar("Kind", SamplingParams, RequestOptions)

log = logging.getLogger(__name__)


# ---- of an engine, before its model loads


def check_is_tokenizer(tokenizer: str | Path | Tokenizer | None) -> None:
    """Raise ConfigError unless `tokenizer` is a directory, None, or an object with a tokenizer's members."""
    if tokenizer is None or isinstance(tokenizer, (str, Path)):
        return
    if lacks := [name for name in TOKENIZER_MEMBERS if not hasattr(tokenizer, name)]:
        raise ConfigError(
            f"tokenizer must be a directory or an object like minillm.Tokenizer; {shown(tokenizer)} has no "
            f"{', '.join(lacks)}: give the directory with its tokenizer.json"
        )


def log_sampling_defaults(source: Path | str) -> None:
    """Log the sampling that a model's authors advise. Requests that name none get `SamplingParams`' defaults."""
    if isinstance(source, Path) and (advised := sampling_defaults(source)):
        values = ", ".join(f"{name}={value}" for name, value in advised.items())
        log.warning(
            "%s advises %s, which no request gets unless it asks for it: give it as SamplingParams, or as fields of "
            "the HTTP request",
            source / "generation_config.json",
            values,
        )


# ---- of one request


def token_ids(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int) -> np.ndarray:
    """Return a prompt's token ids, [tokens] int32. Raises InvalidRequest."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequest("this model has no tokenizer files: give the prompt as a list of token ids")
        prompt = tokenizer.encode(prompt)
    try:
        ids = np.asarray(prompt)
    except (TypeError, ValueError, OverflowError):
        ids = np.array(0.5)
    buffer = isinstance(prompt, (bytes, bytearray, memoryview))  # numpy would read its bytes as token ids
    if buffer or ids.ndim != 1 or (ids.dtype.kind not in "iu" and len(ids)):
        raise InvalidRequest(f"a prompt must be a string or a list of token ids (whole numbers), not {shown(prompt)}")
    if len(ids) == 0:
        raise InvalidRequest("the prompt is empty: give at least one token (a beginning-of-text token will do)")
    if ids.min() < 0 or ids.max() >= vocab_size:
        bad = int(ids[(ids < 0) | (ids >= vocab_size)][0])
        raise InvalidRequest(f"token id {bad} is outside the vocabulary: ids go from 0 to {vocab_size - 1}")
    return ids.astype(np.int32)


def read_prompt(
    prompt: Prompt, tokenizer: Tokenizer | None, config: ModelConfig, dtype: str, most: int
) -> np.ndarray | EmbeddedPrompt:
    """Return a prompt's token ids, [tokens] int32, or those and embeddings joined. Raises InvalidRequest.

    dtype: of the model's activations. most: tokens that a prompt may have.
    """
    if isinstance(prompt, EmbeddedPrompt):
        return prompt
    if not isinstance(prompt, Mapping):
        return token_ids(prompt, tokenizer, config.vocab_size)
    given = {name: value for name, value in prompt.items() if value is not None}
    if list(given) not in (["prompt_embeds"], ["parts"]):
        forms = 'a dictionary with "prompt_embeds" or "parts"'
        raise InvalidRequest(f"a prompt must be a string or a list of token ids, or {forms}, not {shown(prompt)}")
    if "prompt_embeds" in given:
        return EmbeddedPrompt.of([read_tensor(given["prompt_embeds"], config.hidden_size, dtype, most)])
    parts = as_tuple(given["parts"])
    if not parts:
        raise InvalidRequest(f'"parts" must be a list of texts, token ids and tensors, not {shown(given["parts"])}')
    read = []
    for i, part in enumerate(parts):
        with naming("part", i, len(parts)):
            if is_embeddings(part):
                read.append(read_tensor(part, config.hidden_size, dtype, most))
            elif isinstance(part, str) and i and tokenizer is not None:  # only the first has a beginning-of-text token
                read.append(np.array(tokenizer.encode(part, add_special_tokens=False), np.int32))
            else:
                read.append(token_ids(part, tokenizer, config.vocab_size))
    return EmbeddedPrompt.of(read) if any(part.ndim == 2 for part in read) else np.concatenate(read)


def split(prompt: np.ndarray | EmbeddedPrompt, params: SamplingParams) -> tuple[np.ndarray, Embeddings | None]:
    """Return a prompt's ids and its embeddings, None if it has none. Raises InvalidRequest for what needs tokens."""
    if not isinstance(prompt, EmbeddedPrompt):
        return prompt, None
    if params.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs scores tokens, and this prompt has embeddings: leave it out")
    return prompt.ids, prompt.embeddings


def of_kind(value: Kind | None, kind: type[Kind], name: str) -> Kind:
    """Return `value`, or the defaults for None. Raises InvalidRequest for an object of another kind."""
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise InvalidRequest(f"{name} must be {kind.__name__}(...), not {shown(value)}")
    return value


def check_params(params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int, grammars: Grammars) -> None:
    """Check what depends on the model. Raises InvalidRequest."""
    for name in ("stop_token_ids", "logit_bias"):
        for token in getattr(params, name) or ():
            if token >= vocab_size:
                raise InvalidRequest(f"{name} names token {token}, but the vocabulary ends at {vocab_size - 1}")
    if params.stop and tokenizer is None:
        raise InvalidRequest("stop strings need a tokenizer, and this model has none; use stop_token_ids")
    if params.grammar is not None:
        grammars.matcher(*params.grammar)  # compiled once: a request's own matcher is a copy


# ---- of several requests


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list. Raises InvalidRequest for what is neither text nor a list."""
    if isinstance(prompts, (str, Mapping, EmbeddedPrompt)):
        return [prompts]
    if hasattr(prompts, "columns"):  # iterating over a table gives the names of its columns
        raise InvalidRequest(f"prompts must be one column of a table, as table['prompt'], not {type(prompts).__name__}")
    several = None if prompts is None or isinstance(prompts, Set) else as_tuple(prompts)  # a set has no order
    if several is None:
        raise InvalidRequest(f"prompts must be a string, a list of token ids, or a list of those, not {shown(prompts)}")
    if several and (isinstance(several[0], int) or as_int(several[0]) is not None):
        return [several]
    return list(several)


def one_for_each(values: Kind | Sequence[Kind] | None, kind: type[Kind], count: int) -> Sequence[Kind | None]:
    """Return one value for each of `count` prompts. values: one for all, or one for each. Raises InvalidRequest."""
    if values is None or isinstance(values, kind):
        return [values] * count
    several = as_tuple(values)
    if several is None:
        raise InvalidRequest(f"{kind.__name__}(...) or a list of them was expected, not {shown(values)}")
    if len(several) != count:
        raise InvalidRequest(f"{count} prompts, but {len(several)} {kind.__name__}: give one, or one each")
    return several


def with_adapters(
    options: Sequence[RequestOptions | None], names: str | None | Sequence[str | None]
) -> Sequence[RequestOptions | None]:
    """Return each request's options with its adapter. names: one for all; or one for each, None for those without.

    None leaves the adapters of all options as they are. Raises InvalidRequest.
    """
    if names is None:
        return options
    several = (names,) * len(options) if isinstance(names, str) else as_tuple(names)
    if several is None or len(several) != len(options):
        raise InvalidRequest(
            f"adapter must be a name, or a list with a name or None for each of {len(options)} prompts, not "
            f"{shown(names)}"
        )
    return [replace(each or RequestOptions(), adapter=name) for each, name in zip(options, several, strict=True)]


# ---- of a conversation


def as_conversations(messages: Sequence) -> tuple[Sequence[Mapping[str, str]], ...]:
    """Return one conversation or several as a tuple. Raises InvalidRequest."""
    conversations = as_tuple(messages)
    if not conversations:
        raise InvalidRequest(f"messages must be a list of {MESSAGE}, not {shown(messages)}")
    return (conversations,) if isinstance(conversations[0], Mapping) else conversations


def chat_prompt(tokenizer: Tokenizer | None, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Return a conversation's token ids, which end where the model's turn begins. Raises InvalidRequest."""
    return rendered_chat(tokenizer, messages)[1]


def rendered_chat(tokenizer: Tokenizer | None, messages: Sequence[Mapping[str, str]]) -> tuple[str, list[int]]:
    """Return a conversation as its template renders it, special tokens included, and its token ids.

    Raises InvalidRequest.
    """
    if tokenizer is None:
        raise InvalidRequest("chat needs a tokenizer with a chat template, and this model has no tokenizer files")
    conversation = as_tuple(messages)
    if not conversation:
        raise InvalidRequest(f"a conversation must be a list of {MESSAGE}, not {shown(messages)}")
    for i, message in enumerate(conversation):
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"messages[{i}] must be {MESSAGE}, not {shown(message)}")
    rendered = tokenizer.apply_chat_template([_as_text(message, i) for i, message in enumerate(conversation)])
    return rendered, tokenizer.encode(rendered, add_special_tokens=False)


def _as_text(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return a message with its content as text, also if it comes in parts as OpenAI has them.

    Raises InvalidRequest, which names the message's index.
    """
    message = dict(message)
    parts = message.get("content")
    if isinstance(parts, (list, tuple)) and parts:
        texts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts
        ]
        if None not in texts:
            message["content"] = "\n".join(map(str, texts))
    for name in ("role", "content"):
        if not isinstance(message.get(name), str):
            ways = "a string" if name == "role" else 'a string or a list of {"type": "text", "text": ...}'
            raise InvalidRequest(f"messages[{index}] must have {name!r} as {ways}, not {shown(message.get(name))}")
    return message
