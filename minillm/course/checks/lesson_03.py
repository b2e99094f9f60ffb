"""Three fused kernels, and a test that tells wrong kernels from right ones.  Lesson 03.

Kernels get tensors in the middle of memory that holds other numbers: what a missing mask reads or writes shows, and
nothing else breaks.
"""

import math

import torch
from torch import Tensor

from ..interpret import kernel_device, surrounded, untouched
from . import Exercise

EMPTY = -77.0  # what memory holds before a kernel writes there


def _put(values, dtype=torch.float32, by: float = EMPTY) -> Tensor:
    """Where kernels run, with `by` all around."""
    return surrounded(torch.as_tensor(values).to(dtype).to(kernel_device()), by)[0]


def _room(*shape: int, dtype=torch.float32) -> tuple[Tensor, Tensor]:
    """Memory to write to, and all around it."""
    return surrounded(torch.full(shape, EMPTY, dtype=dtype, device=kernel_device()), EMPTY)


def _near(found: Tensor, wanted, message: str, rtol: float = 1e-3, atol: float = 1e-4):
    wanted = torch.as_tensor(wanted).double()
    assert torch.allclose(found.double().cpu(), wanted, rtol=rtol, atol=atol), message


def _some(tensor: Tensor) -> str:
    """A few of its numbers, for a message."""
    return str([round(value, 4) for value in tensor.flatten()[:6].tolist()])


# ---- GeGLU

geglu = Exercise("geglu")


def _gated(function, gate, up, dtype=torch.float32) -> tuple[Tensor, Tensor]:
    """What comes of gate and up [rows, size]: the result, and the memory around it."""
    gate_up = torch.cat((torch.as_tensor(gate).float(), torch.as_tensor(up).float()), -1)
    out, memory = _room(*torch.as_tensor(gate).shape, dtype=dtype)
    function(_put(gate_up, dtype), out)
    return out, memory


def _gelu(gate: Tensor) -> Tensor:
    return torch.nn.functional.gelu(gate.double(), approximate="tanh")


@geglu.example
def _(function):
    found, _ = _gated(function, [[10.0, 0.0]], [[10.0, 0.0]])
    _near(found, [[100.0, 0.0]], f"gates of 10 and 0 with ups of 10 and 0 give 100 and 0, not {_some(found)}")


@geglu.property("the gate goes through gelu", "gate * sigmoid(1.5957691 * (gate + 0.044715 * gate ** 3)), then * up")
def _(function):
    gate = torch.linspace(-3, 3, 16)[None]
    found, _ = _gated(function, gate, gate)
    _near(found, _gelu(gate) * gate, "gates from -3 to 3 come out wrong")


@geglu.property(
    "the first half is the gate", "gate is in columns 0 to SIZE - 1 of a row, up in the SIZE columns after it"
)
def _(function):
    found, _ = _gated(function, [[10.0, 10.0]], [[1.0, -2.0]])
    _near(found, [[10.0, -20.0]], f"gates of 10 and ups of 1 and -2 give 10 and -20, not {_some(found)}")


