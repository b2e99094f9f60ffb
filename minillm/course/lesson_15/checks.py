"""The nearest matrix of a low rank, and what three ways of using adapters read.  Lesson 15."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..shared.checks import Exercise, Explained, a_type, assert_int
from ..shared.differences import assert_near
from .adapting import numbers_read as read_here

SECONDS = 10  # of CPU time for one property: correct solutions take milliseconds

# ---- factors of a change

low_rank = Exercise("low_rank", seconds=SECONDS)
SHAPES = ((8, 8), (12, 5), (5, 12))  # of changes: square, tall, wide


def _drawn(out: int, inputs: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + 100 * out + inputs)
    return torch.randn(out, inputs, generator=generator, dtype=torch.float64).to(dtype)


def _factors(function: Callable, change: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the results of a call, if these are two matrices that can be multiplied as up @ down."""
    call = f"low_rank of a change {list(change.shape)} at rank {rank}"
    got = function(change.clone(), rank)
    if not isinstance(got, tuple | list) or len(got) != 2:
        what = f"{len(got)} values" if isinstance(got, tuple | list) else a_type(got)
        raise Explained(f"{call}: expected the two matrices (down, up), got {what}")
    for name, each in zip(("down", "up"), got, strict=True):
        if not isinstance(each, Tensor) or each.dim() != 2:
            shape = f"a tensor {list(each.shape)}" if isinstance(each, Tensor) else a_type(each)
            raise Explained(f"{call}: {name} must be a matrix, got {shape}")
    down, up = got
    if down.shape[0] != up.shape[1] or (up.shape[0], down.shape[1]) != tuple(change.shape):
        raise Explained(
            f"{call}: up @ down must be {list(change.shape)}, but down is {list(down.shape)} and up is "
            f"{list(up.shape)}: down is [rank, in], and up [out, rank]"
        )
    return down, up


def _error(change: Tensor, down: Tensor, up: Tensor) -> float:
    return torch.linalg.matrix_norm(change.double() - up.double() @ down.double()).item()


def _least_error(change: Tensor, rank: int) -> float:
    return torch.linalg.svdvals(change.double())[rank:].square().sum().sqrt().item()


@low_rank.example
def _(function):
    change = torch.tensor([[0.6, 0.0], [0.8, 0.0]], dtype=torch.float64)
    down, up = _factors(function, change, 1)
    assert_near(up @ down, change, "up @ down of the example", absolute=1e-6)


@low_rank.property(
    "down has `rank` rows, and up as many columns",
    "keep the first `rank` singular values, and what belongs to them",
)
def _(function):
    for shape in SHAPES:
        for rank in (1, 3):
            down, _ = _factors(function, _drawn(*shape), rank)
            assert len(down) == rank, f"a change {list(shape)} at rank {rank}: down has {len(down)} rows"


@low_rank.property(
    "up @ down is the nearest matrix of its rank",
    "torch.linalg.svd gives U, s and V (its third result is V transposed already), the largest values first: each "
    "value belongs into the product exactly once",
)
def _(function):
    for seed, shape in enumerate(SHAPES):
        change = _drawn(*shape, seed=seed) * torch.logspace(0, -1, shape[1], dtype=torch.float64)
        for rank in (1, 2, 4):
            down, up = _factors(function, change, rank)
            _expect_nearest(change, down, up, rank)
    large = _drawn(60, 40)  # all of its values are alike, so that estimates of the largest are not good enough
    _expect_nearest(large, *_factors(function, large, 5), 5)


def _expect_nearest(change: Tensor, down: Tensor, up: Tensor, rank: int) -> None:
    least, found = _least_error(change, rank), _error(change, down, up)
    assert found <= 1.0001 * least, (
        f"a change {list(change.shape)} at rank {rank}: up @ down is off by {found:.6g} (the root of the summed "
        f"squares), and {least:.6g} is possible; {_where(change, up @ down)}"
    )


def _where(change: Tensor, product: Tensor) -> str:
    off = (change.double() - product.double()).abs().nan_to_num(nan=torch.inf)
    row, column = divmod(int(off.argmax()), off.shape[1])
    return f"the largest difference is at [{row}, {column}]: {change[row, column]:.4g}, not {product[row, column]:.4g}"


@low_rank.property(
    "a change that has this rank, or a lower one, comes back",
    "singular values may be 0: do not divide by them, and keep them, so that `down` has `rank` rows",
)
def _(function):
    for out, inputs, own, rank in ((8, 8, 2, 4), (12, 5, 1, 5), (5, 12, 3, 3), (6, 4, 0, 2)):
        change = _drawn(out, own, seed=1) @ _drawn(own, inputs, seed=2)
        down, up = _factors(function, change, rank)
        what = f"a change {[out, inputs]} of rank {own}, at rank {rank}"
        assert_near(up @ down, change, f"{what}: up @ down", absolute=1e-3)
        assert len(down) >= rank, f"{what}: down has {len(down)} rows"  # more: another property's matter


