"""Measure what the host takes from one drafted step to the next, with a device that computes nothing.

    python tools/host_time.py

A step with drafts is launched once the one before it has been read, so the device idles for as long as the host takes
from there to the launch: the *gap*. All of the host's work is real: scheduler, prompt lookup, the choice of the number
of drafts, text, and what a captured step sends. Only the replay of the graph is replaced, by one that writes the tokens
of a text that nearly repeats itself; neither PyTorch's calls of CUDA nor the graph's launch are in these times.

With --ahead the device drafts (speculate_ahead), and steps are launched before earlier ones have been read, so there is
no gap. What stands in for the device's own work is left out of the CPU time. Rows:

gap_us     from a step's result to the next step's replay, median over steps
gap_cpu_us the same in CPU time of the thread, which other programs do not lengthen
step_us    CPU time of the process for one drafted step, gap included
ahead      share of the drafted steps that were launched while another one was in flight
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from minillm import LLM, SamplingParams  # noqa: E402
from minillm.bench import records  # noqa: E402
from minillm.engine import Engine  # noqa: E402
from minillm.runner.cuda_graph import CapturedSteps, DecodeShape, Graph, Replayed, ToSample  # noqa: E402
from minillm.runner.decode_graphs import DecodeGraphs  # noqa: E402
from minillm.runner.device_drafts import FOUND  # noqa: E402
from minillm.runner.executor import WatchedExecutor  # noqa: E402
from minillm.runner.launched import Results, StepInFlight  # noqa: E402
from minillm.runner.lookup_graphs import LookupGraphs  # noqa: E402
from minillm.scheduler import Step  # noqa: E402
from minillm.speculation.costs import Costs  # noqa: E402
from minillm.speculation.ngram import NgramIndex  # noqa: E402

PERIOD, FIRST_ID, PROMPT = 6, 300, 40  # the text: five tokens that repeat, and one of two


def text(rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The token of each row at each position."""
    coin = (positions.astype(np.uint64) * 0x9E3779B97F4A7C15 + rows.astype(np.uint64) * 0xBF58476D1CE4E5B9) >> 61 & 1
    place = positions % PERIOD
    return FIRST_ID + place + np.where(place == PERIOD - 1, coin.astype(np.int64), 0)


class Clock:
    """When results were there, and how long after that the next step with drafts was replayed."""

    def __init__(self) -> None:
        self.gaps: list[tuple[int, int]] = []  # ns: wall, CPU time of the thread
        self.drafted = self.ahead = self.device = 0  # device: ns of CPU time that stand in for the device's work
        self._read: tuple[int, int] | None = None

    def read(self, step: Step) -> None:
        self._read = None if step.drafts is None else (time.perf_counter_ns(), time.thread_time_ns())

    def replayed(self, step: Step) -> None:
        if self._read is not None and step.drafts is not None:
            now = time.perf_counter_ns(), time.thread_time_ns()
            self.gaps.append((now[0] - self._read[0], now[1] - self._read[1]))
        self._read = None
        self.drafted += step.drafts is not None


class Replay:
    """In place of a CUDA graph: writes the tokens of the text."""

    def __init__(self, graphs: "TextGraphs", size: int):
        self.graphs, self.size = graphs, size

    def replay(self) -> None:
        self.graphs.clock.replayed(self.graphs.step)
        if self.graphs.step.lookup is not None:
            self.graphs.draft(self.size)
            return
        rows, positions, _ = self.graphs.inputs(self.size).numpy()
        self.graphs.write(rows, positions + 1)
        positions += 1


class TextGraphs(DecodeGraphs):
    """Steps of all kinds that compute nothing."""

    def __init__(self, runner, most: int, clock: Clock, drafts: int):
        super().__init__(runner.model, runner.state, [], CapturedSteps(runner.model.ops), most, single_row=False)
        self.clock, self.step = clock, None
        nothing = torch.zeros(1, 1)
        self.nothing = ToSample(nothing, *[nothing] * 4)
        self.lookups = LookupGraphs(self, drafts)
        self.indexes: dict[int, NgramIndex] = {}

    def capture(self, shape: DecodeShape) -> Graph:
        have = self.captured.decodes
        if shape not in have:
            have[shape] = Graph(Replay(self, shape.rows), torch.zeros(shape.rows, dtype=torch.int64), self.nothing)
        return have[shape]

    def replay(self, step: Step, shape: DecodeShape | None = None) -> Replayed:
        self.step = step
        if step.lookup is not None:
            shape = self.lookups.fits(step)
            assert shape is not None, "a graph runs every step that the device drafts for"
            self.capture(shape)
            return self.lookups.replay(step, shape)
        shape = self.fits(step)
        if shape is not None:
            return super().replay(step, shape)
        self.clock.replayed(step)
        self.write(step.token_rows, step.for_each_token(step.ends))
        count = len(step.token_rows)
        return Replayed(torch.zeros(count, dtype=torch.int64), self.nothing[0], np.arange(count), True)

    def draft(self, size: int) -> None:
        """Find drafts, accept those that are in the text, and count, as the kernels do."""
        begun = time.process_time_ns()
        rows, counts, given = self.lookups.inputs(size).numpy()
        lengths, accepted = self.state.lengths.numpy(), self.state.accepted.numpy()
        for i in np.flatnonzero(counts >= 0).tolist():
            row, before = int(rows[i]), int(given[i]) if given[i] >= 0 else int(lengths[rows[i]])
            own = text(np.full(before + 64, row), np.arange(before + 64)).astype(np.int32)
            index = self.indexes.setdefault(row, NgramIndex())
            drafts = index.continuation(own[:before], int(counts[i])) if counts[i] else []
            right = np.cumprod(own[before : before + len(drafts)] == np.array(drafts, np.int32)).sum()
            lengths[row] = before + 1 + right
            accepted[row, before % accepted.shape[1]] = FOUND * len(drafts) + 1 + right
            self.write(np.full(1 + len(drafts), row), np.arange(before, before + 1 + len(drafts)))
        given[:] = -1
        self.clock.device += time.process_time_ns() - begun

    def write(self, rows: np.ndarray, positions: np.ndarray) -> None:
        arrived = self.state.arrived.numpy()
        arrived[rows, positions % arrived.shape[1]] = text(rows, positions)

    def close(self) -> None:
        self.captured.clear()


