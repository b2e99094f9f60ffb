"""A request's timings, percentiles over many, Poisson arrivals.  Lesson 99."""

import math
from itertools import accumulate

from ..shared.checks import Exercise, Explained, a_type, assert_list

LIMIT = 10.0  # seconds for one property; a solution needs milliseconds


def _near(found, wanted) -> bool:
    return len(found) == len(wanted) and all(
        math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-9) for a, b in zip(found, wanted, strict=True)
    )


def _shown(values) -> str:
    return "[" + ", ".join(f"{float(value):.7g}" for value in values) + "]"


def _makes_its_own_list(found, call) -> None:
    """Assert that another call leaves the list that an earlier one returned as it is."""
    before = list(found)
    call()
    assert list(found) == before, "a second call changed the list that the first one returned: make a new one in each"


timings = Exercise("timings", seconds=LIMIT)


def _three(found):
    """Return what `timings` returned. Raises Explained unless it is a tuple or a list of three."""
    if found is None:  # a missing `return`, of which `Exercise` tells
        raise AssertionError
    if not isinstance(found, tuple | list) or len(found) != 3:
        got = f"{len(found)} of them" if isinstance(found, tuple | list) else a_type(found)
        raise Explained(f"return three things, in this order: TTFT, gaps, end-to-end; got {got}")
    return found


def _gaps(function, arrivals) -> list[float]:
    return list(_three(function(0.0, arrivals))[1])


@timings.example
def _(function):
    ttft, gaps, e2e = _three(function(0.0, [(0.5, 1), (0.75, 1)]))
    assert _near([ttft, *gaps, e2e], [0.5, 0.25, 0.75]), f"expected (0.5, [0.25], 0.75), got {(ttft, gaps, e2e)}"


@timings.property(
    "the wait starts when the request was due", "subtract `due` from both, TTFT and end-to-end, and do not round"
)
def _(function):
    for due, first, last in ((10.0, 10.5, 11.0625), (1.0, 1.75, 2.0)):
        ttft, _, e2e = _three(function(due, [(first, 1), (last, 1)]))
        assert _near([ttft, e2e], [first - due, last - due]), (
            f"due at {due:g}, first token at {first}, last at {last}: expected {first - due} and {last - due}, "
            f"got {ttft} and {e2e}"
        )
    e2e = _three(function(1.0, [(1.5, 1), (1.75, 1), (2.0, 1)]))[2]
    assert _near([e2e], [1.0]), f"due at 1, tokens at 1.5, 1.75 and 2: the end-to-end latency is 1, not {e2e}"


@timings.property("a gap is the time since the token before", "subtract neighbors, and keep the order of the tokens")
def _(function):
    gaps = _gaps(function, [(1.0, 1), (1.5, 1), (2.5034, 1), (2.75, 1)])
    assert _near(gaps, [0.5, 1.0034, 0.2466]), (
        f"tokens at 1, 1.5, 2.5034 and 2.75: expected gaps of 0.5, 1.0034 and 0.2466, got {_shown(gaps)}"
    )
    gaps = _gaps(function, [(100_000.5, 1), (100_000.501, 1), (100_000.503, 1)])
    assert _near(gaps, [0.001, 0.002]), (
        f"tokens at 100000.5, 100000.501 and 100000.503: expected gaps of 0.001 and 0.002, got {_shown(gaps)} "
        "(a clock shows large numbers, and float32 has only seven digits)"
    )


@timings.property(
    "the gaps are a list", "write [... for ...]: a generator or a map can be read only once, and has no len"
)
def _(function):
    gaps = _three(function(0.0, [(1.0, 1), (1.5, 1)]))[1]
    assert_list(gaps, "gaps")
    _makes_its_own_list(gaps, lambda: function(0.0, [(1.0, 1), (2.0, 1), (4.0, 1)]))


@timings.property("an answer of one token has no gaps", "n tokens have n - 1 gaps, also where n is 1")
def _(function):
    ttft, gaps, e2e = _three(function(0.0, [(0.5, 1)]))
    gaps = list(gaps)
    assert _near([ttft, *gaps, e2e], [0.5, 0.5]), f"one token at 0.5: expected (0.5, [], 0.5), got {ttft, gaps, e2e}"


