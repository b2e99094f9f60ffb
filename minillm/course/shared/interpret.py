"""Run Triton kernels on any machine, compiled or interpreted, and detect missing masks.  Lessons 03 and 04.

Whether Triton compiles or interprets is fixed for the whole process when it is first imported. So a lesson calls
`triton_here()` before it imports triton.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from minillm.errors import ConfigError, MissingPackage

from .hasten import hasten

if TYPE_CHECKING:
    from torch import Tensor

GUARD = 4096  # elements on either side of a tensor that no kernel may read or write
MOST_ACCESSES = 1000  # loads and stores of one program of a watched kernel; an endless loop makes more

INTERPRETED, COMPILED = "interpreted", "compiled"


def triton_here() -> str:
    """Import triton so that kernels run on this machine: "compiled" on the GPU tier, "interpreted" on the CPU's.

    Raises MissingPackage without triton, ConfigError if it was already imported for a GPU.
    """
    from .tiers import tier

    if tier().name == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton
    except ImportError as error:
        raise MissingPackage(
            "this lesson runs Triton kernels, and Triton's own releases are for Linux: use a container, WSL or Colab"
        ) from error
    how = how_kernels_run()
    if tier().name == "cpu" and how == COMPILED:
        raise ConfigError(
            f"triton {triton.__version__} was imported before triton_here() could ask it to interpret, and now waits "
            "for a GPU: restart the kernel and run the cells from the top"
        )
    if how == INTERPRETED:
        hasten()
    return how


def how_kernels_run() -> str:
    """Return whether triton, imported here, compiles or interprets kernels, as its own library's functions show."""
    import triton.language as tl
    from triton.runtime import JITFunction

    return COMPILED if isinstance(tl.cdiv, JITFunction) else INTERPRETED


def kernel_device() -> str:
    """The device of the tensors that kernels of this process take: "cuda" or "cpu"."""
    return "cuda" if how_kernels_run() == COMPILED else "cpu"


def surrounded(tensor: Tensor, by: float) -> tuple[Tensor, Tensor]:
    """(A copy of `tensor` between two guards of GUARD elements of value `by`, the memory of all three).

    A kernel that reads past the end reads `by`; one that writes past it changes a guard (see `untouched`). Neither
    reaches other memory.
    """
    memory = tensor.new_full((tensor.numel() + 2 * GUARD,), by)
    inside = memory[GUARD : GUARD + tensor.numel()].view(tensor.shape)
    inside.copy_(tensor)
    return inside, memory


def untouched(memory: Tensor, by: float) -> bool:
    """Return whether both guards around a `surrounded` tensor still hold `by`."""
    return bool((memory[:GUARD] == by).all() and (memory[-GUARD:] == by).all())


class Watched(Counter[str]):
    """The work of interpreted kernels: counts of "loads" and "stores" outside their tensors, and of "TF32" products.

    watched: whether kernels are interpreted. loaded, stored: the addresses that they used. storing: the program of each
    entry of stored, numbered from 1. left: the tensors as the last launch left them. modules: the module of each
    launch's kernel. launching: whether one is running.
    """

    def __init__(self, watched: bool):
        super().__init__()
        self.watched = watched
        self.loaded: list[Any] = []
        self.stored: list[Any] = []
        self.storing: list[int] = []
        self.left: list[Tensor] = []
        self.modules: list[str] = []
        self.launching = False

    @property
    def launches(self) -> int:
        """Return how many launches there were."""
        return len(self.modules)

    @contextmanager
    def launch(self, kernel: Callable) -> Iterator[None]:
        """A launch of a kernel, given its function, as long as the block runs."""
        self.modules.append(kernel.__globals__["__name__"])
        self.launching = True
        try:
            yield
        finally:
            self.launching = False

    def all_loaded(self, tensor: Tensor) -> bool:
        """Return whether kernels loaded every element of a tensor."""
        return _hold(self.loaded, tensor)

    def all_stored(self, tensor: Tensor) -> bool:
        """Return whether kernels stored every element of a tensor."""
        return _hold(self.stored, tensor)

    def stored_by_several(self) -> int:
        """Return how many addresses more than one program stored to."""
        seen = Counter[int]()
        for program in set(self.storing):
            own = [each.tolist() for each, by in zip(self.stored, self.storing, strict=True) if by == program]
            seen.update({address for each in own for address in each})
        return sum(count > 1 for count in seen.values())


def _hold(addresses: list[Any], tensor: Tensor) -> bool:
    import numpy as np

    return bool(addresses) and bool(np.isin(_addresses(tensor), np.concatenate(addresses)).all())


