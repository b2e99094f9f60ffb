"""Right but unusual solutions of lesson 13."""

from fractions import Fraction
from itertools import accumulate, takewhile

import numpy as np

from tests.course.unusual import right


@right("accepted")
def one_by_one(drafts, sampled):
    gained = []
    for draft, own in zip([*drafts, None], sampled, strict=True):
        gained.append(own)
        if draft != own:
            break
    return gained


@right("accepted")
def with_takewhile(drafts, sampled):
    pairs = zip(drafts, sampled, strict=False)
    right = [draft for draft, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return right + [sampled[len(right)]]


@right("accepted")
def with_arrays(drafts, sampled):
    equal = np.equal(np.array(drafts, int), np.array(sampled[:-1], int))
    return np.array(sampled)[: 1 + int(np.cumprod(equal).sum())].tolist()


@right("lookup")
def in_a_string(tokens, most, sizes=(8, 4, 2)):
    text = "".join(map(chr, tokens))
    for size in sizes:
        if size < len(text) and (at := text.rfind(text[-size:], 0, len(text) - 1)) >= 0:
            return [ord(each) for each in text[at + size : at + size + most]]
    return []


@right("lookup")
def with_a_dictionary(tokens, most, sizes=(8, 4, 2)):
    for size in sizes:
        after = {tuple(tokens[end - size : end]): end for end in range(size, len(tokens))}
        end = after.get(tuple(tokens[-size:]), len(tokens))
        if end < len(tokens):
            return list(tokens[end : end + most])
    return []


@right("lookup")
def with_windows(tokens, most, sizes=(8, 4, 2)):
    array = np.array(tokens)
    for size in sizes:
        if size < len(array):
            windows = np.lib.stride_tricks.sliding_window_view(array, size)
            places = np.flatnonzero((windows[:-1] == windows[-1]).all(1))
            if len(places):
                return array[places[-1] + size :][:most].tolist()
    return []


@right("best_count")
def in_fractions(p, step_ms):
    tokens = accumulate(Fraction(p) ** power for power in range(len(step_ms)))
    rates = [each / Fraction(ms) for each, ms in zip(tokens, step_ms, strict=True)]
    return rates.index(max(rates))


@right("best_count")
def with_cumsum(p, step_ms):
    return np.argmax(np.cumsum(np.power(float(p), range(len(step_ms)))) / step_ms)


@right("best_count")
def time_of_a_token(p, step_ms):
    def each(count):
        return step_ms[count] / (count + 1 if p == 1 else (1 - p ** (count + 1)) / (1 - p))

    return min(range(len(step_ms)), key=each)


@right("accept_or_resample")
def without_a_division(p, q, draft, u, v):
    if u * q[draft] < p[draft]:
        return draft
    left = (p - q).clip(min=0)
    left /= left.sum()
    return np.minimum((left.cumsum() <= v).sum(), np.flatnonzero(left)[-1])


@right("accept_or_resample")
def in_a_loop(p, q, draft, u, v):
    if p[draft] >= q[draft] or u < p[draft] / q[draft]:
        return draft
    left = v * sum(max(a - b, 0) for a, b in zip(p, q, strict=True))
    for token, (a, b) in enumerate(zip(p, q, strict=True)):
        left -= max(a - b, 0)
        if left < 0:
            return token
    return int(np.argmax(p - q))
