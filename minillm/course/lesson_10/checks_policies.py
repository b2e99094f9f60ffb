"""A budget to share, a fair policy.  Lesson 10."""

from numbers import Real
from types import SimpleNamespace

import numpy as np

from minillm.scheduler.policies import FirstComeFirstServed

from ..shared.checks import Exercise

SECONDS = 2  # of CPU time for one property: correct solutions take milliseconds

# ---- sharing a step's budget

share_budget = Exercise("share_budget", seconds=SECONDS)


def _pending(tokens: list[int]) -> np.ndarray:
    """As the engine passes it: read-only."""
    array = np.array(tokens, np.int32)
    array.flags.writeable = False
    return array


def _shares(function, pending: list[int], budget: int) -> list[int]:
    got = np.asarray(function(_pending(pending), budget))
    assert got.shape == (len(pending),), f"{len(pending)} rows need as many counts, not {got!r}"
    return got.tolist()


@share_budget.example
def _(function):
    got = _shares(function, [1, 1, 6], 8)
    assert got == [1, 1, 6], f"8 tokens pending and a budget of 8: [1, 1, 6], not {got}"


@share_budget.property("counts are whole numbers", "np.zeros makes floats; np.zeros_like(pending) has pending's type")
def _(function):
    kind = np.asarray(function(np.array([1, 6], np.int32), 4)).dtype
    assert kind.kind in "iu", f"the engine takes whole numbers, not {kind}"


@share_budget.property(
    "a large budget runs all that is pending, and no more", "how much of the budget can each prompt use?"
)
def _(function):
    for pending, budget in (([1, 5, 4], 20), ([1, 2, 3], 20), ([1, 300, 40_000], 60_000)):
        got = _shares(function, pending, budget)
        assert got == pending, f"{pending} and a budget of {budget}: {pending}, not {got}"
    got = _shares(function, [1] * 100 + [5] * 100, 700)
    assert got == [1] * 100 + [5] * 100, (
        f"100 single tokens, 100 prompts of 5 and a budget of 700: all 600 tokens run, not {sum(got)}"
    )


@share_budget.property(
    "rows with one token come first", "even before an older prompt: how much is left once they all have theirs?"
)
def _(function):
    got = _shares(function, [10, 1, 1], 6)
    assert got.count(1) >= 2, f"[10, 1, 1] and a budget of 6: both single tokens run, not {got}"
    got = _shares(function, [1, 1, 1, 10], 3)
    assert got[:3] == [1, 1, 1], f"[1, 1, 1, 10] and a budget of 3: all single tokens run, not {got}"


@share_budget.property(
    "the budget holds for single tokens too",
    "there may be more of them than the budget: the oldest go first, and prompts get nothing",
)
def _(function):
    got = _shares(function, [1] * 8, 5)
    assert got == [1] * 5 + [0] * 3, f"eight single tokens and a budget of 5: the first five run, not {got}"
    for budget in (3, 2):
        got = _shares(function, [10, 1, 1, 1], budget)
        assert sum(got) == budget and min(got) >= 0, (
            f"[10, 1, 1, 1] and a budget of {budget}: counts from 0 up, {budget} in all, not {got}"
        )


@share_budget.property("older prompts come before younger ones", "rows come oldest first: give each all it can use")
def _(function):
    got = _shares(function, [1, 5, 4], 8)
    assert got[1] == 5, f"[1, 5, 4] and a budget of 8: the older prompt runs all its 5 tokens, not {got[1]}"
    got = _shares(function, [1, 4, 5], 8)
    assert got[1] == 4, f"[1, 4, 5] and a budget of 8: the older prompt runs all its 4 tokens, not {got[1]}"
    got = _shares(function, [9, 2], 9)
    assert got == [9, 0], f"[9, 2] and a budget of 9: a short prompt is still a prompt, so [9, 0], not {got}"


