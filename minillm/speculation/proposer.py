"""The interface of every proposer, which drafts tokens.  Lesson 13."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from minillm.errors import MinillmError
from minillm.request import SamplingParams


class ProposerError(MinillmError, RuntimeError):
    """A proposer's answer is not a list of drafts for each request."""


@dataclass(frozen=True, eq=False)
class Asked:
    """A request that can take drafts."""

    request_id: str
    tokens: np.ndarray  # [n] int32: its prompt and output so far, read-only; -1 where the prompt has an embedding
    most: int  # drafts that it can take, from 1
    # How its own tokens are sampled, for proposers that sample drafts.
    params: SamplingParams = SamplingParams()
    seed: int = 0
    prompt_length: int = 0
    stop_ids: tuple[int, ...] = ()


class Proposer(Protocol):
    """Guesses which tokens come next. A wrong guess costs time, and never changes an output.

    `minillm.using(proposer=...)` replaces it by a class of yours, which is called with nothing. If it has an attribute
    `slow` that is true, each further draft takes it time: it is asked only for as many as are worth that.
    """

    def propose(self, asked: Sequence[Asked]) -> Sequence[Sequence[int]]:
        """Return a list of token ids for each request: what it expects next, or nothing. Those over `most` are cut.

        It is asked when all of a request's tokens are known, and not at every token.
        """
        ...

    def forget(self, request_id: str) -> None:
        """Drop what it keeps for a request, which has ended."""
        ...
