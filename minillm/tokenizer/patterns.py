"""Patterns as `tokenizer.json` writes them, and the error that every part of the tokenizer raises.  Lesson 01."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import regex

from minillm.errors import MinillmError

Spec = dict[str, Any]  # a JSON object of tokenizer.json
Built = TypeVar("Built")


class TokenizerError(MinillmError, ValueError):
    """A tokenizer file or an input that cannot work; the message names it and the way out."""


def compile_pattern(spec: Spec | str) -> regex.Pattern[str]:
    r"""Compile `{"Regex": ...}`, `{"String": ...}` or a plain string (a regex).

    Files are written for Oniguruma, the engine in the `tokenizers` library. The `regex` package reads the same
    syntax (`\p{L}`, possessive quantifiers, nested sets). Both follow Unicode's tables, of different years: they may
    disagree on characters that were added in between, and `\w` on superscript digits.
    """
    if isinstance(spec, dict) and spec.keys() == {"String"}:
        return regex.compile(regex.escape(spec["String"]))
    text = spec["Regex"] if isinstance(spec, dict) and spec.keys() == {"Regex"} else spec
    if not isinstance(text, str):
        raise TokenizerError(f'a pattern is {{"String": ...}} or {{"Regex": ...}}, not {spec!r}')
    try:
        return regex.compile(text, regex.V1)
    except regex.error as error:
        raise TokenizerError(f"the pattern {text!r} does not compile: {error}") from error


def replacer(spec: Spec) -> Callable[[str], str]:
    """The function that puts `spec["content"]`, as it is, in place of what `spec["pattern"]` finds."""
    pattern, content = compile_pattern(spec["pattern"]), spec["content"]
    plain = spec["pattern"].get("String")
    if plain is not None:
        return lambda text: text.replace(plain, content)
    return lambda text: pattern.sub(lambda _: content, text)


def component(kind: str, spec: Spec, builders: Mapping[str, Callable[[Spec], Built]]) -> Built:
    """Build the part that `spec["type"]` names, or say which name is unknown and which ones are not."""
    name = spec.get("type")
    if not isinstance(name, str) or name not in builders:
        known = ", ".join(sorted(builders))
        raise TokenizerError(f"tokenizer.json has the {kind} {name!r}, which is not supported; these are: {known}")
    return builders[name](spec)
