"""Measure for `minillm build` on a GPU: steps, launches, budgets, memory.  Lesson 11.

On an H200, a plan for Gemma 2B made one request no faster and 256 concurrent requests 0.1% faster
(data/results/h200/build.json).
"""

import gc
import logging
import math
import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from minillm.advice.plan import Plan
from minillm.config import Traffic
from minillm.engine.llm import LLM
from minillm.kernels import launch_configs
from minillm.request import SamplingParams
from minillm.runner.cuda_graph import DecodeShape
from minillm.runner.decode_graphs import DecodeGraphs
from minillm.runner.executor import LocalExecutor
from minillm.runner.runner import Runner
from minillm.scheduler.settings import scheduled

from . import trials

log = logging.getLogger(__name__)
BUDGETS = (8192, 16384, 32768)  # values of max_num_batched_tokens to try
PROMPT_TOKENS = 1 << 18  # the most in one trial of a budget
REPLAYS = 15
Asked = dict[launch_configs.Problem, trials.KernelConfig]  # the problems of a step -> each kernel's default launch


@torch.inference_mode()
def measured(model: str | Path | None, plan: Plan, out: Path, device: str) -> Plan:
    """Return the plan with the graphs, launches, budget and memory of this GPU. Leaves an unfinished plan in `out`."""
    torch.manual_seed(0)
    log.info("starting an engine with random weights")
    # No prefix caching: one budget's trial must not reuse another's prompts.
    options = {"enable_prefix_caching": False} | plan.options
    with LLM(model, load_format="dummy", device=device, **options) as llm:
        runner = _runner(llm)
        for cache in runner.caches:  # computing with zeros is faster than with real values
            cache.randomize()
        runner.state.tokens.random_(runner.model.config.vocab_size)
        budgets, asked = budget_rates(llm, plan)
        steps: dict[DecodeShape, float] = {}
        asked_by: dict[DecodeShape, Asked] = {}
        results: list[trials.TuningResult] = []
        if runner.graphs is not None:
            steps, asked_by = decode_steps(runner, runner.graphs.decodes, plan.traffic)
            results = [*tune_decode(runner, plan.traffic, asked_by), *tune_products(runner, asked_by)]
        budget = best_budget(budgets, plan.options["max_num_batched_tokens"])
        results += tune_prefill(runner, plan.traffic, asked, budget)
        chosen = [each for each in results if each.config != each.default]
        chosen, again = kept(runner, plan.traffic, steps, asked_by, chosen)
    sizes = worthwhile({shape.rows for shape in steps}, again or steps)
    plan = replace(
        plan,
        options=plan.options | {"max_num_batched_tokens": budget},
        graphs=[[shape.rows, shape.width] for shape in sorted(steps) if shape.rows in sizes],
        launches=[entry(each) for each in chosen],
        measured={
            "steps_ms": [
                [shape.rows, shape.width, round(1e3 * steps[shape], 4), round(1e3 * again[shape], 4)]
                for shape in sorted(steps)
            ],
            "prefill_tokens_per_s": {str(tokens): round(rate) for tokens, rate in budgets.items()},
            "problems": len(results),
            "launches_tried": sum(each.tried for each in results),
            "refused": sorted({f"{each.problem.kernel}: {why}" for each in results for why in each.refused.values()}),
        },
    )
    del runner, results, asked, asked_by
    gc.collect()
    return replace(plan, memory=memory_taken(model, plan, out, device))


