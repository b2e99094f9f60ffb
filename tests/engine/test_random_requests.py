"""Random requests and random aborts: every token is the one its parameters choose, and nothing leaks.

On a GPU with kernels, CUDA graphs and run-ahead, in float32 with TF32 off; on a CPU with fewer requests. The expected
tokens come from transformers (`teacher.py`).
"""

import itertools
import random

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import minillm
from minillm import LLM, RequestOptions, SamplingParams
from minillm.engine import Engine
from minillm.engine.engine import Tracked
from tests import models
from tests.chance import SEED, TIMES
from tests.emulated_graphs import emulated_graphs
from tests.proofs import only_in_proofs
from tests.teacher import Teacher

pytestmark = pytest.mark.explore
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
REQUESTS = 500 if ON_GPU else 40
KINDS = {
    "greedy": {"temperature": 0},
    "temperature 1": {"temperature": 1},
    "temperature 0.7": {"temperature": 0.7},
    "seeded": {"temperature": 1.3, "seed": 5},
    "top_k": {"temperature": 1, "top_k": 7},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "min_p": {"temperature": 1, "min_p": 0.05},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "greedy penalties": {"temperature": 0, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {7: 5.0, 40: -100.0}},
    "min_tokens": {"temperature": 1, "min_tokens": 6, "stop_token_ids": [300, 301, 302]},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "prompt_logprobs": {"temperature": 1, "prompt_logprobs": 1},
}
# All others but truncation are sampled after the graph, so half of the requests or nearly all are of these kinds.
OFTEN = ["greedy", "temperature 1", "temperature 0.7", "seeded"]
EDGES = ("top_k", "top_p", "min_p")  # a near-tie at the cutoff shifts every draw, about once in 10,000 tokens


@pytest.fixture(scope="module", autouse=True)
def exact_products():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="module")
def teacher():
    return Teacher(device=DEVICE)


def random_request(
    rng: random.Random, longest: int = 120, often: float = 0.5, kind: str | None = None
) -> tuple[list[int], SamplingParams, str]:
    """Prompt, parameters and their kind, which is drawn unless given."""
    kind = kind or (rng.choice(OFTEN) if rng.random() < often else rng.choice(list(KINDS)))
    shared = [17 + i % 50 for i in range(rng.choice([0, 0, 20, 64]))]  # prefixes that other requests share
    prompt = shared + [rng.randrange(4, 4000) for _ in range(rng.randint(1, longest))]
    ends = rng.random() < 0.3 and kind != "min_tokens"
    most = max(rng.randint(1, 40), KINDS[kind].get("min_tokens", 0))
    return prompt, SamplingParams(max_tokens=most, ignore_eos=not ends, **KINDS[kind]), kind


def judge(teacher: Teacher, requests: list[tuple[Tracked, str]]) -> tuple[int, int, int]:
    """(tokens, wrong tokens, wrong tokens of requests with a cutoff)."""
    tokens = wrong = at_edges = 0
    for tracked, kind in requests:
        errors = teacher.errors(tracked.completion, tracked.request.params, tracked.request.seed)
        tokens += len(tracked.completion.token_ids)
        if errors:
            ids = tracked.completion.prompt_token_ids, tracked.completion.token_ids
            print(f"{kind}, seed {tracked.request.seed}: {errors} wrong after {ids[0]}: {ids[1]}")
        if kind in EDGES:
            at_edges += errors
        else:
            wrong += errors
    return tokens, wrong, at_edges


def count_replays(monkeypatch) -> dict[str, int]:
    """Count the steps that run as graphs from now on, by kind; zero where there are no graphs."""
    replayed = {"DecodeGraphs": 0, "MixedGraphs": 0}
    if ON_GPU:
        from minillm.runner.decode_graphs import DecodeGraphs
        from minillm.runner.mixed_graphs import MixedGraphs

        for kind in (DecodeGraphs, MixedGraphs):

            def counting(graphs, step, shape, name=kind.__name__, own=kind.replay):
                sampled = own(graphs, step, shape)
                replayed[name] += sampled is not None
                return sampled

            monkeypatch.setattr(kind, "replay", counting)
    return replayed


def drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
    engine.scheduler.check()
    assert not engine.tracked and not len(engine.scheduler.order) and not engine.scheduler.waiting
    stats, rows = engine.stats(), engine.config.max_num_seqs
    assert stats["blocks_available"] == stats["blocks"], "blocks leaked"
    assert sorted(engine.scheduler._free_rows) == list(range(rows)), "rows leaked"


OPTIONS = [
    {"max_num_seqs": 32, "max_num_batched_tokens": 300, "num_blocks": 60, "run_ahead": 2},
    {"max_num_seqs": 7, "max_num_batched_tokens": 64, "num_blocks": 60, "run_ahead": 3, "block_size": 8},
    {"max_num_seqs": 1, "run_ahead": 3},  # batches of one: the fused step on a GPU
    {"max_num_seqs": 24, "max_num_batched_tokens": 300, "num_blocks": 60, "run_ahead": 2, "often": 0.99},
]
SHORT = OPTIONS[::2] if ON_GPU else OPTIONS[:1]
MORE = [each for each in OPTIONS if each not in SHORT]


@pytest.mark.parametrize(
    "options", SHORT + only_in_proofs(*MORE), ids=lambda options: f"{options['max_num_seqs']} rows"
)
def test_random_requests_with_random_aborts_get_the_right_tokens(options, teacher, monkeypatch):
    rng, often = random.Random(SEED + 11), options.get("often", 0.5)
    kinds = list(KINDS if often < 0.9 else OFTEN)  # each at least once, whatever is drawn
    replayed = count_replays(monkeypatch)
    with LLM(dtype="float32", device=DEVICE, **{k: v for k, v in options.items() if k != "often"}) as llm:
        engine, requests, aborted = llm.engine, [], False
        while len(requests) < REQUESTS or engine.tracked:
            while len(requests) < REQUESTS and rng.random() < 0.6:
                prompt, params, kind = random_request(rng, often=often, kind=kinds.pop() if kinds else None)
                requests.append((engine.prepare(prompt, params, wants_text=False), kind))
                engine.submit(requests[-1][0])
            if engine.tracked and (rng.random() < 0.04 or (len(requests) > REQUESTS // 2 and not aborted)):
                engine.abort(rng.choice(list(engine.tracked)))
                aborted = True
            engine.step()
            engine.scheduler.check()
        drain(engine)
        preempted, steps = engine.scheduler.preemptions, engine.scheduler.newest
        graphs = engine.executor.runner.graphs
        decodes, mixed = replayed["DecodeGraphs"], replayed["MixedGraphs"]
        print(f"{steps} steps; as graphs {decodes} of decodes, {mixed} with prompts")
        assert not ON_GPU or mixed > 50 < decodes, "too few steps ran as graphs"
        fused = not ON_GPU or options["max_num_seqs"] > 1 or graphs.decodes.single_row is not None
        assert fused, "the fused step never ran"
    reasons = {tracked.completion.finish_reason for tracked, _ in requests}
    assert reasons >= {"abort", "length"} and not kinds
    # With some other seeds no request lacks blocks.
    assert preempted or "num_blocks" not in options or SEED, "no request was preempted: there are too many blocks"
    tokens, wrong, at_edges = judge(teacher, requests)
    print(f"{len(requests)} requests, {tokens} tokens, {wrong} wrong, {at_edges} at edges, {preempted} preemptions")
    assert tokens > 8 * REQUESTS
    assert wrong == 0 and at_edges <= 1 + tokens / 5000


def test_the_teacher_detects_wrong_tokens(teacher):
    def zeros(q, *args, **kwargs):
        return torch.zeros_like(q)

    rng = random.Random(SEED + 3)
    with LLM(dtype="float32", device=DEVICE) as llm:
        drawn = [random_request(rng) for _ in range(12)]
        with minillm.using(decode_attention=zeros) as used:
            requests = [(llm.engine.prepare(prompt, params), kind) for prompt, params, kind in drawn]
            for tracked, _ in requests:
                llm.engine.submit(tracked)
            drain(llm.engine)
    assert used.calls["decode_attention"]
    tokens, wrong, _ = judge(teacher, requests)
    assert wrong > tokens / 20


class EngineMachine(RuleBasedStateMachine):
    """Submit, abort and step in any order; every finished or aborted request has the right tokens."""

    llm: LLM
    teacher: Teacher

    def __init__(self):
        super().__init__()
        self.requests: list[tuple[Tracked, str]] = []
        # All examples share an engine, so each starts from the same state: a failure must be reproducible.
        self.llm.engine._counter = itertools.count(1)
        self.llm.engine.scheduler.pool.forget()

    @rule(seed=st.integers(0, 10**6), count=st.integers(1, 4))
    def submit(self, seed, count):
        rng = random.Random(seed)
        for _ in range(count):
            prompt, params, kind = random_request(rng, longest=30)
            self.requests.append((self.llm.engine.prepare(prompt, params, wants_text=False), kind))
            self.llm.engine.submit(self.requests[-1][0])

    @precondition(lambda self: self.llm.engine.tracked)
    @rule(choice=st.integers(0, 10**6))
    def abort(self, choice):
        running = list(self.llm.engine.tracked)
        self.llm.engine.abort(running[choice % len(running)])

    @rule(count=st.integers(1, 12))
    def step(self, count):
        for _ in range(count):
            self.llm.engine.step()

    @invariant()
    def scheduler_invariants_hold(self):
        self.llm.engine.scheduler.check()

    def teardown(self):
        drain(self.llm.engine)
        tokens, wrong, at_edges = judge(self.teacher, self.requests)
        assert wrong == 0 and at_edges <= 1
        for tracked, _ in self.requests:
            if tracked.completion.finish_reason == "length":
                assert len(tracked.completion.token_ids) == tracked.request.params.max_tokens


@pytest.mark.parametrize("run_ahead, rows", [(3, 5), *only_in_proofs((0, 5), (1, 5), (2, 1))])
def test_any_order_of_submitting_aborting_and_stepping_gives_each_request_its_tokens(run_ahead, rows, teacher):
    options = {"max_num_seqs": rows, "max_num_batched_tokens": 40, "num_blocks": 40, "block_size": 8}
    with LLM(dtype="float32", device=DEVICE, run_ahead=run_ahead, **options) as llm:
        machine = type("Machine", (EngineMachine,), {"llm": llm, "teacher": teacher})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=(25 if ON_GPU else 2) * TIMES,
                stateful_step_count=25 if ON_GPU else 12,
                suppress_health_check=list(HealthCheck),
            ),
        )


