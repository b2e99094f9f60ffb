"""Prompt lookup: the text so far proposes how it goes on.  Lesson 13.

Saxena 2023, "Prompt Lookup Decoding". Answers often repeat their prompt, or themselves: edits, quotations, code. The
tokens that followed the newest earlier occurrence of the last n tokens are the drafts; a longer n goes first.
"""

from collections.abc import Sequence

import numpy as np

from .proposer import Asked

SIZES = (8, 4, 2)  # n, longest first
BASE = 0x9E3779B97F4A7C15  # odd; an n-gram's hash is a polynomial in it
WORD = (1 << 64) - 1
IN_BULK = 32  # new tokens from which NumPy computes their hashes faster than a loop


class NgramProposer:
    """Drafts by prompt lookup. For each request, a dictionary of n-grams costs O(1) a token, of time and of memory."""

    def __init__(self) -> None:
        self._indexes: dict[str, NgramIndex] = {}

    def propose(self, asked: Sequence[Asked]) -> list[list[int]]:
        proposals = []
        for each in asked:
            index = self._indexes.get(each.request_id)
            if index is None:
                index = self._indexes[each.request_id] = NgramIndex()
            proposals.append(index.continuation(each.tokens, each.most))
        return proposals

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)


class NgramIndex:
    """Where each n-gram of one request was seen last: hash -> index of the token after it.

    Different n-grams with equal hashes only make a worse draft.
    """

    def __init__(self) -> None:
        self._after: tuple[dict[int, int], ...] = tuple({} for _ in SIZES)
        self._seen = 0  # n-grams that end before this index are known

    def continuation(self, tokens: np.ndarray, most: int) -> list[int]:
        """Up to `most` tokens that followed the longest known n-gram at the end of tokens [n]; [] if there is none."""
        count = len(tokens)
        if count - 1 - self._seen > IN_BULK:
            self._learn(tokens)
        recent = tokens[max(0, self._seen - SIZES[0]) :].tolist()
        first = count - len(recent)
        for end in range(self._seen, count - 1):  # those that end with the last token are looked up, not learned
            for size, after in zip(SIZES, self._after, strict=True):
                if end + 1 >= size:
                    after[_hash(recent[end + 1 - size - first : end + 1 - first])] = end + 1
        self._seen = max(self._seen, count - 1)
        for size, after in zip(SIZES, self._after, strict=True):
            if count > size and (place := after.get(_hash(recent[len(recent) - size :]))) is not None:
                return self._repeated(tokens, place, most)
        return []

    @staticmethod
    def _repeated(tokens: np.ndarray, place: int, most: int) -> list[int]:
        """The tokens from `place` on; where they run into the end of the text, its last tokens go on in a circle."""
        drafts = tokens[place : place + most].tolist()
        period = len(drafts)
        while len(drafts) < most:
            drafts.append(drafts[len(drafts) - period])
        return drafts

    def _learn(self, tokens: np.ndarray) -> None:
        """Add all n-grams that end after the known ones and before the last token."""
        values = tokens.astype(np.uint64)
        for size, after in zip(SIZES, self._after, strict=True):
            first = max(self._seen + 1 - size, 0)  # where the first new n-gram begins
            count = len(tokens) - size - first  # of new n-grams
            if count <= 0:
                continue
            hashes = np.zeros(count, np.uint64)
            for i in range(size):
                hashes = hashes * np.uint64(BASE) + values[first + i : first + i + count]
            after.update(zip(hashes.tolist(), range(first + size, first + size + count), strict=True))
        self._seen = len(tokens) - 1


def _hash(ngram: list[int]) -> int:
    value = 0
    for token in ngram:
        value = (value * BASE + token) & WORD
    return value
