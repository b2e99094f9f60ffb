"""The normalizers of `tokenizer.json`: functions that rewrite a text before it is split.  Lesson 01."""

import unicodedata
from collections.abc import Callable
from functools import partial

import regex

from .patterns import Spec, component, replacer
from .pre_tokenizers import to_byte_characters

Normalizer = Callable[[str], str]


def build_normalizer(spec: Spec | None) -> Normalizer:
    """Return the normalizer of a `tokenizer.json`; None: no change. Raises TokenizerError for an unknown one.  Lesson
    01.
    """
    return component("normalizer", spec, _BUILDERS) if spec else lambda text: text


def _sequence(spec: Spec) -> Normalizer:
    steps = [build_normalizer(step) for step in spec["normalizers"]]

    def normalize(text: str) -> str:
        for step in steps:
            text = step(text)
        return text

    return normalize


def _prepend(spec: Spec) -> Normalizer:
    return lambda text: spec["prepend"] + text if text else text


def _strip(spec: Spec) -> Normalizer:
    left = r"\A\p{White_Space}+" if spec["strip_left"] else "(?!)"
    right = r"(?<!\p{White_Space})\p{White_Space}+\Z" if spec["strip_right"] else "(?!)"
    space = regex.compile(f"{left}|{right}")
    return lambda text: space.sub("", text)


def _lowercase(spec: Spec) -> Normalizer:
    # Character by character: str.lower of a whole word would map a final sigma to another letter.
    return lambda text: "".join(character.lower() for character in text)


_BUILDERS: dict[str, Callable[[Spec], Normalizer]] = {
    "Sequence": _sequence,
    "Replace": replacer,
    "Prepend": _prepend,
    "Strip": _strip,
    "Lowercase": _lowercase,
    "StripAccents": lambda spec: lambda text: regex.sub(r"\p{M}", "", text),
    "ByteLevel": lambda spec: to_byte_characters,
    **{form: lambda spec: partial(unicodedata.normalize, spec["type"]) for form in ("NFC", "NFD", "NFKC", "NFKD")},
}
