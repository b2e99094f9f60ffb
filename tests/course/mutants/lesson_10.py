"""Wrong solutions of lesson 10: static and in-flight batching, one rule for all tokens, the budget, a fair policy."""

import heapq

import numpy as np

from minillm.scheduler.policies import FirstComeFirstServed
from tests.course.mutants import wrong

# ---- steps_and_idle


def _static(outputs, rows):
    return sum(max(outputs[first : first + rows]) for first in range(0, len(outputs), rows))


def _in_flight(outputs, rows):
    ends = [0] * rows
    for tokens in outputs:
        heapq.heapreplace(ends, ends[0] + tokens)
    return max(ends)


def _with_idle(steps, outputs, rows):
    return steps, steps * rows - sum(outputs)


@wrong("steps_and_idle", fails="a static batch lasts as long as its longest request")
def batches_end_with_their_shortest(outputs, rows, in_flight):
    batches = [outputs[first : first + rows] for first in range(0, len(outputs), rows)]
    steps = _in_flight(outputs, rows) if in_flight else sum(map(min, batches))
    return _with_idle(steps, outputs, rows)


@wrong("steps_and_idle", fails="a request takes a step for each of its tokens")
def tokens_divided_by_rows(outputs, rows, in_flight):
    steps = -(-sum(outputs) // rows) if in_flight else _static(outputs, rows)
    return _with_idle(steps, outputs, rows)


@wrong("steps_and_idle", fails="the row that is free first takes the next request")
def rows_assigned_round_robin(outputs, rows, in_flight):
    steps = max(sum(outputs[row::rows]) for row in range(rows)) if in_flight else _static(outputs, rows)
    return _with_idle(steps, outputs, rows)


@wrong("steps_and_idle", fails="requests are taken in the order in which they come")
def longest_first(outputs, rows, in_flight):
    steps = _in_flight(sorted(outputs, reverse=True), rows) if in_flight else _static(outputs, rows)
    return _with_idle(steps, outputs, rows)


@wrong("steps_and_idle", fails="every row of every step counts")
def unused_rows_are_not_counted(outputs, rows, in_flight):
    if in_flight:
        return _with_idle(_in_flight(outputs, rows), outputs, rows)
    batches = [outputs[first : first + rows] for first in range(0, len(outputs), rows)]
    return _static(outputs, rows), sum(max(batch) - tokens for batch in batches for tokens in batch)


# ---- next_step


def _take(request, count):
    """The correct update for `count` tokens: (start, count, samples)."""
    start = request.computed
    request.computed += count
    samples = count > 0 and request.computed == request.known
    request.known += samples
    return start, count, samples


def _pending(request):
    return request.known - request.computed if request.known < request.limit else 0


@wrong("next_step", fails="the budget is for all requests together")
def a_budget_per_request(requests, budget):
    return [_take(request, min(_pending(request), budget)) for request in requests]


@wrong("next_step", fails="a chunk that is not the last yields no token")
def every_chunk_samples(requests, budget):
    done = []
    for request in requests:
        start, count = request.computed, min(_pending(request), budget)
        budget -= count
        request.computed += count
        request.known += count > 0
        done.append((start, count, count > 0))
    return done


@wrong("next_step", fails="computed grows by what ran")
def tokens_over_the_budget_are_lost(requests, budget):
    done = []
    for request in requests:
        start, pending = request.computed, _pending(request)
        count = min(pending, budget)
        budget -= count
        samples = 0 < count == pending
        request.computed += pending if count else 0
        request.known += samples
        done.append((start, count, samples))
    return done


@wrong("next_step", fails="a resumed request computes its output as it does a prompt")
def prefill_and_decode_are_two_cases(requests, budget):
    done = []
    for request in requests:
        start, count = request.computed, 0
        if request.known < request.limit:
            count = min(request.prompt - start if start < request.prompt else 1, budget)
        budget -= count
        request.computed += count
        samples = count > 0 and request.computed >= request.prompt
        request.known += samples
        done.append((start, count, samples))
    return done


@wrong("next_step", fails="what the cache has is not computed again")
def a_prompt_restarts_at_zero(requests, budget):
    done = []
    for request in requests:
        if request.known == request.prompt and budget >= request.prompt:
            request.computed = 0  # assumes that a request without output is new
        done.append(_take(request, min(_pending(request), budget)))
        budget -= done[-1][1]
    return done


@wrong("next_step", fails="a request at its limit runs no more")
def runs_past_the_limit(requests, budget):
    done = []
    for request in requests:
        done.append(_take(request, min(request.known - request.computed, budget)))
        budget -= done[-1][1]
    return done


# ---- share_budget


def _in_turn(pending, budget):
    before = np.cumsum(pending) - pending
    return np.minimum(pending, np.maximum(budget - before, 0))


def _by(order, pending, budget):
    counts = np.zeros_like(pending)
    counts[order] = _in_turn(pending[order], budget)
    return counts


@wrong("share_budget", fails="rows with one token come first")
def oldest_first(pending, budget):
    return _in_turn(pending, budget)


@wrong("share_budget", fails="no more than the budget")
def every_decode_runs(pending, budget):
    single = pending == 1
    return np.where(single, 1, _in_turn(np.where(single, 0, pending), budget - single.sum()))


@wrong("share_budget", fails="of the prompts the oldest comes first")
def shortest_prompt_first(pending, budget):
    return _by(np.argsort(pending, kind="stable"), pending, budget)


@wrong("share_budget", fails="a prompt is cut where the budget ends")
def whole_prompts_or_nothing(pending, budget):
    counts = _by(np.argsort(pending > 1, kind="stable"), pending, budget)
    return np.where(counts == pending, counts, 0)


@wrong("share_budget", fails="counts stay in the rows' order")
def returned_in_sorted_order(pending, budget):
    return _in_turn(pending[np.argsort(pending > 1, kind="stable")], budget)


@wrong("share_budget", fails="counts are whole numbers")
def counts_are_floats(pending, budget):
    counts = np.zeros(len(pending))
    counts[:] = _by(np.argsort(pending > 1, kind="stable"), pending, budget)
    return counts


# ---- PatientShortest


class Patient(FirstComeFirstServed):
    def __init__(self, patience=4.0):
        self.patience = patience


@wrong("PatientShortest", fails="short prompts go first")
class OrderOfArrival(Patient):
    def key(self, request):
        return self.patience * request.arrival


@wrong("PatientShortest", fails="a prompt of n tokens is overtaken n / patience times at most")
class ShortestAlways(Patient):
    def key(self, request):
        return len(request.prompt) + 1e-6 * request.arrival


@wrong("PatientShortest", fails="asked again, the same answer")
class CountsItsCalls(Patient):
    calls = 0

    def key(self, request):
        self.calls += 1
        return len(request.prompt) + self.patience * max(self.calls, request.arrival)


@wrong("PatientShortest", fails="what was generated already does not count")
class CountsOutputToo(Patient):
    def key(self, request):
        return len(request.known) + self.patience * request.arrival


@wrong("PatientShortest", fails="nor does what may be generated")
class CountsTheLimit(Patient):
    def key(self, request):
        return request.limit + self.patience * request.arrival
