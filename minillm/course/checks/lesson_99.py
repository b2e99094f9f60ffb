"""Lesson 99: a request's timings, percentiles over many, Poisson arrivals, attention for a whole batch."""

import math
from itertools import pairwise

import torch

from . import Exercise

timings = Exercise("timings")


def _near(found, wanted) -> bool:
    return len(found) == len(wanted) and all(
        math.isclose(a, b, abs_tol=1e-9) for a, b in zip(found, wanted, strict=True)
    )


@timings.example
def _(function):
    ttft, gaps, e2e = function(0.0, [(0.5, 1), (0.75, 1)])
    assert _near([ttft, *gaps, e2e], [0.5, 0.25, 0.75]), f"(0.5, [0.25], 0.75) should come, not {(ttft, gaps, e2e)}"


@timings.property("waiting begins when the request was due", "subtract `due` from both, TTFT and end-to-end")
def _(function):
    ttft, _, e2e = function(10.0, [(10.5, 1), (11.0, 1)])
    assert _near([ttft, e2e], [0.5, 1.0]), f"due at 10, first token 10.5, last 11: 0.5 and 1, not {ttft} and {e2e}"


@timings.property("a gap is since the token before", "remember the last arrival, not the first")
def _(function):
    gaps = list(function(0.0, [(1.0, 1), (1.5, 1), (2.0, 1), (2.5, 1)])[1])
    assert max(gaps) < 0.6, f"tokens half a second apart have gaps of 0.5, not {gaps}"


@timings.property("tokens that come together are tokens", "k tokens in one arrival: k gaps, all but one of them 0")
def _(function):
    gaps = list(function(0.0, [(1.0, 1), (1.5, 3)])[1])
    assert len(gaps) == 3, f"1 token and then 3 at once: 3 gaps, not {len(gaps)}"


@timings.property("the wait before tokens that come together is one wait", "do not share it out: [0.5, 0, 0]")
def _(function):
    gaps = list(function(0.0, [(1.0, 1), (1.5, 3)])[1])
    assert math.isclose(max(gaps), 0.5), f"the reader waited 0.5 s and then had 3 tokens: 0.5 is one gap, not {gaps}"


@timings.property("the first arrival may bring several tokens", "only the very first token has no gap")
def _(function):
    gaps = list(function(0.0, [(1.0, 3), (1.5, 1)])[1])
    assert len(gaps) == 3, f"3 tokens at once and then 1: 3 gaps, not {len(gaps)}"


pooled_percentile = Exercise("pooled_percentile")


@pooled_percentile.example
def _(function):
    found = function([[10.0, 20.0, 30.0]], 50)
    assert found == 20, f"half of 10, 20, 30 are at most 20, not {found}"


@pooled_percentile.property("a value that was seen", "no mean of two neighbours: take one of the values")
def _(function):
    found = function([[1.0, 2.0]], 75)
    assert found in (1.0, 2.0), f"no request waited {found}: the waits were 1 and 2"


@pooled_percentile.property("no rank too many", "the rank counts from 1: ranked[rank - 1]")
def _(function):
    found = function([[float(i) for i in range(1, 101)]], 99)
    assert found < 99.5, f"of a hundred values the 99th is p99, not {found}: 99 % are at most 99"


@pooled_percentile.property("ranks are rounded up", "math.ceil, not round: the first of five covers 20 %, not 25 %")
def _(function):
    found = function([[10.0, 20.0, 30.0, 40.0, 50.0]], 25)
    assert found == 20, f"a quarter of 10, 20, 30, 40, 50 is number 1.25, rounded up: 20, not {found}"


@pooled_percentile.property("in whatever order they came", "sort before you count")
def _(function):
    found = function([[30.0, 10.0, 20.0]], 99)
    assert found > 25, f"the largest of 30, 10, 20 is p99, not {found}"


@pooled_percentile.property("every gap counts once", "first put all requests' gaps into one list")
def _(function):
    found = function([[1.0] * 9, [101.0]], 50)
    assert found == 1, f"nine gaps of 1 and one of 101: half are at most 1, not {found}"


@pooled_percentile.property("what was measured stays as it was", "`sorted` makes a new list; `.sort()` changes yours")
def _(function):
    gaps = [[30.0, 10.0, 20.0]]
    function(gaps, 50)
    assert gaps == [[30.0, 10.0, 20.0]], f"the caller's [[30, 10, 20]] has become {gaps}"


poisson_arrivals = Exercise("poisson_arrivals")


@poisson_arrivals.example
def _(function):
    found = list(function(1.0, [0.5]))
    assert _near(found, [math.log(2)]), f"[0.693...] should come, not {found}"


@poisson_arrivals.property("times, not gaps", "each request comes a gap after the one before: add them up")
def _(function):
    found = list(function(1.0, [0.5, 0.5, 0.5]))
    assert found[-1] > 2, f"three gaps of 0.693 end at 2.08, not {found[-1]:.3g}"


@poisson_arrivals.property("twice the rate is half the wait", "divide by the rate")
def _(function):
    found = list(function(4.0, [0.5]))[0]
    assert math.isclose(found, math.log(2) / 4), f"at 4 a second the gap of 0.693 becomes 0.173, not {found:.3g}"


