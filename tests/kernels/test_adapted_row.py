"""Products of one row with what its adapter adds, in one launch, compared with float64."""

from itertools import cycle

import pytest
import torch

from minillm.ops import reference
from tests.kernels.compare import COMPILED, DTYPES, assert_close, random_tensor
from tests.proofs import only_in_proofs

adapted_row = pytest.importorskip("minillm.kernels.adapted_row", reason="triton is not installed here")
single_row = pytest.importorskip("minillm.kernels.single_row")
pytestmark = pytest.mark.explore
LONG = single_row.WHOLE + 600
# rows, columns, where the rows of each part end, rank
SHAPES = [(37, 48, (37,), 4), (64, 96, (32, 48), 16), (45, 48, (20, 31), 12), (11, LONG, (11,), 12)]
if COMPILED:
    SHAPES += [(2560, 2048, (2048, 2304), 16), (2048, 2048, (2048,), 64), (2048, 16384, (2048,), 16)]


def term(columns, ends, rank, dtype, device, slot=2, scale=1.0):
    """A term for four slots, of which the first is not read, and words from the step before."""
    size = len(ends) * rank
    down = random_tensor(4, size, columns, dtype=dtype, device=device, scale=columns**-0.5)
    up = random_tensor(4, ends[-1], rank, dtype=dtype, device=device, scale=scale)
    down[0], up[0] = float("nan"), float("nan")
    inner = torch.full(
        (adapted_row.words(columns, size),), (6 << 32) | 0x7FC00000, dtype=torch.int64, device=device
    )  # NaN
    slots, step = torch.tensor([slot], device=device), torch.tensor([7], dtype=torch.int32, device=device)
    return adapted_row.LowRankTerm(slots, down, up, ends, inner, step)


def wanted_product(x, weight, term):
    """weight x plus what the adapter adds, [1, rows] float64."""
    out, slot = x.double() @ weight.double().T, int(term.slots)
    if slot:
        inner = (term.down[slot].double() @ x.double()[0]).view(len(term.ends), -1)
        part = (torch.arange(len(weight), device=x.device)[:, None] >= torch.tensor(term.ends, device=x.device)).sum(1)
        out += (term.up[slot].double() * inner[part]).sum(1)
    return out


