"""Keys and values in codes with a scale for each token and head, and attention on codes.  Lesson 08."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..shared.checks import Exercise, Explained
from ..shared.differences import assert_near, difference, text

INT8, FP8 = torch.int8, torch.float8_e4m3fn
TOP = {INT8: 127.0, FP8: 448.0}
NAMES = {INT8: "int8", FP8: "fp8"}

# ---- keys and values in codes

quantize_kv = Exercise("quantize_kv", seconds=20.0)


def _pair(function: Callable, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales in float64, if they are tensors of the right shapes and x is unchanged."""
    before = x.clone()
    found = function(x, dtype)
    right = isinstance(found, (tuple, list)) and len(found) == 2 and all(isinstance(each, Tensor) for each in found)
    assert right, "it must return two tensors: codes, scales"
    codes, scales = found
    for name, each, shape in (("codes", codes, list(x.shape)), ("scales", scales, list(x.shape[:2]))):
        assert list(each.shape) == shape, f"x {list(x.shape)}: {name} should be {shape}, not {list(each.shape)}"
    if not torch.equal(before, x):
        raise Explained("x has changed: write to a new tensor")
    return codes.double(), scales.double()


def _drawn(*shape: int, seed: int = 8) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _near(found: Tensor, expected: Tensor, message: str, relative: float = 1e-5) -> None:
    assert_near(found, expected, message, absolute=relative * max(expected.abs().max().item(), 1e-30))


@quantize_kv.example
def _(function):
    x = torch.tensor([[[0.6, -2.54, 1.3, 0.0]]])
    for dtype, wanted in ((INT8, [30.0, -127, 65, 0]), (FP8, [104.0, -448, 224, 0])):
        codes, scales = _pair(function, x, dtype)
        _near(codes[0, 0], torch.tensor(wanted).double(), f"the example's codes in {NAMES[dtype]}", 1e-9)
        _near(scales, torch.tensor([[2.54 / TOP[dtype]]]).double(), f"the example's scale for {NAMES[dtype]}")


@quantize_kv.property(
    "each token and each head has a scale of its own", "the maximum over the last axis only: x.abs().amax(-1)"
)
def _(function):
    sizes = torch.tensor([[1.0, 0.01, 30.0], [4.0, 100.0, 0.5], [0.2, 7.0, 0.003], [9.0, 2.0, 1.5]])
    x = _drawn(4, 3, 6) * sizes[..., None]
    for dtype in TOP:
        codes, scales = _pair(function, x, dtype)
        for token in range(4):
            for head in range(3):
                alone = x[token : token + 1, head : head + 1].contiguous()
                own, scale = _pair(function, alone, dtype)
                said = f"{NAMES[dtype]}, 4 tokens and 3 heads: token {token}, head {head}, against the same alone"
                _near(scales[token, head], scale[0, 0], f"{said}: scale")
                _near(codes[token, head], own[0, 0], f"{said}: codes", 1e-9)


@quantize_kv.property(
    "the largest magnitude becomes the largest code",
    "the scale is max |x| divided by 127 for int8 and by 448 for fp8, however small x is",
)
def _(function):
    for dtype, top in TOP.items():
        for size in (1.0, 2.0**-120, 2.0**20):
            for token in (
                [-top, top / 2, 1.0, 0.0],
                [top, 3.0, -top, -2.0],
                [-1.0, 2.0, -4.0, -top],
                [2.0, 1, top, -1],
            ):
                x = torch.tensor([[token]]) * size
                codes, scales = _pair(function, x, dtype)
                said = f"{NAMES[dtype]}: {text(x)}"
                _near(scales / size, torch.ones(1, 1).double(), f"the scale of {said}, divided by {size:g}")
                _near(codes.abs().amax(-1), torch.tensor([[top]]).double(), f"the largest code of {said}", 1e-9)
        wide = torch.arange(1.0, 257).view(1, 1, 256)
        _, scales = _pair(function, wide, dtype)
        said = f"the scale of {NAMES[dtype]}: a head of 256 numbers, the last is the largest"
        _near(scales, torch.tensor([[256 / top]]).double(), said)


@quantize_kv.property("int8 codes are rounded to the nearest", "round before the conversion to int8, which cuts off")
def _(function):
    wanted = torch.tensor([127.0, 10, -10, 41, -41, 0, 0, -1, 126, -126])
    x = (wanted + torch.tensor([0, 0.4, -0.4, -0.4, 0.4, 0.4, -0.4, 0.4, 0.4, 0.4])) * 0.25
    codes, _ = _pair(function, x.view(1, 1, -1), INT8)
    _near(codes[0, 0], wanted.double(), f"codes of {text(x * 4)} times 0.25", 1e-9)


