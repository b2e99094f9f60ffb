"""For the checkers of lesson 04: attention over given tiles, tiles needed and visited, shares combined."""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..shared.checks import a_type
from ..shared.differences import assert_near

SPANS = [(0, 15), (16, 31), (48, 55), (5, 5), (8, 11), (16, 16), (30, 40)]
SIZES = (8, 1, 5, 16)  # of a tile


def tile(scores: float, values: float, keys: int = 2, rows: int = 1) -> tuple[Tensor, Tensor]:
    """Keys that all have these scores and values."""
    return torch.full((rows, keys), scores, dtype=torch.float64), torch.full((keys, 1), values, dtype=torch.float64)


def of_tiles(function: Callable, *tiles: tuple[Tensor, Tensor]) -> Tensor:
    """[rows, d] of tiles that can be read once, one after the other."""
    rows, dim = len(tiles[0][0]), tiles[0][1].shape[1]
    got = function(iter(tiles), rows, dim)
    assert isinstance(got, Tensor), f"return a tensor, not {a_type(got)}"
    assert list(got.shape) == [rows, dim], f"the shape is {list(got.shape)}, not {[rows, dim]}"
    return got


def gives(function: Callable, want: list[float], what: str, *tiles: tuple[Tensor, Tensor]) -> None:
    """Assert that each row's output, of values with one number, is the one wanted."""
    what = f"{what.rstrip(',')}: the output" + (" of each row" if len(want) > 1 else "")
    assert_near(of_tiles(function, *tiles)[:, 0], want, what, absolute=1e-5)


def growing() -> list[Tensor]:
    """Scores of three tiles [3 rows, 3 keys]; each row's maximum grows by 0.5 to 2, not all in the same tiles."""
    tops = torch.tensor([[0.5, 1.5, 3.5], [1.0, 0.0, 2.0], [-1.0, 1.0, 0.5]]).double()
    spread = torch.tensor([0.0, -0.7, -1.2]).double()
    return [top[:, None] + spread for top in tops.T]


def visited_tiles(function: Callable, first: int, last: int, keys: int, **options) -> list[int]:
    got = function(first, last, keys, **options)
    assert isinstance(got, range), f"return a range, not {a_type(got)}"
    return list(got[:1000])


def tiles_needed(first: int, last: int, keys: int, window: int | None) -> set[int]:
    """By trying every pair of a query and a key."""
    seen = ((q, k) for q in range(first, last + 1) for k in range(q + 1) if not window or k > q - window)
    return {key // keys for _, key in seen}


def cases(function: Callable, *windows: int | None) -> Iterator[tuple[str, int, set[int], set[int]]]:
    """(case in words, last tile, tiles needed, tiles visited) for many queries, tile sizes and these windows."""
    for (first, last), keys, window in itertools.product(SPANS, SIZES, windows):
        what = f"queries {first} to {last}, tiles of {keys} keys" + (f", a window of {window}" if window else "")
        options = {"window": window} if window else {}
        visited = set(visited_tiles(function, first, last, keys, **options))
        yield what, last // keys, tiles_needed(first, last, keys, window), visited


def combined(function: Callable, log_totals: list[float], values: list[float]) -> float:
    """Of one head, whose shares have outputs [shares, 1] and logarithms of their weights' sums [shares]."""
    got = function(torch.tensor(values).double()[:, None], torch.tensor(log_totals).double())
    assert isinstance(got, Tensor), f"return a tensor, not {a_type(got)}"
    assert list(got.shape) == [1], f"the shape is {list(got.shape)}, not [1]"
    return got.item()


def weights(function: Callable, log_totals: Tensor) -> Tensor:
    """The weight of each share [..., shares], divided by their sum, whatever that is."""
    shares = log_totals.shape[-1]
    got = function(torch.eye(shares).double().expand(*log_totals.shape, shares).clone(), log_totals.clone())
    assert isinstance(got, Tensor), f"return a tensor, not {a_type(got)}"
    assert got.shape == log_totals.shape, f"the shape is {list(got.shape)}, not {list(log_totals.shape)}"
    return got / got.sum(-1, keepdim=True)
