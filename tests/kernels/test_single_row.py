"""A layer's five fused launches for one row, compared with the operations they replace."""

import ast
from pathlib import Path

import pytest
import torch

from minillm.kv_cache import LayerCache
from minillm.ops import AttentionOptions, Rows, reference
from tests.kernels.compare import COMPILED, DTYPES, assert_close, double, random_tensor, rotations
from tests.proofs import only_in_proofs

single_row = pytest.importorskip("minillm.kernels.single_row", reason="triton is not installed here")
pytestmark = [
    pytest.mark.explore,
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2"),  # an empty part, interpreted
]
SHAPES = [(4, 1, 64), (4, 2, 32), (2, 1, 256)]  # heads, kv_heads, head_dim: 128, 256 and 32 keys a tile
LENGTHS = [1, 2, 16, 17, 127, 128, 129, 300, 512]
if COMPILED:
    SHAPES += [(8, 1, 64), (8, 1, 256), (6, 2, 128), (4, 4, 256), (16, 1, 16)]
    LENGTHS += [31, 32, 33, 64, 65, 511, 513, 1024, 1025, 2777]  # the last ones have several tiles per part
# Another dtype changes the rounding only, which is the same for one tile or several.
ROWS = [
    (length, dtype) for dtype in DTYPES for length in LENGTHS if COMPILED or dtype == DTYPES[0] or length in (17, 300)
]
# Interpreted, other shapes run with a row that ends in a tile and one of several tiles.
ATTENTION = [
    (*shape, length, dtype)
    for shape in SHAPES
    for length, dtype in ROWS
    if COMPILED or shape == SHAPES[0] or (length in (129, 512) and dtype == DTYPES[0])
]


DEPENDENT = (
    "single_row.py", "integer_rows.py", "fp8_rows.py", "sampling.py", "truncation.py", "decode_step.py", "embedding.py",
    "low_rank.py", "adapted_activation.py", "adapted_norm.py", "adapted_rotary.py", "adapted_row.py",
    "normalization.py",
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(37, 48), (64, 256), (5, 96)])
def test_a_product_of_one_row(rows, columns, dtype, device):
    x, weight = (
        random_tensor(1, columns, dtype=dtype, device=device),
        random_tensor(rows, columns, dtype=dtype, device=device),
    )
    out, total = single_row.product(x, weight)
    assert_close("single_row.product", out, x.double() @ weight.double().T, dtype)
    assert total is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_residual", [False, True])
