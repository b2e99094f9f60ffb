"""The fast Hadamard transform, and rounding to FP8.  Lesson 07."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..shared.checks import Exercise, Explained
from ..shared.differences import assert_near, text

# ---- the fast Hadamard transform

hadamard = Exercise("hadamard", seconds=20.0)


class _Watch(TorchDispatchMode):
    """Remembers what operations make.

    largest  elements of the largest tensor
    work     the sum of the sizes of all operations: each the number of elements that it reads or makes, the larger one.
             Views, and what is written in place, count nothing
    fp8      whether a tensor has an FP8 dtype
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.work, self.fp8 = 0, 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given, made = (
            [each for each in tree_leaves(some) if isinstance(each, Tensor)] for some in ((args, kwargs), out)
        )
        for each in made:
            self.largest = max(self.largest, each.numel())
            self.fp8 |= "float8" in str(each.dtype)
        known = {each.untyped_storage().data_ptr() for each in given}
        if any(each.untyped_storage().data_ptr() not in known for each in made):
            self.work += max(sum(each.numel() for each in some) for some in (given, made))
        return out


def _like(function: Callable, x: Tensor) -> Tensor:
    """The result in float64, if it is like x and x is unchanged."""
    before = x.clone()
    found = function(x)
    assert isinstance(found, Tensor), f"expected a tensor, got {type(found).__name__}"
    assert found.shape == x.shape, f"x is {list(x.shape)}, the result {list(found.shape)}"
    if not torch.equal(before, x):
        raise Explained("x has changed: write to a new tensor")
    return found.double()


def _matrix(size: int) -> Tensor:
    found = torch.ones(1, 1, dtype=torch.float64)
    while len(found) < size:
        found = torch.cat((torch.cat((found, found), 1), torch.cat((found, -found), 1)))
    return found


def _drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def _lengths(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True).sqrt()


@hadamard.example
def _(function):
    for x, wanted in (([8.0, 0, 0, 0], [4.0, 4, 4, 4]), ([0, 8.0, 0, 0], [4.0, -4, 4, -4])):
        found = _like(function, torch.tensor(x))
        assert_near(found, torch.tensor(wanted), str(x), relative=1e-6, absolute=1e-6)


@hadamard.property(
    "the signs are those of Sylvester's matrix",
    "at each distance h, x[c] + x[c + h] becomes channel c, and x[c] - x[c + h] becomes channel c + h",
)
def _(function):
    for size in (2, 8, 16):
        eye = torch.eye(size, dtype=torch.float64)
        found, wanted = _like(function, eye), _matrix(size)
        for channel in range(size):
            same = torch.equal(found[channel].sign(), wanted[channel])
            said = f"{size} channels, all 0 but channel {channel}: the signs should be {text(wanted[channel])}"
            assert same, f"{said}, and are {text(found[channel].sign())}"
    for size in (32, 64, 256, 1024):
        x = _drawn(3, size)
        found, wanted = _like(function, x), x @ _matrix(size)
        ratio = (found / _lengths(found) - wanted / _lengths(wanted)).abs().max()
        assert ratio < 1e-5, f"{size} channels of random numbers: apart from its length, the result is not x H"


@hadamard.property("lengths stay the same", "divide by sqrt(n) in total, for every n")
def _(function):
    for size in (1, 2, 4, 64, 1024, 4096):
        x = _drawn(2, size)
        before, after = _lengths(x), _lengths(_like(function, x))
        good = torch.allclose(before, after, rtol=1e-5)
        said = f"a token of length {before[0].item():.4g} became {after[0].item():.4g} long"
        assert good, f"{size} channel{'s' * (size > 1)}: {said}"


@hadamard.property(
    "any number of tokens, in any shape",
    "only the last axis is transformed: [n], [tokens, n] and [a, b, n] work alike",
)
def _(function):
    x = _drawn(2, 3, 8)
    shapes = {"[8]": x[0, 0], "[3, 8]": x[0], "[8, 8]": _drawn(8, 8), "[2, 3, 8]": x, "[2, 1, 8]": x[:, :1]}
    shapes |= {"[3, 8], the transpose of [8, 3],": _drawn(8, 3).T}
    shapes |= {"[2, 3, 8], not contiguous": _drawn(8, 3, 2).permute(2, 1, 0)}
    for what, given in shapes.items():
        alone = [_like(function, token[None].clone()) for token in given.reshape(-1, 8)]
        together, apart = _like(function, given), torch.cat(alone).view(given.shape)
        assert_near(together, apart, f"x {what}, compared with its tokens one by one", relative=1e-5, absolute=1e-6)


@hadamard.property(
    "in log2(n) steps",
    "each step takes all sums and differences at one distance at once: no n x n matrix, no loop over the n results",
)
def _(function):
    for size in (256, 2048):
        x = _drawn(2, size)
        with _Watch() as seen:
            _like(function, x)
        said = f"x has {x.numel():,} elements, and the largest tensor has {seen.largest:,}"
        assert seen.largest <= 32 * x.numel(), said
    steps = size.bit_length() - 1
    said = f"operations on {seen.work:,} numbers: in {steps} steps it takes a few times {steps * x.numel():,}"
    assert seen.work <= 32 * steps * x.numel(), f"x has {x.numel():,} elements, and there were {said}"


