"""Choosing a launch, a queue of kernels, sizes of graphs, and comparisons that differ in one thing.  Lesson 11."""

import copy
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from itertools import combinations

from ..shared.checks import Exercise, Explained, assert_list
from .graph_sizes import padded_ms

# ---- a launch from a measured table

choose_launch = Exercise("choose_launch")


def _chosen(function, runs: dict, default, margin: float = 0.02):
    given = copy.deepcopy(runs)
    found = function(given, default, margin)
    if given != runs:
        ordered = given.keys() == runs.keys() and all(sorted(given[each]) == sorted(runs[each]) for each in runs)
        raise Explained("`runs` has changed: sort a copy, sorted(...)" if ordered else "do not change `runs`")
    return found


def _expect(function, runs: dict, default, expected, message: str, margin: float = 0.02):
    found = _chosen(function, runs, default, margin)
    assert found == expected, f"{message}: expected {expected}, got {found}"


@choose_launch.example
def _(function):
    runs = {(2048, 4): [8.0, 8.1, 8.0], (1024, 4): [10.0, 10.0, 10.1]}
    _expect(function, runs, (1024, 4), (2048, 4), "8.0 against the default's 10.0")


@choose_launch.property(
    "a gain within the margin keeps the default", "best < (1 - margin) * the median of the argument `default`"
)
def _(function):
    runs = {"other": [9.802] * 3, "default": [10.0] * 3}
    _expect(function, runs, "default", "default", "9.802 against 10.0, margin 2%")
    runs = {"other": [10.0] * 3, "default": [10.0] * 3}
    _expect(function, runs, "default", "default", "10.0 against 10.0, margin 0", margin=0.0)
    table = {(512, 4): [9.802] * 3, (256, 2): [10.0] * 3, (1024, 4): [20.0] * 3}
    _expect(function, table, (256, 2), (256, 2), "9.802 against 10.0, the median of the default (256, 2), margin 2%")
    _expect(function, {"default": [10.0] * 3}, "default", "default", "only the default was measured")


@choose_launch.property(
    "the margin is a share of the default's time", "compare with (1 - margin) * default, and round no time"
)
def _(function):
    runs = {"default": [0.01] * 3, "other": [0.008] * 3}
    _expect(function, runs, "default", "other", "0.008 against 0.01, margin 2%")
    runs = {"default": [0.0014] * 3, "other": [0.001] * 3}  # the record has milliseconds
    _expect(function, runs, "default", "other", "0.001 against 0.0014, margin 2%")
    runs = {"default": [1000.0] * 3, "other": [990.0] * 3}
    _expect(function, runs, "default", "default", "990 against 1000, margin 2%")


@choose_launch.property("the margin counts", "use the parameter, not 0.02")
def _(function):
    runs = {"default": [10.0] * 3, "other": [9.0] * 3}
    _expect(function, runs, "default", "default", "9.0 against 10.0, margin 20%", margin=0.2)
    _expect(function, runs, "default", "other", "9.0 against 10.0, margin 5%", margin=0.05)
    runs = {"default": [10.0] * 3, "other": [7.0] * 3}
    _expect(function, runs, "default", "default", "7.0 against 10.0, margin 50%", margin=0.5)
    runs = {"default": [10.0] * 3, "other": [9.9] * 3}
    _expect(function, runs, "default", "other", "9.9 against 10.0, margin 0", margin=0.0)


