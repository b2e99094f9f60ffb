"""Call a learner's attention with a cache and without, and assert which keys its queries see.  Lesson 02.

For the lesson's checker. Arguments are copied, so that only the property about them sees changes.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..shared.checks import a_type
from ..shared.differences import difference

DIM = 8
TOLERANCE = 1e-4  # so that a solution may compute in float32
LONG = 140  # tokens of a long sequence: more than any block or window that a solution may have assumed

Attend = Callable[..., Tensor]  # (q, k, v, scale) -> the output, over a whole sequence


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same(got: Tensor, want: Tensor) -> bool:
    assert got.shape == want.shape, f"the shape is {list(got.shape)}, not {list(want.shape)}"
    return torch.allclose(got, want.to(got.dtype), rtol=0, atol=TOLERANCE, equal_nan=True)


def differs(got: Tensor, want: Tensor, tolerance: float = TOLERANCE) -> str:
    """Return where the two differ most, in words; an empty string if they are near."""
    same(got, want)  # the shapes
    return difference(got, want.to(got.dtype), absolute=tolerance)


def plain(function: Callable) -> Attend:
    """The first exercise's function."""
    return lambda q, k, v, scale: _checked(q, function(q.clone(), k.clone(), v.clone(), scale=scale))


def over_cache(function: Callable, length: int) -> Attend:
    """The function with a cache of which the first `length` slots are filled."""
    return lambda q, k, v, scale: _checked(q, function(q.clone(), k.clone(), v.clone(), length, scale=scale))


def over_prompt(function: Callable) -> Attend:
    """The function with a cache that holds nothing but the queries' own tokens."""
    return lambda q, k, v, scale: over_cache(function, len(k))(q, k, v, scale)


def _checked(q: Tensor, out: Any) -> Tensor:
    """The same words for all properties, so that `check` reports such a mistake once."""
    assert isinstance(out, Tensor), f"the result is {a_type(out)}, not a tensor"
    assert out.shape == q.shape, "the result does not have the shape of q, [tokens, heads, d]"
    return out


def assert_values_used(attend: Attend) -> None:
    """Functions that ignore the values have several of the other properties."""
    q, k, v = (normal(3, 1, DIM, seed=s) for s in range(3))
    moved = attend(q, k, v + 1, 0.5) - attend(q, k, v, 0.5)
    assert moved.abs().max() > TOLERANCE, "the result does not depend on the values"


def assert_past_seen(
    attend: Attend, queries: int, length: int, keys: Iterable[int], capacity: int | None = None
) -> None:
    """Each of the newest `queries` tokens sees those of `keys` that are not after it, also if a score is exactly 0."""
    slots = capacity or length
    q, k, v = normal(queries, 1, DIM) / 4, normal(slots, 1, DIM, seed=1), normal(slots, 1, DIM, seed=2)
    for key, zero in itertools.product(keys, (False, True)):
        k2, v2 = k.clone(), v.clone()
        k2[key] *= not zero
        v2[key] += 50.0
        moved = (attend(q, k2, v2, 0.5) - attend(q, k2, v, 0.5)).abs().amax((1, 2))
        for i in range(queries):
            at = length - queries + i
            query = f"query {i} of {queries}" + (f", at position {at}," if queries < length else "")
            score = ", whose score is exactly 0" if zero else ""
            assert at < key or moved[i] > 1e-3, f"{query} does not see key {key}{score}"


def assert_later_hidden(
    attend: Attend, queries: int, length: int, first_hidden: Iterable[int], capacity: int | None = None
) -> None:
    """The query just before a key does not change when that key and all after it, up to `length`, do."""
    slots = capacity or length
    v = normal(slots, 1, DIM, seed=2)
    for q, k, later, scores in _seen_and_later(queries, slots):
        before = attend(q, k, v, 0.5)
        for key in first_hidden:
            k2, v2 = k.clone(), v.clone()
            k2[key:length], v2[key:length] = later, -7.0
            past = slice(0, key - (length - queries))
            after = attend(q, k2, v2, 0.5)
            assert same(after[past], before[past]), (
                f"the output of query {past.stop - 1} of {queries} changed when keys from {key} on did{scores}"
                + (f" (length {length}, capacity {capacity})" if slots > length else "")
            )


def _seen_and_later(queries: int, keys: int) -> list[tuple[Tensor, Tensor, float, str]]:
    """Queries, keys, what to put into keys that a query must not see, and the scores in words.

    Random ones; then scores of 20,000 next to -20,000; then of -4e31, below what replaces -inf in some programs, and
    within float32.
    """
    ones = torch.ones(queries, 1, DIM, dtype=torch.float64)
    low = [
        (ones, torch.full((keys, 1, DIM), -number, dtype=torch.float64), number, f": its own keys score -{said}, {why}")
        for number, said, why in (
            (5000.0, "20,000", "later ones 20,000, and a softmax over both gives its own a weight of 0"),
            (1e31, "4e31", "which is lower than -1e9 or -1e30"),
        )
    ]
    return [(normal(queries, 1, DIM), normal(keys, 1, DIM, seed=1), 3.0, ""), *low]
