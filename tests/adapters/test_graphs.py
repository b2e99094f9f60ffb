"""Captured steps with adapters: a second set of graphs, so that steps without adapters replay what they always did."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from minillm import LLM, SamplingParams, ops
from minillm.adapters import slots
from minillm.engine.adapters import some_adapter
from minillm.errors import InvalidRequest
from minillm.runner.executor import WatchedExecutor
from tests import models, peft_files
from tests.emulated_graphs import emulated_graphs

kernels = pytest.importorskip("minillm.ops.triton", reason="graphs need triton, which is not installed here")
GREEDY = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
NAMES = [None, "adapter 0", "adapter 2"]
ADDED = ("add_adapted", "product_with_inner", "fits_a_token", "added", "adapted_gate", "normed")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    models.make("gemma-multi-query", num_hidden_layers=2).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def adapters(directory, tmp_path_factory):
    return peft_files.several(tmp_path_factory.mktemp("adapters"), directory, 3)


def shapes(llm):
    """Which graphs have been replayed: (kind, whether adapters are in it)."""
    captured = llm.engine.executor.runner.graphs.captured
    graphs = {("decode", key.reach): each for key, each in captured.decodes.items()}
    graphs |= {("mixed", key[-1]): each for key, each in captured.mixed.items()}
    return {key for key, each in graphs.items() if each.graph.count}


def run_kernels(monkeypatch):
    """Let CPUs run the compositions of adapters as GPUs do: interpreted kernels."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here: test_adapters_on_gpu.py runs them")
    for name in (*ADDED, "rotary_write", "prompt_attention"):
        monkeypatch.setitem(ops.on("cpu").fused, name, getattr(kernels, name))


@pytest.mark.parametrize("name", ["gemma-multi-query", "llama-biases", "qwen3-grouped", "gemma2-grouped-untied"])
def test_factors_beneath_weights_give_the_same_tokens(name, tmp_path, monkeypatch):
    """A step reaches the lowest slots alone, or all of them, as its rows need."""
    models.make(name).save_pretrained(tmp_path / "model")
    given = peft_files.several(tmp_path / "adapters", tmp_path / "model", 3)
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_blocks": 30, "dtype": "float32", "device": "cpu"}
    prompts, products = [[7, 8, 9], [7, 8, 9, 10], [11], [7, 8]], []

    def run(llm):
        return [
            [each.token_ids for each in llm.generate(prompts, GREEDY, adapter=names)]
            for names in (["adapter 0", None, "adapter 0", "adapter 0"], [None, "adapter 2", "adapter 1", "adapter 0"])
        ]

    with LLM(tmp_path / "model", adapters=given, **options) as llm:
        expected = run(llm)
    run_kernels(monkeypatch)
    monkeypatch.setattr(slots, "NEAR", 1)
    monkeypatch.setattr(slots, "AdapterSlots", partial(slots.AdapterSlots, beneath=True))
    own = kernels.product_with_inner

    def product_with_inner(x, weight, adapted):
        products.append((len(x), adapted.beneath[id(weight)].shape[0] - weight.shape[0]))
        return own(x, weight, adapted)

    monkeypatch.setitem(ops.on("cpu").fused, "product_with_inner", product_with_inner)
    with LLM(tmp_path / "model", adapters=given, **options) as llm:
        adapters = llm.engine.executor.runner.state.adapters
        assert adapters.reaches == (1, 3) and run(llm) == expected
        size = next(iter(adapters.factors.values())).down.shape[1]
    assert {beneath for _, beneath in products} >= {size, 3 * size}


@pytest.mark.proof
def test_steps_with_adapters_replay_graphs_of_their_own(directory, adapters, monkeypatch):
    prompts = [[7, 8, 9], [7, 8, 9, 10], [11]]
    with LLM(directory, dtype="float32", device="cpu", adapters=adapters) as llm:
        expected = [each.token_ids for each in llm.generate(prompts, GREEDY, adapter=NAMES)]
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "num_blocks": 30, "dtype": "float32", "device": "cpu"}
    with emulated_graphs():
        run_kernels(monkeypatch)
        with LLM(directory, adapters=adapters, **options) as llm:
            together = [each.token_ids for each in llm.generate(prompts, GREEDY, adapter=NAMES)]
            assert shapes(llm) <= {("decode", 3), ("mixed", 3), ("decode", 0)}
            alone = llm.generate(prompts[1], GREEDY, adapter=NAMES[1])[0].token_ids
            replayed = shapes(llm)
            assert {("decode", 3), ("mixed", 3)} <= replayed
            single_row = llm.engine.executor.runner.graphs.decodes.single_row
            assert single_row is not None
            base = llm.generate(prompts[0], GREEDY)[0].token_ids
            assert shapes(llm) >= replayed | {("decode", 0), ("mixed", 0)}
    assert together == expected and alone == expected[1] and base == expected[0]