@choose_launch.property(
    "the median of all runs decides",
    "statistics.median, for the default too: not the mean, not the minimum; for an even count, the average of the "
    "middle two",
)
def _(function):
    runs = {"default": [10.0] * 5, "fast": [9.0, 9.0, 99.0, 9.0, 9.0], "lucky": [1.0, 11.0, 11.0, 11.0, 11.0]}
    _expect(function, runs, "default", "fast", "medians 9, 11 and the default's 10")
    runs = {"default": [10.0, 10.0, 1.0, 10.0, 10.0], "other": [9.0] * 5}
    _expect(function, runs, "default", "other", f"the median of {runs['default']}, the default's, is 10")
    runs = {"default": [10.0, 10.0, 99.0, 10.0, 10.0], "other": [9.9] * 5}
    _expect(function, runs, "default", "default", f"the median of {runs['default']}, the default's, is 10")
    slow, fast = [99.0] * 20, [9.0] * 21  # slow at the beginning, or at the end
    for other in (slow + fast, fast + slow):
        runs = {"default": [10.0] * 41, "other": other}
        _expect(function, runs, "default", "other", "medians 9, of 21 times 9 and 20 times 99, and the default's 10")
    for other, median, expected in (([8.0, 9.0, 10.2, 11.0], 9.6, "other"), ([8.0, 9.0, 11.0, 12.0], 10, "default")):
        runs = {"default": [10.0] * 4, "other": other}
        _expect(function, runs, "default", expected, f"the median of {other} is {median}, the default's is 10")
    for other, expected in (([8.0, 9.9, 99.0], "default"), ([8.0, 9.0, 99.0], "other")):
        runs = {"default": [10.0] * 3, "other": other}
        _expect(function, runs, "default", expected, f"the median of {other} is {other[1]:g}, the default's is 10")
    runs = {"default": [10.0] * 2, "other": [99.0, 99.0, 9.0, 9.0, 9.0]}
    _expect(function, runs, "default", "other", f"the median of {runs['other']} is 9, that of the default's 2 is 10")


@choose_launch.property("the fastest of all wins", "compare all medians first, then the fastest with the default")
def _(function):
    runs = {"good": [9.0] * 3, "best": [8.0] * 3, "default": [10.0] * 3, "also good": [8.5] * 3}
    _expect(function, runs, "default", "best", "medians 9, 8, 8.5 and the default's 10")
    runs = {"default": [10.0] * 3, "good": [8.0] * 3, "best": [7.95] * 3}
    _expect(function, runs, "default", "best", "medians 8, 7.95 and the default's 10")


# ---- a queue of kernels

queued = Exercise("queued")


def _listed(result):
    """The result, if it can be read twice."""
    assert not isinstance(result, Iterator), f"return a list: a {type(result).__name__} can be read only once"
    return result


def _tuples(result, what: str) -> list[tuple]:
    for each in _listed(result):
        assert isinstance(each, Iterable), f"expected a list of {what}, but it contains {each!r}"
    return [tuple(each) for each in result]


def _times(function, launched: list[float], lengths: list[float]) -> list[tuple[float, float]]:
    given = [*launched], [*lengths]
    found = _tuples(function(*given), "(start, end)")
    if given != (launched, lengths):
        raise Explained("launched_us or kernel_us has changed: work on a copy")
    return found


def _same(found: list[tuple[float, float]], expected: list[tuple[float, float]], what: str):
    close = len(found) == len(expected) and all(
        abs(a - b) < 1e-6 for one, other in zip(found, expected, strict=True) for a, b in zip(one, other, strict=True)
    )
    assert close, f"{what}: expected {expected}, got {found}"


@queued.example
def _(function):
    assert_list(function([5.0, 10.0, 15.0], [2.0, 8.0, 1.0]), "(start, end)")
    found = _times(function, [5.0, 10.0, 15.0], [2.0, 8.0, 1.0])
    _same(found, [(5.0, 7.0), (10.0, 18.0), (18.0, 19.0)], "launched at 5, 10, 15; lengths 2, 8, 1")


@queued.property("a kernel waits until it is launched", "its start is at least launched_us[i]")
def _(function):
    _same(_times(function, [10.0, 20.0], [1.0, 1.0]), [(10.0, 11.0), (20.0, 21.0)], "launched at 10, 20; lengths 1, 1")
    launched = [10.0 * place for place in range(12)]
    expected = [(when, when + 1.0) for when in launched]
    _same(_times(function, launched, [1.0] * 12), expected, "launched at 0, 10, ... 110; lengths 1")
    _same(_times(function, [3.0], [2.0]), [(3.0, 5.0)], "one kernel, launched at 3; length 2")
    found = _times(function, [0.0, 1.0, 50.0, 60.0], [10.0, 5.0, 1.0, 1.0])  # kernels wait, then the queue is empty
    assert len(found) == 4, f"4 kernels: got {len(found)} times"
    what = "the last 2 of 4 kernels, launched at 0, 1, 50, 60; lengths 10, 5, 1, 1"
    _same(found[-2:], [(50.0, 51.0), (60.0, 61.0)], what)


