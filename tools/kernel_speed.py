"""Measure every kernel at Gemma 2B's shapes and compare it with its plain-torch reference; needs a GPU.

    python tools/kernel_speed.py --record kernels    save the table as a record
    python tools/kernel_speed.py --sweep             compare launch configurations of attention

A time is the median over replays of a CUDA graph that contains many calls, so launch overhead is not counted. Calls
rotate over up to 16 sets of inputs, so nothing is left in the L2 cache if a call moves more than about 4 MB; below that
the L2 cache helps, as it does in the engine. A reference that cannot be captured is timed with events.
Bytes are the minimum that the operation has to move. The relative error compares the whole result with float64.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).parents[1]))

from minillm.bench import records  # noqa: E402
from minillm.kernels import paged_attention  # noqa: E402
from minillm.kv_cache import LayerCache  # noqa: E402
from minillm.ops import AttentionOptions, Rows, reference  # noqa: E402
from minillm.ops import triton as kernels  # noqa: E402

HIDDEN, HEADS, KV_HEADS, DIM, FFN, VOCAB, BLOCK = 2048, 8, 1, 256, 16384, 256000, 16  # Gemma 2B
OPTIONS, DTYPE = AttentionOptions(DIM**-0.5), torch.bfloat16
KEYS = {1: (384, 384), 64: (1024, 1536), 512: (200, 2000), 3000: (128, 256)}  # decode rows: fewest and most keys
PREFILL = {"1 x 128": [128], "4 x 2048": [2048] * 4, "16 x 100..1024": list(range(100, 1060, 60))}
COLD = 256 * 2**20  # bytes of distinct inputs before any is repeated: several times the size of the L2 cache


def graph_runs(calls, replays=20) -> list[float]:
    """Milliseconds per call in each replay of a graph of all calls."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / len(calls))
    return times


