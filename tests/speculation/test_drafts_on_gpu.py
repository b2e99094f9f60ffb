"""Drafts on a GPU, found by the host or by the device: with `exact` every request gets the same tokens and numbers."""

import random

import pytest

from minillm import LLM, SamplingParams
from minillm.speculation import every_draft_runs
from tests.engine.test_engine_on_gpu import exact_products, same_until_a_tie  # noqa: F401
from tests.speculation.test_drafts_ahead import plain
from tests.speculation.test_same_tokens import SENTENCES, differences, outcomes, requests

ENGINES = {
    "alone": {"max_num_seqs": 1, "run_ahead": 2},
    "batched": {"max_num_seqs": 64, "run_ahead": 2},
    "chunked": {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 16},
    "preempted": {"max_num_seqs": 24, "num_blocks": 60, "block_size": 16, "max_model_len": 200},
}
COUNTS = {"alone": 24, "batched": 500, "chunked": 240, "preempted": 240}
WAYS = {"the host's": {"speculate_ahead": False}, "the device's": {"speculate_ahead": True}}


@pytest.mark.parametrize("engine", ENGINES)
def test_drafts_change_nothing_that_a_request_gets(engine):
    """bfloat16; about 1,000 requests in all, of every kind."""
    made = {"dtype": "bfloat16", "device": "cuda", "exact": True, "num_blocks": 2000} | ENGINES[engine]
    for make in (requests, plain):
        prompts, params = make(COUNTS[engine] // 2, seed=len(engine))
        with LLM(**made) as llm:
            expected = outcomes(llm, prompts, params)
        for options in WAYS.values():
            with every_draft_runs(), LLM(**made, speculate="ngram", **options) as llm:
                assert differences(expected, outcomes(llm, prompts, params)) == []
                assert llm.stats()["drafts"] > 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("eager", [False, True])
def test_without_exact_greedy_tokens_differ_at_near_ties_alone(way, eager):
    rng = random.Random(1)
    prompts = [" ".join(3 * [". ".join(rng.choice(SENTENCES) for _ in range(4)) + "."]) for _ in range(40)]
    made = {"dtype": "float32", "device": "cuda", "num_blocks": 2000, "max_num_seqs": 16, "enforce_eager": eager}
    asked = {"max_tokens": 64, "temperature": 0, "ignore_eos": True}
    with LLM(**made) as llm:
        wanted = llm.generate(prompts, SamplingParams(**asked, logprobs=2))
    with every_draft_runs(), LLM(**made, speculate="ngram", **WAYS[way]) as llm:
        found = llm.generate(prompts, SamplingParams(**asked))
        llm.engine.scheduler.check()
        stats = llm.stats()
        graphs = llm.engine.executor.runner.graphs
        assert eager or way == "the host's" or any(shape.lookup for shape in graphs.captured.decodes)
    assert stats["accepted_tokens"] > 30
    assert all(same_until_a_tie(f.token_ids, w) for f, w in zip(found, wanted, strict=True))