@share_budget.property("a prompt is cut where the budget ends", "part of it runs now: that is a chunk")
def _(function):
    got = _shares(function, [1, 10, 10], 6)
    assert got == [1, 5, 0], f"[1, 10, 10] and a budget of 6: [1, 5, 0], not {got}"
    got = _shares(function, [1, 10], 6)
    assert got == [1, 5], f"[1, 10] and a budget of 6: [1, 5], not {got}"
    got = _shares(function, [1, 10], 2)
    assert got == [1, 1], f"[1, 10] and a budget of 2: one token is left for the prompt, so [1, 1], not {got}"
    got = _shares(function, [10], 6)
    assert got == [6], f"a single row, [10], and a budget of 6: [6], not {got}"
    got = _shares(function, [1, 1, 6], 7)
    assert got == [1, 1, 5], f"[1, 1, 6] and a budget of 7: one token must wait, so [1, 1, 5], not {got}"
    got = _shares(function, [3, 3, 3], 8)
    assert got == [3, 3, 2], f"[3, 3, 3] and a budget of 8: the youngest prompt runs the 2 tokens left, not {got}"
    got = _shares(function, [1, 100], 60)
    assert got == [1, 59], f"[1, 100] and a budget of 60: the prompt runs the 59 tokens that are left, not {got}"


@share_budget.property("counts stay in the rows' order", "if you sort, put each count back in its own row's place")
def _(function):
    got = _shares(function, [5, 1, 1], 7)
    assert got == [5, 1, 1], f"[5, 1, 1] and a budget of 7: [5, 1, 1], not {got}"
    got = _shares(function, [5, 1] * 20, 70)[::2]
    assert got == sorted(got, reverse=True), (
        f"[5, 1] twenty times and a budget of 70: an older prompt gets at least as much as a younger one, not {got} "
        "(np.argsort keeps the order of equal entries only with kind='stable')"
    )


@share_budget.property(
    "an earlier answer stays as it is", "make a new array in each call: the caller may still hold the last one"
)
def _(function):
    first = function(_pending([1, 1, 6]), 8)
    before = np.asarray(first).tolist()
    function(_pending([9, 1, 1]), 4)
    after = np.asarray(first).tolist()
    assert after == before, f"it returned {before}; after another call the same array says {after}"


# ---- a policy

PatientShortest = Exercise("PatientShortest", seconds=SECONDS)


def _queued(prompt: int, arrival: int, known: int = 0, output: int = 8) -> SimpleNamespace:
    """Return what a policy may look at of a waiting request."""
    tokens = np.zeros(max(prompt, known), np.int32)
    params = SimpleNamespace(max_tokens=output, priority=0)
    return SimpleNamespace(
        prompt=tokens[:prompt], known=tokens, arrival=arrival, limit=prompt + output, params=params, row=-1
    )


def _key(policy, request: SimpleNamespace) -> float:
    assert isinstance(key := policy.key(request), Real), f"a key must be a number, not {key!r}"
    return float(key)


def _overtaken(policy, prompt: int, arrival: int = 0) -> int:
    """Return how many of the next 400 prompts, of one token each, go before a prompt of so many."""
    first = _key(policy, _queued(prompt, arrival))
    return sum(_key(policy, _queued(1, arrival + later)) < first for later in range(1, 401))


@PatientShortest.example
def _(policy):
    policy = policy()
    first, second = (_key(policy, _queued(10, arrival)) for arrival in (0, 1))
    assert first < second, (
        f"two prompts of 10 tokens: the first to arrive has the smaller key, not {first} and {second}"
    )


