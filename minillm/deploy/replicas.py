"""The replicas of a model, as an HTTP worker sees them: an engine that outlives each of them.

Each request has a task, which chooses a replica and submits the request there at once. The place that Ray Serve counts
for it is reserved meanwhile (see `places`). If the replica is lost before the request has ended, the task chooses
another one. There the request goes on with the tokens that it has, as the end of its prompt: the numbers that sampling
draws depend on seed and position alone, so the text is what it would have been, and no token is sent twice.
"""

import asyncio
import base64
import logging
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from minillm.errors import InvalidRequest
from minillm.kv_cache.block_pool import prefix_keys
from minillm.prompts import EmbeddedPrompt
from minillm.request import RequestOptions, SamplingParams, prefix_identity
from minillm.server.ledger import Families, summed
from minillm.server.limits import HEALTH
from minillm.server.wire import (
    NUMBER,
    Abort,
    Adapters,
    Alive,
    Event,
    FromWorker,
    Gauges,
    Hello,
    Message,
    PromptForm,
    Question,
    Refused,
    Reply,
    Stopped,
    Submit,
)
from minillm.server.worker.choice import ONLY_TOKENS, Choice
from minillm.server.worker.link import EngineClient, EngineError, EngineGone, RemoteEngine, changed_fields
from minillm.server.worker.tasks import Tasks
from minillm.tokenizer import Tokenizer
from minillm.values import shown

from . import handshake
from .handshake import Address, Stranger
from .places import HeldPlaces, Reserve
from .router import Policy, Routed, Router, by_prefix_and_load

log = logging.getLogger(__name__)
AVOID = 10.0  # seconds for which a replica is the last choice if it did not answer Ray
WAIT = 120.0  # seconds that a request waits for a replica, if there is none
MOVES = 2  # so often a request goes on elsewhere: one that ends every replica must not end them all
AGAIN = 0.5  # seconds until a request that was moved to a busy replica is submitted again
RETRY, SLOWEST = 0.05, 2.0  # seconds between attempts to connect, or to choose; doubled each time, up to the second
PATIENCE = 8  # failed attempts to connect until that is said
RETRY_AFTER = 5  # seconds, for clients, while no replica runs
RUN_OR_WAIT = ("vllm:num_requests_running", "vllm:num_requests_waiting")

Answer = TypeVar("Answer")
Listed = Callable[[dict[str, Address]], object]  # is told the addresses of all replicas
LISTENERS: dict[tuple[str, str], Listed] = {}  # by Ray's application and deployment


@dataclass(eq=False)
class _Request:
    """A request that runs on a replica, or waits for one.

    seeds: of each choice, None for greedy ones. prompt: tokens of its prompts. ids: those of the first one, if prefixes
    are shared. keys: those of its blocks, by what else identifies a prefix on a replica (`_Replica.identity`).
    """

    submit: Submit
    params: SamplingParams
    options: RequestOptions
    choices: dict[int, Choice]
    queue: asyncio.Queue
    seeds: dict[int, int | None]
    prompt: int
    ids: np.ndarray
    keys: dict[tuple, list[bytes]] = field(default_factory=dict)
    replica: "_Replica | None" = None
    moves: int = 0
    over: bool = False
    turn: asyncio.Event = field(default_factory=asyncio.Event)  # it is over, or its replica is lost
    task: asyncio.Task | None = None

    @property
    def answer(self) -> list[int]:
        """Return the tokens of the first choice."""
        return self.choices[self.submit.key].completion.token_ids


