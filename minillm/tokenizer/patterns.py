"""Patterns as `tokenizer.json` writes them, compiled; the error every part of the tokenizer raises.  Lesson 01."""

import regex


class TokenizerError(ValueError):
    """A tokenizer file or an input that cannot work; the message names it and the way out."""


def compile_pattern(spec: dict | str) -> regex.Pattern:
    r"""Compile `{"Regex": ...}`, `{"String": ...}` or a plain string (a regex).

    Files are written for Oniguruma, the engine in the `tokenizers` library. The `regex` package reads the same syntax
    (`\p{L}`, possessive quantifiers, nested sets); the two differ only in their Unicode version, that is, on characters
    that one of them does not know yet.
    """
    if isinstance(spec, dict) and spec.keys() == {"String"}:
        return regex.compile(regex.escape(spec["String"], special_only=True))
    text = spec["Regex"] if isinstance(spec, dict) and spec.keys() == {"Regex"} else spec
    if not isinstance(text, str):
        raise TokenizerError(f'a pattern is {{"String": ...}} or {{"Regex": ...}}, not {spec!r}')
    try:
        return regex.compile(text, regex.V1)
    except regex.error as error:
        raise TokenizerError(f"the pattern {text!r} does not compile: {error}") from error
