"""A launched step and its results.  Lesson 10."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from minillm.request import TokenLogprobs
from minillm.scheduler.step import Step

from .logprobs import PromptScores, Scores, as_dicts


@dataclass
class Results:
    """The results of a step, on the host, in the order of its sampling rows."""

    tokens: np.ndarray  # [samples, queries_per_decode] int64; -1: the row's logits are not numbers
    accepted: np.ndarray  # [samples]: how many of them are kept, counted from the first
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # row -> log-probabilities of its token
    # row -> (position of the first token, one dict a token; None: the logits are not numbers)
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprobs] | None]] = field(default_factory=dict)


class StepInFlight(Protocol):
    """A step that runs or has run, in any process."""

    step: Step

    def wait(self) -> Results:
        """Block until the results are here, and return them."""
        ...


class LaunchedStep:
    """A step that runs or has run on this process's device.

    tokens [samples] int64, on the device. read: returns them once the step has run, if it writes them to the host.
    """

    def __init__(
        self,
        step: Step,
        tokens: Tensor,
        logprobs: Sequence[Scores],
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

    def wait(self) -> Results:
        """Block until the results are on the host, and return them."""
        if self._event is not None:
            self._event.synchronize()
        tokens = self._read()
        results = Results(tokens[:, None], np.ones(len(tokens), np.int64))
        for scores in self._logprobs:
            results.logprobs |= zip(scores.rows.tolist(), as_dicts(scores.ids, scores.values), strict=True)
        for each in self._prompts:
            logprobs = None if each.values.isnan().any() else as_dicts(each.ids, each.values)
            results.prompt_logprobs[each.row] = (each.position, logprobs)
        return results
