"""Pre-tokenizers: split normalized text into pieces that no token crosses.  Lesson 01.

A pre-tokenizer is a function (text, at_start) -> pieces; at_start: whether the text is the start of the whole input.
"""

from collections.abc import Callable
from itertools import groupby

import regex

from .patterns import Spec, TokenizerError, compile_pattern, component

PreTokenizer = Callable[[str, bool], list[str]]

# Contractions, words, numbers, the rest, white space: GPT-2's pattern (Radford et al. 2019, section 2.2 and its code).
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _byte_characters() -> dict[int, str]:
    """Return a visible character for each byte: its Latin-1 character if printable, else the next one from U+0100
    on.
    """
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printed]
    return {byte: chr(byte) for byte in printed} | {byte: chr(256 + n) for n, byte in enumerate(others)}


BYTE_CHARACTERS = _byte_characters()


def to_byte_characters(text: str) -> str:
    """Return the UTF-8 bytes of `text`, each as its character in GPT-2's alphabet: " é" becomes "ĠÃ©".  Lesson 01."""
    return text.encode().decode("latin-1").translate(BYTE_CHARACTERS)


def split_text(text: str, pattern: regex.Pattern[str], behavior: str = "Isolated", invert: bool = False) -> list[str]:
    """Split `text` at the matches of `pattern`; no piece is empty.  Lesson 01.

    behavior  what a match becomes: "Isolated" (a piece), "Removed", "MergedWithPrevious" or "MergedWithNext" (part of
              the adjacent piece, unless that is a match too), "Contiguous" (adjacent matches form one piece)
    invert    treat the text between matches as the matches, and vice versa
    """
    spans, end = [], 0
    for match in pattern.finditer(text):
        start, stop = match.span()
        if start > end:
            spans.append((text[end:start], invert))
        if stop > start:
            spans.append((text[start:stop], not invert))
        end = stop
    if end < len(text):
        spans.append((text[end:], invert))
    return _BEHAVIORS[behavior](spans)


def _merge_with_previous(spans: list[tuple[str, bool]]) -> list[str]:
    pieces: list[str] = []
    previous = True
    for text, is_match in spans:
        if is_match and not previous:
            pieces[-1] += text
        else:
            pieces.append(text)
        previous = is_match
    return pieces


def _merge_with_next(spans: list[tuple[str, bool]]) -> list[str]:
    # The mirror image: from the end to the start, a match joins the piece that was just made.
    pieces: list[str] = []
    following = True
    for text, is_match in reversed(spans):
        if is_match and not following:
            pieces[-1] = text + pieces[-1]
        else:
            pieces.append(text)
        following = is_match
    return pieces[::-1]


_BEHAVIORS: dict[str, Callable[[list[tuple[str, bool]]], list[str]]] = {
    "Isolated": lambda spans: [text for text, _ in spans],
    "Removed": lambda spans: [text for text, is_match in spans if not is_match],
    "Contiguous": lambda spans: [
        "".join(text for text, _ in run) for _, run in groupby(spans, key=lambda span: span[1])
    ],
    "MergedWithPrevious": _merge_with_previous,
    "MergedWithNext": _merge_with_next,
}


def build_pre_tokenizer(spec: Spec | None) -> PreTokenizer:
    """Return the pre-tokenizer of a `tokenizer.json`; None: no split. Raises TokenizerError for an unknown one.  Lesson
    01.
    """
    return component("pre-tokenizer", spec, _BUILDERS) if spec else lambda text, at_start: [text]


def _sequence(spec: Spec) -> PreTokenizer:
    steps = [build_pre_tokenizer(step) for step in spec["pretokenizers"]]

    def pre_tokenize(text: str, at_start: bool) -> list[str]:
        pieces = [text]
        for step in steps:
            pieces = [out for n, piece in enumerate(pieces) for out in step(piece, at_start and n == 0)]
        return pieces

    return pre_tokenize


def _split(spec: Spec) -> PreTokenizer:
    pattern, behavior, invert = compile_pattern(spec["pattern"]), spec["behavior"], spec.get("invert", False)
    if behavior not in _BEHAVIORS:
        raise TokenizerError(f"the behavior of a Split must be one of {', '.join(_BEHAVIORS)}, not {behavior!r}")
    return lambda text, at_start: split_text(text, pattern, behavior, invert)


def _digits(spec: Spec) -> PreTokenizer:
    pattern = regex.compile(r"\p{N}" if spec["individual_digits"] else r"\p{N}+")
    return lambda text, at_start: split_text(text, pattern)


def _byte_level(spec: Spec) -> PreTokenizer:
    pattern = regex.compile(GPT2_PATTERN)

    def pre_tokenize(text: str, at_start: bool) -> list[str]:
        if spec["add_prefix_space"] and not text.startswith(" "):
            text = " " + text
        pieces = split_text(text, pattern) if spec.get("use_regex", True) else [text]
        return [to_byte_characters(piece) for piece in pieces]

    return pre_tokenize


def _metaspace(spec: Spec) -> PreTokenizer:
    mark, scheme = spec["replacement"], prepend_scheme(spec)
    pattern = regex.compile(regex.escape(mark))

    def pre_tokenize(text: str, at_start: bool) -> list[str]:
        text = text.replace(" ", mark)
        if not text.startswith(mark) and (scheme == "always" or (scheme == "first" and at_start)):
            text = mark + text
        return split_text(text, pattern, "MergedWithNext") if spec.get("split", True) else [text]

    return pre_tokenize


def prepend_scheme(spec: Spec) -> str:
    """Return when a Metaspace adds its mark before a text: "always", "first" or "never". Older files have a boolean."""
    return spec.get("prepend_scheme") or ("always" if spec.get("add_prefix_space", True) else "never")


_BUILDERS: dict[str, Callable[[Spec], PreTokenizer]] = {
    "Sequence": _sequence,
    "Split": _split,
    "Digits": _digits,
    "ByteLevel": _byte_level,
    "Metaspace": _metaspace,
}