class _Replica(RemoteEngine):
    """The connection to a replica. What it reports of choices goes to the engine of all replicas."""

    def __init__(self, engine: "ReplicatedEngine", name: str):
        super().__init__(self._end_here)
        self.engine, self.name = engine, name
        self.requests: set[_Request] = set()
        self.ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()  # whether it had said hello

    def has(self, adapter: str | None) -> bool:
        """Return whether requests may name this adapter here, or none."""
        return adapter is None or adapter in self.facts.adapters

    def identity(self, options: RequestOptions) -> tuple[str | int, ...]:
        """Return what identifies a request's prefix here besides its content: its engine's own tuple.

        Workers do not know a soft prompt's embeddings, so its name stands for them: it means the same as long as the
        replica runs.
        """
        load = self.facts.adapters.get(options.adapter or "", 0)
        found = prefix_identity(options, load, self.facts.cache_dtype)
        return found if load or options.adapter is None else (*found, options.adapter)

    def receive(self, message: Message) -> None:
        if isinstance(message, (Hello, Reply)):
            super().receive(message)
        else:
            self.engine.receive(message)

    def send(self, message: FromWorker) -> None:
        """Send a message. Raises EngineGone."""
        self._send(message)

    def close(self) -> None:
        """Close the connection."""
        self._lose()
        self._end_here()

    def _meet(self, hello: Hello) -> None:
        self.facts = hello.facts
        self.engine.met(self, hello)

    def _end_here(self) -> None:
        if not self.ended.done():
            self.ended.set_result(hasattr(self, "facts"))
        self.engine.lost(self)