@timings.property("every token counts", "k tokens in one arrival make k gaps; all but the first of these are 0")
def _(function):
    for counts in ((1, 3, 2, 1), (1, 3), (1, 8, 1), (1,) * 40):
        gaps = _gaps(function, [(1.0 + 0.25 * i, tokens) for i, tokens in enumerate(counts)])
        shown = f"{len(counts)} arrivals with {', '.join(map(str, counts))} tokens" if len(counts) < 9 else "40 tokens"
        assert len(gaps) == sum(counts) - 1, f"{shown}: expected {sum(counts) - 1} gaps, got {len(gaps)}"
    gaps = _gaps(function, [(1.0, 1), (1.5, 2), (1.5, 3)])
    assert len(gaps) == 5, f"1 token at 1, 2 at 1.5 and 3 more at 1.5: expected 5 gaps, got {len(gaps)}"


@timings.property("tokens that arrive together share one wait", "3 tokens after 0.5 s: [0.5, 0, 0]")
def _(function):
    gaps = _gaps(function, [(1.0, 1), (1.5, 3)])
    if len(gaps) == 3:  # how many there are is for the other properties
        assert _near(gaps, [0.5, 0.0, 0.0]), f"1 token at 1, 3 at 1.5: expected [0.5, 0, 0], got {_shown(gaps)}"


@timings.property("the first arrival may bring several tokens", "only the very first token has no gap")
def _(function):
    gaps = _gaps(function, [(1.0, 3), (1.5, 1)])
    assert _near(gaps, [0.0, 0.0, 0.5]), f"3 tokens at 1, 1 at 1.5: expected [0, 0, 0.5], got {_shown(gaps)}"
    gaps = _gaps(function, [(1.0, 3)])
    assert _near(gaps, [0.0, 0.0]), f"3 tokens at 1, and no others: expected [0, 0], got {_shown(gaps)}"


@timings.property(
    "the answer ends with its last token", "an answer of 5 tokens may come in 3 arrivals: do not mix up the two numbers"
)
def _(function):
    for counts in ((1, 3, 2, 1), (3, 1), (2, 2)):
        arrivals = list(zip((0.5, 0.75, 1.25, 2.25), counts, strict=False))
        shown = "due at 0, tokens at " + ", ".join(f"{when:g} ({tokens})" for when, tokens in arrivals)
        last = arrivals[-1][0]
        ttft, _, e2e = _three(function(0.0, list(arrivals)))
        assert _near([ttft], [0.5]), f"{shown}: the TTFT is 0.5, not {ttft}"
        assert _near([e2e], [last]), f"{shown}: the end-to-end latency is {last:g}, not {e2e}"


@timings.property("the list of arrivals is unchanged", "read `arrivals`; do not pop from it, and do not write into it")
def _(function):
    arrivals = [(1.0, 1), (1.5, 3), (2.0, 1)]
    function(0.25, arrivals)
    assert arrivals == [(1.0, 1), (1.5, 3), (2.0, 1)], f"the caller's three arrivals became {arrivals}"


pooled_percentile = Exercise("pooled_percentile", seconds=LIMIT)


