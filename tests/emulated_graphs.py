"""Steps as CUDA graphs, emulated: a replay runs the step's operations again, on any device.

Fixed rows of state, padding, run-ahead and the fused single row are then those of a GPU, with kernels interpreted.
"""

from contextlib import contextmanager

import pytest
import torch

from minillm import ops
from minillm.runner import Runner


@contextmanager
def emulated_graphs():
    """Engines made inside run their steps as graphs would."""
    from minillm.graphs import DecodeGraphs
    from minillm.ops import triton as kernels

    class Replay:
        def __init__(self, run):
            self.run, self.count = run, 0

        def replay(self):
            self.count += 1
            self.run()

    class Emulated(DecodeGraphs):
        def record(self, step):
            return Replay(step)

        def launch(self, step):
            return super().launch(step).clone()  # a GPU copies the tokens to the host before the next replay

        def launch_mixed(self, step):
            sampled = super().launch_mixed(step)
            return None if sampled is None else sampled.clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "_decode_graphs", lambda runner, config: Emulated(runner, config))
        # Padding has slot -1, which torch's own indexing does not pass over.
        patch.setattr(ops.on("cpu"), "write_kv", kernels.write_kv)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        yield