def test_residual_addition_and_norm_are_fused_into_the_product(with_residual, dtype, device):
    x, residual = (random_tensor(1, 96, dtype=dtype, device=device, scale=3.0) for _ in range(2))
    weight, norm = random_tensor(40, 96, dtype=dtype, device=device), 1 + torch.rand(96, device=device)
    summed = x + residual if with_residual else x
    out, total = single_row.product(x, weight, norm=norm, eps=1e-2, residual=residual if with_residual else None)
    assert_close(
        "single_row.product, normed", out, reference.rms_norm(summed, norm, 1e-2).double() @ weight.double().T, dtype
    )
    if with_residual:
        assert_close("single_row.product, normed", total, summed, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
def test_gate_and_up_projections_are_one_launch(activation, dtype, device):
    x, weight = (
        random_tensor(1, 48, dtype=dtype, device=device),
        random_tensor(2 * 21, 48, dtype=dtype, device=device, scale=0.3),
    )
    out, _ = single_row.product(x, weight, activation=activation)
    assert_close(
        "single_row.product, gated", out, reference.gated_activation(x.double() @ weight.double().T, activation), dtype
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_too_long_for_registers_are_processed_in_pieces(dtype, device):
    columns = single_row.WHOLE + 600
    x, weight = (
        random_tensor(1, columns, dtype=dtype, device=device),
        random_tensor(11, columns, dtype=dtype, device=device),
    )
    out, _ = single_row.product(x, weight)
    assert_close("single_row.product, long rows", out, x.double() @ weight.double().T, dtype)
    with pytest.raises(ValueError, match="are longer than 4096"):
        single_row.product(x, weight, norm=torch.ones(columns, device=device))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_biases_a_norm_before_the_sum_and_a_soft_cap_are_fused_into_the_product(activation, dtype, device):
    x, residual = (random_tensor(1, 48, dtype=dtype, device=device, scale=3.0) for _ in range(2))
    rows = 42 if activation else 21
    weight, bias = random_tensor(rows, 48, dtype=dtype, device=device), random_tensor(rows, dtype=dtype, device=device)
    norm, post_norm = (0.2 + torch.rand(48, device=device) for _ in range(2))
    out, total = single_row.product(
        x, weight, bias=bias, norm=norm, eps=1e-2, residual=residual, post_norm=post_norm, activation=activation,
        soft_cap=1.5,
    )  # fmt: skip
    normed, summed = reference.add_rms_norm(reference.rms_norm(x, post_norm, 1e-2), residual, norm, 1e-2)
    wanted = normed.double() @ weight.double().T + bias.double()
    if activation:
        wanted = reference.gated_activation(wanted, activation)
    assert_close("single_row.product, more parts", out, 1.5 * torch.tanh(wanted / 1.5), dtype)
    assert_close("single_row.product, more parts", total, summed, dtype)


PLAIN = AttentionOptions(0.2)
# Windows that end within a tile, at its end, and with the row's first key; a soft cap of the scores' size.
OTHERS = [
    (heads, kv_heads, dim, length, dtype, AttentionOptions(0.2, window, cap), 1e-2)
    for heads, kv_heads, dim in SHAPES[: None if COMPILED else 2]
    for length, window, cap in [(1, 7, 2.0), (129, 100, None), (300, 128, 2.0), (512, 512, None), (300, None, 2.0)]
    for dtype in DTYPES
    if COMPILED or dtype == DTYPES[0] or (dim, length) in ((64, 1), (64, 300))
]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "length", "dtype", "options", "eps"),
    [*((*each, PLAIN, None) for each in ATTENTION), *OTHERS[1::3], *only_in_proofs(*OTHERS[::3], *OTHERS[2::3])],
)
def test_attention_of_one_row_and_the_key_and_value_it_writes(
    heads, kv_heads, dim, length, dtype, options, eps, device
):
    """eps: of the norms of queries and keys; None: there are none."""
    block_size, blocks = 16, -(-length // 16) + 8
    qkv = random_tensor(1, (heads + 2 * kv_heads) * dim, dtype=dtype, device=device)
    rotary = rotations(length, dim, device).to(dtype)
    k_cache, v_cache = (random_tensor(blocks, block_size, kv_heads, dim, dtype=dtype, device=device) for _ in "kv")
    table = torch.randperm(blocks, device=device)[None, :-3].int()
    lengths = torch.tensor([length], dtype=torch.int32, device=device)

    q, k, v = qkv.view(1, -1, dim).split((heads, kv_heads, kv_heads), 1)
    norms = {}
    if eps is not None:
        q_norm, k_norm = (0.2 + torch.rand(dim, device=device) for _ in range(2))
        q, k = reference.rms_norm(q, q_norm, eps), reference.rms_norm(k, k_norm, eps)
        norms = {"q_norm": q_norm, "k_norm": k_norm, "eps": eps}
    q, k = reference.rotary_embedding(q, k, rotary[-1:])
    slot = table[0, (length - 1) // block_size].long() * block_size + (length - 1) % block_size
    wanted_cache = LayerCache(k_cache.clone(), v_cache.clone())
    reference.write_kv(k, v, wanted_cache, slot[None])
    wanted = reference.decode_attention(
        q[:, None].double(), double(wanted_cache), Rows.decoding(table, lengths), options
    )[:, 0]
    # The content after the row's length and in the new token's slot must not matter.
    for cache in (k_cache, v_cache):
        cache.view(-1, kv_heads, dim)[slot] = float("nan")
        cache[table[0, (length + block_size - 1) // block_size :].long()] = float("nan")
        if options.window:
            cache[table[0, : max(length - options.window, 0) // block_size].long()] = float("nan")

    attend = single_row.RowAttention(heads, kv_heads, dim, torch.device(device))
    for _ in range(2):  # the second run uses the workspace as the first left it
        out = attend(qkv, rotary, LayerCache(k_cache, v_cache), table, lengths, options, **norms)
        # rotated queries are rounded too
        assert_close("single_row.RowAttention", out.view(1, heads, dim), wanted, dtype, times=2)
    key, wanted_key = (cache.view(-1, kv_heads, dim)[slot] for cache in (k_cache, wanted_cache.k))
    assert_close("single_row.RowAttention, key", key, wanted_key, dtype)
    assert torch.equal(v_cache.view(-1, kv_heads, dim)[slot], wanted_cache.v.view(-1, kv_heads, dim)[slot])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "options"), [
    (2560, 2048, {"norm": True, "residual": True}), (2048, 2048, {}), (32768, 2048, {"norm": True, "activation": True}),
    (2048, 16384, {}), (40000, 2048, {"norm": True, "residual": True}), (1001, 4096, {"norm": True}), (77, 5000, {}),
])  # fmt: skip
@pytest.mark.gpu  # interpreted, products of this size take minutes: smaller ones run above
def test_products_of_gemma_2bs_size(rows, columns, options, dtype, device):
    x, residual = (random_tensor(1, columns, dtype=dtype, device=device) for _ in range(2))
    weight, norm = random_tensor(rows, columns, dtype=dtype, device=device, scale=columns**-0.5), torch.rand(columns)
    given = {"norm": norm.to(device), "eps": 1e-6} if options.get("norm") else {}
    summed = x
    if options.get("residual"):
        given["residual"], summed = residual, x + residual
    if given.get("norm") is not None:
        summed = reference.rms_norm(summed, given["norm"], 1e-6)
    wanted = summed.double() @ weight.double().T
    if options.get("activation"):
        given["activation"] = "gelu_tanh"
        wanted = reference.gated_activation(wanted, "gelu_tanh")
    out, _ = single_row.product(x, weight, **given)
    assert_close("single_row.product, Gemma 2B's sizes", out, wanted, dtype)


def test_before_gdc_wait_a_kernel_writes_nothing_and_reads_only_data_two_kernels_old():
    """Programmatic dependent launch: until `gdc_wait`, the previous kernel may still be running.

    A kernel lets the next one start only after its own wait, so data written two kernels ago is visible: weights,
    earlier keys, the residual sum of the kernel before the previous one, and the block table, length and angles that
    the step's first kernels looked up.
    """
    parts = ("weight", "bias", "scale", "zero", "up_scale", "up_zero", "norm", "post_norm")
    adapters = {"slots_ptr", "a_ptr", "b_ptr", "down_ptr", "up_ptr"} | {"tiles_ptr"}  # see `just_grouped`
    weights = {f"{part}_ptr" for part in parts} | adapters
    old_enough = weights | {
        "k_ptr",
        "v_ptr",
        "k_scale_ptr",
        "v_scale_ptr",
        "residual_ptr",
        "table_ptr",
        "length_ptr",
        "cos_sin_ptr",
        "cache_slots_ptr",
    }
    folder = Path(single_row.__file__).parent
    files = [folder / name for name in (*DEPENDENT, "single_row_parts.py")]
    body = [node for file in files for node in ast.parse(file.read_text(encoding="utf-8")).body]
    kernels = [node for node in body if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")]
    kernels = [kernel for kernel in kernels if "DEPENDENT" in {each.arg for each in kernel.args.args}]
    assert len(kernels) == 20
    for kernel in kernels:
        waits = [i for i, line in enumerate(kernel.body) if ast.unparse(line).startswith("wait_for_inputs(")]
        assert len(waits) == 1, (
            f"{kernel.name} must wait exactly once, outside any branch, so that early returns wait too"
        )
        before = ast.Module(kernel.body[: waits[0]], [])
        names = {node.id for node in ast.walk(before) if isinstance(node, ast.Name) and node.id.endswith("_ptr")}
        assert names <= old_enough, f"{kernel.name} touches {names - old_enough} too early"
        calls = {ast.unparse(node.func) for node in ast.walk(before) if isinstance(node, ast.Call)}
        assert not any("store" in call or "atomic" in call for call in calls)
        assert not any(isinstance(node, ast.Return) for node in ast.walk(before))
    wait = next(node for node in body if getattr(node, "name", "") == "wait_for_inputs")
    assert ast.unparse(wait).index("gdc_wait()") < ast.unparse(wait).index("gdc_launch_dependents()")


def test_only_these_kernels_are_dependent_launches():
    """So the first kernel of a replayed graph, `prepare`, starts only after the previous replay has finished."""
    others = "single_row_parts.py", "peers.py"  # whose kernel waits in one of two branches, which are compiled apart
    for path in Path(single_row.__file__).parent.glob("*.py"):
        dependent = "dependent_launch(" in path.read_text(encoding="utf-8")
        assert dependent == (path.name in (*DEPENDENT, *others)), path.name
    source = ast.parse((Path(single_row.__file__).parent / "decode_step.py").read_text(encoding="utf-8"))
    prepare = next(node for node in source.body if getattr(node, "name", "") == "prepare")
    assert "dependent" not in ast.unparse(prepare)
