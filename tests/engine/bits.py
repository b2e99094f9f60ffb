"""Logits of every position that engines compute, by the tokens before it: each must have one value, to the last bit."""

from contextlib import contextmanager

import pytest
import torch

from minillm.runner import Runner
from minillm.runner.sampler import Sampler


class Bits:
    """What was computed for each sequence of tokens, and how often it was computed otherwise."""

    def __init__(self):
        self.logits: dict[tuple[int, ...], torch.Tensor] = {}
        self.counts: dict[tuple[int, ...], int] = {}
        self.others: list[tuple[int, ...]] = []

    def add(self, tokens: tuple[int, ...], logits: torch.Tensor) -> None:
        if not any(tokens):  # an engine rehearses its largest steps before there are requests, on whatever memory holds
            return
        first = self.logits.setdefault(tokens, logits)
        self.counts[tokens] = self.counts.get(tokens, 0) + 1
        if not torch.equal(first, logits):
            self.others.append(tokens)

    @property
    def repeated(self) -> int:
        """Positions that were computed more than once."""
        return sum(count > 1 for count in self.counts.values())

    @contextmanager
    def recorded(self):
        """Add all logits from which engines sample inside the block, those after wrong drafts too."""
        sample = Sampler.__call__

        def recording(sampler, logits, rows, lengths):
            for row, length, of_row in zip(rows.tolist(), lengths.tolist(), logits.clone(), strict=True):
                self.add(tuple(sampler.state.tokens[row, :length].tolist()), of_row)
            return sample(sampler, logits, rows, lengths)

        def correcting(runner, step, replayed):
            if step.drafts is None:  # a graph overwrites drafts
                rows, ends = step.token_rows.tolist(), step.for_each_token(step.ends).tolist()
                logits = replayed.logits[torch.as_tensor(replayed.indices)].clone()
                for row, length, of_row in zip(rows, ends, logits, strict=True):
                    self.add(tuple(runner.state.tokens[row, :length].tolist()), of_row)
            return correct(runner, step, replayed)

        correct = Runner._correct
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Sampler, "__call__", recording)
            patch.setattr(Runner, "_correct", correcting)
            yield
