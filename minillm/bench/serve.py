"""`minillm bench serve`: clients stream completions from a server on this machine.  Lesson 99.

It measures what a user feels: time to first token (TTFT), the gaps between tokens (inter-token latency, ITL),
the whole answer (end to end), and what the operator counts: requests and tokens per second. Requests arrive in a
closed loop, as a Poisson process, or as in a trace. Traffic goes only to this machine's own addresses. `clients` has
the clients, `generators` the processes that they run in.
"""

import ipaddress
import itertools
import json
import math
import statistics
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from minillm.errors import ConfigError, Unreachable

from . import generators as processes
from . import records, workloads
from .clients import Measured, Target
from .generators import LoadError
from .workloads import BenchRequest

__all__ = ["PERCENTILES", "LoadError", "Measured", "generator_share", "percentiles", "run", "summary", "table"]
PERCENTILES = (50, 90, 99)
CONCURRENCY = 8
SCALE = 8
REQUESTS = 64
CARD_TIMEOUT = 10  # seconds for the list of models
GENERATOR_BUSY = 0.7  # above this share of a run the load generator's own work distorts the measurement


def run(
    url: str = "http://127.0.0.1:8000",
    *,
    concurrency: int | None = None,
    rate: float | None = None,
    trace: str | Path | None = None,
    speed: float | None = None,
    due: Sequence[float] | None = None,
    workload: str = "chat",
    input_len: int | None = None,
    output_len: int | None = None,
    scale: int | None = None,
    requests: int | None = REQUESTS,
    warmup: int = 1,
    generators: int = 1,
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

    scale divides lengths (8), requests takes the first so many. input_len and output_len replace the workload by
    requests of exactly these lengths. seed: of prompts and Poisson arrivals; a run with another seed meets none of its
    prompts in the server's prefix cache. vocab_size: ids to draw prompts from (default: the one that /v1/models
    reports). warmup: this many requests first, in no figure. timeout: seconds for the whole run. plot_path: save a plot
    of the record. Works inside a notebook too.

    generators: processes that share the clients. generator_s is the processor time of the busiest: if it is close to
    the run's time, the generator was the bottleneck, and more processes help.
    Requests answered 429 (queue full) are counted as refused; all other figures are those of answered ones.
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

    count = requests if due is None else len(due)
    scale, chosen = _lengths(workload, input_len, output_len, count, scale, trace)
    processes.check_count(generators)
    if not isinstance(warmup, int) or warmup < 0:
        raise ConfigError(f"warmup must be a whole number of requests from 0, not {warmup!r}")

    def make(vocabulary: int) -> list[BenchRequest]:
        if trace is not None:
            pace = arrival["speed"]
            return workloads.replay(trace, vocabulary, scale=scale, requests=requests, speed=pace, seed=seed)
        made = workloads.make(chosen, vocabulary, scale=scale, requests=count, seed=seed)
        if due is not None:
            return [replace(request, due=when) for request, when in zip(made, due, strict=True)]
        return made if rate is None else workloads.poisson(made, rate, seed=seed)

    card = _card(base)
    work = make(vocab_size or card["vocab_size"])
    measured, busy = processes.run(
        Target(base, card["id"], temperature),
        work,
        arrival.get("concurrency"),
        generators=generators,
        warmup=_warmup(work, warmup),
        timeout=timeout,
    )
    failed = [each.error for each in measured if each.error]
    if failed:
        raise LoadError(f"{len(failed)} of {len(measured)} requests failed, the first with: {failed[0]}")
    name = f"trace_{Path(trace).stem}" if trace is not None else chosen.name
    facts = {"engine": "minillm serve", "workload": name, "scale": scale, "seed": seed, "temperature": temperature}
    result = {"warmup": warmup, "generators": len(busy), "model": card["id"], "dtype": card.get("dtype")}
    result |= summary(work, measured) | {"generator_s": round(max(busy), 4)}
    content = records.record([facts | arrival | result], begun)
    if not quiet:
        print(table(content["results"][0]), flush=True)
        print(json.dumps(content | {"results": [{k: v for k, v in content["results"][0].items() if k != "each"}]}))
    if json_path is not None:
        records.write(content, json_path)
    if plot_path is not None:
        plots.save(content, plot_path)
    return content


def _lengths(
    workload: str,
    input_len: int | None,
    output_len: int | None,
    requests: int | None,
    scale: int | None,
    trace: str | Path | None,
) -> tuple[int, workloads.Workload]:
    """By what to divide lengths, and the workload that has them. Raises ConfigError."""
    if input_len is None and output_len is None:
        return SCALE if scale is None else scale, workloads.find(workload)
    if input_len is None or output_len is None:
        raise ConfigError("input_len and output_len go together: give both, or name a workload")
    if scale is not None or trace is not None:
        other = "scale" if scale is not None else "trace"
        raise ConfigError(f"input_len and output_len are exact lengths: leave {other} out")
    return 1, workloads.exact(input_len, output_len, requests or REQUESTS)


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


def _card(base: str) -> dict[str, Any]:
    """The first model that the server lists. Raises Unreachable or LoadError."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{base}/v1/models", timeout=CARD_TIMEOUT) as answer:
            return json.load(answer)["data"][0]
    except urllib.error.HTTPError as error:
        raise LoadError(f"{base}/v1/models answered with status {error.code}") from None
    except (OSError, HTTPException) as error:
        raise Unreachable(f"no server answers at {base} ({error}): start one with `minillm serve`") from None
    except (ValueError, LookupError, TypeError):
        raise LoadError(f"{base}/v1/models did not answer with a list of models") from None


def _warmup(work: Sequence[BenchRequest], count: int) -> list[BenchRequest]:
    """Requests as long as the first `count`; their prompts put no prefix of the measured ones into a cache."""
    chosen = itertools.islice(itertools.cycle(work), count)
    return [BenchRequest([*each.prompt[::-1]], each.output_tokens) for each in chosen]


def summary(work: Sequence[BenchRequest], measured: Sequence[Measured]) -> dict:
    """Rates, and percentiles of what the clients of answered requests saw; `each` has the requests one by one.

    tokens_per_event: how many tokens an event of a stream brought on average. late_s: how late requests were sent. It
    is part of their latency; if it is not a small part, the load generator was the bottleneck.
    """
    answered = [each for each in measured if not each.refused]
    seconds = max(each.end for each in measured)
    output_tokens = sum(each.output_tokens for each in answered)
    events = sum(len(each.arrivals) for each in answered)
    refused = len(measured) - len(answered)
    return {
        **workloads.totals(work),
        "output_tokens": output_tokens,
        "refused": refused,
        "refused_share": round(refused / len(measured), 4),
        "seconds": round(seconds, 4),
        "requests_per_s": round(len(answered) / seconds, 3),
        "output_tokens_per_s": round(output_tokens / seconds, 1),
        "tokens_per_event": round(output_tokens / events, 4) if events else None,
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
        lines.append(
            f"a load generator worked for {busy:.0%} of that time: the server is faster than this shows; "
            "give it more processes with --generators"
        )
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
