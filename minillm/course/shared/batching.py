"""Small engines that play a few requests, what their traces say, and tables of batching records.  Lesson 10."""

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minillm.bench import records, workloads
from minillm.engine.engine import Engine
from minillm.engine.llm import LLM
from minillm.overrides import using
from minillm.request import Completion, Request, SamplingParams
from minillm.scheduler.policies import FirstComeFirstServed
from minillm.scheduler.scheduler import Scheduler
from minillm.trace import Trace, replay
from minillm.trace.replay import StepRows

VOCAB = 4000  # token ids to draw from; the embedded model has more
SMALL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float64",  # so that equal means equal
    "num_blocks": 256,
    "run_ahead": 0,
    "enable_prefix_caching": False,
}
Requests = Mapping[str, tuple[Sequence[int] | int, int]]


def traffic(requests: int, scale: int = 1) -> dict[str, tuple[list[int], int]]:
    """The first requests of the committed trace: {number: (prompt, output tokens)}, lengths divided by `scale`."""
    first = workloads.replay("conversation", VOCAB, scale=scale, requests=requests)
    return {f"{number:02}": (each.prompt, each.output_tokens) for number, each in enumerate(first)}


@dataclass
class Run:
    """An engine's run of some requests: its steps and completions, its counters, and the whole trace."""

    steps: list[StepRows]
    done: dict[str, Completion]
    stats: dict[str, Any]
    trace: Trace

    @property
    def spans(self) -> list[dict[str, tuple[int, int]]]:
        """{request: (start, count)} of each step."""
        return [dict(zip(s.request, zip(s.start, s.count, strict=True), strict=True)) for s in self.steps]

    @property
    def tokens(self) -> int:
        """Tokens that ran."""
        return sum(sum(step.count) for step in self.steps)

    @property
    def answers(self) -> dict[str, list[int]]:
        """The token ids of each request's answer."""
        return {name: list(completion.token_ids) for name, completion in self.done.items()}

    @property
    def seconds(self) -> float:
        """From the launch of the first step to the end of the last."""
        return (self.steps[-1].read or 0.0) - self.steps[0].launched

    @property
    def waited(self) -> dict[str, int]:
        """{request: number of the step that gave its first token}."""
        first: dict[str, int] = {}
        for number, step in enumerate(self.steps):
            for name, samples in zip(step.request, step.samples, strict=True):
                if samples:
                    first.setdefault(name, number)
        return first


def play(engine: Engine, requests: Requests, due: Mapping[str, int] | None = None) -> dict[str, Completion]:
    """Submit each request when it is due, and run steps until all are done."""
    steps, done, to_come = 0, {}, dict(requests)
    while to_come or engine.has_work:
        for name in [name for name in to_come if not due or due[name] <= steps]:
            prompt, output = to_come.pop(name)
            params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
            engine.submit(engine.prepare(_tokens(name, prompt), params, request_id=name))
        for completion in engine.step():
            done[completion.request_id] = completion
        steps += 1
    return done


def _tokens(name: str, prompt: Sequence[int] | int) -> list[int]:
    """A prompt as token ids, drawn at random if it is only a number of them."""
    return random.Random(name).choices(range(10, VOCAB), k=prompt) if isinstance(prompt, int) else list(prompt)


def run(
    requests: Requests,
    due: Mapping[str, int] | None = None,
    model: str | None = None,
    rehearse: bool = False,
    **options: Any,
) -> Run:
    """Play requests in an engine of their own.

    requests: {name: (prompt, output tokens)}; a prompt is token ids, or a number of them to draw. due: {name: how many
    steps come before it}; default: all come before the first. rehearse: warm up and play them once before, so that a
    GPU has compiled and captured everything. options: as `LLM`; default: SMALL.
    """
    trace = Trace()
    with LLM(model, trace=trace, **{**SMALL, **options}) as llm:
        if rehearse:
            llm.warm_up()
            play(llm.engine, requests, due)
        before = len(list(replay(trace)))
        done = play(llm.engine, requests, due)
        stats = llm.stats()
    return Run(list(replay(trace))[before:], done, stats, trace)