class ReplicatedEngine(EngineClient):
    """A `ServedEngine` over replicas, which come and go. `connected` is done once one of them is connected.

    reserve: see `places`. policy: see `router`. moved: called with the number of choices that go on elsewhere. tell:
    called with what the other workers should `learn`.
    """

    def __init__(
        self,
        reserve: Reserve,
        policy: Policy = by_prefix_and_load,
        moved: Callable[[int], object] = lambda choices: None,
        tell: Callable[[dict[str, Any]], object] = lambda what: None,
    ):
        super().__init__()
        self.connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._moved, self._tell = moved, tell
        self._me = handshake.new_worker()
        self._places = HeldPlaces(reserve, self._me, self._avoid)
        self._router = Router(1, policy)  # the size of a block is known once a replica is connected
        self._listed: dict[str, Address] = {}
        self._replicas: dict[str, _Replica] = {}  # those that are connected
        self._keeping: dict[str, asyncio.Task] = {}  # what keeps the connection to each replica
        self._requests: dict[int, _Request] = {}  # by the keys of their choices
        self._tasks = Tasks()  # of requests and of connections
        self._others: dict[tuple[int, str], int] = {}  # another worker, a replica -> requests that it has there
        self._avoided: dict[str, float] = {}  # until when, by the loop's clock
        self._broken: set[str] = set()  # replicas whose engine can run no more, while they are listed
        self._changed = asyncio.Event()  # set, and replaced, when there are other replicas to choose from

    # ---- the replicas

    @property
    def alive(self) -> bool:
        return bool(self._replicas)

    def listed(self, addresses: Mapping[str, Address]) -> None:
        """Take note of all replicas that accept requests now, and connect to the new ones."""
        self._listed = dict(addresses)
        self._others = {pair: count for pair, count in self._others.items() if pair[1] in addresses}
        self._broken &= addresses.keys()
        for name in addresses:
            self._keep(name)
        self._wake()

    def _wake(self) -> None:
        """Have requests that wait for a replica choose again, now that there are others."""
        self._places.listed(self._listed.keys() & self._replicas.keys())
        self._changed.set()
        self._changed = asyncio.Event()

    def _avoid(self, name: str) -> None:
        self._avoided[name] = asyncio.get_running_loop().time() + AVOID

    async def _keep_connected(self, name: str) -> None:
        """Keep a connection to a replica as long as it is listed, and then until it closes the connection."""
        failures, delay = 0, RETRY
        while self._wanted(name):
            address, replica = self._listed[name], _Replica(self, name)
            try:
                sock = await asyncio.to_thread(handshake.connect, address, name, self._me)
                sock.setblocking(False)
                await replica.connect(sock)
                greeted, why = await replica.ended, "it has closed the connection"
            except (OSError, Stranger) as error:
                greeted, why = False, str(error)
            finally:
                replica.close()
            failures = 0 if greeted else failures + 1
            if failures == PATIENCE:  # a replica that has just ended is listed for a moment, too
                log.warning("replica %s cannot be reached at %s:%d: %s", name, address.host, address.port, why)
            delay = RETRY if greeted else min(2 * delay, SLOWEST)
            await asyncio.sleep(delay)

    def _wanted(self, name: str) -> bool:
        return name in self._listed and name not in self._broken

    def _keep(self, name: str) -> None:
        if self._wanted(name) and name not in self._keeping:
            self._keeping[name] = self._tasks.start(self._keep_connected(name))
            self._keeping[name].add_done_callback(partial(self._kept, name))

    def _kept(self, name: str, task: asyncio.Task) -> None:
        del self._keeping[name]
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            log.error("the connection to replica %s is given up", name, exc_info=error)
        else:
            self._keep(name)  # it may have been listed again just now

    def met(self, replica: _Replica, hello: Hello) -> None:
        """Use a replica that has said hello."""
        facts = hello.facts  # in an update, the newest replica's
        some = facts.takes_adapters or any(each.facts.takes_adapters for each in self._replicas.values())
        self.facts = replace(facts, takes_adapters=some)
        self._router.block_size = max(facts.block_size, 1)
        if not self.connected.done():
            try:
                self.tokenizer = Tokenizer.from_pretrained(Path(hello.tokenizer)) if hello.tokenizer else None
            except Exception as error:
                self.connected.set_exception(error)
                return
            self.connected.set_result(None)
        self._router.join(replica.name, facts.prefix_blocks)
        self._replicas[replica.name] = replica
        self._wake()

    def lost(self, replica: _Replica) -> None:
        """Forget a replica whose connection has ended. Its requests go on elsewhere."""
        if self._replicas.get(replica.name) is not replica:
            return
        del self._replicas[replica.name]
        self._router.leave(replica.name)
        self._avoided.pop(replica.name, None)
        if replica.requests:
            log.warning("replica %s is lost; %d requests go on elsewhere", replica.name, len(replica.requests))
        for request in replica.requests:
            request.turn.set()
        self._wake()

    def close(self) -> None:
        """Disconnect from all replicas, for good."""
        self._listed = {}
        self._places.listed(())
        for task in self._keeping.values():
            task.cancel()
        for replica in list(self._replicas.values()):
            replica.close()

    def learn(self, what: Mapping[str, Any]) -> None:
        """Take note of what another worker told: the prefix of a request, and how many it has on that replica now."""
        keys, replica = base64.b64decode(what["keys"]), what["replica"]
        self._others[what["worker"], replica] = what["requests"]
        self._router.learn(replica, [keys[at : at + 16] for at in range(0, len(keys), 16)])

    def forget(self, worker: int) -> None:
        """Take note that another worker has ended, with its requests."""
        self._others = {pair: count for pair, count in self._others.items() if pair[0] != worker}

    # ---- requests

    def _begin(self, submit: Submit, params: SamplingParams) -> None:
        if not self._replicas:
            raise self._none()
        keys = range(submit.key, submit.key + len(submit.prompts) * submit.n)
        choices = {key: self._choices[key][0] for key in keys}
        options, first = RequestOptions(**submit.options), submit.prompts[0].length or 0
        if not any(each.has(options.adapter) for each in self._replicas.values()):
            raise InvalidRequest(f"adapter {shown(options.adapter)} is not loaded in any replica")
        sharing = self.facts.prefix_blocks and options.use_prefix_cache
        ids = np.asarray(submit.numbers[:first]) if sharing else np.zeros(0, np.int32)
        request = _Request(
            submit,
            params,
            options,
            choices,
            self._choices[submit.key][1],
            _seeds(params, submit),
            len(submit.numbers),
            ids,
        )
        self._requests |= dict.fromkeys(keys, request)
        request.task = self._tasks.start(self._run(request))

    def _end(self, keys: Iterable[int]) -> None:
        keys = list(keys)
        super()._end(keys)
        request = self._requests.get(keys[0])
        for key in keys:
            self._requests.pop(key, None)
        if request is not None and request.task is not None:
            request.over = True
            request.turn.set()
            if request.replica is None:
                request.task.cancel()

    def _send(self, message: FromWorker) -> None:
        """Send a message about choices to the replica that runs them, if one does."""
        assert isinstance(message, (Abort, Stopped))
        request = self._requests.get(message.keys[0] if isinstance(message, Abort) else message.key)
        if request is not None and request.replica is not None and request.replica.alive:
            request.replica.send(message)

    async def _run(self, request: _Request) -> None:
        """Run a request on one replica after another, until it is over."""
        try:
            async with asyncio.timeout(WAIT) as waiting:
                delay = RETRY
                while not request.over:
                    replica = self._choose(request)
                    if replica is None:
                        with suppress(TimeoutError):
                            await asyncio.wait_for(self._changed.wait(), delay)
                        delay = min(2 * delay, SLOWEST)
                        continue
                    waiting.reschedule(None)
                    await self._run_on(replica, request)
                    if not request.over:
                        self._move(request)
                        waiting.reschedule(asyncio.get_running_loop().time() + WAIT)
        except TimeoutError:
            self._fail(request, self._none())
        except Exception as error:
            self._fail(request, error)

    def _choose(self, request: _Request) -> "_Replica | None":
        """Return the best replica for a request. Returns None if there is none, or the policy wants none now."""
        there = {name: self._replicas[name] for name in self._listed if name in self._replicas}
        fitting = {name: each for name, each in there.items() if each.has(request.options.adapter)}
        running = {name: len(each.requests) for name, each in fitting.items()}
        for (_, name), count in self._others.items():
            if name in running:
                running[name] += count
        keys = {name: self._keys_on(each, request) for name, each in fitting.items()}
        ordered = self._router.order(request.prompt, keys, list(running), running)
        now = asyncio.get_running_loop().time()
        return self._replicas[min(ordered, key=lambda name: self._avoided.get(name, 0) > now)] if ordered else None

    async def _run_on(self, replica: _Replica, request: _Request) -> None:
        """Run a request on a replica until it is over or the replica is lost."""
        keys = self._keys_on(replica, request)
        routed = self._router.begin(replica.name, request.prompt, keys)
        request.replica, request.turn = replica, asyncio.Event()
        replica.requests.add(request)
        self._places.take(replica.name)
        try:
            for submit in self._submissions(request):
                replica.send(submit)
            self._tell_of(replica, keys)
            await request.turn.wait()
        except EngineGone:  # it is lost just now
            pass
        finally:
            replica.requests.discard(request)
            request.replica = None
            self._places.give(replica.name)
            self._leave(replica, routed, request)

    def _leave(self, replica: _Replica, routed: Routed, request: _Request) -> None:
        """Tell the routers what the request leaves in the replica's cache."""
        keys = self._keys_on(replica, request)
        if keys:
            done = request.choices[request.submit.key].completion
            ids = np.array(done.prompt_token_ids + done.token_ids, np.int32)
            keys = self._prefix_keys(request.submit, ids, replica.identity(request.options), keys)
        self._tell_of(replica, keys)
        self._router.end(routed, len(request.answer), keys)

    def _keys_on(self, replica: _Replica, request: _Request) -> list[bytes]:
        """Return the keys of the blocks of a request's first prompt, as a replica's cache has them."""
        identity = replica.identity(request.options)
        if identity not in request.keys:
            request.keys[identity] = self._prefix_keys(request.submit, request.ids, identity)
        return request.keys[identity]

    def _prefix_keys(
        self, submit: Submit, ids: np.ndarray, identity: tuple[str | int, ...], known: Sequence[bytes] = ()
    ) -> list[bytes]:
        """Return the keys of the blocks of a submission's first prompt, and of what follows it in `ids`."""
        read = submit.prompts[0].embedded(ids, self.facts.hidden_size, self.facts.dtype)
        embeddings = read.embeddings if isinstance(read, EmbeddedPrompt) and len(ids) else None
        return prefix_keys(ids, self._router.block_size, identity, known, embeddings)

    def _tell_of(self, replica: _Replica, keys: Sequence[bytes]) -> None:
        told = base64.b64encode(b"".join(keys)).decode()
        self._tell({"replica": replica.name, "keys": told, "requests": len(replica.requests)})

    def _move(self, request: _Request) -> None:
        """Prepare a request to go on elsewhere. Raises EngineGone if it cannot."""
        request.moves += 1
        left = [key for key in request.choices if key in self._choices]
        if request.moves > MOVES:
            raise EngineGone(f"{request.moves} replicas have ended while they ran this request: it is not tried again")
        if (why := _bound(request.params)) and any(request.choices[key].completion.token_ids for key in left):
            raise EngineGone(f"the replica that ran this request has ended, and {why}: send it again")
        self._moved(len(left))

    def _fail(self, request: _Request, error: Exception) -> None:
        """End a request with an error."""
        for key in request.choices:
            self._choices.pop(key, None)
        if not request.over:
            request.queue.put_nowait(error)

    def _none(self) -> EngineGone:
        return EngineGone(f"no replica of this model runs: try again in {RETRY_AFTER} s", RETRY_AFTER)

    # ---- what is submitted

    def _submissions(self, request: _Request) -> Iterator[Submit]:
        """Yield what a replica has to run of a request."""
        if request.moves:
            for key in request.choices:
                if key in self._choices:
                    yield self._rest(request, key)
            return
        submit = request.submit
        if request.params.seed is not None or request.seeds[submit.key] is None:
            yield submit
            return
        key, numbers = submit.key, submit.numbers  # each prompt has seeds of its own
        for form in submit.prompts:
            length = form.length or 0
            params = submit.params | {"seed": request.seeds[key]}
            yield replace(submit, key=key, prompts=[form], params=params, numbers=numbers[:length])
            key, numbers = key + submit.n, numbers[length:]

    def _rest(self, request: _Request, key: int) -> Submit:
        """Return what is left to run of a choice: its tokens so far become a part of the prompt."""
        params, submit = request.params, request.submit
        done = request.choices[key].completion
        sent = len(done.token_ids)
        params = replace(
            params,
            max_tokens=None if params.max_tokens is None else params.max_tokens - sent,
            min_tokens=max(params.min_tokens - sent, 0),
            seed=request.seeds[key],
            prompt_logprobs=None if sent else params.prompt_logprobs,
        )
        changed = changed_fields(params)
        if self.tokenizer is not None:  # stop strings are found here
            changed.pop("stop", None)
        form = submit.prompts[(key - submit.key) // submit.n]
        form = PromptForm(len(done.prompt_token_ids) + sent, values=form.values)
        numbers = array(NUMBER, done.prompt_token_ids + done.token_ids)
        return replace(submit, key=key, prompts=[form], params=changed, n=1, numbers=numbers)

    # ---- messages from replicas

    def _gained(self, key: int, ids: list[int], event: Event = ONLY_TOKENS) -> None:
        if event.failure is not None and event.failure.kind == "lost":
            self._break(key, event.failure.message)
            return
        if event is not ONLY_TOKENS and key in self._choices and self._choices[key][0].completion.token_ids:
            event = event._replace(cached=0, prompt_logprobs=None)  # the first replica has reported them
        super()._gained(key, ids, event)

    def _break(self, key: int, why: str) -> None:
        """Use no more the replica that runs a choice: its engine has failed for good, and its process is about to end.

        All its requests go on elsewhere.
        """
        request = self._requests.get(key)
        if request is not None and request.replica is not None and request.replica.alive:
            log.warning("replica %s has failed: %s", request.replica.name, why)
            self._broken.add(request.replica.name)
            request.replica.close()

    def _refuse(self, refused: Refused) -> None:
        request = self._requests.get(refused.key)
        if request is not None and request.moves and refused.failure.kind == "busy":
            asyncio.get_running_loop().call_later(AGAIN, partial(self._again, request, refused.key))
        else:
            super()._refuse(refused)

    def _again(self, request: _Request, key: int) -> None:
        """Submit a choice again, which was moved to a replica that had too many."""
        if key in self._choices and request.replica is not None and request.replica.alive:
            request.replica.send(self._rest(request, key))

    # ---- questions

    async def ask(self, question: Question[Answer]) -> Answer:
        replicas = list(self._replicas.values())
        if not replicas:
            raise self._none()
        if isinstance(question, Adapters):
            names: Any = list(dict.fromkeys(name for each in replicas for name in each.facts.adapters))
            return names
        if not isinstance(question, (Alive, Gauges)):
            for each in replicas:
                with suppress(EngineGone):
                    return await each.ask(question)
            raise self._none()
        answers = await asyncio.gather(*(_ask(each, question) for each in replicas))
        by_name = {replica.name: answer for replica, answer in zip(replicas, answers, strict=True) if answer}
        answer: Any = bool(by_name) if isinstance(question, Alive) else self._gauges(by_name)
        return answer

    def _gauges(self, by_name: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Return the gauges of all replicas. by_name: those of each."""
        alive, model = [name for name, each in by_name.items() if each["alive"]], {"model_name": self.facts.name}
        up, held = "minillm_replicas_up", "minillm_replica_requests"
        requests = [[held, model | {"replica": name}, _requests(each["families"])] for name, each in by_name.items()]
        families = [
            [up, "gauge", "Replicas that accept requests", [[up, model, sum(name in self._listed for name in alive)]]],
            [held, "gauge", "Requests that run or wait on a replica", requests],
            *joined(*(each["families"] for each in by_name.values())),
        ]
        return {"alive": bool(alive), "families": families}


async def _ask(replica: _Replica, question: Question[Any]) -> Any:
    """Return a replica's answer, or None if it gives none in time."""
    try:
        async with asyncio.timeout(HEALTH / 2):
            return await replica.ask(question)
    except (EngineError, TimeoutError):
        return None


def _requests(families: Families) -> float:
    """Return how many requests run or wait, by a replica's gauges."""
    return sum(sample[2] for name, _, _, samples in families for sample in samples if name in RUN_OR_WAIT)


def joined(*each: Families) -> Families:
    """Return the gauges of all replicas: shares are averaged, facts stay as they are, all others are added."""
    families = summed(*each)
    for name, _, _, samples in families:
        for sample in samples if name.endswith(("_perc", "_info")) else ():
            sample[2] = sample[2] / len(each) if name.endswith("_perc") else 1
    return families


def _seeds(params: SamplingParams, submit: Submit) -> dict[int, int | None]:
    """Return the seed of each choice, by its key: drawn here if the request has none, since replicas draw others."""
    seeds: dict[int, int | None] = {}
    for index in range(len(submit.prompts)):
        base = params.seed if params.seed is not None else random.getrandbits(62)
        for i in range(submit.n):
            seeds[submit.key + index * submit.n + i] = base + i if params.temperature else params.seed
    return seeds


def _bound(params: SamplingParams) -> str | None:
    """Return why a request with these parameters cannot go on in the middle of its answer, or None if it can."""
    if params.presence_penalty or params.frequency_penalty:
        return "presence and frequency penalties depend on what is prompt and what is answer"
    if params.grammar is not None:
        return "a grammar begins with its answer"
    return None