@queued.property("a kernel waits until the one before has ended", "its start is at least the end of kernel i - 1")
def _(function):
    found = _times(function, [1.0, 2.0, 3.0, 4.0], [10.0, 10.0, 1.0, 1.0])
    _same(found, [(1.0, 11.0), (11.0, 21.0), (21.0, 22.0), (22.0, 23.0)], "launched at 1 to 4; lengths 10, 10, 1, 1")


@queued.property(
    "a whole graph is launched at once", "equal times in launched_us are fine: kernels run in the order of the lists"
)
def _(function):
    _same(_times(function, [7.0] * 3, [1.0, 2.0, 3.0]), [(7.0, 8.0), (8.0, 10.0), (10.0, 13.0)], "launched at 7, 7, 7")
    found = _times(function, [7.0] * 3, [3.0, 1.0, 2.0])
    _same(found, [(7.0, 10.0), (10.0, 11.0), (11.0, 13.0)], "launched at 7, 7, 7; lengths 3, 1, 2")
    found = _times(function, [5.0, 1.0, 3.0], [2.0, 4.0, 1.0])
    what = "launched at 5, 1, 3; lengths 2, 4, 1 (in the order of the lists: do not sort)"
    _same(found, [(5.0, 7.0), (7.0, 11.0), (11.0, 12.0)], what)
    found, ends = _times(function, [7.0] * 198, [1.0] * 198), [8.0 + place for place in range(198)]
    assert len(found) == 198, f"198 kernels: got {len(found)} times"
    _same(found[-2:], [(end - 1.0, end) for end in ends[-2:]], "the last 2 of 198 kernels launched at 7, of 1 each")


@queued.property("times are not rounded", "a kernel can take 1.35 microseconds: no int() and no round()")
def _(function):
    found = _times(function, [0.5, 0.9], [1.35, 2.49])
    _same(found, [(0.5, 1.85), (1.85, 4.34)], "launched at 0.5, 0.9; lengths 1.35, 2.49")
    found = _times(function, [0.1234, 0.5], [1.3529, 2.0])
    _same(found, [(0.1234, 1.4763), (1.4763, 3.4763)], "launched at 0.1234, 0.5; lengths 1.3529, 2")
    found = _times(function, [1.0, 1.1], [0.25, 0.5])
    _same(found, [(1.0, 1.25), (1.25, 1.75)], "launched at 1, 1.1; lengths 0.25, 0.5")


@queued.property("no kernels, no times", "one (start, end) for each kernel, however short: none for empty lists")
def _(function):
    _same(_times(function, [], []), [], "no kernels")
    found = _times(function, [1.0, 2.0, 3.0], [4.0, 0.0, 1.0])
    assert len(found) == 3, f"3 kernels, of lengths 4, 0 and 1: got {len(found)} times"
    assert_list(function([], []), "(start, end)")


# ---- which batch sizes to capture

choose_sizes = Exercise("choose_sizes")


def least_ms(counts: dict[int, int], ms: dict[int, float], most: int) -> float:
    """The least that `most` sizes can reach."""
    *smaller, largest = sorted(ms)
    tried = (
        [*chosen, largest] for count in range(min(most, len(ms))) for chosen in combinations(smaller, count)
    )  # fmt: skip
    return min(padded_ms(sizes, counts, ms) for sizes in tried)


def _sizes(function, counts: dict, ms: dict, most: int) -> list[int]:
    given = dict(counts), dict(ms)
    found = list(_listed(function(*given, most)))
    if given != (counts, ms):
        raise Explained("counts or ms has changed: work on a copy")
    return found


def _least(function, counts: dict, ms: dict, most: int):
    found = _sizes(function, counts, ms, most)
    assert found and set(found) <= set(ms) and max(ms) in found, f"{found} must be sizes of ms, and include {max(ms)}"
    took, least = padded_ms(found, counts, ms), least_ms(counts, ms, most)
    assert took <= least + 1e-9, f"steps {counts}, ms {ms}, most {most}: {found} takes {took:g} ms, not {least:g}"


@choose_sizes.example
def _(function):
    assert_list(function({1: 10, 3: 1, 8: 1}, {1: 1.0, 2: 1.1, 4: 1.2, 8: 2.0}, 2), "sizes")
    found = _sizes(function, {1: 10, 3: 1, 8: 1}, {1: 1.0, 2: 1.1, 4: 1.2, 8: 2.0}, 2)
    assert found == [1, 8], f"expected [1, 8], got {found}"


