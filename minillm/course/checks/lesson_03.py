"""Fused kernels, two kernels on tiles of rows and columns, and a test that finds faults.  Lesson 03.

Kernels get tensors in the middle of memory that holds other numbers, and the interpreter reports each load and store
outside them. So a missing mask shows even where it does not change the result, and no wrong address ends the process.
"""

import math
from collections import Counter

import torch
from torch import Tensor

from ..interpret import kernel_device, strays, surrounded, untouched
from . import Exercise

EMPTY = -77.0  # what memory holds before a kernel writes there
NAN = math.nan


class Run:
    """One call of a candidate: its outputs, and what it did to other memory.

    junk: memory outside the inputs reads as NaN; otherwise as 0.
    """

    def __init__(self, function, inputs: list[Tensor], outputs: list[Tensor], *numbers: float, junk: bool = False):
        """Call function(*inputs, *numbers, *outputs). The tensors are copied; views keep their strides."""
        given = [_put(each, NAN if junk else 0.0) for each in inputs]
        rooms = [_put(each, EMPTY) for each in outputs]
        before = [memory.clone() for _, memory in given]
        with strays(*(each for each, _ in given + rooms), junk=junk) as found:
            function(*(each for each, _ in given), *numbers, *(each for each, _ in rooms))
        self.outputs = [each for each, _ in rooms]
        self.strays: Counter[str] = found
        self.inputs_unchanged = all(
            torch.equal(torch.nan_to_num(now), torch.nan_to_num(then))
            for (_, now), then in zip(given, before, strict=True)
        )
        self.nothing_else_written = found["stores"] == 0 and all(untouched(memory, EMPTY) for _, memory in rooms)


