"""Emulated CUDA graphs: a replay runs the step's operations again, on any device.

Static state rows, padding, run-ahead and the fused single-row step then work as on a GPU, with interpreted kernels.
"""

import weakref
from contextlib import contextmanager

import pytest
import torch

from minillm import ops
from minillm.runner import Runner


@contextmanager
def emulated_graphs():
    """Engines created inside run their steps as emulated graphs. Skips the test where kernels are not interpreted."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here: test_engine_on_gpu.py runs real graphs")
    from minillm.ops import triton as kernels
    from minillm.runner import step_graphs
    from minillm.runner.cuda_graph import CapturedSteps, Graph

    class Replay:
        def __init__(self, step):
            self.step, self.count, self.captured = step, 0, None

        def replay(self):
            self.count += 1
            self.captured.to_sample = self.step()

    class Emulated(CapturedSteps):
        def record(self, step, out):
            replay = Replay(step)
            captured = Graph(replay, out, ())
            replay.captured = weakref.proxy(captured)
            return captured

    class Graphs(step_graphs.StepGraphs):
        def replay(self, step):
            replayed = super().replay(step)
            if replayed is not None:  # a GPU copies the tokens to the host before the next replay
                replayed.sampled = replayed.sampled.clone()
            return replayed

    def made(runner, config, caches):
        return None if config.enforce_eager else Graphs(runner.model, runner.state, caches, config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "_make_graphs", made)
        patch.setattr(step_graphs, "CapturedSteps", Emulated)
        # Padding has slot -1, which torch's indexing would not skip.
        patch.setattr(ops.on("cpu"), "write_kv", kernels.write_kv)
        patch.setitem(ops.on("cpu").fused, "scored_sample", kernels.scored_sample)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        yield
