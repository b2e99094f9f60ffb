"""Rows in use, one rule for every token, a budget to share, a fair policy.  Lesson 10."""

import inspect
from dataclasses import dataclass
from numbers import Real
from types import SimpleNamespace

import numpy as np

from minillm.scheduler.policies import FirstComeFirstServed

from . import Exercise

SECONDS = 5  # of CPU time for one property: correct solutions take milliseconds

# ---- how long requests take in a few rows

steps_and_idle = Exercise("steps_and_idle", seconds=SECONDS)


def _rows_used(function, outputs: list[int], rows: int, in_flight: bool) -> tuple[int, int]:
    got = function(list(outputs), rows, in_flight)
    assert isinstance(got, tuple | list) and len(got) == 2, f"it must return (steps, idle), not {got!r}"
    return tuple(got)


def _way(in_flight: bool) -> str:
    return "in flight" if in_flight else "in static batches"


@steps_and_idle.example
def _(function):
    for in_flight in (False, True):
        got = _rows_used(function, [4, 4], 2, in_flight)
        assert got == (4, 0), f"two requests of 4 tokens in two rows, {_way(in_flight)}: (4, 0), not {got}"


@steps_and_idle.property(
    "a static batch lasts as long as its longest request",
    "a request that is done waits for the others in its batch",
)
def _(function):
    steps, _ = _rows_used(function, [6, 2, 3, 3], 2, in_flight=False)
    assert steps == 9, f"static batches of 6 and 2 tokens, then of 3 and 3: 6 + 3 = 9 steps, not {steps}"


@steps_and_idle.property(
    "the last static batch may be smaller than the others",
    "what happens if the number of requests is not a multiple of the rows?",
)
def _(function):
    steps, _ = _rows_used(function, [2, 6, 3], 2, in_flight=False)
    assert steps == 9, f"static batches of 2 and 6 tokens, then of 3 alone: 6 + 3 = 9 steps, not {steps}"
    steps, _ = _rows_used(function, [1, 5, 5, 1], 3, in_flight=False)
    assert steps == 6, f"three rows, static batches of 1, 5 and 5 tokens, then of 1 alone: 5 + 1 = 6 steps, not {steps}"


@steps_and_idle.property(
    "a request takes one step for each of its tokens", "a request has one row: two rows cannot share its tokens"
)
def _(function):
    steps, _ = _rows_used(function, [6], 2, in_flight=True)
    assert steps == 6, f"a single request of 6 tokens takes 6 steps, however many rows there are, not {steps}"
    steps, _ = _rows_used(function, [2, 2, 2], 2, in_flight=True)
    assert steps == 4, f"2, 2, 2 tokens in two rows, in flight: the third request ends after 4 steps, not {steps}"
    steps, _ = _rows_used(function, [2, 6], 2, in_flight=True)
    assert steps == 6, f"2, 6 tokens in two rows, in flight: the second request ends after 6 steps, not {steps}"


@steps_and_idle.property(
    "the next request takes the row that is free first",
    "no request is tied to a row in advance: which row ends earliest?",
)
def _(function):
    for outputs, wanted in (([1, 3, 1, 1], 3), ([3, 1, 1, 1], 3), ([2, 2, 2, 2], 4)):
        steps, _ = _rows_used(function, outputs, 2, in_flight=True)
        listed = ", ".join(map(str, outputs))
        assert steps == wanted, f"{listed} tokens in two rows, in flight: {wanted} steps, not {steps}"


@steps_and_idle.property(
    "requests are taken in the order given", "do not sort: a server knows neither later requests nor lengths"
)
def _(function):
    for outputs, in_flight, wanted in (([2, 3, 2, 3, 2], True, 6), ([1, 6, 1, 6], False, 12)):
        steps, _ = _rows_used(function, outputs, 2, in_flight)
        listed = ", ".join(map(str, outputs))
        assert steps == wanted, f"{listed} tokens in two rows, {_way(in_flight)}: {wanted} steps, not {steps}"


@steps_and_idle.property("every row counts in every step", "steps x rows, minus the tokens: an empty row is idle too")
def _(function):
    for in_flight in (False, True):
        for outputs in ([3], [4, 4, 4]):
            steps, idle = _rows_used(function, outputs, 2, in_flight)
            wanted = 2 * steps - sum(outputs)
            assert idle == wanted, (
                f"{sum(outputs)} tokens in {steps} steps of two rows, {_way(in_flight)}: {wanted} idle, not {idle}"
            )


