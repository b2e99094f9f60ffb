"""`minillm build`: measure this GPU for one model and its traffic, and write a plan (`advice.plan`).  Lesson 11.

    1  start the traffic with several values of max_num_batched_tokens, and measure the prefill rate of each
    2  capture the traffic's decode steps, and record which launch configurations the kernels look up
    3  tune each of these problems (`trials`)
    4  capture the steps again; drop configurations that slow them down, and batch sizes hardly faster than the next
    5  start an engine with the plan, and measure the memory it takes

Weights are random because their values do not affect speed: a model's config.json is enough. Without a GPU nothing is
measured: the plan holds only options, and memory is computed from the model's shape.
"""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import numpy as np
import torch

from minillm.advice import precision
from minillm.advice.plan import Plan
from minillm.advice.sizing import Sizing, fit, kv_bytes_per_token, weight_bytes
from minillm.bench import records
from minillm.bench.offline import Minillm
from minillm.bench.workloads import BenchRequest
from minillm.config import EngineConfig, EngineOptions, Traffic
from minillm.errors import ConfigError
from minillm.kv_cache.layer_groups import blocks_held
from minillm.model.config import ModelConfig
from minillm.model.loader import read_config, resolve, resolve_device
from minillm.pretrained import model_name
from minillm.runner.memory import CPU_CACHE_BYTES

OF_THE_PLACE = ("device", "load_format", "seed", "plan", "trace")  # options of a run, not of a plan


def run(
    model: str | Path | None = None,
    *,
    input_len: int = 1024,
    output_len: int = 256,
    concurrency: int = 64,
    out: str | Path | None = None,
    gpu_gb: float | None = None,
    compare: bool = False,
    json_path: str | Path | None = None,
    **engine_options: Unpack[EngineOptions],
) -> Plan:
    """Make a plan, print how it uses memory, and write it to `out`.  Raises ConfigError.

    out: MODEL.plan.json in the working directory by default. gpu_gb: also print what a GPU with this many GB
    (10^9 bytes) would hold. compare: afterwards, run the traffic and a single request with and without the plan in
    alternation, and print the record; json_path: also write it to this file. engine_options: as for `LLM`.
    """
    begun, start = records.begin(json_path), time.perf_counter()
    if engine_options.get("plan"):
        raise ConfigError("build writes a plan and cannot use one: leave out --plan; --out names the file to write")
    config, traffic = EngineConfig.of(**engine_options), Traffic(concurrency, input_len, output_len)
    source = resolve(model)
    shape = read_config(source)
    longest = config.max_model_len or shape.max_model_len
    if traffic.context > longest:
        raise ConfigError(
            f"input_len + output_len = {traffic.context} tokens, but max_model_len is {longest}: lower one of them"
        )
    device = resolve_device(config.device)
    config = precision.resolved(config, source, device, traffic)
    engine_options |= {"quantization": config.quantization, "quantized_head": config.quantized_head}
    options = options_of(config, shape, traffic, device)
    name = model_name(source) if isinstance(source, Path) else source
    out = Path(f"{Path(name).name}.plan.json" if out is None else out)
    records.check_writable(out)
    plan = Plan.made_here(shape, traffic, options, device)
    title = f"{name}, {concurrency} concurrent requests of {input_len:,} + {output_len:,} tokens"
    if device == "cpu":
        print(f"{title}, on a CPU\n{on_cpu(shape, plan)}")
        print("Workspace, CUDA graphs and launches were not measured without a GPU. This plan holds only options.")
    else:
        from .planning import measured  # needs triton

        plan = measured(model, plan, out, device)
        print(f"{title}, on {torch.cuda.get_device_name(device)}\n{on_gpu(shape, plan, torch.cuda.mem_get_info()[1])}")
        if not precision.reason_against(config, source, device):
            print(f"Precisions, by estimate:\n{precision.recommended(config, source, device, traffic)}")
    if gpu_gb is not None:
        print(f"A GPU with {gpu_gb:g} GB, without workspace and CUDA graphs, which have to be measured on it:")
        there = options_of(config, shape, traffic, "cuda")
        print(on_gpu(shape, replace(plan, memory={}, options=there), gpu_gb * 1e9))
    plan = replace(plan, measured=plan.measured | {"seconds": round(time.perf_counter() - start, 1)})
    plan.write(out)
    print(f"wrote {out} in {plan.measured['seconds']} s: use it with --plan {out}")
    if compare:
        results = compared(model, plan, out, {"load_format": "dummy", **engine_options})
        content = records.record(results, begun, model=name, plan=json.loads(out.read_text(encoding="utf-8")))
        records.publish(content, json_path)
    return plan


