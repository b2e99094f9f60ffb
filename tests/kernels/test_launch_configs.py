"""A tuned launch configuration is used and changes no result; otherwise the kernel's default rule applies."""

import threading

import pytest
import torch

from minillm.kv_cache import LayerCache
from minillm.ops import AttentionOptions, Rows, reference

launch_configs = pytest.importorskip("minillm.kernels.launch_configs")
paged_attention = pytest.importorskip("minillm.kernels.paged_attention", reason="triton is not installed here")
from minillm.kernels import single_row  # noqa: E402  needs triton


class Spy:
    """A kernel that records its grid and compile-time arguments and then runs."""

    def __init__(self, module, name, monkeypatch):
        self.kernel, self.seen = getattr(module, name), []
        monkeypatch.setattr(module, name, self)

    def __getitem__(self, grid):
        def run(*args, **options):
            self.seen.append({"grid": grid, **options})
            return self.kernel[grid](*args, **options)

        return run


def decode_inputs(device):
    torch.manual_seed(0)
    cache = LayerCache(*(torch.randn(12, 16, 1, 32, device=device) for _ in "kv"))
    table = torch.randperm(12, device=device).int().view(2, 6)
    return torch.randn(2, 1, 4, 32, device=device), cache, table, torch.tensor([90, 33], device=device).int()


def decode(q, cache, table, lengths, module=paged_attention):
    return module.decode_attention(q, cache, Rows.decoding(table, lengths), AttentionOptions(0.2))


def test_decode_attention_looks_up_its_problem_and_uses_the_tuned_launch(device, monkeypatch):
    inputs = decode_inputs(device)
    with launch_configs.listening() as asked:
        decode(*inputs)
    (problem, default), *others = asked.items()
    assert not others and problem.kernel == "decode_attention"
    assert dict(problem.sizes) == {"dim": 32, "dtype": "float32", "rows": 16, "programs": 2, "longest": 96}
    measured = default._replace(keys=32, splits=2)
    assert (default.keys, default.splits) != (32, 2)
    spy = Spy(paged_attention, "decode_kernel", monkeypatch)
    with launch_configs.using({problem: measured._asdict()}):
        found = decode(*inputs)
    assert spy.seen[0]["grid"] == (2, 1, 2)
    assert (spy.seen[0]["KEYS"], spy.seen[0]["SPLITS"]) == (32, 2)
    torch.testing.assert_close(found, decode(*inputs, reference), rtol=1e-4, atol=1e-5)


def test_prefill_attention_uses_the_tuned_launch(device, monkeypatch):
    q, cache, table, _ = decode_inputs(device)
    q = torch.randn(40, 4, 32, device=device)
    lengths, starts = torch.tensor([30, 25], device=device).int(), torch.tensor([0, 30, 40], device=device).int()
    with launch_configs.listening() as asked:
        paged_attention.prefill_attention(q, cache, Rows(table, lengths, starts, 30), AttentionOptions(0.2))
    (problem, default), *_ = asked.items()
    spy = Spy(paged_attention, "prefill_kernel", monkeypatch)
    with launch_configs.using({problem: default._replace(rows=64, keys=16)._asdict()}):
        found = paged_attention.prefill_attention(q, cache, Rows(table, lengths, starts, 30), AttentionOptions(0.2))
    assert (spy.seen[0]["ROWS"], spy.seen[0]["KEYS"]) == (64, 16)
    wanted = reference.prefill_attention(q, cache, Rows(table, lengths, starts, 30), AttentionOptions(0.2))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("columns", "kernel", "measured", "launched"),
    [
        (96, "whole_rows", {"programs": 3, "tile": 4}, {"grid": (3,), "TILE": 4}),
        (single_row.WHOLE + 8, "long_rows", {"tile": 4, "width": 2048}, {"grid": (10,), "TILE": 4, "WIDTH": 2048}),
    ],
)
def test_a_single_row_product_uses_the_tuned_launch(columns, kernel, measured, launched, device, monkeypatch):
    x, weight = torch.randn(1, columns, device=device), torch.randn(37, columns, device=device)
    with launch_configs.listening() as asked:
        single_row.product(x, weight)
    (problem, default), *_ = asked.items()
    assert problem.kernel == kernel
    spy = Spy(single_row, f"{kernel}_kernel", monkeypatch)
    with launch_configs.using({problem: default._replace(**measured)._asdict()}):
        found, _ = single_row.product(x, weight)
    assert launched.items() <= spy.seen[0].items()
    torch.testing.assert_close(found, x @ weight.T, rtol=1e-4, atol=1e-3)


def test_a_launch_table_applies_only_to_its_block_thread_and_problem():
    default = single_row.LongRowsConfig(8, 1024, 8)
    table = {launch_configs.problem("long_rows", rows=1): {"tile": 4, "width": 512, "warps": 2}}
    with launch_configs.using(table):
        assert launch_configs.tuned("long_rows", default, rows=1) == single_row.LongRowsConfig(4, 512, 2)
        assert launch_configs.tuned("long_rows", default, rows=2) is default
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(launch_configs.tuned("long_rows", default, rows=1)))
        thread.start()
        thread.join()
        assert elsewhere == [default]
        with launch_configs.using({}):
            assert launch_configs.tuned("long_rows", default, rows=1) is default
    assert launch_configs.tuned("long_rows", default, rows=1) is default


def test_every_tunable_kernel_is_registered_with_its_launch_type(device):
    kinds = launch_configs.registered()
    assert kinds.keys() == {"decode_attention", "prefill_attention", "gathered_attention", "whole_rows", "long_rows"}
    with launch_configs.listening() as asked:
        decode(*decode_inputs(device))
    assert all(type(default) is kinds[problem.kernel] for problem, default in asked.items())


def test_different_dtypes_of_equal_size_are_different_problems():
    names = {
        launch_configs.dtype_name(dtype) for dtype in (torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16)
    }
    assert len({launch_configs.problem("any", dtype=name) for name in names}) == 4


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fit_into_a_t4s_memory(dim, itemsize):
    """64 KiB, by what a program holds."""
    t4 = paged_attention.Device(64 << 10, 40, 4 << 20)
    for quantized in (False, True):
        found = paged_attention.prefill_config(dim, itemsize, quantized, t4)
        assert paged_attention.gathered_config(dim, itemsize, 1, t4) == found
        assert itemsize * dim * (found.rows + 2 * found.stages * found.keys) <= t4.shared_memory
        assert min(found.rows, found.keys) >= 16
    for longest in (64, 4096):
        found = paged_attention.decode_config(dim, itemsize, itemsize, 16, longest, 8, 1, t4)
        assert itemsize * dim * 2 * (found.rows + found.keys) <= t4.shared_memory and found.keys >= 16
    if itemsize == 2:
        assert (
            paged_attention.prefill_config(dim, 2, False, t4)[:2] == {64: (128, 64), 128: (64, 32), 256: (32, 16)}[dim]
        )
    ampere = paged_attention.Device(99 << 10, 40)
    assert paged_attention.prefill_config(256, 2, False, ampere)[:2] == (64, 32)