class Timed(StepInFlight):
    def __init__(self, launched: StepInFlight, clock: Clock):
        self.step, self.launched, self.clock = launched.step, launched, clock

    def wait(self) -> Results:
        self.clock.read(self.step)
        return self.launched.wait()


class TimedExecutor(WatchedExecutor):
    def __init__(self, engine: Engine, clock: Clock):
        super().__init__(engine.executor)
        self.clock, self.scheduler = clock, engine.scheduler

    def launch(self, step: Step) -> StepInFlight:
        self.clock.ahead += step.drafts is not None and self.scheduler.in_flight > 1
        return Timed(self.executor.launch(step), self.clock)


class Fixed(Costs):
    """Times of a GPU whose steps take a little longer with drafts, in place of those that are measured."""

    def observe(self, drafted: bool, tokens: int, seconds: float) -> None:
        super().observe(drafted, tokens, 2e-3 + 1e-6 * tokens)


def measured(rows: int, streams: bool, drafts: int, output: int, ahead: bool = False) -> dict[str, Any]:
    """One run of `rows` requests. streams: whether each token's text is given to a listener, as a server does.

    ahead: whether the device drafts.
    """
    options: dict[str, Any] = {"max_num_seqs": max(4 * rows, 8), "speculate_tokens": drafts, "run_ahead": 1}
    options["speculate_ahead"] = ahead
    llm = LLM(device="cpu", speculate="ngram", max_model_len=2048, enable_prefix_caching=False, **options)
    engine, clock = llm.engine, Clock()
    executor, speculation = engine.executor, engine.scheduler.speculation
    executor.threads = None
    executor.runner.graphs = TextGraphs(executor.runner, max(options["max_num_seqs"], drafts + 1), clock, drafts)
    speculation.most_yielded, speculation.runs_ahead = max(options["max_num_seqs"], drafts + 1), True  # as on a GPU
    speculation.costs = costs = Fixed()
    for _ in range(2):
        for tokens in (*range(1, 9), 16, 64, 256):
            costs.observe(False, tokens, 0)
            costs.observe(True, tokens, 0)
    params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
    for row in range(rows):
        prompt = text(np.full(PROMPT, row), np.arange(PROMPT)).tolist()
        got: list[str] = []
        listener = (lambda delta, got=got: got.append(delta.text)) if streams else None
        engine.submit(engine.prepare(prompt, params, listener=listener))
    engine.scheduler.speculation = speculation
    with engine.running_on(TimedExecutor(engine, clock)):
        while not clock.drafted:
            engine.step()
        clock.gaps.clear()
        clock.ahead = clock.device = 0
        before, begun = clock.drafted, time.process_time_ns()
        while engine.has_work:
            engine.step()
        passed = time.process_time_ns() - begun - clock.device
    counted = llm.stats()
    llm.close()
    gaps = [(0, 0)] if ahead else clock.gaps
    wall, cpu = (statistics.median(each) / 1e3 for each in zip(*gaps, strict=True))
    return {
        "gap_us": wall,
        "gap_cpu_us": cpu,
        "step_us": passed / 1e3 / (clock.drafted - before),
        "acceptance_length": 1 + counted["accepted_tokens"] / counted["drafts"],
        "ahead": clock.ahead / (clock.drafted - before),
        "steps": counted["steps"],
    }


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--output-len", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ahead", action="store_true", help="the device drafts, and steps are launched ahead")
    parser.add_argument("--record", metavar="NAME", help="write a record of this name")
    return parser.parse_args(words)


def main() -> None:
    options = parse()
    begun, results = records.begin(options.record), []
    torch.Tensor.pin_memory = lambda tensor: tensor  # type: ignore[method-assign]  # there may be no GPU
    torch.set_num_threads(1)
    for rows in options.rows:
        for streams in (False, True):
            drafts = 7 if rows < 64 else 3
            output = options.output_len if rows < 64 else options.output_len // 4
            runs = [measured(rows, streams, drafts, output, options.ahead) for _ in range(options.rounds)]
            row: dict[str, Any] = {"rows": rows, "streams": streams, "drafts": drafts, "device": options.ahead}
            row |= {name: round(statistics.median(each[name] for each in runs), 2) for name in runs[0]}
            results.append(row)
            print(json.dumps(row), flush=True)
            if options.record:
                records.write(records.record(results, begun), options.record)


if __name__ == "__main__":
    main()
