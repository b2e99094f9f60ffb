"""The engine on a GPU: CUDA graphs, kernels and run-ahead change no tokens.

float32 with TF32 off. Outputs may diverge only at a near-tie between the two likeliest tokens.
"""

import random

import pytest
import torch

import minillm
from minillm import LLM, SamplingParams
from minillm.kv_cache import BlockPool
from minillm.overrides import OverrideError
from minillm.scheduler.policies import FirstComeFirstServed
from tests import models
from tests.chance import SEED

pytestmark = [
    pytest.mark.explore,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and there is none here"),
]
if torch.cuda.is_available():
    from minillm.kernels import paged_attention
    from minillm.runner.step_graphs import StepGraphs

TIE = 1e-3  # logits closer than this may swap
GREEDY = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True, logprobs=2)
PLAIN = SamplingParams(
    max_tokens=48, temperature=0, ignore_eos=True
)  # without logprobs, so that steps may run as graphs


@pytest.fixture(scope="module", autouse=True)
def exact_products():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(SEED)
    return [[rng.randrange(4, 4000) for _ in range(rng.randint(1, 200))] for _ in range(40)]


@pytest.fixture(scope="module")
def expected(prompts):
    with LLM(dtype="float32", device="cuda", enforce_eager=True, run_ahead=0, enable_prefix_caching=False) as llm:
        return [llm.generate(prompt, GREEDY)[0] for prompt in prompts]


def same_until_a_tie(found: list[int], completion) -> bool:
    for position, (token, logprobs) in enumerate(zip(found, completion.logprobs, strict=True)):
        if token != completion.token_ids[position]:
            first, second = sorted(logprobs.values(), reverse=True)[:2]
            return first - second < TIE
    return True


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"run_ahead": 0},
        {"run_ahead": 3},
        {"max_num_seqs": 7, "max_num_batched_tokens": 64},
        {"num_blocks": 40, "run_ahead": 2},
        {"enforce_eager": True},
    ],
    ids=str,
)
def test_graphs_and_batches_change_no_tokens(prompts, expected, options):
    with LLM(dtype="float32", device="cuda", **options) as llm:
        found = llm.generate(prompts, PLAIN)
        llm.engine.scheduler.check()
        graphs = llm.engine.executor.runner.graphs
        assert (graphs is None) == ("enforce_eager" in options)
        assert graphs is None or graphs.captured.decodes, "no step ran as a graph"
        assert "max_num_seqs" not in options or graphs.captured.mixed, "no step with a prompt ran as a graph"
    assert all(same_until_a_tie(f.token_ids, e) for f, e in zip(found, expected, strict=True))


def test_the_cpu_gives_the_same_tokens(prompts, expected):
    with LLM(dtype="float32", device="cpu") as llm:
        found = llm.generate(prompts[:8], PLAIN)
    assert all(same_until_a_tie(f.token_ids, e) for f, e in zip(found, expected, strict=False))


@pytest.mark.parametrize("name", models.CONFIGS)
def test_every_family_gives_the_cpus_tokens(name, tmp_path):
    """With and without graphs; on kernels, or on the references if the head size is not a power of two."""
    models.make(name).save_pretrained(tmp_path)
    rng = random.Random(SEED + 1)
    asked = [[rng.randrange(1, 96) for _ in range(length)] for length in (1, 3, 7, 16, 17, 40, 100)]
    with LLM(tmp_path, dtype="float32", device="cpu") as llm:
        wanted = llm.generate(asked, GREEDY)
    for options in ({}, {"max_num_batched_tokens": 19, "max_num_seqs": 3}, {"enforce_eager": True}):
        with LLM(tmp_path, dtype="float32", device="cuda", num_blocks=80, **options) as llm:
            found = llm.generate(asked, PLAIN)
            graphs, shape = llm.engine.executor.runner.graphs, llm.model_config
            assert (graphs is None) == ("enforce_eager" in options)
            assert graphs is None or graphs.captured.decodes, "no step ran as a graph"
            assert graphs is None or (len(graphs.captured.mixed) > 0) == paged_attention.takes(shape.head_dim)
        assert all(same_until_a_tie(f.token_ids, w) for f, w in zip(found, wanted, strict=True))


