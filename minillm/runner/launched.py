"""A launched step and its results.  Lesson 10."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from minillm.request import TokenLogprobs
from minillm.scheduler.step import Step

from .logprobs import ArrivedScores, PromptScores, Scores, as_dicts, by_row


@dataclass
class Results:
    """The results of a step, on the host, in the order of its sampling rows."""

    tokens: np.ndarray  # [samples, most] int64; -1: the row's logits are not numbers
    accepted: np.ndarray  # [samples]: how many of them are kept, counted from the first
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # row -> of each of its tokens
    # row -> (position of the first token, one dict a token; None: the logits are not numbers)
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprobs] | None]] = field(default_factory=dict)
    looked_up: np.ndarray | None = None  # [samples]: drafts that the device has found; None: those of the step

    def known(self) -> list[list[int]]:
        """Return the tokens of each sampling row that are kept."""
        # As lists, which are faster here than arrays: a step has up to a thousand rows, of a token or two each.
        pairs = zip(self.tokens.tolist(), self.accepted.tolist(), strict=True)
        return [[token for token in tokens[:accepted] if token >= 0] for tokens, accepted in pairs]


class StepInFlight(Protocol):
    """A step that runs or has run, in any process."""

    step: Step

    def wait(self) -> Results:
        """Block until the results are here, and return them."""
        ...


class LaunchedStep:
    """A step that runs or has run on this process's device.

    tokens: those that it yields, [n] int64, on the device. read: returns them once the step has run, if it writes them
    to the host.
    """

    def __init__(
        self,
        step: Step,
        tokens: Tensor,
        logprobs: Sequence[Scores | ArrivedScores],
        prompts: Sequence[PromptScores] = (),
        read: Callable[[], np.ndarray] | None = None,
    ):
        self.step = step
        self._read = read or tokens.to("cpu", non_blocking=True).numpy
        self._logprobs = [each.to_host() for each in logprobs]
        self._prompts = [each.to_host() for each in prompts]
        self._event = None
        if tokens.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def finish(self) -> None:
        """Block until the device has run the step."""
        if self._event is not None:
            self._event.synchronize()

    def wait(self) -> Results:
        """Block until the results are on the host, and return them."""
        self.finish()
        results = agreed(self.step, self._read())
        results.logprobs = by_row(self._logprobs, self.step, results.accepted)
        for each in self._prompts:
            logprobs = None if each.values.isnan().any() else as_dicts(each.ids, each.values)
            results.prompt_logprobs[each.row] = (each.position, logprobs)
        return results


def agreed(step: Step, sampled: np.ndarray) -> Results:
    """Accept each row's drafts while they are the tokens that the model samples there, and the token after them.

    sampled: [tokens that the step yields]. A token was sampled with the number of its own position, from logits that
    saw the drafts before it. So while those are right, it is the token of a step without drafts.
    """
    if step.drafts is None:
        return Results(sampled[:, None], np.ones(len(sampled), np.int64))
    drafts, yields = step.drafts[step.samples], step.drafted[step.samples] + 1
    tokens = np.full((len(drafts), drafts.shape[1] + 1), -1, np.int64)
    tokens[np.arange(tokens.shape[1]) < yields[:, None]] = sampled
    right = (tokens[:, :-1] == drafts) & (drafts >= 0)
    return Results(tokens, 1 + np.cumprod(right, axis=1).sum(axis=1))
