"""Products of eight-bit numbers, and SmoothQuant's scales.  Lesson 07."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..shared.checks import Exercise, Explained
from ..shared.differences import ROUNDED, assert_near, text, why_wrong

# ---- products of eight-bit numbers

int8_linear = Exercise("int8_linear", seconds=20.0)


def _product(function: Callable, x: Tensor, codes: Tensor, scales: Tensor, input_scale: Tensor | None = None) -> Tensor:
    """The result in float64, if it has the right type and shape."""
    given = [each if each is None else each.clone() for each in (x, codes, scales, input_scale)]
    found = function(x, codes, scales) if input_scale is None else function(x, codes, scales, input_scale)
    assert isinstance(found, Tensor), f"expected a tensor, got {type(found).__name__}"
    shape = [len(x), len(codes)]
    assert list(found.shape) == shape, (
        f"x {list(x.shape)} and codes {list(codes.shape)}: {shape}, not {list(found.shape)}"
    )
    for name, before, now in zip(
        ("x", "codes", "scales", "input_scale"), given, (x, codes, scales, input_scale), strict=True
    ):
        if before is not None and now is not None and not torch.equal(before, now):
            raise Explained(f"{name} has changed: write to a new tensor")
    return found.double()


def _expect_codes(function: Callable, x: Tensor, codes: Tensor, scale: float, static: bool = False) -> None:
    """A product with the identity shows the codes of x times their scale, which is a power of 2: it must be these."""
    count = x.shape[1]
    given = torch.tensor([scale], dtype=x.dtype) if static else None
    found = _product(function, x, torch.eye(count, dtype=torch.int8), torch.ones(count, dtype=x.dtype), given) / scale
    size = f"2 ** {math.log2(scale):g}" if scale < 1e-3 else f"1/{1 / scale:g}" if scale < 1 else f"{scale:g}"
    said = f"x = {text(x)} times the identity matrix, {'with the static' if static else 'x has the'} scale {size}"
    off = (found - codes).abs() > 1e-6 * codes.abs().max()
    if off.any() and ((x / scale % 1)[off] == 0.5).all() and ((found - codes).abs()[off] == 1).all():
        half, got, code = ((x / scale)[off][0].item(), found[off][0].item(), codes[off][0].item())
        probe, eye = torch.tensor([ROUNDED], dtype=x.dtype), torch.eye(len(ROUNDED), dtype=torch.int8)
        one = torch.ones(1, dtype=x.dtype)
        rounded = _product(function, probe, eye, one.expand(len(eye)).clone(), one if static else None)[0]
        why = why_wrong(code, got, -128, 127, rounded)
        raise Explained(f"{said}: {half:g} became the code {got:g}, not {code:g}. {why}")
    _near(found, codes, f"{said}; the result divided by that scale")


def _near(found: Tensor, expected: Tensor, message: str, relative: float = 1e-6) -> None:
    assert_near(found, expected, message, absolute=relative * max(expected.abs().max().item(), 1e-30))


@int8_linear.example
def _(function):
    x = torch.tensor([[1.2, -0.5, 2.55]], dtype=torch.float64)
    codes, scales = torch.tensor([[10, -20, 5]], dtype=torch.int8), torch.tensor([0.1], dtype=torch.float64)
    _near(_product(function, x, codes, scales), torch.tensor([[3.47]]).double(), "the example", 1e-6)
    found = _product(function, x, codes, scales, torch.tensor([0.01], dtype=torch.float64))
    _near(found, torch.tensor([[2.835]]).double(), "the example with the static scale 0.01", 1e-6)


@int8_linear.property(
    "each token has its own scale", "the maximum over the last axis, of each row of x, with keepdim=True"
)
def _(function):
    x = torch.tensor([[1.275, 0.3], [0.1275, 0.05], [12.75, -7.0]], dtype=torch.float64)
    codes, scales = torch.tensor([[2, -3], [5, 7], [0, 1]], dtype=torch.int8), torch.ones(3, dtype=torch.float64)
    for tokens in (x, torch.cat([x * 2.0**power for power in range(12)])):
        together = _product(function, tokens, codes, scales)
        for row in range(len(tokens)):
            alone = _product(function, tokens[row : row + 1], codes, scales)
            said = f"token {row} of {len(tokens)} gives something else than alone"
            _near(together[row : row + 1], alone, said)


@int8_linear.property(
    "the largest magnitude is 127.5 codes",
    "the scale of a token is max |x| / 127.5, and codes are clamped after rounding: 127.5 becomes 127, and -127.5 -128",
)
def _(function):
    wanted = torch.tensor([[-128.0, 50, 99, -3], [127.0, -50, -99, 3], [127.0, -128, 1, 0]]).double()
    x = wanted.clone()
    x[:2, 0] = torch.tensor([-127.5, 127.5])
    x[2, :2] = torch.tensor([127.5, -127.5])
    for row in range(3):
        _expect_codes(function, x[row : row + 1] / 64, wanted[row : row + 1], 1 / 64)
    _expect_codes(function, x * 2.0**-100, wanted, 2.0**-100)
    x, wanted = (torch.cat((torch.ones(3, 296).double(), each), 1) for each in (x, wanted))
    _expect_codes(function, x / 64, wanted, 1 / 64)


@int8_linear.property(
    "a static scale serves all tokens", "if input_scale is given, no maximum of x is needed: divide by it"
)
def _(function):
    for scale in (0.25, 2.0):
        wanted = torch.tensor([[20.0, -8], [50, 10], [1, 0], [0, 0]]).double()
        _expect_codes(function, wanted * scale, wanted, scale, static=True)


@int8_linear.property("codes are rounded to the nearest", "x / scale is rounded with round(), not cut off")
def _(function):
    wanted = torch.tensor([[126.0, 10, -10, 41, -41, 0, 0, -1]]).double()
    x = (wanted + torch.tensor([[0.0, 0.4, -0.4, -0.4, 0.4, 0.4, -0.4, 0.4]]).double()) / 4
    _expect_codes(function, x, wanted, 0.25, static=True)
    halves = torch.tensor([[127.5, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 100.5, -101.5]]).double()
    wanted = torch.tensor([[127.0, 0, 2, 2, 0, -2, -2, 100, -102]]).double()
    for static in (True, False):
        _expect_codes(function, halves / 4, wanted, 0.25, static)


@int8_linear.property("values beyond a static scale are clamped", "clamp the codes to -128 and 127 after rounding")
def _(function):
    x = torch.tensor([[300.0, -300.0, 1e6, 5.0], [127.0, -128.0, 128.0, -129.0]]).double()
    wanted = torch.tensor([[127.0, -128, 127, 5], [127, -128, 127, -128]]).double()
    _expect_codes(function, x, wanted, 1.0, static=True)


@int8_linear.property(
    "each output has its own codes and scale", "a row of codes and a number of scales for each output"
)
def _(function):
    wanted = torch.tensor([[127.0, 3], [127, 40], [-120, 80]]).double()
    codes = torch.tensor([[1, 2], [3, -4], [0, 5]], dtype=torch.int8)
    scales = torch.tensor([1.0, 0.01, 30.0], dtype=torch.float64)
    for outputs in (slice(0, 3), slice(0, 2), slice(1, 2)):
        found = _product(function, 2 * wanted, codes[outputs], scales[outputs], torch.tensor([2.0]).double())
        expected = 2 * wanted @ codes[outputs].double().T * scales[outputs]
        said = f"codes {codes[outputs].tolist()} with the scales {scales[outputs].tolist()}"
        _near(found, expected, said)


@int8_linear.property(
    "sums are exact",
    "codes times codes in float64 (int8 overflows, float32 rounds), the sums times both scales, then the dtype of x",
)
def _(function):
    wanted = torch.full((2, 4096), -127, dtype=torch.float64)
    wanted[1, ::2] = 126
    codes = torch.full((1, 4096), -127, dtype=torch.int8)
    codes[0, 0] = 126
    found = _product(function, wanted, codes, torch.ones(1).double(), torch.tensor([1.0]).double())
    _near(found, wanted @ codes.double().T, "sums over 4,096 inputs", 1e-9)
    small = torch.tensor([2.0**-12])
    found = _product(function, wanted.half(), codes, small, torch.tensor([1.0]))
    _near(found, wanted @ codes.double().T * small.double(), "x is float16: sums over 4,096 inputs", 1e-3)
    for one, other, share in ((112, 48, 0.3), (55, 103, 0.7), (100, 123, 0.9), (43, 123, 0.1)):
        scale = torch.tensor([share])
        signed = torch.tensor([[other, -one]], dtype=torch.int8)  # its sum of products with one and other is 0
        total = _product(function, torch.tensor([[one, other]]) * scale, signed, scale / 3, scale).item()
        said = f"a token with the codes {[one, other]}, times the codes {[other, -one]}: expected 0, got {total:.1e}"
        assert abs(total) < 1e-9, f"{said}. Multiply codes, not dequantized numbers"


@int8_linear.property("a token of zeros gives zeros", "where the maximum is 0, the scale is 1: 0 / 0 is not a number")
def _(function):
    x = torch.tensor([[0.0, 0.0], [1.275, -0.3]])
    codes, scales = torch.tensor([[3, -2], [1, 1]], dtype=torch.int8), torch.ones(2)
    found = _product(function, x, codes, scales)
    assert bool((found[0] == 0).all()), f"a token of zeros: expected zeros, got {text(found[0])}"
    _near(found[1:], _product(function, x[1:], codes, scales), "the token after a token of zeros", 1e-5)


@int8_linear.property("the result has the dtype of x", "convert the result back: .to(x.dtype)")
def _(function):
    codes = torch.tensor([[3, -2]], dtype=torch.int8)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for given in (None, torch.tensor([0.01])):
            x, scales = torch.tensor([[1.275, -0.3]], dtype=dtype), torch.tensor([0.5])
            found = function(x, codes, scales) if given is None else function(x, codes, scales, given)
            assert found.dtype == dtype, f"x is {dtype}, the result {found.dtype}"


# ---- SmoothQuant's scales

smooth_scales = Exercise("smooth_scales", seconds=20.0)


def _scales(function: Callable, largest: Tensor, weight: Tensor, strength: float) -> Tensor:
    given = largest.clone(), weight.clone()
    found = function(largest, weight, strength)
    assert isinstance(found, Tensor), f"expected a tensor, got {type(found).__name__}"
    shape = [weight.shape[1]]
    assert list(found.shape) == shape, f"weight {list(weight.shape)}: expected {shape}, got {list(found.shape)}"
    same = torch.equal(given[0], largest) and torch.equal(given[1], weight)
    if not same:
        raise Explained("largest or weight has changed: write to a new tensor")
    return found


@smooth_scales.example
def _(function):
    weight = torch.tensor([[1.0, -0.5], [4.0, 1.0]], dtype=torch.float64)
    found = _scales(function, torch.tensor([64.0, 4.0], dtype=torch.float64), weight, 0.5)
    _near(found.double(), torch.tensor([4.0, 2.0]).double(), "the example")


@smooth_scales.property(
    "the largest weight of each input, without its sign",
    "weight is [out, in]: the maximum of |weight| over the outputs",
)
def _(function):
    ones = torch.ones(3).double()
    for weight in ([[0.5, 2.0, 0.1], [-4.0, 1.0, 0.2], [1.0, 0.3, -0.7]], [[-8.0, 2.0, 0.5], [1.0, -1.0, 0.25]]):
        w = torch.tensor(weight).double()
        wanted = torch.tensor([1 / max(abs(row[i]) for row in weight) for i in range(3)]).double()
        _near(_scales(function, ones, w, 0.5).double(), wanted**0.5, f"largest all 1, weight {weight}, strength 0.5")


@smooth_scales.property("the strength divides the range", "largest ** strength, divided by weights ** (1 - strength)")
def _(function):
    largest = torch.tensor([16.0, 0.01, 3.0, 1e-4, 1e4, 1e-9]).double()
    weight = torch.tensor([0.25, 4.0, 0.02, 10.0, 1e-4, 1e-9]).double()
    for strength in (0, 0.25, 0.5, 0.8, 1):
        wanted = largest**strength / weight ** (1 - strength)
        found = _scales(function, largest, torch.stack((weight, -weight / 2)), strength).double()
        said = f"largest {text(largest)}, weights up to {text(weight)}, strength {strength}"
        assert_near(found, wanted, said, relative=1e-6)


@smooth_scales.property(
    "a channel that is never used keeps scale 1",
    "torch.where: 1 if largest is 0, or if all weights of the channel are 0",
)
def _(function):
    channels = {  # largest and weights
        "largest is 0": (0.0, [4.0, -1.0, 2.0]),
        "all weights are 0": (9.0, [0.0, 0.0, 0.0]),
        "largest and all weights are 0": (0.0, [0.0, 0.0, 0.0]),
        "used": (16.0, [-1.0, 1.0, 0.5]),
        "one weight is 0": (25.0, [0.0, 4.0, 1.0]),
        "the sum of the weights is 0": (9.0, [2.0, -1.0, -1.0]),
    }
    largest = torch.tensor([each for each, _ in channels.values()]).double()
    weight = torch.tensor([weights for _, weights in channels.values()]).double().T
    most = weight.abs().amax(0)
    used = (largest > 0) & (most > 0)
    for strength in (0, 0.5, 1):
        wanted = torch.where(used, largest**strength / most ** (1 - strength), 1.0)
        found = _scales(function, largest, weight, strength).double()
        for channel, what in enumerate(channels):
            if used[channel] and strength != 0.5:  # another property tells more
                continue
            said = f"largest {largest[channel]:g}, weights {text(weight[:, channel])}, strength {strength} ({what})"
            _near(found[channel], wanted[channel], said)


@smooth_scales.property("the result has the dtype of the arguments", "keep the dtype: no .float(), no .double()")
def _(function):
    for dtype in (torch.float32, torch.float64):
        largest, weight = torch.tensor([3.0, 2.0], dtype=dtype), torch.tensor([[1.0, 2.0]], dtype=dtype)
        found = _scales(function, largest, weight, 0.3)
        assert found.dtype == dtype, f"largest and weight are {dtype}, the result {found.dtype}"