def test_a_stream_past_its_window_gives_the_cpus_tokens(prompts):
    options = {"dtype": "float32", "attention_sinks": 4, "attention_window": 64}
    with LLM(device="cpu", **options) as llm:
        wanted = llm.generate(prompts[:12], GREEDY)
    assert any(len(each.prompt_token_ids) > 100 for each in wanted), "no block was released"
    for more in ({}, {"max_num_batched_tokens": 50, "max_num_seqs": 3}):
        with LLM(device="cuda", **options, **more) as llm:
            found = llm.generate(prompts[:12], PLAIN)
        assert all(same_until_a_tie(f.token_ids, w) for f, w in zip(found, wanted, strict=True))


def test_user_supplied_policies_and_pools_work_with_graphs(prompts, expected):
    class Last(FirstComeFirstServed):
        def key(self, request):
            return -request.arrival

    class Pool(BlockPool):
        def allocate(self, count):
            return super().allocate(count)[::-1]

    with LLM(dtype="float32", device="cuda", max_num_seqs=7) as llm:
        with minillm.using(policy=Last, block_pool=Pool) as used:
            found = llm.generate(prompts, PLAIN)
        assert llm.engine.executor.runner.graphs.captured.decodes and used.calls["policy"] and used.calls["block_pool"]
        after = llm.generate(prompts, PLAIN)
    for each in (found, after):
        assert all(same_until_a_tie(f.token_ids, e) for f, e in zip(each, expected, strict=True))


def test_a_seeded_request_draws_the_same_tokens_with_and_without_graphs(prompts):
    params = SamplingParams(max_tokens=32, temperature=1, ignore_eos=True, seed=11)
    with LLM(dtype="float32", device="cuda", enforce_eager=True) as llm:
        eager = [llm.generate(prompt, params)[0].token_ids for prompt in prompts[:10]]
    with LLM(dtype="float32", device="cuda") as llm:
        found = [completion.token_ids for completion in llm.generate(prompts[:10], params)]
    assert sum(f == e for f, e in zip(found, eager, strict=True)) >= 9, "at most one draw may fall on a boundary"


def test_an_override_runs_although_graphs_are_enabled(prompts):
    def zeros(q, *args, **kwargs):
        return torch.zeros_like(q)

    with LLM(dtype="float32", device="cuda") as llm:
        before = llm.generate(prompts, PLAIN)
        with minillm.using(decode_attention=zeros) as used:
            during = llm.generate(prompts, PLAIN)
        after = llm.generate(prompts, PLAIN)
    assert used.calls["decode_attention"] > 0
    assert all(d.token_ids != b.token_ids for d, b in zip(during, before, strict=True))
    assert sum(a.token_ids == b.token_ids for a, b in zip(after, before, strict=True)) > len(prompts) * 0.9


@pytest.mark.parametrize("count", [1, 40])
def test_an_override_declared_capturable_runs_in_its_own_graphs(prompts, count):
    def zeros(q, *args, **kwargs):
        return torch.zeros_like(q)

    asked = prompts[:count]
    with LLM(dtype="float32", device="cuda") as llm:
        before = llm.generate(asked, PLAIN)
        graphs = llm.engine.executor.runner.graphs.captured.decodes
        with minillm.using(decode_attention=zeros):
            wanted = llm.generate(asked, PLAIN)
        assert graphs, "eager overrides must not drop the graphs"
        with minillm.using(capturable=True, decode_attention=zeros) as used:
            during = llm.generate(asked, PLAIN)
            assert graphs, "no step ran as a graph"
        after = llm.generate(asked, PLAIN)
    steps_of_mixed_batches = PLAIN.max_tokens * 6 // 2  # half as many calls as there are layers times steps
    assert 0 < used.calls["decode_attention"] < steps_of_mixed_batches, "captured once, replayed without Python"
    assert all(d.token_ids != b.token_ids for d, b in zip(during, before, strict=True))
    assert sum(d.token_ids == w.token_ids for d, w in zip(during, wanted, strict=True)) > count * 0.9
    assert sum(a.token_ids == b.token_ids for a, b in zip(after, before, strict=True)) > count * 0.9


