"""What an engine is given, before it loads a model: its tokenizer, and advice that it does not follow.  Lesson 01."""

import logging
from pathlib import Path

from minillm.errors import ConfigError
from minillm.model.config import sampling_defaults
from minillm.tokenizer import Tokenizer
from minillm.values import shown

TOKENIZER_MEMBERS = ("encode", "decode", "vocab_size", "new_decoder", "visible_tokens")

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
