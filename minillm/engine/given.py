"""Checks what an engine and its requests are given, before a model loads or a request is queued.  Lesson 01."""

import logging
from pathlib import Path
from typing import TypeVar

import numpy as np

from minillm.errors import ConfigError, InvalidRequest
from minillm.model.config import sampling_defaults
from minillm.request import Prompt, RequestOptions, SamplingParams
from minillm.tokenizer import Tokenizer
from minillm.values import shown

TOKENIZER_MEMBERS = ("encode", "decode", "vocab_size", "new_decoder", "visible_tokens")

Kind = TypeVar("Kind", SamplingParams, RequestOptions)

log = logging.getLogger(__name__)


def check_tokenizer_given(given: str | Path | Tokenizer | None) -> None:
    """Raise ConfigError for what is neither a directory nor a tokenizer like ours."""
    if given is None or isinstance(given, (str, Path)):
        return
    if lacks := [name for name in TOKENIZER_MEMBERS if not hasattr(given, name)]:
        raise ConfigError(
            f"tokenizer must be a directory or an object like minillm.Tokenizer; {shown(given)} has no "
            f"{', '.join(lacks)}: give the directory with its tokenizer.json"
        )


def say_sampling_defaults(place: Path | str) -> None:
    """Log what the model's authors advise for sampling. Requests that say nothing get `SamplingParams`' defaults."""
    if isinstance(place, Path) and (advised := sampling_defaults(place)):
        values = ", ".join(f"{name}={value}" for name, value in advised.items())
        log.warning(
            "%s advises %s, which no request gets unless it asks for it: give it as SamplingParams, or as fields of "
            "the HTTP request",
            place / "generation_config.json",
            values,
        )


def of_kind(given: Kind | None, kind: type[Kind], name: str) -> Kind:
    """What was given, or the defaults. Raises InvalidRequest for an object of another kind."""
    if given is None:
        return kind()
    if not isinstance(given, kind):
        raise InvalidRequest(f"{name} must be {kind.__name__}(...), not {shown(given)}")
    return given


def token_ids(prompt: Prompt, tokenizer: Tokenizer | None, vocab: int) -> np.ndarray:
    """A prompt's token ids [tokens] int32. vocab: number of ids. Raises InvalidRequest."""
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
    if ids.min() < 0 or ids.max() >= vocab:
        bad = int(ids[(ids < 0) | (ids >= vocab)][0])
        raise InvalidRequest(f"token id {bad} is outside the vocabulary: ids go from 0 to {vocab - 1}")
    return ids.astype(np.int32)
