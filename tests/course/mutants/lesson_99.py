"""Wrong solutions of lesson 99: request timings, pooled percentiles, Poisson arrivals."""

import math
import statistics
from itertools import accumulate, pairwise

import numpy as np
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


@wrong("timings", fails="the wait starts when the request was due")
def counts_from_the_runs_start(due, arrivals):
    return arrivals[0][0], all_gaps(arrivals), arrivals[-1][0]


@wrong("timings", fails="a gap is the time since the token before")
def gaps_since_the_first_token(due, arrivals):
    (first, together), *rest = arrivals
    gaps = [0.0] * (together - 1)
    for when, tokens in rest:
        gaps += [when - first] + [0.0] * (tokens - 1)
    return first - due, gaps, arrivals[-1][0] - due


@wrong("timings", fails="every token counts")
def a_gap_for_each_arrival(due, arrivals):
    first = arrivals[0][0]
    later = [b - a for (a, _), (b, _) in pairwise(arrivals)]
    return first - due, [0.0] * (arrivals[0][1] - 1) + later, arrivals[-1][0] - due


@wrong("timings", fails="tokens that arrive together share one wait")
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


@wrong("timings", fails="tokens that arrive together share one wait")
def waits_for_the_last_of_a_group(due, arrivals):
    times = [when for when, tokens in arrivals for _ in range(tokens)]
    gaps = [0.0] * (arrivals[0][1] - 1)
    for (before, _), (when, tokens) in pairwise(arrivals):
        gaps += [0.0] * (tokens - 1) + [when - before]
    return times[0] - due, gaps, times[-1] - due


@wrong("timings", fails="an answer of one token has no gaps")
def expects_a_second_token(due, arrivals):
    gaps = all_gaps(arrivals) or [0.0]
    return arrivals[0][0] - due, gaps, arrivals[-1][0] - due


@wrong("timings", fails="the list of arrivals is unchanged")
def takes_arrivals_off_the_list(due, arrivals):
    last, together = arrivals.pop(0)
    ttft, gaps = last - due, [0.0] * (together - 1)
    while arrivals:
        when, tokens = arrivals.pop(0)
        gaps += [when - last] + [0.0] * (tokens - 1)
        last = when
    return ttft, gaps, last - due


@wrong("timings", fails="the list of arrivals is unchanged")
def writes_waits_into_the_list(due, arrivals):
    for place, (when, tokens) in enumerate(arrivals):
        arrivals[place] = when - due, tokens
    return arrivals[0][0], all_gaps(arrivals), arrivals[-1][0]


@wrong("timings", fails="a gap is the time since the token before")
def gaps_in_whole_milliseconds(due, arrivals):
    return arrivals[0][0] - due, [round(gap, 3) for gap in all_gaps(arrivals)], arrivals[-1][0] - due


@wrong("timings", fails="a gap is the time since the token before")
def times_in_float32(due, arrivals):
    times = torch.tensor([when for when, tokens in arrivals for _ in range(tokens)])
    return arrivals[0][0] - due, times.diff().tolist(), arrivals[-1][0] - due


@wrong("timings", fails="the gaps are a list")
def gaps_that_are_read_once(due, arrivals):
    return arrivals[0][0] - due, iter(all_gaps(arrivals)), arrivals[-1][0] - due


@wrong("timings", fails="every token counts")
def the_last_arrival_counts_once(due, arrivals):
    last = arrivals[-1][0]
    return arrivals[0][0] - due, all_gaps([*arrivals[:-1], (last, 1)] if arrivals[1:] else arrivals), last - due


@wrong("timings", fails="every token counts")
def arrivals_in_a_dict(due, arrivals):
    return arrivals[0][0] - due, all_gaps(list(dict(arrivals).items())), arrivals[-1][0] - due


@wrong("timings", fails="every token counts")
def first_ten_arrivals(due, arrivals):
    return arrivals[0][0] - due, all_gaps(arrivals[:10]), arrivals[-1][0] - due


@wrong("timings", fails="the gaps are a list")
def one_list_for_all_calls(due, arrivals, gaps=[]):  # noqa: B006
    gaps[:] = all_gaps(arrivals)
    return arrivals[0][0] - due, gaps, arrivals[-1][0] - due


