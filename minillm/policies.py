"""Which request goes first, and when one may join: small classes behind one interface.  Lesson 10.

    LLM(policy="shortest")

A policy sees requests and no tensors. The scheduler asks for a request's `key` once, when it is queued; equal keys go
in order of arrival. `fair` policies promise that every request has its turn, however many come after it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what reads options must not wait for more
    from .request import Request


class FirstComeFirstServed:
    """In order of arrival; whoever fits joins the running ones at any step (Yu et al. 2022, "Orca")."""

    fair = True

    def key(self, request: "Request") -> float:
        """Lower goes first. Where blocks run out, the running request with the highest gives way."""
        return request.arrival

    def admits(self, running: int) -> bool:
        """Whether waiting requests may join now that `running` ones have a row."""
        return True


class Priority(FirstComeFirstServed):
    """The lowest `SamplingParams.priority` first. Not fair: urgent requests may keep the others waiting for ever."""

    fair = False

    def key(self, request: "Request") -> float:
        return request.params.priority


class ShortestPromptFirst(FirstComeFirstServed):
    """Short prompts first: the mean wait falls, a long prompt's grows.

    Fair, because every later arrival is taken for `patience` tokens longer than it is: a prompt of n tokens is
    overtaken by n / patience later ones at most.
    """

    def __init__(self, patience: float = 4.0):
        if not patience > 0:
            raise ValueError(f"patience must be above 0 tokens for each later request, not {patience!r}")
        self.patience = patience

    def key(self, request: "Request") -> float:
        return len(request.prompt) + self.patience * request.arrival


class StaticBatching(FirstComeFirstServed):
    """As many as there are rows for, then nobody until the last is done: the baseline of in-flight batching."""

    def __init__(self):
        self._seen = 0  # requests that had a row when it was last asked
        self._gathering = True

    def admits(self, running: int) -> bool:
        """A batch may take several steps to gather, each with a budget; once it no longer grows it is closed."""
        self._gathering = running == 0 or (self._gathering and running > self._seen)
        self._seen = running
        return self._gathering


POLICIES = {
    "fcfs": FirstComeFirstServed,
    "priority": Priority,
    "shortest": ShortestPromptFirst,
    "static": StaticBatching,
}
