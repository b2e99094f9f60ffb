"""`minillm bench ablation`: turn off one part of the engine at a time and measure the cost.  Lessons 04 and 11.

A group compares settings that differ in one thing: CUDA graphs, sampling inside them, greedy or sampled tokens,
sampling parameters other than temperature, steps launched ahead, the decode attention, fused kernels. All settings run
in one process on one model, each with its own warm-up. A setting that is in two groups is measured once.
"""

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm import ops
from minillm.engine.llm import LLM
from minillm.errors import ConfigError
from minillm.kv_cache.layer_cache import LayerCache
from minillm.model.config import ModelConfig
from minillm.ops import AttentionOptions, Rows, reference
from minillm.overrides import using
from minillm.runner.executor import LocalExecutor

from . import offline, records, workloads
from .workloads import BenchRequest

REQUESTS = {"cpu": 16, "cuda": 256}  # of the batch workload


@dataclass(frozen=True)
class Setting:
    """Switches of the engine; the defaults are those of the engine."""

    graphs: bool = True
    prompts_in_graphs: bool = True
    sampling_in_graph: bool = True
    single_row: bool = True  # the fused step of one request
    run_ahead: int = 1
    operations: str = "own"  # a name in OPERATIONS
    temperature: float = 1.0  # of every request; 0 always takes the most likely token
    sampling: str = "a temperature"  # a name in SAMPLING


def torch_attention(q: Tensor, cache: LayerCache, rows: Rows, options: AttentionOptions) -> Tensor:
    """Decode attention in plain torch: gather each row's blocks, then call scaled_dot_product_attention with a mask.

    Like `ops.reference.decode_attention` for one query per row and no soft cap; a padding row attends to one key.
    Raises ValueError for more queries per row.
    """
    count, queries, heads, head_dim = q.shape
    if queries != 1:
        raise ValueError(f"torch_attention takes one query per row, not {queries}")
    k, v = (part.to(q.dtype).transpose(1, 2) for part in cache.read(rows.block_table))
    key = torch.arange(k.shape[2], device=q.device)
    ends = rows.lengths.clamp(min=1)[:, None]
    seen = key < ends
    if options.window:
        seen &= key >= ends - options.window
    # The query heads that share a KV head become its queries, so K and V are not repeated.
    packed = q.reshape(count, k.shape[1], -1, head_dim)
    out = F.scaled_dot_product_attention(packed, k, v, attn_mask=seen[:, None, None], scale=options.scale)
    return out.reshape(q.shape)


FUSED = ("rms_norm", "add_rms_norm", "rotary_embedding", "gated_activation")
OPERATIONS: dict[str, dict[str, Callable]] = {
    "own": {},
    "torch attention": {"decode_attention": torch_attention},
    "plain torch": {name: getattr(reference, name) for name in FUSED},
    "reference": {name: getattr(reference, name) for name in ops.names()},
}

# Sampling parameters besides temperature: (parameters, how many requests have them). Many models recommend top_k and
# top_p.
SAMPLING: dict[str, tuple[dict[str, Any], int]] = {
    "a temperature": ({}, 0),
    "top_p of one": ({"top_p": 0.95}, 1),
    "top_k and top_p": ({"top_k": 64, "top_p": 0.95}, sys.maxsize),
    "top_p": ({"top_p": 0.95}, sys.maxsize),
    "penalties": ({"repetition_penalty": 1.1, "frequency_penalty": 0.1}, sys.maxsize),
    "5 log-probabilities": ({"logprobs": 5}, sys.maxsize),
}

Groups = dict[str, dict[str, Setting]]  # what is compared -> a name for each setting


def groups(device: str, model: ModelConfig, requests: int) -> Groups:
    """Return the comparisons to run on a device type, for one request or for several."""
    ahead = {"run-ahead": {str(steps): Setting(run_ahead=steps) for steps in (0, 1, 3)}}
    if device == "cpu":
        return ahead | {"operations": {"reference": Setting(operations="reference"), "fast CPU": Setting()}}
    # Steps with prompts run as graphs only with the engine's own operations and sampling. If one setting of a
    # comparison replaces those, all its settings run such steps without graphs.
    decodes = Setting(prompts_in_graphs=False)
    unfused = replace(decodes, single_row=False)
    attention = {"torch": replace(unfused, operations="torch attention"), "Triton": unfused}
    fusion = {"plain torch": replace(unfused, operations="plain torch"), "a kernel an operation": unfused}
    if requests == 1:
        fusion["five launches a layer"] = decodes
    return {
        "CUDA graphs": {"off": Setting(graphs=False), "decodes alone": decodes, "on": Setting()},
        "sampling": {"behind the graph": replace(decodes, sampling_in_graph=False), "in the graph": decodes},
        "temperature": {"0, greedy": Setting(temperature=0.0), "1, sampled": Setting()},
        "asked for": {name: Setting(sampling=name) for name in SAMPLING},
        **ahead,
        **({} if model.attention_soft_cap else {"decode attention": attention}),
        "fusion": fusion,
    }


