"""Wrong solutions of lesson 10: static and in-flight batching, one rule for all tokens."""

import heapq

import numpy as np

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
def batches_end_with_their_last_request(outputs, rows, in_flight):
    batches = [outputs[first : first + rows] for first in range(0, len(outputs), rows)]
    steps = _in_flight(outputs, rows) if in_flight else sum(batch[-1] for batch in batches)
    return _with_idle(steps, outputs, rows)


@wrong("steps_and_idle", fails="no requests take no steps")
def needs_a_request_in_flight(outputs, rows, in_flight):
    if not in_flight:
        return _with_idle(_static(outputs, rows), outputs, rows)
    ends = []
    for tokens in outputs:
        ends = sorted(ends)
        ends = [*ends, tokens] if len(ends) < rows else [ends[0] + tokens, *ends[1:]]
    return _with_idle(max(ends), outputs, rows)


@wrong("steps_and_idle", fails="no requests take no steps")
def one_batch_at_least(outputs, rows, in_flight):
    steps = _in_flight(outputs, rows) if in_flight else _static(outputs, rows)
    return _with_idle(max(steps, 1), outputs, rows)


@wrong("steps_and_idle", fails="any number of rows")
def steps_are_a_float(outputs, rows, in_flight):
    steps = _in_flight(outputs, rows) if in_flight else _static(outputs, rows)
    return _with_idle(float(steps), outputs, rows)