@pytest.mark.parametrize("rank", [16, 64, 256, 512])
@pytest.mark.parametrize("rows, columns, gated", [(2560, 2048, False), (16384, 2048, True), (14336, 4096, True)])
def test_most_programs_have_rows_of_the_weight_whatever_the_rank(rows, columns, gated, rank):
    config = single_row.whole_config(rows, columns, gated, 132)
    tiles, helpers = -(-rows // config.tile), -(-2 * rank // config.tile)
    workers = adapted_row.workers_of(tiles, config.programs, helpers)
    each = -(-tiles // workers)
    assert workers <= config.programs < 4 * workers and (each - 1) * workers < tiles <= each * workers
    assert workers + helpers <= config.programs or 4 * helpers > config.programs or workers == tiles


@pytest.mark.parametrize(
    ("rows", "columns", "ends", "rank", "dtype"),
    [
        *((*shape, dtype) for shape, dtype in zip(SHAPES, cycle(DTYPES), strict=False)),
        *only_in_proofs(*((*shape, dtype) for shape, dtype in zip(SHAPES, cycle(DTYPES[::-1]), strict=False))),
    ],
)
def test_a_product_and_its_adapters_term(rows, columns, ends, rank, dtype, device):
    ends = (*ends, rows) if ends[-1] < rows else ends
    x, weight = (
        random_tensor(1, columns, dtype=dtype, device=device),
        random_tensor(rows, columns, dtype=dtype, device=device, scale=columns**-0.5),
    )
    bias, own = random_tensor(rows, dtype=dtype, device=device), term(columns, ends, rank, dtype, device)
    for slot in (2, 0, 3):  # each in a step of its own, as graphs replay them
        own.slots.fill_(slot)
        own.step.add_(1)
        out, total = adapted_row.product(x, weight, own, bias=bias)
        assert_close("adapted_row.product", out, wanted_product(x, weight, own) + bias.double(), dtype)
        assert total is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", *only_in_proofs("gelu_tanh")])
@pytest.mark.parametrize("rank", [12, *only_in_proofs(4, 16, 70)])
def test_gate_and_up_get_their_terms_before_the_activation(rank, activation, dtype, device):
    x, weight = (
        random_tensor(1, 48, dtype=dtype, device=device),
        random_tensor(2 * 37, 48, dtype=dtype, device=device, scale=0.3),
    )
    bias, own = random_tensor(2 * 37, dtype=dtype, device=device), term(48, (37, 74), rank, dtype, device, scale=0.3)
    for slot in (2, 0):
        own.slots.fill_(slot)
        out, _ = adapted_row.product(x, weight, own, bias=bias, activation=activation)
        wanted = reference.gated_activation(wanted_product(x, weight, own) + bias.double(), activation)
        assert_close("adapted_row.product, gated", out, wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_the_term_is_of_the_normed_sum(activation, dtype, device):
    rows, ends = (42, (21, 42)) if activation else (42, (20, 31, 42))
    x, residual = (random_tensor(1, 48, dtype=dtype, device=device, scale=3.0) for _ in range(2))
    weight, own = random_tensor(rows, 48, dtype=dtype, device=device), term(48, ends, 4, dtype, device)
    norm, post_norm = (0.2 + torch.rand(48, device=device) for _ in range(2))
    out, total = adapted_row.product(
        x, weight, own, norm=norm, eps=1e-2, residual=residual, post_norm=post_norm, activation=activation
    )
    normed, summed = reference.add_rms_norm(reference.rms_norm(x, post_norm, 1e-2), residual, norm, 1e-2)
    wanted = wanted_product(normed, weight, own)
    wanted = reference.gated_activation(wanted, activation) if activation else wanted
    assert_close("adapted_row.product, more parts", out, wanted, dtype)
    assert_close("adapted_row.product, more parts", total, summed, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "activation"), [(40, 96, None), (42, 48, "silu"), (11, LONG, None)])
def test_without_an_adapter_the_product_is_the_same_to_the_last_bit(rows, columns, activation, dtype, device):
    x, weight = (random_tensor(each, columns, dtype=dtype, device=device) for each in (1, rows))
    ends = (rows // 2, rows) if activation else (rows,)
    own = term(columns, ends, 4, dtype, device, slot=0)
    before = own.inner.clone()
    out, _ = adapted_row.product(x, weight, own, activation=activation)
    assert torch.equal(out, single_row.product(x, weight, activation=activation)[0])
    assert torch.equal(own.inner, before)


@pytest.mark.parametrize(("rows", "columns", "ends", "rank"), SHAPES)
@pytest.mark.gpu  # interpreted, programs never wait for each other
def test_each_step_adds_its_own_h(rows, columns, ends, rank, device):
    """A program that took h before all of it was told would add a part of the last step's."""
    ends = (*ends, rows) if ends[-1] < rows else ends
    weight = random_tensor(rows, columns, dtype=torch.float32, device=device, scale=columns**-0.5)
    own = term(columns, ends, rank, torch.float32, device)
    for _ in range(200):
        own.step.add_(1)
        x = random_tensor(1, columns, dtype=torch.float32, device=device)
        out, _ = adapted_row.product(x, weight, own)
        assert_close("adapted_row.product, steps", out, wanted_product(x, weight, own), torch.float32)


@pytest.mark.gpu
def test_more_helpers_than_programs_that_run_at_a_time(device):
    x = random_tensor(1, 4096, dtype=torch.float32, device=device)
    weight = random_tensor(2 * 40, 4096, dtype=torch.float32, device=device, scale=4096**-0.5)
    own = term(4096, (40, 80), 512, torch.float32, device, scale=0.05)
    out, _ = adapted_row.product(x, weight, own, activation="silu")
    wanted = reference.gated_activation(wanted_product(x, weight, own), "silu")
    assert_close("adapted_row.product, gated", out, wanted, torch.float32)


def test_what_does_not_fit_is_refused(device):
    x, weight = torch.randn(1, LONG, device=device), torch.randn(8, LONG, device=device)
    with pytest.raises(ValueError, match="are longer than 4096"):
        adapted_row.product(x, weight, term(LONG, (8,), 4, x.dtype, device), norm=torch.ones(LONG, device=device))
    with pytest.raises(ValueError, match="are longer than 4096"):
        adapted_row.product(x, weight, term(LONG, (4, 8), 4, x.dtype, device))
    with pytest.raises(ValueError, match="more than 3"):
        adapted_row.product(x, weight, term(LONG, (2, 4, 6, 8), 4, x.dtype, device))