def options_of(config: EngineConfig, shape: ModelConfig, traffic: Traffic, device: str) -> dict:
    """Return the engine options that a plan holds: those that were set, and those that follow from traffic and
    device.
    """
    defaults = EngineConfig()
    options = {name: getattr(config, name) for name in EngineConfig.__dataclass_fields__ if name not in OF_THE_PLACE}
    options = {name: value for name, value in options.items() if value != getattr(defaults, name)}
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else shape.dtype
    resolved = replace(config, max_num_seqs=config.max_num_seqs or traffic.concurrency).on(device)
    return options | {
        "dtype": dtype,
        "block_size": config.block_size,
        "max_num_seqs": resolved.max_num_seqs,
        "max_num_batched_tokens": resolved.max_num_batched_tokens,
    }


# ---- memory


def on_gpu(shape: ModelConfig, plan: Plan, gpu_bytes: float) -> Sizing:
    """Return how a GPU of this size is divided, including the workspace and graphs that the plan measured."""
    return fit(
        shape, gpu_bytes, plan.traffic.context, dtype=plan.options["dtype"],
        kv_cache_dtype=plan.options.get("kv_cache_dtype", "auto"), block_size=plan.options["block_size"],
        utilization=plan.options.get("gpu_memory_utilization", EngineConfig().gpu_memory_utilization),
        workspace_bytes=plan.memory.get("workspace", 0), graph_bytes=plan.memory.get("graphs", 0),
    )  # fmt: skip


def on_cpu(shape: ModelConfig, plan: Plan) -> Sizing:
    """CPU memory of the engine: the weights, and num_blocks or all rows at full length, up to CPU_CACHE_BYTES."""
    block, dtype = plan.options["block_size"], plan.options["dtype"]
    longest = plan.options.get("max_model_len") or shape.max_model_len
    held = plan.options.get("kv_cache_dtype", dtype)
    block_bytes = block * shape.groups(longest).size * kv_bytes_per_token(shape, held) // shape.num_layers
    most = plan.options["max_num_seqs"] * _blocks_held(shape, plan, longest, "cpu")
    blocks = plan.options.get("num_blocks") or min(most, max(CPU_CACHE_BYTES // block_bytes, 1))
    taken = weight_bytes(shape, dtype) + blocks * block_bytes
    context = plan.traffic.context
    return fit(
        shape, taken, context, dtype=dtype, kv_cache_dtype=held, block_size=block, utilization=1, memory="taken in all"
    )


def _blocks_held(shape: ModelConfig, plan: Plan, tokens: int, device: str) -> int:
    """Return the most blocks that a request of `tokens` tokens holds at once."""
    groups = shape.groups(plan.options.get("max_model_len"))
    chunk = plan.options.get("max_num_batched_tokens") or EngineConfig().on(device).max_num_batched_tokens
    return blocks_held(tokens, groups.windows, plan.options["block_size"], chunk)


# ---- with and without the plan


def compared(model: str | Path | None, plan: Plan, out: Path, options: dict, repeat: int = 3) -> list[dict]:
    """Run one request, then all requests, with and without the plan in alternation: medians of `repeat` runs."""
    traffic = plan.traffic
    longer = traffic.context + plan.options["block_size"]
    device = "cpu" if plan.gpu is None else "cuda"
    blocks = traffic.concurrency * _blocks_held(read_config(resolve(model)), plan, longer, device)
    engines = {
        "default": Minillm(model, **{"num_blocks": blocks} | options),
        "planned": Minillm(model, **{"num_blocks": blocks, "plan": str(out)} | options),
    }
    ids = np.random.default_rng(0).integers(0, engines["default"].llm.model_config.vocab_size, traffic.input_len)
    results = []
    try:
        for count in dict.fromkeys((1, traffic.concurrency)):
            work = [BenchRequest(np.roll(ids, shift).tolist(), traffic.output_len) for shift in range(count)]
            results += alternating(engines, work, repeat)
    finally:
        for engine in engines.values():
            engine.llm.close()
    return results


def alternating(engines: dict[str, Minillm], work: Sequence[BenchRequest], repeat: int) -> list[dict]:
    runs: dict[str, list[float]] = {name: [] for name in engines}
    for round_ in range(repeat + 1):
        for name, engine in engines.items():
            seconds = engine.run(work, temperature=1.0)
            if round_:
                runs[name].append(round(seconds, 4))
    tokens = sum(request.output_tokens for request in work)
    facts = {"requests": len(work), "input_tokens": sum(len(each.prompt) for each in work), "output_tokens": tokens}
    rows = []
    for name, times in runs.items():
        middle = statistics.median(times)
        rows.append({"engine": name, **facts, "seconds": middle, "output_tokens_per_s": tokens / middle, "runs": times})
        print(f"{name:<8} {len(work):>5} requests  {tokens / middle:>9,.0f} tokens/s  runs {times}", flush=True)
    return rows