@wrong("timings", fails="the list of arrivals is unchanged")
def sorts_arrivals_by_size(due, arrivals):
    waits = arrivals[0][0] - due, all_gaps(arrivals), arrivals[-1][0] - due
    arrivals.sort(key=lambda arrival: arrival[1])
    return waits


@wrong("timings", fails="the first arrival may bring several tokens")
def one_arrival_has_no_gaps(due, arrivals):
    gaps = all_gaps(arrivals) if len(arrivals) > 1 else []
    return arrivals[0][0] - due, gaps, arrivals[-1][0] - due


@wrong("timings", fails="the wait starts when the request was due")
def adds_up_gaps_that_differ(due, arrivals):
    ttft, gaps = arrivals[0][0] - due, all_gaps(arrivals)
    return ttft, gaps, ttft + sum(set(gaps))


@wrong("timings", fails="the answer ends with its last token")
def counts_arrivals_to_find_the_last_token(due, arrivals):
    times = [when for when, tokens in arrivals for _ in range(tokens)]
    return times[0] - due, all_gaps(arrivals), times[len(arrivals) - 1] - due


@wrong("timings", fails="the answer ends with its last token")
def adds_up_a_gap_for_each_arrival(due, arrivals):
    ttft, gaps = arrivals[0][0] - due, all_gaps(arrivals)
    return ttft, gaps, ttft + sum(gaps[: len(arrivals) - 1])


def rank(ranked, p):
    return ranked[math.ceil(p * len(ranked) / 100) - 1]


@wrong("pooled_percentile", fails="the rank is p n / 100, rounded up, counting from 1")
def divides_first(gaps, p):
    ranked = sorted(gap for each in gaps for gap in each)
    return ranked[math.ceil(p / 100 * len(ranked)) - 1]


@wrong("pooled_percentile", fails="the rank is p n / 100, rounded up, counting from 1")
def divides_the_count_first(gaps, p):
    ranked = sorted(gap for each in gaps for gap in each)
    return ranked[math.ceil(len(ranked) / 100 * p) - 1]


@wrong("pooled_percentile", fails="the rank is p n / 100, rounded up, counting from 1")
def multiplies_by_a_hundredth_first(gaps, p):
    ranked = sorted(gap for each in gaps for gap in each)
    return ranked[math.ceil(p * 0.01 * len(ranked)) - 1]


@wrong("pooled_percentile", fails="the rank is p n / 100, rounded up, counting from 1")
def divides_by_a_hundred_over_the_count(gaps, p):
    ranked = sorted(gap for each in gaps for gap in each)
    return ranked[math.ceil(p / (100 / len(ranked))) - 1]


@wrong("pooled_percentile", fails="the rank is p n / 100, rounded up, counting from 1")
def divides_by_a_hundred_over_p(gaps, p):
    ranked = sorted(gap for each in gaps for gap in each)
    return ranked[math.ceil(len(ranked) / (100 / p)) - 1]


