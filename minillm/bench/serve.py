"""`minillm bench serve`: clients stream completions from a server on this machine.  Lesson 99.

It measures what a user feels: time to first token (TTFT), the gaps between tokens (inter-token latency, ITL),
the whole answer (end to end), and what the operator counts: requests and tokens per second. Requests arrive in a
closed loop, as a Poisson process, or as in a trace. Traffic goes only to this machine's own addresses.
"""

import asyncio
import ipaddress
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from minillm.errors import ConfigError, MinillmError, Unreachable

from . import records, workloads
from .workloads import BenchRequest

if TYPE_CHECKING:
    import aiohttp

PERCENTILES = (50, 90, 99)
CONCURRENCY = 8
GENERATOR_BUSY = 0.7  # above this share of a run the load generator's own work distorts the measurement


class LoadError(MinillmError, RuntimeError):
    """A run in which requests failed, or that exceeded its timeout."""


@dataclass
class Measured:
    """One request as its client saw it; times are in seconds since the run began.

    due: when it should have been sent. Latencies count from there: a user also waits while the request is not yet
    sent.
    """

    due: float
    sent: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens that came with it)
    end: float = 0.0
    refused: bool = False
    error: str | None = None

    @property
    def output_tokens(self) -> int:
        return sum(tokens for _, tokens in self.arrivals)

    @property
    def ttft(self) -> float:
        return self.arrivals[0][0] - self.due

    @property
    def e2e(self) -> float:
        return self.end - self.due

    @property
    def gaps(self) -> Iterable[float]:
        """Seconds before each token except the first; tokens that arrived together have gaps of 0."""
        last, together = self.arrivals[0]
        yield from [0.0] * (together - 1)
        for when, tokens in self.arrivals[1:]:
            yield when - last
            yield from [0.0] * (tokens - 1)
            last = when


def run(
    url: str = "http://127.0.0.1:8000",
    *,
    concurrency: int | None = None,
    rate: float | None = None,
    trace: str | Path | None = None,
    speed: float | None = None,
    due: Sequence[float] | None = None,
    workload: str = "chat",
    scale: int = 8,
    requests: int | None = 64,
    seed: int = workloads.SEED,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    timeout: float = 600.0,
    json_path: str | Path | None = None,
    plot_path: str | Path | None = None,
    quiet: bool = False,
) -> dict:
    """Load a running server and return the record. Prints a table, then one JSON line.

    url: the server, without /v1; only an address of this machine. Requests arrive in one of these ways:

    concurrency  closed loop: this many clients, each sending its next request when its last is answered (8)
    rate         open loop: a Poisson process of this many requests per second, each sent when it is due
    trace        open loop: arrivals, lengths and shared prefixes of a trace ("conversation", or a file), `speed`
                 times as fast (1); `workload` is not used
    due          open loop: a request at each of these seconds after the run began

    scale divides lengths, requests takes the first so many. seed: of prompts and Poisson arrivals; a run with
    another seed meets none of its prompts in the server's prefix cache. vocab_size: ids to draw prompts from
    (default: the one that /v1/models reports). timeout: seconds for the whole run. plot_path: save a plot of the
    record. Works inside a notebook too.

    Requests answered 429 (queue full) are counted as refused; all other figures are those of answered ones. generator_s
    is the load generator's own processor time: if it is close to the run's time, the generator was the bottleneck.
    Raises ConfigError for wrong settings, another machine's address or, before the load, a file that cannot be written;
    Unreachable if no server answers; LoadError if a request failed or the timeout passed.
    """
    arrival = _arrival(concurrency, rate, trace, due, speed)
    if not timeout > 0:
        raise ConfigError(f"timeout must be above 0 seconds, not {timeout!r}")
    base, begun = _local(url), records.begin(json_path)
    if plot_path is not None:
        from . import plots

        plots.check_format(plot_path)
        records.check_writable(plot_path)

    def work(vocabulary: int) -> list[BenchRequest]:
        if trace is not None:
            pace = arrival["speed"]
            return workloads.replay(trace, vocabulary, scale=scale, requests=requests, speed=pace, seed=seed)
        count = requests if due is None else len(due)
        made = workloads.make(workload, vocabulary, scale=scale, requests=count, seed=seed)
        if due is not None:
            return [replace(request, due=when) for request, when in zip(made, due, strict=True)]
        return made if rate is None else workloads.poisson(made, rate, seed=seed)

    async def load() -> dict:
        try:
            async with asyncio.timeout(timeout):
                return await _load(base, work, arrival.get("concurrency"), temperature, vocab_size)
        except TimeoutError:
            message = f"the run was not over after {timeout:g} s: send fewer requests, or raise timeout"
            raise LoadError(message) from None

    with ThreadPoolExecutor(1) as thread:  # in a notebook, this thread already runs an event loop
        result = thread.submit(asyncio.run, load()).result()
    name = f"trace_{Path(trace).stem}" if trace is not None else workloads.find(workload).name
    facts = {"engine": "minillm serve", "workload": name, "scale": scale, "seed": seed, "temperature": temperature}
    content = records.record([facts | arrival | result], begun)
    if not quiet:
        print(table(content["results"][0]), flush=True)
        print(json.dumps(content | {"results": [{k: v for k, v in content["results"][0].items() if k != "each"}]}))
    if json_path is not None:
        records.write(content, json_path)
    if plot_path is not None:
        plots.save(content, plot_path)
    return content


