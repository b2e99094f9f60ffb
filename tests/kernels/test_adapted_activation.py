"""The activation of a product with what adapters add to it: in one launch the same as in two."""

import pytest
import torch

from tests.kernels.compare import DTYPES, assert_close, random_tensor
from tests.kernels.test_low_rank import factors

kernels = pytest.importorskip("minillm.ops.triton", reason="triton is not installed here")
from minillm.kernels import adapted_activation as fused  # noqa: E402  needs triton
from minillm.kernels import low_rank  # noqa: E402


def both(slots, inner, rank, columns, activation, dtype, device, beneath):
    """The activation in one launch and in two. beneath: h is a part of the product, as `Inner.beneath` takes it."""
    given = factors(6, (inner, inner), rank, columns, dtype, device)
    size = 2 * rank
    x = random_tensor(len(slots), columns, dtype=dtype, device=device)
    wide = random_tensor(len(slots), 2 * inner + 5 * size, dtype=dtype, device=device)
    grouped = low_rank.token_tiles(slots, 6, fused.tile_tokens(len(slots)))  # two launches before it is read
    gate_up, tiles = wide[:, : 2 * inner], low_rank.token_tiles(slots, 6)
    if beneath:
        wide[:, 2 * inner :] = x @ given.down[1:].flatten(0, 1).T
        h = low_rank.Inner.beneath(wide[:, 2 * inner :], size)
    else:
        h = low_rank.inner_products(x, tiles, given.down, just_grouped=True)
    one = fused.adapted_activation(gate_up, h, grouped, given.up, activation)
    added = low_rank.add_grouped(gate_up, h, tiles, *given)
    return one, kernels.gated_activation(added, activation)


@pytest.mark.parametrize("beneath", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner, rank, activation", [(24, 3, "silu"), (130, 16, "gelu_tanh"), (40, 20, "silu")])
@pytest.mark.parametrize("few", [True, False])
def test_one_launch_gives_what_two_give(inner, rank, activation, dtype, beneath, few, device, monkeypatch):
    monkeypatch.setattr(fused, "processors", lambda _: 1)
    monkeypatch.setattr(fused, "COLUMNS_AT_ONCE", (64, 32))
    for module in (fused, low_rank):
        monkeypatch.setattr(module, "FEW_TOKENS", 99 if few else 0)
    slots = torch.tensor([1] * 33 + [3] * 5 + [0] * 18 + [2, 2, 5])
    slots = slots[torch.randperm(len(slots))].to(device)
    one, two = both(slots, inner, rank, 40, activation, dtype, device, beneath)
    assert one.isfinite().all()
    assert_close("adapted_activation", one, two.double(), dtype)


@pytest.mark.parametrize("slots", [[0, 0, 0], [2], []], ids=str)
def test_few_tokens_none_and_tokens_without_an_adapter(slots, device):
    one, two = both(torch.tensor(slots, device=device).long(), 8, 4, 24, "silu", torch.float32, device, False)
    assert one.shape == (len(slots), 8)
    assert_close("adapted_activation", one, two.double(), torch.float32)


def test_what_it_does_not_take(device):
    gate_up, tiles = torch.zeros(2, 8, device=device), low_rank.token_tiles(torch.ones(2, device=device).long(), 2)
    inner, up = low_rank.Inner(torch.zeros(1, 2, 4, device=device), 1, 8, 4, 0), torch.zeros(2, 8, 2, device=device)
    with pytest.raises(ValueError, match='"gelu_tanh" or "silu", not \'relu\''):
        fused.adapted_activation(gate_up, inner, tiles, up, "relu")
    with pytest.raises(ValueError, match="stride of 2: they must be contiguous"):
        fused.adapted_activation(torch.zeros(2, 16, device=device)[:, ::2], inner, tiles, up, "silu")
