"""The device drafts and counts, and steps are launched ahead of that: requests get the same tokens.  Float64, CPU."""

import itertools
import random

import numpy as np
import pytest
import torch

import minillm
from minillm import LLM, RequestOptions, SamplingParams
from minillm.config import EngineConfig
from minillm.errors import ConfigError
from minillm.runner import device_drafts
from minillm.runner.device_drafts import DeviceDrafts
from minillm.scheduler import Scheduler, drafting_ahead
from minillm.speculation import Asked, NgramProposer, every_draft_runs
from minillm.speculation.control import NEVER
from minillm.speculation.ngram import NgramIndex
from tests import models
from tests.chance import SEED
from tests.consistent import scheduler_is_consistent_after_every_step  # noqa: F401
from tests.emulated_graphs import emulated_graphs
from tests.proofs import only_in_proofs
from tests.speculation.proposers import Coin, following
from tests.speculation.test_same_tokens import REPEATED, differences, outcomes, requests

pytestmark = pytest.mark.explore

AHEAD = {"speculate": "ngram", "speculate_ahead": True}
MADE = {"dtype": "float64", "device": "cpu", "num_blocks": 600}
ENGINES = {
    "alone": {"max_num_seqs": 1, "run_ahead": 2},
    "batched": {"max_num_seqs": 16, "run_ahead": 3},
    "chunked": {"max_num_seqs": 8, "max_num_batched_tokens": 13, "block_size": 4},
    "preempted": {"max_num_seqs": 12, "num_blocks": 51, "block_size": 4, "max_model_len": 200},
    "no prefix cache": {"max_num_seqs": 6, "enable_prefix_caching": False, "speculate_tokens": 2, "run_ahead": 6},
    "int8 cache": {"max_num_seqs": 8, "kv_cache_dtype": "int8", "speculate_tokens": 31, "run_ahead": 0},
}


@pytest.fixture(autouse=True)
def all_drafts_run():
    with every_draft_runs():
        yield


class Ran:
    """Steps for which the device drafted, and how many of them were launched before an earlier one was read."""

    def __init__(self):
        self.steps = self.ahead = 0


@pytest.fixture
def ran(monkeypatch):
    found, schedule = Ran(), Scheduler.schedule

    def counted(scheduler):
        step = schedule(scheduler)
        if step is not None and step.lookup is not None:
            found.steps += 1
            found.ahead += scheduler.in_flight > 1
        return step

    monkeypatch.setattr(Scheduler, "schedule", counted)
    return found


AS_ON_A_GPU = ["alone", "chunked", "no prefix cache"]


def as_on_a_gpu(llm: LLM) -> None:
    """Let rows without drafts run ahead, and steps yield no more tokens than a GPU has memory for."""
    speculation = llm.engine.scheduler.speculation
    speculation.most_yielded = max(llm.engine.config.max_num_seqs, speculation.most + 1)
    speculation.runs_ahead = True


def always_looks(monkeypatch) -> None:
    """Let the device go on looking for drafts where it found none."""

    def look_again(scheduler: Scheduler) -> None:
        speculation = scheduler.speculation
        for row in scheduler.order[speculation.searches[scheduler.order]].tolist():
            speculation.resume(row, int(scheduler.known[row]))

    monkeypatch.setattr(drafting_ahead, "look_again", look_again)


def plain(count: int, seed: int) -> tuple[list[str], list[SamplingParams]]:
    """Requests of all kinds, of which most combine with drafts of the device."""
    prompts, params = requests(count, seed)
    rng = random.Random(SEED + seed)
    simple = [
        SamplingParams(
            max_tokens=rng.randint(20, 60), temperature=rng.choice([0, 0, 0.1, 0.7]), seed=i, ignore_eos=True
        )
        for i in range(count)
    ]
    return prompts, [each if rng.random() < 0.12 else other for each, other in zip(params, simple, strict=True)]


def finds_some(monkeypatch, known: list[list[int]]) -> None:
    """Let the device find drafts that are right by a coin, and some of them. known: prompts with their outputs."""
    coin = Coin(following(known), 200, right=0.8)

    def look_up(tokens, lengths, counts, most):
        drafts = torch.full((len(tokens), most), -1, dtype=torch.int64)
        for i, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
            (some,) = coin.propose([Asked("", tokens[i, :length].numpy(), count)]) if count else [[]]
            drafts[i, : len(some)] = torch.tensor(some, dtype=torch.int64)
        return drafts

    monkeypatch.setattr(device_drafts, "look_up", look_up)