def _put(tensor: Tensor, by: float) -> tuple[Tensor, Tensor]:
    """(A copy where kernels run, with the same strides and with `by` all around and in any gaps, its memory)."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat, memory = surrounded(torch.full((span,), by, dtype=tensor.dtype, device=kernel_device()), by)
    inside = flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())
    inside.copy_(tensor)
    return inside, memory


def _room(*shape: int, dtype=torch.float32) -> Tensor:
    return torch.full(shape, EMPTY, dtype=dtype)


def _near(found: Tensor, wanted, message: str, rtol: float = 1e-3, atol: float = 1e-4):
    wanted = torch.as_tensor(wanted).double()
    assert torch.allclose(found.double().cpu(), wanted, rtol=rtol, atol=atol), message


def _some(tensor: Tensor) -> str:
    """A few of its numbers, for a message."""
    return str([round(value, 4) for value in tensor.flatten()[:6].tolist()])


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _only_its_own(run: Run, shape: str) -> None:
    """No store outside the outputs, and inputs as they were."""
    assert run.inputs_unchanged, "an input has changed"
    assert run.nothing_else_written, f"memory next to a result of {shape} has changed"


def _reads_only_inputs(run: Run, shape: str) -> None:
    count = run.strays["loads"]
    assert count == 0, f"with inputs of {shape}, {count} loads read outside them"


# ---- GeGLU

geglu = Exercise("geglu", returns=False)


def _gated(function, gate, up, dtype=torch.float32, junk: bool = False) -> Run:
    """A run on gate and up [rows, size]. The result is always float32, to show what was computed."""
    gate, up = torch.as_tensor(gate), torch.as_tensor(up)
    return Run(function, [torch.cat((gate, up), -1).to(dtype)], [_room(*gate.shape)], junk=junk)


def _gelu(gate: Tensor) -> Tensor:
    return torch.nn.functional.gelu(gate.double(), approximate="tanh")


@geglu.example
def _(function):
    found = _gated(function, [[10.0, 0.0]], [[10.0, 0.0]]).outputs[0]
    _near(found, [[100.0, 0.0]], f"gates 10 and 0 with ups 10 and 0: expected [100, 0], got {_some(found)}")


@geglu.property("the gate goes through gelu", "gate * sigmoid(1.5957691 * (gate + 0.044715 * gate * gate * gate)) * up")
def _(function):
    gate = torch.linspace(-3, 3, 16)[None]
    found = _gated(function, gate, gate).outputs[0]
    _near(found, _gelu(gate) * gate, "gates from -3 to 3 give wrong results")


@geglu.property("the first half is the gate", "gates are in columns 0 to SIZE - 1 of a row, ups in the SIZE after them")
def _(function):
    found = _gated(function, [[10.0, 10.0]], [[1.0, -2.0]]).outputs[0]
    _near(found, [[10.0, -20.0]], f"gates 10, 10 and ups 1, -2: expected [10, -20], got {_some(found)}")


@geglu.property(
    "every row has its own address", "a row of gate_up is 2 * SIZE long, a row of out SIZE: multiply the row by that"
)
def _(function):
    for rows, size in ((3, 2), (5, 7), (3, 130)):
        gate, up = (12 + 5 * _random(rows, size, seed=seed).abs() for seed in (0, 1))  # gelu(12) is 12
        found = _gated(function, gate, up).outputs[0]
        _near(found, gate * up, f"{rows} rows of {size} columns give wrong results")


@geglu.property("every column is written", "the grid must cover the last tile too: triton.cdiv rounds up, // down")
def _(function):
    found = _gated(function, torch.full((1, 5000), 10.0), torch.full((1, 5000), 10.0)).outputs[0]
    left = int((found == EMPTY).sum())
    assert left == 0, f"of 5,000 columns {left:,} were not written"
    _near(found, torch.full((1, 5000), 100.0), "5,000 equal columns give wrong results")


@geglu.property("half-precision inputs", "convert each load with .to(tl.float32) before you compute with it")
def _(function):
    for dtype in (torch.float16, torch.bfloat16):
        found = _gated(function, [[300.0, 20.0]], [[300.0, 30.0]], dtype).outputs[0]
        _near(found, [[90_000.0, 600.0]], f"{dtype}: gates and ups 300, 20 and 300, 30: got {_some(found)}")


@geglu.property("nothing outside the input is read", "both loads need the mask: tl.load(..., mask=inside, other=0.0)")
def _(function):
    _reads_only_inputs(_gated(function, [[10.0] * 5], [[10.0] * 5], junk=True), "1 row of 5 gates and 5 ups")


@geglu.property("nothing but the result is written", "tl.store(..., mask=inside): the last tile is rarely full")
def _(function):
    _only_its_own(_gated(function, [[1.5] * 5], [[2.0] * 5]), "5 columns")


# ---- add + RMSNorm

add_row_norm = Exercise("add_row_norm", returns=False)


def _added(function, x, residual, weight=None, eps=1e-6, dtype=torch.float32, sums=None, junk: bool = False) -> Run:
    """Outputs: the normed sum, in float32, and the sum, in `sums` (default: dtype)."""
    x, residual = torch.as_tensor(x).to(dtype), torch.as_tensor(residual).to(dtype)
    weight = torch.ones(x.shape[1]) if weight is None else torch.as_tensor(weight)
    outputs = [_room(*x.shape), _room(*x.shape, dtype=sums or dtype)]
    return Run(function, [x, residual, weight], outputs, eps, junk=junk)


def _norm(x, weight=1.0, eps=1e-6) -> Tensor:
    x = torch.as_tensor(x).double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _direction(rows: Tensor) -> Tensor:
    """Each row divided by its first element: its length does not matter."""
    rows = rows.double().cpu()
    return rows / rows[:, :1]


@add_row_norm.example
def _(function):
    out, total = _added(function, [[1.0, -1.0, 1.0, -1.0]], [[2.0, -2.0, 2.0, -2.0]]).outputs
    _near(total, [[3.0, -3.0, 3.0, -3.0]], f"the sum: expected [3, -3, 3, -3], got {_some(total)}")
    _near(out, [[1.0, -1.0, 1.0, -1.0]], f"the norm: expected [1, -1, 1, -1], got {_some(out)}")


@add_row_norm.property("the sum is what is normed", "square x + residual, not x")
def _(function):
    out, _ = _added(function, [[1.0, 1.0]], [[2.0, -2.0]]).outputs
    _near(out, _norm([[3.0, -1.0]]), f"[1, 1] + [2, -2] is [3, -1]; its norm is not {_some(out)}")


@add_row_norm.property(
    "every row has its own address", "row * DIM for x, residual, out and total; TILE is only what a program computes"
)
def _(function):
    for rows, dim in ((4, 5), (3, 33)):
        x = _random(rows, dim)
        out, total = _added(function, x, 2 * x).outputs
        _near(total, 3 * x, f"{rows} rows of {dim}: wrong sums")
        message = f"{rows} rows of {dim}: the normed rows are not multiples of the sums"
        _near(_direction(out), _direction(x), message, rtol=1e-3, atol=1e-3)


@add_row_norm.property("the mean is over d numbers", "divide by DIM, not by TILE: padding is not part of the row")
def _(function):
    out, _ = _added(function, [[1.0] * 5], [[1.0] * 5]).outputs
    _near(out, torch.ones(1, 5), f"a row of five equal numbers becomes five 1s, not {_some(out)}")


@add_row_norm.property("each column has its weight", "weight_ptr + columns, without the row; multiply by it at the end")
def _(function):
    x, weight = torch.tensor([[1.0, -1.0, 1.0, -1.0]] * 3), torch.tensor([2.0, 0.5, 1.0, -3.0])
    out, _ = _added(function, x, x, weight).outputs
    _near(out, _norm(x, weight), f"weights 2, 0.5, 1, -3 must scale every row, but got {_some(out)}")


@add_row_norm.property("eps is inside the root", "tl.rsqrt(mean + eps)")
def _(function):
    x = torch.tensor([[0.1, -0.1]])
    out, _ = _added(function, x, 0 * x, eps=1e-2).outputs
    _near(out, _norm(x, eps=1e-2), f"0.1 / sqrt(0.01 + 0.01) is 0.7071, not {_some(out[:, :1])}")


@add_row_norm.property(
    "what is normed is the sum as it is stored",
    "round first, .to(total_ptr.dtype.element_ty), store that, and norm its .to(tl.float32)",
)
def _(function):
    out, total = _added(function, [[128.0, 64.0]], [[0.05, 0.0]], dtype=torch.float16).outputs
    message = "128 + 0.05 is stored in float16 as 128, but the norm is of 128.05"
    _near(out, _norm(total.cpu()), message, rtol=2e-5, atol=0)
    _, total = _added(function, [[128.0, 64.0]], [[0.05, 0.0]]).outputs
    _near(total, [[128.05, 64.0]], f"128 + 0.05 in float32 is 128.05, not {_some(total[:, :1])}", rtol=1e-6, atol=0)


@add_row_norm.property("half-precision inputs", "300 * 300 overflows float16: .to(tl.float32) before you compute")
def _(function):
    for dtype in (torch.float16, torch.bfloat16):
        out, total = _added(function, [[200.0, -200.0]], [[100.0, -100.0]], dtype=dtype).outputs
        _near(total, [[300.0, -300.0]], f"{dtype}: 200 + 100 is 300, not {_some(total[:, :1])}")
        _near(out, [[1.0, -1.0]], f"{dtype}: the norm of [300, -300] is [1, -1], not {_some(out)}")


@add_row_norm.property("nothing outside the inputs is read", "all three loads need mask=inside, other=0.0")
def _(function):
    run = _added(function, [[1.0, -2.0, 3.0]], [[2.0, -4.0, 6.0]], junk=True)
    _reads_only_inputs(run, "1 row of 3")
    _near(_direction(run.outputs[0]), [[1.0, -2.0, 3.0]], "memory after a row of 3 changes the result")


@add_row_norm.property("nothing but the results is written", "both stores need the mask")
def _(function):
    _only_its_own(_added(function, [[1.0, -1.0, 1.0]], [[1.0, -1.0, 1.0]]), "3 columns")


# ---- a tile of rows and columns

transpose = Exercise("transpose", returns=False)


def _transposed(function, x: Tensor, out: Tensor | None = None) -> Run:
    return Run(function, [x], [_room(*x.T.shape) if out is None else out])


def _numbered(rows: int, columns: int) -> Tensor:
    return torch.arange(1.0, rows * columns + 1).view(rows, columns)


@transpose.example
def _(function):
    found = _transposed(function, torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).outputs[0]
    message = f"[[1, 2, 3], [4, 5, 6]]: expected rows [1, 4], [2, 5], [3, 6], got {found.tolist()}"
    _near(found, [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]], message)


@transpose.property(
    "a matrix of several tiles",
    "program (i, j) starts at row i * TILE, column j * TILE; the grid rounds up on both axes",
)
def _(function):
    for rows, columns in ((150, 20), (20, 150), (70, 133)):
        x = _numbered(rows, columns)
        found = _transposed(function, x).outputs[0]
        left = int((found == EMPTY).sum())
        assert left == 0, f"of {rows} x {columns} numbers {left:,} were not written"
        _near(found, x.T, f"a matrix of {rows} x {columns} has numbers in the wrong place")


@transpose.property("x may have any strides", "rows * x.stride(0) + columns * x.stride(1); a view's row may be longer")
def _(function):
    wide = _numbered(6, 8)
    for x, what in ((wide[:, :5], "the first 5 of 8 columns"), (wide.T, "a transposed view"), (wide[:, ::2], "a step")):
        found = _transposed(function, x).outputs[0]
        _near(found, x.T, f"x = {what} of a matrix: expected {_some(x.T)}, got {_some(found)}")


@transpose.property(
    "out may have any strides", "out's row is x's column: columns * out.stride(0) + rows * out.stride(1)"
)
def _(function):
    x = _numbered(6, 4)
    for room, what in ((_room(4, 9)[:, :6], "6 of 9 columns"), (_room(6, 4).T, "a transposed view")):
        run = _transposed(function, x, room)
        _near(run.outputs[0], x.T, f"out = {what} of a matrix: expected {_some(x.T)}, got {_some(run.outputs[0])}")


@transpose.property("nothing outside x is read", "the load needs both masks: rows < ROWS and columns < COLUMNS, with &")
def _(function):
    _reads_only_inputs(_transposed(function, _numbered(3, 5)), "3 x 5")


@transpose.property("nothing but out is written", "the store needs both masks too")
def _(function):
    _only_its_own(_transposed(function, _numbered(3, 5)), "5 x 3")


# ---- a matrix product, tile by tile

tiled_linear = Exercise("tiled_linear", returns=False)


def _multiplied(function, x: Tensor, weight: Tensor, junk: bool = False) -> Run:
    return Run(function, [x, weight], [_room(len(x), len(weight))], junk=junk)


def _whole(rows: int, columns: int) -> Tensor:
    """Small whole numbers: their products and sums are exact in any order, and on tensor cores."""
    at = torch.arange(float(rows * columns)).view(rows, columns)
    return (at * 7 + at // columns).remainder(11) - 5


@tiled_linear.example
def _(function):
    found = _multiplied(function, torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]])).outputs[0]
    _near(found, [[11.0, 17.0]], f"[[1, 2]] by [[3, 4], [5, 6]]: expected [[11, 17]], got {found.tolist()}")


@tiled_linear.property(
    "all columns of x count", "range(0, IN, PIECE) covers the last piece too; add each piece to the total"
)
def _(function):
    for columns in (64, 100, 257):
        found = _multiplied(function, torch.ones(1, columns), torch.ones(1, columns)).outputs[0]
        _near(found, [[columns]], f"{columns} times 1 * 1 is {columns}, not {_some(found)}")


@tiled_linear.property(
    "every tile of out", "program (i, j): rows i * TILE of x, rows j * TILE of weight; the grid rounds up on both axes"
)
def _(function):
    for rows, out in ((150, 20), (20, 150), (70, 133)):
        x, weight = _whole(rows, 8), _whole(out, 8)
        found = _multiplied(function, x, weight).outputs[0]
        left = int((found == EMPTY).sum())
        assert left == 0, f"of {rows} x {out} results {left:,} were not written"
        _near(found, x @ weight.T, f"{rows} rows of x and {out} of weight give wrong results")


@tiled_linear.property("half-precision inputs", "load, .to(tl.float32), then tl.dot; keep the total in float32")
def _(function):
    for dtype in (torch.float16, torch.bfloat16):
        x, weight = torch.full((2, 160), 32.0), torch.full((3, 160), 32.0)
        x[:, -1] = weight[:, -1] = 1.0
        found = _multiplied(function, x.to(dtype), weight.to(dtype)).outputs[0]
        _near(found, x @ weight.T, f"{dtype}: expected 162,817, got {_some(found[:, :1])}", rtol=1e-6, atol=0.5)


@tiled_linear.property(
    "nothing outside the inputs is read", "x needs masks for its rows and its columns; so does weight"
)
def _(function):
    x, weight = _whole(3, 5), _whole(2, 5)
    run = _multiplied(function, x, weight, junk=True)
    _reads_only_inputs(run, "3 x 5 and 2 x 5")
    _near(run.outputs[0], x @ weight.T, "memory after the inputs changes the result")


@tiled_linear.property("nothing but out is written", "the store needs both masks")
def _(function):
    _only_its_own(_multiplied(function, _whole(3, 8), _whole(5, 8)), "3 x 5")


# ---- a test that finds faults

find_fault = Exercise("find_fault", returns=False)  # None is an answer
PIECE = 64


def _product(
    *, masked: bool = True, own_scale: bool = True, last_scales: bool = False, last_row: bool = True,
    add: float = 0.0, times: float = 1.0, noise: float = 0.0, shifted: float = 0.0,
):  # fmt: skip
    """A product scale * (weight @ x), piece by piece of the columns, in torch; with faults, on demand.

    noise: an error of this share of scale * (|weight| @ |x|), as rounding makes it.
    """

    def product(weight: Tensor, scale: Tensor, x: Tensor, order=None) -> Tensor:
        rows, columns = weight.shape
        pieces = math.ceil(columns / PIECE)
        order = list(range(pieces)) if order is None else [int(piece) for piece in order]
        assert sorted(order) == list(range(pieces)), (
            f"order must hold each of the {pieces} pieces of {columns} columns once, not {order}"
        )
        missing = pieces * PIECE - columns
        after = 0.0 if masked else 3.0
        whole, scale, vector = weight.float(), scale.float(), x.float()
        wide = torch.nn.functional.pad(whole, (0, missing), value=after).view(rows, pieces, PIECE)
        x = torch.nn.functional.pad(vector, (0, missing), value=after).view(pieces, PIECE)
        scales = scale if own_scale else scale[:1].expand(rows)
        out = torch.zeros(rows, device=weight.device)
        for piece in order:
            part = wide[:, piece] @ x[piece]
            out += part if last_scales else part * scales
            if last_scales and piece == pieces - 1:
                out *= scales
        if not last_row:
            out[-1] = out[0]
        out[0] += shifted
        out[-1] -= shifted
        return out * times + add + noise * scale * (whole.abs() @ vector.abs())

    return product


def _fails(function, product, message: str):
    assert function(product) is not None, message


@find_fault.example
def _(function):
    found = function(_product())
    assert found is None, f"a right product: expected None, got {found!r}"
    _fails(function, _product(times=0.0), "a product that is always 0: expected some text, got None")


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


@find_fault.property("every row is compared", "compare all of the result, not its first row")
def _(function):
    _fails(function, _product(last_row=False), "a product whose last row is a copy of the first passes")
    _fails(
        function,
        _product(shifted=0.5),
        "a product with 0.5 too much in the first row and too little in the last passes",
    )


@find_fault.property(
    "a small error is found", "float32 has seven digits: rtol=1e-4 and atol=1e-3 are loose enough here"
)
def _(function):
    _fails(function, _product(times=1.002), "a product that is 1.002 times too large passes")
    _fails(function, _product(add=0.02), "a product that is 0.02 too large passes")


@find_fault.property(
    "rounding is no fault", "pieces are added up in another order than yours: compare with a tolerance, torch.allclose"
)
def _(function):
    for noise in (2e-7, -2e-7):
        found = function(_product(noise=noise))
        assert found is None, f"a product that is right up to rounding is said to fail: {found!r}"


@find_fault.property("nan is a fault", "nan > 0.001 is False: ask for what is right (all close), not for what is wrong")
def _(function):
    _fails(function, _product(add=math.nan), "a product that is nan everywhere passes")