def _arrival(
    concurrency: int | None,
    rate: float | None,
    trace: str | Path | None,
    due: Sequence[float] | None,
    speed: float | None,
) -> dict[str, Any]:
    """How requests arrive, as fields of the record. Raises ConfigError."""
    ways = {"concurrency": concurrency, "rate": rate, "trace": trace, "due": due}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"requests arrive in one way: choose one of {', '.join(given)}")
    if speed is not None and trace is None:
        raise ConfigError(f"speed {speed!r} plays a trace faster, and there is none: name one, or leave speed out")
    if rate is not None:
        if not (math.isfinite(rate) and rate > 0):
            raise ConfigError(f"rate must be a number of requests a second above 0, not {rate!r}")
        return {"arrival": "poisson", "rate": rate}
    if trace is not None:
        return {"arrival": "trace", "speed": workloads.check_speed(1.0 if speed is None else speed)}
    if due is not None:
        if not len(due):
            raise ConfigError("due is empty: give one time for each request")
        if not all(math.isfinite(when) and when >= 0 for when in due):
            raise ConfigError("due has a time that is not a number of seconds from 0")
        return {"arrival": "given"}
    concurrency = CONCURRENCY if concurrency is None else concurrency
    if not isinstance(concurrency, int) or concurrency < 1:
        raise ConfigError(f"concurrency must be a whole number from 1, not {concurrency!r}")
    return {"arrival": "closed loop", "concurrency": concurrency}


async def _load(
    base: str,
    make_work: Callable[[int], list[BenchRequest]],
    concurrency: int | None,
    temperature: float,
    vocab_size: int | None,
) -> dict[str, Any]:
    import aiohttp

    # An open loop is open only if no request waits for another's connection.
    connector = aiohttp.TCPConnector(limit=concurrency or 0)
    async with aiohttp.ClientSession(base, connector=connector, timeout=aiohttp.ClientTimeout(None)) as http:
        try:
            async with http.get("/v1/models", timeout=aiohttp.ClientTimeout(10), raise_for_status=True) as answer:
                card = (await answer.json(content_type=None))["data"][0]
        except (aiohttp.ClientConnectionError, TimeoutError) as error:
            raise Unreachable(f"no server answers at {base} ({error}): start one with `minillm serve`") from None
        work = make_work(vocab_size or card["vocab_size"])
        client = Client(http, card["id"], temperature)
        # The first request warms up connections and imports. Its prompt is unique, so it caches no other's prefix.
        await client.ask(BenchRequest(work[0].prompt[::-1], work[0].output_tokens), client.now())
        client.restart()
        cpu = time.thread_time()
        if concurrency is None:
            measured = await open_loop(client, work)
        else:
            measured = await closed_loop(client, work, concurrency)
        cpu = time.thread_time() - cpu
    failed = [each.error for each in measured if each.error]
    if failed:
        raise LoadError(f"{len(failed)} of {len(measured)} requests failed, the first with: {failed[0]}")
    return {"model": card["id"], "dtype": card.get("dtype")} | summary(work, measured) | {"generator_s": round(cpu, 4)}


