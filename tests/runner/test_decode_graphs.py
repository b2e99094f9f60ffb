"""Which CUDA graphs may run while operations are replaced, and when those of others are dropped."""

import dataclasses

import pytest

import minillm
from minillm import LLM, SamplingParams, ops
from minillm.runner.cuda_graph import CapturedSteps
from tests import models
from tests.emulated_graphs import emulated_graphs

pytest.importorskip("triton", reason="graphs need triton, which is not installed here")


@pytest.fixture
def captured():
    """One graph, captured from the engine's own operations."""
    steps = CapturedSteps(ops.on("cpu"))
    assert steps.follow()
    steps.decodes[1, 16] = "the engine's own"
    return steps


def mine(*args, **kwargs):
    return None


def test_a_replaced_operation_runs_no_graph_and_drops_none(captured):
    with minillm.using(decode_attention=mine):
        assert not captured.follow()
    assert captured.follow() and captured.decodes == {(1, 16): "the engine's own"}


def test_one_declared_capturable_gets_graphs_of_its_own(captured):
    with minillm.using(capturable=True, decode_attention=mine):
        assert captured.follow() and not list(captured)
        captured.decodes[1, 16] = "captured from mine"
        assert captured.follow() and list(captured), "they stay while nothing changes"
    assert captured.follow() and not list(captured), "the engine's own operations never run a graph of others"


def test_one_that_is_not_declared_is_enough_to_run_without(captured):
    with minillm.using(capturable=True, decode_attention=mine), minillm.using(rms_norm=mine):
        assert not captured.follow()


def test_an_inner_block_declares_for_itself_alone(captured):
    with minillm.using(decode_attention=mine):
        with minillm.using(capturable=True, decode_attention=mine):
            assert captured.follow()
        assert not captured.follow()


def test_what_replaces_the_tokenizers_part_concerns_no_graph(captured):
    with minillm.using(bpe_merge=mine):
        assert captured.follow() and list(captured)


def test_warming_up_captures_every_size_and_leaves_no_trace(tmp_path):
    models.make("gemma-multi-query").save_pretrained(tmp_path)
    greedy = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    with emulated_graphs(), LLM(tmp_path, max_num_seqs=4, max_num_batched_tokens=4) as llm:
        llm.warm_up()
        captured = llm.engine.executor.runner.graphs.steps.decodes
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
def test_warming_up_asks_for_no_more_than_a_small_cache_holds(options):
    with LLM(device="cpu", max_num_seqs=2, **options) as llm:
        executor = llm.engine.executor  # as if on a GPU
        executor.facts = dataclasses.replace(executor.facts, captures=True)
        llm.warm_up()
        assert not llm.engine.has_work