def calls_over(function, make_inputs, nbytes):
    """Calls of `function` on enough distinct inputs to leave nothing in the L2 cache."""
    sets = [make_inputs() for _ in range(max(1, min(16, COLD // max(nbytes, 1) + 1)))]
    bound = [lambda inputs=inputs: function(*inputs) for inputs in sets]
    return [call for _, call in zip(range(max(16, len(bound))), itertools.cycle(bound), strict=False)]


def write_table(description: str, rows: Iterator[dict]) -> None:
    """The command line of a tool that measures one row after another: prints each, and writes all with --record.

    The record is written after each row, so a run that is cut short keeps what it has.
    """
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--record", help="write the table to this file, or to the committed record of this name")
    arguments = options.parse_args()
    torch.manual_seed(0)
    begun = records.begin(arguments.record)
    results = []
    for row in rows:
        results.append(row)
        print({key: value for key, value in row.items() if key != "runs"}, flush=True)
        if arguments.record:
            records.write(records.record(results, begun), arguments.record)


def relative_error(got, wanted) -> float:
    if not isinstance(got, tuple):
        got, wanted = (got,), (wanted,)
    return max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(got, wanted, strict=True))


def measured(name, rows, shape, make_inputs, nbytes, kernel=None, plain=None, operations=0) -> dict:
    kernel, plain = kernel or getattr(kernels, name), plain or getattr(reference, name)
    inputs = make_inputs()
    result = {"kernel": name, "rows": rows, "shape": shape, "dtype": "bfloat16"}
    if name == "sample":
        result["different_ids"] = (kernel(*inputs) != plain(*inputs)).sum().item()
    elif name != "write_kv":
        result["relative_error"] = relative_error(kernel(*inputs), plain(*map(doubled, inputs)))
    runs = graph_runs(calls_over(kernel, make_inputs, nbytes))
    ms = statistics.median(runs)
    result |= {"ms": ms, "gb_per_s": nbytes / ms / 1e6}
    if operations:
        result["tflops"] = operations / ms / 1e9
    try:
        result["reference_ms"] = statistics.median(graph_runs(calls_over(plain, make_inputs, nbytes), 5))
    except RuntimeError:  # it synchronizes with the device, which a graph cannot record
        torch.cuda.synchronize()
        result["reference_ms"] = do_bench(lambda: plain(*inputs), warmup=5, rep=20, return_mode="median")
    print(json.dumps(result), flush=True)
    return result | {"runs": runs}


def doubled(x):
    if isinstance(x, LayerCache):
        return LayerCache(x.k.double(), x.v.double())
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def random_tensor(*shape, dtype=DTYPE):
    return torch.randn(*shape, device="cuda").to(dtype)


def rotations(rows):
    """[rows, 2, d]: cosines and signed sines, as in the model's table."""
    angle = torch.rand(rows, DIM // 2, device="cuda") * 100
    return torch.stack([angle.cos().repeat(1, 2), torch.cat([-angle.sin(), angle.sin()], -1)], 1)


def paged_rows(lengths, queries=1):
    """A cache with this many keys per row, in shuffled blocks, and its rows, each with `queries` queries or a list."""
    blocks = [-(-length // BLOCK) for length in lengths]
    order = torch.randperm(sum(blocks), dtype=torch.int32)
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    for row, (count, end) in enumerate(zip(blocks, itertools.accumulate(blocks), strict=True)):
        table[row, :count] = order[end - count : end]
    cache = LayerCache(*(random_tensor(sum(blocks), BLOCK, KV_HEADS, DIM) for _ in "kv"))
    queries = [queries] * len(lengths) if isinstance(queries, int) else queries
    ints = {"dtype": torch.int32, "device": "cuda"}
    starts = torch.tensor([0, *itertools.accumulate(queries)], **ints)
    return cache, Rows(table.cuda(), torch.tensor(lengths, **ints), starts, max(queries))


def decode_inputs(rows):
    low, high = KEYS[rows]
    lengths = torch.randint(low, high + 1, (rows,), generator=torch.Generator().manual_seed(0)).tolist()
    nbytes = 2 * sum(lengths) * KV_HEADS * DIM * 2 + 2 * rows * HEADS * DIM * 2
    return lambda: (random_tensor(rows, 1, HEADS, DIM), *paged_rows(lengths)), nbytes


def attend(operation):
    return lambda q, cache, rows: operation(q, cache, rows, OPTIONS)


def prefill_inputs(lengths):
    nbytes = sum(lengths) * (2 * KV_HEADS + 2 * HEADS) * DIM * 2
    operations = sum(4 * DIM * HEADS * n * (n + 1) // 2 for n in lengths)
    return lambda: (random_tensor(sum(lengths), HEADS, DIM), *paged_rows(lengths, lengths)), nbytes, operations


def torchs_own_attention(lengths) -> float:
    """torch's fused attention on rows of equal length with contiguous keys, as a baseline for the paged kernel."""
    rows, n = len(lengths), lengths[0]
    q, k, v = (random_tensor(rows, heads, n, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    k, v = (x.expand(-1, HEADS, -1, -1) for x in (k, v))
    call = [lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=OPTIONS.scale)] * 8
    return statistics.median(graph_runs(call))


def results_at(rows):
    x, weight = rows * HIDDEN * 2, torch.randn(HIDDEN, device="cuda")
    yield measured("rms_norm", rows, f"[{rows}, {HIDDEN}]", lambda: (random_tensor(rows, HIDDEN), weight, 1e-6), 2 * x)
    yield measured(
        "add_rms_norm", rows, f"[{rows}, {HIDDEN}]",
        lambda: (random_tensor(rows, HIDDEN), random_tensor(rows, HIDDEN), weight, 1e-6), 4 * x,
    )  # fmt: skip
    yield measured(
        "gated_activation", rows, f"[{rows}, {2 * FFN}]",
        lambda: (random_tensor(rows, 2 * FFN), "gelu_tanh"), 3 * rows * FFN * 2,
    )  # fmt: skip
    qkv = (HEADS, KV_HEADS, KV_HEADS)
    yield measured(
        "rotary_embedding", rows, f"[{rows}, {HEADS} + {KV_HEADS}, {DIM}]",
        lambda: (*random_tensor(rows, sum(qkv), DIM).split(qkv, 1)[:2], rotations(rows)),
        2 * rows * (HEADS + KV_HEADS) * DIM * 2 + rows * DIM * 4,
    )  # fmt: skip
    cache = LayerCache(*(random_tensor(rows // BLOCK + 1, BLOCK, KV_HEADS, DIM) for _ in "kv"))
    slots = torch.randperm(rows, device="cuda")
    yield measured(
        "write_kv", rows, f"[{rows}, {KV_HEADS}, {DIM}]",
        lambda: (*random_tensor(rows, sum(qkv), DIM).split(qkv, 1)[1:], cache, slots),
        4 * rows * KV_HEADS * DIM * 2,
    )  # fmt: skip
    make, nbytes = decode_inputs(rows)
    shape = "[{}, 1, {}, {}] over {}..{} keys".format(rows, HEADS, DIM, *KEYS[rows])
    both = (attend(module.decode_attention) for module in (kernels, reference))
    yield measured("decode_attention", rows, shape, make, nbytes, *both)
    yield measured(
        "sample", rows, f"[{rows}, {VOCAB}]",
        lambda: (random_tensor(rows, VOCAB), torch.ones(rows, device="cuda"), torch.rand(rows, device="cuda")),
        rows * VOCAB * 2,
    )  # fmt: skip


def results():
    for rows in KEYS:
        yield from results_at(rows)
        torch.cuda.empty_cache()
    for name, lengths in PREFILL.items():
        make, nbytes, operations = prefill_inputs(lengths)
        both = (attend(module.prefill_attention) for module in (kernels, reference))
        result = measured("prefill_attention", sum(lengths), name, make, nbytes, *both, operations)
        if len(set(lengths)) == 1:
            result["torch_sdpa_ms"] = torchs_own_attention(lengths)
        yield result


def sweep():
    """Decode by (keys, warps, stages) and splits, prefill by (rows, keys, warps, stages); microseconds.

    Prefill reads keys where they are in the cache; "gathered" gathers them first, which is part of the time.
    """
    config = paged_attention.AttentionConfig
    choose_config, choose_splits = paged_attention.decode_config, paged_attention.decode_splits
    calls = {rows: calls_over(attend(kernels.decode_attention), *decode_inputs(rows)) for rows in KEYS}
    for keys, warps, stages in [
        (16, 2, 4), (16, 4, 4), (32, 2, 3), (32, 4, 2), (32, 4, 3), (32, 4, 4), (32, 8, 3), (64, 4, 2), (64, 4, 3),
        (64, 4, 4), (64, 8, 2), (64, 8, 3), (128, 4, 2), (128, 8, 2), (128, 8, 3),
    ]:  # fmt: skip
        # The last two arguments are the splits and the device.
        paged_attention.decode_config = lambda *given, each=(keys, warps, stages): config(16, *each, given[-2])
        swept("decode", (keys, warps, stages), calls)
    paged_attention.decode_config = choose_config
    for splits in (1, 2, 4, 8, 16):
        paged_attention.decode_splits = always(splits)
        swept("decode splits", splits, calls)
    paged_attention.decode_splits = choose_splits
    calls = {}
    for name, lengths in PREFILL.items():
        make, nbytes, _ = prefill_inputs(lengths)
        calls[name] = calls_over(attend(kernels.prefill_attention), make, nbytes)
    configs = [
        (32, 64, 4, 2), (64, 32, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 8, 2), (128, 32, 8, 2),
        (128, 32, 8, 3), (128, 64, 8, 1), (128, 64, 8, 2), (128, 128, 8, 1),
    ]  # fmt: skip
    for name, gathers in (("prefill", False), ("gathered", True)):
        paged_attention.gathers = always(gathers)
        for chosen in configs:
            paged_attention.prefill_config = paged_attention.gathered_config = always(config(*chosen))
            swept(name, chosen, calls)


def always(choice):
    return lambda *_: choice


def swept(what, chosen, calls):
    try:
        times = {name: round(1e3 * statistics.median(graph_runs(each, 5)), 1) for name, each in calls.items()}
    except Exception as error:  # a configuration that does not fit this GPU is also a result
        times = type(error).__name__
    print(what, chosen, times, flush=True)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--record", help="write the table to this file, or to the committed record of this name")
    options.add_argument("--sweep", action="store_true")
    chosen = options.parse_args()
    torch.manual_seed(0)
    if chosen.sweep:
        sweep()
    else:
        begun = records.begin(chosen.record)
        content = records.record(list(results()), begun)
        if chosen.record:
            print(records.write(content, chosen.record))
