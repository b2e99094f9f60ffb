"""Which CUDA graphs may run while operations are replaced, and when those of others are dropped."""

import pytest

import minillm
from minillm import ops

graphs = pytest.importorskip("minillm.graphs", reason="triton is not installed here")


@pytest.fixture
def captured():
    """One graph, captured from the engine's own operations."""
    steps = graphs.CapturedSteps(ops.on("cpu"))
    assert steps.follow()
    steps[1, 16] = "the engine's own"
    return steps


def mine(*args, **kwargs):
    return None


def test_a_replaced_operation_runs_no_graph_and_drops_none(captured):
    with minillm.using(decode_attention=mine):
        assert not captured.follow()
    assert captured.follow() and captured == {(1, 16): "the engine's own"}


def test_one_declared_capturable_gets_graphs_of_its_own(captured):
    with minillm.using(capturable=True, decode_attention=mine):
        assert captured.follow() and not captured
        captured[1, 16] = "captured from mine"
        assert captured.follow() and captured, "they stay while nothing changes"
    assert captured.follow() and not captured, "the engine's own operations never run a graph of others"


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
        assert captured.follow() and captured
