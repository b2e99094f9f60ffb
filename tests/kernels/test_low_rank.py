"""What adapters add to products: the kernels against the reference, for batches that mix them."""

import pytest
import torch

from minillm.kv_cache.layer_cache import CacheSpec
from minillm.ops import reference
from minillm.ops.signatures import Adapted, LowRank
from minillm.quantization import DenseWeight
from tests.kernels.compare import DTYPES, assert_close, random_tensor, rotations

kernels = pytest.importorskip("minillm.ops.triton", reason="triton is not installed here")
from minillm.kernels import adapted_activation as fused  # noqa: E402  needs triton
from minillm.kernels import adapted_norm, adapted_rotary, low_rank  # noqa: E402
from minillm.ops import triton_adapted  # noqa: E402


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
    return low_rank.sizes_for(1).tokens


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
    size, (adapted, all_tiles) = len(used) - 1, (max(each, 0) for each in used[:2])
    assert (adapted, all_tiles) == tuple(sum(-(-count // size) for count in some) for some in (counts[1:], counts))
    found = [(token, slot) for slot, *tokens in tiles[:all_tiles] for token in tokens if token >= 0]
    assert sorted(found) == list(enumerate(slots.tolist()))
    assert all(tile[0] for tile in tiles[:adapted]) and not any(tile[0] for tile in tiles[adapted:all_tiles])
    assert all(set(tile) == {-1} for tile in tiles[all_tiles:])


def test_tokens_are_grouped_once_for_all_weights_of_a_step(device, monkeypatch):
    grouped, own = [], low_rank.token_tiles
    monkeypatch.setattr(
        low_rank, "token_tiles", lambda slots, *more: grouped.append(slots.tolist()) or own(slots, *more)
    )
    weights = [DenseWeight(random_tensor(16, 24, dtype=torch.float32, device=device)) for _ in range(2)]
    parts = ((8, 8), (16,))
    of = {id(w): factors(4, each, 4, 24, torch.float32, device) for w, each in zip(weights, parts, strict=True)}
    adapted = Adapted(torch.tensor([2, 0, 3, 3, 1], device=device), of)
    for step in (adapted, adapted.only(torch.tensor([4, 1, 0, 2, 3], device=device)), Adapted(adapted.slots[:3], of)):
        x = random_tensor(len(step.slots), 24, dtype=torch.float32, device=device)
        for weight in weights:
            wanted = reference.add_low_rank(reference.linear(x, weight), x, step.slots, of[id(weight)])
            got = kernels.add_adapted(reference.linear(x, weight), x, step, of[id(weight)])
            assert_close("add_adapted", got, wanted, torch.float32)
    assert grouped == [[2, 0, 3, 3, 1], [1, 0, 2, 3, 3], [2, 0, 3]]
    assert kernels.add_adapted(x.double(), x.double(), step, of[id(weights[0])]) is None
    assert kernels.adapted_gate(x.double(), weights[0], "silu", step) is None
    for few in (True, False):
        monkeypatch.setattr(fused, "FEW_TOKENS", 9 if few else 1)
        monkeypatch.setattr(low_rank, "FEW_TOKENS", fused.FEW_TOKENS)
        step = Adapted(torch.tensor([2, 0, 3, 2, 1], device=device), of)
        x = random_tensor(5, 24, dtype=torch.float32, device=device)
        wanted = reference.add_low_rank(reference.linear(x, weights[0]), x, step.slots, of[id(weights[0])])
        gated = kernels.adapted_gate(x, weights[0], "silu", step)
        assert_close("adapted_gate", gated, reference.gated_activation(wanted, "silu"), torch.float32)


@pytest.fixture
def beneath(device):
    """A weight with two parts, a batch of tokens some of which have adapters, A beneath the weight, and the tokens."""
    given = factors(4, (8, 8), 4, 24, torch.float32, device)
    weight = DenseWeight(random_tensor(16, 24, dtype=torch.float32, device=device))
    both = DenseWeight(torch.cat((weight.weight, given.down[1:].flatten(0, 1))))
    slots = torch.tensor([2, 0, 3, 3, 1, 0], device=device)
    step = Adapted(slots, {id(weight): given}, {id(weight): both})
    return weight, given, step, random_tensor(6, 24, dtype=torch.float32, device=device)


@pytest.mark.parametrize("few", [True, False])
def test_a_product_with_the_factors_beneath_a_weight_gives_what_two_give(few, beneath, monkeypatch):
    """With few tokens; it computes A x of all slots, and with many tokens that would take longer."""
    monkeypatch.setattr(low_rank, "FEW_TOKENS", 6 if few else 5)
    monkeypatch.setattr(fused, "FEW_TOKENS", low_rank.FEW_TOKENS)
    (weight, given, step, x), own, products = beneath, triton_adapted.linear, []

    def linear(x, weight):
        products.append(weight.shape[0])
        return own(x, weight)

    monkeypatch.setattr(triton_adapted, "linear", linear)
    wanted = reference.add_low_rank(reference.linear(x, weight), x, step.slots, given)
    product = kernels.product_with_inner(x, weight, step)
    if few:
        assert kernels.fits_a_token(product)
        assert_close("added", kernels.added(product), wanted, torch.float32)
    else:
        assert product is None
    gated = kernels.adapted_gate(x, weight, "silu", step)
    assert_close("adapted_gate", gated, reference.gated_activation(wanted, "silu"), torch.float32)
    assert products == ([40, 40] if few else [16])
    assert kernels.product_with_inner(x.double(), weight, step) is None


def test_a_term_of_too_many_numbers_for_a_program_is_added_before():
    slots, inner = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1)
    for rows, rank, fits in ((4096, 32, True), (4097, 32, False), (2048, 64, True), (2048, 65, False)):
        assert low_rank.Term(inner, slots, torch.zeros(1, 1, 1).expand(1, rows, rank), 1).fits == fits


def test_the_norm_of_a_product_adds_what_adapters_change(beneath):
    weight, given, step, x = beneath
    residual, norm = (random_tensor(*size, dtype=torch.float32, device=x.device) for size in ((6, 20), (16,)))
    residual = residual[:, :16]
    given = given._replace(ends=(16,))  # of one part: its h are the first ones
    step.factors[id(weight)] = given._replace(down=given.down[:, :4])
    step.beneath[id(weight)] = DenseWeight(torch.cat((weight.weight, given.down[1:, :4].flatten(0, 1))))
    wanted = reference.add_low_rank(reference.linear(x, weight), x, step.slots, step.factors[id(weight)])
    product = kernels.product_with_inner(x, weight, step)
    for got, expected in zip(
        kernels.normed(product, residual, norm, 1e-6), reference.add_rms_norm(wanted, residual, norm, 1e-6), strict=True
    ):
        assert_close("normed", got, expected, torch.float32)
    assert product.out.equal(reference.linear(x, weight)), "the product itself stays"


@pytest.mark.parametrize("heads, kv_heads, dim", [(3, 1, 8), (4, 2, 16)])
@pytest.mark.parametrize("rotate_keys, keep", [(True, True), (False, False)])
@pytest.mark.parametrize("held", ["auto", "int8", "fp8"])
def test_rotation_adds_what_adapters_change_of_queries_keys_and_values(
    heads, kv_heads, dim, rotate_keys, keep, held, device
):
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
    given = factors(4, sizes, 5, 24, torch.float32, device)
    weight = DenseWeight(random_tensor(sum(sizes), 24, dtype=torch.float32, device=device))
    both = DenseWeight(torch.cat((weight.weight, given.down[1:].flatten(0, 1))))
    slots = torch.tensor([2, 0, 3, 1], device=device)
    x, cos_sin = random_tensor(4, 24, dtype=torch.float32, device=device), rotations(4, dim, device)
    product = kernels.product_with_inner(x, weight, Adapted(slots, {id(weight): given}, {id(weight): both}))
    whole = reference.add_low_rank(reference.linear(x, weight), x, slots, given)
    written = []
    for qkv, more in ((product.out, (product,)), (whole, ())):
        cache = CacheSpec.of(held, kv_heads, dim, torch.float32).allocate(3, 2, torch.device(device))
        for each in (cache.k, cache.v, cache.k_scale, cache.v_scale):
            if each is not None:
                each.zero_()
        q, k, v = qkv.unflatten(1, (-1, dim)).split((heads, kv_heads, kv_heads), dim=1)
        to = torch.tensor([4, 0, -1, 3], device=device)
        done = kernels.rotary_write(q, k, v, cos_sin, cache, to, rotate_keys, keep, *more)
        written.append((*done, v, *cache.read(torch.arange(3, device=device)[None])))
    for name, got, wanted in zip(("q", "k", "v", "cached k", "cached v"), *written, strict=True):
        if name not in ("k", "v") or keep:  # and a code may be the next one
            assert_close(name, got.float(), wanted, torch.float32, 2e3 if "cached" in name and held != "auto" else 1)


def test_what_adapters_change_is_rounded_before_the_rotation_and_the_norm(device):
    """256 + 1 is no bfloat16, and rounds to 256. So a head's halves are equal, and 256 + 1 is 256 again."""
    slots, up = torch.ones(1, dtype=torch.int64, device=device), torch.ones(2, 3, 2, 8, 1, device=device).bfloat16()
    up[:, :, 1] = 0  # of the second halves
    x, h = torch.full((1, 48), 256.0, device=device).bfloat16(), torch.ones(1, 3, device=device).bfloat16()
    term = low_rank.Term(h, slots, up.view(2, 48, 1), 3)
    cache = CacheSpec.of("auto", 1, 16, torch.bfloat16).allocate(1, 1, torch.device(device))
    angles = torch.ones(1, 2, 16, device=device).bfloat16()
    q, k = adapted_rotary.adapted_rotary_write(x.clone(), 1, angles, cache, slots - 1, True, True, term)
    for rotated in (q, k, cache.k):
        assert rotated.flatten().tolist() == [0.0] * 8 + [512.0] * 8
    assert set(cache.v.flatten().tolist()) == {256.0}
    ones = torch.ones(1, 48, device=device).bfloat16()
    _, total = adapted_norm.adapted_add_rms_norm(x, ones, ones[0].float(), 1e-6, term._replace(parts=1))
    assert set(total.flatten().tolist()) == {256.0}


@pytest.mark.parametrize("few", [True, False])
def test_kernels_wait_for_groups_that_were_made_just_before(few, beneath, monkeypatch):
    for module in (fused, low_rank):
        monkeypatch.setattr(module, "FEW_TOKENS", 6 if few else 1)
    weight, _, step, x = beneath
    launched, own = [], low_rank.inner_products
    monkeypatch.setattr(low_rank, "inner_products", lambda *given: launched.append(given[3]) or own(*given))
    step.beneath.clear()
    kernels.adapted_gate(x, weight, "silu", step)
    kernels.adapted_gate(x, weight, "silu", step)
    assert launched == [True, False]


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
