"""Check how long prompts are.  Lesson 99."""

from minillm.errors import InvalidRequest

CHARACTERS_PER_TOKEN = 128  # the longest tokens in use are runs of 128 spaces; most text has about four


class TooLong(InvalidRequest):
    """A prompt that leaves no room for output."""


def check_length(tokens: int, limit: int, name: str = "prompt", least: int = 1) -> None:
    """Reject a prompt unless it and `least` tokens of output have at most `limit` tokens together. Raises TooLong."""
    if tokens + least > limit:
        reason = f"has {tokens} tokens, but prompt and output together have at most {limit}"
        raise TooLong(f"{name} {reason}{', at least one for output' if least else ''}: shorten it")


def one_of(count: int, index: int) -> str:
    """Return a prompt's name in messages: with its index if a request has several."""
    return "prompt" if count == 1 else f"prompt {index}"


def readable(characters: int, limit: int, name: str = "prompt") -> None:
    """Reject a text that cannot fit, before it is tokenized. Raises TooLong."""
    most = limit * CHARACTERS_PER_TOKEN
    if characters > most:
        limits = f"at most {most:,} are accepted, {CHARACTERS_PER_TOKEN} for each of the {limit:,} tokens"
        raise TooLong(f"{name} has {characters:,} characters, but {limits} of prompt and output together: shorten it")
