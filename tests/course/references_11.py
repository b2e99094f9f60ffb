"""Lesson 11's references: each solution compared with another way to compute the same."""

import numpy as np
import pytest

from tests.course.references import against


@against("choose_launch", cases=100)
def _(solution, rng):
    runs = {launch: [rng.choice((9.0, 9.7, 10.0, 11.0)) for _ in range(5)] for launch in range(rng.randint(1, 5))}
    medians = [float(np.median(each)) for each in runs.values()]
    margin = rng.choice((0.0, 0.025, 0.2))
    clear = min(medians) < (1 - margin) * medians[0]
    assert solution(runs, 0, margin) == (medians.index(min(medians)) if clear else 0)


@against("queued", cases=50)
def _(solution, rng):
    lengths = [rng.uniform(0, 9) for _ in range(rng.randint(0, 9))]
    asked = sorted(rng.uniform(0, 40) for _ in lengths)
    ends = [
        max(asked[first] + sum(lengths[first : last + 1]) for first in range(last + 1)) for last in range(len(asked))
    ]
    found = solution(asked, lengths)
    assert [end for _, end in found] == pytest.approx(ends)
    assert [end - start for start, end in found] == pytest.approx(lengths)


@against("choose_sizes", cases=30)
def _(solution, rng):
    sizes = sorted(rng.sample(range(1, 40), rng.randint(1, 7)))
    ms = {size: rng.uniform(1, 9) for size in sizes}
    counts = {rows: rng.randint(1, 9) for rows in rng.sample(range(1, sizes[-1] + 1), rng.randint(1, sizes[-1]))}
    most = rng.randint(1, 8)

    def least(above: int, left: int) -> float:
        """The least time of the batches of at most sizes[above] rows, of which sizes[above] is captured."""
        between = [sum(count for rows, count in counts.items() if low < rows <= sizes[above]) for low in (0, *sizes)]
        choices = [between[0] * ms[sizes[above]]]
        if left > 1:
            choices += [least(low, left - 1) + between[low + 1] * ms[sizes[above]] for low in range(above)]
        return min(choices)

    found = solution(counts, ms, most)
    took = sum(count * ms[min(size for size in found if size >= rows)] for rows, count in counts.items())
    assert len(found) <= most and took == pytest.approx(least(len(sizes) - 1, most))


@against("fair_pairs", cases=50)
def _(solution, rng):
    settings = {name: {fact: rng.randint(0, 1) for fact in "xyz"} for name in "abcd"[: rng.randint(1, 4)]}
    expected = [
        (first, second, next(iter(differ))[0])
        for first in settings
        for second in settings
        if first < second and len(differ := settings[first].items() - settings[second].items()) == 1
    ]
    assert solution(settings) == expected