@low_rank.property("float64 loses nothing, and the dtype stays", "compute in the dtype of `change`")
def _(function):
    for dtype, allowed in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        change = _drawn(7, 2, dtype) @ _drawn(2, 9, dtype)
        down, up = _factors(function, change, 2)
        assert down.dtype == up.dtype == dtype, f"the change is {dtype}, down is {down.dtype} and up is {up.dtype}"
        assert_near(up @ down, change, f"a change of rank 2 in {dtype}: up @ down", absolute=allowed)


@low_rank.property("the change itself is not changed", "work on a copy, or write into no result of torch.linalg")
def _(function):
    change = _drawn(6, 6)
    given = change.clone()
    function(given, 2)
    assert torch.equal(given, change), "`change` was overwritten"


# ---- what is read for a batch

numbers_read = Exercise("numbers_read", seconds=SECONDS)
WAYS = ("merged", "by token", "grouped")
Tokens = Mapping[str | None, int]
SHARED: tuple[Tokens, ...] = ({"a": 5}, {"a": 5, "b": 2}, {"a": 1, "b": 1, "c": 7})  # several tokens an adapter


def _three(function: Callable, out: int, inputs: int, rank: int, tokens: Tokens) -> tuple[int, int, int]:
    """Return the results of a call, if these are three whole numbers."""
    call = f"numbers_read({out}, {inputs}, {rank}, {dict(tokens)})"
    got = function(out, inputs, rank, dict(tokens))
    if not isinstance(got, tuple | list) or len(got) != 3:
        raise Explained(f"{call}: expected three numbers, got {got!r}")
    for way, each in zip(WAYS, got, strict=True):
        assert_int(each, f"{call}, {way}")
    return tuple(got)


def _expect_read(function: Callable, tokens: Tokens, ways: tuple[int, ...] = (0, 1, 2)) -> None:
    for sizes in ((6, 4, 1), (40, 70, 3)):
        call = f"numbers_read({', '.join(map(str, sizes))}, {dict(tokens)})"
        got, wanted = _three(function, *sizes, tokens), read_here(*sizes, tokens)
        for way in ways:
            assert got[way] == wanted[way], f"{call}, {WAYS[way]}: expected {wanted[way]:,}, got {got[way]:,}"


@numbers_read.example
def _(function):
    got = _three(function, 6, 4, 1, {"pirate": 1, "french": 1})
    assert got == (48, 44, 44), f"numbers_read(6, 4, 1, {{'pirate': 1, 'french': 1}}): expected (48, 44, 44), got {got}"


@numbers_read.property(
    "merged: a matrix of its own for each adapter",
    "each adapter in the batch has its own sum, out x in numbers, which all its tokens share",
)
def _(function):
    for tokens in SHARED:
        _expect_read(function, tokens, (0,))


@numbers_read.property(
    "merged: tokens without an adapter need the matrix itself",
    "None is one more model: its tokens need the matrix to which nothing was added",
)
def _(function):
    batches: tuple[Tokens, ...] = ({None: 3}, {None: 1, "a": 1}, {"a": 1, None: 4, "b": 1})
    for tokens in batches:
        _expect_read(function, tokens, (0,))


@numbers_read.property(
    "by token: both factors for each token that has an adapter",
    "down is [rank, in] and up [out, rank]; without grouping, every token reads its own copy of both",
)
def _(function):
    for tokens in SHARED:
        _expect_read(function, tokens, (1,))


@numbers_read.property(
    "grouped: both factors once for each adapter",
    "all tokens of an adapter are multiplied with its factors at once, however many they are",
)
def _(function):
    for tokens in SHARED:
        _expect_read(function, tokens, (2,))


@numbers_read.property(
    "tokens without an adapter read no factors",
    "unmerged, None's tokens need the matrix, which is read for all, and nothing else",
)
def _(function):
    batches: tuple[Tokens, ...] = ({None: 3}, {None: 2, "a": 1}, {"b": 1, None: 1})
    for tokens in batches:
        _expect_read(function, tokens, (1, 2))


@numbers_read.property(
    "what has no token in the batch is not read",
    "an adapter may be loaded, with 0 tokens in this batch; and an empty batch reads nothing at all",
)
def _(function):
    batches: tuple[Tokens, ...] = (
        {"a": 1, "b": 0}, {"a": 0, "b": 0, "c": 1}, {None: 0, "a": 1}, {}, {"a": 0}, {None: 0},
    )  # fmt: skip
    for tokens in batches:
        _expect_read(function, tokens)


@numbers_read.property("the dictionary is not changed", "count in variables of your own")
def _(function):
    given = {"a": 2, None: 1, "b": 0}
    function(6, 4, 1, given)
    assert given == {"a": 2, None: 1, "b": 0}, f"`tokens` is {given} after the call"
