"""What adapters add to products: the kernels against the reference, for batches that mix them."""

import pytest
import torch

from minillm.ops import reference
from minillm.ops.signatures import Adapted, LowRank
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


@pytest.fixture(params=["few", "many"])
def sizes(request, monkeypatch):
    """Tiles small enough for a test to fill several of them, for few tokens and for many: the tokens of one."""
    small = {"columns": 64, "shares": 3, "rows": 16}
    monkeypatch.setattr(low_rank, "FEW", low_rank.FEW._replace(**small))
    monkeypatch.setattr(low_rank, "MANY", low_rank.MANY._replace(**small, tokens=32, entries=32, pieces=2))
    monkeypatch.setattr(low_rank, "FEW_TOKENS", {"few": 999, "many": 0}[request.param])
    monkeypatch.setattr(low_rank, "processors", lambda _: 1)
    return low_rank._tiles(1).tokens


@pytest.mark.parametrize(
    "parts, rank, columns", [((300, 40, 9), 16, 130), ((30, 270), 5, 90), ((530,), 20, 64)], ids=str
)
def test_each_program_goes_through_several_tiles(parts, rank, columns, sizes, device):
    slots = torch.tensor([1] * (sizes + 1) + [3] * 8 + [0, 2, 2, 5])
    slots = slots[torch.randperm(len(slots))].to(device)
    given = factors(6, parts, rank, columns, torch.float32, device)
    x, out = (random_tensor(len(slots), size, dtype=torch.float32, device=device) for size in (columns, sum(parts)))
    wide = LowRank(given.down.double(), given.up.double(), given.ends)
    wanted = reference.add_low_rank(out.double(), x.double(), slots, wide)
    assert_close("add_low_rank", kernels.add_low_rank(out.clone(), x, slots, given), wanted, torch.float32)


@pytest.mark.parametrize(
    "counts", [[0], [1], [3, 0, 1, 16, 33], [0, 1, 17, 33, 1], [9, 0, 100, 0, 64], [70, 0, 0]], ids=str
)
def test_a_tile_has_tokens_of_one_slot_and_each_token_is_in_one(counts, sizes, device):
    """counts: how many tokens each slot has. Tiles may be as many as there is room for."""
    slots = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    slots = slots[torch.randperm(len(slots))].to(device)
    used, *tiles = low_rank.token_tiles(slots, len(counts)).tolist()
    size = len(used) - 1
    assert max(used[0], 0) == sum(-(-count // size) for count in counts[1:])
    found = [(token, slot) for slot, *tokens in tiles[: max(used[0], 0)] for token in tokens if token >= 0]
    assert sorted(found) == [(token, slot) for token, slot in enumerate(slots.tolist()) if slot]
    assert all(set(tile) == {-1} for tile in tiles[max(used[0], 0) :])


def test_tokens_are_grouped_once_for_all_weights_of_a_step(device, monkeypatch):
    grouped, own = [], low_rank.token_tiles
    monkeypatch.setattr(
        low_rank, "token_tiles", lambda slots, count: grouped.append(slots.tolist()) or own(slots, count)
    )
    weights = [factors(4, parts, 4, 24, torch.float32, device) for parts in ((8, 8), (30,))]
    adapted = Adapted(torch.tensor([2, 0, 3, 3, 1], device=device), {})
    for step in (adapted, adapted.only(torch.tensor([4, 1, 0, 2, 3], device=device)), Adapted(adapted.slots[:3], {})):
        for given in weights:
            x, out = (
                random_tensor(len(step.slots), size, dtype=torch.float32, device=device)
                for size in (24, given.ends[-1])
            )
            wanted = reference.add_low_rank(out.clone(), x, step.slots, given)
            got = kernels.add_adapted(out, x, step, given)
            assert_close("add_adapted", got, wanted, torch.float32)
    assert grouped == [[2, 0, 3, 3, 1], [1, 0, 2, 3, 3], [2, 0, 3]]
    assert kernels.add_adapted(out.double(), x.double(), step, given) is None


def test_a_tokens_result_does_not_depend_on_the_others(device):
    given = factors(3, (16, 8), 4, 24, torch.float32, device)
    x, out = (random_tensor(40, size, dtype=torch.float32, device=device) for size in (24, 24))
    slots = torch.tensor([1, 2, 0, 2, 1, 1, 1, 1], device=device).repeat(5)
    together = kernels.add_low_rank(out.clone(), x, slots, given)
    for i in range(0, 40, 3):  # slots repeat after 8
        alone = kernels.add_low_rank(out[i : i + 1].clone(), x[i : i + 1], slots[i : i + 1], given)
        assert alone[0].equal(together[i])


def test_all_programs_that_add_for_few_tokens_run_together():
    assert low_rank.FEW.adders * low_rank.FEW.warps * 32 * low_rank.FEW.registers <= 65536


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
