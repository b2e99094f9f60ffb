"""Run conversations on replicas in simulated time: the engine's scheduler and the router, without a model.

A step takes as long as a recorded one took on a GPU, and yields the tokens that the conversation has. So many replicas
run on one core.
"""

import heapq
import itertools
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from minillm.kv_cache.block_pool import prefix_keys
from minillm.request import Request, RequestOptions, SamplingParams
from minillm.scheduler import Scheduler, Step

from .router import Policy, Routed, Router, by_prefix_and_load

VOCABULARY = 32_000
LONGEST = 4096  # tokens of prompt and answer


class Turn(NamedTuple):
    """A user's words and the answer, each [tokens] int32. pause: seconds since the answer before."""

    asked: np.ndarray
    answer: np.ndarray
    pause: float


@dataclass(frozen=True)
class Conversation:
    """Turns, each of which sends all that was said before, too. start: seconds; salt: the user's `cache_salt`."""

    start: float
    turns: list[Turn]
    salt: str = ""


def conversations(
    count: int, rate: float, *, seed: int = 0, prompts: int = 8, turns: float = 5.0, pause: float = 3.0, salts: int = 1
) -> Iterator[Conversation]:
    """Draw conversations that begin with one of a few system prompts, of which some are far more popular.

    rate: how many begin in a second. prompts: number of system prompts. turns: mean number in a conversation. pause:
    mean seconds between an answer and what the user says next. salts: number of users, whose prefixes are kept apart.
    """
    rng, ids = random.Random(f"{seed}/conversations"), np.random.default_rng(seed)

    def draw(median: float, sigma: float, low: int, high: int) -> np.ndarray:
        length = max(low, min(high, round(median * math.exp(rng.gauss(0, sigma)))))
        return ids.integers(VOCABULARY, size=length, dtype=np.int32)

    systems = [draw(300, 0.5, 64, 1024) for _ in range(prompts)]
    weights = [1 / (rank + 1) for rank in range(prompts)]
    start = 0.0
    for _ in range(count):
        start += rng.expovariate(rate)
        (system,) = rng.choices(systems, weights)
        made, tokens = list[Turn](), len(system)
        while not made or rng.random() < 1 - 1 / turns:
            turn = Turn(draw(50, 0.8, 4, 300), draw(120, 0.6, 8, 400), rng.expovariate(1 / pause))
            tokens += len(turn.asked) + len(turn.answer)
            if tokens > LONGEST:
                break
            made.append(turn)
        made[0] = made[0]._replace(asked=np.concatenate((system, made[0].asked)))
        yield Conversation(start, made, str(rng.randrange(salts)) if salts > 1 else "")


@dataclass(frozen=True)
class Speed:
    """Times of steps: (decoding rows, seconds) of some, and seconds for each token of a prompt.

    gpus: how many of them share the work equally, as one that has the speed of all.
    """

    decode: Sequence[tuple[int, float]]
    prompt_token: float
    gpus: int = 1

    def seconds(self, step: Step) -> float:
        rows, known = zip(*self.decode, strict=True)
        decodes, prompts = step.queries[: step.decodes].sum(), step.queries[step.decodes :].sum()
        return float(np.interp(decodes / self.gpus, rows, known) + prompts / self.gpus * self.prompt_token)


# Gemma 2B on an H200, from data/results/h200/roofline.json; a test compares them.
H200 = Speed(((1, 1.34e-3), (8, 1.82e-3), (64, 1.99e-3), (256, 2.78e-3), (512, 4.73e-3)), 5.9e-6)


@dataclass(frozen=True)
class Size:
    """The size of a replica: blocks of its cache, rows of its batch, most tokens in a step."""

    blocks: int
    rows: int = 64
    tokens: int = 2048
    block_size: int = 16
    speed: Speed = H200

    def times(self, count: int) -> "Size":
        """Return a single replica as large and as fast as so many: the best that routing could achieve."""
        blocks, rows, tokens = self.blocks * count, self.rows * count, self.tokens * count
        return replace(self, blocks=blocks, rows=rows, tokens=tokens, speed=replace(self.speed, gpus=count))


@dataclass
class Simulated:
    """The result of a run.

    first_tokens: seconds until each answer's first token. computed: tokens of each replica. held: requests of each
    replica, mean over time.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_tokens: list[float] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    held: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Return the share of prompt tokens that were cached."""
        return self.cached_tokens / self.prompt_tokens

    @property
    def imbalance(self) -> float:
        """Return the load of the replica that has most as a multiple of the mean: in tokens or requests, the worse."""
        return max(max(each) / statistics.mean(each) for each in (self.computed, self.held))


class _Talk:
    """A conversation that is going on. said: all tokens so far; prompt: how many of them the latest request sent."""

    def __init__(self, conversation: Conversation):
        self.options = RequestOptions(cache_salt=conversation.salt)
        self.turns = iter(conversation.turns)
        self.turn: Turn | None = next(self.turns)
        self.said = np.zeros(0, np.int32)
        self.prompt, self.asked_at = 0, 0.0
        self.routed: tuple[Router, Routed] | None = None


