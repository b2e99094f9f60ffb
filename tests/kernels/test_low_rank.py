"""What adapters add to products: the kernels against the reference, for batches that mix them."""

import pytest
import torch

from minillm.ops import reference
from minillm.ops.signatures import LowRank
from tests.kernels.compare import DTYPES, assert_close, random_tensor

kernels = pytest.importorskip("minillm.ops.triton", reason="triton is not installed here")
from minillm.kernels import low_rank  # noqa: E402  needs triton


def factors(slots, parts, rank, columns, dtype, device):
    """Views of one buffer, as `AdapterSlots` has them: random, and NaN in slot 0."""
    rows, size = sum(parts), len(parts) * rank
    buffer = random_tensor(slots, 5 + size * columns + rows * rank, dtype=dtype, device=device)
    buffer[0] = torch.nan
    down = buffer[:, 5 : 5 + size * columns].unflatten(1, (size, columns))
    up = buffer[:, 5 + size * columns :].unflatten(1, (rows, rank))
    return LowRank(down, up, tuple(torch.tensor(parts).cumsum(0).tolist()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "parts, rank, columns",
    [((24, 8, 8), 3, 40), ((17, 17), 16, 33), ((50,), 1, 8), ((300,), 8, 1030)],
    ids=str,
)
def test_each_token_gets_what_its_own_adapter_adds(parts, rank, columns, dtype, device):
    slots = torch.tensor([2, 0, 1, 2, 3, 0], device=device)
    given = factors(4, parts, rank, columns, dtype, device)
    x = random_tensor(len(slots), columns, dtype=dtype, device=device)
    out = random_tensor(len(slots), sum(parts), dtype=dtype, device=device, scale=columns)
    wide = LowRank(given.down.double(), given.up.double(), given.ends)
    wanted = reference.add_low_rank(out.double(), x.double(), slots, wide)
    got = kernels.add_low_rank(out.clone(), x, slots, given)
    assert_close("add_low_rank", got, wanted, dtype)
    assert got[[1, 5]].equal(out[[1, 5]]), "a token without an adapter has changed"


def test_a_tokens_result_does_not_depend_on_the_others(device):
    given = factors(3, (16, 8), 4, 24, torch.float32, device)
    x, out = (random_tensor(5, size, dtype=torch.float32, device=device) for size in (24, 24))
    slots = torch.tensor([1, 2, 0, 2, 1], device=device)
    together = kernels.add_low_rank(out.clone(), x, slots, given)
    for i in range(5):
        alone = kernels.add_low_rank(out[i : i + 1].clone(), x[i : i + 1], slots[i : i + 1], given)
        assert alone[0].equal(together[i])


def test_no_tokens_and_too_many_parts(device):
    given = factors(2, (4, 4, 4, 4), 2, 8, torch.float32, device)
    x, out = (random_tensor(2, size, dtype=torch.float32, device=device) for size in (8, 16))
    slots = torch.ones(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="4 parts has more than 3"):
        low_rank.add_low_rank(out, x, slots, *given)
    assert len(kernels.add_low_rank(out[:0], x[:0], slots[:0], given._replace(ends=(16,)))) == 0


def test_the_reference_sums_in_float32(device):
    given = factors(2, (6,), 4, 400, torch.bfloat16, device)
    x, out = (random_tensor(3, size, dtype=torch.bfloat16, device=device) for size in (400, 6))
    slots = torch.ones(3, dtype=torch.int64, device=device)
    wide = LowRank(given.down.double(), given.up.double(), given.ends)
    wanted = reference.add_low_rank(out.double(), x.double(), slots, wide)
    assert_close("reference", reference.add_low_rank(out.clone(), x, slots, given), wanted, torch.bfloat16)
