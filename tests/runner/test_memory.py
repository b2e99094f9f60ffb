"""Dividing GPU memory: the size of the cache, and the error message when memory is too small."""

import gc
import re
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from minillm import LLM, SamplingParams, ops
from minillm.config import EngineConfig
from minillm.errors import ConfigError, InvalidRequest
from minillm.model.parallel import PipelineStage
from minillm.runner import memory
from minillm.runner.cuda_graph import DecodeShape
from minillm.runner.memory import Memory, MemoryBudget
from tests import models, peft_files
from tests.emulated_graphs import emulated_graphs

GIB = 2**30
CONFIG = EngineConfig().on("cuda")
BLOCK = 2**20  # bytes
ROOM = MemoryBudget(
    total=10 * GIB, taken=4 * GIB, workspace=2 * GIB, graphs=GIB, utilization=0.9
)  # 2 GiB for the cache


def blocks(room: MemoryBudget = ROOM, most: int = 10**6, least: int = 1, config: EngineConfig = CONFIG) -> int:
    return room.blocks(most, least, BLOCK, config)


def test_the_cache_gets_the_memory_left_by_weights_workspace_and_graphs():
    assert ROOM.cache == 2 * GIB
    assert blocks() == 2048
    assert blocks(most=100) == 100, "the cache must not exceed all rows at full length"
    assert blocks(least=2048) == 2048


def test_too_little_memory_for_the_shortest_request_suggests_a_share_that_fits():
    room = MemoryBudget(10 * GIB, 4 * GIB, 2 * GIB, GIB, 0.7)
    with pytest.raises(ConfigError, match="leaves 0.00 GiB .* even the shortest request needs 0.05 GiB") as error:
        blocks(room, least=50)
    share = float(re.search(r"gpu_memory_utilization=(\S+) would fit", str(error.value))[1])
    assert blocks(replace(room, utilization=share), least=50) >= 50
    with pytest.raises(ConfigError):
        blocks(replace(room, utilization=share - 0.01), least=50)


@pytest.mark.parametrize("asked", [None, 2000])
def test_a_length_that_the_cache_cannot_hold_is_lowered_and_said(monkeypatch, caplog, asked):
    monkeypatch.setattr(memory, "CPU_CACHE_BYTES", 0)
    with LLM(device="cpu") as llm:
        block = llm.engine.executor.runner.memory.block_bytes
        assert llm.engine.max_model_len == 16, "one block is the least"
    monkeypatch.setattr(memory, "CPU_CACHE_BYTES", 10 * block)
    caplog.clear()
    with LLM(device="cpu", max_model_len=asked) as llm:
        assert llm.engine.max_model_len == llm.engine.max_request_len == 160
        (line,) = (each.getMessage() for each in caplog.records if each.name == "minillm.runner.runner")
        assert f"max_model_len is lowered from {asked or 2048:,} to 160 tokens" in line and "num_blocks" in line
        (whole,) = llm.generate([[5] * 150], SamplingParams(max_tokens=100, ignore_eos=True))
        assert len(whole.token_ids) == 10 and whole.finish_reason == "length"
        with pytest.raises(InvalidRequest, match="max_model_len = 160 tokens"):
            llm.generate([[5] * 160])


def test_a_length_that_fits_and_a_number_of_blocks_that_was_set_stay(caplog):
    with LLM(device="cpu", max_model_len=64) as llm:
        assert llm.engine.max_model_len == 64
    with LLM(device="cpu", num_blocks=3) as llm:
        assert llm.engine.max_model_len == llm.model_config.max_model_len, "such a request is refused by name"
    assert not caplog.records


def test_no_memory_left_reports_what_uses_it_and_suggests_only_options_that_help():
    room = MemoryBudget(total=10 * GIB, taken=8 * GIB, workspace=2 * GIB, graphs=GIB, utilization=0.9)
    with pytest.raises(
        ConfigError, match="8.00 GiB of 10.00 GiB are taken.* needs 2.00 GiB, CUDA graphs 1.00"
    ) as error:
        blocks(room)
    assert "would fit" not in str(error.value) and "lower max_num_batched_tokens" in str(error.value)


