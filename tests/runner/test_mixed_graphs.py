"""Which steps with prompts in them run as graphs, and what is sent to those that do; tokens: test_random_requests."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import minillm
from minillm import LLM, SamplingParams
from minillm.ops import reference
from minillm.scheduler import Step
from tests import models
from tests.emulated_graphs import emulated_graphs

pytest.importorskip("triton", reason="graphs need triton, which is not installed here")
PLAIN = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
PROMPTS = [[5, 6, 7], [8, 9], [10]]


OPTIONS = {"dtype": "float32", "device": "cpu", "max_num_seqs": 32, "max_model_len": 256, "block_size": 4}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    models.make("gemma-multi-query").save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def llm(directory):
    with emulated_graphs(), LLM(directory, max_num_batched_tokens=300, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def small(directory):
    """An engine of its own for a test: shapes of 64 and of 70 tokens."""
    with emulated_graphs(), LLM(directory, max_num_batched_tokens=70, **OPTIONS) as llm:
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
        (step(0, [3]), (64, 16, 16, 64)),
        (step(16, [30, 34]), (64, 16, 16, 64)),
        (step(17, [64]), (64, 32, 16, 64)),
        (step(4, [65]), (128, 16, 32, 64)),
        (step(4, [2] * 16), (64, 16, 16, 64)),
        (step(4, [2] * 17), (128, 16, 32, 64)),  # more prompts than a quarter of the tokens
        (step(0, [100, 157]), (300, 16, 32, 64)),
        (step(32, [150, 150]), (300, 32, 32, 64)),
        (step(32, [150, 151]), None),  # more tokens than any
        (step(33, [8]), None),  # more decodes
        (step(0, [2] * 33), None),  # more prompts
    ],
    ids=str,
)
def test_a_step_runs_in_the_least_shape_that_holds_it(llm, of, shape):
    assert llm.engine.executor.runner.graphs.mixed.shape(of) == shape


def test_long_rows_have_wide_tables():
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 2048, "num_blocks": 200}
    with emulated_graphs(), LLM(device="cpu", **options) as llm:
        mixed = llm.engine.executor.runner.graphs.mixed
        assert mixed.shape(step(1, [64], start=960)).width == 64
        assert mixed.shape(step(1, [64], start=961)).width == 128


def test_what_is_sent_names_each_token_and_each_row(llm):
    mixed = llm.engine.executor.runner.graphs.mixed
    of = Step(
        1,
        rows=np.array([7, 2, 5, 0], np.int32),
        starts=np.array([9, 4, 0, 6], np.int32),
        queries=np.array([1, 1, 3, 2], np.int32),
        samples=np.array([True, True, False, True]),
        decodes=2,
    )
    shape = mixed.shape(of)
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
    assert starts.tolist() == [0, 3, 5] + [5] * (shape.prompts - 2) + [shape.tokens], "padding belongs to the last row"


def replays(llm) -> int:
    return sum(each.graph.count for each in llm.engine.executor.runner.graphs.steps.mixed.values())


WISHES = [
    {},
    {"logprobs": 2},
    {"repetition_penalty": 1.5},
    {"top_p": 0.5, "temperature": 1.0},
    {"logit_bias": {3: 9.0}},
    {"top_k": 3, "temperature": 2.0, "logprobs": 1},
]


@pytest.mark.parametrize("wish", [*WISHES, {"prompt_logprobs": 1}], ids=str)
def test_whoever_asks_for_more_of_sampling_is_in_a_graph_all_the_same(llm, wish):
    """All but log-probabilities of prompts, which need every token's last layer."""
    before = replays(llm)
    llm.generate(PROMPTS, SamplingParams(**PLAIN | wish))
    assert replays(llm) - before == ("prompt_logprobs" not in wish)


def test_each_row_gets_what_it_asked_for_beside_others_in_a_graph(llm, directory):
    """The rows' wishes differ, so an answer at another row's place would not go unseen."""
    drawn = [([5, 6, 7 + i], SamplingParams(**PLAIN | {"max_tokens": 4, "seed": i} | WISHES[i % 6])) for i in range(12)]
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


def test_a_step_in_a_graph_leaves_no_batch_for_one_outside_to_go_on_from(directory):
    """Outside, a batch of decodes is moved along by a token: its rows may be others' after steps inside."""
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    with emulated_graphs(), LLM(directory, **OPTIONS | {"run_ahead": 0}) as llm:
        engine = llm.engine
        engine.submit(engine.prepare([5, 6, 7], params))
        with minillm.using(rms_norm=lambda *arguments: reference.rms_norm(*arguments)):
            while engine.scheduler.launched < 3:
                engine.step()
        assert engine.executor.runner._decoding is not None
        engine.step()
        assert engine.executor.runner._decoding is None