@wrong("steps_and_idle", fails="a request takes one step for each of its tokens")
def tokens_divided_by_rows(outputs, rows, in_flight):
    steps = -(-sum(outputs) // rows) if in_flight else _static(outputs, rows)
    return _with_idle(steps, outputs, rows)


@wrong("steps_and_idle", fails="the next request takes the row that becomes free first")
def rows_assigned_round_robin(outputs, rows, in_flight):
    steps = max(sum(outputs[row::rows]) for row in range(rows)) if in_flight else _static(outputs, rows)
    return _with_idle(steps, outputs, rows)


@wrong("steps_and_idle", fails="requests are taken in the order given")
def longest_first(outputs, rows, in_flight):
    steps = _in_flight(sorted(outputs, reverse=True), rows) if in_flight else _static(outputs, rows)
    return _with_idle(steps, outputs, rows)


@wrong("steps_and_idle", fails="every row counts in every step")
def unused_rows_are_not_counted(outputs, rows, in_flight):
    if in_flight:
        return _with_idle(_in_flight(outputs, rows), outputs, rows)
    batches = [outputs[first : first + rows] for first in range(0, len(outputs), rows)]
    return _static(outputs, rows), sum(max(batch) - tokens for batch in batches for tokens in batch)


@wrong("steps_and_idle", fails="the last static batch may be smaller than the others")
def an_incomplete_batch_is_dropped(outputs, rows, in_flight):
    if in_flight:
        return _with_idle(_in_flight(outputs, rows), outputs, rows)
    batches = zip(*(outputs[row::rows] for row in range(rows)), strict=False) if len(outputs) > rows else [outputs]
    return _with_idle(sum(max(batch, default=0) for batch in batches), outputs, rows)


@wrong("steps_and_idle", fails="any number of rows")
def two_rows_in_flight(outputs, rows, in_flight):
    return _with_idle(_in_flight(outputs, 2) if in_flight else _static(outputs, rows), outputs, rows)


@wrong("steps_and_idle", fails="a request takes one step for each of its tokens")
def the_longest_or_the_mean_row(outputs, rows, in_flight):
    steps = max(*outputs, -(-sum(outputs) // rows), 0) if in_flight else _static(outputs, rows)
    return _with_idle(steps, outputs, rows)


@wrong("steps_and_idle", fails="the last static batch may be smaller than the others")
def batches_of_equal_size(outputs, rows, in_flight):
    batches = np.array_split(outputs, max(-(-len(outputs) // rows), 1))
    steps = _in_flight(outputs, rows) if in_flight else int(sum(max(batch, default=0) for batch in batches))
    return _with_idle(steps, outputs, rows)


@wrong("steps_and_idle", fails="the list stays as it is")
def last_batch_is_filled_up(outputs, rows, in_flight):
    total = sum(outputs)
    while len(outputs) % rows:
        outputs.append(0)
    if in_flight:
        ends = [0] * rows
        for tokens in outputs:
            heapq.heapreplace(ends, ends[0] + tokens)
        steps = max(ends)
    else:
        steps = sum(max(outputs[start : start + rows]) for start in range(0, len(outputs), rows))
    return steps, steps * rows - total


@wrong("steps_and_idle", fails="the list stays as it is")
def requests_are_popped(outputs, rows, in_flight):
    steps, total, ends = 0, sum(outputs), [0] * rows
    while outputs:
        if in_flight:
            heapq.heapreplace(ends, ends[0] + outputs.pop(0))
        else:
            steps += max(outputs[:rows])
            del outputs[:rows]
    steps += max(ends)
    return steps, steps * rows - total


@wrong("steps_and_idle", fails="a request takes one step for each of its tokens")
def the_first_row_ends_last(outputs, rows, in_flight):
    ends = [0] * rows
    for tokens in outputs:
        ends[ends.index(min(ends))] += tokens
    return _with_idle(ends[0] if in_flight else _static(outputs, rows), outputs, rows)


@wrong("steps_and_idle", fails="a request takes one step for each of its tokens")
def the_last_request_ends_last(outputs, rows, in_flight):
    ends, row = [0] * rows, 0
    for tokens in outputs:
        row = ends.index(min(ends))
        ends[row] += tokens
    return _with_idle(ends[row] if in_flight else _static(outputs, rows), outputs, rows)


@wrong("steps_and_idle", fails="the next request takes the row that becomes free first")
def round_robin_from_five_rows_on(outputs, rows, in_flight):
    if in_flight and rows > 4:
        return _with_idle(max(sum(outputs[row::rows]) for row in range(rows)), outputs, rows)
    return _with_idle(_in_flight(outputs, rows) if in_flight else _static(outputs, rows), outputs, rows)


@wrong("steps_and_idle", fails="a request takes one step for each of its tokens")
def at_most_a_hundred_steps_in_flight(outputs, rows, in_flight):
    free, waiting, steps = [0] * rows, list(outputs), 0
    if not in_flight:
        return _with_idle(_static(outputs, rows), outputs, rows)
    while (waiting or any(free)) and steps < 100:  # a guard against endless loops
        free = [left or (waiting.pop(0) if waiting else 0) for left in free]
        free = [max(left - 1, 0) for left in free]
        steps += 1
    return _with_idle(steps, outputs, rows)


@wrong("steps_and_idle", fails="any number of rows")
def at_most_eight_rows(outputs, rows, in_flight):
    way = _in_flight if in_flight else _static
    return _with_idle(way(outputs, min(rows, 8)), outputs, rows)


@wrong("steps_and_idle", fails="every row counts in every step")
def idle_as_if_there_were_two_rows(outputs, rows, in_flight):
    if not in_flight:
        return _with_idle(_static(outputs, rows), outputs, rows)
    ends = [0] * rows
    for tokens in outputs:
        heapq.heapreplace(ends, ends[0] + tokens)
    return max(ends), max(ends) - min(ends)


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


@wrong("next_step", fails="requests share one budget, in their order")
def a_budget_per_request(requests, budget):
    return [_take(request, min(_pending(request), budget)) for request in requests]


@wrong("next_step", fails="the chunk that ends at the last known token samples, and no other")
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


@wrong("next_step", fails="only `computed` and `known` change")
def the_answer_is_added_to_the_prompt(requests, budget):
    done = []
    for request in requests:
        done.append(_take(request, min(_pending(request), budget)))
        budget -= done[-1][1]
        request.prompt += done[-1][2]
    return done


@wrong("next_step", fails="only `computed` and `known` change")
def the_limit_counts_down(requests, budget):
    done = []
    for request in requests:
        done.append(_take(request, min(_pending(request), budget)))
        budget -= done[-1][1]
        if request.known == request.limit:
            request.limit = 0  # to mark it as done
    return done


@wrong("next_step", fails="requests share one budget, in their order")
def only_the_first_eight_requests(requests, budget):
    done = []
    for place, request in enumerate(requests):
        done.append(_take(request, min(_pending(request), budget) if place < 8 else 0))
        budget -= done[-1][1]
    return done


@wrong("next_step", fails="a resumed request computes prompt and answer in one go")
def prefill_and_decode_are_two_cases(requests, budget):
    done = []
    for request in requests:
        start, count = request.computed, 0
        if request.known < request.limit:
            count = min(request.prompt - start if start < request.prompt else 1, budget)
        budget -= count
        request.computed += count
        samples = count > 0 and request.computed == request.known
        request.known += samples
        done.append((start, count, samples))
    return done


@wrong("next_step", fails="a resumed request computes prompt and answer in one go")
def one_token_at_a_time_after_the_prompt(requests, budget):
    done = []
    for request in requests:
        pending = _pending(request)
        if request.computed >= request.prompt:
            pending = min(pending, 1)  # though a resumed request's earlier chunk may have ended within its answer
        done.append(_take(request, min(pending, budget)))
        budget -= done[-1][1]
    return done


@wrong("next_step", fails="a resumed request computes prompt and answer in one go")
def a_resumed_request_keeps_what_it_knows(requests, budget):
    done = []
    for request in requests:
        resumed = request.computed == 0 and request.known > request.prompt
        done.append(_take(request, min(_pending(request), budget)))
        budget -= done[-1][1]
        request.known -= resumed and done[-1][2]  # though it has sampled another token
    return done


@wrong("next_step", fails="the chunk that ends at the last known token samples, and no other")
def samples_once_the_prompt_is_computed(requests, budget):
    done = []
    for request in requests:
        start, count = request.computed, min(_pending(request), budget)
        budget -= count
        request.computed += count
        samples = count > 0 and request.computed >= request.prompt
        request.known += samples
        done.append((start, count, samples))
    return done


@wrong("next_step", fails="requests share one budget, in their order")
def decodes_before_prompts(requests, budget):
    done = {}
    for request in sorted(requests, key=_pending):
        done[id(request)] = _take(request, min(_pending(request), budget))
        budget -= done[id(request)][1]
    return [done[id(request)] for request in requests]


@wrong("next_step", fails="requests share one budget, in their order")
def decodes_cost_nothing(requests, budget):
    done = []
    for request in requests:
        done.append(_take(request, min(_pending(request), budget)))
        budget -= done[-1][1] if done[-1][1] > 1 else 0
    return done


@wrong("next_step", fails="cached tokens are not computed again")
def a_prompt_restarts_at_zero(requests, budget):
    done = []
    for request in requests:
        if request.known == request.prompt and budget >= request.prompt:
            request.computed = 0  # assumes that a request without output is new
        done.append(_take(request, min(_pending(request), budget)))
        budget -= done[-1][1]
    return done


@wrong("next_step", fails="a request runs until it knows `limit` tokens, and no longer")
def runs_past_the_limit(requests, budget):
    done = []
    for request in requests:
        done.append(_take(request, min(request.known - request.computed, budget)))
        budget -= done[-1][1]
    return done


@wrong("next_step", fails="a request runs until it knows `limit` tokens, and no longer")
def stops_one_token_early(requests, budget):
    done = []
    for request in requests:
        count = min(_pending(request), budget) if request.known < request.limit - 1 else 0
        done.append(_take(request, count))
        budget -= count
    return done


def _serve(requests, budget, samples_if):
    """The correct counts, with another rule for samples: (count, pending, budget of the step, samples so far)."""
    done, left = [], budget
    for request in requests:
        start, pending = request.computed, _pending(request)
        count = min(pending, left)
        left -= count
        request.computed += count
        samples = count > 0 and samples_if(count, pending, budget, sum(each[2] for each in done))
        request.known += samples
        done.append((start, count, samples))
    return done


@wrong("next_step", fails="the chunk that ends at the last known token samples, and no other")
def a_chunk_of_one_token_is_a_decode(requests, budget):
    return _serve(requests, budget, lambda count, pending, budget, before: count in (1, pending))


@wrong("next_step", fails="the chunk that ends at the last known token samples, and no other")
def samples_where_the_whole_budget_would_do(requests, budget):
    return _serve(requests, budget, lambda count, pending, budget, before: pending <= budget)


@wrong("next_step", fails="the chunk that ends at the last known token samples, and no other")
def one_sample_a_step(requests, budget):
    return _serve(requests, budget, lambda count, pending, budget, before: count == pending and not before)


@wrong("next_step", fails="the chunk that ends at the last known token samples, and no other")
def no_token_where_the_budget_is_used_up(requests, budget):
    return _serve(requests, budget, lambda count, pending, budget, before: count == pending < budget)


@wrong("next_step", fails="computed grows by what ran")
def computed_is_the_last_chunk(requests, budget):
    done = []
    for request in requests:
        start, pending = request.computed, _pending(request)
        count = min(pending, budget)
        budget -= count
        samples = 0 < count == pending
        request.computed = count if count else request.computed
        request.known += samples
        done.append((start, count, samples))
    return done


@wrong("next_step", fails="a request runs until it knows `limit` tokens, and no longer")
def a_done_request_uses_budget(requests, budget):
    done = []
    for request in requests:
        count = min(request.known - request.computed, budget)
        budget -= count
        done.append(_take(request, count if request.known < request.limit else 0))
    return done


@wrong("next_step", fails="a request runs until it knows `limit` tokens, and no longer")
def stops_at_a_done_request(requests, budget):
    done = []
    for request in requests:
        budget = 0 if request.known >= request.limit else budget
        done.append(_take(request, min(_pending(request), budget)))
        budget -= done[-1][1]
    return done


@wrong("next_step", fails="a request runs until it knows `limit` tokens, and no longer")
def a_done_request_computes_its_last_token(requests, budget):
    done = []
    for request in requests:
        done.append(_take(request, min(_pending(request), budget)))
        budget -= done[-1][1]
        if request.known >= request.limit:
            request.computed = request.known
    return done


@wrong("next_step", fails="a request runs until it knows `limit` tokens, and no longer")
def at_most_as_many_tokens_as_the_limit_leaves(requests, budget):
    done = []
    for request in requests:
        done.append(_take(request, min(_pending(request), request.limit - request.known, budget)))
        budget -= done[-1][1]
    return done


@wrong("next_step", fails="a request runs until it knows `limit` tokens, and no longer")
def the_last_token_is_never_known(requests, budget):
    done = []
    for request in requests:
        done.append(_take(request, min(_pending(request), budget)))
        budget -= done[-1][1]
        if done[-1][2] and request.known == request.limit:
            request.known -= 1
    return done
