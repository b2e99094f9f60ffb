"""Right but unusual solutions of lesson 10."""

import itertools
from fractions import Fraction

import numpy as np

from minillm.scheduler.policies import FirstComeFirstServed
from tests.course.unusual import right


@right("steps_and_idle")
def step_by_step(outputs, rows, in_flight):
    waiting, running, steps, idle = list(outputs)[::-1], [], 0, 0
    while waiting or running:
        if in_flight or not running:
            running += [waiting.pop() for _ in range(min(rows - len(running), len(waiting)))]
        steps, idle = steps + 1, idle + rows - len(running)
        running = [left - 1 for left in running if left > 1]
    return steps, idle


@right("steps_and_idle")
def with_arrays(outputs, rows, in_flight):
    ends = np.zeros(rows, np.int64)
    for first in range(0, len(outputs), 1 if in_flight else rows):
        group = outputs[first : first + (1 if in_flight else rows)]
        if in_flight:
            ends[ends.argmin()] += group[0]
        else:
            ends += max(group)
    return [ends.max(), rows * ends.max() - np.sum(outputs, dtype=int)]


@right("next_step")
def counts_first(requests, budget):
    live = [min(each.known, each.limit) - each.computed if each.known < each.limit else 0 for each in requests]
    left = [max(0, budget - before) for before in itertools.accumulate(live, initial=0)]
    counts = [min(pending, free) for pending, free in zip(live, left, strict=False)]
    steps = []
    for each, count in zip(requests, counts, strict=True):
        steps.append((each.computed, count, bool(count) and each.computed + count == each.known))
        each.computed, each.known = each.computed + count, each.known + int(steps[-1][2])
    return steps


@right("share_budget")
def token_by_token(pending, budget):
    counts = [0] * len(pending)
    for rows in (np.flatnonzero(pending == 1), np.flatnonzero(pending != 1)):
        for row in rows:
            while counts[row] < pending[row] and sum(counts) < budget:
                counts[row] += 1
    return counts


@right("PatientShortest")
class AnExactQuotient(FirstComeFirstServed):
    def __init__(self, patience=4.0):
        self.patience = Fraction(patience)

    def key(self, request):
        return request.arrival + Fraction(len(request.prompt)) / self.patience


@right("PatientShortest")
class EarlierIsShorter(FirstComeFirstServed):
    def __init__(self, patience: float = 4.0):
        super().__init__()
        self.slope = patience

    def key(self, request):
        return np.float64(request.prompt.size - 1e6 + request.arrival * self.slope)