def test_too_many_blocks_are_rejected_with_the_number_that_fits():
    room = MemoryBudget(total=10 * GIB, taken=4 * GIB, workspace=2 * GIB, graphs=GIB, utilization=1.0)
    config = EngineConfig(num_blocks=3073).on("cuda")
    with pytest.raises(ConfigError, match="num_blocks=3073 needs 3.00 GiB .* 3072 blocks would fit"):
        blocks(room, most=3073, config=config)
    config = EngineConfig(num_blocks=3072).on("cuda")
    assert blocks(room, most=3072, config=config) == 3072
    assert blocks(room, most=3, config=EngineConfig(num_blocks=3).on("cuda")) == 3, (
        "fewer blocks than one request needs are allowed"
    )


@pytest.fixture
def llm(monkeypatch):
    """An engine on a CPU that simulates running out of GPU memory in steps of more than 16 tokens."""

    def reserved(measuring, run):
        run(measuring.allocate(1))
        return 5

    def packed(step, *rest):
        if step.queries.sum() > 16:
            raise torch.OutOfMemoryError("out of memory")
        return own(step, *rest)

    own = memory.pack
    monkeypatch.setattr(memory, "pack", packed)
    monkeypatch.setattr(Memory, "reserved_by", reserved)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 10 * GIB))
    with LLM(device="cpu", max_num_seqs=9, max_model_len=256) as llm:
        yield llm


def test_the_trial_run_has_an_adapter_in_each_row(monkeypatch, tmp_path):
    """Steps with adapters take more memory, and what the cache has is not theirs."""
    models.make("gemma-grouped").save_pretrained(tmp_path / "model")
    adapters = {"one": peft_files.write(tmp_path / "one", tmp_path / "model")}
    with LLM(tmp_path / "model", device="cpu", max_num_seqs=3, adapters=adapters) as llm:
        measuring, own, seen = llm.engine.executor.runner.memory, ops.on("cpu").add_low_rank, []
        monkeypatch.setattr(Memory, "reserved_by", lambda measuring, run: run(measuring.allocate(1)))
        monkeypatch.setattr(ops.on("cpu"), "add_low_rank", lambda out, *rest: seen.append(len(out)) or own(out, *rest))
        measuring.step_bytes(9, 3)
        assert seen and max(seen) == 9
        seen.clear()
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
        assert not seen, "the trial leaves no adapter behind"


def test_the_slots_of_adapters_are_named_among_what_takes_memory():
    room = MemoryBudget(total=10 * GIB, taken=8 * GIB, workspace=2 * GIB, graphs=GIB, utilization=0.9)
    with pytest.raises(ConfigError, match="weights, 5 slots of adapters, other programs.* lower .*, max_loras or"):
        blocks(room, config=replace(CONFIG, max_loras=4))


@pytest.mark.parametrize("count", [3, 9, 16])
def test_the_trial_run_of_the_largest_step_leaves_no_state(llm, count):
    params = SamplingParams(max_tokens=5, temperature=1, seed=3)
    before = llm.generate("Once upon a time", params)[0].token_ids
    assert (
        llm.engine.executor.runner.memory.workspace(replace(CONFIG, max_num_batched_tokens=count, max_num_seqs=9)) == 5
    )
    assert llm.generate("Once upon a time", params)[0].token_ids == before


def test_a_step_that_does_not_fit_suggests_one_that_does(llm):
    config = replace(CONFIG, max_num_batched_tokens=100, max_num_seqs=9)
    with pytest.raises(ConfigError, match="max_num_batched_tokens=100 .* max_num_batched_tokens=12 would fit"):
        llm.engine.executor.runner.memory.workspace(config)


def test_a_rank_tries_no_other_step_because_the_others_would_wait_for_the_first(llm, monkeypatch):
    config = replace(CONFIG, max_num_batched_tokens=100, max_num_seqs=9)
    monkeypatch.setattr(llm.engine.model, "parallel", SimpleNamespace(size=2, stage=PipelineStage()))
    monkeypatch.setattr(memory.Memory, "_step_fits", lambda *arguments: pytest.fail("another step"))
    with pytest.raises(ConfigError, match="max_num_batched_tokens=100 .* use a smaller model or dtype"):
        llm.engine.executor.runner.memory.workspace(config)