class _Machine:
    """An engine's scheduler, and the step that it runs."""

    def __init__(self, name: str, size: Size):
        self.name, self.size = name, size
        self.scheduler = Scheduler(
            max_num_seqs=size.rows,
            max_num_batched_tokens=size.tokens,
            max_model_len=LONGEST,
            block_size=size.block_size,
            num_blocks=size.blocks,
        )
        self.talks: dict[str, _Talk] = {}
        self.step: Step | None = None
        self.held, self._counted_at = 0.0, 0.0  # requests, summed over time

    def submit(self, talk: _Talk, name: str) -> None:
        assert talk.turn is not None
        params = SamplingParams(max_tokens=len(talk.turn.answer), temperature=0, ignore_eos=True)
        limit = talk.prompt + len(talk.turn.answer)
        self.scheduler.submit(Request(name, talk.said, params, limit, options=talk.options))
        self.talks[name] = talk

    def launch(self) -> float | None:
        """Launch a step. Returns its seconds, or None if there is nothing to run."""
        self.step = self.scheduler.schedule() if self.scheduler.has_work else None
        return None if self.step is None else self.size.speed.seconds(self.step)

    def complete(self) -> tuple[list[_Talk], list[_Talk]]:
        """End the step. Returns the conversations that got a first token, and those whose answers are complete."""
        assert self.step is not None
        tokens, begun = [], []
        for row in self.step.sampling_rows:
            request = self.scheduler.requests[row]
            assert request is not None
            talk, position = self.talks[request.request_id], int(self.scheduler.confirmed[row])
            assert talk.turn is not None
            tokens.append(talk.turn.answer[position - talk.prompt])
            if position == talk.prompt:
                begun.append(talk)
        ended = self.scheduler.complete(self.step, np.array(tokens, np.int64))
        return begun, [self.talks.pop(request.request_id) for request in ended]

    def count(self, now: float) -> None:
        """Add the requests since the last call to `held`."""
        self.held += len(self.talks) * (now - self._counted_at)
        self._counted_at = now


def run(
    talks: Sequence[Conversation],
    replicas: int,
    size: Size,
    policy: Policy = by_prefix_and_load,
    *,
    workers: int = 1,
    told: bool = True,
) -> Simulated:
    """Run all conversations to their ends.

    workers: how many HTTP workers take turns with the requests; each has a router. told: whether they tell each other
    where requests went.
    """
    routers = [Router(size.block_size, policy) for _ in range(workers)]
    machines = {str(index): _Machine(str(index), size) for index in range(replicas)}
    for router, name in itertools.product(routers, machines):
        router.join(name, size.blocks)
    outcome, turn, numbers = Simulated(), itertools.cycle(routers), itertools.count()
    events: list[tuple[float, int, _Talk | _Machine]] = []  # (when, tie-breaker, who asks or whose step ends)

    def later(when: float, what: _Talk | _Machine) -> None:
        heapq.heappush(events, (when, next(numbers), what))

    def launch(machine: _Machine) -> None:
        if (seconds := machine.launch()) is not None:
            later(now + seconds, machine)

    def share(router: Router, name: str, keys: list[bytes]) -> None:
        for other in routers if told else ():
            if other is not router:
                other.learn(name, keys)

    for conversation in talks:
        later(conversation.start, _Talk(conversation))
    while events:
        now, number, what = heapq.heappop(events)
        if isinstance(what, _Talk):
            assert what.turn is not None
            what.said = np.concatenate((what.said, what.turn.asked))
            what.prompt, what.asked_at = len(what.said), now
            router, keys = next(turn), prefix_keys(what.said, size.block_size, what.options.cache_key())
            running = {name: len(machine.talks) for name, machine in machines.items()}
            machine = machines[router.order(what.prompt, keys, machines, running)[0]]
            what.routed = router, router.begin(machine.name, what.prompt, keys)
            share(router, machine.name, keys)
            machine.count(now)
            machine.submit(what, str(number))
            outcome.prompt_tokens += what.prompt
            if machine.step is None:
                launch(machine)
            continue
        what.count(now)
        begun, ended = what.complete()
        outcome.first_tokens += [now - talk.asked_at for talk in begun]
        for talk in ended:
            assert talk.turn is not None and talk.routed is not None
            talk.said = np.concatenate((talk.said, talk.turn.answer))
            keys = prefix_keys(talk.said, size.block_size, talk.options.cache_key())
            router, routed = talk.routed
            router.end(routed, len(talk.turn.answer), keys)
            share(router, routed.replica, keys)
            talk.turn = next(talk.turns, None)
            if talk.turn is not None:
                later(now + talk.turn.pause, talk)
        launch(what)
    for machine in machines.values():
        outcome.computed.append(machine.scheduler.tokens_run)
        outcome.cached_tokens += machine.scheduler.prefix_hits
        outcome.held.append(machine.held / now)
    return outcome
