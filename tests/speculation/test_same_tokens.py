"""With and without drafts a request gets the same tokens: text, log-probabilities and reasons too. Float64, CPU."""

import itertools
import random
import shutil
from contextlib import nullcontext

import pytest
import torch

import minillm
from minillm import LLM, RequestOptions, SamplingParams
from minillm.model.loader import EMBEDDED
from minillm.runner.executor import WatchedExecutor
from minillm.scheduler import Scheduler
from minillm.speculation import Speculation, every_draft_runs
from tests import models
from tests.chance import SEED
from tests.consistent import scheduler_is_consistent_after_every_step  # noqa: F401
from tests.emulated_graphs import emulated_graphs
from tests.proofs import only_in_proofs
from tests.speculation.proposers import Coin, Oracle, following

pytestmark = pytest.mark.explore

# What a request may ask for; each is drawn on its own.
OPTIONS = [
    [{"temperature": 0}, {"temperature": 0}, {"temperature": 0.2}, {"temperature": 0.7}, {"temperature": 1.3}],
    [{}, {}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}],
    [{}, {}, {"repetition_penalty": 1.2}, {"presence_penalty": 0.5, "frequency_penalty": 0.3}],
    [{}, {}, {"logprobs": 0}, {"logprobs": 3}, {"prompt_logprobs": 1}],
    [{}, {}, {"stop": ["the", "ow"]}, {"stop": ["girl"]}, {"stop_token_ids": [300, 301, 302, 310]}],
    [
        {},
        {"logit_bias": dict.fromkeys((284, 300, 310, 320), 12.0)},
        {"logit_bias": {290: 9.0, 291: 8.0}},
        {"min_tokens": 5},
    ],
]
GRAMMARS = [{"regex": "(ab|ba|[0-9])*"}, {"regex": "[a-z ]{5,30}\\."}, {"json_schema": {"type": "object"}}]
SENTENCES = [
    "Once upon a time",
    "there was a little girl",
    "who had a dog",
    "and the dog saw",
    "a big red ball",
    '{"a": 1}',
]
REPEATED = ". ".join(SENTENCES[:4] * 3)
# What an engine may have. Windows are another model's: see below.
ENGINES = {
    "alone": {"max_num_seqs": 1},
    "batched": {"max_num_seqs": 16, "run_ahead": 2},
    "chunked": {"max_num_seqs": 8, "max_num_batched_tokens": 13, "block_size": 4, "run_ahead": 0},
    "preempted": {"max_num_seqs": 12, "num_blocks": 51, "block_size": 4, "max_model_len": 200},
    "no prefix cache": {"max_num_seqs": 6, "enable_prefix_caching": False, "speculate_tokens": 2},
    "int8 cache": {"max_num_seqs": 8, "kv_cache_dtype": "int8", "speculate_tokens": 4},
    "fp8 cache": {"max_num_seqs": 8, "kv_cache_dtype": "fp8", "speculate_tokens": 12},
    "int8 weights": {"max_num_seqs": 8, "quantization": "int8"},
}
SHORT = ["batched", "chunked", "preempted", "int8 cache"]
AT_ONCE = ["alone", "batched", "preempted", "int8 weights"]


def requests(count: int, seed: int) -> tuple[list[str], list[SamplingParams]]:
    """Prompts that repeat themselves, and parameters of all kinds. Each request has a seed."""
    rng = random.Random(SEED + seed)
    prompts, params = [], []
    for i in range(count):
        parts = [rng.choice(SENTENCES) for _ in range(rng.randint(1, 6))]
        prompts.append(". ".join(parts * rng.randint(1, 2)))
        asked = {key: value for group in OPTIONS for key, value in rng.choice(group).items()}
        if rng.random() < 0.2:
            asked = {key: value for key, value in asked.items() if key != "min_tokens"} | rng.choice(GRAMMARS)
        elif rng.random() < 0.7:
            asked["ignore_eos"] = True
        most = rng.randint(asked.get("min_tokens", 1), 40)
        params.append(SamplingParams(max_tokens=most, seed=rng.randrange(1000), n=1 + (i % 11 == 0), **asked))
    return prompts, params