def test_a_step_replays_the_graph_that_reaches_its_slots(directory, adapters, monkeypatch):
    prompts, asked = [[7, 8, 9], [7, 8, 9, 10], [11]], [["adapter 0", None, "adapter 0"], [*adapters]]
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "num_blocks": 30, "dtype": "float32", "device": "cpu"}
    with LLM(directory, adapters=adapters, **options) as llm:
        expected = [[each.token_ids for each in llm.generate(prompts, GREEDY, adapter=names)] for names in asked]
    with emulated_graphs():
        run_kernels(monkeypatch)
        monkeypatch.setattr(slots, "NEAR", 1)
        monkeypatch.setattr(slots, "AdapterSlots", partial(slots.AdapterSlots, beneath=True))
        with LLM(directory, adapters=adapters, **options) as llm:
            for names, wanted, reaches in zip(asked, expected, ({1}, {1, 3}), strict=True):
                assert [each.token_ids for each in llm.generate(prompts, GREEDY, adapter=names)] == wanted
                assert {reach for kind, reach in shapes(llm) if kind == "decode" and reach} == reaches


def test_each_shape_is_captured_with_adapters_and_without(directory, adapters, monkeypatch):
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "num_blocks": 30, "dtype": "float32", "device": "cpu"}
    with emulated_graphs(), LLM(directory, adapters=adapters, **options) as llm:
        graphs, seen = llm.engine.executor.runner.graphs, []
        for kind in graphs.kinds:
            monkeypatch.setattr(type(kind), "capture", lambda _, shape: seen.append(shape))
        graphs.capture_all()
        plain = {each for each in seen if not each.reach}
        assert {each._replace(reach=3) for each in plain} == {each for each in seen if each.reach}
        assert {each.rows for each in plain} >= {1, 2, 3} and set(graphs.mixed.shapes) <= plain


def test_warming_up_runs_the_same_prompts_with_an_adapter_and_without(directory, adapters):
    """Else the first request with one would compile kernels, and all others in its steps would wait."""
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "num_blocks": 30, "dtype": "float32", "device": "cpu"}
    with LLM(directory, adapters=adapters, **options) as llm:
        seen = SeenSlots(llm.engine.executor)
        with llm.engine.running_on(seen):
            llm.warm_up()
            assert not seen.found, "there is nothing to compile on a CPU"
            seen.facts = replace(seen.facts, captures=True)
            llm.warm_up()
        assert {length for length, slot in seen.found if slot} == {1, 4, 16}
        assert {length for length, slot in seen.found if not slot} == {1, 4, 16}


def test_where_none_is_loaded_an_adapter_that_changes_nothing_stands_in(directory, adapters):
    options = {"dtype": "float32", "device": "cpu"}
    with LLM(directory, max_loras=1, **options) as llm:
        own = llm.generate([7, 8, 9], GREEDY)[0].token_ids
        with some_adapter(llm.engine) as name:
            assert llm.generate([7, 8, 9], GREEDY, adapter=name)[0].token_ids == own
        assert llm.engine.adapters.names == [] and not llm.engine.executor.runner.state.adapters._ready
        with pytest.raises(InvalidRequest, match="is not loaded"):
            llm.generate([7, 8, 9], GREEDY, adapter=name)
        llm.engine.load_adapter("adapter 0", adapters["adapter 0"])
        with some_adapter(llm.engine) as name:
            assert name == "adapter 0"
        assert llm.engine.adapters.names == ["adapter 0"]
    with LLM(directory, **options) as llm, some_adapter(llm.engine) as name:
        assert name is None


class SeenSlots(WatchedExecutor):
    """Finds each new request's number of tokens and whether it has a slot."""

    def __init__(self, executor):
        super().__init__(executor)
        self.found = set()

    def launch(self, step):
        self.found |= {(len(new.tokens), new.adapter[1] > 0) for new in step.new_rows}
        return super().launch(step)


@pytest.mark.proof
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_one_row_with_an_adapter_runs_the_fused_step_of_dense_weights(quantization, directory, adapters, monkeypatch):
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "num_blocks": 30, "dtype": "float32", "device": "cpu"}
    options["quantization"] = quantization
    params, names = replace(GREEDY, max_tokens=3), ["adapter 0", "adapter 1", None]
    with LLM(directory, adapters=adapters, **options) as llm:
        wanted = [each.token_ids for each in llm.generate([[7, 8]] * 3, params, adapter=names)]
    with emulated_graphs(), LLM(directory, adapters=adapters, **options) as llm:
        monkeypatch.setattr(ops.on("cpu"), "add_low_rank", ops.triton.add_low_rank)
        fused, seen = llm.engine.executor.runner.graphs.decodes.single_row, []
        own = type(fused).logits
        monkeypatch.setattr(type(fused), "logits", lambda *given: seen.append(given[1].adapted) or own(*given))
        found = [each.token_ids for each in llm.generate([[7, 8]] * 3, params, adapter=names)]
    assert found == wanted and len({*map(tuple, found)}) == 3
    assert any(each is None for each in seen)
    assert any(each is not None for each in seen) == (quantization is None)