@poisson_arrivals.property("small draws are short gaps", "-log(1 - u), not -log(u): a draw may be 0, never 1")
def _(function):
    found = list(function(1.0, [0.0]))[0]
    assert found < 0.1, f"a draw of 0 is a gap of 0, not {found:.3g}"


@poisson_arrivals.property(
    "many short gaps, few long ones", "-log(1 - u) / rate: the gap grows without end as u comes near 1"
)
def _(function):
    found = sum(list(function(1.0, [u]))[0] for u in (0.1, 0.9))
    assert math.isclose(found, -math.log(0.09)), f"draws of 0.1 and 0.9 make gaps of 2.41 together, not {found:.3g}"


@poisson_arrivals.property("each gap has a draw of its own", "use every number of `uniform` once")
def _(function):
    found = list(function(1.0, [0.5, 0.9375, 0.5, 0.75]))
    steps = {round(late - early, 6) for early, late in pairwise(found)}
    assert len(steps) > 1, "different draws gave a steady beat"


batched_attention = Exercise("batched_attention")


def _attend(q, k, v, lengths, scale):
    """Row by row, head by head, in float64."""
    out, group = torch.zeros(q.shape, dtype=torch.float64), q.shape[1] // k.shape[2]
    for row, length in enumerate(lengths.tolist()):
        for head in range(q.shape[1]):
            keys, values = (part[row, :length, head // group].double() for part in (k, v))
            out[row, head] = (keys @ q[row, head].double() * scale).softmax(0) @ values
    return out


def _draw(rows, keys, heads, kv_heads, d=8):
    made = torch.Generator().manual_seed(99)
    shapes = (rows, heads, d), (rows, keys, kv_heads, d), (rows, keys, kv_heads, d)
    return [torch.randn(shape, generator=made) for shape in shapes]


def _equal(found, wanted) -> bool:
    return torch.allclose(found.double(), wanted, atol=1e-4)


@batched_attention.example
def _(function):
    k, v = torch.zeros(1, 2, 1, 1), torch.tensor([1.0, 3.0]).view(1, 2, 1, 1)
    found = function(torch.ones(1, 1, 1), k, v, torch.tensor([2]), 1.0)
    assert found.shape == (1, 1, 1) and math.isclose(found.item(), 2.0), "two equal keys: the mean of 1 and 3"


@batched_attention.property("each row ends at its own length", "key number i of row r counts when i < lengths[r]")
def _(function):
    q, k, v = _draw(3, 6, 2, 2)
    lengths = torch.tensor([6, 3, 1])
    return _equal(function(q, k, v, lengths, 1.0), _attend(q, k, v, lengths, 1.0))


@batched_attention.property("scores are scaled", "multiply by `scale` before the softmax")
def _(function):
    q, k, v = _draw(2, 5, 2, 2)
    lengths = torch.tensor([5, 5])
    return _equal(function(q, k, v, lengths, 0.125), _attend(q, k, v, lengths, 0.125))


@batched_attention.property(
    "neighbouring heads share a key-value head", "heads 0 and 1 of 4 use KV head 0 of 2: repeat_interleave, not repeat"
)
def _(function):
    q, k, v = _draw(1, 5, 4, 2)
    lengths = torch.tensor([5])
    return _equal(function(q, k, v, lengths, 1.0), _attend(q, k, v, lengths, 1.0))


@batched_attention.property(
    "leftovers never matter, not even NaN",
    "unseen scores become -inf; 0 * NaN is NaN, so fill the unseen values with 0 too",
)
def _(function):
    q, k, v = _draw(1, 5, 2, 2)
    # After the length, a slot that must not be read; after that, NaN.
    k[0, 3], v[0, 3], v[0, 4] = -1e4 * q[0], 0.0, torch.nan
    lengths = torch.tensor([3])
    assert _equal(function(q, k, v, lengths, 1.0), _attend(q, k, v, lengths, 1.0))
    # What is seen scores -300, a leftover 300: they must be hidden by -inf, not by -100.
    q, k, v = (part.double() for part in _draw(1, 5, 2, 2))
    q[:], k[:, :3], k[:, 3], k[:, 4] = 1.0, -37.5, -75.0, 37.5
    shows = "visible keys score -300, and keys after them change the output: is it hidden by -inf?"
    assert _equal(function(q, k, v, lengths, 1.0), _attend(q, k, v, lengths, 1.0)), shows


@batched_attention.property(
    "dtype and device are those of q",
    "make new tensors with device=q.device, as on a GPU they must be; end with .to(q.dtype)",
)
def _(function):
    q, k, v = (part.bfloat16() for part in _draw(2, 5, 4, 2))
    found = function(q, k, v, torch.tensor([5, 3]), 1.0).dtype
    assert found == q.dtype, f"bfloat16 came in and {found} went out"
    try:
        with torch.device("meta"):  # where a tensor lands that is made without a device: not where the others are
            found = function(q, k, v, torch.tensor([5, 3], device="cpu"), 1.0).device
    except RuntimeError:
        return False
    return found == q.device


@batched_attention.property("large scores do not overflow", "exp(200) is inf: let torch's softmax do it")
def _(function):
    q, k, v = _draw(1, 5, 2, 2)
    q, lengths = 100 * q, torch.tensor([5])
    return _equal(function(q, k, v, lengths, 1.0), _attend(q, k, v, lengths, 1.0))
