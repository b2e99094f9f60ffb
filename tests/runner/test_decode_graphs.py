"""Which CUDA graphs may run while operations are overridden, and when graphs are dropped."""

import dataclasses

import numpy as np
import pytest

import minillm
from minillm import LLM, SamplingParams, ops
from minillm.runner.cuda_graph import CapturedSteps, DecodeShape
from minillm.scheduler import Step
from minillm.speculation import every_draft_runs
from tests import models
from tests.emulated_graphs import emulated_graphs
from tests.proofs import only_in_proofs
from tests.speculation.proposers import Oracle, following

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
    models.make("gemma-multi-query", num_hidden_layers=1).save_pretrained(tmp_path)
    greedy = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    with emulated_graphs(), LLM(tmp_path, max_num_seqs=4, max_num_batched_tokens=4) as llm:
        llm.warm_up()
        captured = llm.engine.executor.runner.graphs.captured.decodes
        assert {shape.rows for shape in captured} == {1, 2, 4}
        stats = llm.stats()
        assert stats["running"] == stats["waiting"] == stats["blocks_cached"] == 0
        assert not llm.engine.has_work
        warmed = llm.generate([[5, 6, 7], [8, 9]], greedy)
    with LLM(tmp_path) as llm:
        assert [each.token_ids for each in llm.generate([[5, 6, 7], [8, 9]], greedy)] == [
            each.token_ids for each in warmed
        ]


def drafted(*counts: int, start: int = 20) -> Step:
    """A step of one row for each of these counts of drafts."""
    queries, rows = 1 + np.array(counts, np.int32), np.arange(len(counts), dtype=np.int32)
    drafts = np.where(np.arange(max(counts)) < queries[:, None] - 1, 7, -1)
    made = Step(1, rows, np.full(len(rows), start, np.int32), queries, rows >= 0, int((queries == queries[0]).sum()))
    made.drafts, made.queries_per_decode = drafts.astype(np.int32), int(queries[0])
    return made


@pytest.mark.parametrize(
    ("of", "shape"),
    [
        (drafted(7), (8, 16)),
        (drafted(8), (16, 16)),
        (drafted(2, 0, 1), (8, 16)),
        (drafted(3, start=252), (4, 16)),
        (drafted(3, start=253), (4, 32)),
        (drafted(31), (32, 16)),
        (drafted(32), None),  # more tokens than the ring in which they arrive
        (drafted(15, 15, 15), None),  # more tokens than the largest size
    ],
)
def test_a_step_with_drafts_runs_as_one_of_as_many_rows_as_it_has_tokens(of, shape):
    options = {"max_num_seqs": 4, "max_model_len": 512, "num_blocks": 40, "block_size": 16}
    with emulated_graphs(), LLM(device="cpu", speculate="ngram", speculate_tokens=40, **options) as llm:
        graphs = llm.engine.executor.runner.graphs.decodes
        assert graphs.sizes[-1] == 41 and graphs.fits(of) == (shape and DecodeShape(*shape))


def test_a_step_with_drafts_and_prompts_is_none_of_decodes_only():
    of = drafted(2, 0, 1)
    of.queries[1] = 4
    with emulated_graphs(), LLM(device="cpu", speculate="ngram", max_num_seqs=4, num_blocks=40) as llm:
        assert llm.engine.executor.runner.graphs.decodes.fits(of) is None


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
    models.make("gemma-multi-query", num_hidden_layers=1).save_pretrained(tmp_path)
    prompts, params = [[5, 9, 17], [30, 2]], SamplingParams(max_tokens=9, temperature=0.8, seed=3, ignore_eos=True)
    options = {"dtype": "float32", "max_num_seqs": 2, "max_model_len": 32, "num_blocks": 8, "block_size": 16}
    with LLM(tmp_path, enforce_eager=True, **options) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, params)]
    with emulated_graphs(), LLM(tmp_path, run_ahead=run_ahead, **options) as llm:
        assert [output.token_ids for output in llm.generate(prompts, params)] == expected


class EverySecond(Oracle):
    """Drafts wrong tokens each first time, and right ones each second time."""

    wrong = True

    def _drafts(self, asked):
        drafts = super()._drafts(asked)
        self.wrong = not self.wrong
        return drafts if self.wrong else [each ^ 1 for each in drafts]


@pytest.mark.parametrize(
    ("proposer", "penalty", "accepted"),
    [
        pytest.param(Oracle, 2.0, 7 + 7 + 6, id="penalties see drafts and not what a graph samples in their place"),
        pytest.param(EverySecond, 1.0, 7 + 7 + 3, id="a graph runs the drafts of its own step"),
    ],
)
def test_drafts_of_a_request_with_a_graph(proposer, penalty, accepted, tmp_path):
    """Rows with penalties are sampled again after the graph. A token after a wrong draft is one position further."""
    models.make("gemma-multi-query", num_hidden_layers=1).save_pretrained(tmp_path)
    params = SamplingParams(max_tokens=24, temperature=0, repetition_penalty=penalty, ignore_eos=True)
    options = {"dtype": "float32", "device": "cpu", "max_num_seqs": 1, "num_blocks": 8}
    with LLM(tmp_path, enforce_eager=True, **options) as llm:
        (expected,) = llm.generate([[5, 9, 17]], params)
    outputs = following([[5, 9, 17, *expected.token_ids]])
    with (
        every_draft_runs(),
        emulated_graphs(),
        LLM(tmp_path, speculate="ngram", **options) as llm,
        minillm.using(proposer=lambda: proposer(outputs)),
    ):
        (found,) = llm.generate([[5, 9, 17]], params)
        stats = llm.stats()
    assert found.token_ids == expected.token_ids
    assert stats["accepted_tokens"] == accepted