@contextmanager
def applied(llm: LLM, setting: Setting) -> Iterator[None]:
    """Run an idle engine with a setting inside the block."""
    engine, executor = llm.engine, llm.engine.executor
    assert isinstance(executor, LocalExecutor)  # its graphs are in this process
    runner = executor.runner
    config, graphs = engine.config, runner.graphs
    engine.configure(replace(engine.config, run_ahead=setting.run_ahead))
    if not setting.graphs:
        runner.graphs = None
    elif runner.graphs is not None:
        from minillm.runner.step_graphs import StepGraphs

        parts = {"single_row": setting.single_row, "sampling": setting.sampling_in_graph}
        parts |= {"mixed": setting.prompts_in_graphs}
        runner.graphs = StepGraphs(runner.model, runner.state, runner.caches, engine.config, **parts)
    try:
        with using(capturable=True, **OPERATIONS[setting.operations]):
            yield
    finally:
        if runner.graphs is not None and runner.graphs is not graphs:
            runner.graphs.close()
        runner.graphs = graphs
        engine.configure(config)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # memory of the setting's graphs


def run(
    model: str | Path | None = None,
    *,
    workload: Sequence[str] = ("single", "chat"),
    requests: int | None = None,
    scale: int = 1,
    repeat: int = 3,
    json_path: str | Path | None = None,
    quiet: bool = False,
    **engine_options: Any,
) -> dict:
    """Measure every setting on every workload and return the record. Prints a table, then the record as one JSON line.

    workload: names from `workloads.WORKLOADS`, with lengths divided by `scale`, the first `requests` of each (default:
    256, on a CPU 16). repeat: timed runs of each setting, after one that warms up; the record has the median and all
    runs. json_path, quiet: as `records.publish`. engine_options: as `LLM`. Raises ConfigError.
    """
    if repeat < 1:
        raise ConfigError(f"repeat must be a whole number from 1, not {repeat!r}")
    chosen = [workloads.find(name).name for name in workload]
    begun = records.begin(json_path)
    engine = offline.Minillm(model, **engine_options)
    try:
        config, device = engine.llm.model_config, torch.device(engine.llm.config.device).type
        results = []
        for name in chosen:
            work = workloads.make(name, config.vocab_size, scale=scale, requests=requests or REQUESTS[device])
            facts = {"workload": name, **workloads.totals(work), "scale": scale}
            results += _compare(engine, groups(device, config, len(work)), work, facts, repeat)
        dtype = engine.llm.engine.facts.dtype
        content = records.record(results, begun, model=engine.llm.engine.name, dtype=dtype)
    finally:
        engine.llm.close()
    return records.publish(content, json_path, table(results), quiet=quiet)


def _compare(
    engine: offline.Minillm, compared: Groups, work: list[BenchRequest], facts: dict, repeat: int
) -> list[dict]:
    measured: dict[Setting, list[float]] = {}
    rows = []
    for group, settings in compared.items():
        for name, setting in settings.items():
            if setting not in measured:
                parameters, count = SAMPLING[setting.sampling]
                extra = [parameters] * min(count, len(work))
                with applied(engine.llm, setting):
                    measured[setting] = [engine.run(work, setting.temperature, extra) for _ in range(repeat + 1)][1:]
            seconds = statistics.median(measured[setting])
            speed = {"seconds": round(seconds, 4), "output_tokens_per_s": round(facts["output_tokens"] / seconds, 1)}
            runs = [round(each, 4) for each in measured[setting]]
            rows.append({"group": group, "name": name, **facts, **speed, "runs": runs})
    return rows


def table(results: Sequence[dict]) -> str:
    """Return the results as text: one line per setting, with its speed as a share of its group's best."""
    best: dict[tuple[str, str], float] = {}
    for row in results:
        key = row["workload"], row["group"]
        best[key] = max(best.get(key, 0.0), row["output_tokens_per_s"])
    lines = [f"{'workload':<22}{'requests':>9}  {'compared':<18}{'setting':<23}{'tokens/s':>10}{'of best':>9}  runs, s"]
    for row in results:
        speed, runs = row["output_tokens_per_s"], " ".join(f"{each:.3g}" for each in row["runs"])
        share = speed / best[row["workload"], row["group"]]
        what = f"{row['workload']:<22}{row['requests']:>9}  {row['group']:<18}{row['name']:<23}"
        lines.append(f"{what}{speed:>10,.0f}{share:>9.2f}  {runs}")
    return "\n".join(lines)