SHORT = {"alone": 2, "batched": 5, "chunked": 3, "preempted": 5, "no prefix cache": 3, "int8 cache": 3}


@pytest.mark.parametrize(("engine", "count"), [*SHORT.items(), *only_in_proofs(("batched", 128), ("alone", 5))])
def test_drafts_of_the_device_change_nothing_that_a_request_gets(engine, count, ran, monkeypatch):
    """Drafts are right or wrong by a coin. Some engines pause rows without drafts, and go on without for a while."""
    prompts, params = plain(count, seed=len(engine))
    made = MADE | ENGINES[engine]
    with LLM(**{key: value for key, value in made.items() if key != "speculate_tokens"}) as llm:
        expected = outcomes(llm, prompts, params)
    finds_some(monkeypatch, [prompt + output for prompt, output, *_ in expected])
    with LLM(**made, **AHEAD) as llm:
        if engine in AS_ON_A_GPU:
            as_on_a_gpu(llm)
        assert differences(expected, outcomes(llm, prompts, params)) == []
        stats = llm.stats()
    assert ran.steps > 10 and (ran.ahead > 5) == (made.get("run_ahead", 1) > 0)
    assert 0 < stats["accepted_tokens"] < stats["draft_tokens"]


@pytest.mark.parametrize("options", only_in_proofs({}, {"max_num_seqs": 2, "run_ahead": 3}, {"num_blocks": 14}))
def test_captured_steps_draft_and_count_on_the_device(options, ran, tmp_path, monkeypatch):
    """With interpreted kernels, in float32. Prompts that arrive later interrupt the steps ahead."""
    prompt_lookup = pytest.importorskip("minillm.kernels.prompt_lookup", reason="graphs need triton")
    models.make("gemma-multi-query", num_hidden_layers=1).save_pretrained(tmp_path)
    monkeypatch.setattr(prompt_lookup, "TILE", 32)
    always_looks(monkeypatch)
    rng = random.Random(SEED + 2)
    prompts = [[rng.randrange(2, 90) for _ in range(rng.randint(1, 5))] * 3 for _ in range(4)]
    params = [
        SamplingParams(max_tokens=10 + 3 * i, temperature=[0, 0, 0.4][i % 3], seed=i, ignore_eos=True) for i in range(4)
    ]
    made = {"dtype": "float32", "device": "cpu", "block_size": 4, "num_blocks": 120, "max_num_seqs": 3}
    made |= {"max_model_len": 64, "max_num_batched_tokens": 16} | options
    with LLM(tmp_path, enforce_eager=True, **made) as llm:
        expected = outcomes(llm, prompts, params)
    with emulated_graphs(), LLM(tmp_path, **made, **AHEAD, speculate_tokens=3) as llm:
        as_on_a_gpu(llm)
        replays = counted_replays(llm)
        assert differences(expected, outcomes(llm, prompts, params)) == []
        stats = llm.stats()
    assert ran.steps == len(replays) > 10 and all(replays) and ran.ahead > 5
    assert 0 < stats["accepted_tokens"] < stats["draft_tokens"]


def counted_replays(llm: LLM) -> list[bool]:
    """For each step that the device drafts for, whether it ran as a graph."""
    graphs, found = llm.engine.executor.runner.graphs, []
    replay = graphs.replay

    def counted(step):
        replayed = replay(step)
        if step.lookup is not None:
            found.append(replayed is not None)
        return replayed

    graphs.replay = counted
    return found


def finds_nothing(tokens, lengths, counts, most):
    return torch.full((len(tokens), most), -1, dtype=torch.int64)


