"""Which steps with prompts run as graphs, and the inputs they get. Tokens are checked in test_random_requests.py."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import minillm
from minillm import LLM, SamplingParams
from minillm.ops import reference
from minillm.runner.mixed_graphs import MixedGraphs
from minillm.scheduler import Step
from tests import models
from tests.emulated_graphs import emulated_graphs
from tests.proofs import only_in_proofs

pytest.importorskip("triton", reason="graphs need triton, which is not installed here")
PLAIN = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
PROMPTS = [[5, 6, 7], [8, 9], [10]]


OPTIONS = {"dtype": "float32", "device": "cpu", "max_num_seqs": 32, "max_model_len": 256, "block_size": 4}
FEW = OPTIONS | {"max_num_seqs": 2, "max_num_batched_tokens": 8}  # small shapes: the largest is captured first


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    models.make("gemma-multi-query", num_hidden_layers=1).save_pretrained(directory)  # interpreted, each takes its time
    return directory


@pytest.fixture(scope="module")
def llm(directory):
    with emulated_graphs(), LLM(directory, max_num_batched_tokens=300, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def small(directory):
    """A separate engine with two graph shapes, of 16 and of 17 decodes, both of 20 tokens."""
    with emulated_graphs(), LLM(directory, **OPTIONS | {"max_num_seqs": 17, "max_num_batched_tokens": 20}) as llm:
        yield llm


def step(decodes: int, prompts: list[int], start: int = 0) -> Step:
    """`decodes` rows at position 3, then prompt chunks of these lengths after `start` cached tokens."""
    count = decodes + len(prompts)
    starts, queries = np.full(count, 3, np.int32), np.ones(count, np.int32)
    starts[decodes:], queries[decodes:] = start, prompts
    return Step(1, np.arange(count, dtype=np.int32), starts, queries, np.ones(count, bool), decodes)


@pytest.mark.parametrize(
    "of, shape",
    [
        (step(0, [3]), (64, 16, 16, 64)),
        (step(16, [30, 34]), (64, 16, 16, 64)),
        (step(17, [64]), (64, 32, 16, 64)),
        (step(4, [65]), (128, 16, 32, 64)),
        (step(4, [2] * 16), (64, 16, 16, 64)),
        (step(4, [2] * 17), (128, 16, 32, 64)),  # more prompts than a quarter of the shape's tokens
        (step(0, [100, 157]), (300, 16, 32, 64)),
        (step(32, [150, 150]), (300, 32, 32, 64)),
        (step(32, [150, 151]), None),  # more tokens than any shape
        (step(33, [8]), None),  # more decodes than any shape
        (step(0, [2] * 33), None),  # more prompts than any shape
    ],
    ids=str,
)
def test_a_step_runs_in_the_smallest_shape_that_fits(llm, of, shape):
    assert llm.engine.executor.runner.graphs.mixed.fits(of) == (shape and (*shape, False))


def test_long_rows_get_wider_block_tables():
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 2048, "num_blocks": 200}
    with emulated_graphs(), LLM(device="cpu", **options) as llm:
        mixed = llm.engine.executor.runner.graphs.mixed
        assert mixed.fits(step(1, [64], start=960)).width == 64
        assert mixed.fits(step(1, [64], start=961)).width == 128


def test_the_graphs_inputs_describe_each_token_and_each_row(llm):
    mixed = llm.engine.executor.runner.graphs.mixed
    of = Step(
        1,
        rows=np.array([7, 2, 5, 0], np.int32),
        starts=np.array([9, 4, 0, 6], np.int32),
        queries=np.array([1, 1, 3, 2], np.int32),
        samples=np.array([True, True, False, True]),
        decodes=2,
    )
    shape = mixed.fits(of)
    packed = mixed._packed(of, shape)
    sizes = [shape.rows] * 5 + [shape.tokens] * 2 + [shape.prompts + 2]
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
    assert starts.tolist() == [0, 3, 5] + [5] * (shape.prompts - 2) + [shape.tokens], (
        "padding must belong to the last row"
    )


def test_a_row_with_drafts_is_among_the_decodes_once_for_each_of_its_tokens(llm):
    """Rows 7 and 2 have two drafts, row 5 runs a prompt, row 0 has one draft, row 3 begins a prompt, row 9 has none."""
    mixed = llm.engine.executor.runner.graphs.mixed
    of = Step(
        1,
        rows=np.array([7, 2, 5, 0, 3, 9], np.int32),
        starts=np.array([9, 4, 0, 6, 0, 8], np.int32),
        queries=np.array([3, 3, 3, 2, 4, 1], np.int32),
        samples=np.array([True, True, True, True, False, True]),
        decodes=2,
        queries_per_decode=3,
        drafts=np.array([[1, 2], [3, 4], [-1, -1], [5, -1], [-1, -1], [-1, -1]], np.int32),
    )
    shape = mixed.fits(of)
    assert shape == (64, 16, 16, 64, False)
    sizes = [shape.rows] * 5 + [shape.tokens] * 2 + [shape.prompts + 2]
    rows, positions, sampling, last, order, token_rows, token_positions, starts = np.split(
        mixed._packed(of, shape), np.cumsum(sizes)[:-1]
    )
    first, padding = shape.decodes, 32
    used = [*range(9), first, first + 1]
    assert rows[used].tolist() == [7, 7, 7, 2, 2, 2, 0, 0, 9, 5, 3] and (np.delete(rows, used) == padding).all()
    assert positions[used].tolist() == [9, 10, 11, 4, 5, 6, 6, 7, 8, 2, 3]
    assert sampling[used].tolist() == [7, 7, 7, 2, 2, 2, 0, 0, 9, 5, padding]
    assert last[used].tolist() == [*range(9), first + 2, first + 6]
    assert order[:10].tolist() == [0, 1, 2, 3, 4, 5, first, 6, 7, 8], "the order of the step's rows"
    assert token_rows[:7].tolist() == [5] * 3 + [3] * 4 and token_positions[:7].tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert starts[:3].tolist() == [0, 3, 7]


def replays(llm) -> int:
    return sum(each.graph.count for each in llm.engine.executor.runner.graphs.captured.mixed.values())


SAMPLING_OPTIONS = [
    {},
    {"logprobs": 2},
    {"repetition_penalty": 1.5},
    {"top_p": 0.5, "temperature": 1.0},
    {"logit_bias": {3: 9.0}},
    {"top_k": 3, "temperature": 2.0, "logprobs": 1},
    {"logprobs": 0, "repetition_penalty": 1.5},
]


@pytest.mark.parametrize(
    "option", [*SAMPLING_OPTIONS[3:], {"prompt_logprobs": 1}, *only_in_proofs(*SAMPLING_OPTIONS[:3])], ids=str
)
def test_requests_on_the_general_sampling_path_still_run_in_graphs(llm, option):
    """Except for prompt log-probabilities, which need the last layer's output at every token."""
    before = replays(llm)
    llm.generate(PROMPTS, SamplingParams(**PLAIN | {"max_tokens": 1} | option))
    assert replays(llm) - before == ("prompt_logprobs" not in option)


