"""Prompt lookup: the text so far proposes how it goes on.  Lesson 13.

Saxena 2023, "Prompt Lookup Decoding". Answers often repeat their prompt, or themselves: edits, quotations, code. The
tokens that followed the newest earlier occurrence of the last n tokens are the drafts; a longer n goes first.
"""

from collections.abc import Sequence

import numpy as np

from minillm.prompts import EMBEDDED

from .proposer import Asked

SIZES = (8, 4, 2)  # n, longest first
IN_BULK = 32  # new tokens from which their n-grams are hashed together, not one by one


class NgramProposer:
    """Drafts by prompt lookup. For each request, a dictionary of n-grams costs O(1) a token, of time and of memory."""

    def __init__(self) -> None:
        self._indexes: dict[str, NgramIndex] = {}

    def propose(self, asked: Sequence[Asked]) -> list[list[int]]:
        return [self._index(each).continuation(each.tokens, each.most) for each in asked]

    def behind(self, asked: Asked) -> int:
        """Return how many tokens of a request are not learned yet; 0: but for a few, which the next proposal learns."""
        return self._index(asked).behind(len(asked.tokens))

    def catch_up(self, asked: Asked, most: int) -> None:
        """Learn up to `most` of a request's tokens."""
        self._index(asked).catch_up(asked.tokens, most)

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)

    def _index(self, asked: Asked) -> "NgramIndex":
        index = self._indexes.get(asked.request_id)
        if index is None:
            index = self._indexes[asked.request_id] = NgramIndex()
        return index


class NgramIndex:
    """Remembers where each n-gram of one request was seen last: hash -> index of the token after it.

    Different n-grams with equal hashes only make a worse draft.
    """

    def __init__(self) -> None:
        self._after: tuple[dict[int, int], ...] = tuple({} for _ in SIZES)
        self._seen = 0  # n-grams that end before this index are known

    def continuation(self, tokens: np.ndarray, most: int) -> list[int]:
        """Return up to `most` tokens that followed the longest known n-gram at the end of tokens [n]; [] if there is
        none.
        """
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
            if count > size and (start := after.get(_hash(recent[len(recent) - size :]))) is not None:
                return self._repeated(tokens, start, most)
        return []

    def behind(self, count: int) -> int:
        """Return how many n-grams of `count` tokens are still to be learned, if these are enough to do it in bulk."""
        behind = count - 1 - self._seen
        return behind if behind > IN_BULK else 0

    def catch_up(self, tokens: np.ndarray, most: int) -> None:
        """Learn the n-grams of the next tokens, up to `most`."""
        if self.behind(len(tokens)):
            self._learn(tokens[: self._seen + most + 1])

    @staticmethod
    def _repeated(tokens: np.ndarray, start: int, most: int) -> list[int]:
        """The tokens from `start` on; where they run into the end of the text, its last tokens go on in a circle."""
        drafts = tokens[start : start + most].tolist()
        if EMBEDDED in drafts:  # a prompt's embeddings are no tokens
            return drafts[: drafts.index(EMBEDDED)]
        period = len(drafts)
        while len(drafts) < most:
            drafts.append(drafts[len(drafts) - period])
        return drafts

    def _learn(self, tokens: np.ndarray) -> None:
        """Add all n-grams that end after the known ones and before the last token."""
        for size, after in zip(SIZES, self._after, strict=True):
            values = tokens[max(self._seen + 1 - size, 0) : -1].tolist()
            ngrams = zip(*(values[i:] for i in range(size)), strict=False)
            after.update(zip(map(hash, ngrams), range(len(tokens) - len(values) - 1 + size, len(tokens)), strict=False))
        self._seen = len(tokens) - 1


def _hash(ngram: list[int]) -> int:
    return hash(tuple(ngram))