@pytest.mark.parametrize("host_finds, least, most", [(False, 1, 3), (True, 4, 20)])
def test_where_the_device_found_nothing_the_host_looks_first(host_finds, least, most, ran, monkeypatch):
    """A step in which the device looks takes as long as one with drafts, even if it finds none.

    If it misses again and again what the host had found, it looks less and less often.
    """
    monkeypatch.setattr(device_drafts, "look_up", finds_nothing)
    monkeypatch.setattr(NgramProposer, "propose", lambda self, asked: [[5] if host_finds else [] for _ in asked])
    with LLM(**MADE, **AHEAD) as llm:
        as_on_a_gpu(llm)
        (done,) = llm.generate(["Once upon a time"], SamplingParams(max_tokens=200, seed=1, ignore_eos=True))
        assert len(done.outputs[0].token_ids) == 200
    assert least <= ran.steps <= most


@pytest.mark.parametrize("host_finds", [False, True])
def test_the_device_goes_on_where_the_host_has_found_a_draft(host_finds, ran, monkeypatch):
    calls = itertools.count()

    def look_up(tokens, lengths, counts, most):
        found = finds_nothing(tokens, lengths, counts, most)
        return found if next(calls) < 3 else found.abs()

    monkeypatch.setattr(device_drafts, "look_up", look_up)
    monkeypatch.setattr(NgramProposer, "propose", lambda self, asked: [[5] if host_finds else [] for _ in asked])
    with LLM(**MADE, **AHEAD) as llm:
        as_on_a_gpu(llm)
        llm.generate(["Once upon a time"], SamplingParams(max_tokens=200, seed=1, ignore_eos=True))
    assert (ran.steps > 50) == host_finds


def test_the_host_learns_long_prompts_bit_by_bit(monkeypatch):
    """Those of all rows together: a step waits for it."""
    learned, own = [], NgramIndex._learn

    def learn(self, tokens):
        learned[-1] += len(tokens) - 1 - self._seen
        own(self, tokens)

    def look_again(scheduler, own=drafting_ahead.look_again):
        learned.append(0)
        own(scheduler)

    monkeypatch.setattr(device_drafts, "look_up", finds_nothing)
    monkeypatch.setattr(NgramIndex, "_learn", learn)
    monkeypatch.setattr(drafting_ahead, "MOST_LEARNED", 40)
    monkeypatch.setattr(drafting_ahead, "look_again", look_again)
    with LLM(**MADE, **AHEAD) as llm:
        as_on_a_gpu(llm)
        for lengths in ((100, 200), (34, 35)):
            prompts = [[7 + i, *range(20, 20 + length)] for i, length in enumerate(lengths)]
            llm.generate(prompts, SamplingParams(max_tokens=30, seed=1, ignore_eos=True))
    assert max(learned) == 40 and sum(learned) >= 369 - 4 * 40


def test_of_many_rows_the_host_looks_at_a_few_before_each_step(monkeypatch):
    looked = []

    def propose(self, asked):
        looked[-1].extend(each.request_id for each in asked if each.most == 1)
        return [[] for _ in asked]

    def schedule(scheduler, own=Scheduler.schedule):
        looked.append([])
        return own(scheduler)

    monkeypatch.setattr(device_drafts, "look_up", finds_nothing)
    monkeypatch.setattr(NgramProposer, "propose", propose)
    monkeypatch.setattr(Scheduler, "schedule", schedule)
    monkeypatch.setattr(drafting_ahead, "MOST_LOOKED_UP", 1)
    with LLM(**MADE | {"max_num_seqs": 3}, **AHEAD) as llm:
        as_on_a_gpu(llm)
        llm.generate(["a b c", "d e f", "g h i"], SamplingParams(max_tokens=30, seed=1, ignore_eos=True))
    assert max(map(len, looked)) == 1 and len({each for some in looked for each in some}) == 3


