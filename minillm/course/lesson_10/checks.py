"""Rows in use, one rule for every token.  Lesson 10."""

import inspect
from dataclasses import dataclass

from ..shared.checks import Exercise, a_type, assert_int

SECONDS = 2  # of CPU time for one property: correct solutions take milliseconds

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
    steps, _ = _rows_used(function, [6, 2], 2, in_flight=True)
    assert steps == 6, f"6, 2 tokens in two rows, in flight: the first request ends after 6 steps, not {steps}"
    steps, _ = _rows_used(function, [2, 300], 2, in_flight=True)
    assert steps == 300, f"2, 300 tokens in two rows, in flight: the second request ends after 300 steps, not {steps}"


@steps_and_idle.property(
    "the next request takes the row that becomes free first",
    "no request is tied to a row in advance: which row ends earliest?",
)
def _(function):
    for outputs, wanted in (([1, 3, 1, 1], 3), ([3, 1, 1, 1], 3), ([2, 2, 2, 2], 4)):
        steps, _ = _rows_used(function, outputs, 2, in_flight=True)
        listed = ", ".join(map(str, outputs))
        assert steps == wanted, f"{listed} tokens in two rows, in flight: {wanted} steps, not {steps}"
    steps, _ = _rows_used(function, [20] + [1] * 11, 6, in_flight=True)
    assert steps <= 20, f"20 tokens, then eleven times 1, in six rows, in flight: no more than 20 steps, not {steps}"


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
        for outputs, rows in (([3], 2), ([4, 4, 4], 2), ([5, 2, 1], 3)):
            steps, idle = _rows_used(function, outputs, rows, in_flight)
            wanted = rows * steps - sum(outputs)
            assert idle == wanted, (
                f"{sum(outputs)} tokens in {steps} steps of {rows} rows, {_way(in_flight)}: {wanted} idle, not {idle}"
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
        for what, count in zip(("steps", "idle cells"), got, strict=True):
            assert_int(count, f"the {what} of 96 requests, {_way(in_flight)}")


@steps_and_idle.property("no requests take no steps", "`max` and `min` of an empty list raise: start from 0")
def _(function):
    for in_flight in (False, True):
        try:
            got = _rows_used(function, [], 2, in_flight)
        except (ArithmeticError, LookupError, ValueError) as error:
            given = f"no requests, {_way(in_flight)}"
            raise AssertionError(f"{given}: (0, 0), not {a_type(error)} ({error})") from None
        assert got == (0, 0), f"no requests, {_way(in_flight)}: (0, 0), not {got}"


@steps_and_idle.property("the list stays as it is", "the caller still needs `outputs`: work on a copy")
def _(function):
    for given in ([4, 4], [3, 1, 2]):
        for in_flight in (False, True):
            outputs = list(given)
            function(outputs, 2, in_flight)
            assert outputs == given, f"it was given {given}, {_way(in_flight)}, and left {outputs}"


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
    new = _maker(function)
    request = new(6, known=10)
    got = _step(function, request)
    assert got == [(0, 10, True)], f"10 known tokens and an empty cache: [(0, 10, True)], not {got}"
    assert (request.known, request.computed) == (11, 10), (
        f"10 known tokens and an empty cache: then 11 are known and 10 computed, not {request.known} and "
        f"{request.computed}"
    )
    for computed in (4, 6, 7):  # within the prompt, at its end, within the answer
        got, wanted = _step(function, new(6, known=10, computed=computed)), [(computed, 10 - computed, True)]
        assert got == wanted, f"10 known tokens, 6 of them the prompt, and {computed} in the cache: {wanted}, not {got}"


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
    last = new(6, known=9, computed=8, limit=10)
    got = _step(function, last)
    assert got == [(8, 1, True)], f"9 tokens known and a limit of 10: [(8, 1, True)], not {got}"
    assert last.known == 10, f"9 tokens known, a limit of 10, and one sampled: then 10 are known, not {last.known}"
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
