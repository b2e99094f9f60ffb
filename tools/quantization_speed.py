"""Measure every quantization of Gemma 2B's shape with random weights, in one run; needs a GPU.

    python tools/quantization_speed.py --record quantization

Each method runs in an engine of its own, one after another; bf16 runs first and last, so that a drift of the machine
shows. `times_bf16` divides by the median of both. Methods that differ only in how their codes are chosen run at the
same speed: AWQ and GPTQ as int4, SmoothQuant as w8a8. Timed as `minillm bench offline` times a workload. The record is
written after each method, so a run that is cut short keeps what it has.
"""

import argparse
import gc
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from minillm.bench import records, workloads  # noqa: E402
from minillm.bench.offline import Minillm  # noqa: E402
from minillm.quantization import Int4  # noqa: E402
from minillm.quantization.recipe import UNCALIBRATED  # noqa: E402

METHODS = {  # as records name them: method, bits, group, head -> the engine's options
    "bf16": {},
    "int8, head int8": {"quantization": "int8", "quantized_head": "int8"},
    "int8": {"quantization": "int8"},
    "int4 g128, head int8": {"quantization": "int4", "quantized_head": "int8"},
    "int4 g128 (awq, gptq)": {"quantization": "int4"},
    "int4 g128 groups in act-order, head int8": {"quantization": "int4", "quantized_head": "int8"},
    "w8a8 (smoothquant)": {"quantization": "w8a8"},
    "w4a8 g128, head int8": {"quantization": "w4a8", "quantized_head": "int8"},
    "fp8, head fp8": {"quantization": "fp8", "quantized_head": "fp8"},
    "fp8": {"quantization": "fp8"},
}
ACT_ORDER = {"int4": Int4(act_order=True)}  # of checkpoints by other programs: `minillm quantize` keeps neighbors
ENGINE = {"load_format": "dummy", "max_num_seqs": 3000, "gpu_memory_utilization": 0.85, "max_model_len": 4096}
SINGLE, CHAT = workloads.find("single"), workloads.find("chat")
LOADS = [replace(SINGLE, name=f"single_128_256_x{requests}", requests=requests) for requests in (1, 4, 8, 16, 64)]
REPEAT = 3


def measured(method: str) -> list[dict]:
    """The rows of one method."""
    formats = ACT_ORDER if "act-order" in method else {}
    with (
        mock.patch.dict(UNCALIBRATED, formats),
        mock.patch.dict(workloads.WORKLOADS, {each.name: each for each in LOADS}),
    ):
        engine = Minillm("gemma-2b", dtype="bfloat16", **ENGINE, **METHODS[method])
        found = []
        for load in [*LOADS, CHAT]:
            work = workloads.make(load.name, engine.llm.model_config.vocab_size)
            engine.run(work, 1.0)  # captures graphs, compiles kernels
            runs = [engine.run(work, 1.0) for _ in range(REPEAT)]
            seconds = statistics.median(runs)
            output = sum(each.output_tokens for each in work)
            found.append({
                "engine": "minillm", **engine.formats(), "workload": load.name, "requests": len(work),
                "quantization": method, "weight_bytes": engine.llm.engine.facts.weight_bytes, "seconds": seconds,
                "output_tokens_per_s": output / seconds, "runs": runs,
            })  # fmt: skip
            print(method, load.name, round(output / seconds), flush=True)
        engine.llm.close()
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    return found


def dense_seconds(results: list[dict], workload: str) -> float:
    """The median of all bf16 runs of a workload so far."""
    rows = [row for row in results if (row["quantization"], row["workload"]) == ("bf16", workload)]
    return statistics.median(seconds for row in rows for seconds in row["runs"])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--record", help="write the table to this file, or to the committed record of this name")
    options.add_argument("--only", action="append", help="only this method and bf16; repeatable")
    chosen = options.parse_args()
    begun = records.begin(chosen.record)
    methods = [each for each in METHODS if each != "bf16" and (chosen.only is None or each in chosen.only)]
    results: list[dict] = []
    for method in ["bf16", *methods, "bf16"]:
        results += measured(method)
        for row in results:
            row["times_bf16"] = dense_seconds(results, row["workload"]) / row["seconds"]
        if chosen.record:
            records.write(records.record(results, begun), chosen.record)


if __name__ == "__main__":
    main()