def test_the_host_sends_nothing_while_the_same_rows_go_on(ran, tmp_path, monkeypatch):
    """A captured step takes lengths, tokens and drafts from the device."""
    prompt_lookup = pytest.importorskip("minillm.kernels.prompt_lookup", reason="graphs need triton")
    made = models.make("gemma-multi-query", num_hidden_layers=1)
    made.model.layers[
        0
    ].self_attn.o_proj.weight.data.zero_()  # a token follows from the last one: soon they go in circles
    made.save_pretrained(tmp_path)
    monkeypatch.setattr(prompt_lookup, "TILE", 32)
    prompt, params = [[5, 9, 17] * 3], SamplingParams(max_tokens=36, temperature=0, ignore_eos=True)
    made = {"dtype": "float32", "device": "cpu", "num_blocks": 12, "max_num_seqs": 1, "max_model_len": 64}
    made |= {"max_num_batched_tokens": 9}
    with LLM(tmp_path, enforce_eager=True, **made) as llm:
        expected = outcomes(llm, prompt, params)
    with emulated_graphs(), LLM(tmp_path, **made, **AHEAD, speculate_tokens=3) as llm:
        lookups, sent = llm.engine.executor.runner.graphs.lookups, []
        inputs = lookups.inputs

        class Watched(torch.Tensor):
            def copy_(self, *given, **more):
                sent.append(given)
                return torch.Tensor.copy_(self, *given, **more)

        lookups.inputs = lambda size: inputs(size).as_subclass(Watched)
        assert differences(expected, outcomes(llm, prompt, params)) == []
        stats = llm.stats()
    assert stats["accepted_tokens"] > 10 and ran.ahead > 8 and len(sent) < 5


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({"regex": "[a-z ]+"}, {}),
        ({"repetition_penalty": 1.2}, {}),
        ({"logit_bias": {300: 1.0}}, {}),
        ({"min_tokens": 3}, {}),
        ({"logprobs": 1}, {}),
        ({}, {"speculate_ahead": False}),
    ],
    ids=str,
)
def test_the_host_drafts_where_the_device_cannot(asked, options, ran):
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos="regex" not in asked, **asked)
    with LLM(**MADE, **(AHEAD | options)) as llm:
        llm.generate([REPEATED], params)
    assert ran.steps == 0


@pytest.mark.parametrize("speculate", ["off", "some/directory"])
def test_the_option_is_refused_where_the_device_looks_nothing_up(speculate):
    with pytest.raises(ConfigError, match=f"speculate='{speculate}' is not that; leave speculate_ahead out"):
        LLM(device="cpu", speculate=speculate, speculate_ahead=True)


def test_the_device_drafts_by_default_on_a_gpu_of_its_own():
    drafting = EngineConfig.of(speculate="ngram")
    assert drafting.on("cuda").speculate_ahead and not drafting.on("cpu").speculate_ahead
    assert not EngineConfig.of(speculate="ngram", speculate_ahead=False).on("cuda").speculate_ahead
    assert not EngineConfig.of(speculate="ngram", tensor_parallel_size=2).on("cuda").speculate_ahead
    assert not EngineConfig.of(speculate="some/directory").on("cuda:1").speculate_ahead
    with pytest.raises(ConfigError, match="speculate_ahead must be True or False, not 'yes'"):
        EngineConfig.of(speculate="ngram", speculate_ahead="yes")


def test_rows_are_searched_a_few_at_a_time(ran, monkeypatch):
    """And get the same drafts: memory for the search does not grow with the number of rows."""
    prompts, params = plain(4, 1)
    with LLM(**MADE, **AHEAD) as llm:
        expected, whole = outcomes(llm, prompts, params), llm.stats()
    monkeypatch.setattr(device_drafts, "AT_ONCE", 100)
    with LLM(**MADE, **AHEAD) as llm:
        assert differences(expected, outcomes(llm, prompts, params)) == []
        assert ran.steps > 0 and llm.stats() == whole