def test_after_a_step_with_prompts_decodes_are_told_their_positions_anew(llm, monkeypatch):
    """They keep their positions on the device from one step to the next, and this one has moved them."""
    graphs = llm.engine.executor.runner.graphs
    graph = SimpleNamespace(graph=SimpleNamespace(replay=lambda: None), out=torch.zeros(80), to_sample=[None])
    monkeypatch.setattr(graphs.mixed, "captured", lambda shape: graph)
    graphs.decodes._sent = np.arange(2), np.full(2, 3)
    assert graphs.mixed.launch(step(2, [3])) is not None
    assert [len(each) for each in graphs.decodes._sent] == [0, 0]


def test_a_readers_operation_runs_outside_even_if_it_is_capturable(llm):
    """It may look at what a graph pads: the largest number of queries, rows without any."""
    own, seen = llm.engine.model.ops.prefill_attention, []

    def mine(q, cache, table, lengths, starts, max_queries, options):
        seen.append((max_queries, lengths.tolist()))
        return own(q, cache, table, lengths, starts, max_queries, options)

    with minillm.using(capturable=True, prefill_attention=mine):
        llm.generate(PROMPTS, SamplingParams(**PLAIN))
    assert seen[0] == (3, [3, 2]) and not llm.engine.executor.runner.graphs.steps.mixed


def test_heads_that_attention_has_no_kernel_for_have_no_such_graphs(tmp_path):
    models.make("gemma-grouped").save_pretrained(tmp_path)
    with emulated_graphs(), LLM(tmp_path, dtype="float32", device="cpu") as llm:
        assert llm.model_config.head_dim == 8 and llm.engine.executor.runner.graphs.mixed is None
        assert len(llm.generate(PROMPTS, SamplingParams(**PLAIN))) == 3


def test_warming_up_captures_every_shape_the_largest_first(small):
    small.warm_up()
    graphs = small.engine.executor.runner.graphs
    captured = list(graphs.steps.mixed)
    assert set(captured) == set(graphs.mixed.shapes) and list(graphs.steps.decodes)[0] == graphs.decodes.largest
    for most in zip(*captured, strict=True):
        assert max(most) == most[0], "into the first one's memory the others fit"


def test_the_first_prompt_has_the_largest_shape_captured_before_its_own(small):
    small.generate(PROMPTS, SamplingParams(**PLAIN))
    graphs = small.engine.executor.runner.graphs
    assert list(graphs.steps.mixed) == [graphs.mixed.shapes[-1], graphs.mixed.shapes[0]]


def test_a_shape_without_memory_for_its_graph_is_launched_without(llm, small, monkeypatch):
    wanted = llm.generate(PROMPTS, SamplingParams(**PLAIN))
    mixed = small.engine.executor.runner.graphs.mixed
    shapes = list(mixed.shapes)

    def full(shape):
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(mixed, "rehearse", full)
    found = small.generate(PROMPTS, SamplingParams(**PLAIN))
    assert mixed.shapes == shapes[1:] and not small.engine.executor.runner.graphs.steps.mixed
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]


def test_warming_up_leaves_a_readers_operation_out_of_these_graphs(small):
    seen = []

    def mine(q, cache, table, lengths, *rest, **options):
        seen.append(lengths.min().item())
        return torch.zeros_like(q)

    with minillm.using(capturable=True, prefill_attention=mine):
        small.warm_up()
        assert not small.engine.executor.runner.graphs.steps.mixed
    assert min(seen) > 0, "rows without a key are padding, which no reader's operation is given here"


def test_shapes_have_no_more_rows_than_a_step_can_have(directory):
    with emulated_graphs(), LLM(directory, **OPTIONS | {"max_num_seqs": 1}) as llm:
        assert {(shape.decodes, shape.prompts) for shape in llm.engine.executor.runner.graphs.mixed.shapes} == {(1, 1)}
    with emulated_graphs(), LLM(directory, max_num_batched_tokens=8, **OPTIONS) as llm:
        assert {shape.decodes for shape in llm.engine.executor.runner.graphs.mixed.shapes} == {8}


def test_closing_frees_the_graphs_at_once(small):
    small.generate(PROMPTS, SamplingParams(**PLAIN))
    graphs = small.engine.executor.runner.graphs
    kept = [weakref.ref(graph.graph) for graph in graphs.steps]
    del graphs
    gc.disable()
    try:
        small.close()
        assert len(kept) > 2 and all(each() is None for each in kept)
    finally:
        gc.enable()
