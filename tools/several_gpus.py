"""Measure a model on one GPU, on several as replicas, and divided between them; needs several GPUs.

    python tools/several_gpus.py --model gemma-2b --load-format dummy --record several-gpus
    python tools/several_gpus.py --cache --model gemma-2b --load-format dummy --record several-gpus-cache

Each engine is a `minillm bench offline` of its own with the same workloads. Replicas run at the same time, one on each
GPU, every one with all requests, and their speeds are added. So one command compares all ways on the same machine.
Each way runs every workload once to warm up and then `--repeat` times: with `--requests 256 --repeat 1`, a model of 8B
parameters takes some minutes.

--cache is for a model with fewer KV heads than GPUs: the tokens that the cache holds (`cache_tokens`) and the speed of
mixed traffic on one GPU, divided between them, and with their cache blocks divided too. Engines may take so little
memory that the traffic fills one GPU's cache: 0.12 is for Gemma 2B on H200s; --gpu-memory-utilization sets it.
--device cpu tries the script out; --num-blocks stands in for little memory there.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from minillm.bench import records

WORKLOADS = ("single", "mixed")
FULL = "0.12"  # of a GPU's memory


def started(options: list[str], file: Path, gpu: int | None = None) -> subprocess.Popen:
    """`minillm bench offline` with these options, on one GPU or on all, which writes its record to a file."""
    command = [sys.executable, "-m", "minillm.cli", "bench", "offline", *options, "--json", str(file)]
    visible = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
    return subprocess.Popen(command, env=os.environ | visible, stdout=subprocess.DEVNULL)


def measured(options: list[str], gpus: list[int | None]) -> list[dict]:
    """The rows of one engine, or of one on each of these GPUs at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{place}.json") for place in range(len(gpus))]
        running = [started(options, file, gpu) for file, gpu in zip(files, gpus, strict=True)]
        for process in running:
            if process.wait():
                sys.exit(f"minillm bench offline {' '.join(options)} failed")
        return [row for file in files for row in records.read(file)["results"]]


def added(rows: list[dict]) -> list[dict]:
    """One row for each workload, with the sum of the replicas' speeds."""
    found = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        same = [row for row in rows if row["workload"] == workload]
        speed = round(sum(row["output_tokens_per_s"] for row in same), 1)
        runs = [row["runs"] for row in same]
        found.append(same[0] | {"output_tokens_per_s": speed, "replicas": len(same), "runs": runs})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--cache", action="store_true", help="compare what the caches hold")
    parser.add_argument("--record", help="write a record of this name")
    arguments, options = parser.parse_known_args()
    begun = records.begin(arguments.record)
    if arguments.cache:
        options = ["--gpu-memory-utilization", FULL, "--workload", "mixed", *options]
    else:
        options += [word for name in WORKLOADS for word in ("--workload", name)]
    divided = [*options, "--tensor-parallel-size", str(arguments.gpus)]
    ways = [lambda: measured(options, [0]), lambda: measured(divided, [None])]
    if arguments.cache:
        ways.append(lambda: measured([*divided, "--decode-context-parallel-size", str(arguments.gpus)], [None]))
    else:
        ways.append(lambda: added(measured(options, [*range(arguments.gpus)])))
    results = []
    for way in ways:
        results += (rows := way())
        for row in rows:
            print(json.dumps({key: value for key, value in row.items() if key != "runs"}), flush=True)
        if arguments.record:
            records.write(records.record(results, begun), arguments.record)


if __name__ == "__main__":
    main()
