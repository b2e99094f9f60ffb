"""For the checkers: random tensors, and decode attention over a small paged cache that sees all loads.  Lesson 04."""

import gc
import inspect
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FunctionType

import torch
from torch import Tensor

from minillm.kv_cache.layer_cache import LayerCache

from ..shared.checks import a_type
from ..shared.differences import assert_near
from ..shared.interpret import Watched, kernel_device, strays

DIM = 16
BLOCKS_OF_96 = [12, 13, 14, 40, 41, 42]  # of a row of 96 keys
SIZE = 16  # slots of a block
BLOCKS = 64  # of a cache; those in the middle are used, so that a wrong address is still inside the memory


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers in float64, the same each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def near(got: Tensor, want: Tensor, what: str, tolerance: float = 1e-5) -> None:
    """Assert that it is a tensor of the shape wanted whose numbers are all that near."""
    assert isinstance(got, Tensor), f"return a tensor, not {a_type(got)}"
    assert got.shape == want.shape, f"the shape is {list(got.shape)}, not {list(want.shape)}"
    assert_near(got, want, what, absolute=tolerance)


def kernels_of(function: Callable) -> list[FunctionType]:
    """The Triton kernels that a function names, and those that these name, as Python functions."""
    found: list[FunctionType] = []
    todo = [inspect.unwrap(function)]
    while todo:
        caller = todo.pop()
        named = {**caller.__globals__, **inspect.getclosurevars(caller).nonlocals}
        for name in caller.__code__.co_names + caller.__code__.co_freevars:
            kernel = getattr(named.get(name), "fn", None)
            # Triton's own functions are such objects too.
            if isinstance(kernel, FunctionType) and kernel not in found and "triton." not in kernel.__module__:
                found.append(kernel)
                todo.append(kernel)
    return found


def left_in_memory(function: Callable, make_tile: Callable[[], tuple[Tensor, Tensor]], count: int) -> int:
    """Count the numbers, in tensors, arrays and lists, that `function` keeps when it asks for the last tile."""

    left, were_frozen = 0, gc.get_freeze_count()
    gc.freeze()  # hides the objects of before, often a million, from get_objects

    def tiles() -> Iterator[tuple[Tensor, Tensor]]:
        nonlocal left
        for number in range(count):
            made = [make_tile()]
            if number == 2:
                tracemalloc.start()  # counts lists and arrays, but not torch's memory
            elif number == count - 1:
                tensors = (each for each in gc.get_objects() if issubclass(type(each), Tensor))
                left = sum(each.numel() for each in tensors if not any(each is mine for mine in made[0]))
                left += tracemalloc.get_traced_memory()[0] // 8
            yield made.pop()  # only the caller has it now

    try:
        function(tiles())
    finally:
        tracemalloc.stop()
        if not were_frozen:
            gc.unfreeze()
    return left


def cache_of(kv_heads: int = 1, *, size: int = SIZE, dim: int = DIM, blocks: int = BLOCKS) -> LayerCache:
    """With random contents."""
    shape = (blocks, size, kv_heads, dim)
    return LayerCache(*(normal(*shape, seed=seed).float().to(kernel_device()) for seed in (1, 2)))


def run(
    function: Callable,
    cache: LayerCache,
    blocks: list[int],
    length: int,
    q: Tensor | None = None,
    strict: bool = False,
    watched: list[Watched] | None = None,
    short: int = 9,
    **options: float,
) -> Tensor:
    """[heads, d] of one query a row: a row of 3 tokens in block `short`, then one of `length` tokens in `blocks`.

    strict: it may load only what belongs to these tokens, else anything of the tensors, and what masked elements
    without `other` hold is junk. watched: gets what the kernels did. Asserts that nothing else was written.
    """
    if q is None:
        q = normal(1, 2 * cache.k.shape[2], cache.k.shape[3], seed=9)
    q = q.to(kernel_device(), cache.k.dtype).expand(2, *q.shape).contiguous()
    table = torch.zeros(2, len(blocks) + 8, dtype=torch.int32)
    table[0, 0], table[1, : len(blocks)] = short, torch.tensor(blocks)
    lengths = torch.tensor([3, length], dtype=torch.int32)
    table, lengths = table.to(kernel_device()), lengths.to(kernel_device())
    allowed = [q, lengths, *([table[0, :1], table[1, : len(blocks)]] if strict else [table])]
    for part in (cache.k, cache.v):
        size = part.shape[1]
        used = [(short, 3), *((block, length - size * at) for at, block in enumerate(blocks))]
        allowed += [part[block, : max(filled, 0)] for block, filled in used] if strict else [part]
    given = q, cache.k, cache.v, table, lengths
    before = [each.clone() for each in given]
    with strays(*allowed, junk=strict) as outside:
        got = function(q, cache, table, lengths, **{"scale": 0.25} | options)
    if watched is not None:
        watched.append(outside)
    assert got.shape == q.shape, f"the shape is {list(got.shape)}, not {list(q.shape)}"
    assert got.dtype == q.dtype, f"the result is {got.dtype}, and q is {q.dtype}"
    where = "what belongs to the rows' own keys" if strict else "its tensors"
    assert not outside["loads"], f"{outside['loads']:,} numbers are loaded from outside {where}"
    assert not outside["stores"], f"{outside['stores']:,} numbers are stored outside the output"
    for name, now, then in zip(("q", "k", "v", "the table", "lengths"), given, before, strict=True):
        assert torch.equal(now.nan_to_num(), then.nan_to_num()), f"{name} changed"
    return got[1, 0]


