"""Checks what an engine and its requests are given, before a model loads or a request is queued.  Lesson 01."""

import logging
from pathlib import Path
from typing import TypeVar

from minillm.errors import ConfigError, InvalidRequest
from minillm.model.config import sampling_defaults
from minillm.request import RequestOptions, SamplingParams
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
