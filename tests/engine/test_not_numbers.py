"""Logits that are not numbers end their request, with the reason, and change no other request."""

import contextlib
import logging
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm import LLM, SamplingParams
from minillm.evaluate.perplexity import perplexity
from minillm.model.loader import load_model
from minillm.ops import cpu, reference
from minillm.request import NOT_NUMBERS
from tests import models
from tests.damaged import BAD, damage, damaged_tiny_gemma, rows
from tests.emulated_graphs import emulated_graphs
from tests.proofs import only_in_proofs

NAN, INF = math.nan, math.inf
GOOD = rows(5, 40, 96)
LONG = GOOD[0][:32]  # whole blocks
WAYS = {
    "greedy": {"temperature": 0},
    "temperature": {"seed": 1, "temperature": 0.5},
    "top-p and top-k": {"seed": 2, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "logit_bias": {BAD: -100}},
    "penalties": {
        "seed": 3,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "logit_bias": {BAD: -100},
    },
    "bias": {"seed": 4, "logit_bias": {5: 3, BAD: -100}, "min_tokens": 4},
    "log-probabilities": {"temperature": 0, "logprobs": 3},
    "prompt log-probabilities": {"temperature": 0, "prompt_logprobs": 2, "logprobs": 0},
}


def asked(way="greedy", **more):
    return SamplingParams(**({"max_tokens": 12, "ignore_eos": True} | WAYS[way] | more))


@pytest.fixture(scope="module", params=["llama-biases", "gemma2-multi-query", "mistral-grouped"])
def directory(request, tmp_path_factory):
    """Full attention; a soft cap and windows in some layers; windows in all layers."""
    place = tmp_path_factory.mktemp(request.param)
    models.make(request.param).save_pretrained(place)
    damage(place)
    return place


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    place = tmp_path_factory.mktemp("llama")
    models.make("llama-biases").save_pretrained(place)
    damage(place)
    return place


def engine(directory, **options):
    return LLM(directory, **({"device": "cpu", "dtype": "float64", "num_blocks": 64, "block_size": 8} | options))


def ids(completions):
    return [each.token_ids for each in completions]


def assert_ended(completion, tokens=()):
    assert (completion.finish_reason, completion.stop_reason) == ("abort", NOT_NUMBERS)
    assert completion.token_ids == list(tokens) and completion.finished


def assert_in_order(llm):
    llm.engine.scheduler.check()
    assert llm.stats()["blocks_available"] == 64 and not llm.stats()["running"]


@pytest.mark.parametrize("way", WAYS)
def test_a_request_whose_logits_are_not_numbers_ends_alone(way, directory):
    with engine(directory) as llm:
        alone = [llm.generate([prompt], asked(way))[0] for prompt in GOOD]
        assert not any(BAD in each.token_ids for each in alone)
        prompts = [*GOOD[:2], [BAD, 5], *GOOD[2:], [3, 4, BAD], [*GOOD[0], BAD]]
        found = llm.generate(prompts, asked(way))
        good = found[:2] + found[3:6]
        assert ids(good) == ids(alone) and {each.finish_reason for each in good} == {"length"}
        for one, other in zip(good, alone, strict=True):
            for mine, theirs in zip(one.logprobs or (), other.logprobs or (), strict=True):
                assert mine == pytest.approx(theirs)
        for each in (found[2], *found[6:]):
            assert_ended(each)
        assert llm.stats()["corrupted"] == 3
        assert ids(llm.generate(GOOD, asked(way))) == ids(alone), "in blocks that the failed requests have freed"
        assert_in_order(llm)


@pytest.mark.parametrize("run_ahead", [0, 3])
def test_a_request_that_fails_while_it_generates_keeps_its_tokens(run_ahead, llama):
    """At some point it samples the damaged token."""
    with engine(llama, run_ahead=run_ahead) as llm:
        params = [asked(seed=seed, max_tokens=40, temperature=3.0, logit_bias={BAD: 2}) for seed in range(8)]
        found = llm.generate([GOOD[0]] * 8, params)
        failed = [each for each in found if each.finish_reason == "abort"]
        assert len({len(each.token_ids) for each in failed}) > 2, "the damaged token comes at different places"
        for each in failed:
            assert_ended(each, each.token_ids)
            assert each.token_ids[-1] == BAD and BAD not in each.token_ids[:-1]
        for each in found:
            if each not in failed:
                assert len(each.token_ids) == 40 and BAD not in each.token_ids
        assert llm.stats()["corrupted"] == len(failed)
        assert llm.engine.scheduler.generated == sum(len(each.token_ids) for each in found)


