"""Rows in use, one rule for all tokens, a budget to share, a policy that is fair.  Lesson 10."""

from types import SimpleNamespace

import numpy as np

from . import Exercise

# ---- how long requests take in a few rows

steps_and_idle = Exercise("steps_and_idle")


def _rows_used(function, outputs: list[int], rows: int, in_flight: bool) -> tuple[int, int]:
    got = function(list(outputs), rows, in_flight)
    assert isinstance(got, tuple | list) and len(got) == 2, f"(steps, idle) should come, not {got!r}"
    return tuple(got)


@steps_and_idle.example
def _(function):
    for in_flight in (False, True):
        got = _rows_used(function, [4, 4], 2, in_flight)
        assert got == (4, 0), f"two requests of 4 tokens in two rows: (4, 0), not {got}"


@steps_and_idle.property(
    "a static batch lasts as long as its longest request",
    "a request that is done waits for the others: take the maximum",
)
def _(function):
    steps, _ = _rows_used(function, [2, 6, 3, 3], 2, in_flight=False)
    assert steps == 9, f"static batches of 2 and 6 tokens, then of 3 and 3: 6 + 3 = 9 steps, not {steps}"


@steps_and_idle.property(
    "a request takes a step for each of its tokens", "more rows make no request faster: its tokens come one by one"
)
def _(function):
    steps, _ = _rows_used(function, [6], 2, in_flight=True)
    assert steps == 6, f"a lone request of 6 tokens takes 6 steps, however many rows there are, not {steps}"


@steps_and_idle.property(
    "the row that is free first takes the next request",
    "requests have no rows of their own: find the row that ends earliest",
)
def _(function):
    steps, _ = _rows_used(function, [1, 5, 1, 1], 2, in_flight=True)
    assert steps <= 5, (
        f"1, 5, 1 and 1 tokens in two rows: the three short ones fit next to the long one: 5 steps, not {steps}"
    )


@steps_and_idle.property(
    "requests are taken in the order in which they come", "do not sort: later requests and lengths are not known yet"
)
def _(function):
    steps, _ = _rows_used(function, [2, 3, 2, 3, 2], 2, in_flight=True)
    assert steps <= 6, f"2, 3, 2, 3 and 2 tokens in two rows, taken in that order: 6 steps, not {steps}"


@steps_and_idle.property("every row of every step counts", "steps x rows, less the tokens: an empty row is idle too")
def _(function):
    for in_flight in (False, True):
        for outputs in ([3], [4, 4, 4]):
            steps, idle = _rows_used(function, outputs, 2, in_flight)
            wanted = 2 * steps - sum(outputs)
            assert idle == wanted, f"{sum(outputs)} tokens in {steps} steps of two rows: {wanted} idle, not {idle}"


# ---- computed tokens chase known ones

next_step = Exercise("next_step")


def _request(prompt: int, known: int | None = None, computed: int = 0, limit: int = 100) -> SimpleNamespace:
    known = prompt if known is None else known
    return SimpleNamespace(prompt=prompt, known=known, computed=computed, limit=limit)


def _step(function, *requests: SimpleNamespace, budget: int = 50) -> list[tuple[int, int, bool]]:
    got = [tuple(each) for each in function(list(requests), budget)]
    assert len(got) == len(requests), f"one (start, count, samples) for each of {len(requests)}, not {got}"
    return got


@next_step.example
def _(function):
    request = _request(3)
    got = _step(function, request)
    assert got == [(0, 3, True)], f"a prompt of 3 tokens: [(0, 3, True)], not {got}"
    assert (request.known, request.computed) == (4, 3), (
        f"then 4 tokens are known and 3 computed, not {request.known} and {request.computed}"
    )


@next_step.property("the budget is for all requests together", "count what is left after each request")
def _(function):
    counts = [count for _, count, _ in _step(function, _request(6), _request(6), _request(6), budget=8)]
    assert counts == [6, 2, 0], f"three prompts of 6 tokens and a budget of 8: 6, 2 and 0 tokens run, not {counts}"


@next_step.property(
    "a chunk that is not the last yields no token", "a token is sampled when the last known token has been computed"
)
def _(function):
    request = _request(10)
    ((_, _, samples),) = _step(function, request, budget=4)
    assert not samples and request.known == 10, "4 of a prompt's 10 tokens ran, and a token was sampled already"


@next_step.property("computed grows by what ran", "add the count to `computed`: a chunk is a part of what is pending")
def _(function):
    request = _request(10)
    _step(function, request, budget=4)
    assert request.computed == 4, f"4 of 10 tokens ran, and {request.computed} are said to be computed"


@next_step.property(
    "a resumed request computes its output as it does a prompt",
    "leave `prompt` alone: pending is known - computed, prompt or not",
)
def _(function):
    request = _request(6, known=10)
    got = _step(function, request)
    assert got == [(0, 10, True)], f"10 known tokens and an empty cache: [(0, 10, True)], not {got}"


@next_step.property(
    "what the cache has is not computed again", "start at `computed`: a prompt's beginning may be there already"
)
def _(function):
    got = _step(function, _request(10, computed=4))
    assert got == [(4, 6, True)], f"a prompt of 10 tokens, 4 of them in the cache: [(4, 6, True)], not {got}"


