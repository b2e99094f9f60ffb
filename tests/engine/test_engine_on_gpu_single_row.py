"""Stress test of the fused single-row step: back-to-back replays with overlapping kernels, at tile and part boundaries.

If a kernel read its input too early, or summed a part before it was written, results would vary. So the same tokens
also run with the device idle between steps, and must give bitwise equal results.
"""

import random

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.model.batch import Batch
from minillm.ops import Rows
from minillm.runner.cuda_graph import DecodeShape
from tests.chance import SEED

pytestmark = [
    pytest.mark.explore,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and there is none here"),
]
STEPS = 8  # replays in a row
# With head size 256 a tile has 32 keys and a row at most 16 parts, so from 513 keys on a part has several tiles.
LENGTHS = [
    *(1, 2, 15, 16, 17, 28, 31, 32, 33, 60, 63, 64, 65, 95, 96, 97, 127, 128, 250, 256),
    *(480, 505, 511, 512, 513, 600, 767, 1023, 1024, 1500, 2040),
]


@pytest.fixture(scope="module")
def llm():
    options = {"load_format": "dummy", "device": "cuda", "max_model_len": 2112, "max_num_seqs": 1, "num_blocks": 400}
    with LLM("gemma-2b", **options) as llm:
        model = llm.engine.model
        generator = torch.Generator("cuda").manual_seed(SEED)
        with torch.inference_mode():
            for layer in model.layers:  # large enough that attention determines the logits
                for matrix, gain in (
                    (layer.qkv, 2.0),
                    (layer.attention_out, 2.0),
                    (layer.gate_up, 1.0),
                    (layer.down, 1.0),
                ):
                    matrix.weight.normal_(0, gain * matrix.weight.shape[1] ** -0.5, generator=generator)
        yield llm


class Driver:
    """Drives row 0 of the engine's device state by hand and keeps each replay's logits."""

    def __init__(self, runner):
        self.runner, self.graphs, self.model = runner, runner.graphs.decodes, runner.model
        generator = torch.Generator("cuda").manual_seed(SEED + 1)
        width = runner.state.block_table.shape[2]
        shuffled = torch.randperm(runner.num_blocks, generator=generator, device="cuda")
        runner.state.block_table[0, 0] = shuffled[:width].int()
        for cache in runner.caches:
            for part in (cache.k, cache.v):
                part.normal_(0, 1, generator=generator)
        runner.state.tokens.random_(2, 250_000, generator=generator)
        self.kept = torch.zeros(STEPS, self.model.config.vocab_size, dtype=self.model.dtype, device="cuda")
        self.place = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.inputs = torch.tensor([[0], [0], [-1]], device="cuda")  # row, position, no given token
        self.captured = {}

    def graph(self, width: int) -> torch.cuda.CUDAGraph:
        if width not in self.captured:
            out = torch.zeros(1, dtype=torch.int64, device="cuda")

            def step():
                to_sample = self.graphs._logits(self.inputs, DecodeShape(1, width))
                self.kept.index_copy_(0, self.place, to_sample[0])
                self.place.add_(1)
                self.graphs._sample(self.inputs, to_sample, out)

            self.start(5)
            step()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            self.captured[width] = (graph, out)
        return self.captured[width][0]

    def start(self, length: int) -> None:
        """Set up the step that makes the row `length` tokens long."""
        state = self.runner.state
        self.inputs[1], state.seed[0] = length - 1, length
        state.parameters[0] = torch.tensor([1.0, 0, 0, 1, 0])  # temperature 1 alone, as `NEUTRAL` but for the first
        self.place.zero_()

    def replay(self, length: int, idle_between: bool) -> tuple[torch.Tensor, torch.Tensor]:
        graph = self.graph(self.graphs.width(-(-(length + STEPS) // self.runner.state.block_size)))
        self.start(length)
        torch.cuda.synchronize()
        for _ in range(STEPS):
            graph.replay()
            if idle_between:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return self.kept.clone(), self.runner.state.tokens[0, length : length + STEPS].clone()

    def unfused(self, length: int) -> torch.Tensor:
        """The logits of the same tokens from the unfused operations."""
        found = []
        for at in range(length, length + STEPS):
            ints = {"dtype": torch.int32, "device": "cuda"}
            position = torch.tensor([at - 1], device="cuda")
            block = self.runner.state.block_table[0, 0, (at - 1) // 16].long()
            table = self.runner.state.block_table[:, :1]
            rows = Rows.of_groups(table, torch.tensor([at], **ints), torch.tensor([0, 1], **ints), 1)
            slots = (block * 16 + (at - 1) % 16).view(1, 1)
            token = self.runner.state.tokens[0, at - 1 : at].long()
            batch = Batch(token, position, slots, rows, (), None)
            found.append(self.model.logits(self.model.forward(batch, self.runner.caches)))
        return torch.cat(found)


@torch.inference_mode()
def test_back_to_back_replays_equal_single_steps_bitwise_and_the_unfused_logits(llm):
    driver, rng, worst = Driver(llm.engine.executor.runner), random.Random(SEED), 0.0
    for length in LENGTHS + [rng.randint(1, 2090) for _ in range(30)]:
        wanted, tokens = driver.replay(length, idle_between=True)
        for _ in range(4):
            found, again = driver.replay(length, idle_between=False)
            assert torch.equal(found, wanted) and torch.equal(again, tokens), f"from {length} keys on"
        plain = driver.unfused(length)
        worst = max(worst, ((wanted.double() - plain.double()).norm() / plain.double().norm()).item())
    print(f"largest difference from the unfused step: {worst:.2e}")
    assert worst < 0.1
    assert not driver.graphs.single_row.attend.finished.any(), "a counter was not reset"


@torch.inference_mode()
def test_the_comparison_detects_a_missing_key(llm):
    driver = Driver(llm.engine.executor.runner)
    for length in (33, 513):
        driver.replay(length, idle_between=True)
        whole = driver.unfused(length)
        block = driver.runner.state.block_table[0, 0, (length - 10) // 16].long()
        for cache in driver.runner.caches:
            cache.v[block, (length - 10) % 16] += 30.0
        other, _ = driver.replay(length, idle_between=True)
        assert ((other.double() - whole.double()).norm() / whole.double().norm()).item() > 0.1


def test_the_engine_uses_the_fused_step_for_one_request(llm):
    found = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    assert len(found[0].token_ids) == 40
    graphs = llm.engine.executor.runner.graphs
    assert graphs.decodes.single_row is not None and {shape.rows for shape in graphs.captured.decodes} == {1}
