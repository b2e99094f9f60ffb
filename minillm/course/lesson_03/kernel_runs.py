"""Run a learner's kernels in the middle of memory that holds other numbers, and assert what they did.  Lesson 03."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..shared.differences import assert_near
from ..shared.interpret import Watched, kernel_device, strays, surrounded, untouched

EMPTY = -77.0  # what memory holds before a kernel writes there


class Run:
    """One call of a candidate: its outputs, and what it did to other memory.

    junk: memory outside the inputs reads as NaN; otherwise as 0.
    """

    def __init__(self, function, inputs: list[Tensor], outputs: list[Tensor], *numbers: float, junk: bool = False):
        """Call function(*inputs, *numbers, *outputs). The tensors are copied; views keep their strides."""
        given = [_put(each, math.nan if junk else 0.0) for each in inputs]
        rooms = [_put(each, EMPTY) for each in outputs]
        before = [memory.clone() for _, memory in given]
        with strays(*(each for each, _ in given + rooms), junk=junk) as found, _Operations(found) as operations:
            function(*(each for each, _ in given), *numbers, *(each for each, _ in rooms))
        self.outputs = [each for each, _ in rooms]
        self.strays: Watched = found
        self.by_torch = operations.names
        self.loaded_all = [not found.watched or found.all_loaded(each) for each, _ in given]
        self.stored_all = all(not found.watched or found.all_stored(each) for each in self.outputs)
        left = found.left[len(given) :]
        self.launched = bool(left)
        self.kept = all(
            torch.equal(now.nan_to_num(), then.nan_to_num())
            for now, then in zip(self.outputs, left or self.outputs, strict=True)
        )
        self.inputs_unchanged = all(
            torch.equal(torch.nan_to_num(now), torch.nan_to_num(then))
            for (_, now), then in zip(given, before, strict=True)
        )
        self.nothing_else_written = found["stores"] == 0 and all(untouched(memory, EMPTY) for _, memory in rooms)


class _Operations(TorchDispatchMode):
    """Notes what torch computes or copies outside the launches of kernels: a launch of its own for each."""

    def __init__(self, found: Watched):
        super().__init__()
        self.found = found
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().removeprefix("aten::").split(".")[0].strip("_")
        if not (self.found.launching or function.is_view or "empty" in name):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def _put(tensor: Tensor, by: float) -> tuple[Tensor, Tensor]:
    """(A copy where kernels run, with the same strides and with `by` all around and in any gaps, its memory)."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat, memory = surrounded(torch.full((span,), by, dtype=tensor.dtype, device=kernel_device()), by)
    inside = flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())
    inside.copy_(tensor)
    return inside, memory


def room(*shape: int, dtype=torch.float32) -> Tensor:
    return torch.full(shape, EMPTY, dtype=dtype)


def near(found: Tensor, wanted, what: str, rtol: float = 1e-3, atol: float = 1e-4):
    assert_near(found, wanted, what, relative=rtol, absolute=atol)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def only_its_own(run: Run, shape: str) -> None:
    """No store outside the outputs, and inputs as they were."""
    assert run.inputs_unchanged, "an input has changed"
    assert run.nothing_else_written, f"memory next to a result of {shape} has changed"


def reads_only_inputs(run: Run, shape: str) -> None:
    count = run.strays["loads"]
    assert count == 0, f"with inputs of {shape}, {count} loads read outside them"


def ignores_masked(junk: Run, plain: Run, shape: str) -> None:
    """In the run `junk`, what lies outside the inputs, and what masked elements without `other` hold, is NaN."""
    same = all(torch.equal(one.isnan(), other.isnan()) for one, other in zip(junk.outputs, plain.outputs, strict=True))
    assert same, f"with inputs of {shape}, masked elements or memory next to the inputs change the result"


def kernel_does_it(run: Run, *names: str) -> None:
    """One kernel, launched once, loaded every input and stored every output; torch itself did nothing."""
    assert run.launched, "no kernel was launched"
    for name, loaded in zip(names, run.loaded_all, strict=True):
        assert loaded, f"the kernel did not load every element of {name} itself"
    assert run.stored_all, "the kernel did not store every element of the result"
    assert run.kept, "the result was changed after the kernel had run"
    launched_once(run)


def launched_once(run: Run) -> None:
    """There was one launch, and torch itself did nothing."""
    assert not run.by_torch, f"torch ran operations of its own: {', '.join(run.by_torch[:4])}"
    assert run.strays.launches == 1, f"kernels were launched {run.strays.launches} times, not once"
