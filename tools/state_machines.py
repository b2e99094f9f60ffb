"""Run the scheduler's state machines for a million steps, and measure how soon they find each planted fault.

    python tools/state_machines.py --steps 1000000 --record state-machine

Machines and faults are those of test_scheduler_state_machine.py and test_stream_state_machine.py. Steps are counted as
Hypothesis counts them, without the steps that drain a machine at its end. Each finished run is saved in --kept, so the
same command continues an interrupted one at the same commit.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from hypothesis import Phase, seed  # noqa: E402
from hypothesis.stateful import invariant  # noqa: E402

from tests.scheduler import test_scheduler_state_machine as plain  # noqa: E402
from tests.scheduler import test_stream_state_machine as streams  # noqa: E402

MACHINES = [*plain.MACHINES, *streams.MACHINES]
FAULTS = {fault.__name__: (fault, home) for home in (plain, streams) for fault in home.FAULTS}
EXAMPLES = 200  # runs of a machine for each seed
FOUND_WITHIN = 10_000


def counting(machine: type) -> type:
    """The machine with a step counter, `steps`; `found_after` is the count at the first failure."""

    class Counting(machine):
        steps = 0
        found_after = None
        rules_ran = -1  # invariants are also checked after the initial rule

        @invariant()
        def count(self):
            self.rules_ran += 1
            Counting.steps += self.rules_ran > 0

        def teardown(self):
            failed = isinstance(sys.exc_info()[1], plain.FINDINGS)
            try:
                super().teardown()
            except plain.FINDINGS:
                failed = True
                raise
            finally:
                if failed and Counting.found_after is None:
                    # A failing step ends before it is counted.
                    Counting.found_after = Counting.steps + 1

    Counting.__name__ = machine.__name__
    return Counting


def soak(number: int) -> dict:
    """Run one machine with one seed. Raises any failure, with the shortest run that reproduces it."""
    begun, machine = time.perf_counter(), counting(MACHINES[number % len(MACHINES)])
    seed(number)(machine)
    plain.run(machine, max_examples=EXAMPLES, database=None, phases=(Phase.generate, Phase.shrink))
    return {"seed": number, "machine": machine.__name__, "steps": machine.steps, "seconds": _since(begun)}


def hunt(name: str, first_seed: int) -> dict:
    """Steps until a planted fault is found, over several seeds if necessary."""
    fault, home = FAULTS[name]
    begun, steps = time.perf_counter(), 0
    for number in itertools.count(first_seed * 1000):
        machine = counting(home.with_fault(fault))
        seed(number)(machine)
        options = {"database": None, "phases": (Phase.generate,), "report_multiple_bugs": False}
        try:
            plain.run(machine, max_examples=EXAMPLES, **options)
        except plain.FINDINGS:
            steps += machine.found_after
        else:
            steps += machine.steps
        if machine.found_after or steps > 10 * FOUND_WITHIN:
            return {
                "fault": name,
                "what": " ".join(fault.__doc__.split()),
                "seed": first_seed,
                "found": machine.found_after is not None,
                "steps": steps,
                "seconds": _since(begun),
            }


def _since(begun: float) -> float:
    return round(time.perf_counter() - begun, 2)


def kept(path: Path, commit: str | None) -> list[dict]:
    """Finished runs of this commit."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [row for row in map(json.loads, lines) if row.pop("commit") == commit]


def progress(done: list[dict], wanted: int, begun: float, before: int) -> None:
    steps = sum(row["steps"] for row in done if "machine" in row)
    rate = (steps - before) / max(1e-9, time.perf_counter() - begun)
    print(f"{steps:>11,} of {wanted:,} steps, {rate:,.0f} per second", flush=True)


def run(steps: int, processes: int, hunts: int, path: Path, begun: dict) -> list[dict]:
    """Hunt for the planted faults, then run seeds until there are enough steps; returns all rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    done = kept(path, begun["commit"])
    for row in done:
        print("kept:", json.dumps(row))
    hunted = {(row["fault"], row["seed"]) for row in done if "fault" in row}
    seeds = (
        number for number in itertools.count() if number not in {row.get("seed") for row in done if "machine" in row}
    )
    start, before = time.perf_counter(), sum(row["steps"] for row in done if "machine" in row)
    with ProcessPoolExecutor(processes) as pool, path.open("a") as file:

        def collect(futures: Iterable) -> None:
            for future in as_completed(futures):
                row = future.result()
                done.append(row)
                file.write(json.dumps(row | {"commit": begun["commit"]}) + "\n")
                file.flush()
                if "fault" in row:
                    print(f"{row['fault']}: {row['steps']:,} steps, seed {row['seed']}", flush=True)
                else:
                    progress(done, steps, start, before)

        asked = [(name, number) for name in FAULTS for number in range(hunts)]
        collect([pool.submit(hunt, *each) for each in asked if each not in hunted])
        while sum(row["steps"] for row in done if "machine" in row) < steps:
            collect([pool.submit(soak, next(seeds)) for _ in range(4 * processes)])
    return done


def summary(done: list[dict]) -> list[dict]:
    """One row per machine and one per fault: the record's results."""
    rows = []
    for name in dict.fromkeys(row["machine"] for row in done if "machine" in row):
        runs = [row for row in done if row.get("machine") == name]
        total = {key: round(sum(row[key] for row in runs), 1) for key in ("steps", "seconds")}
        rows.append({"machine": name, "seeds": len(runs), "examples": len(runs) * EXAMPLES, **total, "failures": 0})
    for name in dict.fromkeys(row["fault"] for row in done if "fault" in row):
        hunts = sorted((row for row in done if row.get("fault") == name), key=lambda row: row["seed"])
        steps = [row["steps"] for row in hunts]
        found = all(row["found"] and row["steps"] <= FOUND_WITHIN for row in hunts)
        rows.append({"fault": name, "what": hunts[0]["what"], "found_within_10000": found, "steps_until_found": steps})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--hunts", type=int, default=5, help="how many times each fault is planted, with different seeds"
    )
    parser.add_argument("--record", help="a record's name, or a file")
    parser.add_argument("--kept", type=Path, default=ROOT / "build" / "state-machine.jsonl")
    options = parser.parse_args()
    from minillm.bench import records

    begun, start = records.begin(options.record), time.perf_counter()
    done = run(options.steps, options.processes, options.hunts, options.kept, begun)
    results = summary(done)
    for row in results:
        print(json.dumps(row))
    total = sum(row["steps"] for row in done if "machine" in row)
    content = records.record(results, begun, steps=total, processes=options.processes, seconds=_since(start))
    if options.record:
        records.write(content, options.record)
    if missed := [row["fault"] for row in results if row.get("found_within_10000") is False]:
        sys.exit(f"not found within {FOUND_WITHIN:,} steps every time: {', '.join(missed)}")


if __name__ == "__main__":
    main()
