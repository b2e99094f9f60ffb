"""Measure how long steps of running requests are delayed while adapters (LoRA) are loaded, used and unloaded.

    python tools/adapter_loading.py --model smollm2-135m --record adapter-loading

A few requests run without adapters. Meanwhile, in the rows with loads, a thread loads one adapter after another, of
`--rank` on all projections, as the server's thread does; each is used once by a short request, so that it comes to the
device, and is unloaded. The same is done without loads, where the short requests use an adapter of the start. Rows:

median_ms, longest_ms   of the times between the ends of two steps
stall_ms                how much longer the longest is than without loads
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from queue import Empty, SimpleQueue

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from adapter_speed import capture, write_adapter  # noqa: E402

from minillm import LLM, RequestOptions, SamplingParams  # noqa: E402
from minillm.bench import records  # noqa: E402
from minillm.engine.tracked import Tracked  # noqa: E402

GAP = 0.02  # seconds between two uses


class Loads(threading.Thread):
    """Names adapters to use, each of which it has just loaded and unloads once it has been used."""

    def __init__(self, llm: LLM, place: Path, loads: bool):
        super().__init__(daemon=True)
        self.llm, self.place, self.loads = llm, place, loads
        self.named, self.used, self.ended = SimpleQueue[str](), threading.Semaphore(0), threading.Event()
        self.count, self.seconds = 0, list[float]()

    def run(self) -> None:
        while not self.ended.wait(GAP):
            name = f"loaded {self.count}" if self.loads else "first"
            if self.loads:
                begin = time.perf_counter()
                self.llm.engine.load_adapter(name, self.place)
                self.seconds.append(time.perf_counter() - begin)
            self.named.put(name)
            self.used.acquire()
            if self.loads:
                self.llm.engine.unload_adapter(name)
            self.count += 1


def gaps(llm: LLM, source: Loads, requests: int, output_len: int) -> list[float]:
    """Run the requests to their ends; returns the seconds between the ends of steps."""
    engine, long = llm.engine, SamplingParams(max_tokens=output_len, temperature=0, ignore_eos=True)
    short = SamplingParams(max_tokens=1, temperature=0)
    batch = [engine.prepare([7 + i, *range(10, 40)], long) for i in range(requests)]
    for each in batch:
        engine.submit(each)
    while any(each.completion.first_token_time is None for each in batch):
        engine.step()
    users, found, before = list[Tracked](), list[float](), time.perf_counter()
    source.start()
    while not all(each.completion.finish_reason for each in batch):
        try:
            users.append(engine.prepare([7], short, RequestOptions(adapter=source.named.get_nowait())))
            engine.submit(users[-1])
        except Empty:
            pass
        engine.step()
        now = time.perf_counter()
        found.append(now - before)
        before = now
        for each in [each for each in users if each.completion.finish_reason]:
            users.remove(each)
            source.used.release()
    source.ended.set()
    source.used.release()
    source.join()
    while engine.has_work:
        engine.step()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: tiny-gemma")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--output-len", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", metavar="NAME", help="write a record of this name")
    options = parser.parse_args()
    begun = records.begin(options.record)
    made = {"device": options.device, "dtype": options.dtype, "load_format": options.load_format}
    made |= {"max_model_len": 1024, "enable_prefix_caching": False, "max_num_seqs": 2 * options.requests}
    with tempfile.TemporaryDirectory() as folder:
        with LLM(options.model, **made) as plain:
            place = write_adapter(Path(folder, "adapter"), plain.model_config, options.rank)
        with LLM(options.model, **made, adapters={"first": place}, max_lora_rank=options.rank, max_loras=4) as llm:
            capture(llm, 40 + options.output_len, {2 * options.requests})
            found: dict[bool, list[tuple[Loads, list[float]]]] = {False: [], True: []}
            for turn in range(-1, options.rounds):
                for loads in (False, True):
                    source = Loads(llm, place, loads)
                    times = gaps(llm, source, options.requests, options.output_len)
                    if turn >= 0:
                        found[loads].append((source, times))
            dtype = llm.engine.facts.dtype
    usual = max(each for _, times in found[False] for each in times)
    results = []
    for loads, runs in found.items():
        every = [each for _, times in runs for each in times]
        row = {
            "model": options.model or "tiny-gemma",
            "dtype": dtype,
            "rank": options.rank,
            "requests": options.requests,
            "loads": sum(source.count for source, _ in runs) if loads else 0,
            "steps": len(every),
            "median_ms": round(statistics.median(every) * 1e3, 2),
            "longest_ms": round(max(every) * 1e3, 2),
        }
        if loads:
            row["stall_ms"] = round((max(every) - usual) * 1e3, 2)
            row["load_ms"] = round(statistics.median(each for source, _ in runs for each in source.seconds) * 1e3, 1)
        results.append(row)
        print(json.dumps(row), flush=True)
    if options.record:
        records.write(records.record(results, begun), options.record)


if __name__ == "__main__":
    main()
