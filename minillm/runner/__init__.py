"""Running a step on the device: state, memory, CUDA graphs, sampling.  Lessons 09 to 11."""

from .runner import Runner

__all__ = ["Runner"]
