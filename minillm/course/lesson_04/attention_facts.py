"""Numbers that lesson 04 shows: an H200's records, a running engine's block tables, decode attention on this GPU."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from minillm.advice import sizing
from minillm.bench import records
from minillm.errors import ConfigError
from minillm.kv_cache import LayerCache
from minillm.model.config import PRESETS
from minillm.ops import AttentionOptions, Rows, reference
from minillm.overrides import NotSolvedYet, using
from minillm.request import SamplingParams
from minillm.runner.executor import LocalExecutor

from ..shared import adapters, checks
from ..shared.interpret import kernel_device

if TYPE_CHECKING:
    from minillm import LLM

GEMMA = PRESETS["gemma-2b"]
OPTIONS = AttentionOptions(GEMMA.head_dim**-0.5)


class Limits(NamedTuple):
    """Of a GPU, as measured."""

    bytes_per_s: float
    operations_per_s: float


def h200_limits() -> Limits:
    """From the record: how fast an H200 copies memory, and multiplies Gemma 2B's matrices by 2,048 rows in bfloat16."""
    record = records.read("h200/ceiling-h200")
    ms = next(row["step_ms"] for row in record["matrix_products"] if (row["rows"], row["dtype"]) == (2048, "bf16"))
    return Limits(record["copy_TB_per_s"] * 1e12, 2 * 2048 * sizing.parameters(GEMMA) / (ms / 1e3))


def h200_kernel(kernel: str, rows: int) -> dict:
    """The line of the record of kernels for one of them with so many rows."""
    lines = records.read("h200/kernels")["results"]
    return next(line for line in lines if (line["kernel"], line["rows"]) == (kernel, rows))


def print_decode_speeds() -> None:
    """From the same record: decode attention's times, and the floor, which is reading the keys and values once."""
    most = h200_limits().bytes_per_s
    print(f"one layer's decode attention; an H200 copies {most / 1e12:.2f} TB/s")
    for rows in (1, 64, 512, 3000):
        line = h200_kernel("decode_attention", rows)
        low, high = line["shape"].split("over ")[1].removesuffix(" keys").split("..")
        keys = f"{low if low == high else f'{low} to {high}'} keys"
        speed = line["gb_per_s"] * 1e9
        floor_us = 1e3 * line["ms"] * speed / most
        words = f"{rows:,} {'rows of' if rows > 1 else 'row of'} {keys}"
        print(
            f"{words:>29}: {line['ms'] * 1e3:6.1f} us, floor {floor_us:6.1f} us, "
            f"{speed / most:4.0%} of the memory's speed"
        )
    shortest = min(line["ms"] for line in records.read("h200/kernels")["results"])
    print(f"the shortest kernel in the record takes {1e3 * shortest:.1f} us")


def h200_splits(*sizes: tuple[int, int]) -> dict[str, dict[int, dict]]:
    """From the record of split keys, for each (rows, keys): in words -> {shares: the line of decode attention}."""
    lines, found = records.read("h200/splits")["results"], {}
    for rows, keys in sizes:
        name = f"{rows} row{'s' * (rows > 1)} of {keys:,} keys"
        found[name] = {line["splits"]: line for line in lines if (line["rows"], line["keys"]) == (rows, keys)}
    return found


def print_best_splits(lines: dict[str, dict[int, dict]]) -> None:
    """Print how much splitting gains at best, and with how many shares."""
    for name, by_shares in lines.items():
        best = min(by_shares, key=lambda shares: by_shares[shares]["ms"])
        times = by_shares[1]["ms"] / by_shares[best]["ms"]
        print(f"{name:>21}: fastest with {best:2} shares, {times:4.1f} times as fast as with one")


def passes(function: Callable) -> bool | None:
    """Return whether a solution passes its exercise's check now; None for a stub, False if it has another name."""
    try:
        return all(result.problem is None for result in checks.find(function.__name__).examine(function))
    except NotSolvedYet:
        return None
    except ConfigError:  # no exercise has its name
        return False


def same_tokens_with(prompts: list[str], params: SamplingParams) -> Callable[..., None]:
    """A function that generates with some operations, and prints whether the tokens are those expected."""

    def run(llm: "LLM", expected: list[list[int]], *exercises: Callable, **operations: Any) -> None:
        if failing := [each.__name__ for each in exercises if passes(each) is False]:
            print(f"not run: {failing[0]} does not pass its check yet; a wrong one could end this process")
            return
        with using(**operations) as used:
            found = [completion.token_ids for completion in llm.generate(prompts, params)]
        if all(map(passes, exercises)):
            pairs = (zip(one, other, strict=False) for one, other in zip(expected, found, strict=True))
            same = sum(a == b for pair in pairs for a, b in pair)
            print(f"equal tokens: {same} of {sum(map(len, expected))}; attention calls through your code: {used.calls}")
        else:
            print("not solved yet: the engine used its own attention")

    return run


