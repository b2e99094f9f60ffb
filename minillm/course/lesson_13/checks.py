"""Drafts that are accepted, drafts from the text so far, and how many are worth their time.  Lesson 13."""

from collections.abc import Sequence
from fractions import Fraction

from ..shared.checks import Exercise, assert_int, assert_list
from .speculating import accepted as accepted_here

SECONDS = 5  # of CPU time for one property: correct solutions take milliseconds

# ---- which tokens a step gains

accepted = Exercise("accepted", seconds=SECONDS)


def _gained(function, drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
    given, own = list(drafts), list(sampled)
    got = function(given, own)
    assert_list(got, "tokens")
    assert given == list(drafts) and own == list(sampled), "`drafts` or `sampled` has changed: work on a copy"
    return got


def _expect(function, drafts: Sequence[int], sampled: Sequence[int]) -> None:
    got, wanted = _gained(function, drafts, sampled), accepted_here(drafts, sampled)
    assert got == wanted, f"drafts {_short(drafts)}, the target's own {_short(sampled)}: {_apart(wanted, got)}"


def _short(tokens: Sequence[int]) -> str:
    """Tokens, long lists cut in the middle."""
    listed = [str(each) for each in tokens]
    return f"[{', '.join(listed if len(listed) <= 12 else [*listed[:5], '...', *listed[-3:]])}]"


def _apart(wanted: Sequence[int], got: Sequence[int]) -> str:
    """Return what was expected and what came, with the first place at which they differ."""
    shared = min(len(wanted), len(got))
    at = next((place for place in range(shared) if wanted[place] != got[place]), shared)
    place = f"; they first differ at place {at}" if max(len(wanted), len(got)) > 1 else ""
    return f"expected {_short(wanted)}, got {_short(got)}{place}"


@accepted.example
def _(function):
    _expect(function, [5, 6], [5, 9, 3])


@accepted.property(
    "a first draft that is wrong leaves the target's own token",
    "`sampled[0]` was chosen after known tokens only, so every step gains a token",
)
def _(function):
    for drafts, sampled in (([5], [7, 3]), ([6, 7], [5, 8, 9]), ([1, 2, 3], [0, 4, 5, 6])):
        _expect(function, drafts, sampled)


@accepted.property(
    "if no draft is wrong, the target's token after the last one is gained too",
    "`sampled` has one token more than `drafts`: what was it chosen after? Without drafts, it is the only one",
)
def _(function):
    for drafts, sampled in (([5], [5, 3]), ([5, 6, 7], [5, 6, 7, 8]), ([], [4]), ([], [0])):
        _expect(function, drafts, sampled)


@accepted.property(
    "nothing counts after the first wrong draft",
    "tokens after a wrong draft were chosen for another text, even where draft and target agree again",
)
def _(function):
    own = [5, 6, 7, 8, 9]
    for drafts, sampled in (([5, 6, 7], [5, 9, 7, 2]), ([5, 1, 7, 8], own), ([5, 1, 7, 1], own)):
        _expect(function, drafts, sampled)


@accepted.property(
    "tokens may repeat",
    "compare place by place; `in`, `index` and sets find a token at another place; 0 is a token, too",
)
def _(function):
    cases = (
        *(([4, 4], [4, 7, 2]), ([8, 5, 4], [8, 4, 5, 6]), ([0, 0, 3], [0, 7, 0, 5]), ([7, 5], [7, 7, 5])),
        *(([5, 5, 1], [5, 5, 3, 4]), ([5, 7, 5, 1], [5, 7, 5, 2, 9])),
    )
    for drafts, sampled in cases:
        _expect(function, drafts, sampled)


@accepted.property(
    "any number of drafts, and any token id", "any number of drafts may be right; compare the values of ids, with `==`"
)
def _(function):
    ids = list(range(1000, 1064))
    for right in (1, 6, 40, 62):
        drafts = ids[:right] + [each + 5000 for each in ids[right:63]]
        # Equal ids that are different objects: `is` finds no small integers here.
        _expect(function, drafts, [int(str(each)) for each in ids])
    _expect(function, [1000, 1256], [1000, 1000, 7])  # equal modulo 256
    _expect(function, [1000, 70_000], [1000, 4464, 7])  # and modulo 65,536


# ---- what followed the last tokens before

lookup = Exercise("lookup", seconds=SECONDS)


def _found(function, tokens: Sequence[int], most: int, wanted: Sequence[int], *sizes: tuple[int, ...]) -> None:
    given = list(tokens)
    got = function(given, most, *sizes)
    assert_list(got, "tokens; [] if there are none")
    assert given == list(tokens), "`tokens` has changed: work on a copy"
    said = f"tokens {_short(tokens)}, most={most}" + "".join(f", sizes={each}" for each in sizes)
    assert got == list(wanted), f"{said}: {_apart(wanted, got)}"


@lookup.example
def _(function):
    _found(function, [9, 1, 2, 3, 4, 1, 2], 4, [3, 4, 1, 2])


@lookup.property("no more than `most` drafts", "cut what follows the place")
def _(function):
    _found(function, [9, 1, 2, 3, 4, 1, 2], 1, [3])
    _found(function, [9, 1, 2, 3, 4, 5, 6, 1, 2], 4, [3, 4, 5, 6])


@lookup.property(
    "if fewer tokens follow, they are the drafts",
    "the text ends there: no more tokens are known to follow; the newest place counts all the same",
)
def _(function):
    _found(function, [9, 1, 2, 3, 1, 2], 7, [3, 1, 2])
    _found(function, [9, 8, 7, 6, 5, 8, 7], 12, [6, 5, 8, 7])
    _found(function, [9, 1, 2, 3, 4, 5, 1, 2, 6, 1, 2], 8, [6, 1, 2])  # more would follow an older place


@lookup.property(
    "the end of the text is not an earlier place",
    "the last n tokens always stand at the end, and nothing follows them; if they stand nowhere else: []",
)
def _(function):
    for tokens in ([1, 2, 3, 4], list(range(20)), [1, 2], [4]):
        _found(function, tokens, 3, [])


@lookup.property("an earlier place may overlap the end", "in 7, 7, 7 the last two tokens also stand one place earlier")
def _(function):
    _found(function, [9, 7, 7, 7], 1, [7])
    _found(function, [9, 8, 3, 3, 3, 3], 1, [3])


@lookup.property("of several places, the newest one counts", "begin the search at the end of the text")
def _(function):
    _found(function, [9, 1, 2, 3, 1, 2, 4, 8, 1, 2], 4, [4, 8, 1, 2])
    _found(function, [9, 1, 2, 5, 0, 1, 2, 7, 3, 1, 2, 6, 8, 1, 2], 4, [6, 8, 1, 2])


@lookup.property(
    "the longest n-gram goes first", "a place of the last 4 tokens comes before a newer place of the last 2"
)
def _(function):
    _found(function, [0, 1, 2, 3, 4, 5, 9, 3, 4, 6, 8, 1, 2, 3, 4], 10, [5, 9, 3, 4, 6, 8, 1, 2, 3, 4])
    eight = [1, 2, 3, 4, 5, 6, 7, 8]
    _found(function, [0, *eight, 20, 0, *eight[4:], 21, 0, *eight], 16, [20, 0, *eight[4:], 21, 0, *eight])


@lookup.property(
    "all n tokens are the same, in the same order",
    "one token in common is not enough, nor the same ones in another order",
)
def _(function):
    _found(function, [9, 1, 2, 5, 2, 1, 6, 1, 2], 6, [5, 2, 1, 6, 1, 2])
    _found(function, [9, 1, 2, 5, 1, 7, 6, 1, 2], 6, [5, 1, 7, 6, 1, 2])
    _found(function, [9, 1, 2, 5, 7, 2, 6, 1, 2], 6, [5, 7, 2, 6, 1, 2])
    nearly = [1, 9, 3, 4, 5, 6, 7, 8]  # the last eight tokens, but for one in the middle
    _found(function, [0, *nearly, 20, 0, *nearly[4:], 21, *range(1, 9)], 9, [21, *range(1, 9)])
    _found(function, [9, 1, 2, 5, 11, 2, 6, 1, 2], 6, [5, 11, 2, 6, 1, 2])  # "1 2" stands in "11 2", as text
    _found(function, [9, 1, 2, 5, 1, 23, 6, 1, 2], 6, [5, 1, 23, 6, 1, 2])  # and in "1 23"
    _found(function, [9, 1, 23, 5, 12, 3, 7, 1, 23], 6, [5, 12, 3, 7, 1, 23])  # both pairs join to "123"


@lookup.property(
    "a place at the very beginning counts", "where does the search end? A text of n + 1 tokens has one earlier place"
)
def _(function):
    _found(function, [1, 2, 9, 8, 1, 2], 4, [9, 8, 1, 2])
    _found(function, [4, 3, 7, 4, 3], 3, [7, 4, 3])
    if function([9, 7, 7, 7], 1) == [7]:  # an overlap is another property's matter
        _found(function, [7, 7, 7], 1, [7])


@lookup.property(
    "any length of the text, and any token id", "search the whole text; compare the values of ids, with `==`"
)
def _(function):
    large = [70_000, 1000, 2000, 3000, 1000, 2000]
    # Equal ids that are different objects: `is` finds no small integers here.
    _found(function, [int(str(each)) for each in large], 3, [3000, 1000, 2000])
    _found(function, [9, 1000, 2000, 5, 1256, 2256, 6, 1000, 2000], 6, [5, 1256, 2256, 6, 1000, 2000])  # modulo 256
    far = [3, *[5] * 5000, 1, 2]
    _found(function, [9, 1, 2, *far], len(far), far)


@lookup.property(
    "`sizes` says which n are tried", "the default is (8, 4, 2), but a caller may want others, in the order given"
)
def _(function):
    _found(function, [9, 1, 2, 3, 1, 2], 2, [], (3,))
    whole = function([9, 1, 2, 5, 2, 1, 6, 1, 2], 6) == [5, 2, 1, 6, 1, 2]  # parts are another property's matter
    if whole and function([1, 2, 3, 4], 3) == []:
        _found(function, [9, 5, 6, 7, 8, 5], 2, [])  # by default, one token is not enough
    if function([9, 1, 2, 3, 1, 2, 4, 8, 1, 2], 4) == [4, 8, 1, 2]:  # an older place is another property's matter
        _found(function, [0, 1, 2, 3, 20, 21, 2, 3, 22, 1, 2, 3], 4, [22, 1, 2, 3])  # and three are not tried
    _found(function, [9, 1, 4, 8, 1], 3, [4, 8, 1], (1,))
    _found(function, [9, 1, 2, 3, 7, 5, 8, 1, 2, 3], 6, [7, 5, 8, 1, 2, 3], (5, 3))
    _found(function, [0, 7, 1, 9, 8, 3, 1], 4, [9, 8, 3, 1], (3, 1))
    five = [1, 2, 3, 4, 5]
    text = [*five, 20, *five[1:], 21, *five]
    _found(function, text, 6, [21, *five], (4, 5))  # 5 first would give 20
    if function([9, 1, 2, 3, 4, 5, 1, 2, 6, 1, 2], 8) == [6, 1, 2]:  # few that follow are another property's matter
        _found(function, text, 7, [21, *five], (4, 5))  # more would follow the last 5


# ---- how many drafts are worth their time

best_count = Exercise("best_count", seconds=SECONDS)


def _count(function, p: float, ms: Sequence[float], wanted: int) -> None:
    given = list(ms)
    got = function(p, given)
    said = f"p={p:g}, step_ms={list(ms) if len(ms) <= 9 else f'of {len(ms)} steps'}"
    assert_int(got, said)
    assert given == list(ms), "`step_ms` has changed: work on a copy"
    if got != wanted:
        rates = ", ".join(
            f"{_gain(p, count)} in {ms[count]:g} ms with {count}" for count in (wanted, got) if 0 <= count < len(ms)
        )
        raise AssertionError(f"{said}: expected {wanted}, got {got}; {rates}")


def _gain(p: float, drafts: int) -> str:
    tokens = f"{float(sum(Fraction(p) ** power for power in range(drafts + 1))):.4g}"
    return "1 token" if tokens == "1" else f"{tokens} tokens"


@best_count.example
def _(function):
    _count(function, 0.5, [1.0, 1.1], 1)


@best_count.property(
    "the most tokens per ms, with the token that every step gains",
    "divide by the time of the whole step; the sum begins with 1, the target's own token, also without drafts",
)
def _(function):
    _count(function, 0.96875, [1.0, 1.25, 2.0], 1)
    _count(function, 0.5, [1.0, 1.75], 0)
    _count(function, 0.25, [1.0, 1.5, 1.75, 2.0], 0)
    _count(function, 0.5, [4.0], 0)


@best_count.property(
    "a draft counts only if all those before it are right",
    "the first draft gains a token with the probability p, the second with p * p, and so on",
)
def _(function):
    _count(function, 0.5, [1.0, 1.375], 1)
    _count(function, 0.5, [1.0, 1.125, *[2.8125] * 6], 1)
    _count(function, 0.75, [1.0, 1.25, *[5.0] * 8], 1)


@best_count.property(
    "a high price of the first draft does not end the search",
    "compare all k: the first may not pay, and more may; a longer step may even take less time",
)
def _(function):
    _count(function, 0.875, [1.0, 2.0, 2.03125, 2.0625, 2.09375, 2.125], 5)
    _count(function, 0.75, [1.0, 1.5, 2.25, 2.25, 2.25], 4)
    _count(function, 0.5, [1.0, 2.0, 1.25], 2)
    _count(function, 0.75, [1.0, 1.125, 3.0, 3.0, 3.0, 3.0, 3.0, 1.25], 7)


@best_count.property("drafts that are always right", "for p = 1, (1 - p ** (k + 1)) / (1 - p) divides by 0: add up")
def _(function):
    _count(function, 1.0, [1.0, 1.25, 1.5, 1.75], 3)
    _count(function, 1, [1.0, 1.5, 1.75], 2)
    if function(0.984375, [1.0, 2.5]) == 0:  # the token that every step gains is another property's matter
        _count(function, 1.0, [1.0, 2.5], 0)


@best_count.property("of equally good numbers, the fewest", "a larger number must be better, not just as good")
def _(function):
    _count(function, 0.0, [1.0, 1.0, 1.0], 0)
    _count(function, 0, [2.5, 2.5], 0)


@best_count.property("step_ms may have any length, and any unit", "use its entries and its length, and no others")
def _(function):
    _count(function, 0.75, [0.001, 0.0011, 0.0012], 2)
    _count(function, 0.96875, [100 + place / 64 for place in range(64)], 63)
    _count(function, 0.5, [2000.0, 2100.0, 2200.0], 2)
    _count(function, 0.125, [1.0, 1.0078125], 1)  # the H200's break-even is another