# On a GPU a row alone is sampled by another kernel; on a CPU all rows are sampled by the same operation.
SAMPLED = [(1.0, 64), *([(0.7, 1), (1.0, 1), (0.7, 64)] if ON_GPU else only_in_proofs((0.7, 1)))]


@pytest.mark.parametrize("temperature, rows", SAMPLED)
def test_sampling_follows_the_models_distribution(temperature, rows, teacher):
    """Chi-square test: by rank, each token has an interval of [0, 1]; take a random point in the drawn token's.

    If tokens are drawn with their probabilities, these points are uniform. Against a distribution at half or twice
    the temperature they must not be.
    """
    count, length, bins = 64, 64 if ON_GPU else 32 if rows > 1 else 16, 8
    params = SamplingParams(max_tokens=length, temperature=temperature, ignore_eos=True)
    rng = random.Random(SEED + 5)
    prompts = [[rng.randrange(4, 4000) for _ in range(rng.randint(1, 30))] for _ in range(count)]
    with LLM(dtype="float32", device=DEVICE, max_num_seqs=rows) as llm:
        found = llm.generate(prompts, params)
        assert not ON_GPU or any(size <= rows for size, _ in llm.engine.executor.runner.graphs.captured.decodes)
    logits = torch.cat([teacher.logits(each.prompt_token_ids, each.token_ids) for each in found])
    tokens = torch.tensor([token for each in found for token in each.token_ids])

    def deviation(factor: float) -> float:
        chances = (logits / factor).softmax(-1)
        own = chances.gather(1, tokens[:, None])
        likelier = torch.where(chances > own, chances, 0.0).sum(-1)
        generator = torch.Generator().manual_seed(SEED)
        points = likelier + own[:, 0] * torch.rand(len(tokens), generator=generator, dtype=torch.float64)
        counts, expected = torch.histc(points, bins, 0, 1), len(tokens) / bins
        return ((counts - expected) ** 2 / expected).sum().item()

    limit = bins - 1 + 8 * (2 * (bins - 1)) ** 0.5  # exceeded by chance in five of a million runs
    deviations = {factor: deviation(factor * temperature) for factor in (1.0, 0.5, 2.0)}
    print(f"chi-square {deviations}, limit {limit:.1f}, {bins - 1} degrees of freedom")
    assert deviations[1.0] < limit < min(deviations[0.5], deviations[2.0])