def test_transposed_logits_of_a_user_supplied_head_are_sampled_correctly_after_the_graph(prompts):
    def transposed(hidden, weight):
        return (weight.weight.float() @ hidden.float().T).T

    params = [SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logit_bias={7 + i: 50.0}) for i in range(9)]
    with LLM(dtype="float32", device="cuda") as llm, minillm.using(capturable=True, lm_head=transposed):
        found = llm.generate(prompts[:9], params)
        assert llm.engine.executor.runner.graphs.captured.decodes, "no step ran as a graph"
    assert [set(each.token_ids) for each in found] == [{7 + i} for i in range(9)]


def test_an_override_that_cannot_be_captured_is_named_and_the_engine_stays_usable(prompts):
    def asks_the_host(q, cache, block_table, lengths, **options):
        assert int(lengths.max()) >= 0
        return torch.zeros_like(q)

    with LLM(dtype="float32", device="cuda") as llm:
        before = llm.generate(prompts, PLAIN)
        with (
            minillm.using(capturable=True, decode_attention=asks_the_host),
            pytest.raises(OverrideError, match="leave out capturable=True"),
        ):
            llm.generate(prompts, PLAIN)
        after = llm.generate(prompts, PLAIN)
    assert sum(a.token_ids == b.token_ids for a, b in zip(after, before, strict=True)) > len(prompts) * 0.9


@pytest.mark.parametrize("options", [{"single_row": False}, {"sampling": False}, {"mixed": False}], ids=str)
def test_the_ablations_graph_settings_change_no_tokens(prompts, expected, options):
    with LLM(dtype="float32", device="cuda") as llm:
        runner = llm.engine.executor.runner
        runner.graphs = StepGraphs(runner.model, runner.state, runner.caches, llm.config, **options)
        alone, together = llm.generate(prompts[:1], PLAIN), llm.generate(prompts, PLAIN)
        assert runner.graphs.captured.decodes
    assert same_until_a_tie(alone[0].token_ids, expected[0])
    assert all(same_until_a_tie(f.token_ids, e) for f, e in zip(together, expected, strict=True))


def test_sampling_in_a_graph_follows_the_models_distribution():
    """Chi-square test of the first token drawn in a graph by 4,000 requests that differ only in their seeds."""
    prompt = [5, 6, 7]
    with LLM(dtype="float32", device="cuda", max_num_seqs=500) as llm:
        first = llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0))[0].token_ids[0]
        params = SamplingParams(max_tokens=2, temperature=1, ignore_eos=True, logit_bias=None)
        found = llm.generate([prompt] * 4000, params)
        hidden = llm.generate([*prompt, first], SamplingParams(max_tokens=1, logprobs=20))[0].logprobs[0]
    seconds = [completion.token_ids[1] for completion in found if completion.token_ids[0] == first]
    likely = {token: 2.718281828**value for token, value in hidden.items() if 2.718281828**value * len(seconds) >= 5}
    assert len(seconds) > 200 and likely, "expected counts are too small for this test"
    deviation = sum((seconds.count(t) - p * len(seconds)) ** 2 / (p * len(seconds)) for t, p in likely.items())
    assert deviation < len(likely) + 5 * (2 * len(likely)) ** 0.5 + 5


def test_steady_decoding_allocates_nothing(prompts):
    with LLM(dtype="float32", device="cuda") as llm:
        llm.generate(prompts, PLAIN)
        for prompt in prompts:
            llm.engine.submit(llm.engine.prepare(prompt, PLAIN))
        for _ in range(8):
            llm.engine.step()
        before = torch.cuda.memory_stats()["num_device_alloc"]
        for _ in range(20):
            llm.engine.step()
        assert torch.cuda.memory_stats()["num_device_alloc"] == before