def test_each_row_of_a_graph_gets_its_own_sampling_parameters(llm, directory):
    """The rows' parameters differ, so a result at the wrong row would be detected."""
    drawn = [
        ([5, 6, 7 + i], SamplingParams(**PLAIN | {"max_tokens": 4, "seed": i} | SAMPLING_OPTIONS[i % 7]))
        for i in range(9)
    ]
    with LLM(directory, enforce_eager=True, **OPTIONS) as eager:
        assert eager.engine.executor.runner.graphs is None
        alone = [eager.generate([prompt], params)[0] for prompt, params in drawn]
    assert len({tuple(each.token_ids) for each in alone}) > 6
    before = replays(llm)
    found = llm.generate([prompt for prompt, _ in drawn], [params for _, params in drawn])
    assert replays(llm) > before
    for one, other in zip(found, alone, strict=True):
        assert one.token_ids == other.token_ids
        assert (one.logprobs is None) == (other.logprobs is None)
        for mine, yours in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert mine == pytest.approx(yours, abs=1e-4)


def test_a_graph_step_discards_the_batch_of_earlier_eager_steps(directory):
    """Eager decodes advance the last batch by a token; after graph steps its rows may belong to other requests."""
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    with emulated_graphs(), LLM(directory, **FEW | {"run_ahead": 0}) as llm:
        engine = llm.engine
        engine.submit(engine.prepare([5, 6, 7], params))
        with minillm.using(rms_norm=lambda *arguments: reference.rms_norm(*arguments)):
            while engine.scheduler.newest < 3:
                engine.step()
        assert engine.executor.runner._decoding is not None
        engine.step()
        assert engine.executor.runner._decoding is None


def test_a_user_supplied_operation_runs_eagerly_here_even_if_it_is_capturable(llm):
    """It may depend on values that a graph pads: the largest number of queries, rows without queries."""
    own, seen = llm.engine.model.ops.prefill_attention, []

    def mine(q, cache, rows, options):
        seen.append((rows.max_queries, rows.lengths.tolist()))
        return own(q, cache, rows, options)

    with minillm.using(capturable=True, prefill_attention=mine):
        llm.generate(PROMPTS, SamplingParams(**PLAIN))
    assert seen[0] == (3, [3, 2]) and not llm.engine.executor.runner.graphs.captured.mixed


