"""Measure kernel launch configurations: check each candidate against float64, then time it.  Lesson 11.

The problems are the ones that the engine's steps look up (`launch_configs.listening`), and the data are its own weights
and cache. Triton refuses a candidate that needs more shared memory or registers than this GPU has, and a candidate with
a wrong result is never timed. The search runs in rounds, each around the best configuration so far: compiling every
combination would take longer than it could ever save.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minillm.config import Traffic
from minillm.kernels import launch_configs, paged_attention, single_row
from minillm.kernels.launch_configs import Problem
from minillm.kv_cache.layer_cache import LayerCache
from minillm.model import Model
from minillm.model.decoder import Layer
from minillm.ops import Rows, reference
from minillm.runner.runner import Runner

MARGIN = 0.02  # a configuration must be this much faster than the kernel's default to replace it
COLD = 256 << 20  # bytes of data to read before repeating any, more than the L2 cache holds
MOST_CALLS = 64
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-2}  # relative error of a whole result

KernelConfig = Any  # each kernel has its own NamedTuple
Round = Callable[[KernelConfig], Iterable[KernelConfig]]  # the best so far -> those to try next


@dataclass
class Trial:
    """One problem, ready to run."""

    calls: Sequence[Callable[[], Tensor]]  # the same work on different inputs
    error: Callable[[Tensor], float]  # relative error of the first call's result against float64
    rounds: Sequence[Round]
    tolerance: float


@dataclass
class TuningResult:
    """The result of tuning one problem; times are seconds per call."""

    problem: Problem
    default: KernelConfig
    config: KernelConfig
    default_seconds: float = math.inf
    seconds: float = math.inf
    tried: int = 0
    refused: dict[KernelConfig, str] = field(default_factory=dict)  # configuration -> the reason


def tune(
    problem: Problem, default: KernelConfig, trial: Trial, seconds: Callable[[Sequence], float] | None = None
) -> TuningResult:
    """Find the fastest correct configuration. It replaces the default only if it is clearly faster in two timings."""
    result, seconds = TuningResult(problem, default, default), seconds or graph_seconds

    def timed(config: KernelConfig) -> float:
        with launch_configs.using({problem: config._asdict()}):
            why_not = _refusal(trial)
            if why_not:
                result.refused[config] = why_not
                return math.inf
            return seconds(trial.calls)

    times = {default: timed(default)}
    if default in result.refused:
        raise RuntimeError(f"{problem.kernel}'s default configuration {default} fails: {result.refused[default]}")
    for candidates in trial.rounds:
        for config in candidates(min(times, key=times.__getitem__)):
            if config not in times:
                times[config] = timed(config)
    best = min(times, key=times.__getitem__)
    result.tried, result.default_seconds = len(times), timed(default)
    result.seconds = result.default_seconds if best == default else timed(best)
    if max(result.seconds, times[best]) < (1 - MARGIN) * min(result.default_seconds, times[default]):
        result.config = best
    else:
        result.seconds = result.default_seconds
    return result


def _refusal(trial: Trial) -> str | None:
    """Return why the current configuration must not be used, or None."""
    from triton.errors import TritonError

    try:
        result = trial.calls[0]()
    except TritonError as refusal:
        return str(refusal)
    error = trial.error(result)
    result.fill_(math.nan)  # the next result reuses this memory, so elements it fails to write show up
    return None if error <= trial.tolerance else f"relative error {error:.1e}"


def _sizes(problem: Problem) -> tuple[dict[str, int], str]:
    """Return a problem's integer sizes by name, and its dtype's name."""
    sizes = {name: size for name, size in problem.sizes if isinstance(size, int)}
    return sizes, str(dict(problem.sizes)["dtype"])


def graph_seconds(calls: Sequence[Callable[[], Tensor]], replays: int = 7) -> float:
    """Return seconds per call: the median over replays of a CUDA graph with all calls, so launch overhead is not
    counted.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return statistics.median(replay_seconds(graph, replays)) / len(calls)


