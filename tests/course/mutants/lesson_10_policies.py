"""Wrong solutions of lesson 10: the budget of a step, a fair policy."""

import numpy as np

from minillm.scheduler.policies import FirstComeFirstServed
from tests.course.mutants import wrong

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


@wrong("share_budget", fails="the budget holds for single tokens too")
def every_decode_runs(pending, budget):
    single = pending == 1
    return np.where(single, 1, _in_turn(np.where(single, 0, pending), budget - single.sum()))


@wrong("share_budget", fails="the budget holds for single tokens too")
def prompts_pay_for_what_is_missing(pending, budget):
    counts = np.where(pending == 1, 1, 0)
    if counts.all():
        return _in_turn(pending, budget)
    left = budget - counts.sum()
    for row in np.flatnonzero(pending > 1):
        counts[row] = min(pending[row], left)
        left = max(left - counts[row], 0)
    return counts


@wrong("share_budget", fails="rows with one token come first")
def a_prompt_always_gets_a_token(pending, budget):
    single = pending == 1
    if single.all():
        return _in_turn(pending, budget)
    decodes = _in_turn(np.where(single, 1, 0), budget - 1)
    return decodes + _in_turn(np.where(single, 0, pending), budget - decodes.sum())


@wrong("share_budget", fails="older prompts come before younger ones")
def shortest_prompt_first(pending, budget):
    return _by(np.argsort(pending, kind="stable"), pending, budget)


@wrong("share_budget", fails="older prompts come before younger ones")
def short_prompts_count_as_decodes(pending, budget):
    return _by(np.argsort(pending > 4, kind="stable"), pending, budget)


@wrong("share_budget", fails="older prompts come before younger ones")
def longest_prompt_first(pending, budget):
    return _by(np.lexsort((-pending, pending > 1)), pending, budget)


@wrong("share_budget", fails="counts stay in the rows' order")
def the_order_of_a_sort_that_is_not_stable(pending, budget):
    order = np.argsort(pending > 1, kind="stable")
    if len(order) > 16:  # from here on numpy's default sort may swap equal entries
        order[pending[order] > 1] = order[pending[order] > 1][::-1]
    return _by(order, pending, budget)


@wrong("share_budget", fails="a prompt is cut where the budget ends")
def whole_prompts_or_nothing(pending, budget):
    counts = _by(np.argsort(pending > 1, kind="stable"), pending, budget)
    return np.where(counts == pending, counts, 0)


@wrong("share_budget", fails="a prompt is cut where the budget ends")
def the_last_row_is_never_cut(pending, budget):
    counts = _by(np.argsort(pending > 1, kind="stable"), pending, budget)
    if counts[-1] < pending[-1]:
        counts[-1] = 0
    return counts


BUFFERS: dict[int, np.ndarray] = {}


@wrong("share_budget", fails="an earlier answer stays as it is")
def one_array_for_all_answers(pending, budget):
    counts = BUFFERS.setdefault(len(pending), np.zeros_like(pending))
    counts[:] = _by(np.argsort(pending > 1, kind="stable"), pending, budget)
    return counts


@wrong("share_budget", fails="counts stay in the rows' order")
def returned_in_sorted_order(pending, budget):
    return _in_turn(pending[np.argsort(pending > 1, kind="stable")], budget)


@wrong("share_budget", fails="counts are whole numbers")
def counts_are_floats(pending, budget):
    counts = np.zeros(len(pending))
    counts[:] = _by(np.argsort(pending > 1, kind="stable"), pending, budget)
    return counts


@wrong("share_budget", fails="a large budget runs all that is pending, and no more")
def the_oldest_prompt_gets_all_that_is_left(pending, budget):
    counts = _by(np.argsort(pending > 1, kind="stable"), pending, budget)
    if (pending > 1).any():
        counts[np.argmax(pending > 1)] += budget - counts.sum()
    return counts


@wrong("share_budget", fails="a prompt is cut where the budget ends")
def one_prompt_a_step_where_not_all_fit(pending, budget):
    counts = _by(np.argsort(pending > 1, kind="stable"), pending, budget)
    if counts.sum() < pending.sum():
        counts[np.flatnonzero(pending > 1)[1:]] = 0
    return counts


@wrong("share_budget", fails="a prompt is cut where the budget ends")
def one_token_over_the_budget_still_fits(pending, budget):
    if pending.sum() - 1 <= budget:
        return pending
    return _by(np.argsort(pending > 1, kind="stable"), pending, budget)


@wrong("share_budget", fails="a prompt is cut where the budget ends")
def chunks_fill_whole_blocks_of_sixteen(pending, budget):
    counts = _by(np.argsort(pending > 1, kind="stable"), pending, budget)
    return np.where((counts < pending) & (counts > 16), counts - counts % 16, counts)


@wrong("share_budget", fails="a prompt is cut where the budget ends")
def a_single_row_has_nothing_to_share(pending, budget):
    if len(pending) == 1:
        return pending
    return _by(np.argsort(pending > 1, kind="stable"), pending, budget)


@wrong("share_budget", fails="a large budget runs all that is pending, and no more")
def at_most_three_prompts_a_step(pending, budget):
    counts = _by(np.argsort(pending > 1, kind="stable"), pending, budget)
    counts[np.flatnonzero(pending > 1)[3:]] = 0
    return counts


@wrong("share_budget", fails="a large budget runs all that is pending, and no more")
def prompts_begin_at_three_tokens(pending, budget):
    counts = _by(np.argsort(pending > 1, kind="stable"), pending, budget)
    return np.where(pending == 2, 0, counts)