@pytest.mark.skipif(ON_GPU, reason="a GPU has real graphs, and kernels are not interpreted on it")
@pytest.mark.proof
@pytest.mark.parametrize("rows, budget", [(3, 13), (1, 32)])
def test_emulated_graphs_give_each_request_its_tokens(rows, budget, tmp_path):
    """Device state, padding and the fused single-row step as on a GPU, with interpreted kernels."""
    pytest.importorskip("minillm.runner.decode_graphs", reason="graphs need triton, which is not installed here")
    models.make("gemma-multi-query", num_hidden_layers=2).save_pretrained(tmp_path)  # interpreting takes seconds a step
    rng = random.Random(SEED + 4)
    options = {"max_num_seqs": rows, "max_num_batched_tokens": budget, "run_ahead": 2, "num_blocks": 30}
    with emulated_graphs(), LLM(tmp_path, dtype="float32", **options) as llm:
        engine, requests = llm.engine, []
        while len(requests) < 4 * rows or engine.tracked:
            if len(requests) < 4 * rows and rng.random() < 0.7:
                kind = rng.choice([*OFTEN, *EDGES, "penalties"])
                params = SamplingParams(max_tokens=rng.randint(4, 8), ignore_eos=True, **KINDS[kind])
                prompt = [rng.randrange(1, 96) for _ in range(rng.randint(1, 24))]
                requests.append((engine.prepare(prompt, params), kind))
                engine.submit(requests[-1][0])
            # The first request and the last are never aborted: with any seed, they decode in graphs.
            others = [each for each, _ in requests[1 : 4 * rows - 1] if each in engine.tracked.values()]
            if others and rng.random() < 0.04:
                engine.abort(rng.choice(others))
            engine.step()
        drain(engine)
        graphs = engine.executor.runner.graphs
        assert graphs.decodes.single_row is not None
        assert sum(each.graph.count for each in graphs.captured.decodes.values()) >= 3
        assert sum(each.graph.count for each in graphs.captured.mixed.values()) >= 1
    tokens, wrong, _ = judge(Teacher(tmp_path), requests)
    assert tokens >= 8 and wrong == 0


# ---- in float64 every token equals that of the request alone