def test_the_largest_graph_is_measured_in_a_trial_run_and_captured_first(llm):
    pytest.importorskip("minillm.runner.decode_graphs", reason="graphs need triton, which is not installed here")
    runner, config = llm.engine.executor.runner, replace(CONFIG, max_num_seqs=9, max_num_batched_tokens=100)
    with emulated_graphs():
        from minillm.runner.step_graphs import CAPTURE_BYTES, GRAPH_BYTES

        reckoned = runner.memory.graphs(lambda caches: runner._make_graphs(config, caches))
        # Batches of 1, 2, 4, 8 and 9 rows, and prompts of 64 and of 100 tokens; tables of 16 blocks.
        assert reckoned == 5 + CAPTURE_BYTES + (5 + 2) * GRAPH_BYTES
        with LLM(device="cpu", max_num_seqs=4, max_model_len=512, max_num_batched_tokens=16) as other:
            other.generate([[5, 6], [7, 8]], SamplingParams(max_tokens=4, ignore_eos=True))
            captured = other.engine.executor.runner.graphs.captured.decodes
            assert list(captured) == [DecodeShape(4, 32), DecodeShape(2, 16)]


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU's own counters are not replaced: test_engine_on_gpu_memory.py"
)
def test_a_trial_run_measures_the_growth_of_peak_memory_and_frees_its_cache(monkeypatch):
    counters = {"reserved": 1000, "peak": 0}
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: counters["reserved"])
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: counters.update(peak=counters["reserved"])
    )
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: counters["peak"])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with LLM(device="cpu", max_num_seqs=2, max_model_len=64) as llm:
        measuring, given = llm.engine.executor.runner.memory, []

        def run(caches):
            given.append(caches)
            counters.update(peak=1700)

        assert measuring.reserved_by(run) == 700
        with pytest.raises(RuntimeError, match="fails"):
            measuring.reserved_by(lambda caches: given.append(caches) or (_ for _ in ()).throw(RuntimeError("fails")))
        assert given == [[], []], "the one-block caches were kept"


def test_closing_frees_the_cache_at_once_even_if_the_caller_keeps_references(tmp_path):
    models.make("gemma-multi-query").save_pretrained(tmp_path)
    with emulated_graphs():
        llm = LLM(tmp_path, max_num_seqs=2, max_num_batched_tokens=16)
        model = llm.engine.model
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
        keys = weakref.ref(llm.engine.executor.runner.caches[0].k)
        gc.disable()
        try:
            llm.close()
            assert keys() is None
        finally:
            gc.enable()
        assert model.nbytes


def test_step_memory_is_measured_with_penalties_over_full_length_rows(monkeypatch):
    widths = []

    def penalize(logits, history, *arguments):
        widths.append(tuple(history.shape))
        return logits

    monkeypatch.setattr("minillm.runner.sampler.penalize", penalize)
    monkeypatch.setattr(Memory, "reserved_by", lambda measuring, run: run(measuring.allocate(1)))
    with LLM(device="cpu", max_model_len=96, max_num_seqs=8, num_blocks=60) as llm, torch.inference_mode():
        llm.engine.executor.runner.memory.step_bytes(16, 8)
    assert widths == [(8, 96)]


@pytest.mark.parametrize("held", ["auto", "int8"])
def test_a_step_of_the_longest_prompts_is_measured_too_since_attention_may_gather_their_keys(held, monkeypatch):
    measured, steps = [], [[16, 16], [4] * 8]

    def packed(step, *rest):
        measured.append(step.queries.tolist())
        return own(step, *rest)

    def reserved(measuring, run):
        run(measuring.allocate(1))
        return max(measured[-1])

    own = memory.pack
    with LLM(device="cpu", max_model_len=16, max_num_seqs=8, num_blocks=60, kv_cache_dtype=held) as llm:
        monkeypatch.setattr(memory, "pack", packed)
        monkeypatch.setattr(Memory, "reserved_by", reserved)
        config = replace(CONFIG, max_num_batched_tokens=32, max_num_seqs=8)
        with torch.inference_mode():
            assert llm.engine.executor.runner.memory.workspace(config) == max(map(max, steps))
    assert measured == steps