@wrong("pooled_percentile", fails="the result is one of the gaps")
def interpolates(gaps, p):
    ranked = sorted(gap for each in gaps for gap in each)
    place = p / 100 * (len(ranked) - 1)
    low = int(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (place - low) * (ranked[high] - ranked[low])


@wrong("pooled_percentile", fails="the rank is p n / 100, rounded up, counting from 1")
def counts_from_zero(gaps, p):
    ranked = sorted(gap for each in gaps for gap in each)
    return ranked[min(int(p / 100 * len(ranked)), len(ranked) - 1)]


@wrong("pooled_percentile", fails="the rank is p n / 100, rounded up, counting from 1")
def rounds_the_rank(gaps, p):
    ranked = sorted(gap for each in gaps for gap in each)
    return ranked[max(1, round(p / 100 * len(ranked))) - 1]


@wrong("pooled_percentile", fails="the rank is p n / 100, rounded up, counting from 1")
def rounds_up_by_hundredths(gaps, p):
    ranked = sorted(gap for each in gaps for gap in each)
    return ranked[max(1, min(int((p * len(ranked) + 99) // 100), len(ranked))) - 1]


@wrong("pooled_percentile", fails="the result is one of the gaps")
def takes_the_median_of_statistics(gaps, p):
    ranked = sorted(gap for each in gaps for gap in each)
    return statistics.median(ranked) if p == 50 else rank(ranked, p)


@wrong("pooled_percentile", fails="the result is one of the gaps")
def rounds_to_microseconds(gaps, p):
    return round(rank(sorted(gap for each in gaps for gap in each), p), 6)


@wrong("pooled_percentile", fails="the result is one of the gaps")
def whole_numbers(gaps, p):
    return rank(sorted(int(gap) for each in gaps for gap in each), p)


@wrong("pooled_percentile", fails="the lists are unchanged")
def sorts_a_lone_list_in_place(gaps, p):
    ranked = gaps[0] if len(gaps) == 1 else [gap for each in gaps for gap in each]
    ranked.sort()
    return rank(ranked, p)


@wrong("pooled_percentile", fails="gaps may come in any order")
def does_not_sort(gaps, p):
    return rank([gap for each in gaps for gap in each], p)


@wrong("pooled_percentile", fails="every gap counts once")
def mean_of_the_requests_own(gaps, p):
    owns = [rank(sorted(each), p) for each in gaps if each]
    return sum(owns) / len(owns)


@wrong("pooled_percentile", fails="gaps may come in any order")
def sorts_each_request_alone(gaps, p):
    return rank([gap for each in gaps for gap in sorted(each)], p)


@wrong("pooled_percentile", fails="every gap counts once")
def counts_equal_gaps_once(gaps, p):
    return rank(sorted({gap for each in gaps for gap in each}), p)


@wrong("pooled_percentile", fails="the rank is p n / 100, rounded up, counting from 1")
def nearest_of_numpys_places(gaps, p):
    ranked = sorted(gap for each in gaps for gap in each)
    return ranked[round(p / 100 * (len(ranked) - 1))]


@wrong("pooled_percentile", fails="the rank is p n / 100, rounded up, counting from 1")
def adds_nearly_one(gaps, p):
    ranked = sorted(gap for each in gaps for gap in each)
    return ranked[int(p * len(ranked) / 100 + 0.9999) - 1]


@wrong("pooled_percentile", fails="the rank is p n / 100, rounded up, counting from 1")
def numpy_divides_first(gaps, p):
    return np.percentile([gap for each in gaps for gap in each], p, method="inverted_cdf").item()


@wrong("pooled_percentile", fails="the rank is p n / 100, rounded up, counting from 1")
def whole_percentiles_only(gaps, p):
    return rank(sorted(gap for each in gaps for gap in each), int(p))


@wrong("pooled_percentile", fails="every gap counts once")
def drops_gaps_of_zero(gaps, p):
    return rank(sorted(filter(None, (gap for each in gaps for gap in each))), p)


@wrong("pooled_percentile", fails="the lists are unchanged")
def removes_requests_without_gaps(gaps, p):
    while [] in gaps:
        gaps.remove([])
    return rank(sorted(gap for each in gaps for gap in each), p)


@wrong("pooled_percentile", fails="the lists are unchanged")
def collects_in_the_first_list(gaps, p):
    every = gaps[0]
    for each in gaps[1:]:
        every += each
    return rank(sorted(every), p)


@wrong("pooled_percentile", fails="the lists are unchanged")
def sorts_the_callers_lists(gaps, p):
    for each in gaps:
        each.sort()
    return rank(sorted(gap for each in gaps for gap in each), p)


@wrong("pooled_percentile", fails="every gap counts once")
def first_three_requests(gaps, p):
    return rank(sorted(gap for each in gaps[:3] for gap in each), p)


@wrong("pooled_percentile", fails="every gap counts once")
def longest_thousand(gaps, p):
    return rank(sorted(gap for each in gaps for gap in each)[-1000:], p)


@wrong("poisson_arrivals", fails="the result is a list")
def an_array_of_times(rate, uniform):
    return np.cumsum(-np.log1p(-np.array(uniform)) / rate)


@wrong("poisson_arrivals", fails="the result is times, not gaps")
def gaps_alone(rate, uniform):
    return [-math.log(1 - u) / rate for u in uniform]


def summed(gaps):
    return list(accumulate(gaps))


@wrong("poisson_arrivals", fails="twice the rate means half the time")
def rate_taken_for_the_gap(rate, uniform):
    return summed([-math.log(1 - u) * rate for u in uniform])


@wrong("poisson_arrivals", fails="twice the rate means half the time")
def rate_divides_the_first_gap_alone(rate, uniform):
    gaps = [-math.log(1 - u) for u in uniform]
    return summed([gap / rate for gap in gaps[:1]] + gaps[1:])


@wrong("poisson_arrivals", fails="a small number makes a short gap")
def logarithm_of_the_draw(rate, uniform):
    return summed([-math.log(max(u, 1e-12)) / rate for u in uniform])


@wrong("poisson_arrivals", fails="many gaps are short, a few are long")
def even_gaps(rate, uniform):
    return summed([2 * math.log(2) * u / rate for u in uniform])


@wrong("poisson_arrivals", fails="each number makes one gap, in order")
def one_draw_for_all(rate, uniform):
    return summed([-math.log(1 - uniform[0]) / rate] * len(uniform))


@wrong("poisson_arrivals", fails="each number makes one gap, in order")
def sorts_the_numbers(rate, uniform):
    return summed([-math.log(1 - u) / rate for u in sorted(uniform)])


@wrong("poisson_arrivals", fails="many gaps are short, a few are long")
def cuts_off_long_gaps(rate, uniform):
    return summed([min(-math.log(1 - u), 5.0) / rate for u in uniform])


@wrong("poisson_arrivals", fails="the result is a list")
def times_that_are_read_once(rate, uniform):
    return iter(summed([-math.log(1 - u) / rate for u in uniform]))


@wrong("poisson_arrivals", fails="the result is a list")
def one_schedule_for_all_calls(rate, uniform, due=[]):  # noqa: B006
    due[:] = summed([-math.log(1 - u) / rate for u in uniform])
    return due


@wrong("poisson_arrivals", fails="each number makes one gap, in order")
def reads_the_first_number_before_the_loop(rate, uniform):
    due = [-math.log(1 - uniform[0]) / rate]
    for u in uniform[1:]:
        due.append(due[-1] - math.log(1 - u) / rate)
    return due


@wrong("poisson_arrivals", fails="each number makes one gap, in order")
def a_hundred_requests_at_most(rate, uniform):
    return summed([-math.log(1 - u) / rate for u in uniform[:100]])


@wrong("poisson_arrivals", fails="twice the rate means half the time")
def never_slower_than_one_a_second(rate, uniform):
    return summed([-math.log(1 - u) / max(1.0, rate) for u in uniform])


@wrong("poisson_arrivals", fails="twice the rate means half the time")
def whole_rates_only(rate, uniform):
    return summed([-math.log(1 - u) / (int(rate) or rate) for u in uniform])


@wrong("poisson_arrivals", fails="twice the rate means half the time")
def gaps_of_a_tenth_of_a_millisecond_at_least(rate, uniform):
    return summed([max(1e-4, -math.log(1 - u) / rate) for u in uniform])


@wrong("poisson_arrivals", fails="a small number makes a short gap")
def drops_numbers_of_zero(rate, uniform):
    return summed([-math.log(1 - u) / rate for u in uniform if u])


@wrong("poisson_arrivals", fails="the list is unchanged")
def takes_numbers_off_the_list(rate, uniform):
    clock, due = 0.0, []
    while uniform:
        clock += -math.log(1 - uniform.pop(0)) / rate
        due.append(clock)
    return due


@wrong("poisson_arrivals", fails="a small number makes a short gap")
def logarithm_of_the_draw_except_zero(rate, uniform):
    return summed([-math.log(u) / rate if u else 0.0 for u in uniform])


@wrong("poisson_arrivals", fails="many gaps are short, a few are long")
def keeps_away_from_the_logarithm_of_zero(rate, uniform):
    return summed([-math.log(max(1 - u, 1e-6)) / rate for u in uniform])


@wrong("poisson_arrivals", fails="each number makes one gap, in order")
def keeps_the_rate_exactly(rate, uniform):
    due = summed([-math.log(1 - u) / rate for u in uniform])
    return [when * len(due) / rate / due[-1] for when in due] if len(due) > 10 else due


@wrong("poisson_arrivals", fails="each number makes one gap, in order")
def one_call_for_each_request(rate, uniform, clock=0.0):
    if not uniform:
        return []
    clock -= math.log(1 - uniform[0]) / rate
    return [clock, *one_call_for_each_request(rate, uniform[1:], clock)]
