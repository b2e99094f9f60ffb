"""Which CUDA graphs may run while operations are overridden, and when graphs are dropped."""

import dataclasses

import pytest

import minillm
from minillm import LLM, SamplingParams, ops
from minillm.runner.cuda_graph import CapturedSteps
from tests import models
from tests.emulated_graphs import emulated_graphs
from tests.proofs import only_in_proofs

pytest.importorskip("triton", reason="graphs need triton, which is not installed here")


@pytest.fixture
def captured():
    """One graph captured with the engine's own operations."""
    steps = CapturedSteps(ops.on("cpu"))
    assert steps.follow()
    steps.decodes[1, 16] = "the engine's own"
    return steps


def mine(*args, **kwargs):
    return None


def test_an_override_disables_graphs_without_dropping_them(captured):
    with minillm.using(decode_attention=mine):
        assert not captured.follow()
    assert captured.follow() and captured.decodes == {(1, 16): "the engine's own"}


def test_a_capturable_override_gets_its_own_graphs(captured):
    with minillm.using(capturable=True, decode_attention=mine):
        assert captured.follow() and not list(captured)
        captured.decodes[1, 16] = "captured from mine"
        assert captured.follow() and list(captured), "graphs must be kept while nothing changes"
    assert captured.follow() and not list(captured), "the engine's own operations must not run graphs of an override"


def test_one_override_that_is_not_capturable_disables_graphs(captured):
    with minillm.using(capturable=True, decode_attention=mine), minillm.using(rms_norm=mine):
        assert not captured.follow()


def test_capturable_applies_only_to_its_own_block(captured):
    with minillm.using(decode_attention=mine):
        with minillm.using(capturable=True, decode_attention=mine):
            assert captured.follow()
        assert not captured.follow()


def test_overriding_the_tokenizer_does_not_affect_graphs(captured):
    with minillm.using(bpe_merge=mine):
        assert captured.follow() and list(captured)


def test_warm_up_captures_every_size_and_leaves_no_state(tmp_path):
    models.make("gemma-multi-query").save_pretrained(tmp_path)
    greedy = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    with emulated_graphs(), LLM(tmp_path, max_num_seqs=4, max_num_batched_tokens=4) as llm:
        llm.warm_up()
        captured = llm.engine.executor.runner.graphs.captured.decodes
        assert {size for size, _ in captured} == {1, 2, 4}
        stats = llm.stats()
        assert stats["running"] == stats["waiting"] == stats["blocks_cached"] == 0
        assert not llm.engine.has_work
        warmed = llm.generate([[5, 6, 7], [8, 9]], greedy)
    with LLM(tmp_path) as llm:
        assert [each.token_ids for each in llm.generate([[5, 6, 7], [8, 9]], greedy)] == [
            each.token_ids for each in warmed
        ]


@pytest.mark.parametrize("options", [{"num_blocks": 3}, {"max_model_len": 2}])
def test_warm_up_needs_no_more_blocks_than_a_small_cache_has(options):
    with LLM(device="cpu", max_num_seqs=2, **options) as llm:
        executor = llm.engine.executor  # as if on a GPU
        executor.facts = dataclasses.replace(executor.facts, captures=True)
        llm.warm_up()
        assert not llm.engine.has_work


@pytest.mark.parametrize("run_ahead", [1, *only_in_proofs(0, 4)])
def test_the_tokens_of_a_step_stay_until_they_are_read(run_ahead, tmp_path):
    """Captured steps write tokens to the host's memory, so steps ahead of the reader must not overwrite them."""
    models.make("gemma-multi-query").save_pretrained(tmp_path)
    prompts, params = [[5, 9, 17], [30, 2]], SamplingParams(max_tokens=9, temperature=0.8, seed=3, ignore_eos=True)
    options = {"dtype": "float32", "max_num_seqs": 2, "max_model_len": 32, "num_blocks": 8, "block_size": 16}
    with LLM(tmp_path, enforce_eager=True, **options) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, params)]
    with emulated_graphs(), LLM(tmp_path, run_ahead=run_ahead, **options) as llm:
        assert [output.token_ids for output in llm.generate(prompts, params)] == expected