ALONE = {"dtype": "float64", "device": "cpu", "run_ahead": 0, "enable_prefix_caching": False}
SCHEDULES = [  # (model, budget, policy, options): few rows, and blocks for only two or three requests
    ("gemma-multi-query", 5, "static", {"run_ahead": 2, "max_num_seqs": 4, "num_blocks": 19}),
    ("gemma-multi-query", 64, "shortest", {"run_ahead": 1, "block_size": 1, "num_blocks": 110}),
    ("gemma2-multi-query", 24, "priority", {"run_ahead": 2, "num_blocks": 60}),
]
MORE_SCHEDULES = [
    ("gemma-multi-query", 5, "static", {"run_ahead": 2, "max_num_seqs": 3, "num_blocks": 20}),
    ("gemma-multi-query", 1, "fcfs", {"run_ahead": 1, "num_blocks": 20}),
    ("gemma-multi-query", 16, "priority", {"run_ahead": 3, "num_blocks": 31}),
    ("gemma-multi-query", 512, "fcfs", {"run_ahead": 0, "block_size": 7, "num_blocks": 20}),
    ("gemma2-multi-query", 512, "shortest", {"run_ahead": 4, "num_blocks": 60}),
]
FEW, MANY = 48, 72  # requests


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Small models whose next token depends on every component, by name."""
    found = {}
    for name in {name for name, *_ in SCHEDULES + MORE_SCHEDULES}:
        found[name] = tmp_path_factory.mktemp(name)
        models.make(name).save_pretrained(found[name])
    return found


def draw_requests(rng: random.Random, count: int) -> list[tuple[list[int], SamplingParams]]:
    """Requests with shared prefixes, greedy and seeded, from two tenants; some opt out of the prefix cache."""
    common = [[rng.randrange(1, 96) for _ in range(45)] for _ in range(count)]
    drawn = []
    for place in range(count):
        # Requests with one prefix arrive close together, but not so close that all are there when the first is aborted.
        beginning = common[place // 6 + rng.choice([0, 0, 1])][: rng.choice([0, 9, 45, 45])]
        prompt = beginning + [rng.randrange(1, 96) for _ in range(rng.randint(1, 12))]
        chosen = {"temperature": 0} if rng.random() < 0.5 else {"temperature": 1, "seed": rng.randrange(99)}
        ends = {"stop_token_ids": [rng.randrange(96) for _ in range(8)]} if rng.random() < 0.3 else {}
        shares = {"cache_salt": rng.choice("aaab"), "use_prefix_cache": rng.random() < 0.9}
        params = SamplingParams(**chosen, **ends, max_tokens=rng.randint(1, 18), ignore_eos=True)
        drawn.append((prompt, params, RequestOptions(**shares, priority=rng.randrange(3))))
    return drawn


class Recorder:
    """A client that records its tokens and its finish reason."""

    def __init__(self):
        self.tokens, self.ends = [], []

    def __call__(self, delta) -> None:
        assert not self.ends, "got a delta after the end"
        self.tokens += delta.token_ids
        self.ends += [delta.finish_reason] if delta.finish_reason else []


@pytest.mark.parametrize(
    "model, budget, policy, more, count",
    [*((*each, FEW) for each in SCHEDULES), *only_in_proofs(*((*each, MANY) for each in MORE_SCHEDULES))],
)
def test_random_requests_get_the_same_tokens_as_alone_under_any_schedule(
    model, budget, policy, more, count, directories
):
    """Random aborts, a tiny pool, chunks of 1 to 512 tokens, shared prefixes, every policy, run-ahead."""
    rng = random.Random(SEED + budget)
    drawn = draw_requests(rng, count)
    with LLM(directories[model], max_num_seqs=1, **ALONE) as llm:
        alone = [llm.generate(prompt, params, options)[0] for prompt, params, options in drawn]
    options = {"max_num_seqs": 12, "block_size": 4, "num_blocks": 30, "max_model_len": 80} | more
    with LLM(
        directories[model], dtype="float64", device="cpu", max_num_batched_tokens=budget, policy=policy, **options
    ) as llm:
        engine, requests, heard = llm.engine, [], {}
        while len(requests) < count or engine.tracked:
            while len(requests) < count and (rng.random() < 0.7 or not engine.tracked):
                prompt, params, options = drawn[len(requests)]
                listener = Recorder() if rng.random() < 0.5 else None
                requests.append(engine.prepare(prompt, params, options, listener=listener))
                heard[len(requests) - 1] = listener
                engine.submit(requests[-1])
            if engine.tracked and rng.random() < (0.01 if budget < 16 else 0.04):
                newest = rng.choice([1, 12])  # often in the middle of prefill
                engine.abort(rng.choice(list(engine.tracked)[-newest:]))
            engine.step()
            engine.scheduler.check()
        drain(engine)
        stats = engine.stats()
        assert not engine._watched, "a listener leaked"
    for place, (tracked, expected) in enumerate(zip(requests, alone, strict=True)):
        found = tracked.completion
        if found.finish_reason == "abort":
            assert found.token_ids == expected.token_ids[: len(found.token_ids)], f"request {place}"
        else:
            assert (found.token_ids, found.finish_reason) == (expected.token_ids, expected.finish_reason), place
        if (listener := heard[place]) is not None:
            assert listener.ends == [found.finish_reason] and listener.tokens == found.token_ids
    reasons = [tracked.completion.finish_reason for tracked in requests]
    assert set(reasons) == {"abort", "length", "stop"} and reasons.count("abort") < count / 2
    # At one token per step, requests hardly overlap; sliding windows free blocks as rows grow.
    # With some other seeds no request lacks blocks.
    scarce = budget > 1 and model == "gemma-multi-query"
    assert stats["preemptions"] > 0 or not scarce or SEED, "no request was preempted: there are too many blocks"
    assert stats["prefix_hit_tokens"] > count / 2, "nothing was shared"
    varied = [len(set(each.token_ids)) > 1 for each in alone if len(each.token_ids) > 6]
    assert sum(varied) > 0.9 * len(varied), "the model repeats itself"