def attention_of(cache: LayerCache, blocks: list[int], length: int, q: Tensor, scale: float) -> Tensor:
    """Return what `run` should return. q: [1, heads, d]."""
    k, v = (part[blocks].flatten(0, 1)[:length].double().cpu() for part in (cache.k, cache.v))
    group = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(group, 1) for part in (k, v))
    scores = torch.einsum("hd,khd->hk", q[0].double().cpu(), k) * scale
    return torch.einsum("hk,khd->hd", scores.softmax(-1), v)


def graded(function: Callable, scores: tuple, values: tuple, heads: tuple[float, float] = (1.0, 1.0)) -> list[float]:
    """Outputs of two heads over 96 keys: 48 with the first score and value, then 48 with the second.

    scores, values: a number or, slot by slot of a block, [SIZE]. heads: a factor of each head's scores.
    """
    cache, q = cache_of(), torch.zeros(1, 2, DIM)
    q[0, :, 0] = torch.tensor(heads)
    for part, (early, late) in ((cache.k, scores), (cache.v, values)):
        part[:] = 0.0
        part[:30, :, 0, 0] = torch.as_tensor(early).to(part)
        part[30:, :, 0, 0] = torch.as_tensor(late).to(part)
    return run(function, cache, BLOCKS_OF_96, 96, q, scale=1.0)[:, 0].tolist()


def climbing(
    function: Callable, scores: list[float], values: list[float], heads: tuple[float, float], length: int | None = None
) -> list[float]:
    """Outputs of two heads over 32 keys of each score and value, in as many blocks of their own, up to five.

    heads: a factor of each head's scores. length: of the row, if it ends before the last of these keys.
    """
    cache, q, blocks = cache_of(), torch.zeros(1, 2, DIM), []
    q[0, :, 0] = torch.tensor(heads)
    for at, (score, value) in enumerate(zip(scores, values, strict=True)):
        # Equal blocks around those in use: only weights matter here, not addresses.
        for part, number in ((cache.k, score), (cache.v, value)):
            part[12 * at : 12 * at + 12] = 0.0
            part[12 * at : 12 * at + 12, :, 0, 0] = number
        blocks += [12 * at, 12 * at + 1]
    return run(function, cache, blocks, length or 32 * len(scores), q, scale=1.0)[:, 0].tolist()


def halves(function: Callable) -> float:
    """The output of a long row of keys with score 0, whose values are 0 in the first half and 1 in the second."""
    cache = cache_of(blocks=320)
    cache.k[:], cache.v[:], cache.v[128:] = (
        0.0,
        0.0,
        1.0,
    )  # more such blocks than are used: addresses do not matter here
    return run(function, cache, [*range(32), *range(192, 192 + 32)], 64 * SIZE)[0, 0].item()


def tail(function: Callable) -> Tensor:
    """[2, DIM] of 32 keys with score 0, then 30 tiles of keys with score -8, all in 16 bits and with values of 1,000.

    A tile of the tail adds 0.01 to a sum of 32, which 16 bits cannot hold.
    """
    cache, q = cache_of(blocks=320), torch.zeros(1, 2, DIM)
    q[0, :, 0] = 1.0
    cache.k[:], cache.v[:] = -8.0, 1000.0  # in all blocks: only sums matter here, not addresses
    cache.k[100:102] = 0.0
    cache = LayerCache(cache.k.half(), cache.v.half())
    return run(function, cache, list(range(100, 162)), 62 * SIZE, q, scale=1.0)


def far_block(function: Callable) -> None:
    """Assert that one finds a block that begins 2^31 numbers after the first one, in a cache with gaps between slots.

    The gaps are never touched, so most systems provide the memory without having as much.
    """
    gap = 2**30 // SIZE
    try:
        memory = torch.empty(3 * SIZE * gap, dtype=torch.int8)
    except RuntimeError:  # this one does not
        return
    part = memory.as_strided((3, SIZE, 1, DIM), (SIZE * gap, gap, DIM, 1))
    part[:] = 0
    part[2] = 7
    found = False
    with suppress(AssertionError):  # loads from outside its tensors
        found = bool((run(function, LayerCache(part, part), [2], SIZE, torch.zeros(1, 2, DIM), short=0) > 0).all())
    assert found, "a block that begins 2^31 numbers after the first one is not found"
