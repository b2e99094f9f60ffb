"""Memory that a contiguous KV cache wastes, compared with blocks, step by step on the same requests.  Lesson 09.

Each way of allocating runs on the same memory: requests join first come, first served, as far as they fit, every
running request computes one token per step, and the shares of the memory are recorded after each step. Blocks are
allocated by the engine's own scheduler, without a model. The three contiguous systems are those of Kwon et al. 2023,
"Efficient Memory Management for Large Language Model Serving with PagedAttention", section 3.1 and figure 2.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from minillm.errors import ConfigError
from minillm.request import Request, SamplingParams
from minillm.scheduler.scheduler import Scheduler

from .workloads import BenchRequest

SHARES = ("used", "reserved", "internal", "external")
POINTS = 60  # of a timeline in a record


@dataclass(frozen=True)
class Moment:
    """Memory after one step, in tokens.

    used       holds keys and values
    reserved   held by a request for tokens that it will compute later
    internal   held by a request that ends before it uses it
    external   not held; while requests wait: in pieces that are too small for the next request
    """

    used: int
    reserved: int
    internal: int
    external: int
    running: int  # requests
    waiting: int
    computed: int  # tokens that the running requests see; more than `used` if they share blocks


def final(request: BenchRequest) -> int:
    """Return tokens whose keys and values a request needs at its end; those of its last token are never read."""
    return len(request.prompt) + request.output_tokens - 1


def exact(request: BenchRequest) -> int:
    """Return an oracle's reservation: in practice an output's length is not known in advance."""
    return final(request)


def power_of_two(request: BenchRequest) -> int:
    """Return a good estimate: the prompt, and the output's length rounded up to a power of two."""
    return len(request.prompt) + (1 << (request.output_tokens - 1).bit_length())


def contiguous(
    work: Sequence[BenchRequest], slots: int, reserve: Callable[[BenchRequest], int], most: int
) -> Iterator[Moment]:
    """Each request gets `reserve(request)` contiguous tokens, at most `most`, in the first gap that is large enough."""
    waiting = deque(work)
    pieces: list[tuple[int, int, BenchRequest]] = []  # (begin, end, request), by address
    computed: dict[int, int] = {}  # by begin
    while waiting or pieces:
        pieces = [piece for piece in pieces if computed[piece[0]] < final(piece[2])]
        for begin, _, _ in pieces:
            computed[begin] += 1
        while waiting:
            size = min(reserve(waiting[0]), most)
            ends, begins = [0, *(end for _, end, _ in pieces)], [*(begin for begin, _, _ in pieces), slots]
            index = next((i for i in range(len(ends)) if begins[i] - ends[i] >= size), None)
            if index is None:
                break
            request = waiting.popleft()
            pieces.insert(index, (ends[index], ends[index] + size, request))
            computed[ends[index]] = len(request.prompt)
        if not pieces:
            if waiting:
                raise ConfigError(f"a request of {final(waiting[0])} tokens does not fit a memory of {slots}")
            return
        held = sum(end - begin for begin, end, _ in pieces)
        used = sum(computed[begin] for begin, _, _ in pieces)
        wanted = sum(final(request) for _, _, request in pieces)
        yield Moment(used, wanted - used, held - wanted, slots - held, len(pieces), len(waiting), used)


def blocks(work: Sequence[BenchRequest], slots: int, block_size: int, most: int, *, shared: bool) -> Iterator[Moment]:
    """Yield the engine's scheduler and block pool; shared: with the prefix cache."""
    scheduler = Scheduler(
        max_num_seqs=len(work),
        max_num_batched_tokens=slots,
        max_model_len=most,
        block_size=block_size,
        num_blocks=slots // block_size,
        prefix_caching=shared,
    )
    for number, each in enumerate(work):
        prompt, params = np.array(each.prompt, np.int32), SamplingParams(max_tokens=each.output_tokens)
        scheduler.submit(Request(str(number), prompt, params, len(prompt) + each.output_tokens))
    while (step := scheduler.schedule()) is not None:
        rows = scheduler.order
        computed, held = scheduler.computed[rows], scheduler.tables.held[0, rows] * block_size
        wanted = np.minimum(scheduler.limit[rows] - 1, held)
        twice = block_size * int(np.maximum(np.array(scheduler.pool.references) - 1, 0).sum())
        yield Moment(
            used=int(computed.sum()) - twice,
            reserved=int((wanted - computed).sum()),
            internal=int((held - wanted).sum()),
            external=slots - int(held.sum()) + twice,
            running=len(rows),
            waiting=len(scheduler.waiting),
            computed=int(computed.sum()),
        )
        scheduler.complete(step, np.zeros(int(step.samples.sum()), np.int64))


def compare(work: Sequence[BenchRequest], *, slots: int, block_size: int, max_model_len: int) -> list[dict]:
    """One result for each way to store keys and values; all requests wait from the beginning."""
    most = max_model_len
    ways = {
        "contiguous: the longest possible": contiguous(work, slots, lambda request: most, most),
        "contiguous: output to a power of two": contiguous(work, slots, power_of_two, most),
        "contiguous: the exact length (oracle)": contiguous(work, slots, exact, most),
        f"blocks of {block_size}": blocks(work, slots, block_size, most, shared=False),
        f"blocks of {block_size}, shared prefixes": blocks(work, slots, block_size, most, shared=True),
    }
    return [{"cache": name, **_summary(list(moments), slots)} for name, moments in ways.items()]


def _summary(moments: list[Moment], slots: int) -> dict:
    """Mean shares of the memory over the steps in which requests waited for it, and a timeline of the run."""
    full = [moment for moment in moments if moment.waiting] or moments
    shown = [moments[i] for i in np.linspace(0, len(moments) - 1, min(POINTS, len(moments))).round().astype(int)]

    def mean(name: str) -> float:
        return round(sum(getattr(moment, name) for moment in full) / (len(full) * slots), 4)

    return {
        "slots": slots,
        "steps": len(moments),
        "steps_full": len(full),
        **{name: mean(name) for name in SHARES},
        "seen": mean("computed"),
        "running": round(sum(moment.running for moment in full) / len(full), 2),
        "timeline": {name: [round(getattr(moment, name) / slots, 4) for moment in shown] for name in SHARES}
        | {"running": [moment.running for moment in shown]},
    }
