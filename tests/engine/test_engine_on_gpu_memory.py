"""GPU memory: steady state allocates nothing, graphs fit their estimate, and oversized settings are rejected."""

import gc

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.errors import ConfigError
from minillm.runner.cuda_graph import DecodeShape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and there is none here")
PLAIN = SamplingParams(max_tokens=4, temperature=1, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=2000, temperature=1, ignore_eos=True)


def share_of(gigabytes: float) -> float:
    """This amount as a share of the GPU's memory."""
    return gigabytes * 1e9 / torch.cuda.get_device_properties(0).total_memory


def counted() -> dict[str, int]:
    stats = torch.cuda.memory_stats()
    return {name: stats[name] for name in ("num_device_alloc", "num_device_free", "reserved_bytes.all.current")}


@pytest.mark.parametrize("rows", [1, 64])
def test_two_hundred_decode_steps_allocate_nothing(rows):
    with LLM(device="cuda", max_num_seqs=64, run_ahead=2) as llm:
        engine = llm.engine
        for i in range(rows):
            engine.submit(engine.prepare([5 + i, 6, 7], ENDLESS))
        for _ in range(30):
            engine.step()
        before, graphs = counted(), len(engine.executor.runner.graphs.captured.decodes)
        active = torch.cuda.memory_stats()["active.all.current"]
        for _ in range(200):
            engine.step()
        assert len(engine.stats()) and engine.stats()["running"] == rows
        assert len(engine.executor.runner.graphs.captured.decodes) == graphs, (
            "a graph with a longer table was captured: these steps are not in steady state"
        )
        assert counted() == before
        assert abs(torch.cuda.memory_stats()["active.all.current"] - active) <= 8, (
            "tensors accumulate from step to step"
        )


def test_closing_frees_the_cache_at_once():
    gc.collect()
    before = torch.cuda.memory_allocated()
    llm = LLM(device="cuda")
    llm.generate([[5, 6, 7]], PLAIN)
    gc.disable()
    try:
        llm.close()
        assert torch.cuda.memory_allocated() - before < 64 << 20
    finally:
        gc.enable()


@pytest.mark.parametrize("rows", [1, 64, 384])
def test_all_graphs_together_fit_their_memory_estimate(rows):
    """Smallest first is the worst order; the largest graph is captured first all the same."""
    with LLM("gemma-2b", load_format="dummy", device="cuda", max_model_len=1024, max_num_seqs=rows) as llm:
        runner, config = llm.engine.executor.runner, llm.config
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))  # libraries allocate their workspaces
        runner.graphs.close()
        runner.caches.clear()
        reckoned = runner.memory.graphs(lambda caches: runner._make_graphs(config, caches))
        runner.caches += runner.memory.allocate(400)
        runner.graphs = runner._make_graphs(config, runner.caches)
        gc.collect()
        torch.cuda.empty_cache()
        before, graphs = torch.cuda.mem_get_info()[0], runner.graphs
        assert not graphs.captured.decodes and not graphs.captured.mixed
        with torch.inference_mode():
            for shape in graphs.mixed.shapes:
                graphs.mixed.capture(shape)
            for size in graphs.decodes.sizes:
                for width in (16, 32, 64):
                    graphs.decodes.capture(DecodeShape(size, width))
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        taken = before - torch.cuda.mem_get_info()[0]
        pool = sum(s["total_size"] for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] != (0, 0))
        count = len(graphs.captured.decodes) + len(graphs.captured.mixed)
        print(
            f"{count} graphs: reckoned {reckoned / 2**20:.0f} MiB, taken {taken / 2**20:.0f}, pool {pool / 2**20:.0f}"
        )
        print(f"driver's share of one: {(taken - pool) / count / 2**20:.2f} MiB")
        assert taken <= reckoned


def test_the_cache_leaves_room_for_the_largest_steps():
    """All rows use the general sampling path, prompts are as long as a step allows, then all graph sizes run."""
    share = 0.25
    with LLM(
        "gemma-2b", load_format="dummy", device="cuda", max_model_len=2048, max_num_seqs=1024,
        max_num_batched_tokens=16384, gpu_memory_utilization=share,
    ) as llm:  # fmt: skip
        total = torch.cuda.mem_get_info()[1]
        general = SamplingParams(max_tokens=4, top_p=0.9, repetition_penalty=1.1, ignore_eos=True)
        plain = SamplingParams(max_tokens=40, temperature=1, ignore_eos=True)
        prompts = [[1 + i % 1000] * (16 if i % 4 else 300) for i in range(1024)]
        llm.generate(prompts, [general if i % 2 else plain for i in range(1024)])
        llm.generate(prompts, general)
        llm.generate([[1] * 2000] * 8, plain)
        taken = total - torch.cuda.mem_get_info()[0]
        print(f"taken at last {taken / total:.3f} of the GPU, {share} was to be used")
        assert taken <= (share + 0.01) * total


@pytest.mark.parametrize(
    "options, message",
    [
        ({"gpu_memory_utilization": 0.001}, "gpu_memory_utilization=.* would fit"),
        ({"num_blocks": 10**9}, "num_blocks=1000000000 needs .* blocks would fit"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_rejected_at_startup_with_ones_that_do(options, message):
    with pytest.raises(ConfigError, match=message) as error:
        LLM(device="cuda", **options)
    print(error.value)
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    "gigabytes, options, message",
    [
        (
            6.3,
            {"max_num_seqs": 16},
            "a step of max_num_batched_tokens=16384 .* max_num_batched_tokens=[0-9]+ would fit",
        ),
        (7.5, {"dtype": "float32"}, "the weights in float32 are 10.0 GB, .* in bfloat16 they are 5.0 GB"),
    ],
    ids=str,
)
def test_a_smaller_gpu_reports_what_does_not_fit(gigabytes, options, message):
    """torch may use only so much of this GPU, and the model's weights take 5 GB."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(share_of(gigabytes))
    try:
        with pytest.raises(ConfigError, match=message) as error:
            LLM("gemma-2b", load_format="dummy", device="cuda", **options)
        print(error.value)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        del error
        gc.collect()
        torch.cuda.empty_cache()


def test_the_memory_share_that_an_error_suggests_is_enough():
    options = {"gpu_memory_utilization": share_of(4.5), "max_num_batched_tokens": 2048}
    with pytest.raises(ConfigError, match="would fit") as error:
        LLM("gemma-2b", load_format="dummy", device="cuda", **options)
    share = float(str(error.value).split("gpu_memory_utilization=")[2].split(" ")[0])
    del error
    gc.collect()
    torch.cuda.empty_cache()
    options["gpu_memory_utilization"] = share
    with LLM("gemma-2b", load_format="dummy", device="cuda", **options) as llm:
        assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))[0].finish_reason == "length"