@steps_and_idle.property("any number of rows", "where does your code use `rows`?")
def _(function):
    cases = (([1, 2, 3, 3, 2, 1], 3, True), ([2] * 6, 3, False), ([2, 2], 1, True), ([2, 2], 1, False))
    for outputs, rows, in_flight in cases:
        got = _rows_used(function, outputs, rows, in_flight)
        listed = ", ".join(map(str, outputs))
        assert got == (4, 0), f"{listed} tokens with rows={rows}, {_way(in_flight)}: (4, 0), not {got}"
    for in_flight in (False, True):
        got = _rows_used(function, [4] * 96, 32, in_flight)
        assert got == (12, 0), f"96 requests of 4 tokens with rows=32, {_way(in_flight)}: (12, 0), not {got}"


@steps_and_idle.property("the list stays as it is", "the caller still needs `outputs`: work on a copy")
def _(function):
    for in_flight in (False, True):
        outputs = [4, 4]
        function(outputs, 2, in_flight)
        assert outputs == [4, 4], f"it was given [4, 4], {_way(in_flight)}, and left {outputs}"


# ---- computed tokens chase known ones

next_step = Exercise("next_step", seconds=SECONDS)


@dataclass
class Running:
    """As in the notebook, for a function that comes without a class of this name."""

    prompt: int
    known: int
    computed: int
    limit: int


def _maker(function):
    """A function that makes requests of the candidate's own class: it may have grown properties and methods."""
    own = getattr(inspect.unwrap(function), "__globals__", {}).get("Running", Running)

    def request(prompt: int, known: int | None = None, computed: int = 0, limit: int = 10_000):
        values = {"prompt": prompt, "known": prompt if known is None else known, "computed": computed, "limit": limit}
        try:
            return own(**values)
        except TypeError:  # fields that the notebook's class does not have
            return Running(**values)

    return request


def _step(function, *requests, budget: int = 50) -> list[tuple[int, int, bool]]:
    given = list(requests)
    answer = function(given, budget)
    assert isinstance(answer, list | tuple), f"it must return a list of (start, count, samples), not {answer!r}"
    got = [tuple(each) for each in answer]
    assert len(got) == len(requests) and all(len(each) == 3 for each in got), (
        f"for {len(requests)} request(s) it must return {len(requests)} x (start, count, samples), not {got}"
    )
    assert [id(each) for each in given] == [id(each) for each in requests], (
        "the list of requests must stay as it is: update the requests in it"
    )
    return got


@next_step.example
def _(function):
    request = _maker(function)(3)
    got = _step(function, request)
    assert got == [(0, 3, True)], f"a prompt of 3 tokens: [(0, 3, True)], not {got}"
    assert (request.known, request.computed) == (4, 3), (
        f"then 4 tokens are known and 3 computed, not {request.known} and {request.computed}"
    )


@next_step.property(
    "requests share one budget, in their order", "the oldest takes what it can use; how much is left for the next?"
)
def _(function):
    new = _maker(function)

    def decode():
        return new(6, known=7, computed=6)

    cases = (
        ("three prompts of 6 tokens", [new(6), new(6), new(6)], 8, [6, 2, 0]),
        ("a prompt of 6 tokens, then a decode", [new(6), decode()], 6, [6, 0]),
        ("a decode, then a prompt of 6 tokens", [decode(), new(6)], 6, [1, 5]),
        ("two decodes", [decode(), decode()], 1, [1, 0]),
        ("prompts of 500 and of 700 tokens", [new(500), new(700)], 1100, [500, 600]),
    )
    for what, requests, budget, wanted in cases:
        counts = [count for _, count, _ in _step(function, *requests, budget=budget)]
        assert counts == wanted, f"{what}, and a budget of {budget}: the counts are {wanted}, not {counts}"
    counts = [count for _, count, _ in _step(function, *[new(6) for _ in range(40)], budget=200)]
    assert counts == [6] * 33 + [2] + [0] * 6, (
        f"40 prompts of 6 tokens, and a budget of 200: 33 run whole and the next runs 2 tokens, not {counts}"
    )


@next_step.property(
    "the chunk that ends at the last known token samples, and no other",
    "is anything of this request still pending after the chunk? The other requests do not matter",
)
def _(function):
    new = _maker(function)

    def decode():
        return new(6, known=7, computed=6)

    cases = (
        ("a prompt of 10 tokens", [new(10)], 4),
        ("a prompt of 6 tokens", [new(6)], 1),
        ("a prompt of 6 tokens", [new(6)], 6),
        ("10 known tokens, 6 of them the prompt, and an empty cache", [new(6, known=10)], 9),
        ("two prompts of 6 tokens", [new(6), new(6)], 8),
        ("two decodes", [decode(), decode()], 8),
    )
    for what, requests, budget in cases:
        before = [(request.known, request.known - request.computed) for request in requests]
        got = _step(function, *requests, budget=budget)
        for request, (known, pending), (_, count, samples) in zip(requests, before, got, strict=True):
            wanted = 0 < count == pending
            assert bool(samples) == wanted, (
                f"{what}, and a budget of {budget}: {count} of {pending} pending tokens run, and `samples` is {samples}"
            )
            assert request.known == known + wanted, (
                f"{what}, and a budget of {budget}: `known` goes from {known} to {request.known}, "
                f"and {'one token' if wanted else 'no token'} was sampled"
            )