@contextmanager
def strays(*tensors: Tensor, junk: bool = False, stores: bool = True) -> Iterator[Watched]:
    """Inside the block, count the elements that interpreted kernels load or store outside `tensors`: "loads", "stores".

    Other tensors that a kernel is given, such as copies of `tensors`, are no strays. A stray store is dropped. A stray
    load reads 0; with `junk`, NaN or 99, and so does a masked element without `other`. So a wrong address never ends
    the process. stores: False watches loads only. Compiled kernels are not watched: nothing is counted. Raises
    RuntimeError in a kernel that seems never to end.
    """
    found = Watched(how_kernels_run() == INTERPRETED)
    if not found.watched:
        with _left_by_launches(found, tensors if stores else ()):
            yield found
        return
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    dot = builder.create_dot
    load, store, atomic = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw
    begin, launch = builder.set_grid_idx, executor.__call__
    own = {each.untyped_storage().data_ptr() for each in tensors}
    known = known_here = np.unique(np.concatenate([_addresses(each) for each in tensors]))
    accesses = programs = 0

    def watched_launch(self, *args, **kwargs):
        nonlocal known
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        others = [_addresses(each) for each in given if each.untyped_storage().data_ptr() not in own]
        known = np.unique(np.concatenate([known_here, *others]))
        # NumPy's warnings would name files that are not the learner's.
        with found.launch(self.fn), np.errstate(all="ignore"):
            result = launch(self, *args, **kwargs)
            found.left = [each.clone() for each in tensors] if stores else []
        return result

    def watched_begin(self, *place):
        nonlocal accesses, programs
        accesses = 0
        programs += 1
        return begin(self, *place)

    def allowed(what: str, pointers, mask) -> tuple:
        """The mask without stray elements, as the interpreter keeps it, and which elements are stray."""
        nonlocal accesses
        accesses += 1
        if accesses > MOST_ACCESSES:
            raise RuntimeError(f"more than {MOST_ACCESSES:,} loads and stores in a program: does a loop never end?")
        addresses = np.asarray(pointers.data).astype(np.uint64)
        asked = np.broadcast_to(np.asarray(mask.data, dtype=bool), addresses.shape)
        place = np.searchsorted(known, addresses).clip(max=len(known) - 1)
        inside = known[place] == addresses
        stray = asked & ~inside
        found[what] += int(stray.sum())
        (found.loaded if what == "loads" else found.stored).append(addresses[asked & inside])
        if what == "stores":
            found.storing.append(programs)
        return interpreter.TensorHandle(asked & inside, tl.int1), stray

    def watched_load(self, pointers, mask, other, *options):
        hidden = ~np.broadcast_to(np.asarray(mask.data, dtype=bool), np.asarray(pointers.data).shape)
        mask, stray = allowed("loads", pointers, mask)
        result = load(self, pointers, mask, other, *options)
        unknown = stray | hidden if junk and other is None else stray
        if unknown.any():
            data = result.data.copy()
            empty = 99 if data.dtype.kind in "iub" else np.nan  # bfloat16 is kept as uint16
            data[unknown] = (0x7FC0 if result.dtype.scalar == tl.bfloat16 else empty) if junk else 0
            result = interpreter.TensorHandle(data, result.dtype)
        return result

    def watched_store(self, pointers, value, mask, *options):
        return store(self, pointers, value, allowed("stores", pointers, mask)[0], *options)

    def watched_atomic(self, operation, pointers, value, mask, *options):
        return atomic(self, operation, pointers, value, allowed("stores", pointers, mask)[0], *options)

    def watched_dot(self, a, b, total, precision, *options):
        found["TF32"] += a.dtype.scalar == tl.float32 and str(precision).rpartition(".")[2] == "TF32"
        return dot(self, a, b, total, precision, *options)

    builder.create_dot = watched_dot
    builder.create_masked_load, builder.set_grid_idx, executor.__call__ = watched_load, watched_begin, watched_launch
    if stores:
        builder.create_masked_store, builder.create_atomic_rmw = watched_store, watched_atomic
    try:
        yield found
    finally:
        builder.create_dot = dot
        builder.create_masked_load, builder.create_masked_store = load, store
        builder.create_atomic_rmw, builder.set_grid_idx, executor.__call__ = atomic, begin, launch


@contextmanager
def _left_by_launches(found: Watched, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Inside the block, keep in `found` each compiled kernel's module, and what its launch leaves in the tensors."""
    from triton.runtime import JITFunction

    run = JITFunction.run

    def watched_run(self, *args, **kwargs):
        with found.launch(self.fn):
            result = run(self, *args, **kwargs)
            found.left = [each.clone() for each in tensors]
        return result

    JITFunction.run = watched_run
    try:
        yield
    finally:
        JITFunction.run = run


def _addresses(tensor: Tensor):
    """The address of each element of a tensor, as a NumPy array; elements that a view skips have none."""
    import numpy as np

    offsets = np.zeros((), dtype=np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = np.add.outer(offsets, np.arange(size) * stride)
    return (tensor.data_ptr() + tensor.element_size() * offsets.ravel()).astype(np.uint64)
