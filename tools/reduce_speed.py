"""How long sums over two GPUs take, by rows: the kernels' own against NCCL; needs two GPUs that are connected.

    python tools/reduce_speed.py --record reduce

Each time is a call's in a CUDA graph of CALLS calls, the median of REPLAYS replays, on rank 0. "norm" is add and norm
without any sum; "fused" is the sum, the add and the norm in one launch; "nccl" is NCCL's sum, then add and norm.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from minillm.bench import records  # noqa: E402

ROWS, HIDDEN = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024), (2048, 4096)
CALLS, REPLAYS = 40, 25


def microseconds(call: Callable[[], object], wait: Callable[[], object]) -> float:
    """The time of a call in a graph that all ranks replay at once. wait: a barrier of the ranks."""
    call()
    torch.cuda.synchronize()
    wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    found = []
    for _ in range(REPLAYS + 3):
        torch.cuda.synchronize()
        wait()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / CALLS * 1e3)
    return statistics.median(found[3:])


def measure(rank: int, size: int, meeting: str, results: "multiprocessing.Queue[dict]") -> None:
    """One rank's work. Rank 0 puts a row for each shape."""
    import torch.distributed as dist

    from minillm.kernels import normalization
    from minillm.parallel import collectives

    collectives.ROWS = size * max(ROWS)
    group = collectives.Group.join(rank, size, meeting, torch.device("cuda", rank))
    reducer = group.reducer

    def with_nccl(x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor) -> None:
        dist.all_reduce(x)
        normalization.add_rms_norm(x, residual, norm, 1e-6)

    for hidden in HIDDEN:
        for rows in ROWS:
            torch.manual_seed(rank)
            x = torch.randn(rows, hidden, device="cuda").bfloat16()
            torch.manual_seed(7)
            residual, norm = torch.randn(rows, hidden, device="cuda").bfloat16(), torch.rand(hidden, device="cuda")
            both = x.float()
            dist.all_reduce(both)
            wanted, _ = normalization.add_rms_norm(both.bfloat16(), residual, norm, 1e-6)
            found, total = reducer.add_rms_norm(x, residual, norm, 1e-6)
            error = ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()
            theirs = total.clone()
            dist.broadcast(theirs, 0)
            same = group.least(int(torch.equal(theirs, total)))
            calls = {
                "norm_us": partial(normalization.add_rms_norm, x, residual, norm, 1e-6),
                "fused_us": partial(reducer.add_rms_norm, x, residual, norm, 1e-6),
                "nccl_us": partial(with_nccl, x.clone(), residual, norm),
            }
            times = {name: microseconds(call, lambda: group.least(0)) for name, call in calls.items()}
            if rank == 0:
                row = {"rows": rows, "hidden": hidden, "dtype": "bfloat16", "ranks": size, **times}
                results.put(row | {"relative_error": error, "same_bits": bool(same)})
    group.least(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", help="write a record of this name")
    options = parser.parse_args()
    begun, size = records.begin(options.record), 2
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[dict] = context.Queue()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=measure, args=(rank, size, f"{folder}/meeting", results), daemon=True)
            for rank in range(size)
        ]
        for rank in ranks:
            rank.start()
        for _ in range(len(ROWS) * len(HIDDEN)):
            found.append(results.get(timeout=120))
            print(json.dumps(found[-1]), flush=True)
        for rank in ranks:
            rank.join(30)
    if options.record:
        records.write(records.record(found, begun), options.record)


if __name__ == "__main__":
    main()