def outcomes(llm: LLM, prompts, params, options=None) -> list[tuple]:
    found = [each for done in llm.generate(prompts, params, options) for each in done.outputs]
    llm.engine.scheduler.check()
    stats = llm.stats()
    assert stats["blocks_available"] == stats["blocks"], "blocks leaked"
    return [
        (each.prompt_token_ids, each.token_ids, each.text, each.finish_reason, each.stop_reason, each.text_offsets,
         numbers(each.logprobs), numbers(each.prompt_logprobs))
        for each in found
    ]  # fmt: skip


class Numbers(dict):
    """Log-probabilities, equal to others within a tolerance: the order of sums differs between a step of one query and
    of several, and norms are float32 in a float64 model, too."""

    def __eq__(self, other):
        return self.keys() == other.keys() and all(abs(self[each] - other[each]) < 1e-5 for each in self)

    def __ne__(self, other):
        return not self == other


def numbers(logprobs):
    return None if logprobs is None else [None if each is None else Numbers(each) for each in logprobs]


@pytest.fixture(autouse=True)
def all_drafts_run(request):
    """However long steps take on this machine, except where a test is about that."""
    with nullcontext() if "by_the_clock" in request.fixturenames else every_draft_runs():
        yield


@pytest.fixture
def by_the_clock():
    """The engine decides by measured times which drafts run."""


def differences(expected: list[tuple], found: list[tuple]) -> list[tuple]:
    return [pair for pair in zip(expected, found, strict=True) if pair[0] != pair[1]]


@pytest.mark.parametrize(
    ("engine", "count"), [*((name, 10) for name in SHORT), *only_in_proofs(*((name, 128) for name in ENGINES))]
)
def test_prompt_lookup_changes_nothing_that_a_request_gets(engine, count, monkeypatch):
    """In `make proofs`, 1,024 requests in all. Half of the engines launch steps as on a GPU."""
    if engine in AT_ONCE:
        monkeypatch.setattr(Scheduler, "continues_at_once", property(lambda scheduler: not scheduler.matchers))
    prompts, params = requests(count, seed=len(engine) + count)
    made = {"dtype": "float64", "device": "cpu", "num_blocks": 600} | ENGINES[engine]
    with LLM(**{key: value for key, value in made.items() if key != "speculate_tokens"}) as plain:
        expected = outcomes(plain, prompts, params)
        preempted = plain.stats()["preemptions"]
    with LLM(**made, speculate="ngram") as llm:
        assert differences(expected, outcomes(llm, prompts, params)) == []
        stats = llm.stats()
    assert (preempted > 0) == (engine == "preempted")
    assert stats["draft_tokens"] > count and 0 < stats["accepted_tokens"] < stats["draft_tokens"]
    assert {each[3] for each in expected} == {"stop", "length"} or count < 24


@pytest.mark.parametrize("asked", [{}, {"regex": "[a-z ]+"}])
def test_the_next_step_is_launched_before_requests_get_their_tokens(asked, monkeypatch):
    """On a GPU, which would be idle meanwhile. A grammar has to read the tokens first."""
    monkeypatch.setattr(Speculation, "runs_ahead", property(lambda _: True, lambda _, value: None), raising=False)
    params, launched, given = SamplingParams(max_tokens=40, temperature=0, ignore_eos=not asked, **asked), [], []

    class Watched(WatchedExecutor):
        def launch(self, step):
            launched.append(step)
            return super().launch(step)

    with LLM(dtype="float64", device="cpu", speculate="ngram") as llm:
        engine = llm.engine

        def listener(delta):
            given.append((delta, launched[-1].number > engine.scheduler.read and launched[-1].drafts is not None))

        (expected,) = outcomes(llm, ["Once"], params)
        known = following([expected[0] + expected[1]])
        with minillm.using(proposer=lambda: Oracle(known)), engine.running_on(Watched(engine.executor)):
            engine.submit(engine.prepare("Once", params, listener=listener))
            while engine.has_work:
                engine.step()
    assert [token for delta, _ in given for token in delta.token_ids] == expected[1]
    assert "".join(delta.text for delta, _ in given) == expected[2]
    assert any(ahead for _, ahead in given) == (not asked)


