"""Measure decode steps on a CPU while other programs keep cores busy, for several numbers of threads.

    python tools/busy_machine.py --record busy-machine

For one and for 16 requests, the embedded model generates while some processes run endless loops. Compared are the
engine's own choice of threads, one thread, and as many threads as torch takes by default. They take turns, in several
rounds; a figure is the median of the rounds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from minillm import LLM, SamplingParams  # noqa: E402
from minillm.bench import records  # noqa: E402
from minillm.engine.engine import Engine  # noqa: E402

ROWS = (1, 16)
SETTLE, SECONDS, STEPS = 0.6, 1.2, 300  # before a measurement; a measurement's length, or its steps


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run `count` processes that never wait."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


def step_ms(engine: Engine, rows: int) -> float:
    """The mean milliseconds of a step that decodes `rows` requests."""
    params = SamplingParams(max_tokens=engine.max_model_len - 8, ignore_eos=True, temperature=0)
    for row in range(rows):
        engine.submit(engine.prepare([5, 6, 7, 8 + row], params, wants_text=False))
    begun = time.perf_counter()
    while time.perf_counter() - begun < SETTLE:
        engine.step()
    begun, steps = time.perf_counter(), 0
    while steps < STEPS and time.perf_counter() - begun < SECONDS:
        engine.step()
        steps += 1
    spent = (time.perf_counter() - begun) / steps * 1e3
    for each in list(engine.tracked.values()):
        engine.abort(each)
    while engine.has_work:
        engine.step()
    return spent


def measure(rounds: int, loads: Sequence[int]) -> list[dict]:
    """A row for each number of requests, busy processes, and threads."""
    most, rows = torch.get_num_threads(), []
    choices = {"chosen": None, "one": 1, "all": most}
    with ExitStack() as stack:
        engines = {name: stack.enter_context(LLM(device="cpu", cpu_threads=count)) for name, count in choices.items()}
        for llm in engines.values():
            step_ms(llm.engine, max(ROWS))
        quiet = {}
        for processes in loads:
            with busy(processes):
                time.sleep(0.5)
                for requests in ROWS:
                    runs = {name: [] for name in engines}
                    for _ in range(rounds):
                        for name, llm in engines.items():
                            runs[name].append(round(step_ms(llm.engine, requests), 3))
                    middle = {name: statistics.median(found) for name, found in runs.items()}
                    quiet.setdefault(requests, middle["all"])
                    for name, found in runs.items():
                        rows.append(
                            {
                                "requests": requests,
                                "busy_processes": processes,
                                "threads": name,
                                "step_ms": middle[name],
                                "times_all_threads_alone": round(middle[name] / quiet[requests], 3),
                                "runs": found,
                            }
                        )
                        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", help="a record's name, or a file")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2, 3], help="busy processes, 0 first")
    options = parser.parse_args()
    begun = records.begin(options.record)
    content = records.record(
        measure(options.rounds, options.busy), begun, model="tiny-gemma", all_threads=torch.get_num_threads()
    )
    if options.record:
        records.write(content, options.record)


if __name__ == "__main__":
    main()