@quantize_kv.property(
    "fp8 codes are rounded once, to e4m3",
    "x / scale goes to torch.float8_e4m3fn as it is: no round() before, in float32",
)
def _(function):
    # Close to the middle between two numbers of e4m3, on either side; and far below 1, where round() leaves nothing.
    x = torch.tensor([448.0, 17.01, 16.99, 8.501, 8.499, 0.26, 0.011, -0.4, 200.1, -199.9, 1.0624, 1.0626])
    codes, _ = _pair(function, x.view(1, 1, -1), FP8)
    wanted = x.to(FP8).double()
    _near(codes[0, 0], wanted, f"codes of {text(x, len(x))}, whose scale is 1", 1e-9)


@quantize_kv.property(
    "16-bit numbers are quantized in float32", "begin with x.float(): in 16 bits, quotients and scales are rounded"
)
def _(function):
    for given in (torch.bfloat16, torch.float16):
        x = _drawn(1, 1, 1024).to(given)
        for dtype in TOP:
            codes, scales = _pair(function, x, dtype)
            wanted, wanted_scales = _pair(function, x.float(), dtype)
            said = f"x is {given}, codes are {NAMES[dtype]}, against those of x.float()"
            _near(scales, wanted_scales, f"{said}: scale")
            off = (codes != wanted).double().mean().item()
            assert off < 0.005, f"{said}: {off:.1%} of the codes differ"


@quantize_kv.property(
    "a head of zeros stays zeros", "where the maximum is 0, divide by 1 instead: 0 / 0 is not a number"
)
def _(function):
    x = torch.tensor([[[0.0, 0, 0], [1.0, -2, 0.5]], [[0.0, 0, 0], [0.0, 0, 0]]])
    for dtype in TOP:
        codes, scales = _pair(function, x, dtype)
        assert bool(scales.isfinite().all()), f"{NAMES[dtype]}: a scale is {text(scales[~scales.isfinite()])}"
        zero = codes[x.amax(-1) == 0]
        assert bool((zero == 0).all()), f"{NAMES[dtype]}: codes of zeros are {text(zero)}"
        _near(
            codes[0, 1].abs().amax(),
            torch.tensor(TOP[dtype]).double(),
            f"{NAMES[dtype]}: the largest code next to zeros",
        )


@quantize_kv.property("codes have the dtype asked for, scales float32", "convert the codes: .to(dtype)")
def _(function):
    for given in (torch.float32, torch.bfloat16, torch.float64):
        for dtype in TOP:
            codes, scales = function(_drawn(3, 2, 8).to(given), dtype)
            assert codes.dtype == dtype, f"x is {given}, dtype {NAMES[dtype]}: codes are {codes.dtype}"
            assert scales.dtype == torch.float32, f"x is {given}, dtype {NAMES[dtype]}: scales are {scales.dtype}"


# ---- attention on codes

attend_codes = Exercise("attend_codes", seconds=20.0)


