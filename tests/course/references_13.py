"""What lesson 13's solutions are compared with."""

from fractions import Fraction

import numpy as np

from minillm.runner.launched import agreed
from minillm.scheduler.step import Step
from minillm.speculation.ngram import NgramIndex
from tests.course.references import against


@against("accepted", cases=100)
def _(solution, rng):
    count = rng.randint(0, 7)
    drafts = [rng.randrange(3) for _ in range(count)]
    sampled = [each if rng.random() < 0.8 else rng.randrange(3) for each in drafts] + [rng.randrange(3)]
    row = np.zeros(1, np.int32)
    step = Step(1, row, row, row + 1 + count, np.ones(1, bool), 1, 1 + count)
    step.drafts = np.array([drafts], np.int32) if drafts else None
    assert [solution(list(drafts), list(sampled))] == agreed(step, np.array(sampled)).known()


@against("lookup", cases=200)
def _(solution, rng):
    tokens = [rng.randrange(rng.choice((2, 4, 9))) for _ in range(rng.randint(1, 40))]
    most = rng.randint(1, 9)
    mine, theirs = solution(list(tokens), most), NgramIndex().continuation(np.array(tokens), most)
    assert mine == theirs[: len(mine)] and bool(mine) == bool(theirs)
    assert len(mine) == most or mine == tokens[len(tokens) - len(mine) :], "the engine goes on in a circle"


@against("best_count", cases=100)
def _(solution, rng):
    p, ms = Fraction(rng.randint(0, 8), 8), [Fraction(rng.randint(8, 40), 8) for _ in range(rng.randint(1, 9))]
    rates = [sum(p**power for power in range(count + 1)) / each for count, each in enumerate(ms)]
    assert rates[solution(float(p), [float(each) for each in ms])] == max(rates)