@hadamard.property(
    "the result is a new tensor, in the dtype of x", "keep the dtype, and do not return x itself, also for n = 1"
)
def _(function):
    for size in (1, 4):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            x = _drawn(2, size).to(dtype)
            found = function(x)
            assert found.dtype == dtype, f"x is {dtype}, the result {found.dtype}"
            shared = found.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            assert not shared, f"{size} channel{'s' * (size > 1)}: the result shares its memory with x"
    x = _drawn(2, 64)
    wanted = x @ _matrix(64)
    found = function(x)
    error = (found / _lengths(found) - wanted / _lengths(wanted)).abs().max()
    assert error < 1e-12 or error > 1e-5, f"float64 was rounded on the way: errors of {error:.0e}"
    error = (_lengths(found) / _lengths(x) - 1).abs().max()
    assert error < 1e-12 or error > 1e-5, (
        f"the lengths are off by a share of {error:.0e}: use math.sqrt, not its digits"
    )


# ---- rounding to FP8

round_to_e4m3 = Exercise("round_to_e4m3", seconds=20.0)


def _numbers() -> Tensor:
    """All finite numbers of e4m3 from 0 up."""
    return torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


def _expect(function: Callable, x: Tensor, wanted: Tensor, message: str) -> None:
    found = _like(function, x)
    wrong = ~(found == wanted.double())  # also for NaN
    if wrong.any():
        at = int(wrong.flatten().nonzero()[0])
        given, right, got = (each.flatten()[at].item() for each in (x, wanted, found))
        raise AssertionError(f"{message}: {given:.14g} should become {right:.9g}, not {got:.9g}")


@round_to_e4m3.example
def _(function):
    _expect(function, torch.tensor([0.3, -3.1, 1000.0]), torch.tensor([0.3125, -3.0, 448.0]), "the example")


@round_to_e4m3.property("without torch's FP8 types", "compute the step of each number; float8_e4m3fn may only check it")
def _(function):
    with _Watch() as seen:
        _like(function, torch.tensor([0.3, -3.1, 1000.0]))
    assert not seen.fp8, "a tensor of an FP8 dtype was made"


@round_to_e4m3.property(
    "the nearest of the numbers with three bits of mantissa",
    "the step is 2 ** (e - 3), with 2 ** e the largest power of 2 up to |x|",
)
def _(function):
    numbers = _numbers()[8:]  # from 2 ** -6
    low, high = numbers[:-1], numbers[1:]
    for share in (0.0, 0.01, 0.3, 0.49, 0.49999, 0.50001, 0.51, 0.8, 0.99):
        x = low + share * (high - low)
        _expect(function, x, low if share < 0.5 else high, "from 2^-6 to 448")
    for share in (0.5 - 1e-10, 0.5 + 1e-10):  # in float32 a half
        x = low + share * (high - low)
        _expect(function, x, low if share < 0.5 else high, "float64 numbers, which float32 rounds to a half")


@round_to_e4m3.property("halves go to the even neighbor", "torch.round does that; floor(x + 0.5) does not")
def _(function):
    numbers = _numbers()
    low, high = numbers[:-1], numbers[1:]
    below, above = (_like(function, low + share * (high - low)) for share in (0.49, 0.51))
    if not ((below == low) & (above == high)).all():  # other properties tell more of those below 2 ** -6
        low, high = low[8:], high[8:]
    even = torch.where(torch.arange(len(low)) % 2 == 0, low, high)
    _expect(function, (low + high) / 2, even, "halfway between two numbers")


@round_to_e4m3.property(
    "below 2 ** -6 the steps are 2 ** -9", "e is at least -6: the steps of subnormal numbers do not get smaller"
)
def _(function):
    numbers = _numbers()[:9]  # 0 to 2 ** -6
    low, high = numbers[:-1], numbers[1:]
    for share in (0.01, 0.3, 0.49, 0.51, 0.8):
        _expect(function, low + share * (high - low), low if share < 0.5 else high, "below 2^-6")
    _expect(function, numbers[1:], numbers[1:], "numbers of e4m3")
    _expect(function, torch.tensor([1e-12, 1e-30]).double(), torch.zeros(2), "tiny numbers")


@round_to_e4m3.property("numbers beyond 448 become 448", "clamp to -448 and 448, the largest numbers")
def _(function):
    x = torch.tensor([448.0, 449.0, 463.9, 464.0, 465.0, 470.0, 480.0, 500.0, 512.0, 1e6, 1e30]).double()
    _expect(function, x, torch.full_like(x, 448.0), "from 448 up")


@round_to_e4m3.property("negative numbers are rounded like positive ones", "use |x| for the exponent")
def _(function):
    x = torch.tensor([0.01, 0.3, 0.7, 1.1, 5.7, 77.0, 300.0]).double()
    wanted = x.float().to(torch.float8_e4m3fn).double()
    if (_like(function, x) == wanted).all():  # else another property tells more
        _expect(function, -x, -wanted, "negative numbers")
    huge = torch.tensor([460.0, 1000.0]).double()
    if (_like(function, huge) == 448).all():
        _expect(function, -huge, torch.full((2,), -448.0), "negative numbers")


@round_to_e4m3.property("0 stays 0", "0 has no power of 2 below it: take care that nothing becomes NaN")
def _(function):
    _expect(function, torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.0, 1.0, 0.0]), "among other numbers")
    _expect(function, torch.zeros(2, 2), torch.zeros(2, 2), "zeros alone")


@round_to_e4m3.property(
    "each number on its own, in the dtype of x", "one exponent for each number; keep shape and dtype"
)
def _(function):
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor([[0.3, 100.0, 0.02], [7.3, -0.3, 450.0]], dtype=dtype)
        for given in (x, x.T, x[:, 1], x[0, 0], torch.stack((x, -x / 3))):
            found = function(given)
            assert found.dtype == dtype, f"x is {dtype}, the result {found.dtype}"
            alone = [_like(function, value.reshape(1)) for value in given.flatten()]
            expected = torch.cat(alone).view(given.shape)
            _expect(function, given, expected, f"x {list(given.shape)} is not rounded like its numbers one by one")