def decode_steps(
    runner: Runner, graphs: DecodeGraphs, traffic: Traffic
) -> tuple[dict[DecodeShape, float], dict[DecodeShape, Asked]]:
    """Return each decode step's seconds with default launches, and the problems that its kernels look up."""
    block = runner.state.block_size
    ends = range(traffic.input_len + 1, traffic.context + 1)
    widths = sorted({graphs.width(-(-end // block)) for end in ends})
    shapes = [DecodeShape(size, width) for width in widths for size in graphs.sizes]
    graphs.capture(graphs.largest)  # the first capture of all: not to be heard as part of another step
    seconds: dict[DecodeShape, float] = {}
    asked_by: dict[DecodeShape, Asked] = {}
    for shape in shapes:
        with launch_configs.listening() as asked_by[shape]:
            seconds[shape] = step_seconds(runner, graphs, traffic, shape)
    return seconds, asked_by


def step_seconds(runner: Runner, graphs: DecodeGraphs, traffic: Traffic, shape: DecodeShape) -> float:
    """Return seconds of one decode step whose rows are halfway through their outputs, captured with the current
    launches.
    """
    state, size, width = runner.state, shape.rows, shape.width
    longest = min(width * state.block_size, state.longest + 1) - 2 * REPLAYS
    inputs = graphs.inputs(size)
    inputs[0] = torch.arange(size, device=state.device) % state.padding  # with drafts there are more tokens than rows
    inputs[1], inputs[2] = max(min(traffic.input_len + traffic.output_len // 2, longest), 0), -1
    state.parameters[:] = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0])  # a temperature of 1, and nothing else
    state.block_table.random_(runner.num_blocks)
    graphs.captured.decodes.pop(shape, None)  # captured earlier, perhaps with other launches
    captured = graphs.capture(shape).graph
    captured.replay()
    return statistics.median(trials.replay_seconds(captured, REPLAYS))


def tune_decode(runner: Runner, traffic: Traffic, asked_by: dict[DecodeShape, Asked]) -> list[trials.TuningResult]:
    """Tune tile and splits for the largest step; the others keep its tile and tune only their splits."""
    results: list[trials.TuningResult] = []
    tile: trials.KernelConfig | None = None
    for shape in sorted(asked_by, reverse=True):
        for problem, default in asked_by[shape].items():
            if problem.kernel == "decode_attention" and all(problem != each.problem for each in results):
                trial = trials.decode_trial(problem, runner, traffic, shape[1], tile)
                results.append(report(trials.tune(problem, default, trial)))
                tile = tile or results[-1].config
    return results


def tune_products(runner: Runner, asked_by: dict[DecodeShape, Asked]) -> list[trials.TuningResult]:
    asked = {problem: default for problems in asked_by.values() for problem, default in problems.items()}
    products = {problem: default for problem, default in asked.items() if problem.kernel in ("whole_rows", "long_rows")}
    return [report(trials.tune(each, own, trials.product_trial(each, runner))) for each, own in products.items()]


def tune_prefill(runner: Runner, traffic: Traffic, asked: Asked, budget: int) -> list[trials.TuningResult]:
    """Tune the problems that steps of whole prompts look up; those of shorter chunks keep the default."""
    results = []
    for problem, default in asked.items():
        if problem.kernel in trials.PREFILL:
            trial = trials.prefill_trial(problem, runner, traffic, budget)
            with launch_configs.listening() as heard:
                trial.calls[0]()
            if problem in heard:
                results.append(report(trials.tune(problem, default, trial)))
    return results


def kept(
    runner: Runner,
    traffic: Traffic,
    steps: dict[DecodeShape, float],
    asked_by: dict[DecodeShape, Asked],
    chosen: list[trials.TuningResult],
) -> tuple[list[trials.TuningResult], dict[DecodeShape, float]]:
    """Return the prefill launches and those that also speed up decode steps, and the steps' seconds with them."""
    again = dict(steps)
    table = {each.problem: each.config._asdict() for each in chosen}
    for shape in steps:
        if runner.graphs is not None and table.keys() & asked_by[shape].keys():
            with launch_configs.using(table):
                again[shape] = step_seconds(runner, runner.graphs.decodes, traffic, shape)
    gain = {
        each.problem: sum(steps[shape] - again[shape] for shape in steps if each.problem in asked_by[shape])
        for each in chosen
    }
    kept = [each for each in chosen if each.problem.kernel in trials.PREFILL or gain[each.problem] > 0]
    left = {each.problem for each in kept}
    changed = {shape for shape in steps if left & asked_by[shape].keys()}
    return kept, {shape: again[shape] if shape in changed else steps[shape] for shape in steps}


def worthwhile(sizes: set[int], seconds: dict[DecodeShape, float]) -> set[int]:
    """Batch sizes whose step is clearly faster than that of the next larger size kept; the largest is always kept."""
    largest_first = sorted(sizes, reverse=True)
    chosen = largest_first[:1]
    for size in largest_first[1:]:
        if any(
            time < (1 - trials.MARGIN) * seconds[DecodeShape(chosen[-1], shape.width)]
            for shape, time in seconds.items()
            if shape.rows == size
        ):
            chosen.append(size)
    return set(chosen)


def budget_rates(llm: LLM, plan: Plan) -> tuple[dict[int, float], Asked]:
    """Tokens per step -> prompt tokens per second at the start of the traffic; and the problems its steps look up.

    Each trial submits all requests at once and generates a few tokens of each. A trial without decodes would
    favor small budgets, but under real traffic these need more steps, which also run decodes.
    """
    traffic, own = plan.traffic, plan.options["max_num_batched_tokens"]
    requests = max(1, min(traffic.concurrency, PROMPT_TOKENS // traffic.input_len))
    budgets = {own}
    if not plan.options.get("max_prefill_tokens"):  # next to decodes, a limit of their own would decide
        budgets |= {each for each in BUDGETS if each // 2 < requests * traffic.input_len}
    seconds: dict[int, list[float]] = {budget: [] for budget in sorted(budgets)}
    asked: Asked = {}
    for round_ in range(3):
        for budget, times in seconds.items():
            try:
                with scheduled(llm.engine.scheduler, budget=budget), launch_configs.listening() as heard:
                    times.append(begin_seconds(llm, traffic, requests, seed=round_))
            except torch.OutOfMemoryError:
                times.append(math.inf)
            asked |= heard
    return {each: requests * traffic.input_len / statistics.median(times[1:]) for each, times in seconds.items()}, asked


def begin_seconds(llm: LLM, traffic: Traffic, requests: int, seed: int) -> float:
    """Return seconds to compute `requests` new prompts and the first few tokens of each output."""
    ids = np.random.default_rng(seed).integers(0, llm.model_config.vocab_size, (requests, traffic.input_len))
    params = SamplingParams(max_tokens=min(traffic.output_len, 8), temperature=1.0, ignore_eos=True)
    prompts = ids.tolist()
    begin = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - begin


def best_budget(rates: dict[int, float], own: int) -> int:
    """Return the engine's default budget, unless another is clearly faster."""
    best = max(rates, key=rates.__getitem__, default=own)
    return best if rates.get(best, 0) > (1 + trials.MARGIN) * rates.get(own, math.inf) else own


def memory_taken(model: str | Path | None, plan: Plan, out: Path, device: str) -> dict[str, int]:
    """Return bytes that an engine with this plan takes. Its graphs are captured separately, to measure them."""
    replace(plan, graphs=[]).write(out)
    with LLM(model, load_format="dummy", device=device, plan=str(out)) as llm:
        runner, config = _runner(llm), llm.config
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info(device)[0]
        if runner.graphs is not None:
            with launch_configs.using(plan.table()):
                runner.graphs.capture(DecodeShape(rows, width) for rows, width in plan.graphs)
        torch.cuda.empty_cache()
        taken = {
            "weights": llm.engine.facts.weight_bytes,
            "graphs": max(before - torch.cuda.mem_get_info(device)[0], 0),
            "cache": runner.num_blocks * runner.memory.block_bytes,
        }
        runner.close()
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        # Memory of the CUDA driver counts as workspace: every engine needs it.
        taken["workspace"] = runner.memory.workspace(config) + total - free - taken["weights"]
    gc.collect()
    return taken


def _runner(llm: LLM) -> Runner:
    """Return the engine's runner. Only an engine that runs its steps in this process can be measured."""
    executor = llm.engine.executor
    assert isinstance(executor, LocalExecutor), type(executor)
    return executor.runner


def entry(result: trials.TuningResult) -> dict:
    """Return a measured configuration in the form that a plan stores."""
    return {
        "kernel": result.problem.kernel,
        "sizes": dict(result.problem.sizes),
        "launch": result.config._asdict(),
        "default": result.default._asdict(),
        "microseconds": [round(1e6 * result.default_seconds, 2), round(1e6 * result.seconds, 2)],
    }


def report(result: trials.TuningResult) -> trials.TuningResult:
    """Log a result. Tuning takes minutes, and without output it would look like a hang."""
    sizes = " ".join(f"{name} {size}" for name, size in result.problem.sizes)
    change = "kept" if result.config == result.default else f"-> {result.config}, {1e6 * result.seconds:.1f} us"
    log.info(
        "%s (%s): %.1f us %s of %d tried",
        result.problem.kernel, sizes, 1e6 * result.default_seconds, change, result.tried,
    )  # fmt: skip
    return result
