"""Measure how long the stages of a pipeline wait for each other, on a CPU.

    python tools/pipeline_bubble.py --stages 2 3 --record pipeline-bubble

Attention takes a fixed time in every layer, since it sleeps that long, so the results hardly depend on the machine. A
stage's share of the time in which it does not sleep is its bubble. m requests that decode keep m of P stages busy; a
prompt of m chunks has a bubble of 1 - m / (m + P - 1) (Huang et al. 2019, "GPipe", section 2.3).
"""

import argparse
import json
import time
from collections.abc import Iterator

import minillm
from minillm import LLM, SamplingParams
from minillm.bench import records
from minillm.ops import reference

SECONDS, CHUNK = 0.08, 16
MODEL = {"device": "cpu", "cpu_threads": 1, "num_blocks": 256, "enable_prefix_caching": False}


def prefill_attention(q, cache, rows, options):
    """The engine's own, after a while."""
    time.sleep(SECONDS)
    return reference.prefill_attention(q, cache, rows, options)


def decode_attention(q, cache, rows, options):
    """The engine's own, after a while."""
    time.sleep(SECONDS)
    return reference.decode_attention(q, cache, rows, options)


def bubble(llm: LLM, stages: int, prompts: list[list[int]], tokens: int) -> float:
    """The share of all stages' time in which they do not sleep."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    slow = {"prefill_attention": prefill_attention, "decode_attention": decode_attention}
    with minillm.using(**slow) as used:
        llm.generate(prompts, params)  # the functions are sent to the ranks
        before, begun = sum(used.calls.values()), time.perf_counter()
        llm.generate(prompts, params)
        passed = time.perf_counter() - begun
    return 1 - (sum(used.calls.values()) - before) * SECONDS / (passed * stages)


def bubbles(stages: int) -> Iterator[dict]:
    """A row for each number of requests that decode, and of chunks of a prompt: its bubble, and the expected one."""
    with LLM(**MODEL, max_num_batched_tokens=CHUNK, pipeline_parallel_size=stages) as llm:
        for count in (1, 2, 4, 8):
            found = bubble(llm, stages, [[5 + i] for i in range(count)], 12)
            expected = 1 - min(count, stages) / stages
            yield {"stages": stages, "requests": count, "bubble": round(found, 3), "expected": round(expected, 3)}
        for chunks in (1, 2, 4, 8):
            found = bubble(llm, stages, [[*range(5, 5 + chunks * CHUNK)]], 1)
            expected = 1 - chunks / (chunks + stages - 1)
            yield {"stages": stages, "chunks": chunks, "bubble": round(found, 3), "expected": round(expected, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", type=int, default=[2])
    parser.add_argument("--record", help="write a record of this name")
    options = parser.parse_args()
    begun, results = records.begin(options.record), []
    for stages in options.stages:
        for row in bubbles(stages):
            results.append(row)
            print(json.dumps(row), flush=True)
    if options.record:
        records.write(records.record(results, begun), options.record)


if __name__ == "__main__":
    main()