@PatientShortest.property(
    "short prompts go first while patience lasts", "what does the key of a prompt have to grow with, and how fast?"
)
def _(policy):
    cases = ((policy(patience=4.0), "a patience of 4", 0), (policy(), "the default patience, 4", 999_900))
    for one, patience, arrival in cases:
        times = _overtaken(one, 200, arrival)
        assert times >= 48, (
            f"arrival {arrival}, a prompt of 200 tokens, {patience}: 49 later prompts of one token go before it, "
            f"not {times}"
        )
    times = _overtaken(policy(), 9)
    assert times >= 1, f"a prompt of 9 tokens, a patience of 4: a later prompt of one token goes before it, not {times}"
    older, younger = (_key(policy(), _queued(*each)) for each in ((15, 0), (8, 1)))
    assert younger < older, (
        "a prompt of 15 tokens, then one of 8, a patience of 4: 7 tokens less are more than one arrival counts, so the "
        f"second has the smaller key, not {older:g} and {younger:g}"
    )
    times = _overtaken(policy(patience=100.0), 20_000)
    assert times >= 198, (
        f"a prompt of 20,000 tokens, a patience of 100: 199 later prompts of one token go before it, not {times}"
    )


@PatientShortest.property(
    "a prompt of n tokens is overtaken at most n / patience times",
    "a later request must start with a larger key: larger by how much?",
)
def _(policy):
    engines = {patience: policy(patience=patience) for patience in (4.0, 20.0, 2.5, 1.0)}  # all at the same time
    for patience, one in engines.items():
        times, most = _overtaken(one, 200), int(200 / patience)
        assert times <= most, (
            f"a prompt of 200 tokens, a patience of {patience:g}: {times} later ones go before it, not {most} at most"
        )
    one = policy()
    first, _, third = (_key(one, _queued(*each)) for each in ((7, 0), (1, 1), (1, 2)))
    assert third > first, (
        "a prompt of 7 tokens, a patience of 4: one later request may go before it, so a prompt of one token that "
        f"arrives two later has a larger key, not {first:g} and {third:g}"
    )
    times = _overtaken(policy(), 200, arrival=999_900)
    assert times <= 50, (
        f"arrival 999900, a prompt of 200 tokens, the default patience: {times} later ones go before it, not 50 at most"
    )


@PatientShortest.property("asking again gives the same key", "keep no count, look at no clock and at no other request")
def _(policy):
    policy, request = policy(), _queued(10, 3)
    keys = set()
    for number in range(9):
        keys.add(_key(policy, request))
        _key(policy, _queued(20 + number, 4 + number))
    assert len(keys) == 1, f"asked nine times about one request: {sorted(keys)}"


@PatientShortest.property(
    "generated tokens do not count", "a preempted request also knows part of its answer: measure its prompt"
)
def _(policy):
    policy = policy()
    fresh, resumed = (_key(policy, _queued(10, 3, known=known)) for known in (10, 60))
    assert fresh == resumed, f"preempted after 50 tokens of output, its key goes from {fresh:g} to {resumed:g}"


@PatientShortest.property("the limit of the answer does not count", "an answer may end early: use the prompt alone")
def _(policy):
    policy = policy()
    few, many = (_key(policy, _queued(10, 3, output=output)) for output in (8, 500))
    assert few == many, f"with max_tokens of 8 the key is {few:g}, with 500 it is {many:g}"


@PatientShortest.property(
    "it decides about the order alone", "`admits`, `share` and `fair` are inherited: the class only needs its own `key`"
)
def _(policy):
    assert isinstance(policy, type), "PatientShortest must stay a class: the notebook derives another one from it"
    policy, engines = policy(), FirstComeFirstServed()
    _key(policy, _queued(10, 0))  # a stub has no order to decide about
    for running in (0, 2, 2, 1):
        assert policy.admits(running), f"admits({running}): requests may join at any step, so True"
    for pending, budget in (([1, 1, 6], 8), ([6, 1, 1], 4), ([9, 9], 4), ([3], 1)):
        wanted, got = (each.share(_pending(pending), budget) for each in (engines, policy))
        assert np.array_equal(got, wanted), f"share({pending}, {budget}): {wanted.tolist()}, not {got}"
    assert policy.fair, "`fair` is the promise that no request waits forever, and this policy keeps it"