def simulate(
    next_step: Callable[[list[Any], int], Sequence[tuple[int, int, bool]]],
    request: Callable[..., Any],
    requests: Mapping[str, tuple[int, int]],
    rows: int,
    budget: int = 2048,
    most: int = 100,
) -> list[dict[str, tuple[int, int]]]:
    """A scheduler around lesson 10's `next_step`: {request: (start, count)} of each step, `most` steps at most.

    request: makes what `next_step` is given, from prompt, known, computed and limit.
    """
    waiting, running = list(requests.items()), dict[str, Any]()
    steps: list[dict[str, tuple[int, int]]] = []
    while waiting or running:
        if len(steps) == most:
            print(f"stopped: {', '.join(running)} not done after {most} steps. Does known grow?")
            break
        while waiting and len(running) < rows:
            name, (prompt, output) = waiting.pop(0)
            running[name] = request(prompt, prompt, 0, prompt + output)
        ran = zip(running, next_step(list(running.values()), budget) or [], strict=False)
        steps.append({name: (start, count) for name, (start, count, _) in ran if count})
        running = {name: each for name, each in running.items() if each.known < each.limit}
    return steps


class PromptsFirst(FirstComeFirstServed):
    """Shares a step's budget the other way around: prompts first, then requests that decode."""

    def share(self, pending: np.ndarray, budget: int) -> np.ndarray:
        order = np.argsort(pending == 1, kind="stable")
        before = np.cumsum(pending[order]) - pending[order]
        counts = np.empty_like(pending)
        counts[order] = np.minimum(pending[order], np.maximum(budget - before, 0))
        return counts


# ---- a long prompt joins requests that decode

# Answers long enough to decode in every step of the newcomer's prompt, with each budget of the lesson.
USERS = {f"user {number}": (20 + number, 60) for number in range(7)}


def newcomer(budget: int, prompt: int, **options: Any) -> Run:
    """Seven users decode; after 20 steps a request with a prompt of so many tokens joins them."""
    due = dict.fromkeys(USERS, 0) | {"new": 20}
    given: dict[str, Any] = {"dtype": "auto", "max_num_batched_tokens": budget, **options}
    return run({**USERS, "new": (prompt, 4)}, due, **given)


def newcomer_steps(served: Run) -> tuple[int, int]:
    """Return how many steps run the newcomer's prompt, and how many tokens the largest of them computes."""
    sizes = [
        sum(step.count) for step in served.steps if ("new", "prefill") in zip(step.request, step.kind, strict=True)
    ]
    return len(sizes), max(sizes)


def newcomer_waits(served: Run) -> tuple[float, float]:
    """The newcomer's TTFT, and the longest gap between two tokens of the users, in milliseconds."""
    new = served.done["new"]
    assert new.first_token_time is not None
    read = [step.read for step in served.steps if step.read is not None and USERS.keys() & set(step.request)]
    return 1e3 * (new.first_token_time - new.arrival_time), 1e3 * float(max(np.diff(read)))


# ---- who goes first

MIXED = {f"{number:02}": (96 if number % 6 == 2 else 8, 4) for number in range(60)}
ONE_A_STEP = {name: number for number, name in enumerate(MIXED)}


def first_tokens(policy: type, requests: Requests, due: Mapping[str, int]) -> dict[str, int]:
    """{request: steps from when it was due to its first token} under a policy, in an engine with four rows."""
    with using(policy=policy):
        waited = run(requests, due, max_num_seqs=4, max_num_batched_tokens=24, dtype="auto").waited
    return {name: waited[name] - due[name] for name in requests}


def mixed_waits(policy: type) -> dict[str, int]:
    """The waits of MIXED, sixty requests of which every sixth has a long prompt; one comes before each step."""
    return first_tokens(policy, MIXED, ONE_A_STEP)


def wait_points(waited: Mapping[str, int]) -> list[tuple[int, int, bool]]:
    """(the step before which it arrived, its wait, whether its prompt is long) of each request of MIXED."""
    return [(ONE_A_STEP[name], wait, MIXED[name][0] > 8) for name, wait in waited.items()]


def show_waits(waits: Mapping[str, Mapping[str, int]]) -> None:
    """Print the mean wait of all requests, and the longest of a long prompt. waits: label -> those of MIXED."""
    for label, waited in waits.items():
        longest = max(wait for name, wait in waited.items() if MIXED[name][0] > 8)
        mean = float(np.mean(list(waited.values())))
        print(f"{label:28} mean {mean:5.1f} steps, longest wait of a long prompt {longest}")


def long_one_waits(policy: type, shorts: int) -> int:
    """Steps to the first token of a long prompt that comes after five short ones, of which `shorts` come in all."""
    due = {str(number): number for number in range(shorts)} | {"long": 5}
    return first_tokens(policy, dict.fromkeys(due, (8, 4)) | {"long": (96, 4)}, due)["long"]