@geglu.property("every row is read at its own address", "a row of gate_up is 2 * SIZE long, a row of out SIZE")
def _(function):
    rows = torch.tensor([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    found, _ = _gated(function, rows, rows)
    _near(found, rows * rows, f"three rows of 2: 100, 400, 900, 1600, ... should come, not {_some(found)}")


@geglu.property("every column is written", "a grid must cover the last tile too: triton.cdiv rounds up, // rounds down")
def _(function):
    gate = torch.full((1, 5000), 10.0)
    found, _ = _gated(function, gate, gate)
    left = int((found == EMPTY).sum())
    assert left == 0, f"of 5,000 columns {left:,} were never written"


@geglu.property("nothing but the result is written", "tl.store(..., mask=inside): the last tile is rarely full")
def _(function):
    found, memory = _gated(function, [[10.0] * 5], [[10.0] * 5])
    assert untouched(memory, EMPTY), "memory next to a result of 5 columns has changed"


# ---- RMSNorm

row_norm = Exercise("row_norm")


def _normed(function, x, weight, eps=1e-6, dtype=torch.float32, by: float = EMPTY) -> tuple[Tensor, Tensor]:
    out, memory = _room(*x.shape, dtype=dtype)
    function(_put(x, dtype, by), _put(weight, by=by), eps, out)
    return out, memory


def _norm(x: Tensor, weight, eps=1e-6) -> Tensor:
    return x.double() / (x.double().pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


@row_norm.example
def _(function):
    found, _ = _normed(function, torch.tensor([[3.0, -3.0, 3.0, -3.0]]), torch.ones(4))
    _near(found, [[1.0, -1.0, 1.0, -1.0]], f"3, -3, 3, -3 becomes 1, -1, 1, -1, not {_some(found)}")


@row_norm.property("the mean is over d numbers", "divide the sum by d: a tile's padding is no part of the row")
def _(function):
    found, _ = _normed(function, torch.full((1, 5), 2.0), torch.ones(5), by=0.0)
    _near(found, torch.ones(1, 5), f"five 2s must become five 1s, not {_some(found)}")


@row_norm.property("memory next to a row does not matter", "tl.load(..., mask=inside, other=0.0): 0 adds nothing")
def _(function):
    x = torch.tensor([[1.0, -2.0, 3.0]])
    found = [_normed(function, x, torch.ones(3), by=by)[0] for by in (0.0, 1000.0)]
    assert torch.equal(*found), "the same row of 3 gives other results when the memory after it changes"


@row_norm.property("every row has the same weights", "weight_ptr + columns: no row in it; multiply by it at the end")
def _(function):
    x, weight = torch.tensor([[1.0, -1.0], [1.0, -1.0]]), torch.tensor([2.0, 0.5])
    found, _ = _normed(function, x, weight)
    _near(found, _norm(x, weight), f"two equal rows and weights of 2 and 0.5: 2, -0.5, 2, -0.5, not {_some(found)}")


@row_norm.property("eps is inside the root", "tl.rsqrt(mean + eps)")
def _(function):
    x = torch.tensor([[0.1, -0.1]])
    found, _ = _normed(function, x, torch.ones(2), eps=1e-2)
    _near(found, _norm(x, 1.0, 1e-2), f"0.1 / sqrt(0.01 + 0.01) is 0.7071, not {_some(found)}")


@row_norm.property("squares of half-precision numbers", "300 * 300 overflows float16: .to(tl.float32) before squaring")
def _(function):
    found, _ = _normed(function, torch.tensor([[300.0, -300.0]]), torch.ones(2), dtype=torch.float16)
    _near(found, [[1.0, -1.0]], f"300, -300 in float16 must become 1, -1, not {_some(found)}")


@row_norm.property("nothing but the result is written", "tl.store(..., mask=inside)")
def _(function):
    _, memory = _normed(function, torch.tensor([[1.0, -1.0, 1.0]]), torch.ones(3))
    assert untouched(memory, EMPTY), "memory next to a row of 3 has changed"


# ---- add + RMSNorm

add_row_norm = Exercise("add_row_norm")


def _added(function, x, residual, dtype=torch.float32, out_dtype=torch.float32, by: float = EMPTY):
    """The normed sum, the sum, and the memory around each."""
    out, total = _room(*x.shape, dtype=out_dtype), _room(*x.shape, dtype=dtype)
    weight = _put(torch.ones(x.shape[1]), by=by)
    function(_put(x, dtype, by), _put(residual, dtype, by), weight, 1e-6, out[0], total[0])
    return out[0], total[0], out[1], total[1]


@add_row_norm.example
def _(function):
    x = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    out, total, *_ = _added(function, x, 2 * x)
    _near(total, 3 * x, f"1, -1, ... and 2, -2, ... add up to 3, -3, ..., not {_some(total)}")
    _near(out, x, f"3, -3, 3, -3 is normed to 1, -1, 1, -1, not {_some(out)}")


@add_row_norm.property("the sum is what is normed", "square x + residual, not x")
def _(function):
    x, residual = torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, -2.0]])
    out, *_ = _added(function, x, residual)
    _near(out, _norm(x + residual, 1.0), f"1, 1 and 2, -2: the norm of 3, -1 should come, not {_some(out)}")


@add_row_norm.property("every row's sum is kept", "both stores need the row: out_ptr + row * d, total_ptr + row * d")
def _(function):
    x = torch.tensor([[1.0, -1.0], [5.0, -5.0]])
    _, total, *_ = _added(function, x, 2 * x)
    _near(total, 3 * x, f"the sums of two rows are 3, -3, 15, -15, not {_some(total)}")


