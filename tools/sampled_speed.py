"""Measure how fast sampled traffic runs with each kind of option, as a share of plain temperature's; needs a GPU.

    python tools/sampled_speed.py --record sampled-speed
    python tools/sampled_speed.py --model smollm2-135m --record sampled-speed-trained   with a trained model's logits
    python tools/sampled_speed.py --tensor-parallel-size 2 --record sampled-speed-2     of a model on two GPUs

Offline, with Gemma 2B's shape in bfloat16 and random weights: the likeliest token is nearly always the one before, and
all others are about equally likely, which is the worst case for a search of the vocabulary. A trained model continues
pieces of the held-out text. The kinds alternate, in RUNS runs after one that is not counted; a share is of the medians.
Rows named "sample" are the kernels alone, on logits of a normal distribution ("flat"), or with a few that are far above
it ("peaked"). With a trained model or several GPUs they are left out: the shares of several GPUs say what it costs that
these options need all logits in one place.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import triton

sys.path.insert(0, str(Path(__file__).parents[1]))

from minillm import LLM, SamplingParams  # noqa: E402
from minillm.bench import records  # noqa: E402
from minillm.ops import triton as kernels  # noqa: E402
from minillm.ops.signatures import Truncation  # noqa: E402

REQUESTS, INPUT, OUTPUT, RUNS = 1024, 128, 128, 3
KINDS = {
    "temperature": {},
    "greedy": {"temperature": 0},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50": {"top_k": 50},
    "min_p 0.05": {"min_p": 0.05},
    "presence_penalty 0.5": {"presence_penalty": 0.5},
    "logprobs 5": {"logprobs": 5},
}
VOCAB = 256_000
RANDOM = "gemma-2b"
TEXT = Path(__file__).parents[1] / "data" / "text" / "held_out.txt"


def prompts_of(llm: LLM, is_trained: bool) -> list[list[int]]:
    """REQUESTS prompts of INPUT tokens."""
    rng = np.random.default_rng(0)
    if not is_trained:
        return [rng.integers(10, VOCAB - 1000, INPUT).tolist() for _ in range(REQUESTS)]
    text = llm.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    return [text[start : start + INPUT] for start in rng.integers(0, len(text) - INPUT, REQUESTS)]


def generated(model: str, ranks: int, runs: int, kinds: list[str]) -> Iterator[dict]:
    """A row for each kind of sampling: tokens per second, and the share of plain temperature's."""
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    shape: dict = {"model": model, "load_format": "dummy" if model == RANDOM else "auto", "dtype": "bfloat16"}
    with LLM(**shape, max_num_seqs=1024, enable_prefix_caching=False, tensor_parallel_size=ranks) as llm:
        prompts = prompts_of(llm, is_trained=model != RANDOM)
        for _ in range(runs + 1):
            for kind in kinds:
                params = SamplingParams(**({"temperature": 1.0} | KINDS[kind]), max_tokens=OUTPUT, ignore_eos=True)
                begun = time.perf_counter()
                llm.generate(prompts, params)
                found[kind].append(REQUESTS * OUTPUT / (time.perf_counter() - begun))
    medians = {kind: statistics.median(rates[1:]) for kind, rates in found.items()}
    for kind, rate in medians.items():
        yield {
            "workload": "generate", "kind": kind, "requests": REQUESTS, "input_len": INPUT, "output_len": OUTPUT,
            "output_tokens_per_s": rate, "share": rate / medians["temperature"], "runs": found[kind][1:],
            **({"tensor_parallel": ranks} if ranks > 1 else {}), **({"model": model} if model != RANDOM else {}),
        }  # fmt: skip


def sampled() -> Iterator[dict]:
    """A row for each kind of truncation, number of rows and kind of logits: milliseconds of the kernels."""
    for name in ("flat", "peaked"):
        for rows in (1, 64, 512):
            logits = torch.randn(rows, VOCAB, device="cuda")
            if name == "peaked":
                logits = 1.5 * logits + 12 * (torch.rand_like(logits) < 2e-5)
            logits = logits.bfloat16()
            ones, uniform = torch.ones(rows, device="cuda"), torch.rand(rows, device="cuda")
            options = {
                "temperature": None,
                "top_p 0.95": Truncation(ones * 0, (ones * 0).int(), ones * 0.95),
                "top_k 50": Truncation(ones * 0, (ones * 50).int(), ones),
                "min_p 0.05": Truncation(ones * 0.05, (ones * 0).int(), ones),
            }
            for kind, truncation in options.items():
                ms = triton.testing.do_bench_cudagraph(
                    lambda: kernels.sample(logits, ones, uniform, truncation),  # noqa: B023
                    rep=30,
                )
                yield {"workload": "sample", "logits": name, "kind": kind, "rows": rows, "vocab": VOCAB, "ms": ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=RANDOM, help="this one has random weights, all others are trained")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--runs", type=int, default=RUNS, help="after one that is not counted")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--record", help="write a record of this name")
    arguments = parser.parse_args()
    if "temperature" not in arguments.kinds or arguments.runs < 1:
        parser.error("shares are of plain temperature's runs: name it among --kinds, and make --runs at least 1")
    begun, results = records.begin(arguments.record), []
    model, ranks = arguments.model, arguments.tensor_parallel_size
    kernels_alone = sampled() if ranks == 1 and model == RANDOM else ()
    for row in chain(kernels_alone, generated(model, ranks, arguments.runs, arguments.kinds)):
        results.append(row)
        print(json.dumps({key: value for key, value in row.items() if key != "runs"}), flush=True)
    if arguments.record:
        records.write(records.record(results, begun), arguments.record)


if __name__ == "__main__":
    main()