# ---- records of `minillm bench batching`


def throughput_table(record: Mapping[str, Any]) -> tuple[float, float]:
    """Print static batching, in-flight batching, and the second divided by the first.

    Returns that factor of the output tokens per second, and what it would be if steps took no longer.
    """
    lengths = "full lengths" if record["scale"] == 1 else f"lengths divided by {record['scale']}"
    print(f"{records.model_of(record)}, all requests at once, {lengths}:")
    print(f"  {'':10} {'steps':>6} {'tokens a step':>14} {'ms a step':>10} {'output tokens/s':>16}")
    rows = []
    for row in record["results"]:
        if row["part"] == "throughput":
            # The last token of an answer is never computed.
            ran = row["input_tokens"] + row["output_tokens"] - row["requests"]
            steps, speed = row["steps"], row["output_tokens_per_s"]
            tokens, ms = ran / steps, 1e3 * row["seconds"] / steps
            rows.append((steps, tokens, ms, speed))
            print(f"  {row['batching']:10} {steps:6,} {tokens:14.0f} {ms:10.2f} {speed:16,.0f}")
    times = [after / before for before, after in zip(*rows, strict=True)]
    print(f"  {'times':10} {times[0]:6.2f} {times[1]:14.2f} {times[2]:10.2f} {times[3]:16.2f}")
    return times[3], 1 / times[0]


def latency_table(record: Mapping[str, Any]) -> None:
    """Print TTFT and ITL with whole and with chunked prompts: medians of the runs, and their range."""
    print(f"{records.model_of(record)}, requests as they arrive, ms (in brackets: lowest and highest run):")
    for kind in ("whole", "chunked"):
        row = next(row for row in record["results"] if row.get("prefill") == kind)
        for wait, key in (("TTFT", "ttft_s"), ("ITL", "itl_s")):
            shown = []
            for p in ("p90", "p99"):
                ms = [1e3 * each[key][p] for each in row["runs"]]
                shown.append(f"{p} {np.median(ms):7,.1f} ({min(ms):,.1f} to {max(ms):,.1f})")
            print(f"  {kind:8} {wait:5}{shown[0]:30}{shown[1]}")


# ---- running ahead


def scheduling_us(rows: int, steps: int = 200) -> float:
    """Microseconds that the scheduler takes for a step in which all rows decode, without any model."""
    scheduler = Scheduler(
        max_num_seqs=rows,
        max_num_batched_tokens=16384,
        max_model_len=512,
        block_size=16,
        num_blocks=32 * rows,
        prefix_caching=False,
    )
    prompt, params = np.arange(8, dtype=np.int32), SamplingParams()
    for number in range(rows):
        scheduler.submit(Request(str(number), prompt, params, limit=500))
    prompts = scheduler.schedule()
    assert prompts is not None
    scheduler.complete(prompts, np.ones(rows, np.int32))
    begin = time.perf_counter()
    for _ in range(steps):
        step = scheduler.schedule()
        assert step is not None
        scheduler.complete(step, np.ones(rows, np.int32))
    return 1e6 * (time.perf_counter() - begin) / steps


def answer_ahead(questions: Iterable[str], ahead: int, max_tokens: int = 60) -> tuple[int, list[list[int]]]:
    """(tokens that the model computed for the answers, the answers' tokens), launching `ahead` steps ahead."""
    trace, params = Trace(), SamplingParams(max_tokens=max_tokens, temperature=0)
    with LLM(trace=trace, **{**SMALL, "run_ahead": ahead}) as llm:
        done = llm.chat([[{"role": "user", "content": each}] for each in questions], params)
    return sum(sum(step.samples) for step in replay(trace)), [list(each.token_ids) for each in done]


def gains(record: Mapping[str, Any], group: str, before: str, after: Sequence[str]) -> None:
    """Print how much faster an ablation record's settings `after` are than `before`, with the range of their runs."""
    rows = {(row["name"], row["requests"]): row for row in record["results"] if row["group"] == group}
    for requests in sorted({requests for _, requests in rows}):
        base = rows[before, requests]["seconds"]
        for name in after:
            row = rows[name, requests]
            gain, *runs = (base / each - 1 for each in (row["seconds"], *row["runs"]))
            spread = f"single runs {min(runs):+.1%} to {max(runs):+.1%}"
            print(f"{requests:3} request(s), {group} {before} to {name}: {gain:+.1%} ({spread})")