def test_every_choice_of_a_prompt_fails_and_no_choice_of_another(llama):
    with engine(llama) as llm:
        bad, good = llm.generate([[BAD], GOOD[0]], asked("temperature", n=3))
        for each in bad.outputs:
            assert_ended(each)
        assert {each.finish_reason for each in good.outputs} == {"length"}


@pytest.mark.parametrize("way", ["penalties", *only_in_proofs("greedy", "temperature", "log-probabilities")])
def test_captured_steps_tell_too(way, llama):
    with emulated_graphs(), engine(llama, dtype="float32", run_ahead=2) as llm:
        params = asked(way, max_tokens=6)
        alone = [llm.generate([prompt], params)[0] for prompt in GOOD[:2]]
        found = llm.generate([GOOD[0], [5, BAD], GOOD[1]], params)
        assert_ended(found[1])
        assert ids([found[0], found[2]]) == ids(alone)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("way", ["greedy", "temperature", "top-p and top-k"])
def test_infinite_activations_end_a_request_too(value, way, tmp_path):
    models.make("llama-biases").save_pretrained(tmp_path)
    damage(tmp_path, value)
    with engine(tmp_path) as llm:
        assert_ended(llm.generate([[5, BAD]], asked(way))[0])


def test_scores_of_a_prompt_end_it_even_if_its_last_token_has_forgotten_the_damaged_one(tmp_path):
    models.make("mistral-grouped").save_pretrained(tmp_path)  # its layers see 7 tokens each
    damage(tmp_path)
    prompt = [5, BAD, *GOOD[0]]
    with engine(tmp_path, max_num_batched_tokens=8) as llm:
        assert llm.generate([prompt], asked())[0].finish_reason == "length"
        found = llm.generate([prompt, GOOD[1]], asked("prompt log-probabilities"))
        assert_ended(found[0])
        assert found[0].prompt_logprobs == [None] * len(prompt)
        assert found[1].finish_reason == "length"
        assert_in_order(llm)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return damaged_tiny_gemma(tmp_path_factory.mktemp("gemma"))


def test_a_grammar_does_not_hide_that_logits_are_not_numbers(gemma):
    params = SamplingParams(regex="(yes|no), (yes|no)", max_tokens=20, seed=1)
    with engine(gemma, dtype="float32") as llm:
        good, bad = llm.generate([[5, 6, 7], [5, BAD]], params)
        assert good.finish_reason == "stop" and good.text in ("yes, yes", "yes, no", "no, yes", "no, no")
        assert_ended(bad)


def test_a_damaged_row_of_the_head_is_noticed_even_if_a_grammar_forbids_its_token(tmp_path):
    damaged_tiny_gemma(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"][BAD] = NAN
    save_file(tensors, file)
    with engine(tmp_path, dtype="float32") as llm:
        for more in ({"regex": "yes|no"}, {"temperature": 0}, {"top_k": 3}, {"logit_bias": {BAD: -100}}):
            assert_ended(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, **more))[0])


# The prefix cache


def test_nothing_of_a_failed_request_is_found_in_the_prefix_cache(llama):
    with engine(llama) as llm:
        for _ in range(2):
            found = llm.generate([[*LONG, BAD, *LONG]], asked())[0]
            assert_ended(found)
            assert found.num_cached_tokens == 0
            assert llm.stats()["blocks_cached"] == 0


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16}, {"run_ahead": 3}])
def test_requests_that_share_a_failed_ones_prefix_get_their_own_tokens(options, llama):
    """All are admitted before it fails, and the damaged token's NaN may reach the whole prompt's blocks."""
    prompts = [[*LONG, BAD, *LONG], [*LONG, 9], [*LONG, 11], [*LONG, BAD]]
    with engine(llama, enable_prefix_caching=False, **options) as llm:
        alone = [llm.generate([prompt], asked())[0] for prompt in prompts[1:3]]
    with engine(llama, **options) as llm:
        for _ in range(2):
            found = llm.generate(prompts, asked())
            assert_ended(found[0])
            assert_ended(found[3])
            assert ids(found[1:3]) == ids(alone)
            assert_in_order(llm)


