"""Added tokens, which are matched in a text before anything else: <bos>, <start_of_turn>, ...  Lesson 01."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import regex

from .normalizers import Normalizer

_WORD = r"[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}]"  # \w by Unicode's annex on regular expressions
_ENDS_IN_WORD = regex.compile(_WORD + r"\Z")
_STARTS_WITH_WORD = regex.compile(_WORD)
_SPACE = regex.compile(r"\p{White_Space}*")


@dataclass(frozen=True)
class AddedToken:
    """One entry of `added_tokens`.  Lesson 01.

    single_word     matched only if no letter, digit or "_" is next to it
    lstrip, rstrip  the match includes white space before it, after it
    normalized      matched in normalized text, with its own content normalized
    special         omitted by decode(skip_special_tokens=True)
    """

    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = False


class AddedTokens:
    """Splits raw text into added tokens and the normalized text between them.  Lesson 01."""

    def __init__(self, tokens: Iterable[AddedToken], normalize: Normalizer) -> None:
        # Of two tokens with the same content, the special one wins.
        tokens = sorted(tokens, key=lambda token: not token.special)
        self._normalize = normalize
        self._in_raw = _Finder((token.content, token) for token in tokens if not token.normalized)
        self._in_normalized = _Finder((normalize(token.content), token) for token in tokens if token.normalized)

    def split(self, text: str) -> Iterator[tuple[str | int, bool]]:
        """Yield ids of added tokens and texts between them, each with whether it starts `text`."""
        for raw, raw_start in self._in_raw.split(text):
            if isinstance(raw, int):
                yield raw, False
                continue
            for piece, start in self._in_normalized.split(self._normalize(raw)):
                yield piece, raw_start == 0 and start == 0


class _Finder:
    """Finds the leftmost token in a text, and the longest of those that start at the same place."""

    def __init__(self, contents: Iterable[tuple[str, AddedToken]]) -> None:
        self.tokens: dict[str, AddedToken] = {}
        for content, token in contents:
            if content:
                self.tokens.setdefault(content, token)
        lengths: defaultdict[str, set[int]] = defaultdict(set)
        for content in self.tokens:
            lengths[content[0]].add(len(content))
        # Look up only these lengths, and only at a token's first character: some files list thousands of added
        # tokens, and trying each of them everywhere would take longer than the rest of the encoding.
        self.lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}
        self.first = regex.compile("[" + "".join(map(regex.escape, lengths)) + "]") if lengths else None

    def _matches(self, text: str) -> Iterator[tuple[int, int, AddedToken]]:
        position = 0
        while self.first and (candidate := self.first.search(text, position)):
            start = position = candidate.start()
            for length in self.lengths[text[start]]:
                token = self.tokens.get(text[start : start + length])
                if token:
                    position = start + length
                    yield start, position, token
                    break
            else:
                position += 1

    def split(self, text: str) -> Iterator[tuple[str | int, int]]:
        """Yield ids and the non-empty texts between them, each with its start."""
        done = 0
        for start, stop, token in self._matches(text):
            if token.single_word and (
                _STARTS_WITH_WORD.match(text, stop) or (start and _ENDS_IN_WORD.match(text[start - 1]))
            ):
                continue
            if token.lstrip:
                while start > done and _SPACE.fullmatch(text[start - 1]):
                    start -= 1
                start = max(start, done)
            if token.rstrip and (space := _SPACE.match(text, stop)):
                stop = space.end()
            if start >= stop:  # white space that belongs to the previous token
                continue
            if start > done:
                yield text[done:start], done
            yield token.id, start
            done = stop
        if done < len(text):
            yield text[done:], done