def _rounded_up(p: int, n: int) -> str:
    """A way to write p n / 100, a whole number, that comes out larger in floating point; and what it is."""
    ways = {
        f"{p} / 100 * {n}": p / 100 * n,
        f"{n} / 100 * {p}": n / 100 * p,
        f"{p} * 0.01 * {n}": p * 0.01 * n,
        f"{p} / (100 / {n})": p / (100 / n),
        f"{n} / (100 / {p})": n / (100 / p),
    }
    return next(f"{way} is {value!r}" for way, value in ways.items() if value > p * n // 100)


@pooled_percentile.example
def _(function):
    found = function([[10.0, 20.0, 30.0]], 50)
    assert found == 20, f"p50 of 10, 20 and 30: expected 20, got {found}"


@pooled_percentile.property(
    "the result is one of the gaps", "return a gap as it is: do not average two neighbors, round, or convert"
)
def _(function):
    for low, high in ((1.0, 2.0), (0.25, 0.5), (0.1, 0.123456789)):  # the last two change in float32, or if rounded
        for p in (50, 75):
            try:
                found = function([[low, high]], p)
            except IndexError:  # ranks have a property of their own
                continue
            assert found in (low, high), f"the gaps are {low!r} and {high!r}, and neither is {found!r}"


@pooled_percentile.property("the rank is p n / 100, rounded up, counting from 1", "math.ceil; ranked[rank - 1]")
def _(function):
    for n in (1, 2, 5, 10, 40, 100):
        ranked = [float(i) for i in range(1, n + 1)]
        for p in (1, 10, 25, 50, 75, 81, 90, 99, 100):
            rank = -(-p * n // 100)
            try:
                found = function([ranked], p)
            except IndexError:
                raise AssertionError(f"p{p} of {n} value{'s' * (n > 1)} is number {rank}, which exists") from None
            if found in ranked:  # whether it is a gap at all is for the property above
                assert found == rank, f"p{p} of {n} values is number {p * n / 100:g}, rounded up: {rank}, not {found:g}"
    for p, n in ((55, 100), (7, 100), (28, 25), (100, 7), (50, 14), (70, 20), (100, 29), (58, 50)):
        rank, ranked = p * n // 100, [float(i) for i in range(1, n + 1)]
        try:
            found = function([ranked], p)
        except IndexError:  # of the largest value
            found = rank + 1.0
        assert found != rank + 1, (
            f"p{p} of {n} values is number {rank} exactly, not {rank + 1}: multiply before you divide, since "
            f"{_rounded_up(p, n)} (np.percentile divides first, too)"
        )
    for share, n, rank in ((12.5, 200, 25), (99.5, 200, 199), (99.9, 995, 995), (99.999, 99_999, 99_999)):
        ranked = [float(i) for i in range(1, n + 1)]
        try:
            found = function([ranked], share)
        except TypeError:
            raise AssertionError(
                f"p may have decimals, such as {share}; the rank is still an int: {rank} of {n}"
            ) from None
        if found in ranked:
            assert found == rank, (
                f"p may have decimals: p{share} of {n:,} values is number {rank:,}, not {found:,.0f}: p n / 100 is "
                f"{share * n / 100:.7g}"
            )


@pooled_percentile.property("gaps may come in any order", "put all gaps into one list, then sort that")
def _(function):
    found = function([[30.0, 10.0, 20.0]], 99)
    assert found > 25, f"p99 of [[30, 10, 20]] is the largest: expected 30, got {found}"
    found = function([[30.0, 10.0], [20.0, 30.0]], 75)
    assert found == 30, f"p75 of [[30, 10], [20, 30]] is the third of 10, 20, 30, 30: expected 30, got {found}"


@pooled_percentile.property(
    "every gap counts once", "put all gaps of all requests into one list, equal ones and zeros too"
)
def _(function):
    for p in (50, 85):
        found = function([[1.0] * 9, [101.0]], p)
        assert found == 1, f"p{p} of nine gaps of 1 in one request and one of 101 in another: expected 1, got {found}"
    found = function([[1.0] * 9, [101.0]], 95)
    assert found > 1, f"p95 of nine gaps of 1 in one request and one of 101 in another: expected 101, got {found}"
    found = function([[0.0, 0.0], [0.0, 5.0]], 50)
    assert found == 0, f"a gap of 0 is a gap too: p50 of [[0, 0], [0, 5]]: expected 0, got {found}"
    try:
        found = function([[], [5.0]], 50)
    except IndexError:
        raise AssertionError("a request of one token has no gaps: its list is empty, as in [[], [5]]") from None
    assert found == 5, f"a request of one token has no gaps; p50 of [[], [5]]: expected 5, got {found}"
    for p, wanted in ((5, 1), (100, 12)):
        found = function([[float(i)] * 200 for i in range(1, 13)], p)
        assert found == wanted, (
            f"p{p} of 12 requests, with 200 gaps of 1 in the first, of 2 in the second, ...: "
            f"expected {wanted}, got {found}"
        )


@pooled_percentile.property("the lists are unchanged", "`sorted` makes a new list; `.sort()` and `+=` change a list")
def _(function):
    for given in ([[30.0, 10.0], [], [20.0]], [[30.0, 10.0, 20.0]]):
        gaps = [list(each) for each in given]
        function(gaps, 50)
        assert gaps == given, f"the caller's {given} became {gaps}"


poisson_arrivals = Exercise("poisson_arrivals", seconds=LIMIT)
NUMBERS = (0.5, 0.9375, 0.5, 0.75)


@poisson_arrivals.example
def _(function):
    found = list(function(1.0, [0.5]))
    assert _near(found, [math.log(2)]), f"expected [0.6931472], got {_shown(found)}"


@poisson_arrivals.property("the result is times, not gaps", "each request arrives one gap after the one before: add up")
def _(function):
    found = list(function(1.0, [0.5, 0.5, 0.5]))
    assert _near(found, [0.693147, 1.386294, 2.079442]), (
        f"three gaps of 0.693147: expected [0.693147, 1.386294, 2.079442], got {_shown(found)}"
    )


@poisson_arrivals.property("the result is a list", "return a list: itertools.accumulate and map can be read only once")
def _(function):
    found = function(1.0, [0.5, 0.5])
    assert_list(found, "times")
    _makes_its_own_list(found, lambda: function(2.0, [0.25, 0.25, 0.25]))


@poisson_arrivals.property("twice the rate means half the time", "divide every gap by the rate")
def _(function):
    for rate in (1.0, 0.25, 1.75, 10_000.0):
        once, twice = (list(function(each, list(NUMBERS))) for each in (rate, 2 * rate))
        assert _near([2 * when for when in twice], once), (
            f"at {2 * rate:g} per second every time is half of what it is at {rate:g}: "
            f"{_shown(once)} became {_shown(twice)}"
        )


@poisson_arrivals.property("a small number makes a short gap", "-log(1 - u), not -log(u): u may be 0, but never 1")
def _(function):
    found = list(function(1.0, [0.0]))
    assert len(found) == 1, f"one number, u = 0: expected one request, got {len(found)}"
    assert found[0] < 0.1, f"u = 0 makes a gap of 0, not {found[0]:.3g}"
    found = list(function(1.0, [0.01]))
    assert found[0] < 0.1, f"u = 0.01 makes a short gap, not {found[0]:.3g}"


@poisson_arrivals.property("many gaps are short, a few are long", "-log(1 - u) / rate grows without bound as u nears 1")
def _(function):
    for numbers in ((0.1, 0.9), (0.0002, 0.9998), (2**-30, 1 - 2**-30)):
        wanted = -math.log(numbers[0] * numbers[1])
        found = sum(list(function(1.0, [u]))[0] for u in numbers)
        assert math.isclose(found, wanted, rel_tol=1e-5), (
            f"the gaps of u = {numbers[0]:.10g} and u = {numbers[1]:.10g}: "
            f"expected {wanted:.7g} together, got {found:.7g}"
        )


@poisson_arrivals.property("each number makes one gap, in order", "use every number of `uniform` once, first to last")
def _(function):
    found = list(function(1.0, list(NUMBERS)))
    assert len(found) == len(NUMBERS), f"{len(NUMBERS)} numbers: expected {len(NUMBERS)} requests, got {len(found)}"
    gaps = [list(function(1.0, [u]))[0] for u in NUMBERS]  # by its own formula; whether times come is checked above
    assert _near(found, gaps) or _near(found, list(accumulate(gaps))), (
        f"alone, the numbers {list(NUMBERS)} make gaps of {_shown(gaps)}; together they made times of {_shown(found)}"
    )
    try:
        none = list(function(1.0, []))
    except IndexError:
        raise AssertionError("no numbers make no requests: do not read the first number before the loop") from None
    assert not none, f"no numbers: expected no requests, got {len(none)}"
    try:
        many = list(function(1.0, list(NUMBERS) * 2500))
    except RecursionError:
        raise AssertionError("10,000 numbers are too many for a function that calls itself: use a loop") from None
    assert len(many) == 10_000, f"10,000 numbers: expected 10,000 requests, got {len(many)}"
    end = 2500 * sum(gaps)
    assert math.isclose(many[-1], end, rel_tol=1e-5) or math.isclose(many[-1], gaps[-1], rel_tol=1e-5), (
        f"{list(NUMBERS)} repeated 2,500 times: the last request is due at {end:.7g}, 2,500 times as late as after "
        f"four numbers, not at {many[-1]:.7g}"
    )


@poisson_arrivals.property("the list is unchanged", "loop over `uniform`; do not pop from it or sort it")
def _(function):
    uniform = list(NUMBERS)
    function(1.0, uniform)
    assert uniform == list(NUMBERS), f"the caller's {list(NUMBERS)} became {uniform}"
