"""Wrong solutions of lesson 99: request timings, pooled percentiles, Poisson arrivals, batched attention."""

import math
from itertools import pairwise

import torch

from tests.course.mutants import wrong


def all_gaps(arrivals):
    """The correct gaps."""
    last, together = arrivals[0]
    gaps = [0.0] * (together - 1)
    for when, tokens in arrivals[1:]:
        gaps += [when - last] + [0.0] * (tokens - 1)
        last = when
    return gaps


@wrong("timings", fails="waiting begins when the request was due")
def counts_from_the_runs_start(due, arrivals):
    return arrivals[0][0], all_gaps(arrivals), arrivals[-1][0]


@wrong("timings", fails="a gap is since the token before")
def gaps_since_the_first_token(due, arrivals):
    (first, together), *rest = arrivals
    gaps = [0.0] * (together - 1)
    for when, tokens in rest:
        gaps += [when - first] + [0.0] * (tokens - 1)
    return first - due, gaps, arrivals[-1][0] - due


@wrong("timings", fails="tokens that come together are tokens")
def a_gap_for_each_arrival(due, arrivals):
    first = arrivals[0][0]
    later = [b - a for (a, _), (b, _) in pairwise(arrivals)]
    return first - due, [0.0] * (arrivals[0][1] - 1) + later, arrivals[-1][0] - due


@wrong("timings", fails="the wait before tokens that come together is one wait")
def shares_the_wait_out(due, arrivals):
    last, together = arrivals[0]
    gaps = [0.0] * (together - 1)
    for when, tokens in arrivals[1:]:
        gaps += [(when - last) / tokens] * tokens
        last = when
    return arrivals[0][0] - due, gaps, last - due


@wrong("timings", fails="the first arrival may bring several tokens")
def forgets_what_came_with_the_first(due, arrivals):
    return arrivals[0][0] - due, all_gaps([(arrivals[0][0], 1), *arrivals[1:]]), arrivals[-1][0] - due


def rank(ranked, p):
    return ranked[math.ceil(p / 100 * len(ranked)) - 1]


@wrong("pooled_percentile", fails="a value that was seen")
def interpolates(gaps, p):
    ranked = sorted(gap for each in gaps for gap in each)
    place = p / 100 * (len(ranked) - 1)
    low = int(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (place - low) * (ranked[high] - ranked[low])


@wrong("pooled_percentile", fails="no rank too many")
def counts_from_zero(gaps, p):
    ranked = sorted(gap for each in gaps for gap in each)
    return ranked[min(int(p / 100 * len(ranked)), len(ranked) - 1)]


@wrong("pooled_percentile", fails="ranks are rounded up")
def rounds_the_rank(gaps, p):
    ranked = sorted(gap for each in gaps for gap in each)
    return ranked[max(1, round(p / 100 * len(ranked))) - 1]


@wrong("pooled_percentile", fails="in whatever order they came")
def does_not_sort(gaps, p):
    return rank([gap for each in gaps for gap in each], p)


@wrong("pooled_percentile", fails="every gap counts once")
def mean_of_the_requests_own(gaps, p):
    return sum(rank(sorted(each), p) for each in gaps) / len(gaps)


@wrong("pooled_percentile", fails="what was measured stays as it was")
def sorts_the_callers_lists(gaps, p):
    for each in gaps:
        each.sort()
    return rank(sorted(gap for each in gaps for gap in each), p)


@wrong("poisson_arrivals", fails="times, not gaps")
def gaps_alone(rate, uniform):
    return [-math.log(1 - u) / rate for u in uniform]


def summed(gaps):
    return [sum(gaps[: i + 1]) for i in range(len(gaps))]


@wrong("poisson_arrivals", fails="twice the rate is half the wait")
def rate_taken_for_the_gap(rate, uniform):
    return summed([-math.log(1 - u) * rate for u in uniform])


@wrong("poisson_arrivals", fails="small draws are short gaps")
def logarithm_of_the_draw(rate, uniform):
    return summed([-math.log(max(u, 1e-9)) / rate for u in uniform])


@wrong("poisson_arrivals", fails="many short gaps, few long ones")
def even_gaps(rate, uniform):
    return summed([2 * math.log(2) * u / rate for u in uniform])


@wrong("poisson_arrivals", fails="each gap has a draw of its own")
def one_draw_for_all(rate, uniform):
    return summed([-math.log(1 - uniform[0]) / rate] * len(uniform))


def attend(q, k, v, unseen, scale, softmax=lambda scores: scores.softmax(-1)):
    """Correct attention, given the hidden keys of each row and repeated KV heads."""
    v = v.masked_fill(unseen[..., None, None], 0)
    scores = torch.einsum("rhd,rkhd->rhk", q, k) * scale
    return torch.einsum("rhk,rkhd->rhd", softmax(scores.masked_fill(unseen[:, None], -torch.inf)), v)


def repeated(q, k, v):
    group = q.shape[1] // k.shape[2]
    return k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)


