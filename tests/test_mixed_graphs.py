"""Which steps with prompts in them run as graphs, and what is sent to those that do; tokens: test_random_requests."""

import numpy as np
import pytest

import minillm
from minillm import LLM, SamplingParams
from minillm.scheduler import Step
from tests import models
from tests.emulated_graphs import emulated_graphs

pytest.importorskip("triton", reason="graphs need triton, which is not installed here")
PLAIN = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
PROMPTS = [[5, 6, 7], [8, 9], [10]]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    models.make("gemma-multi-query").save_pretrained(directory)
    options = {"max_num_seqs": 32, "max_num_batched_tokens": 300, "max_model_len": 256, "block_size": 4}
    with emulated_graphs(), LLM(directory, dtype="float32", device="cpu", **options) as llm:
        yield llm


def step(decodes: int, prompts: list[int], start: int = 0) -> Step:
    """`decodes` rows at position 3, then prompts of so many tokens, of which `start` are in the cache."""
    count = decodes + len(prompts)
    starts, queries = np.full(count, 3, np.int32), np.ones(count, np.int32)
    starts[decodes:], queries[decodes:] = start, prompts
    return Step(1, np.arange(count, dtype=np.int32), starts, queries, np.ones(count, bool), decodes)


@pytest.mark.parametrize(
    "of, shape",
    [
        (step(0, [3]), (64, 16, 64)),
        (step(16, [30, 34]), (64, 16, 64)),
        (step(17, [64]), (64, 32, 64)),
        (step(4, [65]), (256, 16, 64)),
        (step(4, [2] * 16), (64, 16, 64)),
        (step(4, [2] * 17), (256, 16, 64)),  # more prompts than a quarter of the tokens
        (step(0, [100, 157]), (300, 16, 64)),
        (step(32, [150, 150]), (300, 32, 64)),
        (step(32, [150, 151]), None),  # more tokens than any
        (step(33, [8]), None),  # more decodes
        (step(0, [2] * 65), None),  # more prompts
    ],
    ids=str,
)
def test_a_step_runs_in_the_least_shape_that_holds_it(llm, of, shape):
    assert llm.engine.runner.graphs.mixed.shape(of) == shape


def test_long_rows_have_wide_tables():
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 2048, "num_blocks": 200}
    with emulated_graphs(), LLM(device="cpu", **options) as llm:
        mixed = llm.engine.runner.graphs.mixed
        assert mixed.shape(step(1, [64], start=960)).width == 64
        assert mixed.shape(step(1, [64], start=961)).width == 128


def test_what_is_sent_names_each_token_and_each_row(llm):
    mixed = llm.engine.runner.graphs.mixed
    of = Step(
        1,
        rows=np.array([7, 2, 5, 0], np.int32),
        starts=np.array([9, 4, 0, 6], np.int32),
        queries=np.array([1, 1, 3, 2], np.int32),
        samples=np.array([True, True, False, True]),
        singles=2,
    )
    shape = mixed.shape(of)
    packed = mixed._packed(of, shape)
    sizes = [shape.rows] * 5 + [shape.tokens] * 2 + [shape.prompts + 1]
    assert len(packed) == sum(sizes)
    rows, positions, sampling, last, order, token_rows, token_positions, starts = np.split(
        packed, np.cumsum(sizes)[:-1]
    )
    padding, first = 32, shape.decodes
    used = [0, 1, first, first + 1]
    assert rows[used].tolist() == [7, 2, 5, 0] and (np.delete(rows, used) == padding).all()
    assert positions[used].tolist() == [9, 4, 2, 7]
    assert sampling[used].tolist() == [7, 2, padding, 0] and (np.delete(sampling, used) == padding).all()
    assert last[used].tolist() == [0, 1, first + 2, first + 4]
    assert order[:3].tolist() == [0, 1, first + 1]
    assert token_rows[:5].tolist() == [5, 5, 5, 0, 0] and (token_rows[5:] == padding).all()
    assert token_positions[:5].tolist() == [0, 1, 2, 6, 7]
    assert starts.tolist() == [0, 3, 5] + [5] * (shape.prompts - 2)


def replays(llm) -> int:
    return sum(graph.count for graph, _ in llm.engine.runner.graphs.graphs.mixed.values())


@pytest.mark.parametrize(
    "wish, graphs",
    [({}, 1), ({"logprobs": 1}, 0), ({"prompt_logprobs": 1}, 0), ({"repetition_penalty": 1.2}, 0), ({"top_p": 0.5}, 0)],
    ids=str,
)
def test_who_asks_for_more_of_sampling_is_not_in_a_graph(llm, wish, graphs):
    before = replays(llm)
    llm.generate(PROMPTS, SamplingParams(**PLAIN | wish))
    assert replays(llm) - before == graphs


def test_a_readers_operation_runs_outside_even_if_it_is_capturable(llm):
    """It may look at what a graph pads: the largest number of queries, rows without any."""
    own, seen = llm.engine.model.ops.prefill_attention, []

    def mine(q, cache, table, lengths, starts, *, max_queries, **options):
        seen.append((max_queries, lengths.tolist()))
        return own(q, cache, table, lengths, starts, max_queries=max_queries, **options)

    with minillm.using(capturable=True, prefill_attention=mine):
        llm.generate(PROMPTS, SamplingParams(**PLAIN))
    assert seen[0] == (3, [3, 2]) and not llm.engine.runner.graphs.graphs.mixed


def test_heads_that_attention_has_no_kernel_for_have_no_such_graphs(tmp_path):
    models.make("gemma-grouped").save_pretrained(tmp_path)
    with emulated_graphs(), LLM(tmp_path, dtype="float32", device="cpu") as llm:
        assert llm.model_config.head_dim == 8 and llm.engine.runner.graphs.mixed is None
        assert len(llm.generate(PROMPTS, SamplingParams(**PLAIN))) == 3


def test_warming_up_captures_every_shape_within_the_largest_graphs_memory(llm):
    llm.warm_up()
    graphs = llm.engine.runner.graphs
    assert graphs.graphs.mixed.keys() == set(graphs.mixed.shapes)
    assert graphs.largest in graphs.graphs
