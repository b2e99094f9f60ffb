"""A step as a CUDA graph, and what it leaves behind when it has run.  Lesson 03.

Graphs that never run at the same time take their memory from one pool. So a step's logits are there until the next
replay: whoever asks for more of sampling than the graph does is served from them, in what is launched behind it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor


@dataclass(eq=False)
class Graph:
    """A captured step. What it sampled from lies in the pool, and is the step's until another graph is replayed."""

    graph: torch.cuda.CUDAGraph
    out: Tensor  # [rows] int64: what it sampled
    to_sample: tuple[Tensor, ...]  # logits [rows, vocab], temperatures and random numbers [rows]


@dataclass
class Replayed:
    """What a replayed step yields, on the device until the next one."""

    sampled: Tensor  # [rows that sample] int64
    logits: Tensor  # [rows of the graph, vocab]
    places: np.ndarray  # which of them belong to the rows that sample


def capture(step: Callable[[], tuple[Tensor, ...]], out: Tensor, pool) -> Graph:
    """Record what `step` launches; it is not run. step: puts its tokens into `out` and returns `to_sample`."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        to_sample = tuple(each.contiguous() for each in step())
    return Graph(graph, out, tuple(map(borrowed, to_sample)))


def borrowed(tensor: Tensor) -> Tensor:
    """The same memory, held by nobody: the pool may give it to other graphs as well."""
    plain = {"shape": (tensor.nbytes,), "typestr": "|u1", "data": (tensor.data_ptr(), False), "version": 2}
    memory = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=plain), device=tensor.device)
    return memory.view(tensor.dtype).view(tensor.shape)
