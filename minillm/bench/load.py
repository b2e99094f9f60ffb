"""A load generator: many clients streaming completions from a server on this machine.  Lesson 99.

It measures what a user feels: time to first token (TTFT), the gaps between tokens (inter-token latency, ITL),
the whole answer (end to end), and what the server's owner counts: requests and tokens a second. Traffic goes to
this machine's own addresses only.
"""

import asyncio
import ipaddress
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from . import records, workloads
from .workloads import BenchRequest

PERCENTILES = (50, 90, 99)


@dataclass
class Measured:
    """One request as its client saw it; times in seconds from when it was sent."""

    output_tokens: int = 0
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens that came with it)
    end: float = 0.0
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.arrivals[0][0]

    @property
    def gaps(self) -> Iterable[float]:
        """Seconds before each token but the first; tokens that came together had no gap between them."""
        last = self.ttft
        for when, tokens in self.arrivals[1:]:
            yield when - last
            yield from [0.0] * (tokens - 1)
            last = when


def run(
    url: str = "http://127.0.0.1:8000",
    *,
    workload: str = "chat",
    scale: int = 8,
    requests: int | None = 64,
    concurrency: int = 8,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    timeout: float = 600.0,
    json_path: str | Path | None = None,
    quiet: bool = False,
) -> dict:
    """Load a running server in a closed loop and return the record; prints a table and, last, one JSON line.

    url: the server, without /v1; only an address of this machine. concurrency: clients, each sending its next
    request when its last is answered. vocab_size: ids to draw prompts from (default: what /v1/models tells).
    timeout: seconds for all of it. Works inside a notebook too. Raises ValueError for another machine's
    address, ConnectionError when nothing answers, RuntimeError when a request failed.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be a whole number from 1, not {concurrency!r}")
    base = _local(url)

    async def work() -> dict:
        async with asyncio.timeout(timeout):
            return await _load(base, workload, scale, requests, concurrency, temperature, vocab_size)

    with ThreadPoolExecutor(1) as thread:  # a notebook's own loop is running in this one
        result = thread.submit(asyncio.run, work()).result()
    content = records.record([result])
    if json_path is not None:
        records.write(content, json_path)
    if not quiet:
        print(table(result), flush=True)
        print(json.dumps(content))
    return content


async def _load(base, workload, scale, requests, concurrency, temperature, vocab_size) -> dict:
    import httpx

    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(base_url=base, timeout=None, limits=limits) as client:
        try:
            answer = await client.get("/v1/models", timeout=10)
        except httpx.TransportError as error:
            raise ConnectionError(f"no server answers at {base} ({error}): start one with `minillm serve`") from None
        card = answer.raise_for_status().json()["data"][0]
        work = workloads.make(workload, vocab_size or card["vocab_size"], scale=scale, requests=requests)
        await _ask(client, card["id"], work[0], temperature)  # the first request pays for connections and caches
        start = time.perf_counter()
        measured = await closed_loop(client, card["id"], work, concurrency, temperature)
        seconds = time.perf_counter() - start
    failed = [each.error for each in measured if each.error]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(measured)} requests failed, the first with: {failed[0]}")
    facts = {
        "engine": "minillm serve",
        "workload": workloads.find(workload).name,
        "model": card["id"],
        "scale": scale,
    }
    facts |= {"concurrency": concurrency, "temperature": temperature, "dtype": card.get("dtype")}
    return facts | summary(work, measured, seconds)


async def closed_loop(client, model: str, work: Sequence[BenchRequest], concurrency: int, temperature: float):
    """`concurrency` clients take the requests in order, each its next one when its last is answered."""
    queue = iter(enumerate(work))
    measured: list[Measured | None] = [None] * len(work)

    async def one_client() -> None:
        for index, request in queue:
            measured[index] = await _ask(client, model, request, temperature)

    await asyncio.gather(*(one_client() for _ in range(min(concurrency, len(work)))))
    return measured


async def _ask(client, model: str, request: BenchRequest, temperature: float) -> Measured:
    """Stream one completion, and note when its tokens came."""
    body = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.output_tokens,
        "temperature": temperature,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    seen = Measured()
    start = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            seen.error = (await response.aread()).decode()
            return seen
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            now = time.perf_counter() - start
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                seen.error = chunk["error"]["message"]
                break
            tokens = sum(len(choice["token_ids"]) for choice in chunk["choices"])
            if tokens:
                seen.arrivals.append((now, tokens))
    seen.end = time.perf_counter() - start
    seen.output_tokens = sum(tokens for _, tokens in seen.arrivals)
    if seen.error is None and seen.output_tokens != request.output_tokens:
        seen.error = f"{seen.output_tokens} tokens came where {request.output_tokens} were asked for"
    return seen


def summary(work: Sequence[BenchRequest], measured: Sequence[Measured], seconds: float) -> dict:
    """Rates, and percentiles of what the clients saw."""
    totals = workloads.totals(work)
    return totals | {
        "seconds": round(seconds, 4),
        "requests_per_s": round(totals["requests"] / seconds, 3),
        "output_tokens_per_s": round(totals["output_tokens"] / seconds, 1),
        "ttft_s": percentiles([each.ttft for each in measured]),
        "itl_s": percentiles([gap for each in measured for gap in each.gaps]),
        "e2e_s": percentiles([each.end for each in measured]),
    }


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """p50, p90, p99 (nearest rank: each is a value that was seen) and the mean; None without values."""
    if not values:
        return dict.fromkeys([*(f"p{p}" for p in PERCENTILES), "mean"])
    ranked = sorted(values)
    found = {f"p{p}": round(ranked[-(-p * len(ranked) // 100) - 1], 6) for p in PERCENTILES}
    return found | {"mean": round(statistics.fmean(values), 6)}


def table(result: dict) -> str:
    """One result as text: rates, then latencies in milliseconds."""
    lines = [
        f"{result['requests']} requests, {result['concurrency']} at a time: {result['requests_per_s']:.2f} requests/s,"
        f" {result['output_tokens_per_s']:,.0f} output tokens/s, {result['seconds']:.2f} s in all",
        f"{'milliseconds':<22}" + "".join(f"{name:>10}" for name in ("p50", "p90", "p99", "mean")),
    ]
    labels = {"ttft_s": "time to first token", "itl_s": "between tokens", "e2e_s": "whole answer"}
    for name, label in labels.items():
        values = result[name].values()
        lines.append(f"{label:<22}" + "".join(f"{'-' if v is None else format(v * 1e3, '.1f'):>10}" for v in values))
    return "\n".join(lines)


def _local(url: str) -> str:
    """The URL, if it names this machine. Raises ValueError otherwise."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if parts.scheme != "http" or not local:
        raise ValueError(f"the load generator only loads this machine (http://127.0.0.1:PORT), not {url!r}")
    return url.rstrip("/").removesuffix("/v1")