@next_step.property("computed grows by what ran", "a chunk is only a part of what is pending")
def _(function):
    new = _maker(function)
    for request, budget in ((new(10), 4), (new(10, computed=4), 3)):
        before = request.computed
        _step(function, request, budget=budget)
        assert request.computed == before + budget, (
            f"{before} of 10 tokens were computed and {budget} ran, but `computed` is {request.computed}"
        )


@next_step.property(
    "only `computed` and `known` change", "`prompt` and `limit` say what was asked for; a step does not change them"
)
def _(function):
    new = _maker(function)
    for what, request in (
        ("a prompt of 6 tokens", new(6, limit=12)),
        ("a decode", new(6, known=7, computed=6, limit=12)),
        ("a decode that ends its answer", new(6, known=11, computed=10, limit=12)),
    ):
        _step(function, request)
        assert (request.prompt, request.limit) == (6, 12), (
            f"{what}: `prompt` is 6 and `limit` 12; after the step they are {request.prompt} and {request.limit}"
        )


@next_step.property(
    "a resumed request computes prompt and answer in one go", "what is pending does not depend on `prompt`"
)
def _(function):
    request = _maker(function)(6, known=10)
    got = _step(function, request)
    assert got == [(0, 10, True)], f"10 known tokens and an empty cache: [(0, 10, True)], not {got}"


@next_step.property(
    "cached tokens are not computed again", "the cache may hold the beginning of a prompt: where does the step start?"
)
def _(function):
    got = _step(function, _maker(function)(10, computed=4))
    assert got == [(4, 6, True)], f"a prompt of 10 tokens, 4 of them in the cache: [(4, 6, True)], not {got}"


@next_step.property(
    "a request runs until it knows `limit` tokens, and no longer",
    "compare `known` with `limit`, for each request on its own; one that is done takes nothing and changes nothing",
)
def _(function):
    new = _maker(function)
    got = _step(function, new(6, known=10, computed=9, limit=10))
    assert got[0][1:] == (0, False), f"10 tokens known and a limit of 10: nothing runs, not {got}"
    got = _step(function, new(6, known=9, computed=8, limit=10))
    assert got == [(8, 1, True)], f"9 tokens known and a limit of 10: [(8, 1, True)], not {got}"
    got = _step(function, new(6, limit=7))
    assert got == [(0, 6, True)], f"a prompt of 6 tokens and a limit of 7: [(0, 6, True)], not {got}"
    done, live = new(6, known=10, computed=9, limit=10), new(6)
    got = _step(function, done, live, budget=6)
    assert got[1][:2] == (0, 6), (
        f"a done request, a prompt of 6 tokens and a budget of 6: all 6 run from 0, not {got[1][1]} from {got[1][0]}"
    )
    assert (done.known, done.computed) == (10, 9), (
        f"a request that is done knows 10 tokens, 9 computed; after the step {done.known} and {done.computed}"
    )


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
        assert sum(got) <= budget and min(got) >= 0, (
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


@share_budget.property("counts stay in the rows' order", "if you sort, put each count back in its own row's place")
def _(function):
    got = _shares(function, [5, 1, 1], 7)
    assert got == [5, 1, 1], f"[5, 1, 1] and a budget of 7: [5, 1, 1], not {got}"
    got = _shares(function, [5, 1] * 20, 70)[::2]
    assert got == sorted(got, reverse=True), (
        f"[5, 1] twenty times and a budget of 70: an older prompt gets at least as much as a younger one, not {got} "
        "(np.argsort keeps the order of equal entries only with kind='stable')"
    )


# ---- a policy

PatientShortest = Exercise("PatientShortest", seconds=SECONDS)


def _queued(prompt: int, arrival: int, known: int = 0, output: int = 8) -> SimpleNamespace:
    """What a policy may look at of a waiting request."""
    tokens = np.zeros(max(prompt, known), np.int32)
    params = SimpleNamespace(max_tokens=output, priority=0)
    return SimpleNamespace(
        prompt=tokens[:prompt], known=tokens, arrival=arrival, limit=prompt + output, params=params, row=-1
    )


def _key(policy, request: SimpleNamespace) -> float:
    assert isinstance(key := policy.key(request), Real), f"a key must be a number, not {key!r}"
    return float(key)


def _overtaken(policy, prompt: int, arrival: int = 0) -> int:
    """How many of the next 400 prompts, of one token each, go before a prompt of so many."""
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
