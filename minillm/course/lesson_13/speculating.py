"""A model with the cache of one request, drafters to try, and what steps with drafts cost.  Lesson 13."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minillm.bench import records
from minillm.engine.llm import LLM
from minillm.model import Batch, Model
from minillm.ops import Rows
from minillm.overrides import using
from minillm.request import SamplingParams
from minillm.runner.sampler import uniforms
from minillm.runner.sampling_columns import mix
from minillm.speculation import Asked, every_draft_runs
from minillm.speculation.ngram import NgramIndex
from minillm.trace import Trace, replay

RECORD = "h200/quantization"
MEASURED = {"host": "h200/speculation", "GPU": "h200/speculation-ahead"}  # by who drafts
MOST = 7  # drafts in a step, as by default in the engine
SMALL: dict[str, Any] = {"device": "cpu", "dtype": "float64", "run_ahead": 0, "num_blocks": 256}
GUESTS = """Room 3: Ada came on Monday, stayed 2 nights and paid with honey.
Room 5: Tom came on Friday, stayed 4 nights and paid with cheese.
Room 8:"""
SUMS = """Question: What is 3 plus 4?
Answer: 3 plus 4 is 7.
Question: What is 5 plus 2?
Answer:"""
STORY = "Once upon a time"

Drafter = Callable[[list[int], int], Sequence[int]]


class TargetModel:
    """A model with the cache of one request, of at most `capacity` tokens.

    length: tokens whose keys and values count. The next ones are written after them, over whatever is there; a smaller
    length takes tokens back.
    """

    def __init__(self, model: Model, capacity: int):
        self.model, self.capacity, self.length = model, capacity, 0
        self._caches = [model.cache_spec.allocate(1, capacity, model.device) for _ in model.layers]
        self._table = torch.zeros(1, 1, dtype=torch.int32, device=model.device)

    @torch.inference_mode()
    def run(self, tokens: Sequence[int]) -> Tensor:
        """Run tokens after those that count: the logits after each of them, [tokens, vocab]."""
        begin, end = self.length, self.length + len(tokens)
        assert end <= self.capacity, f"{end} tokens do not fit a cache of {self.capacity}"
        positions = torch.arange(begin, end, device=self.model.device)
        groups = len(self.model.groups.windows)
        lengths, starts = (torch.tensor(each, dtype=torch.int32) for each in ([end], [0, len(tokens)]))
        rows = (Rows(self._table, lengths, starts, len(tokens)),) * groups
        batch = Batch(torch.tensor(tokens), positions, positions.repeat(groups, 1), (), rows, None)
        self.length = end
        return self.model.logits(self.model.forward(batch, self._caches))


def number(seed: int, position: int) -> float:
    """The engine's random number for the token at a position of a request with this seed."""
    return float(uniforms(mix(np.array([seed], np.uint64)), np.array([position]))[0])


def greedy(tokens: int) -> SamplingParams:
    """Parameters for so many tokens, each the likeliest."""
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


def milliseconds(model: Model, context: int = 64, counts: Sequence[int] = (1, 2, 4, 8, 16)) -> dict[int, float]:
    """The median CPU time of a step that runs so many tokens of one request after `context` others.

    CPU time, which other programs on the machine change less than the clock.
    """
    target = TargetModel(model, context + max(counts))
    target.run(list(range(10, 10 + context)))
    runs: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(15):
        for count, found in runs.items():
            begin = time.process_time()
            target.run(list(range(10, 10 + count)))
            found.append(1e3 * (time.process_time() - begin))
            target.length = context
    return {count: median(found) for count, found in runs.items()}


def recorded_ms() -> dict[int, float]:
    """{tokens of a step: its milliseconds}, of Gemma 2B in bfloat16 on an H200, each token of a request of its own.

    From the record of 256 tokens after prompts of 128, whose time is in it; the mean of its measurements.
    """
    seconds: dict[int, list[float]] = {}
    for row in records.read(RECORD)["results"]:
        if row["quantization"] == "bf16" and row["workload"].startswith("single"):
            seconds.setdefault(row["requests"], []).append(row["seconds"])
    return {requests: 1e3 * mean(each) / 256 for requests, each in seconds.items()}


def step_ms(tokens: Any) -> Any:
    """Milliseconds of steps of 1 to 64 tokens; a number that `recorded_ms` lacks takes as long as the next larger."""
    known = recorded_ms()
    return np.array(list(known.values()))[np.searchsorted(list(known), tokens)]


def crowded_ms() -> dict[int, float]:
    """{tokens of a step: its milliseconds}, of the same model on an H200, up to hundreds, from lesson 00's record."""
    rows = [each for each in records.read("h200/roofline")["results"] if each["name"].startswith("decode")]
    return {row["tokens"]: 1e3 * row["seconds"] for row in rows}


@dataclass(frozen=True)
class Measured:
    """One row of the records of drafts on an H200, of the same model.

    who: drafts, the host or the GPU. right: a draft's chance, by a coin; 0: no draft is right, and the engine chose how
    many ran. length: the acceptance length, None without drafts. speedup: of the last pair of runs, whose drafts the
    record counts; earlier: of those before it. longer: a step's time, as a multiple of one without drafts.
    """

    who: str
    requests: int
    drafts: int
    right: float
    length: float | None
    speedup: float
    earlier: tuple[float, ...]
    longer: float


def measured() -> list[Measured]:
    """Whole runs with drafts and without: by requests, drafts, how many were right, and who drafted."""
    found = []
    for who, name in MEASURED.items():
        for row in records.read(name)["results"]:
            *earlier, last = row["speedups"]
            found.append(
                Measured(
                    who,
                    row["requests"],
                    row["drafts"],
                    row["right"],
                    row["acceptance_length"],
                    last,
                    tuple(earlier),
                    row["steps_without"] / row["steps_with"] / last,
                )
            )
    return sorted(found, key=lambda each: (each.requests, -each.drafts, each.right, each.who == "GPU"))