class Client:
    """Sends requests and records when their tokens arrive, on a clock that starts with the run."""

    def __init__(self, http: "aiohttp.ClientSession", model: str, temperature: float) -> None:
        self.http, self.model, self.temperature = http, model, temperature
        self.restart()

    def restart(self) -> None:
        self.start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.start

    async def ask(self, request: BenchRequest, due: float) -> Measured:
        """Stream one completion. Its errors are recorded, not raised."""
        import aiohttp

        seen = Measured(due, sent=self.now())
        try:
            await self._stream(request, seen)
        except aiohttp.ClientError as error:
            seen.error = f"{type(error).__name__}: {error}"
        seen.end = self.now()
        if not (seen.error or seen.refused) and seen.output_tokens != request.output_tokens:
            seen.error = f"{seen.output_tokens} tokens came where the request has {request.output_tokens}"
        return seen

    async def _stream(self, request: BenchRequest, seen: Measured) -> None:
        body = {
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.output_tokens,
            "temperature": self.temperature,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        async with self.http.post("/v1/completions", json=body) as response:
            if response.status == 429:
                seen.refused = True
                return
            if response.status != 200:
                seen.error = await response.text()
                return
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                now = self.now()
                chunk = json.loads(line.removeprefix(b"data: "))
                if "error" in chunk:
                    seen.error = chunk["error"]["message"]
                    return
                tokens = sum(len(choice["token_ids"]) for choice in chunk["choices"])
                if tokens:
                    seen.arrivals.append((now, tokens))


async def closed_loop(client: Client, work: Sequence[BenchRequest], concurrency: int) -> list[Measured]:
    """`concurrency` clients take the requests in order; each sends its next one when its last is answered."""
    queue = iter(enumerate(work))
    measured: dict[int, Measured] = {}

    async def one_client() -> None:
        for index, request in queue:
            measured[index] = await client.ask(request, client.now())

    await asyncio.gather(*(one_client() for _ in range(min(concurrency, len(work)))))
    return [measured[index] for index in range(len(work))]


async def open_loop(client: Client, work: Sequence[BenchRequest]) -> list[Measured]:
    """Send every request when it is due, regardless of what still runs: a slow server gets a growing queue."""

    async def one_request(request: BenchRequest) -> Measured:
        await asyncio.sleep(max(0.0, request.due - client.now()))
        return await client.ask(request, request.due)

    return await asyncio.gather(*map(one_request, work))


def summary(work: Sequence[BenchRequest], measured: Sequence[Measured]) -> dict:
    """Rates, and percentiles of what the clients of answered requests saw; `each` has the requests one by one.

    late_s: how late requests were sent. It is part of their latency; if it is not a small part, the load generator was
    the bottleneck.
    """
    answered = [each for each in measured if not each.refused]
    seconds = max(each.end for each in measured)
    output_tokens = sum(each.output_tokens for each in answered)
    refused = len(measured) - len(answered)
    return {
        **workloads.totals(work),
        "output_tokens": output_tokens,
        "refused": refused,
        "refused_share": round(refused / len(measured), 4),
        "seconds": round(seconds, 4),
        "requests_per_s": round(len(answered) / seconds, 3),
        "output_tokens_per_s": round(output_tokens / seconds, 1),
        "ttft_s": percentiles([each.ttft for each in answered]),
        "itl_s": percentiles([gap for each in answered for gap in each.gaps]),
        "e2e_s": percentiles([each.e2e for each in answered]),
        "late_s": percentiles([each.sent - each.due for each in measured]),
        "each": [_one(each) for each in measured],
    }


def _one(seen: Measured) -> dict:
    first = None if seen.refused else round(seen.arrivals[0][0], 5)
    times = {"due": round(seen.due, 5), "first_token": first, "end": round(seen.end, 5)}
    return times | {"output_tokens": seen.output_tokens}


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """p50, p90, p99 (nearest rank: each is a value that was seen) and the mean; None without values."""
    if not values:
        return dict.fromkeys([*(f"p{p}" for p in PERCENTILES), "mean"])
    ranked = sorted(values)
    found: dict[str, float | None] = {f"p{p}": round(ranked[-(-p * len(ranked) // 100) - 1], 6) for p in PERCENTILES}
    return found | {"mean": round(statistics.fmean(values), 6)}


def arriving(result: dict) -> str:
    """How a result's requests arrived, in words."""
    if result["arrival"] == "poisson":
        return f"{result['rate']:g} a second"
    if result["arrival"] == "given":
        return "when due"
    if result["arrival"] == "trace":
        return f"as traced, {result['speed']:g} times as fast"
    return f"{result['concurrency']} at a time"


def generator_share(result: dict) -> float:
    """The share of a run's time that the load generator itself worked: close to 1, it was the bottleneck."""
    return result["generator_s"] / result["seconds"]


def table(result: dict) -> str:
    """One result as text: rates, then latencies in milliseconds."""
    lines = [
        f"{result['requests']} requests, {arriving(result)}: {result['requests_per_s']:.2f} requests/s,"
        f" {result['output_tokens_per_s']:,.0f} output tokens/s, {result['seconds']:.2f} s in all"
    ]
    if result["refused"]:
        lines.append(f"{result['refused']} refused ({result['refused_share']:.1%}): the server's queue was full")
    busy = generator_share(result)
    if busy > GENERATOR_BUSY:
        lines.append(f"the load generator worked for {busy:.0%} of that time: the server is faster than this shows")
    lines.append(f"{'milliseconds':<22}" + "".join(f"{name:>10}" for name in ("p50", "p90", "p99", "mean")))
    labels = {"ttft_s": "time to first token", "itl_s": "between tokens", "e2e_s": "whole answer"}
    if result["arrival"] != "closed loop":
        labels["late_s"] = "sent after due"
    for name, label in labels.items():
        values = result[name].values()
        lines.append(f"{label:<22}" + "".join(f"{'-' if v is None else format(v * 1e3, '.1f'):>10}" for v in values))
    return "\n".join(lines)


def _local(url: str) -> str:
    """The URL, if it names this machine. Raises ConfigError otherwise."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if parts.scheme != "http" or not local:
        raise ConfigError(f"the load generator sends only to this machine (http://127.0.0.1:PORT), not to {url!r}")
    return url.rstrip("/").removesuffix("/v1")
