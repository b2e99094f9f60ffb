"""Rejection sampling at one position.  Lesson 13."""

import numpy as np

from ..shared.checks import Exercise, assert_int

SECONDS = 10  # of CPU time for one property: correct solutions take a tenth of a second
GRID = 32  # numbers between 0 and 1, at which each rule is asked

accept_or_resample = Exercise("accept_or_resample", seconds=SECONDS)

# p and q, in parts of their sum. The last case has small probabilities, as most tokens of a vocabulary do.
CASES = (
    ([26, 16, 12, 6, 4], [10, 20, 6, 22, 6]),
    ([8, 8, 16, 32], [32, 16, 8, 8]),
    ([48, 16], [16, 48]),
    ([16, 32, 16], [0, 64, 0]),
    ([20, 44], [20, 44]),
    ([3006, 6002, 8, 984], [3000, 6000, 16, 984]),
    ([4, 4, 8, 8, 8, 8, 8, 16], [20, 12, 8, 8, 8, 4, 4, 0]),
)
NUMBERS = ((np.arange(GRID) + 0.5) / GRID).tolist()
SOME = NUMBERS[:: GRID // 4]


def _case(p: list[int], q: list[int]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(p) / sum(p), np.array(q) / sum(q)


def _token(function, p: np.ndarray, q: np.ndarray, draft: int, u: float, v: float) -> int:
    mine, theirs = p.copy(), q.copy()
    got = function(mine, theirs, draft, u, v)
    given = _given(p, q, draft, u, v)
    assert_int(got, given)
    assert (mine == p).all() and (theirs == q).all(), "`p` or `q` has changed: work on a copy"
    assert 0 <= got < len(p), f"{given}: {got} is no token; there are {len(p)}"
    return int(got)


def _given(p: np.ndarray, q: np.ndarray, draft: int, u: float, v: float) -> str:
    return f"p={p.tolist()}, q={q.tolist()}, draft {draft}, u={u:g}, v={v:g}"


@accept_or_resample.example
def _(function):
    p, q = np.array([0.5, 0.5]), np.array([1.0, 0.0])
    for u, wanted in ((0.4, 0), (0.6, 1)):
        got = _token(function, p, q, 0, u, 0.9)
        assert got == wanted, f"{_given(p, q, 0, u, 0.9)}: expected {wanted}, got {got}"


@accept_or_resample.property(
    "a draft is accepted with the probability min(1, p(x)/q(x))",
    "u is compared with a ratio of two probabilities; where the target likes x at least as much, every u accepts",
)
def _(function):
    for p, q in (_case(*each) for each in CASES):
        for draft in np.flatnonzero(q).tolist():
            # A wrong choice after a rejection may give the draft again: for some v it gives another token.
            kept = min(sum(_token(function, p, q, draft, u, v) == draft for u in NUMBERS) for v in SOME) / GRID
            ratio = min(1.0, p[draft] / q[draft])
            assert abs(kept - ratio) < 1 / GRID, (
                f"p={p.tolist()}, q={q.tolist()}, draft {draft}, over {GRID} evenly spaced u: the draft comes out in "
                f"{kept:.3f} of them, and min(1, p(x)/q(x)) is {ratio:.3f}"
            )
    p, q = np.array([0.0, 0.75, 0.25]), np.array([0.5, 0.25, 0.25])
    got = _token(function, p, q, 0, 0.0, 0.5)
    assert got != 0, (
        f"{_given(p, q, 0, 0.0, 0.5)}: the draft was accepted, and the target never chooses it. u may be 0: compare "
        "it with <, not <="
    )


@accept_or_resample.property(
    "after a rejection, tokens come out in proportion to max(p - q, 0)",
    "it is 0 for all tokens that the drafter proposes often enough; `pick` takes weights that do not sum to 1; `u` is "
    "spent: choose with `v`",
)
def _(function):
    for p, q in (_case(*each) for each in CASES):
        left = np.maximum(p - q, 0)
        wanted = left / left.sum() if left.any() else left
        for draft in np.flatnonzero(p < q).tolist():
            got = [_token(function, p, q, draft, 0.9999, v) for v in NUMBERS]
            found = np.bincount(got, minlength=len(p)) / GRID
            far = np.abs(found - wanted)
            token = int(far.argmax())
            assert far[token] < 1.5 / GRID, (
                f"p={p.tolist()}, q={q.tolist()}, draft {draft}, rejected, over {GRID} evenly spaced v: token {token} "
                f"comes out in {found[token]:.3f} of them, expected {wanted[token]:.3f}"
            )
            token = _token(function, p, q, draft, 0.9999, 0.0)
            assert wanted[token], f"{_given(p, q, draft, 0.9999, 0.0)}: token {token} came out, whose residual is 0"