def by_coin(who: str, requests: int, drafts: int = MOST) -> list[Measured]:
    """The measurements in which a coin decided which drafts are right."""
    of = who, requests, drafts
    return [each for each in measured() if each.right and (each.who, each.requests, each.drafts) == of]


def pays_from(drafts: int, longer: float) -> float:
    """The chance of a draft to be right from which steps with so many drafts pay, if they take `longer` times."""
    return next(p for p in np.arange(0, 1.001, 0.001).tolist() if sum(p**k for k in range(drafts + 1)) > longer)


# ---- what the engine uses in place of exercises that are not solved


def accepted(drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """The tokens that a step gains: the drafts that equal the target's own tokens, up to the first that does not, and
    the target's token there. sampled: one more than drafts."""
    right = 0
    while right < len(drafts) and drafts[right] == sampled[right]:
        right += 1
    return list(sampled[: right + 1])


def lookup(tokens: Sequence[int], most: int) -> list[int]:
    """The engine's drafts for a text, without an index that is kept from step to step."""
    return NgramIndex().continuation(np.array(tokens), most)


def best_count(p: float, step_ms: Sequence[float]) -> int:
    """Return how many drafts give the most tokens a second, the fewest of equals.

    p: the chance of a draft to be right. step_ms: the time of a step with 0, 1, 2, ... drafts.
    """
    tokens = np.cumsum(p ** np.arange(len(step_ms)))
    return int((tokens / np.asarray(step_ms)).argmax())


def accept_or_resample(p: np.ndarray, q: np.ndarray, draft: int, u: float, v: float) -> int:
    """Rejection sampling at one position: `draft`, which was sampled from q, or another token, distributed as p.

    u, v: random numbers in [0, 1): the first decides, the second chooses the other token.
    """
    if u * q[draft] < p[draft]:
        return draft
    left = np.maximum(p - q, 0).cumsum()
    return int(np.searchsorted(left, v * left[-1], side="right"))


# ---- drafters


@dataclass
class Erring:
    """A drafter that knows the whole text, and errs at every position that `every` divides.

    text: prompt and answer. vocabulary: how many tokens there are.
    """

    text: Sequence[int]
    every: int = 5
    vocabulary: int = 4096

    def __call__(self, tokens: list[int], most: int) -> list[int]:
        begin = len(tokens)
        right = enumerate(self.text[begin : begin + most], begin)
        return [token if at % self.every else (token + 1) % self.vocabulary for at, token in right]


def nonsense(tokens: list[int], most: int) -> list[int]:
    """Drafts that are never right here: always the same rare token."""
    return [4000] * most


def drafting(drafter: Drafter) -> type:
    """A proposer class, for `using(proposer=...)`, that asks a function of (tokens so far, most) for its drafts."""

    class Drafting:
        def propose(self, asked: Sequence[Asked]) -> list[list[int]]:
            return [list(drafter(each.tokens.tolist(), each.most)) for each in asked]

        def forget(self, request_id: str) -> None:
            pass

    return Drafting


# ---- engines


@dataclass
class Run:
    """An engine's run of a prompt.

    answer: its tokens. sizes, gained: tokens that each step after the prompt's ran, and that the text gained by it.
    drafted, right: how many drafts there were, and how many of them were accepted. calls: of a proposer that was given.
    seconds: of CPU time, all of it.
    """

    answer: list[int]
    text: str
    sizes: list[int]
    gained: list[int]
    drafted: int
    right: int
    calls: int
    seconds: float

    @property
    def steps(self) -> int:
        """Steps, the prompt's included."""
        return 1 + len(self.sizes)

    @property
    def tokens_per_step(self) -> float:
        """Mean of the steps after the prompt's, which gains one token too."""
        return (len(self.answer) - 1) / len(self.sizes)

    @property
    def h200_ms(self) -> float:
        """Time of the steps after the prompt's if each took what the record says of as many tokens."""
        return float(step_ms(self.sizes).sum())


def run(
    prompt: str,
    proposer: type | None = None,
    *,
    tokens: int = 80,
    temperature: float = 0.0,
    seed: int = 1,
    every_draft: bool = True,
    **options: Any,
) -> Run:
    """Continue a prompt in an engine of its own, on a CPU in float64: without drafts, if no proposer is given.

    every_draft: run all drafts; False: those that the engine finds worth their time. options: as `LLM`.
    """
    params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed, ignore_eos=True)
    if proposer is not None:
        options = {"speculate": "ngram", **options}
    with LLM(trace=(trace := Trace()), **{**SMALL, **options}) as llm:
        replaced: dict[str, Any] = {} if proposer is None else {"proposer": proposer}
        with using(**replaced) as used:
            begin = time.process_time()
            if every_draft:
                with every_draft_runs():
                    done = llm.generate(prompt, params)[0]
            else:
                done = llm.generate(prompt, params)[0]
            seconds = time.process_time() - begin
        stats = llm.stats()
    decodes = [step for step in replay(trace) if step.kind == ["decode"]]
    starts = [step.start[0] for step in decodes] + [len(done.prompt_token_ids) + len(done.token_ids) - 1]
    sizes, gained = [step.count[0] for step in decodes], np.diff(starts).tolist()
    drafted, right = (stats.get(each, 0) for each in ("draft_tokens", "accepted_tokens"))
    calls = used.calls.get("proposer", 0)
    return Run(list(done.token_ids), done.text, sizes, gained, drafted, right, calls, seconds)
