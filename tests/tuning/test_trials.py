"""How `minillm build` chooses, tested with interpreted kernels and a fake clock for the launches."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from minillm import LLM
from minillm.advice.plan import Plan
from minillm.config import Traffic
from minillm.model.loader import EMBEDDED, read_config
from minillm.runner.cuda_graph import DecodeShape
from tests import models
from tests.emulated_graphs import emulated_graphs
from tests.proofs import only_in_proofs

trials = pytest.importorskip("minillm.tuning.trials", reason="triton is not installed here")
from minillm.kernels import gathered_keys, launch_configs, paged_attention, single_row  # noqa: E402
from minillm.tuning import planning  # noqa: E402  needs triton

TINY = read_config(EMBEDDED)
TRAFFIC = Traffic(3, 20, 10)
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, and this engine is not")


small = models.directories(["gemma-multi-query"])


@pytest.fixture(scope="module")
def runner():
    with LLM(device="cpu", dtype="float32", num_blocks=24) as llm:
        for cache in llm.engine.executor.runner.caches:
            cache.k.normal_(), cache.v.normal_()
        yield llm.engine.executor.runner


def decode_problem():
    sizes = {"dim": 64, "dtype": "float32", "rows": 16, "programs": 3, "longest": 32}
    return launch_configs.problem("decode_attention", **sizes), paged_attention.AttentionConfig(16, 16, 4, 2, 1)


def product_problem(rows, columns, gated):
    sizes = {"rows": rows, "columns": columns, "dtype": "float32", "gated": gated}
    return launch_configs.problem("whole_rows", **sizes), single_row.RowsConfig(2, 4, 2)


def prefill_problem():
    problem = launch_configs.problem("prefill_attention", dim=64, dtype="float32", group=4)
    return problem, paged_attention.AttentionConfig(32, 32, 4, 1)


def every_trial(runner, head):
    yield *decode_problem(), trials.decode_trial(decode_problem()[0], runner, TRAFFIC, 2, None)
    yield *prefill_problem(), trials.prefill_trial(prefill_problem()[0], runner, TRAFFIC, 64)
    for sizes in [(4096, 256, 0)] if head else [(384, 256, 0), (256, 256, 0), (768, 256, 1)]:
        problem, default = product_problem(*sizes)
        yield problem, default, trials.product_trial(problem, runner)


@interpreted
@torch.inference_mode()
@pytest.mark.parametrize("head", [False, *only_in_proofs(True)])
def test_the_default_launches_pass_the_check_and_a_corrupted_result_fails_it(head, runner):
    for problem, default, trial in every_trial(runner, head):
        with launch_configs.using({problem: default._asdict()}):
            result = trial.calls[0]()
        assert trial.error(result) <= trial.tolerance, problem
        assert not trial.error(result * 1.01) <= trial.tolerance, problem
        assert not trial.error(result.fill_(float("nan"))) <= trial.tolerance, problem


@interpreted
@torch.inference_mode()
@pytest.mark.parametrize("tokens, kernel", [(16, "prefill_attention"), *only_in_proofs((64, "gathered_attention"))])
def test_prefill_is_tuned_as_whole_prompts_run_it(tokens, kernel, runner, monkeypatch):
    monkeypatch.setattr(trials, "graph_seconds", lambda calls: 1.0)
    monkeypatch.setattr(gathered_keys, "LEAST_TILES", 2)  # 64 tokens of four heads; interpreted, 24 tiles take minutes
    default = paged_attention.AttentionConfig(32, 32, 4, 1)
    asked = {
        launch_configs.problem(name, dim=64, dtype="float32", group=4): default
        for name in ("decode_attention", "prefill_attention", "gathered_attention")
    }
    (found,) = planning.tune_prefill(runner, Traffic(1, tokens, 10), asked, budget=64)
    assert found.problem.kernel == kernel and found.tried > 1 and not found.refused


def by_launch(times, seen=None):
    """A fake clock with given times per launch; others take 1."""

    def seconds(calls):
        (launch,) = launch_configs._thread.table.values()
        if seen is not None:
            seen.append(dict(launch))
        return next((time for fields, time in times if fields.items() <= launch.items()), 1.0)

    return seconds


@interpreted
@torch.inference_mode()
def test_the_fastest_launch_is_found_round_by_round(runner):
    problem, default = decode_problem()
    trial = trials.decode_trial(problem, runner, TRAFFIC, 2, None)
    clock = by_launch([({"warps": 8, "stages": 2, "splits": 2}, 0.4), ({"warps": 8, "stages": 2}, 0.7)])
    found = trials.tune(problem, default, trial, clock)
    assert found.config == default._replace(warps=8, splits=2, keys=found.config.keys)
    assert (found.default_seconds, found.seconds, found.refused) == (1.0, 0.4, {})


@pytest.mark.proof
@interpreted
@torch.inference_mode()
def test_a_launch_that_is_barely_faster_changes_nothing(runner):
    problem, default = product_problem(384, 256, 0)
    found = trials.tune(problem, default, trials.product_trial(problem, runner), by_launch([({"warps": 4}, 0.99)]))
    assert found.config == default and found.seconds == found.default_seconds


@interpreted
@torch.inference_mode()
def test_a_launch_that_was_fast_only_once_changes_nothing(runner):
    problem, default = decode_problem()
    lucky, runs = {"warps": 8, "stages": 2}, []

    def clock(calls):
        (launch,) = launch_configs._thread.table.values()
        if not lucky.items() <= launch.items():
            return 1.0
        runs.append(launch)
        return 0.4 if len(runs) == 1 else 1.0

    found = trials.tune(problem, default, trials.decode_trial(problem, runner, TRAFFIC, 2, None), clock)
    assert found.config == default and len(runs) > 1


@interpreted
@torch.inference_mode()
@pytest.mark.parametrize("fault", ["wrong", *only_in_proofs("too large")])
def test_a_launch_that_does_not_fit_or_is_wrong_is_never_timed(fault, runner, monkeypatch):
    from triton.runtime.errors import OutOfResources

    problem, default = product_problem(256, 256, 0)
    kernel, bad = single_row.whole_rows_kernel, {"tile": 8, "warps": 4}

    class Faulty:
        def __getitem__(self, grid):
            def run(*args, **options):
                if {"tile": options["TILE"], "warps": options["num_warps"]} != bad:
                    return kernel[grid](*args, **options)
                if fault == "too large":
                    raise OutOfResources(300_000, 232_448, "shared memory")
                kernel[grid](*args, **options)
                args[7].mul_(-1)

            return run

    monkeypatch.setattr(single_row, "whole_rows_kernel", Faulty())
    seen = []
    trial = trials.product_trial(problem, runner)
    found = trials.tune(problem, default, trial, by_launch([(bad, 0.1), ({"tile": 8}, 0.5)], seen))
    assert found.config.tile == 8 and found.config.warps != 4
    assert seen and not any(bad.items() <= launch.items() for launch in seen)
    (why,) = {why for launch, why in found.refused.items()}
    assert ("shared memory" if fault == "too large" else "relative error") in why


def test_a_launch_that_writes_nothing_does_not_pass_with_the_previous_result():
    memory, right = torch.zeros(8), torch.arange(8.0)
    problem, default = launch_configs.problem("long_rows", rows=8), single_row.LongRowsConfig(8, 1024, 8)

    def call():
        return memory if launch_configs.tuned("long_rows", default, rows=8).tile == 1 else memory.copy_(right)

    trial = trials.Trial(
        [call], lambda result: trials.relative_error(result, right), [lambda best: [best._replace(tile=1)]], 1e-4
    )
    found = trials.tune(problem, default, trial, by_launch([({"tile": 1}, 0.1)]))
    assert found.config == default and list(found.refused.values()) == ["relative error nan"]


def test_a_kernel_whose_default_launch_fails_is_an_error():
    problem, default = product_problem(4, 4, 0)
    trial = trials.Trial([lambda: torch.ones(1)], lambda result: 1.0, [], 1e-4)
    with pytest.raises(RuntimeError, match="whole_rows's default configuration .* fails: relative error"):
        trials.tune(problem, default, trial, lambda calls: 1.0)


@pytest.mark.proof
@interpreted
@torch.inference_mode()
def test_every_step_is_heard_and_timed_with_the_current_launches_even_if_it_was_captured_before(small, monkeypatch):
    monkeypatch.setattr(trials, "replay_seconds", lambda graph, replays: [1.0])
    tables: list[dict] = []
    with emulated_graphs(), LLM(small, device="cpu", dtype="float32", num_blocks=24, max_num_seqs=2) as llm:
        runner = llm.engine.executor.runner
        graphs = runner.graphs.decodes
        graphs.capture(DecodeShape(1, 16)), graphs.capture(DecodeShape(2, 16))  # as trials of a budget do
        steps, asked = planning.decode_steps(runner, graphs, Traffic(2, 20, 10))
        assert {shape.rows for shape in steps} == {1, 2}
        product = next(problem for problem in asked[DecodeShape(1, 16)] if problem.kernel == "whole_rows")
        record = graphs.captured.record

        def recorded(step, out):
            tables.append(dict(launch_configs._thread.table))
            return record(step, out)

        monkeypatch.setattr(graphs.captured, "record", recorded)
        default = asked[DecodeShape(1, 16)][product]
        found = trials.TuningResult(product, default, default._replace(warps=8))
        planning.kept(runner, Traffic(2, 20, 10), steps, asked, [found])
    assert tables == [{product: found.config._asdict()}], "only the single row's step looks this product up"


def test_every_token_budget_is_measured_on_the_traffic_with_new_prompts(monkeypatch):
    traffic = Traffic(10, 600, 20)
    monkeypatch.setattr(planning, "BUDGETS", (1024, 2048, 8192, 32768))
    seen, ids = [], []

    class Recorded:
        def __init__(self, llm):
            self.engine, self.model_config, self.generate_ = llm.engine, llm.model_config, llm.generate

        def generate(self, prompts, params):
            assert len(prompts) == 10 and params.max_tokens == 8 and params.ignore_eos
            seen.append(self.engine.scheduler.max_num_batched_tokens)
            ids.append(prompts[0])
            return self.generate_([prompt[:5] for prompt in prompts], params)

    with LLM(device="cpu") as llm:
        plan = Plan.made_here(TINY, traffic, {"max_num_batched_tokens": 4096}, "cpu")
        rates, _ = planning.budget_rates(Recorded(llm), plan)
        assert llm.engine.scheduler.max_num_batched_tokens == llm.config.max_num_batched_tokens, "it stays as it was"
    assert seen == [1024, 2048, 4096, 8192] * 3, "6,000 tokens never fill a budget above 8,192"
    assert ids[0] == ids[3] != ids[4] != ids[8]
    assert set(rates) == {1024, 2048, 4096, 8192} and min(rates.values()) > 0


def test_the_round_that_warms_up_counts_for_no_budget(monkeypatch):
    seconds = (100.0, 1.0, 3.0)
    monkeypatch.setattr(planning, "begin_seconds", lambda llm, traffic, requests, seed: seconds[seed])
    monkeypatch.setattr(planning, "scheduled", lambda scheduler, budget: nullcontext())
    llm = SimpleNamespace(engine=SimpleNamespace(scheduler=None))
    plan = Plan.made_here(TINY, Traffic(10, 600, 20), {"max_num_batched_tokens": 4096}, "cpu")
    rates, _ = planning.budget_rates(llm, plan)
    assert len(rates) > 1 and set(rates.values()) == {10 * 600 / 2.0}
    limited = Plan.made_here(TINY, plan.traffic, plan.options | {"max_prefill_tokens": 512}, "cpu")
    assert list(planning.budget_rates(llm, limited)[0]) == [4096], "with a limit of their own, prompts ignore the rest"


def test_a_size_is_captured_if_its_step_is_clearly_faster_than_the_next_larger_size():
    times = {(1, 16): 1.0, (2, 16): 1.49, (4, 16): 1.5, (8, 16): 3.0, (8, 32): 4.0, (4, 32): 4.0, (2, 32): 4.0}
    seconds = {DecodeShape(*shape): time for shape, time in times.items()}
    assert planning.worthwhile({1, 2, 4, 8}, seconds) == {1, 4, 8}
    assert planning.worthwhile({1, 2}, {DecodeShape(1, 16): 2.0, DecodeShape(2, 16): 2.0}) == {2}
    assert planning.worthwhile(set(), {}) == set()


def test_another_token_budget_must_be_clearly_faster_than_the_default():
    assert planning.best_budget({4096: 101.0, 16384: 100.0}, 16384) == 16384
    assert planning.best_budget({4096: 99.0, 16384: 100.0, 32768: 110.0}, 16384) == 32768
    assert planning.best_budget({}, 2048) == 2048