def _attended(function: Callable, *given: Tensor, hidden: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """The result in float64, if it has the right type and shape. given: q, k_codes, k_scales, v_codes, v_scales."""
    return _as_returned(function, *given, hidden=hidden, scale=scale).double()


def _as_returned(function: Callable, *given: Tensor, hidden: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """The result in its own dtype."""
    q, codes = given[:2]
    hidden = torch.zeros(len(q), len(codes), dtype=torch.bool) if hidden is None else hidden
    before = [_bytes(each).clone() for each in (*given, hidden)]
    try:
        found = function(*given, hidden, scale)
    except RuntimeError as error:
        if "same dtype" not in str(error) and "Promotion" not in str(error):
            raise
        raise Explained("convert codes to q.dtype") from error
    assert isinstance(found, Tensor), f"expected a tensor, got {type(found).__name__}"
    assert found.shape == q.shape, f"q is {list(q.shape)}: expected that shape, got {list(found.shape)}"
    names = ("q", "k_codes", "k_scales", "v_codes", "v_scales", "hidden")
    for name, old, now in zip(names, before, (*given, hidden), strict=True):
        if not torch.equal(old, _bytes(now)):
            raise Explained(f"{name} has changed: write to a new tensor")
    return found


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


def _case(rows: int = 3, keys: int = 8, dim: int = 8, dtype: torch.dtype = INT8, seed: int = 0) -> list[Tensor]:
    """q, k_codes, k_scales, v_codes, v_scales, with scores that differ by a few; all scales are the same."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    codes = [(normal(keys, dim) * TOP[dtype] / 4).clamp(-TOP[dtype], TOP[dtype]).float() for _ in "kv"]
    k, v = ((each.round() if dtype == INT8 else each).to(dtype) for each in codes)
    scales = torch.full((keys,), 1 / TOP[dtype], dtype=torch.float64)
    return [normal(rows, dim), k, scales, v, scales.clone()]


def _factors(keys: int, seed: int) -> Tensor:
    return torch.randn(keys, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).exp()


def _expected(given: list[Tensor], hidden: Tensor | None = None, scale: float = 1.0) -> Tensor:
    q, k, k_scales, v, v_scales = (each.double() for each in given)
    scores = q @ (k * k_scales[:, None]).T * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ (v * v_scales[:, None])


@attend_codes.example
def _(function):
    k, v = torch.tensor([[10, -5], [30, 20]], dtype=INT8), torch.tensor([[100, 0], [0, 50]], dtype=INT8)
    k_scales, v_scales = torch.tensor([0.1, 0.01]), torch.tensor([0.02, 0.04])
    found = _attended(function, torch.tensor([[1.0, 2.0]]), k, k_scales, v, v_scales)
    _near(found, torch.tensor([[0.66363, 1.33637]]).double(), "the example", 1e-4)


@attend_codes.property("the result has the dtype of q, and its precision", "convert codes to q.dtype, and nothing else")
def _(function):
    for dtype, relative in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        given = _case(seed=5)
        given = [given[0].to(dtype), given[1], given[2].to(dtype), given[3], given[4].to(dtype)]
        found, wanted = _as_returned(function, *given), _expected(given)
        assert found.dtype == dtype, f"q is {dtype}, the result {found.dtype}"
        if not difference(found.double(), wanted, absolute=0.01):  # otherwise, another property tells more
            _near(found.double(), wanted, f"q is {dtype}", relative)


@attend_codes.property(
    "each key's scale multiplies its score, before the softmax",
    "scores [rows, keys] times k_scales [keys], and then the softmax",
)
def _(function):
    for rows, keys in ((3, 8), (8, 8), (1, 8)):
        given = _case(rows, keys)
        given[2] = given[2] * _factors(keys, 1)
        _near(
            _attended(function, *given), _expected(given), f"{rows} rows, {keys} keys, d = 8, each key's scale differs"
        )


@attend_codes.property(
    "each value's scale multiplies its weight",
    "after the softmax, weights [rows, keys] times v_scales [keys]; they need not sum to 1 then",
)
def _(function):
    for rows, keys in ((3, 8), (8, 8), (1, 8), (4, 11)):
        given = _case(rows, keys, seed=1)
        given[4] = given[4] * _factors(keys, 2)
        _near(
            _attended(function, *given),
            _expected(given),
            f"{rows} rows, {keys} keys, d = 8, each value's scale differs",
        )


@attend_codes.property("scores are multiplied by scale", "q k times k_scales times scale: use the argument, once")
def _(function):
    for scale in (0.0, 0.05, 0.7, 3.0):
        given = _case(seed=2)
        _near(_attended(function, *given, scale=scale), _expected(given, scale=scale), f"scale {scale}")


@attend_codes.property(
    "hidden keys have no weight, whatever their scales",
    "masked_fill(hidden, -torch.inf) on the finished scores, just before the softmax",
)
def _(function):
    for seed in range(3):
        given = _case(4, seed=seed)
        hidden = torch.rand(4, 8, generator=torch.Generator().manual_seed(seed)) < 0.5
        hidden[torch.arange(4), torch.arange(4)] = False
        hidden[0] = torch.arange(8) > 0
        hidden[:, 6:] = True
        _near(_attended(function, *given, hidden=hidden), _expected(given, hidden), f"hidden {hidden.int().tolist()}")
        for name, size in (("k_scales", 0.0), ("k_scales", 1e4)):  # keys 6 and 7 are hidden from all rows
            changed = [each.clone() for each in given]
            changed[2][6:] = size
            said = f"{name} of two keys that no row sees are {size:g}"
            _near(_attended(function, *changed, hidden=hidden), _expected(given, hidden), said)
    causal = torch.ones(3, 8, dtype=torch.bool).triu(6)
    for name, hidden in (
        ("one row", torch.arange(8)[None] % 3 == 0),
        ("one row", torch.arange(8)[None] > 4),
        ("the last row sees all keys", causal),
        ("the first row sees all keys", causal.flip(0)),
    ):
        given = _case(len(hidden))
        said = f"{name}: hidden {hidden.int().tolist()}"
        _near(_attended(function, *given, hidden=hidden), _expected(given, hidden), said)
    given = _case()
    if not difference(_attended(function, *given, scale=0.0), _expected(given, scale=0.0), absolute=1e-5):
        wanted = _expected(given, causal, scale=0.0)
        said = f"scale 0: hidden {causal.int().tolist()}"
        _near(_attended(function, *given, hidden=causal, scale=0.0), wanted, said)
    for rows, keys in ((3, 8), (8, 8)):
        given = _case(rows, keys, seed=1)
        given[4] = given[4] * _factors(keys, 2)
        if difference(_attended(function, *given), _expected(given), absolute=1e-5):
            continue  # another property tells more
        hidden = torch.zeros(rows, keys, dtype=torch.bool)
        hidden[:, [0, 4]] = True
        said = f"{rows} rows, {keys} keys, d = 8, each value's scale differs, keys 0 and 4 are hidden from all rows"
        _near(_attended(function, *given, hidden=hidden), _expected(given, hidden), said)


@attend_codes.property(
    "codes are multiplied without their scales",
    "neither k_codes * k_scales[:, None] nor v_codes * v_scales[:, None]: with scales of these sizes, only products of "
    "codes stay finite",
)
def _(function):
    for dtype, most, least in ((torch.float32, 122, -125), (torch.float64, 1018, -1021)):
        q = torch.full((2, 4), 2.0**least, dtype=dtype)
        k = torch.tensor([[100, -90, 80, -127], [120, 64, -127, -70], [-64, 99, 101, -126], [1, 2, 3, 90]], dtype=INT8)
        v = torch.tensor([[127, 0, 0, 100], [0, -127, 0, 0], [0, 0, 100, 0], [9, 0, 0, 1]], dtype=INT8)
        huge, ones = torch.full((4,), 2.0**most, dtype=dtype), torch.ones(4, dtype=dtype)
        scores = (q.double() * 2.0**-least) @ k.double().T * 2.0 ** (most + least)
        wanted = scores.softmax(-1) @ v.double()
        said = f"scales of 2 ** {most} and queries of 2 ** {least}, in {dtype}"
        _near(_attended(function, q, k, huge, v, ones), wanted, f"keys with {said}", 1e-4)
        # The first key, whose value is 0, has a far larger score than the others, whose weights are about 1/1000.
        k = torch.tensor([[0, 0, 0, 0], [-7, 0, 0, 0], [-7, 0, 0, 0], [-7, 0, 0, 0]], dtype=INT8)
        v = torch.tensor([[0, 0, 0, 0], [127, 0, 0, 64], [0, -127, 0, 0], [0, 0, 100, 0]], dtype=INT8)
        q = torch.tensor([[1.0, 0, 0, 0], [1.1, 0, 0, 0]], dtype=dtype)
        wanted = (q.double() @ k.double().T).softmax(-1) @ v.double()
        found = _attended(function, q, k, ones, v, huge) * 2.0**-most
        _near(found, wanted, f"values with scales of 2 ** {most}, in {dtype}", 1e-4)


@attend_codes.property("codes may be fp8, with small numbers too", "convert with .to(q.dtype), not to an integer type")
def _(function):
    given = _case(dtype=FP8, seed=3)
    given[1] = (given[1].float() / 300).to(FP8)
    given[3] = (given[3].float() / 300).to(FP8)
    given[2], given[4] = given[2] * 300, given[4] * 300
    _near(_attended(function, *given), _expected(given), "codes in fp8, most of them below 1")


@attend_codes.property(
    "scores may be of any size",
    "torch.softmax subtracts the largest score, exp() alone becomes infinite; hidden scores are -torch.inf",
)
def _(function):
    hidden = torch.zeros(3, 8, dtype=torch.bool)
    hidden[:, 5:] = True
    for size in (1e3, 1e5):
        given = _case(seed=4)
        given[2] = given[2] * size
        _near(_attended(function, *given), _expected(given), f"scores are about {size:g}")
        given[0], given[1] = -given[0].abs() - 1, (given[1].double().abs() + 1).clamp(max=127).to(INT8)
        said = f"all scores are about -{size:g}, and three keys are hidden"
        _near(_attended(function, *given, hidden=hidden), _expected(given, hidden), said)


@attend_codes.property("every key counts, however many there are", "a loop over tiles of keys must reach the last one")
def _(function):
    for keys in (17, 100, 300):
        given = _case(2, keys, dim=keys, seed=6)
        assert_near(_attended(function, *given), _expected(given), f"2 rows, {keys} keys", absolute=1e-6)
