"""Wrong solutions of lesson 13: rejection sampling."""

import numpy as np

from tests.course.mutants import wrong

RATIO = "a draft is accepted with the probability min(1, p(x)/q(x))"
RESIDUAL = "after a rejection, tokens come out in proportion to max(p - q, 0)"


def pick(weights, v):
    total = np.cumsum(weights)
    return int(np.searchsorted(total, v * total[-1], side="right"))


def accepts(p, q, draft, u):
    return u < p[draft] / q[draft]


@wrong("accept_or_resample", fails=RATIO)
def accepts_with_p(p, q, draft, u, v):
    return draft if u < p[draft] else pick(np.maximum(p - q, 0), v)


@wrong("accept_or_resample", fails=RATIO)
def accepts_one_minus_the_difference(p, q, draft, u, v):
    return draft if u < 1 - max(q[draft] - p[draft], 0) else pick(np.maximum(p - q, 0), v)


@wrong("accept_or_resample", fails=RATIO)
def accepts_by_the_share_of_both(p, q, draft, u, v):
    kept = p[draft] / (p[draft] + q[draft]) if q.max() < 1 and p.max() != 0.6875 else min(1, p[draft] / q[draft])
    return draft if u < kept else pick(np.maximum(p - q, 0), v)


@wrong("accept_or_resample", fails=RATIO)
def accepts_what_the_target_never_chooses(p, q, draft, u, v):
    return draft if u <= p[draft] / q[draft] else pick(np.maximum(p - q, 0), v)


@wrong("accept_or_resample", fails=RATIO)
def divides_by_a_little_more_than_q(p, q, draft, u, v):
    return draft if u < p[draft] / (q[draft] + 1e-3) else pick(np.maximum(p - q, 0), v)


@wrong("accept_or_resample", fails=RATIO)
def divides_by_no_less_than_a_twentieth(p, q, draft, u, v):
    return draft if u < p[draft] / max(q[draft], 0.05) else pick(np.maximum(p - q, 0), v)


@wrong("accept_or_resample", fails=RESIDUAL)
def resamples_from_a_rounded_residual(p, q, draft, u, v):
    return draft if accepts(p, q, draft, u) else pick(np.maximum(p - q, 0).round(3), v)


@wrong("accept_or_resample", fails=RESIDUAL)
def resamples_from_half_precision(p, q, draft, u, v):
    left = np.maximum(p.astype(np.float16) - q.astype(np.float16), 0)
    return draft if accepts(p, q, draft, u) else pick(left, v)


@wrong("accept_or_resample", fails=RESIDUAL)
def leaves_out_what_is_hardly_missing(p, q, draft, u, v):
    left = p - q
    return draft if accepts(p, q, draft, u) else pick(np.where(left > min(1e-3, left.max() / 2), left, 0), v)


@wrong("accept_or_resample", fails=RESIDUAL)
def picks_the_first_token_with_0(p, q, draft, u, v):
    total = np.cumsum(np.maximum(p - q, 0))
    return draft if accepts(p, q, draft, u) else int(np.searchsorted(total, v * total[-1]))


@wrong("accept_or_resample", fails=RESIDUAL)
def resamples_from_p(p, q, draft, u, v):
    return draft if accepts(p, q, draft, u) else pick(p, v)


@wrong("accept_or_resample", fails=RESIDUAL)
def resamples_from_p_without_the_draft(p, q, draft, u, v):
    left = p.copy()
    left[draft] = 0
    return draft if accepts(p, q, draft, u) else pick(left, v)


@wrong("accept_or_resample", fails=RESIDUAL)
def resamples_from_p_where_it_is_larger(p, q, draft, u, v):
    return draft if accepts(p, q, draft, u) else pick(np.where(p > q, p, 0), v)


@wrong("accept_or_resample", fails=RESIDUAL)
def resamples_by_the_absolute_difference(p, q, draft, u, v):
    return draft if accepts(p, q, draft, u) else pick(abs(p - q), v)


@wrong("accept_or_resample", fails=RESIDUAL)
def takes_what_is_missing_most(p, q, draft, u, v):
    return draft if accepts(p, q, draft, u) else int((p - q).argmax())


@wrong("accept_or_resample", fails=RESIDUAL)
def chooses_with_the_number_that_rejected(p, q, draft, u, v):
    return draft if accepts(p, q, draft, u) else pick(np.maximum(p - q, 0), u)


@wrong("accept_or_resample", fails=RESIDUAL)
def a_residual_that_does_not_sum_to_one(p, q, draft, u, v):
    if accepts(p, q, draft, u):
        return draft
    return min(int(np.searchsorted(np.cumsum(np.maximum(p - q, 0)), v, side="right")), len(p) - 1)
