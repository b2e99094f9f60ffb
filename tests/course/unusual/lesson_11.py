"""Right but unusual solutions of lesson 11."""

from itertools import accumulate

import numpy as np

from minillm.course.lesson_11.graph_sizes import padded_ms
from tests.course.unusual import right


@right("choose_launch")
def with_arrays(runs, default, margin):
    names, medians = [*runs], np.array([np.median(each) for each in runs.values()])
    fastest = medians.argmin()
    return default if medians[fastest] >= (1 - margin) * medians[names.index(default)] else names[fastest]


@right("queued")
def accumulated(launched_us, kernel_us):
    def following(last, kernel):
        start = max(last[1], kernel[0])
        return [start, start + kernel[1]]

    return list(accumulate(zip(launched_us, kernel_us, strict=True), following, initial=[0, 0]))[1:]


@right("queued")
def from_the_last_start_that_waited_for_nothing(launched_us, kernel_us):
    ends = [
        max(launched_us[first] + sum(kernel_us[first : last + 1]) for first in range(last + 1))
        for last in range(len(kernel_us))
    ]
    return [(end - length, end) for end, length in zip(ends, kernel_us, strict=True)]


@right("choose_sizes")
def by_bits(counts, ms, most):
    sizes = sorted(ms)
    sets = ([size for place, size in enumerate(sizes) if bits >> place & 1] for bits in range(1 << len(sizes)))
    fitting = [each for each in sets if each and each[-1] == sizes[-1] and len(each) <= most]
    return min(fitting, key=lambda each: (padded_ms(each, counts, ms), len(each)))


@right("fair_pairs")
def later_settings_first(settings):
    found, names = [], list(settings)
    for later in reversed(range(len(names))):
        for earlier in range(later):
            one, other = settings[names[earlier]], settings[names[later]]
            differing = {fact for fact in one if one[fact] != other[fact]}
            if len(differing) == 1:
                found.append([names[earlier], names[later], differing.pop()])
    return found
