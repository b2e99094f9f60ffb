"""Check the sums that the adapters of a batch add to a product, group by group.  Lesson 15."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..shared.checks import Exercise, Explained, a_type
from ..shared.differences import assert_near

SECONDS = 10  # of CPU time for one property: correct solutions take milliseconds

add_low_rank = Exercise("add_low_rank", seconds=SECONDS)


class Case(NamedTuple):
    """The arguments of one call."""

    out: Tensor
    x: Tensor
    slots: Tensor
    down: Tensor
    up: Tensor

    @property
    def expected(self) -> Tensor:
        """The sum, token by token, in float64."""
        found = self.out.double()
        for token, slot in enumerate(self.slots.tolist()):
            if slot:
                found[token] += self.up[slot].double() @ (self.down[slot].double() @ self.x[token].double())
        return found


def _case(
    slots: list[int], out: int = 5, inputs: int = 7, rank: int = 2, held: int = 0, dtype: torch.dtype = torch.float64
) -> Case:
    """Tokens in these slots, with random x and factors, and with zeros in `out`.

    held: how many slots there are, slot 0 included; 0: just enough.
    """
    generator = torch.Generator().manual_seed(len(slots) + 10 * out)
    held = held or max(slots) + 1

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    count = len(slots)
    zeros, x = torch.zeros(count, out, dtype=dtype), drawn(count, inputs)
    return Case(zeros, x, torch.tensor(slots), drawn(held, rank, inputs), drawn(held, out, rank))


def _result(function: Callable, case: Case) -> Tensor:
    got = function(*(each.clone() for each in case))
    if not isinstance(got, Tensor):
        raise Explained(f"expected a tensor like `out`, got {a_type(got)}")
    if got.shape != case.out.shape:
        raise Explained(f"`out` is {list(case.out.shape)}, and the result {list(got.shape)}")
    return got


def _expect(function: Callable, case: Case, what: str, absolute: float = 1e-4) -> None:
    assert_near(_result(function, case), case.expected, f"{what}, slots {_few(case.slots)}", absolute=absolute)


def _few(slots: Tensor) -> str:
    shown = slots.tolist()
    return str(shown) if len(shown) <= 12 else f"{str(shown[:12])[:-1]}, ...]"


@add_low_rank.example
def _(function):
    case = Case(
        torch.zeros(2, 1),
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        torch.tensor([1, 2]),
        torch.tensor([[[0.0, 0.0]], [[1.0, 1.0]], [[0.0, 1.0]]]),
        torch.tensor([[[0.0]], [[10.0]], [[100.0]]]),
    )
    got = _result(function, case)
    assert got.flatten().tolist() == [30, 400], f"expected [[30], [400]], got {got.tolist()}"


@add_low_rank.property(
    "each token gets what its own adapter adds",
    "token t has the factors of slots[t]: first down[slot] @ x[t], then up[slot] times that",
)
def _(function):
    _own(function)


def _own(function: Callable) -> None:
    for slots in ([1, 2], [2, 1], [3, 1, 2]):
        _expect(function, _case(slots), "each token has an adapter of its own")
    _expect(function, _case([1, 2, 3], out=6, inputs=3, rank=3), "factors of rank 3")


def _holds(function: Callable, *checks: Callable[[Callable], None]) -> bool:
    """Return whether these checks of other properties pass; if one does not, its own property says so."""
    try:
        for check in checks:
            check(function)
    except AssertionError:
        return False
    return True


def _adds(function: Callable) -> bool:
    """Return whether it is right where each token has an adapter of its own; if not, that property says so."""
    return _holds(function, _own)


@add_low_rank.property(
    "several tokens may have one adapter, and stand anywhere in the batch",
    "find all places where `slots` has this number",
)
def _(function):
    for slots in ([1, 1, 1], [1, 1, 2, 2], [1, 2, 1, 2, 2, 1], [2, 1, 1, 2]) if _adds(function) else ():
        _expect(function, _case(slots), "tokens share adapters")


@add_low_rank.property(
    "any slots may be in use",
    "`slots` says which ones occur: `slots.unique()` lists them; with 8 adapters loaded, a batch may have 7 and 3 only",
)
def _(function):
    for slots in ([7, 3], [5], [8, 1]) if _adds(function) else ():
        _expect(function, _case(slots, held=9), "9 slots")


@add_low_rank.property(
    "what `out` has stays in the sum",
    "the result is `out` plus what the adapters add, and just `out` for tokens without one",
)
def _(function):
    for slots in ([1, 2], [0, 0], [2, 0, 1]) if _adds(function) else ():
        case = _case(slots, held=3)
        case = case._replace(x=torch.zeros_like(case.x), out=torch.arange(1.0, 6).double().repeat(len(slots), 1))
        _expect(function, case, "x is 0, so nothing is added to `out`")


@add_low_rank.property(
    "tokens in slot 0 get nothing",
    "0 says that a token has no adapter, and what is stored in slot 0 has no meaning; the others still get theirs",
)
def _(function):
    _zero(function)


def _zero(function: Callable) -> None:
    for slots in ([0, 1], [1, 0, 0, 2], [0, 0]):
        case = _case(slots, held=3)
        got = _result(function, case)
        for token, slot in enumerate(slots):
            if slot == 0:
                what = f"slots {slots}: token {token} has no adapter, and what is added to its row of `out`"
                assert_near(got[token], case.out[token], what, absolute=1e-12)
        others = case.slots > 0
        if others.any() and _adds(function):
            what = f"slots {slots}: what is added for tokens with an adapter"
            assert_near(got[others], case.expected[others], what, absolute=1e-4)


@add_low_rank.property(
    "slots that no token has are not read",
    "they may hold anything, NaN included: compute with the slots that occur in `slots` only, and never with slot 0",
)
def _(function):
    _unread(function)


def _unread(function: Callable) -> None:
    for slots in ([1, 3], [0, 2]) if _adds(function) else ():
        case = _case(slots, held=5)
        for unused in {*range(5)} - {each for each in slots if each}:
            case.down[unused], case.up[unused] = torch.nan, torch.nan
        got = _result(function, case)
        if slots[0] == 0 and not got[1].isnan().any() and got[0].isnan().any():
            continue  # slot 0 was read for a token in slot 0: another property's matter
        assert not got.isnan().any(), f"slots {slots}: the factors of other slots are NaN, and so is the result"
    if _adds(function):
        few, many = (_products(function, _case(slots, held=held)) for slots, held in (([1, 2], 3), ([20, 39], 40)))
        assert many <= few, (
            f"slots [1, 2] of 3 took {few} products, and slots [20, 39] of 40 took {many}: multiply nothing with slots "
            "that no token has, not even an empty matrix"
        )


def _products(function: Callable, case: Case) -> int:
    with _watched() as made:
        _result(function, case)
    return made.products


@add_low_rank.property(
    "factors are neither copied for each token nor multiplied with each other",
    "take the tokens of one slot together: x[tokens] with its `down`, then the result with its `up`; `down[slots]` "
    "copies both factors for every token, and `up @ down` is a whole matrix",
)
def _(function):
    _sizes(function)


def _sizes(function: Callable) -> None:
    case = _case([1 + token % 3 for token in range(64)], out=96, inputs=128, rank=2)
    with _watched() as made:
        _result(function, case)
    largest = max(made.sizes, default=0)
    assert largest < 96 * 128, f"64 tokens, matrices of 96 x 128, rank 2: a tensor of {largest:,} numbers was made"


@add_low_rank.property(
    "all tokens of an adapter are multiplied at once",
    "a loop over the slots that occur, not over tokens: every product reads the factors again",
)
def _(function):
    case = _case([1 + token % 3 for token in range(64)], out=6, inputs=4, rank=2)
    with _watched() as made:
        _result(function, case)
    assert made.products <= 24, f"64 tokens of 3 adapters need 6 products, and {made.products} ran"


@add_low_rank.property(
    "an adapter is multiplied with its own tokens only",
    "select the rows of x first, `x[tokens]`: with a mask, all of x is multiplied with each adapter",
)
def _(function):
    if not _holds(function, _own, _zero, _unread, _sizes):
        return
    case = _case([0 if token % 2 else 1 + token // 2 % 4 * 2 for token in range(32)], held=9, dtype=torch.float32)
    with _watched() as made:
        _result(function, case)
    (_, rank, inputs), out = case.down.shape, case.out.shape[1]
    rows = made.multiplied / (rank * (inputs + out))
    assert rows <= 16, f"16 of 32 tokens have an adapter, and so much is multiplied as if {rows:.3g} had one"


@add_low_rank.property(
    "the dtype of `out` stays, and float64 loses nothing",
    "compute in the dtype of x, or in a wider one; the result has that of `out`",
)
def _(function):
    for dtype, allowed in ((torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 0.2)):
        case = _case([2, 1, 3], dtype=dtype)
        got = _result(function, case)
        assert got.dtype == dtype, f"`out` is {dtype}, and the result {got.dtype}"
        if _adds(function):
            assert_near(got, case.expected, f"in {dtype}", absolute=allowed)


@add_low_rank.property("inputs are not changed", "only `out` may be written to")
def _(function):
    case = _case([1, 0, 2, 1])
    given = Case(*(each.clone() for each in case))
    function(*given)
    for name, mine, before in zip(Case._fields[1:], given[1:], case[1:], strict=True):
        assert torch.equal(mine, before), f"`{name}` has changed"


class _Made(TorchDispatchMode):
    """Notes the size of each tensor that an operation makes, and counts products and their multiplications."""

    OF_MATRICES = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot")
    PRODUCTS = (*OF_MATRICES, "matmul", "linear", "mul", "sum")

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.products = 0
        self.multiplied = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        got = operation(*args, **(kwargs or {}))
        name = operation.__name__.partition(".")[0].rstrip("_")
        self.products += name in self.PRODUCTS
        if name in self.OF_MATRICES:
            one, other = args[-2:]
            self.multiplied += one.numel() * (other.shape[-1] if other.dim() > 1 else 1)
        given = {id(each) for each in args if isinstance(each, Tensor)}
        for each in got if isinstance(got, tuple | list) else (got,):
            if isinstance(each, Tensor) and id(each) not in given and not each._is_view():
                self.sizes.append(each.numel())
        return got


@contextmanager
def _watched() -> Iterator[_Made]:
    with torch.no_grad(), _Made() as made:
        yield made
