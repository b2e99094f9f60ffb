"""Scheduling policies: which requests go first, which may join, how many tokens of each run in a step.  Lesson 10.

    LLM(policy="shortest")

The scheduler is mechanism: rows, blocks, steps. Its decisions are a policy's, which sees requests and counts, and no
tensors. It asks for a request's `key` once, when it is queued; equal keys go in order of arrival. `fair` policies
promise that no request waits forever, however many arrive later. `minillm.using(policy=...)` replaces the policy.
"""

from typing import TYPE_CHECKING, Protocol

import numpy as np

from minillm.config import PolicyName
from minillm.errors import ConfigError, MinillmError

if TYPE_CHECKING:  # what reads options must not wait for more
    from minillm.request import Request


class PolicyError(MinillmError, RuntimeError):
    """A policy's answer cannot be followed, or following it would leave work waiting forever."""


class Policy(Protocol):
    """The scheduler's decisions. A new policy derives from one that exists, and overrides what it decides otherwise."""

    def key(self, request: "Request") -> float:
        """Lower goes first. Where blocks run out, the running request with the highest is preempted."""
        ...

    def admits(self, running: int) -> bool:
        """Return whether waiting requests may join now that `running` ones have a row."""
        ...

    def share(self, pending: np.ndarray, budget: int) -> np.ndarray:
        """Return how many of each row's pending tokens run in this step, `budget` at most in all.

        pending: [n] int32, above 0, read-only: tokens known and not computed, rows oldest first. A request that is
        about to join is asked for alone, with what the running rows left; given nothing, it waits. budget: with
        `max_prefill_tokens` it changes from step to step with the number of decodes.
        """
        ...


class FirstComeFirstServed:
    """In order of arrival; a request that fits joins the running ones at any step (Yu et al. 2022, "Orca")."""

    fair = True

    def key(self, request: "Request") -> float:
        return request.arrival

    def admits(self, running: int) -> bool:
        return True

    def share(self, pending: np.ndarray, budget: int) -> np.ndarray:
        """Decodes go first, so a long prompt never pauses answers that are already streaming; then chunks of prompts,
        oldest first (Agrawal et al. 2024, "Sarathi-Serve", section 4).
        """
        if pending.sum() <= budget:
            return pending
        first = np.argsort(pending > 1, kind="stable")
        wanted = pending[first]
        counts = np.empty_like(pending)
        counts[first] = np.minimum(wanted, np.maximum(budget - (np.cumsum(wanted) - wanted), 0))
        return counts


class Priority(FirstComeFirstServed):
    """The lowest `RequestOptions.priority` first. Not fair: urgent requests may keep others waiting forever."""

    fair = False

    def key(self, request: "Request") -> float:
        return request.options.priority


class ShortestPromptFirst(FirstComeFirstServed):
    """Short prompts first: the mean wait falls, a long prompt's grows.

    Fair, because every arrival counts as `patience` tokens longer than the one before it would: a prompt of n tokens
    is overtaken by at most n / patience later ones.
    """

    def __init__(self, patience: float = 4.0):
        if not patience > 0:
            raise ConfigError(f"patience must be above 0 tokens for each later request, not {patience!r}")
        self.patience = patience

    def key(self, request: "Request") -> float:
        return len(request.prompt) + self.patience * request.arrival


class StaticBatching(FirstComeFirstServed):
    """Fills the rows, then admits no request until the last is done: the baseline of in-flight batching."""

    def __init__(self) -> None:
        self._seen = 0  # requests that had a row when it was last asked
        self._gathering = True

    def admits(self, running: int) -> bool:
        """A batch may take several steps to gather, each with a budget; once it no longer grows it is closed."""
        self._gathering = running == 0 or (self._gathering and running > self._seen)
        self._seen = running
        return self._gathering


class WholePrompts(FirstComeFirstServed):
    """A prompt runs in one step or waits for one, as before there was chunked prefill: its baseline.

    One that is longer than a whole budget is cut into chunks after all.
    """

    def __init__(self) -> None:
        self._budget = 0  # of a whole step

    def admits(self, running: int) -> bool:
        if running == 0:
            self._budget = 0  # the next request is offered all of it
        return True

    def share(self, pending: np.ndarray, budget: int) -> np.ndarray:
        if len(pending) == 1 and budget < pending[0] <= self._budget:
            return np.zeros_like(pending)
        self._budget = max(self._budget, budget)
        return super().share(pending, budget)


POLICIES: dict[PolicyName, type[FirstComeFirstServed]] = {
    "fcfs": FirstComeFirstServed,
    "priority": Priority,
    "shortest": ShortestPromptFirst,
    "static": StaticBatching,
    "whole": WholePrompts,
}
