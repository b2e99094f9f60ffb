"""Patterns and components of `tokenizer.json`, and the tokenizer's error.  Lesson 01."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import regex

from minillm.errors import MinillmError

Spec = dict[str, Any]  # a JSON object of tokenizer.json
Built = TypeVar("Built")


class TokenizerError(MinillmError, ValueError):
    """A tokenizer file or an input is wrong; the message names it and the way out."""


def compile_pattern(spec: Spec | str) -> regex.Pattern[str]:
    r"""Compile `{"Regex": ...}`, `{"String": ...}` or a plain string (a regex).

    Files are written for Oniguruma, the engine in the `tokenizers` library. The `regex` package reads the same
    syntax (`\p{L}`, possessive quantifiers, nested sets). Their Unicode tables are of different years, so they may
    differ on characters added in between, and for `\w` on superscript digits. Raises TokenizerError.
    """
    if isinstance(spec, dict) and spec.keys() == {"String"}:
        return regex.compile(regex.escape(spec["String"]))
    text = spec["Regex"] if isinstance(spec, dict) and spec.keys() == {"Regex"} else spec
    if not isinstance(text, str):
        raise TokenizerError(f'a pattern must be {{"String": ...}} or {{"Regex": ...}}, not {spec!r}')
    try:
        return regex.compile(text, regex.V1)
    except regex.error as error:
        raise TokenizerError(f"the pattern {text!r} does not compile: {error}") from error


def replacer(spec: Spec) -> Callable[[str], str]:
    """Return a function that replaces matches of `spec["pattern"]` by the literal text `spec["content"]`."""
    pattern, content = compile_pattern(spec["pattern"]), spec["content"]
    plain = spec["pattern"].get("String")
    if plain is not None:
        return lambda text: text.replace(plain, content)
    return lambda text: pattern.sub(lambda _: content, text)


def component(kind: str, spec: Spec, builders: Mapping[str, Callable[[Spec], Built]]) -> Built:
    """Build the component that `spec["type"]` names. Raises TokenizerError, with the known names, for another."""
    name = spec.get("type")
    if not isinstance(name, str) or name not in builders:
        known = ", ".join(sorted(builders))
        raise TokenizerError(f"tokenizer.json has the {kind} {name!r}, which is not supported; these are: {known}")
    return builders[name](spec)
