"""More requests than the server can answer."""

import asyncio
import contextlib
import json
import random
import time
from dataclasses import dataclass, field

from .clients import case, completion, head, post, serving

ROWS = 8  # requests in a step: on a CPU, more make each step slower than they make it productive
TOKENS = 48  # of each answer


@dataclass
class Seen:
    """What the clients of a load saw: seconds between tokens, until a refusal, and counts by status."""

    gaps: list[float] = field(default_factory=list)
    refusals: list[float] = field(default_factory=list)
    retry_after: list[int] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    whole: int = 0

    def report(self) -> dict:
        return {
            "statuses": {str(status): self.statuses[status] for status in sorted(self.statuses)},
            "whole": self.whole,
            "itl_p50_ms": quantile(self.gaps, 0.5),
            "itl_p99_ms": quantile(self.gaps, 0.99),
            "refused_p50_ms": quantile(self.refusals, 0.5),
            "refused_p99_ms": quantile(self.refusals, 0.99),
            "retry_after_s": [min(self.retry_after), max(self.retry_after)] if self.retry_after else None,
        }


def quantile(seconds: list[float], share: float) -> float | None:
    """In milliseconds."""
    ordered = sorted(seconds)
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1) if ordered else None


async def one(port: int, seen: Seen) -> None:
    path, body = completion(prompt="Once upon a time", max_tokens=TOKENS, ignore_eos=True, stream=True)
    start = time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        seen.statuses[0] = seen.statuses.get(0, 0) + 1
        return
    status = 0
    try:
        writer.write(head(path, len(body)) + body)
        top = await reader.readuntil(b"\r\n\r\n")
        status = int(top.split()[1])
        if status == 429:
            seen.refusals.append(time.perf_counter() - start)
            wait = [line.split(b":")[1] for line in top.lower().splitlines() if line.startswith(b"retry-after")]
            seen.retry_after += map(int, wait)
            return
        last = None
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                seen.whole += 1
                return
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                if last is not None:
                    seen.gaps.append(now - last)
                last = now
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        seen.statuses[status] = seen.statuses.get(status, 0) + 1
        writer.transport.abort()


async def arrivals(port: int, rate: float, seconds: float, seed: int = 0) -> Seen:
    """Poisson arrivals at `rate` requests per second; returns when all of them have ended."""
    chance, seen, tasks = random.Random(seed), Seen(), []
    end = time.perf_counter() + seconds
    due = time.perf_counter()
    while due < end:
        await asyncio.sleep(max(0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(one(port, seen)))
        due += chance.expovariate(rate)
    await asyncio.gather(*tasks)
    return seen


async def capacity(port: int, seconds: float) -> float:
    """Requests per second with twice as many clients as rows."""
    seen, end = Seen(), time.perf_counter() + seconds

    async def client() -> None:
        while time.perf_counter() < end:
            await one(port, seen)

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(2 * ROWS)))
    return seen.whole / (time.perf_counter() - start)


@case
async def overload(seconds: float = 120, times: float = 10) -> dict:
    """Ten times the server's capacity for two minutes, next to 80% of it for half a minute."""
    async with serving("--max-num-seqs", str(ROWS), "--max-queued", str(4 * ROWS)) as server:
        await capacity(server.port, 3)
        most = await capacity(server.port, 15)
        calm = await arrivals(server.port, 0.8 * most, 30)
        before, peak = server.memory(), server.memory()
        done = asyncio.create_task(arrivals(server.port, times * most, seconds, seed=1))
        while not done.done():
            now = server.memory()
            peak = {name: max(peak[name], now[name]) for name in now}
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(done), 0.5)
        flood = done.result()
        again, *_ = await post(server.port, *completion())
        itl = [json.loads(json.dumps(each.report()))["itl_p99_ms"] for each in (calm, flood)]
        return {
            "capacity_requests_per_s": round(most, 1),
            "rows": ROWS,
            "tokens_each": TOKENS,
            "at_80_percent": calm.report(),
            "overload": {"times": times, "seconds": seconds} | flood.report(),
            "itl_p99_ratio": round(itl[1] / itl[0], 2),
            "memory": {"before": before, "peak": peak, "after": server.memory()},
            "answers_again": again,
        }