@wrong("share_budget", fails="a large budget runs all that is pending, and no more")
def until_the_budget_is_used_up(pending, budget):
    counts = np.zeros_like(pending)
    order = np.argsort(pending > 1, kind="stable")
    while budget > 0:  # endless where less is pending
        for row in order:
            count = min(pending[row] - counts[row], budget)
            counts[row] += count
            budget -= count
    return counts


@wrong("share_budget", fails="counts stay in the rows' order")
def put_back_by_the_wrong_permutation(pending, budget):
    order = np.argsort(pending > 1, kind="stable")
    return _in_turn(pending[order], budget)[order]


@wrong("share_budget", fails="the budget holds for single tokens too")
def nothing_runs_where_single_tokens_exceed_the_budget(pending, budget):
    if (pending == 1).sum() > budget:
        return np.zeros_like(pending)
    return _by(np.argsort(pending > 1, kind="stable"), pending, budget)


@wrong("share_budget", fails="the budget holds for single tokens too")
def single_tokens_among_the_first_rows_alone(pending, budget):
    counts = np.where(pending == 1, 1, 0)
    if counts.sum() > budget:
        counts[budget:] = 0
        return counts
    return counts + _in_turn(np.where(pending == 1, 0, pending), budget - counts.sum())


@wrong("share_budget", fails="a prompt is cut where the budget ends")
def the_last_token_is_not_for_a_prompt(pending, budget):
    counts, left = np.zeros_like(pending), budget
    for row in np.argsort(pending > 1, kind="stable"):
        if left > 1 or pending[row] == 1:
            counts[row] = min(pending[row], left)
            left -= counts[row]
    return counts


# ---- PatientShortest


class Patient(FirstComeFirstServed):
    def __init__(self, patience=4.0):
        self.patience = patience


@wrong("PatientShortest", fails="short prompts go first while patience lasts")
class OrderOfArrival(Patient):
    def key(self, request):
        return self.patience * request.arrival


@wrong("PatientShortest", fails="a prompt of n tokens is overtaken at most n / patience times")
class ShortestAlways(Patient):
    def key(self, request):
        return len(request.prompt) + 1e-6 * request.arrival


@wrong("PatientShortest", fails="a prompt of n tokens is overtaken at most n / patience times")
class RoundsTheLength(Patient):
    def key(self, request):
        return round(len(request.prompt) / self.patience) + request.arrival


@wrong("PatientShortest", fails="asking again gives the same key")
class CountsItsCalls(Patient):
    calls = 0

    def key(self, request):
        self.calls += 1
        return len(request.prompt) + self.patience * max(self.calls, request.arrival)


@wrong("PatientShortest", fails="generated tokens do not count")
class CountsOutputToo(Patient):
    def key(self, request):
        return len(request.known) + self.patience * request.arrival


@wrong("PatientShortest", fails="the limit of the answer does not count")
class CountsTheLimit(Patient):
    def key(self, request):
        return request.limit + self.patience * request.arrival


@wrong("PatientShortest", fails="a prompt of n tokens is overtaken at most n / patience times")
class PatienceIsAlwaysFour(Patient):
    def key(self, request):
        return len(request.prompt) + 4.0 * request.arrival


@wrong("PatientShortest", fails="a prompt of n tokens is overtaken at most n / patience times")
class WholePatience(Patient):
    def __init__(self, patience=4.0):
        self.patience = int(patience)

    def key(self, request):
        return len(request.prompt) + self.patience * request.arrival


@wrong("PatientShortest", fails="short prompts go first while patience lasts")
class FarTooPatient(Patient):
    def key(self, request):
        return len(request.prompt) + 40 * self.patience * request.arrival


class Right(Patient):
    def key(self, request):
        return len(request.prompt) + self.patience * request.arrival


@wrong("PatientShortest", fails="short prompts go first while patience lasts")
class LongPromptsLookAlike(Patient):
    def key(self, request):
        return min(len(request.prompt), 1000) + self.patience * request.arrival


@wrong("PatientShortest", fails="short prompts go first while patience lasts")
class ShortPromptsLookAlike(Patient):
    def key(self, request):
        tokens = len(request.prompt)
        return (tokens if tokens > 16 else 0) + self.patience * request.arrival


@wrong("PatientShortest", fails="short prompts go first while patience lasts")
class DropsTheRemainder(Patient):
    def key(self, request):
        return len(request.prompt) // self.patience + request.arrival


@wrong("PatientShortest", fails="short prompts go first while patience lasts")
class AnotherDefault(Right):
    def __init__(self, patience=8.0):
        self.patience = patience


@wrong("PatientShortest", fails="a prompt of n tokens is overtaken at most n / patience times")
class OnePatienceForAll(Right):
    def __init__(self, patience=4.0):
        type(self).patience = patience


@wrong("PatientShortest", fails="a prompt of n tokens is overtaken at most n / patience times")
class ArrivalsStartAgain(Patient):
    def key(self, request):
        return len(request.prompt) + self.patience * (request.arrival % 1000)


@wrong("PatientShortest", fails="it decides about the order alone")
class AdmitsWhenEmpty(Right):
    def admits(self, running):
        return running == 0


@wrong("PatientShortest", fails="it decides about the order alone")
class SharesInTurn(Right):
    def share(self, pending, budget):
        return _in_turn(pending, budget)


@wrong("PatientShortest", fails="it decides about the order alone")
class SharesNothing(Right):
    def share(self, pending, budget):
        return np.zeros_like(pending)


@wrong("PatientShortest", fails="it decides about the order alone")
class PromisesNothing(Right):
    fair = False
