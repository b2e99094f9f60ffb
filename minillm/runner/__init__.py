"""Running a step on the device: state, memory, CUDA graphs, sampling.  Lessons 09 to 11.

Everything that touches device memory while steps run belongs here. Deciding what runs (`scheduler`) and what the model
computes (`model`) does not.
"""

from .runner import Runner

__all__ = ["Runner"]