@pytest.fixture
def replays(monkeypatch):
    """Of steps with drafts, whether each was a graph, by whether it also runs prompts. Graphs are emulated."""
    pytest.importorskip("triton", reason="graphs need triton, which is not installed here")
    from minillm.runner.step_graphs import StepGraphs

    found, replay = {True: [], False: []}, StepGraphs.replay

    def counted(graphs, step):
        replayed = replay(graphs, step)
        if step.drafts is not None:
            found[bool((step.queries != step.drafted + 1).any())].append(replayed is not None)
        return replayed

    monkeypatch.setattr(StepGraphs, "replay", counted)
    with emulated_graphs():
        yield found


def as_on_a_gpu(llm: LLM) -> None:
    """Let steps yield no more tokens than a GPU has memory for."""
    speculation = llm.engine.scheduler.speculation
    speculation.most_yielded = max(llm.engine.config.max_num_seqs, speculation.most + 1)


@pytest.mark.proof
def test_steps_with_drafts_run_as_graphs_and_change_nothing(tmp_path, replays):
    """In float32; both engines sample with the graphs' kernels. The model has windows, so blocks come and go."""
    models.make("gemma2-grouped-untied").save_pretrained(tmp_path)
    rng = random.Random(SEED + 7)
    asked = [
        {},
        {"logprobs": 1},
        {"repetition_penalty": 1.3},
        {"top_p": 0.9},
        {"logit_bias": {3: 2.0}},
        {"min_tokens": 9},
    ]
    prompts = [[rng.randrange(2, 90) for _ in range(rng.randint(1, 20))] for _ in range(12)]
    params = [
        SamplingParams(max_tokens=rng.randint(9, 16), temperature=i % 3 / 2, seed=i, **asked[i % 6]) for i in range(12)
    ]
    made = {"dtype": "float32", "device": "cpu", "block_size": 4, "num_blocks": 120, "max_num_seqs": 5}
    made |= {"max_num_batched_tokens": 16}
    with LLM(tmp_path, **made) as plain:
        expected = outcomes(plain, prompts, params)
    outputs = following([prompt + output for prompt, output, *_ in expected])
    with (
        LLM(tmp_path, **made, speculate="ngram", speculate_tokens=5) as llm,
        minillm.using(proposer=lambda: Coin(outputs, 96, 0.8)),
    ):
        llm.engine._adopt()
        as_on_a_gpu(llm)
        assert differences(expected, outcomes(llm, prompts, params)) == []
        stats = llm.stats()
    assert 0 < stats["accepted_tokens"] < stats["draft_tokens"]
    assert all(each and all(each) for each in replays.values())