def by_tiles(function: Callable) -> dict[str, Callable]:
    """Both of the engine's attention operations, by an online attention that gets each head's keys in tiles of 16."""

    def whole(q: Tensor, k: Tensor, v: Tensor, length: int, *, scale: float) -> Tensor:
        """q: [queries, heads, d], a request's newest; k, v: [capacity, kv_heads, d]."""
        out, group = torch.empty_like(q), q.shape[1] // k.shape[1]
        position = torch.arange(length - len(q), length)[:, None]

        def tiles(head: int) -> Iterator[tuple[Tensor, Tensor]]:
            for start in range(0, length, 16):
                span = slice(start, min(start + 16, length))
                scores = q[:, head] @ k[span, head // group].T * scale
                hidden = torch.arange(span.start, span.stop) > position
                yield scores.masked_fill(hidden, -torch.inf), v[span, head // group]

        for head in range(q.shape[1]):
            out[:, head] = function(tiles(head), len(q), q.shape[2])
        return out

    return adapters.gathered(whole)


def in_shares(function: Callable, shares: int = 3, keys: int = 16) -> dict[str, Callable]:
    """The engine's decode attention with each row's keys in shares of full tiles, whose outputs `function` combines."""

    def newest(q: Tensor, k: Tensor, v: Tensor, length: int, *, scale: float) -> Tensor:
        """q: [1, heads, d], a request's newest token; k, v: [capacity, kv_heads, d]."""
        group, partial, log_total = q.shape[1] // k.shape[1], [], []
        share = -(-length // (shares * keys)) * keys
        for begin in range(0, shares * share, share):
            span = slice(min(begin, length), min(begin + share, length))
            each_k, each_v = (part[span].repeat_interleave(group, 1) for part in (k, v))
            scores = torch.einsum("hd,khd->hk", q[0], each_k) * scale
            partial.append(torch.einsum("hk,khd->hd", scores.softmax(-1), each_v))
            log_total.append(scores.logsumexp(-1))
        return function(torch.stack(partial, -2), torch.stack(log_total, -1))[None]

    return {"decode_attention": adapters.gathered(newest)["decode_attention"]}


def h200_intensities(operations: float, needed_bytes: float, score_bytes: float) -> tuple[dict, dict]:
    """({kind of attention: operations per byte}, {what was measured: (operations per byte, operations per second)}).

    operations, needed_bytes, score_bytes: of prefill attention, with the bytes of q, k, v and the output, and those of
    its scores and weights if they are written and read.
    """
    flash, group = operations / needed_bytes, GEMMA.num_heads // GEMMA.num_kv_heads
    kinds = {
        "decode, MHA": 1.0,
        "decode, GQA (groups of 4)": 4.0,
        "decode, MQA (8): Gemma 2B": float(group),
        "prefill, scores in memory": operations / (needed_bytes + score_bytes),
        "prefill, flash": flash,
    }
    points = {"prefill, 4 x 2,048": (flash, operations / (h200_kernel("prefill_attention", 8192)["ms"] / 1e3))}
    for rows in (512, 64, 1):
        points[f"decode, {rows} at once"] = group, group * h200_kernel("decode_attention", rows)["gb_per_s"] * 1e9
    return kinds, points


def prefill_difference() -> float:
    """The largest difference between the engine's prefill kernel and its reference, on a small prompt."""
    from minillm.kernels import paged_attention

    device, seeded = kernel_device(), torch.Generator().manual_seed(1)
    k, v, q = (torch.randn(*shape, generator=seeded).to(device) for shape in ((8, 16, 1, 64),) * 2 + ((40, 8, 64),))
    table, lengths, starts = (
        torch.tensor(each, dtype=torch.int32, device=device) for each in ([[5, 2, 7]], [40], [0, 40])
    )
    given = q, LayerCache(k, v), Rows(table, lengths, starts, 40), AttentionOptions(scale=0.125)
    ours, wanted = paged_attention.prefill_attention(*given), reference.prefill_attention(*given)
    return (ours - wanted).abs().max().item()


def print_shares() -> None:
    """The engine's rule for an H200 and one KV head: shares of a row's keys, by rows and longest row."""
    from minillm.kernels import paged_attention

    h200 = paged_attention.Device(shared_memory=227 * 1024, processors=132)
    every = (256, 1024, 4096, 16384)
    print("shares     " + "".join(f"{longest:>8,}" for longest in every) + "  keys")
    for rows in (1, 8, 64, 512):
        counts = [paged_attention.decode_splits(rows, longest, h200) for longest in every]
        print(f"{rows:4} row{'s' if rows > 1 else ' '}  " + "".join(f"{count:8}" for count in counts))


def h200_speeds() -> dict[str, dict[int, float]]:
    """Tokens per second by number of requests: with our attention and CUDA graphs, and with one of them taken away.

    All settings run the same other kernels, one per operation.
    """
    parts = {
        "both parts": ("decode attention", "Triton"),
        "torch's attention": ("decode attention", "torch"),
        "no CUDA graphs": ("CUDA graphs", "off"),
    }
    speeds: dict[str, dict[int, float]] = {name: {} for name in parts}
    for line in records.read("h200/ablation")["results"]:
        for name, setting in parts.items():
            if setting == (line["group"], line["name"]):
                speeds[name][line["requests"]] = line["output_tokens_per_s"]
    return speeds


def two_block_tables(llm: "LLM") -> dict[str, tuple[list[int], int]]:
    """Run two requests, and abort a third: {name: (block table, tokens in the cache)} at the end of it."""
    engine = llm.engine

    def submit(length: int, seed: int) -> Any:
        ids = torch.randint(10, 4000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
        tracked = engine.prepare(ids, SamplingParams(max_tokens=80, temperature=0, ignore_eos=True))
        engine.submit(tracked)
        return tracked.request

    executor = engine.executor
    assert isinstance(executor, LocalExecutor)  # the tables are on this process's device

    def run(steps: int) -> None:
        for _ in range(steps):
            engine.step()

    aborted = submit(40, seed=1)
    run(2)
    first = submit(40, seed=2)
    run(20)
    second = submit(10, seed=3)
    engine.abort(aborted.request_id)
    run(30)
    tables = {}
    # The newest token's key is written in the next step.
    for name, request, length in (("first", first, 40 + 50 - 1), ("second", second, 10 + 30 - 1)):
        row = executor.runner.state.block_table[0, request.row]
        tables[name] = row[: -(-length // 16)].tolist(), length
        engine.abort(request.request_id)
    run(2)
    return tables


def time_decode(ways: Mapping[str, Callable], shapes: Mapping[int, int]) -> None:
    """Print what the engine's decode attention takes on this GPU, with and without shares, its reference, and `ways`.

    ways: functions of (q, cache, block_table, lengths, options). shapes: rows -> keys of each. The floor is reading the
    keys at the speed that this GPU copies memory.
    """
    from triton.testing import do_bench

    from minillm.kernels import paged_attention

    own = {
        "the engine's": paged_attention.decode_attention,
        "the engine's, one share": decode_with_one_share,
        "the reference": reference.decode_attention,
    }

    def took(function: Callable) -> float:
        return do_bench(function, return_mode="median")

    big = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    bytes_per_ms = 2 * big.nbytes / took(big.clone)
    for rows, keys in shapes.items():
        shape = (rows * keys // 16, 16, GEMMA.num_kv_heads, GEMMA.head_dim)
        cache = LayerCache(*(torch.randn(shape, device="cuda").bfloat16() for _ in "kv"))
        table = torch.randperm(shape[0], device="cuda").int().view(rows, -1)
        q = torch.randn(rows, 1, GEMMA.num_heads, GEMMA.head_dim, device="cuda").bfloat16()
        lengths = torch.full((rows,), keys, dtype=torch.int32, device="cuda")
        print(f"{rows} rows of {keys} keys; floor {2 * cache.k.nbytes / bytes_per_ms:.3f} ms")
        rows_of_keys = Rows.decoding(table, lengths)
        calls = {name: functools.partial(way, q, cache, rows_of_keys, OPTIONS) for name, way in own.items()}
        calls |= {name: functools.partial(way, q, cache, table, lengths, OPTIONS) for name, way in ways.items()}
        for name, call in calls.items():
            print(f"  {name:28} {took(call):8.3f} ms")


def decode_with_one_share(*given: Any) -> torch.Tensor:
    """The engine's decode attention with one program for each row and KV head, without a split of the keys."""
    from minillm.kernels import paged_attention

    splits, paged_attention.decode_splits = paged_attention.decode_splits, lambda *_: 1
    try:
        return paged_attention.decode_attention(*given)
    finally:
        paged_attention.decode_splits = splits