def test_a_proposer_of_yours_is_asked(ran):
    class Mine(NgramProposer):
        pass

    with LLM(**MADE, **AHEAD) as llm, minillm.using(proposer=Mine) as used:
        llm.generate([REPEATED], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    assert used.calls["proposer"] and ran.steps == 0


def test_layers_with_windows_are_the_hosts(ran, tmp_path):
    models.make("gemma2-grouped-untied").save_pretrained(tmp_path)
    with LLM(tmp_path, **MADE, **AHEAD) as llm:
        llm.generate([[5, 6, 7] * 4], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    assert ran.steps == 0


def test_a_request_that_wants_no_drafts_goes_along_without(ran):
    """It is in the steps of the other, which has drafts."""
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    with LLM(**MADE) as llm:
        expected = outcomes(llm, [REPEATED, REPEATED], params)
    with LLM(**MADE, **AHEAD) as llm:
        engine = llm.engine
        asked = [engine.prepare(REPEATED, params, RequestOptions(speculate=speculate)) for speculate in (True, False)]
        for each in asked:
            engine.submit(each)
        while engine.has_work:
            engine.step()
            if all(row.row >= 0 for row in (each.request for each in asked)):
                assert engine.scheduler.speculation._next[asked[1].request.row] == NEVER
        assert [each.completion.token_ids for each in asked] == [each[1] for each in expected]
    assert ran.steps > 5


def test_aborted_requests_leave_nothing_behind(ran):
    prompts, params = plain(14, seed=8)
    rng = random.Random(SEED)
    with LLM(dtype="float32", device="cpu", max_num_seqs=6, num_blocks=200, **AHEAD) as llm:
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
        assert llm.stats()["blocks_available"] == 200 and ran.ahead > 0


def test_logits_that_are_not_numbers_end_a_request_ahead(ran):
    """Its tokens in flight are dropped, and the other request goes on."""
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    with LLM(**MADE) as llm:
        (expected,) = outcomes(llm, [REPEATED], params)
    with LLM(**MADE, **AHEAD) as llm:
        engine = llm.engine
        model = engine.executor.runner.model
        logits, calls = model.logits, itertools.count()

        def some_are_not(hidden):
            found = logits(hidden)
            if next(calls) == 6:
                found[-1] = float("nan")
            return found

        model.logits = some_are_not
        asked = [engine.prepare(REPEATED, params), engine.prepare("The dog", params)]
        for each in asked:
            engine.submit(each)
        while engine.has_work:
            engine.step()
        assert ran.ahead > 5
        assert sorted(each.completion.finish_reason for each in asked) in (["abort", "length"], ["length", "length"])
        if asked[0].completion.finish_reason == "length":
            assert asked[0].completion.token_ids == expected[1]


# ---- planted faults: each changes tokens, or what is asserted on the way


def accepts_one_too_many(monkeypatch):
    own = device_drafts.accept
    monkeypatch.setattr(
        device_drafts, "accept", lambda drafts, sampled: (own(drafts, sampled) + 1).clamp(max=sampled.shape[1])
    )


def starts_at_a_stale_length(monkeypatch):
    """The length of the step before."""
    run = DeviceDrafts._run

    def stale(self, runner, step):
        before = self.state.lengths.clone()
        launched = run(self, runner, step)
        known = before[step.rows] > 0
        self.state.lengths[step.rows[known]] = before[step.rows[known]]
        return launched

    monkeypatch.setattr(DeviceDrafts, "_run", stale)


def accepts_what_is_right_of_another_row(monkeypatch):
    """A row gains as many tokens as another one."""
    own = device_drafts.accept
    monkeypatch.setattr(device_drafts, "accept", lambda drafts, sampled: own(drafts, sampled).roll(1, 0))


def reserves_no_blocks_for_drafts(monkeypatch):
    grow = Scheduler._grow

    def newest_only(self, rows, queries):
        decoding = (self.known[rows] - self.computed[rows] == 1) & (queries > 1)
        return grow(self, rows, np.where(decoding, 1, queries))

    monkeypatch.setattr(Scheduler, "_grow", newest_only)


FAULTS = [
    accepts_one_too_many,
    starts_at_a_stale_length,
    accepts_what_is_right_of_another_row,
    reserves_no_blocks_for_drafts,
]


FIRST = (
    [REPEATED, "The dog saw. The dog saw. The dog", "a b a b a b"],
    [SamplingParams(max_tokens=30, temperature=t, seed=1, ignore_eos=True) for t in (0, 0.3, 0)],
)


@pytest.fixture(scope="module")
def without_drafts():
    with LLM(**MADE, block_size=4) as llm:
        return outcomes(llm, *FIRST)


@pytest.mark.parametrize("plant", [None, *FAULTS])
def test_a_planted_fault_is_found(plant, without_drafts, monkeypatch):
    """In the first requests of any kind; without one, nothing is."""
    always_looks(monkeypatch)
    if plant is not None:
        plant(monkeypatch)
    with LLM(**MADE, block_size=4, **AHEAD) as llm:
        try:
            found = differences(without_drafts, outcomes(llm, *FIRST))
        except (AssertionError, IndexError):
            found = ["a scheduler's assertion"]
    assert bool(found) == (plant is not None)