@add_row_norm.property(
    "what is normed is the sum as it is stored",
    "the next layer reads the rounded sum: round first, .to(total_ptr.dtype.element_ty), then .to(tl.float32) and norm",
)
def _(function):
    x, residual = torch.tensor([[2048.0, 4096.0]]), torch.tensor([[1.0, 1.0]])
    out, total, *_ = _added(function, x, residual, dtype=torch.float16)
    _near(out, _norm(total.cpu(), 1.0), "2048 + 1 in float16 is 2048, and the norm is of 2049", rtol=2e-5, atol=0)


@add_row_norm.property("memory next to a row does not matter", "both loads need the mask, and other=0.0")
def _(function):
    x = torch.tensor([[1.0, -2.0, 3.0]])
    found = [_added(function, x, 2 * x, by=by)[0] for by in (0.0, 1000.0)]
    assert torch.equal(*found), "the same rows of 3 give other results when the memory after them changes"


@add_row_norm.property("nothing but the results is written", "both stores need the mask")
def _(function):
    x = torch.tensor([[1.0, -1.0, 1.0]])
    *_, out_memory, total_memory = _added(function, x, x)
    assert untouched(out_memory, EMPTY), "memory next to the normalized rows of 3 has changed"
    assert untouched(total_memory, EMPTY), "memory next to the sums of rows of 3 has changed"


# ---- a test that finds faults

find_fault = Exercise("find_fault")
PIECE = 64


def _product(
    *, masked: bool = True, own_scale: bool = True, last_scales: bool = False, add: float = 0.0, times: float = 1.0
):
    """A product scale * (weight @ x), piece by piece of the columns, in torch; with faults, on demand."""

    def product(weight: Tensor, scale: Tensor, x: Tensor, order=None) -> Tensor:
        rows, columns = weight.shape
        pieces = math.ceil(columns / PIECE)
        order = list(range(pieces)) if order is None else [int(piece) for piece in order]
        assert sorted(order) == list(range(pieces)), (
            f"order must hold each of the {pieces} pieces of {columns} columns once, not {order}"
        )
        missing = pieces * PIECE - columns
        after = 0.0 if masked else 3.0
        wide = torch.nn.functional.pad(weight.float(), (0, missing), value=after).view(rows, pieces, PIECE)
        x = torch.nn.functional.pad(x.float(), (0, missing), value=after).view(pieces, PIECE)
        scales = scale.float() if own_scale else scale.float()[:1].expand(rows)
        out = torch.zeros(rows, device=weight.device)
        for piece in order:
            part = wide[:, piece] @ x[piece]
            out += part if last_scales else part * scales
            if last_scales and piece == pieces - 1:
                out *= scales
        return out * times + add

    return product


def _fails(function, product, message: str):
    assert function(product) is not None, message


@find_fault.example
def _(function):
    found = function(_product())
    assert found is None, f"a right product is said to fail: {found!r}"
    _fails(function, _product(times=0.0), "a product that is always 0 passes")


@find_fault.property("a missing mask is found", "a number of columns that is no multiple of PIECE")
def _(function):
    _fails(function, _product(masked=False), "a kernel that adds up memory after a row passes")


@find_fault.property(
    "programs whose order matters are found",
    "several pieces, in another order than 0, 1, 2, ...; scales that are not 1",
)
def _(function):
    _fails(function, _product(last_scales=True), "a kernel whose last piece must run last passes")


@find_fault.property("another row's scale is found", "several rows, each with a scale of its own")
def _(function):
    _fails(function, _product(own_scale=False), "a kernel that takes the first row's scale for all rows passes")


@find_fault.property(
    "rounding is no fault", "pieces are added up in another order than yours: compare with a tolerance, torch.allclose"
)
def _(function):
    found = function(_product(times=1 + 3e-7))
    assert found is None, f"a product that is right to six digits is said to fail: {found!r}"


@find_fault.property("nan is a fault", "nan > 0.001 is False: ask for what is right (all close), not for what is wrong")
def _(function):
    _fails(function, _product(add=math.nan), "a product that is nan everywhere passes")
