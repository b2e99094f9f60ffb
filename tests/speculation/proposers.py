"""Proposers for tests: one that knows every output, one that is right or wrong by a coin, one that is told."""

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from minillm.config import EngineConfig
from minillm.speculation import Asked, Speculation


class Told:
    """Drafts for each request what `drafts` has for it."""

    def __init__(self, drafts: Mapping[str, Sequence[int]]):
        self.drafts, self.forgotten = dict(drafts), []

    def propose(self, asked):
        return [self.drafts.get(each.request_id, []) for each in asked]

    def forget(self, request_id):
        self.forgotten.append(request_id)


class Coin:
    """Drafts the right tokens, each with a chance of `right`, and others; up to a random number of them.

    outputs: (the tokens so far) -> the right ones that follow, where it is known.
    """

    def __init__(self, outputs: Callable[[Asked], Sequence[int]], vocabulary: int, right: float = 0.7, seed: int = 0):
        self.outputs, self.vocabulary, self.right, self.rng = outputs, vocabulary, right, random.Random(seed)

    def propose(self, asked):
        return [self._drafts(each) for each in asked]

    def _drafts(self, asked: Asked) -> list[int]:
        drafts = list(self.outputs(asked))[: self.rng.randint(0, asked.most)]
        return [each if self.rng.random() < self.right else self.rng.randrange(self.vocabulary) for each in drafts]

    def forget(self, request_id):
        pass


class Oracle(Coin):
    """Drafts the right tokens."""

    def __init__(self, outputs: Callable[[Asked], Sequence[int]]):
        super().__init__(outputs, 1, right=1.0)

    def _drafts(self, asked):
        return list(self.outputs(asked))[: asked.most]


def following(known: Sequence[Sequence[int]]) -> Callable[[Asked], Sequence[int]]:
    """What follows a request's tokens in the first of the known sequences (prompt and output) that begins with them."""

    def outputs(asked: Asked) -> Sequence[int]:
        tokens = asked.tokens.tolist()
        return next((each[len(tokens) :] for each in known if each[: len(tokens)] == tokens), [])

    return outputs


class Always(Speculation):
    """Runs all drafts, whether they are worth their time or not."""

    def worth(self, rows, known, proposed, others, left):
        return np.clip(left + proposed - proposed.cumsum(), 0, proposed)


def speculation(proposer, rows: int, most: int = 3, vocabulary: int = 1000) -> Speculation:
    config = EngineConfig(max_num_seqs=rows, speculate="ngram", speculate_tokens=most).on("cpu")
    return Always(proposer, config, vocabulary)
