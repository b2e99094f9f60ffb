"""How many tokens to draft for each row, and what became of them.  Lesson 13."""

from collections.abc import Sequence

import numpy as np

from minillm.config import DeviceConfig

from .proposer import Asked, Proposer, ProposerError


class Speculation:
    """A scheduler's proposer, and one entry a row of how many drafts it takes.

    config: the engine's. vocab_size: the model's.
    """

    def __init__(self, proposer: Proposer, config: DeviceConfig, vocab_size: int):
        self.proposer, self.vocab_size = proposer, vocab_size
        self.most, rows = config.speculate_tokens, config.max_num_seqs
        # Tokens that a step may yield: on a GPU the memory for logits is that of a step without drafts.
        self.most_yielded = max(rows, self.most + 1) if config.device.startswith("cuda") else 1 << 30
        self.counts = np.zeros(rows, np.int32)  # drafts that each row takes now; 0: it runs ahead like any other
        self.unread = np.zeros(rows, bool)  # whether a step in flight has drafts of the row
        self.drafts = self.draft_tokens = self.accepted_tokens = (
            0  # so far: rows of steps, their drafts, and right ones
        )

    def occupy(self, row: int, wanted: bool) -> None:
        """Begin with a row's new request, and with drafts for it if they are `wanted`."""
        self.counts[row] = self.most if wanted else 0
        self.unread[row] = False

    def waits(self, rows: np.ndarray) -> np.ndarray:
        """[n] bool: whether these rows run only once all their tokens are known, because they may get drafts."""
        return (self.counts[rows] > 0) | self.unread[rows]

    def propose(self, asked: Sequence[Asked]) -> list[np.ndarray]:
        """Each request's drafts, int32, as many as it can take. Raises ProposerError."""
        for each in asked:
            each.tokens.flags.writeable = False
        answer = self.proposer.propose(asked)
        if len(answer) != len(asked):
            raise ProposerError(f"{self._name}.propose gave {len(answer)} lists for {len(asked)} requests")
        return [self._checked(each, list(tokens)[: each.most]) for each, tokens in zip(asked, answer, strict=True)]

    def _checked(self, asked: Asked, tokens: list[int]) -> np.ndarray:
        if not tokens:
            return np.zeros(0, np.int32)
        drafts = np.asarray(tokens)
        if drafts.ndim != 1 or drafts.dtype.kind not in "iu" or drafts.min() < 0 or drafts.max() >= self.vocab_size:
            raise ProposerError(
                f"{self._name}.propose drafted {tokens} for {asked.request_id}; drafts are token ids from 0 to "
                f"{self.vocab_size - 1}"
            )
        return drafts.astype(np.int32)

    def learn(self, rows: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Take in how many drafts rows [n] had in a step, and how many of them were right."""
        self.unread[rows] = False
        self.drafts += len(rows)
        self.draft_tokens += int(drafted.sum())
        self.accepted_tokens += int(accepted.sum())

    def forget(self, request_id: str) -> None:
        """Tell the proposer that a request has ended."""
        self.proposer.forget(request_id)

    def count_on_from(self, before: "Speculation") -> None:
        """Count on where another one, of the same engine, ended."""
        self.drafts, self.draft_tokens = before.drafts, before.draft_tokens
        self.accepted_tokens = before.accepted_tokens

    def stats(self) -> dict[str, int]:
        """What happened so far, for `Engine.stats`."""
        return {
            "drafts": self.drafts,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
        }

    @property
    def _name(self) -> str:
        return getattr(self.proposer, "name", type(self.proposer).__name__)