def replay_seconds(graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return [1e-3 * before.elapsed_time(after) for before, after in zip(marks, marks[1:], strict=False)]


def powers(middle: int, low: int, high: int, reach: int = 1) -> list[int]:
    """Return the powers of two up to `reach` doublings or halvings from `middle`, within low..high."""
    around = [middle << step for step in range(reach + 1)] + [middle >> step for step in range(1, reach + 1)]
    return sorted({each for each in around if low <= each <= high})


# ---- decode attention


def decode_trial(problem: Problem, runner: Runner, traffic: Traffic, width: int, tile: KernelConfig | None) -> Trial:
    """Return rows at random places in their outputs, on the engine's cache. tile: whose tile to use, or None."""
    (sizes, dtype), shape = _sizes(problem), runner.model.config
    rows, longest = sizes["programs"] // shape.num_kv_heads, width * runner.state.block_size
    layers = [
        (layer, cache)
        for layer, cache in zip(runner.model.layers, runner.caches, strict=True)
        if min(longest, layer.attention.window or longest) == sizes["longest"]
    ]
    ends = torch.randint(traffic.input_len + 1, traffic.context + 1, (rows,), device=runner.state.device)
    lengths = ends.clamp(max=longest).int()
    nbytes = int(lengths.clamp(max=sizes["longest"]).sum()) * runner.model.cache_spec.bytes_per_token
    count = _calls(nbytes, len(layers))
    inputs = [_decode_inputs(runner, *layers[i % len(layers)], rows, width) for i in range(count)]

    def error(result: Tensor) -> float:
        q, layer, cache, table = inputs[0]
        few = torch.tensor(sorted({0, rows // 3, rows // 2, rows - 1}), device=runner.state.device)
        held, compact = _gathered(cache, table[few])
        wanted = reference.decode_attention(
            q[few].double(), held, Rows.decoding(compact, lengths[few]), layer.attention
        )
        return relative_error(result[few], wanted)

    def tiles(best: KernelConfig) -> list[KernelConfig]:
        if tile is not None:
            return [best._replace(keys=tile.keys, warps=tile.warps, stages=tile.stages)]
        keys = best.keys
        choices = [
            (keys, 4, 3), (keys, 8, 2), (keys, 8, 3), (keys * 2, 8, 2), (keys // 2, 2, 2), (keys // 2, 4, 2),
            (keys // 2, 4, 3), (keys // 2, 4, 4),
        ]  # fmt: skip
        return [best._replace(keys=k, warps=w, stages=s) for k, w, s in choices if k >= 16]

    def splits(best: KernelConfig) -> list[KernelConfig]:
        return [best._replace(splits=each) for each in powers(best.splits, 1, max(sizes["longest"] // 16, 1), 2)]

    calls = [
        partial(paged_attention.decode_attention, q, cache, Rows.decoding(table, lengths), layer.attention)
        for q, layer, cache, table in inputs
    ]
    return Trial(calls, error, [tiles, splits], TOLERANCE[dtype])


def _decode_inputs(
    runner: Runner, layer: Layer, cache: LayerCache, rows: int, width: int
) -> tuple[Tensor, Layer, LayerCache, Tensor]:
    shape = runner.model.config
    q = torch.randn(rows, 1, shape.num_heads, shape.head_dim, device=runner.state.device).to(runner.model.dtype)
    return q, layer, cache, _random_table(runner, rows, width)


# ---- prefill attention

PREFILL = ("prefill_attention", "gathered_attention")  # of keys in blocks, and without gaps


def prefill_trial(problem: Problem, runner: Runner, traffic: Traffic, budget: int) -> Trial:
    """As many whole prompts as fit in a step, on the engine's cache."""
    (_, dtype), shape = _sizes(problem), runner.model.config
    tokens = min(traffic.input_len, budget)
    rows = max(1, min(budget // tokens, traffic.concurrency))
    starts = torch.arange(rows + 1, device=runner.state.device, dtype=torch.int32) * tokens
    lengths = torch.full((rows,), tokens, device=runner.state.device, dtype=torch.int32)
    pairs = list(zip(runner.model.layers, runner.caches, strict=True))[:4]
    queries = [
        torch.randn(rows * tokens, shape.num_heads, shape.head_dim, device=runner.state.device).to(runner.model.dtype)
        for _ in pairs
    ]
    table = _random_table(runner, rows, -(-tokens // runner.state.block_size))
    whole = Rows(table, lengths, starts, tokens)

    def error(result: Tensor) -> float:
        """Compare the first queries of the first row and the last queries of the last row."""
        few, (layer, cache) = min(tokens, 64), pairs[0]
        held, compact = _gathered(cache, table[[0, -1]])
        q = torch.cat([queries[0][:few], queries[0][-few:]]).double()
        seen, ends = torch.tensor([few, tokens]).to(table), torch.tensor([0, few, 2 * few])
        wanted = reference.prefill_attention(q, held, Rows(compact, seen, ends, few), layer.attention)
        return relative_error(torch.cat([result[:few], result[-few:]]), wanted)

    def tiles(best: KernelConfig) -> list[KernelConfig]:
        if dtype == "float32":
            choices = [(16, 16, 4, 1), (16, 32, 4, 1), (32, 16, 4, 1), (32, 32, 4, 1), (32, 32, 8, 1)]
        else:
            choices = [
                (64, 32, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 8, 2), (128, 32, 8, 2), (128, 64, 8, 1),
                (128, 64, 8, 2), (128, 64, 8, 3),
            ]  # fmt: skip
        return [best._replace(rows=r, keys=k, warps=w, stages=s) for r, k, w, s in choices]

    calls = [
        partial(paged_attention.prefill_attention, q, cache, whole, layer.attention)
        for q, (layer, cache) in zip(queries, pairs, strict=True)
    ]
    return Trial(calls, error, [tiles], TOLERANCE[dtype])


# ---- matrix products of a single row


def product_trial(problem: Problem, runner: Runner) -> Trial:
    """Return the model's own matrices of this shape, with the norm or activation that is fused with the product."""
    (sizes, dtype), model = _sizes(problem), runner.model
    eps, gated = model.config.rms_norm_eps, sizes.get("gated", 0)
    shape = (sizes["rows"] * (1 + gated), sizes["columns"])
    matrices = [(weight, options) for weight, options in _products(model) if tuple(weight.shape) == shape]
    x, residual = (torch.randn(1, shape[1], device=runner.state.device).to(model.dtype) for _ in "xr")
    some = torch.randperm(sizes["rows"], device=runner.state.device)[:512]

    def arguments(options: dict) -> dict:
        norm = {"eps": eps, "residual": residual} if "norm" in options else {}
        return options | norm

    def error(result: Tensor) -> float:
        weight, options = matrices[0]
        before = x
        if "norm" in options:
            before = reference.add_rms_norm(x, residual, options["norm"], eps)[0]
        chosen = torch.cat([some, some + sizes["rows"]]) if gated else some
        wanted = before.double() @ weight[chosen].double().T
        if gated:
            wanted = reference.gated_activation(wanted, options["activation"])
        return relative_error(result[:, some], wanted)

    calls = [
        lambda weight=weight, options=arguments(options): single_row.product(x, weight, **options)[0]
        for weight, options in matrices
    ]
    rounds = [_pieces] if problem.kernel == "long_rows" else [_tiles(sizes), _programs(sizes, runner.state.device)]
    return Trial(calls, error, rounds, TOLERANCE[dtype])


def _products(model: Model) -> Iterator[tuple[Tensor, dict]]:
    for layer in model.layers:
        yield layer.qkv.dequantize(), {"norm": layer.attention_norm}
        yield layer.attention_out.dequantize(), {}
        yield layer.gate_up.dequantize(), {"norm": layer.mlp_norm, "activation": model.config.activation}
        yield layer.down.dequantize(), {}
    yield model.head.dequantize(), {"norm": model.final_norm}


def _tiles(sizes: dict[str, int]) -> Round:
    def round_(best: KernelConfig) -> Iterator[KernelConfig]:
        for tile in powers(best.tile, 1, 16):
            for warps in powers(best.warps, 1, 8):
                yield best._replace(tile=tile, warps=warps, programs=min(best.programs, -(-sizes["rows"] // tile)))

    return round_


def _programs(sizes: dict[str, int], device: torch.device) -> Round:
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2

    def round_(best: KernelConfig) -> Iterator[KernelConfig]:
        for each in (2, 4, 6, 8, 12, 16):
            yield best._replace(programs=min(each * processors, -(-sizes["rows"] // best.tile)))

    return round_


def _pieces(best: KernelConfig) -> Iterator[KernelConfig]:
    for tile, width, warps in ((4, 1024, 4), (4, 1024, 8), (4, 2048, 8), (8, 512, 4), (8, 1024, 4), (16, 512, 8)):
        yield best._replace(tile=tile, width=width, warps=warps)


# ---- shared


def relative_error(result: Tensor, wanted: Tensor) -> float:
    """||result - wanted|| / ||wanted||; NaN if either contains NaN."""
    return ((result.double() - wanted.double()).norm() / wanted.double().norm()).item()


def _calls(nbytes: int, layers: int) -> int:
    return max(layers, min(MOST_CALLS, COLD // max(nbytes, 1) + 1))


def _random_table(runner: Runner, rows: int, width: int) -> Tensor:
    return torch.randint(runner.num_blocks, (rows, width), device=runner.state.device, dtype=torch.int32)


def _gathered(cache: LayerCache, table: Tensor) -> tuple[LayerCache, Tensor]:
    """Return the blocks listed in `table` as a float64 cache, dequantized, and the block table for it."""
    compact = torch.arange(table.numel(), device=table.device, dtype=torch.int32).view_as(table)
    read = cache.read(table.flatten()[:, None])  # [blocks, block_size, kv_heads, d] each
    return LayerCache(*(part.double() for part in read)), compact