def beyond(k, lengths):
    return torch.arange(k.shape[1], device=k.device) >= lengths[:, None]


@wrong("batched_attention", fails="each row ends at its own length")
def one_length_for_all(q, k, v, lengths, scale):
    k, v = repeated(q, k, v)
    return attend(q, k, v, beyond(k, lengths.max().expand(len(q))), scale)


@wrong("batched_attention", fails="each row ends at its own length")
def one_key_too_many(q, k, v, lengths, scale):
    k, v = repeated(q, k, v)
    return attend(q, k, v, beyond(k, lengths + 1), scale)


@wrong("batched_attention", fails="scores are scaled")
def forgets_the_scale(q, k, v, lengths, scale):
    k, v = repeated(q, k, v)
    return attend(q, k, v, beyond(k, lengths), 1.0)


@wrong("batched_attention", fails="neighbouring heads share a key-value head")
def heads_interleaved(q, k, v, lengths, scale):
    group = q.shape[1] // k.shape[2]
    k, v = k.repeat(1, 1, group, 1), v.repeat(1, 1, group, 1)
    return attend(q, k, v, beyond(k, lengths), scale)


@wrong("batched_attention", fails="leftovers never matter, not even NaN")
def masks_the_scores_alone(q, k, v, lengths, scale):
    k, v = repeated(q, k, v)
    scores = torch.einsum("rhd,rkhd->rhk", q, k) * scale
    weights = scores.masked_fill(beyond(k, lengths)[:, None], -torch.inf).softmax(-1)
    return torch.einsum("rhk,rkhd->rhd", weights, v)


@wrong("batched_attention", fails="leftovers never matter, not even NaN")
def masks_with_minus_100(q, k, v, lengths, scale):
    k, v = repeated(q, k, v)
    unseen = beyond(k, lengths)
    scores = torch.einsum("rhd,rkhd->rhk", q, k) * scale
    weights = scores.masked_fill(unseen[:, None], -100.0).softmax(-1)
    return torch.einsum("rhk,rkhd->rhd", weights, v.masked_fill(unseen[..., None, None], 0))


@wrong("batched_attention", fails="dtype and device are those of q")
def stays_in_float64(q, k, v, lengths, scale):
    k, v = repeated(q, k, v)
    return attend(q.double(), k.double(), v.double(), beyond(k, lengths), scale)


@wrong("batched_attention", fails="dtype and device are those of q")
def counts_keys_on_the_cpu(q, k, v, lengths, scale):
    k, v = repeated(q, k, v)
    return attend(q, k, v, torch.arange(k.shape[1]) >= lengths[:, None], scale)


@wrong("batched_attention", fails="large scores do not overflow")
def softmax_by_hand(q, k, v, lengths, scale):
    k, v = repeated(q, k, v)

    def by_hand(scores):
        return scores.exp() / scores.exp().sum(-1, keepdim=True)

    return attend(q, k, v, beyond(k, lengths), scale, by_hand)
