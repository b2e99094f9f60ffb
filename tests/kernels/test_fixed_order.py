"""`kernels/fixed_order.py`: right, and a row's bits do not depend on what else a launch computes."""

from itertools import product

import pytest
import torch

from minillm.kernels import fixed_order, rope_cache
from minillm.kernels.paged_attention import AttentionConfig
from minillm.kv_cache import LayerCache
from minillm.kv_cache.layer_cache import quantize
from minillm.ops import Rows, exact_triton, reference
from minillm.ops.signatures import AttentionOptions
from tests.kernels.compare import COMPILED, DTYPES, assert_close, paged_cache, random_tensor
from tests.kernels.fixed_products import products_in_order  # noqa: F401
from tests.proofs import only_in_proofs

pytestmark = pytest.mark.usefixtures("products_in_order")

COUNTS = [1, 2, 3, 8, 63, 65, *([64, 128, 256, 1000, 4097] if COMPILED else [])]
SHAPES = [(70, 100), *only_in_proofs((64, 1000), (256, 64)), *([(2048, 16384), (32768, 2048)] if COMPILED else [])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out, inputs", SHAPES)
@pytest.mark.parametrize("splits", [1, 4])
def test_a_row_of_a_product_has_the_same_bits_among_any_number(out, inputs, dtype, splits, device, monkeypatch):
    sized = fixed_order.product_config(out, inputs, dtype.itemsize)
    config = fixed_order.FixedOrderConfig(min(sized.inputs, 32), splits)
    monkeypatch.setattr(fixed_order, "product_config", lambda *_: config)
    matrix, bias = (random_tensor(*shape, dtype=dtype, device=device) for shape in ((out, inputs), (out,)))
    x = random_tensor(max(COUNTS), inputs, dtype=dtype, device=device)
    alone = fixed_order.product(x[:1], matrix, bias)
    wanted = x[:1].double() @ matrix.double().t() + bias.double()
    assert_close("fixed_product", alone, wanted, dtype)
    for count in COUNTS:
        many = torch.cat([x[1:count], x[:1]])  # the row is the last one
        assert torch.equal(fixed_order.product(many, matrix, bias)[-1], alone[0]), count


def test_a_product_is_divided_by_the_shape_of_its_matrix_alone():
    assert fixed_order.product_config(32768, 2048, 2) == (64, 1)
    assert fixed_order.product_config(2048, 16384, 2) == (64, 4)
    assert fixed_order.product_config(512, 4096, 2) == (64, 8)
    assert fixed_order.product_config(64, 64, 4) == (32, 1)


def test_a_product_of_other_dtypes_is_refused(device):
    x = torch.zeros(2, 16, dtype=torch.float64, device=device)
    with pytest.raises(ValueError, match="two equal dtypes of 16 or 32 bits, not torch.float64 and torch.float64"):
        fixed_order.product(x, x)


OPTIONS = {"plain": {}, "window": {"window": 9}, "soft cap": {"soft_cap": 3.0}}
HELD = {"unquantized": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
SHORT = [(torch.float32, "window", "unquantized")]
OTHERS = [each for each in product(DTYPES, OPTIONS, HELD) if each not in SHORT]


@pytest.mark.parametrize("dtype, given, held", [*SHORT, *only_in_proofs(*OTHERS)])
@pytest.mark.parametrize("times", [1, *([60] if COMPILED else [])])
def test_a_query_has_the_same_bits_in_decode_and_prefill_among_any_rows(dtype, given, held, times, device, monkeypatch):
    """With segments of 32 keys in tiles of 16; on a GPU, in rows of 60 times as many keys, those of an engine too."""
    if times == 1:
        monkeypatch.setattr(fixed_order, "SEGMENT", 32)
        monkeypatch.setattr(fixed_order, "attention_config", lambda *_: AttentionConfig(16, 16, 4, 1))
    options = AttentionOptions(0.3, **OPTIONS[given])
    lengths = [70 * times, 33 * times, 5 * times, times]
    cache, table, known = paged_cache(lengths, 2, 16, 8, dtype, device)
    if HELD[held] is not None:
        cache = quantized(cache, HELD[held])
    heads = 6
    queries = [random_tensor(length, heads, 16, dtype=dtype, device=device) for length in lengths]

    def attended(parts):
        """The last `count` queries up to `end` of some rows, as one launch."""
        rows = [row for row, _, _ in parts]
        counts = [count for _, count, _ in parts]
        start = torch.tensor([0, *counts], device=device).cumsum(0).int()
        ends = torch.tensor([end for *_, end in parts], dtype=torch.int32, device=device)
        q = torch.cat([queries[row][end - count : end] for row, count, end in parts])
        given = Rows(table[rows], ends, start, max(counts))
        return fixed_order.attention(q, cache, given, options).split(counts), (q, given)

    (whole, *others), (q, given_rows) = attended([(row, length, length) for row, length in enumerate(lengths)])
    wanted = reference.prefill_attention(q, cache, given_rows, options)
    assert_close("fixed_attention", torch.cat([whole, *others]), wanted.double(), dtype)
    expected = [whole, *others]
    for parts in (
        [(0, 1, 70)],
        [(0, 1, 40)],
        [(0, 1, 32)],
        [(1, 1, 33), (0, 1, 70), (3, 1, 1)],
        [(0, 6, 70), (1, 6, 30)],
        [(2, 3, 5), (0, 37, 67)],
    ):
        some = [(row, count if count == 1 else count * times, end * times) for row, count, end in parts]
        for (row, count, end), found in zip(some, attended(some)[0], strict=True):
            assert torch.equal(found, expected[row][end - count : end]), (some, row)
    sizes, attend = [], fixed_order._attend_part
    monkeypatch.setattr(fixed_order, "PART_BYTES", 7 * times * heads * (-(-table.shape[1] * 8 // 32)) * 16 * 4)
    monkeypatch.setattr(fixed_order, "_attend_part", lambda q, *rest: (sizes.append(len(q)), attend(q, *rest)))
    slices = [(2, 3, 5), (0, 10, 70), (3, 1, 1)]
    for (row, count, end), found in zip(slices, attended(slices)[0], strict=True):
        assert torch.equal(found, expected[row][end - count : end]), ("in slices of queries", row)
    assert times > 1 or sizes == [7, 7]
    narrow = Rows.decoding(table[:1, :4], torch.tensor([30], dtype=torch.int32, device=device))
    assert torch.equal(fixed_order.attention(queries[0][29:30], cache, narrow, options), whole[29:30]), "one segment"


def quantized(cache, dtype):
    parts = []
    for values in (cache.k, cache.v):
        codes, scales = quantize(values.flatten(0, 1).nan_to_num(0.5), dtype)
        parts.append((codes.view(values.shape), scales.view(values.shape[:3])))
    (k, k_scale), (v, v_scale) = parts
    return LayerCache(k, v, k_scale, v_scale)


def test_one_kernel_writes_keys_whatever_else_a_step_has(device, monkeypatch):
    kept = []
    monkeypatch.setattr(rope_cache, "rotary_write", lambda *arguments: kept.append(arguments[7]))
    for keep in (True, False):
        exact_triton.rotary_write(torch.zeros(1, 2, 16), *[None] * 6, keep)
    assert kept == [False, False]


def test_padding_rows_give_zeros(device):
    cache, table, _ = paged_cache([9, 4], 1, 16, 4, torch.float32, device)
    rows = Rows.decoding(table, torch.tensor([9, 0], dtype=torch.int32, device=device))
    q = random_tensor(2, 2, 16, dtype=torch.float32, device=device)
    found = fixed_order.attention(q, cache, rows, AttentionOptions(0.3))
    assert (found[1] == 0).all() and (found[0] != 0).all()


def test_keys_that_attention_would_rotate_are_refused(device):
    cache, table, known = paged_cache([4], 1, 16, 4, torch.float32, device)
    options = AttentionOptions(0.3, rotary=torch.zeros(8, 2, 16, device=device))
    with pytest.raises(ValueError, match="no kernel for keys that are cached before their rotation"):
        fixed_order.attention(torch.zeros(1, 2, 16, device=device), cache, Rows.decoding(table, known), options)