@choose_sizes.property(
    "at most `most` sizes, in order", "the largest is one of the `most`; ms may be unsorted: sort it"
)
def _(function):
    counts, ms = {1: 3, 2: 2, 4: 1}, {4: 4.0, 2: 2.0, 1: 1.0}
    alone = "with most = 1, the only set is [largest]"
    try:
        found = _sizes(function, counts, ms, 1)
    except (ValueError, TypeError, LookupError, NameError) as error:  # such as min() of no sets
        raise Explained(alone) from error
    if found != [4]:
        raise Explained(f"most 1: expected [4], got {found}; {alone}")
    found = _sizes(function, counts, ms, 3)
    assert found == [1, 2, 4], f"most 3: expected [1, 2, 4], got {found}"
    found = _sizes(function, {8: 9, 32: 9, 128: 9}, {8: 1.0, 32: 2.0, 128: 3.0}, 3)
    assert found == [8, 32, 128], f"most 3: expected [8, 32, 128], got {found}"


@choose_sizes.property("every batch fits", "the largest size of ms is always captured, even if no step needed it yet")
def _(function):
    found = _sizes(function, {1: 5, 2: 5}, {1: 1.0, 2: 1.5, 16: 9.0}, 2)
    assert 16 in found, f"batches of up to 16 may come, but got {found}"


@choose_sizes.property("the number of steps counts", "weigh each batch size by its count")
def _(function):
    ms = {1: 1.0, 4: 2.0, 8: 3.0, 16: 6.0}
    for counts in ({1: 90, 4: 1, 8: 1, 16: 1}, {1: 1, 4: 90, 8: 1, 16: 1}, {1: 1, 4: 1, 8: 90, 16: 1}):
        _least(function, counts, ms, 2)
    _least(function, {1: 5, 6: 40, 8: 1}, {1: 1.0, 6: 2.0, 8: 9.0}, 2)
    _least(function, dict.fromkeys(range(1, 9), 1), {1: 1.0, 2: 2.0, 4: 3.0, 8: 9.0}, 2)
    _least(function, {1: 9000, 4: 10, 16: 1}, ms, 2)


@choose_sizes.property("up to `most` sizes, however many that is", "sets of 1, 2, 3, ... and `most` sizes")
def _(function):
    _least(function, dict.fromkeys((1, 2, 4, 8, 16), 9), {size: float(size) for size in (1, 2, 4, 8, 16)}, 5)
    ms = {size: size / 10 for size in (1, 2, 4, 8, 16, 32, 48, 64, 128, 192, 256)}  # as many as the record
    _least(function, dict.fromkeys(ms, 9), ms, 11)


@choose_sizes.property(
    "milliseconds count, not padded rows", "padding can be free, or even save time: fewer than `most` sizes may be best"
)
def _(function):
    _least(function, {1: 5, 32: 4, 64: 1}, {1: 1.00, 8: 1.01, 32: 1.02, 64: 5.0}, 2)
    _least(function, {1: 10, 5: 9, 64: 1}, {1: 1.9, 8: 2.0, 64: 9.0}, 2)
    _least(function, {1: 20, 15: 10, 14: 5}, {2: 2.2, 4: 2.0, 8: 1.0, 16: 2.0}, 3)
    slow_two = {2: 1.83, 4: 1.77, 8: 3.0}
    for most in (3, 4):
        _least(function, {2: 5, 4: 5, 8: 1}, slow_two, most)
    _least(function, {1: 5, 2: 5, 4: 1}, {1: 3.0, 2: 2.0, 4: 1.0}, 3)
    _least(function, {1: 10, 2: 1, 4: 1}, {1: 0.100, 2: 0.104, 4: 0.106}, 2)


@choose_sizes.property("the best set, not one size after the other", "try all sets: itertools.combinations")
def _(function):
    ms = {size: float(size) for size in (1, 2, 4, 8, 16)}
    for counts in ({1: 25, 2: 1, 4: 6, 8: 10, 16: 1}, {1: 22, 2: 2, 4: 2, 8: 1, 16: 1}):
        _least(function, counts, ms, 3)
    _least(function, {1: 20, 2: 5, 4: 10, 8: 1}, {1: 1.1, 2: 1.2, 4: 1.5, 8: 2.2}, 2)