def test_a_request_that_finds_damaged_blocks_in_the_prefix_cache_is_computed_without_it(llama):
    """As a request leaves them that is aborted before its logits have been looked at."""
    with engine(llama) as llm:
        right = llm.generate([[*LONG, 9]], asked())[0]
        assert llm.generate([[*LONG, 9]], asked())[0].num_cached_tokens == 32
        for cache in llm.engine.executor.runner.caches:
            cache.v.fill_(NAN)
        found = llm.generate([[*LONG, 9], GOOD[1]], asked("log-probabilities", temperature=0))
        assert found[0].token_ids == right.token_ids and found[0].finish_reason == "length"
        assert len(found[0].logprobs) == 12 and found[1].finish_reason == "length"
        assert llm.stats()["corrupted"] == 0
        again = llm.generate([[*LONG, 9]], asked())[0]
        assert again.num_cached_tokens == 0 and again.token_ids == right.token_ids


def test_a_trace_knows_which_blocks_can_no_longer_be_found(llama):
    from minillm.trace.record import Trace
    from minillm.trace.replay import Mirror, replay

    trace = Trace()
    with engine(llama, trace=trace) as llm:
        llm.generate([[*LONG, BAD, *LONG], [*LONG, 9]], asked())
        llm.generate([[*LONG, 9]], asked())
        cached = llm.stats()["blocks_cached"]
    assert sum(1 for _ in replay(trace)) > 12
    mirror = Mirror()
    for event in trace.events:
        mirror.take(event)
    assert len(mirror.registered) == cached
    assert any(event["event"] == "forget" for event in trace.events)


# Sampling


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the interpreter's numpy
@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-30])
@pytest.mark.parametrize("module", ["reference", "cpu", "kernels"])
def test_sampling_gives_no_token_for_a_row_without_probabilities(module, temperature):
    if module == "kernels":
        sample = pytest.importorskip("minillm.kernels.sampling", reason="triton is not installed here").sample
        if torch.cuda.is_available():
            pytest.skip("kernels are compiled here: test_engine_on_gpu_not_numbers.py runs them")
    else:
        sample = {"reference": reference, "cpu": cpu}[module].sample
    logits = torch.randn(9, 5000, generator=torch.Generator().manual_seed(0))
    for row, (place, value) in enumerate([(0, NAN), (4999, NAN), (4096, NAN), (17, INF), (4500, INF)]):
        logits[row, place] = value
    logits[5] = -INF
    logits[6] = NAN
    logits[7, 1:] = -INF
    found = sample(logits, torch.full((9,), temperature), torch.linspace(0, 0.99, 9)).tolist()
    assert found[:7] == [-1] * 7
    assert found[7] == 0 and 0 <= found[8] < 5000


def test_a_mixed_step_tells_rows_apart():
    logits = torch.tensor([[0.0, 1.0], [NAN, 1.0], [1.0, 0.0], [1.0, NAN]])
    for module in (reference, cpu):
        found = module.sample(logits, torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.full((4,), 0.1))
        assert found.tolist() == [1, -1, 0, -1]


# float16


@pytest.mark.parametrize("name", ["gemma-grouped", "gemma2-multi-head", "gemma3-multi-query", "qwen2-grouped"])
def test_float16_is_warned_of_where_a_family_is_known_to_overflow(name, tmp_path, caplog):
    models.make(name).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        load_model(tmp_path, dtype="bfloat16")
        assert not caplog.text
        load_model(tmp_path, dtype="float16")
    assert "known to compute numbers beyond its range" in caplog.text
    assert "dtype=bfloat16 and dtype=float32" in caplog.text


@pytest.mark.parametrize("name", ["llama-biases", "mistral-no-window", "qwen3-grouped"])
def test_float16_is_not_warned_of_elsewhere(name, tmp_path, caplog):
    models.make(name).save_pretrained(tmp_path)
    load_model(tmp_path, dtype="float16")
    assert not caplog.text


def test_logits_beyond_float16s_range_end_a_request(tmp_path):
    theirs = models.make("llama-biases")
    theirs.lm_head.weight.data *= 1e5
    theirs.save_pretrained(tmp_path)
    for dtype, reason in (("float16", "abort"), ("bfloat16", "length")):
        with contextlib.closing(LLM(tmp_path, device="cpu", dtype=dtype, num_blocks=16)) as llm:
            assert llm.generate([GOOD[0]], asked())[0].finish_reason == reason


def test_an_evaluation_says_why_a_text_has_no_scores(gemma):
    with engine(gemma, dtype="float32") as llm, pytest.raises(ValueError, match="logits are not numbers"):
        perplexity(llm, [5, 6, BAD, 7, 8])