def test_head_sizes_without_an_attention_kernel_get_no_such_graphs(tmp_path):
    models.make("gemma-grouped").save_pretrained(tmp_path)
    with emulated_graphs(), LLM(tmp_path, dtype="float32", device="cpu", max_num_seqs=3) as llm:
        assert llm.model_config.head_dim == 8 and llm.engine.executor.runner.graphs.mixed is None
        assert len(llm.generate(PROMPTS, SamplingParams(**PLAIN))) == 3


@pytest.mark.proof
def test_warm_up_captures_every_shape_largest_first(small):
    small.warm_up()
    graphs = small.engine.executor.runner.graphs
    captured = list(graphs.captured.mixed)
    assert set(captured) == set(graphs.mixed.shapes) and list(graphs.captured.decodes)[0] == graphs.decodes.largest
    for most in zip(*captured, strict=True):
        assert max(most) == most[0], "the others must fit into the first graph's memory"


def test_the_first_prompt_captures_the_largest_shape_before_its_own(small):
    small.generate(PROMPTS, SamplingParams(**PLAIN))
    graphs = small.engine.executor.runner.graphs
    assert list(graphs.captured.mixed) == [graphs.mixed.shapes[-1], graphs.mixed.shapes[0]]


def test_a_shape_runs_eagerly_if_memory_is_too_small_for_its_graph(llm, small, monkeypatch):
    wanted = llm.generate(PROMPTS, SamplingParams(**PLAIN))
    mixed = small.engine.executor.runner.graphs.mixed

    def full(shape):
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(mixed, "rehearse", full)
    found = small.generate(PROMPTS, SamplingParams(**PLAIN))
    assert mixed.shapes == [] and not small.engine.executor.runner.graphs.captured.mixed
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]


@pytest.mark.parametrize("only_largest", [True, False])
def test_a_rank_without_memory_for_a_graph_never_runs_another_shape_than_the_others(only_largest, small, monkeypatch):
    mixed, rehearse = small.engine.executor.runner.graphs.mixed, MixedGraphs.rehearse
    shapes = list(mixed.shapes)

    def full(shape):
        if shape == shapes[-1] or not only_largest:
            raise torch.OutOfMemoryError("no memory is left")
        rehearse(mixed, shape)

    monkeypatch.setattr(mixed, "rehearse", full)
    monkeypatch.setattr(mixed, "model", SimpleNamespace(parallel=SimpleNamespace(size=2)))
    with pytest.raises(MemoryError, match="which all ranks have to run: lower gpu_memory_utilization"):
        small.generate(PROMPTS, SamplingParams(**PLAIN))
    assert mixed.shapes == shapes


def test_smaller_shapes_stay_if_memory_is_too_small_for_the_largest(small, monkeypatch):
    mixed, rehearse = small.engine.executor.runner.graphs.mixed, MixedGraphs.rehearse
    first, last = mixed.shapes

    def full_for_the_largest(self, shape):
        if shape == last:
            raise torch.OutOfMemoryError("too little memory is left")
        rehearse(self, shape)

    monkeypatch.setattr(MixedGraphs, "rehearse", full_for_the_largest)
    small.generate(PROMPTS, SamplingParams(**PLAIN))
    assert mixed.shapes == list(small.engine.executor.runner.graphs.captured.mixed) == [first]


def test_warm_up_keeps_user_supplied_operations_out_of_these_graphs(small):
    seen = []

    def mine(q, cache, table, lengths, *rest, **options):
        seen.append(lengths.min().item())
        return torch.zeros_like(q)

    with minillm.using(capturable=True, prefill_attention=mine):
        small.warm_up()
        assert not small.engine.executor.runner.graphs.captured.mixed
    assert min(seen) > 0, "padding rows must not reach a user-supplied operation"


def test_shapes_have_no_more_rows_than_a_step_can_have(directory):
    with emulated_graphs(), LLM(directory, **OPTIONS | {"max_num_seqs": 1}) as llm:
        assert {(shape.decodes, shape.prompts) for shape in llm.engine.executor.runner.graphs.mixed.shapes} == {(1, 1)}
    with emulated_graphs(), LLM(directory, max_num_batched_tokens=8, **OPTIONS) as llm:
        assert {shape.decodes for shape in llm.engine.executor.runner.graphs.mixed.shapes} == {8}


def test_closing_frees_the_graphs_at_once(small):
    small.generate(PROMPTS, SamplingParams(**PLAIN))
    graphs = small.engine.executor.runner.graphs
    kept = [weakref.ref(graph.graph) for graph in graphs.captured]
    del graphs
    gc.disable()
    try:
        small.close()
        assert len(kept) > 2 and all(each() is None for each in kept)
    finally:
        gc.enable()