@pytest.mark.parametrize(("engine", "count"), only_in_proofs(("alone", 1)))
def test_graphs_with_drafts_change_nothing_that_a_request_gets(engine, count, replays):
    """One request of tiny-gemma, whose interpreted kernels take minutes; the test above has the options of engines."""
    prompts, params = requests(count, seed=count)
    made = {"dtype": "float32", "device": "cpu", "num_blocks": 600} | ENGINES[engine]
    with LLM(**{key: value for key, value in made.items() if key != "speculate_tokens"}) as plain:
        expected = outcomes(plain, prompts, params)
    with LLM(**made, speculate="ngram") as llm:
        as_on_a_gpu(llm)
        assert differences(expected, outcomes(llm, prompts, params)) == []
        stats = llm.stats()
    assert 0 < stats["accepted_tokens"] <= stats["draft_tokens"]
    assert len(replays[False]) > count and all(replays[False]) and all(replays[True])


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    """A model that is mostly right about tiny-gemma: the same with some noise."""
    place = tmp_path_factory.mktemp("draft")
    model = models.reference(EMBEDDED, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data += 0.15 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(place)
    shutil.copy(EMBEDDED / "tokenizer.json", place)
    return place


@pytest.mark.parametrize(("engine", "count"), [("preempted", 8), *only_in_proofs(*((name, 64) for name in ENGINES))])
def test_a_draft_model_changes_nothing_that_a_request_gets(engine, count, draft):
    prompts, params = requests(count, seed=len(engine) + count)
    made = {"dtype": "float64", "device": "cpu", "num_blocks": 600} | ENGINES[engine]
    with LLM(**{key: value for key, value in made.items() if key != "speculate_tokens"}) as plain:
        expected = outcomes(plain, prompts, params)
    with LLM(**made, speculate=draft) as llm:
        assert differences(expected, outcomes(llm, prompts, params)) == []
        stats, own = llm.stats(), llm.engine.draft_model
        assert not own.rows and own.pool.available == own.pool.num_blocks
    least = 0.5 if engine == "chunked" else 3  # a budget of 13 tokens a step leaves little for drafts
    assert stats["draft_tokens"] > least * count and stats["accepted_tokens"] > stats["draft_tokens"] / 5


@pytest.mark.proof
@pytest.mark.parametrize("speculate", ["ngram", EMBEDDED], ids=["ngram", "draft model"])
def test_drafts_change_nothing_where_ranks_share_the_model(speculate):
    prompts, params = [REPEATED, "There was a dog"], SamplingParams(max_tokens=24, temperature=0.7, seed=1)
    made = {"dtype": "float64", "device": "cpu", "num_blocks": 100}
    with LLM(**made) as plain:
        expected = outcomes(plain, prompts, params)
    with LLM(**made, speculate=speculate, tensor_parallel_size=2) as llm:
        assert differences(expected, outcomes(llm, prompts, params)) == []
        assert llm.stats()["accepted_tokens"] > (20 if speculate == EMBEDDED else -1)


def test_a_model_that_drafts_for_itself_is_always_right():
    """Whatever the parameters are, but for grammars, which drafts do not know."""
    prompts, params = requests(8, seed=5)
    kept = [i for i, each in enumerate(params) if each.grammar is None]
    prompts, params = [prompts[i] for i in kept], [params[i] for i in kept]
    with LLM(dtype="float64", device="cpu", speculate=EMBEDDED, max_num_seqs=4, max_num_batched_tokens=40) as llm:
        outcomes(llm, prompts, params)
        stats = llm.stats()
    assert stats["draft_tokens"] == stats["accepted_tokens"] > 5 * len(prompts)


@pytest.mark.parametrize("right, count", [(0.0, 10), (0.8, 10), *only_in_proofs((0.0, 16), (0.8, 16))])
def test_drafts_that_are_right_or_wrong_by_a_coin_change_nothing(right, count):
    prompts, params = requests(count, seed=3)
    made = {"dtype": "float64", "device": "cpu", "num_blocks": 600, "max_num_seqs": count * 2 // 3, "seed": 2}
    with LLM(**made) as plain:
        expected = outcomes(plain, prompts, params)
    outputs = following([prompt + output for prompt, output, *_ in expected])
    with (
        LLM(**made, speculate="ngram") as llm,
        minillm.using(proposer=lambda: Coin(outputs, llm.model_config.vocab_size, right)) as used,
    ):
        assert differences(expected, outcomes(llm, prompts, params)) == []
        stats = llm.stats()
    assert used.calls["proposer"] > count < stats["draft_tokens"]
    assert (stats["accepted_tokens"] > stats["draft_tokens"] / 4) == (right > 0), "some are right by chance"


WINDOWED = [("gemma2-grouped-untied", 9), ("gemma3-multi-query", 2048)]
MORE_WINDOWED = [("gemma2-grouped-untied", 2048), ("gemma3-multi-query", 9)]


@pytest.mark.parametrize(
    "name, budget",
    [*WINDOWED, *only_in_proofs(*MORE_WINDOWED, *(("mistral-grouped", budget) for budget in (2048, 9)))],
)
def test_drafts_change_nothing_where_layers_have_windows(name, budget, tmp_path):
    """Windows hide blocks that come back into sight when drafts are rejected."""
    models.make(name).save_pretrained(tmp_path)
    rng = random.Random(SEED + 6)
    prompts = [[rng.randrange(2, 90) for _ in range(rng.randint(1, 30))] for _ in range(12)]
    params = [
        SamplingParams(max_tokens=rng.randint(1, 50), temperature=i % 3 / 2, seed=i, logprobs=1, repetition_penalty=1.1)
        for i in range(12)
    ]
    made = {"dtype": "float64", "device": "cpu", "block_size": 4, "num_blocks": 120, "max_num_seqs": 6}
    made |= {"max_num_batched_tokens": budget}
    with LLM(tmp_path, **made) as plain:
        expected = outcomes(plain, prompts, params)
    outputs = following([prompt + output for prompt, output, *_ in expected])
    with LLM(tmp_path, **made, speculate="ngram") as llm, minillm.using(proposer=lambda: Coin(outputs, 96, 0.8)):
        assert differences(expected, outcomes(llm, prompts, params)) == []
        stats = llm.stats()
    assert 30 < stats["accepted_tokens"] < stats["draft_tokens"]


def test_a_proposer_that_knows_the_output_saves_most_steps():
    prompts = ["Once upon a time", "The dog"]
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=1, ignore_eos=True)
    with LLM(dtype="float64", device="cpu", run_ahead=0) as plain:
        expected = outcomes(plain, prompts, params)
    outputs = following([prompt + output for prompt, output, *_ in expected])
    with LLM(dtype="float64", device="cpu", speculate="ngram") as llm, minillm.using(proposer=lambda: Oracle(outputs)):
        assert outcomes(llm, prompts, params) == expected
        stats = llm.stats()
    assert stats["steps"] == 1 + 5, "the prompt yields one token, a step with seven drafts eight"
    assert stats["draft_tokens"] == stats["accepted_tokens"] == 2 * (4 * 7 + 6)


class Now(Oracle):
    """Drafts wrong tokens where a block is nearly full, and none elsewhere."""

    def _drafts(self, asked):
        return [5] * asked.most if len(asked.tokens) % 16 == 12 else []


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_steps_without_drafts_go_on_in_blocks_that_drafts_were_given(run_ahead):
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    made = {"dtype": "float64", "device": "cpu", "run_ahead": run_ahead}
    with LLM(**made) as plain:
        expected = outcomes(plain, ["Once"], params)
    with LLM(**made, speculate="ngram") as llm, minillm.using(proposer=lambda: Now(None)):
        assert outcomes(llm, ["Once"], params) == expected
        assert llm.stats()["draft_tokens"] > 10


@pytest.mark.usefixtures("by_the_clock")
def test_drafts_that_are_chosen_by_measured_times_change_nothing():
    prompts, params = requests(8, seed=9)
    made = {"dtype": "float64", "device": "cpu", "num_blocks": 600, "max_num_seqs": 4}
    with LLM(**made) as plain:
        expected = outcomes(plain, prompts, params)
    with LLM(**made, speculate="ngram") as llm:
        assert differences(expected, outcomes(llm, prompts, params)) == []


def test_a_request_that_wants_no_drafts_gets_none():
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    with LLM(dtype="float64", device="cpu", speculate="ngram") as llm:
        expected = outcomes(llm, [REPEATED], params)
        drafted = llm.stats()["draft_tokens"]
        assert drafted
        assert outcomes(llm, [REPEATED], params, RequestOptions(speculate=False)) == expected
        assert llm.stats()["draft_tokens"] == drafted


def test_aborted_requests_leave_nothing_behind():
    prompts, params = requests(20, seed=8)
    rng = random.Random(SEED)
    with LLM(dtype="float32", device="cpu", speculate="ngram", max_num_seqs=6, num_blocks=200) as llm:
        engine = llm.engine
        asked = [engine.prepare(*each) for each in zip(prompts, (each.choices(1)[0] for each in params), strict=True)]
        for each in asked:
            engine.submit(each)
        for _ in itertools.takewhile(lambda _: engine.tracked, itertools.count()):
            if rng.random() < 0.1:
                engine.abort(rng.choice(list(engine.tracked)))
            engine.step()
        while engine.has_work:
            engine.step()
        engine.scheduler.check()
        assert llm.stats()["blocks_available"] == 200 and not engine.scheduler.speculation.proposer._indexes
