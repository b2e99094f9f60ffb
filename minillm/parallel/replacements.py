"""Functions of a user's that run in the ranks: sent there by value, and counted as `minillm.overrides` counts them.

A block of `using` holds in the engine's process. Before the next step, the ranks are sent what it replaces of the model
that they run, as a `Replace`; each of them then has the same blocks. Policies, tokenizers and drafters stay in the
engine's process, where they are used.
"""

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from minillm import ops, overrides
from minillm.model.replaceable import PARTS
from minillm.overrides import Block, OverrideError, Used, using

from .messages import Replace

ATTENTION = ("decode_attention", "prefill_attention")


def in_ranks() -> tuple[Block, ...]:
    """Return the blocks that replace something that ranks run; of these, the outermost first."""
    return tuple(block for block in overrides.blocks() if _ours(block))


def packed(blocks: Sequence[Block], devices: Sequence[str], split_pages: int = 1) -> Replace:
    """Return the message that makes ranks on these devices run the functions of all blocks.

    split_pages: decode_context_parallel_size. Raises OverrideError for what cannot be sent to another process, for what
    the ranks would not call, and on GPUs.
    """
    named = [_ours(block) for block in blocks]
    if named and devices[0] != "cpu":
        replaced = ", ".join(sorted(set().union(*named)))
        raise OverrideError(
            f"{replaced} cannot be replaced on several GPUs, where kernels compute sums and what follows in one "
            "launch: use tensor_parallel_size=1 or device='cpu'"
        )
    if split_pages > 1 and (uncalled := set(ATTENTION) & set().union(*named)):
        raise OverrideError(
            f"{', '.join(sorted(uncalled))} cannot be replaced with decode_context_parallel_size={split_pages}: each "
            "rank attends to a part of the keys, and the parts are merged; leave that option out"
        )
    functions = tuple({name: _pickled(name, each, len(devices)) for name, each in block.items()} for block in named)
    return Replace(functions, tuple(map(os.path.abspath, sys.path)))


def count(blocks: Sequence[Block], before: Sequence[Used], now: Sequence[Used]) -> None:
    """Add to each block's counts what a rank has counted since `before`."""
    for block, old, new in zip(blocks, before, now, strict=True):
        for name, calls in new.calls.items():
            block.used.calls[name] += calls - old.calls[name]
        block.used.not_solved |= new.not_solved


class Replacements:
    """In a rank: the functions that it was sent last."""

    def __init__(self) -> None:
        self._stack, self._used = ExitStack(), list[Used]()

    def follow(self, message: Replace) -> str | None:
        """Run these functions in place of those before. Returns why that cannot be; the engine's own run then."""
        self._stack.close()
        self._used = []
        sys.path += [each for each in message.path if each not in sys.path]
        try:
            unpacked = [{name: pickle.loads(each) for name, each in block.items()} for block in message.functions]
            for block in unpacked:
                self._used.append(self._stack.enter_context(using(**block)))
        except Exception as error:
            self._stack.close()
            self._used = []
            return f"what `using` replaces cannot run in the ranks' processes: {type(error).__name__}: {error}"
        return None

    def used(self) -> list[Used]:
        """Copies of the counts of all blocks."""
        return [Used(dict(each.calls), dict(each.not_solved)) for each in self._used]


def _ours(block: Block) -> dict[str, Callable]:
    return {name: each for name, each in block.replacements.items() if name in (*ops.names(), *PARTS.names)}


def _pickled(name: str, function: Callable, size: int) -> bytes:
    try:
        import cloudpickle
    except ImportError as error:
        raise OverrideError(
            f"to replace {name} with tensor_parallel_size={size}, install the package cloudpickle, which sends "
            "functions to other processes: pip install cloudpickle"
        ) from error
    try:
        return cloudpickle.dumps(function)
    except Exception as error:
        label = getattr(function, "__name__", type(function).__name__)
        raise OverrideError(
            f"{label} cannot replace {name} with tensor_parallel_size={size}: the model runs in processes of its own, "
            f"and it cannot be sent to them ({error}); let it use nothing that belongs to this process, such as open "
            "files, locks and threads"
        ) from error