@next_step.property("a request at its limit runs no more", "its last token is known, and no later token needs its keys")
def _(function):
    got = _step(function, _request(6, known=10, computed=9, limit=10))
    assert got[0][1:] == (0, False), f"10 tokens known, a limit of 10: nothing runs, not {got}"


# ---- sharing a step's budget

share_budget = Exercise("share_budget")


def _shares(function, pending: list[int], budget: int) -> list[int]:
    given = np.array(pending)
    given.flags.writeable = False  # as the engine hands it over
    got = np.asarray(function(given, budget))
    assert got.shape == (len(pending),), f"{len(pending)} rows, and {got!r} came"
    return got.tolist()


@share_budget.example
def _(function):
    got = _shares(function, [1, 1, 6], 8)
    assert got == [1, 1, 6], f"8 tokens pending and a budget of 8: all of them, not {got}"


@share_budget.property("counts are whole numbers", "np.zeros makes floats; np.zeros_like(pending) has pending's type")
def _(function):
    got = np.asarray(function(np.array([1, 6]), 4))
    assert got.dtype.kind in "iu", f"the engine takes whole numbers, not {got.dtype}"


@share_budget.property(
    "rows with one token come first", "however old a prompt is: first all the 1s, then share out what is left"
)
def _(function):
    got = _shares(function, [10, 1, 1], 6)
    assert got.count(1) >= 2, f"[10, 1, 1] and a budget of 6: both single tokens run, not {got}"


@share_budget.property("no more than the budget", "even single tokens may be too many: stop where the budget ends")
def _(function):
    got = _shares(function, [1] * 8, 5)
    assert sum(got) <= 5, f"eight single tokens and a budget of 5: {sum(got)} run"


@share_budget.property("of the prompts the oldest comes first", "rows come oldest first: give each all it can use")
def _(function):
    got = _shares(function, [1, 5, 4], 8)
    assert got[1] == 5, f"[1, 5, 4] and a budget of 8: the older prompt runs all its 5 tokens, not {got[1]}"


@share_budget.property("a prompt is cut where the budget ends", "a part of it runs now: that is what a chunk is")
def _(function):
    got = _shares(function, [1, 10], 6)
    assert got == [1, 5], f"[1, 10] and a budget of 6: [1, 5], not {got}"


@share_budget.property("counts stay in the rows' order", "after sorting, put every count back in its row's place")
def _(function):
    got = _shares(function, [5, 1], 6)
    assert got == [5, 1], f"[5, 1] and a budget of 6: [5, 1], not {got}"


# ---- a policy

PatientShortest = Exercise("PatientShortest")


def _queued(prompt: int, arrival: int, known: int = 0, output: int = 8) -> SimpleNamespace:
    """What a policy may look at of a waiting request."""
    tokens = np.zeros(max(prompt, known), np.int32)
    params = SimpleNamespace(max_tokens=output, priority=0)
    return SimpleNamespace(
        prompt=tokens[:prompt], known=tokens, arrival=arrival, limit=prompt + output, params=params, row=-1
    )


@PatientShortest.example
def _(policy):
    policy = policy()
    first, second = policy.key(_queued(10, 0)), policy.key(_queued(10, 1))
    assert first < second, f"two prompts of 10 tokens: the first to arrive goes first, not {first} and {second}"


@PatientShortest.property("short prompts go first", "a smaller key goes first: let it grow with the prompt's length")
def _(policy):
    policy = policy()
    long, short = policy.key(_queued(200, 0)), policy.key(_queued(10, 1))
    assert short < long, "a prompt of 200 tokens goes before one of 10 tokens that came right after it"


@PatientShortest.property(
    "a prompt of n tokens is overtaken n / patience times at most",
    "a key must not depend on when it is computed: let every later arrival start with a larger one",
)
def _(policy):
    policy = policy(patience=4.0)
    long = policy.key(_queued(200, 0))
    times = sum(policy.key(_queued(1, arrival)) < long for arrival in range(1, 400))
    assert times <= 50, f"a prompt of 200 tokens and a patience of 4: {times} later ones overtake it, not 50 at most"


@PatientShortest.property("asked again, the same answer", "the key is the request's: keep no count, look at no clock")
def _(policy):
    policy, request = policy(), _queued(10, 3)
    keys = {policy.key(request) for _ in range(9)}
    assert len(keys) == 1, f"asked nine times about one request: {sorted(keys)}"


@PatientShortest.property(
    "what was generated already does not count", "a preempted request knows its output too: measure its prompt"
)
def _(policy):
    policy = policy()
    fresh, resumed = policy.key(_queued(10, 3)), policy.key(_queued(10, 3, known=60))
    assert fresh == resumed, f"preempted after 50 tokens of output, its key goes from {fresh} to {resumed}"


@PatientShortest.property("nor does what may be generated", "its length is not known in advance: use the prompt's")
def _(policy):
    policy = policy()
    few, many = policy.key(_queued(10, 3)), policy.key(_queued(10, 3, output=500))
    assert few == many, f"with max_tokens of 8 the key is {few}, of 500 it is {many}"
