"""A layer's five launches for one row, against the operations they stand for: interpreted on CPU, compiled on a GPU."""

import pytest
import torch

from minillm.kv_cache import LayerCache
from minillm.ops import reference

single_row = pytest.importorskip("minillm.kernels.single_row", reason="triton is not installed here")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = list(TOLERANCE)


def near(got, wanted, dtype, times=1):
    error = (got.double() - wanted.double()).norm() / wanted.double().norm()
    assert got.dtype == dtype and error <= TOLERANCE[dtype] * times, f"relative error {error:.2e}"  # fails on NaN too


def normal(*shape, dtype, device, scale=1.0):
    return (torch.randn(*shape, device=device) * scale).to(dtype)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(torch.seed() % 2**31)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(37, 48), (64, 256), (5, 96)])
def test_a_product_of_one_row(rows, columns, dtype, device):
    x, weight = normal(1, columns, dtype=dtype, device=device), normal(rows, columns, dtype=dtype, device=device)
    out, total = single_row.product(x, weight)
    near(out, x.double() @ weight.double().T, dtype)
    assert total is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_residual", [False, True])
def test_the_norm_before_a_product_and_the_sum_before_the_norm(with_residual, dtype, device):
    x, residual = (normal(1, 96, dtype=dtype, device=device, scale=3.0) for _ in range(2))
    weight, norm = normal(40, 96, dtype=dtype, device=device), 1 + torch.rand(96, device=device)
    summed = x + residual if with_residual else x
    out, total = single_row.product(x, weight, norm=norm, eps=1e-2, residual=residual if with_residual else None)
    near(out, reference.rms_norm(summed, norm, 1e-2).double() @ weight.double().T, dtype)
    if with_residual:
        near(total, summed, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
def test_gate_and_up_are_one_launch(activation, dtype, device):
    x, weight = normal(1, 48, dtype=dtype, device=device), normal(2 * 21, 48, dtype=dtype, device=device, scale=0.3)
    out, _ = single_row.product(x, weight, activation=activation)
    near(out, reference.gated_activation(x.double() @ weight.double().T, activation), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_too_long_to_hold_go_piece_by_piece(dtype, device):
    columns = single_row.WHOLE + 600
    x, weight = normal(1, columns, dtype=dtype, device=device), normal(11, columns, dtype=dtype, device=device)
    out, _ = single_row.product(x, weight)
    near(out, x.double() @ weight.double().T, dtype)
    with pytest.raises(ValueError, match="do not fit a program whole"):
        single_row.product(x, weight, norm=torch.ones(columns, device=device))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 2, 16, 17, 127, 128, 129, 300, 512])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 1, 64), (4, 2, 32)])
def test_attention_of_one_row_and_what_it_leaves_in_the_cache(heads, kv_heads, dim, length, dtype, device):
    block_size, blocks = 16, 40
    qkv = normal(1, (heads + 2 * kv_heads) * dim, dtype=dtype, device=device)
    angles = torch.rand(1, dim // 2, device=device) * 6
    cos, sin = angles.cos(), angles.sin()
    cos_sin = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).to(dtype)
    k_cache, v_cache = (normal(blocks, block_size, kv_heads, dim, dtype=dtype, device=device) for _ in "kv")
    table = torch.randperm(blocks, device=device)[None, : 512 // block_size].int()
    lengths = torch.tensor([length], dtype=torch.int32, device=device)

    q, k, v = qkv.view(1, -1, dim).split((heads, kv_heads, kv_heads), 1)
    q, k = reference.rotary_embedding(q, k, cos_sin)
    slot = table[0, (length - 1) // block_size].long() * block_size + (length - 1) % block_size
    wanted_cache = LayerCache(k_cache.clone(), v_cache.clone())
    reference.write_kv(k, v, wanted_cache, slot[None])
    doubled = LayerCache(wanted_cache.k.double(), wanted_cache.v.double())
    wanted = reference.decode_attention(q[:, None].double(), doubled, table, lengths, scale=0.2)[:, 0]
    # What lies behind the length must not matter, nor what is in the new token's slot already.
    for cache in (k_cache, v_cache):
        cache.view(-1, kv_heads, dim)[slot] = float("nan")
        cache[table[0, (length + block_size - 1) // block_size :].long()] = float("nan")

    attend = single_row.RowAttention(heads, kv_heads, dim, torch.device(device))
    for _ in range(2):  # the second finds the workspace as the first left it
        out = attend(qkv, cos_sin, k_cache, v_cache, table, lengths, 0.2)
        near(out.view(1, heads, dim), wanted, dtype, times=2)  # turned queries are rounded too
    near(k_cache.view(-1, kv_heads, dim)[slot], wanted_cache.k.view(-1, kv_heads, dim)[slot], dtype)
    assert torch.equal(v_cache.view(-1, kv_heads, dim)[slot], wanted_cache.v.view(-1, kv_heads, dim)[slot])