# ---- like for like

fair_pairs = Exercise("fair_pairs")


def _pairs(function, settings: dict[str, dict]) -> list[tuple]:
    given = copy.deepcopy(settings)
    found = _tuples(function(given), "(setting, later setting, fact)")
    if given != settings:
        raise Explained("settings has changed: work on a copy")
    return found


def _expect_pairs(function, settings: dict[str, dict], expected: list[tuple]):
    found = _pairs(function, settings)
    for part in (part for each in found for part in each):
        assert isinstance(part, Hashable), f"each tuple has three names: expected {expected}, got {found}"
    assert Counter(found) == Counter(expected), f"{settings}: expected {expected}, got {found}"


@fair_pairs.example
def _(function):
    settings = {
        "off": {"graphs": "no", "launches": 10},
        "on": {"graphs": "yes", "launches": 10},
        "fused": {"graphs": "yes", "launches": 5},
    }
    assert_list(function(copy.deepcopy(settings)), "(setting, later setting, fact)")
    _expect_pairs(function, settings, [("off", "on", "graphs"), ("on", "fused", "launches")])


@fair_pairs.property(
    "settings that are not neighbors are compared too", "all pairs: itertools.combinations(settings, 2)"
)
def _(function):
    _expect_pairs(function, {"a": {"x": 1, "y": 1}, "b": {"x": 2, "y": 2}, "c": {"x": 1, "y": 3}}, [("a", "c", "y")])
    every = [("a", "b", "y"), ("a", "c", "y"), ("b", "c", "y")]
    _expect_pairs(function, {"a": {"x": 1, "y": 1}, "b": {"x": 1, "y": 2}, "c": {"x": 1, "y": 3}}, every)
    apart = {name: {"x": place, "y": place} for place, name in enumerate("abcde")} | {"f": {"x": 4, "y": 0}}
    _expect_pairs(function, apart, [("a", "f", "x"), ("e", "f", "y")])
    alike = {name: {"x": 1, "y": place} for place, name in enumerate("abcdef")}
    _expect_pairs(function, alike, [(one, other, "y") for one, other in combinations(alike, 2)])


@fair_pairs.property(
    "equal settings are no comparison",
    "exactly one fact differs, not at most one; equal settings are each compared with the others",
)
def _(function):
    equal = {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 2}}
    _expect_pairs(function, equal, [])
    assert_list(function(equal), "(setting, later setting, fact)")
    twice = {"a": {"x": 1, "y": 1}, "b": {"x": 1, "y": 2}, "c": {"x": 1, "y": 1}}
    _expect_pairs(function, twice, [("a", "b", "y"), ("b", "c", "y")])


@fair_pairs.property("every fact counts", "compare all facts, and give the name of the one that differs")
def _(function):
    first = {"x": 1, "y": 1, "z": 1}
    _expect_pairs(function, {"a": first, "b": {**first, "z": 0}}, [("a", "b", "z")])
    _expect_pairs(function, {"a": first, "b": {**first, "y": 0, "z": 0}}, [])
    more = {**first, "last": 1}
    _expect_pairs(function, {"a": more, "b": {**more, "last": 0}}, [("a", "b", "last")])
    _expect_pairs(function, {"a": more, "b": {**more, "x": 0, "last": 0}}, [])


@fair_pairs.property("values are compared as they are", "one != other, for None too: neither `is not` nor str(...)")
def _(function):
    thousand = int("1000")  # equal to 1000, but another object
    _expect_pairs(function, {"a": {"x": 1000, "y": 1}, "b": {"x": thousand, "y": 2}}, [("a", "b", "y")])
    _expect_pairs(function, {"a": {"x": 1, "y": 1}, "b": {"x": "1", "y": 1}}, [("a", "b", "x")])
    _expect_pairs(function, {"a": {"x": None, "y": 1}, "b": {"x": 0, "y": 1}}, [("a", "b", "x")])
    _expect_pairs(function, {"a": {"x": "Off", "y": 1}, "b": {"x": "off", "y": 1}}, [("a", "b", "x")])


@fair_pairs.property("facts are compared by name", "settings may list their facts in another order")
def _(function):
    _expect_pairs(function, {"a": {"x": 1, "y": 2}, "b": {"y": 2, "x": 3}}, [("a", "b", "x")])
