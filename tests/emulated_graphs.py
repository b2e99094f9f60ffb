"""Steps as CUDA graphs, emulated: a replay runs the step's operations again, on any device.

Fixed rows of state, padding, run-ahead and the fused single row are then those of a GPU, with kernels interpreted.
"""

import weakref
from contextlib import contextmanager

import pytest
import torch

from minillm import ops
from minillm.runner import Runner


@contextmanager
def emulated_graphs():
    """Engines made inside run their steps as graphs would."""
    from minillm.ops import triton as kernels
    from minillm.runner.cuda_graph import Graph
    from minillm.runner.decode_graphs import DecodeGraphs

    class Replay:
        def __init__(self, step):
            self.step, self.count, self.captured = step, 0, None

        def replay(self):
            self.count += 1
            self.captured.to_sample = self.step()

    class Emulated(DecodeGraphs):
        def record(self, step, out):
            replay = Replay(step)
            captured = Graph(replay, out, ())
            replay.captured = weakref.proxy(captured)
            return captured

        def launch(self, step):
            return kept(super().launch(step))

        def launch_mixed(self, step):
            replayed = super().launch_mixed(step)
            return None if replayed is None else kept(replayed)

    def kept(replayed):
        replayed.sampled = replayed.sampled.clone()  # a GPU copies the tokens to the host before the next replay
        return replayed

    def made(runner, config):
        return None if config.enforce_eager else Emulated(runner, config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "_decode_graphs", made)
        # Padding has slot -1, which torch's own indexing does not pass over.
        patch.setattr(ops.on("cpu"), "write_kv", kernels.write_kv)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        yield
